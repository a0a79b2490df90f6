"""Forwards written in many styles, each with the operators that it calls when it is fused.

`_case` adds a forward, or a class with one, to `CASES`. A forward uses the modules and settings of
`Base`. The tests of all cases are in tests/models/test_structure.py.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout, gelu

__all__ = ["CASES", "Base", "N", "Returning"]

N = 8  # columns of the rows


class _Mlp(nn.Module):
    """A branch whose last bias and dropout the block's operator may compute."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.act, self.second = (
            nn.Linear(N, 12),
            nn.GELU(),
            nn.Linear(12, N, bias=bias),
        )
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.second(self.act(self.first(x))))


class _Attention(nn.Module):
    """A branch that also returns its attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(N, 3 * N), nn.Linear(N, N), nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).split(N, -1)
        weights = torch.softmax(scale * q @ k.transpose(-1, -2), -1)
        return self.drop(self.out(weights @ v)), weights


@dataclass
class _Output:
    states: Tensor
    weights: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.states, self.weights)[index]

    def __iter__(self) -> Any:
        return iter((self.states, self.weights))


class Returning(nn.Module):
    """Returns the outputs of an attention as ``kind(states, weights)`` instead of a tuple."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.kind = _Attention(), kind

    def forward(self, x: Tensor) -> Any:
        x, weights = self.inner(x)
        return self.kind(x, weights)


class Base(nn.Module):
    """The modules and settings that the forwards use."""

    flag, other, p, record = True, False, 0.3, None
    forward: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm4 = nn.LayerNorm(N), nn.LayerNorm(N), nn.LayerNorm(4)
        self.fc, self.fc1, self.fc2 = nn.Linear(N, N), nn.Linear(N, 12), nn.Linear(12, N)
        self.gate, self.up, self.down = (
            nn.Linear(N, 12),
            nn.Linear(N, 12),
            nn.Linear(12, N, bias=False),
        )
        self.packed, self.act = nn.Linear(N, 24), nn.GELU()
        self.relu, self.silu, self.fn = nn.ReLU(inplace=True), nn.SiLU(inplace=True), torch.tanh
        self.drop1, self.drop2, self.drop_in = (
            nn.Dropout(0.3),
            nn.Dropout(0.2),
            nn.Dropout(0.3, inplace=True),
        )
        self.mlp, self.attn, self.unbiased = _Mlp(), _Attention(), _Mlp(bias=False)
        self.lists = Returning(lambda *outputs: list(outputs))
        self.outputs = Returning(_Output)
        self.dicts = Returning(lambda x, weights: OrderedDict(x=x, weights=weights))
        self.layers = nn.ModuleList([nn.Linear(N, N), nn.Linear(N, N)])
        self.seen: list[Any] = []

    def note(self, *values: Any) -> None:
        """Records values, as an example of a side effect."""
        self.seen.append([v.detach().clone() if isinstance(v, Tensor) else v for v in values])


CASES: dict[str, tuple[type[Base], dict[str, int] | None]] = {}


def _case(**calls: int) -> Callable[[Any], Any]:
    """Returns a decorator that adds a forward to `CASES`.

    ``calls`` are the numbers of calls of each operator in training, when the forward is fused.
    """

    def add(forward: Any) -> Any:
        cls = forward if isinstance(forward, type) else type("Case", (Base,), {"forward": forward})
        CASES[forward.__name__] = (cls, calls)
        return forward

    return add


# --- styles ---------------------------------------------------------------------------------------


@_case(bias_act=1, bias_dropout_add=1, bias_dropout_add_ln=1, layer_norm=1)
def inline(self, x):
    x = x + self.drop1(self.fc(self.norm1(x)))
    return x + self.drop2(self.fc2(self.act(self.fc1(self.norm2(x)))))


@_case(bias_act=1, bias_dropout_add=1, bias_dropout_add_ln=1, layer_norm=1)
def statements(self, x):
    residual = x
    h = self.norm1(x)
    h = self.fc(h)
    h = self.drop1(h)
    x = residual + h
    residual = x
    h = self.norm2(x)
    h = self.fc1(h)
    h = self.act(h)
    h = self.fc2(h)
    h = self.drop2(h)
    return h + residual


@_case(bias_act=1, bias_dropout_add_ln=2)
def post_norm(self, x):
    x = self.norm1(x + self.drop1(self.fc(x)))
    return self.norm2(self.drop2(self.fc2(self.act(self.fc1(x)))) + x)


@_case(bias_dropout_add_ln=1)
def two_names_of_a_norm(self, x):
    h = x + self.drop1(self.fc(x))
    y = z = self.norm1(h)
    return y * 2 + z + h


