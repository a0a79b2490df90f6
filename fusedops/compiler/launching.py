"""Launches of generated kernels.

For each way in which a function is called, a Python function is generated that launches its
kernels. It is flat code, like the launches of kernels that are written by hand, and passes tensors
in the order of the kernels' arguments. Each call looks up a *plan*: the compiled kernels with their
tilings, by alignment and the bucket of the rows::

    call -> site.launches[way of the call] -> run(...) -> plans[alignment, bucket] -> kernels
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.configs import tuning
from ..core.configs.tuning import BUCKET, TuningKey, widths
from ..core.launches import launch
from ..core.launches.launch import SEED_TYPES, Variant, pointer_type, vector_width
from ..core.launches.operand import rows as as_rows
from ..core.launches.operand import vector
from ..core.random.rng import State, seed_kind
from . import configs, unfused
from .codegen import Kernel, backward_kernels, forward_kernels, reduce_kernel
from .emitting import Argument, row_layout, unreduced
from .loading import loaded
from .structure import Operand, within, without

if TYPE_CHECKING:
    from .operator import Program, RowwiseSite

__all__ = ["BackwardKey", "backward", "backward_key", "chosen", "forward", "grouping", "prepare"]

tuning.register(
    configs,
    "rowwise_forward",
    "rowwise_backward",
    "rowwise_moments_forward",
    "rowwise_moments_backward",
)

Launch = Callable[..., None]
# Whether the rows are grouped, the dtype of each cotangent, and whether each gradient is wanted.
BackwardKey = tuple[bool, tuple[torch.dtype | None, ...], tuple[bool, ...]]
# Groups of fewer rows are read by index: a program of their own would have too little to do.
_LEAST_ROWS = 16
# Arguments that a launch has once, under the name of their kind.
_SINGLE = ("seed", "offset", "rows", "groups", "programs", "partials")
# How many other configs are tried for a kernel that Triton cannot compile with the chosen one.
_MOST_OTHERS = 3


@dataclass(frozen=True)
class _Plan:
    """The kernels of a call, with their tilings.

    Attributes:
        variants: the kernels.
        rows: each kernel's rows of a tile.
        columns: each kernel's tiles of columns.
        programs: each kernel's most programs, where they sum over rows.
        reduce: the kernel that adds up partial sums over rows.
        reduce_block: the columns of its programs.
    """

    variants: tuple[Variant, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    programs: tuple[int, ...]
    reduce: Variant | None
    reduce_block: int


def forward(site: RowwiseSite, tensors: Any, outs: Any, state: State) -> None:
    """Run a forward: one launch, or two for long rows.

    PyTorch's operators run where Triton cannot compile the kernels.
    """
    grouped = site.program.is_grouped(tensors)
    run = site.launches.get(grouped)
    if run is None:
        run = _unfused(site, unfused.forward) or _forward(site, grouped).build()
        site.launches[grouped] = run
    try:
        run(tensors, outs, state)
    except launch.NotCompiledError as error:
        site.program.runs_unfused(error)
        run = site.launches[grouped] = functools.partial(unfused.forward, site)
        run(tensors, outs, state)


def backward(site: RowwiseSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Run a backward: as a forward, with one more launch that adds up sums over rows."""
    key = site.program.backward_key(grads, outs)
    run = site.launches.get(key)
    if run is None:
        run = _unfused(site, unfused.backward) or _backward(site, *key).build()
        site.launches[key] = run
    try:
        run(grads, saved, outs, state)
    except launch.NotCompiledError as error:
        site.program.runs_unfused(error)
        run = site.launches[key] = functools.partial(unfused.backward, site)
        run(grads, saved, outs, state)


def _unfused(site: RowwiseSite, run: Callable[..., None]) -> Launch | None:
    """Return the replacement of launches where rows are too long for kernels, else None."""
    if site.program.is_long:
        return functools.partial(run, site)
    return None


def grouping(program: Program) -> Callable[[Any], bool]:
    """Generate `Program.is_grouped`: flat code, like all that runs at each call."""
    sizes = {
        axis: f"tensors[{index}].shape[{dim}]" for axis, (_, index, dim) in program.dynamic.items()
    }
    return _function("tensors", _has_many(program, sizes))


