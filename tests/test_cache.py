"""The user's cache: entries are whole or absent, found by what they are for, and never an error."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusedops.core import cache
from fusedops.core.question import Config, Question, family_of

DEVICE = "Test GPU"
QUESTION = Question("norm_forward", ("layer", "plain", "alone"), "16bit", 1024, 3)
OTHER = Question("bias_act_forward", ("gelu", "plain", "bias"), "16bit", 1024, 3)
CONFIG = Config(1024, 4, 4)


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_said", set())
    return tmp_path / "cache"


def written() -> Path:
    assert cache.write(QUESTION, DEVICE, CONFIG, {"best": 1.0})
    path = cache.path_of(QUESTION, DEVICE)
    assert path is not None
    return path


def ignored(question: Question = QUESTION, device: str = DEVICE) -> list[str]:
    """That no config comes of the entry, twice; what was said of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert cache.read(question, device) is None
        assert cache.read(question, device) is None
    return [str(one.message) for one in said]


def test_an_entry_is_found_by_all_that_it_is_for() -> None:
    written()
    assert cache.read(QUESTION, DEVICE) == CONFIG
    others = [
        replace(QUESTION, kernel="norm_backward", variant=("layer", "plain", "2 sums", "3 moved")),
        replace(QUESTION, variant=("layer", "plain", "adds")),
        replace(QUESTION, widths="32bit"),
        replace(QUESTION, cols=1000),
        replace(QUESTION, bucket=2),
    ]
    for question in others:
        assert ignored(question) == []
    assert ignored(device="Test GPU 2") == []
    # Names that are one file name are still two devices.
    assert cache.slug("Test-GPU") == cache.slug(DEVICE)
    assert ignored(device="Test-GPU") == []


