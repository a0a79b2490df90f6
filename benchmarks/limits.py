"""Checks the numbers on a command line before anything is measured."""

from __future__ import annotations

import argparse

__all__ = ["check"]

# The least value of each option, and its unit for the message. Not every command has all options.
_LEAST = {
    "seeds": (1, ""),
    "steps": (1, ""),
    "rounds": (1, ""),
    "jobs": (0, ""),
    "processes": (1, ""),
    "layers": (0, ""),
    "limit": (1, " seconds"),
    "budget": (0, " seconds"),
    "threshold": (0, " percent"),
}


def check(options: argparse.Namespace) -> None:
    """Raises a ValueError if an option is too small or NaN."""
    for name, (least, unit) in _LEAST.items():
        value = getattr(options, name, None)
        # Not ``<``, so that NaN is an error too.
        if value is not None and not value >= least:
            raise ValueError(f"--{name} must be at least {least}{unit}, got {value:g}")
