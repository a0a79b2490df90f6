"""Norms known by what they compute: a class's forward is read, run on small inputs, and compared with the operators.

Reading comes first: a forward that does nothing but arithmetic, without a branch on its input, computes one formula of
numbers everywhere, so that agreement on random rows is agreement. Which formula, and where it rounds, the runs tell. They
are on the CPU, on a module that is made for them: the one that is asked about is not touched.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.compat import cast_by_autocast, without_modes
from ..norms.reference import NormRule, Rounding, normalize
from .fingerprint import definition, digest, is_pytorchs

__all__ = ["Form", "form", "other_norm", "other_rounding", "same_code"]

_HALF = (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """What a norm computes, as its fused methods need to know.

    Attributes:
        kind: LayerNorm or RMSNorm.
        rounding: of RMSNorms the operators'; of LayerNorms, "llama" where a wider weight gives a wider output.
        offset: added to the weight.
        eps: the name of the module's attribute, or the number; None for the operators' own.
        weight: the weight's name; None for no weight.
        bias: the bias's name, of a LayerNorm; None for no bias.
        argument: what the forward calls its input.
        widened: whether it gives fp32 under GPU autocast, as `F.layer_norm` does.
        methods: those that were read.
        code: their digest.
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


# The output of a norm of this form, of that module.
Compute = Callable[[Form, nn.Module, Tensor], Tensor]


class _RefusedError(Exception):
    """Why a module is none of the operators' norms."""


# --- reading ----------------------------------------------------------------------------------------------------------

# What a forward may consist of; names, attributes, calls and branches are looked at one by one.
_NODES = (ast.Expr, ast.Return, ast.Assign, ast.AnnAssign, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Tuple, ast.List,
          ast.Subscript, ast.Slice, ast.keyword, ast.Name)  # fmt: skip
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)
# Methods of tensors, functions of torch and its functionals.
_CALLED = frozenset({
    "add", "contiguous", "div", "double", "expand", "expand_as", "float", "layer_norm", "mean", "mul", "norm", "pow",
    "reciprocal", "reshape", "rms_norm", "rsqrt", "size", "sqrt", "square", "std", "sub", "sum", "to", "true_divide", "type",
    "type_as", "unsqueeze", "var", "vector_norm", "view", "view_as",
})  # fmt: skip
_OF_TENSORS = frozenset({"dtype", "device"})
_MODULES = (torch, nn, nn.functional, torch.linalg, math)
_PLAIN = (bool, int, float, str, torch.dtype)


