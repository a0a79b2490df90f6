"""Tables of the zoo's results, for the terminal and for a page of the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..columns import all_values, sized
from ..models.results import by_workload
from .registry import MODELS, MODES
from .results import Row, read

__all__ = ["markdown", "table"]

_SLOWER = 0.98  # a speed below this is listed; less is noise
_LARGER = 1.01  # and a peak of memory above this
_MODE_TITLES = {
    "train": "Training step: forward and backward, bf16 autocast over fp32 weights.",
    "infer": "Inference: the forward in evaluation mode, without gradients, bf16 weights.",
}
_HEAD = """# Many architectures

[`fusedops.compile`](compile.md) beside `torch.compile` on many architectures, at the widths, heads and vocabularies of
published models, with few layers and random weights. `python -m benchmarks zoo --page` writes this page from the results file."""
_HOW = """## How it is measured

- **Speed** is that of `fusedops.compile`, as a multiple of that of `torch.compile`: above 1 is faster. Both are in their
  default mode. They are timed in one process, in turns, as in [the figures of whole models](model_figures.md).
- **Host** and **GPU** are the same ratio of the host's time until a step's call returns, and of the sum of the times of all
  kernels.
- **Regions** are the operators of fusedops in the compiled graphs, and **breaks** are graph breaks.
- **Correct** results only are timed. Gradients and loss, or the outputs of inference, are compared with those of the eager
  model in fp32. They may differ from these at most twice as much as eager's in bf16, plus a rounding to bf16.
- **Alone**: while a model is timed, the other processes of the command are stopped. Two commands on one machine share its
  processors, and the host's time of each grows: run one on a machine.
- **Masks**: inputs have no `attention_mask`. With PyTorch 2.11, torch.compile gives BERT, ViT and the like a mask that rules out fused
  attention; `fusedops.compile` leaves it out.
- **Layers** are fewer than in the published models. The comments in `benchmarks/zoo` name the model and what is reduced.

To repeat all measurements, on a GPU, with `pip install .[bench,hf]`:

```
python -m benchmarks zoo                                  # all models, in training and inference
python -m benchmarks zoo --budget 500 --resume            # in several runs
python -m benchmarks zoo --part 1/2                       # on one of two machines, each with its share
python -m benchmarks zoo --page                           # this page
```"""


@dataclass(frozen=True)
class _Pair:
    """The rows of a workload; None where there is none."""

    theirs: Row | None
    ours: Row | None

    @property
    def any(self) -> Row:
        """Either row."""
        row = self.ours or self.theirs
        assert row is not None
        return row

    @property
    def name(self) -> str:
        """The model, for lists."""
        return f"{self.any.model} ({self.any.mode})"

    def ratio(self, field: str) -> float | None:
        """Returns torch.compile's number as a multiple of ours, if both were measured in one run."""
        if self.theirs is None or self.ours is None or self.theirs.commit != self.ours.commit:
            return None
        theirs, ours = getattr(self.theirs, field), getattr(self.ours, field)
        return theirs / ours if theirs and ours else None


def table(rows: Iterable[Row]) -> str:
    """Returns tables in plain text, one for each mode, each with its summary."""
    parts = []
    for mode in MODES:
        pairs = _pairs(rows, mode)
        if pairs:
            lines = [_heads(), *map(_cells, pairs)]
            parts.append("\n".join([mode, *_aligned(lines), "", *_summary(pairs)]))
    return "\n\n".join(parts) or "Nothing has been measured yet."


def markdown(path: Path) -> str:
    """Returns the page of a results file, with a note if there are no results."""
    rows = read(path)
    if not rows:
        return f"{_HEAD}\n\nNothing has been measured yet.\n\n{_HOW}\n"
    parts = [_HEAD, _source(path, rows)]
    for mode in MODES:
        pairs = _pairs(rows, mode)
        if pairs:
            summary = "\n".join([f"- {line}" for line in _summary(pairs)])
            parts += [f"## {mode.capitalize()}\n\n{_MODE_TITLES[mode]}", summary, _grid(pairs)]
    return "\n\n".join([*parts, _HOW]) + "\n"


