"""What one of four ranks does in the audit: upstream's faults in small, and steps without its faulty code."""

from types import SimpleNamespace
from unittest.mock import patch

import torch
import trainer_ranks
from parity_ranks import built


def audit(path, jobs):
    """What `upstream` finds, the steps of the jobs, and whether each trainer's groups are Megatron's global ones."""
    found, groups = steps(jobs)
    return dict(upstream=upstream(path), steps=found, groups=groups)


def upstream(path):
    """Number of a fault -> (what Megatron-Core computes over two ranks, what one rank computes)."""
    layout = dict(tensor_model_parallel_size=2, context_parallel_size=2, model=dict(sequence_parallel=True))
    with built(path, layout) as (chunks, parallel, _):
        groups = parallel.groups
        return {
            1: _cross_entropy(groups, whole=False, label_smoothing=0.1),
            2: _cross_entropy(groups, whole=True),
            8: _attention_sink(chunks, groups),
            9: _mean_loss(groups.cp),
            10: _masked_tokens(groups),
        }


def _cross_entropy(groups, *, whole, **options):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = torch.arange(8.0)[None]
    part = logits if whole else logits.chunk(2, dim=1)[groups.tp.rank()]
    found = ((part, groups.tp), (logits, groups.pp))  # pp is a group of one rank
    return tuple(
        vocab_parallel_cross_entropy(values.clone(), torch.tensor([3]), tp_group=group, **options).item()
        for values, group in found
    )


def _attention_sink(chunks, groups):
    """Heads of the learnable sink that are in the norm of gradients, and heads."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    config = chunks[0].config
    with patch.multiple(config, softmax_type="learnable", context_parallel_size=1):
        sink = DotProductAttention(config, 1, None, "self", pg_collection=groups).softmax_offset
    counted = torch.tensor(float(sink.numel() * param_is_not_tensor_parallel_duplicate(sink, groups.tp)))
    torch.distributed.all_reduce(counted, group=groups.tp)
    return counted.item(), config.num_attention_heads


def _mean_loss(group):
    """The mean of a loss of one token here and three there, as the gradient buffers average it, and over all."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    losses = [torch.ones(1), torch.full((3,), 5.0)]
    mine = losses[group.rank()]
    config = SimpleNamespace(timers=None, calculate_per_token_loss=False)
    callback = lambda output: (output.sum(), torch.tensor(output.numel()), {})  # noqa: E731
    mean, _ = forward_step_calc_loss(None, mine, callback, config, None, False, 1, [], 2, True)
    torch.distributed.all_reduce(mean, group=group)
    return mean.item() / 2, torch.cat(losses).mean().item()


def _masked_tokens(groups):
    """Tokens of one rank, of which it has three, as an auxiliary loss counts them under a mask."""
    from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

    _, local, _ = get_tokens_per_expert_and_token_count(torch.ones(3, 1), groups.tp, 1, with_padding_mask=True)
    return float(local), 3.0


def steps(jobs):
    """`trainer_ranks.many` without upstream's faulty functions; and whether each job's groups are the global ones."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.moe import router

    from megatron_scalerl.distributed.parallel import unwrap

    groups = []
    trainer_of = trainer_ranks.trainer_of

    def watched(settings):
        trainer = trainer_of(settings)
        own = trainer.parallel.groups
        attention = unwrap(trainer.chunks[0]).decoder.layers[0].self_attention
        groups.append(
            own.tp is parallel_state.get_tensor_model_parallel_group()
            and own.cp is parallel_state.get_context_parallel_group() is attention.pg_collection.cp
        )
        return trainer

    gone = dict(_preprocess=None, _postprocess=None, compute_language_model_loss=None)
    with (
        patch.multiple(GPTModel, **gone),
        patch.object(router, "get_tokens_per_expert_and_token_count", None),
        patch.object(trainer_ranks, "trainer_of", watched),
    ):
        return trainer_ranks.many(jobs), groups
