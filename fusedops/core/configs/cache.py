"""The user's cache of tuned configs: one small file per entry, validated when it is read.

    <directory>/<device>/<kernel>/<hash of the key>.json
    {"key": ..., "space": hash of the candidates, "config": [...], "microseconds": {...}}

Processes may read and write concurrently: an entry is replaced atomically, and the last writer
wins. An unusable entry is ignored: it never raises, but causes one warning per process, and the
config comes from the table or the heuristic.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from ..version import __version__
from .tuning_key import Config, TuningKey, fingerprint, valid

__all__ = [
    "SCRATCH",
    "EntryError",
    "check",
    "code_of_package",
    "directory",
    "entries",
    "file_of",
    "files",
    "opened",
    "path_of",
    "read",
    "replace",
    "sealed",
    "slug",
    "triton_version",
    "write",
]

# Files in the cache may come from a user, a tool, or another release. So their content is checked:
#
#     entries         the numbers of a config. Each must be within its limits, and the family's
#                     `valid` must accept the config. With any such config results are right
#     sealed files    a checksum, then text: traced functions and graphs, from which code is
#                     generated. The code that reads the text also checks it word by word
#
# The checksum detects incomplete and edited files. It does not protect against an attacker who can
# write to the user's own directory.

# The prefix of the name of a file that is not complete yet.
SCRATCH = ".writing-"
# The operations ("read", "write") for which a warning was shown.
_warned: set[str] = set()


class EntryError(Exception):
    """An unusable entry; `kind` is ``torn``, ``foreign``, ``stale`` or ``another version's``."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def directory() -> Path | None:
    """Returns the cache's directory: ``FUSEDOPS_CACHE_DIR``, or one in the user's cache directory.

    Returns None if there is no home directory.
    """
    variable = os.environ.get("FUSEDOPS_CACHE_DIR")
    if variable:
        return Path(variable)
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
    """Returns the names, sizes and times of this package's files, as text.

    They identify the code. The version does not: in a working copy the code changes without it.
    """
    root = Path(str(sys.modules[__name__.partition(".")[0]].__file__)).parent
    files = []
    for path in sorted(root.rglob("*.py")):
        stat = path.stat()
        files.append((path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns))
    return repr(files)


def file_of(folder: str, text: Sequence[str]) -> Path | None:
    """Returns the path of a file in the cache, for results that this package computes from a text.

    Returns None if there is no home directory.

    Args:
        folder: the name of the file's folder in the cache.
        text: the lines from which the results are computed.
    """
    root = directory()
    if root is None:
        return None
    # The name is a hash of everything that the results depend on: so another version neither reads
    # nor replaces the file.
    parts = [__version__, torch.__version__, sys.version, code_of_package(), *text]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return root / folder / f"{digest[:32]}.json"


def sealed(text: str) -> str:
    """Returns the content of a file: a checksum of this version and the text, then the text."""
    return f"{_checksum(text)}\n{text}"


def opened(file: str) -> str:
    """Returns the text in the content of a `sealed` file.

    Raises:
        ValueError: the content has changed, or another version wrote it.
    """
    checksum, _, text = file.partition("\n")
    if checksum != _checksum(text):
        raise ValueError("the checksum does not match")
    return text


def _checksum(text: str) -> str:
    return hashlib.sha256(f"{__version__}\n{text}".encode()).hexdigest()


