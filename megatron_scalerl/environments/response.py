"""What an environment gets: for a turn of the policy, or to ask the policy itself."""

from typing import Any

from megatron_scalerl.record import record

ROUTE_HEADER = "X-Route-Key"
Message = dict[str, Any]
"""A message of a chat: role, content, and what else the policy's chat template reads."""


@record
class ToolCall:
    """A call of a tool as the policy wrote it. Produced by `rollouts.decoder`."""

    name: str = ""
    """Name of the tool; empty if the call has none."""
    arguments: Any = None
    """The arguments, decoded from JSON."""
    raw: str = ""
    """The text of the call."""
    error: str = ""
    """Why the call cannot be read, in one word; empty if it can. The environment answers it."""
    id: str = ""
    """The name that the format gives the call, for `tool_call_id`; empty for most formats."""


@record
class Response:
    """The policy's answer in one turn. Produced by `rollouts.episodes`."""

    text: str
    """The text after thinking, without special tokens; empty if thinking did not end."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Its calls of tools, in their order; they are in `text`, too."""


@record
class Agent:
    """How a class with `run` asks the policy in one episode. Produced by `rollouts.agents`."""

    base_url: str
    """Of the chat completions, http://127.0.0.1:PORT/v1."""
    api_key: str
    """Key of this episode alone, which ends with it."""
    model: str
    """Name for requests, the same in every run."""
    route_key: str = ""
    """Value of ROUTE_HEADER for a client of many episodes, which sends `api_key` in the body as cache_salt."""
