"""The examples that train a model in two forms run, and both forms learn the same."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.plain


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("recommender", "--tables 9 --rows 20 --batch 8 --hidden 8 --steps 4"),
        ("dit_block", "--layers 1 --batch 2 --tokens 4 --hidden 16 --heads 2 --steps 4"),
    ],
)
def test_example_has_the_same_losses_in_both_forms(name, sizes, monkeypatch, capsys):
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--device", "cpu", *sizes.split()])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    difference = re.search(r"largest difference .*: (\S+)\n", capsys.readouterr().out)
    assert difference is not None
    # Some units in the last place of losses about 1.
    assert float(difference[1]) < 1e-5
