"""`train --hosts ray` on raylets of this machine: a whole run, a controller that is killed, a node that is lost."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from programs import ended

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

from e2e.whole_runs import ROOT, make_tiny, overrides, words
from own_processes import adopt_orphans, own_processes
from waiting import wait_until

from megatron_scalerl.checkpoints.jsonl import read_jsonl

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), moe=False, sft_steps=10)


class Cluster:
    """A head without devices and two nodes of two CPUs, which differ in their loopback address."""

    def __init__(self, folder):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        head = ["--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=0", f"--temp-dir={folder}"]
        self.raylets = [self._start("127.0.0.1", *head)]
        self.wait_for(1)
        for number in (2, 3):
            self.raylets.append(self._start(f"127.0.0.{number}", f"--address={self.address}", "--num-cpus=2"))
            self.wait_for(number)  # two that start together take the same ports

    def _start(self, node, *options):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        common = ["--block", "--disable-usage-stats", "--object-store-memory=100000000", f"--node-ip-address={node}"]
        ray = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
        return subprocess.Popen(
            [sys.executable, "-c", ray, "start", *common, *options],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )

    def ask(self, expression):
        """A value that a driver of its own reads from the cluster; empty where the cluster does not answer yet."""
        code = f"import ray; ray.init(address='{self.address}', logging_level='ERROR'); print({expression})"
        return ended(sys.executable, "-c", code).stdout

    def wait_for(self, nodes):
        wait_until(lambda: self.ask("sum(n['Alive'] for n in ray.nodes())").strip() == str(nodes))

    def free(self):
        return self.ask("ray.available_resources().get('CPU', 0)").strip()

    def lose(self, number):
        """The whole node at once: its raylet, its workers and what they run."""
        for process in [*psutil.Process(self.raylets[number].pid).children(recursive=True), self.raylets[number]]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()

    def close(self):
        for raylet in self.raylets[::-1]:
            raylet.terminate()
        for raylet in self.raylets:
            raylet.wait(120)


@pytest.fixture
def cluster(tmp_path_factory):
    adopt_orphans()
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.close()


def start(cluster, tiny, out, *more):
    """A controller whose trainer ranks Ray starts on one node, and whose engine on the other."""
    return subprocess.Popen(
        [
            *(sys.executable, *words("-m megatron_scalerl train recipes/tiny_cpu.yaml --hosts ray --slots 2")),
            *overrides(tiny, out, "r"),
            *words("trainer.world_size=2 engine.count=1 weights.transport=gloo"),
            *("megatron.parallel.tensor_model_parallel_size=2", *more),
        ],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)},
        stdout=open(out / "output", "w"),
        stderr=subprocess.STDOUT,
    )


def steps(out):
    path = out / "r/metrics.jsonl"
    return max((row["step"] for row in read_jsonl(path)), default=0) if path.exists() else 0


def of_run(out):
    """Processes of this run: raylets and the controller are below this process, and their orphans come to it."""
    return own_processes(lambda process: str(out) in " ".join([*process.cmdline(), *process.environ().values()]))


def test_a_whole_run(cluster, tiny, tmp_path):
    process = start(cluster, tiny, tmp_path)
    assert process.wait(900) == 0, (tmp_path / "output").read_text()
    assert steps(tmp_path) == 3
    wait_until(lambda: not of_run(tmp_path))
    wait_until(lambda: cluster.free() == "4.0")


def test_a_killed_controller_leaves_nothing_behind(cluster, tiny, tmp_path):
    process = start(cluster, tiny, tmp_path, "steps=1000000", "validation.every_steps=0")
    wait_until(lambda: steps(tmp_path) or process.poll() is not None)
    assert process.poll() is None, (tmp_path / "output").read_text()
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not of_run(tmp_path))
    wait_until(lambda: cluster.free() == "4.0")


def test_a_lost_node_ends_a_run_that_needs_it(cluster, tiny, tmp_path):
    process = start(cluster, tiny, tmp_path, "steps=1000000", "validation.every_steps=0", "engine.max_restarts=0")
    wait_until(lambda: steps(tmp_path) or process.poll() is not None)
    assert process.poll() is None, (tmp_path / "output").read_text()
    cluster.lose(2)
    assert process.wait(900) == 1
    assert "engine-0" in (tmp_path / "output").read_text()
    wait_until(lambda: not of_run(tmp_path))
