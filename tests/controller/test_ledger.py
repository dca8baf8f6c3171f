"""The ledger charges devices x wall time by role and batch, and survives a crash."""

import asyncio

import pytest
from fakes.clock import StandInClock
from waiting import passes

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.run_folder import ResumePoint
from megatron_scalerl.launch.placement import Devices


async def test_what_a_job_held_is_on_record_at_once(tmp_path):
    """So that a controller that fails before its first charge has charged the time since the job's start."""

    meter, _ = meter_of(tmp_path, engine=1, since=-3600.0)
    beating = asyncio.create_task(meter.beat())
    await passes(1)
    beating.cancel()
    assert open_ledger(tmp_path, "b").hours("lost") == pytest.approx(3.0)


def open_ledger(tmp_path, incarnation="a"):
    return Ledger(tmp_path / "ledger.jsonl", "gpu_hours", incarnation=incarnation)


def meter_of(tmp_path, *, trainer=2, engine=6, since=None):
    """(a meter of these devices, its clock)."""
    clock = StandInClock()
    devices = Devices(unit="gpu_hours", trainer=trainer, engine=engine)
    return Meter(open_ledger(tmp_path), devices, ResumePoint(), since=since, clock=clock), clock


def charge(ledger, batch, *, seconds=3600, phase="train", **devices):
    ledger.charge(batch=batch, step=batch, phase=phase, seconds=seconds, devices=devices.items())


def test_hours_by_role(tmp_path):
    ledger = open_ledger(tmp_path)
    charge(ledger, 1, seconds=1800, validation=16, engine=64, trainer=16)
    assert ledger.hours("trainer") == pytest.approx(8.0)
    assert ledger.hours("trainer", "engine") == pytest.approx(8.0 + 32.0)
    assert ledger.hours() == pytest.approx(48.0)
    ledger.close()
    assert open_ledger(tmp_path).hours() == pytest.approx(48.0)


def test_a_batch_keeps_its_charges_after_a_restart(tmp_path):
    ledger = open_ledger(tmp_path)
    for batch in (1, 2, 3):
        charge(ledger, batch, phase="produce", engine=2, trainer=1)
        charge(ledger, batch, engine=2, trainer=1)
    charge(ledger, 4, phase="produce", engine=2, trainer=1)
    ledger.close()
    again = open_ledger(tmp_path, "b")
    assert [again.axis_at(n) for n in (0, 1, 2, 3, 4)] == pytest.approx([0, 6, 12, 18, 21])
    assert [again.is_charged(n) for n in (1, 3, 4)] == [True, True, False]


def test_an_incomplete_window_and_heartbeats_are_lost(tmp_path):
    """After a crash: a window whose last row is missing, and the time until the last heartbeat."""
    ledger = open_ledger(tmp_path)
    charge(ledger, 1, engine=2, trainer=1)
    charge(ledger, 2, engine=2)
    ledger.close()
    again = open_ledger(tmp_path)
    assert again.hours("trainer", "engine") == pytest.approx(3.0) and again.hours("lost") == pytest.approx(2.0)
    assert not again.is_charged(2)
    for seconds in (600, 1200, 1800):
        again.heartbeat(batch=1, step=1, devices=3, seconds=seconds)
    again.close()
    third = open_ledger(tmp_path)
    assert third.hours("lost") == pytest.approx(2.0 + 1.5)
    third.close()
    assert open_ledger(tmp_path).hours("lost") == pytest.approx(3.5), "charged once"
    assert not any("heartbeat" in r for r in read_jsonl(tmp_path / "ledger.jsonl"))


BEAT = {"batch": 0, "step": 0, "devices": 3, "seconds": 1800}


@pytest.mark.parametrize(
    "beat, devices, hours",
    [
        (True, {"engine": 2, "trainer": 1}, {"engine": 2, "trainer": 1}),  # the charge includes it
        (True, {}, {"lost": 1.5}),  # before the first charge
        (False, {"engine": 2, "validation": 1, "teacher": 1}, {"lost": 4}),  # a first window without its end
    ],
)
def test_a_heartbeat_and_a_first_window(tmp_path, beat, devices, hours):
    ledger = open_ledger(tmp_path)
    if beat:
        ledger.heartbeat(**BEAT)
    if devices:
        charge(ledger, 1, **devices)
    ledger.close()
    again = open_ledger(tmp_path)
    assert {role: again.hours(role) for role in hours} == pytest.approx(hours)
    assert again.hours() == pytest.approx(sum(hours.values()))


