"""The results as tables: in the terminal, and as a page of the documentation, from the results file alone."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from ..columns import every, sized
from .first_calls import read as first_calls_of
from .providers import WITHOUT
from .results import Place, Row, by_place, read
from .workloads import MODELS, MODES

__all__ = ["compiled", "markdown", "summary", "table"]

_NAMES = {
    "eager": "eager",
    "fused": "fused",
    "liger": "Liger-Kernel",
    "compile": "torch.compile",
    "compile_autotune": "torch.compile, max-autotune",
    "fused_compile": "fused + torch.compile",
    "backend": "`fusedops.compile`",
    "fused_backend": "fused + `fusedops.compile`",
}
_MODE_TITLES = {
    "train": "## Training step\n\nForward and backward, bf16 autocast over fp32 weights, dropout on.",
    "generate": "## Generation\n\n64 tokens, greedy, after prompts of 64, with `no_repeat_ngram_size=3`, bf16 weights.",
    "infer": "## Inference\n\nThe forward in evaluation mode, without gradients, bf16 weights.",
}
_MODEL_NAMES = {
    "bert": "BERT-base",
    "gpt2": "GPT-2",
    "t5": "T5-base",
    "llama": "Llama-like, 1B",
    "vit": "ViT-B/16",
    "qwen3": "Qwen-3-like, 0.6B",
    "gemma2": "Gemma-2-like, 1.6B",
    "mixtral": "Mixtral-like, 0.8B",
    "dit": "DiT-L/2-like",
    "nanogpt": "nanoGPT, by hand",
    "meta_llama": "Llama, by hand, 1B",
    "gated_decoder": "gated decoder, by hand",
}

_HEAD = """# Whole models: figures

The speed-up of [`fuse_model`](models.md) on models of Transformers, built from config with random weights.
`python -m benchmarks models --page` writes this page from the results file."""

_HOW = """## How it is measured

- **Time** is wall-clock time per step, including the host's. Steps run back to back, with a synchronisation only around each
  block of steps. A figure is the median of five to sixty blocks, in which the candidates take turns. The number after ± is the
  interquartile range. The number in brackets is the speed-up over eager: above 1 is faster.
- **†** marks a comparison of two commits, and so of two runs. The state of the machine may differ between them.
- **Host time** is the median of single steps that start with an empty queue. It was measured at another moment than the time
  per step, and so may exceed it.
- **GPU time** is the sum of the times of a step's kernels, by the profiler. Where it is below the host time, the step is
  bound by the host.
- **Peak memory** includes weights, gradients and activations.
- **Text** in batches is the source of Python's standard library, byte by byte.
- **Compiled candidates** are measured after the others, and take turns among themselves. No figure includes compilation.
- **Models.** All attention is PyTorch's `scaled_dot_product_attention`, Transformers' default. Dropout is 0.1 if the model has
  dropout. Llama has none; for ViT, whose config has 0, it is set to 0.1. A training step has no optimizer, and a forward returns
  no keys and values.
