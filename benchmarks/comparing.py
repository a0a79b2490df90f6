"""Two results files against each other: what became slower or larger, before a release.

A file holds one figure a case, so that its noise is not in it. But both files hold eager's figure
too, and as long as PyTorch is the same that is a control: what moved eager at the same case moved
the machine, not the library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .columns import Place, by_place, every, launch_bound
from .results import Row

__all__ = ["Change", "Comparison", "compare", "report"]

_METRICS = {"gpu_us": "GPU time", "loop_us": "host time", "peak_mib": "peak memory"}
_UNITS = {"gpu_us": "us", "loop_us": "us", "peak_mib": "MiB"}
_SLACK_MIB = 0.01  # what an allocator's granularity and the file's rounding may differ by


@dataclass(frozen=True)
class Change:
    """One figure of fusedops in both files.

    ``control`` is eager's new over old there, where PyTorch is the same.
    """

    place: Place
    metric: str
    old: float
    new: float
    control: float | None

    @property
    def ratio(self) -> float:
        """New over old: above one is worse."""
        return self.new / self.old if self.old else math.inf if self.new else 1.0

    @property
    def net(self) -> float:
        """The ratio, less what eager became slower by at the same time."""
        return self.ratio / max(1.0, self.control or 1.0)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    A change for the worse is doubtful if less than the threshold remains of it after that of eager,
    whose code is the same in both files; else it is a regression.
    """

    threshold: float
    changes: list[Change]
    regressions: list[Change]
    doubtful: list[Change]
    improvements: list[Change]
    vanished: list[Place]
    added: list[Place]
    notes: list[str]


def compare(old: Iterable[Row], new: Iterable[Row], threshold: float) -> Comparison:
    """Holds fusedops' rows of one file against the other's.

    ``threshold`` is a fraction, 0.03 for 3%.

    Raises:
        ValueError: the files have no case of fusedops in common.
    """
    old, new = list(old), list(new)
    before, after = by_place(old), by_place(new)
    ours_before, ours_after = (
        [p for p, seen in places.items() if "fusedops" in seen] for places in (before, after)
    )
    common = [place for place in ours_before if place in set(ours_after)]
    if not common:
        raise ValueError("the files have no case of fusedops in common")
    same = all(every(old, field) == every(new, field) for field in ("torch", "triton"))
    changes = [
        c for place in common for c in _changes(place, before[place], after[place], controlled=same)
    ]
    worse = [c for c in changes if _beyond(c, c.ratio, threshold)]
    return Comparison(
        threshold,
        changes,
        sorted((c for c in worse if _beyond(c, c.net, threshold)), key=lambda c: -c.net),
        sorted((c for c in worse if not _beyond(c, c.net, threshold)), key=lambda c: -c.ratio),
        sorted(
            (c for c in changes if _beyond(c, 1.0 / max(c.ratio, 1e-9), threshold)),
            key=lambda c: c.ratio,
        ),
        [place for place in ours_before if place not in set(ours_after)],
        [place for place in ours_after if place not in set(ours_before)],
        list(_notes(old, new, [(before[p]["fusedops"], after[p]["fusedops"]) for p in common])),
    )


def report(found: Comparison, old_device: str, new_device: str) -> str:
    """Returns the comparison as text for the terminal."""
    lines = []
    if old_device != new_device:
        lines.append(f"NOTE: the files are named for {old_device} and for {new_device}")
    lines += [f"NOTE: {note}" for note in found.notes]
    percent = f"{100 * found.threshold:g}%"
    lines += _listed(f"{len(found.regressions)} regressions beyond {percent}", found.regressions)
    lines += _listed(
        f"{len(found.doubtful)} doubtful: eager, whose code is the same, became slower there too; "
        "measure again",
        found.doubtful,
    )
    lines += _listed(
        f"{len(found.improvements)} improvements beyond {percent}; the largest",
        found.improvements[:5],
    )
    for metric, name in _METRICS.items():
        ratios = [c.ratio for c in found.changes if c.metric == metric and 0.0 < c.ratio < math.inf]
        if ratios:
            controls = [
                abs(c.control - 1.0)
                for c in found.changes
                if c.metric == metric and c.control is not None
            ]
            noise = (
                f"; eager moved by {100 * statistics.median(controls):.1f}% (median)"
                if controls
                else ""
            )
            mean = statistics.geometric_mean(ratios)
            lines.append(
                f"{name}: new over old {mean:.3f} (geometric mean of {len(ratios)} cases){noise}"
            )
    for what, places in (("vanished from", found.vanished), ("are new in", found.added)):
        if places:
            lines.append(f"{len(places)} cases {what} the new file:")
            lines += [f"  {' '.join(place)}" for place in places]
    return "\n".join(lines)


def _changes(
    place: Place, before: dict[str, Row], after: dict[str, Row], *, controlled: bool
) -> Iterator[Change]:
    old, new = before["fusedops"], after["fusedops"]
    for metric in _METRICS:
        if metric == "loop_us" and not launch_bound(new):
            continue  # there the loop waits for the GPU
        control = None
        if controlled and metric != "peak_mib" and "eager" in before and "eager" in after:
            control = getattr(after["eager"], metric) / getattr(before["eager"], metric)
        yield Change(place, metric, getattr(old, metric), getattr(new, metric), control)


def _beyond(change: Change, ratio: float, threshold: float) -> bool:
    if change.metric == "peak_mib" and abs(change.new - change.old) <= _SLACK_MIB:
        return False
    return ratio > 1.0 + threshold


def _notes(old: list[Row], new: list[Row], pairs: list[tuple[Row, Row]]) -> Iterator[str]:
    for field in ("torch", "triton"):
        if every(old, field) != every(new, field):
            yield f"{field} is {every(old, field)} in the old file, {every(new, field)} in the new one"
    # Of an operator that need not move its tensors, such as a ban of n-grams in place, it is 0.
    ratios = [after.floor_us / before.floor_us for before, after in pairs if before.floor_us]
    floors = statistics.median(ratios) if ratios else 1.0
    if abs(floors - 1.0) > 0.01:
        yield (
            f"the floor is {floors:.3f} times the old one: another device, another copy bandwidth, or other bytes "
            "counted"
        )


def _listed(title: str, changes: list[Change]) -> list[str]:
    return [f"{title}:" if changes else title, *(_line(change) for change in changes)]


def _line(change: Change) -> str:
    op, shape, dtype, mode = change.place
    unit = _UNITS[change.metric]
    control = "" if change.control is None else f"  eager {100 * (change.control - 1.0):+.1f}%"
    return (
        f"  {op:<34}{shape:<13}{dtype:<6}{mode:<9}{_METRICS[change.metric]:<12}{change.old:10.2f} -> "
        f"{change.new:10.2f} {unit:<4}{100 * (change.ratio - 1.0):+7.1f}%{control}"
    )
