"""The prompt in responses: its text, and its log probabilities in both formats."""

from typing import Any

import httpx
import pytest

from tests.fakes import BOS_ID
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_jobs import events_of
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abé", "echo": True}  # ids 97 98 195 169
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a streaming call."""
    answer = await http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [event.data for event in whole_stream(answer.content)]


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A choice's text and log probabilities, joined from its chunks."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    logprobs: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return {"text": "".join(part["text"] for part in parts), "logprobs": logprobs or None}


async def test_an_echo_begins_every_choice(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """Whole and streamed. The engine computes no log probabilities that nobody asked for."""
    answer = await complete(http, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["abéHello wörld!"] * 2
    assert answer["choices"][0]["logprobs"] is None
    chunks = await stream(http, "/v1/completions", BODY | {"n": 2})
    assert joined(chunks, 0) == joined(chunks, 1)
    assert joined(chunks, 1)["text"] == "abéHello wörld!"
    assert all(job.params.prompt_logprobs is None for job in worker.seen)


async def test_an_echo_has_the_prompts_logprobs(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Null for the first token. Offsets count characters of the text."""
    worker.script = says("ö!")
    answer = await complete(http, logprobs=1, n=2)
    for choice in answer["choices"]:
        shape = choice["logprobs"]
        assert choice["text"] == "abéö!"
        assert shape["text_offset"] == [0, 1, 2, 2, 3, 3, 4]
        assert shape["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.25, -0.25, -0.25]
        assert shape["tokens"][:2] == ["a", "b"]
        assert shape["top_logprobs"][:2] == [None, {"b": -1.0, "a": -0.5}]
    chunks = await stream(http, "/v1/completions", BODY | {"logprobs": 1, "n": 2})
    for index in range(2):
        assert joined(chunks, index) == {
            k: answer["choices"][index][k] for k in ("text", "logprobs")
        }


async def test_special_tokens_of_a_prompt_have_no_text(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """They are among the tokens; the text is the caller's."""
    worker.script = says("!")
    answer = await complete(http, prompt=[BOS_ID, 97], logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == "a!"
    assert choice["logprobs"]["tokens"] == ["<bos>", "a", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


@pytest.mark.parametrize("prompt", [[195], [169, 195], [128, 258]])
async def test_a_prompt_that_is_no_text_can_be_echoed(
    worker: FakeWorker, http: httpx.AsyncClient, prompt: list[int]
) -> None:
    """Token ids need not form whole characters."""
    answer = await complete(http, prompt=prompt, logprobs=0)
    assert answer["choices"][0]["text"].endswith("Hello wörld!")
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 13


async def test_a_prompt_can_be_scored_without_output(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """max_tokens 0: the engine computes one token, which is neither shown nor counted."""
    worker.script = says("X")
    fields = {"max_tokens": 0, "logprobs": 0, "return_token_ids": True}
    answer = await complete(http, **fields)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abé", "length", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    details = answer["usage"].pop("prompt_tokens_details")
    assert details == {"cached_tokens": 0}
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    options = {"stream_options": {"include_usage": True}}
    chunks = await stream(http, "/v1/completions", BODY | fields | options)
    assert joined(chunks, 0)["text"] == "abé"
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert worker.seen[0].params.max_tokens == 1


async def test_prompt_logprobs_are_listed_as_vllm_has_them(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """In each choice of completions, beside the choices of chats; null first."""
    second = {
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
    }
    answer = await complete(http, echo=False, prompt_logprobs=2)
    [choice] = answer["choices"]
    assert choice["text"] == "Hello wörld!"
    assert choice["prompt_logprobs"][:2] == [None, second]
    assert choice["prompt_logprobs"][3]["169"]["rank"] is None
    chunks = await stream(http, "/v1/completions", BODY | {"prompt_logprobs": 2, "echo": False})
    assert chunks[0]["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    chat = (await http.post("/v1/chat/completions", json=CHAT | {"prompt_logprobs": 0})).json()
    chunks = await stream(http, "/v1/chat/completions", CHAT | {"prompt_logprobs": 0})
    assert chat["prompt_logprobs"] == chunks[0]["prompt_logprobs"]
    assert len(chat["prompt_logprobs"]) == len("user: Hi\nassistant: ")


async def test_echo_and_list_each_have_what_was_asked(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """The engine computes the larger number; the other list is cut."""
    answer = await complete(http, prompt="zé", logprobs=1, prompt_logprobs=3)
    [choice] = answer["choices"]
    assert worker.seen[0].params.prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


async def test_jobs_and_their_events_carry_the_prompt(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """A stream continues with the same bytes after any event, also one that shows nothing."""
    body = BODY | {"logprobs": 1, "prompt_logprobs": 1, "n": 2}
    posted = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    url = f"/v1/jobs/{posted.json()['id']}"
    whole = [part for part in events_of((await http.get(f"{url}/events")).text) if "cmpl-" in part]
    result = (await http.get(url)).json()["result"]
    assert result["choices"][1]["text"] == "abéHello wörld!"
    assert result["choices"][1]["prompt_logprobs"][0] is None
    for number in range(6):
        rest = (await http.get(f"{url}/events", params={"starting_after": number})).text
        parts = [part for part in events_of(rest) if "cmpl-" in part]
        assert parts == whole[len(whole) - len(parts) :]
        assert len(parts) == len(whole) if number < 3 else len(parts) == 5 - number
