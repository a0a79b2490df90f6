"""The registered operators of losses: autograd and torch.compile see one node for a whole loop.

    linear_rowwise(...)            results, and what the backward needs
    linear_rowwise_backward(...)   gradients, from those of the results of each row

Their argument ``call`` has everything but tensors as one string: see `_Call`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from ..compiler.errors import NotRowwiseError
from ..core.calls.function import vjp
from ..core.calls.registration import implement
from ..core.calls.words import DTYPES_BY_NAME
from ..core.compat.autograd import is_batched
from ..core.compat.dispatch import in_forward_mode, is_intercepted, transforms
from ..core.compat.dynamo import constant_when_traced
from ..core.version import __version__
from . import head, scaling
from .operands import Loss, Operands, has_autocast
from .reference import reference

__all__ = ["OPERATOR", "call", "identified", "name_in", "register", "written"]

# A function that only eager calls use lives as long as its user holds it, and as a backward needs
# it. What a tracer sees may be in a graph, which has the key alone: it lives for good.
_LOSSES: weakref.WeakValueDictionary[str, Loss] = weakref.WeakValueDictionary()
_TRACED: set[Loss] = set()


def register(loss: Loss) -> str:
    """Returns the key of a new function: its name, and a number if another has the name.

    The same module gives its functions the same keys in each process.
    """
    function = loss.function
    name = f"{function.__module__}.{function.__qualname__}"
    key, number = name, 1
    while key in _LOSSES:
        number += 1
        key = f"{name}#{number}"
    _LOSSES[key] = loss
    return key


# --- one string for all that is no tensor ---------------------------------------------------------

# The letter of a number's type, and how to read it.
_READERS: dict[str, Any] = {
    "i": int,
    "f": float,
    "b": "True".__eq__,
    "s": unquote,
    "n": lambda text: None,
}


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are no tensors.

    Attributes:
        key: the key of the function.
        needs: for each input, weight, bias and other argument, whether its gradient is wanted.
        biased: for each product, whether it has a bias.
        by_row: for each other argument, whether it has an element or a row for each row.
        numbers: the other arguments that are no tensors, by position.
        autocast: the dtype of autocast; None without it.
        dtype: the dtype of the products.
        chunk_mib: the budget of a chunk's logits in MiB; None for the default.
        added: for each product that is added to logits, their head.
    """

    key: str
    needs: tuple[bool, ...]
    biased: tuple[bool, ...]
    by_row: tuple[bool, ...]
    numbers: dict[int, Any]
    autocast: torch.dtype | None
    dtype: torch.dtype
    chunk_mib: float | None
    added: tuple[int, ...]

    @property
    def loss(self) -> Loss:
        """The function."""
        return _LOSSES[self.key]


def _digits(flags: Iterable[bool]) -> str:
    return "".join(["1" if flag else "0" for flag in flags])


def written(loss: Loss, operands: Operands, needs: Sequence[bool]) -> str:
    """Returns the string of a call; `identified` completes its first word."""
    kind = operands.inputs[0].device.type
    autocast = str(torch.get_autocast_dtype(kind)) if has_autocast(kind) else "torch.none"
    words = [
        "",
        loss.key,
        _digits(needs),
        _digits([bias is not None for bias in operands.biases]),
        _digits(operands.by_row),
        autocast[len("torch.") :],
        str(operands.dtype)[len("torch.") :],
        "" if operands.chunk_mib is None else str(operands.chunk_mib),
        ",".join(map(str, operands.added)),
    ]
    for position, other in enumerate(operands.others):
        if not isinstance(other, Tensor):
            value = _quoted(other) if isinstance(other, str) else other
            words.append(f"{position}{_letter(loss, other)}{value}")
    return "|".join(words)


def _quoted(text: str) -> str:
    """Returns a text without the separator, for `unquote`. Dynamo cannot trace `quote`."""
    return text.replace("%", "%25").replace("|", "%7C")


