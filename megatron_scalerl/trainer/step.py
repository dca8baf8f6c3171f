"""An optimizer step on a packed batch, through Megatron's own schedules with this package's loss.

The life of a step:

1. All ranks compare batches; gradients are zeroed and the learning rate is set.
2. Megatron's schedule calls `forward` for each micro-batch, whose row is prepared on the host and copied while the
   device computes, and then the loss function. Gradients are reduced with the last micro-batch.
3. The optimizer steps, and the changed weights are counted; the metrics of all ranks are read back once.

The loss is a plain sum over the tokens of all micro-batches and ranks; the loss is averaged by the token weights
alone. Megatron would divide twice: the schedule divides the loss in place by the number of micro-batches, and the
gradient buffers divide by the data-parallel size. Here the loss is multiplied by both numbers first, which leaves the
gradients of the plain sum. With context parallelism the schedule multiplies by the context-parallel size and the
buffers divide by that size: the result is the sum of the gradients that the ranks compute from disjoint tokens.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_scalerl.algorithms import algorithm_of
from megatron_scalerl.batching.packing import filler_micro_batch, pad_to, real_tokens, scoring_micro_batches
from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.parallel import Parallel, unwrap
from megatron_scalerl.losses import LossInputs, LossOutput
from megatron_scalerl.losses.inputs import weighted_sum
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.sections import KLSection, OptimizerSection
from megatron_scalerl.trainer.agreement import agree, check_tokens
from megatron_scalerl.trainer.model import build_policy
from megatron_scalerl.trainer.optimizer import build_optimizer
from megatron_scalerl.trainer.pipeline import known_shapes
from megatron_scalerl.trainer.row import Row, host_row
from megatron_scalerl.trainer.staging import staged
from megatron_scalerl.trainer.step_metrics import StepMetrics
from megatron_scalerl.trainer.weight_changes import WeightChanges
from megatron_scalerl.types import Batch, MicroBatch, StepReport

Loss = Callable[[LossInputs], LossOutput]
Schedule = Callable[[int], float]
_MegatronLoss = tuple[Tensor, dict[str, Tensor]]
"""What a loss function returns to Megatron's schedules: the loss, and values to log."""


def constant_with_warmup(section: OptimizerSection) -> Schedule:
    """Learning rate of a step (from 1): linear to `lr` over `warmup_steps`, then constant.

    Source: Khatri et al. 2025, arXiv 2510.13786, section 2.
    """

    def rate(step: int) -> float:
        return section.lr * min(1.0, step / max(section.warmup_steps, 1))

    return rate


