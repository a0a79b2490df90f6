"""Functions of PyTorch that a trace replaces, or refuses, before they dispatch operators."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..core.compat.dispatch import any_autocast_enabled
from .errors import NotRowwiseError
from .recorder import Recorder
from .traced import Value

__all__ = ["Replacements"]

# Attributes of a tensor that differ between the trace and a call: the trace enables gradients, and
# its tensors need none.
_OF_GRADIENTS = frozenset(
    {"_version", "grad", "grad_fn", "is_inference", "is_leaf", "requires_grad", "retains_grad"}
)


class Replacements(TorchFunctionMode):
    """A mode that replaces functions before PyTorch dispatches operators of them, or refuses them.

    Dropout becomes a node of the graph, and reads of attributes about gradients are refused.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        with self.recorder.noting_refusals():
            replacement = _REPLACEMENTS.get(func)
            if replacement is not None:
                return replacement(self, *args, **kwargs)
            if func is torch.einsum and not any_autocast_enabled():
                elementwise = _elementwise_einsum(*args)
                if elementwise is not None:
                    return elementwise()
            if name in ("batch_norm", "_batch_norm_impl_index"):
                self.recorder.mark_line()
                raise NotRowwiseError("BatchNorm mixes rows")
            if name in _OF_GRADIENTS and not _called_by_a_library(inspect.currentframe()):
                self.recorder.mark_line()
                raise NotRowwiseError(
                    f"it reads {name} of a tensor, which may change from call to call; pass it as "
                    "a number"
                )
        return func(*args, **kwargs)

    def _gaussian_nll_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse the loss, which reads values of a tensor in Python."""
        self.recorder.mark_line()
        raise NotRowwiseError(
            "gaussian_nll_loss tests in Python whether a variance is negative; write "
            "0.5 * (var.log() + (x - y) ** 2 / var)"
        )

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Return rows of zeros and a one.

        For an index out of range PyTorch raises an error, which a kernel cannot. The whole row then
        has a value that shows the error: see `where_within`.
        """
        from .lowering.common import where_within

        if tensor.dtype != torch.int64:
            return F.one_hot(tensor, num_classes)  # PyTorch's error
        if num_classes < 1:
            self.recorder.mark_line()
            raise NotRowwiseError(
                "one_hot takes the number of classes from the largest of them; pass num_classes"
            )
        recorder = self.recorder
        # These operators are traced too. Their node, of zeros and ones, becomes an argument of the
        # node that selects between it and that value.
        classes = torch.arange(num_classes, device=tensor.device)
        result = (tensor.unsqueeze(-1) == classes).long()
        value = recorder.value(result)
        index = recorder.value(tensor).node
        node = where_within(recorder, index, num_classes, value.node, result.dtype)
        recorder.set(result, Value(node, value.labels, result.dtype))
        return result

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return the GroupNorm of single channels.

        PyTorch would reshape the batch and the channels to the channels of a BatchNorm.
        """
        has_running_stats = running_mean is not None or running_var is not None
        if has_running_stats or not use_input_stats:
            self.recorder.mark_line()
            raise NotRowwiseError(
                "InstanceNorm with running statistics changes these; use track_running_stats=False"
            )
        if math.prod(input.shape[2:]) == 1:
            return F.instance_norm(input)  # PyTorch's error
        return F.group_norm(input, input.shape[1], weight, bias, eps)

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        """Return the input times a "keep" node, whose mask the backward draws again."""
        recorder = self.recorder
        if inplace:
            raise NotRowwiseError("dropout in place")
        is_training = training if train is None else train  # `torch.dropout` calls it ``train``
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not is_training or p == 0.0:
            return input
        value = recorder.value(input)
        number = len(recorder.traced.drops)
        recorder.traced.drops.append(float(p))
        axes = list(itertools.chain.from_iterable(value.labels))
        factor = recorder.graph.make("keep", attrs=(number,), axes=axes, kind="float")
        product = recorder.graph.binary("mul", value.node, factor)
        out = recorder.empty(input.shape, input.dtype, input.device)
        recorder.set(out, Value(product, value.labels, input.dtype))
        return out


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.dropout: Replacements._dropout,
    torch.dropout: Replacements._dropout,
    F.gaussian_nll_loss: Replacements._gaussian_nll_loss,
    F.one_hot: Replacements._one_hot,
    F.instance_norm: Replacements._instance_norm,
}


def _elementwise_einsum(equation: Any, *operands: Any) -> Callable[[], Tensor] | None:
    """Return a function that computes an einsum as products of elements and sums.

    Returns None if no operand has all the dimensions, as in a matrix product, or if the equation
    has an ellipsis, a diagonal, or no explicit result.
    """
    if not isinstance(equation, str):
        return None
    terms, _, result_letters = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if len(letters) != len(operands) or not all(map(_names_dimensions, [result_letters, *letters])):
        return None
    # If one operand has all dimensions, the einsum is an elementwise product, which broadcasts, and
    # a sum. Otherwise, as in a matrix product, the elementwise product would have more dimensions
    # than any tensor.
    order = max(letters, key=len)
    has_all = set(order) == set(terms.replace(",", ""))
    if not has_all:
        return None

    def aligned(tensor: Tensor, term: str) -> Tensor:
        """Permute a tensor into the common order, with a dimension of one for each it lacks."""
        present = [letter for letter in order if letter in term]
        tensor = tensor.permute(list(map(term.index, present)))
        return tensor[tuple([slice(None) if letter in term else None for letter in order])]

    def compute() -> Tensor:
        product = functools.reduce(torch.mul, map(aligned, operands, letters))
        reduced = [dim for dim, letter in enumerate(order) if letter not in result_letters]
        remaining = [letter for letter in order if letter in result_letters]
        if reduced:
            product = product.sum(reduced)
        return product.permute(list(map(remaining.index, result_letters)))

    return compute


def _names_dimensions(term: str) -> bool:
    """Whether a term of an einsum is letters, one for each dimension, without a diagonal."""
    return term.isalpha() and len(set(term)) == len(term)


def _called_by_a_library(frame: FrameType | None) -> bool:
    """Whether PyTorch's code, or this library's, calls the function that runs in a frame."""
    caller = None if frame is None else frame.f_back
    module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("torch", "fusedops")
