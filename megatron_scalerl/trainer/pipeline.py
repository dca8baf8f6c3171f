"""Lets pipeline stages exchange activations without exchanging the shapes first.

With variable_seq_lengths Megatron-Core sends the shape before every exchange: the host waits for the whole device
twice and reads the answer back (pipeline_parallel/p2p_communication.py:263, 267, 271). But all stages of a pipeline
receive the same micro-batches, in the fixed order of the schedule without interleaving, so stages know the shapes.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_scalerl.distributed.parallel import Parallel
from megatron_scalerl.trainer.layers.context import share_length
from megatron_scalerl.trainer.model import row_divisor
from megatron_scalerl.types import MicroBatch

Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):
    """Megatron's communicator between neighboring pipeline stages, with all shapes known beforehand.

    An object serves one run of the schedule without interleaving. Activations arrive from the previous stage,
    gradients from the next stage, both in the order of the micro-batches.
    """

    def __init__(self, pp_group: Any, config: Any, shapes: Sequence[Shape]):
        super().__init__(pp_group=pp_group, config=config)
        self._forward = iter(shapes)
        self._backward = iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        forward = backward = (0, 0, 0)
        # Gradients have the shapes of the activations.
        if recv_prev:
            forward = next(self._forward)
        if recv_next:
            backward = next(self._backward)
        return forward, backward


def known_shapes(micro_batches: Sequence[MicroBatch], config: Any, parallel: Parallel) -> dict[str, Any]:
    """Keywords that pass `KnownShapes` to Megatron's schedule; {} if stages are interleaved or exchange no shapes."""
    if parallel.pp_size == 1 or not config.variable_seq_lengths or config.virtual_pipeline_model_parallel_size:
        return {}
    divisor = row_divisor(config)
    shapes = []
    for m in micro_batches:
        length = share_length(m.cu_seqlens.tolist(), size=parallel.cp_size, divisor=divisor)
        shapes.append((length // divisor, 1, config.hidden_size))
    return {
        "p2p_communicator": KnownShapes(parallel.groups.pp, config, shapes),
        "pg_collection": parallel.groups,
    }