@_case(bias_act=1, bias_dropout_add_ln=2)
def post_norm_statements(self, x):
    h = self.drop1(self.fc(x))
    h = h + x
    x = self.norm1(h)
    h = self.mlp(x)
    x = x + h
    x = self.norm2(x)
    return x  # noqa: RET504, as models write it


@_case(bias_dropout_add=1)
def augmented(self, x):
    h = self.drop1(self.fc(x))
    h += x
    return h


@_case(bias_dropout_add_ln=1)
def augmented_and_norm(self, x):
    h = self.fc(x)
    h += x
    y = self.norm1(h)
    return y * h


@_case(layer_norm=1)
def augmented_residual(self, x):
    h = self.fc(x)
    x = x * 1
    x += h
    return self.norm1(x)


@_case(bias_act=1, bias_dropout_add=1)
def functional(self, x):
    h = F.gelu(self.fc1(x))
    h = F.dropout(h, p=self.p, training=self.training)
    h = self.fc2(h)
    h = F.dropout(h, self.p, self.training)
    return x + h


@_case(bias_dropout_add=1)
def functional_defaults(self, x):
    h = dropout(gelu(self.fc1(x), approximate="tanh"), training=self.training)
    return x + dropout(self.fc2(h))


@_case(bias_act=1, bias_dropout_add_ln=2)
def flags(self, x):
    residual = x
    if self.other:
        x = self.norm1(x)
    x = residual + self.drop1(self.fc(x))
    if not self.other:
        x = self.norm1(x)
    residual = x
    if self.other:
        x = self.norm2(x)
    x = residual + self.mlp(x)
    if not self.other:
        x = self.norm2(x)
    return x


@_case(bias_act=1, bias_dropout_add=1, bias_dropout_add_ln=1, layer_norm=1)
def flags_the_other_way(self, x):
    residual = x
    if self.flag:
        x = self.norm1(x)
    x = residual + self.drop1(self.fc(x))
    if not self.flag:
        x = self.norm1(x)
    residual = x
    if self.flag:
        x = self.norm2(x)
    x = residual + self.mlp(x)
    if not self.flag:
        x = self.norm2(x)
    return x


@_case(bias_act=1, bias_dropout_add=1)
def early_return(self, x):
    if x.shape[0] > 100:
        return x
    h = self.mlp(x)
    if self.other:
        return h
    return x + h


@_case(bias_dropout_add_ln=1)
def return_while_it_waits(self, x):
    x = x + self.drop1(self.fc(x))
    if self.other:
        return x, None
    y = self.norm1(x)
    return x, y


@_case(bias_dropout_add_ln=1, layer_norm=1)
def tuple_out(self, x):
    h, weights = self.attn(self.norm1(x), scale=0.5)
    x = x + h
    y = self.norm2(x)
    return y, weights, x


@_case(bias_dropout_add=1)
def outputs_of_attention(self, x):
    outputs = self.attn(x)
    h = outputs[0]
    h = x + h
    return (h,) + outputs[1:]  # noqa: RUF005, as models write it


@_case(bias_dropout_add=1, layer_norm=1)
def first_of_outputs(self, x):
    h = self.attn(x=self.norm1(x))[0]
    return x + h


@_case(bias_dropout_add_ln=1, layer_norm=1)
def the_same_norm_twice(self, x):
    x = x + self.fc(x)
    y = self.norm1(x)
    z = self.norm1(y)
    return y + z * x


@_case(bias_act=1, bias_dropout_add_ln=2)
def the_same_norm_of_two_sums(self, x):
    x = self.norm1(x + self.fc(x))
    return self.norm1(x + self.mlp(x))


@_case(bias_act=1, bias_dropout_add=2)
def a_shared_dropout(self, x):
    x = x + self.drop1(self.fc(x))
    return x + self.drop1(self.layers[0](x)) + self.drop1(self.mlp(x))


@_case(bias_dropout_add=2)
def two_dropouts_in_order(self, x):
    a = self.drop1(self.fc(x))
    b = self.drop2(self.fc2(self.fc1(x)))
    x = x + b
    return x + a


@_case(bias_act=1, bias_dropout_add=1)
def dropout_of_an_activation(self, x):
    return x + self.fc2(self.drop1(self.act(self.fc1(x))))


@_case(gelu=1)
def activation_of_a_dropout(self, x):
    return x + self.fc2(self.act(self.drop1(self.fc1(x))))


@_case(bias_act=1)
def activation_of_an_activation(self, x):
    return self.fn(self.act(self.fc1(x)))


@_case(bias_dropout_add=1)
def dropout_of_a_dropout(self, x):
    return x + self.drop2(self.drop1(self.fc(x)))


@_case(bias_act=1)
def activation_that_is_a_function(self, x):
    return self.fc2(self.fn(self.fc1(x)))


