"""The server of the page: who gets an answer, what is in it, and that it follows a run."""

import asyncio
import json

import pytest
from command_line import refusal
from json_lines import append
from page_runs import TOKEN, add_step, answers, served, step_record, write_page_run

from megatron_scalerl.page.server import PageServer, RunPage, RunsPage


@pytest.fixture
def run(tmp_path):
    return write_page_run(tmp_path / "run", validations=6)


@pytest.fixture
def ask(run):
    """Gives (status, headers, text) of one request with the token."""

    def asked(path, **query):
        return answers(PageServer(RunPage(run)), [(path, TOKEN | query)])[0]

    return asked


@pytest.fixture
def both(run):
    """A server of one run, and one of a folder of runs."""
    return {"run": PageServer(RunPage(run)), "runs": PageServer(RunsPage(run.parent))}


@pytest.mark.parametrize(
    "kind, path",
    [
        *(("run", path) for path in ("/", "/api/data", "/api/group", "/api/events", "/none")),
        *(("runs", path) for path in ("/", "/run/0/", "/run/0/api/data", "/none")),
    ],
)
def test_without_the_token_there_is_nothing(both, kind, path):
    queries = ({}, {"token": ""}, {"token": "x" * 43}, {"token": "ü"})
    for status, _, text in answers(both[kind], [(path, query) for query in queries]):
        assert (
            status == 403
            and "megatron-scalerl watch printed" in text
            and "held-out" not in text
            and "hostile" not in text
        )


@pytest.mark.parametrize(
    "host, status",
    [
        ("127.0.0.1:PORT", 200),
        ("localhost:PORT", 200),
        ("127.0.0.1", 403),
        ("127.0.0.1:1", 403),
        ("example.org:PORT", 403),
        ("127.0.0.1.example.org:PORT", 403),
    ],
)
def test_a_name_that_is_bound_to_this_address_is_refused(run, host, status):
    [(found, _, _)] = answers(PageServer(RunPage(run)), [("/", TOKEN, {"Host": host})])
    assert found == status


async def test_clients_leave_out_the_port_of_http(run, monkeypatch):
    """`--port 80` cannot be tried by every user: the server's own port stands for it."""

    async with served(PageServer(RunPage(run))) as (server, session):
        monkeypatch.setattr("megatron_scalerl.page.server.HTTP_PORT", server.port)
        for host, status in (("127.0.0.1", 200), ("localhost", 200), ("example.org", 403)):
            async with session.get(server.url, headers={"Host": host}) as answer:
                assert answer.status == status


def test_the_token_is_new_at_every_start(run):
    tokens = {PageServer(RunPage(run)).token for _ in range(3)}
    assert len(tokens) == 3 and all(len(token) >= 43 for token in tokens)


def test_nothing_is_stored_and_nothing_else_may_run(ask):
    status, headers, text = ask("/")
    assert status == 200 and headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "connect-src 'self'" in policy and policy.split("; frame")[0].replace("'", "&#39;") in text
    assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Content-Type-Options"] == "nosniff"


def test_groups_and_completions_are_read_when_they_are_asked_for(ask):
    assert [each["id"] for each in json.loads(ask("/api/groups", step="2")[2])["groups"]] == [2, 3]
    assert json.loads(ask("/api/group", id="3")[2])["completions"][1]["reason"] == "no_answer"
    _, headers, text = ask("/api/completion", id="3", index="1")
    assert json.loads(text)["pieces"] == ["b", "=", "4"] and headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path, query, status, said",
    [
        ("/api/group", {"id": "77"}, 422, "the run has no finished group 77"),
        ("/api/group", {"id": "-1"}, 422, "id: expected a whole number, found '-1'"),
        ("/api/group", {"id": "9" * 30}, 422, "id: expected a whole number"),
        ("/api/group", {}, 422, "id: expected a whole number, found ''"),
        ("/api/other", {}, 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_one_line(ask, path, query, status, said):
    found, _, text = ask(path, **query)
    assert found == status and said in json.loads(text)["error"] and "\n" not in text


@pytest.mark.parametrize(
    "since, generation, begin",
    [("2", "0", 2), ("9", "0", 0), ("2", "4", 0)],  # a page that knows more than there is; dropped records
)
def test_only_new_steps_are_sent(ask, since, generation, begin):
    sent = json.loads(ask("/api/data", since=since, generation=generation)[2])
    assert sent["since"] == begin and sent["steps"]["step"] == [1, 2, 3][begin:]


async def test_a_page_hears_of_new_records_and_of_damage(run):
    async def until(stream, wanted):
        async for line in stream.content:
            if line.decode().strip() == wanted:
                return

    async with served(PageServer(RunPage(run))) as (server, session):
        url, query = "/api", {"token": server.token}
        async with session.get(f"{url}/events", params=query) as stream:
            await until(stream, "event: change")
            append(run / "metrics.jsonl", step_record(4))
            for _ in range(100):
                await until(stream, "event: change")
                async with session.get(f"{url}/data", params=query | {"since": 3, "generation": 0}) as answer:
                    if (await answer.json())["steps"]["step"] == [4]:
                        break
            else:
                raise AssertionError("the new step was never announced")
            append(run / "ledger.jsonl", "damaged\n")
            await until(stream, "event: failed")
            assert "ledger.jsonl byte 114: expected a JSON object" in (await stream.content.readline()).decode()


def test_a_failure_of_the_following_task_is_said(run, monkeypatch, caplog):
    async def follow():
        async with (
            served(PageServer(RunPage(run))) as (server, session),
            session.get("/api/events", params={"token": server.token}) as stream,
        ):
            monkeypatch.setattr(server.page, "_update", lambda: 1 / 0)
            async for line in stream.content:
                if b"no longer follows" in line:
                    return line.decode()

    said = asyncio.run(asyncio.wait_for(follow(), 240))
    assert "the page no longer follows the run: ZeroDivisionError: division by zero" in said
    assert "ZeroDivisionError" in caplog.text


def test_a_batch_that_is_composed_while_the_page_is_open_can_be_read(run):
    async def follow():
        async with served(PageServer(RunPage(run))) as (server, session):
            await asyncio.to_thread(add_step, run, 6)
            while True:
                await asyncio.sleep(0.02)
                query = {"token": server.token, "step": 4}
                async with session.get("/api/groups", params=query) as answer:
                    if groups := (await answer.json())["groups"]:
                        return groups

    assert asyncio.run(asyncio.wait_for(follow(), 240)) == [{"id": 6, "pass_rate": 0.5}]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("watch", "RUN: give either the folder of a run or --demo"),
        ("watch none", "recipe.yaml: there is no such file; it should be a recipe file"),
        ("watch RUN --port 70000", "--port: 70000 is not a port"),
        ("watch EMPTY", "neither this folder (no recipe.yaml) nor a subfolder is a run; name a run"),
        ("report RUNS --html OUT --group 1", "--group needs the folder of one run"),
        ("report RUN --group 1", "--group chooses completions for the page; add --html"),
    ],
)
def test_a_mistake_is_one_line(run, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    folders = {"RUN": str(run), "RUNS": str(tmp_path), "EMPTY": str(tmp_path / "empty")}
    given = folders | {"OUT": str(tmp_path / "page.html")}
    assert said in refusal([given.get(word, word) for word in arguments.split()], capsys)
    assert not (tmp_path / "page.html").exists()
