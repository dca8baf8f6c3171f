"""rollouts.deterministic with vLLM: a run that is killed and resumed has the bits of one that is not."""

import pytest
from waiting import wait_until
from whole_runs import overrides, run, start, words

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.commands.export import export

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(3000)]


PIPELINE = ("rollouts.max_staleness_steps=0",)
ADAPTERS = (*PIPELINE, "policy.lora={rank: 4, alpha: 8}")
PHASES = ("rollouts.schedule=ppo_off_policy", "rollouts.updates_per_phase=2")


def settings(tiny, out, name, schedule):
    # a batch is two rounds
    more = """rollouts.deterministic=true rollouts.max_in_flight=16 rewards.verifier=tests.e2e.coin:toss_until_held
        rewards.variables=[HELD_AT] rewards.timeout_s=600 steps=4 validation.every_steps=2 checkpoint.every_steps=2
        weights.probe_every=2"""
    command = words("-m megatron_scalerl train recipes/tiny_cpu.yaml")
    return [*command, *overrides(tiny, out, name, *schedule, *words(more))]


def finished(events):
    return [line for line in events.read_text().splitlines() if '"finish"' in line] if events.exists() else []


def bits(folder):
    steps = read_jsonl(folder / "metrics.jsonl")
    keys = ("step", "loss", "grad_norm", "train_pass_rate", "completion_tokens_mean", "weight_digest")
    validations = read_jsonl(folder / "validation.jsonl")
    return (
        [[row.get(key) for key in keys] for row in steps],
        [[row[key] for key in ("step", "pass_rate", "entropy", "mean_completion_tokens")] for row in validations],
    )


@pytest.mark.parametrize(
    "schedule, groups",
    [(PIPELINE, 12), (PHASES, 16), (ADAPTERS, 12)],
    ids=["pipeline", "phases", "adapters"],
)
def test_a_killed_run_has_the_bits_of_one_that_was_not(tiny_dense, tmp_path, monkeypatch, schedule, groups):
    """groups: those of which the last are generated when the run is killed. Phases have two batches of four."""
    monkeypatch.setenv("HELD_AT", "")
    run(*settings(tiny_dense, tmp_path, "whole", schedule))
    expected = bits(tmp_path / "whole")
    digests = {row[-1] for row in expected[0]} - {None}
    assert len(digests) == (2 if schedule == PHASES else 4), "every step changes the weights"

    interrupted = tmp_path / "interrupted"
    events = interrupted / "journal.jsonl"
    monkeypatch.setenv("HELD_AT", str(events))
    process = start(*settings(tiny_dense, tmp_path, "interrupted", schedule))
    # in the third batch, or the second phase, some of whose groups are in the journal
    wait_until(lambda: process.poll() is not None or len(finished(events)) >= 10, 1200)
    process.kill()
    process.wait()
    assert len(finished(events)) < groups, "a batch was interrupted, not a step"

    monkeypatch.setenv("HELD_AT", "")
    run(*settings(tiny_dense, tmp_path, "interrupted", schedule))
    assert bits(interrupted) == expected
    assert "not deterministic" not in (interrupted / "logs/controller.log").read_text()
    exported = []
    for name in ("whole", "interrupted"):
        export(tmp_path / name, tmp_path / f"{name}_exported")
        exported.append(sorted((tmp_path / f"{name}_exported").glob("*.safetensors")))
    assert [file.read_bytes() for file in exported[0]] == [file.read_bytes() for file in exported[1]] != []
