"""Causal language models: the head and its loss, in chunks whose logits are never whole.

For ``fuse_model(model, loss=True)``. The forwards of Transformers' causal language models have the
same form, with other steps between the head and the loss::

    logits = self.lm_head(rows)
    logits = logits / self.config.logits_scaling
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
    return CausalLMOutput(loss=loss, logits=logits, ...)

The rewritten forward does the same where logits are wanted. In training with labels it computes no
logits::

    numbers = numbers_of(self, "lm_head", rows, labels, (("/", self.config.logits_scaling),))
    logits = self.lm_head(rows) if numbers is None else None
    if numbers is None: logits = logits / self.config.logits_scaling
    loss = None
    if labels is not None:
        loss = (self.loss_function if numbers is None else loss_of(...))(logits, labels, ...)
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...losses.cross_entropy import scale_and_cap
from ...losses.ops import linear_cross_entropy
from ..hooks import has_hooks, is_conv1d, is_linear, is_plain, submodule
from ..rule import Family, Rule
from . import generation
from .adapters import added_by, is_adapted, why_not_adapted
from .rewriting import (
    PREFIX,
    assign,
    compiled,
    helper,
    helper_call,
    load,
    names_captured,
    nodes,
    only_target,
    path_of,
    readable,
    rewrapped,
    self_name_of,
)

__all__ = ["RULES", "is_causal_model", "why_whole"]

# --- what the rewritten forward calls -------------------------------------------------------------

_LOSS = ("transformers.loss.loss_utils", "ForCausalLMLoss")
Steps = tuple[tuple[str, Any], ...]


def _has_usual_loss(model: Any) -> bool:
    """Whether a model's loss is that of causal language models, and was not replaced."""
    function = model.loss_function
    return (getattr(function, "__module__", ""), getattr(function, "__name__", "")) == _LOSS


def _why_not_head(head: Any) -> str:
    """The reason why the logits of a head have to be whole; "" if there is none."""
    if is_adapted(type(head)):
        return why_not_adapted(head) or _why_not_head(head.base_layer)
    if is_conv1d(type(head)) or not is_linear(head):
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        return f"its head is a {kind}, no linear layer; merge an adapter into its weight"
    if has_hooks(head):
        return "its head has hooks"
    return "" if is_plain(head.weight) else "the weight of its head is no plain tensor"


def numbers_of(
    model: Any, head: Any, labels: Any, steps: Steps
) -> tuple[float, float | None] | None:
    """The scale and the soft cap of logits that need not be whole; None for whole logits.

    Args:
        model: the causal language model.
        head: its head.
        labels: the labels, or None.
        steps: what is done to the logits: ``("*", number)``, ``("/", number)`` or ``("tanh", 1)``.
    """
    is_whole = (
        labels is None,
        not model.training,
        not torch.is_grad_enabled(),
        not _has_usual_loss(model),
        bool(_why_not_head(head)),
    )
    return None if any(is_whole) else scale_and_cap(steps)


