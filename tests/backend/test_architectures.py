"""Whole models of some hundreds of architectures do under the compile backend what they did.

Values, gradients, dropout.

Each test compares a model with itself; `architectures.comparing` says how far the two may differ,
and `architectures.compiled` what is compiled. A model that PyTorch's own parts of that do not
compile or compute rightly is skipped.

The short suite takes the names at each test, since a model takes seconds to interpret; with
``--full`` all of `architectures.names` run.
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
from architectures.compiled import compiled, compiled_alone
from fusedops.backend import entry
from fusedops.backend.entry import backend
from fusedops.backend.regions import CHANGING
from fusedops.backend.report import CompileReport
from support import DEVICE
from zoo import without_dropout

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Check = Callable[[Callable[[nn.Module], Any]], None]


def every(*short: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrizes over all architectures, with kernels; the short suite runs ``short``.

    These are bert for post-norm, biases and dropout, t5 for relative positions and a decoder,
    gpt_neox for rotary embeddings and packed projections in parts, and mixtral for experts.
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
    """Those of the models themselves are not ours to mend; fusedops' own stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"fusedops\.")
        yield


def _holds(check: Check) -> None:
    """Under the backend, unless it does not hold without its operators either."""
    try:
        check(compiled)
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
    """Values and gradients of the model as it is and compiled."""
    model, arguments = built(name)
    prepare(model)
    # Before a run, as some models keep its tensors.
    others = [moved_by(model, arguments, draw) for draw in range(DRAWS)]
    run, expected = first_results(model, arguments)
    if _draws(model, arguments):
        pytest.skip("draws random numbers without dropout")
    moved = [run(*other, draw) for draw, other in enumerate(others)]
    compile_it(model)
    compare(run(model, arguments), expected, moved)


