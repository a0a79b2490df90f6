"""`fusedops.rowwise`: a function of plain PyTorch operators, run as one kernel forward and one backward."""

from __future__ import annotations

import functools
import inspect
import linecache
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import compat, launch
from ..core.call import run
from .codegen import backward_kernels, forward_kernels
from .errors import NotRowwiseError
from .operator import Program, dynamic_axes
from .planning import planned
from .structure import Structure, structured
from .tracing import Captured, Traced, trace

__all__ = ["Rowwise", "rowwise"]

_MOST_CALLS = 8192
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def rowwise(function: Callable[..., Any] | None = None, *, strict: bool = False) -> Any:
    """A function whose rows depend on their own row and on shared vectors, as one kernel forward and one backward.

    The function takes tensors and numbers and is made of PyTorch's operators: arithmetic, comparisons, `torch.where`,
    activations, casts, sums, means, norms and softmax over the last dimensions, `chunk`, `cat` and equal slices of a row, and
    `F.dropout`, whose mask is drawn again in the backward and never stored. It is traced at its first call; calls with
    another number of rows use the same kernels, other dtypes, row lengths or numbers are traced anew. On devices without the
    kernels the function itself runs.

    Args:
        function: the function.
        strict: raise `NotRowwiseError` where it cannot be one kernel; otherwise a warning says why, once, and the function
            runs as it is.
    Returns:
        a `Rowwise`, called like the function.

    Example::

        @fusedops.rowwise
        def gated_residual_norm(x, gamma, residual, weight):
            z = residual + gamma * F.dropout(F.silu(x), 0.1)
            return F.rms_norm(z, z.shape[-1:], weight, 1e-6), z
    """
    if function is None:
        return functools.partial(rowwise, strict=strict)
    if not callable(function):
        raise TypeError(f"rowwise: function must be callable, got {type(function).__name__}")
    return Rowwise(function, strict=strict)


