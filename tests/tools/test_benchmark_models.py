"""The benchmark of whole models, in one process and in several, run with tiny models."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
import unittest.mock
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusedops
from benchmarks import __main__ as command
from benchmarks.columns import sized
from benchmarks.models import command as models_command
from benchmarks.models import (
    distributed,
    distributed_results,
    first_calls,
    measuring,
    page,
    plans,
    rest,
    results,
    runner,
    text,
    traffic,
    training,
)
from benchmarks.models import providers as contenders
from benchmarks.models.providers import COMPILING, PROVIDERS, Contender, contender
from benchmarks.models.results import Row
from benchmarks.models.workloads import MODELS, TRAINING, Workload, workloads
from fusedops.backend import entry
from zoo import counted, transformers_only

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.plain
CPU = torch.device("cpu")
MILLIONS = [
    110,
    124,
    223,
    1039,
    1236,
    2796,
    87,
    596,
    1602,
    791,
    458,
    124,
    1039,
    196,
    16.4,
]  # of parameters
WITHOUT_DROPOUT = {
    *(
        "llama",
        "llama_1b",
        "llama_8b",
        "qwen3",
        "gemma2",
        "mixtral",
        "dit",
        "meta_llama",
        "gated_decoder",
        "dlrm",
    ),
}
TEXT = text.Text(CPU)
LIGHT = measuring.Effort(rounds=2, block_s=0.001, singles=1, most=2)
SETTING = runner.Setting(CPU, TEXT, LIGHT)
every_tiny = pytest.mark.parametrize("workload", workloads(tiny=True), ids=str)


def tiny(name, mode):
    (workload,) = workloads([name], [mode], tiny=True)
    return workload


def row(provider="eager", ms=10.0, peak=1000.0, *, commit="abc1234", **more):
    head = ("bert", "train", provider, ms, peak, None, commit, "2.11.0", "3.6.0", "32x512")
    return Row(*head, spread=0.1, host_ms=5.0, **more)


@transformers_only
@pytest.mark.parametrize(("name", "millions"), [*zip(MODELS, MILLIONS, strict=True)])
def test_models_have_the_published_sizes_and_attention(name, millions):
    model = Workload(name, "train", ()).build(torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    attention = "eager" if name == "gemma2" else "sdpa"  # only eager attention has a soft cap
    assert not hasattr(model, "config") or model.config._attn_implementation == attention


@transformers_only
@every_tiny
def test_workload_has_its_mode_and_is_reproducible(workload):
    model, second_model = workload.build(CPU), workload.build(CPU)
    batch, second_batch = (workload.batch(TEXT.reseeded(0)) for _ in range(2))
    in_training = workload.mode in TRAINING
    assert model.training == in_training == ("labels" in batch)
    assert {p.dtype for p in model.parameters()} == {
        torch.float32 if workload.mode == "train" else torch.bfloat16
    } | ({torch.float32} if workload.mode == "lora" else set())
    has_dropout = any(isinstance(m, torch.nn.Dropout) and m.p == 0.1 for m in model.modules())
    assert has_dropout == (workload.name not in WITHOUT_DROPOUT)
    torch.testing.assert_close(second_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second_batch, batch, rtol=0, atol=0)


@transformers_only
@pytest.mark.parametrize("provider", ["eager", "fused"])
@every_tiny
def test_fused_operators_run_only_in_the_fused_model(workload, provider, monkeypatch):
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor as Processor

    from fusedops.generation import FusedNoRepeatNGramLogitsProcessor as Fused

    tokens, kind = [], Fused if provider == "fused" else Processor
    original = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args: tokens.append(1) or original(*args))
    built = contender(provider, workload, CPU, TEXT.reseeded(0))
    with counted() as calls:
        built.step()
    # Both layers have at least two operators.
    assert sum(calls.values()) >= 4 if provider == "fused" else not calls
    assert len(tokens) == (workload.sizes[-1] if workload.mode == "generate" else 0)
    has_gradients = any(p.grad is not None for p in built.model.parameters())
    assert has_gradients == (workload.mode in TRAINING)
    assert workload.mode != "lora" or all(
        "lora_" in name for name, p in built.model.named_parameters() if p.grad is not None
    )


def test_operators_written_in_have_eagers_gradients():
    eager, written = (
        contender(name, tiny("dlrm", "train"), CPU, TEXT.reseeded(0))
        for name in ("eager", "operators")
    )
    for built in (eager, written):
        built.step()
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in written.model.modules())
    for name in ("weight", "bias"):
        expected = torch.cat([getattr(norm, name).grad for norm in eager.model.norms])
        torch.testing.assert_close(getattr(written.model.norms, name).grad, expected)
    for name in ("tables", "bottom", "top"):
        parts = (getattr(built.model, name).parameters() for built in (eager, written))
        for expected, result in zip(*parts, strict=True):
            torch.testing.assert_close(result.grad, expected.grad)


def test_provider_is_measured_where_it_applies():
    """A form with operators, and Liger's patch, exist only for some models."""
    wanted = ("eager", "liger", "operators", "compile_reduce_overhead")
    first, second = runner.stages(workloads(["llama", "dlrm"], ["infer"], tiny=True), wanted)
    assert [work.providers for work in first] == [("eager", "liger"), ("eager", "operators")]
    assert [work.providers for work in second] == [("compile_reduce_overhead",)] * 2
    assert "compile_reduce_overhead" not in contenders.offered(tiny("bert", "train"))
    with pytest.raises(RuntimeError, match="Linear has no form"):
        contenders.prepare("operators", torch.nn.Linear(2, 2))


