"""`fusedops.rowwise`: plain PyTorch operators run as one kernel forward and one backward."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from ..core.calls import checks
from ..core.calls.call import launched, launched_into, run
from ..core.compat.dispatch import (
    any_autocast_enabled,
    in_forward_mode,
    is_intercepted,
    transforms,
)
from ..core.compat.dynamo import constant_when_traced, is_exporting
from ..core.launches import launch
from .complex_numbers import as_pairs
from .errors import NotRowwiseError
from .explanation import Explanation, explained
from .guards import Guards
from .horizontal.foreach import Foreach, SlicesExplanation
from .launching import kernels_of
from .objects import PLAIN
from .operator import Program, RowwiseConstants
from .programs import Programs, is_dense, tensors_of
from .reader import Look
from .site import RowwiseSite
from .state import Looks, call_key
from .tracing import recording
from .walking import INTERNALS, UNWRAPPED

__all__ = ["Rowwise", "function_of", "rowwise"]

# The most calls, and groups of calls, in a function's cache. At this size the cache is cleared.
_MOST_CALLS = 8192


# The folder of this package's frames: see `_stacklevel`.
_HERE = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - a text, compared with others

# Globals of this module, as every call looks them up.
_is_traced = torch.compiler.is_dynamo_compiling
_records_gradients = torch.is_grad_enabled

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_Self = TypeVar("_Self")


@overload
def rowwise(function: Callable[_P, _R], *, strict: bool = ...) -> Rowwise[_P, _R]: ...
@overload
def rowwise(
    function: None = ..., *, strict: bool = ...
) -> Callable[[Callable[_P, _R]], Rowwise[_P, _R]]: ...
def rowwise(function: Callable[..., Any] | None = None, *, strict: bool = False) -> Any:
    """A function that runs as one kernel forward and one backward.

    Each output row may depend on the same row of the inputs and on vectors that all rows share. The
    function takes tensors and numbers. It may call PyTorch's operators for arithmetic, comparisons,
    `torch.where`, activations and casts; sums, means, norms and softmax over the last dimensions;
    `chunk`, `cat` and equal slices of a row; and `F.dropout`, whose mask is recomputed in the
    backward and never stored. The function is traced at its first call. A call with another number
    of rows uses the same kernels. A call with another dtype, row length or Python number is traced
    again. On a device without kernels, such as a CPU, the function itself runs.

    Args:
        function: the function.
        strict: True raises `NotRowwiseError` if the function cannot be fused, or Triton cannot
            compile a kernel of it. False runs such a function unfused, and warns once with the
            reason.
    Returns:
        A `Rowwise`, called like the function.
    Raises:
        TypeError: ``strict`` is no bool; the function is none of Python, is async, yields, or takes
            a variable number of arguments.

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
        is_of_a_class = isinstance(function, (MethodType, torch.nn.Module))
        decorated = ", or decorate the method in its class" if is_of_a_class else ""
        raise TypeError(
            f"rowwise: takes a function of Python, got {type(function).__name__}; write one that "
            f"calls it{decorated}"
        )
    return Rowwise(function, strict=strict)


@dataclass(frozen=True, slots=True)
class _Call:
    """A resolved call.

    Attributes:
        program: the program that runs; None for the function itself.
        captured: the positions, in the state, of the captured tensors.
        reason: why no program runs; "" if one does.
        look: the look that reads the captured tensors; None for the function itself.
        select: selects the program's inputs from the arguments and the tensors in the state.
        results: makes what the function returns of the program's outputs.
        constants: the record of the call's constants; None for the function itself.
        sites: the site of a launch without a backward, and of one with a backward; None for calls
            that are not launched directly.
    """

    program: Program | None
    captured: tuple[int, ...] = ()
    reason: str = ""
    look: Look | None = None
    select: Callable[[tuple[Any, ...]], tuple[Tensor, ...]] = tuple
    results: Callable[[Any], Any] = tuple
    constants: RowwiseConstants | None = None
    sites: tuple[RowwiseSite | None, ...] = ()


