"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

_WIDTH = 30


class Progress:
    """A bar with the completed part of the work and the estimated remaining time."""

    def __init__(self, total: int) -> None:
        self._total, self._done = max(total, 1), 0
        self._start = time.monotonic()
        # In a file or a pipe each update of the bar would be another line.
        self._shown = sys.stderr.isatty()

    def at(self, done: int, current: str) -> None:
        """Set the number of completed items and the name of the current one."""
        self._done = done
        self._draw(current)

    def line(self, text: str) -> None:
        """Print a line of output above the bar."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(text, flush=True)
        self._draw("")

    def close(self) -> None:
        """Remove the bar."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False

    def _draw(self, current: str) -> None:
        if not self._shown:
            return
        part = self._done / self._total
        full = round(_WIDTH * part)
        spent = time.monotonic() - self._start
        left = f"{spent / part - spent:.0f} s left" if part else ""
        bar = f"{'#' * full}{'-' * (_WIDTH - full)} {self._done}/{self._total} {left} {current}"
        # A line that is wider than the terminal could not be overwritten.
        print(f"\r\x1b[K{bar[:110]}", end="", file=sys.stderr, flush=True)
