"""The table of rules: which modules `fusedops.fuse_model` knows. Adding one is an entry here and a model in the spec."""

from . import activations, attentions, generation, linears, mlps, norms, post_norm, pre_norm, t5, t5_attention, torch_nn

__all__ = ["RULES"]

RULES = (
    *norms.RULES,
    *activations.RULES,
    *mlps.RULES,
    *attentions.RULES,
    *post_norm.RULES,
    *pre_norm.RULES,
    *t5.RULES,
    *t5_attention.RULES,
    *torch_nn.RULES,
    *linears.RULES,
    *generation.RULES,
)
