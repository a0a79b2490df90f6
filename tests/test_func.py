"""torch.func: grad, vjp, jvp, vmap and their compositions, functional_call, and forward-mode automatic differentiation.

All in fp64, against the same transform of the fp64 reference. Both sides then differ by rounding alone; values and
derivatives are of order one to a hundred, so 1e-9 is far above rounding and far below any mistake.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from fusedops.core.spec import Sample, Spec
from fusedops.nn import FusedBiasDropoutAddLayerNorm, FusedLayerNorm, FusedRMSNorm
from masks import DROPOUT_SPECS
from support import ALL_SPECS, as_tuple, call, oracle, random_like

ROWS, COLS = 5, 12

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
droppers = pytest.mark.parametrize("spec", DROPOUT_SPECS, ids=lambda spec: spec.name)


def _sample(spec: Spec, device: torch.device, p: float = 0.25, rows: int = ROWS, cols: int = COLS) -> Sample:
    """Everything present and random, the sum returned where that can be asked."""
    made = spec.benchmark((rows, cols), torch.float64, device)
    options = {**made.options, **({"p": p} if spec.has_dropout else {})}
    if "return_sum" in inspect.signature(spec.call).parameters:
        options["return_sum"] = True
    return Sample(made.name, made.tensors, options)


def _pair(spec: Spec, sample: Sample) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]:
    """The operator and its oracle as functions of the tensors that are there, and those tensors."""
    names = [name for name in spec.tensors if sample.tensors.get(name) is not None]
    ours, theirs = call(spec, sample), oracle(spec, sample)
    fused = lambda *values: ours(dict(zip(names, values, strict=True)))  # noqa: E731
    reference = lambda *values: theirs(dict(zip(names, values, strict=True)))  # noqa: E731
    return fused, reference, tuple(sample.tensors[name] for name in names)  # type: ignore[misc]


def _close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def _loss(function: Callable[..., Any], weights: list[Tensor]) -> Callable[..., Tensor]:
    """A scalar with a random gradient: a plain sum's is zero through a LayerNorm."""
    return lambda *values: sum((o * w).sum() for o, w in zip(function(*values), weights, strict=True))


@every
def test_grad(spec: Spec, device: torch.device) -> None:
    fused, reference, tensors = _pair(spec, _sample(spec, device))
    weights = random_like(fused(*tensors))
    argnums = tuple(range(len(tensors)))
    _close(*(func.grad(_loss(f, weights), argnums)(*tensors) for f in (fused, reference)))
    _close(*(func.grad_and_value(_loss(f, weights), 0)(*tensors) for f in (fused, reference)))


@every
def test_vjp(spec: Spec, device: torch.device) -> None:
    fused, reference, tensors = _pair(spec, _sample(spec, device))
    weights = tuple(random_like(fused(*tensors)))
    (ours, pull), (theirs, pull_reference) = func.vjp(fused, *tensors), func.vjp(reference, *tensors)
    _close(ours, theirs)
    _close(pull(weights), pull_reference(weights))


@every
def test_jvp(spec: Spec, device: torch.device) -> None:
    """Along all arguments at once, and along each alone (an absent tangent takes another path)."""
    fused, reference, tensors = _pair(spec, _sample(spec, device))
    tangents = tuple(random_like(tensors, seed=3))
    ours, theirs = (func.jvp(f, tensors, tangents) for f in (fused, reference))
    _close(ours, theirs)
    assert all(tangent.any() for tangent in ours[1])
    for i in range(len(tensors)):

        def along(f: Callable[..., Any], i: int = i) -> Any:
            return func.jvp(lambda t: f(*tensors[:i], t, *tensors[i + 1 :]), (tensors[i],), (tangents[i],))

        _close(along(fused), along(reference))


@every
def test_forward_mode(spec: Spec, device: torch.device) -> None:
    """torch.autograd.forward_ad, outside torch.func; and the two modes agree: <c, Jv> = <J'c, v>."""
    fused, reference, tensors = _pair(spec, _sample(spec, device))
    tangents = random_like(tensors, seed=5)
    with forward_ad.dual_level():
        outputs = fused(*(forward_ad.make_dual(t, v) for t, v in zip(tensors, tangents, strict=True)))
        forward = [forward_ad.unpack_dual(output).tangent for output in outputs]
    _close(tuple(forward), func.jvp(reference, tensors, tuple(tangents))[1])
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = fused(*leaves)
    cotangents = random_like(outputs, seed=6)
    grads = torch.autograd.grad(outputs, leaves, cotangents)
    along = sum((c * t).sum() for c, t in zip(cotangents, forward, strict=True))
    _close(along, sum((g * v).sum() for g, v in zip(grads, tangents, strict=True)))


