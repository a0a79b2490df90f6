"""Reads a norm's forward, which may contain only arithmetic on its one argument.

`case_of` returns what the forward depends on: its code, the module's attributes, and the number
literals. Everything else is refused: a branch on the input, a side effect, a call of an unknown
function. A forward that is accepted computes one formula for all inputs: a few runs determine it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..fingerprint import definition, digest, is_unpatched, names_in

__all__ = ["Case", "RefusedError", "case_of"]


class RefusedError(Exception):
    """The reason why a module is none of the operators' norms."""


# The nodes that a forward may consist of; `_MethodVisitor` has methods for others.
_ARITHMETIC = (
    ast.Expr,
    ast.Return,
    ast.Assign,
    ast.BinOp,
    ast.UnaryOp,
    ast.Tuple,
    ast.List,
    ast.Slice,
    ast.expr_context,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Pow,
    ast.USub,
    ast.UAdd,
)
# For `if` and conditional expressions see `_MethodVisitor._sides`. The others depend on the values
# of the input, or have effects beside the result.
_BRANCHING = (ast.While, ast.For, ast.Try, ast.With, ast.Compare, ast.BoolOp)
# The nodes that a condition may consist of, besides attributes.
_IN_CONDITIONS = (
    ast.Name,
    ast.Constant,
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.Tuple,
    ast.List,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
    ast.expr_context,
)
# Methods of tensors, and functions of torch and torch.nn.functional, that a forward may call. None
# decides by the values of its operands, as `clamp` and `where` do: random rows might never show one
# of their sides.
_CALLED = frozenset(
    {
        "add",
        "contiguous",
        "div",
        "double",
        "expand",
        "expand_as",
        "float",
        "layer_norm",
        "mean",
        "mul",
        "norm",
        "pow",
        "reciprocal",
        "reshape",
        "rms_norm",
        "rsqrt",
        "size",
        "sqrt",
        "square",
        "std",
        "sub",
        "sum",
        "to",
        "true_divide",
        "type",
        "type_as",
        "unsqueeze",
        "var",
        "vector_norm",
        "view",
        "view_as",
    }
)
_TENSOR_ATTRIBUTES = frozenset({"dtype", "device"})
_MODULES = (torch, nn, nn.functional, torch.linalg, math)
# Types of attributes whose values are part of a case: they are hashable, and equal values compute
# the same.
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_MISSING = object()


@dataclass
class _Reader:
    """Collects what a module's forward depends on: methods, attributes and number literals.

    The dictionaries are ordered sets: the order in which things are read is part of a case.
    """

    cls: type[nn.Module]
    module: nn.Module
    functions: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, None] = field(default_factory=dict)
    numbers: dict[float, None] = field(default_factory=dict)
    argument: str = ""

    def method(self, name: str) -> None:
        """Read a method, and those that it calls."""
        # Methods may call each other, or themselves.
        if name in self.functions:
            return
        function = getattr(self.cls, name, None)
        if not isinstance(function, FunctionType) or not _is_self_contained(function):
            raise RefusedError(f"its {name} is wrapped")
        # The digest is empty if the source on disk is not that of the code that will run.
        if not digest(function):
            raise RefusedError(f"its {name} cannot be read")
        self.functions[name] = function
        tree = definition(function)
        assert tree is not None
        if name == "forward":
            self.argument = _only_argument(tree.args)
        if _has_more_than_code(tree):
            raise RefusedError(f"its {name} is more than a plain method")
        visitor = _MethodVisitor(self, function)
        has_docstring = ast.get_docstring(tree) is not None
        for statement in tree.body[has_docstring:]:
            visitor.visit(statement)

    def attribute(self, name: str, method: str) -> None:
        """Record an attribute that a method reads, which must be a tensor or a plain value."""
        # The mode changes after a module is fused.
        if name == "training":
            raise RefusedError("its forward depends on its mode")
        if not self._is_tensor(name):
            self._check_plain(name, method)
        self.attributes[name] = None

    def _is_tensor(self, name: str) -> bool:
        if name in self.module._parameters:
            return True
        return name in self.module._buffers

    def _check_plain(self, name: str, method: str) -> None:
        inherited = getattr(self.cls, name, _MISSING)
        value = vars(self.module).get(name, inherited)
        if value is _MISSING:
            raise RefusedError(f"it has no {name}")
        # A property is refused here, too: its value may change from call to call.
        if not isinstance(value, _PLAIN) and not _is_sizes(value):
            raise RefusedError(f"its {method} reads its {name}")


