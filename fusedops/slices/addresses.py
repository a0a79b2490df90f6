"""Tables of addresses on the device, for slices that are separate tensors.

A table is copied to the device once. Later calls with tensors at the same addresses use it again.
"""

from __future__ import annotations

import threading
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..core.compat.runtime import capturing, current_stream
from ..core.configs.tuning import Config
from ..core.launches import launch
from ..core.launches.launch import Variant

__all__ = ["Addresses", "gather"]

# The most tables in the cache. A training step has two: of the slices, and of their gradients.
_MOST_TABLES = 64
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


_tables: dict[Any, Addresses] = {}


def gather(
    device_index: int,
    device: torch.device,
    pointers: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> Addresses:
    """Returns the table of these addresses, from the cache if it has one.

    ``strides`` are the distances between rows, or None if they equal the widths. A table is for the
    stream on which it was filled. While a graph is captured, recorded kernels fill the table, and
    it belongs to the graph: so a replay depends neither on memory of the host nor on the cache.
    """
    stream = current_stream(device_index) if device_index >= 0 else 0
    recorded = device_index >= 0 and capturing()
    key = (device_index, stream, recorded, pointers, strides)
    values = pointers if strides is None else pointers + strides
    if recorded:
        return Addresses(_recorded(device_index, device, values), pointers, strides)
    addresses = _tables.get(key)
    if addresses is not None:
        return addresses
    # Pinned, because the host would wait for a copy from pageable memory.
    table = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device_index >= 0)
    addresses = Addresses(table.to(device, non_blocking=True), pointers, strides)
    with _lock:
        _tables[key] = addresses
        if len(_tables) > _MOST_TABLES:
            # Kernels in the stream may still read the oldest table. PyTorch's allocator reuses its
            # memory only for later work on the same stream.
            oldest = next(iter(_tables))
            del _tables[oldest]
    return addresses


_store: dict[int, Variant] = {}


def _recorded(device_index: int, device: torch.device, values: tuple[int, ...]) -> Tensor:
    """Returns a table that kernels fill from their arguments, `_STORED` values per launch."""
    store = _store.get(device_index)
    if store is None:
        store = _store[device_index] = store_variant(device_index)
    table = torch.empty(len(values), dtype=torch.int64, device=device)
    for start in range(0, len(values), _STORED):
        part = values[start : start + _STORED]
        padding = (0,) * (_STORED - len(part))
        store(1, 1, table, start, len(part), *part, *padding)
    return table


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
