"""The table of rules: which modules `fusedops.fuse_model` replaces.

Norms are recognized by what they compute, most other modules by what their forwards do
(`fusedops.models.structure`). The rules here are for the rest: PyTorch's own layers, and blocks
whose steps are spread over several modules.
"""

from ..rule import Family, Rule
from ..structure import family
from ..tricks import padding
from . import activations, bert, generation, loss, norms, t5, torch_nn

__all__ = ["LEAVES", "OPTIONAL", "RULES", "WITHIN_GRAPHS"]

# The rules in a graph, which the compile backend fuses itself.
WITHIN_GRAPHS: tuple[Rule | Family, ...] = generation.RULES
# The rules beside graphs.
LEAVES: tuple[Rule | Family, ...] = (
    *norms.RULES,
    *activations.RULES,
    *padding.RULES,
    *generation.RULES,
)
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

# The rules that an argument of `fuse_model` adds to the table, by its name.
OPTIONAL: dict[str, tuple[Rule | Family, ...]] = {"loss": loss.RULES}
