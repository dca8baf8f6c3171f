"""References of the verifier `math`: which of them an answer can be scored right against."""

import pytest

from megatron_scalerl.rewards.math import check_references, verify_math

OBJECTS = (
    *(
        "36",
        "-1.5",
        "1,234",
        "10\\%",
        "\\$36",
        "$5",
        "\\frac{1}{2}",
        "\\frac 59",
        "x^2+1",
        "2x+3=0",
        "6 - 5i",
        "42_{10}",
    ),
    *("(1,2)", "[0,1)", "\\{1,2\\}", "(-\\infty, 2) \\cup (3, \\infty)", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    *(
        "A",
        "(C)",
        "\\text{(C)}",
        "\\text{even}",
        "7\\text{ cm}",
        "90^\\circ",
        "\\sin x",
        "1 \\pm \\sqrt{19}",
        "\\boxed{3}",
    ),
    *("A : B", "\\text{No}", "$\\textbf{(B)}$", "No", "Monday", "12 dollars", "\\lfloor 3.7 \\rfloor"),
)
TEXTS = (
    *("\\textbf{(B)}\\ 12", "$\\mathrm{(C) \\ } 7$", "\\boxed{\\text{(D) }12}", "N/A"),
    *("B. 12", "(C) the second", "2024-05-01", "3:05", "11:30 am"),
    *(
        "",
        "NaN",
        "None",
        "proof",
        "No solution",
        "12 dragons or so",
        '{"a": 1}',
        "null",
        "[]",
        "see the solution above",
    ),
)


def test_mathematical_objects_are_references_and_texts_are_not():
    assert dict(zip(OBJECTS, check_references(OBJECTS))) == dict.fromkeys(OBJECTS, "")
    for text, problem in zip(TEXTS, check_references(TEXTS), strict=True):
        assert problem.startswith(f"{text!r} "), text


@pytest.mark.parametrize("text", [text for text in OBJECTS if "boxed" not in text])
def test_every_reference_that_is_accepted_scores_its_own_text_right(text):
    assert verify_math(f"so \\boxed{{{text.strip('$')}}}", text, {}) is True
    assert verify_math("\\boxed{777}", text, {}) is False


RIGHT = [
    "<answer>34</answer>",
    "I am 95% sure. <answer> $34$ </answer> Confidence: 95",
    "<answer>x = 34</answer>\nThis took 3 steps.",
    "<answer>\\boxed{34}</answer> 5",
    "<answer>12</answer> wait <answer>34.0</answer>",
    "<answer>The number is 34.</answer> 7",
    "<answer></answer> 34",
    "2 + 32 = 34\n#### 34",
    "2 + 32\n#### 34 apples",
    "#### Step 2\nThe answer is $34$.",
    "##### Step 3: add\nthe answer is 34",
    "#### Final answer\n34",
    "The answer is 34.\n#### Summary\nSo $x=34$",
    "#### Final Answer: 34 eggs",
    "<answer>Total: 34</answer>",
    "The answer is 34.",
]
WRONG = ["<answer>35</answer> 34", "34\n#### 35", "\\boxed{35} <answer>34</answer>"]


@pytest.mark.parametrize("reference", ["34", "She has 30 + 4 = <<30+4=34>>34 apples.\n#### 34"])
def test_forms_of_an_answer(reference):
    assert [answer for answer in RIGHT + WRONG if verify_math(answer, reference, {})] == RIGHT


def test_a_text_of_tags_alone_is_read_at_once():
    assert verify_math("<answer>" * 20_000, "34", {}) is False


def test_the_reference_of_gsm8k_is_what_follows_its_mark():
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 1,072"
    assert check_references([text]) == [""]
    assert verify_math("\\boxed{1072}", text, {}) is True and verify_math("\\boxed{72}", text, {}) is False


def test_many_references_are_parsed_in_several_processes(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.math._FEW", 1)
    assert [bool(problem) for problem in check_references(["x+1", "proof", "7", "x+2"])] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["[" * 5000, "(" * 900 + "1" + ")" * 900, "1," * 100_000, "9" * 3000])
def test_a_reference_that_no_parser_can_read_ends_no_load(text):
    assert len(check_references([text])) == 1
