"""Recognises norms by what they compute: reads a class's forward, and runs it on small inputs.

Reading comes first. A forward that does nothing but arithmetic, without a branch on its input,
computes one formula for all inputs, so agreement on random rows proves agreement on all. The runs
then determine which of the operators' formulas that is, and where it rounds:

    _case            read the methods: attributes, numbers, no side effects
    _formula         in fp32: kind, weight, bias, offset and eps
    _with_rounding   in all dtypes: where it rounds
    _with_autocast   in half precision: whether GPU autocast widens the output

The runs are on the CPU, on a module that is created for them. The user's module is not changed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.compat.dispatch import cast_by_autocast, without_modes
from ..norms.reference import NormRule, Rounding, normalize
from .fingerprint import definition, digest, is_pytorchs

__all__ = ["Form", "form", "other_norm", "other_rounding", "same_code"]

_HALF = (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """The formula of a norm, as its fused methods need it.

    Attributes:
        kind: LayerNorm or RMSNorm.
        rounding: for RMSNorms the operators' rounding; for LayerNorms, "llama" if a wider weight
            gives a wider output.
        offset: the number added to the weight.
        eps: the name of the module's attribute, or the number; None for the operators' default.
        weight: the weight's name; None for no weight.
        bias: the bias's name, for a LayerNorm; None for no bias.
        argument: the name of the forward's argument.
        widened: whether it returns fp32 under GPU autocast, as `F.layer_norm` does.
        methods: the names of the methods that were read.
        code: the digest of these methods.
    """

    kind: Literal["layer", "rms"]
    rounding: Rounding
    offset: float
    eps: str | float | None
    weight: str | None
    bias: str | None
    argument: str
    widened: bool
    methods: tuple[str, ...]
    code: str


# Returns the output of a norm of this form, with the module's parameters.
Compute = Callable[[Form, nn.Module, Tensor], Tensor]


class _RefusedError(Exception):
    """The reason why a module is none of the operators' norms."""


# --- reading --------------------------------------------------------------------------------------

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
    ast.keyword,
    ast.expr_context,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Pow,
    ast.USub,
    ast.UAdd,
)
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
# Methods of tensors, and functions of torch and torch.nn.functional, that a forward may call.
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
_OF_TENSORS = frozenset({"dtype", "device"})
_MODULES = (torch, nn, nn.functional, torch.linalg, math)
_PLAIN = (bool, int, float, str, torch.dtype)


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
        if name in self.functions:
            return
        function = getattr(self.cls, name, None)
        if not isinstance(function, FunctionType) or not _is_plain(function):
            raise _RefusedError(f"its {name} is wrapped")
        if not digest(function):
            raise _RefusedError(f"its {name} cannot be read")
        self.functions[name] = function
        tree = definition(function)
        assert tree is not None
        if name == "forward":
            self.argument = _only_argument(tree.args)
        if tree.decorator_list or tree.args.defaults or tree.args.kw_defaults:
            raise _RefusedError(f"its {name} is more than a plain method")
        visitor = _MethodVisitor(self, function)
        has_docstring = ast.get_docstring(tree) is not None
        for statement in tree.body[has_docstring:]:
            visitor.visit(statement)

    def attribute(self, name: str, method: str) -> None:
        """Record an attribute that a method reads, which must be a tensor or a plain value."""
        if name == "training":
            raise _RefusedError("its forward hangs on its mode")
        if not self._is_tensor(name):
            if name not in vars(self.module) and not hasattr(self.cls, name):
                raise _RefusedError(f"it has no {name}")
            value = vars(self.module).get(name, getattr(self.cls, name, None))
            if not isinstance(value, (*_PLAIN, type(None))) and not _is_sizes(value):
                raise _RefusedError(f"its {method} reads its {name}")
        self.attributes[name] = None

    def _is_tensor(self, name: str) -> bool:
        return name in self.module._parameters or name in self.module._buffers


