"""Captured graphs as JSON, and back.

A file is text that others may have written. What is read from it can name PyTorch's operators, this
package's, the few functions of `_FUNCTIONS`, the conversions of DTensors, and the functions of the
graph from Dynamo: no attribute of a module, and no code. FX writes names and keywords into source
that it executes, so each must be an identifier.

The current GPU is written as such, without its index: each rank of a mesh has another one.
"""

from __future__ import annotations

import json
import keyword
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from ..core.compat.distributed import is_mesh
from .capture import WITHOUT_EFFECT, copy_metadata
from .fx import AUTOCASTS, CHECKPOINTED, CONVERSIONS, GRAD_MODES, OPERATORS, conversion, is_pure
from .graphs import FUSED, held_names, positions_of
from .meshes import decoded_placement, described, encoded_placement, parameters_of
from .passes.grouped_products import is_grouped
from .passes.padding import PADDED
from .targets import FromLocal, OfShards, OnDTensors, ToLocal

__all__ = [
    "DEVICE_TYPES",
    "PLAIN",
    "NoValueError",
    "attribute",
    "decoded",
    "device_name",
    "encoded",
    "graph_of",
    "name_of_function",
    "nodes_of",
    "restorable_name",
]

# The types whose values are the same in JSON.
PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
# The namespaces of PyTorch's operators and this package's. An operator of another library may
# change without a change of its name: only the one that grouped_products.py replaces may be in a
# graph from Dynamo.
_NAMESPACES = frozenset({"aten", "prims", "fusedops"})
# The functions in captured graphs that are no operators.
_FUNCTIONS = {
    "getitem": operator.getitem,
    "dropout": F.dropout,
    "tensor": torch.tensor,
    "checkpointed": CHECKPOINTED,
    **{f"grad_mode{number}": mode for number, mode in enumerate(GRAD_MODES)},
}
# The types of devices that a stored graph may name.
DEVICE_TYPES = ("cpu", "cuda")
# The kinds of nodes of captured graphs.
_NODES = ("placeholder", "get_attr", "call_function", "output")
# The name of the current GPU.
_CURRENT = "the current GPU"
# Marks of nodes that are read after the capture, with the types of their values.
_MARKS: dict[str, Callable[[Any], Any]] = {
    FUSED: bool,
    PADDED: bool,
    "recompute": CheckpointPolicy,
}


class NoValueError(Exception):
    """Something that is not the same in another process, or that no captured graph contains."""


def attribute(gm: fx.GraphModule, name: Any) -> Any:
    """A tensor or module that a graph holds, by its dotted name."""
    return operator.attrgetter(name)(gm)


# --- graphs ---------------------------------------------------------------------------------------


def encoded(gm: fx.GraphModule, captured: fx.GraphModule) -> dict[str, Any]:
    """A captured graph as JSON, with the names of the tensors and bodies that it holds.

    They are not stored: `decoded` reads them from the attributes of Dynamo's graph.

    Args:
        gm: the graph from Dynamo.
        captured: the captured graph.
    """
    by_target = {name.replace(".", "_"): name for name in held_names(gm.graph)}
    held: dict[str, Any] = {}
    for node in captured.graph.find_nodes(op="get_attr"):
        # A tensor that the capture added itself is in no other process.
        if node.target not in by_target:
            raise NoValueError
        name = by_target[node.target]
        held[node.target] = {"name": name}
        body = attribute(captured, node.target)
        if isinstance(body, fx.GraphModule):
            held[node.target]["body"] = encoded(attribute(gm, name), body)
    positions = {node.target: position for position, node in enumerate(gm.graph.nodes)}

    def name_of(function: Any) -> Any:
        if isinstance(function, OnDTensors):
            return _name_on_dtensors(function, positions)
        return restorable_name(function)

    return {"nodes": nodes_of(captured.graph, name_of), "held": held}


def decoded(content: Any, gm: fx.GraphModule) -> fx.GraphModule:
    """A captured graph from JSON, with the tensors and bodies of the graph from Dynamo."""
    held: dict[str, Any] = {}
    names = held_names(gm.graph)
    for target, description in content["held"].items():
        if description["name"] not in names:
            raise NoValueError
        value = attribute(gm, description["name"])
        if "body" in description:
            value = decoded(description["body"], value)
        held[target] = value
    targets = [node.target for node in gm.graph.nodes]
    result = fx.GraphModule(held, graph_of(content["nodes"], targets))
    copy_metadata(gm, result)
    return result


def nodes_of(graph: fx.Graph, name: Callable[[Any], Any]) -> list[Any]:
    """For each node its operator, name, target, arguments and marks.

    Args:
        graph: the graph.
        name: returns the name of a function, in types of JSON.
    """
    positions = positions_of(graph)
    nodes = []
    for node in graph.nodes:
        target = name(node.target) if node.op == "call_function" else node.target
        args, kwargs = _plain(node.args, positions), _plain(node.kwargs, positions)
        nodes.append([node.op, node.name, target, args, kwargs, _marks_of(node)])
    return nodes


