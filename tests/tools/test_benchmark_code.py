"""The command that counts generated code, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from benchmarks import __main__ as benchmarks
from benchmarks.code import command, results
from benchmarks.code.counting import Counts, counts_of
from benchmarks.code.rules import rules_of_cuda
from benchmarks.models.workloads import MODELS, Workload
from fusedops.compiler.operator import Program
from fusedops.compiler.planning import planned
from fusedops.compiler.rows import structured
from fusedops.compiler.tracing import trace
from zoo import transformers_only

pytestmark = pytest.mark.plain
ROWS, COLS = 64, 256
# Inductor's code for a kernel with partial sums, a matrix product and an attention.
CODE = """
def call(args):
    workspace_0 = empty_strided_cuda((2048, ), (1, ), torch.float32)
    triton_per_fused_0.run(buf0, workspace_0, 64, 256, stream=stream0)
    buf1 = workspace_0[0 * 8 * 256 : (0 + 1) * 8 * 256].view(8, 256).sum(dim=0)
    workspace_1 = workspace_0; del workspace_0  # reuse
    extern_kernels.mm(buf1, arg0, out=buf2)
"""


def generated(moved: int) -> Any:
    """Returns a kernel of Inductor as a node of its scheduler."""
    return SimpleNamespace(is_extern=lambda: False, get_read_write_buffers_sizes=lambda: moved)


def called(operator: Any, *args: Any) -> Any:
    """Returns a call of an operator as a node; Inductor counts its bytes, too."""
    kernel = SimpleNamespace(
        op_overload=operator,
        inputs=args,
        constant_args=(),
        unflatten_args=lambda inputs, constants: (inputs, {}),
    )
    return SimpleNamespace(
        is_extern=lambda: True, get_read_write_buffers_sizes=lambda: 10**9, node=kernel
    )


def counted(*nodes: Any, code: str = "") -> Counts:
    return counts_of(SimpleNamespace(scheduler=SimpleNamespace(nodes=nodes)), code)


def buffer(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns a buffer of Inductor."""
    return SimpleNamespace(get_size=lambda: shape, get_dtype=lambda: dtype)


def gated_unit() -> Program:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(x) * y

    inputs = [torch.empty(ROWS, COLS, dtype=torch.bfloat16, device="meta") for _ in "xy"]
    structure = structured(trace(function, inputs, function, ["x", "y"], lambda _: None))
    return Program("gated", function, planned(structure))


def test_calls_of_other_code_move_no_bytes_of_generated_kernels() -> None:
    aten = torch.ops.aten
    result = SimpleNamespace(is_extern=lambda: True, node=SimpleNamespace(op_overload=None))
    counts = counted(
        generated(100),
        called(aten.mm.out),
        called(aten.bmm.out),
        called(aten._scaled_dot_product_flash_attention.default),
        result,
        generated(20),
        code=CODE,
    )
    assert counts == Counts(generated=2, generated_bytes=120, products=2, others=1)


@pytest.mark.parametrize("direction", ["forward", "backward", "backward of y alone"])
def test_bytes_of_an_operator_are_each_tensor_once(direction: str) -> None:
    name, whole = gated_unit().name, buffer(ROWS, COLS)
    if direction == "forward":
        operator, moved = getattr(torch.ops.fusedops, f"{name}_forward_out"), 3
        args: Sequence[Any] = (whole, whole, None, whole, None, "call")
    else:
        operator, moved = getattr(torch.ops.fusedops, f"{name}_backward_out"), 5
        gradients = [whole, whole] if direction == "backward" else [None, whole]
        args = (whole, whole, whole, None, None, None, *gradients, "call")
        # The gradient of y alone is the cotangent times silu(x).
        moved = 5 if direction == "backward" else 3
    counts = counted(called(operator.default, *args))
    bytes_of_tensor = ROWS * COLS * 2
    assert counts == Counts(operators=1, operator_bytes=moved * bytes_of_tensor)


# --- CUDA's rules ---------------------------------------------------------------------------------


