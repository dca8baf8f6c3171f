"""Training prompts that contain evaluation problems."""

import pytest
from evaluation_files import written
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.evaluation.contamination import MOST_HITS, Text, contamination, training_texts, words

LONG = "a farmer has twelve red hens and nine brown ones that lay six eggs each week"


def texts(*values, name="t"):
    return [Text(where=f"{name}{number}", text=value) for number, value in enumerate(values)]


def pairs(found):
    return {(hit.training.where, hit.problem.where) for hit in found.hits}


def test_words_are_normalized():
    text = "Let  $X^2 \N{MINUS SIGN} 3\N{MULTIPLICATION SIGN}y_{10}$!"
    assert " ".join(words(text)) == "let x ^ 2 - 3 * y 10"
    assert words("\N{FULLWIDTH DIGIT TWO}\N{NO-BREAK SPACE}HENS") == ("2", "hens")


def test_thirteen_words_in_a_row_hit():
    assert len(LONG.split()) == 16
    part = " ".join(LONG.split()[2:15])
    shorter = " ".join(LONG.split()[2:14])
    found = contamination(
        texts(f"First: {part.upper()}, then what?", f"First: {shorter} then what?", f"Before. {LONG}. After."),
        texts(LONG, name="p"),
    )
    assert pairs(found) == {("t0", "p0"), ("t2", "p0")}
    assert [hit.share for hit in found.hits] == [1.0, 0.25], "the whole problem first; one of four 13-grams"
    assert (found.training_hit, found.problems_hit) == (2, {"p0"})
    assert found.line().startswith("1 of 1 evaluation problems (100.0 %) share 13 words in a row")


def test_a_short_problem_is_compared_as_a_whole():
    eight, seven = "one two three four five six seven eight", "one two three four five six seven"
    problems = texts(eight, seven, name="p")
    found = contamination(texts(f"x {eight} y", f"x {seven} y", seven.upper() + "?"), problems)
    assert pairs(found) == {("t0", "p0"), ("t2", "p1")}


def test_operators_tell_problems_apart():
    found = contamination(texts("3-5", "3 - 5", "3+5"), texts("What? 3-5".removeprefix("What? "), name="p"))
    assert pairs(found) == {("t0", "p0"), ("t1", "p0")}


def test_a_problem_without_words_is_never_hit():
    assert contamination(texts("?!", ""), texts("...", name="p")).hits == ()


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=14), max_size=4), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_the_index_finds_what_a_search_finds(lists, n):
    problems = [text for text in lists if text]
    training = [[*text, "a", "b"] for text in lists] + lists
    found = contamination(texts(*map(" ".join, training)), texts(*map(" ".join, problems), name="p"), n=n)

    def hit(prompt, problem):
        size = min(n, len(problem))
        if len(problem) < min(n, 8):
            return prompt == problem
        windows = [problem[i : i + size] for i in range(len(problem) - size + 1)]
        return any(prompt[i : i + size] in windows for i in range(len(prompt) - size + 1))

    expected = {(f"t{i}", f"p{j}") for i, a in enumerate(training) for j, b in enumerate(problems) if hit(a, b)}
    assert pairs(found) == expected


def test_a_phrase_in_every_text_keeps_the_closest_prompts_alone():
    problems = texts(*(f"{LONG} number{i} and then some more of it" for i in range(3)), name="p")
    training = texts(*(f"{LONG} prompt{i}" for i in range(400)), problems[1].text, name="t")
    found = contamination([*training[:300], training[400], *training[300:400]], problems)
    assert (found.all_hits, found.training_hit, len(found.hits)) == (3 * 401, 401, 3 * MOST_HITS)
    assert found.problems_hit == {"p0", "p1", "p2"}
    of_first = [hit for hit in found.hits if hit.problem.where == "p1"]
    assert (of_first[0].training, of_first[0].share) == (training[400], 1.0)
    assert [hit.training for hit in of_first[1:]] == training[: MOST_HITS - 1], "of equal ones the first"


def test_training_prompts_are_a_column_of_a_file(tmp_path):
    rows = [{"prompt": "1+1", "question": LONG}, {"prompt": LONG, "question": "2+2"}]
    path = written(tmp_path, "train.jsonl", rows)
    assert [text.text for text in training_texts([path, f"{path}:question"])] == ["1+1", LONG, LONG, "2+2"]
    with pytest.raises(ValueError, match=r"train.jsonl.*'answer'"):
        list(training_texts([f"{path}:answer"]))
