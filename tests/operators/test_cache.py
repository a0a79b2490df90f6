"""The user's cache: entries are complete or absent, found by their key, and never an error."""

from __future__ import annotations

import ast
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

import fusedops
from fusedops.core.configs import cache
from fusedops.core.configs.tuning_key import Config, TuningKey, family_of

pytestmark = pytest.mark.once

DEVICE = "Test GPU"
KEY = TuningKey("norm_forward", ("layer", "plain", "alone"), "16bit", 1024, 3)
OTHER = TuningKey("bias_act_forward", ("gelu", "plain", "bias"), "16bit", 1024, 3)
CONFIG = Config(block_n=1024, rows=4, warps=4)


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


def written() -> Path:
    assert cache.write(KEY, DEVICE, CONFIG, {"best": 1.0})
    path = cache.path_of(KEY, DEVICE)
    assert path is not None
    return path


def ignored(key: TuningKey = KEY, device: str = DEVICE) -> list[str]:
    """Checks twice that the entry is not used; returns the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert cache.read(key, device) is None
        assert cache.read(key, device) is None
    return [str(one.message) for one in said]


def test_entry_is_found_by_its_whole_key() -> None:
    written()
    assert cache.read(KEY, DEVICE) == CONFIG
    others = [
        replace(KEY, kernel="norm_backward", variant=("layer", "plain", "2 sums", "3 moved")),
        replace(KEY, variant=("layer", "plain", "adds")),
        replace(KEY, widths="32bit"),
        replace(KEY, cols=1000),
        replace(KEY, bucket=2),
    ]
    for key in others:
        assert ignored(key) == []
    assert ignored(device="Test GPU 2") == []
    # Names that are one file name are still two devices.
    assert cache.slug("Test-GPU") == cache.slug(DEVICE)
    assert ignored(device="Test-GPU") == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_mode_is_that_of_any_new_file(root: Path) -> None:
    """Users may share the directory."""
    before = os.umask(0o027)
    try:
        path = written()
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, root)] == [0o640, 0o750, 0o750]


def test_versions_have_separate_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    written()
    for name, value in (("__version__", "9.9"), ("_triton_version", lambda: "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            assert ignored() == []
            assert cache.write(KEY, DEVICE, Config(block_n=1024, rows=2, warps=2), {})
    assert cache.read(KEY, DEVICE) == CONFIG
    assert len(list(cache.entries())) == 3


def test_code_of_the_package_is_of_all_its_files() -> None:
    """A trace of another lowering is no trace of this one, whatever folder its file is in."""
    package = Path(fusedops.__file__).parent
    expected = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    assert [name for name, _, _ in ast.literal_eval(cache.code_of_package())] == expected


def test_truncated_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    path = written()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        monkeypatch.setattr(cache, "_warned", set())
        (said,) = ignored()
        assert str(path) in said and "torn" in said
    path.write_bytes(whole)
    assert cache.read(KEY, DEVICE) == CONFIG


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({key: value})


def changed_key(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["key"].update({key: value})


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        *[
            ("torn", lambda content, name=name: content.pop(name))
            for name in ("key", "space", "config")
        ],
        *[
            ("torn", lambda content, name=name: content["key"].pop(name))
            for name in ("kernel", "variant", "device")
        ],
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
        ("stale", changed("config", [1024, True, 4, 1, 0, 0])),
        ("stale", changed_key("cols", 1024.0)),  # equal to the key's
        ("stale", changed_key("bucket", 3.0)),
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
    "part",
    [
        {"widths": "x"},
        {"widths": None},
        {"cols": None},
        {"bucket": 99},
        {"kernel": "norm_backward"},
    ],
)
def test_entry_whose_key_no_call_has(part: dict[str, Any]) -> None:
    """At the path of that key, where only ``fusedops doctor`` reads it."""
    content = json.loads(written().read_text())
    content["key"] |= part
    path = cache.path_of(replace(KEY, **part), DEVICE)
    assert path is not None
    cache.replace(path, json.dumps(content))
    with pytest.raises(cache.EntryError, match="other candidates"):
        cache.check(path)


def test_a_nested_entry() -> None:
    """Deeper than Python's parser goes."""
    written().write_text("[" * 100_000)
    (said,) = ignored()
    assert "torn" in said


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "3", '"x"', "{}", "\x00", "\ud83d".encode("utf-8", "surrogatepass"), b"\xff"],
)
def test_file_without_an_entry(text: str | bytes) -> None:
    written().write_bytes(text if isinstance(text, bytes) else text.encode())
    (said,) = ignored()
    assert "torn" in said


