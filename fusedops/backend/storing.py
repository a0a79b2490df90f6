"""Fused graphs on disk, so that a process after the first neither captures nor plans them.

A file belongs to a graph of Dynamo: to its nodes with their arguments, to what is known of its inputs, to the settings of
PyTorch that a capture reads, and to the versions. Where any of that need not be the same in another process (a size that is a
symbol, an operator of another library, a function of the user's), nothing is stored.

The process that stores a graph compiles the stored form, too, so that the keys of Inductor's caches are the same in later
processes.
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
from ..core import cache, compat, launch
from .capture import WITHOUT_EFFECT, handed_on
from .grouped import is_grouped
from .products import PADDED
from .programs import Source

__all__ = ["read", "stored_at", "write"]

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
# Operators of PyTorch and of this package: one of another library may change without a change of its name. Only the one that
# grouped.py replaces may be in a graph from Dynamo.
_NAMESPACES = frozenset({"aten", "prims", "fusedops"})
# The functions of captured graphs that are no operators.
_FUNCTIONS = {"getitem": operator.getitem, "dropout": F.dropout, "tensor": torch.tensor, "checkpointed": compat.CHECKPOINTED,
              **{f"grad_mode{number}": mode for number, mode in enumerate(compat.GRAD_MODES)}}  # fmt: skip
_KINDS = ("cpu", "cuda")
# The kinds of nodes of captured graphs.
_NODES = ("placeholder", "get_attr", "call_function", "output")
# Marks of nodes that are read after the capture.
_MARKS: dict[str, Callable[[Any], Any]] = {PADDED: bool, "recompute": CheckpointPolicy}


class _NoValueError(Exception):
    """Something that is not the same in another process."""


def stored_at(gm: fx.GraphModule, inputs: Sequence[Any]) -> Path | None:
    """The file of a graph from Dynamo; None if something in it cannot be written as text."""
    if getattr(torch.compiler.config, "force_disable_caches", False):
        return None
    try:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        return cache.file_of("graphs", [*_settings(), *map(_input, inputs), _sharing(tensors), *_text(gm)])
    except Exception:  # noqa: BLE001 - a graph in which something is unknown is captured in each process
        return None


def read(path: Path, gm: fx.GraphModule) -> fx.GraphModule | None:
    """The graph that is stored there, with the inputs and tensors of the one from Dynamo; None without a usable one."""
    try:
        return _restored(json.loads(cache.opened(path.read_text())), gm)
    except Exception:  # noqa: BLE001 - whatever is wrong with a file, its graph is captured again
        return None


def write(path: Path, gm: fx.GraphModule, made: fx.GraphModule, programs: Iterable[Program]) -> fx.GraphModule:
    """Stores a graph with operators, and returns it as later processes will read it, or unchanged if it cannot be stored.

    Args:
        path: of the file.
        gm: the graph from Dynamo.
        made: what was made of it.
        programs: the operators of its regions.
    """
    try:
        found = _encoded(gm, made) | {"programs": {program.name: _program(program) for program in programs}}
        text = json.dumps(found)
        restored = _restored(json.loads(text), gm)
        cache.replace(path, cache.sealed(text))
    except Exception:  # noqa: BLE001 - then it is captured in each process
        return made
    return restored


def _restored(found: Any, gm: fx.GraphModule) -> fx.GraphModule:
    for name, parts in found["programs"].items():
        structure = storing.decoded(parts["structure"])
        source = Source(_graph(parts["nodes"]), parts["places"], structure, parts["kept"])
        if source.program.name != name:
            raise _NoValueError
    return _decoded(found, gm)


# --- what a graph is ----------------------------------------------------------------------------------------------------


def _settings() -> list[str]:
    """What decides, beside the graph, which operators it dispatches to, and which of them are fused.

    A graph may make tensors on devices that none of its inputs is on, and call einops.
    """
    found: list[Any] = [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(), compat.attention_order(),
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(), torch.backends.cudnn.version(),
        torch.backends.opt_einsum.is_available(), torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy,
        torch.backends.cpu.get_cpu_capability(), getattr(sys.modules.get("einops"), "__version__", ""),
    ]  # fmt: skip
    for kind in _KINDS:
        found += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), launch.runs_kernels(kind)]
    if torch.cuda.is_initialized():
        indices = range(torch.cuda.device_count())
        found += [torch.cuda.current_device(), [torch.cuda.get_device_name(index) for index in indices],
                  [torch.cuda.get_device_capability(index) for index in indices]]  # fmt: skip
    return list(map(repr, found))


def _text(gm: fx.GraphModule) -> list[str]:
    """A graph, and the bodies of its checkpointed parts, in words."""
    if "_checkpoint_context_fn" in gm.meta:  # a function decides which operators are computed again, and has no text
        raise _NoValueError
    found, tensors = [json.dumps(_nodes(gm.graph, _named))], list[Tensor]()
    for node in gm.graph.find_nodes(op="get_attr"):
        held = _attribute(gm, node.target)
        if isinstance(held, fx.GraphModule):
            found += _text(held)
        else:
            tensors.append(held)
    return [*found, *map(_input, tensors), _sharing(tensors)]


def _attribute(gm: fx.GraphModule, name: Any) -> Any:
    return operator.attrgetter(name)(gm)


def _input(value: Any) -> str:
    if type(value) in _PLAIN:
        return repr(value)
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    if not is_plain or compat.is_traceable_subclass(value) or value.device.type not in _KINDS:
        raise _NoValueError
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(number) is int for number in numbers):
        raise _NoValueError
    return repr((numbers, value.dtype, value.device, value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(),
                 value.is_inference()))  # fmt: skip


def _sharing(tensors: Sequence[Tensor]) -> str:
    """Which tensors share memory: for each, the place of the first with its memory."""
    first: dict[Any, int] = {}
    return repr([first.setdefault(compat.memory_of(tensor), place) for place, tensor in enumerate(tensors)])


# --- graphs as JSON -----------------------------------------------------------------------------------------------------


def _encoded(gm: fx.GraphModule, made: fx.GraphModule) -> dict[str, Any]:
    """A graph with what it holds: tensors and bodies of the graph from Dynamo, named as in that graph."""
    own = {node.target.replace(".", "_"): node.target for node in gm.graph.find_nodes(op="get_attr")}
    held: dict[str, Any] = {}
    for node in made.graph.find_nodes(op="get_attr"):
        if node.target not in own:
            raise _NoValueError
        one, name = _attribute(made, node.target), own[node.target]
        body = {"body": _encoded(_attribute(gm, name), one)} if isinstance(one, fx.GraphModule) else {}
        held[node.target] = {"name": name} | body
    return {"nodes": _nodes(made.graph, _found_again), "held": held}


def _decoded(found: Any, gm: fx.GraphModule) -> fx.GraphModule:
    held: dict[str, Any] = {}
    names = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for target, one in found["held"].items():
        if one["name"] not in names:
            raise _NoValueError
        own = _attribute(gm, one["name"])
        held[target] = _decoded(one["body"], own) if "body" in one else own
    made = fx.GraphModule(held, _graph(found["nodes"]))
    handed_on(gm, made)
    return made


def _program(program: Program) -> dict[str, Any]:
    source = program.function
    assert isinstance(source, Source)
    return {"structure": storing.encoded(source.structure), "kept": source.kept, "places": source.places,
            "nodes": _nodes(source.graph, _found_again)}  # fmt: skip


def _nodes(graph: fx.Graph, name: Callable[[Any], str]) -> list[Any]:
    """Of each node its operator, name, target, arguments and marks; ``name`` is that of a function."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        target = name(node.target) if node.op == "call_function" else node.target
        marks = {key: getattr(node.meta[key], "value", True) for key in _MARKS if key in node.meta}
        found.append([node.op, node.name, target, _plain(node.args, places), _plain(node.kwargs, places), marks])
    return found