def _marks_of(node: fx.Node) -> dict[str, Any]:
    """The marks of a node that are stored: of a member of an enumeration its value."""
    marks = {}
    for key in filter(node.meta.__contains__, _MARKS):
        marks[key] = getattr(node.meta[key], "value", True)
    return marks


def graph_of(content: Any, targets: Sequence[Any] = ()) -> fx.Graph:
    """A graph from JSON; ``targets`` are those of the nodes of the graph from Dynamo.

    FX writes names and targets into source that is executed: a file must not contain code there.
    They are identifiers, and so are keywords of calls.
    """
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs, marks in content:
        _check_words(op, name, target, kwargs)
        called = _called(target, targets) if op == "call_function" else target
        node = graph.create_node(op, called, _value(args, nodes), _value(kwargs, nodes), name)
        for key, mark in marks.items():
            node.meta[key] = _MARKS[key](mark)
        nodes.append(node)
    return graph


def _check_words(op: str, name: str, target: str, kwargs: Any) -> None:
    """Raises where a node is of another kind, or has code in the place of a name."""
    if op not in _NODES:
        raise NoValueError
    words = [name, *[key for key, _ in kwargs.get("dict", ())]]
    # The target of a call is looked up by `_function`, and never written as it is.
    if op != "call_function":
        words.append(target)
    if not all(map(_is_identifier, words)):
        raise NoValueError


