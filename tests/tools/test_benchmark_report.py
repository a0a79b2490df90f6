"""What is made of results files: the comparison of two, the report, and the pictures."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import made_up_results as made_up
from benchmarks import __main__ as command
from benchmarks import comparing, drawing, figures, report, results, table
from benchmarks.cases import Case
from benchmarks.columns import COLOURS, COLUMNS, sized

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SPECS = made_up.SPECS
LARGE = Case(SPECS["layer_norm"], (8192, 4096), torch.bfloat16)
SMALL = Case(SPECS["layer_norm"], (8, 256), torch.bfloat16)
CASES = [Case(SPECS[op], (8192, 4096), torch.bfloat16) for op in ("layer_norm", "rms_norm", "gelu")]


# --- compare --------------------------------------------------------------------------------------


def rows_of(*cases, providers=("fusedops",), **changes):
    return [made_up.row(case, provider, **changes) for case in cases for provider in providers]


@pytest.mark.parametrize(("factor", "found"), [(1.029, False), (1.031, True), (0.5, False)])
@pytest.mark.parametrize("metric", ["gpu_us", "peak_mib"])
def test_a_regression_is_what_lies_beyond_the_threshold(metric, factor, found):
    (old,) = rows_of(LARGE)
    new = replace(old, **{metric: getattr(old, metric) * factor})
    verdict = comparing.compare([old], [new], 0.03)
    assert [(c.place, c.metric) for c in verdict.regressions] == (
        [(old.key[:4], metric)] if found else []
    )
    assert [c.metric for c in verdict.improvements] == ([metric] if factor < 0.9 else [])


def test_the_host_is_compared_on_small_tensors_alone():
    for case, metrics in ((SMALL, ["loop_us"]), (LARGE, [])):
        (old,) = rows_of(case)
        verdict = comparing.compare([old], [replace(old, loop_us=old.loop_us * 1.5)], 0.03)
        assert [c.metric for c in verdict.regressions] == metrics


def test_a_few_bytes_are_no_regression():
    (old,) = rows_of(SMALL, peak_mib=0.010)
    assert not comparing.compare([old], [replace(old, peak_mib=0.018)], 0.03).regressions
    assert comparing.compare([old], [replace(old, peak_mib=0.030)], 0.03).regressions


@pytest.mark.parametrize(
    ("eager", "verdict"), [(1.0, "regressions"), (0.8, "regressions"), (1.05, "doubtful")]
)
def test_what_eager_shares_is_in_doubt(eager, verdict):
    ours, theirs = rows_of(LARGE, providers=("fusedops", "eager"))
    new = [replace(ours, gpu_us=ours.gpu_us * 1.05), replace(theirs, gpu_us=theirs.gpu_us * eager)]
    found = comparing.compare([ours, theirs], new, 0.03)
    assert {name: len(getattr(found, name)) for name in ("regressions", "doubtful")} == {
        "regressions": 0,
        "doubtful": 0,
        verdict: 1,
    }


def test_eager_is_no_control_under_another_torch():
    ours, theirs = rows_of(LARGE, providers=("fusedops", "eager"))
    new = [replace(row, gpu_us=row.gpu_us * 1.05, torch="2.12.0") for row in (ours, theirs)]
    found = comparing.compare([ours, theirs], new, 0.03)
    assert len(found.regressions) == 1
    assert found.notes == ["torch is 2.11.0 in the old file, 2.12.0 in the new one"]


def test_another_bandwidth_is_said():
    old = rows_of(*CASES)
    new = [replace(row, floor_us=row.floor_us * 2.1) for row in old]
    (note,) = comparing.compare(old, new, 0.03).notes
    assert "the floor is 2.100 times the old one" in note
    assert not comparing.compare(
        old, [replace(row, floor_us=row.floor_us * 1.005) for row in old], 0.03
    ).notes


def test_compare_command(tmp_path, capsys):
    old, new = tmp_path / "nvidia_h200.csv", tmp_path / "sweep_nvidia_h100.csv"
    results.write(old, rows_of(*CASES[:2]))
    results.write(new, [replace(row, gpu_us=row.gpu_us * 1.02) for row in rows_of(*CASES[1:])])
    assert command.main(["compare", str(old), str(new)]) == 0
    said = capsys.readouterr().out
    assert "the files are named for NVIDIA H200 and for NVIDIA H100" in said
    assert "1 cases vanished from the new file:\n  layer_norm 8192x4096 bf16 fwd_bwd" in said
    assert "1 cases are new in the new file:\n  gelu 8192x4096 bf16 fwd_bwd" in said
    assert "GPU time: new over old 1.020 (geometric mean of 1 cases)" in said
    assert command.main(["compare", str(old), str(new), "--threshold", "1"]) == 1
    assert re.search(r"1 regressions beyond 1%:\n  rms_norm .* \+2\.0%", capsys.readouterr().out)
    results.write(tmp_path / "none.csv", [])
    assert command.main(["compare", str(old), str(tmp_path / "none.csv")]) == 2
    assert "no case of fusedops in common" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "compare", "report", "table"])
@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such file: {}"), ("a,b\n1,2\n", "{} has the columns ['a', 'b']")]
)
def test_a_file_that_holds_no_results(verb, text, said, tmp_path, capsys):
    """One line, exit code 2, and nothing written."""
    path, page = tmp_path / "nvidia_h200.csv", tmp_path / "report.md"
    if text is not None:
        path.write_text(text)
    arguments = [str(path)] * 2 if verb == "compare" else ["--output", str(path)]
    arguments += ["--page", str(page)] if verb == "report" else []
    assert command.main([verb, *arguments]) == 2
    seen = capsys.readouterr()
    assert (
        seen.err.startswith(f"benchmarks: {said.format(path)}")
        and seen.err.count("\n") == 1
        and not seen.out
    )
    assert not page.exists()


# --- the report -----------------------------------------------------------------------------------


def write_results(folder, *, swept=True):
    main = rows_of(*CASES, SMALL, providers=("fusedops", "eager", "compile"))
    results.write(folder / "nvidia_h200.csv", main)
    if swept:
        results.write(
            folder / "sweep_nvidia_h200.csv",
            made_up.rows(dtypes=("bf16",), ops=("rms_norm", "swiglu")),
        )
    return main


def test_the_committed_report_is_what_its_results_give():
    """If this fails, run ``python -m benchmarks report`` and commit what it wrote."""
    text = report.markdown(RESULTS, "nvidia_h200")
    assert (ROOT / "docs" / "report.md").read_text(encoding="utf-8") == text


def test_the_committed_tables_are_what_their_results_give():
    """If this fails, run ``python -m benchmarks table --write`` and commit what it wrote."""
    pages = command._filled_pages()
    assert {page.name for page in pages} >= {"README.md", "norms.md", "activations.md", "slices.md"}
    for page in pages:
        assert command.filled(page, RESULTS / "nvidia_h200.csv") == page.read_text(
            encoding="utf-8"
        ), page.name


def test_the_committed_pictures_show_their_results():
    """If this fails, run ``python -m benchmarks report`` and commit what it drew."""
    charts = report.charts(RESULTS, "nvidia_h200")
    drawn = {
        path.relative_to(ROOT / "docs").as_posix(): path
        for path in (ROOT / "docs" / "images").iterdir()
    }
    assert {name: drawing.digest_of(path) for name, path in drawn.items()} == {
        name: chart.digest() for name, chart in charts.items()
    }
    assert all(path.stat().st_size < 300_000 for path in drawn.values())
    assert "](docs/images/nvidia_h200_fractions.svg)" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


def test_a_page_is_filled_between_its_markers_alone():
    text = "a\n<!-- figures: one two -->\nold\n<!-- /figures -->\nb\n<!-- figures: models -->\n<!-- /figures -->\n"
    assert table.fill(text, str.upper) == (
        "a\n<!-- figures: one two -->\n\nONE TWO\n\n<!-- /figures -->\n"
        "b\n<!-- figures: models -->\n\nMODELS\n\n<!-- /figures -->\n"
    )


def test_the_report_depends_on_nothing_but_the_rows(tmp_path):
    """Neither on the rows' order in the file, nor on when or where it is written."""
    main = write_results(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    results.write(tmp_path / "elsewhere" / "nvidia_h200.csv", main[::-1])
    (tmp_path / "sweep_nvidia_h200.csv").rename(tmp_path / "elsewhere" / "sweep_nvidia_h200.csv")
    without = report.markdown(tmp_path, "nvidia_h200")
    text = report.markdown(tmp_path / "elsewhere", "nvidia_h200")
    write_results(tmp_path)
    assert report.markdown(tmp_path, "nvidia_h200") == text != without
    assert "sweep_nvidia_h200.csv" in text and "sweep_nvidia_h200.csv" not in without


def section(text, title):
    return text.split(f"{title}\n")[1].split("\n#")[0]


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_every_case_that_a_peer_wins_is_listed_worst_first(tmp_path):
    main = rows_of(*CASES, SMALL, providers=("fusedops", "eager"))
    changed = [
        replace(main[0], gpu_us=130.0, loop_us=100.0),
        replace(main[1], gpu_us=100.0, loop_us=130.0),  # layer_norm
        replace(main[2], gpu_us=200.0, loop_us=100.0),
        replace(main[3], gpu_us=100.0, loop_us=130.0),  # rms_norm
        replace(main[4], gpu_us=100.2, loop_us=100.0),
        replace(main[5], gpu_us=100.0, loop_us=130.0),  # gelu: a tie
        replace(main[6], gpu_us=2.0, loop_us=90.0),
        replace(main[7], gpu_us=3.0, loop_us=80.0),
    ]
    results.write(tmp_path / "nvidia_h200.csv", changed)
    text = report.markdown(tmp_path, "nvidia_h200")
    lost = section(text, "### In GPU time")
    assert (
        "A peer is faster by more than 0.5% in 2 of 4 cases" in lost
        and "are ties, and are not listed" in lost
    )
    shape = sized("8192x4096")
    assert table_lines(lost.partition("<details")[0]) == [
        "| `gelu` | 1 | 0 |  |  |",
        f"| `layer_norm` | 2 | 1 | 1.30 | {shape}, bf16, forward + backward |",
        f"| `rms_norm` | 1 | 1 | 2.00 | {shape}, bf16, forward + backward |",
    ]
    assert table_lines(lost.partition("<details")[2]) == [
        f"| `rms_norm` | {shape} | bf16 | forward + backward | 200.0 | 100.0 | eager | 2.00 |",
        f"| `layer_norm` | {shape} | bf16 | forward + backward | 130.0 | 100.0 | eager | 1.30 |",
    ]
    lost = section(text, "### In a plain Python loop").partition("<details")[2]
    assert table_lines(lost) == [
        f"| `layer_norm` | {sized('8x256')} | bf16 | forward + backward | 90.0 | 80.0 | eager | 1.12 |",
    ]


def test_the_fastest_peer_is_the_one_that_is_named(tmp_path):
    ours, eager, compiled = rows_of(LARGE, providers=("fusedops", "eager", "compile"))
    rows = [ours, replace(eager, gpu_us=ours.gpu_us / 2), replace(compiled, gpu_us=ours.gpu_us / 3)]
    results.write(tmp_path / "nvidia_h200.csv", rows)
    assert "torch.compile | 3.00 |" in section(
        report.markdown(tmp_path, "nvidia_h200"), "### In GPU time"
    )


def test_memory_that_a_peer_saves_is_listed(tmp_path):
    ours, eager = rows_of(LARGE, providers=("fusedops", "eager"))
    results.write(
        tmp_path / "nvidia_h200.csv",
        [replace(ours, peak_mib=101.5), replace(eager, peak_mib=100.0)],
    )
    lines = section(report.markdown(tmp_path, "nvidia_h200"), "### In memory")
    assert "| `layer_norm` | bf16 | forward + backward | eager | 1 | 1 | 101.5 | 100.0 |" in lines
    results.write(tmp_path / "nvidia_h200.csv", [replace(ours, peak_mib=100.5)])
    assert "Nowhere." in section(report.markdown(tmp_path, "nvidia_h200"), "### In memory")


def test_widths_are_listed_with_the_best_peer(tmp_path):
    """In the usual dtype and mode, those of a spec's widths alone; a peer may be absent."""
    wide, odd = [
        Case(SPECS["rms_norm"], sides, torch.bfloat16) for sides in ((6553, 5120), (2047, 4097))
    ]
    ours, eager, compiled = rows_of(
        wide, providers=("fusedops", "eager", "compile"), gpu_us=100.0, floor_us=80.0
    )
    results.write(tmp_path / "nvidia_h200.csv", rows_of(LARGE))
    rows = [
        ours,
        replace(eager, gpu_us=300.0),
        replace(compiled, gpu_us=150.0),
        *rows_of(odd, gpu_us=50.0, floor_us=20.0),
    ]
    results.write(
        tmp_path / "sweep_nvidia_h200.csv",
        [*rows, *rows_of(LARGE), replace(ours, shape="1638x5120", dtype="fp32")],
    )
    found = section(report.markdown(tmp_path, "nvidia_h200"), "## Widths of models")
    assert table_lines(found) == [
        "| `rms_norm` | 2 | 0.57 (0.40 to 0.80) | 1.50 (1.50 to 1.50) |",
        f"| `rms_norm` | {sized('6553x5120')} | 100.0 | 0.80 | 1.50 |",
        f"| `rms_norm` | {sized('2047x4097')} | 50.0 | 0.40 |  |",
    ]


def test_widths_and_tables_of_other_devices_are_listed(tmp_path):
    wide = Case(SPECS["rms_norm"], (6553, 5120), torch.bfloat16)
    results.write(tmp_path / "nvidia_h200.csv", rows_of(LARGE))
    results.write(tmp_path / "sweep_nvidia_h100.csv", rows_of(wide, gpu_us=100.0, floor_us=90.0))
    page = report.markdown(tmp_path, "nvidia_h200")
    assert (
        "| [sweep_nvidia_h100.csv](../benchmarks/results/sweep_nvidia_h100.csv) | NVIDIA H100 |"
        in page
    )
    assert table_lines(section(page, "## Widths of models on NVIDIA H100")) == [
        "| `rms_norm` | 1 | 0.90 (0.90 to 0.90) |  |",
        f"| `rms_norm` | {sized('6553x5120')} | 100.0 | 0.90 |  |",
    ]
    tables = "## The shapes with targets on NVIDIA H100"
    assert tables not in page
    results.write(tmp_path / "nvidia_h100.csv", rows_of(LARGE, gpu_us=80.0, floor_us=60.0))
    page = report.markdown(tmp_path, "nvidia_h200")
    assert "| [nvidia_h100.csv](../benchmarks/results/nvidia_h100.csv) | NVIDIA H100 |" in page
    assert "80.0 (0.75)" in section(page, tables)


def test_goals_are_stated_as_met_missed_or_not_measured(tmp_path):
    results.write(
        tmp_path / "nvidia_h200.csv", rows_of(CASES[0], gpu_us=1e4) + rows_of(CASES[1], gpu_us=1.0)
    )
    lines = section(report.markdown(tmp_path, "nvidia_h200"), "## Targets and results")
    assert "1 are met, 1 missed and 33 not measured" in lines
    missed, folded = lines.split("<details")
    assert re.search(r"`layer_norm` .* \| \*\*missed\*\* \|", missed) and "`rms_norm`" not in missed
    assert re.search(r"`rms_norm` .* \| met \|", folded)


def test_a_report_of_nothing_says_so(tmp_path, capsys):
    results.write(tmp_path / "none.csv", [])
    nothing = [
        "report",
        "--output",
        str(tmp_path / "none.csv"),
        "--page",
        str(tmp_path / "report.md"),
    ]
    assert command.main(nothing) == 1
    assert "holds no rows" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


# --- pictures -------------------------------------------------------------------------------------


def test_every_picture_that_the_report_shows_is_drawn(tmp_path):
    """Without a warning, such as one of a glyph that is missing or a layout that does not fit."""
    pytest.importorskip("matplotlib")
    write_results(tmp_path)
    page = tmp_path / "docs" / "report.md"
    page.parent.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            command.main(
                ["report", "--output", str(tmp_path / "nvidia_h200.csv"), "--page", str(page)]
            )
            == 0
        )
    shown = set(re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")))
    assert shown == {str(path.relative_to(page.parent)) for path in page.parent.rglob("*.svg")}
    assert {
        f"images/nvidia_h200_bandwidth_{axis}_bf16_fwd_bwd.svg" for axis in ("hidden", "rows")
    } <= shown
    charts = report.charts(tmp_path, "nvidia_h200")
    for path in shown:
        text = (page.parent / path).read_text(encoding="utf-8")
        assert drawing.digest_of(page.parent / path) == charts[path].digest()
        assert (
            "prefers-color-scheme:dark" in text and "#000000" not in text and "#ffffff" not in text
        )


@pytest.fixture
def drawn(monkeypatch):
    """The figures, kept instead of written."""
    plt = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(drawing, "_save", lambda figure, chart, path: kept.append(figure))
    monkeypatch.setattr(plt, "close", lambda figure: None)
    yield kept
    monkeypatch.undo()
    plt.close("all")


def data_of(rows, dtype="bf16"):
    return figures.Data(rows, list(SPECS.values()), dtype, "fwd_bwd")


def test_a_picture_of_lines_has_a_panel_a_line_the_roofline_and_one_legend(drawn, tmp_path):
    swept = made_up.rows(axes=("hidden",), ops=("layer_norm", "bias_dropout_add_ln"))
    rows = [replace(row, loop_us=2.0 * row.gpu_us) for row in swept]
    drawing.draw(figures.bandwidth(data_of(rows), ("hidden", "slices")), tmp_path / "picture.svg")
    (figure,) = drawn
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "layer_norm",
        "bias_dropout_add_ln",
    ]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["fusedops", "PyTorch eager", "torch.compile", "Liger-Kernel", "roofline"]
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert {
        name: lines[name].get_color() for name in ("fusedops", "torch.compile", "Liger-Kernel")
    } == {name: COLOURS[name] for name in ("fusedops", "torch.compile", "Liger-Kernel")}
    (ours,) = [
        row for row in rows if row.key == ("layer_norm", "8192x4096", "bf16", "fwd_bwd", "fusedops")
    ]
    at = dict(zip(*lines["fusedops"].get_data(), strict=True))[4096]
    assert at == pytest.approx(
        5 * 2**25 * 2 / ours.gpu_us / 1e6
    )  # five passes over 2^25 elements of two bytes
    assert list(lines[names[-1]].get_ydata()) == pytest.approx([4.26, 4.26])


