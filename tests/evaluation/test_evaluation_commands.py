"""The commands without an engine: recipes for a folder, hostile text on the terminal, errors in one line."""

from types import SimpleNamespace

import pytest
from command_line import refusal
from evaluation_files import AIME_2024, written
from refusals import refused
from rich.console import Console

from megatron_scalerl.commands.evaluate import _budgets, _print_examples
from megatron_scalerl.evaluation.inputs import check_evaluation, recipe_of_task, settings
from megatron_scalerl.evaluation.offline import _first
from megatron_scalerl.evaluation.problems import read_problems
from megatron_scalerl.evaluation.results import Key, Row
from megatron_scalerl.recipe.file import RecipeError, load_recipe_for

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]hens [/nothing]\u202e\r overwritten"


def test_the_command_that_is_gone_names_its_successors(capsys):
    line = refusal(["contamination", "train.jsonl", "--data", "eval.jsonl"], capsys)
    assert "evaluate --training FILE" in line and "RUN/contamination.json" in line


def test_hostile_completions_are_printed_as_text(tmp_path, capsys):
    file = read_problems(written(tmp_path, "a.jsonl", [AIME_2024[0] | {"Problem": HOSTILE, "ID": HOSTILE}]))
    row = Row(key=Key(file="a", number=1, index=0), problem_id=HOSTILE, correct=False, reason=HOSTILE, text=HOSTILE)
    result = SimpleNamespace(rows={row.key: row})
    _print_examples(1, SimpleNamespace(files=[file]), result, Console(soft_wrap=True, markup=False))
    printed = capsys.readouterr().out
    assert not set(printed) & {"\x1b", "\x07", "\u202e", "\r"}
    assert printed.count("\\x1b[2J[bold red]hens [/nothing]\\u202e\\r overwritten") == 4


def test_a_folder_takes_the_place_of_the_recipes_policy(tmp_path):
    recipe = tmp_path / "run.yaml"
    sections = "policy: {path: old, dtype: float32, megatron_path: m}\nprompts: {path: gone, think_end: '</t>'}\n"
    recipe.write_text(f"name: r\nsteps: 9\n{sections}")
    found = load_recipe_for("new", recipe, ["rollouts.temperature=0.6"], prompts="eval.jsonl")
    assert (found.policy.path, found.policy.dtype, found.policy.megatron_path) == ("new", "float32", None)
    assert found.prompts.think_end == "</t>" and found.rollouts.temperature == 0.6
    bare = load_recipe_for("new", prompts="eval.jsonl")
    assert bare.policy.path == "new" and bare.interruption.thinking_tokens == (10240, 12288)
    with pytest.raises(RecipeError, match=r"^engine\.cuont is not a recipe key"):
        load_recipe_for("new", None, ["engine.cuont=2"], prompts="eval.jsonl")
    with pytest.raises(RecipeError, match=r"policy is .*; it has to be a section"):
        recipe.write_text("policy: x\n")
        load_recipe_for("new", recipe)


def test_a_mixture_is_evaluated_with_the_template_and_the_verifier_of_one_task(tmp_path):
    tasks = "{a: {path: a, weight: 1, prompt_template: 'A {prompt}', verifier: code}, b: {path: b, weight: 1}}"
    path = tmp_path / "run.yaml"
    path.write_text(f"name: r\nsteps: 9\npolicy: {{path: p}}\nprompts: {{tasks: {tasks}}}\n")
    with refused(r"^evaluation.task: expected one of a, b, found none$"):
        check_evaluation(load_recipe_for("new", path), [])
    with refused(r"^evaluation.task: expected one of a, b, found c$"):
        recipe_of_task(load_recipe_for("new", path, ["evaluation.task=c"]))
    of_a, of_b = (recipe_of_task(load_recipe_for("new", path, [f"evaluation.task={name}"])) for name in "ab")
    assert recipe_of_task(of_a) == of_a, "OUT/recipe.yaml is a recipe of one task"
    found = [settings(each, k=1, budgets=(None,)) for each in (of_a, of_b)]
    assert [(each["prompt_template"], each["verifier"]) for each in found] == [
        ("A {prompt}", "code"),
        ("{prompt}", "math"),
    ]


def test_an_interrupted_evaluation_goes_on_with_less_memory_and_not_with_other_numbers(tmp_path):
    def of(*more):
        return settings(load_recipe_for("new", None, more, prompts="eval.jsonl"), k=1, budgets=(None,))

    assert of() == of("engine.vllm.max_num_seqs=4", "engine.vllm.gpu_memory_utilization=0.5", "engine.count=2")
    for other in ("engine.vllm.kv_cache_dtype=fp8", "rewards.timeout_s=99", "engine.vllm.quantization=fp8"):
        assert of() != of(other), other


def test_the_first_of_several_failures_is_raised():
    disk = OSError(28, "No space left")
    assert _first(ExceptionGroup("engines", [ExceptionGroup("one", [disk]), KeyError()])) is disk


@pytest.mark.parametrize("text", ["", "a", "0", "8,4", "8,8", "8,-4", "1.5"])
def test_budgets_are_ascending_numbers_of_tokens(text):
    with refused(f"--budgets: {text!r} "):
        _budgets(text)
    assert _budgets("4, 8,16") == [4, 8, 16] and _budgets(None) == []


@pytest.mark.parametrize(
    "argv, message",
    [
        ("evaluate none --data none.jsonl --out o", "none.jsonl: there is no such file or folder of prompts"),
        ("evaluate none --data x --out o --k 0", "--k: 0 is too small"),
    ],
)
def test_errors_of_the_user_are_one_line(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(argv.split(), capsys) and not list(tmp_path.iterdir())
