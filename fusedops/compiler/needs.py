"""What a backward computes and reads with each of several choices of what is saved for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from .ir import Node, computed_of, topological

__all__ = ["Needs"]


class Needs:
    """The values that a backward needs with each choice.

    A choice does without a value if it saves all the value's consumers, or does without them. One
    pass finds this for all choices, with a bit for each: a function of small matrices has thousands
    of values and hundreds of choices.

    Args:
        roots: the results of the backward.
        choices: the values that each choice saves.
        numbers: the values that all choices save.
    """

    def __init__(
        self, roots: Sequence[Node], choices: Sequence[Collection[Node]], numbers: Collection[Node]
    ) -> None:
        ends = Counter[Node]()
        for index, nodes in enumerate(choices):
            ends.update(dict.fromkeys(nodes, 1 << index))
        every = (1 << len(choices)) - 1
        ends.update({node: every - ends[node] for node in numbers})
        # From a value to the choices that do without it.
        self._without = dict.fromkeys(topological(roots), every) | dict.fromkeys(roots, 0)
        for node in reversed(self._without):
            without_arguments = self._without[node] | ends[node]
            for arg in computed_of(node):
                self._without[arg] &= without_arguments

    def needed(self, choice: int) -> set[Node]:
        """Return the values that are computed or read with a choice."""
        return {node for node, without in self._without.items() if not without >> choice & 1}
