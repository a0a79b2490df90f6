"""Stores fused graphs on disk, so that later processes neither capture nor plan them.

A file belongs to a graph of Dynamo. Its name is a digest of the nodes with their arguments, the
metadata of the inputs, the settings of PyTorch that a capture reads, and the versions. Where any of
that may differ in another process (a size that is a symbol, an operator of another library, a
function of the user's), nothing is stored.

    first process     Dynamo's graph ──▶ capture, plan ──▶ JSON ──▶ decoded graph ──▶ Inductor
                                                            │
    later processes   Dynamo's graph ────────────────────▶ file ──▶ decoded graph ──▶ Inductor

The process that stores a graph compiles the stored form, too, so that the keys of Inductor's caches
are the same in later processes.
"""

from __future__ import annotations

import json
import keyword
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from ..compiler import storing
from ..compiler.operator import Program
from ..core.compat.fake import memory_of
from ..core.configs import cache
from ..core.launches import launch
from .capture import WITHOUT_EFFECT, copy_metadata
from .fx import (
    AUTOCASTS,
    CHECKPOINTED,
    GRAD_MODES,
    OPERATORS,
    attention_order,
    is_pure,
    is_traceable_subclass,
)
from .grouped import is_grouped
from .products import PADDED
from .programs import Source
from .regions import are_numbers

__all__ = ["read", "stored_at", "write"]

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
# The namespaces of PyTorch's operators and this package's. An operator of another library may
# change without a change of its name: only the one that grouped.py replaces may be in a graph from
# Dynamo.
_NAMESPACES = frozenset({"aten", "prims", "fusedops"})
# The functions in captured graphs that are no operators.
_FUNCTIONS = {
    "getitem": operator.getitem,
    "dropout": F.dropout,
    "tensor": torch.tensor,
    "checkpointed": CHECKPOINTED,
    **{f"grad_mode{number}": mode for number, mode in enumerate(GRAD_MODES)},
}
_KINDS = ("cpu", "cuda")
# The kinds of nodes of captured graphs.
_NODES = ("placeholder", "get_attr", "call_function", "output")
# Marks of nodes that are read after the capture, with the types of their values.
_MARKS: dict[str, Callable[[Any], Any]] = {PADDED: bool, "recompute": CheckpointPolicy}


class _NoValueError(Exception):
    """Something that is not the same in another process."""


def stored_at(gm: fx.GraphModule, inputs: Sequence[Any]) -> Path | None:
    """The file of a graph from Dynamo; None if a part of it cannot be written as text."""
    if getattr(torch.compiler.config, "force_disable_caches", False):
        return None
    try:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        text = [*_settings(), *map(_input, inputs), _sharing(tensors), *_text(gm)]
        return cache.file_of("graphs", text)
    # A graph with an unknown part is captured in each process.
    except Exception:  # noqa: BLE001
        return None


def read(path: Path, gm: fx.GraphModule) -> fx.GraphModule | None:
    """The graph in a file, with the inputs and tensors of Dynamo's; None without a usable file."""
    try:
        return _restored(json.loads(cache.opened(path.read_text())), gm)
    except Exception:  # noqa: BLE001 - whatever is wrong with a file, its graph is captured again
        return None


def write(
    path: Path, gm: fx.GraphModule, captured: fx.GraphModule, programs: Iterable[Program]
) -> fx.GraphModule:
    """Stores a graph with operators.

    Args:
        path: of the file.
        gm: the graph from Dynamo.
        captured: the graph with operators.
        programs: the operators of its regions.
    Returns:
        The graph as later processes will read it, or unchanged if it cannot be stored.
    """
    try:
        encoded_programs = {program.name: _program(program) for program in programs}
        text = json.dumps(_encoded(gm, captured) | {"programs": encoded_programs})
        # From the text, so that this process compiles what later ones will read.
        restored = _restored(json.loads(text), gm)
        cache.replace(path, cache.sealed(text))
    except Exception:  # noqa: BLE001 - then it is captured in each process
        return captured
    return restored


def _restored(encoded: Any, gm: fx.GraphModule) -> fx.GraphModule:
    """A graph from JSON. Its programs are registered, as its nodes name their operators."""
    for name, parts in encoded["programs"].items():
        structure = storing.decoded(parts["structure"])
        source = Source(_graph(parts["nodes"]), parts["places"], structure, parts["kept"])
        if source.program.name != name:
            raise _NoValueError
    return _decoded(encoded, gm)


