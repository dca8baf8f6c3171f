"""A refused config.json names a part of the model that we lack, or a key of its own, in one line with the folder."""

import json
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_scalerl.models import FAMILIES, family, read_hf_config
from megatron_scalerl.models.unsupported import PARTS

MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536}
EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 8}
GDN = {"linear_num_key_heads": 16, "layer_types": ["linear_attention", "full_attention"]}
PUBLISHED = {
    "qwen3_5": ({"text_config": GDN, "vision_config": {"depth": 27}}, ["linear attention", "a tower"]),
    "qwen3_5_moe": ({"text_config": GDN | {"num_experts": 256}}, ["linear attention", "experts"]),
    "qwen3_next": (GDN | {"shared_expert_intermediate_size": 512}, ["linear attention", "a shared expert"]),
    "glm4_moe": (EXPERTS | {"partial_rotary_factor": 0.5, "n_group": 1}, ["experts", "partial rotary embeddings"]),
    "glm_moe_dsa": (MLA | {"index_topk": 2048}, ["multi-head latent attention", "sparse attention"]),
    "nemotron_h": ({"hybrid_override_pattern": "M-M*", "ssm_state_size": 128}, ["state-space layers"]),
    "gemma4": ({"vision_config": {}, "text_config": {"sliding_window": 512}}, ["sliding windows", "norms after"]),
    "gemma3n": (
        {"audio_config": {"a": 1}, "text_config": {"laurel_rank": 64}},
        ["a tower", "embeddings for each layer"],
    ),
    "qwen2_5_vl": ({"vision_config": {"depth": 32}, "image_token_id": 151655}, ["a tower"]),
    "qwen3_vl": ({"vision_config": {"depth": 27}, "text_config": {}}, ["a tower"]),
    "deepseek_v2": (
        MLA | EXPERTS | {"topk_method": "group_limited_greedy"},
        ["latent attention", "a router of its own"],
    ),
    "deepseek_v32": (MLA | {"index_n_heads": 64}, ["latent attention", "sparse attention"]),
    "minimax_m2": ({"num_local_experts": 256, "scoring_func": "sigmoid"}, ["experts", "a router of its own"]),
    "mimo": ({"num_nextn_predict_layers": 1, "attention_bias": True}, ["multi-token prediction"]),
    "seed_oss": ({"attention_out_bias": False, "attention_bias": True}, ["biases"]),
    "kimi_linear": (MLA | {"linear_attn_config": {"kda_layers": [1]}}, ["linear attention", "latent attention"]),
    "bailing_moe": ({"num_experts": 64, "num_shared_experts": 2}, ["experts", "a shared expert"]),
    "ernie4_5_moe": ({"moe_num_experts": 64, "use_bias": False}, ["experts"]),
    "hunyuan_v1_moe": ({"num_experts": 64, "use_qk_norm": True, "moe_topk": [8]}, ["experts", "other norms"]),
    "exaone4": ({"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, ["sliding windows"]),
    "internlm3": ({"qkv_bias": True, "bias": False}, ["biases"]),
    "falcon_h1": ({"mamba_d_ssm": 3072, "lm_head_multiplier": 0.04}, ["state-space layers", "multipliers"]),
    "granitemoehybrid": (
        {"layer_types": ["mamba", "attention"], "logits_scaling": 8},
        ["state-space", "multipliers"],
    ),
    "olmoe": ({"num_experts": 64, "clip_qkv": None}, ["experts"]),
    "gpt_oss": ({"num_local_experts": 128, "sliding_window": 128}, ["attention sinks", "sliding windows"]),
    "phi3": ({"sliding_window": None, "partial_rotary_factor": 0.75}, ["fused projections", "partial rotary"]),
    "smollm3": (
        {"no_rope_layers": [1, 0], "use_sliding_window": False, "sliding_window": 4096},
        ["layers without rotary"],
    ),
    "a_new_one": ({"gated_memory": 4, "hidden_size": 8}, ["the keys gated_memory"]),
}
"""model_type -> (keys as the published config.json has them, what the line says)."""


NOT_WITHOUT_ARGUMENTS = (AttributeError, ImportError, OSError, StrictDataclassError, TypeError, ValueError)
"""Of config classes that need arguments, packages or files."""


def refusal(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        family(read_hf_config(folder))
    said = str(caught.value)
    assert said.startswith(f"{folder}/config.json: ") and "\n" not in said
    return said


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_of_other_families_name_their_parts(kind, tmp_path):
    keys, parts = PUBLISHED[kind]
    said = refusal(tmp_path, model_type=kind, architectures=["AForCausalLM"], **keys)
    assert f"model_type {kind!r} is not supported: it has " in said and said.endswith(
        "adding a family: docs/families.md"
    )
    assert [part for part in parts if part not in said] == [], said
    if kind in ("smollm3", "phi3"):
        assert "sliding" not in said, "they are switched off"


@pytest.mark.full
def test_every_type_that_transformers_knows_names_something(tmp_path):
    """By the defaults of its config class; a dozen differ from the supported families in their modules alone."""
    bare, kinds = [], 0
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except NOT_WITHOUT_ARGUMENTS:
            continue
        if kind in FAMILIES:
            continue
        kinds += 1
        named = re.search(
            "is not supported: it has (.*); supported are", refusal(tmp_path, **{**config, "model_type": kind})
        )
        assert named is not None
        if not any(part in named[1] for part in [*PARTS, "the keys"]):
            bare.append(kind)
    assert kinds > 300 and len(bare) <= 12, bare


@pytest.mark.parametrize("head", ["Qwen2ForSequenceClassification", "Qwen2ForTokenClassification", "Qwen2Model"])
def test_a_model_without_the_head_of_a_policy_is_refused(head, tmp_path):
    said = refusal(tmp_path, model_type="qwen2", architectures=[head])
    assert f"{head} is no policy: its head is not a language model's" in said


def test_quantized_weights_and_refused_keys_name_the_folder(tmp_path):
    qwen2 = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert "the weights are quantized (a); take the policy's bf16 release" in refusal(
        tmp_path, **qwen2, quantization_config={"quant_method": "a"}
    )
    said = refusal(tmp_path, **qwen2, use_sliding_window=True)
    assert said == f"{tmp_path}/config.json: use_sliding_window: True is not supported, only False"
