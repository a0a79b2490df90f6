"""Fused classes: subclasses of modules' own classes, to which the modules are switched.

Only ``module.__class__`` changes. So the parameters stay the same objects under the same
``state_dict`` keys; hooks, buffers, ``requires_grad``, dtype, device, training mode, tied weights
and optimizers are unaffected; ``isinstance`` stays true; and restoring the class undoes it exactly.
There is one fused class for each original class, rule and set of disabled tricks. It has the
original's name, by which other libraries recognise classes. A printed model shows it with the
prefix "Fused".
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

from ..core.compat.distributed import sharded_class, unsharded_class
from .hooks import ORIGINAL
from .rule import Family, Rule

__all__ = [
    "fuse",
    "fuse_all",
    "fused_class",
    "is_fused",
    "original_class",
    "replaced_since",
    "unfuse",
    "unsharded",
]

# The function by which `object.__reduce_ex__` creates new objects.
_new_object: Any = copyreg.__newobj__  # type: ignore[attr-defined]
_classes: dict[tuple[type, Rule, frozenset[str]], type[nn.Module]] = {}


def fused_class(
    original: type[nn.Module], rule: Rule, off: frozenset[str] = frozenset()
) -> type[nn.Module]:
    """Return the subclass of ``original`` with the rule's methods, and these tricks turned off."""
    key = (original, rule, off)
    if key in _classes:
        return _classes[key]
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
    cls: Any = types.new_class(
        original.__name__,
        (original,),
        {"metaclass": _metaclass(kind)},
        lambda namespace: namespace.update(body),
    )
    # A subclass finds the fused class that it inherits from by this; see `hooks.keeps_method`.
    cls._fusedops_class = cls
    _classes[key] = cls
    return _classes[key]


class _Fused(type):
    """The metaclass of fused classes, for which pickle has its own reduction: `_reduce_class`."""


@functools.cache
def _metaclass(kind: Any) -> type:
    """Return the metaclass of fused classes whose original has the metaclass ``kind``."""
    # Python wants a class's metaclass to inherit from those of its bases.
    if kind is type:
        metaclass: type = _Fused
    else:
        metaclass = types.new_class(f"_Fused{kind.__name__}", (_Fused, kind))
    copyreg.pickle(metaclass, _reduce_class)
    return metaclass


def _reduce_class(cls: Any) -> Any:
    """Reduce a class for pickle: a fused class cannot be imported by its name."""
    if "_fusedops_original" not in vars(cls):
        return cls.__qualname__  # a user's subclass of a fused class, by its name
    return (_rebuilt_class, _named_rule(cls))


def _original_methods(original: type[nn.Module], rule: Rule) -> dict[str, Any]:
    """Return the original's forward and other methods that the rule replaces, under new names.

    torch.compile guards on what it sees looked up in a class (see `hooks`), so the originals are
    looked up in instances.
    """
    methods = {}
    for name in ("forward", *rule.methods):
        if hasattr(original, name):
            # Static, so that an instance has the function itself, and not a method bound to it.
            methods[ORIGINAL + name] = staticmethod(getattr(original, name))
    return methods


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before it was fused, or its class."""
    cls: Any = type(module)
    original: type[nn.Module] = vars(cls).get("_fusedops_original", cls)
    return original


def is_fused(module: nn.Module) -> bool:
    """Whether the module's class is a fused one, not a subclass that was created later."""
    return "_fusedops_original" in vars(type(module))


def fuse(module: nn.Module, rule: Rule, off: frozenset[str] = frozenset()) -> None:
    """Switch the module to its fused class, with these tricks turned off.

    Raises:
        TypeError: its class cannot be subclassed, or the module's class cannot be changed.
    """
    cls = type(module)
    try:
        _become(module, fused_class(cls, rule, off))
    except Exception as error:
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise TypeError(
            f"fuse_model: {name} cannot be fused, as it refuses a subclass: "
            f"{error}; exclude=[{cls.__name__!r}] leaves it"
        ) from error


def fuse_all(planned: Mapping[nn.Module, Rule], off: frozenset[str] = frozenset()) -> None:
    """Switch all modules to their fused classes, or none if one raises."""
    try:
        for module, rule in planned.items():
            fuse(module, rule, off)
    except TypeError:
        for module in planned:
            unfuse(module)
        raise


def unfuse(module: nn.Module) -> None:
    """Restore the module's own class."""
    if is_fused(module):
        # Left on the instance, a bound method of the fused class would hide the original's.
        for name in _replaceable(module):
            if _is_own(module, name):
                delattr(module, name)
    _become(module, original_class(module))


