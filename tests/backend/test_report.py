"""`fusedops.explain` counts what `fusedops.compile` changes besides regions."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import list_mode_options
from torch.nn import functional as F

import fusedops
from backends import randn
from fusedops.backend import places, prediction
from fusedops.core.launches import launch
from pages import ROOT, blocks
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS = 1024


class Changed(nn.Module):
    """A model with an example of each change that the backend counts.

    It has an embedding of few rows, a batch in the order of a sort, grouped-query attentions with
    four masks (twice causal, once all True, once dependent on an input), and capped logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.few, self.head = nn.Embedding(4, 16), nn.Linear(32, 4099, bias=False)

    def forward(self, x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.few(torch.arange(x.numel(), device=x.device) % 4)[: x.shape[0]]
        rows = x[order.argsort()]
        q, k, v = (
            layer(rows).view(8, 128, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (heads.repeat_interleave(2, 1) for heads in (k, v))
        positions = torch.arange(128, device=x.device)
        causal = positions <= positions[:, None]
        all_true = (positions >= 0).expand(128, 128)
        of_input = (rows[:, :1].view(8, 1, 128, 1) < 9).expand(8, 1, 128, 128)
        for mask in (causal, causal, all_true, of_input):
            q = F.scaled_dot_product_attention(q, k, v, mask)
        logits = self.head(q.transpose(1, 2).reshape(_ROWS, 32))
        capped = torch.tanh(logits / 9) * 9
        return F.cross_entropy(capped.float(), order), capped


def test_changes_are_counted() -> None:
    model, order = Changed().to(DEVICE), torch.randperm(_ROWS, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        report = fusedops.explain(model, randn(_ROWS, 16).requires_grad_(), order)
    assert report.changes == {
        "an attention that is causal in the place of its mask": 2,
        "an attention without its mask, which masks nothing": 1,
        "an attention whose mask is made contiguous": 1,
        "an attention of keys and values that are not repeated for groups of queries": 3,
        "one product of the same rows in the place of several": 1,
        "one cast of several parameters": 1,
        "a product with columns padded to a multiple of 64": 1,
        "a returned activation that is computed again in the backward": 1,
        "an embedding of few rows, whose gradient is a matrix product": 1,
        "rows in the order of a sort, with gradients in the former order": 1,
    }
    assert "  changed: 2 x an attention that is causal in the place of its mask\n" in str(report)


def test_explain_is_not_limited_by_dynamos_cache() -> None:
    """12 models are more than Dynamo compiles for one function before it falls back to eager."""
    for cols in range(8, 32, 2):
        report = fusedops.explain(nn.LayerNorm(cols).to(DEVICE), randn(3, cols))
        assert len(report.regions) == 1


def test_explain_of_another_shape_has_no_symbols() -> None:
    """Columns whose number is a symbol would be left."""
    for columns in (8, 12):
        report = fusedops.explain(
            lambda x: (x.softmax(-1) + x).relu(), randn(6, columns), rest="eager"
        )
        assert [region.reason for region in report.regions] == [""]


def test_explain_raises_for_what_is_not_callable() -> None:
    with pytest.raises(
        TypeError, match="explain: model must be a module or a function, got NoneType"
    ):
        fusedops.explain(None)  # type: ignore[arg-type]


def test_report_without_regions_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    assert str(fusedops.explain(doubled, randn(3, 4))) == (
        "no row-wise region was found, in 1 graph: no norm, softmax, dropout or bias of a product (to "
        "fuse other code, decorate its function with fusedops.rowwise)"
    )
    monkeypatch.setattr(launch, "runs_kernels", lambda kind: False)
    torch.compiler.reset()
    text = str(fusedops.explain(nn.LayerNorm(4).to(DEVICE), randn(3, 4)))
    reason = f"there are no kernels for {DEVICE.type} tensors"
    if DEVICE.type == "cpu":
        reason += " (set TRITON_INTERPRET=1 to see what a GPU fuses)"
    assert text == f"no row-wise region was found, in 1 graph: {reason}"


def test_reasons_end_in_a_next_step() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    (line,) = str(fusedops.explain(function, randn(6, 8))).splitlines()[1:2]
    step = "to fuse it anyway, decorate its function with fusedops.rowwise"
    assert line.endswith(f"left: Inductor is predicted to be as fast ({step})")


def test_region_that_triton_cannot_compile_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    specialise = launch.specialise

    def fail_backward(request: launch.Request, device_index: int) -> launch.Variant:
        if "backward" in request.kernel.fn.__name__:
            error = RuntimeError("PassManager::run failed")
            raise launch.NotCompiledError("backward_kernel", error)
        return specialise(request, device_index)

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "specialise", fail_backward)
    norm, x = nn.LayerNorm(11).to(DEVICE), randn(6, 11)
    (region,) = fusedops.explain(norm, x).regions
    error = "RuntimeError: PassManager::run failed"
    assert region.reason == f"Triton cannot compile backward_kernel ({error})"
    torch.compiler.reset()
    torch.testing.assert_close(fusedops.compile(norm)(x), norm(x))
    torch.compiler.reset()
    with torch.no_grad():  # only the forward kernel is compiled
        (region,) = fusedops.explain(norm, x).regions
    assert not region.reason


@pytest.fixture
def compiled_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the test compiles, with no kernel cached before it."""
    specialise, names = launch.specialise, list[str]()

    def compiled(request: launch.Request, device_index: int) -> launch.Variant:
        names.append(request.kernel.fn.__name__)
        return specialise(request, device_index)

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "specialise", compiled)
    return names


@pytest.mark.parametrize(
    ("cols", "trains"), [(13, "all"), (16, "all"), (16, "linear"), (16, "none")]
)
def test_only_kernels_that_calls_launch_are_compiled(
    cols: int, trains: str, compiled_names: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(cols, cols), nn.Dropout(0.25), nn.LayerNorm(cols)).to(DEVICE)
    model.requires_grad_(trains != "none")
    model[2].requires_grad_(trains == "all")
    # The backward takes several programs for 600 rows, and a third kernel to add up their sums.
    run, x = fusedops.compile(model), randn(600, cols)
    with launch.record() as launched:
        y = run(x)
        if trains != "none":
            y.sum().backward()
    assert sorted(compiled_names) == sorted(launched)
    assert len(launched) == (1 if trains == "none" else 3)


class _Heads(nn.Module):
    """Queries and keys are parts of one projection, and normalised with heads first."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(48, 3 * 48, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(16), nn.RMSNorm(16)])

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(x).unflatten(-1, (3, 3, 16))
        q, k, v = [part.transpose(1, 2) for part in packed.unbind(2)]
        q, k = self.norms[0](q) * 2, self.norms[1](k) * 2
        return F.scaled_dot_product_attention(q, k, v)


def test_strided_rows_need_neither_copies_nor_a_second_compilation(
    compiled_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _Heads().to(DEVICE), randn(2, 5, 48)
    run = fusedops.compile(model)
    with torch.no_grad(), launch.record() as launched:
        run(x)
    assert compiled_names == launched == ["forward_kernel"]  # both norms are one region
    copied: list[Tensor] = []
    contiguous = torch.Tensor.contiguous

    def recording(t: Tensor, **options: Any) -> Tensor:
        # Two calls are not copies of the model's: those of fake tensors in a compiler, and those of
        # AOTAutograd, which brings cotangents into a memory format.
        if type(t) is Tensor and not options and not t.is_contiguous():
            copied.append(t)
        return contiguous(t, **options)

    monkeypatch.setattr(torch.Tensor, "contiguous", recording)
    y = run(x)
    (y * torch.randn_like(y)).sum().backward()
    assert not copied


def test_report_has_a_line_for_each_kind_of_region() -> None:
    norms = nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)) for _ in range(3)]
    ).to(DEVICE)
    lines = str(fusedops.explain(norms, randn(6, 8).requires_grad_())).splitlines()
    size = 6 * 8 * 4 / 1024
    # Each of three norms moves x and y forward, and dy, x and dx backward. It saves x.
    moved = f"{3 * 5 * size:.1f} KiB moved"
    saved = f"{3 * size:.1f} KiB saved"
    summary, line, place, _ = lines
    assert summary == (
        f"3 of 3 row-wise regions are fused: 3 operators in 1 graph, {moved}, {saved} for backward"
    )
    assert line.startswith(f"  3 x (6, 8)  native_layer_norm  {5 * size:.1f} KiB moved, ")
    assert place == "      in 0.0, and 2 more"


