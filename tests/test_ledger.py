"""The ledger charges devices x wall time, keeps roles apart and survives a restart."""

import json

import pytest

from megatron_scalerl.ledger import Ledger


def test_hours_by_role(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", "gpu_hours", incarnation="1.0")
    ledger.charge(1, "trainer", 16, 1800)
    ledger.charge(1, "engine", 64, 1800)
    ledger.charge(1, "validation", 32, 900)
    assert ledger.hours("trainer") == pytest.approx(8.0)
    assert ledger.axis == pytest.approx(8.0 + 32.0)
    assert ledger.hours() == pytest.approx(48.0)
    ledger.close()
    again = Ledger(tmp_path / "ledger.jsonl", "gpu_hours", incarnation="1.1")
    assert again.hours() == pytest.approx(48.0)


def test_roll_back_keeps_what_was_paid_but_off_the_axis(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", "device_hours", incarnation="a")
    for step in (1, 2, 3):
        ledger.charge(step, "trainer", 1, 3600)
    ledger.roll_back(1)
    assert ledger.axis == pytest.approx(1.0)
    assert ledger.hours("lost") == pytest.approx(2.0)
    ledger.charge(2, "trainer", 1, 3600)
    ledger.close()
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert rows[0] == {"unit": "device_hours"}
    assert [r["role"] for r in rows[1:]] == ["trainer", "lost", "lost", "trainer"]
    assert Ledger(tmp_path / "ledger.jsonl", "device_hours", incarnation="b").axis == pytest.approx(2.0)


def test_another_unit_is_refused(tmp_path):
    Ledger(tmp_path / "ledger.jsonl", "device_hours", incarnation="a").close()
    with pytest.raises(ValueError, match="expected unit gpu_hours, found device_hours"):
        Ledger(tmp_path / "ledger.jsonl", "gpu_hours", incarnation="a")
