"""The sections of a recipe: every setting, its unit, its range, and its one default.

Departures and choices where the paper is silent (Khatri et al. 2025, arXiv 2510.13786) are named in the docstring
of the field they concern. Two sections pass options through unrenamed: `megatron.*` to Megatron-Core's own
dataclasses and `engine.vllm` to vLLM's own engine arguments.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PAPER_PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. "
"""The phrase of section 4 of the paper, without the closing think tag, which the recipe appends itself. The blank at
its end is the one that the paper prints before the tag."""

MICRO_BATCH_MULTIPLE = 128
"""trainer.micro_batch_tokens is rounded up to a multiple of this where the recipe is silent (tokens)."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values are frozen once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PolicySection(Section):
    """The policy that is trained."""

    path: str
    """Hugging Face folder of the policy to start from (config, safetensors, tokenizer)."""
    megatron_path: str | None = None
    """Converted checkpoint (docs/checkpoints.md) whose weights the trainer starts from. null: those of path."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations in trainer and engine; bfloat16 keeps fp32 main weights in the trainer."""
    logits: Literal["fp32", "model"] = "fp32"
    """Precision of the logit projection on both sides (section 3.2 of the paper: fp32). `model` is the ablation."""


class PromptsSection(Section):
    """Where prompts come from and how they are rendered."""

    path: str
    """Training prompts: a .jsonl or .parquet file, or a Hugging Face dataset folder."""
    split: str | None = None
    """Split of a dataset folder that has several. null: the folder has one."""
    prompt_column: str = "prompt"
    """Column with the problem's text."""
    answer_column: str = "answer"
    """Column with the reference answer that the verifier gets."""
    prompt_template: str = "{prompt}"
    """Format string around the problem; `{prompt}` stands for the text."""
    chat_template: bool = False
    """True applies the tokenizer's chat template to the rendered prompt as one user message."""
    add_bos: bool = True
    """True puts the tokenizer's beginning-of-sequence token first where it has one and it is not there yet."""
    think_start: str = "<think>"
    """Tag that opens thinking; appended to the rendered prompt as a prefill. Empty: no prefill."""
    think_end: str = "</think>"
    """Tag that closes thinking; the answer is the text after it."""
    max_prompt_tokens: PositiveInt = 2048
    """Longer prompts are skipped, counted and named (tokens; section 2 of the paper: 2,048)."""
    held_out_path: str | None = None
    """Validation prompts of their own; without it they are split off `path`."""
    held_out: NonNegativeInt | Annotated[float, Field(gt=0, lt=1)] = 1000
    """Number of prompts held out of `path` by hash (the paper: 1,000), or a share below 1. 0 needs
    `held_out_path` or no validation."""


class CurriculumSection(Section):
    """Which prompt comes next."""

    no_positive_resampling: Share | None = 0.9
    """A prompt whose latest group passed at least this share is not drawn in later epochs (section 3.2 of
    the paper: 0.9). null: uniform resampling. Silent in the paper: the history is the latest group only."""
    max_epochs: PositiveInt | None = None
    """The run ends after this many passes over the prompts. null: no limit."""


