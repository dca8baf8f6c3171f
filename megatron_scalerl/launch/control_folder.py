"""How a program on another host finds the controller: by environment variables and by the folder RUN/control/.

Only the owner may read the folder:

    secret            the secret of this start of the controller (`processes.secret_file`)
    controller.json   environment variables for the agent of an engine that joins (`megatron-scalerl engine --join`)

A shared file system may show the secret of an earlier start for a while. The program therefore reads the file again
until the secret matches the controller's public key, which is among the variables.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.distributed.sockets import Purpose, RefusedError, controller_key
from megatron_scalerl.launch.hosts import Host, Hosts
from megatron_scalerl.launch.placement import Attempt
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.logs import NAME_VARIABLE
from megatron_scalerl.processes.secret_file import read_secret

SECRET_S = 60.0
"""Seconds within which the file must hold the secret of the current controller."""
_READ_AGAIN_S = 2.0
"""Seconds between two readings of the secret."""
CONTROLLER_VARIABLES = (
    *("MSRL_CONTROLLER", "MSRL_CONTROLLER_KEY", "MSRL_SECRET_FILE", "MSRL_RUN_ID", "MSRL_INCARNATION"),
    *("MSRL_RECIPE", "MSRL_LOGS"),
)
"""Names of the variables of `public_environment`, which alone are read from controller.json."""


def public_environment(attempt: Attempt, endpoint: str, secret: str, purpose: Purpose) -> dict[str, str]:
    """Environment variables for a program on another host.

    The variables hold no secret, because every user of both hosts may see the variables of the command.
    """
    return {
        "MSRL_CONTROLLER": endpoint,
        "MSRL_CONTROLLER_KEY": controller_key(secret, purpose),
        "MSRL_SECRET_FILE": str(secret_file(attempt.folder)),
        "MSRL_RUN_ID": attempt.run_id,
        "MSRL_INCARNATION": attempt.incarnation,
        "MSRL_RECIPE": str(attempt.recipe_file.absolute()),
        "MSRL_LOGS": str((attempt.folder / "logs").absolute()),
    }


async def start_agent(hosts: Hosts, host: Host, name: str, environment: Mapping[str, str], log: Path) -> ChildProcess:
    """Start `launch.agent` on another host by a command; output goes to `log`. Raises OSError."""
    argv = [sys.executable, "-m", "megatron_scalerl.launch.agent", name]
    command = hosts.command(host, argv, {**environment, NAME_VARIABLE: name})
    return await ChildProcess.start(log.stem, command, os.environ, log)


def controller_address(environment: Mapping[str, str]) -> str:
    """The controller's address, without the port."""
    return environment["MSRL_CONTROLLER"].removeprefix("tcp://").rpartition(":")[0].strip("[]")


def find_secret(environment: Mapping[str, str], purpose: Purpose) -> str:
    """Read the secret file until the secret matches MSRL_CONTROLLER_KEY, the public key of the current controller.

    Blocks. Raises RefusedError if the secret does not match within SECRET_S.
    """
    path = Path(environment["MSRL_SECRET_FILE"])
    end = time.monotonic() + SECRET_S
    while True:
        problem = f"{path}: this is not the secret of the controller that started this program"
        try:
            secret = read_secret(path)
            if controller_key(secret, purpose) == environment["MSRL_CONTROLLER_KEY"]:
                return secret
        except (ValueError, OSError) as error:
            problem = str(error)
        if time.monotonic() > end:
            raise RefusedError(problem)
        time.sleep(_READ_AGAIN_S)


def secret_file(run: Path) -> Path:
    """The file with the run's secret. run: RUN/."""
    return (run / "control" / "secret").absolute()


def controller_file(run: Path) -> Path:
    """The file controller.json, for engines that join. run: RUN/."""
    return secret_file(run).with_name("controller.json")


def withdraw(run: Path, secret: str) -> None:
    """Delete the secret and controller.json when a controller ends, unless a later controller has replaced the files.

    secret: secret of the controller that ends.
    """
    with contextlib.suppress(OSError, ValueError):  # files that cannot be read stay.
        # With another secret, the files belong to a controller that has been started since.
        if read_secret(secret_file(run)) == secret:
            secret_file(run).unlink()
            controller_file(run).unlink()


def write_controller(run: Path, environment: Mapping[str, str]) -> None:
    """Write controller.json to the folder of the secret. Raises OSError."""
    write_durably(controller_file(run), msgspec.json.encode(environment), private=True)


def read_controller(run: Path) -> dict[str, str]:
    """Read controller.json. Raises OSError, and ValueError if the file is missing or lacks the variables."""
    path = controller_file(run)
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        return {name: content[name] for name in CONTROLLER_VARIABLES}
    except FileNotFoundError:
        raise ValueError(f"{run}: the run has no controller ({path} does not exist); start the run first") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ValueError(f"{path}: this file does not hold the address of a controller ({error})") from None
