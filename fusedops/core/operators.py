"""Registered operators: what torch.compile and other tracers see of a call, and how compiled code runs it.

`define` makes two operators of one computation. ``name`` returns new tensors: it is what Dynamo, FakeTensor and make_fx
see, and what has a derivative. ``name_out`` writes into tensors that it is given, and takes all constants as one
string. Where torch.compile makes a graph functional, a call of the first becomes empty tensors and a call of the second
(`torch.library.register_torch_dispatch`): so Inductor plans the outputs' memory as it plans its own kernels', and its
code has less to do at each call. (Backends that take no care of such calls copy what is written into.)

A compiled graph calls an operator through the dispatcher, which looks for somebody who wants to observe the call, and
in the end comes back to Python: in the midst of a step that costs several times what a launch costs. Where nobody
observes, the operator's Python object calls the implementation at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad, profiler

from .checks import DTYPES
from .version import __version__

__all__ = ["NAMES", "Calls", "define", "exporting", "implement", "named", "versioned"]

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = _TENSORS | {type(None), str, int, float, bool}

_Dtype = torch.dtype | None

# Whether a call is traced for `torch.export`. PyTorch 2.6 cannot say; there its programs have what compiled code has.
exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)

# What an operator returns of its outputs: the one, each (with an empty tensor for what is absent), those that are there.
Returns = Literal["Tensor", "(Tensor, Tensor, Tensor, Tensor)", "Tensor[]"]

# Dtypes as operators take them: an argument of its own kind costs more than a word in a string.
NAMES: dict[_Dtype, str] = {None: "none", **{d: str(d).removeprefix("torch.") for d in DTYPES}}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def named(name: str) -> _Dtype:
    """The dtype behind one of `NAMES`."""
    return _DTYPES[name]


def versioned(*words: str) -> str:
    """A constant for operators that have a derivative: the words, and the version behind them.

    PyTorch keeps compiled functions on disk by the names and constants in them: the version tells one release's apart.
    """
    return " ".join((*words, __version__))


# --- one computation, two operators -----------------------------------------------------------------------------------


def define(
    library: torch.library.Library,
    name: str,
    *,
    tensors: str,
    constants: str,
    outputs: tuple[str, ...],
    returns: Returns,
    allocate: Callable[..., Sequence[Tensor | None]],
    write: Callable[..., None],
) -> None:
    """Registers ``fusedops::name(tensors, constants) -> returns`` and ``fusedops::name_out(tensors, outputs, call)``.

    Args:
        library: where.
        name: the first operator's.
        tensors: the schema of the tensors that are read, all that either operator reads.
        constants: the schema of the rest: numbers, words and truth values.
        outputs: names of the outputs.
        returns: what the first returns of them.
        allocate: from tensors and constants to the outputs, uninitialised, each None where the call has none.
        write: from tensors, outputs and ``call`` to nothing; ``call`` is a string that `Calls` reads.
    """
    count = tensors.count(",") + 1
    places = ", ".join([f"Tensor({chr(ord('a') + i)}!)? {output}" for i, output in enumerate(outputs)])
    library.define(f"{name}({tensors}, {constants}) -> {returns}")
    library.define(f"{name}_out({tensors}, {places}, str call) -> ()")

    def fake(*args: Any) -> Any:
        return _returned(returns, allocate(*args))

    def function(*args: Any) -> Any:
        outs = allocate(*args)
        write(*args[:count], *outs, _call(args, count))
        return _returned(returns, outs)

    def nothing(*_: Any) -> None:
        return None

    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    library.impl(f"{name}_out", write, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}_out", nothing, lib=library)
    # What it writes into is new and has no versions to be counted, so there too the dispatcher has nothing to do.
    operator = getattr(torch.ops.fusedops, f"{name}_out").default
    operator._op = _shortened(operator._op, write, count)

    def functional(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Programs of `torch.export` keep the operator that returns, and a tensor subclass sees it first.
        ordinary = all(t in (Tensor, FunctionalTensor) or issubclass(t, FakeTensor) for t in types)
        if kwargs or exporting() or not ordinary or not _planned(args):
            return mode.__torch_dispatch__(itself, types, args, kwargs)
        with mode:
            outs = allocate(*args)
            operator(*args[:count], *outs, _call(args, count))
            return _returned(returns, outs)

    torch.library.register_torch_dispatch(f"fusedops::{name}", FunctionalTensorMode, functional, lib=library)


def _returned(returns: Returns, outs: Sequence[Tensor | None]) -> Any:
    if returns == "Tensor":
        return outs[0]
    if returns == "Tensor[]":
        return [out for out in outs if out is not None]
    first = outs[0]
    assert first is not None
    return tuple([first.new_empty(0) if out is None else out for out in outs])


def _planned(tensors: Sequence[Any]) -> bool:
    """Whether the compiler is to plan the outputs' memory: on GPUs.

    Elsewhere calls are tests, in Triton's interpreter, and Inductor's C++ code may read an output before the call has
    written it: where it changes a loop's ranges it forgets which writes the loop waits for (PyTorch 2.13).
    """
    return any(isinstance(t, Tensor) and t.is_cuda for t in tensors)


# --- a call's constants as one string -----------------------------------------------------------------------------------

# By the first letter of a constant's type. No character in a call is special in Python or C++: compilers print it.
_READ: dict[str, Callable[[str], Any]] = {"i": int, "f": float, "b": "True".__eq__, "s": str}


def _call(args: tuple[Any, ...], count: int) -> str:
    dtypes = ["none" if t is None else str(t.dtype).removeprefix("torch.") for t in args[:count]]
    return " ".join(dtypes) + "|" + ";".join([f"{type(constant).__name__[0]}{constant}" for constant in args[count:]])


class Calls(dict[tuple[str, int], Any]):
    """What ``prepare`` makes of a call's string and a device's index, made once for each."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        """``prepare(device_index, dtypes, *constants)``: the dtypes of the tensors.

        None stands for what is absent, and for a state of dropout, whose dtype is always the same.
        """
        super().__init__()
        self._prepare = prepare

    def __missing__(self, key: tuple[str, int]) -> Any:
        call, device_index = key
        dtypes, constants = call.split("|")
        read = [_READ[constant[0]](constant[1:]) for constant in constants.split(";")]
        made = self[key] = self._prepare(device_index, tuple([_DTYPES.get(name) for name in dtypes.split()]), *read)
        return made


# --- past the dispatcher ------------------------------------------------------------------------------------------------


def implement(
    library: torch.library.Library, name: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Gives the operator ``fusedops::name`` its implementation for every device, and the fake one for tracers."""
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    operator = getattr(torch.ops.fusedops, name).default
    if not operator._schema.is_mutable:  # else the dispatcher also counts the versions of what is written
        operator._op = _shortened(operator._op, function, len(operator._schema.arguments))


