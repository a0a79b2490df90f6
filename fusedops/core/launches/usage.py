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
        spills: bytes of stack per thread; on AMD GPUs the number of spilled registers.
        shared: bytes of shared memory per program.
        error: why it does not compile; empty if it does.
    """

    registers: int = 0
    spills: int = 0
    shared: int = 0
    error: str = ""


def usage_of(compiled: Any) -> Usage:
    """Returns the usage that is recorded in the binary."""
    shared = int(compiled.metadata.shared)
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", text)
        spills = _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        return Usage(registers, spills, shared)
    import triton

    # Triton reads these numbers when it loads a kernel, which needs a GPU. They are in the binary
    # too: a tool of NVIDIA prints them, which is part of Triton's wheels.
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return Usage(shared=shared)
    # The tool reads a file, not its standard input.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        output = subprocess.run(
            [tool, "-res-usage", binary.name], capture_output=True, text=True, check=True
        ).stdout
    return Usage(_number(r"REG:(\d+)", output), _number(r"STACK:(\d+)", output), shared)


def _number(pattern: str, text: str) -> int:
    """Returns the number in the first match, 0 without one."""
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
