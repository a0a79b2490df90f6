"""Private names of PyTorch and Triton: results are right without them.

Kernels are launched as by Triton, with the launchers of all its supported releases.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedops
from fusedops.backend.fx import contiguous_tangents
from fusedops.core.compat.dynamo import is_exporting
from fusedops.core.compat.lookup import PRIVATE
from fusedops.core.compat.triton import (
    compile_ahead,
    compiles_ahead,
    current_target,
    gpu_target,
    launch_hooks,
    overlaps_launches,
)
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import direct, launch
from support import DEVICE, INTERPRETED

triton = pytest.importorskip("triton")

PACKED = (4, 1, 2048)
FUNCTION = 4711
STREAM = 55
SM_90 = gpu_target("cuda", arch=90, warp_size=32)
# The run-time arguments of the kernel in these tests, and their types; two constants follow.
KINDS = {"x": "*fp32", "bias": None, "rows": "i64", "y": "*fp32"}
CONSTANTS = {"N": 8, "STAGES": 1}


class Launcher36:
    """`CudaLauncher` of Triton 3.6.

    The C function, generated for each signature, takes the kernel's arguments at the end.
    """

    num_ctas = 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def _scratch(self, grid: tuple[Any, ...], size: int) -> Any:
        if size <= 0:
            return None
        programs = grid[0] * grid[1] * grid[2] * self.num_ctas
        return "scratch" if programs > 0 else None

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        grid = (gridX, gridY, gridZ)
        global_scratch = self._scratch(grid, self.global_scratch_size)
        profile_scratch = self._scratch(grid, self.profile_scratch_size)
        self.launch(
            *grid,
            stream,
            function,
            self.launch_cooperative_grid,
            self.launch_pdl,
            global_scratch,
            profile_scratch,
            *args,
        )


class Launcher37(Launcher36):
    """`CudaLauncher` of Triton 3.7.

    One C function for all kernels takes annotations, a signature, and a tuple of arguments.
    """

    arg_annotations = ["kernel", "constexpr", "kernel", "kernel", "constexpr", "constexpr"]  # noqa: RUF012
    kernel_signature = b"\1\5\1"

    def __call__(
        self,
        gridX,
        gridY,
        gridZ,
        stream,
        function,
        kernel_metadata,
        launch_metadata,
        launch_enter_hook,
        launch_exit_hook,
        *args,
    ):
        grid = (gridX, gridY, gridZ)
        global_scratch = self._scratch(grid, self.global_scratch_size)
        profile_scratch = self._scratch(grid, self.profile_scratch_size)
        self.launch(
            *grid,
            stream,
            function,
            self.launch_cooperative_grid,
            self.launch_pdl,
            kernel_metadata,
            launch_metadata,
            launch_enter_hook,
            launch_exit_hook,
            global_scratch,
            profile_scratch,
            self.arg_annotations,
            self.kernel_signature,
            args,
        )


class Launcher38(Launcher37):
    """`CudaLauncher` of Triton 3.8 and 3.9.

    With instrumentation by GSan, the C function takes a further argument from the driver.
    """

    gsan_enabled = False

    def __call__(self, *args):
        super().__call__(*args, *(("state",) if self.gsan_enabled else ()))


class Compiled:
    """`CompiledKernel` of these releases."""

    packed_metadata, function = PACKED, FUNCTION
    metadata = SimpleNamespace(shared=0)

    def __init__(self, run: Any) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        hooks = triton.knobs.runtime

        def runner(*args: Any) -> None:
            hooks.launch_enter_hook("metadata")
            self.run(*grid, STREAM, self.function, self.packed_metadata, None, None, None, *args)
            hooks.launch_exit_hook("metadata")

        return runner


RELEASES = {"3.6": Launcher36, "3.7": Launcher37, "3.8": Launcher38}
each_release = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture
def launches() -> list[tuple[Any, ...]]:
    """The arguments of all calls of the C function."""
    return []


@pytest.fixture
def build(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], launch.Kernel]:
    """Returns a function that builds a kernel with a launcher, for an absent GPU."""

    def built(launcher: Any) -> launch.Kernel:
        compiled = Compiled(
            launcher(lambda *args: launches.append(args))
            if isinstance(launcher, type)
            else launcher
        )
        monkeypatch.setattr(launch, "compile_fitting", lambda request, limit: compiled)
        kernel = SimpleNamespace(
            fn=SimpleNamespace(__name__="a_kernel"), arg_names=(*KINDS, *CONSTANTS)
        )
        return launch.Kernel(
            launch.Request(kernel, KINDS, CONSTANTS, Config(block_n=8, rows=1, warps=4), {}), 0
        )

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "shared_memory", lambda device_index: 1 << 16)
    monkeypatch.setattr(launch, "compiles_ahead", lambda: True)
    monkeypatch.setattr(direct, "current_stream", lambda device_index: STREAM + device_index)
    return built


def addresses(value: Any) -> Any:
    """The arguments with tensors replaced by their addresses; C functions accept either."""
    if isinstance(value, tuple):
        return tuple(map(addresses, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@each_release
def test_direct_launch_passes_the_arguments_that_triton_passes(
    release: str, build: Callable[[Any], launch.Kernel], launches: list[tuple[Any, ...]]
) -> None:
    kernel = build(RELEASES[release])
    x, y = torch.zeros(3), torch.zeros(3)
    assert (kernel.launcher, kernel.reason) == ("direct", "")
    kernel.variant(2, 3, x, None, 5, y)
    kernel._launch_compiled(2, 3, x, None, 5, y)
    direct, compiled = launches
    assert direct == addresses(compiled)
    assert direct[:5] == (2, 3, 1, STREAM, FUNCTION)


@each_release
def test_direct_launch_is_cooperative_if_the_launcher_is(
    release: str, build: Callable[[Any], launch.Kernel], launches: list[tuple[Any, ...]]
) -> None:
    launcher = RELEASES[release](lambda *args: launches.append(args))
    launcher.launch_cooperative_grid, launcher.launch_pdl = True, False
    kernel = build(launcher)
    assert kernel.launcher == "direct"
    kernel.variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    assert launches[0][5:7] == (True, False)


@each_release
def test_direct_launch_reports_to_recorders(
    release: str, build: Callable[[Any], launch.Kernel], launches: list[tuple[Any, ...]]
) -> None:
    variant = build(RELEASES[release]).variant
    with launch.record() as names:
        variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    assert names == ["a_kernel"]
    assert len(launches) == 2


@each_release
def test_long_axis_is_folded(
    release: str, build: Callable[[Any], launch.Kernel], launches: list[tuple[Any, ...]]
) -> None:
    variant = build(RELEASES[release]).variant
    variant(2, 65535, torch.zeros(3), None, 5, torch.zeros(3))
    variant(2, 65536, torch.zeros(3), None, 5, torch.zeros(3))
    variant(2, 0, torch.zeros(3), None, 5, torch.zeros(3))
    assert [arguments[:3] for arguments in launches] == [(2, 65535, 1), (2, 32768, 2), (2, 0, 1)]


@each_release
def test_kernel_stays_loaded_with_its_variant(
    release: str, build: Callable[[Any], launch.Kernel]
) -> None:
    """From Triton 3.8 on, a compiled kernel is unloaded from the GPU when it is freed."""
    kernel = build(RELEASES[release])
    compiled, variant = weakref.ref(kernel._compiled), kernel.variant
    del kernel
    # The function that `build` set refers to the compiled kernel. `monkeypatch` restores the original.
    launch.compile_fitting = None  # type: ignore[assignment]
    gc.collect()
    assert compiled() is not None
    del variant
    gc.collect()
    assert compiled() is None


@each_release
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_are_called(
    release: str,
    hook: str,
    build: Callable[[Any], launch.Kernel],
    launches: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks that are set after the kernel was built are called until they are removed.

    One hook is added to Triton's chain, another one replaces the chain.
    """
    variant = build(RELEASES[release]).variant
    hook_calls: list[Any] = []
    chain = getattr(triton.knobs.runtime, hook)
    chain.add(hook_calls.append)
    try:
        variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    finally:
        chain.remove(hook_calls.append)
    assert len(hook_calls) == 1
    variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    assert len(hook_calls) == 1
    monkeypatch.setattr(triton.knobs.runtime, hook, hook_calls.append)
    variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    assert len(hook_calls) == 2
    assert len(launches) == 3