def _shortened(dispatched: Callable[..., Any], function: Callable[..., Any], read: int) -> Callable[..., Any]:
    """``dispatched``, or ``function`` where the dispatcher would do nothing but call that.

    The first ``read`` arguments are looked at. The questions are in one flat function: each is asked at every call.
    What cannot be asked is missed: an execution trace that is taken without a profiler, and what others register for
    these operators, which are private.
    """
    modes, function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
    grad_mode, transforms = torch.is_grad_enabled, torch._C._are_functorch_transforms_active
    profiled, traced = torch._C._autograd._profiler_enabled, torch._C._is_tracing

    def call(*args: Any, **named: Any) -> Any:
        watched = (
            grad_mode() or modes() or function_mode() or transforms() or profiled() or traced()
            or forward_ad._current_level >= 0
            or profiler._is_profiler_enabled  # perhaps by another thread, of all threads
        )  # fmt: skip
        if watched or named or not _PLAIN.issuperset(map(type, args)):
            return dispatched(*args, **named)
        try:
            for arg in args[:read]:
                # Without memory, or with other numbers in it than the tensor's.
                if type(arg) in _TENSORS and (not arg.data_ptr() or arg.is_neg()):
                    watched = True
        except RuntimeError:  # no storage either: batches in disguise, what a transform has left, sparse layouts
            watched = True
        return dispatched(*args) if watched else function(*args)

    return call
