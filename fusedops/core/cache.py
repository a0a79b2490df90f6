"""The user's cache of tuned configs: one small file per entry, written atomically and validated when read.

Processes may read and write concurrently: an entry is replaced atomically, and the last writer wins. An unusable entry
is ignored with one warning per process, never an error; the config then comes from the table or the heuristic.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from .tuning_key import Config, TuningKey, fingerprint, valid
from .version import __version__

__all__ = ["SCRATCH", "EntryError", "check", "code_of_package", "directory", "entries", "file_of", "opened", "path_of", "read",
           "replace", "sealed", "slug", "write"]  # fmt: skip

# The prefix of a file that is not complete yet.
SCRATCH = ".writing-"
_warned: set[str] = set()


class EntryError(Exception):
    """An entry that cannot be used: `kind` is ``torn``, ``foreign``, ``stale`` or ``another version's``."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def directory() -> Path | None:
    """The cache's directory: ``FUSEDOPS_CACHE_DIR``, else the platform's user cache; None without a home directory."""
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


@functools.cache
def code_of_package() -> str:
    """Names, sizes and times of this package's files: in a working copy the version does not change with the code."""
    root = Path(__file__).parents[1]
    files = [(path.relative_to(root).as_posix(), path.stat()) for path in sorted(root.rglob("*.py"))]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])


def file_of(folder: str, text: Sequence[str]) -> Path | None:
    """The file of what was made of a text by this code, in a folder of the cache; None without a home directory."""
    root = directory()
    if root is None:
        return None
    parts = [__version__, torch.__version__, sys.version, code_of_package(), *text]
    return root / folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.json"


def sealed(text: str) -> str:
    """A file's text, behind a checksum of it and of this version."""
    return f"{_checksum(text)}\n{text}"


def opened(file: str) -> str:
    """The text that was sealed.

    Raises:
        ValueError: anything in the file has changed.
    """
    checksum, _, text = file.partition("\n")
    if checksum != _checksum(text):
        raise ValueError("the checksum is another")
    return text


def _checksum(text: str) -> str:
    return hashlib.sha256(f"{__version__}\n{text}".encode()).hexdigest()


def slug(device: str) -> str:
    """A device's name as a file name: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def path_of(key: TuningKey, device: str) -> Path | None:
    """The file of an entry, which need not exist."""
    root = directory()
    if root is None:
        return None
    name = hashlib.sha256(json.dumps(_entry_key(key, device), sort_keys=True).encode()).hexdigest()[:32]
    return root / slug(device) / key.kernel / f"{name}.json"


def entries() -> Iterator[Path]:
    """All entries of all devices and versions."""
    root = directory()
    if root is not None:
        yield from sorted(root.glob("*/*/*.json"))


def read(key: TuningKey, device: str) -> Config | None:
    """The tuned config, or None without a usable entry."""
    path = path_of(key, device)
    try:
        if path is None or not path.exists():
            return None
        return check(path, _entry_key(key, device))
    except EntryError as problem:
        _warn_once("read", f"ignored {path}, which is {problem.kind} ({problem})", "delete it, or that whole directory")
    except OSError as error:
        _warn_once("read", f"cannot read {path} ({error.strerror})", "make it readable")
    return None


def check(path: Path, expected: Mapping[str, Any] | None = None) -> Config:
    """The config in a file, which must hold the entry for ``expected``, or for the key in the file itself.

    Raises:
        EntryError: the entry is torn, foreign, or stale: chosen from other candidates than today's.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        found, space, numbers = content["key"], content["space"], content["config"]
        parts = {**found, "variant": tuple(found["variant"])}
        key = TuningKey(*(parts[name] for name in TuningKey.__dataclass_fields__))
        config = Config(*numbers)
        own, right = _entry_key(key, found["device"]), path_of(key, found["device"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EntryError("torn", f"not a complete entry: {type(error).__name__}") from None
    if expected is None and found != own:
        raise EntryError("another version's", "not for this version of fusedops or Triton")
    if path != right if expected is None else found != dict(expected):
        raise EntryError("foreign", "another device's, version's or kernel's")
    if space != fingerprint(key) or not valid(key, config):
        raise EntryError("stale", "chosen from other candidates than today's")
    return config


def write(key: TuningKey, device: str, config: Config, microseconds: Mapping[str, float]) -> bool:
    """Writes an entry atomically; returns False, with one warning per process, where that fails."""
    path = path_of(key, device)
    if path is None:
        _warn_once("write", "there is no home directory for it", "set FUSEDOPS_CACHE_DIR")
        return False
    content = {
        "key": _entry_key(key, device),
        "space": fingerprint(key),
        "config": astuple(config),
        "microseconds": dict(microseconds),
    }
    try:
        replace(path, json.dumps(content))
    except OSError as error:
        _warn_once("write", f"cannot write {path} ({error.strerror})", "make it writable, or set FUSEDOPS_CACHE_DIR")
        return False
    return True


def replace(path: Path, text: str) -> None:
    """Writes a whole file at once, and the folders that it is in: a reader sees the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=SCRATCH, dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)  # noqa: PTH105 - the atomic step, by the system call's name
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # noqa: PTH108
        raise


def _entry_key(key: TuningKey, device: str) -> dict[str, Any]:
    versions = {"fusedops": __version__, "triton": _triton_version()}
    return {**asdict(key), "variant": list(key.variant), "device": device, **versions}


@functools.cache
def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _warn_once(what: str, problem: str, remedy: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"fusedops: tuning cache in {directory()}: {problem}; {remedy}. Results are right without it; "
            "`fusedops doctor` checks the cache. This warning is shown once.",
            RuntimeWarning,
            stacklevel=2,
        )
