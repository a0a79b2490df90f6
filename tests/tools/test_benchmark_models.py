"""The benchmark of whole models, with tiny ones.

What it measures, what it writes, and what it leaves behind.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from einops import rearrange

from benchmarks import __main__ as command
from benchmarks.models import command as models_command
from benchmarks.models import (
    first_calls,
    measuring,
    page,
    results,
    runner,
    text,
    training,
    workloads,
    written,
)
from benchmarks.models import providers as contenders
from benchmarks.models.providers import COMPILING, PROVIDERS, Contender, contender
from benchmarks.models.results import Row
from benchmarks.results import UnreadableError
from zoo import HAS_TRANSFORMERS, counted, transformers_only

if HAS_TRANSFORMERS:
    import transformers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.plain
CPU = torch.device("cpu")
ISSUED = ["model", "mode", "provider", "ms", "peak_mib", "loss", "commit", "torch", "triton"]
NAMES = {
    "bert",
    "gpt2",
    "t5",
    "llama",
    "vit",
    "qwen3",
    "gemma2",
    "mixtral",
    "dit",
    "nanogpt",
    "meta_llama",
}
WITHOUT_DROPOUT = {"llama", "qwen3", "gemma2", "mixtral", "dit", "meta_llama"}
TEXT = text.Text(CPU)
LIGHT = measuring.Effort(rounds=2, block_s=0.001, singles=1, most=2)
SETTING = runner.Setting(CPU, TEXT, LIGHT, seeds=(0, 1), steps=6)
every_tiny = pytest.mark.parametrize("workload", workloads.workloads(tiny=True), ids=str)
each_mode = pytest.mark.parametrize(
    "workload", workloads.workloads(["bert", "gpt2", "dit"], tiny=True), ids=str
)


def row(
    provider="eager", ms=10.0, peak=1000.0, *, model="bert", mode="train", shape="32x512", **changes
):
    base = Row(
        model,
        mode,
        provider,
        ms,
        peak,
        None,
        "abc1234",
        "2.11.0",
        "3.6.0",
        shape,
        0.1,
        5.0,
        None,
        "5.17.0",
    )
    return replace(base, **changes)


# --- what is measured -----------------------------------------------------------------------------


def test_every_named_model_is_there_in_every_mode():
    found = {(w.name, w.mode) for w in workloads.workloads()}
    assert found == {(name, mode) for name in NAMES for mode in ("train", "infer")} | {
        ("gpt2", "generate"),
        ("t5", "generate"),
    }
    assert {w.name for w in workloads.loss_workloads()} == NAMES


@transformers_only
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("bert", 110),
        ("gpt2", 124),
        ("t5", 223),
        ("llama", 1039),
        ("vit", 87),
        ("qwen3", 596),
        ("gemma2", 1602),
        ("mixtral", 791),
        ("dit", 458),
        ("nanogpt", 124),
        ("meta_llama", 1039),
    ],
)
def test_the_models_are_of_the_sizes_that_they_are_called_by(name, millions):
    model = workloads.Workload(name, "train", ()).build(torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    attention = "eager" if name == "gemma2" else "sdpa"  # with a soft cap there is no other
    assert not hasattr(model, "config") or model.config._attn_implementation == attention


@transformers_only
@pytest.mark.parametrize("name", sorted(NAMES - WITHOUT_DROPOUT))
def test_dropout_is_on_in_training(name):
    model = workloads.Workload(name, "train", (), tiny=True).build(CPU)
    assert any(
        isinstance(m, torch.nn.Dropout) and m.p == 0.1 and m.training for m in model.modules()
    )


@transformers_only
@every_tiny
def test_a_workload_is_what_its_mode_says(workload):
    model, batch = workload.build(CPU), workload.batch(TEXT.reseeded(0))
    training = workload.mode == "train"
    assert model.training == training
    assert {p.dtype for p in model.parameters()} == {torch.float32 if training else torch.bfloat16}
    assert ("labels" in batch) == training
    other = workload.build(CPU)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert all(torch.equal(batch[k], v) for k, v in workload.batch(TEXT.reseeded(0)).items())


@transformers_only
def test_labels_are_masked_tokens_or_the_next_byte():
    bert = workloads.Workload("bert", "train", (8, 64)).batch(TEXT)
    masked = bert["labels"] != -100
    assert torch.equal(masked, bert["input_ids"] == text.MASK)
    assert 0.1 < masked.float().mean() < 0.2
    vit = workloads.Workload("vit", "train", (4, 3, 16, 16)).batch(TEXT.reseeded(5))
    windows = TEXT.reseeded(5).windows(4, 3 * 16 * 16 + 1)
    assert torch.equal(vit["labels"], windows[:, -1])
    torch.testing.assert_close(vit["pixel_values"].flatten(1), windows[:, :-1] / 127.5 - 1)


@transformers_only
def test_nanogpt_is_gpt2():
    """With its weights, and its own activation in both."""
    options = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(activation_function="gelu", **options)
    ).eval()
    model, own = written.NanoGPT(**options).eval(), {}
    for name, weight in gpt2.transformer.state_dict().items():
        own[name] = weight.t() if re.search(r"(c_attn|c_proj|c_fc)\.weight", name) else weight
    model.load_state_dict(own | {"lm_head.weight": gpt2.lm_head.weight})
    tokens = torch.randint(0, 64, (2, 9))
    expected, found = gpt2(tokens, labels=tokens), model(tokens)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).loss, expected.loss
    )


_METAS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
}


@transformers_only
def test_metas_llama_is_llama():
    """With its weights: of queries and keys Transformers rotates the halves, Meta pairs of neighbours."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    llama, own = transformers.LlamaForCausalLM(config).eval(), {}
    for name, weight in llama.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            weight = rearrange(weight, "(h two half) n -> (h half two) n", two=2, half=4)
        for theirs, metas in _METAS.items():
            name = name.replace(theirs, metas)
        own[name] = weight
    model = written.MetaLlama(64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64)
    model.load_state_dict(own)
    tokens = torch.randint(0, 64, (2, 9))
    expected, found = llama(tokens, labels=tokens), model(tokens)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).loss, expected.loss
    )


