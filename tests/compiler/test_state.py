"""`fusedops.rowwise`: each call sees the current values of all variables that the function reads.

Where the compiler cannot detect a change, it refuses the function and names the variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import random
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops.backend import entry
from fusedops.compiler import function as function_module
from fusedops.compiler import programs, state, walking
from fusedops.compiler.bytecode import reads_of
from fusedops.core.random.dropout import none
from rowwise_checks import every, kernels, randn, results
from rowwise_functions import RowwiseFunction, Sign
from support import DEVICE

# A case is a generator. It first yields the function to fuse. Each time that it is resumed, it
# changes a value that this function reads, and yields again. Only the first function is fused, so
# many cases yield an arbitrary `lambda x: x` after a change. A case whose name ends in
# `as_an_argument` yields a function that returns the function to fuse and its arguments.
Case = Iterator[Callable[..., Any]]
CASES: dict[str, Callable[[], Case]] = {}


def register(case: Callable[[], Case]) -> Callable[[], Case]:
    """Adds a case to those of `test_change_is_seen`."""
    CASES[case.__name__] = case
    return case


def times(number: Any) -> Callable[[Tensor], Tensor]:
    """Returns a function that multiplies by ``number``."""
    return lambda x: x * number


# --- variables and functions ----------------------------------------------------------------------


@register
def closure() -> Case:
    k: Any = 2.0
    yield lambda x: torch.where(x > 0, k, x)
    for k in (3.0, 0.0, -0.0, 3, True):  # noqa: B007
        yield lambda x: x


@register
def global_variable() -> Case:
    scope: dict[str, Any] = {"k": 2.0}
    exec("def f(x): return x * k", scope)
    yield scope["f"]
    scope["k"] = 3.0
    yield scope["f"]
    scope["k"] = float("nan")
    yield scope["f"]


@register
def name_of_a_builtin() -> Case:
    scope: dict[str, Any] = {}
    exec("def f(x): return x * max(2.0, 1.0)", scope)
    yield scope["f"]
    scope["max"] = lambda a, b: a + b
    yield scope["f"]


@register
def helper() -> Case:
    act = times(2.0)
    yield lambda x: act(x)
    act = torch.exp
    yield lambda x: x
    act = lambda x: x + 5.0  # noqa: E731
    yield lambda x: x


@register
def helper_with_a_closure() -> Case:
    act = times(2.0)
    yield lambda x: act(x)
    act = times(3.0)  # the same code object, another value in its closure
    yield lambda x: x


@register
def default_of_a_helper() -> Case:
    def act(x: Tensor, k: float = 2.0, *, shift: float = 1.0) -> Tensor:
        return x * k + shift

    yield lambda x: act(x)
    act.__defaults__ = (3.0,)
    yield lambda x: x
    act.__kwdefaults__ = {"shift": 4.0}
    yield lambda x: x


@register
def number_of_a_helpers_helper() -> Case:
    k = 2.0
    inner = lambda x: x * k  # noqa: E731
    outer = lambda x: inner(x) + 1  # noqa: E731
    yield lambda x: outer(x)
    k = 3.0
    yield lambda x: x


@register
def lambda_within() -> Case:
    k = 2.0
    yield lambda x: (lambda y: y * k)(x)
    k = 3.0
    yield lambda x: x


@register
def recursive() -> Case:
    k = 2.0

    def f(x: Tensor, depth: int = 2) -> Tensor:
        return f(x * k, depth - 1) if depth else x

    yield lambda x: f(x)
    k = 3.0
    yield lambda x: x


@register
def partial() -> Case:
    act: Any = functools.partial(torch.mul, other=2.0)
    yield lambda x: act(x)
    act = functools.partial(torch.mul, other=3.0)
    yield lambda x: x
    act = functools.partial(times(4.0))
    yield lambda x: x


@register
def bound_method() -> Case:
    owner = types.SimpleNamespace(k=2.0)
    act: Any = types.MethodType(lambda self, x: x * self.k, owner)
    yield lambda x: act(x)
    owner.k = 3.0
    yield lambda x: x
    act = types.MethodType(lambda self, x: x + self.k, owner)
    yield lambda x: x


@register
def rowwise_function() -> Case:
    k = 2.0
    inner = fusedops.rowwise(lambda x: x * k)
    yield lambda x: inner(x) + 1
    k = 3.0
    yield lambda x: x
    inner = fusedops.rowwise(lambda x: x + k)
    yield lambda x: x


@register
def default_of_a_rowwise_function() -> Case:
    scope: dict[str, Any] = {"rowwise": fusedops.rowwise}
    texts = (
        "def act(x, k=2.0, *, shift=1.0): return x * k + shift",
        "def act(x, k=3.0, *, shift=1.0): return x * k + shift",
        "def act(x, k=3.0, *, shift=4.0): return x * k + shift",
        "def act(x, k=3.0): return x - k",
    )
    exec(f"@rowwise\n{texts[0]}\ndef f(x): return act(x)", scope)
    yield scope["f"]
    for text in texts[1:]:
        exec(f"@rowwise\n{text}", scope)
        yield scope["f"]


@register
def python_module() -> Case:
    settings = types.ModuleType("settings_of_a_case")
    settings.k, settings.act = 2.0, times(2.0)  # type: ignore[attr-defined]
    yield lambda x: settings.act(x) * settings.k
    settings.k = 3.0  # type: ignore[attr-defined]
    yield lambda x: x
    settings.act = times(4.0)  # type: ignore[attr-defined]
    yield lambda x: x


@register
def attributes_of_functions() -> Case:
    def act(x: Tensor) -> Tensor:
        return x * act.scale * act.__wrapped__.scale  # type: ignore[attr-defined]

    inner: Any = fusedops.rowwise(times(2.0))
    partial: Any = functools.partial(torch.mul, other=2.0)
    for owner in (act, inner, partial):
        owner.scale = 2.0
    act.__wrapped__ = partial  # type: ignore[attr-defined]

    def f(x: Tensor) -> Tensor:
        x = act(x) + inner(x) * inner.scale + partial(x) * partial.scale
        return x * f.scale * getattr(act, "shift", 1.0)  # type: ignore[attr-defined]

    f.scale = 2.0  # type: ignore[attr-defined]
    yield f
    for owner in (act, inner, partial, f):
        owner.scale = 3.0
        yield f
    act.shift = 4.0  # type: ignore[attr-defined]
    yield f


@register
def name_of_a_function() -> Case:
    act, scales = times(2.0), {"relu": 2.0, "silu": 3.0}
    act.__name__ = "relu"
    yield lambda x: act(x) * scales[act.__name__]
    act.__name__ = "silu"
    yield lambda x: x


# --- variables and attributes that are set after the first call -----------------------------------


class Slots:
    __slots__ = ("flag", "scale")


def _later(owner: Any) -> Case:
    """Sets an attribute that the first trace did not read, then changes it."""
    owner.flag = False
    f = lambda x: x * owner.scale if owner.flag else x  # noqa: E731
    yield f
    owner.flag, owner.scale = True, 2.0
    yield f
    owner.scale = 3.0
    yield f
    owner.flag = False
    yield f
    owner.flag, owner.scale = True, 4.0
    yield f


for _kind in (types.SimpleNamespace, Slots, nn.Module):
    CASES[f"later_in_{_kind.__name__}"] = lambda kind=_kind: _later(kind())  # type: ignore[misc]
CASES["later_in_a_class"] = lambda: _later(type("Config", (), {}))


@register
def later_in_a_closure() -> Case:
    flag = False
    if flag:
        k = 1.0
    yield lambda x: x * k if flag else x
    flag, k = True, 2.0
    yield lambda x: x
    k = 3.0
    yield lambda x: x


def _caught(owner: Any) -> Case:
    """Sets attributes that are missing at first: a helper reads one, a property another.

    The function catches the AttributeError of the helper; `getattr` catches that of the property.
    """

    class Config:
        @property
        def doubled(self) -> Any:
            return 2.0 * owner.shift

    config = Config()
    helper = lambda x: x * owner.scale  # noqa: E731

    def f(x: Tensor) -> Tensor:
        x = x * getattr(config, "doubled", 1.0)
        try:
            return helper(x)
        except AttributeError:
            return x

    yield f
    for number in (2.0, 3.0):
        owner.scale = number
        yield f
        owner.shift = number
        yield f
    del owner.scale
    yield f


class MoreSlots(Slots):
    __slots__ = ("shift",)


for _kind in (types.SimpleNamespace, MoreSlots, nn.Module):
    CASES[f"caught_in_{_kind.__name__}"] = lambda kind=_kind: _caught(kind())  # type: ignore[misc]
CASES["caught_in_a_class"] = lambda: _caught(type("Config", (), {}))
CASES["caught_in_a_module_of_python"] = lambda: _caught(types.ModuleType("settings_of_a_case"))


@register
def caught_in_a_closure() -> Case:
    def f(x: Tensor) -> Tensor:
        try:
            return x * k
        except NameError:
            return x

    yield f
    for k in (2.0, 3.0):  # noqa: B007
        yield f
    del k
    yield f


@register
def caught_by_a_manager() -> Case:
    config, ignored = types.SimpleNamespace(), contextlib.suppress(AttributeError)

    def f(x: Tensor) -> Tensor:
        with torch.enable_grad(), ignored:
            return x * config.scale
        return x

    yield f
    config.scale = 2.0
    yield f


@register
def computed_and_absent() -> Case:
    config, field = types.SimpleNamespace(alpha=2.0), "alpha"
    yield lambda x: x * getattr(config, field, "none") + getattr(config, field + "_2", 1.0)
    config.alpha = 3.0
    yield lambda x: x
    config.alpha_2 = 4.0
    yield lambda x: x


# --- containers and objects -----------------------------------------------------------------------


@register
def dict_of_numbers() -> Case:
    rope: dict[str, Any] = {"factor": 2.0, "other": [1]}
    yield lambda x: x * rope["factor"] + rope.get("shift", 0.0)
    rope["factor"] = 3.0
    yield lambda x: x
    rope["shift"] = 1.0
    yield lambda x: x


@register
def dict_of_functions() -> Case:
    acts: dict[str, Any] = {"a": torch.tanh, "b": times(2.0)}
    yield lambda x: acts["a"](x) + acts["b"](x)
    acts["b"] = times(3.0)
    yield lambda x: x
    acts["a"] = torch.exp
    yield lambda x: x


@register
def lists_of_lists() -> Case:
    table = [[1.0, 2.0], [(3.0,)]]
    yield lambda x: x * table[0][1] + table[1][0][0]
    table[0][1] = 5.0
    yield lambda x: x
    table[1][0] = (7.0,)
    yield lambda x: x
    table[0].insert(0, 4.0)
    yield lambda x: x


@register
def set_of_names() -> Case:
    flags = {"a"}
    yield lambda x: x * 2 if "b" in flags else x
    flags.add("b")
    yield lambda x: x


Pair = namedtuple("Pair", "scale shift")


@register
def named_tuple() -> Case:
    pair = Pair(2.0, 1.0)
    yield lambda x: x * pair.scale + pair.shift
    pair = Pair(3.0, 1.0)
    yield lambda x: x


@register
def ordered_dict_with_attributes() -> Case:
    class Config(OrderedDict):  # type: ignore[type-arg]
        k = 2.0

    config = Config(scale=2.0)
    yield lambda x: x * config["scale"] * config.k
    config["scale"] = 3.0
    yield lambda x: x
    config.k = 5.0
    yield lambda x: x


@register
def list_of_itself() -> Case:
    loop: list[Any] = [2.0]
    loop.append(loop)
    yield lambda x: x * loop[1][1][0]
    loop[0] = 3.0
    yield lambda x: x


@register
def objects_within_objects() -> Case:
    config = types.SimpleNamespace(norm=types.SimpleNamespace(scale=2.0))
    config.norm.parent = config
    yield lambda x: x * config.norm.scale
    config.norm.scale = 3.0
    yield lambda x: x
    config.norm = types.SimpleNamespace(scale=4.0)
    yield lambda x: x


@register
def alias_of_an_object() -> Case:
    config = types.SimpleNamespace(norm=types.SimpleNamespace(scale=2.0))

    def f(x: Tensor) -> Tensor:
        norm = config.norm
        return x * norm.scale * getattr(norm, "shift", 1.0)

    yield f
    config.norm.scale = 3.0
    yield f
    config.norm.shift = 5.0
    yield f


@register
def computed_attribute() -> Case:
    config = types.SimpleNamespace(k0=2.0, k1=3.0)
    yield lambda x: sum(x * getattr(config, f"k{i}") for i in range(2))
    config.k1 = 4.0
    yield lambda x: x


@dataclasses.dataclass
class Plain:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0


@register
def dataclass() -> Case:
    config = Plain()
    yield lambda x: x * config.scale
    config.scale = 3.0
    yield lambda x: x


@register
def dataclass_with_slots() -> Case:
    config = Slotted()
    yield lambda x: x * config.scale
    config.scale = 3.0
    yield lambda x: x


@register
def properties() -> Case:
    class Config:
        half = 1.0

        def __init__(self) -> None:
            self.k = 2.0

        @property
        def scale(self) -> float:
            return self.k * self.half

        def __getitem__(self, key: str) -> float:
            return self.k + 1.0

    config = Config()
    yield lambda x: x * config.scale + config["any"]
    config.k = 3.0
    yield lambda x: x
    Config.half = 0.5
    yield lambda x: x
    Config.scale = property(lambda self: self.k + 10.0)  # type: ignore[assignment,method-assign]
    yield lambda x: x


@register
def class_attributes() -> Case:
    class Base:
        scale, k = 2.0, 1.0

        @classmethod
        def of(cls, x: Tensor) -> Tensor:
            return x * cls.k

        @staticmethod
        def more(x: Tensor) -> Tensor:
            return x + 1.0

    class Derived(Base):
        pass

    instance = Derived()

    def f(x: Tensor) -> Tensor:
        cls = Derived
        return instance.more(instance.of(x * instance.scale)) * cls.scale

    yield f
    Base.scale = 3.0
    yield f
    Derived.scale = 4.0
    yield f
    instance.scale = 5.0
    yield f
    Base.k = 6.0
    yield f
    Base.more = staticmethod(times(3.0))  # type: ignore[assignment,method-assign]
    yield f
    instance.more = times(7.0)  # type: ignore[method-assign]
    yield f


class Scale(float):
    """A number with an attribute of the object, one of the class, and a property."""

    shift = 1.0

    @property
    def twice(self) -> float:
        return self.own * 2


@register
def attributes_of_numbers() -> Case:
    scale, name = Scale(2.0), type("Name", (str,), {})("a")
    scale.own, name.k = 2.0, 2.0  # type: ignore[attr-defined]
    yield lambda x: x * scale + scale.own + scale.shift + scale.twice + name.k
    scale.own = 3.0  # type: ignore[attr-defined]
    yield lambda x: x
    name.k = 3.0
    yield lambda x: x
    with mock.patch.object(Scale, "shift", 4.0):
        yield lambda x: x


@register
def attributes_of_tensors() -> Case:
    weight: Any = randn(24)
    weight.scale = 2.0
    yield lambda x: x * weight * weight.scale * getattr(weight, "shift", 1.0)
    weight.scale = 3.0
    yield lambda x: x
    weight.shift = 4.0
    yield lambda x: x


class Meta(type):
    half = 0.5

    @property
    def scale(cls: Any) -> float:
        return cls.k * cls.half  # type: ignore[no-any-return]


@register
def property_of_a_metaclass() -> Case:
    config = Meta("Config", (), {"k": 2.0})
    yield lambda x: x * config.scale
    config.k = 3.0  # type: ignore[attr-defined]
    yield lambda x: x
    with mock.patch.object(Meta, "half", 0.25):
        yield lambda x: x


@register
def matched_attribute() -> Case:
    config = types.SimpleNamespace(scale=2.0)

    def f(x: Tensor) -> Tensor:
        match config:
            case types.SimpleNamespace(scale=2.0):
                return x * 2.0
            case _:
                return x

    yield f
    config.scale = 3.0
    yield f


class Mode(enum.Enum):
    A, B = 1, 2

    def act(self, x: Tensor) -> Tensor:
        return x * self.scale  # type: ignore[attr-defined,no-any-return]


@register
def enumeration() -> Case:
    mode = Mode.A
    yield lambda x: x * 2 if mode is Mode.A else x * 3
    mode = Mode.B
    yield lambda x: x


@register
def attributes_of_an_enums_member() -> Case:
    listed = enum.Enum("Listed", {"A": [2.0]})  # type: ignore[misc]
    Mode.A.scale = Mode.A.shift = 2.0  # type: ignore[attr-defined]
    mode = Mode.A
    yield lambda x: mode.act(x) * Mode.A.shift * Mode.A.value + listed.A.value[0]  # type: ignore[attr-defined]
    Mode.A.scale = 3.0  # type: ignore[attr-defined]
    yield lambda x: x
    Mode.A.shift = 3.0  # type: ignore[attr-defined]
    yield lambda x: x
    listed.A.value[0] = 3.0
    yield lambda x: x
    with mock.patch.object(Mode, "act", lambda self, x: x + 5.0):
        yield lambda x: x


@register
def class_as_an_argument() -> Case:
    class Config:
        k = 2.0

    f = lambda x, config: x * config.k  # noqa: E731
    yield lambda x: (f, (x, Config))
    Config.k = 3.0
    yield lambda x: x


@register
def class_that_is_called_as_an_argument() -> Case:
    k = 2.0

    class Result(types.SimpleNamespace):
        def __init__(self, x: Tensor) -> None:
            super().__init__(y=x * k)

    yield lambda x: ((lambda x, kind: kind(x).y), (x, Result))
    k = 3.0
    yield lambda x: x


@register
def object_as_an_argument() -> Case:
    config = types.SimpleNamespace(k=2.0, act=torch.tanh, table={"a": [1.0]})
    f = lambda x, config: config.act(x * config.k) + config.table["a"][0]  # noqa: E731
    yield lambda x: (f, (x, config))
    config.k = 3.0
    yield lambda x: x
    config.act = torch.sin
    yield lambda x: x
    config.table["a"][0] = 5.0
    yield lambda x: x


@register
def function_as_an_argument() -> Case:
    k, act = 2.0, times(2.0)
    f = lambda x, act: act(x) * 3  # noqa: E731
    yield lambda x: (f, (x, act))
    act = lambda x: x + k  # noqa: E731
    yield lambda x: x
    k = 3.0
    yield lambda x: x


# --- modules --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with a norm and other state that a module may have."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.mode = nn.LayerNorm(24, device=DEVICE), F.relu, "a"
        self.cfg = types.SimpleNamespace(norm=types.SimpleNamespace(scale=2.0))
        self.rope: dict[str, Any] = {"factor": 2.0}
        self.lock = deque([1])  # would be refused if the function read it

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(x)) * self.scale + self.cfg.norm.scale
        return x * self.rope["factor"] if self.mode == "a" else x


def _changes(block: Block) -> Iterator[None]:
    block.act = torch.sin
    yield
    block.act = lambda x: x * 3.0
    yield
    block.cfg.norm.scale = 5.0
    yield
    block.rope["factor"] = 7.0
    yield
    block.mode = "b"
    yield
    block.scale = 11.0
    yield
    block.norm.eps = 0.5
    yield
    block.norm.bias = None
    yield
    block.norm.bias = nn.Parameter(randn(24))
    yield
    block.norm = nn.Sequential(nn.LayerNorm(24, device=DEVICE), nn.Tanh())  # type: ignore[assignment]
    yield
    block.norm.append(nn.Sigmoid())  # type: ignore[operator]
    yield
    handle = block.norm.register_forward_hook(lambda module, args, out: out * 2.0)
    yield
    other = block.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    yield
    handle.remove()
    other.remove()
    yield
    block.forward = lambda x: block.norm(x) * 13.0  # type: ignore[method-assign]
    yield


@register
def module() -> Case:
    block = Block()
    yield lambda x: block(x)
    for _ in _changes(block):
        yield lambda x: x


@register
def module_as_an_argument() -> Case:
    block = Block()
    f = lambda x, block: block(x)  # noqa: E731
    yield lambda x: (f, (x, block))
    for _ in _changes(block):
        yield lambda x: x


@register
def modules_of_a_class() -> Case:
    class Own(Block):
        pass

    block = Own()
    yield lambda x: block(x)
    Own.scale = 3.0
    yield lambda x: x
    Own.forward = lambda self, x: self.norm(x) * 5.0  # type: ignore[method-assign]
    yield lambda x: x


@register
def forward_of_pytorchs_class() -> Case:
    norm = nn.LayerNorm(24, device=DEVICE)
    yield lambda x: norm(x)
    with mock.patch.object(nn.LayerNorm, "forward", lambda self, x: x * 2.0):
        yield lambda x: x
    yield lambda x: x


@register
def dropout_mode() -> Case:
    drop = nn.Dropout(0.0)
    yield lambda x: drop(x) * 2
    drop.eval()
    yield lambda x: x
    drop.p = 1.0
    yield lambda x: x
    drop.train()
    yield lambda x: x


@register
def tied_parameters() -> Case:
    a, b = nn.LayerNorm(24, device=DEVICE), nn.LayerNorm(24, device=DEVICE)
    nn.init.normal_(a.weight)
    b.weight = a.weight
    yield lambda x: a(x) + b(x * 2)
    b.weight = nn.Parameter(randn(24))
    yield lambda x: x
    a.weight = b.weight
    yield lambda x: x


@register
def containers_of_modules() -> Case:
    norms = nn.ModuleList([nn.LayerNorm(24, device=DEVICE), nn.Identity()])
    table = nn.ModuleDict({"1": nn.RMSNorm(24, device=DEVICE)})

    def f(x: Tensor) -> Tensor:
        for norm in norms:
            x = norm(x)
        return table["1"](x)

    yield f
    norms[1] = nn.Sigmoid()
    yield f
    del norms[0]
    yield f
    table["1"] = nn.Tanh()
    yield f


@register
def children() -> Case:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Tanh(), nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = child(x)
            return x

    both = Both()
    yield lambda x: both(x)
    both.b = nn.Tanh()
    yield lambda x: x


@register
def subclass_of_a_norm() -> Case:
    class Norm(nn.LayerNorm):
        shift = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    norm = Norm(24, device=DEVICE)
    yield lambda x: norm(x)
    norm.eps = 0.5
    yield lambda x: x
    norm.shift = 2.0
    yield lambda x: x
    norm.weight = None
    yield lambda x: x


class Weighted(nn.Module):
    """A module whose constructor is not to be read, as no fused function calls it."""

    shift = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


class WeightedBySuper(Weighted):
    """Its helper method calls the forward that its own one overrides."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WeightedByName(Weighted):
    """It names the class whose forward it calls, and calls a local variable beside."""

    def forward(self, x: Tensor) -> Tensor:
        act = torch.tanh if isinstance(self, Weighted) else torch.exp
        return act(Weighted.forward(self, x))


