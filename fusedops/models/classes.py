"""Fused classes: a subclass of a module's own class, and the module turned into one of it.

Only ``module.__class__`` changes. So the parameters stay the same objects under the same ``state_dict`` keys; hooks,
buffers, ``requires_grad``, dtype, device, training mode, tied weights and optimizers are unaffected; ``isinstance``
stays true; and giving the class back undoes it exactly. There is one fused class for each original class and rule. It
carries the original's name, by which other libraries recognise classes; a printed model shows it with the prefix "Fused".
"""

from __future__ import annotations

import copyreg
import functools
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..core import compat
from .hooks import ORIGINAL
from .rule import Family, Rule

__all__ = ["fuse", "fuse_all", "fused_class", "is_fused", "original_class", "replaced_since", "unfuse",
           "unsharded"]  # fmt: skip

# What `object.__reduce_ex__` makes new objects with.
_new_object: Any = copyreg.__newobj__  # type: ignore[attr-defined]
_classes: dict[tuple[type, Rule, frozenset[str]], type[nn.Module]] = {}


def fused_class(original: type[nn.Module], rule: Rule, off: frozenset[str] = frozenset()) -> type[nn.Module]:
    """The subclass of ``original`` with the methods of the rule, and these tricks turned off."""
    key = (original, rule, off)
    if key not in _classes:
        body = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce,
            "_get_name": _get_name,
            "_fusedops_original": original,
            "_fusedops_rule": rule,
            "_fusedops_off": off,
            **_original_methods(original, rule),
            **rule.methods,
        }
        kind: Any = type(original)
        cls: Any = types.new_class(original.__name__, (original,), {"metaclass": _metaclass(kind)},
                                   lambda namespace: namespace.update(body))  # fmt: skip
        cls._fusedops_class = cls
        _classes[key] = cls
    return _classes[key]


class _Fused(type):
    """The class of fused classes, by which pickle finds out how to make one again."""


@functools.cache
def _metaclass(of: Any) -> type:
    if of is type:
        made: type = _Fused
    else:
        made = types.new_class(f"_Fused{of.__name__}", (_Fused, of))
    copyreg.pickle(made, _reduce_class)
    return made


def _reduce_class(cls: Any) -> Any:
    if "_fusedops_original" not in vars(cls):
        return cls.__qualname__  # a subclass that somebody made, by its name
    return (_rebuilt_class, _named_rule(cls))


def _original_methods(original: type[nn.Module], rule: Rule) -> dict[str, Any]:
    """The original's forward and what else the rule puts in its place, where instances find them.

    torch.compile guards on what it sees looked up in a class (see `hooks`), so the originals are looked up in instances.
    """
    names = ("forward", *rule.methods)
    return {ORIGINAL + name: staticmethod(getattr(original, name)) for name in names if hasattr(original, name)}


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module was made of."""
    cls: Any = type(module)
    original: type[nn.Module] = vars(cls).get("_fusedops_original", cls)
    return original


def is_fused(module: nn.Module) -> bool:
    """Whether the module's class is a fused one, and no subclass of it that was made since."""
    return "_fusedops_original" in vars(type(module))


def fuse(module: nn.Module, rule: Rule, off: frozenset[str] = frozenset()) -> None:
    """Turn the module into one of its fused class, with these tricks turned off.

    Raises:
        TypeError: its class refuses to have a subclass, or the module to have another class.
    """
    cls = type(module)
    try:
        _become(module, fused_class(cls, rule, off))
    except Exception as error:
        raise TypeError(f"fuse_model: {cls.__module__}.{cls.__qualname__} cannot be fused, as it refuses a subclass: "
                        f"{error}; exclude=[{cls.__name__!r}] leaves it") from error  # fmt: skip


def fuse_all(planned: Mapping[nn.Module, Rule], off: frozenset[str] = frozenset()) -> None:
    """Turn all modules into ones of their fused classes, or none."""
    try:
        for module, rule in planned.items():
            fuse(module, rule, off)
    except TypeError:
        for module in planned:
            unfuse(module)
        raise


def unfuse(module: nn.Module) -> None:
    """Give the module its own class back."""
    if is_fused(module):
        for name in [name for name in _replaceable(module) if _is_own(module, name)]:
            delattr(module, name)
    _become(module, original_class(module))


