"""Seconds of a weight update from a Megatron policy into a vLLM model, over bare gloo of the same bytes.

    python tools/bench_weights.py [--rounds 15] [--layers 8] [--hidden 1024]

A trainer rank with a Llama of Megatron-Core, and a vLLM worker, whose receiver is called directly, without the HTTP
of an engine; one thread each. The arms take turns in one run:

    gloo                  one broadcast of as many bytes as an update has, nothing else: the bound
    pack and wire         an update that is packed, sent and received, and written nowhere; no digests
    update, no digests    ... written into the live parameters
    update                ... with the digests of buckets and of the values that the live parameters hold
    packed copies         on CPUs, the copies of linear layers that the update arms make again, alone
    changes               an update with digests after a step that changed one element in a hundred by one unit in the
                          last place, as the optimizer recorded them; recipe key weights.deltas
    ..., shm              an update, or its wire alone, in shared memory; recipe key weights.transport
    update by the loader  ... whole tensors through vLLM's layerwise reload, with the digest of buckets
    adapters              an update with digests of the adapters of such a policy, in another vLLM worker; recipe key
                          policy.lora, with all projections

Prints one JSON line: medians, spreads and ratios to `gloo`. Arms without digests replace both by constants.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import harness
from checkout import explained

ARMS = (
    "gloo",
    "pack and wire",
    "update, no digests",
    "update",
    "adapters",
    "packed copies",
    "update by the loader",
    "changes",
    "pack and wire, shm",
    "update, shm",
)
DENSITY = 0.01
parser = harness.benchmark(
    __doc__,
    rounds=15,
    layers=8,
    hidden=1024,
    vocab=32_000,
    bucket_mib=(64, "as in a recipe (default: %(default)s)"),
    rank=(32, "of the adapters (default: %(default)s)"),
    receive=(str, argparse.SUPPRESS),
    lora=(False, argparse.SUPPRESS),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import msgspec
    import torch
    from random_inputs import random_llama, recipe_of
    from weights_worker import Worker, group_of, no_digests

    from megatron_scalerl.distributed.rendezvous import private_folder
    from megatron_scalerl.processes.child_process import end_with
    from megatron_scalerl.weights import plan as plans
    from megatron_scalerl.weights.plan import Connection
    from megatron_scalerl.weights.transport import gloo, make_sender


class Trainer:
    """The sending process: one rank with a Megatron policy."""

    def __init__(self, folder, options):
        from megatron_scalerl.distributed.parallel import unwrap
        from megatron_scalerl.recipe.sections import LoraSection
        from megatron_scalerl.trainer.optimizer import parts_of
        from megatron_scalerl.trainer.ranks import init_parallel
        from megatron_scalerl.trainer.step import make_trainer
        from megatron_scalerl.weights.source import MegatronWeightSource

        recipe = recipe_of(folder, dtype="bfloat16")
        parallel = init_parallel(recipe)
        trainer = make_trainer(recipe, parallel)
        self.source = MegatronWeightSource(trainer.chunks, parallel)
        policy = recipe.policy.model_copy(update={"lora": LoraSection(rank=options.rank)})
        adapted = make_trainer(recipe.model_copy(update={"policy": policy}), parallel).chunks
        self.adapters = MegatronWeightSource(adapted, parallel, family=unwrap(adapted[0]).adapters)
        self.changes = trainer.changes
        self.written = trainer.changes.written
        self.written.is_recording = True
        self.parts = parts_of(trainer.optimizer)
        self.size = sum(bucket.nbytes for bucket in plans.buckets(self.source.plan, options.bucket_mib))
        self.senders = {}
        self.buffer = torch.zeros(self.size, dtype=torch.uint8)

    def source_of(self, group):
        """What updates over these groups send."""
        return self.adapters if group == "adapters" else self.source

    def connect(self, connection):
        """Open the groups."""
        self.senders[connection.group] = make_sender(connection)
        if connection.group == "whole":
            self.bare = gloo.Group(connection, 0, sender=9)

    def step(self, seed):
        """Change some elements by one unit in the last place, as an optimizer does; returns how many."""
        generator = torch.Generator().manual_seed(seed)
        mains = [pair for part in self.parts for pair in zip(*part._get_model_and_main_params_data_float16())]
        for held, main in mains:
            bits = held.view(torch.int16).view(-1)
            places = torch.randint(bits.numel(), (max(int(DENSITY * bits.numel()), 1),), generator=generator).unique()
            main.view(-1)[places] = (bits[places] + 1).view(held.dtype).float()
        self.changes.begin()
        for part in self.parts:
            part._copy_main_params_to_model_params()
        return int(self.changes.counts()[0])

    def update(self, arm, version):
        """Send one update; the digest of the values."""
        no_digests(arm)
        if arm == "gloo":
            self.bare.broadcast(self.buffer)
        elif arm != "packed copies":
            sender = self.senders[group_of(arm)]
            source = self.source_of(group_of(arm))
            sender.send(source.plan, source.as_sent, version, self.written if arm == "changes" else None)
            if arm == "changes":
                self.written.forget()
            return f"{sender.values.get(0, 0):016x}"
        return ""


def measure(options, folder, rendezvous):
    """(bytes of an update, of an update of adapters and of a changed element, arm -> seconds of each round)."""
    words = [*sys.argv[1:], "--receive", str(folder)]
    whole = harness.Partner(__file__, *words)
    adapted = harness.Partner(__file__, *words, "--lora")
    trainer = Trainer(folder, options)
    for child in (whole, adapted):
        child.answer()
    connection = Connection(
        backend="gloo",
        rendezvous=rendezvous,
        group="whole",
        world_sizes=(2,),
        bucket_mib=options.bucket_mib,
        timeout_s=300,
        connect_timeout_s=300,
    )
    changes = replace(connection, group="changes", deltas="absolute")
    shm = replace(connection, group="shm", backend="shm")
    for each in (connection, changes, shm, replace(connection, group="adapters")):
        child = adapted if each.group == "adapters" else whole
        child.ask("connect", msgspec.to_builtins(each), plans.to_json(trainer.source_of(each.group).plan))
        trainer.connect(each)
        child.answer()
    seconds = {arm: [] for arm in ARMS}
    for version in range(options.rounds + 1):
        for arm in ARMS:  # in this order: some need what one before them left
            if arm == "changes":
                changed = trainer.step(version)
            child = adapted if arm == "adapters" else whole
            begin = time.perf_counter()
            child.ask("update", arm, version, trainer.size)
            sent = trainer.update(arm, version)
            held = child.answer()
            if version:  # the first round allocates and compiles
                seconds[arm].append(time.perf_counter() - begin)
            assert held in ("", sent), f"{arm}: sent {sent}, holds {held}"
    whole.end()
    adapted.end()
    of_adapters = sum(trainer.senders["adapters"].sizes)
    return trainer.size, of_adapters, trainer.senders["changes"].bytes / changed, seconds


def main(options):
    """Measure all arms in turn and print."""
    torch.set_num_threads(1)
    hidden = options.hidden
    shape = dict(vocab=options.vocab, hidden=hidden, inner=4 * hidden, layers=options.layers)
    shape |= dict(heads=hidden // 64, groups=max(hidden // 256, 1), head_dim=64, max_position_embeddings=256)
    with tempfile.TemporaryDirectory() as root, private_folder() as rendezvous:
        random_llama(root, **shape)
        size, of_adapters, of_change, seconds = measure(options, Path(root), rendezvous)
    median = harness.medians(seconds)
    packed = median["packed copies"]
    line = {
        "mib": size / 2**20,
        "mib_of_adapters": of_adapters / 2**20,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "seconds": median,
        "spread": harness.extremes(seconds),
        "over_gloo": {arm: value / median["gloo"] for arm, value in median.items()},
        "gb_s": size / 1e9 / median["update"],
        "bytes_of_a_change": of_change,
        "update_over_adapters": median["update"] / median["adapters"],
        "update_over_changes": median["update"] / median["changes"],
        "without_packed_copies": (median["update"] - packed) / (median["changes"] - packed),
    }
    harness.report(options, line)


if __name__ == "__main__":
    if OPTIONS.receive:
        harness.partner(Worker, OPTIONS)
    else:
        end_with(partial(main, OPTIONS))
