"""The plugin that all of vLLM's processes load, by the entry point `vllm.general_plugins`.

- `register`, in every process: registers our weight-transfer backends; imports nothing heavy.
- `SecretMiddleware` (--middleware), in the server: every path but /health requires the run's secret. vLLM's own
  --api-key leaves /collective_rpc, /pause and /update_weights open. The middleware serves /msrl/progress.
- `ForcedTokens` (--logits-processors), in the workers: forced interruption, see `engine.interruption`.
- `WorkerExtension` (--worker-extension-cls), in the workers: reports types and settings that the engine really uses.

Life of a server:

    every process: register
    server: SecretMiddleware --> start-up complete: one byte to the parent (`launch.local_server`) --> requests
    worker, once the server is up: msrl_info, which probes the precision of the logits
    worker, when the engines have changed: msrl_abandon_update --> msrl_weight_needs --> a new group of senders
    worker, for each weight update: vLLM's start, update and finish --> msrl_live_digest
"""

import hmac
import multiprocessing
import os
from typing import Any

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from megatron_scalerl.engine.answers import PROGRESS_PATH, REFUSED
from megatron_scalerl.engine.interruption import Forcing, Plan
from megatron_scalerl.processes.logs import NAME_VARIABLE, log_to_stderr
from megatron_scalerl.processes.parent_death import die_with_parent
from megatron_scalerl.weights.plan import VLLM_BACKEND


def register() -> None:
    """Register this package's weight-transfer backend with vLLM, and set up this process. Idempotent."""
    # A vLLM that a user starts without a run does not have this variable.
    if NAME_VARIABLE in os.environ:
        log_to_stderr("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if VLLM_BACKEND not in Factory._registry:
        Factory.register_engine(VLLM_BACKEND, "megatron_scalerl.weights.weight_receiver", "WeightReceiver")
    if torch.cpu._is_amx_tile_supported():
        # vLLM's bfloat16 attention uses AMX tiles: an illegal instruction unless the kernel was asked before.
        torch.cpu._init_amx()
    if os.environ.get("MSRL_KEEP_WEIGHTS") == "1":
        _keep_linear_weights()
    if os.environ.get("MSRL_ADAPTER") == "1":
        _keep_adapter()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and os.environ.get("MSRL_DIE_WITH_PARENT") == "1":
        # The server dies with the controller, and a forked process with the parent (`processes.parent_death`). This
        # call ties a spawned core or worker to the process that started the core or worker: fork server or parent.
        forkserver = multiprocessing.get_start_method(allow_none=True) == "forkserver"
        die_with_parent(os.getppid() if forkserver else parent.pid)


def _keep_linear_weights() -> None:
    """Patch vLLM on CPUs to keep the parameters of linear layers, into which weight updates write. Idempotent.

    vLLM 0.32.0 packs the weights for oneDNN or SGL's kernel after loading and empties the parameters. After every
    update, `live_weights.LiveWeights.finish` packs the weights again.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if pack.__module__ == utils.__name__:
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)


def _keep_adapter() -> None:
    """Patch vLLM to start with a LoRA adapter of zeros, and to keep the adapter during weight updates. Idempotent.

    vLLM 0.32.0 can load an adapter only from a path. Without the patch, every weight update would remove the adapter
    (gpu_worker.py, finish_weight_update), and the next batch would load the adapter again (`weights.adapter_slot`).
    """
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    def zeros(manager: Any, request: Any) -> Any:
        return manager._adapter_manager.create_dummy_lora(request.adapter_id, 1, manager.embedding_modules)

    WorkerLoRAManager._load_adapter = zeros  # type: ignore[method-assign,assignment]
    LoRAModelRunnerMixin.reset_lora_state = lambda runner: None  # type: ignore[method-assign,assignment]


class SecretMiddleware:
    """Refuses HTTP and WebSocket requests without the run's secret, and tells the parent when the server is up."""

    def __init__(self, app: Any):
        self._app = app
        self._secret = os.environ.get("MSRL_SECRET", "").encode()
        if not self._secret:
            raise ValueError("MSRL_SECRET: the environment variable with the run's secret is not set")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, _reporting(send))
        elif not self._is_allowed(scope):
            await _refuse(scope["type"], send)
        elif scope["type"] == "http" and scope["path"] == PROGRESS_PATH:
            # The import is here because vLLM's further processes load the plugin, but not `vllm_progress`.
            from megatron_scalerl.engine.vllm_progress import progress

            await _answer(send, 200, progress(scope["app"].state.engine_client))
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: dict[str, Any]) -> bool:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/health"):
            return True
        secrets = [value for key, value in scope["headers"] if key == b"x-run-secret"]
        return len(secrets) == 1 and hmac.compare_digest(secrets[0], self._secret)


async def _refuse(kind: str, send: Any) -> None:
    if kind == "http":
        await _answer(send, 401, {"error": "the run's secret is missing or wrong"})
    else:
        await send({"type": "websocket.close", "code": 1008})


async def _answer(send: Any, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})