class _MethodVisitor(ast.NodeVisitor):
    """Reads the body of one method; raises `_RefusedError` unless it is arithmetic."""

    def __init__(self, reader: _Reader, function: FunctionType) -> None:
        self._reader, self._function = reader, function
        self._locals = function.__code__.co_varnames

    def _refuse(self, reason: str) -> NoReturn:
        raise _RefusedError(f"its {self._function.__name__} {reason}")

    def generic_visit(self, node: ast.AST) -> None:
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
        if node.id == "self" or node.id not in self._locals:
            self._refuse(f"uses {node.id}")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._refuse(f"uses {node.value!r}")
        if isinstance(node.value, float):
            self._reader.numbers[node.value] = None

    def visit_Subscript(self, node: ast.Subscript) -> None:
        shape = _shape_of_last(node)
        if shape is not None:
            self.visit(shape.value)
            return
        if isinstance(node.ctx, ast.Store):
            self._refuse("writes in place")
        for child in (node.value, node.slice):
            self.visit(child)

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
        names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
        if names - {"self", "torch"}:
            raise _RefusedError("its forward branches on its input")
        on_dtype = False
        for part in ast.walk(test):
            if self._reads_dtype(part):
                on_dtype = True
        if on_dtype:
            return [body, orelse]
        code = compile(ast.Expression(test), "<test>", "eval")
        holds = eval(code, {"torch": torch, "self": self._reader.module})
        return [body if holds else orelse]

    def _reads_dtype(self, part: ast.AST) -> bool:
        """Record a node of a condition; return whether it is a parameter's dtype."""
        allowed = isinstance(part, _IN_CONDITIONS)
        if isinstance(part, ast.Attribute):
            if _of_name(part, "self"):
                self._reader.attribute(part.attr, self._function.__name__)
                return False
            if part.attr == "dtype" and _of_name(part.value, "self"):
                return True
            allowed = _of_name(part, "torch")
        if not allowed:
            self._refuse("branches on more than the module's attributes")
        return False

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        called = node.func
        if not isinstance(called, ast.Attribute):
            self._refuse(f"calls {ast.unparse(called)}")
        if _of_name(called, "self"):
            self._own_method(called.attr)
        elif _is_super(called):
            self._super_method(called.attr)
        elif called.attr not in _CALLED:
            self._refuse(f"calls {called.attr}")
        elif called.attr == "size" and not _is_last_size(node):
            self._refuse("uses its input's shape")
        elif not _is_module(self._resolved(called.value)):
            self.visit(called.value)

    def _own_method(self, name: str) -> None:
        if hasattr(nn.Module, name):
            raise _RefusedError(f"it calls its {name}")
        self._reader.method(name)

    def _super_method(self, name: str) -> None:
        """Record what PyTorch's own forward, called through ``super()``, reads."""
        caller, mro = self._function.__name__, self._reader.cls.__mro__
        owner = next(i for i, c in enumerate(mro) if vars(c).get(caller) is self._function)
        base = next(c for c in mro[owner + 1 :] if name in vars(c))
        is_norm = name == "forward" and base in (nn.LayerNorm, nn.RMSNorm)
        if not is_norm or not is_pytorchs(base, name):
            self._refuse(f"calls that of {base.__name__}")
        for attribute in ("normalized_shape", "weight", "bias", "eps"):
            if hasattr(self._reader.module, attribute):
                self._reader.attribute(attribute, caller)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._refuse("writes to the module")
        if _of_name(node, "self"):
            self._reader.attribute(node.attr, self._function.__name__)
            return
        owner = self._resolved(node.value)
        if _is_module(owner):
            if not isinstance(getattr(owner, node.attr, None), (torch.dtype, float)):
                self._refuse(f"uses {ast.unparse(node)}")
            return
        parameter_shape = node.attr == "shape" and _of_name(node.value, "self")
        if node.attr not in _OF_TENSORS and not parameter_shape:
            self._refuse(f"uses {node.attr}")
        self.visit(node.value)

    def _resolved(self, node: ast.expr) -> Any:
        """Return the module of PyTorch that an expression names; anything else if it names none."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            return self._function.__globals__.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._resolved(node.value)
        return getattr(owner, node.attr, None) if _is_module(owner) else None


def _is_plain(function: FunctionType) -> bool:
    """Whether the function's only free variable, if any, is that of ``super()``."""
    return function.__code__.co_freevars in ((), ("__class__",))


