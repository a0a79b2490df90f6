"""A bar on standard error where that is a terminal, and nothing where it is not."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

_WIDTH = 30


class Progress:
    """How much of the work is done, and about how long the rest takes."""

    def __init__(self, total: int) -> None:
        self._total, self._done = max(total, 1), 0
        self._begun = time.monotonic()
        self._shown = sys.stderr.isatty()

    def at(self, done: int, what: str) -> None:
        """So many pieces are done, and ``what`` is being worked on."""
        self._done = done
        self._draw(what)

    def line(self, text: str) -> None:
        """A line of output, without a torn bar above it."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(text, flush=True)
        self._draw("")

    def close(self) -> None:
        """Removes the bar."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False

    def _draw(self, what: str) -> None:
        if not self._shown:
            return
        part = self._done / self._total
        full = round(_WIDTH * part)
        spent = time.monotonic() - self._begun
        left = f"{spent / part - spent:.0f} s left" if part else ""
        bar = f"{'#' * full}{'-' * (_WIDTH - full)} {self._done}/{self._total} {left} {what}"
        print(f"\r\x1b[K{bar[:110]}", end="", file=sys.stderr, flush=True)
