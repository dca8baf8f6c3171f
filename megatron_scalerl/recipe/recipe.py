"""The schema of a recipe: the sections (`recipe.sections`) and the constraints between sections.

A recipe file is YAML and states differences from the defaults; `key.path=value` overrides change the file's values.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, model_validator

from megatron_scalerl.recipe.parallel_layout import check_world, sizes_of
from megatron_scalerl.recipe.process_sections import (
    EngineSection,
    EvaluationSection,
    MegatronSection,
    TelemetrySection,
    TrainerSection,
    WeightsSection,
)
from megatron_scalerl.recipe.sections import (
    ADAPTERS_LR,
    AUTO,
    MICRO_BATCH_MULTIPLE,
    AdvantagesSection,
    AlgorithmSection,
    CheckpointSection,
    CostSection,
    CurriculumSection,
    EnvironmentSection,
    FiltersSection,
    ForecastSection,
    InterruptionSection,
    LengthPenaltySection,
    LossSection,
    NonNegativeInt,
    OptimizerSection,
    PolicySection,
    PositiveInt,
    PromptsSection,
    RewardsSection,
    RolloutsSection,
    Section,
    SftSection,
    ValidationSection,
    section_of,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}")


def _checked_name(name: str) -> str:
    """Return `name` if a run, the run's folder and the run's Slurm job can have this name; else raise ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} is not allowed; take at most 100 letters, digits and . _ + = @ -")
    return name


TEACHER = "teacher-"
"""Prefix of the names of teachers' engines."""


