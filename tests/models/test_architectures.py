"""Fused models of some hundreds of architectures behave as before.

The tests compare values, gradients, calls of hooks, copies and generated tokens of each model
before and after fusing. `architectures.comparing` says how far the results may differ.

The short suite runs `_SHORT`; with ``--full`` all of `architectures.names` run.
"""

from __future__ import annotations

import copy
import io
import pickle
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
from backends import select_as_large
from fusedops.models import classes, graph
from support import DEVICE
from zoo import without_dropout

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_SHORT = {"bert", "t5", "mixtral", "written/nanogpt", "torch/decoder_pre_norm"}
every = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in _SHORT else pytest.mark.full) for n in architectures.names()],
)


@pytest.fixture(autouse=True)
def _own_warnings() -> Iterator[None]:
    """Ignores warnings of the models themselves. Warnings of fusedops stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"fusedops\.")
        yield


@pytest.fixture(autouse=True)
def _small_regions_are_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    select_as_large(monkeypatch.setattr)
    monkeypatch.setattr(graph, "FEW_ROWS", 0)


_fused: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _unfused_at_the_end() -> Iterator[None]:
    """Unfuses all modules: some models share an activation with the whole process."""
    yield
    while _fused:
        for module in _fused.pop().modules():
            classes.unfuse(module)


def _built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its arguments; the model is unfused at the end of the test."""
    model, arguments = built(name)
    _fused.append(model)
    return model, arguments


def _check_unchanged_by_fusing(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Check that results before and after fusing agree.

    They may differ by as much as if all numbers of the model moved by a unit in the last place.
    """
    # These are copied before a run, because some models store tensors of the run.
    moved_models = [moved_by(model, arguments, draw) for draw in range(DRAWS)]
    run, expected = first_results(model, arguments)
    moved_results = [run(*moved, draw) for draw, moved in enumerate(moved_models)]
    fusedops.fuse_model(model)
    compare(run(model, arguments), expected, moved_results)


@every
def test_check_passes_for_each_module_and_the_model(name: str) -> None:
    """`check` compares them in evaluation mode, and names a module that differs."""
    model, arguments = _built(name)
    try:
        report = fusedops.fuse_model(model, check=arguments)
    except Exception:
        try:
            fusedops.fuse_model(model, exclude=[""], check=arguments)
        except Exception as error:  # noqa: BLE001, the model may have no gradient, for example
            pytest.skip(f"cannot be checked, with nothing fused: {error}")
        raise
    assert report.difference is not None
    wrong = [(m.name, m.type) for m in report.left if m.reason.endswith("differs from it")]
    assert not wrong
    assert report.difference.passes, report.difference


@every
def test_training_has_the_results_of_the_original(name: str) -> None:
    """Without dropout, as masks differ."""
    model, arguments = _built(name)
    _check_unchanged_by_fusing(without_dropout(model), arguments)


@every
def test_gradient_checkpointing_has_the_results_of_the_original(name: str) -> None:
    model, arguments = _built(name)
    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    try:
        without_dropout(model).gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        pytest.skip(f"says that it supports checkpointing, but: {error}")
    _check_unchanged_by_fusing(model, arguments)


@every
def test_autocast_errors_are_at_most_twice_those_of_the_original(name: str) -> None:
    """Dtypes are those of the original, and errors at most twice its errors plus 8 roundings.

    Errors are distances from the fp32 results. The original's error is the largest of four models:
    the model itself, and three whose numbers are moved by one unit of bf16. (A moved model may
    send a row to another expert.)
    """
    model, arguments = _built(name)

    def run(called: nn.Module, its_arguments: dict[str, Any]) -> list[Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return _outputs(called, its_arguments)

    exact = _outputs(model, arguments)
    try:
        eager = run(model, arguments)
    except Exception as error:  # noqa: BLE001, some models mix dtypes under autocast
        pytest.skip(f"does not run under autocast: {error}")
    moved = [run(*moved_by(model, arguments, draw, 2.0**-8)) for draw in range(DRAWS)]
    fusedops.fuse_model(model)
    result = run(model, arguments)
    assert [x.dtype for x in result] == [x.dtype for x in eager]
    for index, (ours, truth) in enumerate(zip(result, exact, strict=True)):
        error = distance(ours, truth)
        eager_error = max(distance(outputs[index], truth) for outputs in (eager, *moved))
        allowed = 2 * eager_error + 8 * 2.0**-8 * size_of(truth)
        assert error <= allowed, f"output {index}: {error:.3g}, allowed {allowed:.3g}"


def _counted(model: nn.Module, arguments: dict[str, Any]) -> Counter[str]:
    """Return how often each module's forward hook is called."""
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
def test_hooks_are_called_as_often_as_in_the_original(name: str) -> None:
    model, arguments = _built(name)
    torch.manual_seed(3)
    expected = _counted(model, arguments)
    fusedops.fuse_model(model)
    torch.manual_seed(3)
    assert _counted(model, arguments) == expected


@every
def test_fused_model_generates_the_same_tokens(name: str) -> None:
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
    except Exception as error:  # noqa: BLE001, `generate` may need other inputs
        pytest.skip(f"does not generate from these inputs: {error}")
    fusedops.fuse_model(model)
    result = generate()
    for ours, theirs in zip(_tensors(result), _tensors(expected), strict=True):
        if not ours.is_floating_point():  # tokens are integers; scores may differ
            assert torch.equal(ours, theirs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in value.values() if isinstance(x, Tensor)]


@every
def test_copied_pickled_and_saved_models_are_fused_and_have_the_same_bits(name: str) -> None:
    """Ways to copy that fail for the original are left out."""
    model, arguments = _built(name)
    functions = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved_and_loaded]
    working = [function for function in functions if _runs(function, model)]
    assert copy.deepcopy in working
    fusedops.fuse_model(model)
    expected, status = _outputs(model, arguments), fusedops.fusion_status(model)
    for function in working:
        copied = function(model)
        assert fusedops.fusion_status(copied) == status
        _check_same_bits(_outputs(copied, arguments), expected)


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _runs(function: Callable[[nn.Module], nn.Module], model: nn.Module) -> bool:
    try:
        function(model)
    except Exception:  # noqa: BLE001, the original fails in any way
        return False
    return True


def _outputs(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        return outputs(model(**arguments))


def _check_same_bits(result: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@every
def test_unfused_model_has_the_classes_parameters_and_bits_of_the_original(name: str) -> None:
    model, arguments = _built(name)
    run, before = first_results(model.train(), arguments)
    types, parameters = [type(m) for m in model.modules()], dict(model.named_parameters())
    fusedops.fuse_model(model)
    assert list(dict(model.named_parameters())) == list(parameters)
    run(model, arguments)
    fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == types
    parameters_after = dict(model.named_parameters())
    assert all(parameters_after[name] is parameter for name, parameter in parameters.items())
    after = run(model, arguments)
    assert after.keys() == before.keys()
    _check_same_bits(list(after.values()), list(before.values()))
