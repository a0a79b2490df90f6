"""Registration of the operators that torch.compile, dispatch modes and tensor subclasses see.

`define` registers four operators for a family's `Operator`:

    <name>_forward, <name>_backward           return new tensors; Dynamo, FakeTensor, make_fx and
                                              tensor subclasses see these, and the forward has a
                                              derivative
    <name>_forward_out, <name>_backward_out   write into tensors that are arguments, and take all
                                              constants as one string

Where torch.compile makes a graph functional, a call of the former becomes empty tensors and a call
of the latter (`torch.library.register_torch_dispatch`):

    y = forward(x, constants)   ->   y = empty(...); forward_out(x, y, "constants")

So Inductor plans the outputs' memory as it plans its own kernels', and its code has less to do at
each call. (Backends without special treatment of such calls copy the outputs.)

A compiled graph calls an operator through the dispatcher, which looks for observers of the call,
and then comes back to Python: within a step that costs several times what a launch costs. Where
there are none, the operator's Python object calls the implementation directly: see `shortened`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import dispatch
from ..compat.dynamo import is_exporting
from ..compat.fake import Functional, are_functional
from ..random import rng
from . import function
from .operator import Operator, Site
from .operators import present, site_from

__all__ = [
    "MOST_ARGUMENTS",
    "arguments",
    "as_text",
    "define",
    "defined",
    "implement",
    "is_planned",
    "shortened",
]

# PyTorch registers no operator with more arguments.
MOST_ARGUMENTS = 64

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = _TENSORS | {type(None), str, int, float, bool}
# A kernel that reads any number of tensors reads a table of their addresses, which outlives the
# call, as memory that a graph tree manages must not.
_UNSAFE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
# Registered operators live as long as their library.
_LIBRARIES: list[torch.library.Library] = []
_DEFINED: dict[str, Operator] = {}


def arguments(op: Operator) -> int:
    """Returns the most arguments that an operator of `define` has, which PyTorch limits.

    The limit is `MOST_ARGUMENTS`.
    """
    # The forward reads its tensors and writes the outputs. The backward reads cotangents and saved
    # tensors, and writes a gradient for each of the forward's tensors.
    tensors, read = len(op.tensors), op.visible + len(op.saved)
    # Besides tensors, operators that return take each constant by itself: seed, threshold, cols and
    # call, the backward ``needs`` too, and the numbers.
    returning = max(tensors + 4, read + 5) + len(op.constants.numbered)
    # Those that write take outputs, the seed, and all constants as one string.
    writing = tensors + max(len(op.outputs), read) + 2
    return max(returning, writing)


def define(op: Operator) -> None:
    """Registers the operators of ``op``, all or none.

    An operator without its derivative would cut gradients.

    Raises:
        RuntimeError: PyTorch refuses one of them.
    """
    library = torch.library.Library("fusedops", "FRAGMENT")
    try:
        _define_all(op, library)
    except BaseException:
        dispatch.undefine(library)
        raise
    _LIBRARIES.append(library)
    _DEFINED[op.name] = op


def defined(name: str) -> Operator | None:
    """Returns the operator of `define` with a name; None if there is none."""
    return _DEFINED.get(name)


def _define_all(op: Operator, library: torch.library.Library) -> None:
    """Registers the four operators and the derivative.

    The arguments of the implementations are, for the forward with ``count`` tensors,

        index     0 ... count - 1    count   then
        returns   tensors            seed    threshold, cols, call, numbers
        writes    tensors            seed    outputs, string of constants

    and likewise for the backward with ``read`` cotangents and saved tensors.
    """
    count = len(op.tensors)
    numbers = "".join([f", float {name}" for name in op.constants.numbered])
    constants = f"int threshold, int cols, str call{numbers}"
    backward_constants = f"int threshold, str needs, int cols, str call{numbers}"
    arguments = _schema(op.tensors, op)
    saved_schema = _schema(op.saved, op)
    cotangents = _schema(tuple([f"d{name}" for name in op.outputs[: op.visible]]))
    read = op.visible + len(op.saved)
    tags = _UNSAFE if op.variadic else ()

    def forward_site(constants: Sequence[Any], dropout: bool, device_index: int) -> Any:
        _, cols, call, *rest = constants
        return site_from(op, device_index, dropout, cols, call, tuple(rest))

    def allocate(*args: Any) -> Sequence[Tensor | None]:
        site = forward_site(args[count + 1 :], args[count] is not None, -1)
        return op.allocate(site, _flat(op, args[:count]))

    # The compiled code passes the same strings in every step: each is read once.
    @functools.lru_cache(maxsize=4096)
    def forward_of(text: str, dropout: bool, device_index: int) -> tuple[Any, int]:
        constants = _constants(text)
        return forward_site(constants, dropout, device_index), constants[0]

    def write(*args: Any) -> None:
        tensors: Any = _flat(op, args[:count])
        first, seed = tensors[op.first], args[count]
        if _is_empty(first, ()):
            return
        site, threshold = forward_of(args[-1], seed is not None, first.get_device())
        outs = args[count + 1 : -1]
        function.on_device(site, op.forward, tensors, outs, (*rng.unpacked(seed), threshold))

    def backward_site(constants: Sequence[Any], dropout: bool, device_index: int) -> Any:
        _, _, cols, call, *rest = constants
        return site_from(op, device_index, dropout, cols, call, tuple(rest))

    def allocate_gradients(*args: Any) -> Sequence[Tensor | None]:
        needed = [digit == "1" for digit in args[read + 2]]
        site = backward_site(args[read + 1 :], args[read] is not None, -1)
        saved = _flat(op, args[op.visible : read])
        return op.allocate_gradients(site, args[: op.visible], saved, needed)

    @functools.lru_cache(maxsize=4096)
    def backward_of(text: str, dropout: bool, device_index: int) -> tuple[Any, int]:
        constants = _constants(text)
        return backward_site(constants, dropout, device_index), constants[0]

    def write_gradients(*args: Any) -> None:
        grads, seed, outs = args[: op.visible], args[read], args[read + 1 : -1]
        cotangent = next(g for g in grads if g is not None)
        if _is_empty(cotangent, outs):
            return
        site, threshold = backward_of(args[-1], seed is not None, cotangent.get_device())
        state = (*rng.unpacked(seed), threshold)
        saved = _flat(op, args[op.visible : read])
        function.on_device(site, op.backward, grads, saved, outs, state)

    _define(
        library,
        f"{op.name}_forward",
        f"{arguments}, Tensor? seed",
        constants,
        op.outputs,
        allocate,
        write,
        tags,
    )
    _define(
        library,
        f"{op.name}_backward",
        f"{cotangents}, {saved_schema}, Tensor? seed",
        backward_constants,
        [f"d{name}" for name in op.tensors],
        allocate_gradients,
        write_gradients,
        tags,
    )

    _differentiate(op, library, forward_site)


def _differentiate(
    op: Operator, library: torch.library.Library, site_of: Callable[[Sequence[Any], bool, int], Any]
) -> None:
    """Gives the forward its derivative.

    Args:
        op: the operator.
        library: where it is registered.
        site_of: returns the site for the forward's constants, whether it draws a mask, and the
            device.
    """
    count = len(op.tensors)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, seed, constants = inputs[:count], inputs[count], inputs[count + 1 :]
        tensors = _flat(op, tensors)
        site = site_of(constants, seed is not None, -1)
        outs = present(output, site.outs)
        ctx.save_for_backward(*site.saved((*tensors, *outs, None)), seed)
        ctx.set_materialize_grads(False)
        needs = [t is not None and t.requires_grad for t in tensors]
        function.mark_constant(ctx, op, site, outs[: op.visible], needs)
        ctx.site, ctx.threshold, ctx.without_gradient = site, constants[0], len(inputs) - count

    def derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *saved, seed = ctx.saved_tensors
        site: Site = ctx.site
        # The values of a tracer's tensor cannot be read; without dropout there is no seed.
        state = rng.unpacked(seed) if type(seed) is Tensor else (seed, None)
        # An output that the call does not have was an empty tensor, whose cotangent means nothing.
        pairs = zip(grads[: op.visible], site.outs, strict=False)
        cotangents = [g if is_output else None for g, is_output in pairs]
        needs = ctx.needs_input_grad[:count]
        if op.variadic:
            needs = (*needs[:-1], *needs[-1])
        results: Any = function.gradients(
            op, site, (*state, ctx.threshold), saved, cotangents, needs
        )
        if op.variadic:
            results = (*results[: count - 1], list(results[count - 1 :]))
        return (*results, *(None,) * ctx.without_gradient)

    torch.library.register_autograd(
        f"fusedops::{op.name}_forward", derivative, setup_context=setup_context, lib=library
    )


def _is_empty(t: Tensor, gradients: Sequence[Tensor | None]) -> bool:
    """Whether a rank's shard has no elements; then makes the gradients zero, the rank's share."""
    if t.numel():
        return False
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()
    return True


def _schema(names: Sequence[str], op: Operator | None = None) -> str:
    """Returns the schema of tensor arguments; with a variadic ``op`` the last one is a list."""
    kinds = ["Tensor?" for _ in names]
    if op is not None and op.variadic:
        kinds[-1] = "Tensor[]"
    return ", ".join([f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)])


def _flat(op: Operator, tensors: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Returns an operator's tensor arguments, those of a list one by one."""
    return (*tensors[:-1], *tensors[-1]) if op.variadic else tuple(tensors)


