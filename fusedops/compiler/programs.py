"""Which program a call of a function runs: one that was traced for such tensors, one from disk, or a new one."""

from __future__ import annotations

import inspect
import linecache
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..core import compat
from . import storing
from .axes import Label
from .effects import check_effects
from .errors import NotRowwiseError
from .looking import Look
from .operator import Program, dynamic_axes
from .planning import planned
from .state import Looks, plain_state
from .structure import Operand, Structure, structured
from .surroundings import PLAIN
from .tracing import Traced, trace

__all__ = ["Found", "Programs"]

# Sizes of rows in further runs: small ones, and far above what a function may compare them with.
_FEW, _MANY = 40, 100_000
# No tensor may have many more elements: its bytes are a number of 63 bits.
_ELEMENTS = 2**58


@dataclass(frozen=True)
class _Call:
    """A call to be traced: its arguments, the state with the tensors in it, and the file of such calls."""

    args: Sequence[Any]
    look: Look
    around: Sequence[Tensor]
    path: Path | None


@dataclass(frozen=True)
class Found:
    """A program, with the tensors that the function uses beside its arguments: places in the state."""

    program: Program
    captured: tuple[int, ...]


class Programs:
    """The programs of a function.

    Args:
        function: the user's.
        name: for messages.
        names: of its parameters.
        run: calls it with all arguments by place.
    """

    def __init__(self, function: FunctionType, name: str, names: Sequence[str], run: Callable[..., Any]) -> None:
        self.function, self.name, self.names, self.run = function, name, names, run
        self.known: dict[Any, list[Found]] = {}
        self.refused: dict[Any, str] = {}
        self._looks: dict[tuple[int, ...], Looks] = {}

    def looks(self, args: Sequence[Any]) -> Looks:
        """Those at the state of a call like this: around the function, and of arguments that are objects."""
        objects = tuple([place for place, a in enumerate(args) if not isinstance(a, (Tensor, *PLAIN))])
        found = self._looks.get(objects)
        if found is None:
            found = self._looks[objects] = Looks(self.function, self.names, objects)
        return found

    def find(self, args: Sequence[Any], autocast: Any) -> Found:
        """The program for a call.

        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        look, state, around = self.looks(args).at(args)
        if look.reason:
            raise NotRowwiseError(f"{self.name}: {look.reason}")
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not tensors:
            within = [f"{name} is a {type(a).__name__} of tensors; pass them one by one"
                      for name, a in zip(self.names, args, strict=True)
                      if isinstance(a, (tuple, list)) and any(isinstance(one, Tensor) for one in a)]  # fmt: skip
            raise NotRowwiseError(f"{self.name}: {'; '.join(within) or 'none of its arguments is a tensor'}")
        numbers = tuple([None if isinstance(a, Tensor) else plain_state(a) for a in args])
        key = (numbers, state, autocast, torch.get_default_dtype(), tensors[0].device.type)
        alike = (key, *[(t.dtype, t.layout, t.dim(), compat.hints(t.shape[1:])) for t in tensors])
        if alike in self.refused:
            raise NotRowwiseError(self.refused[alike])
        known = self.known.setdefault(key, [])
        for found in known:
            if found.program.fits([*tensors, *[around[place] for place in found.captured]]):
                return found
        call = _Call(args, look, around, self._path(look, key))
        try:
            with compat.without_transforms(), compat.without_modes():
                made = self._stored(call, tensors) or self._traced(call)
        except NotRowwiseError as error:
            self.refused[alike] = str(error)  # an error would keep the tensors of its frames
            raise
        if not made.program.fits([*tensors, *[around[place] for place in made.captured]]):
            raise NotRowwiseError(f"{self.name}: it was traced for tensors of other shapes")
        known.append(made)
        return made

    def _path(self, look: Look, key: Any) -> Path | None:
        """The file of such calls."""
        numbers, (_, *state), *others = key
        return storing.stored_at(look, numbers, state, *others)

    def _stored(self, call: _Call, tensors: Sequence[Tensor]) -> Found | None:
        for structure in [] if call.path is None else storing.read(call.path):
            if len(structure.inputs) != len(tensors):
                continue
            try:
                program = self._program(structure)
                if program.fits(tensors):
                    return Found(program, ())
            except Exception:  # noqa: BLE001 - of a file that says something else than a function: it is traced
                continue
        return None

    def _traced(self, call: _Call) -> Found:
        try:
            traced, structure = self._structure(call)
        except NotRowwiseError:
            raise
        except Exception as error:
            self.run(*call.args)  # what is wrong with the call is said in PyTorch's words
            raise NotRowwiseError(f"{self.name}: it cannot be traced: {error}{self._where(error)}") from error
        if call.path is not None and not traced.captured:
            storing.write(call.path, structure)
        return Found(self._program(structure), tuple(traced.captured))

    def _where(self, error: Exception) -> str:
        """The function's line in which something was raised."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        if code is None or not lines:
            return ""
        text = linecache.getline(code.co_filename, lines[-1]).strip()
        return f"\n  line {lines[-1]} of {code.co_filename}: {text}"

    def _structure(self, call: _Call) -> tuple[Traced, Structure]:
        """The structure of the function, which is the same for other numbers of rows."""
        for code in call.look.codes:
            check_effects(code, self.name)
        shapes = [compat.hints(a.shape) for a in call.args if isinstance(a, Tensor)]
        traced, structure = self._of_any_rows(call, shapes)
        return traced, replace(structure, loose=self._loose(call, structure))

    def _of_any_rows(self, call: _Call, shapes: Sequence[tuple[int, ...]]) -> tuple[Traced, Structure]:
        """The structure for these shapes; where a dimension of rows is one, that of more rows, if it serves one."""
        ones = _of_one(shapes)
        while ones:
            try:
                traced, structure = self._at(call, _larger(shapes, ones))
            except Exception:  # noqa: BLE001 - tensors of one row fit together where those of more do not
                break
            constant = {place for place in ones if not _is_dynamic(structure, place)}
            if constant:
                ones = ones - constant
                continue
            structure, why = self._settled(call, structure)
            if not why:
                return traced, structure
            break
        traced, structure = self._at(call, shapes)
        structure, why = self._settled(call, structure)
        if why:
            raise NotRowwiseError(f"{self.name}: {why}")
        return traced, structure

    def _settled(self, call: _Call, structure: Structure) -> tuple[Structure, str]:
        """The structure, and why it is none: rows that are counted have a constant size if it depends on that."""
        why = self._depends_on_rows(call, structure)
        if why and structure.counted:
            structure = replace(structure, fixed=tuple(sorted({*structure.fixed, *structure.counted})))
            why = self._depends_on_rows(call, structure)
        return structure, why

    def _depends_on_rows(self, call: _Call, structure: Structure) -> str:
        """Why the function is another one for other numbers of rows; "" if it is not."""
        for sizes in _other_rows(structure):
            if why := self._differs(call, structure, sizes):
                return why
        return ""

    def _differs(self, call: _Call, structure: Structure, sizes: Mapping[int, int]) -> str:
        """What is another with other sizes of some axes: a shape, or what is computed; "" if nothing is."""
        depends = ("the result depends on the number of rows: on a size such as x.shape[0], or one that is written out, "
                   "as in view and expand")  # fmt: skip
        one = 1 in sizes.values()  # of one row neither all operators are defined nor all structures known
        try:
            traced = self._trace(call, _shapes(structure, structure.inputs, sizes))
            if len(traced.outputs) != len(structure.outputs):
                return depends
            again = structured(traced)
        except Exception:  # noqa: BLE001 - whatever fails for other sizes shows that they matter
            return "" if one else depends
        expected = _shapes(structure, structure.outputs, sizes)
        shapes = _shapes(again, again.outputs, {})
        if list(map(len, expected)) != list(map(len, shapes)):
            return "a result has a dimension less where there is one row, as by squeeze"
        same = shapes == expected and again.text(rows=False) == structure.text(rows=False)
        return "" if same else depends

    def _loose(self, call: _Call, structure: Structure) -> tuple[int, ...]:
        """How many of each input's first dimensions may have any size.

        Of those that are not used: all, or all but the last, or none, as the function reads them.
        """
        unused = [place for place, used in enumerate(structure.used) if not used]
        read = [operand for operand, used in zip(structure.inputs, structure.used, strict=True) if used]
        known = {axis for operand in (*read, *structure.outputs) for axis in operand.axes}

        # Leading dimensions that no other tensor has. Those of one, which have no axis, cannot be tried with other sizes.
        def alone(labels: Sequence[Label]) -> int:
            return next(
                (dim for dim, label in enumerate(labels) if not label or known.intersection(label)), len(labels)
            )

        for kept in (0, 1):  # of the last dimensions
            loose = {
                place: max(min(alone(labels := structure.inputs[place].labels), len(labels) - kept), 0)
                for place in unused
            }
            axes = [
                axis
                for place, count in loose.items()
                for label in structure.inputs[place].labels[:count]
                for axis in label
            ]
            sizes = (_primes(structure, _FEW), [1] * len(axes), _divisible(structure, _MANY))
            others = [dict(zip(dict.fromkeys(axes), choice, strict=False)) for choice in sizes if axes]
            if not any(self._differs(call, structure, sizes) for sizes in others):
                return tuple([loose.get(place, 0) for place in range(len(structure.inputs))])
        return (0,) * len(structure.inputs)

    def _at(self, call: _Call, shapes: Sequence[tuple[int, ...]]) -> tuple[Traced, Structure]:
        traced = self._trace(call, shapes)
        try:
            return traced, structured(traced)
        except NotRowwiseError as error:
            raise NotRowwiseError(f"{self.name}: {error}") from None

    def _trace(self, call: _Call, shapes: Sequence[tuple[int, ...]]) -> Traced:
        names = [name for name, a in zip(self.names, call.args, strict=True) if isinstance(a, Tensor)]
        sized = iter(shapes)
        given = [_without_memory(a, next(sized)) if isinstance(a, Tensor) else a for a in call.args]

        def find(tensor: Tensor) -> tuple[int, str] | None:
            found = [(place, call.look.tensors[place]) for place, one in enumerate(call.around) if one is tensor]
            return found[0] if found else None

        return trace(self.run, given, self.function, names, find)

    def _program(self, structure: Structure) -> Program:
        try:
            return Program(self.name, None, planned(structure))
        except NotRowwiseError as error:
            raise NotRowwiseError(f"{self.name}: {error}") from None


