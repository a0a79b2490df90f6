"""Generation: blocking of repeated n-grams, as a functional and as a logits processor."""

from .modules import FusedNoRepeatNGramLogitsProcessor
from .ops import no_repeat_ngram

__all__ = ["FusedNoRepeatNGramLogitsProcessor", "no_repeat_ngram"]
