"""Patches with which Megatron-Core 0.19.2 trains on CPUs over gloo.

An import patches nothing: the caller must call `install()`, which raises ValueError if a GPU is visible. Each patch
is a function whose docstring names the upstream lines (megatron/core/...) that need the patch.
tests/distributed/test_cpu_compat_patches.py shows for each patch that Megatron-Core still fails without the patch.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")

PATCHES: dict[str, Callable[[], None]] = {}
"""Every patch by name, in the order of installation."""

_undo: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def install(*, without: Collection[str] = ()) -> None:
    """Install all patches except the patches named in `without`, which only tests use. A second call does nothing.

    Raises ValueError if a GPU is visible.
    """
    if torch.cuda.is_available():
        raise ValueError(
            "cpu_compat: a GPU is visible, and the patches for CPUs break runs on GPUs; set CUDA_VISIBLE_DEVICES="
        )
    assert set(without) <= set(PATCHES), f"unknown patches {set(without) - set(PATCHES)}"
    if _undo:
        return
    for name, patch in PATCHES.items():
        if name not in without:
            patch()


WITHOUT_TE = (
    "router_gemm",
    "adamw_state_before_first_step",
    "adamw_step_of_loaded_state",
    "adamw_step_per_parameter",
)
"""Names of the patches that GPUs also need if Megatron-Core runs without Transformer Engine's layers."""


def install_without_te() -> None:
    """Install the patches of WITHOUT_TE, on GPUs without Transformer Engine's layers.

    The patches of AdamW are left out if Megatron-Core uses another AdamW than PyTorch's.
    """
    if _undo:
        return
    torch_adamw = _core("optimizer").USING_PYTORCH_OPTIMIZER
    for name in WITHOUT_TE:
        if torch_adamw or not name.startswith("adamw"):
            PATCHES[name]()


def uninstall() -> None:
    """Remove all patches, so that the code of Megatron-Core and torch runs unchanged."""
    while _undo:
        owner, name, original = _undo.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _patch(function: Callable[[], None]) -> Callable[[], None]:
    PATCHES[function.__name__] = function
    return function