def test_autocast_computes_norms_in_fp32_as_on_gpus() -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            values = (F.layer_norm(x, (8,)), x.softmax(-1), x @ x.T, x.exp().sum(), x * 2)
        return [value.dtype for value in values]

    half, full = torch.bfloat16, torch.float32
    before = dtypes()
    assert before == [half] * 5
    with rules_of_cuda():
        assert dtypes() == [full, full, half, full, half]
    assert dtypes() == before


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_is_a_fused_kernel(masked: bool) -> None:
    def function(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask if masked else None, dropout_p=0.1)

    q = torch.ones(2, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    with rules_of_cuda():
        graph = make_fx(function, tracing_mode="fake")(q, torch.ones(16, 16, dtype=torch.bool))
    names = [str(node.target) for node in graph.graph.nodes]
    kind = "efficient" if masked else "flash"
    assert f"aten._scaled_dot_product_{kind}_attention.default" in names


# --- the command ----------------------------------------------------------------------------------


def tiny(name: str) -> Workload:
    return Workload(name, "train", MODELS[name].tiny_sizes, tiny=True, layers=1)


@transformers_only
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit"])
def test_a_workload_may_have_fewer_layers(name: str) -> None:
    def size(workload: Workload) -> int:
        return sum(map(Tensor.numel, workload.build(torch.device("cpu")).parameters()))

    one, two = size(tiny(name)), size(replace(tiny(name), layers=2))
    assert one < two == size(replace(tiny(name), layers=0))


@pytest.mark.parametrize("broken", [False, True])
def test_code_of_a_function_is_counted_if_it_is_one_graph(broken: bool) -> None:
    @torch.compile
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.relu(x @ weight)
        if broken:
            torch._dynamo.graph_break()
        return y + 1

    x, weight = torch.ones(64, 32), torch.ones(32, 16)

    @torch.no_grad()
    def step() -> Tensor:
        return function(x, weight)

    if broken:
        with pytest.raises(RuntimeError, match="its graph has breaks"):
            command.counts_of_step(step)
        return
    # One kernel reads and writes the product.
    expected = Counts(generated=1, generated_bytes=2 * 64 * 16 * 4, products=1)
    assert command.counts_of_step(step) == expected


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a PyTorch for CUDA on a machine without a GPU",
)
@transformers_only
def test_both_compilers_generate_code_for_a_gpu_that_is_not_there() -> None:
    theirs, ours = (command.counted(tiny("vit"), name) for name in ("compile", "backend"))
    assert theirs.operators == theirs.operator_bytes == 0
    assert ours.operators > 0 < ours.operator_bytes
    # Query, key and value are one product.
    assert ours.products < theirs.products
    # A forward and a backward of one attention and one convolution, and random seeds.
    assert theirs.others == ours.others == 3
    assert ours.generated + ours.operators < theirs.generated


def test_command_needs_a_pytorch_for_cuda_and_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert benchmarks.main(["code", "vit", "--tiny"]) == 2
    assert "built for CUDA" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert benchmarks.main(["code", "vit", "--tiny"]) == 2
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


def test_a_model_that_fails_is_named_and_the_others_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def count(workload: Workload, provider: str) -> Counts:
        assert (workload.layers, workload.tiny) == (3, True)
        if workload.name == "gpt2":
            raise RuntimeError("no such thing")
        return Counts(generated=7, generated_bytes=2**30, operators=2, operator_bytes=2**30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(command, "counted", count)
    path = tmp_path / "code.csv"
    arguments = ["code", "gpt2", "bert", "--tiny", "--layers", "3", "--output", str(path)]
    assert benchmarks.main(arguments) == 1
    output = capsys.readouterr()
    assert "gpt2 train 2x16: RuntimeError: no such thing" in output.err
    rows = results.read(path)
    assert [(row.model, row.provider) for row in rows] == [("bert", "compile"), ("bert", "backend")]
    assert [(row.kernels, row.gib) for row in rows] == [(9, 2.0)] * 2
    assert benchmarks.main(["code", "--table", "--output", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == output.out.splitlines()[-2:]


def row(**changes: Any) -> results.Row:
    made = results.Row(
        model="bert",
        mode="train",
        shape="2x16",
        layers=2,
        provider="backend",
        generated=3,
        generated_gib=0.75,
        operators=2,
        operators_gib=0.25,
        products=5,
        others=1,
        commit="c",
        torch="2.9.0",
        triton="3",
        transformers="5",
    )
    return replace(made, **changes)


def test_new_rows_replace_old_ones_and_pages_have_the_oldest_release_first(tmp_path: Path) -> None:
    old, new = tmp_path / "code_torch_2_9.csv", tmp_path / "code_torch_2_15.csv"
    results.write(old, [row(products=4), row(provider="compile"), row(model="vit")])
    results.write(old, [row()])
    theirs = row(provider="compile", torch="2.15.0", generated=20, generated_gib=3.75)
    results.write(new, [row(torch="2.15.0"), theirs])
    assert results.read(old) == [row(provider="compile"), row(), row(model="vit")]
    text = results.markdown(tmp_path)
    assert text.index("PyTorch 2.9.0") < text.index("PyTorch 2.15.0")
    assert "0.23 times torch.compile's kernels, and these move 0.25 times the bytes" in text
    assert text.count("| bert 2x16 | fusedops.compile | 5 | 2 | 1.00 | 25% | 5 | 1 |") == 2


def test_results_file_is_that_of_the_release() -> None:
    assert results.path_of("2.11.0+cu130").name == "code_torch_2_11.csv"
