"""Measures the times of a region both ways, where the user's mode asks for it.

A process of its own times a region: so the caller's random state, streams, memory statistics and
compilations are as they were. It starts for the first region of a graph that is not known, and ends
with the choice of that graph's regions.

    region ──▶ this process ──▶ file ──▶ process of tune/regions.py ──▶ seconds both ways
               known?           known?

A region is known by its program, the shapes, strides and wanted gradients of its tensors, the GPU's
name, and all versions: equal layers are measured once, and other processes read the file.

Ranks of a job measure nothing, and read nothing: times differ from run to run, and ranks with
different regions would round differently and might order collectives differently.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..compiler.operator import Program
from ..core.children import Child
from ..core.compat.distributed import has_other_ranks, is_launched_with_others
from ..core.configs import cache, tuning
from ..core.launches import launch
from . import storing
from .encoding import NoValueError
from .graphs import value_of
from .prediction import Times
from .programs import RegionProgram

__all__ = ["Measurer", "choice", "why_not"]

command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.regions")
# The seconds for one region: the process starts, and Inductor tunes its kernels.
patience = 600.0
# By region: its times, or the reason why there are none.
_known: dict[tuple[str, ...], Times | str] = {}


def why_not() -> str:
    """Why this process measures nothing; "" if it may."""
    if not torch.cuda.is_available() or launch.interpreting():
        return "there is no GPU"
    if has_other_ranks() or is_launched_with_others():
        return "ranks of one job might choose differently"
    return ""


def choice(*, measures: bool) -> str:
    """How regions are chosen, for the key of a stored graph."""
    return f"measured with Triton {cache.triton_version()}" if measures else ""


class Measurer:
    """Measures regions; a context, at whose end the process that times them ends."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self.problem = ""  # why the process measures no more

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._drop()

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def times(
        self, program: RegionProgram, reached: Collection[fx.Node], receives: Collection[fx.Node]
    ) -> Times | str:
        """The times of a region, forward and backward; the reason if there are none.

        Args:
            program: its program.
            reached: the inputs that receive gradients.
            receives: the nodes whose gradients come from a result of the graph.
        """
        try:
            region = {
                "program": _encoded(program.program),
                "shapes": program.shapes,
                "strides": program.strides,
                "wanted": program.wanted(reached),
                "received": program.received(receives),
            }
            device: torch.device = value_of(program.inputs[0]).device
            return self._times(region, -1 if device.index is None else device.index)
        except NoValueError:
            return "it computes with sizes that are symbols, or by operators of other libraries"
        # Whatever fails, the times are predicted.
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def _times(self, region: Mapping[str, Any], index: int) -> Times | str:
        text = [json.dumps(region), tuning.device_name(index), cache.triton_version()]
        key = tuple(text)
        if key in _known:
            return _known[key]
        path = None if storing.caches_are_off() else cache.file_of("measured", text)
        times: Times | str | None = None if path is None else _read(path)
        if times is None:
            times = self.ask({"device": index, **region})
            if path is not None and not isinstance(times, str):
                _write(path, times)
        if not self.problem:
            _known[key] = times
        return times

    def ask(self, region: Mapping[str, Any]) -> Times | str:
        """The answer of the process about a region."""
        # Work of this process would slow the kernels down, and its cache would take memory.
        torch.cuda.synchronize(region["device"])
        torch.cuda.empty_cache()
        # After a problem no other region is measured.
        if not self.problem:
            reply = self._reply(json.dumps(region))
            if reply is not None:
                return reply["error"] if "error" in reply else Times(*reply["seconds"])
        return self.problem

    def _reply(self, line: str) -> dict[str, Any] | None:
        """The reply to a line; None if there is a problem."""
        if self._child is None:
            self._child = Child(command)
        try:
            reply = self._child.reply(line, patience)
        except TimeoutError as error:
            self.problem = f"the process that measures was stopped: {error}"
            self._drop()
            return None
        if reply is None:
            self.problem = f"the process that measures ended {self._child.how_it_ended()}"
        return reply


@functools.lru_cache(maxsize=4096)
def _encoded(program: Program) -> dict[str, Any]:
    """A program as JSON; equal layers have one."""
    return storing.encoded_program(program)


def _read(path: Path) -> Times | None:
    """The times in a file; None without a usable file."""
    try:
        times = Times(*json.loads(cache.opened(path.read_text())))
        is_usable = all(0 < seconds < math.inf for seconds in times)
    except Exception:  # noqa: BLE001 - whatever is wrong with a file, the region is measured again
        return None
    return times if is_usable else None


def _write(path: Path, times: Times) -> None:
    try:
        cache.replace(path, cache.sealed(json.dumps(times)))
    except OSError:  # then each process measures
        return
