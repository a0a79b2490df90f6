"""PyTorch's distributed modules: classes of FSDP, DTensors, and hooks of parallel styles."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from .lookup import imported
from .modules import has_own_backward_hooks

__all__ = [
    "FSDP",
    "default_store",
    "dtensor",
    "dtensor_spec",
    "is_distributed",
    "replicates_implicitly",
    "rows_placed_by",
    "sharded_class",
    "unsharded_class",
    "waited",
]


def default_store() -> Any:
    """Returns the key-value store of the default process group, which has no public name.

    Without the private function an AttributeError names it.
    """
    return torch.distributed.distributed_c10d._get_default_store()


# --- FSDP -----------------------------------------------------------------------------------------

# The prefixes of the qualified names of PyTorch's FSDP classes.
FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")
# The classes that `sharded_class` creates, without FSDP's own table.
_sharded_classes: dict[type, type] = {}


def unsharded_class(cls: Any) -> Any:
    """Returns the class of a module before `fully_shard` put one of FSDP's in front of it."""
    # `fully_shard` creates a class with the bases ``(FSDPModule, the module's class)``.
    bases = cls.__bases__
    return bases[1] if len(bases) == 2 and _is_of_fsdp(bases[0]) else cls


def _is_of_fsdp(cls: Any) -> bool:
    # By name, as an import of FSDP is slow; the class moved between these modules.
    name = f"{cls.__module__}.{cls.__name__}"
    return name.startswith(FSDP) and name.endswith(".FSDPModule")


def sharded_class(sharded: Any, cls: Any) -> Any:
    """Returns the class that `fully_shard` would give to a module of class ``cls``.

    It is for a sharded module whose class changes:

        class of the module    class under `fully_shard`
        LlamaDecoderLayer      FSDPLlamaDecoderLayer, which is ``sharded``
        ``cls``                the result, of the same name and body as ``sharded``

    FSDP's private table gets it too, as torch.compile's saved guards read that. Without the table
    there is one here.
    """
    table = imported("torch.distributed.fsdp._fully_shard._fully_shard", "cls_to_fsdp_cls")
    table = _sharded_classes if table is None else table
    table.setdefault(unsharded_class(sharded), sharded)
    if cls not in table:
        # These two belong to each class: `type` creates them anew.
        body = dict(vars(sharded))
        body.pop("__dict__", None)
        body.pop("__weakref__", None)
        table[cls] = type(cls)(sharded.__name__, (sharded.__bases__[0], cls), body)
    return table[cls]


# --- DTensors -------------------------------------------------------------------------------------


def is_distributed(module: torch.nn.Module) -> bool:
    """Returns whether `distribute_module` gave a module its hooks.

    False for all modules if PyTorch no longer sets the private attribute. Their plain arguments are
    then not converted to DTensors, and PyTorch raises an error for the mixture.
    """
    return "_distribute_module_applied" in module.__dict__


def replicates_implicitly() -> bool:
    """Returns whether ``implicit_replication`` is on; False without the private name."""
    # A process without DTensors has not imported the module, which takes its time.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


@functools.cache
def _dtensor_parts() -> Any:
    """Returns the classes of a DTensor, its layout and its sizes.

    None without the private names, and unless all take the arguments that are passed here.
    """
    kind = imported("torch.distributed.tensor", "DTensor")
    spec = imported("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
    meta = imported("torch.distributed.tensor._dtensor_spec", "TensorMeta")
    # The arguments are passed by position. So the fields' names and order are compared, instead of
    # PyTorch's version.
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
    """Returns the record of a DTensor's layout, for `dtensor`; None without the private names."""
    parts = _dtensor_parts()
    if parts is None:
        return None
    _, spec, meta = parts
    return spec(mesh, placements, meta(shape, stride, dtype))


def dtensor(local: Tensor, spec: Any) -> Any:
    """Returns a DTensor without a gradient, in a fifth of the time of ``DTensor.from_local``.

    Each has its own record: sharding propagation may change it.
    """
    return _dtensor_parts()[0](local, copy.copy(spec), requires_grad=False)


def waited(t: Tensor) -> Tensor:
    """Returns a tensor that a collective has filled.

    ``DTensor.to_local`` may return one that it has yet to fill, whose address a launch must not
    take. Without the private name operators wait for it themselves: slower.
    """
    if type(t) is Tensor:
        return t
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind: Any = getattr(module, "AsyncCollectiveTensor", ())
    return t.trigger_wait() if isinstance(t, kind) else t


# --- hooks of parallel styles ---------------------------------------------------------------------


def rows_placed_by(module: torch.nn.Module) -> Any:
    """Returns the layout that `SequenceParallel`'s hooks give a module, or None.

    The pre-hook makes the argument a DTensor of the mesh and the placements. The other hook turns
    the output into a plain tensor if ``to_local`` is true. None if the module has further hooks, or
    PyTorch lacks the private names; the caller then calls the module, which is slower.

    Returns:
        ``(mesh, placements, to_local)``.
    """
    if not is_distributed(module) or has_own_backward_hooks(module):
        return None
    before: Any = getattr(module, "_forward_pre_hooks", ())
    after: Any = getattr(module, "_forward_hooks", ())
    if (len(before), len(after)) != (1, 1):
        return None
    mesh, place = _closed_over(*before.values())
    _, release = _closed_over(*after.values())
    # A user's style closes over a mesh and a function as well: the function must be PyTorch's.
    style = imported("torch.distributed.tensor.parallel", "SequenceParallel")
    if _calls(place, style, "_prepare_input_fn") and _calls(release, style, "_prepare_output_fn"):
        return mesh, tuple(place.args[0]), release.args[0]
    return None


def _closed_over(hook: Any) -> tuple[Any, Any]:
    """Returns the mesh and the function of a hook that `distribute_module` made.

    The hook is a lambda, and has them in its closure alone.
    """
    mesh, function = None, None
    for cell in getattr(hook, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, functools.partial):
            function = value
        elif type(value).__name__ == "DeviceMesh":
            mesh = value
    return (mesh, function) if mesh is not None else (None, None)


def _calls(function: Any, style: Any, name: str) -> bool:
    """Returns whether a hook's function is the method of a parallel style."""
    return function is not None and function.func is getattr(style, name, None)
