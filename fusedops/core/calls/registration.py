"""Registration of the operators that torch.compile, dispatch modes and tensor subclasses see.

`define` registers four operators for a family's `Operator`:

    <name>_forward, <name>_backward           return new tensors; Dynamo, FakeTensor, make_fx and
                                              tensor subclasses see these, and the forward has a
                                              derivative
    <name>_forward_out, <name>_backward_out   write into tensors that are arguments, and take all
                                              constants as one string

Where torch.compile functionalises a graph, a call of the first kind is replaced by empty tensors
and a call of the second kind (by `torch.library.register_torch_dispatch`):

    y = forward(x, constants)   ->   y = empty(...); forward_out(x, y, "constants")

So Inductor plans the memory of the outputs, as it does for its own kernels, and its code has less
to do at each call. (Backends without special treatment of such calls copy the outputs.) The graph
also has the copies of tensors that no kernel reads in place, such as transposed ones: see
`in_rows`. Inductor copies as part of the kernel that computes the tensor, or by tiles.

A compiled graph calls an operator through PyTorch's dispatcher. The dispatcher looks for observers
of the call (modes, profilers, transforms), and then calls the implementation, in Python. This costs
several times as much as a launch. So if nothing observes the call, the operator's Python object
calls the implementation directly: see `shortened`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import dispatch
from ..compat.dynamo import is_exporting
from ..compat.fake import Functional, are_functional
from ..launches.operand import has_adjacent_columns
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
    "in_rows",
    "is_planned",
    "shortened",
]

# PyTorch registers no operator with more arguments.
MOST_ARGUMENTS = 64

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = _TENSORS | {type(None), str, int, float, bool}
# Registered operators live as long as their library.
_LIBRARIES: list[torch.library.Library] = []
_DEFINED: dict[str, Operator] = {}


def arguments(op: Operator) -> int:
    """Returns the number of arguments of the operator of `define` that has the most.

    PyTorch's limit is `MOST_ARGUMENTS`.
    """
    # The forward reads its tensors and writes the outputs. The backward reads cotangents and saved
    # tensors, and writes a gradient for each of the forward's tensors.
    tensors, read = len(op.tensors), op.visible + len(op.saved)
    # The operators that return tensors take each constant as an argument: seed, threshold, cols,
    # call, and the numbers; the backward takes ``needs`` too.
    returning = max(tensors + 4, read + 5) + len(op.constants.numbered)
    # The operators that write take outputs, the seed, and all constants as one string.
    writing = tensors + max(len(op.outputs), read) + 2
    return max(returning, writing)


def define(op: Operator) -> None:
    """Registers all operators of ``op``, or none if one cannot be registered.

    With an operator that has no derivative, gradients would silently be lost.

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
    """Returns the operator that `define` registered under a name; None if there is none."""
    return _DEFINED.get(name)


