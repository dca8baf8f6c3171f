"""The list of runs in Chromium: it draws, follows the runs, works by keyboard, and hostile names stay text."""

import asyncio
import json

import pytest
from browser import CHROMIUM, opened
from page_runs import step_record, write_page_run, write_plain_run

from megatron_scalerl.page.server import PageServer, RunsPage
from megatron_scalerl.page.static_page import write_runs_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)"),
]
HOSTILE = "<img src=x onerror='window.broken = 1'>"
ROWS = "[...document.querySelectorAll('#rows tr')].map((each) => each.textContent)"
LABEL = "document.querySelector('.plot').ariaLabel"


@pytest.fixture
def folder(tmp_path):
    """Four runs, one damaged and one hostile, and a folder that is none."""
    folder = tmp_path / "runs"
    write_page_run(folder / "hostile", validations=6)
    for name, changes in {"a": {}, HOSTILE: {"loss": {"name": "dapo"}}}.items():
        write_plain_run(folder / name, seed=len(name), **changes)
    write_plain_run(folder / "damaged")
    (folder / "damaged" / "validation.jsonl").write_text("<script>\n")
    (folder / "foreign").mkdir()
    return folder


async def check_list(tab):
    """Rows, curves with forecasts, recipes that differ."""
    await tab.until("document.querySelectorAll('.plot canvas').length === 1")
    await tab.until(f"{ROWS}.filter((each) => each.includes('at step')).length === 3")
    rows = await tab.evaluate(ROWS)
    assert len(rows) == 4 and any(HOSTILE in row for row in rows)
    assert any("expected a validation (step, compute, pass_rate)" in row for row in rows)
    label = await tab.evaluate(LABEL)
    assert HOSTILE in label and "a last 0.67" in label and "a, forecast last" in label
    cells = await tab.evaluate("[...document.querySelectorAll('#recipes tr')].map((each) => each.textContent)")
    assert any(cell.startswith("loss.name") and "dapo" in cell for cell in cells)
    assert any(cell.startswith("seed") for cell in cells)
    assert "foreign" in await tab.evaluate("document.getElementById('others').textContent")
    broken, scripts, images = await tab.evaluate(
        "[typeof window.broken, document.scripts.length, document.images.length]"
    )
    assert (broken, scripts, images) == ("undefined", 6, 0)


async def use_list(tab):
    """Choose by keyboard, filter, order, change the axis."""
    await tab.evaluate("document.querySelector('#none').click()")
    assert "no values yet" in await tab.evaluate(LABEL)
    await tab.evaluate("document.querySelector('input[aria-label=\"draw a\"]').focus()")
    await tab.press(" ")
    assert await tab.until(f"{LABEL}.includes('a last 0.67')")
    assert not await tab.evaluate(f"{LABEL}.includes('hostile')")
    await tab.evaluate("document.querySelector('.plot').focus()")
    await tab.press("ArrowRight")
    assert await tab.evaluate("document.querySelector('.plot').nextSibling.textContent") == (
        "device-hours 0 a, forecast – a 0.4"
    )
    await tab.evaluate("document.querySelector('#axis input[value=step]').click()")
    assert "step 0 to" in await tab.evaluate(LABEL)
    filled = "document.getElementById('filter').value = 'DAM'; "
    filled += "document.getElementById('filter').dispatchEvent(new Event('input'))"
    await tab.evaluate(filled)
    assert [row.startswith("damaged") for row in await tab.evaluate(ROWS)] == [True]
    await tab.evaluate(filled.replace("DAM", ""))
    await tab.evaluate("document.querySelector('#all').click()")
    await tab.call("Emulation.setDeviceMetricsOverride", width=800, height=900, deviceScaleFactor=1, mobile=False)
    assert await tab.until("document.documentElement.scrollWidth <= 800")


async def test_the_list_follows_its_runs_and_opens_their_pages(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.page.runs_data.SEARCH_S", 0.1)

    server = PageServer(RunsPage(folder))
    async with server.serving(), opened(tmp_path / "profile") as tab:
        await tab.open(server.url)
        await check_list(tab)
        await use_list(tab)
        (folder / "a" / "metrics.jsonl").write_text(json.dumps(step_record(77)) + "\n")
        await tab.until(f"{ROWS}.some((each) => each.startsWith('a') && each.includes('77of 100'))")
        await asyncio.to_thread(write_plain_run, folder / "new")
        await tab.until(f"{ROWS}.some((each) => each.startsWith('new'))")
        await tab.evaluate(
            "[...document.querySelectorAll('#rows a')].find((a) => a.textContent === 'hostile').click()"
        )
        await tab.until("document.querySelectorAll('.plot canvas').length === 14")
        await tab.until("document.getElementById('text')?.textContent.length > 0")
        await tab.evaluate("document.querySelector('#home a').click()")
        await tab.until("document.querySelectorAll('#rows tr').length === 5")
        origin = server.url.split("?")[0]
        complaints, elsewhere = (
            tab.complaints,
            [each for each in tab.requests if not each.startswith((origin, "data:"))],
        )
    assert (complaints, elsewhere) == ([], [])


async def test_the_file_works_and_asks_for_nothing(folder, tmp_path):
    write_runs_page(folder, tmp_path / "runs.html")
    url = (tmp_path / "runs.html").as_uri()
    async with opened(tmp_path / "profile") as tab:
        await tab.open(url)
        await check_list(tab)
        await use_list(tab)
        requests, complaints = tab.requests, tab.complaints
    assert complaints == [] and {each for each in requests if not each.startswith("data:")} == {url}