class Rowwise:
    """A function that runs as kernels: what `rowwise` returns.

    Attributes:
        function: the user's.
        strict: whether a function that cannot be one kernel is an error.
    """

    def __init__(self, function: Callable[..., Any], *, strict: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.function, self.strict = function, strict
        self.name = getattr(function, "__name__", type(function).__name__)
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise TypeError(f"rowwise: {self.name} takes a variable number of arguments")
        self._count = len(parameters)
        self._by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._in_graph = torch.compiler.allow_in_graph(self._node)
        self._variants: dict[Any, _Variant] = {}
        self._calls: dict[Any, _Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's outputs."""
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(*args, **kwargs)
        if kwargs or len(args) != self._count:
            args = self._positional(args, kwargs)
        autocast = compat.any_autocast_enabled() and _autocast()
        key = (
            autocast,
            *[(type(a), a.dtype, a.device, a.shape) if isinstance(a, Tensor) else (type(a), a) for a in args],
        )
        try:
            call = self._calls.get(key)
        except TypeError:  # sizes that are symbols: torch.compile traces this call
            call = self._call(args, autocast)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[key] = self._call(args, autocast)
        if call.program is None:
            return self._run(*args)
        tensors = [args[place] for place in call.places]
        if call.captured:
            tensors += [captured.find() for captured in call.captured]
        program = call.program
        outs = run(program, (self.name,), tensors, program.p)
        return outs[0] if program.structure.single else tuple(outs[: program.count])

    def _node(self, *args: Any) -> Any:
        return self(*args)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method where the function is one."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"rowwise({self.name}{self._signature})"

    # --- to look inside -----------------------------------------------------------------------------------------------

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Triton source of both kernels for these arguments.

        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        program = self._program(*args, **kwargs)
        how = {"grouped": bool(program.group), "tiled": program.tiled}
        given, wanted = list(range(program.count)), list(program.plan.differentiable)
        kernels = forward_kernels(program.plan, program.acc, **how, saves=True)
        kernels += backward_kernels(program.plan, program.acc, **how, given=given, wanted=wanted)
        return "\n\n".join([kernel.source for kernel in kernels])

    def _program(self, *args: Any, **kwargs: Any) -> Program:
        args = self._positional(args, kwargs)
        return self._found(args, compat.any_autocast_enabled() and _autocast())[0]

    # --- which program ------------------------------------------------------------------------------------------------

    def _positional(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in order, with their defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())

    def _run(self, *args: Any) -> Any:
        """The function, whose parameters by keyword alone are here by place like others."""
        if not self._by_keyword:
            return self.function(*args)
        first = len(args) - len(self._by_keyword)
        return self.function(*args[:first], **dict(zip(self._by_keyword, args[first:], strict=True)))

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Under torch.compile: one node of the graph, in which the next tracer meets the registered operators."""
        if kwargs or len(args) != self._count:
            args = self._positional(args, kwargs)
        if _captures(self.function):  # its tensors would be constants of the graph
            return self._run(*args)
        return self._in_graph(*args)

    def _call(self, args: Sequence[Any], autocast: Any) -> _Call:
        """The program for a call that is new; none where the function itself is to run."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not tensors or not launch.runs_kernels(tensors[0].device.type) or any(t.numel() == 0 for t in tensors):
            return _Call(None, [], [])
        devices = {t.device for t in tensors if t.dim()}
        if len(devices) > 1:
            raise RuntimeError(
                f"{self.name}: tensors are on {' and '.join(sorted(map(str, devices)))}, expected one device"
            )
        try:
            program, captured = self._found(args, autocast)
        except NotRowwiseError as error:
            if self.strict:
                raise
            warnings.warn(f"fusedops.rowwise runs {self.name} as it is. {error}", RuntimeWarning, stacklevel=4)
            return _Call(None, [], [])
        return _Call(program, [i for i, a in enumerate(args) if isinstance(a, Tensor)], captured)

    def _found(self, args: Sequence[Any], autocast: Any) -> tuple[Program, list[Captured]]:
        constants = tuple([None if isinstance(a, Tensor) else (type(a), a) for a in args])
        tensors = [a for a in args if isinstance(a, Tensor)]
        variant = self._variants.setdefault((constants, autocast, tensors[0].device.type), _Variant())
        for program, captured in variant.programs:
            if program.fits([*tensors, *[c.find() for c in captured]]):
                return program, captured
        try:
            with compat.without_modes():
                made = self._traced(args)
        except NotRowwiseError:
            raise
        except Exception as error:
            self._run(*args)  # what is wrong with the call is said in PyTorch's words
            raise NotRowwiseError(f"{self.name}: it cannot be traced: {error}") from error
        variant.programs.append(made)
        return made

    def _traced(self, args: Sequence[Any]) -> tuple[Program, list[Captured]]:
        _check_code(self.function, self.name)
        shapes = [compat.hints(a.shape) for a in args if isinstance(a, Tensor)]
        try:
            traced, structure = self._at(args, _larger(shapes))
        except Exception:  # noqa: BLE001 - tensors of one row fit together where those of more do not
            traced, structure = self._at(args, shapes)
        others = _other_sizes(structure)
        try:
            again = self._at(args, others)[1].text()
        except Exception as error:  # noqa: BLE001 - whatever fails for other sizes shows that they matter
            again = repr(error)
        if again != structure.text():
            raise NotRowwiseError(f"{self.name}: what it computes hangs on the number of rows")
        return Program(self.name, self._with(args), planned(structure)), traced.captured

    def _with(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The function of its tensors alone, with the numbers of a call."""
        places = [place for place, a in enumerate(args) if isinstance(a, Tensor)]
        numbers = [None if isinstance(a, Tensor) else a for a in args]

        def function(*tensors: Tensor) -> Any:
            given = list(numbers)
            for place, tensor in zip(places, tensors, strict=False):  # those that are captured come last
                given[place] = tensor
            return self._run(*given)

        return function

    def _at(self, args: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Traced, Structure]:
        names = [name for name, a in zip(self._names(len(args)), args, strict=True) if isinstance(a, Tensor)]
        sized = iter(shapes)
        given = [_Sample(a, next(sized)).tensor if isinstance(a, Tensor) else a for a in args]
        traced = trace(self._run, given, self.function, names, functools.partial(_origin, self.function))
        return traced, structured(traced)

    def _names(self, count: int) -> list[str]:
        return list(self._signature.parameters)[:count]


class _Variant:
    """The programs of a function for some numbers."""

    def __init__(self) -> None:
        self.programs: list[tuple[Program, list[Captured]]] = []


class _Call:
    """A call whose arguments were looked at."""

    __slots__ = ("captured", "places", "program")

    def __init__(self, program: Program | None, places: list[int], captured: list[Captured]) -> None:
        self.program, self.places, self.captured = program, places, captured


class _Sample:
    """A tensor without memory like another, in another shape."""

    def __init__(self, like: Tensor, shape: tuple[int, ...]) -> None:
        if like.layout is not torch.strided or like.is_nested:
            self.tensor = like
        else:
            with compat.without_modes():
                self.tensor = torch.empty(shape, dtype=like.dtype, device="meta")
            self.tensor.fusedops_device = like.device  # type: ignore[attr-defined]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        [(kind, torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    )


def _larger(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes with a batch of one as a batch of more, so that what is broadcast is not taken for it."""
    rank = max(map(len, shapes))
    found = list(shapes)
    for place in range(2, rank + 1):
        there = [shape for shape in shapes if len(shape) >= place]
        if all(shape[-place] == 1 for shape in there):
            found = [
                (*shape[:-place], 2, *shape[len(shape) - place + 1 :]) if len(shape) >= place else shape
                for shape in found
            ]
    return found


def _other_sizes(structure: Structure) -> list[tuple[int, ...]]:
    """Shapes with other numbers of rows, one prime for each axis."""
    dynamic = dynamic_axes(structure)
    others = [prime for prime in _PRIMES if prime not in structure.sizes]
    primes = dict(zip(sorted(dynamic), others, strict=False))
    return [tuple([primes[label[0]] if len(label) == 1 and label[0] in primes else _static(structure, label)
                   for label in operand.labels]) for operand in structure.inputs]  # fmt: skip


def _static(structure: Structure, label: Sequence[int]) -> int:
    size = 1
    for axis in label:
        size *= structure.sizes[axis]
    return size


@compat.constant_when_traced
def _captures(function: Callable[..., Any]) -> bool:
    """Whether tensors, or modules, are among the variables around a function."""
    return any(
        isinstance(value, (Tensor, nn.Module)) for _, find in _around(function) if (value := _got(find)) is not None
    )


def _check_code(function: Callable[..., Any], name: str) -> None:
    """Raises where the function changes what is not its own."""
    import dis

    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line if isinstance(instruction.starts_line, int) and not isinstance(
            instruction.starts_line, bool) else getattr(instruction, "line_number", None) or line  # fmt: skip
        changes = instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR") or (
            instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars
        )
        if changes:
            text = linecache.getline(code.co_filename, line).strip()
            raise NotRowwiseError(f"{name}: it changes {instruction.argval}, which is not its own\n"
                                  f"  line {line} of {code.co_filename}: {text}")  # fmt: skip


def _around(function: Callable[..., Any]) -> list[tuple[str, Callable[[], Any]]]:
    """The variables around a function that it names, and how each is found."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None:
        return []
    cells = zip(code.co_freevars, inner.__closure__ or (), strict=True)
    scope = inner.__globals__
    found: list[tuple[str, Callable[[], Any]]] = [
        (name, functools.partial(getattr, cell, "cell_contents")) for name, cell in cells
    ]
    return [*found, *[(name, functools.partial(scope.__getitem__, name)) for name in code.co_names if name in scope]]


def _got(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except ValueError:  # an empty cell
        return None


def _origin(function: Callable[..., Any], tensor: Tensor) -> Captured | None:
    """Where a function has a tensor from: a variable around it, or a parameter of a module there."""
    found = (_within(name, find, tensor) for name, find in _around(function))
    return next((captured for captured in found if captured is not None), None)


def _at_path(find: Callable[[], Any], path: str) -> Tensor:
    found: Tensor = functools.reduce(getattr, path.split("."), find())
    return found


def _within(name: str, find: Callable[[], Any], tensor: Tensor) -> Captured | None:
    value = _got(find)
    if value is tensor:
        return Captured(name, find)
    if isinstance(value, nn.Module):
        for path, inner in (*value.named_parameters(), *value.named_buffers()):
            if inner is tensor:
                return Captured(path.replace(".", "_"), functools.partial(_at_path, find, path))
    return None
