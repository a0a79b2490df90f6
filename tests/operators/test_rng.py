"""Dropout's random numbers: PyTorch's controls, the kernels' masks, and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

import fusedops
from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import family_of
from fusedops.core.random import rng
from fusedops.core.spec import Spec
from masks import DROPOUT_SPECS, Problem, five_sigma, rng_state, set_rng_state
from support import INTERPRETED, KERNEL_PATH, OFFSET, SEED, drop_threshold, fixed_draw, keep_mask

every = pytest.mark.parametrize("spec", DROPOUT_SPECS, ids=lambda spec: spec.name)


# --- PyTorch's controls ---------------------------------------------------------------------------


@every
def test_manual_seed_reproduces(spec: Spec, device: torch.device) -> None:
    problem = Problem(spec, 6, 40, device)
    torch.manual_seed(11)
    first, second = problem.run(0.5), problem.run(0.5)
    torch.manual_seed(11)
    repeated_first, repeated_second = problem.run(0.5), problem.run(0.5)
    torch.manual_seed(12)
    of_other_seed = problem.run(0.5)
    for a, b in ((first, repeated_first), (second, repeated_second)):
        assert all(torch.equal(x, y) for x, y in zip(a.outputs, b.outputs, strict=True))
        assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)
    # Two masks of 240 fair coins agree with probability 2 ** -240.
    assert not torch.equal(first.forward, second.forward)
    assert not torch.equal(first.forward, of_other_seed.forward)


@every
def test_state_is_the_generators(spec: Spec, device: torch.device) -> None:
    """A saved state reproduces the mask, and dropout advances the generator."""
    problem = Problem(spec, 6, 40, device)
    torch.rand(3, device=device)
    state = rng_state(device)
    first = problem.run(0.5).forward
    assert not torch.equal(rng_state(device), state)
    after = torch.rand(3, device=device)
    set_rng_state(state, device)
    assert torch.equal(problem.run(0.5).forward, first)
    assert torch.equal(torch.rand(3, device=device), after)
    with torch.random.fork_rng():
        set_rng_state(state, device)
        assert torch.equal(problem.run(0.5).forward, first)


@every
@pytest.mark.parametrize(
    "options", [{"p": 0.0}, {"p": 0.5, "training": False}], ids=["p=0", "eval"]
)
def test_nothing_to_drop_draws_nothing(
    spec: Spec, options: dict[str, float], device: torch.device
) -> None:
    problem = Problem(spec, 4, 24, device)
    state = rng_state(device)
    run = problem.run(**options)
    assert torch.equal(rng_state(device), state)
    assert run.forward.all() and run.backward.all()


@every
def test_backward_draws_nothing(spec: Spec, device: torch.device) -> None:
    problem = Problem(spec, 4, 24, device)
    outputs = problem.forward(0.5)
    state = rng_state(device)
    torch.autograd.grad(outputs, problem.rows, [torch.ones_like(o) for o in outputs])
    assert torch.equal(rng_state(device), state)


@every
def test_p_one_drops_all(spec: Spec, device: torch.device) -> None:
    run = Problem(spec, 4, 24, device).run(1.0)
    assert not run.forward.any() and not run.backward.any()
    assert all(t.isfinite().all() for t in (*run.outputs, *run.gradients.values()))


@every
@pytest.mark.parametrize("rows,cols", [(1, 1), (3, 7), (5, 130)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_backward_has_the_forwards_mask(
    spec: Spec, rows: int, cols: int, p: float, device: torch.device
) -> None:
    for _ in range(3):
        run = Problem(spec, rows, cols, device).run(p)
        assert torch.equal(run.forward, run.backward)


# --- on the CPU: PyTorch's own dropout ------------------------------------------------------------

if not KERNEL_PATH:

    @every
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_cpu_mask_is_torchs(
        spec: Spec, dtype: torch.dtype, p: float, device: torch.device
    ) -> None:
        problem = Problem(spec, 6, 40, device, dtype)
        torch.manual_seed(4)
        expected = F.dropout(torch.ones(6, 40, dtype=dtype), p) != 0.0
        state = rng_state(device)
        torch.manual_seed(4)
        assert torch.equal(problem.run(p).forward, expected)
        assert torch.equal(rng_state(device), state)


# --- the kernels: Philox --------------------------------------------------------------------------


@every
@pytest.mark.kernels
@pytest.mark.pairs("cols p")  # one number in 65,536 shows that a threshold is off by one
@pytest.mark.parametrize(
    "rows,cols", [(1, 1), (2, 8), (3, 7), (9, 40), (17, 129), (5, 1000), (2, 20000)]
)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_is_the_oracles(
    spec: Spec, rows: int, cols: int, p: float, device: torch.device
) -> None:
    problem = Problem(spec, rows, cols, device)
    expected = keep_mask(SEED, OFFSET, rows, cols, p).to(device)
    with fixed_draw():
        run = problem.run(p)
    assert torch.equal(run.forward, expected)
    assert torch.equal(run.backward, expected)


@every
@pytest.mark.kernels
@pytest.mark.parametrize(
    "seed,offset", [(0, 0), (1, 4), (2**63 - 1, 2**40 + 8), (2**32, 2**32), (2**62 - 1, 2**62 - 1)]
)
def test_mask_uses_all_of_the_state(
    spec: Spec, seed: int, offset: int, device: torch.device
) -> None:
    expected = keep_mask(seed, offset, 5, 40, 0.5).to(device)
    with fixed_draw(seed, offset):
        run = Problem(spec, 5, 40, device).run(0.5)
    assert torch.equal(run.forward, expected)
    assert torch.equal(run.backward, expected)


@every
@pytest.mark.kernels
def test_mask_counts_rows_over_all_leading_dimensions(spec: Spec, device: torch.device) -> None:
    flat = Problem(spec, 12, 20, device)
    with fixed_draw():
        expected = flat.run(0.5).forward
        shaped = Problem(spec, 12, 20, device)
        name = spec.tensors[0]
        shaped.tensors[name] = shaped.rows.detach().view(2, 3, 2, 20).requires_grad_()
        assert torch.equal(shaped.run(0.5).forward.view(12, 20), expected)


@every
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mask_does_not_depend_on_dtype(
    spec: Spec, dtype: torch.dtype, device: torch.device
) -> None:
    """A few kept values may be zero by chance in half precision. Dropped ones always are."""
    expected = keep_mask(SEED, OFFSET, 9, 200, 0.5).to(device)
    with fixed_draw():
        run = Problem(spec, 9, 200, device, dtype).run(0.5)
    for mask in (run.forward, run.backward):
        assert not (mask & ~expected).any()
        # One in 100 of 1800 elements. An independent mask would differ in half of them.
        assert (mask != expected).sum() <= 18


def _configs(key: tuning.TuningKey) -> list[tuning.Config]:
    """The configs that the family may choose for a kernel.

    The interpreter ignores numbers of warps, so under it there is one config for each tiling.
    """
    family = family_of(key.kernel)
    assert family is not None
    result = family.candidates(key)
    if key.kernel == "dropout_add":
        result = [
            *result,
            *[
                tuning.Config(block_n=block, rows=rows, warps=4)
                for block, rows in ((16, 4), (64, 1), (512, 2))
            ],
        ]
    return (
        list({(c.block_n, c.rows, c.stages, c.per_sm): c for c in result}.values())
        if INTERPRETED
        else result
    )


@every
@pytest.mark.kernels
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_is_the_same_in_all_configs(
    spec: Spec, direction: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows are cut into tiles, rows share a tile, and programs have one or more tiles."""
    rows, cols = (9, 1300) if device.type == "cuda" else (5, 300)
    problem = Problem(spec, rows, cols, device, dtype)
    with tuning.collected_keys() as keys:
        problem.run(0.5)
    key = list(keys)[0 if direction == "forward" else 1]
    expected = keep_mask(SEED, OFFSET, rows, cols, 0.5).to(device)
    count = 0
    for config in _configs(key):
        with fixed_draw(), tuning.forced(key.kernel, config):
            try:
                run = problem.run(0.5)
            except OutOfResources:
                continue  # a candidate may need more shared memory than this device has
        count += 1
        for mask in (run.forward, run.backward):
            assert not (mask & ~expected).any(), config
            # Half-precision numbers are zero by chance now and then; fp32 ones are not.
            assert (mask != expected).sum() <= (
                0 if dtype == torch.float32 else expected.numel() // 100
            ), config
    assert count > 2


