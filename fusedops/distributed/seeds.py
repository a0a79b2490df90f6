"""`check_seeds`: a check that all ranks of a mesh have the same random state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_seeds"]


def check_seeds(mesh: DeviceMesh) -> None:
    """Checks that all ranks of a mesh have the same random state.

    Dropout on DTensors requires it. All ranks of the mesh must call this function. It gathers eight
    bytes from each rank. One check after seeding is enough if all ranks call the same operators.

    Args:
        mesh: the mesh of the DTensors.
    Raises:
        RuntimeError: a rank's state differs from that of the first rank; the message names these
            ranks.
    """
    if mesh.get_coordinate() is None:
        return  # this rank is not in the mesh
    from torch.distributed.tensor import DTensor, Shard

    kind = mesh.device_type
    if kind == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(kind).get_rng_state()
    digest = hashlib.sha256(bytes(state.tolist())).digest()[:8]
    local_digest = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=kind)
    # A tensor of one number for each rank. All dimensions of the mesh shard it, so that gathering
    # it gives the numbers in the order of the mesh's ranks.
    sharded = DTensor.from_local(local_digest, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    digests = sharded.full_tensor().tolist()
    ranks = mesh.mesh.flatten().tolist()
    pairs = zip(ranks, digests, strict=True)
    differing = [rank for rank, rank_digest in pairs if rank_digest != digests[0]]
    if differing:
        shown = ", ".join(map(str, differing[:8])) + (", …" if len(differing) > 8 else "")
        raise RuntimeError(
            f"check_seeds: the random state of rank {shown} is not that of rank {ranks[0]}; call "
            "torch.manual_seed with one seed on all ranks of the mesh"
        )
