"""Whole runs: real trainer ranks, a real engine, live weight updates, three steps each."""

import shutil

import pytest
from safetensors.torch import load_file
from torch import equal
from whole_runs import overrides, product, words

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.plan.counting import load_family
from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.plan.update import update_work
from megatron_scalerl.recipe.file import load_run_recipe
from megatron_scalerl.rollouts.history import read_groups, read_history
from megatron_scalerl.rollouts.store import read_arrays, segment_path
from megatron_scalerl.rollouts.token_scores import read_scores
from megatron_scalerl.rollouts.trained import read_trained

pytestmark = pytest.mark.slow


def train(*settings, **keywords):
    return product("train", "recipes/tiny_cpu.yaml", *settings, **keywords)


def check_run(folder):
    records = [r for r in read_jsonl(folder / "metrics.jsonl") if "skipped" not in r]
    assert [r["step"] for r in records] == [1, 2, 3]
    # the tolerance of 1e-4 nats is the recipe's; an engine with other weights would have ended the run
    assert all(r["probe_mismatch_max"] <= 1e-4 for r in records)
    # log-probs of the very first step are those of the weights both sides started from
    assert records[0]["mismatch_max"] <= 1e-4
    assert all(r["staleness_max"] <= 8 for r in records)
    assert all(r["weight_bytes"] > 0 and r["grad_norm"] > 0 for r in records)
    for batch in read_history(folder).batches:
        trained = read_trained(folder, batch.batch)
        assert sorted([*trained.advantages, *trained.dropped]) == sorted(batch.group_ids)
    return records


def check_bytes(folder, record):
    """What an update with real workers' needs moved is what the planner predicts for the recipe, by its own needs."""
    recipe = load_run_recipe(folder)
    family = load_family(recipe.policy.path)
    predicted = update_work(recipe, family, layout_of(recipe, family, recipe.trainer.world_size))
    print("measured", {k: v for k, v in record.items() if k.startswith("weight_")})
    assert record["weight_whole_bytes"] == pytest.approx(sum(predicted.sent.values()), rel=1e-3)
    share = record["weight_bytes"] / record["weight_whole_bytes"]
    assert record["weight_most_sent_bytes"] == pytest.approx(share * predicted.most_sent, rel=0.1)
    assert record["weight_most_received_bytes"] == pytest.approx(share * predicted.most_received, rel=0.1)


def check_scores(folder, *steps):
    """Where weights are those that sampled, the trainer's log-probabilities are the engine's, token by token."""
    for step in steps:
        scored = read_scores(folder, step)
        assert scored
        history = read_history(folder)
        for (number, position), scores in scored.items():
            [group] = read_groups(folder, history, [number]).values()
            path = segment_path(folder / "rollouts", group.stored.segment)
            rollout = read_arrays(path, group.stored)[1][position]
            assert set(rollout.policy_versions.tolist()) == {scores.policy_version}
            differences = abs(rollout.rollout_logprobs - scores.logprobs)[rollout.loss_mask]
            assert len(differences) and differences.max() <= 2e-4  # the file has four places
            assert len(scores.entropies) == len(rollout.token_ids) and min(scores.entropies) >= 0


@pytest.mark.full
def test_tensor_parallel_trainer_and_engine_with_updates_of_changes(tiny_dense, tmp_path):
    train(
        *overrides(tiny_dense, tmp_path, "tp2"),
        *words(
            "trainer.world_size=2 megatron.parallel.tensor_model_parallel_size=2 engine.vllm.tensor_parallel_size=2 "
            "megatron.model.sequence_parallel=true weights.deltas=absolute telemetry.token_scores_every=1"
        ),
    )
    records = check_run(tmp_path / "tp2")
    check_scores(tmp_path / "tp2", 1)
    assert all(len(set(r["weight_digest"].split("-"))) == 2 for r in records), "a digest of each worker's shard"
    check_bytes(tmp_path / "tp2", records[-1])
    validations = read_jsonl(tmp_path / "tp2/validation.jsonl")
    assert [v["step"] for v in validations] == [0, 3]
    assert validations[1]["compute"] > validations[0]["compute"] == 0
    assert [v["unit"] for v in validations] == ["device_hours"] * 2


