"""Corrects Triton's interpreter where it computes something else than a GPU, for as long as the tests run.

Triton 3.6's interpreter holds bf16 as 16-bit integers. It cuts the low bits off when it narrows
fp32 to bf16, where a GPU rounds to the nearest, ties to even; and it converts between bf16 and
dtypes other than fp32 as if the bits were a number. Tests that hold a kernel to one correct
rounding would have to be twice as lenient for it.

Up to Triton 3.8 it takes masks of integers, which a comparison of numbers becomes beside a block.
Here it refuses them, as later ones do.

It reads and writes any address that a kernel computes, where a GPU would fault or corrupt what lies
there. Here every address has to be an element of one of the launch's tensors.

It also spends most of its time on work that it has done before, or whose result it drops:

- At each call of a device function it replaces the functions of ``triton.language`` again, and each
  intermediate value gets a type that is built anew. Both happen once here.
- Each operator casts its operands to the types and shapes that they have, and each sum of integers
  is computed again in 64 bits for a check that only a debugger sees.
- Most of what remains are the rounds of Philox: tests draw the same masks again and again, whose
  factors are remembered.
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
    """Corrects the interpreter and makes it fast.

    A release of Triton that lacks one of the parts goes without.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    from fusedops.core import device

    interpreter.InterpreterBuilder.cast_impl = _rounding(interpreter.InterpreterBuilder.cast_impl)
    # A GPU does not warn of 0/0 or inf - inf, least of all in lanes that are masked off.
    np.seterr(all="ignore")
    _read_single_numbers(interpreter)
    _refuse_masks_of_integers(interpreter.InterpreterBuilder)
    _bound_accesses(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        _replace_the_language_once(interpreter, tl)
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_numpy_dtypes(interpreter)
    _keep_types(tl.core)
    _omit_checks_of_overflow(interpreter.interpreter_builder)
    if hasattr(interpreter, "interpreter_semantic"):
        _leave_operands_as_they_are(type(interpreter.interpreter_semantic))
    if hasattr(interpreter.InterpretedFunction, "rewritten_fn"):
        _remember_results(device._keep_scale, tl.core)


def _rounding(original: Any) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or not (
            source.is_floating() and target.is_floating() and tl.bfloat16 in (source, target)
        ):
            return original(self, src, dst_type)
        values = torch.from_numpy(np.ascontiguousarray(src.data).reshape(-1))
        if source == tl.bfloat16:
            values = values.view(torch.bfloat16)
        if target == tl.bfloat16:
            # By way of fp32: for fp64 that is two roundings, as on the GPU.
            data = values.float().bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            data = values.to(getattr(torch, f"float{target.primitive_bitwidth}")).numpy()
        return interpreter.TensorHandle(data.reshape(src.data.shape), target)

    return cast


def _refuse_masks_of_integers(builder: Any) -> None:
    def with_boolean_mask(original: Any, place: int) -> Any:
        def access(self: Any, *args: Any) -> Any:
            if args[place].data.dtype != np.bool_:
                raise ValueError(f"mask has unsupported dtype {args[place].data.dtype}")
            return original(self, *args)

        return access

    builder.create_masked_load = with_boolean_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_boolean_mask(builder.create_masked_store, 2)


def _bound_accesses(interpreter: Any) -> None:
    """Each load and store raises an `IndexError` unless it is within one of the launch's tensors.

    Kernels that find tensors by their addresses, as numbers, are left out.
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

        def access(self: Any, ptrs: Any, *rest: Any) -> Any:
            mask = rest[1] if name == "create_masked_store" else rest[0]
            if extents and not _is_within(ptrs, mask, extents):
                raise IndexError(f"{name} beside the tensors of the launch")
            return original(self, ptrs, *rest)

        return access

    executor._init_args_hst, builder.create_int_to_ptr = init_args_hst, int_to_ptr
    for name in ("create_masked_load", "create_masked_store"):
        setattr(builder, name, checked(name))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element, and of what is behind its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_within(ptrs: Any, mask: Any, extents: list[tuple[int, int]]) -> bool:
    addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].astype(np.int64)
    if not addresses.size:
        return True
    first, size = int(addresses.min()), max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
    behind = int(addresses.max()) + size
    return any(start <= first and behind <= end for start, end in extents)


def _read_single_numbers(interpreter: Any) -> None:
    """Scalars are arrays of one number, which NumPy warns of where they are read as one."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _replace_the_language_once(interpreter: Any, tl: Any) -> None:
    """Within a launch, `_patch_lang` does its work once for each part of the language that a function sees.

    The kernel's own replacements are taken back after the launch, as Triton does; those for the
    device functions that it calls are never taken back, with or without this.
    """
    original, scope = interpreter._patch_lang, interpreter._LangPatchScope
    replaced: set[tuple[bool, bool]] = set()

    class Scope(scope):  # type: ignore[misc, valid-type]
        """The kernel's: what comes after it begins anew."""

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


def _keep_numpy_dtypes(interpreter: Any) -> None:
    original = interpreter._get_np_dtype
    results: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in results:
            results[name] = original(dtype)
        return results[name]

    interpreter._get_np_dtype = np_dtype


def _keep_types(core: Any) -> None:
    """Blocks of one element type and shape share what describes them.

    So do the tensors of one type.
    """
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
    """The checks compute each sum and product of integers twice, and assert in debug mode alone."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _leave_operands_as_they_are(semantic: Any) -> None:
    """An operand that has the type and the shape of the result is not converted.

    The type that two operands are converted to is looked up.
    """
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

    def known_type(self: Any, *args: Any) -> Any:
        key = tuple([getattr(arg, "name", arg) for arg in args])
        if key not in types:
            types[key] = result_type(self, *args)
        return types[key]

    semantic.cast = cast_if_needed
    semantic.broadcast_impl_value = broadcast_if_needed
    semantic.computation_type_impl = known_type


# Results of a device function that are remembered; some have 100 kB.
_MOST_RESULTS = 1024


def _remember_results(function: Any, core: Any) -> None:
    """Calls a device function once for each of its arguments' values, of which it is a pure function.

    Nobody can write to the remembered arrays.
    """
    original = function.rewrite()
    results: dict[Any, Any] = {}

    def remembering(*args: Any) -> Any:
        key = tuple(_value_of(arg, core) for arg in args)
        if key not in results:
            if len(results) == _MOST_RESULTS:
                results.clear()
            results[key] = original(*args)
            results[key].handle.data.flags.writeable = False
        result = results[key]
        return core.tensor(result.handle, result.type)

    function.rewritten_fn[function.fn] = remembering


def _value_of(argument: Any, core: Any) -> Any:
    """What two arguments of the same type and value have in common."""
    if isinstance(argument, core.tensor):
        data = argument.handle.data
        return str(argument.type), data.dtype.str, data.shape, data.tobytes()
    if isinstance(argument, core.constexpr):
        return "constexpr", _value_of(argument.value, core)
    if isinstance(argument, (tuple, core.tuple)):
        return tuple(_value_of(part, core) for part in argument)
    return type(argument), argument
