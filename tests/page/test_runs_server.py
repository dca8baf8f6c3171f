"""The server of the list of runs: its rows, new runs, and the page of each run."""

import json
import re

import pytest
from markupsafe import escape
from page_runs import TOKEN, answers, served, write_page_run, write_plain_run

from megatron_scalerl.__main__ import main
from megatron_scalerl.page.server import PageServer, RunsPage

HOSTILE = "<img src=x onerror='window.broken = 1'>"


@pytest.fixture
def folder(tmp_path):
    write_page_run(tmp_path / "runs/hostile", validations=6)
    write_plain_run(tmp_path / "runs/study/runs/plain", loss={"name": "dapo"})
    return tmp_path / "runs"


def test_the_list_and_the_page_of_each_run(folder):
    (folder / HOSTILE).mkdir()
    (folder / HOSTILE / "recipe.yaml").write_text("name: [")
    unlisted, page, run, groups, bad, none = answers(
        PageServer(RunsPage(folder)),
        [
            ("/run/0/", TOKEN),
            ("/", TOKEN),
            ("/run/1/", TOKEN),
            ("/run/1/api/groups", {**TOKEN, "step": "2"}),
            ("/run/0/", TOKEN),
            ("/run/77/", TOKEN),
        ],
    )
    assert page[0] == 200 and "script-src 'none'" in page[1]["Content-Security-Policy"]
    assert re.findall(r'href="run/(\d+)/\?token=[^"]{43}">(.*?)</a>', page[2]) == [
        ("0", str(escape(HOSTILE))),
        ("1", "hostile"),
        ("2", "study/runs/plain"),
    ]
    assert "running" in page[2] and "0.670 at step 30" in page[2] and "<script" not in page[2]
    assert run[0] == 200 and '"home":"../../"' in run[2]
    assert [each["id"] for each in json.loads(groups[2])["groups"]] == [2, 3]
    assert bad[0] == 422 and "recipe.yaml: line 1: not valid YAML" in json.loads(bad[2])["error"]
    assert none[0] == 404
    assert unlisted[0] == 404
    for _, headers, _ in (page, run, groups, bad, none):
        assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/run/-1/", "/run/1e9/", "/run/²/", "/run/9999999999999/", "/run/1/../../etc"])
def test_other_numbers_are_not_found(folder, path):
    _, (status, _, text) = answers(PageServer(RunsPage(folder)), [("/", TOKEN), (path, TOKEN)])
    assert status == 404 and json.loads(text) == {"error": "Not Found"}


async def test_a_run_that_came_later_is_in_the_list_and_the_numbers_stay(folder):
    async def rows(session, token):
        async with session.get("/", params={"token": token}) as answer:
            return re.findall(r'href="run/(\d+)/[^>]*>(.*?)</a>', await answer.text())

    async with served(PageServer(RunsPage(folder))) as (server, session):
        assert await rows(session, server.token) == [("0", "hostile"), ("1", "study/runs/plain")]
        write_plain_run(folder / "a")
        assert await rows(session, server.token) == [("2", "a"), ("0", "hostile"), ("1", "study/runs/plain")]


def test_the_list_as_a_file(folder, tmp_path, capsys):
    path = tmp_path / "runs.html"
    assert main(["report", str(folder), "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"page: {path}, with 2 runs\n"
    text = path.read_text()
    assert "study/runs/plain" in text and "<a " not in text and "connect-src &#39;none&#39;" in text
    assert path.stat().st_mode & 0o077 == 0
