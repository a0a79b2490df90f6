"""torch.func: grad, vjp, jvp, vmap, their compositions, functional_call; and forward mode.

Under a transform or in forward mode the reference implementation runs in PyTorch's operators, and
a kernel draws the keep mask; no other kernel is launched. Results are compared in fp64 with the
same transform of the formula in elementary operators (`pairs.elementary`). test_derivatives.py
tests second and higher derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from fusedops.core.launches import launch
from fusedops.core.spec import Spec
from fusedops.nn import FusedBiasDropoutAddLayerNorm, FusedLayerNorm, FusedRMSNorm
from masks import DROPOUT_SPECS
from pairs import Pair, close, loss, pair, small_sample
from support import ALL_SPECS, KERNEL_PATH, as_tuple, random_like

ROWS, COLS = 5, 12

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
droppers = pytest.mark.parametrize("spec", DROPOUT_SPECS, ids=lambda spec: spec.name)

Function = Callable[..., Any]


def _pair(spec: Spec, device: torch.device, p: float = 0.25) -> Pair:
    return pair(spec, device, p, (ROWS, COLS))


def _compare(both: Pair, evaluate: Callable[[Function], Any]) -> None:
    """Asserts that ``evaluate`` returns the same for the operator and for the formula.

    With the operator, it launches no other kernel than that of the keep mask.
    """
    with launch.record() as names:
        ours = evaluate(both.ours)
    assert set(names) == ({"keep_scale_kernel"} if KERNEL_PATH and both.sample.p else set())
    close(ours, evaluate(both.theirs))


@every
def test_grad(spec: Spec, device: torch.device) -> None:
    both = _pair(spec, device)
    weights = both.cotangents()
    argnums = tuple(range(len(both.tensors)))
    _compare(both, lambda f: func.grad(loss(f, weights), argnums)(*both.tensors))
    _compare(both, lambda f: func.grad_and_value(loss(f, weights), 0)(*both.tensors))


@every
def test_vjp(spec: Spec, device: torch.device) -> None:
    both = _pair(spec, device)
    cotangents = tuple(both.cotangents())

    def product(function: Function) -> Any:
        outputs, pull = func.vjp(function, *both.tensors)
        return outputs, pull(cotangents)

    _compare(both, product)


@every
def test_jvp(spec: Spec, device: torch.device) -> None:
    """With tangents of all arguments at once, and of each alone."""
    both = _pair(spec, device)
    tensors, tangents = both.tensors, tuple(random_like(both.tensors, seed=3))
    _compare(both, lambda f: func.jvp(f, tensors, tangents))
    for i in range(len(tensors)):

        def jvp_of_one(f: Function, i: int = i) -> Any:
            return func.jvp(
                lambda t: f(*tensors[:i], t, *tensors[i + 1 :]), (tensors[i],), (tangents[i],)
            )

        _compare(both, jvp_of_one)


@every
def test_forward_mode(spec: Spec, device: torch.device) -> None:
    """torch.autograd.forward_ad without torch.func."""
    both = _pair(spec, device)
    tangents = random_like(both.tensors, seed=5)

    def tangents_of(function: Function) -> list[Tensor]:
        with forward_ad.dual_level():
            outputs = function(*map(forward_ad.make_dual, both.tensors, tangents))
            return [forward_ad.unpack_dual(output).tangent for output in outputs]

    _compare(both, tangents_of)


@every
def test_jacobians(spec: Spec, device: torch.device) -> None:
    both = pair(spec, device, shape=(2, 3))
    # jacfwd calls the function under vmap, so all directions must have the same mask. jacrev calls
    # the function once, outside vmap.
    randomness = {"randomness": "same"} if spec.has_dropout else {}
    for argnum in range(len(both.tensors)):
        _compare(both, lambda f, n=argnum: func.jacrev(f, n)(*both.tensors))
        _compare(both, lambda f, n=argnum: func.jacfwd(f, n, **randomness)(*both.tensors))


# --- vmap -----------------------------------------------------------------------------------------

BATCH = 3


def _batched(
    tensors: tuple[Tensor, ...], mapped: tuple[int, ...], dim: int
) -> tuple[list[Tensor], list[int | None]]:
    """Returns the tensors, those at ``mapped`` with a batch dimension at ``dim``, and in_dims."""
    stacked, in_dims = [], []
    for i, tensor in enumerate(tensors):
        batch_dim = min(dim, tensor.dim()) if i in mapped else None
        in_dims.append(batch_dim)
        if batch_dim is not None:
            samples = [tensor * (1.0 + 0.1 * b) + 0.01 * b for b in range(BATCH)]
            tensor = torch.stack(samples, batch_dim)
        stacked.append(tensor)
    return stacked, in_dims


def _mapped(
    both: Pair, mapped: tuple[int, ...], transform: Callable[[Function], Function], dim: int = 0
) -> None:
    """Compares vmap of ``transform(operator)`` with a loop of ``transform(formula)``."""
    values, in_dims = _batched(both.tensors, mapped, dim)
    with launch.record() as names:
        mapped_results = func.vmap(transform(both.ours), in_dims=tuple(in_dims))(*values)
    assert names == []
    slices = [
        [v if d is None else v.select(d, b) for v, d in zip(values, in_dims, strict=True)]
        for b in range(BATCH)
    ]
    looped = zip(*(transform(both.theirs)(*inputs) for inputs in slices), strict=True)
    close(tuple(mapped_results), tuple(map(torch.stack, looped)))


def _present(spec: Spec) -> list[Tensor]:
    """The tensors of the samples in these tests."""
    tensors = spec.benchmark((ROWS, COLS), torch.float64, torch.device("meta")).tensors
    return [t for name in spec.tensors if (t := tensors.get(name)) is not None]


def _matrices(spec: Spec) -> tuple[int, ...]:
    """The positions of the tensors that are as large as the rows."""
    return tuple(i for i, t in enumerate(_present(spec)) if t.dim() > 1)


def _subsets(spec: Spec) -> list[tuple[int, ...]]:
    """Positions to map: the rows, all tensors as large as they, each argument, and all."""
    count = len(_present(spec))
    return list(
        dict.fromkeys([(0,), _matrices(spec), *((i,) for i in range(count)), tuple(range(count))])
    )


@pytest.mark.parametrize(
    ("spec", "mapped"),
    [(s, m) for s in ALL_SPECS for m in _subsets(s)],
    ids=lambda v: v.name if isinstance(v, Spec) else "mapped" + "".join(map(str, v)),
)
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(spec: Spec, mapped: tuple[int, ...], dim: int, device: torch.device) -> None:
    _mapped(_pair(spec, device, p=0.0), mapped, lambda f: f, dim)


@every
def test_per_sample_gradients(spec: Spec, device: torch.device) -> None:
    """vmap over grad gives the gradients of all parameters for each sample."""
    both = _pair(spec, device, p=0.0)
    weights, argnums = both.cotangents(), tuple(range(len(both.tensors)))
    _mapped(both, _matrices(spec), lambda f: func.grad(loss(f, weights), argnums))


@every
def test_vmap_of_jvp(spec: Spec, device: torch.device) -> None:
    both = _pair(spec, device, p=0.0)
    tangents = tuple(random_like(both.tensors, seed=3))
    _mapped(both, (0,), lambda f: lambda *values: func.jvp(f, values, tangents)[1])


@every
def test_nested_vmap(spec: Spec, device: torch.device) -> None:
    both = _pair(spec, device, p=0.0)
    rows, *rest = both.tensors
    many = torch.stack(
        [torch.stack([rows + 0.1 * a - 0.2 * b for a in range(2)]) for b in range(2)]
    )
    for i, output in enumerate(func.vmap(func.vmap(lambda t: both.ours(t, *rest)))(many)):
        expected = [
            torch.stack([both.theirs(many[b, a], *rest)[i] for a in range(2)]) for b in range(2)
        ]
        close(output, torch.stack(expected))


# --- randomness under vmap ------------------------------------------------------------------------


def _absent(spec: Spec) -> dict[str, None]:
    """The arguments of a call without a residual, if the operator has one."""
    return {"residual": None} if "residual" in spec.tensors else {}


def _masks(spec: Spec, device: torch.device, randomness: str) -> Tensor:
    """The keep masks of all samples of a call under vmap.

    The call has no residual, so dropped elements are zero in the sum.
    """
    sample = small_sample(spec, 0.5, (6, 40), device=device)
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
def test_vmap_with_different_randomness_draws_a_mask_for_each_sample(
    spec: Spec, device: torch.device
) -> None:
    masks = _masks(spec, device, "different")
    assert all(not torch.equal(masks[a], masks[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert not torch.equal(masks, _masks(spec, device, "different"))
    assert 0.4 < masks.double().mean().item() < 0.6


@droppers
def test_vmap_with_same_randomness_draws_one_mask(spec: Spec, device: torch.device) -> None:
    masks = _masks(spec, device, "same")
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks, _masks(spec, device, "same"))
    assert 0.4 < masks[0].double().mean().item() < 0.6


@droppers
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmapped_gradient_has_the_forwards_mask(
    spec: Spec, randomness: str, device: torch.device
) -> None:
    sample = small_sample(spec, 0.5, (6, 40), device=device)
    tensors = {name: t for name, t in sample.tensors.items() if name != "residual"}
    first = spec.tensors[0]
    rows = tensors.pop(first)
    assert rows is not None
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(device)
        for _ in range(2)
    ]

    def loss(value: Tensor) -> tuple[Tensor, Tensor]:
        outputs = as_tuple(
            spec.call(**{first: value, **tensors, **_absent(spec)}, **sample.options)
        )
        return sum((o * w).sum() for o, w in zip(outputs, weights, strict=False)), outputs[-1]

    many = torch.stack([rows, rows * 2, rows - 3])
    grads, sums = func.vmap(func.grad(loss, has_aux=True), randomness=randomness)(many)
    assert torch.equal(grads != 0.0, sums != 0.0)
    assert 0.3 < (grads != 0.0).double().mean().item() < 0.7


@droppers
@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_batched_pullback(spec: Spec, randomness: str, device: torch.device) -> None:
    """A forward outside vmap draws one mask, for all cotangents of a mapped backward."""
    both = _pair(spec, device)
    outputs, pull = func.vjp(both.ours, *both.tensors)
    cotangents = tuple(
        torch.stack(random_like([o] * BATCH, seed=i))
        * torch.arange(1.0, BATCH + 1, device=device, dtype=o.dtype).view(-1, *(1,) * o.dim())
        for i, o in enumerate(outputs)
    )
    mapped = func.vmap(pull, randomness=randomness)(cotangents)
    looped = [pull(tuple(c[b] for c in cotangents)) for b in range(BATCH)]
    close(mapped, tuple(torch.stack(grads) for grads in zip(*looped, strict=True)))


@pytest.mark.parametrize(
    ("spec", "mapped"),
    [(s, m) for s in DROPOUT_SPECS for m in ("rows", *_absent(s))],
    ids=lambda v: v.name if isinstance(v, Spec) else v,
)
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_of_jvp_drops_as_the_forward(
    spec: Spec, mapped: str, randomness: str, device: torch.device
) -> None:
    """The tangent of x is multiplied by the scaled mask, so it is zero where x was dropped."""
    sample = small_sample(spec, 0.5, (6, 40), device=device)
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
    many = [
        t.expand(BATCH, 6, 40) if n == mapped else t
        for n, t in (("rows", rows), ("residual", residual))
    ]
    in_dims = (0, None) if mapped == "rows" else (None, 0)
    sums, tangents = func.vmap(push, in_dims=in_dims, randomness=randomness)(*many)
    assert torch.equal(sums != 0.0, tangents != 0.0)
    assert 0.3 < (sums != 0.0).double().mean().item() < 0.7


@every
def test_batched_grads_outside_func(spec: Spec, device: torch.device) -> None:
    """With ``is_grads_batched`` the backward runs under vmap, and the forward did not."""
    both = _pair(spec, device)
    leaves = both.leaves()
    outputs = both.ours(*leaves)
    cotangents = [torch.stack([c, -2.0 * c, c.square()]) for c in random_like(outputs)]
    batched = torch.autograd.grad(
        outputs, leaves, cotangents, is_grads_batched=True, retain_graph=True
    )
    looped = [
        torch.autograd.grad(outputs, leaves, [c[b] for c in cotangents], retain_graph=True)
        for b in range(3)
    ]
    close(batched, tuple(torch.stack(grads) for grads in zip(*looped, strict=True)))


# --- modules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fused,native", [(FusedLayerNorm, torch.nn.LayerNorm), (FusedRMSNorm, torch.nn.RMSNorm)]
)
def test_functional_call(
    fused: type[torch.nn.Module], native: type[torch.nn.Module], device: torch.device
) -> None:
    ours, theirs = (kind(COLS, device=device, dtype=torch.float64) for kind in (fused, native))
    x = torch.randn(ROWS, COLS, device=device, dtype=torch.float64)
    state = {name: torch.randn_like(value) for name, value in ours.state_dict().items()}
    cotangent = torch.randn_like(x)
    grads = [
        func.grad(lambda s, m=m: (func.functional_call(m, s, (x,)) * cotangent).sum())(state)
        for m in (ours, theirs)
    ]
    close(*grads)
    assert all((parameter == parameter[0]).all() for parameter in ours.parameters()), (
        "the module itself was changed"
    )


def test_stacked_modules_are_vmapped_over_parameters(device: torch.device) -> None:
    """The parameters of several modules are stacked, and vmap runs all modules at once."""
    modules = [
        FusedBiasDropoutAddLayerNorm(COLS, p=0.0, device=device, dtype=torch.float64)
        for _ in range(BATCH)
    ]
    for module in modules:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    x, bias, residual = (
        torch.randn(s, device=device, dtype=torch.float64) for s in ((4, COLS), (COLS,), (4, COLS))
    )
    params, buffers = func.stack_module_state(modules)
    run = lambda p, b: func.functional_call(modules[0], (p, b), (x, bias, residual))  # noqa: E731
    close(
        func.vmap(run)(params, buffers),
        torch.stack([module(x, bias, residual) for module in modules]),
    )
