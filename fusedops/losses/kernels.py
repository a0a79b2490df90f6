"""The kernel of the losses: multiplies gradients by one number, unless it is one."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["elements"])
def scale_kernel(gradient, scale, elements, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    """Multiplies the elements of ``gradient`` by the number at ``scale``.

    The gradient of a loss is nearly always one, which only the device knows. Then no element is
    read.
    """
    factor = tl.load(scale).to(ACC)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK_N
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK_N, elements, step):
            places = start + tl.arange(0, BLOCK_N)
            mask = places < elements
            values = tl.load(gradient + places, mask=mask, other=0.0).to(ACC)
            tl.store(gradient + places, (values * factor).to(gradient.dtype.element_ty), mask=mask)
