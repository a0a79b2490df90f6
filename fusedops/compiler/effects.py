"""Refuse functions with side effects.

A kernel has none of them, and the trace has them at another time than a call.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import textwrap
from types import CodeType

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


def check_effects(code: CodeType, name: str) -> None:
    """Raise where a function of this code changes anything but its own variables.

    Only what its source shows is found. A function without source passes.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return
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

    The source of a lambda is its whole line. Where that has several lambdas with the same
    parameters, it is unknown which one this is, and no nodes are returned.
    """
    kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    parameters = list(code.co_varnames[: code.co_argcount])

    def has_parameters(node: ast.Lambda | ast.FunctionDef) -> bool:
        return [argument.arg for argument in node.args.args] == parameters

    functions = [node for node in ast.walk(tree) if isinstance(node, kind)]
    candidates = list(filter(has_parameters, functions))
    is_unknown = kind is ast.Lambda and len(candidates) > 1
    if not candidates or is_unknown:
        return []
    body = candidates[0].body
    statements: list[ast.AST] = [*body] if isinstance(body, list) else [body]
    return list(itertools.chain.from_iterable(map(ast.walk, statements)))


def _effect(node: ast.AST, local: set[str]) -> str:
    """Return what a statement or an expression does beside its result; "" for nothing."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return f"assigns {', '.join(node.names)}"
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        # Elements of a local variable may be assigned, but no attributes of it.
        is_own = isinstance(node, ast.Subscript) and _root(node) in local
        is_load = isinstance(node.ctx, ast.Load)
        return "" if is_load or is_own else f"changes {ast.unparse(node)}"
    if isinstance(node, ast.Call):
        return _effect_of_call(node.func, local)
    return ""


def _effect_of_call(function: ast.expr, local: set[str]) -> str:
    """Return what a call of a function does beside its result; "" for nothing."""
    if isinstance(function, ast.Name):
        return "prints" if function.id == "print" else ""
    if not isinstance(function, ast.Attribute) or function.attr not in _CHANGING:
        return ""
    root = _root(function)
    is_known = root == "" or root in ("torch", "F")  # `torch.add` returns a new tensor
    return "" if is_known or root in local else f"calls {ast.unparse(function)}"


def _root(node: ast.AST) -> str:
    """Return the variable of a chain of attributes and indices; "" for another expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
