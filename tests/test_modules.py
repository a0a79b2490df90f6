"""The modules stand in for torch.nn's: constructor, parameters, initial values, state_dict, repr, pickle, copies."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.generation import FusedNoRepeatNGramLogitsProcessor
from fusedops.nn import (
    FusedBatchedLayerNormTanh,
    FusedBiasAct,
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedBiasGELU,
    FusedGEGLU,
    FusedGELU,
    FusedGLU,
    FusedLayerNorm,
    FusedRMSNorm,
    FusedSwiGLU,
)

N = 24


@dataclass(frozen=True)
class Pair:
    """A module and the torch.nn module that it extends; ``options`` go to the fused constructor alone."""

    fused: type[nn.Module]
    twin: type[nn.Module]
    shape: tuple[Any, ...]
    options: dict[str, Any]

    def build(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        return self.fused(*self.shape, **self.options, **options), self.twin(*self.shape, **options)

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
    Pair(FusedBiasDropoutAdd, nn.Dropout, (), {}),
    Pair(FusedBiasDropoutAddLayerNorm, nn.LayerNorm, (N,), {"p": 0.3}),
    Pair(FusedBiasDropoutAddRMSNorm, nn.RMSNorm, (N,), {"p": 0.3}),
]
NORMS = [pair for pair in PAIRS if pair.shape]
RESIDUALS = [pair for pair in PAIRS if pair.with_residual]


def _id(pair: Pair) -> str:
    return pair.fused.__name__


every = pytest.mark.parametrize("pair", PAIRS, ids=_id)
norms = pytest.mark.parametrize("pair", NORMS, ids=_id)


def _randomise(module: nn.Module) -> nn.Module:
    """Weights of one and biases of zero hide what a module leaves out."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def _inputs(pair: Pair, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    made = {"bias": torch.randn(N), "residual": torch.randn(3, 5, N)}
    wanted = list(inspect.signature(pair.fused.forward).parameters)[2:]
    tensors = (torch.randn(3, 5, N), *(made[name] for name in wanted))
    return tuple(t.to(device, dtype) for t in tensors)


def _composite(module: nn.Module, twin: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """What torch.nn computes where nothing is dropped."""
    z: Tensor = sum(inputs[1:], inputs[0])
    return z if isinstance(twin, nn.Dropout) else twin(z)


def _close(actual: Tensor, expected: Tensor) -> None:
    # Both round the same few fp32 operations on values of order one; 24-term sums stay within some ten ulps.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@every
def test_is_the_torch_module(pair: Pair) -> None:
    module, twin = pair.build()
    assert isinstance(module, pair.twin)
    assert {k: v.shape for k, v in module.state_dict().items()} == {k: v.shape for k, v in twin.state_dict().items()}
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in twin.named_parameters()]


@pytest.mark.parametrize("pair", PAIRS[:3], ids=_id)
def test_constructor_is_torchs(pair: Pair) -> None:
    """Same names, order and defaults; what is added is keyword-only."""
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (pair.fused, pair.twin))
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])
    forward = [list(inspect.signature(c.forward).parameters) for c in (pair.fused, pair.twin)]
    assert forward[0] == forward[1]


@every
def test_initial_values_and_generator(pair: Pair) -> None:
    """A model built under a seed has the same weights, and so have the layers built after it."""
    built = []
    for which in (0, 1):
        torch.manual_seed(5)
        maker = (lambda: pair.build()[0], lambda: pair.build()[1])[which]
        built.append((maker().state_dict(), nn.Linear(4, 4).weight))
    (ours, after), (theirs, after_twin) = built
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(after, after_twin)


@norms
def test_state_dict_both_ways(pair: Pair) -> None:
    module, twin = pair.build()
    _randomise(module)
    twin.load_state_dict(module.state_dict())
    for key, value in module.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key])
    _randomise(twin)
    module.load_state_dict(twin.state_dict())
    for key, value in twin.state_dict().items():
        assert torch.equal(value, module.state_dict()[key])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({**twin.state_dict(), "extra": torch.zeros(1)})


def _variants(pair: Pair) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = [{}]
    if pair.shape:
        variants += [{"eps": 0.25}, {"elementwise_affine": False}]
    if pair.twin is nn.GELU:
        variants.append({"approximate": "tanh"})
    if pair.twin is nn.LayerNorm:
        variants.append({"bias": False})
    return variants


