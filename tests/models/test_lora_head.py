"""``fuse_model(model, loss=True)`` of models whose head has an adapter of PEFT (LoRA)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models.rules import loss as rules
from support import DEVICE

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# The values of the operator are tested by themselves.
pytestmark = pytest.mark.once
V = 40


def _model(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a causal language model in training mode."""
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(DEVICE, dtype).train()


def _adapted(model: Any, **options: Any) -> Any:
    """Return a model with LoRA on its head. Its adapters change the result, by a factor of 4."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "lm_head"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        **options,
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, V, (2, 7), device=DEVICE)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def _results(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the loss and the gradients of all parameters that are trained."""
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    loss = model(**batch).loss
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *grads]


def _assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, exact in zip(results, expected, strict=True):
        # Transformers casts logits to fp32 for the loss.
        torch.testing.assert_close(result.double(), exact.double(), rtol=1e-4, atol=1e-6)


def _line(report: Any) -> Any:
    """Return the line of the causal language model."""
    return next(line for line in report.modules if "LlamaForCausalLM" in line.type)


@pytest.fixture
def calls() -> Iterator[mock.Mock]:
    """Yields a mock of the operator, which counts its calls."""
    original = rules.linear_cross_entropy
    with mock.patch.object(rules, "linear_cross_entropy", side_effect=original) as operator:
        yield operator


