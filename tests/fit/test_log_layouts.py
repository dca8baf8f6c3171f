"""What is read of the logs of other tools: small files in the layout of each, and the outcome in read.yaml."""

from pathlib import Path

import pytest
import yaml

from megatron_scalerl.fit.inputs import read_curves

LOGS = Path(__file__).parents[1] / "data/logs"
READ = yaml.safe_load((LOGS / "read.yaml").read_text())


@pytest.mark.parametrize("name", READ)
def test_a_log_of_another_tool(name):
    expected = READ[name]
    path = LOGS / name
    if "refused" in expected:
        with pytest.raises(ValueError) as caught:
            read_curves(path)
        assert str(path) in str(caught.value) and expected["refused"] in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    (curve,) = read_curves(path)
    computes = expected["computes"]
    assert f"{len(computes)} points of {expected['score']} over {expected['axis']} (" in curve.read
    assert curve.compute == pytest.approx(computes) and curve.pass_rate == pytest.approx(expected["rates"], abs=1e-6)
    assert curve.initial == pytest.approx(expected.get("initial"))
    assert all(words in curve.read for words in expected.get("says", ()))
    assert list(curve.notes) == expected.get("notes", []) and "percent, divided" not in curve.read


def test_every_file_has_its_outcome():
    assert {path.name for path in LOGS.iterdir()} == {*READ, "read.yaml"}
