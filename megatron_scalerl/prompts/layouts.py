"""Layouts of prompt files: which columns hold the question and the reference, and how the values are read.

`LAYOUTS` is a table. A column is a name, or a path into nested values (`reward_model.ground_truth`, `0.value`), JSON
texts included. Several columns are joined; a column that begins with `?` may be absent. A question includes the texts
that the question refers to: a context, and choices, each after a letter.
"""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import string
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import chain, islice
from typing import Any

from megatron_scalerl.prompts.sources import Row, other_columns, read_rows, refuse_surrogates
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.record import record

SAMPLE = 64
"""Rows at the beginning of a file from which the layout is detected."""
UNPACKED = 1 << 28
"""Largest size (bytes) to which the compressed unit tests of one row are unpacked."""
UNLISTED = 3
"""Rank (0 is the best) of a layout whose reference column is replaced by prompts.answer_column of the recipe."""
CONTEXT = ("context", "passage", "article", "Body", "body")
"""Columns with the texts that a question is about, which are put before the question."""
CHOICES = ("choices", "options", "endings")
"""Columns with the choices of a multiple-choice question."""
_CHOICE = re.compile(r"[A-J]|(?i:(?:option|choice|ending|answer|op)[ _]?[a-j]|(?:option|choice|ending)[ _]?\d)")
"""Matches the name of a column that holds a single choice of a multiple-choice question, such as A or option_b."""
_PLACE = re.compile(
    r"(?i)<\|?(?:image|img|video|audio|speech)(?:[ _-]?(?:\d+|pad))?\|?>|<img\b[^>]*\bsrc|!\[[^\]\n]*\]\([^)\n]+\)"
    r"|\\includegraphics"
)
"""Finds the mark of an image, a video or sound in a text."""
CHECKED = "generated_checker|checker|interactor|interaction_format"
REFUSED = {
    r"(?:.*_)?(?:image|img|picture|figure|diagram|video|audio|speech)s?(?:_?(?:\d+|path|url|file|name|bytes)s?)*": (
        "the policy reads text alone"
    ),
    "tools|functions|documents|tool_calls|function_call": "tools and documents need an environment",
    CHECKED: "only tests with fixed expected outputs are supported",
}
"""Pattern of columns that make a row unusable -> reason.

The policy would need such a column to answer, or the verifier to judge, and neither gets the column. In a task with
an environment, which may use further columns, only columns of the first pattern are refused.
"""
ROLES = {"human": "user", "gpt": "assistant"}
"""Roles in ShareGPT's form of messages."""


_STATED = re.compile(
    r".*(?:\\boxed\{([^{}]*)\}|####\s*(\S+)|<answer>([^<]*)</answer>"
    r"|(?:option|answer|choice)(?: is)?:?\s+(\S+))[\s.$]*",
    re.DOTALL | re.IGNORECASE,
)
"""Finds the choice that a reference states in a box, after ####, in tags, or in words."""


@record
class Question:
    """The question of a row."""

    text: str
    """The question as one text, for ids and for the split; with several messages each content follows "ROLE: "."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Role and content of each message, if the column holds messages; empty if the column holds a text."""


class OtherTask(ValueError):
    """Raised for a row that needs a verifier other than rewards.verifier."""


