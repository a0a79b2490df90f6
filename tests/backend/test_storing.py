"""Fused graphs on disk: later processes read them, and a graph never gets the file of another."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from backends import randn
from fusedops.backend import entry, storing
from fusedops.backend.passes.padding import PADDED
from fusedops.backend.programs import Source
from fusedops.backend.report import CompileReport, RegionReport
from fusedops.core.configs import cache
from fusedops.core.launches import launch
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_STEP = """
import sys, torch
from unittest import mock
from torch import nn
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
import backends, fusedops
from fusedops.backend import entry
from fusedops.core.launches import launch

def compiled(gm, inputs, *_):
    run = lambda graph, _: make_boxed_func(graph.forward)
    return aot_autograd(fw_compiler=run, bw_compiler=run)(gm, inputs)

class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(16)])
        self.tables = nn.ModuleList([nn.Embedding(2, 8), nn.Embedding(3, 16)])
        self.scales = nn.ModuleList([nn.RMSNorm(8), nn.RMSNorm(16)])

    def forward(self, x):
        slices = x.split([8, 16], -1)
        normed = [torch.tanh(norm(s)) for norm, s in zip(self.norms, slices)]
        ids = (x[:, :2] > 0).long().unbind(1)
        rows = [scale(t(i)) for scale, t, i in zip(self.scales, self.tables, ids)]
        return torch.cat([*normed, *rows], -1)

if sys.argv[1] == "again":  # a second process may not capture the graph
    mock.patch.object(entry, "captured", side_effect=AssertionError).start()
torch.manual_seed(0)
model, x = nn.Sequential(backends.PostNorm(p=0.5), Slices()), backends.randn(6, 24)
model.to(backends.DEVICE)
with mock.patch.object(entry, "compile_by_inductor", compiled), launch.record() as launched:
    output = fusedops.compile(model)(x)
    output.square().sum().backward()
tensors = [output, *[parameter.grad for parameter in model.parameters()]]
print(launched, [tensor.detach().double().cpu().numpy().tobytes().hex() for tensor in tensors])
"""


def test_second_process_captures_nothing_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches the same kernels, and draws the same dropout masks."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    first = _step_here(monkeypatch) if DEVICE.type == "cpu" else _step_in_a_process("first")
    assert "forward_kernel" in first and "backward_kernel" in first
    assert "forward_slices" in first and "backward_slices" in first
    assert _step_in_a_process("again") == first


def _step_here(monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the code of the first process in this one, and return what it prints.

    On a GPU this process has drawn other random states, so there a process is started.
    """
    monkeypatch.setattr(sys, "argv", ["", "first"])
    # A new process has this default, and the file's name depends on it.
    torch.use_deterministic_algorithms(False)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(_STEP, {})
    return printed.getvalue()


def _step_in_a_process(turn: str) -> str:
    """Run the code in a new process, and return what it prints.

    Warnings of this package are errors. NumPy's are not: in the interpreter it may warn of numbers
    in memory that no program uses.
    """
    return subprocess.run(
        [sys.executable, "-W", "error:fusedops:RuntimeWarning", "-c", _STEP, turn],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        capture_output=True,
        check=True,
    ).stdout


# --- the name of a file ---------------------------------------------------------------------------


def _normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x + w, (8,), w, None, 1e-5)


def _normed_with_other_eps(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x + w, (8,), w, None, 1e-6)


def _graph(
    function: Callable[..., Any], inputs: Sequence[Tensor], **options: Any
) -> tuple[fx.GraphModule, list[Any]]:
    """Return the graph and the inputs that Dynamo passes to a backend."""
    recorded: list[Any] = []

    def record(gm: fx.GraphModule, graph_inputs: list[Any]) -> Any:
        recorded[:] = gm, graph_inputs
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=record, fullgraph=True, **options)(*inputs)
    graph_module, graph_inputs = recorded
    return graph_module, graph_inputs


