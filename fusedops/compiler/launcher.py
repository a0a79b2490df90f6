"""The generated Python function that launches a call's kernels.

It is flat code, which checks shapes, collects the bits of addresses and strides, looks up the plan,
and passes tensors in the order of the kernels' arguments. For one kernel with a vector it is like::

    def run(tensors, outs, state):
        full = outs[0].shape
        bits = 0
        rows = outs[0].numel() // 64
        if tensors[0].shape != (full[0], 64, ):
            other_shape(site, 'input', 0, tensors[0].shape, (full[0], 64, ))
        ...
        key = (site, 0, bits & 15 == 0, False, 0, BUCKET[rows.bit_length()])
        plan = plans.get(key)
        if plan is None:
            plan = make(key, build)
        programs = -(-rows // plan.rows[0])
        plan.variants[0](programs, 1, input0, input1, output0, input0_stride, rows)

Some tensors have *spaced* rows, which no single stride reaches: for example q in a packed
projection, or the gradient of q in the gradient of the projection. For these there are other
kernels, and another launcher. The function above then calls that launcher's function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.configs import tuning
from ..core.configs.tuning import BUCKET
from ..core.launches.launch import MOST_ALONE
from ..core.launches.operand import Spacing, spacing, spacing_of, spacing_written, vector
from ..core.launches.operand import rows as as_rows
from ..core.launches.streams import plan_of_stream
from ..core.optional import present_indices
from ..core.random.rng import seed_kind
from .addresses import Argument, Spacings
from .axes import Label
from .kernel import Kernel
from .layouts import row_layout, unreduced
from .partials import reduce_kernel
from .site import RowwiseSite
from .structure import Operand, within
from .text import indented, product, tuple_of
from .variants import LaunchPlan, Variants, operand_of

__all__ = ["Launch", "Launcher"]

Launch = Callable[..., None]
# Arguments that a launch has once, under the name of their kind.
_SINGLE = ("seed", "offset", "rows", "groups", "programs", "partials")

# Numbers of rows from here on need 64 bits.
_NARROW = 2**31

# Tensors that may be absent.
_OPTIONAL = ("stats", "intermediate")
# Tensors that a call has, and those that are allocated for it.
_READ = ("input", "cotangent")
_ALLOCATED = ("output", "gradient", "intermediate", "stats")
# Tensors that a backward reads, and does not allocate.
_SAVED = ("input", "cotangent", "intermediate", "stats")
# Tensors whose rows may be spaced, with the function that returns how they are.
_SPACED = {"input": spacing, "cotangent": spacing, "gradient": spacing_written}


def _other_shape(
    site: RowwiseSite, kind: str, index: int, shape: Sequence[int], expected: Sequence[int]
) -> None:
    raise RuntimeError(
        f"{site.program.op}: {kind} {index} has the shape {tuple(shape)}, "
        f"but its program is for {tuple(expected)}"
    )


class Launcher:
    """Writes the function that launches kernels one after the other.

    Attributes:
        names: from the kind and index of a tensor to its expression in the function's parameters.
        like: a tensor that has all rows, and its index among the outputs.
        last: the last kernel, which has the groups and the sums over rows, if there are any.
        variants: compiles the kernels.
        spacings: the spacings of the tensors with spaced rows.
        spaced: returns the launcher for tensors with such spacings.
    """

    def __init__(
        self,
        site: RowwiseSite,
        kernels: Sequence[Kernel],
        names: dict[tuple[str, int], str],
        parameters: str,
        cotangents: Sequence[torch.dtype | None],
        spacings: Spacings,
        spaced: Callable[[Spacings], Launcher],
    ) -> None:
        self.site = site
        self.spacings = spacings
        self.spaced = spaced
        self._spaced_launches: dict[tuple[Spacing | None, ...], Launch] = {}
        self.kernels = kernels
        self.last = kernels[-1]
        self.names = names
        self.arguments = list(itertools.chain(*[kernel.arguments for kernel in kernels]))
        self.parameters = parameters
        self.cotangents = cotangents
        self.program = site.program
        self.structure = self.program.structure
        self.reduce = reduce_kernel(self.program.plan, self.last) if self.last.sums else None
        self.variants = Variants(site, kernels, self.reduce, cotangents)
        # The gradients that may be a part of another tensor, which the caller allocated. Gradients
        # that are sums over rows are never parts.
        gradients = [(a.kind, a.index) for a in self.arguments if a.kind == "gradient"]
        summed = {("gradient", index) for index in (*dict(self.last.sums), *self.last.written)}
        self._unallocated = set() if site.fitted else set(gradients) - summed
        output = next(iter(present_indices(cotangents)), 0)
        self.like = names["cotangent" if cotangents else "output", output], output
        # For tensors whose rows may be spaced: how many dimensions precede those of a row.
        self._leading = self._leading_dims()

    def build(self) -> Launch:
        """Compile and return the function."""
        plans: dict[Any, LaunchPlan] = tuning.register_cache({})
        namespace: dict[str, Any] = {
            "as_rows": as_rows,
            "vector": vector,
            "spacing": spacing,
            "spacing_written": spacing_written,
            "launch_of": self._spaced_launch,
            "BUCKET": BUCKET,
            "plans": plans,
            "torch": torch,
            "seed_kind": seed_kind,
            "other_shape": _other_shape,
            "make": functools.partial(tuning.plan, plans),
            "build": self.variants.plan,
            "of_stream": plan_of_stream,
            "site": self.site,
            "summed": self._summed,
        }
        exec(compile(self.source(), f"<fusedops launch of {self.program.op}>", "exec"), namespace)
        return namespace["run"]  # type: ignore[no-any-return]

    def source(self) -> str:
        """Return the source of the function."""
        like, output = self.like
        lines = [
            "bits = 0",
            f"rows = {like}.numel() // {self.program.row_size(output)}",
        ]
        seeded = "0"
        if self.structure.drops:
            seeded = "kind"
            lines += ["seed, offset, _ = state", "kind = 0 if seed is None else seed_kind(offset)"]
        tensors = dict.fromkeys((argument.kind, argument.index) for argument in self.arguments)
        # All shapes are checked before any tensor is copied.
        for kind, index in tensors:
            lines += self._check(kind, index)
        # Tensors whose rows may be spaced come first. If a tensor's rows are spaced, the other
        # launcher's function is called before any tensor is copied.
        for kind, index in sorted(tensors, key=self._leading.__contains__, reverse=True):
            lines += self._operand(kind, index)
        wide = "False"
        if any(kernel.divides for kernel in self.kernels):
            wide = "wide"
            lines.append(f"wide = rows >= {_NARROW}")
        if self.last.group:
            lines += [f"groups = {self._product(self.last.group)}", "rows //= groups"]
        # The low bits of addresses and strides are collected: the variant for aligned tensors needs
        # multiples of 16.
        lines += [
            f"key = (site, {seeded}, bits & 15 == 0, {wide}, 0, BUCKET[rows.bit_length()])",
            "plan = plans.get(key)",
            "if plan is None:",
            "    plan = make(key, build)",
        ]
        if self.last.exchanged:
            lines += ["if plan.multiprocessors:", "    plan = of_stream(plan, plans, key, build)"]
        moments = max(kernel.moments for kernel in self.kernels)
        if moments:
            lines.append(f"moments0 = {like}.new_empty({moments}, rows, dtype={self.program.acc})")
        for number in range(len(self.kernels)):
            lines += self._launch(number)
        if self.reduce is not None:
            lines.append(self._launch_of_reduce(self.reduce))
        for index in self.last.written:
            out = self.names["gradient", index]
            lines.append(f"summed({index}, gradient{index}, {out})")
        for index in self._copied_gradients():
            out = self.names["gradient", index]
            lines += [
                f"if gradient{index} is not {out}:",
                f"    {out}.copy_(gradient{index})",
            ]
        return self._function(lines)

    def _function(self, lines: Sequence[str]) -> str:
        """Return the function with these lines, after a line for the full shape if they use it."""
        text = "\n".join(indented(lines))
        shape = f"    full = {self.like[0]}.shape\n" if "full" in text else ""
        return f"def run({self.parameters}):\n{shape}{text}\n"

    def _launch(self, number: int) -> list[str]:
        """Return the lines that launch a kernel.

        Axis 0 of the grid is tiles of rows, times the tiles of columns where programs share rows:
        see `program_lines`. Axis 1 is groups.
        """
        kernel = self.kernels[number]
        divisor = self._divisor(number)
        lines = [f"programs = -(-rows // plan.rows[{number}])"]
        if kernel.loops:
            # Programs that sum over rows take several tiles of rows each. The limit is on all
            # programs of the grid, so each group or tile of columns has its share.
            most = f"plan.programs[{number}]"
            if divisor != "1":
                most = f"max({most} // {divisor}, 1)"
            lines.append(f"programs = min(programs, {most})")
        if kernel.sums:
            lines += self._partials(kernel)
        grid = f"programs, {divisor}"
        if not kernel.group:
            grid = "programs, 1" if divisor == "1" else f"programs * {divisor}, 1"
        passed = f"({grid}, {self._passed(kernel)})"
        if kernel.exchanged:
            # One word, or two numbers, for each two sums: see `core.exchange`.
            pairs = -(-kernel.exchanged // 2)
            lines += [
                "exchange0 = None",
                'if plan.exchange != "none":',
                f"    shape = ({pairs} * plan.columns[{number}], rows)",
                'if plan.exchange == "wait":',
                f"    exchange0 = {self.like[0]}.new_zeros(shape, dtype=torch.int64)",
                'elif plan.exchange == "read":',
                f"    exchange0 = {self.like[0]}.new_empty(2, *shape, dtype={self.program.acc})",
                f"    plan.post{passed}",
            ]
        lines.append(f"plan.variants[{number}]{passed}")
        return lines

    def _partials(self, kernel: Kernel) -> list[str]:
        """Return the lines that allocate partial sums over rows.

        One program needs none: then ``partials`` is any tensor, to which nothing is written.
        """
        like, _ = self.like
        size = f"{len(kernel.sums)}, {self.structure.cols}, dtype={self.program.acc}"
        if kernel.group:
            return [f"partials = {like}.new_empty(programs * groups, {size})"]
        return [
            f"if -(-rows // plan.rows[{self.kernels.index(kernel)}]) <= {MOST_ALONE}:",
            "    programs = 1",
            f"partials = {like}",
            "if programs > 1:",
            f"    partials = {like}.new_empty(programs, {size})",
        ]

    def _divisor(self, number: int) -> str:
        """Return the number of groups, or of tiles of columns, as an expression."""
        kernel = self.kernels[number]
        if kernel.group:
            return "groups"
        return f"plan.columns[{number}]" if kernel.tiled or kernel.held else "1"

    def _launch_of_reduce(self, reduce: Kernel) -> str:
        """Return the launch of the reduction: tiles of columns, then slots and groups.

        If one program has all rows, there is nothing to reduce.
        """
        slots = len(self.last.sums)
        across = f"-(-{self.structure.cols} // plan.reduce_block)"
        passed = self._passed(reduce)
        if self.last.group:
            return f"plan.reduce({across}, {slots} * groups, {passed})"
        return f"if programs > 1: plan.reduce({across}, {slots}, {passed})"

    def _passed(self, kernel: Kernel) -> str:
        """Return a kernel's arguments in the launch."""
        return ", ".join([self._expression(argument, kernel) for argument in kernel.arguments])

    def _expression(self, argument: Argument, kernel: Kernel) -> str:
        """Return the expression of a kernel's argument.

        With groups, two arguments of the reduction differ from those of the kernels before it:

            gradient    the caller's tensor, because it has no line of its own in `_operand`
            programs    the programs of all groups; ``chunks`` is the programs of one group
        """
        kind = argument.kind
        index = argument.index
        is_of_reduction = kernel is self.reduce
        if kind == "gradient" and is_of_reduction and self.last.group:
            return self.names[kind, index]
        if kind == "programs" and self.last.group:
            return "programs * groups"
        if kind in _SINGLE:
            return kind
        write = _EXPRESSIONS.get(kind)
        return f"{kind}{index}" if write is None else write(self, argument)

    def _stride(self, argument: Argument) -> str:
        if argument.dim >= 0:
            return f"{argument.of}{argument.index}.stride({argument.dim})"
        return f"{argument.of}{argument.index}_stride"

    def _size_argument(self, argument: Argument) -> str:
        return self._size(argument.index)

    def _threshold(self, argument: Argument) -> str:
        return str(self.program.thresholds[argument.index])

    def _chunks(self, argument: Argument) -> str:
        # The programs of one group, whose partial sums the reduction adds up.
        return "programs"

    # --- operands ---------------------------------------------------------------------------------

    def _operand(self, kind: str, index: int) -> list[str]:
        """Return the lines that make an operand's address, row stride and bits."""
        name = f"{kind}{index}"
        if self._is_unreduced(kind, index):
            return [self._unreduced_gradient(index)]
        if (kind, index) in self._unallocated:
            return self._gradient(index)
        # A backward reads what a forward wrote.
        is_backward = bool(self.cotangents)
        if kind == "stats" and is_backward:
            return [f"{name}, more = vector({self.names[kind, index]})", "bits |= more"]
        read = _READ if not is_backward else (*_READ, "intermediate")
        if kind in read:
            return self._operand_read(kind, index)
        # What is allocated for this call is aligned.
        if kind in _ALLOCATED:
            return [f"{name} = {self.names[kind, index]}"]
        return []

    def _is_unreduced(self, kind: str, index: int) -> bool:
        """Whether the kernels write a gradient with all rows, which `_summed` sums."""
        return kind == "gradient" and index in self.last.written

    def _unreduced_gradient(self, index: int) -> str:
        """Return the line that allocates a gradient with all rows, which `_summed` sums."""
        operand = operand_of(self.program, "gradient", index)
        labels = unreduced(self.structure, operand, self.program.acc).labels
        shape = ", ".join(map(self._product, labels))
        return f"gradient{index} = {self.like[0]}.new_empty({shape}, dtype={self.program.acc})"

    def _gradient(self, index: int) -> list[str]:
        """Return the lines of a gradient that a kernel writes.

        It may be a part of another tensor. If no kernel can write that part, the gradient is copied
        there in the end::

            gradient0 = outs[0]
            if gradient0.is_contiguous():
                bits |= gradient0.data_ptr()
            else:
                gradient0 = torch.empty_like(gradient0, memory_format=torch.contiguous_format)
        """
        if ("gradient", index) in self.spacings:
            return self._spaced_operand("gradient", index)
        name = f"gradient{index}"
        dense = "memory_format=torch.contiguous_format"
        allocation = [f"{name} = torch.empty_like({name}, {dense})"]
        if ("gradient", index) in self._leading:
            allocation = [*self._handover("gradient", index), *allocation]
        return [
            f"{name} = {self.names['gradient', index]}",
            f"if {name}.is_contiguous():",
            f"    bits |= {name}.data_ptr()",
            "else:",
            *indented(allocation),
        ]

    def _copied_gradients(self) -> list[int]:
        """Return the gradients that may have to be copied to the caller's tensors."""
        return sorted(index for _, index in self._unallocated.difference(self.spacings))

    def _operand_read(self, kind: str, index: int) -> list[str]:
        """Return the lines of an operand that the call's tensors include.

        A tensor with strided rows is read in place if a kernel takes its row stride. Others are
        copied if they are not contiguous. For an input of rows of 64 elements the lines are like::

            input0, input0_stride = tensors[0], 64
            more = input0.data_ptr()
            if more and input0.is_contiguous() and not input0.is_neg():
                bits |= more | 0
            else:
                input0, input0_stride, more = as_rows(input0, 64, 1)
                bits |= more
        """
        if (kind, index) in self.spacings:
            return self._spaced_operand(kind, index)
        name = f"{kind}{index}"
        operand = operand_of(self.program, kind, index)
        size = self.program.size_of_row(operand)
        lines = [f"{name}, {name}_stride = {self.names[kind, index]}, {size}"]
        strided = self._has_stride(kind, index)
        # The row stride of a contiguous tensor counts for the alignment, too: rows of a multiple of
        # eight elements are aligned. All are combined in one number; only its low four bits matter:
        #
        #   address of the first row    ....0000  a multiple of 16 bytes
        #   row stride, times two       ....0000  a multiple of 8 elements
        #   bits, of all tensors        ....0000  the variant for aligned tensors is right
        bits = f"more | {size << 1 & 15}" if strided else "more"
        read = [f"{name}, more = vector({name})", f"bits |= {bits}"]
        if kind == "intermediate":  # which may be absent
            return [*lines, *read]
        dims = self._row_dims(operand) if strided else None
        if dims is not None:
            in_place = f"{name}, {name}_stride, more = as_rows({name}, {dims[0]}, {dims[1]})"
            if row_layout(self.structure, operand, self.last.group) == "group":
                # A copy of few vectors costs less than kernels for tensors that are not aligned.
                copied = [f"{name}_stride = {size}", *read]
                read = [in_place, "if more & 15:", *indented(copied)]
            else:
                read = [in_place, "bits |= more"]
        if (kind, index) in self._leading:
            read = [*self._handover(kind, index), *read]
        # What `as_rows` and `vector` do with nearly all tensors, without a call.
        return [
            *lines,
            f"more = {name}.data_ptr()",
            f"if more and {name}.is_contiguous() and not {name}.is_neg():",
            f"    bits |= {bits}",
            "else:",
            *indented(read),
        ]

    # --- rows that no single stride reaches -------------------------------------------------------

    def _leading_dims(self) -> dict[tuple[str, int], int]:
        """Return how many dimensions precede a row's, of tensors whose rows may be spaced.

        In a launcher for spaced rows the result is empty: it copies tensors with other spacings.
        """
        leading: dict[tuple[str, int], int] = {}
        if self.spacings:
            return leading
        for argument in self.arguments:
            kind, index = argument.kind, argument.index
            if kind not in _SPACED or self._is_unreduced(kind, index):
                continue
            operand = operand_of(self.program, kind, index)
            dims = self._dims_of_rows(operand)
            layout = row_layout(self.structure, operand, self.last.group)
            # If rows have one dimension, kernels read any stride without spacings.
            least = 1 if kind == "gradient" else 2
            if layout == "rows" and dims >= least:
                leading[kind, index] = dims
        return leading

    def for_inputs(self, inputs: Sequence[Tensor]) -> Launcher:
        """Return the launcher that serves inputs of these strides, and contiguous cotangents."""
        spacings: dict[tuple[str, int], Spacing] = {}
        for (kind, index), leading in self._leading.items():
            if kind != "input" or inputs[index].is_contiguous():
                continue
            rows = spacing_of(inputs[index].shape, inputs[index].stride(), leading)
            if rows is not None:
                spacings[kind, index] = rows
        return self.spaced(spacings) if spacings else self

    def _handover(self, kind: str, index: int) -> list[str]:
        """Return the lines that call the launch for spaced rows, if this tensor has spaced rows."""
        operands = tuple_of(map(self.names.__getitem__, self._leading))
        spaced = _SPACED[kind].__name__
        return [
            f"if {spaced}({self.names[kind, index]}, {self._leading[kind, index]}) is not None:",
            f"    return launch_of({operands})({self.parameters})",
        ]

    def _spacing(self, name: tuple[str, int], tensor: Tensor) -> Spacing | None:
        """Return how the rows of a tensor in `_leading` are spaced; None if they are not."""
        kind, _ = name
        return _SPACED[kind](tensor, self._leading[name])

    def _spaced_launch(self, tensors: Sequence[Tensor]) -> Launch:
        """Return the launch for these tensors, of `_leading`; some have spaced rows."""
        key = tuple(map(self._spacing, self._leading, tensors))
        launch = self._spaced_launches.get(key)
        if launch is None:
            spacings = zip(self._leading, key, strict=True)
            launcher = self.spaced({name: rows for name, rows in spacings if rows is not None})
            launch = self._spaced_launches[key] = launcher.build()
        return launch

    def _spaced_operand(self, kind: str, index: int) -> list[str]:
        """Return the lines of an operand whose rows are read or written by several strides."""
        name = f"{kind}{index}"
        strides = [f"{name}.stride({last})" for _, last in self.spacings[kind, index]]
        steps = " | ".join(strides) or "0"
        return [
            f"{name} = {self.names[kind, index]}",
            f"bits |= {name}.data_ptr() | ({steps}) << 1",
        ]

    # --- shapes -----------------------------------------------------------------------------------

    def _has_stride(self, kind: str, index: int) -> bool:
        """Whether a kernel has an argument for the row stride of a tensor."""
        keys = {(argument.kind, argument.index, argument.of) for argument in self.arguments}
        return ("stride", index, kind) in keys

    def _check(self, kind: str, index: int) -> list[str]:
        """Return the lines that compare a tensor's shape with the one that the program expects.

        Kernels compute addresses from the expected shape alone. If the inputs' shapes are known to
        fit, the tensors that are allocated for them fit too. But saved tensors are always checked:
        a hook may have returned another tensor, or the tensor may have been resized.
        """
        name = self.names.get((kind, index))
        checked = _SAVED if self.cotangents else ()
        if name is None or (self.site.fitted and kind not in checked):
            return []
        if kind == "stats":
            shape = f"({len(self.program.plan.stats)}, rows)"
        else:
            labels = operand_of(self.program, kind, index).labels
            is_full = labels == self.program.operand(self.like[1]).labels and name != self.like[0]
            shape = "full" if is_full else tuple_of(map(self._product, labels))
        present = f"{name} is not None and " if kind in _OPTIONAL else ""
        return [
            f"if {present}{name}.shape != {shape}:",
            f"    other_shape(site, '{kind}', {index}, {name}.shape, {shape})",
        ]

    # Which tensors may have strided rows, with rows (batch, sequence) and columns of 64:
    #
    #   (batch, sequence, 64)      yes: 64 elements, one dimension
    #   (batch, sequence, 3, 64)   yes: 192 elements, two dimensions
    #   (batch, sequence)          no dimension is left for the elements of a row
    #   (batch * 3, 64)            no: the first dimension joins a row axis and parts

    def _row_dims(self, operand: Operand) -> tuple[int, int] | None:
        """Return the elements and the dimensions of a row, if rows may be strided.

        Returns None if the tensor has to be contiguous: if it has no dimension after those of rows,
        or if one of its leading dimensions joins rows and other axes.
        """
        leading = self._dims_of_rows(operand)
        dims = len(operand.labels) - leading
        if not leading or not dims:
            return None
        return self.program.size_of_row(operand), dims

    def _dims_of_rows(self, operand: Operand) -> int:
        """Return how many dimensions precede a row's; 0 if one joins rows and other axes."""
        labels = operand.labels
        rows = set(self.structure.rows)
        # Dimensions of rows, and following dimensions of one element.
        leading = _last_with(labels, rows) + 1
        while leading < len(labels) and not labels[leading]:
            leading += 1
        are_rows = all(map(rows.issuperset, labels[:leading]))
        return leading if are_rows else 0

    def _product(self, axes: Sequence[int]) -> str:
        """Return the number of elements along axes, as an expression."""
        return product(map(self._size, axes))

    def _size(self, axis: int) -> str:
        if axis not in self.program.dynamic:
            return str(self.structure.sizes[axis])
        return f"full[{self.program.dims_of(self.like[1])[axis]}]"

    def _summed(self, index: int, gradient: Tensor, out: Tensor) -> None:
        """Sum a gradient over the axes that the input does not have.

        The gradient has the axes ``(*rows, *unrolled, *columns)``, each as one dimension: see
        `unreduced`. For rows (batch, sequence) and an input of (sequence, 64)::

            gradient (batch, sequence, 64) -> total (sequence, 64) -> out
        """
        operand = self.structure.inputs[index]
        axes = unreduced(self.structure, operand, self.program.acc).axes
        summed = [dim for dim, axis in enumerate(axes) if axis not in operand.axes]
        remaining = within(axes, operand.axes)
        total = gradient.sum(summed) if summed else gradient
        order = list(map(remaining.index, operand.axes))
        out.copy_(total.permute(order).reshape(out.shape))


def _last_with(labels: Sequence[Label], axes: set[int]) -> int:
    """Return the last dimension that has one of these axes; -1 for none."""
    with_axes = [dim for dim, label in enumerate(labels) if not axes.isdisjoint(label)]
    return max(with_axes, default=-1)


_EXPRESSIONS: dict[str, Callable[[Launcher, Argument], str]] = {
    "stride": Launcher._stride,
    "size": Launcher._size_argument,
    "threshold": Launcher._threshold,
    "chunks": Launcher._chunks,
}
