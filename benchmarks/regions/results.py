"""The results file of regions: one row for each kind of region of a model, the newest one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from fusedops.backend.prediction import H200, Times, Work, Works

from ..results import read_records, write_records

__all__ = ["Row", "errors", "read", "table", "write"]


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
        operator: the work of the operator.
        compile: the work of Inductor's kernels.
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
    operator: Work
    compile: Work
    commit: str
    torch: str
    triton: str

    @property
    def gain_us(self) -> float:
        """The microseconds that all its operators save in a step."""
        return self.count * (self.compile_us - self.operator_us)

    @property
    def predicted(self) -> Times:
        """The predicted seconds of a call."""
        return Works(self.operator, self.compile).times(H200)

    @property
    def predicted_gain(self) -> float:
        """The predicted speed of the operator, relative to Inductor's."""
        return self.predicted.inductor / self.predicted.operator

    @property
    def gain(self) -> float:
        """The measured speed of the operator, relative to Inductor's."""
        return self.compile_us / self.operator_us


_HEADING = (
    f"{'model':22}{'count':>6}{'chosen':>10}{'operator':>10}{'compile':>9}{'faster':>8}"
    f"{'predicted':>11}{'compile':>9}{'faster':>8}{'gain':>9}  region"
)
_FLOATS = ("operator_us", "compile_us")
_WORKS = ("operator", "compile")
# A loss of more than this, relative to Inductor, counts where a gain was predicted.
_LOSS = 0.05


def _columns() -> tuple[str, ...]:
    names: list[str] = []
    for field in fields(Row):
        terms = [term.name for term in fields(Work)] if field.name in _WORKS else [""]
        names += [f"{field.name}_{term}".strip("_") for term in terms]
    return tuple(names)


def read(path: Path) -> list[Row]:
    """Returns the rows of a results file; none if there is no file.

    Raises:
        UnreadableError: it has other columns.
    """
    return [_row(record) for record in read_records(path, _columns())]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file: a model's new rows replace all its older ones."""
    new = list(rows)
    replaced = {(row.model, row.mode) for row in new}
    merged = [row for row in read(path) if (row.model, row.mode) not in replaced]
    merged = sorted([*merged, *new], key=lambda row: (row.model, row.mode, -row.gain_us, row.key))
    records = []
    for row in merged:
        record: dict[str, Any] = asdict(row)
        record |= {name: f"{record[name]:.3f}" for name in _FLOATS}
        for name in _WORKS:
            record |= {f"{name}_{term}": f"{value:.10g}" for term, value in record[name].items()}
        records.append({name: record[name] for name in _columns()})
    write_records(path, _columns(), records)


def _row(record: Mapping[str, str]) -> Row:
    values: dict[str, Any] = {field.name: record.get(field.name) for field in fields(Row)}
    values |= {name: float(record[name]) for name in _FLOATS}
    for name in _WORKS:
        terms = [float(record[f"{name}_{term.name}"]) for term in fields(Work)]
        values[name] = Work(*terms)
    values["count"] = int(record["count"])
    return Row(**values)


def table(rows: Sequence[Row]) -> str:
    """Returns a line for each kind of region, with those first for which the choice is wrong."""
    lines = [_HEADING]
    for row in sorted(rows, key=_loss_of_choice, reverse=True):
        chosen = "compile" if row.reason else "operator"
        lines.append(
            f"{row.model + ' ' + row.mode:22}{row.count:6}{chosen:>10}{row.operator_us:10.1f}"
            f"{row.compile_us:9.1f}{row.gain:8.2f}"
            f"{row.predicted.operator * 1e6:11.1f}{row.predicted.inductor * 1e6:9.1f}"
            f"{row.predicted_gain:8.2f}{row.gain_us:9.0f}  ({row.shape}) {row.operators}"
        )
    wrong = [row for row in rows if _loss_of_choice(row) > 0]
    lost = sum([_loss_of_choice(row) for row in wrong])
    lines.append(f"{len(wrong)} of {len(rows)} kinds are slower as chosen: {lost:.0f} us in all")
    return "\n".join([*lines, *errors(rows)])


def errors(rows: Sequence[Row]) -> list[str]:
    """Returns lines with the errors of predictions, and with the gains that are losses."""
    timed = [row for row in rows if not math.isnan(row.gain_us)]
    if not timed:
        return []
    pairs = [
        ("gain", [row.predicted_gain / row.gain for row in timed]),
        ("operator", [row.predicted.operator * 1e6 / row.operator_us for row in timed]),
        ("compile", [row.predicted.inductor * 1e6 / row.compile_us for row in timed]),
    ]
    texts = [f"{name} {median([abs(x - 1) for x in ratios]):.1%}" for name, ratios in pairs]
    wrong = [row for row in timed if row.predicted_gain > 1 and row.gain < 1 - _LOSS]
    lines = [
        f"median error of predictions: {', '.join(texts)}",
        f"{len(wrong)} of {len(timed)} kinds lose over {_LOSS:.0%} though a gain was predicted",
    ]
    return lines + [f"  {row.gain:.2f}  {row.model} ({row.shape}) {row.operators}" for row in wrong]


def _loss_of_choice(row: Row) -> float:
    """Returns the microseconds of a step that the other choice would save; negative if none."""
    if math.isnan(row.gain_us):
        return -math.inf
    return row.gain_us if row.reason else -row.gain_us
