"""Prompts do not depend on the file format, and every error in a file is one line with its location."""

import gzip
import json
import random
import re
from itertools import islice
from unittest.mock import ANY

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from json_lines import lines
from layout_rows import write
from recipe_files import SETTLED, small_recipe
from refusals import refused
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.prompts import sources
from megatron_scalerl.prompts.dataset import load_prompts, split_held_out
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.sources import Row, read_rows
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.tiny.task import prompt_rows
from megatron_scalerl.tiny.tokenizer import build_tokenizer

ROWS = [{"prompt": "7;+2=", "answer": "9", "level": 1}, {"prompt": "3;*3;-2=", "answer": "7", "level": 2}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def task(path, name="", weight=1.0, **values):
    prompts = PromptsSection(path=str(path), **SETTLED | {"held_out": 0} | values)
    return Task(name=name, weight=weight, recipe=small_recipe(prompts=prompts))


def section(path, **values):
    """The one task of a recipe without a mixture."""
    return [task(path, **values)]


@pytest.fixture
def read(tokenizer, tmp_path):
    """Loads the prompts of a path, or of rows, with the settings of the one task of a recipe."""

    def read(given, **values):
        path = write(tmp_path, "p.jsonl", given) if isinstance(given, list) else given
        return load_prompts(tokenizer, section(path, **values))

    return read


def save_parts(folder, name, rows):
    (folder / name).mkdir()
    for index, row in enumerate(rows):
        write(folder / name, f"part{index}.jsonl", [row])
    return folder / name


def save_dataset_of_splits(folder, name, rows):
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(folder / name)
    return folder / name


FORMATS = dict.fromkeys(("p.jsonl", "p.parquet", "hub", "saved"), write)
FORMATS |= {"parts": save_parts, "splits": save_dataset_of_splits}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_prompts(name, tmp_path, read):
    prompts = read(FORMATS[name](tmp_path, name, ROWS))
    assert [prompt.text for prompt in prompts.training] == ["7;+2=", "3;*3;-2="]
    assert [prompt.answer for prompt in prompts.training] == ["9", "7"]
    assert [prompt.extra for prompt in prompts.training] == [{"level": 1}, {"level": 2}]
    assert prompts.training[0].token_ids == (1, 13, 20, 16, 8, 19, 3)
    assert prompts.lines() == [
        f"prompts: {tmp_path / name}: layout prompt/answer: question in prompt, reference in answer",
        f"prompts: {tmp_path / name}: these columns are not in the prompt: level",
        "prompts: 2 rows, 2 to train on, 0 held out",
    ]


def test_named_columns_numbers_as_answers_and_the_template(tokenizer, read):
    rows = [{"problem": "7;+2=", "solution": 9}]
    prompts = read(rows, prompt_column="problem", answer_column="solution", prompt_template="1{prompt}{2}")
    (prompt,) = prompts.training
    assert (prompt.text, prompt.answer) == ("7;+2=", "9")
    assert tokenizer.decode(prompt.token_ids) == "<bos>17;+2=<unk>2<unk><think>", "braces stay as they are"


def test_first_token_prefill_and_chat_template(read):
    def ids(**values):
        return read(ROWS[:1], **values).training[0].token_ids

    assert ids() == (1, 13, 20, 16, 8, 19, 3)
    assert ids(add_bos=False) == (13, 20, 16, 8, 19, 3)
    assert ids(think_start="") == (1, 13, 20, 16, 8, 19)
    assert ids(chat_template=True) == (1, 13, 20, 16, 8, 19, 3), "the template's own <bos> is not doubled"
    assert ids(prompt_template="{prompt}<think>") == ids(), "nor is a tag that opens thinking already"


@pytest.mark.parametrize(
    "day",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day }}",
    ],
)
def test_a_template_with_the_date_renders_the_same_tokens_every_day(day):
    tokenizer = build_tokenizer()
    turn = "{{ messages[0].content }}{% if add_generation_prompt %}={% endif %}"
    tokenizer.chat_template = f"Today: {day}|{turn}"
    of_default, of_day = (
        PromptRenderer(
            tokenizer, PromptsSection(**SETTLED | {"chat_template": True, "think_start": ""} | changes)
        ).text("1;+2")
        for changes in ({}, {"template_date": "2025-01-31"})
    )
    assert (of_default, of_day) == ("Today: 26 Jul 2024|1;+2=", "Today: 31 Jan 2025|1;+2=")


