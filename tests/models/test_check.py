"""``check`` of `fuse_model` compares results, restores wrong modules, and has no side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models import FusionReport, Rule
from sample_models import ModelSpec
from zoo import build, every, inputs, run, transformers_only

pytestmark = pytest.mark.once


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_check_passes_for_all_modules_of_sample_models(spec: ModelSpec, dtype: torch.dtype) -> None:
    model = build(spec, dtype)
    planned = fusedops.fuse_model(model, dry_run=True)
    report = fusedops.fuse_model(model, check=inputs(spec, dtype))
    assert [(m.name, m.rule) for m in report] == [(m.name, m.rule) for m in planned]
    assert report.difference is not None
    assert report.difference.passes, report.difference
    checked = [m for m in report if m.difference is not None]
    # A copied torch.nn.TransformerDecoderLayer forgets its activation.
    assert len(checked) >= len(report) - 2
    assert all(m.difference is not None and m.difference.passes for m in checked)


def test_check_passes_under_a_default_device() -> None:
    """The device has no memory. The check draws its random numbers on the CPU."""
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 3, 16)
    with torch.device("meta"):
        report = fusedops.fuse_model(model, check=x)
    assert report and report.difference is not None and report.difference.passes


def _forward(function: Any) -> Any:
    """Return a forward with the signature of PyTorch's modules that calls a function."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return function(self, input)  # type: ignore[no-any-return]

    return forward


class _InexactGradient(torch.autograd.Function):
    """The identity, with a gradient that is a thousandth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 1.001


# Forwards of LayerNorm and GELU with small mistakes.
_WRONG = {
    "eps": (
        nn.LayerNorm,
        lambda self, x: nn.functional.layer_norm(
            x, self.normalized_shape, self.weight, self.bias, 1e-3
        ),
    ),
    "unbiased": (
        nn.LayerNorm,
        lambda self, x: nn.functional.layer_norm(x, self.normalized_shape, self.weight),
    ),
    "approximate": (nn.GELU, lambda self, x: nn.functional.gelu(x, approximate="tanh")),
    "gradient": (
        nn.LayerNorm,
        lambda self, x: nn.LayerNorm.forward(self, _InexactGradient.apply(x)),
    ),
    "detached": (nn.LayerNorm, lambda self, x: nn.LayerNorm.forward(self, x.detach())),
    "dtype": (nn.GELU, lambda self, x: nn.functional.gelu(x).bfloat16().float()),
    "nan": (nn.GELU, lambda self, x: nn.functional.gelu(x) * torch.tensor(float("nan"))),
    "shape": (nn.GELU, lambda self, x: nn.functional.gelu(x)[:, :1]),
}


@pytest.mark.parametrize("name", _WRONG)
def test_check_restores_only_the_module_with_a_wrong_rule(name: str, device: torch.device) -> None:
    """The report gives the reason and the difference."""
    base, wrong_forward = _WRONG[name]
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8)).to(device)
    with torch.no_grad():
        model[1].bias.add_(0.3)
    x = torch.randn(5, 8, device=device)
    before = model(x)
    rule = Rule(
        name="wrong", calls="what is wrong", methods={"forward": _forward(wrong_forward)}, base=base
    )
    report = fusedops.fuse_model(model, rules=[rule], check=(x,), graph=False)
    torch.testing.assert_close(model(x), before)
    index = next(index for index, module in enumerate(model) if isinstance(module, base))
    assert type(model[index]) is base
    (wrong,) = [m for m in report.left if m.reason != "no rule"]
    assert (wrong.name, wrong.reason) == (str(index), "wrong differs from it")
    assert wrong.difference is not None
    assert not wrong.difference.passes
    assert f"left: wrong differs from it ({wrong.difference})" in report.table()
    assert len(report) == 2
    assert report.difference is not None
    assert report.difference.passes


def test_check_takes_an_encoder_with_a_padding_mask() -> None:
    """In evaluation mode without gradients, PyTorch's encoder converts rows to a nested tensor."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.tensor([[False, False, True], [False, True, True]])
    call = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": mask}
    report = fusedops.fuse_model(nn.TransformerEncoder(layer, 2), check=call, graph=False)
    assert report.difference is not None and report.difference.passes
    norms = [line for line in report if line.type == "LayerNorm"]
    assert len(norms) == 4 and all(line.difference is not None for line in norms)
    assert torch.backends.mha.get_fastpath_enabled()


@dataclass
class _Output:
    y: Tensor


_OUTPUT_TYPES = {
    "dict": lambda y: {"y": [y]},
    "dataclass": _Output,
    "complex": lambda y: torch.complex(y, y).conj(),
}


@pytest.mark.parametrize("output_type", _OUTPUT_TYPES)
def test_outputs_in_containers_and_complex_outputs_are_compared(output_type: str) -> None:
    make_output = _OUTPUT_TYPES[output_type]

    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make_output(x.exp())

    def shifted(self: Any, x: Tensor) -> Any:
        return make_output(x.exp() + 1.0)

    rule = Rule(name="wrong", calls="what is wrong", methods={"forward": shifted}, base=Exponential)
    report = fusedops.fuse_model(Exponential(), rules=[rule], check=torch.randn(2, 8))
    assert report.modules[0].reason == "wrong differs from it"


