"""Drives a headless Chromium by its DevTools protocol: what a page asks for, logs and shows."""

import asyncio
import contextlib
import json
import shutil

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page of the browser."""

    def __init__(self, socket):
        self.requests = []
        """Addresses that the page asked for."""
        self.complaints = []
        """Errors and warnings of the console, exceptions, and what the content security policy refused."""
        self._socket = socket
        self._answers = {}
        self._number = 0

    async def listen(self):
        """Take the browser's messages until it closes."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning"):
                self.complaints.append(json.dumps(said["params"]["args"])[:500])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(said["params"]["entry"]["text"])

    async def call(self, method, **params):
        """One command of the protocol."""
        self._number += 1
        self._answers[self._number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        said = await answer
        assert "error" not in said, said
        return said["result"]

    async def evaluate(self, expression):
        """The JSON value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression, seconds=120.0):
        """Wait until an expression in the page is true; returns its value."""
        async with asyncio.timeout(seconds):
            while not (value := await self.evaluate(expression)):
                await asyncio.sleep(0.05)
        return value

    async def press(self, key):
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


async def _first_page(session, file):
    """Where the first page of a browser that starts takes commands."""
    while not (file.exists() and len(lines := file.read_text().splitlines()) == 2):  # the port and a path
        await asyncio.sleep(0.05)
    while True:
        async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
            for target in await answer.json(content_type=None):
                if target["type"] == "page":
                    return target["webSocketDebuggerUrl"]
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def opened(profile, url):
    """A browser with one page, ended with the block. profile: an empty folder."""
    assert CHROMIUM is not None
    options = "--headless --no-sandbox --disable-gpu --remote-debugging-port=0 --disable-background-networking "
    options += f"--user-data-dir={profile} about:blank"
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, *options.split(),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(120):
                address = await _first_page(session, profile / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                yield tab
                listening.cancel()
    finally:
        if browser.returncode is None:
            browser.kill()
        await browser.wait()
