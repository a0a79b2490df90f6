"""The command line.

Errors are one line, with exit code 2. The doctor's exit code for faults is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fusedops
import made_up
from fusedops import doctor
from fusedops.__main__ import main
from fusedops.core.configs import cache, tuning
from fusedops.core.configs.tuning_key import Config, TuningKey
from fusedops.core.launches import launch
from fusedops.tune import command
from fusedops.tune.progress import Progress
from fusedops.tune.table import Table
from made_up import options

KEY = TuningKey("norm_forward", ("rms", "plain", "alone"), "16bit", 1024, 3)


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


# --- tune -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "layernorm"], "no operator 'layernorm'; did you mean layer_norm?"),
        (["--op", "xyzzy"], "no operator 'xyzzy'; there are: batched_layer_norm_act,"),
        (["--shape", "8192"], "--shape must be rows x columns, such as 8192x4096, got '8192'"),
        (["--shape", "8192x0"], "got '8192x0'"),
        (["--shape", "8192x-1"], "got '8192x-1'"),
        (["--dtype", "float32"], "no dtype 'float32'; did you mean fp32?"),
        (["--dtype", "bf61"], "no dtype 'bf61'; did you mean bf16?"),
        (["--dtype", "int4"], "no dtype 'int4'"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--budget", "-1"], "--budget must be at least 0 seconds, got -1"),
        (["--budget", "nan"], "--budget must be at least 0 seconds, got nan"),
        (["--compare", "/nowhere.csv"], "no such file: /nowhere.csv"),
        (
            ["--compare", __file__],
            f"{__file__} was not written by --raw: its columns are not kernel, group,",
        ),
        (["--raw", __file__], f"{__file__} was not written by --raw"),
        (["--raw", "/nowhere/raw.csv"], "--raw: no such folder: /nowhere"),
        (["--ship", "--output", "/nowhere/t.json"], "--output: no such folder: /nowhere"),
        (["--output", "table.json"], "--resume and --output take --ship"),
        (["--resume"], "--resume and --output take --ship"),
        (["--op", "no_repeat_ngram"], "no_repeat_ngram cannot be tuned"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_file_of_one_long_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw.csv").write_bytes(b"x" * 200_000)
    assert main(["tune", "--compare", str(tmp_path / "raw.csv")]) == 2
    assert "raw.csv was not written by --raw: field larger" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["tunes"], ["tune", "--budget", "x"], ["doctor", "--x"]])
def test_wrong_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: fusedops" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tune", "geglu, gelu"),
        ("doctor", "Prints diagnostics of the setup"),
        ("cache", "Prints the size of the cache"),
    ],
)
def test_help_is_plain_text_and_lists_operators(
    name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert expected in text and "`" not in text


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--op", "layer_norm"]) == 2
    assert capsys.readouterr().err == "fusedops: needs a GPU; without one nothing can be timed\n"


def test_version_and_module() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "fusedops", "--version"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, f"fusedops {fusedops.__version__}\n")


def test_shapes_and_dtypes() -> None:
    """An operator is tuned for those shapes of the command line that it accepts.

    Without shapes on the command line, it is tuned for those of its benchmark. Operators with
    dropout are also tuned with p=0.
    """
    cpu = torch.device("cpu")
    specs = {spec.name: spec for spec in command._specs(())}
    chosen = [specs["layer_norm"], specs["bias_dropout_add"], specs["batched_layer_norm_tanh"]]
    result = command._workloads(options(), chosen, [(300, 4096)], [torch.float16], cpu)
    assert [str(workload) for workload in result] == [
        "layer_norm 300x4096 fp16",
        "bias_dropout_add 300x4096 fp16",
        "batched_layer_norm_tanh 300x4096 fp16",
        "bias_dropout_add 300x4096 fp16 p=0.0",
    ]
    (only,) = command._workloads(options(), chosen, [(300, 64, 64)], [torch.float16], cpu)
    assert only.spec.name == "batched_layer_norm_tanh"
    with pytest.raises(command.UsageError, match="none of these operators"):
        command._workloads(options(), chosen[:1], [(300, 64, 64)], [torch.float16], cpu)
    assert {w.shape for w in command._workloads(options(), chosen[:1], [], [], cpu)} >= {
        (8192, 4096),
        (1024, 32768),
    }
    assert {spec.name for spec in command._specs(["bias_gelu"])} == {
        "bias_gelu_erf",
        "bias_gelu_tanh",
    }


@pytest.fixture
def gpu_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "device_name", lambda index: made_up.NAME)


@pytest.mark.kernels
@pytest.mark.usefixtures("gpu_name")
def test_best_configs_are_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads = made_up.workloads("rms_norm", "swiglu")
    raw = tmp_path / "raw.csv"
    destination = command._Cache(options(raw=raw), torch.device("cuda", 0))
    timer = made_up.Timer()
    assert (
        command._sweep(
            made_up.sweeper(timer=timer),
            workloads,
            destination,
            budget=1e9,
            describe=lambda out: command.line(out, 4e12),
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"4 keys tuned; the cache is {cache.directory()}"
    for printed in lines[:-1]:
        assert all(word in printed for word in ("floor", "best", "heuristic", "gain", "timed")), (
            printed
        )
    for key in {key for key, _, _ in timer.timed}:
        assert cache.read(key, made_up.NAME) is not None
        assert tuning.source(key, 0) == "cache"
    assert len(raw.read_text().splitlines()) > 20


@pytest.mark.kernels
@pytest.mark.usefixtures("gpu_name")
def test_ship_writes_a_table_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget ends a run after a key. Keys in the table are not measured again."""
    path, raw, workloads = (
        tmp_path / "test_gpu.json",
        tmp_path / "raw.csv",
        made_up.workloads("rms_norm", "swiglu"),
    )
    namespace, device = options(output=path, raw=raw, resume=True), torch.device("cuda", 0)
    moments = iter([0.0, 0.0, 1.0, 1.0] + [9.0] * 99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "time", types.SimpleNamespace(monotonic=lambda: next(moments)))
        destination = command._Ship(namespace, device)
        assert (
            command._sweep(made_up.sweeper(), workloads, destination, budget=5.0, describe=str) == 0
        )
    assert "1 keys tuned" in capsys.readouterr().out
    destination = command._Ship(namespace, device)
    assert command._sweep(made_up.sweeper(), workloads, destination, budget=1e9, describe=str) == 0
    assert "3 keys tuned" in capsys.readouterr().out
    destination = command._Ship(namespace, device)
    assert command._sweep(made_up.sweeper(), workloads, destination, budget=1e9, describe=str) == 0
    printed = capsys.readouterr().out
    assert "0 keys tuned" in printed and "geometric mean" in printed
    table = Table(path)
    assert table.about["device"] == made_up.NAME and table.summary["all"]["keys"] == 4
    assert not list(cache.entries())