def loss_of(
    rows_of_head: tuple[Any, Tensor, tuple[float, float | None]],
    logits: None = None,
    labels: Any = None,
    vocab_size: int | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The loss of ``transformers.loss.loss_utils.ForCausalLMLoss``, from rows in place of logits.

    Args:
        rows_of_head: the head, its rows, and what `numbers_of` returns.
        logits: None.
        labels, vocab_size, num_items_in_batch, ignore_index, shift_labels: as of that function.

    Raises:
        ValueError: the head has another number of words than ``vocab_size``.
    """
    head, rows, (scale, cap) = rows_of_head
    if vocab_size not in (None, head.weight.shape[0]):
        raise ValueError(
            f"loss: the head has {head.weight.shape[0]} words, and the model's vocab_size is "
            f"{vocab_size}"
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = rows.reshape(-1, rows.shape[-1])
    loss = linear_cross_entropy(
        rows,
        head.weight,
        shift_labels.reshape(-1).to(rows.device),
        linear_bias=head.bias,
        lora=added_by(head, rows),
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=cap,
        scale=scale,
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    averaged: Tensor = loss / num_items_in_batch
    return averaged


_HELPERS = {"numbers_of": numbers_of, "loss_of": loss_of}
_NUMBERS, _ROWS = PREFIX + "numbers", PREFIX + "rows"
_TANH = frozenset({"torch.tanh", "nn.functional.tanh", "F.tanh"})
_OPERATORS: dict[type[ast.operator], str] = {ast.Mult: "*", ast.Div: "/"}


# --- reading a forward ----------------------------------------------------------------------------


class _NoFormError(Exception):
    """The forward has another form; the message says why."""


class _Form:
    """The form of a forward with a head and a loss, which is changed to compute no logits.

    Args:
        tree: the forward's tree, which is changed.
    Raises:
        _NoFormError: it has another form.

    Attributes:
        head: the path of the head.
        steps: the expression of what is done to logits: the argument of `numbers_of`.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.tree, self._self = tree, self_name_of(tree)
        self._steps: list[ast.expr] = []
        until = self._loss()
        at, call = self._head(until)
        self._read_steps(at, until)
        self._check_rest(until)
        self.steps = _concatenated(self._steps)
        self._rewrite(at, until, call)

    def _loss(self) -> int:
        """Returns the position of the statement that computes the loss if there are labels."""
        for position, statement in enumerate(self.tree.body):
            calls = list(filter(self._is_loss, nodes(statement, ast.Call)))
            if calls and _is_conditional(statement, calls):
                self._call = calls[0]
                self._logits = _logits_of(self._call)
                return position
        raise _NoFormError("it does not compute its loss by loss_function if there are labels")

    def _is_loss(self, call: ast.Call) -> bool:
        return path_of(call.func, self._self) == "loss_function"

    def _head(self, until: int) -> tuple[int, ast.Call]:
        """Returns the position of the statement that calls the head, and the call."""
        for position, statement in enumerate(self.tree.body[:until]):
            if not self._mentions(statement):
                continue
            value = self._value(statement)
            calls = list(filter(self._is_head, nodes(value, ast.Call)))
            if len(calls) != 1:
                break
            self.head = path_of(calls[0].func, self._self)
            self._add_steps(value, until=calls[0])
            return position, calls[0]
        raise _NoFormError("it has no statement that computes logits by a linear layer")

    def _is_head(self, call: ast.Call) -> bool:
        """Whether this calls a module with one argument."""
        is_of_self = bool(path_of(call.func, self._self))
        return is_of_self and len(call.args) == 1 and not call.keywords

    def _mentions(self, node: ast.AST) -> bool:
        return any(map(self._is_logits, nodes(node, ast.Name)))

    def _read_steps(self, at: int, until: int) -> None:
        """Reads what is done to logits between head and loss."""
        for statement in self.tree.body[at + 1 : until]:
            if not self._mentions(statement):
                continue
            if isinstance(statement, ast.If) and not statement.orelse:
                self._steps.append(self._conditional(statement))
            else:
                self._add_steps(self._value(statement))

    def _value(self, statement: ast.stmt) -> ast.expr:
        """Returns the value of ``logits = ...``."""
        target = only_target(statement)
        if target is None or target.id != self._logits:
            raise _NoFormError(f"it does more to logits: {ast.unparse(statement)}")
        return statement.value  # type: ignore[attr-defined, no-any-return]

    def _conditional(self, statement: ast.If) -> ast.expr:
        """Returns the steps of ``if self.config.cap is not None:``, a tuple."""
        outside, self._steps = self._steps, []
        for inner in statement.body:
            self._add_steps(self._value(inner))
        steps, self._steps = self._steps, outside
        return ast.IfExp(copy.deepcopy(statement.test), _concatenated(steps), _concatenated([]))

    def _add_steps(self, value: ast.expr, until: ast.expr | None = None) -> None:
        """Adds the steps of an expression of logits, or of the call of the head ``until``."""
        if value is not until and not self._is_logits(value):
            source, steps = self._last_step(value)
            self._add_steps(source, until)
            self._steps += steps

    def _is_logits(self, value: ast.AST) -> bool:
        return getattr(value, "id", "") == self._logits

    def _last_step(self, value: ast.expr) -> tuple[ast.expr, list[ast.expr]]:
        """Returns what the last step of an expression is done to, and the step.

        A cast to fp32, in which the loss is computed, is none.
        """
        match value:
            case ast.BinOp(op=ast.Mult() | ast.Div()) if not self._mentions(value.right):
                return value.left, [_step(_OPERATORS[type(value.op)], copy.deepcopy(value.right))]
            case ast.Call(args=[inner], keywords=[]) if ast.unparse(value.func) in _TANH:
                return inner, [_step("tanh", ast.Constant(1))]
            case ast.Call(func=ast.Attribute(attr="float" | "contiguous"), args=[], keywords=[]):
                return value.func.value, []  # type: ignore[attr-defined]
        raise _NoFormError(f"it does more to logits: {ast.unparse(value)}")

    def _check_rest(self, until: int) -> None:
        """Raises unless logits are passed to the loss, once, and returned."""
        # Keywords are those of the call, too.
        allowed = set(map(id, self._call.args))
        after = ast.Module(self.tree.body[until:], [])
        for keyword in nodes(after, ast.keyword):
            allowed.add(id(keyword.value))
        for elements in nodes(after, ast.Tuple):
            allowed.update(map(id, elements.elts))
        reads = filter(self._is_logits, nodes(after, ast.Name))
        if not allowed.issuperset(map(id, reads)) or self._logits in names_captured(self.tree):
            raise _NoFormError("it does more with logits than to return them")

    def _rewrite(self, at: int, until: int, call: ast.Call) -> None:
        """Changes the tree: logits and what is done to them are computed where they are wanted."""
        body = self.tree.body
        for position in range(at + 1, until):
            if self._mentions(body[position]):
                body[position] = ast.If(_is_whole(), [body[position]], [])
        rows, call.args = call.args[0], [load(_ROWS)]
        head: Any = body[at]
        head.value = ast.IfExp(_is_whole(), head.value, ast.Constant(None))
        numbers = helper_call(
            "numbers_of",
            load(self._self),
            copy.deepcopy(call.func),
            load("labels"),
            copy.deepcopy(self.steps),
        )
        fused: Any = copy.deepcopy(self._call)
        fused.func = helper("loss_of")
        values = [copy.deepcopy(call.func), load(_ROWS), load(_NUMBERS)]
        fused.args = [ast.Tuple(values, ast.Load()), *fused.args]
        for statement in body[until].body:  # type: ignore[attr-defined]
            if getattr(statement, "value", None) is self._call:
                statement.value = ast.IfExp(_is_whole(), self._call, fused)
        body[at:at] = [assign(_ROWS, rows), assign(_NUMBERS, numbers)]
        self.tree.decorator_list, self.tree.returns = [], None
        ast.fix_missing_locations(self.tree)


def _is_conditional(statement: ast.stmt, calls: list[ast.Call]) -> bool:
    """Whether ``if labels is not None:`` assigns one call, and these calls are that one."""
    if not isinstance(statement, ast.If):
        return False
    assigned = [id(getattr(inner, "value", None)) for inner in statement.body]
    is_assigned = set(map(id, calls)).issubset(assigned) and len(calls) == 1
    return is_assigned and ast.unparse(statement.test) == "labels is not None"


def _logits_of(call: ast.Call) -> str:
    """The name of the first argument of a loss, or of that with the keyword ``logits``."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    first = next(iter([*call.args, keywords.get("logits")]))
    return getattr(first, "id", "")


def _step(kind: str, number: ast.expr) -> ast.expr:
    """The expression of a tuple of one step."""
    return ast.Tuple([ast.Tuple([ast.Constant(kind), number], ast.Load())], ast.Load())


def _concatenated(steps: list[ast.expr]) -> ast.expr:
    """The sum of tuples of steps."""
    empty: ast.expr = ast.Tuple([], ast.Load())
    return functools.reduce(lambda first, second: ast.BinOp(first, ast.Add(), second), steps, empty)


def _is_whole() -> ast.expr:
    """The expression of whether logits are whole."""
    return ast.Compare(load(_NUMBERS), [ast.Is()], [ast.Constant(None)])


# --- the rule -------------------------------------------------------------------------------------


def _unwrapped(function: Any) -> tuple[Any, list[Any]]:
    """The function inside the wrappers of Transformers, and these wrappers."""
    wrappers = []
    while inspect.isfunction(function) and hasattr(function, "__wrapped__"):
        module = str(function.__globals__.get("__name__"))
        if not module.startswith("transformers."):
            break
        wrappers.append(function)
        function = function.__wrapped__
    return function, wrappers


@functools.lru_cache(maxsize=1024)
def _form(forward: Any) -> tuple[_Form | None, str]:
    """The form of a forward; or None, and the reason."""
    function, _ = _unwrapped(forward)
    tree = readable(function)
    if tree is None:
        return None, "its forward has no source that can be compiled again"
    try:
        return _Form(copy.deepcopy(tree)), ""
    except _NoFormError as error:
        return None, str(error)


def is_causal_model(module: nn.Module) -> bool:
    """Whether a module is a causal language model of Transformers, with a loss.

    Some have other names: of GPT-2, or of models that read images.
    """
    if not hasattr(type(module), "loss_function"):
        return False
    if type(module).__name__.endswith("ForCausalLM"):
        return True
    form, _ = _form(type(module).forward)
    return form is not None and _has_usual_loss(module)


def why_whole(module: nn.Module, cls: type[nn.Module]) -> str:
    """The reason why a causal language model needs whole logits; "" if there is none.

    Args:
        module: the model.
        cls: its class, or its class before it was fused.
    """
    form, reason = _form(cls.forward)
    if form is None:
        return reason
    if not _has_usual_loss(module):
        return "its loss is not ForCausalLMLoss"
    reason = _why_not_head(submodule(module, form.head))
    return reason or _why_steps(module, cls, form)


def _why_steps(module: nn.Module, cls: type[nn.Module], form: _Form) -> str:
    """The reason why what is done to logits is not known: "" if it is a scale and a soft cap."""
    function, _ = _unwrapped(cls.forward)
    expression = ast.fix_missing_locations(ast.Expression(copy.deepcopy(form.steps)))
    names = {self_name_of(form.tree): module}
    try:
        steps = eval(compile(expression, "<steps>", "eval"), function.__globals__, names)
    except (AttributeError, NameError):
        return "it scales or caps its logits by numbers that are no attributes"
    if scale_and_cap(steps) is None:
        return "it computes more from its logits than a scale and a soft cap"
    return ""


def _key(module: nn.Module) -> str | None:
    """The reason to leave the loss of a causal language model, or ""; None for other modules."""
    return why_whole(module, type(module)) if is_causal_model(module) else None


def _rule(cls: type[nn.Module], reason: str) -> Rule | None:
    """The rule of a class, with that of `generation`; None if there is nothing to fuse."""
    hashable: Any = cls  # to mypy a class is not hashable
    return _built(hashable, cls.forward, reason)


@functools.lru_cache(maxsize=1024)
def _built(cls: Any, forward: Any, reason: str) -> Rule | None:
    (other,) = generation.RULES
    methods, calls = dict(other.methods), [str(other.calls)]
    if not other.knows(cls):
        methods, calls = {}, []
    form, _ = _form(forward)
    options: dict[str, Any] = {"origin": ("loss", reason)}
    if form is not None and not reason:
        function, wrappers = _unwrapped(forward)
        tree = copy.deepcopy(form.tree)
        methods["forward"] = rewrapped(compiled(function, tree, _HELPERS), wrappers)
        calls.insert(0, "linear_cross_entropy in training")
        return Rule(name="loss", calls=", ".join(calls), methods=methods, **options)
    if not methods:
        return None
    calls.append(f"its logits are whole, as {reason}")
    options |= {"name": other.name, "known": other.known}
    return Rule(calls=", ".join(calls), methods=methods, **options)


def _why(module: nn.Module) -> str:
    """The reason why a causal language model has no rule."""
    return f"its logits are whole, as {_key(module)}" if _key(module) else ""


# Not in the table: only ``fuse_model(model, loss=True)`` applies it.
RULES = (Family(name="loss", key=_key, rule=_rule, names=("loss",), why=_why),)
