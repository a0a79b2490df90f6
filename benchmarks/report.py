"""The report, written from the results files alone: the same files give the same text."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusedops.core.spec import Spec

from . import figures, results, sweep, table, targets
from .cases import discover
from .columns import (
    COLUMNS,
    MODE_NAMES,
    PROVIDER_NAMES,
    Place,
    best,
    by_place,
    every,
    launch_bound,
    sized,
)
from .results import Row

__all__ = ["charts", "markdown"]

_AXES = {"hidden": ("hidden", "slices"), "rows": ("rows",)}
_DTYPES = ("bf16", "fp32", "fp16", "fp64")
_USUAL = ("bf16", "fwd_bwd")
_Loss = tuple[float, Place, float, float, str]  # the ratio, where, our time, the peer's, the peer
_TIE = 1.005  # below what a figure with two decimals shows

_HEAD = """# Report

All measurements, compared with eager PyTorch, `torch.compile` and Liger-Kernel, including the shapes where one of these peers
is faster. `python -m benchmarks report` writes this page and its pictures from the results files. Long tables are folded."""

_NAMES = """Some rows are variants of an operator. `bias_gelu_erf` and `bias_gelu_tanh` are `bias_gelu` with `approximate="none"`
and `"tanh"`. `glu` is `gated_act` with `"quick_gelu"`. `_sequence` stands for slices in separate tensors, `_inplace` for
`inplace=True`, and `_32k` for rows of 32,768 tokens. `R4096` are slices of mixed widths that add up to 4096,
`D8001` of widths that are drawn from 1 to 256."""

_HOW = """## How it is measured

- **GPU time**: replays of a CUDA graph with many calls on different inputs. Together the inputs are several times as large as
  the L2 cache, so no call finds its inputs there.
- **Host time**: a plain Python loop that ends in a synchronisation.
- **Floor**: the time to read and write the unavoidable bytes at the bandwidth of a copy, measured in the same run.
- **Peak memory**: the most that a call allocates besides its inputs.
- **Correctness**: an operator is timed only if its outputs and gradients pass a comparison with an fp64 reference.
- **eager** on slices is the faster of a loop and one call on all slices, if both exist. **torch.compile** is the faster of its
  default mode and, if measured, max-autotune without CUDA graphs.

To repeat all measurements, on a GPU, with `pip install .[bench]`:

```
python -m benchmarks run                         # the shapes with targets
python -m benchmarks sweep --resume              # hidden sizes, slices, rows and widths; --budget SECONDS stops in time
python -m benchmarks report                      # this page and its pictures, one of which the README shows
python -m benchmarks table --write               # the tables in the README and in the operators' pages
python -m benchmarks compare OLD.csv NEW.csv     # regressions, before a release
```"""


def markdown(folder: Path, device: str) -> str:
    """The page, from ``<device>.csv`` and ``sweep_<device>.csv``; for other devices their tables."""
    main, swept = (
        results.load(folder / f"{device}.csv"),
        results.read(folder / f"sweep_{device}.csv"),
    )
    if not main:
        raise ValueError(f"{folder / f'{device}.csv'} holds no rows")
    both = results.merge(swept, main)
    pictures = charts(folder, device)
    others = sorted(
        {path.stem.removeprefix("sweep_") for path in folder.glob("sweep_*.csv")} - {device}
    )
    mains, sweeps = (
        {f"{kind}{name}": results.read(folder / f"{kind}{name}.csv") for name in others}
        for kind in ("", "sweep_")
    )
    parts = [
        _HEAD,
        _sources({device: main, f"sweep_{device}": swept, **mains, **sweeps}),
        _against_peers(both),
        *_shown(pictures, device, "fractions"),
        _targets(main),
        _slower(both),
        _memory(both),
        *_shown(pictures, device, "peak_memory"),
        *_along(pictures),
        *_widths(swept),
        *[part for name, rows in sweeps.items() for part in _widths(rows, f" on {_device(name)}")],
        _tables(main, _device(device)),
        *[
            _tables(rows, _device(name), f" on {_device(name)}")
            for name, rows in mains.items()
            if rows
        ],
        _host(both),
        *_shown(pictures, device, "host_time"),
        _HOW,
    ]
    return "\n\n".join(parts) + "\n"


def charts(folder: Path, device: str) -> dict[str, figures.Chart]:
    """The page's pictures, by their paths beside it."""
    main, swept = (
        results.load(folder / f"{device}.csv"),
        results.read(folder / f"sweep_{device}.csv"),
    )
    specs = discover()
    whole = figures.Data(results.merge(swept, main), specs, *_USUAL)
    result: dict[str, figures.Chart | None] = {
        "fractions": figures.fractions(figures.Data(main, specs, *_USUAL)),
        "host_time": figures.host_time(whole),
        "peak_memory": figures.peak_memory(whole),
    }
    for axis, axes in _AXES.items():
        for data in _views(swept, specs):
            for what, chart in (("bandwidth", figures.bandwidth), ("speed_up", figures.speed_up)):
                result[f"{what}_{axis}_{data.dtype}_{data.mode}"] = chart(data, axes)
    return {_image(device, what): chart for what, chart in result.items() if chart is not None}