@pytest.mark.parametrize(("pair", "options"), [(p, o) for p in PAIRS for o in _variants(p)],
                         ids=lambda v: _id(v) if isinstance(v, Pair) else str(v))  # fmt: skip
def test_values_are_the_composites(pair: Pair, options: dict[str, Any], device: torch.device) -> None:
    """In evaluation, and in training with nothing to drop."""
    module, twin = (_randomise(m).to(device) for m in pair.build(**options))
    twin.load_state_dict(module.state_dict())
    inputs = _inputs(pair, device)
    expected = _composite(module, twin, inputs)
    _close(module.eval()(*inputs), expected)
    if pair.drops:
        module.train()
        module.p = 0.0
        _close(module(*inputs), expected)


@norms
def test_absent_parameters_stay_absent(pair: Pair) -> None:
    module, twin = pair.build(elementwise_affine=False)
    assert list(module.parameters()) == [] and module.weight is None
    assert module.state_dict().keys() == twin.state_dict().keys()
    if pair.twin is nn.LayerNorm:
        module, twin = pair.build(bias=False)
        assert module.bias is None
        assert list(module.state_dict()) == list(twin.state_dict()) == ["weight"]


@every
def test_train_and_eval(pair: Pair, device: torch.device) -> None:
    """Dropout follows the module's mode."""
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
def test_calls_its_functional(pair: Pair, device: torch.device) -> None:
    """Under one seed the module and the functional give the same bits, forward and backward."""
    module, _ = pair.build()
    _randomise(module).to(device)
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
    for a, b in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True):
        assert torch.equal(a, b)
    assert (ours != theirs.detach() + 1).all()


@every
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
def test_copies(pair: Pair, way: str, device: torch.device) -> None:
    module = _randomise(pair.build()[0]).to(device).eval()
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(module))
    elif way == "deepcopy":
        twin = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is type(module) and repr(twin) == repr(module)
    inputs = _inputs(pair, device)
    assert torch.equal(module(*inputs), twin(*inputs))
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.data_ptr() != theirs.data_ptr()


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_dtype(pair: Pair, dtype: torch.dtype, device: torch.device) -> None:
    module, twin = (_randomise(m) for m in pair.build())
    moved = module.half() if dtype == torch.float16 else module.to(dtype)
    assert all(parameter.dtype == dtype for parameter in moved.parameters())
    twin.load_state_dict(module.state_dict())
    twin.to(dtype)
    moved.to(device).eval()
    twin.to(device)
    inputs = _inputs(pair, device, dtype)
    actual = moved(*inputs)
    assert actual.dtype == dtype
    expected = _composite(moved, twin.double(), tuple(t.double() for t in inputs))
    # Values below about 16: one rounding of the output, and of the sum, each half an ulp of the dtype.
    torch.testing.assert_close(
        actual.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
    )


@norms
def test_device_and_dtype_arguments(pair: Pair, device: torch.device) -> None:
    module, _ = pair.build(device=device, dtype=torch.float64)
    assert all(p.dtype == torch.float64 and p.device.type == device.type for p in module.parameters())
    assert pair.build(device="meta")[0].weight.is_meta


@every
def test_repr(pair: Pair) -> None:
    """torch.nn's line, then what differs from it."""
    module, twin = pair.build()
    before, line, extra = module.extra_repr().partition(twin.extra_repr())
    assert line and before == ("'identity', " if "activation" in pair.options else "")
    assert extra == (", p=0.3" if pair.options.get("p") == 0.3 else "")


def test_repr_of_the_options() -> None:
    assert repr(FusedRMSNorm(8, weight_offset=1.0, rounding="gemma")).endswith("weight_offset=1.0, rounding='gemma')")
    module = FusedBiasDropoutAddRMSNorm(8, p=0.1, return_sum=True, save="output")
    assert repr(module).endswith("p=0.1, return_sum=True, save='output')")


@every
def test_hooks(pair: Pair, device: torch.device) -> None:
    module = pair.build()[0].to(device).eval()
    seen: list[str] = []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.register_forward_hook(lambda m, args, output: output * 2)
    module.register_full_backward_hook(lambda m, dx, dy: seen.append("backward"))
    inputs = tuple(t.requires_grad_() for t in _inputs(pair, device))
    output = module(*inputs)
    assert torch.equal(output, 2 * module.forward(*inputs))
    output.backward(torch.randn_like(output))
    assert seen == ["before", "backward"]
    assert all(t.grad is not None and t.grad.any() for t in inputs)


