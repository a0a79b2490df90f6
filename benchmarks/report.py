"""The report, written from the results files alone: the same files give the same text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusedops.core.spec import Spec

from . import figures, plot, results, table, targets
from .cases import discover
from .columns import COLUMNS, MODE_NAMES, PROVIDER_NAMES, Place, best, by_place, every, launch_bound
from .results import Row

__all__ = ["draw", "markdown"]

_AXES = {"hidden": ("hidden", "slices"), "rows": ("rows",)}
_DTYPES = ("bf16", "fp32", "fp16", "fp64")
_USUAL = ("bf16", "fwd_bwd")
_TIE = 1.005  # below what a figure with two decimals shows

_HEAD = """# Report

What was measured, where the library wins and where it loses. The page is written by `python -m benchmarks report` from
the results files, and holds no figure that they do not."""

_HOW = """## How it is measured

GPU time comes from replays of a CUDA graph that holds many calls, each on its own inputs, together several times the
L2: no call finds its inputs there. Host time is a plain Python loop that ends in a synchronisation. The floor is the
time in which the bytes that cannot be avoided move at the bandwidth of a copy, measured in the same run. Peak memory is
the most that one call holds beyond its inputs. Nothing is timed before its outputs and gradients have passed against an
fp64 reference. "eager" is the better of slice by slice and all slices at once where there are both; "torch.compile" the
better of its default mode and, where that was measured, max-autotune without CUDA graphs.

To measure it all again, on a GPU, with `pip install .[bench]`:

```
python -m benchmarks run                         # the shapes that have goals
python -m benchmarks sweep --resume              # hidden sizes, slices and rows; --budget SECONDS stops in time
python -m benchmarks report                      # this page and its pictures
python -m benchmarks table --write README.md     # the README's figures
python -m benchmarks compare OLD.csv NEW.csv     # regressions, before a release
```"""


def markdown(folder: Path, device: str) -> str:
    """The page, from ``<device>.csv`` and, where there is one, ``sweep_<device>.csv``."""
    main, swept = results.load(folder / f"{device}.csv"), results.read(folder / f"sweep_{device}.csv")
    if not main:
        raise ValueError(f"{folder / f'{device}.csv'} holds no rows")
    both = results.merge(swept, main)
    name = device.replace("_", " ").upper()
    parts = [_HEAD, _sources(main, swept, device), _HOW, _asked(main), _against_peers(both), _losing(both)]
    parts += [_memory(both, device), *_pictures(swept, device), _figures(main, name), _host(both, device)]
    return "\n\n".join(parts) + "\n"


def draw(folder: Path, device: str, docs: Path) -> list[Path]:
    """Draws the pictures that the page shows, beside it; needs matplotlib."""
    main, swept = results.load(folder / f"{device}.csv"), results.read(folder / f"sweep_{device}.csv")
    specs = discover()
    drawn = [docs / _image(device, "fractions")]
    plot.draw(main, drawn[0], device.replace("_", " ").upper())
    whole = figures.Data(results.merge(swept, main), specs, *_USUAL)
    for what, picture in (("host_time", figures.host_time), ("peak_memory", figures.peak_memory)):
        path = docs / _image(device, what)
        if picture(whole, path):
            drawn.append(path)
    for data in _views(swept, specs):
        for axis, axes in _AXES.items():
            for what, line_picture in (("bandwidth", figures.bandwidth), ("speed_up", figures.speed_up)):
                path = docs / _image(device, f"{what}_{axis}_{data.dtype}_{data.mode}")
                if line_picture(data, axes, path):
                    drawn.append(path)
    return drawn


def _image(device: str, what: str) -> str:
    return f"images/{device}_{what}.png"


def _views(swept: list[Row], specs: Sequence[Spec]) -> list[figures.Data]:
    """A sweep's rows in each dtype and mode that it has."""
    seen = {(row.dtype, row.mode) for row in swept}
    pairs = [(dtype, mode) for mode in reversed(MODE_NAMES) for dtype in _DTYPES if (dtype, mode) in seen]
    return [figures.Data(swept, specs, dtype, mode) for dtype, mode in pairs]


