"""`fusedops.compile`: matrix products, their casts and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from backends import Backend, check, randn, results
from fusedops.backend import entry
from fusedops.backend.fx import aten_name, casts_recorded
from fusedops.backend.report import CompileReport
from support import DEVICE, KERNEL_PATH

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class Products(nn.Module):
    """Products of the same rows: three of a kind, one without bias, one frozen, one whose result a region takes, and two
    that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.frozen, self.narrow = (
            nn.Linear(16, size) for size in (16, 8, 24, 16, 4)
        )
        self.bare, self.norm = nn.Linear(16, 16, bias=False), nn.LayerNorm(16)
        self.frozen.requires_grad_(False)
        self.normed = nn.Linear(16, 16)
        self.gate, self.up = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.q(x),
            self.k(x),
            self.v(x),
            self.frozen(x),
            self.narrow(x),
            self.bare(x),
            self.norm(self.normed(x)),
            F.silu(self.gate(x)) * self.up(x),
        )
        return torch.cat([part.float().cumsum(-1) for part in parts], -1)


def test_products_of_the_same_rows_are_one() -> None:
    """Where their weights are cast: the sums and gradients of three products, from one."""
    model, x = Products().to(DEVICE), randn(3, 5, 16)
    cotangent = torch.randn_like(model(x))
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    graphs = []
    with mock.patch.object(
        entry, "fused", lambda gm, fused=entry.fused: (fused(gm), graphs.append(gm))[0]
    ):  # type: ignore[misc]
        torch.compile(model, backend=Backend())(x)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            result = results(compiled, model, (x,), cotangent)
            check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    names = [[aten_name(node.target) for node in gm.graph.nodes] for gm in graphs]
    assert [result.count("addmm") for result in names] == [5, 3]  # q with k and v, frozen, narrow
    # The products are `bare`, `gate`, `up`, and the one whose bias the norm's region adds.
    assert [result.count("mm") for result in names] == [4, 4]


def test_a_product_that_is_only_detached_has_no_gradient() -> None:
    """Though it could be one with others of the same rows, and its weight cast with theirs.

    Zeros would be weight decay.
    """
    layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)]).to(DEVICE)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third, fourth, *_ = (layer(x).float().cumsum(-1) for layer in layers)
        return first + second, (third + fourth).detach()

    for call in (function, torch.compile(function, backend=Backend())):
        layers.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            call(randn(3, 16))[0].sum().backward()
        assert [layer.weight.grad is None for layer in layers] == [False, False, True, True, True]
        assert [layer.bias.grad is None for layer in layers] == [False, False, True, True, True]


@pytest.mark.parametrize("bias", [False, True])
def test_values_that_attention_saves_are_copied_out_of_a_product(bias: bool) -> None:
    """Otherwise queries and keys, which nothing else saves, would stay in memory with them."""
    layers = nn.ModuleList([nn.Linear(16, 16, bias=bias) for _ in range(3)]).to(DEVICE)

    def function(x: Tensor) -> Tensor:
        query, key, value = (layer(x).view(2, 8, 2, 8).transpose(1, 2) for layer in layers)
        # Of operators that no region takes, so that the biases stay in the product.
        return F.scaled_dot_product_attention(query.cumsum(-1), key.cumsum(-1), value)

    names: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        result = entry._with_operators(gm, inputs, CompileReport())
        names.extend(aten_name(node.target) for node in result.graph.nodes)
        return gm.forward

    with torch.autocast(DEVICE.type, torch.bfloat16):
        torch.compile(function, backend=backend)(randn(2, 8, 16))
    assert names.count("split_with_sizes") == 1 + bias  # with biases their casts, too
    assert names.count("clone") == 1


