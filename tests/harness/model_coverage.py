"""``python tests/harness/model_coverage.py``.

How many classes of the installed Transformers `fusedops.fuse_model` knows.

Counts classes, not modules: of all `transformers.models.*.modeling_*`, the norms, feed-forward
parts and layers, told by their names (`KINDS`). A class counts as fused if a module of it is, by a
rule of its own or by the block around it: a module in one of the small models of `architectures`,
or else one that is built from a small configuration of its family. A class of which none can be
built counts as not fused.

``--write`` writes the result to ``coverage/transformers_VERSION.csv``; ``--check`` fails if a class
that was fused there no longer is. Last comes what is fused in twenty models, module by module.
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

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # some configurations ask the hub for another's

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import architectures
import fusedops
from architectures.tiny import tiny_config
from fusedops.models import ModuleReport

FOLDER = Path(__file__).with_name("coverage")

# By kind, in this order: which names of classes are of it.
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
NOT_BUILT, BY = "not built", "by its block"
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
        """The commonest, if it is not fused."""
        return (
            "" if self.rules else self.reasons.most_common(1)[0][0] if self.reasons else NOT_BUILT
        )

    def add(self, line: ModuleReport) -> None:
        if line.rule:
            self.rules[line.rule] += 1
        elif line.by is not None:
            self.rules[BY] += 1
        else:
            self.reasons[line.reason] += 1


def kind_of(cls: type) -> str | None:
    """A layer or a feed-forward part has a forward of its own.

    What only inherits one is counted there.
    """
    kind = next((kind for kind, names in KINDS.items() if names.search(cls.__name__)), None)
    return None if kind in ("MLP", "layer") and "forward" not in vars(cls) else kind


def classes() -> dict[type, Coverage]:
    """All classes of these kinds."""
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
                own = (
                    isinstance(cls, type)
                    and issubclass(cls, nn.Module)
                    and cls.__module__ == module.__name__
                )
                if own and (kind := kind_of(cls)) is not None:
                    results[cls] = Coverage(
                        f"{family.name}.{cls.__name__}", kind, Counter(), Counter()
                    )
    return results


def look(model: nn.Module, found: dict[type, Coverage]) -> tuple[ModuleReport, ...]:
    """Notes what would become of each module of a model."""
    lines = fusedops.fuse_model(model, dry_run=True).modules
    for line, module in zip(lines, dict(model.named_modules()).values(), strict=True):
        if type(module) in found:
            found[type(module)].add(line)
    return lines


def look_at_models(found: dict[type, Coverage]) -> dict[str, tuple[ModuleReport, ...]]:
    """All model types that can be built; the reports of the twenty."""
    reports = {}
    for name in architectures.transformers_types():
        with tolerated():
            lines = look(architectures.make(name).build(), found)
            if name in TWENTY:
                reports[name] = lines
    return reports


def look_at_the_rest(found: dict[type, Coverage]) -> None:
    """The classes of which no model has a module, built from their families' configurations."""
    configs = _configs()
    for cls, coverage in found.items():
        if coverage.rules or coverage.reasons:
            continue
        family = cls.__module__.rpartition(".")[0]
        for arguments in _arguments(cls, configs[family]):
            with tolerated():
                look(cls(**arguments), found)
            if coverage.rules:
                break


def _configs() -> dict[str, list[Any]]:
    """Small configurations by family, those within others too."""
    result: dict[str, list[Any]] = defaultdict(list)

    def collect(config: Any) -> None:
        if type(config) not in {
            type(c) for c in result[type(config).__module__.rpartition(".")[0]]
        }:
            result[type(config).__module__.rpartition(".")[0]].append(config)
        for inner in vars(config).values():
            if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
                collect(inner)

    for name in CONFIG_MAPPING:
        with tolerated():
            collect(tiny_config(name, CONFIG_MAPPING[name]))
    return result


