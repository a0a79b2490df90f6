"""Conditions in a forward: pruned if their results are known; the code after others duplicated.

Steps are joined only along straight-line code. So what follows a condition that decides which
modules are called is copied into both of its branches::

    if c: a()            if c: a(); rest()
    rest()        ->     else: rest()
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from typing import Any

from .reading import Kinds
from .trees import ends_function, is_pure, path_of, writes_attributes

__all__ = ["conditions", "under_conditions"]

# The texts of conditions whose results are known, and these.
Known = tuple[tuple[str, bool], ...]

# Along one path so many conditions get the rest of the function in both branches: each doubles it.
_SPLITS = 3


class _Pruning(ast.NodeTransformer):
    """Replaces conditions with known results by their branches."""

    def __init__(self, facts: Mapping[str, bool]) -> None:
        self.facts = facts

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        truth = self.facts.get(ast.unparse(node.test))
        if truth is None:
            return node
        branch = node.body if truth else node.orelse
        # A block may not be empty.
        return branch or ast.Pass()


def conditions(function: ast.FunctionDef) -> list[str]:
    """The texts of conditions that depend only on attributes of the function's first argument."""
    # A write may change the result of a condition from one evaluation to the next.
    if writes_attributes(function):
        return []
    self_name = function.args.args[0].arg if function.args.args else ""
    tests = [node.test for node in ast.walk(function) if isinstance(node, ast.If)]
    return [ast.unparse(test) for test in tests if _reads_only(test, self_name)]


def _reads_only(test: ast.expr, name: str) -> bool:
    """Whether a condition has no side effects and reads no other name."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return is_pure(test) and names == {name}


def under_conditions(
    body: list[ast.stmt], facts: Mapping[str, bool], kinds: Kinds, self_name: str
) -> tuple[list[ast.stmt], ast.If | None]:
    """The body with conditions split, and its statement that tests the facts, if there are any.

    With facts the result is one statement: the pruned body if they hold, or else the original one::

        if fact and not (other): pruned body
        else: body
    """
    splitting = _Splitting(kinds, self_name)
    general = splitting.body(body, _SPLITS, ())
    if not facts:
        return general, None
    tests = []
    for text, truth in facts.items():
        source = text if truth else f"not ({text})"
        tests.append(ast.parse(source, mode="eval").body)
    test = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else tests[0]
    pruned: list[ast.stmt] = []
    for statement in copy.deepcopy(body):
        new = _Pruning(facts).visit(statement)
        pruned += new if isinstance(new, list) else [new]
    special = ast.If(test, splitting.body(pruned, _SPLITS, ()), general)
    return [special], special


class _Splitting:
    """Copies the rest of a block into the branches of conditions before it."""

    def __init__(self, kinds: Kinds, self_name: str) -> None:
        self.kinds = kinds
        self.self_name = self_name

    def body(self, body: list[ast.stmt], budget: int, known: Known) -> list[ast.stmt]:
        """The body with its rest in both branches of a condition that decides what is called.

        Args:
            body: the statements; they are not changed.
            budget: how many conditions may be split on each path.
            known: the conditions that were decided before, on this path.
        """
        for index, statement in enumerate(body):
            if not isinstance(statement, ast.If):
                continue
            before, rest = body[:index], body[index + 1 :]
            chosen = _chosen(statement, known)
            if chosen is not None:
                return self.body([*before, *chosen, *rest], budget, known)
            if budget and rest and self._decides_calls(statement):
                is_constant = self._is_constant(statement.test, body)
                branches = []
                for truth, branch in ((True, statement.body), (False, statement.orelse)):
                    facts = _facts(statement.test, truth) if is_constant else ()
                    extended = _joined(branch, rest)
                    branches.append(self.body(extended, budget - 1, (*known, *facts)))
                return [*before, ast.If(statement.test, *branches)]
        return body

    def _decides_calls(self, statement: ast.If) -> bool:
        """Whether the condition decides which modules are called, and both branches go on."""
        if ends_function(statement.body):
            return False
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                path = path_of(node.func, self.self_name)
                # A space: the name of a function, here none.
                if self.kinds(path or " "):
                    return True
        return False

    def _is_constant(self, test: ast.expr, body: list[ast.stmt]) -> bool:
        """Whether this is an attribute or its negation, and nothing in the body changes it."""
        operand = test.operand if isinstance(test, ast.UnaryOp) else test
        is_attribute = path_of(operand, self.self_name) != ""
        return is_attribute and not any(map(writes_attributes, body))


def _joined(branch: list[ast.stmt], rest: list[ast.stmt]) -> list[ast.stmt]:
    """A copy of a branch and of what follows it. Copied, since nodes are rewritten in place."""
    if ends_function(branch):
        return copy.deepcopy(branch)
    return [*copy.deepcopy(branch), *copy.deepcopy(rest)]


def _chosen(statement: ast.If, known: Known) -> list[ast.stmt] | None:
    """The branch that runs, if the condition's result is known."""
    test = ast.dump(statement.test)
    for text, truth in known:
        if text == test:
            return statement.body if truth else statement.orelse
    return None


def _facts(test: ast.expr, truth: bool) -> Known:
    """The results of a condition and of its opposite."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        opposite = test.operand
    else:
        opposite = ast.UnaryOp(ast.Not(), test)
    return ((ast.dump(test), truth), (ast.dump(opposite), not truth))
