"""Kinds of tiny problems: every answer is right, every flaw is the one that is described."""

import random
from collections import Counter

import pytest

from megatron_scalerl.recipe.sections import PAPER_PHRASE
from megatron_scalerl.tiny.__main__ import main
from megatron_scalerl.tiny.kinds import KINDS, draw_search, draw_sort, kind_of, search_trace, sort_trace
from megatron_scalerl.tiny.task import apply, prompt_rows, warm_start_rows
from megatron_scalerl.tiny.tokenizer import build_tokenizer


def after(x, text):
    """The value that the operations of a search's text lead to from x."""
    for operation in text.split("=")[0].split(";"):
        x = apply(x, operation[0], int(operation[1:]))
    return x


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_search_has_one_solution_which_its_flawless_trace_finds(level):
    rng = random.Random(level)
    for _ in range(300):
        problem = draw_search(rng, level)
        target = int(problem.text.split("=")[1])
        assert [x for x in range(1, 10) if after(x, problem.text) == target] == [problem.answer]
        thinking, answer = search_trace(rng, problem, 0.0)
        tries = {int(written[0]): int(written.split("=")[-1]) for written in thinking.split(";")}
        assert len(tries) == thinking.count(";") + 1, "no x is tried twice"
        assert answer == problem.answer == list(tries)[-1]
        assert tries == {x: after(x, problem.text) for x in tries}


def test_a_search_that_always_gives_up_tries_once():
    rng = random.Random(1)
    for _ in range(100):
        thinking, answer = search_trace(rng, draw_search(rng, 2), 1.0)
        assert ";" not in thinking and answer == int(thinking[0])


def test_a_sort_is_right_without_the_flaw_and_a_permutation_with_it():
    rng = random.Random(1)
    wrong = 0
    for _ in range(500):
        problem = draw_sort(rng, 6)
        digits = sorted(problem.text.rstrip("=").split(";"))
        assert str(problem.answer) == "".join(digits)
        assert sort_trace(rng, problem, 0.0) == (";".join(digits), problem.answer)
        thinking, answer = sort_trace(rng, problem, 0.5)
        assert sorted(thinking.split(";")) == digits and str(answer) == thinking.replace(";", "")
        wrong += answer != problem.answer
    assert wrong > 300


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_every_kind_are_in_the_vocabulary_and_split_without_overlap(name):
    kind = KINDS[name]
    training = [row["prompt"] for row in prompt_rows(1, 1000, held_out=False, kind=kind)]
    held_out = [row["prompt"] for row in prompt_rows(1, 200, held_out=True, kind=kind)]
    rows = list(warm_start_rows(1, 1500, kind))
    assert not set(held_out) & {*training, *(row["prompt"] for row in rows)}
    assert {row["level"] for row in rows} == set(kind.levels)
    tokenizer = build_tokenizer()
    for row in rows[:200]:
        assert tokenizer.unk_token_id not in tokenizer(row["prompt"] + "<think>" + row["completion"])["input_ids"]
    cut = [row for row in rows if PAPER_PHRASE in row["completion"]]
    assert cut and all(row["completion"].split("</think>")[1].removesuffix("<eos>").isdigit() for row in cut)


def test_levels_and_flaw_make_a_task_easier_or_harder():
    easy, hard = kind_of("chain", levels=(1, 2)), kind_of("chain", flaw=0.9)
    assert Counter(row["level"] for row in prompt_rows(1, 20, held_out=False, kind=easy)) == {1: 10, 2: 10}
    usual = sum(len(row["completion"]) for row in warm_start_rows(1, 300))
    assert usual > 1.5 * sum(len(row["completion"]) for row in warm_start_rows(1, 300, hard))


def test_unknown_names_are_one_line_and_write_nothing(tmp_path, capsys):
    assert main([str(tmp_path / "out"), "--seed", "1", "--kind", "chess"]) == 2
    assert capsys.readouterr().err == "--kind: expected one of chain, search, sort, found 'chess'\n"
    assert main([str(tmp_path / "out"), "--seed", "1", "--size", "huge"]) == 2
    assert "--size: expected one of small, base, large, found 'huge'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
