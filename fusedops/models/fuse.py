"""`fuse_model` and `unfuse_model`: which rule takes each module, and the change of class."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..core import compat
from . import classes, eligibility
from .hooks import found, has_hooks, is_simple
from .report import NO_RULE, NOT_FUSED, FusionReport, ModuleReport
from .rule import At, Family, Rule, Verdict, judge
from .rules import RULES
from .spread import rows_of_norm
from .tricks import TRICKS

__all__ = ["fuse_model", "fusion_status", "unfuse_model"]

# The models that ``compile_rest`` compiled, so that `unfuse_model` undoes that and no compilation of the user's.
_compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fuse_model(
    model: nn.Module,
    *,
    exclude: Sequence[str | type[nn.Module]] = (),
    rules: Sequence[Rule] | None = None,
    dry_run: bool = False,
    check: Any = False,
    compile_rest: bool = False,
) -> FusionReport:
    """Make the modules of a model call the fused operators, in place; return a report.

    If a rule matches a module, its class becomes a subclass of its own class. Nothing else changes: parameters stay the same
    objects, and ``state_dict`` keys, hooks, dtype, device, training mode, tied weights and optimizers are as before. A
    module that is already fused stays as it is. `unfuse_model` undoes the call; it has to before the static quantisation of
    ``torch.ao``, which observes no fused norm or activation.

    Args:
        model: a model of PyTorch or Transformers, or your own. Modules without a rule are left as they are.
        exclude: modules to leave as they are: names of modules, patterns of names with ``*``, names of classes, or classes.
            The modules inside are left too. An entry may also be the name of a rule, which is then not applied; modules
            inside those that it matches may still be fused.
        rules: your own rules, tried before those of the library.
        dry_run: return the report without changing the model; with ``check``, the report has the differences too.
        check: example inputs (a tensor, a tuple of arguments or a dict of keyword arguments), or True for the model's
            own ``dummy_inputs``. The model and each fused module run on them in evaluation mode before and after,
            forward and backward. A module that differs by more than rounding is restored, and reported as left.
        compile_rest: afterwards compile the model with torch.compile, in place; fused operators stay whole in the graph.
    Returns:
        A report: which operators each module calls now, or why it was left. ``print`` shows a summary; ``table()`` has a
        line for each module.
    Raises:
        TypeError: the model is not a torch.nn.Module; a class cannot be subclassed; an entry of exclude is neither a
            name nor a class; check is True and the model has no ``dummy_inputs``; rules is not a sequence of `Rule`;
            dry_run or compile_rest is not a bool.
        ValueError: the model is compiled, scripted, quantised or wrapped in `FullyShardedDataParallel`; check is given for
            a sharded model; a name in exclude is unknown, or the model has no module of a class in it.
    """
    eligibility.check_module(model)
    eligibility.check_flags(dry_run=dry_run, compile_rest=compile_rest)
    with classes.unsharded(model) as sharded:
        eligibility.check_model(model)
        if check is not False:
            eligibility.check_whole(model, sharded)
        report = _fused(model, exclude, eligibility.check_rules(rules), dry_run=dry_run, check=check)
    if compile_rest and not dry_run:
        model.compile()
        _compiled.add(model)
    return report


def _fused(model: nn.Module, exclude: Sequence[str | type[nn.Module]], rules: tuple[Rule, ...], *, dry_run: bool,
           check: Any) -> FusionReport:  # fmt: skip
    table = (*rules, *RULES)
    left, off = eligibility.excluded(model, exclude, TRICKS.union(*map(_names, table)))
    verdicts = {
        module: Verdict(None, "excluded") if module in left else _judge(module, table, off)
        for module in model.modules()
    }
    _drop_idle(verdicts)
    _drop_unheard(model, verdicts)
    report = _report(model, verdicts)
    planned = {module: verdict.rule for module, verdict in verdicts.items() if verdict.rule is not None}
    if check is not False:
        from .check import fuse_and_check

        differences, whole = fuse_and_check(model, planned, check, off & TRICKS)
        for module, difference in differences.items():
            if not difference.passes:
                verdicts[module] = Verdict(None, f"{planned[module].name} differs from it")
        lines = zip(_report(model, verdicts).modules, dict(model.named_modules()).values(), strict=True)
        report = FusionReport(tuple([replace(line, difference=differences.get(m)) for line, m in lines]), whole)
        for module in planned if dry_run else ():
            classes.unfuse(module)
    elif not dry_run:
        classes.fuse_all(planned, off & TRICKS)
    return report


def unfuse_model(model: nn.Module) -> None:
    """Undo `fuse_model`, in place: each fused module gets its own class back, and ``compile_rest`` is undone.

    Args:
        model: the model, or a part of it.

    Raises:
        TypeError: the model is not a torch.nn.Module.
        ValueError: after fusing, a module's class was changed (as by a parametrization), or its forward was replaced (as by
            Accelerate). Undo that first. The model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unfuse_model: model must be a torch.nn.Module, got {type(model).__name__}")
    with classes.unsharded(model):
        _unfuse(model)


