"""Some hundreds of small architectures: of Transformers, timm, PyTorch, and written by hand.

`names` lists those that run with the installed packages, and `make` returns one. Neither needs a
network. The models have random weights, and are built within a second.

`left.txt` lists the model types of Transformers that are left out, with the reason.
``python tests/harness/architectures`` tries all of them, and with ``--write`` it writes that list.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import candidates
from .tiny import tiny_config
from .written import WRITTEN

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # some configurations load another from the hub

try:
    from transformers.utils import logging as _logging
except ImportError:
    _logging = None

__all__ = [
    "LEFT",
    "Architecture",
    "left",
    "make",
    "names",
    "outputs",
    "quiet",
    "transformers_types",
]

LEFT = Path(__file__).with_name("left.txt")
# Models of timm, if it is installed: a plain transformer, a convolutional model, two transformers
# with relative or rotary positions, and a mixer.
_TIMM = {
    "timm/vit": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
    ),
    "timm/convnext": ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    "timm/beit": (
        "beit_base_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
    ),
    "timm/mixer": ("mixer_s16_224", {"img_size": 32, "embed_dim": 32, "num_blocks": 2}),
    "timm/eva": (
        "eva02_tiny_patch14_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
    ),
}


@dataclass(frozen=True)
class Architecture:
    """A model and inputs for it.

    Attributes:
        name: the name in `names`.
        create: returns a new model.
        inputs_of: returns inputs for a model.
    """

    name: str
    create: Callable[[], nn.Module]
    inputs_of: Callable[[nn.Module], dict[str, Any]]

    def build(self) -> nn.Module:
        """Builds the model, with the same weights at each call, in evaluation mode."""
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(11)
            return self.create().eval()

    def inputs(self, model: nn.Module) -> dict[str, Any]:
        """Keyword arguments for a call of the model, the same each time."""
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.inputs_of(model).items()
        }


def names() -> list[str]:
    """The names of the architectures that run with the installed packages."""
    has_timm = all(importlib.util.find_spec(name) is not None for name in ("timm", "torchvision"))
    omitted = left()
    return [
        *WRITTEN,
        *(_TIMM if has_timm else ()),
        *(name for name in transformers_types() if name not in omitted),
    ]


def left() -> dict[str, str]:
    """The model types that are left out, with the reason."""
    lines = LEFT.read_text(encoding="utf-8").splitlines() if LEFT.exists() else []
    return dict(line.split("\t", 1) for line in lines)


def transformers_types() -> list[str]:
    """All model types of the installed Transformers that have a bare model."""
    if importlib.util.find_spec("transformers") is None:
        return []
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def make(name: str) -> Architecture:
    """Returns the architecture of a name."""
    if name in WRITTEN:
        create, make_input = WRITTEN[name]

        def inputs_of(model: nn.Module) -> dict[str, Any]:
            (parameter, *_) = inspect.signature(model.forward).parameters
            return {parameter: make_input()}

        return Architecture(name, create, inputs_of)
    if name in _TIMM:
        return Architecture(
            name,
            lambda: _timm(name),
            lambda _: {"x": torch.randn(2, 3, 32, 32, generator=_seeded())},
        )
    return Architecture(name, lambda: _build(name), lambda model: _inputs(name, model))


def outputs(value: Any) -> list[Tensor]:
    """The floating-point tensors in a result, without those in caches."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    values: Iterable[Any] = ()
    if isinstance(value, dict):
        values = value.values()
    elif isinstance(value, (tuple, list)):
        values = value
    return [tensor for inner in values for tensor in outputs(inner)]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings and Transformers' messages, which are mostly about configurations."""
    verbosity = _logging.get_verbosity() if _logging is not None else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if _logging is not None:
            _logging.set_verbosity(50)
        try:
            yield
        finally:
            if _logging is not None:
                _logging.set_verbosity(verbosity)


def _timm(name: str) -> nn.Module:
    import timm

    model, arguments = _TIMM[name]
    return timm.create_model(model, pretrained=False, num_classes=8, **arguments)


def _build(name: str) -> nn.Module:
    """Builds the model with a language head, if there is one that can be built, or the bare one."""
    classes = _classes(name)
    for cls in classes[:-1]:
        try:
            return cls(_config(name))
        except AttributeError:  # noqa: PERF203, the configuration lacks a part for the head
            continue
    return classes[-1](_config(name))


def _config(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with quiet():
        return tiny_config(name, CONFIG_MAPPING[name])


def _classes(name: str) -> list[Any]:
    """The classes to try for a model type; the last is the bare model."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]
    order = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    if name not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        order.append(auto.MODEL_FOR_CAUSAL_LM_MAPPING)
    results = [
        mapping[config]
        for mapping in (*order, auto.MODEL_MAPPING)
        if name in mapping._model_mapping
    ]
    return [cls[0] if isinstance(cls, (list, tuple)) else cls for cls in results]


@cache
def _choice(name: str) -> int:
    """The index of the first candidate of inputs with which the model runs."""
    model = make(name).build()
    errors: list[Exception] = []
    for index, arguments in enumerate(candidates(model)):
        try:
            with torch.no_grad(), quiet():
                result = outputs(model(**arguments))
        except Exception as error:  # noqa: BLE001, a model may raise any error for wrong inputs
            errors.append(error)
            continue
        if result and all(x.numel() for x in result):
            return index
    raise errors[0] if errors else LookupError("no candidate of inputs fits")


def _inputs(name: str, model: nn.Module) -> dict[str, Any]:
    chosen = _choice(name)
    return next(arguments for index, arguments in enumerate(candidates(model)) if index == chosen)
