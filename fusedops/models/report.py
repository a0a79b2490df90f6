"""Reports about a model: a line for each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["NOT_FUSED", "NO_RULE", "Difference", "FusionReport", "ModuleReport"]


# Reasons of modules that the summary only counts.
NO_RULE, NOT_FUSED = "no rule", "not fused"
_REST = {NO_RULE: "left as they are: no rule matches", NOT_FUSED: "not fused"}


@dataclass(frozen=True)
class Difference:
    """The difference that ``check`` measured between a module or model before and after fusing, and its limit.

    Attributes:
        output: the largest difference of an output.
        gradient: the largest difference of a gradient.
        allowed_output: the limit for ``output``.
        allowed_gradient: the limit for ``gradient``.
    """

    output: float
    gradient: float
    allowed_output: float
    allowed_gradient: float

    @property
    def passes(self) -> bool:
        """Whether both differences are within their limits; NaN is not."""
        return self.output <= self.allowed_output and self.gradient <= self.allowed_gradient

    def __str__(self) -> str:
        return f"output {self.output:.2g} of {self.allowed_output:.2g}, gradient {self.gradient:.2g} of {self.allowed_gradient:.2g}"


@dataclass(frozen=True)
class ModuleReport:
    """A line of a report: one module.

    Attributes:
        name: the module's name in ``named_modules``; "" is the model itself.
        type: the name of its class.
        rule: the name of the rule by which it is fused; "" if it was left.
        calls: the fused operators that it calls; "" if it calls none.
        helps: what a fused module does that calls no operator itself, such as leaving its last bias to its block.
        reason: why the module was left.
        by: the name of the fused module that computes this one too; None if there is none.
        difference: the result of ``check``; None if the module was not compared.
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
        """Whether the module got another class, or would get one in a dry run."""
        return bool(self.rule)

    @property
    def fused(self) -> bool:
        """Whether the module calls a fused operator itself."""
        return bool(self.calls)


@dataclass(frozen=True, repr=False)
class FusionReport:
    """The result of `fusedops.fuse_model` and `fusedops.fusion_status`: a `ModuleReport` for each module.

    Length and iteration are those of ``replaced``, so that a report is true if any module is fused. Printed, it has a line
    for each kind of module; `table` has a line for each module.

    Attributes:
        modules: all modules of the model.
        difference: the result of ``check`` for the whole model; None without a check.
    """

    modules: tuple[ModuleReport, ...]
    difference: Difference | None = None

    @property
    def replaced(self) -> tuple[ModuleReport, ...]:
        """The modules that got another class: those that call operators, and those that help their block."""
        return tuple(module for module in self.modules if module.replaced)

    @property
    def left(self) -> tuple[ModuleReport, ...]:
        """The modules that were left, each with its reason."""
        return tuple(module for module in self.modules if not module.replaced)

    @property
    def unchecked(self) -> tuple[ModuleReport, ...]:
        """The replaced modules that the inputs of ``check`` do not reach; empty without a check."""
        if self.difference is None:
            return ()
        return tuple(module for module in self.replaced if module.difference is None)

    def __iter__(self) -> Iterator[ModuleReport]:
        return iter(self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        """The summary: a line for each kind of module."""
        fused = sum(module.fused for module in self.modules)
        helping = f", {len(self) - fused} more are computed inside them or support them" if len(self) > fused else ""
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
        """Return a text with a line for each module: the operators that it calls, or why it was left."""
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
        return "computed by its block"
    return module.calls or module.helps if module.replaced else f"left: {module.reason}"


def _found(module: ModuleReport, *, unchecked: bool) -> str:
    return " (not checked)" if unchecked else "" if module.difference is None else f" ({module.difference})"
