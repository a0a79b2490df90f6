"""The benchmark on several processes, with tiny models on a CPU.

What it measures, and the table of what it wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.models import distributed_results, traffic

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.plain


@pytest.mark.full  # half a minute of two cores
def test_two_processes_are_measured_alike(tmp_path):
    """Fused and as it is, a spread model has one loss and the same collectives.

    Masks and losses are those of one process.
    """
    path = tmp_path / "distributed_cpu.csv"
    words = [
        "distributed",
        "--tiny",
        "--layout",
        "tp",
        "--layout",
        "fsdp-tp",
        "--steps",
        "1",
        "--blocks",
        "1",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks", *words, "--output", str(path)],
        cwd=ROOT,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {(row.model, row.layout, row.provider): row for row in distributed_results.read(path)}
    assert rows.pop(("masks", "2", "fused")).difference == 0.0
    places = {key[:2] for key in rows}
    assert places == {("llama", "tp"), ("bert", "tp"), ("train_lm", "2x1"), ("train_lm", "1x2")}
    for place in places:
        eager, fused = (rows[(*place, provider)] for provider in ("eager", "fused"))
        assert (
            eager.collectives == fused.collectives != "" and eager.moved_mib == fused.moved_mib > 0
        )
        assert eager.loss == pytest.approx(fused.loss, abs=1e-3)
        if place[0] == "train_lm":
            assert (
                max(eager.difference, fused.difference) < 5e-6
            )  # a unit in the last place of a loss is 5e-7
    assert "Masks of sharded tensors against one GPU's" in distributed_results.markdown(tmp_path)


def _two_gpus(provider, **changed):
    values = {
        "model": "llama",
        "shape": "4x2048",
        "layout": "fsdp",
        "ranks": 2,
        "provider": provider,
        "ms": 100.0,
        "spread": 1.0,
        "tokens": 160000.0,
        "peak_mib": 1000.0,
        "loss": 5.0,
        "difference": None,
        "moved_mib": 2000.0,
        "collectives": "_allgather_base_:33 _reduce_scatter_base_:17",
        "device": "NVIDIA H100",
        "commit": "0123456",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "transformers": "5.17.0",
    }
    return distributed_results.Row(**{**values, **changed})


def test_the_table_of_several_gpus(tmp_path):
    """A line for both providers, and scaling over the run of one GPU."""
    assert distributed_results.markdown(tmp_path) == "Figures of several GPUs are not measured yet."
    rows = [
        _two_gpus("eager"),
        _two_gpus("fused", ms=80.0, tokens=200000.0),
        _two_gpus("fused", ranks=1, tokens=125000.0),
        _two_gpus("eager", layout="tp"),
    ]
    path = tmp_path / "distributed_nvidia_h100.csv"
    distributed_results.write(path, [_two_gpus("fused"), rows[0]])
    distributed_results.write(path, rows[1:])  # replaces the first
    assert sorted(distributed_results.read(path), key=repr) == sorted(rows, key=repr)
    lines = distributed_results.markdown(tmp_path).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[2:-1]] == [
        "FSDP2",
        "2",
        "100.0",
        "80.0",
        "1.25",
        "160,000 / 200,000",
        "0.80",
        "1,000 / 1,000",
        "50, 2,000 MiB / 50, 2,000 MiB",
        "",
    ]
    assert not lines[3]  # without its peer a row is not shown


def test_bytes_of_collectives():
    """The larger side of each: what is gathered, and what is reduced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
        partial = torch.distributed.tensor.DTensor.from_local(torch.ones(4, 8), mesh, [Partial()])
        for work, moved in (
            (lambda: x.redistribute(placements=[Replicate()]), 128),
            (lambda: partial.redistribute(placements=[Shard(0)]), 128),
            (lambda: partial.redistribute(placements=[Replicate()]), 128),
            (
                lambda: torch.distributed.all_gather(
                    [torch.empty(4, 8) for _ in range(2)], torch.ones(4, 8)
                ),
                256,
            ),
            (lambda: torch.distributed.all_reduce(torch.ones(3)), 12),
            (lambda: x + 1, 0),
        ):
            with traffic.Traffic() as seen:
                work()
            with CommDebugMode() as counted:
                work()
            assert seen.bytes == moved
            assert sum(seen.counts.values()) == counted.get_total_counts() == (moved > 0)
    finally:
        torch.distributed.destroy_process_group()
