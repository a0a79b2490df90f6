"""Compares the graphs and kernel sources of some row-wise functions with golden files.

So a change of generated code shows as a diff. After an intended change, write the files again by
``PYTHONPATH=.:tests/harness python tests/compiler/test_golden.py``.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import torch

from fusedops.compiler.codegen import backward_kernels, forward_kernels
from fusedops.compiler.function import Rowwise
from rowwise_functions import named

pytestmark = pytest.mark.once

_FILES = Path(__file__).parent / "golden"
# In this order: vectors and dropout; groups; parts of a row and rows by index; one number of each
# row as output; rows in three parts; long rows in tiles.
_NAMES = (
    "dropout_add_layer_norm",
    "adaptive_layer_norm_grouped",
    "norm_and_rotary",
    "cross_entropy",
    "dropout_add_layer_norm in three parts",
    "cross_entropy in tiles",
)


def _text(case: str) -> str:
    """The graph and the kernels, without the comments with line numbers of the user's code."""
    name, _, layout = case.partition(" in ")
    (sample,) = named(name)
    tensors = sample.tensors(torch.bfloat16)
    if layout == "three parts":
        tensors = {name: t.repeat_interleave(16, -1) for name, t in tensors.items()}
    if layout == "tiles":  # wide enough for the kernels of long rows
        tensors = {
            name: t.repeat_interleave(512, -1) if t.is_floating_point() else t
            for name, t in tensors.items()
        }
    program = (
        Rowwise(sample.function)._programs.find(list(tensors.values()), autocast=False).program
    )
    outputs, wanted = list(range(program.count)), list(program.plan.differentiable)
    group, tiled = program.group, layout == "tiles"
    kernels = forward_kernels(program.plan, program.acc, group=group, tiled=tiled, saves=True)
    kernels += backward_kernels(
        program.plan, program.acc, group=group, tiled=tiled, cotangents=outputs, wanted=wanted
    )
    intermediate = program.plan.intermediate_operand
    saved = [program.structure.inputs[index].name for index in program.plan.saved_inputs]
    saved += [intermediate.name] if intermediate is not None else []
    lines = [
        line.partition("  # line ")[0] for kernel in kernels for line in kernel.source.splitlines()
    ]
    text = [program.structure.text(), "", f"saved: {', '.join(saved)}", "", *lines]
    return "\n".join(text) + "\n"


def _file(case: str) -> Path:
    return _FILES / f"{case.replace(' ', '_')}.txt"


@pytest.mark.parametrize("name", _NAMES)
def test_graph_and_source_are_those_of_the_golden_file(name: str) -> None:
    expected, result = _file(name).read_text(), _text(name)
    difference = difflib.unified_diff(
        expected.splitlines(), result.splitlines(), "expected", "actual", lineterm=""
    )
    assert result == expected, "\n".join(difference)


if __name__ == "__main__":
    _FILES.mkdir(exist_ok=True)
    for golden in _NAMES:
        _file(golden).write_text(_text(golden))
