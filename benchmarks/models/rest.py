"""What runs the rest of a graph: `fuse_model` beside `fusedops.compile` without Inductor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..zoo import registry
from .providers import REST
from .results import Row, by_workload, read
from .runner import Work
from .workloads import MODES, Workload, named, workloads

__all__ = ["markdown", "stages", "table", "workloads_of"]

# The models of this command, and those of the zoo, which have fewer layers than published.
_MODELS, _ZOO = ("bert", "gpt2", "t5", "llama_1b", "vit"), ("modernbert", "whisper")
# The sizes that are left out: of each model one large batch is compared.
_LEFT = {("bert", (64, 512))}
_EAGER = ("eager", *REST, "fused")
# In generation the cache grows, and Inductor would compile several of its sizes.
_COMPILED = ("compile", "backend")
# Behind this part of a step a provider is slower, and not equal.
_MARGIN = 0.03

_HEAD = """# Without Inductor: figures

What runs a model without Inductor, on an H200: milliseconds per step, and in brackets the host's. Of a row, `rest_eager` and
`fused` are from one run, in which the candidates take turns, and their quotient is in the last column: above 1,
[`rest="eager"`](compile.md#without-inductor) is faster than [`fuse_model`](models.md).

| column | what it is |
|---|---|
| `eager` | the model as it is |
| `leaves` | `fuse_model` with leaves alone: norms and activations |
| `fused` | `fuse_model` |
| `rest_eager` | `fusedops.compile(model, rest="eager")` |
| `blocks_eager` | `fusedops.compile_blocks(model, rest="eager")`, and leaves outside of the blocks |
| `compile`, `backend` | torch.compile, and `fusedops.compile` |

How it is measured is on the page of [whole models](model_figures.md#how-it-is-measured). ModernBERT and Whisper have the layers
of the [zoo](zoo.md). Training is under bf16 autocast. `python -m benchmarks models --rest --page` writes this page from the
results file.

`leaves` and `fused` were timed when modules called operators one by one, and `leaves` had gated units, too. Since then `fuse_model`
runs a model as `rest_eager` does."""


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
    """Returns a table in Markdown, with a line for each workload.

    The last column is the time of ``fused`` over that of ``rest_eager``: above 1, ``rest_eager`` is
    faster.
    """
    by_key = by_workload(rows)
    present = {name for by_provider in by_key.values() for name in by_provider}
    names = [name for name in (*_EAGER, *_COMPILED) if name in present]
    head = ["model", "mode", "shape", *names, "fused / rest_eager"]
    lines = [head, ["---"] * len(head)]
    lines += [
        [*key, *[_cell(by_provider.get(name)) for name in names], _ratio(by_provider)]
        for key, by_provider in by_key.items()
    ]
    return "\n".join([f"| {' | '.join(line)} |" for line in lines])


def _cell(row: Row | None) -> str:
    if row is None or row.ms is None:
        return ""
    host = "" if row.host_ms is None else f" ({row.host_ms:.1f})"
    return f"{row.ms:.2f}{host}"


def _ratio(by_provider: dict[str, Row]) -> str:
    """Returns the quotient of two times, marked where ``rest_eager`` is slower."""
    rows = map(by_provider.get, ("fused", "rest_eager"))
    fused, rest = [None if row is None else row.ms for row in rows]
    if not fused or not rest:
        return ""
    quotient = fused / rest
    return f"{quotient:.3f}" + (" (slower)" if quotient < 1 - _MARGIN else "")


def markdown(path: Path) -> str:
    """Returns the page of a results file, with a note if there are no results."""
    rows = read(path)
    if not rows:
        return f"{_HEAD}\n\nNothing has been measured yet.\n"
    versions = sorted({f"{row.torch}, Triton {row.triton}, commit {row.commit}" for row in rows})
    return f"{_HEAD}\n\nPyTorch {'; '.join(versions)}.\n\n{table(rows)}\n"