@dataclass
class _Read:
    """What a module's forward reads: of the module, and which numbers stand in it."""

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
        if not isinstance(function, FunctionType) or function.__code__.co_freevars not in ((), ("__class__",)):
            raise _RefusedError(f"its {name} is wrapped")
        if not digest(function):
            raise _RefusedError(f"its {name} cannot be read")
        self.functions[name] = function
        tree = definition(function)
        assert tree is not None
        taken = tree.args
        if name == "forward":
            names = [arg.arg for arg in (*taken.posonlyargs, *taken.args)]
            if (
                len(names) != 2
                or names[0] != "self"
                or taken.vararg
                or taken.kwonlyargs
                or taken.kwarg
                or taken.defaults
            ):
                raise _RefusedError("its forward takes more than one tensor")
            self.argument = names[1]
        if tree.decorator_list or taken.defaults or taken.kw_defaults:
            raise _RefusedError(f"its {name} is more than a plain method")
        for statement in tree.body[ast.get_docstring(tree) is not None :]:
            self._visit(statement, function)

    def _visit(self, node: Any, function: FunctionType) -> None:
        if isinstance(node, (ast.If, ast.IfExp)):
            self._branch(node, function)
        elif isinstance(node, ast.Call):
            self._call(node, function)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, function)
        elif _is_size(node):
            self._visit(node.value.value, function)
        elif isinstance(node, _NODES):
            self._leaf(node, function)
            skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
            for child in ast.iter_child_nodes(node):
                if child is not skipped:
                    self._visit(child, function)
        elif isinstance(node, (ast.While, ast.For, ast.Try, ast.With, ast.Compare, ast.BoolOp)):
            raise _RefusedError(f"its {function.__name__} branches, or changes what others see")
        elif not isinstance(node, (*_OPERATORS, ast.expr_context)):
            raise _RefusedError(f"its {function.__name__} does more than arithmetic")

    def _leaf(self, node: Any, function: FunctionType) -> None:
        """A name, which is to be a local one, or a number."""
        if isinstance(node, ast.Name) and (node.id == "self" or node.id not in function.__code__.co_varnames):
            raise _RefusedError(f"its {function.__name__} uses {node.id}")
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            raise _RefusedError(f"its {function.__name__} writes in place")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            raise _RefusedError(f"its {function.__name__} uses {node.value!r}")
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            self.numbers[node.value] = None

    def _branch(self, node: Any, function: FunctionType) -> None:
        """A branch on what the module is made of; on a parameter's dtype, both sides are read, or else the one taken."""
        if {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} - {"self", "torch"}:
            raise _RefusedError("its forward branches on its input")
        dtypes = False
        for part in ast.walk(node.test):
            if isinstance(part, ast.Attribute):
                if isinstance(part.value, ast.Name) and part.value.id == "self":
                    self._read(part.attr, function)
                elif part.attr == "dtype" and _of_self(part.value):
                    dtypes = True
                elif not isinstance(part.value, ast.Name) or part.value.id != "torch":
                    raise _RefusedError(f"its {function.__name__} branches on more than the module's attributes")
            elif not isinstance(part, (ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple, ast.List,
                                       ast.cmpop, ast.boolop, ast.unaryop, ast.expr_context)):  # fmt: skip
                raise _RefusedError(f"its {function.__name__} branches on more than the module's attributes")
        taken: list[Any] = [node.body, node.orelse]
        if not dtypes:
            code = compile(ast.Expression(node.test), "<test>", "eval")
            taken = [node.body if eval(code, {"torch": torch, "self": self.module}) else node.orelse]
        for side in taken:
            for child in side if isinstance(side, list) else [side]:
                self._visit(child, function)

    def _call(self, node: ast.Call, function: FunctionType) -> None:
        for argument in (*node.args, *node.keywords):
            self._visit(argument, function)
        called = node.func
        if not isinstance(called, ast.Attribute):
            raise _RefusedError(f"its {function.__name__} calls {ast.unparse(called)}")
        if _of_self(called):
            self._methods_call(called.attr)
        elif _is_super(called):
            self._supers(called.attr, function)
        elif called.attr not in _CALLED:
            raise _RefusedError(f"its {function.__name__} calls {called.attr}")
        elif called.attr == "size" and ast.unparse(node).rpartition(".")[2] not in ("size(-1)", "size(dim=-1)"):
            raise _RefusedError(f"its {function.__name__} uses its input's shape")
        elif not _is_module(_resolved(called.value, function)):
            self._visit(called.value, function)

    def _methods_call(self, name: str) -> None:
        if hasattr(nn.Module, name):
            raise _RefusedError(f"it calls its {name}")
        self.method(name)

    def _supers(self, name: str, function: FunctionType) -> None:
        """A call of PyTorch's own forward, of which is known what it reads."""
        mro = self.cls.__mro__
        owner = next(i for i, c in enumerate(mro) if vars(c).get(function.__name__) is function)
        base = next(c for c in mro[owner + 1 :] if name in vars(c))
        if name != "forward" or base not in (nn.LayerNorm, nn.RMSNorm) or not is_pytorchs(base, name):
            raise _RefusedError(f"its {function.__name__} calls that of {base.__name__}")
        for attribute in ("normalized_shape", "weight", "bias", "eps"):
            if hasattr(self.module, attribute):
                self._read(attribute, function)

    def _attribute(self, node: ast.Attribute, function: FunctionType) -> None:
        if isinstance(node.ctx, ast.Store):
            raise _RefusedError(f"its {function.__name__} writes to the module")
        if _of_self(node):
            self._read(node.attr, function)
        elif _is_module(_resolved(node.value, function)):
            if not isinstance(getattr(_resolved(node.value, function), node.attr, None), (torch.dtype, float)):
                raise _RefusedError(f"its {function.__name__} uses {ast.unparse(node)}")
        elif node.attr not in _OF_TENSORS and not (node.attr == "shape" and _of_self(node.value)):
            raise _RefusedError(f"its {function.__name__} uses {node.attr}")
        else:
            self._visit(node.value, function)

    def _read(self, name: str, function: FunctionType) -> None:
        if name == "training":
            raise _RefusedError("its forward hangs on its mode")
        module = self.module
        if name not in module._parameters and name not in module._buffers:
            if name not in vars(module) and not hasattr(self.cls, name):
                raise _RefusedError(f"it has no {name}")
            value = vars(module).get(name, getattr(self.cls, name, None))
            if not isinstance(value, (*_PLAIN, type(None))) and not _is_sizes(value):
                raise _RefusedError(f"its {function.__name__} reads its {name}")
        self.attributes[name] = None


