"""Attentions that a model writes out are computed by PyTorch's operator of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

import fusedops
from fusedops.backend import entry
from fusedops.backend.graphs import name_of, value_of
from fusedops.backend.passes import attentions
from fusedops.backend.report import CompileReport
from rowwise_checks import assert_as_good
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_BATCH, _HEADS, _LENGTH, _WIDTH = 2, 3, 16, 8


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions, "_LEAST_TOKENS", 16)


def _heads(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    shape = sizes or (_BATCH, _HEADS, _LENGTH, _WIDTH)
    return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_()


def _attentions(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if name_of(node) == "scaled_dot_product_attention"]


def _compiled(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], list[fx.Node]]:
    """A compiled function, and a list of the attentions in its last graph."""
    found: list[fx.Node] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        report = CompileReport()
        result = entry._with_operators(gm, inputs, report)
        assert not report.left, report.left
        found[:] = _attentions(result.graph)
        return result.forward

    return torch.compile(function, backend=backend), found


def _positions() -> tuple[Tensor, Tensor]:
    positions = torch.arange(_LENGTH, device=DEVICE)
    return positions[:, None], positions[None, :]


def _hides_later(scores: Tensor) -> Tensor:
    query, key = _positions()
    return scores.masked_fill(key > query, -math.inf)


def _chooses_earlier(scores: Tensor) -> Tensor:
    query, key = _positions()
    lowest = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype, device=DEVICE)
    return torch.where(key <= query, scores, lowest)


def _adds_causal(scores: Tensor) -> Tensor:
    query, key = _positions()
    return scores + torch.where(key <= query, 0.0, -math.inf)


def _adds_nothing(scores: Tensor) -> Tensor:
    query, key = _positions()
    seen = ((key >= 0) & (query >= 0)).expand(_BATCH, 1, -1, -1)
    return scores + torch.where(seen, torch.tensor(0.0), -math.inf).to(scores.dtype)


def _adds_per_query(scores: Tensor) -> Tensor:
    query, _ = _positions()
    return scores + query.to(scores.dtype) * 0.125


def _adds_then_scales(scores: Tensor) -> Tensor:
    query, key = _positions()
    return (scores + (query - key).to(scores.dtype)) * 0.25


def _adds_truth_values(scores: Tensor) -> Tensor:
    query, key = _positions()
    return scores + (key <= query)


def _adds_distances(scores: Tensor) -> Tensor:
    """As ALiBi: numbers of fp32, with more digits than bf16 has."""
    _, key = _positions()
    return scores.float() + (key - 1000.0) * 0.375


def _adds_in_three_dimensions(scores: Tensor) -> Tensor:
    query, key = _positions()
    flat = scores.flatten(0, 1) + (query - key).to(scores.dtype) / 16
    return flat.view(scores.shape)


def _adds_twice(scores: Tensor) -> Tensor:
    query, key = _positions()
    return (query - key).to(scores.dtype) / 16 + _hides_later(scores)


_MASKS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[bool, bool]]] = {
    "none": (lambda scores: scores, (False, False)),
    "hides later": (_hides_later, (False, True)),
    "chooses earlier": (_chooses_earlier, (False, True)),
    "adds causal": (_adds_causal, (False, True)),
    "adds nothing": (_adds_nothing, (False, False)),
    "per query": (_adds_per_query, (True, False)),
    "adds, then scales": (_adds_then_scales, (True, False)),
    "distances": (_adds_distances, (True, False)),
    "truth values": (_adds_truth_values, (True, False)),
    "in three dimensions": (_adds_in_three_dimensions, (True, False)),
    "adds twice": (_adds_twice, (True, False)),
}


def _written(mask: Callable[[Tensor], Tensor], *, wide: bool = False) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = mask(torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(_WIDTH))
        weights = F.softmax(scores, -1, dtype=torch.float32 if wide else None).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2).reshape(_BATCH, _LENGTH, -1)

    return attention


def _with_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], cotangent: Tensor
) -> list[Tensor]:
    result = function(*tensors)
    return [result, *torch.autograd.grad(result, tensors, cotangent.to(result.dtype))]


@pytest.mark.parametrize("wide", [False, True], ids=["half", "in fp32"])
@pytest.mark.parametrize("case", _MASKS)
def test_attention_has_the_values_and_gradients_of_eager_pytorch(case: str, wide: bool) -> None:
    mask, (has_mask, is_causal) = _MASKS[case]
    function, tensors = _written(mask, wide=wide), [_heads() for _ in range(3)]
    compiled, found = _compiled(function)

    cotangent = torch.randn(_BATCH, _LENGTH, _HEADS * _WIDTH, device=DEVICE)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = [_with_gradients(compiled, tensors, cotangent)]
    results += [_with_gradients(function, each, cotangent) for each in (exact, tensors)]
    for name, got, true, eager in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_as_good(got, true, [eager], f"{case}: {name}")
    (call,) = found
    *_, given, dropout, causal = call.args
    assert (given is not None, causal, dropout) == (has_mask, is_causal, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_hidden_whole_have_equal_weights(dtype: torch.dtype) -> None:
    """The lowest number of fp32 would be -inf in bf16, and that of bf16 in a kernel."""

    def function(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)).to(dtype)
        scores = scores + torch.where(seen, 0.0, torch.finfo(dtype).min)[:, None, None].to(dtype)
        return torch.matmul(scores.softmax(-1).to(query.dtype), value)

    query, key, value = (_heads() for _ in range(3))
    seen = torch.ones(_BATCH, _LENGTH, dtype=torch.bool, device=DEVICE)
    seen[0] = False
    compiled, found = _compiled(function)
    result = compiled(query, key, value, seen)
    assert len(found) == 1
    mean = value[0].double().mean(-2, keepdim=True).expand(-1, _LENGTH, -1)
    assert_as_good(result[0], mean, [function(query, key, value, seen)[0]], "hidden")


def test_keys_may_be_the_queries() -> None:
    compiled, found = _compiled(
        lambda x: torch.bmm(torch.bmm(x, x).view(2, 3, 16, 16).softmax(-1).view(6, 16, 16), x)
    )
    compiled(_heads(6, 16, 16))
    assert len(found) == 1


def test_dropout_is_that_of_the_attention() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.matmul(query, key.transpose(-1, -2)).softmax(-1)
        return torch.matmul(F.dropout(weights, 0.25), value)

    compiled, found = _compiled(function)
    result = compiled(*(_heads() for _ in range(3)))
    assert [node.args[4] for node in found] == [0.25]
    assert result.requires_grad


def test_result_has_the_strides_of_the_model() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(query, key.mT).softmax(-1), value)

    tensors = [_heads(_BATCH, _LENGTH, _HEADS, _WIDTH).transpose(1, 2) for _ in range(3)]
    attention = F.scaled_dot_product_attention(*tensors)
    result = fusedops.compile(function, rest="eager")(*tensors)
    assert result.stride() == function(*tensors).stride() != attention.stride()


def test_factors_get_adjacent_columns() -> None:
    """A product reads transposed factors in place, the fused kernels do not."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(query.mT, key).softmax(-1), value.mT)

    compiled, found = _compiled(function)
    compiled(*(_heads(_BATCH, _HEADS, _WIDTH, _LENGTH) for _ in range(3)))
    (call,) = found
    assert [value_of(node).stride()[-1] for node in call.all_input_nodes] == [1, 1, 1]


