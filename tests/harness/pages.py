"""The documentation as its tests read it.

Code blocks, commands, links and headings of each Markdown page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(
    r"^( *)(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n`]*\n(.*?)^ *\2[ \t]*$", re.MULTILINE | re.DOTALL
)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: the page's line on which its first line stands, its language, its text without indentation."""

    line: int
    language: str
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Every fenced block, also within lists and other containers."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield Block(line, match[3], re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE))


def spans(text: str) -> list[str]:
    """The inline code outside of blocks."""
    return _SPAN.findall(_FENCE.sub("", text))


def links(text: str) -> list[str]:
    """The targets of all links and pictures, outside of code."""
    return _LINK.findall(_SPAN.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    results: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(known == slug or known.startswith(f"{slug}-") for known in results)
        results.add(f"{slug}-{number}" if slug in results else slug)
    return results
