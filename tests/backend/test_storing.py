"""Fused graphs on disk: a process after the first captures nothing, and nothing is found that another graph left there."""

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

def compiled(gm, inputs, mode, options):
    run = lambda graph, _: make_boxed_func(graph.forward)
    return aot_autograd(fw_compiler=run, bw_compiler=run)(gm, inputs)

captured = mock.patch.object(entry, "captured", side_effect=AssertionError) if sys.argv[1] == "again" else mock.MagicMock()
torch.manual_seed(0)
model, x = backends.PostNorm(p=0.5).to(backends.DEVICE), backends.randn(6, 24)
with mock.patch.object(entry, "compile_by_inductor", compiled), captured, launch.record() as launched:
    output = fusedops.compile(model)(x)
    output.square().sum().backward()
numbers = [output, *[parameter.grad for parameter in model.parameters()]]
print(launched, [number.detach().double().cpu().numpy().tobytes().hex() for number in numbers])
"""


def test_a_second_process_neither_captures_nor_computes_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, dropout drawn, and the same kernels."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    first = _step_here(monkeypatch) if DEVICE.type == "cpu" else _step_in_a_process("first")
    assert "forward_kernel" in first and "backward_kernel" in first
    assert _step_in_a_process("again") == first


def _step_here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of the first process's code, run in this one. On a GPU it draws other states."""
    monkeypatch.setattr(sys, "argv", ["", "first"])
    # As in a process that sets nothing: determinism is a part of a file's name.
    torch.use_deterministic_algorithms(False)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(_STEP, {})
    return printed.getvalue()


def _step_in_a_process(turn: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", _STEP, turn],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        capture_output=True,
        check=True,
    ).stdout


# --- what a file belongs to -----------------------------------------------------------------------


def _normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x + w, (8,), w, None, 1e-5)


def _normed_otherwise(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x + w, (8,), w, None, 1e-6)


def _graph(
    function: Callable[..., Any], inputs: Sequence[Tensor], **options: Any
) -> tuple[fx.GraphModule, list[Any]]:
    """What Dynamo hands to a backend."""
    results: list[Any] = []

    def keep(gm: fx.GraphModule, given: list[Any]) -> Any:
        results[:] = gm, given
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, **options)(*inputs)
    return results[0], results[1]


def _path(
    function: Callable[..., Any] = _normed, inputs: Sequence[Tensor] | None = None, **options: Any
) -> Path | None:
    return storing.stored_at(
        *_graph(function, (randn(6, 8), randn(8)) if inputs is None else inputs, **options)
    )


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """A setting of PyTorch, for a while."""
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


def _of_inference() -> Path | None:
    with torch.inference_mode():
        x = randn(6, 8)
    return _path(inputs=(x, randn(8)))


def _pooled_along_rows(x: Tensor, w: Tensor) -> Tensor:
    pooled: Tensor = F.max_pool1d(x.view(2, 3, 8), 3, 1, 1)
    return F.layer_norm(pooled, (8,), w)


def _pooled_along_both(x: Tensor, w: Tensor) -> Tensor:
    pooled: Tensor = F.max_pool2d(x.view(2, 3, 8), 3, 1, 1)  # whose qualified name is the same
    return F.layer_norm(pooled, (8,), w)


OTHERS: dict[str, Callable[[], Path | None]] = {
    "a number": lambda: _path(_normed_otherwise),
    "rows": lambda: _path(inputs=(randn(7, 8), randn(8))),
    "strides": lambda: _path(inputs=(randn(8, 6).t(), randn(8))),
    "dtype": lambda: _path(inputs=(randn(6, 8).half(), randn(8).half())),
    "a gradient": lambda: _path(inputs=(randn(6, 8).requires_grad_(), randn(8))),
    "no leaf": lambda: _path(inputs=(randn(6, 8).requires_grad_() * 1, randn(8))),
    "shared memory": lambda: _path(inputs=_overlapping()),
    "a step": lambda: _path(lambda x, w: _normed(x[::2], w)),
    "another step": lambda: _path(lambda x, w: _normed(x[::3], w)),
    "inference": _of_inference,
    "pooled along rows": lambda: _path(_pooled_along_rows),
    "pooled along both": lambda: _path(_pooled_along_both),
    "a number of the part": lambda: _path(_checkpointed),
    "another number of the part": lambda: _path(_checkpointed_otherwise),
}
_OTHER_DEVICE = "cuda" if DEVICE.type == "cpu" else "cpu"
cuda = torch.backends.cuda
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


def test_a_file_belongs_to_all_that_decides_what_is_made() -> None:
    """Two calls that are alike have one, and each difference has another."""
    own = _path()
    assert own is not None and own == _path()
    others = {name: other() for name, other in OTHERS.items()}
    gm, given = _graph(_normed, (randn(6, 8), randn(8)))
    for name, setting in SETTINGS.items():
        with setting():
            others[name] = storing.stored_at(gm, given)
    assert None not in others.values()
    assert len({own, *others.values()}) == 1 + len(others), others


