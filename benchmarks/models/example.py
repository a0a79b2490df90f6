"""`examples/train_lm_distributed.py` under the command ``distributed``.

FSDP2 times tensor parallel, in several layouts.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .traffic import Traffic

__all__ = ["NAME", "PROVIDERS", "Trained", "trainings"]

NAME = "train_lm"
# The example's models, by the names of the results.
PROVIDERS = {"eager": "torch.nn", "fused": "fusedops.nn"}
_SIZES = {"layers": 8, "width": 2048, "heads": 16, "context": 1024, "batch": 32}
_TINY = {"layers": 1, "width": 32, "heads": 4, "context": 16, "batch": 8}
_COMPARED = 10  # steps


class Trained(NamedTuple):
    """One model in one layout.

    Attributes:
        layout: "4x2" for FSDP2 over four groups of two processes that split the layers.
        shape: batch and context.
        ms: of a step, by block of steps.
        peak_mib: all that the process with the most has allocated at once, weights and optimizer
            included.
        loss: of the last step.
        difference: from one process, the largest of the first steps' losses.
        traffic: of a step.
    """

    layout: str
    shape: str
    provider: str
    ms: list[float]
    tokens: int
    peak_mib: float
    loss: float
    difference: float
    traffic: Traffic


def trainings(device: torch.device, steps: int, blocks: int, *, tiny: bool) -> Iterator[Trained]:
    """Each layout's models, whose blocks of steps take turns.

    One process's losses are taken once.
    """
    example, args = (
        _example(),
        argparse.Namespace(**(_TINY if tiny else _SIZES), rate=3e-4, dropout=0.0),
    )
    ranks, corpus = dist.get_world_size(), example.read_corpus().to(device)
    steps = max(steps + 5, _COMPARED)  # the example leaves the first five out of its timing
    alone = {name: _alone(example, parts, corpus, args) for name, parts in PROVIDERS.items()}
    for tp in (1, 2, 4):
        if ranks % tp == 0 and args.batch % (ranks // tp) == 0:
            yield from _layout(example, corpus, args, (ranks // tp, tp), (steps, blocks, alone))


def _layout(
    example: Any,
    corpus: Any,
    args: Any,
    sides: tuple[int, int],
    effort: tuple[int, int, dict[str, list[float]]],
) -> Iterator[Trained]:
    from torch.distributed.device_mesh import init_device_mesh

    steps, blocks, alone = effort
    mesh = init_device_mesh(corpus.device.type, sides, mesh_dim_names=("dp", "tp"))
    tokens = args.batch * args.context
    seen: dict[str, list[tuple[list[float], float, float]]] = {name: [] for name in PROVIDERS}
    for _ in range(blocks):
        for name, parts in PROVIDERS.items():
            seen[name].append(_train(example, parts, corpus, args, steps, mesh))
    for name, parts in PROVIDERS.items():
        losses = seen[name][0][0]
        difference = max(abs(a - b) for a, b in zip(losses, alone[name], strict=False))
        more, fewer = (_traffic(example, parts, corpus, args, count, mesh) for count in (3, 2))
        yield Trained(
            "x".join(map(str, sides)),
            f"{args.batch}x{args.context}",
            name,
            [1e3 * tokens / speed for _, speed, _ in seen[name]],
            tokens,
            statistics.median(mib for *_, mib in seen[name]),
            losses[-1],
            difference,
            more.minus(fewer),
        )


def _traffic(example: Any, parts: str, corpus: Any, args: Any, steps: int, mesh: Any) -> Traffic:
    """The traffic of a short training, with that of distributing the weights."""
    traffic = Traffic()
    with traffic:
        _train(example, parts, corpus, args, steps, mesh)
    return traffic


def _train(example: Any, parts: str, corpus: Any, args: Any, steps: int, mesh: Any) -> Any:
    """The example's function, after the memory of the training before was freed.

    Sharded models are in reference cycles.
    """
    gc.collect()
    if corpus.device.type == "cuda":
        torch.cuda.empty_cache()
    return example.train(example.CONTENDERS[parts], corpus, args, steps, mesh)


def _alone(example: Any, parts: str, corpus: Any, args: Any) -> list[float]:
    """The first steps' losses in one process, the first; the others wait, and get them."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        results = [_train(example, parts, corpus, args, _COMPARED, None)[0]]
    dist.broadcast_object_list(results, 0)
    return results[0]  # type: ignore[no-any-return]


def _example() -> Any:
    path = Path(__file__).resolve().parents[2] / "examples" / "train_lm_distributed.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