@record
class Layout:
    """A layout: which columns of a file hold questions and references."""

    name: str
    """Name of the layout, by which prompts.preset chooses the layout."""
    question: tuple[str, ...]
    """Columns of the question."""
    reference: tuple[str, ...]
    """Columns of the reference answer or the unit tests."""
    verifier: str = ""
    """The verifier that can use the references; empty: any."""
    first: int = 0
    """The number (0 or 1) by which a reference means the first choice."""
    rank: int = 0
    """The lowest rank wins among the layouts that fit a file."""

    def line(self) -> str:
        """The layout as a line of the log."""
        question = " + ".join(self.question)
        reference = " + ".join(self.reference)
        return f"layout {self.name}: question in {question}, reference in {reference}".replace("?", "")

    def fits(self, row: Row) -> bool:
        """Whether the row has all columns of the layout, except optional columns."""
        return not any(_column_error(row, column) for column in (*self.question, *self.reference))

    def within(self, layout: Layout) -> bool:
        """Whether `layout` has the reference of this layout, all question columns of this layout, and at least one
        more."""
        columns = {column.removeprefix("?") for column in layout.question}
        return self.reference == layout.reference and {*self.question} < columns

    def question_of(self, row: Row) -> Question:
        """The row's question. Raises ValueError, naming row and column."""
        first, *later_parts = values_of(row, self.question)
        if _is_conversation(parsed := _parsed(first)):
            return _conversation(row, self.question[0], parsed)
        parts = [first]
        for part in later_parts:
            parts.append("\n".join(map(str, part)) if isinstance(part, list) else part)
        text = "\n\n".join(as_text(row, self.question[0], part) for part in parts)
        return Question(text=_with_references(row, text))

    def check_seen(self, row: Row, question: Question, verifier: str, *, episodes: bool) -> None:
        """Raise ValueError for a row with `REFUSED` columns, and for a question with an image, a video or sound.

        verifier: rewards.verifier; module:function gets all columns, so CHECKED columns are allowed. episodes:
        whether an environment gets the row.
        """
        question_value = _parsed(row.values.get(self.question[0].partition(".")[0]))
        parts = [row.values, *(question_value if isinstance(question_value, list) else [question_value])]
        names = [pair for part in parts if isinstance(part, dict) for pair in part.items()]
        refused_columns = dict(REFUSED)
        if ":" in verifier:
            del refused_columns[CHECKED]
        for pattern, reason in islice(refused_columns.items(), 1 if episodes else None):
            for name, value in names:
                if re.fullmatch(pattern, name, re.IGNORECASE) and leaves(value):
                    raise ValueError(f"{row.where}: rows with the column {name!r} cannot be used: {reason}")
        if place := _PLACE.search(question.text):
            raise ValueError(f"{row.where}: the question shows {place[0]!r}, and the policy reads text alone")

    def has_messages(self, row: Row) -> bool:
        """Whether the row's question is a list of messages."""
        return not row.problem and self.fits(row) and _is_conversation(_parsed(values_of(row, self.question)[0]))

    def reference_of(self, row: Row, verifier: str) -> str:
        """The row's reference as text. Raises ValueError, naming row and column."""
        parts = values_of(row, self.reference)
        language, _ = _at(row.values, self.reference[0].rpartition(".")[0] + ".language")
        if verifier == "code" and language and "python" not in str(language).lower():
            raise OtherTask(f"{row.where}: the tests are for {language}; only Python is supported")
        choices = _choices(row)
        if choices and verifier == "math":
            letter = _letter(choices, parts[0], self.first)
            if letter is not None:
                return letter
            # an error only for a column of CHOICES, since columns A, B ... may hold no choices
            if any(map(row.values.get, CHOICES)):
                excerpt = str(parts[0])[:60]
                raise ValueError(
                    f"{row.where}: {self.reference[-1]!r} is {excerpt!r}, which is not exactly one of the choices"
                )
        texts = [_as_reference(row, self.reference[-1], part, verifier) for part in parts]
        lists = [_parsed(text) for text in texts]
        if len(texts) > 1 and all(isinstance(part, list) for part in lists):
            return json.dumps(list(chain.from_iterable(lists)))
        # CodeContests has an object of lists in each column
        if len(texts) > 1 and all(isinstance(part, dict) for part in lists):
            keys = [key for key in lists[0] if all(isinstance(part.get(key), list) for part in lists)]
            return json.dumps({key: [*chain(*(part[key] for part in lists))] for key in keys})
        return "\n".join(texts)

    def others(self, row: Row) -> dict[str, Any]:
        """The row's columns besides question and reference."""
        names = [column.removeprefix("?") for column in (*self.question, *self.reference)]
        return other_columns(row, {*names, *(name.partition(".")[0] for name in names)})


