"""Files as other tools write them: what is read, what is said, and what is refused. All are made by hand here."""

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from json_lines import lines
from other_tools import RATES, STEPS, write
from refusals import refused

from megatron_scalerl.fit.inputs import ColumnOptions, read_curves
from megatron_scalerl.fit.table_file import scores

DATA = Path(__file__).parents[1] / "data"
NAMES = yaml.safe_load((DATA / "column_names.yaml").read_text())


def table(columns, **options):
    """CSV text of {name: values}."""
    out = io.StringIO()
    rows = csv.writer(out, **options)
    rows.writerow(columns)
    rows.writerows(zip(*columns.values()))
    return out.getvalue()


def chart(x, xs, *columns):
    """CSV of a W&B chart; columns: (run, metric, values)."""
    header = {x: xs}
    header |= {f"{run} - {metric}{end}": values for run, metric, values in columns for end in ("", "__MIN", "__MAX")}
    return table(header, quoting=csv.QUOTE_ALL)


def read(tmp_path, data, name="run.csv", **options):
    """The one curve of a file. options: of the columns."""
    [curve] = read_curves(write(tmp_path, name, data), ColumnOptions(**options))
    return curve


@pytest.mark.parametrize(
    "x, factor, unit",
    [
        ("Step", 1, "steps"),
        ("trainer/global_step", 1, "steps"),
        ("Relative Time (Process)", 61.5, "seconds"),
        ("train/epoch", 0.01, "train/epoch"),
        ("my_counter", 3, "my_counter"),
    ],
)
def test_a_wandb_chart_over_any_axis_has_the_unit_of_its_own_column(tmp_path, x, factor, unit):
    axis = [factor * step for step in STEPS]
    path = write(tmp_path, "chart.csv", chart(x, axis, ("run", "eval/accuracy", RATES), ("run", "_step", STEPS)))
    (curve,) = read_curves(path)
    assert (curve.name, curve.unit) == ("run", unit)
    np.testing.assert_allclose(curve.compute, axis)
    np.testing.assert_allclose(curve.pass_rate, RATES)
    assert f"W&B chart, 10 points of eval/accuracy over {x} (" in curve.read
    (curve,) = read_curves(path, ColumnOptions(compute="_step"))
    assert (curve.unit, curve.compute.tolist()) == ("steps", STEPS)


def test_names_of_runs_keep_their_dashes_and_a_metric_is_chosen_among_several(tmp_path):
    runs = ("Qwen - lr 1e-6", "Qwen - lr 5e-6")
    columns = [(run, metric, RATES) for run in runs for metric in ("critic/score/mean", "val-core/x/acc/mean@1")]
    curves = read_curves(write(tmp_path, "chart.csv", chart("Step", STEPS, *columns)))
    assert [curve.name for curve in curves] == list(runs)
    assert all(
        "points of val-core/x/acc/mean@1" in c.read and "further scores: critic/score/mean" in c.read for c in curves
    )


def test_a_chart_of_one_metric_of_any_name_is_taken_and_a_time_of_day_is_not(tmp_path):
    path = write(tmp_path, "chart.csv", chart("Step", STEPS, ("run", "my/own_metric", RATES)))
    assert "my/own_metric" in read_curves(path)[0].read
    wall = chart("Wall Time", [1.77e9 + step for step in STEPS], ("run", "eval/accuracy", RATES))
    with refused("row 2: Wall Time: a time of day"):
        read(tmp_path, wall, "chart.csv")


def test_a_run_of_a_chart_that_has_just_begun_is_left_out_with_a_word(tmp_path):
    begun = [0.1, 0.2] + [""] * 8
    columns = ("old", "eval/accuracy", RATES), ("new", "eval/accuracy", begun), ("empty", "eval/accuracy", [""] * 10)
    curve = read(tmp_path, chart("Step", STEPS, *columns), "chart.csv")
    assert curve.name == "old" and "2 runs of chart.csv were left out" in curve.notes[-1]


