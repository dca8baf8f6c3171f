"""Time of our trainer's step relative to bare Megatron-Core steps on the same samples.

    python tools/bench_step.py [--rounds 15] [--samples 128] [--threads 1] [--size base]

The sides use the same devices, layers, attention, optimizer and micro-batches, and take turns in one process. Ours
packs sequences and trains CISPO (or --loss) with its metrics. The bare sides train GPTModel's cross-entropy: `packed`
on the same packed rows in Megatron's "thd" format, `bare` with every micro-batch padded to its longest sequence.
`kl` is ours with `algorithm.kl` to a frozen copy of the policy. Prints one JSON line: `ratio_packed` and `ratio` are
ours over the bare sides of the median times, `ratio_kl` is `kl` over ours, `cpu_ratio_packed` and `cpu_ratio` are of
CPU time.
"""

import tempfile
from functools import partial
from itertools import pairwise

import harness
from checkout import explained

with explained():
    from megatron_scalerl.losses import LOSSES

SIZES = {
    "base": {},
    "33m": dict(vocab=8192, hidden=512, inner=1408, layers=8, heads=8, groups=4),
}
"""Policies with random weights; `base` is the tiny task's."""
parser = harness.benchmark(
    __doc__,
    rounds=15,
    samples=128,
    loss=["cispo", *sorted(LOSSES.keys() - {"cispo"})],
    prompt_tokens=(int, "of every sample; without it a third of the sample"),
    threads=1,
    micro_batch_tokens=4096,
    dtype=["float32", "bfloat16"],
    size=(list(SIZES), "random weights: the tiny task's policy, or a larger"),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    import torch
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from random_inputs import random_llama, random_samples, recipe_of

    from megatron_scalerl.batching.packing import pack, real_tokens
    from megatron_scalerl.distributed.device import HAVE_TE
    from megatron_scalerl.models import family as family_of
    from megatron_scalerl.models import read_hf_config
    from megatron_scalerl.processes.child_process import end_with
    from megatron_scalerl.tiny.policy import make_llama
    from megatron_scalerl.trainer.layers.attention import SdpaCoreAttention
    from megatron_scalerl.trainer.layers.packing import packed_row
    from megatron_scalerl.trainer.layers.spec import block_submodules
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.trainer.options import ddp_config, model_options
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer

SHORTEST = 24
"""Fewest tokens of a sample with its prompt, as in the quickstart."""
LONGEST = 88
"""Most tokens of a sample with its prompt, likewise."""


class ThdAttention(SdpaCoreAttention):
    """Our attention for rows in Megatron's "thd" format, of which SelfAttention drops the dimension of the batch."""

    def forward(self, query, key, value, *others, **keywords):
        """[N, heads, d] queries, [N, groups, d] keys and values to [N, 1, heads * d]."""
        return super().forward(query[:, None], key[:, None], value[:, None], *others, **keywords)


class BareMegatron:
    """The model and loss of a pretraining loop: GPTModel, cross-entropy averaged over tokens.

    `packed`: rows [1, N] of several sequences with PackedSeqParams; else rows [b, s] with padding.
    """

    def __init__(self, recipe, parallel, *, packed):
        family = family_of(read_hf_config(recipe.policy.path))
        options = model_options(family, recipe, parallel)
        self.config = options.config
        self.config.finalize_model_grads_func = finalize_model_grads
        self._row = packed_thd if packed else padded
        layers = block_submodules(self.config, family, pp_rank=0, vp_stage=None, tp_group=parallel.groups.tp)
        if packed and not HAVE_TE:
            for layer in layers.layer_specs:
                attention = layer.submodules.self_attention.submodules
                attention.core_attention = partial(ThdAttention, **attention.core_attention.keywords)
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=layers,
            vocab_size=family.vocab_size,
            position_embedding_type="rope",
            **options.gpt,
        )
        self.chunk = DistributedDataParallel(self.config, ddp_config(recipe), model)
        self.optimizer = build_optimizer([self.chunk], recipe)

    def step(self, batch):
        """One optimizer step; the mean loss. Making the rows is part of it, as it is of ours."""
        rows = [self._row(m) for m in batch.micro_batches]
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.chunk.train()
        logged = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(rows),
            model=[self.chunk],
            num_microbatches=len(rows),
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        return sum(entry.item() for entry in logged) / len(logged)


