"""Tiny policies for the engine's tests, made by transformers."""

import json

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.llama4 import Llama4TextConfig

VOCAB, EOS = 128, 2
ENDS = (EOS, 3)
"""Tokens that end a completion of the dense policies: the tokenizer's, and one of their generation_config.json."""
THINK_END = (5, 6, 7)
"""The closing tag of these policies: three tokens, which a random policy practically never samples in a row."""
PHRASE = (20, 21, 22, *THINK_END)
HOSTILE = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "max_new_tokens": 7,
    "eos_token_id": list(ENDS),
}
"""The dense policies' generation_config.json: defaults that no rollout may use, except for the end tokens."""

_SHARED = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 1024,
}


def config(kind):
    """kind: dense (Llama with grouped queries) or moe (Llama 4, four experts)."""
    if kind == "dense":
        return LlamaConfig(**_SHARED)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    return Llama4TextConfig(**_SHARED, **experts, intermediate_size_mlp=128, attention_chunk_size=128)


@torch.no_grad()
def randomized(model, seed):
    """The model, whose matrices are random now."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def make(folder, kind="dense", seed=0, dtype=torch.float32):
    """A random policy with peaked outputs, saved as a Hugging Face folder with a tokenizer."""
    model = randomized(AutoModelForCausalLM.from_config(config(kind)).to(dtype), seed)
    model.save_pretrained(folder)
    if kind == "dense":
        (folder / "generation_config.json").write_text(json.dumps(HOSTILE))
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", bos_token="t1", eos_token=f"t{EOS}"
    ).save_pretrained(folder)
    return folder


def load(folder, dtype=torch.float32):
    """The policy in transformers, in float32 arithmetic."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logprobs(model, prompt, completion):
    """[T, vocabulary] log-probs at every completion token."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    return logits.float().log_softmax(-1)[len(prompt) - 1 : -1]


def error_of(model, prompt, rollout, start=0, end=None):
    """Largest |engine - transformers log-prob| of the sampled tokens from index `start` to `end`."""
    rows = logprobs(model, list(prompt), list(rollout.token_ids))
    expected = rows.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
    errors = (expected - torch.tensor(rollout.rollout_logprobs)).abs() * torch.tensor(rollout.loss_mask)
    return errors[start:end].max().item()


def make_nan(policy, folder):
    """The same policy with a head of NaN, so that no log-probability can be computed."""
    model = load(policy)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(folder)
    return folder
