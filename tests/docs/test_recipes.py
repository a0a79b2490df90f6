"""The table of the order of calls in docs/recipes.md is right, for both orders of each row.

The examples of the page run in test_pages.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from pages import ROOT
from zoo import transformers_only

pytestmark = transformers_only

_PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
_TABLE = _PAGE.partition("## Order of calls")[2].partition("\n## ")[0]
_LINES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in re.findall(r"^\| .*\|$", _TABLE, re.MULTILINE)
]
# Names of rows are without links.
ROWS = {
    re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", name): (before, after)
    for name, before, after in _LINES[1:]
}
_IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A group of one process on the CPU, an empty folder, and no warnings of other libraries."""
    monkeypatch.chdir(tmp_path)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        yield
    torch.distributed.destroy_process_group()
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
        )
    ).train()


# --- calls ----------------------------------------------------------------------------------------


def _to_dtype(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def _load(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: -t for name, t in model.state_dict().items()})
    return model


def _pretrained(model: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model.save_pretrained("saved")
    return AutoModelForCausalLM.from_pretrained("saved").train()  # type: ignore[no-any-return]


def _step(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=_IDS, labels=_IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False
    )
    return get_peft_model(model, lora)  # type: ignore[no-any-return]


def _checkpointed(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def _sharded(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def _split(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: Any = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer.mlp, init_device_mesh("cpu", (1,)), plan)
    return model  # type: ignore[no-any-return]


def _wrapped(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _prepared(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision="bf16").prepare(model)  # type: ignore[no-any-return]


def _trained(model: nn.Module) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in _IDS]
    arguments = TrainingArguments(
        "run", max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=0
    )
    Trainer(model, arguments, train_dataset=rows).train()
    return model


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _compiled_by_blocks(model: nn.Module) -> nn.Module:
    fusedops.compile_blocks(model, rest="eager")
    return model


def _quantised(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)  # type: ignore[no-any-return]


def _observed(model: nn.Module) -> nn.Module:
    model.eval().qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    return torch.ao.quantization.prepare(model)  # type: ignore[no-any-return, no-untyped-call]


def _observed_in_training(model: nn.Module) -> nn.Module:
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return torch.ao.quantization.prepare_qat(model)  # type: ignore[no-any-return, no-untyped-call]


CALLS: dict[str, tuple[Callable[[Any], nn.Module], ...]] = {
    "`model.to(device)`": (nn.Module.cpu,),
    "`model.to(dtype)`": (_to_dtype,),
    "`from_pretrained`": (_pretrained,),
    "`load_state_dict`": (_load,),
    "an optimizer of `model.parameters()`": (_step,),
    "PEFT: `get_peft_model`": (_adapted,),
    "gradient checkpointing": (_checkpointed,),
    "DDP": (torch.nn.parallel.DistributedDataParallel,),
    "`fully_shard`, `parallelize_module`": (_sharded, _split),
    "`FullyShardedDataParallel` (the older FSDP)": (_wrapped,),
    "`Accelerator.prepare`, `Trainer`": (_prepared, _trained),
    "`torch.compile`, `model.compile()`": (_compiled, _compiled_in_place),
    "`fusedops.compile_blocks`": (_compiled_by_blocks,),
    "`torch.ao.quantization.quantize_dynamic`": (_quantised,),
    "static quantisation, QAT": (_observed, _observed_in_training),
}
_CASES = [
    pytest.param(row, call, id=call.__name__) for row, calls in CALLS.items() for call in calls
]
_AFTER = [case for case in _CASES if ROWS[str(case.values[0])][1].startswith("yes")]


# --- both orders ----------------------------------------------------------------------------------


def _results(model: nn.Module) -> list[Tensor]:
    """The loss and the gradients of all parameters that have one."""
    model.zero_grad()
    loss = model(input_ids=_IDS, labels=_IDS).loss
    if loss.requires_grad:
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


def _compare(model: nn.Module, call: Callable[[Any], nn.Module]) -> None:
    """Compares with the same call on a model that is not fused.

    If the call compiles, which takes seconds, the other model is not compiled.
    """
    expected = _results(_model() if call in (_compiled, _compiled_in_place) else call(_model()))
    assert fusedops.fusion_status(model)
    # About ten roundings forward and ten backward differ. The eps of bf16 is 2⁻⁷.
    in_bf16 = call in (_to_dtype, _prepared)
    relative = 0.1 if in_bf16 else 1e-4
    for actual, other in zip(_results(model), expected, strict=True):
        torch.testing.assert_close(
            actual, other, rtol=0.0, atol=relative * float(other.abs().max())
        )


def test_table_has_the_rows_of_the_calls() -> None:
    assert list(ROWS) == list(CALLS)
    assert all(
        cell.startswith(("yes", "no: `ValueError`", "no: `TypeError`"))
        for row in ROWS.values()
        for cell in row
    )


@pytest.mark.parametrize("row, call", _CASES)
def test_called_before(row: str, call: Callable[[Any], nn.Module]) -> None:
    model = call(_model())
    if ROWS[row][0].startswith("no"):
        with pytest.raises(
            ValueError, match=r"fuse the model before|quantise the model without fusing it"
        ):
            fusedops.fuse_model(model)
        return
    assert fusedops.fuse_model(model)
    _compare(model, call)


@pytest.mark.parametrize("row, call", _AFTER)
def test_called_after(row: str, call: Callable[[Any], nn.Module]) -> None:
    model = _model()
    exclude = re.search(r"`exclude=\[\"(\w+)\"\]`", ROWS[row][1])
    assert fusedops.fuse_model(model, exclude=[exclude[1]] if exclude else [])
    if call is _pretrained:
        assert not fusedops.fusion_status(call(model)), "a loaded model is not fused"
    else:
        _compare(call(model), call)


class _Normed(nn.Module):
    """A model with the stubs that static quantisation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = (
            torch.ao.quantization.QuantStub(),
            torch.ao.quantization.DeQuantStub(),
        )  # type: ignore[no-untyped-call]
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(self.norm(self.enter(x))))  # type: ignore[no-any-return]


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="no integers on this machine"
)
@pytest.mark.parametrize("observe", [_observed, _observed_in_training])
def test_static_quantisation_needs_a_model_that_is_not_fused(
    observe: Callable[[nn.Module], nn.Module],
) -> None:
    x = torch.randn(4, 16)
    for unfuses in (False, True):
        model = _Normed()
        assert fusedops.fuse_model(model)
        if unfuses:
            fusedops.unfuse_model(model)
        model = observe(model)
        model(x)
        converted = torch.ao.quantization.convert(model.eval())  # type: ignore[no-untyped-call]
        if unfuses:
            assert converted(x).shape == x.shape
        else:
            with pytest.raises(TypeError, match=r"input is quantised.*call unfuse_model before"):
                converted(x)


@pytest.mark.parametrize("targets", [["gate_proj"], "all-linear", ["up_proj", "down_proj"]])
def test_adapters_in_either_order_leave_the_same_modules_in_graphs(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    reports = []
    for first, second in ((fusedops.fuse_model, None), (None, fusedops.fuse_model)):
        model = _model()
        for call in filter(
            None,
            (first, lambda m: get_peft_model(m, LoraConfig(r=4, target_modules=targets)), second),
        ):
            result = call(model)
            model = result if isinstance(result, nn.Module) else model
        in_graphs = [
            line.name for line in fusedops.fusion_status(model).modules if line.by is not None
        ]
        reports.append([name for name in in_graphs if ".layers." in name])
    assert reports[0] == reports[1]
    assert "base_model.model.model.layers.0.mlp" in reports[0]


@pytest.mark.parametrize("call", [_sharded, _split])
def test_check_refuses_a_sharded_model(call: Callable[[Any], nn.Module]) -> None:
    with pytest.raises(ValueError, match="check takes no sharded model"):
        fusedops.fuse_model(call(_model()), check={"input_ids": _IDS})


def test_forward_of_a_prepared_model_is_not_replaced() -> None:
    """The page says so of Accelerate."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    report = fusedops.fuse_model(_prepared(encoder))
    names = [line.name for line in report if line.rule == "graph"]
    assert names == ["layers.0", "layers.1"]


def test_accelerate_has_a_list_of_its_own_of_backends() -> None:
    """The page says that naming the backend raises."""
    from accelerate import Accelerator

    with pytest.raises(ValueError, match="'FUSEDOPS' is not a valid DynamoBackend"):
        Accelerator(cpu=True, dynamo_backend="fusedops")


def test_unfusing_a_prepared_model() -> None:
    """The troubleshooting page says how, for a norm or activation that is the whole model."""
    from accelerate import Accelerator

    norm = nn.LayerNorm(32)
    fusedops.fuse_model(norm)
    prepared = _prepared(norm)
    with pytest.raises(ValueError, match="was given a forward of its own"):
        fusedops.unfuse_model(prepared)
    fusedops.unfuse_model(Accelerator().unwrap_model(prepared, keep_fp32_wrapper=False))
    assert type(norm) is nn.LayerNorm


def test_unfusing_a_prepared_model_with_a_graph() -> None:
    """Accelerate's forward calls the fused one, which then is that of the class."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 3, 32)
    fusedops.fuse_model(layer)
    prepared = _prepared(layer)
    expected = prepared(x)
    assert fusedops.fusion_status(prepared).modules[0].rule == "graph"
    fusedops.unfuse_model(prepared)
    assert type(layer) is nn.TransformerEncoderLayer
    # In bf16 the two round at other places.
    torch.testing.assert_close(prepared(x), expected, rtol=0, atol=2.0**-5)
