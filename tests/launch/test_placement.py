"""Ranks and engines on hosts: filled in order, no engine on two of them, and what does not fit is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_files import small_recipe
from refusals import refused

from megatron_scalerl.launch.hosts import ONE_HOST, Host, Hosts
from megatron_scalerl.launch.local_server import gpus_at
from megatron_scalerl.launch.placement import Devices, Placement, hosts_needed


def recipe(ranks, engines, each=1, transport="nccl"):
    engine = {"count": engines, "devices_per_engine": each}
    return small_recipe(trainer={"world_size": ranks}, engine=engine, weights={"transport": transport})


def several(count, slots):
    return Hosts(hosts=tuple(Host(name=f"h{number}") for number in range(count)), slots=slots, address="10.0.0.1")


def test_ranks_fill_hosts_and_engines_follow():
    made = Placement.of(recipe(10, 5, each=4), several(4, 8))
    assert [(ranks.host.name, ranks.first, ranks.count) for ranks in made.trainer] == [("h0", 0, 8), ("h1", 8, 2)]
    assert [(place.host.name, place.positions) for place in made.engines] == [
        ("h1", (2, 3, 4, 5)),
        ("h2", (0, 1, 2, 3)),
        ("h2", (4, 5, 6, 7)),
        ("h3", (0, 1, 2, 3)),
        ("h3", (4, 5, 6, 7)),
    ]


@given(ranks=st.integers(1, 40), engines=st.integers(1, 20), each=st.integers(1, 8), slots=st.integers(1, 8))
@settings(deadline=None)
def test_the_least_number_of_hosts_is_enough_and_one_less_is_not(ranks, engines, each, slots):
    asked, needed = recipe(ranks, engines, each), hosts_needed(recipe(ranks, engines, each), slots)
    if needed is None:
        assert each > slots
        with refused("too few for one engine"):
            Placement.of(asked, several(99, slots))
        return
    made = Placement.of(asked, several(needed, slots))
    used = [(rank.host.name, position) for rank in made.trainer for position in range(rank.count)]
    used += [(place.host.name, position) for place in made.engines for position in place.positions]
    assert len(set(used)) == len(used) == ranks + engines * each, "every device has one process"
    assert all(position < slots for _, position in used)
    numbers = [number for rank in made.trainer for number in range(rank.first, rank.first + rank.count)]
    assert numbers == list(range(ranks))
    if needed > 1:
        with refused(
            f"--hosts: {needed - 1} hosts with {slots} GPUs each are too few: .* take at least {needed} hosts"
        ):
            Placement.of(asked, several(needed - 1, slots))


def test_one_host_has_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-uuid,7")
    made = Placement.of(recipe(1, 3), ONE_HOST)
    assert [gpus_at(place.positions) for place in made.engines] == ["5", "GPU-uuid", "7"]
    message = "engine.count: 4 visible GPUs are too few: the engines take 4, the trainer 1 more; engine.colocate: "
    with refused(f"{message}true .* needs engine.vllm.gpu_memory_utilization and "):
        Placement.of(recipe(1, 4), ONE_HOST)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("megatron_scalerl.distributed.device.gpu_count", lambda: 2)
    assert gpus_at(Placement.of(recipe(1, 1), ONE_HOST).engines[0].positions) == "1"


def test_an_evaluation_has_the_visible_gpus_for_its_engines(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    made = Placement.of(recipe(8, 2), ONE_HOST, trainer=False)
    assert made.trainer == () and [gpus_at(place.positions) for place in made.engines] == ["4", "5"]
    with refused(r"engine\.count: 2 visible GPUs are too few: the engines take 3$"):
        Placement.of(recipe(8, 3), ONE_HOST, trainer=False)


@pytest.mark.parametrize("trainer", [True, False])
def test_a_host_without_gpus_is_refused_for_nccl(trainer, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("megatron_scalerl.distributed.device.gpu_count", lambda: 0)
    with refused("0 visible GPUs are too few: the engines take 1"):
        Placement.of(recipe(1, 1), ONE_HOST, trainer=trainer)


def colocated(ranks, engines, each=1):
    engine = {"count": engines, "devices_per_engine": each, "colocate": True}
    engine["vllm"] = {"kv_cache_memory_bytes": 1, "gpu_memory_utilization": 0.2}
    return small_recipe(trainer={"world_size": ranks}, engine=engine)


@pytest.mark.parametrize("ranks, engines, found", [(1, 1, ["4"]), (4, 2, ["4,5", "6,7"])])
def test_colocated_engines_are_on_the_trainers_devices(ranks, engines, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(["4", "5", "6", "7"][:ranks]))
    monkeypatch.setattr("megatron_scalerl.distributed.device.HAVE_GPU", True)
    asked = colocated(ranks, engines, ranks // engines)
    made = Placement.of(asked, ONE_HOST)
    assert [(rank.first, rank.count) for rank in made.trainer] == [(0, ranks)]
    assert [gpus_at(place.positions) for place in made.engines] == found
    devices = Devices.of(asked)
    assert (devices.unit, devices.trainer, devices.engine) == ("gpu_hours", ranks / 2, ranks / 2), "each once"
    with refused(r"engine\.colocate works on one host, but the run has 2"):
        Placement.of(asked, several(2, 8))
    with refused(f"{ranks} visible GPUs are too few: the engines take {2 * ranks}$"):
        Placement.of(colocated(2 * ranks, 2 * engines, ranks // engines), ONE_HOST)


@pytest.mark.parametrize("transport", ["auto", "gloo", "shm", "nccl"])
def test_gpus_are_shared_out_whatever_carries_the_weights(transport, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("megatron_scalerl.distributed.device.HAVE_GPU", True)
    monkeypatch.setattr("megatron_scalerl.distributed.device.gpu_count", lambda: 8)
    asked = recipe(4, 2, 2, transport)
    made = Placement.of(asked, ONE_HOST)
    assert [place.positions for place in made.engines] == [(4, 5), (6, 7)]
    assert Devices.of(asked).unit == "gpu_hours"
    with refused("8 visible GPUs are too few: the engines take 6, the trainer 4 more"):
        Placement.of(recipe(4, 3, 2, transport), ONE_HOST)


def test_without_gpus_one_host_has_room_for_all(caplog):
    asked = recipe(3, 9, transport="gloo")
    made = Placement.of(asked, ONE_HOST)
    assert {place.positions for place in made.engines} == {None} and len(made.engines) == 9
    assert gpus_at(None) == "" and Devices.of(asked).unit == "device_hours" and not caplog.text
    Placement.of(asked, several(3, 8))
    assert "if the hosts of the run have GPUs, set weights.transport: nccl" in caplog.text


def test_more_slots_than_this_host_has_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hosts = Hosts(hosts=(Host(name="a", here=True), Host(name="b")), slots=8, address="10.0.0.1")
    with refused("--slots: 8 is more than the 2 GPUs visible"):
        Placement.of(recipe(8, 1), hosts)
