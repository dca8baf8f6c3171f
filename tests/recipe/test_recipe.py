"""Recipes: every file loads, mistakes are one line that names file and key, the resolved form loads again."""

from typing import get_args

import pytest
from pydantic import ValidationError
from recipe_files import OVERLAYS, ROOT

from megatron_scalerl.losses import cispo
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError, dump_recipe, load_recipe, valid_keys
from megatron_scalerl.recipe.sections import PromptsSection, RewardsSection, Section, TaskSection
from megatron_scalerl.recipe.tasks import tasks_of

TINY = ROOT / "recipes" / "tiny_cpu.yaml"
MINIMAL = "name: t\nsteps: 3\npolicy: {path: x}\nprompts: {path: y}\n"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(MINIMAL)
    return file


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda f: f.stem)
def test_every_recipe_loads(file):
    overlay = file.parent.name in OVERLAYS
    load_recipe(*((TINY, [f"overlay={file}"]) if overlay else (file,)))


def test_defaults_are_the_papers(path):
    recipe = load_recipe(path)
    assert (recipe.rollouts.groups_per_batch, recipe.rollouts.group_size) == (48, 16)
    assert recipe.rollouts.max_staleness_steps == 8
    assert (recipe.loss.name, recipe.loss.max_is_weight, recipe.loss.reduction) == ("cispo", 5.0, "prompt_mean")
    assert recipe.loss.arguments == {} and cispo.__kwdefaults__ == {"max_is_weight": recipe.loss.max_is_weight}
    assert recipe.advantages.normalize == "batch"
    assert recipe.filters.zero_variance and recipe.curriculum.no_positive_resampling == 0.9
    assert recipe.policy.logits == "fp32"
    o = recipe.optimizer
    assert (o.lr, o.warmup_steps, o.eps, o.weight_decay) == (5e-7, 100, 1e-15, 0.01)
    assert (recipe.rewards.correct, recipe.rewards.incorrect) == (1.0, -1.0)
    assert (recipe.validation.every_steps, recipe.validation.generations) == (100, 16)


def test_adapters_have_a_learning_rate_of_their_own(path):
    assert load_recipe(path, ["policy.lora={}"]).optimizer.lr == 5e-6
    assert load_recipe(path, ["policy.lora.rank=8", "optimizer.eps=1e-8"]).optimizer.lr == 5e-6
    assert load_recipe(path, ["policy.lora={}", "optimizer.lr=1e-5"]).optimizer.lr == 1e-5
    assert load_recipe(path, ["policy.lora=null"]).optimizer.lr == 5e-7
    adapted = load_recipe(path, ["policy.lora={}"])
    assert Recipe(name="t", steps=1, policy=adapted.policy, prompts=adapted.prompts).optimizer.lr == 5e-6
    for wrong in (None, [], "policy"):
        with pytest.raises(ValidationError):
            Recipe.model_validate(wrong)


def test_adapters_of_another_base_or_above_the_rank_that_vllm_serves_are_refused(path):
    assert load_recipe(path, ["policy.lora.rank=512"]).policy.lora.rank == 512
    with pytest.raises(RecipeError, match=r"policy\.lora\.rank is 600.* 512"):
        load_recipe(path, ["policy.lora.rank=600"])
    load_recipe(path, ["policy.megatron_path=folder"])
    with pytest.raises(RecipeError, match=r"policy\.megatron_path .*policy\.lora"):
        load_recipe(path, ["policy.megatron_path=folder", "policy.lora={}"])


def test_an_adapter_needs_its_settings(path):
    with pytest.raises(RecipeError, match=r"policy\.adapter: folder is set, but policy\.lora is not"):
        load_recipe(path, ["policy.adapter=folder"])


@pytest.mark.parametrize("text", ["5e-7", "5.0e-7", "0.0000005"])
def test_every_spelling_of_a_number_is_one(path, text):
    path.write_text(MINIMAL + f"optimizer: {{lr: {text}}}\n")
    assert load_recipe(path).optimizer.lr == 5e-7
    assert load_recipe(path, [f"optimizer.lr={text}"]).optimizer.lr == 5e-7


