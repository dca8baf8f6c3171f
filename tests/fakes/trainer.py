"""The controller's client of a trainer, without a trainer."""

import asyncio
import json
import shutil
from pathlib import Path

from worker_needs import whole_plan

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import write_commit
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.types import StepReport
from megatron_scalerl.weights.plan import SendReport

TRAIN_S, SAVE_S = 2.0, 0.5
INFO = TrainerInfo(dp_size=1, parameters=1, device="cpu", backend="gloo", logits="fp32")


class StandInTrainer:
    """Counts steps. Batches come before a step or beside it, and not beside a weight update or a checkpoint.

    Sends weights to as many engines as joined. A token of the completion c has the log-probability -c.
    """

    def __init__(self, *, send_s=0.0, fails=(), manifest=()):
        """send_s: for sending a batch. fails: what its first weight updates raise. manifest: of its weights."""
        self.version = self.prepared = 0
        self.trained = []
        self.sent_ahead = []
        """Steps whose batch was sent, or begun to be, while the trainer made the step before."""
        self.stepping = self.sending = False
        self.writing = None
        self.send_s, self.fails = send_s, list(fails)
        self.completions = {}
        """(group, index) of what each step was sent, read from its bytes."""
        self.rendezvous = FolderRendezvous(folder="/nowhere")
        self.asked = []
        """Sequences whose tokens were scored."""
        self._manifest = manifest
        self.world_size = 0
        """Of the group of the last weight update."""
        self.frozen = False
        """Its optimizer's weights do not reach the policy."""

    async def prepare(self, plan, read):
        assert [part.policy_version for part in plan.ranks] == [plan.step - 1]
        assert not self.sending and self.prepared == self.version + self.stepping, "one batch at a time"
        if self.stepping:
            self.sent_ahead.append(plan.step)
        self.sending = True
        sent = [rollout_bytes.read(data) for numbers in plan.numbers for data in await read(numbers)]
        assert [len(each.token_ids) for each in sent] == [s.tokens for part in plan.ranks for s in part.samples]
        await asyncio.sleep(self.send_s)
        self.completions[plan.step] = {(each.thinking_cut, each.seed) for each in sent}
        self.prepared = plan.step
        self.sending = False

    async def step(self, step):
        assert step == self.prepared and not self.sending
        self.stepping = True
        await asyncio.sleep(TRAIN_S)
        self.stepping, self.version = False, step
        self.trained.append(self.version)
        return StepReport(
            step=self.version,
            policy_version=self.version,
            loss=0.5,
            grad_norm=1.0,
            learning_rate=1.0,
            tokens=1,
            seconds=TRAIN_S,
            metrics={"mismatch_mean": 0.0, "entropy": 0.1},
        )

    async def load(self, path):
        state = json.loads((Path(path) / "controller.json").read_text())
        self.version = self.prepared = state["step"]
        return state

    async def save(self, path, extra, *, asynchronous=False):
        assert not self.sending and self.writing is None
        folder = Path(path)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.writing = (folder, extra, asyncio.get_running_loop().time() + SAVE_S)
        if not asynchronous:
            assert await self.finish_save(wait=True) is not None

    async def finish_save(self, *, wait):
        folder, extra, end = self.writing
        left = end - asyncio.get_running_loop().time()
        if left > 0 and not wait:
            return None
        await asyncio.sleep(max(left, 0))
        write_durably(folder / "controller.json", json.dumps(extra).encode())
        write_commit(folder, {"step": extra["step"]})
        self.writing = None
        return SAVE_S

    async def manifest(self):
        return self._manifest

    async def plan_weights(self, needs):
        return whole_plan(self._manifest)

    async def connect_weights(self, connection):
        [self.world_size] = connection.world_sizes

    async def send_weights(self, version):
        if self.fails:
            raise self.fails.pop(0)
        sizes = {"bytes": 0, "whole_bytes": 0, "most_sent": 0, "most_received": 0}
        values = ("v0",) if self.frozen else (f"v{version}",)
        return SendReport(**sizes, seconds=0.0, digests=(f"d{version}",), values=values)

    async def logprobs(self, sequences):
        return [[-float(token) for token in ids[1:]] for ids in sequences]

    async def token_scores(self, sequences):
        """Log-probabilities, and their hundredths as entropies."""
        self.asked.append(sequences)
        logprobs = await self.logprobs(sequences)
        return [logprobs, [[-value / 100 for value in of] for of in logprobs]]
