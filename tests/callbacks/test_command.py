"""`batchway callbacks` delivers until SIGTERM; subcommands list, show and replay dead letters."""

import json
import os
import signal
import subprocess
import sys

import pytest

from contract.functions import Functions
from contract.outbox import Outbox
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import Answer, Receiver, always
from tests.callbacks.test_delivery import ended_job, to_url
from tests.contract.some_calls import dead_letter
from tests.fleet import until

pytestmark = pytest.mark.anyio


def command(url: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    ours = ("REDIS_URL", "BATCHWAY_CALLBACK_KEY", "BATCHWAY_CALLBACK_SECRETS")
    base = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen(
        [sys.executable, "-m", "infra", "callbacks", *arguments],
        env=base | {"REDIS_URL": url, "BATCHWAY_NAMESPACE": "test"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(url: str, *arguments: str, **environ: str) -> tuple[int, str]:
    process = command(url, *arguments, **environ)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output + errors


async def test_commands_list_show_and_replay_dead_letters(
    functions: Functions, outbox: Outbox, redis_server: EmbeddedRedis
) -> None:
    """As a table and as JSON, without the URL. A letter is replayed once; an unknown one is an
    error."""
    job_id = await dead_letter(functions, outbox)
    url = redis_server.url
    status, listed = run(url, "dead", "list", "--tenant", "t", "--json", "-")
    assert (status, [row["job"] for row in json.loads(listed)["callbacks"]]) == (0, [job_id])
    status, shown = run(url, "dead", "show", job_id, "--tenant", "t")
    assert (status, "HTTP 410" in shown, "hush" in listed + shown) == (0, True, False)
    assert run(url, "dead", "show", job_id)[0] == 1
    assert run(url, "dead", "replay", job_id, "--tenant", "t") == (0, f"{job_id}: due\n")
    assert await outbox.dead("t") == []


async def test_a_delivery_is_one_line_of_the_log(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """With the job's id. RQ's own four lines are left out."""
    async with Receiver({"/": always(Answer())}) as receiver:
        process = command(
            redis_server.url, "--callback-allow=127.0.0.1", BATCHWAY_CALLBACK_KEY="k" * 16
        )
        with process:
            for number in (1, 2):
                await ended_job(functions, to_url(receiver.url("/")))
                await receiver.until(lambda n=number: len(receiver.messages) == n)  # type: ignore[misc]

            async def are_noted() -> bool:
                return (await functions.snapshot("m", [])).deliveries == {"delivered": 2}

            await until(are_noted)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    begins, *deliveries = errors.splitlines()
    assert "callbacks are delivered" in begins
    assert len(deliveries) == 2
    assert all("callback delivered: HTTP 204 job_id=" in line for line in deliveries)


def test_the_command_needs_a_key_and_ends_on_sigterm(redis_server: EmbeddedRedis) -> None:
    """It does not start without the key that signs RQ's jobs, or with a malformed secret.
    SIGTERM ends it with status 0."""
    status, complaint = run(redis_server.url)
    assert (status, "BATCHWAY_CALLBACK_KEY" in complaint) == (2, True)
    status, complaint = run(
        redis_server.url, BATCHWAY_CALLBACK_KEY="k" * 16, BATCHWAY_CALLBACK_SECRETS="whsec_hush"
    )
    assert (status, "BATCHWAY_CALLBACK_SECRETS" in complaint, "hush" in complaint) == (
        2,
        True,
        False,
    )
    process = command(redis_server.url, BATCHWAY_CALLBACK_KEY="k" * 16)
    with process:
        try:
            assert process.stderr is not None
            while "callbacks are delivered" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
