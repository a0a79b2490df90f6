"""Graphs with DTensors on disk: one file for all ranks, unless their graphs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.nn import functional as F

from fusedops.backend import encoding, entry, meshes, storing
from fusedops.backend.passes import loss_heads
from fusedops.backend.report import CompileReport
from sharded_blocks import BATCH, LENGTH, WIDTH, LlamaLike, parallel
from support import INTERPRETED

P = 0.5
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")


def _graph(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The graph and the inputs that Dynamo passes to a backend."""
    recorded: list[Any] = []

    def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        recorded.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=record, fullgraph=True)(*args)
    return recorded[0]  # type: ignore[no-any-return]


# --- two ranks ------------------------------------------------------------------------------------


@contextmanager
def _ranks(count: int, rank: int = 0) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _uneven(x: Any, w: Any) -> Any:
    from torch.distributed.tensor import Shard

    return F.rms_norm(x.redistribute(placements=[Shard(1)]), (WIDTH,), w).to_local() * 2


def _dropped(x: Any, w: Any) -> Any:
    return F.rms_norm(F.dropout(x, P) + x, (WIDTH,), w).to_local()


def _of_block(mesh: Any) -> tuple[fx.GraphModule, list[Any]]:
    llama = parallel(LlamaLike, "tp", mesh).layers[0]  # type: ignore[index]
    return _graph(llama, torch.randn(BATCH, LENGTH // 2, WIDTH))


def _of_dropout(mesh: Any) -> tuple[fx.GraphModule, list[Any]]:
    from torch.distributed.tensor import Replicate, Shard

    rows = _placed(mesh, Shard(1), BATCH, LENGTH // 2, WIDTH)
    return _graph(_dropped, rows, _placed(mesh, Replicate(), WIDTH))


def _of_uneven_shards(mesh: Any) -> tuple[fx.GraphModule, list[Any]]:
    from torch.distributed.tensor import Replicate

    rows = _placed(mesh, Replicate(), BATCH, LENGTH + 1, WIDTH)
    return _graph(_uneven, rows, _placed(mesh, Replicate(), WIDTH))


def _placed(mesh: Any, placement: Any, *shape: int) -> Any:
    """A DTensor whose local tensor has this shape."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(torch.randn(shape), mesh, [placement], run_check=False)


def _of_loss_head(mesh: Any) -> tuple[fx.GraphModule, list[Any]]:
    from torch.distributed.tensor import Replicate, Shard

    rows, weight = _placed(mesh, Replicate(), 4, WIDTH), _placed(mesh, Shard(0), 8, WIDTH)
    labels = torch.tensor([0, 3, 9, 15])
    weight = weight.requires_grad_()
    return _graph(lambda x, w, y: F.cross_entropy(F.linear(x, w), y), rows, weight, labels)


_CASES = (_of_block, _of_dropout, _of_uneven_shards, _of_loss_head)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run on a CPU in the interpreter only")
@pytest.mark.parametrize(
    "case", range(4), ids=["block", "dropout", "uneven shards", "sharded loss head"]
)
def test_second_rank_reads_the_graph_of_the_first_unless_they_differ(
    case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    monkeypatch.setattr(loss_heads, "_LEAST_BYTES", 0)
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    for rank in range(2):
        with (
            _ranks(2, rank),
            loss_parallel(),
            mock.patch.object(entry, "captured", wraps=entry.captured) as captured,
        ):
            gm, inputs = _CASES[case](init_device_mesh("cpu", (2,)))
            codes = [entry._stored(gm, inputs, CompileReport()).code for _ in range(2)]
            assert captured.call_count == (rank == 0 or case > 0)
            own = entry._with_operators(gm, inputs, CompileReport()).code
        assert codes == [own, own]


# --- the name of a file ---------------------------------------------------------------------------


def _local(x: Any) -> Any:
    return x.to_local() * 2


def _whole_gradient(x: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return x.to_local(grad_placements=[Replicate()]) * 2


def _gathered(x: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()]).to_local() * 2


def _path(
    function: Callable[..., Any] = _local,
    *,
    shape: tuple[int, ...] = (2,),
    names: tuple[str, ...] | None = None,
    rank: int = 0,
    dims: tuple[int, ...] = (0,),
    size: int = 4,
    with_loss: bool = False,
) -> Any:
    """The path of a function's graph of a sharded tensor, and that of a rank's own graph."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    context = loss_parallel() if with_loss else nullcontext()
    with _ranks(torch.Size(shape).numel(), rank), context:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        placements = [Shard(dim) for dim in dims]
        x = DTensor.from_local(torch.randn(size, size), mesh, placements, run_check=False)
        gm, inputs = _graph(function, x)
        path = storing.stored_at(gm, inputs)
        assert path is not None
        return path, *storing.of_rank(path, gm, inputs)


def test_path_depends_on_the_layout_and_not_on_the_rank() -> None:
    first, second = _path(), _path(rank=1)
    assert first[0] == second[0]
    others = [
        _path(dims=(1,)),
        _path(shape=(4,)),
        _path(names=("tp",)),
        _path(size=8),
        _path(with_loss=True),
        _path(shape=(2, 2), dims=(0, 1)),
        _path(shape=(2, 2), dims=(1, 0)),
        _path(_whole_gradient),
        _path(_gathered),
    ]
    paths = [*first, second[1], *[path for pair in others for path in pair]]
    assert len(set(paths)) == len(paths)


def test_graph_of_two_meshes_with_one_description_is_not_stored() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    with _ranks(4):
        pairs = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [0, 2])]
        x, y = (
            DTensor.from_local(torch.randn(2, 2), mesh, [Shard(0)], run_check=False)
            for mesh in pairs
        )
        assert storing.stored_at(*_graph(lambda x, y: x.to_local() + y.to_local(), x, y)) is None


@pytest.mark.once
def test_current_gpu_has_one_name_on_all_ranks() -> None:
    def created(index: int) -> Any:
        graph = fx.Graph()
        graph.call_function(torch.tensor, ([1.0],), {"device": torch.device("cuda", index)})
        return encoding.nodes_of(graph, encoding.restorable_name)

    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        stored, other = created(0), created(1)
    with mock.patch.object(torch.cuda, "current_device", return_value=3):
        assert created(3) == stored != other == created(1)
        for nodes, index in ((stored, 3), (other, 1)):
            (node,) = encoding.graph_of(nodes).nodes
            assert node.kwargs == {"device": torch.device("cuda", index)}


# --- what is in a file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        {"method": "__init__"},
        {"operator": "os.system"},
        {"at": 0},
        {"ToLocal": [[{"placement": ["DTensor", 0]}]]},
        {"mesh": ["cpu", [2], []]},
    ],
    ids=str,
)
@pytest.mark.once
def test_file_names_no_other_function_of_dtensors(target: dict[str, Any]) -> None:
    with pytest.raises((encoding.NoValueError, KeyError)):
        encoding.graph_of([["call_function", "x", target, [], {"dict": []}, {}]], [print])


@pytest.mark.once
def test_shards_are_equal_if_the_ranks_divide_the_size() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    with _ranks(6):
        mesh = init_device_mesh("cpu", (2, 3))
        for placements, expected in (
            ([Shard(0), Replicate()], True),
            ([Replicate(), Shard(0)], False),
            ([Shard(1), Shard(1)], True),
            ([Shard(0), Shard(0)], False),
            ([Partial(), Shard(1)], True),
        ):
            sizes: Any = {"shape": torch.Size((4, 6)), "stride": (6, 1)}
            x = DTensor.from_local(torch.randn(4, 6), mesh, placements, run_check=False, **sizes)
            assert meshes.has_equal_shards(x) == expected
