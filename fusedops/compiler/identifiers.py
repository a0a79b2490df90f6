"""Names in generated kernels: those of functions that they import, and of the user's values."""

from __future__ import annotations

import keyword
import re

__all__ = ["HEADER", "Identifiers"]

_DEVICE = (
    "await_predecessor",
    "exponential",
    "gelu",
    "gelu_derivative",
    "gelu_tanh",
    "gelu_tanh_derivative",
    "keep_scale",
    "load_seed",
    "place_along_rows",
    "relu",
    "relu_derivative",
    "rows_of",
    "sigmoid",
    "sigmoid_derivative",
    "silu",
    "silu_derivative",
    "tanh",
    "tanh_derivative",
    "tanh_in_16_bits",
)
_OWN = (
    "block_largest",
    "block_spread",
    "block_sum",
    "div_rn",
    "existing_rows",
    "expm1",
    "fmod",
    "inside_row",
    "join_pairs",
    "largest",
    "log1p",
    "negative_zero",
    "of_ordinal",
    "ordinal",
    "power",
    "rint",
    "row_of_table",
    "rows_of_slices",
    "split_pairs",
    "sum_of_rows",
    "sums_of_slices",
    "to_e4m3",
    "to_e5m2",
    "which_exist",
    "xlogy",
)
_EXCHANGE = ("collect_sums", "post_sums", "sums_of_both")
HEADER = f"""import triton
import triton.language as tl

from fusedops.core.device import {", ".join(_DEVICE)}
from fusedops.core.exchange import {", ".join(_EXCHANGE)}
from fusedops.compiler.device import {", ".join(_OWN)}
"""
# Names that the templates of kernels use.
_RESERVED = {
    "tl",
    "triton",
    "ACC",
    "N",
    "BLOCK_K",
    "BLOCK_N",
    "ROWS",
    "VECTOR",
    "STAGES",
    "OVERLAP",
    "PERSISTENT",
    "INDEX",
    "PARTS",
    "EXACT",
    "EARLY",
    "EXCHANGE",
    "HOLDS",
    "SUMS",
    "COLUMNS",
    "WORDS",
    "TILES",
    "UNITS",
    "SLICES",
    "ALIGN",
    "TYPES",
    "M",
    "rows",
    "cols",
    "tile",
    "tiles",
    "group",
    "groups",
    "mask",
    "in_rows",
    "in_cols",
    "pairs",
    "in_pairs",
    "blocks",
    "in_blocks",
    "in_groups",
    "in_group",
    "places",
    "numbers",
    "seed",
    "offset",
    "partials",
    "program",
    "programs",
    "column",
    "partial_row",
    "start",
    "first",
    "part",
    "ahead",
    "step",
    "_",
    "float",
    "range",
    *_DEVICE,
    *_EXCHANGE,
    *_OWN,
    *keyword.kwlist,
}
# Names that the package itself gives to variables of kernels, beside the reserved ones.
_OWN_NAMES = re.compile(r"(sum|row|next|number)\d+|late_.*|slice_.*|.*_base")
_NUMBERED = re.compile(r"(.*?)(\d*)")


class Identifiers:
    """The names that a kernel uses, each once."""

    def __init__(self) -> None:
        self._used = set(_RESERVED)
        # From a name in use to a later one that may be free: those between are in use.
        self._later: dict[str, str] = {}

    def free(self, name: str) -> str:
        """Return a name that is not in use, as similar as possible."""
        name = _valid(name)
        passed = []
        while name in self._used or not name.isidentifier():
            passed.append(name)
            name = self._later.get(name) or _valid(_following(name))
        self._later.update(dict.fromkeys(passed, name))
        self._used.add(name)
        return name


def _valid(name: str) -> str:
    """Return the text changed into an identifier that is not one of the package's own.

    It may be a keyword, or in use: see `free`.
    """
    name = re.sub(r"\W", "_", name)
    if not name.isascii():
        name = "v"
    starts_well = name[:1].isalpha() or name[:1] == "_"
    if not starts_well:
        name = f"v{name}"  # no suffix makes 0_weight an identifier
    if _OWN_NAMES.fullmatch(name):
        return f"v_{name}_"
    return name


def _following(name: str) -> str:
    """Return the name with the next number: x, x2, x3."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    stem = match[1] or "v"
    number = int(match[2] or 1)
    return f"{stem}{number + 1}"
