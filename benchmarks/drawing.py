"""Draws charts as SVG files that fit a phone's screen.

The background is transparent, and text and lines have the colour of the page's text. A column has
the same colour and marker in all pictures.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .columns import COLOURS, COLUMNS
from .figures import Chart, Dots, Lines, Panel

__all__ = ["digest_of", "draw"]

_MARKERS = {"fusedops": "o", "eager": "s", "torch.compile": "^", "Liger-Kernel": "D"}
_NAMES = {"eager": "PyTorch eager"}
# `_save` replaces this colour by the text colour, which the file's style sheet sets: it is light in
# a viewer's dark mode.
_INK = "#010203"
_SHEET = "<style>svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#d6dae0}}</style>"
_STYLE: Any = {
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "svg.fonttype": "none",  # text as text, not as paths
    "svg.hashsalt": "fusedops",  # so that the same chart gives the same file
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
        ),
        _INK,
    ),
}
# Possible ticks of an axis of ratios.
_RATIOS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
_WIDTH = 4.5  # inches
_PIXELS_PER_POINT = 1.7  # CSS pixels
_PANELS_PER_ROW = 2
_DIGEST = re.compile(r"data ([0-9a-f]{64})")


def draw(chart: Chart, path: Path) -> None:
    """Writes the chart's picture; needs matplotlib."""
    if isinstance(chart, Dots):
        _dots(chart, path)
    elif isinstance(chart, Lines):
        _grid(chart, path)
    else:
        raise TypeError(f"no way to draw a {type(chart).__name__}")


def digest_of(path: Path) -> str:
    """Returns the digest of the chart that a picture shows.

    It is empty for a file that ``draw`` did not write.
    """
    result = _DIGEST.search(path.read_text(encoding="utf-8"))
    return result[1] if result else ""


def _dots(chart: Dots, path: Path) -> None:
    """Draws a row for each operator, with its name above, so that long names take no width."""
    values = [value for dots in chart.groups.values() for value in dots.values()]
    # If a few values are far above the median, only a logarithmic axis shows the others.
    is_logarithmic = max(values) > 8 * sorted(values)[len(values) // 2]
    with _figure(1, 1, (_WIDTH, 0.36 * len(chart.groups) + 0.95), chart, path) as (figure, (axis,)):
        for y, (name, dots) in enumerate(chart.groups.items()):
            axis.axhline(y, color=_INK, alpha=0.15, linewidth=0.6)
            axis.text(
                0.0, y - 0.28, name, transform=axis.get_yaxis_transform(), va="bottom", fontsize=8
            )
            for column, value in dots.items():
                is_ours = column == "fusedops"
                # The peers' markers are smaller and in front, so that equal values do not hide one.
                axis.plot(
                    value,
                    y,
                    _MARKERS[column],
                    color=COLOURS[column],
                    markersize=7.5 if is_ours else 4.5,
                    zorder=2 if is_ours else 3,
                    linestyle="none",
                    label=_NAMES.get(column, column),
                )
            if "fusedops" in dots:
                axis.text(
                    1.01,
                    y,
                    chart.form.format(dots["fusedops"]),
                    transform=axis.get_yaxis_transform(),
                    va="center",
                    color=COLOURS["fusedops"],
                    fontweight="bold",
                )
        if chart.mark is not None:
            axis.axvline(chart.mark, color=_INK, linewidth=0.8, linestyle="dashed")
        if is_logarithmic:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        else:
            axis.set_xlim(0, 1.06 * max(*values, chart.mark or 0.0))
        axis.set_ylim(len(chart.groups) - 0.6, -0.85)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.set_xlabel(chart.unit)
        axis.grid(axis="x", alpha=0.2)
        _legend(figure, [axis], chart.title)


def _grid(chart: Lines, path: Path) -> None:
    """Draws a panel for each line of the sweep, and one legend for all."""
    is_bandwidth = chart.kind == "bandwidth"
    style: Callable[[Any, Panel], None] = _bandwidth(chart) if is_bandwidth else _speed_up
    rows = math.ceil(len(chart.panels) / _PANELS_PER_ROW)
    columns = min(_PANELS_PER_ROW, len(chart.panels))
    size = (_WIDTH * columns / _PANELS_PER_ROW, 1.65 * rows + 0.75)
    with _figure(rows, columns, size, chart, path) as (figure, cells):
        for axis, panel in zip(cells, chart.panels, strict=False):
            for column, points in panel.series.items():
                is_ours = column == "fusedops"
                xs, ys = zip(*points, strict=True)
                axis.plot(
                    xs,
                    ys,
                    color=COLOURS[column],
                    marker=_MARKERS[column],
                    markersize=3,
                    zorder=3 if is_ours else 2,
                    linewidth=1.8 if is_ours else 1.1,
                    label=_NAMES.get(column, column),
                )
            style(axis, panel)
            _number_axis(axis, panel.ticks)
            axis.set_title(panel.title, loc="left", fontsize=7)
            axis.set_xlabel(panel.x_label, labelpad=1, fontsize=7)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.2)
        for axis in cells[len(chart.panels) :]:
            axis.remove()
        _legend(figure, cells[: len(chart.panels)], chart.title)


