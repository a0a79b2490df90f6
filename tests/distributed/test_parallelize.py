"""Tensor parallel and sharded models, fused before or after they are parallelised.

Their values, gradients and checkpoints are those of one process.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fusedops
from backends import select_as_large
from benchmarks.models import plans
from fusedops.core.launches import launch
from ranks import run_ranks
from support import INTERPRETED

RANKS = 3  # of the test of checkpoints: the first two save, and all three load
VOCABULARY, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 64, 32, 2, 4, 2, 8
ROOT = Path(__file__).parents[2]

# Sums of up to 64 products are added in another order. Losses and gradients are of order one.
_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def _full(t: Any) -> Tensor:
    """Return the whole tensor of a DTensor, or a plain tensor itself."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


# --- models ---------------------------------------------------------------------------------------


def _randomised(model: nn.Module) -> nn.Module:
    """Return the model with random norm weights and biases, instead of ones and zeros."""
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
    return _randomised(LlamaForCausalLM(config))


def _bert(p: float) -> nn.Module:
    """Return a BERT with dropout of rows, but not of attention weights.

    Each rank draws the dropout of attention weights for its own heads, so it differs from one
    process.
    """
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
    return _randomised(BertForMaskedLM(config))


def _layers(model: Any) -> nn.ModuleList:
    is_llama = hasattr(model, "model")
    layers: nn.ModuleList = model.model.layers if is_llama else model.bert.encoder.layer
    return layers


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _ids(step: int = 1) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )


def _llama_plan(*, sequence: bool) -> dict[str, Any]:
    """Return the usual plan: linear layers are split by columns and rows.

    Args:
        sequence: whether norms and sums have a part of each sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    layer = "model.layers.*."
    output: dict[str, Any] = {}
    if sequence:
        output = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, Any] = {
        layer + f"self_attn.{name}_proj": tp.ColwiseParallel() for name in "qkv"
    }
    plan |= {layer + f"mlp.{name}_proj": tp.ColwiseParallel() for name in ("gate", "up")}
    plan |= {
        layer + name: tp.RowwiseParallel(**output) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    plan["model.embed_tokens"] = tp.RowwiseParallel(input_layouts=Replicate(), **output)
    if not sequence:
        return {**plan, "lm_head": tp.ColwiseParallel(output_layouts=Replicate())}
    return {
        **plan,
        "model.layers.*.*_layernorm": tp.SequenceParallel(),
        layer + "self_attn": tp.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
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
    """A sum, a norm of it, and a second sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = x + self.first(x)
        return z + self.second(self.norm(z))


# --- properties that two ranks check --------------------------------------------------------------


def _own_part(t: Tensor) -> Tensor:
    """Return this rank's half of a batch of sequences, and other tensors as they are."""
    if t.ndim != 3:
        return t
    return t.chunk(2, 1)[dist.get_rank()]


