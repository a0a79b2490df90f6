"""Compiled variants of a call's kernels: their types, configs and tuning keys.

A *plan* is what a launch looks up: the compiled kernels with their tilings. A call that differs in
any of these has another plan::

    site                 constants, dtypes, what is saved
    way of the call      groups of rows, cotangents, wanted gradients: a `Variants` for each
    seed                 none, two numbers, or a tensor
    alignment            of all addresses and row strides
    bucket of the rows   the config depends on it
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.configs import tuning
from ..core.configs.tuning import TuningKey, widths
from ..core.launches import launch
from ..core.launches.launch import SEED_TYPES, Variant, pointer_type, triton_dtype, vector_width
from . import configs
from .addresses import Argument
from .kernel import Kernel
from .loading import loaded
from .site import LaunchedProgram, RowwiseSite
from .structure import Operand

__all__ = ["LaunchPlan", "Variants", "operand_of"]

# More programs than any call has tiles of rows.
_UNLIMITED = 1 << 31
# How many other configs are tried for a kernel that Triton cannot compile with the chosen one.
_MOST_OTHERS = 3

# Buffers in the dtype of the computation; tensors; and numbers of 32 bits. Sizes and strides have
# 64: a product of two may be beyond 2**31.
_IN_ACC = ("stats", "moments", "partials")
_OF_OPERANDS = ("input", "output", "intermediate", "gradient")
_SMALL = ("threshold", "chunks", "programs")


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels of a call, with their tilings.

    Attributes:
        variants: the kernels.
        rows: each kernel's rows of a tile.
        columns: each kernel's tiles of columns.
        programs: the most programs along the rows of each kernel; limits only those that loop over
            tiles of rows.
        reduce: the kernel that adds up partial sums over rows.
        reduce_block: the columns of its programs.
        exchange: how programs of the last kernel exchange sums of rows that they share: "none",
            "wait", or "read" after `post`.
        post: the launch before the last kernel that stores sums for it to read.
        multiprocessors: the number of multiprocessors of the streams that the plan is for; 0 for
            any stream.
    """

    variants: tuple[Variant, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    programs: tuple[int, ...]
    reduce: Variant | None
    reduce_block: int
    exchange: str = "none"
    post: Variant | None = None
    multiprocessors: int = 0


def operand_of(program: LaunchedProgram, kind: str, index: int) -> Operand:
    """Return the operand of a kernel's argument: see `Argument`."""
    if kind in ("input", "gradient"):
        return program.structure.inputs[index]
    if kind != "intermediate":
        return program.operand(index)
    return program.operand(program.count if program.own else program.plan.intermediate_output)


class Variants:
    """The variants of the kernels that run for one way of calls.

    Attributes:
        kernels: in the order in which they run.
        last: the last of them, which has the groups and the sums over rows, if there are any.
        reduce: the kernel that adds up partial sums; None without any.
        cotangents: the dtypes of the cotangents; () in a forward.
    """

    def __init__(
        self,
        site: RowwiseSite,
        kernels: Sequence[Kernel],
        reduce: Kernel | None,
        cotangents: Sequence[torch.dtype | None],
    ) -> None:
        self.site = site
        self.kernels = kernels
        self.last = kernels[-1]
        self.reduce = reduce
        self.program = site.program
        self.structure = site.program.structure
        self.cotangents = cotangents

    def plan(
        self,
        site: RowwiseSite,
        seeded: int,
        aligned: bool,
        wide: bool,
        multiprocessors: int,
        bucket: int,
    ) -> LaunchPlan:
        """Return the compiled kernels of a call, with their tilings.

        Args:
            site: the call's.
            seeded: the form of the seed: see `core.random.rng.seed_kind`.
            aligned: whether all addresses and row strides are multiples of 16 bytes.
            wide: whether an index of rows may need 64 bits.
            multiprocessors: the current stream's; 0 if they are not known yet.
            bucket: the bucket of the number of rows.
        """
        cols = self.structure.cols
        device = site.device_index
        variants: list[Variant] = []
        configs_of: list[tuning.Config] = []
        columns: list[int] = []
        post, exchange = None, "none"
        for kernel in self.kernels:
            key = self.tuning_key(kernel, bucket)
            config = _holding(kernel, tuning.choose(key, device), cols)
            across = -(-cols // (config.columns if kernel.held else config.block_n))
            if kernel.exchanged and across > 1:
                exchange = "wait" if launch.waits(device, self.program.acc, across) else "read"
                # Needed for "read" too: a stream with more multiprocessors may have "wait".
                if not multiprocessors and launch.may_wait(device, self.program.acc):
                    multiprocessors = launch.multiprocessors(device)
            compiled = functools.partial(self._compiled, site, kernel, seeded, key, aligned, wide)
            config, variant = compiled(config, exchange)
            if exchange == "read":
                _, post = compiled(config, "post")
            variants.append(variant)
            configs_of.append(config)
            columns.append(across)
        # The most programs of a kernel whose programs have several tiles of rows: each
        # multiprocessor has one, or more.
        available = multiprocessors or launch.processors(device)
        programs = list(
            itertools.starmap(_most_programs, zip(self.kernels, configs_of, strict=True))
        )
        programs = [min(available * per_sm, _UNLIMITED) for per_sm in programs]
        if exchange == "wait":
            # All programs of a cooperative launch run at the same time.
            programs[-1] = min(programs[-1], available * launch.resident(variants[-1]))
        # Only the last kernel sums over rows. With groups, the partial sums of a group's few
        # programs are added up; otherwise those of all programs.
        shared = columns[-1] if self.last.held else 1
        parts = 1 if self.last.group else programs[-1] // shared
        reduce_config = tuning.config_of_sums(parts, cols)
        reduce = None
        if self.reduce is not None:
            reduce = self._variant(site, self.reduce, seeded, {}, reduce_config, aligned)
        return LaunchPlan(
            tuple(variants),
            tuple([config.rows for config in configs_of]),
            tuple(columns),
            tuple(programs),
            reduce,
            reduce_config.block_n,
            exchange,
            post,
            multiprocessors,
        )

    def _compiled(
        self,
        site: RowwiseSite,
        kernel: Kernel,
        seeded: int,
        key: TuningKey,
        aligned: bool,
        wide: bool,
        config: tuning.Config,
        exchange: str,
    ) -> tuple[tuning.Config, Variant]:
        """Compile a kernel with its config; if Triton cannot, with another config."""
        with_config = functools.partial(
            self._with_config, site, kernel, seeded, aligned=aligned, wide=wide, exchange=exchange
        )
        try:
            return config, with_config(config)
        except launch.NotCompiledError:
            if tuning.forces():
                raise
            # Programs that share rows keep their number: it decides how they exchange sums.
            for replacement in _others(key, config):
                with contextlib.suppress(launch.NotCompiledError):
                    return replacement, with_config(replacement)
            raise

    def _with_config(
        self,
        site: RowwiseSite,
        kernel: Kernel,
        seeded: int,
        config: tuning.Config,
        *,
        aligned: bool,
        wide: bool,
        exchange: str,
    ) -> Variant:
        # The adjacent columns whose dropout mask a thread draws: as many as it loads at a time, 8
        # if the narrowest tensor has 16 bits, and else 4.
        vector = vector_width(*(kernel.moved or (self.program.acc,)))
        # A thread with fewer adjacent elements would exchange the dropout mask with another.
        elements = config.block_n * config.rows // (32 * config.warps)
        constants = {
            "VECTOR": vector if elements >= vector else 4,
            "PERSISTENT": kernel.loops and _most_programs(kernel, config) < _UNLIMITED,
            "EXCHANGE": exchange,
            "INDEX": triton_dtype(torch.int64 if wide else torch.int32),
        }
        return self._variant(site, kernel, seeded, constants, config, aligned, exchange)

    def compile(self, seeded: int, bucket: int) -> None:
        """Compile the kernels for contiguous tensors as PyTorch allocates them.

        Later calls get them from the cache.
        """
        self.plan(self.site, seeded, self._is_aligned(), False, 0, bucket)

    def _is_aligned(self) -> bool:
        """Whether the rows of contiguous tensors begin at multiples of eight elements."""
        for argument in itertools.chain(*[kernel.arguments for kernel in self.kernels]):
            if argument.kind != "stride":
                continue
            operand = operand_of(self.program, argument.of, argument.index)
            if self.program.size_of_row(operand) % 8:
                return False
        return True

    def requests(self, seeded: int, bucket: int) -> list[launch.Request]:
        """Return the requests to compile the kernels, and the reduction, for aligned tensors."""
        with launch.collecting() as requests:
            self.plan(self.site, seeded, True, False, 0, bucket)
        return requests

    def _variant(
        self,
        site: RowwiseSite,
        kernel: Kernel,
        seeded: int,
        constants: dict[str, Any],
        config: tuning.Config,
        aligned: bool,
        exchange: str = "none",
    ) -> Variant:
        types = {argument.name: self._type(argument, exchange) for argument in kernel.arguments}
        for name in ("seed", "offset"):
            if name in types:
                types[name] = SEED_TYPES[seeded][name]
        function = loaded(self.program.op, self.program.digest, kernel)
        return launch.build(
            function,
            types,
            constants,
            config,
            device_index=site.device_index,
            acc=self.program.acc,
            cols=self.structure.cols,
            aligned=aligned,
        )

    def tuning_key(self, kernel: Kernel, bucket: int) -> TuningKey:
        """Return the properties of a kernel on which its choice of config depends."""
        moved = kernel.moved or (self.program.acc,)
        layout = _layout_of(kernel)
        direction = "backward" if self.cotangents else "forward"
        is_moments = kernel.name.endswith("moments_kernel")
        variant = (
            layout,
            f"{len(kernel.sums)} sums",
            f"{self.structure.parts_of_row} parts",
            f"{len(moved)} moved",
            f"{len(kernel.read)} read",
            f"{kernel.reductions} reductions",
            "compute-bound" if kernel.excess else "memory-bound",
            "dropout" if kernel.drops else "plain",
            f"{self._sums_of_columns(kernel)} of columns",
            self.program.digest,
        )
        return TuningKey(
            f"rowwise_moments_{direction}" if is_moments else f"rowwise_{direction}",
            variant,
            widths(*sorted({dtype.itemsize for dtype in moved})),
            self.structure.cols,
            bucket,
        )

    def _sums_of_columns(self, kernel: Kernel) -> int:
        """Return how many sums over rows have columns: others are one number."""
        inputs = self.structure.inputs
        return sum([self.structure.has_columns(inputs[index]) for index, _ in kernel.sums])

    def _type(self, argument: Argument, exchange: str) -> str | None:
        """Return Triton's type of an argument; None for a tensor that is absent."""
        kind = argument.kind
        if kind == "exchange":
            types = {"none": None, "wait": torch.int64}
            return pointer_type(types.get(exchange, self.program.acc))
        index = argument.index
        is_unreduced = kind == "gradient" and index in self.last.written
        if is_unreduced or kind in _IN_ACC:
            return pointer_type(self.program.acc)
        if kind == "cotangent":
            return pointer_type(self.cotangents[index])
        if kind in _OF_OPERANDS:
            return pointer_type(operand_of(self.program, kind, index).dtype)
        return "i32" if kind in _SMALL else "i64"


def _most_programs(kernel: Kernel, config: tuning.Config) -> int:
    """Return the most programs of a multiprocessor.

    Without sums over rows to add up, a program has one tile of rows, unless the config says more.
    """
    if config.per_sm == 0 and not kernel.sums:
        return _UNLIMITED
    return max(config.per_sm, 1)


def _holding(kernel: Kernel, config: tuning.Config, cols: int) -> tuning.Config:
    """Return the config, with tiles of whole blocks.

    If programs cannot share a row, it has as many tiles as hold a row.
    """
    if config.block_n < kernel.block:
        parts = -(-config.columns // kernel.block)
        config = replace(config, block_n=kernel.block, parts=parts)
    if not kernel.held or kernel.shares or config.columns >= cols:
        return config
    return replace(config, parts=-(-cols // config.block_n))


def _layout_of(kernel: Kernel) -> str:
    """Return how the programs of a kernel take rows."""
    if kernel.tiled:
        return "tiles"
    if kernel.shares:
        return "shared rows"
    return "groups" if kernel.group else "rows"


def _others(key: TuningKey, config: tuning.Config) -> list[tuning.Config]:
    """Return configs with other numbers of warps: a kernel may compile with one of them."""
    others = [
        candidate
        for candidate in configs.candidates(key)
        if candidate.warps != config.warps and candidate.columns == config.columns
    ]
    return others[:_MOST_OTHERS]
