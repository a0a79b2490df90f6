"""Reports about a model: a line for each module."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..backend.report import CompileReport

__all__ = ["FUSED", "NOT_FUSED", "NO_RULE", "Difference", "FusionReport", "ModuleReport"]


# Reasons of modules that the summary only counts.
NO_RULE, NOT_FUSED = "no rule", "not fused"
# The reason of modules that were fused before.
FUSED = "fused already"
_ONLY_COUNTED = {NO_RULE: "left as they are: no rule matches", NOT_FUSED: "not fused"}


@dataclass(frozen=True)
class Difference:
    """The difference that ``check`` measured between a module or model before and after fusing.

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
        output = f"output {self.output:.2g} (limit {self.allowed_output:.2g})"
        gradient = f"gradient {self.gradient:.2g} (limit {self.allowed_gradient:.2g})"
        return f"{output}, {gradient}"


@dataclass(frozen=True)
class ModuleReport:
    """A line of a report: one module.

    Attributes:
        name: the module's name in ``named_modules``; "" is the model itself.
        type: the name of its class.
        rule: the name of the rule by which it is fused; "" if it was left.
        calls: the fused operators that it calls; "" if it calls none.
        reason: why the module was left.
        by: the name of the module in whose graph this one is; None if it is in none.
        difference: the result of ``check``; None if the module was not compared.
        forward: the Python module of its forward, if that was replaced on the instance or is
            Liger-Kernel's, which ends a graph; else "".
    """

    name: str
    type: str
    rule: str = ""
    calls: str = ""
    reason: str = ""
    difference: Difference | None = None
    by: str | None = None
    forward: str = ""

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
    """The result of `fusedops.fuse_model` and `fusedops.fusion_status`, by module.

    Length and iteration are those of ``replaced``, so that a report is true if any module is fused.
    Printed, it has a line for each kind of module; `table` has a line for each module.

    Attributes:
        modules: all modules of the model.
        difference: the result of ``check`` for the whole model; None without a check.
        hints: remarks about the model, such as that it has no loss to fuse.
        graphs: by the name of each unit, the regions of its graphs, from `fusion_status` with the
            arguments of a call; empty without arguments.
        small: the names of the units whose part of that call is small: they run it without their
            graph.
    """

    modules: tuple[ModuleReport, ...]
    difference: Difference | None = None
    hints: tuple[str, ...] = ()
    graphs: Mapping[str, CompileReport] = field(default_factory=dict)
    small: tuple[str, ...] = ()

    @property
    def replaced(self) -> tuple[ModuleReport, ...]:
        """The modules that got another class."""
        return tuple(filter(_is_replaced, self.modules))

    @property
    def left(self) -> tuple[ModuleReport, ...]:
        """The modules that were left, each with its reason."""
        return tuple(itertools.filterfalse(_is_replaced, self.modules))

    @property
    def unchecked(self) -> tuple[ModuleReport, ...]:
        """The replaced modules that the inputs of ``check`` do not reach; empty without a check."""
        if self.difference is None:
            return ()
        return tuple(itertools.filterfalse(_is_compared, self.replaced))

    def __iter__(self) -> Iterator[ModuleReport]:
        return iter(self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        """Return the summary: a line for each kind of module."""
        lines = [
            self._headline(),
            *self._kind_lines(),
            *self._counted_lines(),
            *self._checked(),
            *self.hints,
            *self._next_step(),
            "table() has a line for each module",
            *self._graph_lines(),
        ]
        return "\n".join(lines)

    def _headline(self) -> str:
        modules = len(self.modules)
        if not any(map(_is_in_graph, self.modules)):
            return f"{sum(map(_is_fused, self.modules))} of {modules} modules call fused operators"
        run = [m for m in self.modules if m.fused or _is_in_graph(m) or m.reason == FUSED]
        return f"{len(run)} of {modules} modules are in graphs or call fused operators"

    def _kind_lines(self) -> list[str]:
        rows = [(f"{count} x", kind, outcome) for (kind, outcome), count in _kinds(self.modules)]
        counts, kinds = _width(rows, 0), _width(rows, 1)
        lines = []
        for count, kind, outcome in rows:
            lines.append(f"  {count:>{counts}} {kind:{kinds}}  {outcome}")
        return lines

    def _next_step(self) -> list[str]:
        """A line for modules that have another reason than that no rule matches."""
        if not any(map(_is_left_with_reason, self.modules)):
            return []
        return ["fusedops.compile fuses row-wise code that is left, and fusedops.rowwise your own"]

    def _graph_lines(self) -> list[str]:
        lines = []
        for name, report in self.graphs.items():
            lines.append(f"{name or '(the model)'}: {report}")
            if name in self.small:
                kind = "module" if name else "model"
                lines.append(f"  this call is small: the {kind} runs without this graph")
        return lines

    def _counted_lines(self) -> list[str]:
        counts = Counter(map(_reason, filter(_is_only_counted, self.modules)))
        return [f"{count} {_ONLY_COUNTED[reason]}" for reason, count in counts.items()]

    def __repr__(self) -> str:
        return str(self)

    def table(self) -> str:
        """Return a text with a line for each module: the operators it calls, or why it was left."""
        rows = [("module", "type", "replaced by, or why left")]
        unchecked = set(self.unchecked)
        for module in self.modules:
            outcome = _outcome(module) + _difference(module, unchecked=module in unchecked)
            rows.append((module.name or "(the model)", module.type, outcome))
        names, types = _width(rows, 0), _width(rows, 1)
        lines = [f"{row[0]:{names}}  {row[1]:{types}}  {row[2]}".rstrip() for row in rows]
        return "\n".join([*lines, *self._checked(), *self.hints])

    def _checked(self) -> list[str]:
        if self.difference is None:
            return []
        lines = [f"largest difference: {self.difference}"]
        if self.unchecked:
            lines.append(f"not checked, as the inputs do not reach them: {len(self.unchecked)}")
        return lines


_is_replaced = operator.attrgetter("replaced")
_is_fused = operator.attrgetter("fused")
_reason = operator.attrgetter("reason")


def _is_in_graph(module: ModuleReport) -> bool:
    return module.by is not None


def _is_compared(module: ModuleReport) -> bool:
    """Whether ``check`` compared the module."""
    return module.difference is not None


def _kinds(modules: Iterable[ModuleReport]) -> list[tuple[tuple[str, str], int]]:
    """Count classes with their outcomes; modules that call operators come first.

    Modules that the summary only counts, or that are only in a graph, are left out.
    """
    shown = list(filter(_is_shown, modules))
    # The sort is stable: within each group the order is the model's.
    shown.sort(key=lambda module: (not module.fused, not module.replaced))
    return list(Counter((module.type, _outcome(module)) for module in shown).items())


def _is_shown(module: ModuleReport) -> bool:
    """Whether the summary has the module's class in a line."""
    if module.replaced or (module.forward and _is_in_graph(module)):
        return True
    return module.by is None and not _is_only_counted(module)


def _is_left_with_reason(module: ModuleReport) -> bool:
    """Whether the module is left for another reason than the user's or that no rule matches."""
    if module.replaced or _is_in_graph(module) or not _is_shown(module):
        return False
    return not module.reason.startswith(("excluded", FUSED))


def _is_only_counted(module: ModuleReport) -> bool:
    """Whether the summary only counts the module."""
    return module.by is None and module.reason in _ONLY_COUNTED


def _width(rows: Iterable[tuple[str, ...]], column: int) -> int:
    return max([len(row[column]) for row in rows], default=0)


def _outcome(module: ModuleReport) -> str:
    if module.replaced:
        return module.calls
    if module.reason == FUSED:
        return FUSED
    if not _is_in_graph(module):
        return f"left: {module.reason}"
    return "in the graph" + (f", with a forward of {module.forward}" if module.forward else "")


def _difference(module: ModuleReport, *, unchecked: bool) -> str:
    if unchecked:
        return " (not checked)"
    if module.difference is None:
        return ""
    return f" ({module.difference})"
