"""`Rowwise.foreach`: a function called for each of many slices, in one launch each way.

An `Argument` says how the slices of an argument are passed. The programs of all slices are divided
into parts, whose kernels are one kernel; a `SliceGroup` computes each::

    arguments ──▶ programs of all slices ──▶ parts ──▶ a launch each ──▶ results
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.calls.call import run
from ...core.compat.autograd import below_autograd
from ...core.compat.dispatch import in_forward_mode, is_intercepted, transforms
from ...core.compat.fake import is_fake
from ...core.launches import launch
from ..errors import NotRowwiseError
from ..objects import PLAIN
from ..operator import Program
from ..programs import Match, Programs, is_dense
from ..state import plain_state
from ..structure import Operand
from .forms import JOINT, SEPARATE, SHARED
from .kinds import members_of
from .operator import MOST_SLICES, SliceGroup, group_of, why_not

__all__ = ["Foreach", "SlicesExplanation"]

_NUMBERS = (*PLAIN, torch.SymInt, torch.SymFloat, torch.SymBool)
# The most calls in a function's cache. At this size the cache is cleared.
_MOST_CALLS = 1024


class Argument(NamedTuple):
    """An argument of all slices.

    Attributes:
        value: the list of the slices' values; one tensor with all slices; or the value that all
            slices have.
        form: see `forms`.
        dim: of a joint tensor: the dimension along which the slices are, from the end.
        sizes: of a joint tensor: the sizes of the slices along it.
    """

    value: Any
    form: str
    dim: int = -1
    sizes: tuple[int, ...] = ()

    def slices(self, count: int) -> Sequence[Any]:
        """Return the value of each slice."""
        if self.form == SEPARATE:
            return self.value  # type: ignore[no-any-return]
        if self.form == SHARED:
            return [self.value] * count
        if self.dim == -1:
            return self.value.split(list(self.sizes), -1)  # type: ignore[no-any-return]
        return self.value.unbind(self.dim)  # type: ignore[no-any-return]

    @property
    def key(self) -> Any:
        """All on which the programs of the slices depend, and the number of rows."""
        if isinstance(self.value, Tensor):
            return self.form, self.dim, self.sizes, _kind_of(self.value)
        if self.form == SEPARATE:
            return self.form, *map(_kind_or_state, self.value)
        return self.form, _kind_or_state(self.value)


def _kind_or_state(value: Any) -> Any:
    return _kind_of(value) if isinstance(value, Tensor) else plain_state(value)


def _kind_of(tensor: Tensor) -> Any:
    """Return a tensor's class, dtype, device and shape.

    The shape includes the number of rows: any dimension of a tensor without rows may be one of
    columns.
    """
    return type(tensor), tensor.dtype, tensor.device, tensor.shape


def arguments_of(
    op: str, names: Sequence[str], values: Sequence[Any], sizes: Sequence[int] | None
) -> tuple[list[Argument], int]:
    """Return how the slices of each argument are passed, and the number of slices.

    Raises:
        TypeError: no argument has slices.
        ValueError: the arguments have different numbers of slices, or none.
    """
    if sizes is not None:
        return _of_sizes(op, names, values, [int(size) for size in sizes])
    lists = [(n, v) for n, v in zip(names, values, strict=True) if _is_list(v)]
    if lists:
        name, first = lists[0]
        counts = {n: len(v) for n, v in lists}
        for other, length in counts.items():
            if length != len(first):
                raise ValueError(
                    f"{op}.foreach: {other} has {length} slices, and {name} {len(first)}"
                )
        count = len(first)
        arguments = [Argument(v, SEPARATE if _is_list(v) else SHARED) for v in values]
    else:
        first_tensor = next((v for v in values if isinstance(v, Tensor)), None)
        if first_tensor is None or first_tensor.dim() < 2:
            raise TypeError(
                f"{op}.foreach: no argument has slices: pass lists of tensors, one tensor with "
                "sizes, or one of shape (*, K, D)"
            )
        count = first_tensor.shape[-2]
        arguments = [_stacked(v, count) for v in values]
    if not 0 < count <= MOST_SLICES:
        raise ValueError(f"{op}.foreach: there are {count} slices, expected 1 to {MOST_SLICES}")
    return arguments, count


def _is_list(value: Any) -> bool:
    """Return whether an argument has a value for each slice: not a tuple of numbers, a shape."""
    is_of_tensors = isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value)
    return isinstance(value, (list, torch.nn.ParameterList)) or is_of_tensors


# Values of many slices that are neither a list nor a tuple.
_NO_LISTS = (torch.nn.ModuleList, torch.nn.ParameterList, Iterator)


def _check_lists(op: str, names: Sequence[str], arguments: Sequence[Argument]) -> None:
    """Raise `TypeError` for a list that has not one kind of values, and for what is no list."""
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument.value, _NO_LISTS):
            kind = type(argument.value).__name__
            raise TypeError(
                f"{op}.foreach: {name} is a {kind}; pass a list of tensors, such as "
                "[m.weight for m in modules]"
            )
        if argument.form != SEPARATE:
            continue
        tensors = map(_is_tensor, argument.value)
        numbers = [isinstance(v, _NUMBERS) for v in argument.value]
        if not all(tensors) and not all(numbers):
            kinds = " and ".join(sorted({type(v).__name__ for v in argument.value}))
            has_modules = any(isinstance(v, torch.nn.Module) for v in argument.value)
            step = "; pass their parameters: [m.weight for m in modules]" if has_modules else ""
            raise TypeError(
                f"{op}.foreach: {name} is a list of {kinds}, expected tensors, or numbers{step}"
            )


def _stacked(value: Any, count: int) -> Argument:
    """Return an argument of a call without lists: of tensors (*, K, D), as broadcasting has it."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return Argument(value, SHARED)
    if value.shape[-2] == count:
        return Argument(value, JOINT, -2)
    if value.shape[-2] == 1:
        return Argument(value.select(-2, 0), SHARED)
    return Argument(value, SHARED)