def test_model_with_nothing_to_fuse_is_an_error():
    with pytest.raises(RuntimeError, match="nothing to fuse"):
        contenders.prepare("fused", torch.nn.Linear(2, 2))


@transformers_only
@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        pytest.param("compile", "inductor", marks=pytest.mark.full),
        ("compile_autotune", "inductor, max_autotune"),
        pytest.param("backend", "ours", marks=pytest.mark.full),
        ("compile_reduce_overhead", "inductor, triton.cudagraphs"),
        ("backend_reduce_overhead", "ours, reduce-overhead"),
    ],
)
def test_provider_uses_the_compiler_of_its_name(name, compiler, monkeypatch, fresh_dynamo):
    """As Inductor takes seconds for a graph, the compilers are replaced."""
    calls = []

    def compile_fx(gm, _, config_patches=None, **__):
        options = config_patches or {}
        chosen = [name for name in ("max_autotune", "triton.cudagraphs") if options.get(name)]
        calls.append(", ".join(["inductor", *chosen]))
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr(
        "fusedops.backend.entry.compile_by_inductor",
        lambda gm, _, mode, *__: (
            calls.append(", ".join(filter(None, ["ours", mode]))) or gm.forward
        ),
    )
    built = contender(name, tiny("bert", "infer"), CPU, TEXT.reseeded(0))
    built.step()
    assert calls == [compiler]


@transformers_only
def test_liger_patches_only_during_its_own_steps(monkeypatch):
    """Liger's function sets names in the model's module, which changes all instances."""
    from transformers.models.llama import modeling_llama

    def patch(model, *, fused_linear_cross_entropy):
        assert fused_linear_cross_entropy
        modeling_llama.apply_rotary_pos_emb = modeling_llama.LlamaRMSNorm = "theirs"

    stub = types.ModuleType("liger_kernel.transformers")
    stub.apply_liger_kernel_to_llama = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    before = dict(vars(modeling_llama))
    context = contenders.prepare("liger", tiny("llama", "train").build(CPU))
    assert vars(modeling_llama) == before
    with context():
        assert modeling_llama.apply_rotary_pos_emb == modeling_llama.LlamaRMSNorm == "theirs"
    assert vars(modeling_llama) == before


@transformers_only
@pytest.mark.parametrize("name", ["llama_1b", "qwen3", "gemma2"])
def test_loss_of_hidden_states_is_eagers_without_logits(name):
    eager, ours = (
        contender(provider, tiny(name, "train"), CPU, TEXT.reseeded(0))
        for provider in ("eager", "fused_loss")
    )
    logits, losses = [], []
    for built in (eager, ours):
        built.model.lm_head.weight.data.mul_(300.0)  # logits above a cap of 30
        built.model.lm_head.register_forward_hook(lambda *_: logits.append(1))
        built.model.register_forward_hook(lambda _, __, out: losses.append(out.loss.item()))
        built.step()
    assert len(logits) == 1
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    gradients = [dict(built.model.named_parameters()) for built in (eager, ours)]
    for parameter, expected in gradients[0].items():
        difference = (gradients[1][parameter].grad - expected.grad).norm()
        # The roundings of bf16 in two layers.
        assert difference <= 0.02 * expected.grad.norm(), parameter


