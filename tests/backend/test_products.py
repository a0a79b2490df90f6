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
    """Linear layers of the same rows.

    The layers ``q``, ``k`` and ``v`` are alike. One layer is frozen, one has few columns, and one
    has no bias. A norm reads the output of ``normed``, and ``gate`` and ``up`` are a gated unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 24)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.narrow = nn.Linear(16, 4)
        self.without_bias = nn.Linear(16, 16, bias=False)
        self.normed, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.gate, self.up = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.q(x),
            self.k(x),
            self.v(x),
            self.frozen(x),
            self.narrow(x),
            self.without_bias(x),
            self.norm(self.normed(x)),
            F.silu(self.gate(x)) * self.up(x),
        )
        return torch.cat([part.float().cumsum(-1) for part in parts], -1)


def test_products_of_the_same_rows_are_joined_under_autocast() -> None:
    """Values and gradients of the three products that are alike stay the same."""
    model, x = Products().to(DEVICE), randn(3, 5, 16)
    cotangent = torch.randn_like(model(x))
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    graphs = []
    fuse = entry.fused

    def recording(gm: torch.fx.GraphModule, *args: Any) -> None:
        fuse(gm, *args)
        graphs.append(gm)

    with mock.patch.object(entry, "fused", recording):
        torch.compile(model, backend=Backend())(x)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            result = results(compiled, model, (x,), cotangent)
            check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    fp32_names, autocast_names = [
        [aten_name(node.target) for node in gm.graph.nodes] for gm in graphs
    ]
    # Under autocast q, k and v are one product. The others are `frozen` and `narrow`.
    assert fp32_names.count("addmm") == 5
    assert autocast_names.count("addmm") == 3
    # These are `without_bias`, `gate`, `up`, and `normed`, whose bias the norm's region adds.
    assert fp32_names.count("mm") == autocast_names.count("mm") == 4


def test_product_that_is_only_detached_has_no_gradient() -> None:
    """It is not joined with other products of the same rows, and its weight not cast with theirs.

    A gradient of zeros instead of None would make an optimizer apply weight decay.
    """
    layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)]).to(DEVICE)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third, fourth, *_ = (layer(x).float().cumsum(-1) for layer in layers)
        return first + second, (third + fourth).detach()

    for call in (function, torch.compile(function, backend=Backend())):
        layers.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            output, _ = call(randn(3, 16))
            output.sum().backward()
        for layer in layers[:2]:
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
        for layer in layers[2:]:
            assert layer.weight.grad is None
            assert layer.bias.grad is None


def test_product_that_a_region_only_compares_has_no_gradient() -> None:
    """Its weight is not cast with that of another product that the region reads."""
    layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)]).to(DEVICE)
    scale = nn.Parameter(randn(16))

    def function(x: Tensor) -> Tensor:
        first, second = (layer(x).float().cumsum(-1) for layer in layers)
        return F.layer_norm(torch.where(second > 0, first, 2 * first), (16,), scale)

    backend = Backend()
    for call in (function, torch.compile(function, backend=backend)):
        layers.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            call(randn(3, 16)).square().sum().backward()
        assert layers[0].weight.grad is not None
        assert layers[1].weight.grad is None
    assert ["gt" in region.operators for region in backend.report.fused] == [True] * KERNEL_PATH


@pytest.mark.parametrize("bias", [False, True])
def test_values_that_attention_saves_are_copied_out_of_a_joint_product(bias: bool) -> None:
    """As views of the joint product they would keep queries and keys in memory, too."""
    layers = nn.ModuleList([nn.Linear(16, 16, bias=bias) for _ in range(3)]).to(DEVICE)

    def function(x: Tensor) -> Tensor:
        query, key, value = (layer(x).view(2, 8, 2, 8).transpose(1, 2) for layer in layers)
        # No region contains cumsum, so the biases stay in the product.
        return F.scaled_dot_product_attention(query.cumsum(-1), key.cumsum(-1), value)

    names: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        result = entry._with_operators(gm, inputs, CompileReport())
        names.extend(aten_name(node.target) for node in result.graph.nodes)
        return gm.forward

    with torch.autocast(DEVICE.type, torch.bfloat16):
        torch.compile(function, backend=backend)(randn(2, 8, 16))
    # The joint product is split, and so is the joint cast of the biases.
    assert names.count("split_with_sizes") == 1 + bias
    assert names.count("clone") == 1


def test_parameters_are_cast_together() -> None:
    """The forward reads and writes each parameter once. The backward casts gradients as one tensor."""
    model = nn.Sequential(
        nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 24, bias=False), nn.Linear(24, 4)
    ).to(DEVICE)
    model[1].requires_grad_(False)
    x = randn(5, 16)
    graphs: list[torch.fx.Graph] = []

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = entry._with_operators(gm, inputs, CompileReport())
        with casts_recorded():
            return aot_autograd(fw_compiler=record, bw_compiler=record)(compiled, inputs)

    with torch.autocast(DEVICE.type, torch.bfloat16):
        cotangent = torch.randn_like(model(x))
        result = results(torch.compile(model, backend=backend), model, (x,), cotangent)
        check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    forward, backward = [
        [node for node in graph.nodes if aten_name(node.target) in ("cat", "_to_copy")]
        for graph in graphs
    ]
    joined = [len(node.args[0]) for node in forward if aten_name(node.target) == "cat"]
    if not KERNEL_PATH:
        assert not joined
        return
    # One cast has both frozen parameters, and another has four trained ones. The rows are cast
    # alone, and so is the bias of four elements, which is not aligned.
    assert sorted(joined) == [2, 4]
    casts = [node.meta["val"] for node in backward if aten_name(node.target) == "_to_copy"]
    sizes = [value.numel() for value in casts if value.dtype == torch.float32]
    trained_size = 16 * 8 + 8 + 16 * 24 + 24 * 4
    assert trained_size in sizes


def _cast_without_gradients(x: Tensor, wq: Tensor, wk: Tensor, bq: Tensor, bk: Tensor) -> Tensor:
    with torch.no_grad():
        bq_cast, bk_cast = bq.bfloat16(), bk.bfloat16()
    return F.linear(x, wq.bfloat16(), bq_cast) @ F.linear(x, wk.bfloat16(), bk_cast).T


def _cast_after_a_change(x: Tensor, wq: Tensor, wk: Tensor, bq: Tensor, bk: Tensor) -> Tensor:
    bq_cast = bq.bfloat16()
    with torch.no_grad():
        bk[:8].add_(3.0)
    bk_cast = bk.bfloat16()
    return F.linear(x, wq.bfloat16(), bq_cast) @ F.linear(x, wk.bfloat16(), bk_cast).T


@pytest.mark.parametrize("function", [_cast_without_gradients, _cast_after_a_change])
def test_casts_are_not_joined_across_no_grad_or_a_change(function: Callable[..., Tensor]) -> None:
    x, results = randn(4, 16).bfloat16(), []
    inputs = [randn(*shape) for shape in ((16, 16), (16, 16), (16,), (16,))]
    for call in (function, torch.compile(function, backend=Backend())):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = call(x, *leaves)
        result = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
        results.append([y, *[torch.zeros(()) if g is None else g for g in result]])
    for eager, ours in zip(*results, strict=True):
        assert ours.shape == eager.shape
        torch.testing.assert_close(
            ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max())
        )


def _zero_flattened(y: Tensor) -> Tensor:
    y.view(-1)[:5000].zero_()
    return y


def _scale_other_view(y: Tensor) -> Tensor:
    y.view(512, -1)[3:9].mul_(3)
    return y


@pytest.mark.parametrize(
    "function",
    [
        _zero_flattened,
        _scale_other_view,
        lambda y: torch.as_strided(y, (1024, 4099), (4099, 1)) * 1,
    ],
)
def test_products_whose_layout_in_memory_matters_are_not_padded(
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


def test_view_in_another_dtype_has_the_same_bits() -> None:
    x = randn(3, 16)
    result = torch.compile(lambda x: F.relu(x).view(torch.int32), backend=Backend())(x)
    assert torch.equal(result, F.relu(x).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_small_tables_are_products(dtype: torch.dtype) -> None:
    """Their terms are added in fp32 and in a fixed order.

    Gradients of a table with more than 64 rows, or with a padding index, are left to PyTorch.
    """
    few, many = (
        torch.randn(rows, 3, device=DEVICE, dtype=dtype, requires_grad=True) for rows in (5, 65)
    )
    indices = torch.randint(0, 4, (3, 1500), device=DEVICE)  # the last row is not looked up
    names: list[str] = []

    def function(few: Tensor, many: Tensor) -> Tensor:
        with_padding = F.embedding(indices, many[:5], padding_idx=1)
        return F.embedding(indices, few) + F.embedding(indices, many) + with_padding

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(aten_name(node.target) for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = entry._with_operators(gm, inputs, CompileReport())
        return aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward
        )(compiled, inputs)

    cotangent = torch.randn(3, 1500, 3, device=DEVICE)
    y = torch.compile(function, backend=backend)(few, many)
    assert torch.equal(y, function(few, many))
    gradient_of_few, _ = torch.autograd.grad(y, (few, many), cotangent.to(dtype))
    exact = torch.zeros(5, 3, dtype=torch.float64, device=DEVICE)
    rows = cotangent.to(dtype).double().view(-1, 3)
    exact.index_add_(0, indices.view(-1), rows)
    # A sum of at most 1500 rows, in fp32, is rounded to the dtype.
    unit = torch.finfo(dtype).eps + 1500 * torch.finfo(torch.float32).eps
    assert ((gradient_of_few.double() - exact).abs() <= unit * exact.abs().max()).all()
    assert names.count("embedding_dense_backward") == (2 if KERNEL_PATH else 3)
    assert names.count("bmm") == KERNEL_PATH


# --- which products are joined --------------------------------------------------------------------


def test_products_under_no_grad_or_of_changed_weights_are_not_joined() -> None:
    """Products whose biases have one element are not joined either."""

    def function(
        x: Tensor, w1: Tensor, w2: Tensor, frozen: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            products = [F.linear(x, w1)]
            with torch.no_grad():
                products.append(F.linear(x, w2))
            products.append(F.linear(x, frozen))
            frozen.mul_(3)
            products.append(F.linear(x, frozen))
            products += [F.linear(x, w1, bias), F.linear(x, w2, bias)]
        return tuple([product.float() for product in products])

    x, frozen, bias = randn(6, 16), randn(8, 16), randn(1)
    w1, w2 = randn(8, 16).requires_grad_(), randn(8, 16).requires_grad_()
    eager_results = function(x, w1, w2, frozen.clone(), bias)
    compiled = torch.compile(function, backend=Backend())
    for ours, eager in zip(compiled(x, w1, w2, frozen.clone(), bias), eager_results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
        assert ours.requires_grad == eager.requires_grad


def test_returned_products_are_not_joined() -> None:
    """Each has memory of its own."""

    def function(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.linear(x, w1), F.linear(x, w2)

    inputs = [randn(*shape).requires_grad_() for shape in ((6, 16), (8, 16), (8, 16))]
    first, second = torch.compile(function, backend=Backend())(*inputs)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize("bias", [False, True])
def test_vocabularies_are_padded_to_whole_vectors(bias: bool) -> None:
    """Logits, loss and gradients stay the same, and no product has the odd number of columns."""
    columns = 4099
    model, x = nn.Linear(16, columns, bias).to(DEVICE), randn(2, 512, 16)
    product_sizes: set[int] = set()  # of results and operands, forward and backward

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(x)
            return logits, F.cross_entropy(logits.flatten(0, 1).float(), x.new_zeros(1024).long())

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.nodes:
            if aten_name(node.target) in ("mm", "addmm"):
                for tensor in (node, *node.all_input_nodes):
                    product_sizes.update(tensor.meta["val"].shape)
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with casts_recorded():
            compiled = entry._with_operators(gm, inputs, CompileReport())
            return aot_autograd(fw_compiler=record, bw_compiler=record)(compiled, inputs)

    results = []
    for call in (function, torch.compile(function, backend=backend)):
        model.zero_grad()
        rows = x.clone().requires_grad_()
        logits, loss = call(rows)
        (loss + logits.float().square().mean()).backward()
        assert logits.view(-1, columns).shape == (1024, columns)
        results.append(
            [logits, loss, rows.grad, *[parameter.grad for parameter in model.parameters()]]
        )
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max())
        )
    assert product_sizes
    if KERNEL_PATH:
        assert columns not in product_sizes


@pytest.mark.parametrize("columns", [4099, 4096])
def test_gradients_of_padded_logits_are_not_copied_to_be_padded(
    columns: int, monkeypatch: Any
) -> None:
    """The loss is in another graph, which does not know of the padding.

    So the backward of padded logits takes their gradient with contiguous strides. The backward of
    other logits does that only in older releases of PyTorch; newer ones guess the logits' strides.
    """
    model, x = nn.Linear(16, columns).to(DEVICE), randn(2, 512, 16)
    gradient_strides = []

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        gradient_strides.append(inputs[-1].stride())
        return make_boxed_func(gm.forward)

    def compile_(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        return aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward
        )(gm, inputs)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(x).transpose(0, 1)

    monkeypatch.setattr(entry, "compile_by_inductor", compile_)
    torch.compile(function, backend=entry.backend)(x).sum().backward()
    is_padded = KERNEL_PATH and columns == 4099
    strides_of_logits, contiguous = (columns, 512 * columns, 1), (2 * columns, columns, 1)
    if torch._functorch.config.guess_tangent_strides_as_outputs and not is_padded:
        assert gradient_strides == [strides_of_logits]
    else:
        assert gradient_strides == [contiguous]
