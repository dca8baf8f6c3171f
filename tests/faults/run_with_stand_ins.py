"""`megatron-scalerl train` whose engines are stand-ins (`stand_in_engine`): everything else is real.

python tests/faults/run_with_stand_ins.py train RECIPE key=value ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_scalerl.__main__ import main
from megatron_scalerl.commands import train
from megatron_scalerl.launch import local_server

SERVER = Path(__file__).parent / "stand_in_engine.py"


def command(arguments: object) -> list[str]:
    """The stand-in's command line in place of the server's."""
    given = original(arguments)
    return [sys.executable, str(SERVER), *given[given.index("megatron_scalerl.engine.server") + 1 :]]


original = local_server.engine_command
local_server.engine_command = command
train.PROGRAM = (sys.executable, __file__)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
