"""The walk through the state of a function: variables, containers, objects and modules."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import inspect
import itertools
import keyword
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..core.compat.modules import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    MODULE_INTERNALS,
    MODULE_MEMBERS,
    has_backward_hooks,
    has_global_hooks,
)
from .bytecode import Reads, reads_of
from .errors import NotRowwiseError
from .objects import (
    MODES,
    PLAIN,
    inherits_a_forward,
    is_apply,
    is_autograd,
    is_of_a_library,
    is_of_python,
    is_pure,
    slots_of,
)
from .reader import Writer

__all__ = ["APPLIED", "INTERNALS", "UNWRAPPED", "Names", "Walk"]

# The most values around a function that a walk visits.
_MOST_VALUES = 4096
# Types of this package that wrap functions, with the attribute that holds the function.
UNWRAPPED: dict[type, str] = {}
# The attributes that these types set themselves. The user may set others, as on a function.
INTERNALS: dict[type, frozenset[str]] = {}
_LEAVES = (*PLAIN, complex, bytes, range, type(...))
# Methods that return modules and parameters whose names the calling code does not contain.
_ACCESSORS = frozenset(
    {
        "apply",
        "buffers",
        "children",
        "get_buffer",
        "get_parameter",
        "get_submodule",
        "modules",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "state_dict",
    }
)
# Special methods that no operator of Python calls on an existing object.
_NOT_CALLED = frozenset(
    {
        "__init__",
        "__init_subclass__",
        "__class_getitem__",
        "__set_name__",
        "__post_init__",
        "__getstate__",
        "__setstate__",
        "__getnewargs__",
        "__copy__",
        "__deepcopy__",
        "__del__",
    }
)
APPLIED = (
    "{} is a torch.autograd.Function with a backward of its own, which no kernel computes; call it "
    "outside, or write a straight-through estimator as x + (q - x).detach()"
)


@dataclass(frozen=True)
class Names:
    """Attributes that functions read: see `Reads`."""

    names: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    everything: bool = False
    catches: bool = False
    calls: bool = False
    supers: bool = False

    @property
    def may_lack(self) -> frozenset[str]:
        """Return the attributes whose absence a function may notice, and continue."""
        return self.names if self.catches else self.optional

    def with_those_of(self, reads: Reads) -> Names:
        """Return the union with the attributes that one more function reads."""
        return Names(
            self.names | reads.names,
            self.optional | reads.optional,
            self.everything or reads.everything,
            self.catches or reads.catches,
            self.calls or reads.calls,
            self.supers or reads.supers,
        )


# What a walk does with a value depends on how it can change:
#
#   numbers, strings         read in each call: constants of the kernels
#   tensors                  read in each call: arguments of the kernels
#   code, classes, enums     compared by identity
#   containers, objects      their class and length are compared; what they hold is visited
#   functions of libraries   compared by identity, and not entered
#   anything else            refused: for example, a generator of random numbers has state in C
#
# Objects are visited by the attributes that any visited function names. To visit all would read
# what no code uses, such as caches, and refuse functions for it. Functions, tensors, members of
# enums, and numbers of the user's classes may have attributes as well.
#
# An attribute that an object lacks may be set later. That matters only to a function that notices
# its absence, by `getattr`, `hasattr` or an error that it catches. For such functions
# `Walk.missing_attributes` checks that the attribute is still absent. Any other function reads the
# attribute only after another trace, before which `Looks.walked` visits it.


class Walk(Writer):
    """One walk through all that a function may read.

    Each method for one type of value checks the type, and visits what the value contains. Every
    check becomes a line of the function that `Writer` writes, in the order of the walk: a line may
    use only variables that earlier lines assign.

    Attributes:
        read: the attributes that the visited functions read.
        simple: for each visited function, the variables that it reads.
        is_simple: whether all of these are numbers, or functions without closures whose defaults
            are numbers.
    """

    def __init__(self, known: Names) -> None:
        super().__init__()
        # A walk visits only attributes whose names are in `known`, and collects in `read` all that
        # its functions read. If `read` has more names, `state` starts another walk with them.
        self.known = self.read = known
        # By identity, with the variable of the value, which is held so that its id is not reused.
        self.seen: dict[int, tuple[Any, str]] = {}
        # By identity, for modules and classes whose attributes alone were visited: the visit of
        # what their call runs, which is the hooks and the forward, or `__init__`.
        self.uncalled: dict[int, Callable[[], None]] = {}
        self.role = ""
        self.count = 0
        self.simple: list[tuple[FunctionType, list[tuple[str, Any]]]] = []
        self.is_simple = True

    # --- values -----------------------------------------------------------------------------------

    def visit(
        self,
        value: Any,
        expression: str,
        name: str,
        *,
        short: str = "",
        required: bool = True,
        role: str = "",
        called: bool = True,
    ) -> None:
        """Visit a value and what it contains.

        Args:
            value: the value of the expression.
            expression: the Python expression that reads it.
            name: its name in messages.
            short: for a tensor, the name of the kernel's argument; "" for ``name``.
            required: whether the function's own code reads it; otherwise a value of an unsupported
                type is skipped.
            role: the noun before the name in messages; "" for the role of the previous visit: what
                a value contains has the value's role.
            called: for a module or class, whether the function may call it.
        """
        self.role = role or self.role
        if expression in self.visited:
            self.visit_call(value, called=called)
            return
        self.visited.add(expression)
        self.count += 1
        if self.count > _MOST_VALUES:
            raise NotRowwiseError(
                f"it reads more than {_MOST_VALUES} values around it; pass what is needed of them"
            )
        handler = self.handler(value)
        if handler is None and not required:
            return
        variable = self.at(expression)
        self.fingerprint.append(name)
        if handler is None:
            self.refuse(variable, value, self.why_unsupported(value, name), _is_unsupported)
        elif handler is Walk.immutable:
            self.check_mode(variable, value, name)
            self.immutable(value, variable)
        elif handler is Walk.leaf:
            self.leaf(value, variable)
        elif handler is Walk.tensor:
            self.tensor(value, variable, name, short)
        elif id(value) in self.seen:
            self.visit_again(value, variable, called=called)
        else:
            self.seen[id(value)] = value, variable
            if handler is Walk.module:
                self.module(value, variable, name, short)
                called |= self.known.calls or self.is_named("forward")
            else:
                handler(self, value, variable, name)
            self.visit_call(value, called=called)

    def visit_again(self, value: Any, variable: str, *, called: bool) -> None:
        """Check that a value is the same object as before, which ends cycles."""
        _, first_variable = self.seen[id(value)]
        self.expect(f"{variable} is {first_variable}")
        self.visit_call(value, called=called)

    def visit_call(self, value: Any, *, called: bool) -> None:
        """Visit what a call of a module or class runs, if it is called, unless this was visited."""
        if called and id(value) in self.uncalled:
            self.uncalled.pop(id(value))()

    def why_unsupported(self, value: Any, name: str) -> str:
        """Return why a value cannot be visited."""
        if is_apply(value):
            return APPLIED.format(value.__self__.__name__)
        if isinstance(value, ModuleType):
            return (
                f"{self.role} {name} is a module of Python, whose numbers may change unseen; name "
                f"them: {name}.NAME"
            )
        if inspect.isbuiltin(value):
            return (
                f"it calls {name}, whose result may change from call to call; pass what it returns"
            )
        step = "pass what is needed of it"
        if type(value).__module__.partition(".")[0] == "numpy" and callable(value):
            function = getattr(value, "__name__", "")
            instead = f"use math.{function}, or " if hasattr(math, function) else ""
            step = f"{instead}compute the number outside"
        return f"{self.role} {name} is a {type(value).__name__}, which may change unseen; {step}"

    def check_mode(self, variable: str, value: Any, name: str) -> None:
        """Raise for a function that returns a mode of PyTorch.

        The check is written first, because the `Look` of a refused function is cached, too: the
        refusal holds only while the variable has this value.
        """
        if getattr(value, "__name__", "") in MODES:
            self.expect(f"{variable} is {self.constant(value)}")
            raise NotRowwiseError(
                f"{self.role} {name} is a function whose result may change unseen; pass what it "
                "returns"
            )

    @staticmethod
    def handler(value: Any) -> Callable[..., None] | None:
        """Return the method that visits a value; None if its type is unsupported."""
        if type(value) in _LEAVES:
            return Walk.leaf
        if type(value) in UNWRAPPED:
            return Walk.unwrapped
        if is_apply(value):
            return None
        for kind, handler in _HANDLERS.items():
            if isinstance(value, kind):
                is_library_code = kind in _CODE and is_of_a_library(value)
                return Walk.immutable if is_library_code else handler
        return _handler_of_other(value)

    def leaf(self, value: Any, variable: str) -> None:
        """Read a number, a string or the like."""
        if value is None:
            self.expect(f"{variable} is None")
            return
        self.expect_type(variable, value)
        # As hexadecimal digits 0.0 differs from -0.0, and NaN equals itself.
        self.leaves.append(f"{variable}.hex()" if isinstance(value, float) else variable)

    def number(self, value: Any, variable: str, name: str) -> None:
        """Read a number or a string whose class is the user's, and its attributes."""
        self.leaf(value, variable)
        self.storable = False
        self.attributes(value, variable, name)

    def tensor(self, value: Tensor, variable: str, name: str, short: str) -> None:
        """Read a tensor, which becomes an argument of the kernels, and its attributes."""
        self.expect(f"isinstance({variable}, Tensor)")
        self.tensors.append((variable, short or name))
        self.storable = False
        if id(value) not in self.seen:
            self.seen[id(value)] = value, variable
            self.attributes(value, variable, name)

    def tensor_argument(self, value: Tensor, expression: str, name: str) -> None:
        """Check that a tensor among the arguments lacks attributes that the code looks for.

        The trace has a tensor without attributes in its place.
        """
        namespace = f"{expression}.__dict__"
        for key in sorted(self.known.may_lack):
            if key in vars(value):
                self.expect(f"{key!r} in {self.at(namespace)}")
                raise NotRowwiseError(
                    f"its argument {name} is a tensor with an attribute {key}, which the trace "
                    "does not see; pass it as an argument of its own"
                )
            self.expect(f"{key!r} not in {self.at(namespace)}")

    def member(self, value: enum.Enum, variable: str, name: str) -> None:
        """Check the identity of an enum's member, and visit its attributes."""
        self.immutable(value, variable)
        if "value" in self.known.names:
            self.visit(value.value, f"{variable}.value", f"{name}.value")
        self.attributes(value, variable, name)

    def immutable(self, value: Any, variable: str) -> None:
        """Check the identity of a value that does not change."""
        self.expect(f"{variable} is {self.constant(value)}")
        self.fingerprint.append(value)

    def unwrapped(self, value: Any, variable: str, name: str) -> None:
        """Visit the function in an object of this package, and the user's attributes of it."""
        self.expect_type(variable, value)
        attribute = UNWRAPPED[type(value)]
        self.visit(getattr(value, attribute), f"{variable}.{attribute}", name)
        internals = INTERNALS.get(type(value))
        if internals is None:
            return
        own = {key: inner for key, inner in vars(value).items() if key not in internals}
        self.own_attributes(own, f"{variable}.__dict__", name, whole=False)
        self.missing_attributes({f"{variable}.__dict__": vars(value)})

    # --- functions --------------------------------------------------------------------------------

    def root(self, function: FunctionType) -> None:
        """Visit the function itself, whose defaults are among the arguments."""
        variable = self.constant(function)
        self.seen[id(function)] = function, variable
        self.outer_variables(function, "")
        self.attributes_of_function(function, variable, function.__name__)

    def function(self, value: FunctionType, variable: str, name: str) -> None:
        """Visit another function, with its defaults."""
        self.expect_type(variable, value)
        self.expect(f"{variable}.__code__ is {self.constant(value.__code__)}")
        for attribute in ("__defaults__", "__kwdefaults__"):
            self.visit(getattr(value, attribute), f"{variable}.{attribute}", f"{name}.{attribute}")
        self.outer_variables(value, variable)
        self.attributes_of_function(value, variable, name)

    def attributes_of_function(self, function: FunctionType, variable: str, name: str) -> None:
        """Visit a function's attributes: those that were set, and its names."""
        for attribute in sorted(_NAMES_OF_A_FUNCTION & self.known.names):
            text = getattr(function, attribute)
            self.visit(text, f"{variable}.{attribute}", f"{name}.{attribute}")
        self.attributes(function, variable, name)

    def outer_variables(self, function: FunctionType, variable: str) -> None:
        """Visit a function's closure and the globals that it reads.

        ``variable`` is "" for the root: its cells and globals are constants of the written
        function. The written function reads the cells and globals of other functions as attributes.
        """
        code = function.__code__
        scope = function.__globals__
        reads = reads_of(code)
        self.codes.append(code)
        self.fingerprint.append(code)
        self.read = self.read.with_those_of(reads)
        if reads.refusal:
            raise NotRowwiseError(reads.refusal)
        simple: list[tuple[str, Any]] = []
        self.simple.append((function, simple))
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        globals_ = self.at(f"{variable}.__globals__") if variable else self.constant(scope)
        for name, *attributes in reads.chains:
            alone = name in reads.alone
            if name in cells:
                cell = cells[name]
                cell_expression = self.cell_of(cell, code, name, variable)
                if _is_empty(cell):
                    self.is_simple = False
                    self.expect(f"{self.constant(_is_empty)}({cell_expression})")
                    continue
                value = cell.cell_contents
                expression = f"{cell_expression}.cell_contents"
            elif name in scope:
                value = scope[name]
                expression = f"{globals_}[{name!r}]"
            else:  # one of the builtins, unless the module defines it later
                self.is_simple &= hasattr(builtins, name)
                self.expect(f"{name!r} not in {globals_}")
                continue
            self.chain(value, expression, name, attributes, simple, alone=alone)

    def cell_of(self, cell: CellType, code: CodeType, name: str, variable: str) -> str:
        """Return the expression of a cell: see `outer_variables` for ``variable``."""
        if variable:
            return f"{variable}.__closure__[{code.co_freevars.index(name)}]"
        return self.constant(cell)

    def chain(
        self,
        value: Any,
        expression: str,
        name: str,
        attributes: list[str],
        simple: list[tuple[str, Any]],
        *,
        alone: bool,
    ) -> None:
        """Visit a variable; if it is a Python module, only the attribute that the code reads.

        For ``config.sizes.HIDDEN``, with the user's modules ``config`` and ``config.sizes``, the
        value of ``HIDDEN`` is visited. For ``config.HIDDEN.real`` it is also that of ``HIDDEN``.
        See `Reads` for ``alone``.
        """
        alone |= isinstance(value, ModuleType)
        while isinstance(value, ModuleType) and not is_of_a_library(value) and attributes:
            attribute = attributes.pop(0)
            module = self.at(expression)
            expression, name = f"{module}.{attribute}", f"{name}.{attribute}"
            if not hasattr(value, attribute):
                self.is_simple = False
                self.expect(f"not hasattr({module}, {attribute!r})")
                return
            value = getattr(value, attribute)
        if attributes and attributes[0] == "apply" and is_autograd(value):
            return  # the trace refuses it, with the line
        self.add_simple(value, name, simple)
        called = alone and not attributes
        self.visit(value, expression, name, role="the variable", called=called)

    def add_simple(self, value: Any, expression: str, simple: list[tuple[str, Any]]) -> None:
        """Add a variable, and a function's defaults, to those that Dynamo is to guard on.

        `Guards` compares them. It can do so only if `is_simple` stays True; else Dynamo traces the
        function itself.
        """
        while UNWRAPPED.get(type(value)) == "function":
            value, expression = value.function, f"{expression}.function"
        handler = self.handler(value)
        self.is_simple &= handler in (Walk.leaf, Walk.function, Walk.immutable)
        if not isinstance(value, ModuleType):
            simple.append((expression, value))
        if handler is not Walk.function:
            return
        for default_expression, default in _defaults_of(value, expression):
            simple.append((default_expression, default))
            self.is_simple &= isinstance(default, PLAIN)
        if value.__closure__:
            self.is_simple = False

    def method(self, value: MethodType, variable: str, name: str) -> None:
        """Visit a bound method: its function and its object."""
        self.expect_type(variable, value)
        if not is_of_a_library(value.__func__):
            self.visit(value.__func__, f"{variable}.__func__", name)
        else:
            self.immutable(value.__func__, f"{variable}.__func__")
        self.visit(value.__self__, f"{variable}.__self__", name)

    def partial(self, value: functools.partial[Any], variable: str, name: str) -> None:
        """Visit a partial application: its function and arguments."""
        self.expect_type(variable, value)
        self.visit(value.func, f"{variable}.func", name)
        self.visit(value.args, f"{variable}.args", f"{name}.args")
        self.visit(value.keywords, f"{variable}.keywords", f"{name}.keywords")
        self.attributes(value, variable, name)

    def descriptor(self, value: Any, variable: str, name: str) -> None:
        """Visit the function of a property."""
        self.expect_type(variable, value)
        attribute = "fget" if isinstance(value, property) else "func"
        self.visit(getattr(value, attribute), f"{variable}.{attribute}", name)

    # --- containers -------------------------------------------------------------------------------

    def sequence(self, value: Any, variable: str, name: str) -> None:
        """Visit the elements of a tuple or a list."""
        self.expect_type(variable, value)
        self.expect(f"len({variable}) == {len(value)}")
        self.fingerprint.append(len(value))
        for i, inner in enumerate(value):
            self.visit(inner, f"{variable}[{i}]", f"{name}[{i}]", short=f"{name}_{i}")
        self.subclassed(value, variable, name)

    def mapping(self, value: dict[Any, Any], variable: str, name: str) -> None:
        """Visit the values of a dict."""
        self.expect_type(variable, value)
        self.expect(f"tuple({variable}) == {self.constant(tuple(value))}")
        if _has_other_keys(value):
            why = "is a dict whose keys are no strings; pass what is needed of it"
            self.refuse(variable, value, f"{self.role} {name} {why}", _has_other_keys)
        self.fingerprint.append(list(map(str, value)))
        for key, inner in value.items():
            index = repr(key) if type(key) in (str, int) else self.constant(key)
            self.visit(inner, f"{variable}[{index}]", f"{name}[{key!r}]", short=f"{name}_{key}")
        self.subclassed(value, variable, name)

    def subclassed(self, value: Any, variable: str, name: str) -> None:
        """Visit the attributes of an object whose class inherits from a container's."""
        if not is_of_a_library(type(value)):
            self.attributes(value, variable, name)

    def set(self, value: Any, variable: str, name: str) -> None:
        """Read a set of numbers or strings."""
        self.expect_type(variable, value)
        if _has_objects(value):
            why = "is a set of other things than numbers; pass what is needed of it"
            self.refuse(variable, value, f"{self.role} {name} {why}", _has_objects)
        # Sorted with their types: a set has no order, and strings and numbers do not compare.
        self.leaves.append(f"tuple(sorted([(type(one).__name__, one) for one in {variable}]))")

    # --- objects ----------------------------------------------------------------------------------

    def instance(self, value: Any, variable: str, name: str) -> None:
        """Visit an object of a Python class."""
        self.expect_type(variable, value)
        self.storable = False
        self.attributes(value, variable, name, whole=is_of_a_library(type(value)))

    def class_object(self, value: type, variable: str, name: str) -> None:
        """Visit a class whose attributes a function reads, and its ``__init__`` if it is called."""
        self.expect(f"{variable} is {self.constant(value)}")
        self.storable = False
        self.uncalled[id(value)] = functools.partial(
            self.special_methods, value, name, instantiated=True
        )
        self.class_attributes(value, name, None, "")
        self.missing_attributes(self.namespaces_of_classes(value))
        metaclass = type(value)
        # `EnumType` and `ABCMeta` have no attributes that a function reads.
        if metaclass.__module__ not in sys.stdlib_module_names:
            self.class_attributes(metaclass, name, vars(value), f"{variable}.__dict__")
            self.special_methods(metaclass, name, instantiated=False)
            self.missing_attributes(self.namespaces_of_classes(metaclass))

    def attributes(self, value: Any, variable: str, name: str, *, whole: bool = False) -> None:
        """Visit the attributes of an object that the function's code names.

        See `own_attributes` for ``whole``.
        """
        kind = type(value)
        own = getattr(value, "__dict__", None)
        namespace = "" if own is None else f"{variable}.__dict__"
        namespaces = {}
        if own is not None:
            namespaces[namespace] = own
            self.own_attributes(own, namespace, name, whole=whole)
        self.slots(value, variable, name, kind.__mro__ if whole else _user_classes(kind))
        self.class_attributes(kind, name, own, namespace)
        self.special_methods(kind, name, instantiated=False)
        self.missing_attributes(namespaces | self.namespaces_of_classes(kind))

    def slots(self, value: Any, variable: str, name: str, classes: Iterable[type]) -> None:
        """Visit the attributes in slots; an empty slot is checked to be still empty."""
        for key in filter(self.is_named, slots_of(classes)):
            if hasattr(value, key):
                self.visit(getattr(value, key), _attribute(variable, key), f"{name}.{key}")
            else:
                self.expect(f"not hasattr({variable}, {key!r})")

    def own_attributes(
        self, own: dict[str, Any], namespace: str, name: str, *, whole: bool
    ) -> None:
        """Visit the attributes that an object has itself.

        Those of a library's object are visited as a ``whole``: its code is not read, so that it
        may read every attribute.
        """
        for key, inner in list(own.items()):
            named = self.is_named(key)
            if whole or named:
                self.is_simple = False
                item = f"{self.at(namespace)}[{key!r}]"
                self.visit(inner, item, f"{name}.{key}", required=named)

    def missing_attributes(self, namespaces: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that attributes which an object lacks are still missing.

        Where the code computes the names of attributes, it may look for any: so the object and its
        classes have to have as many attributes as before.

        Args:
            namespaces: the attributes of the object, and those of its classes, by the expressions
                that read them.
        """
        if self.known.everything:
            for expression, namespace in namespaces.items():
                self.expect(f"len({self.at(expression)}) == {len(namespace)}")
            return
        missing = sorted(self.known.may_lack.difference(*namespaces.values()))
        self.is_simple &= not missing
        for expression, namespace in namespaces.items():
            if missing and not namespace:
                self.expect(f"not {self.at(expression)}")
                continue
            for key in missing:
                self.expect(f"{key!r} not in {self.at(expression)}")

    def namespaces_of_classes(self, kind: type) -> dict[str, Mapping[str, Any]]:
        """Return the attributes of a class and those that it inherits from, by expressions."""
        return {f"{self.constant(owner)}.__dict__": vars(owner) for owner in _user_classes(kind)}

    def is_named(self, key: Any) -> bool:
        """Whether the code of a visited function contains the name of an attribute."""
        return self.known.everything or key in self.known.names

    def class_attributes(self, kind: type, name: str, own: Any, namespace: str) -> None:
        """Visit the attributes that an object has from its class.

        For an object without an own ``scale``, whose class has ``scale = 2.0``, the lines are::

            if not ('scale' not in v2): return None     # v2: namespace
            v3 = c1.scale                               # c1: the class

        Args:
            kind: the class.
            name: the object's name in messages.
            own: the object's own attributes; None for a class itself.
            namespace: the expression of the object's ``__dict__``; "" if it has none.
        """
        classes = _user_classes(kind)
        keys = dict.fromkeys(itertools.chain.from_iterable(map(vars, classes)))
        owner = self.constant(kind) if classes else ""
        named = filter(self.is_named, itertools.filterfalse(_is_special, keys))
        own_keys = () if own is None else own
        for key in named:
            owners = [one for one in kind.__mro__ if key in vars(one)]
            raw = vars(owners[0])[key]
            # An object's own attribute comes first, but not before a property of its class.
            is_hidden = key in own_keys and not isinstance(raw, property)
            if not (is_hidden or isinstance(raw, _IN_C)):
                if namespace:
                    self.expect(f"{key!r} not in {self.at(namespace)}")
                self.class_attribute(raw, kind, key, owner, name)
            # Attributes that the class overrides are read by `super`.
            inherited = itertools.pairwise(owners) if self.known.supers else ()
            for before, after in inherited:
                following = f"super({self.constant(before)}, {owner})"
                self.class_attribute(vars(after)[key], kind, key, following, name)

    def class_attribute(self, raw: Any, kind: type, key: str, owner: str, name: str) -> None:
        """Visit an attribute of a class.

        Args:
            raw: the attribute as it is in the class: a property, not its value.
            kind: the class that has or inherits it.
            key: its name.
            owner: the expression whose attribute it is.
            name: the name of the class or object in messages.
        """
        if isinstance(raw, _IN_C):
            return
        expression = _attribute(owner, key)
        if isinstance(raw, classmethod):
            raw, expression = raw.__func__, f"{expression}.__func__"
            if self.known.calls:  # of its first argument, perhaps
                self.visit(kind, self.constant(kind), name)
        elif isinstance(raw, staticmethod):
            raw = raw.__func__
        elif isinstance(raw, types.DynamicClassAttribute):
            raw = getattr(kind, key, raw)  # a member of an enum, in Python 3.11
        elif isinstance(raw, (property, functools.cached_property)):
            self.note_hasattr(runs_code=key in self.known.optional)
        self.visit(raw, expression, f"{name}.{key}")

    def note_hasattr(self, *, runs_code: bool) -> None:
        """Note whether `hasattr` runs the user's code, whose AttributeErrors it catches.

        The code is a property or a ``__getattr__``.
        """
        if runs_code:
            self.read = dataclasses.replace(self.read, catches=True)

    def special_methods(self, kind: type, name: str, *, instantiated: bool) -> None:
        """Visit methods that Python itself calls, such as ``__call__``.

        No code contains their names. Those that create an object are visited for a class only, but
        not the ``__init__`` that a dataclass generates.
        """
        for owner in _user_classes(kind):
            constructors = _constructors_of(owner) if instantiated else ()
            for key, inner in vars(owner).items():
                is_called = key in constructors or _is_operator(key)
                if is_called and isinstance(inner, FunctionType):
                    is_fallback = key == "__getattr__"
                    self.note_hasattr(runs_code=is_fallback and bool(self.known.optional))
                    self.visit(inner, f"{self.constant(owner)}.{key}", f"{name}.{key}")

    # --- modules of PyTorch -----------------------------------------------------------------------

    # What a call of a module reads, all of which may change between two calls:
    #
    #   module.__dict__     attributes, training mode, a forward of its own
    #   _parameters, ...    members by name, each of which may be replaced
    #   hooks               of the module, and of all modules
    #   type(module)        the forward, properties, numbers of the class
    #
    # Without a forward whose code names them, members may still be read by iteration, as by
    # `parameters()`: then all of them are visited, and their names compared.

    def module(self, value: nn.Module, variable: str, name: str, short: str) -> None:
        """Visit a module's attributes, parameters, buffers and children; its forward if called.

        An attribute is visited if the code names it, or all are if the code may reach every one.
        ``short`` begins the names of the kernels' arguments, which have to be identifiers. It is ""
        for a module in a plain variable::

            norm.weight         weight
            layers[0].weight    layers_0_weight
        """
        self.expect_type(variable, value)
        self.storable = False
        namespace = self.at(f"{variable}.__dict__")
        namespaces = {namespace: vars(value)}
        self.check_module(value, variable, name, namespace)
        whole = self.reaches_all_members(value)
        prefix = f"{short}_" if short else ""
        for key, inner in list(vars(value).items()):
            named = self.is_named(key)
            is_internal = key in MODULE_INTERNALS
            if is_internal or not (whole or named):
                continue
            self.visit(
                inner,
                f"{namespace}[{key!r}]",
                f"{name}.{key}",
                short=f"{prefix}{key}",
                required=named,
            )
        for registry in MODULE_MEMBERS:
            members = vars(value)[registry]
            self.members(members, f"{namespace}[{registry!r}]", name, prefix, whole=whole)
            namespaces[f"{namespace}[{registry!r}]"] = members
        # A member hides an attribute of the class, as an own attribute does.
        own = dict(vars(value))
        for registry in MODULE_MEMBERS:
            own.update(vars(value)[registry])
        self.class_attributes(type(value), name, own, namespace)
        self.missing_attributes(namespaces | self.namespaces_of_classes(type(value)))
        self.uncalled[id(value)] = functools.partial(self.call, value, namespace, name)

    def reaches_all_members(self, module: nn.Module) -> bool:
        """Whether the code may reach every member of a module, also those that it does not name."""
        if self.known.everything or inherits_a_forward(type(module)):
            return True
        return not _ACCESSORS.isdisjoint(self.known.names)

    def check_module(self, value: nn.Module, variable: str, name: str, namespace: str) -> None:
        """Raise for a module that is not initialised, or has backward hooks."""
        if _is_not_initialised(value):
            why = f"{self.role} {name} is a module that was not initialised"
            self.refuse(variable, value, why, _is_not_initialised)
        if has_backward_hooks(value):
            self.expect(f"{self.constant(has_backward_hooks)}({variable})")
            raise NotRowwiseError(
                f"{self.role} {name} is a module with backward hooks, which no kernel calls; call "
                "it outside"
            )
        for registry in BACKWARD_HOOKS:
            self.expect(f"not {namespace}[{registry!r}]")

    def members(
        self, members: dict[str, Any], expression: str, name: str, prefix: str, *, whole: bool
    ) -> None:
        """Visit the parameters, buffers or children of a module."""
        if whole and members:
            self.expect(f"tuple({self.at(expression)}) == {self.constant(tuple(members))}")
        elif whole:
            self.expect(f"not {expression}")
        visited = list(members) if whole else list(filter(self.is_named, members))
        for key in visited:
            item = f"{self.at(expression)}[{key!r}]"
            self.visit(members[key], item, f"{name}.{key}", short=f"{prefix}{key}")

    def call(self, value: nn.Module, namespace: str, name: str) -> None:
        """Visit what a call of a module runs: its hooks, and the forward."""
        has_hooks = f"{self.constant(has_global_hooks)}()"
        if has_global_hooks():
            self.expect(has_hooks)
            raise NotRowwiseError(
                f"{self.role} {name} is a module, and there are hooks on all modules; call it "
                "outside"
            )
        self.expect(f"not {has_hooks}")
        for registry in FORWARD_HOOKS:
            hooks = vars(value)[registry]
            expression = f"{namespace}[{registry!r}]"
            self.expect(f"len({expression}) == {len(hooks)}" if hooks else f"not {expression}")
            for i, hook in enumerate(hooks.values()):
                self.visit(hook, f"list({expression}.values())[{i}]", f"a hook of {name}")
        if "forward" not in vars(value):
            self.expect(f"'forward' not in {namespace}")
            forward = f"{self.constant(type(value))}.forward"
            self.visit(type(value).forward, forward, f"{name}.forward")
        else:
            self.visit(vars(value)["forward"], f"{namespace}['forward']", f"{name}.forward")
        self.special_methods(type(value), name, instantiated=False)


# The order decides: an enum's member may be an int or a str as well. A user's file that is imported
# as a module has no handler.
_HANDLERS: dict[type, Callable[..., None] | None] = {
    enum.Enum: Walk.member,
    float: Walk.number,
    int: Walk.number,
    str: Walk.number,
    Tensor: Walk.tensor,
    ModuleType: None,
    nn.Module: Walk.module,
    FunctionType: Walk.function,
    MethodType: Walk.method,
    functools.partial: Walk.partial,
    property: Walk.descriptor,
    functools.cached_property: Walk.descriptor,
    type: Walk.class_object,
    tuple: Walk.sequence,
    list: Walk.sequence,
    dict: Walk.mapping,
    set: Walk.set,
    frozenset: Walk.set,
}
_CODE = (FunctionType, ModuleType, type)
_NAMES_OF_A_FUNCTION = frozenset({"__name__", "__qualname__", "__module__", "__doc__"})
# Descriptors that are written in C: slots, and methods of types in C.
_IN_C = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
)


def _handler_of_other(value: Any) -> Callable[..., None] | None:
    """Return the method that visits a function in C, or an object; None for unsupported ones."""
    if inspect.isbuiltin(value):
        return Walk.immutable if is_pure(value) else None
    if callable(value) and is_of_a_library(value):
        return Walk.immutable
    return Walk.instance if is_of_python(type(value)) else None


def _defaults_of(function: FunctionType, expression: str) -> Iterator[tuple[str, Any]]:
    """Yield a function's defaults, each with the expression that reads it."""
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"{expression}.__defaults__[{index}]", default
    for key, default in (function.__kwdefaults__ or {}).items():
        yield f"{expression}.__kwdefaults__[{key!r}]", default


def _user_classes(kind: type) -> list[type]:
    """Return a class and those that it inherits from, without those of libraries."""
    return list(itertools.filterfalse(is_of_a_library, kind.__mro__))


def _is_empty(cell: CellType) -> bool:
    """Whether a cell's variable is not assigned yet, or was deleted."""
    try:
        cell.cell_contents  # noqa: B018 - the read raises
    except ValueError:
        return True
    return False


def _constructors_of(kind: type) -> tuple[str, ...]:
    """Return the methods of the user's that create an object of a class."""
    if dataclasses.is_dataclass(kind):
        return ("__post_init__",)
    return ("__post_init__", "__init__")


# Reasons to refuse a value, which are looked at again in each call: see `Writer.refuse`.


def _is_unsupported(value: Any) -> bool:
    return Walk.handler(value) is None


def _is_not_initialised(module: nn.Module) -> bool:
    return not vars(module).keys() >= {*BACKWARD_HOOKS, *FORWARD_HOOKS, *MODULE_MEMBERS}


def _has_other_keys(value: dict[Any, Any]) -> bool:
    """Whether a dict has keys that cannot be in the fingerprint of a state."""
    return not all(type(key) in (str, int) or isinstance(key, enum.Enum) for key in value)


def _has_objects(value: Any) -> bool:
    """Whether a set has elements that are neither numbers nor strings."""
    return not all(type(element) in (str, int, bool) for element in value)


def _is_special(key: str) -> bool:
    """Whether the name is one of Python's own, between double underscores."""
    return key.startswith("__") and key.endswith("__")


def _is_operator(key: str) -> bool:
    """Whether Python calls a method of this name for an operator or a built-in function."""
    return _is_special(key) and key not in vars(object) and key not in _NOT_CALLED


def _attribute(expression: str, key: str) -> str:
    """Return the expression of an attribute, whose name may be any string."""
    if key.isidentifier() and not keyword.iskeyword(key):
        return f"{expression}.{key}"
    return f"getattr({expression}, {key!r})"
