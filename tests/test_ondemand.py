"""``FUSEDOPS_TUNE=1``: what is tuned at first use, by whom, and when not; the caller's state stays as it is."""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedops
import made_up
from fusedops.core import cache, launch, tuning
from fusedops.core.question import Config, Question
from fusedops.tune import ondemand, server
from support import DEVICE

QUESTION = Question("norm_forward", ("rms", "plain", "alone"), "32bit", 64, 1)
FOUND, GIVEN = Config(64, 8, 2), Config(64, 16, 4)


@pytest.fixture(autouse=True)
def on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "device_name", lambda index: made_up.NAME)
    monkeypatch.setattr(tuning, "table", lambda device: {})
    monkeypatch.setattr(tuning, "on_demand", lambda: "1")
    monkeypatch.setattr(ondemand, "_said", set())
    monkeypatch.setattr(ondemand, "_server", None)
    tuning.forget()
    yield
    tuning.forget()
    if ondemand._server is not None:
        ondemand._server.kill()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The tuner answers at once; what it was asked."""
    seen: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        seen.append(message)
        return {"config": [64, 8, 2, 1, 0, 0]}

    monkeypatch.setattr(ondemand, "_ask", answer)
    return seen


# --- what is tuned ----------------------------------------------------------------------------------------------------


def test_a_missing_question_is_tuned(asked: list[dict[str, Any]]) -> None:
    assert tuning.choose(QUESTION, -1) == FOUND
    assert asked == [{"question": asdict(QUESTION), "device": -1}]


def test_what_is_known_is_not_tuned(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache always counts; the shipped table unless tuning is forced."""
    sizes = {64: [None, GIVEN, None, None, None]}
    monkeypatch.setattr(tuning, "table", lambda device: {QUESTION.kernel: {QUESTION.group: sizes}})
    assert tuning.choose(QUESTION, -1) == GIVEN and not asked
    monkeypatch.setattr(tuning, "on_demand", lambda: "force")
    assert tuning.choose(QUESTION, -1) == FOUND and len(asked) == 1
    assert cache.write(QUESTION, made_up.NAME, Config(64, 4, 1), {})
    assert tuning.choose(QUESTION, -1) == Config(64, 4, 1) and len(asked) == 1
    with tuning.forced(QUESTION.kernel, GIVEN):
        assert tuning.choose(replace(QUESTION, cols=60), -1) == GIVEN and len(asked) == 1


@pytest.mark.parametrize(
    ("value", "on"),
    [(None, ""), ("", ""), ("0", ""), ("off", ""), ("1", "1"), ("On", "1"), ("force", "force"), ("banana", "")],
)
def test_the_switch(value: str | None, on: str) -> None:
    """Read once; what is none of its values is off, and said once with what they are."""
    environment = {name: text for name, text in os.environ.items() if name != "FUSEDOPS_TUNE"}
    code = "from fusedops.core import tuning; tuning.on_demand(); print(repr(tuning.on_demand()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
                          env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)}
                          | ({} if value is None else {"FUSEDOPS_TUNE": value}))  # fmt: skip
    assert done.stdout.strip() == repr(on)
    said = "FUSEDOPS_TUNE is 'banana', expected 1 (tune what nobody measured), force (tune what the shipped table has too) or 0"
    assert done.stderr.count(said) == (value == "banana") and ("Warning" in done.stderr) == (value == "banana")


def test_never_while_recording(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda index: pytest.fail("synchronised under capture"))
        assert tuning.choose(QUESTION, 0) != FOUND
    with torch._subclasses.FakeTensorMode():
        assert tuning.choose(QUESTION, -1) != FOUND
    with launch.collecting():  # as `fusedops doctor` and the tuner plan calls that they do not make
        assert tuning.choose(QUESTION, -1) != FOUND
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert tuning.choose(QUESTION, -1) != FOUND
    assert not asked


@pytest.mark.parametrize(
    "answer",
    [{"error": "no workload asks this"}, {}, {"config": [1]}, {"config": [64, 3, 2, 1, 0, 0]}, {"config": [99999] * 6}],
)
def test_a_tuner_that_fails_costs_one_warning(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ondemand, "_ask", lambda message: answer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = tuning.choose(QUESTION, -1)
        tuning.choose(replace(QUESTION, cols=32), -1)
    assert first == GIVEN or first != FOUND
    (one,) = said
    assert "was not tuned" in str(one.message)


# --- the process that tunes -------------------------------------------------------------------------------------------

# The real one but for times and compilers, on the GPU or under the interpreter as this process is.
_SERVER = """
import sys
import made_up
from fusedops.core import tuning
from fusedops.tune import server
assert not tuning.on_demand()
tuning.device_name = lambda index: made_up.NAME
server.serve(sys.stdin, sys.stdout, lambda index: made_up.sweeper())
"""


def start_real(monkeypatch: pytest.MonkeyPatch, code: str = _SERVER) -> None:
    environment = ondemand.child_environment()
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "FUSEDOPS_TUNE": ""}
    monkeypatch.setattr(ondemand, "child_environment", lambda: environment)
    monkeypatch.setattr(ondemand, "command", (sys.executable, "-c", code))


