"""Forwards that are written in many ways, and fused by their steps.

The tests check that fused modules have the same results, call the same modules, and fuse all steps
that can be fused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from forwards import CASES, Base, N, Returning
from fusedops.models.parts import finished
from zoo import counted

# Fusing reads source code, so the kernels make no difference. On a CPU a seed gives the same dropout
# masks before and after fusing.
pytestmark = pytest.mark.once
DEVICE = torch.device("cpu")

# In fp64, sums in another order change only the last bits of results.
_TOLERANCE = 1e-11


# --- models, and their results --------------------------------------------------------------------


def _random_model(cls: type[Base], dtype: torch.dtype = torch.float64) -> Base:
    """Return an instance with random parameters, the same in each call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = cls()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.to(DEVICE, dtype)


def _rows(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 3, N, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for inner in value for tensor in _tensors(inner)]
    return []


def _results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return outputs and gradients by name, their container, and the next random numbers."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    value = model(x)
    ys = _tensors(value)
    assert ys
    drawn = torch.rand(3, device=DEVICE)
    results = {f"output {index}": y for index, y in enumerate(ys)}
    total: Any = 0
    for index, y in enumerate(ys):
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(index)).to(y)
        total = total + (y * weight).sum()
    if total.requires_grad:
        leaves = {"x": x, **dict(model.named_parameters())}
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        results |= {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return {
        "drawn": drawn,
        "kind": torch.tensor([isinstance(value, kind) for kind in (tuple, list, Tensor)]),
        **{name: y.detach() for name, y in results.items()},
    }


def _check_same(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that results have the same names, dtypes, and values up to rounding."""
    assert results.keys() == expected.keys()
    for name, y in expected.items():
        assert results[name].dtype == y.dtype, name
        torch.testing.assert_close(
            results[name],
            y,
            rtol=_TOLERANCE,
            atol=_TOLERANCE,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _fused(model: Base, **options: Any) -> Base:
    """Return a fused copy of a model."""
    model = copy.deepcopy(model)
    fusedops.fuse_model(model, **options)
    return model


case = pytest.mark.parametrize("name", CASES)


def some(test: Any) -> Any:
    """Share the forwards among tests: a fault in the rewriting shows in most of them."""
    return pytest.mark.shared("name", most=16)(case(test))


@case
@pytest.mark.parametrize("training", [True, False], ids=["training", ""])
def test_fused_forwards_have_the_results_of_the_originals(name: str, training: bool) -> None:
    """Outputs, gradients and dropout masks agree, also if flags or the mode change after fusing."""
    model = _random_model(CASES[name][0]).train(training)
    fused = _fused(model)
    for flag, mode in ((True, training), (False, training), (True, not training)):
        for changed in (model, fused):
            changed.train(mode)
            changed.flag, changed.other = flag, not flag
            changed.seen.clear()
        _check_same(_results(fused, _rows()), _results(model, _rows()))
        # `seen` has the values that a forward recorded as a side effect, in order.
        for values, expected_values in zip(fused.seen, model.seen, strict=True):
            for value, expected in zip(values, expected_values, strict=True):
                if isinstance(value, Tensor):
                    assert torch.equal(value, expected)
                else:
                    assert value == expected


@case
def test_fused_forwards_call_the_expected_operators(name: str) -> None:
    """All steps that can be fused are."""
    cls, expected_counts = CASES[name]
    fused = _random_model(cls).train()
    fusedops.fuse_model(fused)
    with counted() as counts:
        fused(_rows())
    assert dict(counts) == expected_counts


@some
@pytest.mark.parametrize("training", [True, False], ids=["training", ""])
def test_branch_and_its_omitted_last_steps_give_the_output_of_the_module(
    name: str, training: bool
) -> None:
    """A block computes the last steps, which `finished` does here. Other outputs do not change."""
    model = _random_model(CASES[name][0]).train(training)
    fused = _fused(model)
    if not hasattr(fused, "_fusedops_branch"):
        return

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Any:
            branch, others = fused._fusedops_branch(x)
            y = finished(branch)
            return y if others is None else (y, *others)

    block = Block()
    block.inner = fused
    result, expected = _results(block, _rows()), _results(model, _rows())
    _check_same({key.removeprefix("inner."): value for key, value in result.items()}, expected)


def _run(model: Base) -> dict[str, Tensor] | type[Exception]:
    """Return the results, or the type of the error that the model raises."""
    try:
        return _results(model, _rows())
    except Exception as error:  # noqa: BLE001, of any kind
        return type(error)


def _check_same_or_error(fused: Base, model: Base) -> None:
    """Check that a fused model has the original's results, or raises an error if that does."""
    expected, result = _run(model), _run(fused)
    if isinstance(expected, dict):
        assert isinstance(result, dict), result
        _check_same(result, expected)
    else:
        assert isinstance(result, type), expected


def _called(model: nn.Module, names: set[str] | None = None) -> list[str]:
    """Record the names of modules when they are called, by hooks on these or on all modules."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if name and (names is None or name in names):
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    return calls


@some
def test_hooks_are_called_in_the_original_order(name: str) -> None:
    """With hooks on all modules, results also have the same bits."""
    model = _random_model(CASES[name][0]).train()
    fused = _fused(model)
    calls, fused_calls = _called(model), _called(fused)
    expected, results = _results(model, _rows()), _results(fused, _rows())
    assert fused_calls == calls
    assert results.keys() == expected.keys()
    for key, y in expected.items():
        assert torch.equal(results[key], y), key


def _called_children(model: Base) -> list[str]:
    """Return the names of the children that a forward calls."""
    copied = copy.deepcopy(model)
    calls = _called(copied)
    _results(copied, _rows())
    return [name for name in dict.fromkeys(calls) if "." not in name]


@some
def test_child_with_a_hook_is_called_as_often_as_in_the_original(name: str) -> None:
    """Each child in turn has a hook. Results are those of the original."""
    model = _random_model(CASES[name][0]).train()
    for child in _called_children(model):
        original, fused = copy.deepcopy(model), _fused(model)
        calls, fused_calls = _called(original, {child}), _called(fused, {child})
        _check_same_or_error(fused, original)
        assert fused_calls == calls


def test_dropout_that_depends_on_the_mode_is_fused_also_in_evaluation_mode() -> None:
    """The mode may change after the module is fused."""
    model = _random_model(CASES["functional_dropout_by_mode"][0])
    model.fc = nn.Linear(N, N, bias=False).to(DEVICE, torch.float64)
    fused = _fused(model.eval()).train()
    with counted() as calls:
        fused(_rows())
    assert dict(calls) == {"bias_dropout_add": 1}
    _check_same(_results(fused, _rows()), _results(model.train(), _rows()))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N)
        self.packed = nn.Linear(N, 2 * N)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.gate(x)) * self.up(x))
        gate, up = self.packed(x).chunk(2, dim=-1)
        return x + self.down(torch.tanh(torch.sigmoid(gate) * up))


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_fused_forward_takes_complex_numbers() -> None:
    """PyTorch's operators compute them."""
    model = _Complex().to(DEVICE, torch.complex128)
    x = _rows().to(torch.complex128)
    expected = model(x)
    assert fusedops.fuse_model(model)
    torch.testing.assert_close(model(x), expected)


class _Adapter(nn.Module):
    """Calls another module, and drops elements of its output."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self.inner(*args, **kwargs)
        return self.dropout(y) if isinstance(y, Tensor) else y


class _OneColumn(nn.Module):
    """Returns a tensor of another shape."""

    def __init__(self, inner: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(2.0)[..., :1]


# Functions from a child to a module in its place.
_REPLACEMENTS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda child: None,
    "identity": lambda child: nn.Identity(),
    "adapter": _Adapter,
    "another shape": _OneColumn,
    "dropout": lambda child: nn.Dropout(0.4),
    "another activation": lambda child: nn.ReLU(inplace=True),
    "norm": lambda child: nn.LayerNorm(N).to(DEVICE, torch.float64),
    "tuple": lambda child: Returning(lambda *ys: ys).to(DEVICE, torch.float64),
}


def test_layer_that_a_forward_does_not_reach_may_be_missing() -> None:
    model = _random_model(CASES["conditional_sums"][0]).train()
    fused = _fused(model)
    del model.fc1, fused.fc1
    _check_same(_results(fused, _rows()), _results(model, _rows()))


@some
@pytest.mark.parametrize("replacement", _REPLACEMENTS)
def test_children_that_are_replaced_after_fusing_are_called(name: str, replacement: str) -> None:
    """Each child in turn is replaced. Results are those of the original with the same change."""
    model = _random_model(CASES[name][0]).train()
    for child in _called_children(model):
        original, fused = copy.deepcopy(model), _fused(model)
        for changed in (original, fused):
            with torch.random.fork_rng():
                torch.manual_seed(9)
                setattr(changed, child, _REPLACEMENTS[replacement](getattr(changed, child)))
        _check_same_or_error(fused, original)


@some
def test_excluded_children_keep_their_class(name: str) -> None:
    """Each child in turn is excluded. Results are those of the original."""
    model = _random_model(CASES[name][0]).train()
    for child in _called_children(model):
        fused = _fused(model, exclude=[child])
        assert type(getattr(fused, child)) is type(getattr(model, child))
        _check_same_or_error(fused, copy.deepcopy(model))


@some
def test_fused_forwards_have_the_dtypes_and_values_of_the_originals_under_autocast(
    name: str,
) -> None:
    model = _random_model(CASES[name][0], torch.float32).eval()
    fused = _fused(model)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected = _results(model, _rows(torch.float32))
        results = _results(fused, _rows(torch.float32))
    assert results.keys() == expected.keys()
    for key, y in expected.items():
        assert results[key].dtype == y.dtype, key
        difference = (results[key].float() - y.float()).norm()
        assert difference <= 0.05 * y.float().norm() + 0.05, key


_COMPILED = (
    "post_norm_statements",
    "flags",
    "outputs_of_attention",
    "chunked",
    "in_place_dropout",
    "a_loop",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _COMPILED else pytest.mark.full) for name in CASES],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_forward_has_the_same_values(name: str) -> None:
    model = _random_model(CASES[name][0]).eval()
    expected, result = (
        _results(torch.compile(each, backend="aot_eager"), _rows())
        for each in (model, _fused(model))
    )
    _check_same(result, expected)