def _sources(main: list[Row], swept: list[Row], device: str) -> str:
    lines = ["| file | device | torch | Triton | commit | rows |", "|---|---|---|---|---|--:|"]
    for name, rows in ((f"{device}.csv", main), (f"sweep_{device}.csv", swept)):
        if rows:
            versions = (every(rows, field) for field in ("torch", "triton", "commit"))
            lines.append(f"| `benchmarks/results/{name}` | {device.replace('_', ' ').upper()} | "
                         f"{' | '.join(versions)} | {len(rows)} |")  # fmt: skip
    return "\n".join(lines)


def _asked(rows: list[Row]) -> str:
    verdicts = targets.compare(rows)
    met, absent = sum(v.met for v in verdicts), sum(v.seen is None for v in verdicts)
    text = (
        f"## Asked and seen\n\nOf the {len(verdicts)} figures that the library asks of itself, {met} are met, "
        f"{len(verdicts) - met - absent} missed and {absent} not measured. Where nothing else is said, a figure is a "
        "fraction of the floor."
    )
    head = ["| operator | shape | dtype | mode | asked | seen | | best peer |", "|---|---|---|---|--:|--:|---|---|"]
    return text + "\n\n" + "\n".join([*head, *map(_verdict, verdicts)])


_KINDS = {
    "fraction": "≥ {:.2f}",
    "loop": "≤ {:.2f} × eager's host time",  # noqa: RUF001
    "us": "≤ {:.1f} µs",
    "times": "≤ {:.2f} × the time in one tensor",  # noqa: RUF001
}


def _verdict(verdict: targets.Verdict) -> str:
    target = verdict.target
    seen = "" if verdict.seen is None else f"{verdict.seen:.2f}"
    state = "not measured" if verdict.seen is None else "met" if verdict.met else "**missed**"
    asked = _KINDS[target.kind].format(target.asked)
    place = _place((target.op, target.shape, target.dtype, target.mode))
    return f"| {place} | {asked} | {seen} | {state} | {verdict.best_peer} |"


def _against_peers(rows: list[Row]) -> str:
    """An operator's geometric means over its large shapes."""
    seen: dict[str, dict[str, list[float]]] = {}
    for (op, *_), at in by_place(row for row in rows if row.mode == "fwd_bwd" and not launch_bound(row)).items():
        ours = at.get("fusedops")
        if ours is None:
            continue
        ratios = seen.setdefault(op, {name: [] for name in COLUMNS})
        ratios["fusedops"].append(ours.fraction)
        for column in tuple(COLUMNS)[1:]:
            peer = best(at, column)
            if peer is not None:
                ratios[column].append(peer.gpu_us / ours.gpu_us)
    peers = tuple(COLUMNS)[1:]
    lines = ["| operator | cases | of the floor | " + " | ".join(f"over {peer}" for peer in peers) + " |",
             "|---|--:|--:|" + "--:|" * len(peers)]  # fmt: skip
    for op, ratios in seen.items():
        cells = [_spread(ratios[peer]) for peer in peers]
        floor = statistics.geometric_mean(ratios["fusedops"])
        lines.append(f"| `{op}` | {len(ratios['fusedops'])} | {floor:.2f} | {' | '.join(cells)} |")
    text = ("## Speed-ups\n\nForward + backward, GPU time, shapes of more than 65,536 elements, all dtypes: geometric "
            "means, and in brackets the least and the greatest. Below 1 the peer is faster.")  # fmt: skip
    return text + "\n\n" + "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def _pictures(swept: list[Row], device: str) -> Iterator[str]:
    """The sections with the sweeps' pictures, those of them that there is enough for."""
    specs = discover()
    titles = {
        "hidden": "## Along hidden sizes\n\nAs many rows as make 2²⁵ elements. Slices: along their width, and along "
        "their number.",
        "rows": "## Along rows",
    }
    for axis, axes in _AXES.items():
        views = [data for data in _views(swept, specs) if figures.drawable(data, axes)]
        if views:
            yield titles[axis]
        for data in views:
            for what, name in (("bandwidth", "Bandwidth"), ("speed_up", "Speed-up over each peer")):
                path = _image(device, f"{what}_{axis}_{data.dtype}_{data.mode}")
                yield f"![{name}, {data.named}]({path})"


def _figures(main: list[Row], name: str) -> str:
    large = [row for row in main if not launch_bound(row)]
    tables = [table.markdown(large, name, mode) for mode in reversed(MODE_NAMES) if any(r.mode == mode for r in large)]
    picture = f"![Fraction of the roofline]({_image(results.device_slug(name), 'fractions')})"
    return "\n\n".join(["## The shapes that have goals", picture, *tables])