def identified(text: str, loss: Loss, operands: Operands) -> str:
    """Returns the string of a call with the package's version and the program's digest.

    PyTorch caches compiled functions on disk by their constants. The graph of another version or of
    another function with this name has other sizes.

    Raises:
        NotRowwiseError: the function cannot be one kernel.
    """
    return f"{__version__} {head.check(loss, operands).digest}{text}"


def _letter(loss: Loss, other: Any) -> str:
    if other is None:
        return "n"
    for kind in (bool, int, float, str):
        if isinstance(other, kind):
            return kind.__name__[0]
    raise TypeError(
        f"{loss.name}: an argument is a {type(other).__name__}, expected a tensor, a number, a "
        "string or None"
    )


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> _Call:
    """Returns the call of a string."""
    _, key, needs, biased, by_row, autocast, dtype, budget, added, *words = text.split("|")
    numbers: dict[int, Any] = {}
    for word in words:
        position = word[: len(word) - len(word.lstrip("0123456789"))]
        letter, value = word[len(position)], word[len(position) + 1 :]
        numbers[int(position)] = _READERS[letter](value)
    return _Call(
        key,
        tuple([digit == "1" for digit in needs]),
        tuple([digit == "1" for digit in biased]),
        tuple([digit == "1" for digit in by_row]),
        numbers,
        DTYPES_BY_NAME.get(autocast),
        getattr(torch, dtype),
        float(budget) if budget else None,
        tuple(map(int, filter(None, added.split(",")))),
    )


def name_in(text: str) -> str:
    """Returns the name of the function in a call's string."""
    return _read(text).loss.name


def _operands(
    called: _Call,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    others: Sequence[Tensor],
) -> Operands:
    """Returns the operands of an operator's arguments."""
    remaining_biases, remaining = iter(biases), iter(others)
    all_biases = tuple([next(remaining_biases) if b else None for b in called.biased])
    values = [
        called.numbers[i] if i in called.numbers else next(remaining)
        for i in range(len(called.by_row))
    ]
    return Operands(
        tuple(inputs),
        tuple(weights),
        all_biases,
        tuple(values),
        called.by_row,
        called.dtype,
        called.chunk_mib,
        called.added,
    )


# --- the forward ----------------------------------------------------------------------------------