class _MethodVisitor(ast.NodeVisitor):
    """Reads the body of one method; raises `RefusedError` unless it is arithmetic."""

    def __init__(self, reader: _Reader, function: FunctionType) -> None:
        self._reader, self._function = reader, function
        self._locals = function.__code__.co_varnames

    def _refuse(self, reason: str) -> NoReturn:
        raise RefusedError(f"its {self._function.__name__} {reason}")

    def generic_visit(self, node: ast.AST) -> None:
        # A list of what is allowed: syntax that a later Python adds is refused.
        if isinstance(node, _BRANCHING):
            self._refuse("branches, or changes what others see")
        if not isinstance(node, _ARITHMETIC):
            self._refuse("does more than arithmetic")
        super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # Annotations of local variables are not evaluated.
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        # The module itself could go anywhere; a global could be changed by anybody.
        if node.id == "self" or node.id not in self._locals:
            self._refuse(f"uses {node.id}")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._refuse(f"uses {node.value!r}")
        if isinstance(node.value, float):
            self._reader.numbers[node.value] = None

    def visit_keyword(self, node: ast.keyword) -> None:
        # `torch.mul(x, y, out=self.weight)` writes to the module.
        if node.arg == "out":
            self._refuse("writes in place")
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        shape = _shape_of_last(node)
        if shape is not None:
            self.visit(shape.value)
            return
        if isinstance(node.ctx, ast.Store):
            self._refuse("writes in place")
        self.visit(node.value)
        self.visit(node.slice)

    def visit_If(self, node: ast.If) -> None:
        # A side of an `if` statement is a list of statements.
        for side in self._sides(node.test, node.body, node.orelse):
            for statement in side:
                self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for side in self._sides(node.test, node.body, node.orelse):
            self.visit(side)

    def _sides(self, test: ast.expr, body: Any, orelse: Any) -> list[Any]:
        """Return the sides of a branch on the module's attributes that may run.

        A condition on plain attributes is evaluated, and only the side that runs is read: the
        attributes are part of the case. The dtype of a parameter is not, since one case is run in
        several dtypes, so a condition on it has both sides read.
        """
        if names_in(test) - {"self", "torch"}:
            raise RefusedError("its forward branches on its input")
        # Every node has to be checked and recorded, also after the first dtype.
        are_dtypes = list(map(self._check_in_condition, ast.walk(test)))
        if any(are_dtypes):
            return [body, orelse]
        return [body if self._holds(test) else orelse]

    def _holds(self, test: ast.expr) -> bool:
        """Evaluate a condition on the module's attributes."""
        code = compile(ast.Expression(test), "<test>", "eval")
        try:
            return bool(eval(code, {"torch": torch, "self": self._reader.module}))
        # Some comparisons raise, as does a vector as a condition, or any tensor on "meta".
        except Exception as error:
            raise RefusedError("its forward branches on what has no truth value") from error

    def _check_in_condition(self, part: ast.AST) -> bool:
        """Check and record a node of a condition; return whether it is a parameter's dtype."""
        if not isinstance(part, ast.Attribute):
            is_allowed = isinstance(part, _IN_CONDITIONS)
        elif _is_attribute_of(part, "self"):
            self._reader.attribute(part.attr, self._function.__name__)
            is_allowed = True
        elif part.attr == "dtype" and _is_attribute_of(part.value, "self"):
            return True
        else:
            is_allowed = _is_attribute_of(part, "torch")
        if not is_allowed:
            self._refuse("branches on more than the module's attributes")
        return False

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        called = node.func
        if not isinstance(called, ast.Attribute):
            self._refuse(f"calls {ast.unparse(called)}")
        if _is_attribute_of(called, "self"):
            self._own_method(called.attr)
        elif _is_super(called):
            self._super_method(called.attr)
        else:
            self._pytorch_method(node, called)

    def _own_method(self, name: str) -> None:
        # Those of `nn.Module` register, move or call modules: none is arithmetic.
        if hasattr(nn.Module, name):
            raise RefusedError(f"it calls its {name}")
        self._reader.method(name)

    def _super_method(self, name: str) -> None:
        """Record what PyTorch's own forward, called through ``super()``, reads."""
        caller = self._function.__name__
        base = self._base_with(name)
        if base is None:
            self._refuse(f"calls {name} of super(), which has none")
        if not _is_pytorchs_norm(base, name):
            self._refuse(f"calls that of {base.__name__}")
        for attribute in ("normalized_shape", "weight", "bias", "eps"):
            if hasattr(self._reader.module, attribute):
                self._reader.attribute(attribute, caller)

    def _base_with(self, name: str) -> type | None:
        """Return the class that defines the method ``super().name``; None if there is none."""
        function = self._function
        is_after = False
        for cls in self._reader.cls.__mro__:
            if is_after and name in vars(cls):
                return cls
            # ``super()`` begins after the class that defines its caller.
            is_after = is_after or vars(cls).get(function.__name__) is function
        return None

    def _pytorch_method(self, node: ast.Call, called: ast.Attribute) -> None:
        """Check a call of a tensor's method, or of a function of a module of PyTorch's."""
        if called.attr not in _CALLED:
            self._refuse(f"calls {called.attr}")
        # The number of rows must not matter, only their length.
        if called.attr == "size" and not _is_last_size(node):
            self._refuse("uses its input's shape")
        if not _is_module(self._resolved(called.value)):
            self.visit(called.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._refuse("writes to the module")
        if _is_attribute_of(node, "self"):
            self._reader.attribute(node.attr, self._function.__name__)
            return
        owner = self._resolved(node.value)
        if _is_module(owner):
            # A dtype such as `torch.float32`, or a number such as `math.pi`.
            if not isinstance(getattr(owner, node.attr, None), (torch.dtype, float)):
                self._refuse(f"uses {ast.unparse(node)}")
        else:
            self._tensor_attribute(node)

    def _tensor_attribute(self, node: ast.Attribute) -> None:
        """Check an attribute of a tensor."""
        # The shape of a parameter is part of the case; that of the input is not.
        is_parameter_shape = node.attr == "shape" and _is_attribute_of(node.value, "self")
        if node.attr not in _TENSOR_ATTRIBUTES and not is_parameter_shape:
            self._refuse(f"uses {node.attr}")
        self.visit(node.value)

    def _resolved(self, node: ast.expr) -> Any:
        """Return the module of PyTorch that an expression names; anything else if it names none."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            return self._function.__globals__.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._resolved(node.value)
        if not _is_module(owner):
            return None
        return getattr(owner, node.attr, None)


# --- predicates -----------------------------------------------------------------------------------


def _is_self_contained(function: FunctionType) -> bool:
    """Whether the function's only free variable, if any, is that of ``super()``."""
    return function.__code__.co_freevars in ((), ("__class__",))


def _has_more_than_code(tree: ast.FunctionDef) -> bool:
    """Whether a method has decorators, or defaults, whose values are not in its code."""
    return any((tree.decorator_list, tree.args.defaults, tree.args.kw_defaults))


def _only_argument(arguments: ast.arguments) -> str:
    """Return the name of the one argument besides ``self``."""
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    others = (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs, *arguments.defaults)
    match names:
        case ["self", name] if not any(others):
            return name
        case [first, _] if first != "self" and not any(others):
            raise RefusedError(f"its forward calls its first argument {first}; name it self")
    raise RefusedError("its forward takes more than one tensor")


def _is_attribute_of(node: Any, name: str) -> bool:
    """Whether this reads an attribute of the name: ``self.x`` for "self"."""
    match node:
        case ast.Attribute(value=ast.Name(id=owner)):
            return owner == name
    return False


def _shape_of_last(node: ast.Subscript) -> ast.Attribute | None:
    """Return ``x.shape`` of ``x.shape[-1]`` or ``x.shape[-1:]``, the size of the last dimension."""
    if ast.unparse(node.slice) not in ("-1", "-1:"):
        return None
    match node.value:
        case ast.Attribute(attr="shape") as shape:
            return shape
    return None


def _is_last_size(node: ast.Call) -> bool:
    """Whether this call of ``size`` returns the size of the last dimension."""
    return ast.unparse(node).rpartition(".")[2] in ("size(-1)", "size(dim=-1)")


def _is_super(node: ast.Attribute) -> bool:
    """Whether this is an attribute of ``super()``."""
    match node.value:
        case ast.Call(func=ast.Name(id="super")):
            return True
    return False


def _is_pytorchs_norm(base: type, method: str) -> bool:
    """Whether this is the forward of a norm of torch.nn, and not patched."""
    if method != "forward" or base not in (nn.LayerNorm, nn.RMSNorm):
        return False
    return is_unpatched(base, method)


def _is_module(value: Any) -> bool:
    return any(value is module for module in _MODULES)


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, (tuple, list)):
        return False
    return all(isinstance(size, int) for size in value)


