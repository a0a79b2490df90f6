"""Losses of logits with a low-rank product that is added: values, gradients, counts and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.losses import registration
from heads import IGNORED, Products, budget, check, new_head
from support import DEVICE, DTYPES

RANK = 2


class _Adapted(NamedTuple):
    """A head, the rows and weight of its adapter, and targets."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    rows: Tensor
    of_rows: Tensor
    target: Tensor


def _adapted(dtype: torch.dtype = torch.float32, of_lora: torch.dtype | None = None) -> _Adapted:
    """Returns eight rows, of which every third is ignored. All tensors need gradients."""
    x, weight, bias, target = new_head(dtype=dtype)
    shapes = (8, RANK), (11, RANK)
    pair = [torch.randn(s, device=DEVICE, dtype=of_lora or dtype).requires_grad_() for s in shapes]
    return _Adapted(x, weight, bias, *pair, target)


def _loss(x: Tensor, w: Tensor, b: Tensor, u: Tensor, v: Tensor, target: Tensor, **options: Any):
    """Returns the loss in chunks of three rows."""
    chunk_mib = budget(3, w.shape[0], x.dtype)
    return fusedops.linear_cross_entropy(
        x, w, target, linear_bias=b, lora=(u, v), chunk_mib=chunk_mib, **options
    )


def _eager(x: Tensor, w: Tensor, b: Tensor, u: Tensor, v: Tensor, target: Tensor, **options: Any):
    """Returns the loss of whole logits, with both products in the dtype of ``x``."""
    logits = F.linear(x, w, b) + u.to(x.dtype) @ v.to(x.dtype).t()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, **options)


