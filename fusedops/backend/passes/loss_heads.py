"""Heads and losses of language models, whose logits need not be whole in memory.

    rows ──mm──▶ logits ──▶ views, casts, scale, soft cap ──▶ log-softmax ──▶ loss of targets

becomes ``fusedops::linear_rowwise``, also with class weights and label smoothing. The operator
computes logits, loss and gradients of some rows at a time.
Otherwise the logits, a copy of them in fp32 and their gradient are in memory at the same time: for
16,384 tokens of 128,256 words in bf16, 3.9, 7.8 and 7.8 GiB.

If the words are sharded over the ranks of a mesh (`loss_parallel`), so are the logits. The operator
then takes a rank's words, and reduces three numbers of each row over the ranks:

    rows ──mm──▶ ... ──▶ logits of a rank ──▶ DTensor ──▶ log-softmax ──▶ loss of targets, a DTensor
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...compiler.errors import NotRowwiseError
from ...core.compat.distributed import is_dtensor
from ...core.launches import launch
from ...core.optional import without_none
from ...distributed import losses as sharded
from ...losses.cross_entropy import encoded, scale_and_cap
from ...losses.registration import OPERATOR
from ..fx import CAST, aten_name
from ..graphs import (
    OF_RANK,
    are_numbers,
    drop_unused,
    dtype_of,
    hints_of,
    is_input,
    name_of,
    parts_of,
    users_of,
    value_of,
)
from ..report import RegionReport, note_change
from ..rewrite import Rewrite
from ..targets import FromLocal, OnDTensors, ToLocal
from .creating import Creator
from .smoothing import Smoothing, smoothing_of

__all__ = ["fuse_loss_heads"]

# Logits of fewer bytes stay whole. The operator's loss and gradients take the time of PyTorch's: it
# saves memory, which matters where logits are among the largest tensors of a step. And it waits for
# the number of targets that count, which small models would notice.
_LEAST_BYTES = 64 * 2**20
_LOSS = torch.ops.aten.nll_loss_forward.default
# PyTorch's numbers of reductions.
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
# Operators that do the same to logits and to rows before the product, if they leave the last
# dimension as it is.
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape"})
_OF_ROWS = _RESHAPES | {"slice", "alias", "clone"}


@dataclass
class _Head:
    """A matrix product and the loss of its logits.

    Attributes:
        loss: the node of the loss.
        product: the matrix product.
        nodes: the nodes between them, the last first.
        of_rows: those of them that view or copy rows, the last first.
        smoothing: the label smoothing of the loss.
        scale: the factor of logits before they are capped.
        softcap: the soft cap of logits; None without one.
        sharded: the node of the DTensor of logits; None without one.
    """

    loss: fx.Node
    product: fx.Node
    nodes: list[fx.Node]
    of_rows: list[fx.Node]
    smoothing: Smoothing
    scale: float
    softcap: float | None
    sharded: fx.Node | None = None

    @property
    def inside(self) -> set[fx.Node]:
        """All nodes from the product to the result."""
        return {self.loss, *self.nodes} | self.smoothing.nodes


def fuse_loss_heads(rewrite: Rewrite) -> None:
    """Replaces the cross-entropies of large logits that nothing else reads."""
    for loss in list(rewrite.graph.nodes):
        head = _head_of(rewrite, loss) if _is_call_of("nll_loss_forward", loss) else None
        if head is None:
            continue
        replace = _replace if head.sharded is None else _replace_sharded
        reason = _why_left(rewrite, head) or replace(rewrite, head)
        if reason:
            operators = dict.fromkeys(map(name_of, [*reversed(head.nodes), loss]))
            shape = hints_of(head.product)
            rewrite.reports.append(RegionReport(tuple(operators), shape, reason))
    drop_unused(rewrite.graph)


def _head_of(rewrite: Rewrite, loss: fx.Node) -> _Head | None:
    """The head of a loss; None where it has no large logits, or its gradient is not wanted."""
    if not launch.runs_kernels(loss.args[0].meta["val"].device.type):  # type: ignore[union-attr]
        return None
    head = _walked(loss) if loss.target is _LOSS else _walked_through_shards(loss)
    if head is None or loss not in rewrite.receives:
        return None
    size = math.prod(hints_of(head.product)) * dtype_of(head.product).itemsize
    return head if size > _LEAST_BYTES else None


# --- from the loss to the product -----------------------------------------------------------------


@dataclass
class _Walk:
    """The way from a loss to the product of its logits.

    Attributes:
        nodes, of_rows: see `_Head`.
        steps: what is done to logits, the last first: see `scale_and_cap`.
    """

    nodes: list[fx.Node]
    of_rows: list[fx.Node] = field(default_factory=list)
    steps: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, node: fx.Node) -> bool:
        """Whether a node of one tensor may be on the way; if so it is added."""
        self.nodes.append(node)
        return _STEPS.get(name_of(node), _unknown)(self, node)


def _walked(loss: fx.Node) -> _Head | None:
    """The head of a loss, whatever its size and readers; None where it is no head."""
    log_p, target, _, reduction, _ = loss.args
    assert isinstance(log_p, fx.Node)
    if value_of(target).dtype != torch.int64:  # type: ignore[arg-type]
        return None
    walk = _Walk([])
    # CUDA's autocast takes the loss in fp32 of a log-softmax in the dtype of the product.
    if name_of(log_p) == "_to_copy" and walk.add(log_p):
        (log_p,) = log_p.all_input_nodes
    if not _is_log_softmax(log_p) or reduction not in _REDUCTIONS:
        return None
    walk.nodes.append(log_p)
    smoothing = smoothing_of(loss, log_p)
    return _walked_to_product(loss, walk, log_p.args[0], smoothing)


def _walked_to_product(loss: fx.Node, walk: _Walk, node: Any, smoothing: Smoothing) -> _Head | None:
    """The head of a loss, from the last node before its log-softmax; None where it is no head."""
    while name_of(node) not in ("mm", "addmm"):
        if not walk.add(node):
            return None
        node = node.args[0]
    numbers = scale_and_cap(reversed(walk.steps))
    if numbers is None or not _is_linear(node):
        return None
    return _Head(loss, node, [*walk.nodes, node], walk.of_rows, smoothing, *numbers)


def _walked_through_shards(loss: fx.Node) -> _Head | None:
    """The head of a loss of DTensors, whose logits are sharded by class; None for others."""
    log_p, target, class_weight, reduction, _ = loss.args
    if not _is_call_of("_log_softmax", log_p) or class_weight is not None:
        return None
    logits: Any = log_p.args[0]  # type: ignore[union-attr]
    if not _is_sharded_by_class(logits) or reduction not in _REDUCTIONS:
        return None
    if value_of(target).dtype != torch.int64:  # type: ignore[arg-type]
        return None
    walk = _Walk([log_p, logits])  # type: ignore[list-item]
    head = _walked_to_product(loss, walk, logits.args[0], Smoothing(0.0, list(loss.users), set()))
    if head is not None:
        head.sharded = logits
    return head


def _is_sharded_by_class(logits: fx.Node) -> bool:
    """Whether a node is a DTensor of rows of logits, whose classes alone are sharded."""
    if not isinstance(logits.target, FromLocal):
        return False
    [[placement, *others], shape, _] = logits.target.parameters
    is_matrix = len(shape) == 2 and are_numbers(shape)
    return is_matrix and not others and placement.is_shard() and placement.dim in (1, -1)


def _is_call_of(name: str, node: Any) -> bool:
    """Whether a node calls the operator of a name, on tensors or on DTensors."""
    target = node.target
    return aten_name(target.function if isinstance(target, OnDTensors) else target) == name


def _is_log_softmax(node: fx.Node) -> bool:
    """Whether a node is a log-softmax of rows, over a known number of columns."""
    if name_of(node) != "_log_softmax":
        return False
    shape = value_of(node).shape
    return (len(shape), node.args[1]) in ((2, 1), (2, -1)) and are_numbers(shape[1:])


def _is_linear(node: fx.Node) -> bool:
    """Whether a product is that of a linear layer of known size, perhaps with a bias of columns."""
    factor: Any = node.args[-1]
    if node.kwargs or not are_numbers(value_of(factor).shape):
        return False
    bias: Any = node.args[0]
    return name_of(node) == "mm" or value_of(bias).shape == value_of(node).shape[1:]


def _unknown(walk: _Walk, node: fx.Node) -> bool:
    """An operator that has no place between a product and its loss."""
    return False


def _reshaped(walk: _Walk, node: fx.Node) -> bool:
    """A view or a copy of rows, all columns of them."""
    walk.of_rows.append(node)
    source: Any = node.args[0]
    before, after = value_of(source), value_of(node)
    last = before.dim() - 1
    # ``view(dtype)`` is an overload of the same name. A slice has a dimension as its argument.
    is_of_rows = node.args[1:2] not in ((-1,), (last,))
    columns = [(t.shape[-1], t.dtype) for t in (before, after)]
    return is_of_rows and columns[0] == columns[1]


def _cast(walk: _Walk, node: fx.Node) -> bool:
    """A cast to a dtype that has all the numbers of the one before."""
    source: Any = node.args[0]
    before, after = value_of(source), value_of(node)
    wider = torch.promote_types(before.dtype, after.dtype)
    return (before.device, wider) == (after.device, after.dtype)


def _scaled(walk: _Walk, node: fx.Node) -> bool:
    """A multiplication by a number, or a division by one."""
    walk.steps.append((_SCALES[name_of(node)], node.args[1]))
    return not node.kwargs and isinstance(node.args[0], fx.Node)


def _capped(walk: _Walk, node: fx.Node) -> bool:
    """A tanh."""
    walk.steps.append(("tanh", 1))
    return True


_SCALES = {"mul": "*", "div": "/"}
_STEPS: dict[str, Callable[[_Walk, fx.Node], bool]] = {
    **dict.fromkeys(_OF_ROWS, _reshaped),
    **dict.fromkeys(_SCALES, _scaled),
    "_to_copy": _cast,
    "tanh": _capped,
}


# --- reasons to leave a head ----------------------------------------------------------------------


def _why_left(rewrite: Rewrite, head: _Head) -> str:
    """The reason why a head is left; "" if there is none."""
    inside = head.inside
    parts = parts_of(rewrite.graph)
    if len(set(map(parts.__getitem__, inside))) > 1:
        return "tensors are changed, or gradients switched, between its product and its loss"
    if {user.args[1] for user in head.loss.users} != {0}:
        return "the number of its targets is read"
    # Their values are computed from logits: no others of them have gradients.
    read = inside.intersection(rewrite.receives).difference(head.smoothing.results, {head.loss})
    readers = users_of(read) - inside
    if rewrite.graph.output_node() in readers:
        return (
            "its logits are returned, and so whole in memory; return the loss alone (with "
            "Transformers by fuse_model(model, loss=True)), or fewer logits (by logits_to_keep)"
        )
    names = ", ".join(sorted(map(name_of, readers)))
    return f"its logits are read by {names}, too, and so whole in memory" if readers else ""


# --- the operator ---------------------------------------------------------------------------------


def _replace(rewrite: Rewrite, head: _Head) -> str:
    """Replaces a head by the operator; returns the reason if the operator has no kernel for it."""
    product = head.product
    *bias, rows, factor = product.args
    _, target, class_weight, reduction, ignore_index = head.loss.args
    created = Creator(rewrite, head.loss)
    source = _rows(created, head, rows)
    weight = _uncast(created, _transposed(created, factor))
    biases = [_uncast(created, node) for node in bias]
    weights = _weights(created, target, class_weight)
    tensors: Any = (source, weight, biases[0] if biases else None, target, *weights)
    values: Any = fx.node.map_arg(tensors, value_of)
    try:
        text = encoded(
            values,
            (source in rewrite.needs, weight in rewrite.needs, bool(rewrite.needs & {*biases})),
            reduction=_REDUCTIONS[reduction],  # type: ignore[index]
            ignore_index=ignore_index,  # type: ignore[arg-type]
            label_smoothing=head.smoothing.share,
            softcap=head.softcap,
            scale=head.scale,
            dtype=dtype_of(product),
        )
        others = without_none((target, *weights))
        results = created.call(OPERATOR, [source], [weight], biases, others, text)
    except NotRowwiseError as error:
        return str(error)
    result = created.call(operator.getitem, results, 0)
    for user in head.smoothing.results:
        wanted = dtype_of(user)
        value = result
        if dtype_of(result) != wanted:
            value = created.call(CAST, result, dtype=wanted)
        note_change(value, "a loss whose logits are never whole in memory")
        user.replace_all_uses_with(value)
    return ""


def _replace_sharded(rewrite: Rewrite, head: _Head) -> str:
    """Replaces a head of a rank's classes; returns the reason if that cannot be done."""
    created, logits = Creator(rewrite, head.loss), head.sharded
    assert logits is not None
    assert isinstance(logits.target, FromLocal)
    *bias, rows, factor = head.product.args
    _, target, _, reduction, ignore_index = head.loss.args
    mesh, classes = value_of(logits).device_mesh, logits.target.parameters[1][1]
    for value in [value_of(user) for user in head.loss.users] + [value_of(target)]:  # type: ignore[arg-type]
        if not all(one.is_replicate() for one in getattr(value, "placements", ())):
            return "its targets are sharded"
    if is_dtensor(value_of(target)):  # type: ignore[arg-type]
        target = created.call(ToLocal(value_of(target).placements), target)  # type: ignore[arg-type]
    source = _rows(created, head, rows)
    weight = _uncast(created, _transposed(created, factor))
    biases = [_uncast(created, node) for node in bias]
    tensors: Any = (source, weight, biases[0] if biases else None, target)
    try:
        text = sharded.encoded(
            fx.node.map_arg(tensors, value_of),
            (source in rewrite.needs, weight in rewrite.needs, bool(rewrite.needs & {*biases})),
            sharded.shard_of("linear_cross_entropy", classes, mesh, 0),
            reduction="none" if reduction == 0 else "sum",
            ignore_index=ignore_index,  # type: ignore[arg-type]
            softcap=head.softcap,
            scale=head.scale,
            dtype=dtype_of(head.product),
        )
    except (NotRowwiseError, ValueError) as error:
        return str(error)
    results = created.call(OPERATOR, [source], [weight], biases, [target], text)
    result = created.call(operator.getitem, results, 0)
    if _REDUCTIONS[reduction] == "mean":  # type: ignore[index]
        counted = created.call(torch.ops.aten.ne.Scalar, target, ignore_index)
        result = created.call(
            torch.ops.aten.div.Tensor, result, created.call(torch.ops.aten.sum.default, counted)
        )
    for user in head.smoothing.results:
        value = result
        if dtype_of(result) != dtype_of(user):
            value = created.call(CAST, result, dtype=dtype_of(user))
        like = value_of(user)
        placed = FromLocal(like.placements, like.shape, like.stride())
        note_change(value, "a loss whose logits are never whole in memory")
        user.replace_all_uses_with(created.call(placed, value, logits.args[1]))
    # Which classes are this rank's is in the operator's arguments.
    module: Any = rewrite.graph.owning_module
    module.meta[OF_RANK] = True
    return ""