@_case(gated_act=1)
def gated(self, x):
    return self.down(self.act(self.gate(x)) * self.up(x))


@_case(gated_act=1)
def gated_second(self, x):
    return self.down(self.up(x) * self.act(self.gate(x)))


@_case(gated_act=1)
def gated_in_statements(self, x):
    gate = self.act(self.gate(x))
    up = self.up(x)
    h = gate * up
    h = self.drop1(h)
    return self.down(h)


@_case(bias_dropout_add=1, gated_act=1)
def gated_and_added(self, x):
    return x + self.drop1(self.fc2(self.fn(self.gate(x)) * self.up(x)))


@_case(gated_act=1)
def chunked(self, x):
    gate, up = self.packed(x).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


@_case(gated_act=1)
def chunked_and_kept(self, x):
    both = self.packed(x)
    gate, up = torch.chunk(both, 2, dim=-1)
    return self.down(up * self.act(gate)) + both.sum()


@_case(gelu=1)
def chunked_with_the_gate_second(self, x):
    up, gate = self.packed(x).chunk(2, -1)
    return self.down(up * self.act(gate))


@_case(gelu=1)
def chunked_with_the_gates_swapped(self, x):
    gate, up = self.packed(x).chunk(2, -1)
    return self.down(self.act(up) * gate)


@_case(gelu=1)
def split(self, x):
    gate, up = self.packed(x).split(12, dim=-1)
    return self.down(self.act(gate) * up)


@_case(gelu=1)
def chunked_along_rows(self, x):
    gate, up = self.packed(x).chunk(2, dim=0)
    return self.down((self.act(gate) * up)[..., :12])


@_case(gated_act=1)
def a_gate_used_again(self, x):
    gate, up = self.packed(x).chunk(2, dim=-1)
    return self.down(self.act(gate) * up) + gate.sum()


@_case()
def gate_changed_in_place(self, x):
    gate = self.gate(x)
    y = self.relu(gate) * self.up(x)
    return y + gate


@_case()
def chunk_changed_in_place(self, x):
    both = self.packed(x) * 1
    y = self.silu(both[..., :12]) * self.up(x)
    return y.sum(-1), both


@_case()
def in_place_dropout(self, x):
    h = self.fc(x)
    y = self.drop_in(h)
    return x + y + h


@_case()
def in_place_dropout_of_rows(self, x):
    h = x * 1
    y = x + self.drop_in(h)
    return y * h


# --- sums whose norm comes later ------------------------------------------------------------------


@_case(layer_norm=1)
def residual_changed_between(self, x):
    residual = x * 1
    z = residual + self.fc(x)
    residual[..., 0] = 3.0
    y = self.norm1(z)
    return y + residual


@_case(layer_norm=1)
def residual_multiplied_between(self, x):
    residual = x * 1
    z = residual + self.fc(x)
    residual *= 2
    return self.norm1(z) + residual


@_case(layer_norm=1)
def residual_changed_by_a_method(self, x):
    residual = x * 1
    z = residual + self.fc(x)
    residual.zero_()
    return self.norm1(z) + residual


@_case(layer_norm=1)
def sum_changed_between(self, x):
    z = x + self.fc(x)
    z[0] = 0.0
    return self.norm1(z) * z


@_case(bias_dropout_add=1, layer_norm=1)
def a_call_between(self, x):
    z = x + self.drop1(self.fc(x))
    self.note("between", x)
    return self.norm1(z)


@_case(bias_dropout_add=1, layer_norm=1)
def another_dropout_between(self, x):
    z = x + self.drop1(self.fc(x))
    w = self.drop2(x)
    return self.norm1(z) + w


@_case(bias_dropout_add_ln=1)
def statements_between(self, x):
    z = x + self.fc(x)
    scale, size = 2.0, z.shape[-1]
    flag = size > 3 and isinstance(scale, float)
    y = self.norm1(z)
    return y * scale + flag


@_case(bias_dropout_add_ln=1)
def an_alias_between(self, x):
    z = x + self.fc(x)
    kept = z
    x = 2 * x
    z = self.norm1(z)
    return z + kept * x


@_case(layer_norm=1)
def an_attribute_between(self, x):
    z = x + self.fc(x)
    self.kept = z.detach()
    return self.norm1(z)


@_case(bias_act=1, bias_dropout_add=1, bias_dropout_add_ln=1)
def the_sum_again(self, x):
    z = x + self.fc(x)
    y = self.norm1(z)
    w = z + self.mlp(y)
    return w, z


@_case(bias_dropout_add_ln=1)
def another_shape(self, x):
    z = x + self.drop1(self.fc(x))
    z = z.view(-1, z.shape[-1])
    return self.norm1(z)


