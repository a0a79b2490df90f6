"""Helpers of the tests of `fusedops.fuse_model`: sample models, runs, and counts of operators.

The sample models are those that the installed packages can build.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from sample_models import MODELS, ModelSpec
from support import DEVICE, INTERPRETED

__all__ = [
    "HAS_TRANSFORMERS",
    "SAMPLES",
    "Counting",
    "build",
    "counted",
    "every",
    "inputs",
    "observed",
    "outputs",
    "run",
    "transformers_only",
    "undropped",
    "without_dropout",
]

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
_PRESENT = [spec for spec in MODELS if HAS_TRANSFORMERS or not spec.transformers]
# The interpreter takes seconds for a model, so it runs one model for each kind of block.
_INTERPRETED = {
    "leaves",
    "activations",
    "torch_pre_norm",
    "bert",
    "distilbert",
    "gpt2",
    "vit",
    "t5_gated",
    "llama",
}
SAMPLES = [spec for spec in _PRESENT if not INTERPRETED or spec.name in _INTERPRETED]

# The operators that rules call.
_OPERATORS = (
    "bias_act",
    "gelu",
    "layer_norm",
    "rms_norm",
)

every = pytest.mark.parametrize("spec", SAMPLES, ids=lambda spec: spec.name)
transformers_only = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="Transformers is not installed")


def handed_on(output: Any) -> dict[str, Any]:
    """Returns the cache in a model's output as an argument of its next call.

    From Transformers 5.24 on, output and argument are called ``cache``.
    """
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


def build(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Builds the model, with the same weights at each call, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return spec.build().to(DEVICE, dtype).eval()


def undropped(spec: ModelSpec) -> nn.Module:
    """Builds the model in training mode, with dropout probabilities of zero."""
    return without_dropout(build(spec))


def without_dropout(model: nn.Module) -> nn.Module:
    """Puts the model in training mode, with dropout probabilities of zero.

    A stack that may drop whole layers is put in evaluation mode, but its layers are not. In
    training, Transformers 5.17 draws a number for each layer, even at a probability of zero, and
    compares it in Python, which breaks a graph.
    """
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "layerdrop"):
            module.training = False
        # Some modules read their config at each call.
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)
    return model


def inputs(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The model's inputs on the device, floating-point ones in ``dtype``."""
    results = {}
    for name, value in spec.inputs().items():
        if isinstance(value, Tensor):
            value = value.to(DEVICE, dtype if value.is_floating_point() else None)
        results[name] = value
    return results


def outputs(value: Any) -> list[Tensor]:
    """The floating-point tensors in a model's result, without those in caches."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    values: Iterable[Any] = ()
    if isinstance(value, Mapping):
        values = value.values()
    elif isinstance(value, (tuple, list)):
        values = value
    return [tensor for inner in values for tensor in outputs(inner)]


def run(
    model: nn.Module, arguments: dict[str, Any], seed: int = 0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the outputs, and the gradients of a random sum of them, by parameter."""
    torch.manual_seed(seed)
    results = outputs(model(**arguments))
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results
    ]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = sum((y * w).sum().double() for y, w in zip(results, weights, strict=True))
    result = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(parameters, result, strict=True) if g is not None}
    return [y.detach().clone() for y in results], gradients


class Counting(TorchDispatchMode):
    """Counts the operators for which ``counts(operator, keyword_arguments)`` is true."""

    def __init__(self, counts: Callable[[Any, dict[str, Any]], bool]) -> None:
        super().__init__()
        self._counts = counts
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += self._counts(func, kwargs)
        return func(*args, **kwargs)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts, within this context, how often the rules call each operator."""
    calls: Counter[str] = Counter()

    def count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name] += 1

    with observed(count):
        yield calls


@contextmanager
def observed(observe: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Within this context, ``observe(name, args, kwargs)`` runs before a rule calls an operator."""

    def observing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            observe(name, args, kwargs)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in [m for name, m in sys.modules.items() if name.startswith("fusedops.models.")]:
            for name in _OPERATORS:
                if vars(module).get(name) is getattr(fusedops, name):
                    patch.setattr(module, name, observing(name, getattr(fusedops, name)))
        yield