def _of_sizes(
    op: str, names: Sequence[str], values: Sequence[Any], sizes: list[int]
) -> tuple[list[Argument], int]:
    total, count = sum(sizes), len(sizes)
    if not 0 < count <= MOST_SLICES or min(sizes) < 1:
        raise ValueError(
            f"{op}.foreach: sizes are {sizes}, expected 1 to {MOST_SLICES} positive numbers"
        )
    arguments = []
    for name, value in zip(names, values, strict=True):
        if _is_list(value):
            if len(value) != count:
                raise ValueError(
                    f"{op}.foreach: {name} has {len(value)} slices, and sizes has {count}"
                )
            arguments.append(Argument(value, SEPARATE))
        elif isinstance(value, Tensor) and value.dim() and value.shape[-1] == total:
            arguments.append(Argument(value, JOINT, -1, tuple(sizes)))
        else:
            arguments.append(Argument(value, SHARED))
    if not any(argument.form == JOINT for argument in arguments):
        raise ValueError(f"{op}.foreach: no tensor has {total} columns, the sum of the sizes")
    return arguments, count


@dataclass(frozen=True)
class Part:
    """Slices that one operator computes.

    Attributes:
        group: the operator; None for a slice whose function is called by itself.
        slices: the numbers of its slices.
        reason: why there is no operator; "" if there is one.
    """

    group: SliceGroup | None
    slices: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class SlicesExplanation:
    """Which slices of a call are one launch.

    Attributes:
        name: the function's name.
        count: the number of slices.
        parts: the parts; () if the function is called for each slice, on a CPU for example.
    """

    name: str
    count: int
    parts: tuple[Part, ...]

    @property
    def launches(self) -> int:
        """The launches of a forward."""
        return len(self.parts) or self.count

    def __str__(self) -> str:
        if not self.parts:
            return f"{self.name}: a call for each of {self.count} slices (explain says why)"
        launches = "1 launch" if self.launches == 1 else f"{self.launches} launches"
        lines = [f"{self.name}: {self.count} slices in {launches} forward"]
        for part in self.parts:
            if part.group is None:
                lines.append(f"  slice {part.slices[0]} alone: {part.reason}")
                continue
            lengths = [program.structure.cols for program in part.group.programs]
            span = f"{min(lengths)} to {max(lengths)}" if len({*lengths}) > 1 else f"{lengths[0]}"
            lines.append(f"  {len(part.slices)} slices of {span} columns")
        return "\n".join(lines)


