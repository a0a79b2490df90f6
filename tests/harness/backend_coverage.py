"""``python tests/harness/backend_coverage.py``.

The row-wise regions of some hundreds of architectures, from `fusedops.explain`.

For each of `architectures.names`, in training: how many regions are one operator, of how many; the
bytes that their kernels read and write, and those that are saved for backward, at its small sizes;
and why others are left, with their number. Last come all reasons, and of how many architectures
each leaves something.

``--dynamic`` traces with symbols for sizes and for numbers of Python, and fails if fewer regions
are fused than in the table, which is without. Regions whose columns change in number do not count:
they are left by name. Nor do architectures that PyTorch cannot trace in this way, or not in two
minutes; they are listed. ``--every 8`` takes every eighth architecture.

``--write`` writes the table to ``coverage/backend_transformers_VERSION.csv``; ``--check`` fails if
fewer regions of an architecture are fused than there, or more of its graphs are left.
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
    os.environ["TRITON_INTERPRET"] = "1"  # else there are no kernels for a CPU, and no regions

import torch
import transformers

import architectures
from fusedops.backend import entry
from fusedops.backend.regions import CHANGING
from fusedops.backend.report import CompileReport

FOLDER = Path(__file__).with_name("coverage")
_SECONDS = 120  # of the processor


@dataclass(frozen=True)
class Regions:
    """The regions of an architecture, and how many of them are fused.

    Attributes:
        graphs: the number of graphs that torch.compile traces.
        graphs_left: the number of graphs that are left to Inductor.
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
    """The regions of an architecture on a device with kernels; sizes are symbols if ``dynamic``.

    The reason is the error where it cannot be traced.
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

        def call(
            **arguments: Any,
        ) -> Any:  # torch.compile passes over models whose own class is PyTorch's
            return model(**arguments)

        report = CompileReport()
        traced = torch.compile(
            call, backend=functools.partial(entry._explained, report), dynamic=dynamic or None
        )
        traced(**inputs)
    except (Exception, _LateError) as error:  # noqa: BLE001, not all can be traced
        return Regions(name, 0, 0, 0, 0, 0, 0, f"not traced: {type(error).__name__}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    reasons = Counter(
        [*report.left, *[region.reason for region in report.regions if region.reason]]
    )
    fused = report.fused
    return Regions(
        name,
        report.graphs,
        len(report.left),
        len(report.regions),
        len(fused),
        sum(region.moved for region in fused),
        sum(region.saved for region in fused),
        "; ".join(f"{count} x {_short(why)}" for why, count in reasons.most_common()),
    )


def _short(reason: str) -> str:
    return (reason.strip().splitlines() or [""])[0].replace(";", ",")[:120]


def by_reason(found: Iterable[Regions]) -> str:
    """A line for each reason, whatever numbers it has.

    How often, and in how many architectures.
    """
    counts: Counter[str] = Counter()
    where: dict[str, set[str]] = defaultdict(set)
    for regions in found:
        for part in filter(None, regions.reasons.split("; ")):
            count, _, why = part.partition(" x ") if " x " in part else ("1", "", part)
            kind = re.sub(r"\d+", "N", why)
            counts[kind] += int(count)
            where[kind].add(regions.architecture)
    return "\n".join(
        f"{count:6}  in {len(where[kind]):3} architectures  {kind}"
        for kind, count in counts.most_common()
    )


def missing(symbols: Regions, numbers: Regions) -> int:
    """How many regions fewer are fused with symbols than with numbers, those whose columns change in number aside.

    Of these some are left with numbers, too, for another reason.
    """
    parts = [part.partition(" x ") for part in symbols.reasons.split("; ")]
    changing = sum([int(count) for count, _, why in parts if why == CHANGING])
    left = [result.regions - result.fused for result in (numbers, symbols)]
    return numbers.fused - symbols.fused - max(0, changing - max(0, left[0] - (left[1] - changing)))


# --- files ----------------------------------------------------------------------------------------


def path() -> Path:
    return FOLDER / f"backend_transformers_{transformers.__version__}.csv"


def write(found: Iterable[Regions]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with path().open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(found, key=lambda regions: regions.architecture)))


def read() -> dict[str, Regions]:
    """The file of this version of Transformers, by architecture."""
    with path().open(newline="", encoding="utf-8") as file:
        rows = [[row[column] for column in COLUMNS] for row in csv.DictReader(file)]
    return {name: Regions(name, *map(int, counts), reasons) for name, *counts, reasons in rows}


def lost(found: Iterable[Regions], *, dynamic: bool = False) -> list[str]:
    """The architectures of which fewer regions are fused than when the file was written, or more graphs left.

    With ``dynamic`` they were traced with symbols, if they could be.
    """
    pairs = [
        (now, before)
        for known in (read(),)
        for now in found
        if (before := known.get(now.architecture))
    ]
    return [
        f"{now.architecture}: {now.fused} fused, before {before.fused}; {now.graphs_left} graphs left, "
        f"before {before.graphs_left}; {now.reasons}"
        for now, before in pairs
        if (now.graphs and missing(now, before) if dynamic else before.fused - now.fused) > 0
        or now.graphs_left > before.graphs_left
    ]


class _LateError(BaseException):
    """No `Exception`: what is traced handles those."""


def _late(*_: Any) -> None:
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
        help="fail if something that was fused in that file no longer is",
    )
    parser.add_argument(
        "--dynamic",
        action="store_true",
        help="trace with symbols for sizes, and fail if less is fused",
    )
    parser.add_argument("--every", type=int, default=1, help="take each N-th architecture only")
    options = parser.parse_args(arguments)
    if options.write and (options.names or options.dynamic or options.every > 1):
        parser.error("--write is for all architectures, with numbers")
    if (options.check or options.dynamic) and not path().exists():
        print(f"there is no {path()}: write it first, with --write")
        return 1
    start, result = time.monotonic(), list[Regions]()
    signal.signal(signal.SIGPROF, _late)
    for name in options.names or architectures.names()[:: options.every]:
        with warnings.catch_warnings(), architectures.quiet():
            warnings.simplefilter("ignore")
            result.append(regions_of(name, dynamic=options.dynamic))
        print(
            f"{name:32}{result[-1].fused:4} of {result[-1].regions:4} regions  {result[-1].reasons}",
            flush=True,
        )
    total, fused = (
        sum(regions.regions for regions in result),
        sum(regions.fused for regions in result),
    )
    print(
        f"\n{fused} of {total} regions of {len(result)} architectures are one operator each, in "
        f"{time.monotonic() - start:.0f} s; the others are left:\n{by_reason(result)}"
    )
    gone = lost(result, dynamic=options.dynamic) if options.check or options.dynamic else []
    if gone:
        print(f"\nless than in the table, {len(gone)} architectures:", *gone, sep="\n  ")
    if options.write:
        write(result)
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main())
