"""The documentation is right: examples run, commands and links exist, every name has an entry."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import fusedops
import fusedops.distributed
from fusedops import models
from pages import PAGES, ROOT, anchors, blocks, links, spans

TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}

# --- Python examples ------------------------------------------------------------------------------

_PYTHON = ("python", "py", "python3", "pycon")


def _examples() -> list[object]:
    return [
        pytest.param(name, block.line, block.text, id=f"{name}:{block.line}")
        for name, text in TEXTS.items()
        for block in blocks(text)
        if block.language in _PYTHON
    ]


def test_every_fence_is_found() -> None:
    """Fences may be in a list, have a title or tildes, or lie within a longer fence."""
    page = "# A\n\n- b\n\n  ```python title='x'\n  one = 1\n  ```\n\n~~~py\ntwo = 2\n~~~\n\n````text\n```\n````\n"
    assert [(b.line, b.language, b.text) for b in blocks(page)] == [
        (6, "python", "one = 1\n"),
        (10, "py", "two = 2\n"),
        (14, "text", "```\n"),
    ]
    for name, text in TEXTS.items():
        opened = [line for line in text.splitlines() if re.match(r"\s*(`{3,}|~{3,})", line)]
        assert len(opened) == 2 * len(list(blocks(text))), (
            f"{name}: a fence is not closed, or was not found"
        )


def test_there_are_examples() -> None:
    with_examples = {example.values[0] for example in _examples()}  # type: ignore[attr-defined]
    assert {
        "README.md",
        "docs/quickstart.md",
        "docs/operators.md",
        "docs/norms.md",
    } <= with_examples


@pytest.fixture
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Runs a test in an empty folder, and resets the environment and the state of Accelerate."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ), torch.random.fork_rng():
        yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


# Pages whose examples choose the device of models and data themselves.
_WITH_OWN_DEVICES = ("docs/recipes.md",)


@pytest.mark.usefixtures("as_in_a_new_process")
@pytest.mark.parametrize(("page", "line", "source"), _examples())
def test_example_runs(page: str, line: int, source: str, device: torch.device) -> None:
    """Each example has its own namespace, so it must not depend on the previous one."""
    # Blank lines in front give tracebacks the line numbers of the page.
    code = compile("\n" * (line - 1) + source, str(ROOT / page), "exec")
    with contextlib.nullcontext() if page in _WITH_OWN_DEVICES else torch.device(device):
        exec(code, {"__name__": f"example_{Path(page).stem}_{line}"})


# --- commands -------------------------------------------------------------------------------------

_COMMAND = re.compile(
    r"^(?:\$ )?((?:[A-Z][A-Z_]+=\S+ )*)((?:make|fusedops|python|pip|pre-commit)(?: .*)?)$"
)


_WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _lines() -> dict[str, list[str]]:
    """The lines that may be commands, by page.

    Lines of blocks that are not Python, inline code, and the steps of workflows.
    """
    results = {
        name: [
            line
            for b in blocks(text)
            if b.language not in (*_PYTHON, "math")
            for line in b.text.splitlines()
        ]
        for name, text in TEXTS.items()
    }
    for name, text in TEXTS.items():
        results[name] += spans(text)
    for path in _WORKFLOWS:
        steps = re.findall(r"^[ -]+run: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        results[path.relative_to(ROOT).as_posix()] = [
            re.sub(r"\$\{\{.*?\}\}", "x", step) for step in steps
        ]
    return results


def _commands() -> list[object]:
    """The command lines of the pages and of the workflows."""
    results = {}
    for name, lines in _lines().items():
        for line in lines:
            match = _COMMAND.match(line.strip())
            command = match[2].partition(" #")[0].strip() if match else "fusedops"
            if match and command != "fusedops":  # the library's own name, in prose
                whole = match[1] + command
                results.setdefault(
                    whole, pytest.param(name, match[1].split(), command, id=f"{name}: {whole}")
                )
    return list(results.values())


@functools.cache
def _help(program: str, *words: str) -> str | None:
    """The help of a module (``-m name``) or a script, called with ``words`` and ``--help``.

    None if they are not accepted.
    """
    output, argv = io.StringIO(), sys.argv
    module = program.removeprefix("-m ")
    try:
        sys.argv = [program, *words, "--help"]
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            mock.patch.dict(sys.modules),
        ):
            if module != program:
                # Another test may have imported the module.
                sys.modules.pop(f"{module}.__main__", None)
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / program), run_name="__main__")
    except SystemExit as end:
        return output.getvalue() if not end.code else None
    finally:
        sys.argv = argv
    raise AssertionError(f"{program} --help did not exit")


def _check_program(program: str, arguments: list[str]) -> None:
    """The program has the subcommand, whose help names the options."""
    words = [a for a in arguments if a != "…" and not a.startswith("[")]
    subcommands = words[0].split("|") if words and not words[0].startswith("-") else [""]
    for subcommand in subcommands:
        text = _help(program, *filter(None, [subcommand]))
        assert text is not None, f"{program} has no subcommand {subcommand!r}"
        known = set(re.findall(r"(?<![\w-])--?[\w-]+", text))
        for option in (a.partition("=")[0] for a in words if a.startswith("-")):
            assert option in known, f"{program} {subcommand} has no option {option}"


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        pattern = rf"^{re.escape(name)} \?=" if is_variable else rf"^{re.escape(name)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {name}"


def _check_pip(arguments: list[str]) -> None:
    """The extras of the project exist. Other arguments are not checked."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    known = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for argument in arguments:
        match = re.fullmatch(r"(?:\.|fusedops)\[([\w,-]+)\]", argument)
        for extra in match[1].split(",") if match else ():
            assert re.search(rf"^{re.escape(extra)} = ", known, re.MULTILINE), (
                f"there is no extra {extra}"
            )


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")
@pytest.mark.parametrize(("page", "environment", "command"), _commands())
def test_command_exists(page: str, environment: list[str], command: str) -> None:
    """Targets, subcommands, options, extras, scripts and environment variables exist."""
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "fusedops").rglob("*.py")
    )
    for setting in environment:
        assert setting.partition("=")[0] in sources, f"nothing reads {setting}"
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        _check_make(arguments)
    elif program == "pip":
        _check_pip(arguments)
    elif program == "fusedops":
        assert importlib.util.find_spec("fusedops.__main__"), "there is no command line"
        _check_program("-m fusedops", arguments)
    elif program == "python" and arguments[:1] == ["-m"] and (ROOT / arguments[1]).is_dir():
        _check_program(f"-m {arguments[1]}", arguments[2:])
    elif program == "python" and arguments and (ROOT / arguments[0]).is_file():
        _check_program(arguments[0], arguments[1:])
    elif program == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").exists()
    else:
        # This is a user's script or module. One of ours would have a folder in its path.
        assert not any("/" in argument for argument in arguments[:1]), f"there is no {arguments[0]}"


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", TEXTS)
def test_targets_of_links_exist(page: str) -> None:
    """This is for GitHub. `mkdocs build --strict` checks the links of the site."""
    for link in links(TEXTS[page]):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.resolve().is_relative_to(ROOT) and target.exists(), (
            f"{page}: {link} does not exist"
        )
        name = target.resolve().relative_to(ROOT).as_posix()
        if anchor and name in TEXTS:
            assert anchor in anchors(TEXTS[name]), f"{page}: {name} has no heading #{anchor}"


