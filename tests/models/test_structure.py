"""Forwards written in many ways.

Fused they compute what they did, call what they called, and join what can be joined.
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

# What is read is text, whatever the kernels; on a CPU a seed drops the same, fused or not.
pytestmark = pytest.mark.once
DEVICE = torch.device("cpu")

# fp64 has all of a result but for the last bits of sums in another order.
_CLOSE = 1e-11


# --- what they compute ----------------------------------------------------------------------------


def _made(cls: type[Base], dtype: torch.dtype = torch.float64) -> Base:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = cls()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.to(DEVICE, dtype)


def _rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, N, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        DEVICE, dtype
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [tensor for inner in value for tensor in _tensors(inner)]
        if isinstance(value, (tuple, list))
        else []
    )


def _results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients, and a number that is drawn next."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    value = model(x)
    ys = _tensors(value)
    assert ys
    drawn = torch.rand(3, device=DEVICE)
    results = {f"output {place}": y for place, y in enumerate(ys)}
    weights = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(place)).to(y)
        for place, y in enumerate(ys)
    ]
    total = sum((y * w).sum() for y, w in zip(ys, weights, strict=True))
    if total.requires_grad:
        leaves = {"x": x, **dict(model.named_parameters())}
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        results |= {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return {
        "drawn": drawn,
        "kind": torch.tensor([isinstance(value, kind) for kind in (tuple, list, Tensor)]),
        **{name: y.detach() for name, y in results.items()},
    }


def _same(found: dict[str, Tensor], expected: dict[str, Tensor], close: float = _CLOSE) -> None:
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        assert found[name].dtype == y.dtype, name
        torch.testing.assert_close(
            found[name], y, rtol=close, atol=close, msg=lambda text, name=name: f"{name}: {text}"
        )


def _fused(model: Base, **options: Any) -> Base:
    model = copy.deepcopy(model)
    fusedops.fuse_model(model, **options)
    return model


case = pytest.mark.parametrize("name", CASES)


def some(test: Any) -> Any:
    """Marks a test whose property has one cause in all rewritten forwards: tests share these."""
    return pytest.mark.shared("name", most=16)(case(test))


@case
@pytest.mark.parametrize("training", [True, False], ids=["training", ""])
def test_values(name: str, training: bool) -> None:
    """Outputs, gradients, and what is dropped, of a seed.

    So in the other mode, and with the flags the other way.
    """
    model = _made(CASES[name][0]).train(training)
    fused = _fused(model)
    for flag, mode in ((True, training), (False, training), (True, not training)):
        for each in (model, fused):
            each.train(mode)
            each.flag, each.other = flag, not flag
            each.seen.clear()
        _same(_results(fused, _rows()), _results(model, _rows()))
        for result, expected in zip(fused.seen, model.seen, strict=True):
            assert all(
                torch.equal(a, b) if isinstance(a, Tensor) else a == b
                for a, b in zip(result, expected, strict=True)
            )


@case
def test_forwards_that_can_be_fused_are(name: str) -> None:
    """Where a forward can be fused, it is."""
    cls, calls = CASES[name]
    fused = _made(cls).train()
    fusedops.fuse_model(fused)
    with counted() as result:
        fused(_rows())
    assert dict(result) == calls


@some
@pytest.mark.parametrize("training", [True, False], ids=["training", ""])
def test_what_is_left_to_a_block(name: str, training: bool) -> None:
    """Finished by whoever takes it, it is what the module returns; all other outputs are there."""
    model = _made(CASES[name][0]).train(training)
    fused = _fused(model)
    if not hasattr(fused, "_fusedops_branch"):
        return

    class Taking(nn.Module):
        def forward(self, x: Tensor) -> Any:
            end, others = fused._fusedops_branch(x)
            return finished(end) if others is None else (finished(end), *others)

    taking = Taking()
    taking.inner = fused
    result, expected = _results(taking, _rows()), _results(model, _rows())
    _same({key.removeprefix("inner."): value for key, value in result.items()}, expected)


def _run(model: Base) -> dict[str, Tensor] | type[Exception]:
    try:
        return _results(model, _rows())
    except Exception as error:  # noqa: BLE001, of any kind
        return type(error)


def _alike(fused: Base, model: Base) -> None:
    """The same results; or an error, if the module as it was raises one."""
    expected, result = _run(model), _run(fused)
    if isinstance(expected, dict):
        assert isinstance(result, dict), result
        _same(result, expected)
    else:
        assert isinstance(result, type), expected


def _called(model: nn.Module, names: set[str] | None = None) -> list[str]:
    """The names of modules as they are called, of these or of all."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if name and (names is None or name in names):
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    return calls


