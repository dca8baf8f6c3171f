"""Writes rows of sums of two numbers, drawn by reasoning-gym: to train on, held out, and of longer numbers.

    python examples/sums.py DIR

The training rows have no pair of numbers that is held out, in either order; numbers have one or two digits, and in
`longer.jsonl` at least one of both has three.
"""

import json
import sys
from pathlib import Path

import reasoning_gym


def sums(draws, seed, digits=(1, 2)):
    """Distinct rows, in the order in which they are drawn, with their numbers sorted as text."""
    drawn = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=draws,
        seed=seed,
        min_terms=2,
        max_terms=2,
        min_digits=digits[0],
        max_digits=digits[1],
        operators=["+"],
        allow_parentheses=False,
        allow_negation=False,
    )
    questions = {}
    for row in drawn:
        added = tuple(sorted(word.strip(".") for word in row["question"].split() if word[0].isdigit()))
        questions[row["question"]] = added, {"prompt": row["question"], "answer": row["answer"]}
    return list(questions.values())


def main(folder):
    held_out = sums(200, seed=99)[:120]
    added = {numbers for numbers, _ in held_out}
    files = {
        "prompts": [row for numbers, row in sums(60000, seed=1) if numbers not in added],
        "held_out": [row for _, row in held_out],
        "longer": [row for numbers, row in sums(120, seed=98, digits=(3, 3)) if max(map(len, numbers)) > 2],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / name}.jsonl: {len(rows):,} rows, as: {rows[0]['prompt']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
