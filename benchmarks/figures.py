"""The sweeps as pictures: bandwidth and speed-up along each line, peak memory, the host's time.

Drawn on white, so that they read on a dark page too; a column has the same colour in all of them.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.core.spec import Spec

from .cases import DTYPES
from .columns import COLOURS, COLUMNS, MODE_NAMES, Place, best, by_place, launch_bound
from .floors import bytes_moved
from .results import Row, elements, sides
from .sweep import Line, lines

__all__ = ["Data", "bandwidth", "drawable", "host_time", "peak_memory", "save", "speed_up"]

_MARKERS = {"fusedops": "o", "eager": "s", "torch.compile": "^", "Liger-Kernel": "D"}
_NAMES = {"eager": "PyTorch eager"}
_STYLE: Any = {"font.size": 9.0, "axes.titlesize": 9.5, "figure.facecolor": "white", "axes.facecolor": "white"}
_RATIOS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
_ACROSS = 4
_TYPICAL = 4096  # columns of the shape whose peak memory is shown
_MANY = 4  # points that make a line worth a panel


@dataclass(frozen=True)
class Data:
    """What a picture shows: the rows of some operators in one dtype and mode."""

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
        return by_place(row for row in self.rows if (row.dtype, row.mode) == (self.dtype, self.mode))


@dataclass(frozen=True)
class _Panel:
    """A line of an operator and, for each of its points that were measured, the rows by provider."""

    spec: Spec
    line: Line
    points: tuple[tuple[int, dict[str, Row]], ...]

    def of(self, column: str) -> list[tuple[int, Row]]:
        """The points that a column has."""
        found = ((x, best(seen, column)) for x, seen in self.points)
        return [(x, row) for x, row in found if row is not None]


def bandwidth(data: Data, axes: Sequence[str], path: Path) -> bool:
    """Terabytes a second of what must move, one line a column, the roofline drawn; False if there is nothing."""
    panels = list(_panels(data, axes))
    wide = "rows" in axes  # over so many sizes that only a logarithm shows them all
    speeds = [_moved(p.spec, row) / row.gpu_us / 1e6 for p in panels for _, seen in p.points for row in seen.values()]
    roofs = [_roof(panel) for panel in panels]  # measured anew in each run
    label = f"roofline: a copy, {statistics.median(roofs or [0.0]):.2f} TB/s"
    top = max([*roofs, *speeds], default=0.0)

    def draw(axis: Any, panel: _Panel) -> None:
        for column in COLUMNS:
            found = panel.of(column)
            if found:
                ys = [_moved(panel.spec, row) / row.gpu_us / 1e6 for _, row in found]
                _plot(axis, column, [x for x, _ in found], ys)
        axis.axhline(_roof(panel), color="black", linewidth=1.0, linestyle="dashed", label=label)
        if wide:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis.set_yticks([], minor=True)
        axis.set_ylim(min(speeds) / 1.5 if wide else 0.0, top * (1.5 if wide else 1.1))

    title = f"Bandwidth, TB/s (bytes that must move over GPU time; higher is better): {data.named}"
    return _grid(panels, draw, title, path, alike=True)


def speed_up(data: Data, axes: Sequence[str], path: Path) -> bool:
    """A peer's GPU time over fusedops', one line a peer; False if there is nothing."""
    panels = list(_panels(data, axes))

    def draw(axis: Any, panel: _Panel) -> None:
        seen = []
        for column in tuple(COLUMNS)[1:]:
            pairs = [(x, best(by, column), by.get("fusedops")) for x, by in panel.points]
            found = [(x, peer.gpu_us / ours.gpu_us) for x, peer, ours in pairs if peer and ours]
            if found:
                _plot(axis, column, [x for x, _ in found], [ratio for _, ratio in found])
                seen += [ratio for _, ratio in found]
        low, high = min([0.8, *(y / 1.1 for y in seen)]), max([2.2, *(y * 1.15 for y in seen)])
        axis.axhspan(low / 4, 1.0, color="#000000", alpha=0.06, linewidth=0)
        axis.axhline(1.0, color="black", linewidth=1.0, linestyle="dashed", label="as fast as fusedops")
        axis.set_yscale("log", base=2)
        ticks = [tick for tick in _RATIOS if low <= tick <= high]
        ticks = ticks if len(ticks) <= 6 else [tick for tick in ticks if math.log2(tick).is_integer()]
        axis.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])  # noqa: RUF001
        axis.set_yticks([], minor=True)
        axis.set_ylim(low, high)

    title = f"Speed-up of fusedops over each peer (GPU time; in the grey fusedops loses): {data.named}"
    return _grid(panels, draw, title, path)


def peak_memory(data: Data, path: Path) -> bool:
    """The most memory that a call holds, in tensors of the shape, one group of bars an operator."""
    near: dict[str, tuple[float, dict[str, Row]]] = {}
    for (op, *_), seen in data.places().items():
        row = next(iter(seen.values()))
        far = abs(math.log2(_columns(row) / _TYPICAL))
        if not launch_bound(row) and (op not in near or far < near[op][0]):
            near[op] = (far, seen)
    bars: dict[str, dict[str, float]] = {}
    for spec in data.specs:
        found = {column: best(near[spec.name][1], column, "peak_mib") for column in COLUMNS if spec.name in near}
        if found:
            bars[spec.name] = {column: row.peak_mib / _mib(row) for column, row in found.items() if row is not None}
    title = f"Peak memory of a call beyond its inputs, in tensors of the operator's shape: {data.named}"
    return _bars(bars, title, "tensors", "{:.1f}", path)


def host_time(data: Data, path: Path) -> bool:
    """Microseconds a call in a plain Python loop at each operator's smallest shape, one group of bars an operator."""
    bars: dict[str, dict[str, float]] = {}
    for (op, *_), seen in sorted(data.places().items(), key=lambda item: -elements(item[0][1])):  # the smallest last
        if not launch_bound(next(iter(seen.values()))):
            continue
        times = {column: best(seen, column, "loop_us") for column in COLUMNS}
        bars[op] = {column: row.loop_us for column, row in times.items() if row is not None}
    title = f"Host time, µs a call in a plain Python loop on small tensors (lower is better): {data.named}"
    return _bars(
        {spec.name: bars[spec.name] for spec in data.specs if spec.name in bars}, title, "µs a call", "{:.0f}", path
    )


