"""The story of docs/console.md, with its pictures: a lane is flooded, callers are refused, a worker
is killed, and the answer goes on.

`python -m tests.e2e.test_console_story docs/images` makes the pictures of the documents."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from playwright.async_api import Browser, Page, TimeoutError, expect

from tests.browser import chromium, needs_chromium
from tests.infra.stack import Stack, running_demo_stack

pytestmark = [pytest.mark.anyio, needs_chromium, pytest.mark.campaign, pytest.mark.long]

_CHAT = "/v1/chat/completions"
_ASKED = "Count from 1 to 90."
_NUM_FLOOD = 120
_ARGUMENTS = ("--workers=2", "--max-num-seqs=8")
_ENVIRON = {"BATCHWAY_LANE_BOUNDS": "batch=20000", "BATCHWAY_WORKER_PRICE": "1.8"}
_STEPS = [
    {"name": "draft", "model": "demo", "endpoint": "/v1/completions"}
    | {"body": {"prompt": "{{ input.messages[-1].content }}", "max_tokens": 60}},
    {"name": "final", "model": "demo", "endpoint": _CHAT}
    | {"body": {"messages": [{"role": "user", "content": "{{ draft.choices[0].text }}"}]}},
]
_FLOWS = {
    "models": [
        {"name": "draft-and-edit", "pipeline": {"steps": _STEPS}},
        {
            "name": "vote",
            "ensemble": {"members": ["demo", "demo", "draft-and-edit"], "combine": "vote"},
        },
    ]
}
_WAIT_MS = 60_000


async def test_a_flood_refusals_a_kill_and_an_answer_that_goes_on(tmp_path: Path) -> None:
    """The chat box shows the text of an undisturbed answer, though its worker was killed."""
    await tell(tmp_path)


async def tell(folder: Path) -> None:
    """Runs the story, and draws its pictures into the folder."""
    with (
        tempfile.NamedTemporaryFile("w", suffix=".yaml") as models,
        _stack(models) as stack,
    ):
        async with (
            httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
            chromium() as browser,
        ):
            usual = await http.post(_CHAT, json=_body(_ASKED, max_tokens=400))
            expected = usual.json()["choices"][0]["message"]["content"]
            page = await _page(browser, stack.url)
            await page.goto("/console")
            await expect(page.locator("#workers tr")).to_have_count(2, timeout=_WAIT_MS)
            await asyncio.gather(*(_flood(http) for _ in range(2)))
            points = page.locator("#charts[data-points='5']")
            await points.wait_for(timeout=_WAIT_MS)
            await _flood(http)
            await expect(page.locator("#refusals")).to_contain_text("lane", timeout=_WAIT_MS)
            await page.screenshot(path=folder / "console-overview.png", full_page=True)
            await page.locator("#tab-batch").click()
            await expect(page.locator("#held tr")).to_have_count(8, timeout=_WAIT_MS)
            await page.screenshot(path=folder / "console-batch.png", full_page=True)
            await _see_flow(http, page, folder / "console-flows.png")

            await page.goto("/")
            await page.locator("#said").fill(_ASKED, timeout=_WAIT_MS)
            await page.locator("#temperature").fill("0")
            await page.locator("#max-tokens").fill("400")
            await page.locator("#send").click()
            await expect(page.locator("#talk")).to_contain_text("1, 2, 3", timeout=_WAIT_MS)
            killed = await _kill_worker_of_chat(page, stack.url)
            await expect(page.locator("#status")).to_contain_text("Done", timeout=_WAIT_MS)
            assert await page.locator("#talk .said").last.text_content() == expected
            await page.screenshot(path=folder / "console-chat.png", full_page=True)
            await _see_resumed(browser, stack.url, killed, folder / "console-job.png")


def _stack(models: IO[str]) -> AbstractContextManager[Stack]:
    json.dump(_FLOWS, models)
    models.flush()
    return running_demo_stack(*_ARGUMENTS, f"--models={models.name}", environ=_ENVIRON)


async def _see_flow(http: httpx.AsyncClient, page: Page, picture: Path) -> None:
    """A flow in a flow: each call has its times and its cost."""
    await page.locator("#tab-flows").click()
    body = _body("Count from 1 to 20.", max_tokens=120) | {"model": "vote"}
    answer = await http.post("/v1/jobs", json={"endpoint": _CHAT, "body": body})
    assert answer.status_code == 202
    calls = page.locator("#trees .call")
    ended = calls.filter(has_text="succeeded").filter(has_text="cost")
    await expect(ended).to_have_count(9, timeout=_WAIT_MS)
    await expect(calls).to_have_count(9)  # six of `vote`; its pipeline is also listed by itself
    await page.screenshot(path=picture, full_page=True)


def _body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "temperature": 0, "messages": messages, **fields}


async def _flood(http: httpx.AsyncClient) -> None:
    body = _body("Count from 1 to 60.", max_tokens=400)
    asked = {"endpoint": _CHAT, "lane": "batch", "body": body}
    answers = await asyncio.gather(*(http.post("/v1/jobs", json=asked) for _ in range(_NUM_FLOOD)))
    assert {answer.status_code for answer in answers} == {202, 429}


async def _page(browser: Browser, url: str, **options: Any) -> Page:
    return await (await browser.new_context(base_url=url, **options)).new_page()


async def _kill_worker_of_chat(page: Page, url: str) -> str:
    """Kills the worker that answers, by the console's own word; returns the job."""
    console = await _page(page.context.browser, url)  # type: ignore[arg-type]
    await console.goto("/console#batch")
    held = console.locator("#held tr", has_text="interactive")
    options = console.locator("#worker option")
    await expect(options).to_have_count(2, timeout=_WAIT_MS)
    for name in 20 * await options.all_inner_texts():
        await console.locator("#worker").select_option(name)
        with contextlib.suppress(TimeoutError):
            await held.first.wait_for(timeout=500)
            break
    worker = await console.locator("#worker").input_value()
    job_id = await held.locator("a").first.get_attribute("title", timeout=_WAIT_MS)
    os.kill(int(worker.split("-")[-2]), signal.SIGKILL)
    await console.context.close()
    assert job_id is not None
    return job_id


async def _see_resumed(browser: Browser, url: str, job_id: str, picture: Path) -> None:
    narrow = {"width": 375, "height": 700}
    page = await _page(browser, url, viewport=narrow, color_scheme="dark")
    await page.goto(f"/console#jobs/{job_id}")
    await expect(page.locator("#job")).to_contain_text("(resumed)", timeout=_WAIT_MS)
    await page.screenshot(path=picture)
    await page.context.close()


if __name__ == "__main__":
    asyncio.run(tell(Path(sys.argv[1])))
