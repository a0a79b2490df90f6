"""The command ``python -m benchmarks rowwise``.

Users' functions under `fusedops.rowwise`, and what else runs them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops

from . import results, timing
from .floors import floor_us

__all__ = ["FUNCTIONS", "Workload", "add_options", "run", "workloads"]

_RESULTS = Path(__file__).resolve().parent / "results"
_WIDTHS = (1536, 3072, 4096, 5120, 6144)
_ROWS, _BATCH, _HEADS, _VOCABULARY, _SCORES = 8192, 8, 32, 128_256, 1024
_P = 0.1


# --- functions ------------------------------------------------------------------------------------


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
) -> Tensor:
    """The end of a post-norm block."""
    return F.layer_norm(F.dropout(x + bias, _P) + residual, (x.shape[-1],), weight, shift, 1e-5)


def _by_hand(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    found: Tensor = fusedops.bias_dropout_add_ln(x, bias, residual, weight, shift, p=_P)
    return found


def adaptive_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Peebles and Xie 2023, arXiv:2212.09748: a diffusion transformer's norm."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def gated_residual_norm(
    x: Tensor, gamma: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """A gate, dropout, the sum and its RMSNorm; the sum is returned."""
    z = residual + gamma * F.dropout(F.silu(x), _P)
    return F.rms_norm(z, z.shape[-1:], weight, 1e-6), z


def layer_scale(
    x: Tensor, gamma: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Touvron et al. 2021, arXiv:2103.17239: a scaled branch, the sum and the next block's norm."""
    z = residual + gamma * x
    return F.layer_norm(z, z.shape[-1:], weight, shift), z


def norm_and_rotary(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """QK-norm and rotary embeddings (Su et al. 2021, arXiv:2104.09864) in halves."""
    q = F.rms_norm(q, q.shape[-1:], weight, 1e-6)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-second, first), -1) * sin


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Attention weights with dropout."""
    return F.dropout(torch.softmax(scores.masked_fill(mask, float("-inf")), -1), _P)


def swiglu_norm(packed: Tensor, weight: Tensor) -> Tensor:
    """Shazeer 2020, arXiv:2002.05202: a gated unit of packed halves, dropout and an RMSNorm."""
    gate, up = packed.chunk(2, -1)
    return F.rms_norm(F.dropout(F.silu(gate) * up, _P), up.shape[-1:], weight, 1e-6)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of each row."""
    return F.cross_entropy(logits, target, reduction="none")


