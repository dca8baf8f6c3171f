"""A real Slurm of several nodes on one machine: munged, slurmctld, and one slurmd per node.

Each node has a network namespace with an address and a host name of its own; all of it is in namespaces of one
process, with which every process of the cluster ends. The GPUs are devices without a function. Needs root, Linux and
Debian's packages slurm-wlm and munge. `python mini_cluster.py FOLDER NODE...` is that process.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import Template

from megatron_scalerl.processes.parent_death import tied_command

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")
CLIENTS = ("sbatch", "salloc", "squeue", "sinfo", "scontrol", "scancel", "srun")
NETWORK = "10.77.0"
CPUS, GPUS = 16, 8
START_S = 60


def missing():
    """Why there can be no cluster here, None if there can."""
    if os.geteuid() != 0:
        return "a Slurm for tests needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"a Slurm for tests needs {', '.join(absent)} (apt-get install slurm-wlm munge iproute2)"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if done.returncode == 0 else "a Slurm for tests needs namespaces (unshare), which are forbidden here"


class MiniCluster:
    """A running cluster. Its partition `gpu` has all nodes, `others` the last two. Client programs are in `bin`."""

    def __init__(self, folder, nodes, *, silence_s=30, preemption=None):
        """silence_s: seconds until Slurm calls a node down that does not answer.

        preemption: jobs of the partition `high` take the place of others, which get 60 s, and the GPUs have the type
        h100; the text is SlurmctldParameters.
        """
        self.folder, self.bin = folder, folder / "bin"
        disks = [f"disks/{node}" for node in nodes]
        for name in ("etc", "run", "log", "state", "spool", "dev", "bin", "local", *disks):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        write_settings(folder, nodes, silence_s, preemption=preemption)
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with open(folder / "log/init", "wb") as log:
            self._process = subprocess.Popen(
                tied_command(["unshare", *spaces, sys.executable, __file__, str(folder), *nodes]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "SLURM_CONF": str(folder / "etc/slurm.conf"),
                },
                start_new_session=True,
            )
        try:
            self._write_clients()
            self._wait_until_idle(len(nodes))
        except BaseException:
            self.close()
            raise

    def _write_clients(self):
        """Programs that enter the cluster's namespaces and there call Slurm's."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + START_S
        while not (inner := children.read_text().split()):
            if time.monotonic() > deadline:
                raise RuntimeError("the namespaces of the cluster did not start")
            time.sleep(0.01)
        self._inner = inner[0]
        enter = f"nsenter --target {inner[0]} --net --mount --uts --ipc --pid --"
        conf = self.folder / "etc/slurm.conf"
        for name in CLIENTS:
            program = self.bin / name
            real = shutil.which(name)
            outside = f'exec {enter} env -C "$PWD" SLURM_CONF={conf} {real} "$@"'
            # a job inherits the path of its submission, and is inside already
            program.write_text(f'#!/bin/sh\n[ -z "$SLURM_JOB_ID" ] || exec {real} "$@"\n{outside}\n')
            program.chmod(0o755)

    def _wait_until_idle(self, nodes):
        deadline = time.monotonic() + START_S
        while self.ask("sinfo", "--noheader", "-t", "idle", "-o", "%D").strip() != str(nodes):
            if time.monotonic() > deadline or self._process.poll() is not None:
                logs = "".join(f"{file}:\n{file.read_text()[-2000:]}" for file in (self.folder / "log").iterdir())
                raise RuntimeError(f"the nodes of the cluster did not become idle\n{logs}")
            time.sleep(0.05)

    def ask(self, name, *words):
        """Standard output of a client program."""
        return subprocess.run([self.bin / name, *words], capture_output=True, text=True).stdout

    def link(self, node, state):
        """Take a node's only network link down, or up again."""
        self._inside("ip", "link", "set", f"to-{node}", state)

    def kill_daemon(self, node):
        """SIGKILL to a node's slurmd: Slurm loses the node, whose processes go on."""
        self._inside("kill", "-9", (self.folder / f"run/{node}.pid").read_text().strip())

    def _inside(self, *words):
        enter = ["nsenter", "--target", self._inner, "--net", "--mount", "--uts", "--ipc", "--pid", "--"]
        conf = f"SLURM_CONF={self.folder / 'etc' / 'slurm.conf'}"
        subprocess.run([*enter, "env", conf, *words], check=True, capture_output=True)

    def close(self):
        """End the cluster and every process in it."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


def slurmd(folder, node):
    """Starts a node's daemon in its network namespace, under its name, with a disk of its own at FOLDER/local."""
    disk = f"mount --make-rprivate / && mount --bind {folder}/disks/{node} {folder}/local"
    start = f"hostname {node} && {disk} && exec slurmd -N {node}"
    return ["ip", "netns", "exec", node, "unshare", "--uts", "--mount", "sh", "-c", start]


