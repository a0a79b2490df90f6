"""Tensor parallel and sharded models, before fusing and after.

Values, gradients and checkpoints of one process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fusedops
from benchmarks.models import plans
from fusedops.models.rules import norms
from ranks import run_ranks
from support import INTERPRETED

RANKS = 3  # for checkpoints: all three load what the first two saved
VOCABULARY, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 64, 32, 2, 4, 2, 8
ROOT = Path(__file__).parents[2]

# Sums of up to 64 products in another order. Losses and gradients are of order one.
_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def _full(t: Any) -> Tensor:
    """All of a tensor, sharded or not."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


# --- models ---------------------------------------------------------------------------------------


def _scattered(model: nn.Module) -> nn.Module:
    """The model with random weights of norms, and random biases, instead of ones and zeros."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model.train()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return _scattered(LlamaForCausalLM(config))


def _bert(p: float) -> nn.Module:
    """Dropout of rows only: that of attention weights is drawn for the heads that a rank has."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        hidden_dropout_prob=p,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    return _scattered(BertForMaskedLM(config))


def _layers(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = (
        model.model.layers if hasattr(model, "model") else model.bert.encoder.layer
    )
    return layers


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _ids(step: int = 1) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )


def _llama_plan(*, sequence: bool) -> dict[str, Any]:
    """The usual one: layers by columns and rows.

    With ``sequence``, norms and sums have a part of each sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    layer, rows = (
        "model.layers.*.",
        {"output_layouts": Shard(1), "use_local_output": False} if sequence else {},
    )
    plan: dict[str, Any] = {
        layer + f"self_attn.{name}_proj": tp.ColwiseParallel() for name in "qkv"
    }
    plan |= {layer + f"mlp.{name}_proj": tp.ColwiseParallel() for name in ("gate", "up")}
    plan |= {
        layer + name: tp.RowwiseParallel(**rows) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    plan["model.embed_tokens"] = tp.RowwiseParallel(input_layouts=Replicate(), **rows)
    if not sequence:
        return {**plan, "lm_head": tp.ColwiseParallel(output_layouts=Replicate())}
    places, whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    return {
        **plan,
        "model.layers.*.*_layernorm": tp.SequenceParallel(),
        layer + "self_attn": tp.PrepareModuleInput(
            input_kwarg_layouts=places, desired_input_kwarg_layouts=whole, use_local_output=True
        ),
        layer + "mlp": tp.PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "model.norm": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def _bert_plan() -> dict[str, Any]:
    from torch.distributed.tensor import parallel as tp

    columns = (
        *[f"attention.self.{name}" for name in ("query", "key", "value")],
        "intermediate.dense",
    )
    plan: dict[str, Any] = {
        f"bert.encoder.layer.*.{name}": tp.ColwiseParallel() for name in columns
    }
    rows = ("attention.output.dense", "output.dense")
    return plan | {f"bert.encoder.layer.*.{name}": tp.RowwiseParallel() for name in rows}


class _Block(nn.Module):
    """Two sums, of which the norm in between takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = x + self.first(x)
        return z + self.second(self.norm(z))


# --- properties, on the two ranks that compute ----------------------------------------------------


