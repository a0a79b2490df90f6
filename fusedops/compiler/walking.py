"""A walk through the state of a function: variables, functions, containers, objects and modules."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import keyword
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..core import compat
from .errors import NotRowwiseError
from .looking import Writer
from .surroundings import (
    MODES,
    PLAIN,
    Reads,
    inherits_a_forward,
    is_apply,
    is_autograd,
    is_of_a_library,
    is_of_python,
    is_pure,
    reads_of,
    slots_of,
)

__all__ = ["APPLIED", "UNWRAPPED", "Names", "Walk"]

# Values that a function may read around it.
_MOST_VALUES = 4096
# Objects of this package in place of functions, with the attribute that has the function.
UNWRAPPED: dict[type, str] = {}
_LEAVES = (*PLAIN, complex, bytes, range, type(...))
# Attributes by which a module's code gets at modules and parameters that it does not name.
_INSIDES = frozenset({"apply", "buffers", "children", "get_buffer", "get_parameter", "get_submodule", "modules",
                      "named_buffers", "named_children", "named_modules", "named_parameters", "parameters",
                      "state_dict"})  # fmt: skip
# Methods that no operator calls.
_NOT_CALLED = frozenset({"__init__", "__init_subclass__", "__class_getitem__", "__set_name__", "__post_init__",
                         "__getstate__", "__setstate__", "__getnewargs__", "__copy__", "__deepcopy__", "__del__"})  # fmt: skip
APPLIED = (
    "{} is a torch.autograd.Function with a backward of its own, which no kernel computes; call it outside, or write a "
    "straight-through estimator as x + (q - x).detach()"
)


@dataclass(frozen=True)
class Names:
    """Attributes that functions read: see `Reads`."""

    names: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    everything: bool = False
    calls: bool = False

    def with_those_of(self, reads: Reads) -> Names:
        """Together with a function's."""
        return Names(self.names | reads.names, self.optional | reads.optional, self.everything or reads.everything,
                      self.calls or reads.calls)  # fmt: skip


