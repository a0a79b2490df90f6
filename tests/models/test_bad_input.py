"""Models that `fuse_model` refuses: the error says what to do, and the model is not changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops.core.compat import distributed

pytestmark = pytest.mark.once


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())


def _compiled_in_place() -> nn.Module:
    model = _model()
    model.compile(backend="eager")
    return model


def _with_inner(module: Any) -> nn.Module:
    outer = nn.Module()
    outer.inner = module
    return outer


def _quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(_model(), {nn.Linear}, torch.qint8)  # type: ignore[no-any-return]


def _marked_as_quantized() -> nn.Module:
    model = _model()
    model.is_quantized = True  # Transformers sets this on models that it quantises
    return model


def _silently(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


_BAD = {
    "compiled": (
        lambda: torch.compile(_model()),
        "the model is compiled; fuse the model before torch.compile",
    ),
    "compiled inside": (
        lambda: _with_inner(torch.compile(_model())),
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
    "scripted inside": (
        lambda: _with_inner(_silently(lambda: torch.jit.script(_model()))),
        "module 'inner' is scripted",
    ),
    "quantised": (_quantized, "module '0' is quantised; use fusedops.compile"),
    "quantised by Transformers": (
        _marked_as_quantized,
        "the model is quantised; use fusedops.compile",
    ),
}


@pytest.mark.parametrize("name", _BAD)
@pytest.mark.parametrize("options", [{}, {"dry_run": True}], ids=["", "dry"])
def test_error_says_what_to_do_first(name: str, options: dict[str, Any]) -> None:
    make, match = _BAD[name]
    model = make()  # type: ignore[no-untyped-call]
    types = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        fusedops.fuse_model(model, **options)
    assert [type(m) for m in model.modules()] == types


@pytest.mark.parametrize(
    "model", [None, 3, nn.LayerNorm, lambda x: x], ids=["None", "int", "class", "function"]
)
def test_fuse_model_raises_for_what_is_not_a_module(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got"):
        fusedops.fuse_model(model)


@pytest.mark.parametrize(
    "check, match",
    [
        (True, "check=True needs a model with dummy_inputs"),
        (3, "check must be True or example inputs .* got int"),
    ],
)
def test_bad_check_is_an_error_and_fuses_nothing(check: Any, match: str) -> None:
    model = _model()
    with pytest.raises(TypeError, match=match):
        fusedops.fuse_model(model, check=check)
    assert type(model[1]) is nn.LayerNorm


def test_model_is_unchanged_if_the_inputs_of_check_do_not_fit() -> None:
    model = _model().train()
    with pytest.raises(RuntimeError):
        fusedops.fuse_model(model, check=torch.ones(2, 5))
    assert type(model[1]) is nn.LayerNorm
    assert all(m.training for m in model.modules())


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_model_in_the_wrapper_of_the_older_fsdp_is_refused() -> None:
    """The wrapper flattens parameters. It is made without its constructor, which needs a GPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    message = "the model is wrapped in FSDP; fuse the model before it is wrapped, or shard it by fully_shard"
    with pytest.raises(ValueError, match=message):
        fusedops.fuse_model(model)
    with pytest.raises(ValueError, match="module '0' is wrapped in FSDP"):
        fusedops.fuse_model(nn.Sequential(model))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("has_table", [True, False], ids=["", "without FSDP's table"])
@pytest.mark.parametrize("fuses_first", [True, False], ids=["fused first", "sharded first"])
def test_fused_and_sharded_in_either_order_have_one_class(
    has_table: bool, fuses_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are those of the original. After unfusing, the module is still sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not has_table:
        monkeypatch.setattr(distributed, "imported", lambda module, name: None)
    original, model = _model(), _model()
    model.load_state_dict(original.state_dict())
    mesh = init_device_mesh("cpu", (1,))

    def shard() -> None:
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)

    if fuses_first:
        fusedops.fuse_model(model, graph=False)
        shard()
    else:
        shard()
        fusedops.fuse_model(model, graph=False)
    norm: Any = type(model[1])
    assert [line.name for line in fusedops.fusion_status(model).replaced] == ["1", "2"]
    assert isinstance(model[1], FSDPModule)
    assert hasattr(norm.__bases__[1], "_fusedops_rule")
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), original(x))
    with pytest.raises(
        ValueError,
        match="check takes no sharded model; fuse the model with check before fully_shard",
    ):
        fusedops.fuse_model(model, check=x, graph=False)
    assert type(model[1]) is norm
    fusedops.unfuse_model(model)
    assert isinstance(model[1], FSDPModule)
    assert type(model[1]).__bases__[1] is nn.LayerNorm
    torch.testing.assert_close(model(x), original(x))
    fusedops.fuse_model(model, graph=False)
    assert type(model[1]) is norm


def test_unfuse_model_raises_for_what_is_not_a_module() -> None:
    with pytest.raises(
        TypeError, match=r"unfuse_model: model must be a torch\.nn\.Module, got str"
    ):
        fusedops.unfuse_model("model")  # type: ignore[arg-type]
