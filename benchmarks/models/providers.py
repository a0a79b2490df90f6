"""The providers that are compared: the eager model, and what a user could do to it.

A provider changes one instance of a model, in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops.backend.entry import backend

from .text import Text
from .workloads import TRAINING, Workload

__all__ = [
    "COMPILING",
    "OURS",
    "PROVIDERS",
    "STARTING",
    "WITHOUT_TRICK",
    "Contender",
    "applies",
    "contender",
    "offered",
    "prepare",
]

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Contender:
    """A model that a provider has changed, and its step.

    Attributes:
        model: the model.
        context: returns the context in which the step must run. It has what a provider changes
            besides the instance.
        step: runs a whole step, asynchronously. It returns the loss, or the output of inference.
        replays: whether a step replays CUDA graphs.
    """

    model: nn.Module
    context: Context
    step: Callable[[], object]
    replays: bool = False

    def clear(self) -> None:
        """Frees the gradients."""
        self.model.zero_grad(set_to_none=True)

    @property
    def own_bytes(self) -> int:
        """The bytes of its parameters and buffers."""
        tensors = {id(t): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(tensors.values())


def contender(name: str, workload: Workload, device: torch.device, text: Text) -> Contender:
    """Returns the provider's model with its step; its batch is drawn from ``text``."""
    model = workload.build(device)
    context = prepare(name, model)
    step = _step(model, workload, workload.batch(text), device)
    return Contender(model, context, step, replays=name in _REPLAYING)


def _step(
    model: nn.Module, workload: Workload, batch: dict[str, Any], device: torch.device
) -> Callable[[], object]:
    if workload.mode in TRAINING:
        autocasts = workload.mode != "train_bf16"
        return lambda: _train(model, batch, device, autocasts=autocasts)
    if workload.mode in ("infer", "prefill"):
        return lambda: _infer(model, batch)
    if workload.mode == "decode":
        return _Decoding(model, batch, workload.sizes[-1])
    new_tokens = workload.sizes[-1]
    return lambda: _generate(model, batch, new_tokens)


def prepare(name: str, model: nn.Module) -> Context:
    """Changes the model as the provider does, and returns the context in which it runs."""
    return PROVIDERS[name](model)


def applies(name: str, workload: Workload) -> bool:
    """Returns whether a provider can run a workload. Some exist only for some models."""
    if name == "liger":
        return workload.name in _WITH_LIGER and workload.mode != "generate"
    if name in _WITH_LOSS:
        is_decoder = str(workload.model.cls).endswith("ForCausalLM")
        return is_decoder and workload.mode in (*TRAINING, "loss")
    if name in _WITH_OPERATORS:
        return hasattr(workload.model.cls, "use_operators")
    return True


def offered(workload: Workload) -> list[str]:
    """Returns the providers that are measured on a workload unless others are named.

    Autotuning takes minutes per model, so it is measured on one model only. Other choices of what a
    backward computes again have the values of the backend's own choice. CUDA graphs are
    measured on a model whose steps are bound by the host. Generation is not compiled: its cache
    grows by one token per step, and each size would be compiled. Prefill, and decoding with a static cache, are
    measured with all. A short training is not compiled, because its sizes are not those of the
    compiled steps.
    """
    if workload.mode in ("prefill", "decode"):
        return [name for name in _OF_SERVING if applies(name, workload)]
    excluded = {name for name in PROVIDERS if not applies(name, workload)} | _ON_REQUEST
    if workload.name != "llama":
        excluded.add("compile_autotune")
    if workload.name != "dlrm":
        excluded |= set(_REPLAYING)
    if workload.mode not in (*TRAINING, "infer"):
        excluded |= set(COMPILING)
    names = [name for name in PROVIDERS if name not in excluded]
    # Autotuning comes last.
    return sorted(names, key=lambda name: name == "compile_autotune")


def _train(
    model: nn.Module, batch: dict[str, Any], device: torch.device, *, autocasts: bool
) -> Tensor:
    model.zero_grad(set_to_none=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocasts):
        loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