def _shown(pictures: dict[str, figures.Chart], device: str, what: str) -> Iterator[str]:
    """A picture, if there is enough for it."""
    path = _image(device, what)
    if path in pictures:
        yield f"![{pictures[path].title}]({path})"


def _folded(title: str, body: str) -> str:
    """A part that a reader opens; the site's Markdown needs the attribute to read what is in it."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{body}\n\n</details>'


def _image(device: str, what: str) -> str:
    return f"images/{device}_{what}.svg"


def _views(swept: list[Row], specs: Sequence[Spec]) -> list[figures.Data]:
    """A sweep's rows in each dtype and mode that it has."""
    seen = {(row.dtype, row.mode) for row in swept}
    pairs = [
        (dtype, mode) for mode in reversed(MODE_NAMES) for dtype in _DTYPES if (dtype, mode) in seen
    ]
    return [figures.Data(swept, specs, dtype, mode) for dtype, mode in pairs]


def _sources(files: dict[str, list[Row]]) -> str:
    """A table of the files: the device, which is in the name, the versions and the number of rows."""
    lines = ["| file | device | torch | Triton | commit | rows |", "|---|---|---|---|---|--:|"]
    for name, rows in files.items():
        if rows:
            versions = (every(rows, field) for field in ("torch", "triton", "commit"))
            lines.append(
                f"| [{name}.csv](../benchmarks/results/{name}.csv) | {_device(name)} | "
                f"{' | '.join(versions)} | {len(rows)} |"
            )
    return "\n".join(lines)


def _device(name: str) -> str:
    """The device of a results file."""
    return name.removeprefix("sweep_").replace("_", " ").upper()


def _targets(rows: list[Row]) -> str:
    verdicts = targets.compare(rows)
    met, absent = sum(v.met for v in verdicts), sum(v.result is None for v in verdicts)
    text = (
        f"## Targets and results\n\nOf the library's {len(verdicts)} targets, {met} are met, "
        f"{len(verdicts) - met - absent} missed and {absent} not measured. Without a unit, a target is a "
        "fraction of the floor. Those that are missed:"
    )
    return "\n\n".join(
        [
            text,
            *(
                [_verdicts([v for v in verdicts if not v.met and v.result is not None])]
                if len(verdicts) > met + absent
                else []
            ),
            _folded("All targets", _verdicts(verdicts)),
        ]
    )


def _verdicts(verdicts: Sequence[targets.Verdict]) -> str:
    head = [
        "| operator | shape | dtype | mode | target | result | | best peer |",
        "|---|---|---|---|--:|--:|---|---|",
    ]
    return "\n".join([*head, *map(_verdict, verdicts)])


_KINDS = {
    "fraction": "≥ {:.2f}",
    "loop": "≤ {:.2f} × eager's host time",  # noqa: RUF001
    "us": "≤ {:.1f} µs",
    "times": "≤ {:.2f} × the time in one tensor",  # noqa: RUF001
}


def _verdict(verdict: targets.Verdict) -> str:
    target = verdict.target
    result = "" if verdict.result is None else f"{verdict.result:.2f}"
    state = "not measured" if verdict.result is None else "met" if verdict.met else "**missed**"
    wanted = _KINDS[target.kind].format(target.value)
    place = _place((target.op, target.shape, target.dtype, target.mode))
    number, _, provider = verdict.best_peer.partition(" ")
    peer = f"{number} {PROVIDER_NAMES[provider]}" if provider else ""
    return f"| {place} | {wanted} | {result} | {state} | {peer} |"