class RolloutsSection(Section):
    """How completions are sampled, and how old they may grow."""

    groups_per_batch: PositiveInt = 48
    """Prompts per optimiser step, before filtering (the paper: 48)."""
    group_size: PositiveInt = 16
    """Completions per prompt (the paper: 16)."""
    max_staleness_steps: NonNegativeInt = 8
    """k of PipelineRL-k: a batch trains no completion whose first token is more than k optimiser steps old
    (the paper: 8). 0 is synchronous training."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature, in vLLM's own range. Silent in the paper. Trainer and engine both divide their logits by
    it; the warm start does not."""
    top_p: float = 1.0
    """Nucleus mass. Only 1: the engine would renormalize its log-probs over the nucleus, and the trainer's are those
    of all tokens. Silent in the paper."""
    max_in_flight: PositiveInt = 256
    """Completions that one engine is given at a time; at least group_size."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """At a weight update, keep the KV cache of running completions (PipelineRL) or recompute it."""
    routing_replay: bool = False
    """Mixture-of-experts policies: the trainer uses the experts that the engine chose, token by token. The engine
    reports them on GPUs only, in vLLM's second model runner, which knows no forced interruption, and with its
    prefix cache, which has to be emptied at each update: needs interruption.enabled false, kv_cache recompute."""

    @model_validator(mode="after")
    def _whole_distribution(self) -> "RolloutsSection":
        if self.top_p != 1:
            raise ValueError(
                "top_p: expected 1 (the engine's log-probs would be renormalized over the nucleus, the trainer's are "
                f"those of all tokens), found {self.top_p:g}"
            )
        return self


class InterruptionSection(Section):
    """Forced length interruption (section 2 of the paper).

    The paper states an output of 14,336 tokens, 12,288 of thinking and 2,048 of answer, and that thinking is cut at
    10k to 12k. It does not state what bounds an answer after thinking ended by itself: see `after_natural_end`.
    """

    enabled: bool = True
    """False: thinking and answer share one budget of thinking_tokens[1] + answer_tokens."""
    thinking_tokens: tuple[NonNegativeInt, NonNegativeInt] = (10240, 12288)
    """Range of the cut, both ends included (tokens; section 2 of the paper: [10k, 12k]). Silent in the
    paper: drawn uniformly per completion from the run's seed."""
    phrase: str = PAPER_PHRASE
    """Forced when the cut is reached while thinking; the closing think tag follows it with nothing between, so a
    blank before the tag is the phrase's last character. Forced tokens carry no loss (silent in the paper)."""
    answer_tokens: PositiveInt = 2048
    """Budget after a forced end of thinking (tokens; section 2 of the paper: 2,048)."""
    after_natural_end: Literal["rest_of_budget", "answer_tokens"] = "rest_of_budget"
    """Budget after thinking ended by itself: what is left of thinking_tokens[1] + answer_tokens, counted over the
    whole completion, or answer_tokens as after a forced end. Silent in the paper."""

    @model_validator(mode="after")
    def _range(self) -> "InterruptionSection":
        low, high = self.thinking_tokens
        if not 1 <= low <= high:
            raise ValueError(f"thinking_tokens: expected 1 <= low <= high, found [{low}, {high}]")
        return self


class RewardsSection(Section):
    """How completions are judged."""

    verifier: str = "math"
    """`math` (math-verify on the text after thinking) or `module:function` of one's own, whose verdict must depend on
    its arguments alone: the same text, reference and other columns are judged once."""
    correct: float = 1.0
    """Reward of an accepted answer (the paper: +1)."""
    incorrect: float = -1.0
    """Reward of any other completion (the paper: -1)."""
    workers: PositiveInt | None = None
    """Verifier processes. null: one for each CPU that the controller may use, at most 8."""
    cpu_s: PositiveFloat = 2.0
    """Seconds of processor time for one check; past it the worker is killed and the completion is wrong (`timeout`).
    It does not depend on what else runs. n different answers that all exceed it take n (cpu_s + 0.5) / workers
    seconds: 768 of them 16 minutes with 2 workers, 4 with 8."""
    timeout_s: PositiveFloat = 10.0
    """Seconds on the clock for one check, for a verifier that waits for something; past it as for cpu_s."""
    memory_mb: PositiveInt | None = 1024
    """Address space in MiB that one check may add to its worker (the math verifier's starts with 60 and a normal
    answer adds less than 40); an answer that needs more is wrong (`memory`). null: no limit, for a verifier that
    starts programs that reserve much, such as java or node."""
    file_mb: NonNegativeInt = 0
    """Size in MiB of a file that a verifier may write. 0: it writes none."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that a verifier of one's own needs. Others are not handed over, but for those
    of path, home, locale and library search, so that tokens and keys stay with the controller."""
    truncated: Literal["exclude", "wrong"] = "exclude"
    """Truncated completions leave loss and advantage, or stay with the incorrect reward. In every pass
    rate they are wrong. (Inferred from "effective batch size (after excluding truncated samples)".)"""


class AdvantagesSection(Section):
    """From rewards to advantages."""

    normalize: Literal["batch", "prompt", "none"] = "batch"
    """Standard deviation that divides the group-centred reward (section 3.2 of the paper: batch), one
    value per completion, over the completions that remain after filtering (silent in the paper)."""


