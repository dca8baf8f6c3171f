"""Declares a recipe's sections about processes: trainer ranks, engines, and the weight updates of the engines.

Defaults and docstrings have the same conventions as in `recipe.sections`. Two sections pass options on under the
original names: `megatron` to Megatron-Core's dataclasses, and `engine.vllm` to vLLM's engine arguments.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_scalerl.recipe.sections import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class TrainerSection(Section):
    """The trainer's processes."""

    world_size: PositiveInt = 1
    """Trainer processes; data parallel size is world_size / (tensor x pipeline x context parallel size)."""
    threads: PositiveInt = 1
    """CPU threads of each trainer process."""
    micro_batch_tokens: PositiveInt | None = None
    """Capacity of one packed micro-batch (tokens); at least the longest prompt and completion with the forced phrase
    and the end-of-sequence token. null: that length, with one token per byte of the phrase, rounded up to a multiple
    of 128."""
    logit_workspace_mb: PositiveFloat | None = None
    """Memory for blocks of logits, in addition to hidden states, head and gradients (MiB). null: 2048 on a GPU of at
    least 64 GiB without engine.colocate, else 512. Smaller is slower: without `loss_in_chunk`, logits beyond this
    memory are computed again in the backward pass of a micro-batch."""
    logit_backend: Annotated[str, Field(pattern="^(auto|cuda|torch)$")] = "auto"
    """Backend of the logit projection: cuda (NVIDIA GPUs), torch (any device, slow on GPUs), or auto: cuda where
    the cuda backend can run."""
    logit_gradient: Literal["bf16", "bf16x2", "fp32"] = "bf16"
    """Precision of the logit gradient in matrix products with a bfloat16 head: bf16; bf16x2, the sum of two bf16
    numbers for the head's gradient (error 1e-5 instead of 3e-3, one more product); or fp32 (slow)."""
    loss_in_chunk: bool = True
    """For a loss that is a sum over tokens (cispo, dapo, grpo): compute loss and gradient while a chunk's logits are
    in memory. The backward pass then recomputes no logits, which saves a quarter of the work. An fp32 gradient of the
    head is held until the backward pass. Where logit_workspace_mb holds less than 1,024 tokens on a GPU, the logits
    are recomputed."""
    step_timeout_s: PositiveFloat = 3600.0
    """Time limit of one trainer command (s), beyond which the trainer has failed."""
    max_restarts: NonNegativeInt = 3
    """Most restarts of the trainer without a new checkpoint in between; 0: the run fails with the trainer. At a
    restart all ranks are started again from the newest checkpoint, while the engines keep running."""
    start_timeout_s: PositiveFloat = 1800.0
    """Time limit for all trainer processes to start (s)."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs. Training on CPUs is always deterministic."""


class MegatronSection(Section):
    """Megatron-Core's options by the original names."""

    model: dict[str, Any] = Field(default_factory=dict)
    """Fields of TransformerConfig for speed and memory. Fields that define the model come from the
    policy's config.json, as in the engines, and are refused here with another value."""
    parallel: dict[str, Any] = Field(default_factory=dict)
    """Arguments of initialize_model_parallel: tensor_model_parallel_size, expert_model_parallel_size ..."""
    ddp: dict[str, Any] = Field(default_factory=dict)
    """Fields of DistributedDataParallelConfig."""
    optimizer: dict[str, Any] = Field(default_factory=dict)
    """Fields of OptimizerConfig that the optimizer section does not set."""


class EngineSection(Section):
    """The engines: vLLM servers."""

    count: PositiveInt = 1
    """Number of engines; each is a vLLM server."""
    devices_per_engine: PositiveInt = 1
    """Devices per engine, for CUDA_VISIBLE_DEVICES and the ledger."""
    colocate: bool = False
    """Run the engines on the trainer's devices, on one host, also with one GPU; trainer and engines take turns.
    Requires count x devices_per_engine = trainer.world_size, and kv_cache_memory_bytes and gpu_memory_utilization in
    `vllm`. The ledger charges half of a device to the trainer and half to the engine."""
    threads: PositiveInt = 1
    """CPU threads of each engine (OMP_NUM_THREADS); ignored on GPUs."""
    host: str = "127.0.0.1"
    """Address the servers bind to."""
    port: NonNegativeInt = 0
    """Port of the first engine; engine i uses port + i. 0: free ports are chosen."""
    start_timeout_s: PositiveFloat = 1800.0
    """Time limit for a server to start (s)."""
    stall_timeout_s: PositiveFloat = 600.0
    """Time limit (s) after which an engine is evicted that answers no poll. The limit also holds for an engine whose
    running requests have tokens but get no further token, and for a response that stops after the header. A pause for
    a weight update does not count as time without a token. A generation has no total time limit."""
    first_token_timeout_s: PositiveFloat = 1800.0
    """Time limit (s) in place of a shorter stall_timeout_s, while no running request of the engine has a token: a
    prefill reports no progress."""
    min_relative_rate: Share = 0.1
    """An engine is evicted when the tokens per second and running request stay below this fraction of the median of
    all other engines for stall_timeout_s. 0: never; no effect with fewer than three engines."""
    max_lost_in_a_row: PositiveInt = 64
    """A completion without usable log-probs is dropped from the group; an engine is evicted after this many
    consecutive dropped completions."""
    max_restarts: NonNegativeInt = 5
    """Most restarts of an evicted engine's server in a row; 0: an engine is given up at the first failure. The delay
    before a restart doubles from 1 s to 60 s, and the engine's groups are generated again. Earlier restarts no longer
    count after a server ran for 10 minutes and the longest of stall_timeout_s, first_token_timeout_s and
    weights.timeout_s. An engine that ends twice before any engine of the run has completed a request is given up."""
    min_engines: PositiveInt = 1
    """The run fails when fewer engines than this number are left, not counting engines that were given up; at most
    engine.count."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's engine arguments by the original names: max_model_len, max_num_seqs, kv_cache_memory_bytes ...
    Arguments that change the sampling distribution are rejected. Arguments that change the engine's numerics
    (quantization, kv_cache_dtype ...) change the sampling policy, which the importance weight corrects."""

    @property
    def charged_devices(self) -> float:
        """Devices that the ledger charges for each engine; with `colocate` half of the engine's devices."""
        return self.devices_per_engine / 2 if self.colocate else self.devices_per_engine


