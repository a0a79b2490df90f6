"""Choose the program that a call of a function runs.

It is in memory or on disk since an earlier trace for such tensors, or else is traced now.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.compat.dispatch import above_autograd, without_modes, without_transforms
from ..core.compat.fake import hints
from . import storing
from .axes import Label
from .complex_numbers import as_pairs
from .effects import check_effects
from .errors import NotRowwiseError
from .objects import PLAIN
from .operator import Program, dynamic_axes, fits
from .planning import planned
from .reader import Look
from .rows import structured, structured_as
from .state import Looks, plain_state
from .structure import Operand, Structure, without
from .traced import Traced
from .tracing import trace

__all__ = ["Match", "Programs", "is_dense", "tensors_of"]

# A number in the text of a structure, and not that of a value such as %3, or of an axis such as c0.
_NUMBER = re.compile(r"(?<![%\w.])-?\d[\w.+-]*")
# The most programs of a function, and the most refusals. The least recently used are dropped.
_MOST_PROGRAMS = 1024
# Limits of the sizes of row axes in further traces: of small sizes, and of large ones, which are
# far above any size that a function may compare them with.
_FEW, _MANY = 40, 100_000
# About the most elements of a tensor in a trace: its size in bytes has to fit in an int64.
_ELEMENTS = 2**58

_V = TypeVar("_V")


@dataclass(frozen=True)
class _Call:
    """A call to be traced.

    Attributes:
        args: its arguments.
        look: reads the state of the function.
        state_tensors: the tensors in that state.
        path: the file of the structures that were traced for such arguments and state; None if
            nothing is stored.
        known: the programs for the same numbers and state, and other tensors.
    """

    args: Sequence[Any]
    look: Look
    state_tensors: Sequence[Tensor]
    path: Path | None
    known: Sequence[Match] = ()


@dataclass(frozen=True)
class Match:
    """A program of a function.

    Attributes:
        program: the program.
        captured: the positions in the state of the tensors that it captures.
        look: the look that reads these.
        outline: its structure as text, without numbers: see `_outline`.
    """

    program: Program
    captured: tuple[int, ...]
    look: Look
    outline: str

    def fits(self, tensors: Sequence[Tensor], state_tensors: Sequence[Tensor]) -> bool:
        """Whether the program is for tensors like these, of a call and of the state."""
        captured = [as_pairs(state_tensors[position]) for position in self.captured]
        if not all(map(is_dense, captured)):
            return False
        # The tensors of a call are on one device: see `Rowwise._resolved`.
        if any(tensor.device != tensors[0].device for tensor in captured):
            return False
        return self.program.fits([*tensors, *captured])


def _looked_up(entries: dict[Any, _V], key: Any) -> _V | None:
    """Return a key's value, and move the key to the end of the dict; None if it is missing.

    So the first key of the dict is the least recently used one.
    """
    value = entries.pop(key, None)
    if value is not None:
        entries[key] = value
    return value


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither nested nor sparse."""
    return not tensor.is_nested and tensor.layout is torch.strided


