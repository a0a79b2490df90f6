"""`fusedops.explain` counts what `fusedops.compile` changes besides regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from backends import randn
from fusedops.core.launches import launch
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS = 1024


class Changed(nn.Module):
    """Two attentions with a causal mask and one with a mask of nothing, of keys and values for groups of queries; a sorted batch,
    a small table, and logits that are capped."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.few, self.head = nn.Embedding(4, 16), nn.Linear(32, 4099, bias=False)

    def forward(self, x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.few(torch.arange(x.numel(), device=x.device) % 4)[: x.shape[0]]
        rows = x[order.argsort()]
        q, k, v = (
            layer(rows).view(8, 128, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (heads.repeat_interleave(2, 1) for heads in (k, v))
        places = torch.arange(128, device=x.device)
        causal, nothing = places <= places[:, None], (places >= 0).expand(128, 128)
        asked = rows[:, :1].view(8, 1, 128, 1) < 9  # depends on an input
        for mask in (causal, causal, nothing, asked.expand(8, 1, 128, 128)):
            q = F.scaled_dot_product_attention(q, k, v, mask)
        logits = self.head(q.transpose(1, 2).reshape(_ROWS, 32))
        capped = torch.tanh(logits / 9) * 9
        return F.cross_entropy(capped.float(), order), capped


def test_changes_are_counted() -> None:
    model, order = Changed().to(DEVICE), torch.randperm(_ROWS, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        report = fusedops.explain(model, randn(_ROWS, 16).requires_grad_(), order)
    assert report.changes == {
        "an attention that is causal in the place of its mask": 2,
        "an attention without its mask, which masks nothing": 1,
        "an attention whose mask is made contiguous": 1,
        "an attention of keys and values that are not repeated for groups of queries": 3,
        "one product of the same rows in the place of several": 1,
        "one cast of several parameters": 1,
        "a product with columns padded to a multiple of 64": 1,
        "a returned activation that is computed again in the backward": 1,
        "an embedding of few rows, whose gradient is a matrix product": 1,
        "rows in the order of a sort, whose gradients are put back": 1,
    }
    assert "  changed: 2 x an attention that is causal in the place of its mask\n" in str(report)


def test_each_model_is_explained(fresh_dynamo: None) -> None:
    """More of them than Dynamo compiles of one function."""
    for cols in range(8, 32, 2):
        assert len(fusedops.explain(nn.LayerNorm(cols).to(DEVICE), randn(3, cols)).regions) == 1
    with pytest.raises(
        TypeError, match="explain: model must be a module or a function, got NoneType"
    ):
        fusedops.explain(None)  # type: ignore[arg-type]


def test_nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    assert str(fusedops.explain(doubled, randn(3, 4))) == "no row-wise region was found, in 1 graph"
    monkeypatch.setattr(launch, "runs_kernels", lambda kind: False)
    torch.compiler.reset()
    text = str(fusedops.explain(nn.LayerNorm(4).to(DEVICE), randn(3, 4)))
    assert (
        text
        == f"no row-wise region was found, in 1 graph: there are no kernels for {DEVICE.type} tensors"
    )


def test_a_region_that_triton_cannot_compile_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    specialise = launch.specialise

    def compiled(request: launch.Request, device_index: int) -> launch.Variant:
        if "backward" in request.kernel.fn.__name__:
            raise launch.NotCompiledError(
                "backward_kernel", RuntimeError("PassManager::run failed")
            )
        return specialise(request, device_index)

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "specialise", compiled)
    norm, x = nn.LayerNorm(11).to(DEVICE), randn(6, 11)
    (region,) = fusedops.explain(norm, x).regions
    assert (
        region.reason
        == "Triton cannot compile backward_kernel (RuntimeError: PassManager::run failed)"
    )
    torch.compiler.reset()
    torch.testing.assert_close(fusedops.compile(norm)(x), norm(x))
    torch.compiler.reset()
    with torch.no_grad():  # the forward alone can
        (region,) = fusedops.explain(norm, x).regions
    assert not region.reason


@pytest.mark.parametrize(
    ("cols", "trains"), [(13, "all"), (16, "all"), (16, "linear"), (16, "none")]
)
def test_kernels_are_compiled_once(cols: int, trains: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the graph is made those that the calls run, and no others."""
    specialise, made = launch.specialise, list[str]()

    def compiled(request: launch.Request, device_index: int) -> launch.Variant:
        made.append(request.kernel.fn.__name__)
        return specialise(request, device_index)

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "specialise", compiled)
    model = nn.Sequential(nn.Linear(cols, cols), nn.Dropout(0.25), nn.LayerNorm(cols)).to(DEVICE)
    model.requires_grad_(trains != "none")[2].requires_grad_(trains == "all")
    # As many rows as several programs have, so that their sums are added up.
    run, x = fusedops.compile(model), randn(600, cols)
    with launch.record() as launched:
        y = run(x)
        if trains != "none":
            y.sum().backward()
    assert sorted(made) == sorted(launched) and len(launched) == (1 if trains == "none" else 3)


class _Heads(nn.Module):
    """Queries and keys are parts of one projection, and normalised with heads first."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(48, 3 * 48, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(16), nn.RMSNorm(16)])

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(x).unflatten(-1, (3, 3, 16))
        q, k, v = [part.transpose(1, 2) for part in packed.unbind(2)]
        q, k = self.norms[0](q) * 2, self.norms[1](k) * 2
        return F.scaled_dot_product_attention(q, k, v)


def test_kernels_of_rows_of_several_strides_are_compiled_with_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is copied for them."""
    specialise, made = launch.specialise, list[str]()

    def compiled(request: launch.Request, device_index: int) -> launch.Variant:
        made.append(request.kernel.fn.__name__)
        return specialise(request, device_index)

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "specialise", compiled)
    model, x = _Heads().to(DEVICE), randn(2, 5, 48)
    run = fusedops.compile(model)
    with torch.no_grad(), launch.record() as launched:
        run(x)
    assert made == launched == ["forward_kernel"]  # both norms are one region
    copied: list[Tensor] = []
    contiguous = torch.Tensor.contiguous

    def copy(t: Tensor, **options: Any) -> Tensor:
        # A compiler asks tensors without memory, too, and AOTAutograd asks the model's cotangents for
        # a memory format.
        if type(t) is Tensor and not options and not t.is_contiguous():
            copied.append(t)
        return contiguous(t, **options)

    monkeypatch.setattr(torch.Tensor, "contiguous", copy)
    y = run(x)
    (y * torch.randn_like(y)).sum().backward()
    assert not copied


def test_a_line_for_each_kind_of_region() -> None:
    norms = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)) for _ in range(3)]
    ).to(DEVICE)
    lines = str(fusedops.explain(norms, randn(6, 8))).splitlines()
    size = 6 * 8 * 4 / 1024
    moved, saved = (
        f"{3 * 5 * size:.1f} KiB moved",
        f"{3 * size:.1f} KiB saved",
    )  # x and y; dy, x and dx
    assert (
        lines[0]
        == f"3 of 3 row-wise regions are one operator, in 1 graph: {moved}, {saved} for backward"
    )
    assert len(lines) == 2 and lines[1].startswith(
        f"  3 x (6, 8)  native_layer_norm  {5 * size:.1f} KiB moved, "
    )


def test_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="compile: model must be a module or a function, got int"):
        fusedops.compile(3)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"options": {"nonsense": 1}}, RuntimeError, "Unexpected optimization option nonsense"),
        (
            {"options": {"max_autotune": "yes"}},
            RuntimeError,
            "Unexpected type of attr max_autotune, got str should be bool",
        ),
        (
            {"options": ["max_autotune"]},
            TypeError,
            "compile: options must be a mapping of Inductor's options, got list",
        ),
        ({"mode": "fast"}, RuntimeError, "Unrecognized mode=fast"),
        (
            {"mode": "max-autotune", "options": {"max_autotune": True}},
            RuntimeError,
            "Either mode or options",
        ),
    ],
)
def test_options_are_checked_before_the_first_step(
    given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fusedops.compile(nn.LayerNorm(4), **given)


def test_options_of_inductor_are_taken() -> None:
    for given in (
        {"options": {"max-autotune": True}},
        {"options": {}},
        {"mode": "max-autotune"},
        {"mode": "default"},
    ):
        assert callable(fusedops.compile(nn.LayerNorm(4), **given))  # type: ignore[arg-type]
