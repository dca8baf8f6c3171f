"""Tiny configs of every family, and the shapes of Megatron's shards as the weight map implies them."""

import torch
from transformers import (
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5Config,
    Exaone4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from megatron_scalerl.models import family

LLAMA = dict(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    pad_token_id=None,
)
LLAMA4 = dict(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=20,
    intermediate_size_mlp=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_local_experts=3,
    moe_layers=[1, 3],
)
QWEN3_MOE = dict(**LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20)
DEEPSEEK = LLAMA | dict(
    num_key_value_heads=4,
    q_lora_rank=10,
    kv_lora_rank=14,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    num_nextn_predict_layers=0,
)
DEEPSEEK.pop("head_dim")
FLASH = {key: value for key, value in DEEPSEEK.items() if key not in ("scoring_func", "topk_method")}
GLM = LLAMA | dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    n_shared_experts=1,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    attention_bias=True,
)
MIXTRAL = LLAMA | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=20)
MINIMAX = MIXTRAL | dict(head_dim=8, rotary_dim=4, scoring_func="sigmoid", use_routing_bias=True)
OLMOE = LLAMA | dict(num_experts=4, num_experts_per_tok=2, intermediate_size=20)
OLMOE.pop("head_dim")
CONFIGS = {
    "deepseek_v3": lambda: DeepseekV3Config(**DEEPSEEK),
    "deepseek_v3 moonlight": lambda: DeepseekV3Config(**DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2}),
    "llama": lambda: LlamaConfig(**LLAMA),
    "llama tied": lambda: LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama biased": lambda: LlamaConfig(**LLAMA, attention_bias=True),
    "mistral": lambda: MistralConfig(**{**LLAMA, "head_dim": 10}, sliding_window=None),
    "olmo2": lambda: Olmo2Config(**LLAMA),
    "qwen2": lambda: Qwen2Config(**LLAMA),
    "qwen3": lambda: Qwen3Config(**{**LLAMA, "head_dim": 10}),
    "qwen3 tied": lambda: Qwen3Config(**LLAMA, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**QWEN3_MOE, mlp_only_layers=[0]),
    "qwen3_moe fused": lambda: Qwen3MoeConfig(**QWEN3_MOE, decoder_sparse_step=2),
    "smollm3": lambda: SmolLM3Config(**LLAMA),
    "seed_oss": lambda: SeedOssConfig(**LLAMA, attention_out_bias=True),
    "ernie4_5": lambda: Ernie4_5Config(**LLAMA),
    "exaone4": lambda: Exaone4Config(**LLAMA, sliding_window=None, layer_types=["full_attention"] * 2),
    "glm4_moe": lambda: Glm4MoeConfig(**GLM, use_qk_norm=True),
    "glm4_moe_lite deepseek": lambda: Glm4MoeLiteConfig(**FLASH),
    "minimax_m2": lambda: MiniMaxM2Config(**MINIMAX),
    "mixtral": lambda: MixtralConfig(**MIXTRAL),
    "olmoe": lambda: OlmoeConfig(**OLMOE),
    "dots1": lambda: Dots1Config(**GLM, sliding_window=None),
    "llama4": lambda: Llama4TextConfig(**LLAMA4),
}
FUSED = ("model.layers.1.mlp.experts.gate_up_proj",)


def as_published(model_type, name):
    """The checkpoint's name of what transformers calls `name`: Mixtral and MiniMax-M2 have others for an MLP."""
    if model_type not in ("mixtral", "minimax_m2"):
        return name
    others = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for usual, published in others.items():
        name = name.replace(usual, published)
    return name


def experts_apart(model_type, tensors):
    """The checkpoint's names and tensors, where transformers has one `tensors` for all experts of a layer."""
    for name, tensor in tensors:
        layer, fused, projection = name.partition("mlp.experts.")
        if not fused:
            yield as_published(model_type, name), tensor
            continue
        projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for expert, weight in enumerate(tensor):
            for kind, part in zip(projections, weight.chunk(len(projections))):
                yield as_published(model_type, f"{layer}mlp.experts.{expert}.{kind}.weight"), part


def family_of(kind):
    return family(CONFIGS[kind](), FUSED if kind.endswith("fused") else ())


def shard_of(rule, rank, size, source):
    """A rank's shard of a parameter, filled from the checkpoint's tensors."""
    shard = torch.zeros(shard_shape(rule, size))
    for piece in rule.pieces(rank, size):
        piece.of_shard(shard).copy_(source[piece.hf_name][piece.hf_index])
    return shard


def shard_shape(rule, size):
    pieces = [piece for rank in range(size) for piece in rule.pieces(rank, size)]
    lengths = [part.stop - part.start for part in pieces[0].hf_index if isinstance(part, slice)]
    lengths = lengths[::-1] if pieces[0].transposed else lengths
    lengths[pieces[0].axis] = max(piece.stop for piece in pieces)
    return tuple(lengths)
