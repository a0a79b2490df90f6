"""`fusedops.compile_blocks`: compiles the repeated blocks of a model, each by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..core.compat.distributed import unsharded_class
from .entry import backend
from .options import INDUCTOR, check_options, with_rest

__all__ = ["compile_blocks", "repeated_blocks"]


def compile_blocks(
    model: nn.Module,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    rest: str = INDUCTOR,
) -> list[str]:
    """Compiles each repeated block of a model in place, as `fusedops.compile` does.

    Blocks are the members of an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` that has
    several modules of one class, with modules of their own, or one such module several times. Of
    nested ones, the outermost are compiled. The result is that of
    ``block.compile(backend="fusedops", ...)`` for each. Equal blocks have one graph, which is
    compiled once. Parameters and the keys of ``state_dict`` stay.

    It may be called before or after ``fully_shard``. As PyTorch requires, ``parallelize_module``
    and wrappers of activation checkpointing come before ``fully_shard``.

    Args:
        model: a module.
        fullgraph: as in `torch.compile`.
        dynamic: as in `torch.compile`.
        mode: as in `torch.compile`, for Inductor.
        options: as in `fusedops.compile`.
        rest: as in `fusedops.compile`.
    Returns:
        The qualified names of the blocks; of a block with several names, the first.
    Raises:
        TypeError: the model is no module, or options are no mapping.
        ValueError: the model has no repeated blocks, or an option of this backend is wrong.
        RuntimeError: Inductor has no such mode or option.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile_blocks: model must be a module, got {type(model).__name__}")
    options, mode = with_rest("compile_blocks", options, mode, rest)
    check_options("compile_blocks", mode, options)
    blocks: dict[nn.Module, str] = {}
    for name, block in repeated_blocks(model):
        blocks.setdefault(block, name)
    if not blocks:
        raise ValueError(
            "compile_blocks: the model has no list of several modules of one class; "
            "compile its parts by fusedops.compile"
        )
    arguments: Any = {
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": options,
    }
    for block in blocks:
        block.compile(backend=backend, **arguments)
    return list(blocks.values())


def repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated blocks in a module, with their names; a shared one at each place."""
    # `named_children` leaves out the repeats of a module.
    children = {name: child for name, child in module._modules.items() if child is not None}
    counts = Counter(map(_kind, children.values()))
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for name, child in children.items():
        has_parts = next(child.children(), None) is not None
        if is_list and has_parts and counts[_kind(child)] > 1:
            yield prefix + name, child
        else:
            yield from repeated_blocks(child, f"{prefix}{name}.")


def _kind(module: nn.Module) -> Any:
    """The class of a module, as it was before `fully_shard`."""
    return unsharded_class(type(module))
