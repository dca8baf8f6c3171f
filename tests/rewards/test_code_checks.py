"""Tests that pay wrong programs, or not the row's own solution, are found before a run or at their first use."""

import json
import time
from types import SimpleNamespace

import pytest
from sandboxed import LIMITS, answer
from verifier_pools import RIGHT, prompt, task

from megatron_scalerl.rewards import code_checks
from megatron_scalerl.rewards.code_checks import check_tests, problem_of
from megatron_scalerl.rewards.code_tests import parse_tests
from megatron_scalerl.rewards.limits import VerifierUnavailable
from megatron_scalerl.rewards.math import check_references
from megatron_scalerl.rewards.pool import TaskPools

PYTEST, ENTRY = "import pytest\n", {"entry_point": "f"}
NOTHING, VALUE, RAISES = (
    f"its tests pass a program that {what}" for what in ("does nothing", "returns a wrong value", "raises")
)
SOLUTION = "its own solution fails its tests"
EQUAL, CHECK = "assert f(1) == 2", "def check(candidate):\n    assert candidate(1) == 2"
OK, BAD = "def f(x):\n    return x + 1\n", "def f(x):\n    return x + 2\n"
REFUSED = [
    ("assert not f(1)", {}, NOTHING),
    ("assert f(1) is None", {}, NOTHING),
    ("f(1)\nassert True", {}, NOTHING),
    ("assert f(1)", {}, VALUE),
    ("assert f(1) is not None", {}, VALUE),
    ("assert isinstance(f(1), str)", {}, VALUE),
    ("assert f(2) > 0 and isinstance(f(2), int)", {}, VALUE),
    ("def check(candidate):\n    assert candidate(1)", ENTRY, VALUE),
    ("s = Stack()\ns.push(1)\nassert s.pop()", {}, VALUE),
    ("if False:\n    assert f(1) == 2\nassert f(1) or 1", {}, NOTHING),
    (PYTEST + "with pytest.raises(ValueError):\n    f(1)", {}, RAISES),
    ("try:\n    f(1)\n    assert False\nexcept TypeError:\n    assert True", {}, RAISES),
    (PYTEST + "s = Stack()\nwith pytest.raises(IndexError):\n    s.pop()", {}, RAISES),
    (PYTEST + "with pytest.raises(ValueError):\n    Account(-1)", {}, RAISES),
    (PYTEST + "from solution import f, FullError\nwith pytest.raises(FullError):\n    f(1)", {}, RAISES),
    ("if False:\n    assert f(1) == 2", {"code": OK}, SOLUTION),
    ("for x in []:\n    assert f(x) == 2", {"solution": OK}, SOLUTION),
    (EQUAL, {"solution": f"Add 2.\n```python\n{BAD}```\n"}, SOLUTION),
    (EQUAL, {"solutions": json.dumps([BAD, BAD, BAD, OK])}, SOLUTION),
    (CHECK, {**ENTRY, "canonical_solution": "    return x + 2\n"}, SOLUTION),
    ('[{"input": "1", "output": "2"}]', {"solutions": ["print(3)"]}, SOLUTION),
    ('{"fn_name": "f", "inputs": [[1]], "outputs": [2]}', {"solution": BAD}, SOLUTION),
]
ACCEPTED = [
    (EQUAL, {}),
    (EQUAL + "\nassert f(0) is None", {}),
    (PYTEST + "with pytest.raises(ValueError):\n    f(0)\nassert f(1) == 2", {}),
    ("assert f(7)\nassert not f(8)", {}),
    ("s = Stack()\ns.push(1)\nassert s.pop() == 1", {}),
    (EQUAL, {"solutions": json.dumps([BAD, OK])}),
    (EQUAL, {"solutions": {"language": [2, 3], "solution": ["int f() {return 3;}", OK]}}),
    (EQUAL, {"solution": "int f() {return 3;}"}),
    (EQUAL, {"solution": "import numpy as np\n\ndef f(x):\n    return int(np.add(x, 1))\n"}),
    (EQUAL, {"code": 'def f(x):\n    """Add 1."""\n    pass\n'}),
    (EQUAL, {"code": "class Solution:\n    def f(self, x):\n        raise NotImplementedError\n"}),
    (EQUAL, {"solution": "def f(x):\n    while True:\n        pass\n"}),
    ('[{"input": "1", "output": "2"}]', {"solutions": ["print(int(raw_input()) + 1)"]}),
    (CHECK, {**ENTRY, "canonical_solution": "    return x + 1\n"}),
    ('[{"input": "1", "output": "2"}]', {"solutions": ["print(int(input()) + 1)"]}),
]