def _set(owner: Any, name: str, value: Any) -> None:
    """Set the attribute `name` of `owner`, and keep the previous value for `uninstall`."""
    _undo.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _core(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{name}")


class _Overriding(ModuleType):
    """A module object with some attributes replaced. All further attributes come from `module`."""

    def __init__(self, module: ModuleType, **overrides: Any):
        super().__init__(module.__name__)
        self.__dict__.update(overrides)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return on_cpu


@_patch
def current_device() -> None:
    """`torch.cuda.current_device()` returns the CPU. Megatron-Core allocates about forty buffers on this device.

    models/common/embeddings/rotary_pos_embedding.py:78,162; utils.py:715; tensor_parallel/mappings.py:95,
    145,152,185,447; tensor_parallel/layers.py:647; transformer/moe/router.py:98,184,193;
    pipeline_parallel/p2p_communication.py:334,342; distributed/param_and_grad_buffer.py:1180,1186;
    optimizer/distrib_optimizer.py:998; dist_checkpointing/strategies/state_dict_saver.py:252
    """
    _set(torch.cuda, "current_device", lambda: CPU)


@_patch
def rng_state() -> None:
    """Megatron's tracker of random number generators (RNG) uses the CPU's generator.

    tensor_parallel/random.py:104-178 (get and set), 303-308 (add), 333 (a warning that the CPU's RNG state has
    changed, which is intended here), 490 (the default seed)
    """
    random = _core("tensor_parallel.random")
    _set(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    _set(torch.cuda, "manual_seed", torch.manual_seed)
    _set(random, "_get_cuda_rng_state", lambda device=None, clone=False, graph_safe=False: torch.get_rng_state())
    _set(random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


LITERAL_FILES = (
    "pipeline_parallel.schedules",  # lines 749, 1121, 2292
    "optimizer.optimizer",  # lines 690, 698, 702, 1249
    "optimizer.clip_grads",  # lines 96, 108, 112, 180, 231
    "utils",  # line 1332
    "transformer.utils",  # lines 39, 44
    "dist_checkpointing.strategies.state_dict_saver",  # line 204
    "dist_checkpointing.exchange_utils",  # lines 103, 109, 329
)
"""Files of Megatron-Core with device="cuda" literals, each with the lines. In these files `torch` is replaced by an
object that takes "cuda" for the CPU."""


@_patch
def device_literal() -> None:
    """The literal `device="cuda"` means the CPU in LITERAL_FILES. All other files use torch unchanged."""
    names = ("tensor", "zeros", "ones", "empty", "full", "empty_like")
    proxy = _Overriding(torch, **{name: _factory_on_cpu(getattr(torch, name)) for name in names})
    for name in LITERAL_FILES:
        _set(_core(name), "torch", proxy)


@_patch
def cuda_method() -> None:
    """`Tensor.cuda()` returns the same tensor.

    models/common/language_module/language_module.py:307 (tied embeddings over pipeline stages);
    optimizer/distrib_optimizer.py:1374; optimizer/optimizer.py:586,591; dist_checkpointing/exchange_utils.py:339,506
    """
    _set(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


@_patch
def type_name() -> None:
    """`Tensor.type()` returns "torch.cuda.FloatTensor" and so on, as Megatron-Core expects when grouping parameters.

    optimizer/distrib_optimizer.py:401,466,758; optimizer/optimizer.py:1009,1028; optimizer/clip_grads.py:174
    """
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    _set(torch.Tensor, "type", type_)


@_patch
def synchronize() -> None:
    """`torch.cuda.synchronize()` does nothing.

    pipeline_parallel/p2p_communication.py:263,419; dist_checkpointing/strategies/filesystem_async.py:248
    """
    _set(torch.cuda, "synchronize", lambda device=None: None)


class _Stream:
    """Stands for a CUDA stream and for a CUDA event. All work counts as complete at once."""

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


STREAM_FILES = (
    "transformer.moe.token_dispatcher",  # lines 469, 922-946: a separate stream for the all-to-all
    "distributed.param_and_grad_buffer",  # line 632: waits for gradients of CUDA graphs, which do not exist on CPUs
)
"""Files of Megatron-Core that use CUDA streams on every device."""


@_patch
def streams() -> None:
    """In STREAM_FILES every CUDA stream is a `_Stream`, which is always idle."""
    idle = _Stream()
    cuda = _Overriding(
        torch.cuda,
        Stream=lambda: idle,
        current_stream=lambda: idle,
        stream=contextlib.nullcontext,
        current_device=lambda: CPU,
    )
    for name in STREAM_FILES:
        _set(_core(name), "torch", _Overriding(torch, cuda=cuda))


@_patch
def router_gemm() -> None:
    """The MoE router's fp32 matrix product is computed by torch. Transformer Engine's product would use TF32 even if
    torch's settings forbid TF32.

    transformer/moe/moe_utils.py:1326,1359 call Transformer Engine if installed, even for plain layers.
    """
    _set(_core("transformer.moe.moe_utils"), "te_general_gemm", None)


@_patch
def router_not_compiled() -> None:
    """The MoE router counts tokens without torch.compile, which would need a C++ compiler.

    transformer/moe/router.py:727
    """
    router = _core("transformer.moe.router").TopKRouter
    compiled = router._apply_expert_bias
    _set(router, "_apply_expert_bias", getattr(compiled, "_torchdynamo_orig_callable", compiled))


@_patch
def split_sizes() -> None:
    """The sizes of the splits in the experts' all-to-all are passed to gloo as integers.

    transformer/moe/moe_utils.py:1184 converts only GPU tensors; transformer/moe/token_dispatcher.py:930-936 then
    passes tensors to all_to_all_single, which requires integers.
    """

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.detach().numpy()
        return tensor

    _set(_core("transformer.moe.token_dispatcher"), "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu)


@_patch
def uneven_gather() -> None:
    """`all_gather` of tensors with unequal shapes pads the tensors first, since gloo requires equal shapes.

    tensor_parallel/mappings.py:154. Experts with both tensor and expert parallelism gather unequal shapes.
    """
    all_gather = torch.distributed.all_gather

    def padded(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if all(output.shape == tensor.shape for output in outputs):
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        rows = max(output.shape[0] for output in outputs)
        send = tensor.new_zeros((rows, *tensor.shape[1:]))
        send[: tensor.shape[0]] = tensor
        received = [torch.empty_like(send) for _ in outputs]
        all_gather(received, send, group=group)
        for output, rows_of_rank in zip(outputs, received):
            output.copy_(rows_of_rank[: output.shape[0]])
        return None

    distributed = _Overriding(torch.distributed, all_gather=padded)
    _set(_core("tensor_parallel.mappings"), "torch", _Overriding(torch, distributed=distributed))


@_patch
def adamw_state_before_first_step() -> None:
    """An optimizer without AdamW state creates the state before a checkpoint is loaded.

    optimizer/distrib_optimizer.py:838-839 asserts exactly one value of `step`, which torch's AdamW only has after the
    first step. A dummy step creates the state, with learning rate and weight decay 0, so that no weight changes.
    """
    optimizer_class = _core("optimizer.distrib_optimizer").DistributedOptimizer
    original = optimizer_class.sharded_state_dict

    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kw: Any
    ) -> Any:
        if is_loading and not self.optimizer.state:
            groups = self.optimizer.param_groups
            rates = [{key: group[key] for key in ("lr", "weight_decay")} for group in groups]
            for group in groups:
                group["lr"] = group["weight_decay"] = 0.0
            self._init_optimizer_states_with_dummy_values()
            for group, group_rates in zip(groups, rates):
                group.update(group_rates)
        return original(self, model_sharded_state_dict, is_loading, *args, **kw)

    _set(optimizer_class, "sharded_state_dict", sharded_state_dict)


@_patch
def adamw_step_of_loaded_state() -> None:
    """Loading the optimizer state of a parameter keeps the parameter's present `step` if the loaded state has none.

    optimizer/distrib_optimizer.py:1225 reads tensors[key] for every key of the state. A load in the fully reshardable
    format (line 2389) has dropped `step`, so tensors["step"] raises KeyError.
    """
    optimizer_class = _core("optimizer.distrib_optimizer").DistributedOptimizer
    original = optimizer_class._set_main_param_and_optimizer_states

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    _set(optimizer_class, "_set_main_param_and_optimizer_states", _set_main_param_and_optimizer_states)


@_patch
def adamw_step_per_parameter() -> None:
    """After a load every parameter has a `step` tensor of its own, on the parameter's device if AdamW is fused.

    optimizer/distrib_optimizer.py:1024-1032 gives all parameters one shared `step` tensor in host memory. torch's
    AdamW would increment the shared tensor once per parameter, and so make a wrong bias correction after a resume.
    """
    optimizer_class = _core("optimizer.distrib_optimizer").DistributedOptimizer
    original = optimizer_class.load_state_dict

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        fused = [group.get("fused") for group in self.optimizer.param_groups]
        original(self, state_dict)
        for group, was_fused in zip(self.optimizer.param_groups, fused):
            group["fused"] = was_fused
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if torch.is_tensor(state.get("step")):
                    state["step"] = state["step"].to(parameter.device if was_fused else CPU, copy=True)

    _set(optimizer_class, "load_state_dict", load_state_dict)