class Recipe(Section):
    """The settings of one run."""

    name: Annotated[str, AfterValidator(_checked_name)]
    """Name of the run, of at most 100 letters, digits and `. _ + = @ -`; the run's folder is output_dir/name."""
    output_dir: str = "runs"
    """Folder that holds the folders of runs."""
    seed: NonNegativeInt = 1
    """Seed of the curriculum, of sampling and of interruption points."""
    steps: PositiveInt
    """Optimizer steps of the run."""
    download: bool = False
    """Fetch policy and prompts named org/name from the Hugging Face hub where the local cache lacks the files."""
    policy: PolicySection
    prompts: PromptsSection
    curriculum: CurriculumSection = CurriculumSection()
    rollouts: RolloutsSection = RolloutsSection()
    interruption: InterruptionSection = InterruptionSection()
    environment: Annotated[EnvironmentSection, BeforeValidator(section_of)] = EnvironmentSection()
    rewards: RewardsSection = RewardsSection()
    algorithm: Annotated[AlgorithmSection, BeforeValidator(section_of)] = AlgorithmSection()
    filters: FiltersSection = FiltersSection()
    advantages: AdvantagesSection = AdvantagesSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    megatron: MegatronSection = MegatronSection()
    engine: EngineSection = EngineSection()
    weights: WeightsSection = WeightsSection()
    validation: ValidationSection = ValidationSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    forecast: ForecastSection = ForecastSection()
    telemetry: TelemetrySection = TelemetrySection()
    cost: CostSection = CostSection()
    sft: SftSection = SftSection()

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        policy = data.get("policy")
        if isinstance(policy, PolicySection):
            policy = vars(policy)
        optimizer = data.get("optimizer", {})
        if isinstance(policy, Mapping) and policy.get("lora") is not None and isinstance(optimizer, Mapping):
            return {**data, "optimizer": {"lr": ADAPTERS_LR, **optimizer}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _sections_of_tasks(cls, data: Any) -> Any:
        """Complete a task's sections `environment` and `interruption` with the keys of the recipe's sections of that
        name."""
        prompts = data.get("prompts") if isinstance(data, Mapping) else None
        tasks = prompts.get("tasks") if isinstance(prompts, Mapping) else None
        if not isinstance(tasks, Mapping):
            return data
        filled = {}
        for name, task in tasks.items():
            filled[name] = task
            for key in {"environment", "interruption"} & (task.keys() if isinstance(task, Mapping) else set()):
                recipe_section = section_of(data.get(key, {}))
                task_section = section_of(task[key])
                if not (isinstance(recipe_section, Mapping) and isinstance(task_section, Mapping)):
                    continue
                if key == "environment" and "name" not in {**recipe_section, **task_section}:
                    raise ValueError(
                        f"prompts.tasks.{name}.environment.name is missing; name the class, as module:Class, or null "
                        "for single turns"
                    )
                filled[name] = {**filled[name], key: {**recipe_section, **task_section}}
        return {**data, "prompts": {**(prompts or {}), "tasks": filled}}

    def with_settings(self, **sections: Mapping[str, Any]) -> "Recipe":
        """A copy of the recipe with changed settings, which no validator checks. sections: name of a section ->
        changed settings."""
        changed = {name: getattr(self, name).model_copy(update=settings) for name, settings in sections.items()}
        return self.model_copy(update=changed)

    @property
    def adapters_alone(self) -> bool:
        """Whether weight updates send only the adapters to the engines: policy.lora with weights.adapters alone."""
        return self.policy.lora is not None and self.weights.adapters == "alone"

    @property
    def by_task(self) -> "list[Recipe]":
        """A copy of the recipe for each task, with the task's settings, in the order of the tasks' names. Without
        prompts.tasks: this recipe alone."""
        return [self.of_task(name) for name in sorted(self.prompts.tasks or {})] or [self]

    def of_task(self, name: str) -> "Recipe":
        """A copy of the recipe in which the settings of one task replace those of the recipe's sections."""
        task = (self.prompts.tasks or {})[name]
        values = {key: value for key, value in task if value is not None}
        prompts = {key: values[key] for key in values.keys() & PromptsSection.model_fields}
        rewards = {key: values[key] for key in values.keys() & RewardsSection.model_fields}
        interruption = task.interruption or self.interruption
        if interruption.enabled == AUTO:
            interruption = interruption.model_copy(update={"enabled": self.interruption.enabled})
        environment = task.environment or self.environment
        # the task has single turns, to which no limit of an episode applies
        if environment.name is None:
            environment = EnvironmentSection()
        recipe = self.with_settings(prompts={"tasks": None, **prompts}, rewards=rewards)
        return recipe.model_copy(update={"environment": environment, "interruption": interruption})

    @property
    def episodes(self) -> bool:
        """Whether any task has episodes, in which an environment answers the policy."""
        return any(recipe.environment.name is not None for recipe in self.by_task)

    @property
    def max_completion_tokens(self) -> int:
        """Longest possible completion, or episode after the prompt, without forced tokens (tokens)."""
        return max(recipe.environment.episode_tokens or recipe.max_turn_tokens for recipe in self.by_task)

    @property
    def max_turn_tokens(self) -> int:
        """Longest possible turn of the policy, without forced tokens (tokens)."""
        return self.interruption.thinking_tokens[1] + self.interruption.answer_tokens

    @property
    def length_penalty(self) -> LengthPenaltySection | None:
        """rewards.length_penalty with the defaults of max_tokens and cache_tokens filled in; None without a
        penalty."""
        penalty = self.rewards.length_penalty
        if penalty is None:
            return None
        longest = penalty.max_tokens or self.max_completion_tokens
        # by default a seventh of max_tokens, since the paper has max_tokens 14k and cache_tokens 2k
        return LengthPenaltySection(max_tokens=longest, cache_tokens=penalty.cache_tokens or max(1, longest // 7))

    def longest_sequence(self, phrase_tokens: int | None = None) -> int:
        """Longest possible prompt and completion, including the forced phrase and the end of sequence (tokens).

        phrase_tokens: length of the phrase and the closing tag in the policy's tokenizer. None, without a tokenizer:
        one token per byte, which no tokenizer exceeds. 0: the result is a lower bound.
        """
        if self.prompts.tasks:
            return max(recipe.longest_sequence(phrase_tokens) for recipe in self.by_task)
        forced = 0
        # auto counts as enabled: the recipe alone does not tell whether the policy thinks in tags
        if self.interruption.enabled:
            tag = self.prompts.think_end
            if tag == AUTO:
                tag = "</think>"
            if phrase_tokens is None:
                phrase_tokens = len((self.interruption.phrase + tag).encode())
            forced = phrase_tokens + 1  # 1 for the end of sequence
        return self.prompts.max_prompt_tokens + self.max_completion_tokens + forced

    @property
    def micro_batch_tokens(self) -> int:
        """Capacity of one packed micro-batch (tokens): trainer.micro_batch_tokens, else `longest_sequence`, rounded
        up to a multiple of MICRO_BATCH_MULTIPLE."""
        tokens = self.trainer.micro_batch_tokens
        return tokens or -(-self.longest_sequence() // MICRO_BATCH_MULTIPLE) * MICRO_BATCH_MULTIPLE

    @property
    def devices(self) -> int:
        """Number of devices of a run: trainer ranks plus the engines' devices; with engine.colocate trainer ranks
        alone."""
        if self.engine.colocate:
            return self.trainer.world_size
        return self.trainer.world_size + sum(self.engine_devices.values())

    @property
    def engine_devices(self) -> dict[str, int]:
        """Engine's name -> number of devices, for every engine that a run starts; the teachers' engines come last."""
        devices = {f"engine-{index}": self.engine.devices_per_engine for index in range(self.engine.count)}
        return devices | {
            TEACHER + name: teacher.devices for name, teacher in sorted(self.algorithm.teachers.items())
        }

    @property
    def teacher_devices(self) -> int:
        """Number of devices of all teachers' engines together."""
        return sum(teacher.devices for teacher in self.algorithm.teachers.values())

    def of_engine(self, name: str) -> "Recipe":
        """The recipe that an engine is started with: for a teacher's engine, a copy with the teacher's policy,
        devices and vLLM options."""
        if not name.startswith(TEACHER):
            return self
        teacher = self.algorithm.teachers[name.removeprefix(TEACHER)]
        # vLLM needs room for one token after the scored text, and plans no memory for a prompt's logits
        longest = self.engine.vllm.get("max_model_len", self.longest_sequence()) + 1
        chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048}
        options = {"max_model_len": longest, **chunks, **teacher.vllm}
        return self.with_settings(
            policy={"path": teacher.path, "lora": None},
            engine={"vllm": options, "devices_per_engine": teacher.devices},
            rollouts={"routing_replay": False},
        )

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.output_dir) / self.name

    @model_validator(mode="after")
    def _agree(self) -> "Recipe":
        r = self.rollouts
        if r.group_size == 1:
            raise ValueError(
                "rollouts.group_size: 1 is too small: an advantage is a reward less its group's mean, which is 0 in "
                "a group of one; use at least 2"
            )
        if self.rewards.correct <= self.rewards.incorrect:
            raise ValueError(
                f"rewards.correct: {self.rewards.correct:g} is not greater than rewards.incorrect "
                f"{self.rewards.incorrect:g}, so correct answers would not be learned; raise rewards.correct"
            )
        if r.max_in_flight < r.group_size:
            raise ValueError(
                f"rollouts.max_in_flight: {r.max_in_flight} is less than one group; use at least "
                f"group_size {r.group_size}"
            )
        if self.policy.adapter is not None and self.policy.lora is None:
            raise ValueError(
                f"policy.adapter: {self.policy.adapter} is set, but policy.lora is not; set policy.lora to the rank, "
                "alpha and targets of its adapter_config.json"
            )
        if self.policy.megatron_path is not None and self.policy.lora is not None:
            raise ValueError(
                "policy.megatron_path cannot be set with policy.lora: engines and exports read the frozen weights "
                "from policy.path; `megatron-scalerl convert to-hf` makes a folder for policy.path"
            )
        _check_tasks(self)
        for recipe in self.by_task:
            check_tags(recipe)
            _check_environment(recipe)
            penalty = recipe.length_penalty
            if penalty is not None and (penalty.cache_tokens or 0) > (penalty.max_tokens or 0):
                raise ValueError(
                    f"rewards.length_penalty.cache_tokens: {penalty.cache_tokens} is more than max_tokens "
                    f"{penalty.max_tokens}"
                )
        _check_evaluation(self)
        _check_colocation(self)
        _check_kl(self)
        _check_teachers(self)
        if self.engine.min_engines > self.engine.count:
            raise ValueError(
                f"engine.min_engines: {self.engine.min_engines} is more than the "
                f"{self.engine.count} engines of engine.count"
            )
        # the schema does not check options of Megatron-Core; only the agreement with the world size is checked here
        check_world(sizes_of(self.megatron.parallel), self.trainer.world_size)
        if r.routing_replay and r.kv_cache == "keep":
            raise ValueError("rollouts.routing_replay needs rollouts.kv_cache recompute; rollouts.kv_cache is keep")
        return self


def check_tags(recipe: Recipe) -> None:
    """Raises ValueError where thinking is opened or interrupted, and no tag closes thinking."""
    opens = recipe.prompts.think_start.strip() not in ("", AUTO)
    if not recipe.prompts.think_end.strip() and (opens or recipe.interruption.enabled is True):
        raise ValueError(
            "prompts.think_end is empty, but a tag has to close thinking. For a policy that thinks in no tags "
            "set prompts.think_start to an empty text as well, and interruption.enabled to false"
        )


def _check_environment(recipe: Recipe) -> None:
    """Raises ValueError for settings that an environment excludes, and for episodes shorter than a turn."""
    section = recipe.environment
    if section.name is None:
        return
    if recipe.rollouts.deterministic:
        raise ValueError(
            "rollouts.deterministic cannot be used with an environment, because the time of its answers decides "
            "which requests share a batch; set rollouts.deterministic to false"
        )
    if recipe.prompts.prompt_template != "{prompt}":
        raise ValueError(
            "prompts.prompt_template cannot be used with an environment: its reset method writes the first "
            "messages. Put the template's text there"
        )
    if section.thinking_tokens is not None and recipe.interruption.enabled is False:
        raise ValueError(
            "environment.thinking_tokens needs interruption.enabled, which ends thinking; set that key to true"
        )
    if recipe.max_completion_tokens < recipe.max_turn_tokens:
        raise ValueError(
            f"environment.episode_tokens: {section.episode_tokens} is less than the {recipe.max_turn_tokens} tokens "
            "of a turn (interruption.thinking_tokens[1] + interruption.answer_tokens); raise it, or shorten turns"
        )


def _check_evaluation(recipe: Recipe) -> None:
    """Raises ValueError if evaluation.every_steps is set without the files and settings that evaluations need."""
    section = recipe.evaluation
    rollouts = recipe.rollouts
    if not section.every_steps:
        return
    if not section.files:
        raise ValueError(
            "evaluation.files is empty, but evaluation.every_steps asks for evaluations; name at least one file"
        )
    if recipe.engine.count < 2 or rollouts.one_by_one:
        raise ValueError(
            "evaluation.every_steps needs engine.count of at least 2, rollouts.schedule pipeline and "
            f"rollouts.deterministic false; they are {recipe.engine.count}, {rollouts.schedule} and "
            f"{str(rollouts.deterministic).lower()}"
        )


def _check_colocation(recipe: Recipe) -> None:
    """Raises ValueError for settings with which engine.colocate, engines on the trainer's devices, does not work."""
    engine = recipe.engine
    weights = recipe.weights
    if not engine.colocate:
        return
    if recipe.trainer.world_size != engine.count * engine.devices_per_engine:
        raise ValueError(
            f"engine.colocate: engines take {engine.count} x {engine.devices_per_engine} devices (engine.count x "
            f"engine.devices_per_engine), the trainer {recipe.trainer.world_size}; both have to be equal"
        )
    if weights.transport == "nccl" or weights.deltas != "off":
        raise ValueError(
            f"weights.transport: {weights.transport} with weights.deltas {weights.deltas} does not work with "
            "engine.colocate; use auto and off (NCCL refuses two processes on one device, and changes are not sent "
            "through host memory)"
        )
    for key in ("kv_cache_memory_bytes", "gpu_memory_utilization"):
        if key not in engine.vllm:
            raise ValueError(
                f"engine.vllm.{key} is missing; engine.colocate needs it, because the device's free memory, "
                "which vLLM would measure, changes with the trainer"
            )


def _check_kl(recipe: Recipe) -> None:
    """Raises ValueError for algorithm.kl without a second policy, or with settings that exclude algorithm.kl."""
    section = recipe.algorithm.kl
    if section is None:
        return
    if section.to == "base" and recipe.policy.lora is None:
        raise ValueError(
            "algorithm.kl.to is base (the policy without adapters), but policy.lora is not set; set algorithm.kl.to "
            "to a policy's folder"
        )
    stages = sizes_of(recipe.megatron.parallel).pp
    if stages > 1 or not recipe.trainer.loss_in_chunk or recipe.rollouts.routing_replay:
        raise ValueError(
            "algorithm.kl needs one pipeline stage (megatron.parallel.pipeline_model_parallel_size 1), "
            "trainer.loss_in_chunk true and rollouts.routing_replay false"
        )


def _check_teachers(recipe: Recipe) -> None:
    """Raises ValueError for teachers that the algorithm does not use, for a task without exactly one teacher, and for
    settings that exclude teachers."""
    teachers = recipe.algorithm.teachers
    if not teachers:
        if recipe.algorithm.name == "distilled":
            raise ValueError("algorithm.teachers is empty; name the folder of a teacher for algorithm.name distilled")
        return
    if recipe.algorithm.name == "scalerl":
        raise ValueError("algorithm.teachers has no effect in scalerl; set algorithm.name to distilled")
    if recipe.rollouts.temperature != 1 or recipe.rollouts.deterministic or recipe.engine.colocate:
        raise ValueError(
            "algorithm.teachers needs rollouts.temperature 1 (vLLM scores prompts at 1, whatever a request says), "
            "rollouts.deterministic false and engine.colocate false"
        )
    tasks = [*(recipe.prompts.tasks or {""})]
    for name, teacher in teachers.items():
        for task in teacher.tasks:
            if task not in tasks:
                raise ValueError(f"algorithm.teachers.{name}.tasks: {task} is not in prompts.tasks")
    for task in tasks:
        of_task = [name for name, teacher in teachers.items() if task in (teacher.tasks or tasks)]
        if len(of_task) != 1:
            raise ValueError(
                f"algorithm.teachers: the task {task!r} has the teachers {of_task}; a task needs exactly one"
            )


def _check_tasks(recipe: Recipe) -> None:
    """Raises ValueError unless either prompts.path or prompts.tasks is set, and if tasks have settings that a run
    cannot mix."""
    prompts = recipe.prompts
    if not recipe.episodes and recipe.environment != EnvironmentSection():
        raise ValueError("environment.name is missing; name the class, as module:Class")
    if prompts.path is None and prompts.tasks is None:
        raise ValueError("prompts.path is missing; name a file of prompts, or set prompts.tasks")
    if prompts.tasks is not None:
        if prompts.path is not None:
            raise ValueError(f"prompts.path ({prompts.path}) and prompts.tasks are both set; remove one key")
        if not prompts.tasks:
            raise ValueError("prompts.tasks is empty; name at least one task")
        if prompts.held_out_path is not None:
            raise ValueError(
                f"prompts.held_out_path: {prompts.held_out_path} has no effect with prompts.tasks; set "
                "prompts.tasks.NAME.held_out_path"
            )
    if any(task.interruption.phrase != recipe.interruption.phrase for task in recipe.by_task):
        raise ValueError(
            "prompts.tasks.NAME.interruption.phrase differs from interruption.phrase, but all tasks have to use the "
            "same phrase, which the warm start masks; delete the task's key"
        )
    rewards = recipe.rewards
    tasks = [(task.verifier, task.memory_mb) for task in (prompts.tasks or {}).values()] or [(None, None)]
    if any((name or rewards.verifier) == "code" and not (memory or rewards.memory_mb) for name, memory in tasks):
        raise ValueError("rewards.memory_mb is null, but the verifier `code` needs a memory limit; set a number")