@pytest.mark.parametrize("name", ["dit", "nanogpt", "meta_llama"])
def test_a_model_by_hand_is_one_graph(name, fresh_dynamo):
    workload = workloads.workloads([name], ["train"], tiny=True)[0]
    compiled = torch.compile(workload.build(CPU), backend="eager", fullgraph=True)
    assert compiled(**workload.batch(TEXT.reseeded(0))).loss > 0


def test_noise_is_what_the_latents_were_mixed_with():
    workload = workloads.Workload("dit", "train", (4, 16))
    batch = workload.batch(TEXT.reseeded(0))
    assert batch["x"].shape == batch["labels"].shape == (4, 4, 8, 8) and batch["t"].shape == batch[
        "y"
    ].shape == (4,)
    level = (batch["t"] / 1000).view(-1, 1, 1, 1)
    latents = (batch["x"] - level.sqrt() * batch["labels"]) / (1 - level).sqrt()
    assert float(latents.abs().max()) <= 1.001
    torch.testing.assert_close(
        latents[..., 0, 0] * 127.5 + 127.5,
        (latents[..., 0, 0] * 127.5 + 127.5).round(),
        atol=0.1,
        rtol=0,
    )


def test_text_is_text():
    tokens = TEXT.reseeded(3).tokens(2, 50)
    assert all(
        bytes((row - 3).tolist()).decode("latin-1").isprintable() or 13 in row for row in tokens
    )
    assert not torch.equal(tokens, TEXT.reseeded(4).tokens(2, 50))


@transformers_only
@each_mode
def test_a_step_does_the_whole_thing(workload, monkeypatch):
    made = contender("eager", workload, CPU, TEXT.reseeded(0))
    if workload.mode == "generate":
        lengths = []
        processed = sys.modules["transformers"].NoRepeatNGramLogitsProcessor.__call__
        monkeypatch.setattr(
            "transformers.NoRepeatNGramLogitsProcessor.__call__",
            lambda self, ids, scores: lengths.append(ids.shape[1]) or processed(self, ids, scores),
        )
        made.step()
        assert len(lengths) == workload.sizes[-1]
        return
    with counted() as calls:
        made.step()
    assert not calls
    with_gradient = [p for p in made.model.parameters() if p.grad is not None]
    assert bool(with_gradient) == (workload.mode == "train")
    made.clear()
    assert all(p.grad is None for p in made.model.parameters())


