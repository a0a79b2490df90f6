"""Models that generate: the logits processor that bans repeated n-grams, in ``generate``."""

from __future__ import annotations

from typing import Any

from ...generation import FusedNoRepeatNGramLogitsProcessor
from ..hooks import is_named
from ..rule import Rule

__all__ = ["RULES"]


def _is_blocker(processor: Any) -> bool:
    """Whether this is Transformers' own processor, and no subclass."""
    module = "transformers.generation.logits_process"
    return is_named(type(processor), module, "NoRepeatNGramLogitsProcessor")


def _get_logits_processor(self: Any, *args: Any, **kwargs: Any) -> Any:
    processors = type(self)._fusedops_original._get_logits_processor(self, *args, **kwargs)
    for index, processor in enumerate(processors):
        if _is_blocker(processor):
            processors[index] = FusedNoRepeatNGramLogitsProcessor(processor.ngram_size)
    return processors


RULES = (
    Rule(
        name="generation",
        calls="no_repeat_ngram in generate",
        methods={"_get_logits_processor": _get_logits_processor},
        base="transformers.generation.utils.GenerationMixin",
        known=("generate", "_get_logits_processor"),
    ),
)
