"""Imports go one way: face, families, core. Importing the package does no heavy work."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusedops

PACKAGE = Path(fusedops.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# core stands below the families, the families below all else.
CORE, FAMILY, FACE = 0, 1, 2


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in FILES}


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, inside functions too."""
    package = _name(path) if path.name == "__init__.py" else _name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                # ``from . import ops`` names a module, ``from .ops import layer_norm`` something within one.
                inner = f"{source}.{alias.name}"
                yield inner if inner in MODULES else source


def _families() -> set[str]:
    """The folders with kernels; `models` has none, and stands above them."""
    return {path.parent.name for path in FILES if path.name == "kernels.py" and path.parent.name != "core"}


def _layer(name: str) -> int:
    parts = name.split(".")
    if len(parts) > 1 and parts[1] == "core":
        return CORE
    return FAMILY if len(parts) > 1 and parts[1] in _families() else FACE


def test_the_package_has_the_rooms() -> None:
    assert {"norms", "activations"} <= _families()
    assert {"fusedops.core.launch", "fusedops.core.device", "fusedops.norms.kernels"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name: str) -> None:
    for target in _imports(MODULES[name]):
        if not target.startswith("fusedops"):
            continue
        assert target in MODULES, f"{name} imports {target}, which is no module"
        assert _layer(target) <= _layer(name), f"{name} imports {target}, which stands above it"
        if _layer(name) == _layer(target) == FAMILY:
            assert name.split(".")[1] == target.split(".")[1], f"{name} imports {target}, of another family"


@pytest.mark.parametrize("name", [name for name in MODULES if name.endswith((".kernels", "core.device"))])
def test_kernels_know_only_triton(name: str) -> None:
    for target in _imports(MODULES[name]):
        assert target.split(".")[0] in ("triton", "__future__") or target == "fusedops.core.device", target


@pytest.mark.parametrize("name", [name for name in MODULES if name.endswith(".reference")])
def test_the_reference_knows_only_torch(name: str) -> None:
    for target in _imports(MODULES[name]):
        assert target.split(".")[0] != "triton" and not target.startswith("fusedops"), target


# What runs as a command, or in a process of its own, and is imported by nothing else.
COMMANDS = ("fusedops.tune", "fusedops.doctor", "fusedops.__main__")


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(COMMANDS)])
def test_nobody_imports_the_commands(name: str) -> None:
    for other, path in MODULES.items():
        if not other.startswith(COMMANDS):
            assert name not in set(_imports(path)), f"{other} imports {name}"


@pytest.mark.parametrize("name", [name for name in MODULES if name.endswith(".spec")])
def test_nobody_imports_the_specs(name: str) -> None:
    """Samples and bad samples are for tests, benchmarks and commands; a user's import does not pay for them."""
    for other, path in MODULES.items():
        if not other.endswith(".spec") and not other.startswith(COMMANDS):
            assert name not in set(_imports(path)), f"{other} imports {name}"


_PROBE = """
import os, sys
import torch  # what torch itself reads and loads is its own affair
seen = []
_torch_loads_triton = "triton" in sys.modules

class Watched(dict):
    def __getitem__(self, key): seen.append(key); return super().__getitem__(key)
    def get(self, key, default=None): seen.append(key); return super().get(key, default)
    def __contains__(self, key): seen.append(key); return super().__contains__(key)

environment = os.environ
os.environ = Watched(environment)
os.getenv = lambda key, default=None: seen.append(key) or environment.get(key, default)
import fusedops
os.environ = environment
assert _torch_loads_triton or "triton" not in sys.modules, "triton was imported"
assert "transformers" not in sys.modules, "transformers was imported"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert not seen, f"the environment was read: {seen}"
heavy = [name for name in sys.modules if name.startswith(("fusedops.tune", "fusedops.doctor")) or name.endswith(".spec")
         and name.startswith("fusedops")]
assert not heavy, f"imported: {heavy}"
assert fusedops.nn.FusedLayerNorm
"""


@pytest.mark.parametrize("interpret", ["", "1"])
def test_importing_is_light(interpret: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    if not interpret:
        del environment["TRITON_INTERPRET"]
    done = subprocess.run([sys.executable, "-c", _PROBE], env=environment, cwd=PACKAGE.parent, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_face_is_what_it_says() -> None:
    assert set(fusedops.__all__) >= {"layer_norm", "rms_norm", "bias_dropout_add", "bias_dropout_add_ln",
                                     "bias_dropout_add_rms_norm", "gelu", "bias_gelu", "bias_act", "geglu", "swiglu",
                                     "glu", "__version__"}  # fmt: skip
    for face in (fusedops, fusedops.nn):
        for name in face.__all__:
            assert getattr(face, name) is not None
            assert name == "__version__" or getattr(face, name).__doc__, f"{name} has no docstring"
