"""Rules for modules recognised by the steps of their forwards, whatever their class.

`rewriting` finds steps that one operator can compute and rewrites the forward to call it. This
module turns the result into a `Rule`:

    module --_key--> kinds of children and conditions --structural_rule--> methods of the rule

The rewriting depends on the class and the key alone. So modules with equal keys share a rule, and a
saved model, which stores the key, builds the rule again.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F

from . import compiling, parts
from .autocast import consumers
from .fingerprint import definition, unwrapped
from .hooks import has_hooks, is_linear, is_plain, is_unchanged, submodule
from .rewriting import (
    WRITES,
    Rewritten,
    Step,
    attributes_tested,
    attributes_written,
    called_paths,
    compiled,
    conditions,
    readable,
    rewrapped,
    rewrite,
    rows_of,
    self_name_of,
)
from .rule import At, Family, Rule, has_method, judge
from .tricks import allowed
from .tricks.casts import cast_together
from .tricks.masks import laid_out
from .tricks.packing import packable, packed_to

__all__ = ["family", "structural_rule"]

Method = Callable[..., Any]
# The methods to rewrite: the forward, and what Transformers' experts call between their products.
_METHODS = ("forward", "_apply_gate")
# Names and kinds, sorted. A name is a path of a child, or has a prefix:
#
#     "mlp.act"     a child's kind: "linear", "norm", "dropout", ...
#     " F.dropout"  a function's kind
#     "?self.bias"  a condition's value: "True" or "False"
#     "!method"     the method is not used
Key = tuple[tuple[str, str], ...]
# The helpers that rewritten functions call. They are in the functions' closure, since the globals
# are the original's, where these names could mean anything.
_HELPERS: dict[str, Any] = {
    **{name: getattr(parts, name) for name in parts.__all__},
    "cast_together": cast_together,
}


def family(leaf_rules: tuple[Rule | Family, ...]) -> Family:
    """Return the family of all modules with steps to fuse.

    Args:
        leaf_rules: the rules that recognise norms and activations.
    """
    return Family(
        name="structure",
        key=lambda module: _key(module, leaf_rules),
        rule=structural_rule,
        names=("attention", "block", "mlp"),
    )


def _key(module: nn.Module, leaf_rules: tuple[Rule | Family, ...]) -> Key | None:
    """Return the names that the module's methods use, with their kinds; None if nothing fuses."""
    cls = type(module)
    # Steps are joined with those of layers, which are children.
    if not module._modules:
        return None
    # PyTorch's own layers have rules in the table.
    if cls.__module__.startswith("torch."):
        return None
    kinds = _kinds(module, leaf_rules)
    # Only the names that have a kind: `rewriting` has no use for the others.
    key = tuple(sorted(filter(operator.itemgetter(1), kinds.items())))
    if not key:
        return None
    return key if structural_rule(cls, key) is not None else None


def _kinds(module: nn.Module, leaf_rules: tuple[Rule | Family, ...]) -> dict[str, str]:
    """Return the names and kinds of a key; "" for what `rewriting` has no use for."""
    kinds: dict[str, str] = {}
    # Experts without a gate have `_apply_gate` too, but do not call it.
    if not getattr(module, "has_gate", True):
        kinds["!_apply_gate"] = "unused"
    for name in _METHODS:
        method = _read(getattr(type(module), name, None))
        if method is not None:
            kinds |= _kinds_in(module, *method, leaf_rules)
    return kinds


def _kinds_in(
    module: nn.Module,
    function: FunctionType,
    tree: ast.FunctionDef,
    leaf_rules: tuple[Rule | Family, ...],
) -> dict[str, str]:
    """Return the names and kinds of what one method uses."""
    kinds: dict[str, str] = {}
    paths, names = called_paths(tree)
    tested = attributes_tested(tree)
    for path in paths:
        kinds[path] = _kind(module, path, leaf_rules)
        if tested & _written_by(type(module), path, set()):
            kinds[path] = WRITES
    for name in names:
        kinds[" " + name] = _global_kind(function, name)
    # A condition on an attribute that a method writes may have two values in one call.
    if WRITES in kinds.values():
        return kinds
    for text in conditions(tree):
        # The mode may change after the module is fused.
        if ".training" not in text:
            kinds["?" + text] = _truth(module, tree, text)
    return kinds


