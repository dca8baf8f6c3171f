import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_scalerl.check_gpu.findings import Finding
from megatron_scalerl.check_gpu.page import PAGE, page
from megatron_scalerl.check_gpu.report import NAME, Report, combined, put_aside, read_report, write_report
from megatron_scalerl.check_gpu.runner import PartResult
from megatron_scalerl.check_gpu.table import PARTS, ROWS, verdicts

H100 = {"gpus": ["NVIDIA H100"], "driver": "580", "cuda_version": "13.0", "cpu": "c", "cores": 16, "python": "3.12"}
DECLARED = {f"{part.name}/{check}" for part in PARTS for check in part.checks}


def result(name, statuses, *, started="2026-01-01T00:00:00+00:00", machine=H100, **data):
    findings = tuple(Finding(check=f"{name}/{check}", status=status, data=data) for check, status in statuses.items())
    return PartResult(
        name=name, started=started, seconds=1.0, limit_s=9.0, end="", machine=machine, findings=findings
    )


def report(*parts, **changes):
    settings = {"version": "0.1", "command": "c", "size": "full", "gpus": ("NVIDIA H100",), "parts": parts}
    return Report(**{**settings, **changes})


def test_every_check_of_a_row_is_declared_by_a_part():
    assert {check for row in ROWS for check in row.checks} <= DECLARED


def test_a_row_is_proved_by_all_of_its_checks_and_nothing_less():
    row = next(row for row in ROWS if row.component.startswith("losses"))
    proved = dict.fromkeys(row.checks, "passed")

    def verdict(status):
        return next(v for v in verdicts(status) if v.component == row.component)

    assert verdict(proved).proved
    for check in row.checks:
        assert verdict({**proved, check: "failed"}).failed == (check,)
        assert verdict({**proved, check: "not run"}).missing == (check,)
        assert not verdict({k: v for k, v in proved.items() if k != check}).proved


def test_a_rehearsal_verifies_nothing():
    all_passed = [result(part.name, dict.fromkeys(part.checks, "passed")) for part in PARTS]
    assert all(row.proved for row in report(*all_passed).rows())
    rehearsed = [result(part.name, dict.fromkeys(part.checks, "passed"), machine={"gpus": []}) for part in PARTS]
    assert not any(row.proved for row in report(*rehearsed, size="toy", gpus=()).rows())
    assert "verifies nothing" in page(report(*rehearsed, size="toy", gpus=()))


def test_a_report_comes_back_as_it_was_written(tmp_path):
    whole = report(result("wire", {"digest": "passed", "send": "failed"}, dense_utilization=0.4))
    write_report(whole, tmp_path)
    assert read_report(tmp_path / NAME) == whole
    assert json.loads((tmp_path / NAME).read_text())["gpus"] == ["NVIDIA H100"]
    assert "wire/send" in (tmp_path / PAGE).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([NAME, PAGE])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "parts": [{"a": 3}]}', "null"])
def test_invalid_reports_are_rejected_in_one_line(tmp_path, content):
    path = tmp_path / NAME
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{path}: expected a report of check-gpu, found .*$"):
        read_report(path)


def test_a_report_of_another_format_is_rejected(tmp_path):
    path = tmp_path / NAME
    path.write_text('{"format": 9}')
    with pytest.raises(ValueError, match="format: expected 1, found 9"):
        read_report(path)


def test_parts_are_replaced_by_later_ones_only(tmp_path):
    old = report(result("wire", {"digest": "failed"}), result("logits", {"benchmark": "passed"}))
    new = report(result("wire", {"digest": "passed"}, started="2026-01-02T00:00:00+00:00"), command="d")
    for order in ([old, new], [new, old]):
        both = combined([(Path(str(i)), r) for i, r in enumerate(order)])
        assert {f.check: f.status for f in both.findings} == {"logits/benchmark": "passed", "wire/digest": "passed"}
        assert [part.name for part in both.parts] == ["logits", "wire"]


@pytest.mark.parametrize(
    ("change", "key"),
    [({"version": "0.2"}, "version"), ({"size": "toy"}, "size"), ({"gpus": ("NVIDIA H200",)}, "gpus")],
)
def test_reports_of_different_things_do_not_mix(change, key):
    one = report(result("wire", {"digest": "passed"}))
    with pytest.raises(ValueError, match=f"^b: {key}: expected .* as in a, found .*"):
        combined([(Path("a"), one), (Path("b"), replace(one, **change))])