def _against_peers(rows: list[Row]) -> str:
    """An operator's geometric means over its large shapes, and how often a peer is faster."""
    places = by_place(row for row in rows if row.mode == "fwd_bwd" and not launch_bound(row))
    cases = [(place, seen) for place, seen in places.items() if "fusedops" in seen]
    lost = Counter(place[0] for _, place, *_ in _lost(cases, "gpu_us"))
    seen: dict[str, dict[str, list[float]]] = {}
    for (op, *_), at in cases:
        ours = at["fusedops"]
        ratios = seen.setdefault(op, {name: [] for name in COLUMNS})
        ratios["fusedops"].append(ours.fraction)
        for column in tuple(COLUMNS)[1:]:
            peer = best(at, column)
            if peer is not None:
                ratios[column].append(peer.gpu_us / ours.gpu_us)
    peers = tuple(COLUMNS)[1:]
    lines = [
        "| operator | cases | a peer is faster in | of the floor | "
        + " | ".join(f"over {peer}" for peer in peers)
        + " |",
        "|---|--:|--:|--:|" + "--:|" * len(peers),
    ]
    for op, ratios in seen.items():
        cells = [_spread(ratios[peer]) for peer in peers]
        floor = statistics.geometric_mean(ratios["fusedops"])
        lines.append(
            f"| `{op}` | {len(ratios['fusedops'])} | {lost[op]} | {floor:.2f} | {' | '.join(cells)} |"
        )
    text = (
        "## Summary\n\nForward + backward, GPU time, shapes of more than 65,536 elements, all dtypes: geometric means "
        "of the speed-ups, and in brackets the least and the greatest. Below 1 the peer is faster."
    )
    return "\n\n".join([text, _NAMES, "\n".join(lines)])


def _spread(ratios: list[float]) -> str:
    return (
        f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        if ratios
        else ""
    )


def _along(pictures: dict[str, figures.Chart]) -> Iterator[str]:
    """The sections with the sweeps' pictures, all but the first folded."""
    titles = {
        "hidden": "## Along hidden sizes\n\nEach tensor has 2²⁵ elements. For slices, the pictures vary their width and "
        "their number. Bandwidth counts the unavoidable bytes; the dashed line is the bandwidth of a copy. "
        "In the pictures of speed-ups, a peer is faster in the grey part.",
        "rows": "## Along rows",
    }
    for axis, title in titles.items():
        shown = [
            (path, chart.title)
            for path, chart in pictures.items()
            if re.search(rf"_{axis}_[a-z]+\d+_", path)
        ]
        if shown:
            yield title
        for index, (path, name) in enumerate(shown):
            picture = f"![{name}]({path})"
            yield picture if axis == "hidden" and not index else _folded(name, picture)


def _widths(swept: list[Row], where: str = "") -> Iterator[str]:
    """Widths that are no power of two.

    The fraction of the floor, and how much faster than the best peer.
    """
    places = {
        place[:2]: seen
        for place, seen in by_place(swept).items()
        if place[2:] == _USUAL and "fusedops" in seen
    }
    summary, lines = [], []
    for spec in discover():
        points = [
            sides for line in sweep.lines(spec, ("widths",)) for _, sides in sorted(line.points)
        ]
        shapes = ["x".join(map(str, sides)) for sides in points]
        result = [
            (shape, places[spec.name, shape]) for shape in shapes if (spec.name, shape) in places
        ]
        over: list[float] = []
        for shape, seen in result:
            ours = seen["fusedops"]
            peers = [row.gpu_us / ours.gpu_us for name, row in seen.items() if name != "fusedops"]
            over += [min(peers)] if peers else []
            lines.append(
                f"| `{spec.name}` | {sized(shape)} | {ours.gpu_us:.1f} | {ours.fraction:.2f} | "
                f"{f'{min(peers):.2f}' if peers else ''} |"
            )
        if result:
            floor = [seen["fusedops"].fraction for _, seen in result]
            summary.append(
                f"| `{spec.name}` | {len(result)} | {_spread(floor)} | {_spread(over) if over else ''} |"
            )
    if lines:
        yield (
            f"## Widths of models{where}\n\nForward + backward in bf16: the measured hidden sizes that are no power of two, "
            "at 2²⁵ and 2²³ elements. Geometric means, and in brackets the least and the greatest."
        )
        yield "\n".join(
            [
                "| operator | shapes | of the floor | over the best peer |",
                "|---|--:|--:|--:|",
                *summary,
            ]
        )
        head = [
            "| operator | shape | µs | of the floor | over the best peer |",
            "|---|---|--:|--:|--:|",
        ]
        yield _folded("All widths", "\n".join([*head, *lines]))


def _tables(main: list[Row], name: str, where: str = "") -> str:
    large = [row for row in main if not launch_bound(row)]
    modes = [mode for mode in reversed(MODE_NAMES) if any(row.mode == mode for row in large)]
    tables = [
        _folded(_mode(mode).capitalize(), table.markdown(large, name, mode)) for mode in modes
    ]
    return "\n\n".join(
        [f"## The shapes with targets{where}\n\nTimes, and fractions of the floor.", *tables]
    )


def _host(rows: list[Row]) -> str:
    places = {
        p: seen
        for p, seen in by_place(r for r in rows if launch_bound(r)).items()
        if "fusedops" in seen
    }
    lines = [
        "| operator | shape | dtype | mode | " + " | ".join(COLUMNS) + " |",
        "|---|---|---|---|" + "--:|" * 4,
    ]
    for place, seen in places.items():
        times = (best(seen, column, "loop_us") for column in COLUMNS)
        cells = ("" if row is None else f"{row.loop_us:.1f}" for row in times)
        lines.append(f"| {_place(place)} | {' | '.join(cells)} |")
    text = (
        "## Host time\n\nµs per call in a plain Python loop, on tensors of at most 65,536 elements."
    )
    return "\n\n".join([text, _folded("All host times", "\n".join(lines))])


