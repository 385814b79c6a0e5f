"""Mutated bodies of accepted requests; `python -m tests.gateway.mutations` draws 30,000."""

import json
import random

import httpx
import pytest

from tests.gateway.conftest import openapi_document
from tests.gateway.mutations.campaign import run_mutations
from tests.gateway.mutations.drawing import Request, draw, request_of
from tests.gateway.mutations.judge import Announced, judge
from tests.gateway.mutations.seeds import CHANGE, COMPLETIONS, SEEDS
from tests.infra.processes import check_ctrl_c

ANNOUNCED = Announced({("POST", COMPLETIONS): {200, 400, 500}}, {"invalid_value", "engine_error"})
REQUEST = Request("", "POST", COMPLETIONS, "", (), b'{"model": "m", "stop": {"a.b": 1}}')
CHOICE = {"index": 0, "text": "a", "finish_reason": "stop"}


@pytest.mark.anyio
@pytest.mark.e2e
@pytest.mark.campaign
async def test_mutated_bodies_are_served_or_refused_well() -> None:
    """Afterwards all processes still run, nothing is left open and no log contains a prompt."""
    report = await run_mutations(1_000, seed=1)

    assert report.violations == []
    assert report.num_accepted > report.num_queued > 500


@pytest.mark.campaign
@pytest.mark.e2e
def test_ctrl_c_ends_a_run() -> None:
    """Redis, its reaper, the gateway, the worker and the engine end."""
    check_ctrl_c("tests.gateway.mutations", "--bodies=1000000", "of 1000000 bodies", 5)


def test_requests_are_drawn_from_the_seed_alone() -> None:
    """Equal numbers give equal bytes; each request differs from its seed."""

    def drawn(seed: str) -> list[Request]:
        return [draw(random.Random(f"{seed}-{number}"), number) for number in range(300)]

    once = drawn("1")
    assert once == drawn("1")
    assert once != drawn("2")
    assert {request.path for request in once} == {seed.path for seed in SEEDS}
    for number, request in enumerate(once):
        unchanged = {(r.body, r.headers, r.query) for r in (request_of(s, number) for s in SEEDS)}
        assert (request.body, request.headers, request.query) not in unchanged


def refusal(status: int, code: str, param: str | None) -> httpx.Response:
    error = {"message": "x", "type": "y", "param": param, "code": code}
    return httpx.Response(status, json={"error": error})


def stream(*lines: str) -> httpx.Response:
    headers = {"content-type": "text/event-stream", "x-job-id": "job"}
    text = "".join(f"data: {line}\n\n" for line in lines)
    return httpx.Response(200, headers=headers, text=text)


CHUNK = json.dumps({"choices": [CHOICE]})


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (refusal(400, "invalid_value", "stop"), []),
        (refusal(400, "invalid_value", "stop.a.b"), []),
        (refusal(400, "invalid_value", "Idempotency-Key"), []),
        (refusal(400, "invalid_value", "stop.a"), ["invalid_value names 'stop.a', which is not"]),
        (refusal(400, "invalid_value", None), ["invalid_value names None, which is not"]),
        (refusal(400, "strange", None), ["the code strange is not in docs/api.md"]),
        (refusal(500, "engine_error", None), ["failed: 500", "accepted, then engine_error"]),
        (refusal(404, "invalid_value", "stop"), ["404 is not in the OpenAPI document"]),
        (httpx.Response(400, json={"detail": "x"}), ["not the shape of an error"]),
        (httpx.Response(200, text="<html>"), ["no JSON"]),
        (httpx.Response(200, json={"choices": [CHOICE]}), ["accepted without a job"]),
        (stream(CHUNK, "[DONE]"), []),
        (stream(CHUNK), ["no JSON: ValueError"]),
        (stream(CHUNK, CHUNK, "[DONE]"), ["choices end with"]),
        (stream(json.dumps({"error": {}}), "[DONE]"), ["an error after 200"]),
    ],
)
def test_wrong_answers_are_found(answer: httpx.Response, wrong: list[str]) -> None:
    """One of each kind; a correct answer has no faults."""
    answer.headers["x-request-id"] = "id"
    found = list(judge(REQUEST, answer, ANNOUNCED))
    assert len(found) == len(wrong), found
    assert all(text.startswith(start) for text, start in zip(found, wrong, strict=True)), found


def test_every_route_with_a_body_has_seeds() -> None:
    """All routes of the OpenAPI document that make a job of a JSON body. Batches need a file."""

    document = openapi_document()
    with_body = {
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
        and operation["tags"][0] not in ("files", "lanes", "operations", "tokens", "uploads")
    } - {
        ("POST", "/v1/batches"),
        ("PATCH", "/v1/batches/{batch_id}"),
        ("POST", "/v1/jobs/{job_id}/token"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/messages/count_tokens"),
    }
    assert {(seed.method, seed.path) for seed in SEEDS} == with_body
    assert ("PATCH", CHANGE) in with_body