@pytest.mark.parametrize("path", sorted(DATA.glob("history/*")), ids=lambda path: path.name)
def test_wandb_history_in_every_form(path):
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    (curve,) = read_curves(path)
    assert (curve.unit, curve.initial, curve.compute.tolist()) == ("steps", 0.2, list(range(5, 55, 5)))
    assert (
        "10 points of val-core/openai/gsm8k/acc/mean@1 over training/global_step (5 to 50 steps), R_0" in curve.read
    )
    assert "skipped rows: 40 " in curve.read and "further scores: critic/score/mean (--score)" in curve.read


def trainer_state(tmp_path, extra=()):
    log = [{"epoch": step / 100, "reward": rate, "step": step} for step, rate in zip(STEPS, RATES)]
    state = {"global_step": 100, "log_history": [*log, *extra, {"train_runtime": 9.0, "step": 100}]}
    return write(tmp_path, "trainer_state.json", json.dumps(state, indent=2))


def test_trainer_state_and_the_folder_of_its_checkpoints(tmp_path):
    (curve,) = read_curves(trainer_state(tmp_path))
    assert curve.pass_rate.tolist() == RATES and "trainer_state.json, 10 points of reward over step" in curve.read
    assert "skipped rows: 1 without a number" in curve.read
    folder = tmp_path / "my_run"
    for step in (20, 100):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        trainer_state(folder / f"checkpoint-{step}", [{"eval_reward": 0.5, "step": s} for s in (40, 70, step)])
    (curve,) = read_curves(folder)
    assert (
        curve.name == "my_run" and curve.compute.tolist() == [40, 70, 100] and "points of eval_reward" in curve.read
    )
    assert "further scores: reward (--score)" in curve.read


@pytest.mark.parametrize("x", ["Training compute (GPU-hours)", "gpu_h", "H100 GPU hours"])
def test_gpu_hours_by_other_names_and_the_only_other_column(tmp_path, x):
    curve = read(tmp_path, table({x: STEPS, "GSM8K": RATES}))
    assert curve.unit == "gpu_hours" and "points of GSM8K over" in curve.read
    with refused("--score"):
        read(tmp_path, table({x: STEPS, "loss": RATES}))
    with refused("--score"):
        read(tmp_path, chart(x, STEPS, ("run", "train/loss", RATES)), "chart.csv")


def test_a_folder_with_metrics_whose_last_line_is_being_written(tmp_path):
    text = (DATA / "logs/tinker_cookbook_with_tests.jsonl").read_text()
    write(tmp_path, "metrics.jsonl", text[:-30])
    (curve,) = read_curves(tmp_path)
    assert (curve.name, len(curve.compute)) == (tmp_path.name, 4)