QUESTIONS = (
    *("prompt", "problem", "question", "input", "query", "instruction ?input", "context_messages", "message"),
    "problem_text",
)
ANSWERS = (
    *("answer", "label", "ground_truth", "final_answer", "expected_answer", "answerKey", "correct", "answer_number"),
    "gold",
)
_GYM = "responses_create_params.input"
PUBLISHED = (
    ("verl", "prompt", "reward_model.ground_truth", ""),
    ("orz", "0.value", "1.ground_truth.value", ""),
    ("intellect", "prompt", "verification_info.ground_truth", "math"),
    ("intellect_code", "prompt", "verification_info.test_cases", "code"),
    ("livecodebench", "question_content ?starter_code", "public_test_cases private_test_cases", "code"),
    ("taco", "question ?starter_code", "input_output", "code"),
    ("deepcoder", "problem ?starter_code", "tests", "code"),
    ("humaneval", "prompt", "test", "code"),
    ("mbpp", "text test_list", "?test_setup_code test_list", "code"),
    ("mbpp_sanitized", "prompt test_list", "?test_imports test_list", "code"),
    ("acecode", "question", "test_cases", "code"),
    ("openthoughts", "problem ?starter_code", "test_cases", "code"),
    ("open_r1_code", "problem_statement", "verification_info.test_cases", "code"),
    ("codecontests", "description", "public_tests ?generated_tests private_tests", "code"),
    ("kodcode", "question ?test_info.0.function_declaration", "test", "code"),
    ("skyrl", "prompt", "reward_spec.ground_truth", ""),
    ("areal", "prompt", "solutions", "math"),
    ("areal_code", "prompt", "input_output", "code"),
    ("nemo_gym", _GYM, "expected_answer", ""),
    ("nemo_gym_metadata", _GYM, "verifier_metadata.expected_answer", ""),
    ("nemo_gym_code", _GYM, "verifier_metadata.unit_tests", "code"),
    ("intellect3_code", "question", "info.tests", "code"),
    ("codeforces", "description ?input_format ?output_format ?note", "official_tests", "code"),
    ("leetcode", "query", "test", "code"),
)
"""Layouts of published data sets: (name, columns of the question, of the reference, verifier or empty)."""
PAIRS = tuple(
    ((*question.split(),), answer, rank)
    for questions, answers, rank in (
        ((*QUESTIONS, "messages"), ("reference_answer",), 0),
        (QUESTIONS, ANSWERS, 1),
        (("messages",), (*ANSWERS, "metadata.expected_answer"), 2),
        (QUESTIONS, ("solution",), 2),
        (("messages",), ("solution",), 3),
        (("query",), ("response",), 2),
        (("instruction ?input", "input"), ("output",), 2),
        (("Problem", "Question"), ("Answer",), 1),
    )
    for answer in answers
    for question in questions
)
"""Layouts by common column names: (columns of the question, column of the reference, rank)."""
LAYOUTS = (
    *(
        Layout(name=n, question=(*q.split(),), reference=(*r.split(),), verifier=v, rank={"humaneval": 1}.get(n, 0))
        for n, q, r, v in PUBLISHED
    ),
    *(Layout(name=f"{q[0]}/{r}", question=q, reference=(r,), rank=rank) for q, r, rank in PAIRS),
)
"""All layouts that a file may have.

A worked solution has rank 2: the boxed answer is the reference only in a file without answers. `messages` have rank
2, because in a file with a question the messages also contain the answer. HumanEval has rank 1, because MBPP+ has
HumanEval's columns as well, and tests with numpy.
"""


def read_layout(path: str, prompts: PromptsSection, verifier: str) -> tuple[Layout, Iterator[Row]]:
    """(layout, rows) of a prompts file.

    Raises ValueError, in one line, as `read_rows`, and for a file of no known layout, a file whose references need
    another verifier, and a file that fits several layouts with different questions or references.
    """
    rows = read_rows(path, prompts.split)
    sample = list(islice(rows, SAMPLE))
    readable = [row for row in sample if not row.problem]
    for column in filter(None, (prompts.prompt_column, prompts.answer_column)):
        if readable and (column_errors := [_column_error(row, column) for row in readable]) and all(column_errors):
            raise ValueError(f"{path}: {column_errors[0]}")
    layouts = _candidates(prompts)
    layout = layouts[0]
    if readable and len(layouts) > 1:
        layout = _detected(path, readable, layouts, verifier)
    if any(_at(row.values, layout.reference[0])[0] == len(_choices(row)) > 0 for row in readable):
        layout = replace(layout, first=1)
    if readable and not _serves(layout, verifier):
        raise ValueError(
            f"{path}: {layout.line()}: these rows are for the verifier {layout.verifier}, but "
            f"rewards.verifier is {verifier}"
        )
    return layout, chain(sample, rows)


