"""The activation family's operator: cache keys, checks, outputs, reference, gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.activations import ACTIVATIONS
from ..core.calls import checks
from ..core.calls.function import vjp
from ..core.calls.operator import Axes, Dtypes, Operator, axes_of_rows
from ..core.calls.operators import site_of
from ..core.calls.registration import define
from ..core.launches import launch
from ..core.launches.operand import empty, empty_dense
from ..core.random.dropout import Dropout
from ..core.random.dropout import none as no_dropout
from . import launching, reference
from .reference import accumulator
from .site import ActivationConstants, ActivationSite

__all__ = ["ACTIVATION"]


class ActivationOperator(Operator):
    """``dropout(activation(x + other))``, or ``activation(x) * other``."""

    name = "activation"
    constants = ActivationConstants
    tensors = ("x", "other")
    outputs = ("y",)
    saved = ("saved_x", "saved_other")
    by_rows = False  # kernels without a bias read any dense layout

    @staticmethod
    def key(mode: int, constants: Any, tensors: Any) -> Hashable:
        """Returns all that `check` reads: types, dtypes, devices, and the sizes of last dimensions.

        The number of rows is not in the key: it is not checked, and differs from batch to batch.
        """
        x, other = tensors
        shape = x.shape
        cols = shape[-1] if shape else None
        if other is None:
            return mode, constants, type(x), x.dtype, x.device, cols
        # The key has the shape of a bias. Up has rows, so for up the key has only whether its shape
        # is that of x.
        checked_shape = other.shape if constants.kind == "bias" else other.shape == shape
        return (
            mode,
            constants,
            type(x),
            x.dtype,
            x.device,
            cols,
            type(other),
            other.dtype,
            other.device,
            checked_shape,
        )

    def check(
        self, constants: ActivationConstants, tensors: Any, *, nested: bool
    ) -> ActivationConstants:
        """Checks everything but p; see `Operator`. Autocast changes no activation."""
        if not nested:
            self._check_tensors(constants, tensors)
        checks.check_choice(constants.op, "activation", constants.activation, ACTIVATIONS)
        return constants

    def _check_tensors(self, constants: ActivationConstants, tensors: Any) -> None:
        op, kind = constants.op, constants.kind
        x, other = tensors
        x_name, other_name = _arguments(constants)
        checks.check_tensor(op, x_name, x)
        needs_dimension = kind == "packed" or other is not None
        if x.dim() == 0 and needs_dimension:
            raise ValueError(f"{op}: {x_name} must have at least one dimension, got a scalar")
        if kind == "packed" and x.shape[-1] % 2:
            shape = tuple(x.shape)
            raise ValueError(
                f"{op}: gate has shape {shape}, expected an even last dimension as up is None"
            )
        if other is not None:
            expected = x.shape[-1:] if kind == "bias" else x.shape
            checks.check_tensor(op, other_name, other, x)
            checks.check_shape(op, other_name, other, tuple(expected))

    def cols(self, constants: ActivationConstants, tensors: Any) -> int:
        """Returns the width of an output's row, -1 if the kernels do not support it."""
        x = tensors[0]
        cols = x.shape[-1] if x.dim() else 1
        if cols > launch.LONGEST_ROW:
            return -1
        return cols // 2 if constants.kind == "packed" else cols

    def site(
        self,
        constants: ActivationConstants,
        dtypes: Dtypes,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> ActivationSite:
        """See `Operator`."""
        x, other = dtypes
        assert x is not None
        y = x if other is None else torch.promote_types(x, other)
        # If no element depends on its position, kernels read the tensors as vectors. A mask depends
        # on the position, a bias on the column, and packed rows on the width.
        is_activation_alone = constants.kind == "bias" and other is None and not dropout
        elementwise = is_activation_alone or constants.kind == "glu"
        vector = None
        # The site with a width of 0 is for vectors of any length. It has no further site itself.
        if cols and elementwise:
            vector = site_of(self, constants, dtypes, 0, device_index, dropout=dropout, saves=saves)
        return ActivationSite(
            constants,
            device_index,
            cols,
            dtypes,
            dropout,
            saves,
            acc=accumulator(y),
            outs=(True,),
            returned=1,
            saved=itemgetter(0, 1),  # x and other
            y=y,
            vector=vector,
            native=_native(constants, dtypes),
        )

    def argument(self, constants: ActivationConstants, position: int) -> str:
        """See `Operator`."""
        return _arguments(constants)[position]

    def axes(self, constants: ActivationConstants, tensors: Any) -> Axes:
        """See `Operator`. Up has rows, and a bias has none.

        Packed rows are not split along their columns: a rank's shard would have the gate of some
        columns and the up of others.
        """
        return axes_of_rows(
            tensors,
            first=0,
            dims=1,
            columns=self.cols(constants, tensors),
            carriers=(0,) if constants.kind == "bias" else (0, 1),
            are_split=constants.kind != "packed",
            outputs=1,
        )

    # --- PyTorch's operators ----------------------------------------------------------------------

    def reference(
        self, constants: ActivationConstants, tensors: Any, dropout: Dropout
    ) -> tuple[Tensor]:
        """Returns the output by PyTorch's operators: see `Operator` and `reference`."""
        x, other = tensors
        formula = ACTIVATIONS[constants.activation].formula
        if constants.kind != "bias":
            y = reference.glu(x, other, formula)
        elif x.is_nested and other is None and dropout is no_dropout:
            return (formula(x),)  # like PyTorch, without casts
        else:
            y = reference.bias_act(x, other, formula, dropout)
        # Like the kernels, this never returns the caller's own tensor.
        return (y.clone() if y is x else y,)

    def derivative(
        self,
        site: ActivationSite,
        grads: Any,
        saved: Any,
        dropout: Callable[[Tensor], Dropout],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the reference implementation, computed in the kernels' dtype."""
        formula = site.activation.formula
        primals = [None if t is None else t.to(site.acc) for t in saved]
        is_bias = site.kind == "bias"
        dropped = dropout(saved[0]) if is_bias else no_dropout

        def function(x: Tensor, other: Tensor | None) -> tuple[Tensor]:
            if is_bias:
                return (reference.bias_act(x, other, formula, dropped),)
            return (reference.glu(x, other, formula),)

        gradients = vjp(function, primals, [grads[0].to(site.acc)], needs)
        pairs = zip(gradients, site.dtypes, strict=True)
        return [None if grad is None else grad.to(dtype) for grad, dtype in pairs]

    # --- kernels ----------------------------------------------------------------------------------

    def allocate(self, site: ActivationSite, tensors: Any) -> tuple[Tensor]:
        """Returns the uninitialised output.

        It has the layout of x, like the output of PyTorch's activations, if x is dense and no
        element depends on its column. Otherwise it is contiguous.
        """
        x = tensors[0]
        if site.kind == "packed":
            return (x.new_empty((*x.shape[:-1], site.cols)),)
        allocate = empty if site.vector is None else empty_dense
        return (allocate(x, site.y),)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def allocate_gradients(
        self, site: ActivationSite, grads: Any, saved: Any, needed: Any
    ) -> tuple[Tensor | None, ...]:
        """Returns uninitialised ``(dx, dother)``, in the shapes of x and other."""
        x, other = saved
        allocate = empty if site.vector is None else empty_dense
        dx = allocate(x, x.dtype) if needed[0] else None
        dother = allocate(other, other.dtype) if needed[1] else None
        return dx, dother


def _arguments(constants: ActivationConstants) -> tuple[str, str]:
    """Returns the names that the functional has for x and other."""
    if constants.kind != "bias":
        return "gate", "up"
    x_name = "input" if constants.op == "gelu" else "x"
    return x_name, "bias"


def _native(constants: ActivationConstants, dtypes: Dtypes) -> Callable[..., Any] | None:
    """Returns `F.gelu` if it computes the same call, and else None."""
    _, bias = dtypes
    if constants.kind != "bias" or bias is not None:
        return None
    return _gelu if constants.activation in ("gelu", "gelu_tanh") else None


def _gelu(constants: ActivationConstants, tensors: Any) -> Tensor:
    return F.gelu(tensors[0], approximate="none" if constants.activation == "gelu" else "tanh")


ACTIVATION = ActivationOperator()
define(ACTIVATION)
