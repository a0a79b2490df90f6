"""Products of groups of rows have the bits of Transformers' operator, and share one copy of where the groups end."""

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
    """Each row times its own matrix; that of the rows beyond is zero."""
    group = torch.searchsorted(offsets, torch.arange(x.shape[0], device=DEVICE), right=True)
    w, v = [torch.cat([t, t.new_zeros(1, *t.shape[1:])])[group] for t in (w, v)]
    return (x[:, None] @ w).relu().matmul(v)[:, 0]


def _compiled(
    function: Callable[..., Any], **options: Any
) -> tuple[Callable[..., Any], Counter[str]]:
    """The function, and how often a step calls each operator, forward and backward, and how many gradients are computed."""
    names = Counter[str]()

    def run(gm: fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.find_nodes(
            op="call_function", target=torch.ops.fusedops.grouped_mm_backward.default
        ):
            names["gradients"] += sum(node.args[4])
        names.update(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm.forward)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        report = CompileReport()
        compiled = entry._with_operators(gm, inputs, report)
        assert not report.left
        partition = min_cut_rematerialization_partition
        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)(
            compiled, inputs
        )

    return torch.compile(function, backend=compiler, fullgraph=True, **options), names


def _tensors(
    rows: int, dtype: torch.dtype = torch.float32, is_turned: bool = False
) -> list[Tensor]:
    """Rows and two matrices a group, contiguous or transposed."""
    shapes = [(rows, WIDTHS[0]), (GROUPS, *WIDTHS[:2]), (GROUPS, *WIDTHS[1:])]
    made = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]
    return [t.mT.contiguous().mT if is_turned else t for t in made]


def _ends(*ends: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ends, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, True), (True, False, False)])
@pytest.mark.parametrize(
    ("rows", "ends", "dtype", "is_turned"),
    [
        (12, _ends(3, 5, 9, 12), torch.float32, True),
        (12, _ends(0, 4, 4, 9, dtype=torch.int64), torch.float16, False),
        (12, _ends(0, 0, 0, 0), torch.float64, False),
        (0, _ends(0, 0, 0, 0), torch.float32, True),
    ],
    ids=["full", "rows beyond", "all beyond", "no rows"],
)
def test_results_are_those_of_the_operator(
    rows: int, ends: Tensor, dtype: torch.dtype, is_turned: bool, wanted: tuple[bool, ...]
) -> None:
    """They agree in every bit and in layout, with empty groups and rows beyond the last group."""
    leaves = [
        t.requires_grad_(want)
        for t, want in zip(_tensors(rows, dtype, is_turned), wanted, strict=True)
    ]
    compiled, names = _compiled(_experts, dynamic=False)
    cotangent = torch.randn(rows, WIDTHS[-1], device=DEVICE, dtype=dtype)

    def results(
        function: Callable[..., Tensor], tensors: Sequence[Tensor], cotangent: Tensor
    ) -> list[Tensor]:
        y = function(*tensors, ends)
        return [y, *torch.autograd.grad(y, [t for t in tensors if t.requires_grad], cotangent)]

    result, expected = results(compiled, leaves, cotangent), results(_experts, leaves, cotangent)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    for ours, theirs, exact in zip(
        result, expected, results(_exact, wide, cotangent.double()), strict=True
    ):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=200 * torch.finfo(dtype).eps)
    assert (
        names["fusedops.offsets_on_cpu.default"] == 1
        and names["fusedops.grouped_mm_backward.default"] == 2
    )
    assert names["gradients"] == sum(wanted) + any(wanted[:2])  # none that nobody wants


def _layers(x: Tensor, w: Tensor, v: Tensor, ids: Tensor, call: Callable[..., Tensor]) -> Tensor:
    for shift in range(2):
        counts = torch.histc(((ids + shift) % GROUPS).float(), bins=GROUPS, min=0, max=GROUPS - 1)
        x = call(_experts, x, w, v, counts.cumsum(0, dtype=torch.int32))
    return x