def _path(
    function: Callable[..., Any] = _normed, inputs: Sequence[Tensor] | None = None, **options: Any
) -> Path | None:
    """Return the path at which the graph of a function is stored, or None if it is not stored."""
    if inputs is None:
        inputs = (randn(6, 8), randn(8))
    return storing.stored_at(*_graph(function, inputs, **options))


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """Change a setting of PyTorch, and restore it at the end."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _patched(owner: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, value)


def _overlapping() -> tuple[Tensor, Tensor]:
    x = randn(6, 8)
    return x, x[0]


def _path_of_inference_tensors() -> Path | None:
    with torch.inference_mode():
        x = randn(6, 8)
    return _path(inputs=(x, randn(8)))


def _pooled_along_rows(x: Tensor, w: Tensor) -> Tensor:
    pooled: Tensor = F.max_pool1d(x.view(2, 3, 8), 3, 1, 1)
    return F.layer_norm(pooled, (8,), w)


def _pooled_along_both(x: Tensor, w: Tensor) -> Tensor:
    # The qualified name of max_pool2d is that of max_pool1d.
    pooled: Tensor = F.max_pool2d(x.view(2, 3, 8), 3, 1, 1)
    return F.layer_norm(pooled, (8,), w)


# Graphs and inputs that differ from `_path()` and from one another.
OTHERS: dict[str, Callable[[], Path | None]] = {
    "a number": lambda: _path(_normed_with_other_eps),
    "rows": lambda: _path(inputs=(randn(7, 8), randn(8))),
    "strides": lambda: _path(inputs=(randn(8, 6).t(), randn(8))),
    "dtype": lambda: _path(inputs=(randn(6, 8).half(), randn(8).half())),
    "a gradient": lambda: _path(inputs=(randn(6, 8).requires_grad_(), randn(8))),
    "no leaf": lambda: _path(inputs=(randn(6, 8).requires_grad_() * 1, randn(8))),
    "shared memory": lambda: _path(inputs=_overlapping()),
    "a step": lambda: _path(lambda x, w: _normed(x[::2], w)),
    "another step": lambda: _path(lambda x, w: _normed(x[::3], w)),
    "inference": _path_of_inference_tensors,
    "pooled along rows": lambda: _path(_pooled_along_rows),
    "pooled along both": lambda: _path(_pooled_along_both),
    "checkpointed": lambda: _path(_checkpointed),
    "a number of the checkpointed part": lambda: _path(_checkpointed_with_other_eps),
}
_OTHER_DEVICE = "cuda" if DEVICE.type == "cpu" else "cpu"
cuda = torch.backends.cuda
# Settings under which the same graph has another file.
SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients off": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast(DEVICE.type, torch.float16),
    "autocast of another device": lambda: _set(
        lambda: False, lambda on: torch.set_autocast_enabled(_OTHER_DEVICE, on), True
    ),
    "default dtype": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "determinism": lambda: _set(
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        not torch.are_deterministic_algorithms_enabled(),
    ),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled),
    "flash attention": lambda: _set(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "attention's sums": lambda: _set(
        cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp, True
    ),
    "attention's order": lambda: _patched(storing, "attention_order", lambda: [0]),
    "kernels": lambda: _patched(launch, "runs_kernels", lambda kind: False),
    "code": lambda: _patched(cache, "code_of_package", lambda: "other"),
    "version": lambda: _patched(cache, "__version__", "other"),
    "PyTorch": lambda: _patched(torch, "__version__", "other"),
}


def test_path_depends_on_all_that_decides_the_compiled_graph() -> None:
    """Two equal calls have one path, and every difference gives another path."""
    own_path = _path()
    assert own_path is not None
    assert own_path == _path()
    other_paths = {name: path() for name, path in OTHERS.items()}
    gm, inputs = _graph(_normed, (randn(6, 8), randn(8)))
    for name, setting in SETTINGS.items():
        with setting():
            other_paths[name] = storing.stored_at(gm, inputs)
    assert None not in other_paths.values()
    assert len({own_path, *other_paths.values()}) == 1 + len(other_paths), other_paths


def test_graph_that_creates_a_module_is_stored() -> None:
    """The graph has a call by which PyTorch logs that a module is created."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = torch.nn.SiLU()(_normed(x, w))
        return result

    gm, inputs = _graph(function, (randn(6, 8), randn(8)))
    assert "_log_api_usage_once" in gm.code
    assert storing.stored_at(gm, inputs) is not None


@torch.library.custom_op("fusedops_tests::stored_nowhere", mutates_args=())
def _own_operator(x: Tensor) -> Tensor:
    return x.clone()


@_own_operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _checkpointed(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = checkpoint(_normed, x, w, use_reentrant=False)
    return _normed(result, w)


def _checkpointed_with_other_eps(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = checkpoint(_normed_with_other_eps, x, w, use_reentrant=False)
    return _normed(result, w)


def _selectively_checkpointed(x: Tensor, w: Tensor) -> Tensor:
    """Call a checkpointed part in which a function selects the operators that are saved."""
    result: Tensor = checkpoint(_normed, x, w, use_reentrant=False, context_fn=_save_norms)
    return result


def _save_norms() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.native_layer_norm.default])


