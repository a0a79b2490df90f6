"""Whole models of some hundreds of architectures do fused what they did.

Values, gradients, hooks, copies, tokens.

Each test compares a model with itself; `architectures.comparing` says how far the two may differ.

The short suite takes `_SHORT`; with ``--full`` all of `architectures.names` run.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import architectures
import fusedops
from architectures import outputs
from architectures.comparing import (
    DRAWS,
    built,
    compare,
    distance,
    first_results,
    moved_by,
    size_of,
)
from fusedops.models import classes
from support import DEVICE, KERNEL_PATH
from zoo import observed

# What a model calls does not depend on the kernels, whose values the operators' own tests hold.
pytestmark = [pytest.mark.once, pytest.mark.plain]

_SHORT = {
    "bert",
    "gpt2",
    "t5",
    "llama",
    "gemma2",
    "vit",
    "mixtral",
    "written/nanogpt",
    "written/meta_llama",
    "torch/decoder_pre_norm",
}
every = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in _SHORT else pytest.mark.full) for n in architectures.names()],
)
_OPERATORS = (
    "bias_act",
    "bias_dropout_add_ln",
    "bias_dropout_add_rms_norm",
    "bias_dropout_add",
    "gelu",
    "gated_act",
    "layer_norm",
    "rms_norm",
)
# What these call hangs on what they are given.
_BY_INPUT = {"HiggsAudioV2DecoderLayer"}


@pytest.fixture(autouse=True)
def _own_warnings() -> Iterator[None]:
    """Those of the models themselves, fused or not, are not ours to mend.

    Fusedops' own stay errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"fusedops\.")
        yield


_fused: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """Some models have an activation that belongs to all of the process.

    It is given its class back.
    """
    yield
    while _fused:
        for module in _fused.pop().modules():
            classes.unfuse(module)


def _built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = built(name)
    _fused.append(model)
    return model, arguments


def _unchanged_by_fusing(model: nn.Module, arguments: dict[str, Any]) -> None:
    """The same results fused as not, within what moving all numbers by a unit in the last place makes of them."""
    # Before a run, as some models keep its tensors.
    others = [moved_by(model, arguments, draw) for draw in range(DRAWS)]
    run, expected = first_results(model, arguments)
    moved = [run(*other, draw) for draw, other in enumerate(others)]
    fusedops.fuse_model(model)
    compare(run(model, arguments), expected, moved)


@every
def test_each_module_and_the_model_agree(name: str) -> None:
    """In evaluation mode: by `check`, which finds the module that does not."""
    model, arguments = _built(name)
    try:
        report = fusedops.fuse_model(model, check=arguments)
    except Exception:
        try:
            fusedops.fuse_model(model, exclude=[""], check=arguments)
        except Exception as error:  # noqa: BLE001, it has no gradient in evaluation mode, say
            pytest.skip(f"cannot be checked, with nothing fused: {error}")
        raise
    assert report.difference is not None
    assert [
        (m.name, m.type, m.reason) for m in report.left if m.reason.endswith("differs from it")
    ] == []
    assert report.difference.passes, report.difference


@every
def test_training_with_dropout(name: str) -> None:
    """On a CPU the masks are those that the model drew before it was fused.

    On a GPU only that it runs.
    """
    model, arguments = _built(name)
    if KERNEL_PATH:
        fusedops.fuse_model(model)
        assert first_results(model.train(), arguments)[1]
    else:
        _unchanged_by_fusing(model.train(), arguments)


@every
def test_gradient_checkpointing(name: str) -> None:
    model, arguments = _built(name)
    if not getattr(model, "supports_gradient_checkpointing", False) or KERNEL_PATH:
        return
    try:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        pytest.skip(f"says that it supports checkpointing, but: {error}")
    _unchanged_by_fusing(model, arguments)