def test_sequential(device: torch.device) -> None:
    """The two drop-in modules in a torch.nn model, trained one step, keep up with torch.nn's own."""

    def model(norms: tuple[type[nn.Module], type[nn.Module]]) -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(N, N), norms[0](N), nn.ReLU(), nn.Linear(N, N), norms[1](N)).to(device)

    ours, theirs = model((FusedLayerNorm, FusedRMSNorm)), model((nn.LayerNorm, nn.RMSNorm))
    x, dy = torch.randn(7, N, device=device), torch.randn(7, N, device=device)
    for net in (ours, theirs):
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        net(x).backward(dy)
        optimiser.step()
    # Ten fp32 operations deep, sums of at most 24 terms of order one: 1e-4 is some hundred ulps.
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_several_normalised_dimensions(device: torch.device) -> None:
    ours, theirs = (_randomise(norm([3, 4])).to(device) for norm in (FusedLayerNorm, nn.LayerNorm))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 4, device=device)
    _close(ours(x), theirs(x))


@pytest.mark.parametrize("fused", [FusedRMSNorm, FusedBiasDropoutAddRMSNorm])
def test_weight_offset_starts_at_a_scale_of_one(fused: type[nn.Module], device: torch.device) -> None:
    module = fused(N, weight_offset=1.0).to(device).eval()
    assert not module.weight.any()
    x = torch.randn(4, N, device=device)
    _close(module(x), nn.RMSNorm(N, device=device)(x))


@pytest.mark.parametrize("fused", [FusedBiasDropoutAddLayerNorm, FusedBiasDropoutAddRMSNorm])
def test_sum_returned(fused: type[nn.Module], device: torch.device) -> None:
    module = fused(N, p=0.0, return_sum=True).to(device)
    x, bias, residual = (torch.randn(s, device=device) for s in ((2, N), (N,), (2, N)))
    y, z = module(x, bias, residual)
    _close(z, x + bias + residual)
    _close(y, pair_twin(fused)(N).to(device)(x + bias + residual))


def pair_twin(fused: type[nn.Module]) -> type[nn.Module]:
    return next(pair.twin for pair in PAIRS if pair.fused is fused)


# --- gated units: two inputs, or the halves of one, and no parameters -------------------------------------------------

GATED = {
    "FusedSwiGLU": (FusedSwiGLU(), fusedops.swiglu),
    "FusedGEGLU": (FusedGEGLU(), fusedops.geglu),
    "FusedGEGLU tanh": (FusedGEGLU("tanh"), lambda *halves: fusedops.geglu(*halves, approximate="tanh")),
    "FusedGLU": (FusedGLU("relu"), lambda *halves: fusedops.glu(*halves, activation="relu")),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_units(name: str, device: torch.device) -> None:
    """Module and functional give the same bits, packed or apart; what there is of state survives a copy."""
    module, functional = GATED[name]
    packed = torch.randn(3, 5, 2 * N, device=device)
    expected = functional(*packed.chunk(2, -1))
    assert expected.any()
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(*packed.chunk(2, -1)), expected)
        assert torch.equal(copied(packed), expected)
        assert repr(copied) == repr(module)
    assert not module.state_dict()


def test_gated_units_differ(device: torch.device) -> None:
    packed = torch.randn(3, 2 * N, device=device)
    outputs = [module(packed) for module, _ in GATED.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[i + 1 :])


def test_bad_activations() -> None:
    for build in (FusedGLU, FusedBiasAct):
        with pytest.raises(ValueError, match=f"{build.__name__}: activation must be one of 'gelu', .*, got 'mish'"):
            build("mish")
    with pytest.raises(ValueError, match=r"FusedBiasAct: p must be in \[0, 1\], got 1.5"):
        FusedBiasAct("relu", 1.5)
    with pytest.raises(ValueError, match="approximate must be one of 'none', 'tanh', got 'fast'"):
        FusedGEGLU("fast")


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_bias_act_calls_its_functional(activation: str, device: torch.device) -> None:
    module, x, bias = FusedBiasAct(activation, 0.4), torch.randn(6, N, device=device), torch.randn(N, device=device)
    torch.manual_seed(3)
    ours = module(x, bias)
    torch.manual_seed(3)
    assert torch.equal(ours, fusedops.bias_act(x, bias, activation, p=0.4))
    assert torch.equal(module.eval()(x, bias), fusedops.bias_act(x, bias, activation))


