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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .conditions import under_conditions
from .ends import Ends, Pending, Step, Sum
from .flow import Definition, is_copy, is_opaque
from .reading import Kinds
from .trees import (
    CONDITIONAL,
    PREFIX,
    added,
    assign,
    ends_function,
    first_call,
    from_first,
    has_one,
    helper_call,
    is_harmless,
    is_helper,
    is_pure,
    looks,
    names_bound,
    names_kept,
    names_written,
    replace,
    unpack,
    view_of,
)  # fmt: skip

__all__ = ["Rewritten", "rewrite"]

_NO_FACTS: Mapping[str, bool] = {}


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


class _RefusedError(Exception):
    """The function is left as it is."""


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
    function.body, known = under_conditions(function.body, facts, kinds, self_name)
    try:
        return _Statements(function, kinds, leaving, known).result()
    except _RefusedError:
        return None


class _Statements(Ends):
    """A function's statements, one after another."""

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool, known: ast.If | None) -> None:
        if not function.args.args:
            raise _RefusedError
        super().__init__(function, kinds, leaving)
        self.function, self.known = function, known
        bound = names_bound(function)
        taken = any(name.startswith(PREFIX) for name in self.local)
        if taken or self.self_name in bound or bound & names_kept(function) or looks(function):
            raise _RefusedError

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

    def _block(self, statements: list[ast.stmt], *, last: bool) -> list[ast.stmt]:
        """The statements rewritten. ``last``: nothing runs behind them."""
        out: list[ast.stmt] = []
        outer = set() if last else set(self.pending)
        for index, statement in enumerate(statements):
            for new in self._statement(statement, statements[index + 1 :], last=last and index == len(statements) - 1):
                ast.copy_location(new, statement)
                out.append(ast.fix_missing_locations(new))
        if not last or not ends_function(statements):
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
        if not is_pure(test) and self._has_effects(test):
            forced = self._force(list(self.pending))
        else:
            forced = self._force([d for d in self.pending if self._reads(test, d)])
        if not last:
            forced += self._force([d for d in self.pending if not self._outlasts(statement, d)])
        saved = {d: copy.deepcopy(p) for d, p in self.pending.items()}
        body = self._block(statement.body, last=last or ends_function(statement.body))
        self.pending = {d: copy.deepcopy(p) for d, p in saved.items()}
        steps, leaves = list(self.steps), list(self.leaves)
        orelse = self._block(statement.orelse, last=last) if statement.orelse or (last and saved) else []
        if statement is self.known:
            self.steps, self.leaves = steps, leaves  # of what is done now
        if not last:
            self.pending = saved
            for name in names_written(statement):
                self._forget(name)
        return [*forced, ast.If(test, body, orelse)]

    def _outlasts(self, statement: ast.If, definition: Definition) -> bool:
        """Whether what waits may wait while a condition runs that others follow."""
        if any(self._reads(inner, definition) for inner in (*statement.body, *statement.orelse)):
            return False
        if ends_function(statement.body) and not statement.orelse:
            return True  # what leaves the function needs nothing of it
        names = self.pending[definition].names & names_written(statement)
        return not names and not any(self._has_effects(inner) for inner in (*statement.body, *statement.orelse))

    def _simple(self, statement: ast.stmt, rest: list[ast.stmt]) -> list[ast.stmt]:
        original = set(self.pending)
        effects = self._has_effects(statement)
        # What is used on some ways through the statement only is computed on all.
        conditional = [inner for inner in ast.walk(statement) if isinstance(inner, CONDITIONAL)]
        early = self._force([d for d in self.pending if any(self._reads(inner, d) for inner in conditional)])
        self.before = []
        new = [] if self._hoist(statement) else self._rewritten(statement, rest)
        before, self.before = self.before, []
        written = names_written(statement)
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
            self.pending[definition] = Pending(temporary, {target.id}, "", tuple(self._sources(value)),
                                                waits_for_layers=gate)  # fmt: skip
            return [assign(temporary, end)]
        if isinstance(value, ast.Call) and self._kind(value) == "module" and self._is_taken_apart(definition):
            first, others = self._temporary(), self._temporary()
            self._forget(target.id)
            self.pending[definition] = Pending(first, {target.id}, "", (self._path(value),))
            self.rests[definition] = others
            return [unpack([first, others], self._module_call("split", value))]
        if self._leads_to_norm(definition, rest):
            view = view_of(value)
            total = self._sum(value if view is None else view.value, plain=True)
            if total is not None and view is None:
                return self._waiting_sum(definition, target.id, total)
            if total is not None:
                return self._waiting_view(definition, target.id, total, value)
        if isinstance(value, ast.Call) and self._kind(value) == "norm" and has_one(value):
            total = self._sum(value.args[0], plain=True)
            if total is not None:
                return self._norm_of_sum(value, total, target.id)
        return [ast.Assign([target], self._value(value))]

    def _waiting_sum(self, definition: Definition, name: str, total: Sum) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        first, second = self._kept(total.end, before), self._kept(total.residual, before)
        self._forget(name)
        self.pending[definition] = Pending(first, {name}, second, total.sources, total.first)
        return before

    def _kept(self, node: ast.expr, before: list[ast.stmt]) -> str:
        """The temporary that has the value, which may have to be assigned."""
        if isinstance(node, ast.Name) and node.id.startswith(PREFIX):
            return node.id
        before.append(assign(self._temporary(), node))
        return f"{PREFIX}{self.count}"

    def _waiting_view(self, definition: Definition, name: str, total: Sum, value: ast.expr) -> list[ast.stmt]:
        """A sum of another shape, which waits in this shape."""
        assert isinstance(value, ast.Call)
        before: list[ast.stmt] = []
        parts = [self._kept(total.end, before), self._kept(total.residual, before)]
        old = self.flow.only(value.func.value) if isinstance(value.func.value, ast.Name) else None  # type: ignore[attr-defined]
        if old is not None:
            self.pending[old] = Pending(parts[0], set(), parts[1])  # for its sizes
        shape = [self._value(argument) for argument in value.args]
        if old is not None:
            del self.pending[old]
        new = [self._temporary(), self._temporary()]
        self._forget(name)
        self.pending[definition] = Pending(new[0], {name}, new[1], total.sources, total.first)
        read = [ast.Name(part, ast.Load()) for part in parts]
        return [*before, unpack(new, helper_call("reshaped", *read, *shape))]

    def _norm_of_sum(self, call: ast.Call, total: Sum, target: str, names: Sequence[str] = ()) -> list[ast.stmt]:
        """``target = norm(sum)``, and the sum under these names."""
        self.steps.append(Step("add_norm", self._path(call), total.sources))
        ends = (total.end, total.residual, call.func)
        if names:
            both = unpack([target, names[0]], helper_call("add_norm", *ends, *self._consumers(call)))
            return [both, *[assign(name, ast.Name(names[0], ast.Load())) for name in names[1:]]]
        low = self._low_uses(call)
        if low is not None:
            copied = self._temporary()
            self.low.update(dict.fromkeys(low[0], copied))
            return [unpack([copied, target], helper_call("add_norm_cast", *ends, *low[1]))]
        return [assign(target, helper_call("add_norm", *ends, *self._consumers(call), return_sum=False))]

    def _augmented(self, statement: ast.AugAssign, rest: list[ast.stmt]) -> list[ast.stmt]:
        """``h += residual`` where h is an end, and so a tensor of nobody else's."""
        target = statement.target
        old = self.flow.only(target) if isinstance(target, ast.Name) else None
        pending = self.pending.get(old) if old is not None else None
        if pending is None or pending.residual or not isinstance(statement.op, ast.Add) or not is_pure(statement.value):
            statement.value = self._value(statement.value)
            return [statement]
        assert isinstance(target, ast.Name) and old is not None
        names = [self._temporary(), self._temporary()]
        both = unpack(names, helper_call("in_place", self._take(old), statement.value))
        total = Sum(ast.Name(names[0], ast.Load()), ast.Name(names[1], ast.Load()), pending.sources)
        definition = self.flow.written(target)
        if self._leads_to_norm(definition, rest):
            return [both, *self._waiting_sum(definition, target.id, total)]
        self.steps.append(Step("add", "", total.sources))
        return [both, assign(target.id, helper_call("add", total.end, total.residual))]

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
            self.pending[self.flow.written(first)] = Pending(temporary, {first.id}, "", (self._path(value),))
            names: list[ast.expr] = [ast.Name(temporary, ast.Store()), *target.elts[1:]]
            return [ast.Assign([ast.Tuple(names, ast.Store())], call)]
        if len(target.elts) == 2 and self._is_halved(value) and self._gate_of(target) is not None:
            temporary = self._temporary()
            assert isinstance(value, ast.Call)
            rows = value.func.value if not self._is_function(value, "chunk") else value.args[0]  # type: ignore[attr-defined]
            for element in target.elts:
                self._forget(element.id)  # type: ignore[attr-defined]
                self.pending[self.flow.written(element)] = Pending("", {element.id}, temporary)  # type: ignore[attr-defined]
            return [assign(temporary, self._value(rows))]
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
            return ast.Return(helper_call("whole", self._value(value)))
        end = self._end(first, leaving=True)
        if end is None:
            end = helper_call("Branch", self._value(first))
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

    def _hoist(self, statement: ast.stmt) -> bool:
        """Norm and waiting sum in one, ahead of all else that the statement does; whether that is all that it does."""
        call = first_call(statement)
        if call is None or self._kind(call) != "norm" or not has_one(call):
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
        total = Sum(ast.Name(pending.end, ast.Load()), ast.Name(pending.residual, ast.Load()), pending.sources)
        self.before += self._norm_of_sum(call, total, output, names)
        if direct:
            self._forget(direct)
        else:
            replace(self.flow.parent[call], call, ast.Name(output, ast.Load()))
        return bool(direct)

    def _leads_to_norm(self, definition: Definition, rest: list[ast.stmt]) -> bool:  # noqa: C901 - one case a kind
        """Whether the first thing that happens to a sum, on some path, is that it is normalised."""
        for statement in rest:
            if is_copy(statement):
                continue
            if isinstance(statement, ast.If):
                if self._has_effects(statement.test) or self._reads(statement.test, definition):
                    return False
                if ends_function(statement.body) and not statement.orelse:
                    continue
                if statement is not rest[-1]:
                    return False
                return any(self._leads_to_norm(definition, branch) for branch in (statement.body, statement.orelse))
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                view = view_of(statement.value)
                if view is not None and isinstance(view.value, ast.Name) and self.flow.only(view.value) is definition:
                    made = self.flow.written(statement.targets[0])
                    return self._uses(definition) == 1 and self._leads_to_norm(made, rest[rest.index(statement) + 1 :])
            if is_opaque(statement) or isinstance(statement, (ast.For, ast.While)):
                return False
            call = first_call(statement)
            if call is not None and self._kind(call) == "norm" and has_one(call):
                rows = call.args[0]
                if isinstance(rows, ast.Name) and self.flow.only(rows) is definition:
                    return True
            if self._has_effects(statement) or self._reads(statement, definition):
                return False
        return False

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
                out += [assign(name, helper_call("rejoined", *parts)) for name in sorted(pending.names)]
                continue
            names = sorted(pending.names)
            end = ast.Name(pending.end, ast.Load())
            finished = (
                added(end, ast.Name(pending.residual, ast.Load()), pending.first)
                if pending.residual
                else helper_call("finished", end)
            )
            if pending.residual:
                self.steps.append(Step("add", "", pending.sources))
            out.append(assign(names[0], finished))
            out += [assign(name, ast.Name(names[0], ast.Load())) for name in names[1:]]
        return out

    def _reads(self, node: ast.AST, definition: Definition) -> bool:
        """Whether anything of a value is read here; of a sum that waits, anything but its shape."""
        pending = self.pending.get(definition)
        is_sum = pending is None or bool(pending.residual and pending.end)
        return any(
            isinstance(inner, ast.Name)
            and definition in self.flow.reaching.get(inner, frozenset())
            and not (is_sum and self._is_shape(inner))
            and not (definition in self.rests and from_first(self.flow.parent.get(inner)) is not None)
            for inner in ast.walk(node)
        )

    def _has_effects(self, node: ast.AST) -> bool:
        """Whether this calls anything that may do more than to return something."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and not is_harmless(inner):
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
            is_helper(call) or self._kind(call) == "linear" for call in calls
        )
