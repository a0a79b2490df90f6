"""`fusedops.compile` hands attention to PyTorch without masks and repeated heads that it does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedops.backend import capture, entry
from fusedops.backend.report import CompileReport
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_LENGTH = 8


@pytest.fixture
def calls() -> Iterator[list[tuple[bool, bool, int]]]:
    """The arguments of each attention that is captured.

    Whether there is a mask, whether it is causal, and the keys' heads.
    """
    seen: list[tuple[bool, bool, int]] = []
    attention, captured = F.scaled_dot_product_attention, capture._Capture._attention

    def called(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        seen.append((mask is not None, bool(options.get("is_causal")), key.shape[1]))
        assert value.shape[1] == key.shape[1]
        return attention(query, key, value, mask, *rest, **options)

    def spied(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        with mock.patch.object(capture, "F", SimpleNamespace(scaled_dot_product_attention=called)):
            return captured(self, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(capture._Capture, "_attention", spied):
        yield seen


def _backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    report = CompileReport()
    compiled = entry._with_operators(gm, inputs, report)
    assert not report.left, report.left
    return compiled.forward


def _heads(count: int, length: int = _LENGTH) -> Tensor:
    return torch.randn(2, count, length, 16, device=DEVICE, requires_grad=True)


def _places() -> tuple[Tensor, Tensor]:
    """The positions of queries and of keys."""
    places = torch.arange(_LENGTH, device=DEVICE)
    return places[None, None, :, None], places[None, None, None, :]


def _causal(rows: Tensor) -> Tensor:
    query, key = _places()
    return (key <= query).expand(rows.shape[0], -1, -1, -1)


def _of_documents(rows: Tensor) -> Tensor:
    """Causal within documents, as Transformers numbers them: here all rows are one."""
    query, key = _places()
    places = torch.arange(_LENGTH, device=DEVICE).expand(rows.shape[0], -1)
    steps = torch.cat([places[:, :1] - 1, places], -1).diff(dim=-1)
    document = (steps != 1).cumsum(-1)
    batch = torch.arange(rows.shape[0], device=DEVICE)[:, None, None, None]
    return (document[batch, query] == document[batch, key]) & (key <= query)


def _of_numbers(rows: Tensor) -> Tensor:
    full = torch.full(
        (_LENGTH, _LENGTH), torch.finfo(rows.dtype).min, dtype=rows.dtype, device=DEVICE
    )
    return full.triu(1)[None, None]


def _nothing(rows: Tensor) -> Tensor:
    return (_places()[0] >= 0).expand(rows.shape[0], 1, _LENGTH, _LENGTH)


def _window(rows: Tensor) -> Tensor:
    query, key = _places()
    return (key <= query) & (query - key < _LENGTH - 1)


def _strict(rows: Tensor) -> Tensor:
    query, key = _places()
    return (key < query) | (key == 0)


def _padded(rows: Tensor) -> Tensor:
    return (rows[:, :1, None, :, 0] < 9) & _causal(rows)


def _changed(rows: Tensor) -> Tensor:
    mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=DEVICE)
    mask[0].logical_and_(rows[0, 0, :, 0] < 0)
    mask[0, 0] = True
    return mask


def _shifted(rows: Tensor) -> Tensor:
    """No causal mask, but a bias that is as large for keys that come later."""
    return 0.5 * (_places()[0] < _places()[1]).to(rows.dtype)


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[bool, bool]]] = {
    "causal": (_causal, (False, True)),
    "of documents": (_of_documents, (False, True)),
    "of numbers": (_of_numbers, (False, True)),
    "nothing": (_nothing, (False, False)),
    "window": (_window, (True, False)),
    "strict": (_strict, (True, False)),
    "padded": (_padded, (True, False)),
    "changed": (_changed, (True, False)),
    "shifted": (_shifted, (True, False)),
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_numbers_alone_are_replaced(
    name: str, recomputed: bool, calls: list[tuple[bool, bool, int]]
) -> None:
    """Those that numbers alone decide are known, also in a part that is computed again.

    The others stay.
    """
    made, expected = MASKS[name]

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = made(query)
        if recomputed:
            query = checkpoint(attention, query, key, value, mask, use_reentrant=False)
            return checkpoint(attention, query, key, value, mask, use_reentrant=False)  # type: ignore[no-any-return]
        return attention(query, key, value, mask)

    _compare(function, [_heads(4), _heads(4), _heads(4)])
    assert calls == [(*expected, 4)] * (1 + recomputed)


def _hide(mask: Tensor) -> Tensor:
    return mask[3:, 0].fill_(False).any()


class _Hides(torch.autograd.Function):
    """It changes a mask, and is not looked into: it detaches a tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mask: Tensor) -> Tensor:
        _hide(mask.detach_())
        return rows * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def _hidden_in_a_body(rows: Tensor, mask: Tensor) -> None:
    checkpoint(_hide, mask.view(-1).view(mask.shape), use_reentrant=False)


# PyTorch itself raises the warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "changed",
    [
        lambda _, mask: mask[3:, 0].fill_(False),
        lambda _, mask: mask.view(-1)[24:].fill_(True),
        _Hides.apply,
        _hidden_in_a_body,
    ],
)
def test_a_mask_that_is_changed_after_its_use(
    changed: Callable[[Tensor, Tensor], Any], calls: list[tuple[bool, bool, int]]
) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=DEVICE).tril()
        rows = F.scaled_dot_product_attention(query, key, value, mask[None])
        changed(rows, mask)
        return F.scaled_dot_product_attention(rows, key, value, mask)

    _compare(function, [_heads(4), _heads(4), _heads(4)])
    assert calls == [(False, True, 4), (True, False, 4)]


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_scores_that_are_turned_keep_their_mask(
    scale: float, calls: list[tuple[bool, bool, int]]
) -> None:
    """PyTorch's kernels may mask before they scale."""
    _compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, _causal(q), scale=scale),
        [_heads(4), _heads(4), _heads(4)],
    )
    assert calls == [(scale < 0, scale > 0, 4)]


