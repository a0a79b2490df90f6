"""The report, written from the results files alone: the same files give the same text."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fusedops.core.spec import Spec

from . import figures, results, sweep, table, targets
from .cases import discover
from .columns import (
    COLUMNS,
    MODE_NAMES,
    PROVIDER_NAMES,
    CaseKey,
    all_values,
    best,
    by_case,
    launch_bound,
    sized,
)
from .results import Row

__all__ = ["charts", "markdown"]

# The axes of `sweep.AXES` that each section of pictures shows.
_AXES = {"hidden": ("hidden", "slices"), "rows": ("rows",)}
_DTYPES = ("bf16", "fp32", "fp16", "fp64")
_USUAL = ("bf16", "fwd_bwd")
_Case = tuple[CaseKey, dict[str, Row]]  # with the rows by provider
# Ratios up to this are ties: a figure with two decimals does not show them.
_TIE = 1.005

_HEAD = """# Single operators: figures

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


class _Loss(NamedTuple):
    """A case in which a peer is faster.

    Attributes:
        ratio: the time of fusedops over the peer's.
        case: the operator, shape, dtype and mode.
        ours: the time of fusedops.
        theirs: the time of the fastest peer.
        peer: the fastest peer.
    """

    ratio: float
    case: CaseKey
    ours: float
    theirs: float
    peer: str


def markdown(folder: Path, device: str) -> str:
    """Returns the page, from ``<device>.csv`` and ``sweep_<device>.csv``.

    It also has some tables of other devices.
    """
    main = results.load(folder / f"{device}.csv")
    swept = results.read(folder / f"sweep_{device}.csv")
    if not main:
        raise ValueError(f"{folder / f'{device}.csv'} holds no rows")
    merged = results.merge(swept, main)
    pictures = charts(folder, device)
    others = {path.stem.removeprefix("sweep_") for path in folder.glob("sweep_*.csv")} - {device}
    other_mains, other_sweeps = {}, {}
    for name in sorted(others):
        other_mains[name] = results.read(folder / f"{name}.csv")
        other_sweeps[f"sweep_{name}"] = results.read(folder / f"sweep_{name}.csv")
    parts = [
        _HEAD,
        _sources({device: main, f"sweep_{device}": swept, **other_mains, **other_sweeps}),
        _against_peers(merged),
        *_shown(pictures, device, "fractions"),
        _targets(main),
        _slower(merged),
        _memory(merged),
        *_shown(pictures, device, "peak_memory"),
        *_along(pictures),
        *_widths(swept),
    ]
    for name, rows in other_sweeps.items():
        parts += _widths(rows, f" on {_device(name)}")
    parts.append(_tables(main, _device(device)))
    for name, rows in other_mains.items():
        if rows:
            parts.append(_tables(rows, _device(name), f" on {_device(name)}"))
    parts += [_host(merged), *_shown(pictures, device, "host_time"), _HOW]
    return "\n\n".join(parts) + "\n"


def charts(folder: Path, device: str) -> dict[str, figures.Chart]:
    """Returns the page's pictures, by their paths relative to the page."""
    main = results.load(folder / f"{device}.csv")
    swept = results.read(folder / f"sweep_{device}.csv")
    specs = discover()
    merged = figures.Data(results.merge(swept, main), specs, *_USUAL)
    result: dict[str, figures.Chart | None] = {
        "fractions": figures.fractions(figures.Data(main, specs, *_USUAL)),
        "host_time": figures.host_time(merged),
        "peak_memory": figures.peak_memory(merged),
    }
    for section, axes in _AXES.items():
        for data in _views(swept, specs):
            suffix = f"{section}_{data.dtype}_{data.mode}"
            result[f"bandwidth_{suffix}"] = figures.bandwidth(data, axes)
            result[f"speed_up_{suffix}"] = figures.speed_up(data, axes)
    return {_image(device, name): chart for name, chart in result.items() if chart is not None}


def _shown(pictures: dict[str, figures.Chart], device: str, name: str) -> Iterator[str]:
    """Yields the Markdown of a picture, if the page has it."""
    path = _image(device, name)
    if path in pictures:
        yield f"![{pictures[path].title}]({path})"


def _folded(title: str, body: str) -> str:
    """Returns a part that is folded until a reader opens it.

    The attribute makes the site's Markdown process the body.
    """
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{body}\n\n</details>'


def _image(device: str, name: str) -> str:
    """Returns the path of a picture."""
    return f"images/{device}_{name}.svg"


