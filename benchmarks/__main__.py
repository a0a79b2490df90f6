"""Measures the library, and tabulates, draws and compares the results.

``run`` measures the shapes that have targets, and ``check`` compares the results with the targets.
``sweep`` measures along lines of hidden sizes and of rows. ``models`` measures whole models,
``zoo`` many architectures under both compilers, ``regions`` the regions of models both ways,
``distributed`` models on several GPUs, ``rowwise`` users' functions, ``horizontal`` functions of
many slices, ``heads`` losses of a head, and ``generated`` hand-written operators and generated
ones. ``code`` counts what compiled models do, without a GPU. ``table`` and ``report`` show the
results. ``compare`` lists regressions.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fusedops.core.spec import Spec

from . import commands, comparing, generated, limits, results, sweep, targets, timing
from .cases import DTYPES, MODES, Case, cases, discover
from .code import command as generated_code
from .code import results as code_tables
from .heads import command as losses_of_heads
from .horizontal import command as functions_of_slices
from .models import command as whole_models
from .models import distributed
from .models import distributed_results as several_gpus
from .models import page as model_pages
from .providers import PROVIDERS, build, worthwhile
from .regions import command as regions_of_models
from .rowwise import command as users_functions
from .zoo import command as zoo

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_DEFAULT = _RESULTS / "nvidia_h200.csv"
_QUICK = timing.Effort(
    replay_ms=15.0, warmup_ms=5.0, blocks=3, block_ms=5.0, launch_bound_calls=200
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        limits.check(options)
    except ValueError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2
    try:
        return int(options.command(options))
    except results.UnreadableError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def _lacks_gpu() -> bool:
    """Returns whether there is no GPU, and prints an error if so."""
    if torch.cuda.is_available():
        return False
    print("benchmarks: needs a GPU; without one nothing is timed", file=sys.stderr)
    return True


def run(options: argparse.Namespace) -> int:
    """Measures, and writes each case's rows as soon as it is done."""
    if _lacks_gpu():
        return 2
    from .runner import Plan, run_case, this_machine

    started = time.perf_counter()
    name, machine = this_machine()
    path = _output(options, name)
    print(f"{machine.described(name)}; results to {path or 'the terminal only'}", flush=True)
    rows: list[results.Row] = []
    expected = 0
    for case in _cases(options):
        wanted = _wanted(case, options)
        if not wanted:
            continue
        if options.resume and path is not None and _measured(case, wanted, path, machine.commit):
            continue
        if options.budget is not None and time.perf_counter() - started > options.budget:
            print(
                f"stopped before {case}: the budget of {options.budget:.0f} s is spent; "
                "--resume goes on from here"
            )
            break
        case_started = time.perf_counter()
        print(case, flush=True)
        effort = _QUICK if options.quick else timing.Effort()
        new = run_case(case, Plan(wanted, effort, split=options.split), machine)
        expected += sum(provider == "fusedops" for _, provider in wanted)
        rows += new
        if path is not None:
            results.write(path, new)
        print(
            f"  {time.perf_counter() - case_started:.1f} s, "
            f"{time.perf_counter() - started:.0f} s in all",
            flush=True,
        )
    ours = {row.key[:-1] for row in rows if row.provider == "fusedops"}
    verdicts = targets.compare(rows)
    print(targets.report(v for v in verdicts if v.target.case in ours))
    # If fusedops failed or was wrong, its row is missing. That is an error; for a peer it is not.
    count = sum(row.provider == "fusedops" for row in rows)
    return 0 if count == expected else 1


