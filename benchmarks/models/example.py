"""Measures the trainings of `examples/train_lm_distributed.py` for the command ``distributed``.

They have FSDP2 and tensor parallelism, in several layouts.
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
# The example's names of the models, by the providers' names in results.
PROVIDERS = {"eager": "torch.nn", "fused": "fusedops.nn"}
_SIZES = {"layers": 8, "width": 2048, "heads": 16, "context": 1024, "batch": 32}
_TINY = {"layers": 1, "width": 32, "heads": 4, "context": 16, "batch": 8}
# The losses of this many first steps are compared with those of one process.
_COMPARED_STEPS = 10


class Trained(NamedTuple):
    """The measurements of a model in a layout.

    Attributes:
        layout: for example "4x2": FSDP2 over four groups of two processes, which split the layers.
        shape: batch and context.
        provider: a key of `PROVIDERS`.
        ms: the milliseconds per step of each block of steps.
        tokens: the tokens of a step.
        peak_mib: the peak memory with weights and optimizer, of the process that needs the most.
        loss: the loss of the last step.
        difference: the largest difference of the first steps' losses from those of one process.
        traffic: the collectives of a step.
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
    """Yields the measurements of each layout's models.

    The losses of one process are measured once, for all layouts.
    """
    example = _example()
    args = argparse.Namespace(**(_TINY if tiny else _SIZES), rate=3e-4, dropout=0.0, compile=False)
    ranks, corpus = dist.get_world_size(), example.read_corpus().to(device)
    # The example does not time its first five steps.
    steps = max(steps + 5, _COMPARED_STEPS)
    expected = {
        name: _losses_of_one_process(example, contender, corpus, args)
        for name, contender in PROVIDERS.items()
    }
    for tp in (1, 2, 4):
        if ranks % tp == 0 and args.batch % (ranks // tp) == 0:
            sides = (ranks // tp, tp)
            yield from _layout(example, corpus, args, sides, (steps, blocks, expected))


def _layout(
    example: Any,
    corpus: Any,
    args: Any,
    sides: tuple[int, int],
    effort: tuple[int, int, dict[str, list[float]]],
) -> Iterator[Trained]:
    """Yields the measurements of a layout's models, whose blocks of steps take turns.

    ``effort`` is the number of steps and of blocks, and the losses of one process by provider.
    """
    from torch.distributed.device_mesh import init_device_mesh

    steps, blocks, expected = effort
    mesh = init_device_mesh(corpus.device.type, sides, mesh_dim_names=("dp", "tp"))
    tokens = args.batch * args.context
    # For each training: the losses, the tokens per second, and the peak memory.
    trainings: dict[str, list[tuple[list[float], float, float]]] = {name: [] for name in PROVIDERS}
    for _ in range(blocks):
        for name, contender in PROVIDERS.items():
            trainings[name].append(_train(example, contender, corpus, args, steps, mesh))
    for name, contender in PROVIDERS.items():
        losses, _, _ = trainings[name][0]
        difference = max(abs(a - b) for a, b in zip(losses, expected[name], strict=False))
        # The difference of three steps and two is the traffic of one step.
        three_steps = _traffic(example, contender, corpus, args, 3, mesh)
        two_steps = _traffic(example, contender, corpus, args, 2, mesh)
        yield Trained(
            layout="x".join(map(str, sides)),
            shape=f"{args.batch}x{args.context}",
            provider=name,
            ms=[1e3 * tokens / speed for _, speed, _ in trainings[name]],
            tokens=tokens,
            peak_mib=statistics.median(mib for *_, mib in trainings[name]),
            loss=losses[-1],
            difference=difference,
            traffic=three_steps.minus(two_steps),
        )


def _traffic(
    example: Any, contender: str, corpus: Any, args: Any, steps: int, mesh: Any
) -> Traffic:
    """Returns the traffic of a short training, which includes that of distributing the weights."""
    traffic = Traffic()
    with traffic:
        _train(example, contender, corpus, args, steps, mesh)
    return traffic


def _train(example: Any, contender: str, corpus: Any, args: Any, steps: int, mesh: Any) -> Any:
    """Returns the results of the example's function ``train``.

    The memory of the training before is freed first.
    """
    # Sharded models are in reference cycles.
    gc.collect()
    if corpus.device.type == "cuda":
        torch.cuda.empty_cache()
    return example.train(example.CONTENDERS[contender], corpus, args, steps, mesh)


def _losses_of_one_process(example: Any, contender: str, corpus: Any, args: Any) -> list[float]:
    """Returns the losses of the first steps in one process. Rank 0 trains, the others wait."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        results = [_train(example, contender, corpus, args, _COMPARED_STEPS, None)[0]]
    dist.broadcast_object_list(results, 0)
    return results[0]  # type: ignore[no-any-return]


def _example() -> Any:
    """Imports the example."""
    path = Path(__file__).resolve().parents[2] / "examples" / "train_lm_distributed.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
