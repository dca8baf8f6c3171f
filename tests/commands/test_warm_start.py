"""What a study makes once: where it is cached, what makes another one, and what is left of it."""

from pathlib import Path

import pytest

from megatron_scalerl.commands.study.folder import digests
from megatron_scalerl.commands.study.warm_start import begin, finish, prepare, tiny_warm_start, warm_start
from megatron_scalerl.recipe.file import RecipeError

BASE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu.yaml"


def test_the_key_is_what_determines_the_content(tmp_path):
    first, same, longer, rl = (
        tiny_warm_start(BASE, tmp_path, settings).folder
        for settings in ([], [], ["sft.steps=7"], ["optimizer.lr=1e-6", "steps=9"])
    )
    assert first == same == rl != longer and not list(tmp_path.iterdir())


def test_steps_that_are_made_are_left_out(tmp_path):
    made = tiny_warm_start(BASE, tmp_path, [])
    assert [step.name for step in made.missing] == ["task", "policy"]
    begin(made)
    task, policy = made.steps
    task.made.parent.mkdir()
    task.made.write_text("{}")
    policy.draft.mkdir()
    (policy.draft / "half").write_text("")
    prepare(policy)
    assert not policy.draft.exists() and [step.name for step in made.missing] == ["policy"]
    policy.draft.mkdir()
    finish(policy)
    assert policy.made.is_dir() and not made.missing
    assert made.overrides[-1] == f"policy.path={policy.made}"


def test_another_policy_or_other_examples_are_another_warm_start(tmp_path):
    policy, examples = tmp_path / "p", tmp_path / "sft.jsonl"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    examples.write_text("{}\n")
    settings = [f"sft.path={examples}"]
    first = warm_start(BASE, policy, tmp_path / "cache", settings)
    examples.write_text('{"prompt": "1"}\n')
    assert warm_start(BASE, policy, tmp_path / "cache", settings).folder != first.folder
    first = warm_start(BASE, policy, tmp_path / "cache", settings)
    (policy / "config.json").write_text('{"a": 1}')
    assert warm_start(BASE, policy, tmp_path / "cache", settings).folder != first.folder
    with pytest.raises(RecipeError, match=r"--warm-start: expected a Hugging Face folder with config.json, found"):
        warm_start(BASE, tmp_path / "none", tmp_path / "cache", settings)


def test_a_large_file_of_the_same_size_is_another_one(tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate((1 << 26) + 1)
    first = digests([tmp_path])
    with weights.open("r+b") as file:
        file.seek(1 << 25)
        file.write(b"1")
    assert digests([tmp_path]) != first
