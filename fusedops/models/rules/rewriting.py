"""Functions that are compiled again from a changed tree, and the pieces of such trees."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from ..fingerprint import definition

__all__ = [
    "PREFIX",
    "assign",
    "compiled",
    "helper",
    "helper_call",
    "load",
    "names_captured",
    "nodes",
    "only_target",
    "path_of",
    "readable",
    "rewrapped",
    "self_name_of",
]

Method = Callable[..., Any]
_Node = TypeVar("_Node", bound=ast.AST)

# No name of a model begins so.
PREFIX = "_fusedops_"
# Scopes whose bodies may run after the statement in which they stand.
_DEFERRED = (ast.Lambda, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef)


def readable(function: Any) -> ast.FunctionDef | None:
    """The tree of a function; None if it cannot be compiled again from its source."""
    if not inspect.isfunction(function) or not _is_compilable(function):
        return None
    tree = definition(function)
    if tree is None or any(map(_is_unsupported, ast.walk(tree))):
        return None
    return tree


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_compilable(function: FunctionType) -> bool:
    """Whether a function can be compiled outside of its class, and runs in one go.

    A rewritten function has the helpers as its closure, and no other. So ``super()``, which reads
    ``__class__`` from a closure, is not rewritten.
    """
    code = function.__code__
    if code.co_freevars:
        return False
    return not code.co_flags & _SUSPENDS


def _is_unsupported(node: ast.AST) -> bool:
    """Whether the node binds names in a way that is not followed, or is like ``self.__x``.

    Python mangles the name ``__x`` inside a class, where the rewritten function is not compiled.
    """
    if isinstance(node, (ast.Global, ast.Nonlocal, ast.NamedExpr)):
        return True
    name = node.attr if isinstance(node, ast.Attribute) else ""
    if not name.startswith("__"):
        return False
    return not name.endswith("__")


def compiled(function: FunctionType, tree: ast.FunctionDef, helpers: Mapping[str, Any]) -> Method:
    """Compile a rewritten function with the globals of the original and the helpers as closure.

    The source of what is compiled is

        def make(<helpers>):
            def forward(self, ...):
                <calls of helpers>
            return forward
    """
    _drop_values(tree.args)
    # The original's file and lines, so that tracebacks and debuggers show its source.
    names = [ast.arg(PREFIX + name) for name in helpers]
    body: list[ast.stmt] = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    maker = ast.FunctionDef("make", ast.arguments([], names, None, [], [], None, []), body, [])
    module = ast.Module([ast.copy_location(maker, tree)], [])
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec")
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    result: Any = namespace["make"](*helpers.values())
    result.__defaults__, result.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    result.__doc__, result.__qualname__ = function.__doc__, function.__qualname__
    result.__annotations__ = dict(function.__annotations__)
    return result  # type: ignore[no-any-return]


def _drop_values(arguments: ast.arguments) -> None:
    """Drop annotations and defaults: the original's are copied, not evaluated a second time."""
    positional = (*arguments.posonlyargs, *arguments.args)
    others = (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for argument in filter(None, (*positional, *others)):
        argument.annotation = None
    # An optional argument needs some default; `compiled` sets the original's.
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]


def rewrapped(function: Method, wrappers: list[Any]) -> Method:
    """Wrap a function in copies of these wrappers, the last innermost.

    Args:
        function: takes the place of the function in the last wrapper.
        wrappers: as `unwrapped` returns them.
    """
    for wrapper in reversed(wrappers):
        # A wrapper calls what it wraps through a cell of its closure. The original's is not
        # changed, since the original class goes on using it.
        cells = []
        for cell in wrapper.__closure__:
            is_wrapped = cell.cell_contents is wrapper.__wrapped__
            cells.append(types.CellType(function) if is_wrapped else cell)
        copied = FunctionType(
            wrapper.__code__,
            wrapper.__globals__,
            wrapper.__name__,
            wrapper.__defaults__,
            tuple(cells),
        )
        copied.__kwdefaults__ = wrapper.__kwdefaults__
        function = functools.update_wrapper(copied, function)
    return function


# --- pieces of trees ------------------------------------------------------------------------------


def load(name: str) -> ast.Name:
    """The expression that reads a name."""
    return ast.Name(name, ast.Load())


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


def assign(name: str, value: ast.expr) -> ast.Assign:
    """``name = value``."""
    return ast.Assign([ast.Name(name, ast.Store())], value)


def nodes(tree: ast.AST, kind: type[_Node] | tuple[type[_Node], ...]) -> list[_Node]:
    """The nodes of these types in a tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def self_name_of(function: ast.FunctionDef) -> str:
    """The name of the function's first parameter; "" if it has none by position."""
    positional = (*function.args.posonlyargs, *function.args.args)
    return positional[0].arg if positional else ""


def path_of(node: ast.expr, self_name: str) -> str:
    """``a.b`` for ``self.a.b``; "" for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id == self_name:
        return ".".join(reversed(names))
    return ""


def only_target(node: ast.AST) -> ast.Name | None:
    """The name that an assignment binds, if that is its one target."""
    match node:
        case ast.Assign(targets=[ast.Name() as name]):
            return name
    return None


def names_captured(function: ast.FunctionDef) -> set[str]:
    """The names in nested functions, lambdas and generators, whose bodies may run later."""
    names = set()
    for scope in nodes(function, _DEFERRED):
        if scope is not function:
            names |= {name.id for name in nodes(scope, ast.Name)}
    return names
