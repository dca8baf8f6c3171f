"""A verifier that asks a judge over HTTP: what fails on the judge's side loses the completion, and is not paid."""

import asyncio
import errno
import http.server
import socket
import threading
import urllib.error
import urllib.request

import aiohttp
import httpx
import pytest
import requests
from verifier_pools import RIGHT, pool_of, prompt, run_pool, wrong

from megatron_scalerl.rewards.worker import is_unavailable
from megatron_scalerl.types import CompletionLost


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path says; /hang never answers, /drop closes the connection."""

    def do_GET(self):
        if self.path == "/hang":
            threading.Event().wait(30)
        elif self.path != "/drop":
            self.send_response(int(self.path[1:]))
            self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def judge():
    """Address of the judge."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def by_urllib(url):
    urllib.request.urlopen(url, timeout=1).read()


def by_requests(url):
    requests.get(url, timeout=1).raise_for_status()


def by_httpx(url):
    httpx.get(url, timeout=1).raise_for_status()


def by_aiohttp(url):
    async def ask():
        timeout = aiohttp.ClientTimeout(total=1)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session, session.get(url):
            pass

    asyncio.run(ask())


def error_of(ask, url):
    with pytest.raises(Exception) as caught:
        ask(url)
    return caught.value


@pytest.mark.parametrize("ask", [by_urllib, by_requests, by_httpx, by_aiohttp])
def test_the_status_decides_and_then_the_connection(ask, judge):
    for status in (408, 429, 500, 503):
        assert is_unavailable(error_of(ask, f"{judge}/{status}")), status
    for status in (400, 404, 422):
        assert not is_unavailable(error_of(ask, f"{judge}/{status}")), status
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        assert is_unavailable(error_of(ask, f"http://127.0.0.1:{bound.getsockname()[1]}"))
    assert is_unavailable(error_of(ask, f"{judge}/hang"))
    assert is_unavailable(error_of(ask, f"{judge}/drop"))
    assert is_unavailable(error_of(ask, "http://no-such-host.invalid/"))


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "x") for number in (errno.ENAMETOOLONG, errno.E2BIG, errno.EMFILE, errno.EFBIG)),
        ValueError("x"),
        RecursionError(),
    ],
)
def test_what_a_completion_can_cause_is_wrong(error):
    assert not is_unavailable(error)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))


@pytest.mark.parametrize("fault", ["refused", "status 503", "unavailable", "hang"])
def test_a_judge_that_is_down_loses_the_completion(fault, no_pauses):
    [lost], _ = run_pool("judged", [fault], timeout_s=1.0)
    assert isinstance(lost, CompletionLost) and lost.reason == "verifier_lost"


def test_a_judge_that_fails_on_one_answer_alone_makes_it_wrong(no_pauses):
    scores, _ = run_pool("judged", ["status 500", *(f"7 {n}" for n in range(40))])
    assert scores == [wrong("unavailable")] + [RIGHT] * 40


async def test_the_run_ends_where_half_of_the_checks_cannot_be_made(no_pauses, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.RECENT", 8)
    async with pool_of("judged") as pool:
        for answer in (f"{word} {n}" for n in range(6) for word in ("7", "refused", "status 503")):
            [score] = await asyncio.gather(pool.score(answer, prompt()), return_exceptions=True)
    assert isinstance(score, RuntimeError) and "of the last 8 checks could not be made" in str(score)
