"""Grouped matrix products have the bits of Transformers' operator, and share one copy of offsets.

The offsets are the ends of the groups of rows; the host reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.backend import entry
from fusedops.backend.report import CompileReport
from fusedops.core.launches import launch
from support import DEVICE

_moe = pytest.importorskip("transformers.integrations.moe")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(
        not hasattr(_moe, "_grouped_mm_fallback"), reason="Transformers has no such operator"
    ),
]
GROUPS, WIDTHS = 4, (6, 10, 6)


def _experts(x: Tensor, w: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    product = torch.ops.transformers.grouped_mm_fallback
    result: Tensor = product(product(x, w, offsets).relu(), v, offsets)
    return result


def _exact(x: Tensor, w: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Return each row times the matrices of its group; rows after the last group give zeros."""
    group = torch.searchsorted(offsets, torch.arange(x.shape[0], device=DEVICE), right=True)
    w, v = [torch.cat([t, t.new_zeros(1, *t.shape[1:])])[group] for t in (w, v)]
    return (x[:, None] @ w).relu().matmul(v)[:, 0]


def _compiled(
    function: Callable[..., Any], **options: Any
) -> tuple[Callable[..., Any], Counter[str]]:
    """Compile a function.

    Returns:
        The compiled function, and counts of the operators in its forward and backward graphs, by
        name. The count of "gradients" is the number of gradients of grouped products.
    """
    counts = Counter[str]()

    def run(gm: fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.find_nodes(
            op="call_function", target=torch.ops.fusedops.grouped_mm_backward.default
        ):
            needed = node.args[4]
            counts["gradients"] += sum(needed)
        counts.update(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm.forward)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        report = CompileReport()
        compiled = entry._with_operators(gm, inputs, report)
        assert not report.left
        partition = min_cut_rematerialization_partition
        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)(
            compiled, inputs
        )

    return torch.compile(function, backend=compiler, fullgraph=True, **options), counts


def _tensors(
    rows: int, dtype: torch.dtype = torch.float32, *, transposed: bool = False
) -> list[Tensor]:
    """Return rows, and two matrices for each group, with contiguous or transposed memory."""
    shapes = [(rows, WIDTHS[0]), (GROUPS, *WIDTHS[:2]), (GROUPS, *WIDTHS[1:])]
    tensors = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]
    if transposed:
        return [t.mT.contiguous().mT for t in tensors]
    return tensors


def _ends(*ends: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ends, device=DEVICE, dtype=dtype)


# Whether x, w and v require gradients.
@pytest.mark.parametrize("needed", [(True, True, True), (False, True, True), (True, False, False)])
@pytest.mark.parametrize(
    ("rows", "ends", "dtype", "transposed"),
    [
        (12, _ends(3, 5, 9, 12), torch.float32, True),
        (12, _ends(0, 4, 4, 9, dtype=torch.int64), torch.float16, False),
        (12, _ends(0, 0, 0, 0), torch.float64, False),
        (0, _ends(0, 0, 0, 0), torch.float32, True),
    ],
    ids=["full", "rows beyond", "all beyond", "no rows"],
)
def test_results_have_the_bits_and_strides_of_transformers_operator(
    rows: int, ends: Tensor, dtype: torch.dtype, transposed: bool, needed: tuple[bool, ...]
) -> None:
    """Cases have empty groups and rows beyond the last group."""
    leaves = _tensors(rows, dtype, transposed=transposed)
    for leaf, is_needed in zip(leaves, needed, strict=True):
        leaf.requires_grad_(is_needed)
    compiled, counts = _compiled(_experts, dynamic=False)
    cotangent = torch.randn(rows, WIDTHS[-1], device=DEVICE, dtype=dtype)

    def results(
        function: Callable[..., Tensor], tensors: Sequence[Tensor], cotangent: Tensor
    ) -> list[Tensor]:
        y = function(*tensors, ends)
        return [y, *torch.autograd.grad(y, [t for t in tensors if t.requires_grad], cotangent)]

    result, expected = results(compiled, leaves, cotangent), results(_experts, leaves, cotangent)
    fp64_leaves = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    exact_results = results(_exact, fp64_leaves, cotangent.double())
    for ours, theirs, exact in zip(result, expected, exact_results, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=200 * torch.finfo(dtype).eps)
    assert counts["fusedops.offsets_on_cpu.default"] == 1
    assert counts["fusedops.grouped_mm_backward.default"] == 2
    # The gradient of the second product's rows is needed if the first product has a gradient.
    assert counts["gradients"] == sum(needed) + any(needed[:2])


def _layers(x: Tensor, w: Tensor, v: Tensor, ids: Tensor, call: Callable[..., Tensor]) -> Tensor:
    for shift in range(2):
        counts = torch.histc(((ids + shift) % GROUPS).float(), bins=GROUPS, min=0, max=GROUPS - 1)
        x = call(_experts, x, w, v, counts.cumsum(0, dtype=torch.int32))
    return x


