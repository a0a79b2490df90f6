"""Expressions rewritten: ends and sums, joined with the operators that consume them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from .flow import Definition
from .reading import DROPOUTS, ROWS, Kinds, Reader
from .trees import (
    PREFIX,
    SHAPE,
    added,
    assign,
    from_first,
    helper,
    helper_call,
    is_first,
    is_helper,
    is_pure,
    is_term,
    is_unary,
    load,
    shifted,
    unpack,
)

__all__ = ["Ends", "Pending", "Step", "Sum", "aliases"]

# Expressions with a scope of their own, in which nothing is rewritten.
_NESTED = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Step:
    """Steps that one operator computes together: "add_norm", "add", "activate" or "gate".

    Attributes:
        kind: which of these.
        path: of the norm, or of the activation; "" for an activation that is a function.
        sources: paths of the linear layers, dropouts and modules whose last steps are joined with
            it, as `Rewritten.leaves`.
    """

    kind: str
    path: str
    sources: tuple[str, ...]


@dataclass
class Pending:
    """A value that is not computed yet.

    It is an end (the temporary ``end``), a sum (``end`` and ``residual``), or one half of a tensor
    that a gated activation takes whole (``residual`` alone).

    Attributes:
        end: the temporary of the end; "" for a half.
        names: the names that the source gives the value.
        residual: the temporary of the residual, or of the whole tensor; "" for an end.
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
        return not self.residual

    @property
    def is_sum(self) -> bool:
        """Whether this is a sum."""
        return self.residual != "" and self.end != ""


@dataclass(frozen=True)
class Sum:
    """A sum of an end and a residual, as expressions."""

    end: ast.expr
    residual: ast.expr
    sources: tuple[str, ...]
    first: bool = False


