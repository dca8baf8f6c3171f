"""What a job holds before its first charge, and between two programs of it."""

import sys

import pytest
from programs import printed

from megatron_scalerl.commands import supervise
from megatron_scalerl.processes import signals
from megatron_scalerl.processes.signals import HELD_SINCE, uncharged_from_now, uncharged_seconds

NOTE = """import os, sys
print(os.environ.get('MSRL_HELD_SINCE'), file=open(sys.argv[1], 'a'))
if len(sys.argv) > 2 and len(open(sys.argv[1]).readlines()) > 1:
    open(sys.argv[2], 'a').write('a row')
sys.exit(1)"""


@pytest.mark.parametrize(
    "ago, held", [("0", 0.0), ("40.5", 40.5), ("-9", 0.0), (None, 0.0), ("x", 0.0), ("nan", 0.0)]
)
def test_a_job_has_held_its_devices_since_its_start(ago, held, monkeypatch):
    monkeypatch.setattr(signals, "_uptime", lambda: 1000.0)
    monkeypatch.delenv(HELD_SINCE, raising=False)
    if ago is not None:
        monkeypatch.setenv(HELD_SINCE, str(1000 - float(ago)) if ago != "x" else ago)
    assert uncharged_seconds() == held


def held_from_now_in_a_job():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HELD_SINCE, "0")
        return uncharged_from_now()[HELD_SINCE]


def test_the_variable_counts_on_the_clock_of_the_job_scripts_words():
    def written():
        return float(printed("cut", "-d", " ", "-f1", "/proc/uptime"))

    before, held = written(), float(held_from_now_in_a_job())
    assert before <= held <= written()


def test_a_program_that_is_started_again_holds_since_the_end_of_the_last_one_that_charged(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_DELAY_S", 0.0)
    monkeypatch.setenv(HELD_SINCE, "12.5")
    command = [sys.executable, "-c", NOTE, str(tmp_path / "in_a_job"), str(tmp_path / "ledger.jsonl")]
    before = float(uncharged_from_now()[HELD_SINCE])
    assert supervise.supervise(command, tmp_path, restarts=2) == 1
    first, second, third = (tmp_path / "in_a_job").read_text().split()
    assert first == second == "12.5", "the first one charged nothing"
    assert before <= float(third) <= float(uncharged_from_now()[HELD_SINCE])
    monkeypatch.delenv(HELD_SINCE)
    assert supervise.supervise([*command[:3], str(tmp_path / "outside")], tmp_path, restarts=1) == 1
    assert (tmp_path / "outside").read_text().split() == ["None", "None"]
