"""What one rank of the tests of the trainer's head does: gradients in Megatron's own DDP, and trainer steps."""

import os

import random_policies
import trainer_ranks
from parity_ranks import backward, built
from policy_rows import arguments


def gradients(jobs):
    """For each (name, policy path, layout, main_grad, loss in chunk): every main_grad after two micro-batches."""
    from megatron_scalerl.distributed.parallel import unwrap
    from megatron_scalerl.logits import arguments

    found, has_main_grad = {}, arguments._has_main_grad
    for name, path, layout, main_grad, in_chunk in jobs:
        arguments._has_main_grad = has_main_grad if main_grad else lambda weight: False
        with built(path, layout) as (chunks, parallel, _):
            _backward(chunks, parallel, in_chunk)
            named = dict(unwrap(chunks[0]).named_parameters())
            grads = {key: p.main_grad.clone() for key, p in named.items()}
            straight = sorted(key for key, p in named.items() if p.grad_added_to_main_grad)
            left = [key for key, p in named.items() if p.grad is not None]
            found[name] = dict(grads=grads, straight=straight, left=left)
    return found


def _backward(chunks, parallel, in_chunk):
    """Both fixed rows (one per data-parallel rank) through Megatron's schedule, with a plain weighted sum as loss."""
    mine = random_policies.rows()[parallel.dp_rank :: parallel.dp_size]

    def forward(iterator, model):
        row = next(iterator)

        def of_chunk(logprobs, entropies, places):
            return -(logprobs * row["weights"][places]).sum()

        output = model(**arguments(model, row), loss=of_chunk if in_chunk else None)

        def loss(output):
            value = output[0] if in_chunk else of_chunk(output[0], None, slice(None))
            return value * (len(mine) * parallel.dp_size), {}

        return output, loss

    backward(chunks, forward, mine)


def steps(jobs):
    """For each (name, policy path, layout, further trainer keys): reports of three steps and more."""
    from gathered_weights import gathered

    from megatron_scalerl.weights.source import MegatronWeightSource

    found = {}
    for name, path, layout, keys in jobs:
        trainer_keys = {"world_size": int(os.environ["WORLD_SIZE"]), "micro_batch_tokens": 128, **keys}
        trainer = trainer_ranks.trainer_of(trainer_ranks.recipe(path, layout, trainer=trainer_keys))
        reports = [trainer_ranks._step(trainer, step) for step in (1, 2, 3)]
        source = MegatronWeightSource(trainer.chunks, trainer.parallel)
        found[name] = dict(
            reports=[(r.loss, r.grad_norm, dict(r.metrics)) for r in reports],
            logprobs=trainer.logprobs(trainer_ranks.PROBE),
            weights=gathered(source),
        )
        trainer_ranks.release()
    return found