# --- providers ------------------------------------------------------------------------------------


@transformers_only
@every_tiny
def test_fused_is_fused(workload, monkeypatch):
    blocked = []
    from fusedops.generation import FusedNoRepeatNGramLogitsProcessor as Fused

    original = Fused.__call__
    monkeypatch.setattr(
        Fused, "__call__", lambda self, *args: blocked.append(1) or original(self, *args)
    )
    made = contender("fused", workload, CPU, TEXT.reseeded(0))
    with counted() as calls:
        made.step()
    assert sum(calls.values()) >= 4, calls  # two layers, each with at least two operators
    assert len(blocked) == (workload.sizes[-1] if workload.mode == "generate" else 0)


@pytest.mark.parametrize("name", ["fused", "fused_compile"])
def test_a_model_that_is_not_fused_is_not_measured_as_fused(name):
    with pytest.raises(RuntimeError, match="nothing to fuse"):
        contenders.prepare(name, torch.nn.Linear(2, 2))


@transformers_only
@pytest.mark.parametrize(
    ("name", "fused", "ours"),
    [
        ("compile", False, 0),
        ("compile_autotune", False, 0),
        ("fused_compile", True, 0),
        ("backend", False, 1),
        ("fused_backend", True, 1),
    ],
)
def test_compiled_is_compiled(name, fused, ours, monkeypatch, fresh_dynamo):
    """Inductor takes seconds a graph: it is left out, and who called it is noted."""
    graphs, modes = [], []
    monkeypatch.setattr(
        "fusedops.backend.entry.compile_by_inductor", lambda gm, *_: graphs.append(gm) or gm.forward
    )
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx",
        lambda gm, _, config_patches=None, **__: (
            modes.append((config_patches or {}).get("max_autotune", False)) or gm.forward
        ),
    )
    workload = workloads.workloads(["bert"], ["infer"], tiny=True)[0]
    made = contender(name, workload, CPU, TEXT.reseeded(0))
    assert any(hasattr(type(m), "_fusedops_original") for m in made.model.modules()) == fused
    made.step()
    assert len(graphs) == ours and len(modes) == 1 - ours
    assert modes == [name == "compile_autotune"] or ours


@transformers_only
def test_ligers_patch_is_in_force_for_its_own_steps_alone(monkeypatch):
    """Its function sets names in the model's module, for all instances."""
    from transformers.models.llama import modeling_llama

    def patch(model):
        modeling_llama.apply_rotary_pos_emb = "theirs"
        modeling_llama.LlamaRMSNorm = "theirs"
        model.patched = True

    stub = types.ModuleType("liger_kernel.transformers")
    stub.apply_liger_kernel_to_llama = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    before = dict(vars(modeling_llama))
    model = workloads.workloads(["llama"], ["train"], tiny=True)[0].build(CPU)
    context = contenders.prepare("liger", model)
    assert model.patched and vars(modeling_llama) == before
    for _ in range(2):
        with context():
            assert modeling_llama.apply_rotary_pos_emb == modeling_llama.LlamaRMSNorm == "theirs"
        assert vars(modeling_llama) == before


@transformers_only
@pytest.mark.parametrize("mode", ["train", "generate"])
def test_providers_leave_no_state_behind(mode):
    """A model that is built after a measurement is as one that was built before."""
    from transformers.models.gpt2 import modeling_gpt2

    workload = workloads.workloads(["gpt2"], [mode], tiny=True)[0]
    batch = workload.batch(TEXT.reseeded(0))

    def state():
        classes = {type(m) for m in workload.build(CPU).modules()}
        return (
            {cls: dict(vars(cls)) for cls in classes},
            dict(vars(modeling_gpt2)),
            torch.is_grad_enabled(),
        )

    def output():
        torch.manual_seed(0)
        return workload.build(CPU).eval()(input_ids=batch["input_ids"]).logits

    before, expected = state(), output()
    assert len(runner.run_work(runner.Work(workload, ("eager", "fused")), SETTING)) == 2
    assert state() == before
    assert torch.equal(output(), expected)


# --- measuring ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that only steps move."""
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    return now


def stepping(clock, name, order, seconds, model=None):
    def step():
        order.append(name)
        clock[0] += seconds[min(len(order), len(seconds)) - 1]

    return Contender(model or torch.nn.Linear(1, 1), contextlib.nullcontext, step)


