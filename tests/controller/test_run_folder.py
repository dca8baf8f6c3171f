"""A run's folder belongs to one recipe and to one controller at a time."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
import yaml
from recipe_files import small_recipe

from megatron_scalerl.checkpoints import commit
from megatron_scalerl.controller.run_folder import RunFolder, RunInUse, finished, resume_point
from megatron_scalerl.recipe.file import RecipeError, load_run_recipe


def recipe(tmp_path, **changes):
    return small_recipe(**{"output_dir": str(tmp_path / "runs"), "steps": 3} | changes)


def opened(made):
    RunFolder(made).close()


def refused(made, said):
    with pytest.raises(RecipeError, match=said):
        RunFolder(made)


def test_attempts_are_counted_and_share_the_run_id(tmp_path):
    first = RunFolder(recipe(tmp_path))
    first.close()
    second = RunFolder(recipe(tmp_path, steps=9))
    assert (first.attempt.run_id, first.attempt.incarnation) == (second.attempt.run_id, "local.0")
    assert second.attempt.incarnation == "local.1"
    assert yaml.safe_load(second.attempt.recipe_file.read_text())["steps"] == 9


def test_another_recipe_is_refused_by_its_key(tmp_path):
    opened(recipe(tmp_path))
    refused(recipe(tmp_path, loss={"name": "dapo"}), r"loss.name is 'cispo' .* 'dapo' here")


PLAYED = {"name": "calculator:Calculator"}


def test_limits_and_processes_of_an_environment_may_change(tmp_path):
    opened(recipe(tmp_path, environment=PLAYED["name"]))
    changes = {"timeout_s": 5, "episode_timeout_s": 9, "workers": 2, "memory_mb": 64, "variables": ["KEY"]}
    file = tmp_path / "runs/r/recipe.yaml"
    for settings in (changes, {}):
        opened(recipe(tmp_path, environment=PLAYED | settings))
        assert yaml.safe_load(file.read_text())["environment"].items() >= (PLAYED | settings).items()


@pytest.mark.parametrize(
    "key, value",
    [
        ("name", "other:Class"),
        ("thinking", "strip"),
        ("max_turns", 3),
        ("turn_tokens", 9),
        ("episode_tokens", 99_999),
        ("thinking_tokens", 9),
    ],
)
def test_what_an_episode_is_may_not_change(key, value, tmp_path):
    opened(recipe(tmp_path, environment=PLAYED))
    refused(recipe(tmp_path, environment=PLAYED | {key: value}), rf"environment.{key} is .* {value!r} here")
    refused(recipe(tmp_path), r"environment.name is 'calculator:Calculator' .* None here")


def layout(tmp_path, world, model=None, **parallel):
    megatron = {"parallel": {f"{kind}_parallel_size": size for kind, size in parallel.items()}, "model": model or {}}
    return recipe(tmp_path, trainer={"world_size": world}, megatron=megatron)


def test_the_trainers_layout_may_change(tmp_path):
    """Both ways between one rank and each layout of two; empty sections, and sizes of 1 that are stated, too."""
    opened(layout(tmp_path, 1))
    sequence = {"sequence_parallel": True}
    uneven = {"num_layers_in_first_pipeline_stage": 1}
    for world, model, parallel in (
        (2, None, {}),
        (2, sequence, {"tensor_model": 2}),
        (2, None, {"pipeline_model": 2}),
        (2, uneven, {"pipeline_model": 2}),
        (2, None, {"context": 2}),
        (1, None, {"tensor_model": 1, "expert_tensor": 1}),
    ):
        opened(layout(tmp_path, world, model, **parallel))
        opened(layout(tmp_path, 1))
        opened(layout(tmp_path, world, model, **parallel))


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 4)])
def test_another_expert_parallel_size_is_refused_with_both_layouts(tmp_path, before, after):
    RunFolder(layout(tmp_path, 4, expert_model=before)).close()
    said = (
        rf"expert_model_parallel_size was {before} \(TP 1, PP 1, CP 1, EP {before}\) "
        rf"and is {after} \(TP 2, PP 1, CP 1, EP {after}\); "
    )
    with pytest.raises(RecipeError, match=said):
        RunFolder(layout(tmp_path, 8, {"sequence_parallel": True}, tensor_model=2, expert_model=after))
    RunFolder(layout(tmp_path, 8, expert_model=before)).close()


@pytest.mark.parametrize(
    "megatron, said",
    [
        ({"ddp": {"use_distributed_optimizer": False}}, "ddp.use_distributed_optimizer is None .* False here"),
        ({"model": {"layernorm_epsilon": 1e-3}}, "megatron.model.layernorm_epsilon is None .* 0.001 here"),
    ],
)
def test_what_no_test_loads_is_refused(tmp_path, megatron, said):
    opened(recipe(tmp_path))
    refused(recipe(tmp_path, megatron=megatron), said)


def test_a_run_goes_on_whose_recipe_has_keys_that_have_left(tmp_path):
    opened(recipe(tmp_path))
    file = Path(recipe(tmp_path).run_dir) / "recipe.yaml"
    written = yaml.safe_load(file.read_text())
    written["weights"] |= {"store": "", "store_gib": 64.0, "anchor_every": 20, "transaction": "staged"}
    written["telemetry"] |= {"trace_steps": []}
    file.write_text(yaml.safe_dump(written))
    opened(recipe(tmp_path))


def test_a_run_goes_on_whose_recipe_has_a_key_under_its_old_name(tmp_path):
    changed = recipe(tmp_path, rewards={"variables": ["KEY"]})
    opened(changed)
    file = Path(changed.run_dir) / "recipe.yaml"
    file.write_text(file.read_text().replace("  variables:\n  - KEY", "  environment:\n  - KEY"))
    assert "environment:\n  - KEY" in file.read_text()
    opened(changed)
    assert load_run_recipe(changed.run_dir) == changed


def test_a_folder_in_use_is_refused(tmp_path):
    folder = RunFolder(recipe(tmp_path))
    with pytest.raises(RunInUse, match="another controller has locked"):
        RunFolder(recipe(tmp_path))
    folder.close()


def test_a_folder_that_cannot_be_made_is_one_line_with_its_key(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("/proc/x", tmp_path / "file"):
        refused(recipe(tmp_path, output_dir=str(folder)), rf"^output_dir: {folder}/.* cannot be made: \w[^/]*$")


def test_a_folder_with_other_files_is_refused(tmp_path):
    target = tmp_path / "runs/r"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("mine")
    refused(recipe(tmp_path), r"files but no recipe.yaml")


def test_a_start_killed_before_the_recipe_was_written_leaves_a_usable_folder(tmp_path):
    """The lock is there, the folders may be, recipe.yaml is not."""
    target = tmp_path / "runs/r"
    for name in ("logs", "checkpoints"):
        (target / name).mkdir(parents=True)
    (target / "lock").touch()
    (target / ".recipe.yaml.draft").write_text("name: r")
    opened(recipe(tmp_path))
    (target / "recipe.yaml").unlink()
    (target / "checkpoints/step_000001").mkdir()
    refused(recipe(tmp_path), r"files but no recipe.yaml")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch, number):
    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refused(recipe(tmp_path), r"r/lock cannot be locked .*; choose")


def test_a_recipe_written_before_a_key_existed_is_the_same_run(tmp_path):
    opened(recipe(tmp_path))
    path = tmp_path / "runs/r/recipe.yaml"
    older = yaml.safe_load(path.read_text())
    del older["weights"]["probe_every"]
    path.write_text(yaml.safe_dump(older))
    opened(recipe(tmp_path))
    older["weights"]["probe_every"] = 11
    path.write_text(yaml.safe_dump(older))
    refused(recipe(tmp_path), r"weights\.probe_every is 11 .* 10 here")


def test_a_mixture_keeps_its_tasks_but_for_their_workers(tmp_path):
    def mixture(**code):
        tasks = {"math": {"path": "m", "weight": 1}, "code": {"path": "c", "weight": 1, **code}}
        return recipe(tmp_path, prompts={"tasks": tasks})

    opened(mixture(workers=2, cpu_s=9))
    opened(mixture(workers=3, cpu_s=9))
    for key, changed in (("cpu_s", {"cpu_s": 8}), ("weight", {"weight": 2, "cpu_s": 9})):
        refused(mixture(**changed), rf"prompts\.tasks\.code\.{key} is ")


def test_a_finished_run_is_recognized(tmp_path):
    made = recipe(tmp_path, steps=3, validation={"every_steps": 2})

    def point():
        return resume_point(made.run_dir)

    assert finished(made, point()) is None
    folder = RunFolder(made)
    checkpoint = folder.checkpoint(3)
    checkpoint.mkdir()
    (checkpoint / "controller.json").write_text(
        '{"step": 3, "batches": 3, "run_id": "r", "position": {"journal_bytes": 0, "segment": 0, "offset": 0}}'
    )
    commit.write_commit(checkpoint, {"step": 3})
    assert finished(made, point()) is None, "the last validation is missing"
    (folder.path / "validation.jsonl").write_text('{"step": 3}\n')
    assert finished(made, point()) == "all 3 steps are made"
    assert finished(recipe(tmp_path, steps=4, validation={"every_steps": 2}), point()) is None
    folder.end("no prompt is left", step=3, final=True, gave_up=False)
    assert finished(recipe(tmp_path, steps=4, validation={"every_steps": 2}), point()) == "no prompt is left"
    folder.close()
