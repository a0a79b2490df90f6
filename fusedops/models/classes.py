"""Fused classes. Fusing a module replaces its class by a subclass with a rule's methods.

Only ``module.__class__`` changes:

- The parameters stay the same objects under the same ``state_dict`` keys.
- Hooks, buffers, ``requires_grad``, dtype, device, training mode, tied weights and optimizers are
  unaffected.
- ``isinstance`` stays true.
- Restoring the class undoes the fusion exactly.

There is one fused class for each original class and rule. A fused class has the name of the
original class, because other libraries recognise classes by name. A printed model shows it with the
prefix "Fused".
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..core.compat.distributed import sharded_class, unsharded_class
from . import graph
from .hooks import ORIGINAL
from .rule import Family, Rule

__all__ = [
    "LIGER",
    "foreign_forward",
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
_classes: dict[tuple[type, Rule], type[nn.Module]] = {}
# The package of Liger-Kernel, which replaces forwards and classes.
LIGER = "liger_kernel."


def fused_class(original: type[nn.Module], rule: Rule) -> type[nn.Module]:
    """Return the subclass of ``original`` with the rule's methods."""
    key = (original, rule)
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
    _classes[key] = cls
    return _classes[key]


class _Fused(type):
    """The metaclass of fused classes. Pickle stores its instances by `_reduce_class`."""


@functools.cache
def _metaclass(kind: Any) -> type:
    """Return the metaclass of a fused class, for an original with the metaclass ``kind``."""
    # A class's metaclass has to inherit from those of its bases.
    if kind is type:
        metaclass: type = _Fused
    else:
        metaclass = types.new_class(f"_Fused{kind.__name__}", (_Fused, kind))
    copyreg.pickle(metaclass, _reduce_class)
    return metaclass


def _reduce_class(cls: Any) -> Any:
    """Reduce a class for pickle: a fused class cannot be imported by name, so it is rebuilt."""
    if "_fusedops_original" not in vars(cls):
        return cls.__qualname__  # a user's subclass of a fused class, by its name
    return (_rebuilt_class, _stored_class(cls))


def _original_methods(original: type[nn.Module], rule: Rule) -> dict[str, Any]:
    """Return the original's forward and other methods that the rule replaces, under new names.

    Fused modules read them as attributes of the instance. Reading an attribute of a class would add
    a guard to code that torch.compile traces (see `hooks`).
    """
    methods = {}
    for name in ("forward", *rule.methods):
        if hasattr(original, name):
            # Without `staticmethod` an attribute of the instance would be a bound method.
            methods[ORIGINAL + name] = staticmethod(getattr(original, name))
    return methods


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of the module before it was fused; its current class if it is not fused."""
    cls: Any = type(module)
    original: type[nn.Module] = vars(cls).get("_fusedops_original", cls)
    return original


def is_fused(module: nn.Module) -> bool:
    """Whether the module's class is itself a fused class. A subclass of one does not count."""
    return "_fusedops_original" in vars(type(module))


def fuse(module: nn.Module, rule: Rule) -> None:
    """Switch the module to its fused class.

    Raises:
        TypeError: its class cannot be subclassed, or the module's class cannot be changed.
    """
    cls = type(module)
    try:
        _become(module, fused_class(cls, rule))
    except Exception as error:
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise TypeError(
            f"fuse_model: {name} cannot be fused, as it refuses a subclass: "
            f"{error}; exclude=[{cls.__name__!r}] leaves it"
        ) from error


def fuse_all(planned: Mapping[nn.Module, Rule]) -> None:
    """Switch all modules to their fused classes, or none if one raises."""
    try:
        for module, rule in planned.items():
            fuse(module, rule)
    except TypeError:
        for module in planned:
            unfuse(module)
        raise


def unfuse(module: nn.Module) -> None:
    """Restore the module's own class."""
    if is_fused(module):
        # The instance may have a bound method of the fused class as an attribute. It would hide the
        # original class's method, so delete it.
        for name in _replaceable(module):
            if _is_own(module, name):
                delattr(module, name)
    _become(module, original_class(module))


def replaced_since(module: nn.Module) -> str:
    """Return the name of a method that was replaced on the instance after it was fused, or "".

    A replaced forward counts only if the rule matches classes by their forward or replaces it. The
    rule for ``generate`` does neither. That of a unit may be called by what replaced it, such as
    Accelerate's mixed precision, also after unfusing.
    """
    if not is_fused(module):
        return ""
    cls: Any = type(module)
    names = set(_replaceable(module))
    if graph.is_unit(cls._fusedops_rule):
        names.discard("forward")
    for name in sorted(names):
        if name in vars(module) and not _is_own(module, name):
            return name
    return ""


def foreign_forward(module: nn.Module) -> str:
    """Return the Python module of a forward that was replaced on the instance; else "".

    That of Liger-Kernel's classes, too: each call of its operators ends a graph.
    """
    own = vars(module).get("forward")
    if own is not None and not _is_own(module, "forward"):
        return _origin(own)
    origin = _origin(getattr(original_class(module), "forward", None))
    return origin if origin.startswith(LIGER) else ""


