"""`evaluate` on a real engine and the tiny policy, and evaluations beside a real training with two engines."""

import json
import shutil

import pytest
from evaluation_files import AIME_2024, read_result
from json_lines import write
from whole_runs import overrides, product

from megatron_scalerl.checkpoints.jsonl import read_jsonl

HOSTILE = "\x1b]0;owned\x07[red]2-1=\u202e[/nothing]"


@pytest.fixture(scope="module")
def problems(tiny_dense, tmp_path_factory):
    """Ten problems of the tiny task with AIME's columns: the first hostile in its id, the last a training prompt."""
    folder = tmp_path_factory.mktemp("problems")
    held_out = read_jsonl(tiny_dense / "held_out.jsonl")[:9] + read_jsonl(tiny_dense / "prompts.jsonl")[:1]
    rows = [{"id": f"p{i}", "problem": r["prompt"], "answer": abs(int(r["answer"]))} for i, r in enumerate(held_out)]
    rows[0]["id"] = HOSTILE
    write(folder / "tiny.jsonl", rows)
    write(folder / "aime.jsonl", AIME_2024)
    return folder


def evaluate(tiny, problems, out, *more, check=True):
    options = ("--recipe", "recipes/tiny_cpu.yaml", "--data", f"{problems / 'tiny.jsonl'}:aime", "--out", out)
    return product("evaluate", tiny / "policy", *options, "--k", 4, *more, check=check)


@pytest.mark.slow
def test_budgets_of_a_folder(tiny_dense, problems, tmp_path):
    out = tmp_path / "out"
    options = ("--budgets", "4,48", "--examples", 1, "--training", tiny_dense / "prompts.jsonl")
    printed = evaluate(tiny_dense, problems, out, *options).stdout
    header, rows = read_result(out)
    assert len(rows) == 10 * 4 * 2 and header.version == 0 and len(header.digest) == 64
    assert {row.versions for row in rows} == {(0, 0)}
    assert all(row.cut == row.key.budget and row.text for row in rows)
    short = [row for row in rows if row.key.budget == 4]
    assert all(row.interrupted for row in short if not row.truncated and row.tokens > 10)
    assert sum(row.tokens for row in short) < sum(row.tokens for row in rows if row.key.budget == 48)
    summary = json.loads((out / "summary.json").read_text())
    assert [cell["budget"] for cell in summary["files"]] == [4, 48]
    assert summary["contamination"]["tiny"]["training_prompts"] > 100
    assert "mean@4 at a budget of 48 of the 9 uncontaminated problems" in " ".join(printed.split())
    assert "thinking" in printed
    assert "\x1b" not in printed and "\u202e" not in printed
    assert "\\x1b]0;owned\\x07[red]2-1=\\u202e[/nothing]" in printed, "shown as text"
    other = evaluate(tiny_dense, problems, out, "--budgets", "4,40", check=False)
    assert other.returncode == 2 and "settings.budgets: " in other.stderr


@pytest.mark.full
def test_an_evaluation_beside_a_training_is_of_its_steps_weights(tiny_dense, problems, tmp_path):
    shutil.copy(problems / "tiny.jsonl", tmp_path / "tiny.jsonl")
    more = f"""steps=4 engine.count=2 validation.every_steps=2 validation.end_generations=1 evaluation.every_steps=2
        evaluation.files=[{tmp_path}/tiny.jsonl:aime] evaluation.generations=2"""
    product("train", "recipes/tiny_cpu.yaml", *overrides(tiny_dense, tmp_path, "beside", *more.split()))
    folder = tmp_path / "beside"
    rows = read_jsonl(folder / "evaluation.jsonl")
    assert rows[0]["step"] == 0 and rows[-1]["step"] in (2, 3, 4) and not any("lost" in row for row in rows)
    digests = {r["step"]: r["weight_digest"] for r in read_jsonl(folder / "metrics.jsonl")}
    for row in rows:
        header, completions = read_result(folder / f"evaluations/step-{row['step']:06d}")
        assert header.version == row["step"] and {c.versions for c in completions} == {(row["step"],) * 2}
        assert header.digest == row["weight_digest"] == digests.get(row["step"], header.digest)
    states = [(row["name"], row["state"]) for row in read_jsonl(folder / "engines.jsonl")]
    assert [state for _, state in states].count("held") >= len(rows)
    roles = {row.get("role") for row in read_jsonl(folder / "ledger.jsonl")}
    assert "evaluation" in roles