# --- the key of a graph ---------------------------------------------------------------------------


def _settings() -> list[str]:
    """The settings on which a capture and its fusions depend, besides the graph.

    A graph may create tensors on devices that none of its inputs is on, and call einops.
    """
    settings: list[Any] = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.mkldnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        attention_order(),
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        torch.backends.cudnn.version(),
        torch.backends.opt_einsum.is_available(),
        torch.backends.opt_einsum.enabled,
        torch.backends.opt_einsum.strategy,
        torch.backends.cpu.get_cpu_capability(),
        getattr(sys.modules.get("einops"), "__version__", ""),
    ]
    for kind in _KINDS:
        settings += [
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            launch.runs_kernels(kind),
        ]
    if torch.cuda.is_initialized():
        indices = range(torch.cuda.device_count())
        settings += [
            torch.cuda.current_device(),
            [torch.cuda.get_device_name(index) for index in indices],
            [torch.cuda.get_device_capability(index) for index in indices],
        ]
    return list(map(repr, settings))


def _text(gm: fx.GraphModule) -> list[str]:
    """A graph, and the bodies of its checkpointed parts, as text."""
    # A function that decides which operators are computed again has no text.
    if "_checkpoint_context_fn" in gm.meta:
        raise _NoValueError
    # Tensors that the graph holds are described like inputs: their elements may change.
    text, tensors = [json.dumps(_nodes(gm.graph, _named))], list[Tensor]()
    for node in gm.graph.find_nodes(op="get_attr"):
        attribute = _attribute(gm, node.target)
        if isinstance(attribute, fx.GraphModule):
            text += _text(attribute)
        else:
            tensors.append(attribute)
    return [*text, *map(_input, tensors), _sharing(tensors)]


def _attribute(gm: fx.GraphModule, name: Any) -> Any:
    return operator.attrgetter(name)(gm)


def _input(value: Any) -> str:
    """An input of a graph as text: of a tensor its metadata, not its elements."""
    if type(value) in _PLAIN:
        return repr(value)
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    # Subclasses, sparse and nested tensors have more than is described here.
    if not is_plain or is_traceable_subclass(value) or value.device.type not in _KINDS:
        raise _NoValueError
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not are_numbers(numbers):
        raise _NoValueError
    return repr(
        (
            numbers,
            value.dtype,
            value.device,
            value.requires_grad,
            value.is_leaf,
            value.is_conj(),
            value.is_neg(),
            value.is_inference(),
        )
    )


def _sharing(tensors: Sequence[Tensor]) -> str:
    """Which tensors share memory: for each, the position of the first with its memory."""
    first: dict[Any, int] = {}
    owners = [
        first.setdefault(memory_of(tensor), position) for position, tensor in enumerate(tensors)
    ]
    return repr(owners)


# --- graphs as JSON -------------------------------------------------------------------------------


def _encoded(gm: fx.GraphModule, captured: fx.GraphModule) -> dict[str, Any]:
    """A captured graph as JSON, with the names of the tensors and bodies that it holds.

    They are not stored: `_decoded` reads them from the attributes of Dynamo's graph.

    Args:
        gm: the graph from Dynamo.
        captured: the captured graph.
    """
    names = [node.target for node in gm.graph.find_nodes(op="get_attr")]
    by_target = {name.replace(".", "_"): name for name in names}
    held: dict[str, Any] = {}
    for node in captured.graph.find_nodes(op="get_attr"):
        if node.target not in by_target:
            raise _NoValueError
        name = by_target[node.target]
        held[node.target] = {"name": name}
        attribute = _attribute(captured, node.target)
        if isinstance(attribute, fx.GraphModule):
            held[node.target]["body"] = _encoded(_attribute(gm, name), attribute)
    return {"nodes": _nodes(captured.graph, _restorable_name), "held": held}


def _decoded(encoded: Any, gm: fx.GraphModule) -> fx.GraphModule:
    """A captured graph from JSON, with the tensors and bodies of the graph from Dynamo."""
    held: dict[str, Any] = {}
    names = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for target, attribute in encoded["held"].items():
        if attribute["name"] not in names:
            raise _NoValueError
        own = _attribute(gm, attribute["name"])
        held[target] = _decoded(attribute["body"], own) if "body" in attribute else own
    decoded = fx.GraphModule(held, _graph(encoded["nodes"]))
    copy_metadata(gm, decoded)
    return decoded


