"""Task mixtures: shares by weight, the same draws after a replay, prompts of several files with ids of their own."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_lines import write
from recipe_files import SETTLED, small_recipe

from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.prompts.dataset import first_of_each_task, load_prompts, prompt_id
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.tiny.tokenizer import build_tokenizer
from megatron_scalerl.types import Prompt

WEIGHTS = {"code": 1.0, "math": 3.0}


def prompts(**counts):
    return [
        Prompt(prompt_id=f"{task}{n}", text=f"{task}{n}", answer="1", token_ids=(1,), task=task)
        for task, count in counts.items()
        for n in range(count)
    ]


def mixture(threshold=None, max_epochs=None, weights=WEIGHTS, seed=1, **counts):
    counts = counts or {"math": 20, "code": 20}
    return Curriculum(prompts(**counts), seed, threshold, max_epochs, weights)


def tasks(curriculum, count):
    return [curriculum.draw()[0].task for _ in range(count)]


@given(st.lists(st.floats(0.1, 9.0), min_size=2, max_size=5), st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_shares_are_met_to_within_one_prompt(weights, count):
    named = {f"t{n}": weight for n, weight in enumerate(weights)}
    drawn = tasks(mixture(weights=named, **dict.fromkeys(named, 3)), count)
    for name, weight in named.items():
        assert abs(drawn.count(name) - count * weight / sum(weights)) <= len(named) - 1 + 1e-6


def test_each_task_has_epochs_of_its_own():
    curriculum = mixture(math=30, code=5)
    draws = [curriculum.draw() for _ in range(40)]
    assert [epoch for prompt, epoch in draws if prompt.task == "code"] == [0] * 5 + [1] * 5
    assert {epoch for prompt, epoch in draws if prompt.task == "math"} == {0}
    assert len({prompt.prompt_id for prompt, _ in draws if prompt.task == "math"}) == 30


def test_a_task_is_drawn_as_it_is_alone():
    alone = Curriculum(prompts(math=20), 1, None, None, {"math": 1.0})
    mixed = mixture()
    ids = [p.prompt_id for p, _ in (mixed.draw() for _ in range(80)) if p.task == "math"]
    assert ids == [alone.draw()[0].prompt_id for _ in range(60)]


def test_the_others_go_on_in_their_proportions_when_a_task_has_no_prompt_left():
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    curriculum = mixture(0.9, weights=weights, a=2, b=50, c=50)
    for prompt in prompts(a=2):
        curriculum.observe(prompt.prompt_id, 1.0)
    drawn = tasks(curriculum, 30)
    assert "a" not in drawn and drawn.count("c") == 20
    assert curriculum.removed == 2


def test_the_end_names_the_reason_of_every_task():
    curriculum = mixture(0.9, max_epochs=1, math=2, code=1)
    assert sorted(tasks(curriculum, 3)) == ["code", "math", "math"]
    for _ in range(2):
        with pytest.raises(CurriculumDry, match=r"^code: curriculum.max_epochs 1 reached; math: curriculum.max_ep"):
            curriculum.draw()


def task(tmp_path, name, rows, **values):
    path = write(tmp_path / f"{name}.jsonl", rows)
    section = PromptsSection(path=path, **SETTLED | {"held_out": 0} | values)
    return Task(name=name, weight=1.0, recipe=small_recipe(prompts=section))


def test_prompts_of_several_files_know_their_task(tmp_path):
    same = {"prompt": "7;+2=", "answer": "9"}
    found = load_prompts(
        build_tokenizer(),
        [
            task(tmp_path, "code", [same], prompt_template="1{prompt}"),
            task(tmp_path, "math", [same, same, {"q": "3;+1=", **same, "prompt": "3;+1="}], prompt_column="prompt"),
        ],
    )
    assert [(p.task, p.text) for p in found.training] == [("code", "7;+2="), ("math", "7;+2="), ("math", "3;+1=")]
    ids = {p.prompt_id for p in found.training}
    assert len(ids) == 3, "the same row in two tasks is two prompts"
    assert prompt_id("7;+2=", "9") not in ids
    assert prompt_id("7;+2=", "9") == prompt_id("7;+2=", "9", "") == "a145e8825636e8d8", "ids of existing runs"
    assert [line for line in found.lines() if ".jsonl" not in line] == [
        "prompts.tasks.code: 1 rows, 1 to train on, 0 held out",
        "prompts.tasks.math: 3 rows, 2 to train on, 0 held out",
        "prompts.tasks.math: 1 duplicates skipped",
    ]


def test_no_task_trains_on_what_another_holds_out(tmp_path):
    rows = [{"prompt": f"{n};+2=", "answer": str(n)} for n in range(9)]
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[3]) + "\n")
    math = task(tmp_path, "math", rows, held_out_path=str(tmp_path / "held.jsonl"))
    found = load_prompts(build_tokenizer(), [task(tmp_path, "code", rows[:6], held_out=2), math])
    held_out = {p.text for p in found.held_out}
    assert [p.task for p in found.held_out] == ["code", "code", "math"]
    assert not held_out & {p.text for p in found.training}
    assert [p.task for p in first_of_each_task(found.held_out, 1)] == ["code", "math"]
    assert first_of_each_task(found.held_out, None) == list(found.held_out)
    with pytest.raises(ValueError, match=r"^prompts.tasks.code.held_out holds out 6 of the 6 prompts of"):
        load_prompts(build_tokenizer(), [task(tmp_path, "code", rows[:6], held_out=6), math])
    many = [{"prompt": f"{n};-2=", "answer": "1"} for n in range(40)]
    with pytest.raises(ValueError, match=r"none is left to train on; set fewer, such as 4 \(the default is 1000\)$"):
        load_prompts(build_tokenizer(), [task(tmp_path, "math", many, held_out=1000)])


def test_an_answer_that_its_verifier_cannot_use_is_named_by_file_and_line(tmp_path):
    def check(task, answers):
        problems = [f"expected a test of {task.name}, found {n}" if n in unusable else "" for _, n, _ in answers]
        return problems, [""] * len(answers)

    rows = [{"prompt": f"{n};+2=", "answer": str(n)} for n in range(9)]
    unusable = {"4", "7"}
    report = load_prompts(build_tokenizer(), [task(tmp_path, "code", rows)], check).reports[0]
    assert report.training == 7
    assert report.unusable[0].endswith("code.jsonl: line 5: 'answer': expected a test of code, found 4")
    unusable = {str(n) for n in range(5)}
    with pytest.raises(ValueError, match=r"5 of 9 rows cannot be learned from, such as .*line 5: 'answer': expected"):
        load_prompts(build_tokenizer(), [task(tmp_path, "code", rows)], check)


def test_groups_that_were_journaled_before_there_were_tasks_are_read():
    old = Prompt(prompt_id="p", text="t", answer="a", token_ids=(1,))
    row = msgspec.to_builtins(old)
    del row["task"]
    assert msgspec.convert(row, Prompt, strict=False) == old
