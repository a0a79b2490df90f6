"""`fusedops.compile` calls PyTorch's attention without superfluous masks and repeated heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fusedops.backend import attention, capture, entry
from fusedops.backend.report import CompileReport
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_LENGTH = 8


class _Call(NamedTuple):
    """The arguments of a captured call of attention."""

    has_mask: bool
    is_causal: bool
    key_heads: int


@pytest.fixture
def calls() -> Iterator[list[_Call]]:
    """Record each call of attention while a graph is captured."""
    recorded: list[_Call] = []
    computed, captured = F.scaled_dot_product_attention, capture.attention

    def recording(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Tensor:
        if get_proxy_mode() is not None:  # otherwise the call is tried, and not recorded
            recorded.append(_Call(mask is not None, bool(options.get("is_causal")), key.shape[1]))
        assert value.shape[1] == key.shape[1]
        return computed(query, key, value, mask, *arguments, **options)

    def patched(*args: Any, **kwargs: Any) -> Tensor:
        functional = SimpleNamespace(scaled_dot_product_attention=recording)
        with mock.patch.object(attention, "F", functional):
            return captured(*args, **kwargs)

    with mock.patch.object(capture, "attention", patched):
        yield recorded


def _backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    report = CompileReport()
    compiled = entry._with_operators(gm, inputs, report)
    assert not report.left, report.left
    return compiled.forward


def _heads(count: int, length: int = _LENGTH) -> Tensor:
    return torch.randn(2, count, length, 16, device=DEVICE, requires_grad=True)


def _positions() -> tuple[Tensor, Tensor]:
    """Return the positions of queries and of keys."""
    positions = torch.arange(_LENGTH, device=DEVICE)
    return positions[None, None, :, None], positions[None, None, None, :]


def _causal(rows: Tensor) -> Tensor:
    query, key = _positions()
    return (key <= query).expand(rows.shape[0], -1, -1, -1)


def _of_documents(rows: Tensor) -> Tensor:
    """Return a mask that is causal within documents, as in Transformers.

    Each sequence of the batch is one document, so the mask is causal.
    """
    query, key = _positions()
    positions = torch.arange(_LENGTH, device=DEVICE).expand(rows.shape[0], -1)
    # A document begins wherever positions do not increase by one.
    steps = torch.cat([positions[:, :1] - 1, positions], -1).diff(dim=-1)
    document = (steps != 1).cumsum(-1)
    batch = torch.arange(rows.shape[0], device=DEVICE)[:, None, None, None]
    return (document[batch, query] == document[batch, key]) & (key <= query)


def _of_numbers(rows: Tensor) -> Tensor:
    full = torch.full(
        (_LENGTH, _LENGTH), torch.finfo(rows.dtype).min, dtype=rows.dtype, device=DEVICE
    )
    return full.triu(1)[None, None]


def _all_true(rows: Tensor) -> Tensor:
    query, _ = _positions()
    return (query >= 0).expand(rows.shape[0], 1, _LENGTH, _LENGTH)


def _window(rows: Tensor) -> Tensor:
    query, key = _positions()
    return (key <= query) & (query - key < _LENGTH - 1)


def _without_diagonal(rows: Tensor) -> Tensor:
    query, key = _positions()
    return (key < query) | (key == 0)


def _padded(rows: Tensor) -> Tensor:
    return (rows[:, :1, None, :, 0] < 9) & _causal(rows)


def _changed(rows: Tensor) -> Tensor:
    """Return a mask that an input changes in place."""
    mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=DEVICE)
    mask[0].logical_and_(rows[0, 0, :, 0] < 0)
    mask[0, 0] = True
    return mask


def _finite_bias(rows: Tensor) -> Tensor:
    """Return a bias with the shape of a causal mask that masks nothing: it adds 0.5 there."""
    query, key = _positions()
    return 0.5 * (query < key).to(rows.dtype)


# Each mask, with whether the captured attention has a mask, and whether it is causal.
_CAUSAL, _UNMASKED, _MASKED = (False, True), (False, False), (True, False)
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[bool, bool]]] = {
    "causal": (_causal, _CAUSAL),
    "of documents": (_of_documents, _CAUSAL),
    "of numbers": (_of_numbers, _CAUSAL),
    "all true": (_all_true, _UNMASKED),
    "window": (_window, _MASKED),
    "without diagonal": (_without_diagonal, _MASKED),
    "padded": (_padded, _MASKED),
    "changed": (_changed, _MASKED),
    "finite bias": (_finite_bias, _MASKED),
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_constant_masks_are_replaced_and_others_stay(
    name: str, recomputed: bool, calls: list[_Call]
) -> None:
    """A mask that depends on no input is evaluated, also in a checkpointed part."""
    make_mask, expected = MASKS[name]

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = make_mask(query)
        if recomputed:
            query = checkpoint(attention, query, key, value, mask, use_reentrant=False)
            return checkpoint(attention, query, key, value, mask, use_reentrant=False)  # type: ignore[no-any-return]
        return attention(query, key, value, mask)

    _compare(function, [_heads(4), _heads(4), _heads(4)])
    assert calls == [_Call(*expected, key_heads=4)] * (1 + recomputed)


def _mask_first_key(mask: Tensor) -> Tensor:
    return mask[3:, 0].fill_(False).any()


class _MasksFirstKey(torch.autograd.Function):
    """Changes a mask in place. The backend does not trace it, because it detaches a tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mask: Tensor) -> Tensor:
        _mask_first_key(mask.detach_())
        return rows * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def _checkpointed_change(rows: Tensor, mask: Tensor) -> None:
    checkpoint(_mask_first_key, mask.view(-1).view(mask.shape), use_reentrant=False)


