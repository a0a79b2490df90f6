"""`fuse_model`, `unfuse_model` and `fusion_status`: choose each module's rule, change its class."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from ..backend.options import EAGER, INDUCTOR
from ..distributed.sequence import rows_of_norm
from . import classes, eligibility
from . import graph as graphs
from .hooks import has_hooks, is_simple, submodule
from .report import FUSED, NO_RULE, NOT_FUSED, FusionReport, ModuleReport
from .rule import At, Family, Rule, Verdict, judge
from .rules import LEAVES, OPTIONAL, RULES, WITHIN_GRAPHS
from .rules.loss import is_causal_model
from .tricks import TRICKS

__all__ = ["fuse_model", "fusion_status", "unfuse_model"]

# What runs the rest of graphs, by ``compile_rest``.
_RESTS = {False: EAGER, True: INDUCTOR}
_NO_LOSS = "loss=True changes nothing: there is no causal language model of Transformers"


def fuse_model(
    model: nn.Module,
    *,
    exclude: Sequence[str | type[nn.Module]] = (),
    rules: Sequence[Rule] | None = None,
    dry_run: bool = False,
    check: Any = False,
    graph: bool = False,
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
    rest = _RESTS[compile_rest] if graph or compile_rest else ""
    with classes.unsharded(model) as sharded:
        eligibility.check_model(model)
        if check is not False:
            eligibility.check_whole(model, sharded)
        first = (*eligibility.check_rules(rules), *(OPTIONAL["loss"] if loss else ()))
        report = _fused(model, exclude, first, rest, dry_run=dry_run, check=check)
        if loss and not any(map(is_causal_model, model.modules())):
            report = replace(report, hints=(*report.hints, _NO_LOSS))
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
    rules_and_tricks = TRICKS.union({graphs.GRAPH}, *map(_names, (*first, *RULES)))
    excluded_modules, excluded_names = eligibility.excluded(model, exclude, rules_and_tricks)
    excluded_tricks = excluded_names & TRICKS
    units: list[nn.Module] = []
    if rest and graphs.GRAPH not in excluded_names:
        units = list(graphs.units(model, excluded_modules))
    tables = _Tables(
        within_graphs=(*first, *WITHIN_GRAPHS),
        beside=(*first, *(LEAVES if rest else RULES)),
    )
    verdicts = _judged(model, units, tables, excluded_modules, excluded_names)
    for unit in units:
        verdicts[unit] = _verdict_of_unit(unit, verdicts[unit], rest)
    # First, as a block that calls no operator does not compute the last steps of its branches.
    _drop_idle(verdicts)
    _drop_unused_ends(model, verdicts)
    planned = {
        module: verdict.rule for module, verdict in verdicts.items() if verdict.rule is not None
    }
    # Before any class changes, so that an error in a user's rule leaves the model unchanged.
    report = _report(model, verdicts)
    if check is not False:
        # It fuses the modules: there is no other way to run them.
        report = _check_fused(model, verdicts, planned, check, excluded_tricks)
        if dry_run:
            for module in planned:
                classes.unfuse(module)
    elif not dry_run:
        classes.fuse_all(planned, excluded_tricks)
    return report


class _Tables(NamedTuple):
    """The rules of modules in graphs, and of modules beside them."""

    within_graphs: tuple[Rule | Family, ...]
    beside: tuple[Rule | Family, ...]


def _judged(
    model: nn.Module,
    units: Iterable[nn.Module],
    tables: _Tables,
    excluded_modules: Collection[nn.Module],
    excluded_names: frozenset[str],
) -> dict[nn.Module, Verdict]:
    """Return the verdict of each module, without the rules of units."""
    inside = set(itertools.chain.from_iterable(unit.modules() for unit in units))
    verdicts = {}
    for module in model.modules():
        if module in excluded_modules:
            verdicts[module] = Verdict(None, "excluded")
            continue
        table = tables.beside
        if module in inside:
            table = tables.within_graphs
        verdicts[module] = _judge(module, table, excluded_names)
    return verdicts


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
    excluded_tricks: frozenset[str],
) -> FusionReport:
    """Fuse the planned modules that pass the check; report all modules with their differences."""
    from .check import fuse_and_check

    # On errors all modules are as they were before.
    differences, whole = fuse_and_check(model, planned, check, excluded_tricks)
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


def fusion_status(model: nn.Module) -> FusionReport:
    """Report which modules of a model call fused operators now, whatever changed since.

    If a module got hooks after it was fused (for example from ZeRO, PEFT or Accelerate), its block
    calls it as PyTorch would, and the module calls its own operator. If a module's forward or class
    was replaced, it calls no fused operator.

    Args:
        model: the model, or a part of it; it is not changed.
    Returns:
        A report like that of `fuse_model`: which operators each module calls, which modules its
        block computes, and why other modules call no fused operator. The report is true if any
        module is fused.
    Raises:
        TypeError: the model is not a torch.nn.Module.
    """
    eligibility.check_module(model, "fusion_status")
    with classes.unsharded(model):
        verdicts = {module: _current_verdict(module) for module in model.modules()}
        _drop_idle(verdicts, hooks_count=True)
        return _report(model, verdicts)


def _current_verdict(module: nn.Module) -> Verdict:
    """Return the rule by which a module is fused now, or why it is not."""
    if _was_changed(module):
        return Verdict(None, "its class was changed after it was fused")
    if not classes.is_fused(module):
        return Verdict(None, NOT_FUSED)
    replaced = classes.replaced_since(module)
    if replaced:
        return Verdict(None, f"its {replaced} was replaced on the instance after it was fused")
    return Verdict(getattr(type(module), "_fusedops_rule", None))


def _was_changed(module: nn.Module) -> bool:
    """Whether the module has a subclass of a fused class, as from a parametrization."""
    if not hasattr(type(module), "_fusedops_original"):
        return False
    return not classes.is_fused(module)


def _names(entry: Rule | Family) -> tuple[str, ...]:
    if isinstance(entry, Rule):
        return (entry.name,)
    return entry.names


def _judge(
    module: nn.Module, rules: tuple[Rule | Family, ...], excluded: frozenset[str]
) -> Verdict:
    if hasattr(type(module), "_fusedops_original"):
        return Verdict(None, FUSED)
    return judge(module, rules, excluded)


def _rules_in(
    module: nn.Module, verdicts: Mapping[nn.Module, Verdict], *, hooks_count: bool = True
) -> At:
    """Return a function from paths in a module to rules, planned ones and those already applied.

    With ``hooks_count``, a module with hooks has no rule, since its block calls it as PyTorch
    would. Norms under `SequenceParallel` are an exception: see `sequence`.
    """

    def at(path: str) -> Rule | None:
        inner = submodule(module, path)
        if inner is None or inner not in verdicts:
            return None
        if hooks_count and _is_called(inner):
            return None
        # A module that was fused before has no verdict of its own, but its rule still holds.
        return verdicts[inner].rule or getattr(type(inner), "_fusedops_rule", None)

    return at


def _is_called(module: nn.Module) -> bool:
    """Whether the module's block has to call it, to run its hooks."""
    return has_hooks(module) and not rows_of_norm(module)


