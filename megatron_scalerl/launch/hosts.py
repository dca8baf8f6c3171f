"""The hosts of a run, and the command that starts a program on another host.

    no --hosts      this host alone: every process is a child of the controller
    --hosts a,b     `--run-on "ssh {host}"`: the command runs the last argument in a shell on that host
    --hosts slurm   the hosts of the allocation: srun starts one step per host and role; no step spans two hosts
    --hosts ray     devices of a Ray cluster, reserved for as long as the controller runs (`launch.ray_hosts`); ray:4
                    takes four nodes, for which the cluster may start machines

If the controller's own host is among the hosts, the processes there are children of the controller. All hosts must
have the run's folder, the policy and this installation under the same paths.

This module also raises the limit on open files: a completion in flight is a connection of controller and engine.
"""

import os
import re
import resource
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from megatron_scalerl.distributed.rendezvous import local_address
from megatron_scalerl.launch import ray_hosts
from megatron_scalerl.processes.signals import HOSTS_LEFT_CODE
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.rewards.pool import default_workers

SLURM = "slurm"
"""Value of --hosts for the hosts of the Slurm allocation in which this process runs."""
DEFAULT_COMMAND = "ssh {host}"
_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--cpu-bind=none", "--export=ALL")
"""Command that starts a Slurm step on one host. The step shares the host's resources with the job's other steps."""
_CARRIED_VARIABLES = re.compile(
    r"MSRL_|NCCL_|UCX_|VLLM_|TORCH_|HF_|PYTHON|(LD_LIBRARY_PATH|CUDA_HOME|OMP_NUM_THREADS|TMPDIR)$"
)
"""Variables of the controller that --run-on passes to a program on another host. srun passes all variables."""
_PRIVATE_NAMES = re.compile(
    r"^(?!.*_(PATH|FILE|DIR)$).*(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(TOKEN|KEY)S?(?![A-Z])"
    r"|(^|_)(PAT|PASS|AUTH|PWD|BEARER)(?![A-Z]))",
    re.IGNORECASE,
)
"""Names of variables that hold secrets. Names that end in _PATH, _FILE or _DIR do not match."""
_SECRET_VALUES = re.compile(
    r"://[^/@\s]+:[^/@\s]+@"
    r"|(?<![A-Za-z0-9])((hf|gh[opsur]|sk)[_-][A-Za-z0-9]{16}|(github_pat|glpat|nvapi)[_-][\w-]{16}|xox[a-z]-[\w-]{8}"
    r"|sk-(?=[\w-]*[0-9])[\w-]{16}|(AKIA|ASIA)[A-Z0-9]{12}|(AIza|eyJ)[\w-]{16})|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|(^|[?&;\s])(sig|signature|x-amz-signature|token|access_token|api_?key|secret|password)=[^&\s]{4}"
    r"|://hooks?\.|://[^\s]*/(web)?hooks?/",
    re.IGNORECASE,
)
"""Values that are secrets whatever the variable's name is: URLs with a password or a signature, tokens of known
forms, private keys, and URLs of webhooks, which anybody with the URL may call."""
_TIMEOUT_S = 60.0
_LOOK_S = 5.0
"""Time limit (s) of a query whether hosts have left the job. The query delays the handling of a failure."""
PER_COMPLETION = 2
"""Largest number of connections to one engine, as a multiple of rollouts.max_in_flight: once for training completions
and once for validation completions."""
PER_PROCESS = 8
"""Open files per child process: pipes, sockets, the log, and the descriptors by which asyncio watches the child."""
TARGET = 65536
"""Number of open files to which the soft limit is raised if the hard limit allows. A run needs fewer files, but any
connection to the controller's socket counts until libzmq drops unauthenticated connections after 30 s."""
MARGIN = 1024
"""Number of open files for the journal and checkpoints, for libraries, and for the event loop."""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, by name or by value, so that other users must not see the value."""
    return bool(_PRIVATE_NAMES.search(name) or _SECRET_VALUES.search(value))


class HostsLeft(RuntimeError):
    """Slurm has taken hosts of the trainer out of the job, so the run can go on only in another allocation."""

    exit_code = HOSTS_LEFT_CODE


@record
class Host:
    """A host of a run."""

    name: str
    here: bool = False
    """Whether the controller runs on this host."""


@record
class Hosts:
    """All hosts of a run. Produced by `hosts_of`."""

    hosts: tuple[Host, ...]
    slots: int | None
    """Number of devices of each host that the run may use; None for all devices of the only host."""
    address: str | None
    """The controller's address on the route to other hosts; None if there are no other hosts."""
    words: tuple[str, ...] = ()
    """The command, such as ssh {host}, that runs the last argument in a shell on {host}. Empty with Slurm (srun)."""

    def command(self, host: Host, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command line that runs `argv` on another host, in this process's working directory.

        env: variables to set on the other host. Every user of both hosts can see `env`, so no secrets.
        """
        assert not host.here, host
        if not self.words:
            return [*step_words(host.name), "env", *_assignments(env), *argv]
        words = [word.replace("{host}", host.name) for word in self.words]
        carried = {name: value for name, value in os.environ.items() if _CARRIED_VARIABLES.match(name)}
        public = {name: value for name, value in carried.items() if not is_secret(name, value)}
        program = shlex.join(["env", *_assignments({**public, **env}), *argv])
        return [*words, f"cd {shlex.quote(str(Path.cwd()))} && exec {program}"]

    def have_left(self) -> set[str]:
        """Names of the hosts that Slurm has removed from the job; empty without an answer of Slurm. Blocks."""
        job = _this_job()
        if self.words or self.address is None or job is None:
            return set()
        try:
            nodes = re.findall(r" NodeList=([^\s(]+)", _scontrol("job", "--oneliner", job, within_s=_LOOK_S))
            if not nodes:
                return set()
            names = _scontrol("hostnames", ",".join(nodes), within_s=_LOOK_S).split()
        except (OSError, subprocess.SubprocessError):
            return set()
        return {host.name for host in self.hosts} - set(names)


ONE_HOST = Hosts(hosts=(Host(name="localhost", here=True),), slots=None, address=None)
"""The `Hosts` of a run without --hosts: this host alone."""


def takes_gpus(transport: str) -> bool:
    """Whether a run with this `weights.transport` uses GPUs: always with nccl, else if this host has a visible GPU.

    A user who sets CUDA_VISIBLE_DEVICES to the empty string runs on CPUs.
    """
    # Imported here, because `distributed.device` imports torch, which takes seconds.
    from megatron_scalerl.distributed import device

    return transport == "nccl" or device.HAVE_GPU


def hosts_of(
    names: str | None,
    *,
    slots: int | None,
    run_on: str | None,
    address: str | None,
    transport: str = "auto",
) -> Hosts:
    """The hosts that the options of the command line name. Raises ValueError for an invalid option.

    names: --hosts: names with commas between them, SLURM, ray or ray:NODES; None for this host alone. slots: --slots,
    devices of each host; None with Slurm for the job's GPUs on this node, with Ray for all devices of a node. run_on:
    --run-on; None for ssh. address: --address of the controller; None for the address on the route to the first other
    host. transport: weights.transport, which with Ray says whether devices are GPUs.
    """
    options = (("--slots", slots), ("--run-on", run_on), ("--address", address))
    for option, value in options:
        if names is None and value is not None:
            raise ValueError(f"{option} requires --hosts")
    if names is None:
        return ONE_HOST
    in_slurm = names == SLURM
    ray = re.fullmatch(r"ray(?::([1-9]\d*))?", names)
    if run_on is not None and (ray or in_slurm):
        raise ValueError(f"--run-on: {run_on!r} is not used with --hosts {names}; leave it out")
    if ray:
        if transport not in ("nccl", "gloo"):
            raise ValueError(
                f"weights.transport: {transport} does not say whether the nodes of --hosts {names} have GPUs; set "
                "nccl to use GPUs, or gloo to use GPUs only if this host has a GPU, and CPUs otherwise"
            )
        return _hosts_of_ray("GPU" if takes_gpus(transport) else "CPU", int(ray[1] or 0) or None, slots, address)
    words: tuple[str, ...] = ()
    if in_slurm:
        listed = hosts_of_allocation()
        if slots is None:
            # SLURM_GPUS_ON_NODE is a number (8) or a kind and a number (h100:8).
            slots = int(os.environ.get("SLURM_GPUS_ON_NODE", "0").rpartition(":")[2]) or None
    else:
        listed = _listed_names(names)
        words = tuple(shlex.split(run_on or DEFAULT_COMMAND))
    this_host = _names_of_this_host()
    # Users and Slurm may write a host's name with or without the domain, so bare names are compared.
    hosts = tuple(Host(name=name, here=_bare_name(name) in this_host) for name in listed)
    other_hosts = [host.name for host in hosts if not host.here]
    if slots is not None and slots < 1:
        raise ValueError(f"--slots is {slots}; it has to be at least 1")
    if other_hosts and slots is None:
        raise ValueError("--slots is missing; give the number of devices of each host")
    if other_hosts and not in_slurm and not any("{host}" in word for word in words):
        raise ValueError(f"--run-on: {run_on!r} has no {{host}}; write {{host}} in place of the host's name")
    if not other_hosts:
        return Hosts(hosts=hosts, slots=slots, address=None, words=words)
    return Hosts(hosts=hosts, slots=slots, address=address or _address_towards(other_hosts[0]), words=words)


def _hosts_of_ray(kind: Literal["GPU", "CPU"], count: int | None, slots: int | None, address: str | None) -> Hosts:
    """Reserve nodes of a Ray cluster as hosts.

    Programs on the controller's own node also run through Ray, so that Ray counts the devices in use.
    """
    names, slots, words = ray_hosts.reserve(kind, count, slots)
    hosts = tuple(Host(name=name) for name in names)
    return Hosts(hosts=hosts, slots=slots, address=address or _address_towards(names[0]), words=words)


def _listed_names(names: str) -> list[str]:
    listed = [name.strip() for name in names.split(",")]
    if not all(re.fullmatch(r"[\w.@:-]+", name) and name[0] != "-" for name in listed):
        raise ValueError(
            f"--hosts: {names!r} is no list of host names; write names with commas between them, {SLURM} or ray"
        )
    if len(set(listed)) < len(listed):
        raise ValueError(f"--hosts: {names!r} names a host twice")
    return listed


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(env.items())]


def step_words(host: str) -> list[str]:
    """The command that starts a program on a host of the allocation, on all CPUs that the job has there.

    If the allocation's nodes differ, the step gets the CPU count of the smallest node.
    """
    per_node = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")  # for example 128,64(x2)
    words = [*_SRUN, f"--nodelist={host}"]
    if cpus := re.findall(r"(?:^|,)(\d+)", per_node):
        words.append(f"--cpus-per-task={min(map(int, cpus))}")
    return words


def hosts_of_allocation() -> list[str]:
    """The hosts of the Slurm allocation that this process is in.

    Raises ValueError outside of an allocation and in a heterogeneous allocation.
    """
    if not os.environ.get("SLURM_JOB_NODELIST"):
        raise ValueError(f"--hosts {SLURM}: this process is in no allocation (SLURM_JOB_NODELIST); use sbatch")
    if "SLURM_HET_SIZE" in os.environ:
        raise ValueError(f"--hosts {SLURM}: heterogeneous jobs are not supported; use one job of one kind of node")
    nodes = os.environ["SLURM_JOB_NODELIST"]
    try:
        return _scontrol("hostnames", nodes).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"--hosts {SLURM}: scontrol does not list the hosts of {nodes}: {error}") from None


def _this_job() -> str | None:
    """The job's id for scontrol; None outside of a job.

    The id of an array's task is ARRAY_TASK. SLURM_JOB_ID is not used: the last task's id stands for the whole array.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _scontrol(*words: str, within_s: float = _TIMEOUT_S) -> str:
    """The output of `scontrol show`. Raises OSError or SubprocessError if the command fails or takes too long."""
    argv = ["scontrol", "show", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=True).stdout


def _names_of_this_host() -> set[str]:
    name = socket.gethostname()
    return {"localhost", _bare_name(name), _bare_name(os.environ.get("SLURMD_NODENAME", name))}


def _bare_name(name: str) -> str:
    """The host's name without user and domain, or the host's IP address without user."""
    host = name.rpartition("@")[2]
    is_address = ":" in host or re.fullmatch(r"[\d.]+", host)
    return host if is_address else host.partition(".")[0]


def _address_towards(other_host: str) -> str:
    """This host's address on the route to another host. Raises ValueError if there is no route."""
    name = other_host.rpartition("@")[2]
    try:
        return local_address(name)
    except OSError as error:
        raise ValueError(
            f"--address: this host has no route to {name} ({error}); give the address at which {name} reaches it"
        ) from None


def files_needed(recipe: Recipe) -> int:
    """Largest number of files that the controller of a run may have open at once. An engine needs fewer files."""
    engines = len(recipe.engine_devices)
    completions = PER_COMPLETION * engines * recipe.rollouts.max_in_flight
    workers = (recipe.rewards.workers or default_workers()) + (recipe.rollouts.decoders or default_workers())
    processes = engines + recipe.trainer.world_size + workers
    open_files = completions + PER_PROCESS * processes + MARGIN
    if recipe.episodes:
        # Connections of users' agents (`rollouts.agents.AgentServer`) get as many files again.
        open_files *= 2
    return open_files


def allow_open_files(recipe: Recipe) -> None:
    """Raise the soft limit on open files to TARGET or the hard limit. Child processes inherit the limit.

    Raises ValueError if the hard limit is lower than the run's need.
    """
    open_files = files_needed(recipe)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and open_files > hard:
        raise ValueError(
            f"open files: the hard limit of {hard} (ulimit -Hn) is too low: engine.count {recipe.engine.count} x "
            f"rollouts.max_in_flight {recipe.rollouts.max_in_flight} take {open_files}; raise the limit or lower one"
        )
    target = max(open_files, TARGET)
    if hard != resource.RLIM_INFINITY:
        target = min(target, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
