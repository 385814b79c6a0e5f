"""Pages of other origins in a real Chromium: what they send to a gateway without keys is refused,
and what the gateway allows works and can be read."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page

from infra.embedded_redis import EmbeddedRedis
from tests.browser import chromium, needs_chromium
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = [pytest.mark.anyio, needs_chromium, pytest.mark.campaign]

PAGE = b"<!doctype html><title>another site</title><iframe name=frame></iframe>"
# Each sends what a page may send without asking: no CORS preflight comes before it.
SIMPLE = {
    "a file": """
        const form = new FormData();
        form.append("purpose", "batch");
        form.append("file", new Blob(["{}"]), "a.jsonl");
        return fetch(url + "/v1/files", {method: "POST", mode: "no-cors", body: form});
    """,
    "a file with the browser's cookies": """
        const form = new FormData();
        form.append("purpose", "batch");
        form.append("file", new Blob(["{}"]), "a.jsonl");
        const options = {method: "POST", mode: "no-cors", credentials: "include", body: form};
        return fetch(url + "/v1/files", options);
    """,
    "a form": """
        document.body.innerHTML += `<form target=frame method=post action="${url}/v1/files"
            enctype="multipart/form-data"><input name=purpose value=batch>
            <input name=file type=file></form>`;
        const file = new DataTransfer();
        file.items.add(new File(["{}"], "a.jsonl"));
        document.querySelector("[type=file]").files = file.files;
        document.querySelector("form").submit();
    """,
    "no body": """
        return fetch(url + "/v1/uploads/x/cancel", {method: "POST", mode: "no-cors"});
    """,
    "a beacon": """
        navigator.sendBeacon(url + "/v1/jobs/x/cancel", "x");
    """,
}
CALLS = """async ([url, model]) => {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", new Blob(["{}"]), "a.jsonl");
    const file = await fetch(url + "/v1/files", {method: "POST", body: form});
    const headers = {"content-type": "application/json", "idempotency-key": "1"};
    headers.authorization = "Bearer x";
    const body = JSON.stringify({model, prompt: "ab", max_tokens: 20, stream: true});
    const stream = await fetch(url + "/v1/completions", {method: "POST", headers, body});
    const wrong = await fetch(url + "/v1/jobs", {method: "POST", headers, body: "{"});
    const gone = await fetch(url + "/v1/files/" + (await file.json()).id, {method: "DELETE"});
    return {
        statuses: [file.status, stream.status, wrong.status, gone.status],
        ids: [file, stream, wrong, gone].map((each) => each.headers.get("x-request-id")),
        job: stream.headers.get("x-job-id"),
        text: await stream.text(),
        error: (await wrong.json()).error.code,
    };
}"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@asynccontextmanager
async def other_site(browser: Browser, host: str) -> AsyncIterator[tuple[Page, str]]:
    """A page of a server of its own on this machine, and its origin."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(PAGE)}\r\n\r\n"
        writer.write(head.encode() + PAGE)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = f"http://{host}:{server.sockets[0].getsockname()[1]}"
        page = await browser.new_page()
        try:
            await page.goto(origin)
            yield page, origin
        finally:
            await page.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["another site", "another port"])
async def test_what_other_pages_send_is_refused(
    browser: Browser,
    redis_server: EmbeddedRedis,
    tmp_path_factory: pytest.TempPathFactory,
    host: str,
) -> None:
    """Files, forms, requests without a body, beacons: 403, and nothing is stored."""
    store = str(tmp_path_factory.mktemp("store"))
    with running_gateway(make_settings(redis_server.url, object_store=store)) as url:
        async with other_site(browser, host) as (page, _), httpx.AsyncClient(base_url=url) as http:
            for name, script in SIMPLE.items():
                async with page.expect_response(lambda found: found.url.startswith(url)) as answer:
                    await page.evaluate(f"async (url) => {{ {script} }}", url)
                assert (await answer.value).status == 403, name
            with pytest.raises(Exception, match="Failed to fetch"):
                await page.evaluate(CALLS, [url, MODEL])
            assert (await http.get("/v1/files")).json()["data"] == []


async def test_what_the_gateway_allows_works_and_is_readable(
    browser: Browser,
    redis_server: EmbeddedRedis,
    worker: FakeWorker,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Of the listed origin: a file, a stream, an error, their headers. Another port is refused."""
    store = str(tmp_path_factory.mktemp("store"))
    async with (
        other_site(browser, "localhost") as (page, origin),
        other_site(browser, "localhost") as (stranger, _),
    ):
        settings = make_settings(redis_server.url, object_store=store, allowed_origins=(origin,))
        with running_gateway(settings) as url:
            found: dict[str, Any] = await page.evaluate(CALLS, [url, MODEL])
            with pytest.raises(Exception, match="Failed to fetch"):
                await stranger.evaluate(CALLS, [url, MODEL])
    assert found["statuses"] == [200, 200, 400, 200]
    assert all(found["ids"])
    assert found["job"].startswith("job-")
    assert found["text"].endswith("data: [DONE]\n\n"), json.dumps(found)
    assert found["error"] == "invalid_json"
