"""The program of a region: `fusedops.compiler` traces it like a function of the user's."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

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
from .regions import CHANGING, Region, name_of, value_of
from .symbols import has_one_value, hint_of, settled

__all__ = ["RegionProgram", "Source", "build", "prepare"]

# Programs by the text of their region and its tensors, or why there is none. It is cleared when it
# is full: a process may compile ever new models.
_known: dict[Any, Any] = {}
_MOST = 4096
# Where a symbol is the size of a dimension: the tensor's position, the dimension, and the factor
# and the summand of the symbol in its size.
_Location = tuple[int, int, int, int]


class RegionProgram:
    """A region's program, with the region's tensors in the order of its inputs and outputs.

    Attributes:
        source: of the program.
        program: the program.
        inputs: nodes of the graph.
        outputs: nodes of the region, each with the number of the program's output; nodes of equal
            value have one output.
        numbers: symbols that are constants of it.
        sizes: nodes of sizes after the tensors, for `Source.splits`.
    """

    def __init__(self, source: Source, function: _Function, inputs: Sequence[fx.Node]) -> None:
        self.source, self.program = source, source.program
        self.inputs, self.sizes = inputs, function.sizes
        self.numbers = function.numbers
        self.outputs = list(zip(function.outputs, source.places, strict=True))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the program's inputs in the call that is traced."""
        shapes = [fake.hints(value_of(node).shape) for node in self.inputs]
        sizes = [fake.hints([value_of(node)]) for node in self.sizes]
        return self.source.shapes([*shapes, *sizes])

    @property
    def rows(self) -> int:
        """The number of rows of the program in the call that is traced."""
        structure, shapes = self.program.structure, self.shapes
        rows = 1
        for axis in structure.rows:
            if axis in self.program.dynamic:
                _, position, dim = self.program.dynamic[axis]
                rows *= shapes[position][dim]
            else:
                rows *= structure.sizes[axis]
        return rows


class Source:
    """What a region's program is built from. Calling it runs the region in PyTorch's operators.

    Attributes:
        graph: the region as a function of its tensors.
        places: for each of its results, the number of the program's output.
        structure: of the function.
        kept: the positions of tensors that others save, see `planned`.
        splits: for each tensor, the dimensions that the program splits into several.
        joins: for each of the program's outputs, the dimensions that are one of the result.
    """

    def __init__(
        self, graph: fx.Graph, places: Sequence[int], structure: Structure, kept: Sequence[int]
    ) -> None:
        self.graph, self.places, self.structure, self.kept = graph, places, structure, kept
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
        outs = self._run(*tensors)
        return tuple([outs[self.places.index(number)] for number in range(max(self.places) + 1)])

    @functools.cached_property
    def program(self) -> Program:
        """The program, registered."""
        return Program("region", self, planned(self.structure, memory=True, kept=self.kept))


def _module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph, "region")


def _forward(graph: fx.Graph) -> Callable[..., Any]:
    """A graph as a function."""
    return _module(graph).forward


