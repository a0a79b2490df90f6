"""Which models `fusedops.fuse_model` takes, and what ``exclude`` names in them."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["check_model", "excluded"]

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized", "bitsandbytes.",
              "torchao.", "auto_gptq.", "gptqmodel.", "awq.")  # fmt: skip


def check_model(model: Any) -> None:
    """The model is one that can be fused: neither compiled nor scripted nor quantised nor wrapped in FSDP."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_model: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        obstacle = _obstacle(module)
        if obstacle:
            raise ValueError(f"fuse_model: {f'module {name!r}' if name else 'the model'} {obstacle}")


def _obstacle(module: nn.Module) -> str:
    """What stands in the way of fusing the module, and what to do first; "" if nothing does."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted or traced; fuse the model before torch.jit.script or torch.jit.trace"
    bases = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
    if "torch._dynamo.eval_frame.OptimizedModule" in bases or module._compiled_call_impl is not None:
        return "is compiled; fuse the model before torch.compile, or pass compile_rest=True instead of compiling"
    if any(base.startswith(("torch.distributed.fsdp.", "torch.distributed._composable.")) for base in bases):
        return "is wrapped in FSDP; fuse the model before it is wrapped"
    if bases[0].startswith(_QUANTIZED) or getattr(module, "is_quantized", False) is True:
        return "is quantised; fuse the model before it is quantised, or load it unquantised"
    return ""


def excluded(model: nn.Module, exclude: Any) -> set[nn.Module]:
    """The modules that ``exclude`` names, and all modules in them.

    Raises:
        TypeError: an entry is neither a string nor a class of modules.
        ValueError: a string is no module's name, no class's name in the model, and no pattern that matches a name.
    """
    if isinstance(exclude, (str, type)) or not isinstance(exclude, Iterable):
        raise TypeError(f"fuse_model: exclude must be a sequence of names and types, got {exclude!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    named: list[nn.Module] = []
    for entry in exclude:
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            named += [module for module in modules.values() if isinstance(module, entry)]
        elif isinstance(entry, str):
            named += _named(entry, modules)
        else:
            raise TypeError(f"fuse_model: exclude takes names and subclasses of torch.nn.Module, got {entry!r}")
    return {inner for module in named for inner in module.modules()}


def _named(entry: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    if entry in modules:
        return [modules[entry]]
    found = [module for name, module in modules.items() if fnmatch.fnmatchcase(name, entry)]
    found = found or [m for m in modules.values() if any(cls.__name__ == entry for cls in type(m).__mro__)]
    if found:
        return found
    names = {*modules, *(type(module).__name__ for module in modules.values())}
    near = difflib.get_close_matches(entry, sorted(filter(None, names)), n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"fuse_model: exclude names {entry!r}, which is no module of this model and no class in it{hint}")
