"""`fusedops.compile` without gradients: small regions are left, and decoders with a static cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from backends import Backend, randn
from fusedops.backend import selection
from support import DEVICE
from zoo import transformers_only

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS, _COLS = 6, 16
# The region of a norm without a bias reads and writes rows, and reads a weight.
_BYTES = (2 * _ROWS * _COLS + _COLS) * 4


@fusedops.rowwise
def _normalised(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (_COLS,), weight)


class _Norm(nn.Module):
    """A norm, as one of PyTorch's operators, as a function of `rowwise`, or behind a dropout."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.ones(_COLS)), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "rowwise":
            return _normalised(x, self.weight)
        return F.rms_norm(F.dropout(x, 0.5, self.form == "dropout"), (_COLS,), self.weight)


class _Slices(nn.Module):
    """The same norm of many inputs, which is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([_Norm() for _ in range(5)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [norm(x.roll(k, 0)) for k, norm in enumerate(self.norms)]


# Each model, the limit of the bytes below which a region is left, whether gradients are on, and the
# number of regions that become operators.
CASES: dict[str, tuple[Callable[[], nn.Module], int, bool, int]] = {
    "small": (_Norm, _BYTES + 1, False, 0),
    "large": (_Norm, _BYTES, False, 1),
    "with gradients": (_Norm, _BYTES + 1, True, 1),
    "function of rowwise": (lambda: _Norm("rowwise"), _BYTES + 1, False, 1),
    "dropout": (lambda: _Norm("dropout"), _BYTES + 1, False, 1),
    "slices": (_Slices, _BYTES + 1, False, 5),
}


@pytest.mark.parametrize("name", CASES)
def test_small_regions_are_left_in_inference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model, limit, has_gradients, count = CASES[name]
    monkeypatch.setattr(selection, "BYTES_OF_LAUNCH", limit)
    prepared, prepare = [], selection.prepare
    monkeypatch.setattr(selection, "prepare", lambda *args: prepared.append(prepare(*args)))
    with nullcontext() if has_gradients else torch.no_grad():
        report = fusedops.explain(make_model().to(DEVICE), randn(_ROWS, _COLS))
    assert len(report.fused) == count
    assert len(prepared) == (name not in ("small", "slices"))  # kernels are compiled
    if not count:
        (region,) = report.regions
        assert region.reason.startswith("it has no gradient, and is so small")
        assert "kernel (Inductor is as fast; mode='reduce-overhead' saves" in str(report)
        assert not region.moved


@transformers_only
def test_decoder_with_a_static_cache_generates_what_eager_does() -> None:
    """`generate` compiles the step of one token: one graph, whose caches are changed in place."""
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model: Any = LlamaForCausalLM(config).to(DEVICE).eval()
    prompts = torch.randint(3, 64, (2, 5), device=DEVICE)
    options = {"cache_implementation": "static", "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompts, **options, disable_compile=True)
    backend = Backend()

    # `CompileConfig` copies objects, but not functions.
    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return backend(gm, inputs)

    compiling = CompileConfig(backend=compile_graph, mode=None, fullgraph=True)  # type: ignore[arg-type]
    compiling._compile_all_devices = True  # by default only on GPUs
    tokens = model.generate(prompts, **options, compile_config=compiling)
    assert torch.equal(tokens, expected)
    assert backend.report.graphs == 1
    change = "an attention of keys and values that are not repeated for groups of queries"
    assert backend.report.changes == {change: 2}
