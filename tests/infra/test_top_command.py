"""`batchway top` against a real gateway with a job that has run."""

import asyncio
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import gateway_url, idle_worker, make_settings, running_gateway, worker
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.infra.command_line import call_cli

pytestmark = pytest.mark.anyio
__all__ = ["gateway_url", "idle_worker", "worker"]

KEY = "0123456789abcdef"


@pytest.fixture
def url(redis_server: EmbeddedRedis) -> Iterator[str]:
    with running_gateway(make_settings(redis_server.url, api_key=KEY)) as address:
        yield address


def top(url: str, *options: str, key: str = KEY) -> "subprocess.CompletedProcess[str]":
    return call_cli("top", "--url", url, *options, BATCHWAY_API_KEY=key)


async def run_a_job(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 20}
        headers = {"authorization": f"Bearer {KEY}"}
        (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def test_a_snapshot_shows_lanes_and_workers(url: str, worker: FakeWorker) -> None:
    """As a table if the output is no terminal, and as JSON."""
    await run_a_job(url)
    shown = await asyncio.to_thread(top, url, "--once")
    assert shown.returncode == 0, shown.stderr
    for text in ("interactive", MODEL, worker.incarnation, "heartbeat"):
        assert text in shown.stdout
    snapshot = json.loads((await asyncio.to_thread(top, url, "--json", "-")).stdout)
    standard = next(lane for lane in snapshot["lanes"] if lane["lane"] == "standard")
    assert standard["ttft_s"]
    assert snapshot["workers"][0]["worker"] == worker.incarnation
    assert snapshot["is_broker_up"]


async def test_the_svg_needs_no_other_files(url: str, worker: FakeWorker, tmp_path: Path) -> None:
    """No font or script. It shows the second snapshot."""
    picture = tmp_path / "top.svg"
    done = await asyncio.to_thread(top, url, "--svg", str(picture), "--interval-s", "0.2")
    assert done.returncode == 0, done.stderr
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "Lanes" in text
    assert "url(" not in text.replace("url(#", "")


async def test_a_gateway_without_an_answer_is_an_error(url: str) -> None:
    """No gateway, no key, or no HTTP address: one sentence, exit status 2."""
    for address, key, complaint in (
        ("http://127.0.0.1:1", KEY, "does not answer"),
        (url, "", "answers 401"),
        ("ftp://x", KEY, "must begin with http"),
    ):
        done = await asyncio.to_thread(top, address, "--once", key=key)
        assert done.returncode == 2
        assert complaint in done.stderr