def _pairs(rows: Iterable[Row], mode: str) -> list[_Pair]:
    """Returns the workloads of a mode, in the order of the registry."""
    names = list(MODELS)
    of_mode = by_workload(row for row in rows if row.mode == mode and row.model in MODELS)
    ordered = sorted(of_mode.items(), key=lambda entry: names.index(entry[0][0]))
    return [_Pair(of.get("compile"), of.get("backend")) for _, of in ordered]


def _heads() -> list[str]:
    return [
        "model",
        "shape",
        "torch.compile, ms",
        "fusedops.compile, ms",
        "speed",
        "host",
        "GPU",
        "peaks, MiB",
        "regions",
        "breaks",
    ]


def _cells(pair: _Pair) -> list[str]:
    return [
        pair.any.model,
        pair.any.shape,
        _time(pair.theirs),
        _time(pair.ours),
        _decimal(pair.ratio("ms")),
        _decimal(pair.ratio("host_ms")),
        _decimal(pair.ratio("gpu_ms")),
        f"{_whole(pair.theirs, 'peak_mib')} / {_whole(pair.ours, 'peak_mib')}",
        _whole(pair.ours, "regions"),
        _whole(pair.ours, "breaks"),
    ]


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if row.ms is None:
        return "wrong" if row.failure.startswith("wrong") else "failed"
    spread = "" if row.spread is None else f" ± {row.spread:.2f}"
    return f"{row.ms:.2f}{spread}"


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _whole(row: Row | None, field: str) -> str:
    value = None if row is None else getattr(row, field)
    return "" if value is None else f"{value:.0f}"


def _summary(pairs: Sequence[_Pair]) -> list[str]:
    """Returns the mean, and lists of the models that are slower, larger, or not compared."""
    speeds = [speed for pair in pairs if (speed := pair.ratio("ms")) is not None]
    lines = []
    if speeds:
        mean = math.exp(math.fsum(map(math.log, speeds)) / len(speeds))
        lines.append(f"Geometric mean of the speeds of {len(speeds)} models: {mean:.3f}.")
    slower = _listed(pairs, lambda pair: pair.ratio("ms"), lambda speed: speed < _SLOWER)
    lines.append(f"Slower than torch.compile, below {_SLOWER}: {slower}.")
    larger = _listed(pairs, _memory, lambda ratio: ratio > _LARGER)
    lines.append(f"More memory than torch.compile, above {_LARGER}: {larger}.")
    failures = [
        f"{row.model} with {name}: {row.failure}"
        for pair in pairs
        for name, row in (("torch.compile", pair.theirs), ("fusedops.compile", pair.ours))
        if row is not None and row.failure
    ]
    if failures:
        lines.append(f"Not timed: {'; '.join(failures)}.")
    return lines


def _memory(pair: _Pair) -> float | None:
    ratio = pair.ratio("peak_mib")
    return None if ratio is None else 1 / ratio


def _listed(
    pairs: Sequence[_Pair],
    value: Callable[[_Pair], float | None],
    is_listed: Callable[[float], bool],
) -> str:
    """Returns the models whose value is listed, the farthest from one first."""
    values = [(number, pair) for pair in pairs if (number := value(pair)) is not None]
    chosen = sorted(
        [(abs(number - 1), number, pair.any.model) for number, pair in values if is_listed(number)],
        reverse=True,
    )
    return ", ".join([f"{model} {number:.3f}" for _, number, model in chosen]) or "none"


def _grid(pairs: Sequence[_Pair]) -> str:
    heads = _heads()
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for pair in pairs:
        model, shape, *others = _cells(pair)
        lines.append(f"| {model} | {sized(shape)} | {' | '.join(others)} |")
    return "\n".join(lines)


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)]).rstrip()
        for line in lines
    ]


def _source(path: Path, rows: list[Row]) -> str:
    """Returns a table of the results file: device, versions and number of rows."""
    fields = ("torch", "triton", "transformers")
    versions = " | ".join(all_values(rows, field) for field in fields)
    device = path.stem.removeprefix("zoo_").replace("_", " ").upper()
    return (
        "| file | device | torch | Triton | Transformers | rows |\n|---|---|---|---|---|--:|\n"
        f"| [{path.name}](../benchmarks/results/{path.name}) | {device} | {versions} | {len(rows)} |"
    )
