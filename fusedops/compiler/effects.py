"""Refuse functions with side effects.

A kernel would leave the effects out, and the trace would have them once, not in each call.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import textwrap
import tokenize
from types import CodeType
from typing import TypeVar

from .errors import NotRowwiseError

__all__ = ["check_effects"]

# Methods that change a list, a dictionary, a set or a file.
_CHANGING = frozenset(
    {
        "append",
        "add",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
        "write",
    }
)


# Names of modules: `torch.add` returns a new tensor.
_LIBRARIES = ("torch", "F")
_F = TypeVar("_F", ast.Lambda, ast.FunctionDef)


def check_effects(code: CodeType, name: str) -> None:
    """Raise if a function with this code changes anything but its own variables.

    The check reads the function's source. A function without source passes.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    # A `TokenError` is raised if the file has changed, and the text at this line is not complete.
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return
    # The function's own variables. Free variables belong to an outer function.
    local = {*code.co_varnames, *code.co_cellvars}
    for node in _nodes_of(tree, code):
        effect = _effect(node, local)
        if effect:
            line = getattr(node, "lineno", 1) + code.co_firstlineno - 1
            text = linecache.getline(code.co_filename, line).strip()
            raise NotRowwiseError(
                f"{name}: it {effect}, which no kernel does\n"
                f"  line {line} of {code.co_filename}: {text}"
            )


def _nodes_of(tree: ast.Module, code: CodeType) -> list[ast.AST]:
    """Return the nodes in the body of a function, from the source that begins at its first line.

    The source of a lambda is its whole line. If the line has several lambdas with the same
    parameters, it is unknown which one this is, and no nodes are returned.
    """
    parameters = list(code.co_varnames[: code.co_argcount])
    if code.co_name == "<lambda>":
        lambdas = _with_parameters(tree, ast.Lambda, parameters)
        is_known = len(lambdas) == 1
        return list(ast.walk(lambdas[0].body)) if is_known else []
    functions = _with_parameters(tree, ast.FunctionDef, parameters)
    if not functions:
        return []
    return list(itertools.chain.from_iterable(map(ast.walk, functions[0].body)))


def _with_parameters(tree: ast.Module, kind: type[_F], parameters: list[str]) -> list[_F]:
    """Return the functions or lambdas in a source that have parameters of these names."""
    functions: list[_F] = []
    for node in ast.walk(tree):
        if not isinstance(node, kind):
            continue
        arguments: ast.arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        names = [argument.arg for argument in positional]
        if names == parameters:
            functions.append(node)
    return functions


def _effect(node: ast.AST, local: set[str]) -> str:
    """Return what a statement or an expression does beside its result; "" for nothing."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return f"assigns {', '.join(node.names)}"
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return _effect_of_target(node, local)
    if isinstance(node, ast.Call):
        return _effect_of_call(node.func, local)
    return ""


def _effect_of_target(node: ast.Attribute | ast.Subscript, local: set[str]) -> str:
    """Return the effect of assigning or deleting an attribute or an element; "" for none."""
    if isinstance(node.ctx, ast.Load):
        return ""
    # Elements of a local variable may be assigned, but no attributes of it.
    if isinstance(node, ast.Subscript) and _root(node) in local:
        return ""
    return f"changes {ast.unparse(node)}"


def _effect_of_call(function: ast.expr, local: set[str]) -> str:
    """Return what a call of a function does beside its result; "" for nothing."""
    if isinstance(function, ast.Name) and function.id == "print":
        return "prints"
    if not isinstance(function, ast.Attribute):
        return ""
    harmless = {"", *_LIBRARIES, *local}
    if function.attr in _CHANGING and _root(function) not in harmless:
        return f"calls {ast.unparse(function)}"
    return ""


def _root(node: ast.AST) -> str:
    """Return the variable of a chain of attributes and indices; "" for another expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
