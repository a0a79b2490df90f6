"""Launches of generated kernels.

For each way in which a function is called, a Python function is generated that launches its
kernels. It is flat code, like the launches of kernels that are written by hand, and passes tensors
in the order of the kernels' arguments. Each call looks up a *plan*: the compiled kernels with their
tilings, by alignment and the bucket of the rows::

    call -> site.launches[way of the call] -> run(...) -> plans[alignment, bucket] -> kernels
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.configs import tuning
from ..core.configs.tuning import BUCKET, TuningKey
from ..core.launches import launch
from ..core.optional import present_indices
from ..core.random.rng import State
from . import configs, fallback
from .addresses import EVEN, Spacings
from .axes import Label
from .codegen import backward_kernels, forward_kernels
from .kernel import Kernel
from .launcher import Launch, Launcher
from .site import BackwardKey, LaunchedProgram, RowwiseSite
from .structure import without
from .text import product, tuple_of

__all__ = [
    "PASSES",
    "backward",
    "backward_key",
    "chosen",
    "forward",
    "grouping",
    "kernels_by_pass",
    "kernels_of",
    "prepare",
]

tuning.register(
    configs,
    "rowwise_forward",
    "rowwise_backward",
    "rowwise_moments_forward",
    "rowwise_moments_backward",
)

# The passes of a call, in the order of their launchers.
PASSES = ("forward", "backward")
# Groups of fewer rows are read by index: a program of their own would have too little to do.
_LEAST_ROWS = 16


# Groups of rows share a vector, such as the scale and shift of each image of a batch:
#
#   x        (batch, sequence, columns)      rows are batch and sequence
#   scale    (batch, columns)                a group is the sequence of one image
#
# Axis 1 of the grid is then the groups, so that all rows of a program share their vectors. A
# backward that sums the gradient of a weight of each head over batch and sequence has one group for
# each head, whose rows are not adjacent in memory: see `layouts.groups_of`.


def forward(site: RowwiseSite, tensors: Any, outs: Any, state: State) -> None:
    """Run a forward: one launch, or two for long rows.

    PyTorch's operators run if Triton cannot compile the kernels.
    """
    group = site.program.group_of(tensors)
    run = site.launches.get(group)
    if run is None:
        run = _unfused(site, fallback.forward) or _forward(site, group).build()
        site.launches[group] = run
    try:
        run(tensors, outs, state)
    except launch.NotCompiledError as error:
        site.program.runs_unfused(error)
        run = site.launches[group] = functools.partial(fallback.forward, site)
        run(tensors, outs, state)


def backward(site: RowwiseSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Run a backward: as a forward, with one more launch that adds up sums over rows."""
    key = site.program.backward_key(grads, outs)
    run = site.launches.get(key)
    if run is None:
        run = _unfused(site, fallback.backward) or _backward(site, *key).build()
        site.launches[key] = run
    try:
        run(grads, saved, outs, state)
    except launch.NotCompiledError as error:
        site.program.runs_unfused(error)
        run = site.launches[key] = functools.partial(fallback.backward, site)
        run(grads, saved, outs, state)


def _unfused(site: RowwiseSite, run: Callable[..., None]) -> Launch | None:
    """Return the replacement of launches if rows are too long for kernels, else None."""
    if site.program.is_long:
        return functools.partial(run, site)
    return None


def grouping(program: LaunchedProgram) -> Callable[[Any], Label]:
    """Generate `Program.group_of`: flat code, like all that runs at each call."""
    sizes = {
        axis: f"tensors[{index}].shape[{dim}]" for axis, (_, index, dim) in program.dynamic.items()
    }
    return _function(
        "tensors", _choice(program, dict.fromkeys(filter(None, [program.group]), "True"), sizes)
    )


