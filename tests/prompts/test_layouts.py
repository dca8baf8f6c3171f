"""Every published layout loads as it is: right answers score right, wrong ones wrong, bad rows are counted."""

import base64
import gzip
import json
import pickle
import zlib
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from layout_rows import ASK, CODE, LIMITS, MATH, PROGRAMS, SYSTEM, USER, load, rows
from refusals import refused
from sampling import sampled

from megatron_scalerl.rewards.worker import load_verifier

LEFT_OPEN = (
    "1/2 + 1/4",
    "The answer is 1/2 + 1/4.",
    r"\boxed{\frac12+\frac14}",
    r"\boxed{3\cdot\frac14}",
    r"\boxed{\sqrt{9/16}}",
    "3/4 or 1/4",
    r"\boxed{\frac14=\frac34}",
    "It is 3/4. Wait, it is 1/4.",
    "Perhaps 3/4.",
    r"\boxed{3/4}, or maybe 1/4",
)
"""Answers to ASK that leave something to compute or to choose."""


@pytest.mark.parametrize("name", sampled("published layouts", [*MATH, *CODE], 12))
def test_a_published_layout_loads_and_scores(name, tokenizer, prompts_of):
    file, layout, *program = (MATH | CODE)[name]
    verifier = "code" if program else "math"
    loaded = prompts_of(rows(name), verifier, file)
    (prompt,) = loaded.training
    assert f"layout {layout}: " in loaded.lines()[0]
    assert len(loaded.reports[0].unusable) == 1
    verify = load_verifier(verifier, LIMITS)
    right, wrong = "So \\boxed{\\frac{3}{4}}.", "So \\boxed{\\frac{1}{4}}."
    if program:
        right, wrong = (f"```\n{text}\n```" for text in (PROGRAMS[program[0]], "print(7)"))
    assert verify(right, prompt.answer, dict(prompt.extra))
    assert not verify(wrong, prompt.answer, dict(prompt.extra))
    shown = tokenizer.decode(prompt.token_ids)
    assert shown.startswith("<system>Be brief.<user>" if "system" in name else "<user>")
    assert "role" not in shown and shown.endswith("<assistant><think>")
    if not program:
        assert ASK in shown
        columns = {**prompt.extra, "prompt": prompt.text}
        assert [text for text in LEFT_OPEN if verify(text, prompt.answer, columns)] == []
    elif program == ["ADD"]:
        assert "add(" in shown or "assert add" in prompt.answer, "the name of the function is told"


def test_other_forms_of_a_file_are_read(tokenizer, tmp_path):
    row = {"problem": ASK, "answer": "3/4"}
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps([row], indent=1).encode()))
    (tmp_path / "o.json").write_text(json.dumps(row, indent=1))
    stamp = pyarrow.array([1], pyarrow.timestamp("ns"))
    table = {"problem": [ASK], "answer": pyarrow.array([Decimal("0.75")]), "contest_date": stamp}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "d.parquet")
    for name in ("a.json.gz", "o.json", "d.parquet"):
        (prompt,) = load(tokenizer, str(tmp_path / name)).training
        assert prompt.answer in ("3/4", "0.75")
    (tmp_path / "k.json").write_text(json.dumps({"version": 1, "rows": [row]}, indent=1))
    with refused("no known layout fits the columns version, rows"):
        load(tokenizer, str(tmp_path / "k.json"))


def test_settings_name_columns_and_paths_into_them(prompts_of):
    row = {"q": {"text": ASK}, "answer": "2", "meta": {"truth": ["3/4"]}}
    loaded = prompts_of([row], prompt_column="q.text", answer_column="meta.truth")
    assert [(p.text, p.answer) for p in loaded.training] == [(ASK, "3/4")]
    with refused(r"several layouts fit, .*; set prompts\.preset to .*prompt/key"):
        prompts_of([{"prompt": ASK, "question": "1+1?", "key": "3/4"}], answer_column="key")
    tests = [{**rows("DeepCoder")[0], "starter_code": "def add(a, b):"}]
    code = prompts_of(tests, "code", answer_column="tests")
    assert code.training[0].text.endswith("def add(a, b):"), "the layout that has the column"
    only = prompts_of([row], prompt_column="q.text")
    assert only.training[0].answer == "2"


