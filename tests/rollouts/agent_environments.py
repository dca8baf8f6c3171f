"""Agents of the tests of the route; their processes import this module."""

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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


class Forks:
    """A sub-agent, two branches at once, a summary in place of the history, an edited message, an edited answer."""

    def run(self, row, agent):
        begin = [user("7+2=")]
        first = [*begin, chat(agent, begin)]
        chat(agent, [user("9-2=")])
        asked = [*first, user("3")]
        second = [*asked, chat(agent, asked)]
        branches = [[*second, user("4")], [*second, user("5")]]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda branch: chat(agent, branch), branches))
        chat(agent, [user("7+2=;8")])
        chat(agent, [*first, user("6")])
        chat(agent, [*begin, {"role": "assistant", "content": "7"}, user("3")])
        return 0.5


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


class Hostile:
    """Does what the row says between its two turns."""

    def run(self, row, agent):
        self.agent = agent
        self.folder = Path(row["folder"])
        if row["how"] == "nothing":
            return True
        first = chat(agent, [user(row["text"])])
        result = getattr(self, row["how"])()
        chat(agent, [user(row["text"]), first, user("3")])
        return result

    def refused(self):
        """Requests that are refused, with what their refusals say."""
        ask = [user("7+2=")]
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        deep = b'{"messages": ' + b"[" * 50_000
        tools = b'{"messages": [{"role": "user", "content": "7+2="}], "tools": [%b1%b]}' % (
            b'{"a":' * 1200,
            b"}" * 1200,
        )
        cases = [
            ("/v1/chat/completions", {"messages": ask, "n": 5}),
            ("/v1/chat/completions", {"messages": ask, "stop": [""]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]}),
            ("/v1/chat/completions", {"messages": [*ask, {"role": "assistant", "content": "9"}]}),
            ("/v1/chat/completions", {"messages": ask, "tools": [ADD]}),
            ("/inference/v1/generate", {"token_ids": [1, 2**40], "sampling_params": {}}),
            ("/inference/v1/generate", {"token_ids": [1, -1], "sampling_params": {}}),
            ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 2}}),
            ("/v1/chat/completions", deep),
            ("/v1/chat/completions", tools),
            ("/v1/chat/completions", b" " * 10**8),
        ]
        (self.folder / "refused.json").write_text(json.dumps([self.status(*case) for case in cases]))
        return True

    def status(self, path, body):
        try:
            post(self.agent, path, body)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()[:200]
        except urllib.error.URLError as error:
            return 0, str(error)
        return 200, ""

    def million(self):
        generate(self.agent, [1] * 10**6)

    def ids(self):
        """Ids that another session has sampled."""
        generate(self.agent, [1, 13, 20, 16, 8, 19, 3, 4, 16, 2])
        return True

    def nan(self):
        return float("nan")

    def hang(self):
        time.sleep(10**6)


class HangsAsync:
    async def run(self, row, agent):
        await asyncio.sleep(10**6)


class Strict(Hostile):
    """A failure of it that repeats is the policy's."""

    repeated_failure = "wrong"
