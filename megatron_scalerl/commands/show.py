"""`megatron-scalerl show RUN`: one completion of a run with marks at forced tokens and policy versions."""

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron_scalerl.processes.logs import printable
from megatron_scalerl.rollouts.group_files import ListedGroup, listed_groups, spans
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.run_text import decode, load_tokenizer

EPILOG = """examples:
  megatron-scalerl show runs/my_run                        a completion of the newest group
  megatron-scalerl show runs/my_run --step 12              of the first group that was trained in step 12
  megatron-scalerl show runs/my_run --group 40 --index 3   the fourth completion of group 40
  megatron-scalerl show runs/my_run --interrupted          the newest with interrupted thinking
  megatron-scalerl show runs/my_run --unconfirmed          the newest that the second judge does not confirm

In the text, ⟦forced⟧ tokens were not sampled and carry no loss; ‹v7› marks where policy version 7 takes over. An
episode's environment wrote what is in ⟪ ⟫."""
_MARKS = {"": ("", "", ""), "forced": ("⟦", "⟧", "bold yellow"), "environment": ("\n⟪", "⟫\n", "green")}
"""Origin of tokens -> (mark before the tokens, mark after the tokens, style)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Print one completion of a run with its forced tokens and policy versions marked."
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--group", type=int, metavar="ID", help="number of the group (default: the newest)")
    parser.add_argument(
        "--index", type=int, metavar="I", help="number of the completion in the group, from 0 (default: the first)"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--interrupted", action="store_true", help="only completions with interrupted thinking")
    only.add_argument(
        "--unconfirmed", action="store_true", help="only correct completions that the judge validation.audit denies"
    )
    parser.add_argument("--step", type=int, metavar="N", help="optimizer step that trained the group")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print a completion. Raises ValueError if no completion of the run matches."""
    only = ""
    if arguments.interrupted or arguments.unconfirmed:
        only = "interrupted" if arguments.interrupted else "unconfirmed"
    group = find_group(arguments.run_dir, arguments.group, arguments.step, only=only)
    index = choose(group, arguments.index, only=only)
    show(console, group, index, load_tokenizer(arguments.run_dir))
    return 0


def choose(group: dict[str, Any], index: int | None, *, only: str = "") -> int:
    """`index`, the number of the requested completion; if `index` is None, the number of the group's first completion
    of the kind `only`: "interrupted", "unconfirmed", or "" for any kind.

    Raises ValueError for an index beyond the group.
    """
    rollouts = group["rollouts"]
    if index is None:
        kinds = {
            "": [True] * len(rollouts),
            "interrupted": [rollout["interrupted"] for rollout in rollouts],
            "unconfirmed": [score.get("confirmed") is False for score in group["scores"]],
        }
        return kinds[only].index(True)
    if not 0 <= index < len(rollouts):
        raise ValueError(f"--index: the group has no completion {index}; take one from 0 to {len(rollouts) - 1}")
    return index


def find_group(run_dir: Path, group_id: int | None, step: int | None, *, only: str = "") -> dict[str, Any]:
    """The finished group `group_id`, or the first group that optimizer step `step` trained; by default the newest.

    only: "interrupted" or "unconfirmed", for a group with an interrupted or an unconfirmed completion.
    Raises ValueError if no finished group matches.
    """
    trained_in = {group: record.step for record in read_history(run_dir).batches for group in record.group_ids}
    chosen: ListedGroup | None = None
    finished = set()
    for listed in listed_groups(run_dir):
        finished.add(listed.group_id)
        if group_id is not None and listed.group_id != group_id:
            continue
        if step is not None and trained_in.get(listed.group_id) != step:
            continue
        if only and not getattr(listed, only):
            continue
        if chosen is None or (step is None and listed.group_id > chosen.group_id):
            chosen = listed
    if chosen is None:
        options = {"--group": group_id, "--step": step, f"--{only}": only or None}
        criteria = " ".join(option for option, value in options.items() if value is not None)
        if not criteria:
            raise ValueError(f"{run_dir}: the run has no finished group yet")
        raise ValueError(f"{run_dir}: none of the {len(finished)} finished groups matches {criteria}")
    return chosen.read() | {"step": trained_in.get(chosen.group_id)}


