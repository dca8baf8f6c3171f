"""Plans of recipes with an environment: tokens, prefill and waiting by hand; without one every figure stays."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_scalerl.__main__ import main
from megatron_scalerl.plan.assumptions import OF_EPISODES, Assumptions
from megatron_scalerl.plan.engine import Decoding
from megatron_scalerl.plan.hardware import GPUS
from megatron_scalerl.plan.planner import as_numbers, make_plan
from megatron_scalerl.plan.simulate import QueueSettings, simulate
from megatron_scalerl.plan.split import Split, generate_seconds
from megatron_scalerl.plan.text import show
from megatron_scalerl.plan.work import Lengths, assumed_lengths
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.recipe.sections import RolloutsSection

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"
SMALL = "qwen2_5_math_1_5b"
H100 = GPUS["h100-80g"]
GAME = "environment.name=nowhere.at_all:Game"
"""Its module does not exist: a plan imports no environment."""
TURN = (
    "interruption.enabled=true",
    "interruption.thinking_tokens=[100, 100]",
    "interruption.answer_tokens=28",
    "environment.episode_tokens=1000",
)
# both medians are far beyond their limits, so that every turn has 100 + 28 tokens
FIXED = Assumptions(thinking_median=1e6, answer_median=1e6, reply_tokens=50, reply_seconds=0)
BEFORE = {
}


def recipe_of(name, *overrides):
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


def plan_of(name, *overrides, assumed=FIXED):
    recipe = recipe_of(name, *overrides)
    config = Path(recipe.policy.path).name
    if config == "policy":  # of the tiny recipes, which is not written yet
        config = "Qwen3-30B-A3B" if "moe" in name else "Qwen2.5-Math-1.5B"
    return make_plan(recipe, CONFIGS / config, recipe.devices, H100, assumed)


def printed(plan):
    text = io.StringIO()
    show(plan, "skipped", Console(file=text, width=400))
    return text.getvalue()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_without_an_environment_every_figure_stays(name):
    plan = plan_of(name, assumed=Assumptions())
    timing = plan.timing
    figures = (timing.step_seconds, timing.engine_tokens_per_second, timing.running, plan.work.trained_tokens)
    print(repr(name), ":", figures, ",")
    assert figures == pytest.approx(BEFORE[name], rel=1e-12)
    other = plan_of(name, assumed=Assumptions(turns=9, reply_tokens=4000, reply_seconds=60))
    assert json.dumps(as_numbers(other)) == json.dumps(as_numbers(plan))
    assert printed(other) == printed(plan) and "--turns" not in printed(plan)
    assert not set(OF_EPISODES) & set(as_numbers(plan)["assumptions"])
