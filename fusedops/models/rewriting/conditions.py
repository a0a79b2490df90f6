"""Conditions in a forward: those whose way is known, and the rest of a function written out behind the others."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from typing import Any

from .reading import Kinds
from .trees import ends_function, is_pure, path_of, writes_attributes

__all__ = ["conditions", "under_conditions"]

# So often the rest of a function is written out twice behind a condition.
_SPLITS = 3


class _Pruning(ast.NodeTransformer):
    """Leaves out what conditions that are known do not lead to."""

    def __init__(self, facts: Mapping[str, bool]) -> None:
        self.facts = facts

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        truth = self.facts.get(ast.unparse(node.test))
        return node if truth is None else (node.body if truth else node.orelse) or ast.Pass()


def conditions(function: ast.FunctionDef) -> list[str]:
    """The texts of the conditions that hang on nothing but attributes of the function's first argument."""
    if writes_attributes(function):  # which may turn a condition between two places where it is asked
        return []
    self_name = function.args.args[0].arg if function.args.args else ""
    tests = [node.test for node in ast.walk(function) if isinstance(node, ast.If)]
    return [ast.unparse(test) for test in tests if is_pure(test) and {
        inner.id for inner in ast.walk(test) if isinstance(inner, ast.Name)} == {self_name}]  # fmt: skip


def under_conditions(body: list[ast.stmt], facts: Mapping[str, bool], kinds: Kinds,
                     self_name: str) -> tuple[list[ast.stmt], ast.If | None]:  # fmt: skip
    """The body with conditions moved to where all behind them is known, and of the facts one statement; None for no facts."""
    otherwise = _split(body, _SPLITS, kinds, self_name)
    if not facts:
        return otherwise, None
    tests = [ast.parse(text if truth else f"not ({text})", mode="eval").body for text, truth in facts.items()]
    pruned = [_Pruning(facts).visit(statement) for statement in copy.deepcopy(body)]
    flat = [inner for new in pruned for inner in (new if isinstance(new, list) else [new])]
    test = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else tests[0]
    known = ast.If(test, _split(flat, _SPLITS, kinds, self_name), otherwise)
    return [known], known


def _split(body: list[ast.stmt], left: int, kinds: Kinds, self_name: str,
           known: tuple[tuple[str, bool], ...] = ()) -> list[ast.stmt]:  # fmt: skip
    """The body with the rest written out in both branches of a condition that decides which modules are called."""
    for index, statement in enumerate(body):
        if not isinstance(statement, ast.If):
            continue
        test = ast.dump(statement.test)
        decided = next((truth for text, truth in known if text == test), None)
        if decided is not None:
            chosen = statement.body if decided else statement.orelse
            return _split([*body[:index], *chosen, *body[index + 1 :]], left, kinds, self_name, known)
        rest = body[index + 1 :]
        if not left or not rest or ends_function(statement.body) or not _calls_modules(statement, kinds, self_name):
            continue
        constant = not any(map(writes_attributes, body)) and (
            path_of(statement.test, self_name)
            or (isinstance(statement.test, ast.UnaryOp) and path_of(statement.test.operand, self_name))
        )
        branches = []
        for truth, branch in ((True, statement.body), (False, statement.orelse)):
            facts = (*known, *_facts(statement.test, truth)) if constant else known
            tail = [] if ends_function(branch) else copy.deepcopy(rest)
            branches.append(_split([*copy.deepcopy(branch), *tail], left - 1, kinds, self_name, facts))
        return [*body[:index], ast.If(statement.test, branches[0], branches[1])]
    return body


def _facts(test: ast.expr, truth: bool) -> list[tuple[str, bool]]:
    """What is known of a condition and of its opposite."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return [(ast.dump(test), truth), (ast.dump(test.operand), not truth)]
    return [(ast.dump(test), truth), (ast.dump(ast.UnaryOp(ast.Not(), test)), not truth)]


def _calls_modules(statement: ast.stmt, kinds: Kinds, self_name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and kinds(path_of(node.func, self_name) or " ") for node in ast.walk(statement)
    )