def test_parameters_are_cast_together() -> None:
    """Backward their gradients are cast as one tensor, forward each is read and written once, as casts are."""
    model = nn.Sequential(
        nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 24, bias=False), nn.Linear(24, 4)
    ).to(DEVICE)
    model[1].requires_grad_(False)
    x, graphs = randn(5, 16), list[torch.fx.Graph]()

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def casting(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = entry._with_operators(gm, inputs, CompileReport())
        with casts_recorded():
            return aot_autograd(fw_compiler=keep, bw_compiler=keep)(compiled, inputs)

    with torch.autocast(DEVICE.type, torch.bfloat16):
        cotangent = torch.randn_like(model(x))
        result = results(torch.compile(model, backend=casting), model, (x,), cotangent)
        check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    forward, backward = [
        [node for node in graph.nodes if aten_name(node.target) in ("cat", "_to_copy")]
        for graph in graphs
    ]
    # Trained and frozen ones, not the rows, nor the bias of four elements, which is not aligned;
    # the gradients of the former two.
    large = [node for node in forward if aten_name(node.target) == "cat"]
    assert sorted(len(node.args[0]) for node in large) == [2, 4] if KERNEL_PATH else not large
    casts = [node for node in backward if aten_name(node.target) == "_to_copy"]
    widths = [node.meta["val"].numel() for node in casts if node.meta["val"].dtype == torch.float32]
    assert 16 * 8 + 8 + 16 * 24 + 24 * 4 in widths or not KERNEL_PATH


def _cast_without_gradients(x: Tensor, wq: Tensor, wk: Tensor, bq: Tensor, bk: Tensor) -> Tensor:
    with torch.no_grad():
        one, other = bq.bfloat16(), bk.bfloat16()
    return F.linear(x, wq.bfloat16(), one) @ F.linear(x, wk.bfloat16(), other).T


def _cast_after_a_change(x: Tensor, wq: Tensor, wk: Tensor, bq: Tensor, bk: Tensor) -> Tensor:
    one = bq.bfloat16()
    with torch.no_grad():
        bk[:8].add_(3.0)
    other = bk.bfloat16()
    return F.linear(x, wq.bfloat16(), one) @ F.linear(x, wk.bfloat16(), other).T


@pytest.mark.parametrize("function", [_cast_without_gradients, _cast_after_a_change])
def test_casts_stay_in_their_part_of_the_graph(function: Callable[..., Tensor]) -> None:
    x, results = randn(4, 16).bfloat16(), []
    inputs = [randn(*shape) for shape in ((16, 16), (16, 16), (16,), (16,))]
    for call in (function, torch.compile(function, backend=Backend())):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = call(x, *leaves)
        result = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
        results.append([y, *[torch.zeros(()) if g is None else g for g in result]])
    for ours, eager in zip(*results, strict=True):
        assert ours.shape == eager.shape
        torch.testing.assert_close(
            ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max())
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y.view(-1)[:5000].zero_(), y)[1],
        lambda y: (y.view(512, -1)[3:9].mul_(3), y)[1],
        lambda y: torch.as_strided(y, (1024, 4099), (4099, 1)) * 1,
    ],
)
def test_products_that_are_read_by_their_place_in_memory_are_not_padded(
    function: Callable[[Tensor], Tensor],
) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return function(F.linear(x, weight))

    x, weight = randn(1024, 8), randn(4099, 8)
    torch.testing.assert_close(
        torch.compile(product, backend=Backend())(x, weight),
        product(x, weight),
        rtol=2e-2,
        atol=1e-1,
    )