class Trainer:
    """The policy, the optimizer and the loss on one rank. All ranks must call each method together.

    `chunks` are the DDP-wrapped model chunks of this rank (one chunk, except in interleaved pipelines). `temperature`
    divides the logits, as in the engine's sampling. `loss_in_chunk`: the loss is a sum over tokens and is computed
    inside the projection, with the divergence of `kl`; see `logits.api.token_loss`. `loss_metrics` and `columns` are
    the `metrics` and `columns` of an algorithm such as `ScaleRL`.
    """

    def __init__(
        self,
        *,
        chunks: list[Any],
        optimizer: Any,
        parallel: Parallel,
        loss: Loss,
        loss_metrics: Mapping[str, str] | None = None,
        columns: Sequence[str] = (),
        learning_rate: Schedule,
        weight_decay: float,
        micro_batch_tokens: int,
        pad_multiple: int,
        temperature: float = 1.0,
        loss_in_chunk: bool = False,
        kl: KLSection | None = None,
    ):
        self.chunks = chunks
        self.optimizer = optimizer
        self.changes = WeightChanges(optimizer, parallel.device)
        self.parallel = parallel
        self.pad_multiple = pad_multiple
        self.steps_made = 0
        self._loss = loss
        self._loss_metrics = loss_metrics
        self.columns = columns
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self.micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._loss_in_chunk = loss_in_chunk
        self._kl = kl
        if kl is not None:
            self._loss_metrics = {**(loss_metrics or {}), "kl": "mean"}
        self._config = get_model_config(chunks[0])
        self._config.finalize_model_grads_func = _finalize
        # The loss is multiplied by this number. The gradient buffers average over data-parallel ranks
        # (distributed_data_parallel.py:212). With calculate_per_token_loss the buffers only sum, but the schedule
        # multiplies by the context-parallel size.
        self._averaged_ranks: float = parallel.dp_size
        if self._config.calculate_per_token_loss:
            self._averaged_ranks = 1 / parallel.cp_size
        self._counts_tokens = parallel.is_last_stage and parallel.tp_rank == 0 and parallel.cp_rank == 0

    def step(self, batch: Batch) -> StepReport:
        """Forward, backward and one optimizer step on this rank's batch.

        Raises ValueError for tokens outside the vocabulary. Raises RuntimeError if ranks that must hold equal batches
        hold different batches, and if loss or gradient norm is not finite. A loss or norm that is not finite leaves
        the weights invalid.
        """
        begin = time.monotonic()
        self._check(batch.micro_batches, step=batch.step)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        rate = self._learning_rate(batch.step)
        for group in self.optimizer.param_groups:
            # Megatron's scheduler, which is not used here, would apply both multipliers; wd_mult is 0 for vectors.
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        running = StepMetrics(self.parallel.device, self._loss_metrics)
        rows = self._filled(batch.micro_batches)
        with device.labelled("forward and backward"):
            self._schedule(rows, partial(self._train_loss, running, len(rows)), train=True)
        self.changes.begin()
        with device.labelled("optimizer"):
            succeeded, grad_norm, _ = self.optimizer.step()
            # Kernels are only queued, so the device has to finish before the clock is read.
            device.synchronize()
        metrics = running.reduced(
            counts=self._counts_tokens,
            tokens=real_tokens(batch),
            seconds=time.monotonic() - begin,
            changes=self.changes.counts(),
        )
        loss = metrics.pop("loss")
        grad_norm = float(grad_norm)
        if not (succeeded and math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RuntimeError(
                f"step {batch.step}: the loss is {loss} and the gradient norm {grad_norm}; both have to be finite"
            )
        self.steps_made = batch.step
        return StepReport(
            step=batch.step,
            policy_version=batch.step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            tokens=int(metrics.pop("tokens")),
            seconds=metrics.pop("seconds"),
            metrics=metrics,
        )

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each token list, the log-probabilities (nats) of the tokens from the second on; forward only."""
        return self.token_scores(token_ids)[0]

    def token_scores(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Two lists: log-probabilities and entropies (nats) of each token list, from the second token on.

        Every data-parallel rank computes all token lists, and every rank returns the result.
        """
        rows = scoring_micro_batches(
            token_ids, micro_batch_tokens=self.micro_batch_tokens, pad_multiple=self.pad_multiple
        )
        scores = []

        def collect(row: Row, output: Tensor) -> _MegatronLoss:
            scores.append(torch.stack((output[0], output[1])).index_select(1, row.places).detach())
            return output.new_zeros(()), {}

        self._check(rows, step=self.steps_made)
        with torch.no_grad():
            self._schedule(self._filled(rows), collect, train=False)
        sizes = [len(ids) - 1 for ids in token_ids]
        # Only the last pipeline stage calls `collect`, and then shares the results with the other ranks.
        values = torch.zeros(2, sum(sizes), device=self.parallel.device)
        if scores:
            values = torch.cat(scores, 1)
        if self.parallel.pp_size > 1:
            last = dist.get_global_rank(self.parallel.groups.pp, self.parallel.pp_size - 1)
            dist.broadcast(values, last, group=self.parallel.groups.pp)
        return [[part.tolist() for part in numbers.split(sizes)] for numbers in values.cpu()]

    def _train_loss(
        self, metrics: StepMetrics, count: int, row: Row, output: Tensor | tuple[Tensor, Tensor]
    ) -> _MegatronLoss:
        """The loss of one of `count` micro-batches, multiplied by the numbers by which Megatron will divide."""
        loss = None
        if isinstance(output, tuple):
            loss, output = output
        inputs = row.loss_inputs(output[0], names=self.columns)
        result = self._loss(inputs)
        if self._kl is not None:
            divergences = output[2].detach()
            value = result.loss + self._kl.coefficient * weighted_sum(divergences, inputs)
            result = replace(result, loss=value, metrics={**result.metrics, "kl": divergences})
        metrics.add(inputs, result, output[1].detach(), row.staleness, row.places)
        # A loss with a divergence is always computed in chunks, so `loss` is not None there.
        if loss is None:
            loss = result.loss
        # The product is a new tensor: the schedule divides the result in place (pipeline_parallel/schedules.py:340).
        return loss * (count * self._averaged_ranks), {}

    def _chunk_loss(self, row: Row, logprobs: Tensor, entropies: Tensor, places: Tensor) -> Tensor:
        """The summed loss of the C tokens at `places` of a row: the `loss` function of `logits.api.token_loss`."""
        return self._loss(row.loss_inputs(logprobs, places, names=self.columns)).loss

    def _filled(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches; an interleaved schedule also gets fillers, up to a multiple of the pipeline stages."""
        if len(self.chunks) == 1:
            return [*micro_batches]
        number = -len(micro_batches) % self.parallel.pp_size
        return [*micro_batches, *[filler_micro_batch(self.pad_multiple)] * number]

    def _schedule(
        self, micro_batches: Sequence[MicroBatch], loss: Callable[[Row, Tensor], Any], *, train: bool
    ) -> None:
        """Run the micro-batches through Megatron's schedule for this pipeline."""
        size = max(len(m.tokens) for m in micro_batches)
        if self.parallel.pp_size > 1 and not self._config.variable_seq_lengths:
            # Stages exchange activations of one fixed shape, so all rows are padded to the longest row.
            micro_batches = [pad_to(m, size) for m in micro_batches]

        def forward(rows: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            # The host prepares the row while the device computes the previous micro-batch.
            row = staged(host_row(next(rows), unwrap(model).plan), self.parallel.device)
            chunk_loss = None
            kl: dict[str, Any] = {}
            if train and self._loss_in_chunk:
                chunk_loss = partial(self._chunk_loss, row)
            if train and self._kl is not None:
                weights = row.token_weights * self._kl.coefficient
                kl = {"kl_weights": weights, "kl_direction": self._kl.direction}
            output = model(
                row.tokens,
                row.targets,
                plan=row.plan,
                temperature=self._temperature,
                expert_choices=row.expert_choices,
                loss=chunk_loss,
                **kl,
            )
            return output, partial(loss, row)

        for chunk in self.chunks:
            chunk.train(train)
        # An interleaved schedule takes an iterator for each chunk, any other schedule one iterator.
        iterators: Any = [iter(micro_batches) for _ in self.chunks]
        if len(self.chunks) == 1:
            iterators = iterators[0]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators,
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=size,
            micro_batch_size=1,
            forward_only=not train,
            **known_shapes(micro_batches, self._config, self.parallel),
        )

    def _check(self, micro_batches: Sequence[MicroBatch], *, step: int) -> None:
        """Check tokens and ranks' agreement before the device gets work: a later error would leave ranks waiting."""
        check_tokens(micro_batches, unwrap(self.chunks[0]).family.vocab_size)
        agree(micro_batches, self.parallel, step=step)


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **keywords: Any) -> None:
    """Megatron's reduction of gradients without the division by a token count."""
    finalize_model_grads(model, None, **keywords)


def make_trainer(
    recipe: Recipe,
    parallel: Parallel,
    *,
    loss: Loss | None = None,
    learning_rate: Schedule | None = None,
    load_weights: bool = True,
) -> Trainer:
    """The trainer of a recipe, with the weights of the recipe's policy. Raises the ValueErrors of `build_policy`.

    `loss` and `learning_rate` replace the recipe's, for the warm start. Without `load_weights` the weights are
    Megatron's random initial weights, and only config.json is read from the policy's folder.
    """
    chunks = build_policy(recipe.policy.path, recipe, parallel, load_weights=load_weights)
    algorithm = algorithm_of(recipe)
    return Trainer(
        chunks=chunks,
        optimizer=build_optimizer(chunks, recipe),
        parallel=parallel,
        loss=loss or algorithm.loss,
        loss_metrics=algorithm.metrics if loss is None else None,
        columns=algorithm.columns if loss is None else (),
        learning_rate=learning_rate or constant_with_warmup(recipe.optimizer),
        weight_decay=recipe.optimizer.weight_decay,
        micro_batch_tokens=recipe.micro_batch_tokens,
        pad_multiple=pad_multiple(parallel),
        temperature=recipe.rollouts.temperature,
        loss_in_chunk=recipe.trainer.loss_in_chunk and loss is None and algorithm.separable,
        kl=recipe.algorithm.kl if loss is None else None,
    )


def pad_multiple(parallel: Parallel) -> int:
    """Micro-batches have a multiple of this many tokens: the tensor-parallel size, for sequence parallelism."""
    return parallel.tp_size
