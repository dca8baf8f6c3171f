"""The sections of a recipe. Each field defines a setting: unit, allowed range, and the default, set here alone.

"The paper" is Khatri et al. 2025, arXiv 2510.13786. Where a default departs from the paper, or the paper specifies
none, the docstring of the field says so. The sections about the processes of a run are in `recipe.process_sections`.
"""

from datetime import date
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MICRO_BATCH_MULTIPLE = 128
"""trainer.micro_batch_tokens, if not set, is rounded up to a multiple of this number (tokens)."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def section_of(value: object) -> object:
    """Turn a name alone, such as `environment: module:Class`, into a section with this name."""
    if isinstance(value, str):
        return {"name": value}
    return value


class Section(BaseModel):
    """A section of the recipe: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


PAPER_PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. "
"""The phrase of section 4 of the paper without the closing think tag, which is appended when the phrase is forced.
The paper prints the trailing space before the tag."""


AUTO: Final = "auto"
"""Value of a setting that `prompts.chat.Chat.settled` replaces with a choice by tokenizer and prompts."""


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer of attention or MLP, by the name in Hugging Face's format."""
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


class LoraSection(Section):
    """Adapters (LoRA): the policy's weights W are frozen, and beside each W two small matrices A and B are trained.

    A linear layer computes W x + alpha / rank B A x. The defaults are from Schulman et al., "LoRA Without Regret"
    (2025), unless the setting says otherwise.
    """

    rank: Annotated[PositiveInt, Field(le=512)] = 32
    """Rows of each A and columns of each B, at most vLLM's 512. Schulman et al. specify no rank: in RL, rank 1 learns
    as fast."""
    alpha: PositiveFloat = 32.0
    """The product B A is multiplied by alpha / rank."""
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = PROJECTIONS
    """Linear layers with an adapter, also in experts. Embedding, head and routers have no adapters."""


class PolicySection(Section):
    """The policy that is trained."""

    path: str
    """Hugging Face folder of the policy to start from (config, safetensors, tokenizer), or the policy's name on the
    hub, org/name or org/name@revision (docs/prompts.md)."""
    digest: str | None = None
    """Digest of the folder's configuration, tokenizer and template, of the weight files' names, sizes and last bytes,
    and of the whole `adapter`. null: filled in when a run starts. A resume with another policy is refused."""
    megatron_path: str | None = None
    """Converted checkpoint (docs/checkpoints.md) whose weights the trainer starts from. null: weights of path."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and activations in trainer and engines. bfloat16: the trainer also keeps fp32 weights."""
    logits: Literal["fp32", "model"] = "fp32"
    """Precision of the logit projection in trainer and engines (section 3.2 of the paper: fp32). `model`: the
    precision of policy.dtype, for the ablation."""
    lora: LoraSection | None = None
    """Train adapters instead of the weights; {}: with the defaults. null: train the weights."""
    adapter: str | None = None
    """PEFT folder with the adapters to start from, with the rank, alpha and targets of `lora`. null: new adapters."""


class InterruptionSection(Section):
    """Forced length interruption (section 2 of the paper).

    The paper specifies an output of 14,336 tokens, 12,288 of thinking and 2,048 of answer, and that thinking is
    interrupted at 10k to 12k tokens. The paper does not specify the budget of an answer after a natural end of
    thinking: see `after_natural_end`.
    """

    enabled: bool | Literal["auto"] = AUTO
    """Whether thinking is interrupted; if not, thinking and answer share thinking_tokens[1] + answer_tokens tokens.
    auto: true for a policy that thinks in tags, false for a policy without tags."""
    thinking_tokens: tuple[NonNegativeInt, NonNegativeInt] = (10240, 12288)
    """Range of the interruption point, both ends included (tokens; section 2 of the paper: [10k, 12k]). Not specified
    by the paper: the point is drawn uniformly per completion from the run's seed."""
    phrase: str = PAPER_PHRASE
    """Text that is forced when thinking reaches the interruption point. The closing think tag follows immediately, so
    a space before the tag has to be the phrase's last character. Forced tokens are masked out of the loss."""
    answer_tokens: PositiveInt = 2048
    """Budget after a forced end of thinking (tokens; section 2 of the paper: 2,048)."""
    after_natural_end: Literal["rest_of_budget", "answer_tokens"] = "rest_of_budget"
    """Budget after a natural end of thinking: the rest of thinking_tokens[1] + answer_tokens for the whole
    completion, or answer_tokens as after a forced end. Not specified by the paper."""

    @model_validator(mode="after")
    def _range(self) -> "InterruptionSection":
        start, end = self.thinking_tokens
        if not 1 <= start <= end:
            raise ValueError(f"thinking_tokens is [{start}, {end}]; it has to be [low, high] with 1 <= low <= high")
        return self


