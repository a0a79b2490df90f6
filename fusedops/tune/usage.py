"""The registers and shared memory of a compiled kernel, and the configs that are dropped for them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.tuning_key import Config

__all__ = ["Limits", "Usage", "limits_of", "reason_to_drop", "usage_of"]


# Bytes per thread that are allowed: RMSNorm's backward over 16,384 columns is fastest with whole rows and 72.
_FEW_SPILLS = 128


@dataclass(frozen=True)
class Usage:
    """The resources of a compiled kernel.

    Attributes:
        registers: registers per thread; 0 if unknown.
        spills: bytes of stack per thread, on AMD GPUs spilled registers.
        shared: bytes of shared memory per program.
        error: why it does not compile; empty if it does.
    """

    registers: int = 0
    spills: int = 0
    shared: int = 0
    error: str = ""


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


def usage_of(compiled: Any) -> Usage:
    """The usage that the binary states."""
    shared = int(compiled.metadata.shared)
    if "amdgcn" in compiled.asm:
        return Usage(_number(r"\.vgpr_count:\s*(\d+)", compiled.asm["amdgcn"]),
                     _number(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]), shared)  # fmt: skip
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return Usage(shared=shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        shown = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True, check=True).stdout
    return Usage(_number(r"REG:(\d+)", shown), _number(r"STACK:(\d+)", shown), shared)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


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
