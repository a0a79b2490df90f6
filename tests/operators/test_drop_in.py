"""Drop-in operators refuse, accept and lay out as PyTorch's do, and compile and save little.

A refused call must not change a later call, nor a good call a later refusal.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops.core.launches import launch
from fusedops.core.spec import Spec
from fusedops.nn import FusedGELU, FusedLayerNorm, FusedRMSNorm
from pairs import close, pair
from support import ALL_SPECS, EVERY_SPEC, INTERPRETED, KERNEL_PATH, as_tuple

Function = Callable[..., Any]

# --- refusals do not depend on earlier calls ------------------------------------------------------


# One spec for each functional; specs of the same functional share their bad samples.
_DISTINCT = list({spec.bad_samples: spec for spec in reversed(EVERY_SPEC)}.values())


@pytest.mark.parametrize("spec", _DISTINCT, ids=lambda spec: spec.name)
def test_bad_calls_among_good_ones(spec: Spec, device: torch.device) -> None:
    """A bad call is refused before and after a good one."""
    bad = list(spec.bad_samples(device))
    for _ in range(2):
        for sample in bad:
            with pytest.raises(sample.error, match=sample.match):
                spec.call(**sample.tensors, **sample.options)
        good = spec.benchmark((4, 8), torch.float32, device)
        outputs = as_tuple(spec.call(**good.tensors, **good.options))
        assert not any(output.isnan().any() for output in outputs)


# Bad shapes. Some equal a good shape, or have the same hash. Each case has a different width, so
# that no other case's call has the same key in the call cache.
BAD_SHAPES: dict[str, Callable[[int], Any]] = {
    "float": lambda n: float(n),
    "float in a tuple": lambda n: (float(n),),
    "complex in a tuple": lambda n: (complex(n),),
    "string": lambda n: str(n),
    "string in a tuple": lambda n: (str(n),),
    "NumPy's float": lambda n: (np.float64(n),),
    "negative": lambda n: (-n,),
    "none": lambda n: (None,),
    "empty": lambda n: (),
}
GOOD_SHAPES: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n,
    "tuple": lambda n: (n,),
    "list": lambda n: [n],
    "size": lambda n: torch.Size([n]),
    "NumPy's int": lambda n: np.int64(n),
    "NumPy's int in a list": lambda n: [np.int64(n)],
    "tensor in a tuple": lambda n: (torch.tensor(n),),
}
NORMS = [
    pytest.param(fusedops.layer_norm, F.layer_norm, id="layer_norm"),
    pytest.param(fusedops.rms_norm, F.rms_norm, id="rms_norm"),
]


def _expected(native: Function, x: Tensor) -> Tensor:
    return native(x, x.shape[-1:], None, eps=1e-5)


@pytest.mark.parametrize("ours,native", NORMS)
@pytest.mark.parametrize("first", ["bad", "good"])
@pytest.mark.parametrize("bad", BAD_SHAPES)
def test_bad_normalized_shape_is_refused_before_and_after_good_ones(
    ours: Function, native: Function, first: str, bad: str, device: torch.device
) -> None:
    cols = 50 + 2 * list(BAD_SHAPES).index(bad) + (first == "bad")
    x = torch.randn(3, cols, dtype=torch.float64, device=device)
    for kind in ("bad", "good", "bad", "good") if first == "bad" else ("good", "bad", "good"):
        if kind == "bad":
            with pytest.raises((TypeError, ValueError), match=r"normalized_shape|expected"):
                ours(x, BAD_SHAPES[bad](cols), eps=1e-5)
            continue
        for shape in GOOD_SHAPES.values():
            close(ours(x, shape(cols), eps=1e-5), _expected(native, x))


@pytest.mark.parametrize("ours,native", NORMS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_normalized_shape_of_a_boolean_is_refused(
    ours: Function, native: Function, first: bool, device: torch.device
) -> None:
    """True equals 1, but PyTorch refuses it."""
    rows = 1 if first else 2  # another key in the call cache for each case
    x = torch.randn(3, rows, 1, dtype=torch.float64, device=device)
    if not first:
        close(ours(x, (1,), eps=1e-5), _expected(native, x))
    with pytest.raises(TypeError, match="normalized_shape"):
        ours(x, (True,), eps=1e-5)
    close(ours(x, (1,), eps=1e-5), _expected(native, x))


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_integer_and_float_constants_have_the_same_results(
    spec: Spec, device: torch.device
) -> None:
    """``eps`` and ``p`` are integers in one call and floats in another, in either order."""
    both = pair(spec, device, p=0.0)
    options = dict(both.sample.options)
    for kinds in ((float, int), (int, float)):
        results = []
        for kind in kinds:
            numbers = {
                name: kind(1 if name == "eps" else 0) for name in ("eps", "p") if name in options
            }
            results.append(as_tuple(spec.call(**both.sample.tensors, **{**options, **numbers})))
        close(*results)


# --- layouts --------------------------------------------------------------------------------------


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _permuted(t: Tensor) -> Tensor:
    """A dense tensor whose dimensions have another order in memory."""
    return t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": _channels_last,
    "permuted": _permuted,
    "transposed": lambda t: t.mT.contiguous().mT,
}
ELEMENTWISE: dict[str, tuple[int, Function, Function]] = {
    "gelu": (1, fusedops.gelu, F.gelu),
    "gelu tanh": (1, lambda x: fusedops.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": (1, lambda x: fusedops.bias_act(x, None, "silu"), F.silu),
    "geglu": (2, fusedops.geglu, lambda gate, up: F.gelu(gate) * up),
    "swiglu": (2, fusedops.swiglu, lambda gate, up: F.silu(gate) * up),
}
elementwise = pytest.mark.parametrize("name", ELEMENTWISE)


def _copies(call: Callable[[], Any]) -> list[str]:
    """The names of the operators in ``call`` that copy a tensor."""
    with torch.autograd.profiler.profile() as profile:
        call()
    return [
        event.name
        for event in profile.function_events
        if event.name in ("aten::copy_", "aten::clone")
    ]


@elementwise
@pytest.mark.parametrize("layout", DENSE)
def test_outputs_have_the_layouts_of_dense_inputs(
    name: str, layout: str, device: torch.device
) -> None:
    """Output and gradients have the strides of PyTorch's, and no tensor is copied."""
    count, ours, native = ELEMENTWISE[name]
    tensors = [
        DENSE[layout](torch.randn(2, 8, 3, 4, device=device, dtype=torch.float64))
        for _ in range(count)
    ]
    dy = DENSE[layout](torch.randn(2, 8, 3, 4, device=device, dtype=torch.float64))

    def run(function: Function) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        output = function(*leaves)
        return (output, *torch.autograd.grad(output, leaves, dy))

    result, expected = run(ours), run(native)
    close(result, expected)
    assert [t.stride() for t in result] == [t.stride() for t in expected]
    if KERNEL_PATH and not INTERPRETED:  # the interpreter copies tensors itself
        assert _copies(lambda: run(ours)) == []


