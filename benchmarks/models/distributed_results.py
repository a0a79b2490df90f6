"""The results of the command ``distributed``: rows in a file, and the table of a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .. import results
from ..columns import all_values, sized

__all__ = ["MASKS", "Row", "line", "markdown", "read", "write"]

MASKS = "masks"
_MODEL_NAMES = {
    "llama": "Llama-like, 1B",
    "bert": "BERT-base",
    "gated_decoder": "Gated decoder",
    "train_lm": "`train_lm_distributed.py`",
    MASKS: "masks",
}
_LAYOUT_NAMES = {
    "tp": "TP, sequence parallel",
    "fsdp": "FSDP2",
    "fsdp-checkpointed": "FSDP2, checkpointed",
}
# The providers whose blocks are compiled, and the two that they are compared with.
_COMPILED = ("compile", "backend")
_EAGER = ("eager", "fused")
_EMPTY = "Figures of several GPUs are not measured yet."
_HOW = """A row is a training step in bf16 autocast, forward and backward; the example's step has its optimizer too. Two figures
in a cell are those of torch.nn and of the fused model, and two more those of torch.compile and of `fusedops.compile_blocks`, for
each block; all take turns in one run. A provider that was not measured has no figure. ms is the median over blocks of steps
of the slowest process's time. Scaling is the fused model's tokens per second and GPU, over those of one GPU. Collectives
are those of a step on one process: their number, and the sum of the larger side of each. Peak memory is that of the process
that needs the most: of the example all that it holds, of the others what a step allocates. The last column is the largest
difference of the first ten losses."""
_COLUMNS = (
    "model, batch",
    "layout",
    "GPUs",
    "torch.nn, ms",
    "fused, ms",
    "speed-up",
    "torch.compile, ms",
    "fusedops.compile, ms",
    "speed-up",
    "tokens/s",
    "scaling",
    "peak, MiB",
    "collectives",
    "loss, from one process",
)


@dataclass(frozen=True)
class Row:
    """The measurements of a provider in a layout. A number is None if it was not measured.

    Attributes:
        ranks: the number of processes.
        ms: the milliseconds per step of the slowest process, the median over blocks of steps.
        spread: the interquartile range of ``ms`` over blocks.
        tokens: the tokens per second of all processes.
        peak_mib: the peak memory of the process that needs the most, without parameters and
            gradients; for the example, with all that it allocates.
        loss: the loss of the first step; for the example, of the last step.
        difference: the difference from one process: for the example, the largest of the first
            losses; for masks, the number of elements that differ.
        moved_mib: the MiB of a step's collectives, the larger side of each.
        collectives: the collectives of a step, by name, with their numbers.
        device: the name of the GPU.
    """

    model: str
    shape: str
    layout: str
    ranks: int
    provider: str
    ms: float | None
    spread: float | None
    tokens: float | None
    peak_mib: float | None
    loss: float | None
    difference: float | None
    moved_mib: float | None
    collectives: str
    device: str
    commit: str
    torch: str
    triton: str
    transformers: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a row: a newer row replaces the older one with the same key."""
        return (self.model, self.shape, self.layout, self.ranks, self.provider)


