"""Traced functions on disk, so that a process after the first starts without tracing.

A file belongs to a function's code, to all that the code names, to the numbers of a call, and to
the versions of PyTorch, Python and this package. For some of these, such as a tensor, a module or
an object, no text identifies them in another process: then nothing is stored.

    <cache>/rowwise/<hash of all that>.json
        a checksum, and a JSON list of texts: the JSON of a structure for each kind of tensors
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from ..core.configs import cache
from . import grammar
from .ir import Graph, Node, topological
from .objects import PLAIN, is_of_a_library
from .reader import Look
from .structure import Operand, Part, Structure, nodes_of

__all__ = ["decoded", "encoded", "parsed", "read", "stored_at", "write"]


class _NotStorableError(Exception):
    """A value without a text that identifies it in another process."""


# The key of a file has to contain everything on which a trace depends, and nothing that another
# process has otherwise:
#
#   part of the key                           from
#   numbers among the arguments               repr, so that 1, 1.0 and True differ
#   the state around the function             its numbers and its fingerprint: see `Look`
#   the code of all functions that it calls   bytecode, constants, names, file and first line
#   autocast, default dtype, kind of device   the call
#   versions of PyTorch, Python, the package  `core.configs.cache`
#
# An id, or the text of an object at an address, would let two processes share a file by accident.


def stored_at(look: Look, *key: Any) -> Path | None:
    """Return the file for a state and the numbers of a call.

    Returns None if the state has no representation that another process shares.
    """
    if not look.storable:
        return None
    try:
        return cache.file_of("rowwise", [repr(key), *map(_plain, look.fingerprint)])
    except _NotStorableError:
        return None


def read(path: Path) -> Iterator[tuple[Structure, str]]:
    """Yield the structures in a file, each with its text; none if it cannot be read.

    They are for comparisons alone: each is decoded once in a process. A program, whose gradients
    become nodes of the graph, needs a structure of its own, from `parsed`.
    """
    for text in _texts(path):
        structure = _known(text)
        if structure is not None:
            yield structure, text


def parsed(text: str) -> Structure:
    """Return the structure of a text from `read`."""
    return decoded(json.loads(text))


def _texts(path: Path) -> list[str]:
    """Return the texts in a file; none if it cannot be read."""
    try:
        texts = json.loads(cache.opened(path.read_text()))
    except Exception:  # noqa: BLE001 - whatever is wrong with a file, its function is traced again
        return []
    if not isinstance(texts, list):
        return []
    return [text for text in texts if isinstance(text, str)]


@functools.lru_cache(maxsize=1024)
def _known(text: str) -> Structure | None:
    """Return the structure of a text; None if the text is invalid."""
    try:
        return parsed(text)
    except Exception:  # noqa: BLE001 - as in `_texts`
        return None


def write(path: Path, structure: Structure) -> None:
    """Add a structure to a file, which is replaced atomically.

    If two processes write at the same time, one loses its structure, and traces again.
    """
    with contextlib.suppress(OSError):
        texts = [*_texts(path), json.dumps(encoded(structure))]
        cache.replace(path, cache.sealed(json.dumps(texts)))


# --- keys ---------------------------------------------------------------------------


def _code(code: CodeType) -> list[str]:
    """Return the texts that identify code, and the functions that it defines."""
    numbers = (
        code.co_firstlineno,
        code.co_flags,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
    )
    texts = [
        code.co_filename,
        str(numbers),
        code.co_code.hex(),
        repr(code.co_names),
        repr(code.co_varnames),
    ]
    for constant in code.co_consts:
        texts += _code(constant) if isinstance(constant, CodeType) else [_constant(constant)]
    return texts


def _constant(value: Any) -> str:
    """Return the text of a constant; that of a set is sorted, as its order varies by process."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_constant, value))})"
    return repr(value)


def _plain(value: Any) -> str:
    """Return the text of a value, which is the same in each process.

    Raises:
        _NotStorableError: there is none.
    """
    if isinstance(value, (*PLAIN, list)):
        return repr(value)
    if isinstance(value, CodeType):
        return "\n".join(_code(value))
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{value!r}"
    if isinstance(value, ModuleType):
        return value.__name__
    # A bound method is refused: its object has a state, and its class may change.
    owner = getattr(value, "__self__", None)
    is_bound = not isinstance(owner, (ModuleType, type(None)))
    if is_bound or not is_of_a_library(value):
        raise _NotStorableError
    # A method that is written in C has no module, but its class has.
    home = getattr(value, "__module__", None) or value.__objclass__.__module__
    return f"{home}.{getattr(value, '__qualname__', value)}"


