"""`fusedops.compile`: values, gradients, masks, and which parts of a graph become operators.

Most graphs are not compiled by Inductor, which takes seconds for each, but run as AOTAutograd leaves them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.backend import entry
from fusedops.backend.report import CompileReport
from fusedops.core import compat, launch
from support import DEVICE, KERNEL_PATH

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class Backend:
    """Makes operators of a graph's regions, and runs the graph without compiling it."""

    def __init__(self) -> None:
        self.report = CompileReport()
        self.saved: list[Tensor] = []  # fake tensors

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        made = entry._with_operators(gm, inputs, self.report)

        def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
            values = [node.meta.get("val") for node in graph.graph.find_nodes(op="output")[0].all_input_nodes
                      if node.op == "call_function"]  # fmt: skip
            self.saved += [value for value in values if isinstance(value, Tensor)]
            return make_boxed_func(graph.forward)

        with entry._autocast_of(self.report):
            backward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
            return aot_autograd(fw_compiler=forward, bw_compiler=backward)(made, inputs)


class PostNorm(nn.Module):
    """A feed-forward part as BERT's."""

    def __init__(self, width: int = 24, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.down(F.gelu(self.up(x)))) + x)


class PreNorm(nn.Module):
    """Two blocks as Llama's: the residual stream is handed on, and queries and keys are normalised and turned."""

    def __init__(self, width: int = 32, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.mix = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, 48), (width, 48), (48, width))
        )
        self.of_heads = nn.RMSNorm(head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.of_heads(self.mix[0](self.norms[0](x)).unflatten(-1, (-1, self.head)).transpose(1, 2))
        first, second = heads.chunk(2, -1)
        heads = heads * cos + torch.cat([-second, first], -1) * sin
        x = x + self.mix[1](F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return self.norms[2](x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Adaptive(nn.Module):
    """A block of a diffusion transformer: one scale, shift and gate for all rows of a picture."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.modulation, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(c)).unsqueeze(1).chunk(3, -1)
        return x + gate * self.mlp(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int]] = {
    "post-norm": (PostNorm, lambda: (_rows(3, 5, 24),), 2),
    "pre-norm": (PreNorm, lambda: (_rows(2, 6, 32), _rows(6, 8), _rows(6, 8)), 4),
    "adaptive": (Adaptive, lambda: (_rows(3, 7, 16), _rows(3, 16)), 2),
    "embeddings": (lambda: nn.Sequential(nn.Embedding(9, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
                   lambda: (torch.arange(9, device=DEVICE).view(3, 3),), 1),
}  # fmt: skip
every = pytest.mark.parametrize("name", MODELS)


def _built(name: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    make, inputs, count = MODELS[name]
    model = make().to(DEVICE)
    for parameter in model.parameters():  # a norm's are ones and zeros
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.4)
    return model, inputs(), count


def _results(model: Callable[..., Any], module: nn.Module, inputs: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output, and the gradients of parameters and inputs."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    output = model(*leaves)
    wanted = [t for t in (*module.parameters(), *leaves) if t.requires_grad]
    return [output, *torch.autograd.grad(output, wanted, cotangent.to(output.dtype))]


def _moved(module: nn.Module, draw: int) -> nn.Module:
    """A copy whose parameters are moved by a unit in the last place, up or down."""
    generator, moved = torch.Generator().manual_seed(draw), copy.deepcopy(module)
    for parameter in moved.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
        parameter.data *= 1 + torch.finfo(parameter.dtype).eps * signs
    return moved


def _check(found: Sequence[Tensor], module: nn.Module, inputs: Sequence[Tensor], cotangent: Tensor, eps: float) -> None:
    """No farther from fp64 than four times what eager is, in the worst of four samples, and four units of the largest number.

    The samples are eager runs with parameters moved by a unit in the last place: each is rounded otherwise. A chain of
    roundings in another order differs by a few times what they do.
    """
    modules = [module, *[_moved(module, draw) for draw in range(3)]]
    eager = [_results(other, other, inputs, cotangent) for other in modules]
    exact = copy.deepcopy(module).double()
    with torch.autocast(DEVICE.type, enabled=False):
        given = [t.double() if t.is_floating_point() else t for t in inputs]
        wanted = _results(exact, exact, given, cotangent.double())
    for number, (ours, best) in enumerate(zip(found, wanted, strict=True)):
        theirs = [sample[number] for sample in eager]
        assert ours.dtype == theirs[0].dtype and ours.shape == best.shape
        allowed = max([(other.double() - best).abs().max() for other in theirs])
        assert (ours.double() - best).abs().max() <= 4 * (allowed + eps * best.abs().max()), number


@every
def test_values_and_gradients(name: str) -> None:
    model, inputs, count = _built(name)
    cotangent = torch.randn_like(model(*inputs))
    backend = Backend()
    with launch.record() as launches:
        found = _results(torch.compile(model, backend=backend, fullgraph=True), model, inputs, cotangent)
    assert len(backend.report.fused) == count and backend.report.graphs == 1 and not backend.report.left
    assert sum("forward" in kernel for kernel in launches) >= count and any("backward" in kernel for kernel in launches)
    _check(found, model, inputs, cotangent, torch.finfo(torch.float32).eps)


def test_autocast() -> None:
    """Casts are in the regions; what a model computes without autocast stays so, also while the graph runs under it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.router = PostNorm(), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            with torch.autocast(DEVICE.type, enabled=False):
                x = x.to(self.router.weight.dtype)
                return self.router(x) + x.cumsum(-1)[..., :3]

    model = Mixed().to(DEVICE)
    x = _rows(3, 5, 24)
    cotangent = torch.randn_like(model(x))
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = _results(compiled, model, (x,), cotangent)
        # Triton's interpreter truncates where a GPU rounds.
        _check(found, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    assert len(backend.report.fused) == 3
    names = {name for region in backend.report.fused for name in region.operators}
    assert {"_to_copy", "native_layer_norm"} <= names


def test_parts_without_autocast_keep_their_precision() -> None:
    """Casts are in the graph: while it runs under autocast, products in fp32 stay so, forward and backward."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, enabled=False):
            return x @ w

    x, w = _rows(16, 16), _rows(16, 16).requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = torch.compile(function, backend=Backend())(x, w)
        (dw,) = torch.autograd.grad(y, w, torch.ones_like(y))
    assert y.dtype == dw.dtype == torch.float32
    # The dot product of n terms in fp32: n units of the sum of magnitudes.
    unit = 16 * torch.finfo(torch.float32).eps
    assert ((y.double() - x.double() @ w.double()).abs() <= unit * (x.abs() @ w.abs())).all()
    assert ((dw.double() - x.double().sum(0)[:, None]).abs() <= unit * x.abs().sum(0)[:, None]).all()


class Products(nn.Module):
    """Products of the same rows: three of a kind, one without bias, one frozen, one whose result a region takes, and two
    that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.frozen, self.narrow = (nn.Linear(16, size) for size in (16, 8, 24, 16, 4))
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
    model, x = Products().to(DEVICE), _rows(3, 5, 16)
    cotangent = torch.randn_like(model(x))
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    graphs = []
    with mock.patch.object(entry, "fused", lambda gm, fused=entry.fused: (fused(gm), graphs.append(gm))[0]):  # type: ignore[misc]
        torch.compile(model, backend=Backend())(x)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found = _results(compiled, model, (x,), cotangent)
            _check(found, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    names = [[compat.aten_name(node.target) for node in gm.graph.nodes] for gm in graphs]
    assert [found.count("addmm") for found in names] == [5, 3]  # q with k and v, frozen, narrow
    assert [found.count("mm") for found in names] == [
        4,
        4,
    ]  # bare, gate, up, and that whose bias the norm's region adds


def test_parameters_are_cast_together() -> None:
    """Backward their gradients are cast as one tensor, forward each is read and written once, as casts are."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 24, bias=False), nn.Linear(24, 4)).to(
        DEVICE
    )
    model[1].requires_grad_(False)
    x, graphs = _rows(5, 16), list[torch.fx.Graph]()

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def casting(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        made = entry._with_operators(gm, inputs, CompileReport())
        with compat.casts_recorded():
            return aot_autograd(fw_compiler=keep, bw_compiler=keep)(made, inputs)

    with torch.autocast(DEVICE.type, torch.bfloat16):
        cotangent = torch.randn_like(model(x))
        found = _results(torch.compile(model, backend=casting), model, (x,), cotangent)
        _check(found, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    forward, backward = [[node for node in graph.nodes if compat.aten_name(node.target) in ("cat", "_to_copy")]
                         for graph in graphs]  # fmt: skip
    # Trained and frozen ones, not the rows, nor the bias of four elements, which is not aligned; the gradients of the former two.
    large = [node for node in forward if compat.aten_name(node.target) == "cat"]
    assert sorted(len(node.args[0]) for node in large) == [2, 4] if KERNEL_PATH else not large
    casts = [node for node in backward if compat.aten_name(node.target) == "_to_copy"]
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
    x, results = _rows(4, 16).bfloat16(), []
    given = [_rows(*shape) for shape in ((16, 16), (16, 16), (16,), (16,))]
    for call in (function, torch.compile(function, backend=Backend())):
        leaves = [t.clone().requires_grad_() for t in given]
        y = call(x, *leaves)
        found = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
        results.append([y, *[torch.zeros(()) if g is None else g for g in found]])
    for ours, eager in zip(*results, strict=True):
        assert ours.shape == eager.shape
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max()))


@pytest.mark.parametrize("function", [
    lambda y: (y.view(-1)[:5000].zero_(), y)[1],
    lambda y: (y.view(512, -1)[3:9].mul_(3), y)[1],
    lambda y: torch.as_strided(y, (1024, 4099), (4099, 1)) * 1,
])  # fmt: skip
def test_products_that_are_read_by_their_place_in_memory_are_not_padded(function: Callable[[Tensor], Tensor]) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return function(F.linear(x, weight))

    x, weight = _rows(1024, 8), _rows(4099, 8)
    torch.testing.assert_close(
        torch.compile(product, backend=Backend())(x, weight), product(x, weight), rtol=2e-2, atol=1e-1
    )


def test_bits_are_read_in_another_dtype() -> None:
    x = _rows(3, 16)
    found = torch.compile(lambda x: F.relu(x).view(torch.int32), backend=Backend())(x)
    assert torch.equal(found, F.relu(x).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_small_tables_are_products(dtype: torch.dtype) -> None:
    """Each look-up counts once, in fp32, and nothing is added in an order that changes; other tables are left."""
    few, many = (torch.randn(rows, 3, device=DEVICE, dtype=dtype, requires_grad=True) for rows in (5, 65))
    places = torch.randint(0, 4, (3, 1500), device=DEVICE)  # nothing looks up the last row
    names: list[str] = []

    def function(few: Tensor, many: Tensor) -> Tensor:
        skipped = F.embedding(places, many[:5], padding_idx=1)
        return F.embedding(places, few) + F.embedding(places, many) + skipped

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(compat.aten_name(node.target) for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    def summing(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        made = entry._with_operators(gm, inputs, CompileReport())
        return aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward)(made, inputs)

    cotangent = torch.randn(3, 1500, 3, device=DEVICE)
    y = torch.compile(function, backend=summing)(few, many)
    assert torch.equal(y, function(few, many))
    found = torch.autograd.grad(y, (few, many), cotangent.to(dtype))
    wanted = torch.zeros(5, 3, dtype=torch.float64, device=DEVICE)
    rows = cotangent.to(dtype).double().view(-1, 3)
    wanted.index_add_(0, places.view(-1), rows)
    # A sum of 1500 rows at most, in fp32, and rounded to the dtype.
    unit = torch.finfo(dtype).eps + 1500 * torch.finfo(torch.float32).eps
    assert ((found[0].double() - wanted).abs() <= unit * wanted.abs().max()).all()
    assert names.count("embedding_dense_backward") == (2 if KERNEL_PATH else 3)
    assert names.count("bmm") == KERNEL_PATH


# --- dropout ------------------------------------------------------------------------------------------------------------


def _drops(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x + bias, 0.25) + residual


def test_dropout_is_drawn_again_in_the_backward() -> None:
    """The mask that the output shows is the one of the gradients; nothing of it is saved."""
    x, residual, bias = _rows(64, 40), _rows(64, 40), _rows(40)
    for t in (x, residual, bias):
        t.requires_grad_()
    backend = Backend()
    compiled = torch.compile(_drops, backend=backend)
    torch.manual_seed(1)
    y = compiled(x, bias, residual)
    kept = ((y - residual).abs() > 1e-6).double()
    assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    cotangent = torch.randn_like(y)
    assert "native_dropout" in backend.report.fused[0].operators
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), cotangent)
    torch.testing.assert_close(dx, cotangent * kept.float() / 0.75, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(dbias, dx.sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(dresidual, cotangent)
    assert sum(t.numel() == x.numel() for t in backend.saved) == 1  # the output alone
    torch.manual_seed(1)
    assert torch.equal(compiled(x, bias, residual), y)
    assert not torch.equal(compiled(x, bias, residual), y)


def test_dropouts_of_one_graph_differ() -> None:
    def function(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x + bias, 0.5), F.dropout((x @ x.mT) + bias, 0.5)

    first, second = torch.compile(function, backend=Backend())(
        torch.ones(64, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    )
    assert not torch.equal(first == 0, second == 0)


def test_no_dropout_in_evaluation() -> None:
    model = PostNorm(p=0.5).to(DEVICE).eval()
    x = _rows(3, 24)
    torch.testing.assert_close(torch.compile(model, backend=Backend())(x), model(x))


def test_checkpointing_saves_inputs_alone() -> None:
    """Values and gradients are those of a part that is not computed again; on a GPU it draws from another state."""
    model, found = PostNorm(p=0.5).to(DEVICE), []
    x = _rows(16, 24).requires_grad_()
    for wrapped in (model, lambda t: checkpoint(model, t, use_reentrant=False)):
        backend = Backend()
        torch.manual_seed(2)
        y = torch.compile(wrapped, backend=backend)(x)
        found.append((y, *torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y))))
        full = sum(t.dtype == x.dtype and t.numel() >= x.numel() for t in backend.saved)
        assert len(backend.report.fused) == 2
        assert full == 1 if wrapped is not model else full > 2  # the output itself is one
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) or DEVICE.type == "cuda"


def test_checkpointing_draws_the_same() -> None:
    """The mask that the output shows is the one of the gradients of the part that is computed again."""
    x, bias, residual = _rows(64, 40).requires_grad_(), _rows(40).requires_grad_(), _rows(64, 40)
    compiled = torch.compile(lambda *given: checkpoint(_drops, *given, use_reentrant=False), backend=Backend())
    y = compiled(x, bias, residual)
    kept = ((y - residual).abs() > 1e-6).float()
    cotangent = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, cotangent)
    torch.testing.assert_close(dx, cotangent * kept / 0.75, rtol=1e-6, atol=0.0)


# --- graphs -------------------------------------------------------------------------------------------------------------


def test_one_graph_serves_all_lengths() -> None:
    model, _, count = _built("post-norm")
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    for batch, length in ((3, 5), (2, 9), (7, 4)):
        x = _rows(batch, length, 24)
        torch._dynamo.mark_dynamic(x, (0, 1))
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert backend.report.graphs == 1 and len(backend.report.fused) == count


def test_number_of_rows_is_no_constant_of_a_kernel() -> None:
    w = _rows(8).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), w) * x.shape[0]

    compiled = torch.compile(function, backend=Backend())
    for rows in (3, 5):
        x = _rows(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-5)


def test_inference_saves_nothing() -> None:
    model, inputs, _ = _built("post-norm")
    backend = Backend()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert len(backend.saved) == 1


class _Doubled(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _own_derivative(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(_Doubled.apply(x), (8,), w)


def _cut(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.layer_norm(x, (8,), w)
    return F.layer_norm(x, (8,), w) * scale + F.layer_norm(x.detach(), (8,), w)


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    first = y.view(y.shape)
    y += w
    other = x + 1
    other.mul_(2).sub_(w)
    y = y * F.layer_norm(x, (8,), w)
    return F.layer_norm(first, (8,), w) + F.layer_norm(other, (8,), w) * y


def _same_memory(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, (8,), w)
    return y, y.view(-1), y, x, x.view(-1)


def _transposed(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(x.transpose(0, 1), (8,), w)
    return y.transpose(0, 1).reshape(-1, 16)


def _integers(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[0], device=x.device)[:, None, None] > 1, F.layer_norm(x, (8,), w), w)


def _crossed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two regions, each of which needs a part of the other."""
    one, other = F.layer_norm(x, (8,), w), F.layer_norm(x.sin(), (8,), w)
    return one + (other * 3) @ w.outer(w), other + (one * 2) @ w.outer(w)


def _changed_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    """The change is no part of the derivative; what it changes still has one."""
    y = x * w
    with torch.no_grad():
        y.mul_(2)
    return F.layer_norm(y, (8,), w)


def _changed_twice(x: Tensor, w: Tensor) -> Tensor:
    """The second time through a view that is not used later."""
    y = x * 1
    y.add_(w)
    y.view(-1, 8).mul_(2)
    return F.layer_norm(y, (8,), w) + y


def _copied(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y.copy_(x)
    return F.layer_norm(y + w, (8,), w)


def _inverted(x: Tensor, w: Tensor) -> Tensor:
    """PyTorch passes the gradient through this change."""
    y = x * 1
    y.logical_not_()
    return F.layer_norm(y * x, (8,), w)


def _written_into(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor without a gradient has one after a part of it is written."""
    y = x.detach().clone()
    y[:, 0] = w
    return F.layer_norm(y, (8,), w.detach()), x * 2


def _viewed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A view in the middle of a region is returned with what it is of."""
    y = x + w
    rows = y.view(-1, 8)
    return F.layer_norm(rows, (8,), w), y, rows


def _view_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = x + w
        rows = y.view(-1, 8)
        z = F.layer_norm(rows, (8,), w)
        rows.add_(1)
    return z.view(x.shape) + x * w, y + x


def _cloned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (8,), w) + w
    return y, y.clone()


def _clone_of_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (8,), w) + w
    other, rows = y.clone(), y.view(-1)
    y.mul_(2)
    return other, rows


def _without_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """One of a region's results."""
    y = x.detach() * 2
    return F.layer_norm(y, (8,), w), y + x.detach()


def _compared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A comparison has no gradient to hand on."""
    y = F.layer_norm(x, (8,), w)
    return torch.where(y > 0.5, x.detach(), 1.0), y


def _bias_without_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The product's rows are viewed where gradients are recorded again."""
    with torch.no_grad():
        y = F.linear(x.view(-1, 8), w.outer(w), w)
    return F.layer_norm(y.view(x.shape), (8,), w), x * 2


def _bias_changed(x: Tensor, w: Tensor) -> Tensor:
    """The product's rows are viewed after that."""
    bias = w.detach().clone()
    alias = bias.view(-1)
    y = F.linear(x.view(-1, 8), w.outer(w), bias)
    alias.mul_(3)
    return F.layer_norm(y.view(x.shape), (8,), w) + bias


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("function", [
    _own_derivative, _cut, _in_place, _same_memory, _transposed, _integers, _crossed, _changed_without_gradients, _changed_twice,
    _copied, _inverted, _written_into, _viewed, _view_changed, _cloned, _clone_of_changed, _without_gradient,
    _compared, _bias_without_gradients, _bias_changed])  # fmt: skip
def test_semantics_of_the_graph(function: Callable[..., Any]) -> None:
    """Derivatives of the user's, parts without gradients, changes in place, outputs that share memory."""
    x, w = _rows(4, 6, 8).double().requires_grad_(), _rows(8).double().requires_grad_()

    def results(call: Callable[..., Any]) -> list[Tensor]:
        outputs = compat.leaves(call(x, w))
        total = sum([(index + 1) * (t * t.detach().cos()).sum() for index, t in enumerate(outputs)])
        return [*outputs, *torch.autograd.grad(total, (x, w), materialize_grads=True)]

    backend = Backend()
    found, expected = results(torch.compile(function, backend=backend)), results(function)
    assert backend.report.fused and not backend.report.left
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)  # in fp64, whose roundings are far below
        assert one.requires_grad == other.requires_grad
    pointers = [[t.data_ptr() for t in ours[:-2]] for ours in (found, expected)]
    shared = [[a == b for a, b in itertools.combinations(ours, 2)] for ours in pointers]
    assert shared[0] == shared[1]


def test_region_whose_saved_input_is_changed_later_is_left() -> None:
    """Eager PyTorch saves the sum, a region what is added."""

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        y = F.layer_norm(F.gelu(x + bias), (8,), w)
        x.mul_(0)
        return y

    x, w, bias = _rows(4, 8), _rows(8).requires_grad_(), _rows(8).requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        given = x.clone()
        y = call(given, w, bias)
        results.append((y, given, *torch.autograd.grad(y, (w, bias), torch.ones_like(y))))
    assert [region.reason for region in backend.report.regions] == ["a tensor that it saves is changed later"]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fractions_of_sizes_are_no_sizes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), w) * (1.0 / x.shape[0])

    w, backend = _rows(8).requires_grad_(), Backend()
    compiled = torch.compile(function, backend=backend)
    for rows in (4, 6):
        x = _rows(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, w), function(x, w), rtol=1e-4, atol=1e-5)
    assert backend.report.graphs == 1


def _detached(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y.detach_()
    return F.layer_norm(y + w, (8,), w) + x


def _input_changed(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    other = y.unsqueeze(1).squeeze(1)
    x.zero_()
    return F.layer_norm(other, (8,), w) + y


@pytest.mark.parametrize("function", [_detached, _input_changed])
def test_graph_whose_derivative_would_be_lost_is_left(function: Callable[..., Any]) -> None:
    x, w = _rows(1, 4, 8).double().requires_grad_(), _rows(8).double().requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        y = call((x * 1)[:1], w)
        results.append([y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))])
    assert len(backend.report.left) == 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("constant", [False, True])
def test_parameters_are_known_to_stay_where_they_are(constant: bool) -> None:
    """CUDA graphs copy all other inputs; a graph may hold constants of its own."""

    class Scaled(PostNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.tensor(2.0, device=x.device) if constant else x)

    name, found = "_try_get_metadata_from_dynamo", list[Any]()
    original = getattr(torch._functorch.aot_autograd, name)

    def seen(*args: Any) -> Any:
        found.append(original(*args))
        return found[-1]

    model = Scaled().to(DEVICE)
    with mock.patch.object(torch._functorch.aot_autograd, name, seen):
        torch.compile(model, backend=Backend())(_rows(3, 24))
    assert len(found[0][1]) == len(list(model.parameters())) + constant


def test_products_of_other_parts_are_not_joined() -> None:
    """Not those without gradients, nor of changed rows or weights, nor with biases of one element."""

    def function(x: Tensor, one: Tensor, other: Tensor, frozen: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            first = F.linear(x, one)
            with torch.no_grad():
                second = F.linear(x, other)
            third = F.linear(x, frozen)
            frozen.mul_(3)
            fourth = F.linear(x, frozen)
            fifth, sixth = F.linear(x, one, bias), F.linear(x, other, bias)
        return tuple([t.float() for t in (first, second, third, fourth, fifth, sixth)])

    x, frozen, bias = _rows(6, 16), _rows(8, 16), _rows(1)
    one, other = _rows(8, 16).requires_grad_(), _rows(8, 16).requires_grad_()
    results = []
    for call in (function, torch.compile(function, backend=Backend())):
        found = call(x, one, other, frozen.clone(), bias)
        results.append([*found, *[torch.tensor(t.requires_grad) for t in found]])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def test_returned_products_are_not_joined() -> None:
    """They have memory each."""

    def function(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.linear(x, one), F.linear(x, other)

    given = [_rows(*shape).requires_grad_() for shape in ((6, 16), (8, 16), (8, 16))]
    first, second = torch.compile(function, backend=Backend())(*given)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize("bias", [False, True])
def test_vocabularies_are_padded_to_whole_vectors(bias: bool) -> None:
    """Logits, loss and gradients are the same, and no product, forward or backward, has the odd number of columns."""
    model, x = nn.Linear(16, 4099, bias).to(DEVICE), _rows(2, 512, 16)
    seen: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(x)
            return logits, F.cross_entropy(logits.flatten(0, 1).float(), x.new_zeros(1024).long())

    def graph(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(value for node in gm.graph.nodes if compat.aten_name(node.target) in ("mm", "addmm")
                    for value in (node.meta["val"], *[arg.meta["val"] for arg in node.all_input_nodes]))  # fmt: skip
        return make_boxed_func(gm.forward)

    def padding(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with compat.casts_recorded():
            made = entry._with_operators(gm, inputs, CompileReport())
            return aot_autograd(fw_compiler=graph, bw_compiler=graph)(made, inputs)

    results = []
    for call in (function, torch.compile(function, backend=padding)):
        model.zero_grad()
        rows = x.clone().requires_grad_()
        logits, loss = call(rows)
        (loss + logits.float().square().mean()).backward()
        assert logits.view(-1, 4099).shape == (1024, 4099)
        results.append([logits, loss, rows.grad, *[parameter.grad for parameter in model.parameters()]])
    for ours, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max()))
    assert seen
    assert 4099 not in {size for value in seen for size in value.shape} or not KERNEL_PATH


@pytest.mark.parametrize("columns", [4099, 4096])
def test_gradients_of_padded_logits_are_not_copied_to_be_padded(columns: int, monkeypatch: Any) -> None:
    """They come from another graph, in which the padding is unknown. Others are taken as the release takes them: newer ones with
    the strides of their result."""
    model, x = nn.Linear(16, columns).to(DEVICE), _rows(2, 512, 16)
    strides = []

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        strides.append(inputs[-1].stride())
        return make_boxed_func(gm.forward)

    def compiled(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        return aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward)(gm, inputs)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(x).transpose(0, 1)

    monkeypatch.setattr(compat, "compile_by_inductor", compiled)
    torch.compile(function, backend=entry.backend)(x).sum().backward()
    is_padded = KERNEL_PATH and columns == 4099
    as_results = torch._functorch.config.guess_tangent_strides_as_outputs and not is_padded
    assert strides == [(columns, 512 * columns, 1) if as_results else (2 * columns, columns, 1)]


def test_parts_without_gradients_save_nothing() -> None:
    """Under `torch.no_grad`, and of tensors that are detached."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = F.layer_norm(x, (8,), w)
        return F.layer_norm(x, (8,), w) @ scale.mT + F.layer_norm(x.detach(), (8,), w.detach()) @ scale.mT

    graphs = []
    with mock.patch.object(entry, "fused", lambda gm, fused=entry.fused: (fused(gm), graphs.append(gm))[0]):
        torch.compile(function, backend=Backend())(_rows(4, 8).requires_grad_(), _rows(8).requires_grad_())
    calls = [str(node.args[-1]) for node in graphs[0].graph.nodes if compat.namespace(node.target) == "fusedops"]
    assert ["saves" if " saves " in call else "drops" for call in calls] == ["drops", "saves", "drops"]


def test_parameter_changed_in_place_is_read_in_its_turn() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = F.layer_norm(x, (8,), w)
        w.add_(1)
        return first, F.layer_norm(x, (8,), w)

    x, w = _rows(4, 8), _rows(8)
    one, other = w.clone(), w.clone()
    for found, expected in zip(torch.compile(function, backend=Backend())(x, one), function(x, other), strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.equal(one, other)


def test_graph_that_cannot_be_captured_is_left_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.compiler.allow_in_graph
    def unknown(x: Tensor) -> Tensor:
        return x + 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(unknown(x), (8,), w)

    casts = []

    def compile_(gm: torch.fx.GraphModule, *_: Any) -> Any:
        casts.append(torch.is_autocast_enabled(DEVICE.type))
        return gm.forward

    monkeypatch.setattr(compat, "compile_by_inductor", compile_)
    x, w = _rows(4, 8), _rows(8)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        fusedops.compile(lambda x, w: F.layer_norm(x, (8,), w))(x, w)
        with pytest.warns(RuntimeWarning, match="leaves a graph to Inductor: it calls unknown"):
            found = fusedops.compile(function)(x, w)
        torch.testing.assert_close(found, function(x, w))
    assert casts == [False, True]  # what is left has no casts yet
    assert "a graph is left to Inductor: it calls unknown" in str(fusedops.explain(function, x, w))


def test_parts_of_a_split_stay_together() -> None:
    """A part that nothing else in the region takes is one of its outputs."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, _, v = self.layer(x).chunk(3, -1)
            return q * q, v @ v.mT

    [region] = fusedops.explain(Parts().to(DEVICE), _rows(2, 9, 32)).regions
    assert not region.reason and region.operators == ("add", "split", "mul")


def test_a_sum_of_all_elements_is_no_part_of_a_region() -> None:
    report = fusedops.explain(lambda x, w: F.dropout(x + w, 0.5).sum(), _rows(6, 8), _rows(8).requires_grad_())
    assert [region.operators for region in report.fused] == [("add", "native_dropout")]


def test_smaller_region_is_tried() -> None:
    """A token put before the rows cannot be in the kernel of the norm behind it."""
    backend = Backend()
    w = _rows(8).requires_grad_()

    def function(x: Tensor, token: Tensor) -> Tensor:
        return F.layer_norm(torch.cat([token.expand(len(x), 1, 8), x], 1) * 2, (8,), w)

    x, token = _rows(3, 12, 8), _rows(8)
    torch.testing.assert_close(
        torch.compile(function, backend=backend)(x, token), function(x, token), rtol=1e-4, atol=1e-5
    )
    assert [region.operators for region in backend.report.fused] == [("mul", "native_layer_norm")]


# --- the report and the entry point -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1024, 1040])
def test_long_softmaxes_are_regions(keys: int) -> None:
    """An attention with a soft cap, written out: Inductor reads rows of up to 1024 scores once, too."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = 3 * torch.tanh(query @ key.mT / 3) + mask
        return F.softmax(scores, -1, dtype=torch.float32) @ value

    given = [_rows(2, 2, 3, 8).requires_grad_(), *[_rows(2, 2, keys, 8).requires_grad_() for _ in range(2)]]
    mask = torch.zeros(2, 1, 3, keys, device=DEVICE).masked_fill(_rows(2, 1, 3, keys) < 0, float("-inf"))
    cotangent, backend, results = _rows(2, 2, 3, 8), Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        y = call(*given, mask)
        results.append([y, *torch.autograd.grad(y, given, cotangent)])
    assert [region.operators[-1] for region in backend.report.fused] == ["_softmax"] * (keys > 1024)
    # Sums of up to 1040 terms, of weights that add up to one: a few units of the largest.
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.0, atol=2e-6 * float(eager.detach().abs().max()) + 1e-6)


def test_explain_names_regions_and_reasons() -> None:
    class Two(PostNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 2, 12).transpose(1, 2).softmax(-1)

    report = fusedops.explain(Two(p=0.1).to(DEVICE), _rows(6, 24))
    assert [region.operators for region in report.fused] == [
        ("add", "native_dropout", "native_layer_norm"),
        ("add", "gelu"),
    ]
    dropped, activation = report.fused
    assert dropped.shape == (6, 24) and dropped.saved == 6 * 24 * 4
    # x, residual and y, and for the backward dy, the sum, dx and the residual's gradient; the sum is written, too
    assert dropped.moved == 8 * 6 * 24 * 4
    assert activation.moved == 5 * 6 * 48 * 4 and activation.saved == 6 * 48 * 4
    assert activation.forward == 2 * 6 * 48 * 4 and activation.apart == (4 * 6 + 1) * 48 * 4
    assert {region.reason for region in report.regions} == {
        "", "no gradient is summed over its rows, and no mask is stored"}  # fmt: skip
    assert "2 of 3 row-wise regions are one operator, in 1 graph" in str(report)


def test_through_inductor() -> None:
    """As users call it, with Inductor's kernels around."""
    model, inputs, _ = _built("post-norm")
    cotangent = torch.randn_like(model(*inputs))
    with launch.record() as launches:
        found = _results(fusedops.compile(model, fullgraph=True), model, inputs, cotangent)
    assert bool(launches) == KERNEL_PATH
    _check(found, model, inputs, cotangent, torch.finfo(torch.float32).eps)