def test_progress_bar_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Progress(4)
    plain.at(1, "first")
    plain.line("done")
    plain.close()
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("done\n", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = Progress(4)
    bar.at(2, "second")
    bar.close()
    assert "2/4" in capsys.readouterr().err


# --- cache ----------------------------------------------------------------------------------------


@pytest.fixture
def filled(root: Path) -> dict[str, Path]:
    """Files of each kind, written one after the other, and files of others."""
    assert cache.write(KEY, "Test GPU", Config(block_n=1024, rows=4, warps=4), {})
    (entry,) = cache.entries()
    graph = cache.file_of("graphs", ["a"])
    function = cache.file_of("rowwise", ["b"])
    assert graph is not None and function is not None
    files = {"entry": entry, "graph": graph, "function": function}
    files["scratch"] = graph.with_name(f"{cache.SCRATCH}01")
    files["foreign"] = root / "notes.json"
    files["other"] = root / "graphs" / "by_hand.json"
    for second, path in enumerate(files.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2**20))
        os.utime(path, (second, second))
    return files


def test_cache_prints_files_and_bytes_of_each_kind(
    filled: dict[str, Path], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{root}: 4 files, 4.0 MiB",
        "  tuned configs: 1 files, 1.0 MiB",
        "  functions of rowwise: 1 files, 1.0 MiB",
        "  compiled graphs: 2 files, 2.0 MiB",
        "  measured regions: 0 files, 0.0 KiB",
    ]
    assert all(path.exists() for path in filled.values())