def _define_all(op: Operator, library: torch.library.Library) -> None:
    """Registers the four operators and the derivative.

    For ``count`` tensors, these are the arguments of the forward's two implementations:

        index          0 ... count - 1    count   from count + 1
        forward        tensors            seed    threshold, cols, call, numbers
        forward_out    tensors            seed    outputs, string of constants

    The backward's arguments are in the same order, with ``read`` cotangents and saved tensors in
    place of the tensors, and ``needs`` after the threshold.
    """
    count = len(op.tensors)
    numbers_schema = "".join([f", float {name}" for name in op.constants.numbered])
    forward_constants = f"int threshold, int cols, str call{numbers_schema}"
    backward_constants = f"int threshold, str needs, int cols, str call{numbers_schema}"
    arguments = _schema(op.tensors, op)
    saved_schema = _schema(op.saved, op)
    cotangents, cotangent_count = _cotangents(op)
    read = cotangent_count + len(op.saved)

    # The default -1 stands for no GPU. It is for code that launches nothing, such as `allocate`.
    def forward_site(constants: Sequence[Any], *, dropout: bool, device_index: int = -1) -> Any:
        _, cols, call, *numbers = constants
        return site_from(op, device_index, dropout, cols, call, tuple(numbers))

    def allocate(*args: Any) -> Sequence[Tensor | None]:
        seed, constants = args[count], args[count + 1 :]
        site = forward_site(constants, dropout=seed is not None)
        return op.allocate(site, _flat(op, args[:count]))

    # Cached, because compiled code passes the same strings in every step.
    @functools.lru_cache(maxsize=4096)
    def forward_site_and_threshold(text: str, dropout: bool, device_index: int) -> tuple[Any, int]:
        constants = _constants(text)
        site = forward_site(constants, dropout=dropout, device_index=device_index)
        return site, constants[0]

    def write(*args: Any) -> None:
        tensors: Any = _flat(op, args[:count])
        first, seed = tensors[op.first], args[count]
        if op.is_empty(tensors):  # a rank's shard without elements
            return
        site, threshold = forward_site_and_threshold(args[-1], seed is not None, first.get_device())
        outs = args[count + 1 : -1]
        state = (*rng.kernel_arguments(seed), threshold)
        function.on_device(site, op.forward, tensors, outs, state)

    def backward_site(constants: Sequence[Any], *, dropout: bool, device_index: int = -1) -> Any:
        _, _, cols, call, *numbers = constants
        return site_from(op, device_index, dropout, cols, call, tuple(numbers))

    def allocate_gradients(*args: Any) -> Sequence[Tensor | None]:
        seed, constants = args[read], args[read + 1 :]
        needed = [digit == "1" for digit in constants[1]]
        site = backward_site(constants, dropout=seed is not None)
        saved = _flat(op, args[cotangent_count:read])
        return op.allocate_gradients(site, _grads(op, args), saved, needed)

    @functools.lru_cache(maxsize=4096)
    def backward_site_and_threshold(text: str, dropout: bool, device_index: int) -> tuple[Any, int]:
        constants = _constants(text)
        site = backward_site(constants, dropout=dropout, device_index=device_index)
        return site, constants[0]

    def write_gradients(*args: Any) -> None:
        grads, seed, outs = _grads(op, args), args[read], args[read + 1 : -1]
        cotangents = [grad for grad in grads if grad is not None]
        cotangent = cotangents[0]
        # A rank's shard without elements: its gradients are zeros.
        if not any(map(Tensor.numel, cotangents)):
            _fill_with_zeros(outs)
            return
        site, threshold = backward_site_and_threshold(
            args[-1], seed is not None, cotangent.get_device()
        )
        state = (*rng.kernel_arguments(seed), threshold)
        saved = _flat(op, args[cotangent_count:read])
        function.on_device(site, op.backward, grads, saved, outs, state)

    _define(
        library,
        op,
        f"{op.name}_forward",
        tensors=f"{arguments}, Tensor? seed",
        constants=forward_constants,
        outputs=op.outputs,
        allocate=allocate,
        write=write,
    )
    _define(
        library,
        op,
        f"{op.name}_backward",
        tensors=f"{cotangents}, {saved_schema}, Tensor? seed",
        constants=backward_constants,
        outputs=[f"d{name}" for name in op.gradients or op.tensors],
        allocate=allocate_gradients,
        write=write_gradients,
    )

    _differentiate(op, library, forward_site)
    if op.variadic:
        _define_parts(op, library, f"{arguments}, Tensor? seed, {forward_constants}", forward_site)


def _define_parts(
    op: Operator, library: torch.library.Library, schema: str, site_of: Callable[..., Any]
) -> None:
    """Registers ``<name>_call``, which returns what the caller gets.

    It has no implementation of its own: a tracer sees the operators that it calls.

    Args:
        op: the operator.
        library: where it is registered.
        schema: the arguments, those of the forward.
        site_of: as in `_differentiate`.
    """
    count = len(op.tensors)

    def parts(*args: Any) -> list[Tensor]:
        tensors, seed, constants = _flat(op, args[:count]), args[count], args[count + 1 :]
        site = site_of(constants, dropout=seed is not None)
        outs = function.registered(op, site, tensors, (*_random(seed), constants[0]))
        return [out for out in outs if out is not None]

    library.define(f"{op.name}_call({schema}) -> Tensor[]")
    library.impl(f"{op.name}_call", parts, "CompositeImplicitAutograd")


