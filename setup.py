"""What pyproject.toml cannot say.

The addresses of a release, and a long description whose links lead there.

The repository does not know where it is hosted. REPO_URL and SITE_URL say so, as for the site
(mkdocs.yml); CI sets them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent

_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_RELATIVE = r"(?![a-z][a-z+.-]*:|[#/])"
_LINK = re.compile(rf"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\({_RELATIVE}([^)\s]+)\)")
_ATTRIBUTE = re.compile(rf'\b(src|srcset|href)="{_RELATIVE}([^"]+)"')
_PICTURE = re.compile(r"<picture>.*?</picture>|<img\b[^>]*>", re.DOTALL)


def description(text: str, base: str) -> str:
    """A Markdown page as PyPI can show it: links to files of the repository lead to ``base``.

    Without a base the links become plain text, and pictures are left out.
    """
    parts = _CODE.split(text)
    # A link's text may hold code, so the code between is put back before links are looked for, as a
    # placeholder.
    held = parts[1::2]
    text = "".join(part if i % 2 == 0 else f"\0{i // 2}\0" for i, part in enumerate(parts))
    if base:
        text = _LINK.sub(
            lambda m: f"{m[1]}[{m[2]}]({_address(base, m[3], picture=bool(m[1]))})", text
        )
        text = _ATTRIBUTE.sub(
            lambda m: f'{m[1]}="{_address(base, m[2], picture=m[1] != "href")}"', text
        )
    else:
        text = _PICTURE.sub("", text)
        text = _LINK.sub(lambda m: "" if m[1] else m[2], text)
        text = _ATTRIBUTE.sub("", text)
    return re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], text)


def _address(base: str, target: str, *, picture: bool) -> str:
    return f"{base}/{'raw' if picture else 'blob'}/v{_version()}/{target}"


def _version() -> str:
    found = re.search(
        r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    return found[1]


def addresses(base: str, site: str) -> dict[str, str]:
    """The project's addresses, as PyPI lists them."""
    if not base:
        return {}
    return {
        "Homepage": base,
        "Documentation": site or f"{base}/tree/v{_version()}/docs",
        "Changelog": f"{base}/blob/v{_version()}/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


if __name__ == "__main__":
    base, site = (os.environ.get(name, "").rstrip("/") for name in ("REPO_URL", "SITE_URL"))
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), base),
        long_description_content_type="text/markdown",
        project_urls=addresses(base, site),
    )
