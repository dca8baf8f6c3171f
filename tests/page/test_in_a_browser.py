"""The page in Chromium: it draws, its reader works, it follows a run, and hostile text stays text."""

import json

import pytest
from browser import CHROMIUM, opened
from json_lines import append
from page_runs import HOSTILE, add_step, episode_group, evaluation_record, step_record, write_page_run

from megatron_scalerl.page.server import PageServer, RunPage
from megatron_scalerl.page.static_page import write_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)"),
]
TEXT = "document.getElementById('text')"
UNBROKEN = "[typeof window.broken, document.scripts.length, document.images.length]"


async def set_value(tab, name, value, event="change"):
    """Set a control once the page has it, with this choice where it is a list of choices."""
    await tab.until(f"""(() => {{
        const it = document.getElementById('{name}'), value = {json.dumps(value)};
        if (it === null || (it.options && ![...it.options].some((each) => each.value === value))) return false;
        it.value = value;
        it.dispatchEvent(new Event('{event}', {{ bubbles: true }}));
        return true; }})()""")


@pytest.fixture
def run(tmp_path):
    return write_page_run(tmp_path / "run", validations=6, long_tokens=9001)


async def read_hostile_group(tab):
    """Open group 1 of step 1, whose prompt and completions are hostile, and compare what is shown."""
    await set_value(tab, "step", "1")
    await set_value(tab, "pick", "1")
    await tab.until(f"{TEXT}?.textContent.includes('</script><script>')")
    shown = await tab.evaluate(f"{TEXT}.textContent")
    prompt = await tab.evaluate("document.querySelector('.prompt').textContent")
    for text in (shown, prompt):
        assert HOSTILE[0] in text and HOSTILE[1] in text and HOSTILE[5] in text
        assert "\\x1b]0;title\\x07\\x1b[2J" in text and "\\u202eright to left\\u2066" in text
        assert "\x1b" not in text and "\u202e" not in text
    broken, scripts, images = await tab.evaluate(UNBROKEN)
    assert (broken, images) == ("undefined", 0) and scripts == 7  # the data and the page's own programs


async def use_reader(tab):
    """Sort, color, search and step through the tokens of group 0."""
    await set_value(tab, "pick", "0")
    await tab.until(f"{TEXT}?.textContent.includes('therefore')")
    await set_value(tab, "sort", "worst first")
    first = "document.querySelector('#list button')"
    assert (await tab.evaluate(f"{first}.textContent")).startswith("✗ wrong -1 (no_answer)")
    await tab.evaluate(f"{first}.click()")
    assert await tab.until(f"{TEXT}.textContent.includes('‹v1›') && {TEXT}.textContent") == "‹v0›b‹v1›⟦=4⟧"
    assert await tab.evaluate("document.querySelector('.text [data-token=\"0\"]').className") == "warm4"
    assert "forced" in await tab.evaluate("document.querySelector('.text [data-token=\"1\"]').className")
    for color, level in (("advantage", "warm3"), ("mismatch", "warm4"), ("entropy", "violet3")):
        await set_value(tab, "color", color)
        assert await tab.evaluate("document.querySelector('.text [data-token=\"0\"]').className") == level
    assert "scored" in await tab.evaluate(f"{first}.textContent")
    await tab.evaluate("document.querySelector('#list [data-index=\"0\"]').click()")
    await tab.until("document.getElementById('key').textContent.includes('did not score this completion')")
    await tab.evaluate(f"{first}.click()")
    await tab.until(f"{TEXT}.textContent.includes('‹v1›')")
    await tab.evaluate(f"{TEXT}.focus()")
    await tab.press("ArrowRight")
    assert (await tab.evaluate("document.getElementById('detail').textContent")).startswith(
        'token 0: "b", id 1, log-prob -2 (p 0.135), mismatch -0.3, entropy 0.7, version 0, '
    )
    await set_value(tab, "search", "therefore", "input")
    await tab.until(f"{TEXT}.querySelector('.hit')?.textContent === ' therefore'")
    assert (
        await tab.evaluate("document.getElementById('found').textContent") == "1 of 2 completions; hit in this one: 1"
    )
    await set_value(tab, "search", "", "input")


