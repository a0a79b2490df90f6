"""The results files of generated code, one for each release of PyTorch, and their tables."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..models.workloads import MODELS
from ..results import read_records, write_records

__all__ = ["Row", "markdown", "path_of", "read", "table", "write"]

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_NAMES = {"compile": "torch.compile", "backend": "fusedops.compile"}
_HEADS = (
    "model",
    "compiled by",
    "kernels",
    "of operators",
    "GiB read and written",
    "by operators",
    "products",
    "other calls",
)


@dataclass(frozen=True)
class Row:
    """What the code of a step does that a provider generates.

    Attributes:
        model: the model's name.
        mode: "train" or "infer".
        shape: the sizes of the inputs.
        layers: the number of layers; 0 if the model has none, or all of its own.
        provider: "compile" or "backend".
        generated: launches of Inductor's kernels.
        generated_gib: the GiB that they read and write.
        operators: launches of the kernels of this package's operators.
        operators_gib: the GiB that they read and write.
        products: matrix products and convolutions.
        others: other calls, such as attentions.
    """

    model: str
    mode: str
    shape: str
    layers: int
    provider: str
    generated: int
    generated_gib: float
    operators: int
    operators_gib: float
    products: int
    others: int
    commit: str
    torch: str
    triton: str
    transformers: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of a row: a newer row replaces the older one with the same key."""
        return (self.model, self.mode, self.provider)

    @property
    def kernels(self) -> int:
        """Launches of generated kernels, Inductor's and those of operators."""
        return self.generated + self.operators

    @property
    def gib(self) -> float:
        """The GiB that generated kernels read and write."""
        return self.generated_gib + self.operators_gib


_COLUMNS = tuple([field.name for field in fields(Row)])
_TYPES = {"int": int, "float": float}
_NUMBERS = {field.name: _TYPES[str(field.type)] for field in fields(Row) if field.type in _TYPES}


def path_of(release: str) -> Path:
    """Returns the results file of a release of PyTorch, such as "2.11.0+cu130"."""
    return _RESULTS / f"code_torch_{'_'.join(release.split('.')[:2])}.csv"


def read(path: Path) -> list[Row]:
    """Returns the rows of a results file; none if there is no file.

    Raises:
        UnreadableError: it has other columns.
    """
    return list(map(_row, read_records(path, _COLUMNS)))


def _row(record: dict[str, str]) -> Row:
    values: dict[str, Any] = dict(record)
    for name, number in _NUMBERS.items():
        values[name] = number(record[name])
    return Row(**values)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    merged = {row.key: row for row in itertools.chain(read(path), rows)}
    records = []
    for row in sorted(merged.values(), key=_order):
        record = asdict(row)
        gib = {name: f"{record[name]:.4f}" for name, number in _NUMBERS.items() if number is float}
        records.append(record | gib)
    write_records(path, _COLUMNS, records)


def _order(row: Row) -> tuple[int, str, int]:
    return list(MODELS).index(row.model), row.mode, list(_NAMES).index(row.provider)


def table(rows: Iterable[Row]) -> str:
    """Returns a table in plain text."""
    lines = [_HEADS, *map(_cells, sorted(rows, key=_order))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "\n".join(["  ".join(line).rstrip() for line in aligned])


def markdown(folder: Path) -> str:
    """Returns a table for each results file in a folder, the oldest release first."""
    return "\n\n".join(
        [_of_release(read(path)) for path in sorted(folder.glob("code_torch_*.csv"), key=_release)]
    )


def _release(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", path.stem)))


def _of_release(rows: Sequence[Row]) -> str:
    versions = sorted({(row.torch, row.triton, row.transformers) for row in rows})
    heads = [
        f"PyTorch {torch}, Triton {triton}, Transformers {transformers}"
        for torch, triton, transformers in versions
    ]
    lines = [_HEADS, ["---"] * len(_HEADS), *map(_cells, sorted(rows, key=_order))]
    grid = "\n".join([f"| {' | '.join(line)} |" for line in lines])
    return f"{'; '.join(heads)}. {_means(rows)}\n\n{grid}"


def _means(rows: Sequence[Row]) -> str:
    """Returns the geometric means of what ours does, as a multiple of what theirs does."""
    theirs = {(row.model, row.mode): row for row in rows if row.provider == "compile"}
    pairs = [(row, theirs.get((row.model, row.mode))) for row in rows if row.provider == "backend"]
    both = [(ours, other) for ours, other in pairs if other is not None]
    if not both:
        return ""
    kernels = statistics.geometric_mean([ours.kernels / other.kernels for ours, other in both])
    moved = statistics.geometric_mean([ours.gib / other.gib for ours, other in both])
    return (
        f"fusedops.compile launches {kernels:.2f} times torch.compile's kernels, and these move "
        f"{moved:.2f} times the bytes: geometric means of {len(both)} models."
    )


def _cells(row: Row) -> list[str]:
    share = row.operators_gib / row.gib if row.gib else 0.0
    return [
        f"{row.model} {row.shape}",
        _NAMES[row.provider],
        str(row.kernels),
        str(row.operators),
        f"{row.gib:.2f}",
        f"{share:.0%}",
        str(row.products),
        str(row.others),
    ]
