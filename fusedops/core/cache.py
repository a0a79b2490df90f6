"""The user's cache of tuned configs: one small file an entry, written whole or not at all, never trusted unread.

Many processes may read and write at once: an entry is replaced in one step, and the last writer's stands. What cannot
be used is passed over with one warning a process, never an error: the answer then comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from .question import Config, Question, fingerprint, valid
from .version import __version__

__all__ = ["SCRATCH", "EntryError", "check", "directory", "entries", "path_of", "read", "slug", "write"]

# What a file is called until it is whole.
SCRATCH = ".writing-"
_said: set[str] = set()


class EntryError(Exception):
    """An entry that cannot be used: `kind` is ``torn``, ``foreign``, ``stale`` or ``another version's``."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def directory() -> Path | None:
    """Where the cache lies: ``FUSEDOPS_CACHE_DIR``, else the platform's place for a user's caches, None if there is none."""
    if named := os.environ.get("FUSEDOPS_CACHE_DIR"):
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "fusedops"


def slug(device: str) -> str:
    """A device's name as a file name: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def path_of(question: Question, device: str) -> Path | None:
    """The file of an entry, whether it is there or not."""
    root = directory()
    if root is None:
        return None
    name = hashlib.sha256(json.dumps(_key(question, device), sort_keys=True).encode()).hexdigest()[:32]
    return root / slug(device) / question.kernel / f"{name}.json"


def entries() -> Iterator[Path]:
    """All entries of all devices and versions."""
    root = directory()
    if root is not None:
        yield from sorted(root.glob("*/*/*.json"))


def read(question: Question, device: str) -> Config | None:
    """The tuned config, or None where there is none that can be used."""
    path = path_of(question, device)
    try:
        if path is None or not path.exists():
            return None
        return check(path, _key(question, device))
    except EntryError as problem:
        _say_once("read", f"ignored {path}, which is {problem.kind} ({problem})", "delete it, or that whole directory")
    except OSError as error:
        _say_once("read", f"cannot read {path} ({error.strerror})", "make it readable")
    return None


def check(path: Path, key: Mapping[str, Any] | None = None) -> Config:
    """The config that a file holds: the entry for ``key``, or for what it says itself.

    Raises:
        EntryError: it is not whole, belongs elsewhere, or was chosen from other configs than there are now.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        found, space, numbers = content["key"], content["space"], content["config"]
        parts = {**found, "variant": tuple(found["variant"])}
        question = Question(*(parts[name] for name in Question.__dataclass_fields__))
        config = Config(*numbers)
        own, right = _key(question, found["device"]), path_of(question, found["device"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EntryError("torn", f"not a whole entry: {type(error).__name__}") from None
    if key is None and found != own:
        raise EntryError("another version's", "not for this version of fusedops or Triton")
    if path != right if key is None else found != dict(key):
        raise EntryError("foreign", "another device's, version's or kernel's")
    if space != fingerprint(question) or not valid(question, config):
        raise EntryError("stale", "chosen from other configs than there are now")
    return config


def write(question: Question, device: str, config: Config, microseconds: Mapping[str, float]) -> bool:
    """Puts an entry in its place, whole; False, and one warning a process, where that is impossible."""
    path = path_of(question, device)
    if path is None:
        _say_once("write", "there is no home directory for it", "set FUSEDOPS_CACHE_DIR")
        return False
    content = {
        "key": _key(question, device),
        "space": fingerprint(question),
        "config": astuple(config),
        "microseconds": dict(microseconds),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(content))
    except OSError as error:
        _say_once("write", f"cannot write {path} ({error.strerror})", "make it writable, or set FUSEDOPS_CACHE_DIR")
        return False
    return True


def _replace(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(prefix=SCRATCH, dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)  # noqa: PTH105 - the one step that makes it visible, named as the system has it
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # noqa: PTH108
        raise


def _key(question: Question, device: str) -> dict[str, Any]:
    versions = {"fusedops": __version__, "triton": _triton_version()}
    return {**asdict(question), "variant": list(question.variant), "device": device, **versions}


@functools.cache
def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _say_once(what: str, problem: str, remedy: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(
            f"fusedops: tuning cache in {directory()}: {problem}; {remedy}. Results are right without it; "
            "`fusedops doctor` looks through the cache. This is said once.",
            RuntimeWarning,
            stacklevel=2,
        )
