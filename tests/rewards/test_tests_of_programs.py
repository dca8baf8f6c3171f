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
    "async for": (
        "async def test_it():\n    assert [x async for x in f(3)] == [0, 1, 2]",
        "async def f(n):\n    for i in range(n):\n        yield i\n",
        "yield i",
    ),
    "asynchronous objects": (
        "async def test_it():\n    assert [x.n async for x in f(2)] == [0, 1]",
        "class C:\n    def __init__(self, n):\n        self.n = n\n"
        "async def f(n):\n    for i in range(n):\n        yield C(i)\n",
        "C(i)",
    ),
    "an asynchronous class of its own": (
        "async def test_it():\n    assert [x async for x in f()] == [3]",
        "class f:\n    done = False\n    def __aiter__(self):\n        return self\n    async def __anext__(self):\n"
        "        if self.done:\n            raise StopAsyncIteration\n        self.done = True\n        return 3\n",
        "return 3",
    ),
    "expected failure": (
        "import unittest\nclass TestIt(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_no(self):\n"
        "        self.assertEqual(f(), 4)\n    def test_yes(self):\n        self.assertEqual(f(), 3)",
        "def f():\n    return 3\n",
        "3",
    ),
}


KEPT = {
    # what the tests hand over -> what a program has to say of it
    "Counter('aab')": "type(x).__name__ == 'Counter' and x['z'] == 0 and x.most_common(1) == [('a', 2)]",
    "OrderedDict([('b', 1), ('a', 2)])": "type(x).__name__ == 'OrderedDict' and x.popitem(last=False) == ('b', 1)",
    "defaultdict(list, {'a': [1]})": "x['a'] == [1] and x['z'] == [] and 'z' in x",
    "defaultdict(lambda: 7)": "x['z'] == 7",
    "defaultdict(None, a=1)": "x.default_factory is None and x['a'] == 1",
    "deque([1, 2], maxlen=2)": "x.append(3) is None and list(x) == [2, 3]",
    "bytearray(b'ab')": "type(x).__name__ == 'bytearray' and x.pop() == 98",
    "bytearray()": "x == b'' and x.append(1) is None",
    "Point(1, y=2)": "x.x == 1 and x.y == 2 and x == (1, 2)",
    "{'p': [Counter(a=2)]}": "x['p'][0]['z'] == 0",
    "iter([1, 2])": "next(x) == 1 and list(x) == [2] and iter(x) is x",
    "(n for n in (1, 2))": "list(x) == [1, 2] and list(x) == []",
    "map(str, [1, 2])": "list(x) == ['1', '2']",
    "datetime(2026, 1, 2, tzinfo=timezone.utc)": "x.utcoffset().seconds == 0 and x.year == 2026",
}
IMPORTS = """
import itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import datetime, timezone
Point = namedtuple('Point', 'x y')
"""


@pytest.mark.parametrize("value", KEPT)
@pytest.mark.parametrize("keyword", ["", "x="])
def test_what_tests_hand_to_a_program_keeps_its_type(value, keyword):
    tests = f"{IMPORTS}assert f({keyword}{value}) is True"
    assert verdict(f"def f(x):\n    return {KEPT[value]}\n", tests) is True
    assert verdict("def f(x):\n    return x is None\n", tests) is False


CHANGED = {
    "[3, 1]": ("x.sort()", "[1, 3]"),
    "{'a': 1}": ("x.pop('a')", "{}"),
    "{1}": ("x.add(2)", "{1, 2}"),
    "deque([1])": ("x.appendleft(0)", "deque([0, 1])"),
    "bytearray(b'ab')": ("x.reverse()", "bytearray(b'ba')"),
    "Counter(a=2)": ("x.subtract('aaa')", "Counter(a=-1)"),
    "OrderedDict(a=1, b=2)": ("x.move_to_end('a')", "OrderedDict(b=2, a=1)"),
    "defaultdict(list)": ("x['a'].append(1)", "{'a': [1]}"),
}


@pytest.mark.parametrize("value", CHANGED)
@pytest.mark.parametrize("keyword", ["", "x="])
def test_what_a_program_changes_in_place_is_changed_for_the_tests(value, keyword):
    change, after = CHANGED[value]
    tests = f"{IMPORTS}value = {value}\nf({keyword}value)\nassert value == {after} and type(value) is type({value})"
    assert verdict(f"def f(x):\n    {change}\n", tests) is True
    assert verdict("def f(x):\n    pass\n", tests) is False


RETURNED = {
    "Counter('ab')": "f() == Counter(a=1, b=1) == {'a': 1, 'b': 1} and f()['z'] == 0",
    "OrderedDict(a=1, b=2)": "f() == OrderedDict(a=1, b=2) and f() != OrderedDict(b=2, a=1)",
    "defaultdict(list)": "f()['z'] == []",
    "Point(1, 2)": "f().x == 1 and f() == (1, 2) and f()._replace(x=3) == (3, 2)",
    "bytearray(b'a')": "f() == bytearray(b'a') and f().decode() == 'a'",
}


