"""The registers and shared memory of a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Usage", "usage_of"]


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