def _changes_of(module: Weighted) -> Case:
    yield lambda x: module(x)
    module.shift = 2.0
    yield lambda x: x
    module.weight = nn.Parameter(randn(24))
    yield lambda x: x
    with mock.patch.object(Weighted, "forward", lambda self, x: x - self.shift):
        yield lambda x: x


@register
def overridden_forward_by_super() -> Case:
    yield from _changes_of(WeightedBySuper())


@register
def overridden_forward_by_super_in_an_attribute() -> Case:
    module = WeightedBySuper()
    module.forward = module.scaled  # type: ignore[method-assign]
    yield from _changes_of(module)


@register
def overridden_forward_by_name() -> Case:
    yield from _changes_of(WeightedByName())


@register
def forward_that_super_finds_first() -> Case:
    class Middle(Weighted):
        pass

    class Last(Middle):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    last = Last()
    yield lambda x: last(x)
    Middle.forward = lambda self, x: x * 3  # type: ignore[method-assign, assignment]
    yield lambda x: x


@register
def module_that_a_function_in_c_calls() -> Case:
    module = Weighted()
    yield lambda x: next(map(module, [x]))
    module.shift = 2.0
    yield lambda x: x


@register
def module_that_a_function_in_c_calls_as_an_argument() -> Case:
    module = Weighted()
    yield lambda x: ((lambda m, x: next(map(m, [x]))), (module, x))
    module.shift = 2.0
    yield lambda x: x


