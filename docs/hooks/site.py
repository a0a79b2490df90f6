"""What the site needs beside the pages in docs/.

The pages of the root, files outside docs/, formulas, the search's order.

Links are written as GitHub follows them. Here those that leave docs/ are led to their page on the
site, or to a copy.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from markup import (
    breakable,
    hatted,
    literal_backticks,
)  # beside this file, which is where MkDocs looks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages of the root, and where they are on the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}

_LAST = {
    "report",
    "model_figures",
    "architecture",
    "contributing",
    "changelog",
}  # in the order of what a search finds
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages of the root."""
    for name, page in ROOT_PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """Leads links on, and tells the search which pages come first."""
    here = PurePosixPath(page.file.src_uri)
    # A guide explains what the reference, the tables of figures and the pages for contributors only
    # name.
    page.meta["search"] = {"boost": 0.3 if here.parts[0] == "api" or here.stem in _LAST else 2}
    origin = next(
        (ROOT / name for name, target in ROOT_PAGES.items() if target == str(here)),
        ROOT / "docs" / here,
    )

    def lead(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or ":" in target:
            return match[0]
        on_site = _on_site(origin, target, config, files)
        link = os.path.relpath(on_site, here.parent) + (f"#{anchor}" if anchor else "")
        return match[1] + link + match[3]

    parts = _CODE.split(markdown)
    return "".join(part if i % 2 else _LINK.sub(lead, part) for i, part in enumerate(parts))


def on_page_content(html_text: str, page: Page, **_: Any) -> str:
    """Formulas become MathML, and names in tables may be broken.

    A backtick that a reader would see is an error.
    """
    shown = literal_backticks(html_text)
    if shown:
        raise PluginError(f"{page.file.src_uri} shows literal backticks: {'; '.join(shown)}")
    return breakable(_FORMULA.sub(lambda match: _mathml(html.unescape(match[1])), html_text))


def _on_site(origin: Path, target: str, config: MkDocsConfig, files: Files) -> str:
    """Where the file that a page names is on the site.

    Files outside docs/ are copied there when first named.
    """
    path = (origin.parent / target).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        raise PluginError(f"{origin.relative_to(ROOT)}: the link {target} leads nowhere")
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    inside = path.relative_to(ROOT).as_posix()
    if inside in ROOT_PAGES:
        return ROOT_PAGES[inside]
    copy = f"source/{inside}"
    if files.get_file_from_path(copy) is None:
        files.append(File.generated(config, copy, content=path.read_bytes()))
    return copy


def _mathml(tex: str) -> str:
    formula = convert(tex.strip(), display="block")
    if "\\" in formula or "&amp;" in formula:
        raise PluginError(f"a formula has a command that is not understood: {tex}")
    return f'<div class="formula">{hatted(formula)}</div>'
