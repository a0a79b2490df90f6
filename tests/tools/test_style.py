"""Style limits of the package: density of decisions, complexity of functions, words of its own.

The limits are the values measured last. They may only shrink: code that exceeds one is rewritten.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import fusedops

_PACKAGE = Path(fusedops.__file__).parent
_FILES = sorted(_PACKAGE.rglob("*.py"))

_DECISIONS = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
)
_NESTING = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)

# Decisions per 100 lines of functions. Docstrings, comments and empty lines are not counted.
_MOST_DENSE = 26.0
# Cognitive complexity of a function: a decision counts one, plus one for each enclosing decision.
_MOST_COMPLEX = 25
# The functions that still exceed the limit, with their complexities.
_COMPLEX = {
    "compiler/operator.py:fits": 28,
    "norms/kernels/backward.py:norm_backward_kernel": 126,
    "norms/kernels/forward.py:norm_forward_kernel": 31,
    "norms/launching.py:_plan_backward": 27,
    "slices/kernels/backward.py:_backward_group": 40,
    "slices/ops.py:_batched": 31,
}

# Words for which the field has more precise ones, and how often the package may contain them.
_DIALECT = ("found", "made", "given", "kept", "apart", "twin", "takers", "heard", "unheard")
_MOST_DIALECT = 30


def _decisions(function: ast.AST) -> int:
    """Counts branches, loops, comprehensions, and operands of `and` and `or` after the first."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        else:
            count += isinstance(node, _DECISIONS)
    return count


def _complexity(node: ast.AST, depth: int = 0) -> int:
    """Sums over all decisions: one, plus the number of enclosing decisions."""
    count = 0
    for child in ast.iter_child_nodes(node):
        inner = depth
        if isinstance(child, ast.BoolOp):
            count += len(child.values) - 1
        elif isinstance(child, ast.Lambda):
            inner = depth + 1
        elif isinstance(child, _NESTING):
            is_elif = (
                isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
            )
            count += depth if is_elif else 1 + depth
            inner = depth if is_elif else depth + 1
        count += _complexity(child, inner)
    return count


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields name and definition of each function and method that no other function contains."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield owner + node.name, node
        elif isinstance(node, (ast.ClassDef, ast.If, ast.Try)):
            inner = f"{owner}{node.name}." if isinstance(node, ast.ClassDef) else owner
            yield from _functions(node, inner)


def _code_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    """Counts the lines of a function without docstrings, comments and empty lines."""
    docstring_lines = set[int]()
    for node in ast.walk(function):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            docstring_lines |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    numbers = range(function.lineno, (function.end_lineno or 0) + 1)
    return sum(
        1
        for number in numbers
        if number not in docstring_lines
        and lines[number - 1].strip(" \t#")
        and lines[number - 1].lstrip()[0] != "#"
    )


def _named_functions() -> Iterator[tuple[str, ast.FunctionDef, list[str]]]:
    """Yields ``file:name``, definition and lines of the file, for each function of the package."""
    for path in _FILES:
        text = path.read_text(encoding="utf-8")
        file = path.relative_to(_PACKAGE).as_posix()
        for name, function in _functions(ast.parse(text)):
            yield f"{file}:{name}", function, text.splitlines()


def test_density_of_decisions_is_limited() -> None:
    decisions = lines = 0
    for _, function, text in _named_functions():
        decisions += _decisions(function)
        lines += _code_lines(function, text)
    assert 100 * decisions / lines <= _MOST_DENSE


def test_complexity_of_functions_is_limited() -> None:
    """If a function became simpler, remove it from `_COMPLEX` or lower its number there."""
    complexities = {name: _complexity(function) for name, function, _ in _named_functions()}
    above = {name: count for name, count in complexities.items() if count > _MOST_COMPLEX}
    assert above == _COMPLEX


def test_words_of_the_dialect_are_limited() -> None:
    words = re.compile(rf"\b_?({'|'.join(_DIALECT)})\b")
    count = 0
    for path in _FILES:
        with path.open(encoding="utf-8") as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
                    count += len(words.findall(token.string))
    assert count <= _MOST_DIALECT


def test_decisions_of_a_sample_are_counted() -> None:
    text = """
def f(x):
    if x and (x > 1 or x < 0):
        return [y for y in x if y]
    elif not x:
        return 1 if x is None else 2
"""
    ((name, function),) = _functions(ast.parse(text))
    assert name == "f"
    assert _decisions(function) == 7
    assert _complexity(function) == 8
    assert _code_lines(function, text.splitlines()) == 5
