"""The regions of a model as functions of tensors, as `fusedops.compile` finds them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

import fusedops
from fusedops.backend.graphs import is_tensor, value_of
from fusedops.backend.passes import fusion
from fusedops.backend.prediction import Works, works
from fusedops.backend.programs import function_of, source_of
from fusedops.backend.regions import Region
from fusedops.backend.report import RegionReport
from fusedops.backend.selection import AS_FAST, Selector

from ..models.providers import contender
from ..models.text import Text
from ..models.workloads import Workload as ModelWorkload

__all__ = ["Input", "Workload", "regions_of"]


@dataclass(frozen=True)
class Input:
    """A tensor of a region: its metadata, and whether it has a gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def tensor(self, device: torch.device) -> Tensor:
        """Returns a random tensor."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point:
            tensor.normal_()
        else:
            tensor.zero_()  # indices and masks
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Workload:
    """A kind of region.

    Attributes:
        operators: its operators.
        key: a digest, the same for the same function of the same tensors.
        count: how often the model has it.
        reason: why it was left to Inductor; "" if it is an operator.
        graph: its function of tensors.
        inputs: the tensors.
        device: their device.
        shape: the shape of its largest output.
    """

    operators: str
    key: str
    count: int
    reason: str
    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    device: torch.device
    shape: tuple[int, ...]

    @property
    def shape_name(self) -> str:
        """The shape's name in the results file."""
        return "x".join(map(str, self.shape))

    @property
    def dtype_name(self) -> str:
        """The dtypes of the inputs, each once."""
        names = [str(item.dtype).removeprefix("torch.") for item in self.inputs]
        return "+".join(dict.fromkeys(names))

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns random tensors for a call."""
        return tuple([item.tensor(device) for item in self.inputs])

    def works(self, *, has_backward: bool) -> Works:
        """Returns what the region takes both ways."""
        tensors = self.tensors(torch.device("meta"))
        program = source_of(self.graph, tensors).program
        return works(
            program,
            tuple([item.shape for item in self.inputs]),
            tuple([item.strides for item in self.inputs]),
            tuple([item.requires_grad and has_backward for item in self.inputs]),
            (True,) * program.count,
        )


def regions_of(workload: ModelWorkload, device: torch.device) -> list[Workload]:
    """Returns the kinds of regions of a model, with their numbers."""
    is_training = workload.mode == "train"
    model = contender("eager", workload, device, Text(device)).model
    batch = workload.batch(Text(device))
    kinds: dict[str, Workload] = {}
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_training)
    with _collecting(is_training) as found, torch.set_grad_enabled(is_training), autocast:
        fusedops.explain(model, **batch)
    for region in found:
        if region.reason not in ("", AS_FAST):  # no operator
            continue
        known = kinds.get(region.key, replace(region, count=0))
        kinds[region.key] = replace(known, count=known.count + 1)
    return list(kinds.values())


@contextmanager
def _collecting(is_training: bool) -> Iterator[list[Workload]]:
    """Collects the regions of the graphs that are captured in the context."""
    found: list[Workload] = []

    class Collector(Selector):
        """Selects as usual, and notes each region while its nodes are in the graph."""

        def select(self) -> None:
            self.noted: dict[int, Workload] = {}
            super().select()
            found.extend(self.noted.values())

        def _report(self, region: Region, report: RegionReport) -> int:
            place = super()._report(region, report)
            self.noted[place] = _workload(region, report, self.needs if is_training else ())
            return place

    with mock.patch.object(fusion, "Selector", Collector):
        yield found


def _workload(region: Region, report: RegionReport, needs: Collection[fx.Node]) -> Workload:
    graph = function_of(region)
    tensors = list(filter(is_tensor, region.inputs))
    inputs = tuple([_input(value_of(node), node in needs) for node in tensors])
    return Workload(
        operators="+".join(report.operators),
        key=hashlib.sha256(f"{graph.code} {inputs}".encode()).hexdigest()[:8],
        count=1,
        reason=report.reason,
        graph=graph,
        inputs=inputs,
        device=value_of(tensors[0]).device,
        shape=report.shape,
    )


def _input(value: Any, requires_grad: bool) -> Input:
    return Input(tuple(value.shape), tuple(value.stride()), value.dtype, requires_grad)
