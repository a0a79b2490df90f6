"""Recognises norms by what they compute: reads a class's forward, and runs it on small inputs.

The forward is read first. If it has only arithmetic, and no branch on its input, it computes one
formula for all inputs. So if it agrees with an operator on random rows, it agrees on all rows. The
runs then determine which of the operators' formulas it computes, and where it rounds:

    arithmetic.case_of      read the methods: attributes, numbers, no side effects
    samples.Probe           random rows and weights, and runs of the forward
    forms._formula          in fp32: kind, weight, bias, offset and eps
    forms._with_rounding    in all dtypes: where it rounds
    forms._with_autocast    in half precision: whether GPU autocast widens the output

The runs are on the CPU, on a module that is created for them. The user's module is not changed.
"""

from .forms import Form, form, other_norm, other_rounding, same_code

__all__ = ["Form", "form", "other_norm", "other_rounding", "same_code"]
