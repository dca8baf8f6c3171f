"""Measures the throughput of checkpoint conversion relative to `cp` of the same bytes, and its memory.

    python tools/bench_convert.py                     2 GiB of random bf16 weights of a dense policy
    python tools/bench_convert.py --kind moe          fused, transposed experts as in Llama 4
    python tools/bench_convert.py --gib 8 --processes 4 --rounds 5 --folder /scratch --json out.json

Every round runs cp, to-megatron, cp and to-hf in sequence. Each starts with its source evicted from the page cache
and ends with its result on disk. Checksums and the NaN check are on. Anonymous memory is RssAnon of each process,
sampled every 10 ms. The exit code is 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    kind=["dense", "moe"],
    gib=(2.0, "size of the checkpoint"),
    processes=2,
    rounds=3,
    folder=(str, "where to work (default: a temporary folder)"),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    from rich.console import Console

    from megatron_scalerl.checkpoints.conversion import Options
    from megatron_scalerl.checkpoints.hf_folder import INDEX

# The rest of the package comes where it is used: workers import this file again, and need no torch.

TARGET = 0.40
"""Conversion throughput over that of cp."""
SLACK_BYTES = 1 << 30
_SHARD_BYTES = 1 << 30
_SAMPLE_SECONDS = 0.01


def main(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 where both targets are met, 1 otherwise."""
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench_convert_") as folder:
        source = Path(folder) / "hugging_face"
        nbytes, largest = make_checkpoint(source, arguments.kind, round(arguments.gib * 2**30))
        console.print(
            f"{arguments.kind}: {nbytes / 2**30:.2f} GiB of bf16, largest tensor {largest / 2**20:.0f} MiB, "
            f"{arguments.processes} processes, {os.cpu_count()} cores",
            highlight=False,
        )
        figures = measure(source, nbytes, largest, arguments.rounds, arguments.processes, console)
    asked = harness.asked(arguments, "kind", "gib", "processes", "rounds")
    harness.report(arguments, {"bench": "convert", **asked, **figures}, shown=False)
    return 0 if show(figures, console) else 1


def measure(source: Path, nbytes: int, largest: int, rounds: int, processes: int, console: Console) -> dict[str, Any]:
    """Seconds of every round, median ratios, and peak anonymous memory."""
    from megatron_scalerl.checkpoints.to_hf import to_hf
    from megatron_scalerl.checkpoints.to_megatron import to_megatron

    place = source.parent
    megatron, back, copy = place / "megatron", place / "back", place / "copy"
    options = Options(processes=processes)
    steps: list[tuple[str, Path, Path, Callable[[], Any]]] = [
        ("cp", source, copy, lambda: subprocess.run(["cp", "-r", source, copy], check=True)),
        ("to-megatron", source, megatron, lambda: to_megatron(source, megatron, options)),
        ("cp back", megatron, copy, lambda: subprocess.run(["cp", "-r", megatron, copy], check=True)),
        ("to-hf", megatron, back, lambda: to_hf(megatron, back, options)),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, *_ in steps}
    peaks: dict[str, list[int]] = {}
    for _ in range(rounds):
        for name, origin, target, step in steps:  # in this order: each needs what the one before it wrote
            settle(origin)
            with sampled_memory() as peak:
                took = harness.seconds_of(step) + harness.seconds_of(partial(settle, target))
            seconds[name].append(took)
            peaks[name] = [max(pair) for pair in zip(peaks.get(name, [0, 0]), peak)]
            if name.startswith("cp"):
                shutil.rmtree(target)
        check_same(source, back)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
        console.print("  ".join(f"{name} {found[-1]:.2f} s" for name, found in seconds.items()), highlight=False)
    pairs = (("to-megatron", "cp"), ("to-hf", "cp back"))
    ratios = {name: statistics.median(harness.paired(seconds[cp], seconds[name])) for name, cp in pairs}
    return dict(
        nbytes=nbytes,
        largest_tensor=largest,
        seconds=seconds,
        ratios=ratios,
        target_ratio=TARGET,
        peak_anonymous={name: peaks[name][0] for name in ratios},
        promised_anonymous=2 * largest + SLACK_BYTES,
        peak_workers={name: peaks[name][1] for name in ratios},
        machine=harness.machine(),
    )


