"""Parses the Markdown pages of the documentation: code blocks, inline code, links and anchors."""

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
    """A fenced code block.

    Attributes:
        line: the line number, in the page, of the first line of the text.
        language: the language, or an empty text.
        text: the text, without the indentation of the block.
    """

    line: int
    language: str
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Yields every fenced block, also those within lists and other containers."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield Block(line, match[3], re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE))


def spans(text: str) -> list[str]:
    """Returns the inline code outside of fenced blocks."""
    return _SPAN.findall(_FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Returns the targets of all links and pictures outside of code."""
    return _LINK.findall(_SPAN.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub generates for the headings of a page."""
    results: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(anchor == slug or anchor.startswith(f"{slug}-") for anchor in results)
        results.add(f"{slug}-{number}" if slug in results else slug)
    return results
