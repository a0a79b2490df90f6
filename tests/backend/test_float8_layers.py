"""`fusedops.compile`: linear layers that compute in float8, in the manner of torchao's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from backends import Backend, randn, results
from sharded_blocks import BATCH, LENGTH, WIDTH, LlamaLike
from support import DEVICE

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo does so.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
_FLOAT8 = torch.float8_e4m3fn


class _Scaled(Tensor):
    """A tensor in float8 with a scale. A product of two is computed in fp32."""

    data8: Tensor
    scale: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor) -> _Scaled:
        self: Any = Tensor._make_wrapper_subclass(
            cls, data8.size(), strides=data8.stride(), dtype=torch.float32, device=data8.device
        )
        self.data8, self.scale = data8, scale
        return self  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> _Scaled:
        return _Scaled(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            left, right = args
            product = left.data8.float() @ right.data8.float()
            return product / (left.scale * right.scale)
        assert func in (torch.ops.aten.t.default, torch.ops.aten.detach.default), func
        return _Scaled(func(args[0].data8), args[0].scale)


@torch._dynamo.allow_in_graph
class _ToScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        scale = torch.finfo(_FLOAT8).max / t.abs().amax()
        return _Scaled((t * scale).to(_FLOAT8), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(_ToScaled.apply(left), _ToScaled.apply(right))


class _Product(torch.autograd.Function):
    """A product in float8, and its gradients in float8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return _product(grad, weight), _product(grad.t(), rows)


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x.flatten(0, -2), self.weight)
        return product.unflatten(0, x.shape[:-1])


class _Config(NamedTuple):
    transposed: bool


@torch._dynamo.allow_in_graph
class _Untraced(torch.autograd.Function):
    """The same, which Dynamo does not trace, with a configuration that is no tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, config: _Config) -> Tensor:
        assert config.transposed
        return _Product.forward(ctx, rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (*_Product.backward(ctx, grad), None)


class _UntracedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        config = _Config(transposed=True)
        product: Tensor = _Untraced.apply(x.flatten(0, -2), self.weight, config)
        return product.unflatten(0, x.shape[:-1])


@pytest.mark.parametrize("kind", [_Linear, _UntracedLinear])
def test_layers_in_float8_stay_whole_between_fused_regions(kind: type[nn.Linear]) -> None:
    """A value that is rounded to its neighbour in float8 differs by that much."""
    torch.manual_seed(0)
    block = LlamaLike().to(DEVICE)
    layers = [part for part in block.modules() if type(part) is nn.Linear]
    for layer in layers:
        layer.__class__ = kind
    x, cotangent = randn(BATCH, LENGTH, WIDTH), randn(BATCH, LENGTH, WIDTH)
    expected = results(block, block, (x,), cotangent)
    backend = Backend("auto")
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    actual = results(compiled, block, (x,), cotangent)
    assert not backend.report.left
    assert sum(region.program is not None for region in backend.report.regions) == 2
    nodes = [node for graph in (*backend.forwards, *backend.backwards) for node in graph.nodes]
    assert [node.target for node in nodes].count(torch.ops.aten.mm.default) == 3 * len(layers)
    assert any(node.kwargs.get("dtype") is _FLOAT8 for node in nodes)
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= torch.finfo(_FLOAT8).eps * other.abs().max()
