"""The receiving process of `bench_weights.py`: a vLLM model and its receiver, called directly."""

import msgspec
import torch

from megatron_scalerl.weights import plan as plans
from megatron_scalerl.weights.plan import VLLM_BACKEND, Connection
from megatron_scalerl.weights.transport import frames, gloo, sender

VERIFIED = ("update", "adapters", "changes", "update, shm")
WITHOUT_DIGESTS = ("pack and wire", "update, no digests", "pack and wire, shm")


def group_of(arm):
    """Name of the connection of an arm."""
    if arm in ("changes", "adapters"):
        return arm
    if arm.endswith("shm"):
        return "shm"
    return "whole"


def no_digests(arm):
    """Replace the digests of buckets and of sent values by constants where the arm has none, or put them back."""
    from megatron_scalerl.weights.digest import digest, value_digest

    frames.digest = digest
    sender.value_digest = value_digest
    if arm in WITHOUT_DIGESTS:
        frames.digest = lambda data: 0
        sender.value_digest = lambda *_: 0


class Worker:
    """The receiving process: a vLLM model and its receiver."""

    def __init__(self, options):
        """options: those of the bench; lora: the model has a slot for adapters."""
        torch.set_num_threads(1)
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        from megatron_scalerl.engine import vllm_plugin

        vllm_plugin._keep_linear_weights()
        vllm_plugin.register()
        slot = dict(enable_lora=True, max_lora_rank=options.rank) if options.lora else {}
        llm = LLM(
            model=options.receive,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=2,
            kv_cache_memory_bytes=1 << 25,
            weight_transfer_config={"backend": VLLM_BACKEND},
            **slot,
        )
        engine = llm.llm_engine
        if options.lora:
            vllm_plugin._keep_adapter()
            engine.add_lora(LoRARequest("adapter", 1, "none"))
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.model = worker.model_runner.get_model()
        self.receiver = worker.weight_transfer_engine

    def connect(self, connection, plan):
        """Join both groups."""
        from megatron_scalerl.weights.weight_receiver import needs_of

        joined = msgspec.convert(connection, Connection)
        info = {"connection": connection, "places": [[0, 1]], "plans": [plan]}
        self.receiver.init_transfer_engine(self.receiver.parse_init_info(info))
        groups = self.receiver._groups
        self.receiver._groups = {}
        setattr(self, joined.group, groups)
        if joined.group == "whole":
            self.bare = gloo.Group(joined, 1, sender=9)
        self.plan = plans.from_json(plan)
        needs_of(self.model, plans.manifest_to_json(self.plan.parameters))  # records the live parameters
        self.live = self.model._msrl_live
        assert self.live[1] is not None, "the live parameters are not known"

    def update(self, arm, version, size):
        """Take part in one update; the digest of what the model holds, where that is part of the arm."""
        from megatron_scalerl.weights.weight_receiver import live_digest

        no_digests(arm)
        if arm == "gloo":
            self.bare.broadcast(self.buffer(size))
            return ""
        groups = getattr(self, group_of(arm))
        if arm.startswith("pack and wire"):
            for _ in frames.receive(groups, self.plan, version, [], reuse=True):
                pass
            return ""
        if arm == "packed copies":
            live = self.live[1]
            live._written = set(range(len(self.plan.parameters)))
            live.finish()
            return ""
        self.receiver._groups = groups
        self.receiver._held_version = None
        if arm == "changes" and version:
            self.receiver._held_version = version - 1
        self.model._msrl_live = self.live
        if "loader" in arm:
            self.model._msrl_live = (self.live[0], None)
        self.receiver.start_weight_update()
        self.receiver.update_weights({"version": version})
        self.receiver.finish_weight_update()
        return live_digest(self.model) if arm in VERIFIED else ""

    def buffer(self, size):
        """[size] uint8, allocated once."""
        if not hasattr(self, "_buffer"):
            self._buffer = torch.zeros(size, dtype=torch.uint8)
        return self._buffer
