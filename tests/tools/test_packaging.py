"""The wheel, built as for a release and installed where this repository cannot be imported."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import fusedops
from pages import ROOT, links

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("build") is None, reason="the package `build` is missing"
)

# Folders in a checkout that are not part of the source.
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache"
)
_PACKAGE = ROOT / "fusedops"
_HOST = "https://example.org/someone/fusedops"


def _run(*command: object, cwd: Path, **settings: str) -> str:
    """The output of a command, run in an environment without the checkout."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    } | settings
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the archive and the wheel: ``--built``, or one built from the checkout."""
    built = pytestconfig.getoption("--built")
    if built is not None:
        return Path(built).resolve()
    folder = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, folder / "source", ignore=_LEFT_OUT)
    _run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        cwd=folder / "source",
        REPO_URL=_HOST,
        SITE_URL="",
    )
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (result,) = dist.glob("*.whl")
    return result


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with this wheel.

    PyTorch and all other packages are those of this process.
    """
    environment = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    interpreter = environment / "bin" / "python"
    _run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        interpreter,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=environment,
    )
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder, but reads no .pth file in it. So an editable installation
    # of this repository stays out.
    (site / "packages.pth").write_text("\n".join(packages))
    return interpreter


def _metadata(built: Path) -> Message:
    """The metadata of the wheel or the archive."""
    if built.suffix == ".whl":
        with zipfile.ZipFile(built) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return Parser().parsestr(archive.read(name).decode())
    with tarfile.open(built) as tar:
        (name,) = (n for n in tar.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO"))
        file = tar.extractfile(name)
        assert file is not None
        return Parser().parsestr(file.read().decode())


def _files_of_the_package() -> set[str]:
    """All modules, the mark of a typed package, and the tables of configs."""
    files = [*_PACKAGE.rglob("*.py"), _PACKAGE / "py.typed", *(_PACKAGE / "tuned").glob("*.json")]
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if ".dist-info/" not in name} == _files_of_the_package()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.startswith("fusedops/tuned/") for name in names)


def test_archive_holds_what_builds_and_tests_need(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names >= _files_of_the_package() | {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        "tests/conftest.py",
        "tests/harness/support.py",
        "benchmarks/__main__.py",
        "examples/train_lm.py",
        "docs/quickstart.md",
    }
    assert not [name for name in names if name.split("/")[0] in (".github", ".venv", "site")]


def test_metadata(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == fusedops.__version__
    assert set(metadata.get_all("Provides-Extra")) >= {"bench", "demo", "docs", "lint", "test"}
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split(">")[0] for line in needed} == {"einops", "torch", "triton"}


# --- the description on PyPI ----------------------------------------------------------------------


def _targets(page: str) -> list[str]:
    """The targets of a page's links and pictures, except anchors in the page itself."""
    results = [*links(page), *re.findall(r'\b(?:src|srcset|href)="([^"]*)"', page)]
    results += re.findall(r"^\[[^\]]+\]: *(\S+)", page, re.MULTILINE)
    return [target for target in results if not target.startswith("#")]


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_description_has_no_relative_link(kind: str, dist: Path) -> None:
    (built,) = dist.glob(kind)
    page = _metadata(built).get_payload()
    assert isinstance(page, str)
    assert "```python" in page
    assert not [target for target in _targets(page) if not re.match(r"https?://", target)]


def test_description_links_to_the_files_of_the_release(wheel: Path) -> None:
    """Its links are those of the README, at the tag of this version."""
    metadata = _metadata(wheel)
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    start = re.compile(
        rf"{re.escape(urls['Homepage'])}/(?:blob|raw)/v{re.escape(fusedops.__version__)}/([^#]+)"
    )
    results = {
        match[1]
        for target in _targets(str(metadata.get_payload()))
        if (match := start.match(target))
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert results == {target.partition("#")[0] for target in _targets(readme) if ":" not in target}
    assert all((ROOT / path).is_file() for path in results)


_README = """# A page
See [`glu`](docs/glu.md#a), [here](#here) and [there](https://example.org).
![A plot](plot.png)
<picture><source media="(prefers-color-scheme: dark)" srcset="dark.svg"><img src="light.svg"></picture>
<a href="docs/all.md">All</a>
```md
[code](code.md)
```
"""


def _described(base: str) -> str:
    spec = importlib.util.spec_from_file_location("fusedops_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.description(_README, base))


def test_description_with_an_address() -> None:
    text, tag = _described(_HOST), f"v{fusedops.__version__}"
    assert (
        f"[`glu`]({_HOST}/blob/{tag}/docs/glu.md#a), [here](#here) and [there](https://example.org)"
        in text
    )
    assert f"![A plot]({_HOST}/raw/{tag}/plot.png)" in text
    assert f'srcset="{_HOST}/raw/{tag}/dark.svg"' in text
    assert f'<img src="{_HOST}/raw/{tag}/light.svg">' in text
    assert f'<a href="{_HOST}/blob/{tag}/docs/all.md">All</a>' in text
    assert "[code](code.md)" in text


def test_description_without_an_address() -> None:
    """Links become text, and pictures are left out."""
    text = _described("")
    assert "See `glu`, [here](#here) and [there](https://example.org).\n" in text
    assert ">All</a>" in text
    assert "[code](code.md)" in text
    for absent in ("docs/", "plot", "picture", "light.svg", "\0"):
        assert absent not in text, absent


_PROBE = """
import sys
from pathlib import Path

import torch

import fusedops
from fusedops.core.launches import launch

assert Path(fusedops.__file__).is_relative_to(sys.prefix), fusedops.__file__
x, weight = torch.randn(4, 32, requires_grad=True), torch.rand(32)
with launch.record() as kernels:
    y = fusedops.bias_dropout_add_ln(x, None, None, weight, None, p=0.0)
    y.sum().backward()
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (32,), weight))
assert bool(kernels) == launch.interpreting()
assert isinstance(fusedops.nn.FusedLayerNorm(32), torch.nn.LayerNorm)
print(fusedops.__version__)
"""


def test_wheel_works_when_installed(python: Path, tmp_path: Path) -> None:
    assert _run(python, "-I", "-c", _PROBE, cwd=tmp_path).strip() == fusedops.__version__


@pytest.mark.parametrize(
    "command", [["fusedops"], ["python", "-I", "-m", "fusedops"]], ids=["script", "module"]
)
def test_command_runs(command: list[str], python: Path, tmp_path: Path) -> None:
    printed = _run(python.parent / command[0], *command[1:], "--version", cwd=tmp_path)
    assert fusedops.__version__ in printed
