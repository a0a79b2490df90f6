"""`fusedops.rowwise`: a function of plain PyTorch operators, run as one kernel forward and one backward."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from ..core import compat, launch
from ..core.call import run
from .codegen import backward_kernels, forward_kernels
from .errors import NotRowwiseError
from .explanation import Explanation, explained
from .operator import Program
from .programs import Programs
from .state import Looks, plain_state
from .surroundings import PLAIN
from .tracing import recording
from .walking import UNWRAPPED
from .watching import Watching

__all__ = ["Rowwise", "function_of", "rowwise"]

# A program with ever new calls starts with an empty cache again.
_MOST_CALLS = 8192


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_Self = TypeVar("_Self")


@overload
def rowwise(function: Callable[_P, _R], *, strict: bool = ...) -> Rowwise[_P, _R]: ...
@overload
def rowwise(function: None = ..., *, strict: bool = ...) -> Callable[[Callable[_P, _R]], Rowwise[_P, _R]]: ...
def rowwise(function: Callable[..., Any] | None = None, *, strict: bool = False) -> Any:
    """A function that runs as one kernel forward and one backward.

    Each output row may depend on the same row of the inputs and on vectors that all rows share. The function takes tensors
    and numbers. It may call PyTorch's operators for arithmetic, comparisons, `torch.where`, activations and casts; sums,
    means, norms and softmax over the last dimensions; `chunk`, `cat` and equal slices of a row; and `F.dropout`, whose mask
    is recomputed in the backward and never stored. The function is traced at its first call. A call with another number
    of rows uses the same kernels. A call with another dtype, row length or Python number is traced again. On a device
    without kernels, such as a CPU, the function itself runs.

    Args:
        function: the function.
        strict: True raises `NotRowwiseError` if the function cannot be fused, or Triton cannot compile a kernel of it. False
            runs such a function unfused, and warns once with the reason.
    Returns:
        A `Rowwise`, called like the function.
    Raises:
        TypeError: ``strict`` is no bool; the function is none of Python, is async, yields, or takes a variable number of
            arguments.

    Example::

        @fusedops.rowwise
        def gated_residual_norm(x, gamma, residual, weight):
            z = residual + gamma * F.dropout(F.silu(x), 0.1)
            return F.rms_norm(z, z.shape[-1:], weight, 1e-6), z
    """
    if not isinstance(strict, bool):
        raise TypeError(f"rowwise: strict has type {type(strict).__name__}, expected bool")
    if function is None:
        return functools.partial(rowwise, strict=strict)
    if not isinstance(function, FunctionType):
        raise TypeError(f"rowwise: takes a function of Python, got {type(function).__name__}; write one that calls it")
    return Rowwise(function, strict=strict)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call whose arguments were looked at.

    Attributes:
        program: what runs; None for the function itself.
        places: of the tensors among the arguments.
        captured: tensors from elsewhere, by their places in the state.
        reason: why no program runs; "" if one does.
        token: stands for the device and the types of tensors.
    """

    program: Program | None
    places: tuple[int, ...] = ()
    captured: tuple[int, ...] = ()
    reason: str = ""
    token: Any = None


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls with arguments of the same kinds: the program of each depends on the state of what the function uses."""

    looks: Looks
    calls: dict[Any, _Call]


class Rowwise(Generic[_P, _R]):
    """A function that runs as fused kernels; `rowwise` returns it.

    Attributes:
        function: the original function.
        strict: whether a function that cannot be fused is an error.
    """

    def __init__(self, function: Callable[_P, _R], *, strict: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.function, self.strict = function, strict
        self.name = getattr(function, "__name__", type(function).__name__)
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise TypeError(f"rowwise: {self.name} takes a variable number of arguments; name each")
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"rowwise: {self.name} is async; write it with `def`, and call it where its inputs were awaited"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"rowwise: {self.name} yields its results; return a tuple of them")
        self._by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        # Of a call by place alone that has all arguments; a parameter by keyword alone has none.
        self._count = -1 if self._by_keyword else len(parameters)
        assert isinstance(function, FunctionType)
        self._programs = Programs(function, self.name, list(self._signature.parameters), self._run)
        self._calls: dict[Any, _Calls] = {}
        self._warned = False
        # Plain functions, which torch.compile knows by their identity.
        self._in_graph: Callable[..., Any] = lambda *args: self._called(*args)
        self._in_graph.__name__ = self.name
        self._in_graph.__fusedops_function__ = self._run  # type: ignore[attr-defined]
        self._watching = Watching(function)
        self._watched: Callable[[], str] = compat.constant_when_traced(lambda: self._watching.name())
        self._allow: Callable[[], bool] = compat.constant_when_traced(lambda: _allowed(self._in_graph))

    def __call__(self, *given: _P.args, **kwargs: _P.kwargs) -> _R:
        """The function's outputs."""
        args: Any = given
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(*args, **kwargs)  # type: ignore[no-any-return]
        if kwargs or len(args) != self._count:
            args = self._positional(args, kwargs)
        return self._called(*args)  # type: ignore[no-any-return]

    def _called(self, *args: Any) -> Any:
        """The outputs for all arguments by place."""
        autocast = compat.any_autocast_enabled() and _autocast()
        # A part of what is being traced; a transform, under which PyTorch's operators run, with what is captured now; or a
        # program that another process loads, which would not know the registered operators.
        if recording() or compat.transforms() or compat.in_forward_mode() or compat.is_exporting():
            return self._run(*args)
        key: Any = None
        group: _Calls | None = None
        try:
            key = (autocast, torch.get_default_dtype(),
                   *[(type(a), a.dtype, a.layout, a.device, a.shape) if isinstance(a, Tensor) else plain_state(a)
                     for a in args])  # fmt: skip
            group = self._calls.get(key)
        except (TypeError, RuntimeError):  # sizes that are symbols, as torch.compile traces this call; no shape at all
            args = tuple(map(_number, args))
            group = _Calls(self._programs.looks(args), {})
        if group is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            group = self._calls[key] = _Calls(self._programs.looks(args), {})
        _, state, around = group.looks.at(args)
        call = group.calls.get(state)
        if call is None:
            call = group.calls[state] = self._looked_at(args, autocast)
        program = call.program
        if program is None:
            return self._run(*args)
        tensors, token = [args[place] for place in call.places], call.token
        if call.captured:
            tensors += [around[place] for place in call.captured]
            token = (token, *map(type, tensors))
            if not program.fits(tensors):  # one was replaced by another
                del group.calls[state]
                return self._called(*args)
        outs = run(program, (self.name, token), tensors, program.p)
        container = program.structure.container
        if container == "tensor":
            return outs[0]
        return tuple(outs[: program.count]) if container == "tuple" else list(outs[: program.count])

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Rowwise[_P, _R]: ...
    @overload
    def __get__(self: Rowwise[Concatenate[_Self, _Q], _R], instance: _Self, owner: Any = None) -> Method[_Q, _R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method where the function is one."""
        return self if instance is None else Method(self, instance)

    def __repr__(self) -> str:
        return f"rowwise({self.name}{self._signature})"

    def __reduce__(self) -> Any:
        """A function that was decorated is found by its name, as functions are; another is made again."""
        found = getattr(inspect.getmodule(self.function), getattr(self.function, "__qualname__", ""), None)
        if found is self:
            return self.function.__qualname__
        return functools.partial(Rowwise, strict=self.strict), (self.function,)

    # --- to look inside -----------------------------------------------------------------------------------------------

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """A description of what runs for these arguments; `print` shows it as text.

        Args:
            args: as in a call.
            kwargs: as in a call.
        """
        given = self._positional(args, kwargs)
        call = self._looked_at(given, compat.any_autocast_enabled() and _autocast(), warns=False)
        if call.program is None or call.program.uncompiled:
            return Explanation(self.name, call.reason if call.program is None else call.program.uncompiled)
        try:
            return explained(call.program, self._tensors(given, call.captured))
        except launch.NotCompiledError as error:
            return Explanation(self.name, str(error))

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Triton source of the kernels for these arguments.

        Args:
            args: as in a call.
            kwargs: as in a call.
        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        given = self._positional(args, kwargs)
        found = self._programs.find(given, compat.any_autocast_enabled() and _autocast())
        program = found.program
        grouped = program.is_grouped(self._tensors(given, found.captured))
        how: dict[str, bool] = {"grouped": grouped, "tiled": program.tiled}
        outputs, wanted = list(range(program.count)), list(program.plan.differentiable)
        kernels = forward_kernels(program.plan, program.acc, **how, saves=True)
        kernels += backward_kernels(program.plan, program.acc, **how, given=outputs, wanted=wanted)
        return "\n\n".join([kernel.source for kernel in kernels])

    # --- calls --------------------------------------------------------------------------------------------------------

    def _tensors(self, args: Sequence[Any], captured: Sequence[int]) -> list[Tensor]:
        """Those of a call, in the order of a program's inputs."""
        around = self._programs.looks(args).at(args)[2]
        return [*[a for a in args if isinstance(a, Tensor)], *[around[place] for place in captured]]

    def _positional(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in order, with their defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())

    def _run(self, *args: Any) -> Any:
        """The function, whose parameters by keyword alone are here by place like others."""
        if not self._by_keyword:
            return self.function(*args)  # type: ignore[call-arg]
        first = len(args) - len(self._by_keyword)
        return self.function(*args[:first], **dict(zip(self._by_keyword, args[first:], strict=True)))

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Under torch.compile: one node of the graph, in which the next tracer meets the registered operators."""
        if kwargs or len(args) != self._count:
            args = self._positional(args, kwargs)
        if any(not isinstance(a, (Tensor, *PLAIN)) for a in args):
            return self._run(*args)
        if compat.is_exporting():
            return self._run(*args)
        watched = self._watched()
        if not watched or not self._allow():  # what is around would be constants of the graph
            return self._run(*args)
        for compare in getattr(self._watching, watched):
            compare()
        return self._in_graph(*args)

    def _looked_at(self, args: Sequence[Any], autocast: Any, *, warns: bool = True) -> _Call:
        """What is to run for a call that is new."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        kinds = {t.device.type for t in (*tensors, *_inside(args))}
        if not any(map(launch.runs_kernels, kinds)):
            return _Call(
                None, reason=f"there are no kernels for {' and '.join(sorted(kinds)) or 'calls without'} tensors"
            )
        if all(not t.is_nested and t.layout is torch.strided for t in tensors) and any(t.numel() == 0 for t in tensors):
            return _Call(None, reason="a tensor has no elements")
        devices = {t.device for t in tensors if t.dim()}
        if len(devices) > 1:
            raise RuntimeError(
                f"{self.name}: tensors are on {' and '.join(sorted(map(str, devices)))}, expected one device"
            )
        try:
            if any(t.is_nested or t.layout is not torch.strided for t in tensors):
                raise NotRowwiseError(f"{self.name}: a tensor is nested or sparse, and not dense")
            if devices and any(t.device not in devices for t in tensors):
                raise NotRowwiseError(f"{self.name}: a number is a tensor of another device; pass it as a number")
            found = self._programs.find(args, autocast)
        except NotRowwiseError as error:
            if self.strict and warns:
                raise
            if warns and not self._warned:
                self._warned = True
                warnings.warn(
                    f"fusedops.rowwise does not fuse {self.name}, and runs it as plain PyTorch: {error}",
                    RuntimeWarning,
                    stacklevel=_stacklevel(),
                )
            return _Call(None, reason=str(error))
        found.program.strict = self.strict
        places = tuple([i for i, a in enumerate(args) if isinstance(a, Tensor)])
        return _Call(found.program, places, found.captured, token=(*devices, *map(type, tensors)))


def function_of(target: Any) -> Callable[..., Any] | None:
    """The function that a node of a graph from torch.compile calls, of the user's; None for other nodes."""
    found: Callable[..., Any] | None = getattr(target, "__fusedops_function__", None)
    return found


UNWRAPPED[Rowwise] = "function"


class Method(Generic[_P, _R]):
    """A `Rowwise` function with the object whose method it is, like a bound method of Python's."""

    # Together, as Dynamo of PyTorch 2.11 looks for an attribute with a `__get__` of its own in the class; empty for the
    # object that it makes in order to trace one, and hashes.
    _bound: tuple[Any, ...] = ()

    def __init__(self, function: Rowwise[..., _R], instance: Any) -> None:
        self._bound = function, instance
        self.__doc__, self.__name__ = function.__doc__, function.name
        self.__qualname__ = getattr(function, "__qualname__", function.name)

    @property
    def __func__(self) -> Any:
        """The function."""
        return self._bound[0]

    @property
    def __self__(self) -> Any:
        """The object."""
        return self._bound[1]

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's, without the object."""
        signature: inspect.Signature = self.__func__._signature
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """The method's outputs."""
        function, instance = self._bound
        return function(instance, *args, **kwargs)  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._bound)))

    def __repr__(self) -> str:
        return f"{self.__func__!r} of {type(self.__self__).__name__}"

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.name)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """See `Rowwise.explain`."""
        return self.__func__.explain(self.__self__, *args, **kwargs)  # type: ignore[no-any-return]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """See `Rowwise.source`."""
        return self.__func__.source(self.__self__, *args, **kwargs)  # type: ignore[no-any-return]


UNWRAPPED[Method] = "_bound"


def _number(value: Any) -> Any:
    """A number that torch.compile has made a symbol of: programs are for numbers."""
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, (torch.SymInt, torch.SymBool)) else value


def _stacklevel() -> int:
    """Of the caller's frame, for a warning that the calling function gives: of the call, outside of this file."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    return level


def _inside(args: Sequence[Any]) -> list[Tensor]:
    """Tensors in lists and tuples."""
    return [inner for a in args if isinstance(a, (list, tuple)) for inner in a if isinstance(inner, Tensor)]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        [(kind, torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    )


def _allowed(function: Callable[..., Any]) -> bool:
    """Tells torch.compile not to look into a function: late, for the sake of the second that it takes to be imported."""
    torch.compiler.allow_in_graph(function)
    return True
