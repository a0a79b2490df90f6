"""The shipped table, its raw timings, and the heuristic's distance from the best config."""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import math
import os
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.configs.tuning_key import BUCKETS, Config, TuningKey, family_of, fingerprint
from .sweep import Outcome

__all__ = [
    "RAW_COLUMNS",
    "Table",
    "code",
    "commit",
    "compare",
    "mark",
    "raw_rows",
    "read_raw",
    "summary",
    "write_raw",
]

_CONFIG = tuple(field.name for field in fields(Config))
RAW_COLUMNS = (
    "kernel",
    "group",
    "cols",
    "bucket",
    "M",
    "workload",
    *_CONFIG,
    "regs",
    "spills",
    "us",
    "dropped",
    "heuristic",
    "best",
)


@cache
def _sources(family: str) -> str:
    """Return a digest of the code of a family's kernels."""
    package = Path(str(resources.files("fusedops")))
    files = sorted([*package.glob(f"{family}/kernels.py"), *package.glob(f"{family}/kernels/*.py")])
    # The kernels call device functions that all families share.
    files.append(package / "core" / "device.py")
    texts = [code(file.read_text("utf-8")) for file in files]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def code(source: str) -> str:
    """Return the syntax tree of a source as text, equal in all versions of Python.

    Comments, docstrings and layout do not change it.
    """
    return _tree(ast.parse(source))


def _tree(node: Any) -> str:
    """Return text for a syntax tree, a list of trees, or a value in a tree."""
    if isinstance(node, list):
        items = [_tree(item) for item in node if not _is_docstring(item)]
        return f"[{','.join(items)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        # Which empty fields a node has depends on the version of Python.
        if value is not None and value != []:
            fields.append(f"{name}={_tree(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: Any) -> bool:
    """Return whether the node is a statement that consists of a string."""
    # A string alone has no effect, at the beginning of a body or elsewhere.
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def mark(key: TuningKey) -> str:
    """Return a digest of an entry's candidates and of its kernels' code."""
    # A family is a module such as fusedops.norms.configs, whose package has the kernels.
    module = str(getattr(family_of(key.kernel), "__name__", ""))
    package = module.split(".")[-2]
    return hashlib.sha256(f"{fingerprint(key)} {_sources(package)}".encode()).hexdigest()[:8]


class Table:
    """A shipped table while it is being measured.

    In the file, each kernel has rows of configs by bucket, with a mark of the code they were
    measured with:

        "configs": {kernel: {"group|columns": [bucket 0, bucket 1, ..., mark]}}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.about: dict[str, Any] = {
            name: value for name, value in content.items() if name not in ("configs", "summary")
        }
        self.summary: dict[str, Any] = content.get("summary", {})
        self._rows: dict[str, dict[str, list[Any]]] = content.get("configs", {})

    def __contains__(self, key: TuningKey) -> bool:
        """Return whether the table has a config for the key, measured with the current sources."""
        row = self._rows.get(key.kernel, {}).get(_row_name(key), [])
        return _is_current(row, key) and row[key.bucket] is not None

    def put(self, key: TuningKey, config: Config) -> None:
        """Store a key's config.

        Configs of its row that were measured with other kernels or candidates are dropped.
        """
        rows, name = self._rows.setdefault(key.kernel, {}), _row_name(key)
        row = rows.get(name, [])
        if not _is_current(row, key):
            # A row has one mark, so all its configs must have been measured with the current code.
            row = rows[name] = [None] * len(BUCKETS) + [mark(key)]
        row[key.bucket] = list(astuple(config))

    def save(self) -> None:
        """Write the table atomically."""
        # A rename within a directory is atomic; each process has a temporary file of its own.
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        scratch.write_text("\n".join(self._lines()) + "\n", encoding="utf-8")
        scratch.replace(self.path)

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the file, with one line for each row, so that diffs are readable."""
        yield "{"
        about = {**self.about, "fields": list(_CONFIG), "summary": self.summary}
        for name, value in about.items():
            yield f" {json.dumps(name)}: {json.dumps(value)},"
        yield ' "configs": {'
        for kernel in sorted(self._rows):
            # JSON has no comma after the last element.
            last = "" if kernel == max(self._rows) else ","
            yield f"  {json.dumps(kernel)}: {{"
            names = sorted(self._rows[kernel], key=_order)
            for name in names:
                row = json.dumps(self._rows[kernel][name], separators=(",", ":"))
                yield f"   {json.dumps(name)}: {row}" + ("" if name == names[-1] else ",")
            yield f"  }}{last}"
        yield " }"
        yield "}"


def _is_current(row: list[Any], key: TuningKey) -> bool:
    """Return whether a row has the mark of the current kernels and candidates.

    Rows in old files have no mark.
    """
    return len(row) > len(BUCKETS) and row[-1] == mark(key)


def _row_name(key: TuningKey) -> str:
    return f"{key.group}|{key.cols}"


def _order(row_name: str) -> tuple[str, int]:
    """Return the sort key of a row: its group, then its columns as a number."""
    group, _, columns = row_name.rpartition("|")
    return group, int(columns)


# --- raw timings ----------------------------------------------------------------------------------


def raw_rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield one row per candidate."""
    key = outcome.key
    for candidate in outcome.measured:
        yield {
            "kernel": key.kernel,
            "group": key.group,
            "cols": key.cols,
            "bucket": key.bucket,
            "M": outcome.workload.rows,
            "workload": str(outcome.workload),
            **{name: getattr(candidate.config, name) for name in _CONFIG},
            "regs": candidate.registers,
            "spills": candidate.spills,
            "us": "" if math.isinf(candidate.us) else f"{candidate.us:.3f}",
            "dropped": candidate.dropped,
            "heuristic": int(candidate.config == outcome.heuristic),
            "best": int(candidate.config == outcome.best),
        }


def write_raw(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file, with a header if it is new."""
    with path.open("a+b") as binary:
        is_new = binary.tell() == 0
        # The last line is incomplete if the process that wrote it was killed.
        binary.seek(0 if is_new else -1, os.SEEK_END)
        is_incomplete = binary.read() not in (b"", b"\n")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, RAW_COLUMNS)
        if is_new:
            writer.writeheader()
        if is_incomplete:
            file.write("\r\n")
        writer.writerows(rows)


