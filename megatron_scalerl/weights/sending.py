"""The trainer's side of a weight update: every sending rank sends its own parts to all engines.

Called on every rank at once. An engine that is gone does not end the trainer: the ranks tell each other whether their
groups failed, and all of them return it.
"""

import logging
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.plan import Connection, SendReport, buckets
from megatron_scalerl.weights.source import MegatronWeightSource
from megatron_scalerl.weights.transport import make_sender
from megatron_scalerl.weights.transport.sender import Sender
from megatron_scalerl.weights.written import Written

logger = logging.getLogger(__name__)


class WeightSending:
    """This rank's part in the weight updates of a run."""

    def __init__(self, source: MegatronWeightSource, *, bucket_mib: int, written: Written | None = None):
        """written: by the optimizer of the source's parameters; without it they are compared with copies."""
        self._source, self._parallel, self._bucket_mib = source, source.parallel, bucket_mib
        self._written = Written() if written is None else written
        self._sender: Sender | None = None

    def connect(self, connection: Connection) -> str:
        """Why a group could not be formed, empty if all were. Collective."""
        failure, number = "", self._source.sender
        self.close()
        asked = number is not None or bool(self._written.gathers)  # by engines, or by other ranks
        self._written.want(connection.deltas != "off" and asked, self._source.own())
        if number is not None:
            shards = [shard for sender, shard in self._source.plan.pairs if sender == number]
            try:
                self._sender = make_sender(connection, number, shards)
            except RuntimeError as error:
                failure = _logged("a weight group was not formed", error)
        return self._shared(failure, torch.zeros(0, dtype=torch.int64))[0]

    def close(self) -> None:
        """Leave the groups of the last `connect`."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def send(self, version: int) -> SendReport:
        """Send all parts; the report is the same on all ranks but for the seconds. Collective."""
        begin = time.perf_counter()
        failure, plan = "", self._source.plan
        order = buckets(plan, self._bucket_mib)
        self._source.begin()
        self._written.gather()
        of_buckets = torch.zeros((2, len(order)), dtype=torch.int64)  # digest and bytes of each
        of_shards = torch.zeros(len(plan.needs), dtype=torch.int64)
        if self._source.sender is not None:
            assert self._sender is not None, "connect first"
            own = [number for number, bucket in enumerate(order) if bucket.sender == self._source.sender]
            try:
                sent = self._sender.send(plan, self._source.read, version, self._written)
                of_buckets[:, own] = _signed([sent, self._sender.sizes])
                of_shards[list(self._sender.values)] = _signed(list(self._sender.values.values()))
            except RuntimeError as error:
                failure = _logged(f"weights of version {version} were not sent", error)
        self._written.forget()
        failure, shared = self._shared(failure, torch.cat((of_buckets.flatten(), of_shards)))
        if failure:
            return SendReport(failure=failure)
        numbers = shared.view(torch.uint64).tolist()
        sizes = numbers[len(order) : 2 * len(order)]
        by_sender, by_shard = Counter[int](), Counter[int]()
        for size, bucket in zip(sizes, order):
            by_sender[bucket.sender] += size
            by_shard[bucket.shard] += size
        return SendReport(
            seconds=time.perf_counter() - begin,
            bytes=sum(sizes),
            whole_bytes=sum(bucket.nbytes for bucket in order),
            most_sent=max(by_sender.values()),
            most_received=max(by_shard.values()),
            digests=tuple(
                combine(value for value, bucket in zip(numbers, order) if bucket.shard == shard)
                for shard in range(len(plan.needs))
            ),
            values=tuple(f"{value:016x}" for value in numbers[2 * len(order) :]),
        )

    def _shared(self, failure: str, numbers: torch.Tensor) -> tuple[str, torch.Tensor]:
        """(this rank's failure, else which rank failed, else "", the sum of all ranks' `numbers`)."""
        failed = torch.zeros(self._parallel.world_size, dtype=torch.int64)
        failed[self._parallel.rank] = bool(failure)
        table = torch.cat((failed, numbers)).to(self._parallel.device)
        dist.all_reduce(table)
        ranks = table[: len(failed)].nonzero().flatten().tolist()
        if ranks and not failure:
            failure = f"the weight group of trainer rank {ranks[0]} failed, see its log"
        return failure, table[len(failed) :].cpu()


def _signed(numbers: list[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint64).view(torch.int64)


def _logged(what: str, error: RuntimeError) -> str:
    line = str(error) or type(error).__name__
    logger.warning("%s: %s", what, line)
    return line
