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
from dataclasses import dataclass
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
        programs: each kernel's most programs, where they sum over rows.
        reduce: the kernel that adds up partial sums over rows.
        reduce_block: the columns of its programs.
    """

    variants: tuple[Variant, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    programs: tuple[int, ...]
    reduce: Variant | None
    reduce_block: int


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
        self, site: RowwiseSite, seeded: int, aligned: bool, wide: bool, bucket: int
    ) -> LaunchPlan:
        """Return the compiled kernels of a call, with their tilings.

        Args:
            site: the call's.
            seeded: the form of the seed: see `core.random.rng.seed_kind`.
            aligned: whether all addresses and row strides are multiples of 16 bytes.
            wide: whether an index of rows may need 64 bits.
            bucket: that of the number of rows.
        """
        cols = self.structure.cols
        processors = launch.processors(site.device_index)
        variants: list[Variant] = []
        chosen: list[tuning.Config] = []
        for kernel in self.kernels:
            key = self.tuning_key(kernel, bucket)
            config, variant = self._compiled(site, kernel, seeded, key, aligned, wide)
            variants.append(variant)
            chosen.append(config)
        # The most programs of a kernel that sums over rows: each multiprocessor has one, or more.
        programs = [processors * max(config.per_sm, 1) for config in chosen]
        # Only the last kernel sums over rows, and each of its programs has partial sums to add up.
        # Those of a group are of its own programs, which are few.
        adding = tuning.adding(1 if self.last.grouped else programs[-1], cols)
        reduce = None
        if self.reduce is not None:
            reduce = self._variant(site, self.reduce, seeded, {}, adding, aligned)
        return LaunchPlan(
            tuple(variants),
            tuple([config.rows for config in chosen]),
            tuple([-(-cols // config.block_n) for config in chosen]),
            tuple(programs),
            reduce,
            adding.block_n,
        )

    def _compiled(
        self,
        site: RowwiseSite,
        kernel: Kernel,
        seeded: int,
        key: TuningKey,
        aligned: bool,
        wide: bool,
    ) -> tuple[tuning.Config, Variant]:
        """Compile a kernel with its config, or with another if Triton cannot with that."""
        config = tuning.choose(key, site.device_index)
        with_config = functools.partial(
            self._with_config, site, kernel, seeded, aligned=aligned, wide=wide
        )
        try:
            return config, with_config(config)
        except launch.NotCompiledError:
            if tuning.forces():
                raise
            for other in _others(key, config):
                with contextlib.suppress(launch.NotCompiledError):
                    return other, with_config(other)
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
    ) -> Variant:
        # The adjacent columns whose dropout mask a thread draws: as many as it loads at a time, 8
        # where the narrowest tensor has 16 bits and else 4.
        vector = vector_width(*(kernel.moved or (self.program.acc,)))
        # A thread with fewer adjacent elements would exchange the dropout mask with another.
        elements = config.block_n * config.rows // (32 * config.warps)
        constants = {
            "VECTOR": vector if elements >= vector else 4,
            "PERSISTENT": bool(kernel.sums),
            "INDEX": triton_dtype(torch.int64 if wide else torch.int32),
        }
        return self._variant(site, kernel, seeded, constants, config, aligned)

    def compile(self, seeded: int, bucket: int) -> None:
        """Compile the kernels for contiguous tensors as PyTorch allocates them.

        Later calls get them from the cache.
        """
        self.plan(self.site, seeded, self._is_aligned(), False, bucket)

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
            self.plan(self.site, seeded, True, False, bucket)
        return requests

    def _variant(
        self,
        site: RowwiseSite,
        kernel: Kernel,
        seeded: int,
        constants: dict[str, Any],
        config: tuning.Config,
        aligned: bool,
    ) -> Variant:
        types = {argument.name: self._type(argument) for argument in kernel.arguments}
        for name in ("seed", "offset"):
            if name in types:
                types[name] = SEED_TYPES[seeded][name]
        function = loaded(self.program.op, self.program.digest, kernel.source, kernel.name)
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
            self.program.digest,
        )
        return TuningKey(
            f"rowwise_moments_{direction}" if is_moments else f"rowwise_{direction}",
            variant,
            widths(*sorted({dtype.itemsize for dtype in moved})),
            self.structure.cols,
            bucket,
        )

    def _type(self, argument: Argument) -> str | None:
        """Return Triton's type of an argument; None for a tensor that is absent."""
        kind = argument.kind
        index = argument.index
        is_unreduced = kind == "gradient" and index in self.last.written
        if is_unreduced or kind in _IN_ACC:
            return pointer_type(self.program.acc)
        if kind == "cotangent":
            return pointer_type(self.cotangents[index])
        if kind in _OF_OPERANDS:
            return pointer_type(operand_of(self.program, kind, index).dtype)
        return "i32" if kind in _SMALL else "i64"


def _layout_of(kernel: Kernel) -> str:
    """Return how the programs of a kernel take rows."""
    if kernel.tiled:
        return "tiles"
    return "groups" if kernel.grouped else "rows"


def _others(key: TuningKey, config: tuning.Config) -> list[tuning.Config]:
    """Return configs of other warps, with which a kernel may compile that does not with its own."""
    others = [near for near in configs.candidates(key) if near.warps != config.warps]
    return others[:_MOST_OTHERS]
