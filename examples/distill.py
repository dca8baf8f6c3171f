"""On-policy distillation: the policy learns from a teacher behind a URL what the teacher would have said instead.

`examples/distill.sh` starts a teacher and trains 20 steps. By hand, with any vLLM server of the policy's tokenizer:

    PYTHONPATH=examples megatron-scalerl train my_run.yaml algorithm='{name: distill:Distill, url: http://host:8000}'

The advantage of a token is the teacher's log-probability less the policy's own: the gradient is that of the reverse
KL of the token, on texts that the policy wrote (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; nothing
is discounted from later tokens). No reward is in it; validations score answers as ever, and groups of equal rewards
teach. `loss/teacher_gap` is the mean of that KL's samples, as far as they are fresh: set rollouts.max_staleness_steps
to 1. vLLM gives log-probabilities at temperature 1, whatever a request says: leave rollouts.temperature at 1, its
default. A teacher in bfloat16 has logits as the recipe's engines with --hf-overrides '{"head_dtype": "float32"}'.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

import aiohttp

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.losses.inputs import separable


@dataclass(frozen=True, kw_only=True)
class Taught(ScaleRL):
    """Each sampled token has its log-probability under a model that a vLLM server has."""

    columns: ClassVar = ("teacher_logprobs",)
    url: str
    """algorithm.url: the server, without /v1."""

    async def score(self, group, samples):
        parts = [part for completion in group.completions for part in completion.samples]
        prompts = [group.prompt.token_ids[: part.prompt_tokens] for part in parts]
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            return await asyncio.gather(*[self.column(session, *each) for each in zip(prompts, samples, strict=True)])

    async def column(self, session, prompt, sample):
        ids = sample.token_ids.tolist()
        request = {"prompt": [*prompt, *ids], "max_tokens": 1, "prompt_logprobs": 0}
        async with session.post(f"{self.url}/v1/completions", json=request) as answer:
            [choice] = (await answer.json())["choices"]
        known = choice["prompt_logprobs"][len(prompt) :]  # at the place of each token, by its id; None at the first
        each = zip(known, ids, sample.loss_mask, strict=True)
        return {"teacher_logprobs": [at[str(token)]["logprob"] if sampled else 0.0 for at, token, sampled in each]}


@dataclass(frozen=True, kw_only=True)
class Distill(Taught):
    """The advantage of a token is the teacher's log-probability less the policy's."""

    metrics: ClassVar = {"teacher_gap": "mean", "teacher_gap_max": "max"}
    weight: float = 1.0
    """algorithm.weight: factor of every advantage."""

    def drop_reason(self, group):
        return "" if group.completions else "too_few"

    @separable
    def loss(self, inputs):
        gap = inputs.trainer_logprobs.detach() - inputs.columns["teacher_logprobs"]
        output = super().loss(replace(inputs, advantages=-self.weight * gap))
        return replace(output, metrics={"teacher_gap": gap, "teacher_gap_max": gap.abs()})
