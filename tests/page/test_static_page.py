"""The page as one file: what is in it, how large it may be, and that data cannot leave its place."""

import json
import re
import shutil

import pytest
from json_lines import append
from page_runs import HOSTILE, write_page_run

from megatron_scalerl.__main__ import main
from megatron_scalerl.page import static_page
from megatron_scalerl.page.render import escaped_json


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_page_run(tmp_path_factory.mktemp("static") / "run", validations=6)


def data_of(text):
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_data_cannot_end_its_element():
    text = escaped_json({"text": ["</script><!--&", "\u2028\u2029"]})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"text": ["</script><!--&", "\u2028\u2029"]}


def test_the_command_writes_a_file_that_asks_for_nothing(run, tmp_path, capsys):
    path = tmp_path / "new/page.html"
    assert main(["report", str(run), "--html", str(path), "--group", "1"]) == 0
    assert capsys.readouterr().out == f"page: {path}, with 6 groups\n"
    text = path.read_text()
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", markup)
    assert "connect-src &#39;none&#39;" in text and "default-src &#39;none&#39;" in text
    assert "window.broken" in text and "<script>window.broken" not in text and "<img src=x" not in text
    data = data_of(text)
    assert data["groups"][0]["id"] == 1  # the named one first
    assert data["groups"][0]["completions"][0]["content"]["pieces"][0] == HOSTILE[0]
    assert data["forecasts"] and data["live"] is False
    assert len(text.encode()) < static_page.MOST_BYTES


@pytest.mark.slow
def test_groups_that_do_not_fit_are_counted(run, tmp_path, monkeypatch):
    monkeypatch.setattr(static_page, "MOST_BYTES", 600_000)  # less than the group with a line of 1 MB
    path = tmp_path / "page.html"
    groups, left_out = static_page.write_page(run, path)
    assert (groups, left_out) == (5, 1) and len(path.read_bytes()) < 600_000
    assert data_of(path.read_text())["missing_groups"] == 1


def test_groups_that_retention_deleted_are_not_chosen_and_named_ones_are_refused(tmp_path):
    run = write_page_run(tmp_path / "run", validations=6)
    for segment in (run / "rollouts").glob("segment-*.bin"):
        segment.unlink()
    path = tmp_path / "page.html"
    assert static_page.write_page(run, path) == (0, 0)
    with pytest.raises(ValueError, match=r"group 1 is deleted; checkpoint.rollouts: keep keeps all"):
        static_page.write_page(run, path, group_ids=[1])


def test_a_damaged_group_is_left_out(tmp_path):
    run = write_page_run(tmp_path / "run", validations=6)
    [segment] = (run / "rollouts").glob("segment-*.bin")
    segment.write_bytes(segment.read_bytes()[:-40])  # of the last group
    assert static_page.write_page(run, tmp_path / "page.html") == (5, 1)


def test_a_damaged_line_is_said_and_the_rest_is_drawn(tmp_path, capsys):
    run, path = write_page_run(tmp_path / "run", validations=6), tmp_path / "page.html"
    lines = {"metrics": "damaged", "validation": '{"step": "x"}', "ledger": "[]", "journal": "{}", "evaluation": "[]"}
    for name, line in lines.items():
        append(run / f"{name}.jsonl", line + "\n")
    assert main(["report", str(run), "--html", str(path)]) == 0
    error, data = capsys.readouterr().err, data_of(path.read_text())
    assert len(data["header"]["damage"]) == 5
    for name, line in zip(("metrics", "ledger", "validation", "evaluation", "journal"), data["header"]["damage"]):
        assert line.startswith(f"{name}.jsonl byte ") and line in error
    assert data["steps"]["step"] == [1, 2, 3] and len(data["forecasts"]) == 3 and len(data["groups"]) == 6


def test_the_file_is_for_its_owner_and_replaces_a_link(run, tmp_path):
    path, other = tmp_path / "page.html", tmp_path / "other"
    other.write_text("kept")
    path.symlink_to(other)
    static_page.write_page(run, path)
    assert path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink() and other.read_text() == "kept"


def test_a_run_without_completions_has_a_page(run, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("recipe.yaml", "metrics.jsonl"):
        (bare / name).write_text((run / name).read_text())
    assert static_page.write_page(bare, tmp_path / "page.html") == (0, 0)
    assert data_of((tmp_path / "page.html").read_text())["steps"]["step"] == [1, 2, 3]


def test_the_numbers_as_json_and_the_cost_in_money(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run")
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write("cost: {price_per_device_hour: 2.5, currency: EUR}\n")
    assert main(["report", str(folder), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    total = sum(row["hours"] for row in found["ledger"])
    assert found["cost"] == {"price_per_device_hour": 2.5, "currency": "EUR"}
    assert any(f"in total, {2.5 * total:,.2f} EUR: " in line for line in found["header"]["lines"])
    assert found["gain"]["last"] - found["gain"]["first"] > 0 and len(found["forecasts"]) > 1
