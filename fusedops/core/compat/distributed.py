"""PyTorch's distributed modules: classes of FSDP, DTensors, and hooks of parallel styles."""

from __future__ import annotations

import copy
import functools
import os
import sys
from typing import Any

import torch
from torch import Tensor

from .lookup import imported

__all__ = [
    "FSDP",
    "default_store",
    "dtensor",
    "dtensor_spec",
    "group_of",
    "handled_operators",
    "has_other_ranks",
    "is_distributed",
    "is_dtensor",
    "is_launched_with_others",
    "is_mesh",
    "local_of",
    "replicates_implicitly",
    "sharded_class",
    "unsharded_class",
    "wait_for",
    "waited",
]


def default_store() -> Any:
    """Returns the key-value store of the default process group, which has no public name.

    Without the private function an AttributeError names it.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def group_of(name: str) -> Any:
    """Returns the process group of a name, which has no public name either."""
    module: Any = torch.distributed.distributed_c10d
    return module._resolve_process_group(name)


def has_other_ranks() -> bool:
    """Returns whether this process is one of several ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def is_launched_with_others() -> bool:
    """Returns whether a launcher has started this process as one of several ranks.

    Launchers such as torchrun tell each rank by its environment, before it makes a process group.
    """
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


# --- FSDP -----------------------------------------------------------------------------------------

# The prefixes of the qualified names of PyTorch's FSDP classes.
FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")
# The classes that `sharded_class` created, by the module's class, if FSDP's own table is missing.
_sharded_classes: dict[type, type] = {}


def unsharded_class(cls: Any) -> Any:
    """Returns the class that a module had before `fully_shard` changed it, from its class."""
    # `fully_shard` creates a class with the bases ``(FSDPModule, the module's class)``.
    bases = cls.__bases__
    return bases[1] if len(bases) == 2 and _is_of_fsdp(bases[0]) else cls


def _is_of_fsdp(cls: Any) -> bool:
    # Compared by name, because importing FSDP is slow, and the class is in different modules in
    # different releases.
    name = f"{cls.__module__}.{cls.__name__}"
    return name.startswith(FSDP) and name.endswith(".FSDPModule")


def sharded_class(sharded: Any, cls: Any) -> Any:
    """Returns the class that `fully_shard` would give to a module of class ``cls``.

    It is called when the class of a sharded module changes, here from LlamaDecoderLayer to ``cls``:

        class of the module    class under `fully_shard`
        LlamaDecoderLayer      FSDPLlamaDecoderLayer, which is ``sharded``
        ``cls``                the result, with the name and body of ``sharded``

    The result is also stored in FSDP's private table, because torch.compile's saved guards read the
    table. Without it, the table `_sharded_classes` is used.
    """
    table = imported("torch.distributed.fsdp._fully_shard._fully_shard", "cls_to_fsdp_cls")
    table = _sharded_classes if table is None else table
    table.setdefault(unsharded_class(sharded), sharded)
    if cls not in table:
        # Each class has its own two of these, which `type` creates.
        body = dict(vars(sharded))
        body.pop("__dict__", None)
        body.pop("__weakref__", None)
        table[cls] = type(cls)(sharded.__name__, (sharded.__bases__[0], cls), body)
    return table[cls]


# --- DTensors -------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a DTensor."""
    # The module is not imported here: until something imports it, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_mesh(value: Any) -> bool:
    """Returns whether a value is a mesh of devices."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, module.DeviceMesh)


def local_of(t: Tensor) -> Tensor:
    """Returns the local tensor that a DTensor holds, and another tensor as it is.

    ``DTensor.to_local`` returns a view of it. Without the private attribute the result is the
    DTensor itself: calls on DTensors are then not recognised as calls on local tensors.
    """
    return getattr(t, "_local_tensor", t) if is_dtensor(t) else t


def wait_for(t: Any) -> None:
    """Replaces the local tensor of a DTensor by the one that a collective fills, once it has ended.

    Without the private attribute nothing happens.
    """
    if is_dtensor(t) and hasattr(t, "_local_tensor"):
        t._local_tensor = waited(t._local_tensor)


def is_distributed(module: torch.nn.Module) -> bool:
    """Returns whether `distribute_module` registered hooks on a module.

    If PyTorch no longer sets the private attribute, the result is always False. Then a module's
    plain arguments are not converted to DTensors, and PyTorch raises an error for the mixture.
    """
    return "_distribute_module_applied" in module.__dict__


def replicates_implicitly() -> bool:
    """Returns whether ``implicit_replication`` is on; False without the private name."""
    # `sys.modules` instead of an import, which is slow: a process with DTensors has imported it.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


def handled_operators() -> list[str]:
    """Returns the operators on DTensors with handlers of their own; [] without the private name.

    `loss_parallel` adds some, whose results have other placements.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return sorted(map(str, getattr(dispatcher, "_custom_op_handlers", ())))


@functools.cache
def _dtensor_parts() -> Any:
    """Returns the classes of DTensors, of their layouts, and of the whole tensors' sizes.

    Returns None without the private names, or if the classes take other arguments than are passed
    here.
    """
    kind = imported("torch.distributed.tensor", "DTensor")
    spec = imported("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
    meta = imported("torch.distributed.tensor._dtensor_spec", "TensorMeta")
    # Arguments are passed by position. So the names and order of the fields are checked, which is
    # safer than a check of PyTorch's version.
    if kind is None or getattr(meta, "_fields", None) != ("shape", "stride", "dtype"):
        return None
    fields = list(getattr(spec, "__dataclass_fields__", ()))
    return (kind, spec, meta) if fields[:3] == ["mesh", "placements", "tensor_meta"] else None


def dtensor_spec(
    mesh: Any,
    placements: tuple[Any, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """Returns PyTorch's record of a DTensor's layout, for `dtensor`; None without private names."""
    parts = _dtensor_parts()
    if parts is None:
        return None
    _, spec, meta = parts
    return spec(mesh, placements, meta(shape, stride, dtype))


def dtensor(local: Tensor, spec: Any) -> Any:
    """Returns a DTensor without a gradient, in a fifth of the time of ``DTensor.from_local``.

    Each DTensor gets its own copy of ``spec``, because sharding propagation may change it.
    """
    return _dtensor_parts()[0](local, copy.copy(spec), requires_grad=False)


def waited(t: Tensor) -> Tensor:
    """Returns a tensor after the collective that fills it has ended.

    ``DTensor.to_local`` may return a tensor that a collective is still filling, and a launch must
    not read its address before. Without the private name operators wait for the collective
    themselves, which is slower.
    """
    if type(t) is Tensor:
        return t
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind: Any = getattr(module, "AsyncCollectiveTensor", ())
    return t.trigger_wait() if isinstance(t, kind) else t
