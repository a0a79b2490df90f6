"""Compiled by the backend, models of some hundreds of architectures give the results of eager mode.

The tests compare values, gradients and dropout of a compiled model with those of the same model in
eager mode. `architectures.comparing` says how far the two may differ, and `architectures.compiled`
what is compiled. A model is skipped if it also fails when it is compiled without fused operators.

Each model takes seconds in the interpreter. So the short suite runs only the architectures that are
named at each test; with ``--full`` all of `architectures.names` run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import architectures
import backend_coverage
from architectures import outputs
from architectures.comparing import (
    DRAWS,
    Results,
    built,
    compare,
    distance,
    first_results,
    moved_by,
    size_of,
)
from architectures.compiled import compiled, compiled_alone, compiled_with_eager_rest
from fusedops.backend import entry
from fusedops.backend.entry import backend
from fusedops.backend.regions import CHANGING
from fusedops.backend.report import CompileReport
from support import DEVICE
from zoo import without_dropout

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Check = Callable[[Callable[[nn.Module], Any]], None]


def every(*short: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a test on all architectures, and on ``short`` in the short suite.

    The short suite has bert for post-norm, biases and dropout, t5 for relative positions and a
    decoder, gpt_neox for rotary embeddings and parts of packed projections, and mixtral for
    experts.
    """
    names = [
        pytest.param(name, marks=() if name in short else pytest.mark.full)
        for name in architectures.names()
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.kernels(pytest.mark.parametrize("name", names)(test))

    return decorate


@pytest.fixture(autouse=True)
def _own_warnings() -> Iterator[None]:
    """Ignores warnings of the models themselves. Warnings of fusedops stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"fusedops\.")
        yield


def _holds(check: Check, compile_it: Callable[[nn.Module], Any] = compiled) -> None:
    """Runs a check under the backend, and skips the test if it fails without fused operators too."""
    try:
        check(compile_it)
    except pytest.skip.Exception:
        raise
    except (Exception, pytest.fail.Exception):
        try:
            check(compiled_alone)
        except Exception as error:  # noqa: BLE001, of any kind
            pytest.skip(f"fails without fused operators: {error}")
        except pytest.fail.Exception as error:
            pytest.skip(f"differs without fused operators: {error}")
        raise


def _agrees(
    name: str, prepare: Callable[[nn.Module], nn.Module], compile_it: Callable[[nn.Module], Any]
) -> None:
    """Checks that values and gradients of a compiled model are those of eager mode."""
    model, arguments = built(name)
    prepare(model)
    # These are copied before a run, because some models store tensors of the run.
    moved_models = [moved_by(model, arguments, draw) for draw in range(DRAWS)]
    run, expected = first_results(model, arguments)
    if _draws(model, arguments):
        pytest.skip("draws random numbers without dropout")
    moved_results = [run(*moved, draw) for draw, moved in enumerate(moved_models)]
    compile_it(model)
    compare(run(model, arguments), expected, moved_results)


def _draws(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers; a compiled model draws them in another order."""
    generator = (
        torch.cuda.default_generators[0] if DEVICE.type == "cuda" else torch.default_generator
    )
    before = generator.get_state()
    with torch.no_grad():
        model(**arguments)
    return not torch.equal(generator.get_state(), before)


@every("mixtral")
def test_training_has_eager_values_and_gradients(name: str) -> None:
    """Outputs and gradients agree in training mode, with all dropout set to zero."""
    _holds(partial(_agrees, name, without_dropout))


@every("gpt_neox")
def test_training_with_an_eager_rest_has_eager_values_and_gradients(name: str) -> None:
    """As before, with the rest of the graph run by PyTorch's eager operators."""
    _holds(partial(_agrees, name, without_dropout), compiled_with_eager_rest)


@every("t5")
def test_inference_has_eager_values(name: str) -> None:
    """Outputs agree in evaluation mode, with no gradient recorded."""

    def check(compile_it: Callable[[nn.Module], Any]) -> None:
        model, arguments = built(name)
        moved_models = [moved_by(model, arguments, draw) for draw in range(DRAWS)]
        try:
            expected = _values(model, arguments)
        except Exception as error:  # noqa: BLE001, such a model fails in eager mode
            pytest.skip(f"fails without being compiled: {error}")
        moved_results = [_values(*moved) for moved in moved_models]
        compile_it(model)
        compare(_values(model, arguments), expected, moved_results)

    _holds(check)


def _values(model: nn.Module, arguments: dict[str, Any]) -> Results:
    """Return the outputs by number, without gradients."""
    torch.manual_seed(3)
    with torch.no_grad():
        return {f"output {index}": y for index, y in enumerate(outputs(model(**arguments)))}


@every()
def test_checkpointed_models_have_eager_values_and_gradients(name: str) -> None:
    """They agree with eager mode without dropout; with dropout the recomputed masks are the same."""
    model, _ = built(name)
    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    _holds(partial(_agrees, name, lambda other: _checkpointed(without_dropout(other))))
    _holds(partial(_drops, name, lambda other: _checkpointed(other.train())))


def _checkpointed(model: Any) -> nn.Module:
    """Return the model, with gradient checkpointing enabled."""
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        pytest.skip(f"says that it supports checkpointing, but: {error}")
    return model


@every("bert")
def test_dropout_is_reproducible_and_differentiated(name: str) -> None:
    """A seed gives the same bits again, and the backward uses the masks of the forward."""
    _holds(partial(_drops, name, nn.Module.train))


def _drops(
    name: str, prepare: Callable[[nn.Module], nn.Module], compile_it: Callable[[nn.Module], Any]
) -> None:
    """Checks that a compiled model repeats its dropout masks, also in the backward."""
    model, arguments = built(name)
    if not _draws(prepare(model), arguments):
        return
    model.double()
    for argument, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            arguments[argument] = value.double()
    run, _ = first_results(model, arguments)
    eager_error = _slope_error(model, run, arguments)
    compile_it(model)
    first, second = run(model, arguments), run(model, arguments)
    assert first.keys() == second.keys()
    assert all(distance(first[key], second[key]) == 0 for key in first), (
        "a seed gives other results"
    )
    # With a wrong mask in the backward the whole gradient would be wrong. A hundredth is allowed
    # for kinks and for casts to fp32.
    assert _slope_error(model, run, arguments) <= 0.01 + 16 * eager_error


def _slope_error(model: nn.Module, run: Callable[..., Results], arguments: dict[str, Any]) -> float:
    """Return how far the gradient is from a difference quotient, relative to the gradient's length.

    The quotient is taken along the gradient, where the slope equals the gradient's length. All
    calls have the same seed.
    """
    gradients = {
        key.removeprefix("gradient of "): gradient
        for key, gradient in run(model, arguments).items()
        if key.startswith("gradient")
    }
    parameters = {n: p for n, p in model.named_parameters() if n in gradients}
    length = sum(gradients[name].square().sum() for name in parameters).sqrt()
    step = 1e-5 / length
    sums = []
    with torch.no_grad():
        for sign in (1, -2, 1):  # a step ahead, a step behind, and back to the start
            for name, parameter in parameters.items():
                parameter += sign * step * gradients[name]
            sums.append(_weighted(model, arguments))
    if length == 0:
        return 0.0
    slope = (sums[0] - sums[1]) / (2 * step * length)
    return float(abs(slope / length - 1))


def _weighted(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """Return the weighted sum of the outputs that `results_of` differentiates."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    torch.manual_seed(3)
    with torch.enable_grad():  # the graph was compiled with gradients
        for y in outputs(model(**arguments)):
            weight = torch.randn(y.shape, generator=generator).to(y)
            if y.requires_grad:
                total = total + (y.detach().masked_fill(~y.isfinite(), 0.0) * weight).double().sum()
    return total


@every("gpt_neox")
def test_training_in_bf16_is_as_exact_as_eager(name: str) -> None:
    """Under autocast, dtypes are eager's, and errors at most twice eager's plus 8 roundings.

    Errors are distances from the fp32 results. Eager's error is the largest of four models: the
    model itself, and three whose numbers are moved by one unit of bf16. Gradients may have four
    times this error: the gradient of a key's bias consists only of rounding errors, and four
    samples may miss the largest.
    """

    def check(compile_it: Callable[[nn.Module], Any]) -> None:
        model, arguments = built(name)
        without_dropout(model)
        run, exact = first_results(model, arguments)
        if _draws(model, arguments):
            pytest.skip("draws random numbers without dropout")
        moved_models = [moved_by(model, arguments, draw, 2.0**-8) for draw in range(DRAWS)]
        with torch.autocast(DEVICE.type, torch.bfloat16):
            try:
                eager = run(model, arguments)
            except Exception as error:  # noqa: BLE001, some models mix dtypes under autocast
                pytest.skip(f"does not run under autocast: {error}")
            eager_results = [eager, *(run(*moved, i) for i, moved in enumerate(moved_models))]
            compile_it(model)
            result = run(model, arguments)
        dtypes = {key: value.dtype for key, value in result.items()}
        assert dtypes == {key: value.dtype for key, value in eager.items()}
        for key in result.keys() & exact.keys():
            error = distance(result[key], exact[key])
            eager_errors = [distance(r[key], exact[key]) for r in eager_results if key in r]
            factor = 4 if key.startswith("gradient") else 2
            allowed = factor * max(eager_errors) + 8 * 2.0**-8 * size_of(exact[key])
            assert error <= allowed, f"{key}: {error:.3g}, allowed {allowed:.3g}"

    _holds(check)


@pytest.mark.kernels
def test_coverage_check_reports_fewer_fused_regions_and_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It compares with the file, and does not report an architecture that is not in the file."""
    result = backend_coverage.regions_of("llama", DEVICE)
    reasons = [reason for reason in result.reasons.split("; ") if reason]
    regions_left = sum(int(reason.split(" x ")[0]) for reason in reasons)
    assert result.fused == result.regions - regions_left > 0
    assert result.moved_bytes > result.saved_bytes > 0
    assert result.graphs == 1
    assert not result.graphs_left
    monkeypatch.setattr(backend_coverage, "FOLDER", tmp_path)
    backend_coverage.write([result])
    assert backend_coverage.lost([result, replace(result, architecture="other", fused=0)]) == []
    (line,) = backend_coverage.lost([replace(result, fused=result.fused - 1)])
    assert line.startswith(f"llama: {result.fused - 1} fused, before {result.fused}; ")
    assert len(backend_coverage.lost([replace(result, graphs_left=1)])) == 1
    assert len(backend_coverage.lost([replace(result, fused=result.fused - 1)], dynamic=True)) == 1
    assert backend_coverage.lost([replace(result, graphs=0, fused=0)], dynamic=True) == []


# Each pair is the number of regions, and how many of them are fused.
@pytest.mark.parametrize(
    ("static_counts", "dynamic_counts", "reasons", "missing"),
    [
        ((7, 7), (7, 5), f"2 x {CHANGING}", 0),
        ((7, 7), (6, 4), f"2 x {CHANGING}", 1),
        ((7, 7), (7, 5), f"1 x {CHANGING}; 1 x other", 1),
        ((7, 5), (7, 5), f"2 x {CHANGING}", 0),
        ((7, 5), (6, 4), f"2 x {CHANGING}", 1),
        ((7, 5), (5, 5), "", 0),
    ],
    ids=[
        "changing",
        "lost-beside",
        "other-reason",
        "left-with-numbers",
        "lost-beside-left",
        "not-listed",
    ],
)
def test_regions_whose_columns_change_are_not_missing(
    static_counts: tuple[int, int], dynamic_counts: tuple[int, int], reasons: str, missing: int
) -> None:
    """`backend_coverage.missing` does not count regions that dynamic shapes rule out."""

    def result(counts: tuple[int, int]) -> backend_coverage.Regions:
        regions, fused = counts
        return backend_coverage.Regions(
            architecture="llama",
            graphs=1,
            graphs_left=0,
            regions=regions,
            fused=fused,
            moved_bytes=0,
            saved_bytes=0,
            reasons=reasons,
        )

    count = backend_coverage.missing(result(dynamic_counts), result(static_counts))
    assert max(0, count) == missing


_ONLY_IN_FULL = ("gpt2", "llama", "mixtral", "opt", "vit")


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name",
    ["bert", *(pytest.param(n, marks=pytest.mark.full) for n in _ONLY_IN_FULL)],
)
def test_dynamic_shapes_fuse_as_many_regions_as_static_ones(name: str) -> None:
    """Attention weights with dropout are an exception, as their number of columns changes."""
    static = backend_coverage.regions_of(name, DEVICE)
    dynamic = backend_coverage.regions_of(name, DEVICE, dynamic=True)
    assert dynamic.graphs == static.graphs > 0
    assert not dynamic.graphs_left
    assert dynamic.fused > 0
    assert backend_coverage.missing(dynamic, static) <= 0


def _llama_on_cpu() -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = built("llama")
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = value.cpu()
    return model.cpu(), arguments


@pytest.mark.plain
def test_without_kernels_the_whole_graph_is_left_to_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor gets a graph without this library's operators, and returns the same values."""
    model, arguments = _llama_on_cpu()
    expected = _values(model, arguments)
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(
        entry, "compile_by_inductor", lambda gm, *_: graphs.append(gm) or gm.forward
    )
    model.compile(backend=backend)
    result = _values(model, arguments)
    (graph_module,) = graphs
    targets = [str(node.target) for node in graph_module.graph.nodes]
    assert not [target for target in targets if target.startswith("fusedops")]
    assert all(torch.equal(result[key], expected[key]) for key in expected)
    other_model, _ = _llama_on_cpu()
    report: CompileReport = compiled(other_model)
    assert not report.regions
