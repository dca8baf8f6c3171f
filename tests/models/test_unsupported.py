"""A refused config.json names keys that no supported family has, in one line with the folder."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_scalerl.models import FAMILIES, family, read_hf_config

GDN = {"linear_num_key_heads": 16, "layer_types": ["linear_attention", "full_attention"]}
PUBLISHED = {
    "gemma2": ({"final_logit_softcapping": 30.0, "sliding_window": 4096}, "final_logit_softcapping"),
    "qwen3_5": ({"text_config": GDN, "vision_config": {"depth": 27}}, "linear_num_key_heads"),
    "kimi_linear": ({"kv_lora_rank": 512, "linear_attn_config": {"kda_layers": [1]}}, "modules that nobody"),
    "a_new_one": ({"gated_memory": 4, "hidden_size": 8, "attention_dropout": 0.0}, "(gated_memory)"),
    "of_many_keys": (dict.fromkeys("abcdefg", 1), "(a, b, c, d, e)"),
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
def test_a_config_of_another_family_names_keys_of_its_own(kind, tmp_path):
    keys, words = PUBLISHED[kind]
    said = refusal(tmp_path, model_type=kind, architectures=["AForCausalLM"], **keys)
    assert said.endswith("adding a family: docs/families.md")
    assert f"model_type {kind!r} is not supported: it has " in said and words in said


@pytest.mark.full
def test_every_type_that_transformers_knows_is_refused_in_one_line(tmp_path):
    """By the defaults of its config class."""
    kinds = 0
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except NOT_WITHOUT_ARGUMENTS:
            continue
        if kind not in FAMILIES:
            assert "is not supported: it has " in refusal(tmp_path, **{**config, "model_type": kind})
            kinds += 1
    assert kinds > 300


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