def _as_it_is(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def _checkpointed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


@pytest.mark.parametrize(("call", "runs"), [(_as_it_is, 1), (_checkpointed, 2)])
def test_the_offsets_are_copied_once_a_layer(call: Callable[..., Tensor], runs: int) -> None:
    """The backward has the copy of the forward, or of the part that is computed again."""
    inputs = [
        *[t.requires_grad_() for t in _tensors(12)],
        torch.randint(0, GROUPS, (12,), device=DEVICE),
    ]
    compiled, names = _compiled(_layers, dynamic=False)
    result, expected = [
        torch.autograd.grad(f(*inputs, call).sin().sum(), inputs[:3]) for f in (compiled, _layers)
    ]
    assert all(map(torch.equal, result, expected))
    assert (
        names["fusedops.offsets_on_cpu.default"] == 2 * runs
        and names["fusedops.grouped_mm_backward.default"] == 4
    )
    assert not [name for name in names if name.startswith("transformers.")]
    assert fusedops.explain(_layers, *inputs, call).changes == {
        "a grouped product that shares its offsets with others": 4
    }


def _changed(x: Tensor, w: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    offsets = offsets.clone()
    y = torch.ops.transformers.grouped_mm_fallback(x, w, offsets)
    offsets[1:].sub_(1)
    result: Tensor = torch.ops.transformers.grouped_mm_fallback(y, v, offsets)
    return result


@torch.library.custom_op("fusedops_tests::grouped_mm_fallback", mutates_args=())
def _of_others(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input @ weight[0] + offs[0]


@_of_others.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


@pytest.mark.parametrize("function", [_changed, lambda x, w, v, offsets: _of_others(x, w, offsets)])
def test_what_may_be_another_product_is_left(function: Callable[..., Tensor]) -> None:
    inputs = [*_tensors(12), _ends(3, 5, 9, 12)]
    compiled, names = _compiled(function)
    assert torch.equal(compiled(*inputs), function(*inputs))
    assert not [name for name in names if name.startswith("fusedops.")]


def test_any_number_of_rows_is_one_graph() -> None:
    compiled, names = _compiled(_experts)
    for ends in ((1, 2, 2, 5), (0, 3, 7, 7), (2, 4, 8, 11)):
        x, w, v = [t.requires_grad_() for t in _tensors(ends[-1] + 1)]
        torch._dynamo.mark_dynamic(x, 0)
        result, expected = [
            torch.autograd.grad(f(x, w, v, _ends(*ends)).sin().sum(), x)
            for f in (compiled, _experts)
        ]
        assert torch.equal(*result, *expected)
    assert names["fusedops.offsets_on_cpu.default"] == 1


def test_operators_are_registered_as_they_behave() -> None:
    x, w, _ = [t.requires_grad_() for t in _tensors(12, is_turned=True)]
    ends, ours = _ends(0, 4, 4, 9), torch.ops.fusedops
    torch.library.opcheck(ours.offsets_on_cpu.default, (ends,))
    torch.library.opcheck(ours.grouped_mm.default, (x, w, ends.cpu()))
    (dx,) = torch.autograd.grad(ours.grouped_mm(x, w, ends.cpu()).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative"):
        dx.sum().backward()
    assert (
        ours.grouped_mm_backward(dx.new_zeros(12, w.shape[2]), x, w, ends.cpu(), [True, False])[
            1
        ].numel()
        == 0
    )
    for operator in (ours.offsets_on_cpu, ours.grouped_mm, ours.grouped_mm_backward):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


def test_a_graph_is_stored_once_it_has_no_operator_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    arguments = [*_tensors(12), _ends(3, 5, 9, 12)]
    codes = list[str]()

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
    assert codes[0] == codes[1]
    assert (
        codes[0].count("ops.fusedops.grouped_mm") == 2
        and codes[0].count("ops.fusedops.offsets_on_cpu") == 1
    )