COLUMNS = tuple(field.name for field in fields(Row))
_NUMBERS = ("ms", "spread", "tokens", "peak_mib", "loss", "difference", "moved_mib")


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if there is no file."""
    return [_row(record) for record in results.read_records(path, COLUMNS)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    merged = {row.key: row for row in read(path)} | {row.key: row for row in rows}
    results.write_records(path, COLUMNS, [_record(merged[key]) for key in sorted(merged)])


def line(row: Row) -> str:
    """Returns a line for the terminal."""
    if row.model == MASKS:
        return f"masks {row.shape} on a mesh of {row.layout}: {row.difference:.0f} elements differ from one process's"
    difference = (
        "" if row.difference is None else f"  difference from one process {row.difference:.1e}"
    )
    return (
        f"{row.model} {row.shape} {row.layout:<18} {row.provider:<7}{row.ms:9.2f} ms ± {row.spread:.2f} "
        f"{row.tokens:12,.0f} tokens/s  peak {row.peak_mib or 0.0:9,.0f} MiB  loss {row.loss:.4f}{difference}  "
        f"{row.collectives} {_mib(row)}"
    )


def markdown(folder: Path) -> str:
    """Returns a table for each device that was measured, and an explanation."""
    files = sorted(folder.glob("distributed_*.csv"))
    rows = [row for path in files for row in read(path)]
    if not rows:
        return _EMPTY
    by_device: dict[str, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row.device, []).append(row)
    parts = [_device(device, of_device) for device, of_device in by_device.items()]
    return "\n\n".join([*parts, _HOW])


def _device(device: str, rows: list[Row]) -> str:
    """Returns the table of a device, the result of its masks, and its versions."""
    # The rows of all providers, by the key without the provider.
    pairs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=_order):
        if row.model != MASKS:
            pairs.setdefault(row.key[:-1], {})[row.provider] = row
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---|---|" + "--:|" * (len(_COLUMNS) - 2)]
    compared = [pair for pair in pairs.values() if _times(pair, _EAGER) or _times(pair, _COMPILED)]
    lines += [_pair(pair, rows) for pair in compared]
    parts = ["\n".join(lines)] if len(lines) > 2 else []
    masks = [row for row in rows if row.model == MASKS]
    if masks:
        meshes = ", ".join(sized(row.layout) for row in sorted(masks, key=_order))
        parts.append(
            f"Masks of sharded tensors against one GPU's, all operators with dropout, meshes of {meshes}: "
            f"{sum(row.difference or 0.0 for row in masks):.0f} elements differ."
        )
    versions = (
        f"torch {all_values(rows, 'torch')}, Triton {all_values(rows, 'triton')}, Transformers "
        f"{all_values(rows, 'transformers')}, commit {all_values(rows, 'commit')}"
    )
    return "\n\n".join([*parts, f"{device}, {versions}."])


def _pair(pair: dict[str, Row], rows: list[Row]) -> str:
    """Returns the table's line for the rows of all providers of a model in a layout."""
    measured = [pair[name] for name in (*_EAGER, *_COMPILED) if name in pair]
    first, ours = measured[0], pair.get("fused", measured[-1])
    name = _MODEL_NAMES[first.model]
    layout = _LAYOUT_NAMES.get(first.layout, f"FSDP2 × TP, {sized(first.layout)}")  # noqa: RUF001
    difference = ""
    if ours.difference is not None:
        difference = f"{first.difference or 0.0:.0e} / {ours.difference:.0e}"
    collectives = " / ".join(
        f"{_count(row)}, {_mib(row)}".strip(", ") if row.collectives else "" for row in measured
    )
    cells = [
        f"{name}, {sized(first.shape)}",
        layout,
        str(first.ranks),
        *(_times(pair, _EAGER) or [""] * 3),
        *(_times(pair, _COMPILED) or [""] * 3),
        " / ".join(f"{row.tokens:,.0f}" for row in measured),
        _scaling(ours, rows),
        " / ".join(f"{row.peak_mib or 0:,.0f}" for row in measured),
        collectives.strip(" /"),
        difference,
    ]
    return "| " + " | ".join(cells) + " |"


def _times(pair: dict[str, Row], providers: tuple[str, str]) -> list[str]:
    """Returns the milliseconds of two providers and their ratio; nothing without them."""
    if not pair.keys() >= set(providers):
        return []
    first, second = (pair[name].ms or 0.0 for name in providers)
    return [f"{first:.1f}", f"{second:.1f}", f"{first / second:.2f}" if second else ""]


def _scaling(row: Row, rows: list[Row]) -> str:
    """Returns the tokens per second and process, over those of a run of one process."""
    of_one_process = {other.key: other for other in rows if other.ranks == 1}
    model, shape, layout, ranks, provider = row.key
    base = of_one_process.get((model, shape, layout, 1, provider))
    if base is None or ranks == 1:
        return ""
    if not base.tokens or not row.tokens:
        return ""
    return f"{row.tokens / ranks / base.tokens:.2f}"


def _count(row: Row) -> int:
    """Returns the number of collectives."""
    return sum(int(word.rpartition(":")[2]) for word in row.collectives.split())


def _mib(row: Row) -> str:
    """Returns the size of the collectives as text."""
    if row.moved_mib is None:
        return ""
    return f"{row.moved_mib:,.0f} MiB" if row.moved_mib >= 1 else "< 1 MiB"


def _order(row: Row) -> tuple[Any, ...]:
    """Returns a row's sort key."""
    models, layouts = list(_MODEL_NAMES), list(_LAYOUT_NAMES)
    position = layouts.index(row.layout) if row.layout in layouts else len(layouts)
    return (models.index(row.model), row.shape, position, row.ranks, row.layout, row.provider)


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    return record | {
        name: "" if record[name] is None else f"{record[name]:.6g}" for name in _NUMBERS
    }


def _row(record: dict[str, str]) -> Row:
    numbers = {name: float(record[name]) if record[name] else None for name in _NUMBERS}
    values: dict[str, Any] = {**record, **numbers, "ranks": int(record["ranks"])}
    return Row(**values)