@elementwise
def test_arguments_and_cotangents_of_different_layouts(name: str, device: torch.device) -> None:
    """One of the layouts is not dense."""
    count, ours, native = ELEMENTWISE[name]
    make = lambda: torch.randn(2, 8, 3, 4, device=device, dtype=torch.float64)  # noqa: E731
    layouts = [*DENSE.values(), Tensor.contiguous, lambda t: torch.stack((t, t), -1)[..., 0]]
    for first, second in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        leaves = [layout(make()).requires_grad_() for layout in (first, second)[:count]]
        dy = second(make())
        results = [(y := f(*leaves), *torch.autograd.grad(y, leaves, dy)) for f in (ours, native)]
        close(*results)


@pytest.mark.parametrize("name", ["gelu", "gelu tanh"])
def test_tensors_without_dimensions(name: str, device: torch.device) -> None:
    """`F.gelu` accepts them."""
    _, ours, native = ELEMENTWISE[name]
    x = torch.randn((), device=device, dtype=torch.float64, requires_grad=True)
    results = [(y := f(x), *torch.autograd.grad(y, x)) for f in (ours, native)]
    assert results[0][0].shape == ()
    close(*results)


NESTED = [
    pytest.param(FusedLayerNorm, nn.LayerNorm, (8,), torch.strided, id="layer norm, strided"),
    pytest.param(FusedLayerNorm, nn.LayerNorm, (8,), torch.jagged, id="layer norm, jagged"),
    pytest.param(FusedRMSNorm, nn.RMSNorm, (8, 1e-5), torch.jagged, id="rms norm, jagged"),
    pytest.param(FusedGELU, nn.GELU, (), torch.strided, id="gelu, strided"),
    pytest.param(FusedGELU, nn.GELU, (), torch.jagged, id="gelu, jagged"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("fused,native,args,layout", NESTED)
def test_nested_tensors(
    fused: type[nn.Module],
    native: type[nn.Module],
    args: tuple[Any, ...],
    layout: torch.layout,
    device: torch.device,
) -> None:
    """Values, gradients and layouts are those of torch.nn's modules that accept nested tensors."""
    rows = [torch.randn(n, 8, device=device) for n in (3, 5)]

    def run(kind: type[nn.Module]) -> list[Tensor]:
        x = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        module = kind(*args).to(device)
        y = module(x)
        assert y.is_nested and y.layout == layout
        # A weighted sum, because the gradient of a plain one is zero through a LayerNorm.
        loss = sum(
            (part * part * torch.arange(1.0, 9.0, device=device)).sum() for part in y.unbind()
        )
        loss.backward()
        assert x.grad is not None and x.grad.is_nested
        return [*y.unbind(), *x.grad.unbind(), *(p.grad for p in module.parameters())]

    # A few roundings of fp32 on values of order one to ten.
    torch.testing.assert_close(run(fused), run(native), rtol=1e-5, atol=1e-4)


# --- compilations and memory ----------------------------------------------------------------------


@pytest.mark.kernels
@elementwise
def test_one_compilation_for_all_lengths(name: str, device: torch.device) -> None:
    """A dense tensor is processed as one vector, whose length is a run-time argument.

    So there is one variant of the forward, and one of the backward.
    """
    count, ours, _ = ELEMENTWISE[name]
    before = launch.variants()
    for length in range(33, 53):
        leaves = [
            torch.randn(2, 8, length, device=device, requires_grad=True) for _ in range(count)
        ]
        torch.autograd.grad(ours(*leaves), leaves, torch.randn(2, 8, length, device=device))
    assert launch.variants() - before <= 2


@pytest.mark.kernels
def test_call_of_many_slices_caches_little_memory(device: torch.device) -> None:
    """A call with another number of rows must not cache the shapes of the slices.

    For each slice it may cache the address: an int of 32 bytes and a pointer of 8. For the rest of
    the call it may use 2 KiB. A ``torch.Size`` of two dimensions would need 56 bytes and a pointer.
    """
    count = 60
    first, second = (
        [torch.randn(rows, 16 + index % 7, device=device) for index in range(count)]
        for rows in (3, 4)
    )
    fusedops.batched_layer_norm_tanh(first)
    gc.collect()
    package_only = [tracemalloc.Filter(True, str(Path(fusedops.__file__).parent / "*"))]
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot().filter_traces(package_only)
        fusedops.batched_layer_norm_tanh(second)
        gc.collect()
        after = tracemalloc.take_snapshot().filter_traces(package_only)
    finally:
        tracemalloc.stop()
    grown = sum(entry.size_diff for entry in after.compare_to(before, "filename"))
    assert grown < count * (32 + 8) + 2048