def _only_argument(arguments: ast.arguments) -> str:
    """Return the name of the one argument besides ``self``."""
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    others = (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs, *arguments.defaults)
    if len(names) != 2 or names[0] != "self" or any(others):
        raise _RefusedError("its forward takes more than one tensor")
    return names[1]


def _of_name(node: Any, name: str) -> bool:
    """Whether this is an attribute of this name: ``self.x`` for "self"."""
    if not isinstance(node, ast.Attribute):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == name


def _shape_of_last(node: ast.Subscript) -> ast.Attribute | None:
    """Return ``x.shape`` of ``x.shape[-1]`` or ``x.shape[-1:]``, the size of the last dimension."""
    shape = node.value
    if not isinstance(shape, ast.Attribute) or shape.attr != "shape":
        return None
    return shape if ast.unparse(node.slice) in ("-1", "-1:") else None


def _is_last_size(node: ast.Call) -> bool:
    """Whether this call of ``size`` returns the size of the last dimension."""
    return ast.unparse(node).rpartition(".")[2] in ("size(-1)", "size(dim=-1)")


def _is_super(node: ast.Attribute) -> bool:
    """Whether this is an attribute of ``super()``."""
    called = node.value.func if isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "super"


def _is_module(value: Any) -> bool:
    return any(value is module for module in _MODULES)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(size, int) for size in value)


# --- running --------------------------------------------------------------------------------------


class _Case(NamedTuple):
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


def _case(module: nn.Module) -> tuple[_Case, tuple[str, ...]]:
    """Return the module's case, and the names of the methods that were read."""
    cls = type(module)
    has_own_lookup = (
        cls.__getattr__ is not nn.Module.__getattr__
        or cls.__getattribute__ is not object.__getattribute__
    )
    if has_own_lookup:
        raise _RefusedError("its attributes are not what they seem")
    reader = _Reader(cls, module)
    reader.method("forward")
    vectors, plain = [], []
    for name in reader.attributes:
        value = getattr(module, name, None)
        if not isinstance(value, Tensor):
            plain.append((name, tuple(value) if isinstance(value, list) else value))
        elif value.dim() == 1 and value.is_floating_point():
            vectors.append((name, value.shape[0]))
        else:
            raise _RefusedError(f"its {name} is no vector")
    if len(vectors) > 2 or len({size for _, size in vectors}) > 1:
        raise _RefusedError("it has more than a weight and a bias")
    case = _Case(
        cls,
        tuple(reader.functions.values()),
        reader.argument,
        tuple(vectors),
        tuple(plain),
        tuple(reader.numbers),
    )
    return case, tuple(reader.functions)


def _bare(case: _Case, dtype: torch.dtype, weights: dict[str, Tensor]) -> Any:
    """Create a module that computes what the case does, with these weights."""
    # The class's own initializer may need arguments, or allocate on another device.
    module: Any = object.__new__(case.cls)
    nn.Module.__init__(module)
    vars(module).update(case.plain)
    module._parameters.update({name: weight.to(dtype) for name, weight in weights.items()})
    return module


# Functions in ``_CALLED`` that GPU autocast computes in fp32 in every release of PyTorch. Its own
# norms are looked up: they depend on the release.
_IN_FP32 = frozenset(
    {
        "pow",
        "square",
        "rsqrt",
        "reciprocal",
        "__rdiv__",
        "__rpow__",
        "sum",
        "norm",
        "linalg_vector_norm",
        "vector_norm",
    }
)


