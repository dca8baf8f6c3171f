"""The longest sequence determines trainer capacity and context length where the recipe does not set them."""

import math

import yaml
from recipe_files import SETTLED, small_recipe
from refusals import refused

from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.engine.interruption import Plan, plan_ids
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import dump_recipe, load_recipe
from megatron_scalerl.recipe.sections import PAPER_PHRASE
from megatron_scalerl.tiny.tokenizer import build_tokenizer


def recipe(tiny, **sections):
    data = {
        "name": "r",
        "output_dir": str(tiny.parent / "runs_of_longest"),
        "steps": 1,
        "policy": {"path": str(tiny / "base_policy"), "dtype": "float32"},
        "prompts": {
            "path": str(tiny / "prompts.jsonl"),
            "held_out_path": str(tiny / "held_out.jsonl"),
            "max_prompt_tokens": 32,
            **SETTLED,
        },
        "interruption": {"thinking_tokens": [44, 52], "answer_tokens": 4},
    }
    return Recipe.model_validate(data | sections)


def test_the_papers_lengths_need_more_than_16384():
    r = small_recipe()
    assert r.longest_sequence(phrase_tokens=20) == 2048 + 12288 + 20 + 2048 + 1
    # without a tokenizer: at most one token per byte
    assert r.longest_sequence() == 2048 + 12288 + len(PAPER_PHRASE + "</think>") + 2048 + 1
    assert r.trainer.micro_batch_tokens is None and r.micro_batch_tokens == 16512 == 129 * 128


def test_without_interruption_there_is_no_phrase(tiny):
    r = recipe(tiny, interruption={"enabled": False, "thinking_tokens": [44, 52], "answer_tokens": 4})
    assert r.longest_sequence() == r.longest_sequence(phrase_tokens=9) == 32 + 52 + 4


def test_the_longest_completion_of_every_plan_fits(tiny):
    r = recipe(tiny)
    phrase, end = plan_ids(build_tokenizer(), r.interruption.phrase, r.prompts.think_end)
    plan = Plan(
        cut=r.interruption.thinking_tokens[1],
        phrase_ids=phrase,
        think_end_ids=end,
        answer_budget=r.interruption.answer_tokens,
        eos_id=2,
    )
    assert r.longest_sequence(len(phrase)) == r.prompts.max_prompt_tokens + plan.max_tokens


def test_a_capacity_in_the_recipe_is_kept(tiny):
    r = recipe(tiny, trainer={"micro_batch_tokens": 1000}, engine={"vllm": {"max_model_len": 99}})
    resolved = check_inputs(r).resolved(r)
    assert (resolved.micro_batch_tokens, resolved.trainer.micro_batch_tokens) == (1000, 1000)
    assert resolved.engine.vllm["max_model_len"] == 99


def test_the_resolved_recipe_holds_the_numbers(tiny, tmp_path):
    r = recipe(tiny)
    resolved = check_inputs(r).resolved(r)
    data = yaml.safe_load(dump_recipe(resolved))
    assert data["trainer"]["micro_batch_tokens"] == math.ceil(r.longest_sequence() / 128) * 128 == 256
    assert data["engine"]["vllm"]["max_model_len"] == 91  # exact: the policy's own limit may be as low
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(resolved))
    assert load_recipe(file).micro_batch_tokens == 256


def test_a_run_started_with_another_default_keeps_it(tiny, tmp_path):
    unset = recipe(tiny, output_dir=str(tmp_path))
    earlier = unset.with_settings(trainer={"micro_batch_tokens": 16384})
    RunFolder(check_inputs(earlier).resolved(earlier)).close()
    resolved = check_inputs(unset).resolved(unset)
    assert resolved.trainer.micro_batch_tokens == 16384
    RunFolder(resolved).close()  # the same run, not another recipe's


def test_a_run_folder_that_cannot_be_read_is_one_line(tiny, tmp_path):
    unset = recipe(tiny, output_dir=str(tmp_path))
    (tmp_path / "r").mkdir()
    (tmp_path / "r/recipe.yaml").write_text("a: [1")
    with refused(r"r/recipe.yaml: .*not valid YAML"):
        check_inputs(unset)