def _drop_idle(verdicts: dict[nn.Module, Verdict], *, hooks_count: bool = False) -> None:
    """Drop the rules of modules that would call no operator.

    `fuse_model` ignores hooks inside such a module: they may be removed again, and then it calls
    an operator. `fusion_status`, which reports the present state, counts them (``hooks_count``).
    """
    # Inner modules come first: whether a block calls an operator depends on the rules inside.
    for module, verdict in reversed(list(verdicts.items())):
        if verdict.rule is None:
            continue
        at = _rules_in(module, verdicts, hooks_count=hooks_count)
        reason = verdict.rule.needs(module, at)
        if reason:
            verdicts[module] = Verdict(None, reason)


def _drop_unused_ends(model: nn.Module, verdicts: dict[nn.Module, Verdict]) -> None:
    """Drop the rules of modules that only leave their last steps to a block that does not exist."""
    used: set[nn.Module] = set()
    # Outer modules come first: only a block that keeps its rule computes what is inside.
    for module in model.modules():
        rule = verdicts[module].rule
        if rule is None:
            continue
        if _only_leaves(rule) and module not in used:
            verdicts[module] = Verdict(None, NO_RULE)
        else:
            used.update(_taken(module, rule))


def _only_leaves(rule: Rule) -> bool:
    """Whether modules of the rule only leave their last steps to the block around them.

    Rules without ``takes`` are applied also where no such block has a rule: T5's attention, for
    one, has a fast path.
    """
    return not rule.calls and rule.takes is not None


def _taken(module: nn.Module, rule: Rule) -> Iterable[nn.Module]:
    """Return the modules inside whose last steps the module computes."""
    if rule.takes is None:
        return module.modules()
    return [inner for _, inner in _inner(module, rule.takes)]


def _inner(module: nn.Module, paths: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules at these paths in a module, as far as they exist, with their paths."""
    for path in paths:
        inner = submodule(module, path)
        if inner is not None:
            yield path, inner


def _report(model: nn.Module, verdicts: Mapping[nn.Module, Verdict]) -> FusionReport:
    names = {module: name for name, module in model.named_modules()}
    blocks: dict[nn.Module, str] = {}
    # Outer modules come first, so of several blocks the innermost is reported.
    for module, name in names.items():
        for inner in _computed_by(module, verdicts):
            blocks[inner] = name
    lines = {}
    for module, name in names.items():
        lines[module] = _line(name, module, verdicts, block=blocks.get(module))
    return FusionReport(tuple(lines.values()))


def _computed_by(module: nn.Module, verdicts: Mapping[nn.Module, Verdict]) -> Iterator[nn.Module]:
    """Yield the modules inside that a fused module computes itself, without calling them."""
    rule = verdicts[module].rule
    if rule is None:
        return
    if graphs.is_unit(rule):
        yield from itertools.filterfalse(lambda inner: verdicts[inner].rule, module.modules())
        return
    parts = rule.parts
    paths = parts if isinstance(parts, tuple) else parts(module)
    at = _rules_in(module, verdicts)
    for path, inner in _inner(module, paths):
        if at(path) or is_simple(inner):
            yield inner


def _line(
    name: str, module: nn.Module, verdicts: Mapping[nn.Module, Verdict], block: str | None
) -> ModuleReport:
    """Report one module. ``block`` is the name of the block that computes it, or None."""
    rule, reason = verdicts[module].rule, verdicts[module].reason
    cls = type(module).__name__
    if rule is None:
        # Any other reason is specific to the module, and is reported instead of its block.
        is_general = reason in (NO_RULE, NOT_FUSED)
        return ModuleReport(name, cls, reason=reason, by=block if is_general else None)
    if block is not None:
        return ModuleReport(name, cls, rule.name, helps="computed by its block", by=block)
    calls, helps = rule.calls, rule.helps
    if not isinstance(calls, str):
        calls = calls(module, _rules_in(module, verdicts))
    # The reason why a unit's loss, for one, is not fused.
    calls = "; ".join(filter(None, (calls, reason)))
    if not isinstance(helps, str):
        helps = helps(module)
    return ModuleReport(name, cls, rule.name, calls, helps)
