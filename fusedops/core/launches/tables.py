"""Tables on the device: of addresses, for kernels that read many tensors, and of numbers.

A table of addresses is copied to the device once. Later calls with tensors at the same addresses
use it again. All tables are in memory of their own, which outlives graphs: while PyTorch captures a
graph, or warms up for it, whatever is allocated belongs to the graph, which uses that memory again.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..compat.runtime import capturing, current_stream
from ..configs.tuning import Config
from . import launch
from .driver import relaxed
from .launch import Variant

__all__ = ["Addresses", "constants", "gather"]

# The numbers of an arena.
_ENTRIES = 1 << 15
# The number of addresses that one launch of `store_addresses_kernel` takes.
_STORED = 64
_lock = threading.Lock()


class Addresses:
    """A table of the addresses of tensors, and its properties for which kernels are specialised.

    Attributes:
        table: int64: the addresses and, if ``strided``, after them the distances between rows.
        strided: whether the table has distances.
        absent: whether an address is 0, which stands for no tensor.
        bits: the bitwise or of all addresses.
        strides: the bitwise or of all distances; 0 without them.
    """

    __slots__ = ("absent", "bits", "strided", "strides", "table")

    def __init__(
        self, table: Tensor, pointers: tuple[int, ...], strides: tuple[int, ...] | None
    ) -> None:
        self.table = table
        self.strided = strides is not None
        self.absent = 0 in pointers
        self.bits = reduce(or_, pointers)
        self.strides = 0 if strides is None else reduce(or_, strides)


def _allocated(count: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns memory that belongs to no graph: another thread's allocations never do.

    That thread's stream may still have work on the memory, such as PyTorch's fill of new memory
    under deterministic algorithms. The current stream waits for it.
    """

    def allocate() -> tuple[Tensor, torch.cuda.Event | None]:
        memory = torch.empty(count, dtype=dtype, device=device)
        return memory, torch.cuda.current_stream(device).record_event() if memory.is_cuda else None

    with ThreadPoolExecutor(1) as pool:
        memory, event = pool.submit(allocate).result()
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return memory


@functools.lru_cache(maxsize=4096)
def constants(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a table of these numbers, always the same for equal arguments.

    A plan that is made while a graph is captured, for a random state in memory, has the table of
    the plan before the capture. So no copy from the host is captured.
    """
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    return _allocated(len(numbers), device, dtype).copy_(host)


class _Arena:
    """Memory for tables, taken piece by piece.

    Attributes:
        tables: the tables of addresses in it, by their key.
    """

    def __init__(self, device: torch.device) -> None:
        self.tables: dict[Any, Addresses] = {}
        self._memory = _allocated(_ENTRIES, device)
        self._start = 0

    def take(self, count: int, *, again: bool) -> Tensor | None:
        """Returns memory of ``count`` numbers; None if there is none.

        It begins at a multiple of 16 bytes, as kernels are compiled for.

        Args:
            count: the numbers.
            again: whether memory is used again from the start when it ends. Then all tables are
                forgotten. Kernels that were launched in the arena's stream have read theirs by the
                time that a later copy in that stream writes a new table.
        """
        if self._start + count > _ENTRIES:
            if not again or count > _ENTRIES:
                return None
            self.tables.clear()
            self._start = 0
        start, self._start = self._start, self._start + count + count % 2
        return self._memory[start : start + count]


class _Recorded(_Arena):
    """Memory for tables that graphs read.

    Attributes:
        stream: fills the tables. It has a high priority, so that it is none of the streams that
            `torch.cuda.Stream` returns by default: one of these is captured.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.wait_stream(torch.cuda.current_stream(device))


# An arena for each thread and stream, and one for each device.
_arenas: dict[Any, _Arena] = {}
_recorded_arenas: dict[int, _Recorded] = {}


def gather(
    device_index: int,
    device: torch.device,
    pointers: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> Addresses:
    """Returns the table of these addresses, an earlier one if there is one.

    ``strides`` are the distances between rows, or None if they equal the widths. A table is for the
    stream on which it was filled. While a graph is captured, the table is filled at once, and no
    replay fills it again.
    """
    stream = current_stream(device_index) if device_index >= 0 else 0
    values = pointers if strides is None else pointers + strides
    if device_index >= 0 and capturing():
        return Addresses(_recorded(device_index, device, values), pointers, strides)
    key = threading.get_ident(), device_index, stream
    arena = _arenas.get(key)
    if arena is None:
        with _lock:
            arena = _arenas[key] = _Arena(device)
            if device_index >= 0 and device_index not in _recorded_arenas:
                _recorded_arenas[device_index] = _Recorded(device)
    addresses = arena.tables.get((pointers, strides))
    if addresses is not None:
        return addresses
    # Pinned, because the host would wait for a copy from pageable memory.
    host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device_index >= 0)
    table = arena.take(len(values), again=True)
    if table is None:  # too long to be kept
        return Addresses(host.to(device, non_blocking=True), pointers, strides)
    table.copy_(host, non_blocking=True)
    addresses = arena.tables[pointers, strides] = Addresses(table, pointers, strides)
    return addresses


_store: dict[int, Variant] = {}


def _recorded(device_index: int, device: torch.device, values: tuple[int, ...]) -> Tensor:
    """Returns a table for a graph that is captured.

    Another stream fills it now, so that replays do not. If there is no memory for it left, the
    graph's own kernels fill it in each replay, from their arguments.
    """
    store = _store.get(device_index)
    if store is None:
        store = _store[device_index] = store_variant(device_index)
    arena = _recorded_arenas.get(device_index)
    if arena is not None:
        with relaxed(), _lock, torch.cuda.stream(arena.stream):
            table = None if capturing() else arena.take(len(values), again=False)
            if table is not None:
                _fill(store, table, values)
                arena.stream.synchronize()
                return table
    table = torch.empty(len(values), dtype=torch.int64, device=device)
    _fill(store, table, values)
    return table


def _fill(store: Variant, table: Tensor, values: tuple[int, ...]) -> None:
    """Launches kernels that fill a table from their arguments, `_STORED` values each."""
    for start in range(0, len(values), _STORED):
        part = values[start : start + _STORED]
        padding = (0,) * (_STORED - len(part))
        store(1, 1, table, start, len(part), *part, *padding)


def store_variant(device_index: int) -> Variant:
    """Returns the compiled kernel that writes addresses into a table."""
    from .kernels import store_addresses_kernel

    types: dict[str, str | None] = {"addresses": "*i64", "start": "i32", "count": "i32"}
    types |= dict.fromkeys((f"a{i}" for i in range(_STORED)), "i64")
    return launch.build(
        store_addresses_kernel,
        types,
        {},
        Config(block_n=1, rows=1, warps=1),
        device_index=device_index,
        acc=torch.float32,
        cols=0,
        aligned=False,
    )
