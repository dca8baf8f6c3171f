"""The command line, the figures and the report."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command

from megatron_scalerl.fit.published import DATA

ROOT = Path(__file__).resolve().parents[2]
main = command("fit")
POINTS = str(DATA / "points.csv")
RECIPES = [POINTS, "--series", "figure=fig2_recipes", "--r0", "0.4", "--prompts", "1000", "--generations", "16"]
SCALERL = [*RECIPES, "--series", "series=ScaleRL"]


def tool(*arguments):
    command = [sys.executable, "-m", "megatron_scalerl", "fit", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


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
    names = ("runs.png", "runs.svg", "runs_efficiency.png", "runs_comparison.png")
    assert all((tmp_path / name).exists() for name in names)
    arms = json.loads(capsys.readouterr().out)["comparison"]["arms"]
    assert [arm["name"] for arm in arms][:2] == ["ScaleRL", "DeepSeek-GRPO"] and "reference" in arms[0]["summary"]
    assert [arm["reference"] for arm in arms] == [None, *["ScaleRL"] * 4]
    assert main([*chosen[:-2], "--reference", "Magistral=MiniMax", "--json", "-"]) == 0
    arms = json.loads(capsys.readouterr().out)["comparison"]["arms"]
    assert {arm["name"]: arm["reference"] for arm in arms}["Magistral"] == "MiniMax"
    assert main([*RECIPES, "--series", "series=*", "--compare", "--reference", "None"]) == 2


@pytest.mark.slow
def test_report_is_one_file_with_its_figures_inside(tmp_path):
    page = tmp_path / "report.html"
    assert main([*SCALERL, "--fit-until", "8000", "--html", str(page), "--json", str(tmp_path / "a.json")]) == 0
    html = page.read_text()
    assert len(re.findall("<img ", html)) == 2
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html) and "<script" not in html
    for image in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html):
        assert base64.b64decode(image).lstrip().startswith(b"<?xml")
    assert "ScaleRL" in html and 'class="verdict' in html
    assert json.loads((tmp_path / "a.json").read_text())["fits"][0]["name"] == "ScaleRL"


def test_names_are_escaped_in_html(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("run,gpu_hours,pass_rate\n" + "".join(f"<b>x,{n},{0.4 + n / 50}\n" for n in range(1, 9)))
    page = tmp_path / "r.html"
    assert main([str(table), "--series", "run=<b>x", "--r0", "0.4", "--html", str(page)]) == 0
    assert "<b>x" not in page.read_text() and "&lt;b&gt;x" in page.read_text()


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
    line = "row 3: pass_rate: expected a pass rate in [0, 1], found 1.5"
    assert answer.stderr == f"megatron-scalerl: {table}: {line}\n"


@pytest.mark.parametrize(
    "extra",
    [["--predict", "a"], ["--series", "ScaleRL"], ["--r0", "1.5"], ["--fit-from", "1e9"], ["--plot", "figure.bmp"]],
)
def test_bad_options_are_exit_code_2(extra, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SCALERL, *extra]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_warnings_are_exit_code_0(capsys):
    assert main([*SCALERL, "--fit-until", "2000", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"][0]["warnings"]


@pytest.mark.parametrize(
    ("option", "package"), [("--html", "jinja2"), ("--html", "matplotlib"), ("--plot", "matplotlib")]
)
def test_a_missing_package_is_reported_before_the_fit(option, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        main([*SCALERL, option, str(tmp_path / "out.png")])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert f"package '{package}' is not installed" in captured.err


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