@pytest.mark.parametrize("first", ["adapted", "fused"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.pairs("first tied graph")
def test_loss_and_gradients_are_those_of_whole_logits(
    first: str, tied: bool, graph: bool, calls: mock.Mock
) -> None:
    """The masks of a graph are not those of PyTorch's dropout, which is then left out."""
    plain, batch = _model(tie_word_embeddings=tied), _batch()
    model = copy.deepcopy(plain)
    # With it, embeddings and head have one adapter, too.
    options = {"lora_dropout": 0.0 if graph else 0.5, "ensure_weight_tying": tied}
    expected = _results(_adapted(plain, **options), batch)
    if first == "fused":
        fusedops.fuse_model(model, loss=True, graph=graph)
    model = _adapted(model, **options)
    if first == "adapted":
        report = fusedops.fuse_model(model, loss=True, graph=graph)
        assert "linear_cross_entropy" in _line(report).calls
    _assert_close(_results(model, batch), expected)
    assert model(**batch).logits is None
    # A frozen weight has no gradient, and its product is not computed.
    weight = calls.call_args.args[1]
    assert not weight.requires_grad and weight.shape == (V, 16)


def test_adapter_in_fp32_of_a_model_in_bf16() -> None:
    """PEFT's default. The error of each gradient is at most twice that of whole logits."""
    plain, batch = _adapted(_model(torch.bfloat16)), _batch()
    exact = _results(copy.deepcopy(plain).double(), batch)
    model = copy.deepcopy(plain)
    fusedops.fuse_model(model, loss=True)
    assert model.base_model.model.lm_head.lora_B["default"].weight.dtype == torch.float32
    triples = zip(_results(model, batch), _results(plain, batch), exact, strict=True)
    assert model(**batch).logits is None
    for ours, eager, want in triples:
        assert ours.dtype == eager.dtype
        errors = [torch.linalg.norm(t.double() - want) for t in (ours, eager)]
        # Logits in bf16 have errors of 2**-9; those of rows and weights, rounded too, add to them.
        assert errors[0] <= 2 * errors[1] + 2.0**-8 * torch.linalg.norm(want)


def test_adapters_may_be_disabled_merged_and_enabled_later(calls: mock.Mock) -> None:
    plain, batch = _adapted(_model()), _batch()
    model = copy.deepcopy(plain)
    fusedops.fuse_model(model, loss=True)
    losses = []
    for each in (plain, model):
        with each.disable_adapter():
            disabled = each(**batch)
        each.merge_adapter()
        merged = each(**batch)
        outputs = [disabled, merged]
        assert all(output.logits is not None for output in outputs)
        assert not calls.called
        each.unmerge_adapter()
        losses.append([*[output.loss.detach() for output in outputs], *_results(each, batch)])
    assert calls.call_count == 1
    assert "whole" not in _line(fusedops.fusion_status(model)).calls
    _assert_close(*losses)
    assert len(set(map(float, losses[0][:3]))) == 2  # the first differs from the others
    merged = model.merge_and_unload()
    for parameter in merged.parameters():
        parameter.requires_grad_()
    output = merged(**batch)
    assert output.logits is None  # a plain head again
    _assert_close([output.loss], [plain(**batch).loss])


def _head(model: Any) -> Any:
    return model.base_model.model.lm_head


def _with_variant(model: Any) -> Any:
    return _adapted(model, use_dora=True)


def _with_bias(model: Any) -> Any:
    model.lm_head = nn.Linear(16, V, device=DEVICE, dtype=torch.float64)
    model.model.layers[0].self_attn.q_proj = nn.Linear(16, 16, device=DEVICE, dtype=torch.float64)
    return _adapted(model, lora_bias=True)


def _saved(model: Any) -> Any:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def _with_two(model: Any) -> Any:
    model = _adapted(model)
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    return model


def _narrow(model: Any) -> Any:
    model = _adapted(model.float())
    _head(model).lora_A.bfloat16()
    _head(model).lora_B.bfloat16()
    return model


def _with_none(model: Any) -> Any:
    model = _adapted(model)
    _head(model).delete_adapter("default")
    return model


def _disabled(model: Any) -> Any:
    model = _adapted(model)
    model.base_model.disable_adapter_layers()
    return model


def _merged(model: Any) -> Any:
    model = _adapted(model)
    model.merge_adapter()
    return model


def _with_hook_on(path: str) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model = _adapted(model)
        _head(model).get_submodule(path).register_forward_hook(lambda *_: None)
        return model

    return change


_LEFT = {
    "DoRA": (_with_variant, "a variant of LoRA, such as DoRA"),
    "bias": (_with_bias, "the adapter of its head has a bias"),
    "whole head": (_saved, "its head is a peft.utils.other.ModulesToSaveWrapper"),
    "two": (_with_two, "its head has 2 active adapters, expected one"),
    "narrow": (_narrow, "has torch.bfloat16, and its weight torch.float32"),
    "none": (_with_none, "its head has 0 active adapters, expected one"),
    "disabled": (_disabled, "the adapter of its head is disabled or merged"),
    "merged": (_merged, "the adapter of its head is disabled or merged"),
    "hook": (_with_hook_on(""), "its head has hooks"),
    "hook of the layer": (_with_hook_on("base_layer"), "its head has hooks"),
    "hook of B": (_with_hook_on("lora_B.default"), "lora_B of its head is no plain linear layer"),
}


@pytest.mark.parametrize("case", _LEFT)
@pytest.mark.parametrize("first", ["changed", "fused"])
@pytest.mark.pairs("case first")
def test_other_adapters_have_whole_logits(case: str, first: str, calls: mock.Mock) -> None:
    """The head may change before the model is fused, or after."""
    change, reason = _LEFT[case]
    model, batch = _model(), _batch()
    if first == "fused":
        fusedops.fuse_model(model, loss=True)
        model = change(model)
        calls_now = _line(fusedops.fusion_status(model)).calls
        assert reason in calls_now.partition("; its logits are whole now, as ")[2]
    else:
        model = change(model)
        assert reason in _line(fusedops.fuse_model(model, loss=True)).calls
    assert model(**batch).logits is not None
    assert not calls.called


def test_hooks_of_layers_that_are_called_run(calls: mock.Mock) -> None:
    model, batch = _adapted(_model(), lora_dropout=0.1), _batch()
    hook = mock.Mock(return_value=None)
    head = _head(model)
    for module in (head.lora_A["default"], head.lora_dropout["default"]):
        module.register_forward_hook(hook)
    fusedops.fuse_model(model, loss=True)
    assert model(**batch).logits is None
    assert hook.call_count == 2 and calls.call_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_fused_model_compiles_as_one_graph() -> None:
    model, batch = _adapted(_model()), _batch()
    expected = _results(model, batch)
    fusedops.fuse_model(model, loss=True)
    model.config.use_cache = False
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    output = compiled(**batch)
    assert output.logits is None
    model.zero_grad()
    output.loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    _assert_close([output.loss.detach(), *grads], expected)
