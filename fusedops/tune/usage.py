"""The configs that are dropped for the registers and shared memory of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.tuning_key import Config
from ..core.usage import Usage

__all__ = ["Limits", "limits_of", "reason_to_drop"]


# Bytes per thread that are allowed: RMSNorm's backward over 16,384 columns is fastest with whole rows and 72.
_FEW_SPILLS = 128


@dataclass(frozen=True)
class Limits:
    """The limits of a program and of a multiprocessor."""

    shared: int
    shared_in_all: int
    registers_in_all: int = 65536


def limits_of(device: torch.device) -> Limits:
    """The limits of a GPU; those of an H200 without one."""
    if device.type != "cuda":
        return Limits(232_448, 233_472)
    properties: Any = torch.cuda.get_device_properties(device)
    registers = getattr(properties, "regs_per_multiprocessor", 65536)
    return Limits(properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor, registers)


def reason_to_drop(config: Config, usages: Sequence[Usage], heuristic: Sequence[Usage], limits: Limits) -> str:
    """Why a config cannot be the fastest (it spills, or its programs do not fit), or the empty string.

    If the heuristic's config spills, as for the widest rows, others may spill as much.
    """
    spilled = max([_FEW_SPILLS, *[usage.spills for usage in heuristic]])
    for usage in usages:
        if usage.error:
            return usage.error
        if usage.spills > spilled:
            return f"spills {usage.spills} bytes"
        if usage.shared > limits.shared:
            return f"{usage.shared} bytes of shared memory"
        registers = -(-usage.registers // 8) * 8 * 32 * config.warps * max(config.per_sm, 1)
        if registers > limits.registers_in_all:
            return f"{registers} registers for {max(config.per_sm, 1)} programs"
        if usage.shared * config.per_sm > limits.shared_in_all:
            return f"{usage.shared * config.per_sm} bytes of shared memory for {config.per_sm} programs"
    return ""
