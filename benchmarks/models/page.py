"""Tables of the results file, for the terminal and for pages of the documentation."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..columns import all_values, sized
from .first_calls import read as first_calls_of
from .providers import WITHOUT_TRICK
from .results import Row, WorkloadKey, by_workload, read
from .workloads import MODELS, MODES

__all__ = [
    "against_liger",
    "compiled",
    "headline",
    "inference",
    "markdown",
    "summary",
    "table",
]

# In the order of columns: ours first, so that narrow screens show them.
_NAMES = {
    "eager": "eager",
    "backend": "`fusedops.compile`",
    "fused": "fused",
    "compile": "torch.compile",
    "liger": "Liger-Kernel",
    "compile_autotune": "torch.compile, max-autotune",
    "operators": "operators written in",
    "fused_loss": "fused + loss of hidden states",
    "backend_loss": "`fusedops.compile` + loss of hidden states",
    "backend_speed": '`fusedops.compile`, memory "speed"',
    "backend_low": '`fusedops.compile`, memory "low"',
    "backend_loss_speed": '`fusedops.compile` + loss of hidden states, memory "speed"',
    "backend_loss_low": '`fusedops.compile` + loss of hidden states, memory "low"',
    "operators_compile": "operators written in + torch.compile",
    "compile_reduce_overhead": "torch.compile, reduce-overhead",
    "backend_reduce_overhead": "`fusedops.compile`, reduce-overhead",
    "operators_compile_reduce_overhead": "operators written in + torch.compile, reduce-overhead",
}
# The columns of each page's first table. Few workloads have the others, which have a table of their own.
_FIRST_COLUMNS = ("eager", "backend", "fused", "compile", "liger")
# In the table of other forms, to compare with.
_BASE_COLUMNS = ("eager", "backend", "compile")
_OURS_ALONE = {"backend": "`fusedops.compile`", "fused": "`fuse_model` alone"}
_MODE_TITLES = {
    "train": "## Training step\n\nForward and backward, bf16 autocast over fp32 weights, dropout on.",
    "train_bf16": "## Training step with bf16 weights\n\nForward and backward, without autocast.",
    "lora": "## Training step with LoRA\n\nForward and backward, bf16 autocast. The weights are bf16 and frozen; all linear "
    "layers of the blocks have adapters of rank 16 by PEFT, in fp32.",
    "generate": "## Generation\n\n64 tokens, greedy, after prompts of 64, with `no_repeat_ngram_size=3`, bf16 weights.",
    "infer": "## Inference\n\nThe forward in evaluation mode, without gradients, bf16 weights.",
    "prefill": "## Prefill\n\nThe forward of prompts, without gradients, with the logits of each prompt's last token alone; a "
    "shape is the number of prompts, and their length. bf16 weights. Keys and values are not returned.",
    "decode": "## Decoding\n\nOne token of each sequence, with a static cache; a shape is the number of sequences, and the "
    "places of the cache. Logits are whole. bf16 weights. Peak memory does not include the cache.",
}
_MODEL_NAMES = {
    "bert": "BERT-base",
    "gpt2": "GPT-2",
    "t5": "T5-base",
    "llama": "Llama-like, 1B",
    "llama_1b": "Llama-3.2-like, 1.2B",
    "llama_8b": "Llama-3.1-8B-like, 8 layers",
    "vit": "ViT-B/16",
    "qwen3": "Qwen-3-like, 0.6B",
    "gemma2": "Gemma-2-like, 1.6B",
    "mixtral": "Mixtral-like, 0.8B",
    "dit": "DiT-L/2-like",
    "nanogpt": "nanoGPT, by hand",
    "meta_llama": "Llama, by hand, 1B",
    "gated_decoder": "gated decoder, by hand",
    "dlrm": "recommender, by hand",
}

_HEAD = """# Whole models: figures

[`fusedops.compile`](compile.md) and [`fuse_model`](models.md) beside eager PyTorch, torch.compile and Liger-Kernel, on models of
Transformers and by hand, with random weights. "fused" is `fuse_model`. In prefill and decoding it is as it is now; in the other
modes it was timed when modules called operators one by one, before it ran [graphs](rest_figures.md).
`python -m benchmarks models --page` writes this page from the results file."""

_HOW = """## How it is measured

- **Time** is that between the completions of two steps, which run back to back in blocks. A block's first step is not timed:
  the device is idle when it starts. A step includes the host's time where the device waits for it. A figure is the median of
  five to sixty blocks, in which the candidates take turns. The number after ± is the interquartile range. The number in brackets
  is the speed-up over eager: above 1 is faster. In lines of commits up to 7ab65ec6 the first step is timed, too.
