"""The hosts of a run, and the command that starts a program on another one.

    one host        the default: every process is a child of the controller
    --hosts a,b     `--run-on "ssh {host}"`: the words, then one argument for a shell on that host, as with ssh
    --hosts slurm   inside an allocation: one step (srun) per host and role, none of which spans two hosts

The controller's own host may be one of them; its processes are children of the controller then, too. The hosts see
the run's folder, the policy and this installation under the same paths.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.distributed.rendezvous import own_address

SLURM = "slurm"
"""Instead of names: the hosts of the allocation that this process is in."""
DEFAULT_COMMAND = "ssh {host}"
_SRUN = (
    "srun", "--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--cpu-bind=none", "--export=ALL",
    "--nodelist={host}",
)  # fmt: skip
"""A step on one host, which shares its resources with the other steps there."""
_CARRIED = re.compile(r"MSRL_|NCCL_|UCX_|VLLM_|TORCH_|HF_|PYTHON|(LD_LIBRARY_PATH|CUDA_HOME|OMP_NUM_THREADS|TMPDIR)$")
"""Variables of the controller that a program on another host gets; srun hands all of them on."""
_PRIVATE = re.compile(r"SECRET|TOKEN|PASSWORD|_KEY", re.IGNORECASE)
_TIMEOUT_S = 60.0
_LOOK_S = 5.0
"""While a run goes on: its end waits for the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host of a run."""

    name: str
    here: bool = False
    """True for the controller's own one."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """All hosts of a run. Produced by `hosts_of`."""

    hosts: tuple[Host, ...]
    slots: int | None
    """Devices of each host that the run may use; None: those of the only host."""
    address: str | None
    """The controller's address as the other hosts reach it; None if there is no other one."""
    words: tuple[str, ...] = ()
    """The command that starts a program; `{host}` stands for the host's name."""
    shell: bool = True
    """Whether that command hands one argument to a shell, as ssh does, or executes its arguments."""

    def command(self, host: Host, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command line that runs `argv` on another host, in this process's working directory.

        env: variables to set there. They are visible to every user of both hosts, and must hold no secret.
        """
        assert not host.here, host
        words = [word.replace("{host}", host.name) for word in self.words]
        if not self.shell:
            return [*words, "env", *_assignments(env), *argv]
        carried = {name: value for name, value in os.environ.items() if _CARRIED.match(name)}
        public = {name: value for name, value in carried.items() if not _PRIVATE.search(name)}
        program = shlex.join(["env", *_assignments({**public, **env}), *argv])
        return [*words, f"cd {shlex.quote(str(Path.cwd()))} && exec {program}"]

    def has_left(self, host: Host) -> bool:
        """Whether Slurm has taken the host out of the allocation: it does not come back. Blocks; False if unknown."""
        job = os.environ.get("SLURM_JOB_ID")
        if self.shell or not job:
            return False
        try:
            found = re.search(r" NodeList=([^\s(]+)", _scontrol("job", "--oneliner", job, within_s=_LOOK_S))
            return found is not None and host.name not in _scontrol("hostnames", found[1], within_s=_LOOK_S).split()
        except (OSError, subprocess.SubprocessError):
            return False


ONE_HOST = Hosts(hosts=(Host(name="localhost", here=True),), slots=None, address=None)
"""This host alone."""


def hosts_of(names: str | None, *, slots: int | None, run_on: str | None, address: str | None) -> Hosts:
    """The hosts that the user names.

    names: comma-separated, or SLURM; None for this host alone. slots: devices of each; None: in an allocation its
    GPUs on this node. run_on: the command, None for ssh. address: of the controller, None: the one on the route to
    the first other host. Raises ValueError.
    """
    for option, value in (("--slots", slots), ("--run-on", run_on), ("--address", address)):
        if names is None and value is not None:
            raise ValueError(f"{option}: expected --hosts with it, found none")
    if names is None:
        return ONE_HOST
    in_slurm = names == SLURM
    if in_slurm and run_on is not None:
        raise ValueError(f"--run-on: expected none with --hosts {SLURM}, which uses srun, found {run_on!r}")
    listed = hosts_of_allocation() if in_slurm else [name.strip() for name in names.split(",")]
    if not all(re.fullmatch(r"[\w.@:-]+", name) and name[0] != "-" for name in listed) or not listed:
        raise ValueError(f"--hosts: expected names of hosts, separated by commas, or {SLURM}, found {names!r}")
    if len(set(listed)) < len(listed):
        raise ValueError(f"--hosts: expected each host once, found {names!r}")
    own = _names_of_this_host()
    hosts = tuple(Host(name=name, here=_bare(name) in own) for name in listed)
    others = [host.name for host in hosts if not host.here]
    if slots is None and in_slurm:
        slots = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) or None
    if slots is not None and slots < 1:
        raise ValueError(f"--slots: expected at least 1, found {slots}")
    if others and slots is None:
        raise ValueError("--slots: expected the number of devices of each host, found none")
    words = step_words() if in_slurm else tuple(shlex.split(run_on or DEFAULT_COMMAND))
    if others and not any("{host}" in word for word in words):
        raise ValueError(f"--run-on: expected a command with {{host}} in it, found {run_on!r}")
    return Hosts(
        hosts=hosts,
        slots=slots,
        address=(address or _address_towards(others[0])) if others else None,
        words=words,
        shell=not in_slurm,
    )


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(env.items())]


def step_words() -> tuple[str, ...]:
    """The command that starts a program on `{host}` of the allocation.

    It has all CPUs that the job has on a node, which are as many on each.
    """
    cpus = os.environ.get("SLURM_CPUS_ON_NODE")
    return (*_SRUN, f"--cpus-per-task={cpus}") if cpus else _SRUN


def hosts_of_allocation() -> list[str]:
    """The hosts of the Slurm allocation that this process is in. Raises ValueError outside of one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ValueError(f"--hosts {SLURM}: expected an allocation (SLURM_JOB_NODELIST), found none")
    try:
        return _scontrol("hostnames", nodes).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"--hosts {SLURM}: expected scontrol to list the hosts of {nodes}, found: {error}") from None


def _scontrol(*words: str, within_s: float = _TIMEOUT_S) -> str:
    """What `scontrol show` says. Raises OSError and SubprocessError."""
    argv = ["scontrol", "show", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=True).stdout


def _names_of_this_host() -> set[str]:
    name = socket.gethostname()
    return {"localhost", _bare(name), _bare(os.environ.get("SLURMD_NODENAME", name))}


def _bare(name: str) -> str:
    """The name without user and domain; an address stays as it is."""
    host = name.rpartition("@")[2]
    return host if re.fullmatch(r"[\d.]+", host) or ":" in host else host.partition(".")[0]


def _address_towards(other: str) -> str:
    """This host's address on the route to another one. Raises ValueError if there is none."""
    name = other.rpartition("@")[2]
    try:
        found = own_address(name)
    except OSError as error:
        raise ValueError(
            f"--address: expected an address that {name} reaches, found none ({error}); give it with --address"
        ) from None
    return found
