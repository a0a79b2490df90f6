"""What was done to a model: one line a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Difference", "FusionReport", "ModuleReport"]


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
        rule: the rule that it was fused by, "" if it was left.
        calls: the operators that a fused module calls.
        reason: why a module was left.
        difference: what ``check`` found; None if it did not look at the module.
    """

    name: str
    type: str
    rule: str = ""
    calls: str = ""
    reason: str = ""
    difference: Difference | None = None

    @property
    def fused(self) -> bool:
        """Whether the module was, or in a dry run would be, fused."""
        return bool(self.rule)


@dataclass(frozen=True)
class FusionReport:
    """What `fusedops.fuse_model` did, or in a dry run would do; true if that is anything.

    Its length and its elements are those of ``replaced``. Printed, it is a table of all modules.

    Attributes:
        modules: every module of the model.
        difference: of the whole model's outputs and gradients, from ``check``.
    """

    modules: tuple[ModuleReport, ...]
    difference: Difference | None = None

    @property
    def replaced(self) -> tuple[ModuleReport, ...]:
        """The modules that were fused."""
        return tuple(module for module in self.modules if module.fused)

    @property
    def left(self) -> tuple[ModuleReport, ...]:
        """The others, each with its reason."""
        return tuple(module for module in self.modules if not module.fused)

    def __iter__(self) -> Iterator[ModuleReport]:
        return iter(self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        rows = [("module", "type", "replaced by, or why left")]
        rows += [(module.name or "(the model)", module.type, _outcome(module)) for module in self.modules]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:{widths[0]}}  {kind:{widths[1]}}  {outcome}".rstrip() for name, kind, outcome in rows]
        lines.append(f"{len(self)} of {len(self.modules)} modules fused")
        if self.difference is not None:
            lines.append(f"largest difference: {self.difference}")
        return "\n".join(lines)


def _outcome(module: ModuleReport) -> str:
    found = "" if module.difference is None else f" ({module.difference})"
    return f"{module.calls}{found}" if module.fused else f"left: {module.reason}{found}"