- **†** marks a comparison of two commits, and so of two runs. The state of the machine may differ between them. Each line of
  the results file has its commit.
- **Host time** is the median of single steps that start with an empty queue. It was measured at another moment than the time
  per step, and so may exceed it.
- **GPU time** is the sum of the times of a step's kernels, by the profiler. Where it is below the host time, the step is
  bound by the host.
- **Peak memory** includes weights, gradients and activations.
- **Text** in batches is the source of Python's standard library, byte by byte.
- **Compiled candidates** are measured after the others, and take turns among themselves. No figure includes compilation.
- **Models.** All attention is PyTorch's `scaled_dot_product_attention`, Transformers' default. Inputs have no `attention_mask`, except
  in generation. Dropout is 0.1 if the model has
  dropout. Llama has none; for ViT, whose config has 0, it is set to 0.1. A training step has no optimizer, and a forward returns
  no keys and values.
- **torch.compile** compiles the whole model in its default mode. With PyTorch 2.11, a BERT or ViT that is only compiled gets a
  mask that rules out PyTorch's fused attention. Generation is not compiled: its cache grows by one token per step, and each size
  would be compiled.
- **Liger-Kernel** patches Llama, Qwen 3 and Gemma 2, with its own loss of hidden states, and none of the other models.

To repeat all measurements, on a GPU, with `pip install .[bench,hf]`:

```
python -m benchmarks models --provider eager --provider fused --provider liger
python -m benchmarks models --provider compile --provider backend
python -m benchmarks models --model t5 --mode generate --provider fused --provider fused_without_one_token
python -m benchmarks models --model dlrm                       # also with operators written in, and with CUDA graphs
python -m benchmarks models --loss
python -m benchmarks models --first-calls                      # seconds to compile, cold and in a second process
python -m benchmarks models --page                             # this page
python -m benchmarks models --profile --model gpt2 --mode train --provider fused    # where the time goes
```"""

# Models of one kind. If the README has a row of the first, it has none of the second.
_SUPERSEDES = {"llama_1b": "llama"}

# Notes on providers and models. The page has a note if it has rows of the provider or model.
_NOTES = {
    "compile_autotune": 'Max-autotune is `torch.compile(mode="max-autotune-no-cudagraphs")`.',
    "backend": '`fusedops.compile` is `torch.compile(backend="fusedops")` on the whole model.',
    "fused_loss": "With a loss of hidden states, the model's forward calls `fusedops.linear_cross_entropy` on what its last "
    "norm returns. The others have whole logits, except Liger-Kernel, whose loss has chunks too.",
    "llama_1b": "Llama-3.2-like has Llama 3.2's vocabulary of 128,256 words; the Llama-like model has 32,000.",
    "llama_8b": "Llama-3.1-8B-like is a quarter of the layers of Llama 3.1 8B, at their width.",
    "nanogpt": "nanoGPT and Llama by hand are not Transformers' code but in the manner of nanoGPT's and Meta's, at the "
    "sizes of GPT-2 and the Llama-like model.",
    "gemma2": "Gemma-2-like is half of the layers of Gemma 2 2B; its attention has a soft cap, and is the one that "
    "Transformers writes out.",
    "mixtral": "Mixtral-like is a quarter of the width and of the layers of Mixtral 8x7B, with its eight experts.",
    "gated_decoder": "The gated decoder by hand has twelve layers of 1024 columns with heads of 64. Queries and keys are "
    "normalised, and rotated in pairs of neighbours; a sigmoid gate follows attention, and norms follow attention and "
    "the MLP, which squares its ReLU.",
    "dlrm": "The recommender by hand has a dense tower, and 26 embedding tables of 10,000 rows and 16 to 128 columns, with "
    "dense gradients. Each looked-up slice has a LayerNorm and a tanh; three linear layers follow the concatenation. A "
    "shape is the batch and the number of tables.",
    "operators": "With operators written in, the model's own code calls an operator of fusedops. In the recommender this is "
    "`batched_layer_norm_tanh`.",
    "compile_reduce_overhead": 'Reduce-overhead is `mode="reduce-overhead"`, which replays CUDA graphs. Their memory is '
    "not measured.",
    "dit": "DiT-L/2-like is written by hand; its loss is the error of the noise that it predicts in latents.",
}

_LOSS = """## Loss after 100 steps

