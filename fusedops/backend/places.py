"""The modules and the lines of code that nodes of a graph come from, as Dynamo records them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import fx

__all__ = ["lines", "modules"]

# Frames of these packages call the model's code, or are called by it.
_NOT_OF_MODEL = (Path(__file__).parents[1], Path(str(torch.__file__)).parent)
# A frame of a stack trace: the file and the number of the line.
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
# A step of a path in other forms than ``.name``: ``['name']`` and ``[0]``.
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
# Steps by which a path reaches a module without its parent's attributes.
_INTERNAL = ("__dict__", "_modules")


def modules(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The names of the innermost modules of nodes, without those that contain others of them.

    A name is relative to the outermost module, as in ``named_modules``. The outermost module itself
    has the name of its class.
    """
    names = dict.fromkeys(filter(None, map(_module, nodes)))
    inner = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    return tuple(inner)


def _module(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    outermost, innermost = _dotted(stack[0][0]), _dotted(stack[-1][0])
    name = innermost.removeprefix(outermost).lstrip(".")
    return name or getattr(stack[-1][1], "__name__", "")


def _dotted(path: str) -> str:
    steps = _INDEX.sub(r".\1", path).split(".")
    return ".".join([step for step in steps if step not in _INTERNAL])


def lines(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The innermost lines of the model's code that nodes come from, each as ``file:number``."""
    return tuple(dict.fromkeys(filter(None, map(_line, nodes))))


def _line(node: fx.Node) -> str:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, number in reversed(frames):
        if not any(map(Path(path).is_relative_to, _NOT_OF_MODEL)):
            return f"{Path(path).name}:{number}"
    return ""
