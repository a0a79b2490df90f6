"""The table that the package ships, the raw timings behind it, and how far the heuristic alone is from it."""

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

from ..core.question import BUCKETS, Config, Question, family_of, fingerprint
from .sweep import Outcome

__all__ = ["RAW_COLUMNS", "Table", "code", "commit", "compare", "mark", "raw_rows", "read_raw", "summary", "write_raw"]

_CONFIG = tuple(field.name for field in fields(Config))
RAW_COLUMNS = ("kernel", "group", "cols", "bucket", "M", "workload", *_CONFIG, "regs", "spills", "us", "dropped",
               "heuristic", "best")  # fmt: skip


@cache
def _sources(family: str) -> str:
    """A digest of the kernels that a family launches."""
    package = resources.files("fusedops")
    texts = [(package / folder / name).read_text("utf-8") for folder, name in ((family, "kernels.py"),
                                                                               ("core", "device.py"))]  # fmt: skip
    return hashlib.sha256("".join(map(code, texts)).encode()).hexdigest()


def code(source: str) -> str:
    """What a source does, without comments, docstrings and layout; the same text from every Python that reads it."""
    return _tree(ast.parse(source))


def _tree(node: Any) -> str:
    if isinstance(node, list):
        return f"[{','.join(_tree(item) for item in node if not _is_docstring(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # Pythons differ in which empty fields a node has.
    known = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(f'{name}={_tree(value)}' for name, value in known)})"


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def mark(question: Question) -> str:
    """What an entry was measured with: the configs there were to choose from, and the kernels' code."""
    module = str(getattr(family_of(question.kernel), "__name__", "")).split(".")[-2]
    return hashlib.sha256(f"{fingerprint(question)} {_sources(module)}".encode()).hexdigest()[:8]


class Table:
    """A shipped table on its way: what is there, and what is measured anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.about: dict[str, Any] = {
            name: value for name, value in content.items() if name not in ("configs", "summary")
        }
        self.summary: dict[str, Any] = content.get("summary", {})
        self._rows: dict[str, dict[str, list[Any]]] = content.get("configs", {})

    def __contains__(self, question: Question) -> bool:
        """Whether the question is answered, by the kernels and from the configs of today."""
        row = self._rows.get(question.kernel, {}).get(_key(question), [])
        return len(row) > len(BUCKETS) and row[-1] == mark(question) and row[question.bucket] is not None

    def put(self, question: Question, config: Config) -> None:
        """An answer; others of its row that were measured with something else are dropped."""
        rows, key = self._rows.setdefault(question.kernel, {}), _key(question)
        row = rows.get(key, [])
        if len(row) <= len(BUCKETS) or row[-1] != mark(question):
            row = rows[key] = [None] * len(BUCKETS) + [mark(question)]
        row[question.bucket] = list(astuple(config))

    def save(self) -> None:
        """Writes it, whole or not at all."""
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
            keys = sorted(self._rows[kernel], key=lambda key: (key.rpartition("|")[0], int(key.rpartition("|")[2])))
            for key in keys:
                row = json.dumps(self._rows[kernel][key], separators=(",", ":"))
                yield f"   {json.dumps(key)}: {row}" + ("" if key == keys[-1] else ",")
            yield f"  }}{last}"
        yield " }"
        yield "}"


def _key(question: Question) -> str:
    return f"{question.group}|{question.cols}"


# --- raw timings --------------------------------------------------------------------------------------------------


def raw_rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """One row a candidate."""
    question = outcome.question
    for one in outcome.measured:
        yield {
            "kernel": question.kernel,
            "group": question.group,
            "cols": question.cols,
            "bucket": question.bucket,
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
    """Appends rows; a new file begins with the columns' names."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, RAW_COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


@dataclass(frozen=True)
class _Distance:
    """How much longer the heuristic's config takes than the best that was measured, by question."""

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
    """By kernel, and over all, how far today's heuristic is from the best of raw timings."""
    found: dict[str, dict[str, float]] = {}
    for question, (times, best) in _timings(rows).items():
        family = family_of(question.kernel)
        heuristic = None if family is None else times.get(family.heuristic(question))
        if heuristic is not None:
            for kernel in (question.kernel, "all"):
                found.setdefault(kernel, {})[str(question)] = heuristic / times[best]
    distances = {kernel: _Distance(ratios) for kernel, ratios in sorted(found.items())}
    return {
        kernel: {"questions": len(d.ratios), "geometric_mean": round(d.mean, 4), "worst": round(d.ratios[d.worst], 3),
                 "worst_at": d.worst}
        for kernel, d in distances.items()
    }  # fmt: skip


def compare(rows: Iterable[Mapping[str, Any]]) -> str:
    """`summary` as lines."""
    lines = [f"{'kernel':<22}{'questions':>10}{'geometric mean':>16}{'worst':>8}  at"]
    for kernel, seen in summary(rows).items():
        lines.append(f"{kernel:<22}{seen['questions']:>10}{seen['geometric_mean']:>16.3f}{seen['worst']:>8.2f}  "
                     f"{seen['worst_at']}")  # fmt: skip
    return "\n".join(lines)


def _timings(rows: Iterable[Mapping[str, Any]]) -> dict[Question, tuple[dict[Config, float], Config]]:
    """The times of each question, and its answer; where one was measured again, what came last."""
    found: dict[Question, tuple[dict[Config, float], Config]] = {}
    for row in rows:
        if not row["us"]:
            continue
        *variant, widths = row["group"].split("|")
        question = Question(row["kernel"], tuple(variant), widths, int(row["cols"]), int(row["bucket"]))
        config = Config(*(int(row[name]) for name in _CONFIG))
        times, best = found.get(question, ({}, config))
        times[config] = float(row["us"])
        found[question] = (times, config if int(row["best"]) else best)
    return found


def commit() -> str:
    """The short hash of the sources, with ``+dirty`` where the tree differs; empty outside a clone.

    ``FUSEDOPS_COMMIT`` overrides it: a tree that was copied to the machine with the GPU has no history there.
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
