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
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "canonical",
    "definition",
    "digest",
    "fingerprint",
    "is_unpatched",
    "names_in",
    "unwrapped",
]

# Fields of syntax trees that do not change behaviour, or differ between Python releases: the rules'
# digests have to match under all that the package supports.
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
    # The text of an error changes no result.
    if isinstance(node, ast.Raise):
        return "Raise"
    fields = [f"{name}={canonical(value)}" for name, value in _compared_fields(node)]
    return f"({type(node).__name__} {' '.join(fields)})"


def _compared_fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a node that matter, without the docstring of a function's body."""
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED or value in (None, []):
            continue
        if name == "body" and isinstance(node, ast.FunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            value = value[has_docstring:]
        yield name, value


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
    # 48 bits: no two of a library's forwards, which are thousands, will have the same.
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _code(function: Callable[..., Any] | None) -> str:
    """Return a function's code in one line; "" if it cannot be read.

    Also "" if a name of `_MEANINGS` means something else in the function's module.
    """
    function, _wrappers = unwrapped(function)
    tree = definition(function)
    if tree is None:
        return ""
    # The text alone does not tell what `F.gelu` is.
    names = names_in(tree)
    meanings: Mapping[str, Any] = function.__globals__
    for name in names & _MEANINGS.keys():
        if meanings.get(name) is not _MEANINGS[name]:
            return ""
    return canonical([tree])


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that code reads or binds."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


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
    # `TokenError`: a bracket or a string that begins here in the changed file is never closed.
    except (OSError, SyntaxError, TypeError, tokenize.TokenError):
        return None
    # In a file that was changed since it was imported, only a comment may be left on these lines.
    if not tree.body:
        return None
    result = tree.body[0]
    # A lambda is part of another statement.
    if not isinstance(result, ast.FunctionDef):
        return None
    # The file may not be the one that was imported.
    if not _is_source_of(function, result):
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return result


def unwrapped(function: Any) -> tuple[Any, list[Any]]:
    """Return the function inside the wrappers of `_WRAPPERS`, and these wrappers.

    Layers have such wrappers up to Transformers 4.57, and from 5.24 on.
    """
    wrappers, function = [], _without_checkpointing(function)
    while _is_in(function, _WRAPPERS) and hasattr(function, "__wrapped__"):
        wrappers.append(function)
        function = _without_checkpointing(function.__wrapped__)
    return function, wrappers


def _without_checkpointing(function: Any) -> Any:
    """Return the forward inside the wrapper by which Transformers checkpoints every layer."""
    while _is_checkpointing(function):
        function = function.__wrapped__
    return function


def _is_checkpointing(function: Any) -> bool:
    if not _is_in(function, ("transformers.modeling_layers",)):
        return False
    return bool(function.__code__.co_name == "forward_with_checkpointing")


def _is_in(function: Any, modules: tuple[str, ...]) -> bool:
    """Whether this is a function of one of these modules, by its globals."""
    if not inspect.isfunction(function):
        return False
    return function.__globals__.get("__name__") in modules


def _is_source_of(function: FunctionType, tree: ast.FunctionDef) -> bool:
    """Whether a function was compiled from this source.

    Its file may have been changed since it was imported, so the source is compiled and compared.
    """
    bare = ast.FunctionDef(
        name=tree.name, args=tree.args, body=tree.body, decorator_list=[], returns=None
    )
    # Within a class of the right name, since names like ``__x`` and ``super()`` depend on it. The
    # qualified name of a method ends in ``Class.method``. Outside of classes any name will do.
    names = function.__qualname__.split(".")
    owner = names[-2] if len(names) > 1 else names[0]
    cls = ast.ClassDef(
        name=owner, bases=[], keywords=[], body=[ast.copy_location(bare, tree)], decorator_list=[]
    )
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(cls, tree)], []))
    try:
        code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    # ``nonlocal`` names a variable of the function around this one, which is missing here.
    except SyntaxError:
        return False
    # The module's code contains the class's, which contains the function's.
    return any(_is_same_code(inner, function.__code__) for inner in _inside(_inside([code])))


def _inside(codes: Iterable[CodeType]) -> list[CodeType]:
    """Return the code of the functions and classes that these define."""
    inside = []
    for code in codes:
        inside += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return inside


def is_unpatched(base: type, name: str) -> bool:
    """Whether a method of PyTorch's is not patched; other packages' methods are not checked."""
    owner = next((cls for cls in base.__mro__ if name in vars(cls)), base)
    if not owner.__module__.startswith("torch."):
        return True
    method = vars(owner).get(name)
    # A patch is another object, or a function of another name or from another file.
    if not isinstance(method, FunctionType):
        return False
    if method.__qualname__ != f"{owner.__qualname__}.{name}":
        return False
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return file in (None, method.__code__.co_filename)


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same, at whatever lines and in whatever module."""
    if one.co_varnames != other.co_varnames:
        return False
    pairs = itertools.zip_longest(_instructions(one), _instructions(other), fillvalue=("", None))
    return all(itertools.starmap(_is_same_instruction, pairs))


def _is_same_instruction(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    if one[0] != other[0]:
        return False
    return _is_same_value(one[1], other[1])


# Python compiles ``torch.cat(x)`` to LOAD_METHOD, but to PUSH_NULL and LOAD_ATTR if the compiled
# source imports ``torch``. The function's file does so, the source of the function alone does not.
# So both are mapped to the same instructions. An instruction that is mapped to "" is dropped.
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
    instructions: list[tuple[str, Any]] = []
    positions: dict[int, int] = {}  # by offset, among the instructions that are compared
    for instruction in dis.get_instructions(code):
        name = _CALLS.get(instruction.opname, instruction.opname)
        positions[instruction.offset] = len(instructions)
        if name:
            # The constant, name or offset that the argument stands for; else the argument itself.
            instructions.append((name, instruction.argval))
    # The target of a jump is an offset, which depends on the instructions that were mapped or
    # dropped. So it becomes a position among the instructions that are compared.
    return [(name, positions[value] if _is_jump(name) else value) for name, value in instructions]


def _is_jump(name: str) -> bool:
    return dis.opmap.get(name) in (*dis.hasjrel, *dis.hasjabs)


def _is_same_value(one: Any, other: Any) -> bool:
    """Whether two constants or names are the same; strings may differ in whitespace.

    The indentation of docstrings differs, as the source was dedented.
    """
    match one, other:
        case CodeType(), CodeType():
            return _is_same_code(one, other)
        case str(), str():
            return one.split() == other.split()
    # Equal numbers may be of different types, and 0.0 equals -0.0.
    return (type(one), repr(one)) == (type(other), repr(other))
