"""Compares two results files before a release: which cases became slower or need more memory.

A file has one figure per case, from which the noise cannot be estimated. But both files also have
figures of eager PyTorch. If both were measured with the same PyTorch, these are a control: where
eager's figure differs, the machine has changed, not the library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .columns import CaseKey, all_values, by_case, launch_bound
from .results import Row

__all__ = ["Change", "Comparison", "compare", "report"]

_METRICS = {"gpu_us": "GPU time", "loop_us": "host time", "peak_mib": "peak memory"}
_UNITS = {"gpu_us": "us", "loop_us": "us", "peak_mib": "MiB"}
# Memory may differ by this much because of the allocator's granularity and the file's rounding.
_SLACK_MIB = 0.01


@dataclass(frozen=True)
class Change:
    """One figure of fusedops in both files.

    Attributes:
        case: the operator, shape, dtype and mode.
        metric: the row's field.
        old: the figure in the old file.
        new: the figure in the new file.
        control: eager's new figure over its old one; None if PyTorch is not the same.
    """

    case: CaseKey
    metric: str
    old: float
    new: float
    control: float | None

    @property
    def ratio(self) -> float:
        """The new figure over the old one: above one is worse."""
        if self.old:
            return self.new / self.old
        return math.inf if self.new else 1.0

    @property
    def net(self) -> float:
        """The ratio, divided by eager's if eager became slower."""
        return self.ratio / max(1.0, self.control or 1.0)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    A change for the worse is a regression if its `Change.net` is beyond the threshold too. Else it
    is doubtful: eager became slower as well, though its code is the same in both files.
    """

    threshold: float
    changes: list[Change]
    regressions: list[Change]
    doubtful: list[Change]
    improvements: list[Change]
    vanished: list[CaseKey]
    added: list[CaseKey]
    notes: list[str]


def compare(old: Iterable[Row], new: Iterable[Row], threshold: float) -> Comparison:
    """Compares the rows of fusedops in two files.

    ``threshold`` is a fraction, 0.03 for 3%.

    Raises:
        ValueError: the files have no case of fusedops in common.
    """
    old, new = list(old), list(new)
    before, after = by_case(old), by_case(new)
    ours_before = [case for case, rows in before.items() if "fusedops" in rows]
    ours_after = [case for case, rows in after.items() if "fusedops" in rows]
    vanished = [case for case in ours_before if case not in set(ours_after)]
    added = [case for case in ours_after if case not in set(ours_before)]
    common = [case for case in ours_before if case in set(ours_after)]
    if not common:
        raise ValueError("the files have no case of fusedops in common")
    has_control = all(
        all_values(old, field) == all_values(new, field) for field in ("torch", "triton")
    )
    changes: list[Change] = []
    for case in common:
        changes += _changes(case, before[case], after[case], has_control=has_control)
    regressions: list[Change] = []
    doubtful: list[Change] = []
    improvements: list[Change] = []
    for change in changes:
        if _beyond(change, change.ratio, threshold):
            if _beyond(change, change.net, threshold):
                regressions.append(change)
            else:
                doubtful.append(change)
        elif _beyond(change, 1.0 / max(change.ratio, 1e-9), threshold):
            improvements.append(change)
    pairs = [(before[case]["fusedops"], after[case]["fusedops"]) for case in common]
    return Comparison(
        threshold=threshold,
        changes=changes,
        regressions=sorted(regressions, key=lambda change: -change.net),
        doubtful=sorted(doubtful, key=lambda change: -change.ratio),
        improvements=sorted(improvements, key=lambda change: change.ratio),
        vanished=vanished,
        added=added,
        notes=list(_notes(old, new, pairs)),
    )


def report(comparison: Comparison, old_device: str, new_device: str) -> str:
    """Returns the comparison as text for the terminal."""
    lines = []
    if old_device != new_device:
        lines.append(f"NOTE: the files are named for {old_device} and for {new_device}")
    lines += [f"NOTE: {note}" for note in comparison.notes]
    percent = f"{100 * comparison.threshold:g}%"
    regressions, doubtful = comparison.regressions, comparison.doubtful
    lines += _listed(f"{len(regressions)} regressions beyond {percent}", regressions)
    lines += _listed(
        f"{len(doubtful)} doubtful: eager, whose code is the same, became slower there too; "
        "measure again",
        doubtful,
    )
    lines += _listed(
        f"{len(comparison.improvements)} improvements beyond {percent}; the largest",
        comparison.improvements[:5],
    )
    for metric, name in _METRICS.items():
        changes = [change for change in comparison.changes if change.metric == metric]
        lines += _mean_line(name, changes)
    for verb, cases in (("vanished from", comparison.vanished), ("are new in", comparison.added)):
        if cases:
            lines.append(f"{len(cases)} cases {verb} the new file:")
            lines += [f"  {' '.join(case)}" for case in cases]
    return "\n".join(lines)


def _mean_line(name: str, changes: list[Change]) -> Iterator[str]:
    """Yields a line with the mean of a metric's changes, if it has any."""
    ratios = [change.ratio for change in changes if 0.0 < change.ratio < math.inf]
    if not ratios:
        return
    controls = [abs(change.control - 1.0) for change in changes if change.control is not None]
    noise = ""
    if controls:
        noise = f"; eager moved by {100 * statistics.median(controls):.1f}% (median)"
    mean = statistics.geometric_mean(ratios)
    yield f"{name}: new over old {mean:.3f} (geometric mean of {len(ratios)} cases){noise}"


