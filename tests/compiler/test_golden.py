"""The graphs and the sources of some row-wise functions, as files.

What changes them is to be read in a difference.

After a change that is meant, ``PYTHONPATH=.:tests/harness python tests/compiler/test_golden.py`` writes the files anew.
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
# Vectors and dropout, groups, parts and rows by index, numbers of rows that are returned; rows in
# three parts; long rows.
_NAMES = (
    "dropout_add_layer_norm",
    "adaptive_layer_norm_grouped",
    "norm_and_rotary",
    "cross_entropy",
    "dropout_add_layer_norm in three parts",
    "cross_entropy in tiles",
)


def _text(case: str) -> str:
    """The graph and the kernels, without the user's lines, which move."""
    name, _, how = case.partition(" in ")
    (sample,) = named(name)
    tensors = sample.tensors(torch.bfloat16)
    if how == "three parts":
        tensors = {name: t.repeat_interleave(16, -1) for name, t in tensors.items()}
    if how == "tiles":  # as long as rows in tiles are
        tensors = {
            name: t.repeat_interleave(512, -1) if t.is_floating_point() else t
            for name, t in tensors.items()
        }
    program = Rowwise(sample.function)._programs.find(list(tensors.values()), False).program
    outputs, wanted = list(range(program.count)), list(program.plan.differentiable)
    group, tiled = program.group, how == "tiles"
    kernels = forward_kernels(program.plan, program.acc, group=group, tiled=tiled, saves=True)
    kernels += backward_kernels(
        program.plan, program.acc, group=group, tiled=tiled, cotangents=outputs, wanted=wanted
    )
    intermediate = program.plan.intermediate_operand
    saved = [program.structure.inputs[place].name for place in program.plan.saved_inputs]
    saved += [intermediate.name] if intermediate is not None else []
    lines = [
        line.partition("  # line ")[0] for kernel in kernels for line in kernel.source.splitlines()
    ]
    return (
        "\n".join([program.structure.text(), "", f"saved: {', '.join(saved)}", "", *lines]) + "\n"
    )


def _file(case: str) -> Path:
    return _FILES / f"{case.replace(' ', '_')}.txt"


@pytest.mark.parametrize("name", _NAMES)
def test_graph_and_source(name: str) -> None:
    expected, result = _file(name).read_text(), _text(name)
    difference = difflib.unified_diff(
        expected.splitlines(), result.splitlines(), "expected", "found", lineterm=""
    )
    assert result == expected, "\n".join(difference)


if __name__ == "__main__":
    _FILES.mkdir(exist_ok=True)
    for golden in _NAMES:
        _file(golden).write_text(_text(golden))
