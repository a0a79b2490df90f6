"""Traced functions on disk, so that a process after the first starts without tracing.

A file belongs to a function's code, to all that the code names, to the numbers of a call, and to the versions of PyTorch,
Python and this package. Where any of that has no value of its own (a tensor, a module, an object), nothing is stored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from ..core import cache
from ..core.version import __version__
from .ir import Graph, Node
from .structure import Operand, Structure

__all__ = ["read", "stored_at", "write"]

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype)


class _NoValueError(Exception):
    """Something that is not the same in another process."""


def stored_at(function: Callable[..., Any], *key: Any) -> Path | None:
    """The file of a function and what it is called with; None where it cannot be told by its text."""
    root = cache.directory()
    inner = inspect.unwrap(function)
    if root is None or not isinstance(inner, FunctionType):
        return None
    try:
        parts = [__version__, torch.__version__, sys.version, _own_code(), repr(key), *_text(inner, set())]
    except _NoValueError:
        return None
    return root / "rowwise" / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.json"


@functools.cache
def _own_code() -> str:
    """What this package's tracing is: a version says nothing of a working copy."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def read(path: Path) -> list[Structure]:
    """What is stored there; nothing where it cannot be read."""
    try:
        return [_decoded(found) for found in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return []


def write(path: Path, structure: Structure) -> None:
    """Add a structure to the file, which is replaced at once; of two that write at a time one wins."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([*map(_encoded, read(path)), _encoded(structure)])
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=cache.SCRATCH, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)


# --- what a function is -------------------------------------------------------------------------------------------------


def _text(function: FunctionType, seen: set[int]) -> list[str]:
    """All that a function computes with, in words."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    code = function.__code__
    found = [*_code(code), repr([_plain(value, seen) for value in (function.__defaults__ or ())]),
             repr([(name, _plain(value, seen)) for name, value in (function.__kwdefaults__ or {}).items()])]  # fmt: skip
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    around = [*[(name, _within(cell)) for name, cell in cells],
              *[(name, function.__globals__[name]) for name in _names(code) if name in function.__globals__]]  # fmt: skip
    return [*found, *[f"{name}={_plain(value, seen)}" for name, value in around]]


def _within(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        raise _NoValueError from None


def _code(code: CodeType) -> list[str]:
    found = [
        code.co_filename,
        str(code.co_firstlineno),
        code.co_code.hex(),
        repr(code.co_names),
        repr(code.co_varnames),
    ]
    for constant in code.co_consts:
        found += _code(constant) if isinstance(constant, CodeType) else [repr(constant)]
    return found


def _names(code: CodeType) -> list[str]:
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return sorted({*code.co_names, *inner})


def _plain(value: Any, seen: set[int]) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):
        return "\n".join([value.__qualname__, *_text(value, seen)])
    if isinstance(value, tuple):
        return repr([_plain(inner, seen) for inner in value])
    if inspect.isbuiltin(value) or (isinstance(value, type) and value.__module__.startswith("torch.")):
        return f"{value.__module__}.{value.__qualname__}"
    raise _NoValueError


# --- structures as JSON -------------------------------------------------------------------------------------------------


def _encoded(structure: Structure) -> dict[str, Any]:
    nodes = [[node.op, [arg.number for arg in node.args], node.attrs, sorted(node.axes), node.kind, node.names]
             for node in structure.graph.nodes.values()]  # fmt: skip
    return {
        "nodes": nodes, "sizes": structure.sizes, "rows": structure.rows, "columns": structure.columns,
        "unrolled": structure.unrolled, "drops": structure.drops, "container": structure.container,
        "inputs": [_operand(operand) for operand in structure.inputs],
        "outputs": [_operand(operand) for operand in structure.outputs],
        "results": [_parts(parts) for parts in structure.results],
        "lines": list(structure.lines.items()), "used": structure.used,
        "values": [[_parts(parts), _name(dtype)] for parts, dtype in structure.values],
    }  # fmt: skip


def _decoded(found: Any) -> Structure:
    graph, nodes = Graph(), list[Node]()
    for op, args, attrs, axes, kind, names in found["nodes"]:
        node = graph.make(op, *[nodes[arg] for arg in args], attrs=_tuple(attrs), axes=axes, kind=kind)
        node.names.extend(names)
        nodes.append(node)

    def parts(pairs: Any) -> dict[Any, Node]:
        return {_tuple(part): nodes[number] for part, number in pairs}

    def operand(fields: Any) -> Operand:
        labels, dtype, kind, name = fields
        return Operand(_tuple(labels), getattr(torch, dtype), kind, name)

    return Structure(
        graph, _tuple(found["sizes"]), _tuple(found["rows"]), _tuple(found["columns"]), _tuple(found["unrolled"]),
        tuple(map(operand, found["inputs"])), tuple(map(operand, found["outputs"])), tuple(map(parts, found["results"])),
        _tuple(found["drops"]), found["container"], dict(found["lines"]), _tuple(found["used"]),
        tuple([(parts(pairs), getattr(torch, dtype)) for pairs, dtype in found["values"]]),
    )  # fmt: skip


def _operand(operand: Operand) -> list[Any]:
    return [operand.labels, _name(operand.dtype), operand.kind, operand.name]


def _parts(parts: Any) -> list[Any]:
    return [[part, node.number] for part, node in parts.items()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tuple(value: Any) -> Any:
    return tuple([_tuple(inner) for inner in value]) if isinstance(value, list) else value
