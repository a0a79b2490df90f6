"""The label smoothing of a cross-entropy.

PyTorch adds it to the loss by operators that read the log-softmax again:

    log-softmax ──▶ nll_loss_forward ─────────────────────────────▶ * (1 - share) ──▶ +
              └──▶ sums of rows ──▶ 0 where ignored ──▶ reduced ──▶ * share / classes ─┘

Only these operators, with the same targets and weights, are smoothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graphs import name_of, users_of, value_of

__all__ = ["Smoothing", "smoothing_of"]


@dataclass
class Smoothing:
    """The smoothing of a loss.

    Attributes:
        share: the share of the uniform distribution in the target.
        results: the nodes whose value is the smoothed loss.
        nodes: the nodes from the log-softmax and the loss to the results.
    """

    share: float
    results: list[fx.Node]
    nodes: set[fx.Node]


# A name of an operator and the patterns of its arguments; or an argument itself.
_Pattern = Any


def smoothing_of(loss: fx.Node, log_p: fx.Node) -> Smoothing:
    """Returns the smoothing of a loss, whose share may be zero.

    Args:
        loss: the node of ``nll_loss_forward``.
        log_p: the log-softmax of rows.
    """
    none = Smoothing(0.0, list(loss.users), set())
    results = _through_products(loss)
    classes = value_of(log_p).shape[1]
    if list(map(name_of, results)) != ["add"]:
        return none
    (result,) = results
    rest, share = map(_factor, result.args)
    value = ("", loss, 0)
    pattern = ("add", ("mul", value, rest), ("mul", _reduced(loss, log_p, classes), share))
    nodes = set[fx.Node]()
    if not _matches(pattern, result, nodes):
        return none
    # The operator, as PyTorch's argument, takes no negative share.
    if share < 0 or not math.isclose(rest + share * classes, 1.0, abs_tol=1e-9):
        return none
    return Smoothing(share * classes, results, nodes)


def _through_products(loss: fx.Node) -> list[fx.Node]:
    """Returns the users of a loss behind its value and what multiplies it."""
    values = users_of([loss])
    return list(users_of(users_of(values)))


def _factor(term: Any) -> float:
    """Returns the number by which a term is multiplied; NaN without one."""
    last = term.args[-1] if isinstance(term, fx.Node) else None
    return last if isinstance(last, float) else math.nan


def _reduced(loss: fx.Node, log_p: fx.Node, classes: int) -> _Pattern:
    """Returns the pattern of the loss of the uniform distribution."""
    _, target, weight, reduction, ignore_index = loss.args
    is_ignored = ("eq", target, ignore_index)
    weighted: _Pattern = log_p
    if weight is not None:
        weighted = ("mul", log_p, ("view", weight, [1, classes]))
    of_rows = ("masked_fill", ("neg", ("sum", weighted, [1])), is_ignored, 0.0)
    if reduction == 0:
        return of_rows
    total = ("sum", of_rows)
    if reduction == 2:
        return total
    counted: _Pattern = ("bitwise_not", is_ignored)
    if weight is not None:
        known = ("masked_fill", target, is_ignored, 0)
        counted = ("masked_fill", ("gather", weight, 0, known), is_ignored, 0)
    return ("div", total, ("sum", counted))


def _matches(pattern: _Pattern, argument: Any, nodes: set[fx.Node]) -> bool:
    """Returns whether an argument has a pattern; the nodes that do are added to ``nodes``."""
    if not isinstance(pattern, tuple):
        return bool(pattern == argument)
    name, *patterns = pattern
    if not isinstance(argument, fx.Node) or name_of(argument) != name:
        return False
    # Autocast sums in fp32.
    is_plain = dict(argument.kwargs) in ({}, {"dtype": torch.float32})
    if not is_plain or len(argument.args) != len(patterns):
        return False
    nodes.add(argument)
    pairs = zip(patterns, argument.args, strict=True)
    return all(_matches(inner, value, nodes) for inner, value in pairs)