def backward_key(program: Program) -> Callable[[Any, Any], BackwardKey]:
    """Generate `Program.backward_key`."""
    outputs, grouped = range(program.visible), "False"
    # The sizes are those of the first cotangent that is not None and has all dynamic axes: nested
    # conditional expressions, built from the innermost.
    for output in reversed(outputs):
        dims = program.dims_of(output)
        if not program.group or not dims.keys() >= program.dynamic.keys():
            continue
        sizes = {axis: f"grads[{output}].shape[{dims[axis]}]" for axis in program.dynamic}
        many = _has_many(program, sizes)
        grouped = f"{many} if grads[{output}] is not None else {grouped}"
    dtypes = [f"None if grads[{i}] is None else grads[{i}].dtype, " for i in outputs]
    wanted = [f"outs[{i}] is not None, " for i in range(len(program.tensors))]
    return _function("grads, outs", f"({grouped}, ({''.join(dtypes)}), ({''.join(wanted)}))")


def _has_many(program: Program, sizes: dict[int, str]) -> str:
    """Return the condition that each group has many rows, with the sizes that may change."""
    if not program.group:
        return "False"
    structure = program.structure
    axes = without(structure.rows, program.group)
    rows = [sizes.get(axis, str(structure.sizes[axis])) for axis in axes]
    return f"{' * '.join(rows) or '1'} >= {_LEAST_ROWS}"