class Walk(Writer):
    """One walk through all that a function may read.

    Attributes:
        read: what the functions on the way read.
        simple: of each function the variables that it reads.
        is_simple: whether these are nothing but numbers, and functions without closures and defaults.
    """

    def __init__(self, known: Names) -> None:
        super().__init__()
        # What functions read, and what those of this walk do: another walk follows if that is more.
        self.known = self.read = known
        self.seen: dict[int, tuple[Any, str]] = {}
        self.uncalled: dict[int, tuple[nn.Module, str, str]] = {}  # modules of which only attributes are read
        self.of = ""
        self.count = 0
        self.simple: list[tuple[FunctionType, list[tuple[str, Any]]]] = []
        self.is_simple = True

    # --- values ---------------------------------------------------------------------------------------------------------

    def visit(self, value: Any, expression: str, name: str, *, short: str = "", wanted: bool = True, of: str = "",
              called: bool = True) -> None:  # fmt: skip
        """Follows a value.

        Args:
            value: of the expression.
            expression: how it is found.
            name: in messages.
            short: of a tensor as a kernel's argument, where it is not the name.
            wanted: whether the function's own code reads it; otherwise what cannot be followed is left out.
            of: what has the name, in messages.
            called: of a module, whether the function may call it.
        """
        self.of = of or self.of
        if expression in self.visited:
            return
        self.visited.add(expression)
        self.count += 1
        if self.count > _MOST_VALUES:
            raise NotRowwiseError(f"it reads more than {_MOST_VALUES} values around it; pass what is needed of them")
        follow = self.way(value)
        if follow is None and not wanted:
            return
        variable = self.at(expression)
        self.words.append(name)
        if follow is None:
            self.refuse(variable, value, self.unseen(value, name))
        elif follow is Walk.constantly:
            self.check_mode(variable, value, name)
            self.constantly(value, variable)
        elif follow in (Walk.leaf, Walk.tensor):
            follow(self, value, variable, short or name)
        elif id(value) in self.seen:
            self.expect(f"{variable} is {self.seen[id(value)][1]}")
            if called and id(value) in self.uncalled:
                self.call(*self.uncalled.pop(id(value)))
        else:
            self.seen[id(value)] = value, variable
            if follow is Walk.module:
                self.module(value, variable, name, short, called=called)
            else:
                follow(self, value, variable, name)

    def unseen(self, value: Any, name: str) -> str:
        """Why a value cannot be followed."""
        if is_apply(value):
            return APPLIED.format(value.__self__.__name__)
        if isinstance(value, ModuleType):
            return f"{self.of} {name} is a module of Python, whose numbers may change unseen; name them: {name}.NAME"
        if inspect.isbuiltin(value):
            return f"it calls {name}, whose result may change from call to call; pass what it returns"
        return f"{self.of} {name} is a {type(value).__name__}, which may change unseen; pass what is needed of it"

    def check_mode(self, variable: str, value: Any, name: str) -> None:
        """Raises for a function that says how PyTorch runs."""
        if getattr(value, "__name__", "") in MODES:
            self.expect(f"{variable} is {self.constant(value)}")
            raise NotRowwiseError(
                f"{self.of} {name} is a function whose result may change unseen; pass what it returns"
            )

    def way(self, value: Any) -> Callable[..., None] | None:
        """How to follow a value; None where that cannot be done."""
        if isinstance(value, enum.Enum):
            return Walk.constantly
        if value is None or type(value) in _LEAVES or isinstance(value, (float, int, str)):
            return Walk.leaf
        if isinstance(value, Tensor):
            return Walk.tensor
        if type(value) in UNWRAPPED:
            return Walk.unwrapped
        if isinstance(value, ModuleType):
            return Walk.constantly if is_of_a_library(value) else None
        if isinstance(value, nn.Module):
            return Walk.module
        if is_apply(value):
            return None
        for kind, follow in _WAYS.items():
            if isinstance(value, kind):
                return Walk.constantly if kind in (FunctionType, type) and is_of_a_library(value) else follow
        if inspect.isbuiltin(value):
            return Walk.constantly if is_pure(value) else None
        if callable(value) and is_of_a_library(value):
            return Walk.constantly
        return Walk.instance if is_of_python(type(value)) else None

    def leaf(self, value: Any, variable: str, name: str) -> None:
        """A number or the like."""
        if value is None:
            self.expect(f"{variable} is None")
            return
        self.expect_type(variable, value)
        self.leaves.append(f"{variable}.hex()" if isinstance(value, float) else variable)

    def tensor(self, value: Tensor, variable: str, name: str) -> None:
        """An argument of kernels."""
        self.expect(f"isinstance({variable}, Tensor)")
        self.tensors.append((variable, name))
        self.storable = False

    def constantly(self, value: Any, variable: str) -> None:
        """What does not change."""
        self.expect(f"{variable} is {self.constant(value)}")
        self.words.append(value)

    def unwrapped(self, value: Any, variable: str, name: str) -> None:
        """A function of this package's."""
        self.expect_type(variable, value)
        inner = UNWRAPPED[type(value)]
        self.visit(getattr(value, inner), f"{variable}.{inner}", name)

    # --- functions ------------------------------------------------------------------------------------------------------

    def root(self, function: FunctionType) -> None:
        """The function itself, whose defaults are among the arguments."""
        self.seen[id(function)] = function, self.constant(function)
        self.around(function, "")

    def function(self, value: FunctionType, variable: str, name: str) -> None:
        """Another."""
        self.expect_type(variable, value)
        self.expect(f"{variable}.__code__ is {self.constant(value.__code__)}")
        for attribute in ("__defaults__", "__kwdefaults__"):
            self.visit(getattr(value, attribute), f"{variable}.{attribute}", f"{name}.{attribute}")
        self.around(value, variable)

    def around(self, function: FunctionType, variable: str) -> None:
        """The variables around a function, which is the first without a variable."""
        code, scope = function.__code__, function.__globals__
        reads = reads_of(code)
        self.codes.append(code)
        self.words.append(code)
        self.read = self.read.with_those_of(reads)
        if reads.refusal:
            raise NotRowwiseError(reads.refusal)
        simple: list[tuple[str, Any]] = []
        self.simple.append((function, simple))
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        inside = self.at(f"{variable}.__globals__") if variable else self.constant(scope)
        for first, *attributes in reads.chains:
            if first in cells:
                place = f"{variable}.__closure__[{code.co_freevars.index(first)}]"
                with contextlib.suppress(ValueError):  # nothing is there yet
                    value = cells[first].cell_contents
                    at = place if variable else self.constant(cells[first])
                    self.chain(value, f"{at}.cell_contents", first, attributes, simple, called=first in reads.called)
            elif first in scope:
                self.chain(
                    scope[first], f"{inside}[{first!r}]", first, attributes, simple, called=first in reads.called
                )
            else:
                self.expect(f"{first!r} not in {inside}")

    def chain(self, value: Any, expression: str, name: str, attributes: list[str], simple: list[tuple[str, Any]], *,
              called: bool) -> None:  # fmt: skip
        """A variable, and of a module of Python what is taken of it."""
        called |= isinstance(value, ModuleType)
        while isinstance(value, ModuleType) and not is_of_a_library(value) and attributes:
            attribute = attributes.pop(0)
            expression, name = f"{self.at(expression)}.{attribute}", f"{name}.{attribute}"
            if not hasattr(value, attribute):
                return
            value = getattr(value, attribute)
        if attributes and attributes[0] == "apply" and is_autograd(value):
            return  # the trace names the line
        self.read_simply(value, name, simple)
        self.visit(value, expression, name, of="the variable", called=called)

    def read_simply(self, value: Any, expression: str, simple: list[tuple[str, Any]]) -> None:
        """Notes a number, or a function that has nothing but numbers, as what a function reads."""
        while UNWRAPPED.get(type(value)) == "function":
            value, expression = value.function, f"{expression}.function"
        self.is_simple &= self.way(value) in (Walk.leaf, Walk.function, Walk.constantly)
        if not isinstance(value, ModuleType):
            simple.append((expression, value))
        if self.way(value) is Walk.function:
            given = [(f"{expression}.__defaults__[{place}]", one) for place, one in enumerate(value.__defaults__ or ())]
            named = [
                (f"{expression}.__kwdefaults__[{key!r}]", one) for key, one in (value.__kwdefaults__ or {}).items()
            ]
            simple += given + named
            self.is_simple &= not value.__closure__ and all(isinstance(one, PLAIN) for _, one in given + named)

    def method(self, value: MethodType, variable: str, name: str) -> None:
        """One of an object."""
        self.expect_type(variable, value)
        if not is_of_a_library(value.__func__):
            self.visit(value.__func__, f"{variable}.__func__", name)
        else:
            self.constantly(value.__func__, f"{variable}.__func__")
        self.visit(value.__self__, f"{variable}.__self__", name)

    def partial(self, value: functools.partial[Any], variable: str, name: str) -> None:
        """A function with some of its arguments."""
        self.expect_type(variable, value)
        self.visit(value.func, f"{variable}.func", name)
        self.visit(value.args, f"{variable}.args", f"{name}.args")
        self.visit(value.keywords, f"{variable}.keywords", f"{name}.keywords")

    def descriptor(self, value: Any, variable: str, name: str) -> None:
        """What a class makes an attribute of."""
        self.expect_type(variable, value)
        inner = "fget" if isinstance(value, property) else "func"
        self.visit(getattr(value, inner), f"{variable}.{inner}", name)

    # --- containers -----------------------------------------------------------------------------------------------------

    def sequence(self, value: Any, variable: str, name: str) -> None:
        """A tuple or a list."""
        self.expect_type(variable, value)
        self.expect(f"len({variable}) == {len(value)}")
        self.words.append(len(value))
        for place, inner in enumerate(value):
            self.visit(inner, f"{variable}[{place}]", f"{name}[{place}]", short=f"{name}_{place}")
        self.subclassed(value, variable, name)

    def mapping(self, value: dict[Any, Any], variable: str, name: str) -> None:
        """A dict."""
        self.expect_type(variable, value)
        self.expect(f"tuple({variable}) == {self.constant(tuple(value))}")
        if not all(type(key) in (str, int) or isinstance(key, enum.Enum) for key in value):
            self.refuse(
                variable, value, f"{self.of} {name} is a dict whose keys are no strings; pass what is needed of it"
            )
        self.words.append(list(map(str, value)))
        for key, inner in value.items():
            at = repr(key) if type(key) in (str, int) else self.constant(key)
            self.visit(inner, f"{variable}[{at}]", f"{name}[{key!r}]", short=f"{name}_{key}")
        self.subclassed(value, variable, name)

    def subclassed(self, value: Any, variable: str, name: str) -> None:
        """Attributes of an object that is a container as well."""
        if not is_of_a_library(type(value)):
            self.attributes(value, variable, name)

    def set(self, value: Any, variable: str, name: str) -> None:
        """Numbers or strings."""
        self.expect_type(variable, value)
        if not all(type(one) in (str, int, bool) for one in value):
            self.refuse(
                variable, value, f"{self.of} {name} is a set of other things than numbers; pass what is needed of it"
            )
        self.leaves.append(f"tuple(sorted([(type(one).__name__, one) for one in {variable}]))")

    # --- objects --------------------------------------------------------------------------------------------------------

    def instance(self, value: Any, variable: str, name: str) -> None:
        """An object of Python."""
        self.expect_type(variable, value)
        self.storable = False
        self.attributes(value, variable, name)

    def kind(self, value: type, variable: str, name: str) -> None:
        """A class, of which a function reads attributes, or makes objects."""
        self.expect(f"{variable} is {self.constant(value)}")
        self.storable = False
        self.of_class(value, name, None, "")
        self.called_by_python(value, name, made=True)

    def attributes(self, value: Any, variable: str, name: str) -> None:
        """What the function's code names of an object."""
        own, library = getattr(value, "__dict__", None), is_of_a_library(type(value))
        inside = ""
        if own is not None:
            inside = self.at(f"{variable}.__dict__")
            for key, inner in list(own.items()):
                if library or self.is_named(key):
                    self.visit(inner, f"{inside}[{key!r}]", f"{name}.{key}", wanted=self.is_named(key))
        for key in slots_of(type(value)):
            if self.is_named(key) and hasattr(value, key):
                self.visit(getattr(value, key), _attribute(variable, key), f"{name}.{key}")
        self.absent(value, variable)
        self.of_class(type(value), name, own, inside)
        self.called_by_python(type(value), name, made=False)

    def absent(self, value: Any, variable: str) -> None:
        """Attributes that code asks for, and that are not there."""
        for key in self.known.optional:
            if not hasattr(value, key):
                self.expect(f"not hasattr({variable}, {key!r})")

    def is_named(self, key: Any) -> bool:
        """Whether code on the way has the name of an attribute."""
        return self.known.everything or key in self.known.names

    def of_class(self, kind: type, name: str, own: Any, inside: str) -> None:
        """Attributes that a class has, and not the object itself."""
        classes = [one for one in kind.__mro__ if not is_of_a_library(one)]
        every = {key: None for one in classes for key in vars(one) if not _is_special(key)}
        known = self.constant(kind) if classes else ""
        for key in filter(self.is_named, every):
            owner = next(one for one in kind.__mro__ if key in vars(one))
            raw = vars(owner)[key]
            if not isinstance(raw, property) and own is not None and key in own:
                continue
            if isinstance(raw, _IN_C):
                continue
            if inside:
                self.expect(f"{key!r} not in {inside}")
            expression, of = _attribute(known, key), f"{name}.{key}"
            if isinstance(raw, classmethod):
                self.visit(raw.__func__, f"{expression}.__func__", of)
            else:
                self.visit(raw.__func__ if isinstance(raw, staticmethod) else raw, expression, of)

    def called_by_python(self, kind: type, name: str, *, made: bool) -> None:
        """Methods of operators, such as ``__call__``; of a class that is called those that make an object."""
        for owner in [one for one in kind.__mro__ if not is_of_a_library(one)]:
            generated = dataclasses.is_dataclass(owner)
            for key, inner in vars(owner).items():
                making = made and (key == "__post_init__" or (key == "__init__" and not generated))
                operator = _is_special(key) and key not in vars(object) and key not in _NOT_CALLED
                if isinstance(inner, FunctionType) and (making or operator):
                    self.visit(inner, f"{self.constant(owner)}.{key}", f"{name}.{key}")

    # --- modules of PyTorch ---------------------------------------------------------------------------------------------

    def module(self, value: nn.Module, variable: str, name: str, short: str, *, called: bool) -> None:
        """Its mode, attributes, parameters and children; and what runs where it is called."""
        self.expect_type(variable, value)
        self.storable = False
        inside = self.at(f"{variable}.__dict__")
        if not {*compat.BACKWARD_HOOKS, *compat.FORWARD_HOOKS, *compat.MODULE_MEMBERS} <= set(vars(value)):
            raise NotRowwiseError(f"{self.of} {name} is a module that was not initialised")
        if compat.has_backward_hooks(value):
            self.expect(f"{self.constant(compat.has_backward_hooks)}({variable})")
            raise NotRowwiseError(
                f"{self.of} {name} is a module with backward hooks, which no kernel calls; call it outside"
            )
        for registry in compat.BACKWARD_HOOKS:
            self.expect(f"not {inside}[{registry!r}]")
        whole = self.known.everything or bool(_INSIDES & self.known.names) or inherits_a_forward(type(value))
        inner = f"{short}_" if short and short != name else ""
        for key, one in list(vars(value).items()):
            if key not in compat.MODULE_INTERNALS and (whole or self.is_named(key)):
                self.visit(one, f"{inside}[{key!r}]", f"{name}.{key}", short=f"{inner}{key}", wanted=self.is_named(key))
        for registry in compat.MODULE_MEMBERS:
            members, there = vars(value)[registry], f"{inside}[{registry!r}]"
            if whole:
                self.expect(
                    f"tuple({self.at(there)}) == {self.constant(tuple(members))}" if members else f"not {there}"
                )
            for key, one in list(members.items()):
                if whole or self.is_named(key):
                    self.visit(one, f"{self.at(there)}[{key!r}]", f"{name}.{key}", short=f"{inner}{key}")
        own = {
            **vars(value),
            **{key: one for registry in compat.MODULE_MEMBERS for key, one in vars(value)[registry].items()},
        }
        self.absent(value, variable)
        self.of_class(type(value), name, own, inside)
        if called or self.known.calls or self.is_named("forward"):
            self.call(value, inside, name)
        else:
            self.uncalled[id(value)] = value, inside, name

    def call(self, value: nn.Module, inside: str, name: str) -> None:
        """Hooks, and the forward."""
        hooked = f"{self.constant(compat.has_global_hooks)}()"
        if compat.has_global_hooks():
            self.expect(hooked)
            raise NotRowwiseError(f"{self.of} {name} is a module, and there are hooks on all modules; call it outside")
        self.expect(f"not {hooked}")
        for registry in compat.FORWARD_HOOKS:
            hooks, there = vars(value)[registry], f"{inside}[{registry!r}]"
            self.expect(f"len({there}) == {len(hooks)}" if hooks else f"not {there}")
            for place, hook in enumerate(hooks.values()):
                self.visit(hook, f"list({there}.values())[{place}]", f"a hook of {name}")
        if "forward" not in vars(value):
            self.expect(f"'forward' not in {inside}")
            self.visit(type(value).forward, f"{self.constant(type(value))}.forward", f"{name}.forward")
        else:
            self.visit(vars(value)["forward"], f"{inside}['forward']", f"{name}.forward")
        self.called_by_python(type(value), name, made=False)


_WAYS: dict[Any, Callable[..., None]] = {
    FunctionType: Walk.function, MethodType: Walk.method, functools.partial: Walk.partial,
    property: Walk.descriptor, functools.cached_property: Walk.descriptor, type: Walk.kind,
    tuple: Walk.sequence, list: Walk.sequence, dict: Walk.mapping, set: Walk.set, frozenset: Walk.set,
}  # fmt: skip
_IN_C = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
)


def _is_special(key: str) -> bool:
    return key.startswith("__") and key.endswith("__")


def _attribute(of: str, key: str) -> str:
    """The expression of an attribute, whose name may be any string."""
    return f"{of}.{key}" if key.isidentifier() and not keyword.iskeyword(key) else f"getattr({of}, {key!r})"
