"""An environment for the tiny arithmetic task: a calculator that the policy may ask before it answers.

    python examples/calculator.py < runs/tiny_1/sft.jsonl > runs/tiny_1/calculator_sft.jsonl

writes warm-start examples in which half of the problems are answered with it (examples/calculator.sh).
"""

import json
import random
import re
import sys
from types import SimpleNamespace

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Calculator:
    """A response that ends with "=", such as `7+2-7-2=`, is computed from left to right; another is the answer."""

    def reset(self, row):
        """The problem as the row has it."""
        self.answer = row["answer"]
        return row["text"]

    def step(self, response):
        """The calculator's result, or the reward of an answer."""
        if not response.text.endswith("="):
            return [], response.text == self.answer, True
        if not re.fullmatch(r"\d([-+*]\d)*=", response.text):
            return "-", None, False  # nothing that can be computed
        first, *steps = re.findall(r"[-+*]?\d", response.text)
        value = int(first)
        for step in steps:
            value = OPERATIONS[step[0]](value, int(step[1]))
        return str(value), None, False


if __name__ == "__main__":
    draw = random.Random(1)
    for line in sys.stdin:
        question = json.loads(line)["prompt"]
        if draw.random() < 0.5:
            print(line, end="")
            continue
        call = question.replace(";", "")
        calculator = Calculator()
        calculator.reset({"text": question, "answer": ""})
        result, _, _ = calculator.step(SimpleNamespace(text=call))
        print(json.dumps({"prompt": question, "completion": f"</think>{call}<eos>"}))
        context = f"{question}<think></think>{call}<eos>{result}"
        print(json.dumps({"prompt": context, "completion": f"</think>{result}<eos>"}))
