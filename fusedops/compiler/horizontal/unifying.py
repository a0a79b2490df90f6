"""One kernel for slices of several lengths, from the kernels of each length.

The functions of two slices are the same function if their sources differ in numbers alone. Where
they differ, the kernel reads a *number of the slice*, such as the 1/N of a mean::

    length 128    v2 = 0.0078125 * v1
    length 96     v2 = 0.010416666666666666 * v1
    of both       v2 = number0 * v1               number0: 0.0078125, 0.010416666666666666
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..kernel import Kernel

__all__ = ["outline", "unified"]

# A number, but not the digits of a name, of an attribute, or of another number.
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w.])")


def outline(source: str) -> str:
    """Return a source without its numbers: that of sources which may be unified."""
    return _NUMBER.sub("0", source)


def unified(kernels: Sequence[Kernel]) -> tuple[Kernel, list[tuple[Any, ...]]]:
    """Return the kernel of all lengths, and its numbers of slices: one of each for each kernel.

    Its function has these numbers as further arguments, ``number0`` and so on, before the others.

    Raises:
        ValueError: the sources differ in more than numbers.
    """
    sources = [kernel.source for kernel in kernels]
    first = kernels[0]
    if len(set(map(outline, sources))) > 1:
        raise ValueError(f"the kernels of {len(kernels)} lengths differ")
    columns: dict[tuple[Any, ...], str] = {}
    texts = zip(*map(_NUMBER.findall, sources), strict=True)
    replacements = []
    for texts_of_number in texts:
        text = texts_of_number[0]
        if len(set(texts_of_number)) > 1:
            values = tuple(map(ast.literal_eval, texts_of_number))
            if any(isinstance(value, float) for value in values):
                values = tuple(map(float, values))
            text = columns.setdefault(values, f"number{len(columns)}")
        replacements.append(text)
    remaining = iter(replacements)
    source = _NUMBER.sub(lambda _: next(remaining), sources[0])
    parameters = "".join([f"    {name},\n" for name in columns.values()])
    head = f"def {first.name}(\n"
    source = source.replace(head, f"{head}{parameters}", 1)
    return replace(first, source=source), list(columns)