class _Block(nn.Module):
    """A region in three modules and one line, and one in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.norm(x + self.drop(self.down(h)))


def test_regions_have_the_modules_and_lines_of_the_model() -> None:
    model = nn.Sequential(_Block(), nn.Sequential(_Block())).to(DEVICE)
    first = _Block.forward.__code__.co_firstlineno
    name = Path(__file__).name
    regions = fusedops.explain(model, randn(6, 8)).regions
    places = {(region.modules, region.lines) for region in regions}
    for prefix in ("0", "1.0"):
        joined = tuple(f"{prefix}.{part}" for part in ("down", "drop", "norm"))
        assert (joined, (f"{name}:{first + 2}",)) in places
        assert ((f"{prefix}.up",), (f"{name}:{first + 1}",)) in places


def test_region_of_the_outermost_module_has_the_name_of_its_class() -> None:
    norm = nn.LayerNorm(8).to(DEVICE)
    (region,) = fusedops.explain(lambda x: norm(x), randn(6, 8)).regions
    assert region.modules == ("LayerNorm",)


def test_region_in_a_function_has_its_line_alone() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), weight)

    weight = randn(8).requires_grad_()
    report = fusedops.explain(function, randn(6, 8), weight)
    (region,) = report.regions
    line = f"{Path(__file__).name}:{function.__code__.co_firstlineno + 1}"
    assert (region.modules, region.lines) == ((), (line,))
    assert f"      in {line}" in str(report).splitlines()


def test_lines_of_a_file_are_joined_in_the_report() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-6) * weight

    report = fusedops.explain(function, randn(6, 8), randn(8).requires_grad_())
    first = function.__code__.co_firstlineno + 1
    assert f"      in {Path(__file__).name}:{first}, {first + 1}" in str(report).splitlines()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("G['model'].layers.0.norm", "layers.0.norm"),
        ("G['model'].layers[0].norm", "layers.0.norm"),
        ("G['model'].__dict__['_modules']['base'].norm", "base.norm"),
        ("G['model']._modules['layers']._modules['0']", "layers.0"),
        ("G['model']", "LayerNorm"),
    ],
)
def test_names_of_modules_are_those_of_named_modules(path: str, name: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {
        "1": ("G['model']", nn.LayerNorm),
        "2": (path, nn.LayerNorm),
    }
    assert places.modules([node]) == (name,)


def test_source_of_a_region_is_that_of_its_kernels() -> None:
    norm, weight = nn.LayerNorm(8).to(DEVICE), randn(8, 4)
    report = fusedops.explain(lambda x: torch.softmax(norm(x) @ weight, -1), randn(6, 8))
    fused, left = report.regions
    source = fused.source()
    assert source.count("@triton.jit") == 2
    assert "def forward_kernel" in source and "def backward_kernel" in source
    with pytest.raises(ValueError, match="the region is left: Inductor is predicted"):
        left.source()


def test_report_in_the_page_is_printed() -> None:
    """The first example of docs/compile.md, and the block that follows it."""
    example, printed, *_ = blocks((ROOT / "docs" / "compile.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    with torch.device(DEVICE):
        exec(example.text.replace("print(report)", ""), names)
    # The last line depends on the GPU. The example's own lines of code have no file.
    lines = str(names["report"]).splitlines()[:-1]
    assert lines == printed.text.splitlines()[:-1]


@pytest.mark.parametrize("bits", [0, 1024])
def test_machine_is_the_gpu_if_it_reports_its_bandwidth(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, or with one of unknown bandwidth, it is an H200."""
    properties = types.SimpleNamespace(
        name="a GPU",
        memory_clock_rate=1_000_000,
        memory_bus_width=bits,
        multi_processor_count=66,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    prediction.machine_of.cache_clear()
    try:
        machine = prediction.machine_of()
    finally:
        prediction.machine_of.cache_clear()
    assert machine == (prediction.Machine("a GPU", 256e9, 66) if bits else prediction.H200)


def test_prediction_has_the_slowest_region_first() -> None:
    """A norm becomes an operator, a softmax is left, and a product is in no region."""
    norm, weight = nn.LayerNorm(8).to(DEVICE), randn(8, 4)

    def function(x: Tensor) -> Tensor:
        return torch.softmax(norm(x) @ weight, -1)

    report = fusedops.explain(function, randn(6, 8).requires_grad_())
    fused, left = report.slowest
    assert left.reason
    assert not fused.reason
    # The norm reads and writes rows of 8 numbers, and its backward reads two and writes one. Sums
    # of Inductor read those two once more. The softmax has rows of 4.
    bandwidth, rates = prediction.machine_of().bandwidth, prediction.RATES
    row, short = 6 * 8 * 4 / bandwidth, 6 * 4 * 4 / bandwidth
    times = [5 * row * rates.moved, 5 * short * rates.moved]
    assert [fused.seconds, left.seconds] == pytest.approx(times)
    instead = times[0] + 2 * row * rates.summed
    assert fused.times is not None and fused.times.inductor == pytest.approx(instead)
    assert report.rest == (6 * 8 + 8 * 4 + 6 * 4) * 4
    *_, line = str(report).splitlines()
    fused_time, instead_time, left_time, rest_time = [
        f"{seconds * 1e6:.1f} µs"
        for seconds in (times[0], instead, times[1], 3 * report.rest / bandwidth)
    ]
    name, bandwidth, _ = prediction.machine_of()
    assert line == (
        f"  predicted at {bandwidth / 1e12:.2f} TB/s ({name}): {fused_time} for operators instead "
        f"of {instead_time}, {left_time} for regions that are left, {rest_time} for the bytes of the rest"
    )


def test_without_a_graph_the_report_says_so() -> None:
    compiled = torch.compile(nn.LayerNorm(8).to(DEVICE), backend="eager")
    report = fusedops.explain(lambda x: torch.compiler.disable(compiled)(x), randn(6, 8))
    assert "nothing was traced (explain a model before it is compiled" in str(report)


def test_each_eager_operator_takes_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "RATES", prediction.Work(kernels=1e-3))
    x = randn(6, 8)
    with torch.no_grad():
        report = fusedops.explain(lambda x: F.layer_norm(x.sin().mT.mT + 1, (8,)), x, rest="eager")
    (region,) = report.fused
    assert region.in_turn == pytest.approx(3e-3, rel=1e-3)
    assert "instead of 3.00 ms" in str(report)


