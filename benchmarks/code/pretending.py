"""An H200 that is not there, for code that is generated and not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fusedops.backend import storing
from fusedops.core.calls import registration
from fusedops.core.launches import launch

from .rules import rules_of_cuda

__all__ = ["generated", "pretended"]

_CAPABILITY = (9, 0)
_GPU = torch.device("cuda", 0)
# As `torch.cuda.get_device_properties` reports an H200.
_PROPERTIES = {
    "name": "NVIDIA H200",
    "major": _CAPABILITY[0],
    "minor": _CAPABILITY[1],
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 139 * 2**30,
    "L2_cache_size": 50 * 2**20,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_multiprocessor": 228 * 2**10,
    "clock_rate": 1_980_000,
    "memory_clock_rate": 3_201_000,
    "memory_bus_width": 6144,
    "gcnArchName": "",
}


class _Generated(BaseException):
    """Ends a compilation when the code is there. No handler of exceptions catches it."""


@contextmanager
def pretended(observe: Callable[[Any, str], None]) -> Iterator[None]:
    """Compiles what is compiled in the context for an H200, as far as the code.

    Models and inputs are on the CPU. The graph of forward and backward is put on the GPU before it
    is partitioned. No kernel is compiled, and nothing runs: a call of what is compiled ends at once,
    see `generated`.

    Args:
        observe: called for each graph, with Inductor's record of it, and its Python code.
    """
    from torch._functorch import config as of_autograd
    from torch._inductor import compile_fx
    from torch._inductor import config as of_inductor

    with ExitStack() as stack:
        for patch in (
            of_autograd.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
            of_inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
            mock.patch.object(registration, "is_planned", return_value=True),
            mock.patch.object(launch, "runs_kernels", return_value=True),
            mock.patch.object(storing, "stored_at", return_value=None),
            mock.patch.object(
                compile_fx,
                "_recursive_joint_graph_passes",
                _then_on_gpu(compile_fx._recursive_joint_graph_passes),
            ),
            mock.patch.object(
                compile_fx, "_compile_fx_inner", _generating(compile_fx._compile_fx_inner, observe)
            ),
            _device(),
            rules_of_cuda(),
        ):
            stack.enter_context(patch)
        yield


@contextmanager
def generated() -> Iterator[None]:
    """Ends with the call of a compiled model: at that time its code is generated."""
    try:
        yield
    except _Generated:
        return
    raise RuntimeError("the block has called nothing that is compiled")


def _then_on_gpu(passes: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Inductor's passes over a joint graph, which then put it on the GPU.

    One of the passes computes constants, which is possible on the CPU alone.
    """

    def apply(*args: Any, **kwargs: Any) -> Any:
        gm = passes(*args, **kwargs)
        _move_to_gpu(gm)
        return gm

    return apply


def _move_to_gpu(gm: fx.GraphModule) -> None:
    """Puts the inputs of a graph, what it creates, and the values of its nodes on the GPU."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    inputs = _tensors_on_gpu([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])
    for node in gm.graph.nodes:
        node.args = map_aggregate(node.args, _device_on_gpu)
        node.kwargs = map_aggregate(node.kwargs, _device_on_gpu)
    mode = torch._guards.detect_fake_mode(inputs)
    with torch.no_grad():
        FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*inputs)
    gm.recompile()


def _device_on_gpu(value: Any) -> Any:
    return _GPU if isinstance(value, torch.device) else value


def _tensors_on_gpu(values: Any) -> list[Any]:
    """Returns values with the fake tensors among them on the GPU."""
    return list(map(_tensor_on_gpu, values))


def _tensor_on_gpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_GPU)


def _generating(
    compile_graph: Callable[..., Any], observe: Callable[[Any, str], None]
) -> Callable[..., Any]:
    """Returns Inductor's function that compiles a graph, which ends when the code is there."""
    from torch._inductor.graph import GraphLowering

    def end(graph: Any) -> None:
        code, _ = graph.codegen()
        observe(graph, code.value)
        _report_strides(graph)
        raise _Generated

    def compile_to_code(gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        patch = mock.patch.object(GraphLowering, "compile_to_module", end)
        with patch, suppress(_Generated):
            compile_graph(gm, _tensors_on_gpu(inputs), **options)
        return _end_of_call

    return compile_to_code


def _end_of_call(*args: Any) -> None:
    raise _Generated


def _report_strides(graph: Any) -> None:
    """Reports the strides of a graph's results: the backward is compiled for those it gets."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    for result in graph.graph_outputs:
        strides = None
        if hasattr(result, "get_stride") and result.has_tensor_output():
            strides = tuple(map(int, result.get_stride()))
        context.output_strides.append(strides)


@contextmanager
def _device() -> Iterator[None]:
    """Pretends an H200 for PyTorch's and Triton's queries of the current GPU."""
    import triton
    from torch._dynamo import device_interface
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(**_PROPERTIES)
    functions: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_compute_capability": lambda device=None: 10 * _CAPABILITY[0] + _CAPABILITY[1],
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
    }
    methods = {name: staticmethod(function) for name, function in functions.items()}
    cuda: Any = device_interface.CudaInterface
    worker = type("Worker", (cuda.Worker,), methods)
    interface = type("Interface", (cuda,), methods | {"Worker": worker})
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_device_interface=lambda: interface,
        get_active_torch_device=lambda: _GPU,
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: _OF_TRITON),
    )
    device_interface.get_interface_for_device("cuda")  # the first call fills the table
    caches = [f for f in vars(_triton).values() if hasattr(f, "cache_clear")]
    with ExitStack() as stack:
        for patch in (
            mock.patch.dict(device_interface.device_interfaces, {"cuda": interface}),
            mock.patch.multiple(
                torch.cuda,
                current_device=lambda: 0,
                device_count=lambda: 1,
                get_device_properties=lambda device=None: properties,
                get_device_capability=lambda device=None: _CAPABILITY,
                device=nullcontext,
            ),
            mock.patch.object(triton.runtime.driver, "_active", driver),
        ):
            stack.enter_context(patch)
        for cached in caches:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield


# As Triton's driver reports an H200: the same with its own names.
_OF_TRITON: Mapping[str, int] = {
    "max_shared_mem": 227 * 2**10,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1_980_000,
    "mem_clock_rate": 3_201_000,
    "mem_bus_width": 6144,
}
