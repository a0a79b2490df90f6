"""Registers operators: what torch.compile, dispatch modes and tensor subclasses see of a call.

`define` registers four operators for a family's `Operator`. ``<name>_forward`` and ``<name>_backward`` return new
tensors: Dynamo, FakeTensor, make_fx and tensor subclasses see these, and the forward has a derivative. Beside them
``<name>_forward_out`` and ``<name>_backward_out`` write into tensors that they are given, and take all constants as one
string. Where torch.compile makes a graph functional, a call of the former becomes empty tensors and a call of the
latter (`torch.library.register_torch_dispatch`): so Inductor plans the outputs' memory as it plans its own kernels',
and its code has less to do at each call. (Backends that take no care of such calls copy what is written into.)

A compiled graph calls an operator through the dispatcher, which looks for observers of the call, and in the end comes
back to Python: in the midst of a step that costs several times what a launch costs. Where there are none, the operator's
Python object calls the implementation at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import compat, function, rng
from .operator import Operator, Site
from .operators import present, site_from

__all__ = ["MOST_ARGUMENTS", "arguments", "define", "implement"]

# PyTorch registers no operator of more.
MOST_ARGUMENTS = 64

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = _TENSORS | {type(None), str, int, float, bool}
# Registered operators live as long as their library.
_LIBRARIES: list[torch.library.Library] = []


def arguments(op: Operator) -> int:
    """The most arguments of an operator that `define` registers: there are at most `MOST_ARGUMENTS`."""
    read, numbers = op.visible + len(op.saved), len(op.numbers)
    returning = max(len(op.tensors) + 4, read + 5) + numbers  # the seed, and constants one by one
    return max(returning, len(op.tensors) + max(len(op.outputs), read) + 2)  # the seed, and constants as a string


def define(op: Operator) -> None:
    """Registers the operators of ``op``, all or none: an operator without its derivative would cut gradients.

    Raises:
        RuntimeError: PyTorch does not take one of them.
    """
    library = torch.library.Library("fusedops", "FRAGMENT")
    try:
        _define_all(op, library)
    except BaseException:
        compat.undefine(library)
        raise
    _LIBRARIES.append(library)


def _define_all(op: Operator, library: torch.library.Library) -> None:
    count = len(op.tensors)
    numbers = "".join([f", float {name}" for name in op.numbers])
    constants = f"int threshold, int cols, str call{numbers}"
    backward_constants = f"int threshold, str needs, int cols, str call{numbers}"
    arguments = _schema(op.tensors, op)
    saved = _schema(op.saved, op)
    cotangents = _schema(tuple([f"d{name}" for name in op.outputs[: op.visible]]))
    read = op.visible + len(op.saved)

    def forward_site(constants: Sequence[Any], dropout: bool, device_index: int) -> Any:
        _, cols, call, *rest = constants
        return site_from(op, device_index, dropout, cols, call, tuple(rest))

    def allocate(*args: Any) -> Sequence[Tensor | None]:
        return op.allocate(forward_site(args[count + 1 :], args[count] is not None, -1), _flat(op, args[:count]))

    @functools.lru_cache(maxsize=4096)
    def forward_of(text: str, dropout: bool, device_index: int) -> tuple[Any, int]:
        constants = _constants(text)
        return forward_site(constants, dropout, device_index), constants[0]

    def write(*args: Any) -> None:
        given: Any = _flat(op, args[:count])
        first, seed = given[op.first], args[count]
        if _is_empty(first, ()):
            return
        site, threshold = forward_of(args[-1], seed is not None, first.get_device())
        function.on_device(site, op.forward, given, args[count + 1 : -1], (*rng.unpacked(seed), threshold))

    def backward_site(constants: Sequence[Any], dropout: bool, device_index: int) -> Any:
        _, _, cols, call, *rest = constants
        return site_from(op, device_index, dropout, cols, call, tuple(rest))

    def allocate_gradients(*args: Any) -> Sequence[Tensor | None]:
        needed = [digit == "1" for digit in args[read + 2]]
        site = backward_site(args[read + 1 :], args[read] is not None, -1)
        return op.allocate_gradients(site, args[: op.visible], _flat(op, args[op.visible : read]), needed)

    @functools.lru_cache(maxsize=4096)
    def backward_of(text: str, dropout: bool, device_index: int) -> tuple[Any, int]:
        constants = _constants(text)
        return backward_site(constants, dropout, device_index), constants[0]

    def write_gradients(*args: Any) -> None:
        grads, seed, outs = args[: op.visible], args[read], args[read + 1 : -1]
        given = next(g for g in grads if g is not None)
        if _is_empty(given, outs):
            return
        site, threshold = backward_of(args[-1], seed is not None, given.get_device())
        state = (*rng.unpacked(seed), threshold)
        function.on_device(site, op.backward, grads, _flat(op, args[op.visible : read]), outs, state)

    _define(
        library, f"{op.name}_forward", f"{arguments}, Tensor? seed", constants, op.outputs, allocate, write, op.tags
    )
    _define(library, f"{op.name}_backward", f"{cotangents}, {saved}, Tensor? seed", backward_constants,
            [f"d{name}" for name in op.tensors], allocate_gradients, write_gradients, op.tags)  # fmt: skip

    _differentiate(op, library, forward_site)


def _differentiate(
    op: Operator, library: torch.library.Library, site_of: Callable[[Sequence[Any], bool, int], Any]
) -> None:
    """Gives the forward its derivative; ``site_of`` makes the site of its constants, of whether it drops, and of a device."""
    count = len(op.tensors)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        site = site_of(inputs[count + 1 :], inputs[count] is not None, -1)
        outs = present(output, site.outs)
        ctx.save_for_backward(*site.saved((*_flat(op, inputs[:count]), *outs, None)), inputs[count])
        ctx.set_materialize_grads(False)
        needs = [t is not None and t.requires_grad for t in _flat(op, inputs[:count])]
        function.mark_constant(ctx, op, site, outs[: op.visible], needs)
        ctx.site, ctx.threshold, ctx.constants = site, inputs[count + 1], len(inputs) - count

    def derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *saved, seed = ctx.saved_tensors
        site: Site = ctx.site
        drawn = rng.unpacked(seed) if type(seed) is Tensor else (seed, None)
        given = [g if there else None for g, there in zip(grads[: op.visible], site.outs, strict=False)]
        needs = ctx.needs_input_grad[:count]
        if op.variadic:
            needs = (*needs[:-1], *needs[-1])
        found = function.gradients(op, site, (*drawn, ctx.threshold), saved, given, needs)
        if op.variadic:
            return (*found[: count - 1], list(found[count - 1 :]), *(None,) * ctx.constants)
        return (*found, *(None,) * ctx.constants)

    torch.library.register_autograd(f"fusedops::{op.name}_forward", derivative, setup_context=setup_context,
                                    lib=library)  # fmt: skip


def _is_empty(given: Tensor, gradients: Sequence[Tensor | None]) -> bool:
    """Whether this is the shard of a rank that has nothing of a tensor: its share in all gradients is zero."""
    if given.numel():
        return False
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()
    return True


def _schema(names: Sequence[str], op: Operator | None = None) -> str:
    kinds = ["Tensor?" for _ in names]
    if op is not None and op.variadic:
        kinds[-1] = "Tensor[]"
    return ", ".join([f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)])


def _flat(op: Operator, tensors: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return (*tensors[:-1], *tensors[-1]) if op.variadic else tuple(tensors)


def _define(library: torch.library.Library, name: str, tensors: str, constants: str, outputs: Sequence[str],
            allocate: Callable[..., Sequence[Tensor | None]], write: Callable[..., None],
            tags: tuple[torch.Tag, ...]) -> None:  # fmt: skip
    """Registers ``name``, which returns, and ``name_out``, which writes.

    Args:
        tensors: the schema of what is read.
        constants: the schema of the rest.
        allocate: from tensors and constants to the outputs, uninitialised, each None where the call has none.
        write: from tensors, outputs and a string that `_constants` reads.
    """
    count = tensors.count(",") + 1
    lists = "Tensor[]" in tensors
    places = ", ".join([f"Tensor(a{i}!)? {output}" for i, output in enumerate(outputs)])
    returns = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"
    library.define(f"{name}({tensors}, {constants}) -> {returns}", tags=tags)
    library.define(f"{name}_out({tensors}, {places}, str call) -> ()", tags=tags)

    def fake(*args: Any) -> Any:
        return _returned(allocate(*args))

    def returning(*args: Any) -> Any:
        outs = allocate(*args)
        write(*args[:count], *outs, _string(args[count:]))
        return _returned(outs)

    library.impl(name, returning, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    library.impl(f"{name}_out", write, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}_out", lambda *_: None, lib=library)
    operator = getattr(torch.ops.fusedops, f"{name}_out").default
    if not lists:
        # What it writes into is new and has no versions to be counted, so there too the dispatcher has nothing to do.
        compat.replace_call(operator, lambda dispatched: _shortened(dispatched, write, count))

    def functional(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Programs of `torch.export` keep the operator that returns, and a tensor subclass sees it first.
        if kwargs or compat.is_exporting() or not compat.are_functional(types) or not _planned(args):
            return mode.__torch_dispatch__(itself, types, args, kwargs)
        with mode:
            outs = allocate(*args)
            operator(*args[:count], *outs, _string(args[count:]))
            return _returned(outs)

    if compat.Functional is not None:
        torch.library.register_torch_dispatch(f"fusedops::{name}", compat.Functional, functional, lib=library)


def _returned(outs: Sequence[Tensor | None]) -> Any:
    if len(outs) == 1:
        return outs[0]
    first = next(out for out in outs if out is not None)
    return tuple([first.new_empty(0) if out is None else out for out in outs])


def _planned(args: Sequence[Any]) -> bool:
    """Whether the compiler is to plan the outputs' memory: on GPUs.

    Elsewhere calls are tests, in Triton's interpreter, and Inductor's C++ code may read an output before the call has
    written it: where it changes a loop's ranges it forgets which writes the loop waits for (PyTorch 2.13).
    """
    return any(isinstance(t, Tensor) and t.is_cuda for t in args)


# By the first letter of a constant's type. No character in a call is special in Python or C++: compilers print it.
_READ: dict[str, Callable[[str], Any]] = {"i": int, "f": float, "s": str}


def _string(constants: Sequence[Any]) -> str:
    return ";".join([f"{type(constant).__name__[0]}{constant}" for constant in constants])


def _constants(call: str) -> tuple[Any, ...]:
    return tuple([_READ[constant[0]](constant[1:]) for constant in call.split(";")])


# --- past the dispatcher ------------------------------------------------------------------------------------------------


def implement(library: torch.library.Library, name: str, function: Callable[..., Any], fake: Callable[..., Any], *,
              decomposed: bool = False) -> None:  # fmt: skip
    """Gives the operator ``fusedops::name`` its implementation for every device, and the fake one for tracers.

    Args:
        decomposed: whether compilers see what the implementation does, instead of the operator.
    """
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    if decomposed and compat.Functional is not None:

        def functional(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with mode:
                return function(*args, **(kwargs or {}))

        torch.library.register_torch_dispatch(f"fusedops::{name}", compat.Functional, functional, lib=library)


def _shortened(dispatched: Callable[..., Any], function: Callable[..., Any], read: int) -> Callable[..., Any]:
    """``dispatched``, or ``function`` where the dispatcher would do nothing but call that.

    The first ``read`` arguments are looked at. The questions are in one flat function: each is asked at every call.
    What cannot be asked is missed: an execution trace that is taken without a profiler, and what others register for
    these operators, which are private.
    """
    modes, function_mode, transforms = compat.dispatch_modes, compat.function_modes, compat.transforms
    grad_mode, profiling, tracing, forward_mode = (torch.is_grad_enabled, compat.profiling, compat.jit_tracing,
                                                   compat.in_forward_mode)  # fmt: skip

    def call(*args: Any, **named: Any) -> Any:
        observed = (
            grad_mode() or modes() or function_mode() or transforms() or profiling() or tracing() or forward_mode()
        )
        if observed or named or not _PLAIN.issuperset(map(type, args)):
            return dispatched(*args, **named)
        try:
            for arg in args[:read]:
                # Without memory, or with other numbers in it than the tensor's.
                if type(arg) in _TENSORS and (not arg.data_ptr() or arg.is_neg()):
                    observed = True
        except RuntimeError:  # no storage either: batches in disguise, what a transform has left, sparse layouts
            observed = True
        return dispatched(*args) if observed else function(*args)

    return call