@pytest.mark.parametrize("tests, columns, problem", [*REFUSED, *((*row, "") for row in ACCEPTED)])
def test_tests_that_pay_a_wrong_program_or_not_their_solution_are_refused(tests, columns, problem):
    assert problem_of('def f(x):\n    """Add 1."""\n', tests, columns, LIMITS) == problem


@pytest.mark.parametrize(
    "tests, outputs",
    [
        ('[{"input": "1", "output": ""}, {"input": "2", "output": "\\n"}]', "empty"),
        ('{"fn_name": "f", "inputs": [[1], [2]], "outputs": [null, [null]]}', "null"),
    ],
)
def test_outputs_of_a_program_that_does_nothing_are_refused(tests, outputs):
    with pytest.raises(ValueError, match=f"pass a program that does nothing: all outputs are {outputs}"):
        parse_tests(tests)


def rows(count):
    return [("Write f.", f"assert f({number})", {}) for number in range(count)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatron_scalerl" / "checks"


def never(*arguments):
    raise AssertionError("tests were tried")


def test_what_was_found_is_kept_and_a_damaged_or_foreign_file_is_not_read(cache, monkeypatch):
    given = [*rows(1), ("Write f.", EQUAL, {})]
    assert check_tests(given, LIMITS) == [VALUE, ""]
    (file,) = cache.iterdir()
    for text in (b'{"', b'{"0123456789abcdef": ""}', b"[1]", b"{}", b'{"a": 1}'):
        whole = file.read_bytes()
        file.write_bytes(text)
        assert check_tests(given, LIMITS) == [VALUE, ""]
        assert file.read_bytes() == whole
    monkeypatch.setattr(code_checks, "problem_of", never)
    assert check_tests(given[::-1], LIMITS) == ["", VALUE]
    with pytest.raises(AssertionError):
        check_tests(given[:1], LIMITS)


def test_without_a_cache_that_can_be_written_tests_are_tried(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert check_tests(rows(1), LIMITS) == [VALUE]


def test_without_a_sandbox_few_tests_are_tried_and_none_is_refused(cache, monkeypatch):
    tried = []

    def unavailable(*row):
        tried.append(row)
        raise VerifierUnavailable

    monkeypatch.setattr(code_checks, "problem_of", unavailable)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert check_tests(rows(50), LIMITS) == [None] * 50
    assert len(tried) == code_checks.MOST_UNAVAILABLE


def test_within_a_limit_of_time_the_same_sample_is_tried(cache, monkeypatch):
    given = rows(8)

    def sample(order):
        begin, ticks = time.monotonic(), iter(range(100))
        clock = SimpleNamespace(monotonic=lambda: begin + 25.0 * next(ticks))
        monkeypatch.setattr(code_checks, "time", clock)
        monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
        return {text for (_, text, _), found in zip(order, check_tests(order, LIMITS)) if found}

    first = sample(given)
    next(cache.iterdir()).unlink()
    assert len(first) == 2 and sample(given[::-1]) == first


@pytest.mark.parametrize(
    "verifier, bad, good, reply",
    [("code", "assert f(1)", EQUAL, answer(OK)), ("math", "see the figure", "7", "\\boxed{7}")],
)
async def test_a_prompt_that_was_not_checked_is_checked_in_the_verifiers_process(verifier, bad, good, reply):
    refused, accepted = (prompt(prompt_id=text, text="Write f.", answer=text) for text in (bad, good))
    async with TaskPools([task(verifier)]) as pools:
        assert await pools.problem_of(refused) == (VALUE if verifier == "code" else check_references([bad])[0])
        assert await pools.problem_of(accepted) == ""
        assert await pools.score(reply, accepted) == RIGHT
