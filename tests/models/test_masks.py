"""Fused attentions: their masks are laid out so that PyTorch's fused attention takes them."""

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
    """One number a query: some see every key, others none."""
    seeing = torch.arange(length, device=DEVICE) != 2
    return seeing[None, None, :, None].expand(2, 1, length, length)


def test_an_expanded_mask_is_laid_out() -> None:
    mask = _expanded()
    assert mask.stride(-1) == 0
    with making_kernels():
        result = laid_out(mask)
    assert result.is_contiguous()
    assert torch.equal(result, mask)


def test_a_transposed_mask_of_numbers_is_contiguous_along_the_keys() -> None:
    """As T5's before Transformers 5.23.

    A permuted table, expanded over the batch, of which no copy a batch is made.
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
    "rows of their own": torch.ones(2, 5, dtype=torch.bool).to_sparse_csr(),
    "numbers at a length at which cuDNN errs": torch.zeros(64, 5).t().expand(2, 1, 5, 64),
    "integers": torch.zeros(7, 5, dtype=torch.long).t(),
    "a length at which cuDNN errs": torch.ones(192, 1, dtype=torch.bool).expand(2, 1, 192, 192),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).bool(),
}


@pytest.mark.parametrize("mask", _LEFT.values(), ids=_LEFT)
def test_others_are_left(mask: Any) -> None:
    with making_kernels():
        assert laid_out(mask) is mask


def test_only_where_kernels_are_made() -> None:
    """Eagerly Transformers makes no such mask, and on a CPU PyTorch's attention takes it."""
    mask = _expanded()
    assert laid_out(mask) is mask

    def made(mask: Tensor) -> Tensor:
        return laid_out(mask) | False if laid_out(mask) is not mask else mask & False

    assert bool(torch.compile(made, backend="eager", fullgraph=True)(mask).any()) is KERNEL_PATH


def _attentions(model: nn.Module) -> list[Any]:
    """Those that take rows and a mask."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and not hasattr(module, "self")
    ]


@contextmanager
def _attended() -> Iterator[list[int]]:
    """The strides of the masks' last dimensions, as they reach PyTorch."""
    strides: list[int] = []
    attend = nn.functional.scaled_dot_product_attention

    def attended(*args: Any, attn_mask: Tensor, **kwargs: Any) -> Tensor:
        strides.append(attn_mask.stride(-1))
        return attend(*args, attn_mask=attn_mask, **kwargs)

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attended):
        yield strides


def _rows(module: nn.Module) -> Tensor:
    layer = next(child for child in module.modules() if isinstance(child, nn.Linear))
    return torch.randn(2, 5, layer.in_features, device=DEVICE)


def _close(found: Tensor, expected: Tensor) -> None:
    """A few fp32 roundings apart.

    Of a bias that is added behind the product, of sums in another order.
    """
    torch.testing.assert_close(
        found, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max())
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


def test_an_attention_is_called_without_rows() -> None:
    model = _WithoutRows().to(DEVICE).eval()
    x = torch.randn(2, 8, device=DEVICE)
    expected = model(x)
    assert fusedops.fuse_model(model)
    assert hasattr(type(model.inner), "_fusedops_branch")
    _close(model(x), expected)


@some
def test_attention_with_a_changed_mask_has_the_same_values(spec: ModelSpec) -> None:
    """The same numbers as with the mask as it was, which each has laid out."""
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    mask, attentions = _expanded(), _attentions(model)
    for attention in attentions:
        x = _rows(attention)
        with making_kernels(), _attended() as strides:
            if hasattr(type(attention), "_fusedops_branch"):
                end, _ = branch(attention, x, attention_mask=mask)
                y = end.product if end.bias is None else end.product + end.bias
            else:
                y = attention(x, mask)[0]
        assert strides == [1]
        _close(y, type(attention)._fusedops_original.forward(attention, x, attention_mask=mask)[0])
    assert len(attentions) >= 2


@some
def test_blocks_pass_the_changed_mask_on(spec: ModelSpec) -> None:
    """As each block hands the mask on, and with the outputs of a model that is not fused."""
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
        with making_kernels(), _attended() as strides:
            y = block(x, attention_mask=_expanded())
        assert strides == [1]
        expected = originals[name](x, attention_mask=_expanded())
        _close(*(y[0] if isinstance(y, tuple) else y for y in (y, expected)))


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "gpt2_decoder"], ids=lambda spec: spec.name
)
def test_a_cross_attentions_mask(spec: ModelSpec) -> None:
    """GPT-2's has a name of its own."""
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    block: Any = next(module for module in model.modules() if hasattr(module, "crossattention"))
    x, others = torch.randn(2, 2, 5, block.ln_1.weight.shape[0], device=DEVICE)
    causal = torch.ones(5, 5, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, 5, 5)
    with making_kernels(), _attended() as strides:
        block(
            x,
            attention_mask=causal,
            encoder_hidden_states=others,
            encoder_attention_mask=_expanded(),
        )
    assert strides == [1, 1]


def _hooked_vit(model: nn.Module, seen: list[int]) -> None:
    attention: Any = next(
        module for module in model.modules() if type(module).__name__.endswith("ViTAttention")
    )
    attention.register_forward_pre_hook(lambda module, args: seen.append(len(args)))


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "vit"], ids=lambda spec: spec.name
)
def test_a_hook_sees_what_it_saw(spec: ModelSpec) -> None:
    """The mask comes in its place, as in a ViT that is not fused."""
    seen: list[int] = []
    for fused in (False, True):
        model = undropped(spec)
        assert not fused or fusedops.fuse_model(model)
        _hooked_vit(model, seen)
        model(**inputs(spec))
    assert seen[0] == seen[1] == 2


@encoders
@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU another attention is chosen")
def test_compiled_model_without_a_mask_calls_one_attention(
    spec: ModelSpec, fresh_dynamo: None
) -> None:
    """Where nothing is masked, and compiling makes a mask nevertheless.

    One operator is the attention.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    model, arguments = undropped(spec), inputs(spec)
    arguments.pop("attention_mask", None)
    assert fusedops.fuse_model(model)
    targets: list[str] = []

    def keep(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        compiled(**arguments)
    assert (
        sum("_scaled_dot_product" in target for target in targets) == len(_attentions(model)) == 2
    )
    assert not any("softmax" in target for target in targets if "log_softmax" not in target)
