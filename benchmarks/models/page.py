"""Tables of the results file, for the terminal and for pages of the documentation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from ..columns import all_values, sized
from .first_calls import read as first_calls_of
from .providers import WITHOUT_TRICK
from .results import Row, WorkloadKey, by_workload, read
from .workloads import MODELS, MODES

__all__ = ["compiled", "inference", "markdown", "summary", "table"]

_NAMES = {
    "eager": "eager",
    "fused": "fused",
    "operators": "operators written in",
    "liger": "Liger-Kernel",
    "compile": "torch.compile",
    "compile_autotune": "torch.compile, max-autotune",
    "fused_compile": "fused + torch.compile",
    "backend": "`fusedops.compile`",
    "fused_backend": "fused + `fusedops.compile`",
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
_MODE_TITLES = {
    "train": "## Training step\n\nForward and backward, bf16 autocast over fp32 weights, dropout on.",
    "generate": "## Generation\n\n64 tokens, greedy, after prompts of 64, with `no_repeat_ngram_size=3`, bf16 weights.",
    "infer": "## Inference\n\nThe forward in evaluation mode, without gradients, bf16 weights.",
    "decode": "## Decoding\n\nOne token of each sequence, with a static cache; a shape is the number of sequences, and the "
    "places of the cache. Logits are whole. bf16 weights. Peak memory does not include the cache.",
}
_MODEL_NAMES = {
    "bert": "BERT-base",
    "gpt2": "GPT-2",
    "t5": "T5-base",
    "llama": "Llama-like, 1B",
    "llama_1b": "Llama-3.2-like, 1.2B",
    "llama_8b": "Llama-3.1-like, 8B",
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
- **Liger-Kernel** patches Llama, Qwen 3 and Gemma 2, with its own loss of hidden states, and none of the other models.

To repeat all measurements, on a GPU, with `pip install .[bench,hf]`:

```
python -m benchmarks models --provider eager --provider fused --provider liger
python -m benchmarks models --provider compile --provider fused_compile --provider backend --provider fused_backend
python -m benchmarks models --model bert --provider fused --provider fused_without_packing    # and so on
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
    "backend": '`fusedops.compile` is `torch.compile(backend="fusedops")` on the whole model; behind fused, on what '
    "`fuse_model` has left.",
    "fused_loss": "With a loss of hidden states, the model's forward calls `fusedops.linear_cross_entropy` on what its last "
    "norm returns. The others have whole logits, except Liger-Kernel, whose loss has chunks too.",
    "llama_1b": "Llama-3.2-like has Llama 3.2's vocabulary of 128,256 words; the Llama-like model has 32,000.",
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

The effect of each [trick](models.md#turning-tricks-off): a step of the fused model with all tricks, and without this one."""

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
            parts += [
                _MODE_TITLES[mode],
                "Time per step in ms, and in brackets the speed-up over eager:",
                _grid(workloads, _time),
            ]
            parts += [
                (
                    "Host time per step in ms, until the Python call returns, and in brackets the "
                    "speed-up over eager:"
                ),
                _grid(workloads, _host),
            ]
            if any(row.gpu_ms is not None for row in of_mode):
                parts += [
                    "GPU time per step in ms, and in brackets the speed-up over eager:",
                    _grid(workloads, _gpu),
                ]
            parts += [
                "Peak memory in MiB, and in brackets its ratio to eager's:",
                _grid(workloads, _memory),
            ]
    tricks = _tricks(rows)
    if tricks:
        parts += [_TRICKS, tricks]
    losses = _ordered(row for row in rows if row.mode == "loss")
    if losses:
        parts += [_LOSS, _grid(losses, _loss)]
    present = {row.provider for row in rows} | {row.model for row in rows}
    notes = " ".join(note for name, note in _NOTES.items() if name in present)
    if notes:
        parts.append(textwrap.fill(notes, 120, break_on_hyphens=False))
    return "\n\n".join([*parts, _HOW]) + "\n"