# PyTorch itself raises the warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda _, mask: mask[3:, 0].fill_(False),
        lambda _, mask: mask.view(-1)[24:].fill_(True),
        _MasksFirstKey.apply,
        _checkpointed_change,
    ],
)
def test_mask_that_is_changed_after_its_first_use_is_passed_to_the_second(
    change: Callable[[Tensor, Tensor], Any], calls: list[_Call]
) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=DEVICE).tril()
        rows = F.scaled_dot_product_attention(query, key, value, mask[None])
        change(rows, mask)
        return F.scaled_dot_product_attention(rows, key, value, mask)

    _compare(function, [_heads(4), _heads(4), _heads(4)])
    assert calls == [
        _Call(has_mask=False, is_causal=True, key_heads=4),
        _Call(has_mask=True, is_causal=False, key_heads=4),
    ]


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_mask_stays_if_the_scale_is_negative(scale: float, calls: list[_Call]) -> None:
    """PyTorch's kernels may mask before they scale: minus infinity would become infinity."""
    _compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, _causal(q), scale=scale),
        [_heads(4), _heads(4), _heads(4)],
    )
    assert calls == [_Call(has_mask=scale < 0, is_causal=scale > 0, key_heads=4)]


def test_mask_is_replaced_if_only_values_computed_from_its_positions_change(
    calls: list[_Call],
) -> None:
    """Rotary embeddings and masks are computed from the same positions, and experts write to rows."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        positions = torch.arange(_LENGTH, device=DEVICE)
        mask = positions[None, :] <= positions[:, None]
        rotated = query * torch.cos(positions)[:, None]
        rows = F.scaled_dot_product_attention(rotated, key, value, mask).clone()
        rows[:, :, 0] = 0.0
        return F.scaled_dot_product_attention(rows, key, value, mask)

    _compare(function, [_heads(4), _heads(4), _heads(4)])
    assert calls == [_Call(has_mask=False, is_causal=True, key_heads=4)] * 2


def test_mask_stays_if_there_are_fewer_queries_than_keys(calls: list[_Call]) -> None:
    """PyTorch's ``is_causal`` aligns the first query with the first key."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = torch.arange(5, device=DEVICE)[:, None]
        columns = torch.arange(_LENGTH, device=DEVICE)
        return F.scaled_dot_product_attention(query, key, value, columns <= rows)

    _compare(function, [_heads(4, length=5), _heads(4), _heads(4)])
    assert calls == [_Call(has_mask=True, is_causal=False, key_heads=4)]


def _expanded(heads: Tensor) -> Tensor:
    batch, count, *rows = heads.shape
    return heads[:, :, None].expand(batch, count, 2, *rows).reshape(batch, 2 * count, *rows)


def _tiled(heads: Tensor) -> Tensor:
    """Repeat the heads as a whole, so that copies of a head are not adjacent."""
    batch, count, *rows = heads.shape
    return heads[:, None].expand(batch, 2, count, *rows).reshape(batch, 2 * count, *rows)


def _changed_later(heads: Tensor) -> Tensor:
    copy = heads.clone()
    repeated = copy.repeat_interleave(2, 1)
    copy.mul_(2)
    return repeated


# Ways to repeat heads, with the number of heads of keys in the captured attention.
GROUPS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "expanded": (_expanded, 2),
    "repeat_interleave": (lambda heads: heads.repeat_interleave(2, 1), 2),
    "unevenly": (
        lambda heads: heads.repeat_interleave(
            torch.tensor([1, 3], device=DEVICE), 1, output_size=4
        ),
        4,
    ),
    "tiled": (_tiled, 4),
    "changed later": (_changed_later, 4),
}