def _of_self(node: Any) -> bool:
    """Whether this is an attribute of the module."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_size(node: Any) -> bool:
    """Whether this is the size of the last dimension: ``x.shape[-1]`` or ``x.shape[-1:]``."""
    shape = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return shape and ast.unparse(node.slice) in ("-1", "-1:")


def _is_super(node: ast.Attribute) -> bool:
    of = node.value
    return isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"


def _resolved(node: Any, function: FunctionType) -> Any:
    """The module of PyTorch that a name is, if it is one."""
    if isinstance(node, ast.Name) and node.id not in function.__code__.co_varnames:
        return function.__globals__.get(node.id)
    above = _resolved(node.value, function) if isinstance(node, ast.Attribute) else None
    return getattr(above, node.attr, None) if _is_module(above) else None


def _is_module(value: Any) -> bool:
    return any(value is module for module in _MODULES)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(size, int) for size in value)


# --- running ----------------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """All that decides what a module computes."""

    cls: type[nn.Module]
    functions: tuple[Any, ...]
    argument: str
    vectors: tuple[tuple[str, int], ...]
    plain: tuple[tuple[str, Any], ...]
    numbers: tuple[float, ...]


def _case(module: nn.Module) -> tuple[_Case, tuple[str, ...]]:
    """What the module computes hangs on this; and the methods that were read."""
    cls = type(module)
    if cls.__getattr__ is not nn.Module.__getattr__ or cls.__getattribute__ is not object.__getattribute__:
        raise _RefusedError("its attributes are not what they seem")
    read = _Read(cls, module)
    read.method("forward")
    vectors, plain = [], []
    for name in read.attributes:
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            if value.dim() != 1 or not value.is_floating_point():
                raise _RefusedError(f"its {name} is no vector")
            vectors.append((name, value.shape[0]))
        else:
            plain.append((name, tuple(value) if isinstance(value, list) else value))
    if len(vectors) > 2 or len({size for _, size in vectors}) > 1:
        raise _RefusedError("it has more than a weight and a bias")
    case = _Case(cls, tuple(read.functions.values()), read.argument, tuple(vectors), tuple(plain), tuple(read.numbers))
    return case, tuple(read.functions)


def _bare(case: _Case, dtype: torch.dtype, weights: dict[str, Tensor]) -> Any:
    """A module that computes what the case does, with these weights."""
    module: Any = object.__new__(case.cls)
    nn.Module.__init__(module)
    vars(module).update(case.plain)
    module._parameters.update({name: weight.to(dtype) for name, weight in weights.items()})
    return module


# What GPU autocast computes in fp32, of what may be called; PyTorch's own norms depending on its release.
_IN_FP32 = frozenset({"pow", "square", "rsqrt", "reciprocal", "__rdiv__", "__rpow__", "sum", "norm", "linalg_vector_norm",
                      "vector_norm"})  # fmt: skip


class _AsOnGpus(TorchFunctionMode):
    """Casts on a CPU what autocast casts on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _IN_FP32 or (name in ("layer_norm", "rms_norm") and cast_by_autocast(f"aten::{name}")):
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