@_case(bias_dropout_add=1, layer_norm=1)
def another_width(self, x):
    z = x + self.drop1(self.fc(x))
    z = z.reshape(-1, 4)
    return self.norm4(z)


@_case(bias_dropout_add=1, layer_norm=1)
def another_width_in_one(self, x):
    z = (x + self.fc(x)).reshape(2, 3, 2, 4)
    return self.norm4(z)


@_case(layer_norm=1)
def a_sum_of_two_tensors(self, x):
    z = x + 2 * x
    y = x + z
    return self.norm1(y) + y


# --- operands of sums -----------------------------------------------------------------------------


@_case(bias_dropout_add=2, layer_norm=1)
def a_row_is_added(self, x):
    row = x[:1, :1]
    return self.norm1(row + self.fc(x)) + (row + self.fc(x))


@_case(bias_dropout_add=1, layer_norm=1)
def added_to_more_rows(self, x):
    h = self.fc(x[0])
    z = x + h
    return self.norm1(z) + z


@_case(bias_dropout_add=1, layer_norm=1)
def a_number_is_added(self, x):
    one = 1.0
    z = one + self.drop1(self.fc(x))
    return self.norm1(z) + z


@_case(bias_dropout_add=1)
def tuples_are_added(self, x):
    extra = (x,)
    return self.attn(x) + extra


@_case()
def lists_are_added(self, x):
    extra = [x]
    h = self.lists(x)
    h = h + extra
    return tuple(h)


@_case()
def lists_are_extended(self, x):
    kept = h = self.lists(x)
    h += [x]
    return tuple(kept)


# --- returned values of modules -------------------------------------------------------------------


@_case(bias_dropout_add=1)
def a_list_unpacked(self, x):
    h, weights = self.lists(x)
    return x + self.drop1(h), weights


@_case(bias_dropout_add=1)
def a_list_indexed(self, x):
    return x + self.drop1(self.lists(x)[0])


@_case(bias_dropout_add=1)
def a_dataclass_unpacked(self, x):
    h, weights = self.outputs(x)
    return x + self.drop1(h), weights


@_case(bias_dropout_add=1)
def a_dataclass_indexed(self, x):
    out = self.outputs(x)
    return x + self.drop1(out[0]) + out.states


@_case(bias_dropout_add=1)
def a_dict(self, x):
    one, two = self.dicts(x)
    out = self.dicts(x)
    return x + self.drop1(out[one]), out[two]


@_case(bias_act=1)
def a_tensor_unpacked(self, x):
    one, two = self.mlp(x)
    return x[0] + self.drop1(one), two


@_case(bias_act=1)
def a_tensor_indexed(self, x):
    return x[0] + self.drop1(self.mlp(x)[0])


@_case()
def unpacked_with_a_star(self, x):
    h, *rest = self.attn(x)
    return x + h, *rest


@_case()
def unpacked_to_one_name(self, x):
    _, _ = self.attn(x)
    h, h = self.attn(x)
    return h


@_case(bias_dropout_add=1)
def several_targets(self, x):
    a = b = self.fc(x)
    return x + self.drop1(a) + b


@_case()
def unpacked_to_an_attribute(self, x):
    h, self.kept = self.attn(x)
    return x + h


@_case()
def annotated(self, x):
    h: Tensor = self.drop1(self.fc(x))
    y: Tensor
    y = x + h
    return y


# --- control flow ---------------------------------------------------------------------------------


@_case(bias_dropout_add=1)
def rebound_in_a_branch(self, x):
    h = self.drop1(self.fc(x))
    if self.other:
        h = x
    return x + h


@_case(bias_dropout_add=1)
def residual_rebound_in_a_branch(self, x):
    residual = x
    h = self.drop1(self.fc(x))
    if self.flag:
        residual = 2 * x
    return residual + h


@_case(bias_dropout_add_ln=1)
def norm_in_a_branch(self, x):
    z = x + self.fc(x)
    if self.flag:
        z = self.norm1(z)
    return z


@_case(bias_dropout_add_ln=1)
def norm_in_a_branch_and_the_sum_behind(self, x):
    z = x + self.fc(x)
    y = z
    if self.flag:
        y = self.norm1(z)
    return y * z


@_case(bias_dropout_add_ln=1)
def branches(self, x):
    z = x + self.fc(x)
    if self.flag:
        y = self.norm1(z)
    elif self.other:
        y = self.norm2(z)
    else:
        y = z
    return y + z


@_case()
def unused_in_a_branch(self, x):
    h = self.drop1(self.fc(x))
    y = x + h if self.other else x
    return self.drop2(y)


@_case()
def unused_before_a_return(self, x):
    h = self.drop1(self.fc(x))
    if self.flag:
        return self.drop2(x)
    return x + h


@_case()
def unused_before_a_plain_return(self, x):
    h = self.drop1(self.fc(x))
    if self.flag:
        return 2 * x
    return x + h


