"""Random policies for an engine and a trainer on one device, their log-probs by transformers on the CPU, tolerances.

Every matrix preserves the variance of its input, and the logits have a standard deviation of 3: distributions are
neither uniform nor deterministic, so that a wrong kernel changes the log-probs.
"""

import math
import statistics
from functools import partial

import random_policies
import torch

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer
from megatron_scalerl.types import Sample

THINKING, ANSWER = 200, 8
"""Largest interruption point and answer budget (tokens)."""
LAYERS, EXPERTS, CHOSEN = 4, 8, 2
"""Of the mixture of experts."""
_TOKENS = dict(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
_SHARED = dict(vocab_size=512, max_position_embeddings=4096, rms_norm_eps=1e-5, **_TOKENS)
_SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32)
_MIDDLE = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=LAYERS, head_dim=64)
_MOE = dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=256)
_EXACT = 1e-4
"""Nats; bound of the largest difference between two fp32 implementations of a small policy."""
_ROUNDINGS = 3.0
"""Bound of the mean difference of two bf16 implementations relative to the bf16 error of transformers: two
independent errors make 2 ** 0.5, and one of the two may round more intermediate results to bf16."""


def write_policy(kind, folder, device):
    """A Llama, latent attention (kimi), or a Qwen3-MoE with two of eight experts, with a tokenizer.

    The experts are in pairs with nearly equal router rows. Rounding selects one of a pair, so that engine and trainer
    often select different experts without replay.
    """
    shape = _SMALL if device == "cpu" else _MIDDLE
    more = dict(**_MOE, mlp_only_layers=[]) if kind == "qwen3_moe" else {}
    if kind == "kimi":
        widths = random_policies.LATENT_FOR_ENGINES if device == "cpu" else random_policies.LATENT_ON_GPUS
        more = {name: size for name, size in widths.items() if name not in ("vocab_size", "std")}
        shape = shape | {"head_dim": 64}
        if device == "cpu":  # vLLM's kernels of experts take wider ones in bf16 alone
            shape = shape | {"hidden_size": 64, "intermediate_size": 128}
        more["moe_intermediate_size"] = 64
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    random_policies.make(kind, folder, dtype=dtype, init=partial(_fill, seed=2), **_SHARED, **shape, **more)
    save_tokenizer(folder)
    return folder


def _fill(model, *, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            continue  # norms are 1
        std = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5 * (3.0 if "lm_head" in name else 1.0)
        parameter.normal_(0.0, std, generator=generator)
        if ".gate.weight" in name and model.config.model_type == "qwen3_moe":
            # a router: rows 2i and 2i + 1 differ by at most one unit of bf16
            parameter[1::2] = parameter[0::2] * (1 + 2.0**-8)


def recipe_of(policy, tiny, out, device, /, **sections):
    """A run of `policy` on the tiny task's prompts, trainer and engine on one device.

    They share a GPU (engine.colocate), and weights go over gloo: NCCL does not support two ranks on one GPU.
    """
    vllm = dict(max_model_len=4096, max_num_seqs=64, kv_cache_memory_bytes=128 << 20)
    if device == "gpu":
        vllm |= dict(gpu_memory_utilization=0.3, enforce_eager=True, max_num_batched_tokens=4096)
    vllm |= sections.pop("vllm", {})
    paths = dict(path=str(tiny / "prompts.jsonl"), held_out_path=str(tiny / "held_out.jsonl"))
    defaults = dict(
        policy=dict(path=str(policy), dtype="float32" if device == "cpu" else "bfloat16"),
        prompts=dict(**paths, max_prompt_tokens=32, think_start="<think>", think_end="</think>"),
        interruption=dict(thinking_tokens=[1, THINKING], answer_tokens=ANSWER),
        rollouts=dict(kv_cache="recompute"),
        rewards=dict(workers=1),
        optimizer=dict(lr=0.05, warmup_steps=0, eps=1e-3),
        trainer=dict(micro_batch_tokens=2048),
        engine=dict(start_timeout_s=300, vllm=vllm, colocate=device == "gpu"),
        weights=dict(transport="gloo", timeout_s=60),
    )
    merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return Recipe.model_validate(dict(name="check", steps=1, output_dir=str(out), **merged))


def samples_of(prompts, rollouts):
    """Completions with advantages of 1 and -1; the token weights add up to 1."""
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return [
        Sample(prompt_token_ids=p.token_ids, rollout=r, advantage=(-1.0) ** i, token_weight=1 / tokens)
        for i, (p, r) in enumerate(zip(prompts, rollouts))
    ]


class Reference:
    """The policy in a folder by transformers on the CPU, in fp32 and in the policy's type with fp32 logits."""

    def __init__(self, folder, dtype):
        from transformers import AutoModelForCausalLM

        load = partial(AutoModelForCausalLM.from_pretrained, folder, trust_remote_code=False)
        self.dtype = dtype
        self._exact, self._own = (load(dtype=getattr(torch, name)).eval() for name in ("float32", dtype))

    @torch.no_grad()
    def logprobs(self, prompt, rollout, *, exact=True):
        """[T] log-probs (nats) of the sampled tokens."""
        model = self._exact if exact else self._own
        ids = torch.tensor([[*prompt.token_ids, *rollout.token_ids]])
        hidden = model.model(ids).last_hidden_state[0, len(prompt.token_ids) - 1 : -1]
        rows = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1)
        found = rows.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0].tolist()
        return sampled(rollout, found)

    def distance(self, prompts, rollouts, pairs):
        """(difference of two lists of log-probs of these completions, its bound), nats; largest in fp32, or mean."""
        apart = [abs(a - b) for a, b in pairs]
        assert apart and all(map(math.isfinite, apart))
        if self.dtype == "float32":
            return max(apart), _EXACT
        each = list(zip(prompts, rollouts, strict=True))
        own = [v for p, r in each for v in self.logprobs(p, r, exact=False)]
        exact = [v for p, r in each for v in self.logprobs(p, r)]
        return statistics.fmean(apart), _ROUNDINGS * statistics.fmean(abs(a - b) for a, b in zip(own, exact))


def sampled(rollout, logprobs):
    """The `logprobs` [T] of sampled tokens, without forced ones."""
    return [value for value, kept in zip(logprobs, rollout.loss_mask, strict=True) if kept]
