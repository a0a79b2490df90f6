"""``fusedops cache``: prints the size of the cache on disk, and deletes files in it."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from .core.configs import cache

__all__ = ["add_parser", "run"]

_KINDS = {
    "rowwise": "functions of rowwise",
    "graphs": "compiled graphs",
    "measured": "measured regions",
}
_CONFIGS = "tuned configs"
_MIB = 2**20


@dataclass(frozen=True)
class _File:
    """A file of the cache, with the bytes it has and the time at which it was written."""

    path: Path
    kind: str
    size: int
    written: float


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``cache``."""
    parser = commands.add_parser(
        "cache",
        help="print the size of the cache, or delete files in it",
        description="Prints the size of the cache on disk. Processes that run are not disturbed "
        "if files are deleted: they compute them again.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--clear", action="store_true", help="delete all files of the cache")
    which.add_argument(
        "--limit",
        type=_size,
        metavar="MIB",
        help="delete the files that were written first, until the others have at most so many MiB",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Deletes what the options ask for, then prints the size; returns 1 if a file remains."""
    root = cache.directory()
    if root is None:
        print("cache: no home directory for it; set FUSEDOPS_CACHE_DIR", file=sys.stderr)
        return 1
    limit = 0.0 if options.clear else options.limit
    failed = 0
    if limit is not None:
        surplus = _surplus(_files(root), limit * _MIB)
        failed = sum([not _deleted(file.path) for file in surplus])
        print(f"deleted {len(surplus) - failed} files")
    files = _files(root)
    print(f"{root}: {_described(files)}")
    for kind in (_CONFIGS, *_KINDS.values()):
        print(f"  {kind}: {_described([file for file in files if file.kind == kind])}")
    if failed:
        print(f"cache: {failed} files cannot be deleted", file=sys.stderr)
    return 1 if failed else 0


def _size(text: str) -> float:
    size = float(text)
    if not 0 <= size < math.inf:
        raise ValueError
    return size


def _files(root: Path) -> list[_File]:
    """Returns the files that this library wrote, of all versions, those written first in front."""
    files = []
    for path in cache.files(root):
        # Another process may delete it meanwhile.
        with contextlib.suppress(OSError):
            stat = path.stat()
            kind = _KINDS.get(path.parent.name, _CONFIGS)
            files.append(_File(path, kind, stat.st_size, stat.st_mtime))
    return sorted(files, key=lambda file: file.written)


def _surplus(files: list[_File], limit: float) -> list[_File]:
    """Returns the files written first whose deletion leaves at most ``limit`` bytes."""
    total = sum([file.size for file in files])
    surplus = []
    for file in files:
        if total <= limit:
            break
        surplus.append(file)
        total -= file.size
    return surplus


def _deleted(path: Path) -> bool:
    """Deletes a file, and its folder if that is empty then; returns whether the file is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # not empty
        path.parent.rmdir()
    return True


def _described(files: list[_File]) -> str:
    total = sum([file.size for file in files])
    size = f"{total / _MIB:.1f} MiB" if total >= _MIB else f"{total / 1024:.1f} KiB"
    return f"{len(files)} files, {size}"
