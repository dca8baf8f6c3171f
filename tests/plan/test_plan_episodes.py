"""Plans of recipes with an environment: tokens, prefill and waiting by hand; without one every figure stays."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from planned_recipes import CONFIGS, recipe_of
from recipe_files import ROOT
from rich.console import Console

from megatron_scalerl.__main__ import main
from megatron_scalerl.plan.assumptions import OF_EPISODES, Assumptions
from megatron_scalerl.plan.hardware import GPUS
from megatron_scalerl.plan.planner import as_numbers, make_plan
from megatron_scalerl.plan.text import show
from megatron_scalerl.plan.work import assumed_lengths

SMALL = "qwen2_5_math_1_5b"
DENSE = "scalerl_llama3_8b"
H100 = GPUS["h100-80g"]
GAME = "environment.name=nowhere.at_all:Game"
"""Its module does not exist: a plan imports no environment."""
TURN = (
    "interruption.thinking_tokens=[100, 100]",
    "interruption.answer_tokens=28",
    "environment.episode_tokens=1000",
)
# both medians are far beyond their limits, so that every turn has 100 + 28 tokens
FIXED = Assumptions(thinking_median=1e6, answer_median=1e6, reply_tokens=50, reply_seconds=0)
BEFORE = {
    "qwen2_5_math_1_5b_1gpu": (88.31932481306187, 13921.588166604257, 239.71003629687732, 1491689.2672),
    "qwen3_30b_a3b_16gpus": (212.86739737917955, 1466.7833395070159, 60.19152054634357, 2694450.816),
    "scalerl_llama3_8b_32k": (181.66846081390173, 1022.4823459603272, 40.88046516383759, 12084786.816),
    "scalerl_llama4_scout_17bx16": (40.675417358015544, 5702.407337543695, 142.01575676635485, 4835563.968),
    "tiny_cpu": (3.4672490376429, 1785.9498215362291, 13.659173713608938, 71728.3328),
}
"""Recipe -> seconds of a step, tokens per second of an engine, concurrent completions, trained tokens, as they were
planned before there were environments."""


def plan_of(name, *overrides, assumed=FIXED):
    recipe = recipe_of(name, *overrides)
    config = Path(recipe.policy.path).name
    if config == "policy":  # of the tiny recipes, which is not written yet
        config = "Qwen3-30B-A3B" if "moe" in name else "Qwen2.5-Math-1.5B"
    return make_plan(recipe, CONFIGS / config, recipe.devices, H100, assumed)


def printed(plan):
    text = io.StringIO()
    show(plan, Console(file=text))
    return text.getvalue()


@pytest.mark.parametrize("name", sorted(BEFORE))
def test_without_an_environment_every_figure_stays(name):
    plan = plan_of(name, assumed=Assumptions(turns=9, reply_tokens=4000, reply_seconds=60))
    timing = plan.timing
    figures = (timing.step_seconds, timing.engine_tokens_per_second, timing.running, plan.work.trained_tokens)
    assert figures == pytest.approx(BEFORE[name], rel=1e-12)
    numbers = as_numbers(plan)
    assert not set(OF_EPISODES) & set(numbers["assumptions"])
    assert len(numbers["assumptions"]) == 17 and len(numbers["decoding"]) == 5


@pytest.mark.parametrize("assumed", [{"turns": 1}, {"turns": 1, "reply_seconds": 60, "reply_tokens": 4000}])
@pytest.mark.parametrize("name", [SMALL, "qwen2_5_math_1_5b_1gpu"])
def test_an_episode_of_one_turn_is_a_completion(name, assumed):
    without, one = (plan_of(name, *given, assumed=Assumptions(**assumed)) for given in ((), (GAME,)))
    numbers, same = as_numbers(without), as_numbers(one)
    assert same.pop("assumptions")["turns"]["value"] == 1 and numbers.pop("assumptions")
    assert json.dumps(same) == json.dumps(numbers)


def test_replies_that_cost_nothing_leave_one_long_turn():
    """Three turns of 128 tokens are one of 384 where replies have no tokens, take no time and the cache stays."""
    cached = "rollouts.max_staleness_steps=0"
    turns = plan_of(DENSE, GAME, *TURN, cached, assumed=replace(FIXED, reply_tokens=0))
    one = plan_of(DENSE, "interruption.thinking_tokens=[300, 300]", "interruption.answer_tokens=84", cached)
    assert set(turns.lengths.tokens) == set(one.lengths.tokens) == {384}
    assert turns.timing == one.timing and turns.decoding == one.decoding


def test_tokens_of_a_step():
    """Three turns of 100 + 28 tokens, two replies of 50, a prompt of 256."""
    plan = plan_of(DENSE, GAME, *TURN)
    n = plan.work.completions
    assert n == plan.recipe.rollouts.groups_per_batch * plan.recipe.rollouts.group_size
    assert plan.work.generated_tokens == n * 384
    assert plan.work.trained_tokens == n * (256 + 384 + 100)
    # after x sampled tokens there are 484 / 384 x, and x is 192 on average
    assert plan.lengths.mean_resident == 242
    # attention reads half of the whole sequence, at 2 x 2 FLOPs per key and width, in three passes
    layers, width = 32, 4096
    short = plan_of(DENSE, GAME, *TURN, assumed=replace(FIXED, reply_tokens=0)).work
    more = plan.work.model_flops / plan.work.trained_tokens - short.model_flops / short.trained_tokens
    assert more == pytest.approx(3 * layers * 2 * width * 100, rel=1e-6)


@pytest.mark.parametrize(
    "override, turns, sampled, written",
    [
        ("environment.episode_tokens=300", 3, 300 - 100, 100),
        ("environment.episode_tokens=128", 9, 1, 127),
        ("environment.max_turns=2", 3, 256, 50),
        ("environment.turn_tokens=60", 3, 180, 100),
        ("environment.timeout_s=1", 2.5, 320, 75),
    ],
)
def test_the_limits_of_an_episode(override, turns, sampled, written):
    recipe = recipe_of(DENSE, GAME, *TURN, override)
    lengths = assumed_lengths(recipe, replace(FIXED, turns=turns, reply_seconds=2))
    assert (lengths.mean, lengths.written) == (sampled, written)
    assert lengths.waiting == 2 * lengths.replies == 2 * (min(turns, recipe.environment.max_turns) - 1)


@pytest.mark.parametrize(
    "override, tokens",
    [
        # a turn continues 256 + (384 + 100) / 2 = 498 tokens on average
        ("rollouts.max_staleness_steps=8", 256 + 100 + 2 * 498),
        ("rollouts.max_staleness_steps=1", 256 + 100 + 498),
        ("rollouts.max_staleness_steps=0", 256 + 100),
        ("rollouts={schedule: ppo_off_policy, updates_per_phase: 4}", 256 + 100),
    ],
)
def test_the_cache_has_contexts_until_the_weights_change(override, tokens):
    decoding = plan_of(DENSE, GAME, *TURN, override).decoding
    p = plan_of(DENSE).parameters
    assert decoding.prefill_seconds == pytest.approx(2 * (p.active - p.embedding) * tokens / (H100.bf16_flops * 0.4))


def test_the_printed_plan_says_what_episodes_cost():
    plan = plan_of(DENSE, GAME, *TURN, assumed=replace(FIXED, reply_seconds=4))
    step = plan.decoding.step_seconds(plan.decoding.running)
    text = printed(plan)
    share = 8 / (8 + 384 * step)
    assert f"100 tokens of its environment and 8.0 s of waiting, {share:.0%} of its time at full load" in text
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│ --")}
    assert [rows[flag].split()[3] for flag in ("--turns", "--reply-tokens", "--reply-seconds")] == ["3", "50", "4"]


def test_flags_and_a_missing_module(tmp_path, capsys):
    recipe = str(ROOT / f"recipes/{SMALL}.yaml")
    out = tmp_path / "plan.json"
    flags = f"--turns 2 --reply-tokens 10 --reply-seconds 1 --json {out}".split()
    words = f"plan {recipe} --gpus 2 --check --no-build environment=nowhere.at_all:Game".split()
    assert main([*words, *flags]) == 0
    numbers = json.loads(out.read_text())
    assert numbers["assumptions"]["turns"] == {"value": 2, "source": "given on the command line"}
    assert [numbers["assumptions"][name]["value"] for name in OF_EPISODES] == [2, 10, 1]
    assert main([*words, "--turns", "0.5"]) == 2
    assert "turns: 0.5: Input should be greater than or equal to 1" in capsys.readouterr().err
