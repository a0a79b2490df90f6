"""Values and gradients of losses of matrix products, and how many products and launches they take.

Chunks have three rows here, so that eight rows are several chunks, and the last one is smaller.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.compiler.function import Rowwise
from fusedops.core.launches import launch
from fusedops.losses import scaling
from heads import IGNORED, Products, budget, check, cross_entropy, new_head
from support import DEVICE, DTYPES

REDUCTIONS = ("mean", "sum", "none")
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def _called(x: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> Tensor:
    chunk_mib = budget(3, w.shape[0], x.dtype)
    return fusedops.linear_cross_entropy(
        x, w, target, linear_bias=b, chunk_mib=chunk_mib, **options
    )


# --- cross-entropy --------------------------------------------------------------------------------


@by_reduction
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_is_pytorchs(dtype: torch.dtype, reduction: str) -> None:
    x, weight, bias, target = new_head(dtype=dtype)
    check(
        lambda x, w, b: _called(x, w, b, target, reduction=reduction),
        lambda x, w, b: cross_entropy(x, w, b, target, reduction=reduction),
        (x, weight, bias),
    )


@by_reduction
@pytest.mark.parametrize("rows", [8, 11])  # 11 is the number of classes, too
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_weights_of_classes_are_pytorchs(rows: int, label_smoothing: float, reduction: str) -> None:
    x, weight, bias, target = new_head(rows)
    options = {
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "weight": torch.rand(11, device=DEVICE),
    }
    check(
        lambda x, w, b: _called(x, w, b, target, **options),
        lambda x, w, b: cross_entropy(
            x, w, b, target, **{**options, "weight": options["weight"].to(x.dtype)}
        ),
        (x, weight, bias),
    )


def test_scale_softcap_and_z_loss() -> None:
    x, weight, bias, target = new_head()

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        scores = 2 * torch.tanh(F.linear(x, w, b) * 0.5 / 2)
        z = scores.logsumexp(-1).square()[target != IGNORED]
        return F.cross_entropy(scores, target, label_smoothing=0.2) + 0.1 * z.mean()

    options = {"softcap": 2.0, "scale": 0.5, "z_loss": 0.1, "label_smoothing": 0.2}
    check(lambda x, w, b: _called(x, w, b, target, **options), plain, (x, weight, bias))


@by_reduction
@pytest.mark.parametrize(("rows", "cols", "classes"), [(3, 1, 7), (3, 4, 1), (1, 4, 9), (0, 4, 9)])
def test_sizes_of_one_and_zero(rows: int, cols: int, classes: int, reduction: str) -> None:
    if not rows and reduction == "mean":
        pytest.skip("NaN: see the next test")
    x, weight, bias, _ = new_head(rows, cols=cols, classes=classes)
    target = torch.randint(classes, (rows,), device=DEVICE)
    check(
        lambda x, w, b: _called(x, w, b, target, reduction=reduction),
        lambda x, w, b: cross_entropy(x, w, b, target, reduction=reduction),
        (x, weight, bias),
    )


@by_reduction
@pytest.mark.parametrize("rows", [0, 4])
def test_no_row_counts(rows: int, reduction: str) -> None:
    """The mean is NaN, as in PyTorch, and gradients are zeros."""
    x, weight, bias, target = new_head(rows)
    target[:] = IGNORED
    loss = _called(x, weight, bias, target, reduction=reduction)
    expected = cross_entropy(x, weight, bias, target, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    for gradient in torch.autograd.grad(loss.sum(), (x, weight, bias)):
        assert not gradient.any()


def test_one_row_without_a_batch_dimension() -> None:
    x, weight, bias, target = new_head()
    for reduction in REDUCTIONS:
        loss = _called(x[0], weight, bias, target[0], reduction=reduction)
        expected = cross_entropy(x[0], weight, bias, target[0], reduction=reduction)
        torch.testing.assert_close(loss, expected)


def test_layouts() -> None:
    """Transposed and expanded tensors, and several dimensions of rows."""
    x = torch.randn(5, 6, device=DEVICE).t().reshape(6, 5).requires_grad_()
    weight = torch.randn(5, 11, device=DEVICE).t().requires_grad_()
    row = torch.randn(1, 5, device=DEVICE).requires_grad_()
    bias = torch.randn(22, device=DEVICE)[::2].requires_grad_()
    target = torch.randint(11, (2, 3), device=DEVICE)
    target[0, 1] = IGNORED

    def ours(x: Tensor, w: Tensor, row: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        first = _called(x.view(2, 3, 5), w, bias, target, reduction="none")
        return first, _called(row.expand(2, 3, 5), w, bias, target)

    def plain(x: Tensor, w: Tensor, row: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        t = target.flatten()
        first = cross_entropy(x, w, bias, t, reduction="none").view(2, 3)
        return first, cross_entropy(row.expand(6, 5), w, bias, t)

    check(ours, plain, (x, weight, row, bias))


def test_rows_that_are_ignored_may_have_any_values() -> None:
    x, weight, bias, target = new_head()
    with torch.no_grad():
        x[target == IGNORED] = torch.nan
    loss = _called(x, weight, bias, target)
    for t in (loss, *torch.autograd.grad(loss, (x, weight, bias))):
        assert torch.isfinite(t).all()


@by_reduction
def test_function_that_raises_for_rows_that_do_not_count(reduction: str) -> None:
    x, weight, bias, target = new_head()

    def function(logits: Tensor, target: Tensor) -> Tensor:
        return -torch.log_softmax(logits, -1).gather(-1, target[:, None]).squeeze(-1)

    op = fusedops.linear_rowwise(
        function, reduction=reduction, valid=lambda target: target != IGNORED, chunk_mib=budget(3)
    )
    check(
        lambda x, w, b: op(x, w, target, linear_bias=b),
        lambda x, w, b: cross_entropy(x, w, b, target, reduction=reduction),
        (x, weight, bias),
    )


# --- other losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs(entropy: bool) -> None:
    x, weight, bias, _ = new_head()
    tokens = torch.randint(11, (8,), device=DEVICE)

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Any:
        log_p = torch.log_softmax(F.linear(x, w, b) / 0.7, -1)
        of_tokens = log_p.gather(-1, tokens[:, None]).squeeze(-1)
        return (of_tokens, -(log_p.exp() * log_p).sum(-1)) if entropy else of_tokens

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return fusedops.linear_log_probs(
            x, w, tokens, linear_bias=b, temperature=0.7, entropy=entropy, chunk_mib=budget(3)
        )

    # The entropy is a difference of terms as large as logits.
    check(ours, plain, (x, weight, bias), cancelled=8)
    if entropy:  # one of the results is not used
        check(lambda *t: ours(*t)[1], lambda *t: plain(*t)[1], (x, weight, bias), cancelled=8)


def test_entropy_of_tokens_that_are_masked() -> None:
    """Logits of minus infinity, as of tokens that a grammar forbids."""
    x, weight, bias, _ = new_head(dtype=torch.float64)
    tokens = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        bias[3:5] = -torch.inf
    log_p, entropy = fusedops.linear_log_probs(x, weight, tokens, linear_bias=bias, entropy=True)
    allowed = [*range(3), *range(5, 11)]
    logits = F.linear(x, weight[allowed], bias[allowed])
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_p, expected.log_prob(tokens))
    torch.testing.assert_close(entropy, expected.entropy())
    torch.testing.assert_close(
        torch.autograd.grad((log_p * entropy).sum(), (x, weight, bias)),
        torch.autograd.grad(
            (expected.log_prob(tokens) * expected.entropy()).sum(), (x, weight, bias)
        ),
    )


def _weighted(logits: Tensor, advantage: Tensor, scale: Tensor, one: Tensor, teacher: Tensor):
    return advantage * (logits * scale * one + teacher).logsumexp(-1)


@by_reduction
@pytest.mark.parametrize("masked", [False, True])
def test_other_arguments_have_gradients(reduction: str, masked: bool) -> None:
    """Numbers and rows of each row, vectors and numbers of all. None of them is written to."""
    x, weight, _, _ = new_head()
    shapes = (8,), (11,), (), (8, 11)
    others = [torch.randn(s, device=DEVICE).requires_grad_() for s in shapes]
    counts = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], device=DEVICE).bool()
    op = fusedops.linear_rowwise(
        _weighted,
        reduction=reduction,
        valid=(lambda *others: counts) if masked else None,
        chunk_mib=budget(3),
        strict=True,
    )

    def plain(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        results = _weighted(x @ w.t(), *others)
        results = torch.where(counts, results, 0) if masked else results
        if reduction == "none":
            return results
        rows = int(counts.sum()) if masked else 8
        return results.sum() / (rows if reduction == "mean" else 1)

    before = [t.detach().clone() for t in others]
    check(op, plain, (x, weight, *others))
    assert all(torch.equal(*pair) for pair in zip(others, before, strict=True))


def _kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    log_p = torch.log_softmax(student / temperature, -1)
    log_q = torch.log_softmax(teacher / temperature, -1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _jsd(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    p, q = (torch.softmax(t / temperature, -1) for t in (student, teacher))
    middle = (p + q) / 2
    return ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2


@pytest.mark.parametrize("function", [_kl, _jsd])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_heads(function: Any, reduction: str) -> None:
    x, weight, _, _ = new_head()
    y, teacher, bias, _ = new_head(cols=3)
    op = fusedops.linear_rowwise(
        function, reduction=reduction, chunk_mib=budget(3, 22), strict=True
    )

    def plain(x: Tensor, y: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        results = function(x @ w.t(), F.linear(y, v, b), 2.0)
        return results if reduction == "none" else results.mean()

    check(
        lambda x, y, w, v, b: op((x, y), (w, v), 2.0, linear_bias=(None, b)),
        plain,
        (x, y, weight, teacher, bias),
    )


def _picked_float(logits: Tensor, token: Tensor) -> Tensor:
    return logits.gather(-1, token[:, None]).squeeze(-1) * logits.logsumexp(-1)


def _picked_integer(logits: Tensor, token: Tensor) -> Tensor:
    is_positive = (logits > 0).long().gather(-1, token[:, None]).squeeze(-1) > 0
    return torch.where(is_positive, logits.logsumexp(-1), logits.square().mean(-1))


@pytest.mark.kernels
@pytest.mark.parametrize("function", [_picked_float, _picked_integer])
def test_elements_that_the_gradient_reads_are_not_overwritten_first(function: Any) -> None:
    """Its kernel writes over the logits. Rows of so many columns are several tiles, or programs."""
    x, weight, _, _ = new_head(4, classes=3000)
    token = (x @ weight.t()).argmax(-1)
    token[::2] = 0
    op = fusedops.linear_rowwise(function, strict=True)
    # Sums have 3,000 terms in place of 16, and random errors: sqrt(3000 / 16) = 14.
    check(op, lambda x, w, t: function(x @ w.t(), t).sum(), (x, weight), token, cancelled=14.0)


def test_results_without_gradients() -> None:
    """Truth values, and maxima in 16 bits, beside a loss."""

    def function(logits: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p = torch.log_softmax(logits.float(), -1).gather(-1, token[:, None]).squeeze(-1)
        return log_p, log_p > -1, logits.amax(-1)

    x, weight, _, _ = new_head(dtype=torch.bfloat16)
    token = torch.randint(11, (8,), device=DEVICE)
    op = fusedops.linear_rowwise(function, reduction="none", strict=True, chunk_mib=budget(3))
    log_p, is_likely, largest = op(x, weight, token)
    assert torch.equal(is_likely, log_p > -1) and not is_likely.requires_grad
    assert largest.dtype == torch.bfloat16
    check(lambda *t: op(*t)[::2], lambda x, w, t: function(x @ w.t(), t)[::2], (x, weight), token)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [2, 7, 8, 20])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradient_of_the_weight_over_many_chunks(chunks: int, reduction: str) -> None:
    """Its error in bf16 is at most twice eager's, also if all rows add to it alike."""
    x, weight, bias, target = new_head(chunks, dtype=torch.bfloat16)
    x = (x.detach().abs() + 1).requires_grad_()
    target = torch.zeros_like(target)
    ours = fusedops.linear_cross_entropy(
        x,
        weight,
        target,
        linear_bias=bias,
        reduction=reduction,
        chunk_mib=budget(1, 11, torch.bfloat16),
    )
    eager = cross_entropy(x, weight, bias, target, reduction=reduction)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    of_exact = cross_entropy(*exact, target, reduction=reduction)
    for name, leaf, want in zip("wb", (weight, bias), exact[1:], strict=True):
        (g,) = torch.autograd.grad(of_exact.sum(), want, retain_graph=True)
        errors = [
            torch.linalg.norm(
                torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0].double() - g
            )
            for loss in (ours, eager)
        ]
        assert errors[0] <= 2 * errors[1] + 2.0**-9 * torch.linalg.norm(g), (name, errors)


