"""Rewrites a forward's statements, and joins the steps that one operator computes.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .conditions import under_conditions
from .expressions import Expressions, Pending, Step, Sum, aliases
from .flow import Definition, is_copy, is_opaque
from .reading import DROPOUTS, Kinds
from .trees import (
    CONDITIONAL,
    PREFIX,
    assign,
    ends_function,
    first_call,
    helper_call,
    index_after_first,
    inspects_locals,
    is_harmless,
    is_helper,
    is_pure,
    load,
    names_bound,
    names_captured,
    names_written,
    nodes,
    only_target,
    replace,
    self_name_of,
    store,
    together,
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
            the caller. A functional dropout has no path: a space and the text of its probability
            stand for it.
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
    self_name = self_name_of(function)
    function.body, special = under_conditions(function.body, facts, kinds, self_name)
    try:
        return _Statements(function, kinds, leaving, special).result()
    except _RefusedError:
        return None


class _Statements(Expressions):
    """Rewrites a function's statements, one after another."""

    def __init__(
        self, function: ast.FunctionDef, kinds: Kinds, leaving: bool, special: ast.If | None
    ) -> None:
        if not self_name_of(function):
            raise _RefusedError
        super().__init__(function, kinds, leaving)
        self.function = function
        self.special = special
        if not self._is_rewritable():
            raise _RefusedError

    def _is_rewritable(self) -> bool:
        """Whether delayed assignments and new names would go unnoticed."""
        # The function has been rewritten already, or its names would clash with temporaries.
        if any(name.startswith(PREFIX) for name in self.local):
            return False
        bound = names_bound(self.function)
        # Another ``self`` would have other modules at the same paths.
        if self.self_name in bound:
            return False
        # A nested function may read a variable whose assignment is delayed.
        if bound & names_captured(self.function):
            return False
        return not inspects_locals(self.function)

    def result(self) -> Rewritten | None:
        """The rewritten function; None if nothing was joined, or nothing left to the caller."""
        body = self._block(self.function.body, last=True)
        # With ``leaving``, a forward is of use to a block only if it leaves something. Without, it
        # is unchanged if no steps were joined.
        is_useful = self.leaves if self.leaving else self.steps
        if not is_useful:
            return None
        # Decorators and annotations are those of the original: `structure` puts them back.
        name, args = self.function.name, self.function.args
        tree = ast.FunctionDef(name=name, args=args, body=body, decorator_list=[], returns=None)
        ast.fix_missing_locations(ast.copy_location(tree, self.function))
        # Without repetitions: a statement may have copies on several paths.
        steps = tuple(dict.fromkeys(self.steps))
        return Rewritten(tree, steps, tuple(dict.fromkeys(self.leaves)))

    # --- blocks ---

    def _block(self, statements: list[ast.stmt], *, last: bool) -> list[ast.stmt]:
        """The statements rewritten, and the computation of what may not be pending after them.

        ``last``: nothing runs after them.
        """
        # Values of the enclosing block may stay pending over this one. At the function's end none
        # may: their random numbers have to be drawn.
        outer = [] if last else list(self.pending)
        out = self._rewrite_each(statements, last=last)
        # A last block that ends in a return needs nothing more: the return computed its values.
        if not last or not ends_function(statements):
            out += self._materialize_if(lambda definition: definition not in outer)
        # A block may not be empty.
        return out or [ast.Pass()]

    def _rewrite_each(self, statements: list[ast.stmt], *, last: bool) -> list[ast.stmt]:
        """The statements rewritten, one after another."""
        out: list[ast.stmt] = []
        for index, statement in enumerate(statements):
            rest = statements[index + 1 :]
            is_last = last and not rest
            for new in self._statement(statement, rest, last=is_last):
                # Tracebacks show the line in the source.
                ast.copy_location(new, statement)
                out.append(ast.fix_missing_locations(new))
        return out

    def _statement(
        self, statement: ast.stmt, rest: list[ast.stmt], *, last: bool
    ) -> list[ast.stmt]:
        # A second name for a pending value does not need the value computed.
        if is_copy(statement):
            return self._copied(statement)
        if isinstance(statement, ast.If):
            return self._if(statement, last=last)
        if is_opaque(statement):
            return [*self._materialize_all(), statement]
        if isinstance(statement, (ast.For, ast.While)):
            # No value may be pending at the beginning of some iterations and not of others.
            finished = self._materialize_all()
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
        # An operator computes the value with its own steps, so no variable holds it. Such a value
        # has no other uses, so nothing reads the copy: drop it.
        if definition in self.taken:
            return []
        return [statement]

    def _if(self, statement: ast.If, *, last: bool) -> list[ast.stmt]:
        """A condition, whose branches may compute what is pending before it; see `_outlasts`.

        ::

            y = drop(fc(x))                   _1 = dropped(linear(fc, x), drop)
            if c: return norm(x + y)     ->   if c: return add_norm(_1, x, norm, return_sum=False)
            else: return x                    else: y = finished(_1); return x

        (The second branch computes y, which it does not need, for the random numbers that y draws.)
        """
        finished = self._finished_before(statement, last=last)
        # Both branches begin with copies of these pending values.
        saved = self.pending
        # A branch that returns computes only those that it needs.
        body_is_last = last or ends_function(statement.body)
        body = self._branch(statement.body, saved, last=body_is_last)
        steps, leaves = list(self.steps), list(self.leaves)
        orelse: list[ast.stmt] = []
        # Even an empty branch has to compute what is pending at the function's end.
        if statement.orelse or (last and saved):
            orelse = self._branch(statement.orelse, saved, last=last)
        if statement is self.special:
            # Report only the steps of the body: it runs as long as the facts hold.
            self.steps, self.leaves = steps, leaves
        if not last:
            # A branch that goes on has computed none of these, see `_outlasts`.
            self.pending = saved
            for name in names_written(statement):
                self._forget(name)
        return [*finished, ast.If(statement.test, body, orelse)]

    def _branch(
        self, statements: list[ast.stmt], pending: Mapping[Definition, Pending], *, last: bool
    ) -> list[ast.stmt]:
        """The statements of a branch, which begins with copies of these pending values."""
        self.pending = {definition: copy.deepcopy(value) for definition, value in pending.items()}
        return self._block(statements, last=last)

    def _finished_before(self, statement: ast.If, *, last: bool) -> list[ast.stmt]:
        """The computation of the values that cannot stay pending over a condition."""
        finished = self._materialize_if(lambda value: self._blocks(statement.test, value))
        # Where nothing follows, each branch computes what it needs.
        if not last:
            finished += self._materialize_if(lambda value: not self._outlasts(statement, value))
        return finished

    def _outlasts(self, statement: ast.If, definition: Definition) -> bool:
        """Whether a value may stay pending over a condition that other statements follow."""
        inner = (*statement.body, *statement.orelse)
        if self._reads(together(inner), definition):
            return False
        # A branch that leaves the function without reading the value does not need it.
        if _is_early_return(statement):
            return True
        # Its name would be that of another value on one of the paths.
        if self.pending[definition].names & names_written(statement):
            return False
        return not any(map(self._has_effects, inner))

    def _simple(self, statement: ast.stmt, rest: list[ast.stmt]) -> list[ast.stmt]:
        """A statement without statements inside, and the computation of the values it needs.

        In this order: values that it reads on some paths, others that it reads, what joined
        operators need of their own (casts, a norm), and the statement.
        """
        original = set(self.pending)
        has_effects = self._has_effects(statement)
        # Some paths through the statement may not read a value, or read it repeatedly. It is
        # computed before the statement: once, on all paths.
        conditional = together(nodes(statement, CONDITIONAL))
        early = self._materialize_if(lambda value: self._reads(conditional, value))

        self.before = []
        new = [] if self._hoist(statement) else self._rewritten(statement, rest)
        before, self.before = self.before, []

        # The values that were joined are no longer in `pending`. Others that the statement reads
        # are computed before it, and so are those that must not move after it.
        def is_due(value: Definition) -> bool:
            return value in original and self._is_due(statement, value, has_effects)

        # `pending` has the order of the source, so random numbers are drawn in that order.
        finished = self._materialize_if(is_due)
        written = names_written(statement)
        for definition in original & self.pending.keys():
            self.pending[definition].names -= written
        return [*early, *finished, *before, *new]

    def _is_due(self, statement: ast.stmt, definition: Definition, has_effects: bool) -> bool:
        """Whether a value has to be computed before the statement runs."""
        if self._reads(statement, definition):
            return True
        if has_effects and not self._may_cross(statement, definition):
            return True
        # Nothing reads a value that is still pending at the return, but random numbers are drawn.
        if not isinstance(statement, ast.Return):
            return False
        return self._is_random(definition)

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
                self._rewrite_fields(statement)
        return [statement]

    def _rewrite_fields(self, statement: ast.stmt) -> None:
        for field, child in ast.iter_fields(statement):
            if isinstance(child, ast.expr):
                setattr(statement, field, self._value(child))

    # --- assignments ---

    def _assigned(self, target: ast.Name, value: ast.expr, rest: list[ast.stmt]) -> list[ast.stmt]:
        """``target = value``, which may be put off until what consumes it is known."""
        definition = self.flow.written(target)
        if self._use_joins(definition):
            end = self._end(value)
            if end is not None:
                return self._pending_end_statements(definition, target.id, value, end)
        if self._kind(value) == "module" and self._is_split(definition):
            return self._split_outputs(definition, target.id, value)
        if self._reaches_norm(definition, rest):
            pending = self._pending_sum_of(definition, target.id, value)
            if pending is not None:
                return pending
        if self._is_unary_of(value, "norm"):
            return self._assigned_norm(target, value)
        return [ast.Assign([target], self._value(value))]

    def _pending_sum_of(
        self, definition: Definition, name: str, value: ast.expr
    ) -> list[ast.stmt] | None:
        """``name = a + b``, or a view of that, with the sum pending; None for other values."""
        view = view_of(value)
        total = self._sum(value if view is None else view.value, plain=True)
        if total is None:
            return None
        if view is None:
            return self._pending_sum_statements(definition, name, total)
        return self._pending_view(definition, name, total, value)

    def _assigned_norm(self, target: ast.Name, value: Any) -> list[ast.stmt]:
        """``target = norm(...)``, joined with the sum that it takes, if that is one."""
        total = self._sum(value.args[0], plain=True)
        if total is None:
            return [ast.Assign([target], self._value(value))]
        return self._norm_of_sum(value, total, target.id)

    def _pending_end_statements(
        self, definition: Definition, name: str, value: ast.expr, end: ast.expr
    ) -> list[ast.stmt]:
        # The product is computed here, in its place; only the steps behind it are put off.
        temporary = self._temporary()
        self._forget(name)
        sources = tuple(self._sources(value))
        is_gate = self._kind(value) == "activation" and self._is_gate(value)
        self.pending[definition] = Pending(temporary, {name}, sources=sources, is_gate=is_gate)
        return [assign(temporary, end)]

    def _split_outputs(self, definition: Definition, name: str, value: Any) -> list[ast.stmt]:
        """``outputs = module(...)``: the first output stays pending, the others are computed.

        ::

            outputs = self.attention(x)          _1, _2 = split(self.attention, x)
            h = x + outputs[0]              ->   h = add(_1, x)
            weights = outputs[1:]                weights = _2[0:]
        """
        first, others = self._temporary(), self._temporary()
        self._forget(name)
        self.pending[definition] = Pending(first, {name}, sources=(self._path(value),))
        self.other_outputs[definition] = others
        return [unpack([first, others], self._module_call("split", value))]

    def _pending_sum_statements(
        self, definition: Definition, name: str, total: Sum
    ) -> list[ast.stmt]:
        # The terms are evaluated here, in their place; only the sum is put off.
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
        # The arguments may read the sum's sizes. The sum is pending while they are rewritten, so
        # they read its operands' sizes instead.
        old = self.flow.only(value.func.value)
        self.pending[old] = Pending(parts[0], set(), parts[1])
        shape = list(map(self._value, value.args))
        self._take(old)
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
        # The residual stream goes on with the sum: the operator returns both.
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
        if not pending.is_end or not is_sum:
            statement.value = self._value(statement.value)
            return [statement]
        assert isinstance(target, ast.Name)
        names = [self._temporary(), self._temporary()]
        end, residual = load(self._take(old).end), self._value(statement.value)
        unpacked = unpack(names, helper_call("in_place", end, residual))
        total = Sum(load(names[0]), load(names[1]), pending.sources)
        definition = self.flow.written(target)
        if self._reaches_norm(definition, rest):
            return [unpacked, *self._pending_sum_statements(definition, target.id, total)]
        self.steps.append(Step("add", "", total.sources))
        return [unpacked, assign(target.id, helper_call("add", total.end, total.residual))]

    def _unpacked(self, target: ast.expr, value: ast.expr) -> list[ast.stmt] | None:
        """``a, b = value``, with pending values for the names; None where nothing is pending."""
        names = _unpacked_names(target)
        if not names:
            return None
        call = self._call(value, "module")
        if call is not None and self._use_joins(self.flow.written(names[0])):
            return self._unpacked_outputs(names, call)
        if len(names) == 2 and self._is_chunked(value) and self._are_gated(names):
            return self._unpacked_halves(names, value)
        return None

    def _unpacked_outputs(self, elements: list[ast.Name], value: ast.Call) -> list[ast.stmt]:
        """``a, b = module(...)``: the first output stays pending."""
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
        # Both names stand for the whole. If one of them is read otherwise than in the product,
        # `_materialize` refuses the rewriting.
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
        call = self._call(value, "module")
        if call is not None:
            self.leaves.append(self._path(call))
            return ast.Return(self._module_call("handed", call))
        match value:
            case ast.Tuple(elts=[ast.Starred(), *_]):
                pass
            case ast.Tuple(elts=[first, *others]):
                return ast.Return(self._end_and_others(first, others))
            case _ if self._is_one_tensor(value):
                return ast.Return(self._end_and_others(value, None))
        # The helper finds out at each call whether the value is a tuple.
        return ast.Return(helper_call("whole", self._value(value)))

    def _end_and_others(self, first: ast.expr, others: list[ast.expr] | None) -> ast.Tuple:
        """``(end, (other, ...))``, or ``(end, None)`` where the function returns no tuple."""
        end = self._end(first, leaving=True) or helper_call("Branch", self._value(first))
        # The others are finished: only a first output is left to a caller.
        rest: ast.expr = ast.Constant(None)
        if others is not None:
            rest = ast.Tuple(list(map(self._value, others)), ast.Load())
        return ast.Tuple([end, rest], ast.Load())

    def _is_one_tensor(self, value: ast.expr) -> bool:
        """Whether this value is known to be an end, and so no tuple."""
        if isinstance(value, ast.Name):
            return self.flow.only(value) in self.pending
        return self._kind(value) in ("linear", *DROPOUTS)

    # --- norms of pending sums ---

    def _hoist(self, statement: ast.stmt) -> bool:
        """Join a norm with a pending sum ahead of the statement, if it calls the norm first.

        Returns whether the norm was all that the statement computed.
        """
        call = self._first_norm(statement)
        if call is None:
            return False
        definition, pending = self._pending_of(call.args[0])
        if not pending.is_sum:
            return False
        # Where x is the sum, there are two forms:
        #
        #     y = norm(x)       ->   y, x = add_norm(_1, _2, norm)                  direct: "y"
        #     y = f(norm(x))    ->   _3, x = add_norm(_1, _2, norm); y = f(_3)      direct: ""
        #
        # x is assigned only if something else reads it.
        target = only_target(statement)
        direct = ""
        if target is not None and self.flow.parent[call] is statement:
            direct = target.id
        names: list[str] = []
        if self._uses(definition) > 1:
            # The residual stream goes on with the sum itself.
            del self.pending[definition]
            names = sorted(pending.names - {direct})
        else:
            self._take(definition)
        output = direct or self._temporary()
        total = Sum(load(pending.end), load(pending.residual), pending.sources)
        self.before += self._norm_of_sum(call, total, output, names)
        if direct:
            self._forget(direct)
            return True
        replace(self.flow.parent[call], call, load(output))
        return False

    def _first_norm(self, statement: ast.stmt) -> ast.Call | None:
        """The norm that a statement calls first.

        Nothing with side effects is evaluated before it, so it may be computed ahead.
        """
        call = first_call(statement)
        if call is not None and self._is_unary_of(call, "norm"):
            return call
        return None

    def _reaches_norm(self, definition: Definition, rest: list[ast.stmt]) -> bool:
        """Whether the first use of a sum is a norm, on some path, with no side effects before it.

        Args:
            definition: that of the sum.
            rest: the statements after it, in its block.
        """
        for index, statement in enumerate(rest):
            following = rest[index + 1 :]
            if isinstance(statement, ast.If):
                if self._blocks(statement.test, definition):
                    return False
                # The sum stays pending over it.
                if _is_early_return(statement):
                    continue
                # If statements follow, a sum that a branch reads is computed before the condition:
                # see `_outlasts`.
                if following:
                    return False
                return self._branch_reaches_norm(definition, statement)
            viewed = self._view_target(statement, definition)
            if viewed is not None:
                if self._uses(definition) != 1:
                    return False
                return self._reaches_norm(viewed, following)
            if self._begins_with_norm(statement, definition):
                return True
            if self._ends_pending(statement, definition):
                return False
        return False

    def _ends_pending(self, statement: ast.stmt, definition: Definition) -> bool:
        """Whether a value cannot stay pending over a statement, or could not be joined after it."""
        if is_opaque(statement) or isinstance(statement, (ast.For, ast.While)):
            return True
        if is_copy(statement):
            return False
        return self._blocks(statement, definition)

    def _branch_reaches_norm(self, definition: Definition, statement: ast.If) -> bool:
        if self._reaches_norm(definition, statement.body):
            return True
        return self._reaches_norm(definition, statement.orelse)

    def _blocks(self, node: ast.AST, definition: Definition) -> bool:
        """Whether a value cannot stay pending over the code."""
        if self._has_effects(node):
            return True
        return self._reads(node, definition)

    def _begins_with_norm(self, statement: ast.stmt, definition: Definition) -> bool:
        """Whether the first call of a statement is a norm of the value."""
        call = self._first_norm(statement)
        if call is None:
            return False
        return self.flow.reads_only(call.args[0], definition)

    def _view_target(self, statement: ast.stmt, definition: Definition) -> Definition | None:
        """The definition of y in ``y = x.reshape(...)``, where x reads ``definition``."""
        match statement:
            case ast.Assign(targets=[ast.Name() as target, *_], value=value):
                view = view_of(value)
            case _:
                return None
        if view is None or not self.flow.reads_only(view.value, definition):
            return None
        return self.flow.written(target)

    # --- when a pending value has to be computed ---

    def _materialize(self, definitions: Iterable[Definition]) -> list[ast.stmt]:
        """The statements that compute pending values, which are pending no longer."""
        out: list[ast.stmt] = []
        for definition in definitions:
            pending = self.pending.pop(definition, None)
            # All its names may have been assigned other values by now.
            if pending is None or not pending.names:
                continue
            # A statement between the halves of a tensor and their gate reads one of them.
            if pending.whole:
                raise _RefusedError
            out += self._finished(definition, pending)
        return out

    def _materialize_all(self) -> list[ast.stmt]:
        return self._materialize(list(self.pending))

    def _materialize_if(self, condition: Callable[[Definition], bool]) -> list[ast.stmt]:
        """The statements that compute the pending values for which a condition holds."""
        return self._materialize(list(filter(condition, self.pending)))

    def _reads(self, node: ast.AST, definition: Definition) -> bool:
        """Whether the code reads more of a value than what is known while it is pending."""
        for name in nodes(node, ast.Name):
            if self.flow.may_read(name, definition) and not self._is_known(name, definition):
                return True
        return False

    def _is_known(self, use: ast.Name, definition: Definition) -> bool:
        """Whether a use reads the shape of a sum, or split outputs after the first."""
        # `_reaches_norm` calls this for sums that are not pending yet.
        pending = self.pending.get(definition)
        is_sum = pending is None or pending.is_sum
        if is_sum and self._is_shape(use):
            return True
        if definition not in self.other_outputs:
            return False
        return index_after_first(self.flow.parent.get(use)) is not None

    def _has_effects(self, node: ast.AST) -> bool:
        """Whether the code may do more than to compute a value and bind names."""
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
        # A layer neither reads the gate nor changes it, so the two may trade places.
        calls = nodes(statement, ast.Call)
        if not all(map(self._calls_layer, calls)):
            return False
        # An effect that is no call may change it: `gate += 1`.
        effects = filter(_is_effect, ast.walk(statement))
        return all(isinstance(effect, ast.Call) for effect in effects)

    def _calls_layer(self, call: ast.Call) -> bool:
        if is_helper(call):
            return True
        return self._kind(call) == "linear"


def _unpacked_names(target: ast.expr) -> list[ast.Name]:
    """The names in a tuple of names; none for another target."""
    elements = target.elts if isinstance(target, ast.Tuple) else []
    names = [element for element in elements if isinstance(element, ast.Name)]
    if len(names) == len(elements):
        return names
    return []


def _is_early_return(statement: ast.If) -> bool:
    """Whether this is ``if ...: return ...``, without another branch."""
    if not ends_function(statement.body):
        return False
    return not statement.orelse


# An augmented assignment changes a tensor in place, wherever in a statement it stands.
_EFFECTS = (ast.AugAssign, ast.Delete, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def _is_effect(node: ast.AST) -> bool:
    """Whether a node by itself may have side effects."""
    if isinstance(node, ast.Call):
        return not is_harmless(node)
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, _EFFECTS)
