"""Names of policies and datasets become folders of the local cache; what is not there is said with its command."""

import json
import sys

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from megatron_scalerl.commands.convert import add_arguments
from megatron_scalerl.evaluation.problems import read_problems
from megatron_scalerl.plan.command import config_folder
from megatron_scalerl.recipe import hub
from megatron_scalerl.recipe.file import check_policy, check_prompts, load_recipe, load_recipe_for

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hugging Face cache with the policy Qwen/Qwen3-8B and the dataset openai/gsm8k; nothing is reached."""
    for name, file in (("models--Qwen--Qwen3-8B", "config.json"), ("datasets--openai--gsm8k", "main/train.jsonl")):
        (tmp_path / name / "refs").mkdir(parents=True)
        (tmp_path / name / "refs" / "main").write_text(COMMIT)
        path = tmp_path / name / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(cache, **sections):
    data = {"name": "r", "steps": 1, "policy": {"path": "Qwen/Qwen3-8B"}, "prompts": {"path": "openai/gsm8k/main"}}
    (cache / "r.yaml").write_text(yaml.safe_dump(data | sections))
    return load_recipe(cache / "r.yaml")


def test_names_become_folders_of_the_cache_that_say_their_commit(cache):
    found = recipe(cache)
    assert found.policy.path == f"{cache}/models--Qwen--Qwen3-8B/snapshots/{COMMIT}"
    assert found.prompts.path == f"{cache}/datasets--openai--gsm8k/snapshots/{COMMIT}/main"
    check_policy(found)
    check_prompts(found)
    assert config_folder(found.policy.path, cache / "r.yaml").name == COMMIT
    assert load_recipe_for("Qwen/Qwen3-8B", prompts="p").policy.path == found.policy.path
    assert recipe(cache, policy={"path": f"Qwen/Qwen3-8B@{COMMIT}"}).policy.path == found.policy.path
    tasks = {"path": None, "tasks": {"a": {"path": "openai/gsm8k/main", "weight": 1}}}
    assert recipe(cache, prompts=tasks).prompts.tasks["a"].path == found.prompts.path


def test_evaluation_files_may_be_names(cache):
    found = read_problems("openai/gsm8k/main", "question,answer")
    assert (found.path, found.name, found.problems[0].text) == ("openai/gsm8k/main", "main", "1+1?")
    with pytest.raises(ValueError, match=r"^a/b: .*: run hf download a/b --repo-type"):
        read_problems("a/b")


def test_a_name_stays_where_the_package_is_not_installed(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert recipe(cache).policy.path == "Qwen/Qwen3-8B"


def test_a_local_folder_goes_before_a_name(cache):
    (cache / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert recipe(cache).policy.path == "Qwen/Qwen3-8B"


def test_what_is_not_there_is_said_with_the_command_that_fetches_it(cache):
    with pytest.raises(
        ValueError,
        match=r"Qwen/Qwen3-4B@v1 is not a Hugging Face folder: .*: run hf download Qwen/Qwen3-4B --revision v1, or",
    ):
        check_policy(recipe(cache, policy={"path": "Qwen/Qwen3-4B@v1"}))
    with pytest.raises(ValueError, match=r"runs/tiny/policy is not a Hugging Face folder: it has no config.json$"):
        check_policy(recipe(cache, policy={"path": "runs/tiny/policy"}))
    with pytest.raises(
        ValueError,
        match=r"no such file .*: run hf download a/b --repo-type dataset --revision refs/pr/1, or",
    ):
        check_prompts(recipe(cache, prompts={"path": "a/b@refs/pr/1"}))
    (cache / "data").mkdir()
    for path in ("data/b", "c/p.jsonl", "/a/b", "a/..", "a/b/../../..", "a/b@..", "a/b@../x", "a/b@-x"):
        with pytest.raises(ValueError, match=r"no such file or folder of prompts$"):
            check_prompts(recipe(cache, prompts={"path": path}))


def test_a_download_needs_consent_and_a_hub(cache, monkeypatch):
    asked = []

    def snapshot(name, *, local_files_only, **options):
        asked.append((name, local_files_only))
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub.local_path("a/b", "model") == "a/b"
    with pytest.raises(ValueError, match=r"^a/b: the download failed: no route$"):
        hub.local_path("a/b", "model", download=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.local_path("a/b", "model", download=True) == "a/b"
    assert asked == [("a/b", True), ("a/b", False), ("a/b", True)]


def test_a_conversion_takes_a_name(cache):
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["to-megatron", "Qwen/Qwen3-1B", "out"])
    with pytest.raises(ValueError, match=r"hf download Qwen/Qwen3-1B, or"):
        options.convert(options, None)
