"""Digests of methods' code, by which a rule tells a known class from one that looks like it.

Transformers has a class of its own for every model, most of them with the same few forwards. A rule
for one of them holds for every class whose forward has the same code, whatever its name, and for
none with other code, be it through a subclass, a patch, or another release of the library.
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

# Fields of syntax trees that do not change behaviour, or differ between Python releases.
_SKIPPED = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind"})
# The modules of wrappers that only choose the function to call, or rename its arguments.
_WRAPPERS = ("transformers.utils.deprecation", "transformers.integrations.moe")
# These names must mean the same for equal code to do the same.
_MEANINGS: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math}


def canonical(node: Any) -> str:
    """Return a syntax tree in one line, without annotations, docstrings and messages of errors."""
    if isinstance(node, list):
        return "[" + " ".join(map(canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise):
        return "Raise"
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED or value in (None, []):
            continue
        if name == "body" and _has_docstring(node):
            value = value[1:]
        fields.append(f"{name}={canonical(value)}")
    return f"({type(node).__name__} {' '.join(fields)})"


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None


def fingerprint(cls: type, methods: tuple[str, ...] = ("forward",)) -> str:
    """Return the digest of the class's methods; see `digest`."""
    return digest(*[getattr(cls, name, None) for name in methods])


# Cached by the functions, not by their class, so that a class that is patched later gets another
# digest.
@functools.lru_cache(maxsize=4096)
def digest(*functions: Any) -> str:
    """Return the digest of functions; "" if one has no source or its names mean something else."""
    parts = list(map(_code, functions))
    if not all(parts):
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _code(function: Callable[..., Any] | None) -> str:
    """Return a function's code in one line; "" if it cannot be read.

    Also "" if a name of `_MEANINGS` means something else in the function's module.
    """
    function, _wrappers = renamed(function)
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
    """Return the tree from which a function was compiled, with its file's line numbers, or None.

    The source is that of the code object, which will run. For a function, `inspect` would return
    the source of the function that it wraps.
    """
    if not inspect.isfunction(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return None
    result = tree.body[0]
    if not isinstance(result, ast.FunctionDef) or not _is_source_of(function, result):
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return result


def renamed(function: Any) -> tuple[Any, list[Any]]:
    """Return the function inside wrappers that rename arguments, and these wrappers.

    Layers have them up to Transformers 4.57, and from 5.24 on.
    """
    wrappers, function = [], _unwrapped(function)
    while _is_in(function, _WRAPPERS) and hasattr(function, "__wrapped__"):
        wrappers.append(function)
        function = _unwrapped(function.__wrapped__)
    return function, wrappers


def _unwrapped(function: Any) -> Any:
    """Return the forward inside the wrapper by which Transformers checkpoints every layer."""
    while (
        _is_in(function, ("transformers.modeling_layers",))
        and function.__code__.co_name == "forward_with_checkpointing"
    ):
        function = function.__wrapped__
    return function


def _is_in(function: Any, modules: tuple[str, ...]) -> bool:
    """Whether this is a function of one of these modules, by its globals."""
    return inspect.isfunction(function) and function.__globals__.get("__name__") in modules


def _is_source_of(function: FunctionType, tree: ast.FunctionDef) -> bool:
    """Whether a function was compiled from this source.

    Its file may have been changed since it was imported, so the source is compiled and compared.
    """
    bare = ast.FunctionDef(
        name=tree.name, args=tree.args, body=tree.body, decorator_list=[], returns=None
    )
    # Within a class of the right name, since names like ``__x`` and ``super()`` depend on it.
    # That class's name is the one before the last; a function outside of classes has only one.
    owner = function.__qualname__.split(".")[-2:][0]
    cls = ast.ClassDef(
        name=owner, bases=[], keywords=[], body=[ast.copy_location(bare, tree)], decorator_list=[]
    )
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(cls, tree)], []))
    code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    # The module's code contains the class's, which contains the function's.
    return any(_is_same_code(inner, function.__code__) for inner in _inside(_inside([code])))


def _inside(codes: Iterable[CodeType]) -> list[CodeType]:
    """Return the code of the functions and classes that these define."""
    constants = itertools.chain.from_iterable(code.co_consts for code in codes)
    return [constant for constant in constants if isinstance(constant, CodeType)]


def is_pytorchs(base: type, name: str) -> bool:
    """Whether a method is PyTorch's own, not patched; methods from elsewhere count unchecked."""
    owner = next((cls for cls in base.__mro__ if name in vars(cls)), base)
    if not owner.__module__.startswith("torch."):
        return True
    method = vars(owner).get(name)
    if not isinstance(method, FunctionType):
        return False
    if method.__qualname__ != f"{owner.__qualname__}.{name}":
        return False
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return file is None or file == method.__code__.co_filename


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same, at whatever lines and in whatever module."""
    if one.co_varnames != other.co_varnames:
        return False
    pairs = itertools.zip_longest(_instructions(one), _instructions(other), fillvalue=("", None))
    for (name, value), (other_name, other_value) in pairs:
        if name != other_name or not _is_same_value(value, other_value):
            return False
    return True


# Python compiles ``name.method()`` in another way if the same source imports ``name``. The source
# of one function has no imports, so both ways are mapped to one; what is mapped to "" is dropped.
_CALLS = {
    "LOAD_METHOD": "LOAD_ATTR",
    "CALL_METHOD": "CALL",
    "PUSH_NULL": "",
    "PRECALL": "",
    "NOP": "",
    "EXTENDED_ARG": "",
}


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    """Return the names and arguments of a code's instructions, as far as they can be compared."""
    instructions = []
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        # The distances of jumps depend on the instructions that were mapped or dropped.
        if "JUMP" in name or "FOR_ITER" in name:
            value = None
        name = _CALLS.get(name, name)
        if name == "CALL":
            value = None
        if name:
            instructions.append((name, value))
    return instructions


def _is_same_value(one: Any, other: Any) -> bool:
    """Whether two constants or names are the same, but for whitespace in strings.

    The indentation of docstrings differs, as the source was dedented.
    """
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _is_same_code(one, other)
    if isinstance(one, str) and isinstance(other, str):
        return one.split() == other.split()
    return type(one) is type(other) and repr(one) == repr(other)