def _written_by(cls: type, name: str, seen: set[str]) -> set[str]:
    """Return the attributes that a method of a class writes, or one that it calls."""
    method = getattr(cls, name, None)
    tree = definition(method) if inspect.isfunction(method) else None
    # Methods may call each other, or themselves.
    if tree is None or name in seen:
        return set()
    seen.add(name)
    written = attributes_written(tree)
    paths, _ = called_paths(tree)
    return written.union(*[_written_by(cls, path, seen) for path in paths])


def _kind(module: nn.Module, path: str, leaf_rules: tuple[Rule | Family, ...]) -> str:
    """Return the kind of what is at the path in a module, for `rewriting.Kinds`."""
    child = _attribute(module, path)
    if child is None:
        return "absent"
    if not isinstance(child, nn.Module):
        return _activation_kind(child)
    if is_linear(child) or _adapts_linear(child):
        return "linear"
    # `parts.dropped` leaves an identity out.
    if type(child) in (nn.Dropout, nn.Identity):
        return "dropout"
    return _fused_kind(child, leaf_rules)


def _fused_kind(child: nn.Module, leaf_rules: tuple[Rule | Family, ...]) -> str:
    """Return the kind of a module by its rule, or by what is in it."""
    # If the module is fused already, `judge` would return no rule for its class.
    rule = getattr(type(child), "_fusedops_rule", None) or judge(child, leaf_rules).rule
    if has_method(rule, "_fusedops_add_norm"):
        return "norm"
    if _activates(rule, child):
        return "activation"
    # A module without children has no last layer that it could leave to its block.
    return "module" if child._modules else ""


def _attribute(value: Any, path: str) -> Any:
    """Return the attribute at a path, or None."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _activation_kind(value: Any) -> str:
    is_activation = callable(value) and parts.activation_name(value)
    return "activation" if is_activation else ""


def _adapts_linear(module: nn.Module) -> bool:
    """Whether this is an adapter, such as PEFT's, that is called instead of a linear layer."""
    inner = getattr(module, "base_layer", None)
    if not isinstance(inner, nn.Module):
        return False
    return is_linear(inner) or _adapts_linear(inner)


def _truth(module: nn.Module, tree: ast.FunctionDef, condition: str) -> str:
    """Return the value of a condition on the module's attributes, or "" if it has none."""
    value = _evaluated(module, self_name_of(tree), condition)
    if not isinstance(value, bool):
        return ""
    return str(value)


def _evaluated(module: nn.Module, self_name: str, expression: str) -> Any:
    """Return the value of an expression of the module's attributes; None if it raises."""
    try:
        return eval(expression, {"__builtins__": {}}, {self_name: module})
    # Whatever a property of the module raises, the condition stays in the code.
    except Exception:  # noqa: BLE001
        return None


def _global_kind(function: FunctionType, name: str) -> str:
    """Return the kind of what a global name means in a function, for `rewriting.Kinds`."""
    # The name is looked up: any function may be called `dropout`.
    root, *attributes = name.split(".")
    value = function.__globals__.get(root)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    if value is F.dropout:
        return "functional dropout"
    return _activation_kind(value)


@functools.lru_cache(maxsize=4096)
def _read(function: Any) -> tuple[FunctionType, ast.FunctionDef] | None:
    """Return a method and its tree, or None if it cannot be compiled again from its source."""
    function, _wrappers = unwrapped(function)
    tree = readable(function)
    return None if tree is None else (function, tree)


def structural_rule(cls: type[nn.Module], key: Key) -> Rule | None:
    """Return the rule for a class and a key, or None if nothing in its methods can be fused."""
    # The methods are part of the cache's key, since a class may be patched.
    functions = tuple([getattr(cls, name, None) for name in _METHODS])
    hashable: Any = cls  # to mypy a class is not hashable
    return _built(hashable, functions, key)


