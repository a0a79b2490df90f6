"""Checks of the arguments of `fusedops.fuse_model`, and the modules that ``exclude`` names."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..core import compat
from .rule import Rule

__all__ = ["check_flags", "check_model", "check_module", "check_rules", "check_whole", "excluded"]

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized", "bitsandbytes.",
              "torchao.", "auto_gptq.", "gptqmodel.", "awq.")  # fmt: skip
# Modules with observers, whose weights are still numbers.
_OBSERVED = ("torch.ao.nn.qat", "torch.ao.nn.intrinsic.qat", "torch.ao.nn.quantizable")


def check_module(model: Any) -> None:
    """Raise unless the model is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_model: model must be a torch.nn.Module, got {type(model).__name__}")


def check_model(model: nn.Module) -> None:
    """Raise if the model is compiled, scripted, quantised, prepared for that or wrapped in FSDP."""
    for name, module in model.named_modules():
        obstacle = _obstacle(module)
        if obstacle:
            raise ValueError(f"fuse_model: {f'module {name!r}' if name else 'the model'} {obstacle}")


def check_whole(model: nn.Module, sharded: Collection[nn.Module]) -> None:
    """Raise if the model is sharded or has DTensors, which ``check`` cannot run.

    A module of a sharded model does not run by itself, and each rank would draw another movement.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if sharded or (distributed and any(isinstance(p, distributed.DTensor) for p in model.parameters())):
        raise ValueError("fuse_model: check takes no sharded model; fuse the model with check before fully_shard or "
                         "parallelize_module, or without check after them")  # fmt: skip


def _obstacle(module: nn.Module) -> str:
    """Why the module cannot be fused, and what to do first; "" if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted or traced; fuse the model before torch.jit.script or torch.jit.trace"
    bases = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
    if compat.is_compiled(module):
        return ("is compiled; fuse the model before torch.compile, or pass compile_rest=True instead of compiling "
                "(after that, unfuse_model first)")  # fmt: skip
    if any(base.startswith(compat.FSDP) for base in bases):
        return "is wrapped in FSDP; fuse the model before it is wrapped, or shard it by fully_shard"
    if bases[0].startswith(_QUANTIZED) or getattr(module, "is_quantized", False) is True:
        return "is quantised; fuse the model before it is quantised, or load it unquantised"
    if bases[0].startswith(_OBSERVED) or (
        getattr(module, "qconfig", None) and hasattr(module, "activation_post_process")
    ):
        return ("is prepared for static quantisation, which knows PyTorch's own norms and activations by their classes; "
                "quantise the model without fusing it")  # fmt: skip
    return ""


def check_flags(**flags: Any) -> None:
    """Each is True or False; another value ("no", say) is ambiguous."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"fuse_model: {name} must be True or False, got {value!r}")


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """The user's rules: a sequence of `Rule`, or None."""
    if rules is None:
        return ()
    if isinstance(rules, (str, Rule)) or not isinstance(rules, Iterable):
        raise TypeError(f"fuse_model: rules must be a sequence of Rule, got {type(rules).__name__}")
    found = tuple(rules)
    for rule in found:
        if not isinstance(rule, Rule):
            raise TypeError(f"fuse_model: rules must hold instances of Rule, got {rule!r}")
    return found


def excluded(model: nn.Module, exclude: Any, rules: frozenset[str]) -> tuple[set[nn.Module], frozenset[str]]:
    """The modules that ``exclude`` names, with all modules in them; and the names of rules in it.

    Raises:
        TypeError: an entry is neither a string nor a class of modules.
        ValueError: a string is no module's name, no class's name in the model, no pattern that matches a name, and no
            rule's name; or the model has no module of a class.
    """
    if isinstance(exclude, (str, type)) or not isinstance(exclude, Iterable):
        one = f"; for this one alone, pass [{_shown(exclude)}]" if isinstance(exclude, (str, type)) else ""
        raise TypeError(f"fuse_model: exclude must be a sequence of names and classes, got {_shown(exclude)}{one}")
    modules = dict(model.named_modules(remove_duplicate=False))
    named: list[nn.Module] = []
    names: set[str] = set()
    for entry in exclude:
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            found = [module for module in modules.values() if isinstance(module, entry)]
            if not found:
                raise ValueError(f"fuse_model: exclude has the class {entry.__module__}.{entry.__qualname__}, of which "
                                 "this model has no module")  # fmt: skip
            named += found
        elif not isinstance(entry, str):
            raise TypeError(f"fuse_model: exclude takes names and subclasses of torch.nn.Module, got {entry!r}")
        elif found := _named(entry, modules):
            named += found
        elif entry in rules:
            names.add(entry)
        else:
            raise ValueError(_unknown(entry, modules, rules))
    return {inner for module in named for inner in module.modules()}, frozenset(names)


def _shown(given: Any) -> str:
    return given.__name__ if isinstance(given, type) else repr(given)


def _named(entry: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    if entry in modules:
        return [modules[entry]]
    found = [module for name, module in modules.items() if fnmatch.fnmatchcase(name, entry)]
    return found or [m for m in modules.values() if any(cls.__name__ == entry for cls in type(m).__mro__)]


def _unknown(entry: str, modules: dict[str, nn.Module], rules: frozenset[str]) -> str:
    names = {*modules, *(type(module).__name__ for module in modules.values()), *rules}
    near = difflib.get_close_matches(entry, sorted(filter(None, names)), n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    hint = hint or "; the report of a dry_run has the names"
    return f"fuse_model: exclude names {entry!r}, which is no module of this model, no class in it and no rule{hint}"