def _check_modules_under_sequence_parallel(mesh: Any) -> None:
    """Modules get all their arguments, with the placement of the first.

    PyTorch's hook of `SequenceParallel` passes on only the first positional argument.
    """
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    generator, nns = torch.Generator().manual_seed(2), fusedops.nn
    p = 0.4 if INTERPRETED else 0.0  # dropout with kernels only
    x, second = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
    bias = torch.randn(WIDTH, generator=generator)
    cases: tuple[tuple[nn.Module, dict[str, Tensor]], ...] = (
        (nns.FusedLayerNorm(WIDTH), {}),
        (nns.FusedRMSNorm(WIDTH), {}),
        (nns.FusedBiasDropoutAdd(p), {"bias": bias, "residual": second}),
        (nns.FusedBiasDropoutAddLayerNorm(WIDTH, p=p), {"bias": bias, "residual": second}),
        (
            nns.FusedBiasDropoutAddRMSNorm(WIDTH, p=p, return_sum=True),
            {"bias": bias, "residual": second},
        ),
        (nns.FusedBiasAct("silu", p), {"bias": bias}),
        (nns.FusedBiasGELU(), {"bias": bias}),
        (nns.FusedGatedAct(), {"up": second}),
        (nns.FusedSwiGLU(), {"up": second}),
        (nns.FusedGEGLU(), {"up": second}),
    )

    def run(
        module: nn.Module, tensors: list[Tensor], names: list[str], cotangent: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and gradients; the tensors after the first are passed by these names."""
        leaves = [t.clone().requires_grad_() for t in tensors]
        torch.manual_seed(5)
        if names:
            first, *others = leaves
            result = module(first, **dict(zip(names, others, strict=True)))
        else:
            result = module(*leaves)
        outputs = list(result) if isinstance(result, tuple) else [result]
        cotangents = [cotangent for _ in outputs]
        return outputs, list(torch.autograd.grad(outputs, leaves, cotangents))

    for module, others in cases:
        tensors = [x, *others.values()]
        expected_outputs, expected_gradients = run(module, tensors, [], cotangent=second)
        parallel = parallelize_module(copy.deepcopy(module), mesh, SequenceParallel())
        own_tensors = [_own_part(t) for t in tensors]
        cotangent = distribute_tensor(second, mesh, [Shard(1)])
        for names in ([], list(others)):
            outputs, gradients = run(parallel, own_tensors, names, cotangent)
            for output, expected in zip(outputs, expected_outputs, strict=True):
                assert output.placements == (Shard(1),), type(module).__name__
                _close(_full(output), expected)
            for gradient, expected in zip(gradients, expected_gradients, strict=True):
                _close(gradient, _own_part(expected))


def _check_equal(model: nn.Module, reference: nn.Module, data_mesh: Any = None) -> None:
    """Check that loss and gradients of a model are those of a reference on one process.

    Args:
        model: the parallel model.
        reference: the model on one process.
        data_mesh: the mesh of the two ranks that share the batch, or None if each has all of it.
    """
    assert fusedops.fusion_status(model).replaced
    torch.manual_seed(3)
    expected = _loss(reference, _ids())
    expected.backward()
    torch.manual_seed(3)
    ids = _ids() if data_mesh is None else _ids().chunk(2)[dist.get_rank()]
    loss = _loss(model, ids)
    loss.backward()
    result = _full(loss.detach()).clone()
    if data_mesh is not None:
        dist.all_reduce(result, group=data_mesh.get_group())
        result /= 2
    _close(result, expected.detach())
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        # A bias that is added to all keys does not change the softmax, so its gradient is zero.
        if not name.endswith("key.bias"):
            assert gradients[name].abs().max() > 1e-3, name
        _close(
            _full(parameter.grad), gradients[name], msg=lambda text, name=name: f"{name}: {text}"
        )


def _check_tensor_parallel_models(mesh: Any, full: bool) -> None:
    """Fused before or after the plan is applied, a model has the same graph.

    The hooks of the plan are in it.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    cases: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
        (_llama, _llama_plan(sequence=True))
    ]
    if not INTERPRETED:  # the interpreter is slow, and runs the same kernels
        cases += [(functools.partial(_bert, 0.2), _bert_plan())]
    if full and not INTERPRETED:
        cases += [
            (_llama, _llama_plan(sequence=False)),
            (functools.partial(_bert, 0.2), plans.plan("bert")),
        ]
    for make, plan in cases:
        reports = []
        for fuses_first in (True, False):
            model = make()
            if fuses_first:
                fusedops.fuse_model(model)
                parallelize_module(model, mesh, plan)
            else:
                parallelize_module(model, mesh, plan)
                fusedops.fuse_model(model)
            reports.append(
                [(line.name, line.calls) for line in fusedops.fusion_status(model).replaced]
            )
            _check_regions(model, make())
        assert reports[0] == reports[1]


def _check_regions(model: nn.Module, reference: nn.Module, data_mesh: Any = None) -> None:
    """Check results as `_check_equal` does, and that a graph with regions has them, if any can run.

    A layer has two norms and a gated unit, in each direction.
    """
    with launch.record() as names:
        _check_equal(model, reference, data_mesh)
    if INTERPRETED:
        for kernel in ("forward_kernel", "backward_kernel"):
            assert names.count(kernel) >= 3 * LAYERS, names


def _shard(model: nn.Module, mesh: Any) -> None:
    """Call `fully_shard` on each layer, and on the model."""
    from torch.distributed.fsdp import fully_shard

    for part in (*_layers(model), model):
        fully_shard(part, mesh=mesh)


