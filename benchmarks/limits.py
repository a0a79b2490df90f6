"""Numbers on a command line that mean nothing: they are an error before anything is measured."""

from __future__ import annotations

import argparse

__all__ = ["check"]

# The least that an option of any command may be, and its unit.
_LEAST = {
    "seeds": (1, ""),
    "steps": (1, ""),
    "jobs": (0, ""),
    "budget": (0, " seconds"),
    "threshold": (0, " percent"),
}


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for a number that is too small or none."""
    for name, (least, unit) in _LEAST.items():
        value = getattr(options, name, None)
        if value is not None and not value >= least:
            raise ValueError(f"--{name} must be at least {least}{unit}, got {value:g}")
