"""``python -m fusedops.tune.regions``: times regions for its parent process, one per line.

A region comes as JSON, as `backend.measuring` writes it. It is run as an operator, and as what
Inductor compiles its nodes to, by replays of a CUDA graph with several calls. Sets of inputs
together exceed the L2, so that no call has its inputs in it; of a large region one set is enough,
and the memory is that of one call. The process exits when its input ends, so that it does not
outlive its parent.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any, TextIO

import torch
from torch import Tensor, fx

from ..backend import storing
from ..backend.programs import Source
from ..backend.replacing import call_operator, results_of
from ..core.children import send
from .timing import replay, set_count

__all__ = ["functions", "inputs", "operator_of", "serve", "step", "times"]

# What the forward or a whole step of a region is: it returns all results.
Call = Callable[..., Sequence[Tensor]]
# A region, in the types of JSON: see `backend.measuring`.
Task = Mapping[str, Any]

# The least number of calls in a graph, so that the gap before the graph counts little.
_CALLS = 16
# The milliseconds for replays of a graph, and their least number: to warm up, and measured.
_WARM_UP, _MEASURED = (10.0, 3), (50.0, 7)
# Inductor's kernels are what they are under ``max-autotune``, the mode in which regions are
# measured. CUDA graphs are captured here.
_MODE = "max-autotune-no-cudagraphs"


def serve(requests: TextIO, replies: TextIO) -> None:
    """Reply to each region with its seconds both ways, or with an error."""
    for line in requests:
        try:
            reply: dict[str, Any] = {"seconds": times(json.loads(line))}
        # Whatever is raised, the parent continues: it predicts the times.
        except Exception as error:  # noqa: BLE001
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        send(reply, replies)


def times(task: Task) -> list[float]:
    """Return the seconds of a call, or of a forward and a backward if a gradient is wanted.

    The first number is the operator's, the second Inductor's.
    """
    device = torch.device("cuda", task["device"])
    torch.cuda.set_device(device)
    source = storing.source_in(task["program"])
    torch.compiler.reset()
    operator, nodes = functions(source, task, device)
    compiled = torch.compile(nodes, fullgraph=True, dynamic=False, mode=_MODE)
    seconds = []
    for call in (operator, compiled):
        seconds.append(_seconds(call, source, task, device))
        # Of one way, nothing is in memory while the other is timed.
        gc.collect()
        torch.cuda.empty_cache()
    return seconds


def functions(
    source: Source, task: Task, device: torch.device
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a region as an operator and as its own nodes, for tensors as from `inputs`."""
    operator = operator_of(source, task["wanted"], device)
    return operator, _nodes_of(source, task["received"])


def operator_of(source: Source, wanted: Sequence[bool], device: torch.device) -> fx.GraphModule:
    """Return a graph that calls the operator of a region, and returns the program's outputs.

    Args:
        source: the source of its program.
        wanted: whether each tensor has a gradient.
        device: their device.
    """
    graph, program = fx.Graph(), source.program
    nodes = [graph.placeholder(name) for name in program.tensors]
    for node in nodes:
        node.meta["val"] = torch.empty((), device=device)
    call = call_operator(graph, program, nodes, nodes, program.dtypes, wanted)
    graph.output(tuple(results_of(graph, call, 0, program.count)))
    for node in graph.nodes:
        node.meta.clear()
    return fx.GraphModule(torch.nn.Module(), graph)


def _nodes_of(source: Source, received: Sequence[bool]) -> fx.GraphModule:
    """Return a graph of the region's own nodes, with the outputs of `operator_of`.

    An output that receives no gradient is detached: its backward is not computed.
    """
    graph, numbers = fx.Graph(), source.output_numbers
    results: Any = graph.graph_copy(source.graph, {})
    outputs = []
    for number, is_received in enumerate(received):
        output = results[numbers.index(number)]
        if not is_received:
            output = graph.call_function(torch.ops.aten.detach.default, (output,))
        outputs.append(output)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph, "region")


def inputs(source: Source, task: Task, device: torch.device) -> list[Tensor]:
    """Return random tensors with the shapes and strides of a region's; integers are zeros."""
    parts = zip(source.program.dtypes, task["shapes"], task["strides"], task["wanted"], strict=True)
    return [_input(*part, device) for part in parts]


def _input(
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    is_wanted: bool,
    device: torch.device,
) -> Tensor:
    # Elements of an expanded tensor share memory, into which only a plain tensor can be written.
    last = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    memory = torch.zeros(max(0, 1 + sum(last)), dtype=dtype, device=device)
    if dtype.is_floating_point:
        # Not in the dtype itself: PyTorch draws no numbers of 8 bits.
        memory.copy_(torch.randn(memory.shape, device=device))
    return memory.as_strided(shape, strides).requires_grad_(is_wanted)


def step(call: Call, tensors: Sequence[Tensor], received: Sequence[bool]) -> Callable[[], Any]:
    """Return a function that runs a forward, and a backward to the tensors that want a gradient."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted:
        return lambda: call(*tensors)

    def differentiable(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [output for output in compress(outputs, received) if output.requires_grad]

    cotangents = [torch.randn_like(output) for output in differentiable(call(*tensors))]

    def run() -> Any:
        outputs = call(*tensors)
        results = differentiable(outputs)
        return outputs, torch.autograd.grad(results, wanted, cotangents, allow_unused=True)

    return run


def _seconds(call: Call, source: Source, task: Task, device: torch.device) -> float:
    tensors = inputs(source, task, device)
    properties = torch.cuda.get_device_properties(device)
    bytes_of_call = sum([tensor.nbytes for tensor in tensors])
    count = set_count(bytes_of_call, properties.L2_cache_size, least=1)
    sets = [tensors, *[inputs(source, task, device) for _ in range(count - 1)]]
    with nullcontext() if any(task["wanted"]) else torch.no_grad():
        steps = [step(call, of_set, task["received"]) for of_set in sets]
        rounds = math.ceil(_CALLS / count)
        graph = _captured(steps, rounds)
        replay(graph, *_WARM_UP)
        return replay(graph, *_MEASURED) * 1e-3 / (rounds * count)


def _captured(steps: Sequence[Callable[[], Any]], rounds: int) -> torch.cuda.CUDAGraph:
    """Return a graph with some rounds of all steps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Kernels are loaded and tuned before, as a capture must not do that.
    with torch.cuda.stream(stream):
        for run in steps[:3]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            # The outputs must exist until the round ends. Otherwise all would have the same
            # address, and be overwritten in the L2 before they are written to memory.
            outputs = [run() for run in steps]
            del outputs
    return graph


if __name__ == "__main__":
    replies = sys.stdout
    # Other prints go to standard error: the parent would not show them among the replies.
    sys.stdout = sys.stderr
    serve(sys.stdin, replies)
    # Not `sys.exit`, which would wait for Inductor's processes.
    os._exit(0)
