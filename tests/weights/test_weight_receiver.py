"""A worker's receiver and a sender over gloo, with a model of one parameter: what it holds, and what it refuses."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest
import torch

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.weights import weight_receiver
from megatron_scalerl.weights.plan import Connection, manifest_of, manifest_to_json, to_json, whole
from megatron_scalerl.weights.transport import make_sender
from megatron_scalerl.weights.weight_receiver import UpdateInfo, WeightReceiver, live_digest, needs_of

MANIFEST = manifest_of([("norm", "float32", (4096,))])
PLAN = whole(MANIFEST)


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
        self.receiver.digest, self.receiver._groups, self.receiver._staged = "", {}, None
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

    def update(self, version, *, staged=False):
        """What the receiver raised, or that it has other values than its sender; None if it took the update."""
        with ThreadPoolExecutor(1) as pool:
            if staged:
                self.receiver.stage(version)
            sending = pool.submit(self.sender.send, PLAN, lambda _: self.values, version)
            if staged:
                sending.result()
            try:
                self.receiver.receive_weights(UpdateInfo(version=version, staged=staged))
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


@pytest.mark.parametrize("staged", [False, True], ids=["streamed", "staged"])
def test_a_value_that_no_update_changed_is_noticed_by_the_next_one_and_repaired_by_a_whole_one(pair, staged):
    of = pair(deltas="absolute")
    of.connect()
    for version in (1, 2):  # whole, changes
        assert of.update(version, staged=staged) is None
        of.step()
    of.model.norm.view(torch.int32)[99] ^= 1 << 9
    assert of.update(3, staged=staged) == "other values" and of.sender.bytes < 100
    of.connect()
    assert of.update(3, staged=staged) is None


def test_staged_and_streamed_updates_follow_each_other(pair):
    of = pair(deltas="absolute")
    of.connect()
    for version, staged in enumerate((True, False, True, True, False, True)):
        assert of.update(version, staged=staged) is None
        of.step()


def test_the_values_change_only_once_the_update_is_written(pair):
    of = pair()
    of.connect()
    assert of.update(1) is None
    before = of.model.norm.clone()
    of.step()
    of.receiver.stage(2)
    of.sender.send(PLAN, lambda _: of.values, 2)
    while (state := of.receiver.staged()) is None:
        pass
    assert state == "" and torch.equal(of.model.norm, before)
    with pytest.raises(RuntimeError, match=r"version 3 .* version 2"):
        of.receiver.stage(3)
    of.receiver.receive_weights(UpdateInfo(version=2, staged=True))
    assert torch.equal(of.model.norm, of.values)


def test_an_update_that_was_not_staged_is_refused(pair):
    of = pair()
    assert of.receiver.staged() == "no weight update is staged"
    of.connect()
    with pytest.raises(RuntimeError, match=r"version 1 .* no version"):
        of.receiver.receive_weights(UpdateInfo(version=1, staged=True))
    of.receiver.stage(2)
    of.sender.send(PLAN, lambda _: of.values, 2)
    with pytest.raises(RuntimeError, match=r"version 1 .* version 2"):
        of.receiver.receive_weights(UpdateInfo(version=1, staged=True))
    of.receiver.shutdown()
    with pytest.raises(RuntimeError, match="no connection to the trainer"):
        of.receiver.stage(3)


def test_a_connection_discards_what_is_staged(pair):
    of = pair()
    of.connect()
    of.receiver.stage(1)
    of.connect()
    assert of.receiver.staged() == "no weight update is staged"
    assert of.update(1) is None
