"""A program for tests that reads JSON commands from its input and answers one JSON line each."""

import asyncio
import json
import os
import sys


class CommandProcess:
    """The program in a process of its own, from `start` to `stop`."""

    def __init__(self, program, *arguments):
        self._command = [sys.executable, program, *arguments]

    @property
    def returncode(self):
        return self._process.returncode

    async def start(self):
        pipe = asyncio.subprocess.PIPE
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, limit=1 << 24, env=environment
        )

    async def stop(self):
        self._process.stdin.close()
        await self._process.wait()

    async def ask(self, command):
        """The answer; None if the process has ended."""
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None


def serve(answer, file):
    """The program's side: `answer(command)` answers each line, or raises what is said of it."""
    for line in sys.stdin:
        try:
            said = {"value": answer(json.loads(line))}
        except (RuntimeError, ValueError) as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=file, flush=True)