def _forward(rows, model):
    row = next(rows)
    output = model(
        row["tokens"],
        row["position_ids"],
        None,
        labels=row["targets"],
        packed_seq_params=row.get("packed_seq_params"),
    )
    return output, partial(_mean_loss, row["mask"])


def _mean_loss(mask, losses):
    loss = (losses * mask).sum() / mask.sum()
    return loss, loss.detach().clone()


def packed_thd(micro_batch):
    """The micro-batch's sequences as one row [1, N], in Megatron's format of packed sequences."""
    names = {"tokens": "tokens", "targets": "targets", "mask": "loss_mask", "position_ids": "position_ids"}
    row = {name: torch.from_numpy(getattr(micro_batch, field))[None] for name, field in names.items()}
    packed = packed_row(micro_batch.cu_seqlens.tolist(), row["position_ids"][0], fused=HAVE_TE)
    packed.qkv_format = "thd"
    return {**row, "packed_seq_params": packed}


def padded(micro_batch):
    """The micro-batch's sequences as rows [b, s], padded to the longest."""
    starts = micro_batch.cu_seqlens.tolist()
    shape = (len(starts) - 1, max(b - a for a, b in pairwise(starts)))
    tokens = np.zeros(shape, np.int64)
    targets = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.float32)
    for row, (a, b) in enumerate(pairwise(starts)):
        tokens[row, : b - a] = micro_batch.tokens[a:b]
        targets[row, : b - a] = micro_batch.targets[a:b]
        mask[row, : b - a] = micro_batch.loss_mask[a:b]
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    arrays = {"tokens": tokens, "targets": targets, "mask": mask, "position_ids": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def batch_of(options, vocab_size):
    """The batch that every side steps on."""
    samples = random_samples(options.samples, (SHORTEST, LONGEST), vocab_size, prompt=options.prompt_tokens)
    tokens = options.micro_batch_tokens
    [batch] = pack(samples, step=1, dp_size=1, micro_batch_tokens=tokens, pad_multiple=1, policy_version=0)
    return batch


def measure(options, policy):
    """Medians of all sides over rounds in which each steps once."""
    common = dict(
        dtype=options.dtype,
        loss={"name": options.loss},
        trainer={"threads": options.threads, "micro_batch_tokens": options.micro_batch_tokens},
    )
    recipe = recipe_of(policy, **common)
    second = recipe_of(policy, **common, algorithm={"kl": {"to": str(policy), "coefficient": 0.1}})
    parallel = init_parallel(recipe)
    batch = batch_of(options, family_of(read_hf_config(policy)).vocab_size)
    bare, packed = (BareMegatron(recipe, parallel, packed=packed) for packed in (False, True))
    sides = {"ours": make_trainer(recipe, parallel).step, "bare": bare.step, "packed": packed.step}
    sides["kl"] = make_trainer(second, parallel).step
    arms = {side: partial(harness.timed, partial(step, batch)) for side, step in sides.items()}
    taken_by_side = harness.in_rounds(arms, options.rounds, warm_up=2)
    wall, cpu = ({side: [taken[i] for taken in of] for side, of in taken_by_side.items()} for i in (0, 1))
    seconds = harness.medians(wall)
    busy = harness.medians(cpu)
    return {
        "ratio_packed": seconds["ours"] / seconds["packed"],
        "cpu_ratio_packed": busy["ours"] / busy["packed"],
        "ratio_kl": seconds["kl"] / seconds["ours"],
        "ratio": seconds["ours"] / seconds["bare"],
        "cpu_ratio": busy["ours"] / busy["bare"],
        "seconds": seconds,
        "cpu_seconds": busy,
        "tokens_per_second": {side: real_tokens(batch) / value for side, value in seconds.items()},
        "tokens": real_tokens(batch),
        "loss_tokens": sum(int(m.loss_mask.sum()) for m in batch.micro_batches),
        "padded_tokens": sum(int(padded(m)["tokens"].numel()) for m in batch.micro_batches),
        "micro_batches": len(batch.micro_batches),
        "parameters": sum(p.numel() for p in bare.chunk.parameters()),
        "spread": harness.extremes(wall),
        "cpu_spread": harness.extremes(cpu),
    }


def main(options):
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        policy = f"{folder}/policy"
        if options.size == "base":
            make_llama(policy, seed=0)
        else:
            random_llama(policy, dtype="float32", **SIZES[options.size])
        harness.report(options, measure(options, policy))


if __name__ == "__main__":
    end_with(partial(main, OPTIONS))