class _MaskedAttention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def _shifted(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return _MaskedAttention.forward(self, x, mask) + 1.0


@pytest.mark.parametrize("length", [1, 4])
def test_fully_masked_queries_do_not_raise_the_limit(length: int) -> None:
    mask = torch.zeros(2, length, length)
    mask[0] = torch.finfo(mask.dtype).min
    rule = Rule(
        name="wrong", calls="what is wrong", methods={"forward": _shifted}, base=_MaskedAttention
    )
    call = (torch.randn(2, length, 8), mask)
    report = fusedops.fuse_model(_MaskedAttention(), rules=[rule], check=call)
    assert report.modules[0].reason == "wrong differs from it"


def test_sums_in_another_order_pass(device: torch.device) -> None:
    """The rule computes in fp64, so that gradients that are sums over rows differ in their bits."""
    exact = _forward(
        lambda self, x: nn.functional.layer_norm(
            x.double(), self.normalized_shape, self.weight.double(), self.bias.double(), self.eps
        ).float()
    )
    rule = Rule(name="exact", calls="", methods={"forward": exact}, base=nn.LayerNorm)
    report = fusedops.fuse_model(
        nn.LayerNorm(8).to(device), rules=[rule], check=torch.randn(500, 8, device=device)
    )
    (line,) = report
    assert line.difference is not None
    assert line.difference.gradient > 0.0, "nothing was summed in another order"


@every
def test_check_has_no_side_effects(spec: ModelSpec) -> None:
    """Gradients, modes, hooks, the random state, buffers and inputs are as before."""
    model = build(spec).train()
    next(model.children()).eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    arguments = inputs(spec)
    arguments_before = {name: value.clone() for name, value in arguments.items()}
    state_dict_before = {name: value.clone() for name, value in model.state_dict().items()}
    fusedops.fuse_model(model, check=arguments)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state_dict_before[name])
    for name, value in arguments.items():
        assert torch.equal(value, arguments_before[name])
        assert not value.requires_grad
    fusedops.unfuse_model(model)
    run(model, arguments)


class _Noisy(nn.Module):
    """Draws random numbers and counts its calls, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("shared", self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1.0
        return self.norm(x * self.count) + torch.randn_like(x)


def test_all_runs_of_the_check_have_the_same_random_numbers_and_buffers(
    device: torch.device,
) -> None:
    model = _Noisy().to(device)
    x = torch.randn(4, 8, device=device)
    state = torch.get_rng_state()
    report = fusedops.fuse_model(model, check=x)
    assert model.count == 0.0
    assert torch.equal(torch.get_rng_state(), state)
    assert report.difference is not None and report.difference.passes
    # With other random numbers the outputs would differ by more than 1.
    assert report.difference.output < 1e-4


def test_model_is_unchanged_if_a_rule_raises() -> None:
    def fails(self: Any, input: Tensor) -> Tensor:
        raise KeyError("a rule's own mistake")

    model = nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.LayerNorm(4)).train()
    rule = Rule(name="fails", calls="", methods={"forward": fails}, base=nn.GELU)
    with pytest.raises(KeyError, match="own mistake"):
        fusedops.fuse_model(model, rules=[rule], check=torch.randn(2, 4))
    assert [type(m) for m in model] == [nn.LayerNorm, nn.GELU, nn.LayerNorm]
    assert model[1].training


@pytest.mark.parametrize("input_type", ["tensor", "tuple", "list", "dict"])
def test_check_takes_tensors_sequences_and_dicts(input_type: str) -> None:
    x = torch.randn(3, 4)
    check: Any = {"tensor": x, "tuple": (x,), "list": [x], "dict": {"input": x}}[input_type]
    report = fusedops.fuse_model(nn.Sequential(nn.LayerNorm(4)), check=check)
    assert isinstance(report, FusionReport)
    assert report.difference is not None


def test_modules_that_the_inputs_do_not_reach_are_reported_as_unchecked() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    report = fusedops.fuse_model(Idle(), check=torch.randn(2, 4), graph=False)
    assert {m.name: m.difference is None for m in report} == {"used": False, "idle": True}
    assert [m.name for m in report.unchecked] == ["idle"]
    lines = report.table().splitlines()
    assert lines[3].split() == ["idle", "LayerNorm", "layer_norm", "(not", "checked)"]
    assert "not checked, as the inputs do not reach them: 1" in lines
    assert not fusedops.fuse_model(Idle(), graph=False).unchecked


def test_dry_run_checks_and_changes_nothing() -> None:
    """The report has the differences, and the module that would be restored."""
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    wrong = Rule(
        name="wrong",
        calls="what is wrong",
        methods={"forward": _forward(lambda self, x: 2 * x)},
        base=nn.GELU,
    )
    report = fusedops.fuse_model(
        model, rules=[wrong], check=torch.randn(5, 8), dry_run=True, graph=False
    )
    assert [type(m) for m in model] == [nn.LayerNorm, nn.GELU]
    assert [m.name for m in report] == ["0"]
    assert report.difference is not None and report.difference.passes
    assert report.modules[2].reason == "wrong differs from it"


@transformers_only
def test_check_true_takes_the_dummy_inputs_of_the_model() -> None:
    import transformers

    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=100,
    )
    report = fusedops.fuse_model(transformers.BertModel(config), check=True)
    assert report.difference is not None and report.difference.passes
