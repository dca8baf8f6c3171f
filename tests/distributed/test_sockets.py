"""The connection of a peer to its controller, through a proxy that breaks the first attempt."""

import asyncio
import subprocess
import sys
import textwrap

import msgspec
import pytest

from megatron_scalerl.distributed.sockets import EXIT_ORPHAN, ControllerSocket

SECRET = "5" * 64
PEER = """
    import sys
    from megatron_scalerl.distributed.sockets import ControllerLink

    link = ControllerLink(sys.argv[1], sys.argv[2], "trainer", lambda frames: bytes(frames[0]).decode())
    assert link.greet("hello", 120.0) == "welcome"
    while True:
        link.send(link.receive()[0] + " again")
"""


async def _pass_on(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("broken", [0, 1, 3])
async def test_attempts_that_broke_before_the_handshake_count_for_nothing_and_a_loss_after_it_ends_the_peer(broken):
    controller = ControllerSocket(SECRET, "trainer")
    port = int(controller.endpoint.rpartition(":")[2])
    seen = 0

    async def proxy(reader, writer):
        nonlocal seen
        seen += 1
        if seen <= broken:
            return writer.close()
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer), return_exceptions=True)

    async def answer():
        async with asyncio.timeout(120):
            sender, frames = await controller.read()
        return sender, msgspec.msgpack.decode(frames[0])

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    words = [sys.executable, "-c", textwrap.dedent(PEER), endpoint, SECRET]
    peer = await asyncio.create_subprocess_exec(*words, stderr=subprocess.PIPE)
    try:
        sender, said = await answer()
        assert said == "hello"
        for word in ("welcome", "a", "b"):
            await controller.send(sender, word.encode())
            if word != "welcome":
                assert await answer() == (sender, f"{word} again")
        assert seen == broken + 1
        controller.close()
        assert await asyncio.wait_for(peer.wait(), 120) == EXIT_ORPHAN
    finally:
        controller.close()
        if peer.returncode is None:
            peer.kill()
        await peer.communicate()
        server.close()