@pytest.mark.parametrize(
    ("arguments", "remaining"),
    [
        (["--clear"], {"foreign", "other"}),
        (["--limit", "2.5"], {"function", "scratch", "foreign", "other"}),
        (["--limit", "4"], {"entry", "graph", "function", "scratch", "foreign", "other"}),
    ],
)
def test_cache_deletes_the_files_written_first(
    arguments: list[str], remaining: set[str], filled: dict[str, Path]
) -> None:
    assert main(["cache", *arguments]) == 0
    assert {name for name, path in filled.items() if path.exists()} == remaining


@pytest.mark.parametrize("limit", ["-1", "nan", "inf", "many"])
def test_limit_of_the_cache_is_checked(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cache", "--limit", limit])
    assert "invalid" in capsys.readouterr().err


def test_cache_reports_files_that_cannot_be_deleted(
    filled: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refused)
    assert main(["cache", "--clear"]) == 1
    assert "4 files cannot be deleted" in capsys.readouterr().err


# --- doctor ---------------------------------------------------------------------------------------


def diagnosed(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["doctor"])
    return code, capsys.readouterr().out.splitlines()


def test_doctor_without_faults(capsys: pytest.CaptureFixture[str], kernel_path: bool) -> None:
    code, lines = diagnosed(capsys)
    assert code == 0 and not any(line.startswith("WRONG") for line in lines)
    starts = (
        "versions: fusedops",
        "tested on GPUs: ",
        "device: ",
        "launcher: ",
        "configs: ",
        "tuning at first use: ",
        "cache: ",
        "entries: none",
    )
    # Functions for whole models, and second names of operators.
    others = {
        "NotRowwiseError",
        "__version__",
        "compile_blocks",
        "explain",
        "fuse_model",
        "fusion_status",
        "unfuse_model",
        "add_layer_norm",
        "add_rms_norm",
        "batched_layer_norm_tanh",
        "glu",
    }
    operators = tuple(f"{name}: " for name in fusedops.__all__ if name not in others)
    for start in starts + operators:
        assert sum(line.startswith(start) for line in lines) == 1, start
    path = next(line for line in lines if line.startswith("swiglu: "))
    if torch.cuda.is_available():
        expected = "kernel"
    else:
        expected = "interpreter" if kernel_path else "reference (no GPU)"
    assert expected in path


@pytest.mark.parametrize(
    ("value", "line", "fault"),
    [
        (None, "tuning at first use: off", 0),
        ("", "tuning at first use: off", 0),
        ("off", "tuning at first use: off, as FUSEDOPS_TUNE is off", 0),
        ("Yes", "tuning at first use: of keys without a measurement, as FUSEDOPS_TUNE is Yes", 0),
        (
            "force",
            "tuning at first use: of all keys, those of the shipped table too, as FUSEDOPS_TUNE is force",
            0,
        ),
        (
            "2",
            "WRONG  tuning at first use: off, as FUSEDOPS_TUNE is '2', expected 1, force or 0",
            1,
        ),
    ],
)
def test_doctor_prints_the_tuning_at_first_use(
    value: str | None,
    line: str,
    fault: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FUSEDOPS_TUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("FUSEDOPS_TUNE", value)
    code, lines = diagnosed(capsys)
    assert code == fault and [printed for printed in lines if "first use" in printed] == [line]


def test_gpu_without_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_device", lambda: "Test GPU")
    monkeypatch.setattr(doctor, "_triton", lambda: ("", "Triton is not installed"))
    code, lines = diagnosed(capsys)
    assert code == 1
    assert "WRONG  launcher: none, as Triton is not installed" in lines
    assert "layer_norm: reference (Triton is not installed)" in lines


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import a_package_that_is_missing",
            "Triton needs a_package_that_is_missing, which is not",
        ),
        ("from math import nothing", "Triton cannot be imported: cannot import name 'nothing'"),
        (None, "Triton is not installed"),
    ],
)
def test_triton_that_cannot_be_imported_is_a_fault_under_the_interpreter(
    source: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "triton", raising=False)
        if source is None:
            patch.setitem(sys.modules, "triton", None)
        else:
            (tmp_path / "triton.py").write_text(source)
            patch.syspath_prepend(tmp_path)
        unusable = doctor._triton.__wrapped__()
    assert unusable[0] == "" and unusable[1].startswith(reason)
    monkeypatch.setattr(doctor, "_triton", lambda: unusable)
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    code, lines = diagnosed(capsys)
    assert code == 1
    assert f"WRONG  launcher: none, as {unusable[1]}" in lines
    assert f"layer_norm: reference ({unusable[1]})" in lines


