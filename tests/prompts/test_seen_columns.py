"""What a policy should see of a row, and what a row is scored by: read, refused or said, never dropped in silence."""

import pytest
import yaml
from layout_rows import ADD, ASK, LIMITS, ROWS, SUM, USER, rows

from megatron_scalerl.rewards.math import verify_math
from megatron_scalerl.rewards.worker import load_verifier

PRIME = "Which is prime?"
SHOWN = f"{PRIME}\n\nA. 4\nB. 7"
TWO = {"question": PRIME, "options": ["4", "7"]}
PUBLISHED = {
    # a file in ROWS -> the question as the policy gets it, the reference
    "SkyRL": (ASK, "3/4"),
    "AReaL": (ASK, "\\boxed{3/4}"),
    "NeMo_Gym": (ASK, "3/4"),
    "NeMo_Gym_metadata": (ASK, "3/4"),
    "NeMo_Gym_choices": (f"{PRIME}\nA: 4\nB: 7", "B"),
    "INTELLECT-3": (ASK, "3/4"),
    "SciBench": (ASK, "0.75"),
}
READ = [list(case.values()) for case in yaml.safe_load((ROWS / "seen.yaml").read_text())]


@pytest.mark.parametrize("row, text, answer", [*((rows(name)[0], *read) for name, read in PUBLISHED.items()), *READ])
def test_a_row_is_read(row, text, answer, prompts_of):
    (prompt,) = prompts_of([row]).training
    assert (prompt.text, prompt.answer) == (text, answer)
    assert verify_math(answer if "boxed" in answer else f"\\boxed{{{answer}}}", answer, {})


CODE = {
    # a file in ROWS -> a right program
    "SkyRL_code": SUM,
    "AReaL_code": SUM,
    "NeMo_Gym_code": SUM,
    "INTELLECT-3_code": SUM,
    "codeforces": SUM,
    "LeetCodeDataset": ADD,
    "TACO-verified": SUM,
    "OpenCode_asserts": ADD,
}


@pytest.mark.parametrize("name", CODE)
def test_a_row_of_tests_is_read(name, prompts_of):
    (prompt,) = prompts_of(rows(name), "code").training
    verify = load_verifier("code", LIMITS)
    assert verify(f"```python\n{CODE[name]}\n```", prompt.answer, dict(prompt.extra))
    assert not verify("```python\nprint(7)\n```", prompt.answer, dict(prompt.extra))
    if name == "codeforces":
        assert prompt.text == "Add.\n\nTwo integers.\n\nTheir sum."


PLAIN = {"problem": ASK, "answer": "3/4"}
MEDIA = ("images", "image", "Image_1", "decoded_image", "image_path", "img", "videos", "video_url", "audio", "audios")
PLACES = ("<image>", "<image 1>", "<|image_1|>", "<video>", "![](a.png)", '<img src="a">', "\\includegraphics{a}")
TOOLS = ("tools", "functions", "documents")
REFUSED = {
    **{name: ({**PLAIN, name: ["a.png"]}, f"'{name}' cannot be used: the policy reads text alone") for name in MEDIA},
    **{
        place: ({**PLAIN, "problem": f"{ASK} {place}"}, "the question shows .*the policy reads text")
        for place in PLACES
    },
    **{name: ({**PLAIN, name: [{"name": "f"}]}, f"'{name}' cannot be used: tools and documents") for name in TOOLS},
    "bytes": ({**PLAIN, "image": {"bytes": "abc", "path": None}}, "'image' cannot be used"),
    "NeMo Gym with tools": (
        {"responses_create_params": {"input": USER, "tools": [{"name": "f"}]}, "expected_answer": "3/4"},
        "'tools' cannot be used",
    ),
    "a message that calls": (
        {"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, *USER], "answer": "3/4"},
        "'tool_calls' cannot be used",
    ),
    "a message with an image": (
        {"messages": [{**USER[0], "images": ["a"]}], "answer": "3/4"},
        "'images' cannot be used",
    ),
    "a part of a message": (
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "3/4"},
        "every message in 'prompt' has to have a role and a text",
    ),
    "no such letter": ({**TWO, "answer": "C"}, "'answer' is 'C', which is not exactly one"),
    "no such text": ({**TWO, "answer": "9"}, "is not exactly one of the choices"),
    "no such number": ({**TWO, "answer": 3}, "is not exactly one of the choices"),
    "a number as text": ({**TWO, "answer": "1"}, "is not exactly one of the choices"),
    "two letters": ({**TWO, "answer": "A, B"}, "is not exactly one of the choices"),
    "two answers": ({**TWO, "answer": ["A", "B"]}, "is not exactly one of the choices"),
    "equal choices": ({**TWO, "options": ["7", "7"], "answer": "7"}, "is not exactly one of the choices"),
    "number or text": ({**TWO, "options": ["1", "0", "5"], "answer": 1}, "is not exactly one of the choices"),
    "several answers": ({"problem": ASK, "answer": ["3/4", "0.75"]}, "has 2 reference answers"),
    "an empty tag": ({"problem": ASK, "answer": "3/4 <answer></answer>"}, "'answer' is an empty text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_is_refused(name, prompts_of):
    row, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"1 of 1 rows cannot be learned from, such as .*line 1: .*{message}"):
        prompts_of([row])


@pytest.mark.parametrize("column", ["generated_checker", "interaction_format"])
def test_tests_that_others_judge_are_refused_and_counted(column, prompts_of):
    [row] = rows("codeforces")
    loaded = prompts_of([row, {**row, column: "import sys"}], "code")
    (line,) = loaded.reports[0].unusable
    assert line.endswith(f"'{column}' cannot be used: only tests with fixed expected outputs are supported")


@pytest.fixture
def said(prompts_of, tmp_path):
    """The lines of the report between layout and counts, of rows."""
    path = f"prompts: {tmp_path / 'p.jsonl'}: "
    return lambda rows: [line.removeprefix(path) for line in prompts_of(rows).lines()[1:] if line.startswith(path)]


UNSEEN = (
    "hint",
    "system_prompt",
    "hypothesis",
    "sentences",
    "numbers",
    "table",
    "premise",
    "unit",
    "starter_code",
    "facts",
)


@pytest.mark.parametrize("column", UNSEEN)
def test_columns_that_are_not_shown_are_said(column, said):
    rows = [{**PLAIN, column: ["It is odd."], "note": None, "level": "", "tags": [], "part": "1/2"}]
    assert said(rows) == [f"these columns are not in the prompt: {column}"]


def test_what_is_no_text_of_a_context_is_said(said):
    row = {"question": ASK, "context": {"title": ["Sums"]}, "options": [{"label": "A", "text": "4"}], "answer": "3/4"}
    assert said([row]) == ["these columns are not in the prompt: context, options"]


def test_several_references_of_a_question_and_equal_ones_are_said(said):
    several = [
        PLAIN,
        {**PLAIN, "answer": "1"},
        {**PLAIN, "answer": "2"},
        {"problem": "What is 1 + 1?", "answer": "2"},
    ]
    line = "3 rows repeat the question of another row with a different reference"
    assert said(several) == [line]
    equal = [{"problem": f"What is {number} - {number}?", "answer": "0"} for number in range(3)]
    assert said(equal) == ["all references are '0'"]
    assert said(equal[:1]) == []
