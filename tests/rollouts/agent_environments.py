"""Agents of the tests of the route; their processes import this module."""

import json
import urllib.request


def post(agent, path, body):
    """The JSON that answers a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {agent.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(agent.base_url.removesuffix("/v1") + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat(agent, messages, **settings):
    """The policy's message after these, which is appended to them."""
    body = {"model": agent.model, "messages": messages, **settings}
    message = post(agent, "/v1/chat/completions", body)["choices"][0]["message"]
    messages.append(message)
    return message


def generate(agent, ids, **settings):
    """The policy's ids after these, which are appended to them."""
    body = {"model": agent.model, "token_ids": ids, "sampling_params": settings}
    choice = post(agent, "/inference/v1/generate", body)["choices"][0]
    ids += choice["token_ids"]
    return choice


class Talks:
    """As `episode_environments.Said`, over the route."""

    def run(self, row, agent):
        messages = [{"role": "user", "content": row["text"]}]
        chat(agent, messages)
        for text in row["messages"]:
            messages.append({"role": "user", "content": text})
            chat(agent, messages)
        return row.get("reward", True)


class Ids:
    """The same, in ids that the row has for each message."""

    def run(self, row, agent):
        ids = []
        for new in row["ids"]:
            ids += new
            generate(agent, ids)
        return row.get("reward", True)
