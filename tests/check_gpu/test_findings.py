import json

import pytest

from megatron_scalerl.check_gpu.findings import Finding, Recorder, read_findings


@pytest.fixture
def record(tmp_path):
    return Recorder("part", tmp_path / "findings.jsonl")


def found(record):
    return {finding.check: finding for finding in read_findings(record._path)}


def test_a_bound_decides(record):
    record.measured("below", 1.0, "s", at_most=1.0)
    record.measured("above", 1.001, "s", at_most=1.0)
    record.measured("enough", 0.75, "share", at_least=0.75)
    record.measured("short", 0.749, "share", at_least=0.75)
    record.measured("free", 3.0, "s")
    assert [f.status for f in found(record).values()] == ["passed", "failed", "passed", "failed", "measured"]
    assert found(record)["part/short"].bound() == ">= 0.75" and found(record)["part/free"].bound() == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bound", [{}, {"at_most": 1.0}, {"at_least": -1.0}])
def test_nonfinite_values_fail_every_bound(record, value, bound):
    record.measured("figure", value, "s", **bound)
    [finding] = found(record).values()
    assert finding.status == "failed" and finding.value is None and "finite" in finding.detail


def test_a_goal_is_missed_and_not_failed(record):
    record.measured("slow", 2.0, "s", at_most=1.0, goal=True)
    record.measured("fast", 1.0, "s", at_most=1.0, goal=True)
    record.measured("broken", float("nan"), "s", at_most=1.0, goal=True)
    assert [f.status for f in found(record).values()] == ["missed", "passed", "failed"]


def test_nonfinite_data_are_null_in_json(record):
    record.holds("check", True, data={"a": [float("nan"), (1, float("inf"))]})
    assert found(record)["part/check"].data == {"a": [None, [1, None]]}


def test_an_exception_fails_its_check_and_no_other(record):
    with record.guarded("broken"):
        raise RuntimeError("two\nlines")
    with record.guarded("fine"):
        record.holds("fine", True)
    assert found(record)["part/broken"].detail == "RuntimeError: two lines"
    assert found(record)["part/fine"].status == "passed"


def test_interrupts_are_not_swallowed(record):
    with pytest.raises(KeyboardInterrupt), record.guarded("check"):
        raise KeyboardInterrupt


def test_a_truncated_last_line_is_ignored(record):
    record.holds("whole", True)
    with open(record._path, "a") as file:
        file.write('{"check": "part/torn", "st')
    assert list(found(record)) == ["part/whole"]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_of_two_reports_of_a_check_the_failure_stays(record, order):
    for ok in order:
        record.holds("twice", ok)
    assert found(record)["part/twice"].status == "failed"


def test_the_file_is_plain_json(record):
    record.measured("figure", 1.5, "s", data={"more": [1, 2]})
    line = json.loads(record._path.read_text())
    assert Finding(**line).data == {"more": [1, 2]}
