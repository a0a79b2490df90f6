"""Rules: the classes that each one matches, and the methods of the fused class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .fingerprint import fingerprint, is_unpatched

__all__ = ["Family", "Rule", "Verdict", "judge"]


# The default of functions of rules and families. Pickled rules have its name: do not rename it.
def _no_reason(module: nn.Module) -> str:
    return ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """How `fuse_model` replaces the modules of a class.

    A rule matches a class by its code: the class inherits the ``known`` methods of a class of
    torch.nn unchanged (``base``), or these methods have one of the ``fingerprints``. The name of a
    class does not matter. ``names`` is used only in the report, to say why a class with such a name
    was left.

    Attributes:
        name: the rule's name, in reports and in ``exclude``.
        calls: the operators that a fused module calls, for the report.
        methods: the methods of the fused class, which replace the original's or come in addition. A
            ``forward`` must also be correct if the module's children have hooks or were replaced.
        base: the class that the rule is written for: a class of torch.nn, or the full name of
            another one.
        fingerprints: those of the ``known`` methods, for classes outside of torch.nn.
        names: names of classes outside of torch.nn for which the rule is written.
        known: the names of the methods that decide whether the rule matches a class.
        fits: a function that returns why a module of a matching class is left; "" if it is fused.
        origin: for a rule built by a `Family` or in `fusedops.models.graph`, its name and key;
            None for a rule of the table.
    """

    name: str
    methods: Mapping[str, Callable[..., Any]]
    calls: str = ""
    base: type[nn.Module] | str | None = None
    fingerprints: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    known: tuple[str, ...] = ("forward",)
    fits: Callable[[nn.Module], str] = field(default=_no_reason)
    origin: tuple[str, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        """Return the rule itself: it is a key of the fused classes, which copied models share."""
        return self

    def knows(self, cls: type) -> bool:
        """Whether the rule matches a class."""
        base = self._base_of(cls)
        if base is not None:
            return all(_inherits(cls, base, name) for name in self.known)
        # Parsing the class's source is what takes time.
        if not self.fingerprints:
            return False
        return fingerprint(cls, self.known) in self.fingerprints

    def _rule_for(self, module: nn.Module) -> Rule | None:
        """Return this rule, if it matches the module's class."""
        if not self.knows(type(module)):
            return None
        return self

    def resembles(self, cls: type) -> bool:
        """Whether a user would expect the rule to match the class, by its name or its base."""
        if cls.__name__ in self.names:
            return True
        return self._base_of(cls) is not None

    def _why_not(self, module: nn.Module) -> str:
        """Return why the rule does not match a module that it resembles; "" for other modules."""
        if not self.resembles(type(module)):
            return ""
        return f"its forward is not the one that rule {self.name} knows"

    def _base_of(self, cls: type) -> type | None:
        """Return the rule's base if the class inherits from it, else None."""
        if self.base is None:
            return None
        for base in cls.__mro__:
            # By identity or by its name: a named class's package may not be installed.
            if self.base in (base, f"{base.__module__}.{base.__qualname__}"):
                return base
        return None


def _inherits(cls: type, base: type, method: str) -> bool:
    """Whether a class inherits this method from the base, and the base's method is not patched."""
    # A base that is known by its name may lack the method in another release.
    if not hasattr(base, method):
        return False
    if getattr(cls, method) is not getattr(base, method):
        return False
    return is_unpatched(base, method)


@dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Rules for modules recognised by their structure, created when such a module is seen.

    Attributes:
        name: the family's name.
        key: a function that returns a key from which ``rule`` can build the module's rule, or None
            if the family has no rule for the module. The key is hashable and can be pickled. The
            module is not changed.
        rule: a function that returns the rule for a class and a key; None if the class does not
            have, or no longer has, that structure.
        names: the names of its rules.
        why: a function that returns why a module of the structure has no rule; "" for all others.
        why_of_name: a function that returns why a module whose class name suggests the structure
            has no rule; "" for all others.
    """

    name: str
    key: Callable[[nn.Module], Any]
    rule: Callable[[type[nn.Module], Any], Rule | None]
    names: tuple[str, ...]
    why: Callable[[nn.Module], str] = field(default=_no_reason)
    why_of_name: Callable[[nn.Module], str] = field(default=_no_reason)

    def __call__(self, module: nn.Module) -> Rule | None:
        """Return the rule for a module, or None."""
        key = self.key(module)
        if key is None:
            return None
        return self.rule(type(module), key)

    _rule_for = __call__


@dataclass(frozen=True)
class Verdict:
    """The rule for a module, or the reason why there is none."""

    rule: Rule | None
    reason: str = ""


def judge(
    module: nn.Module, rules: tuple[Rule | Family, ...], excluded: frozenset[str] = frozenset()
) -> Verdict:
    """Choose the first rule that matches the module's class, or give the reason to use none.

    The first match decides: if it is excluded by name or does not fit the module, later rules are
    not tried.
    """
    # A user's rules come first in the table, so they override those of the library.
    rule = _first_match(module, rules)
    if rule is None:
        return Verdict(None, _why_no_match(module, rules))
    if rule.name in excluded:
        return Verdict(None, f"excluded, with rule {rule.name}")
    reason = _why_unfit(module, rule)
    if reason:
        return Verdict(None, reason)
    return Verdict(rule)


def _first_match(module: nn.Module, rules: tuple[Rule | Family, ...]) -> Rule | None:
    """Return the first rule, from the table or from a family, that matches the module's class."""
    for entry in rules:
        rule = entry._rule_for(module)
        if rule is not None:
            return rule
    return None


def _why_no_match(module: nn.Module, rules: tuple[Rule | Family, ...]) -> str:
    """Explain why no rule matches.

    Reasons from the names of classes come last: a name says less than the module's code.
    """
    families = [entry for entry in rules if isinstance(entry, Family)]
    table = [entry for entry in rules if isinstance(entry, Rule)]
    explanations = [
        *[family.why for family in families],
        *[rule._why_not for rule in table],
        *[family.why_of_name for family in families],
    ]
    # Each is called only if those before it return "": some run the module's forward.
    for explain in explanations:
        reason = explain(module)
        if reason:
            return reason
    return "no rule"


def _why_unfit(module: nn.Module, rule: Rule) -> str:
    """Explain why a module is left although the rule matches its class; "" if it is fused."""
    for name in (*rule.known, *rule.methods):
        # An attribute of the instance hides the fused class's method.
        if name in vars(module):
            return f"its {name} was replaced on the instance"
    # A parametrization has changed the class already, to compute the parameter at each access.
    if "parametrizations" in module._modules:
        return "its parameters are parametrized"
    return rule.fits(module)
