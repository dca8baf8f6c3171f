"""Weight updates of a run beside the planner's prediction: medians by kind, bounds where a rate is stated, and where
there is none."""

import json
from pathlib import Path

import pytest
import yaml
from report_runs import printed_report, write_run

from megatron_scalerl.page.predicted import predicted_update
from megatron_scalerl.page.update_report import NO_RATE, PredictedUpdate, updates_of
from megatron_scalerl.recipe.file import dump_recipe, load_recipe

ROOT = Path(__file__).parents[2]
PREDICTED = PredictedUpdate(
    bytes=16_000_000_000, senders=4, most_sent=5_000_000_000, most_received=8_000_000_000, seconds=0.2
)
STATED, UNSTATED = {"weights": {"link_gb_s": 50.0}}, {"weights": {"link_gb_s": 0.0}}


def record(**changes):
    return {
        "weight_bytes": 16e9,
        "weight_whole_bytes": 16e9,
        "weight_most_sent_bytes": 4e9,
        "weight_most_received_bytes": 8e9,
        "weight_gb_per_s": 40.0,
        "weight_pause_seconds": 0.1,
        "weight_update_seconds": 0.4,
        "engine_paused_seconds": 0.6,
        "publish_seconds": 0.7,
        **changes,
    }


def cells(rows, recipe, predicted):
    found = updates_of(rows, recipe, predicted)
    return {name: cells for name, *cells in found.table.rows}, found


def test_medians_of_whole_updates_and_of_those_of_changes_beside_the_prediction():
    changes = {"weight_bytes": 16e7, "weight_most_received_bytes": 8e7, "weight_most_sent_bytes": 4e7}
    small = [record(**changes, weight_update_seconds=s, weights_changed=0.01) for s in (0.01, 0.03, 0.02)]
    whole = [record(weight_connect_seconds=2.0), record(weight_update_seconds=0.8), record(weight_update_seconds=0.5)]
    rows, found = cells([*whole, {"step": 4}, *small], STATED, PREDICTED)
    assert found.table.columns == ("", "predicted", "measured", "measured, of changes")
    assert rows["updates"] == ["", "3", "3"]
    assert rows["bytes of all senders"] == ["16 GB", "16 GB", "160 MB"]
    assert rows["most sent by a rank"] == ["5 GB", "4 GB", "40 MB"]
    assert rows["most received by a worker"] == ["8 GB", "8 GB", "80 MB"]
    assert rows["bytes over those of all values"] == ["", "1", "0.01"]
    assert rows["elements that changed"] == ["", "–", "1 %"]
    assert rows["lower bound at 50 GB/s"] == ["0.16 s", "0.16 s", "0.0016 s"]
    assert rows["GB/s"] == ["80", "40", "40"]
    assert rows["phase update"] == ["0.2 s", "0.5 s", "0.02 s"]
    assert rows["phase connect"] == ["", "2 s", "–"] and "phase stage" not in rows
    assert rows["phase update over the bound"] == ["1.25", "3.12", "12.5"]
    assert rows["engines paused"] == ["", "0.6 s", "0.6 s"]
    assert len(found.notes) == 1


def test_a_staged_update_is_sent_while_it_is_staged():
    rows, _ = cells([record(weight_stage_seconds=0.32)], STATED, PREDICTED)
    assert rows["phase stage"] == ["0.2 s", "0.32 s"] and rows["phase update"] == ["", "0.4 s"]
    assert rows["phase stage over the bound"] == ["1.25", "2"]


def test_without_a_rate_no_seconds_are_predicted():
    rows, found = cells([record()], UNSTATED, PREDICTED)
    assert rows["GB/s"] == [NO_RATE, "40"]
    assert {"lower bound", "phase update over the bound", "elements that changed"}.isdisjoint(rows), "nothing to show"
    assert rows["phase update"] == [NO_RATE, "0.4 s"] and rows["bytes of all senders"] == ["16 GB", "16 GB"]
    assert any(NO_RATE in note for note in found.notes)


def write_updates(folder, recipe):
    write_run(folder)
    stored = yaml.safe_load(dump_recipe(load_recipe(ROOT / "recipes" / f"{recipe[0]}.yaml", recipe[1:])))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(stored))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **record()}) + "\n")


@pytest.mark.slow
def test_the_report_of_a_run_has_the_planner_s_prediction(tmp_path):
    config = f"policy.path={ROOT / 'recipes' / 'configs' / 'Llama-3.1-8B'}"
    write_updates(tmp_path, ("scalerl_llama3_8b", config, "weights.link_gb_s=25"))
    found = predicted_update(tmp_path)
    assert isinstance(found, PredictedUpdate) and found.senders == 2
    assert found.bytes == found.most_received == pytest.approx(16_060_522_496, rel=1e-4)  # and alignment
    assert found.seconds == pytest.approx(0.70, abs=0.005)  # as `megatron-scalerl plan` assumes: docs/planning.md
    text = printed_report(tmp_path)
    assert "Weight updates" in text and "No prediction" not in text
    line = next(line for line in text.splitlines() if "most sent by a rank" in line)
    assert "8.03 GB" in line and "4 GB" in line


@pytest.mark.slow
def test_a_damaged_line_of_the_metrics_costs_the_table_alone(tmp_path):
    write_updates(tmp_path, ("scalerl_llama3_8b", f"policy.path={tmp_path}"))
    (tmp_path / "metrics.jsonl").write_text('{"step":1\n{"step":2}\n')
    text = printed_report(tmp_path)
    assert "No weight updates: " in text and "error of the forecast" in text


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("policy.path=runs/nowhere",), "expected config.json in runs/nowhere, found none"),
        (("policy.path={folder}",), "No prediction: "),
    ],
)
def test_a_run_whose_update_cannot_be_predicted_says_why(tmp_path, overrides, reason):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    write_updates(tmp_path, ("scalerl_llama3_8b", *(each.format(folder=tmp_path) for each in overrides)))
    found = predicted_update(tmp_path)
    assert isinstance(found, str) and reason in found and "\n" not in found
