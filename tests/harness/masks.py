"""Reads the keep masks of a call off its results.

Dropped elements are zero in the returned sum, and in the gradient of x.
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
    """The results of one forward and backward.

    Attributes:
        outputs: the outputs.
        gradients: the gradients by name.
        forward: the keep mask of the forward, read off the sum.
        backward: the keep mask of the backward, read off the gradient of x.
    """

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    forward: Tensor
    backward: Tensor


class Problem:
    """Random inputs of one operator, and options such that dropped elements are zero in results.

    There is no residual, and the sum is returned. Other elements are normally distributed in fp32
    or fp64, so that they are practically never zero.
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
            # The value or derivative of other activations may be zero without dropout.
            self.options["activation"] = "identity"
        if "return_sum" in inspect.signature(spec.call).parameters:
            self.options["return_sum"] = True
        self.absent = {"residual": None} if "residual" in spec.tensors else {}

    @property
    def rows(self) -> Tensor:
        """The tensor to which dropout is applied."""
        tensor = self.tensors[self.spec.tensors[0]]
        assert tensor is not None
        return tensor

    def drop_ones(self) -> None:
        """Fills the rows with ones, so that the returned sum is the scaled mask itself."""
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
        # Detached, because a living graph ties its leaves to the stream on which it ran, and a
        # later capture must not use that stream.
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

    A sound generator exceeds them once in two million tests. The seeds are fixed, so a test that
    passes once always passes.
    """
    return 5.0 * math.sqrt(count * probability * (1.0 - probability))