def _changes(
    case: CaseKey, before: dict[str, Row], after: dict[str, Row], *, has_control: bool
) -> Iterator[Change]:
    """Yields the changes of a case, from its rows by provider in both files."""
    old, new = before["fusedops"], after["fusedops"]
    for metric in _METRICS:
        if metric == "loop_us" and not launch_bound(new):
            continue  # the loop of large tensors waits for the GPU
        control = None
        has_eager = "eager" in before and "eager" in after
        if has_control and has_eager and metric != "peak_mib":
            control = getattr(after["eager"], metric) / getattr(before["eager"], metric)
        yield Change(case, metric, getattr(old, metric), getattr(new, metric), control)


def _beyond(change: Change, ratio: float, threshold: float) -> bool:
    """Returns whether a ratio of a change is beyond the threshold."""
    if change.metric == "peak_mib" and abs(change.new - change.old) <= _SLACK_MIB:
        return False
    return ratio > 1.0 + threshold


def _notes(old: list[Row], new: list[Row], pairs: list[tuple[Row, Row]]) -> Iterator[str]:
    """Yields a note for each other difference that may explain changes: versions, and the floor.

    ``pairs`` has the rows of fusedops in both files, for each case.
    """
    for field in ("torch", "triton"):
        before, after = all_values(old, field), all_values(new, field)
        if before != after:
            yield f"{field} is {before} in the old file, {after} in the new one"
    # The floor is 0 for an operator that need not move its tensors, such as an in-place ban of
    # n-grams.
    ratios = []
    for old_row, new_row in pairs:
        if old_row.floor_us:
            ratios.append(new_row.floor_us / old_row.floor_us)
    floors = statistics.median(ratios) if ratios else 1.0
    if abs(floors - 1.0) > 0.01:
        yield (
            f"the floor is {floors:.3f} times the old one: another device, another copy bandwidth, "
            "or other bytes counted"
        )


def _listed(title: str, changes: list[Change]) -> list[str]:
    return [f"{title}:" if changes else title, *(_line(change) for change in changes)]


def _line(change: Change) -> str:
    op, shape, dtype, mode = change.case
    unit = _UNITS[change.metric]
    control = "" if change.control is None else f"  eager {100 * (change.control - 1.0):+.1f}%"
    return (
        f"  {op:<34}{shape:<13}{dtype:<6}{mode:<9}{_METRICS[change.metric]:<12}{change.old:10.2f} -> "
        f"{change.new:10.2f} {unit:<4}{100 * (change.ratio - 1.0):+7.1f}%{control}"
    )
