"""The charts, made from the results: their data, which ``drawing`` draws.

They show bandwidth and speed-up along each line of a sweep, and one figure per operator. A
picture's file has the chart's digest. By it a test checks that the committed pictures show the
committed results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusedops.core.spec import Spec

from .cases import DTYPES
from .columns import COLUMNS, MODE_NAMES, CaseKey, best, by_case, launch_bound, sized
from .floors import bytes_moved
from .results import Row, elements, sides
from .sweep import Line, lines

__all__ = [
    "Chart",
    "Data",
    "Dots",
    "Lines",
    "Panel",
    "bandwidth",
    "fractions",
    "host_time",
    "peak_memory",
    "speed_up",
]

_TYPICAL = 4096  # columns of the shape that represents an operator
_FEWEST_POINTS = 4  # of a line that gets a panel


@dataclass(frozen=True)
class Chart:
    """A picture's title and, in a subclass, its numbers."""

    title: str

    def digest(self) -> str:
        """Returns a hash of everything that the picture shows."""
        shown = json.dumps([type(self).__name__, _rounded(asdict(self))])
        return hashlib.sha256(shown.encode()).hexdigest()


@dataclass(frozen=True)
class Dots(Chart):
    """A chart with a row for each operator, in which each column has a dot."""

    unit: str
    groups: dict[str, dict[str, float]]
    form: str  # the format of fusedops' number, which is printed
    mark: float | None = None  # a vertical line, such as the roofline


@dataclass(frozen=True)
class Panel:
    """A line of a sweep: each column's points, and the height of the dashed line."""

    title: str
    x_label: str
    ticks: tuple[int, ...]
    series: dict[str, tuple[tuple[int, float], ...]]
    level: float


@dataclass(frozen=True)
class Lines(Chart):
    """Panels of lines."""

    kind: str  # "bandwidth" or "speed_up"
    wide: bool  # whether values differ so much that only a logarithmic axis shows them: along rows
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Data:
    """The data of a chart: the rows of some operators in one dtype and mode."""

    rows: Sequence[Row]
    specs: Sequence[Spec]
    dtype: str
    mode: str

    @property
    def named(self) -> str:
        """The dtype and mode, for a title."""
        return f"{self.dtype}, {MODE_NAMES[self.mode]}"

    def cases(self) -> dict[CaseKey, dict[str, Row]]:
        """Returns the rows of the dtype and mode, by case and provider."""
        return by_case(row for row in self.rows if (row.dtype, row.mode) == (self.dtype, self.mode))

    def typical(self) -> dict[str, tuple[str, dict[str, Row]]]:
        """Returns each operator's measured shape nearest to 4096 columns, and its rows by provider.

        If several shapes are equally near, it is the largest.
        """
        # By operator: how far its best shape is from the typical one, the shape, and its rows.
        nearest: dict[str, tuple[tuple[float, int], str, dict[str, Row]]] = {}
        for (op, shape, *_), by_provider in self.cases().items():
            row = next(iter(by_provider.values()))
            if launch_bound(row):
                continue
            distance = (abs(math.log2(_columns(row) / _TYPICAL)), -elements(shape))
            if op not in nearest or distance < nearest[op][0]:
                nearest[op] = (distance, shape, by_provider)
        return {spec.name: nearest[spec.name][1:] for spec in self.specs if spec.name in nearest}


def fractions(data: Data) -> Dots | None:
    """Returns a chart of the fraction of the roofline at typical shapes; None without results."""
    groups = {}
    for op, (shape, by_provider) in data.typical().items():
        results = {column: best(by_provider, column) for column in COLUMNS}
        # The floor is zero for an operator that need not move its tensors: it has no fraction.
        dots = {
            column: row.fraction
            for column, row in results.items()
            if row is not None and row.floor_us
        }
        if dots:
            groups[f"{op}  {sized(shape)}"] = dots
    if not groups:
        return None
    title = f"Fraction of the roofline: {data.named}"
    unit = "1 is the time of a copy of the same bytes"
    return Dots(title, unit, groups, form="{:.2f}", mark=1.0)


def bandwidth(data: Data, axes: Sequence[str]) -> Lines | None:
    """Returns a chart of terabytes per second of the unavoidable bytes; None without results.

    It has a line for each column, and the roofline dashed.
    """
    panels = []
    for spec, line, points in _lines(data, axes):
        series = {}
        for column in COLUMNS:
            rows = _points_of(points, column)
            series[column] = tuple((x, _moved(spec, row) / row.gpu_us / 1e6) for x, row in rows)
        # The roofline is the bandwidth of a copy. Each run measures it; this is the last point's.
        _, by_provider = points[-1]
        last = next(iter(by_provider.values()))
        panels.append(_panel(spec, line, series, level=_moved(spec, last) / last.floor_us / 1e6))
    if not panels:
        return None
    title = f"Bandwidth, TB/s: {data.named}"
    return Lines(title, "bandwidth", wide="rows" in axes, panels=tuple(panels))


