"""Looks up private names of PyTorch, with a default for a release that lacks one."""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["PRIVATE", "find", "imported"]

# The paths that `find` looked up. ``tests/operators/test_compat.py`` removes each from torch, in a
# separate process, and compares results.
PRIVATE: set[str] = set()


def find(path: str, default: Any) -> Any:
    """Returns the object at a dotted path in torch, or the default."""
    PRIVATE.add(path)
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return default
    return value


def imported(module: str, name: str) -> Any:
    """Imports a module of PyTorch; returns its object ``name``, or None if either does not exist.

    It is for modules that ``import torch`` does not load, and that moved between releases.
    """
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