class Ends(Reader):
    """Rewrites a function's expressions, and holds the values pending between its statements.

    Attributes:
        pending: the values that are not computed yet, by their definitions.
        before: statements to run before the one that is being rewritten.
        low: uses that read a low-precision copy, and its temporary.
        cast: linear layers that are cast with another, and the temporaries of the casts.
        rests: of a module's outputs that were split, the temporary of all but the first.
        steps: the steps that were joined.
        leaves: the sources of what is left to the caller.
        count: the number of temporaries.
    """

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool) -> None:
        super().__init__(function, kinds, leaving)
        self.pending: dict[Definition, Pending] = {}
        self.before: list[ast.stmt] = []
        self.low: dict[ast.Name, str] = {}
        self.cast: dict[ast.Call, str] = {}
        self.rests: dict[Definition, str] = {}
        self.steps: list[Step] = []
        self.leaves: list[str] = []
        self.count = 0

    # --- values ---

    def _value(self, node: ast.expr) -> ast.expr:
        """The expression rewritten, for a use that needs the finished value."""
        new = self._joined(node)
        if new is None:
            new = self._renamed(node)
        if new is not None:
            return new
        if isinstance(node, _NESTED):
            return node
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
                return load(self.low[node]) if node in self.low else node
            case ast.Subscript(value=ast.Name() as name) if from_first(node) is not None:
                definition = self.flow.only(name)
                if definition is not None and definition in self.rests:
                    return shifted(node, self.rests[definition])
            case ast.Attribute(value=ast.Name() as name, attr=attribute) if attribute in SHAPE:
                _, pending = self._pending_of(name)
                if pending is not None and pending.is_sum:
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
                total = self._sum(node, plain=False)
                if total is None:
                    return None
                self.steps.append(Step("add", "", total.sources))
                return added(total.end, total.residual, total.first)
            case ast.Call():
                return self._joined_call(node)
        return None

    def _joined_call(self, node: ast.Call) -> ast.expr | None:
        kind = self._kind(node)
        if kind == "norm" and is_unary(node):
            return self._normed(node)
        if kind == "module" and node.args:
            self._narrow_rows(node)
            return None
        if (kind == "activation" or kind in DROPOUTS) and self._activates(node):
            end = self._end(node)
            return None if end is None else helper_call("finished", end)
        return None

    def _normed(self, node: ast.Call) -> ast.expr | None:
        consumers = self._consumers(node)
        total = self._sum(node.args[0], plain=True)
        if total is not None:
            self.steps.append(Step("add_norm", self._path(node), total.sources))
            arguments = (total.end, total.residual, node.func, *consumers)
            return helper_call("add_norm", *arguments, return_sum=False)
        if consumers:
            return helper_call("normed", node.func, self._value(node.args[0]), *consumers)
        return None

    # --- rows of modules ---

    def _narrow_rows(self, call: ast.Call) -> None:
        """Cast the rows of a module once, where they are the residual stream, too.

        The helper casts if the module does nothing else with its rows than to cast them.
        """
        rows = call.args[0]
        if self._is_wide(rows):
            call.args[0] = helper_call("narrowed", rows, copy.deepcopy(call.func))

    def _is_wide(self, rows: ast.expr) -> bool:
        """Whether these rows are the residual stream, and without a low-precision copy."""
        return isinstance(rows, ast.Name) and rows not in self.low and self._is_residual(rows)

    def _module_call(self, name: str, node: ast.Call) -> ast.expr:
        """A module's call by a helper, its arguments rewritten."""
        if node.args:
            self._narrow_rows(node)
        arguments = []
        for argument in node.args:
            is_narrowed = isinstance(argument, ast.Call) and is_helper(argument)
            arguments.append(argument if is_narrowed else self._value(argument))
        node.args = arguments
        for keyword in node.keywords:
            rows = keyword.value
            if keyword.arg in ROWS and self._is_wide(rows):
                keyword.value = helper_call("narrowed", rows, copy.deepcopy(node.func))
            else:
                keyword.value = self._value(rows)
        return ast.Call(helper(name), [node.func, *node.args], node.keywords)

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
            self.steps.append(Step("gate", self._activation_path(gate), ()))
            other = self._value(up)
            # Operands stay in the order in which the source evaluates them.
            operands = (end, other) if gate is left else (other, end)
            return helper_call(name, *operands)
        return None

    def _gate(self, node: ast.expr) -> ast.expr | None:
        """An activated value that is left to its multiplication."""
        if isinstance(node, ast.Name):
            definition, pending = self._pending_of(node)
            is_gate = pending is not None and pending.is_end and pending.is_gate
            return self._take(definition) if is_gate else None
        if not isinstance(node, ast.Call) or self._kind(node) != "activation":
            return None
        if len(node.args) != 1:
            return None
        rows = node.args[0]
        if isinstance(rows, ast.Name) and self._whole_of(rows) is not None:
            # `_gated_halves` replaces the product: this only marks a gate.
            return ast.Constant(None)
        if not self._is_product(rows):
            return None
        return helper_call("waiting", self._value(rows), self._activation(node))

    def _whole_of(self, name: ast.Name) -> str | None:
        """The temporary of the tensor of which this is a half."""
        _, pending = self._pending_of(name)
        if pending is None or pending.end:
            return None
        return pending.residual

    def _gated_halves(self, gate: ast.expr, up: ast.expr) -> ast.expr | None:
        """``activation(a) * b`` for the halves a and b of one tensor, from that tensor."""
        match gate, up:
            case ast.Call(args=[ast.Name() as first, *_]), ast.Name() as second:
                pass
            case _:
                return None
        whole = self._whole_of(first)
        if whole is None or whole != self._whole_of(second):
            return None
        for half in (first, second):
            definition, _ = self._pending_of(half)
            del self.pending[definition]
        self.steps.append(Step("gate", self._path(gate), ()))
        return helper_call("packed_gated", load(whole), self._activation(gate))

    # --- sums ---

    def _sum(self, node: ast.expr, *, plain: bool) -> Sum | None:
        """The end and the residual of a sum. ``plain``: accept a sum of two tensors, too."""
        match node:
            case ast.Name():
                return self._pending_sum(node)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                pass
            case _:
                return None
        for term, other in ((right, left), (left, right)):
            if isinstance(other, ast.Name):
                # Read first: `_end` rewrites the term.
                sources = tuple(self._sources(term))
                end = self._end(term)
                if end is not None:
                    return Sum(end, self._value(other), sources, term is left)
        if not plain or not isinstance(left, ast.Name) or not is_term(right):
            return None
        if not any(map(self._is_computed, (left, right))):
            return None
        return Sum(helper_call("Branch", self._value(right)), self._value(left), ())

    def _pending_sum(self, name: ast.Name) -> Sum | None:
        """The sum that is pending by this name, if only this use needs it."""
        definition, pending = self._pending_of(name)
        # Its shape is known without the sum: uses of it do not count.
        if pending is None or not pending.is_sum or self._uses(definition) > 1:
            return None
        del self.pending[definition]
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
        # Before the node is rewritten.
        if leaving:
            self.leaves += self._sources(node)
        ends = {
            "linear": self._linear,
            "module": self._unfinished,
            "activation": self._activated,
            "dropout": self._dropped,
            "functional dropout": self._functional_dropout,
        }
        end_of = ends.get(self._kind(node))
        return None if end_of is None else end_of(node)

    def _pending_end(self, name: ast.Name, leaving: bool) -> ast.expr | None:
        """The end that is pending by this name, if nothing else needs the value."""
        definition, pending = self._pending_of(name)
        if pending is None or not pending.is_end or len(definition.uses) > 1:
            return None
        # The name of split outputs has all of them.
        if definition in self.rests:
            return None
        if leaving:
            self.leaves += self._sources(name)
        return self._take(definition)

    def _first_output(self, node: ast.Subscript) -> ast.expr | None:
        """``module(...)[0]``, or ``outputs[0]`` of split outputs, as an end."""
        if not is_first(node):
            return None
        outputs = node.value
        if isinstance(outputs, ast.Call) and self._kind(outputs) == "module":
            return self._module_call("first", outputs)
        definition, pending = self._pending_of(outputs)
        if pending is None or definition not in self.rests:
            return None
        return self._take(definition)

    def _unfinished(self, node: ast.Call) -> ast.expr | None:
        """A module's call that leaves the last steps to this function."""
        return self._module_call("leaving", node)

    def _dropped(self, node: ast.Call) -> ast.expr | None:
        if not is_unary(node):
            return None
        return helper_call("dropped", self._inner(node.args[0]), node.func)

    def _activated(self, node: ast.Call) -> ast.expr | None:
        rows = node.args[0]
        if self._is_gate(node):
            return helper_call("waiting", self._value(rows), self._activation(node))
        # Read first: `_end` rewrites the rows.
        sources = tuple(self._sources(rows))
        layer = self._end(rows)
        if layer is None:
            return None
        self.steps.append(Step("activate", self._path(node), sources))
        return helper_call("activated", layer, self._activation(node))

    def _inner(self, node: ast.expr) -> ast.expr:
        """The expression as an end, which may be one without last steps."""
        end = self._end(node)
        return helper_call("Branch", self._value(node)) if end is None else end

    def _functional_dropout(self, node: ast.Call) -> ast.expr | None:
        names = ("input", "p", "training")
        arguments = dict(zip(names, node.args, strict=False))
        for keyword in node.keywords:
            arguments[keyword.arg or "**"] = keyword.value
        # Others, as ``inplace`` or ``**kwargs``, are left to the function.
        if "input" not in arguments or not arguments.keys() <= set(names):
            return None
        p = arguments.get("p", ast.Constant(0.5))
        training = arguments.get("training", ast.Constant(True))
        if not is_pure(p) or not is_pure(training):
            return None
        return helper_call("drop", self._inner(arguments["input"]), p, training=training)

    def _linear(self, node: ast.Call) -> ast.expr | None:
        if not is_unary(node):
            return None
        rows = node.args[0]
        layer: ast.expr = node.func
        second = self._second_layer(node)
        if node in self.cast:
            layer = load(self.cast[node])
        elif isinstance(rows, ast.Name) and second is not None and self._in_one_block(node, second):
            layer = self._cast_together(node, second, rows)
        return helper_call("linear", layer, self._value(rows))

    def _cast_together(self, first: ast.Call, second: ast.Call, rows: ast.Name) -> ast.expr:
        """Cast two layers in one pass, ahead of the statement; return the first one's cast.

        ::

            _fusedops_1, _fusedops_2 = _fusedops_cast_together(self, x, self.fc1, self.fc2)
        """
        names = [self._temporary(), self._temporary()]
        # Copied, since the statement reads the rows again; not if they are replaced anyway.
        source = rows if rows in self.low else copy.copy(rows)
        arguments = (
            load(self.self_name),
            self._value(source),
            first.func,
            copy.deepcopy(second.func),
        )
        self.before.append(unpack(names, helper_call("cast_together", *arguments)))
        self.cast[second] = names[1]
        return load(names[0])

    def _activation(self, node: ast.Call) -> ast.expr:
        """The activation as a function of its rows alone: the one that is called, or a helper."""
        name = self._gelu(node)
        return helper(name) if name else node.func

    # --- pending values ---

    def _pending_of(self, name: ast.expr) -> tuple[Definition, Pending | None]:
        """A name's definition, and its pending value; without one, any definition."""
        definition = self.flow.only(name)
        if definition is None or definition not in self.pending:
            return Definition(), None
        return definition, self.pending[definition]

    def _temporary(self) -> str:
        self.count += 1
        return f"{PREFIX}{self.count}"

    def _take(self, definition: Definition) -> ast.expr:
        """The end, which is pending no longer."""
        return load(self.pending.pop(definition).end)

    def _forget(self, name: str) -> None:
        """Record that a name is assigned again, and no longer that of a pending value."""
        for pending in self.pending.values():
            pending.names.discard(name)

    def _in_temporary(self, node: ast.expr, before: list[ast.stmt]) -> str:
        """The temporary that holds the value; a statement that assigns it may be added."""
        if isinstance(node, ast.Name) and node.id.startswith(PREFIX):
            return node.id
        name = self._temporary()
        before.append(assign(name, node))
        return name

    def _finished(self, definition: Definition, pending: Pending) -> list[ast.stmt]:
        """The statements that compute a pending value, under all of its names."""
        names = sorted(pending.names)
        if definition in self.rests:
            parts = [load(pending.end), load(self.rests[definition])]
            return [assign(name, helper_call("rejoined", *parts)) for name in names]
        value = helper_call("finished", load(pending.end))
        if pending.is_sum:
            value = added(load(pending.end), load(pending.residual), pending.first)
            self.steps.append(Step("add", "", pending.sources))
        return [assign(names[0], value), *aliases(names)]


def aliases(names: Sequence[str]) -> list[ast.stmt]:
    """Statements that give the value of the first name to the others."""
    return [assign(name, load(names[0])) for name in names[1:]]
