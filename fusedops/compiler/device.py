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