def _function(parameters: str, result: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(f"def function({parameters}):\n    return {result}", namespace)
    return namespace["function"]  # type: ignore[no-any-return]


def _forward(site: RowwiseSite, grouped: bool) -> _Launcher:
    program = site.program
    kernels = forward_kernels(
        program.plan, program.acc, grouped=grouped, tiled=program.tiled, saves=site.saves
    )
    names = {("input", i): f"tensors[{i}]" for i in range(len(program.structure.inputs))}
    names |= {("output", i): f"outs[{i}]" for i in range(program.count)}
    names |= {("intermediate", 0): f"outs[{program.count}]", ("stats", 0): "outs[-1]"}
    return _Launcher(site, kernels, names, "tensors, outs, state", ())


def _backward(
    site: RowwiseSite, grouped: bool, dtypes: Sequence[torch.dtype | None], wanted: Sequence[bool]
) -> _Launcher:
    program = site.program
    given = [i for i, dtype in enumerate(dtypes) if dtype is not None]
    kernels = backward_kernels(
        program.plan,
        program.acc,
        grouped=grouped,
        tiled=program.tiled,
        given=given,
        wanted=[i for i, want in enumerate(wanted) if want],
    )
    names = {("input", i): f"saved[{k}]" for k, i in enumerate(program.plan.saved_inputs)}
    names |= {("intermediate", 0): "saved[-2]", ("stats", 0): "saved[-1]"}
    names |= {("cotangent", i): f"grads[{i}]" for i in given}
    names |= {("gradient", i): f"outs[{i}]" for i in range(len(wanted))}
    return _Launcher(site, kernels, names, "grads, saved, outs, state", dtypes)


def chosen(
    program: Program, device_index: int, tensors: Sequence[Tensor]
) -> list[tuple[TuningKey, launch.Request, int]]:
    """Return the kernels of a call with all gradients, in the order in which they run.

    For each returns its tuning key, the request to compile it, and the bytes of a row that it reads
    and writes.
    """
    count = len(program.structure.outputs)
    launchers, bucket = _launchers(program, device_index, tensors, program.wanted, [True] * count)
    drops = bool(program.structure.drops)
    kernels = []
    for launcher in launchers:
        # The request after those of the kernels is that of the reduction.
        requests = launcher.requests(int(drops), bucket)[: len(launcher.kernels)]
        for kernel, request in zip(launcher.kernels, requests, strict=True):
            moved = sum([dtype.itemsize for dtype in kernel.moved]) * program.structure.cols
            kernels.append((launcher.tuning_key(kernel, bucket), request, moved))
    return kernels


def _launchers(
    program: Program,
    device_index: int,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    given: Sequence[bool],
) -> tuple[list[_Launcher], int]:
    """Return the launchers of a call, and the bucket of its rows.

    There is one of the forward, and one of the backward where a gradient is wanted.
    """
    grouped, sizes = program.is_grouped(tensors), program.sizes_of(tensors)
    axes = without(program.structure.rows, program.group if grouped else ())
    site = program.site(
        program.record(program.op),
        program.dtypes,
        program.structure.cols,
        device_index,
        dropout=bool(program.structure.drops),
        saves=any(wanted),
    )
    launchers = [_forward(site, grouped)]
    if any(wanted):
        outputs = zip(program.structure.outputs, given, strict=True)
        dtypes = [operand.dtype if has_gradient else None for operand, has_gradient in outputs]
        dtypes += [None] * program.own  # the intermediate's
        launchers.append(_backward(site, grouped, dtypes, wanted))
    return launchers, BUCKET[math.prod([sizes[axis] for axis in axes]).bit_length()]


def prepare(
    program: Program,
    device_index: int,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    given: Sequence[bool],
) -> None:
    """Compile the kernels of a registered operator's call.

    Args:
        program: the function.
        device_index: the GPU's; -1 under the interpreter.
        tensors: tensors of the call's shapes.
        wanted: for each tensor, whether the backward computes its gradient; without any no backward
            is compiled.
        given: for each output, whether the backward has its gradient.
    Raises:
        NotCompiledError: Triton cannot compile one.
    """
    if program.is_long:
        return
    launchers, bucket = _launchers(program, device_index, tensors, wanted, given)
    drawn = 1 if device_index < 0 else 2  # on a GPU the state is a tensor
    for launcher in launchers:
        launcher.compile(drawn if program.structure.drops else 0, bucket)


def _other_shape(
    site: RowwiseSite, kind: str, index: int, shape: Sequence[int], expected: Sequence[int]
) -> None:
    raise RuntimeError(
        f"{site.program.op}: {kind} {index} has the shape {tuple(shape)}, "
        f"but its program was made for {expected}"
    )


class _Launcher:
    """Writes the function that launches kernels one after the other.

    Attributes:
        names: from the kind and index of a tensor to its expression in the function's parameters.
        like: a tensor that has all rows, and its index among the outputs.
        last: the last kernel, which has the groups and the sums over rows, if there are any.
    """

    def __init__(
        self,
        site: RowwiseSite,
        kernels: Sequence[Kernel],
        names: dict[tuple[str, int], str],
        parameters: str,
        cotangents: Sequence[torch.dtype | None],
    ) -> None:
        self.site, self.kernels, self.last, self.names = site, kernels, kernels[-1], names
        self.arguments = [argument for kernel in kernels for argument in kernel.arguments]
        self.parameters, self.cotangents = parameters, cotangents
        self.program: Program = site.program
        self.structure = self.program.structure
        self.reduce = reduce_kernel(self.program.plan, self.last) if self.last.sums else None
        output = next((i for i, dtype in enumerate(cotangents) if dtype is not None), 0)
        self.like = names["cotangent" if cotangents else "output", output], output

    def build(self) -> Launch:
        """Compile and return the function."""
        plans: dict[Any, _Plan] = tuning.register_cache({})
        namespace: dict[str, Any] = {
            "as_rows": as_rows,
            "vector": vector,
            "BUCKET": BUCKET,
            "plans": plans,
            "torch": torch,
            "seed_kind": seed_kind,
            "other_shape": _other_shape,
            "make": functools.partial(tuning.plan, plans),
            "build": self._plan,
            "site": self.site,
            "summed": self._summed,
        }
        exec(compile(self.source(), f"<fusedops launch of {self.program.op}>", "exec"), namespace)
        return namespace["run"]  # type: ignore[no-any-return]

    def source(self) -> str:
        """Return the source of the function."""
        like, output = self.like
        lines = [
            "seed, offset, _ = state",
            "kind = 0 if seed is None else seed_kind(offset)",
            "bits = 0",
            f"full = {like}.shape",
            f"rows = {like}.numel() // {self.program.row_size(output)}",
        ]
        tensors = dict.fromkeys((argument.kind, argument.index) for argument in self.arguments)
        # All shapes are checked before any tensor is copied.
        for kind, index in tensors:
            lines += self._check(kind, index)
        for kind, index in tensors:
            lines += self._operand(kind, index)
        if self.last.grouped:
            lines += [f"groups = {self._product(self.program.group)}", "rows //= groups"]
        # The low bits of addresses and strides are collected: the variant for aligned tensors needs
        # multiples of 16.
        lines += [
            "key = (site, kind, bits & 15 == 0, BUCKET[rows.bit_length()])",
            "plan = plans.get(key)",
            "if plan is None:",
            "    plan = make(key, build)",
        ]
        moments = max(kernel.moments for kernel in self.kernels)
        if moments:
            lines.append(f"moments0 = {like}.new_empty({moments}, rows, dtype={self.program.acc})")
        for number in range(len(self.kernels)):
            lines += self._launch(number)
        if self.reduce is not None:
            lines.append(self._launch_of_reduce(self.reduce))
        sizes = "".join([f"{self._size(axis)}, " for axis in range(len(self.structure.sizes))])
        for index in self.last.written:
            out = self.names["gradient", index]
            lines.append(f"summed({index}, gradient{index}, {out}, ({sizes}))")
        return "\n    ".join([f"def run({self.parameters}):", *lines]) + "\n"

    def _launch(self, number: int) -> list[str]:
        """Return the lines that launch a kernel: axis 0 of the grid is tiles of rows."""
        kernel = self.kernels[number]
        lines = [f"programs = -(-rows // plan.rows[{number}])"]
        across, most = "1", f"plan.programs[{number}]"
        if kernel.grouped:
            across = "groups"
        elif kernel.tiled:
            across = f"plan.columns[{number}]"
        # Programs that sum over rows take several tiles of rows each. The limit counts those of
        # both axes.
        if kernel.sums:
            if across != "1":
                most = f"max({most} // {across}, 1)"
            lines.append(f"programs = min(programs, {most})")
            count = "programs * groups" if kernel.grouped else "programs"
            shape = f"{count}, {len(kernel.sums)}, {self.structure.cols}"
            lines.append(f"partials = {self.like[0]}.new_empty({shape}, dtype={self.program.acc})")
        lines.append(f"plan.variants[{number}](programs, {across}, {self._passed(kernel)})")
        return lines

    def _launch_of_reduce(self, reduce: Kernel) -> str:
        """Return the launch of the reduction: tiles of columns, then slots and groups."""
        slots, cols = len(self.last.sums), self.structure.cols
        across = f"{slots} * groups" if self.last.grouped else slots
        return f"plan.reduce(-(-{cols} // plan.reduce_block), {across}, {self._passed(reduce)})"

    def _passed(self, kernel: Kernel) -> str:
        """Return a kernel's arguments in the launch."""
        return ", ".join([self._expression(argument, kernel) for argument in kernel.arguments])

    def _expression(self, argument: Argument, kernel: Kernel) -> str:
        """Return the expression of a kernel's argument."""
        kind, index = argument.kind, argument.index
        if kind == "stride":
            return f"{argument.of}{index}_stride"
        if kind == "size":
            return self._size(index)
        if kind == "threshold":
            return str(self.program.thresholds[index])
        if kind == "gradient" and kernel is self.reduce:
            return self.names[kind, index]
        if kind == "programs" and self.last.grouped:
            return "programs * groups"
        if kind == "chunks":
            return "programs"
        return kind if kind in _SINGLE else f"{kind}{index}"

    # --- operands ---------------------------------------------------------------------------------

    def _operand(self, kind: str, index: int) -> list[str]:
        """Return the lines that make an operand's address, row stride and bits."""
        name = f"{kind}{index}"
        is_read = kind in ("input", "cotangent") or (kind == "intermediate" and self.cotangents)
        if kind == "gradient" and index in self.last.written:
            return [self._unreduced_gradient(index)]
        if kind == "stats" and self.cotangents:
            return [f"{name}, more = vector({self.names[kind, index]})", "bits |= more"]
        if is_read:
            return self._operand_read(kind, index)
        # What is allocated for this call is aligned.
        if kind in ("output", "gradient", "intermediate", "stats"):
            return [f"{name} = {self.names[kind, index]}"]
        return []

    def _unreduced_gradient(self, index: int) -> str:
        """Return the line that allocates a gradient with all rows, which `_summed` sums."""
        operand = self._operand_of("gradient", index)
        labels = unreduced(self.structure, operand, self.program.acc).labels
        shape = ", ".join([self._product(label) for label in labels])
        return f"gradient{index} = {self.like[0]}.new_empty({shape}, dtype={self.program.acc})"

    def _operand_read(self, kind: str, index: int) -> list[str]:
        """Return the lines of an operand that the call's tensors include.

        A tensor with strided rows is read in place if a kernel takes its row stride. Others are
        copied if they are not contiguous.
        """
        name, operand = f"{kind}{index}", self._operand_of(kind, index)
        size = self.program.size_of_row(operand)
        lines = [f"{name}, {name}_stride = {self.names[kind, index]}, {size}"]
        strided = self._has_stride(kind, index)
        # The row stride of a contiguous tensor counts for the alignment, too: rows of a multiple of
        # eight elements are aligned.
        bits = f"more | {size << 1 & 15}" if strided else "more"
        read = [f"{name}, more = vector({name})", f"bits |= {bits}"]
        if kind == "intermediate":  # which may be absent
            return [*lines, *read]
        dims = self._row_dims(operand)
        if strided and dims is not None:
            in_place = f"{name}, {name}_stride, more = as_rows({name}, {dims[0]}, {dims[1]})"
            if row_layout(self.structure, operand, self.last.grouped) == "group":
                # A copy of few vectors costs less than kernels for tensors that are not aligned.
                copied = [f"{name}_stride = {size}", *read]
                read = [in_place, "if more & 15:", *[f"    {line}" for line in copied]]
            else:
                read = [in_place, "bits |= more"]
        # What `as_rows` and `vector` do with nearly all tensors, without a call.
        return [
            *lines,
            f"more = {name}.data_ptr()",
            f"if more and {name}.is_contiguous() and not {name}.is_neg():",
            f"    bits |= {bits}",
            "else:",
            *[f"    {line}" for line in read],
        ]

    def _has_stride(self, kind: str, index: int) -> bool:
        """Whether a kernel has an argument for the row stride of a tensor."""
        key = ("stride", index, kind)
        return any((a.kind, a.index, a.of) == key for a in self.arguments)

    def _check(self, kind: str, index: int) -> list[str]:
        """Return the lines that compare a tensor's shape with the one that the program expects.

        Kernels compute addresses from the expected shape alone.
        """
        name = self.names.get((kind, index))
        if name is None:
            return []
        if kind == "stats":
            sizes = [str(len(self.program.plan.stats)), "rows"]
        else:
            sizes = [self._product(label) for label in self._operand_of(kind, index).labels]
        shape = f"({''.join(f'{size}, ' for size in sizes)})"
        present = f"{name} is not None and " if kind in ("stats", "intermediate") else ""
        return [
            f"if {present}{name}.shape != {shape}:",
            f"    other_shape(site, '{kind}', {index}, {name}.shape, {shape})",
        ]

    def _operand_of(self, kind: str, index: int) -> Operand:
        program = self.program
        if kind in ("input", "gradient"):
            return self.structure.inputs[index]
        if kind != "intermediate":
            return program.operand(index)
        return program.operand(program.count if program.own else program.plan.intermediate_output)

    def _row_dims(self, operand: Operand) -> tuple[int, int] | None:
        """Return the elements and the dimensions of a row, where rows may be strided.

        Returns None where the tensor has to be contiguous: it has no dimension after those of rows,
        or one of its leading dimensions joins rows and other axes.
        """
        labels, rows = operand.labels, set(self.structure.rows)
        leading = len(labels)  # dimensions of rows, and those of one element that follow
        while leading and not rows.intersection(labels[leading - 1]):
            leading -= 1
        while leading < len(labels) and not labels[leading]:
            leading += 1
        are_rows = all(rows.issuperset(label) for label in labels[:leading])
        if leading == len(labels) or not are_rows:
            return None
        return self.program.size_of_row(operand), len(labels) - leading

    def _product(self, axes: Sequence[int]) -> str:
        """Return the number of elements along axes, as an expression."""
        return " * ".join([self._size(axis) for axis in axes]) or "1"

    def _size(self, axis: int) -> str:
        if axis not in self.program.dynamic:
            return str(self.structure.sizes[axis])
        return f"full[{self.program.dims_of(self.like[1])[axis]}]"

    def _summed(self, index: int, gradient: Tensor, out: Tensor, sizes: Sequence[int]) -> None:
        """Sum a gradient over the axes that the input does not have."""
        operand = self.structure.inputs[index]
        axes = unreduced(self.structure, operand, self.program.acc).axes
        summed = [dim for dim, axis in enumerate(axes) if axis not in operand.axes]
        rest = within(axes, operand.axes)
        total = gradient.sum(summed) if summed else gradient
        out.copy_(total.permute([rest.index(axis) for axis in operand.axes]).reshape(out.shape))

    # --- plans ------------------------------------------------------------------------------------

    def _plan(self, site: RowwiseSite, seeded: int, aligned: bool, bucket: int) -> _Plan:
        cols, chosen_configs = self.structure.cols, list[tuning.Config]()
        variants, programs = [], []
        for kernel in self.kernels:
            key = self.tuning_key(kernel, bucket)
            config, variant = self._compiled(site, kernel, seeded, key, aligned)
            variants.append(variant)
            chosen_configs.append(config)
            programs.append(launch.processors(site.device_index) * max(config.per_sm, 1))
        reduce = None
        # A group's rows have few partial sums.
        config = tuning.adding(1 if self.last.grouped else programs[-1], cols)
        if self.reduce is not None:
            reduce = self._variant(site, self.reduce, seeded, {}, config, aligned)
        return _Plan(
            tuple(variants),
            tuple([c.rows for c in chosen_configs]),
            tuple([-(-cols // c.block_n) for c in chosen_configs]),
            tuple(programs),
            reduce,
            config.block_n,
        )

    def _compiled(
        self, site: RowwiseSite, kernel: Kernel, seeded: int, key: TuningKey, aligned: bool
    ) -> tuple[tuning.Config, Variant]:
        """Compile a kernel with its config, or with another if Triton cannot with that."""
        config = tuning.choose(key, site.device_index)
        try:
            return config, self._with_config(site, kernel, seeded, config, aligned)
        except launch.NotCompiledError:
            if tuning.forces():
                raise
            others = [near for near in configs.candidates(key) if near.warps != config.warps]
            for other in others[:_MOST_OTHERS]:
                with contextlib.suppress(launch.NotCompiledError):
                    return other, self._with_config(site, kernel, seeded, other, aligned)
            raise

    def _with_config(
        self, site: RowwiseSite, kernel: Kernel, seeded: int, config: tuning.Config, aligned: bool
    ) -> Variant:
        vector = vector_width(*(kernel.moved or (self.program.acc,)))
        # A thread with fewer adjacent elements would exchange the dropout mask with another.
        elements = config.block_n * config.rows // (32 * config.warps)
        constants = {"VECTOR": vector if elements >= vector else 4, "PERSISTENT": bool(kernel.sums)}
        return self._variant(site, kernel, seeded, constants, config, aligned)

    def compile(self, seeded: int, bucket: int) -> None:
        """Compile the kernels for contiguous tensors as PyTorch allocates them.

        Later calls get them from the cache.
        """
        strided = [argument for argument in self.arguments if argument.kind == "stride"]
        operands = [self._operand_of(argument.of, argument.index) for argument in strided]
        aligned = all(self.program.size_of_row(operand) % 8 == 0 for operand in operands)
        self._plan(self.site, seeded, aligned, bucket)

    def requests(self, seeded: int, bucket: int) -> list[launch.Request]:
        """Return the requests to compile the kernels, and the reduction, for aligned tensors."""
        with launch.collecting() as requests:
            self._plan(self.site, seeded, True, bucket)
        return requests

    def _variant(
        self,
        site: RowwiseSite,
        kernel: Kernel,
        seeded: int,
        constants: dict[str, Any],
        config: tuning.Config,
        aligned: bool,
    ) -> Variant:
        types = {argument.name: self._type(argument) for argument in kernel.arguments}
        for name in ("seed", "offset"):
            if name in types:
                types[name] = SEED_TYPES[seeded][name]
        function = loaded(self.program.op, self.program.digest, kernel.source, kernel.name)
        return launch.build(
            function,
            types,
            constants,
            config,
            device_index=site.device_index,
            acc=self.program.acc,
            cols=self.structure.cols,
            aligned=aligned,
        )

    def tuning_key(self, kernel: Kernel, bucket: int) -> TuningKey:
        """Return the properties of a kernel on which its choice of config depends."""
        moved = kernel.moved or (self.program.acc,)
        layout = "rows"
        if kernel.tiled:
            layout = "tiles"
        elif kernel.grouped:
            layout = "groups"
        direction = "backward" if self.cotangents else "forward"
        is_moments = kernel.name.endswith("moments_kernel")
        variant = (
            layout,
            f"{len(kernel.sums)} sums",
            f"{self.structure.parts_of_row} parts",
            f"{len(moved)} moved",
            self.program.digest,
        )
        return TuningKey(
            f"rowwise_moments_{direction}" if is_moments else f"rowwise_{direction}",
            variant,
            widths(*sorted({dtype.itemsize for dtype in moved})),
            self.structure.cols,
            bucket,
        )

    def _type(self, argument: Argument) -> str | None:
        """Return Triton's type of an argument; None for a tensor that is absent."""
        kind, index = argument.kind, argument.index
        if kind in ("stats", "moments", "partials"):
            return pointer_type(self.program.acc)
        if kind == "cotangent":
            return pointer_type(self.cotangents[index])
        if kind == "gradient" and index in self.last.written:
            return pointer_type(self.program.acc)
        if kind in ("input", "output", "intermediate", "gradient"):
            return pointer_type(self._operand_of(kind, index).dtype)
        if kind in ("threshold", "chunks", "programs"):
            return "i32"
        return "i64"