def _split_shapes(
    splits: Sequence[Sequence[Split]], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors whose dimensions are split, from those of the whole tensors."""
    return tuple([split_shape(position, own, shapes) for position, own in enumerate(splits)])


def build(region: Region, saved: Collection[fx.Node] = ()) -> RegionProgram:
    """The program of a region.

    Args:
        region: the region.
        saved: nodes that others save for the backward.
    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    tensors = [node for node in region.inputs if isinstance(value_of(node), Tensor)]
    function = _Function(region, tensors)
    saved_inputs = tuple([position for position, node in enumerate(tensors) if node in saved])
    operands = [
        (value_of(node).dtype, str(list(map(str, shape))))
        for node, shape in zip(tensors, function.shapes, strict=True)
    ]
    key = (function.text, saved_inputs, tuple(operands), value_of(tensors[0]).device.type)
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = _source_or_reason(function, tensors, saved_inputs)
    known = _known[key]
    if isinstance(known, str):
        raise NotRowwiseError(known)
    return RegionProgram(known, function, tensors)


def _source_or_reason(
    function: _Function, tensors: Sequence[fx.Node], saved_inputs: Sequence[int]
) -> Source | str:
    """The source of a region's program, or why there is none.

    The reason is text: an exception would hold the tensors of its frames.
    """
    try:
        return _build(function, tensors, saved_inputs)
    except NotRowwiseError as error:
        return str(error).removeprefix("region: ")
    except Exception as error:  # noqa: BLE001 - it would fail again
        return f"{type(error).__name__}: {error}"


def prepare(
    program: RegionProgram, wanted: Collection[fx.Node], receives: Collection[fx.Node]
) -> None:
    """Compiles the kernels of a program for the call that is traced.

    Args:
        program: the program.
        wanted: the inputs that have gradients through it.
        receives: nodes that have gradients.
    Raises:
        NotRowwiseError: Triton cannot compile one.
    """
    device = value_of(program.inputs[0]).device
    if not launch.runs_kernels(device.type) or tuning.on_demand():  # the tuner would run them
        return
    with recording_nothing(), without_modes():
        numbers = {number for node, number in program.outputs if node in receives}
        reason = _prepared(
            program.program,
            device,
            program.shapes,
            tuple([node in wanted for node in program.inputs]),
            tuple([number in numbers for number in range(program.program.count)]),
        )
    if reason:
        raise NotRowwiseError(reason)


@functools.lru_cache(maxsize=_MOST)
def _prepared(
    program: Program,
    device: torch.device,
    shapes: Sequence[tuple[int, ...]],
    wanted: tuple[bool, ...],
    given: tuple[bool, ...],
) -> str:
    """The reason why Triton cannot compile a kernel; "" where it compiles all.

    Args:
        program: the program.
        device: of its tensors.
        shapes: of its inputs.
        wanted: whether each input has a gradient.
        given: whether each output has one.
    """
    # Without memory: kernels are compiled, but not launched.
    tensors = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, program.dtypes, strict=True)
    ]
    is_gpu = device.type == "cuda"
    try:
        with torch.cuda.device(device) if is_gpu else nullcontext():
            index = launch.current_device() if is_gpu else -1
            launching.prepare(program, index, tensors, wanted, given)
    except launch.NotCompiledError as error:
        return str(error)
    return ""


# --- a region as a function -----------------------------------------------------------------------