class EnvironmentSection(Section):
    """Episodes of several turns, in place of a single answer to each prompt (docs/environments.md).

    `environment: module:Class` alone sets the name. The paper has one turn.
    """

    name: str | None = None
    """`module:Class` with reset(row) and step(response), or with run(row, agent); `verifiers:NAME`, an environment of
    that library (docs/environments.md). null: single turns."""
    thinking: Literal["keep", "strip"] = "keep"
    """Thinking of earlier turns. keep: the context keeps thinking, whatever the chat template does. strip: where the
    chat template drops thinking, the context does, too, and the episode forks into several samples there."""
    max_turns: PositiveInt = 16
    """Number of turns of the policy, or of requests of an agent, after which an episode is truncated."""
    turn_tokens: PositiveInt | None = None
    """Token limit of one turn of the policy. null: the rest of the episode's tokens."""
    episode_tokens: PositiveInt | None = None
    """Token limit of an episode after the first prompt, policy and environment together. For an agent: limit of each
    conversation beyond the tokens of the row's prompt. null: the length of a completion without an environment,
    interruption.thinking_tokens[1] + answer_tokens."""
    thinking_tokens: PositiveInt | None = None
    """Limit of thinking in an episode (tokens), besides interruption.thinking_tokens of a turn. null: no limit."""
    timeout_s: PositiveFloat = 60.0
    """Wall-clock limit of one reset or step, or of an agent's time without a request (s)."""
    episode_timeout_s: PositiveFloat | None = None
    """Wall-clock limit of an episode (s), generation included, after which the episode is truncated: a limit favors
    short episodes. null: no limit."""
    workers: PositiveInt | None = None
    """Number of processes, each with many episodes. null: one for each CPU of the controller, at most 8."""
    memory_mb: PositiveInt | None = None
    """Limit of each process's address space (MiB). null: no limit."""
    variables: tuple[str, ...] = ()
    """Names of environment variables to pass to the processes, as rewards.variables."""


TaskName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
"""Name of a task, in metrics and in the journal."""


class TaskSection(Section):
    """A task of a mixture. A key that is not set has the value of `prompts`, `rewards`, or the recipe's section."""

    path: str
    """The task's training prompts, as prompts.path."""
    weight: PositiveFloat
    """The task's share of the drawn prompts, relative to other tasks' shares."""
    split: str | None = None
    """prompts.split for this task."""
    preset: str | None = None
    """prompts.preset for this task."""
    prompt_column: str | None = None
    """prompts.prompt_column for this task."""
    answer_column: str | None = None
    """prompts.answer_column for this task."""
    prompt_template: str | None = None
    """prompts.prompt_template for this task."""
    system: str | None = None
    """prompts.system for this task."""
    held_out_path: str | None = None
    """prompts.held_out_path for this task; a mixture has no held_out_path for all tasks."""
    held_out: NonNegativeInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    """prompts.held_out for this task's prompts."""
    verifier: str | None = None
    """rewards.verifier for this task. Each task has separate verifier processes."""
    workers: PositiveInt | None = None
    """rewards.workers for this task."""
    concurrency: PositiveInt | None = None
    """rewards.concurrency for this task."""
    cpu_s: PositiveFloat | None = None
    """rewards.cpu_s for this task."""
    timeout_s: PositiveFloat | None = None
    """rewards.timeout_s for this task."""
    memory_mb: PositiveInt | None = None
    """rewards.memory_mb for this task."""
    file_mb: NonNegativeInt | None = None
    """rewards.file_mb for this task."""
    environment: Annotated[EnvironmentSection | None, BeforeValidator(section_of)] = None
    """`environment` for this task: keys set here replace the recipe's keys. {name: null}: single turns."""
    interruption: InterruptionSection | None = None
    """`interruption` for this task: keys set here replace the recipe's keys."""


