"""Reads the body of an engine's response within a limit of bytes and of time. Runs in the controller."""

import aiohttp

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.processes.child_process import time_limit

TOKEN_BYTES = 1024
"""Limit of a generation's response per token; vLLM 0.32 writes at most 200 bytes."""
EXPERT_TOKEN_BYTES = 4096
"""Limit for the expert choices of a token, which are base64: up to 1,536 numbers of two bytes."""
SLACK_BYTES = 1 << 20
"""Limit for the rest of a generation's response."""
OTHER_BYTES = 64 << 20
"""Limit of a response without a completion."""


def generation_limit(*, prompt_tokens: int, max_tokens: int, routed_experts: bool) -> int:
    """Most bytes of a response to a generation request."""
    token_bytes = TOKEN_BYTES
    if routed_experts:
        token_bytes += EXPERT_TOKEN_BYTES
    return SLACK_BYTES + token_bytes * (prompt_tokens + max_tokens)


async def read_body(response: aiohttp.ClientResponse, *, limit: int, timeout_s: float, where: str) -> bytes:
    """The body of a response whose header has arrived.

    limit: most bytes. timeout_s: seconds until the last one has arrived. where: engine and path. Raises EngineError
    beyond either, and aiohttp.ClientError for a body that breaks off.
    """
    try:
        async with time_limit(timeout_s):
            return await _read(response, limit, where)
    except TimeoutError:
        raise EngineError(
            f"{where}: only a part of the response came within {timeout_s:g} s of its header (engine.stall_timeout_s)"
        ) from None


async def _read(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    size = response.content_length or 0
    parts = []
    if size <= limit:
        size = 0
        while part := await response.content.readany():
            size += len(part)
            parts.append(part)
            if size > limit:
                break
    if size > limit:
        raise EngineError(f"{where}: the response has {size} bytes or more, and its limit is {limit}")
    return b"".join(parts)