def _views(swept: list[Row], specs: Sequence[Spec]) -> list[figures.Data]:
    """Returns the data of a sweep in each dtype and mode that it has."""
    present = {(row.dtype, row.mode) for row in swept}
    views = []
    for mode, dtype in itertools.product(reversed(MODE_NAMES), _DTYPES):
        if (dtype, mode) in present:
            views.append(figures.Data(swept, specs, dtype, mode))
    return views


def _sources(files: dict[str, list[Row]]) -> str:
    """Returns a table of the files: device, versions and number of rows."""
    lines = ["| file | device | torch | Triton | rows |", "|---|---|---|---|--:|"]
    for name, rows in files.items():
        if rows:
            versions = (all_values(rows, field) for field in ("torch", "triton"))
            lines.append(
                f"| [{name}.csv](../benchmarks/results/{name}.csv) | {_device(name)} | "
                f"{' | '.join(versions)} | {len(rows)} |"
            )
    return "\n".join(lines)


def _device(name: str) -> str:
    """Returns the device of a results file, from its name."""
    return name.removeprefix("sweep_").replace("_", " ").upper()


def _targets(rows: list[Row]) -> str:
    """Returns the section with the targets."""
    verdicts = targets.compare(rows)
    met = [verdict for verdict in verdicts if verdict.met]
    absent = [verdict for verdict in verdicts if verdict.result is None]
    missed = [verdict for verdict in verdicts if not verdict.met and verdict.result is not None]
    text = (
        f"## Targets and results\n\nOf the library's {len(verdicts)} targets, {len(met)} are met, "
        f"{len(missed)} missed and {len(absent)} not measured. Without a unit, a target is a "
        "fraction of the floor. Those that are missed:"
    )
    parts = [text]
    if missed:
        parts.append(_verdicts(missed))
    parts.append(_folded("All targets", _verdicts(verdicts)))
    return "\n\n".join(parts)


def _verdicts(verdicts: Sequence[targets.Verdict]) -> str:
    """Returns a table of targets and results."""
    head = [
        "| operator | shape | dtype | mode | target | result | | best peer |",
        "|---|---|---|---|--:|--:|---|---|",
    ]
    return "\n".join([*head, *map(_verdict, verdicts)])


# The text of a target of each kind.
_KINDS = {
    "fraction": "≥ {:.2f}",
    "loop": "≤ {:.2f} × eager's host time",  # noqa: RUF001
    "us": "≤ {:.1f} µs",
    "times": "≤ {:.2f} × the time in one tensor",  # noqa: RUF001
}


def _verdict(verdict: targets.Verdict) -> str:
    """Returns a line of the table of targets."""
    target = verdict.target
    if verdict.result is None:
        result, state = "", "not measured"
    else:
        result = f"{verdict.result:.2f}"
        state = "met" if verdict.met else "**missed**"
    described = _KINDS[target.kind].format(target.value)
    number, _, provider = verdict.best_peer.partition(" ")
    peer = f"{number} {PROVIDER_NAMES[provider]}" if provider else ""
    return f"| {_case_cells(target.case)} | {described} | {result} | {state} | {peer} |"