@_case()
def conditional_layers(self, x):
    h = self.fc2(self.act(self.fc1(x))) if self.other else self.fc(x)
    return x + (self.drop1(h) if self.flag else h)


@_case()
def a_layer_that_is_not_there(self, x):
    h = self.fc2(self.act(self.missing(x))) if hasattr(self, "missing") else x
    return self.fc(h)


@_case()
def a_layer_that_is_not_there_in_a_sum(self, x):
    return x + (self.fc2(self.act(self.missing(x))) if hasattr(self, "missing") else self.fc(x))


@_case(bias_dropout_add=1)
def conditional_sums(self, x):
    return x + self.fc2(self.act(self.fc1(x))) if self.other else x + self.drop1(self.fc(x))


@_case()
def a_with_between(self, x):
    h = self.drop1(self.fc(x))
    with torch.enable_grad():
        w = self.drop2(x)
    return x + h, w


@_case(bias_act=1, bias_dropout_add=1)
def short_circuit(self, x):
    y = self.other and self.norm1(x)
    return x + self.mlp(x) if y is False else y


@_case()
def a_loop(self, x):
    h = self.drop1(self.fc(x))
    for layer in self.layers:
        x = x + layer(x)
        h = h + x
    return x + h


@_case()
def a_loop_that_binds(self, x):
    h = self.drop1(self.fc(x))
    x = x + h
    for h in (x, x):
        x = x + h
    return h


@_case(bias_dropout_add=2)
def a_while_loop(self, x):
    n = 2
    h = self.fc(x)
    while n:
        x = x + h
        n -= 1
    return x + self.drop1(self.fc(x))


@_case(bias_dropout_add=2, layer_norm=1)
def a_try(self, x):
    z = x + self.fc(x)
    try:
        y = self.norm1(z)
        self.nothing(x)
    except AttributeError:
        y = z
    return y + self.drop1(self.fc(z))


@_case(layer_norm=1)
def a_with(self, x):
    h = self.fc(x)
    with torch.no_grad():
        z = x + h
        h = self.drop1(h)
    return self.norm1(z) + h


@_case()
def a_with_around_it(self, x):
    with torch.no_grad():
        return x + self.drop1(self.fc(x))


@_case(layer_norm=1)
def deleted(self, x):
    h = self.drop1(self.fc(x))
    z = x + h
    del h
    return self.norm1(z)


@_case()
def asserted(self, x):
    h = self.drop1(self.fc(x))
    assert h.shape == x.shape, f"{h}"
    return x + h


# --- names that other scopes read -----------------------------------------------------------------


@_case()
def a_lambda(self, x):
    later = lambda: h  # noqa: E731
    h = self.drop1(self.fc(x))
    y = x + h
    return y + later()


@_case(layer_norm=1)
def a_lambda_of_the_sum(self, x):
    z = x + self.fc(x)
    later = lambda: z  # noqa: E731
    z = self.norm1(z)
    return z + later()


@_case()
def a_nested_function(self, x):
    def later():
        return h

    h = self.drop1(self.fc(x))
    y = x + h
    return y * later()


@_case(layer_norm=1)
def a_generator(self, x):
    z = x
    later = (z for _ in range(1))
    z = x + self.fc(x)
    y = self.norm1(z)
    return y + next(later)


@_case(bias_dropout_add_ln=1)
def a_comprehension(self, x):
    z = x + self.fc(x)
    numbers = [1.0 for z in (1, 2)]
    return self.norm1(z) + z * numbers[0]


@_case()
def a_comprehension_that_reads(self, x):
    h = self.drop1(self.fc(x))
    y = x + h
    return torch.stack([y + h for h in (x, y)])


@_case()
def a_walrus(self, x):
    if (h := self.drop1(self.fc(x))) is not None:
        x = x + h
    return x * h


@_case(layer_norm=1)
def local_names(self, x):
    z = x + self.fc(x)
    known = "z" in locals()
    return self.norm1(z) if known else x


@_case()
def local_names_that_are_gone(self, x):
    h = self.drop1(self.fc(x))
    y = x + h
    return y + locals()["h"]


@_case(bias_dropout_add_ln=1)
def an_alias_that_is_bound_again(self, x):
    z = x + self.drop1(self.fc(x))
    other = z
    other = x
    y = self.norm1(z)
    return y + z * other


@_case()
def a_global_name_that_is_local(self, x, dropout=lambda h: 2 * h):
    h = self.fc(x)
    return x + dropout(h)


@_case()
def a_module_by_a_global_name(self, x):
    dropout, gelu = self.drop2, self.fn
    h = gelu(self.fc1(x))
    return x + dropout(self.fc2(h))


