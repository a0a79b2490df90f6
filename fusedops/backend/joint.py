"""Chooses what a backward computes again, in the joint graph of forward and backward.

PyTorch's partitioner divides the joint graph, and saves what both halves read. It computes nothing
again that a matrix product of the backward reads, and it cannot see into the operators of regions.
So values are saved that only the gradients of weights read, though they are functions of others
that are saved anyway:

    z, rstd ──▶ y ──▶ y @ W                forward
    dy, z, rstd ──▶ dz;   g.T @ y ──▶ dW   backward: y is saved beside z and rstd

This pass runs before the partitioner. It marks elementwise values for PyTorch to compute again, and
for results of regions it adds an operator to the backward, which computes them from what the
region's own backward reads:

    dy, z, rstd ──▶ dz;   z, rstd ──▶ y again;   g.T @ y ──▶ dW
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from ..compiler.again import Saved
from ..compiler.operator import Program
from ..compiler.structure import Operand
from ..core.calls.registration import defined
from .fx import Called, called, is_pointwise, is_tangent, namespace, primals
from .graphs import (
    VIEWS,
    are_numbers,
    dtype_of,
    is_tensor,
    name_of,
    nodes_in,
    positions_of,
    size_of,
    sort_nodes,
    users_of,
    value_of,
)
from .options import CHOICES
from .replacing import call_operator

__all__ = ["prepare", "recompute"]

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm"})
_ALIASES = VIEWS | {"detach"}
# An operator that computes a result of a region again, and what it reads.
Again = tuple[Program, tuple[Saved, ...]]


def prepare(module: fx.GraphModule, memory: str) -> None:
    """Registers the operators that may compute results of regions again.

    Code that PyTorch reads from its caches calls them without `recompute`.
    """
    for program in _programs_in(module):
        for output in range(program.count):
            _again(program, output, memory)


def _programs_in(module: fx.GraphModule) -> Iterator[Program]:
    """The programs of the regions in a graph, and in the graphs that it calls."""
    graphs = [getattr(part, "graph", None) for part in module.modules()]
    for graph in filter(None, graphs):
        programs = map(_program_of_forward, graph.nodes)
        yield from filter(None, programs)


def _program_of(node: fx.Node, suffix: str) -> Program | None:
    """The program whose forward or backward is called; None for other nodes."""
    target = called(node).operator
    if namespace(target) != "fusedops":
        return None
    name: str = target.overloadpacket.__name__.removesuffix("_out")
    program = defined(name.removesuffix(suffix))
    return program if isinstance(program, Program) else None


_program_of_forward = functools.partial(_program_of, suffix="_forward")


def _again(program: Program, output: int, memory: str) -> Again | None:
    """`Program.again` for a result that pays, and is not saved itself."""
    if output == program.plan.intermediate_output:
        return None
    again = program.again(output)
    if again is None:
        return None

    def size(operand: Operand) -> int:
        return program.size_of_row(operand) * operand.dtype.itemsize

    structure = again[0].structure
    held = size(structure.outputs[0])
    # Vectors and numbers of rows are few bytes.
    read = filter(structure.is_whole, structure.inputs)
    moved = held + sum(map(size, read))
    return again if moved <= CHOICES[memory] * held else None


def recompute(graph: fx.Graph, memory: str, parameters: Collection[int] = ()) -> None:
    """Changes a joint graph so that its backward computes again what pays.

    Args:
        graph: the joint graph, before it is partitioned.
        memory: a key of `CHOICES`.
        parameters: the positions of the inputs that are parameters, and so in memory anyway. They
            are counted from the end, since AOTAutograd puts tensors that a graph holds first.
    """
    # Inductor's own passes, such as that for attention, leave it unsorted.
    sort_nodes(graph)
    inputs = dict(enumerate(reversed(primals(graph))))
    joint = _Joint(graph, set(map(inputs.get, parameters)))
    for node in list(graph.nodes):
        program = _program_of(node, "_backward")
        if program is not None:
            _recompute_results(joint, program, called(node), memory)
    for node in joint.elementwise:
        if _pays(joint, node, memory):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


class _Joint:
    """A joint graph.

    Attributes:
        graph: the graph.
        nodes: its nodes.
        position: the position of each node.
        parameters: the inputs that are parameters, as a bit set of positions.
        backward: the nodes that depend on gradients of results.
        forward: the other nodes.
        elementwise: the elementwise nodes of the forward.
        forwards: for each program and value, the calls of the program's forward that read or
            return the value, without those in parts that `torch.utils.checkpoint` computes again.
        returned: the results, and the gradients.
    """

    def __init__(self, graph: fx.Graph, parameters: set[fx.Node | None]) -> None:
        self.graph, self.nodes = graph, list(graph.nodes)
        self.position = positions_of(graph)
        self.parameters = sum(map(self.bit_of, filter(None, parameters)))
        self.backward: set[fx.Node] = set()
        for node in graph.nodes:
            if is_tangent(node) or not self.backward.isdisjoint(node.all_input_nodes):
                self.backward.add(node)
        self.forward = list(itertools.filterfalse(self.backward.__contains__, graph.nodes))
        end = graph.output_node()
        self.returned = set(end.all_input_nodes)
        self.backward.discard(end)
        self.elementwise = dict.fromkeys(filter(_is_elementwise, self.forward))
        self.forwards: dict[Any, set[fx.Node]] = defaultdict(set)
        for node in itertools.filterfalse(_has_policy, self.forward):
            program = _program_of_forward(node)
            for value in [] if program is None else _values_of(node):
                self.forwards[program, value].add(node)

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """A value of the forward with its views, each after its base."""
        aliases = [node]
        for alias in aliases:
            aliases += filter(self._is_alias, alias.users)
        return aliases

    def _is_alias(self, node: fx.Node) -> bool:
        return name_of(node) in _ALIASES and node not in self.backward

    def readers(self, aliases: Sequence[fx.Node]) -> set[fx.Node]:
        """The products of the backward that read a value; none if anything else needs it later.

        Elementwise nodes of the forward count as needing it later: PyTorch may compute these again.
        """
        users = users_of(aliases).difference(aliases)
        later = users & self.backward
        if not self.returned.isdisjoint(aliases):
            return set()
        if not self.elementwise.keys().isdisjoint(users):
            return set()
        return later if _PRODUCTS.issuperset(map(name_of, later)) else set()

    @functools.cached_property
    def sources(self) -> dict[fx.Node, int]:
        """The values from which elementwise nodes compute each value of the forward, as bit sets.

        A residual stream has a source in each layer, and several ways through each.
        """
        sources: dict[fx.Node, int] = {}
        for node in self.forward:
            arguments = list(map(sources.__getitem__, node.all_input_nodes))
            if name_of(node) in _ALIASES:
                sources[node] = arguments[0]
            elif node in self.elementwise:
                sources[node] = functools.reduce(operator.or_, arguments, 0)
            else:
                sources[node] = self.bit_of(node)
        return sources

    @functools.cached_property
    def needed(self) -> tuple[int, int]:
        """The values that are saved whatever is computed again, as bit sets.

        The first are those that elementwise nodes of the backward read, the second the others. An
        elementwise value is computed again from others, if these have no more bytes.
        """
        needed = {True: 0, False: 0}
        for node in filter(is_tensor, self.forward):
            readers = self.backward.intersection(node.users)
            kinds = set(map(name_of, readers))
            base = _base_of(node)
            if base in self.elementwise:
                kinds -= _PRODUCTS
            if not kinds:
                continue
            saved = self.sources[node]
            if not self.fit(saved, _bytes(node)):
                saved = self.bit_of(base)
            needed[any(map(_is_elementwise, readers))] |= saved
        return needed[True], needed[False]

    def bit_of(self, node: fx.Node) -> int:
        """The bit set of one node."""
        return 1 << self.position[node]

    def fit(self, values: int, most: float) -> bool:
        """Whether values, a bit set, have no more bytes than ``most``."""
        while values and most >= 0:
            last = values.bit_length() - 1
            most -= _bytes(self.nodes[last])
            values ^= 1 << last
        return most >= 0


def _has_policy(node: fx.Node) -> bool:
    """Whether a user, or another pass, has decided whether a node is computed again."""
    return "recompute" in node.meta


def _is_elementwise(node: fx.Node) -> bool:
    """Whether Inductor computes a node in a kernel of elements, inline with others."""
    return is_tensor(node) and (is_pointwise(node.target) or name_of(node) == "_to_copy")


def _base_of(node: fx.Node) -> fx.Node:
    """The value that a node is a view of."""
    while name_of(node) in _ALIASES:
        node = node.all_input_nodes[0]
    return node


def _bytes(node: fx.Node) -> int:
    """The bytes of a node's elements in the traced call; 0 of other values than tensors."""
    return size_of(node) * dtype_of(node).itemsize if is_tensor(node) else 0


