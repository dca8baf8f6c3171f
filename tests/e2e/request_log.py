"""Inside an engine of a test's run: a middleware that notes the salt and the policy versions of every generation."""

import json
import os


class RequestLog:
    """Appends salt, priority and versions of the answer to the file $REQUEST_LOG, one JSON line a generation."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope.get("path") != "/inference/v1/generate":
            await self._app(scope, receive, send)
            return
        request = b""
        answer = b""

        async def received():
            nonlocal request
            message = await receive()
            request += message.get("body", b"")
            return message

        async def sent(message):
            nonlocal answer
            answer += message.get("body", b"")
            await send(message)

        await self._app(scope, received, sent)
        if answer:  # not of a request that was cancelled
            asked = json.loads(request)
            [choice] = json.loads(answer)["choices"]
            versions = [int(span["version"]) for span in choice["weight_versions"]]
            row = {"salt": asked.get("cache_salt"), "priority": asked["priority"], "versions": versions}
            with open(os.environ["REQUEST_LOG"], "a") as file:
                file.write(json.dumps(row) + "\n")
