"""The command ``fusedops``: ``tune``, ``doctor`` and ``cache``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .core.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    from . import disk_cache, doctor
    from .tune import command

    parser = argparse.ArgumentParser(
        "fusedops", description="Fused operators for PyTorch: tuning, diagnosis, cache."
    )
    parser.add_argument("--version", action="version", version=f"fusedops {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command.add_parser(commands)
    doctor.add_parser(commands)
    disk_cache.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.command(options))
    except command.UsageError as error:
        print(f"fusedops: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # the exit code that shells use for an interrupt


if __name__ == "__main__":
    sys.exit(main())