def test_speed_ups_are_the_peers_time_over_ours(drawn, tmp_path):
    rows = made_up.rows(axes=("hidden",), ops=("gelu",))
    rows = [
        replace(row, gpu_us={"fusedops": 10.0, "eager": 30.0, "compile": 9.0}[row.provider])
        for row in rows
    ]
    drawing.draw(figures.speed_up(data_of(rows), ("hidden",)), tmp_path / "picture.svg")
    lines = {line.get_label(): set(line.get_ydata()) for line in drawn[0].axes[0].get_lines()}
    assert lines == {"PyTorch eager": {3.0}, "torch.compile": {0.9}, "as fast as fusedops": {1.0}}


def test_dots_are_drawn_for_those_that_were_measured(drawn, tmp_path):
    rows = rows_of(SMALL, LARGE, providers=("fusedops", "eager"), peak_mib=96.0, loop_us=77.0)
    shape = f"layer_norm  {sized('8192x4096')}"
    charts = (figures.peak_memory(data_of(rows)), figures.host_time(data_of(rows)))
    for chart, name, number in zip(
        charts, (shape, "layer_norm"), ("1.5", "77"), strict=True
    ):  # 96 MiB are 1.5 tensors
        drawing.draw(chart, tmp_path / "picture.svg")
        assert [text.get_text() for text in drawn[-1].axes[0].texts] == [name, number]
        assert [text.get_text() for text in drawn[-1].legends[0].get_texts()] == [
            "fusedops",
            "PyTorch eager",
        ]