@pytest.mark.parametrize("text", ["off", "'off'", "absolute"])
def test_off_needs_no_quotation_marks(path, text):
    """YAML reads off as false."""
    expected = text.strip("'")
    assert load_recipe(path, [f"weights.deltas={text}"]).weights.deltas == expected
    path.write_text(MINIMAL + f"weights: {{deltas: {text}}}\n")
    assert load_recipe(path).weights.deltas == expected


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "loss.reduction=ppo",
            "loss.reduction is 'ppo'; it should be 'prompt_mean', 'sequence_mean' or 'token_mean'",
        ),
        (
            "rollouts.group_size=1",
            "rollouts.group_size: 1 is too small: .* 0 in a group of one; use at least 2",
        ),
        ("rewards.correct=-1", "rewards.correct: -1 is not greater than rewards.incorrect -1, .*; raise "),
        ("rewards={correct: 0, incorrect: 1}", "rewards.correct: 0 is not greater than rewards.incorrect 1, "),
        ("rollouts.max_in_flight=8", "rollouts.max_in_flight: 8 is less than one group; use at least group_size 16"),
        ("rewards.correct=nan", "rewards.correct"),
        ("rollouts.temperature=0", "rollouts.temperature is 0; it should be greater than or equal to 0.01"),
        (
            "rewards.length_penalty={max_tokens: 9, cache_tokens: 10}",
            "rewards.length_penalty.cache_tokens: 10 is more than max_tokens 9",
        ),
        (
            "rollouts.updates_per_phase=4",
            "updates_per_phase: 4 has no effect with schedule pipeline, .*; leave updates_per_phase at 8",
        ),
        (
            "rollouts={schedule: ppo_off_policy, max_staleness_steps: 6}",
            r"updates_per_phase: 8 is more than max_staleness_steps 6 \+ 1 \(the last batch of a phase",
        ),
        (
            "interruption.thinking_tokens=[5, 2]",
            r"interruption.thinking_tokens is \[5, 2\]; it has to be",
        ),
        ("optimizer.lr.x=7", "optimizer.lr"),
    ],
)
def test_mistakes_are_one_line(path, override, said):
    with pytest.raises(RecipeError, match=said) as error:
        load_recipe(path, [override])
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_the_length_penalty_has_the_limits_of_the_completions(path):
    assert load_recipe(path).length_penalty is None
    short = "interruption={thinking_tokens: [44, 52], answer_tokens: 4}"
    for given, more, limits in (
        ("{}", [], (14336, 2048)),
        ("{}", [short], (56, 8)),
        ("{max_tokens: 21}", [short], (21, 3)),
        ("{cache_tokens: 5}", [short], (56, 5)),
        ("{max_tokens: 6}", [], (6, 1)),
    ):
        recipe = load_recipe(path, [f"rewards.length_penalty={given}", *more])
        for found in (recipe.length_penalty, tasks_of(recipe)[0].rewards.length_penalty):
            assert (found.max_tokens, found.cache_tokens) == limits


def test_what_bounds_the_age_of_a_batch(path):
    for overrides, every, bound in (
        ([], 1, 8),
        (["max_staleness_steps=0"], 1, 0),
        (["schedule=ppo_off_policy"], 8, 7),
        (["schedule=ppo_off_policy", "updates_per_phase=1", "max_staleness_steps=0"], 1, 0),
        (["schedule=ppo_off_policy", "updates_per_phase=9"], 9, 8),
    ):
        rollouts = load_recipe(path, [f"rollouts.{each}" for each in overrides]).rollouts
        assert (rollouts.batches_per_update, rollouts.staleness_bound) == (every, bound)


TASKS = "name: t\nsteps: 3\npolicy: {path: x}\nprompts:\n  tasks:\n    math: {path: m, weight: 3}\n"
CODE = "    code: {path: c, weight: 1, verifier: code, cpu_s: 20, held_out: 7, answer_column: tests}\n"