class PromptsSection(Section):
    """Where prompts come from, and how prompts are rendered as text."""

    path: str | None = None
    """Training prompts: a file (JSON, JSON lines, CSV, Parquet), a Hugging Face dataset folder, or a dataset's name
    on the hub (docs/prompts.md). This or `tasks` is set."""
    tasks: dict[TaskName, TaskSection] | None = None
    """A mixture of tasks instead of `path`: name -> the task's prompts, weight and verifier (docs/tasks.md). A key
    that a task does not set has the value of this section or of `rewards`."""
    split: str | None = None
    """Split to read from a dataset folder with several splits. null: the folder has one split."""
    preset: str | None = None
    """Layout of the file, from the list in docs/prompts.md. null: detected from the file's columns."""
    prompt_column: str | None = None
    """Column with the problem: a text or a list of messages; a.b is b within a. null: the layout's column."""
    answer_column: str | None = None
    """Column with the reference answer, passed to the verifier. null: the layout's column."""
    prompt_template: str = "{prompt}"
    """The prompt's text, in which `{prompt}` stands for the problem's text."""
    chat_template: bool | Literal["auto"] = AUTO
    """Apply the tokenizer's chat template: the text of prompt_template becomes the user's message. auto: for rows of
    messages, any template; for rows of text, a template that ends an answer with an end token of the policy. Required
    for rows with several messages, whose last message prompt_template renders."""
    system: str | None = None
    """System message, in place of the system message in the file. Requires chat_template."""
    template_arguments: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking. A name that is not in the template is refused."""
    template_date: date = date(2024, 7, 26)
    """Date that a chat template with today's date gets (Llama 3.2, gpt-oss), so that a prompt has the same tokens
    every day. The default is the date in Llama 3.2's template."""
    digest: str | None = None
    """Digest of every prompt's id and tokens. null: filled in when a run starts. A run whose prompts have another
    digest is refused, also at a resume: a file, the tokenizer, the chat template or rendering code has changed."""
    add_bos: bool = True
    """Prepend the tokenizer's beginning-of-sequence token, if any, to prompts that do not start with it."""
    think_start: str = AUTO
    """Tag that opens thinking; appended to the rendered prompt as a prefill. Empty: no prefill. auto: the tag of the
    chat template, unless the policy only inherited the template, else of the warm start's examples, else none."""
    think_end: str = AUTO
    """Tag that closes thinking; the answer is the text after the tag. Empty: the policy thinks in no tags, and the
    whole completion is the answer. auto: as think_start."""
    max_prompt_tokens: PositiveInt = 2048
    """Longer prompts are skipped and reported (tokens; section 2 of the paper: 2,048)."""
    held_out_path: str | None = None
    """File with the validation prompts. null: validation prompts are split off `path`."""
    held_out: NonNegativeInt | Annotated[float, Field(gt=0, lt=1)] = 1000
    """Number of prompts held out of `path` by hash (the paper: 1,000), or a fraction below 1; of each task's prompts
    in a mixture. 0 requires `held_out_path` or no validation."""


class CurriculumSection(Section):
    """Order of the training prompts."""

    no_positive_resampling: Share | None = 0.9
    """A prompt whose latest group has at least this pass rate is not drawn in later epochs (section 3.2 of the
    paper: 0.9). null: uniform resampling. Not specified by the paper: only the latest group counts."""
    max_epochs: PositiveInt | None = None
    """The run ends after this many passes over the prompts. null: no limit."""


