"""Drop-ins with PyTorch's own samples for its operators and modules.

``torch.testing._internal`` has sample inputs and invalid inputs of each operator (OpInfo), and
constructor and forward inputs of each module (ModuleInfo). The tests here are short forms of
PyTorch's generic tests: values, gradients, second derivatives, forward mode and vmap of operators;
construction, state, copies and moves of modules.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.nn import FusedGELU, FusedLayerNorm, FusedRMSNorm
from support import INTERPRETED

pytest.importorskip(
    "expecttest", reason="torch.testing._internal imports it; it is in the extra `test`"
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # about packages that PyTorch's tests need
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

Function = Callable[..., Any]
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = {op.name: op for op in op_db if not op.variant_test_name}


def _activation(activation: str) -> Function:
    return lambda input: fusedops.bias_act(input, None, activation)


def _gated(input: Tensor, dim: int = -1) -> Tensor:
    """`F.glu`, whose gate is the second half."""
    up, gate = input.chunk(2, dim)
    return fusedops.gated_act(gate, up, "sigmoid")


DROP_INS: dict[str, Function] = {
    "nn.functional.layer_norm": fusedops.layer_norm,
    "nn.functional.rms_norm": fusedops.rms_norm,
    "nn.functional.gelu": fusedops.gelu,
    "nn.functional.silu": _activation("silu"),
    "nn.functional.relu": _activation("relu"),
    "tanh": _activation("tanh"),
    "sigmoid": _activation("sigmoid"),
    "nn.functional.glu": _gated,
}


# --- refusals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Calls that PyTorch allows and this library refuses on purpose."""

    applies: Callable[[str, Any], bool]
    error: type[Exception]
    message: str
    reason: str


def _eps(sample: Any) -> Any:
    return sample.kwargs.get("eps")


REFUSALS = (
    Refusal(
        lambda name, s: not s.input.is_floating_point(),
        TypeError,
        "has dtype",
        "the operators take no integers, booleans and complex numbers",
    ),
    Refusal(
        lambda name, s: s.input.dtype not in FLOATING,
        TypeError,
        "has dtype",
        "formats narrower than fp16 have no arithmetic",
    ),
    Refusal(
        lambda name, s: (_eps(s) or 0.0) < 0.0,
        ValueError,
        "eps must be at least 0",
        "a negative eps is a mistake: the root may be of a negative number",
    ),
)


def _refusal(name: str, sample: Any) -> Refusal | None:
    return next((refusal for refusal in REFUSALS if refusal.applies(name, sample)), None)


# --- operators ------------------------------------------------------------------------------------

every_op = pytest.mark.parametrize("name", DROP_INS)
pytestmark = pytest.mark.shared("name", most=3)  # the marks are described in selection.py
_MOST = 3 if INTERPRETED else 6


def _samples(name: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Iterator[Any]:
    """PyTorch's samples, one for each combination of shapes and options."""
    seen: set[str] = set()
    for sample in OPS[name].sample_inputs(device, dtype, **options):
        arguments = (sample.input, *sample.args)
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in arguments]
        kind = f"{shapes} {sorted(sample.kwargs.items())}"
        if kind not in seen:
            seen.add(kind)
            yield sample


def _accepted(
    name: str, dtype: torch.dtype, device: torch.device, most: int = 1000, **options: Any
) -> list[Any]:
    """At most ``most`` of the samples that are not refused, spread over all of them."""
    accepted = [
        sample
        for sample in _samples(name, dtype, device, **options)
        if _refusal(name, sample) is None
    ]
    assert accepted
    step = math.ceil(len(accepted) / most)
    return accepted[::step]


def _call(function: Function, sample: Any) -> Tensor:
    return function(sample.input, *sample.args, **sample.kwargs)


def _tensors(sample: Any) -> tuple[list[Tensor], Callable[..., Any]]:
    """The sample's tensors, and a function ``call(function, *values)``.

    ``call`` runs ``function`` with the sample's arguments, in which ``values`` replace the tensors.
    """
    arguments = [sample.input, *sample.args]
    indices = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]

    def call(function: Function, *values: Tensor) -> Tensor:
        replaced = list(arguments)
        for i, value in zip(indices, values, strict=True):
            replaced[i] = value
        return function(*replaced, **sample.kwargs)

    return [arguments[i] for i in indices], call