def test_fp16_gradients_do_not_underflow() -> None:
    """A mean over many rows of likely targets is divided after the products, by a scaled factor."""
    rows, scale = 3000, 1024.0
    x = torch.full((rows, 1), 2.0**-4, device=DEVICE, dtype=torch.float16)
    weight = torch.tensor([[1.0], [-1.0]], device=DEVICE, dtype=torch.float16)
    bias = torch.tensor([4.0, -4.0], device=DEVICE, dtype=torch.float16)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    target = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    loss = fusedops.linear_cross_entropy(x, weight, target, linear_bias=bias)
    ours = torch.autograd.grad(loss * scale, leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(cross_entropy(*exact, target) * scale, exact)
    # Logits of 4.06 are rounded by up to 2e-3, which is the relative error of exp(-8.12).
    for gradient, expected in zip(ours, want, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=6e-3, atol=0)


def test_fp16_sums_over_rows_do_not_overflow() -> None:
    """The sum over rows of one chunk after another exceeds fp16, their mean does not."""
    x, weight, bias, _ = new_head(8, dtype=torch.float16, classes=2)
    with torch.no_grad():
        x.fill_(30000.0)
        weight.zero_()
    target = torch.ones(8, dtype=torch.int64, device=DEVICE)
    loss = fusedops.linear_cross_entropy(
        x, weight, target, linear_bias=bias, chunk_mib=budget(3, 2, torch.float16)
    )
    for gradient in torch.autograd.grad(loss, (x, weight, bias)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_of_fp32_parameters(dtype: torch.dtype, reduction: str) -> None:
    x, weight, bias, target = new_head()

    def cast(function: Any) -> Any:
        def call(*t: Tensor) -> Tensor:
            enabled = t[0].dtype == torch.float32
            with torch.autocast(DEVICE.type, dtype, enabled=enabled):
                return function(*t, target, reduction=reduction)

        return call

    check(cast(_called), cast(cross_entropy), (x, weight, bias))
    with torch.autocast(DEVICE.type, dtype):
        assert _called(x, weight, bias, target).dtype == torch.float32


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_gradients_are_scaled_in_place(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Of more elements than all programs take at once; the factor may be wider than a gradient."""
    gradient = torch.randn(70_001, device=DEVICE).to(dtypes[0])
    factor = torch.tensor(-1.7, device=DEVICE, dtype=dtypes[1])
    expected = (gradient.double() * factor.double()).to(dtypes[0])
    scaling.scale(gradient, factor)
    torch.testing.assert_close(gradient, expected, rtol=torch.finfo(dtypes[0]).eps, atol=0)


# --- products and launches ------------------------------------------------------------------------


@pytest.mark.kernels
def test_products_and_launches() -> None:
    """Ignored rows have no products. A sum needs three for each chunk; results of rows, four."""
    x, weight, bias, target = new_head(10)
    counted = int((target != IGNORED).sum())
    assert counted == 7  # chunks of three, two and two rows, or of three, three and one
    for reduction in REDUCTIONS:
        with Products() as forward, launch.record() as kernels:
            loss = _called(x, weight, bias, target, reduction=reduction)
        each = reduction == "none"
        assert sum(forward.rows) == counted and len(forward.rows) == 3
        assert forward.gradients == (0 if each else 6)
        assert (
            kernels == (["forward_kernel"] if each else ["forward_kernel", "backward_kernel"]) * 3
        )
        with Products() as backward, launch.record() as kernels:
            torch.autograd.grad(loss.sum(), (x, weight, bias))
        assert backward.rows == (forward.rows if each else [])
        assert backward.gradients == (6 if each else 0)
        assert kernels == (["backward_kernel"] if each else ["scale_kernel"]) * 3


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_of_one_size_share_a_look_up(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, target = new_head()
    target = target.clamp(min=0)
    looked_up = Rowwise.program_of
    counts = []
    for rows in (1, 2, 8):
        calls = mock.Mock(side_effect=looked_up)
        monkeypatch.setattr(Rowwise, "program_of", lambda *args, calls=calls: calls(*args))
        options = {"linear_bias": bias, "reduction": reduction, "chunk_mib": budget(rows)}
        fusedops.linear_cross_entropy(x, weight, target, **options).sum().backward()
        counts.append(calls.call_count)
    assert len(set(counts)) == 1


@pytest.mark.kernels
def test_only_wanted_products() -> None:
    x, weight, bias, target = new_head(3)
    for wanted in ([x], [weight], [bias], [x, weight]):
        leaves = [t.detach().requires_grad_(any(t is w for w in wanted)) for t in (x, weight, bias)]
        with Products() as products:
            loss = _called(*leaves, target)
        assert products.gradients == sum(t is not bias for t in wanted)
        reference = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
        cross_entropy(*reference, target).backward()
        loss.backward()
        for ours, expected in zip(leaves, reference, strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)
    with torch.no_grad(), Products() as products, launch.record() as kernels:
        _called(x, weight, bias, target)
    assert not products.gradients and kernels == ["forward_kernel"]