class _AsOnGpus(TorchFunctionMode):
    """Makes functions on a CPU cast their arguments as autocast does on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cast_to_fp32(getattr(func, "__name__", "")):
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_cast_to_fp32(name: str) -> bool:
    if name in ("layer_norm", "rms_norm"):
        return cast_by_autocast(f"aten::{name}")
    return name in _IN_FP32


def _wide(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in _HALF
    return value.float() if is_half else value


_NO_NORM = "it computes no LayerNorm or RMSNorm of the last dimension"
# These are reasons for modules that compute a norm in fp32.
_NOT_HALF = "it does not take half precision"
_OTHER_AUTOCAST = "autocast changes what it computes"
_OTHER_ROUNDING = (
    "it rounds as none of the operators does; they compute in fp32, and round the result to the "
    "input's dtype"
)
# The mean of the random rows, in their standard deviations. LayerNorm and RMSNorm differ on rows
# whose mean is not 0.
_MEAN = 0.7


class _Probe:
    """A case, its weights, and rows of several scales."""

    def __init__(self, case: _Case, size: int) -> None:
        self.case, self.size = case, size
        generator = torch.Generator("cpu").manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

        self.weights = {name: 1.0 + 0.5 * random(size) for name, _ in case.vectors}
        self.epsilons = [e for _, e in case.plain if type(e) is float and 0.0 < e < 0.1]
        for e in (*case.numbers, 1e-5):
            if 0.0 < e < 0.1 and e not in self.epsilons:
                self.epsilons.append(e)
        # An even number of rows, since `run` splits them in two; about 512 elements at least.
        self.ordinary = random(2 * max(2, -(-256 // size)), size) + _MEAN
        # Rows whose variance is about an eps, so that the eps decides the result.
        self.small = torch.cat([math.sqrt(e) * (random(2, size) + _MEAN) for e in self.epsilons])

    def bare(self, dtype: torch.dtype = torch.float32) -> Any:
        return _bare(self.case, dtype, self.weights)

    def run(
        self, x: Tensor, dtype: torch.dtype = torch.float32, module: Any = None, shape: Any = (2,)
    ) -> Tensor:
        """Return the forward's output for these rows, reshaped to these leading dimensions."""
        module = self.bare(dtype) if module is None else module
        reshaped = x.reshape(*shape, -1, self.size)
        y = self.case.cls.forward(module, reshaped)
        if not isinstance(y, Tensor) or y.shape != reshaped.shape:
            raise _RefusedError(_NO_NORM)
        return y.reshape(x.shape)


def _run_or_none(probe: _Probe, x: Tensor, dtype: torch.dtype, shape: Any = (2,)) -> Tensor | None:
    """Return the forward's output, or None if it raises: PyTorch's norms do, for some dtypes."""
    try:
        return probe.run(x, dtype, shape=shape)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return None


# fp32's rounding of some twenty operations, relative to a row's largest number.
_FP32 = 4e-6


def _differs(y: Tensor, exact: Tensor, bound: float = _FP32) -> Tensor:
    """Return which numbers differ by more than this part of their row's largest."""
    exact = exact.double()
    # Negated, so that NaN counts as different.
    return ~((y.double() - exact).abs() <= bound * exact.abs().amax(-1, keepdim=True))


def _formulas(probe: _Probe) -> Iterator[Form]:
    """Yield each formula of the operators, with these vectors in either role and without an eps."""
    names = [name for name, _ in probe.case.vectors]
    first, second = (*names, None, None)[:2]
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    roles = dict.fromkeys([(first, second), (second, first)])
    for kind, (weight, bias) in itertools.product(kinds, roles):
        if kind == "rms" and bias is not None:
            continue
        # Some RMSNorms store their weight minus one.
        for offset in (0.0,) if weight is None else (0.0, 1.0):
            yield Form(
                kind=kind,
                rounding="once",
                offset=offset,
                eps=None,
                weight=weight,
                bias=bias,
                argument=probe.case.argument,
                widened=False,
                methods=(),
                code="",
            )


