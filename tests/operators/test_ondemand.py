"""``FUSEDOPS_TUNE=1``: keys that are tuned at first use, the tuner's process, and several ranks."""

from __future__ import annotations

import datetime
import functools
import io
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedops
import made_up
from fusedops.core import children
from fusedops.core.configs import cache, tuning
from fusedops.core.configs.tuning_key import Config, TuningKey
from fusedops.core.launches import launch
from fusedops.tune import ondemand, server
from support import DEVICE

KEY = TuningKey("norm_forward", ("rms", "plain", "alone"), "32bit", 64, 1)
ON_DEMAND = tuning.on_demand  # the original function, which a fixture replaces
# The config that the tuner returns, and another one.
TUNED, OTHER = Config(block_n=64, rows=8, warps=2), Config(block_n=64, rows=16, warps=4)


@pytest.fixture(autouse=True)
def on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "device_name", lambda index: made_up.NAME)
    monkeypatch.setattr(tuning, "table", lambda device: {})
    monkeypatch.setattr(tuning, "on_demand", lambda: "1")
    monkeypatch.setattr(ondemand, "_warned", set())
    monkeypatch.setattr(ondemand, "_server", None)
    tuning.forget()
    yield
    tuning.forget()
    if ondemand._server is not None:
        ondemand._server.end()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the tuner by one that replies at once; returns the list of its requests."""
    requests: list[dict[str, Any]] = []

    def reply(message: dict[str, Any]) -> dict[str, Any]:
        requests.append(message)
        return {"config": [64, 8, 2, 1, 0, 0]}

    monkeypatch.setattr(ondemand, "_request", reply)
    return requests


# --- keys that are tuned --------------------------------------------------------------------------


def test_missing_key_is_tuned(requests: list[dict[str, Any]]) -> None:
    assert tuning.choose(KEY, -1) == TUNED
    assert requests == [{"key": asdict(KEY), "device": -1}]


def test_measured_key_is_not_tuned(
    requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached entry is always used. An entry of the shipped table is not, with ``force``."""
    sizes = {64: [None, OTHER, None, None, None]}
    monkeypatch.setattr(tuning, "table", lambda device: {KEY.kernel: {KEY.group: sizes}})
    assert tuning.choose(KEY, -1) == OTHER and not requests
    monkeypatch.setattr(tuning, "on_demand", lambda: "force")
    assert tuning.choose(KEY, -1) == TUNED and len(requests) == 1
    assert cache.write(KEY, made_up.NAME, Config(block_n=64, rows=4, warps=1), {})
    assert tuning.choose(KEY, -1) == Config(block_n=64, rows=4, warps=1) and len(requests) == 1
    with tuning.forced(KEY.kernel, OTHER):
        assert tuning.choose(replace(KEY, cols=60), -1) == OTHER and len(requests) == 1


def test_tuner_is_loaded_only_when_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load() -> tuning.Tuner:
        loaded.append("tuner")
        return lambda key, device_index, config, origin: TUNED

    monkeypatch.setattr(tuning, "_load_tuner", None)  # restored after the test
    tuning.register_tuner(load)
    monkeypatch.setattr(tuning, "on_demand", lambda: "")
    assert tuning.choose(KEY, -1) != TUNED and not loaded
    monkeypatch.setattr(tuning, "on_demand", lambda: "1")
    assert tuning.choose(KEY, -1) == TUNED and loaded == ["tuner"]