The mean of the last 5 of 100 steps of AdamW at a learning rate of 1e-4, in batches of 8, with dropout and autocast. Each
figure is the mean over three seeds; in brackets is the range over the seeds. For a seed, all candidates have the same weights
and batches. BERT predicts the 15% of the tokens that are masked. T5 continues 128 bytes with 64. ViT has no text: its images
are windows of the text's bytes, and the class is the byte that follows."""


_TRICKS = """## Tricks

The effect of [T5's fast path for one token](models.md#t5-a-token-at-a-time): the fused model with it, and without it."""

Workloads = list[tuple[WorkloadKey, dict[str, Row]]]
# A function that returns the text of a cell, for a row and eager's row of the same workload.
Cell = Callable[[Row, "Row | None"], str]


def table(rows: Iterable[Row]) -> str:
    """Returns a table in plain text, with a line per workload.

    It has each provider's ms, its speed-up over eager in brackets, and its peak memory in MiB.
    """
    workloads = _ordered(rows)
    columns = _columns(workloads)
    lines = [["model", "mode", "shape", *columns]]
    lines += [
        [*workload, *_cells(by_provider, columns, _plain)] for workload, by_provider in workloads
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(path: Path) -> str:
    """Returns the page of a results file, with a note if there are no results."""
    rows = read(path)
    if not rows:
        return f"{_HEAD}\n\nNothing has been measured yet.\n\n{_HOW}\n"
    parts = [_HEAD, _source(path, rows)]
    for mode in MODES:
        of_mode = [row for row in rows if row.mode == mode]
        workloads = _ordered(of_mode)
        if workloads:
            parts += [_MODE_TITLES[mode], *_grids_of_mode(workloads)]
            parts += _peers_ahead(workloads) if mode == "train" else ()
    tricks = _tricks(rows)
    if tricks:
        parts += [_TRICKS, tricks]
    losses = _ordered(row for row in rows if row.mode == "loss")
    if losses:
        parts += [_LOSS, _grid(losses, _loss, _columns(losses))]
    present = {row.provider for row in rows} | {row.model for row in rows}
    notes = " ".join(note for name, note in _NOTES.items() if name in present)
    if notes:
        parts.append(textwrap.fill(notes, 120, break_on_hyphens=False))
    return "\n\n".join([*parts, _HOW]) + "\n"


def headline(path: Path) -> str:
    """Returns the README's first claim: the range of speed-ups of `fusedops.compile` over eager.

    Behind it is how often it is faster than torch.compile. Both are of the workloads of `summary`.
    """
    times = [ms for _, ms in _summarised(path) if "backend" in ms]
    if not times:
        return "with fused operators"
    over_eager = [ms["eager"] / ms["backend"] for ms in times]
    compared = [ms for ms in times if "compile" in ms]
    ahead = sum([ms["backend"] < ms["compile"] for ms in compared])
    return (
        f"{min(over_eager):.1f} to {max(over_eager):.1f} times as fast as eager PyTorch, and faster than "
        f"torch.compile in {ahead} of {len(compared)} cases"
    )


def summary(path: Path) -> str:
    """Returns the README's table: speed-ups of a training step over eager, the greatest in bold."""
    names = {
        "backend": _NAMES["backend"],
        "fused": "`fuse_model`",
        "compile": "torch.compile",
        "liger": "Liger-Kernel",
    }
    lines = [
        "| model, batch | eager, ms | " + " | ".join(names.values()) + " |",
        "|---|--:|" + "--:|" * len(names),
    ]
    for where, ms in _summarised(path):
        least = min(ms.values())
        cells = []
        for name in names:
            cell = ""
            if name in ms:
                cell = _bold(f"{ms['eager'] / ms[name]:.2f}", when=ms[name] == least)
            cells.append(cell)
        lines.append(f"| {where} | {ms['eager']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _summarised(path: Path) -> list[tuple[str, dict[str, float]]]:
    """Returns the workloads of the README's table, each with the ms of the first columns."""
    complete = [
        (workload, by_provider)
        for workload, by_provider in _ordered(row for row in read(path) if row.mode == "train")
        if {"eager", "fused"} <= by_provider.keys()
    ]
    superseded = {_SUPERSEDES.get(model) for (model, _, _), _ in complete}
    return [
        (_named(workload), _first_times(by_provider))
        for workload, by_provider in complete
        if workload[0] not in superseded
    ]


def against_liger(path: Path) -> str:
    """Returns the table of training steps that were measured with Liger-Kernel.

    It has speed-ups over eager, the greatest in bold, and peak memory in GiB.
    """
    labels = {"train": "", "train_bf16": ", bf16 weights", "lora": ", LoRA"}
    names = ("backend", "backend_loss", "fused", "fused_loss", "compile", "liger")
    lines = [
        "| model, batch | " + " | ".join(_NAMES[name] for name in names) + " |",
        "|---|" + "--:|" * len(names),
    ]
    for workload, by_provider in _ordered(row for row in read(path) if row.mode in labels):
        eager = by_provider.get("eager")
        if eager is None or "liger" not in by_provider:
            continue
        least = min(by_provider[name].ms or math.inf for name in names if name in by_provider)
        cells = []
        for name in names:
            row = by_provider.get(name)
            cell = ""
            if row is not None and row.ms and eager.ms and row.peak_mib is not None:
                speed_up = _bold(f"{eager.ms / row.ms:.2f}", when=row.ms == least)
                cell = f"{speed_up}, {row.peak_mib / 1024:.1f} GiB"
            cells.append(cell)
        lines.append(f"| {_named(workload)}{labels[workload[1]]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _named(workload: WorkloadKey) -> str:
    model, _, shape = workload
    return f"{_MODEL_NAMES[model]}, {sized(shape)}"


def _first_times(by_provider: dict[str, Row]) -> dict[str, float]:
    """Returns the ms of the providers of the first columns that were measured."""
    present = {name: by_provider[name].ms for name in _FIRST_COLUMNS if name in by_provider}
    return {name: ms for name, ms in present.items() if ms is not None}


def _peers_ahead(workloads: Workloads) -> Iterator[str]:
    """Yields the list of training steps in which a peer is faster, and its title."""
    ahead: dict[str, list[str]] = {}
    for workload, by_provider in workloads:
        ms = _first_times(by_provider)
        for ours, peer in itertools.product(("backend", "fused"), ("compile", "liger", "eager")):
            if ms.get(peer, math.inf) < ms.get(ours, 0.0):
                claim = f"{_NAMES[peer]} is faster than {_OURS_ALONE[ours]} on"
                ahead.setdefault(claim, []).append(_named(workload))
    if ahead:
        yield "### Where a peer is faster"
        yield "\n".join(
            [f"- {claim} {'; '.join(names)}." for claim, names in sorted(ahead.items())]
        )


def compiled(path: Path, first_calls: Path) -> str:
    """Returns the table of training steps of compiled models, the fastest in bold.

    In brackets are the speed-ups over torch.compile in the same run. A second table has the seconds
    to compile, if they were measured.
    """
    names = ("backend", "compile")
    compared: Workloads = []
    for workload, by_provider in _ordered(row for row in read(path) if row.mode == "train"):
        if "compile" not in by_provider or "backend" not in by_provider:
            continue
        commit = by_provider["backend"].commit
        if by_provider["compile"].commit == commit:
            of_commit = {name: row for name, row in by_provider.items() if row.commit == commit}
            compared.append((workload, of_commit))
    if not compared:
        return "Nothing has been measured yet."
    heads = [f"{_NAMES[name]}, ms" for name in names]
    # Further columns: the provider, and the function for its cell.
    extra_columns: list[tuple[str, Cell]] = []
    rows = [row for _, by_provider in compared for row in by_provider.values()]
    for figure, field, cell in (("GPU time, ms", "gpu_ms", _gpu), ("peak, MiB", "peak_mib", _peak)):
        if any(getattr(row, field) is not None for row in rows):
            for name in ("backend", "compile"):
                heads.append(f"{_NAMES[name]}, {figure}")
                extra_columns.append((name, cell))
    lines = [f"| model, batch | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for (model, _, shape), by_provider in compared:
        base = by_provider["compile"]
        present = {name: by_provider[name] for name in names if name in by_provider}
        least = min(row.ms for row in present.values() if row.ms is not None)
        cells = []
        for name in names:
            text = ""
            if name in present:
                text = _bold(_time(present[name], base), when=present[name].ms == least)
            cells.append(text)
        cells += [cell(by_provider[name], base) for name, cell in extra_columns]
        lines.append(f"| {_MODEL_NAMES[model]}, {sized(shape)} | {' | '.join(cells)} |")
    parts = ["\n".join(lines)]
    seconds = first_calls_of(first_calls)
    if seconds:
        head = ["| model, batch | | first step, s | in a second process, s |", "|---|---|--:|--:|"]
        lines = [
            f"| {_MODEL_NAMES[row.model]}, {sized(row.shape)} | {_NAMES[row.provider]} | {row.cold_s:.1f} | {row.warm_s:.1f} |"
            for row in seconds
        ]
        parts.append("\n".join([*head, *lines]))
    return "\n\n".join(parts)


def inference(path: Path) -> str:
    """Returns tables of the models that are decoded: prefill, and one token of each sequence."""
    parts = []
    for mode, title in (("prefill", "Prefill"), ("decode", "One token")):
        rows = [row for row in read(path) if row.mode == mode]
        if rows:
            parts += [f"{title}, ms, and in brackets the speed-up over eager:"]
            parts += [_by_provider(_ordered(rows), _time, least="ms")]
            parts += [f"{title}, tokens a second:", _by_provider(_ordered(rows), _tokens)]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _by_provider(workloads: Workloads, cell: Cell, *, least: str = "") -> str:
    """Returns a table with a line for each provider, and a column for each workload.

    Args:
        workloads: the workloads with their rows.
        cell: returns the text of a row, from it and from eager's.
        least: the field of a row whose least value is bold; "" for none.
    """
    names = _columns(workloads)
    heads = [_named(workload) for workload, _ in workloads]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for name in names:
        cells = []
        for _, rows in workloads:
            row = rows.get(name)
            values = [getattr(other, least) for other in rows.values()] if least else []
            is_least = bool(row and values) and getattr(row, least) == min(filter(None, values))
            cells.append(_bold(cell(row, rows.get("eager")), when=is_least) if row else "")
        lines.append(f"| {_NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bold(text: str, *, when: bool) -> str:
    return f"**{text}**" if when else text


def _tricks(rows: list[Row]) -> str:
    """Returns a table of the tricks that were measured: a step with all, and without one."""
    by_key = {row.key: row for row in rows}
    lines = [
        "| trick | model | mode | shape | | with, ms | without, ms |",
        "|---|---|---|---|---|--:|--:|",
    ]
    for row in rows:
        trick, base_provider = WITHOUT_TRICK.get(row.provider, ("", ""))
        base = by_key.get((*row.workload, base_provider))
        if trick and base is not None and base.commit == row.commit:
            lines.append(
                f"| `{trick}` | {_MODEL_NAMES[row.model]} | {row.mode} | {sized(row.shape)} | {_NAMES[base_provider]} | "
                f"{_time(base, None)} | {_time(row, None)} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def _time(row: Row, eager: Row | None) -> str:
    if row.ms is None:
        return ""
    spread = "" if row.spread is None else f" ± {row.spread:.2f}"
    return f"{row.ms:.2f}{spread}{_times(row, eager, 'ms')}"


def _times(row: Row, eager: Row | None, field: str) -> str:
    """Returns the speed-up over eager, with a dagger if eager was measured at another commit."""
    if eager is None or eager is row:
        return ""
    ours, theirs = getattr(row, field), getattr(eager, field)
    if ours is None or theirs is None:
        return ""
    dagger = "" if eager.commit == row.commit else "†"
    return f" ({theirs / ours:.2f}{dagger})"


def _host(row: Row, eager: Row | None) -> str:
    return "" if row.host_ms is None else f"{row.host_ms:.2f}{_times(row, eager, 'host_ms')}"


def _gpu(row: Row, eager: Row | None) -> str:
    return "" if row.gpu_ms is None else f"{row.gpu_ms:.2f}{_times(row, eager, 'gpu_ms')}"


def _tokens(row: Row, eager: Row | None) -> str:
    """Returns the tokens a second: those of the prompts, or one of each sequence."""
    sizes = list(map(int, row.shape.split("x")))
    tokens = sizes[0] if row.mode == "decode" else math.prod(sizes)
    return "" if row.ms is None else f"{1e3 * tokens / row.ms:,.0f}"


def _peak(row: Row, eager: Row | None) -> str:
    return "" if row.peak_mib is None else f"{row.peak_mib:.0f}"


def _memory(row: Row, eager: Row | None) -> str:
    if row.peak_mib is None:
        return ""
    ratio = ""
    if eager is not None and eager is not row and eager.peak_mib is not None:
        ratio = f" ({row.peak_mib / eager.peak_mib:.2f})"
    return f"{row.peak_mib:.0f}{ratio}"


def _loss(row: Row, eager: Row | None) -> str:
    if row.loss is None:
        return ""
    spread = "" if row.loss_spread is None else f" ({row.loss_spread:.4f})"
    return f"{row.loss:.4f}{spread}"


def _plain(row: Row, eager: Row | None) -> str:
    if row.ms is None:
        return f"loss {_loss(row, eager)}"
    times = _times(row, eager, "ms").replace(")", "x)")
    peak = "" if row.peak_mib is None else f" {row.peak_mib:.0f} MiB"
    return f"{row.ms:.2f} ms{times}{peak}"


def _ordered(rows: Iterable[Row]) -> Workloads:
    """Returns the workloads in the order of measuring, with their rows by provider."""
    modes, models = [*MODES, "loss"], list(MODELS)
    return sorted(
        by_workload(rows).items(),
        key=lambda entry: (modes.index(entry[0][1]), models.index(entry[0][0])),
    )


def _columns(workloads: Workloads) -> list[str]:
    """Returns the providers that have a row, in a fixed order."""
    present = set[str]().union(*[by_provider for _, by_provider in workloads])
    return [name for name in _NAMES if name in present]


def _cells(by_provider: dict[str, Row], columns: list[str], cell: Cell) -> list[str]:
    """Returns the cells of a workload, empty for providers without a row."""
    eager = by_provider.get("eager")
    return [cell(by_provider[name], eager) if name in by_provider else "" for name in columns]


def _grids_of_mode(workloads: Workloads) -> Iterator[str]:
    """Yields the tables of a mode with their titles: times, other forms, and more."""
    columns = [name for name in _columns(workloads) if name in _FIRST_COLUMNS]
    others = [name for name in _columns(workloads) if name not in _FIRST_COLUMNS]
    yield "Time per step in ms, and in brackets the speed-up over eager. The least of a row is bold:"
    yield _grid(workloads, _time, columns, least="ms")
    yield "Host time per step in ms, until the Python call returns, and in brackets the speed-up over eager:"
    yield _grid(workloads, _host, columns)
    if any(row.gpu_ms is not None for _, rows in workloads for row in rows.values()):
        yield "GPU time per step in ms, and in brackets the speed-up over eager:"
        yield _grid(workloads, _gpu, columns)
    yield "Peak memory in MiB, and in brackets its ratio to eager's:"
    yield _grid(workloads, _memory, columns)
    if others:
        yield "Other forms of the candidates. The least time of a model and shape is bold:"
        yield _forms(workloads, others)


def _forms(workloads: Workloads, others: list[str]) -> str:
    """Returns a table with a line per form: few workloads have each, so columns would be empty."""
    lines = [
        "| model, shape | form | time, ms | host time, ms | GPU time, ms | peak, MiB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for workload, by_provider in workloads:
        if by_provider.keys().isdisjoint(others):
            continue
        present = [name for name in (*_BASE_COLUMNS, *others) if name in by_provider]
        least = min(by_provider[name].ms or math.inf for name in present)
        eager, where = by_provider.get("eager"), _named(workload)
        for name in present:
            row = by_provider[name]
            time, *more = [cell(row, eager) for cell in (_time, _host, _gpu, _memory)]
            cells = [where, _NAMES[name], _bold(time, when=row.ms == least), *more]
            lines.append(f"| {' | '.join(cells)} |")
            where = ""
    return "\n".join(lines)


def _grid(workloads: Workloads, cell: Cell, columns: list[str], *, least: str = "") -> str:
    """Returns a table with a line per workload and a column per provider.

    The least value of the field ``least`` is bold. Workloads without a cell are left out.
    """
    lines = [
        "| model, shape | " + " | ".join(_NAMES[name] for name in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for workload, by_provider in workloads:
        cells = _cells(by_provider, columns, cell)
        if least:
            values = [getattr(by_provider.get(name), least, None) for name in columns]
            best = min((value for value in values if value is not None), default=None)
            cells = [
                _bold(text, when=bool(text) and value == best)
                for text, value in zip(cells, values, strict=True)
            ]
        if any(cells):
            lines.append(f"| {_named(workload)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _source(path: Path, rows: list[Row]) -> str:
    """Returns a table of the results file: device, versions and number of rows."""
    fields = ("torch", "triton", "transformers")
    versions = " | ".join(all_values(rows, field) for field in fields)
    device = path.stem.removeprefix("models_").replace("_", " ").upper()
    return (
        "| file | device | torch | Triton | Transformers | rows |\n|---|---|---|---|---|--:|\n"
        f"| [{path.name}](../benchmarks/results/{path.name}) | {device} | {versions} | {len(rows)} |"
    )