def test_contenders_take_turns(clock):
    order = []
    both = {"a": stepping(clock, "a", order, [0.1]), "b": stepping(clock, "b", order, [0.3])}
    warm = {
        name: measuring.Warm(0.0, seconds, 1.0, None) for name, seconds in (("a", 0.1), ("b", 0.3))
    }
    found = measuring.blocks(both, warm, measuring.Effort(rounds=3, block_s=0.25), CPU)
    assert "".join(order) == "aaab" * 3
    assert found["a"].ms == pytest.approx(100.0) and found["b"].ms == pytest.approx(300.0)
    assert found["a"].spread == pytest.approx(0.0, abs=1e-9)


def test_ms_is_the_median_and_spread_the_quartiles_range(clock):
    order = []
    alone = {"a": stepping(clock, "a", order, [0.010, 0.020, 0.030, 0.040, 9.0])}
    found = measuring.blocks(
        alone, {"a": measuring.Warm(0.0, 1.0, 1.0, None)}, measuring.Effort(5, 0.1, most=5), CPU
    )
    assert found["a"].ms == pytest.approx(30.0)
    assert found["a"].spread == pytest.approx(20.0)


def test_rounds_go_on_while_times_differ(clock):
    """Until the median is known, or patience ends; all contenders get as many."""
    order = []
    calm = {"a": stepping(clock, "a", order, [1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0])}
    warm = {name: measuring.Warm(0.0, 1.0, 1.0, None) for name in "ab"}
    assert measuring.blocks(calm, warm, measuring.Effort(2, 0.1, most=20), CPU)[
        "a"
    ].ms == pytest.approx(1000.0)
    assert 2 < len(order) < 7
    order.clear()
    both = {
        "a": stepping(clock, "a", order, [1.0]),
        "b": stepping(clock, "b", order, [0.0, 1.0, 0.0, 2.0] * 2),
    }
    measuring.blocks(both, warm, measuring.Effort(2, 0.1, most=4), CPU)
    assert "".join(order) == "ab" * 4


def test_warming_up_is_not_timed(clock):
    """The first step compiles; the singles are what counts."""
    order = []
    warm = measuring.warm_up(
        stepping(clock, "a", order, [60.0, 20.0, 0.5]), measuring.Effort(singles=1), CPU
    )
    assert warm == measuring.Warm(60.0, 0.5, 500.0, None)


def test_own_bytes_count_tied_weights_once():
    first = torch.nn.Linear(4, 4, bias=False)
    both = torch.nn.Sequential(first, torch.nn.Linear(4, 4, bias=False))
    both[1].weight = first.weight
    assert stepping([0.0], "a", [], [0.0], both).own_bytes == 64


@transformers_only
def test_losses_fall_and_hardly_differ():
    """Dropout draws the same on a CPU.

    Fused and eager learn the same, and another seed learns something else.
    """
    workload = workloads.loss_workloads(["gpt2"], tiny=True)[0]
    eager, fused = (
        training.learn(name, workload, TEXT, CPU, seeds=(0, 1), steps=25)
        for name in ("eager", "fused")
    )
    assert eager.spread > 0
    assert fused.mean == pytest.approx(eager.mean, rel=1e-3)
    weights = {
        training.final_loss("eager", workload, TEXT.reseeded(0), CPU, seed=seed, steps=1)
        for seed in (0, 1)
    }
    assert len(weights) == 2
    assert (
        eager.mean < training.learn("eager", workload, TEXT, CPU, seeds=(0, 1), steps=1).mean - 0.02
    )


# --- first calls ----------------------------------------------------------------------------------


def test_a_first_call_is_measured_cold_and_then_from_its_own_caches(monkeypatch):
    seen = []

    def step(workload, provider, device):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
        seen.append((provider, folder, sorted(path.name for path in folder.iterdir())))
        (folder / "compiled").touch()
        return float(len(seen))

    monkeypatch.setattr(first_calls, "_in_a_new_process", step)
    before = dict(os.environ)
    workload = workloads.workloads(["gpt2"], ["train"], tiny=True)[0]
    rows = [first_calls.measured(workload, name, CPU) for name in first_calls.DEFAULT]
    assert os.environ == before
    assert [(r.provider, r.cold_s, r.warm_s) for r in rows] == [
        ("compile", 1.0, 2.0),
        ("backend", 3.0, 4.0),
    ]
    assert [files for *_, files in seen] == [[], ["compiled"]] * 2
    assert len({folder for _, folder, _ in seen}) == 2 and not any(
        folder.exists() for _, folder, _ in seen
    )
    assert first_calls.table(rows).splitlines()[1:] == [
        "gpt2   train  2x16   compile   1.0             2.0",
        "gpt2   train  2x16   backend   3.0      3.00x  4.0                2.00x",
    ]


