"""The front door and the console, in a real Chromium: what a call changes, the pages show."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, expect

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.callbacks import Callback, CallbackKind
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Claimed, JobMark
from contract.jobs import FinishReason
from contract.starts import Starts
from infra.embedded_redis import EmbeddedRedis
from tests.browser import chromium, needs_chromium
from tests.contract.some_calls import make_job, make_submission
from tests.fakes import encode_text
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = [pytest.mark.anyio, needs_chromium, pytest.mark.campaign]

JOB: dict[str, Any] = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
WORKER_INFO = {
    "device": "NVIDIA H100",
    "notice": "engine own: vLLM has no --quantization",
    "gpu_share": 0.5,
    "num_running": 1,
    "num_blocks": 100,
    "num_free_blocks": 40,
    "num_cached_blocks": 15,
}
MARKS = (JobMark("prefill", 900, 100, 3, 1500), JobMark("displaced", 50, 50, 1, 700))
expect.set_options(timeout=20_000)
VIEWS = ("overview", "batch", "jobs", "flows")
HOSTILE = (
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "\"><svg onload='window.hit=1'>",
    "javascript:window.hit=1",
    "{{constructor.constructor('window.hit=1')()}}",
    "</td></table><iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "'-window.hit=1-'",
)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest.fixture
async def page(browser: Browser, console_url: str) -> AsyncIterator[Page]:
    """A page that fails its test if a script fails or the policy forbids something."""
    context = await browser.new_context(base_url=console_url)
    page = await context.new_page()
    problems = watch_for_problems(page)
    yield page
    assert problems == []
    await context.close()


def watch_for_problems(page: Page) -> list[str]:
    problems: list[str] = []

    def policy(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            problems.append(message.text)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", policy)
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    return problems


async def confirmed(button: Locator) -> None:
    """Presses a button and agrees."""
    await button.click()
    await button.page.locator("#confirm-yes").click()


async def filtered(page: Page, metadata: str, count: int) -> None:
    """Shows so many jobs, which have these metadata."""
    await page.goto("/console#jobs")
    await page.locator("#f-metadata").fill(metadata)
    await page.locator("#f-metadata").press("Tab")
    await expect(page.locator("#list tr")).to_have_count(count)


async def submit(http: httpx.AsyncClient, **changes: Any) -> str:
    answer = await http.post("/v1/jobs", json=JOB | changes)
    assert answer.status_code == 202, answer.text
    job_id: str = answer.json()["id"]
    return job_id


async def say(
    worker: FakeWorker, claimed: Claimed, number: int, text: str, *marks: JobMark, end: bool
) -> None:
    """The job's next event: four bytes, each a token."""
    assert len(encode_text(text)) == 4
    reason = FinishReason.STOP if end else None
    delta = ChoiceDelta(0, 4 * (number - 1), encode_text(text), text, reason)
    await worker.say(claimed, number, Tokens((delta,)), *marks)