def _origin(function: Any) -> str:
    """Return the name of the Python module with a function's code, whatever the function wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    # A wrapper has the ``__module__`` of what it wraps.
    names = getattr(function, "__globals__", {})
    return str(names.get("__name__", type(function).__module__))


def _replaceable(module: nn.Module) -> list[str]:
    """Return the names of the methods that matter if an attribute of the instance hides them."""
    cls: Any = type(module)
    rule: Rule = cls._fusedops_rule
    forward = ["forward"] if "forward" in rule.known else []
    return list(dict.fromkeys((*forward, *rule.methods)))


def _is_own(module: nn.Module, name: str) -> bool:
    """Whether the instance's attribute ``name`` is just the bound method of its own class.

    For example, Accelerate leaves such an attribute on the instance when it removes its hooks.
    """
    method = vars(module).get(name)
    if not isinstance(method, types.MethodType):
        return False
    return method == types.MethodType(getattr(type(module), name), module)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[Collection[nn.Module]]:
    """Context manager that takes FSDP's class off sharded modules, and yields these modules.

    `fully_shard` gives a module a new class, with the bases ``(FSDPModule, the module's class)``.
    Inside the context a sharded module has the second base as its class, which may be switched. On
    exit the module gets an FSDP class again, derived from the class that it has then. So
    `fully_shard` and `fuse_model` may be called in either order.
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
    # PyTorch 2.11 checks a module's guards only if its ``__dict__`` has changed, so change it.
    vars(module)["_fusedops_changed"] = True
    del vars(module)["_fusedops_changed"]


# --- methods of every fused class -----------------------------------------------------------------


def _get_name(self: nn.Module) -> str:
    """Return the name that ``print(model)`` shows."""
    return "Fused" + type(self).__name__


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Reduce the module as its original class does, but rebuild the fused class when loaded."""
    cls: Any = type(self)
    # From protocol 2 on, `object.__reduce_ex__` returns `copyreg.__newobj__`, the class and the
    # state. Below, the class is replaced in that form only.
    reduced = cls._fusedops_original.__reduce_ex__(self, max(2, int(protocol)))
    # A user's subclass of a fused class can be imported by its name.
    if not is_fused(self):
        return reduced
    # Another form comes from a ``__reduce__`` of the original class: leave it as it is.
    if reduced[:2] != (_new_object, (cls,)):
        return reduced
    return (_rebuild, _stored_class(cls), *reduced[2:])


def _stored_class(cls: Any) -> tuple[type[nn.Module], Any]:
    """Return what pickle stores for a fused class: the original class and the rule."""
    return (cls._fusedops_original, _stored_rule(cls._fusedops_rule))


def _stored_rule(rule: Rule) -> Any:
    """Return what pickle stores for a rule.

    It is ``(family's name, key)`` if a `Family` built it, its name if it is in the table `RULES`,
    and otherwise the rule itself. Rules of `graph` are stored with the rules in them.
    """
    # The functions of a family's rule cannot be pickled: the family builds it again on loading.
    match rule.origin:
        case (graph.GRAPH, (rest, Rule() as inner)):
            return (graph.GRAPH, (rest, _stored_rule(inner)))
        case (graph.BESIDE, Rule() as inner):
            return (graph.BESIDE, _stored_rule(inner))
        case None:
            return rule.name if _builtin(rule.name) is rule else rule
    return rule.origin


def _builtin(name: str) -> Rule | Family | None:
    from .rules import OPTIONAL, RULES

    every = itertools.chain(RULES, *OPTIONAL.values())
    return next((rule for rule in every if rule.name == name), None)


# Pickled models refer to `_rebuild` and `_rebuilt_class` by name: do not rename or move them.
def _rebuild(original: type[nn.Module], rule: Any) -> nn.Module:
    """Create an empty module of the fused class."""
    cls = _rebuilt_class(original, rule)
    return cls.__new__(cls)


def _rebuilt_class(original: type[nn.Module], rule: Any) -> type[nn.Module]:
    """Return the fused class, or the original if the stored rule does not apply to it.

    This fusedops may lack the rule, or the installed class may have other code than the saved one.
    A model loads in both cases: the parameters do not depend on the class.
    """
    current = _restored_rule(original, rule)
    if current is not None:
        return fused_class(original, current)
    name = rule[0] if isinstance(rule, tuple) else getattr(rule, "name", rule)
    warnings.warn(
        f"fusedops: {original.__name__} was saved fused and is loaded unfused: "
        f"the installed versions have no rule {name} for it",
        stacklevel=2,
    )
    return original


def _restored_rule(original: type[nn.Module], stored: Any) -> Rule | None:
    """Return the rule that `_stored_class` stored, if it applies to the class."""
    match stored:
        case (graph.GRAPH, (rest, None)):
            return graph.rule_of(original, rest)
        case (graph.GRAPH, (rest, inner)):
            within = _restored_rule(original, inner)
            return within and graph.rule_of(original, rest, within)
        case (graph.BESIDE, inner):
            within = _restored_rule(original, inner)
            return within and graph.beside(within)
        case (name, key):
            family = _builtin(name)
            if not isinstance(family, Family):
                return None
            return family.rule(original, key)
        case str():
            rule = _builtin(stored)
        case _:
            rule = stored
    # This release may have no rule of that name.
    if not isinstance(rule, Rule):
        return None
    # The installed class may have other code than the class that was fused.
    return rule if rule.knows(original) else None
