"""Private names of PyTorch and Triton: what each is for, and what happens where a release lacks it.

Nothing outside this file uses a private name. Without one the library is slower, never wrong, and
imports as before.
"""

from __future__ import annotations

import _thread
import copy
import functools
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "BACKWARD_HOOKS",
    "FORWARD_HOOKS",
    "FSDP",
    "GRID",
    "MODULE_INTERNALS",
    "MODULE_MEMBERS",
    "PRIVATE",
    "STREAM",
    "DirectCall",
    "DispatchMode",
    "Functional",
    "NoDirectCallError",
    "Place",
    "any_autocast_enabled",
    "are_functional",
    "attention_order",
    "below_autograd",
    "capturing",
    "cast_by_autocast",
    "compile_ahead",
    "compiles_ahead",
    "constant_when_traced",
    "contiguous_tangents",
    "current_device",
    "current_stream",
    "current_target",
    "current_tracer",
    "decompositions",
    "default_store",
    "direct_call",
    "dispatch_modes",
    "dtensor",
    "dtensor_spec",
    "fake_mode",
    "fast_apply",
    "forget_compiled",
    "function_modes",
    "gpu_target",
    "has_backward_hooks",
    "has_compiled_call",
    "has_global_hooks",
    "has_own_hooks",
    "hints",
    "in_forward_mode",
    "is_batched",
    "is_compiled",
    "is_distributed",
    "is_exporting",
    "is_fake",
    "is_intercepted",
    "is_recording",
    "jit_tracing",
    "launch_hooks",
    "noticing_autograd_functions",
    "other_threads",
    "overlaps_launches",
    "profiling",
    "quiet",
    "replace_call",
    "replicates_implicitly",
    "rows_placed_by",
    "sharded_class",
    "share_memory",
    "transforms",
    "transforms_when_traced",
    "unflatten",
    "unsharded_class",
    "waited",
    "without_modes",
    "without_transforms",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# --- PyTorch --------------------------------------------------------------------------------------


# The paths in torch that are looked up below:
# ``tests/operators/test_compat.py`` takes each away and compares values.
PRIVATE: list[str] = []


def _find(path: str, default: Any) -> Any:
    """The object at a dotted path in torch, or the default."""
    PRIVATE.append(path)
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return default
    return value


def _sliced(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = buffer.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


# How many dispatch modes are on. Without it every eager call goes through the registered operators:
# slower.
dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 1)

# Whether a function mode is on, whether a profiler runs in this thread or all, and whether
# `torch.jit.trace` records. Without them operators always go through the dispatcher: slower.
function_modes: Callable[[], bool] = _find("_C._is_torch_function_mode_enabled", lambda: True)
jit_tracing: Callable[[], bool] = _find("_C._is_tracing", lambda: True)
_profiling: Callable[[], bool] = _find("_C._autograd._profiler_enabled", lambda: True)


def profiling() -> bool:
    """Whether a profiler runs, in this thread or of all threads."""
    return _profiling() or getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


# Whether a torch.func transform is on. Without it every call runs the reference implementation:
# slower.
transforms: Callable[[], bool] = _find("_C._are_functorch_transforms_active", lambda: True)

# Turns all torch.func transforms off for a block. Without it a draw under vmap is refused by
# PyTorch, with its message.
without_transforms: Callable[[], AbstractContextManager[Any]] = _find(
    "_C._DisableFuncTorch", nullcontext
)

# Views made in the block are no views to autograd. Without it a slice of an output refuses changes
# in place.
below_autograd: Callable[[], AbstractContextManager[Any]] = _find(
    "_C._AutoDispatchBelowADInplaceOrView", nullcontext
)

# Takes a buffer apart into tensors of given shapes, in one call. Without it by a slice for each:
# slower.
unflatten: Callable[[Tensor, list[Tensor]], Sequence[Tensor]] = (
    _find("_C._nn.unflatten_dense_tensors", None) or _sliced
)

# Whether a gradient is a batch in disguise, with no memory to read (``autograd.grad(…,
# is_grads_batched=True)``). Without the private name every backward runs in PyTorch operators:
# slower.
is_batched: Callable[[Tensor], bool] = _find(
    "_C._functorch.is_legacy_batchedtensor", lambda t: True
)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on.

    Without the private name the reference implementation runs: slower.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_intercepted() -> bool:
    """Whether a dispatch mode, a torch.func transform or forward-mode differentiation is on."""
    return dispatch_modes() > 0 or transforms() or getattr(forward_ad, "_current_level", 0) >= 0


class _Applied(threading.local):
    """What this thread calls before it applies an autograd Function: the latest of its blocks."""

    def __init__(self) -> None:
        self.notices: list[Callable[[type], None]] = []


_applied, _lock, _replaced = _Applied(), threading.Lock(), list[Any]()


