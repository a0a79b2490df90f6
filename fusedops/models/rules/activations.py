"""Activation modules: torch.nn's GELU, and those of Transformers, which take several kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ...activations.ops import Approximate, bias_act, gelu
from ...core.activations import ActivationName
from ..rule import Rule

__all__ = ["RULES"]

_APPROXIMATE: dict[str, Approximate] = {"gelu": "none", "gelu_tanh": "tanh"}


def _gelu(self: Any, input: Tensor) -> Tensor:
    return gelu(input, self.approximate)


def _named(activation: ActivationName) -> dict[str, Callable[..., Any]]:
    """The methods of a module that is one activation and nothing else."""

    def forward(self: Any, input: Tensor) -> Tensor:
        approximate = _APPROXIMATE.get(activation)
        if approximate is None:
            return bias_act(input, None, activation)
        return gelu(input, approximate)

    return {"forward": forward}


def _calls_gelu(approximate: str, method: str) -> Callable[[nn.Module], str]:
    """Build a `Rule.fits`: ``module.act`` must be PyTorch's GELU or the module's own ``method``.

    The constructors of Transformers' GELUs assign one of these; a user may have assigned another.
    """

    def fits(module: nn.Module) -> str:
        act: Any = getattr(module, "act", None)
        options = {}
        if isinstance(act, functools.partial):
            act, options = act.func, act.keywords
        if act is F.gelu and options.get("approximate", "none") == approximate:
            return ""
        # Each access to a method makes a new bound method, of the same function.
        function = getattr(act, "__func__", None)
        if function is not None and function is getattr(type(module), method, None):
            return ""
        return "its act is not a GELU"

    return fits


_CALLS = {"gelu": "gelu", "gelu_tanh": "gelu, tanh"}


def _rule(name: str, activation: ActivationName, *fingerprints: str, **options: Any) -> Rule:
    """The rule for classes of Transformers that are this activation."""
    calls = _CALLS.get(activation, f"bias_act, {activation}")
    return Rule(
        name=name, calls=calls, methods=_named(activation), fingerprints=fingerprints, **options
    )


RULES = (
    Rule(
        name="gelu",
        calls="gelu",
        methods={"forward": _gelu},
        base=nn.GELU,
    ),
    _rule(
        "gelu_activation",
        "gelu",
        "16ab37a0cb65",
        names=("GELUActivation",),
        known=("forward", "_gelu_python"),
        fits=_calls_gelu("none", "_gelu_python"),
    ),
    _rule(
        "gelu_tanh",
        "gelu_tanh",
        "15c95ccfbf96",
        names=("GELUTanh", "PytorchGELUTanh"),
        known=("forward", "_gelu_tanh_python"),
        fits=_calls_gelu("tanh", "_gelu_tanh_python"),
    ),
    _rule(
        "new_gelu",
        "gelu_tanh",
        "7ec693e91a18",
        "43a2727fd0c0",
        names=("NewGELUActivation", "FastGELUActivation"),
    ),
    _rule(
        "accurate_gelu",
        "gelu_tanh",
        "8883550bde4d",
        names=("AccurateGELUActivation",),
        known=("__init__", "forward"),
    ),
    _rule("quick_gelu", "quick_gelu", "0f9db460620f", names=("QuickGELUActivation",)),
    _rule("relu_squared", "relu_squared", "0718ab36107d", names=("ReLUSquaredActivation",)),
)
