"""A worker's receiver and a sender over gloo, with a model of one parameter: what it holds, and what it refuses."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest
import torch
from worker_needs import whole_plan

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.weights import weight_receiver
from megatron_scalerl.weights.plan import Connection, manifest_of, manifest_to_json, to_json
from megatron_scalerl.weights.transport import make_sender
from megatron_scalerl.weights.weight_receiver import UpdateInfo, WeightReceiver, live_digest, needs_of

MANIFEST = manifest_of([("norm", "float32", (4096,))])
PLAN = whole_plan(MANIFEST)


class Model(torch.nn.Module):
    """One layer, and a loader like vLLM's."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(4096), requires_grad=False)

    def load_weights(self, given):
        for _, weight in given:
            self.norm.data.copy_(weight)


class Pair:
    """A sender and a receiver. `values`: the sender's."""

    def __init__(self, rendezvous, **connection):
        self.model, self.values = Model(), torch.randn(4096)
        self.receiver = object.__new__(WeightReceiver)  # without the configuration of an engine
        self.receiver.model, self.receiver.device = self.model, torch.device("cpu")
        self.receiver.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
        self.receiver.digest, self.receiver._groups, self.receiver._plan = "", {}, None
        self._rendezvous, self._options = rendezvous, connection
        needs_of(self.model, manifest_to_json(MANIFEST))

    def connect(self):
        connection = Connection(
            backend="gloo",
            rendezvous=self._rendezvous,
            group=uuid.uuid4().hex,
            world_sizes=(2,),
            bucket_mib=1,
            timeout_s=240,
            connect_timeout_s=240,
            **self._options,
        )
        info = {"connection": msgspec.to_builtins(connection), "places": [[0, 1]], "plans": [to_json(PLAN)]}
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(make_sender, connection)
            self.receiver.init_transfer_engine(weight_receiver.ConnectInfo(**info))
            self.sender = making.result()

    def update(self, version):
        """What the receiver raised, or that it has other values than its sender; None if it took the update."""
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.sender.send, PLAN, lambda _: self.values, version)
            try:
                self.receiver.receive_weights(UpdateInfo(version=version))
            except RuntimeError as error:
                return error
            sending.result()
        equal = torch.equal(self.model.norm, self.values)
        assert self.receiver.digest and equal == (live_digest(self.model) == f"{self.sender.values[0]:016x}")
        return None if equal else "other values"

    def step(self):
        self.values[7] += 1.0


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(weight_receiver, "get_world_group", lambda: SimpleNamespace(rank=0))
    with private_folder() as rendezvous:
        yield lambda **connection: Pair(rendezvous, **connection)


def test_a_value_that_no_update_changed_is_noticed_by_the_next_one_and_repaired_by_a_whole_one(pair):
    of = pair(deltas="absolute")
    of.connect()
    for version in (1, 2):  # whole, changes
        assert of.update(version) is None
        of.step()
    of.model.norm.view(torch.int32)[99] ^= 1 << 9
    assert of.update(3) == "other values" and of.sender.bytes < 100
    of.connect()
    assert of.update(3) is None


def test_an_update_without_a_connection_is_refused(pair):
    with pytest.raises(RuntimeError, match="no connection to the trainer"):
        pair().receiver.receive_weights(UpdateInfo(version=1))