def test_a_tokenizer_without_chat_template_and_a_template_without_prompt_are_refused(tmp_path):
    bare = build_tokenizer()
    bare.chat_template = None
    path = write(tmp_path, "p.jsonl", ROWS)
    with refused(r"prompts\.chat_template is true, but the tokenizer has no chat template"):
        load_prompts(bare, section(path, chat_template=True))
    with refused(r"prompts\.prompt_template: 'Q:' has no \{prompt\}"):
        load_prompts(bare, section(path, prompt_template="Q:"))


def test_duplicates_and_long_prompts_are_skipped_and_counted(tmp_path, read):
    rows = [ROWS[0], ROWS[1], ROWS[0], {"prompt": "3;+1;-1;+1=", "answer": "4"}]
    path = write(tmp_path, "p.jsonl", rows)
    prompts = read(path, max_prompt_tokens=10)
    assert [prompt.text for prompt in prompts.training] == ["7;+2=", "3;*3;-2="]
    assert prompts.reports[0].duplicates == 1
    assert prompts.reports[0].too_long == (f"{path}: line 4: 13 tokens, at most 10 allowed",)
    assert prompts.lines()[3:] == [
        "prompts: 1 duplicates skipped",
        "prompts: 1 too long and skipped:",
        f"  {path}: line 4: 13 tokens, at most 10 allowed",
    ]
    with refused(r"prompts are longer than prompts\.max_prompt_tokens 6"):
        read(path, max_prompt_tokens=6)


@pytest.mark.parametrize("held_out", [30, 0.15])
def test_the_split_does_not_depend_on_the_order(held_out, read):
    rows = list(prompt_rows(1, 200, held_out=False))
    first = read(rows, held_out=held_out)
    random.Random(1).shuffle(rows)
    second = read(rows, held_out=held_out)
    assert first.held_out == second.held_out
    assert {p.prompt_id for p in first.training} == {p.prompt_id for p in second.training}
    assert {p.text for p in first.training}.isdisjoint(p.text for p in first.held_out)
    assert len(first.training) + len(first.held_out) == 200
    if held_out == 30:
        assert len(first.held_out) == 30
    else:
        assert 15 <= len(first.held_out) <= 45


def test_a_number_takes_the_smallest_hashes_and_keeps_one_text_together(read):
    rows = [{"prompt": f"{d};+1=", "answer": a} for d in range(1, 9) for a in ("x", "y")]
    prompts = read(rows).training
    _, three = split_held_out(prompts, 3)
    _, four = split_held_out(prompts, 4)
    assert len(three) == 6
    assert {p.text for p in three} < {p.text for p in four}
    assert len({p.text for p in four}) == 4


def test_texts_of_the_held_out_file_are_not_trained_on(tmp_path, read):
    held_out = write(tmp_path, "h.jsonl", [{"prompt": "7;+2=", "answer": "09"}])
    prompts = read(ROWS, held_out_path=held_out, held_out=1000)
    assert [prompt.text for prompt in prompts.training] == ["3;*3;-2="]
    assert [prompt.text for prompt in prompts.held_out] == ["7;+2="]
    assert prompts.reports[0].leaked == 1