def _graph(found: Any) -> fx.Graph:
    """The graph. FX writes names and targets into source that is executed: they are identifiers, and so are keywords."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs, marks in found:
        words = [name, *(target,) * (op != "call_function"), *[key for key, _ in kwargs.get("dict", ())]]
        if op not in _NODES or not all(word.isidentifier() and not keyword.iskeyword(word) for word in words):
            raise _NoValueError
        called = _function(target) if op == "call_function" else target
        node = graph.create_node(op, called, _value(args, nodes), _value(kwargs, nodes), name)
        node.meta.update({key: _MARKS[key](mark) for key, mark in marks.items()})
        nodes.append(node)
    return graph


def _plain(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """An argument of a node as JSON: a type that JSON lacks becomes ``{kind: value}``."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, fx.Node):
        return {"node": places[value]}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, places) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, places), _plain(item, places)] for key, item in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_plain(item, places) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and value.type in (*_KINDS, "meta"):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": None}
    raise _NoValueError


def _value(found: Any, nodes: Sequence[fx.Node]) -> Any:
    if isinstance(found, list):
        return [_value(item, nodes) for item in found]
    if not isinstance(found, dict):
        return found
    [(kind, inner)] = found.items()
    if kind == "node":
        return nodes[inner]
    if kind == "tuple":
        return tuple([_value(item, nodes) for item in inner])
    if kind == "dict":
        return {_value(key, nodes): _value(item, nodes) for key, item in inner}
    if kind == "torch" and isinstance(named := getattr(torch, inner), _OF_TORCH):
        return named
    if kind == "device":
        return torch.device(inner)
    raise _NoValueError


def _named(function: Any) -> str:
    """A name that no other function has, in any process."""
    for name, known in _FUNCTIONS.items():
        if known is function:
            return name
    if isinstance(function, compat.OPERATORS):
        name = str(function)
        if name.partition(".")[0] in _NAMESPACES or is_grouped(function):
            return name
    elif (
        compat.is_pure(function) or function in compat.AUTOCASTS or getattr(function, "__name__", "") in WITHOUT_EFFECT
    ):
        module = function.__module__
        for path in (function.__qualname__, function.__name__):  # neither finds all of PyTorch's functions
            if _at(sys.modules.get(module), path) is function:
                return f"{module}:{path}"
    raise _NoValueError


def _at(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _found_again(function: Any) -> str:
    """The name of a function of a captured graph, by which `_function` finds it."""
    name = _named(function)
    if _function(name) is not function:
        raise _NoValueError
    return name


def _function(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.partition(".")[0] not in _NAMESPACES:
        raise _NoValueError
    found = _at(torch.ops, name)
    if not isinstance(found, compat.OPERATORS):
        raise _NoValueError
    return found
