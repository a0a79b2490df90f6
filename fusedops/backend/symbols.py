"""Symbolic sizes and numbers in graphs: their values in the traced call, or by the graph's guards.

This file uses private names of Dynamo and of its symbolic shapes. If a release lacks one, symbols
stay symbols, and fewer regions are fused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..core.compat.lookup import imported

__all__ = ["fix", "has_one_value", "have_hints", "hint_of", "is_same", "settled"]

# --- sizes ----------------------------------------------------------------------------------------
# With dynamic shapes a size is a `torch.SymInt` around an expression of sympy, and its environment
# has the guards under which the graph is used. PyTorch has no public access to either.


def have_hints(sizes: Iterable[Any]) -> bool:
    """Returns whether numbers are known for all sizes: not for those that depend on data."""
    return all(map(_has_hint, sizes))


def _has_hint(size: Any) -> bool:
    if isinstance(size, torch.SymInt):
        return bool(size.node.has_hint())
    return True


def _is_expression(size: Any) -> bool:
    """Returns whether a size is computed from symbols, and is no symbol itself."""
    if not isinstance(size, torch.SymInt):
        return False
    return not size.node.expr.is_Symbol and size.node.has_hint()


def is_same(size: Any, other: Any) -> bool:
    """Returns whether two sizes are equal in all calls; no guard is added."""
    expressions = [s.node.expr if isinstance(s, torch.SymInt) else s for s in (size, other)]
    return bool(expressions[0] == expressions[1])


def hint_of(symbol: Any, size: Any) -> int:
    """Returns the number that a symbol, or an expression of symbols, has in the traced call.

    Args:
        symbol: the symbol or the expression, of sympy.
        size: a symbolic size whose expression contains ``symbol``.
    """
    environment = size.node.shape_env
    # The attribute was renamed between releases.
    hints = getattr(environment, "backed_var_to_val", None)
    hints = hints or getattr(environment, "var_to_val", {})
    number = symbol.xreplace(hints)
    return int(number if number.is_number else size.node.hint)


def settled(size: Any, symbols: Iterable[Any] = ()) -> Any:
    """Returns a size as a number, or as another size, where the graph's guards determine it.

    Where a table of 197 positions is added to ``(h // 16) * (w // 16) + 1`` rows, a guard demands
    that the expression is 197. PyTorch would replace a symbol by this number, but does not replace
    an expression. Without the private name such a size stays an expression.

    Args:
        size: a number, perhaps a symbolic one.
        symbols: sizes that it may be equal to.
    """
    if not _is_expression(size):
        return size
    node = size.node
    if node.expr.xreplace(_guarded(node.shape_env)).is_number:
        return node.hint
    is_known = imported("torch.fx.experimental.symbolic_shapes", "statically_known_true")
    if is_known is None:
        return size
    for candidate in (node.hint, *symbols):
        if is_known(size == candidate):
            return candidate
    return size


# For each environment, the number of its guards that have been read, and the values from them.
_guarded_in: Any = weakref.WeakKeyDictionary()


def _guarded(environment: Any) -> dict[Any, Any]:
    """Maps expressions of sizes to the one value that the graph's guards leave each of them.

    Empty without the private name.
    """
    guards = getattr(environment, "guards", ())
    guards_read, values = _guarded_in.get(environment, (0, {}))
    has_new = guards_read < len(guards)
    while has_new:
        count = len(values)
        for guard in guards:
            _solve(guard.expr, values)
        # With a new value another guard may have only one unknown left: all are read again.
        has_new = len(values) > count
    _guarded_in[environment] = len(guards), values
    return values  # type: ignore[no-any-return]


def _solve(guard: Any, values: dict[Any, Any]) -> None:
    """Adds the value of the one unknown expression of an equation, if it is a whole number."""
    if getattr(guard, "rel_op", "") != "==":
        return
    # ``left - right`` is ``constant + factor * unit``, where the unit is no number.
    constant, terms = (guard.lhs - guard.rhs).xreplace(values).as_coeff_Add()
    factor, unit = terms.as_coeff_Mul()
    if unit.is_number:
        return
    if (-constant / factor).is_Integer:
        values[unit] = -constant / factor


# --- numbers of the caller ------------------------------------------------------------------------
# With ``dynamic=True`` Dynamo makes symbols of all Python numbers, also of the eps of a norm.
# Without ``dynamic=True`` it makes symbols of the numbers that changed.


def has_one_value(number: Any) -> bool:
    """Returns whether a symbolic number depends only on the caller's numbers, which never changed.

    It is False for sizes, and wherever the private names are missing.
    """
    sources: list[Any] = []
    for symbol in number.node.expr.free_symbols:
        sources += number.node.shape_env.var_to_sources.get(symbol, [None])
    # Dynamo's record of the values that it saw, by code object and then by name.
    states: Any = (imported("torch._dynamo.pgo", "get_code_state") or dict)()
    return all(_never_changed(_name_of_number(source), states.values()) for source in sources)


def _never_changed(name: str, states: Iterable[Any]) -> bool:
    """Returns whether a number has records, and none of them has more than one value.

    ``states`` are Dynamo's records for code objects.
    """
    is_known = False
    for state in states:
        record = state.automatic_dynamic.get(name)
        if record is None:
            continue
        # One that changed has a marker in the place of its value.
        if not isinstance(record.scalar, (int, float)):
            return False
        is_known = True
    return is_known


def _name_of_number(source: Any) -> str:
    """Returns Dynamo's name of a number. A float is an item of a tensor for Dynamo."""
    while type(source).__name__ in ("CallMethodItemSource", "FloatTensorSource"):
        source = source.base
    name = getattr(source, "name", "")
    # A method or an attribute, by release.
    return str(name() if callable(name) else name)


def fix(numbers: Iterable[Any]) -> None:
    """Makes symbolic numbers constants of Dynamo's graph: it is traced anew if one changes.

    PyTorch remembers the floats that were made constants, and makes them constants of all later
    graphs: each new value would then be compiled. So `_forget_fixed` removes those of this package.
    Then a number that has changed is a symbol in the next graph, `has_one_value` returns False for
    it, and a region that needs it as a constant is not fused.
    """
    for number in numbers:
        _fixed.update(map(str, number.node.expr.free_symbols))
        if isinstance(number, torch.SymFloat):
            number.node.guard_float("", 0)
        else:
            number.node.guard_int("", 0)
    handler = imported("torch._dynamo.callback", "callback_handler")
    if handler is not None and _forget_fixed not in handler.end_callbacks:
        handler.register_end_callback(_forget_fixed)


# The names of symbols that are constants of the graph that is being traced.
_fixed: set[str] = set()


def _forget_fixed(*_: Any) -> None:
    """Takes `_fixed` out of PyTorch's set of constant floats, at the end of a compilation."""
    state = imported("torch._dynamo.symbolic_convert", "TensorifyState")
    constants: set[str] = getattr(state, "force_specializations", set())
    constants -= _fixed
    _fixed.clear()
