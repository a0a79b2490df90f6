"""The activation family's operator: what its calls depend on, their checks, outputs and reference implementation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import checks, launch
from ..core.activations import ACTIVATIONS, Activation
from ..core.dropout import Dropout
from ..core.dropout import none as no_dropout
from ..core.function import vjp
from ..core.operand import empty, empty_dense
from ..core.operator import Constants, Dtypes, Operator, Site
from ..core.operators import encode, site_of
from ..core.registration import define
from . import launching, reference
from .reference import accumulator

__all__ = ["ACTIVATION", "ActivationConstants", "ActivationSite", "Kind"]

# "bias": activation(x + bias), dropped out. "glu": activation(gate) * up. "packed": the same, up behind gate in x.
Kind = Literal["bias", "glu", "packed"]


@dataclass(frozen=True)
class ActivationConstants(Constants):
    """The constants of an activation's call: which function, and the activation's name."""

    kind: Kind
    activation: str

    def words(self) -> tuple[str, ...]:
        """See `Constants`."""
        return self.kind, self.activation

    @classmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> ActivationConstants:
        """See `Constants`."""
        return cls(*words)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class ActivationSite(Site):
    """What of an activation's call stays the same from step to step.

    Attributes:
        y: the output's dtype.
        vector: for an output whose elements depend on no column and no place, the site without a width; else None.
    """

    y: torch.dtype
    vector: ActivationSite | None

    @property
    def kind(self) -> Kind:
        """Which function."""
        return self.constants.kind  # type: ignore[no-any-return]

    @property
    def activation(self) -> Activation:
        """The activation's entry in the table."""
        return ACTIVATIONS[self.constants.activation]