def call(loss: Loss, operands: Operands) -> list[Tensor]:
    """Returns the results of the registered operator; of `reference` if there can be no kernel."""
    records = torch.is_grad_enabled()
    needs = [records and isinstance(t, Tensor) and t.requires_grad for t in operands.arguments]
    lists = (
        list(operands.inputs),
        list(operands.weights),
        _tensors(operands.biases),
        _tensors(operands.others),
    )
    text = written(loss, operands, needs)
    if torch.compiler.is_dynamo_compiling() and _allow():
        loss.guard()
    return _called(*lists, text)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among the arguments of a call."""
    return [value for value in values if isinstance(value, Tensor)]


def _called(
    inputs: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    others: list[Tensor],
    call: str,
) -> list[Tensor]:
    """Returns the results of a call. torch.compile calls it as one node of its first graph."""
    called = _read(call)
    loss, operands = called.loss, _operands(called, inputs, weights, biases, others)
    try:
        call = identified(call, loss, operands)
    except NotRowwiseError as error:
        loss.rows.refuse(error)
        return list(reference(loss, operands))
    if is_intercepted():
        _TRACED.add(loss)
    outs = torch.ops.fusedops.linear_rowwise(inputs, weights, biases, others, call)
    count = 1 if loss.reduction != "none" else len(outs) - 1
    return list(outs[:count])


@constant_when_traced
def _allow() -> bool:
    """Makes torch.compile call `_called` as one node of its graph.

    It is called in the first trace, because it imports Dynamo, which takes a second.
    """
    torch.compiler.allow_in_graph(_called)
    return True


def _context(operands: Operands, autocast: torch.dtype | None) -> Any:
    """Returns the context of a call: its device, and autocast as it was."""
    kind = operands.inputs[0].device.type
    return torch.autocast(kind, dtype=autocast, enabled=autocast is not None)


def _device(operands: Operands) -> Any:
    device = operands.inputs[0].device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _forward(
    inputs: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    others: list[Tensor],
    call: str,
) -> list[Tensor]:
    called = _read(call)
    operands = _operands(called, inputs, weights, biases, others)
    with _device(operands), _context(operands, called.autocast), torch.no_grad():
        results, saved = head.forward(called.loss, operands, called.needs)
    return [*results, *saved]


def _fake_forward(
    inputs: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    others: list[Tensor],
    call: str,
) -> list[Tensor]:
    called = _read(call)
    loss, operands = called.loss, _operands(called, inputs, weights, biases, others)
    like = operands.inputs[0]
    if loss.reduction != "none":
        number = like.new_empty((), dtype=operands.acc)
        return [number, torch.empty_like(number), *_fake_gradients(operands, called.needs)]
    with _context(operands, called.autocast):
        dtypes, numbers, dtype = head.described(loss, operands)
    is_saved = any(called.needs) and not loss.combines
    count = numbers * operands.rows if is_saved else 0
    results = [like.new_empty(operands.rows, dtype=each) for each in dtypes]
    return [*results, like.new_empty(count, dtype=dtype)]


def _fake_gradients(operands: Operands, needs: Sequence[bool]) -> list[Tensor]:
    return [
        t.new_empty(t.shape, dtype=head.gradient_dtype(operands, position, t.dtype))
        for position, (t, need) in enumerate(zip(operands.arguments, needs, strict=True))
        if need
    ]


# --- the backward ---------------------------------------------------------------------------------


def _backward(
    inputs: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    others: list[Tensor],
    cotangents: list[Tensor],
    numbers: Tensor,
    call: str,
) -> list[Tensor]:
    called = _read(call)
    operands = _operands(called, inputs, weights, biases, others)
    with _device(operands), _context(operands, called.autocast), torch.no_grad():
        gradients = head.backward(called.loss, operands, called.needs, cotangents, numbers)
        return _in_own_dtypes(operands, called.needs, gradients)


def _fake_backward(
    inputs: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    others: list[Tensor],
    cotangents: list[Tensor],
    numbers: Tensor,
    call: str,
) -> list[Tensor]:
    called = _read(call)
    operands = _operands(called, inputs, weights, biases, others)
    gradients = _fake_gradients(operands, called.needs)
    return _in_own_dtypes(operands, called.needs, gradients)


def _in_own_dtypes(
    operands: Operands, needs: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor]:
    wanted = [t for t, need in zip(operands.arguments, needs, strict=True) if need]
    return [gradient.to(t.dtype) for t, gradient in zip(wanted, gradients, strict=True)]


# --- the derivative -------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *lists, ctx.call = inputs
    called = _read(ctx.call)
    ctx.loss = called.loss  # it lives as long as the backward may need it
    ctx.lengths = list(map(len, lists))
    count = 1 if called.loss.reduction != "none" else len(output) - 1
    ctx.count = count
    ctx.used = False
    ctx.set_materialize_grads(False)
    # The rest is for the backward alone. Gradients among it would else have a history themselves.
    ctx.mark_non_differentiable(*output[count:])
    ctx.save_for_backward(*[t for tensors in lists for t in tensors], *output[count:])


def _derivative(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    """Returns the gradients of the lists of tensors, and None for the string."""
    called = _read(ctx.call)
    saved = list(ctx.saved_tensors)
    lists: list[list[Tensor]] = []
    for length in ctx.lengths:
        lists.append(saved[:length])
        saved = saved[length:]
    operands = _operands(called, *lists)
    cotangents = list(grads[: ctx.count])
    if all(g is None for g in cotangents):
        return *[[None] * length for length in ctx.lengths], None
    if torch.is_grad_enabled() or in_forward_mode() or _are_batched(cotangents):
        gradients = _differentiable(called, operands, cotangents)
    elif called.loss.reduction == "none":
        rows = operands.rows
        zeros = [
            operands.inputs[0].new_zeros(rows, dtype=operands.acc) if g is None else g
            for g in cotangents
        ]
        gradients = torch.ops.fusedops.linear_rowwise_backward(*lists, zeros, *saved, ctx.call)
    else:
        gradients = _scaled(ctx, called, operands, lists, saved, cotangents[0])
    return *_listed(ctx, called, operands, gradients), None


def _are_batched(cotangents: Sequence[Tensor | None]) -> bool:
    """Whether several gradients are computed at once, by a transform or by autograd."""
    return transforms() or any(c is not None and is_batched(c) for c in cotangents)


def _scaled(
    ctx: Any,
    called: _Call,
    operands: Operands,
    lists: Sequence[Sequence[Tensor]],
    saved: Sequence[Tensor],
    cotangent: Any,
) -> list[Tensor]:
    """Returns the gradients that the forward formed, times the gradient of the loss."""
    late, *gradients = saved
    factor = cotangent.to(late.dtype) * late
    is_plain = all(type(t) is Tensor for t in (factor, *gradients))
    if not is_plain or is_intercepted() or torch.compiler.is_compiling():
        scaled = [(gradient * factor).to(gradient.dtype) for gradient in gradients]
        return _in_own_dtypes(operands, called.needs, scaled)
    if ctx.used:
        # The first backward gave them away. They are formed again.
        with torch.no_grad():
            outs = torch.ops.fusedops.linear_rowwise(*lists, ctx.call)
        gradients = outs[2:]
    ctx.used = True
    for gradient in gradients:
        scaling.scale(gradient, factor)
    return _in_own_dtypes(operands, called.needs, gradients)


def _differentiable(
    called: _Call, operands: Operands, cotangents: Sequence[Tensor | None]
) -> list[Tensor]:
    """Returns gradients that can be differentiated, from whole logits."""
    count = len(operands.inputs)

    def function(*values: Any) -> Any:
        again = Operands(
            values[:count],
            values[count : 2 * count],
            values[2 * count : 3 * count],
            values[3 * count :],
            operands.by_row,
            operands.dtype,
            operands.chunk_mib,
            operands.added,
        )
        with _context(operands, called.autocast):
            return reference(called.loss, again)

    gradients = vjp(function, operands.arguments, cotangents, called.needs)
    return [
        torch.zeros_like(t) if gradient is None else gradient
        for t, gradient, need in zip(operands.arguments, gradients, called.needs, strict=True)
        if need
    ]


def _listed(
    ctx: Any, called: _Call, operands: Operands, gradients: Sequence[Tensor]
) -> list[list[Tensor | None]]:
    """Returns gradients as the lists of the operator's arguments."""
    remaining = iter(gradients)
    flat = [
        next(remaining) if need else None
        for t, need in zip(operands.arguments, called.needs, strict=True)
        if isinstance(t, Tensor)
    ]
    lists = []
    for length in ctx.lengths:
        lists.append(flat[:length])
        flat = flat[length:]
    return lists


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_TENSORS = "Tensor[] inputs, Tensor[] weights, Tensor[] biases, Tensor[] others"
_LIBRARY.define(f"linear_rowwise({_TENSORS}, str call) -> Tensor[]")
_LIBRARY.define(
    f"linear_rowwise_backward({_TENSORS}, Tensor[] cotangents, Tensor numbers, str call)"
    " -> Tensor[]"
)
implement(_LIBRARY, "linear_rowwise", _forward, _fake_forward)
implement(_LIBRARY, "linear_rowwise_backward", _backward, _fake_backward)
torch.library.register_autograd(
    "fusedops::linear_rowwise", _derivative, setup_context=_setup, lib=_LIBRARY
)
OPERATOR = torch.ops.fusedops.linear_rowwise.default