def _arguments(cls: type, configs: list[Any]) -> Iterator[dict[str, Any]]:
    """Possible arguments of a class: a configuration, a place in the model, sizes."""
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


# What an argument of a name is given, the first that is found in it.
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
    if "config" in name:
        return config
    own = vars(config).get(name) if config is not None else None
    if isinstance(own, (int, float, str)):
        return own
    return next(value for names, value in _VALUES if re.search(names, name))


@contextmanager
def tolerated() -> Iterator[None]:
    """Ignores errors in the block, and ends it after a limit of time."""

    def late(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        with architectures.quiet():
            yield
    # What a class raises on arguments that were guessed is of any kind.
    except Exception:  # noqa: BLE001
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# --- tables ---------------------------------------------------------------------------------------


def table(rows: list[tuple[Any, ...]]) -> str:
    """Left-aligned names, right-aligned numbers."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        f"{row[0]!s:{widths[0]}}  "
        + "  ".join(f"{x!s:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def by_kind(found: list[Coverage]) -> str:
    """A line for each kind."""
    rows: list[tuple[Any, ...]] = [("classes", "all", "fused", "left", NOT_BUILT)]
    for kind in KINDS:
        of = [c for c in found if c.kind == kind]
        fused, absent = sum(bool(c.rules) for c in of), sum(c.reason == NOT_BUILT for c in of)
        rows.append((kind, len(of), fused, len(of) - fused - absent, absent))
    return table(rows)


def by_model(reports: dict[str, tuple[ModuleReport, ...]]) -> str:
    """A table with the fused and all modules of each kind, for each of the twenty models.

    `other` are of no kind.
    """
    rows: list[tuple[Any, ...]] = [
        ("modules fused", "norm", "MLP", "layer", "activation", "attention", "other")
    ]
    for name in TWENTY:
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for line in reports.get(name, ()):
            count = counts[_module_kind(line.type)]
            count[0] += bool(line.rule) or line.by is not None
            count[1] += 1
        rows.append(
            (
                name,
                *[
                    "/".join(map(str, counts[kind])) if counts[kind][1] else ""
                    for kind in rows[0][1:-1]
                ],
                counts["other"][0],
            )
        )
    return table(rows)


def _module_kind(name: str) -> str:
    kind = next((kind for kind, names in KINDS.items() if names.search(name)), None)
    if kind is not None:
        return "norm" if "norm" in kind.lower() else kind
    return (
        "activation"
        if re.search(r"GELU|SiLU|ReLU|Activation", name)
        else "attention"
        if "Attention" in name
        else "other"
    )


# --- files ----------------------------------------------------------------------------------------


def path() -> Path:
    return FOLDER / f"transformers_{transformers.__version__}.csv"


def write(found: list[Coverage]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with path().open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("class", "kind", "rule", "reason"))
        writer.writerows(sorted((c.name, c.kind, c.rule, c.reason) for c in found))


def lost(found: list[Coverage]) -> list[str]:
    """The classes that were fused when the file was written, and are not now, with the reason."""
    with path().open(newline="", encoding="utf-8") as file:
        before = [row["class"] for row in csv.DictReader(file) if row["rule"]]
    now = {c.name: c for c in found}
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
        help="fail if a class that was fused in that file no longer is",
    )
    options = parser.parse_args(arguments)
    if options.check and not path().exists():
        print(f"there is no {path()}: write it first, with --write")
        return 1
    start = time.monotonic()
    torch.manual_seed(0)
    with architectures.quiet():
        result = classes()
    reports = look_at_models(result)
    look_at_the_rest(result)
    coverages = list(result.values())
    print(f"Transformers {transformers.__version__}, {time.monotonic() - start:.0f} s\n")
    print(by_kind(coverages), "\n")
    print(by_model(reports))
    gone = lost(coverages) if options.check else []
    if gone:
        print(f"\nno longer fused, {len(gone)} classes:", *gone, sep="\n  ")
    if options.write:
        write(coverages)
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main())