class ActivationOperator(Operator):
    """``dropout(activation(x + other))``, or ``activation(x) * other``."""

    name = "activation"
    constants = ActivationConstants
    tensors = ("x", "other")
    outputs = ("y",)
    saved = ("kept", "kept_other")
    rows = frozenset(("x", "y", "kept"))

    record = staticmethod(ActivationConstants)

    @staticmethod
    def key(arguments: Any, tensors: Any) -> Hashable:
        """Every shape, dtype, type and device that the checks look at; of rows the last dimension alone."""
        x, other = tensors
        shape = x.shape
        cols = shape[-1] if shape else None
        if other is None:
            return arguments, type(x), x.dtype, x.device, cols
        fits = other.shape if arguments[1] == "bias" else other.shape == shape
        return arguments, type(x), x.dtype, x.device, cols, type(other), other.dtype, other.device, fits

    def check(self, constants: ActivationConstants, tensors: Any) -> None:
        """All that can be wrong but p."""
        op, kind = constants.op, constants.kind
        x, other = tensors
        first, second = _arguments(constants)
        checks.check_tensor(op, first, x)
        if x.dim() == 0 and (kind == "packed" or other is not None):
            raise ValueError(f"{op}: {first} must have at least one dimension, got a scalar")
        if kind == "packed" and x.shape[-1] % 2:
            raise ValueError(f"{op}: gate has shape {tuple(x.shape)}, expected an even last dimension as up is None")
        if other is not None:
            checks.check_tensor(op, second, other, x)
            checks.check_shape(op, second, other, tuple(x.shape[-1:] if kind == "bias" else x.shape))
        self.check_constants(constants)

    def check_constants(self, constants: ActivationConstants) -> None:
        """The activation is one of the table's."""
        checks.check_choice(constants.op, "activation", constants.activation, ACTIVATIONS)

    def cols(self, constants: ActivationConstants, tensors: Any) -> int:
        """The width of an output's row."""
        x = tensors[0]
        cols = x.shape[-1] if x.dim() else 1
        if cols > launch.LONGEST_ROW:
            return -1
        return cols // 2 if constants.kind == "packed" else cols

    def site(self, constants: ActivationConstants, dtypes: Dtypes, cols: int, device_index: int, *, dropout: bool,
             saves: bool) -> ActivationSite:  # fmt: skip
        """See `Operator`."""
        x, other = dtypes
        assert x is not None
        y = x if other is None else torch.promote_types(x, other)
        vector = None
        if cols and (constants.kind == "glu" or (constants.kind == "bias" and other is None and not dropout)):
            vector = site_of(self, constants, dtypes, 0, device_index, dropout, saves)
        return ActivationSite(constants, device_index, cols, dtypes, dropout, saves, accumulator(y), (True,), 1,
                              itemgetter(0, 1), encode(constants, dtypes, saves), y, vector)  # fmt: skip

    def has_rows(self, constants: ActivationConstants, name: str) -> bool:
        """See `Operator`; up has, a bias has none."""
        return name in self.rows or (constants.kind != "bias" and name in ("other", "kept_other"))

    def has_columns(self, constants: ActivationConstants) -> bool:
        """See `Operator`; of a packed tensor no rank has the same columns of both halves."""
        return constants.kind != "packed"

    def argument(self, constants: ActivationConstants, place: int) -> str:
        """See `Operator`."""
        return _arguments(constants)[place]

    # --- PyTorch's operators --------------------------------------------------------------------------------------------

    def native(self, constants: ActivationConstants, dtypes: Dtypes) -> Callable[..., Any] | None:
        """`F.gelu`."""
        alone = constants.kind == "bias" and dtypes[1] is None
        return _gelu if alone and constants.activation in ("gelu", "gelu_tanh") else None

    def reference(self, constants: ActivationConstants, tensors: Any, dropout: Dropout) -> tuple[Tensor]:
        """See `reference`."""
        x, other = tensors
        formula = ACTIVATIONS[constants.activation].formula
        if x.is_nested and constants.kind == "bias" and other is None and dropout is no_dropout:
            return (formula(x),)
        biased = constants.kind == "bias"
        y = reference.bias_act(x, other, formula, dropout) if biased else reference.glu(x, other, formula)
        return (y.clone() if y is x else y,)  # as from the kernels: never the caller's own tensor

    def derivative(self, site: ActivationSite, grads: Any, saved: Any, dropout: Callable[[Tensor], Dropout],
                   needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
        """Of the reference implementation, in the dtype that kernels compute in."""
        formula, primals = site.activation.formula, [None if t is None else t.to(site.acc) for t in saved]
        if site.kind == "bias":
            dropped = dropout(saved[0])
            function = lambda x, other: (reference.bias_act(x, other, formula, dropped),)  # noqa: E731
        else:
            function = lambda x, other: (reference.glu(x, other, formula),)  # noqa: E731
        found = vjp(function, primals, [grads[0].to(site.acc)], needs)
        return [None if g is None else g.to(dtype) for g, dtype in zip(found, site.dtypes, strict=True)]

    # --- kernels --------------------------------------------------------------------------------------------------------

    def allocate(self, site: ActivationSite, tensors: Any) -> tuple[Tensor]:
        """The output; what depends on no columns has the layout of a dense x, as PyTorch's activations."""
        x = tensors[0]
        if site.kind == "packed":
            return (x.new_empty((*x.shape[:-1], site.cols)),)
        return ((empty if site.vector is None else empty_dense)(x, site.y),)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def allocate_gradients(self, site: ActivationSite, grads: Any, saved: Any,
                           needed: Any) -> tuple[Tensor | None, ...]:  # fmt: skip
        """``(dx, dother)``, in the shapes of x and other."""
        x, other = saved
        make = empty if site.vector is None else empty_dense
        return make(x, x.dtype) if needed[0] else None, make(other, other.dtype) if needed[1] else None


def _arguments(constants: ActivationConstants) -> tuple[str, str]:
    if constants.kind != "bias":
        return "gate", "up"
    return "input" if constants.op == "gelu" else "x", "bias"


def _gelu(constants: ActivationConstants, tensors: Any) -> Tensor:
    return F.gelu(tensors[0], approximate="none" if constants.activation == "gelu" else "tanh")


ACTIVATION = ActivationOperator()
define(ACTIVATION)