def other_task(row: Row, layout: Layout) -> bool:
    """Whether a row lacks the reference (a.b) but has the outer column (a), as rows for a different verifier have."""
    absent_columns = [column for column in layout.reference if _column_error(row, column)]
    return bool(layout.verifier) and any(row.values.get(column.partition(".")[0]) for column in absent_columns)


def _candidates(prompts: PromptsSection) -> list[Layout]:
    """The layouts to try on a file: all, or the layout of prompts.preset, with the columns that prompt_column and
    answer_column name."""
    layouts = list(LAYOUTS)
    if prompts.preset is not None:
        layouts = [layout for layout in LAYOUTS if layout.name == prompts.preset]
        if not layouts:
            names = ", ".join(layout.name for layout in LAYOUTS)
            raise ValueError(f"prompts.preset: there is no layout {prompts.preset}; the layouts are {names}")
    question = prompts.prompt_column
    reference = prompts.answer_column
    if question:
        layouts = [replace(layout, question=(question,)) for layout in layouts]
    if reference:
        ranks = [layout.rank if reference in layout.reference else UNLISTED for layout in layouts]
        layouts = [
            replace(layout, reference=(reference,), verifier="", rank=rank) for layout, rank in zip(layouts, ranks)
        ]
    if question or reference:
        layouts = [replace(x, name=f"{'+'.join(x.question)}/{'+'.join(x.reference)}") for x in layouts]
    # prompt_column and answer_column make layouts equal: of equal layouts the last, with the lowest rank, stays
    by_rank = sorted(layouts, key=lambda layout: -layout.rank)
    return list({(layout.question, layout.reference): layout for layout in by_rank}.values())


def _serves(layout: Layout, verifier: str) -> bool:
    """Whether a verifier can use the layout's references; a user's verifier, module:function, can use every
    layout's."""
    return layout.verifier in ("", verifier) or ":" in verifier


def _detected(path: str, rows: Sequence[Row], layouts: Sequence[Layout], verifier: str) -> Layout:
    fitting = [layout for layout in layouts if any(map(layout.fits, rows))]
    usable = {layout.name: [_pair(layout, row, verifier) for row in rows] for layout in fitting}
    # a column may be empty in all rows: layouts that give no pair of question and reference are left out
    fitting = [layout for layout in fitting if any(usable[layout.name])] or fitting
    if not fitting:
        columns = ", ".join(dict.fromkeys(chain.from_iterable(row.values for row in rows))) or "no columns"
        advice = "name two of them as prompts.prompt_column and prompts.answer_column"
        if re.search("(?i)incorrect|distractor", columns):
            advice = "write all choices into a column `choices`, and the letter of the right choice into `answer`"
        raise ValueError(
            f"{path}: no known layout fits the columns {columns}; {advice} (docs/prompts.md lists the layouts)"
        )
    lowest = min(layout.rank for layout in fitting)
    fitting = [layout for layout in fitting if layout.rank == lowest]
    fitting = [layout for layout in fitting if not any(map(layout.within, fitting))]
    able = [layout for layout in fitting if _serves(layout, verifier)] or fitting[:1]
    if any(usable[layout.name] != usable[able[0].name] for layout in able):
        names = " or ".join(layout.name for layout in able)
        raise ValueError(
            f"{path}: several layouts fit, with different questions or references; set prompts.preset to {names}"
        )
    return able[0]


def _pair(layout: Layout, row: Row, verifier: str) -> tuple[str, str] | None:
    """(question, reference) of a row, None if the row lacks either."""
    try:
        return layout.question_of(row).text, layout.reference_of(row, verifier)
    except ValueError:
        return None