def _exact(
    probe: _Probe,
    candidate: Form,
    x: Tensor,
    eps: float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a formula's values in fp64, for rows and weights of these dtypes."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps

    def vector(name: str | None) -> Tensor | None:
        return None if name is None else probe.weights[name].to(dtype).double()

    rule = NormRule(candidate.kind, eps, candidate.offset)
    return normalize(x.double(), vector(candidate.weight), vector(candidate.bias), rule)


def _with_eps(probe: _Probe, candidate: Form) -> Form | None:
    """Return the formula with its eps, an attribute or else a number; None if none agrees."""
    rows = torch.cat([probe.small, probe.ordinary])
    y = probe.run(rows)

    def agrees(eps: float | None, y: Tensor) -> bool:
        return not _differs(y, _exact(probe, candidate, rows, eps)).any()

    for name, value in probe.case.plain:
        if type(value) is float and agrees(value, y):
            # An equal number elsewhere would agree too; only the eps changes the output with it.
            changed = probe.bare()
            setattr(changed, name, 3.0 * value + 1e-7)
            if agrees(getattr(changed, name), probe.run(rows, module=changed)):
                return candidate._replace(eps=name)
    numbers: list[float | None] = [e for e in (*probe.case.numbers, 1e-5, 0.0) if e >= 0.0]
    if candidate.kind == "rms":
        numbers.append(None)
    for number in numbers:
        if agrees(number, y):
            return candidate._replace(eps=number)
    return None


def _formula(probe: _Probe) -> Form:
    """Return the formula of a forward in fp32."""
    # The result for a row must not depend on how the rows are laid out.
    y, *others = [
        _run_or_none(probe, probe.ordinary, torch.float32, shape) for shape in ((2,), (), (1, 2))
    ]
    if y is None or not all(_equal(y, other) for other in others):
        raise _RefusedError(_NO_NORM)
    # The eps changes ordinary rows little, so most candidates are rejected before theirs is sought.
    bound = _FP32 + 100 * max(probe.epsilons)
    for candidate in _formulas(probe):
        without_eps = _exact(probe, candidate, probe.ordinary, 0.0)
        if _differs(y, without_eps, bound).any():
            continue
        formula = _with_eps(probe, candidate)
        if formula is not None:
            return formula
    raise _RefusedError(_NO_NORM)


# The dtypes of rows and of weights. Pairs for which PyTorch's norms raise are skipped, but not all
# half-precision ones may be.
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
)


class _Run(NamedTuple):
    """Rows, the dtype of the weights, and the forward's output."""

    x: Tensor
    dtype: torch.dtype
    y: Tensor


def _runs(probe: _Probe) -> list[_Run]:
    """Run the forward in all dtypes, for which CPU autocast must change nothing."""
    runs = []
    for x_dtype, dtype in _DTYPES:
        # fp16 cannot represent the squares of small rows, if the forward squares in fp16.
        rows = [probe.ordinary] if x_dtype == torch.float16 else [probe.ordinary, probe.small]
        x = torch.cat(rows).to(x_dtype)
        y = _run_or_none(probe, x, dtype)
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = _run_or_none(probe, x, dtype)
        if not _equal(y, under_autocast):
            raise _RefusedError(_OTHER_AUTOCAST)
        if y is not None:
            runs.append(_Run(x, dtype, y))
    return runs


def _with_rounding(probe: _Probe, candidate: Form, compute: Compute) -> Form:
    """Return the form with its rounding.

    A rounding that gives the same bits comes first, then one that rounds less often than the
    forward.
    """
    runs = _runs(probe)
    if not any(run.x.dtype in _HALF for run in runs):
        raise _RefusedError(_NOT_HALF)
    roundings: tuple[Rounding, ...] = ("once", "llama")
    if candidate.kind == "rms":
        roundings = ("once", "llama", "t5")
    for agrees in (_same_bits, _rounds_less):
        for rounding in roundings:
            rounded = candidate._replace(rounding=rounding)
            if all(agrees(probe, rounded, run, compute) for run in runs):
                return rounded
    raise _RefusedError(_OTHER_ROUNDING)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two outputs have the same dtype and bits, or neither exists."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def _same_bits(probe: _Probe, candidate: Form, run: _Run, compute: Compute) -> bool:
    """Whether almost all bits agree; the last bit of a sum may change a rounding."""
    ours = compute(candidate, probe.bare(run.dtype), run.x)
    return ours.dtype == run.y.dtype and float(_differs(ours, run.y).double().mean()) < 0.02


def _rounds_less(probe: _Probe, candidate: Form, run: _Run, compute: Compute) -> bool:
    """Whether the forward's error is a few roundings, which the operator, with one, avoids."""
    x, dtype, y = run
    module = probe.bare(dtype)
    rounding_once = ("once", "llama") if candidate.kind == "layer" else ("once",)
    if candidate.rounding not in rounding_once:
        return False
    if compute(candidate, module, x).dtype != y.dtype:
        return False
    eps = getattr(module, candidate.eps) if isinstance(candidate.eps, str) else candidate.eps
    exact = _exact(probe, candidate, x, eps, dtype)
    # The sizes of the product and of the bias are added, since the two may cancel.
    size = exact.abs()
    if candidate.bias is not None:
        bias = module._parameters[candidate.bias].double()
        size = (exact - bias).abs() + bias.abs()
    dtypes = {x.dtype, torch.float32}
    if probe.weights:
        dtypes.add(dtype)
    unit = max(torch.finfo(d).eps for d in dtypes) / 2
    bound = 4 * unit * size + _FP32 * exact.abs().amax(-1, keepdim=True)
    return bool(((y.double() - exact).abs() <= bound).all())