def test_the_largest_shape_of_the_typical_width_stands_for_an_operator():
    small, large = [
        Case(SPECS["layer_norm"], sides, torch.bfloat16) for sides in ((256, 4096), (8192, 4096))
    ]
    for cases in ((small, large), (large, small)):
        chart = figures.fractions(data_of(rows_of(*cases, gpu_us=100.0, floor_us=50.0)))
        assert chart.groups == {f"layer_norm  {sized('8192x4096')}": {"fusedops": 0.5}}


def test_a_digest_tells_charts_of_other_numbers_apart():
    rows = rows_of(LARGE, gpu_us=100.0, floor_us=50.0)
    chart = figures.fractions(data_of(rows))
    assert chart.digest() == figures.fractions(data_of(rows)).digest()
    assert chart.digest() != figures.fractions(data_of([replace(rows[0], gpu_us=100.1)])).digest()
    assert chart.digest() != replace(chart, title="Another").digest()


def test_nothing_is_drawn_of_nothing():
    rows = made_up.rows(axes=("hidden",), ops=("gelu",))
    assert figures.bandwidth(data_of(rows, "fp32"), ("hidden",)) is None
    assert figures.bandwidth(data_of(rows), ("rows",)) is None
    assert figures.host_time(data_of(rows)) is None
    assert figures.fractions(data_of(rows, "fp32")) is None


def test_columns_have_colours_of_their_own():
    assert set(COLOURS) == set(COLUMNS)
    assert len(set(COLOURS.values())) == len(COLOURS)