def test_tasks_have_the_settings_of_prompts_and_rewards_and_their_own(path):
    path.write_text(TASKS + CODE + "rewards: {cpu_s: 3, workers: 5}\n")
    code, math = tasks_of(load_recipe(path, ["prompts.held_out=9", "prompts.tasks.math.prompt_template=x{prompt}"]))
    assert (code.name, code.weight, code.key) == ("code", 1.0, "prompts.tasks.code")
    assert (code.prompts.path, code.prompts.held_out, code.prompts.answer_column) == ("c", 7, "tests")
    assert (code.rewards.verifier, code.rewards.cpu_s, code.rewards.workers) == ("code", 20.0, 5)
    assert (math.prompts.path, math.prompts.held_out, math.prompts.prompt_template) == ("m", 9, "x{prompt}")
    assert (math.rewards.verifier, math.rewards.cpu_s, math.weight) == ("math", 3.0, 3.0)
    assert code.prompts.tasks is None
    load_recipe(path, ["rewards.memory_mb=null", "prompts.tasks.code.memory_mb=64"])


def test_every_key_of_a_task_is_one_of_prompts_or_rewards():
    own = TaskSection.model_fields.keys() - {"weight", "environment", "interruption"}
    assert own <= PromptsSection.model_fields.keys() | RewardsSection.model_fields.keys()
    assert not PromptsSection.model_fields.keys() & RewardsSection.model_fields.keys()
    assert all(info.description for info in TaskSection.model_fields.values())


def test_a_task_has_its_own_environment_and_interruption_over_the_recipes(path):
    path.write_text(TASKS + CODE)
    game = "{path: g, weight: 1, environment: games:Game, interruption: {answer_tokens: 7, enabled: auto}}"
    shared = ["environment.max_turns=3", "interruption.thinking_tokens=[4, 5]", "interruption.enabled=false"]
    recipe = load_recipe(path, [*shared, f"prompts.tasks.game={game}"])
    code, task, math = tasks_of(recipe)
    assert [code.episodes, task.episodes, math.episodes, recipe.episodes] == [False, True, False, True]
    assert (task.recipe.environment.name, task.recipe.environment.max_turns) == ("games:Game", 3)
    assert math.recipe.interruption == recipe.interruption
    own = task.recipe.interruption
    assert (own.thinking_tokens, own.answer_tokens, own.enabled) == ((4, 5), 7, False)
    assert recipe.max_completion_tokens == math.recipe.max_completion_tokens == 2053
    assert task.recipe.max_completion_tokens == 12
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    everywhere = load_recipe(
        path, ["environment={name: a:A, episode_tokens: 20000}", "prompts.tasks.math.environment={name: null}"]
    )
    assert [task.episodes for task in tasks_of(everywhere)] == [True, False]
    longest = [task.recipe.max_completion_tokens for task in tasks_of(everywhere)]
    assert longest == [20000, 14336], "a limit of episodes is none of single turns"
    longer = ["prompts.tasks.game.environment.episode_tokens=3000", f"prompts.tasks.game={game}"]
    assert load_recipe(path, [*shared, *reversed(longer)]).max_completion_tokens == 3000


