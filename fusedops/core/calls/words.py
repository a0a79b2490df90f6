"""Constants in a form that PyTorch's dispatcher accepts: floats, and one string of words.

A family's record of constants is a NamedTuple. Each of its fields becomes a word, a number (a float
argument), or both, in the order of the fields:

    field                        word                           number
    str, Literal                 the string
    int                          its digits
    Annotated[bool, (off, on)]   one of these two words
    tuple of ints, or None       digits with commas, or "none"
    dtype, or None               its name, or "none"
    float                                                       itself
    float, or None               "given", or "eps" for None     itself, or 0

The only number that may be None is a norm's eps; None stands for the machine epsilon.

A field of any other type is left out: it does not affect what an operator computes. Exported
programs contain the words and numbers, so neither these nor their order may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import torch

from ..version import __version__
from .checks import DTYPES

__all__ = ["DTYPES_BY_NAME", "NAMES", "dispatched", "encode", "name_in", "record"]

# Dtypes by their names. Operators take names, because a word in a string costs less than a dtype
# argument. Users' row-wise functions may also have integers, truth values and floats of 8 bits.
_READ = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
NAMES: dict[torch.dtype | None, str] = {
    None: "none",
    **{d: str(d).removeprefix("torch.") for d in (*DTYPES, *_READ)},
}
DTYPES_BY_NAME = {name: dtype for dtype, name in NAMES.items()}


# ``record(NormConstants, values)`` returns ``NormConstants(*values)``, for a value of every field.
# Every call of a functional builds a record, and ``record`` takes half the time: a NamedTuple's own
# `__new__` is a Python function that calls `tuple.__new__`.
record = tuple.__new__


class _Form(NamedTuple):
    """The conversions of a field: to a word, to a number, and back.

    Attributes:
        write: a function that returns a value's word; None for a field without a word.
        read: a function that returns the value; it takes what it needs from an iterator of words
            and one of numbers.
        number: whether the field has a number.
    """

    write: Callable[[Any], str] | None
    read: Callable[[Iterator[str], Iterator[float]], Any]
    number: bool = False


def _write_sizes(sizes: tuple[int, ...] | None) -> str:
    # A tracer's sizes may be symbolic: `index` converts them to ints.
    return "none" if sizes is None else ",".join([str(index(size)) for size in sizes])


def _read_sizes(words: Iterator[str], _: Iterator[float]) -> tuple[int, ...] | None:
    word = next(words)
    return None if word == "none" else tuple(map(int, word.split(",")))


def _write_presence(number: float | None) -> str:
    return "eps" if number is None else "given"


def _read_float_or_none(words: Iterator[str], numbers: Iterator[float]) -> float | None:
    word, number = next(words), next(numbers)
    return None if word == "eps" else number


def _read_word(words: Iterator[str], _: Iterator[float]) -> str:
    return next(words)


def _read_int(words: Iterator[str], _: Iterator[float]) -> int:
    return int(next(words))


def _read_float(_: Iterator[str], numbers: Iterator[float]) -> float:
    return next(numbers)


def _write_dtype(dtype: torch.dtype | None) -> str:
    return NAMES[dtype]


def _read_dtype(words: Iterator[str], _: Iterator[float]) -> torch.dtype | None:
    return DTYPES_BY_NAME[next(words)]


_STRING = _Form(str, _read_word)
_SIZES = _Form(_write_sizes, _read_sizes)
# The forms of fields, by their types.
_FORMS: dict[Any, _Form] = {
    str: _STRING,
    int: _Form(str, _read_int),
    float: _Form(None, _read_float, number=True),
    float | None: _Form(_write_presence, _read_float_or_none, number=True),
    tuple[int, ...]: _SIZES,
    tuple[int, ...] | None: _SIZES,
    torch.dtype | None: _Form(_write_dtype, _read_dtype),
}


def _form(hint: Any) -> _Form | None:
    """Returns the form of a field with this type; None for a field that is left out."""
    if get_origin(hint) is Literal:
        return _STRING
    if get_origin(hint) is Annotated:
        words_of_bool: tuple[str, str] = hint.__metadata__[0]
        off, on = words_of_bool

        def write(value: bool) -> str:
            return on if value else off

        def read(words: Iterator[str], _: Iterator[float]) -> bool:
            return next(words) == on

        return _Form(write, read)
    return _FORMS.get(hint)


def dispatched(cls: Any) -> Any:
    """Adds conversion methods to a NamedTuple of constants, whose first field is ``op``.

    It adds the methods ``words()`` and ``numbers()``, the static method ``read(words, numbers)``,
    and ``numbered``, the names of the fields with a number. The methods are built once for each
    class, not cached by a function: torch.compile traces the first two, and warns of a call of a
    cached function.
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
        remaining = iter(words), iter(numbers)
        return cls(**{name: form.read(*remaining) for name, form in forms.items()})

    cls.words, cls.numbers, cls.read = words, numbers, staticmethod(read)
    names = list(hints)
    cls.numbered = tuple([names[i] for i in numbered])
    return cls


def encode(constants: Any, dtypes: Sequence[torch.dtype | None], saves: bool) -> str:
    """Returns the constants of a call except its numbers, as one string.

    The string is ``<version> saves|drops <dtypes> <words>``. The version is in it because PyTorch
    caches compiled functions on disk by their constants.
    """
    names = [NAMES[dtype] for dtype in dtypes]
    mode = "saves" if saves else "drops"
    return " ".join((__version__, mode, *names, *constants.words()))


def name_in(call: str) -> str:
    """Returns the name of the functional in a call's string."""
    return next(word for word in call.split(" ")[2:] if word not in NAMES.values())
