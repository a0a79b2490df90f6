"""Passes over the columns of long rows: which reductions share one, and the lines of each.

A program holds whole rows no longer than a block. It reads a longer row tile by tile, once for each
reduction that depends on the result of another::

    variance:   pass 0: sum -> mean      pass 1: sum of (x - mean) ** 2
    softmax:    pass 0: maximum and sum of exponentials, which is rescaled with each larger maximum
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .emitter import Emitter
from .errors import NotRowwiseError
from .ir import (
    REDUCTIONS,
    Node,
    computed_of,
    is_below_largest,
    largest_of,
    reachable,
    topological,
    value_of,
)
from .literals import in_fp32, neutral
from .rows_of_programs import MASK

__all__ = ["emit_passes", "maximum", "moments_of"]

# How a loop over whole tiles of columns begins, and what follows it: one tile of fewer columns, or
# none. No kernel with such a loop has groups, whose masks would be others.
_FULL_TILES = "for start in tl.range(0, N // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=STAGES):"
_LAST_TILE = ("if N % BLOCK_N:", "start = N // BLOCK_N * BLOCK_N")
# Operators whose result is one of their arguments, perhaps with another sign.
_CHOICES = ("cast", "where", "neg")
_ACCUMULATORS = {"amax": "largest"}


# --- the per-row values that one kernel computes for the next -------------------------------------


def moments_of(roots: Sequence[Node], emitter: Emitter) -> list[Node]:
    """Return the moments: per-row results of reductions that values along the columns need.

    One kernel reduces long rows and stores the moments, and the next one reads them::

        (x - mean) * rstd       moments: mean, rstd

    Raises:
        NotRowwiseError: one of them is a whole number that fp32 may not hold.
    """
    used = reachable(roots, emitter.leaves.__contains__)
    candidates = list(roots)
    for node in filter(emitter.has_columns, used.difference(emitter.leaves)):
        candidates += node.args
    moments: set[Node] = set()
    for node in candidates:
        _add_moments(node, emitter, moments)
    moments &= used
    return list(filter(moments.__contains__, topological(roots)))


# A minimum is the negative maximum of the negatives.
_PLURALS = {"sum": "sums", "amax": "maxima or minima", "pick": "single elements"}


def _add_moments(node: Node, emitter: Emitter, moments: set[Node]) -> None:
    """Add a per-row value to the moments, or what it is computed from.

    Moments are stored as floats, which hold whole numbers only up to a size. So the arguments of a
    whole number are added instead. But the arguments of a reduction are as long as the row: for a
    reduction this raises, unless its result fits in a float.
    """
    if emitter.has_columns(node) or not _has_reduction(node, emitter):
        return
    if node.kind == "float":
        moments.add(node)
    elif node.op not in REDUCTIONS:
        for arg in node.args:
            _add_moments(arg, emitter, moments)
    elif _has_exact_result(node):
        moments.add(node)
    else:
        raise NotRowwiseError(
            f"{_PLURALS[node.op]} of whole numbers along rows that are longer than a program holds"
        )


def _has_reduction(node: Node, emitter: Emitter) -> bool:
    """Whether a value depends on a reduction that this kernel computes, and does not read."""
    computed = reachable([node], emitter.leaves.__contains__).difference(emitter.leaves)
    return not REDUCTIONS.isdisjoint([inner.op for inner in computed])


def _has_exact_result(node: Node) -> bool:
    """Whether fp32 holds the result of a reduction of integers; it does for `any` and `argmax`."""
    if node.op == "sum":
        (summed,) = node.args
        return summed.op == "cast" and summed.args[0].kind == "bool"
    return all(map(_is_exact, node.args))


def _is_exact(node: Node) -> bool:
    """Whether fp32 holds a value: a truth value, an index, most constants, or a choice of them."""
    if node.kind == "bool" or node.op == "iota":
        return True
    if node.op == "const":
        return bool(in_fp32(value_of(node)) == value_of(node))
    if node.op not in _CHOICES or _has_floats(node):
        return False
    return all(map(_is_exact, node.args))


def _has_floats(node: Node) -> bool:
    """Whether an argument is a floating-point number."""
    return any(arg.kind == "float" for arg in node.args)


# --- which pass a reduction belongs to ------------------------------------------------------------


def _passes(roots: Sequence[Node], emitter: Emitter) -> dict[Node, int]:
    """Return for each reduction of whole rows how many passes over the rows precede its own."""
    # For each node: how many passes precede the values that are computed from it. For a variance:
    #
    #   x                       0
    #   sum(x), mean            pass 0, so 1 from here on
    #   (x - mean) ** 2         1
    #   sum, variance, rstd     pass 1, so 2 from here on
    levels: dict[Node, int] = {}
    passes: dict[Node, int] = {}
    used = reachable(roots, emitter.leaves.__contains__)
    for node in filter(used.__contains__, topological(roots)):
        levels[node] = _level(node, emitter, levels)
        if node.op in REDUCTIONS and emitter.is_reduced(node):
            passes[node] = _shared_pass(node, passes, levels[node])
            levels[node] = passes[node] + 1
    return passes


def _level(node: Node, emitter: Emitter, levels: dict[Node, int]) -> int:
    """Return how many passes precede the computation of a value."""
    if node in emitter.leaves:
        return 0
    return max([levels[arg] for arg in computed_of(node)], default=0)


def _shared_pass(node: Node, passes: dict[Node, int], level: int) -> int:
    """Return the pass of a reduction.

    A sum of exponentials shares the pass of its maximum, which it is computed from.
    """
    for reduction, number in passes.items():
        if _is_online(node, reduction):
            return number
    return level


def _is_online(total: Node, largest: Node) -> bool:
    """Whether this is the sum of ``exp(x - largest)`` over the row x: one pass computes both.

    The exponential may have a factor that needs no reduction, as for the mean of x by softmax.
    """
    if (total.op, largest.op) != ("sum", "amax") or total.attrs[0] != largest.attrs[0]:
        return False
    exponential, _ = _exponential_of(total)
    if exponential is None:
        return False
    return largest_of(exponential.args[0]) is largest


def _exponential_of(total: Node) -> tuple[Node | None, Node | None]:
    """Return the exponential below one that is summed, and its factor; None where absent."""
    (summed,) = total.args
    if summed.op != "mul":
        return (summed if _is_exponential(summed) else None), None
    first, second = summed.args
    for exponential, factor in ((first, second), (second, first)):
        if _is_exponential(exponential) and not _reduces(factor):
            return exponential, factor
    return None, None


def _is_exponential(node: Node) -> bool:
    """Whether this is ``exp(x - amax(x))``."""
    return node.op == "exp" and is_below_largest(node.args[0])


def _reduces(node: Node) -> bool:
    """Whether a value depends on a reduction."""
    return not REDUCTIONS.isdisjoint([inner.op for inner in reachable([node])])


# --- lines ----------------------------------------------------------------------------------------


def emit_passes(roots: Sequence[Node], emitter: Emitter) -> None:
    """Emit the passes over rows that the reductions among these values, and before them, need."""
    by_pass: dict[int, list[Node]] = {}
    for node, number in _passes(roots, emitter).items():
        by_pass.setdefault(number, []).append(node)
    for number in sorted(by_pass):
        _emit_pass(emitter, by_pass[number])


def _emit_pass(emitter: Emitter, nodes: Sequence[Node]) -> None:
    """Emit one pass over the columns of the rows, for reductions that depend on no other.

    A loop over full tiles, which need no mask, the last tile, and the reduction of the lanes::

        total = tl.full((ROWS, BLOCK_N), 0, ACC)    # one sum a lane
        for start in full tiles: total += tile
        if there is a rest:      total += masked tile
        total = tl.sum(total)
    """
    names: dict[Node, str] = {}
    for node in nodes:
        names[node] = emitter.names.free(_ACCUMULATORS.get(node.op, "total"))
    online = _online_sums(nodes)
    online_maxima = list(online.values())
    for node, name in names.items():
        # Other reductions have a result per lane until the end. A maximum that rescales sums is
        # reduced to one number per row in every tile: all lanes are rescaled by it.
        columns = "1" if node in online_maxima else "BLOCK_N"
        emitter.lines.append(f"{name} = {_initial(node, columns)}")
    # Most tiles are full, and need no mask: the code for them is separate from the last one's.
    emitter.open_columns(full=True)
    _accumulate(emitter, names, online)
    emitter.close_columns(_FULL_TILES, *emitter.column_lines(masked=False))
    emitter.open_columns(full=False)
    _accumulate(emitter, names, online)
    emitter.close_columns(*_LAST_TILE, *emitter.column_lines(), MASK)
    for node, name in names.items():
        if node not in online_maxima:
            emitter.lines.append(f"{name} = {emitter.reduced(node, name)}")
    emitter.named |= names
    emitter.computed.update(names)


def _online_sums(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return the maximum for each sum of exponentials that is computed in its pass."""
    pairs = itertools.product(nodes, nodes)
    return {total: largest for total, largest in pairs if _is_online(total, largest)}