def _branching(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = torch.cond(w.sum() > 0, _normed, _normed_with_other_eps, (x, w))
    return result


def _path_of_symbolic_inputs() -> Path | None:
    gm, (x, w) = _graph(_normed, (randn(6, 8), randn(8)))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(x, symbolic_context=dynamic, source=ConstantSource("x"))
    assert not isinstance(x.shape[0], int)
    return storing.stored_at(gm, [x, w])


@torch._dynamo.allow_in_graph
@functools.wraps(F.softsign)
def _softsign(x: Tensor) -> Tensor:
    return x * 2


def _path_of_a_subclass() -> Path | None:
    gm, (x, w) = _graph(_normed, (randn(6, 8), randn(8)))
    return storing.stored_at(gm, [TwoTensor(x, x), w])


def _path_with_caches_disabled() -> Path | None:
    gm, inputs = _graph(_normed, (randn(6, 8), randn(8)))
    with torch.compiler.config.patch(force_disable_caches=True):
        return storing.stored_at(gm, inputs)


NOT_STORED: dict[str, Callable[[], Path | None]] = {
    "symbolic graph inputs": lambda: _path(dynamic=True),
    "symbolic sizes of fake tensors": _path_of_symbolic_inputs,
    "an operator of another library": lambda: _path(lambda x, w: _normed(_own_operator(x), w)),
    "selective checkpointing": lambda: _path(_selectively_checkpointed),
    "control flow": lambda: _path(_branching),
    "a function with the name of PyTorch's": lambda: _path(lambda x, w: _normed(_softsign(x), w)),
    "a tensor subclass": _path_of_a_subclass,
    "caches are disabled": _path_with_caches_disabled,
}


@pytest.mark.parametrize("name", NOT_STORED)
def test_graph_that_cannot_be_written_as_text_is_not_stored(name: str) -> None:
    """Each process captures it."""
    assert NOT_STORED[name]() is None


# --- what is in a file ----------------------------------------------------------------------------


def _with_constants(x: Tensor, w: Tensor) -> Tensor:
    numbers = torch.tensor([-0.0, float("inf"), 0.1, 2.0**-40], dtype=torch.float32).to(x.device)
    empty = torch.tensor([]).to(x.device)
    return _normed(x, w) * numbers.max() + x[..., 1:2] / numbers[0].exp() + empty.sum()


def _fused(
    function: Callable[..., Any],
) -> tuple[fx.GraphModule, list[Any], fx.GraphModule, CompileReport]:
    """Return a function's graph and inputs, the fused graph, and its report."""
    gm, inputs = _graph(function, (randn(6, 8), randn(8)))
    report = CompileReport()
    fused = entry._with_operators(gm, inputs, report)
    assert report.fused
    assert not report.left
    return gm, inputs, fused, report


def _codes(gm: fx.GraphModule) -> list[str]:
    """Return the code of a graph and of the bodies in it."""
    return [module.code for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = _normed(x, w)
    return _normed(x * scale, w)


def _of_two_values(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Return a region's result twice, and compute a region that saves what another saves."""
    z = x + w
    y = F.layer_norm(z, (8,), w)
    return z, y, z.clone(), F.layer_norm(z + y @ w.outer(w), (8,), w)


@pytest.mark.parametrize(
    "function", [_normed, _with_constants, _checkpointed, _without_gradients, _of_two_values]
)
def test_graph_that_is_read_equals_the_stored_one(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    """They agree in every name, argument, mark and constant."""
    gm, inputs, fused, report = _fused(function)
    nodes = list(fused.graph.nodes)
    nodes[-2].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    nodes[-3].meta[PADDED] = True
    path = tmp_path / "graphs" / "graph.json"
    written = storing.write(path, gm, fused, report.programs)
    with mock.patch.object(storing, "Source", wraps=Source) as sources:
        result = storing.read(path, gm)
    assert result is not None
    assert written is not fused
    for call, program in zip(sources.call_args_list, report.programs, strict=True):
        graph, output_numbers, structure, kinds = call.args
        stored = program.function
        assert str(graph) == str(stored.graph)
        assert list(output_numbers) == list(stored.output_numbers)
        assert kinds == stored.kinds
        assert structure.text() == stored.structure.text()
    assert result.meta == written.meta == fused.meta == gm.meta | fused.meta
    captured_inputs = gm.graph.find_nodes(op="placeholder")
    for copy in (result, written):
        copied_inputs = copy.graph.find_nodes(op="placeholder")
        for copied, captured in zip(copied_inputs, captured_inputs, strict=True):
            assert copied.meta["tensor_dict"] is captured.meta["tensor_dict"]
            assert copied._dynamo_source is captured._dynamo_source
    assert _codes(result) == _codes(written) == _codes(fused)
    marks = [
        {key: node.meta[key] for key in ("recompute", PADDED) if key in node.meta}
        for node in result.graph.nodes
    ]
    assert marks[-2] == {"recompute": CheckpointPolicy.MUST_RECOMPUTE}
    assert marks[-3] == {PADDED: True}
    assert not any(marks[:-3] + marks[-1:])
    for read_output, output in zip(result(*inputs), fused(*inputs), strict=True):
        assert torch.equal(read_output, output)


def _of_many_numbers(x: Tensor, w: Tensor) -> Tensor:
    return _normed(x, w) + torch.tensor([float(n) for n in range(8000)])[-1]


def _of_complex_numbers(x: Tensor, w: Tensor) -> Tensor:
    return _normed(x, w) * (torch.tensor([1j, 2j]) ** 2).real[0]


@pytest.mark.parametrize("function", [_of_many_numbers, _of_complex_numbers])
def test_graph_with_large_or_complex_constants_is_not_stored(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    gm, _, fused, report = _fused(function)
    assert storing.write(tmp_path / "graph.json", gm, fused, report.programs) is fused
    assert not list(tmp_path.iterdir())


def _detached_in_place(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = x.clone().detach_().add(w)
    return result


def test_graph_that_is_left_to_inductor_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process reports the reason."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    gm, inputs = _graph(_detached_in_place, (randn(6, 8), randn(8)))
    for _ in range(2):
        report = CompileReport()
        assert entry._stored(gm, inputs, report) is gm
        assert report.left == ["it calls detach_"]


def test_report_has_the_first_of_programs_with_the_same_name() -> None:
    """It is the one that is registered, and so the one that is stored."""
    programs: list[Any] = [SimpleNamespace(name=name) for name in ("a", "b", "a")]
    report = CompileReport([RegionReport((), (), program=program) for program in programs])
    assert [id(program) for program in report.programs] == [id(program) for program in programs[:2]]


# Each of these returns the text of a file that cannot be used.
def _truncated(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-20]


def _programs_of_other_names(content: dict[str, Any]) -> str:
    programs = {f"{name}x": program for name, program in content["programs"].items()}
    return json.dumps(content | {"programs": programs})


def _input_missing(content: dict[str, Any]) -> str:
    return json.dumps(content | {"nodes": content["nodes"][1:]})


def _arbitrary_function(content: dict[str, Any]) -> str:
    """A file can name no functions other than PyTorch's operators."""
    return json.dumps(content).replace("getitem", "os:system")


def _of_another_library(content: dict[str, Any]) -> str:
    return json.dumps(content).replace("aten.add.Tensor", "fusedops_tests.stored_nowhere.default")


def _code_for_an_argument(content: dict[str, Any]) -> str:
    target_index = 2
    return _with_first_node(content, target_index, 'x=__import__("builtins").print("executed")')


def _code_for_a_name(content: dict[str, Any]) -> str:
    name_index = 1
    return _with_first_node(content, name_index, "x); print('executed'); (x")


def _with_first_node(content: dict[str, Any], index: int, text: str) -> str:
    """Replace one entry of the first node's record."""
    node = content["nodes"][0]
    assert node[0] == "placeholder"
    node[index] = text
    return json.dumps(content)


def _arbitrary_attribute(content: dict[str, Any]) -> str:
    return json.dumps(content).replace("aten.add.Tensor", "aten.add.Tensor.__init__.__globals__")


_CHANGES = [
    _truncated,
    _programs_of_other_names,
    _input_missing,
    _arbitrary_function,
    _of_another_library,
    _code_for_an_argument,
    _code_for_a_name,
    _arbitrary_attribute,
]


@pytest.mark.parametrize(
    "has_checksum", [True, False], ids=["with its checksum", "without checksum"]
)
@pytest.mark.parametrize("change", _CHANGES)
def test_file_that_cannot_be_used_is_replaced(
    change: Callable[[dict[str, Any]], str],
    has_checksum: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is captured again, also if the checksum of the changed content is right."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    gm, inputs = _graph(_normed, (randn(6, 8), randn(8)))
    path = storing.stored_at(gm, inputs)
    assert path is not None
    entry._stored(gm, inputs, CompileReport())
    before = path.read_text()
    changed = change(json.loads(cache.opened(before)))
    path.write_text(cache.sealed(changed) if has_checksum else changed)
    assert path.read_text() != before
    report = CompileReport()
    entry._stored(gm, inputs, report)
    assert report.graphs == 1
    assert path.read_text() == before


def test_graph_is_compiled_if_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the cache is a file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "file"))
    gm, inputs = _graph(_normed, (randn(6, 8), randn(8)))
    report = CompileReport()
    compiled = entry._stored(gm, inputs, report)
    assert report.fused
    assert not report.left
    assert "fusedops" in compiled.code
