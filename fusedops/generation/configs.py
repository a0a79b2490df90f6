"""How the generation kernel cuts its work."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["BLOCK_L", "CONFIG", "tiles"]

# Sixteen columns or eight windows for each thread: enough loads in flight, and few registers.
CONFIG = Config(4096, 1, 8)
BLOCK_L = 2048


def tiles(rows: int, cols: int, copied: int, scanned: int, processors: int) -> int:
    """Tiles of columns that a program copies before it looks for bans among them.

    Every program of a row looks through all of its windows again. Up to one program a multiprocessor that costs
    nothing, as the multiprocessors would be idle. Up to four, which hide more of the memory's latency, are worth it
    where they read less again than they copy.

    Args:
        rows: how many rows there are.
        cols: how many columns a row has.
        copied: bytes that copying a row moves.
        scanned: bytes of a row's tokens.
        processors: multiprocessors of the device.
    """
    every = -(-cols // CONFIG.block_n)
    programs = processors * (4 if 4 * scanned <= copied else 1)
    parts = min(every, max(1, -(-programs // rows)))
    return -(-every // parts)