async def check_figures(tab):
    """Every chart is drawn, has words, and its cursor follows the arrow keys."""
    await tab.until("document.querySelectorAll('.plot canvas').length === 17")
    labels = await tab.evaluate("[...document.querySelectorAll('.plot')].map((each) => each.ariaLabel)")
    tasks = "Pass rate by task, step 0 to 30. sums, training last 0.25, 0.25 to 0.25"
    waits = "trainer waits last 0.75, 0.75 to 0.75; engines wait last 0.1, 0.1 to 0.1"
    assert f"Who waits for whom, hours of steps 0 to 0.001667. {waits}" in labels  # seconds, not where they are drawn
    assert f"{tasks}; sums, held out last 0.75, 0.75 to 0.75" in labels
    for label in (
        "Gradient norm, before clipping, step 1 to 3. norm",
        "Learning rate, step 1 to 3. rate last 0.0001",
    ):
        assert any(text.startswith(label) for text in labels)
    assert all(labels) and labels[0].startswith("Validation pass rate and its forecasts, device-hours 0 to")
    await tab.evaluate("document.querySelectorAll('.plot')[1].focus()")
    await tab.press("ArrowRight")
    await tab.press("ArrowRight")
    assert (
        await tab.evaluate("document.querySelectorAll('.plot')[1].nextSibling.textContent")
        == "step 2 mean reward 0.02"
    )
    await tab.evaluate("document.querySelector('#axis input[value=step]').click()")
    assert "step 0 to" in await tab.evaluate("document.querySelector('.plot').ariaLabel")
    assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (
        await tab.evaluate("document.querySelector('h1').textContent") == "</title><script>window.broken = 3</script>"
    )
    assert "exit </script>" in await tab.evaluate("document.getElementById('events').textContent")


async def test_the_file_works_and_asks_for_nothing(run, tmp_path):
    append(run / "evaluation.jsonl", evaluation_record(2, file=HOSTILE[0]))
    write_page(run, tmp_path / "page.html")
    url = (tmp_path / "page.html").as_uri()
    async with opened(tmp_path / "profile", url) as tab:
        await check_figures(tab)
        cells = "[...document.querySelectorAll('#evaluations td')].map((each) => each.textContent)"
        assert (await tab.evaluate(cells))[:3] == [HOSTILE[0], "30", "@16 0.250"]
        await read_hostile_group(tab)
        await use_reader(tab)
        await set_value(tab, "sort", "best first")
        await set_value(tab, "step", "2")
        await set_value(tab, "pick", "2")
        assert await tab.until(f"{TEXT}?.textContent.length > 1e6 && {TEXT}.scrollWidth <= {TEXT}.clientWidth")
        await tab.call("Emulation.setDeviceMetricsOverride", width=800, height=900, deviceScaleFactor=1, mobile=False)
        assert await tab.until("document.documentElement.scrollWidth <= 800")
        requests, complaints = tab.requests, tab.complaints
    assert complaints == [] and {each for each in requests if not each.startswith("data:")} == {url}


async def test_the_served_page_follows_a_run(run, tmp_path):
    server = PageServer(RunPage(run))
    async with server.serving(), opened(tmp_path / "profile", server.url) as tab:
        await tab.until("document.querySelectorAll('.plot canvas').length === 17")
        await read_hostile_group(tab)
        append(run / "metrics.jsonl", step_record(4, reward=0.75))
        await tab.until("document.querySelectorAll('.plot')[1].ariaLabel.includes('last 0.75')")
        assert "step 4 of 200" in await tab.evaluate("document.getElementById('where').textContent")
        origin = server.url.split("?")[0]
        complaints, elsewhere = (
            tab.complaints,
            [each for each in tab.requests if not each.startswith((origin, "data:"))],
        )
    assert (complaints, elsewhere) == ([], [])


@pytest.fixture
def episodes(run):
    """The run with a group of an episode that forked, one that did not, and a single turn."""
    return add_step(run, episode_group())


async def test_an_episode_is_read_turn_by_turn(episodes, tmp_path):
    write_page(episodes, tmp_path / "page.html")
    async with opened(tmp_path / "profile", (tmp_path / "page.html").as_uri()) as tab:
        await tab.until("document.getElementById('step')?.value === '4' && document.getElementById('text') !== null")
        shown = f"{TEXT}.textContent"
        await tab.until(f"{shown}.includes('part 3 of 3')")
        said = await tab.evaluate(shown)
        written = "\\x1b]0;title\\x07\\x1b[2J\\u202eright to left\\u2066"
        message = f"⟪{HOSTILE[0]}{HOSTILE[1]}{written}⟫"
        assert said == f"part 1 of 3‹v0›a=part 2 of 3\n⟪{written}⟫\nb4part 3 of 3‹v1›\n{message}\n therefore4"
        classes = f"[...{TEXT}.querySelectorAll('[data-token]')].map((each) => each.className)"
        assert await tab.evaluate(classes) == [
            *["warm2"] * 2,
            *["environment"] * 2,
            *["warm2"] * 2,
            *["environment"] * 4,
            *["warm2"] * 2,
        ]
        facts, key = (f"document.getElementById('{name}').textContent" for name in ("facts", "key"))
        counts = "6 sampled of 12 tokens, 3 turns, 6 tokens of the environment, versions 0 to 1"
        assert counts in await tab.evaluate(facts)
        assert "⟪environment⟫ written by the environment, no loss" in await tab.evaluate(key)
        assert "12 tokens · 3 turns · " in await tab.evaluate("document.querySelector('#list').textContent")
        await tab.evaluate("document.querySelector('#list [data-index=\"1\"]').click()")
        await tab.until(f"{shown}.includes('⟦b⟧')")
        assert (await tab.evaluate(shown)).startswith(f"‹v0›a⟦b⟧\n⟪{HOSTILE[0]}{HOSTILE[1]}")
        assert HOSTILE[5] in await tab.evaluate(shown) and "part" not in await tab.evaluate(shown)
        await tab.evaluate(f"{TEXT}.querySelector('.environment').click()")
        detail = "document.getElementById('detail').textContent"
        token = await tab.evaluate(detail)
        assert token.startswith("token 2: ") and ", id 5, environment, version 0" in token
        await tab.evaluate("document.querySelector('#list [data-index=\"2\"]').click()")
        await tab.until(f"{shown} === '‹v0›b4'")
        assert "environment" not in await tab.evaluate(key) + await tab.evaluate(facts)
        assert await tab.evaluate("[typeof window.broken, document.images.length].join()") == "undefined,0"
        assert tab.complaints == []


