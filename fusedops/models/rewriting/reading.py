"""Reading a forward: what each call is, where its value goes, and whether that can take one that is not finished."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

from .flow import Definition, Flow
from .trees import (
    CONDITIONAL,
    SHAPE,
    from_first,
    has_one,
    is_pure,
    local_names,
    once,
    path_of,
    root_of,
)  # fmt: skip

__all__ = ["ROWS", "Kinds", "Reader", "called_paths", "rows_of"]

# From the path of a module, or a space and the name of a function, to its kind: "linear", "norm", "dropout", "activation",
# "module", "absent" (there is none), or "functional dropout"; "" for anything else.
Kinds = Callable[[str], str]
# The names by which a module takes its rows, if not by place.
ROWS = ("hidden_states", "x", "input")
# Functions that multiply matrices.
_PRODUCTS = (".linear", ".matmul", ".bmm", ".einsum")


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
            call: Any = flow.parent[parent] if isinstance(parent, ast.keyword) and parent.arg in ROWS else parent
            given = isinstance(call, ast.Call) and (call is not parent or (bool(call.args) and call.args[0] is use))
            path = path_of(call.func, self_name) if given else ""
            if not path or "." in path or kinds(path) not in ("linear", "module", "absent"):
                return ()
            found[path] = None
    return tuple(found)


class Reader:
    """What can be told of a function's values from its text."""

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool) -> None:
        self.kinds, self.leaving = kinds, leaving
        self.self_name = function.args.args[0].arg
        self.local = local_names(function) - {self.self_name}
        self.flow = Flow(function)

    def _kind(self, node: ast.Call) -> str:
        path = path_of(node.func, self.self_name)
        if not path and (not root_of(node.func) or root_of(node.func) in self.local):
            return ""
        kind = self.kinds(path or " " + ast.unparse(node.func))
        if kind == "activation" and not has_one(node) and self._approximate(node) is None:
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

    def _is_residual_too(self, name: ast.Name) -> bool:
        definition = self.flow.only(name)
        return definition is not None and any(
            isinstance(self.flow.parent[use], ast.BinOp) for use in definition.uses if use is not name
        )

    def _activation_path(self, gate: ast.expr) -> str:
        if isinstance(gate, ast.Name):
            definition = self.flow.only(gate)
            gate = definition.value if definition is not None and definition.value is not None else gate
        return self._path(gate) if isinstance(gate, ast.Call) else ""

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

    def _are_together(self, *nodes: ast.AST) -> bool:
        """Whether of these expressions all are evaluated, or none: they are in one block, and under no condition in it."""
        blocks = set[ast.AST]()
        for node in nodes:
            while not isinstance(node, ast.stmt):
                if isinstance(node, CONDITIONAL):
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
                    return parent if activated and has_one(parent) and self._profits(parent) else None
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
            elif from_first(parent) is None:
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
            return isinstance(parent.op, ast.Add) and is_pure(other) and not isinstance(other, ast.Constant)
        if isinstance(parent, ast.AugAssign):
            return parent.target is node and isinstance(parent.op, ast.Add) and is_pure(parent.value)
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
        return isinstance(node, ast.Call) and self._kind(node) == "linear" and has_one(node)

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
        if kind == "dropout" and has_one(node):
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
        return [] if not all(found) else once(found)

    def _consumer(self, use: ast.AST) -> ast.expr | None:
        """The module that takes this as its rows."""
        parent = self.flow.parent[use]
        if isinstance(parent, ast.keyword):
            call = self.flow.parent[parent]
            takes = parent.arg in ROWS
        else:
            call = parent
            takes = isinstance(parent, ast.Call) and bool(parent.args) and parent.args[0] is use
        if not takes or not isinstance(call, ast.Call) or self._kind(call) not in ("linear", "module"):
            return None
        if isinstance(use, ast.Name) and self.flow.only(use) is None:
            return None
        return copy.deepcopy(call.func)

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
        return (taken, once(modules)) if taken and residual else None

    def _uses(self, definition: Definition) -> int:
        """How many uses a value has, but for its shape."""
        return sum(not self._is_shape(use) for use in definition.uses)

    def _is_shape(self, use: ast.Name) -> bool:
        parent = self.flow.parent.get(use)
        return isinstance(parent, ast.Attribute) and parent.attr in SHAPE
