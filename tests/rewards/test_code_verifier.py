"""The verifier `code`: forms of tests, the program in an answer, outputs, and the pool with its limits."""

import json
import re
import sys
from pathlib import Path

import pytest
from own_processes import sandboxes
from sandboxed import LIMITS, answer, verdict
from verifier_pools import RIGHT, WRONG, prompt, wrong
from waiting import wait_until
from worker_pools import count_restarts, shorten

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.code import extract_program, verify_code
from megatron_scalerl.rewards.code_tests import parse_tests
from megatron_scalerl.rewards.limits import VerifierUnavailable
from megatron_scalerl.rewards.pool import VerifierPool

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
    assert len(shown) == 7 and all(parse_tests(form) for form in shown)
    for form in shown[2:]:
        assert verdict(ADD, form) is True and verdict("def add(a, b): return 4", form) is False


@pytest.mark.parametrize(
    "text, said",
    [
        ("4", "unit tests have to be a JSON list of cases or Python with assert"),
        ("[]", "unit tests have to be a JSON list of cases or Python with assert"),
        ("{}", "tests need the lists inputs and outputs, of equal length; the keys are none"),
        ('{"inputs": ["1"], "outputs": []}', "of equal length; the keys are inputs, outputs"),
        ('[{"input": "1"}]', "every case of the tests has to have input and output; the keys are input"),
        ('[{"input": [1], "output": 2}]', "input and output of a test have to be strings; found a list"),
        ('[{"fn_name": "f()", "input": [], "output": 0}]', "the tests name the function 'f"),
        ('[{"fn_name": "f", "input": 1, "output": 0}]', "the input of a test of f has to be a list .* is a int"),
        ('[{"fn_name": "f", "input": "a b", "output": 0}]', "the input of a test of f has to have a line of JSON"),
        (
            '[{"fn_name": "f", "input": [], "output": 0}, {"input": "", "output": ""}]',
            "name the same function; found 2 different names",
        ),
        (
            '[{"testtype": "functional", "input": "1", "output": "1"}]',
            "functional tests need the name of the function",
        ),
        ("def helper():\n    assert f(1)", "no assertion of the tests would run"),
        ("def check(candidate):\n    assert candidate(1)", "or in check\\(candidate\\) of a row with entry_point"),
        ("def test_f(fixture):\n    assert f(fixture)", "no assertion of the tests would run"),
        ("class Helper:\n    def test_f(self):\n        assert f(1)", "no assertion of the tests would run"),
        ("def f(:", "unit tests have to be JSON or Python; these are neither: "),
        ("f(1) == 2", "the tests are Python without an assertion"),
        ("import numpy\nassert f(1)", "tests import numpy; they may import the standard library"),
        ("x\0", "these are neither"),
    ],
)
def test_tests_in_another_form_are_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_tests(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, program",
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\ntext\n```\nb()\n```\n", "a\n"),
        ("```python\na\n```\n```python\nb\n", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("~~~\na\n~~~", "a\n"),
        ("```c++\na\n```", "a\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        ("1. so:\n     ```python\n     if a:\n         b\n     ```", "if a:\n    b\n"),
        ("\t```\n\ta\n\t```", "a\n"),
        ("```\nx = 'a\u2028b\x0c\x85'\n```", "x = 'a\u2028b\x0c\x85'\n"),
        ('```\nx = """\n        ```\n"""\n```', 'x = """\n        ```\n"""\n'),
        ("a = 1", None),
        ("`a`", None),
        ("```python\na", None),
        ("```a```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block(text, program):
    assert extract_program(text) == program


def test_every_case_has_to_pass_and_the_program_may_not_fail():
    cases = json.dumps(CASES)
    assert verdict(SUM + "\nraise SystemExit(1)", cases) is False
    assert verdict("print(5)", cases) is False, "right on the first case only"
    assert verify_code(SUM, cases, {}, limits=LIMITS) is False, "no block"


async def ask(texts, **settings):
    """(scores, processes that were replaced) of answers to one problem, one after another."""
    section = {"workers": 1, "cpu_s": 5.0, "timeout_s": 60.0, **settings}
    async with count_restarts(VerifierPool(RewardsSection(verifier="code", **section))) as pool:
        return [await pool.score(text, prompt(answer=json.dumps(CASES))) for text in texts], pool.restarts


@pytest.mark.slow
async def test_the_pool_scores_programs():
    texts = [answer(SUM), answer("print(1)"), answer(SUM), "no program", answer("while True: pass")]
    assert await ask(texts, cpu_s=1.0) == ([RIGHT, WRONG, RIGHT, WRONG, wrong("timeout")], 0)


@pytest.mark.slow
async def test_a_program_that_waits_ends_at_the_wall_clock_limit_with_its_sandbox(monkeypatch):
    shorten(monkeypatch, [2], ready=lambda: len(sandboxes()) >= 3)
    texts = [answer("import time\ntime.sleep(1e6)"), answer(SUM)]
    assert await ask(texts) == ([wrong("timeout"), RIGHT], 1)
    wait_until(lambda: not sandboxes())  # the pool waits for its worker, not for a sandbox that is killed with it


def test_a_sandbox_that_cannot_be_made_is_no_verdict(monkeypatch):
    """A stand-in for a system that is short of processes for a moment; the pool tries again."""

    def stand_in(*arguments, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("megatron_scalerl.rewards.sandbox.subprocess.Popen", stand_in)
    with pytest.raises(VerifierUnavailable, match=r"the process of a sandbox cannot be started: .*temporarily"):
        verdict(ADD, "assert add(1, 2) == 3")


HUMANEVAL = "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n"
UNITTEST = """import unittest
class SumTest(unittest.TestCase):
    def setUp(self):
        self.two = 2
    def test_sum(self):
        self.assertEqual(add(self.two, 3), 5)
"""
GUARD = "if __name__ == '__main__':\n    "
TEST_FORMS = {
    "check(candidate)": (HUMANEVAL, {"entry_point": "add"}),
    "unittest": (UNITTEST, {}),
    "unittest.main": (UNITTEST + GUARD + "unittest.main()\n", {}),
    "a class of tests": ("class TestSum:\n    def test_sum(self):\n        assert add(2, 3) == 5\n", {}),
    "an async test": ("async def test_sum():\n    assert await add(2, 3) == 5\n", {}),
    "asyncio.run": ("import asyncio\nasync def main():\n    assert await add(2, 3) == 5\nasyncio.run(main())\n", {}),
    "a guarded main": ("def main():\n    assert add(2, 3) == 5\n" + GUARD + "main()\n", {}),
    "LiveCodeBench": (
        json.dumps([{"input": "2\n3", "output": "5", "testtype": "functional", "metadata": {"func_name": "add"}}]),
        {},
    ),
    "LiveCodeBench, named by a column": (
        json.dumps([{"input": "2\n3", "output": "5", "testtype": "functional"}]),
        {"metadata": '{"func_name": "add"}'},
    ),
    "PRIME": (json.dumps([{"type": "function_call", "fn_name": "add", "input": [2, 3], "output": 5}]), {}),
}


@pytest.mark.parametrize("form", TEST_FORMS)
def test_tests_pass_where_an_assertion_was_evaluated_and_held(form):
    """A program without the function, and one that ends early, are wrong: no assertion is evaluated in their runs."""
    tests, extra = TEST_FORMS[form]
    for program, right in ((ADD, True), (ADD.replace("+", "-"), False), ("pass", False), ("exit()", False)):
        assert verify_code(answer(program), tests, extra, limits=LIMITS) is right, program
    if "await" in tests:
        assert verify_code(answer("async " + ADD), tests, extra, limits=LIMITS) is True
    else:
        method = "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b\n"
        assert verify_code(answer(method), tests, extra, limits=LIMITS) is (form[0] in "cLP" and "class" not in form)


def test_a_loop_over_no_case_passes_nothing():
    assert verdict(ADD, "for a in []:\n    assert add(a, a) == 2 * a") is False


READ = "print(sum(map(int, input().split())))"
IDIOMS = {
    "exit": READ + "\nexit()",
    "quit with 0": READ + "\nquit(0)",
    "names of collections": "d = deque(map(int, input().split()))\nprint(d.popleft() + d.pop() + len(Counter()))",
    "modules": "print(int(math.fsum(map(int, input().split()))))",
    "os.read of the whole input": "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
    "sys.stdin": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "annotations": "def f(x: List[Foo]) -> 'Bar': return x\n" + READ,
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    " + READ + "\nasyncio.run(main())",
    "deep recursion": "def f(n): return n and f(n - 1)\nf(20000)\n" + READ,
    "main": "def main():\n    " + READ + "\nif __name__ == '__main__':\n    main()",
    "os._exit": "import os, sys\n" + READ + "\nsys.stdout.flush()\nos._exit(0)",
    "lines of stdin": "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))",
    "a global": "n = 0\ndef f():\n    global n\n    n = sum(map(int, input().split()))\nf()\nprint(n)",
    "a thread": "import threading\nthreading.stack_size(2**26)\ndef main():\n    "
    + READ
    + "\nt = threading.Thread(target=main)\nt.start()\nt.join()",
    "a long integer": "len(str(10 ** 5000))\n" + READ,
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_programs_run_as_on_competition_sites(idiom):
    cases = [{"input": "2 3\n", "output": "5\n"}, {"input": "2 2\n", "output": "4\n"}]
    assert verdict(IDIOMS[idiom], json.dumps(cases)) is True


@pytest.mark.parametrize(
    "result, output, right",
    [
        ("(2, 3)", "[2, 3]", True),
        ("[(2, 3)]", "[[2, 3]]", True),
        ("1.0", "1", True),
        ("True", "1", True),
        ("Fraction(1, 2)", "0.5", True),
        ("0.1 + 0.2", "0.3", False),
        ("None", "[2, 3]", False),
    ],
)
def test_results_of_functions_are_compared_as_livecodebench_does(result, output, right):
    """But for the tuple within a list, which it takes for wrong."""
    case = {"input": "1", "output": output, "testtype": "functional", "metadata": {"func_name": "f"}}
    program = f"from fractions import Fraction\nclass Solution:\n    def f(self, a):\n        return {result}"
    assert verdict(program, json.dumps([case])) is right


FRACTION = "from fractions import Fraction\n"
POINT = "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\ndef f(): return [Point(1)]"


VALUES = [
    (FRACTION + "def f(): return Fraction(1, 2)", FRACTION + "assert f() == Fraction(1, 2)", ("1, 2", "1, 3")),
    ("import decimal\ndef f(): return decimal.Decimal('0.5')", "assert f() == 1 / 2", ("/ 2", "/ 3")),
    ("def f(): return deque([1, 2])", "from collections import deque\nassert f() == deque([1, 2])", ("1,", "2,")),
    ("import datetime as d\ndef f(): return [d.date(2024, 2, 29)]", "assert f()[0].day == 29", ("29", "28")),
    (POINT, "assert f() == [Point(1)]", ("(1)", "(2)")),
    ("def f(): return Counter('aab')", "assert f() == {'a': 2, 'b': 1}", ("2", "3")),
]
NODE = """
class ListNode:
    def __init__(self, val, next=None): self.val, self.next = val, next
    def __eq__(self, other): return self.val == other.val and self.next == other.next
class Vector:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Vector(self.x + other.x)
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __float__(self): return float(self.x)
class Bag:
    def __init__(self): self.items = {}
    def __bool__(self): return bool(self.items)
    def __setitem__(self, key, value): self.items[key] = value
    def __getitem__(self, key): return self.items[key]
    def __iter__(self): return iter(self.items)
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
def count():
    n = 0
    while True:
        n += 1
        yield n
def build(values):
    head = None
    for value in reversed(values): head = ListNode(value, head)
    return head
"""


OBJECTS = [
    ("assert build([1, 2]) == ListNode(1, ListNode(2))", ("ListNode(2)", "ListNode(3)")),
    ("node = build([1])\nnode.next = build([2])\nassert node.next.val == 2", ("== 2", "== 1")),
    ("assert isinstance(build([1]), ListNode) and build([]) is None", ("([1])", "([])")),
    ("assert Vector(1) + Vector(2) == Vector(3)", ("(3)", "(4)")),
    ("assert [v.x for v in sorted([Vector(2), Vector(1)])] == [1, 2]", ("[1, 2]", "[2, 1]")),
    ("assert float(Vector(2)) == 2.0", ("2.0", "3.0")),
    ("bag = Bag()\nassert not bag\nbag['a'] = 1\nassert bag and bag['a'] == 1", ("bag and", "not bag and")),
    (
        "bag = Bag()\nwith bag as inside:\n    inside[4] = 5\n    assert 4 in bag\nassert 4 not in bag",
        ("not in", "in"),
    ),
    ("numbers = count()\nassert next(numbers) == 1 and [next(numbers), next(numbers)] == [2, 3]", ("[2", "[1")),
    ("from itertools import islice\nassert list(islice(count(), 3)) == [1, 2, 3]", ("3]", "4]")),
    (
        "class TestBuild:\n    def setup_method(self, method):\n        self.name = method\n"
        "    def test_it(self):\n        assert build([1]).val == 1 and self.name",
        (".val == 1", ".val == 2"),
    ),
]


@pytest.mark.parametrize("program, tests, wrong", [*VALUES, *((NODE, *row) for row in OBJECTS)])
def test_values_and_objects_of_a_program_are_for_the_tests_what_it_says(program, tests, wrong):
    assert verdict(program, tests) is True
    assert verdict(program, tests.replace(*wrong)) is False


def test_no_object_of_the_program_hides_an_assertion_that_fails():
    program = "class Acc:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\n"
    program += "    def total(self): return 0"
    assert verdict(program, "with Acc() as a:\n    assert a.total() == 5") is False
    assert verdict(program, "with Acc() as a:\n    assert a.total() == 0") is True


@pytest.mark.parametrize(
    "tests",
    [
        "assert abs(f(2) - 4) < 1e-6",
        "assert f(2) <= 4 and f(2) >= 4",
        "assert 4 in f(2)",
        "assert f(2) == 4",
        "assert f(2) - 4 == 0",
    ],
)
def test_no_object_of_the_program_decides_beside_a_value_of_the_tests(tests):
    names = ("eq", "lt", "le", "gt", "ge", "sub", "add", "contains", "abs")
    body = "".join(
        f"    def __{name}__(self, *_): return {'0' if name in ('sub', 'abs') else 'True'}\n" for name in names
    )
    assert (
        verdict(f"class Yes:\n{body}    def __iter__(self): return iter([1])\ndef f(x): return Yes()", tests) is False
    )


def test_a_name_that_sites_import_is_no_function_of_the_program():
    """operator.add must not stand in for the function that the program lacks."""
    assert verdict("pass", "assert add(2, 3) == 5") is False
    assert verdict("add", "assert add(2, 3) == 5") is False


ABS = "def check(candidate):\n    assert abs(candidate(3.5) - 0.5) < 1e-6\n"
CHEATS = {
    "another abs beside a class": ("class Solution:\n    def f(self, x): return 0\ndef abs(x): return 0", ABS, "f"),
    "another abs beside a function": ("def f(x): return 0\ndef abs(x): return 0", ABS, "f"),
    "two builtins": ("def sum(x): return 5\ndef abs(x): return 0", "assert abs(sum([2, 3]) - 6) == 0", ""),
    "no sum of its own": ("pass", '[{"fn_name": "sum", "input": [[2, 3]], "output": 5}]', ""),
    "no sorted of its own": ("pass", "assert sorted([2, 1]) == [1, 2]", ""),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_builtins_of_the_tests_are_pythons_and_the_tested_one_the_programs(cheat):
    program, tests, entry_point = CHEATS[cheat]
    assert verify_code(answer(program), tests, {"entry_point": entry_point}, limits=LIMITS) is False


def test_a_program_with_the_name_of_a_builtin_is_the_one_that_is_tested():
    own = "def sum(xs):\n    total = 0\n    for x in xs: total += x\n    return total"
    assert verdict(own, CHEATS["no sum of its own"][1]) is True
    assert verify_code(answer("def f(x): return x % 1"), ABS, {"entry_point": "f"}, limits=LIMITS) is True


@pytest.mark.parametrize("tests", ["import solution\nassert solution.add(2, 3) == 5", FORMS["calls"][0]])
def test_a_solution_is_imported_and_its_guard_does_not_run(tests):
    assert verdict(ADD + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))", tests) is True


DEPTH = 20_000 if sys.version_info < (3, 12) else 300
"""Calls through C, as of lru_cache: Python 3.12 has a limit of its own, which no program can change."""


@pytest.mark.parametrize(
    "program",
    [
        "import functools\n@functools.lru_cache(None)\ndef f(n): return n and f(n - 1)\n" + f"f({DEPTH})\n",
        "import asyncio, time\nasync def m(): await asyncio.to_thread(time.sleep, 0.1)\nasyncio.run(m())\n",
        "import threading\nts = [threading.Thread(target=int) for _ in range(20)]\nfor t in ts: t.start()\n",
    ],
    ids=["deep recursion through C", "asyncio with a thread", "threads"],
)
def test_what_needs_a_stack_or_a_thread_runs(program):
    assert verdict(program + READ, json.dumps([{"input": "2 3\n", "output": "5\n"}])) is True


@pytest.mark.parametrize(
    "program",
    [
        "import resource; resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0)); print(5)",
        "import os; os.chmod('/tmp', 0); print(5)",
        "import os; os.rmdir('/tmp'); print(5)",
    ],
)
def test_a_program_that_breaks_its_sandbox_is_wrong_and_not_without_a_score(program):
    cases = json.dumps([{"input": "", "output": "5"}, {"input": "", "output": "6"}])
    assert verdict(program, cases) is False


METADATA = [{"testtype": "functional", "metadata": "[" * 5000, "input": "1", "output": "1"}]


@pytest.mark.parametrize(
    "text", ["[" * 5000, "assert " + "-" * 200_000 + "1", json.dumps(METADATA)], ids=["brackets", "signs", "metadata"]
)
def test_a_row_that_no_parser_can_read_is_one_line(text):
    with pytest.raises(ValueError) as caught:
        parse_tests(text)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_a_fence_is_read_in_linear_time():
    assert extract_program("~" * 200_000 + "`\n" + "```" + " " * 200_000 + "`x\n```\na\n```") == "a\n"
