"""The file of measured constants: there and back, what a plan makes of it, and one line for every mistake."""

import json

import pytest
from command_line import command, refusal
from recipe_files import ROOT

from megatron_scalerl.plan.assumptions import Assumptions, default_sources, described
from megatron_scalerl.plan.assumptions_file import Measured, read_assumptions

main = command("plan")
H100 = "NVIDIA H100 80GB HBM3"
RECIPE = [str(ROOT / "recipes/scalerl_llama3_8b.yaml"), "--gpus", "80", "--no-build"]


MEASURED = f"""
gpu: {H100}
layers: plain
written: 2026-11-21
assumptions:
  dense_utilization:
    value: 0.2
    source: tests/gpu [8B shape], 4 layers
  runtime_gib:
    value: 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "measured.yaml"
    path.write_text(MEASURED)
    return path


def planned(capsys, *argv):
    assert main([*RECIPE, "--json", "-", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_file_is_read(file):
    found = read_assumptions(file)
    assert (found.gpu, found.layers) == ("h100-80g", "plain")
    assert found.assumptions == {
        "dense_utilization": Measured(value=0.2, source="tests/gpu [8B shape], 4 layers"),
        "runtime_gib": Measured(value=2),
    }
    assert found.source(file, "dense_utilization") == f"{file} of 2026-11-21: tests/gpu [8B shape], 4 layers"


def test_every_assumption_can_be_in_the_file(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(json.dumps({"gpu": "gb200", "assumptions": {f.name: {"value": 1.0} for f in described()}}))
    assert read_assumptions(path).assumptions == {f.name: Measured(value=1.0) for f in described()}


@pytest.mark.slow
def test_the_file_overrides_defaults_and_a_flag_the_file(file, capsys):
    plan = planned(capsys, "--assumptions", file, "--runtime-gib", "5", "--fragmentation", "0.08")
    rows = plan["assumptions"]
    assert rows["dense_utilization"] == {
        "value": 0.2,
        "source": read_assumptions(file).source(file, "dense_utilization"),
    }
    assert str(file) in rows["dense_utilization"]["source"] and "[8B shape]" in rows["dense_utilization"]["source"]
    assert rows["runtime_gib"] == {"value": 5.0, "source": "given on the command line"}
    assert rows["fragmentation"]["source"] == rows["runtime_gib"]["source"], "a default's value, too"
    assert rows["packing"] == {"value": Assumptions().packing, "source": default_sources()["packing"]}
    assert plan["layout"]["layers"] == "plain"
    without = planned(capsys, "--layers", "plain", "--runtime-gib", "5")
    assert plan["work"]["train_seconds"] == pytest.approx(2 * without["work"]["train_seconds"])
    assert plan["trainer_memory"] == without["trainer_memory"]


@pytest.mark.slow
def test_the_gpu_and_the_layers_are_those_of_the_file(tmp_path, capsys):
    path = tmp_path / "h200.yaml"
    path.write_text(GOOD.replace(H100, "NVIDIA H200\nlayers: te"))
    assert planned(capsys, "--assumptions", path)["gpu"]["name"].startswith("NVIDIA H200")
    for flags, said in ((["--gpu", "h100-80g"], "measured for h200"), (["--layers", "plain"], "measured for te")):
        assert main([*RECIPE, "--assumptions", str(path), *flags]) == 2
        assert said in capsys.readouterr().err
    assert planned(capsys, "--assumptions", path, "--gpu", "h200", "--layers", "te")["fits"]


GOOD = f"gpu: {H100}\nassumptions:\n  packing:\n    value: 0.8\n"


@pytest.mark.parametrize(
    "text, said",
    [
        ("gpu: [", "line 1: not valid YAML"),
        (
            GOOD.replace(H100, "NVIDIA H100 PCIe"),
            "gpu: the planner does not know 'NVIDIA H100 PCIe'; it knows b300, gb200, h100-80g, h200",
        ),
        (
            GOOD.replace("packing", "paking"),
            "assumptions: paking is not an assumption; the nearest is packing",
        ),
        (f"gpu: {H100}\n", ": Field required"),
        (f"gpu: {H100}\nassumptions: {{}}\n", "assumptions: {}: Dictionary should have at least 1 item"),
        (GOOD.replace("0.8", ".nan"), "assumptions.packing.value: nan: Input should be a finite number"),
        (GOOD.replace("0.8", "80"), "packing: 80.0: Input should be less than or equal to 1"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(text, said, tmp_path, capsys):
    path = tmp_path / "measured.yaml"
    path.write_text(text)
    line = refusal(["plan", *RECIPE, "--assumptions", path], capsys)
    assert f"{path}: " in line and said in line and line.startswith("megatron-scalerl: ")


def test_a_flag_has_the_same_range(capsys):
    line = refusal(["plan", *RECIPE, "--dense-utilization", "0"], capsys)
    assert "dense_utilization: 0.0: Input should be greater than 0" in line