def _program(program: Program) -> dict[str, Any]:
    """A program as JSON."""
    source = program.function
    assert isinstance(source, Source)
    return {
        "structure": storing.encoded(source.structure),
        "kept": source.kept,
        "places": source.places,
        "nodes": _nodes(source.graph, _restorable_name),
    }


def _nodes(graph: fx.Graph, name: Callable[[Any], str]) -> list[Any]:
    """For each node its operator, name, target, arguments and marks.

    Args:
        graph: the graph.
        name: returns the name of a function.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        target = name(node.target) if node.op == "call_function" else node.target
        args, kwargs = _plain(node.args, positions), _plain(node.kwargs, positions)
        marks = {key: getattr(node.meta[key], "value", True) for key in _MARKS if key in node.meta}
        nodes.append([node.op, node.name, target, args, kwargs, marks])
    return nodes


def _graph(encoded: Any) -> fx.Graph:
    """A graph from JSON.

    FX writes names and targets into source that is executed: a file must not contain code there.
    They are identifiers, and so are keywords of calls.
    """
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs, marks in encoded:
        if op not in _NODES:
            raise _NoValueError
        words = [name, *[key for key, _ in kwargs.get("dict", ())]]
        if op != "call_function":
            words.append(target)
        if not all(word.isidentifier() and not keyword.iskeyword(word) for word in words):
            raise _NoValueError
        called = _function(target) if op == "call_function" else target
        node = graph.create_node(op, called, _value(args, nodes), _value(kwargs, nodes), name)
        node.meta.update({key: _MARKS[key](mark) for key, mark in marks.items()})
        nodes.append(node)
    return graph


def _plain(value: Any, positions: Mapping[fx.Node, int]) -> Any:
    """An argument of a node as JSON: a type that JSON lacks becomes ``{kind: value}``."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, fx.Node):
        return {"node": positions[value]}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, positions) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        pairs = [[_plain(key, positions), _plain(item, positions)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return {"slice": [_plain(bound, positions) for bound in bounds]}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and value.type in (*_KINDS, "meta"):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": None}
    raise _NoValueError


def _value(encoded: Any, nodes: Sequence[fx.Node]) -> Any:
    """An argument from JSON; a kind that no captured graph contains is refused.

    Args:
        encoded: from `_plain`.
        nodes: the nodes so far, by their positions.
    """
    if isinstance(encoded, list):
        return [_value(item, nodes) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    [(kind, inner)] = encoded.items()
    if kind == "node":
        return nodes[inner]
    if kind == "tuple":
        return tuple([_value(item, nodes) for item in inner])
    if kind == "dict":
        return {_value(key, nodes): _value(item, nodes) for key, item in inner}
    if kind == "device":
        return torch.device(inner)
    if kind == "torch":
        constant = getattr(torch, inner)
        if isinstance(constant, _OF_TORCH):
            return constant
    raise _NoValueError


def _named(function: Any) -> str:
    """A name that no other function has, in any process."""
    for name, known in _FUNCTIONS.items():
        if known is function:
            return name
    if isinstance(function, OPERATORS):
        name = str(function)
        if name.partition(".")[0] in _NAMESPACES or is_grouped(function):
            return name
    elif _has_importable_name(function):
        module = function.__module__
        # Neither of both names is that of all of PyTorch's functions.
        for path in (function.__qualname__, function.__name__):
            if _at(sys.modules.get(module), path) is function:
                return f"{module}:{path}"
    raise _NoValueError


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


def _restorable_name(function: Any) -> str:
    """The name of a function of a captured graph, by which `_function` finds it."""
    name = _named(function)
    if _function(name) is not function:
        raise _NoValueError
    return name


def _function(name: str) -> Any:
    """The function of a name in a file: one of `_FUNCTIONS`, or an operator of `_NAMESPACES`."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.partition(".")[0] not in _NAMESPACES:
        raise _NoValueError
    function = _at(torch.ops, name)
    if not isinstance(function, OPERATORS):
        raise _NoValueError
    return function