@transformers_only
def test_loss_of_hidden_states_is_in_the_compiled_graph(monkeypatch, fresh_dynamo):
    graphs = []
    monkeypatch.setattr(
        "fusedops.backend.entry.compile_by_inductor",
        lambda gm, *_: graphs.append(gm) or gm.forward,
    )
    built = contender("backend_loss", tiny("llama_1b", "train"), CPU, TEXT.reseeded(0))
    built.step()
    assert len(graphs) == 1
    assert all(p.grad is not None for p in built.model.parameters())


def test_loss_of_hidden_states_trains_decoders_of_transformers_only():
    names = {w.name for w in workloads(tiny=True) if "fused_loss" in contenders.offered(w)}
    assert names == {"llama", "llama_1b", "qwen3", "gemma2", "mixtral"}
    modes = {w.mode for w in workloads(tiny=True) if contenders.applies("backend_loss", w)}
    assert modes == set(TRAINING)


@transformers_only
@pytest.mark.parametrize(
    ("name", "words", "cap"),
    [("llama_1b", 128_256, None), ("qwen3", 151_936, None), ("gemma2", 256_000, 30.0)],
)
def test_heads_have_the_published_vocabularies_and_caps(name, words, cap):
    model = Workload(name, "train", ()).build(torch.device("meta"))
    assert model.lm_head.weight.shape[0] == words
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert getattr(model.config, "final_logit_softcapping", None) == cap


# --- measuring ------------------------------------------------------------------------------------


@pytest.fixture
def stepping(monkeypatch):
    """Returns ``make(name, *seconds)``, which builds a contender with simulated times.

    Its n-th step takes the n-th number of ``seconds``; the last number also holds for later steps.
    ``make.order`` lists the names of the contenders in the order of their steps.
    """
    now, order = [0.0], []
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def make(name, *seconds):
        def step():
            now[0] += seconds[min(order.count(name), len(seconds) - 1)]
            order.append(name)

        return Contender(torch.nn.Linear(1, 1), contextlib.nullcontext, step)

    make.order = order
    return make


def blocks_of(contenders, step_s, **effort):
    warm = {name: measuring.Warm(0.0, s, 1.0, None) for name, s in step_s.items()}
    return measuring.blocks(contenders, warm, measuring.Effort(**effort), CPU)


def test_contenders_take_turns_of_equal_seconds(stepping):
    both = {"a": stepping("a", 0.1), "b": stepping("b", 0.3)}
    result = blocks_of(both, {"a": 0.1, "b": 0.3}, rounds=3, block_s=0.25)
    assert "".join(stepping.order) == "aaaabb" * 3
    assert [result[name].ms for name in "ab"] == pytest.approx([100.0, 300.0])


def test_ms_is_the_median_and_spread_the_range_of_quartiles(stepping):
    # A block's first step is not timed.
    alone = {"a": stepping("a", 7.0, 0.010, 7.0, 0.020, 7.0, 0.030, 7.0, 0.040, 7.0, 9.0)}
    result = blocks_of(alone, {"a": 1.0}, rounds=5, block_s=0.1, most=5)["a"]
    assert (result.ms, result.spread) == pytest.approx((30.0, 20.0))


def test_all_have_more_rounds_while_the_times_of_one_differ(stepping):
    both = {"a": stepping("a", 1.0), "b": stepping("b", 1.0, 0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 2.0)}
    blocks_of(both, {"a": 1.0, "b": 1.0}, rounds=2, block_s=0.1, most=4)
    assert "".join(stepping.order) == "aabb" * 4


def test_compilation_is_not_timed(stepping):
    warm = measuring.warm_up(stepping("a", 60.0, 20.0, 0.5), measuring.Effort(singles=1), CPU)
    assert warm == measuring.Warm(60.0, 0.5, 500.0, None)


def test_own_bytes_count_tied_weights_once():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight
    assert Contender(model, contextlib.nullcontext, list).own_bytes == 64


