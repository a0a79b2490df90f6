"""`fuse_model`, `unfuse_model` and `fusion_status`: choose each module's rule, change its class."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..backend.entry import explain
from ..backend.options import EAGER, INDUCTOR
from ..backend.report import CompileReport
from ..core.compat.modules import has_compiled_call
from ..core.launches import launch
from . import classes, eligibility
from . import graph as graphs
from .report import FUSED, NO_RULE, NOT_FUSED, FusionReport, ModuleReport
from .rule import Family, Rule, Verdict, judge
from .rules import LEAVES, OPTIONAL, OTHERS, RULES
from .rules.loss import is_causal_model, why_whole

__all__ = ["fuse_model", "fusion_status", "unfuse_model"]

_COMPILED = (
    "model.compile compiles the model as a whole: fusedops.explain has what its backend fuses, and "
    "the graphs below run without it"
)
_FUSED_BEFORE = (
    "loss and compile_rest change nothing in modules that are fused already: unfuse_model comes "
    "first"
)
_NO_LOSS = "loss=True changes nothing: there is no causal language model of Transformers"


def _names(entry: Rule | Family) -> tuple[str, ...]:
    if isinstance(entry, Rule):
        return (entry.name,)
    return entry.names


_NAMES_OF_LEAVES = frozenset(itertools.chain.from_iterable(map(_names, LEAVES)))


def fuse_model(
    model: nn.Module,
    *,
    exclude: Sequence[str | type[nn.Module]] = (),
    rules: Sequence[Rule] | None = None,
    dry_run: bool = False,
    check: Any = False,
    graph: bool = True,
    compile_rest: bool = False,
    loss: bool = False,
) -> FusionReport:
    """Make the modules of a model call the fused operators, in place; return a report.

    If a rule matches a module, its class becomes a subclass of its own class. Nothing else changes:
    parameters stay the same objects, and ``state_dict`` keys, hooks, dtype, device, training mode,
    tied weights and optimizers are as before. A module that is already fused stays as it is.
    `unfuse_model` undoes the call. Use it before the static quantisation of ``torch.ao``, which
    observes no fused norm or activation.

    Args:
        model: a model of PyTorch or Transformers, or your own. Modules without a rule are left as
            they are.
        exclude: modules to leave as they are: names of modules, patterns of names with ``*``, names
            of classes, or classes. The modules inside are left too. An entry may also be the name
            of a rule, which is then not applied; modules inside those that it matches may still be
            fused.
        rules: your own rules, tried before those of the library.
        dry_run: return the report without changing the model; with ``check``, the report has the
            differences too.
        check: example inputs (a tensor, a tuple of arguments or a dict of keyword arguments), or
            True for the model's own ``dummy_inputs``. The model and each fused module run on them
            in evaluation mode before and after, forward and backward. A module that differs by more
            than rounding is restored, and reported as left.
        graph: run the whole model as `fusedops.compile` with ``rest="eager"`` does: the regions
            of its graph become operators, and PyTorch's eager operators run the rest. The first
            call takes seconds. If ``exclude`` names modules in it, the largest modules without one
            of them run so. On a device without kernels, and for the tokens of a generation, the
            model runs as it is.
        compile_rest: the same with Inductor for the rest of the graph.
        loss: causal language models of Transformers compute their loss by `linear_cross_entropy`
            in training with labels: their logits, which are then None in the output, are never
            whole in memory. In evaluation and without labels they are as before. If a model's head
            is no plain linear layer (one with an adapter of PEFT, say), or its forward does more
            to the logits than to scale and cap them, the report has the reason.
    Returns:
        A report: which operators each module calls now, or why it was left. ``print`` shows a
        summary; ``table()`` has a line for each module; ``hints`` has remarks about the model.
    Raises:
        TypeError: the model is not a torch.nn.Module; a class cannot be subclassed; an entry of
            exclude is neither a name nor a class; check is True and the model has no
            ``dummy_inputs``; rules is not a sequence of `Rule`; dry_run, graph, compile_rest or
            loss is not a bool.
        ValueError: the model is compiled, scripted, quantised or wrapped in
            `FullyShardedDataParallel`; check is passed for a sharded model; a name in exclude is
            unknown, or the model has no module of a class in it.
    """
    eligibility.check_module(model, "fuse_model")
    eligibility.check_flags(dry_run=dry_run, graph=graph, compile_rest=compile_rest, loss=loss)
    rest = EAGER if graph else ""
    if compile_rest:
        rest = INDUCTOR
    with classes.unsharded(model) as sharded:
        eligibility.check_model(model)
        if check is not False:
            eligibility.check_whole(model, sharded)
        first = (*eligibility.check_rules(rules), *(OPTIONAL["loss"] if loss else ()))
        report = _fused(model, exclude, first, rest, dry_run=dry_run, check=check)
        if loss and not any(map(is_causal_model, model.modules())):
            report = replace(report, hints=(*report.hints, _NO_LOSS))
        if (loss or compile_rest) and FUSED in {line.reason for line in report.left}:
            report = replace(report, hints=(*report.hints, _FUSED_BEFORE))
    return report


def _fused(
    model: nn.Module,
    exclude: Sequence[str | type[nn.Module]],
    first: tuple[Rule | Family, ...],
    rest: str,
    *,
    dry_run: bool,
    check: Any,
) -> FusionReport:
    """Fuse a model.

    Args:
        model: the model.
        exclude: modules and rules to leave.
        first: the rules before those of the library.
        rest: what runs the rest of graphs; "" for no graphs.
        dry_run: whether to change nothing.
        check: example inputs, True or False.
    """
    names = frozenset({graphs.GRAPH}.union(*map(_names, (*first, *RULES))))
    excluded = _Excluded(*eligibility.excluded(model, exclude, names))
    verdicts = _judged(model, first, excluded, rest)
    planned = {
        module: verdict.rule for module, verdict in verdicts.items() if verdict.rule is not None
    }
    # Before any class changes, so that an error in a user's rule leaves the model unchanged.
    report = _report(model, verdicts)
    if check is not False:
        # It fuses the modules: there is no other way to run them.
        report = _check_fused(model, verdicts, planned, check)
        if dry_run:
            for module in planned:
                classes.unfuse(module)
    elif not dry_run:
        classes.fuse_all(planned)
    return report


class _Excluded(NamedTuple):
    """What `fuse_model` leaves: modules, and rules by name."""

    modules: Collection[nn.Module]
    rules: frozenset[str]


def _judged(
    model: nn.Module, first: tuple[Rule | Family, ...], excluded: _Excluded, rest: str
) -> dict[nn.Module, Verdict]:
    """Return the verdict of each module; see `_fused`."""
    has_graphs = bool(rest) and graphs.GRAPH not in excluded.rules
    units = list(graphs.units(model, excluded.modules)) if has_graphs else []
    inside = set(itertools.chain.from_iterable(unit.modules() for unit in units))
    verdicts = {}
    for module in model.modules():
        if module in excluded.modules:
            verdicts[module] = Verdict(None, "excluded")
        elif module in inside:
            verdict = _judge(module, (*first, *LEAVES, *OTHERS), excluded.rules)
            verdicts[module] = _within_graph(verdict, first)
        else:
            verdicts[module] = _judge(module, (*first, *RULES), excluded.rules)
            # Without the excluded modules in it, it would be in a graph.
            is_divided = has_graphs and graphs.can_be_unit(module)
            if is_divided and verdicts[module].reason == NO_RULE:
                verdicts[module] = Verdict(None, "excluded in part")
    for unit in units:
        verdicts[unit] = _verdict_of_unit(unit, verdicts[unit], rest)
    return verdicts


def _within_graph(verdict: Verdict, first: tuple[Rule | Family, ...]) -> Verdict:
    """Return the verdict of a module in a unit, whose graph has the formulas of leaves."""
    rule = verdict.rule
    if rule is None or rule in first or rule.name not in _NAMES_OF_LEAVES:
        return verdict
    return Verdict(graphs.beside(rule))


def _verdict_of_unit(unit: nn.Module, verdict: Verdict, rest: str) -> Verdict:
    """Return the rule of a unit, with the rule of its class for what no graph does.

    If that rule does not fit the module, the reason stays.
    """
    if verdict.reason == FUSED:
        return verdict
    reason = "" if verdict.reason == NO_RULE else verdict.reason
    return Verdict(graphs.rule_of(type(unit), rest, verdict.rule), reason)


def _check_fused(
    model: nn.Module,
    verdicts: dict[nn.Module, Verdict],
    planned: Mapping[nn.Module, Rule],
    check: Any,
) -> FusionReport:
    """Fuse the planned modules that pass the check; report all modules with their differences."""
    from .check import fuse_and_check

    # On errors all modules are as they were before.
    differences, whole = fuse_and_check(model, planned, check)
    # What was compiled has guards for copies of the parameters.
    for module in planned:
        graphs.forget(module)
    for module, difference in differences.items():
        if not difference.passes:
            verdicts[module] = Verdict(None, f"{planned[module].name} differs from it")
    report, lines = _report(model, verdicts), []
    modules = dict(model.named_modules()).values()
    for line, module in zip(report.modules, modules, strict=True):
        lines.append(replace(line, difference=differences.get(module)))
    return FusionReport(tuple(lines), whole, report.hints)


def unfuse_model(model: nn.Module) -> None:
    """Undo `fuse_model`, in place.

    Each fused module gets its own class back, and graphs are dropped.

    Args:
        model: the model, or a part of it.

    Raises:
        TypeError: the model is not a torch.nn.Module.
        ValueError: after fusing, a module's class was changed (as by a parametrization), or its
            forward was replaced (as by Accelerate). Undo that first. The model is unchanged.
    """
    eligibility.check_module(model, "unfuse_model")
    with classes.unsharded(model):
        _unfuse(model)


def _unfuse(model: nn.Module) -> None:
    # All modules are checked first, so that an error leaves the model unchanged.
    for name, module in model.named_modules():
        if _was_changed(module):
            raise ValueError(
                f"unfuse_model: the class of module {name!r} was changed after it was fused, to "
                f"{type(module).__name__}; undo that first"
            )
        if replaced := classes.replaced_since(module):
            raise ValueError(
                f"unfuse_model: module {name!r} was given a {replaced} of its own after it was "
                "fused, which may call the fused one; undo that first (a hook of Accelerate's, "
                "say, by remove_hook_from_module)"
            )
    for module in model.modules():
        classes.unfuse(module)
        graphs.forget(module)


def fusion_status(model: nn.Module, *args: Any, **kwargs: Any) -> FusionReport:
    """Report which modules of a model call fused operators now, whatever changed since.

    If a module's forward or class was replaced, it calls no fused operator.

    Args:
        model: the model, or a part of it; it is not changed.
        *args: positional arguments of a call of the model. With arguments, the report also has the
            regions of the graphs: the modules and the lines of code that each is of, why others are
            left, and what to do about it. The model is called once; its graphs are traced, and not
            compiled, in the caller's mode, as by `fusedops.explain`.
        **kwargs: arguments by keyword.
    Returns:
        A report like that of `fuse_model`: which operators each module calls, which modules are in
        graphs, and why other modules call no fused operator. The report is true if any module is
        fused.
    Raises:
        TypeError: the model is not a torch.nn.Module.
    """
    eligibility.check_module(model, "fusion_status")
    with classes.unsharded(model):
        verdicts = {module: _current_verdict(module) for module in model.modules()}
    report = _report(model, verdicts)
    if not args and not kwargs:
        return report
    return _with_graphs(model, report, args, kwargs)


def _with_graphs(
    model: nn.Module, report: FusionReport, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FusionReport:
    """Return a report with the graphs of the units that a call of a model reaches."""
    from .check import calls_in

    modules = dict(model.named_modules())
    names = [line.name for line in report if line.rule == graphs.GRAPH]
    # Nothing is compiled for this call.
    with torch.compiler.set_stance("force_eager"):
        calls = calls_in(model, [modules[name] for name in names], args, kwargs)
    reports = dict[str, CompileReport]()
    small = []
    for name in names:
        if modules[name] in calls:
            inputs, options = calls[modules[name]]
            rest = graphs.rest_of(modules[name])
            reports[name] = explain(modules[name], *inputs, rest=rest, **options)
            if graphs.is_small(modules[name], inputs, options):
                small.append(name)
    hints = (*report.hints, *([_COMPILED] if has_compiled_call(model) and reports else []))
    return replace(report, graphs=reports, small=tuple(small), hints=hints)


def _current_verdict(module: nn.Module) -> Verdict:
    """Return the rule by which a module is fused now, or why it is not."""
    if _was_changed(module):
        return Verdict(None, "its class was changed after it was fused")
    if not classes.is_fused(module):
        return Verdict(None, NOT_FUSED)
    replaced = classes.replaced_since(module)
    if replaced:
        return Verdict(None, f"its {replaced} was replaced on the instance after it was fused")
    cls: Any = type(module)
    rule: Rule = cls._fusedops_rule
    origin = classes.foreign_forward(module)
    if graphs.is_unit(rule) and "forward" in vars(module) and origin.startswith(classes.LIGER):
        # It does not call the forward that it replaces, as Accelerate's does.
        return Verdict(None, f"its forward was replaced by one of {origin}, which runs no graph")
    return Verdict(rule, _why_whole(module, rule))


def _why_whole(module: nn.Module, rule: Rule) -> str:
    """Return why a fused loss needs whole logits now: the head may have changed since."""
    inner = graphs.inner_of(rule)
    if inner is None or inner.origin != ("loss", ""):
        return ""
    reason = why_whole(module, classes.original_class(module))
    return f"its logits are whole now, as {reason}" if reason else ""


def _was_changed(module: nn.Module) -> bool:
    """Whether the module has a subclass of a fused class, as from a parametrization."""
    if not hasattr(type(module), "_fusedops_original"):
        return False
    return not classes.is_fused(module)


def _judge(
    module: nn.Module, rules: tuple[Rule | Family, ...], excluded: frozenset[str]
) -> Verdict:
    if hasattr(type(module), "_fusedops_original"):
        return Verdict(None, FUSED)
    return judge(module, rules, excluded)


def _report(model: nn.Module, verdicts: Mapping[nn.Module, Verdict]) -> FusionReport:
    units: dict[nn.Module, str] = {}
    names = {module: name for name, module in model.named_modules()}
    for unit, name in names.items():
        if graphs.is_unit(verdicts[unit].rule) or _is_unit_already(unit, verdicts[unit]):
            units.update(dict.fromkeys(unit.modules(), name))
            del units[unit]
    lines = []
    for module, name in names.items():
        lines.append(_line(name, module, verdicts[module], units.get(module)))
    report = FusionReport(tuple(lines))
    return replace(report, hints=_hints(model)) if report else report


def _hints(model: nn.Module) -> tuple[str, ...]:
    """Return a remark if no kernel runs where a model is."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = sorted({tensor.device.type for tensor in tensors})
    if not devices or any(map(launch.runs_kernels, devices)):
        return ()
    return (f"no kernels run on {' and '.join(devices)}, only on a GPU",)


def _is_unit_already(module: nn.Module, verdict: Verdict) -> bool:
    """Whether a module is a unit from an earlier call."""
    cls: Any = type(module)
    return verdict.reason == FUSED and graphs.is_unit(cls._fusedops_rule)


def _line(name: str, module: nn.Module, verdict: Verdict, unit: str | None) -> ModuleReport:
    """Report one module. ``unit`` is the name of the unit in whose graph it is, or None."""
    rule, reason, cls = verdict.rule, verdict.reason, type(module).__name__
    forward = classes.foreign_forward(module)
    if rule is not None:
        # The reason is why a unit's loss, for one, is not fused.
        calls = "; ".join(filter(None, (rule.calls, reason)))
        return ModuleReport(name, cls, rule.name, calls, by=unit, forward=forward)
    return ModuleReport(name, cls, reason=reason, by=unit, forward=forward)