@pytest.mark.parametrize("wrong", ["Incorrect Answer 1", "distractor1"])
def test_choices_in_columns_of_their_own_are_said(wrong, prompts_of):
    row = {"Question": "Which is prime?", "Correct Answer": "7", wrong: "4"}
    with refused("write all choices into a column `choices`, and the letter of the right"):
        prompts_of([row])


def test_the_question_counts_more_than_a_conversation_with_it(prompts_of):
    talk = [{"role": "user", "content": f"{ASK} Be brief."}, {"role": "assistant", "content": "3/4"}]
    loaded = prompts_of([{"problem": ASK, "messages": talk, "answer": "3/4"}])
    assert loaded.training[0].text == ASK


def test_an_ambiguous_file_names_the_presets(prompts_of):
    rows = [{"prompt": ASK, "problem": "What is 1?", "answer": "3/4"}]
    with refused(r"set prompts\.preset to prompt/answer or problem/answer"):
        prompts_of(rows)
    assert prompts_of(rows, preset="problem/answer").training[0].text == "What is 1?"
    with refused(r"prompts\.preset: there is no layout gsm; the layouts are verl, orz"):
        prompts_of(rows, preset="gsm")
    assert len(prompts_of([{"prompt": ASK, "problem": ASK, "answer": "3/4"}]).training) == 1


def test_unit_tests_need_the_verifier_code_and_other_columns_a_setting(prompts_of):
    with refused(r"layout taco: .*: these rows are for the verifier code, but rewards.verifier is m"):
        prompts_of(rows("APPS")[:1])
    with refused(r"no known layout fits the columns q, a; .*docs/prompts\.md lists"):
        prompts_of([{"q": ASK, "a": "1"}])


def test_rows_of_another_task_do_not_refuse_a_mixed_file(prompts_of):
    math, code = rows("INTELLECT-2")
    mixed = [math, *[code] * 9]
    assert len(prompts_of(mixed).reports[0].unusable) == 9
    assert len(prompts_of(mixed, "code").training) == 1
    others = prompts_of([math, *[{**math, "verification_info": '{"words": 3}'}] * 9])
    assert len(others.reports[0].unusable) == 9
    with refused("no prompts found: all rows need another verifier"):
        prompts_of([code], preset="intellect")


def test_a_file_of_which_nothing_is_left_says_why(prompts_of):
    with refused("1 of 4 rows cannot be learned from, such as .* is text; give a number"):
        prompts_of([{"prompt": ASK, "answer": "see the figure"}] * 4)


def test_several_messages_need_a_chat_template(tokenizer, prompts_of):
    with refused(r"line 1: the row has several messages, which need prompts\.chat_template true"):
        prompts_of([{"prompt": SYSTEM, "answer": "3/4"}], chat_template=False)
    one = prompts_of([{"prompt": USER, "answer": "3/4"}], chat_template=False)
    assert tokenizer.decode(one.training[0].token_ids) == f"{ASK}<think>"


def test_a_damaged_file_is_one_line(tokenizer, tmp_path):
    for name, content in (("p.jsonl.gz", b"no gzip"), ("p.csv", b'a,b\n"1')):
        (tmp_path / name).write_bytes(content)
        with refused(rf"{name}: .*(damaged|not)"):
            load(tokenizer, str(tmp_path / name))
    (tmp_path / "r.csv").write_text(f"problem,answer\n{ASK},3/4\n{ASK},1,2\n")
    assert "line 3: the line has 3 values for 2" in load(tokenizer, str(tmp_path / "r.csv")).reports[0].unusable[0]


def test_packed_tests_are_read_and_not_run(prompts_of):
    class Evil:
        def __reduce__(self):
            return (exec, ("raise SystemExit('run')",))

    row = rows("LiveCodeBench")[0]
    row["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with refused("1 of 1 rows cannot be learned from"):
        prompts_of([row], "code")
