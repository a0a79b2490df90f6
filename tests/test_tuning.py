"""Which config a kernel runs with: the order of choice, what a choice depends on, and that it is made once."""

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
from fusedops.core import cache, launch, tuning
from fusedops.core.question import BUCKET, BUCKETS, Config, Question, block_holding, family_of, valid
from fusedops.core.spec import Spec
from fusedops.tune.workloads import workload_for
from questions import every_question
from support import ALL_SPECS, DEVICE, INTERPRETED, as_tuple, random_like, tensors_of

DEVICE_NAME = "Test GPU"
QUESTION = Question("norm_forward", ("layer", "plain", "alone"), "16bit", 1024, 3)
CACHED, TABLED, FORCED = Config(1024, 4, 4), Config(1024, 1, 2), Config(1024, 8, 8)

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)


@pytest.fixture(autouse=True)
def no_other_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A device of our own with an empty cache and no table, whatever this machine has."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "device_name", lambda index: DEVICE_NAME)
    monkeypatch.setattr(tuning, "table", lambda device: {})
    monkeypatch.setattr(tuning, "on_demand", lambda: "")
    tuning.forget()
    yield
    tuning.forget()


def tabled(monkeypatch: pytest.MonkeyPatch, *entries: tuple[int, int, Config]) -> None:
    """A table with these (columns, bucket, config) for `QUESTION`'s group."""
    sizes: dict[int, list[Config | None]] = {}
    for cols, bucket, config in entries:
        sizes.setdefault(cols, [None] * len(BUCKETS))[bucket] = config
    monkeypatch.setattr(tuning, "table", lambda device: {QUESTION.kernel: {QUESTION.group: sizes}})


def heuristic(question: Question) -> Config:
    family = family_of(question.kernel)
    assert family is not None
    return family.heuristic(question)


# --- the order of choice ------------------------------------------------------------------------------------------


def test_forced_then_cache_then_table_then_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({CACHED, TABLED, FORCED, heuristic(QUESTION)}) == 4
    assert (tuning.choose(QUESTION, 0), tuning.source(QUESTION, 0)) == (heuristic(QUESTION), "heuristic")
    tabled(monkeypatch, (1024, 3, TABLED))
    assert (tuning.choose(QUESTION, 0), tuning.source(QUESTION, 0)) == (TABLED, "table")
    assert cache.write(QUESTION, DEVICE_NAME, CACHED, {})
    assert (tuning.choose(QUESTION, 0), tuning.source(QUESTION, 0)) == (CACHED, "cache")
    with tuning.forced("norm_forward", FORCED):
        assert (tuning.choose(QUESTION, 0), tuning.source(QUESTION, 0)) == (FORCED, "forced")
        with tuning.forced("norm_forward", TABLED):
            assert tuning.choose(QUESTION, 0) == TABLED
        assert tuning.choose(QUESTION, 0) == FORCED
    assert tuning.choose(QUESTION, 0) == CACHED


def test_the_interpreter_takes_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was measured on some GPU holds for it."""
    monkeypatch.undo()
    assert tuning.device_name(-1) == ""
    assert tuning.source(QUESTION, -1) == "heuristic"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (((1536, 3, TABLED),), TABLED),  # the next larger
        (((1536, 3, CACHED), (1024, 3, TABLED)), TABLED),  # not beside the exact one
        (((512, 3, TABLED),), None),  # never a smaller one
        (((3072, 3, Config(512, 1, 4)),), None),  # nor one that is three times as large
        (((2048, 3, Config(512, 1, 4)),), Config(512, 1, 4)),
        (((1536, 3, Config(2048, 1, 4)),), None),  # a block that holds 1536 columns is twice what 1024 need
        (((1024, 1, TABLED), (1024, 4, CACHED)), TABLED),  # fewer rows rather than more
        (((1024, 1, CACHED), (1024, 2, TABLED)), TABLED),  # the nearest
        (((1024, 4, TABLED),), TABLED),
        (((1024, 3, Config(1024, 3, 4)),), None),  # three rows are no tile
        (((1024, 3, Config(1024, 4, 64)),), None),  # 64 warps are no program
    ],
)
def test_a_table_without_the_size(
    entries: tuple[tuple[int, int, Config], ...], expected: Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tabled(monkeypatch, *entries)
    assert tuning.shipped(QUESTION, DEVICE_NAME) == expected
    assert tuning.choose(QUESTION, 0) == (expected or heuristic(QUESTION))


def test_buckets_of_rows() -> None:
    """The bucket that the launches look up is the last whose least number of rows is there."""
    for rows in (*range(1, 300), 4095, 4096, 4097, 65535, 65536, 2**20, 2**31, 2**40):
        assert BUCKET[rows.bit_length()] == sum(rows >= least for least in BUCKETS) - 1, rows


def test_the_block_that_holds_a_row() -> None:
    for cols in (1, 15, 16, 17, 255, 256, 257, 11008, 65536, 65537):
        block = block_holding(cols)
        assert block in {1 << bits for bits in range(4, 32)}
        assert block >= cols and (block == 16 or block < 2 * cols), cols


# --- what asks, and how often -------------------------------------------------------------------------------------


def run(spec: Spec, rows: int, cols: int = 48) -> None:
    sample = spec.benchmark((rows, cols), torch.float32, DEVICE)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    torch.autograd.grad(outputs, leaves, random_like(outputs))


@every
@pytest.mark.kernels
def test_no_call_benchmarks(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one either: nothing asks the tuner, and nothing is launched but the operator."""

    def tuned(*question: object) -> None:
        raise AssertionError("the tuner was asked")

    monkeypatch.setitem(sys.modules, "fusedops.tune.ondemand", types.SimpleNamespace(improve=tuned))  # type: ignore[arg-type]
    with launch.record() as names:
        run(spec, 20)
    assert len(names) <= sum(spec.launches)