@register
def module_whose_attributes_alone_are_read() -> Case:
    block = Scaled(2.0)  # its forward would be refused
    yield lambda x: x * block.by * block.weight
    block.by = 3.0
    yield lambda x: x
    block.weight = nn.Parameter(randn(24))
    yield lambda x: x


@register
def module_that_a_helper_calls() -> Case:
    block = Block()
    apply = lambda module, x: module(x)  # noqa: E731
    yield lambda x: apply(block, x)
    block.act = torch.sin
    yield lambda x: x


@register
def tensors_in_containers() -> Case:
    weights: dict[str, Any] = {"a": [randn(24)]}
    yield lambda x: x * weights["a"][0]
    weights["a"][0] = randn(24)
    yield lambda x: x
    weights["a"][0] = 2.0
    yield lambda x: x


@kernels
@pytest.mark.parametrize("case", CASES)
def test_change_is_seen(case: str) -> None:
    """Before and after each change, the fused function computes with the current values."""
    x, steps = randn(5, 24), CASES[case]()
    first = next(steps)
    inputs: tuple[Any, ...] = (x,)
    has_arguments = case.endswith("as_an_argument")
    function = first(x)[0] if has_arguments else first
    fused = fusedops.rowwise(function, strict=True)
    for step in range(20):
        inputs = first(x)[1] if has_arguments else (x,)
        torch.testing.assert_close(
            fused(*inputs),
            function(*inputs),
            rtol=1e-5,
            atol=1e-5,
            equal_nan=True,
            msg=lambda text, step=step: f"{case}, step {step}: {text}",
        )
        if next(steps, None) is None:
            break
    assert step > 0