def test_report_of_inference_has_the_forward_alone() -> None:
    """A norm becomes an operator, a softmax is left, and a product is in no region."""
    norm, weight = nn.LayerNorm(8).to(DEVICE), randn(8, 4)

    def function(x: Tensor) -> Tensor:
        return torch.softmax(norm(x) @ weight, -1)

    with torch.no_grad():
        report = fusedops.explain(function, randn(6, 8))
    (fused,) = report.fused
    size = 6 * 8 * 4
    assert (fused.forward, fused.moved, fused.saved) == (2 * size, 2 * size, 0)
    bandwidth = prediction.machine_of().bandwidth
    left_bytes = 2 * 6 * 4 * 4
    times = [region.seconds * bandwidth / prediction.RATES.moved for region in report.slowest]
    assert times == pytest.approx([2 * size, left_bytes])
    assert (report.rest, report.differentiated) == ((6 * 8 + 8 * 4 + 6 * 4) * 4, 0)
    summary, line, *_, last = str(report).splitlines()
    assert summary.endswith("in 1 graph, 0.4 KiB moved")
    assert line.startswith("  1 x (6, 8)  native_layer_norm  0.4 KiB moved instead of ")
    rest = f"{report.rest / bandwidth * 1e6:.1f} µs for the bytes of the rest"
    assert last.endswith(rest)


