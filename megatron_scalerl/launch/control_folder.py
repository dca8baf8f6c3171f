"""RUN/control/: by these files, which only their owner can read, processes on other hosts find the controller.

secret            the secret of this start of the controller (`processes.secret_file`)
controller.json   where the controller listens, and which start of it that is
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.processes.secret_file import read_secret

FOLDER = "control"


class ControllerFile(msgspec.Struct, frozen=True, kw_only=True):
    """RUN/control/controller.json. Written by the controller of a run on several hosts."""

    engines: str
    """Endpoint of the socket to the engines' agents, tcp://ADDRESS:PORT."""
    run_id: str
    incarnation: str
    """Of this start of the controller."""
    recipe_file: str
    """Path of the resolved recipe, the same on every host."""


def secret_file(run: Path) -> Path:
    """The file with the run's secret. run: RUN/."""
    return (run / FOLDER / "secret").absolute()


def withdraw(run: Path, secret: str) -> None:
    """Delete both files at the end of a controller, unless they are of a later start. secret: its own one."""
    file = secret_file(run)
    with contextlib.suppress(OSError, ValueError):  # there are none, or they are not readable: nothing of ours
        if read_secret(file) == secret:
            file.unlink()
            (run / FOLDER / "controller.json").unlink()


def write_controller(run: Path, content: ControllerFile) -> None:
    """Write controller.json, into a folder with mode 0700. Raises OSError."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    write_durably(folder / "controller.json", msgspec.json.encode(content), private=True)


def read_controller(run: Path) -> ControllerFile:
    """The content of controller.json. Raises OSError if there is none, and ValueError for another content."""
    path = run / FOLDER / "controller.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ControllerFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected the address of a run's controller, found another content ({error})"
        ) from None