# --- structures as JSON ---------------------------------------------------------------------------


def encoded(structure: Structure) -> dict[str, Any]:
    """Return a structure as values for JSON.

    It has the nodes that are needed to compute the outputs and the values that may be saved, but no
    nodes of derivatives. Nodes are numbered in the order of the graph, so arguments come first.
    """
    tensors = [*structure.results, *[parts for parts, _ in structure.values]]
    used = set(topological(nodes_of(tensors)))
    stored = list(filter(used.__contains__, structure.graph.nodes.values()))
    numbers = {node: number for number, node in enumerate(stored)}
    lines = []
    for node, number in numbers.items():
        if node.number in structure.lines:
            lines.append((number, structure.lines[node.number]))
    return {
        "nodes": [_node(node, numbers) for node in stored],
        "sizes": structure.sizes,
        "rows": structure.rows,
        "columns": structure.columns,
        "unrolled": structure.unrolled,
        "drops": structure.drops,
        "container": structure.container,
        "inputs": list(map(_operand, structure.inputs)),
        "outputs": list(map(_operand, structure.outputs)),
        "results": [_parts(parts, numbers) for parts in structure.results],
        "lines": lines,
        "used": structure.used,
        "wide": structure.wide,
        "loose": structure.loose,
        "fixed": structure.fixed,
        "values": [[_parts(parts, numbers), _name(dtype)] for parts, dtype in structure.values],
    }


def decoded(fields: Any) -> Structure:
    """Return the structure that was encoded, after a check of everything in it: see `grammar`."""
    grammar.check(fields)
    # Nodes are built again by `Graph.make`, so that equal ones are one, but not simplified again:
    # the file has the graph as the trace left it.
    graph = Graph()
    nodes = list[Node]()
    for op, args, attrs, axes, kind, names in fields["nodes"]:
        node = graph.make(
            op, *[nodes[arg] for arg in args], attrs=_tuple(attrs), axes=axes, kind=kind
        )
        node.names.extend(names)
        nodes.append(node)

    def parts(pairs: Any) -> dict[Any, Node]:
        return {_tuple(part): nodes[number] for part, number in pairs}

    def operand(values: Any) -> Operand:
        labels, dtype, kind, name = values
        return Operand(_tuple(labels), getattr(torch, dtype), kind, name)

    return Structure(
        graph,
        _tuple(fields["sizes"]),
        _tuple(fields["rows"]),
        _tuple(fields["columns"]),
        _tuple(fields["unrolled"]),
        tuple(map(operand, fields["inputs"])),
        tuple(map(operand, fields["outputs"])),
        tuple(map(parts, fields["results"])),
        _tuple(fields["drops"]),
        fields["container"],
        dict(fields["lines"]),
        _tuple(fields["used"]),
        tuple([(parts(pairs), getattr(torch, dtype)) for pairs, dtype in fields["values"]]),
        fields["wide"],
        _tuple(fields["loose"]),
        _tuple(fields["fixed"]),
    )


def _operand(operand: Operand) -> list[Any]:
    """Return an operand as values for JSON."""
    return [operand.labels, _name(operand.dtype), operand.kind, operand.name]


def _node(node: Node, numbers: Mapping[Node, int]) -> list[Any]:
    """Return a node as values for JSON, with numbers for its arguments."""
    args = [numbers[arg] for arg in node.args]
    return [node.op, args, node.attrs, sorted(node.axes), node.kind, node.names]


def _parts(parts: Mapping[Part, Node], numbers: Mapping[Node, int]) -> list[Any]:
    """Return the parts of a tensor as values for JSON, with numbers for nodes."""
    return [[part, numbers[node]] for part, node in parts.items()]


def _name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as an attribute of `torch`."""
    return str(dtype).removeprefix("torch.")


def _tuple(value: Any) -> Any:
    """Return nested lists as nested tuples, since JSON has lists only."""
    if not isinstance(value, list):
        return value
    return tuple(map(_tuple, value))
