"""Generated sources as modules, so that Triton, tracebacks and profilers find their lines."""

from __future__ import annotations

import hashlib
import linecache
import re
from typing import Any

from .identifiers import HEADER

__all__ = ["kernel_of", "loaded", "text_of"]

_kernels: dict[str, Any] = {}


def loaded(function: str, digest: str, source: str, name: str) -> Any:
    """The kernel of this name, of a function's source."""
    text = f"{HEADER}\n\n{source}"
    number = hashlib.sha256(text.encode()).hexdigest()[:8]
    return kernel_of(f"<fusedops rowwise {function} {digest} {number}>", name, text)


def kernel_of(path: str, name: str, text: str) -> Any:
    """The kernel of this name in a text, which goes by the name of a file.

    A product is rounded wherever it is computed: a backward compares it with a forward's largest
    element, and takes the exponential of what is left of a difference.
    """
    kernel = _kernels.get(path)
    if kernel is None:
        # Triton reads a kernel's source by `inspect`, which asks `linecache`.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        namespace: dict[str, Any] = {
            "__name__": f"fusedops.compiler.generated.{re.sub(r'[^A-Za-z0-9]+', '_', path)}"
        }
        exec(compile(text, path, "exec"), namespace)
        kernel = _kernels[path] = namespace[name]
        kernel.contracts = False
    return kernel


def text_of(kernel: Any) -> str | None:
    """The text of a kernel from `kernel_of`; None for one of a module."""
    path = kernel.fn.__code__.co_filename
    return "".join(linecache.getlines(path)) if path in _kernels else None