def test_compile_raises_for_what_is_not_callable() -> None:
    with pytest.raises(TypeError, match="compile: model must be a module or a function, got int"):
        fusedops.compile(3)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"options": {"nonsense": 1}}, RuntimeError, "Unexpected optimization option nonsense"),
        (
            {"options": {"max_autotune": "yes"}},
            RuntimeError,
            "Unexpected type of attr max_autotune, got str should be bool",
        ),
        (
            {"options": ["max_autotune"]},
            TypeError,
            "compile: options must be a mapping of Inductor's options, got list",
        ),
        ({"mode": "fast"}, RuntimeError, "Unrecognized mode=fast"),
        (
            {"mode": "max-autotune", "options": {"max_autotune": True}},
            RuntimeError,
            "Either mode or options",
        ),
        (
            {"mode": "reduce-overhead", "options": {"fusedops.memory": "low"}},
            RuntimeError,
            "Either mode or options",
        ),
    ],
)
def test_options_are_checked_before_the_first_step(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fusedops.compile(nn.LayerNorm(4), **arguments)


def test_options_of_inductor_are_accepted() -> None:
    for arguments in (
        {"options": {"max-autotune": True}},
        {"options": {}},
        {"mode": "max-autotune"},
        {"mode": "reduce-overhead"},
        {"mode": "default"},
        {"options": {**list_mode_options("max-autotune"), "fusedops.memory": "low"}},
    ):
        compiled = fusedops.compile(nn.LayerNorm(4), **arguments)  # type: ignore[arg-type]
        assert callable(compiled)
