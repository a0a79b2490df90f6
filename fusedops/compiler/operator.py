"""A traced function as an `Operator`: its outputs, saved tensors, reference and derivatives."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import re
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.calls.function import PLAIN
from ..core.calls.operator import Axes, Dtypes, Operator
from ..core.calls.operators import site_of
from ..core.calls.registration import MOST_ARGUMENTS, arguments, define
from ..core.calls.words import dispatched
from ..core.configs import tuning
from ..core.launches import launch
from ..core.optional import present_indices
from ..core.random import rng
from ..core.random.dropout import Dropout, dropout_of
from ..core.random.rng import NO_DROPOUT
from . import launching
from .again import Saved, computed_again
from .allocators import gradient_allocator, output_allocator
from .axes import Label
from .errors import NotRowwiseError
from .evaluate import assembled, evaluate, part_of
from .ir import Node, gradient_sources
from .layouts import groups_of, outer_group
from .planning import Plan
from .site import BackwardKey, RowwiseSite
from .structure import Operand, Part, Structure, without

__all__ = ["LONGEST_ROW", "Program", "RowwiseConstants", "dynamic_axes", "fits"]

_registered: set[str] = set()
_registering = threading.RLock()
# The most columns in a part of a row that a forward holds whole. The second limit is for a forward
# in 16 bits with at most two inputs. Longer rows are read in tiles.
LONGEST_ROW = 16384
_LONGEST_ROW_16BIT = 32768


@dispatched
class RowwiseConstants(NamedTuple):
    """No constants: a function is traced again for other numbers.

    Attributes:
        op: the function's name, for messages.
        token: the device and the classes of the tensors, which `Program.fits` does not check.
            `Rowwise` adds it for the key of a call. The record that `Program.check` returns has no
            token, so that calls that differ only in the token can share a site.
    """

    op: str
    token: Hashable = None


class Program(Operator):
    """A function traced for tensors of these dtypes, columns and broadcast dimensions.

    Attributes:
        record: the constants of all its calls.
        strict: whether kernels that cannot be compiled are an error.
        uncompiled: why PyTorch's operators run instead of kernels; "" if kernels run.
        is_long: whether rows have more columns than any kernel supports, so that PyTorch's
            operators run.
        group_of: returns the row axes of a forward's groups, from the inputs; () if there are no
            groups, or if their rows are few.
        backward_key: returns the key of a backward's launches, from cotangents and gradients.
    """

    constants = RowwiseConstants
    native_elements = 0

    def __init__(self, name: str, function: Callable[..., Any] | None, plan: Plan) -> None:
        super().__init__()
        structure = plan.structure
        self.plan, self.structure, self.function = plan, structure, function
        self.op, self.strict = name, False
        self.record = RowwiseConstants(name)
        self.is_long = structure.cols > launch.LONGEST_ROW
        self.uncompiled = (
            f"rows of more than {launch.LONGEST_ROW:,} columns" if self.is_long else ""
        )
        self.text = structure.text()
        self.dynamic = dynamic_axes(structure)
        self.tiled = structure.cols > _longest_row(structure)
        self.digest = _digest_of(self)
        self.name = f"rowwise_{_identifier(name)}_{self.digest}"  # type: ignore[misc]
        self.tensors = tuple([f"t{i}" for i in range(len(structure.inputs))])  # type: ignore[misc]
        # The forward writes, in this order:
        #
        #   out0 ... outN    the function's results
        #   intermediate     saved for the backward, unless the plan saves an output instead
        #   stats            numbers of each row, such as its mean
        self.count = len(structure.outputs)
        self.own = bool(plan.intermediate) and plan.intermediate_output < 0
        self.visible = self.count + self.own  # type: ignore[misc]
        results = [f"out{i}" for i in range(self.count)]
        intermediate = ["intermediate"] if self.own else []
        self.outputs = (*results, *intermediate, "stats")  # type: ignore[misc]
        self.saved = (  # type: ignore[misc]
            *[f"saved_{self.tensors[i]}" for i in plan.saved_inputs],
            "saved_intermediate",
            "saved_stats",
        )
        self.dtypes = tuple([operand.dtype for operand in structure.inputs])
        # An input that is only detached or compared is no source: it gets no gradient.
        self._sources = _sources_of(plan)
        self._uses_all = all(structure.used)
        self.wanted = tuple([i in plan.differentiable for i in range(len(structure.inputs))])
        dtypes = {*self.dtypes, *[operand.dtype for operand in structure.outputs]}
        self.acc = torch.float64 if structure.wide or torch.float64 in dtypes else torch.float32
        self.first = _first(structure)  # type: ignore[misc]
        # One random state serves all dropouts of a call, each with a threshold of its own. `run`
        # draws the state only for a probability between 0 and 1. So ``p`` is the first probability
        # between 0 and 1, if there is one: for 0.0, 0.1 and 1.0 it is 0.1. Otherwise it is the
        # largest probability, 1.0 or 0.0.
        self.p = next(
            (p for p in structure.drops if 0.0 < p < 1.0), max(structure.drops, default=0.0)
        )
        self.thresholds = tuple(map(rng.threshold, structure.drops))
        self._outputs = output_allocator(self)
        self._outputs_except: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        self._again: dict[int, tuple[Program, tuple[Saved, ...]] | None] = {}
        # By the device's index, and whether a backward follows.
        self._fitted: dict[tuple[int, bool], RowwiseSite] = {}
        self.group = () if self.tiled else outer_group(structure)
        self.groups = {} if self.tiled else groups_of(structure)
        self.group_of: Callable[[Any], Label] = launching.grouping(self)
        self.backward_key: Callable[[Any, Any], BackwardKey] = launching.backward_key(self)
        with _registering:
            self._register()

    def _register(self) -> None:
        # Two functions of a program with the same structure have the same digest, and share the
        # registered operators.
        if self.name in _registered:
            return
        count = arguments(self)
        if count > MOST_ARGUMENTS:
            raise NotRowwiseError(
                f"{self.op}: {len(self.tensors)} tensors, {self.count} results and what is saved "
                f"for backward are {count} arguments, and PyTorch's operators have at most "
                f"{MOST_ARGUMENTS}; use fewer tensors, or stack them"
            )
        define(self)
        _registered.add(self.name)

    def again(self, output: int) -> tuple[Program, tuple[Saved, ...]] | None:
        """Return the program of a result from what the backward reads, and what it reads of it.

        Returns None if the result is not cheap to compute again: see `computed_again`.
        """
        if output not in self._again:
            computed = computed_again(self.plan, output, self.acc)
            again = computed and (Program("again", None, computed[0]), computed[1])
            self._again[output] = again
        return self._again[output]

    # --- before a call ----------------------------------------------------------------------------

    @staticmethod
    def key(mode: int, constants: Any, tensors: Any) -> Hashable:
        """See `Operator`; `Program.fits` checked the rest."""
        return mode, constants

    def check(self, constants: Any, tensors: Any, *, nested: bool) -> RowwiseConstants:
        """See `Operator`; it checks nothing, as `Program.fits` checked the tensors."""
        return self.record

    def cols(self, constants: Any, tensors: Any) -> int:
        """Return the number of columns in a part of a row."""
        return self.structure.cols

    def writes(
        self, constants: Any, dtypes: Dtypes, *, dropout: bool, saves: bool
    ) -> tuple[bool, ...]:
        """Return which outputs are written: outputs for the backward only if one follows."""
        own = [saves] if self.own else []
        return (*[True] * self.count, *own, saves and bool(self.plan.stats))

    def site(
        self,
        constants: Any,
        dtypes: Dtypes,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> RowwiseSite:
        """See `Operator`."""
        # `saved` takes what the backward reads out of one tuple; ``absent`` is the None's index:
        #
        #   inputs   | results, own intermediate or None, stats or None | None
        #   0 ...      inputs ...                                         absent
        outs = self.writes(constants, dtypes, dropout=dropout, saves=saves)
        plan, inputs = self.plan, len(self.structure.inputs)
        absent = inputs + len(outs)
        intermediate = stats = absent
        if plan.intermediate:
            output = plan.intermediate_output if plan.intermediate_output >= 0 else self.count
            intermediate = inputs + output
        if plan.stats:
            stats = inputs + len(outs) - 1
        return RowwiseSite(
            constants,
            device_index,
            cols,
            dtypes,
            dropout,
            saves,
            self.acc,
            outs,
            self.count + (self.own and saves),
            itemgetter(*plan.saved_inputs, intermediate, stats),
            self,
            {},
            sources=self._sources,
        )

    def fitted_site(self, tensors: Sequence[Tensor], *, saves: bool) -> RowwiseSite | None:
        """Return the site of a launch for tensors that `fits` has compared with the program.

        Returns None if a tensor is of a subclass: then the registered operators are called.
        """
        if not PLAIN.issuperset(map(type, tensors)):
            return None
        index = tensors[self.first].get_device()
        site = self._fitted.get((index, saves))
        if site is None:
            drops = self.p != 0.0
            options = self.record, self.dtypes, self.structure.cols, index, drops, saves
            site = replace(site_of(self, *options), launches={}, fitted=True)
            self._fitted[index, saves] = site
        return site

    # --- DTensors ---------------------------------------------------------------------------------

    def argument(self, constants: Any, position: int) -> str:
        """Return the function's name of an input."""
        return self.structure.inputs[position].name

    def axes(self, constants: Any, tensors: Any) -> Axes:
        """Return the axes whose sizes may change, and the dimensions that they are."""
        structure, sizes = self.structure, self.sizes_of(tensors)
        # An axis whose index the function reads is not sharded: the index in a shard would start
        # from zero.
        numbers = {
            axis: number
            for number, axis in enumerate(structure.rows)
            if axis in self.dynamic and axis not in structure.indexed
        }

        def numbered(operand: Operand) -> tuple[int | None, ...]:
            return tuple(
                [numbers.get(label[0]) if len(label) == 1 else None for label in operand.labels]
            )

        inputs = tuple(map(numbered, structure.inputs))
        carriers = [i for i, dims in enumerate(inputs) if set(dims) - {None}]
        return Axes(
            tuple([sizes[axis] for axis in structure.rows]),
            math.prod([sizes[axis] for axis in structure.unrolled]),
            structure.cols,
            inputs,
            tuple(map(numbered, structure.outputs)),
            tuple(carriers),
        )

    # --- PyTorch's operators ----------------------------------------------------------------------

    def reference(
        self, constants: Any, tensors: Any, dropout: Dropout
    ) -> tuple[Tensor | None, ...]:
        """Return the outputs of the traced function, or of its graph if there is no function."""
        if self.function is not None:
            result = self.function(*tensors)
            return (result,) if isinstance(result, Tensor) else tuple(result)
        structure = self.structure

        def draw(like: Tensor, offset: int, threshold: int) -> Dropout:
            # The offset has a dropout's number above 48 bits: see `mask`. As the traced function
            # would, this draws the mask of `F.dropout`, which has no offset and no threshold.
            return dropout_of(structure.drops[offset >> 48], NO_DROPOUT, -1)

        roots = _nodes_of(structure.results)
        values = self.evaluated(roots, tensors, draw)
        sizes = self.sizes_of(tensors)
        outputs: list[Tensor] = []
        for operand, parts in zip(structure.outputs, structure.results, strict=True):
            shape = self.shape(operand.labels, sizes)
            output = assembled(structure, operand, _values_of(parts, values), shape)
            outputs.append(output.to(operand.dtype))
        return tuple(outputs)

    def evaluated(
        self, roots: Iterable[Node], tensors: Any, draw: Callable[..., Dropout]
    ) -> dict[Node, Tensor]:
        """Return the values of nodes, computed by PyTorch's operators.

        Args:
            roots: the nodes.
            tensors: the inputs.
            draw: returns a dropout's mask, as `core.calls.function.mask_of`.
        """
        structure, sizes, masks = self.structure, self.sizes_of(tensors), dict[int, Any]()

        def leaf(node: Node) -> Tensor | None:
            if node.op == "input":
                position, part = node.attrs
                return self._input_part(node, tensors[position], position, part, self.acc)
            if node.op == "keep":
                return self.mask(node, sizes, tensors[self.first], draw, masks)
            return None

        return evaluate(structure, roots, leaf, self.acc, tensors[self.first].device, sizes)

    def _input_part(
        self, node: Node, tensor: Tensor, position: int, part: Part, acc: torch.dtype
    ) -> Tensor:
        """Return a part of an input, in the dtype of the computation."""
        value = part_of(self.structure, self.structure.inputs[position], tensor, part)
        return value.to(acc) if node.kind == "float" else value

    def derivative(
        self, site: RowwiseSite, grads: Any, saved: Any, dropout: Any, needs: Sequence[bool]
    ) -> Any:
        """Return the gradients, computed by PyTorch's operators from the graph of the backward."""
        plan, structure = self.plan, self.structure
        *inputs, intermediate, _ = saved
        outputs = present_indices(grads)
        differentiable = [i for i, need in enumerate(needs) if need and self.wanted[i]]
        saved_inputs = dict(zip(plan.saved_inputs, inputs, strict=True))
        intermediate_parts = {node: part for part, node in plan.intermediate.items()}
        sizes = self.sizes_by(grads)
        masks: dict[int, Any] = {}

        def leaf(node: Node) -> Tensor | None:
            # The intermediate's nodes are in the middle of the graph: a saved value ends the
            # evaluation before their arguments.
            if node in intermediate_parts:
                operand, part = plan.intermediate_operand, intermediate_parts[node]
                assert operand is not None
                return part_of(structure, operand, intermediate, part).to(site.acc)
            if node.op == "input":
                position, part = node.attrs
                return self._input_part(node, saved_inputs[position], position, part, site.acc)
            if node.op == "cotangent":
                output, part = node.attrs
                return part_of(structure, self.operand(output), grads[output], part).to(site.acc)
            if node.op == "keep":
                return self.mask(node, sizes, grads[outputs[0]], dropout, masks)
            return None

        gradients = plan.gradients(outputs, differentiable)
        # The gradient of a part from which no output is computed, or only through `sign`.
        zero = structure.graph.const(0.0)
        nodes: dict[int, dict[Part, Node]] = {}
        for i in differentiable:
            known = gradients.get(i, {})
            nodes[i] = {
                part: known.get(part, zero) for part in structure.parts(structure.inputs[i])
            }
        roots = _nodes_of(nodes.values())
        device = grads[outputs[0]].device
        values = evaluate(structure, roots, leaf, site.acc, device, sizes)
        results: list[Tensor | None] = [None] * len(needs)
        for i, parts in nodes.items():
            results[i] = self._gradient(i, _values_of(parts, values), sizes)
        return results

    def operand(self, output: int) -> Operand:
        """Return the operand of an output, or of the intermediate that follows the outputs."""
        if output < self.count:
            return self.structure.outputs[output]
        assert self.plan.intermediate_operand is not None
        return self.plan.intermediate_operand

    def mask(
        self, node: Node, sizes: Sequence[int], like: Tensor, dropout: Any, masks: dict[int, Any]
    ) -> Tensor:
        """Return a dropout's factors in one part of the rows.

        The mask of a whole tensor is drawn once, and saved in ``masks`` for the other parts. It has
        the dimensions ``(*rows, *unrolled, *columns)``: the parts of a row follow one another.
        """
        structure, (number, part) = self.structure, node.attrs
        if number not in masks:
            order = (*structure.rows, *structure.unrolled, *structure.columns)
            plain = like.new_empty([sizes[axis] for axis in order], dtype=self.acc)
            # Each dropout of a function has an offset of its own into the random numbers.
            draw = dropout(plain, number << 48, self.thresholds[number])
            masks[number] = draw(torch.ones_like(plain), self.acc)
        mask = masks[number]
        for axis in structure.unrolled:
            mask = mask.select(len(structure.rows), dict(part).get(axis, 0))
        return mask  # type: ignore[no-any-return]

    def _gradient(self, position: int, parts: Any, sizes: Sequence[int]) -> Tensor:
        """Return an input's gradient from its parts, summed over axes that the input lacks."""
        structure, operand = self.structure, self.structure.inputs[position]
        order = (*structure.rows, *structure.columns)
        missing = [dim for dim, axis in enumerate(order) if axis not in operand.axes]
        has_columns = bool(set(operand.axes) & set(structure.columns))
        # Each missing axis is summed over. Where a part has a dimension of one along it, the
        # gradient is the same there, and is expanded before the sum. Columns are an exception if
        # the input has none: the graph of the backward has summed over them already. For rows r0,
        # r1, columns c, and parts of (r0, 1, c), (r0, 1, 1):
        #
        #   input (r0, c)   missing r1      expanded to (r0, r1, c)
        #   input (r0,)     missing r1, c   expanded to (r0, r1, 1)
        expanded = [dim for dim in missing if order[dim] in structure.rows or has_columns]
        summed = parts
        if missing:
            summed = {}
            for part, value in parts.items():
                shape = [
                    sizes[axis] if dim in expanded else value.shape[dim]
                    for dim, axis in enumerate(order)
                ]
                summed[part] = value.expand(shape).sum(missing, keepdim=True)
        shape = self.shape(operand.labels, sizes)
        return assembled(structure, operand, summed, shape).to(operand.dtype)

    # --- kernels ----------------------------------------------------------------------------------

    def allocate(self, site: RowwiseSite, tensors: Any) -> tuple[Tensor | None, ...]:
        """Return new tensors for the outputs, the intermediate and the numbers of each row."""
        return self._outputs(tensors, site.saves)

    def allocate_except(
        self, site: RowwiseSite, tensors: Any, output: int
    ) -> tuple[Tensor | None, ...]:
        """See `Operator`."""
        if output not in self._outputs_except:
            self._outputs_except[output] = output_allocator(self, output)
        return self._outputs_except[output](tensors, site.saves)  # type: ignore[no-any-return]

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def runs_unfused(self, error: launch.NotCompiledError) -> None:
        """Warn, once, that PyTorch's operators run instead of kernels, or raise.

        Raises:
            NotRowwiseError: if the program is strict.
        """
        if tuning.forces():  # the tuner measures this very config
            raise error
        if self.strict:
            raise NotRowwiseError(f"{self.op}: {error}") from error
        if not self.uncompiled:
            self.uncompiled = str(error)
            warnings.warn(
                f"fusedops runs {self.op} as plain PyTorch, in part or whole: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def needed(self, site: Any, grads: Any, needs: Any) -> tuple[bool, ...]:
        """Return which inputs need a gradient and are used."""
        # Nearly all functions use all their inputs, and a repeated call then has no loop here.
        return needs if self._uses_all else tuple(map(operator.and_, needs, self.structure.used))

    def allocate_gradients(
        self, site: RowwiseSite, grads: Any, saved: Any, needed: Any
    ) -> tuple[Tensor | None, ...]:
        """Return a new tensor for each gradient, in the shape of its input."""
        # The sizes are read from the first cotangent, since inputs may not be saved.
        for output, like in enumerate(grads):
            if like is not None:
                allocate = self._gradients.get(output)
                if allocate is None:
                    allocate = self._gradients[output] = gradient_allocator(self, output)
                return allocate(like, needed)
        raise AssertionError("no cotangent")

    # --- sizes ------------------------------------------------------------------------------------

    def row_size(self, output: int) -> int:
        """Return the number of elements in a row of an output."""
        return self.size_of_row(self.operand(output))

    def size_of_row(self, operand: Operand) -> int:
        """Return the number of elements in a row of an operand."""
        structure = self.structure
        columns = without(operand.axes, structure.rows)
        return math.prod(map(structure.sizes.__getitem__, columns))

    def dims_of(self, output: int) -> dict[int, int]:
        """Return the dimension of an output that each axis has to itself."""
        labels = self.operand(output).labels
        return {label[0]: dim for dim, label in enumerate(labels) if len(label) == 1}

    def sizes_of(self, tensors: Any) -> list[int]:
        """Return the sizes of all axes, read from the inputs."""
        sizes = list(self.structure.sizes)
        for axis, (_, position, dim) in self.dynamic.items():
            sizes[axis] = tensors[position].shape[dim]
        return sizes

    def sizes_by(self, grads: Any) -> list[int]:
        """Return the sizes of all axes, read from a cotangent."""
        sizes = list(self.structure.sizes)
        number = present_indices(grads)[0]
        dims = self.dims_of(number)
        for axis in self.dynamic:
            sizes[axis] = grads[number].shape[dims[axis]]
        return sizes

    def shape(self, labels: Sequence[Label], sizes: Sequence[int]) -> list[int]:
        """Return the shape of a tensor with these dimensions."""
        return [math.prod([sizes[axis] for axis in label]) for label in labels]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors are like those of the trace: see `fits`."""
        return fits(self.structure, self.dynamic, tensors)


def fits(
    structure: Structure, dynamic: Mapping[int, tuple[int, int, int]], tensors: Sequence[Tensor]
) -> bool:
    """Whether tensors are like those of a structure's trace, except in the number of rows.

    The first ``loose`` dimensions of an unused input may have any size: see `Structure`.

    Args:
        structure: the structure.
        dynamic: its `dynamic_axes`.
        tensors: as many as the structure has inputs.
    """
    sizes = dict[int, int]()
    for operand, loose, tensor in zip(structure.inputs, structure.loose, tensors, strict=True):
        if not isinstance(tensor, Tensor) or tensor.dtype != operand.dtype:
            return False
        if tensor.dim() != len(operand.labels):
            return False
        dims = zip(operand.labels, tensor.shape, strict=True)
        for label, size in itertools.islice(dims, loose, None):
            if len(label) != 1 or label[0] not in dynamic:
                if size != math.prod([structure.sizes[axis] for axis in label]):
                    return False
                continue
            (axis,) = label
            if sizes.setdefault(axis, size) != size:
                return False
            # The trace of a single row has the constant 0 for its index: another function.
            if size == 1 and axis in structure.indexed:
                return False
    return True


def _nodes_of(tensors: Iterable[Mapping[Part, Node]]) -> list[Node]:
    """Return the nodes of all parts of some tensors."""
    return [node for parts in tensors for node in parts.values()]


def _values_of(parts: Mapping[Part, Node], values: Mapping[Node, Tensor]) -> dict[Part, Tensor]:
    """Return the values of a tensor's parts."""
    return {part: values[node] for part, node in parts.items()}


def _longest_row(structure: Structure) -> int:
    """Return the most columns that a forward holds whole.

    A forward that returns only numbers of rows has the lower limit: in tiles too it may read each
    element only once.
    """
    read = list(filter(structure.is_whole, structure.inputs))
    written = list(filter(structure.is_whole, structure.outputs))
    are_narrow = all(operand.dtype.itemsize <= 2 for operand in (*read, *written))
    if written and are_narrow and len(read) * structure.parts_of_row <= 2:
        return _LONGEST_ROW_16BIT
    return LONGEST_ROW


def _digest_of(program: Program) -> str:
    """Return the hash of all on which the registered operators of a program depend."""
    structure, plan = program.structure, program.plan
    # Sizes that may differ between calls of one program are left out.
    variable = set(program.dynamic)
    for operand, count in zip(structure.inputs, structure.loose, strict=True):
        variable.update(itertools.chain.from_iterable(operand.labels[:count]))
    sizes = [None if axis in variable else size for axis, size in enumerate(structure.sizes)]
    operands = (structure.inputs, structure.outputs, plan.intermediate_operand)
    # The text does not say along which axes parts are: halves of a row, or every other column.
    axes = (structure.rows, structure.columns, structure.unrolled)
    parts = (*operands, sizes, *axes, structure.drops, program.tiled, plan.differentiable)
    words = list(map(repr, parts))
    if plan.of_results:
        words.append("derivatives of results")
    key = "\n".join([program.text, *words])
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def _identifier(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def _sources_of(plan: Plan) -> tuple[frozenset[int], ...] | None:
    """Return, for each output and an own intermediate, the inputs that get a gradient from it.

    Returns None if each output gives a gradient to all floating-point inputs.
    """
    results = list(plan.structure.results)
    if plan.intermediate and plan.intermediate_output < 0:
        results.append(plan.intermediate)
    sources = [gradient_sources(parts.values()) for parts in results]
    floating = {i for i, operand in enumerate(plan.structure.inputs) if operand.kind == "float"}
    if all(inputs == floating for inputs in sources):
        return None
    return tuple(sources)


def _first(structure: Structure) -> int:
    """Return the position of the input with the most axes, among those that are used.

    Every call reads its device from this input, and whether there are elements.
    """

    def count(position: int) -> int:
        return structure.used[position] * len(structure.inputs[position].axes)

    return max(range(len(structure.inputs)), key=count, default=0)


def dynamic_axes(structure: Structure) -> dict[int, tuple[int, int, int]]:
    """Return the row axes whose sizes may change.

    An axis that shares a dimension with another has a constant size. The values are the axis's
    dimension of the first output, and an input and its dimension from which the size is read.
    """
    merged: set[int] = set()  # with others in a dimension of an input
    positions: dict[int, tuple[int, int]] = {}
    for position, operand in enumerate(structure.inputs):
        for dim, label in enumerate(operand.labels):
            if len(label) == 1:
                positions.setdefault(label[0], (position, dim))
            else:
                merged.update(label)
    dynamic: dict[int, tuple[int, int, int]] = {}
    for axis in structure.rows:
        if axis not in positions or axis in merged or axis in structure.fixed:
            continue
        if all((axis,) in operand.labels for operand in structure.outputs):
            dim = structure.outputs[0].labels.index((axis,))
            dynamic[axis] = (dim, *positions[axis])
    return dynamic