def _random(seed: Tensor | None) -> Any:
    """Returns a random state without its threshold.

    Without dropout the seed is None. A tracer's tensor is passed on, as its values cannot be read.
    """
    return rng.kernel_arguments(seed) if type(seed) is Tensor else (seed, None)


def _differentiate(
    op: Operator, library: torch.library.Library, site_of: Callable[..., Any]
) -> None:
    """Registers the derivative of the forward.

    Args:
        op: the operator.
        library: where it is registered.
        site_of: a function that returns the site, from the forward's constants, ``dropout``,
            whether the forward draws a mask, and ``device_index``.
    """
    count = len(op.tensors)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, seed, constants = inputs[:count], inputs[count], inputs[count + 1 :]
        tensors = _flat(op, tensors)
        first: Any = tensors[op.first]
        # An eager call of the forward launches the derivative there.
        index = first.get_device()
        site = site_of(constants, dropout=seed is not None, device_index=index)
        outs = present(output, site.outs)
        ctx.save_for_backward(*site.saved((*tensors, *outs, None)), seed)
        ctx.set_materialize_grads(False)
        needs = [t is not None and t.requires_grad for t in tensors]
        function.mark_constant(ctx, op, site, outs[: op.visible], needs)
        ctx.site, ctx.threshold, ctx.without_gradient = site, constants[0], len(inputs) - count

    def derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *saved, seed = ctx.saved_tensors
        site: Site = ctx.site
        # For an absent output the operator returned an empty tensor. Its cotangent is ignored.
        pairs = zip(grads[: op.visible], site.outs, strict=False)
        cotangents = [g if is_output else None for g, is_output in pairs]
        needs = ctx.needs_input_grad[:count]
        if op.variadic:
            needs = (*needs[:-1], *needs[-1])
        results: Any = function.gradients(
            op, site, (*_random(seed), ctx.threshold), saved, cotangents, needs
        )
        if op.variadic:
            results = (*results[: count - 1], list(results[count - 1 :]))
        return (*results, *(None,) * ctx.without_gradient)

    torch.library.register_autograd(
        f"fusedops::{op.name}_forward", derivative, setup_context=setup_context, lib=library
    )


def _fill_with_zeros(gradients: Sequence[Tensor | None]) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def _schema(names: Sequence[str], op: Operator | None = None) -> str:
    """Returns the schema of tensor arguments; with a variadic ``op`` the last one is a list."""
    kinds = ["Tensor?" for _ in names]
    if op is not None and op.variadic:
        kinds[-1] = "Tensor[]"
    return ", ".join([f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)])


def _cotangents(op: Operator) -> tuple[str, int]:
    """Returns the schema of the backward's cotangents, and the number of arguments that it has."""
    if op.variadic:
        return "Tensor?[] grads", 1
    return _schema(tuple([f"d{name}" for name in op.outputs[: op.visible]])), op.visible


def _grads(op: Operator, args: Sequence[Any]) -> Any:
    """Returns the cotangents among the arguments of a backward."""
    return args[0] if op.variadic else args[: op.visible]


