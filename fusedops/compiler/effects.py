"""What a function does beside returning tensors: a kernel would do it never, and the trace at another time."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from types import CodeType

from .errors import NotRowwiseError

__all__ = ["check_effects"]

# Methods of lists, dictionaries and sets that change them.
_CHANGING = frozenset({"append", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
                       "update", "write"})  # fmt: skip


def check_effects(code: CodeType, name: str) -> None:
    """Raises where a function of this code changes what is not its own, as far as its text says so."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return
    local = {*code.co_varnames, *code.co_cellvars}
    for node in _of(tree, code):
        changed = _changed(node, local)
        if changed:
            line = getattr(node, "lineno", 1) + code.co_firstlineno - 1
            text = linecache.getline(code.co_filename, line).strip()
            raise NotRowwiseError(
                f"{name}: it {changed}, which no kernel does\n  line {line} of {code.co_filename}: {text}"
            )


def _of(tree: ast.Module, code: CodeType) -> list[ast.AST]:
    """What is in the function, of a tree that has its first line; nothing where that has more than one such function."""
    named = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    names = list(code.co_varnames[: code.co_argcount])
    alike = [node for node in ast.walk(tree) if isinstance(node, named) and [a.arg for a in node.args.args] == names]
    bodies = [node.body if isinstance(node.body, list) else [node.body] for node in alike]
    return [inner for statement in bodies[0] for inner in ast.walk(statement)] if bodies and (
        len(bodies) == 1 or named is ast.FunctionDef) else []  # fmt: skip


def _changed(node: ast.AST, local: set[str]) -> str:
    """What a statement or an expression does to others; "" for nothing."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return f"assigns {', '.join(node.names)}"
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        root = _root(node)
        if isinstance(node, ast.Attribute) or root not in local:
            return f"changes {ast.unparse(node)}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        root = _root(node.func)
        if root and root not in local and root not in ("torch", "F"):
            return f"calls {ast.unparse(node.func)}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        return "prints"
    return ""


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
