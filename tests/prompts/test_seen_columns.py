"""What a policy should see of a row, and what a row is scored by: read, refused or said, never dropped in silence."""

import json

import pytest
from layout_rows import ADD, ASK, ASSERTS, CASES, LIMITS, PROGRAM, SUM, USER

from megatron_scalerl.rewards.worker import load_verifier

PRIME = "Which is prime?"
SHOWN = f"{PRIME}\n\nA. 4\nB. 7"
TWO = {"question": PRIME, "options": ["4", "7"]}
GYM = {"responses_create_params": {"input": USER, "tools": []}}
READ = {
    # row -> the question as the policy gets it, the reference
    "SkyRL": (
        {"prompt": USER, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "3/4"}},
        (ASK, "3/4"),
    ),
    "AReaL": ({"prompt": ASK, "solutions": ["\\boxed{3/4}"], "task": "math"}, (ASK, "\\boxed{3/4}")),
    "NeMo Gym": ({**GYM, "expected_answer": "3/4"}, (ASK, "3/4")),
    "NeMo Gym, metadata": ({**GYM, "verifier_metadata": {"expected_answer": "3/4"}}, (ASK, "3/4")),
    "NeMo Gym, choices": (
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{PRIME}\nA: 4\nB: 7"}]},
            "options": [{"A": "4"}, {"B": "7"}],
            "expected_answer": "B",
        },
        (f"{PRIME}\nA: 4\nB: 7", "B"),
    ),
    "choices beside messages": (
        {"prompt": [{"role": "user", "content": PRIME}], "options": ["4", "7"], "answer": "B"},
        (SHOWN, "B"),
    ),
    "INTELLECT-3": ({"question": ASK, "answer": "3/4", "info": '{"source": "x"}'}, (ASK, "3/4")),
    "SciBench": ({"problem_text": ASK, "answer_number": "0.75", "unit": ""}, (ASK, "0.75")),
    "tags": ({"prompt": ASK, "answer": "<think>1/4 twice</think><answer> 3/4 </answer>"}, (ASK, "3/4")),
    "MathVerse's empty images": (
        {"problem": ASK, "answer": "3/4", "image": {"bytes": None, "path": ""}},
        (ASK, "3/4"),
    ),
    "no tools": ({"prompt": ASK, "answer": "3/4", "tools": "[]", "images": []}, (ASK, "3/4")),
    "an article": ({"article": "He has 3.", "question": "How many?", "answer": "3"}, ("He has 3.\n\nHow many?", "3")),
    # choices: SuperGPQA, MedQA, AGIEval, MMLU, C-Eval, MedMCQA
    "text": ({**TWO, "answer": "7", "answer_letter": "B"}, (SHOWN, "B")),
    "text of an object": ({**TWO, "options": {"A": "4", "B": "7"}, "answer": "7", "answer_idx": "B"}, (SHOWN, "B")),
    "a list of one number": ({"query": PRIME, "choices": ["(A)4", "(B)7"], "gold": [1]}, (SHOWN, "B")),
    "a list of one letter": ({**TWO, "answer": ["b"]}, (SHOWN, "B")),
    "letter and text": ({**TWO, "answer": "(B) 7."}, (SHOWN, "B")),
    "a formula": ({**TWO, "options": ["$4$", "$7$"], "answer": "7"}, (f"{PRIME}\n\nA. $4$\nB. $7$", "B")),
    "columns of letters": ({"question": PRIME, "A": "4", "B": "7", "answer": "B"}, (SHOWN, "B")),
    "numbered columns": ({"question": PRIME, "option1": "4", "option2": "7", "answer": "7"}, (SHOWN, "B")),
    "columns with a prefix": (
        {"question": PRIME, "opa": "4", "opb": "7", "opc": None, "opd": None, "answer": 1},
        (SHOWN, "B"),
    ),
    "numbers from 1": ({**TWO, "answer": 2}, (SHOWN, "B")),
}


