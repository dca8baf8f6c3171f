"""The server of the list of runs: the same guard as of one run's page, what changes, and the page of each run."""

import asyncio
import json

import pytest
from json_lines import append
from page_runs import TOKEN, answers, served, step_record, write_page_run, write_plain_run

from megatron_scalerl.__main__ import main
from megatron_scalerl.page import server as server_module
from megatron_scalerl.page.server import PageServer, RunsPage
from megatron_scalerl.page.static_page import write_runs_page


@pytest.fixture
def folder(tmp_path):
    write_page_run(tmp_path / "runs" / "hostile", validations=6)
    write_plain_run(tmp_path / "runs" / "study" / "runs" / "plain", loss={"name": "dapo"})
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "recipe.yaml").write_text("name: [")
    return tmp_path / "runs"


def test_the_list_and_the_page_of_each_run(folder):
    broken, hostile = 0, 1
    since = {**TOKEN, "since": "0"}
    page, data, run, groups, bad, none = answers(
        PageServer(RunsPage(folder)),
        [
            ("/", TOKEN),
            ("/api/runs", since),
            (f"/run/{hostile}/", TOKEN),
            (f"/run/{hostile}/api/groups", {**TOKEN, "step": "2"}),
            (f"/run/{broken}/", TOKEN),
            ("/run/77/", TOKEN),
        ],
    )
    assert page[0] == 200 and "default-src 'none'" in page[1]["Content-Security-Policy"]
    policy = page[1]["Content-Security-Policy"]
    assert policy.split("; frame")[0].replace("'", "&#39;") in page[2] and "unsafe" not in policy
    rows = json.loads(data[2])["runs"]
    assert [row["name"] for row in rows.values()] == ["broken", "hostile", "study/runs/plain"]
    assert run[0] == 200 and '"home":"../../"' in run[2]
    assert [each["id"] for each in json.loads(groups[2])["groups"]] == [2, 3]
    assert bad[0] == 422 and "recipe.yaml: line 1: not valid YAML" in json.loads(bad[2])["error"]
    assert none[0] == 404
    for _, headers, _ in (page, data, run, groups, bad, none):
        assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/run/-1/", "/run/1e9/", "/run/²/", "/run/9999999999999/", "/run/1/../../etc"])
def test_other_numbers_are_not_found(folder, path):
    [(status, _, text)] = answers(PageServer(RunsPage(folder)), [(path, TOKEN)])
    assert status == 404 and json.loads(text) == {"error": "Not Found"}


async def test_a_page_hears_of_forecasts_and_of_new_steps(folder):
    async def row_where(session, token, said):
        while True:
            async with session.get("/api/runs", params={"token": token, "since": "0"}) as answer:
                [row] = [r for r in (await answer.json())["runs"].values() if r["name"].endswith("plain")]
            if said(row):
                return row
            await asyncio.sleep(0.02)

    async with served(PageServer(RunsPage(folder))) as (server, session):
        await row_where(session, server.token, lambda row: row["fit"])
        async with session.get("/api/events", params={"token": server.token}) as stream:
            assert (await stream.content.readline()) == b"event: change\n"
            append(folder / "study" / "runs" / "plain" / "metrics.jsonl", step_record(44))
            await row_where(session, server.token, lambda row: row["step"] == 44)


async def test_few_pages_of_runs_are_followed_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_PAGES", 2)
    for name in "abc":
        write_plain_run(tmp_path / name)

    async with served(PageServer(RunsPage(tmp_path))) as (server, session):
        for number in (0, 1, 0, 2):
            async with session.get(f"/run/{number}/", params={"token": server.token}) as answer:
                assert answer.status == 200
        assert list(server.page.pages) == [0, 2]


def test_a_damaged_run_opens_with_a_line(folder):
    """Its page shows what can be read, as that of `watch RUN`."""
    (folder / "hostile" / "ledger.jsonl").write_text("damaged\n")
    page, data = answers(
        PageServer(RunsPage(folder)),
        [("/run/1/", TOKEN), ("/run/1/api/data", {**TOKEN, "since": "0", "generation": "0"})],
    )
    assert page[0] == 200 and json.loads(data[2])["steps"]["step"] == [1, 2, 3]


def test_the_list_as_a_file(folder, tmp_path, capsys):
    assert write_runs_page(folder, tmp_path / "runs.html") == 3
    text = (tmp_path / "runs.html").read_text()
    assert "connect-src &#39;none&#39;" in text and '"pending":true' not in text
    assert (tmp_path / "runs.html").stat().st_mode & 0o077 == 0
    assert main(["report", str(folder), "--html", str(tmp_path / "again.html")]) == 0
    assert "with 3 runs" in capsys.readouterr().out
