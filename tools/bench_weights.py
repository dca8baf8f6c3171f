"""Seconds of a weight update from a Megatron policy into a vLLM model, over bare gloo of the same bytes.

    python tools/bench_weights.py [--rounds 15] [--layers 8] [--hidden 1024] [--dtype bfloat16]

Two processes, one thread each: a trainer rank with a Llama of Megatron-Core, and a vLLM worker, whose receiver is
called directly, without the HTTP of an engine. The arms take turns in one run:

    gloo                  one broadcast of as many bytes as an update has, nothing else: the bound
    pack and wire         an update that is packed, sent and received, and written nowhere; no digests
    update, no digests    ... written into the live parameters
    update                ... with the digests of buckets and of the values that the live parameters hold
    packed copies         on CPUs, the copies of linear layers that the update arms make again, alone
    changes               an update with digests after a step that changed one element in a hundred by one unit in the
                          last place; recipe key weights.deltas
    staged                an update with digests that arrives in a thread, and is then written; recipe key
                          weights.transaction
    ..., shm              the same in shared memory; recipe key weights.transport
    update by the loader  ... whole tensors through vLLM's layerwise reload, with the digest of buckets
    vLLM's reload alone   tensor by tensor over bare gloo, through vLLM's layerwise reload; the trainer's are put
                          together before

Prints one JSON line: medians, spreads, ratios to `gloo`, and the share of `staged` in which an engine is paused. Arms
without digests replace both by constants.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkout import explained

ARMS = (
    "gloo",
    "pack and wire",
    "update, no digests",
    "update",
    "packed copies",
    "update by the loader",
    "vLLM's reload alone",
    "changes",
    "staged",
    "pack and wire, shm",
    "update, shm",
)
DENSITY = 0.01
PAUSED = "staged, paused"
WITHOUT_DIGESTS = ("pack and wire", "update, no digests", "pack and wire, shm")


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--vocab", type=int, default=32_000)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    p.add_argument("--bucket-mib", type=int, default=16)
    p.add_argument("--deltas", choices=("absolute", "ulp"), default="absolute")
    p.add_argument("--receive", metavar="FOLDER", help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import msgspec
    import torch

    from megatron_scalerl.distributed.rendezvous import private_folder
    from megatron_scalerl.weights import plan as plans
    from megatron_scalerl.weights.connection import Connection
    from megatron_scalerl.weights.transport import frames, gloo, make_sender, shm


def make_policy(folder: Path, options: argparse.Namespace) -> None:
    """A random Llama in a Hugging Face folder, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(options.hidden // 256, 1),
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, options.dtype)).save_pretrained(folder)


def no_digests(without: bool) -> None:
    """Replace the digests of buckets and of sent values by constants, or put them back."""
    from megatron_scalerl.weights.digest import digest
    from megatron_scalerl.weights.value_digest import value_digest

    module: Any = frames
    module.digest = (lambda data: 0) if without else digest
    module.value_digest = (lambda *_: 0) if without else value_digest


