"""Traced functions on disk, so that a process after the first starts without tracing.

A file belongs to a function's code, to all that the code names, to the numbers of a call, and to the versions of PyTorch,
Python and this package. Where any of that has no value of its own (a tensor, a module, an object), nothing is stored.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from ..core import cache
from . import grammar
from .ir import Graph, Node, topological
from .looking import Look
from .structure import Operand, Part, Structure
from .surroundings import PLAIN, is_of_a_library

__all__ = ["decoded", "encoded", "read", "stored_at", "write"]


class _NoValueError(Exception):
    """Something that is not the same in another process."""


def stored_at(look: Look, *key: Any) -> Path | None:
    """The file of a function with this around it and what it is called with; None where words do not tell all."""
    if not look.storable:
        return None
    try:
        return cache.file_of("rowwise", [repr(key), *map(_plain, look.words)])
    except _NoValueError:
        return None


def read(path: Path) -> list[Structure]:
    """What is stored there; nothing where it cannot be read."""
    try:
        return [decoded(found) for found in json.loads(cache.opened(path.read_text()))]
    except Exception:  # noqa: BLE001 - whatever is wrong with a file, its function is traced again
        return []


def write(path: Path, structure: Structure) -> None:
    """Add a structure to the file, which is replaced at once; of two that write at a time one wins."""
    with contextlib.suppress(OSError):
        cache.replace(path, cache.sealed(json.dumps([*map(encoded, read(path)), encoded(structure)])))


# --- what a function is -------------------------------------------------------------------------------------------------


def _code(code: CodeType) -> list[str]:
    found = [
        code.co_filename,
        str((code.co_firstlineno, code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)),
        code.co_code.hex(),
        repr(code.co_names),
        repr(code.co_varnames),
    ]
    for constant in code.co_consts:
        found += _code(constant) if isinstance(constant, CodeType) else [repr(constant)]
    return found


def _plain(value: Any) -> str:
    if isinstance(value, (*PLAIN, list)):
        return repr(value)
    if isinstance(value, CodeType):
        return "\n".join(_code(value))
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{value!r}"
    owner = getattr(value, "__self__", None)  # of a method: its class may be another tomorrow
    if isinstance(value, ModuleType):
        return value.__name__
    if is_of_a_library(value) and (owner is None or isinstance(owner, ModuleType)):
        home = getattr(value, "__module__", None) or value.__objclass__.__module__  # of a method that is written in C
        return f"{home}.{getattr(value, '__qualname__', value)}"
    raise _NoValueError


# --- structures as JSON -------------------------------------------------------------------------------------------------


def encoded(structure: Structure) -> dict[str, Any]:
    """A structure for JSON: what its outputs are computed of, and what may be saved, but nothing of derivatives."""
    tensors = [*structure.results, *[parts for parts, _ in structure.values]]
    used = set(topological([node for parts in tensors for node in parts.values()]))
    kept = [node for node in structure.graph.nodes.values() if node in used]
    numbers = {node: number for number, node in enumerate(kept)}
    nodes = [[node.op, [numbers[arg] for arg in node.args], node.attrs, sorted(node.axes), node.kind, node.names]
             for node in kept]  # fmt: skip
    lines = [(numbers[node], structure.lines[node.number]) for node in kept if node.number in structure.lines]
    return {
        "nodes": nodes, "sizes": structure.sizes, "rows": structure.rows, "columns": structure.columns,
        "unrolled": structure.unrolled, "drops": structure.drops, "container": structure.container,
        "inputs": [_operand(operand) for operand in structure.inputs],
        "outputs": [_operand(operand) for operand in structure.outputs],
        "results": [_parts(parts, numbers) for parts in structure.results],
        "lines": lines, "used": structure.used, "wide": structure.wide,
        "loose": structure.loose, "fixed": structure.fixed,
        "values": [[_parts(parts, numbers), _name(dtype)] for parts, dtype in structure.values],
    }  # fmt: skip


def decoded(found: Any) -> Structure:
    """The structure that was encoded, after a check of everything in it: see `grammar`."""
    grammar.check(found)
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
        found["wide"],
        _tuple(found["loose"]),
        _tuple(found["fixed"]),
    )  # fmt: skip


def _operand(operand: Operand) -> list[Any]:
    return [operand.labels, _name(operand.dtype), operand.kind, operand.name]


def _parts(parts: Mapping[Part, Node], numbers: Mapping[Node, int]) -> list[Any]:
    return [[part, numbers[node]] for part, node in parts.items()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tuple(value: Any) -> Any:
    return tuple([_tuple(inner) for inner in value]) if isinstance(value, list) else value
