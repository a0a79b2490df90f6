"""The user's cache of tuned configs: entries are complete or absent, and bad ones only warn."""

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


def write_entry() -> Path:
    """Writes `CONFIG` for `KEY`, and returns the path."""
    assert cache.write(KEY, DEVICE, CONFIG, {"best": 1.0})
    path = cache.path_of(KEY, DEVICE)
    assert path is not None
    return path


def warnings_of_ignored(key: TuningKey = KEY, device: str = DEVICE) -> list[str]:
    """Asserts twice that the entry is ignored; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.read(key, device) is None
        assert cache.read(key, device) is None
    return [str(warning.message) for warning in caught]


def test_entry_is_read_only_for_its_whole_key() -> None:
    write_entry()
    assert cache.read(KEY, DEVICE) == CONFIG
    others = [
        replace(KEY, kernel="norm_backward", variant=("layer", "plain", "2 sums", "3 moved")),
        replace(KEY, variant=("layer", "plain", "adds")),
        replace(KEY, widths="32bit"),
        replace(KEY, cols=1000),
        replace(KEY, bucket=2),
    ]
    for key in others:
        assert warnings_of_ignored(key) == []
    assert warnings_of_ignored(device="Test GPU 2") == []
    # Two devices whose names become the same file name still have separate entries.
    assert cache.slug("Test-GPU") == cache.slug(DEVICE)
    assert warnings_of_ignored(device="Test-GPU") == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_modes_of_files_and_directories_follow_the_umask(root: Path) -> None:
    """With a suitable umask, users can share the directory."""
    before = os.umask(0o027)
    try:
        path = write_entry()
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, root)] == [0o640, 0o750, 0o750]


def test_versions_have_separate_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry()
    for name, value in (("__version__", "9.9"), ("triton_version", lambda: "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            assert warnings_of_ignored() == []
            assert cache.write(KEY, DEVICE, Config(block_n=1024, rows=2, warps=2), {})
    assert cache.read(KEY, DEVICE) == CONFIG
    assert len(list(cache.entries())) == 3


def test_key_of_the_packages_code_covers_all_files() -> None:
    """A stored trace is not valid after any file of the compiler changed, in any folder."""
    package = Path(fusedops.__file__).parent
    expected = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    assert [name for name, _, _ in ast.literal_eval(cache.code_of_package())] == expected


def test_truncated_entry_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is truncated at each byte in turn."""
    path = write_entry()
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        monkeypatch.setattr(cache, "_warned", set())
        (warning,) = warnings_of_ignored()
        assert str(path) in warning
        assert "torn" in warning
    path.write_bytes(content)
    assert cache.read(KEY, DEVICE) == CONFIG


def changed(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A function that changes a field of an entry."""
    return lambda content: content.update({field: value})


def changed_key(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A function that changes a field of an entry's key."""
    return lambda content: content["key"].update({field: value})


@pytest.mark.parametrize(
    ("kind", "change"),
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
        ("stale", changed_key("cols", 1024.0)),  # equals the key's, but is no integer
        ("stale", changed_key("bucket", 3.0)),
    ],
)
def test_changed_entry_is_ignored(kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = write_entry()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    (warning,) = warnings_of_ignored()
    assert kind in warning
    assert str(path) in warning


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
def test_entry_whose_key_no_call_has_is_refused(part: dict[str, Any]) -> None:
    """No call looks such an entry up, but ``fusedops doctor`` reads all entries."""
    content = json.loads(write_entry().read_text())
    content["key"] |= part
    path = cache.path_of(replace(KEY, **part), DEVICE)
    assert path is not None
    cache.replace(path, json.dumps(content))
    with pytest.raises(cache.EntryError, match="other candidates"):
        cache.check(path)


def test_deeply_nested_entry_is_ignored() -> None:
    """It exceeds the limit of recursion of Python's JSON parser."""
    write_entry().write_text("[" * 100_000)
    (warning,) = warnings_of_ignored()
    assert "torn" in warning


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "3", '"x"', "{}", "\x00", "\ud83d".encode("utf-8", "surrogatepass"), b"\xff"],
)
def test_file_without_an_entry_is_ignored(text: str | bytes) -> None:
    write_entry().write_bytes(text if isinstance(text, bytes) else text.encode())
    (warning,) = warnings_of_ignored()
    assert "torn" in warning


