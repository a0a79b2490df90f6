"""A traced function as an `Operator`: its outputs, what it saves, its reference implementation and derivatives."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..core import launch, rng, tuning
from ..core.dropout import Dropout, dropout_of
from ..core.operator import Axes, Constants, Dtypes, Operator, Site
from ..core.operators import encode
from ..core.registration import MOST_ARGUMENTS, arguments, define
from ..core.rng import NO_DROPOUT
from . import launching
from .allocating import gradient_allocator, output_allocator
from .axes import Label
from .emitting import group_of
from .errors import NotRowwiseError
from .evaluate import assembled, evaluate, part_of
from .ir import Node, gradient_sources
from .planning import Plan
from .structure import Operand, Structure

__all__ = ["LONGEST_ROW", "Program", "RowwiseConstants", "RowwiseSite", "dynamic_axes"]

_registered: set[str] = set()
_registering = threading.RLock()
# Rows that a program holds whole have at most so many columns a part.
LONGEST_ROW = 16384


@dataclass(frozen=True)
class RowwiseConstants(Constants):
    """There are none: a function is traced for its numbers."""

    def words(self) -> tuple[str, ...]:
        """See `Constants`."""
        return ()

    @classmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> RowwiseConstants:
        """See `Constants`."""
        return cls(words[0])


@dataclass(frozen=True, eq=False)
class RowwiseSite(Site):
    """What of a call stays the same from step to step.

    Attributes:
        program: the function.
        launches: the functions that launch its kernels.
    """

    program: Program
    launches: dict[Any, Any]


class Program(Operator):
    """A function traced for tensors of these dtypes, columns and broadcast dimensions.

    Attributes:
        strict: whether kernels that cannot be compiled are an error.
        uncompiled: why PyTorch's operators run instead of kernels; "" where kernels run.
        is_long: whether rows have more columns than kernels are made for, so that PyTorch's operators run.
        is_grouped: of the inputs, whether the rows come in groups, each of many rows.
        backward_key: of cotangents and gradients, what their launches are known by.
    """

    constants = RowwiseConstants
    native_elements = 0

    def __init__(self, name: str, function: Callable[..., Any] | None, plan: Plan) -> None:
        super().__init__()
        structure = plan.structure
        self.plan, self.structure, self.function = plan, structure, function
        self.op, self.strict = name, False
        self.is_long = structure.cols > launch.LONGEST_ROW
        self.uncompiled = f"rows of more than {launch.LONGEST_ROW:,} columns" if self.is_long else ""
        self.text = structure.text()
        self.dynamic = dynamic_axes(structure)
        self.tiled = structure.cols > LONGEST_ROW
        loose = {axis for operand, count in zip(structure.inputs, structure.loose, strict=True)
                 for label in operand.labels[:count] for axis in label}  # fmt: skip
        sizes = [None if axis in self.dynamic or axis in loose else size for axis, size in enumerate(structure.sizes)]
        operands = (structure.inputs, structure.outputs, plan.intermediate_operand)
        key = "\n".join([self.text, *map(repr, (*operands, sizes, structure.drops, self.tiled))])
        self.digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        self.name = f"rowwise_{_identifier(name)}_{self.digest}"  # type: ignore[misc]
        self.tensors = tuple([f"t{i}" for i in range(len(structure.inputs))])  # type: ignore[misc]
        intermediate = ["intermediate"] if plan.intermediate and plan.intermediate_output < 0 else []
        self.count = len(structure.outputs)
        self.own = bool(intermediate)
        self.visible = self.count + self.own  # type: ignore[misc]
        self.outputs = (*[f"out{i}" for i in range(self.count)], *intermediate, "stats")  # type: ignore[misc]
        self.saved = (*[f"saved_{self.tensors[i]}" for i in plan.saved_inputs], "saved_intermediate", "saved_stats")  # type: ignore[misc]
        self.dtypes = tuple([operand.dtype for operand in structure.inputs])
        self._sources = _sources_of(plan)
        self.wanted = tuple([place in plan.differentiable for place in range(len(structure.inputs))])
        every = {*self.dtypes, *[operand.dtype for operand in structure.outputs]}
        self.acc = torch.float64 if structure.wide or torch.float64 in every else torch.float32
        self.first = _first(structure)  # type: ignore[misc]
        # A draw is one for all dropouts of a call, if any is to be drawn.
        self.p = next((p for p in structure.drops if 0.0 < p < 1.0), max(structure.drops, default=0.0))
        self.thresholds = tuple(map(rng.threshold, structure.drops))
        self._outputs = output_allocator(self)
        self._gradients: dict[int, Any] = {}
        self.group = () if self.tiled else group_of(structure)
        self.is_grouped: Callable[[Any], bool] = launching.grouping(self)
        self.backward_key: Callable[[Any, Any], launching.BackwardKey] = launching.backward_key(self)
        with _registering:
            self._register()

    def _register(self) -> None:
        # Functions that are the same to the last number, in two places of a program, share the registered operators.
        if self.name not in _registered:
            if (count := arguments(self)) > MOST_ARGUMENTS:
                raise NotRowwiseError(
                    f"{self.op}: {len(self.tensors)} tensors, {self.count} results and what is saved for backward are {count} "
                    f"arguments, and PyTorch's operators have at most {MOST_ARGUMENTS}; use fewer tensors, or stack them"
                )
            define(self)
            _registered.add(self.name)

    # --- before a call ------------------------------------------------------------------------------------------------

    @staticmethod
    def record(*arguments: Any) -> RowwiseConstants:
        """See `Operator`."""
        return RowwiseConstants(arguments[0])

    @staticmethod
    def key(arguments: Any, tensors: Any) -> Hashable:
        """The tensors were checked when the program was chosen for them; their types decide the path."""
        return arguments  # type: ignore[no-any-return]

    def check(self, constants: Any, tensors: Any) -> None:
        """They were checked when the program was chosen for them."""

    def check_constants(self, constants: Any) -> None:
        """There are none."""

    def cols(self, constants: Any, tensors: Any) -> int:
        """Columns of a part of a row."""
        return self.structure.cols

    def writes(self, constants: Any, dtypes: Dtypes, *, dropout: bool, saves: bool) -> tuple[bool, ...]:
        """What is only for a backward is written where one will follow."""
        own = [saves] if self.own else []
        return (*[True] * self.count, *own, saves and bool(self.plan.stats))

    def site(self, constants: Any, dtypes: Dtypes, cols: int, device_index: int, *, dropout: bool,
             saves: bool) -> RowwiseSite:  # fmt: skip
        """See `Operator`."""
        outs = self.writes(constants, dtypes, dropout=dropout, saves=saves)
        plan, inputs = self.plan, len(self.structure.inputs)
        absent = inputs + len(outs)
        behind = inputs + (plan.intermediate_output if plan.intermediate_output >= 0 else self.count)
        intermediate = behind if plan.intermediate else absent
        taken = (*plan.saved_inputs, intermediate, inputs + len(outs) - 1 if plan.stats else absent)
        return RowwiseSite(constants, device_index, cols, dtypes, dropout, saves, self.acc, outs,
                           self.count + (self.own and saves), itemgetter(*taken), encode(constants, dtypes, saves),
                           self, {})  # fmt: skip

    # --- DTensors -----------------------------------------------------------------------------------------------------

    def argument(self, constants: Any, place: int) -> str:
        """The function's name of it."""
        return self.structure.inputs[place].name

    def axes(self, constants: Any, tensors: Any) -> Axes:
        """Those whose sizes may change."""
        structure, sizes = self.structure, self.sizes_of(tensors)
        # A shard of what is counted would be counted from zero.
        numbers = {axis: number for number, axis in enumerate(structure.rows)
                   if axis in self.dynamic and axis not in structure.counted}  # fmt: skip
        found = [tuple([numbers.get(label[0]) if len(label) == 1 else None for label in operand.labels])
                 for operand in (*structure.inputs, *structure.outputs)]  # fmt: skip
        count = len(structure.inputs)
        carriers = [place for place, its in enumerate(found[:count]) if any(axis is not None for axis in its)]
        return Axes(tuple([sizes[axis] for axis in structure.rows]), math.prod([sizes[axis] for axis in structure.unrolled]),
                    structure.cols, tuple(found[:count]), tuple(found[count:]), tuple(carriers))  # fmt: skip

    # --- PyTorch's operators ------------------------------------------------------------------------------------------

    def reference(self, constants: Any, tensors: Any, dropout: Dropout) -> tuple[Tensor | None, ...]:
        """What the program was made of; or its graph in PyTorch's operators, which has nothing but these tensors."""
        if self.function is not None:
            found = self.function(*tensors)
            return (found,) if isinstance(found, Tensor) else tuple(found)
        structure = self.structure
        roots = [node for parts in structure.results for node in parts.values()]
        values = self.evaluated(
            roots, tensors, lambda like, further, _: dropout_of(structure.drops[further >> 48], NO_DROPOUT, -1)
        )
        sizes = self.sizes_of(tensors)
        return tuple([
            assembled(structure, operand, {part: values[node] for part, node in parts.items()},
                      self.shape(operand.labels, sizes)).to(operand.dtype)
            for operand, parts in zip(structure.outputs, structure.results, strict=True)
        ])  # fmt: skip

    def evaluated(self, roots: Iterable[Node], tensors: Any, draw: Callable[..., Dropout]) -> dict[Node, Tensor]:
        """The values of nodes in PyTorch's operators; ``draw`` has a dropout's mask, as `core.function.mask_of`."""
        structure, sizes, masks = self.structure, self.sizes_of(tensors), dict[int, Any]()

        def leaf(node: Node) -> Tensor | None:
            if node.op == "input":
                place, part = node.attrs
                value = part_of(structure, structure.inputs[place], tensors[place], part)
                return value.to(self.acc) if node.kind == "float" else value
            return self.mask(node, sizes, tensors[self.first], draw, masks) if node.op == "keep" else None

        return evaluate(structure, roots, leaf, self.acc, tensors[self.first].device, sizes)

    def derivative(self, site: RowwiseSite, grads: Any, saved: Any, dropout: Any, needs: Sequence[bool]) -> Any:
        """The graph of the backward, in PyTorch's operators."""
        plan, structure = self.plan, self.structure
        *inputs, intermediate, _ = saved
        given = [place for place, g in enumerate(grads) if g is not None]
        wanted = [place for place, need in enumerate(needs) if need and self.wanted[place]]
        there = dict(zip(plan.saved_inputs, inputs, strict=True))
        places = {node: part for part, node in plan.intermediate.items()}
        sizes = self.sizes_by(grads)
        masks: dict[int, Any] = {}

        def leaf(node: Node) -> Tensor | None:
            if node in places:
                assert plan.intermediate_operand is not None
                return part_of(structure, plan.intermediate_operand, intermediate, places[node]).to(site.acc)
            if node.op == "input":
                tensor = there[node.attrs[0]]
                value = part_of(structure, structure.inputs[node.attrs[0]], tensor, node.attrs[1])
                return value.to(site.acc) if node.kind == "float" else value
            if node.op == "cotangent":
                return part_of(structure, self.operand(node.attrs[0]), grads[node.attrs[0]], node.attrs[1]).to(site.acc)
            if node.op == "keep":
                return self.mask(node, sizes, grads[given[0]], dropout, masks)
            return None

        found = plan.gradients(given, wanted)
        zero = structure.graph.const(0.0)  # the gradient of a part that nothing is computed of, and through `sign`
        every = {place: {part: found.get(place, {}).get(part, zero) for part in structure.parts(structure.inputs[place])}
                 for place in wanted}  # fmt: skip
        values = evaluate(structure, [node for parts in every.values() for node in parts.values()], leaf, site.acc,
                          grads[given[0]].device, sizes)  # fmt: skip
        return [self._gradient(place, {part: values[node] for part, node in every[place].items()}, sizes)
                if place in every else None for place in range(len(needs))]  # fmt: skip

    def operand(self, output: int) -> Operand:
        """An output, or the intermediate behind them."""
        if output < self.count:
            return self.structure.outputs[output]
        assert self.plan.intermediate_operand is not None
        return self.plan.intermediate_operand

    def mask(self, node: Node, sizes: Sequence[int], like: Tensor, dropout: Any, masks: dict[int, Any]) -> Tensor:
        """A dropout's factors in a part of the rows: the parts of a row lie one behind the other."""
        structure, (number, part) = self.structure, node.attrs
        if number not in masks:
            shape = [*[sizes[axis] for axis in structure.rows], *[structure.sizes[axis] for axis in structure.unrolled]]
            shape += [structure.sizes[axis] for axis in structure.columns]
            plain = like.new_empty(shape, dtype=self.acc)
            masks[number] = dropout(plain, number << 48, self.thresholds[number])(torch.ones_like(plain), self.acc)
        found = masks[number]
        for axis in structure.unrolled:
            found = found.select(len(structure.rows), dict(part).get(axis, 0))
        return found  # type: ignore[no-any-return]

    def _gradient(self, place: int, parts: Any, sizes: Sequence[int]) -> Tensor:
        """An input's gradient from its parts, which may have more rows than it has."""
        structure, operand = self.structure, self.structure.inputs[place]
        order = (*structure.rows, *structure.columns)
        gone = [at for at, axis in enumerate(order) if axis not in operand.axes]
        # Of what has no columns the sum over them is taken, and over rows it is never.
        spread = [at for at, axis in enumerate(order) if at in gone and
                  (axis in structure.rows or set(operand.axes) & set(structure.columns))]  # fmt: skip
        summed = {part: value.expand([sizes[axis] if at in spread else value.shape[at]
                                      for at, axis in enumerate(order)]).sum(gone, keepdim=True) if gone else value
                  for part, value in parts.items()}  # fmt: skip
        return assembled(structure, operand, summed, self.shape(operand.labels, sizes)).to(operand.dtype)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def allocate(self, site: RowwiseSite, tensors: Any) -> tuple[Tensor | None, ...]:
        """The outputs, the intermediate, and one line of numbers of rows for each that is saved."""
        return self._outputs(tensors, site.saves)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def runs_unfused(self, error: launch.NotCompiledError) -> None:
        """Warns, once, that PyTorch's operators run instead of kernels, or raises.

        Raises:
            NotRowwiseError: if the program is strict.
        """
        if tuning.forces():  # what is measured is this config
            raise error
        if self.strict:
            raise NotRowwiseError(f"{self.op}: {error}") from error
        if not self.uncompiled:
            self.uncompiled = str(error)
            warnings.warn(
                f"fusedops runs {self.op} as plain PyTorch, in part or whole: {error}", RuntimeWarning, stacklevel=2
            )

    def needed(self, site: Any, grads: Any, needs: Any) -> tuple[bool, ...]:
        """Those of inputs that anything is computed of."""
        return tuple([need and used for need, used in zip(needs, self.structure.used, strict=True)])

    def sources(self, constants: Any, outputs: int) -> tuple[frozenset[int], ...] | None:
        """See `Operator`: what is only detached, compared or computed without gradients gets none."""
        return self._sources

    def allocate_gradients(self, site: RowwiseSite, grads: Any, saved: Any, needed: Any) -> tuple[Tensor | None, ...]:
        """Each in the shape of its input."""
        for output, like in enumerate(grads):
            if like is not None:
                make = self._gradients.get(output)
                if make is None:
                    make = self._gradients[output] = gradient_allocator(self, output)
                return make(like, needed)
        raise AssertionError("no cotangent")

    # --- sizes --------------------------------------------------------------------------------------------------------

    def row_size(self, output: int) -> int:
        """Elements of a row of an output."""
        return self.size_of_row(self.operand(output))

    def size_of_row(self, operand: Operand) -> int:
        """Elements of a row of an operand."""
        return math.prod([self.structure.sizes[axis] for axis in operand.axes if axis not in self.structure.rows])

    def dims_of(self, output: int) -> dict[int, int]:
        """The dimension of an output that each axis is."""
        return {label[0]: dim for dim, label in enumerate(self.operand(output).labels) if len(label) == 1}

    def sizes_of(self, tensors: Any) -> list[int]:
        """Of all axes, from the inputs."""
        sizes = list(self.structure.sizes)
        for axis, (_, place, dim) in self.dynamic.items():
            sizes[axis] = tensors[place].shape[dim]
        return sizes

    def sizes_by(self, grads: Any) -> list[int]:
        """Of all axes, from the cotangents."""
        sizes = list(self.structure.sizes)
        number = next(i for i, g in enumerate(grads) if g is not None)
        dims = self.dims_of(number)
        for axis in self.dynamic:
            sizes[axis] = grads[number].shape[dims[axis]]
        return sizes

    def shape(self, labels: Sequence[Label], sizes: Sequence[int]) -> list[int]:
        """Of a tensor with these dimensions."""
        return [math.prod([sizes[axis] for axis in label]) for label in labels]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors are such as the function was traced for, but for the number of rows."""
        structure, sizes = self.structure, dict[int, int]()
        for operand, loose, tensor in zip(structure.inputs, structure.loose, tensors, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype != operand.dtype or tensor.dim() != len(operand.labels):
                return False
            for label, size in itertools.islice(zip(operand.labels, tensor.shape, strict=True), loose, None):
                if len(label) == 1 and label[0] in self.dynamic:
                    # Of one row the index is a number, and the function another one.
                    if sizes.setdefault(label[0], size) != size or (size == 1 and label[0] in structure.counted):
                        return False
                elif size != math.prod([structure.sizes[axis] for axis in label]):
                    return False
        return True


def _identifier(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def _sources_of(plan: Plan) -> tuple[frozenset[int], ...] | None:
    """Of each output, and of an intermediate behind them, the inputs that get a gradient from it; None where all do."""
    results = [
        *plan.structure.results,
        *([plan.intermediate] if plan.intermediate and plan.intermediate_output < 0 else []),
    ]
    found = [gradient_sources(parts.values()) for parts in results]
    every = {place for place, operand in enumerate(plan.structure.inputs) if operand.kind == "float"}
    return None if all(its == every for its in found) else tuple(found)


def _first(structure: Structure) -> int:
    """The input with the most axes."""
    return max(
        range(len(structure.inputs)),
        key=lambda place: structure.used[place] * len(structure.inputs[place].axes),
        default=0,
    )


def dynamic_axes(structure: Structure) -> dict[int, tuple[int, int, int]]:
    """The row axes whose sizes may change, with their dimension of the first output, and an input and a dimension of it.

    Others are dimensions together with something else: their sizes are constants.
    """
    found = {}
    for axis in structure.rows:
        alone = [[dim for dim, label in enumerate(operand.labels) if label == (axis,)] for operand in structure.outputs]
        where = [(place, dim) for place, operand in enumerate(structure.inputs)
                 for dim, label in enumerate(operand.labels) if label == (axis,)]  # fmt: skip
        together = any(axis in label and len(label) > 1 for operand in structure.inputs for label in operand.labels)
        if all(alone) and where and not together and axis not in structure.fixed:
            found[axis] = (alone[0][0], *where[0])
    return found
