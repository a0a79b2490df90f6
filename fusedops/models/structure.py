"""Modules known by what their forwards do, step by step, whatever their classes are called: `rewriting`, made a rule."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F

from . import compiling, parts
from .autocast import consumers
from .fingerprint import definition, renamed
from .hooks import found, has_hooks, is_linear, is_plain, is_unchanged
from .rewriting import PREFIX, Rewritten, Step, called_paths, conditions, rewrite, rows_of
from .rule import At, Family, Rule, has_method, judge
from .tricks import allowed
from .tricks.casts import cast_together
from .tricks.masks import laid_out
from .tricks.packing import packable, packed_to

__all__ = ["family", "structural_rule"]

Method = Callable[..., Any]
# What is read of a class: its forward, and what Transformers' experts have between their two products.
_METHODS = ("forward", "_apply_gate")
Key = tuple[tuple[str, str], ...]
_HELPERS: dict[str, Any] = {**{name: getattr(parts, name) for name in parts.__all__}, "cast_together": cast_together}


def family(leaves: tuple[Rule | Family, ...]) -> Family:
    """The family of all modules with steps to join.

    Args:
        leaves: the rules by which norms and activations are known.
    """
    return Family(name="structure", key=lambda module: _key(module, leaves), rule=structural_rule,
                  names=("attention", "block", "mlp"))  # fmt: skip


def _key(module: nn.Module, leaves: tuple[Rule | Family, ...]) -> Key | None:
    """The kinds of what the module's methods call, where something in them can be joined."""
    cls = type(module)
    if not module._modules or cls.__module__.startswith("torch."):
        return None
    kinds: dict[str, str] = {}
    if not getattr(module, "has_gate", True):  # experts without a gate have the method all the same
        kinds["!" + _METHODS[1]] = "unused"
    for function, tree in filter(None, [_read(getattr(cls, name, None)) for name in _METHODS]):
        paths, names = called_paths(tree)
        kinds |= {path: _kind(module, path, leaves) for path in paths}
        kinds |= {" " + name: _function(function, name) for name in names}
        kinds |= {"?" + text: _truth(module, tree, text) for text in conditions(tree) if ".training" not in text}
    key = tuple(sorted((name, kind) for name, kind in kinds.items() if kind))
    return key if key and structural_rule(cls, key) is not None else None


def _kind(module: Any, path: str, leaves: tuple[Rule | Family, ...]) -> str:
    """What is at the path in a module, for `rewriting.Kinds`."""
    for name in path.split("."):
        module = getattr(module, name, None)
    if module is None:
        return "absent"
    if not isinstance(module, nn.Module):
        return "activation" if callable(module) and parts.activation_name(module) else ""
    if is_linear(module) or _adapts_linear(module):
        return "linear"
    if type(module) in (nn.Dropout, nn.Identity):
        return "dropout"
    rule = getattr(type(module), "_fusedops_rule", None) or judge(module, leaves).rule
    if has_method(rule, "_fusedops_add_norm"):
        return "norm"
    if has_method(rule, "_fusedops_activation") or parts.activation_name(module):
        return "activation"
    return "module" if module._modules else ""


def _adapts_linear(module: nn.Module) -> bool:
    """Whether this is an adapter around a linear layer, as PEFT's are: it is called in the layer's place."""
    inner = getattr(module, "base_layer", None)
    return isinstance(inner, nn.Module) and (is_linear(inner) or _adapts_linear(inner))


def _truth(module: nn.Module, tree: ast.FunctionDef, condition: str) -> str:
    """Which way a condition on the module's attributes goes now, "True" or "False"; "" where that cannot be told."""
    value = _evaluated(module, tree.args.args[0].arg, condition)
    return str(value) if isinstance(value, bool) else ""


def _evaluated(module: nn.Module, name: str, expression: str) -> Any:
    """An expression of the module's attributes; None where it fails."""
    try:
        return eval(expression, {"__builtins__": {}}, {name: module})
    except Exception:  # noqa: BLE001 - whatever a property of the module raises, the condition stays in the code
        return None


def _function(function: FunctionType, name: str) -> str:
    """What a name in a function means, for `rewriting.Kinds`."""
    value: Any = None
    for index, part in enumerate(name.split(".")):
        value = function.__globals__.get(part) if index == 0 else getattr(value, part, None)
    if value is F.dropout:
        return "functional dropout"
    return "activation" if callable(value) and parts.activation_name(value) else ""


