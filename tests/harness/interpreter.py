"""Patches Triton's interpreter for the tests: right casts, checked accesses, and more speed.

Casts: Triton 3.6's interpreter holds bf16 as 16-bit integers. It truncates when it casts fp32 to
bf16, while a GPU rounds to nearest even. Between bf16 and dtypes other than fp32 it converts the
bits as if they were an integer. Without the patch, tests of a correctly rounded result would need
twice the tolerance. To floats of 8 bits it truncates, too; a GPU's instruction rounds to nearest
even, saturates, and has one NaN.

Masks: up to Triton 3.8 the interpreter accepts integer masks. A comparison of scalars becomes one
if it is combined with a block. The patch refuses integer masks, as later releases do.

Accesses: the interpreter reads and writes any address. A GPU would fault, or corrupt memory. The
patch requires that every address is an element of one of the launch's tensors.

Speed: the interpreter repeats most of its work, or drops its result.

- At each call of a device function it replaces the functions of ``triton.language`` again, and it
  builds a new type for each intermediate value. The patches do both once.
- Each operator casts its operands, even if they have the right type and shape. Each sum of integers
  is computed again in 64 bits, for a check in debug mode. The patches omit both.
- Most of the remaining time goes to Philox. Tests draw the same masks many times, so a patch caches
  the scale of each mask.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

import numpy as np
import torch

__all__ = ["install"]


def install() -> None:
    """Applies all patches, except those whose target this release of Triton lacks."""
    from triton import language as tl
    from triton.runtime import interpreter

    from fusedops.core import device

    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _rounding(builder.cast_impl)
    builder.create_fp_to_fp = _of_8_bits(builder.create_fp_to_fp)
    # Unlike NumPy, a GPU does not warn of 0/0 or inf - inf, which occur in masked lanes.
    np.seterr(all="ignore")
    _use_scalars_as_indices(interpreter)
    _refuse_masks_of_integers(interpreter.InterpreterBuilder)
    _bound_accesses(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        _replace_the_language_once(interpreter, tl)
    if hasattr(interpreter, "_get_np_dtype"):
        _cache_numpy_dtypes(interpreter)
    _cache_types(tl.core)
    _omit_checks_of_overflow(interpreter.interpreter_builder)
    if hasattr(interpreter, "interpreter_semantic"):
        _omit_casts_of_operands(type(interpreter.interpreter_semantic))
    if hasattr(interpreter.InterpretedFunction, "rewritten_fn"):
        _cache_results(device._keep_scale, tl.core)


def _rounding(original: Any) -> Any:
    """Returns a cast that rounds to and from bf16 as a GPU does."""
    import triton.language as tl
    from triton.runtime import interpreter

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        are_floating = source.is_floating() and target.is_floating()
        if source == target or not are_floating or tl.bfloat16 not in (source, target):
            return original(self, src, dst_type)
        values = torch.from_numpy(np.ascontiguousarray(src.data).reshape(-1))
        if source == tl.bfloat16:
            values = values.view(torch.bfloat16)
        if target == tl.bfloat16:
            # Via fp32, so that fp64 is rounded twice, as on the GPU.
            data = values.float().bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            data = values.to(getattr(torch, f"float{target.primitive_bitwidth}")).numpy()
        return interpreter.TensorHandle(data.reshape(src.data.shape), target)

    return cast


def _of_8_bits(original: Any) -> Any:
    """Returns a cast between floats that has the results of a GPU's instruction for 8 bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def cast(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        values = torch.from_numpy(np.ascontiguousarray(src.data).reshape(-1))
        if target in dtypes and source == tl.float32:
            largest = torch.finfo(dtypes[target]).max
            values = values.clamp(-largest, largest).to(dtypes[target]).view(torch.uint8)
            values = torch.where(values & 0x7F == 0x7F, 0x7F, values)
        elif source in dtypes and target == tl.float32:
            values = values.view(dtypes[source]).float()
        else:
            return original(self, src, dst_type, rounding_mode)
        return interpreter.TensorHandle(values.numpy().reshape(src.data.shape), target)

    return cast


def _refuse_masks_of_integers(builder: Any) -> None:
    def with_boolean_mask(original: Any, *, index_of_mask: int) -> Any:
        def access(self: Any, *args: Any) -> Any:
            dtype = args[index_of_mask].data.dtype
            if dtype != np.bool_:
                raise ValueError(f"mask has unsupported dtype {dtype}")
            return original(self, *args)

        return access

    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = with_boolean_mask(load, index_of_mask=1)
    builder.create_masked_store = with_boolean_mask(store, index_of_mask=2)


def _bound_accesses(interpreter: Any) -> None:
    """Makes loads and stores raise an `IndexError` outside the launch's tensors.

    A kernel that converts an integer to a pointer is not checked from there on.
    """
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    to_host, to_pointer = executor._init_args_hst, builder.create_int_to_ptr
    extents: list[tuple[int, int]] = []

    def init_args_hst(self: Any, args: Any, kwargs: Any) -> Any:
        result = to_host(self, args, kwargs)
        tensors = [
            arg for arg in (*result[0], *result[1].values()) if isinstance(arg, torch.Tensor)
        ]
        extents[:] = [_extent(tensor) for tensor in tensors if tensor.numel()]
        return result

    def int_to_ptr(self: Any, *args: Any) -> Any:
        extents.clear()
        return to_pointer(self, *args)

    def checked(name: str) -> Any:
        original = getattr(builder, name)

        def access(self: Any, ptrs: Any, *arguments: Any) -> Any:
            # A store has the values before the mask.
            mask = arguments[1] if name == "create_masked_store" else arguments[0]
            if extents and not _is_within(ptrs, mask, extents):
                raise IndexError(f"{name} outside the tensors of the launch")
            return original(self, ptrs, *arguments)

        return access

    executor._init_args_hst, builder.create_int_to_ptr = init_args_hst, int_to_ptr
    for name in ("create_masked_load", "create_masked_store"):
        setattr(builder, name, checked(name))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte, and of the byte after its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_within(ptrs: Any, mask: Any, extents: list[tuple[int, int]]) -> bool:
    """Whether all addresses that are not masked off are within one of the tensors."""
    is_accessed = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
    addresses = ptrs.data[is_accessed].astype(np.int64)
    if not addresses.size:
        return True
    size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
    first, end = int(addresses.min()), int(addresses.max()) + size
    return any(start <= first and end <= end_of_tensor for start, end_of_tensor in extents)