class _Function:
    """A region as a function of its tensors.

    Attributes:
        graph: of it.
        text: the same for regions that are the same.
        outputs: the nodes that it returns.
        shapes: of its tensors.
        numbers: symbols that are constants of it.
        sizes: nodes of sizes that are none of the tensors'; it takes them after the tensors.
    """

    def __init__(self, region: Region, tensors: Sequence[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.outputs = region.outputs
        self.expressions: list[str] = []
        self.numbers: list[torch.SymInt | torch.SymFloat] = []
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
        self.text = "\n".join([_module(self.graph).code, *self.expressions])

    def _add_inputs(self, region: Region, tensors: Sequence[fx.Node]) -> None:
        """Adds the placeholders: the tensors, and the sizes that are none of the tensors'.

        Other numbers become constants, or are computed from the sizes of tensors.
        """
        copies = self._copies
        for position, node in enumerate(tensors):
            copies[node] = self.graph.placeholder(f"t{position}")
        arguments = list(copies.values())
        others = [node for node in region.inputs if node not in copies]
        self.sizes = [node for node in others if self._is_no_size_of(value_of(node))]
        for position, node in enumerate(self.sizes):
            copies[node] = self.graph.placeholder(f"size{position}")
            self.expressions.append(f"size{position} is {value_of(node)}")
        for node in others:
            if node not in copies:
                copies[node] = self._size(value_of(node), arguments)

    def _copy(self, node: fx.Node) -> Any:
        """The copy of a node in the function; of dropout a tuple of the result and None."""
        copies = self._copies
        if name_of(node) == "native_dropout":
            args = (copies[node.args[0]], *node.args[1:3])  # type: ignore[index]
            # The compiler traces F.dropout, which returns no mask.
            return self.graph.call_function(F.dropout, args), None
        is_item = node.target is operator.getitem
        results = copies[node.args[0]] if is_item else None  # type: ignore[index]
        if isinstance(results, tuple):
            result = results[node.args[1]]  # type: ignore[index]
            if result is None:
                raise NotRowwiseError("dropout's mask is used")
            return result
        arguments, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        return self.graph.call_function(node.target, arguments, kwargs)  # type: ignore[arg-type]

    def _dimension(self, size: Any) -> Any:
        """A size as a number, as a symbol that it equals, or as it is.

        It is a number if it never changes: a plain one, or one rounded from the caller's floats.
        """
        size = settled(size, self._single)
        is_rounded = any(number.is_Function for number in _free_symbols(size))
        if not is_rounded or not has_one_value(size):
            return size
        self.numbers.append(size)
        return size.node.hint

    def _is_no_size_of(self, value: Any) -> bool:
        """Whether a number is a size that does not follow from the sizes of tensors."""
        value = settled(value, self._single)
        if not isinstance(value, torch.SymInt) or has_one_value(value):
            return False
        return not all(symbol in self._sizes for symbol in _free_symbols(value))

    def _size(self, value: Any, arguments: Sequence[fx.Node]) -> Any:
        """A symbolic number as a node that computes it from sizes of tensors.

        A number that never changes is returned as it is.
        """
        value = settled(value, self._single)
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return value
        if has_one_value(value):
            self.numbers.append(value)
            return value.node.hint
        expression: Any = getattr(getattr(value, "node", None), "expr", None)
        if expression is None or not expression.is_integer:
            raise NotRowwiseError("a number in it may change from call to call; make it a tensor")
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

        # FX writes only the function's name into the code: the text has to tell two of them apart.
        self.expressions.append(f"{expression} of {symbols} at {locations}")
        return self.graph.call_function(size, tuple(sizes))


# --- sizes that are symbols -----------------------------------------------------------------------


def _single_symbols(tensors: Sequence[fx.Node]) -> list[Any]:
    """The sizes of tensors that are one symbol."""
    sizes = [size for node in tensors for size in value_of(node).shape if _free_symbols(size)]
    return list({size.node.expr: size for size in sizes if size.node.expr.is_Symbol}.values())


def _evaluated(expression: Any, symbols: Sequence[Any], *sizes: int) -> int:
    return int(expression.subs(dict(zip(symbols, sizes, strict=True))))


def _locations(shapes: Sequence[Sequence[Any]]) -> dict[Any, _Location]:
    """The location of each symbol in the shapes of tensors, preferably where it is a whole size."""
    locations: dict[Any, _Location] = {}
    for position, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            for symbol in _free_symbols(size):
                expression: Any = size.node.expr
                factor = expression.coeff(symbol)
                summand = expression - factor * symbol
                if not factor.is_Integer or not summand.is_Integer or factor == 0:
                    continue
                if symbol not in locations or expression.is_Symbol:
                    locations[symbol] = (position, dim, int(factor), int(summand))
    return locations


def _free_symbols(size: Any) -> Any:
    """The whole numbers that a size is computed from.

    They are symbols, and functions of symbols of floats, such as their integral parts.
    """
    expression = getattr(getattr(size, "node", None), "expr", None)
    return () if expression is None else _whole_numbers(expression)


def _whole_numbers(expression: Any) -> set[Any]:
    if all(symbol.is_integer for symbol in expression.free_symbols):
        return expression.free_symbols  # type: ignore[no-any-return]
    if expression.is_Function:
        return {expression}
    return set().union(*map(_whole_numbers, expression.args))


def _shapes(shapes: Sequence[Sequence[Any]], times: int) -> list[tuple[int, ...]]:
    """Shapes whose symbols are at least ``times`` the numbers that they stand for.

    The numbers are multiples of those, so that they have their divisors.
    """
    hints = {
        symbol: hint_of(symbol, size)
        for shape in shapes
        for size in shape
        for symbol in _free_symbols(size)
    }
    numbers = {
        symbol: (times + 2 * position) * hints[symbol]
        for position, symbol in enumerate(sorted(hints, key=str))
    }

    def sized(size: Any) -> int:
        if not _free_symbols(size):
            return int(size)
        return _evaluated(size.node.expr, list(numbers), *numbers.values())

    return [tuple(map(sized, shape)) for shape in shapes]


# --- tracing --------------------------------------------------------------------------------------


def _build(function: _Function, tensors: Sequence[fx.Node], saved_inputs: Sequence[int]) -> Source:
    """Traces a region with two sets of sizes, to tell the sizes that change from constants.

    Args:
        function: the region.
        tensors: its tensors.
        saved_inputs: the positions of tensors that others save, see `planned`.
    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    values = [value_of(node) for node in tensors]
    symbolic = [*function.shapes, *[(value_of(node),) for node in function.sizes]]
    # Multiples of the sizes, which are divisible by what those are, and none of which is 1 or alike
    # another.
    shapes = [_shapes(symbolic, times) for times in (1009, 2003)]
    source, moving = _source(function.graph, values, shapes, saved_inputs)
    _check_constants(source.structure, symbolic, moving)
    if are_joined(source.structure, moving) or function.sizes:
        axes = _axes_of_sizes(len(values), shapes, moving)
        splits = splits_of(source.structure, moving, axes)
        joins = [joins_of(operand, moving) for operand in source.structure.outputs]
        split_dimensions(function.graph, source.structure, source.places, moving, axes)
        # Again, of tensors whose dimensions are one axis each.
        split_shapes = [list(_split_shapes(splits, whole)) for whole in shapes]
        source, moving = _source(function.graph, values, split_shapes, saved_inputs)
        source.splits, source.joins = splits, joins
    if not moving.keys() <= source.program.dynamic.keys():
        raise NotRowwiseError(CHANGING)
    return source


def _check_constants(
    structure: Structure,
    symbolic: Sequence[Sequence[Any]],
    moving: Mapping[int, tuple[int, int]],
) -> None:
    """Raises where a size that is a symbol is a constant of a structure.

    Args:
        structure: of the region.
        symbolic: the shapes of its inputs, with symbols.
        moving: the axes whose sizes change.
    """
    for operand, shape in zip(structure.inputs, symbolic, strict=False):
        for label, size in zip(operand.labels, shape, strict=True):
            if _free_symbols(size) and moving.keys().isdisjoint(label):
                raise NotRowwiseError("a size that changes from call to call is a constant in it")


def _axes_of_sizes(
    count: int,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    moving: Mapping[int, tuple[int, int]],
) -> list[int]:
    """The axes of the sizes that a region takes after its tensors; -1 for the size of no axis.

    An axis is recognised by its sizes in both sets of shapes.

    Args:
        count: of the tensors.
        shapes: of the tensors, then the sizes, in two calls.
        moving: the axes whose sizes change, with both sizes.
    """
    by_size = {pair: axis for axis, pair in moving.items()}
    sizes = [inputs[count:] for inputs in shapes]
    pairs = [(first, second) for (first,), (second,) in zip(*sizes, strict=True)]
    return [by_size.get(pair, -1) for pair in pairs]


def _source(
    graph: fx.Graph,
    values: Sequence[Tensor],
    shapes: Sequence[Sequence[Sequence[int]]],
    saved_inputs: Sequence[int],
) -> tuple[Source, dict[int, tuple[int, int]]]:
    """The source of a program, and the axes whose sizes change with the shapes, with both sizes.

    Args:
        graph: of the region.
        values: its tensors, for all but their shapes.
        shapes: of its tensors, and sizes after them, of one call and of another.
        saved_inputs: the positions of tensors that others save, see `planned`.
    """
    call = _forward(graph)
    # Once, if no size is a symbol: both calls then have the same shapes.
    different = dict.fromkeys(map(tuple, shapes))
    (structure, output_numbers), *others = [
        _structure(call, values, inputs) for inputs in different
    ]
    moving = dict[int, tuple[int, int]]()
    for other, _ in others:
        if _outline(other) != _outline(structure):
            raise NotRowwiseError("the result depends on the number of rows")
        pairs = enumerate(zip(structure.sizes, other.sizes, strict=True))
        moving |= {axis: pair for axis, pair in pairs if pair[0] != pair[1]}
    return Source(graph, output_numbers, structure, saved_inputs), moving


def _outline(structure: Structure) -> Any:
    """The part of a structure that is the same for all numbers of rows."""
    return structure.text(), [operand.labels for operand in (*structure.inputs, *structure.outputs)]


def _structure(
    call: Callable[..., Any], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> tuple[Structure, list[int]]:
    """The structure of a function, and for each result the number of the output that it is.

    Args:
        call: the function.
        values: its tensors, for all but their shapes.
        shapes: of its tensors, and sizes after them.
    """
    tensors = []
    for value, shape in zip(values, shapes, strict=False):
        tensor = torch.empty(shape, dtype=value.dtype, device="meta")
        tensor.fusedops_device = value.device  # type: ignore[attr-defined]
        tensors.append(tensor)
    names = [f"t{position}" for position in range(len(tensors))]
    with recording_nothing(), without_modes():
        sizes = [size for (size,) in shapes[len(values) :]]
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