@pytest.mark.parametrize("name", GROUPS)
def test_repeated_heads_become_groups_of_queries_in_half_precision(
    name: str, calls: list[_Call]
) -> None:
    """In half precision fused attention takes groups, so keys and values need no copies."""
    repeated, count = GROUPS[name]

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(
                query, repeated(key), repeated(value), is_causal=True
            )

    _compare(function, [_heads(4), _heads(2), _heads(2)], tolerance=2e-2)
    assert calls == [_Call(has_mask=False, is_causal=True, key_heads=count)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_one_head_of_keys_that_is_broadcast_is_in_a_fused_kernel(is_causal: bool) -> None:
    """Multi-query attention that relies on broadcasting, as in Falcon."""
    graphs: list[torch.fx.Graph] = []

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _causal(query) if is_causal else None
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value, mask)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        forward = _backend(gm, inputs)
        graphs.append(forward.__self__.graph)
        return forward

    _compare(function, [_heads(4), _heads(1), _heads(1)], tolerance=2e-2, backend=backend)
    (graph,) = graphs
    assert not [node for node in graph.nodes if "softmax" in str(node.target)]


def test_groups_that_a_call_passes_are_no_change() -> None:
    graphs: list[torch.fx.Graph] = []

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        report = CompileReport()
        graphs.append(entry._with_operators(gm, inputs, report).graph)
        assert not report.changes
        return gm.forward

    torch.compile(function, backend=backend)(_heads(4), _heads(1), _heads(1))
    assert graphs


def test_heads_that_are_repeated_without_gradients_stay_repeated(calls: list[_Call]) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(query, keys, values)

    query, key, value = _heads(4), _heads(2), _heads(2)
    result = torch.compile(function, backend=_backend, fullgraph=True)(query, key, value).float()
    _, dkey = torch.autograd.grad(result.sum(), (query, key), allow_unused=True)
    assert dkey is None
    assert calls == [_Call(has_mask=False, is_causal=False, key_heads=4)]


def test_heads_stay_repeated_if_there_are_fewer_queries(calls: list[_Call]) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(
                query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
            )

    heads = [_heads(1), _heads(2), _heads(2)]
    result = torch.compile(function, backend=_backend, fullgraph=True)(*heads)
    assert result.shape == function(*heads).shape
    assert calls == [_Call(has_mask=False, is_causal=False, key_heads=4)]


def test_heads_stay_repeated_in_single_precision(calls: list[_Call]) -> None:
    _compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, _expanded(k), _expanded(v)),
        [_heads(4), _heads(2), _heads(2)],
    )
    assert calls == [_Call(has_mask=False, is_causal=False, key_heads=4)]


def _of_each_head(query: Tensor) -> Tensor:
    return torch.arange(4 * _LENGTH, device=DEVICE).view(4, 1, _LENGTH) % 5 > 0


# Queries of tokens that attend to a cache: the number of sequences and of tokens, the heads of keys
# before their repetition, the mask, and the heads of keys in the captured attention.
TOKENS: dict[str, tuple[int, int, int, Callable[[Tensor], Tensor], int]] = {
    "one token": (2, 1, 2, lambda query: _of_each_head(query)[0], 2),
    "a mask for each sequence": (2, 1, 2, lambda query: query[:, :1, :, :_LENGTH] > -1, 2),
    "one head of keys": (2, 1, 1, lambda query: _of_each_head(query)[:1], 1),
    "a mask for each head": (2, 1, 2, _of_each_head, 4),
    "two tokens": (2, 2, 2, lambda query: _of_each_head(query)[:2, 0], 4),
    "one query for two sequences": (1, 1, 2, lambda query: _of_each_head(query)[0], 4),
}


@pytest.mark.parametrize("name", TOKENS)
def test_queries_of_one_token_are_rows_of_the_heads_of_a_cache(
    name: str, calls: list[_Call]
) -> None:
    batch, length, count, mask_of, captured_count = TOKENS[name]

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if count > 1:
            key, value = _expanded(key), _expanded(value)
        query = query[:batch]
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_of(query))
        return result.transpose(1, 2).flatten(2)

    _compare(function, [_heads(4, length), _heads(count), _heads(count)])
    assert calls == [_Call(has_mask=True, is_causal=False, key_heads=captured_count)]


