"""The endpoint over real sockets: who may read it, what it answers, the files by which Prometheus finds it."""

import asyncio
import contextlib
import json
import os
import socket
import stat

import aiohttp
import pytest
from fakes.run import recipe
from prometheus_client.parser import text_string_to_metric_families

from megatron_scalerl.controller.telemetry import serving_metrics
from megatron_scalerl.engine.client import SECRET_HEADER


def settings(folder, **telemetry):
    """A recipe with an endpoint at a free port; its folder is there."""
    made = recipe(folder, telemetry={"metrics_port": 0, **telemetry})
    (folder / made.name).mkdir(exist_ok=True)
    return made, folder / made.name


@contextlib.asynccontextmanager
async def endpoint(folder, **telemetry):
    """(collector, get): get(path, headers) -> (status, text, content type)."""
    made, run = settings(folder, **telemetry)
    async with serving_metrics(made, run, run_id="1f") as collector, aiohttp.ClientSession() as session:
        [target] = json.loads((run / "metrics/targets.json").read_text())[0]["targets"]

        async def get(path="/metrics", headers=None, method="GET"):
            async with session.request(method, f"http://{target}{path}", headers=headers) as answer:
                return answer.status, await answer.text(), answer.content_type

        yield collector, get


def bearer(folder):
    return {"Authorization": f"Bearer {(folder / 'r' / 'metrics' / 'token').read_text()}"}


async def test_nothing_listens_by_default(tmp_path):
    async with serving_metrics(recipe(tmp_path), tmp_path, run_id="1f") as collector:
        assert collector is None and list(tmp_path.iterdir()) == []
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/targets.json").write_text('[{"targets": ["127.0.0.1:9"]}]')  # of an earlier start
    async with serving_metrics(recipe(tmp_path), tmp_path, run_id="1f") as collector:
        assert collector is None
    assert (tmp_path / "metrics/targets.json").read_text() == "[]", "Prometheus has the token"


async def test_only_the_token_opens_it(tmp_path):
    async with endpoint(tmp_path) as (_, get):
        right = bearer(tmp_path)
        token = right["Authorization"].removeprefix("Bearer ")
        wrong = [
            {},
            {"Authorization": token},
            {"Authorization": f"Bearer {token[:-1]}"},
            {"Authorization": f"Bearer {token}x"},
            {"Authorization": f"Basic {token}"},
            {"Authorization": "Bearer \udcff"},
            {SECRET_HEADER: token},
        ]
        for path in ("/metrics", "/", "/metrics/../token"):
            for headers in wrong:
                sent = {k: v.encode(errors="surrogateescape").decode("latin1") for k, v in headers.items()}
                status, text, _ = await get(path, sent)
                assert status == 401 and "scalerl" not in text, (path, headers)
        status, text, _ = await get(headers=right)
        assert status == 200 and "scalerl_run_info" in text
        assert (await get("/", right))[0] == (await get("/metrics/token", right))[0] == 404
        assert (await get(headers=right, method="POST"))[0] == 405
    assert (tmp_path / "r/metrics/targets.json").read_text() == "[]", "the port may be another program's now"


async def test_without_a_token_where_the_recipe_opens_it(tmp_path):
    async with endpoint(tmp_path, metrics_access="open") as (_, get):
        assert (await get())[0] == 200
    assert not (tmp_path / "r/metrics/token").exists()


async def test_the_files_are_for_their_owner_and_the_token_stays(tmp_path):
    before = os.umask(0)
    try:
        async with endpoint(tmp_path):
            first = bearer(tmp_path)
        async with endpoint(tmp_path):
            second = bearer(tmp_path)
    finally:
        os.umask(before)
    folder = tmp_path / "r/metrics"
    assert first == second and len(first["Authorization"]) == 64 + len("Bearer ")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600


async def test_a_token_that_others_may_read_is_refused(tmp_path):
    async with endpoint(tmp_path):
        (tmp_path / "r/metrics/token").chmod(0o644)
    with pytest.raises(ValueError, match=r"metrics/token .* 0644.* 0600"):
        async with endpoint(tmp_path):
            pass


async def test_a_port_in_use_is_a_mistake_of_the_user(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = rf"telemetry.metrics_host, telemetry.metrics_port: .* 127.0.0.1, port {port}: Address already"
        with pytest.raises(ValueError, match=expected):
            async with endpoint(tmp_path, metrics_port=port):
                pass


@contextlib.contextmanager
def at_a_port():
    """A socket that does not listen at its port; another one of this process may."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound


async def test_a_restart_whose_port_is_taken_goes_on_without_metrics(tmp_path, caplog):
    """Nor does Prometheus bring the token to whoever listens there now."""
    with at_a_port() as reserved:  # no other process asks for a port and gets this one meanwhile
        port = reserved.getsockname()[1]
        async with endpoint(tmp_path, metrics_port=port):
            pass
        made, folder = settings(tmp_path, metrics_port=port)
        with socket.create_server(("127.0.0.1", port)):
            async with serving_metrics(made, folder, run_id="1f") as collector:
                assert collector is None and (folder / "metrics/targets.json").read_text() == "[]"
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("the run goes on without its endpoint for metrics: telemetry.metrics_host, telemetry.")
    assert f"127.0.0.1, port {port}: Address already in use" in said


async def test_prometheus_gets_the_format_that_it_asks_for(tmp_path):
    async with endpoint(tmp_path) as (_, get):
        plain = await get(headers=bearer(tmp_path))
        openmetrics = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
        (_, text, kind), (_, other, other_kind) = plain, await get(headers=bearer(tmp_path) | openmetrics)
    assert kind.startswith("text/plain") and other_kind.startswith("application/openmetrics-text")
    assert [f.name for f in text_string_to_metric_families(text)] and other.endswith("# EOF\n")


@pytest.mark.slow
async def test_connections_that_ask_for_nothing_are_few_and_do_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.controller.telemetry.MOST_CONNECTIONS", 3)
    monkeypatch.setattr("megatron_scalerl.controller.telemetry.CONNECTION_S", 1.0)
    async with endpoint(tmp_path) as (_, get):
        target = json.loads((tmp_path / "r/metrics/targets.json").read_text())[0]["targets"][0]
        host, port = target.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        closed = [await asyncio.wait_for(reader.read(), 240) for reader, _ in opened]
        for _, writer in opened:
            writer.close()
        monkeypatch.setattr("megatron_scalerl.controller.telemetry.CONNECTION_S", 60.0)
        closed, (status, _, _) = closed, await get(headers=bearer(tmp_path))
    assert closed == [b""] * 5 and status == 200


async def test_an_empty_token_of_a_start_that_was_killed_is_made_again(tmp_path):
    _, run = settings(tmp_path)
    (run / "metrics").mkdir(mode=0o700)
    (run / "metrics/token").touch(mode=0o600)
    async with endpoint(tmp_path) as (_, get):
        assert (await get(headers=bearer(tmp_path)))[0] == 200
    assert len((run / "metrics/token").read_text().strip()) == 64
