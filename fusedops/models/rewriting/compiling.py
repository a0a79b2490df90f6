"""Functions that are compiled again from a changed tree, in the place of those of a class."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from ..fingerprint import definition
from .trees import PREFIX

__all__ = ["compiled", "readable", "rewrapped"]

Method = Callable[..., Any]


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
