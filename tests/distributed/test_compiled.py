"""`fusedops.compile` of blocks on several processes: DTensors, FSDP2, checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import fusedops
from backends import Backend, select_as_large
from fusedops.backend import blocks, entry
from fusedops.backend.passes import loss_heads
from fusedops.backend.report import CompileReport
from ranks import run_ranks
from sharded_blocks import (
    BATCH,
    LAYERS,
    LENGTH,
    WIDTH,
    BertLike,
    LlamaLike,
    Model,
    gather_keys_on_cpus,
    parallel,
    plan,
)
from support import INTERPRETED

CLASSES = 21  # one rank has eleven
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")


class _Uncompiled:
    """A backend that leaves graphs as they are; PyTorch's partitioner divides them."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def recorded(graph: fx.GraphModule, _: Any) -> Any:
            self.graphs.append(graph.graph)
            return make_boxed_func(graph.forward)

        divide = min_cut_rematerialization_partition
        compiled = aot_autograd(fw_compiler=recorded, bw_compiler=recorded, partition_fn=divide)
        return compiled(gm, inputs)


def _collectives(graphs: Sequence[fx.Graph]) -> list[tuple[str, int]]:
    """The name and the bytes of each collective."""
    found = []
    for node in [node for graph in graphs for node in graph.nodes]:
        target: Any = node.target
        is_collective = getattr(target, "namespace", "") == "_c10d_functional"
        if is_collective and not target.__name__.startswith("wait"):
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            found.append((target.__name__, value.numel() * value.itemsize))
    return sorted(found)


def _products(graphs: Sequence[fx.Graph]) -> int:
    """The number of matrix products."""
    targets = [node.target for graph in graphs for node in graph.nodes]
    return sum(map(targets.count, (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)))


def _full(t: Tensor | None) -> Any:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _compiled(model: nn.Module, backend: Any) -> None:
    """Compile the blocks by another backend than that of `compile_blocks`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(blocks, "backend", backend):
        names = fusedops.compile_blocks(model, fullgraph=True)
    assert names == [f"layers.{number}" for number in range(LAYERS)]


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _step(model: nn.Module, x: Tensor, cotangent: Tensor) -> Tensor:
    torch.manual_seed(3)
    output = model(x.clone().requires_grad_())
    output = output.to_local() if hasattr(output, "to_local") else output
    output.backward(cotangent)
    return output.detach()  # type: ignore[no-any-return]


@contextmanager
def _shared(layout: str, mesh: Any, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Context manager: this rank's parts of batches, whose sequences or rows the ranks share."""
    if "context parallel" not in layout:
        dim = 1 if layout == "tp" else 0
        yield [t.chunk(2, dim)[dist.get_rank()].contiguous() for t in tensors]
        return
    from torch.distributed.tensor.experimental import context_parallel

    gather_keys_on_cpus()
    parts = [t.clone() for t in tensors]  # PyTorch replaces what they hold
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1] * len(parts)):
        yield parts


# Under FSDP each rank draws masks of its own, so that blocks with dropout have no counterpart.
CASES = (
    (LlamaLike, "tp"),
    (BertLike, "tp"),
    (LlamaLike, "fsdp, checkpointed"),
    (LlamaLike, "fsdp, selective, bf16"),
    (LlamaLike, "fsdp, context parallel"),
)
# The regions of a block. Of the biases of products, the one before GELU is in a region.
REGIONS = {LlamaLike: 2, BertLike: 3}


