"""Small warm policies and short runs, made by the product's own commands."""

import subprocess
import sys

from programs import ROOT as ROOT
from programs import ended


def run(*argv, timeout=900, check=True):
    """Run one of the product's commands from the root of the project."""
    done = ended(sys.executable, *argv, timeout=timeout)
    if check:
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def product(*words, **options):
    """Run `megatron-scalerl` with these words."""
    return run("-m", "megatron_scalerl", *words, **options)


def start(*argv):
    """Start one of the product's commands from the root of the project; its output is thrown away."""
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=ROOT, stdout=subprocess.DEVNULL)


def make_tiny(folder, *, moe, sft_steps):
    """Task files, an untrained policy, and a policy after a short warm start."""
    flags = ["--moe"] if moe else []
    run("-m", "megatron_scalerl.tiny", folder, "--seed", 1, "--sft-examples", 32 * sft_steps, *flags)
    paths = f"--out {folder}/policy policy.path={folder}/base_policy sft.path={folder}/sft.jsonl"
    product("sft", "recipes/tiny_cpu.yaml", *paths.split(), f"sft.steps={sft_steps}", "sft.threads=1")
    return folder


def overrides(tiny, out, name, *more):
    """A run of three steps on a tiny policy."""
    own = f"""name={name} output_dir={out} steps=3
        policy.path={tiny}/policy prompts.path={tiny}/prompts.jsonl prompts.held_out_path={tiny}/held_out.jsonl
        rollouts.groups_per_batch=4 rollouts.group_size=8 rollouts.max_in_flight=64
        validation.every_steps=3 validation.prompts=20 validation.generations=2 checkpoint.every_steps=0
        optimizer.warmup_steps=1 optimizer.lr=1e-3 weights.probe_every=1 weights.probe_tolerance=1e-4
        trainer.micro_batch_tokens=512"""
    return [*own.split(), *more]


def words(text):
    """The words of a command line, none of which has a blank."""
    return text.split()
