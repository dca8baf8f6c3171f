"""Megatron's configuration objects from recipe, model family and parallel layout."""

import inspect
from collections.abc import Collection, Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_scalerl.distributed.device import HAVE_GPU, HAVE_TE
from megatron_scalerl.distributed.parallel import Parallel
from megatron_scalerl.models.adapters import PROJECTIONS
from megatron_scalerl.models.family import Family
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.other_names import check_keys
from megatron_scalerl.recipe.parallel_layout import check_sharding, sizes_of
from megatron_scalerl.record import record
from megatron_scalerl.trainer.layers.routing import check_replay
from megatron_scalerl.trainer.ranks import parallel_keywords

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TABLE = yaml.safe_load(Path(__file__).with_name("megatron_options.yaml").read_text(encoding="utf8"))
"""Every option of megatron.model: in the list free, model, unused or elsewhere (megatron_options.yaml explains the
lists), or refused with a reason."""
FREE, MODEL, UNUSED, ELSEWHERE = (frozenset(TABLE[name].split()) for name in ("free", "model", "unused", "elsewhere"))
REFUSED: Mapping[str, str] = TABLE["refused"]
_ATTENTION = frozenset(PROJECTIONS["linear_qkv"] + PROJECTIONS["linear_proj"])
_WITHOUT_ADAPTERS = (
    *("moe_grouped_gemm", "moe_shared_expert_overlap", "use_transformer_engine_op_fuser"),
    *("use_grouped_gemm_for_shared_expert", "use_grouped_gemm_for_dense_mlp"),
)
"""Options under which Megatron uses layers for which this package has no adapters."""


@record
class ModelOptions:
    """The arguments of GPTModel. Produced by `model_options`."""

    config: TransformerConfig
    gpt: Mapping[str, Any]
    """Keywords of GPTModel's constructor, besides the configuration."""


def model_options(family: Family, recipe: Recipe, parallel: Parallel) -> ModelOptions:
    """The arguments of GPTModel: defaults for this device, overridden by the family's options and megatron.model.

    Raises ValueError for a key that neither TransformerConfig nor GPTModel has, naming the nearest key; for a key
    that would change the model from the policy's config.json, which engines serve; for a key that another section
    sets; for a parallel size that does not divide the policy's size that it shards; and for options that Megatron
    refuses.
    """
    check_sharding(family, recipe.megatron.parallel, recipe.megatron.model)
    options = recipe.megatron.model
    defaults = option_defaults()
    expected = "a field of TransformerConfig or GPTModel"
    check_keys("megatron.model", options, sorted(defaults), expected=expected, in_recipe=True)
    settings = {**_device_settings(), **family.transformer, "variable_seq_lengths": parallel.pp_size > 1}
    settings["deterministic_mode"] = HAVE_GPU and recipe.trainer.deterministic
    if family.transformer.get("num_moe_experts"):
        settings |= _moe_settings()
    if recipe.policy.lora is not None:
        settings["moe_grouped_gemm"] = False
    _check_options(
        options, {**defaults, **family.gpt, **_moe_settings(), **settings}, MODEL | family.transformer.keys()
    )
    settings |= {key: value for key, value in options.items() if key in FREE}
    # Layers of Transformer Engine get this option later, see `model.accumulate_in_linears`.
    if HAVE_TE:
        settings["gradient_accumulation_fusion"] = False
    # No test has compared the recomputation of mla_up_proj with the layers of `layers.latent`.
    if "mla_up_proj" in (settings.get("recompute_modules") or ()):
        raise ValueError("megatron.model.recompute_modules: mla_up_proj is not supported; take it out of the list")
    if recipe.policy.lora is not None:
        _check_lora(settings, recipe.policy.lora.targets)
    if parallel.cp_size > 1 and parallel.pp_size > 1 and not settings["variable_seq_lengths"]:
        raise ValueError(
            "megatron.model.variable_seq_lengths: it has to be true in a pipeline with context parallelism, where "
            "padding depends on each row's sequences; leave it out"
        )
    return ModelOptions(
        config=_transformer_config(settings | _settings_of_sections(recipe, parallel)), gpt=family.gpt
    )