def test_loss_is_the_mean_over_seeds_and_spread_the_range(monkeypatch):
    monkeypatch.setattr(training, "final_loss", lambda *_, seed, steps: (1.0, 2.0, 6.0)[seed])
    learned = training.learn("eager", None, TEXT, CPU, seeds=(0, 1, 2), steps=1)
    assert (learned.mean, learned.spread) == (3.0, 5.0)


@transformers_only
def test_loss_depends_on_the_seed_and_not_on_the_provider():
    """On a CPU both providers have the same masks of dropout."""
    workload = Workload("gpt2", "loss", MODELS["gpt2"].tiny_sizes, tiny=True)
    eager, fused, eager_of_other_seed = (
        training.final_loss(name, workload, TEXT.reseeded(seed), CPU, seed=seed, steps=2)
        for name, seed in (("eager", 0), ("fused", 0), ("eager", 1))
    )
    assert fused == pytest.approx(eager, rel=1e-3)
    assert eager_of_other_seed != pytest.approx(eager, rel=1e-3)


def test_first_calls_with_cold_and_with_warm_caches(monkeypatch):
    def step(workload, provider, device):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
        processes = 1 + sum(1 for _ in folder.iterdir())
        (folder / "compiled").touch()
        own = {"compile": 0.0, "backend": 0.9}[provider]
        return {"compile": 9.0, "backend": 3.0}[provider] / processes, own

    monkeypatch.setattr(first_calls, "_in_a_new_process", step)
    rows = [first_calls.measured(tiny("gpt2", "train"), n, CPU) for n in ("compile", "backend")]
    assert [(r.cold_s, r.warm_s, r.own_s) for r in rows] == [(9.0, 4.5, 0.0), (3.0, 1.5, 0.9)]
    ratios = "gpt2   train  2x16   backend   3.0      0.33x  10.0%  1.5                0.33x"
    assert first_calls.table(rows).splitlines()[2] == ratios


def test_first_call_is_timed_without_the_step_itself(stepping, monkeypatch):
    monkeypatch.setattr(first_calls, "contender", lambda name, *_: stepping(name, 60.0, 2.0))
    seconds = first_calls._first_step(tiny("nanogpt", "train"), "backend", CPU)
    assert seconds == pytest.approx((58.0, 0.0))


def test_first_call_has_a_part_that_is_the_backends_own(stepping, monkeypatch):
    built = stepping("backend", 53.0, 2.0)
    monkeypatch.setattr(entry, "_stored", stepping("own", 7.0).step)

    def step():
        if not stepping.order:
            entry._stored()
        built.step()

    steps = {"eager": lambda: None, "backend": step}
    by_name = {name: replace(built, step=step) for name, step in steps.items()}
    monkeypatch.setattr(first_calls, "contender", lambda name, *_: by_name[name])
    seconds = first_calls._first_step(tiny("nanogpt", "train"), "backend", CPU)
    assert seconds == pytest.approx((58.0, 7.0))


def run(*arguments):
    return command.main(["models", "--tiny", "--device", "cpu", *map(str, arguments)])


def test_compiled_contenders_are_measured_after_the_others():
    first, second = runner.stages(workloads(["bert", "gpt2"], ["train"]))
    assert not {name for work in first for name in work.providers} & set(COMPILING)
    assert {name for work in second for name in work.providers} <= set(COMPILING)
    assert {"compile", "backend"} <= set(second[0].providers)


@transformers_only
def test_failing_provider_is_named_and_fails_the_run_if_ours(tmp_path, monkeypatch, capsys):
    def failing(model):
        raise RuntimeError("no such thing\nand more")

    path, words = tmp_path / "models.csv", ("--model", "bert", "--mode", "infer", "--provider")
    monkeypatch.setitem(PROVIDERS, "eager", failing)
    assert run(*words, "eager", "--provider", "fused", "--output", path) == 0
    error = "bert infer 2x16 eager: left out, RuntimeError: no such thing\n"
    assert error in capsys.readouterr().err
    (only,) = results.read(path)
    assert (only.provider, only.mode, only.shape) == ("fused", "infer", "2x16")
    assert only.ms > 0 and only.host_ms > 0
    assert only.peak_mib is None and only.loss is None
    assert only.torch == torch.__version__ and only.commit and only.transformers
    monkeypatch.setitem(PROVIDERS, "fused", failing)
    assert run(*words, "fused") == 1
    assert run("--model", "bert", "--loss", "--provider", "fused") == 1