# --- functions that are refused -------------------------------------------------------------------


def _with_backward_hook() -> nn.Module:
    act = nn.Tanh()
    act.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return act


class Holder:
    """An object with one attribute, ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def of(cls, value: Any) -> Holder:
        return cls(value)


_SCOPE: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "Sign": Sign,
    "apply": Sign.apply,
    "hooked": _with_backward_hook(),
    "nested": nn.Sequential(_with_backward_hook()),
    "holder": Holder(deque([2.0])),
    "acts": {"a": Sign.apply},
    "partial": functools.partial(Sign.apply),
    "keyed": {(1, 2): 3.0},
    "many": [float(i) for i in range(5000)],
    "np": numpy,
    "Holder": Holder,
    "cached": functools.lru_cache(times(2.0)),
    "iterator": iter([2.0]),
    "modules": {"a": sys},
    "enabled": [torch.is_grad_enabled],
    "read": getattr,
    "weight": randn(24),
}
# The body of a function, and a part of the message with which it is refused.
_REFUSED = {
    "local_import": (
        "from settings_of_a_case import k\n    return x * k",
        "imports settings_of_a_case in its body",
    ),
    "local_import_of_a_function": (
        "import acts_of_a_case\n    return acts_of_a_case.act(x)",
        "imports acts_of_a_case",
    ),
    "globals": ("return x * globals()['k']", "reads globals"),
    "vars": ("return x * vars(holder)['value'][0]", "reads vars"),
    "dir": ("return x * len(dir(holder))", "reads dir"),
    "getattr_by_another_name": ("return x * read(holder, 'value')[0]", "calls read"),
    "version_of_a_tensor": ("return x * weight * weight._version", "reads _version of a tensor"),
    "dict_of_attributes": ("return x * holder.__dict__['value'][0]", "reads __dict__"),
    "attributes_of_a_computed_module": (
        "return x * len(getattr(modules['a'], 'argv'))",
        "is a module of Python",
    ),
    "state_in_c": (
        "return x * holder.value[0]",
        "holder.value is a deque, which may change unseen",
    ),
    "iterator": ("return x * next(iterator)", "iterator is a list_iterator"),
    "keys": ("return x * keyed[1, 2]", "keyed is a dict whose keys are no strings"),
    "too_many": ("return x * many[0]", "more than 4096 values"),
    "memory_of_results": ("return cached(x)", "cached is a _lru_cache_wrapper"),
    "mode": ("return x * 2 if enabled[0]() else x", "is a function whose result may change unseen"),
    "autograd_function": ("return Sign.apply(x)", "Sign is a torch.autograd.Function"),
    "autograd_function_in_a_variable": ("return apply(x)", "Sign is a torch.autograd.Function"),
    "autograd_function_in_a_local": (
        "g = Sign\n    return g.apply(x)",
        "Sign is a torch.autograd.Function",
    ),
    "autograd_function_in_a_dict": ("return acts['a'](x)", "Sign is a torch.autograd.Function"),
    "autograd_function_in_a_partial": ("return partial(x)", "Sign is a torch.autograd.Function"),
    "constructor": ("return Holder(x).value", "it changes self.value"),
    "constructor_in_a_list": ("return [Holder][0](x).value", "it changes self.value"),
    "constructor_in_a_class_method": ("return Holder.of(x).value", "it changes self.value"),
    "constructor_that_a_function_in_c_calls": (
        "return next(map(Holder, [x])).value",
        "it changes self.value",
    ),
    "constructor_as_an_argument": (
        "return (lambda kind: kind(x))(Holder).value",
        "it changes self.value",
    ),
    "numpy": ("return x * np.sqrt(2.0)", "np.sqrt is a ufunc, .*; use math.sqrt, or compute the"),
    "numpy_alone": ("return x * np.add(2.0, 1)", "a ufunc, .* unseen; compute the number outside"),
    "backward_hooks": ("return hooked(x)", "hooked is a module with backward hooks"),
    "backward_hooks_within": ("return nested(x)", "is a module with backward hooks"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_function_that_reads_a_value_that_may_change_unseen_is_refused(case: str) -> None:
    body, message = _REFUSED[case]
    scope = dict(_SCOPE)
    exec(f"def function(x):\n    {body}", scope)
    module = types.ModuleType("settings_of_a_case")
    module.k, module.act = 2.0, torch.tanh  # type: ignore[attr-defined]
    with (
        mock.patch.dict("sys.modules", settings_of_a_case=module, acts_of_a_case=module),
        pytest.raises(fusedops.NotRowwiseError, match=f"^function: .*{message}"),
    ):
        fusedops.rowwise(scope["function"]).source(randn(5, 24))


@kernels
def test_function_is_refused_only_while_hooks_are_registered() -> None:
    """The hooks are a backward hook of its module, and a global forward hook of all modules."""
    act, x = nn.Tanh(), randn(5, 24)
    function = fusedops.rowwise(lambda x: act(x) * 2)
    for register_hook in (
        lambda: act.register_full_backward_hook(lambda *_: None),
        lambda: nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1),
    ):
        assert function.explain(x).columns == 24
        handle = register_hook()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(function(x), function.function(x))
            assert "hooks" in function.explain(x).reason
        handle.remove()
    assert function.explain(x).columns == 24


@kernels
@pytest.mark.parametrize("case", ["builtin", "method", "module", "set", "initialised"])
def test_function_is_fused_where_a_refused_value_is_replaced_by_one_of_its_class(case: str) -> None:
    """A key contains the identity of the refused value, not only its class."""
    block = Holder(2.0)
    block.act = types.MethodType(lambda self, x: x * self.value, block)  # type: ignore[attr-defined]
    values: dict[str, tuple[Any, Any]] = {
        "builtin": (random.random, torch.tanh),
        "method": (Sign.apply, block.act),  # type: ignore[attr-defined]
        "module": (sys, torch),
        "set": ({(1, 2)}, {1, 2}),
        "initialised": (nn.Module.__new__(nn.Tanh), nn.Tanh()),
    }
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "module": lambda x: holder["value"].tanh(x),
        "set": lambda x: x * len(holder["value"]),
    }
    holder = {"value": values[case][1]}
    plain, x = functions.get(case, lambda x: holder["value"](x)), randn(5, 24)
    function = fusedops.rowwise(plain, strict=True)
    for _ in range(2):
        torch.testing.assert_close(function(x), plain(x))
        holder["value"] = values[case][0]
        with pytest.raises(fusedops.NotRowwiseError):
            function(x)
        holder["value"] = values[case][1]


# --- keys -----------------------------------------------------------------------------------------


@kernels
def test_object_at_the_address_of_a_freed_one_is_another_object() -> None:
    """The objects are code objects, classes and callable instances."""
    scope: dict[str, Any] = {}
    texts = (
        "def act(x): return x * {}",
        "class act:\n    k = {}",
        "class kind:\n    def __call__(self, x): return x * {}",
    )
    x = randn(5, 24)
    gc.collect()
    gc.freeze()  # so the collections below look at objects of this test only
    for text, called in zip(texts, ("act(x)", "x * act.k", "act(x)"), strict=True):
        exec(f"def function(x): return {called}", scope)
        function = fusedops.rowwise(scope["function"], strict=True)
        for number in range(25 if DEVICE.type == "cpu" else 8):
            scope.pop("act", None)
            scope.pop("kind", None)
            gc.collect()
            exec(text.format(float(number)), scope)
            if "kind" in scope:
                scope["act"] = scope["kind"]()
            torch.testing.assert_close(function(x), x * number)
    gc.unfreeze()


@kernels
def test_same_code_with_the_same_numbers_is_traced_once() -> None:
    """The helper is a new object before each call; each number occurred in an earlier call."""
    k, x = 2.0, randn(5, 24)
    function = fusedops.rowwise(lambda x: act(x) * k, strict=True)
    act = times(2.0)
    function(x)
    k = 3.0
    function(x)
    with mock.patch("fusedops.compiler.programs.trace", side_effect=AssertionError("traced again")):
        for k in (2.0, 3.0, 2.0):  # noqa: B007
            act = times(2.0)
            function(x)


@kernels
def test_many_instances_share_a_program() -> None:
    """Instances with the same number share a program; the three numbers have a program each."""
    x, blocks = randn(5, 24), [Alone(10.0 + number % 3) for number in range(12)]
    with mock.patch(
        "fusedops.compiler.programs.Programs._traced", autospec=True, side_effect=_traced
    ) as traced:
        for block in blocks:
            torch.testing.assert_close(block.scaled(x), x * block.weight * block.by)
    assert traced.call_count == 3
    assert len(Alone.scaled._programs.looks((blocks[0], x))._known) == 1


_traced = fusedops.compiler.programs.Programs._traced


class Scaled(nn.Module):
    """A module with a row-wise method."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.weight, self.by, self.parent = nn.Parameter(randn(24)), by, [self]

    @fusedops.rowwise(strict=True)
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by

    def forward(self, x: Tensor) -> Tensor:  # `scaled` does not call it: never refused for it
        import settings_of_a_case

        return x * settings_of_a_case.k


