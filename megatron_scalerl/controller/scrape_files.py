"""RUN/metrics: the token of the endpoint and the files by which Prometheus finds it.

token           the bearer token, mode 0600; kept from one start of the run to the next
targets.json    the endpoint and every engine, as Prometheus' file_sd reads it; written again when they change
prometheus.yml  a whole configuration of a Prometheus that scrapes this run; its scrape_configs fit into any other

The folder has mode 0700: nobody but its owner reads what is in it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.processes.secret_file import read_secret, write_secret

FOLDER, TOKEN, TARGETS, CONFIG = "metrics", "token", "targets.json", "prometheus.yml"
METRICS_PATH = "/metrics"
ENGINE_PATH = "/metrics/engines/"
"""Followed by the name of an engine."""
INTERVAL = "15s"


def token_of(run_dir: Path) -> str:
    """The run's token, made if there is none. Raises ValueError for a file that others own or may read."""
    path = run_dir / FOLDER / TOKEN
    if path.is_file() and not path.is_symlink() and path.stat().st_size == 0:
        path.unlink()  # a start was killed while it wrote it
    try:
        return read_secret(path).strip()
    except FileNotFoundError:
        token = secrets.token_hex(32)
        write_secret(path, token)
        return token


def list_nothing(run_dir: Path) -> bool:
    """Take the targets of an earlier start off: another's process may listen there, and would get the token.

    Returns whether there were any. Raises OSError.
    """
    path = run_dir / FOLDER / TARGETS
    if not path.exists():
        return False
    write_durably(path, b"[]")
    return True


class ScrapeFiles:
    """The files of one start of the run."""

    def __init__(self, run_dir: Path, *, name: str, address: str, authorized: bool) -> None:
        """name: of the run. address: host:port at which Prometheus finds the endpoint. authorized: with the token."""
        self._folder = (run_dir / FOLDER).absolute()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        self._name, self._address = name, address
        self._engines: list[str] | None = None
        job: dict[str, object] = {"job_name": f"scalerl/{name}"}
        if authorized:
            job["authorization"] = {"credentials_file": str(self._folder / TOKEN)}
        job["file_sd_configs"] = [{"files": [str(self._folder / TARGETS)]}]
        config = {"global": {"scrape_interval": INTERVAL}, "scrape_configs": [job]}
        write_durably(self._folder / CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
        self.list_engines([])

    def list_engines(self, names: Sequence[str]) -> None:
        """Write the targets if the engines are others than before. Raises OSError."""
        if self._engines == list(names):
            return
        targets = [self._target(METRICS_PATH, {}), *(self._target(ENGINE_PATH + n, {"server": n}) for n in names)]
        write_durably(self._folder / TARGETS, json.dumps(targets, indent=1).encode())
        self._engines = list(names)

    def _target(self, path: str, labels: dict[str, str]) -> dict[str, object]:
        return {"targets": [self._address], "labels": {"__metrics_path__": path, "run": self._name, **labels}}
