"""A forward rewritten: its own statements, with the steps joined that one operator does together.

Models are written in many ways, but the steps between their matrix products are few: a bias, an activation, a dropout,
a sum with the residual stream, a norm. Where such steps follow one another in the text of a forward, the calls of
`fusedops.models.parts` take their place, and all else stays. What is read is the text alone, with the kinds of the
modules that it calls (linear, norm, dropout, activation, module). What the modules are when it runs, `parts` looks at
each time.

A value that is still to be finished is an *end* (`Branch`: a product, and the bias, activation and dropout to come) or a
*sum* of an end and a residual. Both wait only over statements that call nothing.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .flow import Definition, Flow, is_copy, is_opaque

__all__ = ["PREFIX", "Kinds", "Rewritten", "Step", "called_paths", "conditions", "rewrite", "rows_of"]

# From the path of a module, or a space and the name of a function, to its kind: "linear", "norm", "dropout", "activation",
# "module", "absent" (there is none), or "functional dropout"; "" for anything else.
Kinds = Callable[[str], str]
PREFIX = "_fusedops_"
# Builtins that change nothing: values may wait while they are called.
_HARMLESS = frozenset({"isinstance", "len", "hasattr"})
# The names by which a module takes its rows, if not by place.
_ROWS = ("hidden_states", "x", "input")
# What a tensor tells without being computed.
_SHAPE = ("shape", "size", "dim", "device")
# Scopes of their own, and those of them that read names when they are called.
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LATER = (ast.Lambda, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef)
# What may only be evaluated on some ways through a statement, or more than once.
_CONDITIONAL = (ast.IfExp, ast.BoolOp, *_SCOPES)
# Builtins that see the names of a function.
_LOOKING = frozenset({"locals", "vars", "dir", "eval", "exec"})
# Functions that multiply matrices.
_PRODUCTS = (".linear", ".matmul", ".bmm", ".einsum")
# So often the rest of a function is written out twice behind a condition.
_SPLITS = 3


@dataclass(frozen=True)
class Step:
    """What is joined at one place: "add_norm", "add", "activate" or "gate".

    Attributes:
        kind: which of these.
        path: of the norm, or of the activation; "" for an activation that is a function.
        sources: paths of the linear layers, dropouts and modules whose last steps are joined with it, as `Rewritten.leaves`.
    """

    kind: str
    path: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Rewritten:
    """What came of a forward.

    Attributes:
        tree: its function.
        steps: what was joined.
        leaves: the paths of the linear layers, dropouts and modules whose last steps are left to the caller; for a dropout
            without a module a space and the text of its probability.
    """

    tree: ast.FunctionDef
    steps: tuple[Step, ...]
    leaves: tuple[str, ...]


@dataclass
class _Pending:
    """A value that waits: an end (in ``end``), or its sum with ``residual``; with the names that it has."""

    end: str
    names: set[str]
    residual: str = ""
    sources: tuple[str, ...] = ()
    first: bool = False  # of a sum: the end stands before the residual
    waits_for_layers: bool = False  # a gate, which waits while the other layer is called


@dataclass(frozen=True)
class _Sum:
    """A sum of an end and a residual, as expressions."""

    end: ast.expr
    residual: ast.expr
    sources: tuple[str, ...]
    first: bool = False


_NO_FACTS: Mapping[str, bool] = {}


class _RefusedError(Exception):
    """The function is left as it is."""


def path_of(node: ast.expr, self_name: str) -> str:
    """``a.b`` for ``self.a.b``; "" for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == self_name and names else ""


def called_paths(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """What the function calls: the paths in its first parameter, and the names of other functions."""
    self_name = function.args.args[0].arg if function.args.args else ""
    paths: dict[str, None] = {}
    others: dict[str, None] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            path = path_of(node.func, self_name)
            if path:
                paths[path] = None
            elif isinstance(node.func, (ast.Name, ast.Attribute)):
                others[ast.unparse(node.func)] = None
    return list(paths), list(others)


def rewrite(function: ast.FunctionDef, kinds: Kinds, *, leaving: bool,
            facts: Mapping[str, bool] = _NO_FACTS) -> Rewritten | None:  # fmt: skip
    """The function with what can be joined joined; None where nothing can.

    Args:
        function: a method's tree; it is not changed.
        kinds: see `Kinds`.
        leaving: return the first output as a `Branch` with its last steps left to the caller, and the others as a tuple, or
            None where the function returns no tuple.
        facts: of conditions on the module's attributes, by their texts, which way they go. For as long as they do, the
            function runs without them; otherwise as it is written.
    """
    function = copy.deepcopy(function)
    self_name = function.args.args[0].arg if function.args.args else ""
    body, known = _split(function.body, _SPLITS, kinds, self_name), None
    if facts:
        tests = [ast.parse(text if truth else f"not ({text})", mode="eval").body for text, truth in facts.items()]
        pruned = [_Pruning(facts).visit(statement) for statement in copy.deepcopy(function.body)]
        flat = [inner for new in pruned for inner in (new if isinstance(new, list) else [new])]
        test = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else tests[0]
        known = ast.If(test, _split(flat, _SPLITS, kinds, self_name), body)
    function.body = body if known is None else [known]
    try:
        return _Rewriter(function, kinds, leaving, known).result()
    except _RefusedError:
        return None


def rows_of(function: ast.FunctionDef, kinds: Kinds) -> tuple[str, ...]:
    """The paths of the linear layers and modules that take the function's rows, its first argument, if nothing else does."""
    flow = Flow(function)
    self_name = function.args.args[0].arg if function.args.args else ""
    if len(flow.parameters) < 2:
        return ()
    found: dict[str, None] = {}
    definitions = [flow.parameters[1]]
    for definition in definitions:
        for use in definition.uses:
            parent: Any = flow.parent[use]
            if isinstance(parent, ast.Attribute) and parent.attr in ("shape", "size", "device", "dim"):
                continue
            if isinstance(parent, ast.IfExp) and use is not parent.test:
                assigned: Any = flow.parent[parent]
                if isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Name):
                    definitions.append(flow.written(assigned.targets[0]))
                    continue
            call: Any = flow.parent[parent] if isinstance(parent, ast.keyword) and parent.arg in _ROWS else parent
            given = isinstance(call, ast.Call) and (call is not parent or (bool(call.args) and call.args[0] is use))
            path = path_of(call.func, self_name) if given else ""
            if not path or "." in path or kinds(path) not in ("linear", "module", "absent"):
                return ()
            found[path] = None
    return tuple(found)


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
    if _writes_attributes(function):  # which may turn a condition between two places where it is asked
        return []
    self_name = function.args.args[0].arg if function.args.args else ""
    tests = [node.test for node in ast.walk(function) if isinstance(node, ast.If)]
    return [ast.unparse(test) for test in tests if _is_pure(test) and {
        inner.id for inner in ast.walk(test) if isinstance(inner, ast.Name)} == {self_name}]  # fmt: skip