def _define(
    library: torch.library.Library,
    name: str,
    tensors: str,
    constants: str,
    outputs: Sequence[str],
    allocate: Callable[..., Sequence[Tensor | None]],
    write: Callable[..., None],
    tags: tuple[torch.Tag, ...],
) -> None:
    """Registers ``name``, which returns its outputs, and ``name_out``, which writes them.

    Args:
        library: where they are registered.
        name: the name.
        tensors: the schema of the tensors that are read.
        constants: the schema of the rest.
        outputs: the outputs' names.
        allocate: takes tensors and constants; returns the outputs, uninitialised, each None where
            the call has none.
        write: takes tensors, outputs and a string that `_constants` reads.
        tags: the operators' tags.
    """
    count = tensors.count(",") + 1
    lists = "Tensor[]" in tensors
    written = ", ".join([f"Tensor(a{i}!)? {output}" for i, output in enumerate(outputs)])
    returns = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"
    library.define(f"{name}({tensors}, {constants}) -> {returns}", tags=tags)
    library.define(f"{name}_out({tensors}, {written}, str call) -> ()", tags=tags)

    def fake(*args: Any) -> Any:
        return _returned(allocate(*args))

    def returning(*args: Any) -> Any:
        outs = allocate(*args)
        write(*args[:count], *outs, as_text(args[count:]))
        return _returned(outs)

    library.impl(name, returning, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    library.impl(f"{name}_out", write, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}_out", lambda *_: None, lib=library)
    operator = getattr(torch.ops.fusedops, f"{name}_out").default
    if not lists:
        # A call past the dispatcher does not increase the version counters of the tensors that it
        # writes. It need not: they are new, so that autograd has saved none of them before.
        dispatch.replace_call(operator, lambda dispatched: shortened(dispatched, write, count))

    def functional(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The operator that returns is recorded as it is under `torch.export`, as exported programs
        # contain it, and for arguments of another tensor subclass, which has to see it.
        is_unchanged = kwargs or is_exporting() or not are_functional(types)
        if is_unchanged or not is_planned(args):
            return mode.__torch_dispatch__(itself, types, args, kwargs)
        with mode:
            outs = allocate(*args)
            operator(*args[:count], *outs, as_text(args[count:]))
            return _returned(outs)

    if Functional is not None:
        torch.library.register_torch_dispatch(
            f"fusedops::{name}", Functional, functional, lib=library
        )


def _returned(outs: Sequence[Tensor | None]) -> Any:
    """Returns the outputs as an operator returns them: an absent one is an empty tensor."""
    if len(outs) == 1:
        return outs[0]
    first = next(out for out in outs if out is not None)
    return tuple([first.new_empty(0) if out is None else out for out in outs])


def is_planned(args: Sequence[Any]) -> bool:
    """Whether the compiler is to plan the outputs' memory: on GPUs.

    Elsewhere calls are tests, in Triton's interpreter, and Inductor's C++ code may read an output
    before the call has written it: where it changes a loop's ranges it forgets which writes the
    loop waits for (PyTorch 2.13).
    """
    return any(isinstance(t, Tensor) and t.is_cuda for t in args)


# The types of constants, by their first letter. In the string ``i5;f0.5;sword`` no character is
# special in Python or C++: compilers print it.
_READ: dict[str, Callable[[str], Any]] = {"i": int, "f": float, "s": str}


def as_text(constants: Sequence[Any]) -> str:
    """Returns the constants as one string."""
    return ";".join([f"{type(constant).__name__[0]}{constant}" for constant in constants])


def _constants(call: str) -> tuple[Any, ...]:
    """Returns the constants in a string."""
    return tuple([_READ[constant[0]](constant[1:]) for constant in call.split(";")])


# --- past the dispatcher --------------------------------------------------------------------------


def implement(
    library: torch.library.Library,
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    decomposed: bool = False,
) -> None:
    """Gives the operator ``fusedops::name`` its implementation, for every device, and its fake one.

    Args:
        library: where it is defined.
        name: the operator's name.
        function: the implementation.
        fake: the implementation for tracers.
        decomposed: whether compilers see the implementation's operators instead of this one.
    """
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    if decomposed and Functional is not None:

        def functional(
            mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with mode:
                return function(*args, **(kwargs or {}))

        torch.library.register_torch_dispatch(
            f"fusedops::{name}", Functional, functional, lib=library
        )


def shortened(
    dispatched: Callable[..., Any], function: Callable[..., Any], read: int
) -> Callable[..., Any]:
    """Returns a call of ``function`` where the dispatcher would only call it, else ``dispatched``.

    Two observers cannot be queried, and are missed: an execution trace that is taken without a
    profiler, and kernels that others register for these operators, which are private.

    Args:
        dispatched: the call through the dispatcher.
        function: the implementation.
        read: the number of arguments, from the first, that are read and therefore inspected.
    """
    # Every call evaluates all of these: one flat function, with no attribute to look up.
    modes = dispatch.dispatch_modes
    function_mode = dispatch.function_modes
    transforms = dispatch.transforms
    grad_mode = torch.is_grad_enabled
    profiling = dispatch.profiling
    tracing = dispatch.jit_tracing
    forward_mode = dispatch.in_forward_mode

    def call(*args: Any, **named: Any) -> Any:
        observed = (
            grad_mode()
            or modes()
            or function_mode()
            or transforms()
            or profiling()
            or tracing()
            or forward_mode()
        )
        if observed or named or not _PLAIN.issuperset(map(type, args)):
            return dispatched(*args, **named)
        try:
            for arg in args[:read]:
                # A tensor without memory, or with other numbers in memory than its values.
                if type(arg) in _TENSORS and (not arg.data_ptr() or arg.is_neg()):
                    observed = True
        except RuntimeError:
            # No storage: a batched tensor, a tensor that has left its transform, a sparse layout.
            observed = True
        return dispatched(*args) if observed else function(*args)

    return call