def tensors_of(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    return [as_pairs(a) for a in args if isinstance(a, Tensor)]


class Programs:
    """The programs of a function.

    Args:
        function: the user's function.
        name: its name in messages.
        names: the names of its parameters.
        run: calls it with all arguments by position.
    """

    def __init__(
        self, function: FunctionType, name: str, names: Sequence[str], run: Callable[..., Any]
    ) -> None:
        self.function = function
        self.name = name
        self.names = names
        self.run = run
        # The least recently used first: see `find` for the keys.
        self.known: dict[Any, list[Match]] = {}
        self.refused: dict[Any, str] = {}
        self._looks: dict[tuple[int, ...], Looks] = {}

    def looks(self, args: Sequence[Any]) -> Looks:
        """Return the `Looks` for the arguments of a call that are objects, and so have a state."""
        objects = tuple([i for i, a in enumerate(args) if not isinstance(a, (Tensor, *PLAIN))])
        if objects not in self._looks:
            self._looks[objects] = Looks(self.function, self.names, objects)
        return self._looks[objects]

    def find(self, args: Sequence[Any], autocast: Any) -> Match:
        """Return the program for a call.

        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        tensors = tensors_of(args)
        looks = self.looks(args)
        # First with the known looks. If no program fits, a trace is needed. Before the trace there
        # is a new walk: a program may fit the state that it reads.
        for read in (looks.at, looks.walked):
            look, state, state_tensors = read(args)
            if look.reason:
                raise NotRowwiseError(f"{self.name}: {look.reason}")
            if not tensors:
                raise NotRowwiseError(f"{self.name}: {self._why_no_tensors(args)}")
            # Programs with one key differ in the tensors that fit:
            #
            #   numbers, state, autocast, default dtype, kind of device  -> known programs
            #   the same, and each tensor's kind and sizes but the first -> a refusal
            #
            # The first size is not a part of a refusal's key, because most refusals are the same
            # for any number of rows.
            numbers = tuple([None if isinstance(a, Tensor) else plain_state(a) for a in args])
            key = (numbers, state, autocast, torch.get_default_dtype(), tensors[0].device.type)
            refusal_key = (key, *map(_kind_of, (*tensors, *state_tensors)))
            reason = _looked_up(self.refused, refusal_key)
            if reason is not None:
                raise NotRowwiseError(reason)
            for match in _looked_up(self.known, key) or ():
                if match.fits(tensors, state_tensors):
                    return match
        known = tuple(self.known.get(key, ()))
        call = _Call(args, look, state_tensors, self._path(look, key), known)
        try:
            with without_transforms(), without_modes():
                match = above_autograd(
                    lambda: self._stored(call, tensors) or self._traced(call), autocast or ()
                )
        except NotRowwiseError as error:
            # The text alone: the error would keep the tensors of its frames alive.
            self.refused[refusal_key] = str(error)
            if len(self.refused) > _MOST_PROGRAMS:
                del self.refused[next(iter(self.refused))]
            raise
        if not match.fits(tensors, state_tensors):
            raise NotRowwiseError(f"{self.name}: it was traced for tensors of other shapes")
        self._add(key, match)
        return match

    def _add(self, key: Any, match: Match) -> None:
        """Add a program; the oldest one of the least recently used key is dropped if needed."""
        self.known.setdefault(key, []).append(match)
        if sum(map(len, self.known.values())) <= _MOST_PROGRAMS:
            return
        oldest = next(iter(self.known))
        self.known[oldest].pop(0)
        if not self.known[oldest]:
            del self.known[oldest]

    def _why_no_tensors(self, args: Sequence[Any]) -> str:
        """Return why a call has no tensors: they are in tuples or lists, or there are none."""
        reasons: list[str] = []
        for name, a in zip(self.names, args, strict=True):
            is_sequence = isinstance(a, (tuple, list))
            if is_sequence and tensors_of(a):
                reasons.append(f"{name} is a {type(a).__name__} of tensors; pass them one by one")
        return "; ".join(reasons) or "none of its arguments is a tensor"

    def _path(self, look: Look, key: Any) -> Path | None:
        """Return the file of such calls; None if their state has no representation on disk."""
        # The key is ``(numbers, (look, leaves, identical tensors), autocast, default dtype,
        # device)``: see `find` and `Looks.at`. The look is an object of this process; its
        # fingerprint replaces it.
        numbers, (_, *state), *others = key
        return storing.stored_at(look, numbers, state, *others)

    def _stored(self, call: _Call, tensors: Sequence[Tensor]) -> Match | None:
        """Return a program from disk that fits the tensors.

        It captures none: `_traced` stores only structures without captured tensors.
        """
        if call.path is None:
            return None
        for structure, text in storing.read(call.path):
            if len(structure.inputs) != len(tensors):
                continue
            try:
                # A program takes a hundred times as long to build as its inputs to compare.
                if fits(structure, dynamic_axes(structure), tensors):
                    outline = _outline(structure)
                    return Match(self._program(storing.parsed(text)), (), call.look, outline)
            # The file has an invalid structure: the function is traced instead.
            except Exception:  # noqa: BLE001
                continue
        return None

    def _traced(self, call: _Call) -> Match:
        """Return a new program, and store its structure."""
        try:
            traced, structure = self._structure(call)
        except NotRowwiseError:
            raise
        except Exception as error:
            # A wrong call fails here as well, with PyTorch's own error.
            self.run(*call.args)
            raise NotRowwiseError(
                f"{self.name}: it cannot be traced: {error}{self._where(error)}"
            ) from error
        if call.path is not None and not traced.captured:
            storing.write(call.path, structure)
        outline = _outline(structure)
        return Match(self._program(structure), tuple(traced.captured), call.look, outline)

    def _where(self, error: Exception) -> str:
        """Return the line of the function in which an error was raised."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        if code is None:
            return ""
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code is code]
        if not lines:
            return ""
        text = linecache.getline(code.co_filename, lines[-1]).strip()
        return f"\n  line {lines[-1]} of {code.co_filename}: {text}"

    # --- any number of rows -----------------------------------------------------------------------
    #
    # A trace is for tensors of certain sizes. Whether its structure is the same for other numbers
    # of rows is not proved, but tested: the function is traced again with other sizes of the axes
    # that seem to be free, and the two structures are compared.

    def _structure(self, call: _Call) -> tuple[Traced, Structure]:
        """Return the function's structure, which is the same for other numbers of rows."""
        for code in call.look.codes:
            check_effects(code, self.name)
        shapes = [hints(tensor.shape) for tensor in tensors_of(call.args)]
        traced, structure = self._of_any_rows(call, shapes)
        return traced, replace(structure, loose=self._loose(call, structure))

    def _of_any_rows(
        self, call: _Call, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Traced, Structure]:
        """Return the structure for these shapes.

        A dimension of size one has no axis, as if it was broadcast: a trace of it serves no other
        size. So dimensions that are one in all tensors are traced with size two at first. That
        structure is returned if it is also that of one row::

            x: (1, 64)       traced at (2, 64)
            x: (1, 1, 64)    traced at (2, 2, 64); if dimension 0 is not free there, at (1, 2, 64)

        If it is not, or there is an error with size two, the shapes are traced as they are.
        """
        ones = _dims_of_one(shapes)
        while ones:
            try:
                traced, structure = self._structure_at(call, _larger(shapes, ones))
            # Some shapes broadcast with one row, but not with two.
            except Exception:  # noqa: BLE001
                break
            constant = {dim for dim in ones if not _is_dynamic(structure, dim)}
            if constant:  # traced again with size one in these
                ones = ones - constant
                continue
            structure, why = self._for_other_rows(call, structure)
            if not why:
                return traced, structure
            break
        traced, structure = self._structure_at(call, shapes)
        structure, why = self._for_other_rows(call, structure)
        if why:
            raise NotRowwiseError(f"{self.name}: {why}")
        return traced, structure

    def _for_other_rows(self, call: _Call, structure: Structure) -> tuple[Structure, str]:
        """Return the structure, and why it does not serve other numbers of rows; "" if it does.

        A function may read an index along rows, as a causal mask does. If the structure differs for
        other sizes, the axes of that index get a constant size (`Structure.fixed`), and the other
        row axes are tested again.
        """
        why = self._why_depends_on_rows(call, structure)
        if why and structure.indexed:
            fixed = tuple(sorted({*structure.fixed, *structure.indexed}))
            structure = replace(structure, fixed=fixed)
            why = self._why_depends_on_rows(call, structure)
        return structure, why

    def _why_depends_on_rows(self, call: _Call, structure: Structure) -> str:
        """Return why the structure differs for other numbers of rows; "" if it does not."""
        others = _other_rows(structure)
        if not others:
            return "its rows have too many dimensions for traces of other sizes; flatten some"
        # Of a slice of another length the operators are mostly the same, and the numbers differ.
        # Then the fewest rows and the most test whether these depend on the rows. Both are needed:
        # a limit of ``x.numel()`` may be below all calls of one length, and amid those of another.
        outline = _outline(structure)
        if any(match.outline == outline for match in call.known):
            others = [others[0], _large_rows(structure)]
        reasons = (self._why_differs(call, structure, sizes) for sizes in others)
        return next(filter(None, reasons), "")

    def _why_differs(self, call: _Call, structure: Structure, sizes: Mapping[int, int]) -> str:
        """Return why a trace with other sizes of some axes differs; "" if it does not."""
        depends = (
            "the result depends on the number of rows: on a size such as x.shape[0], or one that "
            "is written out, as in view and expand"
        )
        # Some operators are not defined for one row, and some structures are not recognised. An
        # error with a size of one therefore tells nothing: other sizes are tested, too.
        has_one = 1 in sizes.values()
        try:
            traced = self._trace(call, _shapes(structure, structure.inputs, sizes))
            if len(traced.outputs) != len(structure.outputs):
                return depends
            again = structured_as(traced, _unrolled(structure, sizes))
        except Exception:  # noqa: BLE001 - whatever fails for other sizes shows that they matter
            return "" if has_one else depends
        expected = _shapes(structure, structure.outputs, sizes)
        shapes = _shapes(again, again.outputs, {})
        if list(map(len, expected)) != list(map(len, shapes)):
            return "a result has a dimension less where there is one row, as by squeeze"
        if shapes != expected:
            return depends
        # A dimension of size one has no axis, so ``again`` may have fewer row axes.
        return "" if again.text(rows=False) == structure.text(rows=False) else depends

    def _loose(self, call: _Call, structure: Structure) -> tuple[int, ...]:
        """Return how many of each input's first dimensions may have any size.

        For inputs that are used it is 0. For unused inputs it is all dimensions, all but the last,
        or none: the function may read their sizes.
        """
        for fixed_dims in (0, 1):  # the number of last dimensions that keep their size
            loose = _separate_dims(structure, fixed_dims)
            labels = [
                operand.labels[:count]
                for operand, count in zip(structure.inputs, loose, strict=True)
            ]
            axes = dict.fromkeys(itertools.chain(*itertools.chain(*labels)))
            if not self._differs_for(call, structure, list(axes)):
                return loose
        return (0,) * len(structure.inputs)

    def _differs_for(self, call: _Call, structure: Structure, axes: Sequence[int]) -> bool:
        """Whether the function differs for some other sizes of these axes."""
        if not axes:
            return False
        few = _primes(structure, _FEW)
        many = _divisible(structure, _MANY)
        choices = (few, [1] * len(axes), many)
        # Each choice has a size for every axis, and may have more, which `zip` ignores.
        return any(
            self._why_differs(call, structure, dict(zip(axes, choice, strict=False)))
            for choice in choices
        )

    def _structure_at(
        self, call: _Call, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Traced, Structure]:
        """Return the trace and the structure for tensors of these shapes."""
        traced = self._trace(call, shapes)
        try:
            return traced, structured(traced)
        except NotRowwiseError as error:
            raise NotRowwiseError(f"{self.name}: {error}") from None

    def _trace(self, call: _Call, shapes: Sequence[tuple[int, ...]]) -> Traced:
        """Return the trace for tensors of these shapes."""
        names: list[str] = []
        arguments: list[Any] = []
        remaining = iter(shapes)
        for name, a in zip(self.names, call.args, strict=True):
            if isinstance(a, Tensor):
                names.append(name)
                arguments.append(_without_memory(a, next(remaining)))
            else:
                arguments.append(a)

        def find_captured(tensor: Tensor) -> tuple[int, str] | None:
            for position, captured in enumerate(call.state_tensors):
                if captured is tensor:
                    return position, call.look.tensors[position]
            return None

        return trace(self.run, arguments, self.function, names, find_captured)

    def _program(self, structure: Structure) -> Program:
        """Return the program of a structure."""
        try:
            return Program(self.name, None, planned(structure))
        except NotRowwiseError as error:
            raise NotRowwiseError(f"{self.name}: {error}") from None


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor's kind and shape that a refusal depends on."""
    kind = tensor.dtype, tensor.layout, tensor.device, tensor.dim()
    return kind if tensor.is_nested else (*kind, hints(tensor.shape[1:]))


