"""Evaluation files: the columns of AIME and MATH-500 as on the hub, and any other."""

import pytest
from evaluation_files import AIME_2024, MATH_500, published, written

from megatron_scalerl.evaluation.problems import read_problems, split_schema


@pytest.mark.parametrize(
    "name, ids, answers",
    [
        ("Maxwell-Jia_AIME_2024", ["2024-I-1", "2024-II-4"], ["33", "1"]),
        ("HuggingFaceH4_aime_2024", ["60"], ["076"]),
        ("math-ai_aime25", ["0"], ["4"]),
        ("opencompass_AIME2025", ["1"], ["4"]),
        ("MathArena_aime_2025", ["1"], ["4"]),
    ],
)
def test_every_variant_of_aime_is_recognized(tmp_path, name, ids, answers):
    rows = published(name)
    path = written(tmp_path, "aime.jsonl", rows)
    found = read_problems(path)
    assert found.schema == "aime" and found == read_problems(path, "aime")
    assert [p.problem_id for p in found.problems] == ids
    assert [p.answer for p in found.problems] == answers
    assert [p.text for p in found.problems] == [r.get("Problem") or r.get("problem") or r["question"] for r in rows]


def test_math_500_keeps_subject_and_level(tmp_path):
    path = written(tmp_path, "math500.jsonl", MATH_500)
    found = read_problems(path)
    assert found.schema == "math500" and found.name == "math500" and found == read_problems(path, "math500")
    assert found.problems[0].problem_id == "test/precalculus/1.json"
    assert found.problems[1].extra["level"] == 1 and "problem" not in found.problems[1].extra
    assert found.problems[1].labels == {"subject": "Counting & Probability", "level": "1"}
    assert found.problems[0].answer == MATH_500[0]["answer"]


def test_any_columns(tmp_path):
    rows = [{"task": "1+1", "target": 2, "id": "x"}, {"task": "2+2", "target": 4.5, "id": "y"}]
    found = read_problems(written(tmp_path, "d.jsonl", rows), "task,target")
    assert [(p.problem_id, p.text, p.answer) for p in found.problems] == [("x", "1+1", "2"), ("y", "2+2", "4.5")]
    plain = read_problems(written(tmp_path, "p.jsonl", [{"prompt": "1+1", "answer": "2"}]))
    assert plain.schema == "prompt,answer" and plain.problems[0].problem_id == "1"


def test_the_digest_is_of_problems_and_answers(tmp_path):
    first = read_problems(written(tmp_path, "a.jsonl", AIME_2024))
    same = read_problems(written(tmp_path, "b.jsonl", [row | {"Solution": "-"} for row in AIME_2024]))
    other = read_problems(written(tmp_path, "c.jsonl", [AIME_2024[0] | {"Answer": 34}, AIME_2024[1]]))
    assert first.digest == same.digest != other.digest
    rows = [{"prompt": "1+1", "answer": "2", "least": 0}, {"prompt": "1+1", "answer": "2", "least": 1}]
    with_columns = [read_problems(written(tmp_path, f"{n}.jsonl", [row])) for n, row in enumerate(rows)]
    assert with_columns[0].digest != with_columns[1].digest, "a custom verifier may read them"
    assert with_columns[1].problems[0].extra == {"least": 1}


def test_the_schema_follows_the_last_colon(tmp_path):
    assert split_schema("a.jsonl") == ("a.jsonl", None)
    assert split_schema("a:b.jsonl:aime") == ("a:b.jsonl", "aime")
    assert split_schema("a.jsonl:question,solution") == ("a.jsonl", "question,solution")
    named = written(tmp_path, "odd:aime", AIME_2024)
    assert split_schema(named) == (named, None)
    with pytest.raises(ValueError, match=r"a\.jsonl:amc: expected FILE, FILE:aime"):
        split_schema("a.jsonl:amc")


@pytest.mark.parametrize(
    "rows, schema, message",
    [
        ([AIME_2024[0], AIME_2024[1] | {"Answer": None}], "aime", "line 2: .*'Answer'"),
        ([{"Problem": "x"}], "aime", r"no column 'Answer' or 'answer'; the columns are Problem"),
    ],
)
def test_bad_rows_are_one_line_with_file_and_row(tmp_path, rows, schema, message):
    path = written(tmp_path, "bad.jsonl", rows)
    with pytest.raises(ValueError, match=message) as error:
        read_problems(path, schema)
    assert str(error.value).startswith(path) and "\n" not in str(error.value)