def test_every_page_can_be_reached() -> None:
    """Pages are in the site's navigation, and links lead from the README to all of them."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page not in TEXTS:
            continue
        reached.add(page)
        for link in links(TEXTS[page]):
            target = ((ROOT / page).parent / link.partition("#")[0]).resolve()
            if target.is_relative_to(ROOT):
                waiting.append(target.relative_to(ROOT).as_posix())
    for page in TEXTS:
        if page.startswith("docs/"):
            assert f": {page.removeprefix('docs/')}\n" in navigation, (
                f"mkdocs.yml does not name {page}"
            )
            assert page in reached, f"no link leads to {page}"


# --- reference ------------------------------------------------------------------------------------

MODULES = {module.__name__: module for module in (fusedops, fusedops.nn, fusedops.distributed)}
NAMES = [
    (module_name, name)
    for module_name, module in MODULES.items()
    for name in module.__all__
    if name != "__version__"
]
NAMES.append(("fusedops", "compile"))  # public, but not part of a star import
ENTRIES = [
    entry for text in TEXTS.values() for entry in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
]


def test_every_name_has_one_entry() -> None:
    """The names are the public ones, also those of `fusedops.models`."""
    expected = {f"{module_name}.{name}" for module_name, name in NAMES}
    expected |= {
        f"fusedops.models.{name}" for name in models.__all__ if name not in fusedops.__all__
    }
    assert len(ENTRIES) == len(set(ENTRIES)) and expected <= set(ENTRIES)
    assert not {e for e in ENTRIES if e.rpartition(".")[0] in MODULES} - expected


@pytest.mark.parametrize(("module_name", "name"), NAMES)
def test_docstring_names_the_arguments(module_name: str, name: str) -> None:
    """The arguments are those of the signature, in its order; for modules, of the constructor."""
    documented = getattr(MODULES[module_name], name)
    text = inspect.getdoc(documented) or ""
    section = text.partition("\nArgs:\n")[2]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    named = [
        n
        for names in re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE)
        for n in names.split(", ")
    ]
    parameters = inspect.signature(documented).parameters.values()
    assert named == [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def test_command_line_page_names_every_option_and_variable() -> None:
    page = TEXTS["docs/command_line.md"]
    for command in ("tune", "doctor", "cache"):
        text = _help("-m fusedops", command)
        section = page.partition(f"\n## `fusedops {command}`\n")[2].partition("\n## ")[0]
        assert text is not None and section
        options = set(re.findall(r"^ +(--[a-z]+)", text, re.MULTILINE))
        assert options == set(re.findall(r"^\| `(--[a-z]+)", section, re.MULTILINE))
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "fusedops").rglob("*.py")
    )
    read = set(
        re.findall(
            r"""environ(?:\.get\(|\[)"([A-Z_]+)"|"([A-Z_]+)" (?:not )?in os\.environ""", sources
        )
    )
    for name in {name for names in read for name in names if name} - {"PYTHONPATH"}:
        assert f"`{name}`" in page, f"docs/command_line.md does not name {name}"


# --- the front page -------------------------------------------------------------------------------


_FOLDERS = ("core", "distributed", "norms", "compiler", "backend", "models", "tune")


@pytest.mark.parametrize("folder", _FOLDERS)
def test_layout_names_every_file(folder: str) -> None:
    """The part of a folder in the layout names its files, and no others."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, part = page.split(f"\n  {folder}/ ", 1)
    part = re.split(r"\n(?:  )?\w", part, maxsplit=1)[0]
    files = {path.name for path in (ROOT / "fusedops" / folder).rglob("*.py")}
    assert set(re.findall(r"(?<![\w/])\w+\.py\b", part)) == files - {"__init__.py"}


@pytest.mark.parametrize("folder", ["core", "distributed", "compiler", "backend", "models"])
def test_page_of_a_folder_names_existing_files(folder: str) -> None:
    page = (ROOT / "fusedops" / folder / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/.]+\.py|[\w./]+/)`", page))
    assert names and all(
        any(
            (ROOT / parent / name).exists()
            for parent in (f"fusedops/{folder}", "fusedops", "tests", "")
        )
        for name in names
    )


def test_pages_agree_on_the_minutes_of_the_tests() -> None:
    pages = ("README.md", "CONTRIBUTING.md", "docs/testing.md")
    results = [re.findall(r"(\d+)\s+minutes\s+on\s+two\s+cores", TEXTS[page]) for page in pages]
    assert len(set(map(tuple, results))) == len(results[0]) == 1


def test_page_on_tests_names_every_folder_and_helper() -> None:
    tests = ROOT / "tests"
    named = set(re.findall(r"`(\w+\.py|\w+/)`", TEXTS["docs/testing.md"].partition("\n## Sel")[0]))
    files = {path.name for path in (tests / "harness").glob("*.py")}
    folders = {
        f"{path.name}/"
        for path in (*tests.iterdir(), tests / "harness/architectures")
        if path.is_dir() and not path.name.startswith(("_", "."))
    }
    assert files | folders <= named


def test_readme_is_one_page_and_begins_with_a_figure_and_code() -> None:
    text = TEXTS["README.md"]
    lines = text.splitlines()
    assert len(lines) <= 120
    assert any(re.search(r"\d times as fast", line) for line in lines[:3])
    first = next(block for block in blocks(text) if block.language in _PYTHON)
    assert first.line <= 10
    assert "fusedops.compile(model)" in "".join(first.text.splitlines()[:10])


def test_readme_shows_compile_then_fuse_model_then_an_operator() -> None:
    examples = [b.text for b in blocks(TEXTS["README.md"]) if b.language in _PYTHON]
    calls = [re.findall(r"fusedops\.(\w+)", text) for text in examples]
    assert [names[0] for names in calls] == ["compile", "fuse_model", "rowwise"]


def test_formulas_have_no_square_root() -> None:
    """Browsers without a font for formulas draw no sign: the exponent -1/2 is read everywhere."""
    formulas = [b.text for text in TEXTS.values() for b in blocks(text) if b.language == "math"]
    assert formulas and not any("sqrt" in formula for formula in formulas)


# --- the site's HTML ------------------------------------------------------------------------------


def _markup() -> ModuleType:
    """The part of the hook that does not need MkDocs."""
    spec = importlib.util.spec_from_file_location("markup", ROOT / "docs" / "hooks" / "markup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<p>a <code>b</code></p>", []),
        ("<pre><code>`b` in code</code></pre>", []),
        ("<li>\n <code>The form of ``slices``</code>\n</li>", ["The form of ``slices``"]),
        ("<p>with `x`</p><p>and &#96;y</p>", ["with `x`and `y"]),
    ],
)
def test_literal_backticks_are_found(page: str, shown: list[str]) -> None:
    assert _markup().literal_backticks(page) == shown


