"""What users install: a wheel built as a release builds it, and installed where there is nothing of this repository."""

from __future__ import annotations

import importlib.util
import os
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
from pages import ROOT

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="the package `build` is missing"),
]

# Not part of the source: what others make in a checkout.
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache")
_PACKAGE = ROOT / "fusedops"


def _run(*command: object, cwd: Path) -> str:
    """What a command prints, run in an environment that does not know the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the archive and the wheel: those of ``--built``, else built from a copy of the checkout."""
    given = pytestconfig.getoption("--built")
    if given is not None:
        return Path(given).resolve()
    place = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, place / "source", ignore=_LEFT_OUT)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", cwd=place / "source")
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with this wheel alone; torch and the rest are lent by ours."""
    place = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    interpreter = place / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel, cwd=place)
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = place.glob("lib/python*/site-packages")
    # Such a line adds a folder and reads no .pth file in it: an editable installation of ours stays out.
    (site / "lent.pth").write_text("\n".join(lent))
    return interpreter


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _files_of_the_package() -> set[str]:
    """All modules, the mark of a typed package, and the tables of configs."""
    files = [*_PACKAGE.rglob("*.py"), _PACKAGE / "py.typed", *(_PACKAGE / "tuned").glob("*.json")]
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if ".dist-info/" not in name} == _files_of_the_package()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.startswith("fusedops/tuned/") for name in names)


def test_the_archive_holds_all_to_build_from(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names >= _files_of_the_package() | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert not [name for name in names if name.split("/")[0] in ("tests", "benchmarks", ".github", ".venv")]


def test_metadata(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == fusedops.__version__
    assert set(metadata.get_all("Provides-Extra")) >= {"bench", "demo", "docs", "lint", "test"}
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split(">")[0] for line in needed} == {"torch", "triton"}


_PROBE = """
import sys
from pathlib import Path

import torch

import fusedops
from fusedops.core import launch

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


def test_it_works_where_it_is_installed(python: Path, tmp_path: Path) -> None:
    assert _run(python, "-I", "-c", _PROBE, cwd=tmp_path).strip() == fusedops.__version__


@pytest.mark.parametrize("command", [["fusedops"], ["python", "-I", "-m", "fusedops"]], ids=["script", "module"])
def test_its_command_runs(command: list[str], python: Path, tmp_path: Path) -> None:
    printed = _run(python.parent / command[0], *command[1:], "--version", cwd=tmp_path)
    assert fusedops.__version__ in printed