def _unfuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not classes.is_fused(module) and hasattr(type(module), "_fusedops_original"):
            raise ValueError(f"unfuse_model: the class of module {name!r} was changed after it was fused, to "
                             f"{type(module).__name__}; undo that first")  # fmt: skip
        if replaced := classes.replaced_since(module):
            raise ValueError(f"unfuse_model: module {name!r} was given a {replaced} of its own after it was fused, which "
                             "may call the fused one; undo that first (a hook of Accelerate's, say, by "
                             "remove_hook_from_module)")  # fmt: skip
    for module in model.modules():
        classes.unfuse(module)
        if module in _compiled:
            _compiled.remove(module)
            compat.forget_compiled(module)


def fusion_status(model: nn.Module) -> FusionReport:
    """Report which modules of a model call fused operators now, also after other changes to the model.

    If a module got hooks after it was fused (for example from ZeRO, PEFT or Accelerate), its block calls it as PyTorch would,
    and the module calls its own operator. If a module's forward or class was replaced, it calls no fused operator.

    Args:
        model: the model, or a part of it; it is not changed.
    Returns:
        A report as of `fuse_model`: which operators each module calls, which modules its block computes, and why other
        modules call no fused operator. The report is true if any module is fused.
    Raises:
        TypeError: the model is not a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fusion_status: model must be a torch.nn.Module, got {type(model).__name__}")
    with classes.unsharded(model):
        verdicts = {module: _now(module) for module in model.modules()}
        _drop_idle(verdicts, hooked=True)
        return _report(model, verdicts)


def _now(module: nn.Module) -> Verdict:
    if classes.is_fused(module):
        replaced = classes.replaced_since(module)
        if replaced:
            return Verdict(None, f"its {replaced} was replaced on the instance after it was fused")
        return Verdict(getattr(type(module), "_fusedops_rule", None))
    changed = hasattr(type(module), "_fusedops_original")
    return Verdict(None, "its class was changed after it was fused" if changed else NOT_FUSED)


def _names(entry: Rule | Family) -> tuple[str, ...]:
    return (entry.name,) if isinstance(entry, Rule) else entry.names


def _judge(module: nn.Module, rules: tuple[Rule | Family, ...], excluded: frozenset[str]) -> Verdict:
    if hasattr(type(module), "_fusedops_original"):
        return Verdict(None, "fused already")
    return judge(module, rules, excluded)


def _rules_in(module: nn.Module, verdicts: Mapping[nn.Module, Verdict], *, hooked: bool = True) -> At:
    """The rules of what is in a module, by path: of what is to be fused, and of what is fused already.

    With ``hooked`` there is none for what has hooks: that is called as it is. Norms under `SequenceParallel` are joined.
    """

    def at(path: str) -> Rule | None:
        inner = found(module, path)
        if inner is None or inner not in verdicts or (hooked and has_hooks(inner) and not rows_of_norm(inner)):
            return None
        return verdicts[inner].rule or getattr(type(inner), "_fusedops_rule", None)

    return at


def _drop_idle(verdicts: dict[nn.Module, Verdict], *, hooked: bool = False) -> None:
    """Leaves the modules that would call no operator, with what is in them as it is to be; inner ones first.

    Hooks may be removed again: they count only with ``hooked``.
    """
    for module, verdict in reversed(list(verdicts.items())):
        if verdict.rule is not None:
            reason = verdict.rule.needs(module, _rules_in(module, verdicts, hooked=hooked))
            if reason:
                verdicts[module] = Verdict(None, reason)


def _drop_unheard(model: nn.Module, verdicts: dict[nn.Module, Verdict]) -> None:
    """Leaves the modules that would do nothing but to leave their end to a block, where there is no such block."""
    heard: set[nn.Module] = set()
    for module in model.modules():
        rule = verdicts[module].rule
        if rule is None:
            continue
        if not rule.calls and rule.takes is not None and module not in heard:
            verdicts[module] = Verdict(None, NO_RULE)
        else:
            paths = rule.takes
            heard |= (
                set(module.modules()) if paths is None else {i for p in paths if (i := found(module, p)) is not None}
            )


def _report(model: nn.Module, verdicts: Mapping[nn.Module, Verdict]) -> FusionReport:
    names = {module: name for name, module in model.named_modules()}
    doing: dict[nn.Module, str] = {}
    for module, name in names.items():
        rule = verdicts[module].rule
        if rule is not None:
            paths = rule.parts if isinstance(rule.parts, tuple) else rule.parts(module)
            at = _rules_in(module, verdicts)
            inner = [(path, found(module, path)) for path in paths]
            doing |= {part: name for path, part in inner if part is not None and (at(path) or is_simple(part))}
    return FusionReport(tuple(_line(name, module, verdicts, doing.get(module)) for module, name in names.items()))


def _line(name: str, module: nn.Module, verdicts: Mapping[nn.Module, Verdict], by: str | None) -> ModuleReport:
    rule, reason = verdicts[module].rule, verdicts[module].reason
    if rule is None:
        return ModuleReport(
            name, type(module).__name__, reason=reason, by=by if reason in (NO_RULE, NOT_FUSED) else None
        )
    if by is not None:
        return ModuleReport(name, type(module).__name__, rule.name, helps="computed by its block", by=by)
    calls = rule.calls if isinstance(rule.calls, str) else rule.calls(module, _rules_in(module, verdicts))
    helps = rule.helps if isinstance(rule.helps, str) else rule.helps(module)
    return ModuleReport(name, type(module).__name__, rule.name, calls, helps)
