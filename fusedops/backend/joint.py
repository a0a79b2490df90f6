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
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from ..compiler.again import Saved
from ..compiler.operator import Program
from ..core.calls.registration import defined
from ..core.compat.fake import hints
from .fx import Called, called, is_pointwise, is_tangent, namespace, primals
from .graphs import VIEWS, are_numbers, is_tensor, name_of, positions_of, value_of
from .replacing import call_operator

__all__ = ["CHOICES", "prepare", "recompute"]

# The bytes that a backward may move for each byte that is not saved. The planner of regions, too,
# counts a byte that is saved as one that is moved.
CHOICES: Mapping[str, float] = {"speed": 0.0, "auto": 1.0, "low": 3.0}
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
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    for graph in graphs:
        for node in graph.nodes:
            program = _program_of(called(node), "_forward")
            if program is not None:
                yield program


def _program_of(call: Called | None, suffix: str) -> Program | None:
    """The program whose forward or backward is called; None for other calls."""
    if call is None or namespace(call.operator) != "fusedops":
        return None
    name = call.operator.overloadpacket.__name__.removesuffix("_out")
    program = defined(name.removesuffix(suffix)) if name.endswith(suffix) else None
    return program if isinstance(program, Program) else None


def _again(program: Program, output: int, memory: str) -> Again | None:
    """`Program.again` for a result that pays: it is whole, and not saved itself."""
    if output == program.plan.intermediate_output:
        return None
    again = program.again(output)
    if again is None:
        return None
    operands = [again[0].structure.outputs[0], *again[0].structure.inputs]
    held, *read = [program.size_of_row(operand) * operand.dtype.itemsize for operand in operands]
    # Vectors have as many bytes in a row as whole tensors, but one row.
    wide = [program.structure.is_whole(operand) for operand in operands]
    moved = held + sum([size for size, is_wide in zip(read, wide[1:], strict=True) if is_wide])
    return again if wide[0] and moved <= CHOICES[memory] * held else None


def recompute(graph: fx.Graph, memory: str, parameters: Collection[int] = ()) -> None:
    """Changes a joint graph so that its backward computes again what pays.

    Args:
        graph: the joint graph, before it is partitioned.
        memory: a key of `CHOICES`.
        parameters: the positions of the inputs that are parameters, and so in memory anyway. They
            are counted from the end, since AOTAutograd puts tensors that a graph holds first.
    """
    inputs = primals(graph)[::-1]
    joint = _Joint(graph, {inputs[position] for position in parameters if position < len(inputs)})
    if not joint.backward or not CHOICES[memory]:
        return
    for node in list(graph.nodes):
        program = _program_of(called(node), "_backward")
        if program is not None and node in joint.backward:
            _recompute_results(joint, program, called(node), memory)  # type: ignore[arg-type]
    for node in joint.elementwise:
        if _pays(joint, node, memory):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


class _Joint:
    """A joint graph.

    Attributes:
        graph: the graph.
        backward: the nodes that depend on gradients of results.
        elementwise: the elementwise nodes of the forward.
        forwards: the calls of regions' forwards.
        parameters: the inputs that are parameters.
        returned: the results, and the gradients.
    """

    def __init__(self, graph: fx.Graph, parameters: set[fx.Node]) -> None:
        self.graph, self.parameters = graph, parameters
        self.position = positions_of(graph)
        self.backward: set[fx.Node] = set()
        for node in graph.nodes:
            if is_tangent(node) or not self.backward.isdisjoint(node.all_input_nodes):
                self.backward.add(node)
        self.returned = set(graph.output_node().all_input_nodes)
        self.backward.discard(graph.output_node())
        forward = [node for node in graph.nodes if node not in self.backward]
        self.elementwise = [node for node in forward if _is_elementwise(node)]
        self.forwards = [node for node in forward if _program_of(called(node), "_forward")]

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """A value of the forward with its views, each after its base."""
        aliases = [node]
        for alias in aliases:
            users = [user for user in alias.users if name_of(user) in _ALIASES]
            aliases += [user for user in users if user not in self.backward]
        return aliases

    def readers(self, aliases: Iterable[fx.Node]) -> set[fx.Node] | None:
        """The products of the backward that read a value; None if anything else needs it later.

        Elementwise nodes of the forward count as reading it later: PyTorch may compute these again.
        """
        users = {user for alias in aliases for user in alias.users}.difference(aliases)
        later = users & self.backward
        others = users - later
        is_returned = not self.returned.isdisjoint(aliases)
        if is_returned or not _PRODUCTS.issuperset(map(name_of, later)):
            return None
        return None if any(map(_is_elementwise, others)) else later

    @functools.cached_property
    def needed(self) -> dict[fx.Node, bool]:
        """The values that are saved whatever is computed again.

        The value is true if one of the backward's elementwise nodes reads it. An elementwise value
        of one other is computed again from that, if that has no more bytes.
        """
        needed: dict[fx.Node, bool] = {}
        for node in self.graph.nodes:
            readers = self.backward.intersection(node.users)
            if node in self.backward or not readers or not is_tensor(node):
                continue
            is_inline = any(map(_is_elementwise, readers))
            if _PRODUCTS.issuperset(map(name_of, readers)) and _is_computed(node):
                continue
            sources = _sources(node)
            is_narrow = len(sources) == 1 and _bytes(sources[0]) <= _bytes(node)
            source = sources[0] if is_narrow else _base_of(node)
            needed[source] = needed.get(source, False) or is_inline
        return needed


