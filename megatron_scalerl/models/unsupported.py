"""Names the parts of a model that no family supports, from the keys and the model_type of the model's config.json.

`PARTS` recognizes parts, such as routers and vision towers, by keys that many models use for the part. For a config
without such keys, `parts_of` lists the keys that no supported family has.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

PARTS = {
    "an encoder": r"is_encoder_decoder|encoder_(layers|config|hidden_size)|num_encoder_layers|cross_attention.*",
    "a vision or audio tower": r"(vision|visual|audio|image|video|speech|thinker|talker|sam|codec|dac|vq)_.*|"
    r".*(perceiver|patch|image|_mel_|pixel|num_channels|num_codebooks|qformer|backbone_config|_vl(_|$)|_ocr|omni).*",
    "multi-head latent attention": r"kv_lora_rank",
    "linear attention": r"linear_.*|lightning.*|attn_linear.*|.*rwkv.*|delta_.*|kda_.*|minimax",
    "state-space layers": r".*mamba.*|ssm_.*|time_step_.*|hybrid_override_pattern|state_size|attn_layer_period|"
    r"recurrent.*|lru_.*|conv_kernel.*|xlstm.*|[sm]lstm.*",
    "convolution layers": r"conv|conv_L_cache",
    "differential attention": r"diffllama",
    "an attention temperature": r"ministral3|attn_temperature.*",
    "sparse attention": r"index_(topk|n_heads|head_dim)|.*(block_sparse|sparse_attention|moba|nsa_).*",
    "sliding windows": r"(use_)?sliding.*|.*attention_window|window_size|local_attention|attention_types|chunked.*",
    "attention sinks": r"gpt_oss|.*_sinks?(_.*)?",
    "experts": r"(num|n|moe_num|num_local|n_routed|num_routed)_experts|moe_.*|ffn_config",
    "an unusual router": r"scoring_func|score_function|topk_method|(n|num_expert|topk)_group|moe_router.*|"
    r"router_(?!aux|jitter|z_loss|weighting).*|routed_scaling_factor|.*expert_bias",
    "a shared expert": r"(n_|num_)?shared_expert.*",
    "multi-token prediction": r"num_nextn_predict_layers|mtp_.*|num_mtp.*",
    "per-layer embeddings": r".*_per_layer_input|laurel.*|altup.*",
    "logit soft-capping": r".*soft_?cap.*",
    "multipliers of embeddings, residuals or logits": r".*_multipliers?|logits?_scal.*|scale_(emb|depth)|mup_.*|"
    r"embedding_scale|scale_embedding|.*residual_scale.*|(vault)?gemma.*",
    "norms after attention and MLP": r"(use_)?(sandwich|post)_?norm.*|gemma[2-9].*|glm4",
    "other norms": r"layer_norm.*|(rms_|layer)?norm_(eps(ilon)?|type)(?<!rms_norm_eps)|(use_)?qk_(layer)?norm.*|"
    r"olmo|hunyuan_v1_dense",
    "partial rotary embeddings": r"partial_rotary_factor|rotary_(pct|dim|percent)|rope_(percent|ratio)",
    "interleaved rotary embeddings": r"helium",
    "layers without rotary embeddings": r"no_rope.*|nope.*",
    "position embeddings other than RoPE": r"alibi.*|n_positions|relative_attention.*|position_embedding_type|"
    r"type_vocab_size|learned_pos.*|max_source_positions|axial.*",
    "fused projections": r"phi3|glm4|fused_qkv.*|multi_query|new_decoder_architecture",
    "another activation": r"(gelu|relu|quick|tanh|sigmoid|xielu).*",
    "layers that share weights": r"num_hidden_groups|.*shared_layers|num_loops|total_ut_steps",
    "biases": r"(use_)?bias|.*_bias",
}
"""Part of a model -> pattern of the words that only models with the part have.

A word is a key of the config, a kind of layer, an activation or a model_type.
"""
_QUIET = re.compile(
    r"(.*dropout.*|.*token.*|initializer.*|use_cache|transformers_version|architectures|model_type|dtype|torch_dtype|"
    r"_.*|id2label|label2id|output_.*|return_dict|problem_type|chunk_size_.*|auto_map|is_decoder|tie_.*|.*_loss.*|"
    r"layer_types|num_labels|.*_config|rope_(theta|scaling|parameters))$"
)
"""Pattern of keys that have nothing to do with a model's layers, and that no message names."""
_MOST = 5
"""Largest number of parts, or of keys, that a message names."""


def parts_of(config: Mapping[str, Any], supported_keys: Collection[str]) -> str:
    """The unsupported parts of a model as text, each with the word of the config by which `PARTS` names the part.

    If no part is recognized, the text lists the keys outside `supported_keys`, the keys of supported families.
    """
    words = list(_words(config))
    parts = []
    for part, pattern in PARTS.items():
        word = next(filter(re.compile(pattern).fullmatch, words), None)
        if word:
            parts.append(f"{part} ({word})")
    if parts:
        return ", ".join(parts[:_MOST])
    unusual = [
        key
        for key in dict.fromkeys([*words, *config])
        if key in config and key not in supported_keys and key.isidentifier() and not _QUIET.match(key)
    ]
    if unusual:
        return f"the keys {', '.join(unusual[:_MOST])}"
    return "modules that have not been compared with a supported family's"


def _words(config: Mapping[str, Any]) -> Iterator[str]:
    """The model_type, the keys that are set (not null, false, 0 or 1.0), and the names of activations and kinds of
    layers.

    The words of a multimodal config include the words of the text model's section.
    """
    yield str(config.get("model_type"))
    for key, value in config.items():
        if isinstance(value, Mapping) and re.match(r"text|llm|language|thinker|decoder", key):
            yield from _words(value)
        switched_off = not value or (isinstance(value, float) and value == 1.0)
        if switched_off or ("window" in key and config.get("use_sliding_window") is False):
            continue
        yield key
        if "act" in key:
            yield str(value)
        if isinstance(value, list) and key in ("layer_types", "layers_block_type", "block_types"):
            yield from map(str, value)