def _slower(rows: list[Row]) -> str:
    """Every case in which a peer is faster by more than a tie, in GPU time and in a plain Python loop."""
    parts = ["## Shapes where a peer is faster"]
    cases = [
        (place, seen)
        for place, seen in by_place(rows).items()
        if "fusedops" in seen and len(seen) > 1
    ]
    for by, what in (("gpu_us", "In GPU time"), ("loop_us", "In a plain Python loop")):
        lost = sorted(_lost(cases, by), key=lambda loss: (-loss[0], loss[1]))
        parts.append(
            f"### {what}\n\nA peer is faster by more than {_TIE - 1:.1%} in {len(lost)} of {len(cases)} cases. "
            "Smaller differences are ties, and are not listed."
        )
        if lost:
            head = [
                "| operator | shape | dtype | mode | fusedops, µs | fastest peer, µs | | times slower |",
                "|---|---|---|---|--:|--:|---|--:|",
            ]
            lines = [
                f"| {_place(place)} | {ours:.1f} | {theirs:.1f} | {PROVIDER_NAMES[peer]} | {ratio:.2f} |"
                for ratio, place, ours, theirs, peer in lost
            ]
            parts.append(_by_operator(cases, lost))
            parts.append(_folded("All of them, the worst first", "\n".join([*head, *lines])))
    return "\n\n".join(parts)


def _by_operator(cases: Sequence[tuple[Place, dict[str, Row]]], lost: Sequence[_Loss]) -> str:
    """How often a peer is faster than an operator, and where most."""
    total, slower = (
        Counter(place[0] for place, _ in cases),
        Counter(place[0] for _, place, *_ in lost),
    )
    lines = [
        "| operator | cases | a peer is faster in | at worst, times slower | where |",
        "|---|--:|--:|--:|---|",
    ]
    for op in dict.fromkeys(place[0] for place, _ in cases):
        worst = next((loss for loss in lost if loss[1][0] == op), None)
        where = (
            "" if worst is None else f"{sized(worst[1][1])}, {worst[1][2]}, {_mode(worst[1][3])}"
        )
        lines.append(
            f"| `{op}` | {total[op]} | {slower[op]} | {'' if worst is None else f'{worst[0]:.2f}'} | {where} |"
        )
    return "\n".join(lines)


def _lost(cases: Sequence[tuple[Place, dict[str, Row]]], by: str) -> Iterator[_Loss]:
    for place, seen in cases:
        ours = getattr(seen["fusedops"], by)
        if len(seen) < 2:
            continue
        theirs, peer = min(
            (getattr(row, by), name) for name, row in seen.items() if name != "fusedops"
        )
        if ours > theirs * _TIE:
            yield ours / theirs, place, ours, theirs, peer


def _memory(rows: list[Row]) -> str:
    """The cases in which a peer uses less memory, by operator and peer, as shapes hardly differ."""
    lines = [
        "| operator | dtype | mode | peer | cases | of | worst: fusedops, MiB | peer, MiB |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    groups: dict[tuple[str, str, str, str], list[tuple[float, float, float]]] = {}
    for (op, _, dtype, mode), seen in by_place(
        row for row in rows if not launch_bound(row)
    ).items():
        for name, row in seen.items():
            if name != "fusedops" and "fusedops" in seen:
                ours, theirs = seen["fusedops"].peak_mib, row.peak_mib
                groups.setdefault((op, dtype, mode, name), []).append(
                    (ours / max(theirs, 1e-3), ours, theirs)
                )
    for (op, dtype, mode, name), result in groups.items():
        more = [case for case in result if case[0] > 1.01]
        if more:
            _, ours, theirs = max(more)
            lines.append(
                f"| `{op}` | {dtype} | {_mode(mode)} | {PROVIDER_NAMES[name]} | {len(more)} | {len(result)} | {ours:.1f} | "
                f"{theirs:.1f} |"
            )
    text = (
        "### In memory\n\nCases in which a peer's peak memory is smaller by more than 1%, on tensors of more than "
        "65,536 elements."
    )
    return "\n\n".join(
        [text, _folded("All of them", "\n".join(lines)) if len(lines) > 2 else "Nowhere."]
    )


def _place(place: Place) -> str:
    op, shape, dtype, mode = place
    return f"`{op}` | {sized(shape)} | {dtype} | {_mode(mode)}"


def _mode(mode: str) -> str:
    return MODE_NAMES[mode]
