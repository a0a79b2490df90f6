"""`generate` of a fused model: the same tokens, with the fused processor in the place of Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedops
from fusedops.generation import FusedNoRepeatNGramLogitsProcessor
from zoo import SAMPLES, build, inputs, transformers_only

_NAMES = ("gpt2", "bart", "t5", "t5_gated", "llama")


@pytest.mark.parametrize("spec", [s for s in SAMPLES if s.name in _NAMES], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "options", [{}, {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 3, "num_beams": 2}], ids=str
)
def test_the_same_tokens(spec: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(spec)
    arguments = {name: value for name, value in inputs(spec).items() if not name.startswith("decoder")}
    made = []
    original = FusedNoRepeatNGramLogitsProcessor.__call__
    monkeypatch.setattr(FusedNoRepeatNGramLogitsProcessor, "__call__",
                        lambda self, *tensors: made.append(self.ngram_size) or original(self, *tensors))  # fmt: skip
    expected = model.generate(**arguments, max_new_tokens=10, do_sample=False, **options)
    assert not made
    report = fusedops.fuse_model(model)
    assert report.modules[0].rule == "generation"
    assert torch.equal(model.generate(**arguments, max_new_tokens=10, do_sample=False, **options), expected)
    assert set(made) == set(filter(None, [options.get("no_repeat_ngram_size")]))
    made.clear()
    fusedops.unfuse_model(model)
    assert torch.equal(model.generate(**arguments, max_new_tokens=10, do_sample=False, **options), expected)
    assert not made


@transformers_only
def test_it_can_be_left_by_itself() -> None:
    spec = next(s for s in SAMPLES if s.name == "gpt2")
    report = fusedops.fuse_model(build(spec), exclude=["generation"])
    assert report.modules[0].reason == "excluded"
    assert {m.rule for m in report} >= {"gpt2_block", "layer_norm"}
