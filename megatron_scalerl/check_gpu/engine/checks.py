"""Checks of one engine through its HTTP interface. Functions named *_faults return what is wrong, [] if nothing."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from megatron_scalerl.engine.client import SECRET_HEADER, WHOLE_DISTRIBUTION, EngineClient, SamplingSpec
from megatron_scalerl.types import Rollout

GUARDED = (
    "/collective_rpc",
    "/pause",
    "/resume",
    "/is_paused",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/update_weight_version",
    "/get_world_size",
    "/weight_info",
    "/inference/v1/generate",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/metrics",
    "/version",
    "/server_info",
    "/abort_requests",
    "/msrl/progress",
    "/nowhere",
    "/health/",
)
_GRID = 2.0**10
_GRID_LEAST = 0.15
"""Lower bound of the mean distance of log-prob differences, in units of 2**-10, from whole numbers: it is 1/4 for
fp32 logits and 0 for logits rounded to bfloat16, whose spacing is at least that from 1/4 on."""


async def refused(client: EngineClient) -> dict[str, int]:
    """HTTP status by "METHOD PATH (secret)" of every guarded path, without a secret and with wrong ones."""
    wrong = {
        "none": [],
        "wrong": [(SECRET_HEADER, client.secret[:-1] + "!")],
        "twice": [(SECRET_HEADER, client.secret)] * 2,
    }
    found: dict[str, int] = {}
    async with aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, kind: str) -> None:
            headers = [*wrong[kind], ("Connection", "close")]
            async with session.request(method, client.url + path, headers=headers) as response:
                found[f"{method} {path} ({kind} secret)"] = response.status

        await asyncio.gather(*(ask(m, path, kind) for m in ("GET", "POST") for path in GUARDED for kind in wrong))
        found["GET /health (no secret needed)"] = (await session.get(client.url + "/health")).status
    await client.get("/v1/models")  # the right secret is accepted
    return found


def open_paths(statuses: Mapping[str, int]) -> list[str]:
    """Requests that were not answered by 401 or 403, or /health not by 200."""
    return [
        f"{what}: {status}"
        for what, status in statuses.items()
        if (status != 200 if "/health (" in what else status not in (401, 403))
    ]


async def likeliest(client: EngineClient, prompt: Sequence[int], *, tokens: int) -> list[list[float]]:
    """[tokens, 5] log-probs (nats) of the most likely tokens at each step of one completion."""
    params = WHOLE_DISTRIBUTION | {
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 0,
        "logprobs": 5,
        "detokenize": False,
        "ignore_eos": True,
    }
    answer = json.loads(
        await client.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": params})
    )
    content = answer["choices"][0]["logprobs"]["content"]
    return [sorted((row["logprob"] for row in step["top_logprobs"]), reverse=True)[:5] for step in content]


def off_grid(rows: Sequence[Sequence[float]]) -> float:
    """Mean distance from whole numbers of log-prob differences within each row, in units of 2**-10."""
    scaled = [(row[0] - value) * _GRID for row in rows for value in row[1:] if value != row[0]]
    return statistics.fmean(abs(x - round(x)) for x in scaled) if scaled else 0.0


def head_faults(head_dtype: str, rows: Sequence[Sequence[float]]) -> list[str]:
    """Whether the engine's logits are fp32: the dtype reported by its worker, and the log-probs it returns."""
    found = off_grid(rows)
    faults = [] if head_dtype == "float32" else [f"expected head float32, found {head_dtype} in the engine's worker"]
    if found < _GRID_LEAST:
        faults.append(f"expected log-probs not rounded to bfloat16 (mean distance 0.25), found {found:.3g}")
    return faults