def _writes_attributes(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Attribute) and not isinstance(inner.ctx, ast.Load) for inner in ast.walk(node))


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
        if not left or not rest or _leaves(statement.body) or not _calls_modules(statement, kinds, self_name):
            continue
        constant = not any(map(_writes_attributes, body)) and (
            path_of(statement.test, self_name)
            or (isinstance(statement.test, ast.UnaryOp) and path_of(statement.test.operand, self_name))
        )
        branches = []
        for truth, branch in ((True, statement.body), (False, statement.orelse)):
            facts = (*known, *_facts(statement.test, truth)) if constant else known
            tail = [] if _leaves(branch) else copy.deepcopy(rest)
            branches.append(_split([*copy.deepcopy(branch), *tail], left - 1, kinds, self_name, facts))
        return [*body[:index], ast.If(statement.test, branches[0], branches[1])]
    return body


def _facts(test: ast.expr, truth: bool) -> list[tuple[str, bool]]:
    """What is known of a condition and of its opposite."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return [(ast.dump(test), truth), (ast.dump(test.operand), not truth)]
    return [(ast.dump(test), truth), (ast.dump(ast.UnaryOp(ast.Not(), test)), not truth)]


def _leaves(statements: Sequence[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], (ast.Return, ast.Raise))


def _calls_modules(statement: ast.stmt, kinds: Kinds, self_name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and kinds(path_of(node.func, self_name) or " ") for node in ast.walk(statement)
    )


def _is_pure(node: ast.expr) -> bool:
    """Whether nothing happens when this is evaluated."""
    return not any(isinstance(inner, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
                   for inner in ast.walk(node))  # fmt: skip


class _Rewriter:
    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool, known: ast.If | None) -> None:
        if not function.args.args:
            raise _RefusedError
        self.function, self.kinds, self.leaving, self.known = function, kinds, leaving, known
        self.self_name = function.args.args[0].arg
        self.local = _local_names(function) - {self.self_name}
        bound = _names_bound(function)
        taken = any(name.startswith(PREFIX) for name in self.local)
        if taken or self.self_name in bound or bound & _names_kept(function) or _looks(function):
            raise _RefusedError
        self.flow = Flow(function)
        self.pending: dict[Definition, _Pending] = {}
        self.before: list[ast.stmt] = []  # what is to run before the statement that is being rewritten
        self.low: dict[ast.Name, str] = {}  # names to be read in a low-precision copy
        self.cast: dict[ast.Call, str] = {}  # linear layers that were cast with another
        self.rests: dict[Definition, str] = {}  # of modules' outputs that were taken apart, all but the first
        self.steps: list[Step] = []
        self.leaves: list[str] = []
        self.count = 0

    def result(self) -> Rewritten | None:
        body = self._block(self.function.body, last=True)
        if self.leaving and not self.leaves:
            return None
        if not self.steps and not self.leaves:
            return None
        f = self.function
        tree = ast.FunctionDef(name=f.name, args=f.args, body=body, decorator_list=[], returns=None)
        return Rewritten(ast.fix_missing_locations(ast.copy_location(tree, f)), tuple(dict.fromkeys(self.steps)),
                         tuple(dict.fromkeys(self.leaves)))  # fmt: skip

    # --- statements -------------------------------------------------------------------------------------------------

    def _block(self, statements: list[ast.stmt], *, last: bool) -> list[ast.stmt]:
        """The statements rewritten. ``last``: nothing runs behind them."""
        out: list[ast.stmt] = []
        outer = set() if last else set(self.pending)
        for index, statement in enumerate(statements):
            for new in self._statement(statement, statements[index + 1 :], last=last and index == len(statements) - 1):
                ast.copy_location(new, statement)
                out.append(ast.fix_missing_locations(new))
        if not last or not _leaves(statements):
            out += self._force([d for d in self.pending if d not in outer])
        return out or [ast.Pass()]

    def _statement(self, statement: ast.stmt, rest: list[ast.stmt], *, last: bool) -> list[ast.stmt]:
        if is_copy(statement):
            return self._copied(statement)
        if isinstance(statement, ast.If):
            return self._if(statement, last=last)
        if isinstance(statement, (ast.For, ast.While)) and not is_opaque(statement):
            forced = self._force(list(self.pending))
            statement.body = self._block(statement.body, last=False)
            return [*forced, statement]
        if is_opaque(statement):
            forced = self._force(list(self.pending))
            return [*forced, statement]
        return self._simple(statement, rest)

    def _copied(self, statement: ast.stmt) -> list[ast.stmt]:
        assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        assert isinstance(statement.value, ast.Name)
        target, definition = statement.targets[0].id, self.flow.only(statement.value)
        self._forget(target)
        if definition in self.pending:
            self.pending[definition].names.add(target)
            return []
        return [statement]

    def _if(self, statement: ast.If, *, last: bool) -> list[ast.stmt]:
        test, forced = statement.test, []
        if not _is_pure(test) and self._has_effects(test):
            forced = self._force(list(self.pending))
        else:
            forced = self._force([d for d in self.pending if self._reads(test, d)])
        if not last:
            forced += self._force([d for d in self.pending if not self._outlasts(statement, d)])
        saved = {d: copy.deepcopy(p) for d, p in self.pending.items()}
        body = self._block(statement.body, last=last or _leaves(statement.body))
        self.pending = {d: copy.deepcopy(p) for d, p in saved.items()}
        steps, leaves = list(self.steps), list(self.leaves)
        orelse = self._block(statement.orelse, last=last) if statement.orelse or (last and saved) else []
        if statement is self.known:
            self.steps, self.leaves = steps, leaves  # of what is done now
        if not last:
            self.pending = saved
            for name in _names_written(statement):
                self._forget(name)
        return [*forced, ast.If(test, body, orelse)]

    def _outlasts(self, statement: ast.If, definition: Definition) -> bool:
        """Whether what waits may wait while a condition runs that others follow."""
        if any(self._reads(inner, definition) for inner in (*statement.body, *statement.orelse)):
            return False
        if _leaves(statement.body) and not statement.orelse:
            return True  # what leaves the function needs nothing of it
        names = self.pending[definition].names & _names_written(statement)
        return not names and not any(self._has_effects(inner) for inner in (*statement.body, *statement.orelse))

    def _simple(self, statement: ast.stmt, rest: list[ast.stmt]) -> list[ast.stmt]:
        original = set(self.pending)
        effects = self._has_effects(statement)
        # What is used on some ways through the statement only is computed on all.
        conditional = [inner for inner in ast.walk(statement) if isinstance(inner, _CONDITIONAL)]
        early = self._force([d for d in self.pending if any(self._reads(inner, d) for inner in conditional)])
        self.before = []
        new = [] if self._hoist(statement) else self._rewritten(statement, rest)
        before, self.before = self.before, []
        written = _names_written(statement)
        waiting = [d for d in self.pending if d in original]
        late = [d for d in waiting if self._reads(statement, d) or (effects and not self._may_wait(statement, d))
                or (isinstance(statement, ast.Return) and self._draws(d))]  # fmt: skip
        forced = self._force(late)
        for d in list(self.pending):
            if d in original:
                self.pending[d].names -= written
        return [*early, *forced, *before, *new]

    def _rewritten(self, statement: ast.stmt, rest: list[ast.stmt]) -> list[ast.stmt]:
        if isinstance(statement, ast.Return):
            return [self._returned(statement)]
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Name):
                return self._assigned(target, value, rest)
            if isinstance(target, ast.Tuple):
                unpacked = self._unpacked(target, value)
                if unpacked is not None:
                    return unpacked
            statement.value = self._value(value)
            return [statement]
        if isinstance(statement, ast.AugAssign):
            return self._augmented(statement, rest)
        for name, inner in ast.iter_fields(statement):
            if isinstance(inner, ast.expr):
                setattr(statement, name, self._value(inner))
        return [statement]

    def _assigned(self, target: ast.Name, value: ast.expr, rest: list[ast.stmt]) -> list[ast.stmt]:
        definition = self.flow.written(target)
        waits = self._profits_name(definition)
        end = self._end(value) if waits else None
        if end is not None:
            temporary = self._temporary()
            self._forget(target.id)
            gate = isinstance(value, ast.Call) and self._kind(value) == "activation" and self._waits_for_product(value)
            self.pending[definition] = _Pending(temporary, {target.id}, "", tuple(self._sources(value)),
                                                waits_for_layers=gate)  # fmt: skip
            return [_assign(temporary, end)]
        if isinstance(value, ast.Call) and self._kind(value) == "module" and self._is_taken_apart(definition):
            first, others = self._temporary(), self._temporary()
            self._forget(target.id)
            self.pending[definition] = _Pending(first, {target.id}, "", (self._path(value),))
            self.rests[definition] = others
            return [_unpack([first, others], self._module_call("split", value))]
        if self._leads_to_norm(definition, rest):
            view = _view_of(value)
            total = self._sum(value if view is None else view.value, plain=True)
            if total is not None and view is None:
                return self._waiting_sum(definition, target.id, total)
            if total is not None:
                return self._waiting_view(definition, target.id, total, value)
        if isinstance(value, ast.Call) and self._kind(value) == "norm" and _has_one(value):
            total = self._sum(value.args[0], plain=True)
            if total is not None:
                return self._norm_of_sum(value, total, target.id)
        return [ast.Assign([target], self._value(value))]

    def _waiting_sum(self, definition: Definition, name: str, total: _Sum) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        first, second = self._kept(total.end, before), self._kept(total.residual, before)
        self._forget(name)
        self.pending[definition] = _Pending(first, {name}, second, total.sources, total.first)
        return before

    def _kept(self, node: ast.expr, before: list[ast.stmt]) -> str:
        """The temporary that has the value, which may have to be assigned."""
        if isinstance(node, ast.Name) and node.id.startswith(PREFIX):
            return node.id
        before.append(_assign(self._temporary(), node))
        return f"{PREFIX}{self.count}"

    def _waiting_view(self, definition: Definition, name: str, total: _Sum, value: ast.expr) -> list[ast.stmt]:
        """A sum of another shape, which waits in this shape."""
        assert isinstance(value, ast.Call)
        before: list[ast.stmt] = []
        parts = [self._kept(total.end, before), self._kept(total.residual, before)]
        old = self.flow.only(value.func.value) if isinstance(value.func.value, ast.Name) else None  # type: ignore[attr-defined]
        if old is not None:
            self.pending[old] = _Pending(parts[0], set(), parts[1])  # for its sizes
        shape = [self._value(argument) for argument in value.args]
        if old is not None:
            del self.pending[old]
        new = [self._temporary(), self._temporary()]
        self._forget(name)
        self.pending[definition] = _Pending(new[0], {name}, new[1], total.sources, total.first)
        read = [ast.Name(part, ast.Load()) for part in parts]
        return [*before, _unpack(new, _call("reshaped", *read, *shape))]

    def _norm_of_sum(self, call: ast.Call, total: _Sum, target: str, names: Sequence[str] = ()) -> list[ast.stmt]:
        """``target = norm(sum)``, and the sum under these names."""
        self.steps.append(Step("add_norm", self._path(call), total.sources))
        ends = (total.end, total.residual, call.func)
        if names:
            both = _unpack([target, names[0]], _call("add_norm", *ends, *self._consumers(call)))
            return [both, *[_assign(name, ast.Name(names[0], ast.Load())) for name in names[1:]]]
        low = self._low_uses(call)
        if low is not None:
            copied = self._temporary()
            self.low.update(dict.fromkeys(low[0], copied))
            return [_unpack([copied, target], _call("add_norm_cast", *ends, *low[1]))]
        return [_assign(target, _call("add_norm", *ends, *self._consumers(call), return_sum=False))]

    def _augmented(self, statement: ast.AugAssign, rest: list[ast.stmt]) -> list[ast.stmt]:
        """``h += residual`` where h is an end, and so a tensor of nobody else's."""
        target = statement.target
        old = self.flow.only(target) if isinstance(target, ast.Name) else None
        pending = self.pending.get(old) if old is not None else None
        if (
            pending is None
            or pending.residual
            or not isinstance(statement.op, ast.Add)
            or not _is_pure(statement.value)
        ):
            statement.value = self._value(statement.value)
            return [statement]
        assert isinstance(target, ast.Name) and old is not None
        names = [self._temporary(), self._temporary()]
        both = _unpack(names, _call("in_place", self._take(old), statement.value))
        total = _Sum(ast.Name(names[0], ast.Load()), ast.Name(names[1], ast.Load()), pending.sources)
        definition = self.flow.written(target)
        if self._leads_to_norm(definition, rest):
            return [both, *self._waiting_sum(definition, target.id, total)]
        self.steps.append(Step("add", "", total.sources))
        return [both, _assign(target.id, _call("add", total.end, total.residual))]

    def _unpacked(self, target: ast.Tuple, value: ast.expr) -> list[ast.stmt] | None:
        if not target.elts or not all(isinstance(element, ast.Name) for element in target.elts):
            return None
        first = target.elts[0]
        assert isinstance(first, ast.Name)
        if (
            isinstance(value, ast.Call)
            and self._kind(value) == "module"
            and self._profits_name(self.flow.written(first))
        ):
            call = self._module_call("branches", value)
            temporary = self._temporary()
            for element in target.elts:
                self._forget(element.id)  # type: ignore[attr-defined]
            self.pending[self.flow.written(first)] = _Pending(temporary, {first.id}, "", (self._path(value),))
            names: list[ast.expr] = [ast.Name(temporary, ast.Store()), *target.elts[1:]]
            return [ast.Assign([ast.Tuple(names, ast.Store())], call)]
        if len(target.elts) == 2 and self._is_halved(value) and self._gate_of(target) is not None:
            temporary = self._temporary()
            assert isinstance(value, ast.Call)
            rows = value.func.value if not self._is_function(value, "chunk") else value.args[0]  # type: ignore[attr-defined]
            for element in target.elts:
                self._forget(element.id)  # type: ignore[attr-defined]
                self.pending[self.flow.written(element)] = _Pending("", {element.id}, temporary)  # type: ignore[attr-defined]
            return [_assign(temporary, self._value(rows))]
        return None

    def _returned(self, statement: ast.Return) -> ast.Return:
        value = statement.value
        if value is None or not self.leaving:
            return ast.Return(None if value is None else self._value(value))
        first, others = (
            (value.elts[0], value.elts[1:]) if isinstance(value, ast.Tuple) and value.elts else (value, None)
        )
        if isinstance(value, ast.Call) and self._kind(value) == "module":
            self.leaves.append(self._path(value))
            return ast.Return(self._module_call("handed", value))
        if isinstance(first, ast.Starred) or (others is None and not self._is_one_tensor(value)):
            return ast.Return(_call("whole", self._value(value)))
        end = self._end(first, leaving=True)
        if end is None:
            end = _call("Branch", self._value(first))
        rest: ast.expr = ast.Constant(None)
        if others is not None:
            rest = ast.Tuple([self._value(other) for other in others], ast.Load())
        return ast.Return(ast.Tuple([end, rest], ast.Load()))

    def _is_one_tensor(self, value: ast.expr) -> bool:
        """Whether this, which is returned, is known to be an end, and so no tuple."""
        if isinstance(value, ast.Name):
            definition = self.flow.only(value)
            return definition is not None and definition in self.pending
        return isinstance(value, ast.Call) and self._kind(value) in ("linear", "dropout", "functional dropout")

    # --- expressions ------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> ast.expr:  # noqa: C901 - one case a kind
        """The expression, of which a tensor comes, rewritten."""
        new = self._joined(node)
        if new is not None:
            return new
        if isinstance(node, ast.Name):
            return ast.Name(self.low[node], ast.Load()) if node in self.low else node
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            definition = self.flow.only(node.value)
            if definition is not None and definition in self.rests and _from_first(node) is not None:
                return _shifted(node, self.rests[definition])
        if isinstance(node, ast.Attribute) and node.attr in _SHAPE and isinstance(node.value, ast.Name):
            definition = self.flow.only(node.value)
            pending = None if definition is None else self.pending.get(definition)
            if pending is not None and pending.residual and pending.end:
                ends = [ast.Name(name, ast.Load()) for name in (pending.end, pending.residual)]
                return ast.Attribute(_call("like", *ends), node.attr, ast.Load())
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            return node
        for name, inner in ast.iter_fields(node):
            if isinstance(inner, ast.expr):
                setattr(node, name, self._value(inner))
            elif isinstance(inner, list):
                for place, element in enumerate(inner):
                    if isinstance(element, ast.expr):
                        inner[place] = self._value(element)
                    elif isinstance(element, ast.keyword):
                        element.value = self._value(element.value)
        return node

    def _joined(self, node: ast.expr) -> ast.expr | None:
        """One operator in place of several; None where the expression is as it is."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._gated(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            total = self._sum(node, plain=False)
            if total is not None:
                self.steps.append(Step("add", "", total.sources))
                return _added(total.end, total.residual, total.first)
        if not isinstance(node, ast.Call):
            return None
        kind = self._kind(node)
        if kind == "norm" and _has_one(node):
            return self._normed(node)
        if kind in ("activation", "dropout", "functional dropout") and self._activates(node):
            end = self._end(node, activated=True)
            if end is not None:
                return _call("finished", end)
        if kind == "module" and node.args:
            self._narrowed(node)
        return None

    def _normed(self, node: ast.Call) -> ast.expr | None:
        consumers = self._consumers(node)
        total = self._sum(node.args[0], plain=True)
        if total is None and not consumers:
            return None
        norm = node.func
        if total is None:
            return _call("normed", norm, self._value(node.args[0]), *consumers)
        self.steps.append(Step("add_norm", self._path(node), total.sources))
        return _call("add_norm", total.end, total.residual, norm, *consumers, return_sum=False)

    def _narrowed(self, node: ast.Call) -> None:
        """Rows that a module takes and others too are cast once for it, if all that it does with them is to cast them."""
        if isinstance(node.args[0], ast.Name) and node.args[0] not in self.low and self._is_residual_too(node.args[0]):
            node.args[0] = _call("narrowed", node.args[0], copy.deepcopy(node.func))

    def _is_residual_too(self, name: ast.Name) -> bool:
        definition = self.flow.only(name)
        return definition is not None and any(
            isinstance(self.flow.parent[use], ast.BinOp) for use in definition.uses if use is not name
        )

    def _gated(self, node: ast.BinOp) -> ast.expr | None:
        for gate, up, name in ((node.left, node.right, "gated"), (node.right, node.left, "gated_by")):
            end = self._gate(gate)
            if end is not None:
                halves = self._halves(gate, up)
                if halves is not None:
                    return halves
                self.steps.append(Step("gate", self._activation_path(gate), ()))
                other = self._value(up)
                return _call(name, *((end, other) if name == "gated" else (other, end)))
        return None

    def _gate(self, node: ast.expr) -> ast.expr | None:
        """An activated value that waits for its multiplication."""
        if isinstance(node, ast.Name):
            definition = self.flow.only(node)
            pending = None if definition is None else self.pending.get(definition)
            if pending is None or pending.residual or not pending.waits_for_layers:
                return None
            assert definition is not None
            return self._take(definition)
        if isinstance(node, ast.Call) and self._kind(node) == "activation" and len(node.args) == 1:
            if isinstance(node.args[0], ast.Name) and self._half(node.args[0]) is not None:
                return ast.Constant(None)  # the halves of one tensor
            if not self._is_product(node.args[0]):
                return None
            return _call("waiting", self._value(node.args[0]), self._activation(node))
        return None

    def _activation_path(self, gate: ast.expr) -> str:
        if isinstance(gate, ast.Name):
            definition = self.flow.only(gate)
            gate = definition.value if definition is not None and definition.value is not None else gate
        return self._path(gate) if isinstance(gate, ast.Call) else ""

    def _half(self, name: ast.Name) -> str | None:
        """The temporary of the tensor of which this is a half."""
        definition = self.flow.only(name)
        pending = None if definition is None else self.pending.get(definition)
        return pending.residual if pending is not None and not pending.end else None

    def _halves(self, gate: ast.expr, up: ast.expr) -> ast.expr | None:
        if not (isinstance(gate, ast.Call) and isinstance(gate.args[0], ast.Name) and isinstance(up, ast.Name)):
            return None
        whole = self._half(gate.args[0])
        if whole is None or whole != self._half(up):
            return None
        for name in (gate.args[0], up):
            definition = self.flow.only(name)
            assert definition is not None
            del self.pending[definition]
        self.steps.append(Step("gate", self._path(gate), ()))
        return _call("packed_gated", ast.Name(whole, ast.Load()), self._activation(gate))

    def _is_halved(self, value: ast.expr) -> bool:
        """Whether this is ``x.chunk(2, dim=-1)``, in whatever way."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "chunk":
            return False
        given = [*value.args[self._is_function(value, "chunk") :], *[keyword.value for keyword in value.keywords]]
        return [ast.unparse(argument) for argument in given] == ["2", "-1"]

    def _is_function(self, call: ast.Call, name: str) -> bool:
        return ast.unparse(call.func) == f"torch.{name}"

    def _gate_of(self, target: ast.Tuple) -> ast.Call | None:
        """The activation of the first half, where it and the second are multiplied and go nowhere else."""
        gate, up = [self.flow.written(element).uses for element in target.elts]
        if len(gate) != 1 or len(up) != 1:
            return None
        call = self.flow.parent[gate[0]]
        if not isinstance(call, ast.Call) or self._kind(call) != "activation":
            return None
        product = self.flow.parent[call]
        fits = isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)
        return call if fits and self.flow.parent[up[0]] is product else None

    # --- ends and sums ----------------------------------------------------------------------------------------------

    def _sum(self, node: ast.expr, *, plain: bool) -> _Sum | None:
        """The end and the residual of a sum. ``plain``: a sum of two tensors counts, too."""
        if isinstance(node, ast.Name):
            definition = self.flow.only(node)
            pending = None if definition is None else self.pending.get(definition)
            if pending is None or not pending.residual or not pending.end:
                return None
            assert definition is not None
            if self._uses(definition) > 1:
                return None
            del self.pending[definition]
            return _Sum(ast.Name(pending.end, ast.Load()), ast.Name(pending.residual, ast.Load()), pending.sources)
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            return None
        for term, other in ((node.right, node.left), (node.left, node.right)):
            if isinstance(other, ast.Name):
                sources = tuple(self._sources(term))
                end = self._end(term)
                if end is not None:
                    return _Sum(end, self._value(other), sources, term is node.left)
        pure = _is_pure(node.right) and not isinstance(node.right, ast.Constant)
        if plain and pure and isinstance(node.left, ast.Name) and any(map(self._is_computed, (node.left, node.right))):
            return _Sum(_call("Branch", self._value(node.right)), self._value(node.left), ())
        return None

    def _end(self, node: ast.expr, *, leaving: bool = False, activated: bool = False) -> ast.expr | None:  # noqa: C901 - one case a kind
        """The expression as an end, if what takes it can take one."""
        if isinstance(node, ast.Name):
            definition = self.flow.only(node)
            pending = None if definition is None else self.pending.get(definition)
            if pending is None or pending.residual or definition is None or len(definition.uses) > 1:
                return None
            if definition in self.rests:
                return None
            if leaving:
                self.leaves += self._sources(node)
            return self._take(definition)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
            inner = node.value
            if isinstance(inner, ast.Call) and self._kind(inner) == "module":
                return self._module_call("first", inner)
            definition = self.flow.only(inner) if isinstance(inner, ast.Name) else None
            if definition is not None and definition in self.rests and definition in self.pending:
                return self._take(definition)
            return None
        if not isinstance(node, ast.Call):
            return None
        if leaving:
            self.leaves += self._sources(node)
        kind = self._kind(node)
        if kind == "linear" and _has_one(node):
            return self._linear(node)
        if kind == "module":
            return self._module_call("leaving", node)
        if kind == "activation":
            if self._waits_for_product(node):
                return _call("waiting", self._value(node.args[0]), self._activation(node))
            sources = tuple(self._sources(node.args[0]))
            layer = self._end(node.args[0])
            if layer is None:
                return None
            self.steps.append(Step("activate", self._path(node), sources))
            return _call("activated", layer, self._activation(node))
        if kind == "dropout" and _has_one(node):
            return _call("dropped", self._inner(node.args[0]), node.func)
        if kind == "functional dropout":
            return self._functional_dropout(node)
        return None

    def _inner(self, node: ast.expr) -> ast.expr:
        end = self._end(node)
        return _call("Branch", self._value(node)) if end is None else end

    def _functional_dropout(self, node: ast.Call) -> ast.expr | None:
        given = dict(zip(("input", "p", "training"), node.args, strict=False))
        given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
        if not given.keys() <= {"input", "p", "training"} or "input" not in given:
            return None
        p, training = given.get("p", ast.Constant(0.5)), given.get("training", ast.Constant(True))
        if not _is_pure(p) or not _is_pure(training):
            return None
        return _call("drop", self._inner(given["input"]), p, training=training)

    def _linear(self, node: ast.Call) -> ast.expr:
        layer: ast.expr = node.func
        second = self._second_layer(node)
        if node in self.cast:
            layer = ast.Name(self.cast[node], ast.Load())
        elif second is not None and isinstance(node.args[0], ast.Name) and self._are_together(node, second):
            first_name, second_name = self._temporary(), self._temporary()
            names = ast.Tuple([ast.Name(first_name, ast.Store()), ast.Name(second_name, ast.Store())], ast.Store())
            rows = self._value(copy.copy(node.args[0])) if node.args[0] not in self.low else self._value(node.args[0])
            self.before.append(
                ast.Assign([names], _call("cast_together", self._self(), rows, node.func, copy.deepcopy(second.func)))
            )
            self.cast[second] = second_name
            layer = ast.Name(first_name, ast.Load())
        return _call("linear", layer, self._value(node.args[0]))

    def _are_together(self, *nodes: ast.AST) -> bool:
        """Whether of these expressions all are evaluated, or none: they are in one block, and under no condition in it."""
        blocks = set[ast.AST]()
        for node in nodes:
            while not isinstance(node, ast.stmt):
                if isinstance(node, _CONDITIONAL):
                    return False
                node = self.flow.parent[node]
            blocks.add(self.flow.parent[node])
        return len(blocks) == 1

    def _second_layer(self, node: ast.Call) -> ast.Call | None:
        """The linear layer that takes what an activation, and perhaps a dropout, make of this one's output."""
        current: ast.AST = node
        activated = False
        while True:
            parent = self.flow.parent[current]
            if isinstance(parent, ast.Call) and current in parent.args[:1]:
                kind = self._kind(parent)
                if kind == "linear":
                    return parent if activated and _has_one(parent) and self._profits(parent) else None
                activated |= kind == "activation"
                if kind not in ("activation", "dropout", "functional dropout"):
                    return None
                current = parent
            elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
                uses = self.flow.written(parent.targets[0]).uses
                if len(uses) != 1 or self.flow.only(uses[0]) is None:
                    return None
                current = uses[0]
            else:
                return None

    def _module_call(self, helper: str, node: ast.Call) -> ast.expr:
        self._narrowed_or_value(node)
        return ast.Call(_helper(helper), [node.func, *node.args], node.keywords)

    def _narrowed_or_value(self, node: ast.Call) -> None:
        if node.args:
            self._narrowed(node)
        node.args = [
            argument if isinstance(argument, ast.Call) and _is_helper(argument) else self._value(argument)
            for argument in node.args
        ]
        for keyword in node.keywords:
            rows = keyword.value
            if (
                keyword.arg in _ROWS
                and isinstance(rows, ast.Name)
                and rows not in self.low
                and self._is_residual_too(rows)
            ):
                keyword.value = _call("narrowed", rows, copy.deepcopy(node.func))
            else:
                keyword.value = self._value(rows)

    # --- what takes a value -----------------------------------------------------------------------------------------

    def _is_taken_apart(self, definition: Definition) -> bool:
        """Whether of a module's outputs the first goes where an end may go, and all others somewhere else."""
        firsts = []
        for use in definition.uses:
            parent = self.flow.parent[use]
            if (
                not isinstance(parent, ast.Subscript)
                or parent.value is not use
                or self.flow.only(use) is not definition
            ):
                return False
            if isinstance(parent.slice, ast.Constant) and parent.slice.value == 0:
                firsts.append(parent)
            elif _from_first(parent) is None:
                return False
        return len(firsts) == 1 and self._profits(firsts[0])

    def _profits_name(self, definition: Definition) -> bool:
        if len(definition.uses) != 1:
            return False
        use = definition.uses[0]
        return self.flow.only(use) is definition and self._profits(use)

    def _profits(self, node: ast.AST) -> bool:
        """Whether what takes this value takes an end, and does more with it than to finish it."""
        parent = self.flow.parent[node]
        if isinstance(parent, ast.Call) and parent.args and parent.args[0] is node:
            kind = self._kind(parent)
            if kind == "activation":
                return self._is_layer(node) and not self._waits_for_product(parent)
            return kind in ("dropout", "functional dropout") and (self._profits(parent) or self._activates(parent))
        if isinstance(parent, ast.BinOp):
            other = parent.right if parent.left is node else parent.left
            if isinstance(parent.op, ast.Mult):
                return self._is_activated(node)
            return isinstance(parent.op, ast.Add) and _is_pure(other) and not isinstance(other, ast.Constant)
        if isinstance(parent, ast.AugAssign):
            return parent.target is node and isinstance(parent.op, ast.Add) and _is_pure(parent.value)
        if isinstance(parent, ast.Subscript):
            return parent.value is node and self._profits(parent)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and parent.value is node:
            target = parent.targets[0]
            return isinstance(target, ast.Name) and self._profits_name(self.flow.written(target))
        if isinstance(parent, ast.Tuple) and parent.elts[0] is node:
            return self.leaving and isinstance(self.flow.parent[parent], ast.Return) and bool(self._sources(node))
        return self.leaving and isinstance(parent, ast.Return) and bool(self._sources(node))

    def _definition_of(self, node: ast.AST) -> ast.AST:
        """The expression behind a name, where it is known."""
        if isinstance(node, ast.Name):
            definition = self.flow.only(node)
            if definition is not None and definition.value is not None and definition.place in (None, 0):
                return definition.value
        return node

    def _is_computed(self, node: ast.expr) -> bool:
        """Whether this comes of a module's call: embeddings, which are broadcast and are no residual stream, do not."""
        found = (self._definition_of(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name))
        return any(isinstance(call, ast.Call) and self._kind(call) not in ("", "absent") for call in found)

    def _is_product(self, node: ast.AST) -> bool:
        """Whether this is a matrix product, or half of a tensor."""
        node = self._definition_of(node)
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        if not isinstance(node, ast.Call):
            return False
        return self._kind(node) == "linear" or self._is_halved(node) or ast.unparse(node.func).endswith(_PRODUCTS)

    def _is_layer(self, node: ast.AST) -> bool:
        node = self._definition_of(node)
        return isinstance(node, ast.Call) and self._kind(node) == "linear" and _has_one(node)

    def _is_activated(self, node: ast.AST) -> bool:
        node = self._definition_of(node)
        return isinstance(node, ast.Call) and self._kind(node) == "activation" and self._is_product(node.args[0])

    def _activates(self, node: ast.AST) -> bool:
        """Whether this is the activation of a linear layer's output, perhaps with a dropout behind it."""
        node = self._definition_of(node)
        if not isinstance(node, ast.Call) or not node.args:
            return False
        kind = self._kind(node)
        if kind == "activation":
            return self._is_layer(node.args[0]) and not self._waits_for_product(node)
        return kind in ("dropout", "functional dropout") and self._activates(node.args[0])

    def _waits_for_product(self, node: ast.Call) -> bool:
        """Whether this activation is a gate: what takes it is a multiplication."""
        parent: ast.AST = self.flow.parent[node]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            uses = self.flow.written(parent.targets[0]).uses
            if len(uses) != 1 or self.flow.only(uses[0]) is None:
                return False
            parent = self.flow.parent[uses[0]]
        return isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult)

    def _sources(self, node: ast.AST) -> list[str]:
        """The paths of the modules whose last steps an end has."""
        node = self._definition_of(node)
        if isinstance(node, ast.Subscript):
            node = self._definition_of(node.value)
        if not isinstance(node, ast.Call):
            return []
        kind = self._kind(node)
        if kind in ("linear", "module"):
            return [self._path(node)]
        if kind == "dropout" and _has_one(node):
            return [*self._sources(node.args[0]), self._path(node)]
        if kind == "functional dropout" and node.args:
            p = next((keyword.value for keyword in node.keywords if keyword.arg == "p"), None) or [*node.args, None][1]
            return [*self._sources(node.args[0]), " " + ("0.5" if p is None else ast.unparse(p))]
        return []

    def _consumers(self, node: ast.Call) -> list[ast.expr]:
        """The modules that take a norm's output, if nothing else does."""
        parent = self.flow.parent[node]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            uses: list[ast.AST] = list(self.flow.written(parent.targets[0]).uses)
        else:
            uses = [node]
        found = [self._consumer(use) for use in uses]
        return [] if not all(found) else _once(found)

    def _consumer(self, use: ast.AST) -> ast.expr | None:
        """The module that takes this as its rows."""
        parent = self.flow.parent[use]
        if isinstance(parent, ast.keyword):
            call = self.flow.parent[parent]
            takes = parent.arg in _ROWS
        else:
            call = parent
            takes = isinstance(parent, ast.Call) and bool(parent.args) and parent.args[0] is use
        if not takes or not isinstance(call, ast.Call) or self._kind(call) not in ("linear", "module"):
            return None
        if isinstance(use, ast.Name) and self.flow.only(use) is None:
            return None
        return copy.deepcopy(call.func)

    # --- norms of sums that go elsewhere too ------------------------------------------------------------------------

    def _hoist(self, statement: ast.stmt) -> bool:
        """Norm and waiting sum in one, ahead of all else that the statement does; whether that is all that it does."""
        call = _first_call(statement)
        if call is None or self._kind(call) != "norm" or not _has_one(call):
            return False
        rows = call.args[0]
        definition = self.flow.only(rows) if isinstance(rows, ast.Name) else None
        pending = None if definition is None else self.pending.get(definition)
        if definition is None or pending is None or not pending.residual or not pending.end:
            return False
        del self.pending[definition]
        target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is call else None
        direct = target.id if isinstance(target, ast.Name) else ""
        names = sorted(pending.names - {direct}) if self._uses(definition) > 1 else []
        output = direct or self._temporary()
        total = _Sum(ast.Name(pending.end, ast.Load()), ast.Name(pending.residual, ast.Load()), pending.sources)
        self.before += self._norm_of_sum(call, total, output, names)
        if direct:
            self._forget(direct)
        else:
            _replace(self.flow.parent[call], call, ast.Name(output, ast.Load()))
        return bool(direct)

    def _low_uses(self, call: ast.Call) -> tuple[list[ast.Name], list[ast.expr]] | None:
        """The uses of a post-norm's output by modules, and these, where all others are the residual stream."""
        parent = self.flow.parent[call]
        if not isinstance(parent, ast.Assign) or not isinstance(parent.targets[0], ast.Name):
            return None
        taken, modules, residual = [], [], False
        for use in self.flow.written(parent.targets[0]).uses:
            if self.flow.only(use) is None:
                return None
            consumer = self._consumer(use)
            if consumer is not None:
                taken.append(use)
                modules.append(consumer)
            elif isinstance(self.flow.parent[use], ast.BinOp):
                residual = True
            else:
                return None
        return (taken, _once(modules)) if taken and residual else None

    def _leads_to_norm(self, definition: Definition, rest: list[ast.stmt]) -> bool:  # noqa: C901 - one case a kind
        """Whether the first thing that happens to a sum, on some path, is that it is normalised."""
        for statement in rest:
            if is_copy(statement):
                continue
            if isinstance(statement, ast.If):
                if self._has_effects(statement.test) or self._reads(statement.test, definition):
                    return False
                if _leaves(statement.body) and not statement.orelse:
                    continue
                if statement is not rest[-1]:
                    return False
                return any(self._leads_to_norm(definition, branch) for branch in (statement.body, statement.orelse))
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                view = _view_of(statement.value)
                if view is not None and isinstance(view.value, ast.Name) and self.flow.only(view.value) is definition:
                    made = self.flow.written(statement.targets[0])
                    return self._uses(definition) == 1 and self._leads_to_norm(made, rest[rest.index(statement) + 1 :])
            if is_opaque(statement) or isinstance(statement, (ast.For, ast.While)):
                return False
            call = _first_call(statement)
            if call is not None and self._kind(call) == "norm" and _has_one(call):
                rows = call.args[0]
                if isinstance(rows, ast.Name) and self.flow.only(rows) is definition:
                    return True
            if self._has_effects(statement) or self._reads(statement, definition):
                return False
        return False

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _kind(self, node: ast.Call) -> str:
        path = path_of(node.func, self.self_name)
        if not path and (not _root(node.func) or _root(node.func) in self.local):
            return ""
        kind = self.kinds(path or " " + ast.unparse(node.func))
        if kind == "activation" and not _has_one(node) and self._approximate(node) is None:
            return ""
        return "" if any(isinstance(argument, ast.Starred) for argument in node.args) else kind

    def _approximate(self, node: ast.Call) -> str | None:
        """Which GELU a function is told to compute."""
        if len(node.args) != 1 or len(node.keywords) != 1 or not isinstance(node.func, ast.Attribute):
            return None
        given = ast.unparse(node.keywords[0])
        return {"approximate='tanh'": "gelu_tanh", "approximate='none'": ""}.get(given)

    def _path(self, node: ast.Call) -> str:
        return path_of(node.func, self.self_name)

    def _activation(self, node: ast.Call) -> ast.expr:
        """What is called for the activation, with the rows alone."""
        name = self._approximate(node)
        return _helper(name) if name else node.func

    def _self(self) -> ast.expr:
        return ast.Name(self.self_name, ast.Load())

    def _temporary(self) -> str:
        self.count += 1
        return f"{PREFIX}{self.count}"

    def _take(self, definition: Definition) -> ast.expr:
        return ast.Name(self.pending.pop(definition).end, ast.Load())

    def _forget(self, name: str) -> None:
        """A name that is assigned again stands no longer for what waits."""
        for pending in self.pending.values():
            pending.names.discard(name)

    def _force(self, definitions: Sequence[Definition]) -> list[ast.stmt]:
        """What waits, finished."""
        out: list[ast.stmt] = []
        for definition in definitions:
            pending = self.pending.pop(definition, None)
            if pending is None or not pending.names:
                continue
            if not pending.end:
                raise _RefusedError  # halves that something came between
            if definition in self.rests:
                parts = [ast.Name(name, ast.Load()) for name in (pending.end, self.rests[definition])]
                out += [_assign(name, _call("rejoined", *parts)) for name in sorted(pending.names)]
                continue
            names = sorted(pending.names)
            end = ast.Name(pending.end, ast.Load())
            finished = (
                _added(end, ast.Name(pending.residual, ast.Load()), pending.first)
                if pending.residual
                else _call("finished", end)
            )
            if pending.residual:
                self.steps.append(Step("add", "", pending.sources))
            out.append(_assign(names[0], finished))
            out += [_assign(name, ast.Name(names[0], ast.Load())) for name in names[1:]]
        return out

    def _uses(self, definition: Definition) -> int:
        """How many uses a value has, but for its shape."""
        return sum(not self._is_shape(use) for use in definition.uses)

    def _is_shape(self, use: ast.Name) -> bool:
        parent = self.flow.parent.get(use)
        return isinstance(parent, ast.Attribute) and parent.attr in _SHAPE

    def _reads(self, node: ast.AST, definition: Definition) -> bool:
        """Whether anything of a value is read here; of a sum that waits, anything but its shape."""
        pending = self.pending.get(definition)
        is_sum = pending is None or bool(pending.residual and pending.end)
        return any(
            isinstance(inner, ast.Name)
            and definition in self.flow.reaching.get(inner, frozenset())
            and not (is_sum and self._is_shape(inner))
            and not (definition in self.rests and _from_first(self.flow.parent.get(inner)) is not None)
            for inner in ast.walk(node)
        )

    def _has_effects(self, node: ast.AST) -> bool:
        """Whether this calls anything that may do more than to return something."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and not _is_harmless(inner):
                return True
            if isinstance(inner, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                return True
            if isinstance(inner, (ast.Subscript, ast.Attribute)) and not isinstance(inner.ctx, ast.Load):
                return True
        return isinstance(node, (ast.AugAssign, ast.Delete))

    def _draws(self, definition: Definition) -> bool:
        """Whether random numbers may be drawn for what waits, which nobody may need."""
        return any(self.kinds(path) != "linear" for path in self.pending[definition].sources)

    def _may_wait(self, statement: ast.stmt, definition: Definition) -> bool:
        """Whether a gate may wait while the statement runs: it calls nothing but linear layers."""
        calls = [inner for inner in ast.walk(statement) if isinstance(inner, ast.Call)]
        return self.pending[definition].waits_for_layers and all(
            _is_helper(call) or self._kind(call) == "linear" for call in calls
        )


# --- trees ------------------------------------------------------------------------------------------------------------


def _helper(name: str) -> ast.expr:
    return ast.Name(PREFIX + name, ast.Load())


def _is_helper(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id.startswith(PREFIX)


def _call(name: str, *args: ast.expr, **options: Any) -> ast.Call:
    given = [(key, value if isinstance(value, ast.expr) else ast.Constant(value)) for key, value in options.items()]
    return ast.Call(_helper(name), list(args), [ast.keyword(key, value) for key, value in given])


def _added(end: ast.expr, residual: ast.expr, first: bool) -> ast.Call:
    return _call("add", end, residual, first=True) if first else _call("add", end, residual)


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _unpack(names: Sequence[str], value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())], value)


def _has_one(node: ast.Call) -> bool:
    return len(node.args) == 1 and not node.keywords


def _is_harmless(node: ast.Call) -> bool:
    """Whether the call changes nothing and computes nothing."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in _SHAPE and _is_pure(node.func.value)
    return isinstance(node.func, ast.Name) and node.func.id in _HARMLESS