def _check(make: type[nn.Module], layout: str, mesh: Any) -> None:
    """Values, gradients, masks, collectives, products and compilations of a model in a layout.

    A term of a product, a norm or an attention is rounded once, and each of a few tens of these
    steps amplifies an error by a factor of about one: rows are normalised, and weights of layers
    have a norm of about one. So a result differs by some ``eps`` of fp32 for each of the terms of a
    sum in each step, as a random walk. A dropped element that one process keeps would differ by the
    size of the values. In bf16 one process rounds the same values as the ranks. An element may be
    rounded to its neighbour, and of a gradient each rank rounds its part.
    """
    from torch.distributed.tensor import DTensor, Shard

    dtype = torch.bfloat16 if "bf16" in layout else torch.float32
    generator = torch.Generator().manual_seed(1)
    x, cotangent = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator).to(dtype)
    reference, plain = Model(make).to(dtype), parallel(make, layout, mesh)
    _compiled(reference, Backend("auto"))
    whole = _step(reference, x, cotangent)
    uncompiled, backend = _Uncompiled(), Backend("auto")
    with _shared(layout, mesh, (x, cotangent, whole)) as (own_x, own_cotangent, expected):
        if make is BertLike and layout == "tp":
            own_x = DTensor.from_local(own_x, mesh, [Shard(1)], run_check=False)
        _compiled(plain, uncompiled)
        _step(plain, own_x, own_cotangent)
        traced = _graphs()
        model = parallel(make, layout, mesh)
        _compiled(model, backend)
        error = (_step(model, own_x, own_cotangent) - expected).abs().max()
    what = (make.__name__, layout)
    assert _graphs() == traced == 1, what
    assert not backend.report.left, what
    fused = [region for region in backend.report.regions if region.program is not None]
    assert len(fused) == REGIONS[make], (*what, str(backend.report))
    graphs = [*backend.forwards, *backend.backwards]
    assert _collectives(graphs) == _collectives(uncompiled.graphs), what
    assert bool(_collectives(graphs)) == (layout in ("tp", "fsdp, context parallel")), what
    assert _products(graphs) == _products(uncompiled.graphs), what
    tolerance = LAYERS * 8 * WIDTH**0.5 * torch.finfo(torch.float32).eps
    tolerance += 0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert error <= tolerance * whole.abs().max(), (*what, error)
    # FSDP averages the gradients of the ranks, which one process adds.
    scale = 2 if "fsdp" in layout else 1
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), other in pairs:
        assert other.grad is not None
        if name.endswith("key.bias"):  # does not change the softmax: its gradient is rounding
            continue
        error = (scale * _full(parameter.grad) - other.grad).abs().max()
        limit = 4 * tolerance * other.grad.abs().max()
        assert error <= limit, (*what, name, error, limit)


def _check_saved(mesh: Any, folder: str) -> None:
    """A compiled model under FSDP2 is saved, and loaded under tensor parallelism."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = parallel(LlamaLike, "fsdp", mesh)
    fusedops.compile_blocks(model)
    state = get_model_state_dict(model)
    assert list(state) == list(Model(LlamaLike).state_dict())
    checkpoint.save(state, checkpoint_id=folder)
    other = parallel(LlamaLike, "tp", mesh)
    fusedops.compile_blocks(other)
    state = {name: torch.zeros_like(t) for name, t in get_model_state_dict(other).items()}
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    for name, t in Model(LlamaLike).state_dict().items():
        assert torch.equal(_full(other.state_dict()[name]), t), name


def _check_grad_modes(mesh: Any) -> None:
    """A value that is used both under `no_grad` and outside has its gradient outside only."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def local_of_an_argument(x: Any, w: Any) -> Any:
        with torch.no_grad():
            scaled = x * 2
        return x * w + scaled

    def view(x: Any, w: Any) -> Any:
        with torch.no_grad():
            scaled = w.view(1, WIDTH) * 1
        return x * w.view(1, WIDTH) + scaled

    def redistributed(x: Any, w: Any) -> Any:
        product = x * w
        with torch.no_grad():
            same = product.redistribute(placements=[Shard(1)])
        return same * w + x

    def from_and_to_local(x: Any, w: Any) -> Any:
        doubled = x.to_local() * 2
        with torch.no_grad():
            same = DTensor.from_local(doubled, mesh, [Shard(1)]).to_local()
        return DTensor.from_local(same * x.to_local(), mesh, [Shard(1)]) * w

    def changed(x: Any, w: Any) -> Any:
        product = x * w
        with torch.no_grad():
            product.mul_(2)
        return product * w

    generator = torch.Generator().manual_seed(4)
    x, cotangent = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    w = torch.randn(WIDTH, generator=generator)
    cotangent = cotangent.chunk(2, 1)[dist.get_rank()]
    functions = (local_of_an_argument, view, redistributed, from_and_to_local, changed)
    for function in functions:
        found, backend = [], Backend("auto")
        torch._dynamo.reset()
        for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
            own = [
                distribute_tensor(x, mesh, [Shard(1)]),
                distribute_tensor(w, mesh, [Replicate()]),
            ]
            own = [t.detach().requires_grad_() for t in own]
            output = call(*own).to_local()
            output.backward(cotangent)
            found.append((output.detach(), *(t.grad.full_tensor() for t in own)))
        assert bool(backend.report.left) == (function is changed), function.__name__
        # Sums of BATCH * LENGTH terms of a few roundings each.
        tolerance = 4 * BATCH * LENGTH * torch.finfo(x.dtype).eps
        for one, other in zip(*found, strict=True):
            error = (one - other).abs().max()
            assert error <= tolerance * one.abs().max(), (function.__name__, error)


