"""Cross-entropies of large logits become one operator, and others are left with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import fusedops
from fusedops.backend import encoding, entry
from fusedops.backend.passes import loss_heads
from fusedops.backend.report import CompileReport
from fusedops.losses.registration import OPERATOR
from support import DEVICE
from tolerances import unit_roundoff

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo", "every_size")]
ROWS, D, V = (2, 9), 16, 40
FUSED = "fusedops.linear_rowwise.default"


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let logits of any size be fused."""
    monkeypatch.setattr(loss_heads, "_LEAST_BYTES", 0)


def _compiled(
    function: Callable[..., Any], **options: Any
) -> tuple[Callable[..., Any], Counter[str], CompileReport]:
    """Compile a function; return it with the operators in its graphs, and the report.

    "needs" and digits count losses by which of their arguments have gradients.
    """
    counts, report = Counter[str](), CompileReport()

    def run(gm: fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=OPERATOR):
            counts["needs " + str(node.args[4]).split("|")[2]] += 1
        counts.update(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm.forward)

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        graph = entry._with_operators(gm, inputs, report)
        assert not report.left
        # As later processes read it.
        if options.get("dynamic") is False:
            graph = encoding.decoded(encoding.encoded(gm, graph), gm)
        with entry._autocast_of(report):
            return aot_autograd(fw_compiler=run, bw_compiler=run)(graph, inputs)

    return torch.compile(function, backend=compiler, fullgraph=True, **options), counts, report