def speed_up(data: Data, axes: Sequence[str]) -> Lines | None:
    """Returns a chart of each peer's GPU time over fusedops'; None without results."""
    _, *peers = COLUMNS
    panels = []
    for spec, line, points in _lines(data, axes):
        ours = dict(_points_of(points, "fusedops"))
        series = {}
        for column in peers:
            rows = [(x, row) for x, row in _points_of(points, column) if x in ours]
            series[column] = tuple((x, row.gpu_us / ours[x].gpu_us) for x, row in rows)
        panels.append(_panel(spec, line, series, level=1.0))
    if not panels:
        return None
    title = f"Speed-up over each peer: {data.named}"
    return Lines(title, "speed_up", wide="rows" in axes, panels=tuple(panels))


def peak_memory(data: Data) -> Dots | None:
    """Returns a chart of a call's peak memory, in tensors of the shape; None without results."""
    groups = {}
    for op, (shape, by_provider) in data.typical().items():
        results = {column: best(by_provider, column, by="peak_mib") for column in COLUMNS}
        groups[f"{op}  {sized(shape)}"] = {
            column: row.peak_mib / _mib(row) for column, row in results.items() if row is not None
        }
    if not groups:
        return None
    title = f"Peak memory beyond the inputs: {data.named}"
    return Dots(title, "tensors of the operator's shape", groups, form="{:.1f}")


def host_time(data: Data) -> Dots | None:
    """Returns a chart of microseconds per call in a Python loop, at each operator's smallest shape.

    It is None without results.
    """
    results: dict[str, dict[str, float]] = {}
    # The largest shapes come first, so that smaller ones replace them.
    for (op, *_), by_provider in sorted(
        data.cases().items(), key=lambda item: -elements(item[0][1])
    ):
        if launch_bound(next(iter(by_provider.values()))):
            times = {column: best(by_provider, column, by="loop_us") for column in COLUMNS}
            results[op] = {column: row.loop_us for column, row in times.items() if row is not None}
    groups = {spec.name: results[spec.name] for spec in data.specs if spec.name in results}
    if not groups:
        return None
    return Dots(f"Host time, small tensors: {data.named}", "µs a call", groups, form="{:.0f}")


def _rounded(value: Any) -> Any:
    """Returns a chart's numbers as text of six digits, which are the same on every machine."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value


def _lines(
    data: Data, axes: Sequence[str]
) -> Iterator[tuple[Spec, Line, list[tuple[int, dict[str, Row]]]]]:
    """Yields the lines with enough measured points, and each point's rows by provider."""
    cases = data.cases()
    for spec in data.specs:
        for line in lines(spec, axes):
            points = []
            for x, shape in line.points:
                case = (spec.name, "x".join(map(str, shape)), data.dtype, data.mode)
                if case in cases:
                    points.append((x, cases[case]))
            if len(points) >= min(_FEWEST_POINTS, len(line.points)):
                yield spec, line, points


def _points_of(points: list[tuple[int, dict[str, Row]]], column: str) -> list[tuple[int, Row]]:
    """Returns the points for which a column has results."""
    results = ((x, best(by_provider, column)) for x, by_provider in points)
    return [(x, row) for x, row in results if row is not None]


def _panel(spec: Spec, line: Line, series: dict[str, Any], level: float) -> Panel:
    shown = {column: points for column, points in series.items() if points}
    return Panel(spec.name, _x_label(line), tuple(x for x, _ in line.points), shown, level)


def _x_label(line: Line) -> str:
    if line.axis == "rows":
        return f"rows of {sized('x'.join(map(str, line.tail)))}"
    if line.axis == "slices":
        return f"slices of width {line.tail[0]}"
    return f"width of {line.tail[0]} slices" if line.tail else "hidden size"


def _columns(row: Row) -> int:
    return elements(row.shape) // sides(row.shape)[0]


def _mib(row: Row) -> float:
    return elements(row.shape) * DTYPES[row.dtype].itemsize / 2**20


def _moved(spec: Spec, row: Row) -> int:
    return bytes_moved(spec, elements(row.shape), DTYPES[row.dtype], row.mode)
