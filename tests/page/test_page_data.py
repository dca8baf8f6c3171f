"""What the page draws of a run: by offset while the run writes, again from the start after a restart."""

import subprocess
import sys

import pytest
from json_lines import append
from page_runs import evaluation_record, step_record, write_page_run, write_plain_run
from report_runs import write_run

from megatron_scalerl.page import forecasts as forecasts_module
from megatron_scalerl.page.forecasts import Forecasts
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.growing_file import Rows, validation_row
from megatron_scalerl.page.run_data import RunData


def read(run):
    """The records of a run."""
    data = RunData(run)
    assert data.update()
    return data


def small(line):
    """The number in a line; ValueError from 30 on."""
    if int(line) >= 30:
        raise ValueError("expected less")
    return int(line)


def test_a_file_is_read_by_offset_and_a_torn_line_when_it_is_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    growing = Rows(path, small)
    assert not growing.update()
    path.write_text("1\n2\n3")
    assert growing.update() and growing.rows == [1, 2] and growing.problem == ""
    assert not growing.update()
    append(path, "4\n5\n")
    assert growing.update() and growing.rows == [1, 2, 5]
    assert growing.problem == "rows.jsonl byte 4: expected less" and growing.generation == 0


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_a_restart_shortened_is_read_again(tmp_path, replaced):
    path = tmp_path / "rows.jsonl"
    path.write_text("1\n30\n2\n")
    growing = Rows(path, small)
    assert growing.update() and growing.problem
    if replaced:
        (tmp_path / "new").write_text("1\n7\n0000\n")  # no shorter, but another file
        (tmp_path / "new").replace(path)
    else:
        path.write_text("1\n")
    assert growing.update() and growing.rows == ([1, 7, 0] if replaced else [1])
    assert (growing.generation, growing.problem) == (1, "")


@pytest.fixture
def run(tmp_path):
    return write_page_run(tmp_path / "run")


def test_columns_of_the_steps(run):
    data = RunData(run)
    assert data.update() and not data.update()
    steps = data.payload()["steps"]
    assert steps["step"] == [1, 2, 3] and steps["reward"] == [0.01, 0.02, 0.03]
    assert steps["degenerate"] == [1.0] * 3
    assert steps["trainer_waits"] == [0.75] * 3 and steps["engines_wait"] == [0.1] * 3
    assert steps["seconds"] == [2.0, 4.0, 6.0]
    assert steps["probe_mismatch_max"] == [None, 4e-6, None]
    assert steps["weight_update"] == [0.2] * 3 and steps["weight_connect"] == [None] * 3


def test_only_new_steps_are_sent_and_all_after_a_restart(run):
    data = read(run)
    append(run / "metrics.jsonl", step_record(4, reward=None))
    assert data.update()
    new = data.payload(since=3)
    assert (new["since"], new["steps"]["step"], new["steps"]["reward"]) == (3, [4], [None])
    before = data.generation
    append(run / "new", step_record(1))
    (run / "new").replace(run / "metrics.jsonl")
    data.update()
    assert data.generation != before and data.payload()["steps"]["step"] == [1]


@pytest.mark.slow
def test_forecasts_of_every_validation_with_their_paths(run):
    data = read(run)
    assert data.forecasts.missing_counts(data.validations)[0] == len(data.validations) == 21  # the newest first
    data.forecasts.make_all(data.validations, data.recipe)
    made = data.payload()["forecasts"]
    assert [each["step"] for each in made] == list(range(20, 101, 5))
    newest = made[-1]
    assert newest["compute"][0] == pytest.approx(0.4) and newest["compute"][-1] == pytest.approx(0.8)
    assert all(lo <= p <= hi for lo, p, hi in zip(newest["lo"], newest["pass_rate"], newest["hi"]))
    assert f"{newest['pass_rate'][-1]:.3f}" in newest["line"]
    assert data.forecasts.missing_counts(data.validations) == []
    assert data.forecasts.missing_counts([{**row, "pass_rate": 0.1} for row in data.validations])[0] == 21
    assert data.forecasts.projections == []  # they were made from other rows


def test_the_forecasts_of_a_long_run_stay_where_they_are():
    rows = [{"step": n, "pass_rate": 0.5} for n in range(200)]
    before = Forecasts().missing_counts(rows[:199])
    assert len(before) <= 129 and before[0] == 199
    assert len(set(Forecasts().missing_counts(rows)) - set(before)) == 1  # the newest alone


