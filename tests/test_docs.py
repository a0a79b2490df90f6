"""Every Python example in the documentation runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if page.exists()]
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks() -> list[object]:
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            blocks.append(pytest.param(page, line, match.group(1), id=f"{page.name}:{line}"))
    return blocks


def test_there_are_examples() -> None:
    assert (ROOT / "README.md").exists()
    assert _blocks(), "no page has a Python example"


@pytest.mark.parametrize(("page", "line", "source"), _blocks())
def test_example_runs(page: Path, line: int, source: str, device: torch.device,
                      monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    """In a namespace of its own, on the device at hand: an example may not lean on the one before it."""
    monkeypatch.chdir(tmp_path)
    # Blank lines in front make a traceback name the page's own line.
    code = compile("\n" * (line - 1) + source, str(page), "exec")
    with torch.random.fork_rng(), torch.device(device):
        exec(code, {"__name__": f"example_{page.stem}_{line}"})
