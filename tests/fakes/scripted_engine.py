"""An engine that says what a test has written, turn by turn; its responses are vLLM's, and are really decoded."""

import json

from fakes.server import answer


class StandInScriptedEngine:
    """script: for each turn the arguments of `fakes.server.answer`, or an exception that is raised."""

    name = "engine-0"

    def __init__(self, *script, wait=None):
        self._script = list(script)
        self._wait = wait
        self.asked = []
        """(context, sampling) of every turn."""

    async def generate(self, context, *, sampling, decoder):
        self.asked.append((tuple(context), sampling))
        if self._wait is not None:
            await self._wait()
        said = self._script.pop(0)
        if isinstance(said, Exception):
            raise said
        async with decoder.slot():
            body = json.dumps(answer(**said)).encode()
            decoded, _ = await decoder.decode(body, plan=sampling.interruption, seed=sampling.seed, where="engine-0")
        return decoded
