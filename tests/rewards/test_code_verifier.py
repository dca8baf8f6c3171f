"""The verifier `code`: forms of tests, the program in an answer, outputs, and the pool with its limits."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from own_processes import sandboxes
from sandboxed import LIMITS, answer, verdict
from verifier_pools import RIGHT, WRONG, shorten, wrong
from waiting import wait_until

import megatron_scalerl.rewards.sandbox as sandbox
from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards import pool as pools
from megatron_scalerl.rewards.code import extract_program, same_output, verify_code
from megatron_scalerl.rewards.code_tests import parse_tests
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import CompletionLost, Prompt

SUM = "print(sum(map(int, input().split())))"
ADD = "def add(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def add(self, a, b):\n        return (a + b,)\n"
CASES = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}]
CALLS = [{"fn_name": "add", "input": [2, 3], "output": 5}, {"fn_name": "add", "input": [[1], [2]], "output": [1, 2]}]
FORMS = {
    "stdin": (json.dumps(CASES), SUM),
    "stdin in columns": (json.dumps({"inputs": ["2 3", ["1 1"]], "outputs": ["5", ["2"]]}), SUM),
    "calls": (json.dumps(CALLS), ADD),
    "calls in columns": (json.dumps({"fn_name": "add", "inputs": [[2, 3]], "outputs": [[5]]}), ADD),
    "calls of a method": (json.dumps({"fn_name": "add", "inputs": [[2, 3]], "outputs": [[5]]}), METHOD),
    "assertions": ("import math\nassert add(2, 3) == 5\nassert math.isclose(add(.1, .2), .3)", ADD),
    "test functions": (
        "from solution import add\ndef test_it():\n    for a in range(3): assert add(a, a) == 2 * a",
        ADD,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tests_tells_right_from_wrong(form):
    tests, right = FORMS[form]
    assert verdict(right, tests) is True
    assert verdict(right.replace("sum(", "max(").replace("a + b", "a"), tests) is False
    assert verdict(right + "\nraise SystemExit(3)", tests) is False
    assert verdict("", tests) is False


def test_values_cross_as_they_are():
    tests = """
assert f([1, (2, {3}), {"a": b"x"}, None, True, 1.5, 2 ** 20000, 1j, frozenset([1])]) == 9
items = [3, 1, 2]
assert sort(items) is None and items == [1, 2, 3]
assert list(squares(4)) == [0, 1, 4, 9]
try:
    f(1)
    assert False
except TypeError as error:
    assert "len" in str(error)
stack = Stack()
stack.push(4)
assert stack.pop() == 4 and len(stack) == 0 and stack[7] == 7
assert make(3)(4) == 7 and LIMIT == 10 and twice(f=lambda: 3) == 6
"""
    program = """
LIMIT = 10
def f(x): return len(x)
def sort(x): x.sort()
def squares(n):
    for i in range(n): yield i * i
