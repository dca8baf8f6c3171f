"""What one rank of the adapters' tests does: build, forward and backward, optimizer steps."""

import hashlib
import os

import random_policies
import torch
from gathered_weights import gathered
from lora_reference import SETTINGS, STEPS
from parity_ranks import _forward_backward, built, gradients_of, recipe
from trainer_ranks import _step, release, trainer_of


def settings_of(path, layout, **optimizer):
    """The recipe of a layout with adapters; `lora` and `adapter` in the layout are keys of the policy."""
    layout = dict(layout)
    policy = dict(lora=layout.pop("lora", SETTINGS), adapter=layout.pop("adapter", None))
    plain = recipe(path, int(os.environ["WORLD_SIZE"]), layout)
    settings = plain.model_dump()
    settings["policy"] |= policy
    settings["optimizer"] |= optimizer
    return type(plain).model_validate(settings)


def many(jobs):
    """Runs (name, policy path, adapter path, layout) one after the other in this rank; its answers by name."""
    return {name: measure(path, {"adapter": adapter, **layout}) for name, path, adapter, layout in jobs}


def measure(path, layout):
    """Loss, log-probabilities of this rank's rows, gradients, their norm, and the factors before a step."""
    from megatron_scalerl.distributed.parallel import unwrap
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.weights.source import MegatronWeightSource

    layout = dict(layout)
    rows = random_policies.rows(layout.pop("rows", random_policies.ROWS))
    with built(path, layout, settings_of) as (chunks, parallel, settings):
        adapters = unwrap(chunks[0]).adapters
        optimizer = build_optimizer(chunks, settings)
        source = MegatronWeightSource(chunks, parallel, family=adapters)
        found = {"factors": gathered(source)}
        found["loss"], found["logprobs"] = _forward_backward(chunks, parallel, rows)
        trained = {name: p for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad}
        found["trained"] = [*trained]
        found["gradients"] = gradients_of(source, trained.values())
        _, norm, _ = optimizer.step()
        found["grad_norm"] = float(norm)
        found["replicas"] = _digests(source, chunks, parallel)
    return found


def _digests(source, chunks, parallel):
    """(factor, number of its shard) -> digest of this rank's bytes: ranks with the same key hold the same values."""
    from megatron_scalerl.weights.source import canonical_parameters

    parameters = canonical_parameters(chunks, parallel)
    found = {}
    for rule in source.family.rules:
        parameter = parameters.get(rule.megatron)
        if parameter is not None:
            shard = parallel.etp_rank if rule.expert is not None else parallel.tp_rank
            values = parameter.detach().numpy().tobytes()
            found[rule.megatron, shard if rule.sharded else 0] = hashlib.sha256(values).hexdigest()
    return found


def _built(path, layout, **optimizer):
    """(trainer, source of its adapters); the layout as in `measure`."""
    from megatron_scalerl.distributed.parallel import unwrap
    from megatron_scalerl.weights.source import MegatronWeightSource

    trainer = trainer_of(settings_of(path, layout, **optimizer))
    return trainer, MegatronWeightSource(trainer.chunks, trainer.parallel, family=unwrap(trainer.chunks[0]).adapters)


def steps(jobs):
    """For each (name, policy path, adapter path, layout): factors and digests after three steps on the fixed rows."""
    found = {}
    for name, path, adapter, layout in jobs:
        trainer, source = _built(path, {"adapter": adapter, **layout}, **STEPS)
        for _ in range(3):
            trainer.optimizer.zero_grad()
            _forward_backward(trainer.chunks, trainer.parallel, random_policies.rows())
            trainer.optimizer.step()
        source.begin()
        digests = _digests(source, trainer.chunks, trainer.parallel)
        found[name] = {"factors": gathered(source), "replicas": digests}
        release()
    return found


def merged(jobs):
    """For each (name, policy path, adapter path, layout): the policy's weights with the adapters merged into them."""
    from megatron_scalerl.weights.source import MegatronWeightSource

    found = {}
    for name, path, adapter, layout in jobs:
        trainer, _ = _built(path, {"adapter": adapter, **layout})
        for module in trainer.chunks[0].modules():
            if hasattr(module, "lora"):
                module.weight.data.copy_(module.lora.merged(module.weight.detach()))
        found[name] = gathered(MegatronWeightSource(trainer.chunks, trainer.parallel))
        release()
    return found


def saved(path, layout, checkpoint):
    """Two steps of new adapters, a checkpoint, a step more: the factors at each point, and what is saved."""
    from megatron_scalerl.trainer.checkpoint import save

    trainer, source = _built(path, layout, **STEPS)
    start = gathered(source)
    for step in (1, 2):
        _step(trainer, step)
    save(checkpoint, trainer, {})
    return {"start": start, **_went_on(trainer, source, checkpoint)}


def resumed(path, layout, checkpoint, again):
    """New adapters, then the checkpoint's, written once more to `again`, and the same last step."""
    from megatron_scalerl.trainer.checkpoint import load, save

    trainer, source = _built(path, layout, **STEPS)
    start = gathered(source)
    load(checkpoint, trainer)
    save(again, trainer, {})
    return {"start": start, **_went_on(trainer, source, again)}


def _went_on(trainer, source, checkpoint):
    from megatron.core.dist_checkpointing import load_plain_tensors

    before = gathered(source)
    report = _step(trainer, 3)
    stored = {key: t.clone() for key, t in load_plain_tensors(checkpoint).items() if isinstance(t, torch.Tensor)}
    return {"before": before, "after": gathered(source), "report": (report.loss, report.grad_norm), "stored": stored}


def changed(path, layout):
    """Elements of the bf16 factors that a step changed, all elements, the metric, whether all else is as before, and
    elements of the gradient buffers."""
    trainer, _ = _built(path, {"dtype": "bfloat16", **layout}, lr=1e-4, warmup_steps=0)
    everything = list(trainer.chunks[0].named_parameters())
    before = [(name, p, p.detach().clone()) for name, p in everything]
    metric = _step(trainer, 1).metrics["weights_changed"]
    factors = [(p, old) for name, p, old in before if ".lora." in name]
    frozen = all(torch.equal(p, old) for name, p, old in before if ".lora." not in name)
    held = sum(buffer.grad_data.numel() for buffer in trainer.chunks[0].buffers)
    release()
    counts = [sum(int((p != old).sum()) for p, old in factors), sum(p.numel() for p, _ in factors)]
    return [*counts, metric, frozen, held]