def _modules_under_sequence_parallel(mesh: Any) -> None:
    """`SequenceParallel` hands on the first argument alone.

    Others arrive all the same, placed as that is.
    """
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    generator, nns, p = torch.Generator().manual_seed(2), fusedops.nn, 0.4 if INTERPRETED else 0.0
    x, other = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
    bias = torch.randn(WIDTH, generator=generator)
    cases: tuple[tuple[nn.Module, dict[str, Tensor]], ...] = (
        (nns.FusedLayerNorm(WIDTH), {}),
        (nns.FusedRMSNorm(WIDTH), {}),
        (nns.FusedBiasDropoutAdd(p), {"bias": bias, "residual": other}),
        (nns.FusedBiasDropoutAddLayerNorm(WIDTH, p=p), {"bias": bias, "residual": other}),
        (
            nns.FusedBiasDropoutAddRMSNorm(WIDTH, p=p, return_sum=True),
            {"bias": bias, "residual": other},
        ),
        (nns.FusedBiasAct("silu", p), {"bias": bias}),
        (nns.FusedBiasGELU(), {"bias": bias}),
        (nns.FusedGatedAct(), {"up": other}),
        (nns.FusedSwiGLU(), {"up": other}),
        (nns.FusedGEGLU(), {"up": other}),
    )

    def run(
        module: nn.Module, tensors: list[Tensor], names: list[str], along: Any
    ) -> tuple[list[Tensor], ...]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        torch.manual_seed(5)
        first, others = leaves[:1], leaves[1:]
        result = (
            module(*first, **dict(zip(names, others, strict=True))) if names else module(*leaves)
        )
        outputs = list(result) if isinstance(result, tuple) else [result]
        return outputs, list(torch.autograd.grad(outputs, leaves, [along for _ in outputs]))

    for module, others in cases:
        tensors = [x, *others.values()]
        outputs, gradients = run(module, tensors, [], other)
        parallel = parallelize_module(copy.deepcopy(module), mesh, SequenceParallel())
        own = [t.chunk(2, 1)[dist.get_rank()] if t.ndim == 3 else t for t in tensors]
        for names in ([], list(others)):
            result, grads = run(parallel, own, names, distribute_tensor(other, mesh, [Shard(1)]))
            for out, expected in zip(result, outputs, strict=True):
                assert out.placements == (Shard(1),), type(module).__name__
                _close(_full(out), expected)
            for grad, expected in zip(grads, gradients, strict=True):
                _close(
                    grad, expected.chunk(2, 1)[dist.get_rank()] if expected.ndim == 3 else expected
                )