@pytest.mark.kernels
def test_threshold_has_sixteen_bits() -> None:
    """A p between 0 and 1 always drops some elements and keeps some."""
    for p in (0.0, 1e-9, 1 / 65536, 0.1, 0.5, 1 - 1e-9, 1.0):
        assert rng.threshold(p) == drop_threshold(p)
        assert rng.keep_probability(p) == 1.0 - drop_threshold(p) / 65536
    assert rng.threshold(1e-9) > 0 and rng.threshold(1 - 1e-9) < 65536


@every
@pytest.mark.kernels
@pytest.mark.parametrize("p", [1e-7, 0.1, 0.3, 1 - 2.4 / 65536])
def test_scale_makes_the_expectation_exact(spec: Spec, p: float, device: torch.device) -> None:
    """Kept values are divided by the probability of being kept, which is 1 - p in 16 bits.

    With p = 1 - 2.4/65536 this is 2/65536, so the scale is 32768; 1/(1 - p) would be 27307.
    """
    kept = 65536 - drop_threshold(p)
    problem = Problem(spec, 8, 4096, device, torch.float64)
    problem.drop_ones()
    # The first offset at which any element is kept. If 2 in 65536 are, often none of 32768 is.
    masks = (
        (offset, keep_mask(SEED, offset, 8, 4096, p)) for offset in range(OFFSET, OFFSET + 400, 4)
    )
    offset, expected = next(pair for pair in masks if pair[1].any())
    with fixed_draw(SEED, offset):
        values = problem.forward(p)[-1].cpu()
    # The scale may be formed in fp32 before it is widened: two roundings of half an ulp each.
    torch.testing.assert_close(
        values[expected], torch.full_like(values[expected], 65536 / kept), rtol=1.2e-7, atol=0.0
    )
    assert not values[~expected].any()