@pytest.mark.kernels
def test_tuned_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, in a process of its own: results, random state, gradients and modes are the caller's."""
    x, weight = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((20, 64), (64,)))
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    wanted = torch.autograd.grad(expected.square().sum(), (x, weight))
    start_real(monkeypatch)
    state = torch.get_rng_state()
    with tuning.asked() as questions:
        y = fusedops.rms_norm(x, (64,), weight, 1e-6)
        assert torch.is_grad_enabled()
        y.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close((x.grad, weight.grad), wanted)
    assert len(questions) == 2
    for question in questions:
        kept = cache.read(question, made_up.NAME)
        assert kept is not None
        family = tuning.family_of(question.kernel)
        assert family is not None
        assert made_up.cost(question, kept) <= made_up.cost(question, family.heuristic(question))
    # One process for all questions; and none for what is in the cache now.
    running = ondemand._server
    assert running is not None and running.poll() is None
    monkeypatch.setattr(ondemand, "_ask", lambda message: pytest.fail("asked again"))
    tuning.forget()
    fusedops.rms_norm(x, (64,), weight, 1e-6)


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    start_real(monkeypatch, "import sys; sys.exit(3)")
    with pytest.warns(RuntimeWarning, match="was not tuned"):
        assert tuning.choose(QUESTION, -1) != FOUND
    monkeypatch.setattr(ondemand, "_said", set())
    monkeypatch.setattr(ondemand, "command", ("/nowhere/python",))
    with pytest.warns(RuntimeWarning, match="FileNotFoundError"):
        assert tuning.choose(QUESTION, -1) != FOUND


def test_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once, ended, and no other is started."""
    start_real(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(ondemand, "patience", datetime.timedelta(seconds=0.2))
    started: list[subprocess.Popen[str]] = []
    drop = ondemand._drop

    def dropped() -> None:
        assert ondemand._server is not None
        started.append(ondemand._server)
        drop()

    monkeypatch.setattr(ondemand, "_drop", dropped)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for cols in (64, 32, 16):
            assert tuning.choose(replace(QUESTION, cols=cols), -1) != FOUND
    (one,) = said
    assert "did not answer for norm_forward within 0:00:00.2" in str(one.message)
    (process,) = started
    assert process.poll() is not None and ondemand._server is None


@pytest.mark.kernels
def test_the_server_answers_what_it_cannot_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error, and goes on to the next."""
    monkeypatch.setattr(tuning, "on_demand", lambda: "")
    strange = {**asdict(QUESTION), "variant": ["rms", "sideways"]}
    index = -1 if DEVICE.type == "cpu" else torch.cuda.current_device()
    lines = [json.dumps({"question": q, "device": index}) for q in (strange, asdict(QUESTION))] + ["not json"]
    answers = io.StringIO()
    server.serve(io.StringIO("\n".join(lines)), answers, lambda index: made_up.sweeper())
    first, second, third = map(json.loads, answers.getvalue().splitlines())
    assert "no workload asks this" in first["error"]
    assert len(second["config"]) == 6
    assert "error" in third


# --- several ranks -------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Threads stand for ranks that share a store."""
    this, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: this.rank)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return this


def test_rank_0_tunes_and_the_others_read(ranks: threading.local, asked: list[dict[str, Any]]) -> None:
    found: dict[int, Config] = {}

    def rank(number: int) -> None:
        ranks.rank = number
        found[number] = tuning.choose(QUESTION, -1)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(range(3), FOUND)
    assert len(asked) == 1


def test_ranks_agree_on_what_rank_0_has(ranks: threading.local, asked: list[dict[str, Any]]) -> None:
    """Whatever the others' own caches say: another config sums in another order."""
    assert cache.write(QUESTION, made_up.NAME, GIVEN, {})
    ranks.rank = 0
    assert tuning.choose(QUESTION, -1) == GIVEN
    assert cache.write(QUESTION, made_up.NAME, Config(64, 4, 1), {})
    ranks.rank = 1
    assert tuning.choose(QUESTION, -1) == GIVEN
    assert not asked


