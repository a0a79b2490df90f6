"""Expressions rewritten: ends and sums, joined with the operators that consume them.

`Expressions._value` rewrites an expression whose finished value is needed. Where the value may stay
unfinished, `_end` or `_sum` is tried first; each returns None if there are no steps to join.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from .flow import Definition
from .reading import DROPOUTS, ROWS, Kinds, Reader
from .trees import (
    PREFIX,
    SCOPES,
    SHAPE,
    added,
    assign,
    first_argument,
    helper,
    helper_call,
    index_after_first,
    is_first,
    is_helper,
    is_pure,
    is_term,
    is_unary,
    load,
    shifted,
    unpack,
)

__all__ = ["Expressions", "Pending", "Step", "Sum", "aliases"]


@dataclass(frozen=True)
class Step:
    """Steps that one operator computes together: "add_norm", "add", "activate" or "gate".

    Attributes:
        kind: which of these.
        path: the path of the norm, or of the activation; "" for an activation that is a function.
        sources: paths of the linear layers, dropouts and modules whose last steps are joined with
            it, as `Rewritten.leaves`.
    """

    kind: str
    path: str
    sources: tuple[str, ...]


@dataclass
class Pending:
    """A value that is not computed yet.

    Its kind shows in the temporaries that it has::

        kind                                      end     residual
        an end                                    "_1"    ""
        a sum                                     "_1"    "_2"
        one half of a tensor, for a gate that
          takes the whole tensor                  ""      "_2", the whole tensor
        none: the value is not pending            ""      ""

    Attributes:
        end: a temporary, or "".
        names: the names that the source gives the value.
        residual: a temporary, or "".
        sources: as of a `Step`.
        first: whether the end stands before the residual in the source of a sum.
        is_gate: whether this is a gate, which stays pending while the other layer is called.
    """

    end: str
    names: set[str]
    residual: str = ""
    sources: tuple[str, ...] = ()
    first: bool = False
    is_gate: bool = False

    @property
    def is_end(self) -> bool:
        """Whether this is an end."""
        return self.end != "" and self.residual == ""

    @property
    def is_sum(self) -> bool:
        """Whether this is a sum."""
        return self.end != "" and self.residual != ""

    @property
    def whole(self) -> str:
        """For a half of a tensor, the temporary of the whole tensor; "" for ends and sums."""
        return "" if self.end else self.residual


@dataclass(frozen=True)
class Sum:
    """A sum of an end and a residual, as expressions."""

    end: ast.expr
    residual: ast.expr
    sources: tuple[str, ...]
    first: bool = False


class Expressions(Reader):
    """Rewrites a function's expressions, and holds the values pending between its statements.

    Attributes:
        pending: the values that are not computed yet, by their definitions.
        taken: the values that an operator computes with its own steps. Their names are not bound.
        before: statements to run before the one that is being rewritten.
        low: for uses that read a low-precision copy of their value, the temporary of the copy.
        cast: for calls of a linear layer that was cast with another one, the temporary of the cast.
        other_outputs: for module outputs that were split, the temporary of all but the first.
        steps: the steps that were joined.
        leaves: the sources of what is left to the caller.
        count: the number of temporaries.
    """

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool) -> None:
        super().__init__(function, kinds, leaving)
        self.pending: dict[Definition, Pending] = {}
        self.taken: dict[Definition, Pending] = {}
        self.before: list[ast.stmt] = []
        self.low: dict[ast.Name, str] = {}
        self.cast: dict[ast.Call, str] = {}
        self.other_outputs: dict[Definition, str] = {}
        self.steps: list[Step] = []
        self.leaves: list[str] = []
        self.count = 0

    # --- values ---

    def _value(self, node: ast.expr) -> ast.expr:
        """The expression rewritten, for a use that needs the finished value."""
        new = self._joined(node) or self._renamed(node)
        if new is not None:
            return new
        # The body of a nested scope runs later, or several times; its names may be its own.
        if not isinstance(node, SCOPES):
            self._rewrite_children(node)
        return node

    def _rewrite_children(self, node: ast.AST) -> None:
        for name, child in ast.iter_fields(node):
            if isinstance(child, ast.expr):
                setattr(node, name, self._value(child))
            elif isinstance(child, list):
                self._rewrite_list(child)

    def _rewrite_list(self, children: list[ast.AST]) -> None:
        for index, child in enumerate(children):
            if isinstance(child, ast.expr):
                children[index] = self._value(child)
            elif isinstance(child, ast.keyword):
                child.value = self._value(child.value)

    def _renamed(self, node: ast.expr) -> ast.expr | None:
        """The replacement of a name, or of an access to a value that is in temporaries."""
        match node:
            case ast.Name():
                if node in self.low:
                    return load(self.low[node])
                return node
            case ast.Subscript(value=ast.Name() as name) if index_after_first(node) is not None:
                others = self.other_outputs.get(self.flow.only(name))
                if others is None:
                    return None
                return shifted(node, others)
            case ast.Attribute(value=ast.Name() as name, attr=attribute) if attribute in SHAPE:
                pending = self._operands_of(name)
                if pending is not None:
                    # The sum's shape without the sum.
                    total = helper_call("like", load(pending.end), load(pending.residual))
                    return ast.Attribute(total, attribute, ast.Load())
        return None

    def _joined(self, node: ast.expr) -> ast.expr | None:
        """One operator for several steps; None where the expression is not replaced."""
        match node:
            case ast.BinOp(op=ast.Mult()):
                return self._gated(node)
            case ast.BinOp(op=ast.Add()):
                return self._added(node)
            case ast.Call():
                return self._joined_call(node)
        return None

    def _added(self, node: ast.BinOp) -> ast.expr | None:
        total = self._sum(node, plain=False)
        if total is None:
            return None
        self.steps.append(Step("add", "", total.sources))
        return added(total.end, total.residual, total.first)

    def _joined_call(self, node: ast.Call) -> ast.expr | None:
        kind = self._kind(node)
        if kind == "norm" and is_unary(node):
            return self._normed(node)
        if kind == "module":
            # The call stays, with its first argument cast.
            self._narrow_rows(node)
        elif kind in ("activation", *DROPOUTS) and self._activates(node):
            end = self._end(node)
            if end is None:
                return None
            return helper_call("finished", end)
        return None

    def _normed(self, node: ast.Call) -> ast.expr | None:
        consumers = self._consumers(node)
        total = self._sum(node.args[0], plain=True)
        if total is not None:
            self.steps.append(Step("add_norm", self._path(node), total.sources))
            arguments = (total.end, total.residual, node.func, *consumers)
            return helper_call("add_norm", *arguments, return_sum=False)
        # Without a sum to join, the norm's output may still be in its consumers' dtype.
        if consumers:
            return helper_call("normed", node.func, self._value(node.args[0]), *consumers)
        return None

    # --- rows of modules ---

    def _narrow_rows(self, call: ast.Call) -> None:
        """Cast the rows of a module once, where they are also the residual stream.

        The helper casts the rows only if the module itself uses them only after such a cast.
        """
        if call.args:
            call.args[0] = self._narrowed(call.args[0], call)

    def _narrowed(self, rows: ast.expr, call: ast.Call) -> ast.expr:
        """The rows of a module's call, cast if they are wide."""
        if not self._is_wide(rows):
            return rows
        return helper_call("narrowed", rows, copy.deepcopy(call.func))

    def _is_wide(self, rows: ast.expr) -> bool:
        """Whether these rows are the residual stream, and without a low-precision copy."""
        if not isinstance(rows, ast.Name):
            return False
        # A low-precision copy needs no cast.
        if rows in self.low:
            return False
        return self._is_residual(rows)

    def _module_call(self, name: str, node: ast.Call) -> ast.expr:
        """A module's call by a helper, its arguments rewritten."""
        self._narrow_rows(node)
        for keyword in node.keywords:
            if keyword.arg in ROWS:
                keyword.value = self._narrowed(keyword.value, node)
        arguments = list(map(self._argument, node.args))
        for keyword in node.keywords:
            keyword.value = self._argument(keyword.value)
        return ast.Call(helper(name), [node.func, *arguments], node.keywords)

    def _argument(self, node: ast.expr) -> ast.expr:
        """An argument rewritten, unless `_narrowed` has replaced it already."""
        is_narrowed = isinstance(node, ast.Call) and is_helper(node)
        if is_narrowed:
            return node
        return self._value(node)

    # --- gates ---

    def _gated(self, node: ast.BinOp) -> ast.expr | None:
        """The product of an activated value and another one as one operator."""
        left, right = node.left, node.right
        for gate, up, name in ((left, right, "gated"), (right, left, "gated_by")):
            end = self._gate(gate)
            if end is None:
                continue
            halves = self._gated_halves(gate, up)
            if halves is not None:
                return halves
            # A gate has no sources: its rows are finished, with their bias.
            self.steps.append(Step("gate", self._activation_path(gate), ()))
            factor = self._value(up)
            # Operands stay in the order in which the source evaluates them.
            operands = (end, factor) if gate is left else (factor, end)
            return helper_call(name, *operands)
        return None

    def _gate(self, node: ast.expr) -> ast.expr | None:
        """An activated value that is left to its multiplication; None for another value."""
        if isinstance(node, ast.Name):
            definition, pending = self._pending_of(node)
            if not pending.is_gate:
                return None
            return load(self._take(definition).end)
        call = self._call(node, "activation")
        if call is None:
            return None
        rows = call.args[0]
        if self._whole_of(rows):
            # Only marks this as a gate: `_gated_halves` replaces the product, gate and all.
            return ast.Constant(None)
        if not self._is_product(rows):
            return None
        return helper_call("postponed_gate", self._value(rows), self._activation(call))

    def _whole_of(self, name: ast.expr) -> str:
        """For a name of a half of a tensor, the temporary of the whole; "" for other names."""
        return self._pending_of(name)[1].whole

    def _gated_halves(self, gate: ast.expr, up: ast.expr) -> ast.expr | None:
        """``activation(a) * b`` for the halves a and b of one tensor, from that tensor."""
        rows = first_argument(gate)
        whole = "" if rows is None else self._whole_of(rows)
        # The halves of two tensors, or a half and another value, have no common tensor.
        if not whole or whole != self._whole_of(up):
            return None
        for half in (rows, up):
            self._take(self.flow.only(half))
        assert isinstance(gate, ast.Call)
        self.steps.append(Step("gate", self._path(gate), ()))
        return helper_call("packed_gated", load(whole), self._activation(gate))

    # --- sums ---

    def _sum(self, node: ast.expr, *, plain: bool) -> Sum | None:
        """The end and the residual of a sum; None for another expression.

        ``plain``: accept a sum of two tensors without steps to join, which gains only in a norm.
        """
        match node:
            case ast.Name():
                return self._pending_sum(node)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                total = self._sum_with_end(right, left, first=False)
                if total is None:
                    total = self._sum_with_end(left, right, first=True)
                if total is None and plain:
                    total = self._plain_sum(left, right)
                return total
        return None

    def _sum_with_end(self, term: ast.expr, residual: ast.expr, *, first: bool) -> Sum | None:
        """The sum of a term with last steps to join, and a residual.

        The residual is a name: a call might draw random numbers, and has to stay in its place.
        """
        if not isinstance(residual, ast.Name):
            return None
        # Read first: `_end` rewrites the term.
        sources = tuple(self._sources(term))
        end = self._end(term)
        if end is None:
            return None
        return Sum(end, self._value(residual), sources, first)

    def _plain_sum(self, left: ast.expr, right: ast.expr) -> Sum | None:
        """The sum of two tensors without steps to join, for a norm."""
        if not isinstance(left, ast.Name) or not is_term(right):
            return None
        # Sums of embeddings broadcast, which the operators do not.
        if not any(map(self._is_computed, (left, right))):
            return None
        return Sum(helper_call("Branch", self._value(right)), self._value(left), ())

    def _pending_sum(self, name: ast.Name) -> Sum | None:
        """The sum that is pending under this name, if only this use needs it."""
        definition, pending = self._pending_of(name)
        if not pending.is_sum:
            return None
        # Uses of its shape do not count: they do not need the sum.
        if self._uses(definition) > 1:
            return None
        self._take(definition)
        return Sum(load(pending.end), load(pending.residual), pending.sources)

    # --- ends ---

    def _end(self, node: ast.expr, *, leaving: bool = False) -> ast.expr | None:
        """The expression as an end; None where it has no last steps that could be joined.

        Args:
            node: the expression.
            leaving: whether the end is left to the caller.
        """
        if isinstance(node, ast.Name):
            return self._pending_end(node, leaving)
        if isinstance(node, ast.Subscript):
            return self._first_output(node)
        if not isinstance(node, ast.Call):
            return None
        # Read first: the node is rewritten.
        sources = self._sources(node)
        ends = {
            "linear": self._linear,
            "module": self._unfinished,
            "activation": self._activated,
            "dropout": self._dropped,
            "functional dropout": self._functional_dropout,
        }
        end_of = ends.get(self._kind(node))
        end = None if end_of is None else end_of(node)
        if leaving and end is not None:
            self.leaves += sources
        return end

    def _pending_end(self, name: ast.Name, leaving: bool) -> ast.expr | None:
        """The end that is pending under this name, if nothing else needs the value."""
        definition, pending = self._pending_of(name)
        if not pending.is_end:
            return None
        # Another use needs the finished value, which is then computed for both.
        if len(definition.uses) > 1:
            return None
        # The name of split outputs has all of them.
        if definition in self.other_outputs:
            return None
        if leaving:
            self.leaves += self._sources(name)
        return load(self._take(definition).end)

    def _first_output(self, node: ast.Subscript) -> ast.expr | None:
        """``module(...)[0]``, or ``outputs[0]`` of split outputs, as an end."""
        if not is_first(node):
            return None
        call = self._call(node.value, "module")
        if call is not None:
            return self._module_call("first", call)
        definition = self.flow.only(node.value)
        is_split = definition in self.pending and definition in self.other_outputs
        if not is_split:
            return None
        return load(self._take(definition).end)

    def _unfinished(self, node: ast.Call) -> ast.expr | None:
        """A module's call that leaves the last steps to this function."""
        return self._module_call("leaving", node)

    def _dropped(self, node: ast.Call) -> ast.expr | None:
        if not is_unary(node):
            return None
        return helper_call("dropped", self._as_end(node.args[0]), node.func)

    def _activated(self, node: ast.Call) -> ast.expr | None:
        rows = node.args[0]
        if self._is_gate(node):
            return helper_call("postponed_gate", self._value(rows), self._activation(node))
        # Read first: `_end` rewrites the rows.
        sources = tuple(self._sources(rows))
        layer = self._end(rows)
        if layer is None:
            return None
        self.steps.append(Step("activate", self._path(node), sources))
        return helper_call("activated", layer, self._activation(node))

    def _as_end(self, node: ast.expr) -> ast.expr:
        """The expression as an end; a finished value is wrapped in one."""
        end = self._end(node)
        if end is None:
            return helper_call("Branch", self._value(node))
        return end

    def _functional_dropout(self, node: ast.Call) -> ast.expr | None:
        names = ("input", "p", "training", "inplace")
        arguments = dict(zip(names, node.args, strict=False))
        for keyword in node.keywords:
            arguments[keyword.arg or "**"] = keyword.value
        # Calls with ``inplace`` or ``**kwargs`` are left to the function.
        if "input" not in arguments or not arguments.keys() <= {"input", "p", "training"}:
            return None
        p = arguments.get("p", ast.Constant(0.5))
        training = arguments.get("training", ast.Constant(True))
        # The helper evaluates them after its rows, the function in the order of the source.
        if not is_pure(p) or not is_pure(training):
            return None
        rows = self._as_end(arguments["input"])
        return helper_call("drop", rows, self._value(p), training=self._value(training))

    def _linear(self, node: ast.Call) -> ast.expr | None:
        if not is_unary(node):
            return None
        rows = node.args[0]
        second = self._second_layer(node)
        layer: ast.expr
        if node in self.cast:
            layer = load(self.cast[node])
        elif second is not None and self._may_cast_together(node, second):
            layer = self._cast_together(node, second, rows)
        else:
            layer = node.func
        return helper_call("linear", layer, self._value(rows))

    def _may_cast_together(self, first: ast.Call, second: ast.Call) -> bool:
        """Whether two layers may be cast ahead of the statement that calls the first.

        The rows are read there, too, so they have to be a name, not a call. If the second layer
        were called on some paths only, it would be cast for nothing on the others.
        """
        if not isinstance(first.args[0], ast.Name):
            return False
        return self._in_one_block(first, second)

    def _cast_together(self, first: ast.Call, second: ast.Call, rows: ast.expr) -> ast.expr:
        """Cast two layers in one pass, ahead of the statement; return the first one's cast.

        ::

            _fusedops_1, _fusedops_2 = _fusedops_cast_together(self, x, self.fc1, self.fc2)
        """
        names = [self._temporary(), self._temporary()]
        # The rows are read twice, here and in the statement. A node has one parent, so it is
        # copied. Not if it is a key of `low`: a copy would not match the key, and `_value` returns
        # a new node for it anyway.
        source = rows if rows in self.low else copy.copy(rows)
        arguments = (
            load(self.self_name),
            self._value(source),
            first.func,
            copy.deepcopy(second.func),
        )
        self.before.append(unpack(names, helper_call("cast_together", *arguments)))
        # The call of the second layer comes later in the source. It reads its cast then.
        self.cast[second] = names[1]
        return load(names[0])

    def _activation(self, node: ast.Call) -> ast.expr:
        """The activation as a function of its rows alone: the one that is called, or a helper."""
        name = self._gelu(node)
        return helper(name) if name else node.func

    # --- pending values ---

    def _pending_of(self, name: ast.expr) -> tuple[Definition, Pending]:
        """A name's definition, and its pending value, or one that is neither end nor sum."""
        definition = self.flow.only(name)
        return definition, self.pending.get(definition, Pending("", set()))

    def _temporary(self) -> str:
        self.count += 1
        return f"{PREFIX}{self.count}"

    def _operands_of(self, name: ast.Name) -> Pending | None:
        """The operands of a sum that is pending, or was taken; None for a bound name."""
        definition = self.flow.only(name)
        total = self.pending.get(definition) or self.taken.get(definition)
        if total is None or not total.is_sum:
            return None
        return total

    def _take(self, definition: Definition) -> Pending:
        """A pending value, for the operator that computes it with its own steps."""
        pending = self.pending.pop(definition)
        self.taken[definition] = pending
        return pending

    def _forget(self, name: str) -> None:
        """Record that a name is assigned again, and no longer that of a pending value."""
        for pending in self.pending.values():
            pending.names.discard(name)

    def _in_temporary(self, node: ast.expr, before: list[ast.stmt]) -> str:
        """The temporary that holds the value; ``before`` may get a statement that assigns it."""
        # It is a temporary already.
        if isinstance(node, ast.Name) and node.id.startswith(PREFIX):
            return node.id
        # Evaluated now, as in the source. Only its use is put off.
        name = self._temporary()
        before.append(assign(name, node))
        return name

    def _finished(self, definition: Definition, pending: Pending) -> list[ast.stmt]:
        """The statements that compute a pending value, under all of its names."""
        # Sorted: the generated source may not depend on the order of a set.
        names = sorted(pending.names)
        if definition in self.other_outputs:
            parts = [load(pending.end), load(self.other_outputs[definition])]
            return [assign(name, helper_call("rejoined", *parts)) for name in names]
        value = helper_call("finished", load(pending.end))
        if pending.is_sum:
            value = added(load(pending.end), load(pending.residual), pending.first)
            self.steps.append(Step("add", "", pending.sources))
        return [assign(names[0], value), *aliases(names)]


def aliases(names: Sequence[str]) -> list[ast.stmt]:
    """Statements that give the value of the first name to the others."""
    return [assign(name, load(names[0])) for name in names[1:]]