@pytest.mark.parametrize(
    ("launcher", "reason", "line"),
    [
        ("direct", "", "launcher: direct, by a call of Triton 3.9.0's C function"),
        (
            "compiled",
            "so it is",
            "launcher: Triton's, a few microseconds more a launch, as so it is",
        ),
        (
            "ordinary",
            "so it is",
            "launcher: Triton's binder, tens of microseconds more a launch, as so it is",
        ),
    ],
)
def test_doctor_prints_the_launcher_in_use(
    launcher: str,
    reason: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_a_gpu(monkeypatch)
    built = types.SimpleNamespace(launcher=launcher, reason=reason)
    monkeypatch.setattr(launch, "diagnose", lambda index: built)
    code, lines = diagnosed(capsys)
    assert code == 0
    assert line in lines
    assert "layer_norm: kernel" in lines


def test_kernel_that_cannot_be_built_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diagnose(index: int) -> None:
        raise OSError("no ptxas")

    _pretend_a_gpu(monkeypatch)
    monkeypatch.setattr(launch, "diagnose", diagnose)
    code, lines = diagnosed(capsys)
    assert code == 1
    assert "WRONG  launcher: no kernel can be built: OSError: no ptxas" in lines


def _pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "_device", lambda: "Test GPU")
    monkeypatch.setattr(doctor, "_configs", lambda gpu, path: "configs: some")
    monkeypatch.setattr(doctor, "_triton", lambda: ("3.9.0", ""))
    monkeypatch.setattr(launch, "interpreting", lambda: False)


def test_invalid_entries(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.write(KEY, "Test GPU", Config(block_n=1024, rows=4, warps=4), {})
    (path,) = cache.entries()
    assert diagnosed(capsys)[0] == 0
    with monkeypatch.context() as patch:  # entries of another version are no fault
        patch.setattr(cache, "__version__", "9.9")
        code, lines = diagnosed(capsys)
        assert code == 0 and "entries: 1 another version's" in lines
    copied = path.with_name("0123.json")
    copied.write_bytes(path.read_bytes())
    code, lines = diagnosed(capsys)
    assert code == 1 and lines[-1].startswith("WRONG  entries: 1 foreign, 1 good")
    copied.unlink()
    path.write_bytes(path.read_bytes()[:40])
    code, lines = diagnosed(capsys)
    assert code == 1 and lines[-1].startswith("WRONG  entries: 1 torn; delete")
    path.unlink()
    path.mkdir()
    code, lines = diagnosed(capsys)
    assert code == 1 and "unreadable" in lines[-1]


def test_cache_that_cannot_be_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.write_text("a file")
    code, lines = diagnosed(capsys)
    assert code == 1
    assert f"WRONG  cache: {root}, NOT writable" in lines


@pytest.mark.kernels
def test_doctor_counts_configs_by_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys counted are those of the benchmark. The GPU is a mock."""
    monkeypatch.setattr(tuning, "device_name", lambda index: "Test GPU")
    monkeypatch.setattr(tuning, "table", lambda device: {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "keys_of", lambda case, device: [KEY, KEY])
    assert "no table is shipped" in doctor._configs(True, "kernel")
    assert doctor._configs(True, "kernel").endswith("1 from the heuristic")
    assert cache.write(KEY, "Test GPU", Config(block_n=1024, rows=4, warps=4), {})
    assert doctor._configs(True, "kernel").endswith("1 from the cache")
