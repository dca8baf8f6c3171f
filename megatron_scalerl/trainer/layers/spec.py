"""The layers of a policy as Megatron's ModuleSpecs: Transformer Engine's if available, else plain layers.

The life of a spec: `PolicyModel` asks for `block_submodules` of a model chunk; a provider names the classes of this
machine; each layer's style in the family chooses a class; Megatron builds a TransformerLayer from each spec.

The Transformer Engine part ran on one GPU (docs/gpu.md).
"""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_scalerl.distributed.device import HAVE_TE
from megatron_scalerl.models.family import Family, LayerStyle
from megatron_scalerl.recipe.sections import LoraSection
from megatron_scalerl.trainer.layers.attention import SdpaCoreAttention, with_bias, with_chunks
from megatron_scalerl.trainer.layers.lora import with_lora
from megatron_scalerl.trainer.layers.norm import AllHeadsRMSNorm, HeadRMSNorm, SequenceParallelRMSNorm, with_norm

_MOE_NAMES = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_DENSE_NAMES = {**_MOE_NAMES, "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
"""Prefix of a norm's parameters in plain layers -> the prefix in Transformer Engine's layers.

Transformer Engine makes the norm a part of the next linear layer. Distributed checkpoints use Transformer Engine's
names, so runs with and without Transformer Engine read the same checkpoints."""


class PlainSpecProvider(LocalSpecProvider):
    """Megatron's plain linear layers with this package's norm and core attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The RMSNorm of `layers.norm`; no supported family has LayerNorm."""
        return SequenceParallelRMSNorm

    def core_attention(self) -> type:
        """The core attention of `layers.attention`."""
        return SdpaCoreAttention


def spec_provider() -> Any:
    """The provider of layer classes for this machine: Transformer Engine's if available, else `PlainSpecProvider`."""
    if not HAVE_TE:
        return PlainSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _post_norm(provider: Any) -> Any:
    """The provider for layers with norms after attention and MLP, where no norm is fused into a linear layer."""

    class PostNorm(type(provider)):  # type: ignore[misc]
        def fuse_layernorm_and_linear(self) -> bool:
            return False

        def row_parallel_linear(self) -> type:
            return with_norm(super().row_parallel_linear(), self.layer_norm(rms_norm=True))

    return PostNorm()


def block_submodules(
    config: TransformerConfig,
    family: Family,
    *,
    pp_rank: int,
    vp_stage: int | None,
    tp_group: Any,
    lora: LoraSection | None = None,
) -> TransformerBlockSubmodules:
    """Specs of the layers of one model chunk, each in the family's style; with `lora` the layers have adapters.

    Raises ValueError if Megatron's number of layers differs from the family's.
    """
    if config.num_layers != len(family.layers):
        raise ValueError(
            f"megatron.model.num_layers is {config.num_layers}, but config.json has {len(family.layers)} layers"
        )
    provider = spec_provider()
    if lora is not None:
        provider = with_lora(provider, lora)
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    specs = [_layer_spec(config, family, style, provider, tp_group) for style in family.layers[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=provider.layer_norm(rms_norm=True))


def _layer_spec(
    config: TransformerConfig, family: Family, style: LayerStyle, provider: Any, tp_group: Any
) -> ModuleSpec:
    norm = provider.layer_norm(rms_norm=True)
    if style.post_norm:
        norm = IdentityOp
        provider = _post_norm(provider)
    experts = None
    names = _DENSE_NAMES
    if style.moe:
        experts = config.num_moe_experts
        names = _MOE_NAMES
    input_norm = norm
    mlp_norm = norm
    # Transformer Engine fuses a norm into the linear layer after it. Before a router a norm stays separate. So does
    # the input norm of latent attention, because two linear layers follow it.
    if config.multi_latent_attention:
        names = {name: fused for name, fused in names.items() if name != "input_layernorm."}
    if provider.fuse_layernorm_and_linear():
        names = {}
        if not config.multi_latent_attention:
            input_norm = IdentityOp
        if not style.moe:
            mlp_norm = IdentityOp
    mlp = get_mlp_module_spec_for_backend(
        backend=provider, num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=input_norm,
        self_attention=_attention_spec(config, family, style, provider, tp_group),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=mlp_norm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=names,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _attention_spec(
    config: TransformerConfig, family: Family, style: LayerStyle, provider: Any, tp_group: Any
) -> ModuleSpec:
    """The spec of a layer's attention: linear layers, norms of queries and keys, and the core attention.

    In Llama 4, the core of chunked layers attends inside chunks of a sequence, and the core of layers without rotary
    positions multiplies queries by a factor of the position.
    """
    core = provider.core_attention()
    if config.multi_latent_attention:
        return _latent_attention_spec(config, provider, core)
    # Llama 4 scales queries in the layers without rotation.
    scale = family.query_scale
    if style.rope:
        scale = None
    if core is SdpaCoreAttention:
        core = partial(SdpaCoreAttention, chunked=style.chunked, query_scale=scale)
    elif style.chunked or scale is not None:
        core = with_chunks(core, chunked=style.chunked, query_scale=scale)
    qk_norms = {
        "none": IdentityOp,
        "weightless": HeadRMSNorm,
        "weighted": provider.layer_norm(rms_norm=True, for_qk=True),
    }
    if style.qk_norm == "all_heads":
        q_norm: Any = AllHeadsRMSNorm.of_heads(config.num_attention_heads, tp_group)
        k_norm: Any = AllHeadsRMSNorm.of_heads(config.num_query_groups, tp_group)
    else:
        q_norm = k_norm = qk_norms[style.qk_norm]
    qkv = provider.column_parallel_linear()
    if provider.fuse_layernorm_and_linear():
        qkv = provider.column_parallel_layer_norm_linear()
    proj = provider.row_parallel_linear()
    if family.output_bias:
        proj = with_bias(proj)
    submodules = SelfAttentionSubmodules(
        linear_qkv=qkv, core_attention=core, linear_proj=proj, q_layernorm=q_norm, k_layernorm=k_norm
    )
    # SelfAttention passes the mask type to the core attention's constructor (transformer/attention.py:385).
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _latent_attention_spec(config: TransformerConfig, provider: Any, core: Any) -> ModuleSpec:
    """The spec of multi-head latent attention.

    Queries have a projection down, a norm and a projection up, and so have keys together with values.
    """
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules

    from megatron_scalerl.trainer.layers.latent import LatentAttention

    column = provider.column_parallel_linear()
    down = column
    if HAVE_TE:
        down = provider.linear()
    norm = provider.layer_norm(rms_norm=True, for_qk=True)
    q_norm = norm
    if not config.q_lora_rank:
        q_norm = IdentityOp
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=down,
        linear_q_up_proj=column,
        linear_kv_down_proj=down,
        linear_kv_up_proj=column,
        core_attention=core,
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=q_norm,
        kv_layernorm=norm,
    )
    return ModuleSpec(module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