def test_one_warning_for_all_entries() -> None:
    paths = [written()]
    assert cache.write(OTHER, DEVICE, Config(block_n=1024, rows=2, warps=4), {})
    paths.append(cache.path_of(OTHER, DEVICE))  # type: ignore[arg-type]
    for path in paths:
        path.write_text("{")
    assert len(ignored()) == 1
    assert ignored(OTHER) == []


def test_changed_candidates_invalidate_only_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    written()
    assert cache.write(OTHER, DEVICE, Config(block_n=1024, rows=2, warps=4), {})
    narrow = replace(KEY, cols=256)
    assert cache.write(narrow, DEVICE, Config(block_n=256, rows=4, warps=4), {})
    family: Any = family_of(KEY.kernel)
    candidates = family.candidates

    def one_more(key: TuningKey) -> list[Config]:
        return candidates(key) + (
            [Config(block_n=512, rows=2, warps=2)] if key.cols == 1024 else []
        )

    monkeypatch.setattr(family, "candidates", one_more)
    (said,) = ignored()
    assert "stale" in said
    assert cache.read(OTHER, DEVICE) == Config(block_n=1024, rows=2, warps=4)
    assert cache.read(narrow, DEVICE) == Config(block_n=256, rows=4, warps=4)


# --- directories that do not do as they are told --------------------------------------------------


def unwritable(message: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not cache.write(KEY, DEVICE, CONFIG, {})
        assert not cache.write(OTHER, DEVICE, Config(block_n=1024, rows=2, warps=4), {})
    (one,) = said
    assert message in str(one.message) and "FUSEDOPS_CACHE_DIR" in str(one.message)


def test_directory_under_a_file(root: Path) -> None:
    root.write_text("a file")
    unwritable("cannot write")
    assert ignored() == []


def test_read_only_directory(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Entries are read; writing fails. The error is raised here, since root may write anywhere."""
    written()

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((Path, "open"), (cache.os, "replace"), (cache.os, "fsync")):
        monkeypatch.setattr(cache, "_warned", set())
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refused)
            unwritable("Read-only file system")
        assert cache.read(KEY, DEVICE) == CONFIG
    assert not list(root.rglob(f"{cache.SCRATCH}*"))


def test_unreadable_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    path = written()
    path.unlink()
    path.mkdir()
    (said,) = ignored()
    assert "cannot read" in said


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        assert not cache.write(KEY, DEVICE, CONFIG, {})


# --- many processes, and processes that are killed ------------------------------------------------


def start_tuner(rounds: int) -> subprocess.Popen[str]:
    """A tuning run in a child process, with made-up times."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, Path(__file__).parents[1] / "harness" / "made_up.py", str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_until_it_begins(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as begun:
        assert begun.readline() == "begun\n"


def whole_entries() -> int:
    results = list(cache.entries())
    for path in results:
        cache.check(path)  # raises where one is not whole
    return len(results)


def test_killed_tuner_leaves_complete_entries(full: bool) -> None:
    """Finished entries stay readable; unfinished ones do not exist."""
    chance, count = random.Random(5), 1
    for _ in range(3 if full else 1):
        process = start_tuner(10**9)
        wait_until_it_begins(process)
        time.sleep(chance.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert whole_entries() >= count
        count = whole_entries()


def test_concurrent_writers(root: Path, full: bool) -> None:
    """Two processes write while this one reads, and no entry that it reads is torn."""
    processes = [start_tuner(8 if full else 3) for _ in range(2)]
    for process in processes:
        wait_until_it_begins(process)
    paths = list(cache.entries())
    assert paths
    while any(process.poll() is None for process in processes):
        time.sleep(0.01)  # the writers need the cores
        for path in paths:
            cache.check(path)
    assert all(process.wait() == 0 for process in processes)
    assert whole_entries() == len(paths)
    assert not list(root.rglob(f"{cache.SCRATCH}*"))