def test_a_recipe_with_a_path_has_one_task(path):
    recipe = load_recipe(path)
    (task,) = tasks_of(recipe)
    assert (task.name, task.key, task.prompts, task.rewards) == ("", "prompts", recipe.prompts, recipe.rewards)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prompts.tasks={}", "prompts.tasks is empty; name at least one task"),
        ("prompts.tasks=null", "prompts.path is missing; name a file of prompts, or set prompts.tasks"),
        (
            "prompts.held_out_path=h",
            "prompts.held_out_path: h has no effect with prompts.tasks; set prompts.tasks.NAME.held_out_path",
        ),
        (
            "prompts.tasks.math.weigth=2",
            "prompts.tasks.math.weigth is not a recipe key; the nearest is prompts.tasks.math.weight",
        ),
        ("prompts.tasks.x={path: a}", "prompts.tasks.x.weight is missing"),
        ("trainer.logit_backend=numpy", "trainer.logit_backend is 'numpy'; it should match pattern .*auto"),
        ("prompts.tasks.Math={path: a, weight: 1}", "prompts.tasks.Math is 'Math'; it should match pattern"),
        ("rewards.memory_mb=null", "rewards.memory_mb is null"),
        ("environment.max_turns=3", "environment.name is missing"),
        ("prompts.tasks.code.environment={max_turns: 3}", "prompts.tasks.code.environment.name is missing"),
        ("prompts.tasks.code.interruption={phrase: 'Stop. '}", "all tasks have to use the same phrase"),
    ],
)
def test_mistakes_in_tasks_are_one_line(path, override, said):
    path.write_text(TASKS + CODE)
    with pytest.raises(RecipeError, match=said) as error:
        load_recipe(path, [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.world_size=2", "engine.colocate: engines take 1 x 1 devices .*, the trainer 2"),
        ("weights.transport=nccl", r"weights.transport: nccl .*\(NCCL refuses two processes on one device"),
        (
            "weights.deltas=absolute",
            "weights.transport: auto with weights.deltas absolute does not work with engine.colocate",
        ),
        ("engine.vllm={gpu_memory_utilization: 0.2}", "engine.vllm.kv_cache_memory_bytes is missing"),
        ("engine.vllm={kv_cache_memory_bytes: 1}", "engine.vllm.gpu_memory_utilization is missing"),
    ],
)
def test_engines_on_the_trainers_devices_need_their_share_of_them(path, override, said):
    given = ["engine.colocate=true", "engine.vllm={kv_cache_memory_bytes: 1, gpu_memory_utilization: 0.2}"]
    assert load_recipe(path, given).devices == 1
    with pytest.raises(RecipeError, match=said):
        load_recipe(path, [*given, override])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "line 1|line 2"),
        ("- 1", "b.yaml: the file holds a list; a file of keys"),
        ("", "b.yaml: the file is empty; a file of keys"),
        ("a: 2026-13-01", "b.yaml: a value cannot be read: month must be in 1..12$"),
    ],
)
def test_broken_files(tmp_path, text, said):
    file = tmp_path / "b.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=said):
        load_recipe(file)
    with pytest.raises(RecipeError, match="there is no such file; it should be a recipe file"):
        load_recipe(tmp_path / "none.yaml")


def test_resolved_recipe_loads_to_an_equal_one(path, tmp_path):
    out = tmp_path / "resolved.yaml"
    for text in (MINIMAL, TASKS + CODE):
        path.write_text(text)
        recipe = load_recipe(path, ["loss.name=gspo", "validation.prompts=5"])
        out.write_text(dump_recipe(recipe))
        assert load_recipe(out) == recipe


def test_every_field_says_what_it_is():
    def undocumented(model, prefix=""):
        for name, info in model.model_fields.items():
            parts = (info.annotation, *get_args(info.annotation))
            sections = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
            for section in sections:
                yield from undocumented(section, f"{prefix}{name}.")
            if not info.description and info.annotation not in sections:
                yield prefix + name

    assert list(undocumented(Recipe)) == []
    assert {"loss.max_is_weight", "rewards.length_penalty.cache_tokens"} <= set(valid_keys())


def test_an_environment_is_given_by_its_name_or_as_a_section(path, tmp_path):
    def loaded(text, *overrides):
        path.write_text(f"{MINIMAL}environment: {text}\n")
        environment = load_recipe(path, overrides).environment
        assert load_recipe(resolved(load_recipe(path, overrides))).environment == environment
        return environment.name, environment.max_turns

    def resolved(recipe):
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        return tmp_path / "recipe.yaml"

    section, named = tmp_path / "section.yaml", tmp_path / "named.yaml"
    section.write_text("environment: {max_turns: 5}\n")
    named.write_text("environment: e:F\n")
    assert loaded("a:B") == ("a:B", 16)
    assert loaded("a:B", "environment.max_turns=4") == ("a:B", 4)
    assert loaded("a:B", f"overlay={section}") == ("a:B", 5)
    assert loaded("a:B", f"overlay={named}", "environment.max_turns=4") == ("e:F", 4)
    assert loaded("{name: a:B, max_turns: 3}", "environment=c:D") == ("c:D", 3)
    assert loaded("{}", "environment=c:D") == ("c:D", 16)
    for override, said in (("environment=3", "environment is 3; it"), ("environment.a=1", "environment.a is not")):
        with pytest.raises(RecipeError, match=said):
            loaded("a:B", override)