def test_what_goes_wrong_in_tuning_is_no_fault_of_the_store(
    ranks: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the user's own, which a synchronisation meets, is raised as it is; and nobody waits for rank 0."""

    def broken(*_: object) -> Config:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(ondemand, "_tuned", broken)
    ranks.rank = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="device-side assert"):
            tuning.choose(QUESTION, -1)
        ranks.rank = 1
        assert tuning.choose(QUESTION, -1) == tuning.family_of(QUESTION.kernel).heuristic(QUESTION)  # type: ignore[union-attr]


MILLISECONDS = datetime.timedelta(milliseconds=50)


def test_a_rank_that_waits_in_vain(ranks: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a question that rank 0 does not ask: once, and not as long as for one that is being tuned."""
    monkeypatch.setattr(ondemand, "reach", MILLISECONDS)
    monkeypatch.setattr(ondemand, "patience", datetime.timedelta(days=1))
    ranks.rank = 1
    with pytest.warns(RuntimeWarning, match="rank 0 did not name"):
        assert tuning.choose(QUESTION, -1) != FOUND
    # It waits no more, but reads what comes.
    monkeypatch.setattr(ondemand, "reach", datetime.timedelta(days=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.choose(replace(QUESTION, cols=32), -1) != FOUND
        ranks.rank = 0
        monkeypatch.setattr(ondemand, "_ask", lambda message: {"config": [64, 8, 2, 1, 0, 0]})
        tuning.choose(replace(QUESTION, cols=63), -1)
        ranks.rank = 1
        assert tuning.choose(replace(QUESTION, cols=63), -1) == FOUND


def test_ranks_agree_on_what_one_went_on_with(
    ranks: threading.local, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, reaching the question later, tunes nothing, and a third takes the same, whatever its cache says."""
    monkeypatch.setattr(ondemand, "reach", MILLISECONDS)
    ranks.rank = 1
    with pytest.warns(RuntimeWarning, match="rank 0 did not name"):
        gone_on_with = tuning.choose(QUESTION, -1)
    assert gone_on_with != FOUND
    monkeypatch.setattr(ondemand, "_said", set())
    ranks.rank = 0
    assert tuning.choose(QUESTION, -1) == gone_on_with
    assert not asked
    assert cache.write(QUESTION, made_up.NAME, Config(64, 4, 1), {})
    ranks.rank = 2
    assert tuning.choose(QUESTION, -1) == gone_on_with


def test_an_answer_that_comes_late_is_not_used(ranks: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is still tuning when another rank goes on."""
    began, given_up, late = threading.Event(), threading.Event(), list[Config]()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        began.set()
        given_up.wait(30)
        return {"config": [64, 8, 2, 1, 0, 0]}

    def first() -> None:
        ranks.rank = 0
        late.append(tuning.choose(QUESTION, -1))

    monkeypatch.setattr(ondemand, "_ask", answer)
    monkeypatch.setattr(ondemand, "patience", MILLISECONDS)
    monkeypatch.setattr(ondemand, "reach", MILLISECONDS)
    tuner = threading.Thread(target=first)
    tuner.start()
    assert began.wait(30)
    ranks.rank = 1
    with pytest.warns(RuntimeWarning, match="rank 0 did not name"):
        gone_on_with = tuning.choose(QUESTION, -1)
    given_up.set()
    tuner.join(30)
    assert late == [gone_on_with] != [FOUND]


def test_a_store_that_fails(ranks: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Broken)
    ranks.rank = 0
    with pytest.warns(RuntimeWarning, match="store failed .connection reset"):
        assert tuning.choose(QUESTION, -1) != FOUND


_RANK = """
import os, sys
import torch.distributed as dist
from fusedops.core import tuning
from fusedops.core.question import Question
from fusedops.tune import ondemand
tuning.device_name = lambda index: "Test GPU"
tuning.table = lambda device: {}
ondemand._ask = lambda message: {"config": [64, 8, 2, 1, 0, 0]} if dist.get_rank() == 0 else sys.exit("a rank tuned")
import fusedops
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
print(tuning.choose(Question("norm_forward", ("rms", "plain", "alone"), "32bit", 64, 1), -1))
dist.destroy_process_group()
"""


def test_real_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSEDOPS_TUNE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", _RANK, str(tmp_path / "store"), str(rank)], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in (1, 0)]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(FOUND)
