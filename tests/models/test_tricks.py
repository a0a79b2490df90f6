"""The name of a trick of `fusedops.models.tricks` in ``exclude`` turns off only this trick."""

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

# What a model calls does not depend on the kernels.
pytestmark = pytest.mark.once

# The tricks that each of some models uses.
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
# A layer of each model that takes rows and a mask.
_LAYERS = {
    "bert": "bert.encoder.layer.0",
    "bart": "model.encoder.layers.0",
    "vit": "vit.layers.0",
    "llama": "model.layers.0.self_attn",
}


@contextmanager
def _recorded_results(
    path: str, condition: Callable[[Any], bool] = lambda result: True
) -> Iterator[list[Any]]:
    """Record the results of a function, by its path, for which a condition holds."""
    module, _, name = path.rpartition(".")
    original = getattr(__import__(module, fromlist=[name]), name)
    results: list[Any] = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if condition(result):
            results.append(result)
        return result

    with mock.patch(path, recording):
        yield results


def _contiguous_masks(model: nn.Module, spec: ModelSpec) -> int:
    """Return how many expanded masks PyTorch's attention gets as contiguous ones."""
    if spec.name not in _LAYERS:
        return 0
    layer = model.get_submodule(_LAYERS[spec.name])
    width = next(child for child in layer.modules() if isinstance(child, nn.Linear)).in_features
    mask = (torch.arange(5, device=DEVICE) != 2)[None, None, :, None].expand(2, 1, 5, 5)
    attention, count = nn.functional.scaled_dot_product_attention, 0

    def counting(*args: Any, attn_mask: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += attn_mask.stride(-1) == 1
        return attention(*args, attn_mask=attn_mask, **kwargs)

    others = {}
    if spec.name == "llama":
        others["position_embeddings"] = torch.ones(2, 1, 5, 16, device=DEVICE)
    with making_kernels(), mock.patch("torch.nn.functional.scaled_dot_product_attention", counting):
        layer(torch.randn(2, 5, width, device=DEVICE), attention_mask=mask, **others)
    return count


def _measured(spec: ModelSpec, exclude: tuple[str, ...]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return how often each trick is used, and the report and the operators of the model."""
    model, tricks = undropped(spec), Counter(dict.fromkeys(TRICKS, 0))
    report = fusedops.fuse_model(model, exclude=exclude)
    with (
        making_kernels(),
        torch.autocast(DEVICE.type, torch.bfloat16),
        _recorded_results("fusedops.models.tricks.packing.packed_linear") as packs,
        # These casts are of feed-forward parts. An attention casts its packed layers.
        _recorded_results(
            "fusedops.models.tricks.casts.cast_stacks", lambda result: result is not None
        ) as casts,
        _recorded_results("fusedops.models.tricks.packing._cast") as cast_with_packed,
        counted() as operators,
    ):
        model(**inputs(spec))
    if cast_with_packed:
        assert not {"casts", "packing"} & {*exclude}
    tricks.update(packing=len(packs), casts=len(casts), masks=_contiguous_masks(model, spec))
    if "t5_attention" in spec.rules.values():
        arguments = {
            name: value for name, value in inputs(spec).items() if not name.startswith("decoder")
        }
        with _recorded_results("fusedops.models.tricks.one_token._next_token") as tokens:
            model.eval().generate(**arguments, max_new_tokens=3, do_sample=False)
        tricks["one_token"] = len(tokens)
    return dict(tricks), {"report": report, "operators": operators}


@pytest.mark.parametrize("spec", _SOME, ids=lambda spec: spec.name)
def test_exclude_turns_off_only_the_named_trick(spec: ModelSpec) -> None:
    """Other tricks, the report and the operators do not change."""
    counts, others = _measured(spec, exclude=())
    assert {name for name, count in counts.items() if count} == _USED[spec.name]
    for trick in sorted(TRICKS):
        counts_without, others_without = _measured(spec, exclude=(trick,))
        assert counts_without == {**counts, trick: 0}, trick
        assert others_without == others


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "bert"], ids=lambda spec: spec.name
)
def test_trick_is_on_or_off_for_each_model_and_its_copies(spec: ModelSpec) -> None:
    """The models have the same classes."""
    with_trick, without_trick = build(spec), build(spec)
    fusedops.fuse_model(with_trick)
    fusedops.fuse_model(without_trick, exclude=["masks"])
    for model, is_on in (
        (with_trick, True),
        (without_trick, False),
        (copy.deepcopy(without_trick), False),
        (pickle.loads(pickle.dumps(without_trick)), False),
        (pickle.loads(pickle.dumps(with_trick)), True),
    ):
        assert bool(_contiguous_masks(model, spec)) is is_on
    fusedops.unfuse_model(without_trick)
    fusedops.fuse_model(without_trick)
    assert _contiguous_masks(without_trick, spec)
