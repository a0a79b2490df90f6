"""The table of rules: which modules `fusedops.fuse_model` knows.

Norms are known by what they compute, most other modules by what their forwards do (`fusedops.models.structure`). A rule of
its own has what is more than that: what PyTorch's own layers may do, and blocks whose steps lie in several modules.
"""

from ..rule import Family, Rule
from ..structure import family
from ..tricks import padding
from . import activations, bert, generation, norms, t5, torch_nn

__all__ = ["RULES"]

RULES: tuple[Rule | Family, ...] = (
    *norms.RULES,
    *activations.RULES,
    *bert.RULES,
    *t5.RULES,
    *torch_nn.RULES,
    *padding.RULES,
    *generation.RULES,
    family((*norms.RULES, *activations.RULES)),
)