def test_constants_of_the_planner_are_medians_and_memory_is_the_largest():
    parts = [
        result("shapes-plain", {"1b MFU": "measured"}, dense_utilization=0.2, runtime_gib=2.0, x=1),
        result("loop", {"eager": "measured"}, dense_utilization=0.4, runtime_gib=3.0),
        result("engine", {"start": "failed"}, engine_step_ms=99.0),
    ]
    assert report(*parts).assumptions() == {"dense_utilization": pytest.approx(0.3), "runtime_gib": 3.0}
    assert report(*parts).layers == "plain"


def test_constants_in_the_report_of_an_earlier_version_have_their_new_names():
    old = report(result("shapes-plain", {"1b MFU": "measured"}, dense_utilisation=0.2))
    assert old.assumptions() == {"dense_utilization": 0.2} and old.layers == "plain"


def test_constants_of_two_kinds_of_layers_do_not_mix():
    parts = [
        result("shapes-plain", {"1b MFU": "measured"}, dense_utilization=0.2),
        result("shapes-te", {"1b MFU": "measured"}, dense_utilization=0.4),
    ]
    assert report(*parts).assumptions() == {"dense_utilization": 0.4} and report(*parts).layers == "te"
    failed = result("shapes-te", {"1b MFU": "failed"}, dense_utilization=0.4)
    assert report(parts[0], failed).assumptions() == {"dense_utilization": 0.2}
    assert report(result("wire", {"digest": "passed"})).layers is None


def test_a_failure_shows_in_the_page_and_a_bar_does_not_break_its_table():
    bad = PartResult(
        name="wire",
        started="t",
        seconds=1.0,
        limit_s=2.0,
        end="exit code 1: a | b",
        machine=H100,
        findings=(Finding(check="wire/digest", status="failed", value=2.0, unit="s", target=1.0, detail="x | y"),),
    )
    text = page(report(bad))
    assert "| wire/digest | 2 s | <= 1 | **failed** | x \\| y |" in text and "* wire: exit code 1" in text
    assert report(bad).failures == ["wire", "wire/digest"]


def test_reports_of_machines_with_more_or_fewer_gpus_of_a_kind_combine():
    two = report(result("wire", {"digest": "passed"}), gpus=("NVIDIA H100",) * 2)
    assert combined([(Path("a"), report()), (Path("b"), two)]).findings


def test_a_missed_target_is_no_failure_and_proves_nothing():
    row = next(row for row in ROWS if row.component.startswith("speed"))
    logits = {check.split("/")[1]: "passed" for check in row.checks}
    found = report(result("logits", logits | {"GEMM share": "missed"}))
    assert found.failures == [] and "1 targets missed" in page(found)
    [judged] = [v for v in found.rows() if v.component == row.component]
    assert not judged.proved and judged.failed == ("logits/GEMM share",)


def test_the_report_does_not_contain_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-node-17")
    told = result("wire", {"digest": "passed"}, host=socket.gethostname())
    write_report(report(told, command="check-gpu --out /home/somebody/x"), tmp_path)
    assert all("somebody" not in (tmp_path / name).read_text() for name in (NAME, PAGE))
    assert all(socket.gethostname() not in (tmp_path / name).read_text() for name in (NAME, PAGE))
    assert "~/x" in (tmp_path / PAGE).read_text()


def test_a_report_of_something_else_is_renamed_and_kept(tmp_path):
    for number in (1, 2):
        write_report(report(version=str(number)), tmp_path)
        assert read_report(put_aside(tmp_path)).version == str(number)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "gpu_report.1.json",
        "gpu_report.1.md",
        "gpu_report.2.json",
        "gpu_report.2.md",
    ]


def test_an_unknown_part_is_reported_with_its_file(tmp_path):
    write_report(report(result("wire", {"digest": "passed"})), tmp_path)
    text = (tmp_path / NAME).read_text().replace('"name": "wire"', '"name": "wires"')
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path / NAME}: parts: expected some of .*, found 'wires'$"):
        read_report(tmp_path / NAME)