class RolloutsSection(Section):
    """The sampling of completions, and the bound on staleness."""

    groups_per_batch: PositiveInt = 48
    """Prompts per optimizer step, before filtering (the paper: 48)."""
    group_size: PositiveInt = 16
    """Completions per prompt (the paper: 16)."""
    schedule: Literal["pipeline", "ppo_off_policy"] = "pipeline"
    """Order of generation and training (section 3.1 of the paper: pipeline). pipeline: PipelineRL-k, both at once.
    ppo_off_policy: PPO-off-policy-k, one after the other. One version of the policy generates updates_per_phase
    batches, which are then trained on one by one. The engines get the weights after the last batch, and validations
    run between the phases."""
    updates_per_phase: PositiveInt = 8
    """ppo_off_policy: k, the batches of groups_per_batch prompts that one version of the policy generates. The paper
    (section 3.1) runs 8, and 1 for synchronous training. pipeline: there are no phases; leave the default."""
    max_staleness_steps: NonNegativeInt = 8
    """No batch contains a completion whose first token is more than this many optimizer steps old. pipeline: k of
    PipelineRL-k (the paper: 8). 0: synchronous training. ppo_off_policy: the bound is updates_per_phase - 1, and this
    value must not be less."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature, in vLLM's range. Not specified by the paper. Trainer and engines both divide logits by
    the temperature; the warm start does not."""
    max_in_flight: PositiveInt = 256
    """Maximum number of concurrent completions per engine; at least group_size."""
    decoders: PositiveInt | None = None
    """Processes that decode the engines' responses. null: one for each of the controller's CPUs, at most 4."""
    deterministic: bool = False
    """Submit requests in rounds, so that on CPUs an interrupted and resumed run has the same bits as an uninterrupted
    run. Requires max_staleness_steps 0, or the schedule ppo_off_policy. Slower: validation, probe and generation come
    one after another, and a round starts only when every engine that is not given up serves."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """KV cache of running completions at a weight update: keep, as in PipelineRL, or recompute."""
    routing_replay: bool = False
    """Mixture-of-experts policies: the trainer routes each token to the experts that the engine chose. Requires GPUs
    and kv_cache recompute: vLLM reports the experts only in the second model runner, and each weight update has to
    reset the prefix cache."""

    @property
    def batches_per_update(self) -> int:
        """Batches trained between two weight updates of the engines: updates_per_phase for ppo_off_policy, else 1."""
        return self.updates_per_phase if self.schedule == "ppo_off_policy" else 1

    @property
    def one_by_one(self) -> bool:
        """True if no group is started until the validation that follows a weight update has ended."""
        return self.deterministic or self.schedule == "ppo_off_policy"

    @property
    def staleness_bound(self) -> int:
        """Highest number of optimizer steps between a completion's first token and training."""
        return self.max_staleness_steps if self.schedule == "pipeline" else self.updates_per_phase - 1

    @model_validator(mode="after")
    def _bounded_phases(self) -> "RolloutsSection":
        default = type(self).model_fields["updates_per_phase"].default
        if self.schedule == "pipeline" and self.updates_per_phase != default:
            raise ValueError(
                f"updates_per_phase: {self.updates_per_phase} has no effect with schedule pipeline, where "
                f"max_staleness_steps limits staleness; leave updates_per_phase at {default}"
            )
        if self.batches_per_update > self.max_staleness_steps + 1:
            raise ValueError(
                f"updates_per_phase: {self.updates_per_phase} is more than max_staleness_steps "
                f"{self.max_staleness_steps} + 1 (the last batch of a phase is updates_per_phase - 1 steps old)"
            )
        return self

    @model_validator(mode="after")
    def _deterministic(self) -> "RolloutsSection":
        overlaps = self.schedule == "pipeline" and self.max_staleness_steps > 0
        if self.deterministic and (overlaps or self.routing_replay):
            values = f"{self.max_staleness_steps} and {str(self.routing_replay).lower()}"
            raise ValueError(f"deterministic needs max_staleness_steps 0 and routing_replay false; they are {values}")
        return self


class LengthPenaltySection(Section):
    """The length penalty of section 3.8 of the paper, added to the reward of correct completions:
    clip((max_tokens - length) / cache_tokens - 1, -1, 0). Length: sampled tokens (not specified by the paper)."""

    max_tokens: PositiveInt | None = None
    """L_max: length from which a correct completion loses 1 (tokens; the paper: 14k). null: the longest completion,
    interruption.thinking_tokens[1] + answer_tokens, which is 14,336 with the paper's numbers."""
    cache_tokens: PositiveInt | None = None
    """L_cache: the penalty grows over this many tokens before max_tokens (the paper: 2k). null: a seventh of
    max_tokens, as in the paper."""


