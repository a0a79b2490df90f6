"""``python -m benchmarks run`` measures, ``plot`` draws, ``table`` tabulates, ``check`` compares with the goals."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import results, targets, timing
from .cases import DTYPES, MODES, Case, cases, discover
from .providers import PROVIDERS, build, worthwhile

_RESULTS = Path(__file__).resolve().parent / "results"
_DEFAULT = _RESULTS / "nvidia_h200.csv"
_QUICK = timing.Effort(replay_ms=15.0, warmup_ms=5.0, blocks=3, block_ms=5.0, launch_bound_calls=200)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return int(options.command(options))


def run(options: argparse.Namespace) -> int:
    """Measures, and writes each case's rows as soon as it is done."""
    if not torch.cuda.is_available():
        print("benchmarks: needs a GPU; without one nothing is timed", file=sys.stderr)
        return 2
    import triton

    from .runner import Machine, Plan, run_case

    started = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    path = _output(options, properties.name)
    bandwidth = timing.copy_bandwidth(device)
    torch.cuda.empty_cache()
    machine = Machine(
        device, properties.L2_cache_size, bandwidth, results.commit(), torch.__version__, triton.__version__
    )
    print(
        f"{properties.name}, torch {machine.torch}, Triton {machine.triton}, commit {machine.commit}: copies at "
        f"{bandwidth / 1e12:.3f} TB/s, L2 {machine.l2_bytes / 2**20:.0f} MiB; results to {path or 'the terminal only'}",
        flush=True,
    )
    rows: list[results.Row] = []
    expected = 0
    for case in _cases(options):
        wanted = _wanted(case, options)
        if not wanted or (options.resume and path is not None and _measured(case, wanted, path, machine.commit)):
            continue
        if options.budget is not None and time.perf_counter() - started > options.budget:
            print(f"stopped before {case}: the budget of {options.budget:.0f} s is spent; --resume goes on from here")
            break
        begun = time.perf_counter()
        print(case, flush=True)
        effort = _QUICK if options.quick else timing.Effort()
        new = run_case(case, Plan(wanted, effort, options.split), machine)
        expected += sum(provider == "fusedops" for _, provider in wanted)
        rows += new
        if path is not None:
            results.write(path, new)
        print(f"  {time.perf_counter() - begun:.1f} s, {time.perf_counter() - started:.0f} s in all", flush=True)
    seen = {row.key for row in rows}
    print(targets.report(v for v in targets.compare(rows) if (*_place(v.target), "fusedops") in seen))
    if path is not None and rows:
        _draw(path, properties.name)
    # What we failed to time, or refused to, is our fault; a peer's is not.
    return 0 if sum(row.provider == "fusedops" for row in rows) == expected else 1


def plot(options: argparse.Namespace) -> int:
    """Draws a results file."""
    path = options.output or _DEFAULT
    return _draw(path, _device_of(path))


def table(options: argparse.Namespace) -> int:
    """Prints a results file as Markdown tables, or puts them between a page's two markers."""
    from . import table as tables

    path = options.output or _DEFAULT
    try:
        text = tables.markdown(results.read(path), _device_of(path), options.mode)
        if options.write is None:
            print(text)
        else:
            tables.fill(options.write, text)
            print(f"wrote {options.write}")
    except (OSError, ValueError) as error:
        print(f"no table: {error}", file=sys.stderr)
        return 1
    return 0


def check(options: argparse.Namespace) -> int:
    """Prints each figure asked beside what was seen; fails if one is missed or absent."""
    verdicts = targets.compare(results.read(options.output or _DEFAULT))
    print(targets.report(verdicts))
    return 0 if all(verdict.met for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output", type=Path, metavar="CSV", help="the results file (default: results/<device>.csv)")
    runs = commands.add_parser("run", parents=[output], help=run.__doc__)
    runs.set_defaults(command=run)
    runs.add_argument("--op", action="append", metavar="NAME", help="only this operator; may be repeated")
    runs.add_argument("--shape", action="append", metavar="MxN", help="only this shape; may be repeated")
    runs.add_argument("--dtype", action="append", choices=sorted(DTYPES))
    runs.add_argument("--mode", action="append", choices=MODES)
    runs.add_argument("--provider", action="append", choices=list(PROVIDERS))
    runs.add_argument("--quick", action="store_true", help="fusedops alone, where a figure is asked, few replays; "
                      "writes no file unless --output names one")  # fmt: skip
    runs.add_argument("--split", action="store_true", help="all forwards before all backwards, so that what a forward "
                      "kept has left the L2; writes no file unless --output names one")  # fmt: skip
    runs.add_argument("--budget", type=float, metavar="SECONDS", help="start no new case after this long")
    runs.add_argument("--resume", action="store_true", help="skip cases that the file has at this commit")
    tables = commands.add_parser("table", parents=[output], help=table.__doc__)
    tables.set_defaults(command=table)
    tables.add_argument("--mode", choices=MODES, default="fwd_bwd")
    tables.add_argument("--write", type=Path, metavar="PAGE", help="fill the page between <!-- figures --> and "
                        "<!-- /figures --> instead of printing")  # fmt: skip
    for name, command in (("plot", plot), ("check", check)):
        commands.add_parser(name, parents=[output], help=command.__doc__).set_defaults(command=command)
    return parser


def _output(options: argparse.Namespace, device: str) -> Path | None:
    """Where the rows go; less exact or differently taken ones stay out of the device's file unless asked."""
    if options.output is not None:
        return Path(options.output)
    return None if options.quick or options.split else _RESULTS / f"{results.device_slug(device)}.csv"


def _device_of(path: Path) -> str:
    """A results file's device, from its name."""
    return path.stem.replace("_", " ").upper()


def _cases(options: argparse.Namespace) -> list[Case]:
    specs = discover()
    for name in options.op or ():
        if name not in {spec.name for spec in specs}:
            raise SystemExit(f"no operator {name!r}; there are: {', '.join(spec.name for spec in specs)}")
    found = list(cases(specs, options.op, options.shape, options.dtype))
    if options.quick and not (options.op or options.shape or options.dtype):
        asked = {(t.op, t.shape, t.dtype) for t in targets.TARGETS}
        found = [case for case in found if (case.op, case.shape, case.dtype_name) in asked]
    return found


def _wanted(case: Case, options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The (mode, provider) pairs to time."""
    names = options.provider
    if names is None:
        # The loop's figure is a ratio to eager, so that a quick run needs eager where it is asked.
        names = [n for n in PROVIDERS if not options.quick or n == "fusedops" or (n == "eager" and case.launch_bound)]
    named = options.provider is not None
    present = [name for name in names if build(name, case.spec) is not None]
    modes = [mode for mode in options.mode or MODES if mode in case.modes]
    return tuple((m, n) for m in modes for n in present if worthwhile(n, case, m, named=named))


def _measured(case: Case, wanted: Sequence[tuple[str, str]], path: Path, commit: str) -> bool:
    here = {row.key for row in results.read(path) if row.commit == commit}
    return all((case.op, case.shape, case.dtype_name, *pair) in here for pair in wanted)


def _place(target: targets.Target) -> tuple[str, str, str, str]:
    return (target.op, target.shape, target.dtype, target.mode)


def _draw(path: Path, device: str) -> int:
    from . import plot as plotting

    try:
        plotting.draw(results.read(path), path.with_suffix(".png"), device)
    except (ImportError, ValueError) as error:
        print(f"no plot: {error}", file=sys.stderr)
        return 1
    print(f"wrote {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
