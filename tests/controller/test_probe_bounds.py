"""The probe's bounds on real policies with random weights: bf16's rounding passes, one wrong tensor does not."""

import pytest
import random_policies
import torch
from transformers import AutoModelForCausalLM

from megatron_scalerl.controller.probe import TOLERANCE, Scored, judged

PROMPT, TOKENS = 16, 64
LAST = "layers.3."
"""What is wrong in the last layer has the least effect."""


def logprobs(model, ids):
    with torch.no_grad():
        scores = model(ids).logits.float().log_softmax(-1)
    return scores[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][:, PROMPT:]


def sampled(model):
    """[4, PROMPT + 1 + TOKENS] token ids."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, random_policies.VOCAB, (4, PROMPT + 1), generator=generator)
    for _ in range(TOKENS):
        with torch.no_grad():
            next_ids = torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, next_ids], 1)
    return ids


def wrong(weights):
    yield "zeroed", torch.zeros_like(weights)
    if weights.dim() > 1:
        yield "transposed", weights.transpose(-1, -2).reshape(weights.shape)
    if weights.dim() > 2:
        yield "two experts exchanged", weights[[1, 0, *range(2, len(weights))]]


@pytest.mark.parametrize(
    "kind",
    ["qwen3_moe", pytest.param("llama", marks=pytest.mark.slow), pytest.param("llama4", marks=pytest.mark.slow)],
)
def test_rounding_passes_and_one_wrong_tensor_does_not(kind, tmp_path):
    random_policies.make(kind, tmp_path)
    trainer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float().eval()
    ids = sampled(trainer)
    expected = logprobs(trainer, ids)

    def verdict(engine, dtype):
        pairs = zip(expected.flatten().tolist(), logprobs(engine, ids).flatten().tolist())
        return judged([Scored("p", n, 5, *pair) for n, pair in enumerate(pairs)], TOLERANCE[dtype])

    for dtype in ("float32", "bfloat16"):
        engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(getattr(torch, dtype)).eval()
        assert verdict(engine, dtype) == ""
        tensors = {name: weights for name, weights in engine.named_parameters() if LAST in name}
        assert len(tensors) > 8
        for name, weights in tensors.items():
            correct = weights.detach().clone()
            for what, values in wrong(correct):
                weights.data.copy_(values)
                assert "weights.probe_tolerance" in verdict(engine, dtype), (dtype, name, what)
            weights.data.copy_(correct)
