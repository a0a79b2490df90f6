"""The program of a region: `fusedops.compiler` traces it like a function of the user's."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional as F

from ..compiler import launching
from ..compiler.errors import NotRowwiseError
from ..compiler.operator import Program
from ..compiler.planning import planned
from ..compiler.rows import structured
from ..compiler.structure import Structure
from ..compiler.traced import Traced
from ..compiler.tracing import trace
from ..core.compat import fake
from ..core.compat.dispatch import without_modes
from ..core.configs import tuning
from ..core.launches import launch
from .dimensions import (
    Join,
    Split,
    are_joined,
    joins_of,
    split_dimensions,
    split_shape,
    splits_of,
)
from .fx import recording_nothing
from .graphs import dtype_of, hints_of, is_tensor, name_of, value_of
from .regions import CHANGING, Region
from .symbols import has_one_value, hint_of, settled

__all__ = ["InputKinds", "RegionProgram", "Source", "build", "function_of", "prepare", "source_of"]

# For the text and the tensors of each region, the source of its program, or the reason why there is
# none. It is cleared when it is full: a process may compile ever new models.
_known: dict[Any, Any] = {}
_MOST = 4096
# Where a symbol is the size of a dimension: the tensor's position, the dimension, and the factor
# and the summand of the symbol in its size.
_Location = tuple[int, int, int, int]


class RegionProgram:
    """A region's program, with the region's tensors in the order of its inputs and outputs.

    Attributes:
        source: the source of the program.
        program: the program.
        inputs: nodes of the graph.
        outputs: nodes of the region, each with the number of the program's output; nodes of equal
            value have one output.
        constants: symbolic numbers that the program has as constants.
        sizes: nodes of the sizes that the function takes after its tensors, see `_Function`.
    """

    def __init__(self, source: Source, function: _Function, inputs: Sequence[fx.Node]) -> None:
        self.source, self.program = source, source.program
        self.inputs, self.sizes = inputs, function.sizes
        self.constants = function.constants
        self.outputs = list(zip(function.outputs, source.output_numbers, strict=True))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the program's inputs in the call that is traced."""
        shapes = list(map(hints_of, self.inputs))
        sizes = [fake.hints([value_of(node)]) for node in self.sizes]
        return self.source.shapes([*shapes, *sizes])

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """The strides of the program's inputs in the call that is traced."""
        return tuple(map(_strides_in, self.inputs, self.shapes))

    def wanted(self, reached: Collection[fx.Node]) -> tuple[bool, ...]:
        """Whether each input has a gradient, from the nodes that have one."""
        return tuple(map(reached.__contains__, self.inputs))

    def received(self, receives: Collection[fx.Node]) -> tuple[bool, ...]:
        """Whether each output of the program has a gradient, from the nodes that get one."""
        received = {number for node, number in self.outputs if node in receives}
        return tuple(map(received.__contains__, range(self.program.count)))

    @property
    def rows(self) -> int:
        """The number of rows of the program in the call that is traced."""
        return math.prod(map(self._size, self.program.structure.rows))

    def _size(self, axis: int) -> int:
        """The size of an axis in the call that is traced."""
        if axis not in self.program.dynamic:
            return self.program.structure.sizes[axis]
        _, position, dim = self.program.dynamic[axis]
        return self.shapes[position][dim]


class InputKinds(NamedTuple):
    """The indices of a region's tensors of some kinds, see `planned`.

    Attributes:
        also_saved: those that other nodes save.
        constant: those that get no gradient.
    """

    also_saved: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()


