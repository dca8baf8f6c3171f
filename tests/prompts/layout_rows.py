"""Files as they are published: a few rows in each layout, small, with references that are right and one bad row."""

import base64
import csv
import gzip
import json
import pickle
import zlib

import datasets
import pyarrow
import pyarrow.parquet
from recipe_files import SETTLED

from megatron_scalerl.controller.preflight import check_answers
from megatron_scalerl.prompts.dataset import load_prompts
from megatron_scalerl.recipe.sections import PromptsSection, RewardsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.limits import Limits

LIMITS = Limits(cpu_s=10, memory_mb=1024, file_mb=0)
ASK = "What is 1/2 + 1/4?"
USER = [{"role": "user", "content": ASK}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
PROGRAM = "Print the sum of two integers."
CASES = {"inputs": ["2 3\n"], "outputs": ["5\n"]}
CALLS = {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}
CASE_LIST = [{"input": "2 3\n", "output": "5\n", "testtype": "stdin"}]
ASSERTS = ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]


def packed(cases):
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def verl(truth, source="math_dapo", **more):
    rest = {"data_source": source, "ability": "MATH", "extra_info": {"index": 3}}
    return {"prompt": USER, "reward_model": {"ground_truth": truth, "style": "rule"}, **rest, **more}


def intellect(info):
    return {"problem_id": "1", "task_type": "verifiable_math", "prompt": ASK, "verification_info": json.dumps(info)}


def orz(value):
    return [{"from": "human", "value": ASK}, {"from": "assistant", "ground_truth": {"value": value}}]