def _pays(joint: _Joint, node: fx.Node, memory: str) -> bool:
    """Whether the backward is to compute an elementwise value again.

    If all that it reads is read by Inductor's kernels of elements, these compute it, too, and the
    backward only writes it.
    """
    if not joint.readers(joint.aliases(node)):
        return False
    inline, others = joint.needed
    read = joint.sources[node] & ~inline
    held = _bytes(node)
    is_saved = not read & ~(others | joint.parameters)
    return is_saved and joint.fit(read, (CHOICES[memory] - 1.0) * held)


# --- results of regions ---------------------------------------------------------------------------


def _recompute_results(joint: _Joint, program: Program, backward: Called, memory: str) -> None:
    """Computes results of a region again, for the products of the backward that read them."""
    computed = functools.partial(_again, program, memory=memory)
    operators = list(map(computed, range(program.count)))
    if not any(operators):
        return
    for forward in map(called, _forwards_of(joint, program, backward)):
        for output, again in enumerate(operators):
            if again is not None:
                _recompute_result(joint, program, again, forward, output)


def _recompute_result(
    joint: _Joint, program: Program, again: Again, forward: Called, output: int
) -> None:
    graph = joint.graph
    for result in forward.results(f"out{output}", output):
        aliases = joint.aliases(result)
        readers = joint.readers(aliases)
        if not readers or not are_numbers(value_of(result).shape):
            continue
        with graph.inserting_before(min(readers, key=joint.position.__getitem__)):
            new = _computed_again(graph, program, again, forward, result)
            _replace(graph, aliases, new, readers)