def _tensors(
    dtype: torch.dtype = torch.float32, rows: tuple[int, int] = ROWS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias and targets, of which some are ignored."""
    x = torch.randn(*rows, D, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(V, D, device=DEVICE).to(dtype).requires_grad_()
    bias = torch.randn(V, device=DEVICE).to(dtype).requires_grad_()
    labels = torch.randint(0, V, rows, device=DEVICE)
    labels[:, :2] = -100
    return x, weight, bias, labels


def _transformers(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """ForCausalLMLoss, with the number of items in the batch."""
    logits = F.linear(x, weight).float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, V), shifted.view(-1), reduction="sum")
    return loss / 7 + bias.sum() * 0


def _shifted_logits(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """The loss of models before Transformers 4.46: logits are sliced, and copied."""
    logits = F.linear(x, weight, bias)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels[..., 1:].reshape(-1))


def _as_autocast(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy as CUDA's autocast computes it: the log-softmax is cast, not the logits."""
    logits = F.linear(x, weight, bias).view(-1, V)
    return F.nll_loss(F.log_softmax(logits, -1).float(), labels.flatten())


def _capped(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    logits = torch.tanh(F.linear(x, weight, bias) * 0.5 / 3.0) * 3.0
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def _scaled(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    logits = (x.flatten(0, 1) @ weight.t() / 8) * 3
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    return (losses * torch.arange(losses.numel(), device=DEVICE)).sum() / 100 + bias.sum() * 0


def _weights() -> Tensor:
    """Return a weight of each class."""
    return torch.linspace(0.1, 2.0, V, device=DEVICE)


def _loss_of(tensors: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Return the cross-entropy of hidden states, weight, bias and labels."""
    *linear, labels = tensors
    logits = F.linear(*linear).flatten(0, 1)
    loss: Tensor = F.cross_entropy(logits, labels.flatten(), **options)
    return loss


def _weighted(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return _loss_of((x, weight, bias, labels), weight=_weights().to(x.dtype))


def _smoothed(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return _loss_of((x, weight, bias, labels), label_smoothing=0.3)


def _smoothed_as_autocast(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Label smoothing as CUDA's autocast computes it: with sums in fp32, of a cast log-softmax."""
    logits, targets = F.linear(x, weight, bias).view(-1, V), labels.flatten()
    log_p, ignored = F.log_softmax(logits, -1), targets == -100
    of_rows = (-log_p.sum(1, dtype=torch.float32)).masked_fill(ignored, 0.0)
    uniform = of_rows.sum(dtype=torch.float32) / (~ignored).sum()
    return F.nll_loss(log_p.float(), targets) * 0.7 + uniform * (0.3 / V)


def _smoothed_sum(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return _loss_of((x, weight, bias, labels), label_smoothing=0.3, reduction="sum") / 7


def _smoothed_and_weighted(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    weights = _weights().to(x.dtype)
    return _loss_of((x, weight, bias, labels), label_smoothing=0.3, weight=weights)


def _each_smoothed_and_weighted(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    options = {"label_smoothing": 0.3, "weight": _weights().to(x.dtype), "reduction": "none"}
    losses = _loss_of((x, weight, bias, labels), **options)
    return (losses * torch.arange(losses.numel(), device=DEVICE)).sum() / 100


FORMS = (
    _transformers,
    _shifted_logits,
    _as_autocast,
    _capped,
    _scaled,
    _weighted,
    _smoothed,
    _smoothed_as_autocast,
    _smoothed_sum,
    _smoothed_and_weighted,
    _each_smoothed_and_weighted,
)


def _results(function: Callable[..., Tensor], tensors: Any) -> list[Tensor]:
    *leaves, _ = tensors
    loss = function(*tensors)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _assert_close(results: list[Tensor], tensors: Any, function: Any, dtype: torch.dtype) -> None:
    """Assert that a loss and gradients are those of fp64, up to roundings of logits."""
    *leaves, labels = tensors
    exact = _results(function, (*[t.detach().double().requires_grad_() for t in leaves], labels))
    # Logits have magnitudes up to 20. A rounding of logits moves each probability by 20 u of it,
    # and rounding a gradient by u; gradients are sums of at most V or 18 rows of magnitude 4.
    for result, expected in zip(results, exact, strict=True):
        scale = max(1.0, float(expected.abs().max()))
        tolerance = 40 * unit_roundoff(dtype) * scale
        torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.pairs("form")
def test_a_cross_entropy_of_logits_is_one_operator(form: Any, dtype: torch.dtype) -> None:
    tensors = _tensors(dtype)
    compiled, counts, report = _compiled(form, dynamic=False)
    results = _results(compiled, tensors)
    assert counts[FUSED] == 1
    assert not any("nll_loss" in name or "log_softmax" in name for name in counts)
    assert report.changes["a loss whose logits are never whole in memory"] == 1
    _assert_close(results, tensors, form, dtype)
    assert results[0].dtype == form(*tensors).dtype


@pytest.mark.parametrize("form", [_shifted_logits, _smoothed_and_weighted])
def test_under_autocast_gradients_have_the_dtype_of_parameters(form: Any) -> None:
    tensors = _tensors()
    compiled, counts, _ = _compiled(form, dynamic=False)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        results = _results(compiled, tensors)
    assert counts[FUSED] == 1
    # The operator casts the weight: no cast of it, nor of its gradient, is left.
    assert counts["aten._to_copy.default"] + counts["prims.convert_element_type.default"] <= 2
    assert {result.dtype for result in results} == {torch.float32}
    _assert_close(results, tensors, form, torch.bfloat16)


def test_rows_of_any_number_are_one_graph() -> None:
    compiled, counts, report = _compiled(_transformers)
    for rows in ((2, 9), (3, 5), (4, 7)):
        tensors = _tensors(rows=rows)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(tensors[0], dim)
            torch._dynamo.mark_dynamic(tensors[3], dim)
        _assert_close(_results(compiled, tensors), tensors, _transformers, torch.float32)
    assert report.graphs == 1
    assert counts[FUSED] == 1


def test_sizes_of_a_head_that_are_symbols_leave_it() -> None:
    compiled, counts, _ = _compiled(_shifted_logits, dynamic=True)
    tensors = _tensors()
    _assert_close(_results(compiled, tensors), tensors, _shifted_logits, torch.float32)
    assert not counts[FUSED]


def test_slices_of_columns_are_not_slices_of_rows() -> None:
    """This one has all columns of the logits, and would have half of those of the rows."""

    def function(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, weight[: D // 2]).narrow(-1, 0, D // 2).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten() % (D // 2)) + bias.sum() * 0

    tensors = _tensors()
    compiled, _, _ = _compiled(function, dynamic=False)
    _assert_close(_results(compiled, tensors), tensors, function, torch.float32)


def test_weights_without_gradients_get_none() -> None:
    x, weight, bias, labels = _tensors()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    compiled, counts, _ = _compiled(_shifted_logits, dynamic=False)
    (gradient,) = torch.autograd.grad(compiled(x, weight, bias, labels), [x])
    (expected,) = torch.autograd.grad(_shifted_logits(x, weight, bias, labels), [x])
    torch.testing.assert_close(gradient, expected)
    assert counts["needs 1" + "0" * 10] == 1


class _Head(nn.Module):
    """A head and its loss, by a function of logits and labels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.head = nn.Linear(D, V, device=DEVICE)
        self.function = function

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.function(self.head(x).flatten(0, 1), labels.flatten())


def _returned(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits, labels), logits


def _accuracy(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits, labels), logits.argmax(-1)


def _rounded(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits.bfloat16(), labels)


def _smoothed_by(
    logits: Tensor, labels: Tensor, share: float, divisor: Any, rest: float = 0.9
) -> Any:
    """Return a loss that is the smoothed one of PyTorch if its numbers are PyTorch's."""
    log_p = torch.log_softmax(logits, -1)
    uniform = (-log_p.sum(1)).masked_fill(labels == -100, 0.0).sum() / divisor
    return F.nll_loss(log_p, labels) * rest + uniform * (share / V)


def _averaged_over_others(logits: Tensor, labels: Tensor) -> Any:
    return _smoothed_by(logits, labels, 0.1, (~((labels + 1) == -100)).sum())


def _smoothed_more(logits: Tensor, labels: Tensor) -> Any:
    return _smoothed_by(logits, labels, 0.2, (~(labels == -100)).sum())


def _sharpened(logits: Tensor, labels: Tensor) -> Any:
    """Negative label smoothing, which PyTorch's own argument refuses."""
    return _smoothed_by(logits, labels, -0.2, (~(labels == -100)).sum(), 1.2)


def _squared(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits * logits, labels)


def _capped_twice(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(torch.tanh(torch.tanh(logits)), labels)


def _of_columns(logits: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits[:, : V // 2], labels.clamp(max=V // 2 - 1))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_returned, "its logits are returned"),
        (_accuracy, "its logits are read by argmax"),
        (_rounded, ""),
        (_averaged_over_others, "its logits are read by sum"),
        (_smoothed_more, "its logits are read by sum"),
        (_sharpened, "its logits are read by sum"),
        (_squared, ""),
        (_capped_twice, ""),
        (_of_columns, ""),
    ],
)
@pytest.mark.pairs("function")
def test_a_loss_is_left_where_logits_are_needed_or_changed(function: Any, reason: str) -> None:
    x, *_, labels = _tensors()
    report = fusedops.explain(_Head(function), x, labels)
    assert "never whole" not in str(report)
    assert reason in str(report)
    if reason:
        (region,) = [region for region in report.regions if "nll_loss_forward" in region.operators]
        assert region.shape == (18, V)


def test_a_loss_without_a_gradient_or_of_small_logits_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, bias, labels = _tensors()

    def report() -> str:
        return str(fusedops.explain(_shifted_logits, x, weight, bias, labels))

    assert "never whole" in report()
    with torch.no_grad():
        assert "never whole" not in report()
    monkeypatch.setattr(loss_heads, "_LEAST_BYTES", 18 * V * 4)
    assert "never whole" not in report()


def test_logits_that_are_changed_before_the_loss_stay() -> None:
    def function(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x.flatten(0, 1) @ weight.t()
        with torch.no_grad():
            weight.zero_()
        return F.cross_entropy(logits, labels.flatten())

    x, weight, _, labels = _tensors()
    weight.requires_grad_(False)
    report = fusedops.explain(function, x, weight, labels)
    assert "tensors are changed" in str(report)


def test_a_model_may_call_the_operator_itself() -> None:
    def function(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return fusedops.linear_cross_entropy(x, weight, labels)

    x, weight, _, labels = _tensors()
    report = fusedops.explain(function, x, weight, labels)
    assert not report.left
    assert report.operators == {"linear_cross_entropy": 1}