@pytest.mark.once
@pytest.mark.parametrize(
    ("value", "on"),
    [
        (None, ""),
        ("", ""),
        ("0", ""),
        ("off", ""),
        ("1", "1"),
        ("On", "1"),
        ("force", "force"),
        ("banana", ""),
    ],
)
def test_values_of_the_variable(
    value: str | None, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is read once. An unknown value means off, and one warning names the others."""
    read = functools.cache(ON_DEMAND.__wrapped__)
    monkeypatch.delenv("FUSEDOPS_TUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("FUSEDOPS_TUNE", value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read() == on
    expected = "FUSEDOPS_TUNE is 'banana', expected 1 (tune keys without a measurement), force (tune keys that "
    expected += "the shipped table has too) or 0"
    assert len(caught) == (value == "banana")
    assert all(expected in str(warning.message) for warning in caught)
    monkeypatch.setenv("FUSEDOPS_TUNE", "another")
    assert read() == on


def test_no_tuning_under_capture_or_tracing(
    requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(
            torch.cuda, "synchronize", lambda index: pytest.fail("synchronised under capture")
        )
        assert tuning.choose(KEY, 0) != TUNED
    with torch._subclasses.FakeTensorMode():
        assert tuning.choose(KEY, -1) != TUNED
    with launch.collecting():  # as in `fusedops doctor` and the tuner, which only plan calls
        assert tuning.choose(KEY, -1) != TUNED
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert tuning.choose(KEY, -1) != TUNED
    assert not requests


@pytest.mark.parametrize(
    "reply",
    [
        {"error": "no workload has this key"},
        {},
        {"config": [1]},
        {"config": [64, 3, 2, 1, 0, 0]},
        {"config": [99999] * 6},
    ],
)
def test_failing_tuner_warns_once(reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ondemand, "_request", lambda message: reply)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = tuning.choose(KEY, -1)
        tuning.choose(replace(KEY, cols=32), -1)
    assert first != TUNED
    (one,) = caught
    assert "was not tuned" in str(one.message)


# --- the tuner's process --------------------------------------------------------------------------

# The real server with made-up times and compilers.
_SERVER = """
import sys
import made_up
from fusedops.core.configs import tuning
from fusedops.tune import server
assert not tuning.on_demand()
tuning.device_name = lambda index: made_up.NAME
server.serve(sys.stdin, sys.stdout, lambda index: made_up.sweeper())
"""


def start_real(monkeypatch: pytest.MonkeyPatch, code: str = _SERVER) -> None:
    environment = children.child_environment()
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "FUSEDOPS_TUNE": ""}
    monkeypatch.setattr(children, "child_environment", lambda: environment)
    monkeypatch.setattr(ondemand, "command", (sys.executable, "-c", code))


@pytest.mark.kernels
def test_tuned_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are tuned. Results, random state, gradients and modes do not change."""
    x, weight = (
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((20, 64), (64,))
    )
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    wanted = torch.autograd.grad(expected.square().sum(), (x, weight))
    start_real(monkeypatch)
    state = torch.get_rng_state()
    with tuning.collected_keys() as keys:
        y = fusedops.rms_norm(x, (64,), weight, 1e-6)
        assert torch.is_grad_enabled()
        y.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close((x.grad, weight.grad), wanted)
    assert len(keys) == 2
    for key in keys:
        tuned = cache.read(key, made_up.NAME)
        assert tuned is not None
        family = tuning.family_of(key.kernel)
        assert family is not None
        assert made_up.cost(key, tuned) <= made_up.cost(key, family.heuristic(key))
    # One process for all keys, and no request for a key that is in the cache.
    running = ondemand._server
    assert running is not None and running.process.poll() is None
    monkeypatch.setattr(ondemand, "_request", lambda message: pytest.fail("requested again"))
    tuning.forget()
    fusedops.rms_norm(x, (64,), weight, 1e-6)


def test_tuner_that_exits_or_cannot_start_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    start_real(monkeypatch, "import sys; sys.exit(3)")
    with pytest.warns(RuntimeWarning, match="was not tuned .the tuner died with exit code 3."):
        assert tuning.choose(KEY, -1) != TUNED
    monkeypatch.setattr(ondemand, "_warned", set())
    monkeypatch.setattr(ondemand, "command", ("/nowhere/python",))
    with pytest.warns(RuntimeWarning, match="FileNotFoundError"):
        assert tuning.choose(KEY, -1) != TUNED


def test_text_that_the_tuner_prints_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; from fusedops.core.children import send; sys.stdin.readline(); print(3); "
    script += "print('no line', end=''); send({'config': [64, 8, 2]}, sys.stdout)"
    start_real(monkeypatch, script)
    assert tuning.choose(KEY, -1) == TUNED


def test_tuner_that_hangs_is_killed_after_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other tuner is started."""
    start_real(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(ondemand, "patience", datetime.timedelta(seconds=0.2))
    started: list[children.Child] = []
    drop = ondemand._drop

    def dropped() -> None:
        assert ondemand._server is not None
        started.append(ondemand._server)
        drop()

    monkeypatch.setattr(ondemand, "_drop", dropped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for cols in (64, 32, 16):
            assert tuning.choose(replace(KEY, cols=cols), -1) != TUNED
    (one,) = caught
    assert "did not reply for norm_forward within 0:00:00.2" in str(one.message)
    (child,) = started
    assert child.process.poll() is not None and ondemand._server is None


@pytest.mark.kernels
def test_server_replies_with_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, the server answers the next request."""
    monkeypatch.setattr(tuning, "on_demand", lambda: "")
    strange = {**asdict(KEY), "variant": ["rms", "sideways"]}
    index = -1 if DEVICE.type == "cpu" else torch.cuda.current_device()
    lines = [json.dumps({"key": q, "device": index}) for q in (strange, asdict(KEY))] + ["not json"]
    answers = io.StringIO()
    server.serve(io.StringIO("\n".join(lines)), answers, lambda index: made_up.sweeper())
    first, second, third = children.replies_in(answers.getvalue().splitlines())
    assert "no workload has this key" in first["error"]
    assert len(second["config"]) == len(fields(Config))
    assert "error" in third


# --- several ranks --------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Lets threads act as ranks that share a store; a thread sets ``rank``."""
    local, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: local.rank)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return local


def test_rank_0_tunes_and_the_others_read(
    ranks: threading.local, requests: list[dict[str, Any]]
) -> None:
    results: dict[int, Config] = {}

    def rank(number: int) -> None:
        ranks.rank = number
        results[number] = tuning.choose(KEY, -1)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(range(3), TUNED)
    assert len(requests) == 1


