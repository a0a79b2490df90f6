"""All models of the zoo, and the workloads that are run on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..models.workloads import Workload, named
from . import decoders, encoders, vision, written_models

__all__ = ["MODELS", "MODES", "part", "workloads"]

MODES = ("train", "infer")
MODELS = encoders.MODELS | decoders.MODELS | vision.MODELS | written_models.MODELS


def workloads(
    models: Sequence[str] = (), modes: Sequence[str] = (), *, tiny: bool = False
) -> list[Workload]:
    """Returns the workloads of the named models and modes; of all if none are named.

    A model trains with the first of its sizes, and infers with the last.
    """
    chosen = [named("model", name, MODELS) for name in models] or list(MODELS)
    wanted = [named("mode", mode, MODES) for mode in modes] or MODES
    results = []
    for name, mode in itertools.product(chosen, wanted):
        model = MODELS[name]
        sizes = model.sizes[0] if mode == "train" else model.sizes[-1]
        if tiny:
            sizes = model.tiny_sizes
        results.append(Workload(name, mode, sizes, tiny, registry=__name__))
    return results


def part(all_of_them: Sequence[Workload], index: int, count: int) -> list[Workload]:
    """Returns the ``index``-th of ``count`` shares, counted from one, which cost about the same.

    A model is whole in one share.
    """
    costs = [0.0] * count
    shares = dict[str, int]()
    names = dict.fromkeys(workload.name for workload in all_of_them)
    for name in sorted(names, key=lambda name: -MODELS[name].cost):
        shares[name] = costs.index(min(costs))
        costs[shares[name]] += MODELS[name].cost
    return [workload for workload in all_of_them if shares[workload.name] == index - 1]
