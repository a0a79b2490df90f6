"""Reading a forward: the kind of each call, the consumers of its value, and whether steps can join.

An *end* is a value whose last steps (bias, activation, dropout) are not computed yet; see
`statements`. A consumer joins an end if one operator computes these steps and its own.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

from .flow import Definition, Flow, is_opaque
from .trees import (
    CONDITIONAL,
    SCOPES,
    SHAPE,
    first_argument,
    first_target,
    index_after_first,
    is_first,
    is_pure,
    is_term,
    is_unary,
    local_names,
    nodes,
    only_target,
    path_of,
    root_of,
    self_name_of,
    unique,
)

__all__ = ["DROPOUTS", "ROWS", "WRITES", "Kinds", "Reader", "called_paths", "rows_of"]

# From the path of a module, or a space and the name of a function, to its kind: "linear", "norm",
# "dropout", "activation", "module", "absent" (the attribute is None), "functional dropout", or
# `WRITES`; "" for anything else.
Kinds = Callable[[str], str]
# A method of the module's own that writes attributes which its conditions test.
WRITES = "writes"
DROPOUTS = ("dropout", "functional dropout")
# The keywords by which a module takes its rows, if they are not its first argument.
ROWS = ("hidden_states", "x", "input")
# The kinds of children that may take rows in autocast's dtype.
_TAKING_ROWS = ("linear", "module")
# Functions that multiply matrices.
_PRODUCTS = (".linear", ".matmul", ".bmm", ".einsum")
# The one keyword of a GELU, and the helper that computes it; "" for the operators' default.
_GELUS = {"approximate='tanh'": "gelu_tanh", "approximate='none'": ""}


def called_paths(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """The paths that a function calls in its first parameter, and the other names that it calls."""
    self_name = self_name_of(function)
    paths: dict[str, None] = {}
    others: dict[str, None] = {}
    for call in nodes(function, ast.Call):
        path = path_of(call.func, self_name)
        if path:
            paths[path] = None
        elif isinstance(call.func, (ast.Name, ast.Attribute)):
            others[ast.unparse(call.func)] = None
    return list(paths), list(others)


def rows_of(function: ast.FunctionDef, kinds: Kinds) -> tuple[str, ...]:
    """The paths of the layers and modules that take the function's rows, if nothing else does.

    The rows are the first argument after ``self``.
    """
    flow = Flow(function)
    if len(flow.parameters) < 2:
        return ()
    paths: dict[str, None] = {}
    # The list grows by the names that a conditional expression assigns the rows to.
    definitions = [flow.parameters[1]]
    for definition in definitions:
        for use in _tensor_uses(flow, definition):
            selected = _selected(flow, use)
            if selected is not None:
                definitions.append(selected)
                continue
            path = _path_of_consumer(flow, use, self_name_of(function))
            # For any other use the rows have to stay in their own dtype.
            if path is None or kinds(path) not in (*_TAKING_ROWS, "absent"):
                return ()
            paths[path] = None
    return tuple(paths)


def _path_of_consumer(flow: Flow, use: ast.AST, self_name: str) -> str | None:
    """The name of the module's child that takes a value as its rows; None if none does."""
    call = _taking_call(flow, use)
    if call is None:
        return None
    path = path_of(call.func, self_name)
    # `consumers` looks children up by name.
    if path == "" or "." in path:
        return None
    return path


def _tensor_uses(flow: Flow, definition: Definition) -> list[ast.Name]:
    """The uses of a tensor, without those that read only its shape."""
    return [use for use in definition.uses if not _reads_shape(flow, use)]


def _reads_shape(flow: Flow, use: ast.AST) -> bool:
    """Whether this use of a tensor reads only what is known before the tensor is computed."""
    parent = flow.parent.get(use)
    if not isinstance(parent, ast.Attribute):
        return False
    return parent.attr in SHAPE


def _selected(flow: Flow, use: ast.Name) -> Definition | None:
    """The definition of y in ``y = x if ... else z``, for a use of x or z."""
    choice = flow.parent[use]
    if not isinstance(choice, ast.IfExp):
        return None
    # The condition itself is not assigned.
    if use is choice.test:
        return None
    target = first_target(flow.parent[choice])
    if target is None:
        return None
    return flow.written(target)


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
    if is_rows and isinstance(call, ast.Call):
        return call
    return None


