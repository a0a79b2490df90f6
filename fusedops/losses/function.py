"""Any row-wise loss of ``input @ weight.T``, the logits never whole: `linear_rowwise`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..compiler.function import Rowwise
from ..core.calls import checks
from ..core.compat.dispatch import in_forward_mode, transforms
from ..core.compat.dynamo import is_exporting, transforms_when_traced
from ..core.launches import launch
from ..distributed.sharding import distributes
from . import registration
from .adapters import Pair, added_products, pairs_of
from .operands import Choice, Operands, has_autocast, has_values
from .reference import reference

__all__ = ["LinearRowwise", "linear_rowwise"]

_REDUCTIONS = ("sum", "mean", "none")
_Tensors = tuple[Tensor, ...]


def linear_rowwise(
    function: Callable[..., Any] | None = None,
    *,
    reduction: str = "sum",
    valid: Callable[..., Tensor] | None = None,
    shared: Sequence[str] = (),
    chunk_mib: float | None = None,
    strict: bool = False,
) -> Any:
    """Makes an operator of a row-wise function of logits, ``input @ weight.T``, never whole.

    The rows are processed in chunks: a matrix product, one kernel of the function, one of its
    gradient, which replaces the logits, and the products of the gradients. All of a chunk's memory
    is that of its logits.

    Args:
        function: ``function(logits, *others)`` in plain PyTorch, as for `fusedops.rowwise`; it
            returns a number for each row of logits (R, V), (R,), or a tuple of such tensors. As a
            decorator without it, this returns the decorator.
        reduction: "sum" or "mean" of the one result over the rows: the gradients are formed in the
            forward, with three products in all. "none": the results of each row; the backward
            computes the logits again, which is a fourth product.
        valid: ``valid(*others)`` returns which rows count, (M,) of truth values. Other rows have
            no products, and no part in a mean; their results are zero. It costs a synchronisation
            of host and device, except under a CUDA graph's capture, which computes all rows.
        shared: names of arguments that are the same for all rows, for example class weights (V,).
            Without its name here, such a tensor counts as one of rows in a call of V rows.
        chunk_mib: the most memory of a chunk's logits, in MiB; by default 512, or 1/32 of the
            device's memory if that is less, or more where sums in fp32 would take more.
        strict: whether a function that cannot be fused is an error. By default it runs on whole
            logits, with a warning.
    Returns:
        A `LinearRowwise`, which is called as ``op(input, linear_weight, *others,
        linear_bias=None)``.
    Raises:
        TypeError: the function is no function of Python, or ``strict`` no truth value.
        ValueError: the reduction is unknown, or ``chunk_mib`` is not positive.
    Example::

        @fusedops.linear_rowwise(reduction="mean")
        def poly_loss(logits, target):  # PolyLoss, arXiv:2204.12511
            log_p = torch.log_softmax(logits.float(), -1)
            log_p = log_p.gather(-1, target[:, None]).squeeze(-1)
            return -log_p + 1 - log_p.exp()

        loss = poly_loss(hidden, lm_head.weight, labels)
    Numerics: the function computes in fp32 from logits in the products' dtype. A weight's gradient
        in 16 bits is summed over up to 13 chunks in its dtype, with each product's sum in fp32,
        and in fp32 over more.
    """
    if function is None:
        return functools.partial(
            linear_rowwise,
            reduction=reduction,
            valid=valid,
            shared=shared,
            chunk_mib=chunk_mib,
            strict=strict,
        )
    return LinearRowwise(
        function,
        reduction=reduction,
        valid=valid,
        shared=shared,
        chunk_mib=chunk_mib,
        strict=strict,
    )


class LinearRowwise:
    """A row-wise function of a matrix product; `linear_rowwise` returns it.

    Attributes:
        function: the original function.
        reduction: "sum", "mean" or "none".
        valid: returns which rows count; None if all do.
        shared: names of arguments that are the same for all rows.
        chunk_mib: the budget of a chunk's logits in MiB; None for the default.
        strict: whether a function that cannot be fused is an error.
        rows: the function of logits as a `fusedops.rowwise` function.
        name: its name in messages.
        key: its name among all such functions of the process.
        combines: whether `combined` does more than return its arguments.
        count: how many results `combined` returns then.
    """

    combines = False
    count = 1

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        reduction: str = "sum",
        valid: Callable[..., Tensor] | None = None,
        shared: Sequence[str] = (),
        chunk_mib: float | None = None,
        strict: bool = False,
        name: str = "",
    ) -> None:
        if not isinstance(function, FunctionType):
            raise TypeError(
                f"linear_rowwise: takes a function of Python, got {type(function).__name__}"
            )
        if not isinstance(strict, bool):
            raise TypeError(
                f"linear_rowwise: strict has type {type(strict).__name__}, expected bool"
            )
        checks.check_choice("linear_rowwise", "reduction", reduction, _REDUCTIONS)
        check_budget("linear_rowwise", chunk_mib)
        functools.update_wrapper(self, function)
        self.function: Callable[..., Any] = function
        self.reduction, self.chunk_mib, self.strict = reduction, chunk_mib, strict
        self.name = name or function.__name__
        self.rows = Rowwise(function, strict=strict)
        # In a tuple for `guard`: see `compiler.function.Method`.
        self._rows = (self.rows,)
        self.valid = valid
        parameters = inspect.signature(function).parameters.values()
        self._signature = [(p.name, p.default) for p in parameters]
        self.shared = frozenset(shared)
        for missing in sorted(self.shared - inspect.signature(function).parameters.keys()):
            raise ValueError(f"{self.name}: shared names {missing!r}, which is no argument")
        self.key = registration.register(self)

    def __call__(
        self,
        input: Tensor | Sequence[Tensor],
        linear_weight: Tensor | Sequence[Tensor],
        *others: Any,
        linear_bias: Tensor | Sequence[Tensor | None] | None = None,
        lora: Pair | Sequence[Pair | None] | None = None,
    ) -> Any:
        """Returns the sum, mean or results of rows of the function.

        Args:
            input: (*, D), floating point; or one for each head: the function then takes as many
                logits first. Heads may have different D and V, and the same rows.
            linear_weight: (V, D); or one for each head.
            others: the function's other arguments. A tensor whose first dimensions are those of
                the rows, ``*``, is taken apart with them, unless it is ``shared``; any other is the
                same for all rows.
            linear_bias: (V,); or one for each head.
            lora: rows (*, R) and a weight (V, R), whose product is added to the logits, see
                `fusedops.linear_cross_entropy`; with several heads, such a pair or None for each.
        Returns:
            A scalar; with ``reduction="none"`` a tensor ``(*)`` for each result.
        Raises:
            TypeError: a tensor is not one of floating-point numbers, or dtypes differ.
            ValueError: shapes do not go together.
        """
        pairs = pairs_of(self.name, lora, isinstance(input, Tensor))
        tensors = [t for pair in pairs for t in pair or ()]
        if distributes((*_sequence(input), *_sequence(linear_weight), *tensors)):
            raise TypeError(
                f"{self.name}: input, linear_weight or lora is a DTensor, which only "
                "linear_cross_entropy and linear_log_probs take; pass this rank's rows and the "
                "whole weight as tensors"
            )
        return self.apply(input, linear_weight, others, linear_bias, self.chunk_mib, pairs)

    def apply(
        self,
        input: Any,
        linear_weight: Any,
        others: tuple[Any, ...],
        linear_bias: Any,
        chunk_mib: float | None,
        pairs: Sequence[Pair | None] = (),
    ) -> Any:
        """Returns what a call returns, with another budget.

        ``pairs`` has the rows and weight that are added to each head's logits, or None; it is
        empty if there are none.
        """
        checks.check_jit(self.name)
        inputs, weights = _sequence(input), _sequence(linear_weight)
        biases = (None,) * len(weights) if linear_bias is None else _sequence(linear_bias)
        self._check(inputs, weights, biases)
        products = added_products(self.name, pairs, inputs, weights)
        batch = inputs[0].shape[:-1]
        others = self._completed(len(inputs), others)
        by_row = tuple(
            [
                isinstance(t, Tensor) and t.shape[: len(batch)] == batch and name not in self.shared
                for t, (name, _) in zip(others, self._signature[len(inputs) :], strict=True)
            ]
        )
        rows = math.prod(batch)  # `batch.numel()` would make symbolic sizes constant
        operands = Operands(
            tuple([t.reshape(rows, t.shape[-1]) for t in (*inputs, *products.inputs)]),
            (*weights, *products.weights),
            (*biases, *[None] * len(products.heads)),
            tuple(
                [
                    t.reshape(rows, *t.shape[len(batch) :]) if is_by_row else t
                    for t, is_by_row in zip(others, by_row, strict=True)
                ]
            ),
            by_row,
            _dtype(inputs[0]),
            chunk_mib,
            products.heads,
        )
        results = self._results(operands)
        if self.reduction != "none":
            return results[0]
        shaped = tuple([result.reshape(batch) for result in results])
        return shaped[0] if len(shaped) == 1 else shaped

    def __reduce__(self) -> Any:
        """Pickles a decorated function by its name, as functions are; another by its function."""
        owner: Any = inspect.getmodule(self.function)
        qualified_name = self.function.__qualname__
        for name in qualified_name.split("."):
            owner = getattr(owner, name, None)
        if owner is self:
            return qualified_name
        options: dict[str, Any] = {
            "reduction": self.reduction,
            "valid": self.valid,
            "shared": tuple(self.shared),
            "chunk_mib": self.chunk_mib,
            "strict": self.strict,
            "name": self.name,
        }
        return functools.partial(type(self), **options), (self.function,)

    def __deepcopy__(self, memo: Any) -> LinearRowwise:
        """Returns the function itself, as of functions; a module may have it as an attribute."""
        return self

    def _completed(self, heads: int, others: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the other arguments with their defaults."""
        remaining = self._signature[heads + len(others) :]
        if heads + len(others) > len(self._signature):
            raise TypeError(
                f"{self.name}: {heads} logits and {len(others)} other arguments, expected "
                f"{', '.join([name for name, _ in self._signature])}"
            )
        for name, default in remaining:
            if default is inspect.Parameter.empty:
                raise TypeError(f"{self.name}: the argument {name!r} is missing")
        return (*others, *[default for _, default in remaining])

    def _results(self, operands: Operands) -> Sequence[Tensor]:
        if not launch.runs_kernels(operands.inputs[0].device.type) or _is_transformed():
            return reference(self, operands)
        return registration.call(self, operands)

    def _check(
        self, inputs: _Tensors, weights: _Tensors, biases: tuple[Tensor | None, ...]
    ) -> None:
        """Raises for tensors that are no rows and weights of heads."""
        name = self.name
        if not len(inputs) == len(weights) == len(biases):
            raise ValueError(
                f"{name}: {len(inputs)} inputs, {len(weights)} weights and {len(biases)} biases; "
                "expected one of each for each head"
            )
        first = inputs[0]
        for t, weight, bias in zip(inputs, weights, biases, strict=True):
            checks.check_tensor(name, "input", t, first)
            checks.check_tensor(name, "linear_weight", weight, first)
            if t.dim() < 2 or t.shape[:-1] != first.shape[:-1]:
                raise ValueError(
                    f"{name}: input has shape {tuple(t.shape)}, expected (*, D) with the rows of "
                    f"the first input, {tuple(first.shape[:-1])}"
                )
            if weight.dim() != 2 or weight.shape[1] != t.shape[-1]:
                raise ValueError(
                    f"{name}: linear_weight has shape {tuple(weight.shape)}, expected (V, "
                    f"{t.shape[-1]}) as the last dimension of input"
                )
            if bias is not None:
                checks.check_tensor(name, "linear_bias", bias, first)
                checks.check_shape(name, "linear_bias", bias, (weight.shape[0],))
            if not has_autocast(t.device.type) and not t.dtype == weight.dtype == first.dtype:
                raise TypeError(
                    f"{name}: input has dtype {t.dtype} and linear_weight {weight.dtype}, expected "
                    "one dtype, or autocast"
                )

    def guard(self) -> None:
        """Makes torch.compile guard on the variables that the function reads."""
        self._rows[0].guard()

    def named(self, operands: Operands, name: str) -> Any:
        """Returns the argument of a name, one after the logits."""
        position = [parameter for parameter, _ in self._signature].index(name)
        return operands.others[position - operands.heads]

    # --- the rows that count ----------------------------------------------------------------------

    def mask(self, operands: Operands) -> Tensor | None:
        """Returns which rows count, (M,); None if all do."""
        if self.valid is None:
            return None
        mask = self.valid(*operands.others)
        if mask.shape != (operands.rows,) or mask.dtype != torch.bool:
            raise ValueError(
                f"{self.name}: valid returns {mask.dtype} of shape {tuple(mask.shape)}, expected "
                f"torch.bool of shape {(operands.rows,)}"
            )
        return mask

    def choice(self, operands: Operands) -> Choice:
        """Returns the rows to compute; the host waits for their number, except under capture."""
        mask = self.mask(operands)
        if mask is None:
            return Choice(operands.rows)
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return Choice(operands.rows, mask=mask, counted=mask)
        count = self._count(operands, mask)
        if count == operands.rows:
            return Choice(count, counted=mask)
        return Choice(count, mask.nonzero().squeeze(1), counted=mask)

    def index(self, mask: Tensor | None) -> Tensor | None:
        """Returns the rows that count; None for all, or if the host cannot read which."""
        return None if mask is None or not has_values(mask) else mask.nonzero().squeeze(1)

    def _count(self, operands: Operands, mask: Tensor) -> int:
        """Returns the number of rows that count."""
        return int(mask.sum())

    def scale(self, operands: Operands, mask: Tensor | None) -> Tensor:
        """Returns the factor of the sum of all results: a tensor without dimensions."""
        one = operands.inputs[0].new_ones((), dtype=operands.acc)
        return one / self.divisor(operands, mask) if self.reduction == "mean" else one

    def columns(self, operands: Operands) -> int:
        """Returns the number of columns of all heads' logits, from which chunks are sized."""
        return sum([weight.shape[0] for weight in operands.weights[: operands.heads]])

    def combined(
        self, operands: Operands, results: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the results of rows, and the gradients of what the function returned."""
        return results, cotangents

    def divisor(self, operands: Operands, mask: Tensor | None) -> Tensor | int:
        """Returns what a mean divides the sum by."""
        return operands.rows if mask is None else mask.sum()


def _is_transformed() -> bool:
    """Returns whether a transform, forward mode or an export needs PyTorch's operators."""
    if torch.compiler.is_compiling():
        return is_exporting() or transforms_when_traced()
    return transforms() or in_forward_mode()


def _sequence(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _dtype(t: Tensor) -> torch.dtype:
    """Returns the dtype of the products: autocast's, where it is enabled."""
    kind = t.device.type
    if has_autocast(kind) and t.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return t.dtype


def check_budget(op: str, chunk_mib: float | None) -> None:
    """Raises unless a budget is None or a positive number."""
    if chunk_mib is None:
        return
    checks.check_number(op, "chunk_mib", chunk_mib)
    if not chunk_mib > 0:
        raise ValueError(f"{op}: chunk_mib must be positive, got {chunk_mib}")