def test_time_lost_in_a_crash_belongs_to_the_attempt_of_the_last_charge(tmp_path):
    for incarnation, devices in (("a", {"engine": 2, "trainer": 1}), ("b", {"startup": 3})):
        ledger = open_ledger(tmp_path, incarnation)
        charge(ledger, 1, **devices)
    ledger.heartbeat(**BEAT)
    ledger.close()
    open_ledger(tmp_path, "c").close()
    lost = [r for r in read_jsonl(tmp_path / "ledger.jsonl")[1:] if r["role"] == "lost"]
    assert [(r["incarnation"], r["phase"], r["hours"]) for r in lost] == [("b", "crash", 1.5)]


def test_a_batch_is_charged_once_its_training_is(tmp_path):
    ledger = open_ledger(tmp_path)
    for phase, charged in (("startup", False), ("produce", False), ("validate", False), ("train", True)):
        charge(ledger, 1, phase=phase, engine=2, trainer=1)
        assert ledger.is_charged(1) is charged, phase
    charge(ledger, 2, phase="replay", trainer=1)
    assert not ledger.is_charged(2)


def test_rows_are_exact_to_the_microsecond(tmp_path):
    ledger = open_ledger(tmp_path)
    charge(ledger, 1, seconds=1.23456789, trainer=2 / 3)
    ledger.heartbeat(**BEAT | {"seconds": 2.34567891})
    ledger.close()
    row, heartbeat = read_jsonl(tmp_path / "ledger.jsonl")[1:]
    assert (row["seconds"], row["devices"], heartbeat["heartbeat"]) == (1.234568, 0.666667, 2.345679)


def test_another_unit_is_refused(tmp_path):
    ledger = open_ledger(tmp_path)
    charge(ledger, 1, trainer=1)
    ledger.close()
    with pytest.raises(ValueError, match=r"ledger.jsonl: .* gpu_hours .* device_hours"):
        Ledger(tmp_path / "ledger.jsonl", "device_hours", incarnation="a")


def test_a_validation_takes_its_share_of_the_window(tmp_path):
    meter, clock = meter_of(tmp_path)
    meter.count_training(300)
    meter.count_measured("validation", 100)
    meter.pinned_seconds = 900
    clock.now = 3600
    done = meter.charge_train(0, 1)
    assert (done.seconds, done.tokens) == (3600, 400)
    # a quarter of the tokens and a quarter of the trainer's time
    assert meter.ledger.hours("engine") == pytest.approx(4.5)
    assert meter.ledger.hours("trainer") == pytest.approx(1.5)
    assert meter.ledger.hours("validation") == pytest.approx(2.0)


def test_the_time_between_two_attempts_of_a_process_is_charged(tmp_path):
    """Its devices are held while the second one reads checkpoint and journal."""
    meter, clock = meter_of(tmp_path, since=1200.0)
    clock.now = 3000.0
    meter.charge_startup()
    clock.now = 4800.0
    meter.charge_crash()
    assert meter.ledger.hours("startup") == pytest.approx(4.0)
    assert meter.ledger.hours("lost") == pytest.approx(4.0)


def test_engines_are_charged_from_when_they_join_until_they_are_gone(tmp_path):
    meter, clock = meter_of(tmp_path, trainer=1, engine=2)
    clock.now = 1800.0
    meter.hold_engine_devices(4)
    clock.now = 3600.0
    meter.charge_produce(0)  # 2 for half an hour, 4 for the other half
    assert meter.ledger.hours("engine") == pytest.approx(3.0)
    clock.now = 7200.0
    meter.charge_train(0, 1)
    assert meter.ledger.hours("engine") == pytest.approx(7.0) and meter.ledger.hours("trainer") == pytest.approx(2.0)
    clock.now = 9000.0
    meter.hold_engine_devices(0)
    clock.now = 10800.0
    meter.charge_crash()
    assert meter.ledger.hours("lost") == pytest.approx(1.0 + 2.0)