@pytest.mark.parametrize("fused", [FusedBiasDropoutAddLayerNorm, FusedBiasDropoutAddRMSNorm])
def test_bad_arguments(fused: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"normalized_shape must have one dimension, got \(2, 3\)"):
        fused((2, 3))
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\]"):
            fused(4, p=p)
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\), expected \(\*, 4\)"):
        fused(4, elementwise_affine=False)(torch.randn(2, 5))


# --- constants: what the call would refuse is refused when the module is built ----------------------------------------

X = torch.randn(2, 4)
# A constructor, a call with the same wrong constant, and what that raises.
REFUSED: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda: FusedLayerNorm(4, eps=-1.0), lambda: fusedops.layer_norm(X, 4, eps=-1.0)),
    (lambda: FusedLayerNorm(4, eps="1"), lambda: fusedops.layer_norm(X, 4, eps="1")),
    (lambda: FusedLayerNorm(4, eps=None), lambda: fusedops.layer_norm(X, 4, eps=None)),
    (lambda: FusedLayerNorm(()), lambda: fusedops.layer_norm(X, ())),
    (lambda: FusedLayerNorm(4.0), lambda: fusedops.layer_norm(X, 4.0)),
    (lambda: FusedRMSNorm(4, eps=-1.0), lambda: fusedops.rms_norm(X, 4, eps=-1.0)),
    (lambda: FusedRMSNorm(()), lambda: fusedops.rms_norm(X, ())),
    (lambda: FusedRMSNorm(4, weight_offset=float("inf")), lambda: fusedops.rms_norm(X, 4, weight_offset=float("inf"))),
    (lambda: FusedRMSNorm(4, weight_offset="1"), lambda: fusedops.rms_norm(X, 4, weight_offset="1")),
    (lambda: FusedRMSNorm(4, rounding="gpt"), lambda: fusedops.rms_norm(X, 4, rounding="gpt")),
    *[(lambda p=p: FusedBiasDropoutAdd(p), lambda p=p: fusedops.bias_dropout_add(X, None, None, p=p))
      for p in (-0.1, 1.1, float("nan"), "0.1")],
    *[(lambda o=o: FusedBiasDropoutAddLayerNorm(4, **{"p": 0.1} | o),
       lambda o=o: fusedops.bias_dropout_add_ln(X, None, None, None, None, **{"p": 0.1} | o))
      for o in ({"p": 2.0}, {"eps": -1.0}, {"eps": None}, {"save": "all"})],
    *[(lambda o=o: FusedBiasDropoutAddRMSNorm(4, **{"p": 0.1} | o),
       lambda o=o: fusedops.bias_dropout_add_rms_norm(X, None, None, None, **{"p": 0.1} | o))
      for o in ({"p": "x"}, {"eps": -1.0}, {"save": None}, {"rounding": "gpt"}, {"weight_offset": float("nan")})],
    (lambda: FusedGELU("fast"), lambda: fusedops.gelu(X, "fast")),
    (lambda: FusedBiasGELU(None), lambda: fusedops.bias_gelu(X, None, None)),
    (lambda: FusedGEGLU("fast"), lambda: fusedops.geglu(X, X, "fast")),
    (lambda: FusedGLU("mish"), lambda: fusedops.glu(X, X, "mish")),
    (lambda: FusedBiasAct("mish"), lambda: fusedops.bias_act(X, None, "mish")),
    (lambda: FusedBiasAct("relu", -1.0), lambda: fusedops.bias_act(X, None, "relu", p=-1.0)),
    *[(lambda o=o: FusedBatchedLayerNormTanh(**{"sizes": (1, 3)} | o),
       lambda o=o: fusedops.batched_layer_norm_tanh(X, **{"sizes": (1, 3)} | o))
      for o in ({"sizes": (4, 0)}, {"sizes": ()}, {"sizes": 4}, {"sizes": (4, 0.5)}, {"eps": -1.0},
                {"activation": "mish"})],
    *[(lambda o=o: FusedNoRepeatNGramLogitsProcessor(**{"ngram_size": 3} | o),
       lambda o=o: fusedops.no_repeat_ngram(X.long(), X, **{"ngram_size": 3} | o))
      for o in ({"ngram_size": 0}, {"ngram_size": 2.0}, {"window": 2}, {"window": "8"}, {"prompt_length": -1},
                {"pad_token_id": 0.5})],
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_constants_are_refused_as_the_call_refuses_them(place: int) -> None:
    """The same type and words, under the module's name."""
    build, call = REFUSED[place]
    with pytest.raises((TypeError, ValueError)) as expected:
        call()
    with pytest.raises(type(expected.value)) as caught:
        build()
    name, _, words = str(caught.value).partition(": ")
    assert name.startswith("Fused") and words == str(expected.value).partition(": ")[2]