@every
def test_jacobians_and_hessian(spec: Spec, device: torch.device) -> None:
    fused, reference, tensors = _pair(spec, _sample(spec, device, rows=2, cols=3))
    for argnum in range(len(tensors)):
        _close(*(func.jacrev(f, argnum)(*tensors) for f in (fused, reference)))
        _close(*(func.jacfwd(f, argnum, **_randomness(spec))(*tensors) for f in (fused, reference)))
    weights = random_like(fused(*tensors))
    # A square, as bias_dropout_add is linear.
    square = lambda f: lambda *values: _loss(f, weights)(*values) ** 2  # noqa: E731
    hessian = lambda f: func.jacfwd(func.jacrev(square(f)), **_randomness(spec))(*tensors)  # noqa: E731
    _close(hessian(fused), hessian(reference))


def _randomness(spec: Spec) -> dict[str, str]:
    """jacfwd maps over directions with the function inside: all must see one mask. jacrev draws before it maps."""
    return {"randomness": "same"} if spec.has_dropout else {}


# --- vmap ----------------------------------------------------------------------------------------------------------

BATCH = 3


def _batched(tensors: tuple[Tensor, ...], mapped: tuple[int, ...], dim: int) -> tuple[list[Tensor], list[int | None]]:
    """The tensors, those at ``mapped`` with a batch dimension at ``dim``; and vmap's in_dims."""
    stacked, in_dims = [], []
    for i, tensor in enumerate(tensors):
        here = min(dim, tensor.dim()) if i in mapped else None
        in_dims.append(here)
        many = torch.stack([tensor * (1.0 + 0.1 * b) + 0.01 * b for b in range(BATCH)], here or 0)
        stacked.append(tensor if here is None else many)
    return stacked, in_dims


def _loop(function: Callable[..., Any], values: list[Tensor], in_dims: list[int | None]) -> tuple[Tensor, ...]:
    slices = [[v if d is None else v.select(d, b) for v, d in zip(values, in_dims, strict=True)] for b in range(BATCH)]
    return tuple(torch.stack(outputs) for outputs in zip(*(function(*one) for one in slices), strict=True))


def _present(spec: Spec) -> list[Tensor]:
    """The tensors that the samples here have."""
    tensors = spec.benchmark((ROWS, COLS), torch.float64, torch.device("meta")).tensors
    return [t for name in spec.tensors if (t := tensors.get(name)) is not None]


def _matrices(spec: Spec) -> tuple[int, ...]:
    """All that is as large as the rows."""
    return tuple(i for i, t in enumerate(_present(spec)) if t.dim() > 1)


def _subsets(spec: Spec) -> list[tuple[int, ...]]:
    """Rows alone, all that is as large as they are, each argument alone, and everything."""
    count = len(_present(spec))
    return list(dict.fromkeys([(0,), _matrices(spec), *((i,) for i in range(count)), tuple(range(count))]))


@pytest.mark.parametrize(("spec", "mapped"), [(s, m) for s in ALL_SPECS for m in _subsets(s)],
                         ids=lambda v: v.name if isinstance(v, Spec) else "mapped" + "".join(map(str, v)))  # fmt: skip
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(spec: Spec, mapped: tuple[int, ...], dim: int, device: torch.device) -> None:
    fused, reference, tensors = _pair(spec, _sample(spec, device, p=0.0))
    values, in_dims = _batched(tensors, mapped, dim)
    _close(func.vmap(fused, in_dims=tuple(in_dims))(*values), _loop(reference, values, in_dims))


