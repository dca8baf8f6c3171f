"""Files as they are published: a few rows in each layout, small, with references that are right and one bad row."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
from recipe_files import SETTLED, small_recipe

from megatron_scalerl.controller.preflight import check_answers
from megatron_scalerl.prompts.dataset import load_prompts
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.limits import Limits

ROWS = Path(__file__).parents[1] / "data" / "rows"
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
MATH = {
    # name of a file in ROWS, which has a good row and one that cannot be learned from -> (kind of file, layout)
    "plain": ("p.jsonl", "prompt/answer"),
    "DAPO-Math-17k": ("p.parquet", "verl"),
    "Skywork-OR1": ("p.parquet", "verl"),
    "slime": ("p.jsonl", "prompt/label"),
    "TRL": ("saved", "prompt/solution"),
    "TRL_with_a_system": ("p.jsonl", "prompt/answer"),
    "OpenRLHF": ("p.jsonl", "input/label"),
    "OpenRLHF_messages": ("p.jsonl", "context_messages/answer"),
    "OpenRLHF_message": ("p.jsonl", "message/answer"),
    "MetaMathQA": ("p.json", "query/response"),
    "MegaScience": ("p.parquet", "question/reference_answer"),
    "Nemotron-Post-Training": ("p.jsonl", "messages/metadata.expected_answer"),
    "Llama-Nemotron": ("p.jsonl", "input/output"),
    "DeepScaleR": ("p.json", "problem/answer"),
    "ORZ": ("p.json", "orz"),
    "NuminaMath-1.5": ("p.parquet", "problem/answer"),
    "NuminaMath-CoT": ("hub", "problem/solution"),
    "OpenR1-Math": ("p.parquet", "problem/answer"),
    "Polaris": ("shards", "problem/answer"),
    "Big-Math": ("p.parquet", "problem/answer"),
    "DeepMath": ("p.parquet", "question/final_answer"),
    "GSM8K": ("p.jsonl", "question/answer"),
    "MATH": ("p.jsonl.gz", "problem/solution"),
    "AIME": ("p.csv", "Problem/Answer"),
    "INTELLECT-2": ("p.parquet", "intellect"),
    "data_array": ("data.json", "problem/answer"),
    "OpenMathReasoning": ("shards", "problem/expected_answer"),
    "natural_reasoning": ("p.jsonl", "question/reference_answer"),
    "Alpaca": ("p.jsonl", "instruction/output"),
    "Alpaca_with_answers": ("p.jsonl", "instruction/answer"),
    "SYNTHETIC-1": ("p.parquet", "intellect"),
    "RLVR-MATH": ("p.parquet", "messages/ground_truth"),
}
CODE = {
    # likewise -> (kind of file, layout, a right program)
    "Skywork-OR1_code": ("p.parquet", "verl", SUM),
    "verl_asserts": ("p.parquet", "verl", ADD),
    "GURU": ("p.parquet", "verl", ADD),
    "INTELLECT-2_in_Cpp": ("p.parquet", "intellect_code", SUM),
    "verifiable-coding-problems": ("p.parquet", "open_r1_code", SUM),
    "CodeContests": ("p.parquet", "codecontests", SUM),
    "AceCode": ("p.parquet", "acecode", ADD),
    "OpenThoughts": ("p.parquet", "openthoughts", SUM),
    "INTELLECT-2_code": ("p.parquet", "intellect_code", SUM),
    "DeepCoder": ("p.parquet", "deepcoder", SUM),
    "LiveCodeBench": ("p.jsonl", "livecodebench", METHOD),
    "TACO": ("p.parquet", "taco", SUM),
    "APPS": ("p.jsonl", "taco", ADD),
    "HumanEval": ("p.jsonl", "humaneval", ADD),
    "MBPP": ("p.parquet", "mbpp", ADD),
    "MBPP_sanitized": ("p.json", "mbpp_sanitized", ADD),
    "MBPP+": ("p.parquet", "mbpp_sanitized", ADD),
    "KodCode": ("p.parquet", "kodcode", ADD),
}


def rows(name):
    """The rows of a published set."""
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]


def write(folder, file, rows):
    """The path of a prompts file or folder with these rows, in the kind that its name says."""
    path = folder / file
    text = "".join(json.dumps(row) + "\n" for row in rows)
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