def _reporting(send: Any) -> Any:
    """ASGI's function `send`, wrapped to write one byte to the pipe MSRL_READY_FD once the server has started."""

    async def reporting(message: dict[str, Any]) -> None:
        await send(message)
        fd = os.environ.pop("MSRL_READY_FD", None)
        if message["type"] == "lifespan.startup.complete" and fd is not None:
            os.write(int(fd), b"1")
            os.close(int(fd))

    return reporting


class ForcedTokens(LogitsProcessor):
    """Forces tokens on the requests in vLLM's batch that have an interruption plan.

    vLLM passes the list of output tokens of each request, which vLLM extends as tokens are sampled. `apply` reads the
    lists anew for each step, so that preemption, pause and asynchronous scheduling change nothing.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._device = device
        self._rows: dict[int, tuple[Forcing, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check the plan of a request. Raises ValueError for an invalid plan; the server then answers status 400."""
        Plan.from_extra_args(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """False: a forced token need not be the likeliest, so vLLM calls `apply` for greedy requests too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep the plan of each row up to date when vLLM adds, removes or moves requests in the batch."""
        process_dict_updates(self._rows, batch_update, _start)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force tokens: in each row whose next token is forced, all logits but the forced token's become -inf.

        logits: [batch, vocabulary].
        """
        rows = []
        tokens = []
        for row, (forcing, output) in self._rows.items():
            token = forcing.next_token(output)
            if token is not None:
                rows.append(row)
                tokens.append(token)
        if rows:
            forced = torch.tensor(rows, device=self._device)
            logits[forced] = float("-inf")
            logits[forced, torch.tensor(tokens, device=self._device)] = 0.0
        return logits


def _start(params: SamplingParams, _: Any, output: list[int]) -> tuple[Forcing, list[int]] | None:
    plan = Plan.from_extra_args(params.extra_args)
    return None if plan is None else (Forcing(plan), output)


class WorkerExtension:
    """Methods that vLLM adds to the workers, called through /collective_rpc."""

    def msrl_info(self) -> dict[str, Any]:
        """The fields of `EngineInfo` that a worker knows, and the worker's process id."""
        config = self.model_config  # type: ignore[attr-defined]
        if not hasattr(self, "_msrl_head"):  # probed once: after a failed update the model may not compute
            self._msrl_head = _probe_head(self.model_runner.get_model(), config)  # type: ignore[attr-defined]
        vocab_size, head_dtype = self._msrl_head
        receiver = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {
            "vocab_size": vocab_size,
            "dtype": str(config.dtype).removeprefix("torch."),
            "head_dtype": head_dtype,
            "logprobs_mode": config.logprobs_mode,
            "max_model_len": config.max_model_len,
            "pid": os.getpid(),
            "weight_digest": getattr(receiver, "digest", ""),
            "attention_temperature": _attention_temperature(self.model_runner.get_model()),  # type: ignore[attr-defined]
        }

    def msrl_weight_needs(self, manifest: str) -> str:
        """The data that this worker needs in an update; or REFUSED and the reason why the tensors do not fit.

        manifest: the trainer's tensors, JSON of `plan.manifest_to_json`. The result is JSON of `plan.needs_to_json`.
        """
        from megatron_scalerl.weights.weight_receiver import needs_of

        try:
            return needs_of(self.model_runner.get_model(), manifest)  # type: ignore[attr-defined]
        except ValueError as error:
            return REFUSED + str(error)

    def msrl_live_digest(self) -> str:
        """Digest (hex) of the weights in this worker's model; empty if updates go through vLLM's loader."""
        from megatron_scalerl.weights.weight_receiver import live_digest

        return live_digest(self.model_runner.get_model())  # type: ignore[attr-defined]

    def msrl_abandon_update(self) -> None:
        """Forget a weight update that was started but not finished. No effect without an unfinished update.

        vLLM 0.32.0 refuses to start an update before the last update has ended, and has no call that abandons an
        update. The next update discards the state that this update left in the model (`weights.weight_receiver`).
        """
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()  # type: ignore[attr-defined]


def _attention_temperature(model: torch.nn.Module) -> bool | None:
    """Whether Llama 4's layers without RoPE scale queries by position; None for a model without such layers."""
    settings = [bool(layer.attn_temperature_tuning) for layer in model.modules() if getattr(layer, "nope", False)]
    if not settings:
        return None
    return all(settings)


@torch.inference_mode()
def _probe_head(model: Any, config: Any) -> tuple[int, str]:
    """(number of logits per token, precision of the projection), measured on two synthetic hidden states.

    Logits that were computed in bfloat16 have at most 8 significant bits, even after a cast to float32. Of thousands
    of logits that were computed in float32, some practically always have more than 8 bits.
    """
    width = config.get_hidden_size()
    device = next(model.parameters()).device
    hidden = torch.sin(torch.arange(2 * width, device=device, dtype=torch.float32)).view(2, width).to(config.dtype)
    logits = model.compute_logits(hidden)
    # vLLM gives logits to only one tensor-parallel rank; further ranks report the configured values.
    if logits is None:
        return config.get_vocab_size(), str(config.head_dtype).removeprefix("torch.")
    exact = logits.float()
    rounded = bool((exact == exact.bfloat16().float()).all())
    return logits.shape[-1], "bfloat16" if rounded else "float32"
