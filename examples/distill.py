"""A teacher behind a URL, for what the run's own teachers cannot be: another engine's model, or one of several runs.

With any vLLM server of the policy's tokenizer:

    PYTHONPATH=examples megatron-scalerl train my_run.yaml algorithm='{name: distill:FromServer, url: http://host:8000}'

The gap of each sampled token to the server's log-probability is its advantage, as with `algorithm.name: distilled`
(docs/algorithms.md): its `gap_weight` and `reward_weight` are settings here, too. vLLM gives log-probabilities at
temperature 1, whatever a request says: leave rollouts.temperature at 1, its default. A teacher in bfloat16 has logits
as the recipe's engines with --hf-overrides '{"head_dtype": "float32"}'.
"""

import asyncio
from dataclasses import dataclass

import aiohttp

from megatron_scalerl.algorithms import Distilled


@dataclass(frozen=True, kw_only=True)
class FromServer(Distilled):
    """Each sampled token has its log-probability under a model that a vLLM server has."""

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
