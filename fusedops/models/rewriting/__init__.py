"""Rewrites forwards: joins steps that one operator computes together. See `statements`."""

from .compiling import compiled, readable, rewrapped
from .conditions import conditions
from .expressions import Step
from .reading import WRITES, Kinds, called_paths, rows_of
from .statements import Rewritten, rewrite
from .trees import PREFIX, attributes_tested, attributes_written, self_name_of

__all__ = [
    "PREFIX",
    "WRITES",
    "Kinds",
    "Rewritten",
    "Step",
    "attributes_tested",
    "attributes_written",
    "called_paths",
    "compiled",
    "conditions",
    "readable",
    "rewrapped",
    "rewrite",
    "rows_of",
    "self_name_of",
]
