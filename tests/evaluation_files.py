"""Evaluation files with the columns of AIME and MATH-500 on the hub; the problems are made up."""

from pathlib import Path

import msgspec
from json_lines import write

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.evaluation.results import COMPLETIONS, Header, Row

DATA = Path(__file__).parent / "data/evaluation"


def published(name):
    """Made-up rows in the columns of a set on the hub."""
    return read_jsonl(DATA / f"{name}.jsonl")


AIME_2024, MATH_500 = published("Maxwell-Jia_AIME_2024"), published("HuggingFaceH4_MATH-500")


def written(folder, name, rows):
    """The path of a JSONL file with these rows."""
    return write(folder / name, rows)


def read_result(folder):
    """(header, rows) of a result."""
    header, *rows = read_jsonl(Path(folder) / COMPLETIONS)
    return msgspec.convert(header["header"], Header), [msgspec.convert(row, Row) for row in rows]