def _use_scalars_as_indices(interpreter: Any) -> None:
    """Lets Python convert scalars to integers without a warning of NumPy about their dimension."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _replace_the_language_once(interpreter: Any, tl: Any) -> None:
    """Makes `_patch_lang` patch the language once in a launch, not at each call of a function.

    A function sees the modules `triton.language` and `triton.language.core`, one of them, or none.
    For each of these cases the language is patched once. As in Triton, the patches for the kernel
    are undone after the launch, and those for device functions are not.
    """
    original, scope = interpreter._patch_lang, interpreter._LangPatchScope
    replaced: set[tuple[bool, bool]] = set()

    class Scope(scope):  # type: ignore[misc, valid-type]
        """The scope of a kernel. When it ends, the next launch patches the language again."""

        def restore(self) -> None:
            super().restore()
            replaced.clear()

    @cache
    def seen_by(fn: Any) -> tuple[bool, bool]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return tl in modules, tl.core in modules

    def patch(fn: Any) -> Any:
        parts = seen_by(fn)
        if parts in replaced:
            return scope()
        replaced.add(parts)
        changes = Scope()
        changes._changes = original(fn)._changes
        return changes

    members = inspect.getmembers

    @cache
    def builtins_of(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in members(package) if tl.core.is_builtin(member))

    def patch_builtin(package: Any, builder: Any, changes: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, changes)

    for package in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base):
        builtins_of(package)  # before anything is replaced
    interpreter._patch_lang, interpreter._patch_builtin = patch, patch_builtin


def _cache_numpy_dtypes(interpreter: Any) -> None:
    original = interpreter._get_np_dtype
    results: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in results:
            results[name] = original(dtype)
        return results[name]

    interpreter._get_np_dtype = np_dtype


def _cache_types(core: Any) -> None:
    """Caches the attributes of block types by element type and shape, and of tensors by shape."""
    block, tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else unwrapped(size) for size in shape])
        key = element_ty.name, sizes
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = {**vars(self), "_sizes": sizes}
        vars(self).update(blocks[key])

    def unwrapped(size: Any) -> int:
        return int(core._unwrap_if_constexpr(size))

    def new_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002, Triton's own name
        sizes = vars(type).get("_sizes", ())
        if sizes not in shapes:
            tensor(self, handle, type)
            shapes[sizes] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[sizes], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = block_type, new_tensor
    equals = core.dtype.__eq__

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equals(self, other)

    core.dtype.__eq__ = is_equal


def _omit_checks_of_overflow(builder: Any) -> None:
    """Omits checks of sums and products of integers, which only assert in debug mode."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _omit_casts_of_operands(semantic: Any) -> None:
    """Skips casts and broadcasts to the type and shape that an operand has; caches result types."""
    cast, broadcast, result_type = (
        semantic.cast,
        semantic.broadcast_impl_value,
        semantic.computation_type_impl,
    )
    types: dict[Any, Any] = {}

    def cast_if_needed(self: Any, value: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if value.dtype is dtype.scalar:
            return value
        return cast(self, value, dtype, *args, **kwargs)

    def broadcast_if_needed(self: Any, first: Any, second: Any) -> Any:
        sizes = vars(first.type).get("_sizes")
        if sizes is not None and sizes == vars(second.type).get("_sizes"):
            return first, second
        return broadcast(self, first, second)

    def cached_type(self: Any, *args: Any) -> Any:
        key = tuple([getattr(arg, "name", arg) for arg in args])
        if key not in types:
            types[key] = result_type(self, *args)
        return types[key]

    semantic.cast = cast_if_needed
    semantic.broadcast_impl_value = broadcast_if_needed
    semantic.computation_type_impl = cached_type


# The most results that a cache holds; some have 100 kB.
_MOST_RESULTS = 1024


def _cache_results(function: Any, core: Any) -> None:
    """Caches the results of a device function, which must be pure, by the values of its arguments.

    The cached arrays are read-only.
    """
    original = function.rewrite()
    results: dict[Any, Any] = {}

    def cached(*args: Any) -> Any:
        key = tuple(_value_of(arg, core) for arg in args)
        if key not in results:
            if len(results) == _MOST_RESULTS:
                results.clear()
            results[key] = original(*args)
            results[key].handle.data.flags.writeable = False
        result = results[key]
        return core.tensor(result.handle, result.type)

    function.rewritten_fn[function.fn] = cached


def _value_of(argument: Any, core: Any) -> Any:
    """Returns a key that is equal for arguments of the same type and value."""
    if isinstance(argument, core.tensor):
        data = argument.handle.data
        return str(argument.type), data.dtype.str, data.shape, data.tobytes()
    if isinstance(argument, core.constexpr):
        return "constexpr", _value_of(argument.value, core)
    if isinstance(argument, (tuple, core.tuple)):
        return tuple(_value_of(part, core) for part in argument)
    return type(argument), argument
