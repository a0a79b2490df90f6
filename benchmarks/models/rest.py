"""What runs the rest of a graph: `fuse_model` beside `fusedops.compile` without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..zoo import registry
from .results import Row, by_workload, read
from .runner import Work
from .workloads import MODES, Workload, named, workloads

__all__ = ["markdown", "stages", "table", "workloads_of"]

# The models of this command, and those of the zoo, which have fewer layers than published.
_MODELS, _ZOO = ("bert", "gpt2", "t5", "llama_1b", "vit"), ("modernbert", "whisper")
# The sizes that are left out: of each model one large batch is compared.
_LEFT = {("bert", (64, 512))}
_EAGER = ("eager", "leaves", "fused")
# In generation the cache grows, and Inductor would compile several of its sizes.
_COMPILED = ("compile", "backend")
# How `fuse_model` was chosen to run a model as a graph. They are not measured any more.
_CANDIDATES = ("rest_eager", "blocks_eager", "modules")
# Behind this part of a step a graph is slower than modules, and not equal.
_MARGIN = 0.03

_HEAD = """# Without Inductor: figures

What runs a model without Inductor, on an H200: milliseconds per step, and in brackets the host's. How it is measured is on the
page of [whole models](model_figures.md#how-it-is-measured). ModernBERT and Whisper have the layers of the [zoo](zoo.md).
Training is under bf16 autocast. `python -m benchmarks models --rest --page` writes this page from the results file."""
_NOW = """## fuse_model

| column | what it is |
|---|---|
| `eager` | the model as it is |
| `leaves` | `fuse_model(model, graph=False)`: norms and activations alone |
| `fused` | `fuse_model(model)`, which is what [`rest="eager"`](compile.md#without-inductor) is |
| `compile`, `backend` | torch.compile, and `fusedops.compile`, where they were timed |"""
_THEN = """## The decision

[`fuse_model`](models.md) once gave each module that has a rule an operator of its own, and read the code of others. These
figures decided that it runs a model as one graph. Of a row, all are from one run, in which the candidates take turns.

| column | what it is |
|---|---|
| `rest_eager` | the whole model as a graph |
| `blocks_eager` | the repeated blocks as graphs, and norms and activations outside of them by rules |
| `modules` | modules by rules |

The last column is the time of `modules` over that of `rest_eager`: above 1, the graph is faster."""


def workloads_of(
    modes: Sequence[str] = (), models: Sequence[str] = (), *, tiny: bool = False
) -> list[Workload]:
    """Returns the workloads of the given models in the given modes, or of all."""
    names = [named("model", name, (*_MODELS, *_ZOO)) for name in models]
    wanted = [named("mode", mode, MODES) for mode in modes] or list(MODES)
    chosen = [
        workload
        for workload in workloads(_MODELS, wanted, tiny=tiny)
        if (workload.name, workload.sizes) not in _LEFT
    ]
    of_zoo = [mode for mode in wanted if mode in registry.MODES]
    chosen += registry.workloads(_ZOO, of_zoo, tiny=tiny) if of_zoo else []
    return [workload for workload in chosen if not names or workload.name in names]


def stages(chosen: Sequence[Workload], wanted: Sequence[str] = ()) -> list[list[Work]]:
    """Returns the work: first without Inductor, so that nothing waits for it, then with it.

    Args:
        chosen: the workloads.
        wanted: the providers; empty for all.
    """
    results = []
    for names in (_EAGER, _COMPILED):
        of_stage = tuple([name for name in names if not wanted or name in wanted])
        items = [Work(w, of_stage) for w in chosen if names == _EAGER or w.mode != "generate"]
        if of_stage:
            results.append(items)
    return results


def table(rows: Iterable[Row]) -> str:
    """Returns a table in Markdown of what `stages` measures, with a line for each workload."""
    return _table(rows, (*_EAGER, *_COMPILED), {})


def _table(
    rows: Iterable[Row],
    providers: Sequence[str],
    extra: Mapping[str, Callable[[Mapping[str, Row]], str]],
) -> str:
    """Returns a table of some providers, with further columns: their cell is a function of a row."""
    by_key = by_workload(row for row in rows if row.provider in providers)
    present = {name for by_provider in by_key.values() for name in by_provider}
    names = [name for name in providers if name in present]
    head = ["model", "mode", "shape", *names, *extra]
    lines = [head, ["---"] * len(head)]
    for key, by_provider in by_key.items():
        cells = [_cell(by_provider.get(name)) for name in names]
        lines.append([*key, *cells, *[cell(by_provider) for cell in extra.values()]])
    return "\n".join([f"| {' | '.join(line)} |" for line in lines])


def _cell(row: Row | None) -> str:
    if row is None or row.ms is None:
        return ""
    host = "" if row.host_ms is None else f" ({row.host_ms:.1f})"
    return f"{row.ms:.2f}{host}"


def _ratio(by_provider: Mapping[str, Row]) -> str:
    """Returns the quotient of two times, marked where the graph is slower."""
    rows = map(by_provider.get, ("modules", "rest_eager"))
    modules, graph = [None if row is None else row.ms for row in rows]
    if not modules or not graph:
        return ""
    quotient = modules / graph
    return f"{quotient:.3f}" + (" (slower)" if quotient < 1 - _MARGIN else "")


def markdown(path: Path) -> str:
    """Returns the page of a results file, with a note if there are no results."""
    rows = read(path)
    if not rows:
        return f"{_HEAD}\n\nNothing has been measured yet.\n"
    versions = sorted({f"{row.torch}, Triton {row.triton}" for row in rows})
    then = _table(rows, _CANDIDATES, {"modules / rest_eager": _ratio})
    commits = ", ".join(sorted({row.commit for row in rows}))
    parts = [
        _HEAD,
        f"PyTorch {'; '.join(versions)}; commits {commits}.",
        _NOW,
        table(rows),
        _THEN,
        then,
    ]
    return "\n\n".join(parts) + "\n"