def _returns_weights(query: Tensor, key: Tensor, value: Tensor) -> Any:
    weights = torch.matmul(query, key.transpose(-1, -2)).softmax(-1)
    return torch.matmul(weights, value), weights


def _reads_scores(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = torch.matmul(query, key.transpose(-1, -2))
    return torch.matmul(scores.softmax(-1), value) + scores.sum()


def _over_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(query, key.transpose(-1, -2)).softmax(-2), value)


def _behind_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(value.mT, torch.matmul(query, key.transpose(-1, -2)).softmax(-1))


def _with_a_finite_fill(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)).masked_fill(query[..., :1] > 0, -1.0)
    return torch.matmul(scores.softmax(-1), value)


def _with_a_trained_bias(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(query, key.mT) + query[..., :1]).softmax(-1), value)


def _with_a_negative_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(query, key.transpose(-1, -2)) * -0.5).softmax(-1), value)


def _of_folded_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All heads have one key and value."""
    rows = query.reshape(_BATCH, -1, _WIDTH)
    scores = torch.bmm(rows, key[:, 0].mT).view(_BATCH, _HEADS, _LENGTH, _LENGTH)
    weights = scores.softmax(-1).view(_BATCH, -1, _LENGTH)
    return torch.bmm(weights, value[:, 0]).view(query.shape)


def _of_one_value(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.matmul(query, key.mT).softmax(-1).view(_BATCH, -1, _LENGTH)
    return torch.bmm(weights, value[:, 0]).view(query.shape)


def _of_reshaped_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    queries, keys, values = (t.repeat(1, 1, 2, 1) for t in (query, key, value))
    scores = torch.matmul(queries, keys.mT)
    weights = scores.reshape(_BATCH, _HEADS, _LENGTH, -1).softmax(-1)
    return torch.matmul(weights.reshape(scores.shape), values)


def _of_integers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.matmul(query, key.mT).softmax(-1) * 8).int().to(query.dtype)
    return torch.matmul(weights, value)


def _of_rounded_weights(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.matmul(query, key.mT).softmax(-1).to(torch.float8_e4m3fn).to(query.dtype)
    return torch.matmul(weights, value)


def _of_squares(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(query, key.transpose(-1, -2)).square().softmax(-1), value)


def _without_gradients_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        scores = torch.matmul(query, key.transpose(-1, -2))
    return torch.matmul(scores.softmax(-1), value)


_LEFT = (
    _returns_weights,
    _reads_scores,
    _over_queries,
    _behind_values,
    _with_a_finite_fill,
    _with_a_trained_bias,
    _of_folded_queries,
    _of_one_value,
    _of_reshaped_rows,
    _of_integers,
    _of_rounded_weights,
    _of_squares,
    _with_a_negative_scale,
    _without_gradients_of_scores,
)


@pytest.mark.parametrize("function", _LEFT, ids=lambda function: function.__name__)
def test_what_is_no_attention_stays_written_out(function: Callable[..., Any]) -> None:
    compiled, found = _compiled(function)
    compiled(*(_heads() for _ in range(3)))
    assert not found


def test_attention_whose_mask_changes_stays_written_out() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        weights = (torch.matmul(query, key.mT) + mask).softmax(-1)
        mask.zero_()
        return torch.matmul(weights, value)

    compiled, found = _compiled(function)
    tensors, mask = [_heads() for _ in range(3)], _heads(_LENGTH, _LENGTH).detach()
    eager = function(*tensors, mask.clone())
    assert torch.equal(compiled(*tensors, mask), eager)
    assert not found and not mask.any()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((_BATCH, _HEADS, _LENGTH, _WIDTH), torch.float32),
        ((_BATCH, _HEADS, _LENGTH - 1, _WIDTH), torch.bfloat16),
        ((_BATCH, _HEADS, _LENGTH, 12), torch.bfloat16),
        ((_BATCH, _HEADS, _LENGTH, 264), torch.bfloat16),
    ],
    ids=["fp32", "few tokens", "heads of 12", "heads of 264"],
)
def test_without_a_faster_kernel_an_attention_stays_written_out(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(query, key.mT).softmax(-1), value)

    compiled, found = _compiled(function)
    compiled(*(_heads(*sizes, dtype=dtype) for _ in range(3)))
    assert not found


@pytest.mark.parametrize("trains", [True, False])
def test_cudnns_backward_gets_no_mask_of_64_keys_too_many(trains: bool) -> None:
    """PyTorch's issue 196678."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return torch.matmul((torch.matmul(query, key.mT) + mask).softmax(-1), value)

    tensors = [_heads(1, 1, 192, 8) for _ in range(3)]
    mask = torch.randn(192, device=DEVICE, dtype=torch.bfloat16)
    compiled, found = _compiled(function)
    with torch.set_grad_enabled(trains):
        compiled(*tensors, mask)
    assert len(found) == (not trains)


@pytest.mark.parametrize("is_flat", [False, True])
def test_lengths_may_change(is_flat: bool) -> None:
    """A model may have batch and heads in one dimension; a mask is that of each call."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        factors = [t.flatten(0, 1) if is_flat else t for t in (query, key.mT, value)]
        scores = torch.matmul(*factors[:2]).view(*query.shape[:-1], -1) + mask
        weights = scores.softmax(-1)
        result = torch.matmul(weights.flatten(0, 1) if is_flat else weights, factors[2])
        return result.view(query.shape)

    compiled, found = _compiled(function)

    def called(length: int) -> None:
        tensors = [_heads(_BATCH, _HEADS, length, _WIDTH) for _ in range(3)]
        mask = torch.randn(length, device=DEVICE, dtype=torch.bfloat16)
        for tensor, dim in ((mask, 0), *[(tensor, 2) for tensor in tensors]):
            torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            exact = function(*(tensor.double() for tensor in (*tensors, mask)))
            eager = function(*tensors, mask)
            result = compiled(*tensors, mask)
        assert_as_good(result, exact, [eager], f"{length} tokens")
        assert len(found) == 1

    called(16)
    called(48)