@functools.lru_cache(maxsize=4096)
def _read(function: Any) -> tuple[FunctionType, ast.FunctionDef] | None:
    """A method and its tree, at its lines in its file; None where it has no source, or is more than its text says."""
    function = renamed(function)[0]
    if not inspect.isfunction(function) or function.__code__.co_freevars or function.__code__.co_flags & _SUSPENDS:
        return None
    tree = definition(function)
    return None if tree is None or any(map(_is_strange, ast.walk(tree))) else (function, tree)


def _rewrapped(made: Method, wrappers: list[Any]) -> Method:
    """A function in the same wrappers."""
    for wrapper in reversed(wrappers):
        cells = [
            types.CellType(made) if cell.cell_contents is wrapper.__wrapped__ else cell for cell in wrapper.__closure__
        ]
        copied = FunctionType(
            wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells)
        )
        copied.__kwdefaults__ = wrapper.__kwdefaults__
        made = functools.update_wrapper(copied, made)
    return made


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_strange(node: ast.AST) -> bool:
    """Whether a function with this in it is left: what it names is not what it says."""
    if isinstance(node, (ast.Global, ast.Nonlocal, ast.NamedExpr)):
        return True
    name = node.attr if isinstance(node, ast.Attribute) else ""
    return name.startswith("__") and not name.endswith("__")


def structural_rule(cls: type[nn.Module], key: Key) -> Rule | None:
    """The rule for a class with modules of these kinds; None where nothing in its methods can be joined."""
    of: Any = cls
    return _made(of, tuple([getattr(cls, name, None) for name in _METHODS]), key)


@functools.lru_cache(maxsize=4096)
def _made(cls: Any, functions: tuple[Any, ...], key: Key) -> Rule | None:
    kinds = dict(key)

    def kind_of(path: str) -> str:
        return kinds.get(path, "")

    facts = {name[1:]: kind == "True" for name, kind in key if name.startswith("?")}
    methods: dict[str, Method] = {}
    steps: tuple[Step, ...] = ()
    left: tuple[str, ...] = ()
    for name, method in zip(_METHODS, functions, strict=True):
        read = _read(method)
        if read is None or kind_of("!" + name):
            continue
        function, tree = read
        wrappers = renamed(method)[1]
        own = rewrite(tree, kind_of, leaving=False, facts=facts)
        if own is not None and _gains(own, kinds):
            methods[name] = _rewrapped(_compiled(function, own), wrappers)
            steps += own.steps
        leaving = rewrite(tree, kind_of, leaving=True, facts=facts) if name == "forward" else None
        if leaving is not None:
            left = leaving.leaves
            leave = _attending(_rewrapped(_compiled(function, leaving), wrappers), cls, tree, left[0])
            methods["_fusedops_branch"] = leave if name in methods else _unless_patched(leave)
        rows = rows_of(tree, kind_of) if name == "forward" else ()
        if rows:
            methods |= consumers(*rows)
    return _rule(methods, steps, left, key) if steps or left else None


def _gains(own: Rewritten, kinds: Mapping[str, str]) -> bool:
    """Whether anything is joined in a forward that is called by itself but a bias and a sum."""
    return any(
        step.kind != "add" or any(path[0] == " " or kinds.get(path) in ("dropout", "module") for path in step.sources)
        for step in own.steps
    )


def _compiled(function: FunctionType, rewritten: Rewritten) -> Method:
    """The rewritten function, among the globals of the one that it was, with the helpers as its closure."""
    tree = rewritten.tree
    a = tree.args
    for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg):
        if argument is not None:
            argument.annotation = None
    a.defaults = [ast.Constant(None) for _ in a.defaults]
    a.kw_defaults = [None if default is None else ast.Constant(None) for default in a.kw_defaults]
    names = [ast.arg(PREFIX + name) for name in _HELPERS]
    body: list[ast.stmt] = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    maker = ast.FunctionDef("make", ast.arguments([], names, None, [], [], None, []), body, [])
    module = ast.Module([ast.copy_location(maker, tree)], [])
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec")
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    made: Any = namespace["make"](*_HELPERS.values())
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__doc__, made.__qualname__ = function.__doc__, function.__qualname__
    made.__annotations__ = dict(function.__annotations__)
    return made  # type: ignore[no-any-return]


def _unless_patched(leave: Method) -> Method:
    """The method of a module whose forward is its own: where that was replaced on the class since, it is called."""

    def branch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_unchanged(type(self), "forward"):
            return leave(self, *args, **kwargs)
        return parts.whole(self(*args, **kwargs))

    return branch