def _accumulate(emitter: Emitter, names: dict[Node, str], online: dict[Node, Node]) -> None:
    """Emit the lines that add a tile to what is reduced."""
    body = emitter.body
    assert body is not None
    online_maxima = list(online.values())
    # The exponentials are taken after the maximum of their tile.
    for node in sorted(names, key=online.__contains__):
        name = names[node]
        if node in online_maxima:
            totals = [names[total] for total in online if online[total] is node]
            _accumulate_online(emitter, body, node, name, totals)
        elif node in online:
            _accumulate_exponentials(emitter, body, node, name, names[online[node]])
        elif node.op == "amax":
            larger = maximum(name, emitter.reducible(node))
            body.append(f"{name} = {larger}")
        else:
            body.append(f"{name} += {emitter.reducible(node)}")


def _accumulate_online(
    emitter: Emitter, body: list[str], node: Node, name: str, totals: Sequence[str]
) -> None:
    """Emit the lines of a maximum whose sums of exponentials are taken in the same pass.

    When the maximum grows, the sums are rescaled (Milakov and Gimelshein 2018,
    arXiv:1805.02867)::

        sum of exp(x - old)  ->  sum * exp(old - new)

    Nothing is subtracted from an infinite maximum: rows may begin masked, and the difference of
    two infinities would be NaN.
    """
    larger = emitter.names.free("larger")
    base = f"{name}_base"
    body.append(f"{larger} = {maximum(name, emitter.reduced(node, emitter.reducible(node)))}")
    body.append(f'{base} = tl.where({larger} == float("-inf"), 0.0, {larger})')
    body.extend(f"{total} *= tl.exp({name} - {base})" for total in totals)
    body.append(f"{name} = {larger}")


def _accumulate_exponentials(
    emitter: Emitter, body: list[str], node: Node, name: str, largest: str
) -> None:
    """Emit the line of a sum of exponentials, of differences from its maximum so far."""
    exponential, factor = _exponential_of(node)
    assert exponential is not None
    shifted = exponential.args[0]
    value = f"tl.exp({emitter.value(shifted.args[0])} - {largest}_base)"
    if factor is not None:
        value = f"{value} * {emitter.value(factor)}"
    # The exponential of the zeros in the padding is one.
    if not emitter.full:
        value = f"tl.where(in_cols, {value}, 0)"
    body.append(f"{name} += {value}")


def _initial(node: Node, columns: str) -> str:
    """Return the accumulator of a reduction before the first tile."""
    start = neutral(node.op, node.kind)
    dtype = "tl.int64" if node.kind == "int" else "ACC"
    return f"tl.full((ROWS, {columns}), {start}, {dtype})"


def maximum(one: str, other: str) -> str:
    """Return the larger of two values, as an expression: NaN if one of them is."""
    return f"tl.maximum({one}, {other}, propagate_nan=tl.PropagateNan.ALL)"
