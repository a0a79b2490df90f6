"""The tables of rules: which modules `fusedops.fuse_model` replaces.

A graph has the operators of norms and activations in its regions. The rules are for modules that
run beside a graph, and for what no graph does.
"""

from ..rule import Family, Rule
from . import activations, generation, loss, norms, one_token, padding

__all__ = ["LEAVES", "OPTIONAL", "OTHERS", "RULES"]

# Modules that one operator computes.
LEAVES: tuple[Rule | Family, ...] = (*norms.RULES, *activations.RULES)
# What no graph does, or not for the tokens of a generation.
OTHERS: tuple[Rule | Family, ...] = (*one_token.RULES, *generation.RULES)
RULES: tuple[Rule | Family, ...] = (*LEAVES, *OTHERS, *padding.RULES)

# The rules that an argument of `fuse_model` adds to the table, by its name.
OPTIONAL: dict[str, tuple[Rule | Family, ...]] = {"loss": loss.RULES}
