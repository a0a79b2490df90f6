"""What a class's methods do, as a digest of their code: how a rule tells a class that it knows from a look-alike.

Transformers has a class of its own for every model, most of them with the same few forwards. A rule for one of them
holds for every class whose forward reads the same, whatever its name, and for none that reads differently, be it
through a subclass, a patch, or another release of the library.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import itertools
import math
import sys
import textwrap
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["canonical", "definition", "digest", "fingerprint", "is_pytorchs", "renamed"]

# What says nothing about behaviour, or differs between Python releases for the same source.
_SKIPPED = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind"})
# Where wrappers come from that do nothing to what they call but to choose it, or to rename its arguments.
_WRAPPERS = ("transformers.utils.deprecation", "transformers.integrations.moe")
# A forward reads the same only if these names mean the same.
_MEANINGS: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math}


def canonical(node: Any) -> str:
    """A syntax tree in one line, without annotations, docstrings and the wording of errors."""
    if isinstance(node, list):
        return "[" + " ".join(map(canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise):
        return "Raise"
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED or value is None or value == []:
            continue
        if name == "body" and isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            value = value[1:]
        fields.append(f"{name}={canonical(value)}")
    return f"({type(node).__name__} {' '.join(fields)})"


def fingerprint(cls: type, methods: tuple[str, ...] = ("forward",)) -> str:
    """The digest of the class's methods; empty where their source cannot be had or its names mean something else."""
    return digest(*[getattr(cls, name, None) for name in methods])


@functools.lru_cache(maxsize=4096)
def digest(*functions: Any) -> str:
    """The digest of functions, by which a class that is patched later is another; empty as `fingerprint`'s."""
    parts = list(map(_read, functions))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12] if all(parts) else ""


def _read(function: Callable[..., Any] | None) -> str:
    function = renamed(function)[0]
    tree = definition(function)
    if tree is None or not inspect.isfunction(function):
        return ""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else ""
        if name in _MEANINGS and function.__globals__.get(name) is not _MEANINGS[name]:
            return ""
    return canonical([tree])


@functools.lru_cache(maxsize=4096)
def definition(function: Any) -> ast.FunctionDef | None:
    """The tree of which a function was compiled, at its lines in its file; None where that cannot be had.

    Of a function `inspect` reads what it wraps, if it says so; of a code object what will run.
    """
    if not inspect.isfunction(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return None
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef) or not _is_what_runs(function, found):
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return found


def renamed(function: Any) -> tuple[Any, list[Any]]:
    """The function inside wrappers that give arguments their new names, and these.

    Layers have them up to Transformers 4.57, and from 5.24 on.
    """
    wrappers, function = [], _unwrapped(function)
    while (
        inspect.isfunction(function)
        and function.__globals__.get("__name__") in _WRAPPERS
        and hasattr(function, "__wrapped__")
    ):
        wrappers.append(function)
        function = _unwrapped(function.__wrapped__)
    return function, wrappers


def _unwrapped(function: Any) -> Any:
    """The forward inside the wrapper that Transformers puts around every layer, to checkpoint it; no other wrapper."""
    while (
        inspect.isfunction(function)
        and function.__code__.co_name == "forward_with_checkpointing"
        and function.__globals__.get("__name__") == "transformers.modeling_layers"
    ):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def _is_what_runs(function: FunctionType, tree: ast.FunctionDef) -> bool:
    """Whether a function was compiled of this source: its file may have been written to since it was imported."""
    bare = ast.FunctionDef(name=tree.name, args=tree.args, body=tree.body, decorator_list=[], returns=None)
    owner = function.__qualname__.split(".")[-2:][0]
    cls = ast.ClassDef(name=owner, bases=[], keywords=[], body=[ast.copy_location(bare, tree)], decorator_list=[])
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(cls, tree)], []))
    code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    return any(_alike(inner, function.__code__) for inner in _inside(_inside([code])))


def _inside(codes: Iterable[CodeType]) -> list[CodeType]:
    """What is defined in these."""
    return [constant for code in codes for constant in code.co_consts if isinstance(constant, CodeType)]


def is_pytorchs(base: type, name: str) -> bool:
    """Whether a method of a class of PyTorch is the one that stands in its source, and nothing put there since."""
    owner = next((cls for cls in base.__mro__ if name in vars(cls)), base)
    if not owner.__module__.startswith("torch."):
        return True
    method = vars(owner).get(name)
    if not isinstance(method, FunctionType):
        return False
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return method.__qualname__ == f"{owner.__qualname__}.{name}" and file in (None, method.__code__.co_filename)


def _alike(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same, wherever they stand."""
    if one.co_varnames != other.co_varnames:
        return False
    pairs = list(itertools.zip_longest(_instructions(one), _instructions(other), fillvalue=("", None)))
    return all(name == name_ and _same(value, value_) for (name, value), (name_, value_) in pairs)


# How Python calls a method hangs on whether the module imports the name; jumps are as long as what they pass over.
_CALLS = {
    "LOAD_METHOD": "LOAD_ATTR",
    "CALL_METHOD": "CALL",
    "PUSH_NULL": "",
    "PRECALL": "",
    "NOP": "",
    "EXTENDED_ARG": "",
}


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    found = [(_CALLS.get(i.opname, i.opname), None if "JUMP" in i.opname or "FOR_ITER" in i.opname else i.argval)
             for i in dis.get_instructions(code)]  # fmt: skip
    return [(name, None if name == "CALL" else value) for name, value in found if name]


def _same(one: Any, other: Any) -> bool:
    """Whether two constants or names are the same; strings but for the indentation that was taken from the source."""
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _alike(one, other)
    if isinstance(one, str) and isinstance(other, str):
        return one.split() == other.split()
    return type(one) is type(other) and repr(one) == repr(other)
