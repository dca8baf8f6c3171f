"""What each rank does for the families' parity tests: load, whole logits through the pipeline, save."""

from __future__ import annotations

import os
from typing import Any

import torch
from parity_ranks import recipe
from random_policies import rows

Job = tuple[str, str, dict[str, Any], str]
"""Name, policy path, layout, folder to save into ("" for none)."""


def logits_and_saved(jobs: list[Job]) -> dict[str, torch.Tensor]:
    """Logits [N, vocab] of the first fixed row on ranks of the last stage; saves the untouched weights."""
    from megatron.core import parallel_state

    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.parallel import init_parallel
    from megatron_scalerl.weights.source import MegatronWeightSource, save_hf

    found: dict[str, torch.Tensor] = {}
    for name, path, layout, out in jobs:
        settings = recipe(path, int(os.environ["WORLD_SIZE"]), layout)
        parallel = init_parallel(settings)
        chunks = build_policy(path, settings, parallel)
        for logits in _logits(chunks):
            found[name] = logits
        if out:
            save_hf(MegatronWeightSource(chunks, parallel), path, out)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    return found


def _logits(chunks: list[Any]) -> list[torch.Tensor]:
    """One tensor on the last stage, nothing before it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_scalerl.trainer.model import unwrap

    row = rows()[0]
    inputs = (row["tokens"], row["position_ids"], row["cu_seqlens"])
    found: list[torch.Tensor] = []

    def forward(_: Any, model: Any) -> Any:
        logits = unwrap(model).full_logits(*inputs) if unwrap(model).post_process else None
        if logits is not None:
            found.append(logits)
        return model(*inputs, row["targets"]), lambda output: (output.sum(), {})

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=chunks,
            num_microbatches=1,
            seq_length=row["tokens"].shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    return found