def _sums_of_plain_rows(mesh: Any) -> None:
    """Under `SequenceParallel` a block joins sum and norm of plain tensors, too.

    It calls a norm with another hook.
    """
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    torch.manual_seed(4)
    reference, x, along = (
        _scattered(_Block()),
        torch.randn(BATCH, LENGTH, WIDTH),
        torch.randn(BATCH, LENGTH, WIDTH),
    )
    expected = reference(x)
    expected.backward(along)
    for hooked in (False, True):
        model: Any = parallelize_module(
            copy.deepcopy(reference), mesh, {"norm": SequenceParallel(use_local_output=True)}
        )
        fusedops.fuse_model(model)
        sums: list[Any] = []
        if hooked:
            model.norm.register_forward_pre_hook(
                lambda module, inputs, sums=sums: sums.append(inputs[0])
            )
        lines = {line.name: line.calls for line in fusedops.fusion_status(model).replaced}
        assert ("bias_dropout_add_ln" in lines[""]) == (not hooked), lines
        model.norm.zero_grad()
        with _counted() as joined:
            out = model(x.chunk(2, 1)[dist.get_rank()])
        assert len(joined) == (not hooked)
        _close(out, expected.chunk(2, 1)[dist.get_rank()])
        out.backward(along.chunk(2, 1)[dist.get_rank()])
        _close(_full(model.norm.weight.grad), reference.norm.weight.grad)
        assert len(sums) == hooked


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """The calls of operators that join a sum and a norm, by the rules of norms."""
    called: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        operator = getattr(fusedops, name)
        return lambda *args, **kwargs: called.append(name) or operator(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in ("bias_dropout_add_ln", "bias_dropout_add_rms_norm"):
            stack.enter_context(mock.patch.object(norms, name, counting(name)))
        yield called


def _agrees(model: nn.Module, reference: nn.Module, over: Any = None) -> None:
    """Loss and gradients are those of one process.

    The ranks ``over`` this mesh have parts of the batch.
    """
    assert fusedops.fusion_status(model).replaced
    torch.manual_seed(3)
    expected = _loss(reference, _ids())
    expected.backward()
    torch.manual_seed(3)
    loss = _loss(model, _ids() if over is None else _ids().chunk(2)[dist.get_rank()])
    loss.backward()
    result = _full(loss.detach()).clone()
    if over is not None:
        dist.all_reduce(result, group=over.get_group())
        result /= 2
    _close(result, expected.detach())
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        # The softmax does not depend on a bias of all keys.
        assert name.endswith("key.bias") or gradients[name].abs().max() > 1e-3, name
        _close(
            _full(parameter.grad), gradients[name], msg=lambda text, name=name: f"{name}: {text}"
        )


def _tensor_parallel_models(mesh: Any, full: bool) -> None:
    """Fused before the plan is applied, or after: the same modules call the same operators."""
    from torch.distributed.tensor.parallel import parallelize_module

    cases: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
        (_llama, _llama_plan(sequence=True))
    ]
    if not INTERPRETED:  # which takes long, and the kernels are those
        cases += [(functools.partial(_bert, 0.2), _bert_plan())]
    if full and not INTERPRETED:
        cases += [
            (_llama, _llama_plan(sequence=False)),
            (functools.partial(_bert, 0.2), plans.plan("bert")),
        ]
    for make, plan in cases:
        reports = []
        for first in (True, False):
            model = make()
            for fusing in (first, not first):
                if fusing:
                    fusedops.fuse_model(model)
                else:
                    parallelize_module(model, mesh, plan)
            reports.append(
                [(line.name, line.calls) for line in fusedops.fusion_status(model).replaced]
            )
            reference = make()
            fusedops.fuse_model(reference)
            with _counted() as joined:
                _agrees(model, reference)
            # Sums are joined with the norms, whether these are under `SequenceParallel` or not.
            assert len(joined) == 2 * LAYERS * (1 if make is _llama else 2) or INTERPRETED, joined
        assert reports[0] == reports[1]
        blocks = [calls for name, calls in reports[0] if re.search(r"layers?\.\d+$", name)]
        operator = "bias_dropout_add_rms_norm" if make is _llama else "bias_dropout_add_ln"
        # Under the interpreter Llama's norms round in another way.
        assert blocks == [operator] * LAYERS or INTERPRETED, blocks


def _sharded_models(mesh: Any, full: bool) -> None:
    """Fused before `fully_shard`, or after: the same classes, FSDP's in front.

    Each rank has a part of the batch.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for make in (_llama, functools.partial(_bert, 0.0)) if full else (_llama,):
        classes = []
        for first in (True, False):
            model = make()
            for fusing in (first, not first):
                if fusing:
                    fusedops.fuse_model(model)
                else:
                    for part in (*_layers(model), model):
                        fully_shard(part, mesh=mesh)
            classes.append([type(module) for module in model.modules()])
            assert isinstance(model, FSDPModule)
            _agrees(model, make(), mesh)
        assert classes[0] == classes[1]


def _spread(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], _llama_plan(sequence=True))
    for part in (*_layers(model), model):
        fully_shard(part, mesh=mesh["dp"])


def _compiled_blocks(mesh: Any) -> None:
    """Whole graphs, compiled once, under FSDP2 times tensor parallel.

    Training as one process does.
    """
    import torch._dynamo

    model, reference = _llama(), _llama()
    fusedops.fuse_model(model)
    for layer in _layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    _spread(model, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    for step in range(3):
        torch._dynamo.config.error_on_recompile = step > 0
        losses = [_loss(m, _ids(step)) for m in (model, reference)]
        _close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(_layers(model))
    torch._dynamo.config.error_on_recompile = False


def _save(mesh: Any, folder: str) -> None:
    """Saves a split, sharded and then fused model, under the keys of the original model."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = _llama()
    _spread(model, mesh)
    fusedops.fuse_model(model)
    _agrees(model, _llama())
    state = get_model_state_dict(model)
    assert list(state) == list(_llama().state_dict())
    checkpoint.save(state, checkpoint_id=folder, process_group=mesh["tp"].get_group())