def drawable(data: Data, axes: Sequence[str]) -> bool:
    """Whether there is a line with enough points for a panel."""
    return next(_panels(data, axes), None) is not None


def _panels(data: Data, axes: Sequence[str]) -> Iterator[_Panel]:
    """The lines of which enough was measured."""
    places = data.places()
    for spec in data.specs:
        for line in lines(spec, axes):
            at = ((x, (spec.name, "x".join(map(str, sides)), data.dtype, data.mode)) for x, sides in line.points)
            points = tuple((x, places[place]) for x, place in at if place in places)
            if len(points) >= min(_MANY, len(line.points)):
                yield _Panel(spec, line, points)


def _grid(
    panels: list[_Panel], draw: Callable[[Any, _Panel], None], title: str, path: Path, alike: bool = False
) -> bool:
    """A panel a line of the sweep, one legend for all; ``alike`` where all have the same vertical axis."""
    if not panels:
        return False
    down = math.ceil(len(panels) / _ACROSS)
    with _figure(down, min(_ACROSS, len(panels)), (4.0 * min(_ACROSS, len(panels)), 2.55 * down + 0.9), path) as page:
        figure, cells = page
        for index, (axis, panel) in enumerate(zip(cells, panels, strict=False)):
            draw(axis, panel)
            if alike and index % _ACROSS:
                axis.tick_params(labelleft=False)
            _number_axis(axis, [x for x, _ in panel.line.points])
            axis.set_title(panel.spec.name, loc="left", fontweight="bold")
            axis.set_xlabel(_x_label(panel.line), labelpad=1)
            axis.grid(alpha=0.25)
        for axis in cells[len(panels) :]:
            axis.remove()
        _legend(figure, cells[: len(panels)], title)
    return True


