"""Drops configs whose kernels use too many registers or too much shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.configs.tuning_key import Config
from ..core.launches.usage import Usage

__all__ = ["Limits", "limits_of", "reason_to_drop"]


# A thread may spill this many bytes. For RMSNorm's backward over 16,384 columns the fastest config
# has whole rows and spills 72.
_FEW_SPILLS = 128


@dataclass(frozen=True)
class Limits:
    """The limits of a program and of a multiprocessor.

    Attributes:
        shared: bytes of shared memory of one program.
        shared_in_all: bytes of shared memory of all programs on a multiprocessor.
        registers_in_all: registers of all programs on a multiprocessor.
    """

    shared: int
    shared_in_all: int
    registers_in_all: int = 65536


def limits_of(device: torch.device) -> Limits:
    """Return the limits of a GPU; without one, those of an H200."""
    if device.type != "cuda":
        return Limits(shared=232_448, shared_in_all=233_472)
    properties: Any = torch.cuda.get_device_properties(device)
    registers = getattr(properties, "regs_per_multiprocessor", 65536)
    return Limits(
        shared=properties.shared_memory_per_block_optin,
        shared_in_all=properties.shared_memory_per_multiprocessor,
        registers_in_all=registers,
    )


def reason_to_drop(
    config: Config, usages: Sequence[Usage], heuristic: Sequence[Usage], limits: Limits
) -> str:
    """Return why a config cannot be the fastest, or the empty string.

    The reason is that it does not compile, that it spills, or that its programs do not fit. If the
    heuristic's config spills, as for the widest rows, other configs may spill as much.

    Args:
        config: the config.
        usages: what its kernels use.
        heuristic: what the kernels of the heuristic's config use.
        limits: the GPU's limits.
    """
    most_spills = max([_FEW_SPILLS, *[usage.spills for usage in heuristic]])
    # A multiprocessor runs `per_sm` programs at a time, and all must fit. A `per_sm` of 0 stands
    # for one program per tile: as many run as fit, so it is enough if one fits.
    programs = max(config.per_sm, 1)
    for usage in usages:
        if usage.error:
            return usage.error
        # Registers are allocated in units of 8 for each thread of a warp.
        registers = -(-usage.registers // 8) * 8 * 32 * config.warps * programs
        # With one program per tile this is 0, and only `limits.shared` applies.
        shared = usage.shared * config.per_sm
        # Each is what is used, the limit, and the reason to drop the config if it is exceeded.
        checks = (
            (usage.spills, most_spills, f"spills {usage.spills} bytes"),
            (usage.shared, limits.shared, f"{usage.shared} bytes of shared memory"),
            (registers, limits.registers_in_all, f"{registers} registers for {programs} programs"),
            (
                shared,
                limits.shared_in_all,
                f"{shared} bytes of shared memory for {config.per_sm} programs",
            ),
        )
        for used, limit, reason in checks:
            if used > limit:
                return reason
    return ""
