"""Answers in a real Chromium, by the two ways of docs/browsers.md: while the page is reloaded,
opened again, cut off, and its gateway killed, the text goes on, each token once."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from contract.connection import end_tasks
from contract.function_types import Claimed
from infra.embedded_redis import EmbeddedRedis
from tests.browser import chromium, needs_chromium
from tests.clients.run import ENVIRONMENTS
from tests.gateway.conftest import Bearer, gateway_process
from tests.gateway.fake_worker import LEASE_S, MODEL, FakeWorker, says
from tests.markdown import code_blocks

pytestmark = [pytest.mark.anyio, needs_chromium, pytest.mark.campaign]

ROOT = Path(__file__).resolve().parents[2]
NPM = shutil.which("npm")
WORDS = tuple(f"word-{number} " for number in range(1, 9))
LIMIT_MS = 30_000  # the SDK tries again after two and four seconds
QUESTION = "Which words are there?"
# Keeps each text that the page has shown since it was loaded.
WATCH = """(selector) => {
    window.shown = [];
    const note = () => window.shown.push(document.querySelector(selector)?.textContent ?? "");
    const what = {subtree: true, childList: true, characterData: true};
    new MutationObserver(note).observe(document, what);
}"""


class Balancer:
    """A port in front of servers, which passes each connection on to the one that is its target;
    502 where that is dead."""

    def __init__(self) -> None:
        self.url = self.target = ""
        self._clients = set[asyncio.StreamWriter]()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Balancer"]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = httpx.URL(self.target)
        try:
            theirs, to_them = await asyncio.open_connection(url.host, url.port)
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        self._clients.add(writer)
        await asyncio.gather(_pass_on(reader, to_them), _pass_on(theirs, writer))
        self._clients.discard(writer)

    def cut(self) -> None:
        """Breaks all connections."""
        for writer in self._clients:
            writer.transport.abort()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
    sink.close()


@pytest.fixture
async def balancer() -> AsyncIterator[Balancer]:
    async with Balancer().running() as found:
        yield found


@pytest.fixture
async def front() -> AsyncIterator[Balancer]:
    async with Balancer().running() as found:
        yield found


@contextlib.asynccontextmanager
async def living_worker(worker: FakeWorker, held: Sequence[Claimed]) -> AsyncIterator[None]:
    """Gateways know that it lives, and that it holds these jobs, however long a browser takes."""

    async def beat() -> None:
        while True:
            await worker.beat(*held)
            await asyncio.sleep(LEASE_S / 10)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        await end_tasks(beating)


async def goes_on(
    open_and_ask: Callable[[Page], Awaitable[None]],
    selector: str,
    link: Balancer,
    balancer: Balancer,
    worker: FakeWorker,
    redis_url: str,
    **environ: str,
) -> None:
    """Asks on a page, and reads the answer where `selector` says while everything breaks. `link`:
    between the pages and the first server."""
    with (
        gateway_process(redis_url, **environ) as (dying, balancer.target),
        gateway_process(redis_url, **environ) as (_, living),
    ):
        held = list[Claimed]()
        async with chromium() as browser, living_worker(worker, held):
            context, other_context = await browser.new_context(), await browser.new_context()
            page, other = await context.new_page(), await other_context.new_page()
            await open_and_ask(page)
            held.append(claimed := await worker.claim())
            events = iter(enumerate(says(*WORDS)(claimed.job), 1))

            async def says_next(*pages: Page) -> None:
                """One more word, which these pages show behind the ones before."""
                number, event = next(events)
                await worker.say(claimed, number, event)
                for each in pages:
                    shown = expect(each.locator(selector))
                    await shown.to_have_text("".join(WORDS[:number]), timeout=LIMIT_MS)

            await says_next(page)
            await page.reload()
            await says_next(page)
            await other.goto(page.url)
            for each in (page, other):
                await each.evaluate(WATCH, selector)
            await says_next(page, other)

            dying.kill()
            dying.wait()
            await says_next()  # while nobody can read it
            balancer.target = living
            await says_next(page, other)

            await context.set_offline(True)  # which ends no connection by itself
            link.cut()
            await says_next(other)
            assert await page.locator(selector).text_content() == "".join(WORDS[:5])
            await context.set_offline(False)
            await says_next(page, other)

            await says_next(page, other)
            await worker.finish(claimed, len(WORDS) + 1)
            for each in (page, other):
                shown = await each.evaluate("window.shown")
                assert shown
                for text in shown:
                    assert "".join(WORDS).startswith(text), text
            await page.reload()
            await expect(page.locator(selector)).to_have_text("".join(WORDS), timeout=LIMIT_MS)
        assert len(worker.seen) == 1


@pytest.mark.skipif(NPM is None, reason="npm is not installed")
async def test_a_chat_of_the_ai_sdk_goes_on(
    redis_server: EmbeddedRedis,
    bearer: Bearer,
    idle_worker: FakeWorker,
    balancer: Balancer,
    front: Balancer,
) -> None:
    """`examples/chat`, as it is: useChat with resumable streams."""
    key = (await bearer())["authorization"].removeprefix("Bearer ")

    with node_server(BATCHWAY_URL=balancer.url, BATCHWAY_API_KEY=key, MODEL=MODEL) as address:
        front.target = address

        async def open_and_ask(page: Page) -> None:
            await page.goto(f"{front.url}/a-chat")
            await page.fill("input", QUESTION)
            await page.keyboard.press("Enter")

        servers = front, balancer, idle_worker, redis_server.url
        await goes_on(open_and_ask, "p.assistant", *servers)


@contextlib.contextmanager
def node_server(**environ: str) -> Iterator[str]:
    """The address that the example prints, which runs in an environment of its own."""
    folder = ENVIRONMENTS / "ai-sdk"
    shutil.copytree(ROOT / "examples" / "chat", folder, dirs_exist_ok=True)
    assert NPM is not None
    subprocess.run([NPM, "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
    with subprocess.Popen(
        ["node", "server.mjs"],
        cwd=folder,
        env=os.environ | environ | {"PORT": "0"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def test_a_page_follows_a_job_by_itself(
    redis_server: EmbeddedRedis, bearer: Bearer, idle_worker: FakeWorker, balancer: Balancer
) -> None:
    """The page of docs/browsers.md, of another origin than the gateways, with a token of its job,
    for which it asks its own site."""
    key = await bearer()
    text = (ROOT / "docs" / "browsers.md").read_text()
    [html] = [block.text for block in code_blocks(text) if block.language == "html"]

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target, body = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode(), html
        if target.startswith("/token"):
            async with httpx.AsyncClient(base_url=balancer.target, headers=key) as http:
                path = f"/v1/jobs/{target.partition('=')[2]}/token"
                made = await http.post(path, json={"lifetime_s": 60})
                body = made.json()["value"]
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n"
        writer.write((head + body).encode())
        writer.close()

    async with await asyncio.start_server(site, "127.0.0.1", 0) as server:
        origin = f"http://localhost:{server.sockets[0].getsockname()[1]}"

        async def open_and_ask(page: Page) -> None:
            messages = [{"role": "user", "content": QUESTION}]
            job = {
                "endpoint": "/v1/chat/completions",
                "body": {"model": MODEL, "messages": messages},
            }
            async with httpx.AsyncClient(base_url=balancer.target, headers=key) as http:
                job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
            await page.goto(f"{origin}/?gateway={balancer.url}&job={job_id}")

        servers = balancer, balancer, idle_worker, redis_server.url
        await goes_on(open_and_ask, "#answer", *servers, BATCHWAY_ALLOWED_ORIGINS=origin)