def test_ways_to_run_the_rest_are_compared_on_models_of_both_commands():
    first, second = rest.stages(rest.workloads_of())
    assert {work.providers for work in first} == {("eager", "leaves", "fused")}
    assert {work.providers for work in second} == {("compile", "backend")}
    # Inductor would compile each size of a cache that grows.
    assert {work.workload.mode for work in first} - {work.workload.mode for work in second} == {
        "generate"
    }
    shapes = {str(work.workload) for work in first}
    assert shapes >= {
        "bert train 32x512",
        "bert infer 32x128",
        "whisper train 8x3000+128",
        "modernbert infer 16x1024",
        "t5 generate 256x64+64",
        "llama_1b decode 1x2048",
    }
    assert "bert train 64x512" not in shapes
    only = rest.workloads_of(["infer"], ["whisper"])
    assert list(map(str, only)) == ["whisper infer 16x3000+128"]
    with pytest.raises(ValueError, match="no model 'gemma2'"):
        rest.workloads_of(models=["gemma2"])


def test_leaves_are_norms_and_activations_without_a_graph():
    rules = {}
    for name in ("leaves", "fused"):
        model = tiny("bert", "train").build(CPU)
        contenders.prepare(name, model)
        rules[name] = {line.rule for line in fusedops.fusion_status(model)}
    assert rules["leaves"] == {"layer_norm", "gelu_activation"}
    assert rules["fused"] == {"graph", *rules["leaves"]}


def test_table_of_the_rest_marks_what_is_slower_by_more_than_the_margin(tmp_path):
    path = tmp_path / "rest.csv"
    results.write(
        path,
        [
            row("eager", 20.0),
            row("fused", 9.0),
            row("modules", 10.0),
            row("rest_eager", 10.2),
            replace(row("modules", 10.0), mode="infer"),
            replace(row("rest_eager", 10.4), mode="infer"),
        ],
    )
    now, _, then = rest.markdown(path).partition("## The decision")
    assert now.strip().endswith("\n| bert | train | 32x512 | 20.00 (5.0) | 9.00 (5.0) |")
    infer, train = then.strip().splitlines()[-2:]
    assert train == "| bert | train | 32x512 | 10.20 (5.0) | 10.00 (5.0) | 0.980 |"
    assert infer == "| bert | infer | 32x512 | 10.40 (5.0) | 10.00 (5.0) | 0.962 (slower) |"


def test_resumed_run_measures_missing_rows_and_those_of_other_commits(tmp_path, monkeypatch):
    path, workload = tmp_path / "models.csv", Workload("bert", "train", (32, 512))
    monkeypatch.setenv("FUSEDOPS_COMMIT", "abc1234")
    results.write(path, [row(), row("fused", commit="other")])
    work = [runner.Work(workload, ("eager", "fused", "liger"))]
    (remaining,) = runner.without(work, models_command._done(path))
    assert remaining.providers == ("fused", "liger")


