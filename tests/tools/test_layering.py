"""Rules for imports, private names and arguments of all files of the package.

The layers are, from the top: API; models; the compile backend; families; compiler; core. Each
imports only itself and those below it, and importing the package does no heavy work. Only
``core/compat/`` and two files of the backend use private names of PyTorch and Triton. Functions
take few arguments.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusedops
from fusedops.losses import registration
from support import EVERY_SPEC

PACKAGE = Path(fusedops.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Each layer imports only itself and those before it.
CORE, COMPILER, FAMILY, BACKEND, MODEL, API = range(6)
# Layers of several folders that do not import one another.
SEPARATE = (FAMILY,)


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in FILES}
# "fusedops.tune", and "fusedops." with a name to be appended; not "fusedops.core" or "fusedops: a
# message".
_ABOVE_CORE = re.compile(r"\bfusedops\.(?!core\b)")


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, also in functions and by `import_module`."""
    package = _name(path) if path.name == "__init__.py" else _name(path).rpartition(".")[0]
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and _called(node) in ("import_module", "__import__")
        ):
            name, parent = node.args[0], package.split(".")
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                dots = len(name.value) - len(name.value.lstrip("."))
                yield (
                    ".".join([*parent[: len(parent) - dots + 1], name.value.lstrip(".")])
                    if dots
                    else name.value
                )
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                # ``from . import ops`` names a module, ``from .ops import layer_norm`` a function.
                inner = f"{source}.{alias.name}"
                yield inner if inner in MODULES else source


def _called(node: ast.Call) -> str:
    """The last part of a called function's name."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _families() -> set[str]:
    """The folders with kernels, in a file or a package, except core and the compiler."""
    with_kernels = {name.split(".")[1] for name in MODULES if name.endswith(".kernels")}
    return with_kernels - {"core", "compiler"}


def _has_kernels(name: str) -> bool:
    """Whether a module is a file of kernels, or one of a package of kernels."""
    return "kernels" in name.split(".")


# The layer of each file of ``distributed/``: that of its callers. "" is the public package.
_DISTRIBUTED = {
    "": API,
    "seeds": API,
    "sharding": CORE,
    "conversion": CORE,
    "modules": CORE,
    "norms": FAMILY,
    "losses": FAMILY,
    "sequence": MODEL,
}


def _layer(name: str) -> int:
    parts = name.split(".")
    if parts[1:2] == ["distributed"]:
        return _DISTRIBUTED[parts[2] if len(parts) > 2 else ""]
    folder = parts[1] if len(parts) > 1 else ""
    layers = {"core": CORE, "compiler": COMPILER, "models": MODEL, "backend": BACKEND}
    layers |= dict.fromkeys(_families(), FAMILY)
    return layers.get(folder, API)


def test_layers_exist() -> None:
    assert {"norms", "activations"} <= _families()
    assert {
        "fusedops.core.launches.launch",
        "fusedops.core.device",
        "fusedops.norms.kernels",
    } <= set(MODULES)


def _internal_imports() -> Iterator[tuple[str, str]]:
    """All imports within the package: the module, and what it imports."""
    for name, path in MODULES.items():
        for target in _imports(path):
            if target.startswith("fusedops"):
                yield name, target


def test_files_import_no_layer_above_them() -> None:
    for name, target in _internal_imports():
        assert target in MODULES, f"{name} imports {target}, which is no module"
        assert _layer(target) <= _layer(name), f"{name} imports {target}, which is above it"
        if _layer(name) == _layer(target) and _layer(name) in SEPARATE:
            folders = {name.split(".")[1], target.split(".")[1]} - {"distributed"}
            assert len(folders) == 1, f"{name} imports {target}, of another folder of its layer"


def _strings(path: Path) -> Iterator[str]:
    """The strings of a file, without docstrings."""
    nodes = _nodes(path)
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield from [node.value] if isinstance(node.value, str) else []


def test_core_names_no_module_above_it() -> None:
    """Strings count too, because a module can be imported by its name in a string."""
    for name, path in MODULES.items():
        if _layer(name) == CORE:
            results = [text for text in _strings(path) if _ABOVE_CORE.search(text)]
            assert not results, f"{name} has {results}"


def test_no_import_circle() -> None:
    """Imports inside functions and for annotations count."""
    graph = {name: (set(_imports(path)) & set(MODULES)) - {name} for name, path in MODULES.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # else CycleError names it


_ALONE = """
import importlib, pkgutil, sys, types
package = types.ModuleType("fusedops")
package.__path__ = [sys.argv[1]]
sys.modules["fusedops"] = package
core = importlib.import_module("fusedops.core")
for module in pkgutil.walk_packages(core.__path__, "fusedops.core."):
    if module.name not in sys.argv[2:]:
        importlib.import_module(module.name)