def _load(folder: str, *, fused: bool) -> None:
    """On all ranks, into a sharded model, fused or not."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _llama()
    if fused:
        fusedops.fuse_model(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*_layers(model), model):
        fully_shard(part, mesh=mesh)
    state = {name: torch.zeros_like(t) for name, t in get_model_state_dict(model).items()}
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    expected = _llama().state_dict()
    for name, t in model.state_dict().items():
        assert torch.equal(_full(t), expected[name]), name


def _mesh(rank: int, folder: str, size: int) -> Any:
    """Two of the processes, with one part of the data and two of the tensors."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))


def _work(rank: int, folder: str, full: bool) -> None:
    mesh = _mesh(rank, folder, 2)
    one = mesh["tp"]
    _modules_under_sequence_parallel(one)
    _sums_of_plain_rows(one)
    _tensor_parallel_models(one, full)
    if not INTERPRETED:
        _sharded_models(one, full)
    dist.destroy_process_group()


def _compile_and_save(rank: int, folder: str) -> None:
    mesh = _mesh(rank, folder, RANKS)
    if rank < 2:
        _compiled_blocks(mesh)
        _save(mesh, f"{folder}/saved")
    dist.barrier()
    _load(f"{folder}/saved", fused=False)
    _load(f"{folder}/saved", fused=True)
    dist.destroy_process_group()


@pytest.mark.once
def test_two_processes(tmp_path: Path, full: bool) -> None:
    run_ranks(_work, (str(tmp_path), full), 2, "transformers.models.llama.modeling_llama")


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
@pytest.mark.plain
@pytest.mark.full  # half a minute: graphs of each rank, and three processes that load
def test_compiled_blocks_and_checkpoints(tmp_path: Path) -> None:
    mp.spawn(_compile_and_save, (str(tmp_path),), RANKS)
    _load_alone(tmp_path / "saved")


def _load_alone(folder: Path) -> None:
    """One process loads what two ranks saved, into the original model and into the fused one."""
    from torch.distributed import checkpoint

    for fused in (False, True):
        model = _llama()
        expected = {name: t.clone() for name, t in model.state_dict().items()}
        if fused:
            fusedops.fuse_model(model)
        state = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        assert state.keys() == expected.keys()
        for name, t in expected.items():
            assert torch.equal(state[name], t), name


@pytest.mark.once
def test_arguments_that_no_call_takes_are_errors_under_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.tensor import DTensor  # noqa: F401 - as by `distribute_module`

    module = fusedops.nn.FusedBiasDropoutAdd(0.0)
    x, bias = torch.randn(4, 8), torch.randn(8)
    expected = module(x, bias, x)
    monkeypatch.setitem(module.__dict__, "_distribute_module_applied", True)
    torch.testing.assert_close(module(x, bias, x), expected)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'bias'"):
        module(x, bias, x, bias=2 * bias)
    with pytest.raises(TypeError, match="FusedBiasDropoutAdd takes at most 3 tensors, got 4"):
        module(x, bias, x, x)


@pytest.mark.once
@pytest.mark.full  # CI runs the example in a step of its own
def test_example_trains_as_one_process() -> None:
    """`make demo-distributed`, for a few steps of a tiny model."""
    sizes = [
        "--steps",
        "3",
        "--layers",
        "1",
        "--width",
        "32",
        "--heads",
        "2",
        "--context",
        "16",
        "--batch",
        "4",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "examples/train_lm_distributed.py",
        "--tp",
        "2",
        *sizes,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu: data over 1, tensors over 2" in done.stdout
    differences = re.findall(r"largest difference from one process, 3 steps: (\S+)", done.stdout)
    assert len(differences) == 2, done.stdout
    # Losses of five and a half; a unit in the last place of one is 5e-7.
    assert max(map(float, differences)) < 5e-6