@_case()
def another_self(self, x):
    y = self.fc(x)
    self = self.mlp
    self.fc = torch.sin
    y = x + self.fc(y)
    del self.fc
    return y


@_case(bias_dropout_add=1)
def default_arguments(self, x, scale=2.0, *, more=0.5, **others):
    x = x * scale * more + len(others)
    return self.drop1(self.fc(x)) + x


@_case(bias_dropout_add=1)
def handed_on(self, x, *args, **kwargs):
    h, _ = self.attn(x, *args, **kwargs)
    return x + self.drop1(h)


def _doubling(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return 2 * forward(self, x)

    return wrapper


@_case()
@_doubling
def decorated(self, x):
    return x + self.drop1(self.fc(x))


@_case()
@torch.no_grad()
def without_gradients(self, x):
    return x + self.drop1(self.fc(x))


@_case()
class Super(Base):
    def forward(self, x):
        self.note(super().__class__)
        return x + self.drop1(self.fc(x))


class _Middle(Base):
    def forward(self, x):
        return x + self.drop1(self.fc(x))


@_case(bias_dropout_add=1)
class Inherited(_Middle):
    pass


@_case()
class Mangled(Base):
    __hidden = 2.0

    def forward(self, x):
        return x + self.drop1(self.fc(x)) * self.__hidden


@_case(bias_dropout_add=1)
class Property(Base):
    @property
    def chance(self):
        self.note("read")
        return 0.4

    def forward(self, x):
        h = F.dropout(self.fc(x), p=self.chance, training=self.training)
        return x + h


# --- loops ----------------------------------------------------------------------------------------


@_case(bias_dropout_add_ln=2)
def a_loop_of_blocks(self, x):
    for layer in self.layers:
        h = self.drop1(layer(x))
        x = x + h
        x = self.norm1(x)
    return x


@_case(bias_dropout_add_ln=2)
def a_loop_of_pre_norm_blocks(self, x):
    y = x
    for layer in self.layers:
        x = x + self.drop1(layer(y))
        y = self.norm1(x)
    return x, y


@_case(layer_norm=2)
def a_value_of_the_iteration_before(self, x):
    h = x
    for layer in self.layers:
        y = self.norm1(h)
        h = self.drop1(layer(y))
        x = x + h
    return x


@_case()
def a_value_behind_the_loop(self, x):
    h = x
    for layer in self.layers:
        h = self.drop1(layer(x))
        x = 2 * x
    return x + h


@_case()
def a_break(self, x):
    h = None
    for layer in self.layers:
        h = self.drop1(layer(x))
        if self.flag:
            break
        x = x + h
    else:
        h = x
    return x + h


@_case(layer_norm=1)
def a_continue(self, x):
    for place, layer in enumerate(self.layers):
        h = self.drop1(layer(x))
        z = x + h
        if place == 0:
            x = z
            continue
        x = self.norm1(z)
    return x


@_case(bias_dropout_add_ln=1)
def a_return_in_a_loop(self, x):
    for layer in self.layers:
        z = x + self.drop1(layer(x))
        if self.flag:
            return z, self.norm1(z)
        x = self.norm2(z)
    return x, z


@_case(bias_dropout_add=2, layer_norm=4)
def loops_in_loops(self, x):
    for layer in self.layers:
        h = self.drop1(layer(x))
        for _ in range(2):
            x = x + h
            h = self.norm1(x)
        x = x + self.drop2(h)
    return x


@_case(bias_dropout_add=1, layer_norm=3)
def sums_over_a_loop(self, x):
    z = x + self.drop1(self.fc(x))
    for norm in (self.norm1, self.norm2):
        x = norm(z) + x
    return self.norm1(z) + x


@_case(bias_dropout_add=1, bias_dropout_add_ln=1)
def a_comprehension_of_layers(self, x):
    h = self.drop1(self.fc(x))
    ys = [self.drop2(layer(x)) for layer in self.layers]
    return sum(ys) + self.norm1(x + h)


# --- more statements between a sum and its norm ---------------------------------------------------


@_case()
def swapped(self, x):
    h = self.drop1(self.fc(x))
    x, h = h, x
    return x + h


@_case(bias_dropout_add=1, layer_norm=1)
def assigned_together(self, x):
    h = self.drop1(self.fc(x))
    residual, x = x, x + h
    return self.norm1(x) + residual


@_case(bias_dropout_add_ln=1)
def normed_together(self, x):
    x = x + self.drop1(self.fc(x))
    x, residual = self.norm1(x), x
    return x * residual


@_case(bias_act=1, bias_dropout_add=1, bias_dropout_add_ln=1, layer_norm=1)
def five_conditions(self, x):
    residual = x
    if self.flag:
        x = self.norm1(x)
    x = self.fc(x)
    if self.other:
        x = self.act(x)
    x = self.drop1(x)
    if self.record is None:
        x = residual + x
    if not self.flag:
        x = self.norm1(x)
    residual = x
    if self.flag:
        x = self.norm2(x)
    elif self.other:
        x = self.norm1(x)
    x = residual + self.mlp(x)
    return x if not self.other else self.norm2(x)


@_case(bias_dropout_add=1)
def a_condition_on_numbers(self, x):
    z = x + self.drop1(self.fc(x))
    if z.sum() > 0:
        z = self.norm1(z)
    return z


@_case(bias_dropout_add_ln=1)
def raising(self, x):
    h = self.drop1(self.fc(x))
    if h.dim() != 3:
        raise ValueError(h)
    z = x + self.drop2(self.fc(x))
    if self.record is not None:
        raise ValueError(z)
    return self.norm1(z) + h


@_case(bias_dropout_add=1)
def keyword_rows(self, x):
    h = self.drop1(input=self.fc(input=x))
    return x + self.drop2(self.fc(input=h))


@_case()
def starred_rows(self, x):
    return x + self.drop1(*[self.fc(*[x])])


@_case()
def functional_dropout_in_place(self, x):
    h = self.fc(x)
    y = F.dropout(h, 0.3, self.training, inplace=True)
    return x + y + h


@_case(bias_dropout_add=1)
def functional_dropout_by_mode(self, x):
    h = F.dropout(self.fc(x), self.p if self.training else 0.0)
    return x + h


@_case()
def dropout_by_mode(self, x):
    h = self.fc(x)
    h = self.drop1(h) if self.training else h
    return x + h


@_case(layer_norm=1)
def added_in_place(self, x):
    h = self.drop1(self.fc(x))
    z = x * 1
    z.add_(h)
    return self.norm1(z)


@_case(bias_dropout_add_ln=1)
def residual_changed_afterwards(self, x):
    residual = x * 1
    z = residual + self.drop1(self.fc(x))
    y = self.norm1(z)
    residual.zero_()
    return y + z + residual


@_case(bias_dropout_add_ln=1)
def output_changed_afterwards(self, x):
    y = self.norm1(x + self.drop1(self.fc(x)))
    kept = y
    y = y * 1
    y += 1
    return y + kept


@_case(bias_act=1, bias_dropout_add=1)
def three_terms(self, x):
    return x + self.drop1(self.fc(x)) + self.drop2(self.mlp(x))


@_case(layer_norm=1)
def subtracted(self, x):
    h = self.drop1(self.fc(x))
    return self.norm1(x - h)


@_case(bias_dropout_add_ln=1)
def added_twice(self, x):
    h = self.drop1(self.fc(x))
    return self.norm1(h + h)


@_case(layer_norm=1)
def added_to_itself(self, x):
    x = x + x
    return self.norm1(x) + x


@_case(layer_norm=1)
def matched(self, x):
    h = self.drop1(self.fc(x))
    match self.flag:
        case True:
            y = x + h
        case _:
            y = x
    return self.norm1(y)


@_case(bias_dropout_add=1, layer_norm=1)
def a_module_that_keeps(self, x):
    z = x + self.drop1(self.fc(x))
    self.kept = z
    y = self.norm1(z)
    return y + self.kept


@_case(bias_dropout_add=1)
def an_import(self, x):
    from torch import sin as gelu

    return x + self.drop1(self.fc2(gelu(self.fc1(x))))


@_case(layer_norm=1)
def an_argument_by_the_name_of_a_temporary(self, x, _fusedops_1=2.0):
    z = x + self.drop1(self.fc(x))
    return self.norm1(z) + z * _fusedops_1


@_case(bias_dropout_add_ln=1)
def no_tensor_between(self, x):
    h = self.fc(x)
    h = h.view(h.shape)
    z = x + self.drop1(h)
    z = z.view(*z.shape)
    return self.norm1(z) + z


@_case(bias_dropout_add=1, layer_norm=1)
def kept_under_two_names(self, x):
    a = b = x + self.drop1(self.fc(x))
    c = a
    a = self.norm1(a)
    return a + b + c


@_case(bias_dropout_add=1, gelu=1)
def a_gate_between_dropouts(self, x):
    gate = self.act(self.gate(x))
    up = self.drop2(self.up(x))
    return x + self.drop1(self.fc2(gate * up))


@_case(bias_dropout_add=1, gated_act=1)
def a_gate_that_is_none(self, x):
    gate = self.act(self.gate(x))
    if self.other:
        return gate
    return x + self.drop1(self.fc2(gate * self.up(x)))


@_case()
def a_gate_changed_before(self, x):
    gate = self.gate(x)
    act = self.fn(gate)
    gate.zero_()
    return act * self.up(x)


@_case()
def a_gate_changed_by_an_operator(self, x):
    gate = self.gate(x)
    act = self.fn(gate)
    gate += 1
    return self.down(act * gate)


@_case()
def a_gate_changed_within_conditions(self, x):
    gate = self.gate(x)
    act = self.fn(gate)
    if self.flag:  # noqa: SIM102 (nested, which is the case)
        if not self.other:
            gate += 1
    return self.down(act * gate)


@_case(gelu=1)
def a_gate_whose_rows_change(self, x):
    x = x * 1
    gate = self.act(self.gate(x * 1))
    x[..., 0] = 0.0
    return gate * self.up(x * 1)


@_case(bias_dropout_add_ln=1)
def a_flag_that_turns(self, x):
    if self.flag:
        x = x + 1
    self.flag = not self.flag
    x = x + self.fc(x)
    x = self.norm1(x)
    if self.flag:
        x = x * 2
    return x


@_case(bias_dropout_add=1)
class TurnsFlag(Base):
    def turn(self):
        self.flag = not self.flag

    def forward(self, x):
        if self.flag:
            x = x + self.drop1(self.fc(x))
        self.turn()
        if self.flag:
            x = self.norm1(x + self.drop2(self.mlp(x)))
        return x


@_case(bias_dropout_add_ln=1)
def a_function_that_reads_a_flag_later(self, x):
    def factor():
        if self.flag:
            return 2.0
        return 3.0

    x = self.norm1(x + self.drop1(self.fc(x)))
    self.__dict__["flag"] = not self.flag
    return x * factor()


# --- names that are not bound, since an operator computes their values ----------------------------


@_case(bias_dropout_add_ln=1, gated_act=1, bias_dropout_add=1)
def unused_copies(self, x):
    h = self.drop1(self.fc(x))
    z = self.norm1(x + h)
    hidden = h  # noqa: F841
    gate = self.act(self.gate(z))
    y = z + self.drop2(self.down(gate * self.up(z)))
    gated = gate  # noqa: F841
    return y


@_case(bias_dropout_add_ln=2)
def copied_to_the_next_iteration(self, x):
    last = x
    for _ in range(2):
        y = last * 2.0
        h = self.drop1(self.fc(x))
        x = self.norm1(x + h) + y
        last = h
    return x


@_case(bias_dropout_add_ln=2, bias_act=1, bias_dropout_add=1)
def shapes_after_norms(self, x):
    z = x + self.drop1(self.fc(x))
    y = self.norm1(z).view(z.size(0), z.size(1), -1)
    z = y + self.drop2(self.mlp(y))
    flat = z.reshape(-1, N)
    shape = z
    return self.norm2(flat).reshape(shape.shape)


@_case(bias_dropout_add_ln=1)
def a_shape_in_the_head_of_a_loop(self, x):
    z = x + self.drop1(self.fc(x))
    y = self.norm1(z)
    for _ in range(z.shape[0]):
        y = y + 1.0
    return y


@_case(bias_dropout_add=1, layer_norm=1)
def a_shape_in_a_condition(self, x):
    z = x + self.drop1(self.fc(x))
    if z.shape[0] > 100:
        return x
    return self.norm1(z)


@_case()
def outputs_in_the_head_of_a_loop(self, x):
    outputs = self.attn(x)
    x = x + outputs[0]
    for weights in outputs[1:]:
        x = x + weights.mean()
    return x


@_case()
def outputs_in_a_comprehension(self, x):
    outputs = self.attn(x)
    return x + outputs[0], [weights * 2.0 for weights in outputs[1:]]


@_case(bias_dropout_add_ln=1, bias_act=1, bias_dropout_add=1)
def a_capture(self, x):
    y = self.norm1(x + self.drop1(self.fc(x)))
    match (x * 3.0, x):
        case [y, *_]:
            pass
    return y + self.drop2(self.mlp(y))


@_case(bias_dropout_add_ln=1)
def an_in_place_dropout_by_position(self, x):
    h = x * 1.0
    y = F.dropout(h, 0.3, self.training, True)
    return self.norm1(x + y) + h


@_case(bias_dropout_add=1)
def positional_only(self, x, /):
    return x + self.drop1(self.fc(x))


# --- values that the operators do not accept ------------------------------------------------------


@_case(bias_dropout_add=3)
def residuals_of_other_dtypes(self, x):
    mask = x > 0
    h = self.drop1(self.fc(x))
    h += mask
    y = mask + self.drop2(self.fc(h))
    z = y * 1j
    return (z + self.drop1(self.fc(y))).real


@_case(bias_dropout_add=1)
def a_probability_in_a_tensor(self, x):
    p = torch.tensor(0.3)
    return x + F.dropout(self.fc(x), p, self.training)