# --- the case -------------------------------------------------------------------------------------


class Case(NamedTuple):
    """All that decides what a module computes; hashable, so that equal modules are run once.

    Attributes:
        cls: the module's class.
        functions: the methods that were read.
        argument: the name of the forward's argument.
        vectors: names and sizes of the parameters and buffers.
        plain: names and values of the other attributes.
        numbers: the float literals in the methods.
    """

    cls: type[nn.Module]
    functions: tuple[Any, ...]
    argument: str
    vectors: tuple[tuple[str, int], ...]
    plain: tuple[tuple[str, Any], ...]
    numbers: tuple[float, ...]

    def floats(self) -> Iterator[tuple[str, float]]:
        """Yield the names and values of the attributes that are floats: the eps may be one."""
        for name, value in self.plain:
            if type(value) is float:
                yield name, value


def case_of(module: nn.Module) -> tuple[Case, tuple[str, ...]]:
    """Return the module's case, and the names of the methods that were read.

    Raises:
        RefusedError: its forward does more than arithmetic, or has more than two vectors.
    """
    if _has_own_lookup(type(module)):
        raise RefusedError("its attributes are not what they seem")
    reader = _Reader(type(module), module)
    reader.method("forward")
    vectors, plain = _sorted_attributes(module, reader.attributes)
    sizes = {size for _, size in vectors}
    if len(vectors) > 2 or len(sizes) > 1:
        raise RefusedError("it has more than a weight and a bias")
    case = Case(
        type(module),
        tuple(reader.functions.values()),
        reader.argument,
        tuple(vectors),
        tuple(plain),
        tuple(reader.numbers),
    )
    return case, tuple(reader.functions)


def _has_own_lookup(cls: type[nn.Module]) -> bool:
    """Whether ``self.x`` may run code of the class's: reading the forward would not show it."""
    if cls.__getattr__ is not nn.Module.__getattr__:
        return True
    return cls.__getattribute__ is not object.__getattribute__


def _sorted_attributes(
    module: nn.Module, names: dict[str, None]
) -> tuple[list[tuple[str, int]], list[tuple[str, Any]]]:
    """Return the tensors among the attributes with their sizes, and the others with their values.

    The weights' values are left out: modules that differ in them alone have one case.
    """
    vectors: list[tuple[str, int]] = []
    plain: list[tuple[str, Any]] = []
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, list):
            plain.append((name, tuple(value)))
        elif not isinstance(value, Tensor):
            plain.append((name, value))
        elif _is_vector(value):
            vectors.append((name, value.shape[0]))
        else:
            raise RefusedError(f"its {name} is no vector")
    return vectors, plain


def _is_vector(value: Tensor) -> bool:
    return value.dim() == 1 and value.is_floating_point()