def _draws(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a call draws random numbers, which a compiled model draws in another order."""
    generator = (
        torch.cuda.default_generators[0] if DEVICE.type == "cuda" else torch.default_generator
    )
    before = generator.get_state()
    with torch.no_grad():
        model(**arguments)
    return not torch.equal(generator.get_state(), before)


@every("mixtral")
def test_training_has_eager_values_and_gradients(name: str) -> None:
    """Outputs and gradients agree, without dropout."""
    _holds(partial(_agrees, name, without_dropout))


@every("t5")
def test_inference_has_eager_values(name: str) -> None:
    """In evaluation mode, with no gradient recorded."""

    def check(compile_it: Callable[[nn.Module], Any]) -> None:
        model, arguments = built(name)
        others = [moved_by(model, arguments, draw) for draw in range(DRAWS)]
        try:
            expected = _values(model, arguments)
        except Exception as error:  # noqa: BLE001, such a model is out of order by itself
            pytest.skip(f"fails without being compiled: {error}")
        moved = [_values(*other) for other in others]
        compile_it(model)
        compare(_values(model, arguments), expected, moved)

    _holds(check)


def _values(model: nn.Module, arguments: dict[str, Any]) -> Results:
    torch.manual_seed(3)
    with torch.no_grad():
        return {f"output {index}": y for index, y in enumerate(outputs(model(**arguments)))}


@every()
def test_checkpointing(name: str) -> None:
    """The same values and gradients, with nothing dropped; what is dropped is dropped again."""
    model, _ = built(name)
    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    _holds(partial(_agrees, name, lambda other: _checkpointed(without_dropout(other))))
    _holds(partial(_drops, name, lambda other: _checkpointed(other.train())))


def _checkpointed(model: Any) -> nn.Module:
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        pytest.skip(f"says that it supports checkpointing, but: {error}")
    return model


@every("bert")
def test_dropout_is_reproducible_and_differentiated(name: str) -> None:
    """A seed gives the same bits again, and gradients are those of the function with its mask."""
    _holds(partial(_drops, name, nn.Module.train))


def _drops(
    name: str, prepare: Callable[[nn.Module], nn.Module], compile_it: Callable[[nn.Module], Any]
) -> None:
    model, arguments = built(name)
    if not _draws(prepare(model), arguments):
        return
    model.double()
    arguments = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    run, _ = first_results(model, arguments)
    eagerly = _slope_error(model, run, arguments)
    compile_it(model)
    once, again = run(model, arguments), run(model, arguments)
    assert once.keys() == again.keys()
    assert all(distance(once[k], again[k]) == 0 for k in once), "a seed gives other results"
    # Of a wrong mask in the backward all of the gradient is wrong: a hundredth is left to kinks and
    # casts to fp32.
    assert _slope_error(model, run, arguments) <= 0.01 + 16 * eagerly


def _slope_error(model: nn.Module, run: Callable[..., Results], arguments: dict[str, Any]) -> float:
    """How far the gradient's length is from the slope along it, relative to the length.

    The seed is the same all along.
    """
    gradients = {
        n.removeprefix("gradient of "): g
        for n, g in run(model, arguments).items()
        if n.startswith("gradient")
    }
    by = {n: p for n, p in model.named_parameters() if n in gradients}
    length = sum(gradients[n].square().sum() for n in by).sqrt()
    step = 1e-5 / length
    sums = []
    with torch.no_grad():
        for sign in (1, -2, 1):  # ahead, behind, and back
            for name, parameter in by.items():
                parameter += sign * step * gradients[name]
            sums.append(_weighted(model, arguments))
    return float(abs((sums[0] - sums[1]) / (2 * step * length) / length - 1)) if length > 0 else 0.0


def _weighted(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """The sum of the outputs whose gradients `results_of` gives."""
    generator, total = (
        torch.Generator().manual_seed(1),
        torch.zeros((), dtype=torch.float64, device=DEVICE),
    )
    torch.manual_seed(3)
    with torch.enable_grad():  # as the graph was compiled
        for y in outputs(model(**arguments)):
            weight = torch.randn(y.shape, generator=generator).to(y)
            if y.requires_grad:
                total = total + (y.detach().masked_fill(~y.isfinite(), 0.0) * weight).double().sum()
    return total


@every("gpt_neox")
def test_training_in_bf16_is_as_exact_as_eager(name: str) -> None:
    """Training in bf16: the dtypes of before, and no further from the fp32 results than twice that, or 8 roundings more.

    How far that is, is the most of four models: its own numbers, and those moved by a unit of bf16.
    Gradients may be twice as far again: that of a key's bias is zero but for roundings, and of
    these there are only four samples.
    """

    def check(compile_it: Callable[[nn.Module], Any]) -> None:
        model, arguments = built(name)
        without_dropout(model)
        run, exact = first_results(model, arguments)
        if _draws(model, arguments):
            pytest.skip("draws random numbers without dropout")
        others = [moved_by(model, arguments, draw, 2.0**-8) for draw in range(DRAWS)]
        with torch.autocast(DEVICE.type, torch.bfloat16):
            try:
                eager = run(model, arguments)
            except Exception as error:  # noqa: BLE001, some models mix dtypes under autocast
                pytest.skip(f"does not run under autocast: {error}")
            moved = [run(*other, draw) for draw, other in enumerate(others)]
            compile_it(model)
            result = run(model, arguments)
        assert {k: x.dtype for k, x in result.items()} == {k: x.dtype for k, x in eager.items()}
        for key in result.keys() & exact.keys():
            x, z = result[key], exact[key]
            times = 4 if key.startswith("gradient") else 2
            allowed = times * max(distance(ys[key], z) for ys in (eager, *moved) if key in ys)
            allowed += 8 * 2.0**-8 * size_of(z)
            assert distance(x, z) <= allowed, f"{key}: {distance(x, z):.3g}, allowed {allowed:.3g}"

    _holds(check)


@pytest.mark.kernels
def test_fewer_regions_than_in_the_file_are_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So is one more graph that is left. An architecture that is not in the file is not lost."""
    result = backend_coverage.regions_of("llama", DEVICE)
    assert (
        result.fused
        == result.regions
        - sum(int(part.split(" x ")[0]) for part in result.reasons.split("; ") if part)
        > 0
    )
    assert (
        result.moved_bytes > result.saved_bytes > 0
        and result.graphs == 1
        and not result.graphs_left
    )
    monkeypatch.setattr(backend_coverage, "FOLDER", tmp_path)
    backend_coverage.write([result])
    assert backend_coverage.lost([result, replace(result, architecture="other", fused=0)]) == []
    (line,) = backend_coverage.lost([replace(result, fused=result.fused - 1)])
    assert line.startswith(f"llama: {result.fused - 1} fused, before {result.fused}; ")
    assert len(backend_coverage.lost([replace(result, graphs_left=1)])) == 1
    assert len(backend_coverage.lost([replace(result, fused=result.fused - 1)], dynamic=True)) == 1
    assert backend_coverage.lost([replace(result, graphs=0, fused=0)], dynamic=True) == []


@pytest.mark.parametrize(
    ("numbers", "symbols", "reasons", "count"),
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
    numbers: Any, symbols: Any, reasons: str, count: int
) -> None:
    """Pairs are regions, and those of them that are fused."""
    results = [
        backend_coverage.Regions("llama", 1, 0, *pair, 0, 0, reasons) for pair in (symbols, numbers)
    ]
    assert max(0, backend_coverage.missing(*results)) == count


_AS_MUCH = ("gpt2", "llama", "mixtral", "opt", "vit")


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name",
    ["bert", *(pytest.param(n, marks=pytest.mark.full) for n in _AS_MUCH)],
)
def test_as_much_is_fused_where_sizes_and_numbers_are_symbols(name: str) -> None:
    """Attention weights with dropout are an exception, as their number of columns changes."""
    numbers = backend_coverage.regions_of(name, DEVICE)
    symbols = backend_coverage.regions_of(name, DEVICE, dynamic=True)
    assert symbols.graphs == numbers.graphs > 0 and not symbols.graphs_left
    assert symbols.fused > 0 and backend_coverage.missing(symbols, numbers) <= 0


def _on_cpu() -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = built("llama")
    return model.cpu(), {
        name: t.cpu() if isinstance(t, Tensor) else t for name, t in arguments.items()
    }


@pytest.mark.plain
def test_without_kernels_everything_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor gets a graph without this library's operators, and returns the same values."""
    model, arguments = _on_cpu()
    expected, graphs = _values(model, arguments), []
    monkeypatch.setattr(
        entry, "compile_by_inductor", lambda gm, *_: graphs.append(gm) or gm.forward
    )
    model.compile(backend=backend)
    result = _values(model, arguments)
    assert len(graphs) == 1
    assert not [node for node in graphs[0].graph.nodes if str(node.target).startswith("fusedops")]
    assert all(torch.equal(result[k], expected[k]) for k in expected)
    report: CompileReport = compiled(_on_cpu()[0])
    assert not report.regions