def test_several_bad_entries_give_one_warning() -> None:
    paths = [write_entry()]
    assert cache.write(OTHER, DEVICE, Config(block_n=1024, rows=2, warps=4), {})
    paths.append(cache.path_of(OTHER, DEVICE))  # type: ignore[arg-type]
    for path in paths:
        path.write_text("{")
    assert len(warnings_of_ignored()) == 1
    assert warnings_of_ignored(OTHER) == []


def test_changed_candidates_invalidate_only_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry()
    assert cache.write(OTHER, DEVICE, Config(block_n=1024, rows=2, warps=4), {})
    narrow = replace(KEY, cols=256)
    assert cache.write(narrow, DEVICE, Config(block_n=256, rows=4, warps=4), {})
    family: Any = family_of(KEY.kernel)
    candidates = family.candidates

    def changed_candidates(key: TuningKey) -> list[Config]:
        added = [Config(block_n=512, rows=2, warps=2)] if key.cols == 1024 else []
        return [*candidates(key), *added]

    monkeypatch.setattr(family, "candidates", changed_candidates)
    (warning,) = warnings_of_ignored()
    assert "stale" in warning
    assert cache.read(OTHER, DEVICE) == Config(block_n=1024, rows=2, warps=4)
    assert cache.read(narrow, DEVICE) == Config(block_n=256, rows=4, warps=4)


# --- directories that cannot be read or written ---------------------------------------------------


def assert_unwritable(message: str) -> None:
    """Asserts that writing fails twice, with one warning that contains the message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not cache.write(KEY, DEVICE, CONFIG, {})
        assert not cache.write(OTHER, DEVICE, Config(block_n=1024, rows=2, warps=4), {})
    (warning,) = caught
    assert message in str(warning.message)
    assert "FUSEDOPS_CACHE_DIR" in str(warning.message)


def test_file_in_place_of_the_directory_warns_once(root: Path) -> None:
    root.write_text("a file")
    assert_unwritable("cannot write")
    assert warnings_of_ignored() == []


def test_read_only_directory_is_read(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Writing fails. The error is simulated, because the root user may write to any directory."""
    write_entry()

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((Path, "open"), (cache.os, "replace"), (cache.os, "fsync")):
        monkeypatch.setattr(cache, "_warned", set())
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refused)
            assert_unwritable("Read-only file system")
        assert cache.read(KEY, DEVICE) == CONFIG
    assert not list(root.rglob(f"{cache.SCRATCH}*"))


def test_unreadable_entry_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_entry()
    path.unlink()
    path.mkdir()
    (warning,) = warnings_of_ignored()
    assert "cannot read" in warning


def test_environment_determines_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache.directory() == tmp_path / "cache"
    monkeypatch.delenv("FUSEDOPS_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.directory() == Path("/xdg/fusedops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.directory() == Path("/home/someone/.cache/fusedops")

    def without_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", without_home)
    assert cache.directory() is None
    assert warnings_of_ignored() == []
    assert not list(cache.entries())
    with pytest.warns(RuntimeWarning, match="no home directory"):
        assert not cache.write(KEY, DEVICE, CONFIG, {})


# --- many processes, and processes that are killed ------------------------------------------------


def start_tuner(rounds: int) -> subprocess.Popen[str]:
    """Starts a tuning run with made-up times in a child process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, Path(__file__).parents[1] / "harness" / "made_up.py", str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_until_it_begins(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "begun\n"


def count_entries() -> int:
    """Checks that all entries are complete, and returns their number."""
    results = list(cache.entries())
    for path in results:
        cache.check(path)
    return len(results)


def test_killed_tuner_leaves_complete_entries(full: bool) -> None:
    """Complete entries stay readable; incomplete ones do not exist."""
    generator, count = random.Random(5), 1
    for _ in range(3 if full else 1):
        process = start_tuner(10**9)
        wait_until_it_begins(process)
        time.sleep(generator.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert count_entries() >= count
        count = count_entries()


def test_entries_are_complete_while_processes_write(root: Path, full: bool) -> None:
    """Two processes write, while this one reads."""
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
    assert count_entries() == len(paths)
    assert not list(root.rglob(f"{cache.SCRATCH}*"))
