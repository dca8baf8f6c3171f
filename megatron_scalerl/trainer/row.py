"""The trainer's form of a micro-batch: tensors and a plan, prepared on the host for one copy to the device."""

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from megatron_scalerl.batching.packing import sequence_ids
from megatron_scalerl.losses import LossInputs
from megatron_scalerl.record import record
from megatron_scalerl.trainer.layers.packing import Plan
from megatron_scalerl.types import MicroBatch

_COLUMNS = tuple(field.name for field in fields(MicroBatch) if field.name not in ("position_ids", "cu_seqlens"))
_LOSS_COLUMNS = ("rollout_logprobs", "advantages", "loss_mask", "token_weights", "sequence_ids", "staleness")


@record
class Row:
    """A micro-batch of N tokens: the columns of `types.MicroBatch` as tensors [N, ...], the plan, and `places`."""

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor
    staleness: Tensor
    sequence_ids: Tensor
    expert_choices: Tensor | None = None
    columns: Tensor | None = None
    plan: Plan
    places: Tensor
    """[K] int64 positions where loss_mask is True, ascending."""

    def loss_inputs(
        self, trainer_logprobs: Tensor, places: Tensor | None = None, *, names: Sequence[str] = ()
    ) -> LossInputs:
        """The inputs of the loss at all N positions, or at the positions `places` [C].

        trainer_logprobs: [N], or [C] with `places`. names: names of the algorithm's own columns. A filler micro-batch
        has no such columns, and gets zeros.
        """
        columns = {name: getattr(self, name) for name in _LOSS_COLUMNS}
        algorithm_columns = self.columns
        if algorithm_columns is None:
            algorithm_columns = self.advantages.new_zeros(len(self.tokens), len(names))
        if places is not None:
            columns = {name: values[places] for name, values in columns.items()}
            algorithm_columns = algorithm_columns[places]
        return LossInputs(
            trainer_logprobs=trainer_logprobs, columns=dict(zip(names, algorithm_columns.unbind(1))), **columns
        )


def host_row(m: MicroBatch, plan_of: Callable[[list[int], Tensor, Tensor], Plan]) -> Row:
    """The row of a micro-batch in host memory; the tensors share the memory of the arrays.

    `plan_of` returns the plan for sequence starts, positions [N] and loss mask [N].
    """
    plan = plan_of(m.cu_seqlens.tolist(), torch.from_numpy(m.position_ids), torch.from_numpy(m.loss_mask))
    columns = {}
    for name in _COLUMNS:
        array = getattr(m, name)
        if array is not None:
            columns[name] = torch.from_numpy(array)
    places = plan.places
    # Under context parallelism plan.places are positions in this rank's share. Metrics need positions in the row.
    if places is None or plan.share.places is not None:
        places = columns["loss_mask"].nonzero()[:, 0]
    return Row(**columns, sequence_ids=torch.from_numpy(sequence_ids(m)), plan=plan, places=places)