def test_a_restart_replays_the_journal_to_the_same_bits(tiny_dense, tmp_path):
    settings = overrides(tiny_dense, tmp_path, "whole", "rollouts.max_staleness_steps=0", "checkpoint.every_steps=1")
    settings += ["checkpoint.keep=9", "telemetry.token_scores_every=1"]
    train(*settings)
    whole = tmp_path / "whole"
    check_run(whole)
    check_scores(whole, 1, 2, 3)
    again = tmp_path / "again/whole"
    shutil.copytree(whole, again)
    for step in (2, 3):
        shutil.rmtree(again / f"checkpoints/step_{step:06d}")
    # the folder's recipe names where it lies; everything else is the same run
    recipe = (again / "recipe.yaml").read_text().replace(str(tmp_path), str(tmp_path / "again"), 1)
    (again / "recipe.yaml").write_text(recipe)
    train(*[s.replace(f"output_dir={tmp_path}", f"output_dir={tmp_path / 'again'}") for s in settings])

    for folder in (whole, again):
        product("export", folder, "--out", folder / "hf")
    first, second = (load_file(f / "hf/model.safetensors") for f in (whole, again))
    assert first.keys() == second.keys()
    assert all(equal(first[name], second[name]) for name in first)
    start = load_file(tiny_dense / "policy/model.safetensors")
    assert not equal(start["lm_head.weight"], first["lm_head.weight"])

    attempts = read_jsonl(again / "attempts.jsonl")
    assert len(attempts) == 2 and attempts[0]["run_id"] == attempts[1]["run_id"]
    losses = [[r["loss"] for r in read_jsonl(f / "metrics.jsonl")] for f in (whole, again)]
    assert losses[0] == losses[1]
    assert all(read_scores(whole, step) == read_scores(again, step) for step in (1, 2, 3))
    journals = [(f / "journal.jsonl").read_text() for f in (whole, again)]
    assert journals[1].startswith(journals[0]), "nothing was drawn, generated or composed a second time"


@pytest.mark.full
def test_a_run_that_lost_ranks_goes_on_with_fewer(tiny_dense, tmp_path):
    """Two data-parallel ranks for two steps, then one: the ledger has what each attempt held."""
    settings = overrides(tiny_dense, tmp_path, "fewer", "rollouts.max_staleness_steps=0", "checkpoint.every_steps=2")
    settings += ["validation.prompts=8", "validation.generations=1"]
    train(*settings, "trainer.world_size=2", "steps=2")
    folder = tmp_path / "fewer"
    first = [row for row in read_jsonl(folder / "ledger.jsonl") if "role" in row]
    experts = ["trainer.world_size=2", "megatron.parallel.expert_model_parallel_size=2"]
    refused = train(*settings, *experts, check=False)
    assert refused.returncode == 2, "a policy without experts"
    train(*settings)
    check_run(folder)
    rows = [row for row in read_jsonl(folder / "ledger.jsonl") if "role" in row]
    assert rows[: len(first)] == first, "what was charged stays"
    held = {}
    for row in rows:
        if row["role"] == "trainer" and row["phase"] == "train":
            held.setdefault(row["incarnation"], set()).add(row["devices"])
    assert held == {"local.0": {2.0}, "local.1": {1.0}}
    records = read_jsonl(folder / "metrics.jsonl")
    axis = [record["device_hours"] for record in records]
    assert axis == sorted(axis) and [record["batches"] for record in records] == list(range(1, len(records) + 1))
    assert [v["step"] for v in read_jsonl(folder / "validation.jsonl")] == [0, 2, 3]
    assert len({a["run_id"] for a in read_jsonl(folder / "attempts.jsonl")}) == 1
