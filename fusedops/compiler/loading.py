"""Generated sources as modules, so that Triton, tracebacks and profilers find their lines."""

from __future__ import annotations

import hashlib
import linecache
from typing import Any

from .emitting import HEADER

__all__ = ["loaded"]

_kernels: dict[str, Any] = {}


def loaded(function: str, digest: str, source: str, name: str) -> Any:
    """The kernel of this name, of a function's source."""
    text = f"{HEADER}\n\n{source}"
    number = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = f"<fusedops rowwise {function} {digest} {number}>"
    found = _kernels.get(path)
    if found is None:
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        namespace: dict[str, Any] = {"__name__": f"fusedops.compiler.generated.{function}_{digest}_{number}"}
        exec(compile(text, path, "exec"), namespace)
        found = _kernels[path] = namespace[name]
    return found
