"""The folder of the tiny task is written atomically, and only once per seed."""

import json

import pytest

from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.tiny import build as tiny_build
from megatron_scalerl.tiny.__main__ import main
from megatron_scalerl.tiny.build import TinyArguments, build

SMALL = {"train_prompts": 20, "held_out": 5, "sft_examples": 10}
COMMAND = ["--train-prompts", "20", "--held-out", "5", "--sft-examples", "10"]


def contents(folder):
    """File -> bytes; without the folder itself, which the recipe names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes().replace(bytes(folder), b"") for path in files}


def test_the_folder_contains_policy_prompts_and_warm_start(tmp_path):
    assert build(tmp_path / "out", TinyArguments(seed=1, **SMALL))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "base_policy",
        "held_out.jsonl",
        "prompts.jsonl",
        "recipe.yaml",
        "sft.jsonl",
        "tiny.json",
    ]
    assert load_recipe(tmp_path / "out" / "recipe.yaml").prompts.path == str(tmp_path / "out" / "prompts.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no partial folder stays"
    rows = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "held_out", "sft")
    }
    assert [len(rows[name]) for name in ("prompts", "held_out", "sft")] == [20, 5, 10]
    assert set(rows["prompts"][0]) == set(rows["held_out"][0]) == {"prompt", "answer", "level"}
    assert {"prompt", "completion"} <= set(rows["sft"][0])


def test_equal_arguments_give_equal_bytes(tmp_path):
    build(tmp_path / "a", TinyArguments(seed=1, **SMALL))
    build(tmp_path / "b", TinyArguments(seed=1, **SMALL))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_second_call_changes_nothing_and_another_seed_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(out), "--seed", "1", *COMMAND]) == 0
    before = contents(out)
    assert main([str(out), "--seed", "1", *COMMAND]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("already exists")
    assert main([str(out), "--seed", "2", *COMMAND]) == 2
    assert capsys.readouterr().err.startswith(f"{out}: it was written with seed 1, not with seed 2")
    assert main([str(out), "--seed", "1", "--moe", *COMMAND]) == 2
    assert contents(out) == before


def test_a_folder_with_other_content_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main([str(tmp_path), "--seed", "1", *COMMAND]) == 2
    assert "the folder is not empty and has no tiny.json" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_invalid_count_is_one_line_and_leaves_nothing_behind(tmp_path, capsys):
    assert main([str(tmp_path / "out"), "--seed", "1", "--held-out", "0"]) == 2
    assert capsys.readouterr().err == "--held-out: 0 is too few; take at least 1\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    """The stand-in for a full disk fails after the policy and the prompts were written."""
    write_rows = tiny_build._write_rows

    def full_disk_at_the_warm_start(path, rows):
        if path.name == "sft.jsonl":
            assert (path.parent / "base_policy" / "config.json").is_file()
            raise OSError(28, "No space left on device")
        write_rows(path, rows)

    monkeypatch.setattr(tiny_build, "_write_rows", full_disk_at_the_warm_start)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path / "out", TinyArguments(seed=1, **SMALL))
    assert list(tmp_path.iterdir()) == []


def test_moe_writes_the_mixture(tmp_path):
    build(tmp_path / "out", TinyArguments(seed=1, moe=True, **SMALL))
    config = json.loads((tmp_path / "out" / "base_policy" / "config.json").read_text())
    assert config["architectures"] == ["Llama4ForCausalLM"]
