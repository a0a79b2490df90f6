"""Counts how many classes of the installed Transformers `fusedops.fuse_model` fuses.

``python tests/harness/model_coverage.py`` counts classes, not modules. It takes the norms,
feed-forward parts and layers of all `transformers.models.*.modeling_*`, recognised by their names
(`KINDS`). A class counts as fused if a module of it is fused, by a rule for the class or with the
block around it. This module is part of one of the small models of `architectures`, or else it is
built from a small configuration of its family. A class that cannot be built counts as not fused.

The command prints the numbers of fused classes by kind, and the numbers of fused modules in twenty
models. ``--write`` writes the result to ``coverage/transformers_VERSION.csv``; ``--check`` fails if
a class that is fused in this file is not fused now.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import inspect
import os
import pkgutil
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # some configurations load another from the hub

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import architectures
import fusedops
from architectures.tiny import tiny_config
from fusedops.models import ModuleReport

FOLDER = Path(__file__).with_name("coverage")

# For each kind a pattern of class names. The first kind that matches counts.
KINDS = {
    "RMSNorm": re.compile(r"RMSNorm"),
    "other norm": re.compile(r"(Layer|Group|Batch)?Norm(2d|alization|Gated)?$|LayerNorm"),
    "MLP": re.compile(
        r"MLP|Mlp|FeedForward|FFN|FFNLayer|Intermediate|DenseAct|DenseGatedAct|LayerFF$"
    ),
    "layer": re.compile(r"(Layer|Block)$"),
}
TWENTY = (
    "bert",
    "roberta",
    "distilbert",
    "gpt2",
    "t5",
    "vit",
    "clip",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "bart",
    "whisper",
    "opt",
    "mixtral",
    "deberta-v2",
)
# The reason of a class that cannot be built, and the rule of a class that is fused with its block.
NOT_BUILT, BY_BLOCK = "not built", "by its block"
# The most time for building or examining one model.
_SECONDS = 10


@dataclass
class Coverage:
    """The rules that fuse a class, or the reasons why it is left.

    Attributes:
        name: the name with the family, as in ``llama.LlamaMLP``.
        kind: one of `KINDS`.
        rules: the rules by which its modules are fused.
        reasons: the reasons why modules were left.
    """

    name: str
    kind: str
    rules: Counter[str]
    reasons: Counter[str]

    @property
    def rule(self) -> str:
        return " ".join(sorted(self.rules))

    @property
    def reason(self) -> str:
        """The commonest reason if the class is not fused, else an empty text."""
        if self.rules:
            return ""
        return self.reasons.most_common(1)[0][0] if self.reasons else NOT_BUILT

    def add(self, line: ModuleReport) -> None:
        """Counts the report on one module of the class."""
        if line.rule:
            self.rules[line.rule] += 1
        elif line.by is not None:
            self.rules[BY_BLOCK] += 1
        else:
            self.reasons[line.reason] += 1


def kind_of(cls: type) -> str | None:
    """Returns the kind of a class, or None.

    A layer or feed-forward part that inherits its forward has none, because its base class counts.
    """
    kind = _kind_of_name(cls.__name__)
    if kind in ("MLP", "layer") and "forward" not in vars(cls):
        return None
    return kind


def _kind_of_name(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)


def classes() -> dict[type, Coverage]:
    """All classes of these kinds, with empty coverages."""
    results: dict[type, Coverage] = {}
    for family in pkgutil.iter_modules(transformers.models.__path__):
        package = importlib.import_module(f"transformers.models.{family.name}")
        for file in pkgutil.iter_modules(getattr(package, "__path__", [])):
            if not file.name.startswith("modeling_") or file.name.startswith(
                ("modeling_tf_", "modeling_flax_")
            ):
                continue
            try:
                module = importlib.import_module(f"{package.__name__}.{file.name}")
            except ImportError as error:
                print(f"{family.name}.{file.name} cannot be imported: {error}", file=sys.stderr)
                continue
            for cls in vars(module).values():
                if not isinstance(cls, type) or not issubclass(cls, nn.Module):
                    continue
                kind = kind_of(cls)
                if kind is not None and cls.__module__ == module.__name__:
                    name = f"{family.name}.{cls.__name__}"
                    results[cls] = Coverage(name, kind, Counter(), Counter())
    return results


def examine(model: nn.Module, coverages: dict[type, Coverage]) -> tuple[ModuleReport, ...]:
    """Adds the reports on the modules of a model to the coverages of their classes."""
    lines = fusedops.fuse_model(model, dry_run=True).modules
    for line, module in zip(lines, dict(model.named_modules()).values(), strict=True):
        if type(module) in coverages:
            coverages[type(module)].add(line)
    return lines


def examine_models(coverages: dict[type, Coverage]) -> dict[str, tuple[ModuleReport, ...]]:
    """Examines all model types that can be built; returns the reports on the twenty."""
    reports = {}
    for name in architectures.transformers_types():
        with tolerated():
            lines = examine(architectures.make(name).build(), coverages)
            if name in TWENTY:
                reports[name] = lines
    return reports


def examine_other_classes(coverages: dict[type, Coverage]) -> None:
    """Examines classes that no model contains, built from their families' configurations."""
    configs = _configs()
    for cls, coverage in coverages.items():
        if coverage.rules or coverage.reasons:
            continue
        for arguments in _arguments(cls, configs[_family_of(cls)]):
            with tolerated():
                examine(cls(**arguments), coverages)
            if coverage.rules:
                break