@pytest.mark.parametrize("norm", [FusedLayerNorm, FusedRMSNorm, FusedBiasDropoutAddLayerNorm])
def test_sizes_that_no_tensor_has(norm: type[nn.Module]) -> None:
    """A call has a tensor to compare them with."""
    with pytest.raises(ValueError, match=rf"{norm.__name__}: normalized_shape must hold no negative size, got \(-1,\)"):
        norm(-1)
    with pytest.raises(TypeError, match=r"normalized_shape must be an int or a sequence of ints, got one of float"):
        norm([4.0])
    assert norm([np.int64(4)]).weight.shape == norm(torch.tensor([4])).weight.shape == (4,)


# --- slices: one module in the place of many ----------------------------------------------------------------------

SIZES = (4, 17, 1, 32)


def _layers(sizes: tuple[int, ...] = SIZES, **options: Any) -> list[nn.LayerNorm]:
    layers = [nn.LayerNorm(size, **options) for size in sizes]
    for layer in layers:
        _randomise(layer)
    return layers


@pytest.mark.parametrize("options", [{}, {"eps": 0.25}, {"elementwise_affine": False}, {"bias": False},
                                     {"dtype": torch.float64}], ids=str)  # fmt: skip
def test_slices_take_over_layers(options: dict[str, Any], device: torch.device) -> None:
    """In each form of input; and what they give back are the layers that they took over."""
    layers = [layer.to(device) for layer in _layers(**options)]
    module = FusedBatchedLayerNormTanh.from_layers(layers)
    slices = [torch.randn(5, size, device=device, dtype=options.get("dtype")) for size in SIZES]
    expected = [layer(x).tanh() for layer, x in zip(layers, slices, strict=True)]
    for ours, theirs in zip(module(slices), expected, strict=True):
        _close(ours, theirs)
    _close(module(torch.cat(slices, 1)), torch.cat(expected, 1))
    module.concat = True
    _close(module(slices), torch.cat(expected, 1))
    for ours, theirs in zip(module.to_layers(), layers, strict=True):
        assert repr(ours) == repr(theirs)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))


def test_slices_of_one_width(device: torch.device) -> None:
    layers = [layer.to(device) for layer in _layers((8,) * 3)]
    x = torch.randn(2, 5, 3, 8, device=device)
    expected = torch.stack([layer(t).tanh() for layer, t in zip(layers, x.unbind(-2), strict=True)], -2)
    _close(FusedBatchedLayerNormTanh.from_layers(layers)(x), expected)
    joined = FusedBatchedLayerNormTanh.from_layers(layers, activation="relu", concat=True)(x)
    _close(joined, torch.stack([layer(t).relu() for layer, t in zip(layers, x.unbind(-2), strict=True)], -2).flatten(2))


def test_slices_keep_what_layers_are() -> None:
    layers = [layer.eval().requires_grad_(False) for layer in _layers()]
    module = FusedBatchedLayerNormTanh.from_layers(layers)
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert not any(p.requires_grad for layer in module.to_layers() for p in layer.parameters())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert all(map(torch.equal, twin.parameters(), module.parameters()))
    assert "4, 17, 1, 32" in repr(module) and "activation='tanh'" in repr(module)
    assert "<20 slices, 60 columns>" in repr(FusedBatchedLayerNormTanh([3] * 20))
    fresh = FusedBatchedLayerNormTanh(SIZES)
    assert fresh.weight.eq(1).all() and fresh.bias.eq(0).all() and list(fresh.state_dict()) == ["weight", "bias"]


