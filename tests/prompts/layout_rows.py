"""Files as they are published: a few rows in each layout, small, with references that are right and one bad row."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import yaml
from json_lines import lines
from recipe_files import SETTLED, small_recipe

from megatron_scalerl.controller.preflight import check_answers
from megatron_scalerl.prompts.dataset import load_prompts
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.limits import Limits

ROWS = Path(__file__).parents[1] / "data/rows"
LIMITS = Limits(cpu_s=10, memory_mb=1024, file_mb=0)
ASK = "What is 1/2 + 1/4?"
USER = [{"role": "user", "content": ASK}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
PROGRAM = "Print the sum of two integers."
CASES = {"inputs": ["2 3\n"], "outputs": ["5\n"]}
ASSERTS = ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]
SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
PROGRAMS = {"SUM": SUM, "ADD": ADD, "METHOD": METHOD}
LAYOUTS = yaml.safe_load((ROWS / "layouts.yaml").read_text())
MATH, CODE = LAYOUTS["math"], LAYOUTS["code"]
"""Name of a file in ROWS -> (kind of file, layout), and of programs the name of a right one."""


def rows(name):
    """The rows of a published set."""
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]


def write(folder, file, rows):
    """The path of a prompts file or folder with these rows, in the kind that its name says."""
    path = folder / file
    text = lines(rows)
    if file in ("hub", "shards"):
        path.mkdir()
        kind = {"hub": "parquet", "shards": "jsonl"}[file]
        for number, row in enumerate(rows):
            write(path, f"train-{number:05}-of-{len(rows):05}.{kind}", [row])
    elif file == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
    elif file.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif file.endswith(".csv"):
        with path.open("w", newline="", encoding="utf-8-sig") as target:
            writer = csv.DictWriter(target, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif file.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif file.endswith(".json"):
        path.write_text(json.dumps({"data": rows} if file == "data.json" else rows, indent=1))
    else:
        path.write_text(text)
    return str(path)


def load(tokenizer, path, verifier="math", **settings):
    """The prompts of a file."""
    prompts = PromptsSection(path=path, **SETTLED | {"held_out": 0, "chat_template": True} | settings)
    task = Task(name="", weight=1.0, recipe=small_recipe(prompts=prompts, rewards={"verifier": verifier}))
    return load_prompts(tokenizer, [task], check_answers)