def _flat(op: Operator, tensors: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Returns an operator's tensor arguments, those of a list one by one."""
    return (*tensors[:-1], *tensors[-1]) if op.variadic else tuple(tensors)


def _define(
    library: torch.library.Library,
    op: Operator,
    name: str,
    *,
    tensors: str,
    constants: str,
    outputs: Sequence[str],
    allocate: Callable[..., Sequence[Tensor | None]],
    write: Callable[..., None],
) -> None:
    """Registers ``name``, which returns its outputs, and ``name_out``, which writes them.

    Args:
        library: where they are registered.
        op: the family's operator.
        name: the name.
        tensors: the schema of the tensors that are read.
        constants: the schema of the rest.
        outputs: the outputs' names.
        allocate: takes tensors and constants; returns uninitialised outputs, None for those that
            the call does not have.
        write: takes tensors, outputs and a string that `_constants` reads; fills the outputs.
    """
    count = tensors.count(",") + 1
    has_list = "Tensor[]" in tensors
    written = ", ".join([f"Tensor(a{i}!)? {output}" for i, output in enumerate(outputs)])
    returns = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"
    library.define(f"{name}({tensors}, {constants}) -> {returns}")
    library.define(f"{name}_out({tensors}, {written}, str call) -> ()")

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
    if not has_list:
        # A call that bypasses the dispatcher does not increase the version counters of the tensors
        # that it writes. That is safe: they are new, so autograd cannot have saved them before.
        dispatch.replace_call(operator, lambda dispatched: shortened(dispatched, write, read=count))

    def functional(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The operator is recorded unchanged under `torch.export`, because exported programs contain
        # it, and for another tensor subclass, which intercepts it.
        is_kept = kwargs or is_exporting()
        if not is_kept and are_functional(types) and is_planned(args):
            with mode:
                args = (*in_rows(op, args[:count]), *args[count:])
                outs = allocate(*args)
                operator(*args[:count], *outs, as_text(args[count:]))
                return _returned(outs)
        return mode.__torch_dispatch__(itself, types, args, kwargs)

    if Functional is not None:
        torch.library.register_torch_dispatch(
            f"fusedops::{name}", Functional, functional, lib=library
        )


def _returned(outs: Sequence[Tensor | None]) -> Any:
    """Returns what an operator returns for these outputs: an empty tensor for an absent one."""
    if len(outs) == 1:
        return outs[0]
    like = next(out for out in outs if out is not None)
    return tuple([like.new_empty(0) if out is None else out for out in outs])


def in_rows(op: Operator, tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors and lists of tensors, with copies of those that no kernel reads in place.

    Without the copy a launch would copy them, by PyTorch's operator.
    """
    return list(map(functools.partial(_as_read, op), tensors))


def _as_read(op: Operator, t: Any) -> Any:
    if isinstance(t, (list, tuple)):
        return in_rows(op, t)
    is_copied = isinstance(t, Tensor) and op.by_rows and not has_adjacent_columns(t)
    return t.contiguous() if is_copied else t


def is_planned(args: Sequence[Any]) -> bool:
    """Returns whether the compiler is to plan the memory of the outputs: only on GPUs.

    On CPUs kernels run in Triton's interpreter, for tests only. There Inductor's C++ code may read
    an output before the call has written it: when Inductor changes the ranges of a loop, it loses
    the loop's dependency on that write (PyTorch 2.13).
    """
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    return any(isinstance(t, Tensor) and t.is_cuda for t in itertools.chain(*lists))


# The types of constants, by the first letter of the type's name, as in ``i5;f0.5;sword``. Compilers
# print that string as Python and C++ literals: it contains no character that needs an escape.
_READ: dict[str, Callable[[str], Any]] = {"i": int, "f": float, "s": str}


def as_text(constants: Sequence[Any]) -> str:
    """Returns the constants as one string."""
    return ";".join([f"{type(constant).__name__[0]}{constant}" for constant in constants])


def _constants(call: str) -> tuple[Any, ...]:
    """Returns the constants that `as_text` wrote."""
    return tuple([_READ[constant[0]](constant[1:]) for constant in call.split(";")])


# --- calls that bypass the dispatcher -------------------------------------------------------------


def implement(
    library: torch.library.Library,
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    decomposed: bool = False,
) -> None:
    """Registers the implementations of ``fusedops::name``: for all devices, and for tracers.

    Args:
        library: the library that defines the operator.
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
    """Returns a replacement for ``dispatched`` that calls ``function`` directly if it can.

    It can if the dispatcher would do nothing but call ``function``. Two observers cannot be
    queried, so direct calls bypass them: an execution trace without a profiler, and kernels that
    others register for these (private) operators.

    Args:
        dispatched: the call through the dispatcher.
        function: the implementation.
        read: the number of arguments, from the first, that the operator reads. They are inspected;
            the rest are new tensors to write, and constants.
    """
    # Every call evaluates all of these. Local names save attribute look-ups, and one flat function
    # saves calls.
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
                # A tensor without memory, or whose memory holds the negative of its values.
                if type(arg) in _TENSORS and (not arg.data_ptr() or arg.is_neg()):
                    observed = True
        except RuntimeError:
            # No storage: a batched tensor, a tensor that has left its transform, a sparse layout.
            observed = True
        return dispatched(*args) if observed else function(*args)

    return call