def _attending(leave: Method, cls: type, tree: ast.FunctionDef, last: str) -> Method:
    """The method with the tricks for attentions; what is not known as one has it as it is."""
    names = [argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)]
    (qkv, scales), masked = packable(cls), any("mask" in name for name in names)
    if not qkv and not masked:
        return leave

    def branch(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if args else kwargs[names[1]]
        if masked and compiling.makes_kernels(rows) and allowed(self, "masks"):  # the mask may come by name or place
            args, kwargs = tuple(map(laid_out, args)), {name: laid_out(value) for name, value in kwargs.items()}
        if not qkv:
            return leave(self, *args, **kwargs)
        others = kwargs.get("key_value_states")
        if others is None and scales:
            others = rows  # for key and value alone
        replacements = packed_to(last, self, qkv, rows, others, kwargs.get("cache", kwargs.get("past_key_values")))
        return leave(parts.replacing(self, replacements), *args, **kwargs)

    return branch


def _rule(methods: dict[str, Method], steps: tuple[Step, ...], left: tuple[str, ...], key: Key) -> Rule:
    kinds = {step.kind for step in steps}
    paths = [path for step in steps for path in (step.path, *step.sources) if dict(key).get(path, "module") != "module"]

    def calls(module: nn.Module, at: At) -> str:
        return ", ".join(dict.fromkeys(filter(None, [_operator(step, module, at) for step in steps])))

    def needs(module: nn.Module, at: At) -> str:
        return "" if left or calls(module, at) else "what it would join is not there"

    def leaves(module: nn.Module, at: At) -> bool:
        return any(_is_left(path, module, at) for path in left)

    def helps(module: nn.Module) -> str:
        if has_hooks(module):
            return "leaves nothing to the block while it has hooks"
        what = _left_over(module, left, dict(key))
        if what:
            return f"leaves {' and '.join(what)} to the block"
        narrows = methods["_fusedops_consumers"](module) if "_fusedops_consumers" in methods else ()
        plain = all(not has_hooks(child) and (not is_linear(child) or is_plain(child.weight)) for child in narrows)
        return (
            "takes its rows in autocast's dtype"
            if narrows and plain
            else "leaves nothing to the block as its layers are"
        )

    takes = {path for step in steps for path in step.sources} | set(left)
    return Rule(name="attention" if not steps else "block" if kinds & {"add", "add_norm"} else "mlp", methods=methods,
                calls=calls if steps else "", helps="" if steps else helps,
                parts=tuple(dict.fromkeys(paths)), needs=needs, leaves=leaves,
                takes=tuple(sorted(takes & dict(key).keys())), made=("structure", key))  # fmt: skip


def _left_over(module: nn.Module, left: tuple[str, ...], kinds: Mapping[str, str]) -> list[str]:
    """What the module leaves to its block: of the modules at these paths, if they have it."""
    what: dict[str, None] = {}
    for path in left:
        inner = found(module, path)
        kind = kinds.get(path, "dropout")
        if inner is not None and has_hooks(inner):
            continue
        if kind == "module":
            what[f"what {path} leaves"] = None
        elif kind == "dropout":
            what["its dropout"] = None
        elif getattr(inner, "bias", None) is not None:
            what["its last bias"] = None
    return sorted(what, reverse=True)


def _operator(step: Step, module: nn.Module, at: At) -> str:
    """The operator that a step calls, with the modules as they are; "" for none."""
    rule = at(step.path) if step.path else None
    if step.kind == "add_norm":
        if not has_method(rule, "_fusedops_add_norm"):
            return ""
        assert rule is not None
        return "bias_dropout_add_ln" if str(rule.calls).startswith("layer_norm") else "bias_dropout_add_rms_norm"
    if step.kind != "add" and step.path and not has_method(rule, "_fusedops_activation"):
        activation: Any = module
        for name in step.path.split("."):
            activation = getattr(activation, name, None)
        if not parts.activation_name(activation):
            return ""
    if step.kind == "gate":
        return "gated_act"
    if not any(_is_left(path, module, at) for path in step.sources):
        return ""
    return "bias_act" if step.kind == "activate" else "bias_dropout_add"


def _is_left(path: str, module: nn.Module, at: At) -> bool:
    """Whether the module at the path leaves anything to whoever calls it: a bias, a dropout."""
    if path.startswith(" "):  # of a dropout without a module, its probability
        p = _evaluated(module, "self", path[1:])
        return p is None or p > 0.0
    inner = found(module, path)
    if inner is None:
        return False
    if is_linear(inner):
        return getattr(inner, "bias", None) is not None and not has_hooks(inner)
    if isinstance(inner, nn.Dropout):
        return inner.p > 0.0 and not has_hooks(inner)
    rule = at(path)
    return rule is not None and has_method(rule, "_fusedops_branch") and rule.leaves(inner, lambda p: at(f"{path}.{p}"))
