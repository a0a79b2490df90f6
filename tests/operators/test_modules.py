"""Modules that replace those of torch.nn: constructor, parameters, state_dict, repr, copies."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.nn import (
    FusedBiasAct,
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedBiasGELU,
    FusedGELU,
    FusedLayerNorm,
    FusedRMSNorm,
)
from modules import N, close, randomise


@dataclass(frozen=True)
class Pair:
    """A fused module and the torch.nn module that it extends.

    Attributes:
        fused: the class of the fused module.
        native: the class of torch.nn.
        shape: positional arguments of both constructors.
        options: keyword arguments of the fused constructor only.
    """

    fused: type[nn.Module]
    native: type[nn.Module]
    shape: tuple[Any, ...]
    options: dict[str, Any]

    def build(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        """Builds both modules; ``options`` are for both."""
        fused = self.fused(*self.shape, **self.options, **options)
        return fused, self.native(*self.shape, **options)

    @property
    def drops(self) -> bool:
        return hasattr(self.build()[0], "p")

    @property
    def with_residual(self) -> bool:
        return "residual" in inspect.signature(self.fused.forward).parameters


PAIRS = [
    Pair(FusedLayerNorm, nn.LayerNorm, (N,), {}),
    Pair(FusedRMSNorm, nn.RMSNorm, (N,), {}),
    Pair(FusedGELU, nn.GELU, (), {}),
    Pair(FusedBiasGELU, nn.GELU, (), {}),
    Pair(FusedBiasAct, nn.Dropout, (), {"activation": "identity", "p": 0.5}),
    Pair(FusedBiasDropoutAdd, nn.Dropout, (), {"p": 0.5}),
    Pair(FusedBiasDropoutAddLayerNorm, nn.LayerNorm, (N,), {"p": 0.3}),
    Pair(FusedBiasDropoutAddRMSNorm, nn.RMSNorm, (N,), {"p": 0.3}),
]
NORMS = [pair for pair in PAIRS if pair.shape]
RESIDUALS = [pair for pair in PAIRS if pair.with_residual]


def _id(pair: Pair) -> str:
    return pair.fused.__name__


every = pytest.mark.parametrize("pair", PAIRS, ids=_id)
norms = pytest.mark.parametrize("pair", NORMS, ids=_id)


def _inputs(
    pair: Pair, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """The arguments of the fused module's forward."""
    by_name = {"bias": torch.randn(N), "residual": torch.randn(3, 5, N)}
    names = list(inspect.signature(pair.fused.forward).parameters)[2:]
    tensors = (torch.randn(3, 5, N), *(by_name[name] for name in names))
    return tuple(t.to(device, dtype) for t in tensors)


def _composite(native: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The result of torch.nn without dropout."""
    z: Tensor = sum(inputs[1:], inputs[0])
    return z if isinstance(native, nn.Dropout) else native(z)


@every
def test_fused_module_is_a_torch_module_with_the_same_parameters(pair: Pair) -> None:
    module, native = pair.build()
    assert isinstance(module, pair.native)
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in native.state_dict().items()
    }
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in native.named_parameters()
    ]


@pytest.mark.parametrize("pair", PAIRS[:3], ids=_id)
def test_constructor_extends_torchs_by_keyword_only_arguments(pair: Pair) -> None:
    """The other arguments have the names, order and defaults of torch.nn's."""
    ours, theirs = (
        list(inspect.signature(c).parameters.values()) for c in (pair.fused, pair.native)
    )
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])
    forward = [list(inspect.signature(c.forward).parameters) for c in (pair.fused, pair.native)]
    assert forward[0] == forward[1]


@every
def test_initial_values_and_generator(pair: Pair) -> None:
    """With the same seed, initial weights equal torch.nn's, and so do those of a later layer."""
    results = []
    for index in (0, 1):
        torch.manual_seed(5)
        module = pair.build()[index]
        results.append((module.state_dict(), nn.Linear(4, 4).weight))
    (ours, weight_after_ours), (theirs, weight_after_theirs) = results
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(weight_after_ours, weight_after_theirs)


@norms
def test_state_dict_both_ways(pair: Pair) -> None:
    module, native = pair.build()
    randomise(module)
    native.load_state_dict(module.state_dict())
    for key, value in module.state_dict().items():
        assert torch.equal(value, native.state_dict()[key])
    randomise(native)
    module.load_state_dict(native.state_dict())
    for key, value in native.state_dict().items():
        assert torch.equal(value, module.state_dict()[key])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({**native.state_dict(), "extra": torch.zeros(1)})


