"""What one rank of the tests of batches does: the batch from the wire beside the one that is packed here."""

import random
from dataclasses import fields, replace

from batch_messages import frames_of
from random_policy import batches_of, plan_of, random_samples
from trainer_ranks import recipe, release

from megatron_scalerl.types import ExpertChoices


def many(jobs):
    """For each (name, policy, layout): two steps on shared batches and on local ones, from the same weights."""
    import torch

    from megatron_scalerl.distributed.parallel import unwrap
    from megatron_scalerl.trainer.batch_frames import BatchFrames
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer

    found = {}
    for name, policy, layout in jobs:
        settings = recipe(policy, layout)
        parallel = init_parallel(settings)
        ours, theirs = make_trainer(settings, parallel), make_trainer(settings, parallel)
        batches = BatchFrames(parallel, pad_multiple=ours.pad_multiple)
        config = unwrap(ours.chunks[0]).config
        experts = (config.num_layers, config.moe_router_topk) if config.num_moe_experts else None
        reports, equal = [], []
        for step in (1, 2):
            samples, sizes = random_samples(step, 7), {"dp_size": parallel.dp_size, "micro_batch_tokens": 64}
            samples = _with_experts(samples, experts)
            if parallel.holds_batch:
                batches.hold(frames_of(plan_of(samples, step=step, **sizes), samples, parallel.dp_rank))
            batch = batches.take(step)
            local = batches_of(samples, step=step, **sizes, pad_multiple=ours.pad_multiple)[parallel.dp_rank]
            equal.append(_same(batch, local))
            reports.append([_report(ours.step(batch)), _report(theirs.step(local))])
        weights = [[p.detach() for p in unwrap(t.chunks[0]).parameters()] for t in (ours, theirs)]
        found[name] = {
            "holds": parallel.holds_batch,
            "dp_rank": parallel.dp_rank,
            "experts": experts,
            "equal": all(equal),
            "reports": reports,
            "weights": all(torch.equal(a, b) for a, b in zip(*weights, strict=True)),
        }
        release()
    return found


def _with_experts(samples, shape):
    """The samples; for a policy with experts all but the first have the engine's choices among four."""
    if shape is None:
        return samples
    found, rng = [samples[0]], random.Random(len(samples[0].rollout.token_ids))
    for sample in samples[1:]:
        tokens = len(sample.prompt_token_ids) + len(sample.rollout.token_ids) - 1
        data = bytes(rng.randrange(4) for _ in range(tokens * shape[0] * shape[1]))
        choices = ExpertChoices(layers=shape[0], topk=shape[1], width=1, data=data)
        found.append(replace(sample, rollout=replace(sample.rollout, expert_choices=choices)))
    return found


def _same(batch, local):
    """Every bit of every column."""
    pairs = list(zip(batch.micro_batches, local.micro_batches, strict=True))
    return batch.step == local.step and all(
        getattr(a, f.name) is getattr(b, f.name)  # None
        or getattr(a, f.name).tobytes() == getattr(b, f.name).tobytes()
        for a, b in pairs
        for f in fields(a)
    )


def _report(report):
    return report.loss, report.grad_norm, report.tokens, dict(report.metrics)