def _rows(created: Creator, head: _Head, rows: Any) -> fx.Node:
    """The rows of the loss: views and copies of logits become those of the product's rows."""
    columns = value_of(rows).shape[-1]
    for node in reversed(head.of_rows):
        name, (_, *arguments) = name_of(node), node.args
        if name in ("alias", "clone"):
            continue
        if name in _RESHAPES:
            shape: Any = arguments[0]
            *sizes, _ = shape
            rows = created.call(torch.ops.aten.reshape.default, rows, [*sizes, columns])
        else:
            rows = created.call(node.target, rows, *arguments)
    return rows  # type: ignore[no-any-return]


def _weights(
    created: Creator, target: Any, class_weight: Any
) -> tuple[fx.Node | None, fx.Node | None]:
    """The weight of each target, any number for those that are ignored, and of each class."""
    if class_weight is None:
        return None, None
    last = value_of(class_weight).shape[0] - 1
    known = created.call(torch.ops.aten.clamp.default, target, 0, last)
    of_target = created.call(torch.ops.aten.index_select.default, class_weight, 0, known)
    return of_target, class_weight


def _transposed(created: Creator, factor: Any) -> fx.Node:
    """The weight (V, D) of a product's second factor, (D, V)."""
    if name_of(factor) == "t":
        weight: fx.Node = factor.args[0]
        return weight
    return created.call(torch.ops.aten.t.default, factor)


def _uncast(created: Creator, weight: Any) -> fx.Node:
    """The parameter that a weight is a cast of, or the weight itself.

    The operator casts it, and computes its gradient in the dtype of the parameter.
    """
    parts = parts_of(created.rewrite.graph)
    source: Any = next(iter(weight.args), weight)
    is_cast = name_of(weight) == "_to_copy" and is_input(source)
    if not is_cast or parts[weight] != parts[created.before]:
        return weight  # type: ignore[no-any-return]
    value = value_of(source)
    is_usable = (value.device, value.is_floating_point()) == (value_of(weight).device, True)
    return source if is_usable else weight  # type: ignore[no-any-return]
