"""What a backward needs with each choice of what is saved, against a search for each choice."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fusedops.compiler.ir import Graph, Node, reachable
from fusedops.compiler.needs import Needs
from fusedops.compiler.planning import planned
from fusedops.compiler.rows import structured
from fusedops.compiler.tracing import trace


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


def test_results_are_the_same_bits_without_gradients() -> None:
    """If only the weight had a gradient, to save the product, rounded, would hold fewer bytes."""

    def function(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = x * torch.sigmoid(gate)
        return product * weight, product.sum(-1)

    tensors = [torch.empty(shape, device="meta") for shape in ((8, 32), (8, 32), (32,))]
    names = ["x", "gate", "weight"]
    structure = structured(trace(function, tensors, function, names, lambda _: None))
    for constant, saved in ((), (0, 1, 2)), ((2,), (0, 1, 2)), ((0, 1), (0, 1)):
        plan = planned(structure, memory=True, constant=constant)
        assert not plan.intermediate
        assert plan.saved_inputs == saved
        assert set(plan.differentiable) == {0, 1, 2} - set(constant)