@dataclass(frozen=True, slots=True)
class _CallGroup:
    """Calls with arguments of the same kinds, by the state around the function.

    A key of ``calls`` has the kinds of the tensors in the state, too: see `_with_kinds`.
    """

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
        self.function = function
        self.strict = strict
        self.name = getattr(function, "__name__", type(function).__name__)
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise TypeError(f"rowwise: {self.name} takes a variable number of arguments; name each")
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"rowwise: {self.name} is async; write it with `def`, and call it where its inputs "
                "were awaited"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"rowwise: {self.name} yields its results; return a tuple of them")
        self._by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        # The number of arguments in a call that needs no binding: all are there, by position. No
        # call of a function with keyword-only parameters is one.
        self._count = -1 if self._by_keyword else len(parameters)
        assert isinstance(function, FunctionType)
        self._programs = Programs(function, self.name, list(self._signature.parameters), self._run)
        # The forms of calls: how many arguments come by position, and the names of the others.
        self._forms: set[tuple[Any, ...]] = set()
        self._defaults = [(p.name, p.default) for p in parameters]
        self._calls: dict[Any, _CallGroup] = {}
        self._key = call_key(len(parameters))
        self._cached = 0  # calls and groups
        self._warned = False
        # For torch.compile; `_compiled` calls all three. They are plain functions: Dynamo registers
        # functions by their identity, and a bound method is a new object at each access.
        self._in_graph: Callable[..., Any] = lambda *args: self._called(args)
        self._in_graph.__name__ = self.name
        self._in_graph.__fusedops_function__ = self._run  # type: ignore[attr-defined]
        self._guards = Guards(function)
        self._guard_attribute: Callable[[], str] = constant_when_traced(
            lambda: self._guards.attribute()
        )
        self._allow: Callable[[], bool] = constant_when_traced(lambda: _allowed(self._in_graph))
        self._foreach = Foreach(
            self.name,
            list(self._signature.parameters),
            self._programs,
            self._called,
            lambda args: self._run(*args),
            self.refuse,
        )
        self._foreach_in_graph: Callable[..., Any] = lambda sizes, *args: self._all(args, sizes)
        self._foreach_in_graph.__name__ = self.name
        self._foreach_in_graph.__fusedops_function__ = (  # type: ignore[attr-defined]
            lambda sizes, *args: self._foreach.plain(args, sizes)
        )
        self._allow_foreach: Callable[[], bool] = constant_when_traced(
            lambda: _allowed(self._foreach_in_graph)
        )

    def __call__(self, *arguments: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return the function's outputs."""
        args: Any = arguments
        if _is_traced():
            return self._compiled(*args, **kwargs)  # type: ignore[no-any-return]
        if kwargs or len(args) != self._count:
            args = self._in_order(args, kwargs)
        return self._called(args)  # type: ignore[no-any-return]

    def foreach(self, *args: Any, sizes: Sequence[int] | None = None, **kwargs: Any) -> Any:
        """Call the function for each of many slices, in one launch each way.

        It is horizontal fusion: a table of embeddings, a head or an expert is a slice. The slices
        may have different row lengths, and in lists different numbers of rows, of which new ones
        compile nothing. Where one kernel cannot serve all slices, because its code depends on more
        of a row's length than numbers, those with another code have a launch of their own;
        `explain_foreach` shows them. Each slice has its own dropout mask.

        Args:
            args: the function's arguments, each in one of three forms. A list has the value of each
                slice. A tensor has all slices side by side: with ``sizes``, every tensor whose last
                dimension is their sum is split along it; without ``sizes`` and lists, every tensor
                of shape ``(*, K, D)`` has K slices of D columns, as the first one has. Any other
                tensor or number is the same for all slices.
            sizes: the row length of each slice, of tensors that have all slices.
            kwargs: as ``args``, by name.
        Returns:
            What the function returns, with a list of the slices' tensors in place of each tensor.
            If one tensor has the rows of all slices, each result is one tensor of that form:
            results of D columns are side by side, and a number of each row becomes a column.
        Raises:
            TypeError: no argument has slices.
            ValueError: lists have different lengths, or no tensor has the sizes' sum of columns.

        Example::

            f = fusedops.rowwise(lambda x, w, b: torch.tanh(F.layer_norm(x, x.shape[-1:], w, b)))
            ys = f.foreach(embeddings, weights, biases)
        """
        arguments = self._positional(args, kwargs)
        if not _is_traced():
            return self._all(arguments, sizes)
        if is_exporting() or not self.guard() or not self._allow_foreach():
            return self._foreach.plain(arguments, sizes)
        return self._foreach_in_graph(sizes, *arguments)

    def _all(self, arguments: Sequence[Any], sizes: Sequence[int] | None) -> Any:
        """Return the outputs of all slices."""
        if is_exporting():
            return self._foreach.plain(arguments, sizes)
        return self._foreach(arguments, sizes, any_autocast_enabled() and _autocast())

    def _called(self, args: Any) -> Any:
        """Return the outputs for all arguments by position. This is the hot path of a call."""
        # The function itself runs in three cases: as a part of another trace; under a transform,
        # because kernels have no rules for it; and for `torch.export`, because the process that
        # loads the exported program has not registered this program's operators.
        is_observed = is_intercepted()
        differentiates = is_observed and (transforms() or in_forward_mode())
        if differentiates or recording() or is_exporting():
            return self._run(*args)
        call, args, state_tensors = self._call_of(args)
        program = call.program
        if program is None:
            return self._run(*args)
        tensors = call.select((*args, *state_tensors) if state_tensors else args)
        saves = False
        if _records_gradients():
            for t in tensors:
                if t.requires_grad:
                    saves = True
                    break
        site = call.sites[saves]
        if is_observed or site is None:
            return call.results(run(program, call.constants, tensors, program.p))
        return call.results(launched(program, site, tensors, program.p))

    def into(self, out: Tensor, output: int, *args: Any) -> Any:
        """Return the outputs of a call without gradients, one of several in the tensor ``out``.

        It is for calls that no mode, transform or tracer sees.

        Args:
            out: a contiguous tensor of that output's shape and dtype. It may be one of the
                arguments, but shares no part of their memory otherwise.
            output: the position of that output; -1 for the last.
            args: all arguments, by position.
        """
        call, args, state_tensors = self._call_of(args)
        program = call.program
        site = call.sites[False] if call.sites else None
        if program is None or site is None:
            outs = list(self._run(*args))
            outs[output] = out.copy_(outs[output])
            return tuple(outs)
        tensors = call.select((*args, *state_tensors))
        return call.results(launched_into(program, site, tensors, out, output % program.count))

    def _call_of(self, args: Any) -> tuple[_Call, Any, list[Tensor]]:
        """Return the call of these arguments, the arguments, and the tensors in the state."""
        autocast = any_autocast_enabled() and _autocast()
        # Two lookups lead to a program: by the kinds of the arguments to a group of calls, and by
        # the state around the function (its globals, closures, objects) to a call of the group.
        #
        #   args --key--> _CallGroup --looks.at(args)--> state --> _Call --> program
        key: Any = None
        group: _CallGroup | None = None
        try:
            key = self._key(autocast, args)
            group = self._calls.get(key)
        except (TypeError, RuntimeError):
            # The key cannot be computed: if torch.compile traces this call, symbolic sizes have no
            # hash, and some tensors have no shape. Such a call is resolved each time.
            args = tuple(map(_number, args))
            group = _CallGroup(self._programs.looks(args), {})
        if group is None:
            group = self._new_group(key, args)
        _, state, state_tensors = group.looks.at(args)
        try:
            call = group.calls.get(_with_kinds(state, state_tensors))
        except (TypeError, RuntimeError):  # as above, of tensors in the state
            call = None
        if call is None:
            call, state_tensors = self._new_call(group, args, autocast)
        return call, args, state_tensors

    def _new_group(self, key: Any, args: Sequence[Any]) -> _CallGroup:
        """Return a group of calls that is added to the cache."""
        self._make_room()
        group = self._calls[key] = _CallGroup(self._programs.looks(args), {})
        return group

    def _new_call(
        self, group: _CallGroup, args: Sequence[Any], autocast: Any
    ) -> tuple[_Call, list[Tensor]]:
        """Return a call that is added to a group, and the tensors in the state."""
        call = self._resolved(args, autocast)
        # Read by the look of the program: a trace comes after another walk, see `Looks.walked`.
        look, state, state_tensors = group.looks.at(args, call.look)
        if call.look not in (None, look):  # the state has changed in another thread
            return self._new_call(group, args, autocast)
        program = call.program
        if program is not None:
            tensors = call.select((*args, *state_tensors))
            token = (tensors[program.first].device, *map(type, tensors))
            sites = [program.fitted_site(tensors, saves=saves) for saves in (False, True)]
            constants = RowwiseConstants(self.name, token)
            call = replace(call, constants=constants, sites=tuple(sites))
        self._make_room()
        with contextlib.suppress(TypeError, RuntimeError):
            group.calls[_with_kinds(state, state_tensors)] = call
        return call, state_tensors

    def _make_room(self) -> None:
        """Count one more entry of the cache, which is cleared before it has too many.

        A call that uses a removed group meanwhile still completes with it.
        """
        if self._cached >= _MOST_CALLS:
            self._calls.clear()
            self._cached = 0
        self._cached += 1

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Rowwise[_P, _R]: ...
    @overload
    def __get__(
        self: Rowwise[Concatenate[_Self, _Q], _R], instance: _Self, owner: Any = None
    ) -> Method[_Q, _R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return a method if an object's attribute is read, and the function if its class's is."""
        return self if instance is None else Method(self, instance)

    def __repr__(self) -> str:
        return f"rowwise({self.name}{self._signature})"

    def __reduce__(self) -> Any:
        """Pickle a decorated function by its name, as functions are; another by its function."""
        owner: Any = inspect.getmodule(self.function)
        qualified_name = getattr(self.function, "__qualname__", "")
        for name in qualified_name.split("."):  # of a method: its class first
            owner = getattr(owner, name, None)
        if owner is self:
            return qualified_name
        return functools.partial(Rowwise, strict=self.strict), (self.function,)

    # --- to look inside ---------------------------------------------------------------------------

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Return a description of what runs for these arguments; `print` shows it as text.

        Args:
            args: as in a call.
            kwargs: as in a call.
        """
        arguments = self._positional(args, kwargs)
        autocast = any_autocast_enabled() and _autocast()
        call = self._resolved(arguments, autocast, warns=False)
        if call.program is None:
            return Explanation(self.name, call.reason)
        if call.program.uncompiled:
            return Explanation(self.name, call.program.uncompiled)
        try:
            return explained(call.program, self._tensors(arguments, call.look, call.captured))
        except launch.NotCompiledError as error:
            return Explanation(self.name, str(error))

    def explain_foreach(
        self, *args: Any, sizes: Sequence[int] | None = None, **kwargs: Any
    ) -> SlicesExplanation:
        """Return which slices are one launch for these arguments; `print` shows it as text.

        Args:
            args: as in `foreach`.
            sizes: as in `foreach`.
            kwargs: as in `foreach`.
        """
        arguments = self._positional(args, kwargs)
        autocast = any_autocast_enabled() and _autocast()
        return self._foreach.explained(arguments, sizes, autocast)

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Return the Triton source of the kernels for these arguments.

        Args:
            args: as in a call.
            kwargs: as in a call.
        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        program, tensors = self.program_of(self._positional(args, kwargs))
        return "\n\n".join([kernel.source for kernel in kernels_of(program, tensors)])

    def program_of(self, arguments: Sequence[Any]) -> tuple[Program, list[Tensor]]:
        """Return the program of a call, and its inputs.

        Args:
            arguments: all of the function's arguments, by position.
        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        autocast = any_autocast_enabled() and _autocast()
        match = self._programs.find(arguments, autocast)
        return match.program, self._tensors(arguments, match.look, match.captured)

    # --- calls ------------------------------------------------------------------------------------

    def _tensors(
        self, args: Sequence[Any], look: Look | None, captured: Sequence[int]
    ) -> list[Tensor]:
        """Return the tensors of a call, in the order of a program's inputs."""
        _, _, state_tensors = self._programs.looks(args).at(args, look)
        return tensors_of(args) + [as_pairs(state_tensors[position]) for position in captured]

    def _positional(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in order, with their defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())

    def _in_order(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what `_positional` does, in a quarter of the time from the second call on.

        Dynamo traces `_positional` instead: a set that grows would be a guard.
        """
        form = (len(args), *kwargs)
        if form not in self._forms:
            self._signature.bind(*args, **kwargs)
            self._forms.add(form)
        remaining = self._defaults[len(args) :]
        return (*args, *[kwargs.get(name, default) for name, default in remaining])

    def _run(self, *args: Any) -> Any:
        """Call the function itself; here keyword-only arguments come by position, as others do."""
        if not self._by_keyword:
            return self.function(*args)  # type: ignore[call-arg]
        first = len(args) - len(self._by_keyword)
        keywords = dict(zip(self._by_keyword, args[first:], strict=True))
        return self.function(*args[:first], **keywords)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Add one node to torch.compile's graph, from which a later tracer calls the operators."""
        if kwargs or len(args) != self._count:
            args = self._positional(args, kwargs)
        if not all(isinstance(a, (Tensor, *PLAIN)) for a in args):
            return self._run(*args)
        if is_exporting():
            return self._run(*args)
        # Without guards the variables that the function reads would be constants of the graph.
        if not self.guard() or not self._allow():
            return self._run(*args)
        return self._in_graph(*args)

    def guard(self) -> bool:
        """Make torch.compile guard on the variables that the function reads; False if it cannot."""
        guards = self._guard_attribute()
        if not guards:
            return False
        # Dynamo traces these calls. Each branch on a variable in them is a guard; nothing else of
        # them is needed.
        for compare in getattr(self._guards, guards):
            compare()
        return True

    def _resolved(self, args: Sequence[Any], autocast: Any, *, warns: bool = True) -> _Call:
        """Return what is to run for a new call: a program, or the function and the reason."""
        tensors = tensors_of(args)
        reason = _reason_to_run_unfused(args, tensors)
        if reason:
            return _Call(None, reason=reason)
        # A tensor without dimensions is a number, which PyTorch combines across devices.
        devices = {t.device for t in tensors if t.dim()}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise RuntimeError(f"{self.name}: tensors are on {names}, expected one device")
        try:
            self._check_tensors(tensors, devices)
            match = self._programs.find(args, autocast)
        except NotRowwiseError as error:
            if warns:
                self.refuse(error)
            return _Call(None, reason=str(error))
        checks.check_jit(self.name)
        match.program.strict = self.strict
        _, _, state_tensors = self._programs.looks(args).at(args, match.look)
        positions = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        positions += [len(args) + i for i in match.captured]
        select, results = _selector(positions), _results(match.program)
        if any(t.is_complex() for t in (*args, *state_tensors) if isinstance(t, Tensor)):
            select = _of_pairs(select)
        return _Call(match.program, match.captured, "", match.look, select, results)

    def _check_tensors(self, tensors: Sequence[Tensor], devices: Collection[torch.device]) -> None:
        """Raise `NotRowwiseError` for tensors that kernels cannot read."""
        if not all(map(is_dense, tensors)):
            raise NotRowwiseError(f"{self.name}: a tensor is nested or sparse, and not dense")
        if devices and any(t.device not in devices for t in tensors):
            raise NotRowwiseError(
                f"{self.name}: a number is a tensor of another device; pass it as a number"
            )

    def refuse(self, error: NotRowwiseError) -> None:
        """Raise the error if the function is strict; else warn."""
        if self.strict:
            raise error
        self._warn_once(error)

    def _warn_once(self, error: NotRowwiseError) -> None:
        """Warn that the function runs unfused, with the caller's line."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"fusedops.rowwise does not fuse {self.name}, and runs it as plain PyTorch: {error}",
            RuntimeWarning,
            stacklevel=_stacklevel(),
        )


def function_of(target: Any) -> Callable[..., Any] | None:
    """Return the user's function that a node of torch.compile's graph calls; None for others."""
    function: Callable[..., Any] | None = getattr(target, "__fusedops_function__", None)
    return function


UNWRAPPED[Rowwise] = "function"
INTERNALS[Rowwise] = frozenset(vars(Rowwise(lambda: None)))


class Method(Generic[_P, _R]):
    """A `Rowwise` function bound to an object, like a bound method of Python."""

    # The function and the object. They are in one tuple, because Dynamo of PyTorch 2.11 searches
    # the class for an attribute whose value has a `__get__`, and a `Rowwise` has one. The class has
    # an empty tuple, because Dynamo creates an object without `__init__` to trace a method, and
    # hashes it.
    _bound: tuple[Any, ...] = ()

    def __init__(self, function: Rowwise[..., _R], instance: Any) -> None:
        self._bound = function, instance
        self.__doc__ = function.__doc__
        self.__name__ = function.name
        self.__qualname__ = getattr(function, "__qualname__", function.name)

    @property
    def __func__(self) -> Any:
        """Return the function."""
        return self._bound[0]

    @property
    def __self__(self) -> Any:
        """Return the object."""
        return self._bound[1]

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the function's signature, without the object."""
        signature: inspect.Signature = self.__func__._signature
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return the method's outputs."""
        function, instance = self._bound
        return function(instance, *args, **kwargs)  # type: ignore[no-any-return]

    def foreach(self, *args: Any, sizes: Sequence[int] | None = None, **kwargs: Any) -> Any:
        """Call the method for each of many slices: see `Rowwise.foreach`."""
        function, instance = self._bound
        return function.foreach(instance, *args, sizes=sizes, **kwargs)

    def explain_foreach(
        self, *args: Any, sizes: Sequence[int] | None = None, **kwargs: Any
    ) -> SlicesExplanation:
        """Return which slices are one launch: see `Rowwise.explain_foreach`."""
        function, instance = self._bound
        return function.explain_foreach(  # type: ignore[no-any-return]
            instance, *args, sizes=sizes, **kwargs
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Method):
            return False
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

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


def _selector(positions: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function that selects these of several values, as a tuple."""
    adjacent = range(positions[0], positions[-1] + 1)
    if positions == list(adjacent):
        return itemgetter(slice(adjacent.start, adjacent.stop))  # of all values, the same object
    return itemgetter(*positions)


def _of_pairs(select: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a selector that returns complex tensors as their pairs."""
    return lambda values: tuple(map(as_pairs, select(values)))


def _results(program: Program) -> Callable[[Any], Any]:
    """Return the function that makes what the user's function returns of a program's outputs."""
    # What follows the function's own results is only saved for the backward.
    results = slice(program.count)
    makers: dict[str, Callable[[Any], Any]] = {
        "tensor": itemgetter(0),
        "tuple": lambda outs: tuple(outs[results]),
        "list": lambda outs: list(outs[results]),
    }
    return makers[program.structure.container]


def _with_kinds(state: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the state with the kind of each tensor in it. A state alone has only their positions.

    A captured tensor may have another dtype, shape or device in the next call.
    """
    if not tensors:
        return state
    return (state, *[(type(t), t.dtype, t.layout, t.device, t.shape) for t in tensors])


def _reason_to_run_unfused(args: Sequence[Any], tensors: Sequence[Tensor]) -> str:
    """Return why no kernel is to run for these arguments, which is no fault of the function."""
    kinds = {t.device.type for t in (*tensors, *_inside(args))}
    if not any(map(launch.runs_kernels, kinds)):
        names = " and ".join(sorted(kinds)) or "calls without"
        step = ""
        if "cpu" in kinds:
            step = "; set TRITON_INTERPRET=1 to run them there, slowly; source() needs no GPU"
        return f"there are no kernels for {names} tensors{step}"
    # A nested or sparse tensor is an error, which comes later, even if another tensor is empty.
    if not all(map(is_dense, tensors)):
        return ""
    has_empty = any(tensor.numel() == 0 for tensor in tensors)
    return "a tensor has no elements" if has_empty else ""


def _number(value: Any) -> Any:
    """Return the number of a symbol from torch.compile, since programs are traced for numbers."""
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, (torch.SymInt, torch.SymBool)) else value


def _stacklevel() -> int:
    """Return the ``stacklevel`` with which the calling function's warning names the user's line.

    `warnings.warn` counts its caller, `_warn_once`, as 1. The user's frame is the first above those
    of this package::

        _warn_once   _raise_or_warn   _resolved   _new_call   _called   __call__   user
        1            2                3           4           5         6          7

    The loop also counts this function's own frame in place of the user's: the result is 7.
    """
    frame = inspect.currentframe()
    level = 0
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    return level


def _inside(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in lists and tuples."""
    sequences = [a for a in args if isinstance(a, (list, tuple))]
    return tensors_of(list(itertools.chain(*sequences)))


def _autocast() -> tuple[Any, ...]:
    """Return the devices for which autocast is enabled, each with its dtype."""
    kinds = filter(torch.is_autocast_enabled, ("cuda", "cpu"))
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds])


def _allowed(function: Callable[..., Any]) -> bool:
    """Make torch.compile call a function as one node of its graph.

    It is called in the first trace, because it imports Dynamo, which takes a second.
    """
    torch.compiler.allow_in_graph(function)
    return True