def write_settings(folder, nodes, silence_s, *, preemption):
    """Slurm's and munge's files."""
    for index in range(GPUS):
        os.mknod(folder / f"dev/gpu{index}", 0o666 | 0o020000, os.makedev(1, 3))
    key = folder / "etc/munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    addresses = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(nodes)}
    hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n{NETWORK}.1 head\n{hosts}")
    (folder / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    names = ",".join(nodes)
    settings = Template((Path(__file__).parents[1] / "data/slurm.conf").read_text())
    lines = [settings.substitute(folder=folder, network=NETWORK, silence_s=silence_s)]
    if preemption is not None:
        lines += ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", f"SlurmctldParameters={preemption}"]
    kind = "" if preemption is None else "h100:"
    lines += [
        f"NodeName={name} NodeAddr={address} CPUs={CPUS} RealMemory=1000 Gres=gpu:{kind}{GPUS} Weight={1 + number}"
        for number, (name, address) in enumerate(addresses.items())  # a job gets the first nodes that are free
    ]
    lines.append(f"PartitionName=gpu Nodes={names} Default=YES MaxTime=1-0 State=UP")
    lines.append(f"PartitionName=others Nodes={','.join(nodes[-2:])} MaxTime=1-0 State=UP")
    if preemption is not None:
        lines[-2] += " PriorityTier=1 GraceTime=60"
        lines.append(f"PartitionName=high Nodes={names} MaxTime=1-0 State=UP PriorityTier=9")
    (folder / "etc/slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "etc/gres.conf").write_text(
        f"NodeName={names} Name=gpu {f'Type={kind[:-1]} ' if kind else ''}File={folder}/dev/gpu[0-{GPUS - 1}]\n"
    )
    (folder / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def serve(folder, nodes):
    """In the new namespaces: network, daemons; never returns."""

    def run(text):
        subprocess.run(text.split(), check=True)

    for name in ("hosts", "nsswitch.conf"):
        run(f"mount --bind {folder}/etc/{name} /etc/{name}")
    # slurmd starts a login shell for each job, to which this machine's scripts may do anything
    for name in (".profile", ".bash_profile", ".bash_login"):
        if (Path("/root") / name).exists():
            run(f"mount --bind /dev/null /root/{name}")
    run("mount -t tmpfs tmpfs /dev/shm")
    Path("/run/netns").mkdir(exist_ok=True)
    run("mount -t tmpfs tmpfs /run/netns")
    run("hostname head")
    run("ip link set lo up")
    run("ip link add bridge0 type bridge")
    run(f"ip addr add {NETWORK}.1/24 dev bridge0")
    run("ip link set bridge0 up")
    # --force: only root uses the socket, so the folders above it need not be open to others
    run(
        f"munged --force --socket={folder}/run/munge --key-file={folder}/etc/munge.key "
        f"--pid-file={folder}/run/munged.pid --log-file={folder}/log/munged --seed-file={folder}/state/seed"
    )
    for number, name in enumerate(nodes):
        run(f"ip netns add {name}")
        run(f"ip link add to-{name} type veth peer name eth0 netns {name}")
        run(f"ip link set to-{name} master bridge0 up")
        run(f"ip -n {name} link set lo up")
        run(f"ip -n {name} addr add {NETWORK}.{10 + number}/24 dev eth0")
        run(f"ip -n {name} link set eth0 up")
        subprocess.run(slurmd(folder, name), check=True)
    run("slurmctld -c")
    while True:  # the first process of the namespaces adopts orphans
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.5)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
