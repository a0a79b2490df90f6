"""`fusedops tune --function`: tuning of users' functions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import made_up
from fusedops.compiler import loading
from fusedops.compiler.configs import heuristic
from fusedops.compiler.function import Rowwise
from fusedops.compiler.launching import chosen
from fusedops.core.configs import cache, tuning
from fusedops.core.launches import launch
from fusedops.tune import command
from fusedops.tune.compiling import Pool
from fusedops.tune.functions import FunctionError, FunctionWorkload, parsed, planned
from fusedops.tune.worker import decode, encode
from fusedops.tune.workloads import keys_of
from made_up import options
from support import DEVICE, KERNEL_PATH

_SOURCE = """
import torch
from torch.nn import functional as F

import fusedops


@fusedops.rowwise
def gated_norm(x, gate, weight, p=0.1):
    return F.rms_norm(F.dropout(F.silu(gate) * x, p), x.shape[-1:], weight)


def gated(packed):
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


def loss(logits, target):
    return F.cross_entropy(logits, target, reduction="none")


def running(x):
    return x.cumsum(-1)


def several(x, /, unused, *, places=1):
    return [x * 2, x > 0, x.long() + places]


def anything(*tensors):
    return tensors[0] * 2


def particular(x):
    assert x.shape[-1] == 48
    return x * 2
