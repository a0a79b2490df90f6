"""One kernel for slices of several lengths: numbers become numbers of slices, nothing else may differ."""

from __future__ import annotations

import pytest

from fusedops.compiler.horizontal.unifying import outline, unified
from fusedops.compiler.kernel import Kernel


def _kernel(body: str) -> Kernel:
    return Kernel("slice", f"@triton.jit\ndef slice(\n    x,\n):\n    {body}\n", ())


def _body(kernel: Kernel) -> str:
    """Return the last line of a kernel's source."""
    return kernel.source.rstrip().rpartition("\n")[2].strip()


@pytest.mark.parametrize(
    ("bodies", "unified_body", "numbers"),
    [
        (("v = 0.5 * x", "v = 0.25 * x"), "v = number0 * x", [(0.5, 0.25)]),
        (("v = 5e-05 * x", "v = 1.5e+16 * x"), "v = number0 * x", [(5e-05, 1.5e16)]),
        (("v = x + 24", "v = x + 16"), "v = x + number0", [(24, 16)]),
        # An integer among floats is a float: a kernel has one type.
        (("v = 2.0 * x", "v = 3 * x"), "v = number0 * x", [(2.0, 3.0)]),
        # Equal numbers stay, and the same numbers have one name.
        (("v = 2 * x", "v = 2 * x"), "v = 2 * x", []),
        (("f(7, 1, 7, 8)", "f(9, 1, 9, 7)"), "f(number0, 1, number0, number1)", [(7, 9), (8, 7)]),
        # Of these texts only the last is a number.
        (("v12 = x.f3(a_4, 5)", "v12 = x.f3(a_4, 6)"), "v12 = x.f3(a_4, number0)", [(5, 6)]),
    ],
)
def test_numbers_that_differ_become_parameters(
    bodies: tuple[str, str], unified_body: str, numbers: list[tuple[float, ...]]
) -> None:
    kernel, values = unified([_kernel(body) for body in bodies])
    assert _body(kernel) == unified_body
    assert values == numbers
    assert [list(map(type, row)) for row in values] == [list(map(type, row)) for row in numbers]
    names = "".join(f"    number{index},\n" for index in range(len(numbers)))
    assert f"def slice(\n{names}    x,\n):" in kernel.source


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("v1 = x * 2", "v2 = x * 2"),
        ("v = x.f3(1)", "v = x.f4(1)"),
        ("v = a_1 * 2", "v = a_2 * 2"),
        ("v = x * 2", "v = x + 2"),
        ("v = x * 2", "v = x * -2"),
        ("v = x * 2", "v = x * n"),
        ("v = x * 2", "v = x * (2 + 2)"),
    ],
)
def test_kernels_that_differ_in_more_than_numbers_are_refused(first: str, second: str) -> None:
    """Names, attributes, operators and signs are no numbers."""
    kernels = [_kernel(first), _kernel(second)]
    assert outline(kernels[0].source) != outline(kernels[1].source)
    with pytest.raises(ValueError, match="the kernels of 2 lengths differ"):
        unified(kernels)