def test_ranks_use_the_config_of_rank_0(
    ranks: threading.local, requests: list[dict[str, Any]]
) -> None:
    """They ignore their own caches, because sums with different configs are rounded differently."""
    assert cache.write(KEY, made_up.NAME, OTHER, {})
    ranks.rank = 0
    assert tuning.choose(KEY, -1) == OTHER
    assert cache.write(KEY, made_up.NAME, Config(block_n=64, rows=4, warps=1), {})
    ranks.rank = 1
    assert tuning.choose(KEY, -1) == OTHER
    assert not requests


def test_error_in_tuning_is_raised_unchanged(
    ranks: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an earlier error of the device, raised by the tuner's synchronisation.

    The other ranks use the heuristic, without waiting for rank 0.
    """

    def broken(*_: object) -> Config:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(ondemand, "_tuned", broken)
    ranks.rank = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="device-side assert"):
            tuning.choose(KEY, -1)
        ranks.rank = 1
        assert tuning.choose(KEY, -1) == tuning.family_of(KEY.kernel).heuristic(KEY)  # type: ignore[union-attr]


MILLISECONDS = datetime.timedelta(milliseconds=50)


def test_rank_waits_once_for_a_key_that_rank_0_does_not_reach(
    ranks: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a shorter time than for a key that rank 0 is tuning."""
    monkeypatch.setattr(ondemand, "reach", MILLISECONDS)
    monkeypatch.setattr(ondemand, "patience", datetime.timedelta(days=1))
    ranks.rank = 1
    with pytest.warns(RuntimeWarning, match="rank 0 did not store"):
        assert tuning.choose(KEY, -1) != TUNED
    # It does not wait again, but reads a config that is stored.
    monkeypatch.setattr(ondemand, "reach", datetime.timedelta(days=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.choose(replace(KEY, cols=32), -1) != TUNED
        ranks.rank = 0
        monkeypatch.setattr(ondemand, "_request", lambda message: {"config": [64, 8, 2, 1, 0, 0]})
        tuning.choose(replace(KEY, cols=63), -1)
        ranks.rank = 1
        assert tuning.choose(replace(KEY, cols=63), -1) == TUNED


def test_ranks_use_the_config_of_a_rank_that_timed_out(
    ranks: threading.local, requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reaches the key later, and does not tune it. A third rank ignores its own cache."""
    monkeypatch.setattr(ondemand, "reach", MILLISECONDS)
    ranks.rank = 1
    with pytest.warns(RuntimeWarning, match="rank 0 did not store"):
        used = tuning.choose(KEY, -1)
    assert used != TUNED
    monkeypatch.setattr(ondemand, "_warned", set())
    ranks.rank = 0
    assert tuning.choose(KEY, -1) == used
    assert not requests
    assert cache.write(KEY, made_up.NAME, Config(block_n=64, rows=4, warps=1), {})
    ranks.rank = 2
    assert tuning.choose(KEY, -1) == used


def test_late_reply_is_not_used(ranks: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is still tuning when another rank times out."""
    began, timed_out, late = threading.Event(), threading.Event(), list[Config]()

    def reply(message: dict[str, Any]) -> dict[str, Any]:
        began.set()
        timed_out.wait(30)
        return {"config": [64, 8, 2, 1, 0, 0]}

    def tune_on_rank_0() -> None:
        ranks.rank = 0
        late.append(tuning.choose(KEY, -1))

    monkeypatch.setattr(ondemand, "_request", reply)
    monkeypatch.setattr(ondemand, "patience", MILLISECONDS)
    monkeypatch.setattr(ondemand, "reach", MILLISECONDS)
    tuner = threading.Thread(target=tune_on_rank_0)
    tuner.start()
    assert began.wait(30)
    ranks.rank = 1
    with pytest.warns(RuntimeWarning, match="rank 0 did not store"):
        used = tuning.choose(KEY, -1)
    timed_out.set()
    tuner.join(30)
    assert late == [used] != [TUNED]


@pytest.mark.parametrize("reason", ["connection reset", ""])
def test_failing_store_warns(
    reason: str, ranks: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError(reason)

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Broken)
    ranks.rank = 0
    with pytest.warns(RuntimeWarning, match=f"store failed .RuntimeError: {reason}."):
        assert tuning.choose(KEY, -1) != TUNED


_RANK = """
import os, sys
import torch.distributed as dist
from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import TuningKey
from fusedops.tune import ondemand
tuning.device_name = lambda index: "Test GPU"
tuning.table = lambda device: {}
ondemand._request = lambda message: {"config": [64, 8, 2, 1, 0, 0]} if dist.get_rank() == 0 else sys.exit("a rank tuned")
import fusedops
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
print(tuning.choose(TuningKey("norm_forward", ("rms", "plain", "alone"), "32bit", 64, 1), -1))
dist.destroy_process_group()
"""


def test_processes_of_a_group_use_the_config_that_rank_0_tuned(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSEDOPS_TUNE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(TUNED)