class Worker:
    """The receiving process: a vLLM model and its receiver."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        from vllm import LLM

        from megatron_scalerl.engine import vllm_plugin

        vllm_plugin._keep_linear_weights()
        vllm_plugin.register()
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=options.dtype,
            max_model_len=128,
            max_num_seqs=2,
            kv_cache_memory_bytes=1 << 25,
            weight_transfer_config={"backend": "msrl_gloo"},
        )
        engine: Any = llm.llm_engine
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.model, self.receiver = worker.model_runner.get_model(), worker.weight_transfer_engine

    def connect(self, connection: Any, plan: str) -> int:
        """Join both groups; bytes of the model's parameters."""
        found = msgspec.convert(connection, Connection)
        info = {"connection": connection, "places": [[0, 1]], "plans": [plan]}
        self.receiver.group_cls = {"gloo": gloo.Group, "shm": shm.ShmGroup}[found.backend]
        self.receiver.init_transfer_engine(self.receiver.parse_init_info(info))
        groups, self.receiver._groups = self.receiver._groups, {}
        if found.group != "bench":
            setattr(self, found.group, groups)
            return 0
        self.whole, self.bare = groups, gloo.Group(found, 1, sender=9)
        self.plan, self.live = plans.from_json(plan), self.model._msrl_live if self._known(plan) else None
        assert self.live is not None and self.live[1] is not None, "the live parameters are not known"
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _known(self, plan: str) -> bool:
        from megatron_scalerl.engine.weight_receiver import needs_of

        needs_of(self.model, plans.manifest_to_json(plans.from_json(plan).parameters))
        return True

    def update(self, arm: str, version: int, size: int) -> str:
        """Take part in one update; the digest of what the model holds, where that is part of the arm."""
        from megatron_scalerl.engine.weight_receiver import live_digest

        no_digests(arm in WITHOUT_DIGESTS)
        if arm == "gloo":
            self.bare.broadcast(self.buffer(size))
            return ""
        groups = self.shm if "shm" in arm else self.changes if arm == "changes" else self.whole
        if arm.startswith("pack and wire"):
            for _ in frames.receive(groups, self.plan, version):
                pass
            return ""
        if arm == "packed copies":
            live = self.live[1]
            live._written = set(range(len(self.plan.parameters)))
            live.finish()
            return ""
        self.receiver._groups = groups
        self.receiver._holds = version - 1 if arm == "changes" and version else None
        self.model._msrl_live = (self.live[0], None) if "loader" in arm or "reload" in arm else self.live
        if arm == "staged":
            self.receiver.stage(version)
            while self.receiver.staged() is None:
                time.sleep(0.001)
        begin = time.perf_counter()
        self.receiver.start_weight_update()
        if arm == "vLLM's reload alone":
            self.model.load_weights(self.tensors())
        else:
            self.receiver.update_weights({"version": version, "staged": arm == "staged"})
        self.receiver.finish_weight_update()
        held = live_digest(self.model) if arm in ("update", "changes", "staged", "update, shm") else ""
        self.paused = time.perf_counter() - begin
        return held

    def seconds_paused(self) -> float:
        """Of the last update, with the digest of what the model holds."""
        return self.paused

    def buffer(self, size: int) -> torch.Tensor:
        """[size] uint8, allocated once."""
        if not hasattr(self, "_buffer"):
            self._buffer = torch.zeros(size, dtype=torch.uint8)
        return self._buffer

    def tensors(self) -> Any:
        """(name, tensor) of every parameter, as they arrive."""
        for meta in self.plan.parameters:
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            self.bare.broadcast(tensor)
            yield meta.name, tensor