class RewardsSection(Section):
    """The scoring of completions."""

    verifier: str = "math"
    """`math` (math-verify on the text after thinking), `code` (unit tests in a sandbox, docs/tasks.md) or
    `module:function` for a custom verifier. The result must depend on the arguments only: identical text, reference,
    question and other columns are checked once."""
    correct: float = 1.0
    """Reward of an accepted answer (the paper: +1)."""
    incorrect: float = -1.0
    """Reward of any other completion (the paper: -1)."""
    length_penalty: LengthPenaltySection | None = None
    """Penalty on the length of correct completions, the paper's alternative to interruptions; {}: with default
    limits. Pass rates and no-positive-resampling depend on correctness alone. The rewards of a group whose
    completions are all correct may differ by the penalty: the zero-variance filter keeps such a group. null: no
    penalty."""
    workers: PositiveInt | None = None
    """Number of verifier processes. null: one for each CPU available to the controller, at most 8."""
    concurrency: PositiveInt = 64
    """Largest number of concurrent checks, over all processes, of a verifier that is a coroutine function
    (docs/tasks.md). Checks that are repeated after the death of a process are not counted."""
    cpu_s: PositiveFloat = 2.0
    """CPU time limit of one check (s). Beyond the limit the worker is killed and the completion is wrong (`timeout`).
    CPU time does not depend on the load of the machine. n different answers that all exceed the limit take
    n (cpu_s + 0.5) / workers seconds: 768 answers take 16 minutes with 2 workers, 4 with 8. code: limit of each run
    of the program."""
    timeout_s: PositiveFloat = 60.0
    """Wall-clock limit of one check (s), for a verifier that waits for something; beyond the limit as for cpu_s.
    code: limit of all runs of the program together."""
    memory_mb: PositiveInt | None = 1024
    """Address space that one check may add to the worker (MiB); an answer that needs more is wrong (`memory`). The
    math verifier starts with 60 MiB and a normal answer adds less than 40. null: no limit, for a verifier that starts
    programs that reserve much address space, such as java or node. code: limit of the program, null is refused."""
    file_mb: NonNegativeInt = 0
    """Maximum size of a file that a verifier writes (MiB). 0: a verifier cannot write files. code: limit of the
    program, which has a folder of four times this size."""
    variables: tuple[str, ...] = ()
    """Names of environment variables to pass to a custom verifier. Variables for paths, home, locale and library
    search alone are passed by default, so that tokens and keys stay with the controller."""
    truncated: Literal["exclude", "wrong"] = "exclude"
    """Exclude truncated completions from loss and advantages, or keep such completions with the incorrect reward.
    Pass rates always count truncated completions as wrong. (Inferred from the paper's "effective batch size (after
    excluding truncated samples)".)"""


class KLSection(Section):
    """The divergence from a second policy, exact over the vocabulary, added to the loss (docs/algorithms.md)."""

    to: str = "base"
    """base: the policy without adapters (policy.lora). Else the Hugging Face folder of a frozen policy with the same
    tokenizer, which every rank holds beside the policy: a teacher, or the policy at the start of the run."""
    coefficient: PositiveFloat
    """Coefficient of the divergence in the loss, in addition to each token's weight."""
    direction: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(policy || second), as in DeepSeekMath's GRPO (arXiv 2402.03300, eq. 3) and on-policy distillation.
    forward: KL(second || policy)."""


class TeacherSection(Section):
    """A fixed policy, in a separate engine, whose log-probabilities of the sampled tokens the algorithm uses."""

    path: str
    """Hugging Face folder, with the policy's tokenizer."""
    tasks: list[str] = []
    """Names of prompts.tasks whose completions this teacher scores; empty: all. Each task has one teacher."""
    devices: PositiveInt = 1
    """Devices of the teacher's engine."""
    vllm: dict[str, Any] = {}
    """Options of vLLM, in place of engine.vllm; set tensor_parallel_size for several devices. The logits of a prompt
    are computed for max_num_batched_tokens at once, 2,048 by default, in memory that vLLM does not measure."""