@transformers_only
def test_a_first_call_begins_in_a_process_of_its_own(monkeypatch):
    """Which has the caches that the caller names; eager compiles nothing."""
    workload = workloads.workloads(["nanogpt"], ["train"], tiny=True)[0]
    assert abs(first_calls._in_a_new_process(workload, "eager", CPU)) < 30


def test_seconds_of_a_first_call_are_those_beyond_a_later_ones(clock, monkeypatch):
    order, workload = [], workloads.workloads(["nanogpt"], ["train"], tiny=True)[0]
    monkeypatch.setattr(
        first_calls, "contender", lambda name, *_: stepping(clock, name, order, [5.0, 60.0, 2.0])
    )
    assert first_calls._first_step(workload, "backend", CPU) == pytest.approx(58.0)
    assert order == ["eager", *["backend"] * 4]


# --- rows and runs --------------------------------------------------------------------------------


def run(*arguments):
    return command.main(["models", "--tiny", "--device", "cpu", *map(str, arguments)])


@transformers_only
def test_a_run_writes_rows_with_the_issues_columns_first(tmp_path, capsys):
    path = tmp_path / "models.csv"
    assert (
        run("--model", "gpt2", "--provider", "eager", "--provider", "fused", "--output", path) == 0
    )
    with path.open() as file:
        reader = csv.DictReader(file)
        lines = list(reader)
    assert reader.fieldnames[: len(ISSUED)] == ISSUED and "shape" in reader.fieldnames
    assert {(x["mode"], x["provider"]) for x in lines} == {
        (mode, provider)
        for mode in ("train", "infer", "generate")
        for provider in ("eager", "fused")
    }
    for line in lines:
        assert (
            float(line["ms"]) > 0
            and float(line["host_ms"]) > 0
            and line["peak_mib"] == line["loss"] == ""
        )
        assert line["torch"] == torch.__version__ and line["commit"] and line["transformers"]
    assert "gpt2   generate  2x8+6  " in capsys.readouterr().out


def test_stages_put_compilers_last():
    stages = runner.stages(workloads.workloads())
    assert [{p for work in stage for p in work.providers} & set(COMPILING) for stage in stages] == [
        set(),
        {"compile", "compile_autotune", "fused_compile", "backend", "fused_backend"},
    ]
    assert all(set(work.providers) <= set(COMPILING) for work in stages[1])
    assert [str(work.workload) for work in stages[1]][:2] == [
        "bert train 32x512",
        "gpt2 train 16x1024",
    ]
    assert not list(runner.stages(workloads.workloads(["bert"]), ["liger"]))


def test_a_killed_run_loses_nothing_and_is_resumed(tmp_path, monkeypatch):
    path, asked = tmp_path / "models.csv", []

    def measured(work, setting):
        asked.append((str(work.workload), work.providers))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [replace(setting.row(work.workload, name), ms=1.0) for name in work.providers]

    monkeypatch.setattr(models_command, "run_work", measured)
    monkeypatch.setenv("FUSEDOPS_COMMIT", "abc1234")
    with pytest.raises(KeyboardInterrupt):
        run("--model", "bert", "--model", "gpt2", "--output", path)
    first, second, cut = asked[:3]
    assert len(results.read(path)) == 4
    results.write(path, [replace(results.read(path)[0], commit="other")])  # is measured again
    run("--model", "bert", "--model", "gpt2", "--output", path, "--resume")
    assert asked[3] == (first[0], ("eager",)) or asked[3] == (second[0], ("eager",))
    assert asked[4] == cut
    assert len({line.key for line in results.read(path)}) == len(results.read(path)) == 26