ADDING = [{"role": "user", "content": "Write add(a, b)."}]
FUNCTIONAL = "def check(candidate):\n    assert candidate(2, 3) == 5\ncheck(add)"
STDIN = {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "2 3\n", "output": "5\n"}]}
MATH = {
    # name -> (file, layout, a good row, a row that cannot be learned from)
    "plain": ("p.jsonl", "prompt/answer", {"prompt": ASK, "answer": "3/4"}, {"prompt": ASK, "answer": ""}),
    "DAPO-Math-17k": ("p.parquet", "verl", verl("3/4"), verl("")),
    "Skywork-OR1": ("p.parquet", "verl", verl('["\\\\frac{3}{4}"]'), verl('["1", "2"]')),
    "slime": ("p.jsonl", "prompt/label", {"prompt": USER, "label": "3/4"}, {"prompt": USER, "label": None}),
    "TRL": (
        "saved",
        "prompt/solution",
        {"prompt": USER, "solution": "$\\frac{3}{4}$"},
        {"prompt": [], "solution": ""},
    ),
    "TRL with a system": ("p.jsonl", "prompt/answer", {"prompt": SYSTEM, "answer": "3/4"}, {"prompt": SYSTEM}),
    "OpenRLHF": ("p.jsonl", "input/label", {"input": ASK, "label": "0.75"}, {"input": "", "label": "1"}),
    "OpenRLHF messages": (
        "p.jsonl",
        "context_messages/answer",
        {"context_messages": USER, "answer": "3/4"},
        {"context_messages": [{"role": "assistant", "content": "3/4"}], "answer": "3/4"},
    ),
    "OpenRLHF message": (
        "p.jsonl",
        "message/answer",
        {"message": USER, "answer": "3/4"},
        {"message": [], "answer": "3/4"},
    ),
    "MetaMathQA": (
        "p.json",
        "query/response",
        {"query": ASK, "response": "Half.\n#### 0.75\nThe answer is: 0.75", "original_question": "What?"},
        {"query": ASK, "response": "Half.\n#### a half\nThe answer is: a half", "original_question": "What?"},
    ),
    "MegaScience": (
        "p.parquet",
        "question/reference_answer",
        {"question": ASK, "answer": "It is \\boxed{1}, no.", "reference_answer": "3/4", "subject": "math"},
        {"question": ASK, "answer": "It is \\boxed{1}.", "reference_answer": "", "subject": "math"},
    ),
    "Nemotron-Post-Training": (
        "p.jsonl",
        "messages/metadata.expected_answer",
        {"messages": [*USER, {"role": "assistant", "content": "2/4"}], "metadata": '{"expected_answer": "3/4"}'},
        {"messages": [{"role": "assistant", "content": "2/4"}], "metadata": '{"expected_answer": "3/4"}'},
    ),
    "Llama-Nemotron": (
        "p.jsonl",
        "input/output",
        {"input": USER, "output": "<think>\nHm.\n</think>\nIt is \\boxed{3/4}.", "category": "math"},
        {"input": USER, "output": "It is so.", "category": "math"},
    ),
    "DeepScaleR": (
        "p.json",
        "problem/answer",
        {"problem": ASK, "answer": "\\frac{3}{4}", "solution": "See."},
        {"problem": ASK, "answer": "see the figure below", "solution": "See."},
    ),
    "ORZ": ("p.json", "orz", orz("3/4"), orz("none of these")),
    "NuminaMath-1.5": (
        "p.parquet",
        "problem/answer",
        {"problem": ASK, "solution": "It is $\\boxed{1}$.", "answer": "3/4", "question_type": "math-word-problem"},
        {"problem": ASK, "solution": "Proof.", "answer": "proof", "question_type": "proof"},
    ),
    "NuminaMath-CoT": (
        "hub",
        "problem/solution",
        {"problem": ASK, "solution": "As $a=1$, it is $\\boxed{\\frac{3}{4}}$."},
        {"problem": ASK, "solution": "It follows that it holds."},
    ),
    "OpenR1-Math": (
        "p.parquet",
        "problem/answer",
        {"problem": ASK, "answer": "3/4", "messages": [*USER, {"role": "assistant", "content": "3/4"}]},
        {"problem": "", "answer": "3/4", "messages": [*USER, {"role": "assistant", "content": "3/4"}]},
    ),
    "Polaris": (
        "shards",
        "problem/answer",
        {"problem": ASK, "answer": "3/4", "difficulty": "3/8"},
        {"problem": ASK, "answer": None, "difficulty": "3/8"},
    ),
    "Big-Math": (
        "p.parquet",
        "problem/answer",
        {"problem": ASK, "answer": "3/4", "domain": ["Algebra"], "llama8b_solve_rate": 0.5},
        {"problem": ASK, "answer": "true or false", "domain": ["Algebra"], "llama8b_solve_rate": 0.5},
    ),
    "DeepMath": (
        "p.parquet",
        "question/final_answer",
        {"question": ASK, "final_answer": "3/4", "r1_solution_1": "long"},
        {"question": ASK, "final_answer": "", "r1_solution_1": "long"},
    ),
    "GSM8K": (
        "p.jsonl",
        "question/answer",
        {"question": ASK, "answer": "Half is <<1/2=0.5>>0.5 and so on.\n#### 0.75"},
        {"question": ASK, "answer": "It has no final line."},
    ),
    "MATH": (
        "p.jsonl.gz",
        "problem/solution",
        {"problem": ASK, "level": "Level 1", "solution": "First 1, then \\boxed{\\frac34}."},
        {"problem": ASK, "level": "Level 1", "solution": "No box at all."},
    ),
    "AIME": (
        "p.csv",
        "Problem/Answer",
        {"ID": "I-1", "Problem": ASK, "Answer": "0.75"},
        {"ID": "I-2", "Problem": ASK},
    ),
    "INTELLECT-2": (
        "p.parquet",
        "intellect",
        intellect({"ground_truth": "3/4"}),
        intellect(STDIN),
    ),
    "data array": ("data.json", "problem/answer", {"problem": ASK, "answer": 0.75}, {"problem": ASK, "answer": True}),
    "OpenMathReasoning": (
        "shards",
        "problem/expected_answer",
        {"problem": ASK, "expected_answer": "3/4"},
        {"problem": ASK, "expected_answer": None},
    ),
    "natural_reasoning": (
        "p.jsonl",
        "question/reference_answer",
        {"question": ASK, "reference_answer": "3/4", "responses": []},
        {"question": ASK, "reference_answer": "", "responses": []},
    ),
    "Alpaca": (
        "p.jsonl",
        "instruction/output",
        {"instruction": "Add.", "input": ASK, "output": "It is \\boxed{3/4}."},
        {"instruction": "Add.", "input": ASK, "output": "It has no box."},
    ),
    "Alpaca with answers": (
        "p.jsonl",
        "instruction/answer",
        {"instruction": "Add.", "input": ASK, "answer": "3/4"},
        {"instruction": "", "input": ASK, "answer": "3/4"},
    ),
    "SYNTHETIC-1": (
        "p.parquet",
        "intellect",
        {"prompt": ASK, "verification_info": str({"ground_truth": "3/4"})},
        {"prompt": ASK, "verification_info": str({"word_count": 3})},
    ),
    "RLVR-MATH": (
        "p.parquet",
        "messages/ground_truth",
        {"messages": USER, "ground_truth": "3/4", "dataset": "MATH"},
        {"messages": USER, "ground_truth": "", "dataset": "MATH"},
    ),
}
SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
CODE = {
    # name -> (file, layout, a good row, a bad one, a right program)
    "Skywork-OR1 code": ("p.parquet", "verl", verl(json.dumps(CASES)), verl("[]"), SUM),
    "verl asserts": (
        "p.parquet",
        "verl",
        verl(json.dumps(ASSERTS), prompt=ADDING),
        verl(json.dumps(ASSERTS)),
        ADD,
    ),
    "GURU": (
        "p.parquet",
        "verl",
        verl(json.dumps({"functional": FUNCTIONAL}), prompt=ADDING),
        verl(json.dumps({"functional": FUNCTIONAL})),
        ADD,
    ),
    "INTELLECT-2 in C++": (
        "p.parquet",
        "intellect_code",
        intellect(STDIN),
        intellect({**STDIN, "language": "cpp"}),
        SUM,
    ),
    "verifiable-coding-problems": (
        "p.parquet",
        "open_r1_code",
        {"problem_statement": PROGRAM, "verification_info": STDIN},
        {"problem_statement": PROGRAM, "verification_info": {**STDIN, "test_cases": []}},
        SUM,
    ),
    "CodeContests": (
        "p.parquet",
        "codecontests",
        {
            "description": PROGRAM,
            "public_tests": {"input": ["2 3\n"], "output": ["5\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["0 1\n"], "output": ["1\n"]},
        },
        {"description": PROGRAM, "public_tests": None, "private_tests": None, "generated_tests": None},
        SUM,
    ),
    "AceCode": (
        "p.parquet",
        "acecode",
        {"question": "Write add(a, b).", "test_cases": ASSERTS},
        {"question": "Sum two numbers.", "test_cases": ASSERTS},
        ADD,
    ),
    "OpenThoughts": (
        "p.parquet",
        "openthoughts",
        {"problem": PROGRAM, "starter_code": None, "test_cases": json.dumps(CASES)},
        {"problem": PROGRAM, "starter_code": None, "test_cases": None},
        SUM,
    ),
    "INTELLECT-2 code": ("p.parquet", "intellect_code", intellect(STDIN), intellect({"ground_truth": "3"}), SUM),
    "DeepCoder": (
        "p.parquet",
        "deepcoder",
        {"problem": PROGRAM, "tests": json.dumps(CASE_LIST), "solutions": ["pass"]},
        {"problem": PROGRAM, "tests": "[]", "solutions": ["pass"]},
        SUM,
    ),
    "LiveCodeBench": (
        "p.jsonl",
        "livecodebench",
        {
            "question_content": PROGRAM,
            "starter_code": "class Solution:\n    def add(self, a, b):",
            "public_test_cases": json.dumps([{"input": "2\n3", "output": "5", "testtype": "functional"}]),
            "private_test_cases": packed([{"input": "0\n1", "output": "1", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "add"}),
        },
        {"question_content": PROGRAM, "starter_code": "", "public_test_cases": "[]", "private_test_cases": ""},
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ),
    "TACO": (
        "p.parquet",
        "taco",
        {"question": PROGRAM, "solutions": "[]", "starter_code": "", "input_output": json.dumps(CASES)},
        {"question": PROGRAM, "solutions": "[]", "starter_code": "", "input_output": ""},
        SUM,
    ),
    "APPS": (
        "p.jsonl",
        "taco",
        {"question": "Add.", "input_output": json.dumps(CALLS), "starter_code": "def add(a, b):"},
        {"question": "Its name is not told.", "input_output": json.dumps(CALLS), "starter_code": ""},
        ADD,
    ),
    "HumanEval": (
        "p.jsonl",
        "humaneval",
        {
            "prompt": "def add(a, b):\n",
            "entry_point": "add",
            "canonical_solution": "    return a + b",
            "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
        },
        {"prompt": "def add(a, b):\n", "entry_point": "add", "test": "def check(candidate):\n    pass\n"},
        ADD,
    ),
    "MBPP": (
        "p.parquet",
        "mbpp",
        {"text": "Add two numbers.", "code": "pass", "test_list": ASSERTS, "test_setup_code": "import math"},
        {"text": "Add two numbers.", "code": "pass", "test_list": [], "test_setup_code": ""},
        ADD,
    ),
    "MBPP sanitized": (
        "p.json",
        "mbpp_sanitized",
        {"prompt": "Add two numbers.", "code": "pass", "test_list": ASSERTS, "test_imports": []},
        {"prompt": "Add two numbers.", "code": "pass", "test_list": ["pass"], "test_imports": []},
        ADD,
    ),
    "MBPP+": (
        "p.parquet",
        "mbpp_sanitized",
        {
            "prompt": "Add two numbers.",
            "test_imports": [],
            "test_list": ASSERTS,
            "test": "import numpy as np\nassert add(2, 3) == 5",
        },
        {"prompt": "Add two numbers.", "test_imports": [], "test_list": [], "test": "import numpy as np"},
        ADD,
    ),
    "KodCode": (
        "p.parquet",
        "kodcode",
        {
            "question": "Add two numbers.",
            "solution": ADD,
            "test": "from solution import add\n\ndef test_add():\n    assert add(2, 3) == 5\n",
            "test_info": [{"function_name": "add", "function_declaration": "def add(a, b):"}],
        },
        {"question": "Add two numbers.", "solution": ADD, "test": "import numpy\nassert add(2, 3) == 5"},
        ADD,
    ),
}


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
    task = Task(name="", weight=1.0, prompts=prompts, rewards=RewardsSection(verifier=verifier))
    return load_prompts(tokenizer, [task], check_answers)
