"""A refused config.json names a part of the model that we lack, or a key of its own, in one line with the folder."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_scalerl.models import FAMILIES, family, read_hf_config
from megatron_scalerl.models.unsupported import PARTS

PUBLISHED = yaml.safe_load((Path(__file__).parents[1] / "data/unsupported_configs.yaml").read_text())


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
    published = PUBLISHED[kind]
    said = refusal(tmp_path, model_type=kind, architectures=["AForCausalLM"], **published["keys"])
    assert f"model_type {kind!r} is not supported: the model has " in said and said.endswith(
        "docs/families.md says how to add a family"
    )
    assert [part for part in published["says"] if part not in said] == [], said
    assert "rope_theta" not in said
    if kind == "phi3":
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
            "is not supported: the model has (.*); supported are", refusal(tmp_path, **{**config, "model_type": kind})
        )
        assert named is not None
        if not any(part in named[1] for part in [*PARTS, "the keys"]):
            bare.append(kind)
    assert kinds > 300 and len(bare) <= 12, bare


@pytest.mark.parametrize("head", ["Qwen2ForSequenceClassification", "Qwen2ForTokenClassification", "Qwen2Model"])
def test_a_model_without_the_head_of_a_policy_is_refused(head, tmp_path):
    said = refusal(tmp_path, model_type="qwen2", architectures=[head])
    assert f"{head} has no language-model head" in said


def test_quantized_weights_and_refused_keys_name_the_folder(tmp_path):
    qwen2 = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert "the weights are quantized (a); take the bf16 release from which they were quantized" in refusal(
        tmp_path, **qwen2, quantization_config={"quant_method": "a"}
    )
    said = refusal(tmp_path, **qwen2, use_sliding_window=True)
    assert said == f"{tmp_path}/config.json: use_sliding_window: True is not supported, only False"