@torch.no_grad()
def _infer(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(**batch)


def _generate(model: Any, batch: dict[str, Any], new_tokens: int) -> Any:
    return model.generate(
        **batch,
        do_sample=False,
        no_repeat_ngram_size=3,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )


class _Decoding:
    """A step that generates one token of each sequence, with a static cache.

    A step takes as long wherever in the cache the token is: attention reads all places.

    Args:
        model: the decoder.
        batch: one token of each sequence.
        places: the places of the cache. When all are in use, the cache is emptied.
    """

    def __init__(self, model: Any, batch: dict[str, Any], places: int) -> None:
        from transformers import StaticCache

        self.model, self.batch, self.places = model, batch, places
        self.cache: Any = StaticCache(model.config, max_cache_len=places)
        self.used = 0
        config, sequences = model.config, batch["input_ids"].shape[0]
        # Before the first step: a cache that is made in a compiled step is not static.
        self.cache.early_initialization(
            sequences, config.num_key_value_heads, config.head_dim, model.dtype, model.device
        )

    @torch.no_grad()
    def __call__(self) -> Tensor:
        if self.used == self.places:
            self.cache.reset()
            self.used = 0
        self.used += 1
        # By position: releases of Transformers differ in the name.
        logits: Tensor = self.model(self.batch["input_ids"], None, None, self.cache).logits
        return logits


def _eager(model: nn.Module) -> Context:
    return nullcontext


def _fused(model: nn.Module, **options: Any) -> Context:
    if not fusedops.fuse_model(model, **options):
        raise RuntimeError("fuse_model found nothing to fuse")
    return nullcontext


def _compile(model: nn.Module, **options: Any) -> Context:
    model.compile(**options)
    return nullcontext


def _operators(model: Any) -> Context:
    """Writes operators of fusedops into a model that has a form with them."""
    if not hasattr(model, "use_operators"):
        raise RuntimeError(f"{type(model).__name__} has no form with operators of fusedops")
    model.use_operators()
    return nullcontext


def _operators_compile(model: nn.Module, **options: Any) -> Context:
    _operators(model)
    return _compile(model, **options)


def _liger(model: Any) -> Context:
    """Applies Liger-Kernel's patch to an instance, with its loss of hidden states.

    The patch also sets names in the model's Python module. These are set only in the context.
    """
    from liger_kernel import transformers as liger

    module = sys.modules[type(model).__module__]
    originals = dict(vars(module))
    patch = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(model=model, fused_linear_cross_entropy=True)
    patched = {
        name: value for name, value in vars(module).items() if originals.get(name) is not value
    }
    for name in patched:
        setattr(module, name, originals[name])
    return lambda: mock.patch.multiple(module, **patched)


@dataclass(frozen=True)
class _Output:
    """The output of a model whose logits are never whole."""

    loss: Tensor


def _loss_of_hidden_states(self: Any, input_ids: Tensor, labels: Tensor) -> _Output:
    """Returns the loss of a decoder: a forward that users write around the decoder's layers."""
    hidden = self.model(input_ids=input_ids).last_hidden_state
    # As in Transformers, the last token of a sequence predicts nothing.
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    loss = fusedops.linear_cross_entropy(
        hidden,
        self.lm_head.weight,
        following,
        softcap=getattr(self.config, "final_logit_softcapping", None),
    )
    return _Output(loss)


def _with_loss(model: nn.Module, provider: Callable[[nn.Module], Context]) -> Context:
    """Makes the model one of a subclass with the loss of this package, and applies a provider."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"forward": _loss_of_hidden_states})
    return provider(model)


# Fused without one trick: the name of the trick, and the provider that has all tricks.
WITHOUT_TRICK = {
    "fused_without_one_token": ("one_token", "fused"),
}
_COMPILED: dict[str, Callable[..., Context]] = {
    "compile": _compile,
    "backend": partial(_compile, backend=backend),
    "operators_compile": _operators_compile,
}
# The same with CUDA graphs.
_REPLAYING = {
    f"{name}_reduce_overhead": partial(provider, mode="reduce-overhead")
    for name, provider in _COMPILED.items()
}
# The backend with another choice of what a backward computes again.
_OF_MEMORY: dict[str, Callable[..., Context]] = {
    f"backend_{memory}": partial(_compile, backend=backend, options={"fusedops.memory": memory})
    for memory in ("speed", "low")
}
# The same with this package's loss of hidden states, which the model calls itself.
_OF_HIDDEN_STATES: dict[str, Callable[..., Context]] = {
    "fused_loss": partial(_with_loss, provider=_fused),
    "backend_loss": partial(_with_loss, provider=_COMPILED["backend"]),
    "backend_loss_speed": partial(_with_loss, provider=_OF_MEMORY["backend_speed"]),
    "backend_loss_low": partial(_with_loss, provider=_OF_MEMORY["backend_low"]),
}
PROVIDERS: dict[str, Callable[[nn.Module], Context]] = {
    "eager": _eager,
    "fused": _fused,
    "operators": _operators,
    "liger": _liger,
    **_COMPILED,
    **_OF_MEMORY,
    **_OF_HIDDEN_STATES,
    "leaves": partial(_fused, graph=False),
    "compile_autotune": partial(_compile, mode="max-autotune-no-cudagraphs"),
    **_REPLAYING,
    **{name: partial(_fused, exclude=[trick]) for name, (trick, _) in WITHOUT_TRICK.items()},
}
COMPILING = tuple([name for name in PROVIDERS if "compile" in name or "backend" in name])
# Their first step takes many seconds: they trace graphs, or compile kernels for them.
STARTING = (*COMPILING, *[name for name in PROVIDERS if name.startswith(("fused", "leaves"))])
# A run must have rows of these providers. Rows of peers may be missing.
OURS = frozenset(
    name for name in PROVIDERS if name.startswith(("fused", "leaves", "operators", "backend"))
)
_WITH_OPERATORS = frozenset(name for name in PROVIDERS if name.startswith("operators"))
_WITH_LOSS = frozenset(_OF_HIDDEN_STATES)
# Measured only if they are named.
_ON_REQUEST = frozenset(
    {*WITHOUT_TRICK, *_OF_MEMORY, "leaves", "backend_loss_speed", "backend_loss_low"}
)
_WITH_LIGER = frozenset(("llama", "llama_1b", "llama_8b", "qwen3", "gemma2"))
_OF_SERVING = ("eager", "fused", "liger", "compile", "backend", *list(_REPLAYING)[:2])
