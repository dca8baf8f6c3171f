"""Train a policy against a judge and list what it is paid for and a second judge does not confirm, by form.

    python tools/red_team.py math --recipe recipes/tiny_cpu.yaml --steps 60 [key=value ...]
    python tools/red_team.py my_module:my_judge --recipe my_run.yaml --audit my_module:strict
    python tools/red_team.py math --run runs/my_run       # what a run that exists was paid for

A policy writes always what its judge accepts rarely, so a judge that was tried on answers one by one is tried here on
a policy that looks for its holes. Trains by `megatron-scalerl train` as RECIPE says, with VERIFIER as
`rewards.verifier` and --audit as `validation.audit`; then prints the held-out pass rate and the confirmed share of
each validation, and the completions of the last --share of the groups that are paid and not confirmed: their number
by form (each number of a text is #), with the newest example of each. Exit code 1 if less than --least is confirmed.
"""

import re
import subprocess
import sys
from pathlib import Path

import harness
from checkout import explained

options = harness.options(
    __doc__,
    recipe=(Path, "the run to make; its name gets the suffix _red_team"),
    run=(Path, "the folder of a run, which is read and not trained"),
    steps=60,
    audit=("auto", "the second judge"),
    share=(0.3, "of the run's groups, the newest"),
    least=(0.99, "confirmed share of the paid completions of these groups"),
    forms=20,
)


def parser():
    """The options, and two kinds of words."""
    built = options()
    built.add_argument("verifier", nargs="?", default="math", help="math, code or module:function")
    built.add_argument("overrides", nargs="*", metavar="key=value", help="for the recipe, such as seed=2")
    return built


if __name__ == "__main__":
    OPTIONS = parser().parse_intermixed_args()  # before the imports, which take seconds

with explained():
    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.recipe.file import load_recipe
    from megatron_scalerl.rollouts.group_files import listed_groups
    from megatron_scalerl.rollouts.run_text import decode, load_tokenizer


def train(o):
    """The folder of the run that is made. Raises RuntimeError if it fails."""
    name = f"{load_recipe(o.recipe).name}_red_team"
    settings = [f"rewards.verifier={o.verifier}", f"validation.audit={o.audit}", f"steps={o.steps}"]
    settings += [f"name={name}", *o.overrides]
    command = [sys.executable, "-m", "megatron_scalerl", "train", str(o.recipe), *settings]
    if subprocess.run(command).returncode:
        raise RuntimeError(f"{' '.join(command)} failed")
    recipe = load_recipe(o.recipe, settings)
    return Path(recipe.output_dir) / recipe.name


def paid_completions(run_dir, share):
    """(group, reference, text, confirmed) of the paid completions of the newest groups, oldest first."""
    tokenizer = load_tokenizer(run_dir)
    newest = sorted(listed_groups(run_dir), key=lambda group: group.group_id)
    for listed in newest[-max(1, round(share * len(newest))) :]:
        group = listed.read()
        for rollout, score in zip(group["rollouts"], group["scores"]):
            if score["correct"] and score["confirmed"] is not None:
                text = decode(tokenizer, rollout["token_ids"])
                yield listed.group_id, group["prompt"]["answer"], text, score["confirmed"]


def forms_of(completions):
    """Form of the unconfirmed texts -> (number, newest text, its reference), the most frequent first."""
    forms = {}
    for _, reference, text, confirmed in completions:
        if not confirmed:
            form = re.sub(r"-?\d[\d.,]*(?<=\d)", "#", " ".join(text.split()))[-160:]
            forms[form] = (forms.get(form, (0,))[0] + 1, text, reference)
    return dict(sorted(forms.items(), key=lambda item: -item[1][0]))


def main(o):
    """Train, or read a run, and print; the exit code."""
    run_dir = o.run or train(o)
    for row in read_jsonl(run_dir / "validation.jsonl"):
        confirmed = row.get("confirmed_share")
        shown = "no verdict" if confirmed is None else f"confirmed {confirmed:.3f}"
        print(f"step {row['step']:5d}: held-out pass rate {row['pass_rate']:.3f}, {shown}")
    completions = list(paid_completions(run_dir, o.share))
    unconfirmed = forms_of(completions)
    count = sum(number for number, *_ in unconfirmed.values())
    print(f"{len(completions)} paid completions in the newest groups, {count} not confirmed")
    for form, (number, text, reference) in list(unconfirmed.items())[: o.forms]:
        print(f"{number:6d}  {form}\n        reference {reference}: {' '.join(text.split())[-200:]}")
    return int(count > (1 - o.least) * len(completions))


if __name__ == "__main__":
    with explained():
        sys.exit(main(OPTIONS))