def _variants(pair: Pair) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = [{}]
    if pair.shape:
        variants += [{"eps": 0.25}, {"elementwise_affine": False}]
    if pair.native is nn.GELU:
        variants.append({"approximate": "tanh"})
    if pair.native is nn.LayerNorm:
        variants.append({"bias": False})
    return variants


@pytest.mark.parametrize(
    ("pair", "options"),
    [(p, o) for p in PAIRS for o in _variants(p)],
    ids=lambda v: _id(v) if isinstance(v, Pair) else str(v),
)
def test_values_are_those_of_torch_nn(
    pair: Pair, options: dict[str, Any], device: torch.device
) -> None:
    """The module is in evaluation mode, then in training mode with a dropout probability of 0."""
    module, native = (randomise(m).to(device) for m in pair.build(**options))
    native.load_state_dict(module.state_dict())
    inputs = _inputs(pair, device)
    expected = _composite(native, inputs)
    close(module.eval()(*inputs), expected)
    if pair.drops:
        module.train()
        module.p = 0.0
        close(module(*inputs), expected)


@norms
def test_module_without_affine_parameters_has_none(pair: Pair) -> None:
    module, native = pair.build(elementwise_affine=False)
    assert list(module.parameters()) == [] and module.weight is None
    assert module.state_dict().keys() == native.state_dict().keys()
    if pair.native is nn.LayerNorm:
        module, native = pair.build(bias=False)
        assert module.bias is None
        assert list(module.state_dict()) == list(native.state_dict()) == ["weight"]


@every
def test_dropout_is_active_only_in_training(pair: Pair, device: torch.device) -> None:
    module, _ = pair.build()
    module.to(device)
    if not pair.drops:
        return
    module.p = 0.5
    inputs = _inputs(pair, device)
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))
    module.train()
    assert not torch.equal(module(*inputs), module(*inputs))
    assert not torch.equal(module(*inputs), module.eval()(*inputs))


@pytest.mark.parametrize("pair", RESIDUALS, ids=_id)
def test_module_has_the_bits_of_its_functional(pair: Pair, device: torch.device) -> None:
    """With the same seed, outputs and gradients are equal."""
    module, _ = pair.build()
    randomise(module).to(device)
    module.p = 0.4
    functional: Callable[..., Any] = {
        FusedBiasDropoutAdd: fusedops.bias_dropout_add,
        FusedBiasDropoutAddLayerNorm: fusedops.bias_dropout_add_ln,
        FusedBiasDropoutAddRMSNorm: fusedops.bias_dropout_add_rms_norm,
    }[pair.fused]
    inputs = tuple(t.requires_grad_() for t in _inputs(pair, device))
    dy = torch.randn_like(inputs[0])
    torch.manual_seed(3)
    ours = module(*inputs)
    torch.manual_seed(3)
    theirs = functional(*inputs, *module.parameters(), p=0.4)
    assert torch.equal(ours, theirs)
    leaves = (*inputs, *module.parameters())
    our_grads = torch.autograd.grad(ours, leaves, dy)
    assert all(map(torch.equal, our_grads, torch.autograd.grad(theirs, leaves, dy)))
    assert ours.isfinite().all()


@every
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
def test_copies_have_equal_results_and_separate_parameters(
    pair: Pair, way: str, device: torch.device
) -> None:
    module = randomise(pair.build()[0]).to(device).eval()
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(module))
    elif way == "deepcopy":
        copied = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is type(module) and repr(copied) == repr(module)
    inputs = _inputs(pair, device)
    assert torch.equal(module(*inputs), copied(*inputs))
    for ours, theirs in zip(module.parameters(), copied.parameters(), strict=True):
        assert ours.data_ptr() != theirs.data_ptr()


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_dtype(pair: Pair, dtype: torch.dtype, device: torch.device) -> None:
    module, native = (randomise(m) for m in pair.build())
    moved = module.half() if dtype == torch.float16 else module.to(dtype)
    assert all(parameter.dtype == dtype for parameter in moved.parameters())
    native.load_state_dict(module.state_dict())
    native.to(dtype)
    moved.to(device).eval()
    native.to(device)
    inputs = _inputs(pair, device, dtype)
    actual = moved(*inputs)
    assert actual.dtype == dtype
    expected = _composite(native.double(), tuple(t.double() for t in inputs))
    # Values are below 16. Output and sum are rounded once each, by half an ulp of the dtype.
    torch.testing.assert_close(
        actual.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
    )


@norms
def test_device_and_dtype_arguments(pair: Pair, device: torch.device) -> None:
    module, _ = pair.build(device=device, dtype=torch.float64)
    assert all(
        p.dtype == torch.float64 and p.device.type == device.type for p in module.parameters()
    )
    assert pair.build(device="meta")[0].weight.is_meta


