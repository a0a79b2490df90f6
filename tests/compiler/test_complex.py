"""Complex numbers within row-wise functions: values, gradients, launches and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from rowwise_checks import check, kernels, randn, rowwise
from rowwise_functions import SAMPLES, RowwiseFunction

_Function = Callable[[Tensor, Tensor, Tensor], Any]


def _of_heads(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> _Function:
    """Wraps a function of complex tensors as one of real tensors.

    ``function`` takes complex heads, complex frequencies of the positions, and real factors; it
    returns a complex tensor. The returned function takes and returns pairs of real numbers instead.
    """

    def of_pairs(x: Tensor, freqs: Tensor, factor: Tensor) -> Tensor:
        z, w = torch.view_as_complex(x), torch.view_as_complex(freqs)
        return torch.view_as_real(function(z, w, factor))

    return of_pairs


_COMPLEX: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda z, w, factor: z * w,
    "product with heads behind": lambda z, w, factor: w * z,
    "square": lambda z, w, factor: z * z,
    "turned back": lambda z, w, factor: z * w.conj(),
    "conjugate": lambda z, w, factor: (z * w).conj().resolve_conj(),
    "conjugate of heads": lambda z, w, factor: z.conj() * w,
    "sum": lambda z, w, factor: z + w,
    "difference": lambda z, w, factor: torch.sub(w, z, alpha=0.5),
    "negative": lambda z, w, factor: -z * w,
    "with a real tensor": lambda z, w, factor: factor * (z * w) * factor,
    "divided by a real tensor": lambda z, w, factor: z / (1 + factor.square()),
    "with numbers": lambda z, w, factor: 2 * (z * w) / 3,
    "of parts": lambda z, w, factor: torch.complex(z.real * factor, z.imag - z.real),
    "of a real part and a vector": lambda z, w, factor: torch.complex(z.real, w.imag[0, 0]) * w,
    "broadcast by a view": lambda z, w, factor: z * w.view(1, z.shape[1], 1, z.shape[-1]),
    "broadcast by indices": lambda z, w, factor: z * w[None, ..., :].expand(1, -1, -1, -1),
    "transposed": lambda z, w, factor: (z.transpose(1, -2) * w.transpose(0, 1)).transpose(-3, 2),
    "permuted": lambda z, w, factor: z * w.permute(1, 0, 2).permute((1, 0, -1)),
    "half of the columns": lambda z, w, factor: z[..., :4] * w[..., 4:],
    "every other column": lambda z, w, factor: z[..., ::2] * w[:, 0, None, 1::2],
    "detached": lambda z, w, factor: z * z.detach() + w,
    "without gradients": lambda z, w, factor: z * _without_gradients(w),
    "normalised": lambda z, w, factor: z / (1 + z.abs()),
    "imaginary part of a conjugate": lambda z, w, factor: torch.complex(z.conj().imag, z.real),
}


@torch.no_grad()
def _without_gradients(w: Tensor) -> Tensor:
    return w * w


def _tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(11)
    shapes = {"x": (2, 3, 2, 8, 2), "freqs": (3, 1, 8, 2), "factor": (3, 1, 8)}
    return {name: randn(*shape, dtype=dtype) for name, shape in shapes.items()}


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", _COMPLEX)
def test_values_and_gradients(case: str, dtype: torch.dtype) -> None:
    function = _of_heads(_COMPLEX[case])
    tensors = _tensors(dtype)
    sample = RowwiseFunction(case, function, lambda rows: {})
    names = _names_with_gradients(function, tensors)
    check(sample, fusedops.rowwise(function, strict=True), tensors, names)


def _names_with_gradients(function: _Function, tensors: dict[str, Tensor]) -> list[str]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    output = function(**leaves)
    grads = torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
    return [name for name, grad in zip(leaves, grads, strict=True) if grad is not None]


@kernels
def test_gradient_of_the_absolute_value_of_zero_is_zero() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.view_as_complex(x).abs()

    x = randn(2, 3, 8, 2)
    x[0] = 0.0
    x[1, 0, :, 0] = 0.0
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for call, leaf in zip((function, fusedops.rowwise(function, strict=True)), leaves, strict=True):
        lengths = call(leaf)
        lengths.sum().backward()
        torch.testing.assert_close(lengths.detach(), x.norm(dim=-1))
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_rotary_is_one_load_and_one_store_of_pairs() -> None:
    """The forward loads three tensors as pairs. The backward also loads a gradient as pairs."""
    sample = SAMPLES["complex_rotary"]
    fused = rowwise(sample)
    source = fused.source(*sample.tensors(torch.bfloat16).values())
    forward, backward = source.split("def backward_kernel")
    assert forward.count("split_pairs") == 3 and forward.count("join_pairs") == 1
    assert backward.count("split_pairs") == 4 and "cols * 2" not in forward
    ((match,),) = fused._programs.known.values()
    assert len(match.program.structure.unrolled) == 1


# --- refusals -------------------------------------------------------------------------------------

_PAIRS = torch.view_as_complex


_REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "exp": (lambda x: _PAIRS(x).exp().real, "exp of complex numbers"),
    "angle": (lambda x: _PAIRS(x).angle(), "angle of complex numbers"),
    "polar": (lambda x: torch.polar(x, x).real, "polar of complex numbers"),
    "sum with a real tensor": (lambda x: (_PAIRS(x) + x[..., 0]).real, "add of complex numbers"),
    "complex quotient": (lambda x: (x[..., 0] / _PAIRS(x)).real, "div of complex numbers"),
    "complex number": (lambda x: (_PAIRS(x) * 1j).real, "mul of complex numbers"),
    "in place": (lambda x: _PAIRS(x * 2).mul_(2).real, "mul_ of complex numbers"),
    "dtype": (lambda x: _PAIRS(x).to(torch.complex128).real, "_to_copy of complex numbers"),
    "several results": (lambda x: _PAIRS(x).split(4, -1)[0].real, "split of complex numbers"),
    "dropout": (lambda x: F.dropout(_PAIRS(x)).real, "an operator of a complex tensor"),
}


@kernels
@pytest.mark.parametrize("case", _REFUSED)
def test_complex_operator_without_a_kernel_is_refused(case: str) -> None:
    """The message names the operator and the file."""
    function, message = _REFUSED[case]
    with pytest.raises(fusedops.NotRowwiseError, match=message) as caught:
        fusedops.rowwise(function, strict=True)(randn(3, 4, 8, 2))
    assert "test_complex" in str(caught.value)


@kernels
def test_complex_result_is_refused() -> None:
    with pytest.raises(fusedops.NotRowwiseError, match=r"returns a complex tensor.*view_as_real"):
        fusedops.rowwise(lambda x: _PAIRS(x) * 2, strict=True)(randn(3, 8, 2))


def _rotary(q: Tensor, freqs: Tensor) -> Tensor:
    """Llama's rotary embedding."""
    pairs = _PAIRS(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(-2).type_as(q)


@kernels
@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_arguments_are_read_as_pairs(conjugate: bool) -> None:
    """Their gradients are complex. A tensor with a lazy conjugation is read as its conjugate."""
    q, freqs = randn(2, 5, 4, 16), _PAIRS(randn(5, 1, 8, 2))
    fused = fusedops.rowwise(_rotary, strict=True)

    def output_and_gradients(function: Callable[..., Tensor], q: Tensor, freqs: Tensor) -> Any:
        out = function(q, freqs.conj() if conjugate else freqs)
        return [out, *torch.autograd.grad(out.sin().sum(), (q, freqs))]

    for rows in (5, 3):
        leaves = [t.clone().requires_grad_() for t in (q[:, :rows], freqs[:rows])]
        exact = [t.detach().cdouble() if t.is_complex() else t.detach().double() for t in leaves]
        exact = [t.requires_grad_() for t in exact]
        results = output_and_gradients(fused, *leaves)
        expected = output_and_gradients(_rotary, *exact)
        # The tolerance allows eight roundings of numbers of order one, and a sum over eight heads.
        for result, value in zip(results, expected, strict=True):
            tolerance = 64 * torch.finfo(torch.float32).eps * value.detach().abs().max().item()
            torch.testing.assert_close(
                result.detach(), value.detach().to(result.dtype), rtol=0, atol=tolerance
            )
    assert fused.explain(q, freqs).tensors[1][0] == "freqs"


@kernels
def test_captured_complex_tensor_is_replaced_by_its_conjugate() -> None:
    freqs, q = _PAIRS(randn(8, 2)), randn(2, 5, 4, 16)
    function = fusedops.rowwise(lambda q: _rotary(q, freqs), strict=True)
    torch.testing.assert_close(function(q), _rotary(q, freqs))
    freqs = freqs.conj()
    torch.testing.assert_close(function(q), _rotary(q, freqs))