class FiltersSection(Section):
    """Which groups train."""

    zero_variance: bool = True
    """Drop groups whose rewards are all equal, without refill (section 3.2 of the paper)."""
    max_empty_batches: PositiveInt = 50
    """The run ends after this many batches in a row with nothing left to train on."""


class LossSection(Section):
    """The loss and its aggregation."""

    name: Literal["cispo", "dapo", "grpo", "gspo"] = "cispo"
    """Loss type (section 3.2 of the paper: cispo)."""
    max_is_weight: PositiveFloat = 5.0
    """cispo: the cap itself on the importance weight trainer/engine, not a distance from 1 (inferred: the
    paper's CISPO curve is its "clip = 5" curve)."""
    clip_low: NonNegativeFloat | None = None
    """dapo, grpo, gspo: lower clip distance from 1. null: the loss's own default (0.2; gspo 3e-3)."""
    clip_high: NonNegativeFloat | None = None
    """dapo, grpo, gspo: upper clip distance from 1. null: the loss's own default (dapo 0.26, grpo 0.2,
    gspo 5e-3)."""
    reduction: Literal["prompt_mean", "sequence_mean", "token_mean"] = "prompt_mean"
    """Loss aggregation (section 3.2 of the paper: prompt_mean)."""


class OptimizerSection(Section):
    """AdamW as in section 2 of the paper."""

    lr: NonNegativeFloat = 5e-7
    """Constant learning rate after the warm-up (the paper: 5e-7)."""
    warmup_steps: NonNegativeInt = 100
    """Linear warm-up (optimiser steps; the paper: 100). 0: none."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW betas. Silent in the paper."""
    eps: PositiveFloat = 1e-15
    """AdamW epsilon (the paper: 1e-15)."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay on matrices (the paper: 0.01)."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm cap. 0: no clipping. Silent in the paper."""


class TrainerSection(Section):
    """The trainer's processes."""

    world_size: PositiveInt = 1
    """Trainer processes; data parallel size is world_size / (tensor x pipeline x context parallel size)."""
    threads: PositiveInt = 1
    """CPU threads of each trainer process."""
    micro_batch_tokens: PositiveInt | None = None
    """Capacity of one packed micro-batch (tokens); at least the longest prompt and completion with the forced
    phrase and end. null: that, the phrase counted as one token a byte, rounded up to a multiple of 128."""
    logit_workspace_mb: PositiveFloat = 512.0
    """Memory for blocks of logits beside hidden states, head and gradients (MiB); smaller is a little slower."""
    logit_backend: Annotated[str, Field(pattern="^(auto|cuda|torch|triton)$")] = "auto"
    """What computes logits: auto (the first that runs here), torch (anywhere), cuda or triton (a GPU)."""
    logit_gradient: Literal["bf16", "bf16x2", "fp32"] = "bf16"
    """How the gradient of a bfloat16 head's logits enters matrix products: rounded, as the sum of two bf16 numbers
    for the head's own gradient (error 1e-5 instead of 3e-3, one more product), or in fp32 (slow)."""
    loss_in_chunk: bool = True
    """Take a loss that is a sum over tokens (cispo, dapo, grpo) where a chunk's logits are computed, instead of
    computing them again for the gradient: a quarter less work, for an fp32 gradient of the head that stays until
    the backward pass."""
    step_timeout_s: PositiveFloat = 3600.0
    """Seconds the controller waits for one trainer command before the run fails."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds the controller waits for all trainer processes to report."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs; CPU training always is."""


