"""The logits processors replace those of Hugging Face's Transformers, also within ``generate``."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops.core.launches import launch
from fusedops.core.spec import Sample, Spec
from fusedops.generation import FusedNoRepeatNGramLogitsProcessor
from support import DEVICE, EXACT_SPECS, INTERPRETED, Case, as_tuple, cases


def _transformers() -> Any:
    return pytest.importorskip("transformers")


def _is_supported_by_transformers(spec: Spec, sample: Sample) -> bool:
    """Selects samples that Transformers' processor accepts.

    It has no further options, and accepts no 32-bit tokens and none outside of the vocabulary.
    """
    plain = sample.options.keys() == {"ngram_size"} and sample.tensors["allowed"] is None
    return plain and "int32" not in sample.name and "outside" not in sample.name


@cases((torch.float32,), _is_supported_by_transformers, EXACT_SPECS)
def test_bans_what_transformers_bans(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    ids, scores = sample.tensors["input_ids"], sample.tensors["scores"]
    n = sample.options["ngram_size"]
    want = _transformers().NoRepeatNGramLogitsProcessor(n)(ids, scores.clone())
    assert torch.equal(FusedNoRepeatNGramLogitsProcessor(n)(ids, scores), want)
    assert torch.equal(as_tuple(spec.call(**sample.tensors, ngram_size=n))[0], want)


# --- the processor --------------------------------------------------------------------------------


def _inputs(rows: int = 4, length: int = 30, cols: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(cols, (rows, length), generator=generator)
    return ids.to(DEVICE), torch.randn(rows, cols, generator=generator).to(DEVICE)


def test_constructor_has_the_arguments_of_transformers() -> None:
    ours = inspect.signature(FusedNoRepeatNGramLogitsProcessor.__init__).parameters
    theirs = inspect.signature(_transformers().NoRepeatNGramLogitsProcessor.__init__).parameters
    positional = [name for name, p in ours.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == list(theirs)
    assert (
        FusedNoRepeatNGramLogitsProcessor(3).ngram_size
        == _transformers().NoRepeatNGramLogitsProcessor(3).ngram_size
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 9},
        {"allowed": (0, 3, 11)},
        {"prompt_length": 20},
        {"pad_token_id": 4},
        {"window": 20, "allowed": [5], "prompt_length": 3, "pad_token_id": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_options_reach_the_functional(options: dict[str, Any], inplace: bool) -> None:
    ids, scores = _inputs()
    ids[:, :3] = 4
    expected = dict(options)
    if "allowed" in options:
        expected["allowed"] = torch.zeros(12, dtype=torch.bool, device=DEVICE)
        expected["allowed"][list(options["allowed"])] = True
    want = fusedops.no_repeat_ngram(ids, scores, 1, **expected)
    assert torch.equal(want, fusedops.no_repeat_ngram(ids, scores, 1)) == (options == {})
    processor = FusedNoRepeatNGramLogitsProcessor(1, **options, inplace=inplace)
    for _ in range(2):
        inputs = scores.clone()
        got = processor(ids, inputs)
        assert torch.equal(got, want)
        assert (got is inputs) == inplace


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"]
)
def test_copy_bans_the_same_tokens(duplicate: Callable[[Any], Any]) -> None:
    ids, scores = _inputs()
    processor = FusedNoRepeatNGramLogitsProcessor(1, allowed=[2, 3], window=20)
    want = processor(ids, scores)
    copied = duplicate(processor)
    assert torch.equal(copied(ids, scores), want)
    assert (
        repr(copied)
        == repr(processor)
        == "FusedNoRepeatNGramLogitsProcessor(1, window=20, allowed=(2, 3))"
    )


def test_each_size_of_vocabulary_has_its_own_mask() -> None:
    processor = FusedNoRepeatNGramLogitsProcessor(1, allowed=[2, 3])
    for cols in (12, 20, 12):
        ids, scores = _inputs(cols=cols)
        banned = processor(ids, scores).isinf()
        assert banned.any()
        assert not banned[:, 2:4].any()
    with pytest.raises(ValueError, match="allowed holds token 3, expected less than 3"):
        processor(*_inputs(cols=3))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "ngram_size must be at least 1, got 0"),
        ((2.0,), TypeError, "ngram_size must be an integer, got float"),
        ((2, {"window": 0}), ValueError, "window must be at least 1"),
        ((2, {"prompt_length": -1}), ValueError, "prompt_length must be at least 0"),
        ((2, {"allowed": [-1]}), ValueError, r"allowed must hold token ids .*, got -1"),
        (
            (2, {"allowed": torch.tensor([True, False])}),
            ValueError,
            r".*a mask is for no_repeat_ngram\), got tensor\(True",
        ),
        ((2, {"allowed": [True]}), ValueError, r"allowed must hold token ids .*, got True"),
        ((2, {"allowed": 5}), TypeError, "allowed must be token ids, got int"),
        (
            (2, {"pad_token_id": "<pad>"}),
            TypeError,
            "pad_token_id must be an integer or None, got str",
        ),
    ],
    ids=str,
)
def test_bad_arguments_of_the_constructor_are_refused(
    arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    size, options = (*arguments, {})[:2]  # without options in the arguments, they are empty
    with pytest.raises(error, match=f"FusedNoRepeatNGramLogitsProcessor: {match}"):
        FusedNoRepeatNGramLogitsProcessor(size, **options)


def test_compiled_processor() -> None:
    ids, scores = _inputs()
    processor = FusedNoRepeatNGramLogitsProcessor(1, allowed=[2, 3])
    want = processor(ids, scores)
    torch._dynamo.reset()
    fresh = FusedNoRepeatNGramLogitsProcessor(1, allowed=[2, 3])
    compiled = torch.compile(
        lambda ids, scores: fresh(ids, scores), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        assert torch.equal(compiled(ids, scores), want)
    torch._dynamo.reset()


# --- within generate ------------------------------------------------------------------------------


def _decoder() -> Any:
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=30,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _encoder_decoder() -> Any:
    transformers = _transformers()
    config = transformers.T5Config(
        vocab_size=30,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.5},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "logits": {"output_logits": True, "output_scores": True, "return_dict_in_generate": True},
}


def _ngrams(row: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", [_decoder, _encoder_decoder], ids=["GPT-2", "T5"])
def test_generates_what_transformers_generates(
    build: Callable[[], Any], strategy: str, kernel_path: bool
) -> None:
    torch.manual_seed(1)
    model = build().to(DEVICE).eval()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 29, (3, 6), generator=generator).to(DEVICE)
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    steps = 12 if INTERPRETED else 24

    def generate(**options: Any) -> Any:
        torch.manual_seed(3)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, **STRATEGIES[strategy], **options
        )

    free, want = generate(), generate(no_repeat_ngram_size=2)
    with launch.record() as names:
        got = generate(logits_processor=[FusedNoRepeatNGramLogitsProcessor(2)])
    # The decoder of T5 begins with one token, which is too short for any ban.
    assert len(names) == (steps - model.config.is_encoder_decoder if kernel_path else 0)
    inplace = generate(logits_processor=[FusedNoRepeatNGramLogitsProcessor(2, inplace=True)])
    if strategy == "logits":
        assert all(map(torch.equal, got.logits, want.logits))
        assert all(map(torch.equal, got.scores, want.scores))
        free, want, got, inplace = (output.sequences for output in (free, want, got, inplace))
    assert torch.equal(got, want)
    assert torch.equal(inplace, want)
    # Row 0 begins with padding, which repeats an n-gram in any case.
    if "sampled" not in strategy:
        assert any(len(set(_ngrams(row, 2))) < len(_ngrams(row, 2)) for row in free[1:].tolist())
    assert all(len(set(_ngrams(row, 2))) == len(_ngrams(row, 2)) for row in want[1:].tolist())


def test_generate_respects_prompt_length_and_allowed() -> None:
    """Tokens of the prompt may occur once more, and allowed tokens any number of times."""
    torch.manual_seed(1)
    model = _decoder().to(DEVICE).eval()
    ids = torch.arange(1, 21, device=DEVICE)[None]

    def generate(**options: Any) -> list[int]:
        processor = FusedNoRepeatNGramLogitsProcessor(1, **options)
        output = model.generate(
            ids, max_new_tokens=9, do_sample=False, logits_processor=[processor]
        )
        return output[0, 20:].tolist()

    assert not set(generate()) & set(range(1, 21))
    after_prompt = generate(prompt_length=20)
    assert len(set(after_prompt)) == 9
    assert set(after_prompt) & set(range(1, 21))
    assert len(set(generate(allowed=range(1, 21)))) < 9


def test_mask_of_a_call_under_fake_tensor_mode_is_not_used_later() -> None:
    processor = FusedNoRepeatNGramLogitsProcessor(2, allowed=[3])
    ids, scores = torch.tensor([[1, 3, 1]], device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    with FakeTensorMode():
        processor(torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 8))
    assert torch.equal(processor(ids, scores), scores)  # after 1 comes 3, which is allowed
