"""A call as PyTorch's dispatcher takes it: numbers, and one string of words.

A family's record of constants is a NamedTuple. Its fields, in their order, determine both:

    field                        word                           number
    str, Literal                 the string
    int                          its digits
    Annotated[bool, (off, on)]   one of these two words
    tuple of ints, or None       digits with commas, or "none"
    dtype, or None               its name, or "none"
    float                                                       itself
    float, or None               "given", or "eps" for None     itself, or 0

The only number that may be None is a norm's eps; None stands for the machine epsilon.

A field of any other type is not passed on: it changes nothing that an operator computes. Exported
programs contain the words and numbers, so neither they nor their order may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import torch

from ..version import __version__
from .checks import DTYPES

__all__ = ["DTYPES_BY_NAME", "NAMES", "dispatched", "encode", "name_in", "record"]

# Dtypes as operators take them: a word in a string costs less than a dtype argument. Rows of
# integers and booleans are arguments of users' row-wise functions.
_READ = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAMES: dict[torch.dtype | None, str] = {
    None: "none",
    **{d: str(d).removeprefix("torch.") for d in (*DTYPES, *_READ)},
}
DTYPES_BY_NAME = {name: dtype for dtype, name in NAMES.items()}


# ``record(NormConstants, values)`` is ``NormConstants(*values)``, for values of all fields. Every
# call of a functional builds a record, and this takes half the time: a NamedTuple's own `__new__`
# is a Python function that calls this one.
record = tuple.__new__


class _Form(NamedTuple):
    """The dispatcher's form of a field.

    Attributes:
        write: returns a value's word; None for a field without a word.
        read: returns the value from iterators of the words and the numbers that are left.
        number: whether the value is one of the numbers.
    """

    write: Callable[[Any], str] | None
    read: Callable[[Iterator[str], Iterator[float]], Any]
    number: bool = False


def _write_sizes(sizes: tuple[int, ...] | None) -> str:
    # A tracer's sizes may be symbols, of which `index` makes numbers.
    return "none" if sizes is None else ",".join([str(index(size)) for size in sizes])


def _read_sizes(words: Iterator[str], _: Iterator[float]) -> tuple[int, ...] | None:
    word = next(words)
    return None if word == "none" else tuple(map(int, word.split(",")))


def _read_number(words: Iterator[str], numbers: Iterator[float]) -> float | None:
    word, number = next(words), next(numbers)
    return None if word == "eps" else number


_STRING = _Form(str, lambda words, _: next(words))
_SIZES = _Form(_write_sizes, _read_sizes)
_FORMS: dict[Any, _Form] = {
    str: _STRING,
    int: _Form(str, lambda words, _: int(next(words))),
    float: _Form(None, lambda _, numbers: next(numbers), number=True),
    float | None: _Form(lambda value: "eps" if value is None else "given", _read_number, True),
    tuple[int, ...]: _SIZES,
    tuple[int, ...] | None: _SIZES,
    torch.dtype | None: _Form(lambda dtype: NAMES[dtype], lambda w, _: DTYPES_BY_NAME[next(w)]),
}


def _form(hint: Any) -> _Form | None:
    """Returns the form of a field with this type; None for one that is not passed on."""
    if get_origin(hint) is Literal:
        return _STRING
    if get_origin(hint) is Annotated:
        off, on = hint.__metadata__[0]
        return _Form(lambda value: on if value else off, lambda words, _: next(words) == on)
    return _FORMS.get(hint)


def dispatched(cls: Any) -> Any:
    """Adds the dispatcher's form to a NamedTuple of constants, whose first field is ``op``.

    It adds the methods ``words()`` and ``numbers()``, the static method ``read(words, numbers)``,
    and ``numbered``, the names of the numbers. The methods are built once for each class, as
    torch.compile traces the first two: it can follow a method of a NamedTuple, but warns of a
    function with a cache.
    """
    forms: dict[str, _Form] = {}
    worded: list[tuple[int, Callable[[Any], str]]] = []
    numbered: list[int] = []
    hints = get_type_hints(cls, include_extras=True)
    for i, (name, hint) in enumerate(hints.items()):
        form = _form(hint)
        if form is None:
            continue
        forms[name] = form
        if form.write is not None:
            worded.append((i, form.write))
        if form.number:
            numbered.append(i)

    def words(self: Any) -> tuple[str, ...]:
        """Returns all constants but floating-point numbers, as words without spaces."""
        return tuple([write(self[i]) for i, write in worded])

    def numbers(self: Any) -> tuple[float, ...]:
        """Returns the floating-point numbers."""
        return tuple([0.0 if self[i] is None else self[i] for i in numbered])

    def read(words: Sequence[str], numbers: Sequence[float]) -> Any:
        """Returns the record with these words and numbers."""
        left = iter(words), iter(numbers)
        return cls(**{name: form.read(*left) for name, form in forms.items()})

    cls.words, cls.numbers, cls.read = words, numbers, staticmethod(read)
    names = list(hints)
    cls.numbered = tuple([names[i] for i in numbered])
    return cls


def encode(constants: Any, dtypes: Sequence[torch.dtype | None], saves: bool) -> str:
    """Returns a call without its numbers as one string.

    It is ``<version> saves|drops <dtypes> <words>``. The version is in it because PyTorch caches
    compiled functions on disk by their constants.
    """
    names = [NAMES[dtype] for dtype in dtypes]
    mode = "saves" if saves else "drops"
    return " ".join((__version__, mode, *names, *constants.words()))


def name_in(call: str) -> str:
    """Returns the name of the functional in a call's string."""
    return next(word for word in call.split(" ")[2:] if word not in NAMES.values())