@each_release
@pytest.mark.parametrize("scratch", ["global_scratch_size", "profile_scratch_size"])
def test_scratch_memory_is_allocated(
    release: str,
    scratch: str,
    build: Callable[[Any], launch.Kernel],
    launches: list[tuple[Any, ...]],
) -> None:
    kernel = build(type("Scratch", (RELEASES[release],), {scratch: 128}))
    assert (kernel.launcher, kernel.reason) == ("compiled", "the kernel needs scratch memory")
    kernel.variant(2, 3, torch.zeros(3), None, 5, torch.zeros(3))
    assert len(launches) == 1 and "scratch" in launches[0]


class Instrumented(Launcher38):
    gsan_enabled = True


class Unwrapped:
    """A launcher without a C function behind it."""

    def __call__(self, *args: Any) -> None:
        raise AssertionError


class Reordered(Launcher36):
    """A launcher whose C function takes the kernel's arguments first."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(*args, gridX, gridY, gridZ, stream, function)


class Checked(Launcher36):
    """A launcher that tests the grid before it launches."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        if gridX * gridY * gridZ > 0:
            self.launch(gridX, gridY, gridZ, stream, function, *args)


class Extended(Launcher37):
    """A launcher that adds an argument to the kernel's."""

    def __call__(self, *args):
        super().__call__(*args, id(object()))


