"""Takes the hosts of a run from a Ray cluster: `train --hosts ray`.

    controller --stdin/stdout--> keeper --Ray--> one actor on each node, which holds the node's devices
         '--> `python -m megatron_scalerl.launch.ray_hosts SOCKET HOST PROGRAM` --socket--^   (one for each program)

The keeper is a child process of the controller and the run's only driver of Ray. The keeper reserves the devices. Its
actors run the shell commands that `--run-on` would run through ssh. When the controller ends, even by SIGKILL, the
keeper also ends. Ray then ends the actors, and the programs die with the actors (`processes.parent_death`).

    to the keeper, one line:     {"host": "10.0.0.2", "program": "cd /run && exec ..."}
    from the keeper, each line:  {"output": "..."}, at the end {"code": 0}
"""

import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megatron_scalerl.processes.parent_death import tied_command
from megatron_scalerl.processes.signals import SAVE_SIGNAL, SIGNALS

logger = logging.getLogger(__name__)

RESERVED_S = 1800.0
"""Seconds to wait for free devices. In this time an autoscaling cluster may start machines."""
_PROGRAMS = 512
"""Largest number of programs that one node's actor runs at a time."""
_MODULE = "megatron_scalerl.launch.ray_hosts"


def reserve(
    kind: Literal["GPU", "CPU"], count: int | None, slots: int | None
) -> tuple[list[str], int, tuple[str, ...]]:
    """Start the keeper, and wait until the keeper has reserved the devices. Raises ValueError if the keeper fails.

    The keeper holds the devices until this process ends. Returns the addresses of the nodes, the number of devices of
    each node, and a command that runs the last argument in a shell on {host}.

    kind: the kind of devices. count: number of nodes; None for all nodes with `slots` devices. slots: number of
    devices of each node; None for all devices of the largest node.
    """
    folder = tempfile.mkdtemp(prefix="msrl-ray-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    argv = [sys.executable, "-m", _MODULE, "--keep", folder, json.dumps([kind, count, slots])]
    logger.warning("waiting until the Ray cluster has free %ss", kind)
    # In a new session the keeper gets no SIGINT from the terminal: the controller, which does, must end first.
    keeper = subprocess.Popen(tied_command(argv), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    if not line.startswith("{"):
        raise ValueError(f"--hosts ray: {line.strip() or f'the process for Ray ended with code {keeper.wait()}'}")
    reserved = json.loads(line)
    words = (sys.executable, "-m", _MODULE, str(Path(folder) / "socket"), "{host}")
    return reserved["hosts"], reserved["slots"], words


class Node:
    """A Ray actor on one node, which holds the node's devices and runs programs."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._given_up: set[str] = set()

    def run(self, name: str, program: str) -> Iterator[dict[str, Any]]:
        """Run a shell command, and yield the output line by line, then the exit code. name: id of the program."""
        # Ray sets OMP_NUM_THREADS to 1 for an actor without CPUs. The program must not inherit the 1.
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        child = subprocess.Popen(
            tied_command(["sh", "-c", program]),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._running[name] = child
        if name in self._given_up:
            child.terminate()
        assert child.stdout is not None
        for line in child.stdout:
            yield {"output": line}
        del self._running[name]
        yield {"code": child.wait()}

    def end(self, name: str) -> None:
        """Send SIGTERM to a program, now or, if the program has not started yet, right after the start."""
        self._given_up.add(name)
        if (child := self._running.get(name)) is not None:
            child.terminate()


class _Program(socketserver.StreamRequestHandler):
    """Handles one connection to the keeper: the request of a process (`_run`) to run a program on a node.

    When the connection ends, the program is terminated.
    """

    def handle(self) -> None:
        import ray

        request = json.loads(self.rfile.readline())
        name = uuid.uuid4().hex
        node = self.server.nodes[request["host"]]  # type: ignore[attr-defined]
        threading.Thread(target=self._end_with_caller, args=(node, name), daemon=True).start()
        try:
            for message in node.run.options(num_returns="streaming").remote(name, request["program"]):
                self._send(ray.get(message))
        except ray.exceptions.RayError as error:
            self._send({"output": f"Ray lost {request['host']}: {str(error).splitlines()[0]}\n"})
            self._send({"code": 1})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            # The process that requested the program may have ended.
            self.wfile.write(json.dumps(message).encode() + b"\n")

    def _end_with_caller(self, node: Any, name: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.rfile.read()
        node.end.remote(name)


def _keep(folder: str, kind: str, count: int | None, slots: int | None) -> None:
    """The keeper: reserve the devices, print the hosts as JSON, and run programs there until killed."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    for number in (*SIGNALS, SAVE_SIGNAL):
        # The keeper must outlive signals to the whole job, because the keeper has to end after the controller.
        signal.signal(number, signal.SIG_IGN)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    slots = slots or int(max((node.get(kind, 0) for node in alive), default=0))
    count = count or sum(node.get(kind, 0) >= slots for node in alive)
    if not slots or not count:
        raise ValueError(f"the Ray cluster has {len(alive)} nodes, and none has {slots or 'any'} {kind}s")
    bundles = [{kind: slots} for _ in range(count)]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(RESERVED_S):
        raise ValueError(f"{count} nodes with {slots} {kind}s each were not free in {RESERVED_S:g} s; use fewer")
    holds = {"num_cpus": 0, f"num_{kind.lower()}s": slots}
    nodes = [
        ray.remote(Node)
        .options(
            max_concurrency=_PROGRAMS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            **holds,
        )
        .remote()
        for number in range(count)
    ]
    by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    hosts = [by_id[placed[number]] for number in range(count)]
    server = socketserver.ThreadingUnixStreamServer(str(Path(folder) / "socket"), _Program)
    server.daemon_threads = True
    server.nodes = dict(zip(hosts, nodes))  # type: ignore[attr-defined]
    print(json.dumps({"hosts": hosts, "slots": slots}), flush=True)
    server.serve_forever()


def _run(path: str, host: str, program: str) -> int:
    """Ask the keeper for a program on a node, print the program's output, and return the exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps({"host": host, "program": program}).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "code" in message:
                    return int(message["code"])
                sys.stdout.write(message["output"])
                sys.stdout.flush()
    return 1  # the keeper ended before the program


def main() -> int:
    """With --keep, run as the keeper; otherwise ask the keeper to run a program. Returns the exit code."""
    if sys.argv[1] != "--keep":
        return _run(*sys.argv[1:])
    try:
        _keep(sys.argv[2], *json.loads(sys.argv[3]))
    except ImportError:
        print("the package ray is not installed in this environment; run pip install 'megatron_scalerl[ray]'")
    except (ValueError, OSError, RuntimeError) as error:
        print(str(error).splitlines()[0])
    return 2


if __name__ == "__main__":
    sys.exit(main())
