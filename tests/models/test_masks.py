"""Fused attentions make masks contiguous, so that PyTorch's fused attention takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models.parts import branch
from fusedops.models.tricks.masks import laid_out
from sample_models import ModelSpec
from support import DEVICE, KERNEL_PATH
from zoo import SAMPLES, inputs, making_kernels, undropped

_NAMES = ("bert", "distilbert", "vit", "clip", "bart")
some = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _NAMES], ids=lambda spec: spec.name
)
encoders = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("bert", "vit")], ids=lambda spec: spec.name
)


def _expanded(length: int = 5) -> Tensor:
    """Return a mask with one number per query, expanded over the keys: one query has no keys."""
    has_keys = torch.arange(length, device=DEVICE) != 2
    return has_keys[None, None, :, None].expand(2, 1, length, length)


def test_mask_that_is_expanded_over_the_keys_becomes_contiguous() -> None:
    mask = _expanded()
    assert mask.stride(-1) == 0
    with making_kernels():
        result = laid_out(mask)
    assert result.is_contiguous()
    assert torch.equal(result, mask)


def test_transposed_mask_of_numbers_becomes_contiguous_along_the_keys() -> None:
    """T5's mask before Transformers 5.23 is a permuted table, expanded over the batch.

    The table is copied once, not for each element of the batch.
    """
    table = torch.randn(5, 7, 3, device=DEVICE)
    mask = table.permute(2, 0, 1)[None].expand(2, 3, 5, 7)
    with making_kernels():
        result = laid_out(mask)
    assert result.stride() == (0, 35, 7, 1)
    assert torch.equal(result, mask)


_LEFT = {
    "none": None,
    "no tensor": object(),
    "a number": torch.tensor(True),
    "contiguous": torch.ones(2, 1, 5, 5, dtype=torch.bool),
    "padding": torch.ones(2, 1, 1, 5, dtype=torch.bool).expand(2, 1, 5, 5),
    "of numbers": torch.zeros(5, 1).expand(2, 1, 5, 5),
    "sparse": torch.ones(2, 5, dtype=torch.bool).to_sparse(),
    "compressed sparse": torch.ones(2, 5, dtype=torch.bool).to_sparse_csr(),
    "numbers at a length at which cuDNN errs": torch.zeros(64, 5).t().expand(2, 1, 5, 64),
    "integers": torch.zeros(7, 5, dtype=torch.long).t(),
    "a length at which cuDNN errs": torch.ones(192, 1, dtype=torch.bool).expand(2, 1, 192, 192),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).bool(),
}


@pytest.mark.parametrize("mask", _LEFT.values(), ids=_LEFT)
def test_other_masks_are_not_changed(mask: Any) -> None:
    with making_kernels():
        assert laid_out(mask) is mask


def test_masks_are_changed_only_if_torch_compile_generates_kernels() -> None:
    """In eager mode Transformers makes no such mask, and on a CPU PyTorch's attention takes it."""
    mask = _expanded()
    assert laid_out(mask) is mask

    def ones_if_changed(mask: Tensor) -> Tensor:
        if laid_out(mask) is not mask:
            return laid_out(mask) | True
        return mask & False

    compiled = torch.compile(ones_if_changed, backend="eager", fullgraph=True)
    assert bool(compiled(mask).any()) is KERNEL_PATH


def _attentions(model: nn.Module) -> list[Any]:
    """Return the attentions whose forwards take rows and a mask."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and not hasattr(module, "self")
    ]


@contextmanager
def _recorded_strides() -> Iterator[list[int]]:
    """Record the strides of the last dimensions of the masks that PyTorch's attention gets."""
    strides: list[int] = []
    attention = nn.functional.scaled_dot_product_attention

    def recording(*args: Any, attn_mask: Tensor, **kwargs: Any) -> Tensor:
        strides.append(attn_mask.stride(-1))
        return attention(*args, attn_mask=attn_mask, **kwargs)

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", recording):
        yield strides


def _rows(module: nn.Module) -> Tensor:
    """Return random rows for a module, of the width of its first linear layer."""
    layer = next(child for child in module.modules() if isinstance(child, nn.Linear))
    return torch.randn(2, 5, layer.in_features, device=DEVICE)