@every
def test_per_sample_gradients(spec: Spec, device: torch.device) -> None:
    """vmap over grad: the gradient of every parameter for every sample apart."""
    fused, reference, tensors = _pair(spec, _sample(spec, device, p=0.0))
    weights = random_like(fused(*tensors))
    values, in_dims = _batched(tensors, _matrices(spec), 0)
    argnums = tuple(range(len(tensors)))
    ours = func.vmap(func.grad(_loss(fused, weights), argnums), in_dims=tuple(in_dims))(*values)
    _close(ours, _loop(func.grad(_loss(reference, weights), argnums), values, in_dims))


@every
def test_vmap_of_jvp(spec: Spec, device: torch.device) -> None:
    fused, reference, tensors = _pair(spec, _sample(spec, device, p=0.0))
    tangents = tuple(random_like(tensors, seed=3))
    values, in_dims = _batched(tensors, (0,), 0)
    push = lambda f: lambda *v: func.jvp(f, v, tangents)[1]  # noqa: E731
    _close(func.vmap(push(fused), in_dims=tuple(in_dims))(*values), _loop(push(reference), values, in_dims))


@every
def test_nested_vmap(spec: Spec, device: torch.device) -> None:
    fused, reference, tensors = _pair(spec, _sample(spec, device, p=0.0))
    rows = torch.stack([torch.stack([tensors[0] + 0.1 * a - 0.2 * b for a in range(2)]) for b in range(2)])
    one = lambda f: lambda t: f(t, *tensors[1:])  # noqa: E731
    for i, output in enumerate(func.vmap(func.vmap(one(fused)))(rows)):
        _close(output, torch.stack([torch.stack([one(reference)(rows[b, a])[i] for a in range(2)]) for b in range(2)]))


# --- randomness under vmap -----------------------------------------------------------------------------------------


def _absent(spec: Spec) -> dict[str, None]:
    return {"residual": None} if "residual" in spec.tensors else {}


def _masks(spec: Spec, device: torch.device, randomness: str) -> Tensor:
    """The keep mask of every sample of a vmapped call; no residual, so that a dropped element is zero in the sum."""
    sample = _sample(spec, device, p=0.5, rows=6, cols=40)
    tensors = {name: t for name, t in sample.tensors.items() if name != "residual"}
    first = spec.tensors[0]
    rows = tensors.pop(first)
    assert rows is not None
    tensors |= _absent(spec)
    function = lambda value: as_tuple(spec.call(**{first: value, **tensors}, **sample.options))[-1]  # noqa: E731
    return func.vmap(function, randomness=randomness)(torch.stack([rows, rows, rows])) != 0.0