@pytest.mark.parametrize("length", [1, _LENGTH])
def test_heads_with_a_mask_become_groups_of_queries_in_cudnn(
    length: int, calls: list[_Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch decides whether it computes attention in cuDNN: on Hopper it does for one token."""
    if DEVICE.type != "cuda":
        monkeypatch.setattr(attention, "_is_of_cudnn", lambda *_, **__: True)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _of_each_head(query)[0].expand(length, -1)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(query, _expanded(key), _expanded(value), mask)

    heads = [_heads(4, length), _heads(2), _heads(2)]
    is_grouped = DEVICE.type != "cuda" or "cudnn" in _kernels(function, heads)
    _compare(function, heads, tolerance=2e-2)
    # Without cuDNN the queries of one token are rows of the heads, which are not repeated either.
    count = 2 if is_grouped or length == 1 else 4
    assert calls == [_Call(has_mask=True, is_causal=False, key_heads=count)]
    if DEVICE.type == "cuda" and length == 1 and torch.cuda.get_device_capability()[0] == 9:
        assert is_grouped


def _kernels(function: Callable[..., Tensor], heads: list[Tensor]) -> str:
    """Return the names of the kernels of a function."""
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        function(*heads)
        torch.cuda.synchronize()
    return " ".join(event.key for event in run.key_averages())


@pytest.mark.parametrize("option", [{"dropout_p": 1.0}, {"enable_gqa": True}])
def test_options_keep_queries_of_one_token_as_they_are(option: Any, calls: list[_Call]) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _of_each_head(query)[0]
        return F.scaled_dot_product_attention(
            query, _expanded(key), _expanded(value), mask, **option
        )

    _compare(function, [_heads(4, 1), _heads(2), _heads(2)])
    assert calls == [_Call(has_mask=True, is_causal=False, key_heads=4)]


def _compare(
    function: Callable[..., Tensor],
    heads: list[Tensor],
    tolerance: float = 1e-5,
    backend: Callable[..., Any] = _backend,
) -> None:
    """Check that values and gradients of a compiled function are those of the function.

    On GPUs attention that drops everything is NaN.
    """
    cotangent = torch.randn(function(*heads).shape, device=DEVICE)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for call in (function, compiled):
        result = call(*heads).float()
        results.append([result, *torch.autograd.grad(result, heads, cotangent)])
    for eager, ours in zip(*results, strict=True):
        largest = float(eager.detach().nan_to_num().abs().max())
        torch.testing.assert_close(
            ours, eager, rtol=tolerance, atol=tolerance * largest, equal_nan=True
        )


@pytest.mark.parametrize("rotated", [False, True])
def test_values_are_saved_without_the_joint_product_if_queries_are_rotated(rotated: bool) -> None:
    """If queries and keys are rotated, attention saves a copy of the values.

    Otherwise it saves views of the joint product of queries, keys and values, and so all of it.
    """
    query, key, value = (torch.nn.Linear(16, 32, bias=False).to(DEVICE) for _ in range(3))
    x, cos = torch.randn(2, _LENGTH, 16, device=DEVICE), torch.randn(_LENGTH, 16, device=DEVICE)
    storage_sizes: list[int] = []

    def function(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            q, k, v = [
                layer(x).view(2, _LENGTH, 2, 16).transpose(1, 2) for layer in (query, key, value)
            ]
            if rotated:
                q, k = q * cos, k * cos
            return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v).float()

    def pack(tensor: Tensor) -> Tensor:
        storage_sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    results = []
    weights = [query.weight, key.weight, value.weight]
    for call in (function, torch.compile(function, backend=_backend)):
        storage_sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call(x)
        results.append([result.detach(), *torch.autograd.grad(result.square().sum(), weights)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))
    joint_product = 2 * _LENGTH * 96 * 2  # bytes of queries, keys and values in bf16
    assert (joint_product in storage_sizes) == (not rotated)


# On a CPU its backward has no rule for vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mask_of", [torch.ones_like, torch.tril])
def test_attention_in_a_vmap_keeps_its_mask(mask_of: Any, calls: list[_Call]) -> None:
    """Its tensors lack the dimension that is mapped."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = mask_of(torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=DEVICE))
        attend = torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask))
        return attend(query, key, value)

    _compare(function, [_heads(2), _heads(2), _heads(2)])
    assert calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_attention_is_that_of_sdpa_kernel_in_the_model(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention that it selects is in the graph, and the selection is the caller's after it.

    The call is in a `torch.vmap`, which the capture leaves, too.
    """

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def model(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            y = torch.vmap(attention)(x)
        return F.layer_norm(y, y.shape[-1:])

    def failing(*args: Any, **options: Any) -> Any:
        raise capture.NotCapturedError("a reason")

    def selected() -> list[Any]:
        cuda, level = torch.backends.cuda, torch._C._functorch.maybe_current_level()
        order = torch._C._get_sdp_priority_order()
        return [level, order, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()]

    if fails:
        monkeypatch.setattr(capture, "in_vmap", failing)
    before, report, graphs = list[Any](), CompileReport(), list[torch.fx.Graph]()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graph = entry._with_operators(gm, inputs, report)
        graphs.append(graph.graph)
        assert selected() == before
        return graph.forward

    x = torch.randn(2, 2, _LENGTH, 16, device=DEVICE)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        before = selected()
        result = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert bool(report.left) == fails
    torch.testing.assert_close(result, model(x))
    names = {str(node.target) for node in graphs[0].nodes}
    assert fails or ("aten.bmm.default" in names and not any("attention" in n for n in names))
