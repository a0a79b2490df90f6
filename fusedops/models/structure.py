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
import types
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F

from . import compiling, parts
from .autocast import consumers
from .fingerprint import definition, renamed
from .hooks import has_hooks, is_linear, is_plain, is_unchanged, submodule
from .rewriting import PREFIX, Rewritten, Step, called_paths, conditions, rewrite, rows_of
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
    """Return the kinds of what the module's methods use, or None if nothing can be fused."""
    cls = type(module)
    if not module._modules or cls.__module__.startswith("torch."):
        return None
    kinds: dict[str, str] = {}
    # Experts without a gate have `_apply_gate` too, but do not call it.
    if not getattr(module, "has_gate", True):
        kinds["!_apply_gate"] = "unused"
    for name in _METHODS:
        method = _read(getattr(cls, name, None))
        if method is not None:
            kinds |= _kinds_in(module, *method, leaf_rules)
    key = tuple(sorted((name, kind) for name, kind in kinds.items() if kind))
    return key if key and structural_rule(cls, key) is not None else None


def _kinds_in(
    module: nn.Module,
    function: FunctionType,
    tree: ast.FunctionDef,
    leaf_rules: tuple[Rule | Family, ...],
) -> dict[str, str]:
    """Return the kinds of what one method uses; "" for what `rewriting` has no use for."""
    kinds: dict[str, str] = {}
    paths, names = called_paths(tree)
    for path in paths:
        kinds[path] = _kind(module, path, leaf_rules)
    for name in names:
        kinds[" " + name] = _function(function, name)
    for text in conditions(tree):
        # The mode may change after the module is fused.
        if ".training" not in text:
            kinds["?" + text] = _truth(module, tree, text)
    return kinds


def _kind(module: nn.Module, path: str, leaf_rules: tuple[Rule | Family, ...]) -> str:
    """Return the kind of what is at the path in a module, for `rewriting.Kinds`."""
    child = _attribute(module, path)
    if child is None:
        return "absent"
    if not isinstance(child, nn.Module):
        return _activation_kind(child)
    if is_linear(child) or _adapts_linear(child):
        return "linear"
    if type(child) in (nn.Dropout, nn.Identity):
        return "dropout"
    rule = getattr(type(child), "_fusedops_rule", None) or judge(child, leaf_rules).rule
    if has_method(rule, "_fusedops_add_norm"):
        return "norm"
    if has_method(rule, "_fusedops_activation") or parts.activation_name(child):
        return "activation"
    return "module" if child._modules else ""


def _attribute(value: Any, path: str) -> Any:
    """Return the attribute at a path, or None."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _activation_kind(value: Any) -> str:
    return "activation" if callable(value) and parts.activation_name(value) else ""


def _adapts_linear(module: nn.Module) -> bool:
    """Whether this is an adapter, such as PEFT's, that is called instead of a linear layer."""
    inner = getattr(module, "base_layer", None)
    if not isinstance(inner, nn.Module):
        return False
    return is_linear(inner) or _adapts_linear(inner)


def _truth(module: nn.Module, tree: ast.FunctionDef, condition: str) -> str:
    """Return the value of a condition on the module's attributes, or "" if it has none."""
    self_name = tree.args.args[0].arg
    value = _evaluated(module, self_name, condition)
    return str(value) if isinstance(value, bool) else ""


def _evaluated(module: nn.Module, self_name: str, expression: str) -> Any:
    """Return the value of an expression of the module's attributes; None if it raises."""
    try:
        return eval(expression, {"__builtins__": {}}, {self_name: module})
    # Whatever a property of the module raises, the condition stays in the code.
    except Exception:  # noqa: BLE001
        return None


def _function(function: FunctionType, name: str) -> str:
    """Return the kind of the function that a global name means, for `rewriting.Kinds`."""
    first, _, rest = name.partition(".")
    value = function.__globals__.get(first)
    if rest:
        value = _attribute(value, rest)
    return "functional dropout" if value is F.dropout else _activation_kind(value)


