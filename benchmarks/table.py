"""The results as Markdown, for the README: times and fractions of the floor, one line a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from .results import Row, elements

__all__ = ["fill", "markdown"]

# A column is the best of its providers.
_COLUMNS = {
    "fusedops": ("fusedops",),
    "eager": ("eager", "eager_combined"),
    "torch.compile": ("compile", "compile_max_autotune"),
    "Liger-Kernel": ("liger",),
}
_MODES = {"fwd": "Forward", "fwd_bwd": "Forward + backward"}
_LAUNCH_BOUND = 1 << 16
_BEGIN, _END = "<!-- figures -->", "<!-- /figures -->"


def markdown(rows: Iterable[Row], device: str, mode: str = "fwd_bwd") -> str:
    """Two tables: GPU time of the large shapes, and host-inclusive time of those so small that the host decides."""
    shown = [row for row in rows if row.mode == mode]
    if not shown:
        raise ValueError(f"no row of mode {mode}")
    large = [row for row in shown if elements(row.shape) > _LAUNCH_BOUND]
    small = [row for row in shown if elements(row.shape) <= _LAUNCH_BOUND]
    parts = []
    if large:
        parts += [
            f"{_MODES[mode]}: GPU time in µs, and in brackets the fraction of the floor.",
            _table(large, ("floor", *_COLUMNS), _gpu_cells),
        ]
    if small:
        parts += [
            f"{_MODES[mode]} of small tensors, where the host decides: µs a call in a plain Python loop.",
            _table(small, tuple(_COLUMNS), _loop_cells),
        ]
    versions = f"torch {_every(shown, 'torch')}, Triton {_every(shown, 'triton')}, commit {_every(shown, 'commit')}"
    parts.append(
        f"{device}, {versions}. The column torch.compile is the faster of its default mode and, where that was "
        "measured, max-autotune without CUDA graphs."
    )
    return "\n\n".join(parts)


def fill(page: Path, content: str) -> None:
    """Puts ``content`` between the page's two markers, in place of what stood there."""
    text = page.read_text(encoding="utf-8")
    if text.count(_BEGIN) != 1 or text.count(_END) != 1 or text.index(_BEGIN) > text.index(_END):
        raise ValueError(f"{page} does not hold {_BEGIN} and then {_END}, each once")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    page.write_text(f"{before}{_BEGIN}\n\n{content}\n\n{_END}{after}", encoding="utf-8")


def _table(rows: list[Row], columns: tuple[str, ...], cells: Callable[[dict[str, Row]], list[str]]) -> str:
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype), {})[row.provider] = row
    lines = ["| operator | rows × N | dtype | " + " | ".join(columns) + " |", "|---|---|---|" + "--:|" * len(columns)]  # noqa: RUF001
    above = ""
    for (op, shape, dtype), seen in groups.items():
        name = "" if op == above else f"`{op}`"
        lines.append(f"| {name} | {shape.replace('x', ' × ')} | {dtype} | " + " | ".join(cells(seen)) + " |")  # noqa: RUF001
        above = op
    return "\n".join(lines)


def _gpu_cells(seen: dict[str, Row]) -> list[str]:
    cells = [f"{next(iter(seen.values())).floor_us:.1f}"]
    for providers in _COLUMNS.values():
        best = min((seen[p] for p in providers if p in seen), key=lambda row: row.gpu_us, default=None)
        cells.append("" if best is None else f"{best.gpu_us:.1f} ({best.fraction:.2f})")
    return cells


def _loop_cells(seen: dict[str, Row]) -> list[str]:
    times = (min((seen[p].loop_us for p in providers if p in seen), default=None) for providers in _COLUMNS.values())
    return ["" if time is None else f"{time:.1f}" for time in times]


def _every(rows: list[Row], field: str) -> str:
    return ", ".join(dict.fromkeys(getattr(row, field) for row in rows))
