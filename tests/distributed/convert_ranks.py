"""What each rank does for the converter's tests: open a checkpoint the stock way, train from it, save one."""

import os
from pathlib import Path
from typing import Any

import torch
from parity_ranks import recipe

Job = tuple[str, str, dict[str, Any]]
"""Hugging Face folder, Megatron folder, layout."""


def differing_parameters(jobs):
    """For every job: this rank's parameters after the stock load that differ from those read from Hugging Face.

    Both sides start from other values than the checkpoint's; `changed` counts parameters that the load changed.
    `ours` are those that differ after our load, which starts from zeros.
    """
    from megatron.core import dist_checkpointing

    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy, load_megatron
    from megatron_scalerl.trainer.ranks import init_parallel

    found = []
    for hf_path, megatron_path, layout in jobs:
        settings = recipe(hf_path, int(os.environ["WORLD_SIZE"]), layout)
        parallel = init_parallel(settings)
        expected = dict(build_policy(hf_path, settings, parallel)[0].named_parameters())
        module = build_policy(hf_path, settings, parallel, load_weights=False)[0].module
        before = {name: value.clone() for name, value in module.named_parameters()}
        state = dist_checkpointing.load({"model": module.sharded_state_dict()}, megatron_path)
        module.load_state_dict(state["model"])
        loaded = dict(module.named_parameters())
        different = [n for n, value in loaded.items() if not torch.equal(value, expected[f"module.{n}"])]
        changed = sum(not torch.equal(value, before[n]) for n, value in loaded.items())
        with torch.no_grad():
            torch._foreach_zero_(list(module.parameters()))
        load_megatron([module], megatron_path)
        ours = [n for n, value in loaded.items() if not torch.equal(value, expected[f"module.{n}"])]
        found.append(dict(parameters=len(loaded), different=different, changed=changed, ours=ours))
        torch.distributed.barrier()
        shutdown_parallel(keep_world=True)
    return found


def refusals(jobs):
    """For every job: what this rank says as it starts from a checkpoint that must be refused."""
    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy, load_megatron
    from megatron_scalerl.trainer.ranks import init_parallel

    refusals = []
    for hf_path, megatron_path, layout in jobs:
        settings = recipe(hf_path, int(os.environ["WORLD_SIZE"]), layout)
        chunks = build_policy(hf_path, settings, init_parallel(settings), load_weights=False)
        try:
            load_megatron([chunk.module for chunk in chunks], megatron_path)
        except ValueError as error:
            refusals.append(str(error))
        torch.distributed.barrier()
        shutdown_parallel(keep_world=True)
    return refusals


def save_the_stock_way(jobs):
    """Writes a Hugging Face folder's policy as Megatron does, in the layout's own chunks."""
    from megatron.core import dist_checkpointing

    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.shard_writer import writing_in_process

    for hf_path, out, layout in jobs:
        settings = recipe(hf_path, int(os.environ["WORLD_SIZE"]), layout)
        parallel = init_parallel(settings)
        module = build_policy(hf_path, settings, parallel)[0].module
        Path(out).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        with writing_in_process():
            dist_checkpointing.save({"model": module.sharded_state_dict()}, out)
        torch.distributed.barrier()
        shutdown_parallel(keep_world=True)
