"""Receives a weight update into host memory in a thread, while the model goes on with the weights that it has."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from megatron_scalerl.weights.changes import Changes
from megatron_scalerl.weights.plan import WeightPlan
from megatron_scalerl.weights.transport.frames import Values, receive
from megatron_scalerl.weights.transport.gloo import Group


class StagedUpdate:
    """One worker's parts of an update, as they arrive; every bucket is checked before `take` gives them out."""

    def __init__(self, groups: Mapping[int, Group], plan: WeightPlan, version: int, *, holds: int | None):
        """Begin to receive. The arguments are those of `frames.receive`."""
        self.version = version
        self.digests: list[int] = []
        """Of the buckets; complete once `take` gives the first part out."""
        self._parts: list[Values | list[Changes]] = []
        self._error = "a bug ended its thread, see the engine's log"  # until it has all
        self._discarded = False
        self._groups, self._plan, self._holds = dict(groups), plan, holds
        self._thread = threading.Thread(target=self._receive, name="staged weights", daemon=True)
        self._thread.start()

    def state(self) -> str | None:
        """None while parts are arriving, "" once all have, else why they will not."""
        return None if self._thread.is_alive() else self._error

    def take(self) -> Iterator[Values | list[Changes]]:
        """The parts, each of them once; waits until all have arrived. Raises RuntimeError if they will not.

        The memory of a part is free after the next one was asked for.
        """
        self._thread.join()
        if self._error:
            raise RuntimeError(self._error)
        self._parts.reverse()
        while self._parts:
            yield self._parts.pop()

    def discard(self) -> None:
        """Forget what has arrived, and close the groups once nothing is pending in them; does not wait for it.

        A broadcast that is pending in another thread is not ended by closing its group (torch 2.13, gloo): it ends
        with its sender's group, or at its time limit.
        """
        self._discarded = True
        self._parts = []
        threading.Thread(target=self._close, name="discarded weights", daemon=True).start()

    def _close(self) -> None:
        self._thread.join()
        for group in self._groups.values():
            group.close()

    def _receive(self) -> None:
        device = next(iter(self._groups.values())).device
        try:
            with _apart(device):
                for part in receive(self._groups, self._plan, self.version, self.digests, holds=self._holds):
                    if self._discarded:
                        raise RuntimeError("discarded")
                    self._parts.append(_on_host(part))
            self._error = ""
        except RuntimeError as error:
            self._error = str(error) or type(error).__name__
        finally:
            if self._error:  # the senders must not wait for this worker
                self._parts = []
                for group in self._groups.values():
                    group.close()


def _apart(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a GPU: its device, which is a setting of the thread, and a stream beside the model's."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    torch.accelerator.set_device_index(device.index)
    return torch.Stream(device=device)


def _on_host(part: Values | list[Changes]) -> Values | list[Changes]:
    """Values move to host memory; changes, which are small, stay where they are."""
    if isinstance(part, list) or part.values.device.type == "cpu":
        return part
    return replace(part, values=part.values.to("cpu"))
