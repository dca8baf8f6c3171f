"""What each rank does for the families' parity tests: load, whole logits through the pipeline, save."""

from dataclasses import replace

import torch
from gathered_weights import gathered
from parity_ranks import built
from policy_rows import arguments, full_logits
from random_policies import rows
from safetensors.torch import save_file


def logits_and_saved(jobs):
    """Logits [N, vocab] of the second fixed row on ranks of the last stage, with the model's log-probabilities and
    entropies; saves the untouched weights."""
    from megatron_scalerl.weights.source import MegatronWeightSource

    found = {}
    for name, path, layout, out in jobs:
        with built(path, layout) as (chunks, parallel, _):
            for both in _logits(chunks):
                found[name] = both
            if out:
                whole = gathered(MegatronWeightSource(chunks, parallel))
                if parallel.rank == 0:
                    save_file(whole, out)
    return found


def logits_without(jobs):
    """Logits of policies that lack one feature: for (feature, policy path), the feature being a key of WITHOUT."""
    from megatron_scalerl.trainer import model

    whole, found = model.family_of_folder, {}
    for feature, path in jobs:
        model.family_of_folder = lambda path, take=WITHOUT[feature]: take(whole(path))
        found |= logits_and_saved([(feature, path, {}, "")])
    model.family_of_folder = whole
    return found


def _option(**options):
    return lambda family: replace(family, transformer={**family.transformer, **options})


def _layers(**style):
    return lambda family: replace(family, layers=tuple(replace(layer, **style) for layer in family.layers))


def _rope_everywhere(family):
    """The layer without RoPE gets it, still without norm and chunks."""
    return replace(family, transformer={**family.transformer, "no_rope_freq": [0] * len(family.layers)})


def _whole_heads(family):
    """RoPE of as many more angles as the head has room for."""
    return replace(family, inv_freq=family.inv_freq.repeat(2))


WITHOUT = {
    "kimi: YaRN's scales": _option(mscale=1.0, mscale_all_dim=0.0),
    "kimi: router's bias": _option(moe_router_enable_expert_bias=False),
    "deepseek: groups of experts": _option(moe_router_num_groups=None, moe_router_group_topk=None),
    "moonlight: scaled experts": _option(moe_router_topk_scaling_factor=None),
    "moonlight: shared experts": _option(moe_shared_expert_intermediate_size=None),
    "llama4: chunked attention": _layers(chunked=False),
    "llama4: no chunks in layers without RoPE": _layers(chunked=True),
    "llama4: attention temperature": lambda family: replace(family, query_scale=None),
    "llama4: layers without RoPE": _rope_everywhere,
    "llama4: query and key norm": _layers(qk_norm="none"),
    "llama4: no such norm without RoPE": _layers(qk_norm="weightless"),
    "llama4: interleaved rotary pairs": _option(rotary_interleaved=False),
    "llama4: probability on the expert's input": _option(moe_apply_probs_on_input=False),
    "llama4: sigmoid router": _option(moe_router_score_function="softmax", moe_router_pre_softmax=True),
    "llama4: shared expert": _option(moe_shared_expert_intermediate_size=None),
    "smollm3: layers without RoPE": _rope_everywhere,
    "ernie4_5: interleaved rotary pairs": _option(rotary_interleaved=False),
    "exaone4: query and key norm": _layers(qk_norm="none"),
    "seed_oss: query, key and value biases": _option(add_qkv_bias=False),
    "glm4_moe: query and key norm": _layers(qk_norm="none"),
    "glm4_moe: part of a head without RoPE": _whole_heads,
    "glm4_moe: shared expert": _option(moe_shared_expert_intermediate_size=None),
    "minimax_m2: part of a head without RoPE": _whole_heads,
    "minimax_m2: router's bias": _option(moe_router_enable_expert_bias=False),
    "mixtral: normalized probabilities": _option(moe_router_pre_softmax=True),
    "olmoe: query and key norm": _layers(qk_norm="none"),
    "olmoe: probabilities over all experts": _option(moe_router_pre_softmax=False),
    "dots1: scaled experts": _option(moe_router_topk_scaling_factor=None),
    "olmo2: query and key norm": _layers(qk_norm="none"),
    "qwen2: query, key and value biases": _option(add_qkv_bias=False),
    "qwen2_tied: YaRN's attention factor": _option(softmax_scale=None),
    "qwen3: query and key norm": _layers(qk_norm="none"),
    "qwen3: weights of that norm": _layers(qk_norm="weightless"),
    "qwen3_moe: normalized probabilities": _option(moe_router_pre_softmax=True),
    "qwen3_moe: two experts": _option(moe_router_topk=1, moe_router_pre_softmax=True),
    "qwen3_moe_tied: probabilities over all experts": _option(moe_router_pre_softmax=False),
    "qwen3_tied: YaRN's attention factor": _option(softmax_scale=None),
    "llama_biased: output bias": lambda family: replace(family, output_bias=False),
    "llama_biased: query, key and value biases": _option(add_qkv_bias=False),
}
"""Policy kind and feature -> the family without it."""


def _logits(chunks):
    """On the last stage the logits, and the model's log-probabilities and entropies; nothing before it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    row = rows()[1]
    found = []

    def forward(_, model):
        logits = full_logits(model, row)
        output = model(**arguments(model, row))
        if logits is not None:
            found.append((logits, output))
        return output, lambda output: (output.sum(), {})

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=chunks,
            num_microbatches=1,
            seq_length=row["tokens"].shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    return found
