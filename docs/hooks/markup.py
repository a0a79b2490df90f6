"""Checks and changes of a page's HTML that need nothing but the text."""

from __future__ import annotations

import html
import re
import unicodedata

__all__ = ["breakable", "hatted", "literal_backticks"]

_APART = re.compile(r"<(pre|math|script|style)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_HEAD = re.compile(r"<th\b.*?</th>", re.DOTALL)
_WORD = re.compile(r"(?<=>)[^<]+")
_NAME = re.compile(r"(<code>)([^<]+)(</code>)")
_HAT = re.compile(
    r"<mover[^>]*>\s*<mi>(\w)</mi>\s*<mo[^>]*>(?:\^|&#x0005E;|&#x00302;)</mo>\s*</mover>"
)
_JOINT = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[._])(?=\w)")


def literal_backticks(text: str) -> list[str]:
    """The lines of a page that show a backtick to the reader.

    Markdown that was not understood as such.
    """
    lines = html.unescape(_TAG.sub("", _APART.sub("", text))).splitlines()
    return [line.strip() for line in lines if "`" in line]


def breakable(text: str) -> str:
    """Adds possible line breaks to the names in a table: in its head, and in cells with long names.

    Narrow screens need them: a table is as wide as its longest words.
    """

    def joints(match: re.Match[str]) -> str:
        return (
            match[1]
            + (_JOINT.sub("<wbr>", match[2]) if len(match[2]) > 12 else match[2])
            + match[3]
        )

    text = _HEAD.sub(
        lambda head: _WORD.sub(lambda word: _JOINT.sub("<wbr>", word[0]), head[0]), text
    )
    return _CELL.sub(lambda cell: _NAME.sub(joints, cell[0]), text)


def hatted(formula: str) -> str:
    """MathML with a letter and its hat as one character.

    Browsers without a font for formulas draw them on each other.
    """

    def letter(match: re.Match[str]) -> str:
        letter = unicodedata.normalize("NFC", match[1] + chr(0x302))
        return f'<mi style="font-style: italic">{letter}</mi>'

    return _HAT.sub(letter, formula)
