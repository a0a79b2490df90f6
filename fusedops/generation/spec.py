"""The generation family's samples, bad samples, bytes moved and benchmark shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.spec import BadSample, Maker, Sample, Shape, Spec, Sweep
from . import configs, launching, ops, reference

__all__ = ["SPECS", "compiled_plans"]


# --- samples --------------------------------------------------------------------------------------


def _tokens(make: Maker, rows: int, length: int, vocabulary: int) -> Tensor:
    """Returns rows of tokens: every second one periodic, the others random.

    The periods are 1 to 5. There are few distinct tokens, so that n-grams repeat. The distinct
    tokens are spread over the whole vocabulary, and so are the bans.
    """
    distinct = min(vocabulary, 5)
    tokens = torch.randperm(vocabulary, generator=make.generator)[:distinct]
    tokens[-1] = vocabulary - 1
    ids = torch.randint(distinct, (rows, length), generator=make.generator)
    if length:
        positions = torch.arange(length)
        for row in range(0, rows, 2):
            period = row // 2 % 5 + 1
            ids[row] = ids[row][positions % period]
    return tokens[ids]


def _planted(make: Maker, length: int, cols: int, n: int, starts: tuple[int, ...]) -> Tensor:
    """Returns a row for each of ``starts``: only the n-gram that begins there bans a token.

    All other tokens of the row are distinct.
    """
    ids = torch.stack([torch.randperm(cols, generator=make.generator)[:length] for _ in starts])
    for row, start in zip(ids, starts, strict=True):
        row[length - n + 1 :] = row[start : start + n - 1].clone()
    return ids


def _padded(ids: Tensor, pad: int) -> Tensor:
    """Pads the rows on the left, in place: the first one entirely, the last one not at all."""
    rows, length = ids.shape
    for row in range(rows - 1):
        ids[row, : length - row * length // max(rows, 1)] = pad
    return ids


# Rows, length and vocabulary.
_SHAPES = [
    (1, 1, 7),
    (2, 2, 1),
    (5, 3, 17),
    (4, 40, 17),
    (3, 41, 1000),
    (6, 9, 64),
    (33, 20, 131),
    (2, 100, 9001),
]


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(
        name: str,
        shape: tuple[int, int, int],
        n: int,
        pad: int | None = None,
        allowed: float = 0.0,
        tokens: torch.dtype = torch.int64,
        **options: Any,
    ) -> Sample:
        """Returns a sample.

        ``shape`` is rows, length and vocabulary. ``allowed`` is the fraction of allowed tokens.
        """
        rows, length, cols = shape
        make = Maker(name, device, dtype)
        scores = make(rows, cols)
        ids = _tokens(make, rows, length, cols)
        if pad is not None:
            ids, options = _padded(ids, pad), {**options, "pad_token_id": pad}
        tensors: dict[str, Tensor | None] = {
            "scores": scores,
            "input_ids": ids.to(device, tokens),
            "allowed": None,
        }
        if allowed:
            tensors["allowed"] = (torch.rand(cols, generator=make.generator) < allowed).to(device)
        return Sample(name, tensors, {"ngram_size": n, **options})

    for shape in _SHAPES:
        for n in (1, 2, 3):
            yield sample(f"shape {'x'.join(map(str, shape))}, n={n}", shape, n=n)
    for n in (4, 8, 15, 16):
        yield sample(f"n={n}", (9, 60, 70), n=n)
    for length in (0, 15, 16, 17):
        yield sample(f"n=16, length {length}", (10, length, 33), n=16)
    for cols in (4097, 50257):
        yield sample(f"{cols} columns", (3, 30, cols), n=2)
    # One window less than a tile has, as many, and one more.
    tile = configs.CONFIG.block_n
    for windows in (tile - 1, tile, tile + 1):
        yield sample(f"{windows} windows", (2, windows + 2, 90), n=3)
    for n in (2, 16):
        # Windows at the borders of tiles, and a window that is close to the end of the row.
        length = 3 * tile
        starts = (0, 1, tile - 1, tile, 2 * tile - 1, 2 * tile, length - 2 * n)
        shape = (len(starts), 1, length + 100)
        planted = sample(f"one repetition, n={n}", shape, n=n)
        make = Maker(planted.name, device, dtype)
        ids = _planted(make, length, length + 100, n, starts)
        planted.tensors["input_ids"] = ids.to(device)
        yield planted
        padded = sample(f"one repetition, behind padding, n={n}", shape, n=n, pad_token_id=-100)
        is_text = torch.arange(length) >= torch.tensor(starts)[:, None]
        padded.tensors["input_ids"] = ids.where(is_text, -100).to(device)
        yield padded
    yield sample("int32 tokens", (4, 40, 50), n=3, tokens=torch.int32)
    yield sample("int32 tokens, padded", (4, 40, 50), n=2, tokens=torch.int32, pad=49)
    # All tokens are 0, and so are the lower 32 bits of the padding token.
    yield sample(
        "int32 tokens, padding beyond 32 bits",
        (2, 4, 1),
        2,
        tokens=torch.int32,
        pad_token_id=2**32,
    )
    for window in (3, 4, 20, 100):
        yield sample(f"window {window}", (6, 60, 40), n=3, window=window)
    for prompt in (1, 37, 58, 60, 99):
        yield sample(f"prompt {prompt}", (6, 60, 40), n=3, prompt_length=prompt)
    yield sample("window and prompt", (6, 60, 40), n=2, window=30, prompt_length=25)
    for n in (1, 2, 5):
        yield sample(f"padded, n={n}", (8, 40, 30), n=n, pad=29)
    yield sample("padded with a token that no row has", (8, 40, 30), n=2, pad=-100)
    yield sample("padded, window and prompt", (8, 40, 30), n=2, pad=29, window=25, prompt_length=5)
    yield sample("padded by more than a tile", (3, 2 * tile + 400, 30), n=2, pad=29)
    for part in (0.5, 1.0):
        yield sample(f"{part} allowed", (6, 60, 8), n=1, allowed=part)
    yield sample("allowed, padded", (6, 60, 8), n=2, allowed=0.5, pad=7)
    outside = sample("tokens outside of the vocabulary", (6, 60, 8), n=2)
    tokens = outside.tensors["input_ids"]
    assert tokens is not None
    negative = torch.where(tokens == tokens.min(), -1, tokens)
    outside.tensors["input_ids"] = torch.where(tokens == 7, 11, negative)
    yield outside


def _few_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields a few of the samples, for specs that differ only in their benchmark."""
    for sample in _samples(device, dtype):
        if sample.name.startswith("shape 33x20x131"):
            yield sample


