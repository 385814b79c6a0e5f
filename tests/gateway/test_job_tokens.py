"""Tokens for one job: what they permit, for how long, and where they may stand."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.keys import Keys
from gateway.prepare import revocation
from gateway.redis import key_ring
from gateway.settings import GatewaySettings
from tests.fleet import until
from tests.gateway.conftest import Bearer, Gateways, openapi_document
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_jobs import field

pytestmark = pytest.mark.anyio

OWN_KEY = "a-key-of-the-operator"
JOB: dict[str, Any] = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
PERMITTED = {
    ("GET", "/v1/jobs/{job_id}"),
    ("GET", "/v1/jobs/{job_id}/events"),
    ("POST", "/v1/jobs/{job_id}/cancel"),
}
PROMISED_S = 5


class Clock:
    """The clock that tells gateways of this process when tokens end."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.num_asked = 0

    def time(self) -> float:
        self.num_asked += 1
        return time.time() + self.ahead_s

    async def is_asked(self) -> None:
        """Returns once an open stream was checked again."""
        start = self.num_asked

        async def is_so() -> bool:
            return self.num_asked > start + 1

        await until(is_so)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(key_ring, "time", SimpleNamespace(time=clock.time))
    monkeypatch.setattr(revocation, "REMEMBERED_S", 0.05)
    return clock


def by_header(token: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {token}"}}


def by_address(token: str) -> dict[str, Any]:
    return {"params": {"token": token}}


PLACES: list[Callable[[str], dict[str, Any]]] = [
    by_header,
    by_address,
    lambda token: {"headers": {"x-api-key": token}},
]


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def new_job(http: httpx.AsyncClient, key: dict[str, str], **asked: Any) -> tuple[str, str]:
    """A job's path, and a token of it."""
    job = (await http.post("/v1/jobs", json=JOB | {"token": asked}, headers=key)).json()
    return f"/v1/jobs/{job['id']}", job["token"]["value"]


@pytest.mark.parametrize("place", PLACES)
async def test_a_token_reads_follows_and_cancels_its_job(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker, place: Any
) -> None:
    """Made with the job or later, in a header or in the address, at any gateway."""
    key = await bearer()
    async with gateways() as http, gateways() as other:
        path, token = await new_job(http, key)
        later = (await http.post(f"{path}/token", headers=key)).json()
        for each in (token, later["value"]):
            read = await other.get(path, **place(each))
            assert (read.status_code, read.json()["status"]) == (200, "queued")
        async with other.stream("GET", f"{path}/events", **place(token)) as stream:
            assert stream.status_code == 200
            assert stream.headers["referrer-policy"] == "no-referrer"
            cancelled = await http.post(f"{path}/cancel", **place(token))
            assert cancelled.json()["status"] == "cancelled"
            assert "event: cancelled" in (await stream.aread()).decode()


async def test_by_a_token_an_answer_is_followed_from_any_event(
    gateways: Gateways, bearer: Bearer, worker: FakeWorker
) -> None:
    """By the header that EventSource sends, or by the address, with the same bytes."""
    async with gateways() as http, gateways() as other:
        path, token = await new_job(http, await bearer())
        whole = (await http.get(f"{path}/events", params={"token": token})).text.split("\n\n")
        parts = [part for part in whole if not part.startswith("event: queued")]
        ids = [field(part, "id") for part in parts]
        assert len([each for each in ids if each]) == 4
        for number, last_id in enumerate(ids):
            if last_id is None:
                continue
            for headers, more in (
                ({"last-event-id": last_id}, {}),
                ({}, {"starting_after": last_id}),
            ):
                asked = {"token": token} | more
                rest = await other.get(f"{path}/events", params=asked, headers=headers)
                found = rest.text.removeprefix(": waiting\n")
                assert found.split("\n\n") == parts[number + 1 :]


async def test_a_token_is_for_nothing_else(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker
) -> None:
    """Each other route is 403, whatever it is for; another job is the same 404 as one that does
    not exist, also if it is of the same key."""
    key = await bearer(scopes=(Scope.ADMIN,))
    async with gateways() as http:
        path, token = await new_job(http, key)
        other_path, other = await new_job(http, key)
        ids = {"job_id": path.rpartition("/")[2], "response_id": "resp_" + path[13:]}
        for template, methods in openapi_document()["paths"].items():
            filled = re.sub(r"\{(\w+)\}", lambda m: ids.get(m[1], "x"), template)
            for method in map(str.upper, methods):
                if (method, template) in PERMITTED or "security" not in methods[method.lower()]:
                    continue
                answer = await http.request(method, filled, **by_header(token))
                assert code(answer) == (403, "missing_scope"), (method, template)
                answer = await http.request(method, filled, **by_address(token))
                assert code(answer) == (401, "invalid_api_key"), (method, template)
        for method, template in PERMITTED:
            unknown = f"/v1/jobs/job-0-{'0' * 32}"
            answers = [
                await http.request(method, template.format(job_id=each), **by_header(token))
                for each in (other_path[9:], unknown[9:], "x")
            ]
            assert {answer.text for answer in answers} == {answers[0].text}
            assert code(answers[0]) == (404, "job_not_found")
        foreign = await http.get(path, params={"tenant": "other"}, **by_header(token))
        assert code(foreign) == (403, "missing_scope")
        assert (await http.get(other_path, **by_header(other))).json()["status"] == "queued"


async def test_a_token_permits_no_more_than_its_key(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker
) -> None:
    """Neither its rights nor its lanes; who may not read gets none."""
    whole = await bearer()
    reader = await bearer(scopes=(Scope.JOBS_READ,))
    writer = await bearer(scopes=(Scope.JOBS_WRITE,))
    of_lane = await bearer(lanes=("batch",))
    async with gateways() as http:
        path, _ = await new_job(http, whole)
        for key, refused in ((reader, "missing_scope"), (of_lane, "lane_not_allowed")):
            token = (await http.post(f"{path}/token", json={}, headers=key)).json()["value"]
            assert (await http.get(path, **by_header(token))).status_code == 200
            assert code(await http.post(f"{path}/cancel", **by_header(token))) == (403, refused)
        for asked, json in ((f"{path}/token", {}), ("/v1/jobs", JOB | {"token": {}})):
            answer = await http.post(asked, json=json, headers=writer)
            assert code(answer) == (403, "missing_scope")
        theirs = await bearer("other")
        answer = await http.post(f"{path}/token", json={}, headers=theirs)
        assert code(answer) == (404, "job_not_found")
        assert code(await http.post(f"{path}/token")) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "lifetime", [0, -1, 3601, 1.5, "60", True, float("1e300")], ids=lambda value: str(value)[:5]
)
async def test_a_token_lives_for_minutes(http: httpx.AsyncClient, lifetime: Any) -> None:
    """An hour at most; the error names the field."""
    answer = await http.post("/v1/jobs", json=JOB | {"token": {"lifetime_s": lifetime}})
    assert code(answer)[0] == 400
    assert answer.json()["error"]["param"] == "token.lifetime_s"
    answer = await http.post(f"/v1/jobs/job-0-{'0' * 32}/token", json={"lifetime": 60})
    assert (code(answer), answer.json()["error"]["param"]) == (
        (400, "unknown_parameter"), "lifetime"
    )  # fmt: skip


