"""Several GPUs: a check of what dropout on DTensors relies on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_seeds"]


def check_seeds(mesh: DeviceMesh) -> None:
    """Checks that all ranks of a mesh have the same random state, as the dropout masks of DTensors need.

    All ranks of the mesh call it; it gathers eight bytes of each. A step calls the same operators on all ranks, so that
    a check after seeding is enough.

    Args:
        mesh: the mesh of the DTensors.
    Raises:
        RuntimeError: a rank has another state than the first one; the message names such ranks.
    """
    if mesh.get_coordinate() is None:
        return  # of the ranks that the mesh is not for
    from torch.distributed.tensor import DTensor, Shard

    kind = mesh.device_type
    state = torch.get_rng_state() if kind == "cpu" else torch.get_device_module(kind).get_rng_state()
    digest = hashlib.sha256(bytes(state.tolist())).digest()[:8]
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=kind)
    every = DTensor.from_local(own, mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor().tolist()
    ranks = mesh.mesh.flatten().tolist()
    others = [rank for rank, found in zip(ranks, every, strict=True) if found != every[0]]
    if others:
        shown = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
        raise RuntimeError(f"check_seeds: the random state of rank {shown} is not that of rank {ranks[0]}; call "
                           "torch.manual_seed with one seed on all ranks of the mesh")  # fmt: skip
