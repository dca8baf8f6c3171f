"""Compares the counted parameters with those of the modules that train, built on the meta device (`meta_build`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_scalerl.plan.planner import Plan
from megatron_scalerl.recipe.file import dump_recipe

TIMEOUT_S = 600.0


def compare_with_build(plan: Plan, config: str | Path) -> str:
    """Says "equal" and where, or why nothing was built. Raises ValueError where Megatron refuses the recipe.

    The build runs in a process of its own without a GPU, so with Megatron's plain layers, whose parameters are
    those of Transformer Engine's.
    """
    if plan.layout.chunks > 1:
        return "not built: an interleaved pipeline needs a GPU"
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(dump_recipe(plan.recipe))
        argv = [
            sys.executable,
            "-m",
            "megatron_scalerl.plan.meta_build",
            str(file),
            str(config),
            str(plan.layout.world_size),
        ]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "[Gloo]" not in line]
        said = re.sub(r"^(\[rank0\]: )?(\w+: )?", "", lines[-1]) if lines else "no message"
        raise ValueError(f"megatron: the trainer's ranks cannot be built: {said}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    counted = [{"dense": s.parameters.dense, "expert": s.parameters.expert} for s in plan.trainer]
    assert found == counted, f"counted {counted}, built {found}"
    ranks = f"rank of {plan.layout.world_size}"
    return (
        f"equal on the first {ranks} of each pipeline stage" if plan.layout.pp > 1 else f"equal on the first {ranks}"
    )