class AlgorithmSection(Section):
    """The algorithm: `name` alone, or a mapping with the name and the algorithm's own settings."""

    name: str = "scalerl"
    """scalerl, whose settings are the sections advantages, filters, loss and rewards.truncated; distilled, which
    learns from `teachers`; or `module:Class` of your own, a subclass of `megatron_scalerl.algorithms.ScaleRL`."""
    settings: dict[str, Any] = {}
    """Fields of the class (distilled: gap_weight, reward_weight), which may also stand beside `name`."""
    kl: KLSection | None = None
    """A divergence added to the loss, for groups that `filters` keep: for distillation, set filters.zero_variance to
    false. null: no divergence."""
    teachers: dict[Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,64}$")], TeacherSection] = {}
    """Teachers by name: engines that no weight update reaches, and whose device-hours the ledger has as `teacher`.
    For `distilled`, and classes of yours that are subclasses of `distilled`."""

    @model_validator(mode="before")
    @classmethod
    def _settings_beside_the_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name", "scalerl") == "scalerl":
            return data
        settings = {key: value for key, value in data.items() if key not in cls.model_fields}
        section = {key: value for key, value in data.items() if key not in settings}
        return section | {"settings": (data.get("settings") or {}) | settings}


class AdvantagesSection(Section):
    """The computation of advantages from rewards."""

    normalize: Literal["batch", "prompt", "none"] = "batch"
    """Scope of the standard deviation that divides the group-centered rewards (section 3.2 of the paper: batch). Not
    specified by the paper: one value per completion, over the completions that remain after filtering."""


class FiltersSection(Section):
    """The filters of groups before training."""

    zero_variance: bool = True
    """Drop groups whose rewards are all equal, without refill (section 3.2 of the paper). A length penalty makes
    rewards differ among correct completions."""
    max_empty_batches: PositiveInt = 50
    """The run gives up after this many consecutive batches that are empty after filtering (exit code 1)."""


class LossSection(Section):
    """The loss, and the aggregation of token losses."""

    name: str = "cispo"
    """cispo, dapo, grpo, gspo (section 3.2 of the paper: cispo), or `module:function` of your own."""
    max_is_weight: PositiveFloat = 5.0
    """cispo: largest importance weight (trainer over engine probability). The limit is the weight, not the distance
    from 1. (Inferred: the paper's CISPO curve is the "clip = 5" curve.)"""
    clip_low: NonNegativeFloat | None = None
    """dapo, grpo, gspo: lower clip distance from 1. null: the default of the loss (0.2; gspo 3e-3)."""
    clip_high: NonNegativeFloat | None = None
    """dapo, grpo, gspo: upper clip distance from 1. null: default of the loss (dapo 0.26, grpo 0.2, gspo 5e-3)."""
    options: dict[str, Any] = {}
    """Further arguments of a loss of your own, by name."""
    reduction: Literal["prompt_mean", "sequence_mean", "token_mean"] = "prompt_mean"
    """Aggregation of token losses (section 3.2 of the paper: prompt_mean)."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which the loss differs from the loss function's own defaults, by name."""
        options = self.model_dump(include={"max_is_weight", "clip_low", "clip_high"}, exclude_defaults=True)
        return self.options | options


ADAPTERS_LR = 5e-6
"""The default of optimizer.lr with policy.lora."""


class OptimizerSection(Section):
    """AdamW as in section 2 of the paper."""

    lr: NonNegativeFloat = 5e-7
    """Constant learning rate after the warm-up (the paper: 5e-7). With policy.lora the default is 5e-6, ten times the
    rate for weights (Schulman et al., "LoRA Without Regret", 2025)."""
    warmup_steps: NonNegativeInt = 100
    """Linear warm-up (optimizer steps; the paper: 100). 0: no warm-up."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW betas. Not specified by the paper."""
    eps: PositiveFloat = 1e-15
    """AdamW epsilon (the paper: 1e-15)."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay on matrices (the paper: 0.01)."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm. 0: no clipping. Not specified by the paper."""


