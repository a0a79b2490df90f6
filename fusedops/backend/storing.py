"""Stores fused graphs on disk, so that later processes neither capture nor plan them.

A file belongs to a graph of Dynamo. Its name is a digest of the nodes with their arguments, the
metadata of the inputs, the settings of PyTorch that a capture reads, and the versions. The ranks of
a mesh have one file, which the first writes and the others read: the name depends on the shape of
the mesh, and not on the rank. Where ranks have different shards or dropout masks, each coordinate
of the mesh has a file. Where any of
that may differ in another process (a size that is a symbol, an operator of another library, a
function of the user's), nothing is stored.

    first process     Dynamo's graph ──▶ capture, plan ──▶ JSON ──▶ decoded graph ──▶ Inductor
                                                            │
    later processes   Dynamo's graph ────────────────────▶ file ──▶ decoded graph ──▶ Inductor

The process that stores a graph compiles the stored form, too, so that the keys of Inductor's caches
are the same in later processes.

No code in a file is executed: `encoding` accepts only names of operators, and identifiers. The
checksum detects incomplete files. A file with unexpected content is ignored, and its graph is
captured again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler import storing
from ..compiler.horizontal.lookups import Lookup
from ..compiler.horizontal.operator import SliceGroup, group_of
from ..compiler.operator import Program
from ..core.compat.distributed import (
    handled_operators,
    is_dtensor,
    is_mesh,
    local_of,
    replicates_implicitly,
)
from ..core.compat.fake import memory_of
from ..core.configs import cache
from ..core.launches import launch
from .encoding import (
    DEVICE_TYPES,
    PLAIN,
    NoValueError,
    attribute,
    decoded,
    device_name,
    encoded,
    graph_of,
    name_of_function,
    nodes_of,
    restorable_name,
)
from .fx import attention_order, is_traceable_subclass
from .graphs import OF_RANK, are_numbers, direct_tensors
from .horizontal import groups_in
from .meshes import described, encoded_placement, meshes_of
from .options import INDUCTOR
from .prediction import machine_of
from .programs import InputKinds, Source

__all__ = [
    "caches_are_off",
    "depends_on_rank",
    "encoded_program",
    "of_rank",
    "read",
    "source_in",
    "stored_at",
    "write",
]


def caches_are_off() -> bool:
    """Whether the user has switched all caches of compiled code off."""
    return bool(getattr(torch.compiler.config, "force_disable_caches", False))


def stored_at(
    gm: fx.GraphModule, inputs: Sequence[Any], rest: str = INDUCTOR, choice: str = ""
) -> Path | None:
    """The file of a graph from Dynamo; None if a part of it cannot be written as text.

    Args:
        gm: the graph.
        inputs: its inputs.
        rest: what runs the part of it that is in no region: see `options`.
        choice: how regions are chosen: see `measuring.choice`.
    """
    if caches_are_off():
        return None
    try:
        tensors = direct_tensors(list(inputs))
        _check_meshes(meshes_of(gm.graph, inputs))
        text = [rest, choice, *_settings(), *map(_input, inputs), _sharing(tensors), *_text(gm)]
        return cache.file_of("graphs", text)
    # A graph with an unknown part is captured in each process.
    except Exception:  # noqa: BLE001
        return None


def of_rank(path: Path, gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Path]:
    """The file of a graph that differs between the coordinates of its meshes; [] without meshes.

    Args:
        path: the file of a graph that is the same on all ranks.
        gm: the graph from Dynamo.
        inputs: its inputs.
    """
    meshes = meshes_of(gm.graph, inputs)
    if not meshes:
        return []
    coordinates = [(described(mesh), mesh.get_coordinate()) for mesh in meshes]
    digest = hashlib.sha256(repr((path.stem, coordinates)).encode()).hexdigest()
    return [path.with_stem(digest[:32])]


def depends_on_rank(captured: fx.GraphModule) -> bool:
    """Whether a graph with operators, or a checkpointed part, may be another on other ranks."""
    graphs = [module for module in captured.modules() if isinstance(module, fx.GraphModule)]
    return any(OF_RANK in graph.meta for graph in graphs)


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
        path: the path of the file.
        gm: the graph from Dynamo.
        captured: the graph with operators.
        programs: the operators of its regions.
    Returns:
        The graph as later processes will read it, or unchanged if it cannot be stored.
    """
    try:
        encoded_programs = {program.name: encoded_program(program) for program in programs}
        groups = {group.name: _group(group) for group in groups_in(captured.graph)}
        operators = {"programs": encoded_programs, "groups": groups}
        text = json.dumps(encoded(gm, captured) | operators)
        # This process compiles the graph that later ones will read, so it decodes the text. For a
        # graph of T5-base (1,700 nodes) this takes 0.14 s; to capture and plan it takes 2.9 s.
        restored = _restored(json.loads(text), gm)
        cache.replace(path, cache.sealed(text))
    except Exception:  # noqa: BLE001 - then it is captured in each process
        return captured
    return restored


