"""Device functions that row-wise functions call, beside those of `fusedops.core.device`."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """The logarithm of 1 + x, exact for small x (Kahan): the rounding of 1 + x is divided out."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def expm1(x):
    """exp(x) - 1, exact for small x (Kahan)."""
    u = tl.exp(x)
    near = (u - 1.0) * (x / tl.log(u))
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) > 0.7, u - 1.0, near))


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """The largest element of each row; NaN where there is one, as in PyTorch."""
    return tl.reduce(x, 1, _larger, keep_dims=True)


@triton.jit
def negative_zero(ACC: tl.constexpr):
    """-0.0, which no constant is: Triton takes every zero for the positive one."""
    return tl.full((1, 1), 0.0, ACC) * -1.0