def sweep_all(options: argparse.Namespace) -> int:
    """Measures along lines of hidden sizes, of slices, of rows and of models' widths.

    It compiles ahead on all cores.
    """
    if _lacks_gpu():
        return 2
    from .runner import measure_all, this_machine

    started = time.perf_counter()
    name, machine = this_machine()
    path = options.output or _RESULTS / f"sweep_{results.device_slug(name)}.csv"
    try:
        done = [] if options.resume is None else _rows_at(path, machine.commit, options.resume)
    except ValueError as error:
        print(f"sweep: --resume: {error}", file=sys.stderr)
        return 2
    cases = sweep.plan(
        _specs(options), options.axis or sweep.AXES, options.dtype or sweep.DEFAULT_DTYPES
    )
    work = sweep.remaining(cases, options.mode or ("fwd_bwd",), options.provider, done)
    print(f"{machine.described(name)}; {len(work)} of {len(cases)} cases to {path}", flush=True)
    deadline = started + (math.inf if options.budget is None else options.budget)
    jobs = (os.cpu_count() or 1) if options.jobs is None else options.jobs
    with results.Book(path) as book:
        count, missing = measure_all(work, machine, book, jobs=jobs, deadline=deadline)
    seconds, remaining = time.perf_counter() - started, len(work) - count
    print(
        f"{count} cases in {seconds:.0f} s, {missing} of fusedops' failed, "
        f"{remaining} left for --resume"
    )
    return 1 if missing else 0


def _rows_at(path: Path, this_commit: str, other_commits: list[str]) -> list[results.Row]:
    """Returns the file's rows at this commit and at the other commits.

    The hashes of the other commits may have more or fewer digits than those in the file.

    Raises:
        ValueError: the file has no row at one of the other commits.
    """
    rows = results.read(path)
    in_file = {row.commit for row in rows}
    commits = {this_commit}
    for other in other_commits:
        same = {commit for commit in in_file if _same_commit(commit, other)}
        if not same:
            has = ", ".join(sorted(in_file)) or "none at all"
            raise ValueError(f"{path} has no rows at commit {other!r}; it has {has}")
        commits |= same
    return [row for row in rows if row.commit in commits]


def _same_commit(one: str, other: str) -> bool:
    """Returns whether one hash is a prefix of the other, and both or neither end in ``+dirty``."""
    first, _, first_state = one.partition("+")
    second, _, second_state = other.partition("+")
    if not first or not second or first_state != second_state:
        return False
    return first.startswith(second) or second.startswith(first)


def compare(options: argparse.Namespace) -> int:
    """Compares two results files.

    Fails if fusedops became slower, or needs more memory, beyond the threshold.
    """
    try:
        comparison = comparing.compare(
            results.load(options.old), results.load(options.new), options.threshold / 100.0
        )
    except ValueError as error:
        print(f"nothing to compare: {error}", file=sys.stderr)
        return 2
    print(comparing.report(comparison, _device_of(options.old), _device_of(options.new)))
    return 1 if comparison.regressions else 0


