"""Rules: the classes that each one matches, and the methods of the fused class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .fingerprint import fingerprint, is_pytorchs

__all__ = ["At", "Family", "Rule", "Verdict", "has_method", "judge", "named_cache", "needs_norm"]


# From a path in a module to the rule by which what is there is fused, None for none.
At = Callable[[str], "Rule | None"]


def _always(module: nn.Module) -> str:
    return ""


def _nothing(module: nn.Module, at: At) -> str:
    return ""


def _something(module: nn.Module, at: At) -> bool:
    return True


def has_method(rule: Rule | None, method: str) -> bool:
    """Whether a module will have a method of its rule's."""
    return rule is not None and method in rule.methods


def named_cache(past_key_values: Any) -> dict[str, Any]:
    """The argument by which layers up to Transformers 5.23 get a cache. Later ones get ``cache``, which is handed on as it is."""
    return {} if past_key_values is None else {"past_key_values": past_key_values}


def needs_norm(*paths: str) -> Callable[[nn.Module, At], str]:
    """The ``needs`` of a block that joins the end of a branch with the norm behind it: one of these."""

    def needs(module: nn.Module, at: At) -> str:
        fused = any(has_method(at(path), "_fusedops_add_norm") for path in paths)
        return "" if fused else "none of the norms behind its branches is fused"

    return needs


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """How `fuse_model` replaces the modules of a class.

    A rule matches a class by its code: the class inherits the ``known`` methods of a class of torch.nn unchanged
    (``base``), or these methods have one of the ``fingerprints``. The name of a class does not matter. ``names`` is used
    only in the report, to say why a class with such a name was left.

    Attributes:
        name: the rule's name, in reports and in ``exclude``.
        calls: the operators that a fused module calls, for the report; "" if it calls none itself. May be a function of
            the module and `At`.
        helps: for the report, what a fused module does that calls no operator itself. May be a function of the module.
        methods: the methods of the fused class, which replace the original's or come in addition. A ``forward`` must be
            also be correct if the module's children have hooks or were replaced: see `fusedops.models.parts`.
        base: the class that the rule is written for: a class of torch.nn, or the full name of another one.
        fingerprints: those of the ``known`` methods, for classes outside of torch.nn.
        names: names of classes outside of torch.nn for which the rule is written.
        known: the names of the methods that decide whether the rule matches a class.
        fits: a function that returns why a module of a matching class is left; "" if it is fused.
        parts: paths of the modules inside that the fused module computes itself, unless they have hooks or are of another
            kind. May be a function of the module.
        needs: a function of the module and `At` that returns why it would call no operator; "" if it would.
        leaves: a function of the module and `At` that returns whether the module leaves its last steps to the block that
            contains it. It is called only if the rule has the method ``_fusedops_branch``.
        takes: paths of the modules whose last steps a fused module computes; None for all modules inside.
        made: for a rule made by a `Family`, its name and key; None for a rule of the table.
    """

    name: str
    methods: Mapping[str, Callable[..., Any]]
    calls: str | Callable[[nn.Module, At], str] = ""
    helps: str | Callable[[nn.Module], str] = ""
    base: type[nn.Module] | str | None = None
    fingerprints: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    known: tuple[str, ...] = ("forward",)
    fits: Callable[[nn.Module], str] = field(default=_always)
    parts: tuple[str, ...] | Callable[[nn.Module], tuple[str, ...]] = ()
    needs: Callable[[nn.Module, At], str] = field(default=_nothing)
    leaves: Callable[[nn.Module, At], bool] = field(default=_something)
    takes: tuple[str, ...] | None = None
    made: tuple[str, Any] | None = None

    def knows(self, cls: type) -> bool:
        """Whether the rule matches a class."""
        base = self._base_of(cls)
        if base is not None:
            return all(getattr(cls, name) is getattr(base, name) and is_pytorchs(base, name) for name in self.known)
        return bool(self.fingerprints) and fingerprint(cls, self.known) in self.fingerprints

    def resembles(self, cls: type) -> bool:
        """Whether a user would expect the rule to match the class, by its name or its base."""
        return cls.__name__ in self.names or self._base_of(cls) is not None

    def _base_of(self, cls: type) -> type | None:
        """The rule's base, if the class inherits from it."""
        if isinstance(self.base, str):
            return next((c for c in cls.__mro__ if f"{c.__module__}.{c.__qualname__}" == self.base), None)
        return self.base if self.base is not None and issubclass(cls, self.base) else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Rules for modules that are known by their structure, made as they are met.

    Attributes:
        name: of the family.
        key: what a module is, as the rule for it needs to know; hashable, of what pickle takes; None if the family has no
            rule for it. The module is not changed.
        rule: the rule for a class and a key; None if the class is not, or no longer, of that structure.
        names: of its rules.
        why: says why a module of the structure has no rule; "" for all others.
        why_of_name: says why a module whose name promises the structure has no rule; "" for all others.
    """

    name: str
    key: Callable[[nn.Module], Any]
    rule: Callable[[type[nn.Module], Any], Rule | None]
    names: tuple[str, ...]
    why: Callable[[nn.Module], str] = field(default=_always)
    why_of_name: Callable[[nn.Module], str] = field(default=_always)

    def __call__(self, module: nn.Module) -> Rule | None:
        """The rule for a module."""
        key = self.key(module)
        return None if key is None else self.rule(type(module), key)


@dataclass(frozen=True)
class Verdict:
    """The rule for a module, or the reason why there is none."""

    rule: Rule | None
    reason: str = ""


def judge(module: nn.Module, rules: tuple[Rule | Family, ...], excluded: frozenset[str] = frozenset()) -> Verdict:
    """The first rule that knows the module's class and fits the module, unless it is one of those excluded by name."""
    cls = type(module)
    rule = next((found for entry in rules if (found := _known(entry, module)) is not None), None)
    if rule is not None and rule.name in excluded:
        return Verdict(None, f"excluded, with rule {rule.name}")
    if rule is None:
        families = [entry for entry in rules if isinstance(entry, Family)]
        alike = next((rule for rule in rules if isinstance(rule, Rule) and rule.resembles(cls)), None)
        why = next((why for family in families if (why := family.why(module))), "")
        if alike and not why:
            why = f"its forward is not the one that rule {alike.name} knows"
        return Verdict(None, why or next((why for one in families if (why := one.why_of_name(module))), "no rule"))
    replaced = next((name for name in (*rule.known, *rule.methods) if name in vars(module)), None)
    if replaced is not None:
        return Verdict(None, f"its {replaced} was replaced on the instance")
    if "parametrizations" in module._modules:
        return Verdict(None, "its parameters are parametrized")
    reason = rule.fits(module)
    return Verdict(None, reason) if reason else Verdict(rule)


def _known(entry: Rule | Family, module: nn.Module) -> Rule | None:
    if isinstance(entry, Family):
        return entry(module)
    return entry if entry.knows(type(module)) else None