class Reader:
    """Reads the kinds of a function's calls, and the uses of its values.

    The methods change nothing. Rewriting changes the tree in place, so they are called before the
    node that they are about is rewritten.

    Attributes:
        kinds: see `Kinds`.
        leaving: whether the last steps of the first output are left to the caller.
        self_name: the name of the first parameter.
        local: the other names that the function binds.
        flow: its definitions and uses.
        replaceable: the names in expressions that are rewritten.
    """

    def __init__(self, function: ast.FunctionDef, kinds: Kinds, leaving: bool) -> None:
        self.kinds = kinds
        self.leaving = leaving
        self.self_name = self_name_of(function)
        self.local = local_names(function) - {self.self_name}
        self.flow = Flow(function)
        self.replaceable = set(_names_replaceable(function.body))

    # --- calls ---

    def _kind(self, node: ast.AST | None) -> str:
        """The kind of what a call calls; "" for anything that is not rewritten."""
        if not isinstance(node, ast.Call):
            return ""
        # How many arguments ``*args`` stands for is not known.
        if _is_starred(node):
            return ""
        kind = self.kinds(self._path(node) or self._global(node))
        if kind == WRITES:
            return ""
        if kind == "activation" and not self._takes_rows_alone(node):
            return ""
        return kind

    def _takes_rows_alone(self, activation: ast.Call) -> bool:
        """Whether an activation has one argument; a GELU may have its approximation too."""
        if is_unary(activation):
            return True
        return self._gelu(activation) is not None

    def _call(self, node: ast.AST | None, *kinds: str) -> ast.Call | None:
        """The node, if it is a call of one of these kinds."""
        if self._kind(node) not in kinds:
            return None
        assert isinstance(node, ast.Call)
        return node

    def _is_unary_of(self, node: ast.AST, kind: str) -> bool:
        """Whether this is a call of that kind with one argument."""
        call = self._call(node, kind)
        return call is not None and is_unary(call)

    def _gelu(self, node: ast.Call) -> str | None:
        """The helper for a functional GELU with one keyword, see `_GELUS`; None for other calls."""
        match node:
            case ast.Call(func=ast.Attribute(), args=[_], keywords=[keyword]):
                return _GELUS.get(ast.unparse(keyword))
        return None

    def _path(self, node: ast.AST) -> str:
        """The path of the module that a call calls; "" for other nodes."""
        if not isinstance(node, ast.Call):
            return ""
        return path_of(node.func, self.self_name)

    def _global(self, node: ast.Call) -> str:
        """A space and the name of a global function, for `Kinds`.

        A space alone if the function is not known: it is local, or an expression returns it.
        """
        root = root_of(node.func)
        if not root or root in self.local:
            return " "
        return " " + ast.unparse(node.func)

    def _activation_path(self, gate: ast.expr) -> str:
        """The path of the activation that computes a gate."""
        return self._path(self.flow.only(gate).value or gate)

    def _is_function(self, call: ast.Call, name: str) -> bool:
        return ast.unparse(call.func) == f"torch.{name}"

    def _is_chunked(self, value: ast.AST) -> bool:
        """Whether this is ``x.chunk(2, dim=-1)`` or ``torch.chunk(x, 2, dim=-1)``."""
        match value:
            case ast.Call(func=ast.Attribute(attr="chunk"), args=arguments):
                pass
            case _:
                return False
        if self._is_function(value, "chunk"):
            arguments = arguments[1:]
        values = [*arguments, *[keyword.value for keyword in value.keywords]]
        return list(map(ast.unparse, values)) == ["2", "-1"]

    # --- values ---

    def _value_of(self, node: ast.AST) -> ast.AST:
        """The node itself; for a name, the expression that is assigned to it, if that is known."""
        definition = self.flow.only(node)
        # Only the first of a module's outputs can be an end.
        if definition.index not in (None, 0):
            return node
        return definition.value or node

    def _is_computed(self, node: ast.expr) -> bool:
        """Whether a module's call computes this.

        Embeddings are no residual stream: they are broadcast, and no call computes them.
        """
        values = map(self._value_of, nodes(node, ast.Name))
        return any(self._kind(value) not in ("", "absent") for value in values)

    def _is_product(self, node: ast.AST) -> bool:
        """Whether this is a matrix product, or half of a tensor."""
        match self._value_of(node):
            case ast.BinOp(op=operator):
                return isinstance(operator, ast.MatMult)
            case ast.Call(func=called) as call:
                if self._kind(call) == "linear" or self._is_chunked(call):
                    return True
                return ast.unparse(called).endswith(_PRODUCTS)
        return False

    def _is_layer(self, node: ast.AST) -> bool:
        """Whether this is the output of a linear layer."""
        return self._is_unary_of(self._value_of(node), "linear")

    def _is_activated(self, node: ast.AST) -> bool:
        """Whether this is the activation of a matrix product."""
        call = self._call(self._value_of(node), "activation")
        if call is None:
            return False
        return self._is_product(call.args[0])

    def _activates(self, node: ast.AST) -> bool:
        """Whether this is ``act(fc(x))`` with dropouts around it or without, and no gate."""
        node = self._value_of(node)
        rows = first_argument(node)
        if rows is None:
            return False
        kind = self._kind(node)
        if kind == "activation":
            if not self._is_layer(rows):
                return False
            return not self._is_gate(node)
        return kind in DROPOUTS and self._activates(rows)

    def _sources(self, node: ast.AST) -> list[str]:
        """The paths of the modules that the last steps of an end come from.

        These are a linear layer or a block, and dropouts. A functional dropout is a space and its
        probability.
        """
        node = self._value_of(node)
        if isinstance(node, ast.Subscript):
            node = self._value_of(node.value)
        match self._kind(node), node:
            case "linear" | "module", _:
                return [self._path(node)]
            case "functional dropout", ast.Call(args=[rows, *_]) as call:
                return [*self._sources(rows), " " + _probability(call)]
            case "dropout", ast.Call(args=[rows], keywords=[]):
                return [*self._sources(rows), self._path(node)]
        return []

    # --- uses ---

    def _uses(self, definition: Definition) -> int:
        """The number of a value's uses, without those that read only its shape: see `_is_shape`."""
        return len([use for use in definition.uses if not self._is_shape(use)])

    def _is_shape(self, use: ast.Name) -> bool:
        """Whether this reads only the shape of a value, for which a sum need not be computed.

        The sum's operands can replace it there: they have the same shape together.
        """
        return _reads_shape(self.flow, use) and self._is_replaceable(use)

    def _is_replaceable(self, use: ast.Name) -> bool:
        """Whether an expression can replace this use: of one value, where code is rewritten."""
        return use in self.replaceable and self.flow.has_only(use)

    def _is_residual(self, name: ast.Name) -> bool:
        """Whether another use of the value is an operand, as of the residual sum."""
        other_uses = [use for use in self.flow.only(name).uses if use is not name]
        return any(map(self._is_operand, other_uses))

    def _is_operand(self, use: ast.AST) -> bool:
        return isinstance(self.flow.parent[use], ast.BinOp)

    def _single_use(self, target: ast.Name) -> ast.Name | None:
        """The one use of an assigned name, if no other assignment reaches it."""
        match self.flow.written(target).uses:
            case [use] if self.flow.has_only(use):
                return use
        return None

    def _in_one_block(self, *expressions: ast.AST) -> bool:
        """Whether all of these are evaluated, or none: in one block, and unconditionally."""
        blocks = set[ast.AST]()
        for node in expressions:
            while not isinstance(node, ast.stmt):
                if isinstance(node, CONDITIONAL):
                    return False
                node = self.flow.parent[node]
            blocks.add(self.flow.parent[node])
        return len(blocks) == 1

    def _second_layer(self, node: ast.Call) -> ast.Call | None:
        """The linear layer that takes this one's output after an activation and dropouts.

        ::

            h = self.act(self.fc1(x))
            y = residual + self.drop2(self.fc2(self.drop1(h)))     for fc1 this is fc2

        None if the consumer of the second layer does not join that layer's bias: layers that are
        cast together leave it in fp32, for such a consumer.
        """
        kinds: list[str] = []
        consumer = self._caller(node)
        while consumer is not None:
            kind = self._kind(consumer)
            if kind == "linear" and "activation" in kinds and is_unary(consumer):
                if not self._consumer_joins(consumer):
                    return None
                return consumer
            if kind not in ("activation", *DROPOUTS):
                return None
            kinds.append(kind)
            consumer = self._caller(consumer)
        return None

    def _caller(self, node: ast.expr) -> ast.Call | None:
        """The call that has a value as its first argument, and is its one use.

        In ``a = node; y = f(a)`` that is the call of f: the value is read by its name.
        """
        value: ast.expr | None = node
        parent = self.flow.parent[node]
        while (target := first_target(parent)) is not None:
            value = self._single_use(target)
            if value is None:
                return None
            parent = self.flow.parent[value]
        if first_argument(parent) is not value:
            return None
        assert isinstance(parent, ast.Call)
        return parent

    # --- gates ---

    def _are_gated(self, halves: list[ast.Name]) -> bool:
        """Whether the halves of a tensor are read in ``activation(a) * b``, and nowhere else."""
        gate_uses, up_uses = [self.flow.written(half).uses for half in halves]
        if [len(gate_uses), len(up_uses)] != [1, 1]:
            return False
        call = self._call(self.flow.parent[gate_uses[0]], "activation")
        if call is None:
            return False
        product = self.flow.parent[call]
        return _is_multiplication(product) and self.flow.parent[up_uses[0]] is product

    def _is_gate(self, node: ast.AST) -> bool:
        """Whether this activation is a gate: its consumer is a multiplication."""
        parent = self.flow.parent[node]
        target = only_target(parent)
        if target is not None:
            use = self._single_use(target)
            if use is None:
                return False
            parent = self.flow.parent[use]
        return _is_multiplication(parent)

    # --- whether the last steps of a value are worth leaving to its consumer ---

    def _is_split(self, definition: Definition) -> bool:
        """Whether a consumer joins the first of a module's outputs, and others take the rest."""
        firsts = []
        for use in definition.uses:
            part = self.flow.parent[use]
            if not self._is_replaceable(use):
                return False
            if is_first(part):
                firsts.append(part)
            # All outputs together would have to be a tuple, with the first one finished.
            elif index_after_first(part) is None:
                return False
        # With two uses of the first output, one of them would need it finished.
        if len(firsts) != 1:
            return False
        return self._consumer_joins(firsts[0])

    def _use_joins(self, definition: Definition) -> bool:
        """Whether a value has one consumer, which joins it."""
        # For a second consumer the value has to be finished anyway.
        if len(definition.uses) != 1:
            return False
        use = definition.uses[0]
        if not self.flow.reads_only(use, definition):
            return False
        return self._consumer_joins(use)

    def _consumer_joins(self, node: ast.AST) -> bool:
        """Whether the consumer of this value joins an end: see the module's docstring.

        Dropouts and names are followed to what consumes them::

            y = fc(x)
            z = drop(y)          node       parent
            return r + z         fc(x)      assignment to y:     _use_joins
                                 y          argument of drop:    _call_joins
                                 drop(y)    assignment to z:     _use_joins
                                 z          operand of a sum:    _operator_joins, which is true
        """
        parent = self.flow.parent[node]
        match parent:
            case ast.Call(args=[first, *_]) if first is node:
                return self._call_joins(parent, node)
            case ast.BinOp():
                return self._operator_joins(parent, node)
            case ast.AugAssign(op=ast.Add(), value=value):
                return parent.target is node and is_pure(value)
            case ast.Subscript():
                if parent.value is not node:
                    return False
                return self._consumer_joins(parent)
            case ast.Assign(targets=[ast.Name() as target]):
                return self._use_joins(self.flow.written(target))
        return self._caller_joins(node)

    def _caller_joins(self, node: ast.AST) -> bool:
        """Whether the value is left to the function's caller, which joins its last steps."""
        if not self.leaving or not self._is_returned(node):
            return False
        return len(self._sources(node)) > 0

    def _call_joins(self, call: ast.Call, node: ast.AST) -> bool:
        kind = self._kind(call)
        if kind == "activation":
            # A bias joins the activation of a linear layer; a gate joins its product instead.
            if not self._is_layer(node):
                return False
            return not self._is_gate(call)
        if kind in DROPOUTS:
            if self._consumer_joins(call):
                return True
            return self._activates(call)
        return False

    def _operator_joins(self, operation: ast.BinOp, node: ast.AST) -> bool:
        if isinstance(operation.op, ast.Mult):
            return self._is_activated(node)
        if not isinstance(operation.op, ast.Add):
            return False
        residual = operation.right if operation.left is node else operation.left
        return is_term(residual)

    def _is_returned(self, node: ast.AST) -> bool:
        """Whether this is what the function returns, or the first output of several."""
        # A block takes the first of several outputs: attentions return their weights behind it.
        parent = self.flow.parent[node]
        if isinstance(parent, ast.Tuple) and parent.elts[0] is node:
            parent = self.flow.parent[parent]
        return isinstance(parent, ast.Return)

    # --- the consumers of norms, which get a low-precision output under autocast ---

    def _consumers(self, node: ast.Call) -> list[ast.expr]:
        """The modules that take a norm's output, if nothing else does."""
        # Another use would get rounded rows, which the original does not round.
        target = only_target(self.flow.parent[node])
        uses = [node] if target is None else self.flow.written(target).uses
        consumers = list(map(self._consumer, uses))
        if all(consumers):
            return unique(consumers)
        return []

    def _consumer(self, use: ast.AST) -> ast.expr | None:
        """The module that takes this as its rows."""
        call = self._call(_taking_call(self.flow, use), *_TAKING_ROWS)
        if call is None:
            return None
        # Another assignment's value may have other consumers.
        if isinstance(use, ast.Name) and not self.flow.has_only(use):
            return None
        return copy.deepcopy(call.func)

    def _low_uses(self, call: ast.Call) -> tuple[list[ast.Name], list[ast.expr]] | None:
        """The uses of a post-norm's output by modules, and these modules.

        A low-precision copy beside the output saves casts only if some uses are by modules, and all
        others, at least one, are the residual stream. In other cases None.
        """
        target = first_target(self.flow.parent[call])
        if target is None:
            return None
        uses = dict.fromkeys(self.flow.written(target).uses)
        consumers: dict[ast.Name, ast.expr] = {}
        for use in uses:
            consumer = self._consumer(use)
            if consumer is not None:
                consumers[use] = consumer
            elif not self._is_operand(use) or not self.flow.has_only(use):
                return None
        if len(consumers) in (0, len(uses)):
            return None
        return list(consumers), unique(list(consumers.values()))