def summary(path: Path) -> str:
    """Returns the README's table: speed-ups of a training step over eager, the greatest in bold.

    Below it are the workloads in which another provider is faster than `fuse_model`.
    """
    names = {
        "fused": "`fuse_model`",
        "compile": "torch.compile",
        "fused_compile": "both",
        "liger": "Liger-Kernel",
    }
    if "backend" in {row.provider for row in read(path)}:
        names["backend"] = _NAMES["backend"]
    lines = [
        "| model, batch | eager, ms | " + " | ".join(names.values()) + " |",
        "|---|--:|" + "--:|" * len(names),
    ]
    slower = []
    rows = [row for row in read(path) if row.mode == "train"]
    complete = [
        (workload, by_provider)
        for workload, by_provider in _ordered(rows)
        if {"eager", "fused"} <= by_provider.keys()
    ]
    superseded = {_SUPERSEDES.get(model) for (model, _, _), _ in complete}
    for (model, _, shape), by_provider in complete:
        if model in superseded:
            continue
        ms = {}
        for name in ("eager", *names):
            row = by_provider.get(name)
            if row is not None and row.ms is not None:
                ms[name] = row.ms
        least = min(ms.values())
        cells = []
        for name in names:
            cell = ""
            if name in ms:
                cell = _bold(f"{ms['eager'] / ms[name]:.2f}", when=ms[name] == least)
            cells.append(cell)
        where = f"{_MODEL_NAMES[model]}, {sized(shape)}"
        lines.append(f"| {where} | {ms['eager']:.1f} | {' | '.join(cells)} |")
        faster = [
            _NAMES[name]
            for name in ("eager", "compile", "liger")
            if ms.get(name, math.inf) < ms["fused"]
        ]
        if faster:
            slower.append(f"{' and '.join(faster)} on {where}")
    text = "Some entries are from another run than eager's: the figures of whole models mark these, and list the spread."
    if slower:
        text = f"Faster than `fuse_model` alone: {'; '.join(slower)}. {text}"
    text = f"The fastest of a row is bold. {text}"
    return "\n".join(lines) + "\n\n" + textwrap.fill(text, 120, break_on_hyphens=False)


def compiled(path: Path, first_calls: Path) -> str:
    """Returns the table of training steps of compiled models, the fastest in bold.

    In brackets are the speed-ups over torch.compile in the same run. A second table has the seconds
    to compile, if they were measured.
    """
    names = ("compile", "fused_compile", "backend")
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
            for name in ("compile", "backend"):
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
    for mode, title in (("infer", "Prefill"), ("decode", "One token")):
        rows = [row for row in read(path) if row.mode == mode and MODELS[row.model].caches]
        if rows:
            parts += [f"{title}, ms, and in brackets the speed-up over eager:"]
            parts += [_grid(_ordered(rows), _time)]
            parts += [f"{title}, tokens a second:", _grid(_ordered(rows), _tokens)]
    return "\n\n".join(parts) or "Nothing has been measured yet."


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
    """Returns the tokens a second: those of a forward, or one of each sequence."""
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


def _grid(workloads: Workloads, cell: Cell) -> str:
    """Returns a table with a line per workload and a column per provider."""
    columns = _columns(workloads)
    lines = [
        "| model | shape | " + " | ".join(_NAMES[name] for name in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for (model, _, shape), by_provider in workloads:
        cells = [_MODEL_NAMES[model], sized(shape), *_cells(by_provider, columns, cell)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _source(path: Path, rows: list[Row]) -> str:
    """Returns a table of the results file: device, versions and number of rows."""
    fields = ("torch", "triton", "transformers", "commit")
    versions = " | ".join(all_values(rows, field) for field in fields)
    device = path.stem.removeprefix("models_").replace("_", " ").upper()
    return (
        "| file | device | torch | Triton | Transformers | commit | rows |\n|---|---|---|---|---|---|--:|\n"
        f"| [{path.name}](../benchmarks/results/{path.name}) | {device} | {versions} | {len(rows)} |"
    )