def events(folder, tag="eval/accuracy", rates=RATES):
    """An event file as tensorboard writes it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True)
    with open(folder / "events.out.tfevents.1700000000.host.1.0", "wb") as file:
        writer = RecordWriter(file)
        for step, rate in zip(STEPS, rates):
            values = [Summary.Value(tag=tag, simple_value=rate), Summary.Value(tag="train/loss", simple_value=3.0)]
            writer.write(Event(step=step, wall_time=1.7e9, summary=Summary(value=values)).SerializeToString())


def test_event_files_of_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    events(tmp_path / "tb/a")
    events(tmp_path / "tb/b", "train/reward")
    events(tmp_path / "tb/other", "hparams/x", [1.0])
    a, b = read_curves(tmp_path / "tb")
    assert (a.name, b.name, a.unit) == ("a", "b", "steps")
    np.testing.assert_allclose(a.pass_rate, RATES, rtol=1e-6)
    assert "1 runs of tb were left out" in a.notes[-1]
    (file,) = (tmp_path / "tb/b").iterdir()
    assert read_curves(file)[0].name == "b"
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with refused("pip install tensorboard"):
        read_curves(tmp_path / "tb")


@pytest.mark.parametrize("path", sorted(DATA.glob("tables/*")), ids=lambda path: path.stem)
def test_tables_as_spreadsheets_and_pandas_write_them(path):
    (curve,) = read_curves(path)
    assert (curve.compute.tolist(), curve.unit) == (STEPS, "steps")
    np.testing.assert_allclose(curve.pass_rate, RATES)


def test_what_is_no_number_is_skipped_and_counted_and_text_is_not(tmp_path):
    cells = ["", "NaN", "nan", "None", "inf", "-Infinity", "n/a", "null", "0.5", "0.6", "0.7"]
    text = table({"step": range(1, 12), "score": cells})
    curve = read(tmp_path, text)
    assert curve.pass_rate.tolist() == [0.5, 0.6, 0.7]
    assert "skipped rows: 8 without a number" in curve.read
    with refused("row 2: score: 'oops'"):
        read(tmp_path, "step,score\n1,oops\n2,0.5\n")
    with refused(r"run.csv: .* score"):
        read(tmp_path, "step,score\n1,nan\n2,\n")


def test_the_rounding_of_single_precision_is_no_mistake(tmp_path):
    curve = read(tmp_path, "step,reward\n1,-1e-7\n2,0.5\n3,1.0000001\n")
    assert curve.pass_rate.tolist() == [0.0, 0.5, 1.0]
    assert len(read(tmp_path, '{"step": 1, "acc": 0.5}\n' * 2, "run").compute) == 1


def test_percent_is_converted_and_said_where_its_name_says_so_and_refused_otherwise(tmp_path):
    percent = [100 * rate for rate in RATES]
    curve = read(tmp_path, table({"step": STEPS, "accuracy_pct": percent}))
    assert "percent, divided by 100" in curve.read
    np.testing.assert_allclose(curve.pass_rate, RATES)
    path = write(tmp_path, "run.csv", table({"step": STEPS, "accuracy": percent}))
    with refused(r"row 2: accuracy: 20 is not .*--score-range=LO,HI .*0,100 for percent.*--score"):
        read_curves(path)
    (curve,) = read_curves(path, ColumnOptions(score_range=(-100, 100)))
    np.testing.assert_allclose(curve.pass_rate, (1 + np.array(RATES)) / 2)
    assert "-100 to 100 mapped to 0 to 1" in curve.read


def test_rows_of_one_kind_are_read_and_kinds_that_follow_one_another_are_one(tmp_path):
    rows = [{"type": "train", "step": s, "accuracy": 0.9} for s in range(1, 101)]
    rows += [{"type": "eval", "step": s, "accuracy": r} for s, r in zip(STEPS, RATES)]
    curve = read(tmp_path, lines(rows), "run.jsonl")
    assert curve.pass_rate.tolist() == RATES and "rows with type = eval, not train" in curve.read
    rows = [{"phase": "train" if s < 50 else "extended", "step": s, "accuracy": r} for s, r in zip(STEPS, RATES)]
    assert len(read(tmp_path, lines(rows), "run.jsonl").compute) == 10


def test_a_long_table_and_a_table_of_runs(tmp_path):
    tags = ("train/loss", "train/reward", "eval/accuracy")
    columns = [(s, t, 3.0 if t == "train/loss" else r) for s, r in zip(STEPS, RATES) for t in tags]
    path = write(tmp_path, "long.csv", table(dict(zip(("step", "tag", "value"), zip(*columns)))))
    (curve,) = read_curves(path)
    assert curve.pass_rate.tolist() == RATES and "rows with tag = eval/accuracy" in curve.read
    columns = {"run": ["a"] * 10 + ["b"] * 10, "step": STEPS * 2, "acc": RATES * 2}
    assert [c.name for c in read_curves(write(tmp_path, "runs.csv", table(columns)))] == ["a", "b"]
    runs = {name: [{"step": s, "acc": r} for s, r in zip(STEPS, RATES)] for name in ("lr 1", "lr 2")}
    assert [c.name for c in read_curves(write(tmp_path, "runs.json", json.dumps(runs)))] == ["lr 1", "lr 2"]


def test_hours_per_step_is_applied_or_refused(tmp_path):
    path = write(tmp_path, "run.csv", table({"gpu_hours": STEPS, "training/global_step": STEPS, "score": RATES}))
    (curve,) = read_curves(path, ColumnOptions(hours_per_step=2.0))
    assert (curve.unit, curve.compute.tolist()) == ("gpu_hours", [2.0 * step for step in STEPS])
    assert "training/global_step x 2 h (20 to 200 GPU-hours)" in curve.read
    for options in (ColumnOptions(hours_per_step=2.0, compute="gpu_hours"), ColumnOptions(hours_per_step=-1.0)):
        with refused("--hours-per-step "):
            read_curves(path, options)
    path = write(tmp_path, "run.csv", table({"tokens": STEPS, "score": RATES}))
    with refused(r"--hours-per-step .*tokens"):
        read_curves(path, ColumnOptions(hours_per_step=2.0))


def test_the_nearest_names_are_proposed_where_none_fits(tmp_path):
    columns = {"step": STEPS} | {f"metric_{n}": RATES for n in range(200)} | {"my_acurracy": RATES}
    path = write(tmp_path, "run.csv", table(columns))
    with pytest.raises(ValueError) as caught:
        read_curves(path)
    assert "choose one with --score" in str(caught.value) and "nearest names: my_acurracy, " in str(caught.value)
    assert len(str(caught.value).partition("the nearest names: ")[2].split(", ")) == 3
    with refused(r"'metric_1a'; .*the nearest names: metric_1"):
        read_curves(path, ColumnOptions(score="metric_1a"))


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.csv", "10,0.1\n20,0.2\n", "row 1: .* 10, 0.1"),
        ("a.csv", ",,,\n,,\n", "row 1: .*''"),
        ("a.jsonl", '{"step": 1' + "0" * 400 + ', "acc": 0.5}\n', "row 1: step: 1000"),
        ("a.json", '{"a": {"b": 1}}', "row 1: .*--score.* a$"),
        ("a.csv", "step,acc,acc\n1,0.1,0.2\n", "row 1: .*'acc' .*2 times"),
        (
            "a.csv.gz",
            gzip.compress(b"step,acc\n1,0.1\n" * 99, mtime=0)[:-9],
            "gzip",
        ),
        ("a.csv", b"step,acc\n1,0.1\xff\n", "0xff"),
        ("a.csv", "", "empty"),
        ("a.csv", "gpu_hours,pass_rate\n1,0.4\n-2,0.5\n", "row 3: gpu_hours: -2"),
        ("a.csv", "gpu_hours,pass_rate\n1,0.4\n2\n", "row 3: the row has 1 cell"),
        ("a.csv", "x,pass_rate\n1,0.4\n", "row 1: .*--compute.* x, pass_rate"),
        (
            "a.csv",
            "compute,pass_rate,unit\n1,0.4,tflops\n2,0.5,hours\n",
            "row 3: unit: hours .* tflops, as in row 2",
        ),
        ("a.csv", "compute,pass_rate,prompts\n1,0.4,200\n2,0.5,20\n", "row 3: prompts: 20 .* 200, as in row 2"),
        ("a.csv", "compute,pass_rate,generations\n1,0.4,1.5\n", "row 2: generations: 1.5"),
        ("a.csv", "compute,pass_rate,within_variance\n1,0.4,9\n", r"row 2: within_variance: 9 .*\[0, 0.5\]"),
        ("a.jsonl", '{"gpu_hours": 1\n', "row 1: .*JSON object"),
        ("a.jsonl", '{"gpu_hours": "x", "pass_rate": 0.4}\n', "row 1: gpu_hours: 'x'"),
        (
            "a.json",
            '{"rows": 3, "x": [1, 2], "y": [1]}',
            "dict with rows, x, y",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, name, data, message):
    path = write(tmp_path, name, data)
    with pytest.raises(ValueError, match=message) as caught:
        read_curves(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_the_ranked_table_of_names():
    for ranked in NAMES["ranked"]:
        assert scores(ranked[::-1]) == ranked
    assert scores(NAMES["no_score"]) == []


def rising(n):
    return round(0.7 - 0.5 / (1 + n / 8), 3)


@pytest.mark.parametrize("name", NAMES["better_lower"])
def test_a_measure_that_is_better_lower_is_no_pass_rate(tmp_path, name):
    with refused("--score"):
        read(tmp_path, table({"step": STEPS, name: RATES[::-1]}))


@pytest.mark.parametrize(
    "column, kinds, outcome",
    [
        ("variable", ("loss", "accuracy"), "rows with variable = accuracy, not loss"),
        ("domain", ("algebra", "geometry"), "domain, with the values algebra, geometry; choose with"),
        ("dataset", ("aime", "math"), "dataset, with the values aime, math; choose with"),
        ("k", (1, 4), "k, with the values 1, 4; choose with"),
        ("is_eval", (False, True), "is_eval, with the values False, True; choose with"),
    ],
)
def test_rows_that_differ_in_one_column_are_not_mixed(tmp_path, column, kinds, outcome):
    rows = [{"step": 10 * n, column: kind, "value": rising(n)} for n in range(1, 21) for kind in kinds]
    path = write(tmp_path, "a.jsonl", lines(rows))
    if outcome.startswith("rows"):
        assert outcome in read_curves(path)[0].read
    else:
        with refused(outcome):
            read_curves(path)
        assert len(read_curves(path, ColumnOptions(series=((column, str(kinds[1])),)))[0].compute) == 20
        assert len(read_curves(path, ColumnOptions(series=((column, "*"),)))) == 2


def test_single_answers_are_averaged(tmp_path):
    answers = [{"step": 10 * n, "correct": i < n} for n in range(1, 11) for i in range(20)]
    curve = read(tmp_path, lines(answers), "answers.jsonl")
    assert curve.pass_rate == pytest.approx([n / 20 for n in range(1, 11)])
    assert curve.notes == ("answers.jsonl: several rows of one step: their mean was fitted",)


@pytest.mark.parametrize("name", ["checkpoint-{}", "runs/a/global_step_{}", "step_{:06d}", "out/iter_{:07d}/"])
@pytest.mark.parametrize("column, compute", [("checkpoint", None), ("model", "model")])
def test_names_of_checkpoints_are_steps(tmp_path, name, column, compute):
    data = table({column: [name.format(step) for step in STEPS], "accuracy": RATES})
    curve = read(tmp_path, data, compute=compute)
    assert curve.compute.tolist() == STEPS and curve.unit == "steps" and curve.pass_rate.tolist() == RATES


def test_commas_between_thousands(tmp_path):
    data = table({"step": [f"{100 * step:,}" for step in STEPS], "accuracy": RATES})
    assert '"1,000"' in data
    curve = read(tmp_path, data)
    assert curve.compute.tolist() == [100 * step for step in STEPS]


@pytest.mark.parametrize("column", ["timestamp", "when"])
def test_dates_are_refused_as_an_axis_and_no_obstacle_beside_one(tmp_path, column):
    days = [f"2026-01-{step // 10:02d}T10:00:00Z" for step in STEPS]
    with refused(rf"row 1: no column name looks like a compute; choose one with --compute.*{column}"):
        read(tmp_path, table({column: days, "accuracy": RATES}))
    curve = read(tmp_path, table({column: days, "step": STEPS, "accuracy": RATES}))
    assert curve.compute.tolist() == STEPS