def _rounded(reduction: str) -> float:
    """Returns the sum of the logits that are rounded in the loss, and not by `_eager`.

    That is the product of the head, of whose rounding two logits of at most 16 enter a row's loss.
    Five rows count.
    """
    return 2 * 16 * (5 if reduction == "sum" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_those_of_the_sum(dtype: torch.dtype, reduction: str) -> None:
    *leaves, target = _adapted(dtype)
    check(
        lambda *t: _loss(*t, target, reduction=reduction),
        lambda *t: _eager(*t, target, reduction=reduction),
        leaves,
        rounded=_rounded(reduction),
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_in_fp32_beside_16_bits(dtype: torch.dtype, reduction: str) -> None:
    *leaves, target = _adapted(dtype, torch.float32)
    check(
        lambda *t: _loss(*t, target, reduction=reduction),
        lambda *t: _eager(*t, target, reduction=reduction),
        leaves,
        rounded=_rounded(reduction),
    )


def test_autocast_of_fp32_parameters() -> None:
    *leaves, target = _adapted()

    def cast(function: Any) -> Any:
        def call(*t: Tensor) -> Tensor:
            enabled = t[0].dtype == torch.float32
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
                return function(*t, target)

        return call

    def eager(x: Tensor, w: Tensor, b: Tensor, u: Tensor, v: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w, b) + F.linear(u, v), target)

    check(cast(_loss), cast(eager), leaves)


def test_log_probs_and_entropies() -> None:
    x, w, b, u, v, target = _adapted()
    tokens = target.clamp(min=0)

    def ours(x: Tensor, w: Tensor, b: Tensor, u: Tensor, v: Tensor) -> Any:
        return fusedops.linear_log_probs(
            x, w, tokens, linear_bias=b, lora=(u, v), entropy=True, chunk_mib=budget(3)
        )

    def plain(x: Tensor, w: Tensor, b: Tensor, u: Tensor, v: Tensor) -> Any:
        log_p = torch.log_softmax(F.linear(x, w, b) + u @ v.t(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, tokens[:, None]).squeeze(-1), entropy

    # The entropy is a difference of terms as large as logits.
    check(ours, plain, (x, w, b, u, v), cancelled=8)


def _kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    log_p = torch.log_softmax(student / temperature, -1)
    log_q = torch.log_softmax(teacher / temperature, -1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("of_head", [0, 1])
def test_adapter_of_one_of_two_heads(of_head: int, reduction: str) -> None:
    x, w, _, u, v, _ = _adapted()
    y, teacher, _, _ = new_head(cols=3)
    op = fusedops.linear_rowwise(_kl, reduction=reduction, chunk_mib=budget(3, 22), strict=True)

    def ours(x: Tensor, y: Tensor, w: Tensor, teacher: Tensor, u: Tensor, v: Tensor) -> Any:
        lora = [None, None]
        lora[of_head] = (u, v)
        return op((x, y), (w, teacher), 2.0, lora=lora)

    def plain(x: Tensor, y: Tensor, w: Tensor, teacher: Tensor, u: Tensor, v: Tensor) -> Any:
        logits = [x @ w.t(), y @ teacher.t()]
        logits[of_head] = logits[of_head] + u @ v.t()
        results = _kl(*logits, 2.0)
        return results if reduction == "none" else results.mean()

    check(ours, plain, (x, y, w, teacher, u, v))


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_weight_costs_no_product(reduction: str) -> None:
    """For each chunk: the added product, and the gradients of both rows and of the adapter."""
    head = _adapted()
    x, w, b, u, v = (t.detach() for t in head[:5])
    counts = {}
    for name, leaves in (("lora", (x, u, v)), ("all", (x, w, u, v)), ("adapter", (u, v))):
        for t in (x, w, u, v):
            t.requires_grad_(any(t is leaf for leaf in leaves))
        with Products() as products:
            loss = _loss(x, w, b, u, v, head.target, reduction=reduction)
            gradients = torch.autograd.grad(loss.sum(), leaves)
        # Of results of each row the backward computes the logits again, and adds again.
        again = len(products.rows) if reduction == "none" else 0
        chunks = len(products.rows) // (2 if again else 1)
        counts[name] = (products.gradients - chunks - again // 2) / chunks
        exact = _eager(x, w, b, u, v, head.target, reduction=reduction)
        torch.testing.assert_close(gradients, torch.autograd.grad(exact.sum(), leaves))
        assert chunks == 2
    assert counts == {"lora": 3, "all": 4, "adapter": 2}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives(reduction: str) -> None:
    *leaves, target = _adapted(torch.float64)
    seconds = []
    for function in (_loss, _eager):
        loss = function(*leaves, target, reduction=reduction).sum()
        grads = torch.autograd.grad(loss * loss, leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    torch.testing.assert_close(*seconds)


def test_one_row_without_a_batch_dimension() -> None:
    x, w, b, u, v, target = _adapted()
    loss = fusedops.linear_cross_entropy(
        x[0], w, target[0], linear_bias=b, lora=(u[0], v), reduction="none"
    )
    expected = _eager(x, w, b, u, v, target, reduction="none")[0]
    torch.testing.assert_close(loss, expected)


def test_ignored_rows_may_have_any_values() -> None:
    x, w, b, u, v, target = _adapted()
    with torch.no_grad():
        u[target == IGNORED] = torch.nan
    loss = _loss(x, w, b, u, v, target)
    for t in (loss, *torch.autograd.grad(loss, (x, w, u, v))):
        assert torch.isfinite(t).all()


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_registered_operator_is_consistent(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, u, v, target = _adapted()
    texts: list[str] = []
    read = registration._read
    monkeypatch.setattr(registration, "_read", lambda text: texts.append(text) or read(text))
    _loss(x, w, b, u, v, target, reduction=reduction)
    arguments = [x, u], [w, v], [b], [target], texts[-1]
    torch.library.opcheck(torch.ops.fusedops.linear_rowwise.default, arguments)


# --- wrong arguments ------------------------------------------------------------------------------

X, W, B, U, V, T = (t.detach() for t in _adapted())


def _of(lora: Any, **options: Any) -> Callable[[], Any]:
    return lambda: fusedops.linear_cross_entropy(X, W, T, lora=lora, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (_of(U), TypeError, "lora is a Tensor, expected a tuple of two tensors"),
        (_of((U, V, V)), TypeError, r"lora is \(Tensor, Tensor, Tensor\), expected a tuple"),
        (_of((U, 3)), TypeError, r"lora is \(Tensor, int\), expected a tuple"),
        (_of((U[:3], V)), ValueError, r"rows of lora have shape \(3, 2\).*input, \(8,\)"),
        (_of((U, V.t())), ValueError, r"weight of lora has shape \(2, 11\), expected \(11, 2\)"),
        (_of((U, V.double())), TypeError, "float32 and its weight torch.float64, expected"),
        (_of((U.half(), V.half())), TypeError, "expected torch.float32 for both, or autocast"),
        (_of((U, V.long())), TypeError, "the weight of lora has dtype torch.int64"),
        (
            lambda: fusedops.linear_rowwise(_kl)((X, X), (W, W), 2.0, lora=[(U, V)]),
            ValueError,
            "lora has 1 elements, expected a pair or None for each of 2 heads",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
