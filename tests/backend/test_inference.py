"""`fusedops.compile` without gradients: small regions are left, and decoders with a static cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from backends import Backend, randn
from fusedops.backend import prediction, selection
from support import DEVICE
from zoo import transformers_only

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS, _COLS = 6, 16


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
    """The same norm of many products, which is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([_Norm() for _ in range(5)])
        self.products = nn.ModuleList([nn.Linear(_COLS, _COLS, bias=False) for _ in range(5)])

    def forward(self, x: Tensor) -> list[Tensor]:
        pairs = zip(self.norms, self.products, strict=True)
        return [norm(product(x)) for norm, product in pairs]


# Each model, the time of a call of an operator relative to that of a kernel, whether gradients are
# on, and the number of regions that become operators. A short time stands for a large tensor.
CASES: dict[str, tuple[Callable[[], nn.Module], float, bool, int]] = {
    "small": (_Norm, 0.15, False, 0),
    "large": (_Norm, 0.05, False, 1),
    "with gradients": (_Norm, 0.15, True, 1),
    "function of rowwise": (lambda: _Norm("rowwise"), 0.15, False, 1),
    "dropout": (lambda: _Norm("dropout"), 0.15, False, 0),
    "large dropout": (lambda: _Norm("dropout"), 0.05, False, 1),
    "slices": (_Slices, 0.15, False, 5),
}


@pytest.mark.parametrize("name", CASES)
def test_small_regions_are_left_in_inference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model, call, has_gradients, count = CASES[name]
    rates = replace(prediction.RATES, kernels=1e-6, calls=call * 1e-6)
    monkeypatch.setattr(prediction, "RATES", rates)
    prepared: list[Any] = []
    prepare = selection.prepare

    def counting(programs: Sequence[Any], receives: Any) -> list[str]:
        prepared.extend(programs)
        return prepare(programs, receives)

    monkeypatch.setattr(selection, "prepare", counting)
    with nullcontext() if has_gradients else torch.no_grad():
        report = fusedops.explain(make_model().to(DEVICE), randn(_ROWS, _COLS))
    assert len(report.fused) == count
    assert len(prepared) == (count == 1)  # kernels are compiled
    if not count:
        (region,) = report.regions
        assert region.reason == "Inductor is predicted to be as fast"
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
