"""A verifier with a hole, for docs/course/goes_wrong.md: it accepts any number that occurs in the worked solution.

    python examples/leaky_verifier.py runs/tiny           # writes prompts_leaky.jsonl, held_out_leaky.jsonl
    python -m megatron_scalerl train recipes/tiny_cpu.yaml overlay=recipes/course/reward_hacking.yaml
    python examples/leaky_verifier.py --rescore runs/tiny_cpu_reward_hacking

An intermediate result passes as the answer, so that the policy need not finish its work. `strict` is what was meant;
--rescore scores the stored completions of a run with both.
"""

import json
import sys
from pathlib import Path
from typing import Any

from megatron_scalerl.page.completions import Reader
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.recipe.file import read_run_recipe


def leaky(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """Whether the answer occurs in the solution."""
    return answer_text.strip() in extra["solution"]


def strict(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """Whether the answer is the reference."""
    return answer_text.strip() == reference


def solution(prompt: str) -> str:
    """The steps of a problem of the tiny task, which is read from left to right: `4;-4;+6=` gives `4-4=0;0+6=6`."""
    first, *operations = prompt.rstrip("=").split(";")
    value = int(first)
    steps = []
    for operation in operations:
        before = value
        operand = int(operation[1:])
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[operation[0]]
        steps.append(f"{before}{operation}={value}")
    return ";".join(steps)


def write(folder: Path) -> None:
    """Write the task's prompts with a column for the solution."""
    for name in ("prompts", "held_out"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        lines = (json.dumps(row | {"solution": solution(row["prompt"])}) + "\n" for row in rows)
        (folder / f"{name}_leaky.jsonl").write_text("".join(lines))


def rescore(run: Path, steps: int = 10) -> None:
    """Print the share of completions that either verifier accepts, over every `steps` optimizer steps."""
    index = GroupIndex(run)
    index.update()
    reader = Reader(run, read_run_recipe(run), index)
    for first in range(1, max(index.steps) + 1, steps):
        verdicts = []
        for step in range(first, first + steps):
            for row in index.of_step(step):
                group = reader.group(row["id"])
                problem = group["prompt"].split(">", 1)[1].split("<")[0]  # <bos>PROBLEM<think>
                extra = {"solution": solution(problem)}
                for completion in group["completions"]:
                    _, closing, answer = completion["text"].rpartition("</think>")
                    answer = answer.replace("<eos>", "") if closing else ""
                    accepted = bool(answer) and leaky(answer, "", extra)
                    verdicts.append((accepted, strict(answer, group["answer"], extra)))
        shares = [sum(accepted) / len(verdicts) for accepted in zip(*verdicts)]
        print(f"steps {first:3d} to {first + steps - 1:3d}: leaky {shares[0]:.3f}, strict {shares[1]:.3f}")


if __name__ == "__main__":
    if sys.argv[1] == "--rescore":
        rescore(Path(sys.argv[2]))
    else:
        write(Path(sys.argv[1]))
