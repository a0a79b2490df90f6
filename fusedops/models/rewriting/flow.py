"""Reaching definitions: which assignment each name in a function's body may read, and its uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from .trees import bound_by, nodes

__all__ = ["Definition", "Flow", "is_copy", "is_opaque"]

Reaching = frozenset["Definition"]
# Statements in which nothing is rewritten. An exception may leave some of them half run, and nested
# functions run later: the flow below follows neither.
_OPAQUE = (
    ast.Try,
    ast.With,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Delete,
    ast.Match,
    ast.Import,
    ast.ImportFrom,
)


class Definition:
    """One value of a name, and the names that read it, including those that it is copied to.

    Attributes:
        value: the expression that is assigned; None where it is not known.
        index: the position of the name where a tuple of names is assigned; None for a single name.
        uses: the names that may read this value.
    """

    def __init__(self, value: ast.expr | None = None, index: int | None = None) -> None:
        self.value = value
        self.index = index
        self.uses: list[ast.Name] = []


def is_copy(statement: ast.stmt) -> bool:
    """Whether the statement only gives a value another name."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.Name()):
            return True
    return False


def is_opaque(statement: ast.stmt) -> bool:
    """Whether nothing in the statement is rewritten. Loops with a break or continue count."""
    if isinstance(statement, (ast.For, ast.While)):
        return any(map(_is_jump, ast.walk(statement)))
    return isinstance(statement, _OPAQUE)


def _is_jump(node: ast.AST) -> bool:
    return isinstance(node, (ast.Break, ast.Continue))