@some
def test_hooks_are_called_in_the_original_order(name: str) -> None:
    """Hooks on all modules are called in the same order, and results have the same bits."""
    model = _made(CASES[name][0]).train()
    fused = _fused(model)
    calls = _called(model), _called(fused)
    results = _results(model, _rows()), _results(fused, _rows())
    assert calls[0] == calls[1]
    assert results[0].keys() == results[1].keys()
    for key, y in results[0].items():
        assert torch.equal(results[1][key], y), key


def _used(model: Base) -> list[str]:
    """The children that a forward calls."""
    other = copy.deepcopy(model)
    calls = _called(other)
    _results(other, _rows())
    return [name for name in dict.fromkeys(calls) if "." not in name]


@some
def test_one_hook(name: str) -> None:
    """Whichever child has it: that is called as often as it was, and the rest is what it was."""
    model = _made(CASES[name][0]).train()
    for child in _used(model):
        plain, fused = copy.deepcopy(model), _fused(model)
        calls = _called(plain, {child}), _called(fused, {child})
        _alike(fused, plain)
        assert calls[0] == calls[1]


def test_a_dropout_by_mode_is_fused_in_eval_mode() -> None:
    """The mode may change after the module is fused."""
    model = _made(CASES["functional_dropout_by_mode"][0])
    model.fc = nn.Linear(N, N, bias=False).to(DEVICE, torch.float64)
    fused = _fused(model.eval()).train()
    with counted() as calls:
        fused(_rows())
    assert dict(calls) == {"bias_dropout_add": 1}
    _same(_results(fused, _rows()), _results(model.train(), _rows()))


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
def test_complex_numbers_are_left_to_pytorch() -> None:
    model = _Complex().to(DEVICE, torch.complex128)
    x = _rows().to(torch.complex128)
    expected = model(x)
    assert fusedops.fuse_model(model)
    torch.testing.assert_close(model(x), expected)


class _Twice(nn.Module):
    """An adapter."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Dropout(0.1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self.inner(*args, **kwargs)
        return self.more(y) if isinstance(y, Tensor) else y


class _Shifted(nn.Module):
    """Changes what it is given."""

    def __init__(self, inner: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(2.0)[..., :1]


_REPLACED: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda child: None,
    "identity": lambda child: nn.Identity(),
    "adapter": _Twice,
    "another shape": _Shifted,
    "dropout": lambda child: nn.Dropout(0.4),
    "another activation": lambda child: nn.ReLU(inplace=True),
    "norm": lambda child: nn.LayerNorm(N).to(DEVICE, torch.float64),
    "tuple": lambda child: Returning(lambda *ys: ys).to(DEVICE, torch.float64),
}


def test_a_layer_that_is_gone() -> None:
    """Layers that a forward does not reach may be missing."""
    model = _made(CASES["conditional_sums"][0]).train()
    fused = _fused(model)
    del model.fc1, fused.fc1
    _same(_results(fused, _rows()), _results(model, _rows()))


@some
@pytest.mark.parametrize("how", _REPLACED)
def test_replaced_children(name: str, how: str) -> None:
    """After the model was fused: each child in turn, by something else."""
    model = _made(CASES[name][0]).train()
    for child in _used(model):
        plain, fused = copy.deepcopy(model), _fused(model)
        for each in (plain, fused):
            with torch.random.fork_rng():
                torch.manual_seed(9)
                setattr(each, child, _REPLACED[how](getattr(each, child)))
        _alike(fused, plain)


@some
def test_excluded_children(name: str) -> None:
    """Each child in turn is left, and the rest is what it was."""
    model = _made(CASES[name][0]).train()
    for child in _used(model):
        fused = _fused(model, exclude=[child])
        assert type(getattr(fused, child)) is type(getattr(model, child))
        _alike(fused, copy.deepcopy(model))


@some
def test_autocast(name: str) -> None:
    """The same dtypes, and the same numbers but for roundings."""
    model = _made(CASES[name][0], torch.float32).eval()
    fused = _fused(model)
    results = []
    for each in (model, fused):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            results.append(_results(each, _rows(torch.float32)))
    assert results[0].keys() == results[1].keys()
    for key, y in results[0].items():
        assert results[1][key].dtype == y.dtype, key
        assert (results[1][key].float() - y.float()).norm() <= 0.05 * y.float().norm() + 0.05, key


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
    model = _made(CASES[name][0]).eval()
    expected, result = (
        _results(torch.compile(each, backend="aot_eager"), _rows())
        for each in (model, _fused(model))
    )
    _same(result, expected)