def _host(rows: list[Row], device: str) -> str:
    places = {p: seen for p, seen in by_place(r for r in rows if launch_bound(r)).items() if "fusedops" in seen}
    lines = ["| operator | shape | dtype | mode | " + " | ".join(COLUMNS) + " |", "|---|---|---|---|" + "--:|" * 4]
    for place, seen in places.items():
        times = (best(seen, column, "loop_us") for column in COLUMNS)
        cells = ("" if row is None else f"{row.loop_us:.1f}" for row in times)
        lines.append(f"| {_place(place)} | {' | '.join(cells)} |")
    text = "## Host time\n\nµs a call in a plain Python loop, on tensors of at most 65,536 elements."
    return "\n\n".join([text, f"![Host time]({_image(device, 'host_time')})", "\n".join(lines)])


def _losing(rows: list[Row]) -> str:
    """Every case in which the fastest peer is faster by more than a tie, in GPU time and in a plain Python loop."""
    parts = ["## Where it loses"]
    cases = [(place, seen) for place, seen in by_place(rows).items() if "fusedops" in seen and len(seen) > 1]
    for by, what in (("gpu_us", "In GPU time"), ("loop_us", "In a plain Python loop")):
        lost = sorted(_lost(cases, by), key=lambda loss: (-loss[0], loss[1]))
        parts.append(f"### {what}\n\nA peer is faster by more than {_TIE - 1:.1%} in {len(lost)} of {len(cases)} cases, the "
                     "worst first. What is within that is a tie, and is not listed.")  # fmt: skip
        if lost:
            lines = ["| operator | shape | dtype | mode | fusedops, µs | fastest peer, µs | | times slower |",
                     "|---|---|---|---|--:|--:|---|--:|"]  # fmt: skip
            lines += [
                f"| {_place(place)} | {ours:.1f} | {theirs:.1f} | {PROVIDER_NAMES[peer]} | {ratio:.2f} |"
                for ratio, place, ours, theirs, peer in lost
            ]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _lost(cases: Sequence[tuple[Place, dict[str, Row]]], by: str) -> Iterator[tuple[float, Place, float, float, str]]:
    for place, seen in cases:
        ours = getattr(seen["fusedops"], by)
        theirs, peer = min((getattr(row, by), name) for name, row in seen.items() if name != "fusedops")
        if ours > theirs * _TIE:
            yield ours / theirs, place, ours, theirs, peer


def _memory(rows: list[Row], device: str) -> str:
    """By operator and peer, as what a peer keeps hardly depends on the shape."""
    lines = ["| operator | dtype | mode | peer | cases | of | worst: fusedops, MiB | peer, MiB |",
             "|---|---|---|---|--:|--:|--:|--:|"]  # fmt: skip
    groups: dict[tuple[str, str, str, str], list[tuple[float, float, float]]] = {}
    for (op, _, dtype, mode), seen in by_place(row for row in rows if not launch_bound(row)).items():
        for name, row in seen.items():
            if name != "fusedops" and "fusedops" in seen:
                ours, theirs = seen["fusedops"].peak_mib, row.peak_mib
                groups.setdefault((op, dtype, mode, name), []).append((ours / max(theirs, 1e-3), ours, theirs))
    for (op, dtype, mode, name), found in groups.items():
        more = [case for case in found if case[0] > 1.01]
        if more:
            _, ours, theirs = max(more)
            lines.append(f"| `{op}` | {dtype} | {_mode(mode)} | {PROVIDER_NAMES[name]} | {len(more)} | {len(found)} | {ours:.1f} | "
                         f"{theirs:.1f} |")  # fmt: skip
    text = "### In memory\n\nWhere a peer holds less at its peak, by more than 1%, on tensors of more than 65,536 elements."
    picture = f"![Peak memory]({_image(device, 'peak_memory')})"
    return "\n\n".join([text, "\n".join(lines) if len(lines) > 2 else "Nowhere.", picture])


def _place(place: Place) -> str:
    op, shape, dtype, mode = place
    return f"`{op}` | {shape.replace('x', ' × ')} | {dtype} | {_mode(mode)}"  # noqa: RUF001


def _mode(mode: str) -> str:
    return MODE_NAMES[mode]