@dataclass(frozen=True)
class _Distance:
    """The heuristic's time divided by the best measured time, by key."""

    ratios: dict[str, float]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def worst(self) -> str:
        """The key with the largest ratio."""
        return max(self.ratios, key=self.ratios.__getitem__)


def read_raw(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Incomplete rows are left out with a warning.

    Raises:
        ValueError: the file was not written by `write_raw`.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != RAW_COLUMNS:
            raise ValueError(f"its columns are not {', '.join(RAW_COLUMNS)}")
        rows = []
        for row in reader:
            if _is_complete(row):
                rows.append(row)
                continue
            warnings.warn(
                f"fusedops: line {reader.line_num} of {path} is not complete and is left out",
                RuntimeWarning,
                stacklevel=2,
            )
        return rows


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the heuristic's distance from the best time in raw timings, by kernel and over all."""
    ratios: dict[str, dict[str, float]] = {}
    for key, (times, best) in _timings(rows).items():
        family = family_of(key.kernel)
        # The current heuristic's config may not have been among the candidates of the sweep.
        heuristic = None if family is None else times.get(family.heuristic(key))
        if heuristic is not None:
            for kernel in (key.kernel, "all"):
                ratios.setdefault(kernel, {})[str(key)] = heuristic / times[best]
    result: dict[str, dict[str, Any]] = {}
    for kernel in sorted(ratios):
        distance = _Distance(ratios[kernel])
        result[kernel] = {
            "keys": len(distance.ratios),
            "geometric_mean": round(distance.mean, 4),
            "worst": round(distance.ratios[distance.worst], 3),
            "worst_at": distance.worst,
        }
    return result


def compare(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the `summary` as lines of text."""
    lines = [f"{'kernel':<22}{'keys':>10}{'geometric mean':>16}{'worst':>8}  at"]
    for kernel, row in summary(rows).items():
        lines.append(
            f"{kernel:<22}{row['keys']:>10}{row['geometric_mean']:>16.3f}{row['worst']:>8.2f}  "
            f"{row['worst_at']}"
        )
    return "\n".join(lines)


def _timings(
    rows: Iterable[Mapping[str, Any]],
) -> dict[TuningKey, tuple[dict[Config, float], Config]]:
    """Return the times of each key's configs, and its best config.

    If a config was measured repeatedly, its time is the last one.
    """
    timings: dict[TuningKey, tuple[dict[Config, float], Config]] = {}
    for row in rows:
        key, config, us, is_best = _timing(row)
        if math.isinf(us):
            continue
        times, best = timings.get(key, ({}, config))
        # A sweep that was resumed may have measured a config again.
        times[config] = us
        timings[key] = (times, config if is_best else best)
    return timings


def _timing(row: Mapping[str, Any]) -> tuple[TuningKey, Config, float, bool]:
    """Return a row's key, its config, the time, and whether the config was the best."""
    # The inverse of `TuningKey.group`.
    *variant, widths = row["group"].split("|")
    key = TuningKey(row["kernel"], tuple(variant), widths, int(row["cols"]), int(row["bucket"]))
    config = Config(*(int(row[name]) for name in _CONFIG))
    # A candidate that was dropped has no time.
    return key, config, float(row["us"] or "inf"), bool(int(row["best"]))


def _is_complete(row: Mapping[Any, Any]) -> bool:
    """Return whether a row has all fields and no others."""
    try:
        _timing(row)
    except (AttributeError, TypeError, ValueError):
        return False
    # `csv` puts additional fields under the key None.
    return None not in row


def commit() -> str:
    """Return the short hash of the commit, with ``+dirty`` after changes; empty outside a clone.

    ``FUSEDOPS_COMMIT`` overrides it, for a copy of the tree without its history.
    """
    if "FUSEDOPS_COMMIT" in os.environ:
        return os.environ["FUSEDOPS_COMMIT"]
    root = Path(str(resources.files("fusedops"))).parent
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty=+dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return process.stdout.strip()
