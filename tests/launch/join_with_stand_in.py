"""`megatron-scalerl engine ...` whose servers are stand-ins."""

import sys
from pathlib import Path

from megatron_scalerl.__main__ import main
from megatron_scalerl.commands import engine

engine.AGENT = (sys.executable, str(Path(__file__).parent / "agent_with_stand_in.py"))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
