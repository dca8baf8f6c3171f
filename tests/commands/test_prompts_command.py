"""`megatron-scalerl prompts` shows what the policy gets, what is skipped, how answers score and what is masked."""

import json
from pathlib import Path

import pytest
from json_lines import write

from megatron_scalerl.__main__ import main
from megatron_scalerl.recipe.sections import PAPER_PHRASE
from megatron_scalerl.tiny.build import TinyArguments, build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    build(root, TinyArguments(seed=1, train_prompts=8, held_out=4, sft_examples=4))
    rows = [{"problem": "7;+2=", "solution": "9"}, {"problem": "3;*3=", "solution": "see the figure"}]
    write(root / "p.jsonl", [*rows, {"problem": "1;+1=", "solution": "2"}])
    return root


def output(tiny, capsys, *settings):
    paths = {"policy.path": tiny / "base_policy", "prompts.path": tiny / "p.jsonl", "prompts.held_out": 0}
    given = [f"{key}={value}" for key, value in paths.items()]
    more = ["prompts.held_out_path=null", "validation.every_steps=0", *settings]
    code = main(["prompts", str(ROOT / "recipes/tiny_cpu.yaml"), *given, *more])
    return code, capsys.readouterr()


def printed(tiny, capsys, *settings):
    """What the command prints, which succeeds."""
    code, shown = output(tiny, capsys, *settings)
    assert code == 0, shown.err
    return shown.out


def test_the_prompts_of_a_recipe_are_shown(tiny, capsys):
    lines = printed(tiny, capsys, f"sft.path={tiny / 'sft.jsonl'}", "prompts.chat_template=true").splitlines()
    closed = "thinking is closed by '</think>', as the warm start has it"
    assert lines[0].startswith(
        "prompts: rows of text take the tokenizer's chat template (the template ends answers with nothing"
    )
    assert lines[0].endswith(closed)
    assert lines[1].endswith("p.jsonl: layout problem/solution: question in problem, reference in solution")
    assert lines[3].startswith("prompts: 1 of 3 rows cannot be learned from")
    assert "line 2: 'solution': 'see the figure' is text" in lines[4]
    assert "prompts: 7 to 7 tokens, median 7, at most 32 allowed" in lines
    assert "<bos>|7|;|+|2|=|<think>" in lines
    at = lines.index("reference: 9")
    assert lines[at + 1 : at + 3] == [
        "  the reference itself, \\boxed{9}: right",
        "  a wrong answer, \\boxed{-918273645}: wrong",
    ]
    assert f"{PAPER_PHRASE}|</think>" in lines
    assert "<eos>" in lines
    assert any(f"|[{PAPER_PHRASE}]|[</think>]|" in line for line in lines), "what the warm start masks"


def test_lists_and_a_validation_with_fewer_prompts_than_asked_for_are_said(tiny, capsys):
    answers = (
        "1, 2",
        "so \\boxed{\\frac{1}{2},3}",
        "x=1, y=2",
        "7;+2\n#### 3, 4",
        "(1, 2)",
        "\\{1, 2\\}",
        "1,234",
        "3,14",
    )
    rows = [{"problem": f"{n};+1=", "answer": answer} for n, answer in enumerate(answers)]
    write(tiny / "lists.jsonl", rows)
    path = f"prompts.path={tiny / 'lists.jsonl'}"
    shown = printed(tiny, capsys, path)
    assert "prompts: 5 references are lists, right in any order; (1, 2) fixes the order\n" in shown
    held_out = (path, "prompts.held_out=2", "validation.every_steps=1")
    shown = printed(tiny, capsys, *held_out, "validation.prompts=3")
    assert "prompts: validation.prompts is 3, but 2 prompts are held out\n" in shown
    shown = printed(tiny, capsys, "prompts.held_out=1", "validation.every_steps=1", "validation.prompts=1")
    assert "validation.prompts is" not in shown and "references are lists" not in shown


def test_a_verifier_of_code_scores_an_answer_without_a_program(tiny, capsys):
    (tiny / "code.jsonl").write_text(json.dumps({"prompt": "add", "answer": "assert add(1, 1) == 2"}) + "\n")
    shown = printed(tiny, capsys, f"prompts.path={tiny / 'code.jsonl'}", "rewards.verifier=code")
    assert "a wrong answer" in shown and "the reference itself" not in shown


