"""A forward rewritten: its own statements, with the steps joined that one operator computes.

Models are written in many ways, but the steps between their matrix products are few: a bias, an
activation, a dropout, a sum with the residual stream, a norm. Where such steps follow one another
in the text of a forward, calls of `fusedops.models.parts` replace them, and all else is unchanged.
Only the text is read, with the kinds of the modules that it calls (linear, norm, dropout,
activation, module). `parts` checks at each call what the modules are by then.

A *pending* value is one whose computation is put off until its consumer is known: an *end*
(`Branch`: a product, and the bias, activation and dropout to come), or a *sum* of an end and a
residual. Values stay pending only over statements without side effects::

    y = self.dropout(self.dense(x))       _1 = dropped(linear(self.dense, x), self.dropout)
    x = self.norm(x + y)             ->   x = add_norm(_1, x, self.norm, return_sum=False)

(The names in generated code have the prefix ``_fusedops_``.)
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .conditions import under_conditions
from .ends import Ends, Pending, Step, Sum, aliases
from .flow import Definition, is_copy, is_opaque
from .reading import DROPOUTS, Kinds
from .trees import (
    CONDITIONAL,
    PREFIX,
    assign,
    ends_function,
    first_call,
    first_target,
    from_first,
    helper_call,
    inspects_locals,
    is_harmless,
    is_helper,
    is_pure,
    load,
    names_bound,
    names_captured,
    names_written,
    replace,
    store,
    unpack,
    view_of,
)

__all__ = ["Rewritten", "rewrite"]

_NO_FACTS: Mapping[str, bool] = {}


@dataclass(frozen=True)
class Rewritten:
    """A rewritten forward.

    Attributes:
        tree: its function.
        steps: the steps that were joined.
        leaves: the paths of the linear layers, dropouts and modules whose last steps are left to
            the caller; for a dropout without a module a space and the text of its probability.
    """

    tree: ast.FunctionDef
    steps: tuple[Step, ...]
    leaves: tuple[str, ...]


class _RefusedError(Exception):
    """Raised where the function cannot be rewritten."""


def rewrite(
    function: ast.FunctionDef, kinds: Kinds, *, leaving: bool, facts: Mapping[str, bool] = _NO_FACTS
) -> Rewritten | None:
    """The function with steps joined; None where there are none to join.

    Args:
        function: a method's tree; it is not changed.
        kinds: see `Kinds`.
        leaving: return the first output as a `Branch` with its last steps left to the caller, and
            the others as a tuple, or None where the function returns no tuple.
        facts: the results of conditions on the module's attributes, by the conditions' texts. For
            as long as they hold, the function runs without these conditions; otherwise as it is
            written.
    """
    function = copy.deepcopy(function)
    self_name = function.args.args[0].arg if function.args.args else ""
    function.body, special = under_conditions(function.body, facts, kinds, self_name)
    try:
        return _Statements(function, kinds, leaving, special).result()
    except _RefusedError:
        return None


class _Statements(Ends):
    """Rewrites a function's statements, one after another."""

    def __init__(
        self, function: ast.FunctionDef, kinds: Kinds, leaving: bool, special: ast.If | None
    ) -> None:
        if not function.args.args:
            raise _RefusedError
        super().__init__(function, kinds, leaving)
        self.function = function
        self.special = special
        if not self._is_rewritable():
            raise _RefusedError

    def _is_rewritable(self) -> bool:
        """Whether delayed assignments and new names would go unnoticed."""
        function = self.function
        # The function has been rewritten already, or its names would clash with temporaries.
        if any(name.startswith(PREFIX) for name in self.local):
            return False
        # A nested function may read a variable whose assignment is delayed.
        bound = names_bound(function)
        if self.self_name in bound or bound & names_captured(function):
            return False
        return not inspects_locals(function)

    def result(self) -> Rewritten | None:
        """The rewritten function; None if nothing was joined, or nothing left to the caller."""
        body = self._block(self.function.body, last=True)
        if not self.leaves and (self.leaving or not self.steps):
            return None
        f = self.function
        tree = ast.FunctionDef(name=f.name, args=f.args, body=body, decorator_list=[], returns=None)
        ast.fix_missing_locations(ast.copy_location(tree, f))
        # Without repetitions: a statement may have copies on several paths.
        steps = tuple(dict.fromkeys(self.steps))
        return Rewritten(tree, steps, tuple(dict.fromkeys(self.leaves)))

    # --- blocks ---

    def _block(self, statements: list[ast.stmt], *, last: bool) -> list[ast.stmt]:
        """The statements rewritten. ``last``: nothing runs after them."""
        out: list[ast.stmt] = []
        # Values of the enclosing block may stay pending over this one.
        outer = set() if last else set(self.pending)
        for index, statement in enumerate(statements):
            rest = statements[index + 1 :]
            for new in self._statement(statement, rest, last=last and not rest):
                ast.copy_location(new, statement)
                out.append(ast.fix_missing_locations(new))
        # Code after the block may read those of this one.
        if not last or not ends_function(statements):
            out += self._materialize([d for d in self.pending if d not in outer])
        return out or [ast.Pass()]

    def _statement(
        self, statement: ast.stmt, rest: list[ast.stmt], *, last: bool
    ) -> list[ast.stmt]:
        if is_copy(statement):
            return self._copied(statement)
        if isinstance(statement, ast.If):
            return self._if(statement, last=last)
        if is_opaque(statement):
            return [*self._materialize(list(self.pending)), statement]
        if isinstance(statement, (ast.For, ast.While)):
            # No value may be pending at the beginning of some iterations and not of others.
            finished = self._materialize(list(self.pending))
            statement.body = self._block(statement.body, last=False)
            return [*finished, statement]
        return self._simple(statement, rest)

    def _copied(self, statement: Any) -> list[ast.stmt]:
        """``target = name``: another name for a pending value."""
        target = statement.targets[0].id
        definition = self.flow.only(statement.value)
        self._forget(target)
        if definition in self.pending:
            self.pending[definition].names.add(target)
            return []
        return [statement]

    def _if(self, statement: ast.If, *, last: bool) -> list[ast.stmt]:
        test = statement.test
        finished = self._materialize(self._needed_by_test(test))
        if not last:
            ending = [d for d in self.pending if not self._outlasts(statement, d)]
            finished += self._materialize(ending)
        # Both branches begin with the same pending values, which each may compute, or not.
        saved = copy.copy(self.pending)
        self.pending = _copied_values(saved)
        body = self._block(statement.body, last=last or ends_function(statement.body))
        self.pending = _copied_values(saved)
        steps, leaves = list(self.steps), list(self.leaves)
        orelse: list[ast.stmt] = []
        # Without a branch of its own, the other path still computes what is pending at the end.
        if statement.orelse or (last and saved):
            orelse = self._block(statement.orelse, last=last)
        if statement is self.special:
            # Report the branch that runs as the facts are now.
            self.steps, self.leaves = steps, leaves
        if not last:
            self.pending = saved
            for name in names_written(statement):
                self._forget(name)
        return [*finished, ast.If(test, body, orelse)]

    def _needed_by_test(self, test: ast.expr) -> list[Definition]:
        """The pending values that have to be computed before a condition."""
        if self._has_effects(test):
            return list(self.pending)
        return [d for d in self.pending if self._reads(test, d)]

    def _outlasts(self, statement: ast.If, definition: Definition) -> bool:
        """Whether a value may stay pending over a condition that other statements follow."""
        inner = (*statement.body, *statement.orelse)
        if any(self._reads(node, definition) for node in inner):
            return False
        # A branch that leaves the function without reading the value does not need it.
        if ends_function(statement.body) and not statement.orelse:
            return True
        if self.pending[definition].names & names_written(statement):
            return False
        return not any(map(self._has_effects, inner))

    def _simple(self, statement: ast.stmt, rest: list[ast.stmt]) -> list[ast.stmt]:
        """A statement without statements inside, and the computation of the values it needs."""
        original = set(self.pending)
        has_effects = self._has_effects(statement)
        # A value that only some paths through the statement read is computed on all of them.
        conditional = [node for node in ast.walk(statement) if isinstance(node, CONDITIONAL)]
        read = [d for d in self.pending if any(self._reads(node, d) for node in conditional)]
        early = self._materialize(read)

        self.before = []
        new = [] if self._hoist(statement) else self._rewritten(statement, rest)
        before, self.before = self.before, []

        # Rewriting took the values that it joined from those pending. Others that the statement
        # reads are computed before it, and so are those that must not move after it.
        waiting = [d for d in self.pending if d in original]
        due = [d for d in waiting if self._is_due(statement, d, has_effects)]
        finished = self._materialize(due)
        written = names_written(statement)
        for definition, pending in self.pending.items():
            if definition in original:
                pending.names -= written
        return [*early, *finished, *before, *new]

    def _is_due(self, statement: ast.stmt, definition: Definition, has_effects: bool) -> bool:
        """Whether a value has to be computed before the statement runs."""
        if self._reads(statement, definition):
            return True
        if has_effects and not self._may_cross(statement, definition):
            return True
        return isinstance(statement, ast.Return) and self._is_random(definition)

    def _rewritten(self, statement: ast.stmt, rest: list[ast.stmt]) -> list[ast.stmt]:
        match statement:
            case ast.Return():
                return [self._returned(statement)]
            case ast.Assign(targets=[ast.Name() as name], value=value):
                return self._assigned(name, value, rest)
            case ast.Assign(targets=[target], value=value):
                unpacked = self._unpacked(target, value)
                if unpacked is not None:
                    return unpacked
                statement.value = self._value(value)
            case ast.AugAssign():
                return self._augmented(statement, rest)
            case _:
                for field, child in ast.iter_fields(statement):
                    if isinstance(child, ast.expr):
                        setattr(statement, field, self._value(child))
        return [statement]

    # --- assignments ---

    def _assigned(self, target: ast.Name, value: ast.expr, rest: list[ast.stmt]) -> list[ast.stmt]:
        """``target = value``, which may be put off until what consumes it is known."""
        definition = self.flow.written(target)
        end = self._end(value) if self._use_joins(definition) else None
        if end is not None:
            return self._pending_end_statements(definition, target.id, value, end)
        if self._kind(value) == "module" and self._is_split(definition):
            return self._split_outputs(definition, target.id, value)
        if self._reaches_norm(definition, rest):
            view = view_of(value)
            total = self._sum(value if view is None else view.value, plain=True)
            if total is not None and view is None:
                return self._pending_sum_statements(definition, target.id, total)
            if total is not None:
                return self._pending_view(definition, target.id, total, value)
        if isinstance(value, ast.Call) and self._is_unary_of(value, "norm"):
            total = self._sum(value.args[0], plain=True)
            if total is not None:
                return self._norm_of_sum(value, total, target.id)
        return [ast.Assign([target], self._value(value))]

    def _pending_end_statements(
        self, definition: Definition, name: str, value: ast.expr, end: ast.expr
    ) -> list[ast.stmt]:
        temporary = self._temporary()
        self._forget(name)
        sources = tuple(self._sources(value))
        is_gate = self._kind(value) == "activation" and self._is_gate(value)
        self.pending[definition] = Pending(temporary, {name}, sources=sources, is_gate=is_gate)
        return [assign(temporary, end)]

    def _split_outputs(self, definition: Definition, name: str, value: Any) -> list[ast.stmt]:
        """``outputs = module(...)``, of which the first is pending and the others are not.

        ::

            outputs = self.attention(x)          _1, _2 = split(self.attention, x)
            h = x + outputs[0]              ->   h = add(_1, x)
            weights = outputs[1:]                weights = _2[0:]
        """
        first, others = self._temporary(), self._temporary()
        self._forget(name)
        self.pending[definition] = Pending(first, {name}, sources=(self._path(value),))
        self.rests[definition] = others
        return [unpack([first, others], self._module_call("split", value))]

    def _pending_sum_statements(
        self, definition: Definition, name: str, total: Sum
    ) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        end = self._in_temporary(total.end, before)
        residual = self._in_temporary(total.residual, before)
        self._forget(name)
        self.pending[definition] = Pending(end, {name}, residual, total.sources, total.first)
        return before

    def _pending_view(
        self, definition: Definition, name: str, total: Sum, value: Any
    ) -> list[ast.stmt]:
        """A sum of another shape: both terms are reshaped, and the sum is pending in that shape."""
        before: list[ast.stmt] = []
        parts = [
            self._in_temporary(total.end, before),
            self._in_temporary(total.residual, before),
        ]
        # The arguments may read the sizes of the sum, for which it has to be pending meanwhile.
        old = self.flow.only(value.func.value)
        if old is not None:
            self.pending[old] = Pending(parts[0], set(), parts[1])
        shape = [self._value(argument) for argument in value.args]
        if old is not None:
            del self.pending[old]
        new = [self._temporary(), self._temporary()]
        self._forget(name)
        self.pending[definition] = Pending(new[0], {name}, new[1], total.sources, total.first)
        reshaped = helper_call("reshaped", *map(load, parts), *shape)
        return [*before, unpack(new, reshaped)]

    def _norm_of_sum(
        self, call: ast.Call, total: Sum, target: str, names: Sequence[str] = ()
    ) -> list[ast.stmt]:
        """``target = norm(sum)``, and the sum under these names."""
        self.steps.append(Step("add_norm", self._path(call), total.sources))
        operands = (total.end, total.residual, call.func)
        if names:
            value = helper_call("add_norm", *operands, *self._consumers(call))
            return [unpack([target, names[0]], value), *aliases(names)]
        uses = self._low_uses(call)
        if uses is None:
            value = helper_call("add_norm", *operands, *self._consumers(call), return_sum=False)
            return [assign(target, value)]
        # A post-norm under autocast: modules read the copy, the residual stream the output.
        low, modules = uses
        copied = self._temporary()
        self.low.update(dict.fromkeys(low, copied))
        return [unpack([copied, target], helper_call("add_norm_cast", *operands, *modules))]

    def _augmented(self, statement: ast.AugAssign, rest: list[ast.stmt]) -> list[ast.stmt]:
        """``h += residual`` where h is an end, a tensor that nothing else refers to."""
        target = statement.target
        old, pending = self._pending_of(target)
        is_sum = isinstance(statement.op, ast.Add) and is_pure(statement.value)
        if pending is None or not pending.is_end or not is_sum:
            statement.value = self._value(statement.value)
            return [statement]
        assert isinstance(target, ast.Name)
        names = [self._temporary(), self._temporary()]
        both = unpack(names, helper_call("in_place", self._take(old), statement.value))
        total = Sum(load(names[0]), load(names[1]), pending.sources)
        definition = self.flow.written(target)
        if self._reaches_norm(definition, rest):
            return [both, *self._pending_sum_statements(definition, target.id, total)]
        self.steps.append(Step("add", "", total.sources))
        return [both, assign(target.id, helper_call("add", total.end, total.residual))]

    def _unpacked(self, target: ast.expr, value: ast.expr) -> list[ast.stmt] | None:
        """``a, b = value``, with pending values for the names; None where nothing is pending."""
        if not isinstance(target, ast.Tuple) or not target.elts:
            return None
        elements = [element for element in target.elts if isinstance(element, ast.Name)]
        if len(elements) < len(target.elts) or not isinstance(value, ast.Call):
            return None
        if self._kind(value) == "module" and self._use_joins(self.flow.written(elements[0])):
            return self._unpacked_outputs(elements, value)
        if len(elements) == 2 and self._is_chunked(value) and self._gate_of(target) is not None:
            return self._unpacked_halves(elements, value)
        return None

    def _unpacked_outputs(self, elements: list[ast.Name], value: ast.Call) -> list[ast.stmt]:
        """A module's outputs, of which the first is pending."""
        call = self._module_call("branches", value)
        temporary = self._temporary()
        for element in elements:
            self._forget(element.id)
        first = elements[0]
        pending = Pending(temporary, {first.id}, sources=(self._path(value),))
        self.pending[self.flow.written(first)] = pending
        names: list[ast.expr] = [store(temporary), *elements[1:]]
        return [ast.Assign([ast.Tuple(names, ast.Store())], call)]

    def _unpacked_halves(self, elements: list[ast.Name], value: Any) -> list[ast.stmt]:
        """Two halves of a tensor that a gated activation takes whole, without the chunks."""
        temporary = self._temporary()
        rows = value.args[0] if self._is_function(value, "chunk") else value.func.value
        for element in elements:
            self._forget(element.id)
            self.pending[self.flow.written(element)] = Pending("", {element.id}, temporary)
        return [assign(temporary, self._value(rows))]

    # --- returns ---

    def _returned(self, statement: ast.Return) -> ast.Return:
        """The function's outputs; with ``leaving`` the first one as an end."""
        value = statement.value
        if value is None:
            return ast.Return(None)
        if not self.leaving:
            return ast.Return(self._value(value))
        if isinstance(value, ast.Call) and self._kind(value) == "module":
            self.leaves.append(self._path(value))
            return ast.Return(self._module_call("handed", value))
        if isinstance(value, ast.Tuple) and value.elts:
            first, others = value.elts[0], value.elts[1:]
            is_known = not isinstance(first, ast.Starred)
        else:
            first, others = value, None
            is_known = self._is_one_tensor(value)
        if not is_known:
            return ast.Return(helper_call("whole", self._value(value)))
        return ast.Return(self._end_and_others(first, others))

    def _end_and_others(self, first: ast.expr, others: list[ast.expr] | None) -> ast.Tuple:
        """``(end, (other, ...))``, or ``(end, None)`` where the function returns no tuple."""
        end = self._end(first, leaving=True)
        if end is None:
            end = helper_call("Branch", self._value(first))
        rest: ast.expr = ast.Constant(None)
        if others is not None:
            rest = ast.Tuple([self._value(other) for other in others], ast.Load())
        return ast.Tuple([end, rest], ast.Load())

    def _is_one_tensor(self, value: ast.expr) -> bool:
        """Whether this value is known to be an end, and so no tuple."""
        if isinstance(value, ast.Name):
            return self.flow.only(value) in self.pending
        kind = self._kind(value)
        return kind == "linear" or kind in DROPOUTS

    # --- norms of pending sums ---

    def _hoist(self, statement: ast.stmt) -> bool:
        """Join a norm with a pending sum ahead of the statement, if it calls the norm first.

        Returns whether the norm was all that the statement computed.
        """
        call = first_call(statement)
        if call is None or not self._is_unary_of(call, "norm"):
            return False
        definition, pending = self._pending_of(call.args[0])
        if pending is None or not pending.is_sum:
            return False
        del self.pending[definition]
        # `y = norm(x)` is replaced by the operator; elsewhere the norm is replaced by a temporary.
        direct = ""
        if isinstance(statement, ast.Assign) and statement.value is call:
            target = first_target(statement) if len(statement.targets) == 1 else None
            direct = "" if target is None else target.id
        # The sum itself is needed if the residual stream goes on with it.
        names: list[str] = []
        if self._uses(definition) > 1:
            names = sorted(pending.names - {direct})
        output = direct or self._temporary()
        total = Sum(load(pending.end), load(pending.residual), pending.sources)
        self.before += self._norm_of_sum(call, total, output, names)
        if direct:
            self._forget(direct)
            return True
        replace(self.flow.parent[call], call, load(output))
        return False

    def _reaches_norm(self, definition: Definition, rest: list[ast.stmt]) -> bool:
        """Whether a norm of a sum is its first use, on some path, with no side effects before."""
        for index, statement in enumerate(rest):
            following = rest[index + 1 :]
            if isinstance(statement, ast.If):
                if self._blocks(statement.test, definition):
                    return False
                # An early return: the sum goes on after it.
                if ends_function(statement.body) and not statement.orelse:
                    continue
                return not following and self._branch_reaches_norm(definition, statement)
            viewed = self._view_target(statement, definition)
            if viewed is not None:
                return self._uses(definition) == 1 and self._reaches_norm(viewed, following)
            if is_opaque(statement) or isinstance(statement, (ast.For, ast.While)):
                return False
            if self._begins_with_norm(statement, definition):
                return True
            if not is_copy(statement) and self._blocks(statement, definition):
                return False
        return False

    def _branch_reaches_norm(self, definition: Definition, statement: ast.If) -> bool:
        if self._reaches_norm(definition, statement.body):
            return True
        return self._reaches_norm(definition, statement.orelse)

    def _blocks(self, node: ast.AST, definition: Definition) -> bool:
        """Whether a value cannot stay pending over the code."""
        return self._has_effects(node) or self._reads(node, definition)

    def _begins_with_norm(self, statement: ast.stmt, definition: Definition) -> bool:
        """Whether the first call of a statement is a norm of the value."""
        call = first_call(statement)
        if call is None or not self._is_unary_of(call, "norm"):
            return False
        return self.flow.only(call.args[0]) is definition

    def _view_target(self, statement: ast.stmt, definition: Definition) -> Definition | None:
        """The definition of y in ``y = x.reshape(...)``, where x is of the given definition."""
        target = first_target(statement)
        if target is None:
            return None
        view = view_of(statement.value)  # type: ignore[attr-defined]
        if view is None or self.flow.only(view.value) is not definition:
            return None
        return self.flow.written(target)

    # --- when a pending value has to be computed ---

    def _materialize(self, definitions: Iterable[Definition]) -> list[ast.stmt]:
        """The statements that compute pending values, which are pending no longer."""
        out: list[ast.stmt] = []
        for definition in definitions:
            pending = self.pending.pop(definition, None)
            # All names may be those of other values by now.
            if pending is None or not pending.names:
                continue
            # A statement between the halves of a tensor and their gate reads one of them.
            if not pending.end:
                raise _RefusedError
            out += self._finished(definition, pending)
        return out

    def _reads(self, node: ast.AST, definition: Definition) -> bool:
        """Whether the code reads more of a value than what is known while it is pending."""
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Name):
                continue
            if definition not in self.flow.reaching.get(inner, frozenset()):
                continue
            if not self._is_known(inner, definition):
                return True
        return False

    def _is_known(self, use: ast.Name, definition: Definition) -> bool:
        """Whether a use reads the shape of a sum, or split outputs after the first."""
        pending = self.pending.get(definition)
        is_sum = pending is None or pending.is_sum
        if is_sum and self._is_shape(use):
            return True
        return definition in self.rests and from_first(self.flow.parent.get(use)) is not None

    def _has_effects(self, node: ast.AST) -> bool:
        """Whether the code may do more than to compute a value and bind names."""
        if isinstance(node, (ast.AugAssign, ast.Delete)):
            return True
        return any(map(_is_effect, ast.walk(node)))

    def _is_random(self, definition: Definition) -> bool:
        """Whether random numbers may be drawn for a pending value.

        They have to be drawn even if nothing needs the value, for the generator's state.
        """
        return any(self.kinds(path) != "linear" for path in self.pending[definition].sources)

    def _may_cross(self, statement: ast.stmt, definition: Definition) -> bool:
        """Whether a gate may be computed after the statement, which calls linear layers only."""
        # `g = act(gate(x)); u = up(x); y = g * u`
        if not self.pending[definition].is_gate:
            return False
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        return all(is_helper(call) or self._kind(call) == "linear" for call in calls)


def _is_effect(node: ast.AST) -> bool:
    """Whether a node by itself may have side effects."""
    if isinstance(node, ast.Call):
        return not is_harmless(node)
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))


def _copied_values(pending: Mapping[Definition, Pending]) -> dict[Definition, Pending]:
    return {definition: copy.deepcopy(value) for definition, value in pending.items()}