def _check_joined_products(mesh: Any) -> None:
    """Under autocast the query, key and value of sharded weights are one product and one cast."""
    from torch.distributed.tensor.parallel import parallelize_module

    def attention(sharded: bool) -> nn.Module:
        torch.manual_seed(0)
        block = BertLike()
        return (parallelize_module(block, mesh, plan(BertLike)) if sharded else block).attention

    def results(model: nn.Module, x: Tensor, cotangent: Tensor, autocast: bool) -> list[Tensor]:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        output = output.to_local() if hasattr(output, "to_local") else output
        output.backward(cotangent.to(output.dtype))
        whole = [_full(p.grad) for name, p in model.named_parameters() if name != "key.bias"]
        return [output.detach(), x.grad, *whole]

    generator = torch.Generator().manual_seed(6)
    x, cotangent = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    own = [t.chunk(2, 1)[dist.get_rank()].contiguous() for t in (x, cotangent)]
    exact = results(attention(False).double(), x.double(), cotangent, False)
    exact[:2] = [t.chunk(2, 1)[dist.get_rank()] for t in exact[:2]]
    theirs = results(attention(True), *own, True)
    torch._dynamo.reset()
    model, backend = attention(True), Backend("auto")
    model.compile(backend=backend, fullgraph=True)
    ours = results(model, *own, True)
    assert _products(backend.forwards) == 2
    assert backend.report.changes["one cast of several parameters"] == 1
    for one, other, want in zip(ours, theirs, exact, strict=True):
        # Another order of sums, and of roundings to bf16.
        limit = 2 * (other - want).abs().max() + torch.finfo(torch.bfloat16).eps * want.abs().max()
        assert (one - want).abs().max() <= limit