class Source:
    """The source of a region's program. A call runs the region in PyTorch's operators.

    Attributes:
        graph: the region as a function of its tensors.
        output_numbers: for each result of the graph, the index of the program's output.
        structure: the structure of the function.
        kinds: which tensors others save, and which get no gradient.
        splits: for each tensor, the dimensions that the program splits into several.
        joins: for each of the program's outputs, the dimensions that are one of the region's
            result.
    """

    def __init__(
        self,
        graph: fx.Graph,
        output_numbers: Sequence[int],
        structure: Structure,
        kinds: InputKinds,
    ) -> None:
        self.graph, self.output_numbers = graph, output_numbers
        self.structure, self.kinds = structure, kinds
        self.splits: list[list[Split]] = [[] for _ in structure.inputs]
        self.joins: list[list[Join]] = [[] for _ in structure.outputs]

    def shapes(self, shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The shapes of the program's inputs, from those of the region's."""
        return _split_shapes(self.splits, shapes)

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        return _forward(self.graph)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The region's results, each once."""
        outs, numbers = self._run(*tensors), self.output_numbers
        return tuple([outs[numbers.index(number)] for number in range(max(numbers) + 1)])

    @functools.cached_property
    def program(self) -> Program:
        """The program, registered."""
        saved, constant = self.kinds
        plan = planned(self.structure, memory=True, also_saved=saved, constant=constant)
        return Program("region", self, plan)


def _forward(graph: fx.Graph) -> Callable[..., Any]:
    """A graph as a function."""
    return fx.GraphModule(torch.nn.Module(), graph, "region").forward


def _split_shapes(
    splits: Sequence[Sequence[Split]], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors whose dimensions are split, from those of the whole tensors."""
    split = []
    for position, input_splits in enumerate(splits):
        split.append(split_shape(position, input_splits, shapes))
    return tuple(split)


def build(
    region: Region, saved: Collection[fx.Node] = (), needs: Collection[fx.Node] = ()
) -> RegionProgram:
    """The program of a region.

    Args:
        region: the region.
        saved: nodes that others save for the backward.
        needs: the nodes whose values have gradients; if no result of the region is one of them, its
            program is that of a region whose inputs all have gradients.
    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    tensors = list(filter(is_tensor, region.inputs))
    function = _Function(region, tensors)
    has_gradient = any(map(needs.__contains__, region.outputs))
    kinds = InputKinds(
        tuple([i for i, node in enumerate(tensors) if node in saved]),
        tuple([i for i, node in enumerate(tensors) if has_gradient and node not in needs]),
    )
    # Regions of one key have one program: a model's layers are traced and compiled once.
    key = (function.text, kinds, _operands(function, tensors), _device_of(tensors).type)
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = _source_or_reason(function, tensors, kinds)
    source_or_reason = _known[key]
    if isinstance(source_or_reason, str):
        raise NotRowwiseError(source_or_reason)
    return RegionProgram(source_or_reason, function, tensors)


def function_of(region: Region) -> fx.GraphModule:
    """A region without symbolic sizes as a function of its tensors."""
    function = _Function(region, list(filter(is_tensor, region.inputs)))
    return fx.GraphModule(torch.nn.Module(), function.graph, "region")


def source_of(function: fx.GraphModule, tensors: Sequence[Tensor]) -> Source:
    """The source of the program of a function, as it is for a region with these tensors.

    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    source, _ = _source(function.graph, tensors, [shapes], InputKinds())
    return source


def _operands(
    function: _Function, tensors: Sequence[fx.Node]
) -> tuple[tuple[torch.dtype, str], ...]:
    """The dtype of each tensor of a function, and its shape as text."""
    dtypes = map(dtype_of, tensors)
    shapes = [str(list(map(str, shape))) for shape in function.shapes]
    return tuple(zip(dtypes, shapes, strict=True))


def _device_of(tensors: Sequence[fx.Node]) -> torch.device:
    """The device of a region's tensors, which is one."""
    device: torch.device = value_of(tensors[0]).device
    return device


def _source_or_reason(
    function: _Function, tensors: Sequence[fx.Node], kinds: InputKinds
) -> Source | str:
    """The source of a region's program, or why there is none.

    The reason is text: an exception would hold the tensors of its frames.
    """
    try:
        return _build(function, tensors, kinds)
    except NotRowwiseError as error:
        return str(error).removeprefix("region: ")
    except Exception as error:  # noqa: BLE001 - it would fail again
        return f"{type(error).__name__}: {error}"


def prepare(
    programs: Sequence[tuple[RegionProgram, Collection[fx.Node]]], receives: Collection[fx.Node]
) -> list[str]:
    """Compiles the kernels of programs for the call that is traced, several at the same time.

    Args:
        programs: the programs, each with the inputs that have gradients through it.
        receives: the nodes to whose values the backward passes a gradient.
    Returns:
        For each program the reason why Triton cannot compile a kernel; "" where it compiles all.
    """
    if tuning.on_demand():  # the tuner would run them
        return [""] * len(programs)
    with recording_nothing(), without_modes():
        calls = [_call(program, wanted, receives) for program, wanted in programs]
    tasks = dict.fromkeys(itertools.product(calls, launching.PASSES))
    # Triton's passes and the assembler leave the interpreter's lock to other threads, which have
    # none of this thread's modes.
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fusedops-compile") as pool:
        reasons = dict(zip(tasks, pool.map(_reason, tasks), strict=True))
    forward, backward = launching.PASSES
    return [reasons[call, forward] or reasons[call, backward] for call in calls]


class _Call(NamedTuple):
    """A call of a program, for which its kernels are compiled.

    Attributes:
        program: the program.
        device: the device of its tensors.
        shapes: the shapes of its inputs.
        strides: the strides of its inputs.
        wanted: whether each input has a gradient.
        received: whether each output has one.
    """

    program: Program
    device: torch.device
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    wanted: tuple[bool, ...]
    received: tuple[bool, ...]


def _call(
    program: RegionProgram, wanted: Collection[fx.Node], receives: Collection[fx.Node]
) -> _Call:
    """The call that is traced."""
    return _Call(
        program.program,
        _device_of(program.inputs),
        program.shapes,
        program.strides,
        # The backward kernel depends on which gradients are wanted: with a frozen norm it differs.
        program.wanted(wanted),
        program.received(receives),
    )


def _reason(task: tuple[_Call, str]) -> str:
    """The reason why a pass is not compiled, whether the kernel's fault or the machine's."""
    try:
        return _prepared(task)
    # Of a full disk or a full GPU, say: it is not remembered.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


@functools.lru_cache(maxsize=_MOST)
def _prepared(task: tuple[_Call, str]) -> str:
    """The reason why Triton cannot compile a kernel of a pass; "" where it compiles all."""
    call, pass_name = task
    if not launch.runs_kernels(call.device.type):
        return ""
    # Without memory: kernels are compiled, but not launched.
    tensors = [
        torch.empty_strided(shape, steps, dtype=dtype, device="meta")
        for shape, steps, dtype in zip(call.shapes, call.strides, call.program.dtypes, strict=True)
    ]
    is_gpu = call.device.type == "cuda"
    try:
        with torch.cuda.device(call.device) if is_gpu else nullcontext():
            index = launch.current_device() if is_gpu else -1
            launching.prepare(call.program, index, tensors, call.wanted, call.received, pass_name)
    except launch.NotCompiledError as error:
        return str(error)
    return ""


def _strides_in(node: fx.Node, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a node's tensor in the shape in which a program takes it."""
    steps = fake.hints(value_of(node).stride())
    tensor = torch.empty_strided(hints_of(node), steps, device="meta")
    return tensor.reshape(shape).stride()


# --- a region as a function -----------------------------------------------------------------------


class _Function:
    """A region as a function of its tensors.

    Attributes:
        graph: its graph.
        text: the same for regions that are the same.
        outputs: the nodes that it returns.
        shapes: the shapes of its tensors.
        constants: symbolic numbers that it has as constants.
        sizes: nodes of sizes that cannot be computed from those of the tensors. It takes them as
            arguments, after the tensors.
    """

    def __init__(self, region: Region, tensors: Sequence[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.outputs = region.outputs
        self.expressions: list[str] = []
        self.constants: list[torch.SymInt | torch.SymFloat] = []
        self._single = _single_symbols(tensors)
        self.shapes = [tuple(map(self._dimension, value_of(node).shape)) for node in tensors]
        self._sizes = _locations(self.shapes)
        self.sizes: list[fx.Node] = []
        # From nodes of the region, and its inputs, to their copies in the function.
        self._copies: dict[fx.Node, Any] = {}
        self._add_inputs(region, tensors)
        for node in region.nodes:
            self._copies[node] = self._copy(node)
        self.graph.output(tuple([self._copies[node] for node in self.outputs]))
        for node in self.graph.nodes:
            node.meta.clear()
        # The code of `fx.GraphModule`, without the module: it would be compiled for each region.
        self.text = "\n".join([self.graph.python_code("self").src, *self.expressions])

    def _add_inputs(self, region: Region, tensors: Sequence[fx.Node]) -> None:
        """Adds the placeholders: the tensors, and `sizes`.

        Other numbers become constants, or are computed from the sizes of tensors.
        """
        copies = self._copies
        for position, node in enumerate(tensors):
            copies[node] = self.graph.placeholder(f"t{position}")
        arguments = list(copies.values())
        numbers = list(itertools.filterfalse(copies.__contains__, region.inputs))
        self.sizes = [node for node in numbers if self._is_additional_size(value_of(node))]
        for position, node in enumerate(self.sizes):
            copies[node] = self.graph.placeholder(f"size{position}")
            self.expressions.append(f"size{position} is {value_of(node)}")
        # All placeholders come first: the sizes are computed after them.
        for node in itertools.filterfalse(copies.__contains__, numbers):
            copies[node] = self._size(value_of(node), arguments)

    def _copy(self, node: fx.Node) -> Any:
        """The copy of a node in the function; for dropout, a tuple of the result and None."""
        copies = self._copies
        if name_of(node) == "native_dropout":
            args = (copies[node.args[0]], *node.args[1:3])  # type: ignore[index]
            # The compiler traces F.dropout, which returns no mask.
            return self.graph.call_function(F.dropout, args), None
        if node.target is operator.getitem:
            results = copies[node.args[0]]  # type: ignore[index]
            if isinstance(results, tuple):
                return _result_of_dropout(results, node.args[1])
        arguments, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        return self.graph.call_function(node.target, arguments, kwargs)  # type: ignore[arg-type]

    def _dimension(self, size: Any) -> Any:
        """A size as a number, as a symbol that it equals, or as it is.

        A symbolic size becomes a number if it is rounded from floats of the caller that never
        changed: ``int(196 * (1 - ratio))``, the tokens of a masked autoencoder that stay visible.
        """
        size = settled(size, self._single)
        is_rounded = any(number.is_Function for number in _free_symbols(size))
        if not is_rounded or not has_one_value(size):
            return size
        self.constants.append(size)
        return size.node.hint

    def _is_additional_size(self, value: Any) -> bool:
        """Whether a number is a size that cannot be computed from the sizes of the tensors."""
        value = settled(value, self._single)
        if not isinstance(value, torch.SymInt) or has_one_value(value):
            return False
        return not self._sizes.keys() >= set(_free_symbols(value))

    def _size(self, value: Any, arguments: Sequence[fx.Node]) -> Any:
        """A symbolic number as a node that computes it from sizes of tensors.

        A number that never changes is returned as it is.
        """
        value = settled(value, self._single)
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return value
        # With ``dynamic=True`` Dynamo makes symbols of all Python numbers, also of the eps of a
        # norm.
        if has_one_value(value):
            self.constants.append(value)
            return value.node.hint
        expression = _expression_of(value)
        # A fraction of sizes, such as 1 / x.shape[0], is no size.
        if expression is None or not expression.is_integer:
            raise NotRowwiseError("a number in it may change from call to call; make it a tensor")
        return self._computed(expression, arguments)

    def _computed(self, expression: Any, arguments: Sequence[fx.Node]) -> fx.Node:
        """A node that computes an expression of whole numbers from sizes of tensors."""
        symbols = sorted(_whole_numbers(expression), key=str)
        locations = [self._sizes[symbol] for symbol in symbols]
        sizes = [
            self.graph.call_function(torch.ops.aten.sym_size.int, (arguments[position], dim))
            for position, dim, _, _ in locations
        ]

        def size(*numbers: int) -> int:
            values = [
                (number - summand) // factor
                for number, (_, _, factor, summand) in zip(numbers, locations, strict=True)
            ]
            return _evaluated(expression, symbols, *values)

        # FX writes only the function's name into the code: the text has to distinguish two of them.
        self.expressions.append(f"{expression} of {symbols} at {locations}")
        return self.graph.call_function(size, tuple(sizes))


def _result_of_dropout(results: tuple[Any, ...], number: Any) -> Any:
    """One of dropout's two results: the tensor, or the mask, which the kernel does not store."""
    result = results[number]
    if result is None:
        raise NotRowwiseError("dropout's mask is used")
    return result


# --- sizes that are symbols -----------------------------------------------------------------------


def _single_symbols(tensors: Sequence[fx.Node]) -> list[Any]:
    """The sizes of tensors that are one symbol."""
    singles: dict[Any, Any] = {}
    for size in itertools.chain.from_iterable(value_of(node).shape for node in tensors):
        expression = _expression_of(size)
        if expression is not None and expression.is_Symbol:
            singles[expression] = size
    return list(singles.values())


def _expression_of(size: Any) -> Any:
    """The expression of a symbolic number; None of others."""
    return getattr(getattr(size, "node", None), "expr", None)


def _evaluated(expression: Any, symbols: Sequence[Any], *sizes: int) -> int:
    return int(expression.subs(dict(zip(symbols, sizes, strict=True))))


def _locations(shapes: Sequence[Sequence[Any]]) -> dict[Any, _Location]:
    """The location of each symbol in the shapes of tensors, preferably where it is a whole size.

    A symbol follows from a size that is linear in it: ``(size - summand) / factor``.
    """
    locations: dict[Any, _Location] = {}
    for position, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            expression = _expression_of(size)
            for symbol in _free_symbols(size):
                # With a class token a tensor has s + 1 rows, and perhaps no tensor has s.
                terms = _linear_terms(expression, symbol)
                if terms is None:
                    continue
                location = (position, dim, *terms)
                locations.setdefault(symbol, location)
                if expression.is_Symbol:
                    locations[symbol] = location
    return locations


def _linear_terms(expression: Any, symbol: Any) -> tuple[int, int] | None:
    """The factor and the summand of a symbol in an expression; None if they are no numbers.

    For 2 * s + 1 they are 2 and 1. In s * t the factor is a symbol, in s + t the summand is.
    """
    factor = expression.coeff(symbol)
    summand = expression - factor * symbol
    if not factor.is_Integer or not summand.is_Integer:
        return None
    return None if factor == 0 else (int(factor), int(summand))


def _free_symbols(size: Any) -> Any:
    """The unknown whole numbers that a size is computed from.

    They are symbols of whole numbers, and functions that round symbols of floats. Of
    ``s0 + floor(196 * f1)`` these are ``s0`` and ``floor(196 * f1)``, and not ``f1``.
    """
    expression = _expression_of(size)
    return () if expression is None else _whole_numbers(expression)


def _whole_numbers(expression: Any) -> set[Any]:
    """The whole numbers in an expression, see `_free_symbols`."""
    if all(symbol.is_integer for symbol in expression.free_symbols):
        return expression.free_symbols  # type: ignore[no-any-return]
    if expression.is_Function:
        return {expression}
    return set().union(*map(_whole_numbers, expression.args))


def _shapes(shapes: Sequence[Sequence[Any]], times: int) -> list[tuple[int, ...]]:
    """Shapes with numbers for the symbols, each at least ``times`` its hint.

    The numbers are multiples of the hints, so that they have their divisors: an expression such as
    s // 32 has no remainder if it had none in the traced call.
    """
    hints: dict[Any, int] = {}
    for size in itertools.chain.from_iterable(shapes):
        for symbol in _free_symbols(size):
            hints[symbol] = hint_of(symbol, size)
    numbers = {}
    for position, symbol in enumerate(sorted(hints, key=str)):
        # Another multiple for each symbol: to the tracer, equal sizes may be one axis.
        numbers[symbol] = (times + 2 * position) * hints[symbol]

    def sized(size: Any) -> int:
        if not _free_symbols(size):
            return int(size)
        return _evaluated(size.node.expr, list(numbers), *numbers.values())

    return [tuple(map(sized, shape)) for shape in shapes]


# --- tracing --------------------------------------------------------------------------------------


def _build(function: _Function, tensors: Sequence[fx.Node], kinds: InputKinds) -> Source:
    """Traces a region with two sets of sizes, to tell the sizes that change from constants.

    An axis whose size differs between the traces is a moving one. If a dimension joins it with
    other axes, the region becomes a function of split dimensions, and is traced a second time.

    Args:
        function: the region.
        tensors: its tensors.
        kinds: which tensors others save, and which get no gradient.
    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    values = list(map(value_of, tensors))
    symbolic = [*function.shapes, *[(value_of(node),) for node in function.sizes]]
    # Both sets are multiples of the sizes of the traced call. With these sizes themselves, one such
    # as s // 32 may be 1, and would be broadcast, or two sizes may be equal by chance.
    shapes = [_shapes(symbolic, times) for times in (1009, 2003)]
    source, moving = _source(function.graph, values, shapes, kinds)
    _check_constants(source.structure, symbolic, moving)
    if function.sizes or are_joined(source.structure, moving):
        axes = _axes_of_sizes(len(values), shapes, moving)
        splits = splits_of(source.structure, moving, axes)
        joins = [joins_of(operand, moving) for operand in source.structure.outputs]
        split_dimensions(function.graph, source.structure, source.output_numbers, moving, axes)
        # Again, of tensors whose dimensions are one axis each.
        split_shapes = [list(_split_shapes(splits, whole)) for whole in shapes]
        source, moving = _source(function.graph, values, split_shapes, kinds)
        source.splits, source.joins = splits, joins
    if not moving.keys() <= source.program.dynamic.keys():
        raise NotRowwiseError(CHANGING)
    return source


def _check_constants(
    structure: Structure,
    symbolic: Sequence[Sequence[Any]],
    moving: Mapping[int, tuple[int, int]],
) -> None:
    """Raises where a size that is a symbol was the same in both traces, so not a moving axis.

    A kernel for this structure would have the number of the trace in it.

    Args:
        structure: the structure of the region.
        symbolic: the shapes of its inputs, with symbols.
        moving: the axes whose sizes change.
    """
    for operand, shape in zip(structure.inputs, symbolic, strict=False):
        for label, size in zip(operand.labels, shape, strict=True):
            is_constant = moving.keys().isdisjoint(label)
            if is_constant and _free_symbols(size):
                raise NotRowwiseError("a size that changes from call to call is a constant in it")


def _axes_of_sizes(
    count: int,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    moving: Mapping[int, tuple[int, int]],
) -> list[int]:
    """The axes of the sizes that a region takes after its tensors; -1 for the size of no axis.

    An axis is recognised by its sizes in both sets of shapes.

    Args:
        count: the number of tensors.
        shapes: the shapes of the tensors, then the sizes, in two calls.
        moving: the axes whose sizes change, with both sizes.
    """
    by_size = dict(zip(moving.values(), moving.keys(), strict=True))
    axes = []
    for sizes in zip(*[inputs[count:] for inputs in shapes], strict=True):
        (first,), (second,) = sizes
        axes.append(by_size.get((first, second), -1))
    return axes


def _source(
    graph: fx.Graph,
    values: Sequence[Tensor],
    shapes: Sequence[Sequence[Sequence[int]]],
    kinds: InputKinds,
) -> tuple[Source, dict[int, tuple[int, int]]]:
    """The source of a program, and the axes whose sizes change with the shapes, with both sizes.

    Args:
        graph: the graph of the region.
        values: its tensors; their shapes are not used.
        shapes: the shapes of its tensors, then the sizes, in one call and in another.
        kinds: which tensors others save, and which get no gradient.
    """
    call = _forward(graph)
    # If no size is a symbol, both calls have the same shapes, and one trace is enough.
    first_shapes, *other_shapes = dict.fromkeys(map(tuple, shapes))
    structure, output_numbers = _structure(call, values, first_shapes)
    moving = dict[int, tuple[int, int]]()
    for inputs in other_shapes:
        other, _ = _structure(call, values, inputs)
        if _outline(other) != _outline(structure):
            raise NotRowwiseError("the result depends on the number of rows")
        moving |= _different_sizes(structure, other)
    return Source(graph, output_numbers, structure, kinds), moving


def _different_sizes(structure: Structure, other: Structure) -> dict[int, tuple[int, int]]:
    """The axes whose sizes differ between two structures, with both sizes."""
    pairs = enumerate(zip(structure.sizes, other.sizes, strict=True))
    return {axis: pair for axis, pair in pairs if len(set(pair)) > 1}


def _outline(structure: Structure) -> Any:
    """The part of a structure that is the same for all numbers of rows."""
    return structure.text(), [operand.labels for operand in (*structure.inputs, *structure.outputs)]


def _structure(
    call: Callable[..., Any], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> tuple[Structure, list[int]]:
    """The structure of a function, and for each result the number of the output that it is.

    Args:
        call: the function.
        values: its tensors; their shapes are not used.
        shapes: the shapes of its tensors, then the sizes.
    """
    tensors = []
    for value, shape in zip(values, shapes, strict=False):
        # Without memory: the sizes are some thousand times those of the call.
        tensor = torch.empty(shape, dtype=value.dtype, device="meta")
        tensor.fusedops_device = value.device  # type: ignore[attr-defined]
        tensors.append(tensor)
    names = [f"t{position}" for position in range(len(tensors))]
    with recording_nothing(), without_modes():
        sizes = [size for (size,) in shapes[len(values) :]]
        # The function `region`, below, only gives the name.
        traced = trace(call, [*tensors, *sizes], region, names, lambda _: None)
    output_numbers = _merge_outputs(traced)
    return structured(traced), output_numbers


def region() -> None:
    """Gives traced regions their name."""


def _merge_outputs(traced: Traced) -> list[int]:
    """Merges outputs of one value; returns the number of each output among the merged ones."""
    numbers: dict[Any, int] = {}
    output_numbers = [
        numbers.setdefault((out.node, out.labels, out.dtype), len(numbers))
        for out in traced.outputs
    ]
    traced.outputs = [
        traced.outputs[output_numbers.index(number)] for number in range(len(numbers))
    ]
    return output_numbers
