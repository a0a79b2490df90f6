"""Comparison of two results files, and the report and pictures of one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import made_up_results as made_up
from benchmarks import __main__ as command
from benchmarks import comparing, drawing, figures, report, results
from benchmarks.cases import Case
from benchmarks.columns import COLOURS, sized

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SPECS = made_up.SPECS
LARGE = Case(SPECS["layer_norm"], (8192, 4096), torch.bfloat16)
SMALL = Case(SPECS["layer_norm"], (8, 256), torch.bfloat16)
CASES = [Case(SPECS[op], (8192, 4096), torch.bfloat16) for op in ("layer_norm", "rms_norm", "gelu")]
BOTH = ("fusedops", "eager")


def rows_of(*cases, providers=("fusedops",), **changes):
    return [made_up.row(case, provider, **changes) for case in cases for provider in providers]


@pytest.mark.parametrize(
    ("case", "metric", "factor", "eager", "verdict"),
    [
        (LARGE, "gpu_us", 1.029, 1.0, None),
        (LARGE, "gpu_us", 1.031, 1.0, "regressions"),
        (LARGE, "gpu_us", 0.5, 1.0, "improvements"),
        (LARGE, "peak_mib", 1.031, 1.0, "regressions"),
        (LARGE, "loop_us", 1.5, 1.0, None),  # in large cases the loop waits for the GPU
        (SMALL, "loop_us", 1.5, 1.0, "regressions"),
        (SMALL, "peak_mib", 1.5, 1.0, None),  # 4 KiB
        # If eager has become slower too, the cause is the machine.
        (LARGE, "gpu_us", 1.05, 0.8, "regressions"),
        (LARGE, "gpu_us", 1.05, 1.05, "doubtful"),
    ],
)
def test_verdict_on_a_change(case, metric, factor, eager, verdict):
    old = rows_of(case, providers=BOTH)
    new = [
        replace(row, **{metric: getattr(row, metric) * ratio})
        for row, ratio in zip(old, (factor, eager), strict=True)
    ]
    result = comparing.compare(old, new, 0.03)
    judged = [
        (name, change.metric)
        for name in ("regressions", "doubtful", "improvements")
        for change in getattr(result, name)
    ]
    assert judged == ([(verdict, metric)] if verdict else [])


def test_eager_of_another_torch_excuses_no_regression():
    """Changes of the version and of the bandwidth are reported."""
    old = rows_of(LARGE, providers=BOTH, gpu_us=100.0, floor_us=50.0)
    new = [replace(row, gpu_us=105.0, floor_us=105.0, torch="2.12.0") for row in old]
    result = comparing.compare(old, new, 0.03)
    assert len(result.regressions) == 1
    assert result.notes[0] == "torch is 2.11.0 in the old file, 2.12.0 in the new one"
    assert "the floor is 2.100 times the old one" in result.notes[1]


def test_compare_names_devices_and_cases_of_only_one_file(tmp_path, capsys):
    old, new = tmp_path / "nvidia_h200.csv", tmp_path / "sweep_nvidia_h100.csv"
    results.write(old, rows_of(*CASES[:2]))
    results.write(new, [replace(row, gpu_us=row.gpu_us * 1.02) for row in rows_of(*CASES[1:])])
    assert command.main(["compare", str(old), str(new)]) == 0
    printed = capsys.readouterr().out
    assert "the files are named for NVIDIA H200 and for NVIDIA H100" in printed
    assert "1 cases vanished from the new file:\n  layer_norm 8192x4096 bf16 fwd_bwd" in printed
    assert "1 cases are new in the new file:\n  gelu 8192x4096 bf16 fwd_bwd" in printed
    assert "GPU time: new over old 1.020 (geometric mean of 1 cases)" in printed
    assert command.main(["compare", str(old), str(new), "--threshold", "1"]) == 1
    assert re.search(r"1 regressions beyond 1%:\n  rms_norm .* \+2\.0%", capsys.readouterr().out)


def test_compare_takes_operators_without_a_floor():
    rows = rows_of(LARGE, floor_us=0.0)
    assert not comparing.compare(rows, rows, 0.03).notes
    assert comparing.compare(rows + rows_of(SMALL), rows + rows_of(SMALL), 0.03).changes


# --- committed pages ------------------------------------------------------------------------------


def test_committed_report_is_what_its_results_give():
    """If this fails, run ``python -m benchmarks report`` and commit the page."""
    text = report.markdown(RESULTS, "nvidia_h200")
    assert (ROOT / "docs" / "report.md").read_text(encoding="utf-8") == text


def test_committed_tables_are_what_their_results_give():
    """If this fails, run ``python -m benchmarks table --write`` and commit the pages."""
    pages = command._filled_pages()
    assert {page.name for page in pages} >= {"README.md", "norms.md", "activations.md", "slices.md"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert command.filled(page, RESULTS / "nvidia_h200.csv") == text, page.name


def test_committed_pictures_show_their_results():
    """If this fails, run ``python -m benchmarks report`` and commit the pictures."""
    paths = {f"images/{path.name}": path for path in (ROOT / "docs" / "images").iterdir()}
    digests = {name: drawing.digest_of(path) for name, path in paths.items()}
    charts = report.charts(RESULTS, "nvidia_h200")
    assert digests == {name: chart.digest() for name, chart in charts.items()}


def section(folder, title):
    return report.markdown(folder, "nvidia_h200").split(f"{title}\n")[1].split("\n#")[0]


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(
    ("metric", "title"), [("gpu_us", "### In GPU time"), ("loop_us", "### In a plain Python loop")]
)
def test_cases_that_a_peer_wins_are_listed_worst_first(metric, title, tmp_path):
    """The list names the fastest peer and has no ties."""
    times = [130.0, 100.0, 120.0, 200.0, 110.0, 100.0, 100.2, 100.0, 100.0]
    rows = rows_of(*CASES, providers=(*BOTH, "compile"))
    rows = [replace(row, **{metric: time}) for row, time in zip(rows, times, strict=True)]
    results.write(tmp_path / "nvidia_h200.csv", rows)
    lost = section(tmp_path, title)
    cells = f"{sized('8192x4096')} | bf16 | forward + backward"
    assert "A peer is faster by more than 0.5% in 2 of 3 cases" in lost
    assert table_lines(lost.partition("<details")[2]) == [
        f"| `rms_norm` | {cells} | 200.0 | 100.0 | torch.compile | 2.00 |",
        f"| `layer_norm` | {cells} | 130.0 | 100.0 | eager | 1.30 |",
    ]


@pytest.mark.parametrize("device", ["h200", "h100"])
def test_widths_are_listed_under_their_device_with_the_best_peer(device, tmp_path):
    """The table has bf16, forward and backward only. Some rows have no peer."""
    wide = Case(SPECS["rms_norm"], (6553, 5120), torch.bfloat16)
    odd = Case(SPECS["rms_norm"], (2047, 4097), torch.bfloat16)
    swept = [
        *rows_of(wide, gpu_us=100.0, floor_us=80.0),
        *rows_of(wide, providers=("eager",), gpu_us=300.0),
        *rows_of(wide, providers=("compile",), gpu_us=150.0),
        *rows_of(odd, gpu_us=50.0, floor_us=20.0),
        *rows_of(Case(SPECS["rms_norm"], (1638, 5120), torch.float32)),
    ]
    results.write(tmp_path / "nvidia_h200.csv", rows_of(LARGE))
    results.write(tmp_path / f"sweep_nvidia_{device}.csv", swept)
    where = " on NVIDIA H100" if device == "h100" else ""
    assert table_lines(section(tmp_path, f"## Widths of models{where}")) == [
        "| `rms_norm` | 2 | 0.57 (0.40 to 0.80) | 1.50 (1.50 to 1.50) |",
        f"| `rms_norm` | {sized('6553x5120')} | 100.0 | 0.80 | 1.50 |",
        f"| `rms_norm` | {sized('2047x4097')} | 50.0 | 0.40 |  |",
    ]


def data_of(rows):
    return figures.Data(rows, list(SPECS.values()), "bf16", "fwd_bwd")


def test_bandwidth_is_moved_bytes_over_time():
    rows = made_up.rows(axes=("hidden",), ops=("layer_norm",))
    (panel,) = figures.bandwidth(data_of(rows), ("hidden",)).panels
    (ours,) = [row for row in rows if (row.shape, row.provider) == ("8192x4096", "fusedops")]
    # There are five passes over 2^25 elements of two bytes.
    assert dict(panel.series["fusedops"])[4096] == pytest.approx(5 * 2**26 / ours.gpu_us / 1e6)
    assert panel.level == pytest.approx(4.26)


def test_lines_of_peers_have_labels(monkeypatch, tmp_path):
    """The lines show the peers' times over ours, in different colours."""
    pytest.importorskip("matplotlib")
    saved = []
    monkeypatch.setattr(drawing, "_save", lambda figure, chart, path: saved.append(figure))
    times = {"fusedops": 10.0, "eager": 30.0, "compile": 9.0}
    rows = made_up.rows(axes=("hidden",), ops=("gelu",))
    rows = [replace(row, gpu_us=times[row.provider]) for row in rows]
    drawing.draw(figures.speed_up(data_of(rows), ("hidden",)), tmp_path / "picture.svg")
    lines = {line.get_label(): set(line.get_ydata()) for line in saved[0].axes[0].get_lines()}
    assert lines == {"PyTorch eager": {3.0}, "torch.compile": {0.9}, "as fast as fusedops": {1.0}}
    assert len(set(COLOURS.values())) == len(COLOURS)