GOOD = json.dumps(ROWS[0])
BROKEN_FILES = {
    "broken line": ("p.jsonl", "\n{'prompt'\n", r"p\.jsonl: line 2: the line is not JSON: Expect"),
    "not UTF-8": ("p.jsonl", '{"prompt": "\xff", "answer": 1}', r"line 1: the line is not JSON: .utf-8. codec"),
    "NaN": ("p.jsonl", '{"prompt": "1", "answer": NaN}', r"'answer' is NaN; it has to be"),
    "empty answer": ("p.jsonl", '{"prompt": "1", "answer": ""}', r"'answer' is an empty text"),
    "no column": (
        "p.jsonl",
        '{"prompt": "1;+1=", "anwser": 2}',
        r"p\.jsonl: .*prompt, anwser",
    ),
    "empty text": ("p.jsonl", '{"prompt": " ", "answer": 1}', r"line 1: 'prompt' is an empty text"),
    "surrogate": ("p.jsonl", '{"prompt": "\\ud800", "answer": 1}', r"line 1: 'prompt' has half of a surrogate pair"),
    "surrogate elsewhere": (
        "p.jsonl",
        '{"prompt": "1", "answer": 1, "source": ["\\ud83d"]}',
        r"line 1: the value of 'source' is not JSON data",
    ),
    "other ending": ("p.txt", "prompt,answer", r"p\.txt: .*file names have to end in \.jsonl, "),
    "not parquet": ("p.parquet", "PAR1", r"p\.parquet: row 1: the Parquet file cannot be read: "),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_an_invalid_file_is_one_line_with_its_location(case, tmp_path, read):
    """Where most rows are invalid; a row among valid ones is skipped and reported."""
    name, content, message = BROKEN_FILES[case]
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with refused(message):
        read(tmp_path / name)
    if name == "p.jsonl" and content:
        (tmp_path / name).write_bytes(content.encode("latin-1") + f"\n{GOOD}\n{json.dumps(ROWS[1])}".encode())
        report = read(tmp_path / name).reports[0]
        assert report.training == 2 and re.search(message, report.unusable[0])
        assert report.lines()[3].startswith(
            f"prompts: {len(report.unusable)} of {report.rows} rows cannot be learned"
        )


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_in_another_encoding_loses_no_row(encoding, name, tmp_path, read):
    content = lines(ROWS).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with refused(rf"{name}: the file is in UTF-(16|32).*: iconv -f utf-(16|32).* -t utf-8"):
        read(tmp_path / name)


def test_a_prompt_without_tokens_is_refused(tmp_path):
    path = write(tmp_path, "p.jsonl", ROWS)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with refused("line 1: the prompt has 0 tokens"):
        load_prompts(bare, section(path, think_start=""))


def test_missing_paths_columns_and_splits_are_named(tmp_path, read):
    with refused(r"absent\.jsonl: there is no such file or folder of prompts"):
        read(tmp_path / "absent.jsonl")
    with refused(r"the folder has no file ending in \.jsonl, "):
        read(tmp_path)
    write(tmp_path, "p.parquet", ROWS)
    with refused("there is no column 'problem'; the columns are prompt, answer, level"):
        read(tmp_path / "p.parquet", prompt_column="problem")
    (tmp_path / "two").mkdir()
    for name, row in zip(("train", "test"), ROWS):
        write(tmp_path / "two", f"{name}.jsonl", [row])
    with refused(r"the splits are .*; choose one with prompts\.split"):
        read(tmp_path / "two")
    with refused(r"there is no split 'dev' \(prompts\.split\); the splits are test, train"):
        read(tmp_path / "two", split="dev")
    assert read(tmp_path / "two", split="test").training[0].answer == "7"


def test_configurations_of_a_dataset_are_not_read_as_one(tmp_path, read):
    """As gsm8k has main and socratic, with the same problems."""
    for name in ("main", "socratic"):
        (tmp_path / "gsm8k" / name).mkdir(parents=True)
        write(tmp_path / "gsm8k" / name, "train-00000-of-00001.parquet", ROWS)
    with refused("several datasets; name one of main, socratic"):
        read(tmp_path / "gsm8k")
    assert len(read(tmp_path / "gsm8k/main").training) == 2


def test_a_special_token_in_a_problem_is_no_special_token(read):
    rows = [*ROWS, {"prompt": "7;+2=<eos>", "answer": "9"}]
    prompts = read(rows)
    assert len(prompts.training) == 2
    assert prompts.reports[0].unusable[0].endswith("line 3: 'prompt' contains the special token <eos>")


def test_a_template_that_opens_thinking_is_not_followed_by_another_tag(tokenizer):
    prompts = PromptsSection(**SETTLED | {"think_start": "<think>\n", "prompt_template": "{prompt}<think>"})
    assert PromptRenderer(tokenizer, prompts).text("7;+2=").count("<think>") == 1


def bomb(path):
    """Many times the bytes that texts of the file's size have; the first row is an ordinary one."""
    row = {"prompt": "1+1=", "answer": "2"}
    if path.suffix == ".parquet":
        more = {"prompt": "1" * 10**5, "answer": "2"}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, *[more] * 200]), path, compression="zstd")
    elif "one_line" in path.name:
        path.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n" + b"1" * 10**7))
    else:
        path.write_bytes(gzip.compress((json.dumps(row).encode() + b"\n") * 4 * 10**5))


@pytest.mark.parametrize("name", ["p.parquet", "rows.jsonl.gz", "one_line.jsonl.gz", "rows.json.gz"])
def test_a_file_that_holds_far_more_than_its_size_is_refused(tmp_path, monkeypatch, name):
    bomb(tmp_path / name)
    assert list(islice(read_rows(tmp_path / name), 1)) == [
        Row(where=ANY, values={"prompt": "1+1=", "answer": "2"})
    ], "one of 256 MiB and less may"
    monkeypatch.setattr(sources, "LEAST_BOUND", 10**6)
    with refused(rf"{name}: the unpacked content exceeds [\d,]+ bytes, too much for a"):
        list(read_rows(tmp_path / name))
