"""Three settings, one suite: plain CPU, Triton's interpreter (``TRITON_INTERPRET=1``), and a GPU where there is one.

What a setting cannot run is deselected, not skipped, so that a skip in a report always means a gap.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config

import interpreter
import selection
from support import DEVICE, INTERPRETED, KERNEL_PATH

# PyTorch keeps compiled functions on disk and knows the operators in them by name alone: a backward
# of another commit's, which called them otherwise, would be taken for this one's.
torch._functorch.config.enable_autograd_cache = False

if INTERPRETED:
    interpreter.install()

# What is traced and tuned here is not for the user's cache, nor is what is there for the tests.
if "FUSEDOPS_CACHE_DIR" not in os.environ:
    os.environ["FUSEDOPS_CACHE_DIR"] = tempfile.mkdtemp(prefix="fusedops-tests-")
    atexit.register(shutil.rmtree, os.environ["FUSEDOPS_CACHE_DIR"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="all cases of all tests, which takes hours; by default the choice "
        "that tests/harness/selection.py makes",
    )
    parser.addoption(
        "--built",
        metavar="DIR",
        help="test the archive and the wheel in DIR instead of building them",
    )
    parser.addoption(
        "--failures",
        metavar="FILE",
        help="append each failure to FILE as it comes: a run that is cut "
        "short, on a borrowed GPU say, loses none",
    )


class _Failures:
    """Writes down what fails, at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    # The process that began the run gets the reports of all workers.
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(Path(path)))
    for line in (
        "compiled: compiles kernels, which interpreted ones cannot be",
        "full: costs much, and cheaper tests or cases are enough for the short suite",
        "kernels: needs the Triton kernels, on a GPU or through the interpreter",
        "once: the same with the kernels as without; only the full suite interprets it",
        "pairs: the pairs of parameters that the short suite covers, see selection.py",
        "shared: tests share the values of a parameter, see selection.py",
        "plain: of whole models or programs, which the interpreter is too slow for",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Python's garbage collector skips what is imported and collected.

    These objects stay until the end, and each full collection would walk them all again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Modules check at the end of the process that nothing of theirs is left."""
    gc.unfreeze()


def _implied(path: Path, names: set[str], fixtures: Sequence[str], *, short: bool) -> set[str]:
    """Marks that a test need not have: those of its folder, and of a graph that is compiled."""
    if path.parent.name in ("tools", "docs"):
        return {"once"}
    # Dynamo takes seconds: the short suite runs such a test in one setting, that of the kernels.
    if short and "fresh_dynamo" in fixtures and "once" not in names:
        return {"kernels"}
    return set()


def _runs(node: Any, marks: Iterable[pytest.Mark], *, short: bool) -> bool:
    """Whether a test, or a case of it with these marks, can run in this setting."""
    absent = {
        "compiled": INTERPRETED,
        "plain": INTERPRETED,
        "once": INTERPRETED and short,
        "full": short,
        "gpu": DEVICE.type != "cuda",
        "kernels": not KERNEL_PATH,
    }
    names = {mark.name for mark in marks}
    names |= _implied(node.path, names, getattr(node, "fixturenames", ()), short=short)
    # A test that needs the kernels is not the same without, whatever its file says.
    if "kernels" in names:
        names.discard("once")
    return not any(absent[name] for name in names & absent.keys())


def _is_short(config: pytest.Config) -> bool:
    return not config.getoption("--full")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Chooses the cases of a test before they become items, of which there would be 34,000.

    A command line that names a case gets that one. `pytest_collection_modifyitems` removes a test
    of which no case runs.
    """
    yield
    short = _is_short(metafunc.config)
    calls = metafunc._calls
    marks = list(metafunc.definition.iter_markers())
    runs = [
        call for call in calls if _runs(metafunc.definition, [*call.marks, *marks], short=short)
    ]
    names_a_case = any("::" in argument for argument in metafunc.config.args)
    if not runs or not short or names_a_case:
        calls[:] = runs or calls[:1]
        return
    test = metafunc.definition
    candidates = {
        selection.Candidate(
            test.nodeid, f"{test.name}[{call.id}]", call.params, [*call.marks, *marks]
        ): call
        for call in runs
    }
    calls[:] = [candidates[chosen] for chosen in selection.shortened(list(candidates))]


@pytest.hookimpl(tryfirst=True)  # before -k and -m, which then take of the same choice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    short = _is_short(config)
    wanted = [item for item in items if _runs(item, item.iter_markers(), short=short)]
    if len(wanted) < len(items):
        kept = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = wanted


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def kernel_path() -> bool:
    """Whether tensors on ``device`` go through the Triton kernels."""
    return KERNEL_PATH


@pytest.fixture
def full(pytestconfig: pytest.Config) -> bool:
    """Whether products are wanted, also those within a test."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, and nothing left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fixed_seed(request: pytest.FixtureRequest) -> None:
    """Another seed for every test, the same in every run.

    Without a GPU `torch.manual_seed` formats the stack for each kind of accelerator, for one that
    may yet come: a millisecond a test.
    """
    seed = zlib.crc32(request.node.nodeid.encode())
    if DEVICE.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def nothing_traced(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """No test of row-wise functions finds on disk what another has traced."""
    if request.path.parent.name == "compiler":
        monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised allocation is full of NaN (integers: of their maximum).

    Nobody may read what none wrote.

    PyTorch does this itself, below Python, under deterministic algorithms: so allocations made by
    its C++ code, by compiled graphs and by patched or re-imported functions are covered too, and
    nothing is replaced.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


@pytest.fixture(autouse=True)
def no_native_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls run the kernels too, where PyTorch's own operators would take them."""
    monkeypatch.setattr("fusedops.core.calls.operator.Operator.native_elements", 0)