def _without_memory(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor on the meta device; one that is not dense is returned as it is."""
    if not is_dense(like):
        return like
    meta = torch.empty(shape, dtype=as_pairs(like).dtype, device="meta")
    if like.is_complex():
        meta = torch.view_as_complex(meta)
    meta.fusedops_device = like.device  # type: ignore[attr-defined]
    return meta


def _unrolled(structure: Structure, sizes: Mapping[int, int]) -> Label:
    """Return the numbers that the unrolled axes have in a trace with other sizes of some axes.

    There an axis of size one has no number.
    """
    numbered = without(range(len(structure.sizes)), [axis for axis in sizes if sizes[axis] == 1])
    return tuple(map(numbered.index, structure.unrolled))


def _used_axes(structure: Structure) -> set[int]:
    """Return the axes of the inputs that are used, and of the outputs."""
    inputs = itertools.compress(structure.inputs, structure.used)
    return {axis for operand in (*inputs, *structure.outputs) for axis in operand.axes}


def _separate_dims(structure: Structure, fixed_dims: int) -> tuple[int, ...]:
    """Return how many of each unused input's first dimensions no other tensor has; 0 for others.

    The last dimensions, ``fixed_dims`` of them, are not counted.
    """
    used_axes = _used_axes(structure)
    counts = []
    for operand, is_used in zip(structure.inputs, structure.used, strict=True):
        if is_used:
            counts.append(0)
            continue
        most = len(operand.labels) - fixed_dims
        counts.append(max(min(_separate(operand.labels, used_axes), most), 0))
    return tuple(counts)


def _separate(labels: Sequence[Label], used_axes: Collection[int]) -> int:
    """Return how many leading dimensions have no used axis.

    The count ends before a dimension of size one: without an axis it cannot be tested.
    """
    for dim, label in enumerate(labels):
        if not label or not set(used_axes).isdisjoint(label):
            return dim
    return len(labels)


def _dims_of_one(shapes: Sequence[tuple[int, ...]]) -> set[int]:
    """Return the dimensions, counted from the last, whose size is one in all tensors.

    The last dimension, of columns, is not among them.
    """
    ones: set[int] = set()
    for dim in range(2, max(map(len, shapes)) + 1):
        sizes = {shape[-dim] for shape in shapes if len(shape) >= dim}
        if sizes == {1}:
            ones.add(dim)
    return ones


def _larger(shapes: Sequence[tuple[int, ...]], dims: Collection[int]) -> list[tuple[int, ...]]:
    """Return the shapes with two in some dimensions, counted from the last, in place of one."""
    larger = []
    for shape in shapes:
        sizes = list(shape)
        for dim in dims:
            if dim <= len(sizes):
                sizes[-dim] = 2
        larger.append(tuple(sizes))
    return larger


def _is_dynamic(structure: Structure, dim: int) -> bool:
    """Whether a dimension, counted from the last, may have any size in all tensors."""
    free = dynamic_axes(structure).keys() - structure.indexed
    for operand in itertools.compress(structure.inputs, structure.used):
        if len(operand.labels) < dim:
            continue
        label = operand.labels[-dim]
        if len(label) != 1 or label[0] not in free:
            return False
    return True


def _other_rows(structure: Structure) -> list[dict[int, int]]:
    """Return other sizes of the axes that may have any size, for further traces.

    In three traces each axis is one, a small prime, and a large number with many divisors, in turn,
    so that the axes differ in each. With two axes and more there is a trace with one in all.

        axis       0      1      2
        trace 1    one    prime  large
        trace 2    prime  large  one
        trace 3    large  one    prime

    The result is empty if there are more axes than numbers of each kind.

    Axes whose index the function reads get another small prime in place of one, since the index of
    a single row is the constant 0. It is one of the last primes in the list, and so differs from
    those of ``few``, which are the first.
    """
    axes = sorted(dynamic_axes(structure))
    few, many = _primes(structure, _FEW), _divisible(structure, _MANY)
    if len(axes) > min(len(few), len(many)):
        return []
    ones = [few[-i - 1] if axis in structure.indexed else 1 for i, axis in enumerate(axes)]
    choices = (ones, few, many)

    def sizes(turn: int) -> dict[int, int]:
        return {axis: choices[(i + turn) % 3][i] for i, axis in enumerate(axes)}

    others = list(map(sizes, range(3)))
    if len(axes) < 2:
        return others
    return [dict(zip(axes, ones, strict=True)), *others]


def _large_rows(structure: Structure) -> dict[int, int]:
    """Return a large size for each axis that may have any size."""
    axes = sorted(dynamic_axes(structure))
    return dict(zip(axes, _divisible(structure, _MANY), strict=False))


def _outline(structure: Structure) -> str:
    """Return a structure as text, without numbers except those of values and axes."""
    return _NUMBER.sub("#", structure.text())


# Small sizes show what is compared with a number or unrolled; one shows what broadcasts; large ones
# show what depends on a limit. Sizes that axes have already are left out, since two axes of one
# size could stand for one another unseen.


def _limit(structure: Structure, largest: int) -> int:
    """Return the largest size that all row axes can have, up to ``largest``.

    With larger ones a tensor of the trace could have too many elements.
    """
    axes = dynamic_axes(structure)
    # The product of all constant sizes: no tensor has more elements along constant axes.
    fixed = structure.size(_used_axes(structure) - axes.keys())
    return min(largest, int((_ELEMENTS / fixed) ** (1 / max(len(axes), 1))))


def _primes(structure: Structure, largest: int) -> list[int]:
    """Return primes that are no axis's size, the largest first."""
    numbers = range(_limit(structure, largest), 1, -1)
    others = itertools.filterfalse(structure.sizes.__contains__, numbers)
    return list(filter(_is_prime, others))


def _is_prime(n: int) -> bool:
    return all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


def _divisible(structure: Structure, largest: int) -> list[int]:
    """Return numbers with many divisors that are no axis's size, the largest first.

    They are multiples of a step: of the largest one with enough multiples for all axes.
    """
    limit = _limit(structure, largest)
    count = len(structure.sizes)
    step = 2
    for candidate in (5040, 720, 48, 8):
        if limit // candidate > 2 * count:
            step = candidate
            break
    return [n for n in range(limit - limit % step, 0, -step) if n not in structure.sizes]


def _shapes(
    structure: Structure, operands: Sequence[Operand], others: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Return the shapes of tensors, with other sizes of some axes."""
    sizes = dict(enumerate(structure.sizes)) | dict(others)

    def size(label: Label) -> int:
        return math.prod([sizes[axis] for axis in label])

    return [tuple(map(size, operand.labels)) for operand in operands]
