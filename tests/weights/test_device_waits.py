"""What an update of changes asks of a GPU: waits of its host and operations, for each bucket and not for each tensor.

Counted on the CPU.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.device_reads import DeviceReads
from worker_needs import whole_plan

from megatron_scalerl.weights import changes as coding
from megatron_scalerl.weights.change_record import ChangeRecord
from megatron_scalerl.weights.changes import bits_of, decode, encode
from megatron_scalerl.weights.live_changes import write_changes
from megatron_scalerl.weights.live_map import record_copies
from megatron_scalerl.weights.live_weights import live_views
from megatron_scalerl.weights.plan import manifest_of

ROWS, WIDTH = 40, 24


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def experts(count):
    """Gate and up of experts: (the trainer's tensors, the engine's parameter, its parts)."""
    names = [f"experts.{e}.{kind}" for e in range(count) for kind in ("gate", "up")]
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(ROWS, WIDTH, generator=g).bfloat16() for _ in names]
    plan = whole_plan(manifest_of((name, "bfloat16", (ROWS, WIDTH)) for name in names))
    parameters = {"w13": torch.zeros(count, 2 * ROWS, WIDTH).bfloat16()}

    def load(given):
        for name, values in given:
            _, expert, kind = name.split(".")
            parameters["w13"][int(expert)].narrow(0, ROWS * (kind == "up"), ROWS).copy_(values)

    parts = live_views(record_copies(load, plan.parameters, parameters), plan.parameters, parameters)
    load(zip(names, tensors))
    return tensors, parameters, list(parts.values())


def stepped(tensors):
    """What an optimizer records of a step that changes a tenth of the elements; they have the new values."""
    written = ChangeRecord()
    for tensor in tensors:
        written.watch(tensor.view(-1))
    written.want(True, tensors)
    written.forget()
    written.begin_step()
    for number, tensor in enumerate(tensors):
        flat, places = tensor.view(-1), torch.arange(number % 7, tensor.numel(), 10)
        old = flat.clone()
        flat[places] += flat[places] * (4.0 if number % 3 else 0.01)
        places = (old != flat).nonzero().flatten()
        found = coding.ChangedElements(positions=places, bits=bits_of(flat)[places])
        written.add(flat, 0, found)
    return written


def counted(work):
    """(what it returns, waits, operations)"""
    with DeviceReads().counting() as found, Operations() as operations:
        result = work()
    return result, found.total(), operations.count


def test_waits_and_operations_of_a_bucket_do_not_grow_with_its_tensors():
    figures = []
    for count in (2, 40):
        tensors, parameters, parts = experts(count)
        expected_before = parameters["w13"].clone()
        written = stepped(tensors)

        def send(tensors=tensors, written=written):
            return encode(list(enumerate(written.changes_of(tensors))))

        frame, *sending = counted(send)
        pieces = [(n, ((0, ROWS), (0, WIDTH)), torch.bfloat16) for n in range(len(tensors))]

        def write(frame=frame, pieces=pieces, parts=parts):
            return write_changes([(parts[c.tensor], c) for c in decode(frame, pieces)])

        _, *writing = counted(write)
        figures.append((sending, writing))
        expected = torch.stack(tensors).view(count, 2 * ROWS, WIDTH)
        assert not torch.equal(parameters["w13"], expected_before)
        assert torch.equal(parameters["w13"], expected)
    (few_sent, few_written), (many_sent, many_written) = figures
    assert many_sent[0] == few_sent[0] <= 5 and many_written[0] == few_written[0] <= 7
    assert many_written[1] == few_written[1] <= 64
    looked_up = math.prod((80 - 4, 2))  # a tensor's own changes begin and end at places found in its shard
    assert many_sent[1] <= few_sent[1] + looked_up, (few_sent, many_sent)
