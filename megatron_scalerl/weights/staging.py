"""Receives a weight update into host memory in a thread, while the model goes on with the weights that it has.

Life of a staged update:

    create     a thread begins to receive; every bucket is checked as it arrives
    state      the engine asks whether all payloads have arrived
    take       once they have, the paused engine takes each payload and frees it
    discard    instead of `take`: the thread ends by itself, and its groups are closed after it
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from megatron_scalerl.weights.plan import WeightPlan
from megatron_scalerl.weights.transport.frames import Payload, receive
from megatron_scalerl.weights.transport.gloo import Group


class StagedUpdate:
    """The payloads of one worker's update, each kept from its arrival until `take` yields it."""

    def __init__(self, groups: Mapping[int, Group], plan: WeightPlan, version: int, *, holds: int | None):
        """Begin to receive. The arguments are those of `frames.receive`."""
        self.version = version
        self.digests: list[int] = []
        """Digests of the buckets; complete once `take` yields the first payload."""
        self._payloads: list[Payload] = []
        # Stands until the thread has set another error, or none: only a bug ends it without either.
        self._error = "a bug ended the receiving thread, see the engine's log"
        self._discarded = False
        self._groups = dict(groups)
        self._plan = plan
        self._holds = holds
        self._thread = threading.Thread(target=self._receive, name="staged weights", daemon=True)
        self._thread.start()

    def state(self) -> str | None:
        """None while payloads are arriving, "" once all have arrived, else why they will not arrive."""
        if self._thread.is_alive():
            return None
        return self._error

    def take(self) -> Iterator[Payload]:
        """Each payload once; waits until all have arrived. Raises RuntimeError if they will not arrive.

        The memory of a payload is free once the next payload is asked for.
        """
        self._thread.join()
        if self._error:
            raise RuntimeError(self._error)
        self._payloads.reverse()
        while self._payloads:
            yield self._payloads.pop()

    def discard(self) -> None:
        """Forget the payloads, and close the groups once no broadcast is pending in them; does not wait.

        A broadcast that is pending in another thread does not end when its group is closed here (torch 2.13, gloo).
        It ends with its sender's group, or at its time limit.
        """
        self._discarded = True
        self._payloads = []
        threading.Thread(target=self._close, name="discarded weights", daemon=True).start()

    def _close(self) -> None:
        self._thread.join()
        for group in self._groups.values():
            group.close()

    def _receive(self) -> None:
        device = next(iter(self._groups.values())).device
        try:
            with _side_stream(device):
                for payload in receive(self._groups, self._plan, self.version, self.digests, holds=self._holds):
                    if self._discarded:
                        raise RuntimeError("the staged update was discarded")
                    self._payloads.append(_on_host(payload))
            self._error = ""
        except RuntimeError as error:
            self._error = str(error) or type(error).__name__
        finally:
            if self._error:  # the senders must not wait for this worker
                self._payloads = []
                for group in self._groups.values():
                    group.close()


def _side_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a GPU, a stream that does not wait for the model's."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    # The current device is a setting of each thread.
    torch.accelerator.set_device_index(device.index)
    return torch.Stream(device=device)


def _on_host(payload: Payload) -> Payload:
    """The payload with its values in host memory; changes, which are small, stay on their device."""
    if isinstance(payload, list) or payload.values.device.type == "cpu":
        return payload
    return replace(payload, values=payload.values.to("cpu"))