def _bandwidth(chart: Lines) -> Callable[[Any, Panel], None]:
    """Returns a function that styles a panel: the roofline dashed, one vertical axis for all."""
    values = [y for panel in chart.panels for points in panel.series.values() for _, y in points]
    top = max([*values, *(panel.level for panel in chart.panels)])

    def style(axis: Any, panel: Panel) -> None:
        axis.axhline(panel.level, color=_INK, linewidth=0.9, linestyle="dashed", label="roofline")
        if chart.wide:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis.set_yticks([], minor=True)
            axis.set_ylim(min(values) / 1.5, top * 1.5)
        else:
            axis.set_ylim(0.0, top * 1.1)

    return style


def _speed_up(axis: Any, panel: Panel) -> None:
    """Styles a panel of speed-ups: the part in which a peer is faster is grey."""
    values = [y for points in panel.series.values() for _, y in points]
    low = min([0.8, *(y / 1.1 for y in values)])
    high = max([2.2, *(y * 1.15 for y in values)])
    axis.axhspan(low / 4, panel.level, color=_INK, alpha=0.12, linewidth=0)
    axis.axhline(
        panel.level, color=_INK, linewidth=0.9, linestyle="dashed", label="as fast as fusedops"
    )
    axis.set_yscale("log", base=2)
    ticks = [tick for tick in _RATIOS if low <= tick <= high]
    if len(ticks) > 6:
        ticks = [tick for tick in ticks if math.log2(tick).is_integer()]
    axis.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])  # noqa: RUF001
    axis.set_yticks([], minor=True)
    axis.set_ylim(low, high)


def _number_axis(axis: Any, xs: Sequence[int]) -> None:
    """Makes the horizontal axis logarithmic, with plain numbers, as many as fit."""
    powers = [x for x in xs if x & (x - 1) == 0]
    step = math.ceil(len(powers) / 4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(powers[::step], [str(x) for x in powers[::step]])
    axis.set_xticks([], minor=True)
    axis.set_xlim(xs[0] / 1.35, xs[-1] * 1.35)


def _legend(figure: Any, axes: Sequence[Any], title: str) -> None:
    """Adds the title and one legend for all panels, with the columns in their order."""
    handles = {
        name: handle
        for axis in axes
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    order = [_NAMES.get(column, column) for column in COLUMNS]
    names = sorted(handles, key=lambda name: order.index(name) if name in order else len(order))
    figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(4, len(names)),
        frameon=False,
        fontsize=7.5,
        handletextpad=0.3,
        columnspacing=1.0,
    )


@contextmanager
def _figure(
    rows: int, columns: int, size: tuple[float, float], chart: Chart, path: Path
) -> Iterator[tuple[Any, list[Any]]]:
    """Context manager: a figure and its axes. At the end it writes the figure to the path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(_STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained"
        )
        try:
            for axis in grid.flat:
                axis.spines[["top", "right"]].set_visible(False)
                axis.set_axisbelow(True)
                axis.patch.set_visible(False)
            yield figure, list(grid.flat)
            _save(figure, chart, path)
        finally:
            plt.close(figure)


def _save(figure: Any, chart: Chart, path: Path) -> None:
    """Writes the figure as SVG with the chart's digest, and with the page's text colour."""
    drawn = io.StringIO()
    metadata = {"Creator": None, "Date": None, "Description": f"data {chart.digest()}"}
    figure.savefig(drawn, format="svg", transparent=True, metadata=metadata)
    text = drawn.getvalue().replace(_INK, "currentColor")
    text = re.sub(r"(font: (?:\w+ )?[\d.]+px) [^;\"]*", r"\1 sans-serif", text)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # a hundredth of a point is enough
    text = re.sub(r"\s*<!--.*?-->", "", text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><") + "\n"
    text = re.sub(r"(<svg\b[^>]*>)", lambda match: f"{_enlarged(match[1])}{_SHEET}", text, count=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _enlarged(root: str) -> str:
    """Returns the root element with the size of the picture on a wide page.

    A narrow page shrinks it.
    """
    return re.sub(
        r'(width|height)="([\d.]+)pt"',
        lambda match: f'{match[1]}="{_PIXELS_PER_POINT * float(match[2]):.0f}"',
        root,
    )