def _reference(
    scores: Tensor,
    input_ids: Tensor,
    ngram_size: int,
    *,
    allowed: Tensor | None = None,
    inplace: bool = False,
    **options: Any,
) -> tuple[Tensor]:
    rule = reference.Rule(ngram_size, **options)
    return (reference.no_repeat_ngram(scores, input_ids, allowed, rule, inplace=inplace),)


def _eager(
    scores: Tensor,
    input_ids: Tensor,
    ngram_size: int,
    *,
    window: int | None = None,
    allowed: Tensor | None = None,
    prompt_length: int = 0,
    pad_token_id: int | None = None,
    inplace: bool = False,
) -> tuple[Tensor]:
    """Computes the bans by their definition, row by row in Python."""
    out = scores if inplace else scores.clone()
    never_banned = set() if allowed is None else set(allowed.nonzero().flatten().tolist())
    for row, tokens in enumerate(input_ids.tolist()):
        first = prompt_length
        if window is not None:
            first = max(prompt_length, len(tokens) - window)
        padding = 0
        while padding < len(tokens) and tokens[padding] == pad_token_id:
            padding += 1
        counted = tokens[max(first, padding) :]
        windows = len(counted) - ngram_size + 1
        last_tokens = counted[windows:]
        ngrams = [counted[i : i + ngram_size] for i in range(windows)]
        banned = {ngram[-1] for ngram in ngrams if ngram[:-1] == last_tokens} - never_banned
        in_vocabulary = [token for token in banned if 0 <= token < scores.shape[1]]
        out[row, in_vocabulary] = -torch.inf
    return (out,)