own = ("fusedops.core", "fusedops.distributed")
above = [name for name in sys.modules if name.startswith("fusedops.") and not name.startswith(own)]
assert not above, above
"""


def test_core_imports_nothing_but_distributed() -> None:
    """Files of kernels are skipped where there is no Triton."""
    names = ["fusedops.core.device", "fusedops.core.kernels"]
    skipped = [] if importlib.util.find_spec("triton") else names
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(PACKAGE), *skipped],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


_DEVICE_FUNCTIONS = ("fusedops.core.device", "fusedops.core.exchange")


@pytest.mark.parametrize(
    "name", [name for name in MODULES if _has_kernels(name) or name in _DEVICE_FUNCTIONS]
)
def test_kernels_import_only_triton(name: str) -> None:
    """They also import the device functions of core, and files of their own package."""
    package = name.partition(".kernels")[0] + ".kernels."
    for target in _imports(MODULES[name]):
        is_triton = target.split(".")[0] in ("triton", "__future__")
        is_own = _has_kernels(name) and target.startswith(package)
        assert is_triton or is_own or target in _DEVICE_FUNCTIONS, target


@pytest.mark.parametrize("name", [name for name in MODULES if name.endswith(".reference")])
def test_reference_imports_only_torch(name: str) -> None:
    for target in _imports(MODULES[name]):
        assert target.split(".")[0] != "triton" and not target.startswith("fusedops"), target


# The commands and their child processes. Only the top-level package may import one, and only when
# it is needed: `test_importing_is_light` checks that the tuner of ``FUSEDOPS_TUNE`` is not loaded
# with the package.
COMMANDS = ("fusedops.tune", "fusedops.doctor", "fusedops.__main__")


def test_commands_are_not_imported() -> None:
    for name, target in _internal_imports():
        is_tuner_of_the_package = (name, target) == ("fusedops", "fusedops.tune.ondemand")
        if target.startswith(COMMANDS) and not is_tuner_of_the_package:
            assert name.startswith(COMMANDS), f"{name} imports {target}"


def test_specs_are_not_imported() -> None:
    """Samples are for tests, benchmarks and commands. Importing the package must not load them."""
    for name, target in _internal_imports():
        if not name.endswith(".spec") and not name.startswith(COMMANDS):
            assert not target.endswith(".spec"), f"{name} imports {target}"


# --- private names --------------------------------------------------------------------------------

# The files of private names: tests/operators/test_compat.py hides each name from them.
_COMPAT = {name for name in MODULES if name.startswith("fusedops.core.compat.")} | {
    "fusedops.backend.fx",
    "fusedops.backend.symbols",
}

# Private names that other files may use, by file ("" is any file), each with the reason.
ALLOWED = {
    (
        "",
        "_modules",
    ): "a module's children by name, shared and absent ones too, which `named_children` leaves out",
    ("", "_parameters"): "as `_modules`",
    ("backend/capture.py", "_version"): "how often a tensor was changed in place",
    ("backend/heads.py", "_version"): "as in capture.py",
    ("models/probe/arithmetic.py", "_buffers"): "a module's own buffers by name, absent ones too",
    (
        "models/rules/one_token.py",
        "_attn_implementation",
    ): "of Transformers, whose sources rules know",
    (
        "tune/command.py",
        "_SubParsersAction",
    ): "of argparse, which has no public name for the annotation",
    ("doctor.py", "_SubParsersAction"): "of argparse",
    ("disk_cache.py", "_SubParsersAction"): "as in doctor.py",
    ("tune/server.py", "_exit"): "of os, and documented",
    ("tune/regions.py", "_exit"): "as in server.py",
}

_PRIVATE = re.compile(r"_(?!_)\w")
# Modules of Triton that have no documentation.
_INTERNAL = re.compile(r"triton\.(runtime|compiler|backends|knobs)\b")
_DOTTED = re.compile(r"(torch|triton)(\.\w+)+\.?")


@functools.cache
def _own() -> frozenset[str]:
    """Names of the package's own functions, classes, variables and attributes."""
    names = set[str]()
    for path in FILES:
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                instance = node.value.id if isinstance(node.value, ast.Name) else ""
                if instance in ("self", "cls"):
                    names.add(node.attr)
    return frozenset(names)


