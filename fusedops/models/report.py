"""What was done to a model: one line a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["NOT_FUSED", "NO_RULE", "Difference", "FusionReport", "ModuleReport"]


# Reasons of modules that the summary only counts.
NO_RULE, NOT_FUSED = "no rule", "not fused"
_REST = {NO_RULE: "left as they are: no rule is about them", NOT_FUSED: "not fused"}


@dataclass(frozen=True)
class Difference:
    """How far a fused module or model is from what it was, and how far it may be.

    Attributes:
        output: the largest difference of an output.
        gradient: the largest difference of a gradient.
        allowed_output: the largest that passes.
        allowed_gradient: the same, of a gradient.
    """

    output: float
    gradient: float
    allowed_output: float
    allowed_gradient: float

    @property
    def passes(self) -> bool:
        """Whether both are within bounds; NaN is not."""
        return self.output <= self.allowed_output and self.gradient <= self.allowed_gradient

    def __str__(self) -> str:
        return f"output {self.output:.2g} of {self.allowed_output:.2g}, gradient {self.gradient:.2g} of {self.allowed_gradient:.2g}"


@dataclass(frozen=True)
class ModuleReport:
    """One module.

    Attributes:
        name: as in ``named_modules``; "" is the model itself.
        type: its class's name.
        rule: the rule that it was replaced by, "" if it was left.
        calls: the operators that it calls, "" if it was left or only helps its block.
        helps: what it does otherwise than before, as a rule for its block, if it calls no operator itself.
        reason: why a module was left.
        by: the fused module that does this one's work too, by name; None if it runs itself, or not at all.
        difference: what ``check`` found; None if it did not look at the module.
    """

    name: str
    type: str
    rule: str = ""
    calls: str = ""
    helps: str = ""
    reason: str = ""
    difference: Difference | None = None
    by: str | None = None

    @property
    def replaced(self) -> bool:
        """Whether the module's class was, or in a dry run would be, replaced."""
        return bool(self.rule)

    @property
    def fused(self) -> bool:
        """Whether that makes it call an operator itself."""
        return bool(self.calls)


@dataclass(frozen=True, repr=False)
class FusionReport:
    """What `fusedops.fuse_model` did, or in a dry run would do; true if that is anything.

    Its length and its elements are those of ``replaced``. Printed, it has a line for each kind of module; `table` has
    one for each module.

    Attributes:
        modules: every module of the model.
        difference: of the whole model's outputs and gradients, from ``check``.
    """

    modules: tuple[ModuleReport, ...]
    difference: Difference | None = None

    @property
    def replaced(self) -> tuple[ModuleReport, ...]:
        """The modules whose class was replaced: those that were fused, and those that help their block."""
        return tuple(module for module in self.modules if module.replaced)

    @property
    def left(self) -> tuple[ModuleReport, ...]:
        """The others, each with its reason."""
        return tuple(module for module in self.modules if not module.replaced)

    @property
    def unchecked(self) -> tuple[ModuleReport, ...]:
        """The replaced modules that ``check`` did not run, as its inputs do not reach them; empty without a check."""
        if self.difference is None:
            return ()
        return tuple(module for module in self.replaced if module.difference is None)

    def __iter__(self) -> Iterator[ModuleReport]:
        return iter(self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        """What was done, a line for each kind."""
        fused = sum(module.fused for module in self.modules)
        helping = f", {len(self) - fused} more are done by them or help them" if len(self) > fused else ""
        lines = [f"{fused} of {len(self.modules)} modules call fused operators{helping}"]
        rows = [(f"{count} x", kind, what) for (kind, what), count in _kinds(self.modules)]
        widths = [max([len(row[column]) for row in rows], default=0) for column in (0, 1)]
        lines += [f"  {count:>{widths[0]}} {kind:{widths[1]}}  {what}" for count, kind, what in rows]
        rest = Counter(module.reason for module in self.modules if module.by is None and module.reason in _REST)
        lines += [f"{count} {_REST[reason]}" for reason, count in rest.items()]
        return "\n".join([*lines, *self._checked(), "table() has a line for each module"])

    def __repr__(self) -> str:
        return str(self)

    def table(self) -> str:
        """A line for each module: what it was replaced by, or why it was left."""
        rows = [("module", "type", "replaced by, or why left")]
        unchecked = set(self.unchecked)
        rows += [
            (m.name or "(the model)", m.type, _outcome(m) + _found(m, unchecked=m in unchecked)) for m in self.modules
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:{widths[0]}}  {kind:{widths[1]}}  {outcome}".rstrip() for name, kind, outcome in rows]
        return "\n".join([*lines, *self._checked()])

    def _checked(self) -> list[str]:
        lines = [] if self.difference is None else [f"largest difference: {self.difference}"]
        if self.unchecked:
            lines.append(f"not checked, as the inputs do not reach them: {len(self.unchecked)}")
        return lines


def _kinds(modules: Iterable[ModuleReport]) -> list[tuple[tuple[str, str], int]]:
    """Class and outcome of all modules that a rule is about, each with how often; what is fused first."""
    about = [m for m in modules if m.replaced or (m.by is None and m.reason not in _REST)]
    about.sort(key=lambda m: (not m.fused, not m.replaced))
    return list(Counter((m.type, _outcome(m)) for m in about).items())


def _outcome(module: ModuleReport) -> str:
    if module.by is not None:
        return "done by its block"
    return module.calls or module.helps if module.replaced else f"left: {module.reason}"


def _found(module: ModuleReport, *, unchecked: bool) -> str:
    return " (not checked)" if unchecked else "" if module.difference is None else f" ({module.difference})"
