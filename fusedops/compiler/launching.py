"""From tensors to launches of generated kernels.

For each way in which a function is called a Python function is generated that launches its kernels: flat code, as a
family's launches are by hand, with the tensors in the places where the kernels take them. What is looked up in each call
is a *plan*: the compiled kernels with their tilings, by alignment and the bucket of the rows.
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

from ..core import launch, tuning
from ..core.launch import SEED_TYPES, Variant, pointer_type, vector_width
from ..core.operand import rows as as_rows
from ..core.operand import vector
from ..core.rng import State, seed_kind
from ..core.tuning import BUCKET, TuningKey, widths
from . import configs, unfused
from .codegen import Kernel, backward_kernels, forward_kernels, reduce_kernel
from .emitting import Argument, place_of, whole
from .loading import loaded
from .structure import Operand

if TYPE_CHECKING:
    from .operator import Program, RowwiseSite

__all__ = ["BackwardKey", "backward", "backward_key", "chosen", "forward", "grouping", "prepare"]

tuning.register(configs, "rowwise_forward", "rowwise_backward", "rowwise_moments_forward", "rowwise_moments_backward")

Launch = Callable[..., None]
# Whether the rows are grouped, the dtype of each cotangent, and whether each gradient is wanted.
BackwardKey = tuple[bool, tuple[torch.dtype | None, ...], tuple[bool, ...]]
# Groups of fewer rows are read by index: a program of their own would have too little to do.
_LEAST_ROWS = 16
# Configs that are tried for a kernel that Triton cannot compile with the chosen one.
_MOST_OTHERS = 3


@dataclass(frozen=True)
class _Plan:
    """The kernels of a call, with what each program takes of it.

    Attributes:
        variants: the kernels.
        rows: of a tile of each.
        columns: tiles of columns of each.
        programs: at most, of each that sums over rows.
        reduce: adds up sums over rows.
        reduce_block: the columns of its programs.
    """

    variants: tuple[Variant, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    programs: tuple[int, ...]
    reduce: Variant | None
    reduce_block: int


def forward(site: RowwiseSite, tensors: Any, outs: Any, state: State) -> None:
    """One launch, of long rows two; PyTorch's operators where Triton cannot compile the kernels."""
    grouped = site.program.is_grouped(tensors)
    run = site.launches.get(grouped)
    if run is None:
        run = site.launches[grouped] = _unfused(site, unfused.forward) or _forward(site, grouped).made()
    try:
        run(tensors, outs, state)
    except launch.NotCompiledError as error:
        site.program.runs_unfused(error)
        run = site.launches[grouped] = functools.partial(unfused.forward, site)
        run(tensors, outs, state)


