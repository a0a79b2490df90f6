"""How a kernel's config is chosen: from which source, depending on what, and how often."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

import fusedops
from fusedops.core.configs import cache, tuning
from fusedops.core.configs.tuning_key import (
    BUCKET,
    BUCKETS,
    Config,
    TuningKey,
    block_holding,
    family_of,
    valid,
)
from fusedops.core.launches import launch
from fusedops.core.spec import Spec
from fusedops.tune.workloads import workload_for
from support import ALL_SPECS, DEVICE, INTERPRETED, as_tuple, random_like, tensors_of
from tuning_keys import every_key

DEVICE_NAME = "Test GPU"
KEY = TuningKey("norm_forward", ("layer", "plain", "alone"), "16bit", 1024, 3)
CACHED, TABLED, FORCED = (
    Config(block_n=1024, rows=4, warps=4),
    Config(block_n=1024, rows=1, warps=2),
    Config(block_n=1024, rows=8, warps=8),
)

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)


@pytest.fixture(autouse=True)
def no_other_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A made-up device with an empty cache and no table."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "device_name", lambda index: DEVICE_NAME)
    monkeypatch.setattr(tuning, "table", lambda device: {})
    monkeypatch.setattr(tuning, "on_demand", lambda: "")
    tuning.forget()
    yield
    tuning.forget()


def set_table(monkeypatch: pytest.MonkeyPatch, *entries: tuple[int, int, Config]) -> None:
    """Sets a table with ``entries`` (columns, bucket, config) for the group of `KEY`."""
    sizes: dict[int, list[Config | None]] = {}
    for cols, bucket, config in entries:
        sizes.setdefault(cols, [None] * len(BUCKETS))[bucket] = config
    monkeypatch.setattr(tuning, "table", lambda device: {KEY.kernel: {KEY.group: sizes}})


def heuristic(key: TuningKey) -> Config:
    family = family_of(key.kernel)
    assert family is not None
    return family.heuristic(key)


# --- the order of choice --------------------------------------------------------------------------


def test_forced_then_cache_then_table_then_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({CACHED, TABLED, FORCED, heuristic(KEY)}) == 4
    assert (tuning.choose(KEY, 0), tuning.source(KEY, 0)) == (heuristic(KEY), "heuristic")
    set_table(monkeypatch, (1024, 3, TABLED))
    assert (tuning.choose(KEY, 0), tuning.source(KEY, 0)) == (TABLED, "table")
    assert cache.write(KEY, DEVICE_NAME, CACHED, {})
    assert (tuning.choose(KEY, 0), tuning.source(KEY, 0)) == (CACHED, "cache")
    with tuning.forced("norm_forward", FORCED):
        assert (tuning.choose(KEY, 0), tuning.source(KEY, 0)) == (FORCED, "forced")
        with tuning.forced("norm_forward", TABLED):
            assert tuning.choose(KEY, 0) == TABLED
        assert tuning.choose(KEY, 0) == FORCED
    assert tuning.choose(KEY, 0) == CACHED


def test_interpreter_uses_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements on a GPU do not apply to the interpreter."""
    monkeypatch.undo()
    assert tuning.device_name(-1) == ""
    assert tuning.source(KEY, -1) == "heuristic"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (((1536, 3, TABLED),), TABLED),  # the next larger size
        (((1536, 3, CACHED), (1024, 3, TABLED)), TABLED),  # the exact size comes first
        (((512, 3, TABLED),), None),  # no smaller size
        # No size that is three times as large.
        (((3072, 3, Config(block_n=512, rows=1, warps=4)),), None),
        (((2048, 3, Config(block_n=512, rows=1, warps=4)),), Config(block_n=512, rows=1, warps=4)),
        # A block that holds 1536 columns has twice the lanes that 1024 columns need.
        (((1536, 3, Config(block_n=2048, rows=1, warps=4)),), None),
        (((1024, 1, TABLED), (1024, 4, CACHED)), TABLED),  # fewer rows rather than more
        (((1024, 1, CACHED), (1024, 2, TABLED)), TABLED),  # the nearest bucket
        (((1024, 4, TABLED),), TABLED),
        (((1024, 3, Config(block_n=1024, rows=3, warps=4)),), None),  # tiles have 2**n rows
        (((1024, 3, Config(block_n=1024, rows=4, warps=64)),), None),  # more than 32 warps
    ],
)
def test_entry_of_the_table_for_a_size(
    entries: tuple[tuple[int, int, Config], ...],
    expected: Config | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_table(monkeypatch, *entries)
    assert tuning.shipped(KEY, DEVICE_NAME) == expected
    assert tuning.choose(KEY, 0) == (expected or heuristic(KEY))


def test_buckets_of_rows() -> None:
    """The bucket of a launch is the last whose smallest number of rows is reached."""
    for rows in (*range(1, 300), 4095, 4096, 4097, 65535, 65536, 2**20, 2**31, 2**40):
        assert BUCKET[rows.bit_length()] == sum(rows >= least for least in BUCKETS) - 1, rows


def test_block_holding_a_row() -> None:
    for cols in (1, 15, 16, 17, 255, 256, 257, 11008, 65536, 65537):
        block = block_holding(cols)
        assert block in {1 << bits for bits in range(4, 32)}
        assert block >= cols and (block == 16 or block < 2 * cols), cols


# --- how often a config is chosen -----------------------------------------------------------------


def columns(spec: Spec, cols: int) -> int:
    """``cols``, or the length of a row of kernels that are tuned for vectors."""
    return 1024 if spec.name in ("gelu", "geglu", "glu", "swiglu") else cols


def run(spec: Spec, rows: int, cols: int = 48) -> None:
    sample = spec.benchmark((rows, columns(spec, cols)), torch.float32, DEVICE)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    torch.autograd.grad(outputs, leaves, random_like(outputs))


@every
@pytest.mark.kernels
def test_calls_do_not_tune(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call does not call the tuner, and launches only the operator."""

    def improve(*key: object) -> None:
        raise AssertionError("the tuner was called")

    fake_tuner = types.SimpleNamespace(improve=improve)
    monkeypatch.setitem(sys.modules, "fusedops.tune.ondemand", fake_tuner)  # type: ignore[arg-type]
    with launch.record() as names:
        run(spec, 20)
    assert len(names) <= sum(spec.launches)


@every
@pytest.mark.kernels
def test_config_is_chosen_once(spec: Spec) -> None:
    """There is one choice for each bucket of rows. All other calls only look it up."""
    with tuning.collected_keys() as keys:
        run(spec, 20)
        first = dict(keys)
        keys.clear()
        run(spec, 20)
        run(spec, 17)
        assert not keys
        run(spec, 5)
        assert set(keys) == {replace(key, bucket=0) for key in first}


@every
@pytest.mark.kernels
def test_buckets_share_variants(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new number of rows compiles one variant for a new config, and nothing for a known one."""
    doubled: dict[str, Config] = {}
    choose = tuning.choose

    def by_bucket(key: TuningKey, device_index: int) -> Config:
        config = choose(replace(key, bucket=3), device_index)  # one heuristic for all buckets
        return (
            doubled.setdefault(key.kernel, replace(config, warps=config.warps * 2))
            if key.bucket == 1
            else config
        )

    monkeypatch.setattr(launch, "_built", {})  # without the variants of other tests
    monkeypatch.setattr(tuning, "choose", by_bucket)
    # The first and the last of the three buckets share a config.
    for rows in (1, 3, 20, 7, 30, 300):
        before = launch.variants()
        run(spec, rows, cols=56)
        if rows in (1, 20):
            assert launch.variants() > before
        else:
            # Sums over many rows need a second kernel, which is built together with the first.
            assert launch.variants() == before, rows
    assert doubled


@every
@pytest.mark.kernels
def test_capture_uses_the_plan_of_another_bucket(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are the same. The call after the capture gets its own plan."""
    choose = tuning.choose

    def by_bucket(key: TuningKey, device_index: int) -> Config:
        config = choose(replace(key, bucket=3), device_index)
        return replace(config, warps=config.warps * 2) if key.bucket == 1 else config

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(tuning, "choose", by_bucket)
    sample = spec.benchmark((20, columns(spec, 56)), torch.float32, DEVICE)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]

    def results() -> list[torch.Tensor]:
        torch.manual_seed(3)
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        return [*outputs, *torch.autograd.grad(outputs, leaves, random_like(outputs))]

    run(spec, 300, cols=56)
    built = launch.variants()
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "capturing", lambda device_index: True)
        captured = results()
    assert launch.variants() == built
    # Sums of 20 fp32 numbers near one are taken in another order.
    torch.testing.assert_close(captured, results(), rtol=1e-5, atol=1e-5)
    assert launch.variants() > built


# --- candidates and shipped tables ----------------------------------------------------------------


@pytest.mark.once
def test_candidates_hold_the_heuristic_and_are_valid(full: bool) -> None:
    backward = ("layer", "plain", "2 sums", "3 moved")
    by_element = ("one", "equal", "elements")  # elements are loaded one by one
    others = [
        TuningKey("norm_backward", backward, "16bit", 15132, 3),
        TuningKey("slices_backward", by_element, "32bit", 4095, 3),
    ]
    # Each key has five entries, one for each bucket of rows.
    keys = every_key() if full else every_key()[::4]
    for key in [*keys, *others]:
        family = family_of(key.kernel)
        assert family is not None, key
        candidates = family.candidates(key)
        assert candidates[0] == family.heuristic(key), key
        assert len(set(candidates)) == len(candidates) <= 20, key
        assert len(candidates) >= 3 or key in others, key
        assert all(valid(key, config) for config in candidates), key
        assert set(candidates) == set(family.candidates(replace(key, bucket=0))), (
            "candidates are compiled once for all numbers of rows"
        )


@pytest.mark.parametrize("cols", [4095, 4097, 7001])
@pytest.mark.parametrize(
    "variant", [("layer", "dropout", "3 sums", "4 moved"), ("rms", "plain", "1 sums", "3 moved")]
)
def test_unaligned_rows_have_no_tiles_that_spill(cols: int, variant: tuple[str, ...]) -> None:
    """The table's entry for the next power of two was measured with aligned rows: it is invalid."""
    key = TuningKey("norm_backward", variant, "16bit", cols, 3)
    family = family_of(key.kernel)
    assert family is not None
    assert max(config.block_n for config in family.candidates(key)) < 4096
    wide = Config(block_n=4096, rows=1, warps=4, stages=3, per_sm=2)
    assert valid(replace(key, cols=4096), wide)
    assert not valid(key, wide)


@pytest.mark.parametrize("cols", [16392, 18432, 20001, 24576, 28672, 32767, 32768])
@pytest.mark.parametrize("inputs", ["alone", "adds"])
def test_wide_rows_of_16_bits_are_held_whole(cols: int, inputs: str) -> None:
    """Tiles hold whole rows, and no tile is idle.

    Rows of two inputs that are loaded element by element are read in two passes instead. In both
    cases, configs for the other case are invalid.
    """
    key = TuningKey("norm_forward", ("layer", "plain", inputs), "16bit", cols, 2)
    config = heuristic(key)
    assert valid(key, config)
    if inputs == "adds" and cols % 8:
        assert config.columns < cols
        assert not valid(key, Config(block_n=32768, rows=1, warps=32))
        return
    assert config.columns - config.block_n < cols <= config.columns
    assert not valid(key, Config(block_n=4096, rows=1, warps=8, stages=3))
    assert heuristic(replace(key, widths="32bit")).columns < cols


def _shipped() -> Iterator[tuple[str, dict[str, object]]]:
    for file in (resources.files("fusedops") / "tuned").iterdir():
        if file.name.endswith(".json"):
            yield file.name, json.loads(file.read_text())


def _entries(
    configs: dict[str, dict[str, list[list[int] | None]]],
) -> Iterator[tuple[TuningKey, Config]]:
    for kernel, rows in configs.items():
        for key, row in rows.items():
            *variant, widths, cols = key.split("|")
            for bucket, numbers in enumerate(row[: len(BUCKETS)]):
                if numbers is not None:
                    yield (
                        TuningKey(kernel, tuple(variant), widths, int(cols), bucket),
                        Config(*numbers),
                    )


@pytest.mark.parametrize(("name", "content"), list(_shipped()))
def test_shipped_tables_hold_valid_configs(name: str, content: dict[str, object]) -> None:
    entries = list(_entries(content["configs"]))  # type: ignore[arg-type]
    assert entries
    assert name == f"{tuning.slug(str(content['device']))}.json"
    assert content["fields"] == list(Config.__dataclass_fields__)
    assert not [str(key) for key, config in entries if not valid(key, config)]


@pytest.mark.kernels
@pytest.mark.full
@pytest.mark.parametrize(("name", "content"), list(_shipped()))
def test_shipped_entries_belong_to_workloads(name: str, content: dict[str, object]) -> None:
    """Each entry's key belongs to a workload. If a variant is renamed, its entries are useless."""
    entries = _entries(content["configs"])  # type: ignore[arg-type]
    groups = {(key.kernel, key.group): key for key, _ in entries}
    for key in groups.values():
        config = heuristic(key)
        if key.kernel.endswith("_rest"):  # workloads have it only where the config cuts the rows
            continue
        assert workload_for(replace(key, bucket=1), DEVICE) is not None, (key, config)


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="changes the table of this device")
def test_results_under_cached_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs with the cache's config, and has the same results as with the heuristic's."""
    x, weight = torch.randn(20, 512), torch.randn(512)
    expected = fusedops.rms_norm(x, (512,), weight)
    with tuning.collected_keys() as keys:
        fusedops.rms_norm(x, (512,), weight)
    (key,) = keys
    assert cache.write(key, DEVICE_NAME, Config(block_n=128, rows=2, warps=4), {})
    tuning.forget()
    used: list[Config] = []
    build = launch.build

    def recorded(
        kernel: object, types: object, constants: object, config: Config, **options: object
    ) -> object:
        used.append(config)
        return build(kernel, types, constants, config, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "build", recorded)
    torch.testing.assert_close(fusedops.rms_norm(x, (512,), weight), expected)
    assert used == [Config(block_n=128, rows=2, warps=4)]


def test_families_register_all_their_kernels() -> None:
    for spec_module in dict.fromkeys(spec.samples.__module__ for spec in ALL_SPECS):
        configs = importlib.import_module(spec_module.removesuffix("spec") + "configs")
        assert any(family_of(key.kernel) is configs for key in every_key())
