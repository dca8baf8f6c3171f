"""Measures the throughput of checkpoint conversion relative to `cp` of the same bytes, and its memory.

    python tools/bench_convert.py                     2 GiB of random bf16 weights of a dense policy
    python tools/bench_convert.py --kind moe          fused, transposed experts as in Llama 4
    python tools/bench_convert.py --gib 8 --rounds 5 --folder /scratch --json out.json

Every round runs cp, to-megatron, cp and to-hf in sequence. Each starts with its source evicted from the page cache
and ends with its result on disk. Checksums and the NaN check are on. Anonymous memory is RssAnon, sampled every
10 ms. Prints one JSON line; the exit code is 1 where a target is missed.
"""

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    kind=["dense", "moe"],
    gib=(2.0, "size of the checkpoint"),
    rounds=3,
    folder=(str, "where to work (default: a temporary folder)"),
    write=(str, argparse.SUPPRESS),
    bytes=(int, argparse.SUPPRESS),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from megatron_scalerl.checkpoints.to_hf import to_hf
    from megatron_scalerl.checkpoints.to_megatron import to_megatron

TARGET = 0.40
"""Conversion throughput over that of cp."""
SLACK_BYTES = 1 << 30
_SAMPLE_SECONDS = 0.01


def main(o):
    """Measure and print; 0 where both targets are met, 1 otherwise."""
    if o.write:  # in a process of its own, as this one's memory is measured
        print(json.dumps(write_checkpoint(o.write, o.kind, o.bytes)))
        return 0
    with tempfile.TemporaryDirectory(dir=o.folder, prefix="bench_convert_") as folder:
        source = Path(folder) / "hugging_face"
        size = str(round(o.gib * 2**30))
        written = harness.child(__file__, "--kind", o.kind, "--write", str(source), "--bytes", size)
        figures = measure(source, o.rounds)
    promised = 2 * written["largest_tensor"] + SLACK_BYTES
    targets = {"target_ratio": TARGET, "promised_anonymous": promised}
    harness.report(o, written | figures | targets)
    met = min(figures["ratios"].values()) >= TARGET and max(figures["peak_anonymous"].values()) <= promised
    return int(not met)


def measure(source, rounds):
    """Seconds of every round, median ratios of throughput to that of cp, and peak anonymous memory."""
    place = source.parent
    megatron = place / "megatron"
    back = place / "back"
    copy = place / "copy"
    steps = [
        ("cp", source, copy, lambda: subprocess.check_call(["cp", "-r", source, copy])),
        ("to-megatron", source, megatron, lambda: to_megatron(source, megatron)),
        ("cp back", megatron, copy, lambda: subprocess.check_call(["cp", "-r", megatron, copy])),
        ("to-hf", megatron, back, lambda: to_hf(megatron, back)),
    ]
    seconds = {name: [] for name, *_ in steps}
    peaks = {}
    for _ in range(rounds):
        for name, origin, target, step in steps:  # in this order: each needs what the one before it wrote
            settle(origin)
            with sampled_memory() as peak:
                took = harness.seconds_of(step) + harness.seconds_of(partial(settle, target))
            seconds[name].append(took)
            peaks[name] = max(peaks.get(name, 0), *peak)
            if name.startswith("cp"):
                shutil.rmtree(target)
        check_same(source, back)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
    pairs = (("to-megatron", "cp"), ("to-hf", "cp back"))
    ratios = {name: statistics.median(harness.paired(seconds[cp], seconds[name])) for name, cp in pairs}
    return {"seconds": seconds, "ratios": ratios, "peak_anonymous": {name: peaks[name] for name in ratios}}


def settle(folder):
    """Everything in the folder is on the disk and out of the page cache."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        if path.is_file():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@contextmanager
def sampled_memory():
    """[RssAnon of this process in every sample] while the block runs, in bytes."""
    samples = [0]
    stop = threading.Event()

    def watch():
        while not stop.wait(_SAMPLE_SECONDS):
            samples.append(harness.memory_of("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def check_same(source, back):
    """The round trip gave every weight file back byte for byte."""
    for path in sorted(source.glob("*.safetensors")):
        assert filecmp.cmp(path, back / path.name, shallow=False), f"{path.name} came back different"


SHAPES = {
    "dense": dict(vocab=32000, hidden=2048, inner=8192, heads=16, groups=4, head_dim=128),
    "moe": dict(vocab=32000, hidden=2048, inner=2048, heads=16, groups=4, head_dim=128)
    | dict(intermediate_size_mlp=4096, num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1),
}


def write_checkpoint(path, kind, nbytes):
    """Random bf16 weights of a policy of about `nbytes`; its bytes and those of its largest tensor."""
    import torch
    from random_inputs import random_model

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        models = (random_model(kind, layers=layers, **SHAPES[kind]) for layers in (1, 2))
        one, two = (sum(p.nbytes for p in model.parameters()) for model in models)
    model = random_model(kind, layers=max(1, 1 - (one - nbytes) // (two - one)), **SHAPES[kind])
    model.save_pretrained(path, max_shard_size="1GB")
    sizes = [p.nbytes for p in model.parameters()]
    return {"nbytes": sum(sizes), "largest_tensor": max(sizes)}


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