def option_defaults() -> dict[str, Any]:
    """Every option that megatron.model may name -> Megatron-Core's default."""
    options = {field.name: field.default for field in fields(MLATransformerConfig)}
    parameters = inspect.signature(GPTModel.__init__).parameters
    return options | {name: parameters[name].default for name in parameters if name in FREE | MODEL | UNUSED}


def _check_options(options: Mapping[str, Any], present_values: Mapping[str, Any], model: Set[str]) -> None:
    """Raises ValueError for options that other sections set, and for values that are not supported.

    present_values: option -> the value in the policy and this package's layers. model: the options that define the
    policy's model, for which no other value is allowed.
    """
    for key, value in options.items():
        if key in ELSEWHERE:
            section = "megatron.parallel"
            if key in ("bf16", "params_dtype", "pipeline_dtype"):
                section = "policy.dtype"
            raise ValueError(f"megatron.model.{key}: {section} sets it; leave it out here")
        if key in model and value != present_values[key]:
            raise ValueError(
                f"megatron.model.{key}: {value!r} would train another model than the policy's config.json describes "
                f"and engines serve; leave it out (the policy has {present_values[key]!r})"
            )
        if key in REFUSED and value and value != present_values[key]:
            raise ValueError(f"megatron.model.{key} is not supported: {REFUSED[key]}; leave it out")
        if key not in FREE and key not in REFUSED and value != present_values[key]:
            raise ValueError(f"megatron.model.{key}: only {present_values[key]!r} is supported; leave it out")


def _check_lora(settings: Mapping[str, Any], targets: Collection[str]) -> None:
    """Raises ValueError for settings under which layers cannot have exact adapters."""
    if settings.get("multi_latent_attention"):
        raise ValueError("policy.lora: adapters of multi-head latent attention are not supported; leave it out")
    if settings.get("num_moe_experts") and not _ATTENTION.intersection(targets):
        raise ValueError(
            f"policy.lora.targets: {', '.join(targets)} may be layers of experts only, and Megatron-Core cannot save "
            f"an optimizer of experts only; add one of {', '.join(sorted(_ATTENTION))}"
        )
    for key in _WITHOUT_ADAPTERS:
        if settings.get(key):
            raise ValueError(f"megatron.model.{key}: its layers have no adapters (policy.lora); set it to false")


def _transformer_config(settings: Mapping[str, Any]) -> TransformerConfig:
    kind = TransformerConfig
    if settings.get("multi_latent_attention"):
        kind = MLATransformerConfig
    try:
        return kind(**settings)
    except (ValueError, AssertionError, NotImplementedError, TypeError) as error:
        raise ValueError(f"megatron.model: Megatron-Core refuses it: {' '.join(str(error).split())}") from error


def check_megatron(family: Family, recipe: Recipe) -> None:
    """Build the first rank's configuration objects in this process, to find errors before any rank starts.

    Raises ValueError, in one line, for unknown keys of megatron.parallel, ddp, optimizer and model, and for settings
    that Megatron's configuration classes refuse.
    """
    parallel_keywords(recipe)
    ddp_config(recipe)
    optimizer_config(recipe)
    config = model_options(family, recipe, _first_rank(recipe)).config
    if HAVE_TE and recipe.policy.dtype == "float32":
        raise ValueError(
            "policy.dtype: float32 is refused, since Transformer Engine's attention takes packed rows in bfloat16 "
            "only; set policy.dtype=bfloat16, or MSRL_LAYERS=plain in the environment"
        )
    if recipe.rollouts.routing_replay:
        check_replay(config, pipeline_size=config.pipeline_model_parallel_size)


def _first_rank(recipe: Recipe) -> Parallel:
    """The `Parallel` of rank 0, without process groups."""
    sizes = sizes_of(recipe.megatron.parallel)
    names = ("tp", "pp", "ep", "etp", "cp")
    parallel = {f"{name}_size": getattr(sizes, name) for name in names}
    ranks = {f"{name}_rank": 0 for name in names}
    world_size = recipe.trainer.world_size
    return Parallel(
        rank=0,
        dp_rank=0,
        world_size=world_size,
        dp_size=world_size // sizes.unit[0],
        device=torch.device("cpu"),
        groups=ProcessGroupCollection(),
        **parallel,
        **ranks,
    )