def test_speed_up_over_another_run_is_marked(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    results.write(path, [row(), row("fused", 8.0, 700.0), row("liger", 5.0, commit="other")])
    text = page.markdown(path)
    assert " | 10.00 ± 0.10 | 8.00 ± 0.10 (1.25) | **5.00 ± 0.10 (2.00†)** |\n" in text
    assert " | 1000 | 700 (0.70) | 1000 (1.00) |\n" in text


def test_forms_that_few_workloads_have_are_lines_of_a_table_of_their_own(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    other = replace(row(), shape="2x16")
    results.write(path, [row(), row("backend", 5.0), row("backend_low", 4.0), other])
    first, second = page.markdown(path).split("Other forms of the candidates.")
    assert "| model, shape | eager | `fusedops.compile` |\n" in first
    lines = second.partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    shape, times = f"BERT-base, {sized('32x512')}", ("10.00", "5.00", "**4.00")
    assert [line.split(" | ")[0] for line in lines] == [f"| {shape}", "| ", "| "]
    assert all(f" | {ms} " in line for ms, line in zip(times, lines, strict=True))
    assert lines[2].endswith(
        ' memory "low" | **4.00 ± 0.10 (2.50)** | 5.00 (1.00) |  | 1000 (1.00) |'
    )
    assert sized("2x16") in first


def test_summary_has_the_larger_vocabulary(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"

    def measured(model, **times):
        rows = [row(provider, ms) for provider, ms in times.items()]
        results.write(path, [replace(r, model=model) for r in rows])
        return page.summary(path)

    measured("llama", eager=10.0, fused=5.0)
    text = measured("llama_1b", fused=4.0, backend=2.0)
    assert "| Llama-like, 1B" in text  # the other has no row of eager
    text = measured("llama_1b", eager=8.0)
    assert "| Llama-like, 1B" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("| Llama-3.2-like")]
    assert line.endswith("| 8.0 | **4.00** | 2.00 |  |  |")


def test_summary_marks_the_fastest_and_the_page_names_faster_peers(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    results.write(path, [row(), row("fused", 8.0), row("compile", 12.5), row("liger", 5.0)])
    case = "BERT-base, 32\u00a0\u00d7\u00a0512"
    assert f"| {case} | 10.0 |  | 1.25 | 0.80 | **2.00** |" in page.summary(path)
    line = f"- Liger-Kernel is faster than `fuse_model` alone on {case}.\n"
    assert line in page.markdown(path)
    results.write(path, [row("liger", 9.0), row("backend", 7.0)])
    assert "Where a peer" not in page.markdown(path)
    results.write(path, [row("compile", 6.0)])
    text = page.markdown(path)
    assert f"- torch.compile is faster than `fusedops.compile` on {case}.\n" in text
    assert f"- torch.compile is faster than `fuse_model` alone on {case}.\n" in text


def test_headline_has_the_range_over_eager_and_counts_torch_compile(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    cases = []
    for shape, backend, compiled in (("32x512", 5.0, 6.0), ("2x16", 4.0, 3.0), ("4x16", 8.0, None)):
        rows = [row(), row("fused", 9.0), row("backend", backend)]
        rows += [row("compile", compiled)] if compiled else []
        cases += [replace(r, shape=shape) for r in rows]
    results.write(path, cases)
    assert page.headline(path) == (
        "1.2 to 2.5 times as fast as eager PyTorch, and faster than torch.compile in 1 of 2 cases"
    )


@transformers_only
def test_decoding_empties_a_full_cache():
    built = contender("eager", tiny("llama_1b", "decode"), CPU, TEXT.reseeded(0))
    lengths = []
    for _ in range(9):
        logits = built.step()
        assert logits.shape == (2, 1, text.TOKENS)
        lengths.append(int(built.step.cache.get_seq_length()))
    assert lengths == [*range(1, 9), 1]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_inference_is_measured_with_and_without_cuda_graphs(mode):
    first, second = runner.stages([Workload("llama_1b", mode, (1, 2048))])
    assert first[0].providers == ("eager", "fused", "liger")
    compiled = ("compile", "backend")
    graphs = tuple([f"{name}_reduce_overhead" for name in compiled])
    assert second[0].providers == (*compiled, *graphs)


def test_tokens_of_prefill_and_decoding(tmp_path):
    path, of_llama = tmp_path / "models_nvidia_h200.csv", {"model": "llama_1b"}
    prefill = {**of_llama, "mode": "prefill", "shape": "4x2048"}
    decoding = {**of_llama, "mode": "decode", "shape": "64x2048"}
    rows = [replace(row(), **prefill), replace(row(ms=20.0), **(prefill | {"shape": "8x2048"}))]
    rows += [replace(row("fused", 8.0), **prefill), replace(row("fused", 8.0), **decoding)]
    results.write(path, [*rows, replace(row(ms=7.0), mode="infer")])  # BERT's
    text_of_page = page.inference(path)
    assert f"| | {_of_llama('4x2048')} | {_of_llama('8x2048')} |" in text_of_page
    for line in (
        "| eager | 10.00 ± 0.10 | **20.00 ± 0.10** |",
        "| fused | **8.00 ± 0.10 (1.25)** |  |",
        "| eager | 819,200 | 819,200 |",
        "| fused | **8.00 ± 0.10** |",
        "| fused | 8,000 |",
    ):
        assert line in text_of_page.splitlines()
    assert "BERT" not in text_of_page


def _of_llama(shape):
    return f"Llama-3.2-like, 1.2B, {sized(shape)}"


def test_table_beside_liger_has_its_workloads_alone(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    other = replace(row("backend", 5.0), model="gpt2")
    rows = [row(), row("liger", 8.0, 512.0), row("backend", 4.0, 1536.0)]
    results.write(path, [*rows, other, *[replace(row, mode="lora") for row in rows]])
    lines = page.against_liger(path).splitlines()[2:]
    name = f"BERT-base, {sized('32x512')}"
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}", f"| {name}, LoRA"]
    for line in lines:
        assert line.endswith("| **2.50**, 1.5 GiB |  |  |  |  | 1.25, 0.5 GiB |")


def test_compiled_steps_of_one_run_are_compared(tmp_path):
    path, missing = tmp_path / "models_nvidia_h200.csv", tmp_path / "compile_nvidia_h200.csv"
    results.write(path, [row("compile", 8.0, gpu_ms=7.0), row("backend", 4.0, commit="other")])
    assert page.compiled(path, missing) == "Nothing has been measured yet."
    results.write(path, [row("backend", 4.0, 500.0, gpu_ms=3.5)])
    line = page.compiled(path, missing).splitlines()[2]
    times = "**4.00 ± 0.10 (2.00)** | 8.00 ± 0.10 | 3.50 (2.00) | 7.00"
    assert line.endswith(f" | {times} | 500 | 1000 |")


@pytest.mark.parametrize(
    ("pages", "name", "file"),
    [
        (page, "model_figures.md", "models_nvidia_h200.csv"),
        (rest, "rest_figures.md", "rest_nvidia_h200.csv"),
    ],
)
def test_committed_page_is_what_its_results_give(pages, name, file):
    """If this fails, run ``python -m benchmarks models --page`` (``--rest``) and commit the page."""
    text = pages.markdown(ROOT / "benchmarks" / "results" / file)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.full  # half a minute of two cores
def test_two_processes_have_the_losses_masks_and_collectives_of_one(tmp_path):
    path = tmp_path / "distributed_cpu.csv"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks distributed"
    words = "--tiny --layout tp --layout fsdp-tp --steps 1 --blocks 1 --provider eager --provider fused --output"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    result = subprocess.run(
        [sys.executable, *torchrun.split(), *words.split(), str(path)],
        cwd=ROOT,
        text=True,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = {(row.model, row.layout, row.provider): row for row in distributed_results.read(path)}
    assert rows.pop(("masks", "2", "fused")).difference == 0.0
    settings = {key[:2] for key in rows}
    parallel = {(name, "tp") for name in plans.MODELS}
    assert settings == {*parallel, ("train_lm", "2x1"), ("train_lm", "1x2")}
    for setting in settings:
        eager, fused = (rows[(*setting, provider)] for provider in ("eager", "fused"))
        assert eager.collectives == fused.collectives != ""
        assert eager.moved_mib == fused.moved_mib > 0
        assert eager.loss == pytest.approx(fused.loss, abs=1e-3)
        if setting[0] == "train_lm":  # a unit in the last place of its loss is 5e-7
            assert max(eager.difference, fused.difference) < 5e-6


def test_table_has_speed_up_and_scaling_of_each_pair(tmp_path):
    setting = ("llama", "4x2048", "fsdp", 2)
    numbers = (100.0, 1.0, 160000.0, 1000.0, 5.0, 1e-6, 2000.0)
    collectives = "_allgather_base_:33 _reduce_scatter_base_:17"
    versions = ("NVIDIA H100", "0123456", "2.11.0", "3.6.0", "5.17.0")
    eager = distributed_results.Row(*setting, "eager", *numbers, collectives, *versions)
    fused = replace(eager, provider="fused", ms=80.0, tokens=200000.0, peak_mib=900.0)
    compiled = replace(eager, provider="compile", ms=90.0, moved_mib=None)
    backend = replace(compiled, provider="backend", ms=72.0, peak_mib=800.0)
    alone = replace(fused, ranks=1, tokens=125000.0)
    rows = [eager, fused, alone, replace(eager, layout="tp"), compiled, backend]
    distributed_results.write(tmp_path / "distributed_nvidia_h100.csv", rows)
    lines = distributed_results.markdown(tmp_path).splitlines()
    assert lines[2].endswith(
        " | FSDP2 | 2 | 100.0 | 80.0 | 1.25 | 90.0 | 72.0 | 1.25 "
        "| 160,000 / 200,000 / 160,000 / 160,000 | 0.80 | 1,000 / 900 / 1,000 / 800 "
        "| 50, 2,000 MiB / 50, 2,000 MiB / 50 / 50 | 1e-06 / 1e-06 |"
    )
    assert not lines[3]  # rows without a peer are not in the table
    folder = tmp_path / "of-compilers"
    distributed_results.write(folder / "distributed_nvidia_h100.csv", [compiled, backend])
    assert (
        distributed_results.markdown(folder)
        .splitlines()[2]
        .endswith(
            " | 2 |  |  |  | 90.0 | 72.0 | 1.25 | 160,000 / 160,000 |  | 1,000 / 800 | 50 / 50 | 1e-06 / 1e-06 |"
        )
    )


@pytest.fixture
def simulated_ranks():
    """A group of two processes, of which this is one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_collectives_count_the_larger_side_in_bytes(simulated_ranks, fresh_dynamo):
    from torch._prims import rng_prims
    from torch.distributed import tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh

    def gathered(sharded):
        return sharded.redistribute(placements=[dtensor.Replicate()]).to_local()

    mesh, ones = init_device_mesh("cpu", (2,)), torch.ones(4, 8)
    sharded = dtensor.distribute_tensor(ones, mesh, [dtensor.Shard(0)])
    halves = [torch.empty(4, 8) for _ in range(2)]
    compiled = torch.compile(gathered, backend="aot_eager", fullgraph=True)
    compiled(sharded)
    with unittest.mock.patch.object(dtensor.DTensor, "redistribute", side_effect=AssertionError):
        for work, moved in (
            (lambda: compiled(sharded), 128),  # not as it is without torch.compile
            (lambda: torch.distributed.all_gather(halves, ones), 256),
            (lambda: torch.distributed.all_reduce(torch.ones(3)), 12),
            (lambda: sharded + 1, 0),
        ):
            with traffic.Traffic() as recorded:
                work()
            assert recorded.bytes == moved
            assert sum(recorded.counts.values()) == (moved > 0)
    with traffic.Traffic() as recorded:
        gathered(sharded)
        # As the compiled graph of a checkpointed block calls an operator that draws.
        rng_prims.run_and_save_rng_state(torch.ops.aten.native_dropout.default, ones, 0.5, True)
    assert recorded.bytes == 128


@pytest.mark.parametrize("fails", [False, True])
def test_provider_that_fails_is_left_out(fails, simulated_ranks, monkeypatch, capsys):
    weight = torch.ones(2, requires_grad=True)

    def build(*_):
        model = torch.nn.Module()
        model.forward = lambda: types.SimpleNamespace(loss=1 / (0 if fails else weight.sum()))
        return model

    monkeypatch.setattr(distributed, "_distributed", build)
    prepared = distributed._prepared(workloads(["bert"])[0], "tp", "eager", {}, CPU)
    assert (prepared is None) == fails
    text = capsys.readouterr().err
    assert ("bert tp eager failed after" in text) == ("ZeroDivisionError" in text) == fails


def test_budget_ends_before_the_next_setting(simulated_ranks, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(distributed, "_measured", lambda *setting: measured.append(setting) or ())
    monkeypatch.setattr(distributed.masks, "differences", lambda _: [("2", 0)])
    options = types.SimpleNamespace(budget=3.5, layout=["tp", "fsdp", "fsdp-tp"], tiny=True)
    clock = iter(range(10))
    monkeypatch.setattr(
        distributed, "time", types.SimpleNamespace(perf_counter=lambda: next(clock))
    )
    rows = list(distributed._rows(["masks", "llama", "bert"], CPU, "CPU", options))
    assert [row.model for row in rows] == ["masks"]
    assert [(setting[0].name, setting[1]) for setting in measured] == [
        ("llama", "tp"),
        ("llama", "fsdp"),
    ]
    assert "stopped before bert tp: the budget is spent after 4 s" in capsys.readouterr().err