def _family_of(cls: type) -> str:
    """The package of a class: ``transformers.models.llama`` for those of Llama."""
    return cls.__module__.rpartition(".")[0]


def _configs() -> dict[str, list[Any]]:
    """Small configurations by family, also those that other configurations contain."""
    result: dict[str, list[Any]] = defaultdict(list)

    def collect(config: Any) -> None:
        of_family = result[_family_of(type(config))]
        if not any(type(other) is type(config) for other in of_family):
            of_family.append(config)
        for inner in vars(config).values():
            if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
                collect(inner)

    for name in CONFIG_MAPPING:
        with tolerated():
            collect(tiny_config(name, CONFIG_MAPPING[name]))
    return result


def _arguments(cls: type, configs: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields possible arguments of a class: a configuration, the index of the layer, sizes."""
    parameters = [
        p
        for p in list(inspect.signature(cls.__init__).parameters.values())[1:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    for config in configs or [None]:
        inputs = {p.name: _value(p.name, config) for p in parameters if p.default is p.empty}
        yield inputs
        if any(p.name == "layer_idx" for p in parameters):
            yield {**inputs, "layer_idx": 1}
            yield {**inputs, "layer_idx": 0}
        if any(p.name == "intermediate_size" for p in parameters):
            yield {**inputs, "intermediate_size": 64}


# Values for required arguments. The first pattern that occurs in an argument's name decides.
_VALUES: list[tuple[str, Any]] = [
    (r"idx|index|layer_id|layer_number|depth|^i$", 0),
    (r"kernel", 3),
    (r"stride|dilation|groups", 1),
    (r"head", 4),
    (r"act", "gelu"),
    (r"eps", 1e-6),
    (r"drop|rate|prob", 0.0),
    (r"intermediate|hidden_(dim|features)|mlp_dim|inner", 64),
    (r"layers", 2),
    (r"bias|^is_|^has_|^use_|^add_|norm", True),
    (r"", 32),
]


def _value(name: str, config: Any) -> Any:
    """A value for an argument: the configuration, its field of this name, or one of `_VALUES`."""
    if "config" in name:
        return config
    field = vars(config).get(name) if config is not None else None
    if isinstance(field, (int, float, str)):
        return field
    return next(value for pattern, value in _VALUES if re.search(pattern, name))


@contextmanager
def tolerated() -> Iterator[None]:
    """Ignores errors in the block, and ends the block after `_SECONDS`."""

    def raise_timeout(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(_SECONDS)
    try:
        with architectures.quiet():
            yield
    # The arguments are guesses, so a class may raise any error.
    except Exception:  # noqa: BLE001
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# --- tables ---------------------------------------------------------------------------------------


def table(rows: list[tuple[Any, ...]]) -> str:
    """A text with the first column aligned left, and the others aligned right."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [f"{first!s:{widths[0]}}"]
        cells += [f"{cell!s:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def by_kind(coverages: list[Coverage]) -> str:
    """A table with the numbers of classes of each kind: all, fused, left, and not built."""
    rows: list[tuple[Any, ...]] = [("classes", "all", "fused", "left", NOT_BUILT)]
    for kind in KINDS:
        of_kind = [coverage for coverage in coverages if coverage.kind == kind]
        fused = sum(bool(coverage.rules) for coverage in of_kind)
        not_built = sum(coverage.reason == NOT_BUILT for coverage in of_kind)
        rows.append((kind, len(of_kind), fused, len(of_kind) - fused - not_built, not_built))
    return table(rows)


def by_model(reports: dict[str, tuple[ModuleReport, ...]]) -> str:
    """A table with fused and all modules of each kind (as ``2/3``) in each of the twenty models.

    The column `other` has the fused modules of no kind.
    """
    kinds = ("norm", "MLP", "layer", "activation", "attention")
    rows: list[tuple[Any, ...]] = [("modules fused", *kinds, "other")]
    for name in TWENTY:
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for line in reports.get(name, ()):
            count = counts[_module_kind(line.type)]
            count[0] += bool(line.rule) or line.by is not None
            count[1] += 1
        cells = [
            f"{counts[kind][0]}/{counts[kind][1]}" if counts[kind][1] else "" for kind in kinds
        ]
        rows.append((name, *cells, counts["other"][0]))
    return table(rows)


def _module_kind(name: str) -> str:
    """The column of `by_model` for a class of this name."""
    kind = _kind_of_name(name)
    if kind is not None:
        return "norm" if "norm" in kind.lower() else kind
    if re.search(r"GELU|SiLU|ReLU|Activation", name):
        return "activation"
    return "attention" if "Attention" in name else "other"


# --- files ----------------------------------------------------------------------------------------


def path() -> Path:
    """The file of the installed version of Transformers."""
    return FOLDER / f"transformers_{transformers.__version__}.csv"


def write(coverages: list[Coverage]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with path().open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("class", "kind", "rule", "reason"))
        writer.writerows(sorted((c.name, c.kind, c.rule, c.reason) for c in coverages))


def lost(coverages: list[Coverage]) -> list[str]:
    """The classes that are fused in the file and are not fused now, with the reason."""
    with path().open(newline="", encoding="utf-8") as file:
        before = [row["class"] for row in csv.DictReader(file) if row["rule"]]
    now = {coverage.name: coverage for coverage in coverages}
    return [
        f"{name}: {now[name].reason if name in now else 'no such class'}"
        for name in before
        if name not in now or not now[name].rules
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python tests/harness/model_coverage.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--write", action="store_true", help="write the file of this version of Transformers"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if a class that is fused in that file is not fused now",
    )
    options = parser.parse_args(arguments)
    if options.check and not path().exists():
        print(f"there is no {path()}: write it first, with --write")
        return 1
    start = time.monotonic()
    torch.manual_seed(0)
    with architectures.quiet():
        by_class = classes()
    reports = examine_models(by_class)
    examine_other_classes(by_class)
    coverages = list(by_class.values())
    print(f"Transformers {transformers.__version__}, {time.monotonic() - start:.0f} s\n")
    print(by_kind(coverages), "\n")
    print(by_model(reports))
    no_longer_fused = lost(coverages) if options.check else []
    if no_longer_fused:
        print(f"\nno longer fused, {len(no_longer_fused)} classes:", *no_longer_fused, sep="\n  ")
    if options.write:
        write(coverages)
    return bool(no_longer_fused)


if __name__ == "__main__":
    sys.exit(main())