# --- bad samples ----------------------------------------------------------------------------------


def _bad_samples(device: torch.device) -> Iterator[BadSample]:
    def bad(
        name: str,
        error: type[Exception],
        match: str,
        *,
        options: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> BadSample:
        tensors = {"scores": torch.randn(4, 8, device=device), "input_ids": ids, **overrides}
        return BadSample(name, tensors, {"ngram_size": 2, **(options or {})}, error, match)

    ids = torch.ones(4, 6, dtype=torch.int64, device=device)
    allowed = torch.zeros(8, dtype=torch.bool, device=device)
    yield bad(
        "n of zero", ValueError, "ngram_size must be at least 1, got 0", options={"ngram_size": 0}
    )
    yield bad(
        "fractional n",
        TypeError,
        "ngram_size must be an integer, got float",
        options={"ngram_size": 2.0},
    )
    yield bad(
        "window of zero", ValueError, "window must be at least 1, got 0", options={"window": 0}
    )
    yield bad(
        "window of less than an n-gram",
        ValueError,
        "window must be at least 3 as ngram_size, got 2",
        options={"ngram_size": 3, "window": 2},
    )
    yield bad(
        "window is no number",
        TypeError,
        "window must be an integer, got str",
        options={"window": "8"},
    )
    yield bad(
        "negative prompt",
        ValueError,
        "prompt_length must be at least 0, got -1",
        options={"prompt_length": -1},
    )
    yield bad(
        "prompt is None",
        TypeError,
        "prompt_length must be an integer, got NoneType",
        options={"prompt_length": None},
    )
    yield bad(
        "pad token is a tensor",
        TypeError,
        "pad_token_id must be an integer or None, got Tensor",
        options={"pad_token_id": ids[0, 0]},
    )
    yield bad(
        "pad token of more than 64 bits",
        ValueError,
        f"pad_token_id must be at least {-(2**63)}, got {-(2**70)}",
        options={"pad_token_id": -(2**70)},
    )
    for name in ("ngram_size", "window", "prompt_length", "pad_token_id"):
        yield bad(
            f"{name} of more than 64 bits",
            ValueError,
            f"{name} must be at most {2**63 - 1}, got {2**63}",
            options={name: 2**63},
        )
    yield bad(
        "scores are no tensor", TypeError, "scores must be a torch.Tensor, got list", scores=[[1.0]]
    )
    yield bad(
        "integer scores", TypeError, r"scores has dtype torch\.int64", scores=torch.ones_like(ids)
    )
    yield bad(
        "scores of one dimension",
        ValueError,
        r"scores has shape \(8,\), expected two dimensions",
        scores=torch.randn(8, device=device),
    )
    yield bad(
        "tokens are no tensor",
        TypeError,
        "input_ids must be a torch.Tensor, got list",
        input_ids=[[1, 2]],
    )
    yield bad(
        "floating-point tokens",
        TypeError,
        r"input_ids has dtype torch\.float32, expected torch\.int64",
        input_ids=ids.float(),
    )
    yield bad(
        "tokens of 16 bits", TypeError, r"input_ids has dtype torch\.int16", input_ids=ids.short()
    )
    yield bad(
        "tokens of one dimension",
        ValueError,
        r"input_ids has shape \(6,\), expected two",
        input_ids=ids[0],
    )
    yield bad(
        "rows that differ",
        ValueError,
        "input_ids has 3 rows, expected 4 as scores",
        input_ids=ids[:3],
    )
    yield bad(
        "tokens on another device",
        RuntimeError,
        "input_ids is on meta, expected",
        input_ids=ids.to("meta"),
    )
    yield bad(
        "allowed is a list", TypeError, "allowed must be a torch.Tensor, got list", allowed=[3]
    )
    yield bad(
        "allowed tokens by number",
        TypeError,
        r"allowed has dtype torch\.int64, expected torch\.bool",
        allowed=ids[0],
    )
    yield bad(
        "allowed of another width",
        ValueError,
        r"allowed has shape \(7,\), expected \(8,\)",
        allowed=allowed[:7],
    )
    yield bad(
        "allowed on another device",
        RuntimeError,
        "allowed is on meta, expected",
        allowed=allowed.to("meta"),
    )
    yield bad(
        "in place on expanded rows",
        ValueError,
        r"scores has overlapping rows, with strides \(0, 1\)",
        scores=torch.randn(1, 8, device=device).expand(4, 8),
        options={"inplace": True},
    )


# --- benchmarks -----------------------------------------------------------------------------------


def _benchmark(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, length: int = 1024
) -> Sample:
    """Returns a sample of random tokens, in which about a tenth of the rows have a ban."""
    rows, cols = map(int, shape)
    distinct_tokens = min(max(int((10 * length) ** 0.5), 1), cols)
    ids = torch.randint(distinct_tokens, (rows, length), device=device)
    tensors = {"scores": torch.randn(rows, cols, dtype=dtype, device=device), "input_ids": ids}
    return Sample(f"{rows}x{cols}", dict(tensors), {"ngram_size": 3})


def _transformers() -> Callable[..., Any]:
    from transformers import NoRepeatNGramLogitsProcessor

    return lambda scores, input_ids, ngram_size: (
        NoRepeatNGramLogitsProcessor(ngram_size)(input_ids, scores),
    )


def compiled_plans(
    cols: int, dtype: torch.dtype, other: torch.dtype | None = None
) -> dict[str, Callable[[], object]]:
    """Returns functions that build all variants. No variant depends on the width."""
    if other is not None or cols not in (1024, 4096):
        return {}

    def build(tokens: torch.dtype) -> None:
        for has_options in (True, False):
            site = launching.Site(-1, dtype, tokens, allowed=has_options, padded=has_options)
            # The variant is a cached property: reading it builds the kernel.
            site.variant  # noqa: B018

    return {
        "no_repeat_ngram": partial(build, torch.int64),
        "no_repeat_ngram, int32": partial(build, torch.int32),
    }


def _spec(name: str, length: int, shapes: tuple[Shape, ...], inplace: bool = False) -> Spec:
    return Spec(
        name=name,
        functional="no_repeat_ngram",
        call=partial(ops.no_repeat_ngram, inplace=True) if inplace else ops.no_repeat_ngram,
        reference=_reference,
        eager=_eager,
        combined=_reference,
        tensors=("scores", "input_ids", "allowed"),
        has_dropout=False,
        exact=True,
        samples=_samples if length == 1024 else _few_samples,
        bad_samples=_bad_samples,
        benchmark=partial(_benchmark, length=length),
        passes={"fwd": 0 if inplace else 2},
        launches=(1, 0),
        sweep=Sweep(hidden=(), rows=()),
        saved=0,
        shapes=tuple((shape, torch.float32) for shape in shapes),
        transformers=_transformers,
    )


# A step of generation with the vocabularies of GPT-2 (50257) and T5 (32128). The specs below differ
# in the number of tokens before the step: 1024 or 32,768.
_SHAPES_TIMED: tuple[Shape, ...] = ((256, 50257), (256, 32128), (8, 50257))
SPECS = (
    _spec("no_repeat_ngram", length=1024, shapes=_SHAPES_TIMED),
    _spec("no_repeat_ngram_32k", length=32768, shapes=_SHAPES_TIMED[2:]),
    _spec("no_repeat_ngram_inplace", length=1024, shapes=_SHAPES_TIMED, inplace=True),
    _spec("no_repeat_ngram_inplace_32k", length=32768, shapes=_SHAPES_TIMED[2:], inplace=True),
)