@functools.lru_cache(maxsize=4096)
def _built(cls: Any, functions: tuple[Any, ...], key: Key) -> Rule | None:
    kinds = dict(key)
    building = _Building(kinds)
    for name, method in zip(_METHODS, functions, strict=True):
        read = _read(method)
        if read is not None and "!" + name not in kinds:
            function, tree = read
            building.add_method(name, method, function, tree)
            if name == "forward":
                building.add_branch(cls, method, function, tree)
                building.add_consumers(tree)
    steps, left_paths = building.steps, building.left_paths
    if steps or left_paths:
        return _rule(building.methods, steps, left_paths, key)
    return None


class _Building:
    """The methods of a rule while they are built, and what they do.

    Attributes:
        methods: the methods by name.
        steps: those that the methods join.
        left_paths: what the forward leaves to the block.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.methods: dict[str, Method] = {}
        self.steps: tuple[Step, ...] = ()
        self.left_paths: tuple[str, ...] = ()
        self._kinds = kinds
        # The conditions on the module's attributes, and whether they hold.
        self._facts: dict[str, bool] = {}
        for name, kind in kinds.items():
            if name.startswith("?"):
                self._facts[name[1:]] = kind == "True"

    def _kind_of(self, path: str) -> str:
        return self._kinds.get(path, "")

    def _rewritten(self, tree: ast.FunctionDef, *, leaving: bool) -> Rewritten | None:
        return rewrite(tree, self._kind_of, leaving=leaving, facts=self._facts)

    def add_method(
        self, name: str, method: Any, function: FunctionType, tree: ast.FunctionDef
    ) -> None:
        """Add a method with its steps joined, if that pays.

        Args:
            name: the method's name.
            method: the method as the class has it, perhaps in wrappers.
            function: the function inside.
            tree: the function's tree.
        """
        rewritten = self._rewritten(tree, leaving=False)
        if rewritten is not None and _pays(rewritten, self._kinds):
            _inner, wrappers = unwrapped(method)
            self.methods[name] = rewrapped(compiled(function, rewritten.tree, _HELPERS), wrappers)
            self.steps += rewritten.steps

    def add_branch(
        self, cls: type, method: Any, function: FunctionType, tree: ast.FunctionDef
    ) -> None:
        """Add a second forward, which leaves its last steps to a block; see `add_method`."""
        rewritten = self._rewritten(tree, leaving=True)
        if rewritten is None:
            return
        self.left_paths = rewritten.leaves
        _inner, wrappers = unwrapped(method)
        unfinished = rewrapped(compiled(function, rewritten.tree, _HELPERS), wrappers)
        # An attention leaves its last layer, and maybe a dropout: `leaves` has them in this order.
        unfinished = _with_tricks(unfinished, cls, tree, self.left_paths[0])
        # A module that keeps its own forward has to follow later patches of it.
        if "forward" not in self.methods:
            unfinished = _unless_patched(unfinished)
        self.methods["_fusedops_branch"] = unfinished

    def add_consumers(self, tree: ast.FunctionDef) -> None:
        """Add the method that returns the layers to which the rows go, if they go nowhere else."""
        paths = rows_of(tree, self._kind_of)
        if paths:
            self.methods |= consumers(*paths)


def _pays(rewritten: Rewritten, kinds: Mapping[str, str]) -> bool:
    """Whether it is worth replacing the method: it fuses more than biases of layers with sums."""
    for step in rewritten.steps:
        if step.kind != "add":
            return True
        # A path that begins with a space is a functional dropout's.
        if any(kinds.get(path, "dropout") != "linear" for path in step.sources):
            return True
    return False


def _unless_patched(unfinished: Method) -> Method:
    """Return the method, with a fallback to the module's own forward if that is patched later."""

    def branch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_unchanged(type(self), "forward"):
            return unfinished(self, *args, **kwargs)
        return parts.whole(self(*args, **kwargs))

    return branch


