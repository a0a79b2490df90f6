"""Programs that share rows and wait for each other's sums.

Kernels are tested on a GPU, where programs run at the same time. Whether programs may wait depends
on the multiprocessors of the stream, which is tested with a fake driver.
"""

from __future__ import annotations

import ctypes
import faulthandler
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.core.calls.operators import site_of
from fusedops.core.compat import runtime
from fusedops.core.configs import tuning
from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import driver, launch
from fusedops.norms import launching
from fusedops.norms.operator import NORM
from fusedops.norms.site import NormConstants
from support import DEVICE

on_gpu = pytest.mark.gpu

COLS = 24_576  # in fp32, rows of six programs


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Ends this process, and with it programs that wait for ever, after four minutes."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def _tensors(rows: int, cols: int = COLS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, cols), (cols,), (cols,))
    x, weight, bias = [
        torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes
    ]
    return x, weight, bias


def _gradients(tensors: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias = tensors
    return torch.autograd.grad(fusedops.layer_norm(x, x.shape[-1], weight, bias), tensors, dy)


def _expected(tensors: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias = [t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(
        F.layer_norm(x, x.shape[-1:], weight, bias), (x, weight, bias), dy.double()
    )


def _check(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for actual, expected in zip(got, want, strict=True):
        # These are sums of 24,576 products in fp32, in trees.
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item() + 1e-30
        )


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 131, 700])
def test_backward_is_one_deterministic_launch(rows: int) -> None:
    """The results have equal bits, whatever the order in which programs run."""
    tensors = _tensors(rows)
    dy = torch.randn(rows, COLS, device=DEVICE)
    with launch.record() as launched:
        first = _gradients(tensors, dy)
    assert launched.count("norm_backward_kernel") == 1
    _check(first, _expected(tensors, dy))
    for _ in range(5):
        assert all(map(torch.equal, first, _gradients(tensors, dy)))


@on_gpu
def test_sums_of_zero() -> None:
    """Programs do not mistake a sum of zero for one that is not there yet."""
    tensors = _tensors(40)
    dy = torch.zeros(40, COLS, device=DEVICE)
    dy[7] = -0.0
    assert not any(gradient.any() for gradient in _gradients(tensors, dy))


@on_gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sums_that_are_not_finite(value: float) -> None:
    """They change no other row."""
    tensors = _tensors(40)
    dy = torch.randn(40, COLS, device=DEVICE)
    dy[7, 5] = value
    dx, *_ = _gradients(tensors, dy)
    assert not dx[7].isfinite().any() and dx[:7].isfinite().all() and dx[8:].isfinite().all()


@on_gpu
def test_graph_replays() -> None:
    """A replay does not read the sums of the previous one."""
    tensors = _tensors(300)
    dy = torch.randn(300, COLS, device=DEVICE)
    _gradients(tensors, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _gradients(tensors, dy)
    for _ in range(3):
        dy.normal_()
        graph.replay()
        _check(result, _expected(tensors, dy))


@on_gpu
def test_kernels_in_several_streams() -> None:
    """Kernels run at the same time, so none of them has all multiprocessors."""
    tensors = _tensors(2000)
    dy = torch.randn(2000, COLS, device=DEVICE)
    want = _gradients(tensors, dy)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(_gradients(tensors, dy))
    torch.cuda.synchronize()
    assert all(
        torch.equal(actual, expected)
        for got in results
        for actual, expected in zip(got, want, strict=True)
    )


@on_gpu
def test_more_programs_than_may_wait() -> None:
    """The first launch stores the sums, the second one reads them."""
    tensors = _tensors(5)
    dy = torch.randn(5, COLS, device=DEVICE)
    with (
        forced("norm_backward", Config(block_n=1024, rows=1, warps=4, stages=2, per_sm=1)),
        launch.record() as launched,
    ):
        got = _gradients(tensors, dy)
    assert launched.count("norm_backward_kernel") == 2
    _check(got, _expected(tensors, dy))


# --- without a GPU --------------------------------------------------------------------------------


class Driver:
    """CUDA's driver on a GPU of 132 multiprocessors. Stream 5 has a green context of 8 of them."""

    def __init__(self, limit: int = 0) -> None:
        def green_of(stream: int, green: Any) -> int:
            green._obj.value = 77 if stream == 5 else None
            return 0

        def resource_of(green: Any, resource: Any, kind: int) -> int:
            # The union begins at byte 96, as in the driver's header.
            ctypes.c_uint.from_address(ctypes.addressof(resource._obj) + 96).value = 8
            return 0 if (green.value, kind) == (77, 1) else 1

        def affinity_of(affinity: Any, kind: int) -> int:
            ctypes.c_uint.from_address(ctypes.addressof(affinity._obj) + 4).value = limit
            return 0 if limit and kind == 0 else 224

        def occupancy(count: Any, function: int, threads: int, shared: int) -> int:
            count._obj.value = 65536 // (threads * 128)
            return 0

        self.cuStreamGetGreenCtx, self.cuGreenCtxGetDevResource = green_of, resource_of
        self.cuCtxGetExecAffinity, self.cuOccupancyMaxActiveBlocksPerMultiprocessor = (
            affinity_of,
            occupancy,
        )


@pytest.fixture
def on_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes a stream of an imaginary GPU the current one."""

    def enter(stream: int, limit: int = 0, library: Any = None) -> None:
        result = Driver(limit) if library is None else library
        monkeypatch.setattr(ctypes, "CDLL", lambda name: result)
        monkeypatch.setattr(runtime, "current_stream", lambda index: stream)
        driver._function.cache_clear()
        launch._allowed_by_mps.cache_clear()

    monkeypatch.setattr(launch, "processors", lambda index: 132)
    monkeypatch.setattr(launch, "_cannot_compile", lambda index: "")
    launch._is_waiting_on.cache_clear()
    yield enter
    for cached in (driver._function, launch._allowed_by_mps, launch._is_waiting_on):
        cached.cache_clear()


def test_multiprocessors_are_those_of_the_stream(on_stream: Callable[..., None]) -> None:
    on_stream(0)
    assert launch.multiprocessors(0) == 132
    on_stream(5)
    assert launch.multiprocessors(0) == 8
    on_stream(0, limit=33)
    assert launch.multiprocessors(0) == 33
    on_stream(5, library=SimpleNamespace())  # a driver without these functions
    assert launch.multiprocessors(0) == 132
    assert driver.programs_at_a_time(1, 256, 0) is None


def test_programs_of_few_multiprocessors_do_not_wait(on_stream: Callable[..., None]) -> None:
    for stream, most in ((0, 8), (5, 2)):
        on_stream(stream)
        assert [n for n in range(2, 12) if launch.waits(0, torch.float32, n)] == list(
            range(2, most + 1)
        )
        assert not launch.waits(0, torch.float64, 2)


def test_without_cooperative_launches_no_program_waits(
    on_stream: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_stream(0)
    monkeypatch.setattr(launch, "launches_cooperatively", lambda: False)
    assert not launch.waits(0, torch.float32, 2)


@pytest.mark.parametrize(
    ("value", "on"), [("", True), ("1", True), ("0", False), ("off", False), ("No", False)]
)
def test_a_variable_turns_waiting_off(
    value: str, on: bool, on_stream: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is read once."""
    on_stream(0)
    monkeypatch.setenv("FUSEDOPS_WAIT", value)
    assert launch.waits(0, torch.float32, 2) == on
    monkeypatch.setenv("FUSEDOPS_WAIT", "0" if on else "1")
    assert launch.waits(0, torch.float32, 2) == on


def test_warning_about_an_unknown_value_of_the_variable(
    on_stream: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_stream(0)
    monkeypatch.setenv("FUSEDOPS_WAIT", "maybe")
    with pytest.warns(RuntimeWarning, match="FUSEDOPS_WAIT is 'maybe', expected 0"):
        assert launch.waits(0, torch.float32, 2)


def test_plans_are_for_the_multiprocessors_of_the_stream(
    on_stream: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cooperative launch has only as many programs as run at the same time."""
    monkeypatch.setattr(tuning, "device_name", lambda index: "")
    monkeypatch.setattr(tuning, "capturing", lambda index: False)
    launched: list[tuple[int, int]] = []

    def build(
        kernel: Any, types: Any, constants: Any, config: Config, **options: Any
    ) -> launch.Variant:
        name = f"{kernel.fn.__name__} {constants['EXCHANGE']}"
        variant = lambda x, y, *rest: launched.append((name, x, y))  # type: ignore[arg-type]  # noqa: E731
        if constants["EXCHANGE"] == "wait":
            launch._resident[variant] = 2
        return variant

    monkeypatch.setattr(launch, "build", build)
    constants = NormConstants("waiting", "layer", "once", 1e-5, 0.0, None)
    site = site_of(
        NORM,
        constants,
        (torch.float32, None, None, torch.float32, torch.float32),
        COLS,
        device_index=0,
        dropout=False,
        saves=True,
    )
    grads, outs = (
        (torch.empty(4000, COLS, device="meta"), None, None),
        (torch.empty(4000, COLS, device="meta"),),
    )
    monkeypatch.setattr(launching, "as_rows", lambda x, cols, dims: (x, cols, 0))
    monkeypatch.setattr(launching, "vector", lambda x: (x, 0))
    saved = (grads[0], None, None, torch.empty(COLS), torch.empty(COLS), torch.empty(2, 4000))
    with forced("norm_backward", Config(block_n=4096, rows=1, warps=8, stages=3, per_sm=4)):
        for stream in (0, 5, 0):
            on_stream(stream)
            launching.backward(site, grads, saved, (*outs, None, None, None, None), (None, None, 0))
    most = 132 * 2 // 6  # each multiprocessor runs two programs, and six share a row
    waiting = ("norm_backward_kernel wait", 6, most)
    two_launches = [("norm_backward_kernel post", 6, 5), ("norm_backward_kernel read", 6, 5)]
    assert launched == [waiting, *two_launches, waiting]
