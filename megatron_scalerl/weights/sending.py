"""The trainer's side of a weight update: every sending rank sends a share of the parts to all engines.

Life of the sending side, on every rank at once:

    connect    the groups of the last connection are left, and each sending rank forms groups with its shards' workers
    send       each sending rank sends buckets; then all ranks sum a table of digests and bytes
    close      the groups are left

An engine that is gone does not end the trainer. The ranks tell each other which groups failed, and all ranks return
the failure.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_scalerl.weights.change_record import ChangeRecord
from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.plan import Connection, SendReport, buckets
from megatron_scalerl.weights.source import MegatronWeightSource
from megatron_scalerl.weights.transport import make_sender
from megatron_scalerl.weights.transport.sender import Sender

logger = logging.getLogger(__name__)


class WeightSending:
    """Connects this rank to the engines, and sends this rank's parts of every weight update of a run."""

    def __init__(self, source: MegatronWeightSource, *, bucket_mib: int, change_record: ChangeRecord | None = None):
        """change_record: the optimizer's record of changes. Without a record, parameters are compared with copies."""
        self._source = source
        self._parallel = source.parallel
        self._bucket_mib = bucket_mib
        self._change_record = change_record or ChangeRecord()
        self._sender: Sender | None = None

    def connect(self, connection: Connection) -> str:
        """Form the groups, and return why a group could not be formed; "" if all groups were formed. Collective."""
        failure = ""
        number = self._source.sender
        self.close()
        # A rank that sends nothing still records changes, for the sending ranks.
        has_readers = number is not None or bool(self._change_record.gathers)
        self._change_record.want(connection.deltas != "off" and has_readers, self._source.parts())
        if number is not None:
            shards = [shard for sender, shard in self._source.plan.pairs if sender == number]
            try:
                self._sender = make_sender(connection, number, shards)
            except RuntimeError as error:
                failure = _logged("a broadcast group for weights was not formed", error)
        return self._shared(failure, torch.zeros(0, dtype=torch.int64))[0]

    def close(self) -> None:
        """Leave the groups of the last `connect`."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def send(self, version: int) -> SendReport:
        """Send all parts and report the update. Only the report's seconds differ between the ranks. Collective."""
        begin = time.perf_counter()
        failure = ""
        plan = self._source.plan
        order = buckets(plan, self._bucket_mib)
        self._source.begin()
        self._change_record.gather()
        # Each rank fills in the entries of the rank's own buckets and leaves 0 elsewhere: the sum over ranks is the
        # whole table.
        bucket_digests = torch.zeros(len(order), dtype=torch.int64)
        bucket_bytes = torch.zeros_like(bucket_digests)
        shard_digests = torch.zeros(len(plan.needs), dtype=torch.int64)
        if self._source.sender is not None:
            assert self._sender is not None, "connect first"
            numbers = [number for number, bucket in enumerate(order) if bucket.sender == self._source.sender]
            try:
                bucket_digests[numbers] = _signed(
                    self._sender.send(plan, self._source.as_sent, version, self._change_record)
                )
                bucket_bytes[numbers] = _signed(self._sender.sizes)
                shard_digests[list(self._sender.values)] = _signed(self._sender.values.values())
            except RuntimeError as error:
                failure = _logged(f"weights of version {version} were not sent", error)
        # A rank whose group failed goes on to here, because every rank waits for all ranks' entries of the table.
        self._change_record.forget()
        failure, table = self._shared(failure, torch.cat((bucket_digests, bucket_bytes, shard_digests)))
        if failure:
            return SendReport(failure=failure)
        sums = table.view(torch.uint64).tolist()
        sizes = sums[len(order) : 2 * len(order)]
        by_sender = Counter[int]()
        by_shard = Counter[int]()
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
                combine(value for value, bucket in zip(sums, order) if bucket.shard == shard)
                for shard in range(len(plan.needs))
            ),
            values=tuple(f"{value:016x}" for value in sums[2 * len(order) :]),
        )

    def _shared(self, failure: str, numbers: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Share failures, and sum `numbers` over all ranks: returns (failure, sums).

        The failure is this rank's or, where only another rank failed, names that rank; "" means that no rank failed.
        """
        failed_ranks = torch.zeros(self._parallel.world_size, dtype=torch.int64)
        failed_ranks[self._parallel.rank] = bool(failure)
        table = torch.cat((failed_ranks, numbers)).to(self._parallel.device)
        dist.all_reduce(table)
        ranks = table[: len(failed_ranks)].nonzero().flatten().tolist()
        if ranks and not failure:
            failure = f"a weight group of trainer rank {ranks[0]} failed; the log of this rank says why"
        return failure, table[len(failed_ranks) :].cpu()


def _signed(numbers: Iterable[int]) -> torch.Tensor:
    """Unsigned numbers as [n] int64 with the same bits, because collectives do not take uint64."""
    return torch.tensor(list(numbers), dtype=torch.uint64).view(torch.int64)


def _logged(event: str, error: RuntimeError) -> str:
    line = str(error) or type(error).__name__
    logger.warning("%s: %s", event, line)
    return line