# --- statistics -----------------------------------------------------------------------------------

ROWS, COLS = (64, 1000) if not INTERPRETED else (64, 500)


@every
@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_keep_rate(spec: Spec, p: float, device: torch.device) -> None:
    keep = Problem(spec, ROWS, COLS, device).forward(p)[-1] != 0.0
    probability = rng.keep_probability(p) if KERNEL_PATH else 1.0 - p
    count = ROWS * COLS
    assert abs(keep.sum().item() - count * probability) <= five_sigma(count, probability)
    # No row and no column is favoured: each of their sums is within six sigma of the mean.
    for dim, trials in ((1, COLS), (0, ROWS)):
        sums = keep.sum(dim).double()
        assert (sums - trials * probability).abs().max().item() <= 1.2 * five_sigma(
            trials, probability
        )


@every
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mean_is_kept(spec: Spec, p: float, device: torch.device) -> None:
    """The mean of dropout of ones is 1; the standard deviation of a value is sqrt(p / (1 - p))."""
    problem = Problem(spec, ROWS, COLS, device)
    problem.drop_ones()
    mean = problem.forward(p)[-1].double().mean().item()
    assert abs(mean - 1.0) <= 5.0 * math.sqrt(p / (1.0 - p) / (ROWS * COLS)) + 1e-5


@every
def test_neighbours_are_independent(spec: Spec, device: torch.device) -> None:
    """A mask agrees with its own shifts and with the next call's mask in half of the elements.

    Eight columns share one Philox call, so the shifts cover those eight columns and their edges.
    """
    problem = Problem(spec, ROWS, COLS, device)
    keep, following = (problem.forward(0.5)[-1] != 0.0 for _ in range(2))
    pairs = [(keep[:, s:], keep[:, :-s]) for s in (*range(1, 10), 16, 64)]
    pairs += [(keep[s:], keep[:-s]) for s in (1, 2, 4, 8)]
    pairs += [(keep, following), (keep[1:], following[:-1]), (keep[:, 1:], following[:, :-1])]
    for a, b in pairs:
        equal = (a == b).sum().item()
        assert abs(equal - a.numel() / 2) <= five_sigma(a.numel(), 0.5)


@pytest.mark.gpu
def test_generator_moves_on_as_for_torchs_dropout(device: torch.device) -> None:
    """Offsets grow in multiples of four, as PyTorch's own operators expect."""
    generator = torch.cuda.default_generators[device.index or 0]
    at_first = generator.get_offset()
    x = torch.randn(4, 32, device=device)
    after_randn = generator.get_offset()
    fusedops.bias_dropout_add(x, None, None, p=0.5)
    assert after_randn > at_first
    assert generator.get_offset() > after_randn
    assert generator.get_offset() % 4 == 0
    F.dropout(x, 0.5)
    assert generator.get_offset() % 4 == 0
