"""`fusedops.compile` puts rotary embeddings by complex numbers into regions.

Complex operators that no region takes give the same results as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from backends import Backend, randn
from fusedops.backend import entry
from fusedops.backend.graphs import is_tensor, name_of, tensors_of
from fusedops.backend.report import CompileReport
from support import DEVICE, as_tuple

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def _angles(length: int, width: int) -> Tensor:
    """Return complex numbers of length one, for each position and pair of columns."""
    angles = torch.outer(torch.arange(length), torch.linspace(1, 0.1, width))
    return torch.polar(torch.ones_like(angles), angles).to(DEVICE)


def _rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Return x with rotary embeddings, computed as in Llama."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(-2).type_as(x)


class _Attention(nn.Module):
    """A part of a decoder, with norms of queries and keys."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin
        self.query, self.key = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.of_queries, self.of_keys = nn.RMSNorm(8), nn.RMSNorm(8)
        self.freqs: Tensor
        self.register_buffer("freqs", _angles(16, 4), persistent=False)

    def forward(self, x: Tensor, freqs: Tensor, positions: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 8)) for layer in (self.query, self.key)]
        freqs = _FREQS[self.origin](self, freqs, positions)
        query = _rotated(self.of_queries(heads[0]), freqs)
        key = _rotated(self.of_keys(heads[1]), freqs)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, key, is_causal=True)


# The frequencies that a model uses, by their origin.
_FREQS: dict[str, Callable[[_Attention, Tensor, Tensor], Tensor]] = {
    "argument": lambda model, freqs, positions: freqs.view(1, freqs.shape[0], 1, -1),
    "buffer": lambda model, freqs, positions: model.freqs[: freqs.shape[0], None],
    "positions": lambda model, freqs, positions: model.freqs[positions][:, :, None, :],
    "polar": lambda model, freqs, positions: torch.polar(freqs.abs(), freqs.angle())[:, None],
    "conjugate": lambda model, freqs, positions: freqs.conj()[None, :, None],
}


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(6, device=DEVICE).expand(2, -1)
    return randn(2, 6, 32), _angles(6, 4), positions


def _results(call: Callable[..., Tensor], model: nn.Module, inputs: Sequence[Tensor]) -> list[Any]:
    """Return the output, and the gradients of the first input and of the parameters."""
    x, *others = inputs
    leaf = x.clone().requires_grad_()
    output = call(leaf, *others)
    return [output, *torch.autograd.grad(output.sin().sum(), [leaf, *model.parameters()])]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("origin", _FREQS)
def test_rotary_is_in_the_region_of_the_norm(origin: str, dynamic: bool) -> None:
    model, backend = _Attention(origin).to(DEVICE), Backend()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    inputs = _inputs()
    results, expected = _results(compiled, model, inputs), _results(model, model, inputs)
    for ours, eager in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, eager, **_CLOSE)
    assert not backend.report.left
    assert len(backend.report.fused) == 2
    for region in backend.report.fused:
        # On a GPU `F.rms_norm` is one operator.
        assert "stack" in region.operators
        assert not {"rsqrt", "_fused_rms_norm"}.isdisjoint(region.operators)
        # The inputs are the heads, the weight, and the frequencies as one real tensor.
        assert region.program is not None
        structure = region.program.structure
        assert len(structure.inputs) == 3
        assert len(structure.outputs) == 1