def test_starts_faults_and_restarts_are_in_their_order(run):
    data = read(run)
    events = data.payload()["events"]
    assert [event["kind"] for event in events] == ["start", "fault", "restart"]
    assert events[1]["text"] == "engine-0 draining: exit </script>"


STRANGE_VALIDATIONS = {
    "{}": "no step",
    '{"step": "x"}': "step 'x'",
    '{"step": 7, "compute": null, "pass_rate": 0.5}': "compute 'None'",
    '{"step": 7, "compute": 0.5, "pass_rate": 1.5}': "pass_rate '1.5'",
    '{"step": true, "compute": 0.5, "pass_rate": 0.5}': "step 'True'",
    '{"step": 7, "compute": 0.5}': "no pass_rate",
}


@pytest.mark.parametrize("line", STRANGE_VALIDATIONS)
def test_a_validation_without_its_keys_is_named(line):
    with pytest.raises(ValueError) as caught:
        validation_row(line.encode())
    said = f"expected a validation (step, compute, pass_rate), found {STRANGE_VALIDATIONS[line]}"
    assert str(caught.value) == said


def test_a_forecast_that_fails_is_said_and_the_others_are_made(run, monkeypatch):
    data = read(run)
    projection = forecasts_module.projection

    def failing(rows, **options):
        if len(rows) == 7:
            raise ValueError("strange\nrows")
        return projection(rows, **options)

    monkeypatch.setattr(forecasts_module, "projection", failing)
    data.forecasts.make_all(data.validations[:7], data.recipe)
    assert data.damage == ["forecast from 7 validations: ValueError: strange rows"]
    assert data.payload()["forecasts"][-1]["step"] == 25


def test_pass_rates_by_prompt_of_another_form_cost_the_gain_alone(run):
    append(run / "validation_by_prompt.jsonl", "{}\n")
    data = read(run)
    assert data.payload()["header"]["lines"][0] == "the gain cannot be computed: KeyError: 'by_prompt'"


def test_evaluations_are_a_table_with_those_that_were_lost(run):
    assert RunData(run).payload()["evaluations"] is None
    lost = {"step": 50, "lost": "engine-1 was lost\x1b"}
    last = evaluation_record(60, low=None, pass_at_k=None)
    append(run / "evaluation.jsonl", evaluation_record(0), lost, last, "[]\n")
    data = read(run)
    table = data.payload()["evaluations"]
    assert table["rows"] == [
        ["60", "aime24", "30", "@16 0.250", "–", "–", "version 60, 0123456789ab"],
        ["50", "lost: engine-1 was lost\\x1b", "", "", "", "", ""],
        ["0", "aime24", "30", "@16 0.250", "[0.125, 0.375]", "@1 0.250, @16 0.500", "version 0, 0123456789ab"],
    ]
    assert len(table["columns"]) == 7 and "expected a JSON object, found" in data.damage[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl", "journal.jsonl", "end.json"])
def test_something_else_than_a_file_is_named_and_hides_nothing_else(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    data, index = RunData(run), GroupIndex(run)
    data.update()
    index.update()
    [line] = data.damage + index.damage
    assert name in line and data.payload()["header"]["name"]
    (run / name).rmdir()
    data.update()
    index.update()
    assert data.damage + index.damage == []


@pytest.mark.parametrize(
    "attempts, ended", [((), None), (("local.0",), "all steps are made"), (("local.0", "local.1"), None)]
)
def test_a_run_is_over_while_no_attempt_follows_its_end(tmp_path, attempts, ended):
    run = write_plain_run(tmp_path / "a")
    append(run / "attempts.jsonl", *({"incarnation": name} for name in attempts))
    if attempts:
        append(run / "end.json", {"reason": "all steps are made", "incarnation": "local.0"})
    data = RunData(run)
    data.update()
    assert data.payload()["header"]["ended"] == ended


def test_a_run_that_just_began(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: r\n")
    data = RunData(tmp_path)
    assert not data.update()
    assert data.payload()["header"]["lines"] == [] and data.payload()["forecasts"] == []
    write_run(tmp_path, steps=1)
    assert data.update() and len(data.payload()["header"]["lines"]) == 2


def test_no_part_of_the_page_imports_torch():
    code = (
        "import sys, megatron_scalerl.page.server, megatron_scalerl.page.static_page\n"
        "assert not {'torch', 'transformers', 'vllm', 'matplotlib'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