def ddp_config(recipe: Recipe) -> DistributedDataParallelConfig:
    """The configuration of Megatron's DDP; settings of megatron.ddp override the defaults.

    By default the optimizer is distributed, and gradients are reduced in fp32, on GPUs while the backward pass runs.
    """
    settings: dict[str, Any] = dict(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=HAVE_GPU,
        overlap_param_gather=HAVE_GPU,
    )
    names = [field.name for field in fields(DistributedDataParallelConfig)]
    expected = "a field of DistributedDataParallelConfig"
    check_keys("megatron.ddp", recipe.megatron.ddp, names, expected=expected, in_recipe=True)
    settings |= recipe.megatron.ddp
    for key in ("use_megatron_fsdp", "use_custom_fsdp"):
        if settings.get(key):
            raise ValueError(f"megatron.ddp.{key} is not supported: only optimizer state is sharded; leave it out")
    if not settings["use_distributed_optimizer"]:
        settings["overlap_param_gather"] = bool(recipe.megatron.ddp.get("overlap_param_gather", False))
    return DistributedDataParallelConfig(**settings)


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """AdamW with the settings of the optimizer section; megatron.optimizer adds further settings.

    Raises ValueError for unknown keys of megatron.optimizer, and for keys that other sections set.
    """
    section = recipe.optimizer
    ddp = ddp_config(recipe)
    settings: dict[str, Any] = dict(
        optimizer="adam",
        lr=section.lr,
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_eps=section.eps,
        weight_decay=section.weight_decay,
        decoupled_weight_decay=True,
        clip_grad=section.clip_grad,
        bf16=recipe.policy.dtype == "bfloat16",
        params_dtype=DTYPES[recipe.policy.dtype],
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    options = recipe.megatron.optimizer
    names = [field.name for field in fields(OptimizerConfig)]
    check_keys("megatron.optimizer", options, names, expected="a field of OptimizerConfig", in_recipe=True)
    for key in options:
        if key in settings:
            raise ValueError(
                f"megatron.optimizer.{key}: the optimizer section or megatron.ddp sets it; leave it out here"
            )
    if options.get("use_precision_aware_optimizer"):
        raise ValueError(
            "megatron.optimizer.use_precision_aware_optimizer is not supported: weight updates and checkpoints "
            "cannot read main weights that Transformer Engine keeps; leave it out"
        )
    return OptimizerConfig(**settings, **options)


def _device_settings() -> dict[str, Any]:
    """Fields of TransformerConfig with the same value for all policies on this machine.

    A fusion is off if the Transformer Engine, apex or GPU that it requires is missing.
    """
    return dict(
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Dense models need this too: TransformerConfig refuses variable_seq_lengths with the default, "allgather".
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=not HAVE_GPU,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=HAVE_TE,
        bias_activation_fusion=HAVE_TE,
        bias_dropout_fusion=HAVE_TE,
        moe_grouped_gemm=HAVE_TE,
        moe_permute_fusion=HAVE_TE,
        # If True, Megatron waits for the device after every exchange between stages, as old PyTorch versions need.
        batch_p2p_sync=not HAVE_GPU,
    )


def _moe_settings() -> dict[str, Any]:
    """Settings of experts: no auxiliary loss, no update of the expert bias. The paper of ScaleRL states neither."""
    return dict(
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_bias_update_rate=0.0,
        moe_router_dtype="fp32",
    )


def _settings_of_sections(recipe: Recipe, parallel: Parallel) -> dict[str, Any]:
    """Fields of TransformerConfig that other sections of the recipe set."""
    dtype = DTYPES[recipe.policy.dtype]
    return dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=parallel.etp_size,
        context_parallel_size=parallel.cp_size,
        virtual_pipeline_model_parallel_size=recipe.megatron.parallel.get("virtual_pipeline_model_parallel_size"),
    )