@pytest.mark.parametrize("name", READ)
def test_a_row_is_read(name, prompts_of):
    row, read = READ[name]
    (prompt,) = prompts_of([row]).training
    assert (prompt.text, prompt.answer) == read
    right = read[1] if "boxed" in read[1] else f"\\boxed{{{read[1]}}}"
    assert load_verifier("math", LIMITS)(right, prompt.answer, {})


CODE = {
    "SkyRL": ({"prompt": PROGRAM, "reward_spec": {"ground_truth": json.dumps(CASES)}}, SUM),
    "AReaL": ({"prompt": PROGRAM, "input_output": json.dumps(CASES), "query_id": "1", "task": "code"}, SUM),
    "NeMo Gym": (
        {"responses_create_params": {"input": PROGRAM}, "verifier_metadata": {"unit_tests": CASES}},
        SUM,
    ),
    "INTELLECT-3": ({"question": PROGRAM, "answer": "", "info": json.dumps({"tests": json.dumps(CASES)})}, SUM),
    "codeforces": (
        {
            "description": "Add.",
            "input_format": "Two integers.",
            "output_format": "Their sum.",
            "note": None,
            "official_tests": [{"input": "2 3\n", "output": "5\n"}],
            "generated_checker": None,
            "interaction_format": "",
        },
        SUM,
    ),
    "LeetCodeDataset": (
        {
            "query": "Write add(a, b).",
            "prompt": "import math\n",
            "response": "return",
            "entry_point": "add",
            "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
        },
        ADD,
    ),
    "TACO-verified": ({"problem": PROGRAM, "tests": CASES, "starter_code": ""}, SUM),
    "OpenCode, asserts": ({"input": "Write add(a, b).", "answer": json.dumps(ASSERTS)}, ADD),
}


@pytest.mark.parametrize("name", CODE)
def test_a_row_of_tests_is_read(name, prompts_of):
    row, program = CODE[name]
    (prompt,) = prompts_of([row], "code").training
    verify = load_verifier("code", LIMITS)
    assert verify(f"```python\n{program}\n```", prompt.answer, dict(prompt.extra))
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
    **{
        name: ({**PLAIN, name: [{"name": "f"}]}, f"'{name}' cannot be used: they need an environment")
        for name in TOOLS
    },
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
    "no such letter": ({**TWO, "answer": "C"}, "'answer' is 'C', which names no single choice"),
    "no such text": ({**TWO, "answer": "9"}, "names no single choice"),
    "no such number": ({**TWO, "answer": 3}, "names no single choice"),
    "a number as text": ({**TWO, "answer": "1"}, "names no single choice"),
    "two letters": ({**TWO, "answer": "A, B"}, "names no single choice"),
    "two answers": ({**TWO, "answer": ["A", "B"]}, "names no single choice"),
    "equal choices": ({**TWO, "options": ["7", "7"], "answer": "7"}, "names no single choice"),
    "number or text": ({**TWO, "options": ["1", "0", "5"], "answer": 1}, "names no single choice"),
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
    row = CODE["codeforces"][0]
    loaded = prompts_of([row, {**row, column: "import sys"}], "code")
    (line,) = loaded.reports[0].unusable
    assert line.endswith(f"line 2: '{column}' cannot be used: outputs have to equal the expected ones")


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
    assert said(rows) == [f"the policy does not see {column}"]


def test_what_is_no_text_of_a_context_is_said(said):
    row = {"question": ASK, "context": {"title": ["Sums"]}, "options": [{"label": "A", "text": "4"}], "answer": "3/4"}
    assert said([row]) == ["the policy does not see context, options"]


def test_several_references_of_a_question_and_equal_ones_are_said(said):
    several = [
        PLAIN,
        {**PLAIN, "answer": "1"},
        {**PLAIN, "answer": "2"},
        {"problem": "What is 1 + 1?", "answer": "2"},
    ]
    line = "3 rows have the question of another row, and another reference"
    assert said(several) == [line]
    equal = [{"problem": f"What is {number} - {number}?", "answer": "0"} for number in range(3)]
    assert said(equal) == ["all references are '0'"]
    assert said(equal[:1]) == []
