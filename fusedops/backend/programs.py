"""The program of a region: traced by `fusedops.compiler` as a function of the user's is."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
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
from ..compiler.structure import Structure, structured
from ..compiler.tracing import Traced, trace
from ..core import compat, launch, tuning
from .dimensions import Join, Split, are_joined, joins_of, split_shape, splits_of, take_apart
from .regions import CHANGING, Region, name_of, value_of

__all__ = ["Made", "Source", "made", "prepare"]

# Programs by the text of their region and its tensors; a process with ever new models starts again.
_known: dict[Any, Any] = {}
_MOST = 4096


class Made:
    """A region's program, with the region's tensors in the order in which it takes and returns them.

    Attributes:
        program: the program.
        inputs: nodes of the graph.
        outputs: nodes of the region; of several that are one value the program has one.
        numbers: symbols that are constants of it.
        sizes: nodes of sizes behind the tensors, for `Source.splits`.
        source: of it.
    """

    def __init__(self, source: Source, function: _Function, inputs: Sequence[fx.Node]) -> None:
        self.source, self.program, self.inputs, self.numbers = source, source.program, inputs, function.numbers
        self.sizes = function.sizes
        self.outputs = list(zip(function.outputs, source.places, strict=True))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors that the program takes in the call that is traced."""
        sizes = [compat.hints([value_of(node)]) for node in self.sizes]
        return self.source.shapes([*[compat.hints(value_of(node).shape) for node in self.inputs], *sizes])

    @property
    def rows(self) -> int:
        """Of the program in the call that is traced."""
        structure, shapes = self.program.structure, self.shapes
        where = self.program.dynamic
        sizes = [
            shapes[where[axis][1]][where[axis][2]] if axis in where else structure.sizes[axis]
            for axis in structure.rows
        ]
        return math.prod(sizes)


class Source:
    """What a region's program is built from. Calling it runs the region in PyTorch's operators.

    Attributes:
        graph: the region as a function of its tensors.
        places: for each of its results, the number of the program's output.
        structure: of it.
        kept: see `planned`.
        splits: of each tensor, the dimensions that the program takes as several.
        joins: of each of the program's outputs, the dimensions that are one of the result.
    """

    def __init__(self, graph: fx.Graph, places: Sequence[int], structure: Structure, kept: Sequence[int]) -> None:
        self.graph, self.places, self.structure, self.kept = graph, places, structure, kept
        self.splits: list[list[Split]] = [[] for _ in structure.inputs]
        self.joins: list[list[Join]] = [[] for _ in structure.outputs]

    def shapes(self, shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Of the tensors that the program takes, from those of the region's."""
        return tuple([split_shape(place, splits, shapes) for place, splits in enumerate(self.splits)])

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        return fx.GraphModule(torch.nn.Module(), self.graph, "region").forward

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The region's results, each once."""
        outs = self._run(*tensors)
        return tuple([outs[self.places.index(number)] for number in range(max(self.places) + 1)])

    @functools.cached_property
    def program(self) -> Program:
        """The program, registered."""
        return Program("region", self, planned(self.structure, memory=True, kept=self.kept))


def made(found: Region, saved: Collection[fx.Node] = ()) -> Made:
    """The program of a region.

    Args:
        found: the region.
        saved: nodes that others save for the backward.
    Raises:
        NotRowwiseError: it cannot be one kernel.
    """
    tensors = [node for node in found.inputs if isinstance(value_of(node), Tensor)]
    function = _Function(found, tensors)
    kept = tuple([place for place, node in enumerate(tensors) if node in saved])
    key = (function.text, kept, tuple([(value_of(node).dtype, str(list(map(str, shape))))
                                       for node, shape in zip(tensors, function.shapes, strict=True)]),
           value_of(tensors[0]).device.type)  # fmt: skip
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        try:
            _known[key] = _made(function, tensors, kept)
        except NotRowwiseError as error:
            _known[key] = str(error).removeprefix("region: ")  # an error would keep the tensors of its frames
        except Exception as error:  # noqa: BLE001 - it would fail again
            _known[key] = f"{type(error).__name__}: {error}"
    known = _known[key]
    if isinstance(known, str):
        raise NotRowwiseError(known)
    return Made(known, function, tensors)


def prepare(found: Made, wanted: Collection[fx.Node], receives: Collection[fx.Node]) -> None:
    """Compiles the kernels of a program for the call that is traced: what Triton cannot compile is left to Inductor.

    Args:
        found: the program.
        wanted: the inputs that have gradients through it.
        receives: nodes that have gradients.
    Raises:
        NotRowwiseError: Triton cannot compile one.
    """
    values = [value_of(node) for node in found.inputs]
    device = values[0].device
    if not launch.runs_kernels(device.type) or tuning.on_demand():  # the tuner would run them
        return
    with compat.recording_nothing(), compat.without_modes():
        given = {number for node, number in found.outputs if node in receives}
        reason = _prepared(found.program, device, found.shapes, tuple([node in wanted for node in found.inputs]),
                           tuple([number in given for number in range(found.program.count)]))  # fmt: skip
    if reason:
        raise NotRowwiseError(reason)


@functools.lru_cache(maxsize=_MOST)
def _prepared(program: Program, device: torch.device, shapes: Sequence[tuple[int, ...]], wanted: tuple[bool, ...],
              given: tuple[bool, ...]) -> str:  # fmt: skip
    """Why Triton cannot compile a kernel; "" where it compiles all."""
    tensors = [
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, program.dtypes, strict=True)
    ]
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            index = launch.current_device() if device.type == "cuda" else -1
            launching.prepare(program, index, tensors, wanted, given)
    except launch.NotCompiledError as error:
        return str(error)
    return ""


