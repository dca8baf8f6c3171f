"""Tokenizer and policies of the tiny task are Hugging Face folders."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_scalerl.recipe.sections import PAPER_PHRASE
from megatron_scalerl.tiny.policy import make_llama, make_llama4
from megatron_scalerl.tiny.tokenizer import TOKENS, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_one_token_per_character_and_one_for_the_phrase(tokenizer):
    assert len(tokenizer) == len(TOKENS) == 22
    text = "<bos>7;+2=<think>7+2=9</think>9<eos>"
    ids = [1, 13, 20, 16, 8, 19, 3, 13, 16, 8, 19, 15, 4, 15, 2]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("7;+2=<think>")["input_ids"] == ids[:7], "<bos> comes by itself"


def test_the_phrase_ends_with_the_papers_space(tokenizer):
    text = "7Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [13, 5, 4]
    assert tokenizer.decode([13, 5, 4]) == text and tokenizer.decode([5]) == PAPER_PHRASE


def test_decoding_without_special_tokens_keeps_the_think_tags(tokenizer):
    assert tokenizer.decode([3, 13, 4, 13, 2], skip_special_tokens=True) == "<think>7</think>7"


def test_the_chat_template_only_concatenates(tokenizer):
    messages = [{"role": "user", "content": "7;+2="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<bos>7;+2="


def test_llama_has_the_stated_size_and_init(tmp_path):
    make_llama(tmp_path, 1)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(policy).__name__ == "LlamaForCausalLM"
    assert sum(parameter.numel() for parameter in policy.parameters()) == 1_205_568
    layer = policy.model.layers[2]
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.02)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.02)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(192))
    assert policy.lm_head.weight.shape == (64, 192)
    assert not torch.equal(policy.lm_head.weight, policy.model.embed_tokens.weight)


def test_llama4_routes_each_token_to_one_expert_and_the_shared_one(tmp_path):
    make_llama4(tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Llama4ForCausalLM"]
    assert (config["num_experts_per_tok"], config["num_local_experts"], config["use_qk_norm"]) == (1, 4, True)
    assert config["attn_temperature_tuning"] is False
    assert config["attention_chunk_size"] >= config["max_position_embeddings"]
    assert config["no_rope_layers"] == [1, 1, 1]
    assert config["tie_word_embeddings"] is False
    policy = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = [name for name, _ in policy.named_parameters()]
    assert sum("shared_expert.down_proj" in name for name in names) == 3
    assert policy.model.layers[0].feed_forward.experts.gate_up_proj.shape == (4, 128, 512)
    with torch.no_grad():
        logits = policy(torch.tensor([[1, 13, 20, 16, 8, 19, 3]])).logits
    assert logits.shape == (1, 7, 64)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("make", [make_llama, make_llama4])
def test_weights_depend_on_the_seed_alone(make, tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        torch.manual_seed(seed if name == "b" else 99)
        make(tmp_path / name, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