class Head(nn.Module):
    """The end of a language model, with PyTorch's loss or with this package's."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = self.norm(x)
        if self.loss == "linear_cross_entropy":
            return fusedops.linear_cross_entropy(x, self.lm_head.weight, labels)
        logits = self.lm_head(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=self.loss)


def _check_loss_heads(mesh: Any) -> None:
    """Losses of sharded classes are those of one process, and no logits are whole."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import parallel as tp

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator)
    labels[0, 1] = -100
    rank, options = dist.get_rank(), {"use_local_output": False}
    columns = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), **options)
    for loss in ("mean", "sum", "none", "linear_cross_entropy"):
        reference, model = Head(loss).double(), Head(loss).double()
        tp.parallelize_module(model, mesh, {"norm": tp.SequenceParallel(), "lm_head": columns})
        whole, own = (t.requires_grad_() for t in (x.clone(), x.chunk(2, 1)[rank].clone()))
        expected = reference(whole, labels)
        cotangent = torch.linspace(0.5, 1.5, expected.numel(), dtype=x.dtype).view_as(expected)
        expected.backward(cotangent)
        torch._dynamo.reset()
        backend = Backend("auto")
        with (
            tp.loss_parallel(),
            mock.patch.object(loss_heads, "_LEAST_BYTES", 0),
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
        ):
            result = torch.compile(model, backend=backend, fullgraph=True)(own, labels).to_local()
            result.backward(cotangent)
        targets = [node.target for graph in backend.forwards for node in graph.nodes]
        assert torch.ops.fusedops.linear_rowwise.default in targets, loss
        rows = BATCH * LENGTH  # three numbers of each
        assert all(call.args[0].numel() <= 3 * rows for call in reduced.call_args_list)
        tensors = [(result, expected), (own.grad, whole.grad.chunk(2, 1)[rank])]
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            tensors.append((_full(parameter.grad), other.grad))
        for tensor, value in tensors:
            torch.testing.assert_close(tensor, value, rtol=1e-12, atol=1e-12, msg=loss)


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    select_as_large()
    for make, layout in CASES:
        _check(make, layout, mesh)
    _check_saved(mesh, f"{folder}/saved")
    _check_grad_modes(mesh)
    _check_joined_products(mesh)
    _check_loss_heads(mesh)
    dist.destroy_process_group()


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run on gloo's CPU in the interpreter only")
def test_compiled_blocks_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    run_ranks(_work, (str(tmp_path),), 2)


# --- many ranks -----------------------------------------------------------------------------------


def _captured_on(ranks: int, rank: int) -> list[str]:
    """The functions that the captured graph of a block calls on a mesh of simulated ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    functions: list[str] = []

    def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graph = entry._with_operators(gm, inputs, CompileReport()).graph
        functions.extend(str(getattr(node.target, "__name__", node.op)) for node in graph.nodes)
        return gm.forward

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        block = parallelize_module(LlamaLike(), mesh, plan(LlamaLike))
        torch.compile(block, backend=record)(torch.randn(BATCH, LENGTH // 2, WIDTH))
    finally:
        dist.destroy_process_group()
    return functions


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run on a CPU in the interpreter only")
def test_the_graph_of_a_rank_does_not_depend_on_the_number_of_ranks(fresh_dynamo: None) -> None:
    functions = _captured_on(2, rank=1)
    assert sum("rowwise_region" in name for name in functions) == REGIONS[LlamaLike]
    torch._dynamo.reset()
    assert _captured_on(1024, rank=777) == functions


# --- blocks ---------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Blocks in a dictionary, with blocks of their own, beside a list without any."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner = [nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()) for _ in range(2)]
        self.parts = nn.ModuleDict({"a": inner[0], "b": inner[1], "c": nn.Linear(4, 4)})


@pytest.mark.once
def test_a_block_that_is_used_several_times_is_compiled_once() -> None:
    shared = nn.Sequential(nn.Linear(4, 4))
    model = nn.Sequential(
        nn.ModuleList([shared, shared]), nn.ModuleDict({"a": shared, "b": shared})
    )
    with mock.patch.object(nn.Module, "compile", autospec=True) as compiled:
        assert fusedops.compile_blocks(model) == ["0.0"]
    assert [call.args[0] for call in compiled.call_args_list] == [shared]


@pytest.mark.once
def test_blocks_are_the_outermost_repeated_modules() -> None:
    model = Nested()
    assert fusedops.compile_blocks(model) == ["parts.a", "parts.b"]
    compiled = [name for name, part in model.named_modules() if part._compiled_call_impl]
    assert compiled == ["parts.a", "parts.b"]
    with pytest.raises(ValueError, match="no list of several modules of one class"):
        fusedops.compile_blocks(model.stem)
    with pytest.raises(TypeError, match="model must be a module, got function"):
        fusedops.compile_blocks(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'fusedops\.memory' must be one of"):
        fusedops.compile_blocks(model, options={"fusedops.memory": "most"})
