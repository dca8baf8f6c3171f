"""The collection goes on wherever it was stopped, contains failures, and writes what `fit.tiny_runs` reads."""

import json
from pathlib import Path

import pytest

from megatron_scalerl.fit.tiny_runs import DATA, tiny_runs

TOOLS = Path(__file__).parents[2] / "tools"
TOOL = TOOLS / "collect_curves.py"
ROW = {"regime": "x", "kind": "chain", "levels": "1-8", "flaw": "0.2", "size": "base", "task_seed": "1"}
ROW |= {"sft_steps": "9", "steps": "3", "lr": "1e-4", "groups": "4", "group_size": "8"}


@pytest.fixture
def collect(bench, tmp_path, monkeypatch):
    """A collection whose commands only write what the real ones would; `failing`: names whose RL fails."""

    class Collection(bench.Collection):
        failing, asked = set(), []

        def _command(self, row, what, arguments):
            self.asked.append((row["name"], what))
            if what == "rl" and row["name"] in self.failing:
                raise RuntimeError("exit code 1")
            if what == "warm start":
                policy(Path(arguments[-1]))
            if what == "rl":
                run_folder(self.work / row["name"])

    return Collection(tmp_path / "work", tmp_path / "data")


def rows(*names, **changes):
    return [ROW | {"name": name, "seed": str(seed)} | changes for seed, name in enumerate(names)]


def policy(folder):
    folder.mkdir(parents=True)
    config = {"hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"num_hidden_layers": 3, "intermediate_size": 16, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))


def run_folder(folder):
    """Three batches, of which the second made no step, validated at steps 0 and 2."""
    folder.mkdir()

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    batch = {"completion_tokens_mean": 10.0, "train_completions": 32.0, "train_pass_rate": 0.5, "batch/groups": 4.0}
    write("metrics.jsonl", [{"step": 1, "tokens": 500} | batch, {"step": 1, "skipped": 1} | batch])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "tokens": 700} | batch) + "\n")
    point = {"compute": 0.1, "prompts": 2, "generations": 2, "within_variance": 0.25}
    point |= {"truncated_share": 0.0, "mean_completion_tokens": 9.0, "entropy": 0.1}
    write("validation.jsonl", [{"step": 0, "pass_rate": 0.25} | point, {"step": 2, "pass_rate": 0.75} | point])
    outcomes = [{"step": 0, "outcomes": "0100"}, {"step": 2, "outcomes": "1011"}]
    write("validation_by_prompt.jsonl", [row | {"by_prompt": [0.5, 0.5]} for row in outcomes])
    (folder / "end.json").write_text('{"reason": "all 2 steps are made"}')


def test_the_same_call_goes_on_and_warm_starts_are_made_once(collect):
    assert collect.run(rows("a", "b")) == 0
    assert [what for _, what in collect.asked] == ["task", "warm start", "rl", "rl"]
    before = (collect.data / "a.json").read_bytes()
    del collect.asked[:]
    assert collect.run(rows("a", "b", "c", sft_steps="9")) == 0
    assert collect.asked == [("c", "rl")]
    assert collect.run(rows("d", sft_steps="10")) == 0
    assert [what for _, what in collect.asked[1:]] == ["task", "warm start", "rl"]
    assert (collect.data / "a.json").read_bytes() == before


def test_the_data_are_what_the_loader_reads(collect):
    (collect.data / "table.csv").write_text("name,regime\na,x\n")
    collect.run(rows("a"))
    [run] = tiny_runs(data=collect.data)
    # 3 layers x 8 x (4 x (2 x 2 + 2 x 1) + 3 x 16) + 8 x 64 parameters; 3 x 320 tokens generated, 1200 trained
    parameters = 3 * 8 * (24 + 48) + 512
    assert run.compute.tolist() == pytest.approx([0.0, (2 * 960 + 6 * 1200) * parameters * 1e-12], rel=1e-5)
    assert run.correct(1).tolist() == [[True, False], [True, True]]
    assert run.ended == "all 2 steps are made" and run.training["step"].tolist() == [1, 1, 2]


def test_every_row_of_the_shipped_table_is_a_valid_recipe(bench, tmp_path):
    from megatron_scalerl.recipe.file import load_recipe

    table = bench.read_table(DATA / "table.csv")
    collection = bench.Collection(tmp_path / "work", tmp_path / "data")
    for row in table:
        recipe = load_recipe(TOOLS.parent / bench.BASE, [*collection._settings(row), f"name={row['name']}"])
        assert recipe.steps == int(row["steps"]) and recipe.optimizer.lr == float(row["lr"])
        assert recipe.validation.fresh_seeds
    order = bench.in_order(table)
    assert sorted(row["name"] for row in order) == sorted(row["name"] for row in table)
    assert len({row["regime"] for row in order[:9]}) >= 5, "an early end leaves many regimes"
