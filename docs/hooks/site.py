"""Hooks of MkDocs: add pages from the root of the repository, and adapt links and formulas.

Links in the pages are written for GitHub. On the site, a link to a file outside docs/ leads to the
file's page, or to a copy of the file. The hooks also set the order of search results.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert

# MkDocs puts the folder of this file on the path.
from markup import breakable, hatted, literal_backticks
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
    "SECURITY.md": "security.md",
}

# Pages that come last in the results of a search.
_LAST = {"report", "model_figures", "architecture", "contributing", "changelog"}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages of the repository's root."""
    for name, page in ROOT_PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """Returns the page with links for the site, and sets its weight in searches."""
    here = PurePosixPath(page.file.src_uri)
    # Guides come before the API reference, the tables of figures and the pages for contributors.
    is_last = here.parts[0] == "api" or here.stem in _LAST
    page.meta["search"] = {"boost": 0.3 if is_last else 2}
    origin = ROOT / "docs" / here
    for name, target in ROOT_PAGES.items():
        if target == str(here):
            origin = ROOT / name

    def on_site(match: re.Match[str]) -> str:
        opening, link, closing = match.groups()
        target, _, anchor = link.partition("#")
        is_file = target and ":" not in target
        if not is_file:
            return match[0]
        link = os.path.relpath(_on_site(origin, target, config, files), here.parent)
        if anchor:
            link += f"#{anchor}"
        return opening + link + closing

    # Even indices are text between pieces of code, odd indices the code.
    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(on_site, text) for text in parts[::2]]
    return "".join(parts)


def on_page_content(html_text: str, page: Page, **_: Any) -> str:
    """Returns the page with formulas as MathML, and line breaks allowed in the names of tables.

    Raises an error if a reader would see a backtick.
    """
    shown = literal_backticks(html_text)
    if shown:
        raise PluginError(f"{page.file.src_uri} shows literal backticks: {'; '.join(shown)}")
    return breakable(_FORMULA.sub(lambda match: _mathml(html.unescape(match[1])), html_text))


def _on_site(origin: Path, target: str, config: MkDocsConfig, files: Files) -> str:
    """Return the path on the site of the file to which a page links.

    A file outside docs/ is copied to the site at its first link.
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
    """Return the HTML of a formula."""
    formula = convert(tex.strip(), display="block")
    if "\\" in formula or "&amp;" in formula:
        raise PluginError(f"a formula has a command that is not understood: {tex}")
    return f'<div class="formula">{hatted(formula)}</div>'