def show(console: Console, group: dict[str, Any], index: int, tokenizer: Any) -> None:
    """Print the header, the prompt and the completion."""
    rollouts = group["rollouts"]
    scores = group["scores"]
    prompt = group["prompt"]
    rollout = rollouts[index]
    score = scores[index]
    group_text = str(group["group_id"])
    if prompt.get("task"):
        group_text += f", task {printable(prompt['task'])}"
    group_text += f", epoch {group['epoch']}"
    if group["step"] is None:
        group_text += ", in no batch yet"
    else:
        group_text += f", in the batch of step {group['step']}"
    right = sum(score["correct"] for score in scores)
    verdict = score["reason"] or {True: "right", False: "wrong"}[score["correct"]]
    if score.get("confirmed") is False:
        verdict = "correct, but not confirmed by the second judge"
    lines = {
        "group": f"{group_text}, pass rate {right}/{len(scores)}",
        "completion": f"{index} of {len(rollouts)}, {len(rollout['token_ids'])} tokens, seed {rollout['seed']}",
        "reward": f"{score['reward']:+g} ({verdict}), reference {printable(prompt['answer'])}",
        "thinking": describe_thinking(rollout),
        "versions": describe_versions(rollout["policy_versions"]),
    }
    if rollout["turns"] > 1:
        lines["turns"] = f"{rollout['turns']}, {rollout['environment_tokens']} tokens of the environment"
    if score["problem"]:
        lines["failure"] = printable(score["problem"])
    if score["metrics"]:
        lines["metrics"] = ", ".join(f"{printable(name)} {value:g}" for name, value in score["metrics"].items())
    for name, value in lines.items():
        console.print(Text.assemble((f"{name:<11}", "bold"), value))
    console.print(Text.assemble(("prompt     ", "bold"), (decode(tokenizer, prompt["token_ids"]), "dim")))
    console.print(marked_text(rollout, tokenizer))


def describe_thinking(rollout: dict[str, Any]) -> str:
    """A line that says after how many tokens thinking is cut, and whether thinking was cut and the text truncated."""
    cut = f"limited to {rollout['thinking_cut']} tokens"
    interrupted = "not interrupted"
    if rollout["interrupted"]:
        cut = f"cut after {rollout['thinking_cut']} tokens"
        interrupted = "interrupted"
    if not rollout["thinking_cut"]:
        cut = "no cut"
    truncated = "not truncated"
    if rollout["truncated"]:
        truncated = "truncated"
    return f"{cut}, {interrupted}, {truncated}"


def describe_versions(versions: Sequence[int]) -> str:
    """Spans of equal policy version with token numbers: `3 (tokens 0-11), 4 (tokens 12-20)`."""
    spans = []
    for version, tokens in groupby(range(len(versions)), key=lambda token: versions[token]):
        numbers = list(tokens)
        spans.append(f"{version} (tokens {numbers[0]}-{numbers[-1]})")
    return ", ".join(spans)


def marked_text(rollout: dict[str, Any], tokenizer: Any) -> Text:
    """The completion with marks, decoded span by span, since a token may be a part of a character."""
    text = Text()
    last_version = None
    last_part = 0
    for first, end, part, version, origin in spans(rollout):
        if part != last_part and len(rollout["parts"]) > 1:
            text.append(f"\npart {part} of {len(rollout['parts'])}\n", style="bold")
        if version != last_version:
            text.append(f"‹v{version}›", style="cyan")
        last_part = part
        last_version = version
        prefix, suffix, style = _MARKS[origin]
        text.append(f"{prefix}{decode(tokenizer, rollout['token_ids'][first:end])}{suffix}", style=style)
    return text
