"""Replies of the tuner's child processes, on their standard output.

The output may have other lines too: imported packages, C code and the user's startup files print.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

__all__ = ["how_it_ended", "replies_in", "send"]

_MARK = "fusedops replies "


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