def _directly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def _checkpointed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


@pytest.mark.parametrize(("call", "runs"), [(_directly, 1), (_checkpointed, 2)])
def test_offsets_are_copied_once_in_each_layer_and_run(
    call: Callable[..., Tensor], runs: int
) -> None:
    """The backward uses the copy of the forward, or that of the recomputed forward."""
    inputs = [
        *[t.requires_grad_() for t in _tensors(12)],
        torch.randint(0, GROUPS, (12,), device=DEVICE),
    ]
    compiled, counts = _compiled(_layers, dynamic=False)
    result, expected = [
        torch.autograd.grad(f(*inputs, call).sin().sum(), inputs[:3]) for f in (compiled, _layers)
    ]
    assert all(map(torch.equal, result, expected))
    assert counts["fusedops.offsets_on_cpu.default"] == 2 * runs
    assert counts["fusedops.grouped_mm_backward.default"] == 4
    assert not [name for name in counts if name.startswith("transformers.")]
    assert fusedops.explain(_layers, *inputs, call).changes == {
        "a grouped product that shares its offsets with others": 4
    }


def _offsets_changed(x: Tensor, w: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Change the offsets in place between two products."""
    offsets = offsets.clone()
    y = torch.ops.transformers.grouped_mm_fallback(x, w, offsets)
    offsets[1:].sub_(1)
    result: Tensor = torch.ops.transformers.grouped_mm_fallback(y, v, offsets)
    return result


@torch.library.custom_op("fusedops_tests::grouped_mm_fallback", mutates_args=())
def _operator_of_same_name(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input @ weight[0] + offs[0]


@_operator_of_same_name.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


@pytest.mark.parametrize(
    "function",
    [_offsets_changed, lambda x, w, v, offsets: _operator_of_same_name(x, w, offsets)],
    ids=["changed offsets", "same name"],
)
def test_products_with_changed_offsets_or_of_other_libraries_are_left(
    function: Callable[..., Tensor],
) -> None:
    inputs = [*_tensors(12), _ends(3, 5, 9, 12)]
    compiled, counts = _compiled(function)
    assert torch.equal(compiled(*inputs), function(*inputs))
    assert not [name for name in counts if name.startswith("fusedops.")]


def test_dynamic_numbers_of_rows_share_one_graph() -> None:
    compiled, counts = _compiled(_experts)
    for ends in ((1, 2, 2, 5), (0, 3, 7, 7), (2, 4, 8, 11)):
        x, w, v = [t.requires_grad_() for t in _tensors(ends[-1] + 1)]
        torch._dynamo.mark_dynamic(x, 0)
        (ours,), (eager,) = [
            torch.autograd.grad(f(x, w, v, _ends(*ends)).sin().sum(), x)
            for f in (compiled, _experts)
        ]
        assert torch.equal(ours, eager)
    assert counts["fusedops.offsets_on_cpu.default"] == 1


def test_registered_operators_pass_opcheck_and_are_unsafe_for_cuda_graphs() -> None:
    """A second derivative raises an error, and a gradient that is not needed is empty."""
    x, w, _ = [t.requires_grad_() for t in _tensors(12, transposed=True)]
    ends, operators = _ends(0, 4, 4, 9), torch.ops.fusedops
    torch.library.opcheck(operators.offsets_on_cpu.default, (ends,))
    torch.library.opcheck(operators.grouped_mm.default, (x, w, ends.cpu()))
    y = operators.grouped_mm(x, w, ends.cpu())
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative"):
        dx.sum().backward()
    needed = [True, False]
    _, dw = operators.grouped_mm_backward(torch.zeros_like(y), x, w, ends.cpu(), needed)
    assert dw.numel() == 0
    for operator in (
        operators.offsets_on_cpu,
        operators.grouped_mm,
        operators.grouped_mm_backward,
    ):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


def test_graph_is_stored_if_all_products_of_transformers_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph with an operator of another library is not stored."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    arguments = [*_tensors(12), _ends(3, 5, 9, 12)]
    codes: list[str] = []  # of the captured graph, and of the graph that is read from disk

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with mock.patch.object(launch, "runs_kernels", return_value=False):
            assert "transformers" in entry._stored(gm, inputs, CompileReport()).code
        assert not list(tmp_path.rglob("*.json"))
        codes.append(entry._stored(gm, inputs, CompileReport()).code)
        with mock.patch.object(entry, "captured", side_effect=AssertionError):
            compiled = entry._stored(gm, inputs, CompileReport())
        codes.append(compiled.code)
        return compiled.forward

    assert torch.equal(torch.compile(_experts, backend=compiler)(*arguments), _experts(*arguments))
    captured, read = codes
    assert captured == read
    assert captured.count("ops.fusedops.grouped_mm") == 2
    assert captured.count("ops.fusedops.offsets_on_cpu") == 1
