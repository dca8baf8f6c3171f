"""Step records and validations: JSONL is the truth, and a restart drops the records that are made again."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.types import PassRate


def open_metrics(folder, *, step=0, batches=0, last_step=0):
    return Metrics(folder, "run", step=step, batches=batches, last_step=last_step)


def pass_rate(step):
    return PassRate(
        step=step,
        policy_version=step,
        pass_rate=0.25,
        prompts=4,
        generations=2,
        gpu_hours=0.1,
        gpu_hours_total=0.2,
        truncated_share=0.0,
        interrupted_share=0.5,
        mean_completion_tokens=7.0,
    )


def write(folder):
    metrics = open_metrics(folder)
    for step in (1, 2, 3):
        metrics.step(step, {"batches": step, "loss": 0.5 * step, "note": "x", "bad": float("nan")})
    metrics.step(3, {"batches": 4, "loss": 8.0, "skipped": 1})
    for step in (0, 2):
        metrics.validation(pass_rate(step), by_prompt=[0.0, 0.5, 0.5, 0.0])
    metrics.close()


def test_step_records_after_the_checkpoint_are_dropped(tmp_path):
    write(tmp_path)
    metrics = open_metrics(tmp_path, step=1, batches=1, last_step=3)
    metrics.step(2, {"batches": 2, "loss": 9.0})
    metrics.close()
    assert [(r["step"], r["loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 0.5), (2, 9.0)]
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["bad"] is None


def test_a_skipped_batch_behind_the_checkpoint_of_its_step_is_dropped(tmp_path):
    write(tmp_path)
    open_metrics(tmp_path, step=3, batches=3, last_step=3).close()
    assert [r["batches"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_validations_of_batches_in_the_journal_stay(tmp_path):
    write(tmp_path)
    metrics = open_metrics(tmp_path, step=1, batches=1, last_step=3)
    assert metrics.has_validation(2) and metrics.has_validation(0) and not metrics.has_validation(1)
    metrics.close()
    open_metrics(tmp_path, step=1, batches=1, last_step=1).close()
    assert [r["step"] for r in read_jsonl(tmp_path / "validation.jsonl")] == [0]
    assert [r["step"] for r in read_jsonl(tmp_path / "validation_by_prompt.jsonl")] == [0]


def test_tensorboard_says_what_the_records_say(tmp_path):
    write(tmp_path)
    metrics = open_metrics(tmp_path, step=1, batches=1, last_step=3)
    metrics.step(2, {"batches": 2, "loss": 9.0})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 9.0)]
    assert [e.step for e in events.Scalars("validation/pass_rate")] == [0, 2]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "for readers that take every file as it is"
