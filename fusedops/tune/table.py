"""The shipped table, its raw timings, and the heuristic's distance from the best config."""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.tuning_key import BUCKETS, Config, TuningKey, family_of, fingerprint
from .sweep import Outcome

__all__ = ["RAW_COLUMNS", "Table", "code", "commit", "compare", "mark", "raw_rows", "read_raw", "summary", "write_raw"]

_CONFIG = tuple(field.name for field in fields(Config))
RAW_COLUMNS = ("kernel", "group", "cols", "bucket", "M", "workload", *_CONFIG, "regs", "spills", "us", "dropped",
               "heuristic", "best")  # fmt: skip


@cache
def _sources(family: str) -> str:
    """A digest of a family's kernels."""
    package = resources.files("fusedops")
    texts = [(package / folder / name).read_text("utf-8") for folder, name in ((family, "kernels.py"),
                                                                               ("core", "device.py"))]  # fmt: skip
    return hashlib.sha256("".join(map(code, texts)).encode()).hexdigest()


def code(source: str) -> str:
    """The syntax tree of a source as text: without comments, docstrings and layout, and equal in all versions of Python."""
    return _tree(ast.parse(source))


def _tree(node: Any) -> str:
    if isinstance(node, list):
        return f"[{','.join(_tree(item) for item in node if not _is_docstring(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # Which empty fields a node has depends on the version of Python.
    known = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(f'{name}={_tree(value)}' for name, value in known)})"


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def mark(key: TuningKey) -> str:
    """A digest of an entry's candidates and of its kernels' code."""
    module = str(getattr(family_of(key.kernel), "__name__", "")).split(".")[-2]
    return hashlib.sha256(f"{fingerprint(key)} {_sources(module)}".encode()).hexdigest()[:8]


class Table:
    """A shipped table while it is being measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.about: dict[str, Any] = {
            name: value for name, value in content.items() if name not in ("configs", "summary")
        }
        self.summary: dict[str, Any] = content.get("summary", {})
        self._rows: dict[str, dict[str, list[Any]]] = content.get("configs", {})

    def __contains__(self, key: TuningKey) -> bool:
        """Whether the table has a config for the key, measured with today's kernels and candidates."""
        row = self._rows.get(key.kernel, {}).get(_row_name(key), [])
        return len(row) > len(BUCKETS) and row[-1] == mark(key) and row[key.bucket] is not None

    def put(self, key: TuningKey, config: Config) -> None:
        """Stores a key's config; drops configs of its row that were measured with other kernels or candidates."""
        rows, name = self._rows.setdefault(key.kernel, {}), _row_name(key)
        row = rows.get(name, [])
        if len(row) <= len(BUCKETS) or row[-1] != mark(key):
            row = rows[name] = [None] * len(BUCKETS) + [mark(key)]
        row[key.bucket] = list(astuple(config))

    def save(self) -> None:
        """Writes the table atomically."""
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        scratch.write_text("\n".join(self._lines()) + "\n", encoding="utf-8")
        scratch.replace(self.path)

    def _lines(self) -> Iterator[str]:
        yield "{"
        about = {**self.about, "fields": list(_CONFIG), "summary": self.summary}
        for name, value in about.items():
            yield f" {json.dumps(name)}: {json.dumps(value)},"
        yield ' "configs": {'
        for kernel in sorted(self._rows):
            last = "" if kernel == max(self._rows) else ","
            yield f"  {json.dumps(kernel)}: {{"
            names = sorted(self._rows[kernel], key=lambda name: (name.rpartition("|")[0], int(name.rpartition("|")[2])))
            for name in names:
                row = json.dumps(self._rows[kernel][name], separators=(",", ":"))
                yield f"   {json.dumps(name)}: {row}" + ("" if name == names[-1] else ",")
            yield f"  }}{last}"
        yield " }"
        yield "}"


def _row_name(key: TuningKey) -> str:
    return f"{key.group}|{key.cols}"


