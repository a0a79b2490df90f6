"""Each trick of `fusedops.models.tricks` is turned off by its name in ``exclude``, and nothing else is."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fusedops
from fusedops.models.tricks import TRICKS
from sample_models import ModelSpec
from support import DEVICE
from zoo import SAMPLES, build, counted, inputs, making_kernels, undropped

# What a model does does not depend on the kernels.
pytestmark = pytest.mark.once

# What each of some models uses.
_USED = {
    "bert": {"masks", "packing", "casts"},
    "bart": {"masks", "packing", "casts"},
    "vit": {"masks", "packing", "casts"},
    "t5": {"packing", "casts", "one_token"},
    "t5_gated": {"packing", "casts", "one_token"},
    "torch_pre_norm": {"casts"},
    "llama": set[str](),
}
_SOME = [spec for spec in SAMPLES if spec.name in _USED]
# A layer of each that takes rows and a mask.
_LAYERS = {
    "bert": "bert.encoder.layer.0",
    "bart": "model.encoder.layers.0",
    "vit": "vit.layers.0",
    "llama": "model.layers.0.self_attn",
}


@contextmanager
def _calls(path: str, of: Callable[[Any], bool] = lambda result: True) -> Iterator[list[Any]]:
    """The calls of a function whose result is so."""
    module, _, name = path.rpartition(".")
    original = getattr(__import__(module, fromlist=[name]), name)
    seen: list[Any] = []

    def calling(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        seen.extend([result] if of(result) else [])
        return result

    with mock.patch(path, calling):
        yield seen


def _masks(model: nn.Module, spec: ModelSpec) -> int:
    """How many expanded masks reach PyTorch's attention laid out."""
    if spec.name not in _LAYERS:
        return 0
    layer = model.get_submodule(_LAYERS[spec.name])
    width = next(child for child in layer.modules() if isinstance(child, nn.Linear)).in_features
    mask = (torch.arange(5, device=DEVICE) != 2)[None, None, :, None].expand(2, 1, 5, 5)
    attend, count = nn.functional.scaled_dot_product_attention, 0

    def attended(*args: Any, attn_mask: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += attn_mask.stride(-1) == 1
        return attend(*args, attn_mask=attn_mask, **kwargs)

    others = (
        {"position_embeddings": torch.ones(2, 1, 5, 16, device=DEVICE)}
        if spec.name == "llama"
        else {}
    )
    with making_kernels(), mock.patch("torch.nn.functional.scaled_dot_product_attention", attended):
        layer(torch.randn(2, 5, width, device=DEVICE), attention_mask=mask, **others)
    return count


def _measured(spec: ModelSpec, exclude: tuple[str, ...]) -> tuple[dict[str, int], dict[str, Any]]:
    """How often each trick is done, and what else there is to compare."""
    model, tricks = undropped(spec), Counter(dict.fromkeys(TRICKS, 0))
    report = fusedops.fuse_model(model, exclude=exclude)
    with (
        making_kernels(),
        torch.autocast(DEVICE.type, torch.bfloat16),
        _calls("fusedops.models.tricks.packing.packed_linear") as packs,
        # Of feed-forward parts: those of an attention are of its packed layers.
        _calls(
            "fusedops.models.tricks.casts.cast_stacks", lambda result: result is not None
        ) as casts,
        _calls("fusedops.models.tricks.packing._cast") as cast_with_packed,
        counted() as operators,
    ):
        model(**inputs(spec))
    assert not cast_with_packed or not {"casts", "packing"} & {*exclude}
    tricks.update(packing=len(packs), casts=len(casts), masks=_masks(model, spec))
    if "t5_attention" in spec.rules.values():
        arguments = {
            name: value for name, value in inputs(spec).items() if not name.startswith("decoder")
        }
        with _calls("fusedops.models.tricks.one_token._next_token") as tokens:
            model.eval().generate(**arguments, max_new_tokens=3, do_sample=False)
        tricks["one_token"] = len(tokens)
    return dict(tricks), {"report": report, "operators": operators}


@pytest.mark.parametrize("spec", _SOME, ids=lambda spec: spec.name)
def test_each_is_turned_off_alone(spec: ModelSpec) -> None:
    on, others = _measured(spec, ())
    assert {name for name, count in on.items() if count} == _USED[spec.name]
    for trick in sorted(TRICKS):
        off, result = _measured(spec, (trick,))
        assert off == {**on, trick: 0}, trick
        assert result == others


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "bert"], ids=lambda spec: spec.name
)
def test_one_model_has_it_and_another_has_not(spec: ModelSpec) -> None:
    """The models have the same classes. A copy or pickle of a model is like the model."""
    with_it, without = build(spec), build(spec)
    fusedops.fuse_model(with_it)
    fusedops.fuse_model(without, exclude=["masks"])
    for model, laid_out in (
        (with_it, True),
        (without, False),
        (copy.deepcopy(without), False),
        (pickle.loads(pickle.dumps(without)), False),
        (pickle.loads(pickle.dumps(with_it)), True),
    ):
        assert bool(_masks(model, spec)) is laid_out
    fusedops.unfuse_model(without)
    fusedops.fuse_model(without)
    assert _masks(without, spec)