def interruption_faults(
    rollout: Rollout,
    *,
    phrase: Sequence[int],
    think_end: Sequence[int],
    ends: Sequence[int],
    version: int,
    answer_tokens: int,
) -> list[str]:
    """Faults of a completion that should be interrupted at `rollout.thinking_cut` (at least 1).

    phrase: forced tokens, closing tag included. think_end: tokens of that tag. ends: end-of-sequence tokens.
    answer_tokens: budget after the phrase.
    """
    ids, cut = rollout.token_ids, rollout.thinking_cut
    thought = ids[:cut]
    natural = any(t in thought for t in ends) or any(
        tuple(thought[i : i + len(think_end)]) == tuple(think_end) for i in range(len(thought))
    )
    faults = []
    if set(rollout.policy_versions) != {version}:
        faults.append(f"expected policy version {version}, found {sorted(set(rollout.policy_versions))}")
    if rollout.interrupted == natural:
        faults.append(f"cut {cut}: expected interrupted {not natural}, found {rollout.interrupted}")
    elif not natural:
        end = cut + len(phrase)
        mask = (True,) * cut + (False,) * len(phrase) + (True,) * (len(ids) - end)
        if tuple(ids[cut:end]) != tuple(phrase):
            faults.append(f"cut {cut}: expected the phrase {tuple(phrase)} there, found {tuple(ids[cut:end])}")
        elif rollout.loss_mask != mask:
            faults.append(f"cut {cut}: expected a loss mask that excludes the phrase only, found another mask")
        elif len(ids) - end > answer_tokens:
            faults.append(f"cut {cut}: expected at most {answer_tokens} answer tokens, found {len(ids) - end}")
    return faults


@dataclass(frozen=True, kw_only=True)
class Paused:
    """A pause during a running completion. Produced by `pause`."""

    before: int
    """Tokens generated when the engine reported that it is paused."""
    later: int
    """Half a second later."""
    whole: int
    """The completion's budget (tokens)."""
    reported: bool
    """Answer of /is_paused."""
    rollout: Rollout


async def pause(client: EngineClient, prompt: Sequence[int], *, tokens: int, clear_cache: bool) -> Paused:
    """Pause in the middle of a completion of `tokens` tokens, wait, and resume.

    If the engine finishes before the pause arrives, repeat with four and with sixteen times as many tokens.
    """
    for budget in (tokens, 4 * tokens):
        found = await _pause_once(client, prompt, tokens=budget, clear_cache=clear_cache)
        if found.before < found.whole:
            return found
    return await _pause_once(client, prompt, tokens=16 * tokens, clear_cache=clear_cache)


async def _pause_once(client: EngineClient, prompt: Sequence[int], *, tokens: int, clear_cache: bool) -> Paused:
    spec = SamplingSpec(max_tokens=tokens, seed=int(clear_cache), ignore_eos=True)
    start = (await client.progress()).tokens
    running = asyncio.create_task(client.generate(prompt, sampling=spec))
    await until(client, start + min(12, tokens // 10))
    await client.pause(clear_cache=clear_cache)
    await asyncio.sleep(0.2)  # lets the current step finish
    before = (await client.progress()).tokens - start
    reported = b"true" in await client.get("/is_paused")
    await asyncio.sleep(0.5)
    later = (await client.progress()).tokens - start
    await client.resume()
    return Paused(before=before, later=later, whole=tokens, reported=reported, rollout=await running)


async def until(client: EngineClient, tokens: int) -> None:
    """Wait until the engine has generated that many tokens since it started."""
    while (await client.progress()).tokens < tokens:
        await asyncio.sleep(0.005)


def pause_faults(found: Paused) -> list[str]:
    """Faults of a pause."""
    faults = [] if found.reported else ["/is_paused: expected true, found false"]
    if found.later != found.before:
        faults.append(f"expected no tokens while paused, found {found.later - found.before}")
    if not 0 < found.before < found.whole:
        faults.append(f"expected a pause before token {found.whole}, found it at {found.before}")
    if len(found.rollout.token_ids) != found.whole:
        faults.append(f"expected {found.whole} tokens after the pause, found {len(found.rollout.token_ids)}")
    if not all(map(math.isfinite, found.rollout.rollout_logprobs)):
        faults.append("expected finite log-probs, found nonfinite ones")
    return faults