def _bars(bars: dict[str, dict[str, float]], title: str, unit: str, form: str, path: Path) -> bool:
    """Horizontal bars, a group an operator, so that the names have room; each bar says its number."""
    if not bars:
        return False
    values = sorted(value for seen in bars.values() for value in seen.values())
    limit = min(values[-1], 1.5 * values[-1 - len(values) // 10])  # a few far longer ones are cut, not all others small
    with _figure(1, 1, (10.0, 0.15 * len(values) + 0.1 * len(bars) + 1.2), path) as (figure, (axis,)):
        y, middles = 0.0, []
        for seen in bars.values():
            middles.append(y + (len(seen) - 1) / 2)
            for column, value in seen.items():
                axis.barh(y, min(value, limit), 0.92, color=COLOURS[column], label=_NAMES.get(column, column))
                number = form.format(value) + (" (cut)" if value > limit else "")
                axis.text(min(value, limit) + 0.006 * limit, y, number, va="center", fontsize=7.5)
                y += 1.0
            y += 0.7
        axis.set_xlim(0, limit * 1.08)
        axis.set_ylim(y - 0.9, -0.9)
        axis.set_yticks(middles, bars)
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel(unit)
        axis.grid(axis="x", alpha=0.25)
        _legend(figure, [axis], title)
    return True


def _legend(figure: Any, axes: Sequence[Any], title: str) -> None:
    """Title and legend, once for all panels, the columns in their order."""
    handles = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [_NAMES.get(column, column) for column in COLUMNS]
    names = sorted(handles, key=lambda name: order.index(name) if name in order else len(order))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=len(names), frameon=False)


@contextmanager
def _figure(down: int, across: int, size: tuple[float, float], path: Path) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its cells, written to the path in the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(_STYLE):
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for axis in grid.flat:
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
        yield figure, list(grid.flat)
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Writes a figure as a PNG and closes it. A palette is enough for the few colours, and takes a third of the space."""
    from matplotlib import pyplot as plt
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def _plot(axis: Any, column: str, xs: list[int], ys: list[float]) -> None:
    ours = column == "fusedops"
    axis.plot(xs, ys, color=COLOURS[column], marker=_MARKERS[column], markersize=4, linewidth=2.2 if ours else 1.4,
              zorder=3 if ours else 2, label=_NAMES.get(column, column))  # fmt: skip


def _number_axis(axis: Any, xs: list[int]) -> None:
    """A logarithm with plain numbers, no more of them than fit."""
    powers = [x for x in xs if x & (x - 1) == 0]
    step = math.ceil(len(powers) / 6)
    axis.set_xscale("log", base=2)
    axis.set_xticks(powers[::step], [str(x) for x in powers[::step]])
    axis.set_xticks([], minor=True)
    axis.set_xlim(xs[0] / 1.35, xs[-1] * 1.35)


def _x_label(line: Line) -> str:
    if line.axis == "rows":
        return f"rows of {' × '.join(map(str, line.tail))}"  # noqa: RUF001
    if line.axis == "slices":
        return f"slices of width {line.tail[0]}"
    return f"width of {line.tail[0]} slices" if line.tail else "hidden size"


def _columns(row: Row) -> int:
    return elements(row.shape) // sides(row.shape)[0]


def _mib(row: Row) -> float:
    return elements(row.shape) * DTYPES[row.dtype].itemsize / 2**20


def _roof(panel: _Panel) -> float:
    """The measured copy bandwidth, out of a row's floor."""
    row = next(iter(panel.points[-1][1].values()))
    return _moved(panel.spec, row) / row.floor_us / 1e6


def _moved(spec: Spec, row: Row) -> int:
    return bytes_moved(spec, elements(row.shape), DTYPES[row.dtype], row.mode)