class ValidationSection(Section):
    """Mean@k on held-out prompts."""

    every_steps: NonNegativeInt = 100
    """Optimizer steps between validations, from step 0 (the paper: 100). ppo_off_policy: a validation that is due
    within a phase is made at the end of the phase, of the version that the engines get then. 0: no validation."""
    prompts: PositiveInt | None = None
    """Number of held-out prompts to use, of each task in a mixture. null: all held-out prompts."""
    generations: PositiveInt = 16
    """Completions per prompt, the k of mean@k (the paper: 16)."""
    end_generations: PositiveInt | None = None
    """Completions per prompt at step 0, which fixes the initial value of the forecast, and at the end of the run. The
    reported gain is the difference of these two validations. null: as `generations`."""
    engine: Literal["held", "all"] = "held"
    """Engines that generate a validation. held: one engine, which keeps the policy version until the end, while the
    trainer and all other engines go on. all: every engine, and the next weight update waits for the validation.
    With a single engine, deterministic or ppo_off_policy, and at the start and end of a run, all holds."""
    seed: NonNegativeInt = 20251013
    """Seed of sampling and of interruption points."""
    audit: str | None = AUTO
    """A second judge of the answers that the verifier accepts, in validations and in training: the run records the
    share that the judge confirms, and warns of a low share. The judge changes no reward. auto: for `math` a judge
    that computes nothing (docs/tasks.md), else none. `module:function`: as rewards.verifier. null: no judge."""
    fresh_seeds: bool = True
    """Draw sampling seeds and interruption points anew at every validation, so that the noise of validations is
    independent. False: all validations have the same seed and point for completion j of prompt i, so that close
    validations differ by the policy alone, and err in the same direction."""


class CheckpointSection(Section):
    """The schedule of checkpoints, and the files to keep."""

    every_steps: NonNegativeInt = 100
    """Optimizer steps between checkpoints. 0: only at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    async_save: bool = False
    """Stop the trainer only to copy the state to host memory; files are written while the trainer goes on. The
    checkpoint is committed between two steps, once all ranks have written. Each rank needs host memory for the rank's
    share of the checkpoint."""
    rollouts: Literal["keep", "resume"] = "keep"
    """Rollouts that stay on the disk. keep: all. resume: only rollouts that a kept checkpoint needs for a resume."""


class ForecastSection(Section):
    """The forecast in the final report."""

    fit_from_steps: NonNegativeInt = 0
    """Validations before this optimizer step are excluded from the fit (the paper: before 1.5k GPU-hours)."""
    fit_until_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the run that the fit uses (the paper: half of the budget)."""


class CostSection(Section):
    """Prices, for the costs that `plan`, `report`, the page and `submit --status` print."""

    price_per_device_hour: PositiveFloat | None = None
    """Price of one GPU for an hour (`currency`); on CPUs, of one process. null: no costs are printed."""
    currency: str = "USD"
    """Currency that is printed after every amount."""


class SftSection(Section):
    """The warm start (`megatron-scalerl sft`)."""

    path: str | None = None
    """Warm-start examples: .jsonl with the columns `prompt` and `completion`. The forced phrase and the closing tag
    after the phrase are masked out of the loss, as in RL."""
    add_eos: bool = True
    """Append the end-of-sequence token to completions that lack the token, so that the policy learns to stop."""
    too_long: Literal["error", "skip"] = "error"
    """A row longer than trainer.micro_batch_tokens or the policy's context is an error, or is skipped and reported,
    but never truncated, since a truncated completion teaches the policy not to stop."""
    steps: PositiveInt = 900
    """Optimizer steps."""
    batch_size: PositiveInt = 32
    """Examples per step."""
    lr: PositiveFloat = 2e-3
    """Peak learning rate (the paper's own warm start: 3e-5)."""
    warmup_steps: NonNegativeInt = 50
    """Linear warm-up (optimizer steps)."""
    decay_from_share: Share = 0.5
    """Fraction of the steps after which the learning rate decays linearly to min_lr_ratio. 1: constant."""
    min_lr_ratio: Share = 0.1
    """Final over peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW betas of the warm start."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon of the warm start."""
    threads: PositiveInt = 2
    """CPU threads of the warm start, which runs without engines."""