def _check_sharded_models(mesh: Any, full: bool) -> None:
    """Fused before or after `fully_shard`, modules have the same classes, subclasses of FSDP's.

    Each rank has a part of the batch.
    """
    from torch.distributed.fsdp import FSDPModule

    for make in (_llama, functools.partial(_bert, 0.0)) if full else (_llama,):
        classes = []
        for fuses_first in (True, False):
            model = make()
            if fuses_first:
                fusedops.fuse_model(model)
                _shard(model, mesh)
            else:
                _shard(model, mesh)
                fusedops.fuse_model(model)
            classes.append([type(module) for module in model.modules()])
            assert isinstance(model, FSDPModule)
            _check_regions(model, make(), mesh)
        assert classes[0] == classes[1]


def _parallelise(model: nn.Module, mesh: Any) -> None:
    """Apply tensor parallelism and FSDP2, by the dimensions of the mesh."""
    from torch.distributed.tensor.parallel import parallelize_module

    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], _llama_plan(sequence=True))
    _shard(model, mesh["dp"])


def _check_compiled_blocks(mesh: Any) -> None:
    """Under FSDP2 and tensor parallelism, each block is compiled once, to one graph.

    Training gives the losses of one process.
    """
    import torch._dynamo

    model, reference = _llama(), _llama()
    fusedops.fuse_model(model, graph=False)
    for layer in _layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    _parallelise(model, mesh)
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
    """Save a model that was parallelised and then fused, with the keys of the original model."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = _llama()
    _parallelise(model, mesh)
    fusedops.fuse_model(model)
    _check_equal(model, _llama())
    state = get_model_state_dict(model)
    assert list(state) == list(_llama().state_dict())
    checkpoint.save(state, checkpoint_id=folder, process_group=mesh["tp"].get_group())


def _check_load(folder: str, *, fused: bool) -> None:
    """Load the checkpoint on all ranks into a sharded model, fused or not, and check it."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    model = _llama()
    if fused:
        fusedops.fuse_model(model)
    _shard(model, init_device_mesh("cpu", (RANKS,)))
    state = {name: torch.zeros_like(t) for name, t in get_model_state_dict(model).items()}
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    expected = _llama().state_dict()
    for name, t in model.state_dict().items():
        assert torch.equal(_full(t), expected[name]), name


def _mesh(rank: int, folder: str, size: int) -> Any:
    """Join ``size`` processes, and return a mesh of the first two: tensor parallel, one replica."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))


def _work(rank: int, folder: str, full: bool) -> None:
    mesh = _mesh(rank, folder, size=2)["tp"]
    _check_modules_under_sequence_parallel(mesh)
    select_as_large(setattr)
    _check_tensor_parallel_models(mesh, full)
    _check_sharded_models(mesh, full)
    dist.destroy_process_group()


def _compile_and_save(rank: int, folder: str) -> None:
    mesh = _mesh(rank, folder, size=RANKS)
    if rank < 2:
        _check_compiled_blocks(mesh)
        _save(mesh, f"{folder}/saved")
    dist.barrier()
    _check_load(f"{folder}/saved", fused=False)
    _check_load(f"{folder}/saved", fused=True)
    dist.destroy_process_group()


def test_parallel_models_on_two_processes_equal_one_process(tmp_path: Path, full: bool) -> None:
    preloaded = "transformers.models.llama.modeling_llama"
    run_ranks(_work, (str(tmp_path), full), 2, preloaded)


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
@pytest.mark.plain
@pytest.mark.full  # half a minute: graphs of each rank, and three processes that load
def test_compiled_blocks_train_and_checkpoints_load_on_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    mp.spawn(_compile_and_save, (str(tmp_path),), RANKS)
    _check_load_in_one_process(tmp_path / "saved")


def _check_load_in_one_process(folder: Path) -> None:
    """Load the checkpoint of two ranks into the original model and into the fused one."""
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
def test_superfluous_and_repeated_arguments_raise_under_distribute_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.tensor import DTensor  # noqa: F401 - as `distribute_module` does

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
def test_example_on_two_processes_has_the_losses_of_one_process() -> None:
    """The test runs `make demo-distributed` for a few steps of a tiny model."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    sizes = "--steps 3 --layers 1 --width 32 --heads 2 --context 16 --batch 4"
    options = f"{launcher} examples/train_lm_distributed.py --tp 2 {sizes}"
    command = [sys.executable, *options.split()]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert "2 processes on cpu: data over 1, tensors over 2" in process.stdout
    differences = re.findall(r"largest difference from one process, 3 steps: (\S+)", process.stdout)
    assert len(differences) == 2, process.stdout
    # The losses are about 5.5, for which a unit in the last place is 5e-7.
    assert max(map(float, differences)) < 5e-6