def backward_key(program: LaunchedProgram) -> Callable[[Any, Any], BackwardKey]:
    """Generate `Program.backward_key`."""
    outputs = range(program.visible)
    inputs = range(len(program.structure.inputs))
    wanted = [f"outs[{i}] is not None" for i in inputs]
    group = "()"
    # The sizes are read from the first cotangent that is not None and has all dynamic axes. The
    # text is nested conditional expressions, which are built from the innermost.
    for output in reversed(outputs):
        dims = program.dims_of(output)
        if not dims.keys() >= program.dynamic.keys():
            continue
        sizes = {axis: f"grads[{output}].shape[{dims[axis]}]" for axis in program.dynamic}
        choice = _group_of_backward(program, wanted, sizes)
        if choice != "()":
            group = f"{choice} if grads[{output}] is not None else {group}"
    dtypes = tuple_of([f"None if grads[{i}] is None else grads[{i}].dtype" for i in outputs])
    return _function("grads, outs", f"({group}, {dtypes}, {tuple_of(wanted)})")


def _group_of_backward(
    program: LaunchedProgram, wanted: Sequence[str], sizes: Mapping[int, str]
) -> str:
    """Return the expression of a backward's groups: those of the forward, or others.

    Other groups are used only if the gradient of one of their inputs is wanted. Otherwise their
    inputs are read by index, as in a forward.

    Args:
        program: the function.
        wanted: for each input, the condition that its gradient is wanted.
        sizes: the expressions of sizes that may change.
    """
    conditions = dict.fromkeys(filter(None, [program.group]), "True")
    for group, inputs in program.groups.items():
        conditions.setdefault(group, " or ".join(map(wanted.__getitem__, inputs)))
    return _choice(program, conditions, sizes)


def _choice(
    program: LaunchedProgram, conditions: Mapping[Label, str], sizes: Mapping[int, str]
) -> str:
    """Return the expression of the first groups whose condition holds and that have many rows."""
    structure = program.structure
    text = "()"
    for group, condition in reversed(list(conditions.items())):
        axes = without(structure.rows, group)
        rows = product([sizes.get(axis, str(structure.sizes[axis])) for axis in axes])
        text = f"({group} if {rows} >= {_LEAST_ROWS} and ({condition}) else {text})"
    return text


