"""Engines on other hosts: the socket to their agents, their certificate, and the command that starts one."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_scalerl.distributed.rendezvous import HostRendezvous, interface_of
from megatron_scalerl.engine.certificate import make_certificate
from megatron_scalerl.launch.agent_messages import Hello, Welcome
from megatron_scalerl.launch.control import AgentLink, EngineRegistry
from megatron_scalerl.launch.control_folder import ControllerFile, write_controller
from megatron_scalerl.launch.hosts import Host, Hosts
from megatron_scalerl.launch.placement import Attempt
from megatron_scalerl.launch.process import EngineProcess
from megatron_scalerl.launch.remote_server import RemoteServer
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.logs import NAME_VARIABLE
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.weights.transport import resolve_transport


class Agents:
    """The controller's side of all agents of one run. Create it in a running event loop; `close` it."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        hosts: Hosts,
        attempt: Attempt,
        secret: str,
        objection: Callable[[Hello], str | None],
    ) -> None:
        """attempt: folder, run id and incarnation of the controller. objection: why an engine may not join, or None.

        Binds the socket to the controller's address among `hosts`.
        """
        assert hosts.address is not None, hosts
        self._recipe, self._hosts, self._attempt, self._secret = recipe, hosts, attempt, secret
        certificate = make_certificate()
        self._tls = certificate.trusting()
        self.registry = EngineRegistry(
            address=hosts.address,
            secret=secret,
            run_id=attempt.run_id,
            incarnation=attempt.incarnation,
            welcome=Welcome(
                certificate=certificate.certificate,
                key=certificate.key,
                transport=resolve_transport(recipe.weights.transport),
            ),
            objection=objection,
        )

    @property
    def interface(self) -> str:
        """Name of this host's interface to the others."""
        assert self._hosts.address is not None
        return interface_of(HostRendezvous(host=self._hosts.address, port=0))

    def announce(self) -> None:
        """Write RUN/control/controller.json, which agents read. Raises OSError."""
        content = ControllerFile(
            engines=self.registry.endpoint,
            run_id=self._attempt.run_id,
            incarnation=self._attempt.incarnation,
            recipe_file=str(self._attempt.recipe_file.absolute()),
        )
        write_controller(self._attempt.folder, content)

    def engine(self, host: Host, *, index: int, log: Path, positions: tuple[int, ...] | None) -> EngineProcess:
        """Engine `index` on another host. positions: its GPUs, as indices into those that the host sees, or None."""
        name, start = f"engine-{index}", uuid.uuid4().hex
        port = self._recipe.engine.port
        argv = [
            *(sys.executable, "-m", "megatron_scalerl.launch.agent", str(self._attempt.folder.absolute())),
            *("--name", name, "--start", start, "--incarnation", self._attempt.incarnation),
            *("--devices", str(self._recipe.engine.devices_per_engine)),
            *("--port", str(port + index if port else 0)),
            *(("--gpus", ",".join(map(str, positions))) if positions is not None else ()),
        ]
        command = self._hosts.command(host, argv, {NAME_VARIABLE: name})
        agent = f"agent-{index}"  # a log of its own: its host writes the server's
        server = RemoteServer(
            partial(self.registry.expect, name, start, host.name),
            name=name,
            host=host.name,
            launch=partial(ChildProcess.start, agent, command, os.environ, log.with_name(f"{agent}.log")),
            log_path=log,
        )
        return EngineProcess(self._recipe, server, secret=self._secret, tls=self._tls)

    def joined(self, link: AgentLink) -> EngineProcess:
        """The engine of an agent that has joined."""
        log = self._attempt.folder / "logs" / f"{link.name}.log"
        server = RemoteServer(lambda: link, name=link.name, host=link.host, launch=None, log_path=log)
        return EngineProcess(self._recipe, server, secret=self._secret, tls=self._tls)

    def close(self) -> None:
        """Close the socket; agents that are still connected end their servers."""
        self.registry.close()