@contextmanager
def noticing_autograd_functions(notice: Callable[[type], None]) -> Iterator[None]:
    """Calls ``notice`` with each `torch.autograd.Function` of this thread, before it is applied.

    `Function.apply` is replaced meanwhile: from PyTorch 2.15 it has no frame of Python.
    """
    function = torch.autograd.Function
    with _lock:
        original = _replaced[0] if _replaced else vars(function)["apply"]
        _replaced.append(original)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            for noticed in _applied.notices[-1:]:
                noticed(cls)
            return original.__get__(None, cls)(*args, **kwargs)

        function.apply = classmethod(apply)  # type: ignore[assignment]
    _applied.notices.append(notice)
    try:
        yield
    finally:
        _applied.notices.pop()
        with _lock:
            _replaced.pop()
            if not _replaced:
                function.apply = original  # type: ignore[method-assign]


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` outside torch.func, without its checks: 10 µs instead of 15 on a CPU.

    The engine then calls ``function.backward`` itself, not a method that finds out what to call.
    Without the private names `torch.autograd.Function.apply` and that method serve: slower.
    """
    if _find("autograd.function.BackwardCFunction.apply", None) is not None:
        function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    if _find("_C._FunctionBase.apply", None) is None:
        return function.apply
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def is_recording(*tensors: Tensor | None) -> bool:
    """Whether operators are recorded, so that a number drawn now is the same in every run.

    True for fake and functional tensors and while `make_fx` traces; other dispatch modes only
    observe a call. Without the private names only the tensors are looked at, and a traced graph
    repeats its dropout mask.
    """
    if any(isinstance(t, _RECORDED) for t in tensors):
        return True
    return any(_mode(key) is not None for key in _RECORDING_KEYS)


def _recorded_types() -> tuple[type, ...]:
    types = (
        _imported("torch._subclasses.fake_tensor", "FakeTensor"),
        _imported("torch._subclasses.functional_tensor", "FunctionalTensor"),
    )
    return tuple(t for t in types if t is not None)


def _imported(module: str, name: str) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


_RECORDED = _recorded_types()
_mode: Callable[[Any], Any] = _find("_C._get_dispatch_mode", lambda key: None)
_keys = _find("_C._TorchDispatchModeKey", None)
_RECORDING_KEYS = tuple(
    getattr(_keys, name) for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_keys, name)
)

# The mode in which torch.compile makes a graph functional: operators that allocate there become
# operators that write. Without it compiled code calls the former.
Functional: Any = _imported("torch._subclasses.functional_tensor", "FunctionalTensorMode")


def are_functional(types: Iterable[type]) -> bool:
    """Whether these are types of a functional graph, with no tensor subclass among them."""
    return all(t is Tensor or issubclass(t, _RECORDED) for t in types)


def current_tracer() -> Any:
    """The tracer that records operators in this thread; None if there is none, or unknown."""
    get = _imported("torch.fx.experimental.proxy_tensor", "get_proxy_mode")
    mode = get() if get is not None else None
    return None if mode is None else mode.tracer


# The base of modes that see every operator. Without the private name nothing can be traced.
DispatchMode: Any = _imported("torch.utils._python_dispatch", "TorchDispatchMode") or object


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no memory."""
    return bool(_RECORDED) and isinstance(tensor, _RECORDED)


@contextmanager
def quiet() -> Iterator[None]:
    """Raises errors of operators on tensors without memory, and does not log them too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def fake_mode() -> AbstractContextManager[Any]:
    """A mode in which tensors have no memory: only dtypes, devices and shapes are computed."""
    mode: Any = _imported("torch._subclasses.fake_tensor", "FakeTensorMode")
    if mode is None:
        raise RuntimeError(
            "this PyTorch has no tensors without memory, with which functions are traced"
        )
    return mode(allow_non_fake_inputs=True)  # type: ignore[no-any-return]


def hints(shape: Sequence[Any]) -> tuple[int, ...]:
    """Sizes as numbers: a symbol is what it stands for in the traced call. Adds no guard."""
    numbers = [
        size if type(size) is int else getattr(getattr(size, "node", None), "hint", None)
        for size in shape
    ]
    return tuple(
        [
            int(size) if hint is None else int(hint)
            for size, hint in zip(shape, numbers, strict=True)
        ]
    )


def hint_of(symbol: Any, size: Any) -> int:
    """The number that a symbol, or an expression of symbols, stands for in the traced call."""
    environment = size.node.shape_env
    known = getattr(environment, "backed_var_to_val", None) or getattr(
        environment, "var_to_val", {}
    )
    number = symbol.xreplace(known)
    return int(number if number.is_number else size.node.hint)


def settled(size: Any, others: Iterable[Any] = ()) -> Any:
    """A size as a number, or in terms of other sizes, where the graph's guards determine it.

    Such are the rows that a table of positions is added to. Symbols are numbers then already,
    expressions of symbols are not. Without the private name they stay expressions.
    """
    if not isinstance(size, torch.SymInt) or size.node.expr.is_Symbol or not size.node.has_hint():
        return size
    if size.node.expr.xreplace(_guarded(size.node.shape_env)).is_number:
        return size.node.hint
    is_known = _imported("torch.fx.experimental.symbolic_shapes", "statically_known_true")
    return next(
        (
            one
            for one in (size.node.hint, *others)
            if is_known is not None and is_known(size == one)
        ),
        size,
    )


_guarded_in: Any = weakref.WeakKeyDictionary()


def _guarded(environment: Any) -> dict[Any, Any]:
    """Maps an expression of sizes to the one value that the graph's guards leave it.

    What is computed of them has one value, too. Empty without the private name.
    """
    guards = getattr(environment, "guards", ())
    count, values = _guarded_in.get(environment, (0, {}))
    while count < len(guards):
        count, before = len(guards), len(values)
        for guard in guards:
            if getattr(guard.expr, "rel_op", "") == "==":
                constant, rest = (guard.expr.lhs - guard.expr.rhs).xreplace(values).as_coeff_Add()
                factor, unit = rest.as_coeff_Mul()
                if not unit.is_number and (-constant / factor).is_Integer:
                    values[unit] = -constant / factor
        count = count if len(values) == before else 0  # a new value may determine others
    _guarded_in[environment] = count, values
    return values  # type: ignore[no-any-return]


def has_one_value(number: Any) -> bool:
    """Whether a symbolic number depends only on the caller's numbers, which never changed.

    With ``dynamic=True`` Dynamo makes symbols of all numbers, also of the eps of a norm. Of sizes
    it is False, and without the private names.
    """
    environment = number.node.shape_env
    sources = [
        source
        for symbol in number.node.expr.free_symbols
        for source in environment.var_to_sources.get(symbol, [None])
    ]
    states: Any = (_imported("torch._dynamo.pgo", "get_code_state") or dict)()
    names = list(map(_name_of_number, sources))
    seen = [
        [
            state.automatic_dynamic[name].scalar
            for state in states.values()
            if name in state.automatic_dynamic
        ]
        for name in names
    ]
    return all(
        values and all(isinstance(value, (int, float)) for value in values) for values in seen
    )


def fix(numbers: Iterable[Any]) -> None:
    """Makes symbolic numbers constants of Dynamo's graph: it is traced anew if one changes.

    To PyTorch a float that is a constant of one graph is one of all later graphs. Here it becomes a
    symbol again where it has changed, as `has_one_value` then finds.
    """
    for number in numbers:
        _fixed.update([str(symbol) for symbol in number.node.expr.free_symbols])
        number.node.guard_float("", 0) if isinstance(
            number, torch.SymFloat
        ) else number.node.guard_int("", 0)
    handler = _imported("torch._dynamo.callback", "callback_handler")
    if handler is not None and _forget_fixed not in handler.end_callbacks:
        handler.register_end_callback(_forget_fixed)


# The names of symbols that are constants of the graph that is being traced.
_fixed: set[str] = set()


def _forget_fixed(*_: Any) -> None:
    """At the end of a compilation."""
    state = _imported("torch._dynamo.symbolic_convert", "TensorifyState")
    constants: set[str] = getattr(state, "force_specializations", set())
    constants -= _fixed
    _fixed.clear()


def _name_of_number(source: Any) -> str:
    """By which Dynamo knows a number: a float is an item of a tensor to it."""
    while type(source).__name__ in ("CallMethodItemSource", "FloatTensorSource"):
        source = source.base
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether tensors without memory would share it. Without the private name they are said to."""
    return memory_of(one) == memory_of(other)


def memory_of(tensor: Tensor) -> Hashable:
    """An identity of a tensor's memory, also of a fake tensor's.

    Without the private name all tensors have the same.
    """
    return getattr(tensor.untyped_storage(), "_cdata", None)


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """PyTorch's operators in terms of others.

    Without the private name only those that are known are traced.
    """
    table = _imported("torch._decomp", "decomposition_table")
    return {} if table is None else table


def out_of_place(operator: Any) -> Any:
    """The operator that returns what this one writes into its first tensor, or None."""
    name, _, overload = operator.name().partition("::")[2].partition(".")
    return getattr(
        getattr(torch.ops.aten, name.removesuffix("_"), None), overload or "default", None
    )


_has_kernel: Callable[[str, str], bool] = _find(
    "_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)


def cast_by_autocast(operator: str) -> bool:
    """Whether GPU autocast runs PyTorch's ``operator`` in fp32.

    Without the private name its dtypes are left alone.
    """
    try:
        return bool(_has_kernel(operator, "AutocastCUDA"))
    except RuntimeError:  # no such operator
        return False


def constant_when_traced(function: _Function) -> _Function:
    """Makes torch.compile take the function's result as a constant, and not look into it.

    What `torch.compiler.assume_constant_result` does, without the second that its import takes.
    Without the private attribute the function is traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def is_exporting() -> bool:
    """Whether `torch.export` traces.

    PyTorch 2.11 makes its own function True in all that torch.compile traces.
    """
    return torch.compiler.is_exporting()


@contextmanager
def without_modes() -> Iterator[None]:
    """Turns all dispatch modes off for a block.

    Without the private name they see what the block calls.
    """
    disable = _imported("torch.utils._python_dispatch", "_disable_current_modes")
    with disable() if disable is not None else nullcontext():
        yield


def _gradient_at_one(function: Callable[[Tensor], Tensor]) -> float:
    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        return float(torch.autograd.grad(function(x), x)[0])


@functools.cache
def clamp_has_gradients_at_limits() -> bool:
    """Whether an element equal to a limit of `torch.clamp` has a gradient (PyTorch < 2.15)."""
    return _gradient_at_one(lambda x: x.clamp(max=1.0)) == 1.0


@functools.cache
def known_extrema_share_ties() -> bool:
    """Whether equal arguments of `torch.fmax` share the gradient (PyTorch >= 2.15)."""
    return _gradient_at_one(lambda x: torch.fmax(x, torch.ones_like(x))) == 0.5


def may_save_changed_inputs() -> bool:
    """Whether a graph may save an input that it changes: its backward raises (PyTorch < 2.15)."""
    return torch.__version__ < "2.15"


def _public_device() -> int:
    # Without a GPU there is no current device, and `torch.cuda.current_device` would raise.
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


# The index of the current GPU. The public function checks first that CUDA is initialised: slower. A
# build without CUDA has no private one, and no GPU.
current_device: Callable[[], int] = _find("_C._cuda_getDevice", _public_device)

# The handle of a device's current stream, by the device's index. The public way makes an object
# first: slower.
current_stream: Callable[[int], int] = _find(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

# Whether the current stream is captured into a CUDA graph. The public function checks for a GPU
# first: slower.
capturing: Callable[[], bool] = _find(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# How many Python threads there are besides the main one. Without it the public function, which
# takes a lock: slower.
other_threads: Callable[[], int] = getattr(_thread, "_count", lambda: threading.active_count() - 1)

# Whether autocast is on for any device. Without it every call of a fused model asks for its own
# device: slower.
any_autocast_enabled: Callable[[], bool] = _find("_C._is_any_autocast_enabled", lambda: True)


def replace_call(operator: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts ``wrap`` of what a registered operator's Python object calls in its place.

    Without the private attribute nothing changes: compiled code goes through the dispatcher,
    slower.
    """
    if hasattr(operator, "_op"):
        operator._op = wrap(operator._op)


def default_store() -> Any:
    """The key-value store of the default process group.

    Without the private function an AttributeError names it.
    """
    return torch.distributed.distributed_c10d._get_default_store()


# The modules of PyTorch's FSDP, in which classes of wrapped modules are.
FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")
# The classes that `sharded_class` makes, where FSDP's own table is not to be had.
_sharded_classes: dict[type, type] = {}


def unsharded_class(cls: Any) -> Any:
    """The class of a module before `fully_shard` put one of FSDP's in front of it."""
    bases = cls.__bases__
    name = f"{bases[0].__module__}.{bases[0].__name__}"
    return (
        bases[1]
        if len(bases) == 2 and name.startswith(FSDP) and name.endswith(".FSDPModule")
        else cls
    )


def sharded_class(sharded: Any, cls: Any) -> Any:
    """The class that `fully_shard` makes of ``cls``, as it made ``sharded`` of another class.

    It is in FSDP's private table too, of which torch.compile's saved guards read. Without the table
    there is one here.
    """
    table = _imported("torch.distributed.fsdp._fully_shard._fully_shard", "cls_to_fsdp_cls")
    table = _sharded_classes if table is None else table
    table.setdefault(unsharded_class(sharded), sharded)
    if cls not in table:
        body = {
            name: value
            for name, value in vars(sharded).items()
            if name not in ("__dict__", "__weakref__")
        }
        table[cls] = type(cls)(sharded.__name__, (sharded.__bases__[0], cls), body)
    return table[cls]


def is_distributed(module: torch.nn.Module) -> bool:
    """Whether `distribute_module` gave a module its hooks.

    Without the private mark a plain tensor is refused by DTensor.
    """
    return "_distribute_module_applied" in module.__dict__


def replicates_implicitly() -> bool:
    """Whether ``implicit_replication`` is on; False without the private name."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return bool(
        getattr(getattr(kind, "_op_dispatcher", None), "_allow_implicit_replication", False)
    )


def dtensor_spec(
    mesh: Any,
    placements: tuple[Any, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """The record of a DTensor's layout, for `dtensor`; None without the private names."""
    parts = _dtensor_parts()
    if parts is None:
        return None
    _, spec, meta = parts
    return spec(mesh, placements, meta(shape, stride, dtype))


def dtensor(local: Tensor, spec: Any) -> Any:
    """A DTensor without a gradient, in a fifth of the time of ``DTensor.from_local``.

    Each has its own record: sharding propagation may change it.
    """
    return _dtensor_parts()[0](local, copy.copy(spec), requires_grad=False)


@functools.cache
def _dtensor_parts() -> Any:
    """The classes of a DTensor, its layout and its sizes; None unless all take these arguments."""
    kind = _imported("torch.distributed.tensor", "DTensor")
    spec = _imported("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
    meta = _imported("torch.distributed.tensor._dtensor_spec", "TensorMeta")
    if kind is None or getattr(meta, "_fields", None) != ("shape", "stride", "dtype"):
        return None
    known = getattr(spec, "__dataclass_fields__", ())
    return (kind, spec, meta) if list(known)[:3] == ["mesh", "placements", "tensor_meta"] else None


def waited(t: Tensor) -> Tensor:
    """A tensor that a collective has filled.

    Without the private name operators wait for it themselves: slower.
    """
    if type(t) is Tensor:
        return t
    kind = getattr(
        sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None
    )
    return t.trigger_wait() if kind is not None and isinstance(t, kind) else t


def rows_placed_by(module: torch.nn.Module) -> Any:
    """``(mesh, placements, to_local)`` of `SequenceParallel`'s hooks, if a module has no others.

    They place the argument so, and return the output, as a plain tensor if ``to_local``. Without
    the private names None: the module is called, slower.
    """
    before: Any = getattr(module, "_forward_pre_hooks", ())
    after: Any = getattr(module, "_forward_hooks", ())
    others = getattr(module, "_backward_hooks", True) or getattr(
        module, "_backward_pre_hooks", True
    )
    if not is_distributed(module) or others or len(before) != 1 or len(after) != 1:
        return None
    style = _imported("torch.distributed.tensor.parallel", "SequenceParallel")
    mesh, place = _closed_over(*before.values())
    _, release = _closed_over(*after.values())
    known = place is not None and place.func is getattr(style, "_prepare_input_fn", None)
    if (
        not known
        or release is None
        or release.func is not getattr(style, "_prepare_output_fn", None)
    ):
        return None
    return mesh, tuple(place.args[0]), release.args[0]


def _closed_over(hook: Any) -> tuple[Any, Any]:
    """The mesh and the function of a hook that `distribute_module` made."""
    mesh, function = None, None
    for cell in getattr(hook, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, functools.partial):
            function = value
        elif type(value).__name__ == "DeviceMesh":
            mesh = value
    return (mesh, function) if mesh is not None else (None, None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is compiled by itself.

    Without the private names only `torch.compile`'s wrapper is recognised.
    """
    return has_compiled_call(module) or any(
        cls.__name__ == "OptimizedModule" for cls in type(module).__mro__
    )


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called.

    Its class is not looked at, which torch.compile would guard.
    """
    return module.__dict__.get("_compiled_call_impl") is not None


def forget_compiled(module: torch.nn.Module) -> None:
    """Undoes ``module.compile()``. Without the private attribute there is nothing to undo."""
    module.__dict__.pop("_compiled_call_impl", None)


def has_own_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks are registered on a module.

    Without a private registry there may be: blocks call each module, slower.
    """
    try:
        return bool(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        )
    except AttributeError:
        return True


def _global_hooks(kind: str) -> Mapping[int, Any]:
    """PyTorch's registry of the hooks of one kind on all modules, which it changes in place.

    Without the registry there may be such hooks: an entry stands for them.
    """
    unknown = {0: None}
    hooks: Mapping[int, Any] = getattr(torch.nn.modules.module, f"_global_{kind}_hooks", unknown)
    return hooks


_FORWARD_HOOKS, _FORWARD_PRE_HOOKS = _global_hooks("forward"), _global_hooks("forward_pre")
_BACKWARD_HOOKS, _BACKWARD_PRE_HOOKS = _global_hooks("backward"), _global_hooks("backward_pre")


# Registries of a module's hooks, and of what it has; and all attributes that PyTorch gives one, but
# for its mode.
BACKWARD_HOOKS, FORWARD_HOOKS = (
    ("_backward_hooks", "_backward_pre_hooks"),
    ("_forward_hooks", "_forward_pre_hooks"),
)
MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks of this module, or of all modules, see its gradients.

    Without a private registry there may be.
    """
    try:
        own = module._backward_hooks or module._backward_pre_hooks
    except AttributeError:
        return True
    return bool(own or _BACKWARD_HOOKS or _BACKWARD_PRE_HOOKS)


@constant_when_traced
def has_global_hooks() -> bool:
    """Whether there are hooks on all modules, as from ``register_module_forward_hook``.

    Without the registries the result is True: fused blocks then call each of their modules, slower
    and right. Traced by torch.compile the result is a constant without a guard: PyTorch's own
    compiled modules do not look for hooks again.
    """
    return bool(_FORWARD_HOOKS or _FORWARD_PRE_HOOKS or _BACKWARD_HOOKS or _BACKWARD_PRE_HOOKS)


@constant_when_traced
def transforms_when_traced() -> bool:
    """`transforms` for code that torch.compile traces, which guards on the transforms itself."""
    return transforms()


# --- Triton ---------------------------------------------------------------------------------------


def gpu_target(backend: str, arch: int | str, warp_size: int) -> Any:
    """Triton's record of a kind of GPU to compile for."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(backend, arch, warp_size)


def current_target() -> Any:
    """The current GPU as a compilation target; from its properties if Triton's driver moved."""
    import triton

    try:
        return triton.runtime.driver.active.get_current_target()
    except AttributeError:
        major, minor = torch.cuda.get_device_capability()
        return gpu_target("cuda", 10 * major + minor, 32)


@functools.cache
def overlaps_launches() -> bool:
    """Whether kernels can be compiled for programmatic dependent launch, to overlap launches."""
    import triton.language as tl

    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    cuda = getattr(tl.extra, "cuda", None)
    return "launch_pdl" in inspect.signature(CUDAOptions).parameters and hasattr(cuda, "gdc_wait")


@functools.cache
def launches_cooperatively() -> bool:
    """Whether a launch can require that all programs of a kernel run at the same time."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return "launch_cooperative_grid" in inspect.signature(CUDAOptions).parameters


def compiles_ahead() -> bool:
    """Whether `compile_ahead` works; without it kernels are compiled at their first launch."""
    import triton

    source = getattr(getattr(triton, "compiler", None), "ASTSource", None)
    return source is not None and {"fn", "signature", "constexprs", "attrs"} <= set(
        inspect.signature(source).parameters
    )


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Mapping[str, int],
    options: Mapping[str, Any],
    target: Any = None,
) -> Any:
    """A kernel compiled for these types, with no arguments and, where ``target`` is given, no GPU.

    Args:
        kernel: the decorated function.
        signature: Triton's type name of every argument; ``"constexpr"`` for one that is a constant.
        constants: the values of the constant arguments.
        divisible: powers of two that the values of arguments are multiples of.
        options: the compiler's options.
        target: as `gpu_target` returns it; the current GPU by default.
    Raises:
        RuntimeError: this release cannot do it; `compiles_ahead` tells beforehand.
    """
    import triton

    if not compiles_ahead():
        raise RuntimeError(
            f"fusedops: Triton {triton.__version__} cannot compile a kernel without launching it"
        )
    _choose_assembler()
    index = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {index[name]: value for name, value in constants.items()}
    attrs = {index[name]: [["tt.divisibility", multiple]] for name, multiple in divisible.items()}
    source = triton.compiler.ASTSource(kernel, dict(signature), constexprs, attrs)
    return triton.compile(source, target=target, options=dict(options))


def _choose_assembler() -> None:
    """Chooses PyTorch's ``ptxas`` if Inductor is loaded.

    Inductor does the same when it compiles a kernel in this process.

    The assembler's version is part of the key of Triton's cache. A process with warm caches of
    Inductor may compile nothing itself, and would keep Triton's ``ptxas``: its keys would differ
    from those of the first process. The version that Triton noted earlier is forgotten for the same
    reason. Without the private names a kernel may be compiled once more in a later process.
    """
    choose = getattr(
        sys.modules.get("torch._inductor.runtime.compile_tasks"), "_set_triton_ptxas_path", None
    )
    if choose is not None:
        _take_assembler(choose)


@functools.cache
def _take_assembler(choose: Callable[[], None]) -> None:
    try:
        choose()
    # Another release's, or a warning as an error: Triton's own stays.
    except Exception:  # noqa: BLE001
        return
    version: Any = getattr(
        sys.modules.get("triton.backends.nvidia.compiler"), "get_ptxas_version", None
    )
    if hasattr(version, "cache_clear"):
        version.cache_clear()


def launch_hooks() -> Any:
    """The object whose ``launch_enter_hook`` and ``launch_exit_hook`` launches call, or None.

    Each is a chain with a list ``calls``, in which profilers put functions. Without the chains
    nobody can tell whether there are hooks, and Triton's own launcher is used, which calls them.
    """
    import triton

    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    chains = (
        getattr(runtime, "launch_enter_hook", None),
        getattr(runtime, "launch_exit_hook", None),
    )
    return (
        runtime
        if all(isinstance(getattr(chain, "calls", None), list) for chain in chains)
        else None
    )


class NoDirectCallError(Exception):
    """A compiled kernel that only Triton's own launcher can launch; the message says why."""


@dataclass(frozen=True)
class Place:
    """What differs between launches of a kernel: a grid axis, the stream, or an argument."""

    name: str


GRID = (Place("grid_x"), Place("grid_y"), Place("grid_z"))
STREAM = Place("stream")


@dataclass(frozen=True)
class DirectCall:
    """How a kernel is launched by a call of Triton's C function: ``launch(*arguments)``.

    An argument is a fixed value, a `Place`, or a tuple of these.
    """

    launch: Callable[..., None]
    arguments: tuple[Any, ...]


def direct_call(compiled: Any, arguments: Sequence[Place | None]) -> DirectCall:
    """The call of a C function that ``compiled[grid](*arguments)`` amounts to in this Triton.

    Triton's launcher is an object in Python that holds the C function as ``launch`` and calls it
    with the grid, stream, kernel, hooks, scratch memory and arguments, in an order that changes
    between releases: 3.6 takes the kernel's arguments one by one at the end, 3.7 to 3.9 in a tuple
    after a description of their types. So the launcher is called once with a recorder in place of
    the C function, and what arrives there is the order.

    Args:
        compiled: a compiled kernel, loaded on the current GPU.
        arguments: one for each argument of the kernel, None for constants.
    Raises:
        NoDirectCallError: the kernel needs something of each launch that is not among its arguments
            (scratch memory, an instrumented build's tables), or the launcher is of another form.
    """
    try:
        run = compiled.run
        function, packed = compiled.function, compiled.packed_metadata
        scratch = max(run.global_scratch_size, run.profile_scratch_size)
        launch, probe = run.launch, copy.copy(run)
    except AttributeError as error:
        raise NoDirectCallError(f"its launcher is of an unknown form ({error})") from None
    if scratch > 0:
        raise NoDirectCallError("the kernel needs scratch memory")
    if getattr(run, "gsan_enabled", False):
        raise NoDirectCallError("the kernel is instrumented")
    recorded: list[tuple[Any, ...]] = []
    probe.launch = lambda *values: recorded.append(values)
    try:
        # After the packed metadata come the launch metadata and the two hooks, absent here.
        probe(*GRID, STREAM, function, packed, None, None, None, *arguments)
    # An unknown launcher may raise anything at such arguments.
    except Exception as error:  # noqa: BLE001
        raise NoDirectCallError(f"its launcher is of an unknown form ({error})") from None
    if len(recorded) != 1 or not _is_complete(recorded[0], arguments):
        raise NoDirectCallError("its launcher passes on other arguments than the kernel's")
    return DirectCall(launch, recorded[0])


def _is_complete(taken: tuple[Any, ...], arguments: Sequence[Place | None]) -> bool:
    """Whether a recorded call begins with grid and stream, and ends with the arguments."""
    if taken[:4] != (*GRID, STREAM):
        return False
    last = taken[-1] if isinstance(taken[-1], tuple) else taken[len(taken) - len(arguments) :]
    return last == tuple(arguments)


# --- graphs that torch.compile makes --------------------------------------------------------------

# Nodes of a graph: operators, those that take functions, the ones of a checkpointed part and of a
# custom autograd function, and functions that change what is recorded (whether gradients are, and
# in which dtype). The modules whose functions compute tensors and do nothing else. Without a
# private name graphs have no such nodes, or nothing is known of them: such graphs are left whole,
# or fewer regions are found in them.
OVERLOAD: type = _find("_ops.OpOverload", type(None))
CAST: Any = _find("ops.aten._to_copy.default", None)
HIGHER_ORDER: type = _find("_ops.HigherOrderOperator", type(None))
OPERATORS: tuple[type, ...] = (OVERLOAD, _find("_ops.OpOverloadPacket", type(None)), HIGHER_ORDER)
# Dynamo calls `torch._refs` in the place of `torch.tensor` with numbers that are symbols.
PURE_MODULES = frozenset(
    {
        "torch",
        "torch._refs",
        "torch.functional",
        "torch.nn.functional",
        "torch._tensor",
        "torch._C._nn",
        "torch._C._special",
        "torch._C._linalg",
        "torch._C._fft",
        "_operator",
        "builtins",
        "math",
    }
)
CHECKPOINTED: Any = _find("_higher_order_ops.wrap.tag_activation_checkpoint", None)
# A part that is marked by `torch.compiler.nested_compile_region`: one graph for all of its calls.
NESTED: Any = _find("ops.higher_order.invoke_subgraph", None)
OWN_DERIVATIVE: Any = _find("_functorch.autograd_function.autograd_function_apply", None)
GRAD_MODES = frozenset({_find("_C._set_grad_enabled", None)})
attention_order: Callable[[], Any] = _find("_C._get_sdp_priority_order", lambda: None)
AUTOCASTS = frozenset(
    {_find(f"amp.autocast_mode.{name}", None) for name in ("_enter_autocast", "_exit_autocast")}
)


def is_pure(target: Any) -> bool:
    """Whether a function computes tensors and does nothing else."""
    module = getattr(target, "__module__", None) or ""
    # Where Dynamo does not look into einops, its functions are nodes.
    return module in PURE_MODULES or module.partition(".")[0] == "einops"


def mutates(target: Any) -> bool:
    """Whether an operator writes into one of its arguments."""
    return isinstance(target, OVERLOAD) and target._schema.is_mutable  # type: ignore[attr-defined]


def undefine(library: torch.library.Library) -> None:
    """Removes a library's registrations; without the private method, at its last reference."""
    destroy = getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()


def _has_tag(target: Any, tag: torch.Tag) -> bool:
    return isinstance(target, OVERLOAD) and tag in cast(Any, target).tags


def changes_shape(target: Any) -> bool:
    """Whether an operator changes the shape, strides or memory of its input tensor."""
    return _has_tag(target, torch.Tag.inplace_view)


def is_view(target: Any) -> bool:
    """Whether an operator's result shares the memory of an argument, which it does not write."""
    infos = [one.alias_info for one in target._schema.arguments if one.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into."""
    if not mutates(target):
        return []
    changed: list[Any] = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.is_write:
            changed += leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return changed


def named_again(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of which an operator's results are views, or which it returns."""
    if not isinstance(target, OVERLOAD):
        return []
    schema = target._schema  # type: ignore[attr-defined]
    if all(result.alias_info is None for result in schema.returns):
        return []
    tensors: list[Any] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            tensors += leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return tensors


def draws(target: Any) -> bool:
    """Whether an operator's results are random."""
    return _has_tag(target, torch.Tag.nondeterministic_seeded)


def aten_name(target: Any) -> str:
    """The name of one of PyTorch's operators, without its overload; "" for others."""
    if isinstance(target, OVERLOAD) and target.namespace == "aten":  # type: ignore[attr-defined]
        return str(target.overloadpacket.__name__)  # type: ignore[attr-defined]
    return ""


def returning(target: Any) -> Any:
    """The operator that returns what an in-place operator of aten writes, or None."""
    packet = getattr(torch.ops.aten, aten_name(target).removesuffix("_"), None)
    taken = [(one.name, str(one.type)) for one in target._schema.arguments]
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return next(
        (
            one
            for one in overloads
            if [(a.name, str(a.type)) for a in one._schema.arguments] == taken
        ),
        None,
    )


def have_hints(sizes: Iterable[Any]) -> bool:
    """Whether numbers are known for all sizes: not for those that depend on data."""
    return all(not isinstance(size, torch.SymInt) or size.node.has_hint() for size in sizes)


def schema(target: Any) -> str:
    """Of an operator, or of its only overload, as text; "" for what is none."""
    return str(getattr(getattr(target, "default", target), "_schema", ""))


def namespace(target: Any) -> str:
    """Of an operator; "" for what is none."""
    return str(cast(Any, target).namespace) if isinstance(target, OVERLOAD) else ""


def leaves(value: Any) -> list[Any]:
    """What is in tuples, lists and dictionaries."""
    from torch.utils import _pytree as pytree

    return pytree.tree_leaves(value)


def copy_sources(source: torch.fx.GraphModule, target: torch.fx.GraphModule) -> None:
    """Copies where Dynamo got a graph's inputs: AOTAutograd recognises parameters by it."""
    names = getattr(source, "_param_name_to_source", None)
    if names is None:
        return
    from torch._dynamo.source import ConstantSource

    held = [name for name, _ in (*target.named_parameters(), *target.named_buffers())]
    sources: Any = {name: names[name] if name in names else ConstantSource(name) for name in held}
    target._param_name_to_source = sources
    placeholders = [graph.find_nodes(op="placeholder") for graph in (source.graph, target.graph)]
    for theirs, ours in zip(*placeholders, strict=True):
        ours._dynamo_source = theirs._dynamo_source


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a node is no longer in its graph."""
    return bool(node._erased)


def is_traceable_subclass(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that holds others, as DTensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def as_fake(inputs: Sequence[Any]) -> list[Any]:
    """Inputs of a graph that Dynamo made as fake tensors, with the sizes that are symbols in it."""
    context = torch._guards.TracingContext.try_get()
    mode: Any = torch._guards.detect_fake_mode(list(inputs)) or fake_mode()

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor) or getattr(value, "fake_mode", None) is mode:
            return value
        known = None if context is None or is_fake(value) else context.tensor_to_context.get(value)
        if known is None:
            return mode.from_tensor(value)
        return mode.from_tensor(
            value, symbolic_context=known, source=known.tensor_source, trace=False
        )

    with mode:
        return list(map(fake, inputs))


def recorded_graph(function: Callable[..., Any], fakes: Sequence[Any]) -> torch.fx.GraphModule:
    """The operators that a function of fake tensors calls, in the current gradient mode."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = torch._guards.detect_fake_mode(list(fakes))
    with mode or nullcontext(), enable_python_dispatcher():
        # With a table of its own: without one, `detach` becomes `alias` (PyTorch 2.14), which has a
        # derivative.
        return make_fx(function, decomposition_table={}, _allow_non_fake_inputs=True)(*fakes)


def recording_nothing() -> AbstractContextManager[Any]:
    """What is computed meanwhile is not recorded."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def recorded_node(tensor: Tensor) -> torch.fx.Node:
    """The node of a value of the graph that is being recorded."""
    node: torch.fx.Node = _tracer().unwrap_proxy(tensor).node
    return node


def recorded_attribute(tensor: Tensor, name: str) -> Tensor:
    """A tensor that a graph holds, as a value of the graph that is being recorded."""
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    tracer = _tracer()
    setattr(tracer.root, name, tensor)
    with recording_nothing():
        fake: Tensor = as_fake([tensor])[0]
    track_tensor_tree(
        fake, tracer.create_proxy("get_attr", name, (), {}), constant=None, tracer=tracer
    )
    return fake


def _tracer() -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode().tracer  # type: ignore[union-attr]


def recorded_call(
    target: Any,
    args: Any,
    kwargs: Any,
    result: Any = None,
    names: Mapping[int, str] | None = None,
    body: torch.fx.GraphModule | None = None,
) -> Any:
    """Records a call as one node, whose value is ``result``.

    Args:
        names: of the modules among the arguments.
        body: the captured form of the first module among the arguments.
    """
    from torch.fx.experimental.proxy_tensor import track_tensor_tree
    from torch.utils import _pytree as pytree

    tracer = _tracer()

    def proxy(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            name = (names or {})[id(value)]
            setattr(tracer.root, name, value)
            return tracer.create_proxy("get_attr", name, (), {})
        return tracer.unwrap_proxy(value)

    node = tracer.create_proxy("call_function", target, *pytree.tree_map(proxy, (args, kwargs)))
    if body is not None:
        node.node.args[0].meta["val"] = body
    return track_tensor_tree(result, node, constant=None, tracer=tracer)


def has_own_derivative(results: Iterable[Tensor], arguments: Iterable[Tensor]) -> bool:
    """Whether a custom autograd function is between the results and the arguments."""
    seen = {tensor.grad_fn for tensor in arguments}
    todo = [tensor.grad_fn for tensor in results]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            seen.add(node)
            todo += [other for other, _ in node.next_functions]
    return False


def compile_by_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: Any
) -> Any:
    """What Inductor makes of a graph."""
    return torch._TorchCompileInductorWrapper(mode, options, None)(gm, list(inputs))


def check_of_inductor(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Raises `torch.compile`'s own error for a mode or options that Inductor does not know."""
    torch._TorchCompileInductorWrapper(mode, options, None)


def contiguous_tangents() -> AbstractContextManager[Any]:
    """Compiles a graph for contiguous gradients of its results, whatever their strides.

    In newer releases AOTAutograd takes it that a gradient has the strides of the result, and copies
    one that comes otherwise. Without the private name it does so here, too: slower.
    """
    import torch._functorch as functorch

    config: Any = getattr(functorch, "config", None)
    if not hasattr(config, "guess_tangent_strides_as_outputs"):
        return nullcontext()
    return config.patch(guess_tangent_strides_as_outputs=False)  # type: ignore[no-any-return]


@contextmanager
def casts_recorded() -> Iterator[None]:
    """Compiles a graph as it is: autocast casts neither at compile time nor in its runs.

    AOTAutograd switches autocast off at each run, forward and backward, if it is on for any device
    at compile time: it is then left on for one that nobody has.
    """
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    if not kinds:
        yield
        return
    before = torch.is_autocast_enabled("hpu")
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    torch.set_autocast_enabled("hpu", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("hpu", before)
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
