"""Weight updates of a run: medians by kind."""

import pytest
from report_runs import printed_report, write_run

from megatron_scalerl.page.report import updates_of


def record(**changes):
    return {
        "weight_bytes": 16e9,
        "weight_whole_bytes": 16e9,
        "weight_most_sent_bytes": 4e9,
        "weight_most_received_bytes": 8e9,
        "weight_gb_per_s": 40.0,
        "weight_pause_seconds": 0.1,
        "weight_update_seconds": 0.4,
        "engine_paused_seconds": 0.6,
        "publish_seconds": 0.7,
        **changes,
    }


def test_medians_of_whole_updates_and_of_those_of_changes():
    changes = {"weight_bytes": 16e7, "weight_most_received_bytes": 8e7, "weight_most_sent_bytes": 4e7}
    small = [record(**changes, weight_update_seconds=s, weights_changed=0.01) for s in (0.01, 0.03, 0.02)]
    whole = [record(weight_connect_seconds=2.0), record(weight_update_seconds=0.8), record(weight_update_seconds=0.5)]
    found, note = updates_of([*whole, {"step": 4}, *small])
    assert note == "Medians over the 6 weight updates in metrics.jsonl."
    assert found.columns == ("", "whole", "of changes")
    shown = """
        updates|3|3
        bytes of all senders|16 GB|160 MB
        most sent by a rank|4 GB|40 MB
        most received by a worker|8 GB|80 MB
        elements that changed|–|1 %
        GB/s|40|40
        phase update|0.5 s|0.02 s
        phase connect|2 s|–
        engines paused|0.6 s|0.6 s
    """
    assert {line.strip() for line in shown.strip().splitlines()} <= {"|".join(row) for row in found.rows}
    assert updates_of([{"step": 4}]) is None


@pytest.mark.slow
def test_a_damaged_line_of_the_metrics_costs_the_table_alone(tmp_path):
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step":1\n{"step":2}\n')
    text = printed_report(tmp_path)
    assert "metrics.jsonl" in text and "error of the forecast" in text
