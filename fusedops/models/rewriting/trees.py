"""Syntax trees: predicates on them, and the pieces of a rewritten forward."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

__all__ = [
    "CONDITIONAL",
    "PREFIX",
    "SCOPES",
    "SHAPE",
    "added",
    "assign",
    "attributes_tested",
    "attributes_written",
    "bound_by",
    "ends_function",
    "first_argument",
    "first_call",
    "first_target",
    "helper",
    "helper_call",
    "index_after_first",
    "inspects_locals",
    "is_first",
    "is_harmless",
    "is_helper",
    "is_pure",
    "is_term",
    "is_unary",
    "load",
    "local_names",
    "names_bound",
    "names_captured",
    "names_written",
    "nodes",
    "only_target",
    "path_of",
    "replace",
    "root_of",
    "self_name_of",
    "shifted",
    "store",
    "together",
    "unique",
    "unpack",
    "view_of",
    "writes_attributes",
]

_Node = TypeVar("_Node", bound=ast.AST)

# No name of a model begins so: `rewrite` refuses a function that has one.
PREFIX = "_fusedops_"
# Builtins without side effects: a pending value may stay pending while they are called.
_HARMLESS = frozenset({"isinstance", "len", "hasattr"})
# Attributes and methods of a tensor that are known before it is computed.
SHAPE = ("shape", "size", "dim", "device")
# Expressions with a scope of their own: what they bind is not bound outside.
SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Scopes whose bodies may run after the statement in which they stand.
_DEFERRED = (ast.Lambda, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef)
# Expressions whose parts may be evaluated on some paths through a statement only, or repeatedly.
CONDITIONAL = (ast.IfExp, ast.BoolOp, *SCOPES)
# Builtins that read the local variables of their caller, under the names of the source.
_INSPECTING = frozenset({"locals", "vars", "dir", "eval", "exec"})


# --- building -------------------------------------------------------------------------------------


def load(name: str) -> ast.Name:
    """The expression that reads a name."""
    return ast.Name(name, ast.Load())


def store(name: str) -> ast.Name:
    """The target that binds a name."""
    return ast.Name(name, ast.Store())


def helper(name: str) -> ast.expr:
    """The name by which a rewritten function reads one of the helpers."""
    return load(PREFIX + name)


def helper_call(name: str, *args: ast.expr, **options: Any) -> ast.Call:
    """A call of a helper; an option is an expression, or a constant's value."""
    keywords = []
    for key, option in options.items():
        value = option if isinstance(option, ast.expr) else ast.Constant(option)
        keywords.append(ast.keyword(key, value))
    return ast.Call(helper(name), list(args), keywords)


def added(end: ast.expr, residual: ast.expr, first: bool) -> ast.Call:
    """The call that adds an end and a residual, in the order of the source."""
    # The helper's default is the residual first.
    options = {"first": True} if first else {}
    return helper_call("add", end, residual, **options)


def assign(name: str, value: ast.expr) -> ast.Assign:
    """``name = value``."""
    return ast.Assign([store(name)], value)


def unpack(names: Sequence[str], value: ast.expr) -> ast.Assign:
    """``names, ... = value``."""
    targets = ast.Tuple(list(map(store, names)), ast.Store())
    return ast.Assign([targets], value)


def shifted(node: ast.Subscript, others: str) -> ast.expr:
    """``x[i]`` or ``x[i:]`` as a subscript of the name ``others``, which holds ``x[1:]``."""
    first = index_after_first(node)
    assert first is not None
    # ``others`` begins at the second output.
    index: ast.expr = ast.Constant(first - 1)
    if isinstance(node.slice, ast.Slice):
        index = ast.Slice(index, None, None)
    return ast.Subscript(load(others), index, ast.Load())


def replace(parent: ast.AST, old: ast.expr, new: ast.expr) -> None:
    """Replace a child expression of a node."""
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        # Nodes are compared by identity.
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new


def unique(nodes: Sequence[Any]) -> list[ast.expr]:
    """The expressions without repetitions."""
    # By their dumps, since nodes are compared by identity.
    return list({ast.dump(node): node for node in nodes}.values())


# --- searching ------------------------------------------------------------------------------------


def nodes(tree: ast.AST, kind: type[_Node] | tuple[type[_Node], ...]) -> list[_Node]:
    """The nodes of these types in a tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def together(trees: Iterable[Any]) -> ast.AST:
    """A node that contains these, to search them in one go."""
    return ast.Module(list(trees), [])


def self_name_of(function: ast.FunctionDef) -> str:
    """The name of the function's first parameter; "" if it has none by position."""
    positional = (*function.args.posonlyargs, *function.args.args)
    return positional[0].arg if positional else ""


# --- expressions ----------------------------------------------------------------------------------


def is_helper(node: ast.Call) -> bool:
    """Whether this calls a helper."""
    if not isinstance(node.func, ast.Name):
        return False
    return node.func.id.startswith(PREFIX)


def is_unary(node: ast.Call) -> bool:
    """Whether the call takes one argument, by position."""
    return len(node.args) == 1 and not node.keywords


def first_argument(node: ast.AST) -> ast.expr | None:
    """The first positional argument of a call; None for anything else."""
    match node:
        case ast.Call(args=[first, *_]):
            return first
    return None


def is_first(node: ast.AST) -> bool:
    """Whether this is ``x[0]``."""
    match node:
        case ast.Subscript(slice=ast.Constant(value=0)):
            return True
    return False


def is_term(node: ast.expr) -> bool:
    """Whether a sum may add this as a residual: it has no side effects and is no constant."""
    if not is_pure(node):
        return False
    return not isinstance(node, ast.Constant)


