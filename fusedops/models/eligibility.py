"""Checks of the arguments of `fusedops.fuse_model`, and the modules that ``exclude`` names."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..core.compat.distributed import FSDP
from ..core.compat.modules import is_compiled
from .rule import Rule

__all__ = ["check_flags", "check_model", "check_module", "check_rules", "check_whole", "excluded"]

# By names, since these packages may not be installed. A quantised weight is no matrix of numbers,
# which the operators could read.
_QUANTIZED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.nn.quantized",
    "bitsandbytes.",
    "torchao.",
    "auto_gptq.",
    "gptqmodel.",
    "awq.",
)
# Modules that are prepared for quantisation, with observers. Their weights are not quantised yet.
_OBSERVED = ("torch.ao.nn.qat", "torch.ao.nn.intrinsic.qat", "torch.ao.nn.quantizable")


def check_module(model: Any, function: str) -> None:
    """Raise unless the model, an argument of this function, is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def check_model(model: nn.Module) -> None:
    """Raise if the model is compiled, scripted, quantised, prepared for that or wrapped in FSDP."""
    for name, module in model.named_modules():
        obstacle = _obstacle(module)
        if obstacle:
            subject = f"module {name!r}" if name else "the model"
            raise ValueError(f"fuse_model: {subject} {obstacle}")


def check_whole(model: nn.Module, sharded: Collection[nn.Module]) -> None:
    """Raise if the model is sharded or has DTensors, which ``check`` cannot run.

    A module of a sharded model does not run by itself, and each rank would draw other random
    perturbations.
    """
    if sharded or _has_dtensors(model):
        raise ValueError(
            "fuse_model: check takes no sharded model; fuse the model with check before "
            "fully_shard or parallelize_module, or without check after them"
        )


def _has_dtensors(model: nn.Module) -> bool:
    # Before the module is imported there are no DTensors.
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    dtensor = getattr(distributed, "DTensor", ())
    return any(isinstance(parameter, dtensor) for parameter in model.parameters())


def _obstacle(module: nn.Module) -> str:
    """Return why the module cannot be fused, and what to do first; "" if it can."""
    reasons = (reason for applies, reason in _OBSTACLES if applies(module))
    return next(reasons, "")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_in_fsdp(module: nn.Module) -> bool:
    return any(_full_name(cls).startswith(FSDP) for cls in type(module).__mro__)


def _is_quantized(module: nn.Module) -> bool:
    if _full_name(type(module)).startswith(_QUANTIZED):
        return True
    return getattr(module, "is_quantized", False) is True


def _is_prepared(module: nn.Module) -> bool:
    """Whether torch.ao's ``prepare`` replaced the module or attached an observer to it."""
    if _full_name(type(module)).startswith(_OBSERVED):
        return True
    if not getattr(module, "qconfig", None):
        return False
    return hasattr(module, "activation_post_process")


# The first that applies is reported.
_OBSTACLES: tuple[tuple[Callable[[nn.Module], bool], str], ...] = (
    (
        _is_scripted,
        "is scripted or traced; fuse the model before torch.jit.script or torch.jit.trace",
    ),
    (
        is_compiled,
        (
            "is compiled; fuse the model before torch.compile, or pass compile_rest=True instead "
            "of compiling (after that, unfuse_model first)"
        ),
    ),
    (
        _is_in_fsdp,
        "is wrapped in FSDP; fuse the model before it is wrapped, or shard it by fully_shard",
    ),
    (
        _is_quantized,
        "is quantised; use fusedops.compile(model), or fuse the model before it is quantised",
    ),
    (
        _is_prepared,
        (
            "is prepared for static quantisation, which knows PyTorch's own norms and activations "
            "by their classes; quantise the model without fusing it"
        ),
    ),
)