def report(options: argparse.Namespace) -> int:
    """Writes the report and draws its pictures from the results files."""
    from . import report as reporting

    path = options.output or _DEFAULT
    try:
        options.page.write_text(reporting.markdown(path.parent, path.stem), encoding="utf-8")
        print(f"wrote {options.page}")
        if not options.text_only:
            from .drawing import draw

            for name, chart in reporting.charts(path.parent, path.stem).items():
                draw(chart, options.page.parent / name)
                print(f"wrote {options.page.parent / name}")
    except (ImportError, OSError, ValueError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    return 0


def table(options: argparse.Namespace) -> int:
    """Prints a results file as Markdown tables, or writes them into the README and other pages."""
    from . import table as tables

    path = options.output or _DEFAULT
    try:
        if options.write is None:
            print(tables.markdown(results.load(path), _device_of(path), options.mode))
            return 0
        for page in options.write or _filled_pages():
            page.write_text(filled(page, path), encoding="utf-8")
            print(f"wrote {page}")
    except (OSError, ValueError) as error:
        print(f"no table: {error}", file=sys.stderr)
        return 1
    return 0


def filled(page: Path, path: Path) -> str:
    """Returns a page's text with the tables for its markers.

    The tables are of a results file and of others in the same folder.
    """
    from . import table as tables

    def content(marker: str) -> str:
        first, *others = marker.split()
        if first == "distributed":
            return several_gpus.markdown(path.parent)
        if first == "headline":
            return model_pages.headline(path.with_name(f"models_{path.name}"))
        if first == "models":
            return model_pages.summary(path.with_name(f"models_{path.name}"))
        if first == "liger":
            return model_pages.against_liger(path.with_name(f"models_{path.name}"))
        if first == "compile":
            # The results of the device that the marker names, or else of the file's.
            name = f"{others[0] if others else path.stem}.csv"
            return model_pages.compiled(
                path.with_name(f"models_{name}"), path.with_name(f"compile_{name}")
            )
        if first == "code":
            return code_tables.markdown(path.parent)
        if first == "inference":
            return model_pages.inference(path.with_name(f"models_{path.name}"))
        operators = {first, *others}
        return tables.markdown(
            (row for row in results.load(path) if row.op in operators), _device_of(path)
        )

    return tables.fill(page.read_text(encoding="utf-8"), content)


def _filled_pages() -> list[Path]:
    """Returns the pages that have markers."""
    return [
        page
        for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
        if "<!-- figures: " in page.read_text(encoding="utf-8")
    ]


def check(options: argparse.Namespace) -> int:
    """Prints each target with its result. Fails if one is missed or has no result."""
    verdicts = targets.compare(results.load(options.output or _DEFAULT))
    print(targets.report(verdicts))
    return 0 if all(verdict.met for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "--output",
        type=Path,
        metavar="CSV",
        help="the results file (default: results/<device>.csv)",
    )
    runs = commands.add_parser("run", parents=[output], help=run.__doc__)
    runs.set_defaults(command=run)
    runs.add_argument(
        "--op", action="append", metavar="NAME", help="only this operator; may be repeated"
    )
    runs.add_argument(
        "--shape", action="append", metavar="MxN", help="only this shape; may be repeated"
    )
    runs.add_argument("--dtype", action="append", choices=sorted(DTYPES))
    runs.add_argument("--mode", action="append", choices=MODES)
    runs.add_argument("--provider", action="append", choices=list(PROVIDERS))
    runs.add_argument(
        "--quick",
        action="store_true",
        help="fusedops alone, on the shapes with targets, few replays; "
        "writes no file unless --output names one",
    )
    runs.add_argument(
        "--split",
        action="store_true",
        help="all forwards before all backwards, so that saved tensors "
        "are not in the L2; writes no file unless --output names one",
    )
    runs.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no new case after this long"
    )
    runs.add_argument(
        "--resume", action="store_true", help="skip cases that the file has at this commit"
    )
    tables = commands.add_parser("table", parents=[output], help=table.__doc__)
    tables.set_defaults(command=table)
    tables.add_argument("--mode", choices=MODES, default="fwd_bwd")
    tables.add_argument(
        "--write",
        type=Path,
        nargs="*",
        metavar="PAGE",
        help="fill these pages between their lines "
        "<!-- figures: ... --> and <!-- /figures --> instead (default: all that have them)",
    )
    _add_sweep(commands.add_parser("sweep", help=sweep_all.__doc__))
    whole_models.add_options(commands.add_parser("models", help=whole_models.run.__doc__))
    zoo.add_options(commands.add_parser("zoo", help=zoo.run.__doc__))
    regions_of_models.add_options(
        commands.add_parser("regions", help=regions_of_models.run.__doc__)
    )
    distributed.add_options(commands.add_parser("distributed", help=distributed.run.__doc__))
    generated.add_options(commands.add_parser("generated", help=generated.run.__doc__))
    users_functions.add_options(commands.add_parser("rowwise", help=users_functions.run.__doc__))
    functions_of_slices.add_options(
        commands.add_parser("horizontal", help=functions_of_slices.run.__doc__)
    )
    losses_of_heads.add_options(commands.add_parser("heads", help=losses_of_heads.run.__doc__))
    generated_code.add_options(commands.add_parser("code", help=generated_code.run.__doc__))
    compares = commands.add_parser("compare", help=compare.__doc__)
    compares.set_defaults(command=compare)
    compares.add_argument("old", type=Path)
    compares.add_argument("new", type=Path)
    compares.add_argument(
        "--threshold", type=float, default=3.0, metavar="PERCENT", help="default: 3"
    )
    reports = commands.add_parser("report", parents=[output], help=report.__doc__)
    reports.set_defaults(command=report)
    reports.add_argument(
        "--page", type=Path, default=_ROOT / "docs" / "report.md", help="default: docs/report.md"
    )
    reports.add_argument("--text-only", action="store_true", help="leave the pictures as they are")
    commands.add_parser("check", parents=[output], help=check.__doc__).set_defaults(command=check)
    return parser


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=sweep_all)
    parser.add_argument(
        "--op", action="append", metavar="NAME", help="only this operator; may be repeated"
    )
    parser.add_argument(
        "--axis", action="append", choices=sweep.AXES, help="only this axis; may be repeated"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=sorted(DTYPES),
        help=f"default: {', '.join(sweep.DEFAULT_DTYPES)}",
    )
    parser.add_argument("--mode", action="append", choices=MODES, help="default: fwd_bwd")
    parser.add_argument(
        "--provider", action="append", choices=list(PROVIDERS), help="default: all but max-autotune"
    )
    commands.add_jobs(parser)
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no new case after this long"
    )
    parser.add_argument(
        "--resume",
        nargs="*",
        metavar="COMMIT",
        help="skip what the file has at this commit, or at these commits, "
        "for example if no kernel has changed since",
    )
    parser.add_argument(
        "--output", type=Path, metavar="CSV", help="default: results/sweep_<device>.csv"
    )