class Alone(Scaled):
    """A module whose method no other test calls."""

    @fusedops.rowwise(strict=True)
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by


@kernels
def test_function_holds_no_reference_to_objects_that_it_read() -> None:
    """The objects are a module in a reference cycle, its weight, an object, and a helper.

    Two functions read them and outlive them.
    """
    act: Any = None

    def call_with_temporary_objects() -> list[weakref.ref[Any]]:
        nonlocal act
        block, config = Scaled(2.0), Holder(3.0)
        block.scaled(randn(5, 24))
        act = times(block.weight)
        function(randn(5, 24), config)
        references = [weakref.ref(read) for read in (block, config, block.weight, act)]
        act = times(randn(24))
        return references

    function = fusedops.rowwise(lambda x, config: act(x) * config.value, strict=True)
    references = call_with_temporary_objects()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@kernels
def test_states_that_were_dropped_from_the_cache_are_read_again() -> None:
    config: Any = types.SimpleNamespace()
    function, x = fusedops.rowwise(lambda x: x * len(table_of(config)), strict=True), randn(5, 24)
    table_of = lambda owner: owner.table  # noqa: E731
    with mock.patch.object(state, "_MOST_LOOKS", 4):
        for size in (*range(1, 9), *range(1, 9)):
            config.table = {str(index): 1.0 for index in range(size)}
            torch.testing.assert_close(function(x), x * size)
        assert len(function._programs.looks((x,))._known) == 4