- **torch.compile** compiles the whole model in its default mode. "fused + torch.compile" is
  `fuse_model(model, compile_rest=True)`. With PyTorch 2.11, a BERT or ViT that is only compiled gets a [mask](models.md#masks)
  that rules out PyTorch's fused attention. Generation is not compiled: its cache grows by one token per step, and each size
  would be compiled.
- **Liger-Kernel** patches Llama, and none of the other models.

To repeat all measurements, on a GPU, with `pip install .[bench,hf]`:

```
python -m benchmarks models --provider eager --provider fused --provider liger
python -m benchmarks models --provider compile --provider fused_compile --provider backend --provider fused_backend
python -m benchmarks models --model bert --provider fused --provider fused_without_packing    # and so on
python -m benchmarks models --loss
python -m benchmarks models --first-calls                      # seconds to compile, cold and in a second process
python -m benchmarks models --page                             # this page
python -m benchmarks models --profile --model gpt2 --mode train --provider fused    # where the time goes
```"""

# Said where there are rows of such a provider or model.
_NOTES = {
    "compile_autotune": 'Max-autotune is `torch.compile(mode="max-autotune-no-cudagraphs")`.',
    "backend": '`fusedops.compile` is `torch.compile(backend="fusedops")` on the whole model; behind fused, on what '
    "`fuse_model` has left.",
    "nanogpt": "nanoGPT and Llama by hand are not Transformers' code but in the manner of nanoGPT's and Meta's, at the "
    "sizes of GPT-2 and the Llama-like model.",
    "gemma2": "Gemma-2-like is half of the layers of Gemma 2 2B; its attention has a soft cap, and is the one that "
    "Transformers writes out.",
    "mixtral": "Mixtral-like is a quarter of the width and of the layers of Mixtral 8x7B, with its eight experts.",
    "gated_decoder": "The gated decoder by hand has twelve layers of 1024 columns with heads of 64. Queries and keys are "
    "normalised, and rotated in pairs of neighbours; a sigmoid gate follows attention, and norms follow attention and "
    "the MLP, which squares its ReLU.",
    "dit": "DiT-L/2-like is written by hand; its loss is the error of the noise that it predicts in latents.",
}

_LOSS = """## Loss after 100 steps

The mean of the last 5 of 100 steps of AdamW at a learning rate of 1e-4, in batches of 8, with dropout and autocast. Each
figure is the mean over three seeds; in brackets is the range over the seeds. For a seed, all candidates have the same weights
and batches. BERT predicts the 15% of the tokens that are masked. T5 continues 128 bytes with 64. ViT has no text: its images
are windows of the text's bytes, and the class is the byte that follows."""


_TRICKS = """## Tricks

The effect of each [trick](models.md#turning-tricks-off): a step of the fused model with all tricks, and without this one."""

Places = list[tuple[Place, dict[str, Row]]]
Cell = Callable[[Row, "Row | None"], str]  # of a row, beside eager's


def table(rows: Iterable[Row]) -> str:
    """One line a workload, in plain text.

    Each provider's ms, in brackets its speed-up over eager, its peak in MiB.
    """
    places = _ordered(rows)
    columns = _columns(places)
    lines = [["model", "mode", "shape", *columns]]
    lines += [[*place, *_cells(seen, columns, _plain)] for place, seen in places]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(path: Path) -> str:
    """The page, from a results file; where there is none, the page says so."""
    rows = read(path)
    if not rows:
        return f"{_HEAD}\n\nNothing has been measured yet.\n\n{_HOW}\n"
    parts = [_HEAD, _source(path, rows)]
    for mode in MODES:
        places = _ordered(row for row in rows if row.mode == mode)
        if places:
            parts += [
                _MODE_TITLES[mode],
                "Time per step in ms, and in brackets the speed-up over eager:",
                _grid(places, _time),
            ]
            parts += [
                "Host time per step in ms, until the Python call returns, and in brackets the speed-up over eager:",
                _grid(places, _host),
            ]
            if any(row.gpu_ms is not None for _, seen in places for row in seen.values()):
                parts += [
                    "GPU time per step in ms, and in brackets the speed-up over eager:",
                    _grid(places, _gpu),
                ]
            parts += [
                "Peak memory in MiB, and in brackets its ratio to eager's:",
                _grid(places, _memory),
            ]
    tricks = _tricks(rows)
    if tricks:
        parts += [_TRICKS, tricks]
    losses = _ordered(row for row in rows if row.mode == "loss")
    if losses:
        parts += [_LOSS, _grid(losses, _loss)]
    present = {name for row in rows for name in (row.provider, row.model)}
    notes = " ".join(note for name, note in _NOTES.items() if name in present)
    return (
        "\n\n".join(
            [*parts, *([textwrap.fill(notes, 120, break_on_hyphens=False)] if notes else []), _HOW]
        )
        + "\n"
    )


def summary(path: Path) -> str:
    """The README's table: speed-ups of a training step over eager, the greatest bold, and where another is faster."""
    names = {
        "fused": "`fuse_model`",
        "compile": "torch.compile",
        "fused_compile": "both",
        "liger": "Liger-Kernel",
    }
    names |= {name: _NAMES[name] for name in {row.provider for row in read(path)} & {"backend"}}
    lines = [
        "| model, batch | eager, ms | " + " | ".join(names.values()) + " |",
        "|---|--:|" + "--:|" * len(names),
    ]
    lost = []
    for (model, _, shape), seen in _ordered(row for row in read(path) if row.mode == "train"):
        ms = {
            name: row.ms
            for name, row in seen.items()
            if (name == "eager" or name in names) and row.ms is not None
        }
        if "eager" not in ms or "fused" not in ms:
            continue
        least = min(ms.values())
        cells = [
            _bold(f"{ms['eager'] / ms[name]:.2f}", ms[name] == least) if name in ms else ""
            for name in names
        ]
        where = f"{_MODEL_NAMES[model]}, {sized(shape)}"
        lines.append(f"| {where} | {ms['eager']:.1f} | {' | '.join(cells)} |")
        faster = [
            _NAMES[name]
            for name in ("eager", "compile", "liger")
            if ms.get(name, math.inf) < ms["fused"]
        ]
        if faster:
            lost.append(f"{' and '.join(faster)} on {where}")
    text = "Some entries are from another run than eager's: the figures of whole models mark these, and list the spread."
    if lost:
        text = f"Faster than `fuse_model` alone: {'; '.join(lost)}. {text}"
    text = f"The fastest of a row is bold. {text}"
    return "\n".join(lines) + "\n\n" + textwrap.fill(text, 120, break_on_hyphens=False)


def compiled(path: Path, first_calls: Path) -> str:
    """Training steps of compiled models, the least bold, and in brackets the speed-up over torch.compile of the same run.

    Behind it are the seconds to compile, if they were measured.
    """
    names = ("compile", "fused_compile", "backend")
    compared: Places = []
    for place, seen in _ordered(row for row in read(path) if row.mode == "train"):
        if (
            "compile" in seen
            and "backend" in seen
            and seen["compile"].commit == seen["backend"].commit
        ):
            compared.append(
                (
                    place,
                    {
                        name: row
                        for name, row in seen.items()
                        if row.commit == seen["backend"].commit
                    },
                )
            )
    if not compared:
        return "Nothing has been measured yet."
    more = [
        (f"{_NAMES[name]}, {figure}", name, cell)
        for figure, field, cell in (
            ("GPU time, ms", "gpu_ms", _gpu),
            ("peak, MiB", "peak_mib", _peak),
        )
        for name in ("compile", "backend")
        if any(getattr(row, field) is not None for _, seen in compared for row in seen.values())
    ]
    heads = [*[f"{_NAMES[name]}, ms" for name in names], *[head for head, *_ in more]]
    lines = [f"| model, batch | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for (model, _, shape), seen in compared:
        least = min(row.ms for name, row in seen.items() if name in names and row.ms is not None)
        cells = [
            _bold(_time(seen[name], seen["compile"]), seen[name].ms == least)
            if name in seen
            else ""
            for name in names
        ]
        cells += [cell(seen[name], seen["compile"]) for _, name, cell in more]
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


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text


def _tricks(rows: list[Row]) -> str:
    """A line for each trick that was measured: a step with it and without."""
    keyed = {row.key: row for row in rows}
    lines = [
        "| trick | model | mode | shape | | with, ms | without, ms |",
        "|---|---|---|---|---|--:|--:|",
    ]
    for row in rows:
        trick, other = WITHOUT.get(row.provider, ("", ""))
        base = keyed.get((*row.place, other))
        if trick and base is not None and base.commit == row.commit:
            lines.append(
                f"| `{trick}` | {_MODEL_NAMES[row.model]} | {row.mode} | {sized(row.shape)} | {_NAMES[other]} | "
                f"{_time(base, None)} | {_time(row, None)} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def _time(row: Row, eager: Row | None) -> str:
    if row.ms is None:
        return ""
    spread = "" if row.spread is None else f" ± {row.spread:.2f}"
    return f"{row.ms:.2f}{spread}{_times(row, eager, 'ms')}"


def _times(row: Row, eager: Row | None, field: str) -> str:
    """How many times as fast as eager; behind a dagger if that was measured at another commit."""
    ours, theirs = getattr(row, field), getattr(eager, field, None)
    if eager is None or eager is row or ours is None or theirs is None:
        return ""
    return f" ({theirs / ours:.2f}{'' if eager.commit == row.commit else '†'})"


def _host(row: Row, eager: Row | None) -> str:
    return "" if row.host_ms is None else f"{row.host_ms:.2f}{_times(row, eager, 'host_ms')}"


def _gpu(row: Row, eager: Row | None) -> str:
    return "" if row.gpu_ms is None else f"{row.gpu_ms:.2f}{_times(row, eager, 'gpu_ms')}"


def _peak(row: Row, eager: Row | None) -> str:
    return "" if row.peak_mib is None else f"{row.peak_mib:.0f}"


def _memory(row: Row, eager: Row | None) -> str:
    if row.peak_mib is None:
        return ""
    part = (
        ""
        if eager is None or eager is row or eager.peak_mib is None
        else f" ({row.peak_mib / eager.peak_mib:.2f})"
    )
    return f"{row.peak_mib:.0f}{part}"


def _loss(row: Row, eager: Row | None) -> str:
    if row.loss is None:
        return ""
    return f"{row.loss:.4f}" + ("" if row.loss_spread is None else f" ({row.loss_spread:.4f})")


def _plain(row: Row, eager: Row | None) -> str:
    if row.ms is None:
        return f"loss {_loss(row, eager)}"
    times = _times(row, eager, "ms").replace(")", "x)")
    peak = "" if row.peak_mib is None else f" {row.peak_mib:.0f} MiB"
    return f"{row.ms:.2f} ms{times}{peak}"


def _ordered(rows: Iterable[Row]) -> Places:
    """The workloads in the order in which they are measured."""
    modes, models = [*MODES, "loss"], list(MODELS)
    return sorted(
        by_place(rows).items(),
        key=lambda entry: (modes.index(entry[0][1]), models.index(entry[0][0])),
    )


def _columns(places: Places) -> list[str]:
    """The providers that have a row, in a fixed order."""
    return [name for name in _NAMES if any(name in seen for _, seen in places)]


def _cells(seen: dict[str, Row], columns: list[str], cell: Cell) -> list[str]:
    return [cell(seen[name], seen.get("eager")) if name in seen else "" for name in columns]


def _grid(places: Places, cell: Cell) -> str:
    columns = _columns(places)
    lines = [
        "| model | shape | " + " | ".join(_NAMES[name] for name in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for (model, _, shape), seen in places:
        named = f"{_MODEL_NAMES[model]} | {sized(shape)}"
        lines.append(f"| {named} | {' | '.join(_cells(seen, columns, cell))} |")
    return "\n".join(lines)


def _source(path: Path, rows: list[Row]) -> str:
    fields = ("torch", "triton", "transformers", "commit")
    versions = " | ".join(every(rows, field) for field in fields)
    device = path.stem.removeprefix("models_").replace("_", " ").upper()
    return (
        "| file | device | torch | Triton | Transformers | commit | rows |\n|---|---|---|---|---|---|--:|\n"
        f"| [{path.name}](../benchmarks/results/{path.name}) | {device} | {versions} | {len(rows)} |"
    )
