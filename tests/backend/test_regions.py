"""`fusedops.compile`: values, gradients, masks, and which regions become operators.

Inductor takes seconds for each graph. So most tests run graphs as AOTAutograd returns them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import Backend, PostNorm, check, randn, results
from fusedops.core.launches import launch
from support import DEVICE, KERNEL_PATH, torch_version

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class PreNorm(nn.Module):
    """A pre-norm block like Llama's, with a norm of heads and rotary embeddings."""

    def __init__(self, width: int = 32, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.mix = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, 48), (width, 48), (48, width))
        )
        self.norm_of_heads = nn.RMSNorm(head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.mix[0](self.norms[0](x)).unflatten(-1, (-1, self.head)).transpose(1, 2)
        heads = self.norm_of_heads(heads)
        first, second = heads.chunk(2, -1)
        heads = heads * cos + torch.cat([-second, first], -1) * sin
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        x = x + self.mix[1](mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return self.norms[2](x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Adaptive(nn.Module):
    """A block of a diffusion transformer: all rows of an image share a scale, a shift and a gate."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.modulation, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(c)).unsqueeze(1).chunk(3, -1)
        return x + gate * self.mlp(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)


# Each model with its inputs and the number of its regions.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int]] = {
    "post-norm": (PostNorm, lambda: (randn(3, 5, 24),), 2),
    "pre-norm": (PreNorm, lambda: (randn(2, 6, 32), randn(6, 8), randn(6, 8)), 4),
    "adaptive": (Adaptive, lambda: (randn(3, 20, 16), randn(3, 16)), 2),
    "embeddings": (
        lambda: nn.Sequential(nn.Embedding(9, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
        lambda: (torch.arange(9, device=DEVICE).view(3, 3),),
        1,
    ),
}


every = pytest.mark.parametrize("name", MODELS)


def _built(name: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """Return a model with random parameters, its inputs, and the number of its regions."""
    make_model, make_inputs, region_count = MODELS[name]
    model = make_model().to(DEVICE)
    # The parameters of a new norm are ones and zeros, which would hide errors.
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.5 if parameter.dim() == 1 else 0.0, std=0.4)
    return model, make_inputs(), region_count


@every
def test_values_and_gradients_of_fused_models_are_exact(name: str) -> None:
    model, inputs, region_count = _built(name)
    cotangent = torch.randn_like(model(*inputs))
    backend = Backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with launch.record() as launches:
        result = results(compiled, model, inputs, cotangent)
    assert len(backend.report.fused) == region_count
    assert backend.report.graphs == 1
    assert not backend.report.left
    assert sum("forward" in kernel for kernel in launches) >= region_count
    assert any("backward" in kernel for kernel in launches)
    check(result, model, inputs, cotangent, torch.finfo(torch.float32).eps)


def test_regions_contain_the_casts_of_autocast() -> None:
    """Parts with autocast disabled keep their precision when the graph runs under autocast."""

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
    x = randn(3, 5, 24)
    cotangent = torch.randn_like(model(x))
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        result = results(compiled, model, (x,), cotangent)
        # Triton's interpreter truncates where a GPU rounds.
        check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    assert len(backend.report.fused) == 3
    names = {name for region in backend.report.fused for name in region.operators}
    assert {"_to_copy", "native_layer_norm"} <= names


def test_parts_without_autocast_keep_their_precision() -> None:
    """A product in fp32 stays in fp32, forward and backward, while the graph runs under autocast."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, enabled=False):
            return x @ w

    x, w = randn(16, 16), randn(16, 16).requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = torch.compile(function, backend=Backend())(x, w)
        (dw,) = torch.autograd.grad(y, w, torch.ones_like(y))
    assert y.dtype == dw.dtype == torch.float32
    # A dot product of n terms in fp32 has an error of at most n units of the sum of magnitudes.
    unit = 16 * torch.finfo(torch.float32).eps
    y_error = (y.double() - x.double() @ w.double()).abs()
    assert (y_error <= unit * (x.abs() @ w.abs())).all()
    dw_error = (dw.double() - x.double().sum(0)[:, None]).abs()
    assert (dw_error <= unit * x.abs().sum(0)[:, None]).all()


@pytest.fixture
def autocast_of_gpus() -> Iterator[None]:
    """Makes autocast compute LayerNorm in fp32 on CPUs, too, as it does on GPUs."""
    if DEVICE.type == "cuda":
        yield
        return
    key = torch._C.DispatchKey.AutocastCPU

    def in_fp32(x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return torch.native_layer_norm(x.float(), shape, weight.float(), bias.float(), eps)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("native_layer_norm", in_fp32, key.name)
        yield


@pytest.mark.usefixtures("autocast_of_gpus")
def test_regions_without_autocast_keep_their_dtype() -> None:
    """A LayerNorm in bf16, in a part where autocast is disabled, stays in bf16."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.randn(24)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            with torch.autocast(DEVICE.type, enabled=False):
                return F.layer_norm(x, (24,), weight, bias)

    model, x = Norm().to(DEVICE), randn(3, 5, 24).bfloat16()
    backend = Backend()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cotangent = torch.randn_like(model(x))
        result = results(torch.compile(model, backend=backend), model, (x,), cotangent)
        # Triton's interpreter truncates where a GPU rounds.
        check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    assert len(backend.report.fused) == 1


def _biased(x: Tensor, up: nn.Linear) -> Tensor:
    return F.layer_norm(up(x), (24,))


def _concatenated(x: Tensor, up: nn.Linear) -> Tensor:
    first, second = F.layer_norm(x @ up.weight * up.bias, (24,)).float().chunk(2, -1)
    return torch.cat([first.sin(), second], -1).to(x.dtype)


@pytest.mark.parametrize("norm", [_biased, _concatenated])
def test_regions_before_a_head_with_a_loss_have_gradients(norm: Callable[..., Tensor]) -> None:
    """Their norms have no weight: all gradients pass through a sum or casts that passes add."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(24, 24), nn.Linear(24, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(norm(x, self.up)), labels)

    model = Classifier().to(DEVICE, torch.bfloat16)
    x, labels = randn(6, 24).bfloat16(), torch.arange(6, device=DEVICE) % 5
    backend = Backend()
    cotangent = torch.ones((), device=DEVICE)
    result = results(torch.compile(model, backend=backend), model, (x, labels), cotangent)
    check(result, model, (x, labels), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    assert len(backend.report.fused) == 1


def _drops(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x + bias, 0.25) + residual


def test_dropout_mask_is_recomputed_in_the_backward() -> None:
    """The output and the gradients have the same mask, which is not saved."""
    x, residual, bias = randn(64, 40), randn(64, 40), randn(40)
    for t in (x, residual, bias):
        t.requires_grad_()
    backend = Backend()
    compiled = torch.compile(_drops, backend=backend)
    torch.manual_seed(1)
    y = compiled(x, bias, residual)
    keep_mask = ((y - residual).abs() > 1e-6).double()
    standard_deviation = (0.25 * 0.75 / keep_mask.numel()) ** 0.5
    assert abs(keep_mask.mean() - 0.75) < 5 * standard_deviation
    cotangent = torch.randn_like(y)
    assert "native_dropout" in backend.report.fused[0].operators
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), cotangent)
    torch.testing.assert_close(dx, cotangent * keep_mask.float() / 0.75, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(dbias, dx.sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(dresidual, cotangent)
    assert sum(t.numel() == x.numel() for t in backend.saved) == 1  # only the output
    torch.manual_seed(1)
    assert torch.equal(compiled(x, bias, residual), y)
    assert not torch.equal(compiled(x, bias, residual), y)


def test_two_dropouts_of_one_graph_have_different_masks() -> None:
    def function(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x + bias, 0.5), F.dropout((x @ x.mT) + bias, 0.5)

    first, second = torch.compile(function, backend=Backend())(
        torch.ones(64, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    )
    assert not torch.equal(first == 0, second == 0)


def test_evaluation_mode_drops_nothing() -> None:
    model = PostNorm(p=0.5).to(DEVICE).eval()
    x = randn(3, 24)
    torch.testing.assert_close(torch.compile(model, backend=Backend())(x), model(x))


def test_checkpointing_saves_only_inputs() -> None:
    """Values and gradients have the bits of those without checkpointing.

    On a GPU dropout draws from another random state, so the bits differ.
    """
    model, results = PostNorm(p=0.5).to(DEVICE), []
    x = randn(16, 24).requires_grad_()
    for is_checkpointed in (False, True):
        backend = Backend()
        torch.manual_seed(2)
        function = functools.partial(checkpoint, model, use_reentrant=False)
        y = torch.compile(function if is_checkpointed else model, backend=backend)(x)
        results.append((y, *torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y))))
        assert len(backend.report.fused) == 2
        # Tensors of full size that the forward returns, among them the output itself.
        full_count = sum(t.dtype == x.dtype and t.numel() >= x.numel() for t in backend.saved)
        if is_checkpointed:
            assert full_count == 1
        else:
            assert full_count > 2
    if DEVICE.type == "cpu":
        assert all(map(torch.equal, *results))


def test_checkpointing_recomputes_the_same_dropout_mask() -> None:
    """The output and the gradients of the recomputed part have the same mask."""
    x, bias, residual = randn(64, 40).requires_grad_(), randn(40).requires_grad_(), randn(64, 40)
    compiled = torch.compile(
        lambda *args: checkpoint(_drops, *args, use_reentrant=False), backend=Backend()
    )
    y = compiled(x, bias, residual)
    keep_mask = ((y - residual).abs() > 1e-6).float()
    cotangent = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, cotangent)
    torch.testing.assert_close(dx, cotangent * keep_mask / 0.75, rtol=1e-6, atol=0.0)


# --- graphs ---------------------------------------------------------------------------------------


def test_one_graph_serves_all_lengths() -> None:
    model, _, region_count = _built("post-norm")
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    for batch, length in ((3, 5), (2, 9), (7, 4)):
        x = randn(batch, length, 24)
        torch._dynamo.mark_dynamic(x, (0, 1))
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert backend.report.graphs == 1
    assert len(backend.report.fused) == region_count


@pytest.mark.parametrize(
    "make_rows",
    [
        lambda x, first: torch.cat([first.expand(x.shape[0], -1, -1), x], 1),
        lambda x, _: x.reshape(-1, 24),
        lambda x, _: x[:, : x.shape[1] // 2].cumsum(0),
        pytest.param(lambda x, _: torch.cat([x, x.cumsum(0)], 1), marks=pytest.mark.full),
        pytest.param(
            lambda x, first: torch.cat([x, first.expand(x.shape[0], -1, -1)], 1).flatten(0, 1),
            marks=pytest.mark.full,
        ),
    ],
    ids=["class-token", "flattened", "half", "twice", "flattened-with-token"],
)
def test_number_of_rows_that_is_an_expression_of_sizes_is_fused(
    make_rows: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Each graph has as many fused regions as the first, also for sizes of one."""
    token, (model, _, region_count) = randn(1, 1, 24).requires_grad_(), _built("post-norm")
    leaves = [token, *model.parameters()]
    backend = Backend()

    def function(x: Tensor) -> Tensor:
        return model(make_rows(x, token))  # type: ignore[no-any-return]

    compiled = torch.compile(function, backend=backend)
    for batch, length in ((3, 6), (4, 6), (5, 8), (1, 8), (2, 2)):
        x = randn(batch, length, 24)
        cotangent = torch.randn_like(function(x))
        our_gradients, eager_gradients = [
            torch.autograd.grad(call(x), leaves, cotangent, allow_unused=True)
            for call in (compiled, function)
        ]
        for ours, eager in zip(our_gradients, eager_gradients, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
        assert len(backend.report.fused) == region_count * backend.report.graphs
    assert not [region.reason for region in backend.report.regions if region.reason]


def test_number_of_rows_as_a_factor_is_not_a_constant_of_the_kernel() -> None:
    w = randn(8).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), w) * x.shape[0]

    compiled = torch.compile(function, backend=Backend())
    for rows in (3, 5):
        x = randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-5)


def test_inference_saves_nothing() -> None:
    model, inputs, _ = _built("post-norm")
    backend = Backend()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, backend=backend)(*inputs), model(*inputs), rtol=1e-4, atol=1e-5
        )
    assert len(backend.saved) == 1


def test_all_parts_of_a_split_are_in_one_region() -> None:
    """A part that no operator of the region reads is an output of the region."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, _, v = self.layer(x).chunk(3, -1)
            return q * q, v @ v.mT

    [region] = fusedops.explain(Parts().to(DEVICE), randn(2, 9, 32)).regions
    assert not region.reason and region.operators == ("add", "split", "mul")


def test_sum_of_all_elements_is_not_in_a_region() -> None:
    report = fusedops.explain(
        lambda x, w: F.dropout(x + w, 0.5).sum(), randn(6, 8), randn(8).requires_grad_()
    )
    assert [region.operators for region in report.fused] == [("add", "native_dropout")]


def test_smaller_region_is_fused_if_the_whole_cannot_be() -> None:
    """A kernel of the norm cannot put a token before the rows."""
    backend = Backend()
    w = randn(8).requires_grad_()

    def function(x: Tensor, token: Tensor) -> Tensor:
        return F.layer_norm(torch.cat([token.expand(len(x), 1, 8), x], 1) * 2, (8,), w)

    x, token = randn(3, 24, 8), randn(8)
    torch.testing.assert_close(
        torch.compile(function, backend=backend)(x, token), function(x, token), rtol=1e-4, atol=1e-5
    )
    assert [region.operators for region in backend.report.fused] == [("mul", "native_layer_norm")]


# --- the report and the entry point ---------------------------------------------------------------


@pytest.mark.parametrize("keys", [1024, 1040])
def test_long_softmaxes_are_regions(keys: int) -> None:
    """The function is an attention with a soft cap, in elementary operators.

    Shorter softmaxes are left, because Inductor, too, reads rows of up to 1024 scores once.
    """

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = 3 * torch.tanh(query @ key.mT / 3) + mask
        return F.softmax(scores, -1, dtype=torch.float32) @ value

    inputs = [
        randn(2, 2, 3, 8).requires_grad_(),
        *[randn(2, 2, keys, 8).requires_grad_() for _ in range(2)],
    ]
    mask = torch.zeros(2, 1, 3, keys, device=DEVICE).masked_fill(
        randn(2, 1, 3, keys) < 0, float("-inf")
    )
    cotangent, backend, results = randn(2, 2, 3, 8), Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        y = call(*inputs, mask)
        results.append([y, *torch.autograd.grad(y, inputs, cotangent)])
    last_operators = [region.operators[-1] for region in backend.report.fused]
    assert last_operators == (["_softmax"] if keys > 1024 else [])
    # Sums of up to 1040 terms, of weights that add up to one: a few units of the largest.
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, eager, rtol=0.0, atol=2e-6 * float(eager.detach().abs().max()) + 1e-6
        )


def test_explain_names_regions_and_reasons() -> None:
    class Two(PostNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 2, 12).transpose(1, 2).softmax(-1)

    report = fusedops.explain(Two(p=0.1).to(DEVICE), randn(6, 24).requires_grad_())
    assert [region.operators for region in report.fused] == [
        ("add", "native_dropout", "native_layer_norm"),
        ("add", "gelu"),
    ]
    norm, activation = report.fused
    norm_bytes, activation_bytes = 6 * 24 * 4, 6 * 48 * 4  # of one tensor of the region's shape
    assert norm.shape == (6, 24)
    assert norm.saved == norm_bytes
    # The forward moves x, residual, y and the sum; the backward moves dy, the sum, dx and dresidual.
    assert norm.moved == 8 * norm_bytes
    assert activation.moved == 5 * activation_bytes
    assert activation.saved == activation_bytes
    assert activation.forward == 2 * activation_bytes
    bias_bytes = 48 * 4
    assert activation.unfused == 4 * activation_bytes + bias_bytes
    assert {region.reason for region in report.regions} == {
        "",
        "Inductor is predicted to be as fast",
    }
    assert "2 of 3 row-wise regions are fused: 2 operators in 1 graph" in str(report)


@pytest.mark.parametrize(("trains", "saved"), [(False, 1), (True, 2)])
def test_only_what_wanted_gradients_read_is_saved(trains: bool, saved: int) -> None:
    """A rotation reads its angles in the backward, and rows for the angles' gradients alone."""

    def rotation(x: Tensor, cos: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * cos

    x, cos = randn(6, 8).requires_grad_(), randn(6, 8).requires_grad_(trains)
    (region,) = fusedops.explain(rotation, x, cos, rest="eager").fused
    assert region.program is not None
    assert len(region.program.plan.saved_inputs) == saved
    assert region.saved == saved * 6 * 8 * 4
    compiled = fusedops.compile(rotation, rest="eager")
    cotangent = torch.randn_like(x)
    result, dx = _step(compiled, x, cos, cotangent)
    expected, expected_dx = _step(rotation, x.double(), cos.double(), cotangent.double())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(dx.double(), expected_dx, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(compiled(x, cos), result)


def _step(
    function: Callable[..., Tensor], x: Tensor, cos: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result of a function, and the gradient of x."""
    result = function(x, cos)
    (dx,) = torch.autograd.grad(result, x, cotangent)
    return result.detach(), dx


def test_values_and_gradients_with_inductor_are_exact() -> None:
    """This is the way users call it: Inductor compiles the rest of the graph."""
    model, inputs, _ = _built("post-norm")
    cotangent = torch.randn_like(model(*inputs))
    with launch.record() as launches:
        result = results(fusedops.compile(model, fullgraph=True), model, inputs, cotangent)
    assert bool(launches) == KERNEL_PATH
    check(result, model, inputs, cotangent, torch.finfo(torch.float32).eps)


class _Language(nn.Module):
    """Two layers, logits from the embedding, and a parameter whose only use is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(12, 24), nn.ModuleList([PostNorm(), PostNorm()])
        self.gain, self.detached = nn.Parameter(torch.ones(24)), nn.Parameter(torch.ones(24))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        normed = F.layer_norm(x, (24,))
        return F.linear(normed * self.gain, self.table.weight), (normed * self.detached).detach()


def _freeze_a_layer(model: _Language) -> None:
    model.layers[0].requires_grad_(False)


def _load_state(model: _Language) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def _convert_to_fp64(model: _Language) -> None:
    model.double()
    # Older releases run the graph from before the change, with any backend: see docs/versions.md.
    if torch_version() < (2, 13):
        torch._dynamo.reset()


def _resize_embedding(model: _Language) -> None:
    model.table = nn.Embedding.from_pretrained(
        torch.cat([model.table.weight.detach()] * 2), freeze=False
    )


def _tie_weights(model: _Language) -> None:
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change", [_freeze_a_layer, _load_state, _convert_to_fp64, _resize_embedding, _tie_weights]
)
def test_training_continues_as_in_eager_mode_after_a_change_of_the_model(
    change: Callable[[_Language], None],
) -> None:
    """AdamW has weight decay, which changes parameters with zero gradients, but not those with None."""

    def trained(backend: Backend | None) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = _Language().to(DEVICE)
        call = model if backend is None else torch.compile(model, backend=backend)
        ids = torch.arange(8, device=DEVICE).view(2, 4)
        for step in range(5):
            if step == 2:
                change(model)
            if step in (0, 2):
                optimizer = torch.optim.AdamW(
                    model.parameters(), lr=0.01, weight_decay=0.3, eps=0.01
                )
            optimizer.zero_grad()
            logits, _ = call(ids)
            F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        return model.state_dict()

    backend = Backend()
    result, expected = trained(backend), trained(None)
    assert backend.report.fused and not backend.report.left
    # Gradients differ by some roundings of fp32, 1e-6 of their size; eps of the optimizer keeps
    # small ones from being enlarged.
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5, msg=name)
