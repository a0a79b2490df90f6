"""Which assignment each name in a function's body reads: definitions and their uses, for `fusedops.models.rewriting`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

__all__ = ["Definition", "Flow", "is_copy", "is_opaque"]

Reaching = frozenset["Definition"]
# Statements that are taken as a whole: nothing in them is rewritten.
_OPAQUE = (ast.Try, ast.With, ast.FunctionDef, ast.ClassDef, ast.Delete, ast.Match)


class Definition:
    """One value of a name: where it is assigned, and the names that read it, under whatever name it was copied to."""

    def __init__(self, value: ast.expr | None = None, place: int | None = None) -> None:
        self.value = value  # what is assigned; of a tuple, `place` says which; None where it is not known
        self.place = place
        self.uses: list[ast.Name] = []


def is_copy(statement: ast.stmt) -> bool:
    """Whether the statement only gives a value another name."""
    return (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Name)
    )


def is_opaque(statement: ast.stmt) -> bool:
    """Whether the statement is taken as a whole: so are loops that may be left in the middle of a turn."""
    if isinstance(statement, (ast.For, ast.While)):
        return any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(statement))
    return isinstance(statement, _OPAQUE)


class Flow:
    """Definitions and uses of the names in a function.

    Attributes:
        parent: of each node in the function.
        reaching: for each name that is read, the definitions that it may read.
        made: for each name that is written, and each parameter, its definition.
        parameters: the definitions of the parameters, in order.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.parent: dict[ast.AST, ast.AST] = {}
        self.reaching: dict[ast.Name, Reaching] = {}
        self.made: dict[ast.AST, Definition] = {}
        for node in ast.walk(function):
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, (ast.expr_context, ast.operator)):  # of which there is one for all
                    self.parent[child] = node
        env: dict[str, Reaching] = {}
        a = function.args
        for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg):
            if argument is not None:
                self.made[argument] = Definition()
                env[argument.arg] = frozenset([self.made[argument]])
        self.parameters = [self.made[argument] for argument in (*a.posonlyargs, *a.args)]
        self._loops: list[tuple[dict[str, Definition], ast.For | ast.While]] = []
        self._block(function.body, env)
        self._close_loops()

    def written(self, target: ast.AST) -> Definition:
        """The definition that is made here; one that nobody reads, in what is taken as a whole."""
        return self.made.get(target) or Definition()

    def only(self, name: ast.Name) -> Definition | None:
        """The definition that a name reads, where there is only one."""
        reaching = self.reaching.get(name, frozenset())
        return next(iter(reaching)) if len(reaching) == 1 else None

    def _block(self, statements: Iterable[ast.stmt], env: dict[str, Reaching]) -> bool:
        """Whether the block may end without leaving the function."""
        return all(self._statement(statement, env) for statement in statements)

    def _statement(self, statement: ast.stmt, env: dict[str, Reaching]) -> bool:  # noqa: C901 - one case a kind
        if is_copy(statement):
            assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
            assert isinstance(statement.value, ast.Name)
            env[statement.targets[0].id] = env.get(statement.value.id, frozenset())
            self.reaching[statement.value] = env.get(statement.value.id, frozenset())  # no use: the copies' are
            return True
        if isinstance(statement, ast.If):
            self._read(statement.test, env)
            other = dict(env)
            goes_on, other_goes_on = self._block(statement.body, env), self._block(statement.orelse, other)
            if not goes_on:
                env.clear()
                env.update(other)
            elif other_goes_on:
                for name in other:
                    env[name] = env.get(name, frozenset()) | other[name]
            return goes_on or other_goes_on
        if isinstance(statement, (ast.For, ast.While)) and not is_opaque(statement):
            self._loop(statement, env)
            return True
        if is_opaque(statement):
            for written in _written(statement):
                if isinstance(written.ctx, ast.Del):  # it has to be there
                    self._use(written, env)
                env[written.id] = env.get(written.id, frozenset()) | {Definition()}
            self._read(statement, env)
            return True
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            if statement.value is not None:
                self._read(statement.value, env)
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(statement, ast.AugAssign) and isinstance(target, ast.Name):
                    self._use(target, env)
                if statement.value is not None:
                    self._write(target, statement, env)
            return True
        self._read(statement, env)
        return not isinstance(statement, (ast.Return, ast.Raise))

    def _loop(self, statement: ast.For | ast.While, env: dict[str, Reaching]) -> None:
        """A loop: what is written in it may be read where it begins again, and behind it."""
        condition = None if isinstance(statement, ast.For) else statement.test
        self._read(statement.iter if isinstance(statement, ast.For) else statement.test, env)
        earlier = {name.id: Definition() for name in _written(statement)}
        for name, definition in earlier.items():
            env[name] = env.get(name, frozenset()) | {definition}
        inner = dict(env)
        for target in _written(statement.target) if isinstance(statement, ast.For) else ():
            self._define(target, Definition(), inner)
        self._block(statement.body, inner)
        if condition is not None:
            self._read(condition, inner)
        for name in earlier:
            env[name] |= inner.get(name, frozenset())
        self._loops.append((earlier, statement))
        self._block(statement.orelse, env)

    def _close_loops(self) -> None:
        """Give what is written in a loop the uses that it may have when the loop begins again."""
        for earlier, statement in self._loops:
            for target in _written(statement):
                self.written(target).uses += [
                    use for use in earlier[target.id].uses if use not in self.written(target).uses
                ]

    def _write(self, target: ast.expr, statement: ast.stmt, env: dict[str, Reaching]) -> None:
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        if isinstance(target, ast.Name):
            self._define(target, Definition(statement.value if plain else None), env)  # type: ignore[attr-defined]
        elif isinstance(target, ast.Tuple) and all(isinstance(element, ast.Name) for element in target.elts):
            for place, element in enumerate(target.elts):
                self._define(element, Definition(statement.value, place) if plain else Definition(), env)  # type: ignore[attr-defined]
        else:
            for name in _written(target):
                self._define(name, Definition(), env)
            self._read(target, env)

    def _define(self, target: ast.expr, definition: Definition, env: dict[str, Reaching]) -> None:
        assert isinstance(target, ast.Name)
        self.made[target] = definition
        env[target.id] = frozenset([definition])

    def _read(self, node: ast.AST, env: dict[str, Reaching]) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                self._use(inner, env)

    def _use(self, name: ast.Name, env: dict[str, Reaching]) -> None:
        self.reaching[name] = env.get(name.id, frozenset())
        for definition in self.reaching[name]:
            definition.uses.append(name)


def _written(node: ast.AST) -> Iterator[ast.Name]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            yield inner