async def test_a_finished_run_says_what_it_reached_and_no_verdict(run, tmp_path):
    (run / "attempts.jsonl").unlink()
    server = PageServer(RunPage(run))
    said, status = (f"(document.getElementById('{name}')?.textContent ?? '')" for name in ("verdict", "status"))
    async with server.serving(), opened(tmp_path / "profile", server.url) as tab:
        await tab.until(f"{status}.startsWith('live')")
        assert not (await tab.evaluate(said)).startswith("finished")
        append(run / "end.json", {"reason": "all steps are made"})
        await tab.until(f"{said}.startsWith('finished: all steps are made — reached a pass rate of 0.')")
        assert not {"stop", "go on", "too early"} & set(await tab.evaluate(f"{said}.split(/[:;—]/)"))
        await tab.until(f"{status}.startsWith('the run is over')")
        await tab.call("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=False)
        await tab.until("document.documentElement.scrollWidth <= 390")
        broken = """[...document.querySelectorAll('#ledger th, #events td')].filter((each) => {
            const range = document.createRange();
            range.selectNodeContents(each);
            return /^\\w+$/.test(each.textContent) && range.getClientRects().length > 1;
        }).map((each) => each.textContent)"""
        assert (await tab.evaluate(broken), tab.complaints) == ([], [])
        labels = "[labels([11.3785, 11.379, 11.3795, 11.38]), labels([0, 0.5, 1]), labels([7])].join()"
        assert await tab.evaluate(labels) == "11.3785,11.379,11.3795,11.38,0,0.5,1,7"


async def test_the_search_finds_what_is_not_on_the_page_yet(run, tmp_path):
    write_page(run, tmp_path / "page.html")

    async with opened(tmp_path / "profile", (tmp_path / "page.html").as_uri()) as tab:
        await tab.until("document.getElementById('step')?.value === '3' && document.getElementById('text') !== null")
        await set_value(tab, "step", "2")
        await set_value(tab, "pick", "3")
        await tab.until("state.content?.pieces.length === 9001 && state.shown === 4000")
        await set_value(tab, "search", "THEREFORE", "input")
        found = "document.getElementById('found').textContent"
        assert await tab.evaluate(found) == "1 of 2 completions; hit in this one: 1"
        assert await tab.evaluate("state.shown") == 4000  # nothing is shown for it before it is asked for
        await tab.evaluate("document.getElementById('search').focus()")
        await tab.press("Enter")
        assert await tab.evaluate(f"{TEXT}.querySelector('.hit').textContent") == " therefore"
        assert await tab.evaluate(f"{TEXT}.querySelector('.at').dataset.token") == "9000"
        assert await tab.evaluate(found) == "1 of 2 completions; hit in this one: 1 of 1"
        box = "(({ top, bottom }) => top >= 0 && bottom <= innerHeight)"
        await tab.until(f"{box}({TEXT}.querySelector('.at').getBoundingClientRect())")
        assert tab.complaints == []


async def test_a_script_that_reached_the_page_would_not_run(run, tmp_path):
    """The policy is the second line: a script put into the file is refused."""
    write_page(run, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    (tmp_path / "page.html").write_text(text.replace("<main>", "<main><script>window.broken = 9</script>"))

    async with opened(tmp_path / "profile", (tmp_path / "page.html").as_uri()) as tab:
        await tab.until("document.querySelectorAll('.plot canvas').length > 0")
        broken, complaints = await tab.evaluate("typeof window.broken"), tab.complaints
    assert broken == "undefined" and any("Content Security Policy" in each for each in complaints)