def test_a_graph_that_makes_a_module_has_a_file() -> None:
    """PyTorch logs there that one is made."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = torch.nn.SiLU()(_normed(x, w))
        return result

    gm, given = _graph(function, (randn(6, 8), randn(8)))
    assert "_log_api_usage_once" in gm.code and storing.stored_at(gm, given) is not None


@torch.library.custom_op("fusedops_tests::stored_nowhere", mutates_args=())
def _own_operator(x: Tensor) -> Tensor:
    return x.clone()


@_own_operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _checkpointed(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = checkpoint(_normed, x, w, use_reentrant=False)
    return _normed(result, w)


def _checkpointed_otherwise(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = checkpoint(_normed_otherwise, x, w, use_reentrant=False)
    return _normed(result, w)


def _checkpointed_by_choice(x: Tensor, w: Tensor) -> Tensor:
    """A function chooses the operators that are computed again."""
    result: Tensor = checkpoint(_normed, x, w, use_reentrant=False, context_fn=_choice)
    return result


def _choice() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.native_layer_norm.default])


def _branching(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = torch.cond(w.sum() > 0, _normed, _normed_otherwise, (x, w))
    return result


def _fake_inputs_of_symbols() -> Path | None:
    gm, given = _graph(_normed, (randn(6, 8), randn(8)))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        given[0] = mode.from_tensor(given[0], symbolic_context=dynamic, source=ConstantSource("x"))
    assert not isinstance(given[0].shape[0], int)
    return storing.stored_at(gm, given)


@torch._dynamo.allow_in_graph
@functools.wraps(F.softsign)
def _softsign(x: Tensor) -> Tensor:
    return x * 2


def _of_a_subclass() -> Path | None:
    gm, given = _graph(_normed, (randn(6, 8), randn(8)))
    return storing.stored_at(gm, [TwoTensor(given[0], given[0]), *given[1:]])


def _with_caches_off() -> Path | None:
    gm, given = _graph(_normed, (randn(6, 8), randn(8)))
    with torch.compiler.config.patch(force_disable_caches=True):
        return storing.stored_at(gm, given)


NOWHERE: dict[str, Callable[[], Path | None]] = {
    "lengths that are symbols": lambda: _path(dynamic=True),
    "sizes that are symbols": _fake_inputs_of_symbols,
    "an operator of others": lambda: _path(lambda x, w: _normed(_own_operator(x), w)),
    "a function": lambda: _path(_checkpointed_by_choice),
    "control flow": lambda: _path(_branching),
    "a function of a known name": lambda: _path(lambda x, w: _normed(_softsign(x), w)),
    "a tensor of tensors": _of_a_subclass,
    "caches are off": _with_caches_off,
}


@pytest.mark.parametrize("name", NOWHERE)
def test_what_has_no_text_is_not_stored(name: str) -> None:
    """It is captured in each process."""
    assert NOWHERE[name]() is None


# --- what is in a file ----------------------------------------------------------------------------


def _with_constants(x: Tensor, w: Tensor) -> Tensor:
    numbers = torch.tensor([-0.0, float("inf"), 0.1, 2.0**-40], dtype=torch.float32)
    none = torch.tensor([]).to(x.device)
    return (
        _normed(x, w) * numbers.to(x.device).max()
        + x[..., 1:2] / numbers.to(x.device)[0].exp()
        + none.sum()
    )


def _made(
    function: Callable[..., Any],
) -> tuple[fx.GraphModule, list[Any], fx.GraphModule, CompileReport]:
    gm, given = _graph(function, (randn(6, 8), randn(8)))
    report = CompileReport()
    compiled = entry._with_operators(gm, given, report)
    assert report.fused and not report.left
    return gm, given, compiled, report


def _codes(gm: fx.GraphModule) -> list[str]:
    """The code of a graph and of the bodies in it."""
    return [module.code for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = _normed(x, w)
    return _normed(x * scale, w)


def _of_two_values(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A region with a result twice, and one that saves what another does."""
    z = x + w
    y = F.layer_norm(z, (8,), w)
    return z, y, z.clone(), F.layer_norm(z + y @ w.outer(w), (8,), w)