def _with_autocast(probe: _Probe, candidate: Form, compute: Compute) -> Form:
    """Return the form with what GPU autocast changes: nothing, or the output's dtype to fp32.

    All pairs of dtypes must agree on which of the two it is.
    """
    widened = set()
    for x_dtype, dtype in itertools.product(_HALF, (torch.float32, *_HALF)):
        x = probe.ordinary.to(x_dtype)
        y = _run_or_none(probe, x, dtype)
        with _AsOnGpus():
            under_autocast = _run_or_none(probe, x, dtype)
        if y is None or under_autocast is None:
            continue
        widened.add(not _equal(y, under_autocast))
        wide = compute(candidate, probe.bare(dtype), x.float())
        if widened == {True}:
            rounds_once = candidate.rounding == "once" and under_autocast.dtype == torch.float32
            if not rounds_once or _differs(under_autocast, wide).any():
                raise _RefusedError(_OTHER_AUTOCAST)
    if len(widened) != 1:
        raise _RefusedError(_OTHER_AUTOCAST)
    return candidate._replace(widened=widened.pop())


_LONGEST = 2**16  # beyond, fp32 may not tell a sample's variance from the population's


def _sizes(case: _Case) -> tuple[int, ...]:
    """Return the row sizes to run: that of the vectors, one among the attributes, or any two."""
    if case.vectors:
        return (case.vectors[0][1],)
    for _, value in case.plain:
        # For example `normalized_shape`.
        size = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        if type(size) is int and size > 1:
            return (size,)
    return (24, 40)


@functools.lru_cache(maxsize=4096)
def _fitted(case: _Case, compute: Compute) -> Form | str:
    """Return the form of a case, without methods and code; or why it has none."""
    sizes = _sizes(case)
    if not 4 <= min(sizes) <= max(sizes) <= _LONGEST:
        return "its vectors are too short or too long to tell"
    forms = set()
    try:
        with without_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for size in sizes:
                probe = _Probe(case, size)
                rounded = _with_rounding(probe, _formula(probe), compute)
                forms.add(_with_autocast(probe, rounded, compute))
    except _RefusedError as refused:
        return str(refused)
    return forms.pop() if len(forms) == 1 else _NO_NORM


def _form_or_reason(module: nn.Module, compute: Compute) -> Form | str:
    """Return the module's form, or why it has none; "" for modules that are no candidates."""
    cls = type(module)
    if cls.__module__.startswith("torch.") or not hasattr(cls, "forward"):
        return ""
    if module._modules:
        return ""
    try:
        case, methods = _case(module)
    except _RefusedError as refused:
        return str(refused)
    result = _fitted(case, compute)
    if isinstance(result, str):
        return result
    return result._replace(methods=methods, code=digest(*case.functions))


def form(module: nn.Module, compute: Compute) -> Form | None:
    """Return the form of a module that computes a norm as ``compute`` does; None for others.

    PyTorch's own norms have none.
    """
    result = _form_or_reason(module, compute)
    return result if isinstance(result, Form) else None


def other_rounding(module: nn.Module, compute: Compute) -> str:
    """Return why a module that computes a norm in fp32 has no `form`; "" for other modules."""
    result = _form_or_reason(module, compute)
    if not isinstance(result, str):
        return ""
    return result if result in (_NOT_HALF, _OTHER_AUTOCAST, _OTHER_ROUNDING) else ""


def other_norm(module: nn.Module, compute: Compute) -> str:
    """Return why a module whose class is named like a norm has no `form`; "" for other modules."""
    if "Norm" not in type(module).__name__:
        return ""
    result = _form_or_reason(module, compute)
    return result if isinstance(result, str) else ""


def same_code(cls: type[nn.Module], known: Form) -> bool:
    """Whether the class still has the code from which this form was derived."""
    return digest(*[getattr(cls, name, None) for name in known.methods]) == known.code