async def test_each_view_shows_what_a_call_changed(
    page: Page, console_url: str, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Without a reload: a waiting job in its lane and tenant, then in the batch, then ended in the
    list; a pause and its end by the console's own buttons."""
    await page.goto("/console")
    lane = page.locator("#lanes tr", has_text="standard")
    await expect(lane.locator("td").nth(3)).to_have_text("0")
    job_id = await submit(http)
    await expect(lane.locator("td").nth(3)).to_have_text("1")
    await expect(page.locator("#tenants tr", has_text="default")).to_contain_text("standard")

    await page.locator("#tab-batch").click()
    claimed = await idle_worker.claim()
    held = page.locator("#held tr", has_text=job_id[-8:])
    await expect(held).to_contain_text("prefill")
    await say(idle_worker, claimed, 1, "abcd", *MARKS, end=False)
    await expect(held).to_contain_text("decode")

    await page.locator("#tab-jobs").click()
    listed = page.locator("#list tr", has_text=job_id[-8:])
    await expect(listed).to_contain_text("running")
    await say(idle_worker, claimed, 2, "efgh", end=True)
    await idle_worker.finish(claimed, 3)
    await expect(listed).to_contain_text("succeeded")
    await listed.locator("a").click()
    await expect(page.locator("#job")).to_contain_text("attempt 1")
    for told in ("1,500 tokens computed in 3 chunks, in 800 ms", "displaced, 700 tokens"):
        await expect(page.locator("#job li", has_text=told)).to_have_count(1)
    assert "abcdefgh" not in await page.locator("#job").inner_text()
    await page.locator("#job button", has_text="with output").click()
    await expect(page.locator("#job pre")).to_contain_text("abcd")

    await page.locator("#tab-overview").click()
    await confirmed(lane.locator("button", has_text="Pause"))
    await expect(lane).to_contain_text("paused")
    refused = await http.post(f"{console_url}/v1/completions", json=JOB["body"])
    assert refused.json()["error"]["code"] == "lane_paused"
    await expect(page.locator("#refusals")).to_contain_text("lane_paused")
    await lane.locator("button", has_text="Resume").click()
    await page.locator("#confirm-no").click()
    await expect(lane).to_contain_text("paused")
    await confirmed(lane.locator("button", has_text="Resume"))
    await expect(lane).to_contain_text("open")


async def test_the_overview_tells_of_devices_callbacks_and_all_gateways(
    page: Page, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """A worker's device, its GPU's use and its blocks; callbacks that wait; what another gateway
    refuses, by reason."""
    idle_worker.info = json.dumps(WORKER_INFO)
    await idle_worker.beat()
    await page.goto("/console")
    worker = page.locator("#workers tr")
    told = f"H100, 50 % busy; {WORKER_INFO['notice']}"
    await expect(worker.locator("td.warn")).to_contain_text(told)
    cells = await worker.locator("td").all_inner_texts()
    assert cells[8:11] == ["60", "15", "25"]
    await expect(page.locator("#charts")).to_contain_text("GPUs busy")
    paused = await http.post("/v1/lanes/pause", json={"lane": "standard"})
    assert paused.status_code == 200
    assert (await http.post("/v1/jobs", json=JOB)).status_code == 503
    await expect(page.locator("#refusals")).to_contain_text("lane_paused")
    target = Callback(kind=CallbackKind.URL, target="https://a/x")
    job = make_job(lane="interactive")
    await idle_worker.functions.submit(job, make_submission(callback=target))
    await idle_worker.functions.cancel(job.id, job.tenant)
    await expect(page.locator("#summary")).to_contain_text("callbacks: 1 waiting, 0 dead")


async def test_workers_that_start_load_again_or_drain_are_told_apart(
    page: Page, idle_worker: FakeWorker
) -> None:
    """Each with its state and since when; they count as no workers of the model."""
    idle_worker.info = json.dumps(WORKER_INFO)
    await idle_worker.beat()
    second = FakeWorker(idle_worker.functions, incarnation="w2")
    await second.beat()
    await page.goto("/console")
    rows = page.locator("#workers tr")
    await expect(rows).to_have_count(2)
    assert "since" not in await page.locator("#workers").inner_text()
    idle_worker.state = "loading"
    await idle_worker.beat()
    loading = page.locator("#workers tr", has_text="w1")
    clock = r"[0-9]{1,2}:[0-9]{2}:[0-9]{2}"
    await expect(loading).to_contain_text(re.compile(f"loading since {clock}"))
    await expect(loading).to_contain_text("H100")
    await expect(page.locator("#summary")).to_contain_text("1 worker;")
    idle_worker.state = "draining"
    await idle_worker.beat()
    await expect(loading).to_contain_text(re.compile(f"draining since {clock}"))
    assert await loading.locator("button").count() == 0, "it cannot be drained again"
    starts = Starts(idle_worker.client, idle_worker.keys)
    await starts.measured(MODEL, 49)
    await starts.announce(MODEL, 50)
    starting = page.locator("#workers tr", has_text="starting")
    wanted = re.compile(f"starting since {clock}.*, expected in (4[0-9]|50) s")
    await expect(starting).to_contain_text(wanted)
    idle_worker.state = "gone"
    await idle_worker.beat()
    await expect(loading).to_have_count(0)
    await FakeWorker(idle_worker.functions, incarnation="w3").beat()
    await expect(starting).to_have_count(0)
    await expect(rows).to_have_count(2)


async def test_one_job_or_what_a_filter_matches_is_changed(
    page: Page, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """After a confirmation, with progress; other jobs are left alone. One is moved and cancelled
    from its page."""
    red = [await submit(http, metadata={"team": "red"}) for _ in range(5)]
    blue = await submit(http, metadata={"team": "blue"})
    await filtered(page, "team=red", 5)
    await confirmed(page.locator("#cancel-all"))
    await expect(page.locator("#operation")).to_contain_text("5 found, 5 done")
    for job_id in red:
        assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "cancelled"
    assert (await http.get(f"/v1/jobs/{blue}")).json()["status"] == "queued"
    cancelled = await page.locator("#operation").inner_text()
    await page.locator("#f-status").select_option("cancelled")
    await confirmed(page.locator("#replay-all"))
    await expect(page.locator("#operation")).not_to_have_text(cancelled)
    await expect(page.locator("#operation")).to_contain_text("5 found, 5 done")
    answer = await http.get("/v1/jobs", params={"metadata[team]": "red", "status": "queued"})
    assert len(answer.json()["data"]) == 5

    await page.goto("/")
    await filtered(page, "team=blue", 1)
    await page.locator("#list a").click()
    await page.locator("#to-lane").fill("batch")
    await confirmed(page.locator("#job button", has_text="Move"))
    await expect(page.locator("#list tr")).to_contain_text("batch")
    await confirmed(page.locator("#job button", has_text="Cancel"))
    await expect(page.locator("#list tr")).to_contain_text("cancelled")
    assert (await http.get(f"/v1/jobs/{blue}")).json()["status"] == "cancelled"


async def test_the_answer_goes_on_after_the_gateway_was_restarted(
    browser: Browser, redis_server: EmbeddedRedis, idle_worker: FakeWorker
) -> None:
    """The chat box resumes by itself and says so; the page has each token once."""
    settings = make_settings(redis_server.url, console=True)
    words = [f"{number:03d} " for number in range(40)]
    page = await (await browser.new_context()).new_page()
    problems = watch_for_problems(page)
    with running_gateway(settings) as url:
        await page.goto(url)
        await page.locator("#said").fill("Count.")
        await page.locator("#send").click()
        claimed = await idle_worker.claim()
        for number, word in enumerate(words[:20], 1):
            await say(idle_worker, claimed, number, word, end=False)
        await expect(page.locator("#talk")).to_contain_text("019")
    await expect(page.locator("#status")).to_contain_text("broke")
    for number, word in enumerate(words[20:], 21):
        await say(idle_worker, claimed, number, word, end=number == len(words))
    await idle_worker.finish(claimed, len(words) + 1)
    with running_gateway(settings, port=int(url.rpartition(":")[2])):
        await expect(page.locator("#status")).to_contain_text("resumed after")
        said = await page.locator("#talk .said").last.text_content()
        assert said == "".join(words)
    assert problems == []


async def test_hostile_names_and_texts_stay_text(
    page: Page, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """In metadata, outputs, names of models and reasons of failures: nothing runs, and the policy
    is not even needed."""
    for number, text in enumerate(HOSTILE):
        await submit(http, metadata={"note": text})
        name = text.replace("/", "").replace(" ", "/")
        await publish_model(idle_worker.client, idle_worker.keys, name)
        await FakeWorker(idle_worker.functions, model=name, incarnation=f"w{number}-{text}").beat()
    claimed = await idle_worker.claim()
    shown = ChoiceDelta(0, 0, (97,), "".join(HOSTILE), FinishReason.STOP)
    await idle_worker.say(claimed, 1, Tokens((shown,)))
    await idle_worker.finish(claimed, 2)
    await page.goto("/")
    await expect(page.locator("#models tr")).to_have_count(len(HOSTILE) + 1)
    for name in VIEWS:
        await page.goto(f"/console#{name}")
        await expect(page.locator("#live")).to_contain_text("live")
        for option in await page.locator("#model option").all_inner_texts():
            await page.locator("#model").select_option(option)
    await page.goto(f"/console#jobs/{claimed.job.id}")
    await page.locator("#job button", has_text="with output").click()
    await expect(page.locator("#job pre")).to_contain_text("window.hit")
    assert await page.evaluate("window.hit") is None
    assert await page.locator("iframe, td svg, td img, main script").count() == 0


async def test_a_login_and_what_a_tenant_cannot_do(
    browser: Browser, redis_server: EmbeddedRedis, idle_worker: FakeWorker
) -> None:
    """A wrong key is told so; a tenant's page has no workers and no other tenant's jobs; scripts
    cannot read the cookie."""
    api_keys = ApiKeys(idle_worker.client, idle_worker.keys)
    own, _ = await api_keys.create(KeyTerms(tenant="own"))
    other, _ = await api_keys.create(KeyTerms(tenant="other", scopes=(Scope.ADMIN,)))
    with running_gateway(make_settings(redis_server.url, console=True)) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            headers = {"authorization": f"Bearer {other}"}
            assert (await http.post("/v1/jobs", json=JOB, headers=headers)).status_code == 202
        page = await (await browser.new_context(base_url=url)).new_page()
        await page.goto("/console#jobs")
        await page.locator("#login-key").fill("bw-nonsense")
        await page.locator("#login button").click()
        await expect(page.locator("#login [role=alert]")).to_contain_text("no valid API key")
        await page.locator("#login-key").fill(own)
        await page.locator("#login-key").press("Enter")
        await expect(page.locator("#who")).to_contain_text("tenant own")
        assert await page.evaluate("document.cookie") == ""
        await expect(page.locator("#live")).to_contain_text("live")
        assert await page.locator("#list tr").count() == 0
        await page.locator("#tab-overview").click()
        assert await page.locator("#workers tr, #lanes tr, #tenants tr").count() == 0
        await page.locator("#who button").click()
        await expect(page.locator("#login-key")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_pages_suit_narrow_screens_keyboards_and_screen_readers(
    browser: Browser,
    console_url: str,
    http: httpx.AsyncClient,
    idle_worker: FakeWorker,
    scheme: Any,
) -> None:
    """At 375 pixels nothing is wider than the screen; axe-core finds nothing serious; arrows move
    between the tabs."""
    await submit(http)
    await idle_worker.claim()
    context = await browser.new_context(
        base_url=console_url, viewport={"width": 375, "height": 700}, color_scheme=scheme
    )
    page = await context.new_page()
    for path in ("/", *(f"/console#{name}" for name in VIEWS)):
        await page.goto(path)
        await expect(page.locator("#live, #chosen")).to_be_visible()
        await expect(page.locator("#model option")).to_have_count(1)
        width = await page.evaluate("document.scrollingElement.scrollWidth")
        assert width <= 375, path
        await page.evaluate(AXE_FILE_PATH.read_text())
        found = json.loads(await page.evaluate("axe.run().then((r) => JSON.stringify(r))"))
        serious = [
            (each["id"], [node["html"] for node in each["nodes"]])
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], path
    await page.locator("#tab-flows").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#overview")).to_be_visible()
    assert await page.evaluate("document.activeElement.id") == "tab-overview"
    await context.close()