@kernels
def test_caches_are_bounded() -> None:
    """Each call has another number. Calls, programs and refusals are cached."""
    x, k = randn(5, 24), 0.0
    fused, refused = fusedops.rowwise(lambda x: x * k), fusedops.rowwise(lambda x: x.round() * k)
    with (
        warnings.catch_warnings(),
        mock.patch.object(function_module, "_MOST_CALLS", 4),
        mock.patch.object(programs, "_MOST_PROGRAMS", 3),
    ):
        warnings.simplefilter("ignore")
        for k in (*map(float, range(8)), 0.0):
            assert torch.equal(fused(x), x * k)
            assert torch.equal(refused(x), x.round() * k)
            for function in (fused, refused):
                groups = function._calls.values()
                assert len(groups) + sum(len(group.calls) for group in groups) <= 4
            assert sum(map(len, fused._programs.known.values())) <= 3
            assert len(refused._programs.refused) <= 3
        before = fused._programs.known.copy()
        for k in (6.0, 8.0):  # noqa: B007 - 6.0 is used again, so that 7.0 is dropped before it
            fused._calls.clear()
            fused(x)
        assert len(before.keys() & fused._programs.known.keys()) == 2
        assert next(iter(before)) in fused._programs.known


def test_function_whose_state_differs_at_each_look_is_refused() -> None:
    k = 2.0
    never_equal = mock.patch.object(
        walking.Walk, "leaf", lambda self, value, variable: self.expect("False")
    )
    with never_equal, pytest.raises(fusedops.NotRowwiseError, match="is another at each look"):
        fusedops.rowwise(lambda x: x * k).source(randn(5, 24))


