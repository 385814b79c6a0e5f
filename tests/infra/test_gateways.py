"""Several gateways behind one port: of `batchway up` and of `batchway gateway`."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from batchway_client.events import Parser
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Program
from tests.infra.processes import command_of, descendants, is_alive, wait_until
from tests.infra.stack import MODEL, Stack, running_stack
from tests.infra.test_cli import run_cli

pytestmark = pytest.mark.e2e

ENDLESS = HashModelOptions(step_s=0.02, eos_rate=0.0)
NUM = 3


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(f"--gateways={NUM}", model=ENDLESS) as stack:
        assert stack.url
        yield stack


def own_urls(stack: Stack) -> list[str]:
    """The address of each gateway alone, by its number, as its line says it."""
    found = {}
    for line in stack.lines:
        match = re.match(r"(gateway-\d) .*listening on (\S+) port \d+, alone on port (\d+)", line)
        if match:
            found[match[1]] = f"http://{match[2]}:{match[3]}"
    return [found[name] for name in sorted(found)]


def gateways_below(pid: int) -> list[int]:
    return [each for each in descendants(pid) if "infra gateway" in command_of(each)]


async def started(http: httpx.AsyncClient, url: str, max_tokens: int) -> tuple[str, Any]:
    """A stream at its first event: its job's id, and its response."""
    body = {"model": MODEL, "prompt": "go on", "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    request = http.build_request("POST", f"{url}/v1/completions", json=body)
    response = await http.send(request, stream=True)
    assert response.status_code == 200, await response.aread()
    return response.headers["x-job-id"], response


async def tokens_of(response: httpx.Response) -> list[int]:
    found: list[int] = []
    parser = Parser()
    async for part in response.aiter_bytes():
        for event in parser.feed(part):
            if isinstance(event.data, dict):
                for choice in event.data.get("choices", ()):
                    found += choice.get("token_ids") or ()
    return found


def test_every_gateway_serves_the_port_and_one_of_its_own(stack: Stack) -> None:
    """Each answers at its own address, where its counts are its own, and at the shared one."""
    wait_until(lambda: len(own_urls(stack)) == NUM)
    urls = own_urls(stack)
    assert len({*urls, stack.url}) == NUM + 1
    for number, url in enumerate(urls, 1):
        for _ in range(number):
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
    for number, url in enumerate(urls, 1):
        page = httpx.get(f"{url}/metrics").text
        counted = re.search(r'http_requests_total\{.*"/v1/models".*\} (\S+)', page)
        assert counted is not None
        assert float(counted[1]) == number


def test_answers_of_many_connections_come_from_all_gateways(stack: Stack) -> None:
    """Each gets its part of 90 connections at once."""

    def served() -> list[float]:
        pages = [httpx.get(f"{url}/metrics").text for url in own_urls(stack)]
        counts = [re.findall(r'http_requests_total\{.*"/livez".*\} (\S+)', page) for page in pages]
        return [sum(map(float, each)) for each in counts]

    async def ask() -> None:
        async with httpx.AsyncClient() as http:
            answers = await asyncio.gather(*(http.get(f"{stack.url}/livez") for _ in range(90)))
        assert {each.status_code for each in answers} == {200}

    asyncio.run(ask())
    counts = served()
    assert sum(counts) == 90
    assert min(counts) >= 9


def test_what_one_gateway_began_others_follow_and_cancel(stack: Stack) -> None:
    """A stream is followed from its start at another gateway and cancelled at a third."""
    urls = own_urls(stack)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            job_id, first = await started(http, urls[0], 400)
            request = http.build_request("GET", f"{urls[1]}/v1/jobs/{job_id}/events")
            second = await http.send(request, stream=True)
            reading = [asyncio.create_task(each.aread()) for each in (first, second)]
            answer = await http.post(f"{urls[2]}/v1/jobs/{job_id}/cancel")
            assert answer.status_code == 200
            await asyncio.gather(*reading)
            states = [(await http.get(f"{url}/v1/jobs/{job_id}")).json() for url in urls]
        assert {state["status"] for state in states} == {"cancelled"}

    asyncio.run(run())


def test_limits_hold_over_all_gateways_together(stack: Stack) -> None:
    """A tenant's requests of a minute are counted once, wherever they come. From here on the stack
    wants a key."""
    redis_url = stack.wait_for("| redis (of our own)").split()[-1]
    made = run_cli(
        *("keys", "create", "--tenant=limited", "--requests-per-minute=6", "--json=-"),
        f"--redis-url={redis_url}",
    )
    key = json.loads(made.stdout)["api_key"]
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    statuses = [
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code
        for url in own_urls(stack) * 3
    ]
    assert statuses == [200] * 6 + [429] * 3


def test_streams_go_on_when_a_gateway_dies_and_all_end_at_once() -> None:
    """The others' streams lose nothing, the dead one's goes on at another, a new process takes its
    place; then one Ctrl-C ends all, after their streams."""
    with running_stack("--gateways=2", model=ENDLESS) as stack:
        assert stack.url
        wait_until(lambda: len(own_urls(stack)) == 2)
        urls = own_urls(stack)

        async def run() -> None:
            async with httpx.AsyncClient(timeout=60) as http:
                (lost_id, lost), (_, kept) = [await started(http, url, 150) for url in urls]
                [dead] = [
                    pid
                    for pid in gateways_below(stack.process.pid)
                    if command_of(pid).split()[-1] == _fd_of(stack, 1)
                ]
                os.kill(dead, signal.SIGKILL)
                wait_until(lambda: not is_alive(dead))
                # Each a new connection; none goes to the dead one.
                assert all(_answers(f"{stack.url}/livez") for _ in range(20))
                with pytest.raises(httpx.TransportError):
                    await lost.aread()
                request = http.build_request("GET", f"{urls[1]}/v1/jobs/{lost_id}/events")
                resumed = await http.send(request, stream=True)
                assert resumed.status_code == 200
                found = await asyncio.gather(tokens_of(resumed), tokens_of(kept))
                assert [len(each) for each in found] == [150, 150]
            stack.wait_for("gateway-1 ended with signal SIGKILL")

        asyncio.run(run())
        stack.wait_for("gateway-1 |", 2)
        wait_until(lambda: len(gateways_below(stack.process.pid)) == 2)
        children = stack.children()

        async def drain() -> None:
            async with httpx.AsyncClient(timeout=60) as http:
                streams = [await started(http, url, 50) for url in [urls[1], stack.url]]
                stack.process.send_signal(signal.SIGINT)
                found = await asyncio.gather(*(tokens_of(each) for _, each in streams))
            assert [len(each) for each in found] == [50, 50]

        asyncio.run(drain())
        assert stack.wait() == 0
        stack.assert_left_nothing(children)


def _fd_of(stack: Stack, number: int) -> str:
    """The last word of the command of the gateway with this number: its own socket."""
    lines = sorted(command_of(pid).split()[-1] for pid in gateways_below(stack.process.pid))
    return lines[number - 1]


def test_gateways_alone_are_restarted_and_end_together(redis_server: EmbeddedRedis) -> None:
    """`batchway gateway --gateways 2`, or the variable, as in the unit and the compose file."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    environ = {"REDIS_URL": redis_server.url, "BATCHWAY_GATEWAYS": "2"}
    program = Program("infra", "gateway", f"--port={port}", environ=environ)
    try:
        urls = [f"http://127.0.0.1:{port + number}/livez" for number in range(3)]
        wait_until(lambda: all(map(_answers, urls)))
        [first, second] = gateways_below(program.pid)[:2]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len({*gateways_below(program.pid)} - {first}) == 2)
        wait_until(lambda: all(map(_answers, urls)))
        left = gateways_below(program.pid)
        assert second in left
        program.terminate()
        assert program.wait(60) == 0
        wait_until(lambda: not any(map(_answers, urls)))
    finally:
        program.kill_group()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_port_that_is_taken_is_named(redis_server: EmbeddedRedis) -> None:
    """Also one that only a single gateway would have."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        environ = {"REDIS_URL": redis_server.url}
        done = run_cli("gateway", f"--port={port - 2}", "--gateways=3", **environ)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    done = run_cli("gateway", "--port=65535", "--gateways=2", **environ)
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1 port 65536" in done.stderr
