"""Calls of losses of matrix products: wrong arguments, tracers, copies, and compiled code."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fusedops
from fusedops.core.launches import launch
from fusedops.losses import registration
from heads import budget, cross_entropy, new_head
from support import DEVICE, INTERPRETED

SCALE = 1.0


def _poly(logits: Tensor, target: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), -1).gather(-1, target[:, None]).squeeze(-1)
    return -log_p + 1 - log_p.exp()


poly = fusedops.linear_rowwise(_poly, reduction="mean")


@fusedops.linear_rowwise(reduction="mean")
def decorated(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1) * SCALE


def _loss(x: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> Tensor:
    return fusedops.linear_cross_entropy(x, w, target, linear_bias=b, **options)


# --- wrong arguments ------------------------------------------------------------------------------

HEAD = new_head()
X, W, B, T = (t.detach() for t in HEAD)
TOKENS = T.clamp(min=0)
linear_cross_entropy, linear_log_probs = fusedops.linear_cross_entropy, fusedops.linear_log_probs


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_cross_entropy(X, W, T.int()), TypeError, "int32, expected torch.int64"),
        (lambda: linear_cross_entropy(X, W, T[:3]), ValueError, r"shape \(3,\), expected \(8,\)"),
        (lambda: linear_cross_entropy(X, W[:, :3], T), ValueError, r"expected \(V, 5\)"),
        (lambda: linear_cross_entropy(X, W[0], T), ValueError, r"expected \(V, 5\)"),
        (lambda: linear_cross_entropy(X, W.double(), T), TypeError, "expected one dtype"),
        (lambda: linear_cross_entropy(X[0, 0], W, T[0]), ValueError, r"expected \(\*, D\)"),
        (lambda: linear_cross_entropy("x", W, T), TypeError, "input must be a torch.Tensor"),
        (lambda: linear_cross_entropy(X, W, 3), TypeError, "target must be a torch.Tensor"),
        (lambda: linear_cross_entropy(X.to_sparse(), W, T), TypeError, "layout"),
        (lambda: linear_cross_entropy(X, W, T, linear_bias=B[:3]), ValueError, "linear_bias"),
        (lambda: linear_cross_entropy(X, W, T, weight=B[:3]), ValueError, "weight has shape"),
        (lambda: linear_cross_entropy(X, W, T, reduction="avg"), ValueError, "'none'"),
        (lambda: linear_cross_entropy(X, W, T, ignore_index=1.5), TypeError, "expected int"),
        (lambda: linear_cross_entropy(X, W, T, label_smoothing=2), ValueError, r"\[0, 1\]"),
        (lambda: linear_cross_entropy(X, W, T, softcap=0), ValueError, "softcap must be positive"),
        (lambda: linear_cross_entropy(X, W, T, scale=torch.nan), ValueError, "finite"),
        (lambda: linear_cross_entropy(X, W, T, chunk_mib=0), ValueError, "must be positive"),
        (lambda: linear_log_probs(X, W, TOKENS, temperature=0), ValueError, "temperature"),
        (lambda: linear_log_probs(X, W, T), IndexError, "token -100 is out of bounds"),
        (lambda: poly(X, W), TypeError, "'target' is missing"),
        (lambda: poly(X, W, T, T), TypeError, "2 other arguments, expected logits, target"),
        (lambda: poly((X, X), (W,), T), ValueError, "2 inputs, 1 weights"),
        (lambda: fusedops.linear_rowwise(3), TypeError, "a function of Python"),
        (lambda: fusedops.linear_rowwise(_poly, reduction="x"), ValueError, "reduction"),
        (lambda: fusedops.linear_rowwise(_poly, shared=["x"]), ValueError, "no argument"),
        (lambda: fusedops.linear_rowwise(_poly, strict=1), TypeError, "expected bool"),
        (
            lambda: fusedops.linear_rowwise(lambda z: (z.sum(-1), z.amax(-1)))(X, W),
            TypeError,
            "more than one",
        ),
        (
            lambda: fusedops.linear_rowwise(_poly, valid=lambda t: t)(X, W, TOKENS),
            ValueError,
            "valid returns torch.int64",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: linear_cross_entropy(X, W, T + 111),
            IndexError,
            r"target \d+ of row 0 is out of bounds, expected 0 to 10 or ignore_index=-100",
        ),
        (lambda: linear_cross_entropy(X, W, T, chunk_mib=1e-9), ValueError, "too small: a row"),
        (lambda: fusedops.linear_rowwise(lambda z: z)(X, W), TypeError, "one number for each row"),
        (
            lambda: fusedops.linear_rowwise(lambda z: nn.functional.dropout(z).sum(-1))(X, W),
            TypeError,
            "no dropout",
        ),
        (
            lambda: fusedops.linear_rowwise(lambda z, t: z.sum(-1))(X, W, [1]),
            TypeError,
            "an argument is a list",
        ),
        (
            lambda: fusedops.linear_rowwise(lambda z: z.sort(-1)[0][:, 0], strict=True)(X, W),
            Exception,
            "sorts",
        ),
    ],
)
def test_wrong_arguments_of_kernels(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "call", [lambda x: linear_cross_entropy(x, W, T), lambda x: decorated(x, W)]
)
def test_jit_tracing_is_refused(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        torch.jit.trace(call, X)


def test_function_that_cannot_be_fused_warns() -> None:
    op = fusedops.linear_rowwise(lambda logits: logits.sort(-1)[0][:, 0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [op(X, W) for _ in range(2)]
    if INTERPRETED or DEVICE.type == "cuda":
        (one,) = caught
        assert "does not fuse" in str(one.message)
    for result in results:
        torch.testing.assert_close(result, (X @ W.t()).amin(-1).sum())


# --- the function's state -------------------------------------------------------------------------


def test_changed_global_is_seen(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda x, w: decorated(x, w), backend="aot_eager", fullgraph=True)
    plain = (X @ W.t()).logsumexp(-1).mean()
    for scale in (1.0, 2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        torch.testing.assert_close(decorated(X, W), plain * scale)
        torch.testing.assert_close(compiled(X, W), plain * scale)


def test_strings_and_defaults() -> None:
    def function(logits: Tensor, kind: str = "a|b") -> Tensor:
        return logits.logsumexp(-1) if kind == "a|b" else logits.amax(-1)

    op = fusedops.linear_rowwise(function)
    logits = X @ W.t()
    torch.testing.assert_close(op(X, W), logits.logsumexp(-1).sum())
    torch.testing.assert_close(op(X, W, "1|n c%"), logits.amax(-1).sum())


def test_shared_tensor_of_as_many_elements_as_rows() -> None:
    def function(logits: Tensor, factors: Tensor) -> Tensor:
        return (logits * factors).logsumexp(-1)

    x, w, _, _ = new_head(11)
    factors = torch.randn(11, device=DEVICE)
    op = fusedops.linear_rowwise(function, shared=("factors",), chunk_mib=budget(3))
    torch.testing.assert_close(op(x, w, factors), function(x @ w.t(), factors).sum())


def test_copies() -> None:
    """A decorated function is pickled by its name. Another one works under a key of its own."""
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(poly) is poly
    other = pickle.loads(pickle.dumps(poly))
    assert other is not poly and other.key != poly.key
    torch.testing.assert_close(other(X, W, TOKENS), poly(X, W, TOKENS))
    module = fusedops.nn.FusedLinearCrossEntropy(5, 11, bias=True, device=DEVICE)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(again(X, T), module(X, T))


def test_module_has_the_parameters_of_pytorchs() -> None:
    module = fusedops.nn.FusedLinearCrossEntropy(
        5, 11, bias=True, weight=torch.rand(11), label_smoothing=0.1, reduction="sum"
    ).to(DEVICE)
    assert set(module.state_dict()) == {"weight", "linear.weight", "linear.bias"}
    expected = cross_entropy(
        X,
        module.linear.weight,
        module.linear.bias,
        T,
        weight=module.weight,
        label_smoothing=0.1,
        reduction="sum",
    )
    torch.testing.assert_close(module(X, T), expected)
    torch.testing.assert_close(_loss(X, W, B, T, ignore_index=None), _loss(X, W, B, T))
    if hasattr(nn, "LinearCrossEntropyLoss"):
        theirs = nn.LinearCrossEntropyLoss(5, 11, bias=True, weight=torch.rand(11))
        assert theirs.state_dict().keys() == module.state_dict().keys()


# --- tracers --------------------------------------------------------------------------------------


def test_tensors_without_memory() -> None:
    """Meta and fake tensors: only shapes and dtypes, also of gradients."""
    head = new_head()
    fake = FakeTensorMode()
    for mode, convert in (
        (contextlib.nullcontext(), lambda t: t.detach().to("meta").requires_grad_(t.requires_grad)),
        (fake, fake.from_tensor),
    ):
        x, w, b, t = map(convert, head)
        for reduction in ("mean", "none"):
            with mode:
                loss = _loss(x, w, b, t, reduction=reduction)
                grads = torch.autograd.grad(loss.sum(), (x, w, b))
            assert loss.shape == (() if reduction == "mean" else (8,))
            assert [g.shape for g in grads] == [(8, 5), (11, 5), (11,)]
        with mode:
            log_p, entropy = fusedops.linear_log_probs(x, w, t, entropy=True)
        assert log_p.shape == entropy.shape == (8,)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_number_of_rows(strict: bool) -> None:
    """The program has PyTorch's operators, which any process can load."""

    class Losses(nn.Module):
        def forward(self, x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return fusedops.linear_cross_entropy(x, w, t), fusedops.linear_log_probs(x, w, t)

    rows = torch.export.Dim("rows")
    program = torch.export.export(
        Losses(), (X, W, TOKENS), dynamic_shapes=({0: rows}, None, {0: rows}), strict=strict
    )
    assert not any("fusedops" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(
        program.module()(X[:5], W, TOKENS[:5]), Losses()(X[:5], W, TOKENS[:5])
    )


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_registered_operator_is_consistent(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.library.opcheck`: schema, autograd, and fake outputs, also with symbolic sizes."""
    x, w, b, t = new_head()
    texts: list[str] = []
    read = registration._read
    monkeypatch.setattr(registration, "_read", lambda text: texts.append(text) or read(text))
    _loss(x, w, b, t, reduction=reduction)
    arguments = [x], [w], [b], [t], texts[-1]
    torch.library.opcheck(torch.ops.fusedops.linear_rowwise.default, arguments)


# --- compiled code --------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_with_any_number_of_rows(backend: str, fresh_dynamo: None) -> None:
    """One graph, one operator; ignored rows do not change the sizes of what is saved."""

    def function(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        options = {"chunk_mib": budget(3)}
        return _loss(x * 2, w, b, t, **options), _loss(x * 2, w, b, t, reduction="none", **options)

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for rows, stance in ((6, "default"), (8, "fail_on_recompile")):
        head = new_head(rows)
        with torch.compiler.set_stance(stance), launch.record() as kernels:
            losses = compiled(*head)
        assert "forward_kernel" in kernels and "backward_kernel" in kernels
        eager = [
            cross_entropy(head.x * 2, *head[1:], reduction=reduction)
            for reduction in ("mean", "none")
        ]
        cotangents = [torch.randn_like(loss) for loss in eager]
        torch.testing.assert_close(list(losses), eager)
        torch.testing.assert_close(
            torch.autograd.grad(losses, head[:3], cotangents),
            torch.autograd.grad(eager, head[:3], cotangents),
        )


def test_compiled_transform(fresh_dynamo: None) -> None:
    x, w, b, t = (tensor.detach() for tensor in new_head())
    gradient = torch.func.grad(lambda x: _loss(x, w, b, t))
    compiled = torch.compile(lambda x: gradient(x), backend="aot_eager")
    torch.testing.assert_close(compiled(x), gradient(x))


@pytest.mark.kernels
def test_compiled_function_that_cannot_be_fused(
    monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    """Its operators are in the graph, which is compiled again if a variable of it changes."""
    op = fusedops.linear_rowwise(lambda logits: SCALE * logits.sort(-1)[0][:, 0])
    compiled = torch.compile(lambda x, w: op(x, w), backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="does not fuse"):
        compiled(X, W)
    for scale in (1.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        torch.testing.assert_close(compiled(X, W), scale * (X @ W.t()).amin(-1).sum())


@pytest.mark.kernels
def test_graphs_name_the_version_and_the_program(fresh_dynamo: None) -> None:
    """PyTorch caches graphs on disk: another function of the same name must not have its graph."""
    texts = []
    for sign in (1, -1):
        if sign > 0:
            op = fusedops.linear_rowwise(lambda logits: logits.logsumexp(-1))
        else:
            op = fusedops.linear_rowwise(lambda logits: -logits.amax(-1))
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(torch.fx.experimental.proxy_tensor.make_fx(graph)(*inputs))
            return graph

        torch.compile(lambda x, w, op=op: op(x, w), backend=backend)(X, W)
        (node,) = [n for n in graphs[0].graph.nodes if "linear_rowwise" in str(n.target)]
        texts.append(node.args[-1].split("|")[0])
    assert texts[0] != texts[1] and all(t.startswith(fusedops.__version__) for t in texts)