def replaced_since(module: nn.Module) -> str:
    """The method of a fused module that was replaced on the instance after it was fused; "" for none.

    A forward counts unless the rule has nothing to do with it, as that for ``generate``.
    """
    if not is_fused(module):
        return ""
    return next((n for n in _replaceable(module) if n in vars(module) and not _is_own(module, n)), "")


def _replaceable(module: nn.Module) -> list[str]:
    """The methods of a fused module that an attribute of the instance may replace."""
    cls: Any = type(module)
    rule: Rule = cls._fusedops_rule
    return list(dict.fromkeys((*(name for name in rule.known if name == "forward"), *rule.methods)))


def _is_own(module: nn.Module, name: str) -> bool:
    """Whether the instance's method is its class's: removed hooks, as Accelerate's, leave such a one."""
    method = vars(module).get(name)
    return isinstance(method, types.MethodType) and method == types.MethodType(getattr(type(module), name), module)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[Collection[nn.Module]]:
    """For a block, give sharded modules the classes that they had before FSDP; afterwards put FSDP's classes back.

    `fully_shard` gives a module a class that inherits from FSDP's and from the module's. So the order of `fully_shard` and
    `fuse_model` makes no difference to the class that a module ends up with.
    """
    sharded = {m: type(m) for m in model.modules() if compat.unsharded_class(type(m)) is not type(m)}
    for module, cls in sharded.items():
        module.__class__ = compat.unsharded_class(cls)
    try:
        yield sharded
    finally:
        for module, cls in sharded.items():
            _become(module, compat.sharded_class(cls, type(module)))


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    if type(module) is cls:
        return
    module.__class__ = cls
    # Compiled code that passes over modules of which no dictionary was changed (PyTorch 2.11's) is to see that one was.
    vars(module)["_fusedops_changed"] = True
    del vars(module)["_fusedops_changed"]


# --- methods of every fused class -----------------------------------------------------------------------------------


def _get_name(self: nn.Module) -> str:
    """What ``print(model)`` shows."""
    return "Fused" + type(self).__name__


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """The module's usual reduction, but with a fused class that is made again from the original when it is loaded."""
    cls: Any = type(self)
    # From protocol 2 on, an object is its class and its state.
    reduced = cls._fusedops_original.__reduce_ex__(self, max(2, int(protocol)))
    if not is_fused(self) or reduced[:2] != (_new_object, (cls,)):
        return reduced
    return (_rebuild, _named_rule(cls), *reduced[2:])


def _named_rule(cls: Any) -> tuple[type[nn.Module], Any, frozenset[str]]:
    """A fused class as pickle takes it: its original, and its rule: by name if it is the library's, or of what it was made."""
    rule: Rule = cls._fusedops_rule
    return cls._fusedops_original, rule.made or (rule.name if _builtin(rule.name) is rule else rule), cls._fusedops_off


def _builtin(name: str) -> Rule | Family | None:
    from .rules import RULES

    return next((rule for rule in RULES if rule.name == name), None)


def _rebuild(original: type[nn.Module], rule: Any, off: frozenset[str] = frozenset()) -> nn.Module:
    """An empty module of the fused class."""
    cls = _rebuilt_class(original, rule, off)
    return cls.__new__(cls)


def _rebuilt_class(original: type[nn.Module], rule: Any, off: frozenset[str] = frozenset()) -> type[nn.Module]:
    """The fused class; the original if this release has no such rule or this class other code."""
    found = _found_rule(original, rule)
    if found is None:
        name = rule[0] if isinstance(rule, tuple) else getattr(rule, "name", rule)
        warnings.warn(f"fusedops: {original.__name__} was saved fused and is loaded as it was before: no rule {name} for it "
                      "here", stacklevel=2)  # fmt: skip
        return original
    return fused_class(original, found, off)


def _found_rule(original: type[nn.Module], rule: Any) -> Rule | None:
    if isinstance(rule, tuple):
        family = _builtin(rule[0])
        return family.rule(original, rule[1]) if isinstance(family, Family) else None
    found = _builtin(rule) if isinstance(rule, str) else rule
    return found if isinstance(found, Rule) and found.knows(original) else None