def _view_of(node: ast.expr) -> ast.Attribute | None:
    """``x.reshape`` of ``x.reshape(...)``, and of a view."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return None
    return node.func if node.func.attr in ("reshape", "view") else None


def _from_first(node: ast.AST | None) -> int | None:
    """The first index, from one on, of ``x[1]`` or ``x[1:]``."""
    if not isinstance(node, ast.Subscript):
        return None
    index: ast.expr | None = node.slice
    if isinstance(index, ast.Slice):
        index = index.lower if index.upper is None and index.step is None else None
    value = index.value if isinstance(index, ast.Constant) else None
    return value if isinstance(value, int) and value > 0 else None


def _shifted(node: ast.Subscript, rest: str) -> ast.expr:
    """The same of all but the first."""
    place = ast.Constant((_from_first(node) or 1) - 1)
    index: ast.expr = ast.Slice(place, None, None) if isinstance(node.slice, ast.Slice) else place
    return ast.Subscript(ast.Name(rest, ast.Load()), index, ast.Load())


def _looks(function: ast.FunctionDef) -> bool:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in _LOOKING for called in calls)


def _root(node: ast.expr) -> str:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _once(nodes: Sequence[Any]) -> list[ast.expr]:
    return list({ast.dump(node): node for node in nodes}.values())


def _names_written(node: ast.AST) -> set[str]:
    """The names that are bound, but for those that only a comprehension sees."""
    if isinstance(node, _SCOPES):
        return set()
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    return {name for child in ast.iter_child_nodes(node) for name in _names_written(child)}


def _local_names(function: ast.FunctionDef) -> set[str]:
    """The names that the function binds, its arguments too."""
    names = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not function:
            names.add(node.name)
    return names


def _names_kept(function: ast.FunctionDef) -> set[str]:
    """The names that something in the function may read later than where it stands."""
    inner = [node for node in ast.walk(function) if isinstance(node, _LATER) and node is not function]
    return {node.id for scope in inner for node in ast.walk(scope) if isinstance(node, ast.Name)}


def _names_bound(function: ast.FunctionDef) -> set[str]:
    """The names that the function itself binds, but for its arguments."""
    return {name for statement in function.body for name in _names_written(statement)}


def _first_call(statement: ast.stmt) -> ast.Call | None:
    """The call that is made first, with nothing before it, and on every way through the statement."""
    value = getattr(statement, "value", None)
    if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) or not isinstance(value, ast.expr):
        return None
    return _first_in(value)


def _first_in(node: ast.expr) -> ast.Call | None:
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.Compare, ast.ListComp, ast.SetComp, ast.DictComp,
                         ast.GeneratorExp)):  # fmt: skip
        return None
    for child in ast.iter_child_nodes(node):
        inner = child.value if isinstance(child, ast.keyword) else child
        if isinstance(inner, ast.expr) and not _is_pure(inner):
            return _first_in(inner)
    return node if isinstance(node, ast.Call) else None


def _replace(parent: ast.AST, old: ast.expr, new: ast.expr) -> None:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new