def parts_of(
    programs: Sequence[Program | None],
    rows: Sequence[int],
    arguments: Sequence[Argument],
    *,
    is_joint: bool,
) -> list[Part]:
    """Return the parts of a call.

    Args:
        programs: the program of each slice; None for one that has none.
        rows: the number of rows of each slice.
        arguments: the arguments that are tensors, in the order of the programs' inputs.
        is_joint: whether the call's results are joint.
    """
    # Slices side by side have equal rows. Those of others may differ: see `rows`.
    members: dict[tuple[str, int], list[int]] = {}
    alone: list[Part] = []
    for k, program in enumerate(programs):
        reason = "the function cannot be fused" if program is None else why_not(program)
        if reason or program is None:
            alone.append(Part(None, (k,), reason))
        else:
            dims = len(program.structure.rows)
            # A symbolic size has no hash, but a text.
            members.setdefault((str(rows[k]) if is_joint else "", dims), []).append(k)
    groups = list(itertools.chain(*[members_of(programs, own) for own in members.values()]))
    is_whole = len(groups) == 1 and not alone
    parts: list[Part] = []
    for slices in groups:
        chosen: list[Any] = list(map(programs.__getitem__, slices))
        inputs, results = _forms_of(chosen, arguments, is_joint=is_joint, is_whole=is_whole)
        own_rows = len(set(map(str, map(rows.__getitem__, slices)))) > 1
        parts.append(Part(group_of(chosen, inputs, results, own_rows=own_rows), tuple(slices)))
    return parts + alone


def _forms_of(
    programs: Sequence[Program],
    arguments: Sequence[Argument],
    *,
    is_joint: bool,
    is_whole: bool,
) -> tuple[list[str], list[str]]:
    """Return the forms of a part's inputs and results.

    Args:
        programs: the programs of the part's slices.
        arguments: those of `parts_of`.
        is_joint: likewise.
        is_whole: whether the part has all slices.
    """
    lead = programs[0]
    inputs = []
    for index, argument in enumerate(arguments):
        form = argument.form
        if form == JOINT and not (is_whole and _is_wide(programs, lead.structure.inputs, index)):
            form = SEPARATE
        inputs.append(form)
    results = [
        JOINT
        if is_joint and is_whole and _is_wide(programs, lead.structure.outputs, r)
        else SEPARATE
        for r in range(lead.count)
    ]
    return inputs, results


def _is_wide(programs: Sequence[Program], operands: Sequence[Operand], index: int) -> bool:
    """Return whether the slices of a tensor can be side by side.

    They have one dimension beside those of rows, so that a slice is adjacent in memory. And they
    have several columns, or one of rows of one column: a number of each row has no stride.
    """
    structure = programs[0].structure
    rows = len(structure.rows) if set(structure.rows) & set(operands[index].axes) else 0
    if len(operands[index].labels) != rows + 1:
        return False
    is_input = operands is structure.inputs
    for program in programs:
        those = program.structure.inputs if is_input else program.structure.outputs
        if program.size_of_row(those[index]) == 1 and program.structure.columns:
            return False
    return True


def called(
    part: Part, arguments: Sequence[Argument], count: int, rows: Sequence[int]
) -> list[list[Any]]:
    """Return the results of a part: for each, a tensor of each slice, or a joint one.

    They have two dimensions: `assembled` gives them the others.

    Args:
        part: the part.
        arguments: the arguments of all slices.
        count: the number of all slices.
        rows: the number of rows of each slice of the part.
    """
    group = part.group
    assert group is not None
    tensors: list[Tensor] = []
    for index, (argument, form) in enumerate(zip(arguments, group.inputs, strict=True)):
        by_row = group.by_row[index]
        if form == SEPARATE:
            slices = argument.slices(count)
            for k, rows_of_slice in zip(part.slices, rows, strict=True):
                tensors.append(_flat(slices[k], rows_of_slice, by_row=by_row))
        else:
            tensors.append(_flat(argument.value, rows[0], by_row=by_row))
    outs = run(group, group.record, tensors, group.p)
    exposed = outs[: len(outs) - group.own] if group.own else outs
    results, start = [], 0
    for form in group.results:
        end = start + (group.slices if form == SEPARATE else 1)
        results.append(list(exposed[start:end]))
        start = end
    return results