class Flow:
    """Definitions and uses of the names in a function.

    The statements are walked once, with an environment from names to the definitions that may
    reach the statement. It is copied at a branch, and the copies are joined after it::

        y = f(x)                {y: 1}
        if c: y = g(y)          {y: 2}
        else: z = h(y)          {y: 1}
        return y                {y: 1, 2}: no single definition, so nothing is joined here

    Attributes:
        parent: the parent of each node in the function.
        reaching: for each name that is read, the definitions that it may read.
        definitions: for each name that is written, and each parameter, its definition.
        parameters: the definitions of the parameters, in order.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.parent: dict[ast.AST, ast.AST] = _parents(function)
        self.reaching: dict[ast.Name, Reaching] = {}
        self.definitions: dict[ast.AST, Definition] = {}
        env: dict[str, Reaching] = {}
        arguments = function.args
        positional = (*arguments.posonlyargs, *arguments.args)
        others = (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        for argument in filter(None, (*positional, *others)):
            definition = Definition()
            self.definitions[argument] = definition
            env[argument.arg] = frozenset([definition])
        self.parameters = [self.definitions[argument] for argument in positional]
        self._loops: list[tuple[dict[str, Definition], dict[str, Reaching]]] = []
        self._block(function.body, env)
        self._close_loops()

    def written(self, target: ast.AST) -> Definition:
        """The definition of a target; in an opaque statement, a new one without uses."""
        return self.definitions.get(target) or Definition()

    def only(self, name: ast.AST | None) -> Definition:
        """The definition that a name reads, if there is exactly one; otherwise a new one."""
        reaching = self._reaching(name)
        if len(reaching) == 1:
            return next(iter(reaching))
        return Definition()

    def has_only(self, name: ast.AST | None) -> bool:
        """Whether exactly one definition reaches a name."""
        return len(self._reaching(name)) == 1

    def reads_only(self, name: ast.AST, definition: Definition) -> bool:
        """Whether this definition reaches a name, and no other."""
        return self.only(name) is definition

    def may_read(self, name: ast.Name, definition: Definition) -> bool:
        """Whether this definition reaches a name, maybe among others."""
        return definition in self._reaching(name)

    def _reaching(self, name: ast.AST | None) -> Reaching:
        nothing: Reaching = frozenset()
        if isinstance(name, ast.Name):
            return self.reaching.get(name, nothing)
        return nothing

    # The methods below record definitions and uses, and change ``env`` to what reaches the code
    # after the statement.

    def _block(self, statements: Iterable[ast.stmt], env: dict[str, Reaching]) -> bool:
        """Record statements; return whether the code after them may run."""
        # Ends at a return: statements after it never run.
        return all(self._statement(statement, env) for statement in statements)

    def _statement(self, statement: ast.stmt, env: dict[str, Reaching]) -> bool:
        """Record a statement; return whether the code after it may run."""
        if is_copy(statement):
            self._copy(statement, env)
            return True
        if is_opaque(statement):
            self._opaque(statement, env)
            return True
        if isinstance(statement, ast.If):
            return self._if(statement, env)
        record = _RECORDS.get(type(statement), Flow._read)
        record(self, statement, env)
        return not isinstance(statement, (ast.Return, ast.Raise))

    def _assign(self, statement: ast.Assign, env: dict[str, Reaching]) -> None:
        self._read(statement.value, env)
        # In ``a = b = value`` both names refer to one object, which may be changed through either.
        # So the value does not count as known.
        value = statement.value if len(statement.targets) == 1 else None
        for target in statement.targets:
            self._write(target, value, env)

    def _annotated(self, statement: ast.AnnAssign, env: dict[str, Reaching]) -> None:
        # `x: int` alone binds nothing, and the annotation is not evaluated.
        if statement.value is not None:
            self._read(statement.value, env)
            self._write(statement.target, None, env)

    def _augmented(self, statement: ast.AugAssign, env: dict[str, Reaching]) -> None:
        target = statement.target
        self._read(statement.value, env)
        # The statement reads its target, too. (For `x.a += 1`, `_write` records that x is read.)
        if isinstance(target, ast.Name):
            self._use(target, env)
        self._write(target, None, env)

    def _copy(self, statement: Any, env: dict[str, Reaching]) -> None:
        """Record ``a = b``. From here on, uses of a are uses of b's definition.

        The copy itself is not a use.
        """
        source, target = statement.value, statement.targets[0]
        env[target.id] = env.get(source.id, frozenset())
        self.reaching[source] = env.get(source.id, frozenset())

    def _if(self, statement: ast.If, env: dict[str, Reaching]) -> bool:
        self._read(statement.test, env)
        orelse_env = dict(env)
        # Only a branch that goes on decides what may be read after the condition.
        body_continues = self._block(statement.body, env)
        orelse_continues = self._block(statement.orelse, orelse_env)
        if not body_continues:
            env.clear()
            env.update(orelse_env)
        elif orelse_continues:
            # A name that only one branch binds has this value after it, or reading it raises.
            for name in orelse_env:
                env[name] = env.get(name, frozenset()) | orelse_env[name]
        return body_continues or orelse_continues

    def _opaque(self, statement: ast.stmt, env: dict[str, Reaching]) -> None:
        """Record a statement whose assignments may run or not.

        So code after it may read earlier definitions, or a new one of an unknown value.
        """
        for node in ast.walk(statement):
            # `del x` needs a value of x.
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
                self._use(node, env)
            name = bound_by(node)
            if name:
                env[name] = env.get(name, frozenset()) | {Definition()}
        self._read(statement, env)

    def _loop(self, statement: ast.For | ast.While, env: dict[str, Reaching]) -> None:
        """Record a loop. Its next iteration and the code after it may read what it writes.

        The body is walked once. For each name, an additional definition stands for the values of
        earlier iterations. `_close_loops` adds its uses to those that reach the body's end::

            for ...:            {y: 1, earlier}
                z = g(y)        a use of both
                y = f(x)        {y: 2}: the use is one of definition 2, too
        """
        # Evaluated before the first iteration.
        self._read(statement.iter if isinstance(statement, ast.For) else statement.test, env)
        # In the order of the source, since the order of uses shows in the generated code.
        bound = filter(None, map(bound_by, ast.walk(statement)))
        earlier = {name: Definition() for name in bound}
        for name, definition in earlier.items():
            env[name] = env.get(name, frozenset()) | {definition}
        inner = dict(env)
        if isinstance(statement, ast.For):
            for target in _written(statement.target):
                self._define(target, Definition(), inner)
        self._block(statement.body, inner)
        # A condition is evaluated again after each iteration.
        if isinstance(statement, ast.While):
            self._read(statement.test, inner)
        # After the loop its body may have run, or not.
        for name in earlier:
            env[name] |= inner.get(name, frozenset())
        self._loops.append((earlier, inner))
        self._block(statement.orelse, env)

    def _close_loops(self) -> None:
        """Add the uses in later iterations to the definitions in each loop."""
        # Repeated until nothing is new: each pass goes back by one iteration. With `b = a` in the
        # body, a use of the earlier b is one of the earlier a. The next pass adds it to the
        # definition of a in the body.
        while any(_add_uses(earlier, at_end) for earlier, at_end in self._loops):
            pass

    def _write(self, target: ast.expr, value: ast.expr | None, env: dict[str, Reaching]) -> None:
        """Record an assignment to any target; ``value`` is None where it is not known."""
        if isinstance(target, ast.Name):
            self._define(target, Definition(value), env)
            return
        # Each name in a tuple gets the tuple's value, with its index.
        elements = target.elts if isinstance(target, ast.Tuple) else [target]
        if all(isinstance(element, ast.Name) for element in elements):
            for index, element in enumerate(elements):
                self._define(element, Definition(value, index), env)
            return
        # Nested tuples bind names to unknown values. Attributes and subscripts bind none, but read.
        for name in _written(target):
            self._define(name, Definition(), env)
        self._read(target, env)

    def _define(self, target: ast.expr, definition: Definition, env: dict[str, Reaching]) -> None:
        assert isinstance(target, ast.Name)
        self.definitions[target] = definition
        env[target.id] = frozenset([definition])

    def _read(self, node: ast.AST, env: dict[str, Reaching]) -> None:
        for name in nodes(node, ast.Name):
            if isinstance(name.ctx, ast.Load):
                self._use(name, env)

    def _use(self, name: ast.Name, env: dict[str, Reaching]) -> None:
        self.reaching[name] = env.get(name.id, frozenset())
        for definition in self.reaching[name]:
            definition.uses.append(name)


def _add_uses(earlier: dict[str, Definition], at_end: dict[str, Reaching]) -> bool:
    """Add the uses of one loop's earlier values; return whether there were any new ones.

    Args:
        earlier: for each name, the definition of its values from earlier iterations.
        at_end: for each name, the definitions that reach the end of the body.
    """
    is_changed = False
    for name, definition in earlier.items():
        for reaching in at_end.get(name, ()):
            new = [use for use in definition.uses if use not in reaching.uses]
            reaching.uses += new
            is_changed = is_changed or len(new) > 0
    return is_changed


# The methods that record a statement; without an entry, all its names are read.
_RECORDS: dict[type[ast.stmt], Any] = {
    ast.For: Flow._loop,
    ast.While: Flow._loop,
    ast.Assign: Flow._assign,
    ast.AnnAssign: Flow._annotated,
    ast.AugAssign: Flow._augmented,
}


def _parents(function: ast.FunctionDef) -> dict[ast.AST, ast.AST]:
    parents: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(function):
        for child in ast.iter_child_nodes(node):
            # Contexts and operators are singletons, without one parent.
            if not isinstance(child, (ast.expr_context, ast.operator)):
                parents[child] = node
    return parents


def _written(node: ast.AST) -> Iterator[ast.Name]:
    """The names that are bound or deleted anywhere in a node."""
    for name in nodes(node, ast.Name):
        if not isinstance(name.ctx, ast.Load):
            yield name