@pytest.mark.parametrize("has_keys", [True, False], ids=["with keys", "without keys"])
async def test_a_token_ends_and_its_open_stream_a_minute_later(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker, clock: Clock, has_keys: bool
) -> None:
    """Calls are refused from its end on. A stream that it has opened goes on, and ends before the
    minute is over. The job goes on, and another token reads it from there."""
    key = await bearer() if has_keys else {}
    async with gateways() as http:
        path, token = await new_job(http, key, lifetime_s=100)
        claimed = await idle_worker.claim()
        async with http.stream("GET", f"{path}/events", params={"token": token}) as stream:
            lines = stream.aiter_lines()
            clock.ahead_s = 100
            for place in PLACES:
                assert code(await http.get(path, **place(token))) == (401, "invalid_api_key")
            [event] = says("Hello")(claimed.job)
            await clock.is_asked()  # it would have ended by now
            await idle_worker.say(claimed, 1, event)
            assert [line async for line in _until(lines, "Hello")]
            clock.ahead_s = 100 + 60 - key_ring.REMEMBERED_S
            async with asyncio.timeout(PROMISED_S):
                rest = [line async for line in lines]
            assert any('"code":"invalid_api_key"' in line for line in rest)
            assert rest[-2:] == ["data: [DONE]", ""]
        assert (await idle_worker.beat(claimed)) == []
        fresh = (await http.post(f"{path}/token", headers=key)).json()
        assert (await http.get(path, **by_address(fresh["value"]))).status_code == 200


async def _until(lines: Any, text: str) -> Any:
    async for line in lines:
        if text in line:
            yield line
            return


@pytest.mark.parametrize("ends", ["revoked", "expired"])
async def test_a_token_ends_with_its_key(
    gateways: Gateways,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    idle_worker: FakeWorker,
    ends: str,
) -> None:
    """At once for new calls, within five seconds for open ones. Another key of the tenant does not
    keep it alive."""
    api_keys = ApiKeys(redis_client, keys)
    await api_keys.create(KeyTerms(tenant="acme"))
    lifetime_s = 3.0 if ends == "expired" else None
    async with gateways() as http, gateways() as other:
        value, prefix = await api_keys.create(KeyTerms(tenant="acme"), lifetime_s=lifetime_s)
        path, token = await new_job(http, {"x-api-key": value})
        async with http.stream("GET", f"{path}/events", params={"token": token}) as stream:
            if ends == "revoked":
                await api_keys.revoke(prefix)
            async with asyncio.timeout(3.0 + PROMISED_S):
                body = (await stream.aread()).decode()
            assert '"code":"invalid_api_key"' in body
        for gateway in (http, other):
            answer = await gateway.get(path, **by_address(token))
            assert code(answer) == (401, "invalid_api_key")


