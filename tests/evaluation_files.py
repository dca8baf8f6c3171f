"""Evaluation files with the columns of AIME and MATH-500 on the hub; the problems are made up."""

import json
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.evaluation.results import COMPLETIONS, Header, Row

AIME_2024 = [  # Maxwell-Jia/AIME_2024
    {"ID": "2024-I-1", "Problem": "Find $a+b$ if $a=3$ and $b=30$.", "Solution": "Add them.", "Answer": 33},
    {"ID": "2024-II-4", "Problem": "Find the remainder of $7^{4}$ modulo $10$.", "Solution": "It is 1.", "Answer": 1},
]
AIME_H4 = [  # HuggingFaceH4/aime_2024
    {
        "id": 60,
        "problem": "How many positive integers below $1000$ are multiples of $13$?",
        "solution": "There are \\boxed{076}.",
        "answer": "076",
        "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1",
        "year": "2024",
    },
]
AIME_25 = [{"problem": "Find $2+2$.", "answer": "4", "id": "0"}]  # math-ai/aime25
AIME_25_OC = [{"question": "Find $2+2$.", "answer": "4"}]  # opencompass/AIME2025
AIME_25_MA = [{"problem_idx": 1, "problem": "Find $2+2$.", "answer": 4, "problem_type": ["Algebra"]}]  # MathArena
MATH_500 = [  # HuggingFaceH4/MATH-500
    {
        "problem": "Convert the point $(0,2)$ to polar coordinates.",
        "solution": "The radius is 2 ...",
        "answer": "\\left( 2, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/1.json",
    },
    {
        "problem": "Compute $\\dbinom{5}{2}$.",
        "solution": "It is \\boxed{10}.",
        "answer": "10",
        "subject": "Counting & Probability",
        "level": 1,
        "unique_id": "test/counting_and_probability/2.json",
    },
]


def written(folder, name, rows):
    """The path of a JSONL file with these rows."""
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_result(folder):
    """(header, rows) of a result."""
    header, *rows = read_jsonl(Path(folder) / COMPLETIONS)
    return msgspec.convert(header["header"], Header), [msgspec.convert(row, Row) for row in rows]