def is_harmless(node: ast.Call) -> bool:
    """Whether the call has no side effects and computes no tensor."""
    match node.func:
        case ast.Attribute(attr=name, value=owner) if name in SHAPE:
            return is_pure(owner)
        case ast.Name(id=name):
            return name in _HARMLESS
    return False


def is_pure(node: ast.AST) -> bool:
    """Whether evaluating this has no side effects.

    Attributes and operators count as pure: those of modules and tensors are.
    """
    effects = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    return not any(isinstance(inner, effects) for inner in ast.walk(node))


def view_of(node: ast.expr) -> ast.Attribute | None:
    """``x.reshape`` of ``x.reshape(...)``, ``x.view`` of ``x.view(...)``; None for other calls."""
    match node:
        case ast.Call(func=ast.Attribute(attr="reshape" | "view") as method, keywords=[]):
            return method
    return None


def index_after_first(node: ast.AST | None) -> int | None:
    """The n of ``x[n]`` or ``x[n:]``, which leave the first element out; None for others."""
    match node:
        case ast.Subscript(
            slice=ast.Constant(value=int(start))
            | ast.Slice(lower=ast.Constant(value=int(start)), upper=None, step=None)
        ) if start > 0:
            return start
    return None


def root_of(node: ast.expr) -> str:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return node.id


def path_of(node: ast.expr, self_name: str) -> str:
    """``a.b`` for ``self.a.b``; "" for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id == self_name:
        return ".".join(reversed(names))
    return ""


# --- statements -----------------------------------------------------------------------------------


def only_target(node: ast.AST) -> ast.Name | None:
    """The name that an assignment binds, if that is its one target."""
    match node:
        case ast.Assign(targets=[ast.Name() as name]):
            return name
    return None


def first_target(node: ast.AST) -> ast.Name | None:
    """The name that an assignment binds first."""
    match node:
        case ast.Assign(targets=[ast.Name() as name, *_]):
            return name
    return None


def first_call(statement: ast.stmt) -> ast.Call | None:
    """The call that the statement always makes, before anything else that has side effects."""
    match statement:
        case (
            ast.Assign(value=ast.expr() as value)
            | ast.Return(value=ast.expr() as value)
            | ast.Expr(value=value)
        ):
            return _first_in(value)
    return None


def _first_in(node: ast.AST) -> ast.Call | None:
    # A comparison may stop after its first operands.
    if isinstance(node, (*CONDITIONAL, ast.Compare)):
        return None
    # Operands and arguments are evaluated from left to right, before the call itself.
    for child in ast.iter_child_nodes(node):
        if not is_pure(child):
            return _first_in(child)
    if not isinstance(node, ast.Call):
        return None
    return node


def ends_function(statements: Sequence[ast.stmt]) -> bool:
    """Whether a block ends by leaving the function."""
    match statements:
        case [*_, ast.Return() | ast.Raise()]:
            return True
    return False


def writes_attributes(node: ast.AST) -> bool:
    """Whether the code assigns or deletes any attribute."""
    return len(attributes_written(node)) > 0


def attributes_written(node: ast.AST) -> set[str]:
    """The names of the attributes that the code assigns or deletes, of whatever object."""
    attributes = nodes(node, ast.Attribute)
    return {inner.attr for inner in attributes if not isinstance(inner.ctx, ast.Load)}


def attributes_tested(node: ast.AST) -> set[str]:
    """The names of the attributes that the code's conditions read."""
    tests = together([statement.test for statement in nodes(node, ast.If)])
    return {inner.attr for inner in nodes(tests, ast.Attribute)}


# --- names ----------------------------------------------------------------------------------------


def inspects_locals(function: ast.FunctionDef) -> bool:
    """Whether the function calls a builtin that reads its local variables."""
    return any(_is_inspecting(call.func) for call in nodes(function, ast.Call))


def _is_inspecting(called: ast.expr) -> bool:
    if not isinstance(called, ast.Name):
        return False
    return called.id in _INSPECTING


def names_written(node: ast.AST) -> set[str]:
    """The names that are bound or deleted in a node, without those local to comprehensions."""
    if isinstance(node, SCOPES):
        return set()
    names = {bound_by(node)} - {""}
    for child in ast.iter_child_nodes(node):
        names |= names_written(child)
    return names


def local_names(function: ast.FunctionDef) -> set[str]:
    """The names that the function binds, including its arguments."""
    names = {argument.arg for argument in nodes(function.args, ast.arg)}
    for statement in function.body:
        names.update(map(bound_by, ast.walk(statement)))
    return names - {""}


def bound_by(node: ast.AST) -> str:
    """The name that a node by itself binds or deletes; "" for none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return name
        case ast.alias(name=name, asname=asname):
            # `import a.b` binds a.
            return (asname or name).partition(".")[0]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        # `except ValueError as e`, and the captures `x`, `*x` and `**x` of a pattern.
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name or ""
        case ast.MatchMapping(rest=name):
            return name or ""
    return ""


def names_captured(function: ast.FunctionDef) -> set[str]:
    """The names in nested functions, lambdas and generators, whose bodies may run later."""
    names = set()
    for scope in nodes(function, _DEFERRED):
        if scope is not function:
            names |= {name.id for name in nodes(scope, ast.Name)}
    return names


def names_bound(function: ast.FunctionDef) -> set[str]:
    """The names that the function's body binds, without its arguments.

    Names that a nested function binds count, too. At most that prevents a rewriting::

        def forward(self, x):         names_bound       y, f, t
            y = x                     local_names       y, f, t, self, x
            def f():                  names_captured    y, t
                t = y
    """
    return names_written(together(function.body))
