"""Expressions rewritten: ends and sums, joined with what takes them."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass

from .flow import Definition
from .reading import ROWS, Kinds, Reader
from .trees import (
    PREFIX,
    SHAPE,
    added,
    from_first,
    has_one,
    helper,
    helper_call,
    is_helper,
    is_pure,
    shifted,
)  # fmt: skip

__all__ = ["Ends", "Pending", "Step", "Sum"]


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


@dataclass
class Pending:
    """A value that waits: an end (in ``end``), or its sum with ``residual``; with the names that it has."""

    end: str
    names: set[str]
    residual: str = ""
    sources: tuple[str, ...] = ()
    first: bool = False  # of a sum: the end stands before the residual
    waits_for_layers: bool = False  # a gate, which waits while the other layer is called


@dataclass(frozen=True)
class Sum:
    """A sum of an end and a residual, as expressions."""

    end: ast.expr
    residual: ast.expr
    sources: tuple[str, ...]
    first: bool = False


class Ends(Reader):
    """A function's expressions, and what waits between its statements."""

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool) -> None:
        super().__init__(function, kinds, leaving)
        self.pending: dict[Definition, Pending] = {}
        self.before: list[ast.stmt] = []  # what is to run before the statement that is being rewritten
        self.low: dict[ast.Name, str] = {}  # names to be read in a low-precision copy
        self.cast: dict[ast.Call, str] = {}  # linear layers that were cast with another
        self.rests: dict[Definition, str] = {}  # of modules' outputs that were taken apart, all but the first
        self.steps: list[Step] = []
        self.leaves: list[str] = []
        self.count = 0

    def _value(self, node: ast.expr) -> ast.expr:  # noqa: C901 - one case a kind
        """The expression, of which a tensor comes, rewritten."""
        new = self._joined(node)
        if new is not None:
            return new
        if isinstance(node, ast.Name):
            return ast.Name(self.low[node], ast.Load()) if node in self.low else node
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            definition = self.flow.only(node.value)
            if definition is not None and definition in self.rests and from_first(node) is not None:
                return shifted(node, self.rests[definition])
        if isinstance(node, ast.Attribute) and node.attr in SHAPE and isinstance(node.value, ast.Name):
            definition = self.flow.only(node.value)
            pending = None if definition is None else self.pending.get(definition)
            if pending is not None and pending.residual and pending.end:
                ends = [ast.Name(name, ast.Load()) for name in (pending.end, pending.residual)]
                return ast.Attribute(helper_call("like", *ends), node.attr, ast.Load())
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
                return added(total.end, total.residual, total.first)
        if not isinstance(node, ast.Call):
            return None
        kind = self._kind(node)
        if kind == "norm" and has_one(node):
            return self._normed(node)
        if kind in ("activation", "dropout", "functional dropout") and self._activates(node):
            end = self._end(node, activated=True)
            if end is not None:
                return helper_call("finished", end)
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
            return helper_call("normed", norm, self._value(node.args[0]), *consumers)
        self.steps.append(Step("add_norm", self._path(node), total.sources))
        return helper_call("add_norm", total.end, total.residual, norm, *consumers, return_sum=False)

    def _narrowed(self, node: ast.Call) -> None:
        """Rows that a module takes and others too are cast once for it, if all that it does with them is to cast them."""
        if isinstance(node.args[0], ast.Name) and node.args[0] not in self.low and self._is_residual_too(node.args[0]):
            node.args[0] = helper_call("narrowed", node.args[0], copy.deepcopy(node.func))

    def _gated(self, node: ast.BinOp) -> ast.expr | None:
        for gate, up, name in ((node.left, node.right, "gated"), (node.right, node.left, "gated_by")):
            end = self._gate(gate)
            if end is not None:
                halves = self._halves(gate, up)
                if halves is not None:
                    return halves
                self.steps.append(Step("gate", self._activation_path(gate), ()))
                other = self._value(up)
                return helper_call(name, *((end, other) if name == "gated" else (other, end)))
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
            return helper_call("waiting", self._value(node.args[0]), self._activation(node))
        return None

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
        return helper_call("packed_gated", ast.Name(whole, ast.Load()), self._activation(gate))

    def _sum(self, node: ast.expr, *, plain: bool) -> Sum | None:
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
            return Sum(ast.Name(pending.end, ast.Load()), ast.Name(pending.residual, ast.Load()), pending.sources)
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            return None
        for term, other in ((node.right, node.left), (node.left, node.right)):
            if isinstance(other, ast.Name):
                sources = tuple(self._sources(term))
                end = self._end(term)
                if end is not None:
                    return Sum(end, self._value(other), sources, term is node.left)
        pure = is_pure(node.right) and not isinstance(node.right, ast.Constant)
        if plain and pure and isinstance(node.left, ast.Name) and any(map(self._is_computed, (node.left, node.right))):
            return Sum(helper_call("Branch", self._value(node.right)), self._value(node.left), ())
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
        if kind == "linear" and has_one(node):
            return self._linear(node)
        if kind == "module":
            return self._module_call("leaving", node)
        if kind == "activation":
            if self._waits_for_product(node):
                return helper_call("waiting", self._value(node.args[0]), self._activation(node))
            sources = tuple(self._sources(node.args[0]))
            layer = self._end(node.args[0])
            if layer is None:
                return None
            self.steps.append(Step("activate", self._path(node), sources))
            return helper_call("activated", layer, self._activation(node))
        if kind == "dropout" and has_one(node):
            return helper_call("dropped", self._inner(node.args[0]), node.func)
        if kind == "functional dropout":
            return self._functional_dropout(node)
        return None

    def _inner(self, node: ast.expr) -> ast.expr:
        end = self._end(node)
        return helper_call("Branch", self._value(node)) if end is None else end

    def _functional_dropout(self, node: ast.Call) -> ast.expr | None:
        given = dict(zip(("input", "p", "training"), node.args, strict=False))
        given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
        if not given.keys() <= {"input", "p", "training"} or "input" not in given:
            return None
        p, training = given.get("p", ast.Constant(0.5)), given.get("training", ast.Constant(True))
        if not is_pure(p) or not is_pure(training):
            return None
        return helper_call("drop", self._inner(given["input"]), p, training=training)

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
                ast.Assign(
                    [names], helper_call("cast_together", self._self(), rows, node.func, copy.deepcopy(second.func))
                )
            )
            self.cast[second] = second_name
            layer = ast.Name(first_name, ast.Load())
        return helper_call("linear", layer, self._value(node.args[0]))

    def _module_call(self, name: str, node: ast.Call) -> ast.expr:
        self._narrowed_or_value(node)
        return ast.Call(helper(name), [node.func, *node.args], node.keywords)

    def _narrowed_or_value(self, node: ast.Call) -> None:
        if node.args:
            self._narrowed(node)
        node.args = [
            argument if isinstance(argument, ast.Call) and is_helper(argument) else self._value(argument)
            for argument in node.args
        ]
        for keyword in node.keywords:
            rows = keyword.value
            if (
                keyword.arg in ROWS
                and isinstance(rows, ast.Name)
                and rows not in self.low
                and self._is_residual_too(rows)
            ):
                keyword.value = helper_call("narrowed", rows, copy.deepcopy(node.func))
            else:
                keyword.value = self._value(rows)

    def _activation(self, node: ast.Call) -> ast.expr:
        """What is called for the activation, with the rows alone."""
        name = self._approximate(node)
        return helper(name) if name else node.func

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