def test_function_whose_globals_raise_an_error_when_they_are_read_is_refused() -> None:
    """Changes of the other values that the function reads would not be detected."""

    def missing(name: str) -> float:
        raise ValueError(f"no {name} was set")

    settings = types.ModuleType("settings_of_a_case")
    settings.__getattr__ = missing  # type: ignore[method-assign]
    with pytest.raises(fusedops.NotRowwiseError, match="no extra was set"):
        fusedops.rowwise(lambda x: x * settings.extra if x.dim() > 9 else x).source(randn(5, 24))


@kernels
def test_tensor_argument_with_an_attribute_that_the_function_reads_is_refused() -> None:
    """The trace replaces the argument by another tensor, without the attribute."""
    function = fusedops.rowwise(lambda x: x * getattr(x, "scale", 2.0), strict=True)
    plain, scaled = randn(5, 24), randn(5, 24)
    scaled.scale = 3.0  # type: ignore[attr-defined]
    for _ in range(2):
        torch.testing.assert_close(function(plain), plain * 2.0)
        with pytest.raises(fusedops.NotRowwiseError, match="x is a tensor with an attribute scale"):
            function(scaled)


@kernels
def test_captured_tensor_of_another_kind_is_seen() -> None:
    """Another dtype or shape leads to another trace, a kind that no kernel reads to a refusal."""
    x = randn(5, 24)
    weight = plain = randn(24)
    function = fusedops.rowwise(lambda x: x * weight, strict=True)
    refused = {
        "weight is no dense tensor": (
            plain.to_sparse(),
            torch.nested.nested_tensor([plain, plain], layout=torch.jagged),
        ),
        "weight is on meta": (plain.to("meta"), plain[0].to("meta")),
        "weight is of torch.float8_e4m3fnuz": (plain.to(torch.float8_e4m3fnuz),),
        "returns a complex tensor": (plain.to(torch.complex64),),
    }
    assert torch.equal(function(x), x * weight)
    for message, tensors in refused.items():
        for weight in tensors:  # noqa: B007
            with pytest.raises(fusedops.NotRowwiseError, match=message):
                function(x)
        weight = plain
        assert torch.equal(function(x), x * weight)
    for data in (plain.half(), plain[:1], plain):
        weight.data = data
        assert torch.equal(function(x), x * weight)