def _against_peers(rows: list[Row]) -> str:
    """Returns the summary: geometric means over large shapes, and how often a peer is faster."""
    large = by_case(row for row in rows if row.mode == "fwd_bwd" and not launch_bound(row))
    cases = _cases_of_fusedops(large)
    counts = Counter(loss.case[0] for loss in _losses(cases, "gpu_us"))
    _, *peers = COLUMNS
    # By operator: fractions of the floor under "fusedops", and speed-ups under each peer.
    ratios_of: dict[str, dict[str, list[float]]] = {}
    for (op, *_), by_provider in cases:
        ours = by_provider["fusedops"]
        ratios = ratios_of.setdefault(op, {name: [] for name in COLUMNS})
        ratios["fusedops"].append(ours.fraction)
        for column in peers:
            peer = best(by_provider, column)
            if peer is not None:
                ratios[column].append(peer.gpu_us / ours.gpu_us)
    lines = [
        "| operator | cases | a peer is faster in | of the floor | "
        + " | ".join(f"over {peer}" for peer in peers)
        + " |",
        "|---|--:|--:|--:|" + "--:|" * len(peers),
    ]
    for op, ratios in ratios_of.items():
        fractions = ratios["fusedops"]
        cells = [
            f"`{op}`",
            str(len(fractions)),
            str(counts[op]),
            f"{statistics.geometric_mean(fractions):.2f}",
            *[_spread(ratios[peer]) for peer in peers],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    text = (
        "## Summary\n\nForward + backward, GPU time, shapes of more than 65,536 elements, all dtypes: geometric means "
        "of the speed-ups, and in brackets the least and the greatest. Below 1 the peer is faster."
    )
    return "\n\n".join([text, _NAMES, "\n".join(lines)])


def _spread(ratios: list[float]) -> str:
    """Returns the geometric mean, the least and the greatest ratio; empty without ratios."""
    if not ratios:
        return ""
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _along(pictures: dict[str, figures.Chart]) -> Iterator[str]:
    """Yields the sections with the sweeps' pictures, all but the first folded."""
    titles = {
        "hidden": "## Along hidden sizes\n\nEach tensor has 2²⁵ elements. For slices, the pictures vary their width and "
        "their number. Bandwidth counts the unavoidable bytes; the dashed line is the bandwidth of a copy. "
        "In the pictures of speed-ups, a peer is faster in the grey part.",
        "rows": "## Along rows",
    }
    for section, title in titles.items():
        # A section's pictures have its name, the dtype and the mode in their paths.
        paths = [path for path in pictures if re.search(rf"_{section}_[a-z]+\d+_", path)]
        if paths:
            yield title
        for index, path in enumerate(paths):
            name = pictures[path].title
            picture = f"![{name}]({path})"
            is_first = section == "hidden" and index == 0
            yield picture if is_first else _folded(name, picture)


def _widths(swept: list[Row], where: str = "") -> Iterator[str]:
    """Yields the section of widths that are no power of two, if any were measured.

    It has the fractions of the floor, and the speed-ups over the best peer.
    """
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for (op, shape, dtype, mode), by_provider in _cases_of_fusedops(by_case(swept)):
        if (dtype, mode) == _USUAL:
            cases[op, shape] = by_provider
    summary, lines = [], []
    for spec in discover():
        fractions: list[float] = []
        speed_ups: list[float] = []
        for shape in _shapes_along_widths(spec):
            if (spec.name, shape) not in cases:
                continue
            peers = dict(cases[spec.name, shape])
            ours = peers.pop("fusedops")
            fractions.append(ours.fraction)
            speed_up = ""
            if peers:
                speed_ups.append(min(row.gpu_us / ours.gpu_us for row in peers.values()))
                speed_up = f"{speed_ups[-1]:.2f}"
            lines.append(
                f"| `{spec.name}` | {sized(shape)} | {ours.gpu_us:.1f} | {ours.fraction:.2f} | "
                f"{speed_up} |"
            )
        if fractions:
            summary.append(
                f"| `{spec.name}` | {len(fractions)} | {_spread(fractions)} | {_spread(speed_ups)} |"
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


def _shapes_along_widths(spec: Spec) -> Iterator[str]:
    """Yields the names of an operator's shapes along the axis of widths."""
    for line in sweep.lines(spec, ("widths",)):
        for _, sides in sorted(line.points):
            yield "x".join(map(str, sides))


def _tables(main: list[Row], name: str, where: str = "") -> str:
    """Returns the section with the tables of the shapes with targets."""
    large = [row for row in main if not launch_bound(row)]
    modes = [mode for mode in reversed(MODE_NAMES) if any(row.mode == mode for row in large)]
    tables = [
        _folded(_mode(mode).capitalize(), table.markdown(large, name, mode)) for mode in modes
    ]
    return "\n\n".join(
        [f"## The shapes with targets{where}\n\nTimes, and fractions of the floor.", *tables]
    )


def _host(rows: list[Row]) -> str:
    """Returns the section with the host times."""
    small = by_case(row for row in rows if launch_bound(row))
    lines = [
        "| operator | shape | dtype | mode | " + " | ".join(COLUMNS) + " |",
        "|---|---|---|---|" + "--:|" * 4,
    ]
    for case, by_provider in _cases_of_fusedops(small):
        times = (best(by_provider, column, by="loop_us") for column in COLUMNS)
        cells = ("" if row is None else f"{row.loop_us:.1f}" for row in times)
        lines.append(f"| {_case_cells(case)} | {' | '.join(cells)} |")
    text = (
        "## Host time\n\nµs per call in a plain Python loop, on tensors of at most 65,536 elements."
    )
    return "\n\n".join([text, _folded("All host times", "\n".join(lines))])


def _slower(rows: list[Row]) -> str:
    """Returns the section with all cases in which a peer is faster by more than a tie."""
    parts = ["## Shapes where a peer is faster"]
    cases = [
        (case, by_provider)
        for case, by_provider in _cases_of_fusedops(by_case(rows))
        if len(by_provider) > 1
    ]
    for field, title in (("gpu_us", "In GPU time"), ("loop_us", "In a plain Python loop")):
        losses = sorted(_losses(cases, field), key=lambda loss: (-loss.ratio, loss.case))
        parts.append(
            f"### {title}\n\nA peer is faster by more than {_TIE - 1:.1%} in {len(losses)} of "
            f"{len(cases)} cases. Smaller differences are ties, and are not listed."
        )
        if losses:
            head = [
                "| operator | shape | dtype | mode | fusedops, µs | fastest peer, µs | | times slower |",
                "|---|---|---|---|--:|--:|---|--:|",
            ]
            lines = [
                f"| {_case_cells(loss.case)} | {loss.ours:.1f} | {loss.theirs:.1f} | "
                f"{PROVIDER_NAMES[loss.peer]} | {loss.ratio:.2f} |"
                for loss in losses
            ]
            parts.append(_by_operator(cases, losses))
            parts.append(_folded("All of them, the worst first", "\n".join([*head, *lines])))
    return "\n\n".join(parts)


def _by_operator(cases: Sequence[_Case], losses: Sequence[_Loss]) -> str:
    """Returns a table of how often a peer is faster than an operator, and where most.

    The largest of the losses come first.
    """
    total = Counter(case[0] for case, _ in cases)
    slower = Counter(loss.case[0] for loss in losses)
    lines = [
        "| operator | cases | a peer is faster in | at worst, times slower | where |",
        "|---|--:|--:|--:|---|",
    ]
    for op in dict.fromkeys(case[0] for case, _ in cases):
        worst = next((loss for loss in losses if loss.case[0] == op), None)
        ratio = where = ""
        if worst is not None:
            _, shape, dtype, mode = worst.case
            ratio, where = f"{worst.ratio:.2f}", f"{sized(shape)}, {dtype}, {_mode(mode)}"
        lines.append(f"| `{op}` | {total[op]} | {slower[op]} | {ratio} | {where} |")
    return "\n".join(lines)


def _cases_of_fusedops(cases: dict[CaseKey, dict[str, Row]]) -> list[_Case]:
    """Returns the cases that fusedops has, with their rows by provider."""
    return [(case, by_provider) for case, by_provider in cases.items() if "fusedops" in by_provider]


def _losses(cases: Sequence[_Case], field: str) -> Iterator[_Loss]:
    """Yields the cases in which a peer has less of a field than fusedops, by more than a tie."""
    for case, by_provider in cases:
        ours = getattr(by_provider["fusedops"], field)
        peers = [
            (getattr(row, field), name) for name, row in by_provider.items() if name != "fusedops"
        ]
        if not peers:
            continue
        theirs, peer = min(peers)
        if ours > theirs * _TIE:
            yield _Loss(ours / theirs, case, ours, theirs, peer)


def _memory(rows: list[Row]) -> str:
    """Returns the section with the cases in which a peer uses less memory.

    They are by operator and peer, because shapes hardly differ.
    """
    lines = [
        "| operator | dtype | mode | peer | cases | of | worst: fusedops, MiB | peer, MiB |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    # By operator, dtype, mode and peer: the ratio, our memory and the peer's, for each shape.
    groups: dict[tuple[str, str, str, str], list[tuple[float, float, float]]] = {}
    large = by_case(row for row in rows if not launch_bound(row))
    for (op, _, dtype, mode), by_provider in _cases_of_fusedops(large):
        ours = by_provider["fusedops"].peak_mib
        for name, row in by_provider.items():
            if name != "fusedops":
                theirs = row.peak_mib
                ratio = ours / max(theirs, 1e-3)
                groups.setdefault((op, dtype, mode, name), []).append((ratio, ours, theirs))
    for (op, dtype, mode, name), memory in groups.items():
        worse = [entry for entry in memory if entry[0] > 1.01]
        if worse:
            _, ours, theirs = max(worse)
            lines.append(
                f"| `{op}` | {dtype} | {_mode(mode)} | {PROVIDER_NAMES[name]} | "
                f"{len(worse)} | {len(memory)} | {ours:.1f} | {theirs:.1f} |"
            )
    text = (
        "### In memory\n\nCases in which a peer's peak memory is smaller by more than 1%, on tensors of more than "
        "65,536 elements."
    )
    has_cases = len(lines) > 2  # more than the head
    body = _folded("All of them", "\n".join(lines)) if has_cases else "Nowhere."
    return f"{text}\n\n{body}"


def _case_cells(case: CaseKey) -> str:
    """Returns the cells of a table's line for a case."""
    op, shape, dtype, mode = case
    return f"`{op}` | {sized(shape)} | {dtype} | {_mode(mode)}"


def _mode(mode: str) -> str:
    return MODE_NAMES[mode]
