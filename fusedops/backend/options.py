"""The options of `fusedops.compile`: those of this backend, and those of Inductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fx import check_of_inductor

__all__ = ["CHOICES", "EAGER", "INDUCTOR", "Options", "check_options", "options_of", "with_rest"]

# What runs the part of a graph that is in no region.
INDUCTOR, EAGER = "inductor", "eager"
_RESTS = (INDUCTOR, EAGER)
# Inductor's option of the modes in which regions are measured: see `measuring`.
_MEASURING = "max_autotune"
_MEASURING_MODES = ("max-autotune", "max-autotune-no-cudagraphs")
# By the value of the option of memory, the bytes that a backward may move for each byte that is not
# saved. The planner of regions, too, counts a byte that is saved as one that is moved.
CHOICES: Mapping[str, float] = {"speed": 0.0, "auto": 1.0, "low": 3.0}
# The options that are this backend's own, and what the name of another would begin with.
_MEMORY, _REST, _PREFIX = "fusedops.memory", "fusedops.rest", "fusedops."


@dataclass(frozen=True)
class Options:
    """The options of one compilation.

    Attributes:
        memory: a key of `CHOICES`.
        rest: what runs the part of a graph that is in no region, `INDUCTOR` or `EAGER`.
        measures: whether regions are to be measured.
        of_inductor: Inductor's options; None if there are none.
    """

    memory: str
    rest: str
    measures: bool
    of_inductor: dict[str, Any] | None


def options_of(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """The options that a user passes.

    Raises:
        ValueError: an option of this backend is wrong, or excludes another or the mode.
    """
    of_inductor = dict(options or {})
    memory = _choice(of_inductor, _MEMORY, "auto", tuple(CHOICES))
    rest = _choice(of_inductor, _REST, INDUCTOR, _RESTS)
    for name in of_inductor:
        if _PREFIX + name in (_MEMORY, _REST):
            raise ValueError(f"compile: the option {name!r} is written {_PREFIX + name!r}")
    for name in filter(_is_own, of_inductor):
        raise ValueError(f"compile: no option {name!r}; this backend has {_MEMORY!r} and {_REST!r}")
    if rest == EAGER:
        _check_of_eager(memory, mode, of_inductor)
    measures = mode in _MEASURING_MODES or of_inductor.get(_MEASURING) is True
    return Options(memory, rest, measures, of_inductor or None)


def _is_own(name: str) -> bool:
    return name.startswith(_PREFIX)


def _choice(options: dict[str, Any], name: str, default: str, words: Sequence[str]) -> str:
    """Removes one of this backend's options, and returns its value after a check."""
    value = options.pop(name, default)
    # Not a set: the value of a wrong type may have no hash.
    if value not in words:
        listed = ", ".join(map(repr, words))
        raise ValueError(f"compile: option {name!r} must be one of {listed}, got {value!r}")
    return str(value)


def _check_of_eager(memory: str, mode: str | None, of_inductor: Mapping[str, Any]) -> None:
    """Raises for what only Inductor can follow."""
    refused = list(of_inductor)
    if mode not in (None, "default"):
        refused.append(f"mode={mode!r}")
    # Only where forward and backward are one graph can a backward compute results again.
    if memory != "auto":
        refused.append(f"{_MEMORY}={memory!r}")
    if refused:
        raise ValueError(
            f"compile: with rest='eager' PyTorch's eager operators run the rest of a graph, and "
            f"Inductor's settings do not apply: {', '.join(refused)}"
        )


def check_options(caller: str, mode: str | None, options: Any) -> None:
    """Raises an error, as `compile` documents it, for a mode or options that are wrong."""
    _check_mapping(caller, options)
    check_of_inductor(mode, options_of(options, mode).of_inductor)


def _check_mapping(caller: str, options: Any) -> None:
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(
            f"{caller}: options must be a mapping of Inductor's options, "
            f"got {type(options).__name__}"
        )


def with_rest(caller: str, options: Any, mode: str | None, rest: str) -> tuple[Any, str | None]:
    """Options with ``rest`` as one of them, and the mode, as `torch.compile` accepts both.

    Raises:
        ValueError: ``rest`` is no such word, or the options have another one.
    """
    if rest not in _RESTS:
        listed = ", ".join(map(repr, _RESTS))
        raise ValueError(f"{caller}: rest must be one of {listed}, got {rest!r}")
    if rest == INDUCTOR:
        return options, mode
    _check_mapping(caller, options)
    named = {_REST: rest, **(options or {})}
    if named[_REST] != rest:
        raise ValueError(f"{caller}: rest={rest!r}, but option {_REST!r} is {named[_REST]!r}")
    # With options `torch.compile` refuses any mode, also its default.
    return named, {"default": None}.get(str(mode), mode)