def _function(parameters: str, result: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(f"def function({parameters}):\n    return {result}", namespace)
    return namespace["function"]  # type: ignore[no-any-return]


def _forward(site: RowwiseSite, group: Label, spacings: Spacings = EVEN) -> Launcher:
    program = site.program
    kernels = forward_kernels(
        program.plan,
        program.acc,
        group=group,
        tiled=program.tiled,
        saves=site.saves,
        spacings=spacings,
    )
    names = {("input", i): f"tensors[{i}]" for i in range(len(program.structure.inputs))}
    names |= {("output", i): f"outs[{i}]" for i in range(program.count)}
    names |= {("intermediate", 0): f"outs[{program.count}]", ("stats", 0): "outs[-1]"}
    spaced = functools.partial(_forward, site, group)
    return Launcher(site, kernels, names, "tensors, outs, state", (), spacings, spaced)


def _backward(
    site: RowwiseSite,
    group: Label,
    dtypes: Sequence[torch.dtype | None],
    wanted: Sequence[bool],
    spacings: Spacings = EVEN,
) -> Launcher:
    program = site.program
    cotangents = present_indices(dtypes)
    kernels = backward_kernels(
        program.plan,
        program.acc,
        group=group,
        tiled=program.tiled,
        cotangents=cotangents,
        wanted=[i for i, want in enumerate(wanted) if want],
        spacings=spacings,
    )
    names = {("input", i): f"saved[{k}]" for k, i in enumerate(program.plan.saved_inputs)}
    names |= {("intermediate", 0): "saved[-2]", ("stats", 0): "saved[-1]"}
    names |= {("cotangent", i): f"grads[{i}]" for i in cotangents}
    names |= {("gradient", i): f"outs[{i}]" for i in range(len(wanted))}
    spaced = functools.partial(_backward, site, group, dtypes, wanted)
    return Launcher(site, kernels, names, "grads, saved, outs, state", dtypes, spacings, spaced)


def chosen(
    program: LaunchedProgram, device_index: int, tensors: Sequence[Tensor]
) -> list[tuple[TuningKey, launch.Request, int]]:
    """Return the kernels of a call with all gradients, in the order in which they run.

    For each kernel, it returns the tuning key, the request to compile it, and the bytes of a row
    that it reads and writes.
    """
    count = len(program.structure.outputs)
    drops = bool(program.structure.drops)
    kernels = []
    for launcher, bucket in _launchers(
        program, device_index, tensors, program.wanted, [True] * count
    ):
        # The last request, after one for each kernel, is for the reduction.
        requests = launcher.variants.requests(int(drops), bucket)[: len(launcher.kernels)]
        for kernel, request in zip(launcher.kernels, requests, strict=True):
            moved = sum([dtype.itemsize for dtype in kernel.moved]) * program.structure.cols
            kernels.append((launcher.variants.tuning_key(kernel, bucket), request, moved))
    return kernels


def kernels_of(program: LaunchedProgram, tensors: Sequence[Tensor]) -> list[Kernel]:
    """Return the kernels of a call with all gradients, without configs."""
    cotangents = [True] * len(program.structure.outputs)
    return list(itertools.chain(*kernels_by_pass(program, tensors, program.wanted, cotangents)))


def kernels_by_pass(
    program: LaunchedProgram,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    cotangents: Sequence[bool],
) -> list[Sequence[Kernel]]:
    """Return the kernels of a call's forward, and of its backward if there is one.

    The arguments are those of `prepare`.
    """
    launchers = _launchers(program, -1, tensors, wanted, cotangents)
    return [launcher.kernels for launcher, _ in launchers]


def _launchers(
    program: LaunchedProgram,
    device_index: int,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    cotangents: Sequence[bool],
) -> list[tuple[Launcher, int]]:
    """Return the launchers of a call, each with the bucket of its rows.

    There is one for the forward, and one for the backward if a gradient is wanted.
    """
    sizes = program.sizes_of(tensors)
    site = program.site(
        program.record,
        program.dtypes,
        program.structure.cols,
        device_index,
        dropout=bool(program.structure.drops),
        saves=any(wanted),
    )
    launchers = [_forward(site, program.group_of(tensors))]
    if any(wanted):
        outputs = zip(program.structure.outputs, cotangents, strict=True)
        dtypes = [operand.dtype if has_gradient else None for operand, has_gradient in outputs]
        dtypes += [None] * program.own  # the intermediate's
        texts = dict(enumerate(map(str, sizes)))
        group = _function("", _group_of_backward(program, list(map(str, wanted)), texts))()
        launchers.append(_backward(site, group, dtypes, wanted))
    return [
        (launcher.for_inputs(tensors), _bucket(program, sizes, launcher.last.group))
        for launcher in launchers
    ]


def _bucket(program: LaunchedProgram, sizes: Sequence[int], group: Label) -> int:
    """Return the bucket of the number of rows; with groups, of the number of rows in a group."""
    axes = without(program.structure.rows, group)
    return BUCKET[math.prod([sizes[axis] for axis in axes]).bit_length()]


def prepare(
    program: LaunchedProgram,
    device_index: int,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    cotangents: Sequence[bool],
    pass_name: str,
) -> None:
    """Compile the kernels of one pass of a registered operator's call.

    Args:
        program: the function.
        device_index: the GPU's; -1 under the interpreter.
        tensors: tensors of the call's shapes and strides.
        wanted: for each tensor, whether the backward computes its gradient. If it computes none, no
            backward is compiled.
        cotangents: for each output, whether the backward has its gradient.
        pass_name: one of `PASSES`.
    Raises:
        NotCompiledError: Triton cannot compile one.
    """
    if program.is_long:
        return
    drawn = 1 if device_index < 0 else 2  # on a GPU the state is a tensor
    launchers = _launchers(program, device_index, tensors, wanted, cotangents)
    for launcher, bucket in launchers[PASSES.index(pass_name) :][:1]:
        launcher.variants.compile(drawn if program.structure.drops else 0, bucket)
