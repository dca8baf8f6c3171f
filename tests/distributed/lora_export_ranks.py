"""What one rank of the tests of exported adapters does: save random ones, compute with them, send them."""

import random_policies
import torch
from gathered_weights import gathered
from lora_ranks import settings_of
from policy_rows import full_logits
from trainer_ranks import trainer_of


def save(path, layout, folder):
    """Write a checkpoint of random adapters to `folder`; their values by name, and the logits of the
    first row, None in a pipeline."""
    from megatron_scalerl.distributed.parallel import unwrap
    from megatron_scalerl.trainer import checkpoint
    from megatron_scalerl.trainer.model import sharded_models
    from megatron_scalerl.weights.source import fill

    trainer = trainer_of(settings_of(path, layout))
    generator = torch.Generator().manual_seed(11)
    family = unwrap(trainer.chunks[0]).adapters
    shapes = {name: shape for rule in family.rules for name, shape in rule.hf_shapes.items()}
    drawn = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    fill(trainer.chunks, family, lambda name, index, shape: drawn[name][index], trainer.parallel)
    chunks = [chunk.module for chunk in trainer.chunks]
    state = sharded_models(chunks, adapters=True)
    checkpoint.CheckpointWriting(folder, state, trainer.parallel, {}, None, set()).finish(wait=True)
    return drawn, _logits(trainer)


def start(path, layout):
    """Of policy.adapter: (logits of the first row or None, what engines get as adapters alone, and merged)."""
    from megatron_scalerl.distributed.parallel import unwrap
    from megatron_scalerl.weights.source import MegatronWeightSource

    trainer = trainer_of(settings_of(path, layout))
    sent = []
    for family in (unwrap(trainer.chunks[0]).adapters, None):
        source = MegatronWeightSource(trainer.chunks, trainer.parallel, family=family)
        source.read = source.as_sent
        sent.append(gathered(source))
    return _logits(trainer), *sent


def _logits(trainer):
    [model] = trainer.chunks
    if trainer.parallel.pp_size > 1:
        return None
    model.eval()
    return full_logits(model, random_policies.rows(random_policies.ROWS)[0])
