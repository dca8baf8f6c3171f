"""What tests ask of a PolicyModel beside training: a row's arguments, whole logits, greedy tokens."""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

Row = dict[str, Tensor]
"""As `random_policies.rows` makes them: tokens and position_ids [1, N], cu_seqlens [S+1], targets [N]."""


def arguments(model, row):
    """Keywords of the forward pass of a (wrapped) PolicyModel for a row in host memory."""
    from megatron_scalerl.distributed.parallel import unwrap

    plan = unwrap(model).plan(row["cu_seqlens"].tolist(), row["position_ids"][0], None)
    return {"tokens": row["tokens"][0], "targets": row["targets"], "plan": plan}


@torch.no_grad()
def full_logits(model, row):
    """[N, vocab] fp32 logits of the whole vocabulary on every rank; None before the last stage."""
    from megatron_scalerl.distributed.parallel import unwrap

    policy = unwrap(model)
    given = arguments(policy, row)
    hidden = policy.hidden_states(given["plan"], given["tokens"])
    if not policy.post_process:
        return None
    if policy.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    hidden = given["plan"].share.whole_row(hidden[:, 0])

    def project(weight):
        return (hidden @ weight.t()).float() if policy.logits == "model" else hidden.float() @ weight.float().t()

    mine = policy.output_layer(project)
    parts = [torch.empty_like(mine) for _ in range(policy.parallel.tp_size)]
    torch.distributed.all_gather(parts, mine.contiguous(), group=policy.parallel.groups.tp)
    return torch.cat(parts, dim=1)[:, : policy.family.vocab_size]


def greedy(trainer, token_ids, count):
    """The `count` most likely tokens after `token_ids`, without a cache and on one pipeline stage."""
    [model] = trainer.chunks
    model.eval()
    ids = list(token_ids)
    for _ in range(count):
        size = len(ids)
        row = {
            "tokens": torch.tensor([ids]),
            "position_ids": torch.arange(size)[None],
            "cu_seqlens": torch.tensor([0, size]),
            "targets": torch.zeros(size, dtype=torch.int64),
        }
        logits = full_logits(model, row)
        assert logits is not None
        ids.append(int(logits[-1].argmax()))
    return ids[len(token_ids) :]