class MegatronSection(Section):
    """Megatron-Core's own options by their own names."""

    model: dict[str, Any] = {}
    """Fields of TransformerConfig and GPTModel's keywords, over what the policy's config.json says."""
    parallel: dict[str, Any] = {}
    """Keywords of initialize_model_parallel: tensor_model_parallel_size, expert_model_parallel_size ..."""
    ddp: dict[str, Any] = {}
    """Fields of DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = {}
    """Fields of OptimizerConfig that the optimizer section does not set."""


class EngineSection(Section):
    """The engines: vLLM servers."""

    count: PositiveInt = 1
    """Engines, each a vLLM server of its own."""
    devices_per_engine: PositiveInt = 1
    """Devices that one engine holds, for the ledger and CUDA_VISIBLE_DEVICES."""
    threads: PositiveInt = 1
    """CPU threads of one engine (OMP_NUM_THREADS); no meaning on GPUs."""
    host: str = "127.0.0.1"
    """Address the servers bind to."""
    port: NonNegativeInt = 0
    """Port of the first engine, the next ones count up. 0: free ports are chosen."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds a server may take until it answers."""
    stall_timeout_s: PositiveFloat = 600.0
    """The run ends when an engine that has requests, some of which have tokens already, produces none for this
    many seconds, or gives no answer at all. Pauses for a weight update do not count. A generation itself has no
    total time-out."""
    first_token_timeout_s: PositiveFloat = 1800.0
    """The same limit while no request has a token yet, because a prefill shows no progress. stall_timeout_s where
    that is longer."""
    max_lost_in_a_row: PositiveInt = 64
    """A completion without usable log-probabilities is left out of its group; this many from one engine without
    a good one between them end the run."""
    vllm: dict[str, Any] = {}
    """vLLM's own engine arguments by their own names: max_model_len, max_num_seqs, kv_cache_memory_bytes ... Those
    that change the sampling distribution are refused. Those that change the engine's arithmetic (quantization,
    kv_cache_dtype ...) change the policy that samples, which the importance weight covers."""


class WeightsSection(Section):
    """The weight broadcast and its proof."""

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """Wire from trainer to engines. auto: nccl where CUDA is available, gloo elsewhere."""
    bucket_mib: PositiveInt = 64
    """Size of one packed bucket (MiB)."""
    probe_every: NonNegativeInt = 10
    """Compare trainer and engine log-probs on a fixed probe after every n-th update. 0: only before step 1."""
    probe_tolerance: PositiveFloat | None = None
    """Largest |trainer - engine log-prob| (nats) on the probe before the run fails. null: 1e-3 in float32,
    0.5 in bfloat16."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for one weight update."""


class ValidationSection(Section):
    """Mean@k on held-out prompts."""

    every_steps: NonNegativeInt = 100
    """Steps between validations, from step 0 (the paper: 100). 0: none."""
    prompts: PositiveInt | None = None
    """Number of held-out prompts used. null: all."""
    generations: PositiveInt = 16
    """Completions per prompt, the k of mean@k (the paper: 16)."""
    end_generations: PositiveInt | None = None
    """Completions per prompt at step 0, whose value the forecast holds fixed, and at the end of the run; the
    gain rests on these two. null: as `generations`."""
    seed: NonNegativeInt = 20251013
    """Seed of sampling and of the cuts, the same at every validation."""


class CheckpointSection(Section):
    """When checkpoints are made."""

    every_steps: NonNegativeInt = 100
    """Steps between checkpoints. 0: only at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints kept."""


class ForecastSection(Section):
    """What the closing report fits."""

    fit_from_steps: NonNegativeInt = 0
    """Validations before this step are left out of the fit (the paper: what lies before 1.5k GPU-hours)."""
    fit_until_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the run that the fit sees in the closing report (the paper: half of the budget)."""


class SftSection(Section):
    """The warm start (`python -m megatron_scalerl sft`)."""

    path: str | None = None
    """Warm-start examples: .jsonl with the columns `prompt` and `completion`. Tokens of the forced phrase and of the
    closing tag behind it carry no loss, as in RL."""
    add_eos: bool = True
    """Append the tokenizer's end-of-sequence token to completions that do not end with one, so that the policy learns
    to end. False: completions as they stand."""
    too_long: Literal["error", "skip"] = "error"
    """What happens to a row longer than trainer.micro_batch_tokens or the policy's context: an error that names it,
    or it is skipped, counted and named. Never cut: a cut completion teaches not to end."""
    steps: PositiveInt = 900
    """Optimiser steps."""
    batch_size: PositiveInt = 32
    """Examples per step."""
    lr: PositiveFloat = 2e-3
    """Peak learning rate (the paper's own warm start: 3e-5)."""
    warmup_steps: NonNegativeInt = 50
    """Linear warm-up (steps)."""
    decay_from_share: Share = 0.5
    """Share of the steps after which the rate falls linearly to min_lr_ratio. 1: constant."""
    min_lr_ratio: Share = 0.1
    """Final rate over peak rate."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW betas of the warm start."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon of the warm start."""
    threads: PositiveInt = 2
    """CPU threads of the warm start, which runs before there are engines."""
