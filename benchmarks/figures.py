"""What the pictures show, from the results alone.

Bandwidth and speed-up along each line, and one figure an operator.

Each picture is a chart, plain data; ``drawing`` draws it and writes the chart's digest into the
file, by which a test tells whether a committed picture shows the committed results.
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
from .columns import COLUMNS, MODE_NAMES, Place, best, by_place, launch_bound, sized
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

_TYPICAL = 4096  # columns of the shape that stands for an operator
_MANY = 4  # points that make a line worth a panel


@dataclass(frozen=True)
class Chart:
    """A picture's title and, in a subclass, its numbers."""

    title: str

    def digest(self) -> str:
        """A hash of everything that the picture shows."""
        shown = json.dumps([type(self).__name__, _rounded(asdict(self))])
        return hashlib.sha256(shown.encode()).hexdigest()


@dataclass(frozen=True)
class Dots(Chart):
    """A line an operator, on it a dot a column."""

    unit: str
    groups: dict[str, dict[str, float]]
    form: str  # of fusedops' number, which is printed
    mark: float | None = None  # a vertical line, such as the roofline


@dataclass(frozen=True)
class Panel:
    """A sweep's line: each column's points, and the height of its dashed line."""

    title: str
    x_label: str
    ticks: tuple[int, ...]
    series: dict[str, tuple[tuple[int, float], ...]]
    level: float


@dataclass(frozen=True)
class Lines(Chart):
    """Panels of lines."""

    kind: str  # "bandwidth" or "speed_up"
    wide: bool  # along rows: over so many sizes that only a logarithm shows them all
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Data:
    """What a chart is made of: the rows of some operators in one dtype and mode."""

    rows: Sequence[Row]
    specs: Sequence[Spec]
    dtype: str
    mode: str

    @property
    def named(self) -> str:
        """The dtype and mode, for a title."""
        return f"{self.dtype}, {MODE_NAMES[self.mode]}"

    def places(self) -> dict[Place, dict[str, Row]]:
        """The rows of that dtype and mode."""
        return by_place(
            row for row in self.rows if (row.dtype, row.mode) == (self.dtype, self.mode)
        )

    def typical(self) -> dict[str, tuple[str, dict[str, Row]]]:
        """Each operator's measured shape nearest to 4096 columns, with its rows.

        Of several shapes that are as near it is the largest.
        """
        near: dict[str, tuple[tuple[float, int], str, dict[str, Row]]] = {}
        for (op, shape, *_), seen in self.places().items():
            row = next(iter(seen.values()))
            far = (abs(math.log2(_columns(row) / _TYPICAL)), -elements(shape))
            if not launch_bound(row) and (op not in near or far < near[op][0]):
                near[op] = (far, shape, seen)
        return {spec.name: near[spec.name][1:] for spec in self.specs if spec.name in near}


def fractions(data: Data) -> Dots | None:
    """The fraction of the roofline at each operator's typical shape; None if there is nothing."""
    groups = {}
    for op, (shape, seen) in data.typical().items():
        results = {column: best(seen, column) for column in COLUMNS}
        # A floor of zero, where nothing of the shape's size must move, has no fraction.
        dots = {
            column: row.fraction
            for column, row in results.items()
            if row is not None and row.floor_us
        }
        if dots:
            groups[f"{op}  {sized(shape)}"] = dots
    title = f"Fraction of the roofline: {data.named}"
    return (
        Dots(title, "1 is the time of a copy of the same bytes", groups, "{:.2f}", 1.0)
        if groups
        else None
    )


def bandwidth(data: Data, axes: Sequence[str]) -> Lines | None:
    """Terabytes a second of what must move, one line a column, the roofline dashed.

    None if there is nothing.
    """
    panels = []
    for spec, line, points in _lines(data, axes):
        series = {
            column: tuple(
                (x, _moved(spec, row) / row.gpu_us / 1e6) for x, row in _of(points, column)
            )
            for column in COLUMNS
        }
        # The bandwidth of a copy, measured in the run of the last point: each run measures it.
        last = next(iter(points[-1][1].values()))
        panels.append(_panel(spec, line, series, _moved(spec, last) / last.floor_us / 1e6))
    title = f"Bandwidth, TB/s: {data.named}"
    return Lines(title, "bandwidth", "rows" in axes, tuple(panels)) if panels else None


def speed_up(data: Data, axes: Sequence[str]) -> Lines | None:
    """A peer's GPU time over fusedops', one line a peer; None if there is nothing."""
    panels = []
    for spec, line, points in _lines(data, axes):
        ours = dict(_of(points, "fusedops"))
        series = {
            column: tuple(
                (x, row.gpu_us / ours[x].gpu_us) for x, row in _of(points, column) if x in ours
            )
            for column in tuple(COLUMNS)[1:]
        }
        panels.append(_panel(spec, line, series, 1.0))
    title = f"Speed-up over each peer: {data.named}"
    return Lines(title, "speed_up", "rows" in axes, tuple(panels)) if panels else None


def peak_memory(data: Data) -> Dots | None:
    """The most memory that a call holds, in tensors of the shape; None if there is nothing."""
    groups = {}
    for op, (shape, seen) in data.typical().items():
        results = {column: best(seen, column, "peak_mib") for column in COLUMNS}
        groups[f"{op}  {sized(shape)}"] = {
            c: row.peak_mib / _mib(row) for c, row in results.items() if row is not None
        }
    title = f"Peak memory beyond the inputs: {data.named}"
    return Dots(title, "tensors of the operator's shape", groups, "{:.1f}") if groups else None


def host_time(data: Data) -> Dots | None:
    """Microseconds a call in a plain Python loop at each operator's smallest shape.

    None if there is nothing.
    """
    results: dict[str, dict[str, float]] = {}
    # The largest shapes first.
    for (op, *_), seen in sorted(data.places().items(), key=lambda item: -elements(item[0][1])):
        if launch_bound(next(iter(seen.values()))):
            times = {column: best(seen, column, "loop_us") for column in COLUMNS}
            results[op] = {column: row.loop_us for column, row in times.items() if row is not None}
    groups = {spec.name: results[spec.name] for spec in data.specs if spec.name in results}
    return (
        Dots(f"Host time, small tensors: {data.named}", "µs a call", groups, "{:.0f}")
        if groups
        else None
    )


def _rounded(value: Any) -> Any:
    """A chart's numbers as text of six digits, which every machine computes alike."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _lines(
    data: Data, axes: Sequence[str]
) -> Iterator[tuple[Spec, Line, list[tuple[int, dict[str, Row]]]]]:
    """The lines of which enough was measured, and each point's rows by provider."""
    places = data.places()
    for spec in data.specs:
        for line in lines(spec, axes):
            at = (
                (x, (spec.name, "x".join(map(str, sides)), data.dtype, data.mode))
                for x, sides in line.points
            )
            points = [(x, places[place]) for x, place in at if place in places]
            if len(points) >= min(_MANY, len(line.points)):
                yield spec, line, points


def _of(points: list[tuple[int, dict[str, Row]]], column: str) -> list[tuple[int, Row]]:
    """The points that a column has."""
    results = ((x, best(seen, column)) for x, seen in points)
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
