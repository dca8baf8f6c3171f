"""Console logs as other trainers print them, and several runs in one log: which lines are rows, and what is said."""

import gzip
import json
import math

import pytest
from other_tools import RATES, STEPS, write

from megatron_scalerl.fit.inputs import ColumnOptions, read_curves

CORE = "val-core/math_dapo/acc/mean@32"
CONFIG = """(main_task pid=1) {'custom_reward_function': {'name': 'compute_score', 'path': None},
(main_task pid=1)  'trainer': {'total_epochs': 15, 'logger': ['console']}}
INFO This model supports multiple tasks: {'embed', 'generate'}. Defaulting to 'generate'.
{'temperature': 1.0, 'epoch': None} {None: 1, 'epoch': 2} {'a': {1: 2}, 'epoch': 1}
{'a': 1, b'b': 2, 3: 4}
"""


def verl_line(step, **metrics):
    said = " - ".join(f"{key}:{value}" for key, value in metrics.items())
    return f"\x1b[36m(TaskRunner pid=4217)\x1b[0m step:{step} - {said}\n"


def verl_lines(steps=STEPS, **metrics):
    """verl's lines: a training score of 0.3, timings that look like scores, and `metrics`, each step -> value."""
    return [
        verl_line(step, **{"critic/score/mean": 0.3, "timing_s/reward": 0.04, "perf/accuracy": 0.9})[:-1]
        + "".join(f" - {name}:{value(step)}" for name, value in metrics.items() if value(step) is not None)
        for step in steps
    ]


def rate(step):
    return round(0.1 + 0.5 * step / (step + 40), 4)


def headings(step):
    """NeMo-RL's print of a step, with a validation at every other one."""
    validation = f"📊 Validation Results:\n    • Accuracy: {rate(step)}\n    • Samples processed: 256\n"
    training = "📊 Training Results:\n  • Avg Reward: 0.3000\n⏱️  Timing:\n  • Total step time: 35.12s\n"
    return f"\n{'=' * 25} Step {step}/500 {'=' * 25}\n{validation if step % 20 == 0 else ''}{training}"


