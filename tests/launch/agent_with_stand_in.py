"""The agent of an engine whose server is a stand-in (`faults/stand_in_engine.py`).

STAND_IN_LIMIT_S: seconds within which it takes the controller for gone, without an answer or a heartbeat.
"""

import os
import sys
from pathlib import Path

from megatron_scalerl.distributed import sockets
from megatron_scalerl.launch import agent, local_server

SERVER = Path(__file__).parents[1] / "faults" / "stand_in_engine.py"


def command(arguments):
    """The stand-in's command line in place of the server's."""
    given = original(arguments)
    return [sys.executable, str(SERVER), *given[given.index("megatron_scalerl.engine.server") + 1 :]]


original = local_server.engine_command
local_server.engine_command = command
if limit := float(os.environ.get("STAND_IN_LIMIT_S", "0")):
    agent.GREETING_S = limit
    sockets.HEARTBEAT_MS, sockets.HEARTBEAT_TIMEOUT_MS = int(limit * 200), int(limit * 1000)

if __name__ == "__main__":
    sys.exit(agent.main())