@transformers_only
def test_a_failing_provider_is_left_out_and_ours_fails_the_run(monkeypatch, capsys):
    def fails(model):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setitem(PROVIDERS, "eager", fails)
    assert (
        run("--model", "bert", "--mode", "infer", "--provider", "eager", "--provider", "fused") == 0
    )
    assert (
        "bert infer 2x16 eager: left out, RuntimeError: no such thing\n" in capsys.readouterr().err
    )
    monkeypatch.setitem(PROVIDERS, "fused", fails)
    assert run("--model", "bert", "--mode", "infer", "--provider", "fused") == 1
    assert run("--model", "bert", "--loss", "--provider", "fused") == 1


# --- the file and what is made of it --------------------------------------------------------------


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "models.csv"
    rows = [
        row(),
        row("fused", 7.5, None),
        row(mode="loss", ms=None, peak=None, loss=2.5, loss_spread=0.25),
    ]
    results.write(path, rows)
    assert sorted(results.read(path), key=repr) == sorted(rows, key=repr)
    results.write(path, [row(ms=9.0)])
    assert len(results.read(path)) == 3 and {r.ms for r in results.read(path)} == {9.0, 7.5, None}
    path.write_text(path.read_text().replace("host_ms", "host"))
    with pytest.raises(UnreadableError, match="has the columns"):
        results.read(path)


def test_a_speed_up_over_another_run_is_marked(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    results.write(path, [row(), row("fused", 8.0, 700.0), row("liger", 5.0, commit="other")])
    assert " | 10.00 ± 0.10 | 8.00 ± 0.10 (1.25) | 5.00 ± 0.10 (2.00†) |\n" in page.markdown(path)


def test_summary_marks_the_fastest_and_names_where_another_is(tmp_path):
    path = tmp_path / "models_nvidia_h200.csv"
    results.write(path, [row(), row("fused", 8.0), row("compile", 12.5), row("liger", 5.0)])
    text = page.summary(path)
    where = "BERT-base, 32\u00a0\u00d7\u00a0512"
    assert f"| {where} | 10.0 | 1.25 | 0.80 |  | **2.00** |\n" in text
    assert f"Faster than `fuse_model` alone: Liger-Kernel on {where}. " in text
    results.write(path, [row("liger", 9.0)])
    assert "Faster than" not in page.summary(path)


def test_compiled_steps_of_one_run_are_compared(tmp_path):
    """With columns for what was measured."""
    path, none = tmp_path / "models_nvidia_h200.csv", tmp_path / "compile_nvidia_h200.csv"
    results.write(path, [row("compile", 8.0), row("backend", 4.0, commit="other")])
    assert page.compiled(path, none) == "Nothing has been measured yet."
    results.write(path, [row("backend", 4.0, 500.0), row("fused_compile", 9.0, commit="other")])
    head, _, line = page.compiled(path, none).splitlines()
    assert head.count("|") == 7 and "GPU time" not in head
    assert line.endswith(" | 8.00 ± 0.10 |  | **4.00 ± 0.10 (2.00)** | 1000 | 500 |")
    results.write(
        path, [row(name, ms, gpu_ms=ms - 1) for name, ms in (("compile", 7.0), ("backend", 4.0))]
    )
    head, _, line = page.compiled(path, none).splitlines()
    assert "GPU time" in head and line.endswith(" | 6.00 | 3.00 (2.00) | 1000 | 1000 |")
    assert " | 6.00 |  | 3.00 |\n" in page.markdown(path)


def test_the_committed_page_is_what_its_results_give():
    """If this fails, run ``python -m benchmarks models --page`` and commit what it wrote."""
    text = page.markdown(ROOT / "benchmarks" / "results" / "models_nvidia_h200.csv")
    assert (ROOT / "docs" / "model_figures.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--device", "tpu"], "no device 'tpu' here"),
        (["--device", "cuda"], "no device 'cuda' here"),
        (["--table", "--output", "none.csv"], "no such file: none.csv"),
        (["--page", "page.md", "--output", "none.csv"], "no such file: none.csv"),
        ([], "needs a GPU; on a CPU try --tiny"),
    ],
)
def test_what_is_not_there(arguments, match, monkeypatch, capsys):
    """One line and 2; no model is begun on a CPU by mistake."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(models_command, "_measure", None)
    assert command.main(["models", *arguments]) == 2
    assert match in capsys.readouterr().err