_NO_NORM = "it computes no LayerNorm or RMSNorm of the last dimension"
# Of norms in fp32.
_NOT_HALF = "it does not take half precision"
_OTHER_AUTOCAST = "autocast changes what it computes"
_OTHER_ROUNDING = (
    "it rounds as none of the operators does; they compute in fp32, and round the result to the input's dtype"
)
_MEAN = 0.7  # of the rows, in their standard deviations


class _Probe:
    """A case, its weights, and rows of several scales."""

    def __init__(self, case: _Case, size: int) -> None:
        self.case, self.size = case, size
        generator = torch.Generator("cpu").manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

        self.weights = {name: 1.0 + 0.5 * random(size) for name, _ in case.vectors}
        self.epsilons = [e for _, e in case.plain if type(e) is float and 0.0 < e < 0.1]
        self.epsilons += [e for e in case.numbers if 0.0 < e < 0.1 and e not in self.epsilons]
        self.epsilons += [e for e in (1e-5,) if e not in self.epsilons]
        self.ordinary = random(2 * max(2, -(-256 // size)), size) + _MEAN
        self.small = torch.cat([math.sqrt(e) * (random(2, size) + _MEAN) for e in self.epsilons])

    def bare(self, dtype: torch.dtype = torch.float32) -> Any:
        return _bare(self.case, dtype, self.weights)

    def run(self, x: Tensor, dtype: torch.dtype = torch.float32, module: Any = None, shape: Any = (2,)) -> Tensor:
        """What the forward gives for these rows, laid out in that shape."""
        module = self.bare(dtype) if module is None else module
        laid_out = x.reshape(*shape, -1, self.size)
        y = self.case.cls.forward(module, laid_out)
        if not isinstance(y, Tensor) or y.shape != laid_out.shape:
            raise _RefusedError(_NO_NORM)
        return y.reshape(x.shape)


def _tried(probe: _Probe, x: Tensor, dtype: torch.dtype, shape: Any = (2,)) -> Tensor | None:
    """What the forward gives, or None where it raises: PyTorch's norms do, for some dtypes."""
    try:
        return probe.run(x, dtype, shape=shape)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return None


# fp32's rounding of some twenty operations, as a part of a row's largest number.
_FP32 = 4e-6


def _apart(y: Tensor, exact: Tensor, bound: float = _FP32) -> Tensor:
    """Which numbers differ by more than this part of their row's largest."""
    exact = exact.double()
    return ~((y.double() - exact).abs() <= bound * exact.abs().amax(-1, keepdim=True))


def _formulas(probe: _Probe) -> Iterator[Form]:
    """All that the operators compute, with these vectors; ordinary rows do not show the eps."""
    names = [name for name, _ in probe.case.vectors]
    first, second = (*names, None, None)[:2]
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    for kind, (weight, bias) in itertools.product(kinds, dict.fromkeys([(first, second), (second, first)])):
        if kind == "layer" or bias is None:
            for offset in (0.0,) if weight is None else (0.0, 1.0):
                yield Form(kind, "once", offset, None, weight, bias, probe.case.argument, False, (), "")


def _exactly(probe: _Probe, found: Form, x: Tensor, eps: float | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """A formula's values in fp64, of rows and weights of the given dtypes."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    weight, bias = [
        None if name is None else probe.weights[name].to(dtype).double() for name in (found.weight, found.bias)
    ]
    return normalize(x.double(), weight, bias, NormRule(found.kind, eps, found.offset))


def _with_eps(probe: _Probe, found: Form) -> Form | None:
    """The formula with its eps, an attribute that moves it or a number; None if there is none."""
    rows = torch.cat([probe.small, probe.ordinary])
    y = probe.run(rows)

    def agrees(eps: float | None, y: Tensor) -> bool:
        return not _apart(y, _exactly(probe, found, rows, eps)).any()

    for name, value in probe.case.plain:
        if type(value) is float and agrees(value, y):
            moved = probe.bare()
            setattr(moved, name, 3.0 * value + 1e-7)
            if agrees(getattr(moved, name), probe.run(rows, module=moved)):
                return found._replace(eps=name)
    numbers = (*probe.case.numbers, 1e-5, 0.0, *(() if found.kind == "layer" else (None,)))
    return next((found._replace(eps=e) for e in numbers if (e is None or e >= 0.0) and agrees(e, y)), None)


def _formula(probe: _Probe) -> Form:
    """The formula of a forward in fp32."""
    y, *others = [_tried(probe, probe.ordinary, torch.float32, shape) for shape in ((2,), (), (1, 2))]
    if y is None or not all(_equal(y, other) for other in others):
        raise _RefusedError(_NO_NORM)
    for tried in _formulas(probe):
        # Most are out before their eps is looked for, which moves an ordinary row but little.
        near = not _apart(y, _exactly(probe, tried, probe.ordinary, 0.0), _FP32 + 100 * max(probe.epsilons)).any()
        found = _with_eps(probe, tried) if near else None
        if found is not None:
            return found
    raise _RefusedError(_NO_NORM)


# Of rows and weights. Those that PyTorch's norms raise for are passed over, but for the first.
_DTYPES = (
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32), (torch.float64, torch.float64),
)  # fmt: skip


def _rounded(probe: _Probe, found: Form, compute: Compute) -> Form:
    """The form with its rounding: one that gives the same bits, or one that rounds less often than the forward."""
    runs = []
    for x_dtype, dtype in _DTYPES:
        # fp16 has no room for the squares of small rows, if that is where they are taken.
        rows = probe.ordinary if x_dtype == torch.float16 else torch.cat([probe.ordinary, probe.small])
        x = rows.to(x_dtype)
        y = _tried(probe, x, dtype)
        if y is not None:
            runs.append((x, dtype, y))
        with torch.autocast("cpu", torch.bfloat16):
            under = _tried(probe, x, dtype)
        if (y is None) is not (under is None) or (y is not None and not _equal(y, under)):
            raise _RefusedError(_OTHER_AUTOCAST)
    if not any(x.dtype in _HALF for x, _, _ in runs):
        raise _RefusedError(_NOT_HALF)
    roundings: tuple[Rounding, ...] = ("once", "llama") if found.kind == "layer" else ("once", "llama", "t5")
    for same in (_same_bits, _rounds_less):
        for rounding in roundings:
            tried = found._replace(rounding=rounding)
            if all(same(probe, tried, x, dtype, y, compute) for x, dtype, y in runs):
                return tried
    raise _RefusedError(_OTHER_ROUNDING)


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and torch.equal(a, b)


def _same_bits(probe: _Probe, tried: Form, x: Tensor, dtype: torch.dtype, y: Tensor, compute: Compute) -> bool:
    """But for a few, where the last bit of a sum tips a rounding."""
    ours = compute(tried, probe.bare(dtype), x)
    return ours.dtype == y.dtype and float(_apart(ours, y).double().mean()) < 0.02


def _rounds_less(probe: _Probe, tried: Form, x: Tensor, dtype: torch.dtype, y: Tensor, compute: Compute) -> bool:
    """The forward is off by a few roundings that the operator, which rounds once, does without."""
    module = probe.bare(dtype)
    if tried.rounding not in ("once", "llama" if tried.kind == "layer" else "once"):
        return False
    if compute(tried, module, x).dtype != y.dtype:
        return False
    eps = getattr(module, tried.eps) if isinstance(tried.eps, str) else tried.eps
    exact = _exactly(probe, tried, x, eps, dtype)
    # Of the product and of the bias, which may cancel.
    size = exact.abs()
    if tried.bias is not None:
        bias = module._parameters[tried.bias].double()
        size = (exact - bias).abs() + bias.abs()
    unit = max(torch.finfo(d).eps for d in (x.dtype, dtype if probe.weights else x.dtype, torch.float32)) / 2
    bound = 4 * unit * size + _FP32 * exact.abs().amax(-1, keepdim=True)
    return bool(((y.double() - exact).abs() <= bound).all())


def _autocast(probe: _Probe, found: Form, compute: Compute) -> Form:
    """The form with what GPU autocast makes of it: as without, or fp32 where that is all it does."""
    widened = set()
    for x_dtype, dtype in itertools.product(_HALF, (torch.float32, *_HALF)):
        x = probe.ordinary.to(x_dtype)
        y = _tried(probe, x, dtype)
        with _AsOnGpus():
            under = _tried(probe, x, dtype)
        if y is not None and under is not None:
            widened.add(not _equal(y, under))
            wide = compute(found, probe.bare(dtype), x.float())
            if widened == {True} and (
                found.rounding != "once" or under.dtype != torch.float32 or _apart(under, wide).any()
            ):
                raise _RefusedError(_OTHER_AUTOCAST)
    if len(widened) != 1:
        raise _RefusedError(_OTHER_AUTOCAST)
    return found._replace(widened=widened.pop())


_LONGEST = 2**16  # beyond, fp32 may not tell a sample's variance from the population's


@functools.lru_cache(maxsize=4096)
def _fitted(case: _Case, compute: Compute) -> Form | str:
    """The form of a case, but for the methods; or why there is none."""
    if case.vectors:
        sizes: tuple[int, ...] = (case.vectors[0][1],)
    else:
        known = [v[0] if isinstance(v, tuple) and len(v) == 1 else v for _, v in case.plain]
        sizes = next(((v,) for v in known if type(v) is int and v > 1), (24, 40))
    if not 4 <= min(sizes) <= max(sizes) <= _LONGEST:
        return "its vectors are too short or too long to tell"
    try:
        with without_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            forms = set()
            for size in sizes:
                probe = _Probe(case, size)
                forms.add(_autocast(probe, _rounded(probe, _formula(probe), compute), compute))
    except _RefusedError as refused:
        return str(refused)
    return forms.pop() if len(forms) == 1 else _NO_NORM


def _found(module: nn.Module, compute: Compute) -> Form | str:
    cls = type(module)
    if cls.__module__.startswith("torch.") or not hasattr(cls, "forward"):
        return ""
    if module._modules:
        return ""
    try:
        case, methods = _case(module)
    except _RefusedError as refused:
        return str(refused)
    found = _fitted(case, compute)
    if isinstance(found, str):
        return found
    return found._replace(methods=methods, code=digest(*case.functions))


def form(module: nn.Module, compute: Compute) -> Form | None:
    """What a module computes, if that is a LayerNorm or RMSNorm as ``compute`` computes them; PyTorch's own are left out."""
    found = _found(module, compute)
    return found if isinstance(found, Form) else None


def other_rounding(module: nn.Module, compute: Compute) -> str:
    """Why a module that computes a norm in fp32 is none to `form`; "" for others."""
    found = _found(module, compute)
    return found if isinstance(found, str) and found in (_NOT_HALF, _OTHER_AUTOCAST, _OTHER_ROUNDING) else ""


def other_norm(module: nn.Module, compute: Compute) -> str:
    """Why a module whose class is called a norm is none to `form`; "" for others."""
    found = _found(module, compute) if "Norm" in type(module).__name__ else ""
    return found if isinstance(found, str) else ""


def same_code(cls: type[nn.Module], found: Form) -> bool:
    """Whether the class has the code of which the form was made."""
    return digest(*[getattr(cls, name, None) for name in found.methods]) == found.code
