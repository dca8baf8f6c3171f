"""Counts generated tokens in vLLM's server process, to which the engine's cores send all tokens.

`python -m megatron_scalerl.engine.server` is one server process with one or more cores (data-parallel ranks); each
core is a separate process, even if VLLM_ENABLE_V1_MULTIPROCESSING is 0. The counts need no response from a core,
which may hang, and no statistics of vLLM, which would cost a seventh of the throughput and are disabled.
"""

from collections import Counter
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient

from megatron_scalerl.engine.answers import CoreProgress, EngineProgress

_tokens: Counter[int] = Counter()
"""Data-parallel rank of a core -> number of tokens received from the core."""


def count_tokens() -> None:
    """Patch vLLM to count tokens. The caller calls this once, before vLLM builds the engine."""
    take = AsyncMPClient.get_output_async

    async def counted(client: AsyncMPClient) -> Any:
        outputs = await take(client)
        _tokens[outputs.engine_index] += sum(len(output.new_token_ids) for output in outputs.outputs)
        return outputs

    setattr(AsyncMPClient, "get_output_async", counted)  # noqa: B010


def progress(engine: Any) -> EngineProgress:
    """The token and request counts of all cores. engine: the server's AsyncLLM."""
    client = engine.engine_core
    assert isinstance(client, AsyncMPClient), f"tokens are counted for AsyncMPClient, not {type(client).__name__}"
    ranks = client.engine_ranks_managed
    # Only vLLM's client for several cores has this attribute: request id -> core.
    of_request = getattr(client, "reqs_in_flight", {})
    waiting: Counter[int] = Counter()
    decoding: Counter[int] = Counter()
    for request_id, state in engine.output_processor.request_states.items():
        identity = of_request.get(request_id)
        rank = ranks[0]
        if identity is not None:
            rank = int.from_bytes(identity, "little")
        if state.is_prefilling:
            waiting[rank] += 1
        else:
            decoding[rank] += 1
    cores = (
        CoreProgress(core=rank, tokens=_tokens[rank], waiting=waiting[rank], decoding=decoding[rank])
        for rank in ranks
    )
    return EngineProgress(cores=tuple(cores), dead=bool(engine.errored))
