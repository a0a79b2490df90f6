"""Child processes that measure and compile: their environment, and their replies.

Replies are on the standard output, which may have other lines too: imported packages, C code and
the user's startup files print.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["child_environment", "how_it_ended", "replies_in", "send", "start"]

_MARK = "fusedops replies "


def child_environment() -> dict[str, str]:
    """Return the environment of child processes.

    They import this package, whatever the current directory, and do not tune on demand themselves.
    """
    root = str(Path(__file__).parents[2])
    # This package comes first, so that a child does not import another installed release of it.
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "FUSEDOPS_TUNE": "", "OMP_NUM_THREADS": "1"}


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a child process that reads lines and replies; ``options`` are those of `Popen`."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",  # output other than replies may be in any encoding
        **{"env": child_environment(), **options},
    )


def send(reply: dict[str, Any], output: TextIO) -> None:
    """Write a reply as a marked line."""
    # The first line break ends other output that did not end its line.
    print(f"\n{_MARK}{json.dumps(reply)}", file=output, flush=True)


def replies_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the replies in a process's output."""
    for line in lines:
        if line.startswith(_MARK):
            # A process that is killed may leave an incomplete reply.
            with contextlib.suppress(ValueError):
                yield json.loads(line.removeprefix(_MARK))


def how_it_ended(process: subprocess.Popen[str]) -> str:
    """Return the exit code or signal of a process whose output has ended, as text."""
    try:
        code = process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return "without an exit code"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