def _single(tensors: Sequence[fx.Node]) -> list[Any]:
    """The sizes of tensors that are one symbol."""
    sizes = [size for node in tensors for size in value_of(node).shape if _free_symbols(size)]
    return list({size.node.expr: size for size in sizes if size.node.expr.is_Symbol}.values())


class _Function:
    """A region as a function of its tensors.

    Attributes:
        graph: of it.
        text: the same for regions that are the same.
        outputs: the nodes that it returns.
        shapes: of its tensors.
        numbers: symbols that are constants of it.
        sizes: nodes of the sizes that it takes behind the tensors: those that are none of theirs.
    """

    def __init__(self, region: Region, tensors: Sequence[fx.Node]) -> None:
        self.graph, copies = fx.Graph(), dict[fx.Node, Any]()
        self.outputs = region.outputs
        self.expressions: list[str] = []
        self.numbers: list[torch.SymInt | torch.SymFloat] = []
        self._single = _single(tensors)
        self.shapes = [tuple(map(self._dimension, value_of(node).shape)) for node in tensors]
        self._sizes = _symbols(self.shapes)
        for place, node in enumerate(tensors):
            copies[node] = self.graph.placeholder(f"t{place}")
        given = list(copies.values())
        self.sizes = [node for node in region.inputs if node not in copies and self._is_no_size_of(value_of(node))]
        for place, node in enumerate(self.sizes):
            copies[node] = self.graph.placeholder(f"size{place}")
            self.expressions.append(f"size{place} is {value_of(node)}")
        for node in region.inputs:
            if node not in copies:
                copies[node] = self._size(value_of(node), given)
        for node in region.nodes:
            if name_of(node) == "native_dropout":
                copies[node] = (self.graph.call_function(F.dropout, (copies[node.args[0]], *node.args[1:3])), None)  # type: ignore[index]
            elif node.target is operator.getitem and isinstance(parts := copies[node.args[0]], tuple):  # type: ignore[index]
                if (found := parts[node.args[1]]) is None:  # type: ignore[index]
                    raise NotRowwiseError("dropout's mask is used")
                copies[node] = found
            else:
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        self.graph.output(tuple([copies[node] for node in self.outputs]))
        for node in self.graph.nodes:
            node.meta.clear()
        code = fx.GraphModule(torch.nn.Module(), self.graph, "region").code
        self.text = "\n".join([code, *self.expressions])

    def _dimension(self, size: Any) -> Any:
        """A size as a number, if it is one or rounded of the caller's floats, as the symbol that it equals, or as it is."""
        size = compat.settled(size, self._single)
        if not any(number.is_Function for number in _free_symbols(size)) or not compat.has_one_value(size):
            return size
        self.numbers.append(size)
        return size.node.hint

    def _is_no_size_of(self, value: Any) -> bool:
        """Whether a number is a size that cannot be told from the sizes of tensors."""
        value = compat.settled(value, self._single)
        is_size = isinstance(value, torch.SymInt) and not compat.has_one_value(value)
        return is_size and not all(symbol in self._sizes for symbol in _free_symbols(value))

    def _size(self, value: Any, given: Sequence[fx.Node]) -> Any:
        """A number that is a symbol or an expression of symbols, from sizes of tensors; or as it is, if it never changes."""
        if not isinstance(value := compat.settled(value, self._single), (torch.SymInt, torch.SymFloat)):
            return value
        if compat.has_one_value(value):
            self.numbers.append(value)
            return value.node.hint
        expression: Any = getattr(getattr(value, "node", None), "expr", None)
        if expression is None or not expression.is_integer:
            raise NotRowwiseError("a number in it may change from call to call; make it a tensor")
        symbols = sorted(_whole_numbers(expression), key=str)
        places = [self._sizes[symbol] for symbol in symbols]
        sizes = [
            self.graph.call_function(torch.ops.aten.sym_size.int, (given[place], dim)) for place, dim, _, _ in places
        ]

        def size(*numbers: int) -> int:
            found = [(number - more) // times for number, (_, _, times, more) in zip(numbers, places, strict=True)]
            return _evaluated(expression, symbols, *found)

        self.expressions.append(f"{expression} of {symbols} at {places}")
        return self.graph.call_function(size, tuple(sizes))


def _evaluated(expression: Any, symbols: Sequence[Any], *sizes: int) -> int:
    return int(expression.subs(dict(zip(symbols, sizes, strict=True))))


def _symbols(shapes: Sequence[Sequence[Any]]) -> dict[Any, tuple[int, int, int, int]]:
    """Where each symbol is found: the place of a tensor, a dimension, and factor and summand of its size there."""
    found: dict[Any, tuple[int, int, int, int]] = {}
    for place, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            for symbol in _free_symbols(size):
                expression: Any = size.node.expr
                times = expression.coeff(symbol)
                more = expression - times * symbol
                is_alone = times.is_Integer and more.is_Integer and times != 0
                if is_alone and (symbol not in found or expression.is_Symbol):
                    found[symbol] = (place, dim, int(times), int(more))
    return found


def _made(function: _Function, tensors: Sequence[fx.Node], kept: Sequence[int]) -> Source:
    values = [value_of(node) for node in tensors]
    symbolic = [*function.shapes, *[(value_of(node),) for node in function.sizes]]
    # Multiples of the sizes, which are divisible by what those are, and none of which is 1 or alike another.
    shapes = [_shapes(symbolic, times) for times in (1009, 2003)]
    source, moving = _source(function.graph, values, shapes, kept)
    for operand, shape in zip(source.structure.inputs, symbolic, strict=False):
        for label, size in zip(operand.labels, shape, strict=True):
            if _free_symbols(size) and moving.keys().isdisjoint(label):
                raise NotRowwiseError("a size that changes from call to call is a constant in it")
    if are_joined(source.structure, moving) or function.sizes:
        by_size = {pair: axis for axis, pair in moving.items()}
        pairs = [(one, other) for (one,), (other,) in zip(*[given[len(values) :] for given in shapes], strict=True)]
        axes = [by_size.get(pair, -1) for pair in pairs]
        splits = splits_of(source.structure, moving, axes)
        joins = [joins_of(operand, moving) for operand in source.structure.outputs]
        take_apart(function.graph, source.structure, source.places, moving, axes)
        shapes = [[split_shape(place, own, given) for place, own in enumerate(splits)] for given in shapes]
        source, moving = _source(function.graph, values, shapes, kept)
        source.splits, source.joins = splits, joins
    if not moving.keys() <= source.program.dynamic.keys():
        raise NotRowwiseError(CHANGING)
    return source


def _free_symbols(size: Any) -> Any:
    """The whole numbers that a size is computed of: symbols, and functions of symbols of floats, such as their integral parts."""
    expression = getattr(getattr(size, "node", None), "expr", None)
    return () if expression is None else _whole_numbers(expression)


def _whole_numbers(expression: Any) -> set[Any]:
    if all(symbol.is_integer for symbol in expression.free_symbols):
        return expression.free_symbols  # type: ignore[no-any-return]
    return {expression} if expression.is_Function else set().union(*map(_whole_numbers, expression.args))


def _shapes(shapes: Sequence[Sequence[Any]], times: int) -> list[tuple[int, ...]]:
    """Shapes where symbols are so many times what they stand for, or more."""
    known = {
        symbol: compat.hint_of(symbol, size) for shape in shapes for size in shape for symbol in _free_symbols(size)
    }
    numbers = {symbol: (times + 2 * place) * known[symbol] for place, symbol in enumerate(sorted(known, key=str))}

    def sized(size: Any) -> int:
        return _evaluated(size.node.expr, list(numbers), *numbers.values()) if _free_symbols(size) else int(size)

    return [tuple(map(sized, shape)) for shape in shapes]


def _source(graph: fx.Graph, values: Sequence[Tensor], shapes: Sequence[Sequence[Sequence[int]]],
            kept: Sequence[int]) -> tuple[Source, dict[int, tuple[int, int]]]:  # fmt: skip
    """What a program is built from, and the axes whose sizes are others with other shapes, with both sizes.

    Args:
        graph: of the region.
        values: its tensors, for all but their shapes.
        shapes: of its tensors, and sizes behind them, of one call and of another.
    """
    call = fx.GraphModule(torch.nn.Module(), graph, "region").forward
    (structure, places), *others = [_structure(call, values, given) for given in dict.fromkeys(map(tuple, shapes))]
    moving = dict[int, tuple[int, int]]()
    for other, _ in others:
        if _outline(other) != _outline(structure):
            raise NotRowwiseError("the result depends on the number of rows")
        pairs = enumerate(zip(structure.sizes, other.sizes, strict=True))
        moving |= {axis: pair for axis, pair in pairs if pair[0] != pair[1]}
    return Source(graph, places, structure, kept), moving


def _outline(structure: Structure) -> Any:
    """What is the same for all numbers of rows."""
    return structure.text(), [operand.labels for operand in (*structure.inputs, *structure.outputs)]


def _structure(
    call: Callable[..., Any], values: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> tuple[Structure, list[int]]:
    """The structure, and the output that each result is."""
    given = []
    for value, shape in zip(values, shapes, strict=False):
        tensor = torch.empty(shape, dtype=value.dtype, device="meta")
        tensor.fusedops_device = value.device  # type: ignore[attr-defined]
        given.append(tensor)
    with compat.recording_nothing(), compat.without_modes():
        sizes = [size for (size,) in shapes[len(values) :]]
        traced = trace(call, [*given, *sizes], region, [f"t{place}" for place in range(len(given))], lambda _: None)
    places = _merged(traced)
    return structured(traced), places


def region() -> None:
    """What is traced is known by this name."""


def _merged(traced: Traced) -> list[int]:
    """Outputs that are one value are returned once: the place of each among those that are left."""
    kept: dict[Any, int] = {}
    places = [kept.setdefault((out.node, out.labels, out.dtype), len(kept)) for out in traced.outputs]
    traced.outputs = [traced.outputs[places.index(number)] for number in range(len(kept))]
    return places
