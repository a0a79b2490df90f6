"""The results as a picture: the fraction of the roofline, one panel an operator, one bar a provider."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .columns import COLOURS, MODE_NAMES, PROVIDER_NAMES, every, launch_bound
from .figures import save
from .results import Row, sides
from .targets import target_fraction

__all__ = ["draw"]

_COLOURS = {
    "fusedops": COLOURS["fusedops"],
    "eager": COLOURS["eager"],
    "eager_combined": "#CCCCCC",
    "compile": COLOURS["torch.compile"],
    "compile_max_autotune": "#56B4E9",
    "liger": COLOURS["Liger-Kernel"],
    "transformers": "#CC79A7",
}


def draw(rows: Iterable[Row], path: Path, device: str) -> None:
    """Writes the picture; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # A floor of zero, where nothing of the shape's size must move, has no fraction.
    shown = [row for row in rows if not launch_bound(row) and row.floor_us]
    if not shown:
        raise ValueError("nothing to draw: no row is larger than the launch-bound shapes")
    ops = list(dict.fromkeys(row.op for row in shown))
    modes = [mode for mode in reversed(MODE_NAMES) if any(row.mode == mode for row in shown)]
    size = (9.5 * len(modes), 2.7 * len(ops) + 1.4)
    figure, grid = plt.subplots(len(ops), len(modes), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for line, op in zip(grid, ops, strict=True):
        for axes, mode in zip(line, modes, strict=True):
            _panel(axes, op, mode, [row for row in shown if (row.op, row.mode) == (op, mode)])
        line[0].set_ylabel("fraction of the roofline")
    grid[0, 0].set_ylim(0, max(1.12, 1.1 * max(row.fraction for row in shown)))  # shared by all
    handles = {name: bar for axes in grid.flat for bar, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(_title(shown, device))
    save(figure, path)


def _panel(axes: Any, op: str, mode: str, rows: list[Row]) -> None:
    groups = sorted({(row.dtype, row.shape) for row in rows}, key=lambda group: (group[0], sides(group[1])[::-1]))
    names = [name for name in _COLOURS if any(row.provider == name for row in rows)]
    width = 0.84 / max(1, len(names))
    seen = {(row.dtype, row.shape, row.provider): row.fraction for row in rows}
    for place, name in enumerate(names):
        offset = (place - (len(names) - 1) / 2) * width
        at = [(x + offset, seen[(*group, name)]) for x, group in enumerate(groups) if (*group, name) in seen]
        xs, heights = [x for x, _ in at], [height for _, height in at]
        axes.bar(xs, heights, width * 0.94, color=_COLOURS[name], label=PROVIDER_NAMES[name])
        for x, height in at:
            axes.text(x, height + 0.015, f"{height:.2f}".lstrip("0"), ha="center", va="bottom", fontsize=6.5)
    for x, (dtype, shape) in enumerate(groups):
        target = target_fraction(op, shape, dtype, mode)
        if target is not None:
            axes.hlines(target, x - 0.46, x + 0.46, colors="black", linestyles="dashed", linewidth=1, label="goal")
    axes.set_xticks(range(len(groups)), [f"{shape.replace('x', '×')}\n{dtype}" for dtype, shape in groups], fontsize=8)  # noqa: RUF001
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_title(f"{op}, {MODE_NAMES[mode]}", fontsize=10, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(rows: list[Row], device: str) -> str:
    what = "Bytes that must move ÷ measured copy bandwidth ÷ GPU time (1 is the roofline; taller is better)"
    return f"{what}\n{device}, torch {every(rows, 'torch')}, Triton {every(rows, 'triton')}, commit {every(rows, 'commit')}"
