"""Agents of the tests of the route; their processes import this module."""

import json
import os
import urllib.request
from pathlib import Path

ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {}, "b": {}}}}


def post(agent, path, body):
    """The JSON that answers a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {agent.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(agent.base_url.removesuffix("/v1") + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def user(text):
    return {"role": "user", "content": text}


def chat(agent, messages, **settings):
    """The policy's message after these."""
    body = {"model": agent.model, "messages": messages, **settings}
    return post(agent, "/v1/chat/completions", body)["choices"][0]["message"]


def generate(agent, ids, **settings):
    """The policy's ids after these."""
    body = {"model": agent.model, "token_ids": ids, "sampling_params": settings}
    return post(agent, "/inference/v1/generate", body)["choices"][0]


class Talks:
    """As `episode_environments.Said`, over the route."""

    def run(self, row, agent):
        messages = [user(row["text"])]
        messages.append(chat(agent, messages))
        for text in row["messages"]:
            messages.append(user(text))
            messages.append(chat(agent, messages))
        return row.get("reward", True)


class Ids:
    """The same, in ids that the row has for each message."""

    def run(self, row, agent):
        ids = []
        for new in row["ids"]:
            ids += new
            choice = generate(agent, ids)
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
                f"token_id:{token}" for token in choice["token_ids"]
            ]
            ids += choice["token_ids"]
        return row.get("reward", True)


class Adds:
    """A tool in the form of reset and step."""

    tools = (ADD,)

    def reset(self, row):
        return row["text"]

    def step(self, response):
        if response.tool_calls:
            return {"role": "tool", "content": str(sum(response.tool_calls[0].arguments.values()))}, None, False
        return [], response.text.strip() == "9", True


class AddsByChat:
    """The same tool, by the way of OpenAI's messages."""

    def run(self, row, agent):
        messages = [user(row["text"])]
        while "tool_calls" in (message := chat(agent, messages, tools=[ADD])):
            [call] = message["tool_calls"]
            assert message["content"].strip() == "" and call["function"]["name"] == "add"
            result = sum(json.loads(call["function"]["arguments"]).values())
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": [text(result)]}]
        return message["content"].strip() == "9"


def text(value):
    return {"type": "text", "text": str(value)}


class Again:
    """Fails once after its first answer, as the row says; then asks the same, less, or something else."""

    def run(self, row, agent):
        count = Path(row["file"])
        count.write_text(count.read_text() + "x")
        tries = len(count.read_text())
        messages = [user(row["text"])]
        if row["then"] == "other" and tries == 2:
            messages = [user("9-2=")]
        if row["then"] == "less" and tries == 2:
            return True
        messages.append(chat(agent, messages))
        if tries == 1:
            {"raise": int, "exit": os._exit}[row["how"]]("x" if row["how"] == "raise" else 3)
        messages.append(user("3"))
        chat(agent, messages)
        return True


class Strict(Talks):
    """A failure of it that repeats is the policy's."""

    repeated_failure = "wrong"
