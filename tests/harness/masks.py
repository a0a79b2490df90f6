"""The keep mask of a call, read off its values.

What was dropped is zero, in the sum and in x's gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.core.spec import Spec
from support import ALL_SPECS, as_tuple, random_like

__all__ = ["DROPOUT_SPECS", "Problem", "Run", "five_sigma", "rng_state", "set_rng_state"]

DROPOUT_SPECS = [spec for spec in ALL_SPECS if spec.has_dropout]


class Run(NamedTuple):
    """One forward and backward: outputs, gradients by name, and the keep mask as each of the two passes saw it."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    forward: Tensor
    backward: Tensor


class Problem:
    """Random inputs of one operator in which a dropped element shows.

    No residual, and the sum is returned.

    Normal numbers of fp32 or wider are zero with a probability that no test meets.
    """

    def __init__(
        self,
        spec: Spec,
        rows: int,
        cols: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        sample = spec.benchmark((rows, cols), dtype, device)
        self.spec = spec
        self.tensors = {
            name: tensor for name, tensor in sample.tensors.items() if name != "residual"
        }
        for tensor in self.tensors.values():
            if tensor is not None:
                tensor.requires_grad_()
        self.options = dict(sample.options)
        if "activation" in self.options:
            self.options["activation"] = (
                "identity"  # another may be zero by itself, in value or in derivative
            )
        if "return_sum" in inspect.signature(spec.call).parameters:
            self.options["return_sum"] = True
        self.absent = {"residual": None} if "residual" in spec.tensors else {}

    @property
    def rows(self) -> Tensor:
        """The tensor that dropout acts on."""
        tensor = self.tensors[self.spec.tensors[0]]
        assert tensor is not None
        return tensor

    def drop_ones(self) -> None:
        """Makes dropout act on ones: the returned sum is then the scaled mask itself."""
        with torch.no_grad():
            self.rows.fill_(1.0)
            bias = self.tensors.get("bias")
            if bias is not None:
                bias.zero_()

    def forward(
        self, p: float, call: Callable[..., Any] | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        call = call or self.spec.call
        return as_tuple(call(**self.tensors, **self.absent, **{**self.options, "p": p, **options}))

    def run(self, p: float, call: Callable[..., Any] | None = None, **options: Any) -> Run:
        outputs = self.forward(p, call, **options)
        names = [name for name, tensor in self.tensors.items() if tensor is not None]
        grads = torch.autograd.grad(
            outputs, [self.tensors[name] for name in names], random_like(outputs)
        )
        gradients = dict(zip(names, grads, strict=True))
        # Detached: a graph kept alive ties its leaves to the stream it ran on, which a later
        # capture may not touch.
        outputs = tuple(output.detach() for output in outputs)
        return Run(outputs, gradients, outputs[-1] != 0.0, gradients[self.spec.tensors[0]] != 0.0)


def rng_state(device: torch.device) -> Tensor:
    """The state of the generator that dropout on ``device`` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def five_sigma(count: int, probability: float) -> float:
    """Five standard deviations of the number of successes in ``count`` independent trials.

    A sound generator leaves that band once in two million tests; the seeds are fixed, so a test
    that passes stays so.
    """
    return 5.0 * math.sqrt(count * probability * (1.0 - probability))