def _with_tricks(unfinished: Method, cls: type, tree: ast.FunctionDef, last: str) -> Method:
    """Return the method with the tricks for attentions, or as it is if none applies.

    Args:
        unfinished: the method.
        cls: the module's class.
        tree: the class's forward.
        last: the path of the attention's last layer.
    """
    arguments = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
    names = [argument.arg for argument in arguments]
    qkv, scales_query = packable(cls)
    if qkv:
        unfinished = _with_packing(unfinished, names[1], last, qkv, scales_query=scales_query)
    if any("mask" in name for name in names):
        unfinished = _with_masks(unfinished, names[1])
    return unfinished


def _with_packing(
    unfinished: Method, first: str, last: str, qkv: tuple[str, ...], *, scales_query: bool
) -> Method:
    """Return the method with query, key and value as one product; ``first`` names its rows."""

    def branch(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if args else kwargs.get(first)
        # Raises as the original does.
        if rows is None:
            return unfinished(self, *args, **kwargs)
        kv_rows = kwargs.get("key_value_states")
        # A query that is scaled is not packed. With ``kv_rows``, `packed_to` packs key and value
        # alone, so pass the query's rows as these.
        if kv_rows is None and scales_query:
            kv_rows = rows
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        replacements = packed_to(last, self, qkv, rows, kv_rows, cache)
        return unfinished(parts.replacing(self, replacements), *args, **kwargs)

    return branch


def _with_masks(unfinished: Method, first: str) -> Method:
    """Return the method with masks laid out for PyTorch's fused attention."""

    def branch(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if args else kwargs.get(first)
        # A forward may have a default for its rows.
        if rows is not None and compiling.makes_kernels(rows) and allowed(self, "masks"):
            # The mask may be a positional or a keyword argument.
            args = tuple(map(laid_out, args))
            kwargs = {name: laid_out(value) for name, value in kwargs.items()}
        return unfinished(self, *args, **kwargs)

    return branch


def _rule(
    methods: dict[str, Method], steps: tuple[Step, ...], left_paths: tuple[str, ...], key: Key
) -> Rule:
    """Build the rule of a module with these steps, which leaves these paths to its block."""
    kinds = dict(key)
    sources: set[str] = set()
    # A dict keeps the order.
    paths: dict[str, None] = {}
    for step in steps:
        sources.update(step.sources)
        paths.update(dict.fromkeys((step.path, *step.sources)))
    # Modules are left out, as they have reports of their own. So are paths that are no child's: ""
    # and those of functional dropouts, which begin with a space. They have no kind.
    children = tuple([path for path in paths if kinds.get(path, "module") != "module"])

    def calls(module: nn.Module, at: At) -> str:
        operators = [_operator(step, module, at) for step in steps]
        return ", ".join(dict.fromkeys(filter(None, operators)))

    def needs(module: nn.Module, at: At) -> str:
        is_needed = left_paths or calls(module, at)
        if is_needed:
            return ""
        return "what it would join is not there"

    def leaves(module: nn.Module, at: At) -> bool:
        return any(_is_left(path, module, at) for path in left_paths)

    def helps(module: nn.Module) -> str:
        return _help(module, left_paths, kinds, methods.get("_fusedops_consumers"))

    return Rule(
        name=_name(steps),
        methods=methods,
        calls=calls if steps else "",
        helps="" if steps else helps,
        parts=children,
        needs=needs,
        leaves=leaves,
        takes=tuple(sorted((sources | set(left_paths)) & kinds.keys())),
        origin=("structure", key),
    )


def _name(steps: tuple[Step, ...]) -> str:
    """Return the rule's name: attentions fuse nothing themselves, only blocks add a residual."""
    if not steps:
        return "attention"
    adds = any(step.kind in ("add", "add_norm") for step in steps)
    return "block" if adds else "mlp"


def _help(
    module: nn.Module,
    left_paths: tuple[str, ...],
    kinds: Mapping[str, str],
    consumers_of: Method | None,
) -> str:
    """Return what a module without operators does for its block, for the report."""
    if has_hooks(module):
        return "leaves nothing to the block while it has hooks"
    postponed = _postponed(module, left_paths, kinds)
    if postponed:
        return f"leaves {' and '.join(postponed)} to the block"
    layers = () if consumers_of is None else consumers_of(module)
    if layers and all(map(_takes_low_precision, layers)):
        return "takes its rows in autocast's dtype"
    return "leaves nothing to the block as its layers are"


def _takes_low_precision(child: Any) -> bool:
    """Whether a consumer of rows takes them in autocast's dtype."""
    if has_hooks(child):
        return False
    return not is_linear(child) or is_plain(child.weight)


def _postponed(
    module: nn.Module, left_paths: tuple[str, ...], kinds: Mapping[str, str]
) -> list[str]:
    """Describe the steps that the module leaves to its block."""
    steps: dict[str, None] = {}
    for path in left_paths:
        inner = submodule(module, path)
        kind = kinds.get(path, "dropout")
        if inner is not None and has_hooks(inner):
            continue
        if kind == "module":
            steps[f"what {path} leaves"] = None
        elif kind == "dropout":
            steps["its dropout"] = None
        elif getattr(inner, "bias", None) is not None:
            steps["its last bias"] = None
    # Reversed, the alphabet has the order of computation: "what ...", "its last bias", "its
    # dropout".
    return sorted(steps, reverse=True)


def _operator(step: Step, module: nn.Module, at: At) -> str:
    """Return the operator that a step calls, with the module's current children; "" for none."""
    rule = at(step.path)
    if step.kind == "add_norm":
        return _norm_operator(rule)
    if step.path and not _activates(rule, _attribute(module, step.path)):
        return ""
    if not _is_several(step, module, at):
        return ""
    return _OPERATORS[step.kind]


def _is_several(step: Step, module: nn.Module, at: At) -> bool:
    """Whether PyTorch computes the step in more than one operation.

    A gate is two. Without a bias or dropout, a sum or an activation is one.
    """
    if step.kind == "gate":
        return True
    return any(_is_left(path, module, at) for path in step.sources)


# The operators of steps other than "add_norm".
_OPERATORS = {"gate": "gated_act", "activate": "bias_act", "add": "bias_dropout_add"}


def _norm_operator(rule: Rule | None) -> str:
    """Return the operator that adds and normalises, by the norm's rule; "" if it has none."""
    if has_method(rule, "_fusedops_add_norm"):
        is_layer_norm = str(rule.calls).startswith("layer_norm")
        return "bias_dropout_add_ln" if is_layer_norm else "bias_dropout_add_rms_norm"
    return ""


def _activates(rule: Rule | None, activation: Any) -> bool:
    """Whether the operators have the activation, by its rule or its name."""
    if has_method(rule, "_fusedops_activation"):
        return True
    return bool(parts.activation_name(activation))


_TRAINING = re.compile(r"\bself\.training\b")


def _is_left(path: str, module: nn.Module, at: At) -> bool:
    """Whether what is at the path leaves a bias or a dropout to its caller.

    For a functional dropout the path is a space and the expression of its probability.
    """
    if path.startswith(" "):
        # As in training, since the mode may change after the module is fused.
        p = _evaluated(module, "self", _TRAINING.sub("True", path[1:]))
        # A probability that depends on an argument may be any.
        return not isinstance(p, (int, float)) or p > 0.0
    inner = submodule(module, path)
    if inner is None:
        return False
    if is_linear(inner):
        if getattr(inner, "bias", None) is None:
            return False
        return not has_hooks(inner)
    if isinstance(inner, nn.Dropout):
        return inner.p > 0.0 and not has_hooks(inner)
    return _leaves(inner, at(path), lambda inside: at(f"{path}.{inside}"))


def _leaves(module: nn.Module, rule: Rule | None, at: At) -> bool:
    """Whether a module with this rule leaves its last steps to its caller."""
    return has_method(rule, "_fusedops_branch") and rule.leaves(module, at)
