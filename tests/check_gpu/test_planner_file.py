"""`--planner FILE`, then `plan --assumptions FILE`: what was measured is what the plan says."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from test_gpu_report import report, result

from megatron_scalerl.__main__ import main
from megatron_scalerl.check_gpu.report import check_target, write_planner

RECIPE = Path(__file__).parents[2] / "recipes" / "scalerl_llama3_8b.yaml"
H100 = ("NVIDIA H100 80GB HBM3",)


def console():
    return Console(file=io.StringIO())


def measured(**data):
    return result("shapes-te", {"8b MFU": "measured"}, **data)


@pytest.mark.slow
def test_a_plan_takes_what_was_measured(tmp_path):
    path = tmp_path / "h100.yaml"
    write_planner(report(measured(dense_utilization=0.2, runtime_gib=1.5), gpus=H100), path, console())
    out = tmp_path / "plan.json"
    assert (
        main(["plan", str(RECIPE), "--gpus", "80", "--no-build", "--assumptions", str(path), "--json", str(out)]) == 0
    )
    found = json.loads(out.read_text())["assumptions"]
    assert (found["dense_utilization"]["value"], found["runtime_gib"]["value"]) == (0.2, 1.5)
    assert found["dense_utilization"]["from"] == "file" and found["packing"]["from"] == "default"
    assert "check-gpu" in found["dense_utilization"]["source"]


def test_an_impossible_figure_is_left_out(tmp_path):
    path = tmp_path / "h100.yaml"
    write_planner(report(measured(dense_utilization=0.2, runtime_gib=-1.0), gpus=H100), path, console())
    assert "runtime_gib" not in path.read_text() and "dense_utilization" in path.read_text()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (report(measured(), gpus=H100), "expected measured constants in the report, found none"),
        (report(measured(dense_utilization=0.2), gpus=()), "expected measured constants"),
        (report(measured(dense_utilization=0.2), gpus=("NVIDIA A10",)), "found NVIDIA A10"),
        (report(measured(dense_utilization=0.2), gpus=(*H100, "NVIDIA H200")), "HBM3, NVIDIA H200"),
    ],
)
def test_unusable_constants_are_not_written(tmp_path, found, text):
    with pytest.raises(ValueError, match=text):
        write_planner(found, tmp_path / "p.yaml", console())
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_rejected_before_the_run(tmp_path):
    check_target(tmp_path / "p.yaml", rehearsed=False)
    with pytest.raises(ValueError, match="expected its folder to exist"):
        check_target(tmp_path / "no" / "p.yaml", rehearsed=False)