@pytest.mark.parametrize("launcher", [Instrumented, Unwrapped(), Reordered, Checked, Extended])
def test_unknown_launchers_are_left_to_triton(
    launcher: Any, build: Callable[[Any], launch.Kernel], launches: list[tuple[Any, ...]]
) -> None:
    """The direct launch is refused when the kernel is built, and nothing is launched to decide it."""
    kernel = build(launcher)
    assert kernel.launcher == "compiled"
    assert kernel.reason
    assert launches == []


def test_without_launch_hooks_nothing_is_launched_directly(
    build: Callable[[Any], launch.Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(triton, "knobs")
    assert launch_hooks() is None
    assert build(Launcher37).launcher == "compiled"


def test_without_compilation_ahead_kernels_are_launched_ordinarily(
    build: Callable[[Any], launch.Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # `build` replaced `compiles_ahead`, which is tested here
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.delattr(triton.compiler, "ASTSource")
    assert not compiles_ahead()
    kernel = build(Launcher37)
    assert kernel.launcher == "ordinary" and "cannot compile" in kernel.reason
    with pytest.raises(RuntimeError, match="cannot compile a kernel without launching it"):
        compile_ahead(None, {}, {}, {}, {})


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_launcher_of_the_installed_release_is_called_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is compiled for Hopper. Only the driver and the C function are replaced."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    calls: list[tuple[Any, ...]] = []
    utils = SimpleNamespace(launch=lambda *args: calls.append(args), build_signature_metadata=tuple)
    active = SimpleNamespace(
        utils=utils, get_current_device=lambda: 0, get_current_stream=lambda index: STREAM
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(driver, "library_dirs", list)  # there may be no library of a driver
    for name, value in {
        "PyKernelArg": lambda **parts: tuple(parts),
        "ARG_KERNEL": 1,
        "ARG_CONSTEXPR": 0,
    }.items():
        monkeypatch.setattr(driver, name, value, raising=False)
    monkeypatch.setattr(driver, "compile_module_from_src", lambda **_: utils, raising=False)
    monkeypatch.setattr(direct, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(launch, "shared_memory", lambda index: 1 << 16)
    compile_fitting = launch.compile_fitting

    def compiled_for_hopper(request: launch.Request, limit: int) -> Any:
        compiled = compile_fitting(request, limit, SM_90)
        compiled.function = FUNCTION
        compiled._run = driver.CudaLauncher(compiled.src, compiled.metadata)
        return compiled

    monkeypatch.setattr(launch, "compile_fitting", compiled_for_hopper)
    kernel = launch.diagnose(0)
    assert (kernel.launcher, kernel.reason) == ("direct", "")
    x, y = torch.zeros(16), torch.zeros(16)
    kernel.variant(2, 3, x, y, None, None, 5)
    kernel._compiled.run(
        2,
        3,
        1,
        STREAM,
        FUNCTION,
        kernel._compiled.packed_metadata,
        None,
        None,
        None,
        x,
        y,
        None,
        None,
        5,
        *kernel._filler,
    )
    direct_call, call_by_triton = calls
    assert direct_call == addresses(call_by_triton)


def test_target_without_tritons_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert current_target() == SM_90


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_kernel_is_assembled_as_by_inductor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inductor sets another assembler than Triton's default; fusedops must use it, too.

    The assembler's version is part of the keys of Triton's cache, so otherwise later processes
    would compile again. Triton remembers the version after an earlier compilation; the package must
    replace it. The target is Ampere, for which Inductor chooses the assembler with all releases of
    Triton; for Hopper, Triton has its own from 3.9 on.
    """
    from torch._inductor.runtime import compile_tasks
    from triton.backends.nvidia import compiler

    ampere = gpu_target("cuda", arch=80, warp_size=32)
    assembler, log = tmp_path / "ptxas", tmp_path / "log"
    ptxas = triton.knobs.nvidia.ptxas.path
    assembler.write_text(f'#!/bin/sh\necho >>{log}\n{ptxas} "$@" && echo of inductor\n')
    assembler.chmod(0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        compile_tasks,
        "_set_triton_ptxas_path",
        lambda: monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler)),
    )
    monkeypatch.setattr(
        launch, "compile_fitting", lambda request, _: launch.compile_kernel(request, ampere)
    )
    monkeypatch.setattr(launch, "shared_memory", lambda index: 1 << 16)
    monkeypatch.setattr("fusedops.core.launches.direct.bind", lambda compiled, *_, **__: compiled)
    try:
        assert "of inductor" not in compiler.get_ptxas_version(80)
        assert launch.diagnose(0).variant.asm["cubin"]
        assert log.exists()
        assert "of inductor" in compiler.get_ptxas_version(80)
    finally:
        compiler.get_ptxas_version.cache_clear()
    # In another release Inductor's function may take arguments. Then Triton's assembler is used.
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda argument: None)
    assert launch.diagnose(0).variant.asm["cubin"]


def test_launches_overlap_only_if_the_compiler_supports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overlaps = overlaps_launches.__wrapped__
    assert overlaps()
    with monkeypatch.context() as patch:
        patch.delattr("triton.backends.nvidia.compiler.CUDAOptions")
        assert not overlaps()
    monkeypatch.delattr("triton.language.extra.cuda.gdc_wait")
    assert not overlaps()


# A script that imports the package while private names of torch are hidden from it, and compares
# results. torch itself still sees the names. Each set of names is tested in a separate process,
# which is forked after the slow imports; `torch.func` imports Dynamo at its first use, which takes
# longer than everything else here. The first of these processes writes the package's bytecode, and
# the others read it. The parent process runs no backward: where PyTorch has started its threads for
# backwards, one for each GPU, it refuses a backward in a forked process.
_WITHOUT = """
import importlib, os, sys, traceback
import einops, torch, torch.distributed, torch._dynamo, torch._subclasses.functional_tensor

def hiding(owner, names):
    class Hiding:
        def __getattr__(self, name):
            if name != names[0]:
                return getattr(owner, name)
            if len(names) == 1:
                raise AttributeError(name)
            return hiding(getattr(owner, name), names[1:])
    return Hiding()

def check():
    import fusedops
    F = torch.nn.functional
    def norm(x, w, b): return fusedops.layer_norm(x, (16,), w, b), F.layer_norm(x, (16,), w, b)
    def dropped(x, w, b): return fusedops.bias_dropout_add(x, b, x * 2, p=0.0), x + b + x * 2
    def gelu(x, w, b): return fusedops.gelu(x), F.gelu(x)
    def gated(x, w, b): return fusedops.swiglu(x, x + w), F.silu(x) * (x + w)
    def sliced(x, w, b): return (fusedops.batched_layer_norm_tanh(x.view(6, 2, 8)),
                                 F.layer_norm(x.view(6, 2, 8), (8,)).tanh())
    def ragged(x, w, b):
        slices = x[:, :4], x
        return (torch.cat(fusedops.batched_layer_norm_tanh(slices), 1),
                torch.cat([F.layer_norm(part, part.shape[1:]).tanh() for part in slices], 1))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 16), (16,), (16,))]
    for case in (norm, dropped, gelu, gated, sliced, ragged):
        actual, expected = case(*leaves)
        torch.testing.assert_close(actual, expected, msg=f"{case.__name__}: the output")
        cotangent = torch.randn_like(expected)
        for ours, theirs in zip(*(torch.autograd.grad(y, leaves, cotangent, allow_unused=True, retain_graph=True)
                                  for y in (actual, expected))):
            assert (ours is None) == (theirs is None), case.__name__
            if ours is not None:
                torch.testing.assert_close(ours, theirs, msg=f"{case.__name__}: a gradient")
        for repetition in (0, 1):  # the second one uses the caches that the first one filled
            values = [leaf.detach() for leaf in leaves]
            actual, expected = (
                torch.func.grad(lambda x: (case(x, *values[1:])[i] * cotangent).sum())(values[0])
                for i in (0, 1))
            torch.testing.assert_close(actual, expected, msg=f"{case.__name__}: torch.func.grad")

original_import = importlib.import_module

def import_outside_torch(name, package=None):
    if name.startswith("torch."):
        raise ImportError(name)
    return original_import(name, package)

sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
for path in sys.argv[2:]:
    child = os.fork()
    if child:
        failed = os.waitpid(child, 0)[1]
        print(path, "fails" if failed else "holds", flush=True)
        continue
    try:
        if path == "imports":
            importlib.import_module = import_outside_torch
        else:
            for each in path.split(","):
                sys.modules["torch"] = hiding(sys.modules["torch"], each.split("."))
        import fusedops
        sys.modules["torch"] = torch
        assert path == "imports" or {*path.split(",")} <= {*sys.modules["fusedops.core.compat.lookup"].PRIVATE}
        importlib.import_module = original_import
        torch.manual_seed(0)
        check()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
"""


def test_contiguous_tangents_does_nothing_without_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._functorch, "config", SimpleNamespace())
    with contiguous_tangents():
        pass


def _stage(x: torch.Tensor) -> torch.Tensor:
    return x + (2.0 if is_exporting() else 1.0)


class _Stage(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _stage(x)


def test_exporting_is_distinguished_from_compiling(fresh_dynamo: None) -> None:
    """Code that `torch.compile` traces, and a plain call, do not count as exporting."""
    x = torch.zeros(3)
    assert torch.equal(torch.compile(_stage, backend="eager", fullgraph=True)(x), x + 1.0)
    for strict in (True, False):
        assert torch.equal(torch.export.export(_Stage(), (x,), strict=strict).module()(x), x + 2.0)
    assert torch.equal(_stage(x), x + 1.0)


@pytest.mark.once
@pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="environments with a GPU may have a NumPy that Triton 3.6's interpreter does not support",
)
def test_values_without_private_names(tmp_path: Path, full: bool) -> None:
    """All private names of torch are hidden, then private modules; with ``--full`` each name alone.

    The interpreter runs the kernels, because without it every call on a CPU runs the reference.
    """
    paths = [",".join(sorted(PRIVATE)), "imports", *(sorted(PRIVATE) if full else ())]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(fusedops.__file__).parents[1]),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", _WITHOUT, str(tmp_path), *paths]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    outcomes = dict(line.split() for line in process.stdout.splitlines())
    assert outcomes == dict.fromkeys(paths, "holds"), process.stderr
