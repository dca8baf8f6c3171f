"""What each rank does for the converter's tests: open a checkpoint the stock way, train from it, save one."""

from pathlib import Path

import torch
from parity_ranks import built


def differing_parameters(jobs):
    """For every job: this rank's parameters after the stock load that differ from those read from Hugging Face.

    Both sides start from other values than the checkpoint's; `changed` counts parameters that the load changed.
    `ours` are those that differ after our load, which starts from zeros.
    """
    from megatron.core import dist_checkpointing

    from megatron_scalerl.trainer.model import build_policy, load_megatron

    found = []
    for hf_path, megatron_path, layout in jobs:
        with built(hf_path, layout) as (chunks, parallel, settings):
            expected = dict(chunks[0].named_parameters())
            module = build_policy(hf_path, settings, parallel, load_weights=False)[0].module
            before = {name: value.clone() for name, value in module.named_parameters()}
            state = dist_checkpointing.load({"model": module.sharded_state_dict()}, megatron_path)
            module.load_state_dict(state["model"])
            loaded = dict(module.named_parameters())

            def differing(loaded=loaded, expected=expected):
                return [n for n, value in loaded.items() if not torch.equal(value, expected[f"module.{n}"])]

            different = differing()
            changed = sum(not torch.equal(value, before[n]) for n, value in loaded.items())
            with torch.no_grad():
                torch._foreach_zero_(list(module.parameters()))
            load_megatron([module], megatron_path)
            found.append(dict(parameters=len(loaded), different=different, changed=changed, ours=differing()))
    return found


def refusals(jobs):
    """For every job: what this rank says as it starts from a checkpoint that must be refused."""
    from megatron_scalerl.trainer.model import load_megatron

    refusals = []
    for hf_path, megatron_path, layout in jobs:
        with built(hf_path, layout, load_weights=False) as (chunks, _, _):
            try:
                load_megatron([chunk.module for chunk in chunks], megatron_path)
            except ValueError as error:
                refusals.append(str(error))
    return refusals


def save_the_stock_way(jobs):
    """Writes a Hugging Face folder's policy as Megatron does, in the layout's own chunks."""
    from megatron.core import dist_checkpointing

    from megatron_scalerl.trainer.shard_writer import writing_in_process

    for hf_path, out, layout in jobs:
        with built(hf_path, layout) as (chunks, _, _), writing_in_process():
            Path(out).mkdir(parents=True, exist_ok=True)
            torch.distributed.barrier()
            dist_checkpointing.save({"model": chunks[0].module.sharded_state_dict()}, out)
