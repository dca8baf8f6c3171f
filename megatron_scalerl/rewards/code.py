"""The verifier `code`: the program in an answer has to pass all unit tests of the problem, in a sandbox.

The program is the last fenced code block in Python of the text after thinking. An answer without a closed block has
no program and is wrong, as in the evaluation of LiveCodeBench. The prompt's answer column holds the tests
(`code_tests`).

docs/tasks.md lists the actions that the sandbox denies a program; tests/rewards/test_hostile_programs.py tries each
action. The kinds of tests:

* Standard input and output: the program's output is compared here, outside of the sandbox, which never contains the
  expected output. Printing a verdict, exiting early or patching the interpreter gains nothing.
* Calls and assertions: the tests run in a second process of the same sandbox, which the program cannot read, trace or
  write to; the program gets arguments and returns plain data. Two ways to cheat remain: an assertion without an
  expected value (`assert f(1)`) passes for any true value, and a program may define a helper function that the tests
  call but neither import nor define.

Equal arguments give equal verdicts, unless the program reads the time or os.urandom: hash seed and environment are
fixed.
"""

import ast
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from megatron_scalerl.rewards.code_tests import CodeTests, parse_tests
from megatron_scalerl.rewards.limits import Limits, TimeLimitExceeded
from megatron_scalerl.rewards.sandbox import Sandbox

OUTPUT_SLACK = 1 << 16
"""Number of bytes that a program may print in addition to twice the size of the expected output.

A program that writes more is killed, and the answer is wrong.
"""
NUMBER_LENGTH = 64
"""Largest number of characters of a word in an output that is compared as a number; longer words are text."""
PYTHON = ("python", "python3", "py", "py3", "python2")
"""Language names, in lower case, that mark a fenced code block as Python."""
_STATEMENTS = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
PLACES = 6
"""Expected numbers with at least PLACES decimal places, or an exponent, have the tolerances RELATIVE and ABSOLUTE.

APPS and TACO use the same tolerances.
"""
RELATIVE = Decimal("1e-5")
"""Relative tolerance of an expected number with an exponent or PLACES decimal places, as in numpy.allclose."""
ABSOLUTE = Decimal("1e-8")
"""Absolute tolerance of an expected number with an exponent or PLACES decimal places, as in numpy.allclose."""
_NUMBER = re.compile(r"-?(?=\.?[0-9])(?:0|[1-9][0-9]*)?(?:\.([0-9]*))?([eE][+-]?[0-9]{1,3})?")
"""Matches a number; the groups are decimal places and exponent. A word with leading zeros is text: 007 is not 7."""
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)", re.DOTALL)


def extract_program(answer_text: str) -> str | None:
    """The program in an answer: the last closed fenced block that is marked as Python. None without a closed block.

    If no block is marked as Python, the program is the last block without a language name that calls, defines or
    imports something, since a block with output often follows the program. Otherwise the program is the last block.

    Example:
        >>> extract_program("```python\\nprint(1 + 1)\\n```\\nprints\\n```\\n2\\n```\\n")
        'print(1 + 1)\\n'
    """
    blocks = list(_blocks(answer_text))
    python = [text for language, text in blocks if language in PYTHON]
    unnamed = [text for language, text in blocks if not language and is_program(text)]
    programs = python or unnamed or [text for _, text in blocks]
    return programs[-1] if programs else None


def is_program(text: str) -> bool:
    """Whether a text is Python that calls, defines or imports something."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, _STATEMENTS) for node in nodes)


def _blocks(answer_text: str) -> Iterator[tuple[str, str]]:
    """(language in lower case, content) of every closed fenced code block; the language is empty if not named."""
    language = indent = ""
    fence: str | None = None
    lines: list[str] = []
    # Not str.splitlines, which also splits at characters such as U+2028 inside a string literal of the program.
    for line in answer_text.replace("\r\n", "\n").split("\n"):
        mark = _FENCE.match(line)
        if mark and "`" in mark[3]:
            mark = None
        if fence is None:
            if mark:
                indent = mark[1]
                fence = mark[2]
                language = (mark[3].split() or [""])[0].lower()
                lines = []
        elif mark and not mark[3].strip() and mark[2].startswith(fence) and len(mark[1]) < len(indent) + 4:
            yield language, "\n".join(lines) + "\n"
            fence = None
        else:  # a fence inside a list is indented, as are all lines of the block
            lines.append(line.removeprefix(indent) if line.startswith(indent) else line.lstrip(" "))


def verify_code(answer_text: str, reference: str, extra: dict[str, Any], *, limits: Limits) -> bool:
    """True if the program passes all tests of `reference`.

    extra: the row's further columns, for `parse_tests`. limits: processor time of each run of the program (assertions
    are one run), address space, and the size of files. Raises ValueError for tests in an unknown form,
    TimeLimitExceeded if the processor time is exceeded, and SandboxError if no sandbox could be made.
    """
    tests = parse_tests(reference, extra)
    program = extract_program(answer_text)
    return program is not None and passes(program, tests, limits)


def passes(program: str, tests: CodeTests, limits: Limits, deadline: float | None = None) -> bool:
    """True if a program passes all tests. Raises as `verify_code`, and SandboxError after the deadline.

    deadline: value of time.monotonic() (s); None: no deadline.
    """
    with Sandbox(limits, deadline=deadline) as sandbox:
        if tests.script is not None:
            return sandbox.run_tests(program, tests.script, tests.entry_point)
        inputs = [case_input for case_input, _ in tests.cases]
        limit = [OUTPUT_SLACK + 2 * len(expected.encode(errors="replace")) for _, expected in tests.cases]
        passed = 0
        for result, (_, expected) in zip(sandbox.run(program, inputs, limit), tests.cases):
            if result.cpu_left_s < 0:
                raise TimeLimitExceeded
            if result.code or not same_output(result.output.decode(errors="replace"), expected):
                return False
            passed += 1
    return passed == len(tests.cases)


def same_output(printed: str, expected: str) -> bool:
    """True if the printed and the expected output have the same words on the same lines.

    White space at the ends of lines and empty lines at the end do not count. Whole numbers are compared by value. A
    number with fewer than PLACES decimal places may differ by half of the last place.

    Example:
        >>> same_output("1.0 yes\\n\\n", "1 yes"), same_output("3.14159", "3.14"), same_output("7", "007")
        (True, True, False)
    """
    lines = printed.rstrip().split("\n")
    expected_lines = expected.rstrip().split("\n")
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(printed: str, expected: str) -> bool:
    if printed.strip() == expected.strip():
        return True
    words = printed.split()
    expected_words = expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    number = _NUMBER.fullmatch(printed)
    value = _NUMBER.fullmatch(expected)
    if not number or not value or max(len(printed), len(expected)) > NUMBER_LENGTH:
        return False
    places, exponent = value.groups(default="")
    error = abs(Decimal(printed) - Decimal(expected))
    if exponent or len(places) >= PLACES:
        return error <= ABSOLUTE + RELATIVE * abs(Decimal(expected))
    if places:
        return 2 * error <= Decimal(10) ** -len(places)
    return error == 0 and not number[2]