@pytest.mark.parametrize("value", RETURNED)
def test_what_a_program_returns_keeps_its_type(value):
    assert verdict(f"{IMPORTS}def f():\n    return {value}\n", f"{IMPORTS}assert {RETURNED[value]}") is True
    calls = '{"fn_name": "f", "inputs": [[]], "outputs": [[1, 2]]}'
    assert verdict(f"{IMPORTS}def f():\n    return Point(1, 2)\n", calls) is True


def test_a_type_that_a_program_forges_is_no_way_into_the_tests():
    forged = "class Point(tuple):\n    _fields = ('x', '__class__', 'def')\ndef f():\n    return Point((1, 2, 3))\n"
    assert verdict(forged, "assert f() == (1, 2, 3)") is False
    counter = "class Counter(dict):\n    def __reduce__(self):\n        return (exec, ('x = 1',))\n"
    named = f"{counter}Counter.__module__ = 'collections'\ndef f():\n    return Counter()\n"
    assert verdict(named, "assert f() == {}") is False
    assert verdict(named, "from collections import Counter\nassert f() == Counter('x = 1')") is True, "plain data"


STARTED = {
    "fileinput": "import fileinput\nprint(sum(map(int, fileinput.input())))",
    "no argument": "import sys\nopened = open(sys.argv[1]) if len(sys.argv) > 1 else sys.stdin\n"
    "print(sum(map(int, opened)))",
    "its name": "import os, sys\nassert os.path.basename(__file__) == sys.argv[0] != '-c'\nprint(3)",
    "argparse": "import argparse\nargparse.ArgumentParser().parse_args()\nprint(sum(map(int, open(0))))",
}


@pytest.mark.parametrize("start", STARTED)
def test_a_program_has_a_name_and_no_arguments(start):
    assert verdict(STARTED[start], '[{"input": "1\\n2\\n", "output": "3"}]') is True
    path = (
        "import os, sys\nsys.path.append(os.path.dirname(os.path.abspath(__file__)))\nassert f() == ['solution.py']"
    )
    assert verdict("import sys\ndef f():\n    return sys.argv\n", path) is True


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


SAME = [
    ("5\n", "5"),
    ("5 \n6\n\n", "5\n6"),
    ("a  b", "a b"),
    ("1.50", "1.5"),
    ("0.30000000000000004", "0.3"),
    ("nan", "nan"),
    ("", ""),
    ("0.3333333333333333", "0.333333333"),
    ("3.3333333333333335", "3.333333"),
    ("-0.0", "0"),
    (".5", "0.5"),
    ("1234567890", "1234567890.0"),
    ("123456.784", "123456.78"),
    ("0.3333333333", "0.33"),
    ("1.41421356", "1.4142"),
    ("123456.7891", "123456.789123"),
    ("1e-07", "0.0000001"),
    ("0.0000001", "1e-07"),
]
OTHER = [
    ("1e2", "100"),
    ("5", "5\n6"),
    ("5\n\n6", "5\n6"),
    ("Yes", "YES"),
    ("nan", "NaN"),
    ("sNaN", "1"),
    ("9" * 99, "9" * 98 + "8"),
    ("1e999999999", "1e999999998"),
    ("0.34", "0.333333333"),
    ("1000001", "1000000"),
    ("3.0000001", "3"),
    ("101", "00101"),
    ("00101", "101"),
    ("0101", "00101"),
    ("7 1", "007 01"),
    ("-7", "-07"),
    ("0.50", "00.5"),
    ("0", "00"),
    ("1234567891.0", "1234567890.0"),
    ("123455.78", "123456.78"),
    ("123456.79", "123456.78"),
    ("99999.99", "100000.00"),
    ("0.34", "0.33"),
    ("1.4143", "1.4142"),
    ("1_000", "1000"),
    ("1000", "1_000"),
    ("1_000.5", "1000.5"),
    ("\u0661\u0662", "12"),
    ("\uff11", "1"),
    ("\u0661.\u0665", "1.5"),
    ("5e0", "5"),
    ("5E+00", "5"),
    ("+5", "5"),
    ("inf", "Infinity"),
    ("-", "-0"),
    ("0.", "."),
]
"""What a program printed, and what it had to print."""


@pytest.mark.parametrize("rows, same", [(SAME, True), (OTHER, False)])
def test_outputs_are_compared_by_words_and_numbers_by_their_places(rows, same):
    assert [row for row in rows if same_output(*row) is not same] == []


@pytest.mark.parametrize(
    "after", ["```\n3\n4\n```", "```text\nf(2) is 3\n```", "```bash\npython a.py\n```", "```\nYES\n```"]
)
def test_what_follows_a_program_is_no_program(after):
    assert extract_program(f"```python\nprint(3)\n```\nIt prints:\n{after}\n") == "print(3)\n"
