"""Parameters that autocast casts one by one, cast together: fewer kernels, forward and for their gradients."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..core import launch
from ..core.registration import implement
from .regions import escapes, name_of, parts_of, value_of
from .report import note_change

__all__ = ["JOINED", "cast_together"]

# The mark of a tensor that joins casts, in `fx.Node.meta`.
JOINED = "fusedops_joined"
# Inductor reads up to so many tensors in one kernel that joins them. Beyond so many elements a launch does not matter.
_MOST_TENSORS, _MOST_ELEMENTS = 8, 2**23
# A matrix product loads 16 bytes at once: no matrix may begin between two such loads.
_ALIGNED = 8


def cast_together(graph: fx.Graph, receives: set[fx.Node]) -> None:
    """Puts parameters behind one another in one tensor to cast them, several at a time.

    Args:
        graph: of operators.
        receives: the nodes whose values have gradients. They are cast apart from others, which are to have none.
    """
    parts = parts_of(graph)
    groups = dict[Any, list[list[tuple[fx.Node, list[fx.Node]]]]]()
    for node in graph.nodes:
        casts = _casts_of(node)
        if not casts or len({parts[cast] for cast in casts}) > 1:
            continue
        value = value_of(casts[0])
        key = (value.dtype, value.device, parts[casts[0]], frozenset([cast in receives for cast in casts]))
        open_ = groups.setdefault(key, [[]])
        if not _fit([*[one for _, some in open_[-1] for one in some], *casts]):
            open_.append([])
        open_[-1].append((node, casts))
    for group in [group for open_ in groups.values() for group in open_ if len(group) > 1]:
        _cast(graph, group)


def _fit(casts: list[fx.Node]) -> bool:
    return len(casts) <= _MOST_TENSORS and sum(map(_count, casts)) <= _MOST_ELEMENTS


def _count(cast: fx.Node) -> int:
    return math.prod(value_of(cast).shape)


def _casts_of(node: fx.Node) -> list[fx.Node]:
    """The casts that a node is, or joins; none where they cannot be joined."""
    casts: Any = [node]
    if node.meta.get(JOINED):
        casts = node.args[0]
    elif any(user.meta.get(JOINED) for user in node.users):
        return []  # they are counted with what joins them
    is_used = all(_is_of_layer(user, node) for user in node.users)
    return list(casts) if is_used and all(map(_is_joinable, casts)) and not escapes(node) else []


def _is_of_layer(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node is used as the weight or the bias of a linear layer, and not as its rows."""
    place = {"t": 0, "mm": 1, "addmm": 2}.get(name_of(user))
    return place is not None and (user.args[place] is node or (place == 2 and user.args[0] is node))


def _is_joinable(cast: fx.Node) -> bool:
    if name_of(cast) != "_to_copy" or set(cast.kwargs) != {"dtype"} or not isinstance(cast.args[0], fx.Node):
        return False
    source, value = value_of(cast.args[0]), value_of(cast)
    is_parameter = cast.args[0].op in ("placeholder", "get_attr") and source.dim() in (1, 2) and source.is_contiguous()
    is_known = is_parameter and all(type(size) is int for size in source.shape)
    is_half = source.dtype == torch.float32 and value.dtype in (torch.float16, torch.bfloat16)
    return is_known and is_half and _count(cast) % _ALIGNED == 0 and launch.runs_kernels(value.device.type)


def _cast(graph: fx.Graph, group: list[tuple[fx.Node, list[fx.Node]]]) -> None:
    """One cast in the place of several."""
    aten, casts = torch.ops.aten, [cast for _, some in group for cast in some]
    place = {node: place for place, node in enumerate(graph.nodes)}
    with graph.inserting_before(min([*casts, *[node for node, _ in group]], key=place.__getitem__)):
        given = ([cast.args[0] for cast in casts], casts[0].kwargs["dtype"])
        whole = graph.call_function(torch.ops.fusedops.cast_joined.default, given)
        note_change(whole, "one cast of several parameters")
        counts = [sum(map(_count, some)) for _, some in group]
        parts = graph.call_function(aten.split_with_sizes.default, (whole, counts))
        for number, (node, some) in enumerate(group):
            shapes = [value_of(cast).shape for cast in some]
            shape = [sum([shape[0] for shape in shapes]), *shapes[0][1:]]
            part = graph.call_function(operator.getitem, (parts, number))
            joined = graph.call_function(aten.view.default, (part, shape))
            joined.meta.update(node.meta)
            node.replace_all_uses_with(joined)


# --- the operator -------------------------------------------------------------------------------------------------------


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of all tensors in another dtype, behind one another. Each is read and written once."""
    return torch.cat([tensor.to(dtype).view(-1) for tensor in tensors])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shapes, ctx.dtype = [tensor.shape for tensor in inputs[0]], inputs[0][0].dtype


def _derivative(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    """The gradients are parts of one tensor, cast at once, where their own derivative would be a cast for each."""
    parts = grad.to(ctx.dtype).split([math.prod(shape) for shape in ctx.shapes])
    return [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)], None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("cast_joined(Tensor[] tensors, ScalarType dtype) -> Tensor")
implement(_LIBRARY, "cast_joined", _joined, _joined, decomposed=True)
torch.library.register_autograd("fusedops::cast_joined", _derivative, setup_context=_setup, lib=_LIBRARY)