def test_bad_layers() -> None:
    build = FusedBatchedLayerNormTanh.from_layers
    for layers, error, match in (
        ([], ValueError, "must hold at least one"),
        ([nn.LayerNorm(3), nn.RMSNorm(3)], TypeError, "layer 1 must be a torch.nn.LayerNorm, got RMSNorm"),
        ([nn.LayerNorm((2, 3))], ValueError, r"layer 0 normalises \(2, 3\)"),
        ([nn.LayerNorm(3), nn.LayerNorm(4, eps=0.1)], ValueError, "layer 1 has eps=0.1"),
        ([nn.LayerNorm(3), nn.LayerNorm(4, bias=False)], ValueError, "layer 1 has .*no bias"),
    ):
        with pytest.raises(error, match=match):
            build(layers)
    with pytest.raises(ValueError, match="activation must be one of"):
        FusedBatchedLayerNormTanh(SIZES, activation="tan")
    with pytest.raises(ValueError, match=r"sizes\[1\] must be at least 1, got 0"):
        FusedBatchedLayerNormTanh((2, 0))
    with pytest.raises(ValueError, match=r"slices has shape \(2, 9\), expected \(\*, 54\) for the sizes of 4 slices"):
        FusedBatchedLayerNormTanh(SIZES)(torch.randn(2, 9))


def test_layers_that_do_more_than_a_norm() -> None:
    """A subclass's dropout would be lost; one that only computes faster is taken."""
    with pytest.raises(TypeError, match=r"layer 1 must be a torch\.nn\.LayerNorm, got FusedBiasDropoutAddLayerNorm"):
        FusedBatchedLayerNormTanh.from_layers([nn.LayerNorm(4), FusedBiasDropoutAddLayerNorm(4, p=0.5)])
    assert FusedBatchedLayerNormTanh.from_layers([FusedLayerNorm(4), nn.LayerNorm(3)]).sizes == (4, 3)


def test_slices_module_refuses() -> None:
    with pytest.raises(ValueError, match="eps must be at least 0, got -1"):
        FusedBatchedLayerNormTanh([4, 4], eps=-1.0)
    with pytest.raises(ValueError, match=r"slices has shape \(\), expected \(\*, 8\)"):
        FusedBatchedLayerNormTanh([4, 4])(torch.tensor(1.0))


def test_normalized_shape_of_tensors(device: torch.device) -> None:
    """As torch.nn takes it."""
    x = torch.randn(3, 8, device=device)
    for shape in (torch.tensor([8]), [torch.tensor(8)]):
        torch.testing.assert_close(fusedops.layer_norm(x, shape), torch.nn.functional.layer_norm(x, (8,)))
        torch.testing.assert_close(fusedops.rms_norm(x, shape), torch.nn.functional.rms_norm(x, (8,)))


def test_a_star_import_leaves_nn_alone() -> None:
    scope: dict[str, Any] = {"nn": nn}
    exec("from fusedops import *", scope)
    assert scope["nn"] is nn


def test_slices_that_nothing_came_of(device: torch.device) -> None:
    """They get no gradient, as layers that were not used get none, and a NaN in one of them is nobody's."""
    slices = [torch.randn(5, size, device=device, requires_grad=True) for size in (3, 8, 4)]
    module = FusedBatchedLayerNormTanh((3, 8, 4), device=device)
    with torch.no_grad():
        slices[1].fill_(float("nan"))
    module(slices)[0].square().sum().backward()
    assert slices[0].grad is not None
    assert slices[1].grad is None
    assert slices[2].grad is None
    for parameter in (module.weight, module.bias):
        assert parameter.grad.isfinite().all()
        assert parameter.grad[:3].any()
        assert not parameter.grad[3:].any()


def test_forgotten_sizes_are_seen_after_a_call_like_it(device: torch.device) -> None:
    weight = torch.randn(8, device=device)
    fusedops.batched_layer_norm_tanh(torch.randn(2, 3, 8, device=device), weight)
    with pytest.raises(ValueError, match="expected sizes with it"):
        fusedops.batched_layer_norm_tanh(torch.randn(3, 8, device=device), weight)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_identitys_derivative_is_one_everywhere(value: float, device: torch.device) -> None:
    x = torch.tensor([[1.0, value]], device=device, requires_grad=True)
    fusedops.bias_act(x, None, "identity").backward(torch.ones(1, 2, device=device))
    assert torch.equal(x.grad, torch.ones_like(x))