@pytest.mark.pairs("name")
@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_values_and_gradients(
    name: str, dtype: torch.dtype, layout: str, device: torch.device
) -> None:
    for sample in _accepted(name, dtype, device, requires_grad=True):
        sample = sample.noncontiguous() if layout == "strided" else sample
        tensors, call = _tensors(sample)
        results = []
        for function in (DROP_INS[name], OPS[name].op):
            leaves = [t.detach().requires_grad_() for t in tensors]
            output = call(function, *leaves)
            cotangent = torch.linspace(-1.0, 2.0, output.numel(), device=device, dtype=dtype)
            grads = torch.autograd.grad(output, leaves, cotangent.view(output.shape))
            results.append((output, *grads))
        # In bf16 PyTorch's own backward rounds between its steps, which costs some ulps of the
        # largest term of a sum. In fp32, terms of the gradients of norms of one or two columns
        # cancel. They are about 10 * rstd, at most 10 / sqrt(eps) = 3162, with errors of 6e-8.
        tolerance = {
            torch.bfloat16: {"rtol": 0.05, "atol": 0.05},
            torch.float32: {"rtol": 1e-5, "atol": 1e-3},
        }.get(dtype, {})
        torch.testing.assert_close(*results, **tolerance)


@every_op
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_other_dtypes_and_arguments_are_refused(name: str, device: torch.device) -> None:
    """`test_values_and_gradients` runs the samples that no entry of `REFUSALS` refuses."""
    for dtype in OPS[name].supported_dtypes(device.type):
        for sample in _samples(name, dtype, device):
            refusal = _refusal(name, sample)
            if refusal is not None:
                with pytest.raises(refusal.error, match=refusal.message):
                    _call(DROP_INS[name], sample)


@pytest.mark.parametrize(
    "name", [name for name in DROP_INS if OPS[name].error_inputs_func is not None]
)
def test_error_inputs(name: str, device: torch.device) -> None:
    """This library, too, refuses what PyTorch refuses. `test_bad_input.py` checks messages."""
    for error in OPS[name].error_inputs(device):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            _call(DROP_INS[name], error.sample_input)


@every_op
def test_derivatives(name: str, device: torch.device) -> None:
    """Finite differences agree with first and second derivatives, in reverse and forward mode."""
    for sample in _accepted(name, torch.float64, device, _MOST, requires_grad=True):
        tensors, call = _tensors(sample)
        leaves = [t.detach().requires_grad_() for t in tensors]
        function = lambda *values, call=call: call(DROP_INS[name], *values)  # noqa: E731
        torch.autograd.gradcheck(function, leaves, fast_mode=True, check_forward_ad=True)
        torch.autograd.gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=True)
        torch.autograd.gradgradcheck(function, leaves, fast_mode=True, check_rev_over_rev=True)


@every_op
def test_vmap(name: str, device: torch.device) -> None:
    """vmap over all tensors, and over the first one alone, equals a loop."""
    for sample in _accepted(name, torch.float64, device, _MOST):
        tensors, call = _tensors(sample)
        batches = [torch.stack([t, 0.5 * t, t - 1.0]) for t in tensors]
        function = lambda *values, call=call: call(DROP_INS[name], *values)  # noqa: E731
        native = [call(OPS[name].op, *(t[b] for t in batches)) for b in range(3)]
        torch.testing.assert_close(torch.func.vmap(function)(*batches), torch.stack(native))
        native = [call(OPS[name].op, batches[0][b], *tensors[1:]) for b in range(3)]
        in_dims = (0, *(None for _ in tensors[1:]))
        torch.testing.assert_close(
            torch.func.vmap(function, in_dims)(batches[0], *tensors[1:]), torch.stack(native)
        )


# --- modules --------------------------------------------------------------------------------------

