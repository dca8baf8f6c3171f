"""A policy is trained against a judge, and what it is paid for without confirmation is listed by form."""

import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import red_team
from journals import write_journal
from programs import ROOT, ended
from rollout_groups import group_of, rollout

from megatron_scalerl.checkpoints.jsonl import JsonlWriter
from megatron_scalerl.tiny.tokenizer import build_tokenizer, save_tokenizer
from megatron_scalerl.types import Prompt, Score

TOKENIZER = build_tokenizer()
LENIENT = "def pays(text, reference, extra):\n    return any(character.isdigit() for character in text)\n"


def run_of(folder, texts):
    """A run whose groups have these texts, each with what the second judge says: None is wrong."""
    save_tokenizer(folder / "policy")
    (folder / "recipe.yaml").write_text(f"policy:\n  path: {folder / 'policy'}\n")
    ids = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text, _ in texts]
    rollouts = tuple(rollout(tokens=tokens, versions=(0,) * len(tokens)) for tokens in ids)
    scores = []
    for _, verdict in texts:
        wrong = Score(correct=False, reward=-1.0)
        scores.append(wrong if verdict is None else replace(wrong, correct=True, reward=1.0, confirmed=verdict))
    prompt = Prompt(prompt_id="p", text="7+2=", answer="9", token_ids=(1, 13))
    write_journal(
        folder, groups=[(group_of(rollouts, tuple(scores), prompt=prompt, group_id=0), rollouts)], batches=[]
    )
    rows = JsonlWriter(folder / "validation.jsonl")
    rows.append({"step": 0, "pass_rate": 0.1}, {"step": 4, "pass_rate": 0.9, "confirmed_share": 0.25})
    rows.close()
    return folder


def test_unconfirmed_completions_are_counted_by_form(tmp_path, capsys):
    texts = [("7+2=", False), ("6+3=", False), ("9", True), ("5", None), ("8-", False)]
    options = Namespace(run=run_of(tmp_path, texts), share=1.0, forms=20, least=0.99)
    assert red_team.main(options) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "step     0: held-out pass rate 0.100, no verdict",
        "step     4: held-out pass rate 0.900, confirmed 0.250",
        "4 paid completions in the newest groups, 3 not confirmed",
    ]
    assert lines[3:5] == ["     2  #+#=", "        reference 9: 6+3="]
    assert red_team.main(Namespace(**vars(options) | {"least": 0.25})) == 0


@pytest.mark.slow
def test_a_lenient_judge_is_found_out_by_training(tiny, tmp_path):
    (tmp_path / "lenient.py").write_text(LENIENT)
    words = f"""tools/red_team.py lenient:pays --recipe recipes/tiny_cpu.yaml --steps 2
        --audit megatron_scalerl.rewards.audit:confirm_math output_dir={tmp_path}
        policy.path={tiny}/base_policy prompts.path={tiny}/prompts.jsonl prompts.held_out_path={tiny}/held_out.jsonl
        validation.prompts=8 validation.end_generations=1
        rollouts.groups_per_batch=4 rollouts.group_size=4 rollouts.max_in_flight=16"""
    variables = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = ended(sys.executable, *words.split(), timeout=500, **variables)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "read some with show --unconfirmed" in done.stdout + done.stderr
    assert "not confirmed\n" in done.stdout and "step     2: held-out pass rate" in done.stdout
