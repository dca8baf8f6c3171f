"""Tests that swallow an assertion which fails pay nobody; and what tests of public sets do with right programs."""

import pytest
from sandboxed import verdict

from megatron_scalerl.rewards.code import extract_program, same_output
from megatron_scalerl.rewards.code_tests import parse_tests

RIGHT, WRONG = "def add1(x):\n    return x + 1\n", "def add1(x):\n    return 'nonsense'\n"
SWALLOWED = {
    "except Exception": "try:\n    assert add1(2) == 3\nexcept Exception:\n    pass",
    "printed": "try:\n    assert add1(2) == 3\nexcept AssertionError:\n    print('FAILED')",
    "suppress": "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert add1(2) == 3",
    "finally": "def test():\n    try:\n        assert add1(2) == 3\n    finally:\n        return",
    "thread": "import threading\ndef run():\n    assert add1(2) == 3\nthreading.Thread(target=run).start()",
    "one held": "assert add1(0) != 7\ntry:\n    assert add1(2) == 3\nexcept AssertionError:\n    pass",
    "unittest": "import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n        try:\n"
    "            self.assertEqual(add1(2), 3)\n        except AssertionError:\n            pass",
}


RAISING = "def add1(x):\n    if x:\n        raise ValueError\n    return 1\n"
PAID_NOBODY = {
    "its expression raises": "assert add1(0) == 1\nfor x in (1, 2):\n    try:\n        assert add1(x) == x + 1\n"
    "    except Exception:\n        pass",
    "unittest's raises": "import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n"
    "        self.assertEqual(add1(0), 1)\n        try:\n            self.assertEqual(add1(2), 3)\n"
    "        except Exception:\n            pass",
    "an argument is refused": "import pytest\nwith pytest.raises(TypeError):\n    add1(object())",
    "a daemon": "import threading\ndef run():\n    import time\n    time.sleep(2)\n    assert add1(2) == 3\n"
    "assert add1(0) == 1\nthreading.Thread(target=run, daemon=True).start()",
    "an approximation": "from pytest import approx\nassert add1(0) + 1e9 == approx(1e9 + 500, abs=1e-3)",
}


@pytest.mark.parametrize("kind", PAID_NOBODY)
def test_what_is_not_evaluated_to_its_end_pays_nobody(kind):
    assert verdict(RAISING, PAID_NOBODY[kind]) is False


def test_an_exception_of_a_function_of_the_tests_passes_through_the_program():
    tests = "import pytest\ndef bad(x):\n    raise KeyError(x)\nwith pytest.raises(KeyError):\n    f(bad)"
    assert verdict("def f(g):\n    return g(1)\n", tests) is True
    assert verdict("def f(g):\n    try:\n        g(1)\n    except KeyError:\n        pass\n", tests) is False


@pytest.mark.parametrize("kind", SWALLOWED)
def test_an_assertion_that_fails_counts_where_tests_swallow_it(kind):
    assert verdict(RIGHT, SWALLOWED[kind]) is True
    assert verdict(WRONG, SWALLOWED[kind]) is False


FORMS = {
    "async": ("import asyncio\nassert asyncio.run(f()) == 3", "async def f():\n    return 3\n", "3"),
    "gathered": (
        "import asyncio\nasync def test_it():\n    assert await asyncio.gather(f(), f()) == [3, 3]",
        "async def f():\n    return 3\n",
        "3",
    ),
    "function as argument": ("assert f(lambda x: x + 1, 2) == 3", "def f(g, x):\n    return g(x)\n", "g(x)"),
    "function that calls back": (
        "def twice(x):\n    return f(None, x) * 2\nassert f(twice, 2) == 4",
        "def f(g, x):\n    return g(x) if g else x\n",
        "g(x)",
    ),
    "own exception": (
        "try:\n    f(1)\nexcept Bad as error:\n    assert str(error) == 'one'\nelse:\n    assert False",
        "class Base(ValueError): pass\nclass Bad(Base): pass\ndef f(x):\n    raise Bad('one')\n",
        "'one'",
    ),
    "attributes of its exception": (
        "try:\n    f(1)\nexcept Bad as error:\n    assert error.code == 3 and str(error) == 'bad 3'",
        "class Bad(Exception):\n    def __init__(self, code):\n        self.code = code\n"
        "    def __str__(self):\n        return f'bad {self.code}'\ndef f(x):\n    raise Bad(3)\n",
        "Bad(3)",
    ),
    "a type as argument": (
        "assert f([1, 'a'], int) == [1]",
        "def f(a, t):\n    return [x for x in a if type(x) is t]\n",
        "is t",
    ),
    "printed": (
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f()\n"
        "assert out.getvalue() == '3\\n'",
        "def f():\n    print(3)\n",
        "3",
    ),
    "an executor that is not shut down": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
        "assert list(pool.map(f, [1, 2])) == [2, 3]",
        "def f(x):\n    return x + 1\n",
        "x + 1",
    ),
    "pytest.raises": (
        "import pytest\ndef test_it():\n    with pytest.raises(ValueError, match='no'):\n        f()",
        "def f():\n    raise ValueError('no')\n",
        "'no'",
    ),
    "pytest.approx": (
        "from pytest import approx\nassert f() == approx(0.3)",
        "def f():\n    return 0.1 + 0.2\n",
        "0.1",
    ),
    "pytest.mark.parametrize": (
        "import pytest\n@pytest.mark.parametrize('a, b', [(1, 2), pytest.param(2, 3)])\ndef test_it(a, b):\n"
        "    assert f(a) == b",
        "def f(x):\n    return x + 1\n",
        "x + 1",
    ),
    "expected failure": (
        "import unittest\nclass TestIt(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_no(self):\n"
        "        self.assertEqual(f(), 4)\n    def test_yes(self):\n        self.assertEqual(f(), 3)",
        "def f():\n    return 3\n",
        "3",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_right_programs_pass_and_changed_ones_fail(form):
    tests, right, part = FORMS[form]
    assert verdict(right, tests) is True
    assert verdict(right.replace(part, "'other'"), tests) is False


def test_a_method_of_solution_may_be_the_entry_point():
    assert (
        parse_tests(
            "def check(candidate):\n    assert candidate(1) == 2", {"entry_point": "Solution().f"}
        ).entry_point
        == "f"
    )


def test_other_parts_of_pytest_are_refused():
    with pytest.raises(ValueError, match=r"pytest\.fixture"):
        parse_tests("import pytest\n@pytest.fixture\ndef x():\n    return 1\ndef test_it(x):\n    assert f(x)")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("0.3333333333333333", "0.333333333", True),
        ("3.3333333333333335", "3.333333", True),
        ("0.34", "0.333333333", False),
        ("1000001", "1000000", False),
        ("3.0000001", "3", False),
    ],
)
def test_printed_fractions_are_compared_as_apps_does(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    "after", ["```\n3\n4\n```", "```text\nf(2) is 3\n```", "```bash\npython a.py\n```", "```\nYES\n```"]
)
def test_what_follows_a_program_is_no_program(after):
    assert extract_program(f"```python\nprint(3)\n```\nIt prints:\n{after}\n") == "print(3)\n"