def _is_computed(node: fx.Node) -> bool:
    return _is_elementwise(_base_of(node))


def _is_elementwise(node: fx.Node) -> bool:
    """Whether Inductor computes a node in a kernel of elements, inline with others."""
    return is_tensor(node) and (is_pointwise(node.target) or name_of(node) == "_to_copy")


def _base_of(node: fx.Node) -> fx.Node:
    """The value that a node is a view of."""
    while name_of(node) in _ALIASES:
        node = node.all_input_nodes[0]
    return node


def _sources(node: fx.Node) -> list[fx.Node]:
    """The values from which a chain of elementwise nodes computes a value, each once."""
    sources: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        base = _base_of(todo.pop())
        if _is_elementwise(base):
            todo += base.all_input_nodes
        else:
            sources[base] = None
    return list(sources)


def _bytes(node: fx.Node) -> int:
    tensor: Tensor = value_of(node)
    return math.prod(hints(tensor.shape)) * tensor.dtype.itemsize


def _pays(joint: _Joint, node: fx.Node, memory: str) -> bool:
    """Whether the backward is to compute an elementwise value again.

    If all that it reads is read by Inductor's kernels of elements, these compute it, too, and the
    backward only writes it.
    """
    if not joint.readers(joint.aliases(node)):
        return False
    sources = _sources(node)
    if not joint.parameters.issuperset(source for source in sources if source not in joint.needed):
        return False
    held = moved = _bytes(node)
    moved += sum([_bytes(source) for source in sources if not joint.needed.get(source)])
    return moved <= CHOICES[memory] * held


# --- results of regions ---------------------------------------------------------------------------


def _recompute_results(joint: _Joint, program: Program, backward: Called, memory: str) -> None:
    """Computes results of a region again, for the products of the backward that read them."""
    forward = next((f for f in joint.forwards if _is_of(f, program, backward)), None)
    if forward is None:
        return
    call = called(forward)
    assert call is not None
    for output in range(program.count):
        again = _again(program, output, memory)
        if again is None:
            continue
        for result in call.results(f"out{output}", output):
            aliases = joint.aliases(result)
            readers = joint.readers(aliases)
            if not readers or not are_numbers(value_of(result).shape):
                continue
            with joint.graph.inserting_before(min(readers, key=joint.position.__getitem__)):
                new = _computed_again(joint.graph, program, again, call, result)
                _replace(joint.graph, aliases, new, readers)


def _is_of(node: fx.Node, program: Program, backward: Called) -> bool:
    """Whether a forward's arguments and results are what a backward reads."""
    forward = called(node)
    if forward is None or _program_of(forward, "_forward") is not program:
        return False
    for name, saved in backward.arguments.items():
        if not name.startswith("saved_") or not isinstance(saved, fx.Node):
            continue
        kind = name.removeprefix("saved_")
        base = _base_of(saved)
        if kind in program.tensors:
            if _base_of(forward.arguments[kind]) is not base:
                return False
        elif base not in forward.results(*_output_of(program, kind)):
            return False
    return True


def _output_of(program: Program, kind: str) -> tuple[str, int]:
    """The name and the index of the forward's output that is saved as intermediate or stats."""
    output = program.plan.intermediate_output
    name = f"out{output}" if kind == "intermediate" and output >= 0 else kind
    return name, program.outputs.index(name)


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
    shape = [sizes[axis] for axis in program.structure.rows]
    arguments = [_argument(graph, forward, program, source, shape) for source in saved]
    call = call_operator(graph, op, arguments, arguments, op.dtypes, False)
    new = graph.call_function(operator.getitem, (call, 0))
    fake = torch.empty_like(tensor)
    call.meta["val"], new.meta["val"] = (fake, fake.new_empty(0)), fake
    for node in (call, new):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
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