def _close(result: Tensor, expected: Tensor) -> None:
    """Check that results differ by a few fp32 roundings at most.

    The bias may be added after the product, and sums may be computed in another order.
    """
    torch.testing.assert_close(
        result, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max())
    )


class _OptionalRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.drop(self.out(mask if x is None else x))


class _WithoutRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _OptionalRows()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(mask=x)


def test_fused_branch_is_called_with_only_a_mask() -> None:
    model = _WithoutRows().to(DEVICE).eval()
    x = torch.randn(2, 8, device=DEVICE)
    expected = model(x)
    assert fusedops.fuse_model(model)
    assert hasattr(type(model.inner), "_fusedops_branch")
    _close(model(x), expected)


@some
def test_attention_with_a_contiguous_mask_has_the_values_of_the_original(spec: ModelSpec) -> None:
    """Each fused attention makes its mask contiguous."""
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    mask, attentions = _expanded(), _attentions(model)
    for attention in attentions:
        x = _rows(attention)
        with making_kernels(), _recorded_strides() as strides:
            if hasattr(type(attention), "_fusedops_branch"):
                result, _ = branch(attention, x, attention_mask=mask)
                y = result.product if result.bias is None else result.product + result.bias
            else:
                y = attention(x, mask)[0]
        assert strides == [1]
        original_forward = type(attention)._fusedops_original.forward
        _close(y, original_forward(attention, x, attention_mask=mask)[0])
    assert len(attentions) >= 2


@some
def test_attention_in_a_block_gets_a_contiguous_mask(spec: ModelSpec) -> None:
    """The outputs of the block are those of the original."""
    model, original = undropped(spec), undropped(spec)
    assert fusedops.fuse_model(model)
    originals = dict(original.named_modules())
    blocks = {
        name: module
        for name, module in model.named_modules()
        if name.split(".")[-1] == "0" and "decoder" not in name
    }
    assert blocks
    for name, block in blocks.items():
        x = _rows(block)
        with making_kernels(), _recorded_strides() as strides:
            y = block(x, attention_mask=_expanded())
        assert strides == [1]
        expected = originals[name](x, attention_mask=_expanded())
        if isinstance(y, tuple):
            y, expected = y[0], expected[0]
        _close(y, expected)


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "gpt2_decoder"], ids=lambda spec: spec.name
)
def test_mask_of_a_cross_attention_becomes_contiguous(spec: ModelSpec) -> None:
    """GPT-2 passes it by the name ``encoder_attention_mask``."""
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    block: Any = next(module for module in model.modules() if hasattr(module, "crossattention"))
    x, others = torch.randn(2, 2, 5, block.ln_1.weight.shape[0], device=DEVICE)
    causal = torch.ones(5, 5, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, 5, 5)
    with making_kernels(), _recorded_strides() as strides:
        block(
            x,
            attention_mask=causal,
            encoder_hidden_states=others,
            encoder_attention_mask=_expanded(),
        )
    assert strides == [1, 1]


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "vit"], ids=lambda spec: spec.name
)
def test_hook_on_an_attention_gets_the_mask_by_position_as_in_the_original(
    spec: ModelSpec,
) -> None:
    argument_counts: list[int] = []
    for fuses in (False, True):
        model = undropped(spec)
        if fuses:
            assert fusedops.fuse_model(model)
        attention: Any = next(
            module for module in model.modules() if type(module).__name__.endswith("ViTAttention")
        )
        attention.register_forward_pre_hook(lambda module, args: argument_counts.append(len(args)))
        model(**inputs(spec))
    assert argument_counts[0] == argument_counts[1] == 2


@encoders
@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU another attention is chosen")
def test_compiled_model_without_a_mask_calls_one_attention(
    spec: ModelSpec, fresh_dynamo: None
) -> None:
    """Compiled, Transformers makes a mask although nothing is masked.

    Each attention is still one operator, not a softmax and products.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    model, arguments = undropped(spec), inputs(spec)
    arguments.pop("attention_mask", None)
    assert fusedops.fuse_model(model)
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        compiled(**arguments)
    attention_calls = sum("_scaled_dot_product" in target for target in targets)
    assert attention_calls == len(_attentions(model)) == 2
    assert not any("softmax" in target for target in targets if "log_softmax" not in target)
