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
from dataclasses import dataclass
from typing import Any

from .reading import WRITES, Kinds
from .trees import ends_function, is_pure, nodes, path_of, self_name_of, writes_attributes

__all__ = ["conditions", "under_conditions"]

# Pairs of a condition, as `ast.dump` writes it, and its result. Earlier conditions on the same path
# determine these results.
Known = tuple[tuple[str, bool], ...]

# The most conditions on one path that are split. Each doubles the code after it, so there are up to
# 2 ** _SPLITS copies of the end of a function to rewrite.
_SPLITS = 3


class _Pruning(ast.NodeTransformer):
    """Replaces conditions with known results by their branches.

    Conditions are recognised by their text. They depend on the module's attributes alone (see
    `conditions`), so conditions with the same text have the same result throughout the function.
    """

    def __init__(self, facts: Mapping[str, bool]) -> None:
        self.facts = facts

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        # A nested function may run when the attribute has another value.
        return node

    def visit_If(self, node: ast.If) -> Any:
        # First what is inside, since a branch replaces its condition.
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
    self_name = self_name_of(function)
    tests = [node.test for node in nodes(function, ast.If)]
    return [ast.unparse(test) for test in tests if _reads_only(test, self_name)]


def _reads_only(test: ast.expr, name: str) -> bool:
    """Whether a condition has no side effects and reads no other name."""
    if not is_pure(test):
        return False
    return {node.id for node in nodes(test, ast.Name)} == {name}


def under_conditions(
    body: list[ast.stmt], facts: Mapping[str, bool], kinds: Kinds, self_name: str
) -> tuple[list[ast.stmt], ast.If | None]:
    """The body with conditions split, and its statement that tests the facts, or None without any.

    With facts the result is one statement: the pruned body if they hold, or else the original one::

        if fact and not (other): pruned body
        else: body

    The facts are tested at each call: an attribute may change after the module was fused.
    """
    splitting = _Splitting(kinds, self_name)
    general = splitting.body(body, _SPLITS, ())
    if not facts:
        return general, None
    # A block around the body, whose statements may be replaced by several.
    block = ast.Module(copy.deepcopy(body), [])
    pruned = _Pruning(facts).visit(block).body
    special = ast.If(_holding(facts), splitting.body(pruned, _SPLITS, ()), general)
    return [special], special


def _holding(facts: Mapping[str, bool]) -> ast.expr:
    """The condition that all facts hold."""
    tests = []
    for text, truth in facts.items():
        source = text if truth else f"not ({text})"
        tests.append(ast.parse(source, mode="eval").body)
    # An `and` of one operand is no valid tree.
    if len(tests) == 1:
        return tests[0]
    return ast.BoolOp(ast.And(), tests)


class _Splitting:
    """Copies the rest of a block into the branches of conditions before it."""

    def __init__(self, kinds: Kinds, self_name: str) -> None:
        self.kinds = kinds
        self.self_name = self_name

    def body(self, body: list[ast.stmt], budget: int, known: Known) -> list[ast.stmt]:
        """The body, where code after a condition that decides what is called is in both branches.

        Args:
            body: the statements; they are not changed.
            budget: the number of conditions that may be split on each path.
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
                # Later conditions on the same attribute are decided, too.
                facts = _Facts()
                if self._is_constant(statement.test, body):
                    facts = _facts_of(statement.test)
                extended = _joined(statement.body, rest)
                if_true = self.body(extended, budget - 1, (*known, *facts.if_true))
                extended = _joined(statement.orelse, rest)
                if_false = self.body(extended, budget - 1, (*known, *facts.if_false))
                # The rest is in the branches, so nothing follows.
                return [*before, ast.If(statement.test, if_true, if_false)]
        return body

    def _decides_calls(self, statement: ast.If) -> bool:
        """Whether the condition decides which modules are called, and both branches go on."""
        # After an early return the rest runs on one path only, and needs no copy.
        if ends_function(statement.body):
            return False
        return any(map(self._is_joinable, nodes(statement, ast.Call)))

    def _is_joinable(self, call: ast.Call) -> bool:
        """Whether the call is one that the rewriting has a use for."""
        path = path_of(call.func, self.self_name)
        return path != "" and self.kinds(path) not in ("", WRITES)

    def _is_constant(self, test: ast.expr, body: list[ast.stmt]) -> bool:
        """Whether this is an attribute or its negation, and nothing in the body changes it."""
        operand = test.operand if isinstance(test, ast.UnaryOp) else test
        if not path_of(operand, self.self_name):
            return False
        return not any(map(self._writes_attributes, body))

    def _writes_attributes(self, node: ast.AST) -> bool:
        """Whether the code changes what a condition tests, itself or in a method that it calls."""
        if writes_attributes(node):
            return True
        paths = [path_of(call.func, self.self_name) for call in nodes(node, ast.Call)]
        return any(self.kinds(path) == WRITES for path in filter(None, paths))


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
            if truth:
                return statement.body
            return statement.orelse
    return None


@dataclass(frozen=True)
class _Facts:
    """The results of conditions that are known in each branch of a condition."""

    if_true: Known = ()
    if_false: Known = ()


def _facts_of(test: ast.expr) -> _Facts:
    """The results of a condition and of its opposite, in each branch.

    ::

        if self.a:              in the body      self.a: True,  not self.a: False
        (or: if not self.a:)    in the orelse    self.a: False, not self.a: True
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            opposite = operand
        case _:
            opposite = ast.UnaryOp(ast.Not(), test)
    texts = ast.dump(test), ast.dump(opposite)
    return _Facts(
        if_true=((texts[0], True), (texts[1], False)),
        if_false=((texts[0], False), (texts[1], True)),
    )