def _is_identifier(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


# --- arguments ------------------------------------------------------------------------------------


def _plain(value: Any, positions: Mapping[fx.Node, int]) -> Any:
    """An argument of a node as JSON: a type that JSON lacks becomes ``{kind: value}``."""
    if type(value) in PLAIN:
        return value
    for types, encode in _ENCODERS:
        if isinstance(value, types):
            return encode(value, positions)
    # A mesh is written for the digest of a graph from Dynamo alone: it is not read.
    if is_mesh(value):
        return {"mesh": described(value)}
    return {"placement": _placement(value)}


def _placement(value: Any) -> list[Any]:
    encoded = encoded_placement(value)
    if encoded is None:
        raise NoValueError
    return encoded


def _plain_list(value: Sequence[Any], positions: Mapping[fx.Node, int]) -> list[Any]:
    return [_plain(item, positions) for item in value]


def _plain_dict(value: Mapping[Any, Any], positions: Mapping[fx.Node, int]) -> Any:
    pairs = [_plain_list(pair, positions) for pair in value.items()]
    return {"dict": pairs}


def _plain_slice(value: slice, positions: Mapping[fx.Node, int]) -> Any:
    return {"slice": _plain_list((value.start, value.stop, value.step), positions)}


def _plain_device(value: torch.device, positions: Mapping[fx.Node, int]) -> Any:
    if value.type not in (*DEVICE_TYPES, "meta"):
        raise NoValueError
    return {"device": device_name(value)}


def device_name(device: torch.device) -> str:
    """The name of a device; the current GPU's is `_CURRENT`."""
    is_current = device.type == "cuda" and device.index == torch.cuda.current_device()
    return _CURRENT if is_current else str(device)


def _device(name: str) -> torch.device:
    """The device of a name."""
    if name == _CURRENT:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


_Encoder = Callable[[Any, Mapping[fx.Node, int]], Any]
# How arguments are written, by their types: the first that fits.
_ENCODERS: tuple[tuple[type | tuple[type, ...], _Encoder], ...] = (
    (fx.Node, lambda value, positions: {"node": positions[value]}),
    (list, _plain_list),
    (tuple, lambda value, positions: {"tuple": _plain_list(value, positions)}),
    (dict, _plain_dict),
    (slice, _plain_slice),
    (_OF_TORCH, lambda value, positions: {"torch": str(value).removeprefix("torch.")}),
    (torch.device, _plain_device),
    (type(Ellipsis), lambda value, positions: {"ellipsis": None}),
)


def _value(content: Any, nodes: Sequence[fx.Node]) -> Any:
    """An argument from JSON; a kind that no captured graph contains is refused.

    Args:
        content: the result of `_plain`.
        nodes: the nodes so far, by their positions.
    """
    if isinstance(content, list):
        return _value_list(content, nodes)
    if not isinstance(content, dict):
        return content
    [(kind, inner)] = content.items()
    if kind not in _DECODERS:
        raise NoValueError
    return _DECODERS[kind](inner, nodes)


def _value_list(content: Sequence[Any], nodes: Sequence[fx.Node]) -> list[Any]:
    return [_value(item, nodes) for item in content]


def _value_dict(pairs: Sequence[Any], nodes: Sequence[fx.Node]) -> dict[Any, Any]:
    return {_value(key, nodes): _value(item, nodes) for key, item in pairs}


def _value_torch(name: str, nodes: Sequence[fx.Node]) -> Any:
    """A dtype, layout or memory format by its name: any other attribute of `torch` is refused."""
    constant = getattr(torch, name)
    if not isinstance(constant, _OF_TORCH):
        raise NoValueError
    return constant


# How arguments are read, by their kinds. Slices and ellipses are only in graphs from Dynamo, which
# are written for their digest alone.
_DECODERS: dict[str, Callable[[Any, Sequence[fx.Node]], Any]] = {
    "node": lambda position, nodes: nodes[position],
    "tuple": lambda items, nodes: tuple(_value_list(items, nodes)),
    "dict": _value_dict,
    "device": lambda name, nodes: _device(name),
    "placement": lambda words, nodes: decoded_placement(*words),
    "torch": _value_torch,
}


# --- functions ------------------------------------------------------------------------------------


def name_of_function(function: Any) -> str:
    """A name that no other function has, in any process."""
    for name, known in _FUNCTIONS.items():
        if known is function:
            return name
    if isinstance(function, OPERATORS):
        return _name_of_operator(function)
    if conversion(function):
        return json.dumps([conversion(function), _plain(parameters_of(function), {})])
    if _has_importable_name(function):
        return _importable_name(function)
    raise NoValueError


def _name_of_operator(function: Any) -> str:
    name = str(function)
    if _is_in_known_namespace(name) or is_grouped(function):
        return name
    raise NoValueError


def _is_in_known_namespace(name: str) -> bool:
    """Whether an operator is one of PyTorch's or of this package's, by its name."""
    return name.partition(".")[0] in _NAMESPACES


def _importable_name(function: Any) -> str:
    module = function.__module__
    # A name counts only if it leads back to the function: `F.max_pool1d` and `F.max_pool2d` have
    # the same qualified name. For some of PyTorch's functions it is the one name, for some the
    # other.
    for path in (function.__qualname__, function.__name__):
        if _at(sys.modules.get(module), path) is function:
            return f"{module}:{path}"
    raise NoValueError


def _has_importable_name(function: Any) -> bool:
    """Whether a function is one that a capture may call, and that is no operator."""
    if is_pure(function) or function in AUTOCASTS:
        return True
    return getattr(function, "__name__", "") in WITHOUT_EFFECT


def _at(value: Any, path: str) -> Any:
    """The attribute of a value by a dotted path; None if there is none."""
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def restorable_name(function: Any) -> str:
    """The name of a function of a captured graph, by which `_function` finds it."""
    name = name_of_function(function)
    if _function(name) is not function:
        raise NoValueError
    return name


def _function(name: str) -> Any:
    """The function of a name in a file: one of `_FUNCTIONS`, or an operator of `_NAMESPACES`."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if not _is_in_known_namespace(name):
        raise NoValueError
    function = _at(torch.ops, name)
    # A path may go on behind an operator, to any object: only an operator is accepted.
    if not isinstance(function, OPERATORS):
        raise NoValueError
    return function


# --- functions of DTensors ------------------------------------------------------------------------


def _name_on_dtensors(function: OnDTensors, positions: Mapping[Any, int]) -> dict[str, Any]:
    """A function of DTensors as JSON, by which `_on_dtensors` finds or makes it.

    Args:
        function: the function.
        positions: the positions of nodes in the graph from Dynamo, by their targets.
    """
    if isinstance(function, OfShards):
        return {type(function).__name__: _plain_list(function.parameters, {})}
    called = function.function
    if called in positions:  # a function of Dynamo's, which holds a mesh
        return {"at": positions[called]}
    if isinstance(called, OPERATORS):
        return {"operator": restorable_name(called)}
    name = conversion(called)
    if _method(name) is not called:
        raise NoValueError
    return {"method": name}


def _called(target: Any, targets: Sequence[Any]) -> Any:
    """The function of a node, from its name; see `graph_of`."""
    if isinstance(target, str):
        return _function(target)
    [(kind, content)] = target.items()
    if kind in _OF_SHARDS:
        return _OF_SHARDS[kind](*_value_list(content, ()))
    return OnDTensors(_FUNCTIONS_ON_DTENSORS[kind](content, targets))


def _at_position(position: int, targets: Sequence[Any]) -> Any:
    """A function of the graph from Dynamo: one that converts DTensors."""
    if not conversion(targets[position]):
        raise NoValueError
    return targets[position]


def _method(name: str) -> Any:
    """The method of DTensors with a name."""
    from torch.distributed.tensor import DTensor

    if name not in CONVERSIONS:
        raise NoValueError
    return getattr(DTensor, name)


_OF_SHARDS: dict[str, Callable[..., Any]] = {"FromLocal": FromLocal, "ToLocal": ToLocal}
_FUNCTIONS_ON_DTENSORS: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "at": _at_position,
    "operator": lambda name, targets: _function(name),
    "method": lambda name, targets: _method(name),
}
