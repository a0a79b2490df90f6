"""Checks and changes of a page's HTML; all functions take and return text."""

from __future__ import annotations

import html
import re
import unicodedata

__all__ = ["breakable", "hatted", "literal_backticks"]

_VERBATIM = re.compile(r"<(pre|math|script|style)\b.*?</\1>", re.DOTALL)
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
    """Return the lines of a page on which the reader would see a backtick.

    They contain Markdown that the parser did not recognise.
    """
    lines = html.unescape(_TAG.sub("", _VERBATIM.sub("", text))).splitlines()
    return [line.strip() for line in lines if "`" in line]


def breakable(text: str) -> str:
    """Return the HTML with possible line breaks in the names of tables.

    They are in the words of a table's head, and in its cells in names of more than 12 characters.
    Narrow screens need them: a table is as wide as its longest words. A number and its spread stay
    on one line.
    """

    def broken_word(word: re.Match[str]) -> str:
        return _JOINT.sub("<wbr>", word[0])

    def broken_name(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if len(name) > 12:
            name = _JOINT.sub("<wbr>", name)
        return opening + name + closing

    text = _HEAD.sub(lambda head: _WORD.sub(broken_word, head[0]), text)
    text = _CELL.sub(lambda cell: cell[0].replace(" ± ", "&nbsp;±&nbsp;"), text)
    return _CELL.sub(lambda cell: _NAME.sub(broken_name, cell[0]), text)


def hatted(formula: str) -> str:
    """Return MathML in which a letter and its hat are one character.

    Browsers without a font for formulas would draw the hat over the letter.
    """

    def one_character(match: re.Match[str]) -> str:
        combining_hat = chr(0x302)
        letter = unicodedata.normalize("NFC", match[1] + combining_hat)
        return f'<mi style="font-style: italic">{letter}</mi>'

    return _HAT.sub(one_character, formula)