# --- workloads ------------------------------------------------------------------------------------


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A function with tensors.

    Attributes:
        name: of the function.
        function: of tensors.
        shape: of its rows.
        tensors: the shapes of those that require a gradient, which come first.
        constants: the shapes of the others.
        moved: bytes that a forward and a backward must move at the least, each whole tensor once
            each way.
        by_hand: the library's own operator for it, if there is one.
        kind: what the constants are: "float", "mask", or "target" (places of columns).
    """

    name: str
    function: Callable[..., Any]
    shape: tuple[int, int]
    tensors: tuple[Shape, ...]
    moved: int
    constants: tuple[Shape, ...] = ()
    kind: str = "float"
    by_hand: Callable[..., Any] | None = None

    def made(self) -> tuple[Tensor, ...]:
        """Random tensors on the GPU, in bf16."""
        found = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for shape in self.tensors
        ]
        for shape in self.constants:
            if self.kind == "target":
                found.append(torch.randint(self.shape[1], shape, device="cuda"))
            else:
                values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                found.append(values > 1.0 if self.kind == "mask" else values)
        return tuple(found)


def workloads(names: Sequence[str] = ()) -> list[Workload]:
    """Those of the functions of these names; all of them for none."""
    return [workload for workload in _all() if not names or workload.name in names]


def _all() -> Iterator[Workload]:
    m, batch, heads = _ROWS, _BATCH, _HEADS
    for n in (4096, *[width for width in _WIDTHS if width != 4096]):
        # one: the bytes of a tensor of all rows in bf16.
        row, vector, one = (m, n), (n,), m * n * 2
        yield Workload(
            "dropout_add_layer_norm",
            dropout_add_layer_norm,
            row,
            (row, vector, row, vector, vector),
            7 * one,
            by_hand=_by_hand,
        )
        yield Workload(
            "adaptive_layer_norm",
            adaptive_layer_norm,
            row,
            ((batch, m // batch, n), (batch, 1, n), (batch, 1, n)),
            5 * one,
        )
        yield Workload(
            "gated_residual_norm", gated_residual_norm, row, (row, vector, row, vector), 10 * one
        )
        yield Workload(
            "layer_scale", layer_scale, row, (row, vector, row, vector, vector), 10 * one
        )
        yield Workload("swiglu_norm", swiglu_norm, row, ((m, 2 * n), vector), 8 * one)
    positions, scores = (m // batch, 1, 128), (4 * m, _SCORES)
    yield Workload(
        "norm_and_rotary",
        norm_and_rotary,
        (m * heads, 128),
        ((batch, m // batch, heads, 128), (128,)),
        5 * m * heads * 128 * 2,
        (positions, positions),
    )
    yield Workload(
        "masked_softmax",
        masked_softmax,
        scores,
        (scores,),
        5 * math.prod(scores) * 2,
        ((1, _SCORES),),
        "mask",
    )
    yield Workload(
        "cross_entropy",
        cross_entropy,
        (m, _VOCABULARY),
        ((m, _VOCABULARY),),
        3 * m * _VOCABULARY * 2,
        ((m,),),
        "target",
    )


FUNCTIONS = tuple(dict.fromkeys(workload.name for workload in _all()))


# --- providers ------------------------------------------------------------------------------------


def _providers(workload: Workload) -> dict[str, Callable[..., Any]]:
    """The callables that run a function, by provider."""
    function = workload.function
    found: dict[str, Callable[..., Any]] = {"rowwise": fusedops.rowwise(function, strict=True)}
    if workload.by_hand is not None:
        found["by_hand"] = workload.by_hand
    found["eager"] = function
    found["compile"] = torch.compile(function, fullgraph=True, dynamic=False)
    found["compile_max_autotune"] = torch.compile(
        function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs"
    )
    return found


def _step(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> timing.Train:
    """A forward and a backward, with random cotangents."""
    inputs = tuple([t for t in tensors if t.requires_grad])
    outputs = call(*tensors)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    cotangents = tuple([torch.randn_like(out) for out in outputs])
    named = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    return timing.Train(lambda **given: call(*given.values()), named, inputs, cotangents)


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "--function", action="append", choices=FUNCTIONS, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--provider", action="append", metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--cols",
        action="append",
        type=int,
        metavar="N",
        help="only this row length; may be repeated",
    )
    parser.add_argument(
        "--output", type=Path, metavar="CSV", help="default: results/rowwise_<device>.csv"
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the results file"
    )


def run(options: argparse.Namespace) -> int:
    """Measures users' functions: under `fusedops.rowwise`, by hand, in eager PyTorch, and by torch.compile."""
    if options.table:
        path = options.output or _RESULTS / "rowwise_nvidia_h200.csv"
        print(_table(results.read(path)))
        return 0
    if not torch.cuda.is_available():
        print("rowwise: needs a GPU; without one nothing is timed", file=sys.stderr)
        return 2
    from .runner import this_machine

    name, machine = this_machine()
    path = options.output or _RESULTS / f"rowwise_{results.device_slug(name)}.csv"
    print(f"{machine.described(name)}; results to {path}", flush=True)
    rows: list[results.Row] = []
    for workload in workloads(options.function or ()):
        if options.cols and workload.shape[1] not in options.cols:
            continue
        print(f"{workload.name} {'x'.join(map(str, workload.shape))}", flush=True)
        new = _measured(workload, options.provider, machine)
        rows += new
        results.write(path, new)
        torch.cuda.empty_cache()
    print(_table(rows))
    return 0


def _measured(workload: Workload, wanted: Sequence[str] | None, machine: Any) -> list[results.Row]:
    torch.compiler.reset()
    made = workload.made()
    size = sum(t.numel() * t.element_size() for t in made)
    sets = [made, *[workload.made() for _ in range(timing.set_count(size, machine.l2_bytes) - 1)]]
    rows = []
    for provider, call in _providers(workload).items():
        if wanted and provider not in wanted:
            continue
        steps = [_step(call, tensors) for tensors in sets]
        gpu = timing.gpu_us(steps, timing.Effort())
        peak = timing.peak_mib(steps[0])
        rows.append(
            results.Row(
                workload.name,
                "x".join(map(str, workload.shape)),
                "bfloat16",
                "fwd_bwd",
                provider,
                gpu,
                math.nan,
                floor_us(workload.moved, machine.bandwidth),
                peak,
                machine.commit,
                machine.torch,
                machine.triton,
            )
        )
        print(
            f"  {provider:22} {gpu:9.1f} us  {rows[-1].fraction:.2f} of the floor  {peak:8.0f} MiB",
            flush=True,
        )
        del steps
    return rows


def _table(rows: Sequence[results.Row]) -> str:
    """One line a function and shape, with the times of all, and how rowwise compares."""
    lines = []
    for op, shape in dict.fromkeys((row.op, row.shape) for row in rows):
        times = {row.provider: row for row in rows if (row.op, row.shape) == (op, shape)}
        found = [f"{name} {row.gpu_us:.1f}" for name, row in times.items()]
        ours = times.get("rowwise")
        compiled = [row.gpu_us for name, row in times.items() if name.startswith("compile")]
        if ours is not None:
            found.append(f"{ours.fraction:.2f} of the floor")
            found += [f"{min(compiled) / ours.gpu_us:.2f} x torch.compile"] if compiled else []
            found += (
                [f"{ours.gpu_us / times['by_hand'].gpu_us:.2f} of by hand"]
                if "by_hand" in times
                else []
            )
        lines.append(f"{op:24} {shape:14} {', '.join(found)}")
    return "\n".join(lines)