@pytest.mark.parametrize(
    "function", [_normed, _with_constants, _checkpointed, _without_gradients, _of_two_values]
)
def test_the_graph_that_is_read_is_the_one_that_was_stored(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    """They agree in every name, argument, mark and constant."""
    gm, given, made, report = _made(function)
    nodes = list(made.graph.nodes)
    nodes[-2].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    nodes[-3].meta[PADDED] = True
    path = tmp_path / "graphs" / "graph.json"
    written = storing.write(path, gm, made, report.programs)
    with mock.patch.object(storing, "Source", wraps=Source) as sources:
        result = storing.read(path, gm)
    assert result is not None and written is not made
    for call, program in zip(sources.call_args_list, report.programs, strict=True):
        graph, output_numbers, structure, also_saved = call.args
        own = program.function
        assert (str(graph), list(output_numbers), list(also_saved)) == (
            str(own.graph),
            list(own.output_numbers),
            list(own.also_saved),
        )
        assert structure.text() == own.structure.text()
    assert result.meta == written.meta == made.meta == gm.meta | made.meta
    for one in (result, written):
        for ours, theirs in zip(
            *[graph.find_nodes(op="placeholder") for graph in (one.graph, gm.graph)], strict=True
        ):
            assert ours.meta["tensor_dict"] is theirs.meta["tensor_dict"]
            assert ours._dynamo_source is theirs._dynamo_source
    assert _codes(result) == _codes(written) == _codes(made)
    marks = [
        {key: node.meta[key] for key in ("recompute", PADDED) if key in node.meta}
        for node in result.graph.nodes
    ]
    assert marks[-2] == {"recompute": CheckpointPolicy.MUST_RECOMPUTE} and marks[-3] == {
        PADDED: True
    }
    assert not any(marks[:-3] + marks[-1:])
    for ours, theirs in zip(result(*given), made(*given), strict=True):
        assert torch.equal(ours, theirs)


def _of_many_numbers(x: Tensor, w: Tensor) -> Tensor:
    return _normed(x, w) + torch.tensor([float(n) for n in range(8000)])[-1]


def _of_complex_numbers(x: Tensor, w: Tensor) -> Tensor:
    return _normed(x, w) * (torch.tensor([1j, 2j]) ** 2).real[0]


@pytest.mark.parametrize("function", [_of_many_numbers, _of_complex_numbers])
def test_what_holds_other_constants_is_not_stored(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    gm, _, made, report = _made(function)
    assert storing.write(tmp_path / "graph.json", gm, made, report.programs) is made
    assert not list(tmp_path.iterdir())


def _left(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = x.clone().detach_().add(w)
    return result


def test_a_graph_that_is_left_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process says why."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    gm, given = _graph(_left, (randn(6, 8), randn(8)))
    for _ in range(2):
        report = CompileReport()
        assert entry._stored(gm, given, report) is gm
        assert report.left == ["it calls detach_"]


def test_of_programs_of_one_name_the_first_is_stored() -> None:
    """It is the one that is registered."""
    programs: list[Any] = [SimpleNamespace(name=name) for name in ("a", "b", "a")]
    report = CompileReport([RegionReport((), (), program=program) for program in programs])
    assert [id(program) for program in report.programs] == [id(program) for program in programs[:2]]


def _torn(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-20]


def _another_program(content: dict[str, Any]) -> str:
    return json.dumps(
        content | {"programs": {f"{name}x": result for name, result in content["programs"].items()}}
    )


def _other_inputs(content: dict[str, Any]) -> str:
    return json.dumps(content | {"nodes": content["nodes"][1:]})


def _any_function(content: dict[str, Any]) -> str:
    """A file can name no function but PyTorch's operators."""
    return json.dumps(content).replace("getitem", "os:system")


def _of_another_library(content: dict[str, Any]) -> str:
    return json.dumps(content).replace("aten.add.Tensor", "fusedops_tests.stored_nowhere.default")


def _code_for_an_argument(content: dict[str, Any]) -> str:
    return _with(content, 2, 'x=__import__("builtins").print("executed")')


def _code_for_a_name(content: dict[str, Any]) -> str:
    return _with(content, 1, "x); print('executed'); (x")


def _with(content: dict[str, Any], place: int, text: str) -> str:
    node = content["nodes"][0]
    assert node[0] == "placeholder"
    node[place] = text
    return json.dumps(content)


def _any_attribute(content: dict[str, Any]) -> str:
    return json.dumps(content).replace("aten.add.Tensor", "aten.add.Tensor.__init__.__globals__")


_CHANGES = [
    _torn,
    _another_program,
    _other_inputs,
    _any_function,
    _of_another_library,
    _code_for_an_argument,
    _code_for_a_name,
    _any_attribute,
]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "changed"])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_file_that_cannot_be_used_is_replaced(
    change: Callable[[dict[str, Any]], str],
    sealed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is captured again, also where the checksum belongs to what is changed."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    gm, given = _graph(_normed, (randn(6, 8), randn(8)))
    path = storing.stored_at(gm, given)
    assert path is not None
    entry._stored(gm, given, CompileReport())
    before = path.read_text()
    changed = change(json.loads(cache.opened(before)))
    path.write_text(cache.sealed(changed) if sealed else changed)
    assert path.read_text() != before
    report = CompileReport()
    entry._stored(gm, given, report)
    assert report.graphs == 1 and path.read_text() == before


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is compiled as it was captured."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "file"))
    gm, given = _graph(_normed, (randn(6, 8), randn(8)))
    report = CompileReport()
    compiled = entry._stored(gm, given, report)
    assert report.fused and not report.left and "fusedops" in compiled.code