def slug(device: str) -> str:
    """Returns a device's name as a file name: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def path_of(key: TuningKey, device: str) -> Path | None:
    """Returns the path of an entry's file, which need not exist; None without a home directory."""
    root = directory()
    if root is None:
        return None
    # The name is a hash, because a key may be longer than file names may be, and have other
    # characters.
    text = json.dumps(_entry_key(key, device), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return root / slug(device) / key.kernel / f"{digest[:32]}.json"


def entries() -> Iterator[Path]:
    """Yields the files of all entries, of all devices and versions."""
    root = directory()
    if root is not None:
        yield from sorted(root.glob("*/*/*.json"))


def files(root: Path) -> Iterator[Path]:
    """Yields all files that this package wrote to a directory, of all versions.

    Their names are 32 hexadecimal digits, or those of incomplete files: others are not yielded, so
    that a directory with other content may be cleared.
    """
    for pattern in ("*/*.json", "*/*/*.json"):
        for path in root.glob(pattern):
            if re.fullmatch("[0-9a-f]{32}", path.stem):
                yield path
    for pattern in (f"*/{SCRATCH}*", f"*/*/{SCRATCH}*"):
        yield from root.glob(pattern)


def read(key: TuningKey, device: str) -> Config | None:
    """Returns the tuned config for a key; None if there is no usable entry."""
    path = path_of(key, device)
    try:
        if path is None or not path.exists():
            return None
        return check(path, _entry_key(key, device))
    except EntryError as problem:
        _warn_once(
            "read",
            f"ignored {path}, which is {problem.kind} ({problem})",
            "delete it, or that whole directory",
        )
    except OSError as error:
        _warn_once("read", f"cannot read {path} ({error.strerror})", "make it readable")
    return None


def check(path: Path, expected: Mapping[str, Any] | None = None) -> Config:
    """Returns the config in a file.

    Args:
        path: the file.
        expected: the key that the entry must have. If None, any key is accepted that has the
            present versions of the package and of Triton, and whose file has this path.
    Raises:
        EntryError: the entry is torn (incomplete), foreign (for another key), another version's, or
            stale (chosen from other candidates than today's).
        OSError: the file cannot be read.
    """
    try:
        # The bytes may be anything: parsing deeply nested brackets raises RecursionError.
        content = json.loads(path.read_bytes())
        entry_key, space, numbers = content["key"], content["space"], content["config"]
        parts = {**entry_key, "variant": tuple(entry_key["variant"])}
        key = TuningKey(*(parts[name] for name in TuningKey.__dataclass_fields__))
        config = Config(*numbers)
        device = entry_key["device"]
        own_key, own_path = _entry_key(key, device), path_of(key, device)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EntryError("torn", f"not a complete entry: {type(error).__name__}") from None
    if expected is None:
        # Keys contain versions: an entry of this version has the key that it would get now.
        if entry_key != own_key:
            raise EntryError("another version's", "not for this version of fusedops or Triton")
        is_foreign = path != own_path
    else:
        is_foreign = entry_key != dict(expected)
    if is_foreign:
        raise EntryError("foreign", "another device's, version's or kernel's")
    try:
        is_current = space == fingerprint(key) and valid(key, config)
    except Exception:  # noqa: BLE001 - families expect keys of calls, but a file may have any key
        is_current = False
    # A config that was chosen from other candidates may be slower than today's heuristic.
    if not is_current:
        raise EntryError("stale", "chosen from other candidates than today's")
    return config


def write(key: TuningKey, device: str, config: Config, microseconds: Mapping[str, float]) -> bool:
    """Writes an entry atomically; if that fails, warns once per process and returns False."""
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
        _warn_once(
            "write",
            f"cannot write {path} ({error.strerror})",
            "make it writable, or set FUSEDOPS_CACHE_DIR",
        )
        return False
    return True


def replace(path: Path, text: str) -> None:
    """Writes a file atomically, and creates its folder.

    A reader sees either the whole old file or the whole new one.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The text is first written to a file in the same folder, because a rename is atomic only within
    # a file system. `tempfile` is not used: only the owner may read its files, and users may share
    # a cache.
    scratch = path.with_name(f"{SCRATCH}{os.urandom(8).hex()}")
    try:
        with scratch.open("x") as file:
            file.write(text)
            file.flush()
            # Without this the rename might reach the disk before the content does.
            os.fsync(file.fileno())
        os.replace(scratch, path)  # noqa: PTH105 - the atomic step, by the system call's name
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # noqa: PTH108
        raise


def _entry_key(key: TuningKey, device: str) -> dict[str, Any]:
    """Returns the key of an entry in JSON's types, with the device and the versions."""
    versions = {"fusedops": __version__, "triton": triton_version()}
    return {**asdict(key), "variant": list(key.variant), "device": device, **versions}


@functools.cache
def triton_version() -> str:
    """Returns Triton's version; "none" where it is not installed."""
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _warn_once(operation: str, problem: str, remedy: str) -> None:
    """Warns of a problem, once per operation and process."""
    if operation in _warned:
        return
    _warned.add(operation)
    warnings.warn(
        f"fusedops: tuning cache in {directory()}: {problem}; {remedy}. Results are right without "
        "it; `fusedops doctor` checks the cache. This warning is shown once.",
        RuntimeWarning,
        stacklevel=2,
    )