def _values_of(forward: fx.Node) -> set[fx.Node]:
    """The values that a call of a forward reads or returns."""
    return {*map(_base_of, nodes_in(called(forward).arguments.values())), *forward.users}


def _forwards_of(joint: _Joint, program: Program, backward: Called) -> list[fx.Node]:
    """The forwards that read or return all that a backward reads."""
    saved = set(map(_base_of, nodes_in(map(backward.arguments.get, program.saved))))
    calls = [joint.forwards[program, value] for value in saved]
    # Many layers may read one weight, but few a layer's own values.
    fewest = min(calls, key=len, default=set[fx.Node]())
    return sorted(fewest.intersection(*calls), key=joint.position.__getitem__)


def _output_of(program: Program, kind: str) -> tuple[str, int]:
    """The name and the index of the forward's output that is saved as intermediate or stats."""
    output = program.plan.intermediate_output
    intermediate = program.count if output < 0 else output
    position = {"intermediate": intermediate, "stats": len(program.outputs) - 1}[kind]
    return program.outputs[position], position


def _computed_again(
    graph: fx.Graph, program: Program, again: Again, forward: Called, result: fx.Node
) -> fx.Node:
    """A new node that computes a result of a region again.

    Args:
        graph: the joint graph.
        program: the region's.
        again: the operator, and what it reads.
        forward: the call of the region's forward.
        result: the result.
    """
    tensor: Tensor = value_of(result)
    op, saved = again
    sizes = op.sizes_by([tensor])
    shape = list(map(sizes.__getitem__, program.structure.rows))
    arguments = [_argument(graph, forward, program, source, shape) for source in saved]
    call = call_operator(graph, op, arguments, arguments, op.dtypes, [False] * len(arguments))
    new = graph.call_function(operator.getitem, (call, 0))
    fake = torch.empty_like(tensor)
    call.meta["val"], new.meta["val"] = (fake, fake.new_empty(0)), fake
    call.meta["recompute"] = new.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return new


def _replace(
    graph: fx.Graph, aliases: Sequence[fx.Node], new: fx.Node, readers: Iterable[fx.Node]
) -> None:
    """Lets readers of a value, and of views of it, read a new value."""
    copies = {aliases[0]: new}
    for alias in aliases[1:]:
        copies[alias] = graph.node_copy(alias, lambda node: copies.get(node, node))
    for reader in readers:
        for alias, copy in copies.items():
            reader.replace_input_with(alias, copy)


def _argument(
    graph: fx.Graph, forward: Called, program: Program, saved: Saved, shape: Sequence[int]
) -> fx.Node:
    """A tensor of a forward, as an argument of an operator that computes a result again.

    Args:
        graph: the joint graph.
        forward: the forward.
        program: its program.
        saved: which tensor.
        shape: the sizes of the rows.
    """
    kind, index = saved
    if kind == "input":
        return forward.arguments[f"t{index}"]  # type: ignore[no-any-return]
    tensor = forward.results(*_output_of(program, kind))[0]
    if kind == "intermediate":
        return tensor
    numbers = _viewed(graph, torch.ops.aten.select.int, tensor, 0, index)
    return _viewed(graph, torch.ops.aten.view.default, numbers, shape)


def _viewed(graph: fx.Graph, view: Any, node: fx.Node, *args: Any) -> fx.Node:
    viewed = graph.call_function(view, (node, *args))
    viewed.meta["val"] = view(value_of(node), *args)
    return viewed