def test_a_judge_is_asked_about_the_first_prompts(tiny, capsys, monkeypatch, tmp_path):
    """Its session lives in one event loop."""
    (tmp_path / "asked.py").write_text(
        "import asyncio\nloops = []\n"
        "async def score(text, reference, extra):\n"
        "    loops.append(asyncio.get_running_loop())\n"
        "    assert len(set(loops)) == 1\n"
        "    return text == f'\\\\boxed{{{reference}}}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown = printed(tiny, capsys, "rewards.verifier=asked:score")
    assert "the reference itself, \\boxed{9}: right" in shown and "-918273645}: wrong" in shown


@pytest.mark.parametrize(
    "name, message", [("plain", "returned a coroutine"), ("text", "returned '1'"), ("judge", "")]
)
def test_a_judge_is_shown_as_a_run_would_judge(tiny, capsys, monkeypatch, tmp_path, name, message):
    (tmp_path / "kinds.py").write_text(
        "class Judge:\n"
        "    async def __call__(self, text, reference, extra):\n        return True\n"
        "judge = Judge()\n"
        "def plain(text, reference, extra):\n    return judge(text, reference, extra)\n"
        "async def text(text, reference, extra):\n    return '1'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, shown = output(tiny, capsys, f"rewards.verifier=kinds:{name}")
    assert (code != 0) == bool(message)
    assert message in shown.err


def test_what_train_would_refuse_is_refused(tiny, capsys):
    for setting, message in (
        (
            "prompts.template_arguments={a: 1}",
            "prompts.template_arguments has no effect without prompts.chat_template true",
        ),
        ("prompts.think_start=", "prompts.think_start is empty; for an empty text write think_start: '' in a file"),
        ("prompts.path=[a.jsonl, b.jsonl]", "prompts.path is ['a.jsonl', 'b.jsonl']; it should be a valid string"),
        (
            "prompts.path=~/p.jsonl",
            "p.jsonl: there is no such file or folder of prompts; ~ and patterns are not expa",
        ),
        ("prompts.path=data/*.jsonl", "*.jsonl: there is no such file or folder of prompts; ~ and patterns are not"),
        ("interruption.phrase=Ende", "interruption.phrase: "),
        ("prompts.digest=0", "prompts.digest is 0"),
        ("validation.every_steps=1", "validation.every_steps: there are no held-out prompts"),
    ):
        code, shown = output(tiny, capsys, setting)
        assert code == 2 and message in shown.err


@pytest.mark.parametrize(
    "settings, takes",
    [
        ((), "take"),
        (("prompts.chat_template=false",), "do not take"),
        (("sft.path=null", "prompts.think_start=auto", "prompts.think_end=auto"), "take"),
    ],
)
def test_messages_take_the_template_and_it_is_said(tiny, capsys, settings, takes):
    rows = [{"prompt": [{"role": "user", "content": "7;+2="}], "answer": "9"}]
    write(tiny / "m.jsonl", rows)
    shown = printed(tiny, capsys, f"prompts.path={tiny / 'm.jsonl'}", *settings)
    first, *lines = shown.splitlines()
    assert first.startswith(f"prompts: rows of messages {takes} the tokenizer's chat template")
    tags = "</think>" in first
    assert tags == ("sft.path=null" not in settings)
    assert f"<bos>|7|;|+|2|={'|<think>' if tags else ''}" in lines
    assert any(line.startswith("forced after") for line in lines) == tags, "without tags nothing is interrupted"


def test_an_episode_with_a_script_is_shown(tiny, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    episode = ("environment=calculator:Calculator", "--response")
    shown = printed(tiny, capsys, *episode, "7+2=", "--response", "\x1b[2J=", "--response", "9")
    lines = shown.splitlines()
    at = lines.index("<bos>|7|;|+|2|=|<think>")
    assert lines[at - 1].startswith("prompt ") and lines[at + 1 : at + 15] == [
        "",
        "response: 7+2=",
        "Turn(messages=({'role': 'user', 'content': '9'},), reward=None, done=False, metrics={})",
        "",
        "the next turn begins with",
        "9|<think>",
        "",
        "response: \\x1b[2J=",
        "Turn(messages=({'role': 'user', 'content': '-'},), reward=None, done=False, metrics={})",
        "",
        "the next turn begins with",
        "-|<think>",
        "",
        "response: 9",
    ]
    assert lines[at + 15] == "Turn(messages=(), reward=True, done=True, metrics={})"
    assert "the reference itself" not in shown and "a wrong answer" not in shown
    assert printed(tiny, capsys, episode[0]).count("response: ") == 1
    assert printed(tiny, capsys, *episode, "8", "--response", "after it").count("response: ") == 1
    code, shown = output(tiny, capsys, episode[0], "prompts.chat_template=true")
    assert code == 2 and "prompts.chat_template: the tokenizer's template" in shown.err


def test_what_an_environment_returns_cannot_write_to_the_terminal(tiny, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/environments")
    row = {"problem": "7;+2=", "solution": "(chr(27), 0.5, 0 > 1)", "first": "chr(27)"}
    (tiny / "e.jsonl").write_text(json.dumps(row) + "\n")
    episode = ("environment=users_environments:Messages", f"prompts.path={tiny / 'e.jsonl'}")
    shown = printed(tiny, capsys, *episode)
    assert "\x1b" not in shown and "reward=0.5, done=False" in shown
    code, shown = output(tiny, capsys, *episode, "--response", "1 / 0 # \x1b")
    assert code == 1 and "\x1b" not in shown.err
    assert "environment.name 'users_environments:Messages': Traceback" in shown.err
    assert shown.err.endswith("ZeroDivisionError: division by zero\n\n")
