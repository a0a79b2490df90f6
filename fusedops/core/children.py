"""Child processes that measure and compile: their environment, and their replies.

Replies are on the standard output, which may have other lines too: imported packages, C code and
the user's startup files print.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Child", "child_environment", "replies_in", "send"]

_MARK = "fusedops replies "
# The seconds that a killed process may take to end.
_END = 5.0


def child_environment() -> dict[str, str]:
    """Return the environment of child processes.

    They import this package, whatever the current directory, and do not tune on demand themselves.
    """
    root = str(Path(__file__).parents[2])
    # This package comes first, so that a child does not import another installed release of it.
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "FUSEDOPS_TUNE": "", "OMP_NUM_THREADS": "1"}


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


class Child:
    """A child process that replies to lines, one after the other.

    Args:
        command: the command.
        options: those of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",  # output other than replies may be in any encoding
            start_new_session=True,  # its own children are in its group, and end with it
            **{"env": child_environment(), **options},
        )
        # The replies, and None at the end of the output. A read of a queue can have a timeout, and
        # a read of a pipe cannot.
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for reply in replies_in(lines):
                self._replies.put(reply)
        self._replies.put(None)

    def reply(self, line: str, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the reply to a line; None if the process has ended.

        Raises:
            TimeoutError: there is none after some seconds.
        """
        assert self.process.stdin is not None
        # If the process has ended, so have its replies.
        with contextlib.suppress(BrokenPipeError, ValueError):
            print(line, file=self.process.stdin, flush=True)
        try:
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            # A late reply would be read as that to the next line.
            self.end()
            raise TimeoutError(f"no reply within {seconds:g} s") from None
        if reply is None:  # also for the next line
            self._replies.put(None)
        return reply

    def how_it_ended(self) -> str:
        """Return the exit code or signal of the process, whose output has ended, as text."""
        try:
            code = self.process.wait(timeout=_END)
        except subprocess.TimeoutExpired:
            return "without an exit code"
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def end(self) -> None:
        """Kill the process and its own children. One that hangs in a driver may end much later."""
        # The group of a process that was waited for may be another's by now.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_END)
        # This raises if a request is still in the pipe's buffer and can no longer be written.
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
