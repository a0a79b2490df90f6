"""``fuse_model(model, loss=True)``: the loss and gradients of the model, without whole logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models.rules import generation
from fusedops.models.rules import loss as rules
from support import DEVICE

transformers = pytest.importorskip("transformers")
# The values of the operator are tested by themselves.
pytestmark = pytest.mark.once
V = 40
_NAMES = ("Llama", "Gemma2", "Cohere", "Granite", "Mixtral")


def _model(name: str = "Llama", **options: Any) -> Any:
    """Return a causal language model in training mode, in fp64 unless it has experts."""
    dtype = torch.float32 if name == "Mixtral" else torch.float64
    sizes = {
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "attention_dropout": 0.0,
        **options,
    }
    config = getattr(transformers, f"{name}Config")(**sizes)
    # These are 1 by default, or do nothing to logits that are small.
    for attribute in ("logits_scaling", "logit_scale", "final_logit_softcapping"):
        if hasattr(config, attribute):
            setattr(config, attribute, 0.3)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE, dtype).train()


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, V, (2, 7), device=DEVICE)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def _results(model: Any, **arguments: Any) -> list[Tensor]:
    model.zero_grad()
    output = model(**arguments)
    output.loss.backward()
    return [output.loss.detach(), *[p.grad.clone() for p in model.parameters()]]


def _assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, exact in zip(results, expected, strict=True):
        # Transformers casts logits to fp32 for the loss.
        torch.testing.assert_close(result.double(), exact.double(), rtol=1e-4, atol=1e-6)


@pytest.fixture
def calls() -> Iterator[mock.Mock]:
    """Yields a mock of the operator, which counts its calls."""
    original = rules.linear_cross_entropy
    with mock.patch.object(rules, "linear_cross_entropy", side_effect=original) as operator:
        yield operator


def _line(report: Any) -> Any:
    """Return the line of the model itself."""
    return next(module for module in report.modules if not module.name)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.pairs("name")
def test_loss_and_gradients_are_those_of_whole_logits(name: str, calls: mock.Mock) -> None:
    tied = {} if name == "Mixtral" else {"tie_word_embeddings": name != "Llama"}
    if name == "Mixtral":
        tied = {"output_router_logits": True}  # adds to the loss
    model, batch = _model(name, **tied), _batch()
    expected = _results(model, **batch)
    report = fusedops.fuse_model(model, loss=True, exclude=["rms_norm"])
    assert "linear_cross_entropy" in _line(report).calls
    _assert_close(_results(model, **batch), expected)
    assert calls.call_count == 1
    assert model(**batch).logits is None


@pytest.mark.parametrize("count", [5, torch.tensor(5)], ids=["int", "tensor"])
def test_trainers_arguments_are_those_of_transformers_loss(count: Any) -> None:
    model, batch = _model(), _batch()
    batch["labels"][:, :3] = 3
    shift_labels = torch.randint(0, V, (2, 7), device=DEVICE)
    options = {"num_items_in_batch": count, "ignore_index": 3}
    arguments = [{**batch, **options}, {**batch, **options, "shift_labels": shift_labels}]
    expected = [_results(model, **a) for a in arguments]
    fusedops.fuse_model(model, loss=True)
    for a, exact in zip(arguments, expected, strict=True):
        _assert_close(_results(model, **a), exact)


def test_logits_are_as_before_without_labels_training_or_gradients(calls: mock.Mock) -> None:
    model, batch = _model("Gemma2"), _batch()
    ids = {"input_ids": batch["input_ids"]}
    logits = model(**ids).logits
    options = {"max_new_tokens": 3, "do_sample": False, "no_repeat_ngram_size": 2}
    tokens = model.eval().generate(**ids, **options)
    fusedops.fuse_model(model, loss=True)
    processor = generation.FusedNoRepeatNGramLogitsProcessor
    with mock.patch.object(generation, processor.__name__, side_effect=processor) as fused:
        assert torch.equal(model.generate(**ids, **options), tokens)
    assert fused.call_count == 1
    outputs = [model(**batch).logits, model.train()(**ids).logits]
    with torch.no_grad():
        outputs.append(model(**batch).logits)
    for output in outputs:
        torch.testing.assert_close(output, logits)
    assert not calls.called
    assert not any(isinstance(value, Tensor) for value in vars(model).values())


def test_fused_models_can_be_copied_pickled_and_restored() -> None:
    model, batch = _model(), _batch()
    cls = type(model)
    expected = _results(model, **batch)
    fusedops.fuse_model(model, loss=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert other(**batch).logits is None
        _assert_close(_results(other, **batch), expected)
    assert "linear_cross_entropy" in _line(fusedops.fusion_status(model)).calls
    fusedops.unfuse_model(model)
    assert type(model) is cls
    assert model(**batch).logits is not None


def test_models_keep_their_losses_by_default() -> None:
    model, batch = _model(), _batch()
    fusedops.fuse_model(model)
    assert model(**batch).logits is not None


class _Adapted(nn.Module):
    """A head with an adapter, as PEFT puts in its place."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.base_layer = head
        self.adapter = nn.Linear(16, V, bias=False, device=DEVICE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.adapter(x)
        return result


def _with_adapter(model: Any) -> None:
    model.lm_head = _Adapted(model.lm_head)


def _with_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


def _with_own_loss(model: Any) -> None:
    model.loss_function = lambda logits, *_, **__: logits.square().mean()


def _with_tensor(model: Any) -> None:
    model.logit_scale = torch.tensor(3.0, device=DEVICE)


_LEFT = {
    _with_adapter: "Adapted, no linear layer",
    _with_hook: "its head has hooks",
    _with_own_loss: "its loss is not ForCausalLMLoss",
    _with_tensor: "more from its logits than a scale and a soft cap",
}


@pytest.mark.parametrize("change", _LEFT)
@pytest.mark.parametrize("first", [True, False], ids=["changed first", "fused first"])
@pytest.mark.pairs("change first")
def test_logits_are_whole_where_the_model_needs_them(
    change: Any, first: bool, calls: mock.Mock
) -> None:
    """The model may be changed before it is fused, or after."""
    model, batch = _model("Cohere"), _batch()
    changed = copy.deepcopy(model)
    change(changed)
    if first:
        model = copy.deepcopy(changed)
    report = fusedops.fuse_model(model, loss=True)
    if first:
        line = _line(report)
        assert "no_repeat_ngram" in line.calls
        assert _LEFT[change] in line.calls
        assert model.generate(batch["input_ids"], max_new_tokens=1).shape == (2, 8)
    else:
        torch.manual_seed(0)
        change(model)
    assert model(**batch).logits is not None
    assert not calls.called


class _SquaredForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits**2
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V, **kwargs)
        return loss, logits