def test_a_change_of_what_the_places_led_to_leaves_a_mask(
    calls: list[tuple[bool, bool, int]],
) -> None:
    """Rotary embeddings and masks come of the same places, and experts write into rows."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        places = torch.arange(_LENGTH, device=DEVICE)
        mask = places[None, :] <= places[:, None]
        turned = query * torch.cos(places)[:, None]
        rows = F.scaled_dot_product_attention(turned, key, value, mask).clone()
        rows[:, :, 0] = 0.0
        return F.scaled_dot_product_attention(rows, key, value, mask)

    _compare(function, [_heads(4), _heads(4), _heads(4)])
    assert calls == [(False, True, 4)] * 2


def test_a_mask_of_other_lengths_stays(calls: list[tuple[bool, bool, int]]) -> None:
    """PyTorch's flag begins at the first key."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, columns = (
            torch.arange(5, device=DEVICE)[:, None],
            torch.arange(_LENGTH, device=DEVICE),
        )
        return F.scaled_dot_product_attention(query, key, value, columns <= rows)

    _compare(function, [_heads(4, 5), _heads(4), _heads(4)])
    assert calls == [(True, False, 4)]


def _expanded(heads: Tensor) -> Tensor:
    batch, count, *rows = heads.shape
    return heads[:, :, None].expand(batch, count, 2, *rows).reshape(batch, 2 * count, *rows)


def _tiled(heads: Tensor) -> Tensor:
    """Other heads behind one another."""
    batch, count, *rows = heads.shape
    return heads[:, None].expand(batch, 2, count, *rows).reshape(batch, 2 * count, *rows)


def _changed_later(heads: Tensor) -> Tensor:
    copy = heads.clone()
    repeated = copy.repeat_interleave(2, 1)
    copy.mul_(2)
    return repeated


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
def test_groups_of_queries(name: str, calls: list[tuple[bool, bool, int]]) -> None:
    """Keys and values are not repeated in half precision, in which fused attention takes groups."""
    repeated, count = GROUPS[name]

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(
                query, repeated(key), repeated(value), is_causal=True
            )

    _compare(function, [_heads(4), _heads(2), _heads(2)], 2e-2)
    assert calls == [(False, True, count)]


def test_heads_that_are_repeated_without_gradients(calls: list[tuple[bool, bool, int]]) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(query, keys, values)

    query, key, value = _heads(4), _heads(2), _heads(2)
    result = torch.compile(function, backend=_backend, fullgraph=True)(query, key, value).float()
    assert torch.autograd.grad(result.sum(), (query, key), allow_unused=True)[1] is None
    assert calls == [(False, False, 4)]


def test_queries_that_are_fewer_than_repeated_heads(calls: list[tuple[bool, bool, int]]) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return F.scaled_dot_product_attention(
                query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
            )

    heads = [_heads(1), _heads(2), _heads(2)]
    assert (
        torch.compile(function, backend=_backend, fullgraph=True)(*heads).shape
        == function(*heads).shape
    )
    assert calls == [(False, False, 4)]


def test_groups_of_queries_in_single_precision(calls: list[tuple[bool, bool, int]]) -> None:
    _compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, _expanded(k), _expanded(v)),
        [_heads(4), _heads(2), _heads(2)],
    )
    assert calls == [(False, False, 4)]


def _compare(function: Callable[..., Tensor], heads: list[Tensor], tolerance: float = 1e-5) -> None:
    """Values and gradients, of a compiled function and of the function."""
    cotangent = torch.randn(heads[0].shape, device=DEVICE)
    compiled = torch.compile(function, backend=_backend, fullgraph=True)
    results = []
    for call in (function, compiled):
        result = call(*heads).float()
        results.append([result, *torch.autograd.grad(result, heads, cotangent)])
    for ours, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(
            ours, eager, rtol=tolerance, atol=tolerance * float(eager.detach().abs().max())
        )


@pytest.mark.parametrize("rotated", [False, True])
def test_values_are_saved_without_rotated_queries(rotated: bool) -> None:
    """Attention saves its values alone, not all of the joint product that they are a part of.

    Unrotated, it saves all.
    """
    query, key, value = (torch.nn.Linear(16, 32, bias=False).to(DEVICE) for _ in range(3))
    x, cos = torch.randn(2, _LENGTH, 16, device=DEVICE), torch.randn(_LENGTH, 16, device=DEVICE)
    memory: list[tuple[int, int]] = []

    def function(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            q, k, v = [
                layer(x).view(2, _LENGTH, 2, 16).transpose(1, 2) for layer in (query, key, value)
            ]
            q, k = (q * cos, k * cos) if rotated else (q, k)
            return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v).float()

    def keep(tensor: Tensor) -> Tensor:
        memory.append((tensor.untyped_storage().nbytes(), tensor.nbytes))
        return tensor

    results = []
    for call in (function, torch.compile(function, backend=_backend)):
        memory.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = call(x)
        results.append(
            [
                result.detach(),
                *torch.autograd.grad(
                    result.square().sum(), [query.weight, key.weight, value.weight]
                ),
            ]
        )
    for ours, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))
    product = 2 * _LENGTH * 96 * 2  # bytes of all three
    assert any(of == product for of, _ in memory) == (not rotated)
