"""Reading a forward: the kind of each call, the consumers of its value, and whether steps can join.

An *end* is a value whose last steps (bias, activation, dropout) are not computed yet; see
`statements`. A consumer joins an end if one operator computes these steps and its own.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

from .flow import Definition, Flow
from .trees import (
    CONDITIONAL,
    SHAPE,
    first_argument,
    first_target,
    from_first,
    is_first,
    is_pure,
    is_term,
    is_unary,
    local_names,
    only_target,
    path_of,
    root_of,
    unique,
)

__all__ = ["DROPOUTS", "ROWS", "Kinds", "Reader", "called_paths", "rows_of"]

# From the path of a module, or a space and the name of a function, to its kind: "linear", "norm",
# "dropout", "activation", "module", "absent" (the attribute is None), or "functional dropout"; ""
# for anything else.
Kinds = Callable[[str], str]
DROPOUTS = ("dropout", "functional dropout")
# The keywords by which a module takes its rows, if they are not its first argument.
ROWS = ("hidden_states", "x", "input")
# Functions that multiply matrices.
_PRODUCTS = (".linear", ".matmul", ".bmm", ".einsum")
# The one keyword of a GELU, and the helper that computes it; "" for the operators' default.
_GELUS = {"approximate='tanh'": "gelu_tanh", "approximate='none'": ""}


def called_paths(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """The paths in its first parameter that the function calls, and the names of functions."""
    self_name = function.args.args[0].arg if function.args.args else ""
    paths: dict[str, None] = {}
    others: dict[str, None] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        path = path_of(node.func, self_name)
        if path:
            paths[path] = None
        elif isinstance(node.func, (ast.Name, ast.Attribute)):
            others[ast.unparse(node.func)] = None
    return list(paths), list(others)


def rows_of(function: ast.FunctionDef, kinds: Kinds) -> tuple[str, ...]:
    """The paths of the layers and modules that take the function's rows, if nothing else does.

    The rows are the first argument after ``self``.
    """
    flow = Flow(function)
    self_name = function.args.args[0].arg if function.args.args else ""
    if len(flow.parameters) < 2:
        return ()
    paths: dict[str, None] = {}
    # The list grows by the names that a conditional expression assigns the rows to.
    definitions = [flow.parameters[1]]
    for definition in definitions:
        for use in definition.uses:
            if _reads_shape(flow, use):
                continue
            selected = _selected(flow, use)
            if selected is not None:
                definitions.append(selected)
                continue
            call = _taking_call(flow, use)
            path = "" if call is None else path_of(call.func, self_name)
            is_child = path != "" and "." not in path
            if not is_child or kinds(path) not in ("linear", "module", "absent"):
                return ()
            paths[path] = None
    return tuple(paths)


def _reads_shape(flow: Flow, use: ast.AST) -> bool:
    """Whether this use of a tensor reads only what is known before the tensor is computed."""
    parent = flow.parent.get(use)
    return isinstance(parent, ast.Attribute) and parent.attr in SHAPE


def _selected(flow: Flow, use: ast.Name) -> Definition | None:
    """The definition of y in ``y = x if ... else z``, for a use of x or z."""
    choice = flow.parent[use]
    if not isinstance(choice, ast.IfExp) or use is choice.test:
        return None
    target = first_target(flow.parent[choice])
    return None if target is None else flow.written(target)


def _taking_call(flow: Flow, use: ast.AST) -> ast.Call | None:
    """The call that takes a value as its rows."""
    parent = flow.parent[use]
    if isinstance(parent, ast.keyword):
        # The parent of a keyword is a call, or the definition of a class.
        call = flow.parent[parent]
        is_rows = parent.arg in ROWS
    else:
        call = parent
        is_rows = first_argument(parent) is use
    return call if is_rows and isinstance(call, ast.Call) else None


class Reader:
    """Answers questions about a function's values from its text."""

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool) -> None:
        self.kinds = kinds
        self.leaving = leaving
        self.self_name = function.args.args[0].arg
        self.local = local_names(function) - {self.self_name}
        self.flow = Flow(function)

    # --- calls ---

    def _kind(self, node: ast.AST) -> str:
        """The kind of what a call calls; "" for anything that is not rewritten."""
        if not isinstance(node, ast.Call):
            return ""
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            return ""
        called = self._path(node)
        if not called:
            # The name of a function may be looked up in the globals, unless it is a local one.
            root = root_of(node.func)
            if not root or root in self.local:
                return ""
            called = " " + ast.unparse(node.func)
        kind = self.kinds(called)
        # An activation has no other arguments, except for a GELU's approximation.
        is_plain = kind != "activation" or is_unary(node) or self._gelu(node) is not None
        return kind if is_plain else ""

    def _is_unary_of(self, node: ast.AST, kind: str) -> bool:
        """Whether this is a call of that kind with one argument."""
        return isinstance(node, ast.Call) and self._kind(node) == kind and is_unary(node)

    def _gelu(self, node: ast.Call) -> str | None:
        """The helper for a GELU that a function's one keyword asks for; None for other calls."""
        match node:
            case ast.Call(func=ast.Attribute(), args=[_], keywords=[keyword]):
                return _GELUS.get(ast.unparse(keyword))
        return None

    def _path(self, node: ast.Call) -> str:
        return path_of(node.func, self.self_name)

    def _activation_path(self, gate: ast.expr) -> str:
        """The path of the activation that computes a gate."""
        definition = self.flow.only(gate)
        if definition is not None and definition.value is not None:
            gate = definition.value
        return self._path(gate) if isinstance(gate, ast.Call) else ""

    def _is_function(self, call: ast.Call, name: str) -> bool:
        return ast.unparse(call.func) == f"torch.{name}"

    def _is_chunked(self, value: ast.expr) -> bool:
        """Whether this is ``x.chunk(2, dim=-1)`` or ``torch.chunk(x, 2, dim=-1)``."""
        match value:
            case ast.Call(func=ast.Attribute(attr="chunk")):
                arguments = value.args
            case _:
                return False
        if self._is_function(value, "chunk"):
            arguments = arguments[1:]
        texts = [ast.unparse(argument) for argument in arguments]
        texts += [ast.unparse(keyword.value) for keyword in value.keywords]
        return texts == ["2", "-1"]

    # --- values ---

    def _value_of(self, node: ast.AST) -> ast.AST:
        """The expression whose value this is; a name's definition, where that is known."""
        if not isinstance(node, ast.Name):
            return node
        definition = self.flow.only(node)
        if definition is None or definition.value is None:
            return node
        # Of a module's outputs, the first is the one that is an end.
        return definition.value if definition.index in (None, 0) else node

    def _is_computed(self, node: ast.expr) -> bool:
        """Whether a module's call computes this.

        Embeddings are no residual stream: they are broadcast, and no call computes them.
        """
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                call = self._value_of(inner)
                if self._kind(call) not in ("", "absent"):
                    return True
        return False

    def _is_product(self, node: ast.AST) -> bool:
        """Whether this is a matrix product, or half of a tensor."""
        node = self._value_of(node)
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        if not isinstance(node, ast.Call):
            return False
        if self._kind(node) == "linear" or self._is_chunked(node):
            return True
        return ast.unparse(node.func).endswith(_PRODUCTS)

    def _is_layer(self, node: ast.AST) -> bool:
        """Whether this is the output of a linear layer."""
        return self._is_unary_of(self._value_of(node), "linear")

    def _is_activated(self, node: ast.AST) -> bool:
        """Whether this is the activation of a matrix product."""
        node = self._value_of(node)
        if not isinstance(node, ast.Call) or self._kind(node) != "activation":
            return False
        return self._is_product(node.args[0])

    def _activates(self, node: ast.AST) -> bool:
        """Whether this is the activation of a linear layer's output, or a dropout of it."""
        node = self._value_of(node)
        rows = first_argument(node)
        if rows is None:
            return False
        kind = self._kind(node)
        if kind == "activation":
            return self._is_layer(rows) and not self._is_gate(node)
        return kind in DROPOUTS and self._activates(rows)

    def _sources(self, node: ast.AST) -> list[str]:
        """The paths of the modules whose last steps an end has."""
        node = self._value_of(node)
        if isinstance(node, ast.Subscript):
            node = self._value_of(node.value)
        if not isinstance(node, ast.Call):
            return []
        kind = self._kind(node)
        if kind in ("linear", "module"):
            return [self._path(node)]
        if kind not in DROPOUTS or not node.args:
            return []
        if kind == "functional dropout":
            return [*self._sources(node.args[0]), " " + _probability(node)]
        return [*self._sources(node.args[0]), self._path(node)] if is_unary(node) else []

    # --- uses ---

    def _uses(self, definition: Definition) -> int:
        """The number of a value's uses, without those that read its shape."""
        return sum(not self._is_shape(use) for use in definition.uses)

    def _is_shape(self, use: ast.Name) -> bool:
        return _reads_shape(self.flow, use)

    def _is_residual(self, name: ast.Name) -> bool:
        """Whether another use of the value is a term of a sum, or another operand."""
        definition = self.flow.only(name)
        if definition is None:
            return False
        others = [use for use in definition.uses if use is not name]
        return any(isinstance(self.flow.parent[use], ast.BinOp) for use in others)

    def _single_use(self, target: ast.Name) -> ast.Name | None:
        """The one use of an assigned name, if no other assignment reaches it."""
        uses = self.flow.written(target).uses
        if len(uses) != 1 or self.flow.only(uses[0]) is None:
            return None
        return uses[0]

    def _in_one_block(self, *nodes: ast.AST) -> bool:
        """Whether all of these are evaluated, or none: in one block, and unconditionally."""
        blocks = set[ast.AST]()
        for node in nodes:
            while not isinstance(node, ast.stmt):
                if isinstance(node, CONDITIONAL):
                    return False
                node = self.flow.parent[node]
            blocks.add(self.flow.parent[node])
        return len(blocks) == 1

    def _second_layer(self, node: ast.Call) -> ast.Call | None:
        """The linear layer that takes this one's output after an activation and dropouts.

        Only one that its consumer joins: cast together with this one, it has its bias in fp32.
        """
        current: ast.AST = node
        is_activated = False
        while True:
            parent = self.flow.parent[current]
            # A name goes on where it is used.
            target = first_target(parent)
            if target is not None:
                use = self._single_use(target)
                if use is None:
                    return None
                current = use
                continue
            if not isinstance(parent, ast.Call) or first_argument(parent) is not current:
                return None
            kind = self._kind(parent)
            if kind == "linear" and is_activated and is_unary(parent):
                return parent if self._consumer_joins(parent) else None
            if kind != "activation" and kind not in DROPOUTS:
                return None
            is_activated = is_activated or kind == "activation"
            current = parent

    # --- gates ---

    def _gate_of(self, target: ast.Tuple) -> ast.Call | None:
        """The activation of the first half of two, where its product with the second is all."""
        gate, up = [self.flow.written(element).uses for element in target.elts]
        if len(gate) != 1 or len(up) != 1:
            return None
        call = self.flow.parent[gate[0]]
        if not isinstance(call, ast.Call) or self._kind(call) != "activation":
            return None
        match self.flow.parent[call]:
            case ast.BinOp(op=ast.Mult()) as product:
                return call if self.flow.parent[up[0]] is product else None
        return None

    def _is_gate(self, node: ast.AST) -> bool:
        """Whether this activation is a gate: its consumer is a multiplication."""
        parent = self.flow.parent[node]
        target = only_target(parent)
        if target is not None:
            use = self._single_use(target)
            if use is None:
                return False
            parent = self.flow.parent[use]
        return isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult)

    # --- whether it gains to leave a value unfinished ---

    def _is_split(self, definition: Definition) -> bool:
        """Whether a consumer joins the first of a module's outputs, and others take the rest."""
        firsts = []
        for use in definition.uses:
            part = self.flow.parent[use]
            # All outputs together would have to be a tuple, with the first one finished.
            if not isinstance(part, ast.Subscript) or part.value is not use:
                return False
            if self.flow.only(use) is not definition:
                return False
            if is_first(part):
                firsts.append(part)
            elif from_first(part) is None:
                return False
        return len(firsts) == 1 and self._consumer_joins(firsts[0])

    def _use_joins(self, definition: Definition) -> bool:
        """Whether a value has one consumer, which joins it."""
        # For a second consumer the value has to be finished anyway.
        if len(definition.uses) != 1:
            return False
        use = definition.uses[0]
        return self.flow.only(use) is definition and self._consumer_joins(use)

    def _consumer_joins(self, node: ast.AST) -> bool:
        """Whether the consumer of this value takes an end, and does more than to finish it."""
        parent = self.flow.parent[node]
        match parent:
            case ast.Call(args=[first, *_]) if first is node:
                return self._call_joins(parent, node)
            case ast.BinOp():
                return self._operator_joins(parent, node)
            case ast.AugAssign(op=ast.Add(), value=value):
                return parent.target is node and is_pure(value)
            case ast.Subscript():
                return parent.value is node and self._consumer_joins(parent)
            case ast.Assign(targets=[ast.Name() as target]):
                return self._use_joins(self.flow.written(target))
        # The caller joins what is left to it.
        return self.leaving and self._is_returned(node) and bool(self._sources(node))

    def _call_joins(self, call: ast.Call, node: ast.AST) -> bool:
        kind = self._kind(call)
        if kind == "activation":
            # A bias joins the activation of a linear layer; a gate joins its product instead.
            return self._is_layer(node) and not self._is_gate(call)
        if kind in DROPOUTS:
            return self._consumer_joins(call) or self._activates(call)
        return False

    def _operator_joins(self, operation: ast.BinOp, node: ast.AST) -> bool:
        if isinstance(operation.op, ast.Mult):
            return self._is_activated(node)
        other = operation.right if operation.left is node else operation.left
        return isinstance(operation.op, ast.Add) and is_term(other)

    def _is_returned(self, node: ast.AST) -> bool:
        """Whether this is what the function returns, or the first output of several."""
        parent = self.flow.parent[node]
        if isinstance(parent, ast.Tuple) and parent.elts[0] is node:
            parent = self.flow.parent[parent]
        return isinstance(parent, ast.Return)

    # --- the consumers of norms, which get a low-precision output under autocast ---

    def _consumers(self, node: ast.Call) -> list[ast.expr]:
        """The modules that take a norm's output, if nothing else does."""
        target = only_target(self.flow.parent[node])
        uses = [node] if target is None else self.flow.written(target).uses
        consumers = [self._consumer(use) for use in uses]
        return unique(consumers) if all(consumers) else []

    def _consumer(self, use: ast.AST) -> ast.expr | None:
        """The module that takes this as its rows."""
        call = _taking_call(self.flow, use)
        if call is None or self._kind(call) not in ("linear", "module"):
            return None
        if isinstance(use, ast.Name) and self.flow.only(use) is None:
            return None
        return copy.deepcopy(call.func)

    def _low_uses(self, call: ast.Call) -> tuple[list[ast.Name], list[ast.expr]] | None:
        """The uses of a post-norm's output by modules, and these modules.

        None unless the remaining uses are the residual stream, and there are uses of both kinds:
        only then a low-precision copy beside the output saves casts.
        """
        target = first_target(self.flow.parent[call])
        if target is None:
            return None
        low, modules = [], []
        has_residual = False
        for use in self.flow.written(target).uses:
            if self.flow.only(use) is None:
                return None
            consumer = self._consumer(use)
            if consumer is not None:
                low.append(use)
                modules.append(consumer)
            elif isinstance(self.flow.parent[use], ast.BinOp):
                has_residual = True
            else:
                return None
        return (low, unique(modules)) if low and has_residual else None


def _probability(dropout: ast.Call) -> str:
    """The text of a functional dropout's probability."""
    for keyword in dropout.keywords:
        if keyword.arg == "p":
            return ast.unparse(keyword.value)
    return ast.unparse(dropout.args[1]) if len(dropout.args) > 1 else "0.5"