def encoded_program(program: Program) -> dict[str, Any]:
    """A region's program as JSON.

    Raises:
        NoValueError: a part of it cannot be written as text.
    """
    source = program.function
    assert isinstance(source, Source)
    return {
        "structure": storing.encoded(source.structure),
        "kinds": source.kinds,
        "output_numbers": source.output_numbers,
        "nodes": nodes_of(source.graph, restorable_name),
    }


def source_in(parts: Any) -> Source:
    """The source of a program from JSON."""
    structure = storing.decoded(parts["structure"])
    graph = graph_of(parts["nodes"])
    kinds = InputKinds(*map(tuple, parts["kinds"]))
    return Source(graph, parts["output_numbers"], structure, kinds)


def _group(group: SliceGroup) -> dict[str, Any]:
    """An operator of many slices as JSON."""
    return {
        "programs": [program.name for program in group.programs],
        "inputs": group.inputs,
        "results": group.results,
        "lookups": list(group.lookups.values()),
    }


def _restored(content: Any, gm: fx.GraphModule) -> fx.GraphModule:
    """A graph from JSON.

    Its programs are registered first, because its nodes refer to their operators by name.
    """
    programs: dict[str, Program] = {}
    for name, parts in content["programs"].items():
        source = source_in(parts)
        # The name is a digest: a program of another name is not the one that was stored.
        programs[name] = source.program
        if source.program.name != name:
            raise NoValueError
    for name, parts in content["groups"].items():
        chosen = [programs[program] for program in parts["programs"]]
        lookups = [_lookup(*fields) for fields in parts["lookups"]]
        if group_of(chosen, parts["inputs"], parts["results"], lookups).name != name:
            raise NoValueError
    return decoded(content, gm)


def _lookup(index: int, dtype: str, rows: list[int], padding: list[int]) -> Lookup:
    """A lookup from JSON, which has lists in place of tuples."""
    return Lookup(index, dtype, tuple(rows), tuple(padding))


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
        device_name(torch.get_default_device()),
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
    for kind in DEVICE_TYPES:
        settings += [
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            launch.runs_kernels(kind),
        ]
    if torch.cuda.is_initialized():
        settings += _settings_of_gpus()
    return list(map(repr, settings))


def _settings_of_gpus() -> list[Any]:
    """What captures read of all GPUs, and predictions of the current one.

    Without its index: the processes of one machine share what is stored.
    """
    indices = range(torch.cuda.device_count())
    names = list(map(torch.cuda.get_device_name, indices))
    capabilities = list(map(torch.cuda.get_device_capability, indices))
    return [names, capabilities, machine_of(torch.cuda.current_device())]


def _text(gm: fx.GraphModule) -> list[str]:
    """A graph, and the bodies of its checkpointed parts, as text."""
    # A function that decides which operators are computed again has no text.
    if "_checkpoint_context_fn" in gm.meta:
        raise NoValueError
    # Tensors that the graph holds are described like inputs: their elements may change.
    text, tensors = [json.dumps(nodes_of(gm.graph, name_of_function))], list[Tensor]()
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute(gm, node.target)
        if isinstance(value, fx.GraphModule):
            text += _text(value)
        else:
            tensors.append(value)
    return [*text, *map(_input, tensors), _sharing(tensors)]


def _input(value: Any) -> str:
    """An input of a graph as text: of a tensor its metadata, not its elements."""
    if type(value) in PLAIN:
        return repr(value)
    if is_mesh(value):
        return repr(described(value))
    if is_dtensor(value):
        return _dtensor(value)
    if not isinstance(value, Tensor) or not _is_described(value):
        raise NoValueError
    return _metadata(value)


def _dtensor(value: Any) -> str:
    """A DTensor as text: its layout, and its metadata with those of its local tensor."""
    placements = list(map(encoded_placement, value.placements))
    if None in placements:
        raise NoValueError
    rules = [handled_operators(), replicates_implicitly()]
    layout = [described(value.device_mesh), placements, rules]
    return repr((layout, _metadata(value), _input(local_of(value))))


def _check_meshes(meshes: Sequence[Any]) -> None:
    """Raises where the text of two meshes is the same, so that one might pass for the other."""
    texts = {repr(described(mesh)) for mesh in meshes}
    if len(texts) != len(meshes):
        raise NoValueError


def _metadata(value: Tensor) -> str:
    """The metadata of a tensor as text."""
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    # A size that is a symbol may be another one in the next process.
    if not are_numbers(numbers):
        raise NoValueError
    return repr(
        (
            numbers,
            value.dtype,
            device_name(value.device),
            value.requires_grad,
            value.is_leaf,
            value.is_conj(),
            value.is_neg(),
            value.is_inference(),
        )
    )


def _is_described(tensor: Tensor) -> bool:
    """Whether `_input` describes all of a tensor: not of subclasses, sparse and nested tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if is_traceable_subclass(tensor):
        return False
    return tensor.device.type in DEVICE_TYPES


def _sharing(tensors: Sequence[Tensor]) -> str:
    """A text of the tensors that share memory: for each, the index of the first with its memory."""
    first: dict[Any, int] = {}
    owners = []
    for position, tensor in enumerate(tensors):
        owners.append(first.setdefault(memory_of(tensor), position))
    return repr(owners)