class _ReadForCausalLM(_SquaredForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V, **kwargs)
        return loss, logits.argmax(-1)


class _LocalForCausalLM(_SquaredForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        scale = hidden.shape[0]
        logits = self.lm_head(hidden) * scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V, **kwargs)
        return loss, logits


class _DoubledForCausalLM(_SquaredForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = 2 * self.loss_function(logits=logits, labels=labels, vocab_size=V, **kwargs)
        return loss, logits


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (_SquaredForCausalLM, "it does more to logits: logits ** 2"),
        (_ReadForCausalLM, "it does more with logits than to return them"),
        (_DoubledForCausalLM, "it does not compute its loss by loss_function"),
        (_LocalForCausalLM, "numbers that are no attributes"),
    ],
)
@pytest.mark.pairs("cls")
def test_forwards_of_another_form_are_left_with_a_reason(cls: Any, reason: str) -> None:
    model = cls(_model().config).to(DEVICE)
    assert reason in _line(fusedops.fuse_model(model, loss=True)).calls
    assert model(**_batch())[1] is not None


def test_a_vocabulary_of_another_size_is_an_error() -> None:
    model = _model()
    fusedops.fuse_model(model, loss=True)
    model.config.vocab_size = V // 2
    with pytest.raises(ValueError, match="40 words"):
        model(**_batch())


def test_models_without_a_loss_of_logits_get_a_hint() -> None:
    report = fusedops.fuse_model(nn.Sequential(nn.LayerNorm(8)), loss=True)
    assert "no causal language model" in str(report)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_fused_model_compiles_as_one_graph() -> None:
    model, batch = _model("Gemma2"), _batch()
    expected = _results(model, **batch)
    fusedops.fuse_model(model, loss=True)
    model.config.use_cache = False
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(**batch)
    assert output.logits is None
    model.zero_grad()
    output.loss.backward()
    results = [output.loss.detach(), *[p.grad for p in model.parameters()]]
    _assert_close(results, expected)
