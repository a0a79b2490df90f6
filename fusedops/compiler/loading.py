"""Generated sources as modules, so that Triton, tracebacks and profilers find their lines."""

from __future__ import annotations

import hashlib
import linecache
import re
from typing import Any, Protocol

from .identifiers import HEADER

__all__ = ["kernel_of", "loaded", "text_of"]


class Source(Protocol):
    """A kernel's source: see `kernel.Kernel`."""

    @property
    def name(self) -> str:
        """Return the name of its function."""

    @property
    def source(self) -> str:
        """Return its source."""

    @property
    def contracts(self) -> bool:
        """Whether a product and a sum may be one instruction."""

    @property
    def checks(self) -> bool:
        """Whether an index out of range makes an assertion fail."""


# The first line of a kernel whose products are all rounded.
_ROUNDS = "# Products are rounded.\n"
# The first line of a kernel with assertions, or the second.
_CHECKS = "# Indices are checked.\n"
_kernels: dict[str, Any] = {}


def loaded(function: str, digest: str, kernel: Source) -> Any:
    """Return the kernel of a function, from its source."""
    # Another process may get the text alone, so that the text has to say whether products are
    # contracted, and indices checked: see `kernel_of`.
    marks = ("" if kernel.contracts else _ROUNDS) + (_CHECKS if kernel.checks else "")
    text = f"{marks}{HEADER}\n\n{kernel.source}"
    text_digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return kernel_of(f"<fusedops rowwise {function} {digest} {text_digest}>", kernel.name, text)


def kernel_of(path: str, name: str, text: str) -> Any:
    """Return the kernel of this name in a text, for which ``path`` is the name of a file.

    A product and a sum are one instruction, without the product's rounding, unless the text says
    that products are rounded: see `codegen`. Assertions have no effect unless the text says that
    indices are checked.
    """
    kernel = _kernels.get(path)
    if kernel is None:
        # Triton reads a kernel's source by `inspect`, which asks `linecache`.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        namespace: dict[str, Any] = {
            "__name__": f"fusedops.compiler.generated.{re.sub(r'[^A-Za-z0-9]+', '_', path)}"
        }
        exec(compile(text, path, "exec"), namespace)
        kernel = namespace[name]
        kernel.contracts = not text.startswith(_ROUNDS)
        kernel.checks = text.removeprefix(_ROUNDS).startswith(_CHECKS)
        # Last, and of several threads the first: others read it without a lock.
        kernel = _kernels.setdefault(path, kernel)
    return kernel


def text_of(kernel: Any) -> str | None:
    """Return the text of a kernel from `kernel_of`; None for a kernel that is not generated."""
    path = kernel.fn.__code__.co_filename
    return "".join(linecache.getlines(path)) if path in _kernels else None