@pytest.mark.parametrize(
    ("line", "score", "taken"),
    [
        (
            "12:00 SUCCESS Step {} | Time: 9.1s | Reward: {} | Throughput: 12.5 tokens/s | Async Level: 1\n",
            "Reward over step",
            10,
        ),
        ("step:{} - reward/avg_pass_at_5:0.9 - reward/avg_raw_reward:{}\n", "reward/avg_raw_reward over step", 10),
        (
            "✨ Global step {}: {{'policy_loss': 0.1, 'reward': {}, 'generated_samples': ['{{x}} \\\\d', 1]}}\n",
            "reward over step",
            10,
        ),
        ("rollout {}: {{'rollout/rewards': 0.0, 'rollout/raw_reward': {}}}\n", "rollout/raw_reward over step", 10),
        ("{{'num_tokens': {}, 'reward': '{}', 'epoch': '0.01'}}\n", "reward over num_tokens", 10),
        (headings, "Accuracy over step", 5),
    ],
    ids=["prime-rl", "SkyRL", "OpenRLHF", "slime", "TRL", "NeMo-RL"],
)
def test_the_console_logs_of_other_trainers(tmp_path, line, score, taken):
    text = "".join(line(s) if callable(line) else line.format(s, rate(s)) for s in STEPS)
    (curve,) = read_curves(write(tmp_path, "run.log", CONFIG + text))
    assert f"console log, {taken} points of {score}" in curve.read
    assert curve.pass_rate.tolist() == [rate(step) for step in STEPS[:: 10 // taken][-taken:]] or taken == 5
    assert curve.pass_rate[-1] == rate(100)


@pytest.mark.parametrize(
    "joined",
    [
        "\n".join,
        "\r".join,
        "".join,
        lambda lines: "\n".join(line[n : n + 50] for line in lines for n in range(0, len(line), 50)),
        lambda lines: "\n".join(
            line.replace(" - perf", " -\nperf").replace(":0.3", ":np.float32(0.3)") for line in lines
        ),
        lambda lines: "\n".join(line.replace(" - perf", "(WorkerDict pid=3) INFO b:1 - perf") for line in lines),
        lambda lines: b"\xff float(\n" + "\n".join(lines).encode(),
    ],
    ids=["lines", "returns", "glued", "cut at 50", "cut at words", "interleaved", "damaged"],
)
def test_step_lines_alone_are_read_however_a_console_breaks_them(tmp_path, joined):
    text = joined(verl_lines([0, *STEPS], **{CORE: rate}))
    path = write(tmp_path, "run.log", CONFIG.encode() + (text if isinstance(text, bytes) else text.encode()))
    (curve,) = read_curves(path)
    assert curve.pass_rate.tolist() == [rate(step) for step in STEPS] and curve.initial == rate(0)
    assert f"10 points of {CORE} over step (10 to 100 steps), R_0" in curve.read
    assert "why this score: a validation comes before training; why this axis: the number at the head" in curve.read
    assert "also there: critic/score/mean (--score)" in curve.read


@pytest.mark.parametrize("measured", [(0, 50, 100), (100,), ()])
def test_a_column_with_fewer_than_three_rows_gives_way(tmp_path, measured):
    lines_of = verl_lines([0, *STEPS], **{CORE: lambda step: 0.5 if step in measured else None})
    (curve,) = read_curves(write(tmp_path, "run.log", "\n".join(lines_of)))
    assert "10 points of critic/score/mean over step" in curve.read and "no validation has 3 rows" in curve.read
    assert (f"fewer than 3 rows: {CORE}" in curve.read) == bool(measured)


def test_of_two_equal_validations_the_other_one_is_named(tmp_path):
    text = "\n".join(verl_lines(**{CORE: lambda step: 0.9, "val-core/aime25/acc/mean@32": rate}))
    (curve,) = read_curves(write(tmp_path, "run.log", text))
    assert "points of val-core/aime25/acc/mean@32" in curve.read and f"(as good by its name: {CORE})" in curve.read


@pytest.mark.parametrize(("again", "kept"), [((60, 70), 7), ((10, 20), 2), ((60,), 10), ((60, 70, 80, 90, 100), 10)])
def test_what_an_attempt_had_beyond_a_resume_is_left_out(tmp_path, again, kept):
    text = "\n".join(verl_lines(**{CORE: rate}) + verl_lines(again, **{CORE: lambda step: 0.777}))
    (curve,) = read_curves(write(tmp_path, "run.log", text))
    assert curve.compute.tolist() == STEPS[:kept]
    assert curve.pass_rate.tolist() == [0.777 if step in again else rate(step) for step in STEPS[:kept]]
    assert any("of an attempt that a later one replaced" in note for note in curve.notes) == (kept < 10)


def test_verls_console_log_with_colors_and_prefixes_and_a_resume(tmp_path):
    core = "val-core/openai/gsm8k/acc/mean@1"
    text = "2026-01-02 INFO worker.py:1752 -- Started Ray.\n(TaskRunner pid=1) {'actor': {'lr': 1e-06,\n"
    text += verl_line(0, **{core: "np.float64(0.1)"})
    for step, rate in zip(STEPS, RATES):
        text += "Training Progress:   3%|3 | 1/100 [00:12<01:00]\r"
        text += verl_line(step, **{"critic/score/mean": "0.3", "actor/lr": "1e-06", core: f"np.float64({rate})"})
    text += verl_line(100, **{"critic/score/mean": "nan", core: "0.777"})
    for name, data in (("run.log", text), ("run.txt", text), ("run.log.gz", gzip.compress(text.encode()))):
        (curve,) = read_curves(write(tmp_path, name, data))
        assert (curve.name, curve.initial, curve.unit) == ("run", 0.1, "steps")
        assert curve.compute.tolist() == STEPS and curve.pass_rate.tolist() == [*RATES[:-1], 0.777]
        assert "1 rows have a step that a later row has again; the last counts" in curve.notes[0]
        assert f"console log, 10 points of {core} over step" in curve.read


def test_the_console_log_of_transformers_and_a_log_without_metrics(tmp_path):
    rows = ({"loss": 0.1, "grad_norm": math.nan, "reward": r, "epoch": s / 100} for s, r in zip(STEPS, RATES))
    path = write(tmp_path, "run.log", "".join(f"  3%|3 | 1/30\n{row}\n" for row in rows))
    assert read_curves(path)[0].pass_rate.tolist() == RATES and read_curves(path)[0].unit == "epoch"
    with pytest.raises(ValueError, match=r"other\.log: .* step:5 - reward:0.1 or "):
        read_curves(write(tmp_path, "other.log", "[06:01] done\n"))


def test_the_console_log_of_slime(tmp_path):
    said = "(RolloutManager pid=9) data.py:1 - rollout {}: {{'rollout/raw_reward': {}, 'rollout/lengths': 9.0}}\n"
    (curve,) = read_curves(write(tmp_path, "run.log", "".join(said.format(s, r) for s, r in zip(STEPS, RATES))))
    assert (curve.unit, curve.compute.tolist(), curve.pass_rate.tolist()) == ("steps", STEPS, RATES)


def test_a_second_run_in_one_console_log(tmp_path):
    text = "\n".join(verl_lines([0, *STEPS], **{CORE: rate}) + verl_lines(STEPS[:5], **{CORE: lambda step: 0.7}))
    one, two = read_curves(write(tmp_path, "run.log", text))
    assert (one.name, one.initial, one.compute.tolist()) == ("run#1", rate(0), STEPS)
    assert (two.name, two.initial, two.compute.tolist()) == ("run#2", None, STEPS[:5])
    assert two.pass_rate.tolist() == [0.7] * 5


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_runs_that_were_logged_one_after_another_are_several_runs(tmp_path):
    rows = [{"step": 10 * n, "reward": at + n / 50} for at in (0.2, 0.5) for n in range(10)]
    path = write(tmp_path, "a.jsonl", lines(rows))
    one, two = read_curves(path)
    assert (one.name, one.initial, two.name, two.initial) == ("a#1", 0.2, "a#2", 0.5)
    assert one.compute.tolist() == two.compute.tolist() == list(range(10, 100, 10))
    assert len(one.notes) == 1 and "--series run=a#1 " in one.notes[0]
    (chosen,) = read_curves(path, ColumnOptions(series=(("run", "a#2"),)))
    assert (chosen.name, chosen.initial) == ("a#2", 0.5)
    with pytest.raises(ValueError, match=r"a.jsonl: .*'b'.* a#1, a#2"):
        read_curves(path, ColumnOptions(series=(("run", "b"),)))


@pytest.mark.parametrize(
    ("steps", "runs"),
    [
        ([*range(1, 10), *range(1, 20)], [9, 19]),
        ([0, *range(10, 60, 10), *range(10, 90, 10)], [5, 8]),
        ([*range(10, 60, 10), *range(5, 45, 5), *range(5, 25, 5)], [5, 8, 4]),
        ([*range(1, 10), *range(6, 20)], [19]),
        ([1, 2, *range(1, 20)], [19]),
        ([*range(1, 10), 1, 2], [2]),
        ([*range(100, 130, 10), *range(20, 100, 10)], [11]),
        ([3, 1, 2, 0.5, 6, 5, 4], [7]),
    ],
    ids=["again", "no step 0 again", "three", "resumed", "began too short", "begun", "sorted as text", "unsorted"],
)
def test_a_second_run_begins_at_the_start_and_a_resume_does_not(tmp_path, steps, runs):
    rows = [{"step": step, "loss": 0.1, "reward": 0.2 + n / 100} for n, step in enumerate(steps)]
    curves = read_curves(write(tmp_path, "a.jsonl", lines(rows)))
    assert [len(curve.compute) for curve in curves] == runs
    assert [curve.name for curve in curves] == (["a"] if len(runs) == 1 else [f"a#{n + 1}" for n in range(len(runs))])


def test_text_on_the_axis_of_a_second_run_is_refused_with_its_row(tmp_path):
    rows = [{"step": step, "loss": 0.1, "reward": 0.5} for step in (1, 2, 3, 4, "x", 1, 2, 3)]
    with pytest.raises(ValueError, match=r"row 5: step: 'x'"):
        read_curves(write(tmp_path, "a.jsonl", lines(rows)))


def test_single_answers_and_kinds_of_rows_are_no_runs(tmp_path):
    answers = [{"step": 10 * n, "correct": i < n} for i in range(20) for n in range(1, 11)]
    (curve,) = read_curves(write(tmp_path, "answers.jsonl", lines(answers)))
    assert curve.pass_rate == pytest.approx([n / 20 for n in range(1, 11)])
    rows = [{"step": s, "type": kind, "acc": r} for kind in ("train", "eval") for s, r in zip(STEPS, RATES)]
    (curve,) = read_curves(write(tmp_path, "kinds.jsonl", lines(rows)))
    assert curve.name == "kinds" and curve.notes == ()