def show(figures: dict[str, Any], console: Console) -> bool:
    """Print the table; True where all targets are met."""
    met = True
    promised = figures["promised_anonymous"]
    for name, ratio in figures["ratios"].items():
        rate = figures["nbytes"] / statistics.median(figures["seconds"][name]) / 2**30
        peak = figures["peak_anonymous"][name]
        met &= ratio >= TARGET and peak <= promised
        console.print(
            f"{name:<12} {rate:5.2f} GiB/s, {ratio:4.2f} of cp's throughput (target {TARGET:.2f}); "
            f"anonymous memory {peak / 2**20:.0f} MiB, of workers "
            f"{figures['peak_workers'][name] / 2**20:.0f} MiB (promised {promised / 2**20:.0f} MiB)",
            highlight=False,
        )
    return bool(met)


def settle(folder: Path) -> None:
    """Everything in the folder is on the disk and out of the page cache."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        if path.is_file():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """[largest RssAnon of this process and its workers, of its workers alone] while the block runs, in bytes."""
    peak, stop = [0, 0], threading.Event()

    def watch() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            workers = [
                harness.memory_of("RssAnon", child.pid) for child in multiprocessing.active_children() if child.pid
            ]
            peak[0] = max(peak[0], harness.memory_of("RssAnon"), *workers)
            peak[1] = max(peak[1], *workers, 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def check_same(source: Path, back: Path) -> None:
    """The round trip gave every weight file back byte for byte."""
    for path in sorted(source.glob("*.safetensors")):
        same = subprocess.run(["cmp", path, back / path.name], check=False).returncode == 0
        assert same, f"{path.name} came back different"


def make_checkpoint(path: Path, kind: str, nbytes: int) -> tuple[int, int]:
    """Write random bf16 weights of a policy of about `nbytes`; returns its bytes and those of its largest tensor."""
    path.mkdir(parents=True)
    config = _config(kind)
    per_layer, rest = _bytes_of(path, config)
    config["num_hidden_layers"] = max(1, -(-(nbytes - rest) // per_layer))
    shapes = _shapes(path, config)
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > _SHARD_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    index = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _write_random(path / file, {name: shapes[name] for name in names}, seed=number)
        index |= dict.fromkeys(names, file)
    total = sum(sizes.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total, max(sizes.values())


def _config(kind: str) -> dict[str, Any]:
    shared = dict(vocab_size=32000, hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    shared |= dict(max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16")
    if kind == "dense":
        return shared | dict(model_type="llama", architectures=["LlamaForCausalLM"], intermediate_size=8192)
    shared |= dict(model_type="llama4_text", architectures=["Llama4ForCausalLM"], intermediate_size=2048)
    experts = dict(num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1)
    return shared | experts | dict(intermediate_size_mlp=4096)


def _shapes(path: Path, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from megatron_scalerl.models import family, read_hf_config

    (path / "config.json").write_text(json.dumps(config))
    rules = family(read_hf_config(path)).rules
    return {name: tuple(shape) for rule in rules for name, shape in rule.hf_shapes.items()}


def _bytes_of(path: Path, config: dict[str, Any]) -> tuple[int, int]:
    """(bytes of one layer, bytes of the rest)"""
    one, two = (
        sum(2 * int(np.prod(shape)) for shape in _shapes(path, {**config, "num_hidden_layers": count}).values())
        for count in (1, 2)
    )
    return two - one, 2 * one - two


def _write_random(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """In pieces: no tensor is in this process's memory, which is measured."""
    generator = np.random.default_rng(seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, offset // 2, 1 << 24):  # random signs and mantissas, exponents that are finite
            bits = generator.integers(0, 1 << 16, min(offset // 2 - begin, 1 << 24), dtype=np.uint16)
            file.write(((bits & 0x83FF) | 0x3C00).tobytes())


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
