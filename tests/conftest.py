"""The options and fixtures of the test suite, and the choice of what runs.

The suite runs in three settings: plainly on a CPU, in Triton's interpreter
(``TRITON_INTERPRET=1``), and on a GPU if there is one. Tests that cannot run in a setting are
deselected, not skipped, so that a skip in a report always means a gap.
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

# PyTorch's cache on disk identifies this library's operators by their names alone. So it would use
# a backward that another commit compiled, although that commit may call the operators differently.
torch._functorch.config.enable_autograd_cache = False

if INTERPRETED:
    interpreter.install()

# Tests neither write to the user's cache nor read from it.
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
        help="append each failure to FILE at once, so that a run that is cut "
        "short, on a borrowed GPU say, loses none",
    )


class _Failures:
    """A pytest plugin that appends each failure to a file as soon as it is reported."""

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
        "compiled: compiles kernels, so it cannot run in the interpreter",
        "full: is slow; the short suite has cheaper tests or cases of the same property",
        "kernels: needs the Triton kernels, on a GPU or in the interpreter",
        "once: the kernels make no difference; in the interpreter only the full suite runs it",
        "pairs: the pairs of parameters that the short suite covers, see selection.py",
        "shared: tests share the values of a parameter, see selection.py",
        "plain: runs whole models or programs, for which the interpreter is too slow",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Excludes the objects that exist after collection from Python's garbage collector.

    Imported modules and collected tests stay until the end. Without this, each full garbage
    collection would visit all of them again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Ends the exclusion: some modules check at exit that their objects were collected."""
    gc.unfreeze()


def _implied(path: Path, names: set[str], fixtures: Sequence[str], *, short: bool) -> set[str]:
    """Return marks that a test has without a decorator, by its folder and its fixtures."""
    if path.parent.name in ("tools", "docs"):
        return {"once"}
    # Dynamo takes seconds. So the short suite runs a test that compiles only with the kernels.
    if short and "fresh_dynamo" in fixtures and "once" not in names:
        return {"kernels"}
    return set()


def _runs(node: Any, marks: Iterable[pytest.Mark], *, short: bool) -> bool:
    """Return whether a test, or a case of it with these marks, runs in this setting."""
    is_excluded = {
        "compiled": INTERPRETED,
        "plain": INTERPRETED,
        "once": INTERPRETED and short,
        "full": short,
        "gpu": DEVICE.type != "cuda",
        "kernels": not KERNEL_PATH,
    }
    names = {mark.name for mark in marks}
    names |= _implied(node.path, names, getattr(node, "fixturenames", ()), short=short)
    # A file may have the mark "once". A test in it that needs the kernels runs with them anyway.
    if "kernels" in names:
        names.discard("once")
    return not any(is_excluded[name] for name in names & is_excluded.keys())


def _is_short(config: pytest.Config) -> bool:
    return not config.getoption("--full")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Chooses the cases of a test before they become items, of which there would be 34,000.

    If the command line names a case, all cases remain. If no case of a test runs in this setting,
    one remains, and `pytest_collection_modifyitems` removes it.
    """
    yield
    short = _is_short(metafunc.config)
    calls = metafunc._calls
    test = metafunc.definition
    marks = list(test.iter_markers())
    runs = [call for call in calls if _runs(test, [*call.marks, *marks], short=short)]
    names_a_case = any("::" in argument for argument in metafunc.config.args)
    if not runs:
        calls[:] = calls[:1]
        return
    if not short or names_a_case:
        calls[:] = runs
        return
    candidates = {
        selection.Candidate(
            test.nodeid, f"{test.name}[{call.id}]", call.params, [*call.marks, *marks]
        ): call
        for call in runs
    }
    calls[:] = [candidates[chosen] for chosen in selection.shortened(list(candidates))]


@pytest.hookimpl(tryfirst=True)  # before -k and -m, so that they select among what runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that do not run in this setting."""
    short = _is_short(config)
    selected = [item for item in items if _runs(item, item.iter_markers(), short=short)]
    if len(selected) < len(items):
        selected_items = set(selected)
        config.hook.pytest_deselected(items=[i for i in items if i not in selected_items])
        items[:] = selected


@pytest.fixture
def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return DEVICE


@pytest.fixture
def kernel_path() -> bool:
    """Return whether calls on ``device`` run the Triton kernels."""
    return KERNEL_PATH


@pytest.fixture
def full(pytestconfig: pytest.Config) -> bool:
    """Return whether ``--full`` was passed: tests with loops then run all combinations."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Clears everything that torch.compile has compiled, before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fixed_seed(request: pytest.FixtureRequest) -> None:
    """Seeds each test differently, and alike in every run.

    Without a GPU only the CPU's generator is seeded: `torch.manual_seed` also schedules the seeding
    of accelerators that may be initialised later, which takes a millisecond per test.
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
    """Gives each test of row-wise functions an empty cache on disk."""
    if request.path.parent.name == "compiler":
        monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills every uninitialised allocation with NaN (integers: with their maximum).

    A kernel that reads memory which none has written then returns NaN, and its test fails.

    PyTorch itself fills the memory, below Python, under deterministic algorithms. So allocations by
    its C++ code, by compiled graphs and by patched or re-imported functions are covered too.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills_before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills_before
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


@pytest.fixture(autouse=True)
def no_native_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small calls run the kernels, too, instead of PyTorch's own operators."""
    monkeypatch.setattr("fusedops.core.calls.operator.Operator.native_elements", 0)