def _at(values: Any, column: str) -> tuple[Any, bool]:
    """Return (value of a column or of a path into nested values, whether the column exists)."""
    if column in values:
        return values[column], True
    for part in column.split("."):
        values = _parsed(values)
        if isinstance(values, list):
            values = dict(zip(map(str, range(len(values))), values))
        if not isinstance(values, dict) or part not in values:
            return None, False
        values = values[part]
    return values, True


def _column_error(row: Row, column: str) -> str:
    """The error message if `column` is required and the row lacks `column`; else empty."""
    if column.startswith("?") or _at(row.values, column)[1]:
        return ""
    return f"there is no column {column!r}; the columns are {', '.join(map(str, row.values)) or 'none'}"


def values_of(row: Row, columns: Sequence[str]) -> list[Any]:
    """The values of the columns, without optional columns that are absent or empty. Raises ValueError for a missing
    column."""
    if problem := next(filter(None, (_column_error(row, column) for column in columns)), ""):
        raise ValueError(f"{row.where}: {problem}")
    pairs = [(column, _at(row.values, column.removeprefix("?"))[0]) for column in columns]
    return [value for column, value in pairs if value or not column.startswith("?")]


def _parsed(value: Any) -> Any:
    """The list or object in a text that is JSON or a Python literal; any other value is returned unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
        if re.match(r"[\s\[{]+'", value):  # a file that was written from a data frame has Python's notation
            try:
                return json.loads(json.dumps(ast.literal_eval(value.strip())))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                pass
    return value


def _choices(row: Row) -> dict[str, str]:
    """The text of each choice of a row, by letter; empty without choices."""
    choices = _parsed(next(filter(None, map(row.values.get, CHOICES)), None))
    columns = [row.values[name] for name in sorted(filter(_CHOICE.fullmatch, row.values))]
    if choices is None and len(columns) > 1 and all(isinstance(value, str | None) for value in columns):
        choices = columns
    if _is_conversation(choices):  # NeMo Gym has a list of objects, letter: text
        choices = dict(chain.from_iterable(choice.items() for choice in choices))
    if isinstance(choices, list):
        choices = dict(zip(string.ascii_uppercase, choices))
    if not isinstance(choices, dict):
        return {}
    if all(isinstance(choices.get(key), list) for key in ("label", "text")):  # ARC has the lists `label` and `text`
        choices = dict(zip(map(str, choices["label"]), choices["text"]))
    texts = {letter: str(value) for letter, value in choices.items() if isinstance(value, (str, int, float))}
    # AQuA repeats the letter before the choice's text
    if all(text.lstrip("(")[:2] in (f"{letter})", f"{letter}.") for letter, text in texts.items()):
        texts = {letter: text.lstrip("(")[2:].strip() for letter, text in texts.items()}
    return texts if all(re.fullmatch(r"\w", letter) for letter in texts) else {}


def _letter(choices: Mapping[str, str], value: Any, first: int) -> str | None:
    """The letter of the right choice.

    value: the reference, which is the choice's letter, number, text, or letter and text. first: number of the first
    choice. A choice found by letter is preferred. None for a reference that means no choice or several choices, such
    as a number that is also a choice's text.
    """
    parsed = _parsed(value)
    if isinstance(parsed, list) and len(parsed) == 1:
        value = parsed[0]
    statement = _STATED.fullmatch(str(value))
    stated_texts = {_plain_text(text) for text in (value, *filter(None, statement.groups() if statement else ()))}
    for letters in (
        {x for x in choices if _plain_text(x) in stated_texts},
        {x for x, text in choices.items() if stated_texts & {_plain_text(text), _plain_text(f"{x} {text}")}}
        | {x for number, x in enumerate(choices, start=first) if type(value) is int and number == value},
    ):
        if len(letters) == 1:
            return letters.pop()
    return None


def _plain_text(value: Any) -> str:
    """A text for comparisons: in lower case, with single spaces in place of spaces, brackets and the signs . : , $"""
    return " ".join(re.split(r"[\s().:,$]+", str(value).casefold())).strip()


def leaves(value: Any) -> list[Any]:
    """The texts and numbers in a nested value, without empty texts, zeros and NaN."""
    leaf_values = []
    remaining_parts = [value]
    while remaining_parts:
        part = remaining_parts.pop()
        if isinstance(part, dict):
            remaining_parts += reversed(part.values())
        elif isinstance(part, list):
            remaining_parts += reversed(part)
        elif part and part == part and part not in ("[]", "{}", "null"):
            leaf_values.append(part)
    return leaf_values


def _with_references(row: Row, text: str) -> str:
    """The full question: the row's contexts (`CONTEXT`), then `text`, then the row's choices."""
    about = [_parsed(row.values.get(name)) for name in (*CONTEXT, *CHOICES)]
    choices = _choices(row)
    # some data sets have the choices in the question's text already
    if not all(re.search(rf"{letter}\W{{1,6}}{re.escape(value)}", text) for letter, value in choices.items()):
        text = "\n".join((f"{text}\n", *(f"{letter}. {value}" for letter, value in choices.items())))
    contexts = [part for part in about if isinstance(part, str) and part.strip() and part not in text]
    return "\n\n".join((*contexts, text))


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) for part in value)


def _conversation(row: Row, column: str, parts: Sequence[Mapping[str, Any]]) -> Question:
    messages = []
    for part in parts:
        role = part.get("role", part.get("from"))
        content = part.get("content", part.get("value"))
        if isinstance(content, list) and all(isinstance(c, dict) and c.get("type") == "text" for c in content):
            content = "".join(str(c.get("text", "")) for c in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{row.where}: every message in {column!r} has to have a role and a text")
        refuse_surrogates(row.where, column, content)
        messages.append({"role": ROLES.get(role, role), "content": content})
    while len(messages) > 1 and messages[-1]["role"] == "assistant":  # removes a warm-start row's answer
        messages.pop()
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(
            f"{row.where}: the last message in {column!r} has to be a text of the user; it is {messages[-1]}"[:200]
        )
    messages[-1]["content"] = _with_references(row, messages[-1]["content"])
    text = messages[0]["content"]
    if len(messages) > 1:
        text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return Question(text=text, messages=tuple(messages))


def _as_reference(row: Row, column: str, value: Any, verifier: str) -> str:
    """The reference in a column as text: a list with one element counts as the element; for `code`, a list of texts
    becomes lines of Python, and further tests become JSON. Raises ValueError for several reference answers."""
    parsed = _parsed(value)
    if isinstance(parsed, list) and parsed and all(isinstance(part, str) for part in parsed):
        value = parsed
        if verifier == "code":
            value = "\n".join(parsed)
    if isinstance(value, list) and len(value) == 1 and verifier != "code":
        value = value[0]
    if isinstance(value, (list, dict)) and value and verifier != "math":
        value = json.dumps(value)
    if isinstance(value, list):
        raise ValueError(f"{row.where}: {column!r} has {len(value)} reference answers; exactly one is required")
    text = as_text(row, column, value)
    if verifier == "math" and (tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)):
        text = as_text(row, column, tagged[-1].strip())
    return _unpacked(text) if verifier == "code" else text


def _unpacked(text: str) -> str:
    """LiveCodeBench's private tests, a compressed pickle in base64: the pickle's text is read without unpickling. Any
    value of another form is returned unchanged."""
    if not re.fullmatch(r"eJ[A-Za-z0-9+/=\n]+", text):
        return text
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text), UNPACKED)
        # genops reads the instructions of a pickle in turn and carries out no instruction
        return next(str(value) for code, value, _ in pickletools.genops(packed) if "UNICODE" in code.name)
    except (ValueError, zlib.error, StopIteration):
        return text


def as_text(row: Row, column: str, value: Any) -> str:
    """A text or a number as text. Raises ValueError for a value of another kind, for an empty text, and for a text
    that UTF-8 cannot encode."""
    if not isinstance(value, (str, int, float, Decimal)) or isinstance(value, bool) or value != value:
        kind = {type(None): "empty", float: "NaN"}.get(type(value), f"a {type(value).__name__}")
        raise ValueError(f"{row.where}: {column!r} is {kind}; it has to be a text or a number")
    text = str(value)
    if not text.strip():
        raise ValueError(f"{row.where}: {column!r} is an empty text")
    refuse_surrogates(row.where, column, text)
    return text
