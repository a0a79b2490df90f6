"""Syntax trees: what is asked of one, and the pieces that a rewritten forward is made of."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

__all__ = [
    "CONDITIONAL",
    "PREFIX",
    "SHAPE",
    "added",
    "assign",
    "ends_function",
    "first_call",
    "from_first",
    "has_one",
    "helper",
    "helper_call",
    "is_harmless",
    "is_helper",
    "is_pure",
    "local_names",
    "looks",
    "names_bound",
    "names_kept",
    "names_written",
    "once",
    "path_of",
    "replace",
    "root_of",
    "shifted",
    "unpack",
    "view_of",
    "writes_attributes",
]

PREFIX = "_fusedops_"
# Builtins that change nothing: values may wait while they are called.
_HARMLESS = frozenset({"isinstance", "len", "hasattr"})
# What a tensor tells without being computed.
SHAPE = ("shape", "size", "dim", "device")
# Scopes of their own, and those of them that read names when they are called.
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LATER = (ast.Lambda, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef)
# What may only be evaluated on some ways through a statement, or more than once.
CONDITIONAL = (ast.IfExp, ast.BoolOp, *_SCOPES)
# Builtins that see the names of a function.
_LOOKING = frozenset({"locals", "vars", "dir", "eval", "exec"})


def helper(name: str) -> ast.expr:
    """The name by which a rewritten function has one of the helpers."""
    return ast.Name(PREFIX + name, ast.Load())


def is_helper(node: ast.Call) -> bool:
    """Whether this calls a helper."""
    return isinstance(node.func, ast.Name) and node.func.id.startswith(PREFIX)


def helper_call(name: str, *args: ast.expr, **options: Any) -> ast.Call:
    """A call of a helper; of the options, constants are given as they are."""
    given = [(key, value if isinstance(value, ast.expr) else ast.Constant(value)) for key, value in options.items()]
    return ast.Call(helper(name), list(args), [ast.keyword(key, value) for key, value in given])


def added(end: ast.expr, residual: ast.expr, first: bool) -> ast.Call:
    """The call that adds an end and a residual, in the order in which they stood."""
    return helper_call("add", end, residual, first=True) if first else helper_call("add", end, residual)


def assign(name: str, value: ast.expr) -> ast.Assign:
    """``name = value``."""
    return ast.Assign([ast.Name(name, ast.Store())], value)


def unpack(names: Sequence[str], value: ast.expr) -> ast.Assign:
    """``names, ... = value``."""
    return ast.Assign([ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())], value)


def has_one(node: ast.Call) -> bool:
    """Whether the call takes one argument, by place."""
    return len(node.args) == 1 and not node.keywords


def is_harmless(node: ast.Call) -> bool:
    """Whether the call changes nothing and computes nothing."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in SHAPE and is_pure(node.func.value)
    return isinstance(node.func, ast.Name) and node.func.id in _HARMLESS


def view_of(node: ast.expr) -> ast.Attribute | None:
    """``x.reshape`` of ``x.reshape(...)``, and of a view."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return None
    return node.func if node.func.attr in ("reshape", "view") else None


def from_first(node: ast.AST | None) -> int | None:
    """The first index, from one on, of ``x[1]`` or ``x[1:]``."""
    if not isinstance(node, ast.Subscript):
        return None
    index: ast.expr | None = node.slice
    if isinstance(index, ast.Slice):
        index = index.lower if index.upper is None and index.step is None else None
    value = index.value if isinstance(index, ast.Constant) else None
    return value if isinstance(value, int) and value > 0 else None


def shifted(node: ast.Subscript, rest: str) -> ast.expr:
    """The same of all but the first."""
    place = ast.Constant((from_first(node) or 1) - 1)
    index: ast.expr = ast.Slice(place, None, None) if isinstance(node.slice, ast.Slice) else place
    return ast.Subscript(ast.Name(rest, ast.Load()), index, ast.Load())


def looks(function: ast.FunctionDef) -> bool:
    """Whether the function looks at its own names."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in _LOOKING for called in calls)


def root_of(node: ast.expr) -> str:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def once(nodes: Sequence[Any]) -> list[ast.expr]:
    """The expressions, each of them once."""
    return list({ast.dump(node): node for node in nodes}.values())


def names_written(node: ast.AST) -> set[str]:
    """The names that are bound, but for those that only a comprehension sees."""
    if isinstance(node, _SCOPES):
        return set()
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    return {name for child in ast.iter_child_nodes(node) for name in names_written(child)}


def local_names(function: ast.FunctionDef) -> set[str]:
    """The names that the function binds, its arguments too."""
    names = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not function:
            names.add(node.name)
    return names


def names_kept(function: ast.FunctionDef) -> set[str]:
    """The names that something in the function may read later than where it stands."""
    inner = [node for node in ast.walk(function) if isinstance(node, _LATER) and node is not function]
    return {node.id for scope in inner for node in ast.walk(scope) if isinstance(node, ast.Name)}


def names_bound(function: ast.FunctionDef) -> set[str]:
    """The names that the function itself binds, but for its arguments."""
    return {name for statement in function.body for name in names_written(statement)}


def first_call(statement: ast.stmt) -> ast.Call | None:
    """The call that is made first, with nothing before it, and on every way through the statement."""
    value = getattr(statement, "value", None)
    if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) or not isinstance(value, ast.expr):
        return None
    return _first_in(value)


def _first_in(node: ast.expr) -> ast.Call | None:
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.Compare, ast.ListComp, ast.SetComp, ast.DictComp,
                         ast.GeneratorExp)):  # fmt: skip
        return None
    for child in ast.iter_child_nodes(node):
        inner = child.value if isinstance(child, ast.keyword) else child
        if isinstance(inner, ast.expr) and not is_pure(inner):
            return _first_in(inner)
    return node if isinstance(node, ast.Call) else None


def replace(parent: ast.AST, old: ast.expr, new: ast.expr) -> None:
    """Put an expression in the place of another."""
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new


def path_of(node: ast.expr, self_name: str) -> str:
    """``a.b`` for ``self.a.b``; "" for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == self_name and names else ""


def is_pure(node: ast.expr) -> bool:
    """Whether nothing happens when this is evaluated."""
    return not any(isinstance(inner, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
                   for inner in ast.walk(node))  # fmt: skip


def ends_function(statements: Sequence[ast.stmt]) -> bool:
    """Whether a block ends by leaving the function."""
    return bool(statements) and isinstance(statements[-1], (ast.Return, ast.Raise))


def writes_attributes(node: ast.AST) -> bool:
    """Whether anything's attributes are written here."""
    return any(isinstance(inner, ast.Attribute) and not isinstance(inner.ctx, ast.Load) for inner in ast.walk(node))