MODULES = {nn.LayerNorm: FusedLayerNorm, nn.RMSNorm: FusedRMSNorm, nn.GELU: FusedGELU}
INFOS = {info.module_cls: info for info in module_db if info.module_cls in MODULES}
every_module = pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)


def _inputs(
    kind: type[nn.Module], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Any, Any, Any]]:
    """For each of PyTorch's samples: a fused and a native module with one state, and the input."""
    info = INFOS[kind]
    for sample in info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=True, training=True
    ):
        x = sample.forward_input.args[0]
        if INTERPRETED and x.numel() > 500:
            continue
        args, options = sample.constructor_input.args, dict(sample.constructor_input.kwargs)
        if kind is not nn.GELU:  # it has no parameters
            options |= {"device": device, "dtype": dtype}
        fused, native = MODULES[kind](*args, **options), kind(*args, **options)
        with torch.no_grad():
            for parameter in native.parameters():
                parameter.normal_()
        fused.load_state_dict(native.state_dict(), strict=True)
        yield fused, native, x


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_module_forward_and_gradients(
    kind: type[nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    for fused, native, x in _inputs(kind, device, dtype):
        results = []
        for module in (fused, native):
            leaf = x.detach().requires_grad_()
            output = module(leaf)
            grads = torch.autograd.grad(
                (output * output).sum(), [leaf, *module.parameters()], create_graph=True
            )
            second = torch.autograd.grad(sum((g * g).sum() for g in grads), leaf)
            results.append((output, *grads, *second))
        # In fp32 second derivatives of 128 rows with small deviations differ by a few hundred ulps
        # of their terms.
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
        torch.testing.assert_close(*results, **tolerance)
        assert results[0][0].stride() == results[1][0].stride()


@every_module
def test_module_state_repr_and_copies(kind: type[nn.Module], device: torch.device) -> None:
    """State, hyperparameters and repr are PyTorch's. Copies compute the same, and share nothing."""
    for fused, native, x in _inputs(kind, device, torch.float32):
        assert isinstance(fused, kind)
        assert list(fused.state_dict()) == list(native.state_dict())
        assert repr(fused) == repr(native).replace(kind.__name__, MODULES[kind].__name__, 1)
        assert set(vars(native)) <= set(vars(fused))
        buffer = io.BytesIO()
        torch.save(fused, buffer)
        buffer.seek(0)
        expected = fused(x)
        copies = (
            copy.deepcopy(fused),
            pickle.loads(pickle.dumps(fused)),
            torch.load(buffer, weights_only=False),
        )
        for other in copies:
            assert type(other) is type(fused) and other.training == fused.training
            assert torch.equal(other(x), expected)
            other.load_state_dict({name: t + 1.0 for name, t in other.state_dict().items()})
        assert torch.equal(fused(x), expected), "a copy shares its parameters"


@every_module
def test_module_is_cast_and_moved(kind: type[nn.Module], device: torch.device) -> None:
    """Modules with frozen parameters, or with none, move to fp64, the meta device and back."""
    for fused, native, x in _inputs(kind, device, torch.float32):
        for module in (fused, native):
            module.requires_grad_(False).double()
        torch.testing.assert_close(fused(x.double()), native(x.double()))
        assert all(p.dtype == torch.float64 and not p.requires_grad for p in fused.parameters())
        state = fused.state_dict()
        moved = copy.deepcopy(fused).to("meta")
        assert all(p.is_meta for p in moved.parameters())
        output = moved(x.double().to("meta"))
        assert output.is_meta and output.shape == x.shape and output.dtype == torch.float64
        moved.to_empty(device=device).load_state_dict(state)
        assert torch.equal(moved(x.double()), fused(x.double()))


@every_module
def test_module_of_a_noncontiguous_input(kind: type[nn.Module], device: torch.device) -> None:
    for fused, native, x in _inputs(kind, device, torch.float64):
        if x.dim():
            strided = torch.stack((x, x), -1)[..., 0]
            torch.testing.assert_close(fused(strided), native(strided))
