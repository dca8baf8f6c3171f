"""The command line, the figures and the report."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command
from programs import ended, printed
from published import CURVES

ROOT = Path(__file__).resolve().parents[2]
main = command("fit")
POINTS = str(CURVES / "points.csv")
RECIPES = [POINTS, "--series", "figure=fig2_recipes", "--r0", "0.4", "--prompts", "1000", "--generations", "16"]
SCALERL = [*RECIPES, "--series", "series=ScaleRL"]


def tool(*arguments):
    return ended(sys.executable, "-m", "megatron_scalerl", "fit", *arguments)


def test_json_to_standard_output_and_nothing_else(capsys):
    assert main([*SCALERL, "--fit-until", "8000", "--predict", "12000,16000", "--json", "-"]) == 0
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)["fits"]
    assert captured.err == ""
    assert {"rmse", "warnings"} <= set(found)
    assert (found["name"], found["method"], found["initial"], found["n_points"]) == ("ScaleRL", "robust", 0.4, 22)
    assert set(found["intervals"]) == {"asymptote", "exponent", "midpoint"}
    for key, (lo, hi) in found["intervals"].items():
        assert lo < found[key] < hi
    assert [p["compute"] for p in found["predictions"]] == [12000.0, 16000.0]
    for forecast in found["predictions"]:
        assert forecast["lo"] < forecast["pass_rate"] < forecast["hi"]
    assert found["predictions"][1]["lo"] < 0.609 < found["predictions"][1]["hi"]
    assert found["verdict"].split(":")[0] in ("go on", "stop", "too early to say")


def test_both_methods_and_a_fixed_asymptote(capsys):
    answers = {}
    for method in ("robust", "paper"):
        assert main([*SCALERL, "--method", method, "--fixed-asymptote", "0.605", "--json", "-"]) == 0
        answers[method] = json.loads(capsys.readouterr().out)["fits"][0]
        assert answers[method]["asymptote"] == 0.605 and answers[method]["method"] == method
    assert answers["paper"]["n_points"] == answers["robust"]["n_points"] - 2  # before 1.5k GPU-hours


@pytest.mark.slow
def test_the_reference_comes_first(capsys, tmp_path):
    chosen = [*RECIPES, "--series", "series=*", "--compare", "--reference", "ScaleRL", "--json", "-"]
    assert main([*chosen, "--plot", str(tmp_path / "runs.png")]) == 0
    assert all((tmp_path / name).exists() for name in ("runs.png", "runs.svg"))
    comparison = json.loads(capsys.readouterr().out)["comparison"]
    arms = comparison["arms"]
    assert [arm["name"] for arm in arms][:2] == ["ScaleRL", "Magistral"] and "reference" in arms[0]["summary"]
    assert [arm["reference"] for arm in arms] == [None, "ScaleRL", "ScaleRL"]
    assert comparison["falling"] == {name: [name] for name in ("DeepSeek-GRPO", "Qwen2.5-DAPO")}
    assert main([*chosen[:-2], "--reference", "Magistral=MiniMax", "--json", "-"]) == 0
    arms = json.loads(capsys.readouterr().out)["comparison"]["arms"]
    assert {arm["name"]: arm["reference"] for arm in arms}["Magistral"] == "MiniMax"
    assert main([*RECIPES, "--series", "series=*", "--compare", "--reference", "None"]) == 2


@pytest.mark.slow
def test_report_is_one_file_with_its_figures_inside(tmp_path):
    page = tmp_path / "report.html"
    assert main([*SCALERL, "--fit-until", "8000", "--html", str(page), "--json", str(tmp_path / "a.json")]) == 0
    html = page.read_text()
    assert len(re.findall("<img ", html)) == 1
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html) and "<script" not in html
    for image in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html):
        assert base64.b64decode(image).lstrip().startswith(b"<?xml")
    assert "ScaleRL" in html and 'class="verdict' in html
    assert json.loads((tmp_path / "a.json").read_text())["fits"][0]["name"] == "ScaleRL"


def test_names_with_rich_markup_are_printed_literally(tmp_path, capsys):
    table = tmp_path / "t.csv"
    table.write_text("run,gpu_hours,pass_rate\n" + "".join(f"[red]x,{n},{0.4 + n / 50}\n" for n in range(1, 9)))
    assert main([str(table), "--series", "run=*", "--r0", "0.4"]) == 0
    assert "│ [red]x │" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    table = tmp_path / "bad.csv"
    table.write_text("gpu_hours,pass_rate\n1,0.4\n2,1.5\n")
    answer = tool(table, "--json", "-")
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.startswith(f"megatron-scalerl: {table}: row 3: pass_rate: 1.5 ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "extra",
    ["--predict a", "--series ScaleRL", "--r0 1.5", "--fit-from 1e9", "--plot figure.bmp"],
)
def test_bad_options_are_exit_code_2(extra, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SCALERL, *extra.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "option, package", [("--html", "jinja2"), ("--html", "matplotlib"), ("--plot", "matplotlib")]
)
def test_a_missing_package_is_reported_before_the_fit(option, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        main([*SCALERL, option, str(tmp_path / "out.png")])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert f"package '{package}' is not installed" in captured.err


def table_of(tmp_path, rates, name="run"):
    path = tmp_path / f"{name}.csv"
    path.write_text("step,accuracy\n" + "".join(f"{10 * n},{rate}\n" for n, rate in enumerate(rates, start=1)))
    return str(path)


COLLAPSED = [0.1, 0.2, 0.26, 0.3, 0.32, 0.33, 0.34, 0.2, 0.0, 0.0]


def test_what_was_read_comes_first_and_is_in_the_json_with_its_unit(tmp_path, capsys):
    path = table_of(tmp_path, [0.1 + 0.02 * n for n in range(12)])
    assert main([path, "--json", str(tmp_path / "new/fit.json")]) == 0
    printed = capsys.readouterr().out
    line = "read run: table, 12 points of accuracy over step (10 to 120 steps)"
    assert printed.splitlines()[0] == line and "120 more steps" in printed and "GPU-hours" not in printed
    (found,) = json.loads((tmp_path / "new/fit.json").read_text())["fits"]
    assert (found["read"], found["unit"]) == (line, "steps") and "GPU" not in found["verdict"]


@pytest.mark.parametrize("first", [0.81, 0.9])
def test_the_papers_method_says_that_its_grid_ends_below_the_first_point(tmp_path, capsys, first):
    path = table_of(tmp_path, [first, first, first + 0.02, first + 0.04, first + 0.05])
    assert main([path, "--method", "paper"]) == 2
    assert f"method paper: R_0 is {first:.3f}; " in capsys.readouterr().err


def test_a_collapse_is_said_with_both_its_ends(tmp_path, capsys):
    assert main([table_of(tmp_path, COLLAPSED), "--backtest"]) == 0
    printed = capsys.readouterr().out
    assert "verdict: stop: the pass rate has fallen from 0.330 at 60 to 0.000 at the end;" in printed
    assert "which no forecast from before the fall predicted" in printed and re.search(r"error was 0\.2\d\d", printed)
    assert main([table_of(tmp_path, [*COLLAPSED[:7], 0.0])]) == 0
    assert "the last pass rate, 0.000, is less than half of each of the three before" in capsys.readouterr().out


def test_a_ceiling_that_the_start_is_near_is_reached_at_the_start(tmp_path, capsys):
    assert main([table_of(tmp_path, [0.96, 0.93, 0.95, 0.94, 0.95, 0.96, 0.95, 0.94, 0.95, 0.95])]) == 0
    assert "start [start, start]" in capsys.readouterr().out


@pytest.mark.parametrize("rates", [[0.0] * 9, [1.0] * 9, [0.5] * 9])
def test_a_constant_curve_is_fitted(tmp_path, capsys, rates):
    assert main([table_of(tmp_path, rates)]) == 0
    assert "verdict: stop: 90 more steps buy +0.00" in capsys.readouterr().out


def test_runs_over_different_units_are_refused(tmp_path, capsys):
    hours = tmp_path / "hours.csv"
    hours.write_text("gpu_hours,pass_rate\n1,0.4\n2,0.5\n3,0.6\n")
    assert main([table_of(tmp_path, [0.1, 0.2, 0.3]), str(hours)]) == 2
    assert "steps (run), gpu_hours (hours)" in capsys.readouterr().err


def test_too_few_points_are_one_line(tmp_path, capsys):
    assert main([table_of(tmp_path, [0.5])]) == 2
    assert capsys.readouterr().err.endswith(
        "run: 1 points with compute > 0 are in the window; a fit needs at least 3 "
        "(read run: table, 1 points of accuracy over step (10 to 10 steps))\n"
    )


def test_the_report_has_what_was_read_the_evaluation_and_why_its_lines_differ(tmp_path, capsys):
    page = tmp_path / "r.html"
    name = "<b>a_run_with_a_long_name" * 6
    assert main([table_of(tmp_path, COLLAPSED, name), "--fit-until", "70", "--html", str(page)]) == 0
    html, printed = page.read_text(), capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("mean absolute error")]
    escaped = name.replace("<b>", "&lt;b&gt;")
    assert line in html and f"{escaped}: points that were not fitted" in html and name[:4] not in html
    assert f"Read {escaped}: table" in html and "Dashed" not in html  # the figure has the sentence
    assert "overflow-wrap: anywhere" in html


@pytest.mark.parametrize(
    "names",
    [
        ["short"],
        ["n" * 150],
        ["a run with words " * 9],
        ["Qwen3_8B_" * 7 + " words" * 9],
        ["x" * 90, "y" * 90, "z" * 90],
    ],
)
def test_titles_and_legends_of_figures_lie_inside_and_off_the_points(names, tmp_path, monkeypatch):
    from megatron_scalerl.fit import plot
    from megatron_scalerl.fit.forecast import fit

    drawn = []
    monkeypatch.setattr(plot, "save", lambda figure, path: drawn.append(figure))
    compute = [10.0 * n for n in range(1, len(COLLAPSED) + 1)]
    plot.plot_forecast(tmp_path / "f.png", [fit(compute, COLLAPSED, initial=0.1, name=name) for name in names])
    (figure,) = drawn
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    assert legend.get_title().get_text().startswith("Solid: the fitted sigmoid. Dashed: the forecast")
    for text in (axes.title, *legend.get_texts(), legend.get_title()):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, text
    assert not legend.get_window_extent().overlaps(axes.get_window_extent()) and axes.get_legend() is None


def test_a_large_file_is_fitted_without_torch_and_as_many_points(tmp_path):
    path = tmp_path / "large.csv"
    path.write_text("_step,train/reward\n" + "".join(f"{n},{0.1 + n / 50_000:.5f}\n" for n in range(1, 20_001)))
    code = "import sys; from megatron_scalerl.__main__ import program; program(); assert 'torch' not in sys.modules"
    answer = printed(sys.executable, "-c", code, "fit", path, "--json", "-")
    assert json.loads(answer)["fits"][0]["n_points"] == 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit_a_curve.py", "forecast_100k.sh"])
def test_examples_run(name, tmp_path):
    if name.endswith(".py"):
        command, figure = [sys.executable, str(ROOT / "examples" / name), str(tmp_path / "f.png")], "f.png"
    else:
        command, figure = ["bash", str(ROOT / "examples" / name), str(tmp_path)], "forecast_100k.png"
    environment = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "measured" in answer.stdout and (tmp_path / figure).exists()
