"""A short run of recipes/tiny_cpu.yaml without validations, checkpoints and probes, for the benchmarks."""

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tiny_run(tiny, steps, *overrides):
    """Train to the end and give the run's folder, which is deleted on leaving the block.

    tiny: folder with a policy and prompts (examples/quickstart.sh). overrides: `key=value`. The run's errors go to
    standard error. Raises CalledProcessError, SystemExit where there is no policy.
    """
    if not (tiny / "policy" / "config.json").is_file():
        raise SystemExit(f"--tiny: {tiny} has no warm policy; run examples/quickstart.sh")
    with tempfile.TemporaryDirectory() as out:
        argv = [
            sys.executable,
            "-m",
            "megatron_scalerl",
            "train",
            "recipes/tiny_cpu.yaml",
            "name=bench",
            f"output_dir={out}",
            f"steps={steps}",
            f"policy.path={tiny / 'policy'}",
            f"prompts.path={tiny / 'prompts.jsonl'}",
            f"prompts.held_out_path={tiny / 'held_out.jsonl'}",
            "validation.every_steps=0",
            "checkpoint.every_steps=0",
            "weights.probe_every=0",
            *overrides,
        ]
        subprocess.check_call(argv, stdout=subprocess.DEVNULL)
        yield Path(out, "bench")
