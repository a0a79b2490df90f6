"""What a class's methods do, as a digest of their code: how a rule tells a class that it knows from a look-alike.

Transformers has a class of its own for every model, most of them with the same few forwards. A rule for one of them
holds for every class whose forward reads the same, whatever its name, and for none that reads differently, be it
through a subclass, a patch, or another release of the library.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["canonical", "digest", "fingerprint", "unwrapped"]

# What says nothing about behaviour, or differs between Python releases for the same source.
_SKIPPED = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind"})
# A forward reads the same only if these names mean the same.
_MEANINGS: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math}


def canonical(node: Any) -> str:
    """A syntax tree in one line, without annotations, docstrings and the wording of errors."""
    if isinstance(node, list):
        return "[" + " ".join(map(canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise):
        return "Raise"
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED or value is None or value == []:
            continue
        if name == "body" and isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            value = value[1:]
        fields.append(f"{name}={canonical(value)}")
    return f"({type(node).__name__} {' '.join(fields)})"


def fingerprint(cls: type, methods: tuple[str, ...] = ("forward",)) -> str:
    """The digest of the class's methods; empty where their source cannot be had or its names mean something else."""
    return digest(*[getattr(cls, name, None) for name in methods])


@functools.lru_cache(maxsize=4096)
def digest(*functions: Any) -> str:
    """The digest of functions, by which a class that is patched later is another; empty as `fingerprint`'s."""
    parts = list(map(_read, functions))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12] if all(parts) else ""


def _read(function: Callable[..., Any] | None) -> str:
    function = unwrapped(function)
    if not inspect.isfunction(function):
        return ""
    try:
        # Of a function `inspect` reads what it wraps, if it says so; of a code object what will run.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return ""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else ""
        if name in _MEANINGS and function.__globals__.get(name) is not _MEANINGS[name]:
            return ""
    return canonical(tree.body)


def unwrapped(function: Any) -> Any:
    """The forward inside the wrapper that Transformers puts around every layer, to checkpoint it; no other wrapper."""
    while (
        inspect.isfunction(function)
        and function.__code__.co_name == "forward_with_checkpointing"
        and function.__globals__.get("__name__") == "transformers.modeling_layers"
    ):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function