@every
@pytest.mark.kernels
def test_a_choice_is_made_once(spec: Spec) -> None:
    """And again only for another bucket of rows; the steps between cost no more than a look-up."""
    with tuning.asked() as asked:
        run(spec, 20)
        first = dict(asked)
        asked.clear()
        run(spec, 20)
        run(spec, 17)
        assert not asked
        run(spec, 5)
        assert set(asked) == {replace(question, bucket=0) for question in first}


@every
@pytest.mark.kernels
def test_buckets_share_what_they_compile(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new batch size compiles nothing while the config is a known one, and one variant where it is not."""
    other: dict[str, Config] = {}
    choose = tuning.choose

    def by_bucket(question: Question, device_index: int) -> Config:
        config = choose(replace(question, bucket=3), device_index)  # the heuristic's own may differ
        return (
            other.setdefault(question.kernel, replace(config, warps=config.warps * 2))
            if question.bucket == 1
            else config
        )

    monkeypatch.setattr(launch, "_built", {})  # whatever other tests have built
    monkeypatch.setattr(tuning, "choose", by_bucket)
    # Of the three buckets the first and the last have one config.
    for rows in (1, 3, 20, 7, 30, 300):
        before = launch.variants()
        run(spec, rows, cols=56)
        if rows in (1, 20):
            assert launch.variants() > before
        else:
            # Sums over rows need their second kernel from some number of rows on; it is built with the first.
            assert launch.variants() == before, rows
    assert other


@every
@pytest.mark.kernels
def test_capture_compiles_nothing_that_another_bucket_has(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's config serves, with the same results; the call after the capture gets its own."""
    choose = tuning.choose

    def by_bucket(question: Question, device_index: int) -> Config:
        config = choose(replace(question, bucket=3), device_index)
        return replace(config, warps=config.warps * 2) if question.bucket == 1 else config

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(tuning, "choose", by_bucket)
    sample = spec.benchmark((20, 56), torch.float32, DEVICE)
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
    # Sums of 20 fp32 numbers of order one, in another order.
    torch.testing.assert_close(captured, results(), rtol=1e-5, atol=1e-5)
    assert launch.variants() > built


# --- candidates, and the shipped tables ------------------------------------------------------------------------------


def test_candidates_hold_the_heuristic_and_are_valid() -> None:
    for question in every_question():
        family = family_of(question.kernel)
        assert family is not None, question
        candidates = family.candidates(question)
        assert candidates[0] == family.heuristic(question), question
        assert len(set(candidates)) == len(candidates) <= 20, question
        assert all(valid(question, config) for config in candidates), question
        assert set(candidates) == set(family.candidates(replace(question, bucket=0))), "compiled once for all rows"


def test_there_is_something_to_choose_from() -> None:
    few = [str(q) for q in every_question() if len(family_of(q.kernel).candidates(q)) < 3]  # type: ignore[union-attr]
    assert not few


def _shipped() -> Iterator[tuple[str, dict[str, object]]]:
    for file in (resources.files("fusedops") / "tuned").iterdir():
        if file.name.endswith(".json"):
            yield file.name, json.loads(file.read_text())


def _entries(configs: dict[str, dict[str, list[list[int] | None]]]) -> Iterator[tuple[Question, Config]]:
    for kernel, rows in configs.items():
        for key, row in rows.items():
            *variant, widths, cols = key.split("|")
            for bucket, numbers in enumerate(row[: len(BUCKETS)]):
                if numbers is not None:
                    yield Question(kernel, tuple(variant), widths, int(cols), bucket), Config(*numbers)


@pytest.mark.parametrize(("name", "content"), list(_shipped()))
def test_shipped_tables_hold_valid_configs(name: str, content: dict[str, object]) -> None:
    entries = list(_entries(content["configs"]))  # type: ignore[arg-type]
    assert entries
    assert name == f"{tuning.slug(str(content['device']))}.json"
    assert content["fields"] == list(Config.__dataclass_fields__)
    assert not [str(question) for question, config in entries if not valid(question, config)]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "content"), list(_shipped()))
def test_shipped_tables_answer_what_is_asked(name: str, content: dict[str, object]) -> None:
    """Some operator asks each entry's question; a renamed variant would leave its entries behind."""
    groups = {(q.kernel, q.group): q for q, _ in _entries(content["configs"])}  # type: ignore[arg-type]
    for question in groups.values():
        config = heuristic(question)
        if question.kernel.endswith("_rest"):  # asked where the first columns are cut off, as the table has it
            continue
        assert workload_for(replace(question, bucket=1), DEVICE) is not None, (question, config)


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="changes the table that this device has")
def test_results_under_cached_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache's config is what runs, and gives what the heuristic's gives."""
    x, weight = torch.randn(20, 512), torch.randn(512)
    expected = fusedops.rms_norm(x, (512,), weight)
    with tuning.asked() as asked:
        fusedops.rms_norm(x, (512,), weight)
    (question,) = asked
    assert cache.write(question, DEVICE_NAME, Config(128, 2, 4), {})
    tuning.forget()
    used: list[Config] = []
    build = launch.build

    def watched(kernel: object, types: object, constants: object, config: Config, **rest: object) -> object:
        used.append(config)
        return build(kernel, types, constants, config, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "build", watched)
    torch.testing.assert_close(fusedops.rms_norm(x, (512,), weight), expected)
    assert used == [Config(128, 2, 4)]


def test_families_register_all_their_kernels() -> None:
    for spec_module in dict.fromkeys(spec.samples.__module__ for spec in ALL_SPECS):
        configs = importlib.import_module(spec_module.removesuffix("spec") + "configs")
        assert any(family_of(q.kernel) is configs for q in every_question())
