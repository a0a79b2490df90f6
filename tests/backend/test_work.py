"""The work that the backend does for a graph, counted: it grows with the layers, and no faster."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fusedops
import fusedops.backend
from backends import Backend, PostNorm, randn
from fusedops.backend import entry, joint, programs
from fusedops.backend.report import CompileReport
from fusedops.core.launches import launch
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_FOLDER = str(Path(str(fusedops.backend.__file__)).parent)
_WIDTH = 24


class Layer(nn.Module):
    """An attention with a mask that is a constant, rotary embeddings, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(_WIDTH // 2), nn.RMSNorm(_WIDTH // 2)
        self.feed_forward, self.norm = PostNorm(_WIDTH, 0.1), nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, -1, 3, 2, _WIDTH // 2).transpose(1, 3).unbind(2)
        q, k = self.q_norm(q) * cos, self.k_norm(k) * cos
        rows = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        return self.feed_forward(self.norm(self.out(rows.reshape(x.shape)) + x))


class Model(nn.Module):
    """Some equal layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        mask, cos = positions <= positions[:, None], positions[:, None].cos()
        for layer in self.layers:
            x = layer(x, mask, cos)
        return x


class _Counter:
    """Counts the lines of the backend that run, and the nodes that loops over graphs visit.

    A loop in C, such as that of `dict`, runs no line.
    """

    def __init__(self) -> None:
        self.lines = self.nodes = 0

    @contextmanager
    def counting(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        counter, node_list = self, type(fx.Graph().nodes)

        class Nodes(node_list):  # type: ignore[misc, valid-type]
            """The nodes of a graph, counted as a loop reads them."""

            def __iter__(self) -> Iterator[fx.Node]:
                for node in super().__iter__():
                    counter.nodes += 1
                    yield node

            def __reversed__(self) -> Nodes:
                return Nodes(self.graph, "_next" if self.direction == "_prev" else "_prev")

        def note(frame: Any, event: str, _: Any) -> Any:
            self.lines += event == "line"
            return note if frame.f_code.co_filename.startswith(_FOLDER) else None

        with monkeypatch.context() as patch:
            patch.setattr(fx.Graph, "nodes", property(Nodes))
            sys.settrace(note)
            try:
                yield
            finally:
                sys.settrace(None)


def _compiled(
    layers: int, with_operators: Callable[[fx.GraphModule, Sequence[Any], CompileReport], Any]
) -> CompileReport:
    """Trace a model of some layers, and pass its graph to a function of the backend."""
    report = CompileReport()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with_operators(gm, inputs, report)
        return gm.forward

    torch._dynamo.reset()
    model = Model(layers).to(DEVICE)
    torch.compile(lambda x: model(x), backend=backend)(randn(2, 8, _WIDTH))
    assert not report.left
    return report


def test_regions_of_equal_layers_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    plan = programs._source_or_reason

    def noted(function: Any, *arguments: Any) -> Any:
        planned.append(function.text)
        return plan(function, *arguments)

    monkeypatch.setattr(programs, "_source_or_reason", noted)
    counts, fused = [], []
    for layers in (2, 12):
        monkeypatch.setattr(programs, "_known", {})
        planned.clear()
        fused.append(len(_compiled(layers, entry._with_operators).fused))
        counts.append(len(planned))
    assert counts[0] == counts[1] < fused[0]
    assert fused[1] == 6 * fused[0]


def test_work_is_linear_in_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4 to 12 layers, and from 12 to 20, it grows by the same."""
    _compiled(2, entry._with_operators)  # what is done once in a process
    lines, nodes = [], []
    for layers in (4, 12, 20):
        counter = _Counter()

        def counted(*arguments: Any, counter: _Counter = counter) -> None:
            with counter.counting(monkeypatch):
                entry._with_operators(*arguments)

        _compiled(layers, counted)
        lines.append(counter.lines)
        nodes.append(counter.nodes)
    for first, second, third in (lines, nodes):
        assert 0 < third - second <= 1.01 * (second - first)


class Chain(nn.Module):
    """Layers with a residual stream, and an elementwise value with two ways to it in each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PostNorm(_WIDTH, 0.1) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            x = layer(x)
            y = y + torch.sigmoid(y)
        return F.linear(y, self.layers[0].up.weight) * x.sum()


def test_choice_of_what_is_computed_again_is_linear_in_the_number_of_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = []
    recompute = joint.recompute
    for layers in (1, 3, 6, 9):
        counter = _Counter()

        def counted(*arguments: Any, counter: _Counter = counter, **options: Any) -> None:
            with counter.counting(monkeypatch):
                recompute(*arguments, **options)

        monkeypatch.setattr(joint, "recompute", counted)
        torch._dynamo.reset()
        model = Chain(layers).to(DEVICE)
        torch.compile(model, backend=Backend("low"))(randn(4, 8, _WIDTH).requires_grad_())
        lines.append(counter.lines)
    assert 0 < lines[3] - lines[2] <= 1.01 * (lines[2] - lines[1])


def test_kernels_of_a_graph_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms: each of two threads compiles a kernel, and waits until the other does."""
    seen, both = threading.local(), threading.Barrier(2, timeout=60.0)
    specialise = launch.specialise

    def waiting(request: Any, device_index: int) -> Any:
        if not hasattr(seen, "one"):
            seen.one = both.wait()
        return specialise(request, device_index)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(launch, "specialise", waiting)
    # Widths of no other test, since the process keeps what it has compiled.
    norms = nn.ModuleList([nn.LayerNorm(cols) for cols in (1037, 1043)]).to(DEVICE)
    rows = [randn(3, 1037).requires_grad_(), randn(3, 1043).requires_grad_()]
    report = fusedops.explain(lambda x, y: (norms[0](x), norms[1](y)), *rows)
    assert [region.program is not None for region in report.regions] == [True, True]
    assert not both.broken


def test_a_fault_of_the_machine_leaves_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be written to disk, say; later it may be."""
    prepare = programs.launching.prepare

    def failing(program: Any, *args: Any) -> None:
        if program.structure.cols == 1051:
            raise OSError("no space left")
        prepare(program, *args)

    norms = nn.ModuleList([nn.LayerNorm(cols) for cols in (1049, 1051)]).to(DEVICE)
    rows = [randn(3, 1049).requires_grad_(), randn(3, 1051).requires_grad_()]
    function = lambda x, y: (norms[0](x), norms[1](y))  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(programs.launching, "prepare", failing)
        report = fusedops.explain(function, *rows)
    assert [region.reason for region in report.regions] == ["", "OSError: no space left"]
    assert len(fusedops.explain(function, *rows).fused) == 2