def _without_memory(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    if like.layout is not torch.strided or like.is_nested:
        return like
    found = torch.empty(shape, dtype=like.dtype, device="meta")
    found.fusedops_device = like.device  # type: ignore[attr-defined]
    return found


def _of_one(shapes: Sequence[tuple[int, ...]]) -> set[int]:
    """The dimensions, counted from the last, that are one in all tensors: but for the last one."""
    return {place for place in range(2, max(map(len, shapes)) + 1)
            if all(shape[-place] == 1 for shape in shapes if len(shape) >= place)}  # fmt: skip


def _larger(shapes: Sequence[tuple[int, ...]], places: Collection[int]) -> list[tuple[int, ...]]:
    """The shapes with dimensions of one as more, so that they are not taken for what is broadcast."""
    return [tuple([2 if len(shape) - at in places else size for at, size in enumerate(shape)]) for shape in shapes]


def _is_dynamic(structure: Structure, place: int) -> bool:
    """Whether a dimension, counted from the last, may have any size in all tensors."""
    dynamic = dynamic_axes(structure)
    labels = [operand.labels[-place] for operand, used in zip(structure.inputs, structure.used, strict=True)
              if used and len(operand.labels) >= place]  # fmt: skip
    return all(len(label) == 1 and label[0] in dynamic.keys() - structure.counted for label in labels)


def _other_rows(structure: Structure) -> list[dict[int, int]]:
    """Other sizes of the axes that may have any: for each one, a small prime, and a large number with many divisors."""
    axes = sorted(dynamic_axes(structure))
    few = _primes(structure, _FEW)
    ones = [few[-at - 1] if axis in structure.counted else 1 for at, axis in enumerate(axes)]
    choices = (ones, few, _divisible(structure, _MANY))
    found = [{axis: choices[(at + turn) % 3][at] for at, axis in enumerate(axes)} for turn in range(3)]
    return found if len(axes) < 2 else [dict(zip(axes, ones, strict=True)), *found]


def _limit(structure: Structure, largest: int) -> int:
    """The largest size of rows that makes no tensor too large."""
    axes = dynamic_axes(structure)
    read = [operand for operand, used in zip(structure.inputs, structure.used, strict=True) if used]
    met = {axis for operand in (*read, *structure.outputs) for axis in operand.axes}  # in one tensor, at most
    fixed = math.prod([size for axis, size in enumerate(structure.sizes) if axis in met and axis not in axes])
    return min(largest, int((_ELEMENTS / fixed) ** (1 / max(len(axes), 1))))


def _primes(structure: Structure, largest: int) -> list[int]:
    """Primes that no axis has as its size, the largest first."""
    return [n for n in range(_limit(structure, largest), 1, -1)
            if n not in structure.sizes and all(n % d for d in range(2, math.isqrt(n) + 1))]  # fmt: skip


def _divisible(structure: Structure, largest: int) -> list[int]:
    """Multiples of all small numbers, as far as there is room for them, that no axis has as its size."""
    limit, count = _limit(structure, largest), len(structure.sizes)
    step = next(step for step in (5040, 720, 48, 8, 2) if limit // step > 2 * count or step == 2)
    return [n for n in range(limit - limit % step, 0, -step) if n not in structure.sizes]


def _shapes(structure: Structure, operands: Sequence[Operand], others: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Of tensors, with other sizes of some axes."""
    sizes = dict(enumerate(structure.sizes)) | dict(others)
    return [tuple([math.prod([sizes[axis] for axis in label]) for label in operand.labels]) for operand in operands]
