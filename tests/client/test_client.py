"""The client against a real gateway: every call, broken streams, errors, signatures."""

import asyncio
import base64
import hashlib
import hmac
import json
import subprocess
import sys
import time
from typing import Any

import pytest

import batchway_client
from batchway_client import (
    AsyncClient,
    BadSignature,
    Client,
    Conflict,
    ConnectionLost,
    Event,
    NotFound,
    WaitTimeout,
    verify_webhook,
)
from batchway_client.events import Parser
from tests.client.proxy import breaking_proxy
from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 200}
ENDPOINT = "/v1/completions"
WORDS = [f"w{number} " for number in range(40)]
SECRET = "whsec_" + base64.b64encode(b"0" * 24).decode()


def text_of(events: list[Event]) -> str:
    chunks = [event.data for event in events if event.type == "message"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_a_job_is_submitted_followed_and_deleted(
    worker: FakeWorker, gateway_url: str
) -> None:
    """The life of a job, with asyncio."""
    async with AsyncClient(gateway_url) as client:
        job = await client.submit(ENDPOINT, BODY, metadata={"run": "7"}, retention_s=600)
        assert (job.status, job.has_ended) == ("queued", False)
        done = await client.wait(job.id, timeout_s=20)
        assert done.result is not None
        assert done.result["choices"][0]["text"] == "Hello wörld!"
        events = [event async for event in client.events(job.id)]
        assert (text_of(events), events[-1].type) == ("Hello wörld!", "succeeded")
        middle = events[1].id
        rest = [event async for event in client.events(job.id, after=middle)]
        assert rest == events[2:]
        assert [j.id async for j in client.list(metadata={"run": "7"})] == [job.id]
        await client.delete(job.id)
        with pytest.raises(NotFound):
            await client.get(job.id)


async def test_the_blocking_client_submits_follows_and_deletes(
    worker: FakeWorker, gateway_url: str
) -> None:
    def live() -> tuple[str, list[str]]:
        with Client(gateway_url) as client:
            job = client.submit(ENDPOINT, BODY, lane="batch")
            text = text_of(list(client.events(job.id)))
            assert client.wait(job.id).status == "succeeded"
            ids = [client.submit(ENDPOINT, BODY).id for _ in range(3)] + [job.id]
            listed = [found.id for found in client.list(page_size=2)]
            assert sorted(listed) == sorted(ids)
            client.wait(ids[0])
            client.delete(job.id)
            return text, [found.id for found in client.list(lane="batch")]

    assert await asyncio.to_thread(live) == ("Hello wörld!", [])


async def test_a_broken_stream_is_resumed(worker: FakeWorker, gateway_url: str) -> None:
    """After several breaks no event is missing or repeated, and all bytes are the same."""
    worker.script = says(*WORDS)
    async with AsyncClient(gateway_url) as client:
        job = await client.submit(ENDPOINT, BODY)
        whole = [event async for event in client.events(job.id) if event.type != "queued"]
    with breaking_proxy(gateway_url, max_bytes=1500, num_breaks=6) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        async with AsyncClient(url) as client:
            broken = [event async for event in client.events(job.id)]
        assert proxy.num_broken == 6
    assert broken == whole
    assert text_of(broken) == "".join(WORDS)


async def test_a_broken_blocking_stream_is_resumed(worker: FakeWorker, gateway_url: str) -> None:
    worker.script = says(*WORDS)

    def follow() -> str:
        with breaking_proxy(gateway_url, max_bytes=3000, num_breaks=2) as proxy:
            with Client(gateway_url) as straight:
                job = straight.submit(ENDPOINT, BODY)
                straight.wait(job.id)
            with Client(f"http://127.0.0.1:{proxy.port}") as client:
                return text_of(list(client.events(job.id)))

    assert await asyncio.to_thread(follow) == "".join(WORDS)


async def test_nothing_follows_the_end(worker: FakeWorker, gateway_url: str) -> None:
    """A reader that was killed behind the last event asks for what comes after it."""
    async with AsyncClient(gateway_url) as client:
        job = await client.submit("/v1/completions", BODY)
        ids = [event.id async for event in client.events(job.id) if event.id]
        assert [event async for event in client.events(job.id, after=ids[-1])] == []

    def read() -> list[Event]:
        with Client(gateway_url) as blocking:
            return list(blocking.events(job.id, after=ids[-1]))

    assert await asyncio.to_thread(read) == []


async def test_client_errors_are_distinguished(idle_worker: FakeWorker, gateway_url: str) -> None:
    """By exception, with the gateway's code and the wrong field."""
    async with AsyncClient(gateway_url) as client:
        with pytest.raises(batchway_client.AnswerError) as wrong:
            await client.submit(ENDPOINT, {**BODY, "n": 9})
        assert (wrong.value.code, wrong.value.param) == ("invalid_value", "body.n")
        job = await client.submit(ENDPOINT, BODY)
        with pytest.raises(Conflict) as not_ended:
            await client.delete(job.id)
        assert not_ended.value.code == "not_terminal"
        with pytest.raises(WaitTimeout):
            await client.wait(job.id, timeout_s=0.05)
        assert (await client.reprioritise(job.id, lane="batch", deadline_s=60)).lane == "batch"
        assert (await client.cancel(job.id)).status == "cancelled"
        with pytest.raises(Conflict):
            await client.reprioritise(job.id, lane="standard")
        with pytest.raises(NotFound):
            await client.cancel("job-0-" + "0" * 32)


async def test_an_absent_gateway_raises_connection_lost() -> None:
    """After a few attempts, or after `max_outage_s`."""
    async with AsyncClient("http://127.0.0.1:1", max_outage_s=0.2) as client:
        with pytest.raises(ConnectionLost):
            await client.get("x")
        with pytest.raises(ConnectionLost):
            async for _ in client.events("x"):
                pass


async def test_no_proxy_is_asked_for_an_address_of_this_machine(
    gateway_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one that does not listen."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    async with AsyncClient(gateway_url) as client:
        with pytest.raises(NotFound):
            await client.cancel("job-0-" + "0" * 32)


async def test_a_repeated_submission_is_one_job(worker: FakeWorker, gateway_url: str) -> None:
    """The first response is lost; the repetition finds the job."""
    with breaking_proxy(gateway_url, max_bytes=0, num_breaks=1) as proxy:
        async with AsyncClient(f"http://127.0.0.1:{proxy.port}") as client:
            job = await client.submit(ENDPOINT, BODY, metadata={"k": "v"})
            assert [j.id async for j in client.list(metadata={"k": "v"})] == [job.id]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_do_not_depend_on_how_bytes_are_split(size: int) -> None:
    """Also within a character, and between the line ends of an event."""
    raw = (
        'event: queued\ndata: {"id": "ö"}\n\n: waiting\n\n: waiting\n'
        'id: 1.ab\ndata: {"a": "x\\u2028y"}\n\n'
    )
    data = (raw + "data: [DONE]\n\n").encode()
    parser = Parser()
    events = [e for i in range(0, len(data), size) for e in parser.feed(data[i : i + size])]
    assert events == [Event("queued", {"id": "ö"}), Event("message", {"a": "x\u2028y"}, "1.ab")]


def test_a_callback_is_verified() -> None:
    """A signature of Standard Webhooks is accepted, all others are rejected."""
    body = json.dumps({"type": "job.succeeded"}).encode()
    now = str(int(time.time()))
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    mac = hmac.new(key, b"msg_1." + now.encode() + b"." + body, hashlib.sha256).digest()
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": now,
        "webhook-signature": "v1," + base64.b64encode(mac).decode(),
    }
    assert verify_webhook(SECRET, headers, body) == {"type": "job.succeeded"}
    for wrong in (
        {**headers, "webhook-id": "msg_2"},
        {**headers, "webhook-timestamp": "1"},
        {**headers, "webhook-signature": "nonsense"},
        {},
    ):
        with pytest.raises(BadSignature):
            verify_webhook(SECRET, wrong, body)
    with pytest.raises(BadSignature):
        verify_webhook(SECRET, headers, body + b" ")


def test_the_client_imports_nothing_of_the_server() -> None:
    program = (
        "import sys, batchway_client; "
        "sys.exit(bool({'torch', 'redis', 'fastapi', 'contract'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