def make(n): return lambda m: n + m
def twice(f): return 2 * f
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return i
"""
    assert verdict(program, tests.replace("lambda: 3", "3")) is True
    assert verdict(program, tests) is False, "a function of the tests does not cross"


def test_the_documented_row_and_forms_are_read():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    row = json.loads(re.search(r"^\{\"prompt\".*$", page, re.MULTILINE)[0])
    assert verdict(SUM, row["answer"]) is True and verdict("print(1)", row["answer"]) is False
    table = page.split("| form | text of the answer column |")[1].split("\n\n")[0]
    shown = re.findall(r"\| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(shown) == 5 and all(parse_tests(form) for form in shown)
    for form in shown[2:]:
        assert verdict(ADD, form) is True and verdict("def add(a, b): return 4", form) is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "a JSON list of cases or Python with assert, found neither"),
        ("[]", "found neither"),
        ("{}", "expected lists inputs and outputs of one length in the tests, found no keys"),
        ('{"inputs": ["1"], "outputs": []}', "of one length in the tests, found inputs, outputs"),
        ('[{"input": "1"}]', "expected input and output in every case of the tests, found input"),
        ('[{"input": [1], "output": 2}]', r"expected a text .* \(calls need fn_name\), found a list"),
        ('[{"fn_name": "f()", "input": [], "output": 0}]', "expected the name of a function in fn_name .* 'f\\(\\)'"),
        ('[{"fn_name": "f", "input": "1", "output": 0}]', "expected a list of arguments .* found a str"),
        ('[{"fn_name": "f", "input": [], "output": 0}, {"input": "", "output": ""}]', "one fn_name .* found 2"),
        ("def f(:", "expected unit tests, JSON or Python, found neither: "),
        ("f(1) == 2", "expected an assert in the Python of the tests, found none"),
        ("import pytest\nassert f(1)", "tests that import the standard library or solution, found pytest"),
        ("x\0", "found neither"),
    ],
)
def test_tests_in_another_form_are_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_tests(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\ntext\n```\nb\n```\n", "b\n"),
        ("```python\na\n```\n```python\nb\n", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("~~~\na\n~~~", "a\n"),
        ("```c++\na\n```", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("a = 1", None),
        ("`a`", None),
        ("```python\na", None),
        ("```a```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block(text, program):
    assert extract_program(text) == program


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("5\n", "5", True),
        ("5 \n6\n\n", "5\n6", True),
        ("a  b", "a b", True),
        ("1.50", "1.5", True),
        ("1e2", "100", True),
        ("0.30000000000000004", "0.3", False),
        ("5", "5\n6", False),
        ("5\n\n6", "5\n6", False),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("sNaN", "1", False),
        ("", "", True),
        ("9" * 99, "9" * 98 + "8", False),
        ("1e999999999", "1e999999998", False),
    ],
)
def test_outputs_are_compared_by_words_and_values(found, expected, same):
    assert same_output(found, expected) is same


def test_every_case_has_to_pass_and_the_program_may_not_fail():
    cases = json.dumps(CASES)
    assert verdict(SUM + "\nraise SystemExit(1)", cases) is False
    assert verdict("print(5)", cases) is False, "right on the first case only"
    assert verify_code(SUM, cases, {}, limits=LIMITS) is False, "no block"


def ask(texts, tests, **settings):
    """(scores or exceptions, counters) of answers to one problem, one after another."""

    async def main():
        prompt = Prompt(prompt_id="p", text="t", answer=tests, token_ids=())
        section = {"workers": 1, "cpu_s": 5.0, "timeout_s": 60.0, **settings}
        async with VerifierPool(RewardsSection(verifier="code", **section)) as pool:
            scores = []
            for text in texts:
                scores += await asyncio.gather(pool.score(text, prompt), return_exceptions=True)
            return scores, pool.counters

    return asyncio.run(main())


@pytest.mark.slow
def test_the_pool_scores_programs():
    texts = [answer(SUM), answer("print(1)"), answer(SUM), "no program", answer("while True: pass")]
    scores, counters = ask(texts, json.dumps(CASES), cpu_s=1.0)
    assert scores == [RIGHT, WRONG, RIGHT, WRONG, wrong("timeout")]
    assert counters == {"checks": 5, "correct": 2, "repeated": 1, "timeout": 1}, "no worker had to be replaced"


@pytest.mark.slow
def test_a_program_that_waits_ends_at_the_wall_clock_limit_with_its_sandbox(monkeypatch):
    shorten(monkeypatch, "result", [1], ready=lambda: len(sandboxes()) >= 3)
    scores, counters = ask([answer("import time\ntime.sleep(1e6)"), answer(SUM)], json.dumps(CASES))
    assert (scores, counters["restarts"]) == ([wrong("timeout"), RIGHT], 1)
    wait_until(lambda: not sandboxes())  # the pool waits for its worker, not for a sandbox that is killed with it


def test_a_sandbox_that_cannot_be_made_loses_the_completion_and_later_the_run(monkeypatch, tmp_path):
    """A verifier that never has a sandbox."""
    monkeypatch.setattr(pools, "MAX_UNAVAILABLE", 2)
    module = tmp_path / "unmade.py"
    module.write_text(
        "from megatron_scalerl.rewards.sandbox import SandboxError\n"
        "def check(text, reference, extra):\n    raise SandboxError('expected a sandbox, found none')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def main():
        prompt = Prompt(prompt_id="p", text="t", answer="", token_ids=())
        async with VerifierPool(RewardsSection(verifier="unmade:check", workers=1)) as pool:
            return [
                (await asyncio.gather(pool.score(text, prompt), return_exceptions=True))[0]
                for text in ("a", "b", "c")
            ]

    lost, second, end = asyncio.run(main())
    assert isinstance(lost, CompletionLost) and lost.reason == "verifier_lost"
    assert isinstance(second, CompletionLost)
    assert isinstance(end, RuntimeError) and "2 checks in a row could not be made" in str(end)


def test_the_sandbox_is_tried_again_before_a_completion_is_lost(monkeypatch):
    """A stand-in for a system that is short of processes for a moment."""
    popen, tries = sandbox.subprocess.Popen, []

    def stand_in(*arguments, **options):
        tries.append(1)
        if len(tries) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*arguments, **options)

    monkeypatch.setattr(sandbox.subprocess, "Popen", stand_in)
    monkeypatch.setattr(sandbox, "MAKE_PAUSE_S", 0.0)
    assert verdict(ADD, "assert add(1, 2) == 3") is True
    tries[:] = [-9]
    monkeypatch.setattr(sandbox, "MAKE_TRIES", 1)
    with pytest.raises(sandbox.SandboxError, match=r"expected a process for a sandbox, found .*temporarily"):
        verdict(ADD, "assert add(1, 2) == 3")
