"""Counts the row-wise regions that the compile backend fuses in some hundreds of architectures.

``python tests/harness/backend_coverage.py`` traces each of `architectures.names` in training. It
prints how many of its regions are fused into one operator, and why others are not. The table also
has the bytes that the kernels read and write, and those saved for backward, at the small sizes of
the architecture. At the end the command prints all reasons, with the number of architectures in
which each occurs.

``--dynamic`` traces with symbols for sizes and Python numbers, and fails if fewer regions are fused
than in the table, whose regions were traced with fixed sizes. Regions with a symbolic number of
columns do not count, because the backend leaves them by design. Architectures that PyTorch cannot
trace with symbols within two minutes do not count either; they are listed. ``--every 8`` takes
every eighth architecture.

``--write`` writes the table to ``coverage/backend_transformers_VERSION.csv``; ``--check`` fails if
fewer regions of an architecture are fused than in that file, or more of its graphs are left.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # without it a CPU has no kernels, and so no regions

import torch
import transformers

import architectures
from backends import select_as_large
from fusedops.backend import entry
from fusedops.backend.regions import CHANGING
from fusedops.backend.report import CompileReport

FOLDER = Path(__file__).with_name("coverage")
_SECONDS = 120  # the most processor time for an architecture


@dataclass(frozen=True)
class Regions:
    """The regions of an architecture, and how many of them are fused.

    Attributes:
        architecture: the name of the architecture.
        graphs: the number of graphs that torch.compile traces.
        graphs_left: the number of graphs that are left to Inductor.
        regions: the number of row-wise regions.
        fused: the number of regions that are one operator.
        moved_bytes: the bytes that the kernels read and write.
        saved_bytes: the bytes that are saved for backward.
        reasons: why regions and graphs are left, the commonest first.
    """

    architecture: str
    graphs: int
    graphs_left: int
    regions: int
    fused: int
    moved_bytes: int
    saved_bytes: int
    reasons: str


COLUMNS = tuple(field.name for field in fields(Regions))


def regions_of(name: str, device: torch.device | str = "cpu", *, dynamic: bool = False) -> Regions:
    """Traces an architecture, and returns its regions.

    If it cannot be traced, all numbers are zero, and the reason is the error.

    Args:
        name: the architecture.
        device: a device with kernels.
        dynamic: whether sizes are symbols.
    """
    architecture = architectures.make(name)
    torch._dynamo.reset()
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        model = architecture.build().train().to(device)
        inputs = architecture.inputs(model)
        inputs = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
        }

        # A function, because torch.compile does not compile models whose class is PyTorch's.
        def call(**arguments: Any) -> Any:
            return model(**arguments)

        report = CompileReport()
        traced = torch.compile(
            call, backend=functools.partial(entry._explained, report), dynamic=dynamic or None
        )
        traced(**inputs)
    except (Exception, _LateError) as error:  # noqa: BLE001, not all can be traced
        return Regions(
            name,
            graphs=0,
            graphs_left=0,
            regions=0,
            fused=0,
            moved_bytes=0,
            saved_bytes=0,
            reasons=f"not traced: {type(error).__name__}",
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    reasons = Counter(
        [*report.left, *[region.reason for region in report.regions if region.reason]]
    )
    fused = report.fused
    return Regions(
        name,
        graphs=report.graphs,
        graphs_left=len(report.left),
        regions=len(report.regions),
        fused=len(fused),
        moved_bytes=sum(region.moved for region in fused),
        saved_bytes=sum(region.saved for region in fused),
        reasons="; ".join(f"{count} x {_short(reason)}" for reason, count in reasons.most_common()),
    )


def _short(reason: str) -> str:
    """The beginning of the first line, without the separator of reasons."""
    return (reason.strip().splitlines() or [""])[0].replace(";", ",")[:120]


def by_reason(results: Iterable[Regions]) -> str:
    """A line for each reason: how often it occurs, and in how many architectures.

    Reasons that differ only in numbers count as one.
    """
    counts: Counter[str] = Counter()
    names: dict[str, set[str]] = defaultdict(set)
    for regions in results:
        for part in filter(None, regions.reasons.split("; ")):
            count, _, reason = part.partition(" x ") if " x " in part else ("1", "", part)
            kind = re.sub(r"\d+", "N", reason)
            counts[kind] += int(count)
            names[kind].add(regions.architecture)
    return "\n".join(
        f"{count:6}  in {len(names[kind]):3} architectures  {kind}"
        for kind, count in counts.most_common()
    )


def missing(symbolic: Regions, fixed: Regions) -> int:
    """Returns how many fewer regions are fused with symbolic sizes than with fixed ones.

    Regions that are left because their number of columns is symbolic do not count. Some of them
    are left with fixed sizes, too, for another reason. They are in neither number.
    """
    parts = [part.partition(" x ") for part in symbolic.reasons.split("; ")]
    changing = sum([int(count) for count, _, reason in parts if reason == CHANGING])
    left_if_fixed = fixed.regions - fixed.fused
    left_for_other_reasons = symbolic.regions - symbolic.fused - changing
    changing_but_left_anyway = max(0, left_if_fixed - left_for_other_reasons)
    excused = max(0, changing - changing_but_left_anyway)
    return fixed.fused - symbolic.fused - excused


# --- files ----------------------------------------------------------------------------------------


def path() -> Path:
    """The file of the installed version of Transformers."""
    return FOLDER / f"backend_transformers_{transformers.__version__}.csv"


def write(results: Iterable[Regions]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with path().open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(results, key=lambda regions: regions.architecture)))


def read() -> dict[str, Regions]:
    """The regions in the file, by architecture."""
    with path().open(newline="", encoding="utf-8") as file:
        rows = [[row[column] for column in COLUMNS] for row in csv.DictReader(file)]
    return {name: Regions(name, *map(int, counts), reasons) for name, *counts, reasons in rows}


def lost(results: Iterable[Regions], *, dynamic: bool = False) -> list[str]:
    """Describes the architectures with fewer fused regions, or more graphs left, than in the file.

    With ``dynamic`` the results were traced with symbols. Architectures that cannot be traced with
    symbols do not count.
    """
    known = read()
    descriptions = []
    for now in results:
        before = known.get(now.architecture)
        if before is None:
            continue
        if not dynamic:
            fewer = before.fused - now.fused
        else:
            fewer = missing(now, before) if now.graphs else 0
        if fewer > 0 or now.graphs_left > before.graphs_left:
            descriptions.append(
                f"{now.architecture}: {now.fused} fused, before {before.fused}; "
                f"{now.graphs_left} graphs left, before {before.graphs_left}; {now.reasons}"
            )
    return descriptions


class _LateError(BaseException):
    """Raised after `_SECONDS`. Not an `Exception`, because traced code may handle those."""


def _raise_late(*_: Any) -> None:
    raise _LateError


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python tests/harness/backend_coverage.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument(
        "--write", action="store_true", help="write the file of this version of Transformers"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if something that is fused in that file is not fused now",
    )
    parser.add_argument(
        "--dynamic",
        action="store_true",
        help="trace with symbols for sizes, and fail if less is fused",
    )
    parser.add_argument("--every", type=int, default=1, help="take each N-th architecture only")
    options = parser.parse_args(arguments)
    if options.write and (options.names or options.dynamic or options.every > 1):
        parser.error("--write is for all architectures, with fixed sizes")
    if (options.check or options.dynamic) and not path().exists():
        print(f"there is no {path()}: write it first, with --write")
        return 1
    select_as_large()
    start, results = time.monotonic(), list[Regions]()
    signal.signal(signal.SIGPROF, _raise_late)
    for name in options.names or architectures.names()[:: options.every]:
        with warnings.catch_warnings(), architectures.quiet():
            warnings.simplefilter("ignore")
            result = regions_of(name, dynamic=options.dynamic)
        results.append(result)
        print(
            f"{name:32}{result.fused:4} of {result.regions:4} regions  {result.reasons}",
            flush=True,
        )
    total = sum(regions.regions for regions in results)
    fused = sum(regions.fused for regions in results)
    print(
        f"\n{fused} of {total} regions of {len(results)} architectures are one operator each, in "
        f"{time.monotonic() - start:.0f} s; the others are left:\n{by_reason(results)}"
    )
    fewer = lost(results, dynamic=options.dynamic) if options.check or options.dynamic else []
    if fewer:
        print(f"\nless than in the table, {len(fewer)} architectures:", *fewer, sep="\n  ")
    if options.write:
        write(results)
    return bool(fewer)


if __name__ == "__main__":
    sys.exit(main())