def _flat(tensor: Tensor, rows: int, *, by_row: bool) -> Tensor:
    """Return a tensor with rows in two dimensions, a vector in one."""
    if by_row:
        is_flat = tensor.dim() == 2 and tensor.shape[0] == rows
        return tensor if is_flat else tensor.reshape(rows, tensor.numel() // rows)
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def assembled(
    parts: Sequence[tuple[Part, list[list[Any]]]],
    leading: Mapping[int, Sequence[int]],
    joint: Argument | None,
    count: int,
) -> list[Any]:
    """Return the call's results: of each, a list of the slices' tensors, or one tensor.

    Args:
        parts: the parts, with their results.
        leading: the sizes of the dimensions of rows, of each slice.
        joint: the argument whose form the results have; None for lists: see `_joint_of`.
        count: the number of slices.
    """
    first = parts[0][0].group
    assert first is not None
    results: list[Any] = []
    for number in range(first.count):
        slices: list[Any] = [None] * count
        for part, values in parts:
            group = part.group
            if group is not None and group.results[number] == JOINT:
                assert joint is not None
                shape = [*leading[0]]
                if joint.dim == -2:
                    shape += [count, *group.own_shapes(number)[0]]
                else:
                    shape.append(-1)
                results.append(_viewed(values[number][0], shape))
                break
            if group is None:  # the function's own result
                (slices[part.slices[0]],) = values[number]
                continue
            results_of_part = zip(
                part.slices, values[number], group.own_shapes(number), strict=True
            )
            for k, value, own in results_of_part:
                slices[k] = _viewed(value, [*leading[k], *own])
        else:
            results.append(slices if joint is None else _joined(slices, joint))
    return results


def _viewed(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a result in its shape.

    Without gradients it is no view: autograd would refuse to record a later change of it in place.
    """
    if len(shape) == 2 and shape[0] == tensor.shape[0]:
        return tensor
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return tensor.view(shape)
    with below_autograd():
        return tensor.view(shape)


def _joined(slices: Sequence[Tensor], joint: Argument) -> Tensor:
    """Return one tensor of results that no kernel writes jointly."""
    if joint.dim == -2:
        return torch.stack(list(slices), -1 if slices[0].dim() < joint.value.dim() - 1 else -2)
    return torch.cat([t.unsqueeze(-1) if t.dim() < joint.value.dim() else t for t in slices], -1)


@dataclass(frozen=True)
class _Resolved:
    """A call of all slices that was resolved.

    Attributes:
        parts: the parts; () if the function is called for each slice.
        look: reads the tensors that the function captures.
        captured: the positions of these in the function's state.
        leading: the argument whose leading dimensions are rows.
        container: "tensor", "tuple" or "list": what the function returns.
    """

    parts: tuple[Part, ...] = ()
    look: Any = None
    captured: tuple[int, ...] = ()
    leading: int = 0
    container: str = ""


class Foreach:
    """Calls a function for each of many slices.

    Args:
        op: the function's name.
        names: the names of its parameters.
        programs: its programs.
        call: calls the function for one slice, with all arguments by position.
        plain_call: the same of the plain function.
        refuse: raises, or warns once, because of a `NotRowwiseError`.
    """

    def __init__(
        self,
        op: str,
        names: Sequence[str],
        programs: Programs,
        call: Callable[..., Any],
        plain_call: Callable[..., Any],
        refuse: Callable[[NotRowwiseError], None],
    ) -> None:
        self.op, self.names, self.programs = op, names, programs
        self.call, self.plain_call, self.refuse = call, plain_call, refuse
        self._calls: dict[Any, _Resolved] = {}

    def __call__(self, values: Sequence[Any], sizes: Sequence[int] | None, autocast: Any) -> Any:
        """Return the results: for each, one tensor, or a list with that of each slice."""
        arguments, count = arguments_of(self.op, self.names, values, sizes)
        if is_intercepted() and (transforms() or in_forward_mode()):
            return _each(self.call, arguments, count)
        joint = _joint_of(arguments)
        resolved, tensors = self._find(arguments, count, autocast)
        if not any(part.group for part in resolved.parts):
            return _each(self.call, arguments, count)
        lead = arguments[resolved.leading]
        leading = dict[int, Sequence[int]]()
        computed = []
        for part in resolved.parts:
            if part.group is None:
                (k,) = part.slices
                results = self.call([a.slices(count)[k] for a in arguments])
                results = (results,) if isinstance(results, Tensor) else results
                computed.append((part, [[result] for result in results]))
                continue
            dims = len(part.group.lead.structure.rows)
            for k in part.slices:
                value = lead.value[k] if lead.form == SEPARATE else lead.value
                leading[k] = value.shape[:dims]
            rows = list(map(math.prod, map(leading.__getitem__, part.slices)))
            computed.append((part, called(part, tensors, count, rows)))
        results = assembled(computed, leading, joint, count)
        if resolved.container == "tensor":
            return results[0]
        return results if resolved.container == "list" else tuple(results)

    def plain(self, values: Sequence[Any], sizes: Sequence[int] | None) -> Any:
        """Return the results of the plain function, called for each slice."""
        arguments, count = arguments_of(self.op, self.names, values, sizes)
        return _each(self.plain_call, arguments, count)

    def explained(
        self, values: Sequence[Any], sizes: Sequence[int] | None, autocast: Any
    ) -> SlicesExplanation:
        """Return the parts of a call."""
        arguments, count = arguments_of(self.op, self.names, values, sizes)
        parts = self._find(arguments, count, autocast)[0].parts
        return SlicesExplanation(self.op, count, parts)

    def _find(
        self, arguments: Sequence[Argument], count: int, autocast: Any
    ) -> tuple[_Resolved, list[Argument]]:
        """Return the resolved call, and its tensors in the order of a program's inputs."""
        first = [_first_of(argument) for argument in arguments]
        looks = self.programs.looks(first)
        key: Any = None
        resolved = None
        try:
            _, state, state_tensors = looks.at(first)
            captured = map(_kind_of, state_tensors)
            of_arguments = [a.key for a in arguments]
            key = autocast, state, *captured, *of_arguments
            resolved = self._calls.get(key)
        except (TypeError, RuntimeError):  # symbolic sizes have no hash
            pass
        if resolved is None:
            resolved = self._resolve(arguments, count, autocast)
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            with contextlib.suppress(TypeError, RuntimeError):
                self._calls[key] = resolved
        tensors = [a for a in arguments if _is_of_tensors(a)]
        if resolved.captured:
            _, _, state_tensors = looks.at(first, resolved.look)
            tensors += [Argument(state_tensors[i], SHARED) for i in resolved.captured]
        return resolved, tensors

    def _match(self, args: Sequence[Any], autocast: Any) -> Match | None:
        """Return the program of a slice; None, after a warning, if it cannot be fused."""
        try:
            return self.programs.find(list(map(_as_argument, args)), autocast)
        except NotRowwiseError as error:
            self.refuse(error)
            return None

    def _resolve(self, arguments: Sequence[Argument], count: int, autocast: Any) -> _Resolved:
        """Return the resolved call of new arguments."""
        _check_lists(self.op, self.names, arguments)
        slices = list(zip(*[a.slices(count) for a in arguments], strict=True))
        if _run_one_by_one(slices):
            return _Resolved()
        matches = [self._match(args, autocast) for args in slices]
        matching = list(filter(None, matches))
        if len({match.captured for match in matching}) != 1:
            return _Resolved()
        first = matching[0]
        _, _, state_tensors = self.programs.looks(slices[0]).at(slices[0], first.look)
        captured = [state_tensors[i] for i in first.captured]
        if any(map(Tensor.is_complex, captured)):
            return _Resolved()
        rows = [_rows_of(m, args, captured) for m, args in zip(matches, slices, strict=True)]
        shared = [Argument(tensor, SHARED) for tensor in captured]
        inputs = [*filter(_is_of_tensors, arguments), *shared]
        programs = [None if match is None else match.program for match in matches]
        is_joint = _joint_of(arguments) is not None
        parts = tuple(parts_of(programs, rows, inputs, is_joint=is_joint))
        lead = next(filter(None, [part.group for part in parts]), None)
        if lead is None:
            return _Resolved(parts)
        by_row = inputs[lead.by_row.index(True)]
        index = next((i for i, argument in enumerate(arguments) if argument is by_row), None)
        if index is None:  # only captured tensors have rows
            return _Resolved()
        container = lead.lead.structure.container
        return _Resolved(parts, first.look, first.captured, index, container)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _first_of(argument: Argument) -> Any:
    """Return an argument of the first slice, or a tensor like it."""
    return argument.value[0] if argument.form == SEPARATE else argument.value


def _as_argument(value: Any) -> Any:
    """Return the number of a symbol from torch.compile, since programs are traced for numbers."""
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, (torch.SymInt, torch.SymBool)) else value


def _is_of_tensors(argument: Argument) -> bool:
    return _is_tensor(_first_of(argument))


def _rows_of(match: Match | None, args: Sequence[Any], captured: Sequence[Tensor]) -> int:
    """Return the number of rows of a slice; 0 without a program."""
    if match is None:
        return 0
    sizes = match.program.sizes_of([*filter(_is_tensor, args), *captured])
    return math.prod(map(sizes.__getitem__, match.program.structure.rows))


def _run_one_by_one(slices: Sequence[Sequence[Any]]) -> bool:
    """Return whether the function is called for each slice, which decides what runs."""
    of_slices = [list(filter(_is_tensor, slice_)) for slice_ in slices]
    tensors: list[Tensor] = list(itertools.chain(*of_slices))
    if not tensors or not launch.runs_kernels(tensors[0].device.type):
        return True
    if all(any(tensor.numel() == 0 for tensor in own) for own in of_slices):
        return True
    return any(_is_unusual(tensor, tensors[0]) for tensor in tensors)


def _is_unusual(tensor: Tensor, first: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) or is_fake(tensor)
    if not is_plain or not is_dense(tensor) or tensor.is_complex():
        return True
    # A slice may be without rows, beside others with rows, but not without columns.
    return tensor.device != first.device or 0 in tensor.shape[-1:]


def _joint_of(arguments: Sequence[Argument]) -> Argument | None:
    """Return the joint argument whose form the results have; None if they are lists.

    That is the argument whose slices have the most dimensions, the first of several.
    """
    rows: Argument | None = None
    for argument in arguments:  # Dynamo traces this, and has no ``max`` with a key
        if argument.form == SHARED or not _is_of_tensors(argument):
            continue
        if rows is None or _dims_of_slice(argument) > _dims_of_slice(rows):
            rows = argument
    return rows if rows is not None and rows.form == JOINT else None


def _dims_of_slice(argument: Argument) -> int:
    tensor: Tensor = _first_of(argument)
    return tensor.dim() - (argument.form == JOINT and argument.dim == -2)


def _each(call: Callable[..., Any], arguments: Sequence[Argument], count: int) -> Any:
    """Return the results of a call for each slice."""
    joint = _joint_of(arguments)
    slices = list(zip(*[a.slices(count) for a in arguments], strict=True))
    return _collected([call(args) for args in slices], joint)


def _collected(results: Sequence[Any], joint: Argument | None) -> Any:
    """Return the results of all slices, of a function that was called for each."""
    if isinstance(results[0], Tensor):
        return list(results) if joint is None else _joined(results, joint)
    if not isinstance(results[0], (list, tuple)):  # what no operator returns
        return list(results)
    columns = [list(values) for values in zip(*results, strict=True)]
    joined = columns if joint is None else [_joined(values, joint) for values in columns]
    return joined if isinstance(results[0], list) else tuple(joined)