@functools.lru_cache(maxsize=4096)
def _read(function: Any) -> tuple[FunctionType, ast.FunctionDef] | None:
    """Return a method and its tree, or None if it cannot be compiled again from its source."""
    function, _wrappers = renamed(function)
    if not inspect.isfunction(function):
        return None
    # A rewritten function has the helpers as its closure, and no other.
    code = function.__code__
    if code.co_freevars or code.co_flags & _SUSPENDS:
        return None
    tree = definition(function)
    if tree is None or any(map(_is_unsupported, ast.walk(tree))):
        return None
    return function, tree


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_unsupported(node: ast.AST) -> bool:
    """Whether the node binds names as the rewriting does not follow, or is like ``self.__x``.

    Python mangles the name ``__x`` inside a class, where the rewritten function is not compiled.
    """
    if isinstance(node, (ast.Global, ast.Nonlocal, ast.NamedExpr)):
        return True
    name = node.attr if isinstance(node, ast.Attribute) else ""
    return name.startswith("__") and not name.endswith("__")


def _rewrapped(function: Method, wrappers: list[Any]) -> Method:
    """Wrap a function in copies of these wrappers, the last innermost.

    Args:
        function: takes the place of the function in the last wrapper.
        wrappers: as `renamed` returns them.
    """
    for wrapper in reversed(wrappers):
        # A wrapper calls what it wraps through a cell of its closure.
        cells = [
            types.CellType(function) if cell.cell_contents is wrapper.__wrapped__ else cell
            for cell in wrapper.__closure__
        ]
        copied = FunctionType(
            wrapper.__code__,
            wrapper.__globals__,
            wrapper.__name__,
            wrapper.__defaults__,
            tuple(cells),
        )
        copied.__kwdefaults__ = wrapper.__kwdefaults__
        function = functools.update_wrapper(copied, function)
    return function


def structural_rule(cls: type[nn.Module], key: Key) -> Rule | None:
    """Return the rule for a class and a key, or None if nothing in its methods can be fused."""
    # The methods are part of the cache's key, since a class may be patched.
    functions = tuple([getattr(cls, name, None) for name in _METHODS])
    hashable: Any = cls  # to mypy a class is not hashable
    return _built(hashable, functions, key)


@functools.lru_cache(maxsize=4096)
def _built(cls: Any, functions: tuple[Any, ...], key: Key) -> Rule | None:
    kinds = dict(key)

    def kind_of(path: str) -> str:
        return kinds.get(path, "")

    facts = {name[1:]: kind == "True" for name, kind in key if name.startswith("?")}
    methods: dict[str, Method] = {}
    steps: tuple[Step, ...] = ()
    left_paths: tuple[str, ...] = ()
    for name, method in zip(_METHODS, functions, strict=True):
        read = _read(method)
        if read is None or kind_of("!" + name):
            continue
        function, tree = read
        _inner, wrappers = renamed(method)
        own = rewrite(tree, kind_of, leaving=False, facts=facts)
        if own is not None and _pays(own, kinds):
            methods[name] = _rewrapped(_compiled(function, own), wrappers)
            steps += own.steps
        if name != "forward":
            continue
        # A second version of the forward returns its last steps unfinished, for a block to compute.
        leaving = rewrite(tree, kind_of, leaving=True, facts=facts)
        if leaving is not None:
            left_paths = leaving.leaves
            unfinished = _rewrapped(_compiled(function, leaving), wrappers)
            unfinished = _with_tricks(unfinished, cls, tree, left_paths[0])
            # A module that keeps its own forward has to follow later patches of it.
            if name not in methods:
                unfinished = _unless_patched(unfinished)
            methods["_fusedops_branch"] = unfinished
        takers_of_rows = rows_of(tree, kind_of)
        if takers_of_rows:
            methods |= consumers(*takers_of_rows)
    return _rule(methods, steps, left_paths, key) if steps or left_paths else None


def _pays(own: Rewritten, kinds: Mapping[str, str]) -> bool:
    """Whether it is worth replacing the method: it fuses more than biases of layers with sums."""
    for step in own.steps:
        if step.kind != "add":
            return True
        for path in step.sources:
            if path.startswith(" ") or kinds.get(path) in ("dropout", "module"):
                return True
    return False


