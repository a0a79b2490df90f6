"""The results file of regions: one row for each kind of region of a model, the newest one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..results import read_records, write_records

__all__ = ["Row", "read", "table", "write"]


@dataclass(frozen=True)
class Row:
    """A kind of region of a model, with the time of a call, forward and, in training, backward.

    Attributes:
        model: the model's name.
        mode: "train" or "infer".
        operators: PyTorch's operators in it.
        key: a digest of its function and its tensors.
        shape: the shape of its largest output.
        dtypes: the dtypes of its inputs.
        count: how often the model has it.
        reason: why `fusedops.compile` leaves it to Inductor; "" if it does not.
        operator_us: the microseconds of its operator; NaN if it cannot be one.
        compile_us: the microseconds of Inductor's kernels, alone.
        moved_mib: MiB of whole tensors that the operator's kernels read and write; 0 if it is left.
    """

    model: str
    mode: str
    operators: str
    key: str
    shape: str
    dtypes: str
    count: int
    reason: str
    operator_us: float
    compile_us: float
    moved_mib: float
    commit: str
    torch: str
    triton: str

    @property
    def gain_us(self) -> float:
        """The microseconds that all its operators save in a step."""
        return self.count * (self.compile_us - self.operator_us)


_HEADING = (
    f"{'model':22}{'count':>6}{'chosen':>10}{'operator':>10}{'compile':>9}{'faster':>8}"
    f"{'gain':>9}  region"
)
_COLUMNS = tuple([field.name for field in fields(Row)])
_FLOATS = ("operator_us", "compile_us", "moved_mib")


def read(path: Path) -> list[Row]:
    """Returns the rows of a results file; none if there is no file.

    Raises:
        UnreadableError: it has other columns.
    """
    return [_row(record) for record in read_records(path, _COLUMNS)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file: a model's new rows replace all its older ones."""
    new = list(rows)
    replaced = {(row.model, row.mode) for row in new}
    merged = [row for row in read(path) if (row.model, row.mode) not in replaced]
    merged = sorted([*merged, *new], key=lambda row: (row.model, row.mode, -row.gain_us, row.key))
    records = []
    for row in merged:
        record: dict[str, Any] = asdict(row)
        records.append(record | {name: f"{record[name]:.3f}" for name in _FLOATS})
    write_records(path, _COLUMNS, records)


def _row(record: dict[str, str]) -> Row:
    values: dict[str, Any] = dict(record)
    values |= {name: float(record[name]) for name in _FLOATS}
    values["count"] = int(record["count"])
    return Row(**values)


def table(rows: Sequence[Row]) -> str:
    """Returns a line for each kind of region, with those first for which the choice is wrong."""
    lines = [_HEADING]
    for row in sorted(rows, key=_loss_of_choice, reverse=True):
        chosen = "compile" if row.reason else "operator"
        lines.append(
            f"{row.model + ' ' + row.mode:22}{row.count:6}{chosen:>10}{row.operator_us:10.1f}"
            f"{row.compile_us:9.1f}{row.compile_us / row.operator_us:8.2f}{row.gain_us:9.0f}"
            f"  ({row.shape}) {row.operators}"
        )
    wrong = [row for row in rows if _loss_of_choice(row) > 0]
    lost = sum([_loss_of_choice(row) for row in wrong])
    lines.append(f"{len(wrong)} of {len(rows)} kinds are slower as chosen: {lost:.0f} us in all")
    return "\n".join(lines)


def _loss_of_choice(row: Row) -> float:
    """Returns the microseconds of a step that the other choice would save; negative if none."""
    if math.isnan(row.gain_us):
        return -math.inf
    return row.gain_us if row.reason else -row.gain_us