def _compiled(function: Callable[..., Any], *inputs: Tensor) -> tuple[torch.fx.Graph, Any]:
    """Return the graph that the backend makes of a function, and the function's results."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, values: Any) -> Any:
        report = CompileReport()
        graphs.append(entry._with_operators(gm, values, report))
        assert not report.left
        return graphs[0].forward

    results = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return graphs[0].graph, results


def _complex_operators(graph: torch.fx.Graph) -> list[str]:
    """Return the names of the operators whose results are complex, in their order."""
    nodes = [node for node in graph.nodes if is_tensor(node) and name_of(node)]
    return [name_of(node) for node in nodes if tensors_of([node])[0].is_complex()]


_PAIRS = torch.view_as_complex

# Functions of a complex tensor and of pairs, with the complex operators that are left in the graph.
_FUNCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "product": (lambda z, x: torch.view_as_real(_PAIRS(x) * z), []),
    "parts": (lambda z, x: ((z * _PAIRS(x)).real, (z + z.conj()).imag, z.conj().imag), []),
    "length": (lambda z, x: (z - _PAIRS(x)).abs() + torch.complex(x, x).abs().sum(-1), []),
    "views": (lambda z, x: (z.transpose(0, 1)[:, None] / 2)[..., 1:].real, []),
    "of a copy": (lambda z, x: (z.clone() * z).real, []),
    "factor without dimensions": (lambda z, x: (z * x.double().sum()).real, []),
    "returned": (lambda z, x: z * _PAIRS(x), ["view_as_complex", "mul"]),
    "also returned": (lambda z, x: _with_real_part(z * 2), ["mul"]),
    "unknown": (lambda z, x: (z.exp() * _PAIRS(x)).real, ["exp"]),
    "of another library": (lambda z, x: torch.fft.fft(x[..., 0] * (z * z).real).real, ["_fft_r2c"]),
    "number": (lambda z, x: (z * 1j).real, ["mul"]),
    "cast": (lambda z, x: (z.to(torch.complex128) * z).real, ["_to_copy"]),
    "changed": (lambda z, x: _changed(z * 2).real, ["mul", "add_"]),
    "changed pairs": (lambda z, x: _changed_pairs(x * 2), []),
}


def _with_real_part(z: Tensor) -> tuple[Tensor, Tensor]:
    return z, z.real


def _changed(z: Tensor) -> Tensor:
    """Change in place a tensor that has a real view."""
    parts = torch.view_as_real(z)
    z.add_(1)
    return z * parts[..., 0]


def _changed_pairs(x: Tensor) -> Tensor:
    """Change in place a real tensor that has a complex view."""
    z = _PAIRS(x)
    copy = z.clone()
    x.add_(1)
    return torch.view_as_real(z * copy)


@pytest.mark.parametrize("case", _FUNCTIONS)
def test_complex_operators_become_real_ones_where_they_can(case: str) -> None:
    function, left = _FUNCTIONS[case]
    z, x = torch.view_as_complex(randn(3, 5, 4, 2)), randn(3, 5, 4, 2)
    graph, results = _compiled(function, z, x)
    for ours, eager in zip(as_tuple(results), as_tuple(function(z, x)), strict=True):
        torch.testing.assert_close(ours, eager, check_stride=True, **_CLOSE)
    assert _complex_operators(graph) == left


def test_results_of_transposed_complex_tensors_have_the_strides_of_eager_mode() -> None:
    def function(z: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(z.transpose(0, 1) * w)

    z, w = (torch.view_as_complex(randn(*shape, 2)) for shape in ((3, 5, 4), (5, 3, 4)))
    graph, ours = _compiled(function, z, w)
    eager = function(z, w)
    torch.testing.assert_close(ours, eager, check_stride=True, **_CLOSE)
    assert not _complex_operators(graph)


def test_complex_parameter_has_eager_gradient() -> None:
    """By PyTorch's convention it is the gradient of the product times the conjugate of x."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(_PAIRS(x) * w)

    x, w = randn(3, 5, 4, 2), torch.view_as_complex(randn(5, 4, 2))
    gradients = []
    for call in (function, torch.compile(function, backend=Backend(), fullgraph=True)):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, w)]
        gradients.append(torch.autograd.grad(call(*leaves).sin().sum(), leaves))
    for eager, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, **_CLOSE)


def test_rowwise_function_with_complex_numbers_is_one_region() -> None:
    function = fusedops.rowwise(lambda x, pairs: _rotated(x, _PAIRS(pairs)))
    backend, x, freqs = Backend(), randn(2, 6, 4, 8), _angles(6, 4)[:, None]
    compiled = torch.compile(lambda x, pairs: function(x * 1, pairs), backend=backend)
    ours = compiled(x, torch.view_as_real(freqs))
    torch.testing.assert_close(ours, _rotated(x, freqs), **_CLOSE)
    assert [region.functions for region in backend.report.fused] == [("<lambda>",)]