def receive(folder: str, options: argparse.Namespace) -> None:
    """Answer commands from the input, a JSON line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    torch.set_num_threads(1)
    worker = Worker(folder, options)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        value = getattr(worker, command)(*arguments)
        print(json.dumps(value), file=answers, flush=True)


class Trainer:
    """The sending process: one rank with a Megatron policy."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from megatron_scalerl.distributed.parallel import init_parallel
        from megatron_scalerl.recipe import Recipe
        from megatron_scalerl.trainer.model import build_policy
        from megatron_scalerl.weights.source import MegatronWeightSource

        recipe = Recipe.model_validate(
            {
                "name": "bench",
                "steps": 1,
                "policy": {"path": str(folder), "dtype": options.dtype},
                "prompts": {"path": "none"},
            }
        )
        parallel = init_parallel(recipe)
        self.source = MegatronWeightSource(build_policy(folder, recipe, parallel), parallel)
        self.size = sum(bucket.nbytes for bucket in plans.buckets(self.source.plan, options.bucket_mib))
        self.buffer = torch.zeros(self.size, dtype=torch.uint8)
        self.tensors = self.assembled()

    def assembled(self) -> list[torch.Tensor]:
        """The tensors of the checkpoint as a whole."""
        plan = self.source.plan
        found = [torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in plan.parameters]
        for number, part in enumerate(plan.parts):
            found[part.tensor][tuple(slice(a, b) for a, b in part.ranges)] = self.source.read(number)
        return found

    def connect(self, connection: Connection) -> None:
        """Open the groups."""
        if connection.group != "bench":
            setattr(self, connection.group, make_sender(connection))
        else:
            self.sender, self.bare = make_sender(connection), gloo.Group(connection, 0, sender=9)

    def step(self, seed: int) -> int:
        """Change some elements by one unit in the last place; returns how many."""
        generator, changed = torch.Generator().manual_seed(seed), 0
        for parameter in self.source._parameters.values():
            bits = parameter.data.view(torch.int16 if parameter.element_size() == 2 else torch.int32).view(-1)
            count = max(int(DENSITY * bits.numel()), 1)
            places = torch.randint(bits.numel(), (count,), generator=generator).unique()
            bits[places] += 1
            changed += len(places)
        self.tensors = self.assembled()
        return changed

    def update(self, arm: str, version: int) -> str:
        """Send one update; the digest of the values."""
        no_digests(arm in WITHOUT_DIGESTS)
        if arm == "gloo":
            self.bare.broadcast(self.buffer)
        elif arm == "vLLM's reload alone":
            for tensor in self.tensors:
                self.bare.broadcast(tensor)
        elif arm != "packed copies":
            sender = self.shm if "shm" in arm else self.changes if arm == "changes" else self.sender
            sender.send(self.source.plan, self.source.read, version)
            return f"{sender.values.get(0, 0):016x}"
        return ""


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class Child:
    """The receiving process, as the sending one sees it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--receive", str(folder)]
        environment, pipe = os.environ | ENVIRONMENT, subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, *command: Any) -> None:
        """Send a command; `answer` waits for its value."""
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """The value of the oldest command without one; the first is of the start."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the vLLM process ended"
        return json.loads(line)

    def end(self) -> None:
        """Let it exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace, folder: Path, rendezvous: Any) -> tuple[int, float, dict[str, list[float]]]:
    """(bytes of an update, bytes of a changed element, arm -> seconds of each round)"""
    child = Child(folder)
    trainer = Trainer(folder, options)
    child.answer()
    connection = Connection(
        backend="gloo",
        rendezvous=rendezvous,
        group="bench",
        world_sizes=(2,),
        bucket_mib=options.bucket_mib,
        timeout_s=300,
        connect_timeout_s=300,
    )
    changes = replace(connection, group="changes", deltas=options.deltas, anchor_every=1 << 30)
    for each in (connection, changes, replace(connection, group="shm", backend="shm")):
        child.ask("connect", msgspec.to_builtins(each), plans.to_json(trainer.source.plan))
        trainer.connect(each)
        child.answer()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for version in range(options.rounds + 1):
        for arm in ARMS:
            if arm == "changes":
                changed = trainer.step(version)
            begin = time.perf_counter()
            child.ask("update", arm, version, trainer.size)
            sent, held = trainer.update(arm, version), child.answer()
            if version:  # the first round allocates and compiles
                seconds[arm].append(time.perf_counter() - begin)
                if arm == "staged":
                    child.ask("seconds_paused")
                    seconds.setdefault(PAUSED, []).append(child.answer())
            assert held in ("", sent), f"{arm}: sent {sent}, holds {held}"
    child.end()
    return trainer.size, trainer.changes.bytes / changed, seconds


def main(options: argparse.Namespace) -> None:
    """Measure all arms in turn and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root, private_folder() as rendezvous:
        make_policy(Path(root), options)
        size, of_change, seconds = measure(options, Path(root), rendezvous)
    median = {arm: statistics.median(of) for arm, of in seconds.items()}
    line = {
        "bench": "weights",
        "mib": round(size / 2**20, 1),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "seconds": {arm: round(value, 4) for arm, value in median.items()},
        "spread": {arm: [round(min(of), 4), round(max(of), 4)] for arm, of in seconds.items()},
        "over_gloo": {arm: round(value / median["gloo"], 3) for arm, value in median.items()},
        "staged_pause_share": round(median[PAUSED] / median["staged"], 3),
        "paused_of_update": round(median[PAUSED] / median["update"], 3),
        "gb_s": round(size / 1e9 / median["update"], 3),
        "bytes_of_a_change": round(of_change, 3),
        "update_over_changes": round(median["update"] / median["changes"], 3),
        "without_packed_copies": round(
            (median["update"] - median["packed copies"]) / (median["changes"] - median["packed copies"]), 3
        ),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if OPTIONS.receive:
        receive(OPTIONS.receive, OPTIONS)
    else:
        main(OPTIONS)