def _compiled(function: FunctionType, rewritten: Rewritten) -> Method:
    """Compile the rewritten function with the globals of the original and the helpers as closure.

    The source of what is compiled is

        def make(<helpers>):
            def forward(self, ...):
                <calls of helpers>
            return forward
    """
    tree = rewritten.tree
    # Annotations and defaults are copied from the original below, not evaluated again.
    arguments = tree.args
    positional = (*arguments.posonlyargs, *arguments.args)
    for argument in (*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [
        None if default is None else ast.Constant(None) for default in arguments.kw_defaults
    ]
    names = [ast.arg(PREFIX + name) for name in _HELPERS]
    body: list[ast.stmt] = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    maker = ast.FunctionDef("make", ast.arguments([], names, None, [], [], None, []), body, [])
    module = ast.Module([ast.copy_location(maker, tree)], [])
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec")
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    result: Any = namespace["make"](*_HELPERS.values())
    result.__defaults__, result.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    result.__doc__, result.__qualname__ = function.__doc__, function.__qualname__
    result.__annotations__ = dict(function.__annotations__)
    return result  # type: ignore[no-any-return]


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
    names = [argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)]
    qkv, scales_query = packable(cls)
    masked = any("mask" in name for name in names)
    if not qkv and not masked:
        return unfinished

    def branch(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if args else kwargs[names[1]]
        if masked and compiling.makes_kernels(rows) and allowed(self, "masks"):
            # The mask may be a positional or a keyword argument.
            args = tuple(map(laid_out, args))
            kwargs = {name: laid_out(value) for name, value in kwargs.items()}
        if not qkv:
            return unfinished(self, *args, **kwargs)
        others = kwargs.get("key_value_states")
        # A scaled query is not packed: where ``others`` are given, only key and value are.
        if others is None and scales_query:
            others = rows
        past = kwargs.get("cache", kwargs.get("past_key_values"))
        replacements = packed_to(last, self, qkv, rows, others, past)
        return unfinished(parts.replacing(self, replacements), *args, **kwargs)

    return branch


def _rule(
    methods: dict[str, Method], steps: tuple[Step, ...], left_paths: tuple[str, ...], key: Key
) -> Rule:
    """Build the rule of a module with these steps, which leaves these paths to its block."""
    kinds = dict(key)
    sources = {path for step in steps for path in step.sources}
    # A dict keeps the order. "module" is also the default, which drops "" and functional dropouts.
    paths = {path: None for step in steps for path in (step.path, *step.sources)}
    children = tuple([path for path in paths if kinds.get(path, "module") != "module"])

    def calls(module: nn.Module, at: At) -> str:
        operators = [_operator(step, module, at) for step in steps]
        return ", ".join(dict.fromkeys(filter(None, operators)))

    def needs(module: nn.Module, at: At) -> str:
        return "" if left_paths or calls(module, at) else "what it would join is not there"

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
        made=("structure", key),
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
    return sorted(steps, reverse=True)


def _operator(step: Step, module: nn.Module, at: At) -> str:
    """Return the operator that a step calls, given the module's current children; "" for none."""
    rule = at(step.path) if step.path else None
    if step.kind == "add_norm":
        return _norm_operator(rule)
    if step.path and not _activates(rule, module, step.path):
        return ""
    # Without a bias or dropout, a sum or an activation is one operation, which PyTorch computes. A
    # gate is two.
    if step.kind != "gate" and not any(_is_left(path, module, at) for path in step.sources):
        return ""
    return _OPERATORS[step.kind]


# The operators of steps other than "add_norm".
_OPERATORS = {"gate": "gated_act", "activate": "bias_act", "add": "bias_dropout_add"}


def _norm_operator(rule: Rule | None) -> str:
    """Return the operator that adds and normalises, by the norm's rule; "" if it has none."""
    if rule is None or not has_method(rule, "_fusedops_add_norm"):
        return ""
    is_layer_norm = str(rule.calls).startswith("layer_norm")
    return "bias_dropout_add_ln" if is_layer_norm else "bias_dropout_add_rms_norm"


def _activates(rule: Rule | None, module: nn.Module, path: str) -> bool:
    """Whether the operators have the activation at the path, by its rule or its name."""
    if has_method(rule, "_fusedops_activation"):
        return True
    return bool(parts.activation_name(_attribute(module, path)))


def _is_left(path: str, module: nn.Module, at: At) -> bool:
    """Whether what is at the path leaves a bias or a dropout to its caller.

    For a functional dropout the path is a space and the expression of its probability.
    """
    if path.startswith(" "):
        p = _evaluated(module, "self", path[1:])
        return p is None or p > 0.0
    inner = submodule(module, path)
    if inner is None:
        return False
    if is_linear(inner):
        return getattr(inner, "bias", None) is not None and not has_hooks(inner)
    if isinstance(inner, nn.Dropout):
        return inner.p > 0.0 and not has_hooks(inner)
    rule = at(path)
    if rule is None or not has_method(rule, "_fusedops_branch"):
        return False
    return rule.leaves(inner, lambda inside: at(f"{path}.{inside}"))
