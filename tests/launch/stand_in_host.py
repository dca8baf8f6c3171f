"""A stand-in for `ssh HOST COMMAND`: `stand_in_host.py HOST COMMAND` runs the command on this host.

As with ssh, the kernel does not end the program with the caller, and it outlives this process. HOST b is 127.0.0.2,
c is 127.0.0.3. With STAND_IN_SERVERS=1 the agents' servers are stand-ins. While the file $STAND_IN_DOWN/HOST exists,
the host does not answer.
"""

import os
import subprocess
import sys
from pathlib import Path

ADDRESSES = {"b": "127.0.0.2", "c": "127.0.0.3"}
PROGRAM = Path(__file__).parents[1] / "fakes/run_with_stand_ins.py"

if __name__ == "__main__":
    host, command = sys.argv[1:]
    if Path(os.environ.get("STAND_IN_DOWN", os.devnull), host).exists():
        sys.exit(f"connect to host {host}: no route to host")
    if os.environ.get("STAND_IN_SERVERS"):
        command = command.replace("-m megatron_scalerl.launch.agent", f"{PROGRAM} agent")
    env = {**os.environ, "MSRL_BIND_HOST": ADDRESSES[host]}
    process = subprocess.Popen(["sh", "-c", command], env=env, start_new_session=True)
    code = process.wait()
    sys.exit(code if code >= 0 else 255)
