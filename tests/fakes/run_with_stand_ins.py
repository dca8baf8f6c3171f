"""`megatron-scalerl` whose engines are stand-ins (`engine_server`): everything else is real.

python tests/fakes/run_with_stand_ins.py train RECIPE key=value ...
python tests/fakes/run_with_stand_ins.py agent RUN ...    (the agent of an engine on another host)

STAND_IN_LIMIT_S: seconds within which an agent takes the controller for gone, without an answer or a heartbeat.
"""

import os
import sys
from pathlib import Path

from megatron_scalerl.__main__ import main
from megatron_scalerl.commands import engine, train
from megatron_scalerl.launch import local_server

SERVER = Path(__file__).parent / "engine_server.py"


def command(arguments):
    """The stand-in's command line in place of the server's."""
    given = original(arguments)
    return [sys.executable, str(SERVER), *given[given.index("megatron_scalerl.engine.server") + 1 :]]


def run_agent():
    """The agent, with other limits."""
    from megatron_scalerl.distributed import sockets
    from megatron_scalerl.launch import agent

    if limit := float(os.environ.get("STAND_IN_LIMIT_S", "0")):
        sockets.GREETING_S = limit
        sockets.HEARTBEAT_MS, sockets.HEARTBEAT_TIMEOUT_MS = int(limit * 200), int(limit * 1000)
    del sys.argv[1]
    return agent.main()


original = local_server.engine_command
local_server.engine_command = command
train.PROGRAM = (sys.executable, __file__)
engine.AGENT = (sys.executable, __file__, "agent")

if __name__ == "__main__":
    sys.exit(run_agent() if sys.argv[1] == "agent" else main(sys.argv[1:]))
