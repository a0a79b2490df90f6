"""Models with forwards, methods or classes that were changed before or after fusing.

A fused model runs the changed code, or `fuse_model` leaves the module and reports the reason.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models import FusionReport
from fusedops.models.fingerprint import definition
from modules import close, randomise
from support import DEVICE
from zoo import SAMPLES, build, inputs, outputs, transformers_only

pytestmark = pytest.mark.once  # what is fused does not depend on the kernels

_N = 16


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 2.0 * forward(*args, **kwargs)

    return wrapper


def _in_bf16(forward: Callable[..., Any]) -> Callable[..., Any]:
    wrapped: Callable[..., Any] = torch.autocast(DEVICE.type, torch.bfloat16)(forward)
    return wrapped


def _random(cls: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Return an instance with random parameters, in evaluation mode."""
    return randomise(cls(*args, **kwargs).to(DEVICE)).eval()


def _fuse_unchanged(module: nn.Module, *args: Tensor) -> FusionReport:
    """Fuse a module, check that its outputs and gradients stay the same, and return the report."""

    def run() -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in args]
        y = module(*leaves)
        if not y.requires_grad:
            return [y]
        return [
            y,
            *torch.autograd.grad(y.sum(), [*leaves, *module.parameters()], allow_unused=True),
        ]

    expected = run()
    report = fusedops.fuse_model(module, graph=False)
    for ours, theirs in zip(run(), expected, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            close(ours, theirs)
    return report


# --- forwards of a class --------------------------------------------------------------------------


@transformers_only
@pytest.mark.parametrize(
    "wrap", [_doubled, torch.no_grad(), _in_bf16], ids=["wraps", "no_grad", "autocast"]
)
def test_class_with_a_wrapped_forward_is_left(
    wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper has other code, although `inspect` follows `__wrapped__` to the original's."""
    cls = _class_of("transformers.models.llama.modeling_llama.LlamaRMSNorm")
    monkeypatch.setattr(cls, "forward", wrap(cls.forward))
    report = _fuse_unchanged(_random(cls, _N), torch.randn(3, _N, device=DEVICE))
    assert [m.reason for m in report.modules] == ["its forward is wrapped"]


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.GELU, nn.RMSNorm], ids=lambda cls: cls.__name__)
def test_class_of_pytorch_with_a_patched_forward_is_left(
    cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule's base has the same forward as the module's class, but it is not PyTorch's."""
    monkeypatch.setattr(cls, "forward", _doubled(cls.forward))
    module = _random(cls, *(() if cls is nn.GELU else (_N,)))
    assert not _fuse_unchanged(module, torch.randn(3, _N, device=DEVICE))


def test_class_of_pytorch_with_the_forward_of_another_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both forwards are in the same file."""
    monkeypatch.setattr(nn.LayerNorm, "forward", nn.RMSNorm.forward)
    assert not _fuse_unchanged(_random(nn.LayerNorm, _N), torch.randn(3, _N, device=DEVICE))


# --- methods of an instance -----------------------------------------------------------------------


@transformers_only
def test_norm_with_a_replaced_method_is_left() -> None:
    norm = _random(_class_of("transformers.models.gemma.modeling_gemma.GemmaRMSNorm"), _N)
    norm._norm = lambda x: 3.0 * x
    assert not _fuse_unchanged(norm, torch.randn(3, _N, device=DEVICE))


@transformers_only
def test_norm_with_a_weight_of_two_dimensions_is_left() -> None:
    norm = _random(_class_of("transformers.models.llama.modeling_llama.LlamaRMSNorm"), (4, 8))
    report = _fuse_unchanged(norm, torch.randn(3, 4, 8, device=DEVICE))
    assert report.modules[0].reason == "its weight is no vector"


# --- all or nothing -------------------------------------------------------------------------------


class _WithoutSubclasses(nn.LayerNorm):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise RuntimeError("no subclasses, please")


@pytest.mark.parametrize("with_check", [False, True], ids=["plain", "checked"])
def test_class_that_refuses_subclasses_is_an_error_and_fuses_nothing(with_check: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(_N), nn.GELU(), _WithoutSubclasses(_N), nn.LayerNorm(_N)).to(
        DEVICE
    )
    types = [type(module) for module in model.modules()]
    check = torch.randn(2, _N, device=DEVICE) if with_check else False
    with pytest.raises(
        TypeError, match=r"test_changed\._WithoutSubclasses cannot be fused.*no subclasses, please"
    ):
        fusedops.fuse_model(model, check=check)
    assert [type(module) for module in model.modules()] == types
    assert len(fusedops.fuse_model(model, exclude=["_WithoutSubclasses"], graph=False)) == 3


@pytest.mark.parametrize(
    "spec",
    [s for s in SAMPLES if s.name in ("leaves", "bert", "llama")],
    ids=lambda spec: spec.name,
)
def test_unfuse_is_an_error_if_a_forward_was_replaced_after_fusing(spec: Any) -> None:
    """As with Accelerate's hooks, the new forward calls the fused one.

    After unfusing, the module's class would not have the fused forward.
    """
    model, arguments = build(spec), inputs(spec)
    with torch.no_grad():
        expected = outputs(model(**arguments))[0]
        fusedops.fuse_model(model)
        module = next(m for m in model.modules() if type(m).__name__.endswith("Norm"))
        fused_forward, calls = module.forward, []

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return fused_forward(*args, **kwargs)

        module.forward = forward
        with pytest.raises(ValueError, match="was given a forward of its own after it was fused"):
            fusedops.unfuse_model(model)
        close(outputs(model(**arguments))[0], expected)
        assert calls
        del module.forward
        fusedops.unfuse_model(model)
        assert not any(hasattr(type(m), "_fusedops_rule") for m in model.modules())
        close(outputs(model(**arguments))[0], expected)


def test_unfuse_removes_the_class_forward_from_the_instance() -> None:
    """Accelerate's hooks leave it in the instance, where it would call the fused forward."""
    model = nn.Sequential(nn.LayerNorm(_N), nn.GELU())
    fusedops.fuse_model(model, graph=False)
    model[0].forward = model[0].forward  # type: ignore[method-assign]
    assert len(fusedops.fusion_status(model)) == 2
    fusedops.unfuse_model(model)
    assert "forward" not in vars(model[0])
    assert type(model[0]) is nn.LayerNorm


@transformers_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_generate_is_fused_although_the_models_forward_is_replaced(when: str) -> None:
    """Accelerate's mixed precision replaces the forward, before or after fusing."""
    (spec,) = (s for s in SAMPLES if s.name == "llama")
    model = build(spec)

    def replace() -> None:
        old = model.forward
        model.forward = lambda *args, **kwargs: old(*args, **kwargs)  # type: ignore[method-assign]

    if when == "before":
        replace()
    report = fusedops.fuse_model(model)
    if when == "after":
        replace()
    if when == "before":
        for status in (report, fusedops.fusion_status(model)):
            assert status.modules[0].calls == "no_repeat_ngram in generate"
        fusedops.unfuse_model(model)
        assert not fusedops.fusion_status(model)


# --- what other code observes ---------------------------------------------------------------------


def test_fused_classes_are_pickled() -> None:
    model = nn.Sequential(nn.LayerNorm(_N), nn.GELU())
    fusedops.fuse_model(model)
    for module in model:
        cls = type(module)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(cls, protocol)) is cls
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(type("Local", (type(model[0]),), {}))


@pytest.mark.parametrize(
    "before, after",
    [
        ("if x: y = x\n    y = z", "if x: y = x; y = z"),
        ("y = a(b(x))", "y = a(b, x)()"),
        ("y = a(x)(x)", "y = a(x, x)()"),
    ],
)
def test_file_with_other_blocks_or_calls_is_not_the_source_of_a_function(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changed file has the same names and constants in the same order."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / f"blocks_{abs(hash(before))}.py"
    path.write_text(f"def forward(x, y, z, a, b):\n    {before}\n    return y\n")
    forward = importlib.import_module(path.stem).forward
    assert definition(forward) is not None
    path.write_text(f"def forward(x, y, z, a, b):\n    {after}\n    return y\n")
    linecache.checkcache()
    definition.cache_clear()
    assert definition(forward) is None