def _output(options: argparse.Namespace, device: str) -> Path | None:
    """Returns the file for the rows, or None to print them only.

    Without --output, rows of --quick and --split are not written: they are less exact than those in
    the device's file, or measured in another way.
    """
    if options.output is not None:
        return Path(options.output)
    if options.quick or options.split:
        return None
    return _RESULTS / f"{results.device_slug(device)}.csv"


def _device_of(path: Path) -> str:
    """Returns a results file's device, from the file's name."""
    return path.stem.removeprefix("sweep_").replace("_", " ").upper()


def _specs(options: argparse.Namespace) -> list[Spec]:
    """Returns the specs of the named operators, or all specs."""
    specs = discover()
    for name in options.op or ():
        if name not in {spec.name for spec in specs}:
            raise SystemExit(
                f"no operator {name!r}; there are: {', '.join(spec.name for spec in specs)}"
            )
    return [spec for spec in specs if not options.op or spec.name in options.op]


def _cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases to time."""
    specs = _specs(options)
    result = list(cases(specs, options.op, options.shape, options.dtype))
    is_named = options.op or options.shape or options.dtype
    if options.quick and not is_named:
        with_target = {(t.op, t.shape, t.dtype) for t in targets.TARGETS}
        result = [case for case in result if (case.op, case.shape, case.dtype_name) in with_target]
    return result


def _wanted(case: Case, options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Returns the (mode, provider) pairs to time."""
    named = options.provider is not None
    names = options.provider if named else _default_providers(case, quick=options.quick)
    present = [name for name in names if build(name, case.spec) is not None]
    modes = [mode for mode in options.mode or MODES if mode in case.modes]
    pairs = itertools.product(modes, present)
    return tuple((mode, name) for mode, name in pairs if worthwhile(name, case, mode, named=named))


def _default_providers(case: Case, *, quick: bool) -> tuple[str, ...]:
    """Returns the providers to time if none is named."""
    if not quick:
        return tuple(PROVIDERS)
    # The target of a launch-bound case is a multiple of eager's host time.
    return ("fusedops", "eager") if case.launch_bound else ("fusedops",)


def _measured(case: Case, wanted: Sequence[tuple[str, str]], path: Path, commit: str) -> bool:
    """Returns whether the file has all wanted rows of a case at the commit."""
    keys = {row.key for row in results.read(path) if row.commit == commit}
    return all((case.op, case.shape, case.dtype_name, *pair) in keys for pair in wanted)


if __name__ == "__main__":
    sys.exit(main())
