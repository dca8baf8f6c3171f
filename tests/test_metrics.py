"""Step records and validations: JSONL is the truth, a restart drops what is made again."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_scalerl.metrics import Metrics, read_jsonl
from megatron_scalerl.types import PassRate


def test_records_roll_back_and_sinks(tmp_path):
    metrics = Metrics(tmp_path, "run")
    for step in (1, 2, 3):
        metrics.step(step, {"loss": 0.5 * step, "note": "x", "bad": float("nan")})
    metrics.validation(
        PassRate(
            step=2,
            policy_version=2,
            pass_rate=0.25,
            prompts=4,
            generations=2,
            gpu_hours=0.1,
            gpu_hours_total=0.2,
            truncated_share=0.0,
            interrupted_share=0.5,
            mean_completion_tokens=7.0,
        ),
        by_prompt=[0.0, 0.5, 0.5, 0.0],
    )
    assert metrics.has_validation(2) and not metrics.has_validation(1)
    metrics.roll_back(1)
    assert not metrics.has_validation(2)
    metrics.step(2, {"loss": 9.0})
    metrics.close()
    assert [(r["step"], r["loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 0.5), (2, 9.0)]
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["bad"] is None
    assert read_jsonl(tmp_path / "validation.jsonl") == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == [0.5, 1.0, 1.5, 9.0]
    assert events.Scalars("validation/pass_rate")[0].value == 0.25


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_jsonl(path) == [{"step": 1}]