def test_letter_with_a_hat_becomes_one_character() -> None:
    formula = '<mover accent="true"><mi>z</mi><mo>&#x0005E;</mo></mover><mo>&#x0005E;</mo>'
    assert (
        _markup().hatted(formula) == '<mi style="font-style: italic">\u1e91</mi><mo>&#x0005E;</mo>'
    )


@pytest.mark.parametrize(
    ("cell", "broken"),
    [
        (
            "<td><code>bias_dropout_add</code></td>",
            "<td><code>bias_<wbr>dropout_<wbr>add</code></td>",
        ),
        (
            "<td><code>FusedBiasGELUNorm</code></td>",
            "<td><code>Fused<wbr>Bias<wbr>GELUNorm</code></td>",
        ),
        ("<td><code>layer_norm</code></td>", "<td><code>layer_norm</code></td>"),
        ("<p><code>bias_dropout_add</code></p>", "<p><code>bias_dropout_add</code></p>"),
        ("<th>torch.compile</th>", "<th>torch.<wbr>compile</th>"),
        (
            '<th style="a"><code>fuse_model</code></th>',
            '<th style="a"><code>fuse_<wbr>model</code></th>',
        ),
    ],
)
def test_long_names_in_tables_may_be_broken(cell: str, broken: str) -> None:
    assert _markup().breakable(cell) == broken
