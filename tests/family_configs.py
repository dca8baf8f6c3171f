"""Tiny configs of every family, and the shapes of Megatron's shards as the weight map implies them."""

from transformers import (
    DeepseekV3Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
    "llama4": lambda: Llama4TextConfig(**LLAMA4),
}
FUSED = ("model.layers.1.mlp.experts.gate_up_proj",)


def family_of(kind):
    return family(CONFIGS[kind](), FUSED if kind.endswith("fused") else ())


def shard_shape(rule, size):
    pieces = [piece for rank in range(size) for piece in rule.pieces(rank, size)]
    lengths = [part.stop - part.start for part in pieces[0].hf_index if isinstance(part, slice)]
    lengths = lengths[::-1] if pieces[0].transposed else lengths
    lengths[pieces[0].axis] = max(piece.stop for piece in pieces)
    return tuple(lengths)