@kernels
def test_arguments_of_alternating_structures_are_walked_once_each() -> None:
    """The checks for the first structure read fewer attributes, so objects of both pass them."""
    plain, scaled = types.SimpleNamespace(flag=False), types.SimpleNamespace(flag=True, scale=2.0)
    x = randn(5, 24)
    function = fusedops.rowwise(lambda x, c: x * c.scale if c.flag else x, strict=True)
    for _ in range(2):
        assert torch.equal(function(x, plain), x)
        assert torch.equal(function(x, scaled), x * 2.0)
    with mock.patch.object(state, "_walked", side_effect=AssertionError("walked again")):
        assert torch.equal(function(x, plain), x)
        assert torch.equal(function(x, scaled), x * 2.0)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("getattr(c, 'k', n)", "k"),
        ("getattr(c.a['b'], 'k', float(n))", "k"),
        ("getattr(getattr(c, 'j'), 'k', [n, *n])", "jk"),
        ("hasattr(c, 'k')", "k"),
        ("getattr(c, n, 'k')", None),
        ("getattr(c, n['k'])", None),
        ("getattr(c, 'k' + n, 1)", None),
        ("getattr(c, 'k'.lower())", None),
        ("getattr(c, 'k' if n else 'j')", None),
        ("map(getattr, c, 'k')", None),
    ],
)
def test_attribute_is_named_by_the_second_argument(call: str, names: str | None) -> None:
    """If the second argument of `getattr` is computed, any attribute may be read (None)."""
    reads = reads_of(compile(call, "", "eval"))
    optional = None if reads.everything else reads.optional
    assert optional == (None if names is None else set(names))


# --- the program of a trace -----------------------------------------------------------------------


@kernels
@every
def test_program_is_a_function_of_its_tensors(sample: RowwiseFunction) -> None:
    """Its reference in PyTorch's operators, used by transforms, reads only the call's tensors."""
    function = fusedops.rowwise(sample.function, strict=True)
    tensors = sample.tensors(torch.float32, DEVICE)
    program = function._programs.find(tuple(tensors.values()), ()).program
    with mock.patch.object(F, "dropout", lambda x, p: x * 1.0):
        expected, expected_grads = results(sample.function, tensors)
    with mock.patch("fusedops.compiler.operator.dropout_of", return_value=none):
        actual, actual_grads = results(lambda *args: program.reference(None, args, none), tensors)
    for result, value in zip(
        (*actual, *actual_grads.values()), (*expected, *expected_grads.values()), strict=True
    ):
        tolerance = 1e-4 * max(1.0, value.abs().max().item())
        torch.testing.assert_close(result, value, rtol=1e-4, atol=tolerance)


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.shared("case", most=4)
@kernels
@pytest.mark.parametrize(
    "case",
    [
        "global_variable",
        "helper",
        "helper_with_a_closure",
        "default_of_a_helper",
        "default_of_a_rowwise_function",
        "number_of_a_helpers_helper",
        "closure_",
        "python_module",
        "dict_of_numbers",
        "objects_within_objects",
        "partial",
        "module_float",
        "method_float",
    ],
)
@pytest.mark.parametrize("backend", ["aot_eager", "fusedops"])
def test_change_is_compiled_again(case: str, backend: str, fresh_dynamo: None) -> None:
    """Dynamo guards the values that a fused function reads, though the call is an opaque node."""
    compiled_cases = {"closure_": _closure, "module_float": _module, "method_float": _method}
    x, steps = randn(5, 24), {**CASES, **compiled_cases}[case]()
    step = next(steps)
    fused = step if isinstance(step, nn.Module) else fusedops.rowwise(step, strict=True)
    compiled = torch.compile(
        fused, backend=entry.backend if backend == "fusedops" else backend, fullgraph=True
    )
    while step is not None:
        torch.testing.assert_close(compiled(x), fused(x), rtol=1e-5, atol=1e-5, equal_nan=True)
        step = next(steps, None)


def _closure() -> Case:
    k = 2.0
    yield lambda x: torch.tanh(x) * k
    for k in (3.0, 4.0, float("inf")):  # noqa: B007
        yield lambda x: x


def _module() -> Case:
    module = Scaled(2.0)
    yield lambda x: x * module.by
    module.by = 3.0
    yield lambda x: x


class Caller(Scaled):
    """Its forward calls the fused method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


def _method() -> Case:
    module = Caller(2.0)
    yield module
    module.by = 3.0
    yield module


@kernels
def test_number_that_alternates_is_compiled_once_for_each_value(fresh_dynamo: None) -> None:
    """Each of the two graphs has one node beside its input and its output."""
    graphs, k, x = [], 2.0, randn(5, 24)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        fusedops.rowwise(lambda x: torch.tanh(x) * k, strict=True), backend=backend, fullgraph=True
    )
    for step in range(12):
        k = (2.0, 3.0)[step % 2]
        torch.testing.assert_close(compiled(x), torch.tanh(x) * k, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2
    assert all(
        len(graph.graph.find_nodes(op="placeholder")) == 1 and len(graph.graph.nodes) == 3
        for graph in graphs
    )


class _Attributes(dict[str, float]):
    """A dictionary like a configuration: a missing attribute raises KeyError."""

    __getattr__ = dict.__getitem__


def test_change_of_a_dict_whose_entries_are_attributes_is_seen() -> None:
    settings = _Attributes(scale=2.0)
    function = fusedops.rowwise(lambda x: x * settings.scale)
    assert torch.equal(function(torch.ones(2, 4, device=DEVICE)).cpu(), torch.full((2, 4), 2.0))
    settings["scale"] = 3.0
    assert torch.equal(function(torch.ones(2, 4, device=DEVICE)).cpu(), torch.full((2, 4), 3.0))