def _foreign(name: str) -> bool:
    """Whether a private name belongs to another package."""
    return bool(_PRIVATE.match(name)) and not name.startswith("_fusedops_") and name not in _own()


def _private_names(path: Path) -> Iterator[tuple[str, str]]:
    """``(name, expression)`` of private names that a file imports, reads or passes to `getattr`."""
    for node in _nodes(path):
        dotted: list[str] = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and _foreign(node.attr):
            yield node.attr, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            dotted = [ast.unparse(node)]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _DOTTED.fullmatch(node.value)
        ):
            dotted = [node.value]
        elif isinstance(node, ast.Call) and _called(node) in (
            "getattr",
            "setattr",
            "hasattr",
            "attrgetter",
        ):
            texts = [
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
            yield from ((text, ast.unparse(node)) for text in texts if _foreign(text))
        for name in dotted:
            private = [part for part in name.split(".") if _PRIVATE.match(part)]
            if name.split(".")[0] in ("torch", "triton") and (private or _INTERNAL.match(name)):
                yield (private or [name])[0], name


def test_private_names_are_in_compat() -> None:
    """If a release lacks one of these names, only the speed may change."""
    used = set()
    for name, path in MODULES.items():
        file = path.relative_to(PACKAGE).as_posix()
        for private, text in _private_names(path):
            allowed = {("", private), (file, private)}
            used |= allowed
            assert name in _COMPAT or allowed & set(ALLOWED), f"{file} uses {text}"
    assert set(ALLOWED) <= used


# --- arguments ------------------------------------------------------------------------------------

MOST_ARGUMENTS = 8


def _contracts() -> set[str]:
    """Functionals and constructors of modules, whose signatures are those of what they replace.

    Also losses that become kernels: their arguments are the kernels'.
    """
    functions = [
        function for spec in EVERY_SPEC for function in (spec.call, spec.eager, spec.reference)
    ]
    return (
        {getattr(function, "func", function).__name__ for function in functions}
        | set(fusedops.__all__)
        | {f"{name}.__init__" for name in fusedops.nn.__all__}
        | {loss.function.__name__ for loss in registration._LOSSES.values()}
    )


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.arguments]]:
    for child in ast.iter_child_nodes(node):
        inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            yield prefix + getattr(child, "name", "<lambda>"), child.args
        yield from _functions(child, inner)


def _count(arguments: ast.arguments) -> int:
    every = (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    )
    return sum(arg is not None and arg.arg not in ("self", "cls", "ctx") for arg in every)


def test_functions_take_few_arguments() -> None:
    """Kernels, and the functions that launch them, are exempt."""
    contracts, result = _contracts(), []
    for name, path in MODULES.items():
        if not _has_kernels(name) and not name.endswith((".launching", ".device")):
            for function, arguments in _functions(_nodes(path)[0]):
                if _count(arguments) > MOST_ARGUMENTS and function not in contracts:
                    result.append(f"{name}.{function}")
    assert not result, f"more than {MOST_ARGUMENTS} arguments: {result}"


# --- importing ------------------------------------------------------------------------------------

_PROBE = """
import os, sys
import torch  # what torch itself reads and loads does not count
seen = []
_torch_loads_triton = "triton" in sys.modules

class Recorder(dict):
    def __getitem__(self, key): seen.append(key); return super().__getitem__(key)
    def get(self, key, default=None): seen.append(key); return super().get(key, default)
    def __contains__(self, key): seen.append(key); return super().__contains__(key)

environment = os.environ
os.environ = Recorder(environment)
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
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=environment,
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_public_api() -> None:
    assert set(fusedops.__all__) >= {
        "layer_norm",
        "rms_norm",
        "bias_dropout_add",
        "bias_dropout_add_ln",
        "bias_dropout_add_rms_norm",
        "gelu",
        "bias_gelu",
        "bias_act",
        "geglu",
        "swiglu",
        "gated_act",
        "__version__",
    }
    for module in (fusedops, fusedops.nn):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name == "__version__" or getattr(module, name).__doc__, (
                f"{name} has no docstring"
            )