def backward(site: RowwiseSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """One launch, of long rows two, and for sums over rows one more that adds their parts."""
    key = site.program.backward_key(grads, outs)
    run = site.launches.get(key)
    if run is None:
        run = site.launches[key] = _unfused(site, unfused.backward) or _backward(site, *key).made()
    try:
        run(grads, saved, outs, state)
    except launch.NotCompiledError as error:
        site.program.runs_unfused(error)
        run = site.launches[key] = functools.partial(unfused.backward, site)
        run(grads, saved, outs, state)


def _unfused(site: RowwiseSite, run: Callable[..., None]) -> Launch | None:
    """What runs in the place of launches where rows are too long for kernels; None where they are not."""
    return functools.partial(run, site) if site.program.is_long else None


def grouping(program: Program) -> Callable[[Any], bool]:
    """See `Program.is_grouped`. Flat code, as all that is run at each call."""
    sizes = {axis: f"tensors[{place}].shape[{dim}]" for axis, (_, place, dim) in program.dynamic.items()}
    return _function("tensors", _has_many(program, sizes))


def backward_key(program: Program) -> Callable[[Any, Any], BackwardKey]:
    """See `Program.backward_key`."""
    outputs, grouped = range(program.visible), "False"
    for output in reversed(outputs):
        dims = program.dims_of(output)
        if program.group and dims.keys() >= program.dynamic.keys():
            many = _has_many(program, {axis: f"grads[{output}].shape[{dims[axis]}]" for axis in program.dynamic})
            grouped = f"{many} if grads[{output}] is not None else {grouped}"
    dtypes = "".join([f"None if grads[{output}] is None else grads[{output}].dtype, " for output in outputs])
    wanted = "".join([f"outs[{place}] is not None, " for place in range(len(program.tensors))])
    return _function("grads, outs", f"({grouped}, ({dtypes}), ({wanted}))")


def _has_many(program: Program, sizes: dict[int, str]) -> str:
    """Whether each group has many rows, as an expression of the sizes that may change."""
    if not program.group:
        return "False"
    rows = [sizes.get(axis, str(program.structure.sizes[axis])) for axis in program.structure.rows
            if axis not in program.group]  # fmt: skip
    return f"{' * '.join(rows) or '1'} >= {_LEAST_ROWS}"


def _function(parameters: str, result: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(f"def function({parameters}):\n    return {result}", namespace)
    return namespace["function"]  # type: ignore[no-any-return]


def _forward(site: RowwiseSite, grouped: bool) -> _Launcher:
    program = site.program
    kernels = forward_kernels(program.plan, program.acc, grouped=grouped, tiled=program.tiled, saves=site.saves)
    names = {("input", i): f"tensors[{i}]" for i in range(len(program.structure.inputs))}
    names |= {("output", i): f"outs[{i}]" for i in range(program.count)}
    names |= {("intermediate", 0): f"outs[{program.count}]", ("stats", 0): "outs[-1]"}
    return _Launcher(site, kernels, names, "tensors, outs, state", ())


def _backward(
    site: RowwiseSite, grouped: bool, dtypes: Sequence[torch.dtype | None], wanted: Sequence[bool]
) -> _Launcher:
    program = site.program
    given = [i for i, dtype in enumerate(dtypes) if dtype is not None]
    kernels = backward_kernels(program.plan, program.acc, grouped=grouped, tiled=program.tiled, given=given,
                               wanted=[i for i, want in enumerate(wanted) if want])  # fmt: skip
    names = {("input", i): f"saved[{at}]" for at, i in enumerate(program.plan.saved_inputs)}
    names |= {("intermediate", 0): "saved[-2]", ("stats", 0): "saved[-1]"}
    names |= {("cotangent", i): f"grads[{i}]" for i in given}
    names |= {("gradient", i): f"outs[{i}]" for i in range(len(wanted))}
    return _Launcher(site, kernels, names, "grads, saved, outs, state", dtypes)


def chosen(
    program: Program, device_index: int, tensors: Sequence[Tensor]
) -> list[tuple[TuningKey, launch.Request, int]]:
    """The kernels of a call with all gradients, in the order in which they run.

    Of each its tuning key, what is compiled, and the bytes of a row that it reads and writes.
    """
    count = len(program.structure.outputs)
    launchers, bucket = _launchers(program, device_index, tensors, program.wanted, [True] * count)
    drops = bool(program.structure.drops)
    found = []
    for launcher in launchers:
        requests = launcher.requests(int(drops), bucket)
        for kernel, request in zip(launcher.kernels, requests[: len(launcher.kernels)], strict=True):
            moved = sum([dtype.itemsize for dtype in kernel.moved]) * program.structure.cols
            found.append((launcher.tuning_key(kernel, bucket), request, moved))
    return found


def _launchers(program: Program, device_index: int, tensors: Sequence[Tensor], wanted: Sequence[bool],
               given: Sequence[bool]) -> tuple[list[_Launcher], int]:  # fmt: skip
    """Of a call's forward, and of its backward where a gradient is wanted; and the bucket of its rows."""
    grouped, sizes = program.is_grouped(tensors), program.sizes_of(tensors)
    axes = [axis for axis in program.structure.rows if not grouped or axis not in program.group]
    site = program.site(program.record(program.op), program.dtypes, program.structure.cols, device_index,
                        dropout=bool(program.structure.drops), saves=any(wanted))  # fmt: skip
    launchers = [_forward(site, grouped)]
    if any(wanted):
        outputs = zip(program.structure.outputs, given, strict=True)
        dtypes = [operand.dtype if has else None for operand, has in outputs] + [None] * program.own
        launchers.append(_backward(site, grouped, dtypes, wanted))
    return launchers, BUCKET[math.prod([sizes[axis] for axis in axes]).bit_length()]


def prepare(program: Program, device_index: int, tensors: Sequence[Tensor], wanted: Sequence[bool],
            given: Sequence[bool]) -> None:  # fmt: skip
    """Compiles the kernels of a registered operator's call.

    Args:
        program: the function.
        device_index: the GPU's; -1 under the interpreter.
        tensors: of the call's shapes.
        wanted: of each tensor, whether the backward finds a gradient; none is compiled where it finds none.
        given: of each output, whether the backward is given its gradient.
    Raises:
        NotCompiledError: Triton cannot compile one.
    """
    if program.is_long:
        return
    launchers, bucket = _launchers(program, device_index, tensors, wanted, given)
    drawn = 1 if device_index < 0 else 2  # on a GPU the state is a tensor
    for launcher in launchers:
        launcher.compile(drawn if program.structure.drops else 0, bucket)


def _other_shape(site: RowwiseSite, kind: str, place: int, shape: Sequence[int], made_for: Sequence[int]) -> None:
    raise RuntimeError(
        f"{site.program.op}: {kind} {place} has the shape {tuple(shape)}, but its program was made for {made_for}"
    )


class _Launcher:
    """Writes the function that launches kernels one after the other.

    Attributes:
        names: of tensors by kind and place, as the function finds them among its parameters.
        like: a tensor that has all rows, and its place among the outputs.
    """

    def __init__(self, site: RowwiseSite, kernels: Sequence[Kernel], names: dict[tuple[str, int], str], parameters: str,
                 cotangents: Sequence[torch.dtype | None]) -> None:  # fmt: skip
        self.site, self.kernels, self.last, self.names = site, kernels, kernels[-1], names
        self.parameters, self.cotangents = parameters, cotangents
        self.program: Program = site.program
        self.structure = self.program.structure
        self.reduce = reduce_kernel(self.program.plan, self.last) if self.last.sums else None
        output = next((i for i, dtype in enumerate(cotangents) if dtype is not None), 0)
        self.like = names["cotangent" if cotangents else "output", output], output

    def made(self) -> Launch:
        """The function."""
        plans: dict[Any, _Plan] = tuning.register_cache({})
        namespace: dict[str, Any] = {"as_rows": as_rows, "vector": vector, "BUCKET": BUCKET, "plans": plans, "torch": torch,
                                     "seed_kind": seed_kind, "other_shape": _other_shape,
                                     "make": functools.partial(tuning.plan, plans), "build": self._plan, "site": self.site,
                                     "summed": self._summed}  # fmt: skip
        exec(compile(self.source(), f"<fusedops launch of {self.program.op}>", "exec"), namespace)
        return namespace["run"]  # type: ignore[no-any-return]

    def source(self) -> str:
        """Of the function."""
        like, output = self.like
        lines = ["seed, offset, _ = state", "kind = 0 if seed is None else seed_kind(offset)", "bits = 0",
                 f"full = {like}.shape", f"rows = {like}.numel() // {self.program.row_size(output)}"]  # fmt: skip
        operands = dict.fromkeys((a.kind, a.place) for kernel in self.kernels for a in kernel.arguments)
        lines += [line for kind, place in operands for line in self._check(kind, place)]
        for kind, place in operands:
            lines += self._operand(kind, place)
        if self.last.grouped:
            lines += [f"groups = {self._product(self.program.group)}", "rows //= groups"]
        lines += ["key = (site, kind, bits & 15 == 0, BUCKET[rows.bit_length()])", "plan = plans.get(key)",
                  "if plan is None:", "    plan = make(key, build)"]  # fmt: skip
        moments = max(kernel.moments for kernel in self.kernels)
        if moments:
            lines.append(f"moments0 = {like}.new_empty({moments}, rows, dtype={self.program.acc})")
        for number in range(len(self.kernels)):
            lines += self._launched(number)
        if self.reduce is not None:
            slots, cols = len(self.last.sums), self.structure.cols
            groups = f"{slots} * groups" if self.last.grouped else slots
            lines.append(f"plan.reduce(-(-{cols} // plan.reduce_block), {groups}, {self._called(self.reduce)})")
        sizes = "".join([f"{self._size(axis)}, " for axis in range(len(self.structure.sizes))])
        lines += [
            f"summed({place}, gradient{place}, {self.names['gradient', place]}, ({sizes}))"
            for place in self.last.written
        ]
        return "\n    ".join([f"def run({self.parameters}):", *lines]) + "\n"

    def _launched(self, number: int) -> list[str]:
        """The lines that launch a kernel: axis 0 of the grid is tiles of rows."""
        kernel = self.kernels[number]
        across = "groups" if kernel.grouped else f"plan.columns[{number}]" if kernel.tiled else "1"
        lines = [f"programs = -(-rows // plan.rows[{number}])"]
        if kernel.sums:  # its programs take several tiles of rows each
            most = f"plan.programs[{number}]" if across == "1" else f"max(plan.programs[{number}] // {across}, 1)"
            lines.append(f"programs = min(programs, {most})")
            count = "programs * groups" if kernel.grouped else "programs"
            shape = f"{count}, {len(kernel.sums)}, {self.structure.cols}"
            lines.append(f"partials = {self.like[0]}.new_empty({shape}, dtype={self.program.acc})")
        return [*lines, f"plan.variants[{number}](programs, {across}, {self._called(kernel)})"]

    def _called(self, kernel: Kernel) -> str:
        return ", ".join([self._named(argument, kernel) for argument in kernel.arguments])

    def _named(self, argument: Argument, kernel: Kernel) -> str:
        """What is handed to a kernel for an argument."""
        kind, place = argument.kind, argument.place
        if kind == "stride":
            return f"{argument.of}{place}_stride"
        if kind == "size":
            return self._size(place)
        if kind == "threshold":
            return str(self.program.thresholds[place])
        if kind == "gradient" and kernel is self.reduce:
            return self.names[kind, place]
        if kind == "groups":
            return "groups"
        if kind in ("chunks", "programs"):
            return "programs * groups" if kind == "programs" and self.last.grouped else "programs"
        return kind if kind in ("seed", "offset", "rows", "partials") else f"{kind}{place}"

    # --- operands -----------------------------------------------------------------------------------------------------

    def _operand(self, kind: str, place: int) -> list[str]:
        """The lines that make an operand's address, row stride and bits."""
        name = f"{kind}{place}"
        if kind == "stats" and not self.cotangents:
            return [f"{name} = {self.names[kind, place]}"]
        if kind == "stats":
            return [f"{name}, more = vector({self.names[kind, place]})", "bits |= more"]
        if kind not in ("input", "output", "intermediate", "cotangent", "gradient"):
            return []
        operand = self._operand_of(kind, place)
        if kind == "gradient" and place in self.last.written:
            labels = whole(self.structure, operand, self.program.acc).labels
            shape = ", ".join([self._product(label) for label in labels])
            return [f"{name} = {self.like[0]}.new_empty({shape}, dtype={self.program.acc})"]
        if kind in ("output", "gradient") or (
            kind == "intermediate" and not self.cotangents
        ):  # allocated for this call
            return [f"{name} = {self.names[kind, place]}"]
        how = self._reading(operand)
        strided = any(
            a.kind == "stride" and (a.place, a.of) == (place, kind) for k in self.kernels for a in k.arguments
        )
        size = self.program.size_of_row(operand)
        lines = [f"{name}, {name}_stride = {self.names[kind, place]}, {size}"]
        bits = f"more | {size << 1 & 15}" if strided else "more"  # of a contiguous tensor
        read = [f"{name}, more = vector({name})", f"bits |= {bits}"]
        if kind == "intermediate":  # which may be absent
            return [*lines, *read]
        if strided and how is not None:
            in_place = f"{name}, {name}_stride, more = as_rows({name}, {how[0]}, {how[1]})"
            if place_of(self.structure, operand, self.last.grouped) == "group":
                # A copy of few vectors costs less than kernels for tensors that are not aligned.
                copied = [f"{name}_stride = {size}", *read]
                read = [in_place, "if more & 15:", *[f"    {line}" for line in copied]]
            else:
                read = [in_place, "bits |= more"]
        # What `as_rows` and `vector` do with nearly all tensors, without a call.
        return [*lines, f"more = {name}.data_ptr()", f"if more and {name}.is_contiguous() and not {name}.is_neg():",
                f"    bits |= {bits}", "else:", *[f"    {line}" for line in read]]  # fmt: skip

    def _check(self, kind: str, place: int) -> list[str]:
        """The lines that compare a tensor's shape with what the program was made for: kernels write by that alone."""
        name = self.names.get((kind, place))
        if name is None:
            return []
        sizes = [str(len(self.program.plan.stats)), "rows"]
        if kind != "stats":
            sizes = [self._product(label) for label in self._operand_of(kind, place).labels]
        shape = f"({''.join(f'{size}, ' for size in sizes)})"
        given = f"{name} is not None and " if kind in ("stats", "intermediate") else ""
        return [
            f"if {given}{name}.shape != {shape}:",
            f"    other_shape(site, '{kind}', {place}, {name}.shape, {shape})",
        ]

    def _operand_of(self, kind: str, place: int) -> Operand:
        if kind in ("input", "gradient"):
            return self.structure.inputs[place]
        return self.program.operand(self.program.count if kind == "intermediate" and self.program.own else
                                    self.program.plan.intermediate_output if kind == "intermediate" else place)  # fmt: skip

    def _reading(self, operand: Operand) -> tuple[int, int] | None:
        """Elements of a row and its dimensions, where rows may be apart; None where the tensor has to be contiguous."""
        labels, rows = operand.labels, set(self.structure.rows)
        leading = len(labels)  # dimensions of rows, and those of one element that follow
        while leading and not rows.intersection(labels[leading - 1]):
            leading -= 1
        while leading < len(labels) and not labels[leading]:
            leading += 1
        if leading == len(labels) or not all(rows.issuperset(label) for label in labels[:leading]):
            return None
        return self.program.size_of_row(operand), len(labels) - leading

    def _product(self, axes: Sequence[int]) -> str:
        """The number of elements along axes, as an expression."""
        return " * ".join([self._size(axis) for axis in axes]) or "1"

    def _size(self, axis: int) -> str:
        if axis not in self.program.dynamic:
            return str(self.structure.sizes[axis])
        return f"full[{self.program.dims_of(self.like[1])[axis]}]"

    def _summed(self, place: int, gradient: Tensor, out: Tensor, sizes: Sequence[int]) -> None:
        """The sum of a gradient over the rows that the input has not."""
        operand = self.structure.inputs[place]
        axes = whole(self.structure, operand, self.program.acc).axes
        gone = [at for at, axis in enumerate(axes) if axis not in operand.axes]
        rest = [axis for axis in axes if axis in operand.axes]
        total = gradient.sum(gone) if gone else gradient
        out.copy_(total.permute([rest.index(axis) for axis in operand.axes]).reshape(out.shape))

    # --- plans --------------------------------------------------------------------------------------------------------

    def _plan(self, site: RowwiseSite, seeded: int, aligned: bool, bucket: int) -> _Plan:
        cols, chosen = self.structure.cols, list[tuning.Config]()
        variants, programs = [], []
        for kernel in self.kernels:
            key = self.tuning_key(kernel, bucket)
            config, variant = self._compiled(site, kernel, seeded, key, aligned)
            variants.append(variant)
            chosen.append(config)
            programs.append(launch.processors(site.device_index) * max(config.per_sm, 1))
        reduce = None
        # Of the rows of a group there are few parts.
        config = tuning.adding(1 if self.last.grouped else programs[-1], cols)
        if self.reduce is not None:
            reduce = self._built(site, self.reduce, seeded, {}, config, aligned)
        return _Plan(tuple(variants), tuple([c.rows for c in chosen]), tuple([-(-cols // c.block_n) for c in chosen]),
                     tuple(programs), reduce, config.block_n)  # fmt: skip

    def _compiled(self, site: RowwiseSite, kernel: Kernel, seeded: int, key: TuningKey,
                  aligned: bool) -> tuple[tuning.Config, Variant]:  # fmt: skip
        """A kernel with its config, or with another where Triton cannot compile it with that."""
        config = tuning.choose(key, site.device_index)
        try:
            return config, self._with(site, kernel, seeded, config, aligned)
        except launch.NotCompiledError:
            if tuning.forces():
                raise
            for other in [near for near in configs.candidates(key) if near.warps != config.warps][:_MOST_OTHERS]:
                with contextlib.suppress(launch.NotCompiledError):
                    return other, self._with(site, kernel, seeded, other, aligned)
            raise

    def _with(self, site: RowwiseSite, kernel: Kernel, seeded: int, config: tuning.Config, aligned: bool) -> Variant:
        vector = vector_width(*(kernel.moved or (self.program.acc,)))
        # A thread that has fewer neighbours would exchange the mask with another.
        each = config.block_n * config.rows // (32 * config.warps)
        constants = {"VECTOR": vector if each >= vector else 4, "PERSISTENT": bool(kernel.sums)}
        return self._built(site, kernel, seeded, constants, config, aligned)

    def compile(self, seeded: int, bucket: int) -> None:
        """Compiles the kernels for contiguous tensors as PyTorch allocates them, which later calls find."""
        strided = [(argument.of, argument.place) for kernel in self.kernels for argument in kernel.arguments
                   if argument.kind == "stride"]  # fmt: skip
        sizes = [self.program.size_of_row(self._operand_of(*which)) for which in strided]
        self._plan(self.site, seeded, all(size % 8 == 0 for size in sizes), bucket)

    def requests(self, seeded: int, bucket: int) -> list[launch.Request]:
        """What is compiled for aligned tensors: of each kernel, and then of the one that adds partial sums."""
        with launch.collecting() as found:
            self._plan(self.site, seeded, True, bucket)
        return found

    def _built(self, site: RowwiseSite, kernel: Kernel, seeded: int, constants: dict[str, Any], config: tuning.Config,
               aligned: bool) -> Variant:  # fmt: skip
        types: dict[str, str | None] = {argument.name: self._type(argument) for argument in kernel.arguments}
        types |= {name: SEED_TYPES[seeded][name] for name in ("seed", "offset") if name in types}
        found = loaded(self.program.op, self.program.digest, kernel.source, kernel.name)
        return launch.build(found, types, constants, config, device_index=site.device_index, acc=self.program.acc,
                            cols=self.structure.cols, aligned=aligned)  # fmt: skip

    def tuning_key(self, kernel: Kernel, bucket: int) -> TuningKey:
        """What a kernel's choice of config depends on."""
        moved = kernel.moved or (self.program.acc,)
        how = "tiles" if kernel.tiled else "groups" if kernel.grouped else "rows"
        moments = "moments_" if kernel.name.endswith("moments_kernel") else ""
        parts = self.structure.parts_of_row
        variant = (how, f"{len(kernel.sums)} sums", f"{parts} parts", f"{len(moved)} moved", self.program.digest)
        which = f"rowwise_{moments}{'backward' if self.cotangents else 'forward'}"
        return TuningKey(which, variant, widths(*sorted({d.itemsize for d in moved})), self.structure.cols, bucket)

    def _type(self, argument: Argument) -> str | None:
        kind, place = argument.kind, argument.place
        if kind in ("stats", "moments", "partials"):
            return pointer_type(self.program.acc)
        if kind == "cotangent":
            return pointer_type(self.cotangents[place])
        if kind == "gradient" and place in self.last.written:
            return pointer_type(self.program.acc)
        if kind in ("input", "output", "intermediate", "gradient"):
            return pointer_type(self._operand_of(kind, place).dtype)
        return "i32" if kind in ("threshold", "chunks", "programs") else "i64"