def replaced_since(module: nn.Module) -> str:
    """Return the method of a fused module that was replaced on the instance since, or "".

    A forward counts unless the rule does not depend on it, as that for ``generate``.
    """
    if not is_fused(module):
        return ""
    for name in _replaceable(module):
        if name in vars(module) and not _is_own(module, name):
            return name
    return ""


def _replaceable(module: nn.Module) -> list[str]:
    """Return the methods of a fused module that an attribute of the instance may replace."""
    cls: Any = type(module)
    rule: Rule = cls._fusedops_rule
    forward = ["forward"] if "forward" in rule.known else []
    return list(dict.fromkeys((*forward, *rule.methods)))


def _is_own(module: nn.Module, name: str) -> bool:
    """Whether the instance has its class's own method as an attribute.

    Hooks such as Accelerate's leave one when they are removed.
    """
    method = vars(module).get(name)
    if not isinstance(method, types.MethodType):
        return False
    return method == types.MethodType(getattr(type(module), name), module)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[Collection[nn.Module]]:
    """Context manager: sharded modules have the classes that they had before FSDP.

    `fully_shard` gives a module a class that inherits from FSDP's and from the module's. Because
    the module's class is changed below FSDP's, the order of `fully_shard` and `fuse_model` does not
    matter.
    """
    sharded = {m: type(m) for m in model.modules() if unsharded_class(type(m)) is not type(m)}
    for module, cls in sharded.items():
        module.__class__ = unsharded_class(cls)
    try:
        yield sharded
    finally:
        for module, cls in sharded.items():
            _become(module, sharded_class(cls, type(module)))


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    if type(module) is cls:
        return
    module.__class__ = cls
    # PyTorch 2.11 skips the guards of modules whose dictionary has not changed, so change it.
    vars(module)["_fusedops_changed"] = True
    del vars(module)["_fusedops_changed"]


# --- methods of every fused class -----------------------------------------------------------------


def _get_name(self: nn.Module) -> str:
    """Return the name that ``print(model)`` shows."""
    return "Fused" + type(self).__name__


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Reduce the module as its original class does, but rebuild the fused class when loaded."""
    cls: Any = type(self)
    # From protocol 2 on, an object is its class and its state.
    reduced = cls._fusedops_original.__reduce_ex__(self, max(2, int(protocol)))
    # A user's subclass of a fused class is stored by its name.
    if not is_fused(self):
        return reduced
    # The class reduces its instances in a way of its own.
    if reduced[:2] != (_new_object, (cls,)):
        return reduced
    return (_rebuild, _named_rule(cls), *reduced[2:])


def _named_rule(cls: Any) -> tuple[type[nn.Module], Any, frozenset[str]]:
    """Return what pickle stores for a fused class: its original, its rule, and its tricks.

    The rule is stored as a family's name and key, as a name if it is in the table, or itself.
    """
    rule: Rule = cls._fusedops_rule
    # A generated rule is built again when it is loaded: its functions cannot be pickled.
    stored: Any = rule.origin
    if not stored:
        stored = rule.name if _builtin(rule.name) is rule else rule
    return (cls._fusedops_original, stored, cls._fusedops_off)


def _builtin(name: str) -> Rule | Family | None:
    from .rules import RULES

    return next((rule for rule in RULES if rule.name == name), None)


# `_rebuild` and `_rebuilt_class` are named in saved files.
def _rebuild(original: type[nn.Module], rule: Any, off: frozenset[str] = frozenset()) -> nn.Module:
    """Create an empty module of the fused class."""
    cls = _rebuilt_class(original, rule, off)
    return cls.__new__(cls)


def _rebuilt_class(
    original: type[nn.Module], rule: Any, off: frozenset[str] = frozenset()
) -> type[nn.Module]:
    """Return the fused class, or the original if the stored rule does not apply to it here.

    Another release may not have the rule, or the class may have other code.
    """
    # A model must load even where it cannot be fused: its parameters are the same.
    current = _restored_rule(original, rule)
    if current is not None:
        return fused_class(original, current, off)
    name = rule[0] if isinstance(rule, tuple) else getattr(rule, "name", rule)
    warnings.warn(
        f"fusedops: {original.__name__} was saved fused and is loaded as it was before: "
        f"no rule {name} for it here",
        stacklevel=2,
    )
    return original


def _restored_rule(original: type[nn.Module], stored: Any) -> Rule | None:
    """Return the rule that `_named_rule` stored, if it applies to the class."""
    match stored:
        case (name, key):
            family = _builtin(name)
            if not isinstance(family, Family):
                return None
            return family.rule(original, key)
        case str():
            rule = _builtin(stored)
        case _:
            rule = stored
    # There may be no rule of that name any more.
    if not isinstance(rule, Rule):
        return None
    # And the class may have other code.
    return rule if rule.knows(original) else None
