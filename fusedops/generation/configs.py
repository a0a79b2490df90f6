"""The config of the generation kernel."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["BLOCK_L", "CONFIG", "tiles"]

# Sixteen columns or eight windows per thread: enough loads in flight, and few registers.
CONFIG = Config(4096, 1, 8)
BLOCK_L = 2048


def tiles(rows: int, cols: int, copied: int, scanned: int, processors: int) -> int:
    """The number of column tiles that a program copies before it searches for bans in them.

    Every program of a row reads all of the row's windows. Up to one program per multiprocessor this costs nothing, as
    the multiprocessors would be idle. Up to four, which hide more memory latency, are faster if the windows' reads are
    fewer bytes than the copies.

    Args:
        rows: the number of rows.
        cols: the number of columns.
        copied: bytes read and written to copy a row.
        scanned: bytes of a row's tokens.
        processors: the device's multiprocessors.
    """
    every = -(-cols // CONFIG.block_n)
    programs = processors * (4 if 4 * scanned <= copied else 1)
    parts = min(every, max(1, -(-programs // rows)))
    return -(-every // parts)
