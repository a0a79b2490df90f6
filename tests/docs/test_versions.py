"""pyproject.toml, CI and all pages agree with docs/versions.md on the supported versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusedops.doctor import ON_GPUS
from pages import PAGES, ROOT

_PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
_PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
_WORKFLOWS = ROOT / ".github" / "workflows"
_ROW = re.compile(
    r"^\| (Python|PyTorch|Triton|einops|Transformers) \| ([\d.]+)[^|]*\| ([\d., ]+) \|$",
    re.MULTILINE,
)
_PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
NEEDED = {name: needed for name, needed, _ in _ROW.findall(_PAGE)}
TESTED = {name: tested.split(", ") for name, _, tested in _ROW.findall(_PAGE)}
# Names of the packages on PyPI.
_PACKAGES = {
    "PyTorch": "torch",
    "Triton": "triton",
    "einops": "einops",
    "Transformers": "transformers",
}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _matrix(workflow: str, name: str) -> list[str]:
    """The versions that a workflow lists."""
    (result,) = re.findall(
        rf"^ +{name}: \[(.*)\]$", (_WORKFLOWS / workflow).read_text(encoding="utf-8"), re.MULTILINE
    )
    return re.findall(r'"([\d.]+)"', result)


def test_page_names_each_package_once() -> None:
    assert list(NEEDED) == ["Python", *_PACKAGES]
    assert all(_numbers(tested[0])[:2] >= _numbers(NEEDED[name]) for name, tested in TESTED.items())


@pytest.mark.parametrize("name", _PACKAGES)
def test_lower_bound_is_that_of_pyproject(name: str) -> None:
    bounds = re.findall(rf'"{_PACKAGES[name]}>=([\d.]+)', _PROJECT.partition("\ndocs = ")[0])
    extra = re.search(rf'^hf = \["{_PACKAGES[name]}>=([\d.]+)"\]', _PROJECT, re.MULTILINE)
    assert (extra[1] if extra else bounds[0]) == NEEDED[name]


@pytest.mark.parametrize("name", ["Triton", "einops", "Transformers"])
def test_pinned_version_is_tested(name: str) -> None:
    """Of a range, the highest version."""
    (pinned,) = re.findall(rf"^{_PACKAGES[name]}(?:>=[\d.]+,<|=)=([\d.]+)$", _PINS, re.MULTILINE)
    assert pinned in TESTED[name]


def test_ci_runs_the_tested_versions_of_python() -> None:
    classifiers = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', _PROJECT)
    assert TESTED["Python"] == classifiers == _matrix("ci.yml", "python-version")
    assert f'requires-python = ">={NEEDED["Python"]}"' in _PROJECT


def test_nightly_runs_the_tested_versions_of_transformers() -> None:
    assert TESTED["Transformers"] == _matrix("nightly.yml", "transformers")


def test_ci_runs_the_tested_versions_of_pytorch() -> None:
    """Changes run with the pinned minor release, nights with the oldest and the newest."""
    ((low, high),) = re.findall(r"^torch>=([\d.]+),<([\d.]+)$", _PINS, re.MULTILINE)
    nightly = (_WORKFLOWS / "nightly.yml").read_text(encoding="utf-8")
    oldest, newest = re.findall(r"^ +torch: ([\d.]+)$", nightly, re.MULTILINE)
    major, minor = _numbers(low)
    assert high == f"{major}.{minor + 1}"
    assert TESTED["PyTorch"] == [oldest, low, newest]
    assert _numbers(oldest)[:2] == _numbers(NEEDED["PyTorch"])


def test_versions_tested_on_gpus() -> None:
    """`fusedops doctor` and the quick start name the same ones."""
    rows = re.findall(r"^\| ([\d.]+) \| ([^|]+?) \| an NVIDIA", _PAGE, re.MULTILINE)
    assert rows == [ON_GPUS]
    start = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert f"on GPUs PyTorch {ON_GPUS[0]} with Triton {ON_GPUS[1]}, other releases on CPUs" in start


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_pages_agree(page: Path) -> None:
    """Sentences like "Python 3.10 or newer" and "needs torch 2.11 and Triton 3.6" are checked."""
    text = " ".join(page.read_text(encoding="utf-8").split())
    stated = re.findall(
        r"(Python|PyTorch|torch|Triton|Transformers) ([\d.]*\d),? or (?:newer|later)", text
    )
    for torch, triton in re.findall(
        r"needs (?:PyTorch|torch) ([\d.]*\d) and Triton ([\d.]*\d)", text
    ):
        stated += [("torch", torch), ("Triton", triton)]
    assert all(
        NEEDED["PyTorch" if name == "torch" else name] == version for name, version in stated
    ), stated