def check_flags(**flags: Any) -> None:
    """Raise unless each is True or False: another value ("no", say) is ambiguous."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"fuse_model: {name} must be True or False, got {value!r}")


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """Return the user's rules, which must be a sequence of `Rule` or None."""
    if rules is None:
        return ()
    if isinstance(rules, (str, Rule)) or not isinstance(rules, Iterable):
        raise TypeError(f"fuse_model: rules must be a sequence of Rule, got {type(rules).__name__}")
    # Once, since it may be a generator.
    checked = tuple(rules)
    for rule in checked:
        if not isinstance(rule, Rule):
            raise TypeError(f"fuse_model: rules must hold instances of Rule, got {rule!r}")
    return checked


def excluded(
    model: nn.Module, exclude: Any, rules: frozenset[str]
) -> tuple[set[nn.Module], frozenset[str]]:
    """Return the modules that ``exclude`` names, with all modules in them, and the rules in it.

    Raises:
        TypeError: an entry is neither a string nor a class of modules.
        ValueError: a string is no module's name, no class's name in the model, no pattern that
            matches a name, and no rule's name; or the model has no module of a class.
    """
    _check_sequence(exclude)
    modules = dict(model.named_modules(remove_duplicate=False))
    matches: list[nn.Module] = []
    excluded_rules: set[str] = set()
    for entry in exclude:
        # A name in the model comes before the name of a rule.
        named = _entry(entry, modules)
        if named:
            matches += named
        elif entry in rules:
            excluded_rules.add(entry)
        else:
            raise ValueError(_unknown(entry, modules, rules))
    inside = itertools.chain.from_iterable(module.modules() for module in matches)
    return set(inside), frozenset(excluded_rules)


def _entry(entry: Any, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the modules that an entry of ``exclude`` names; none for the name of a rule."""
    if isinstance(entry, str):
        return _named(entry, modules)
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return _of_class(entry, modules)
    raise TypeError(
        f"fuse_model: exclude takes names and subclasses of torch.nn.Module, got {entry!r}"
    )


def _check_sequence(exclude: Any) -> None:
    """Raise unless ``exclude`` is a sequence other than a string, which would be a single name."""
    is_entry = isinstance(exclude, (str, type))
    if isinstance(exclude, Iterable) and not is_entry:
        return
    shown = exclude.__name__ if isinstance(exclude, type) else repr(exclude)
    hint = f"; for this one alone, pass [{shown}]" if is_entry else ""
    raise TypeError(
        f"fuse_model: exclude must be a sequence of names and classes, got {shown}{hint}"
    )


def _of_class(cls: type[nn.Module], modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the modules of a class; raise if there are none."""
    matches = [module for module in modules.values() if isinstance(module, cls)]
    if not matches:
        raise ValueError(
            f"fuse_model: exclude has the class {cls.__module__}.{cls.__qualname__}, of which "
            "this model has no module"
        )
    return matches


def _named(entry: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the modules of a name; else of a pattern; else of the name of a class or a base."""
    if entry in modules:
        return [modules[entry]]
    matches = re.compile(fnmatch.translate(entry)).match
    names = list(filter(matches, modules))
    if not names:
        # An entry that matches no module's name may be the name of a class.
        names = [name for name in modules if entry in _class_names(modules[name])]
    return [modules[name] for name in names]


def _class_names(module: nn.Module) -> list[str]:
    """Return the names of the module's class and of its bases."""
    return [cls.__name__ for cls in type(module).__mro__]


def _unknown(entry: str, modules: dict[str, nn.Module], rules: frozenset[str]) -> str:
    """Return the error for an entry that names nothing, with similar names."""
    classes = [type(module).__name__ for module in modules.values()]
    names = sorted(filter(None, {*modules, *classes, *rules}))
    near = difflib.get_close_matches(entry, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    if not near:
        hint = "the report of a dry_run has the names"
    return (
        f"fuse_model: exclude names {entry!r}, which is no module of this model, "
        f"no class in it and no rule; {hint}"
    )