"""
_GATED = ("300x64", "300x64", "64:fp32")


@pytest.fixture
def blocks(tmp_path: Path) -> str:
    path = tmp_path / "blocks.py"
    path.write_text(_SOURCE)
    return str(path)


def workload_of(function: str, *arguments: str) -> FunctionWorkload:
    return planned(parsed(function, arguments, torch.bfloat16), DEVICE)


@pytest.mark.kernels
def test_calls_use_the_tuned_config(
    blocks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new object of the same function, as in another process, uses it too."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "device_name", lambda index: made_up.NAME)
    workload = workload_of(f"{blocks}:gated_norm", *_GATED, "=0.2")
    assert (workload.rows, workload.columns) == (300, 64)
    outcomes = list(made_up.sweeper().sweep([workload]))
    assert [outcome.key.kernel for outcome in outcomes] == ["rowwise_forward", "rowwise_backward"]
    assert all(
        len(outcome.measured) > 4 and outcome.heuristic == heuristic(outcome.key)
        for outcome in outcomes
    )
    for outcome in outcomes:
        cache.write(outcome.key, made_up.NAME, outcome.best, {})
    function = Rowwise(workload.function.function)
    arguments = [torch.randn(300, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    with tuning.collected_keys() as keys:
        out = function(
            *[t.requires_grad_() for t in (*arguments, torch.ones(64, device=DEVICE))], 0.2
        )
        out.backward(out)
    results = {key: tuning.choose(key, 0) for key in keys}
    assert results == {outcome.key: outcome.best for outcome in outcomes}
    assert all(tuning.source(key, 0) == "cache" for key in keys)


@pytest.mark.kernels
def test_floor_counts_the_tensors_read_and_written(blocks: str) -> None:
    """In bf16, the forward moves three tensors of 300 x 64, the backward five."""
    workload = workload_of(f"{blocks}:gated_norm", *_GATED)
    moved = [workload.floor_us(key, 1e6) for key in keys_of(workload, DEVICE)]
    assert moved == pytest.approx([3 * 300 * 64 * 2, 5 * 300 * 64 * 2])
    workload = workload_of(f"{blocks}:gated", "300x64")  # reads two halves of a tensor, writes one
    moved = [workload.floor_us(key, 1e6) for key in keys_of(workload, DEVICE)]
    assert moved == pytest.approx([3 * 300 * 32 * 2, 5 * 300 * 32 * 2])


@pytest.mark.kernels
def test_generated_kernels_in_another_process(blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = workload_of(f"{blocks}:loss", "8x20000", "8:int64")
    with launch.collecting() as requests:
        workload.step(DEVICE)()
    tuning.forget()
    sent = [json.dumps(encode(request)) for request in requests]
    texts = [loading.text_of(request.kernel) for request in requests]
    monkeypatch.setattr(loading, "_kernels", {})
    for request, message, text in zip(requests, sent, texts, strict=True):
        decoded = decode(json.loads(message))
        assert decoded.kernel is not request.kernel and loading.text_of(decoded.kernel) == text
        assert (decoded.types, decoded.constants, decoded.config) == (
            request.types,
            request.constants,
            request.config,
        )


@pytest.mark.kernels
def test_outputs_and_arguments_of_all_kinds(blocks: str) -> None:
    """The function returns a list, and some outputs and arguments have no gradient.

    One parameter is positional only, one keyword only.
    """
    workload = workload_of(f"{blocks}:several", "8x64", "8x64", "=2")
    outcomes = list(made_up.sweeper().sweep([workload]))
    assert [outcome.key.kernel for outcome in outcomes] == ["rowwise_forward", "rowwise_backward"]
    step = workload_of(f"{blocks}:several", "8x64", "8x64", "=2").step(DEVICE)
    (gradient,) = step.backward(step.forward())
    assert gradient.shape == (8, 64)


def test_file_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file imports from another file of its package."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model_of_blocks" / "layers"
    folder.mkdir(parents=True)
    for name, text in {
        "../__init__": "",
        "__init__": "",
        "one": _SOURCE,
        "two": "from .one import loss",
    }.items():
        (folder / f"{name}.py").write_text(text)
    workload = parsed(f"{folder / 'two.py'}:loss", ("8x64", "8:int64"), torch.bfloat16)
    assert workload.function.__module__ == "model_of_blocks.layers.one"


@pytest.mark.compiled
def test_generated_kernels_compile_in_workers(blocks: str) -> None:
    compiler = pytest.importorskip("triton.backends.compiler")
    workload = parsed(f"{blocks}:gated_norm", _GATED, torch.bfloat16)
    tensors = list(workload.inputs(torch.device("cpu")).values())
    program = workload.function._programs.find([*tensors, 0.1], autocast=False).program
    with Pool(2, compiler.GPUTarget("cuda", 90, 32), 232_448) as pool:
        kernels = chosen(program, device_index=-1, tensors=tensors)
        usages = [pool.submit(request).result() for _, request, _ in kernels]
    assert len(usages) == 2
    for usage in usages:
        assert usage.registers and not usage.error, usages


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("gated_norm", (), "must be FILE:NAME"),
        ("missing.py:f", (), "cannot import missing.py"),
        ("{}:nothing", (), "has no nothing"),
        ("{}:loss", ("8x0",), "must be a shape"),
        ("{}:loss", ("8x64:complex64",), "must be a shape"),
        ("{}:gated_norm", ("=x",), "expected a number"),
        ("{}:gated_norm", (), "needs the shapes of"),
        ("{}:gated_norm", ("",), "must be a shape"),
        ("{}:torch", ("8x64",), "is no function but a module"),
        ("{}:anything", ("8x64",), "takes a variable number of arguments"),
        ("{}:loss", ("8x64", "8:int64", "64"), "takes 2 arguments, got 3"),
    ],
)
def test_bad_function_or_argument(
    name: str, texts: tuple[str, ...], message: str, blocks: str
) -> None:
    with pytest.raises(FunctionError, match=message):
        workload_of(name.format(blocks), *texts)


def test_function_that_does_not_fuse(blocks: str) -> None:
    message = (
        "each column depends on those before it"
        if KERNEL_PATH
        else "there are no kernels for cpu tensors"
    )
    with pytest.raises(FunctionError, match=message):
        workload_of(f"{blocks}:running", "8x64")
    if KERNEL_PATH:
        with pytest.raises(FunctionError, match="does not take these arguments: TypeError"):
            workload_of(f"{blocks}:gated_norm", "8x64")
        with pytest.raises(FunctionError, match="does not take these arguments: AssertionError"):
            workload_of(f"{blocks}:particular", "8x64")


def test_options_that_exclude_one_another(blocks: str) -> None:
    for changes, dtypes in (
        ({"op": ["rms_norm"]}, ()),
        ({"ship": True}, ()),
        ({}, (torch.half, torch.float)),
    ):
        with pytest.raises(command.UsageError, match="--function takes"):
            command._function(options(function=f"{blocks}:loss", **changes), dtypes)
    with pytest.raises(command.UsageError, match="--arg is an argument of --function"):
        command._function(options(arg=["8x64"]), ())