@droppers
def test_vmap_refuses_randomness_by_default(spec: Spec, device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        _masks(spec, device, "error")


@droppers
def test_vmap_different(spec: Spec, device: torch.device) -> None:
    masks = _masks(spec, device, "different")
    assert all(not torch.equal(masks[a], masks[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert not torch.equal(masks, _masks(spec, device, "different"))
    assert 0.4 < masks.double().mean().item() < 0.6


@droppers
def test_vmap_same(spec: Spec, device: torch.device) -> None:
    masks = _masks(spec, device, "same")
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks, _masks(spec, device, "same"))
    assert 0.4 < masks[0].double().mean().item() < 0.6


@droppers
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmapped_gradient_has_the_forwards_mask(spec: Spec, randomness: str, device: torch.device) -> None:
    sample = _sample(spec, device, p=0.5, rows=6, cols=40)
    tensors = {name: t for name, t in sample.tensors.items() if name != "residual"}
    first = spec.tensors[0]
    rows = tensors.pop(first)
    assert rows is not None
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2)]

    def loss(value: Tensor) -> tuple[Tensor, Tensor]:
        outputs = as_tuple(spec.call(**{first: value, **tensors, **_absent(spec)}, **sample.options))
        return sum((o * w).sum() for o, w in zip(outputs, weights, strict=False)), outputs[-1]

    many = torch.stack([rows, rows * 2, rows - 3])
    grads, sums = func.vmap(func.grad(loss, has_aux=True), randomness=randomness)(many)
    assert torch.equal(grads != 0.0, sums != 0.0)
    assert 0.3 < (grads != 0.0).double().mean().item() < 0.7


@droppers
@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_batched_pullback(spec: Spec, randomness: str, device: torch.device) -> None:
    """A forward outside vmap has one mask: every cotangent that is vmapped afterwards meets that one."""
    fused, _, tensors = _pair(spec, _sample(spec, device))
    outputs, pull = func.vjp(fused, *tensors)
    cotangents = tuple(torch.stack(random_like([o] * BATCH, seed=i)) * torch.arange(1.0, BATCH + 1, device=device,
                       dtype=o.dtype).view(-1, *(1,) * o.dim()) for i, o in enumerate(outputs))  # fmt: skip
    together = func.vmap(pull, randomness=randomness)(cotangents)
    apart = [pull(tuple(c[b] for c in cotangents)) for b in range(BATCH)]
    _close(together, tuple(torch.stack(grads) for grads in zip(*apart, strict=True)))


@pytest.mark.parametrize(("spec", "mapped"), [(s, m) for s in DROPOUT_SPECS for m in ("rows", *_absent(s))],
                         ids=lambda v: v.name if isinstance(v, Spec) else v)  # fmt: skip
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_of_jvp_drops_as_the_forward(spec: Spec, mapped: str, randomness: str, device: torch.device) -> None:
    """The derivative along x is that of the scaled mask: zero exactly where the value has lost x."""
    sample = _sample(spec, device, p=0.5, rows=6, cols=40)
    tensors = dict(sample.tensors)
    first = spec.tensors[0]
    residual = torch.zeros(6, 40, device=device, dtype=torch.float64)
    one = torch.ones_like(residual)

    def push(rows: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        values = {**tensors, first: rows, **dict.fromkeys(_absent(spec), residual)}
        run = lambda x: as_tuple(spec.call(**{**values, first: x}, **sample.options))[-1]  # noqa: E731
        return func.jvp(run, (rows,), (one,))

    rows = tensors[first]
    assert rows is not None
    many = [t.expand(BATCH, 6, 40) if n == mapped else t for n, t in (("rows", rows), ("residual", residual))]
    in_dims = (0, None) if mapped == "rows" else (None, 0)
    sums, tangents = func.vmap(push, in_dims=in_dims, randomness=randomness)(*many)
    assert torch.equal(sums != 0.0, tangents != 0.0)
    assert 0.3 < (sums != 0.0).double().mean().item() < 0.7


@every
def test_batched_grads_outside_func(spec: Spec, device: torch.device) -> None:
    """``is_grads_batched``: the forward ran outside any transform, the backward runs under vmap."""
    fused, _, tensors = _pair(spec, _sample(spec, device))
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = fused(*leaves)
    cotangents = [torch.stack([c, -2.0 * c, c.square()]) for c in random_like(outputs)]
    together = torch.autograd.grad(outputs, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(outputs, leaves, [c[b] for c in cotangents], retain_graph=True) for b in range(3)]
    _close(together, tuple(torch.stack(grads) for grads in zip(*apart, strict=True)))


# --- modules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused,twin", [(FusedLayerNorm, torch.nn.LayerNorm), (FusedRMSNorm, torch.nn.RMSNorm)])
def test_functional_call(fused: type[torch.nn.Module], twin: type[torch.nn.Module], device: torch.device) -> None:
    ours, theirs = (kind(COLS, device=device, dtype=torch.float64) for kind in (fused, twin))
    x = torch.randn(ROWS, COLS, device=device, dtype=torch.float64)
    state = {name: torch.randn_like(value) for name, value in ours.state_dict().items()}
    cotangent = torch.randn_like(x)
    grads = [
        func.grad(lambda s, m=m: (func.functional_call(m, s, (x,)) * cotangent).sum())(state) for m in (ours, theirs)
    ]
    _close(*grads)
    assert all((parameter == parameter[0]).all() for parameter in ours.parameters()), "the module itself was changed"


def test_ensemble(device: torch.device) -> None:
    """A stack of modules, vmapped over their parameters."""
    modules = [FusedBiasDropoutAddLayerNorm(COLS, p=0.0, device=device, dtype=torch.float64) for _ in range(BATCH)]
    for module in modules:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    x, bias, residual = (torch.randn(s, device=device, dtype=torch.float64) for s in ((4, COLS), (COLS,), (4, COLS)))
    params, buffers = func.stack_module_state(modules)
    run = lambda p, b: func.functional_call(modules[0], (p, b), (x, bias, residual))  # noqa: E731
    _close(func.vmap(run)(params, buffers), torch.stack([module(x, bias, residual) for module in modules]))