@every
def test_autocast(name: str) -> None:
    """In bf16: the dtypes of before, and no further from the fp32 results than twice that, or 8 roundings more.

    How far that is, is the most of four models: its own numbers, and those moved by a unit of bf16.
    One of them may send a row to another expert.
    """
    model, arguments = _built(name)

    def run(other: nn.Module, given: dict[str, Any]) -> list[Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return _bits(other, given)

    exact = _bits(model, arguments)
    try:
        eager = run(model, arguments)
    except Exception as error:  # noqa: BLE001, some models mix dtypes under autocast
        pytest.skip(f"does not run under autocast: {error}")
    moved = [run(*moved_by(model, arguments, draw, 2.0**-8)) for draw in range(DRAWS)]
    fusedops.fuse_model(model)
    result = run(model, arguments)
    assert [x.dtype for x in result] == [x.dtype for x in eager]
    for index, (x, z) in enumerate(zip(result, exact, strict=True)):
        allowed = 2 * max(distance(ys[index], z) for ys in (eager, *moved)) + 8 * 2.0**-8 * size_of(
            z
        )
        assert distance(x, z) <= allowed, (
            f"output {index}: {distance(x, z):.3g}, allowed {allowed:.3g}"
        )


def _counted(model: nn.Module, arguments: dict[str, Any]) -> Counter[str]:
    """How often each module's forward hook fires."""
    calls: Counter[str] = Counter()

    def count(name: str, *_: Any) -> None:
        calls[name] += 1

    handles = [m.register_forward_hook(partial(count, name)) for name, m in model.named_modules()]
    with torch.no_grad():
        model(**arguments)
    for handle in handles:
        handle.remove()
    return calls


@every
def test_hooks_fire_as_often(name: str) -> None:
    model, arguments = _built(name)
    torch.manual_seed(3)
    expected = _counted(model, arguments)
    fusedops.fuse_model(model)
    torch.manual_seed(3)
    assert _counted(model, arguments) == expected


def _made(model: nn.Module, arguments: dict[str, Any]) -> dict[str, set[str]]:
    """The operators that are called within a module's methods, by the module's name."""
    names = {module: name for name, module in model.named_modules()}
    within: dict[str, set[str]] = {}

    def observe(operator: str, *_: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in names:
                within.setdefault(names[module], set()).add(operator)
            frame = frame.f_back

    with observed(observe), torch.no_grad():
        model(**arguments)
    return within


@every
def test_calls_what_it_reports(name: str) -> None:
    """Each module that runs calls every operator that the report names for it."""
    model, arguments = _built(name)
    model.train()
    torch.manual_seed(3)
    reached = _counted(model, arguments)
    report = fusedops.fuse_model(model)
    torch.manual_seed(3)
    within = _made(model, arguments)
    said = {
        m.name: {o for o in _OPERATORS if o in m.calls.replace(",", " ").split()}
        for m in report.modules
        if m.calls and m.by is None and reached[m.name]
    }
    fused = {m.name: m.type for m in report.modules if m.fused}
    idle = [
        (
            name,
            fused[name],
            sorted(what - within.get(name, set()) - within.get(_block(name, fused), set())),
        )
        for name, what in said.items()
    ]
    assert [line for line in idle if line[2] and line[1] not in _BY_INPUT] == []


def _block(name: str, fused: dict[str, str]) -> str | None:
    """The fused module next around another, which may do what that leaves to it."""
    while name:
        name = name.rpartition(".")[0]
        if name in fused:
            return name
    return None


@every
def test_generates_the_same_tokens(name: str) -> None:
    model, arguments = _built(name)
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return
    inputs = {k: v for k, v in arguments.items() if not k.startswith("decoder_")}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        inputs["decoder_start_token_id"] = 0

    def generate() -> Tensor:
        torch.manual_seed(3)
        return model.generate(**inputs, max_new_tokens=4, do_sample=False)

    try:
        expected = generate()
    except Exception as error:  # noqa: BLE001, its inputs are not those of `generate`
        pytest.skip(f"does not generate from these inputs: {error}")
    fusedops.fuse_model(model)
    result = generate()
    for a, b in zip(_tensors(result), _tensors(expected), strict=True):
        assert torch.equal(a, b) or a.is_floating_point()


def _tensors(value: Any) -> list[Tensor]:
    return (
        [value]
        if isinstance(value, Tensor)
        else [x for x in value.values() if isinstance(x, Tensor)]
    )


@every
def test_copies(name: str) -> None:
    """A deep copy and a pickled one are fused as the model is, and give the same bits."""
    model, arguments = _built(name)
    ways = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved]
    works = [way for way in ways if _runs(way, model)]
    assert copy.deepcopy in works
    fusedops.fuse_model(model)
    expected, status = _bits(model, arguments), fusedops.fusion_status(model)
    for way in works:
        other = way(model)
        assert fusedops.fusion_status(other) == status
        _same(_bits(other, arguments), expected)


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _runs(way: Callable[[nn.Module], nn.Module], model: nn.Module) -> bool:
    try:
        way(model)
    except Exception:  # noqa: BLE001, not even as it is
        return False
    return True


def _bits(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        return outputs(model(**arguments))


def _same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@every
def test_unfused_as_before(name: str) -> None:
    """The same classes, parameters, keys and bits."""
    model, arguments = _built(name)
    run, before = first_results(model.train(), arguments)
    types, parameters = [type(m) for m in model.modules()], list(model.named_parameters())
    fusedops.fuse_model(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in parameters]
    run(model, arguments)
    fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == types
    assert all(a is b for (_, a), (_, b) in zip(model.named_parameters(), parameters, strict=True))
    after = run(model, arguments)
    assert after.keys() == before.keys()
    _same(list(after.values()), list(before.values()))
