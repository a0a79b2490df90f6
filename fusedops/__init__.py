"""Fused operators for PyTorch in Triton: the functional API. The modules are in `fusedops.nn`."""

# Not in __all__: a star import must shadow neither torch.nn nor Python's compile.
from . import nn as nn
from . import quant as quant
from .activations.ops import bias_act, bias_gelu, gated_act, geglu, gelu, swiglu
from .backend.blocks import compile_blocks
from .backend.entry import compile as compile  # noqa: A004
from .backend.entry import explain
from .compiler.errors import NotRowwiseError
from .compiler.function import rowwise
from .core.configs.tuning import Tuner, register_tuner
from .core.version import __version__
from .generation.ops import no_repeat_ngram
from .losses.function import linear_rowwise
from .losses.ops import linear_cross_entropy, linear_log_probs
from .models import fuse_model, fusion_status, unfuse_model
from .norms.ops import (
    add_layer_norm,
    add_rms_norm,
    bias_dropout_add,
    bias_dropout_add_ln,
    bias_dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)
from .slices.ops import batched_layer_norm_act, batched_layer_norm_tanh

__all__ = [
    "NotRowwiseError",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "batched_layer_norm_act",
    "batched_layer_norm_tanh",
    "bias_act",
    "bias_dropout_add",
    "bias_dropout_add_ln",
    "bias_dropout_add_rms_norm",
    "bias_gelu",
    "compile_blocks",
    "explain",
    "fuse_model",
    "fusion_status",
    "gated_act",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_rowwise",
    "no_repeat_ngram",
    "rms_norm",
    "rowwise",
    "swiglu",
    "unfuse_model",
]


def _load_tuner() -> Tuner:
    from .tune.ondemand import improve

    return improve


# The tuner imports the operators, so it is registered here, and imported at its first use.
register_tuner(_load_tuner)