# --- raw timings --------------------------------------------------------------------------------------------------


def raw_rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """One row per candidate."""
    key = outcome.key
    for one in outcome.measured:
        yield {
            "kernel": key.kernel,
            "group": key.group,
            "cols": key.cols,
            "bucket": key.bucket,
            "M": outcome.workload.rows,
            "workload": str(outcome.workload),
            **{name: getattr(one.config, name) for name in _CONFIG},
            "regs": one.registers,
            "spills": one.spills,
            "us": "" if math.isinf(one.us) else f"{one.us:.3f}",
            "dropped": one.dropped,
            "heuristic": int(one.config == outcome.heuristic),
            "best": int(one.config == outcome.best),
        }


def write_raw(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows; a new file gets a header."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, RAW_COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


@dataclass(frozen=True)
class _Distance:
    """The heuristic's time over the best measured time, by key."""

    ratios: dict[str, float]

    @property
    def mean(self) -> float:
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def worst(self) -> str:
        return max(self.ratios, key=lambda name: self.ratios[name])


def read_raw(path: Path) -> list[dict[str, Any]]:
    """The rows of a file.

    Raises:
        ValueError: it was not written by `write_raw`.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != RAW_COLUMNS:
            raise ValueError(f"its columns are not {', '.join(RAW_COLUMNS)}")
        return list(reader)


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The heuristic's distance from the best of raw timings, by kernel and over all."""
    found: dict[str, dict[str, float]] = {}
    for key, (times, best) in _timings(rows).items():
        family = family_of(key.kernel)
        heuristic = None if family is None else times.get(family.heuristic(key))
        if heuristic is not None:
            for kernel in (key.kernel, "all"):
                found.setdefault(kernel, {})[str(key)] = heuristic / times[best]
    distances = {kernel: _Distance(ratios) for kernel, ratios in sorted(found.items())}
    return {
        kernel: {"keys": len(d.ratios), "geometric_mean": round(d.mean, 4), "worst": round(d.ratios[d.worst], 3),
                 "worst_at": d.worst}
        for kernel, d in distances.items()
    }  # fmt: skip


def compare(rows: Iterable[Mapping[str, Any]]) -> str:
    """`summary` as lines."""
    lines = [f"{'kernel':<22}{'keys':>10}{'geometric mean':>16}{'worst':>8}  at"]
    for kernel, row in summary(rows).items():
        lines.append(f"{kernel:<22}{row['keys']:>10}{row['geometric_mean']:>16.3f}{row['worst']:>8.2f}  "
                     f"{row['worst_at']}")  # fmt: skip
    return "\n".join(lines)


def _timings(rows: Iterable[Mapping[str, Any]]) -> dict[TuningKey, tuple[dict[Config, float], Config]]:
    """The times of each key and its best config; of repeated measurements, the last."""
    found: dict[TuningKey, tuple[dict[Config, float], Config]] = {}
    for row in rows:
        if not row["us"]:
            continue
        *variant, widths = row["group"].split("|")
        key = TuningKey(row["kernel"], tuple(variant), widths, int(row["cols"]), int(row["bucket"]))
        config = Config(*(int(row[name]) for name in _CONFIG))
        times, best = found.get(key, ({}, config))
        times[config] = float(row["us"])
        found[key] = (times, config if int(row["best"]) else best)
    return found


def commit() -> str:
    """The short hash of the sources, with ``+dirty`` if the tree differs; empty outside a clone.

    ``FUSEDOPS_COMMIT`` overrides it, for a copy of the tree without its history.
    """
    if "FUSEDOPS_COMMIT" in os.environ:
        return os.environ["FUSEDOPS_COMMIT"]
    root = Path(str(resources.files("fusedops"))).parent
    try:
        shown = subprocess.run(["git", "describe", "--always", "--dirty=+dirty", "--exclude=*"], cwd=root,
                               capture_output=True, text=True, check=True)  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return shown.stdout.strip()