@every
def test_repr_extends_torchs(pair: Pair) -> None:
    """The activation comes before the options of torch.nn, and the dropout of a norm after them."""
    module, native = pair.build()
    before, line, extra = module.extra_repr().partition(native.extra_repr())
    assert line and before == ("'identity', " if "activation" in pair.options else "")
    assert extra == (", p=0.3" if pair.options.get("p") == 0.3 else "")


def test_repr_of_the_options() -> None:
    assert repr(FusedRMSNorm(8, weight_offset=1.0, rounding="llama")).endswith(
        "weight_offset=1.0, rounding='llama')"
    )
    module = FusedBiasDropoutAddRMSNorm(8, p=0.1, return_sum=True, save="output")
    assert repr(module).endswith("p=0.1, return_sum=True, save='output')")


@every
def test_forward_and_backward_hooks_are_called(pair: Pair, device: torch.device) -> None:
    module = pair.build()[0].to(device).eval()
    calls: list[str] = []
    module.register_forward_pre_hook(lambda m, args: calls.append("before"))
    module.register_forward_hook(lambda m, args, output: output * 2)
    module.register_full_backward_hook(lambda m, dx, dy: calls.append("backward"))
    inputs = tuple(t.requires_grad_() for t in _inputs(pair, device))
    output = module(*inputs)
    assert torch.equal(output, 2 * module.forward(*inputs))
    output.backward(torch.randn_like(output))
    assert calls == ["before", "backward"]
    assert all(t.grad is not None and t.grad.any() for t in inputs)


def test_drop_ins_in_a_sequential_train_like_torch_nn(device: torch.device) -> None:
    """After one step of training, the parameters equal those of a model of torch.nn."""

    def model(norms: tuple[type[nn.Module], type[nn.Module]]) -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Linear(N, N), norms[0](N), nn.ReLU(), nn.Linear(N, N), norms[1](N)
        ).to(device)

    ours, theirs = model((FusedLayerNorm, FusedRMSNorm)), model((nn.LayerNorm, nn.RMSNorm))
    x, dy = torch.randn(7, N, device=device), torch.randn(7, N, device=device)
    for net in (ours, theirs):
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        net(x).backward(dy)
        optimiser.step()
    # Ten successive fp32 operations, with sums of at most 24 terms of order one. 1e-4 is about a
    # thousand ulps.
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_several_normalised_dimensions(device: torch.device) -> None:
    ours, theirs = (randomise(norm([3, 4])).to(device) for norm in (FusedLayerNorm, nn.LayerNorm))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 4, device=device)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("fused", [FusedRMSNorm, FusedBiasDropoutAddRMSNorm])
def test_weight_offset_starts_at_a_scale_of_one(
    fused: type[nn.Module], device: torch.device
) -> None:
    options = {"p": 0.1} if fused is FusedBiasDropoutAddRMSNorm else {}
    module = fused(N, weight_offset=1.0, **options).to(device).eval()
    assert not module.weight.any()
    x = torch.randn(4, N, device=device)
    close(module(x), nn.RMSNorm(N, device=device)(x))


@pytest.mark.parametrize("fused", [FusedBiasDropoutAddLayerNorm, FusedBiasDropoutAddRMSNorm])
def test_sum_returned(fused: type[nn.Module], device: torch.device) -> None:
    module = fused(N, p=0.0, return_sum=True).to(device)
    x, bias, residual = (torch.randn(s, device=device) for s in ((2, N), (N,), (2, N)))
    y, z = module(x, bias, residual)
    close(z, x + bias + residual)
    close(y, native_of(fused)(N).to(device)(x + bias + residual))


def native_of(fused: type[nn.Module]) -> type[nn.Module]:
    return next(pair.native for pair in PAIRS if pair.fused is fused)


def test_normalized_shape_may_hold_tensors(device: torch.device) -> None:
    """torch.nn accepts such shapes, too."""
    x = torch.randn(3, 8, device=device)
    for shape in (torch.tensor([8]), [torch.tensor(8)]):
        torch.testing.assert_close(
            fusedops.layer_norm(x, shape), torch.nn.functional.layer_norm(x, (8,))
        )
        torch.testing.assert_close(
            fusedops.rms_norm(x, shape), torch.nn.functional.rms_norm(x, (8,))
        )


def test_star_import_does_not_replace_nn() -> None:
    scope: dict[str, Any] = {"nn": nn}
    exec("from fusedops import *", scope)
    assert scope["nn"] is nn