def _names_replaceable(statements: list[ast.stmt]) -> Iterator[ast.Name]:
    """Yield the names in the expressions that `statements` rewrites.

    These expressions are in simple statements, also within conditions and loops. Targets of
    assignments and nested scopes do not count::

        for i in range(n):            n is not replaceable
            a[j] = b                  b is, a and j are not
            c = f(d, [e for e in g])  f and d are, e and g are not
    """
    for statement in statements:
        if is_opaque(statement):
            continue
        match statement:
            case ast.If(body=body, orelse=orelse):
                yield from _names_replaceable([*body, *orelse])
            case ast.For(body=body) | ast.While(body=body):
                yield from _names_replaceable(body)
            case ast.Assign(value=value) | ast.AugAssign(value=value) | ast.AnnAssign(value=value):
                yield from _names_outside_scopes(value)
            case _:
                yield from _names_outside_scopes(statement)


def _names_outside_scopes(node: ast.AST | None) -> Iterator[ast.Name]:
    if node is None or isinstance(node, SCOPES):
        return
    if isinstance(node, ast.Name):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _names_outside_scopes(child)


def _is_starred(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in call.args)


def _is_multiplication(node: ast.AST) -> bool:
    """Whether this is a multiplication, element by element."""
    match node:
        case ast.BinOp(op=ast.Mult()):
            return True
    return False


def _probability(dropout: ast.Call) -> str:
    """The text of a functional dropout's probability."""
    for keyword in dropout.keywords:
        if keyword.arg == "p":
            return ast.unparse(keyword.value)
    if len(dropout.args) > 1:
        return ast.unparse(dropout.args[1])
    return "0.5"
