"""Models that fuse_model does not take: a message of what to do first, and the model as it was."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusedops

pytestmark = pytest.mark.once


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())


def _compiled_in_place() -> nn.Module:
    model = _model()
    model.compile(backend="eager")
    return model


def _holding(module: Any) -> nn.Module:
    holder = nn.Module()
    holder.inner = module
    return holder


def _quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(_model(), {nn.Linear}, torch.qint8)  # type: ignore[no-any-return]


def _flagged() -> nn.Module:
    model = _model()
    model.is_quantized = True  # as Transformers marks its own
    return model


def _silently(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


_BAD = {
    "compiled": (lambda: torch.compile(_model()), "the model is compiled; fuse the model before torch.compile"),
    "compiled inside": (
        lambda: _holding(torch.compile(_model())),
        "module 'inner' is compiled; fuse .* before torch.compile",
    ),
    "compiled in place": (_compiled_in_place, "the model is compiled; fuse the model before"),
    "scripted": (
        lambda: _silently(lambda: torch.jit.script(_model())),
        "is scripted or traced; fuse .* before torch.jit",
    ),
    "traced": (
        lambda: _silently(lambda: torch.jit.trace(_model(), torch.ones(1, 4))),
        "is scripted or traced; fuse .* before",
    ),
    "scripted inside": (lambda: _holding(_silently(lambda: torch.jit.script(_model()))), "module 'inner' is scripted"),
    "quantised": (_quantized, "module '0' is quantised; fuse the model before it is quantised"),
    "quantised by Transformers": (_flagged, "the model is quantised; fuse the model before"),
}


@pytest.mark.parametrize("name", _BAD)
@pytest.mark.parametrize("options", [{}, {"dry_run": True}], ids=["", "dry"])
def test_is_told_what_to_do(name: str, options: dict[str, Any]) -> None:
    make, match = _BAD[name]
    model = make()  # type: ignore[no-untyped-call]
    types = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        fusedops.fuse_model(model, **options)
    assert [type(m) for m in model.modules()] == types


@pytest.mark.parametrize("model", [None, 3, nn.LayerNorm, lambda x: x], ids=["None", "int", "class", "function"])
def test_no_module(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got"):
        fusedops.fuse_model(model)


@pytest.mark.parametrize("check, match", [
    (True, "check=True needs a model with dummy_inputs"),
    (3, "check must be True or example inputs .* got int"),
])  # fmt: skip
def test_bad_check(check: Any, match: str) -> None:
    model = _model()
    with pytest.raises(TypeError, match=match):
        fusedops.fuse_model(model, check=check)
    assert type(model[1]) is nn.LayerNorm


def test_inputs_that_do_not_fit_leave_the_model_as_it_was() -> None:
    model = _model().train()
    with pytest.raises(RuntimeError):
        fusedops.fuse_model(model, check=torch.ones(2, 5))
    assert type(model[1]) is nn.LayerNorm
    assert all(m.training for m in model.modules())


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("MASTER_ADDR", "localhost")
    model = _model()
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="the model is wrapped in FSDP; fuse the model before it is wrapped"):
        fusedops.fuse_model(model)
    with pytest.raises(ValueError, match="FSDP"):
        fusedops.fuse_model(_holding(model))


@pytest.mark.usefixtures("process_group")
def test_fused_and_then_sharded() -> None:
    """The other way about, which the message recommends, works; unfusing then must wait."""
    from torch.distributed.fsdp import fully_shard

    original, model = _model(), _model()
    model.load_state_dict(original.state_dict())
    fusedops.fuse_model(model)
    for module in (model[1], model):
        fully_shard(module, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), original(x))
    with pytest.raises(ValueError, match="module '1' was changed after it was fused, to FSDP"):
        fusedops.unfuse_model(model)


def test_unfuse_takes_modules() -> None:
    with pytest.raises(TypeError, match=r"unfuse_model: model must be a torch\.nn\.Module, got str"):
        fusedops.unfuse_model("model")  # type: ignore[arg-type]