async def test_nobody_makes_or_alters_a_token(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker
) -> None:
    """Each part is signed; parts of two tokens, of a session or of another namespace make none."""
    mine, theirs = await bearer(), await bearer("other")
    async with gateways(api_key=OWN_KEY) as http:
        path, token = await new_job(http, mine, lifetime_s=60)
        other_path, other = await new_job(http, theirs, lifetime_s=60)
        kind, prefix, end, *job, signature = token.split("-")
        swapped = [
            token.replace(end, str(int(end) + 1)),
            token.replace("-".join(job), other_path.rpartition("/")[2]),
            token.replace(prefix, other.split("-")[1]),
            token.replace(prefix, "operator"),
            token.replace(signature, other.split("-")[-1]),
            token.replace(signature, "0" * 64),
            token[:-1],
            token + "0",
            token.upper(),
            "-".join([kind, prefix, end, signature]),
            "-".join(["bws", prefix, end, signature]),
            path.rpartition("/")[2],
        ]
        for forged in swapped:
            for place in PLACES:
                answer = await http.get(path, **place(forged))
                assert code(answer) == (401, "invalid_api_key"), forged


async def test_a_key_in_the_address_is_none(gateways: Gateways, bearer: Bearer) -> None:
    """Addresses are logged by others: only what ends soon may stand there."""
    key = (await bearer())["authorization"].removeprefix("Bearer ")
    async with gateways(api_key=OWN_KEY) as http:
        for value in (key, OWN_KEY):
            answer = await http.get(f"/v1/jobs/job-0-{'0' * 32}", params={"token": value})
            assert code(answer) == (401, "invalid_api_key")


async def test_tokens_of_the_operators_own_key_and_of_none(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker
) -> None:
    """Where no key is needed a token is as strict, and ends with the first key that is made."""
    async with gateways(api_key=OWN_KEY) as http:
        path, token = await new_job(http, {"x-api-key": OWN_KEY})
        assert (await http.get(path, **by_address(token))).status_code == 200
    async with gateways() as http:
        assert code(await http.get(path, **by_address(token))) == (401, "invalid_api_key")
        path, token = await new_job(http, {})
        other_path, _ = await new_job(http, {})
        assert (await http.get(path, **by_address(token))).status_code == 200
        assert code(await http.get(other_path, **by_address(token))) == (404, "job_not_found")
        assert code(await http.get("/v1/jobs", **by_header(token))) == (403, "missing_scope")
        await bearer()
    async with gateways() as http:
        assert code(await http.get(path, **by_address(token))) == (401, "invalid_api_key")


async def test_an_idempotent_job_gives_each_caller_a_token(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker
) -> None:
    """Of the one job."""
    key = await bearer() | {"idempotency-key": "k"}
    async with gateways() as http:
        paths = set()
        for _ in range(2):
            path, token = await new_job(http, key)
            assert (await http.get(path, **by_header(token))).status_code == 200
            paths.add(path)
    assert len(paths) == 1


async def test_a_token_takes_few_calls_of_its_key(
    gateways: Gateways, bearer: Bearer, idle_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """429 beyond; the key and tokens of other jobs have theirs."""
    monkeypatch.setattr(GatewaySettings, "max_calls_per_token", 2)
    key = await bearer()
    async with gateways() as http:
        path, token = await new_job(http, key)
        other_path, other = await new_job(http, key)
        events = f"{path}/events?token={token}"
        async with http.stream("GET", events), http.stream("GET", events):
            refused = await http.get(path, **by_header(token))
            assert code(refused) == (429, "too_many_calls")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await http.get(other_path, **by_header(other))).status_code == 200
            assert (await http.get(path, headers=key)).status_code == 200
        for _ in range(3):
            await http.post(f"{path}/cancel", **by_header(token))


async def test_no_log_has_a_token(
    gateways: Gateways, bearer: Bearer, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a good one nor a bad one, wherever it stands, nor the metrics."""
    caplog.set_level(logging.DEBUG)
    key = await bearer(scopes=(Scope.ADMIN,))
    async with gateways() as http:
        path, token = await new_job(http, key)
        bad = token[:-4] + "dead"
        for each in (token, bad):
            for place in PLACES:
                for ask in (f"{path}/events", path, "/v1/jobs", "/v1/nothing"):
                    await http.get(ask, **place(each))
                    await http.post(ask, content=b"{", **place(each))
        metrics = (await http.get("/metrics", headers=key)).text
    ours = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    lines = "\n".join(f"{each.getMessage()} {each.exc_info} {vars(each)}" for each in ours)
    assert "accepted job_id=" in lines
    secret = token.rpartition("-")[2][:-4]
    assert secret not in lines + metrics
    assert "batchway_" in metrics