def test_other_versions_have_entries_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    written()
    for name, value in (("__version__", "9.9"), ("_triton_version", lambda: "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            assert ignored() == []
            assert cache.write(QUESTION, DEVICE, Config(1024, 2, 2), {})
    assert cache.read(QUESTION, DEVICE) == CONFIG
    assert len(list(cache.entries())) == 3


def test_truncated_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    path = written()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        monkeypatch.setattr(cache, "_said", set())
        (said,) = ignored()
        assert str(path) in said and "torn" in said
    path.write_bytes(whole)
    assert cache.read(QUESTION, DEVICE) == CONFIG


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({key: value})


def changed_key(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["key"].update({key: value})


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        *[("torn", lambda content, name=name: content.pop(name)) for name in ("key", "space", "config")],
        *[("torn", lambda content, name=name: content["key"].pop(name)) for name in ("kernel", "variant", "device")],
        ("torn", changed("config", 3)),
        ("torn", changed("config", [1, 2])),
        ("torn", changed("key", [])),
        ("torn", changed_key("variant", 3)),
        ("foreign", changed_key("device", "Another GPU")),
        ("foreign", changed_key("fusedops", "9.9")),
        ("foreign", changed_key("triton", "9.9")),
        ("foreign", changed_key("cols", 2048)),
        ("foreign", changed_key("bucket", 1)),
        ("stale", changed("space", "0" * 16)),
        ("stale", changed("config", [1024, 3, 4, 1, 0, 0])),
        ("stale", changed("config", [1024, 4, 4, 1, 0, 7])),
        ("stale", changed("config", [2048, 4, 4, 1, 0, 0])),
        ("stale", changed("config", [1024, 4, "4", 1, 0, 0])),
        ("stale", changed("config", [1024, 4, 4.0, 1, 0, 0])),
    ],
)
def test_spoilt_entries(kind: str, spoil: Callable[[dict[str, Any]], None]) -> None:
    path = written()
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    (said,) = ignored()
    assert kind in said and str(path) in said


@pytest.mark.parametrize(
    "text", ["null", "[]", "3", '"x"', "{}", "\x00", "\ud83d".encode("utf-8", "surrogatepass"), b"\xff"]
)
def test_no_entry_at_all(text: str | bytes) -> None:
    written().write_bytes(text if isinstance(text, bytes) else text.encode())
    (said,) = ignored()
    assert "torn" in said


def test_one_warning_for_all_entries() -> None:
    paths = [written()]
    assert cache.write(OTHER, DEVICE, Config(1024, 2, 4), {})
    paths.append(cache.path_of(OTHER, DEVICE))  # type: ignore[arg-type]
    for path in paths:
        path.write_text("{")
    assert len(ignored()) == 1
    assert ignored(OTHER) == []


def test_a_changed_config_space_touches_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    written()
    assert cache.write(OTHER, DEVICE, Config(1024, 2, 4), {})
    narrow = replace(QUESTION, cols=256)
    assert cache.write(narrow, DEVICE, Config(256, 4, 4), {})
    family: Any = family_of(QUESTION.kernel)
    candidates = family.candidates

    def one_more(question: Question) -> list[Config]:
        return candidates(question) + ([Config(512, 2, 2)] if question.cols == 1024 else [])

    monkeypatch.setattr(family, "candidates", one_more)
    (said,) = ignored()
    assert "stale" in said
    assert cache.read(OTHER, DEVICE) == Config(1024, 2, 4)
    assert cache.read(narrow, DEVICE) == Config(256, 4, 4)


# --- directories that do not do as they are told -----------------------------------------------------------------------


def unwritable(message: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not cache.write(QUESTION, DEVICE, CONFIG, {})
        assert not cache.write(OTHER, DEVICE, Config(1024, 2, 4), {})
    (one,) = said
    assert message in str(one.message) and "FUSEDOPS_CACHE_DIR" in str(one.message)


def test_a_directory_under_a_file(root: Path) -> None:
    root.write_text("a file")
    unwritable("cannot write")
    assert ignored() == []


def test_a_read_only_directory(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """What is there is read; writing fails as the system says it does, here and not by permissions that root has."""
    written()

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((cache.tempfile, "mkstemp"), (cache.os, "replace"), (cache.os, "fsync")):
        monkeypatch.setattr(cache, "_said", set())
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refused)
            unwritable("Read-only file system")
        assert cache.read(QUESTION, DEVICE) == CONFIG
    assert not list(root.rglob(f"{cache.SCRATCH}*"))


def test_an_entry_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = written()
    path.unlink()
    path.mkdir()
    (said,) = ignored()
    assert "cannot read" in said


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.directory() == tmp_path / "cache"
    monkeypatch.delenv("FUSEDOPS_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.directory() == Path("/xdg/fusedops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.directory() == Path("/home/someone/.cache/fusedops")

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert cache.directory() is None
    assert ignored() == []
    assert not list(cache.entries())
    with pytest.warns(RuntimeWarning, match="no home directory"):
        assert not cache.write(QUESTION, DEVICE, CONFIG, {})


# --- many processes, and processes that are killed ------------------------------------------------------------------


def tuner(rounds: int) -> subprocess.Popen[str]:
    """A real tuning run in a process, but for the times, which are made up; it has begun."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("made_up.py"), str(rounds)],
                               stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def whole_entries() -> int:
    found = list(cache.entries())
    for path in found:
        cache.check(path)  # raises where one is not whole
    return len(found)


def test_killed_at_any_moment() -> None:
    """What was finished stays, and stays readable; the rest is as if never begun."""
    chance, count = random.Random(5), 1
    for _ in range(3):
        process = tuner(10**9)
        time.sleep(chance.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert whole_entries() >= count
        count = whole_entries()


def test_two_at_once(root: Path) -> None:
    """And a third that reads: it never sees a torn entry."""
    processes = [tuner(8), tuner(8)]
    paths = list(cache.entries())
    assert paths
    while any(process.poll() is None for process in processes):
        for path in paths:
            cache.check(path)
    assert all(process.wait() == 0 for process in processes)
    assert whole_entries() == len(paths)
    assert not list(root.rglob(f"{cache.SCRATCH}*"))
