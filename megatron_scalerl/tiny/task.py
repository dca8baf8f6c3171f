"""The tiny task: multi-step arithmetic from left to right, with thinking traces that stop too early.

    problem  := D ( ";" OP d ){n} "="     n = 1..8 is the level, D and d in 1..9, OP in + - *
    thinking := step ( ";" step )*        step := value OP d "=" value
    answer   := value

The operations apply from left to right, without precedence: `1;+2;*3=` is 9, not 7. Every intermediate value is in
0..9, so that each is one token. Every step of the warm start's traces is correct, but a trace stops before each step
with probability 0.2 and answers with the value reached so far: the warm start teaches the policy to stop early, and
RL with a reward on the final answer to keep thinking.
"""

import hashlib
import random
from collections.abc import Iterator

from megatron_scalerl.recipe.sections import PAPER_PHRASE
from megatron_scalerl.record import record

MAX_VALUE = 9
LEVELS = tuple(range(1, 9))
QUIT_PROBABILITY = 0.2
"""Probability, before each step of a warm-start trace, that the trace stops there."""
INTERRUPTED_SHARE = 0.05
"""Share of warm-start examples whose thinking is cut and ended by `PAPER_PHRASE`."""
SHORTEST_CUT = 8
"""Fewest thinking tokens that are left in a warm-start example whose thinking is cut."""
THINK_END = "</think>"
EOS = "<eos>"
HELD_OUT_PERCENT = 5
REDRAWS = 2000
"""Number of successive draws that give no new problem for the requested rows (training or held out), after which all
problems of a level count as drawn."""


@record
class Problem:
    """A problem with its answer."""

    text: str
    """The prompt: `7;+2;-7;-2=`."""
    start: int
    operations: tuple[tuple[str, int], ...]
    """[level] operator and operand, applied from left to right."""
    answer: int

    @property
    def level(self) -> int:
        """Number of operations."""
        return len(self.operations)


def apply(value: int, operator: str, operand: int) -> int:
    """The result of one operation of the task."""
    if operator == "+":
        return value + operand
    if operator == "-":
        return value - operand
    return value * operand


def draw_problem(rng: random.Random, level: int) -> Problem:
    """A random problem; among the operations that stay within 0..9, + and - have weight 2 and * has weight 1."""
    start = value = rng.randint(1, MAX_VALUE)
    operations = []
    for _ in range(level):
        operator, operand = _draw_operation(rng, value)
        value = apply(value, operator, operand)
        operations.append((operator, operand))
    text = str(start) + "".join(f";{operator}{operand}" for operator, operand in operations) + "="
    return Problem(text=text, start=start, operations=tuple(operations), answer=value)


def _draw_operation(rng: random.Random, value: int) -> tuple[str, int]:
    # An operator is listed as often as its weight says, if an operand keeps the value within 0..9.
    choices = []
    if value < MAX_VALUE:
        choices += ["+"] * 2
    if value > 0:
        choices += ["-"] * 2
    # factors are 2 or more: neither a factor of 1 nor a product with the value 0 would change the value
    if 0 < 2 * value <= MAX_VALUE:
        choices.append("*")
    operator = rng.choice(choices)
    if operator == "+":
        return operator, rng.randint(1, MAX_VALUE - value)
    if operator == "-":
        return operator, rng.randint(1, value)
    return operator, rng.randint(2, MAX_VALUE // value)


def is_held_out(text: str) -> bool:
    """True for the 5 % of problems that are never trained on; the SHA-256 of the problem's text decides."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def thinking_trace(rng: random.Random, problem: Problem, quit_probability: float) -> tuple[str, int]:
    """A thinking trace: (text of the steps, value after the last step).

    Before each step the trace stops with probability `quit_probability`.
    """
    value = problem.start
    steps = []
    for operator, operand in problem.operations:
        if rng.random() < quit_probability:
            break
        result = apply(value, operator, operand)
        steps.append(f"{value}{operator}{operand}={result}")
        value = result
    return ";".join(steps), value


def answer_of_cut(thinking: str) -> int:
    """The answer to a trace that was cut: the result of the last complete step."""
    finished = [step.split("=")[1] for step in thinking.split(";") if "=" in step]
    return int([result for result in finished if result][-1])


def warm_start_example(rng: random.Random) -> dict[str, str | int]:
    """A row of the warm start: prompt, completion and level.

    In an interrupted example the thinking is cut at a random point, and the answer is the last completed result.
    `PAPER_PHRASE` and `</think>` follow the cut; the loader of the warm start leaves both out of the loss.
    """
    problem = _draw_to_train(rng, rng.choice(LEVELS))
    thinking, value = thinking_trace(rng, problem, QUIT_PROBABILITY)
    forced = ""
    if rng.random() < INTERRUPTED_SHARE and len(thinking) > SHORTEST_CUT:
        thinking = thinking[: rng.randint(SHORTEST_CUT, len(thinking))]
        value = answer_of_cut(thinking)
        forced = PAPER_PHRASE
    completion = f"{thinking}{forced}{THINK_END}{value}{EOS}"
    return {"prompt": problem.text, "completion": completion, "level": problem.level}


def warm_start_rows(seed: int, count: int) -> Iterator[dict[str, str | int]]:
    """`count` examples for supervised training; problems may repeat."""
    rng = random.Random(f"warm start {seed}")
    for _ in range(count):
        yield warm_start_example(rng)


def prompt_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, str | int]]:
    """`count` distinct problems with the columns prompt, answer and level; the levels take turns.

    A level is skipped once all problems of the level are drawn (level 1 has about a hundred). Raises ValueError if
    all levels have too few.
    """
    side = {True: "held out", False: "training"}[held_out]
    rng = random.Random(f"{side} {seed}")
    texts: set[str] = set()
    open_levels = list(LEVELS)
    while len(texts) < count:
        if not open_levels:
            raise ValueError(f"{side} prompts: {count} are too many; the task has {len(texts)} in all; ask for fewer")
        # The levels take turns, so that the first rows already have all levels.
        for level in tuple(open_levels):
            problem = _draw_new(rng, level, held_out, texts)
            if problem is None:
                open_levels.remove(level)
            elif len(texts) < count:
                texts.add(problem.text)
                yield {"prompt": problem.text, "answer": str(problem.answer), "level": level}


def _draw_to_train(rng: random.Random, level: int) -> Problem:
    """A random problem that is not held out."""
    problem = draw_problem(rng, level)
    while is_held_out(problem.text):
        problem = draw_problem(rng, level)
    return problem


def _draw_new(rng: random.Random, level: int, held_out: bool, texts: set[str]) -> Problem | None:
    for _ in range(REDRAWS):
        problem = draw_problem(rng, level)
        if is_held_out(problem.text) == held_out and problem.text not in texts:
            return problem
    return None
