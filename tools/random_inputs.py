"""Random policies, samples and completions for the benchmarks, and a trainer's recipe."""

import random

import numpy as np

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, facts_of
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Rollout, RolloutGroup, Sample, Score

LLAMA_134M = dict(vocab=32_000, hidden=768, inner=2048, layers=12, heads=12, groups=12)
"""Of `random_llama`."""


def llama_settings(*, vocab, hidden, inner, layers, heads, groups, **others):
    """Arguments of transformers' LlamaConfig and its like."""
    found = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    found |= dict(num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=False)
    return found | others


def random_model(kind="dense", **shape):
    """A Llama, or for "moe" a Llama 4, as transformers initializes it. shape: of `llama_settings`."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = llama_settings(**shape)
    if kind == "dense":
        return LlamaForCausalLM(LlamaConfig(**settings))
    model = Llama4ForCausalLM(Llama4TextConfig(**settings))
    with torch.no_grad():  # transformers leaves the fused experts as they come
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.02)
    return model


def random_llama(folder, *, dtype="bfloat16", **shape):
    """Write a Llama without a tokenizer."""
    import torch

    random_model(**shape).to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def recipe_of(policy, *, dtype="float32", **blocks):
    """A recipe for a trainer that gets its batches by hand."""
    policy_block = {"path": str(policy), "dtype": dtype}
    whole = {"name": "bench", "steps": 1, "policy": policy_block, "prompts": {"path": "none.jsonl"}} | blocks
    return Recipe.model_validate(whole)


def random_samples(
    count,
    lengths,
    vocab,
    *,
    prompt=None,
    share=3,
    logprob=-4,
):
    """Samples of random tokens, `prompt` or one of `share` parts of each its prompt; the weights add up to 1.

    lengths: tokens of the shortest and of the longest. logprob: the engine's of each token.
    """
    rng = random.Random(0)
    found = []
    for _ in range(count):
        length = rng.randint(*lengths)
        ids = tuple(rng.randrange(vocab) for _ in range(length))
        split = length // share if prompt is None else prompt
        size = length - split
        rollout = dict(
            rollout_logprobs=(float(logprob),) * size, policy_versions=(0,) * size, loss_mask=(True,) * size
        )
        rollout |= dict(interrupted=False, truncated=False, thinking_cut=0, seed=0)
        found.append(
            Sample(
                prompt_token_ids=ids[:split],
                rollout=Rollout(token_ids=ids[split:], **rollout),
                advantage=rng.choice((-1.0, 1.0)),
                token_weight=1.0 / (count * size),
            )
        )
    return found


def random_completion(rng, tokens):
    """A completion of policy version 0 without forced tokens."""
    return RolloutArrays(
        token_ids=rng.integers(0, 128_000, tokens).astype("<u4"),
        rollout_logprobs=-rng.exponential(0.3, tokens).astype("<f4"),
        policy_versions=np.zeros(tokens, dtype=np.int64),
        loss_mask=np.ones(tokens, dtype=bool),
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )


def group_of(number, prompt, completions, right):
    """A finished group of completions of one version. right: whether each has the answer."""
    return RolloutGroup(
        group_id=number,
        prompt=prompt,
        completions=tuple(map(facts_of, completions)),
        positions=tuple(range(len(completions))),
        scores=tuple(Score(correct=each, reward=1.0 if each else -1.0) for each in right),
        first_token_version=int(completions[0].policy_versions[0]),
        epoch=0,
    )