def test_bits_are_read_in_another_dtype() -> None:
    x = randn(3, 16)
    result = torch.compile(lambda x: F.relu(x).view(torch.int32), backend=Backend())(x)
    assert torch.equal(result, F.relu(x).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_small_tables_are_products(dtype: torch.dtype) -> None:
    """Each look-up counts once, in fp32, and nothing is added in an order that changes.

    Other tables are left.
    """
    few, many = (
        torch.randn(rows, 3, device=DEVICE, dtype=dtype, requires_grad=True) for rows in (5, 65)
    )
    places = torch.randint(0, 4, (3, 1500), device=DEVICE)  # nothing looks up the last row
    names: list[str] = []

    def function(few: Tensor, many: Tensor) -> Tensor:
        skipped = F.embedding(places, many[:5], padding_idx=1)
        return F.embedding(places, few) + F.embedding(places, many) + skipped

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(aten_name(node.target) for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    def summing(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = entry._with_operators(gm, inputs, CompileReport())
        return aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward
        )(compiled, inputs)

    cotangent = torch.randn(3, 1500, 3, device=DEVICE)
    y = torch.compile(function, backend=summing)(few, many)
    assert torch.equal(y, function(few, many))
    result = torch.autograd.grad(y, (few, many), cotangent.to(dtype))
    wanted = torch.zeros(5, 3, dtype=torch.float64, device=DEVICE)
    rows = cotangent.to(dtype).double().view(-1, 3)
    wanted.index_add_(0, places.view(-1), rows)
    # A sum of 1500 rows at most, in fp32, and rounded to the dtype.
    unit = torch.finfo(dtype).eps + 1500 * torch.finfo(torch.float32).eps
    assert ((result[0].double() - wanted).abs() <= unit * wanted.abs().max()).all()
    assert names.count("embedding_dense_backward") == (2 if KERNEL_PATH else 3)
    assert names.count("bmm") == KERNEL_PATH


# --- dropout --------------------------------------------------------------------------------------


def test_products_of_other_parts_are_not_joined() -> None:
    """Not those without gradients, nor of changed rows or weights, nor with biases of one element."""

    def function(
        x: Tensor, one: Tensor, other: Tensor, frozen: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            first = F.linear(x, one)
            with torch.no_grad():
                second = F.linear(x, other)
            third = F.linear(x, frozen)
            frozen.mul_(3)
            fourth = F.linear(x, frozen)
            fifth, sixth = F.linear(x, one, bias), F.linear(x, other, bias)
        return tuple([t.float() for t in (first, second, third, fourth, fifth, sixth)])

    x, frozen, bias = randn(6, 16), randn(8, 16), randn(1)
    one, other = randn(8, 16).requires_grad_(), randn(8, 16).requires_grad_()
    results = []
    for call in (function, torch.compile(function, backend=Backend())):
        result = call(x, one, other, frozen.clone(), bias)
        results.append([*result, *[torch.tensor(t.requires_grad) for t in result]])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def test_returned_products_are_not_joined() -> None:
    """They have memory each."""

    def function(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.linear(x, one), F.linear(x, other)

    inputs = [randn(*shape).requires_grad_() for shape in ((6, 16), (8, 16), (8, 16))]
    first, second = torch.compile(function, backend=Backend())(*inputs)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize("bias", [False, True])
def test_vocabularies_are_padded_to_whole_vectors(bias: bool) -> None:
    """Logits, loss and gradients are the same, and no product, forward or backward, has the odd number of columns."""
    model, x = nn.Linear(16, 4099, bias).to(DEVICE), randn(2, 512, 16)
    seen: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(x)
            return logits, F.cross_entropy(logits.flatten(0, 1).float(), x.new_zeros(1024).long())

    def graph(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(
            value
            for node in gm.graph.nodes
            if aten_name(node.target) in ("mm", "addmm")
            for value in (node.meta["val"], *[arg.meta["val"] for arg in node.all_input_nodes])
        )
        return make_boxed_func(gm.forward)

    def padding(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with casts_recorded():
            compiled = entry._with_operators(gm, inputs, CompileReport())
            return aot_autograd(fw_compiler=graph, bw_compiler=graph)(compiled, inputs)

    results = []
    for call in (function, torch.compile(function, backend=padding)):
        model.zero_grad()
        rows = x.clone().requires_grad_()
        logits, loss = call(rows)
        (loss + logits.float().square().mean()).backward()
        assert logits.view(-1, 4099).shape == (1024, 4099)
        results.append(
            [logits, loss, rows.grad, *[parameter.grad for parameter in model.parameters()]]
        )
    for ours, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(
            ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max())
        )
    assert seen
    assert 4099 not in {size for value in seen for size in value.shape} or not KERNEL_PATH


@pytest.mark.parametrize("columns", [4099, 4096])
def test_gradients_of_padded_logits_are_not_copied_to_be_padded(
    columns: int, monkeypatch: Any
) -> None:
    """They come from another graph, in which the padding is unknown. Others are taken as the release takes them: newer ones with
    the strides of their result."""
    model, x = nn.Linear(16, columns).to(DEVICE), randn(2, 512, 16)
    strides = []

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        strides.append(inputs[-1].stride())
        return make_boxed_func(gm.forward)

    def compiled(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        return aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward
        )(gm, inputs)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(x).transpose(0, 1)

    monkeypatch.setattr(entry, "compile_by_inductor", compiled)
    torch.compile(function, backend=entry.backend)(x).sum().backward()
    is_padded = KERNEL_PATH and columns == 4099
    as_results = torch._functorch.config.guess_tangent_strides_as_outputs and not is_padded
    assert strides == [(columns, 512 * columns, 1) if as_results else (2 * columns, columns, 1)]