def _off_text(value: object) -> object:
    """Turn false into the text "off": YAML reads off without quotation marks as false."""
    return "off" if value is False else value


class WeightsSection(Section):
    """The weight broadcast, and the verification of received weights."""

    transport: Literal["auto", "gloo", "nccl", "shm"] = "auto"
    """Transport of weights from trainer to engines. auto: nccl where CUDA is available; on CPUs, and with
    engine.colocate, shm where all processes are on one host, gloo elsewhere. shm: shared memory, faster than gloo,
    and closed to other users of the host."""
    bucket_mib: PositiveInt = 64
    """Size of a packed bucket (MiB); each sender has two buckets in memory, each engine worker as well."""
    max_senders: PositiveInt = 1
    """Largest number of trainer ranks that send weights: the ranks of one copy of the policy always send, and further
    data-parallel copies as far as the limit allows. An engine shard needs a group and buffers for each of the
    shard's senders. NCCL runs one broadcast at a time, so over NCCL further copies only cost buffers."""
    deltas: Annotated[Literal["off", "absolute"], BeforeValidator(_off_text)] = "off"
    """off: send whole weights. absolute: send only the new values of elements that changed since the last version,
    3.1 bytes each; a tensor with more than 1 changed element in 8 is sent whole. Optimizers with fp32 main weights
    record changes; else senders keep a copy of the last version, and compare."""
    adapters: Literal["alone", "merged"] = "alone"
    """Content of weight updates with policy.lora. alone: A and B, which engines compute beside the weights of
    policy.path. merged: the weights W + alpha / rank B A, rounded to policy.dtype, with which engines decode as fast
    as without adapters. Mixtures of experts require merged: vLLM's CPU kernels have no adapters of experts."""
    probe_every: NonNegativeInt = 10
    """Compare trainer and engine log-probs on a fixed probe after the weight update of every n-th step, or the first
    update from then on (ppo_off_policy), and on an engine that was started again. 0: only after the start of an
    engine."""
    probe_tolerance: PositiveFloat | None = None
    """The run fails where |trainer - engine log-prob| on the probe exceeds this value on average (nats), or 20 times
    this value in a single token. null: 5e-4 in float32, 0.15 in bfloat16."""
    timeout_s: PositiveFloat = 600.0
    """Time limit of each phase of a weight update (s); a slower engine is evicted."""
    connect_timeout_s: PositiveFloat = 60.0
    """Time limit for trainer and engines to join the group of the weight broadcast (s), on gloo. The group is formed
    again when an engine joins or leaves."""


class TelemetrySection(Section):
    """Metrics and profiles that other programs can read while the run goes on (docs/monitoring.md)."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the controller's Prometheus endpoint. null: no endpoint. 0: a free port, which RUN/metrics names."""
    metrics_host: str = "127.0.0.1"
    """Address at which the endpoint listens, without encryption."""
    metrics_access: Literal["token", "open"] = "token"
    """Who may read the endpoint. token: senders of the bearer token in RUN/metrics/token, mode 0600. open: whoever
    reaches the port, on loopback every user of the host."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Optimizer steps whose PyTorch profile every trainer rank writes into RUN/profile, on GPUs with allocations:
    large files, and the step takes longer."""
    token_scores_every: NonNegativeInt = 0
    """Optimizer steps between two scorings. Before the step the trainer scores the tokens of eight completions of the
    batch, for the page: mismatch and entropy of each token, in RUN/token_scores, about 15 bytes a token. 0: no
    scoring."""


class EvaluationSection(Section):
    """Evaluation files during the run, on an engine that is held at the policy version (docs/evaluation.md)."""

    every_steps: NonNegativeInt = 0
    """Optimizer steps between evaluations, from step 0. 0: no evaluation. Requires a second engine, the schedule
    pipeline and rollouts.deterministic false: no optimizer step waits for an evaluation. An evaluation that is due
    while fewer than two engines serve, or during another evaluation, is made of the first later version."""
    files: tuple[str, ...] = ()
    """Evaluation files, each FILE, FILE:aime, FILE:math500 or FILE:PROBLEM,ANSWER with the names of two columns."""
    task: str | None = None
    """With prompts.tasks: the task whose template and verifier are used."""
    generations: PositiveInt = 16
    """Completions per problem, the k of mean@k and pass@k."""
    seed: NonNegativeInt = 1
    """Seed of sampling and of interruption points, the same at every evaluation: evaluations differ by the policy."""
