"""What a backward needs with each choice of what is saved, against a search for each choice."""

from __future__ import annotations

import random

from fusedops.compiler.ir import Graph, Node, reachable
from fusedops.compiler.needs import Needs


def _random_graph(seed: int) -> list[Node]:
    random.seed(seed)
    graph = Graph()
    nodes = [graph.make("input", attrs=(index, ()), axes=(0,), kind="float") for index in range(4)]
    for _ in range(40):
        op = random.choice(["add", "mul", "instead", "exp"])
        arguments = random.choices(nodes[-8:], k=1 if op == "exp" else 2)
        nodes.append(graph.make(op, *arguments))
    return nodes


def test_each_choice_needs_what_a_search_reaches() -> None:
    for seed in range(20):
        nodes = _random_graph(seed)
        roots = [nodes[-1], random.choice(nodes)]
        choices: list[list[Node]] = [[], *[random.sample(nodes, 3) for _ in range(8)]]
        numbers = set(random.sample(nodes, 3))
        needs = Needs(roots, choices, numbers)
        for index, saved in enumerate(choices):
            reached = reachable(roots, {*saved, *numbers}.__contains__)
            assert needs.needed(index) == reached
