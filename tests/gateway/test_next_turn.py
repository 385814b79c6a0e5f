"""What is left to a worker after an answer: the beginning of the next turn, where the template
writes the history otherwise than prompt and output."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace
from starlette.responses import Response

from contract.events import ChoiceDelta, Tokens, ToolCallDelta
from contract.functions import Functions
from contract.jobs import FinishReason, Job
from contract.keys import Keys
from contract.model_cards import TokenizerFiles
from contract.output_formats import ToolFormat
from gateway.prepare.next_turn import MIN_TOKENS, then_warmed
from gateway.prepare.revocation import KEY
from gateway.prepare.schemas import ChatBody
from tests.fakes import encode_text, hash_tokenizer, output_text
from tests.fleet import until
from tests.gateway.conftest import Gateways, until_listed
from tests.gateway.fake_worker import MODEL, FakeWorker, job_of_one, publish_model
from tests.gateway.test_thinking import THINK

pytestmark = pytest.mark.anyio

HISTORY = "Tell me all about cities, their rivers, and the bridges over these rivers. "
SAID = "Rivers divide cities, bridges join them again, and most cities have several of both. "
THOUGHT = "The user asks for rivers; I know some. " * 4
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ARGUMENTS = '{"city":"a city with a name of very many letters, so that its call is a long one"}'
RAW_CALL = f'<call>{{"name":"rivers","arguments":{ARGUMENTS}}}</call>'
# As most families: reasoning is shown behind the last words of the user alone.
FORGETS = (
    "{% set at = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content and loop.index0 > at.last %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSES = FORGETS + "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}"
ONE_EACH = ToolFormat(open="<call>", close="</call>")  # a call of a message

Delta = dict[str, Any]
SAYS: list[Delta] = [{"raw": SAID, "text": SAID}]
THINKS: list[Delta] = [
    {"raw": f"<think>\n{THOUGHT}\n</think>\n\n", "reasoning": THOUGHT},
    {"raw": SAID, "text": SAID},
]
CALL = {"raw": RAW_CALL, "tool_calls": (ToolCallDelta(0, "rivers", ARGUMENTS),)}
TWICE = {"raw": RAW_CALL, "tool_calls": (ToolCallDelta(1, "rivers", ARGUMENTS),)}
APIS = ("chat/completions", "messages", "responses")


def files_of(template: str | None, **fields: Any) -> TokenizerFiles:
    files = replace(hash_tokenizer(), reasoning=THINK, **fields)
    return files if template is None else replace(files, chat_template=template)


def script(deltas: Sequence[Delta], finish: FinishReason) -> list[Tokens]:
    events, start = [], 0
    for number, delta in enumerate(deltas, 1):
        fields = {"text": "", **delta}
        ids = encode_text(fields.pop("raw"))
        end = finish if number == len(deltas) else None
        events.append(Tokens((ChoiceDelta(0, start, ids, finish_reason=end, **fields),)))
        start += len(ids)
    return events


class Conversation:
    """One worker's calls in one API, by a gateway of its own, which has ended with `ended`."""

    def __init__(self, client: redis.asyncio.Redis, functions: Functions, keys: Keys) -> None:
        self.worker = FakeWorker(functions, prompt_token_s=1e-3)
        self._redis = client
        self._keys = keys

    async def publish(self, files: TokenizerFiles) -> None:
        await publish_model(self._redis, self._keys, files=files, context_length=8192)
        await self.worker.beat()

    async def call(
        self, http: httpx.AsyncClient, api: str, body: dict[str, Any], events: list[Tokens]
    ) -> tuple[Job, httpx.Response]:
        """Its job, of whose prompt the worker has the cache, and its answer."""
        asking = asyncio.create_task(http.post(f"/v1/{api}", json=body))
        claimed = await self.worker.claim()
        await self.worker.run(claimed, lambda _: events)
        answer = await asking
        assert answer.status_code == 200, answer.text
        return claimed.job, answer

    async def has_left(self) -> bool:
        return await self._redis.llen(self._keys.of("warm", self.worker.incarnation)) > 0

    async def left(self) -> tuple[int, ...] | None:
        found = await self.worker.functions.warm_take(self.worker.incarnation, MODEL, [])
        return None if found is None else found[1][2]


@pytest.fixture
def talk(redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys) -> Conversation:
    return Conversation(redis_client, functions, keys)


def body_of(api: str, items: list[Any], *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A call with these items, and a tool."""
    tool: dict[str, Any] = {"name": "rivers", "parameters": PARAMETERS}
    if api == "messages":
        tool = {"name": "rivers", "input_schema": PARAMETERS}
        fields["max_tokens"] = 512
    tools = [{"type": "function", "function": tool}] if api == "chat/completions" else [tool]
    if api == "responses":
        tools = [{"type": "function", **tool}]
    name = "input" if api == "responses" else "messages"
    return {"model": MODEL, name: items, "tools": tools, "stream": stream, **fields}


def next_items(api: str, items: list[Any], answer: dict[str, Any], words: str) -> list[Any]:
    """The history with the answer as it came, and what a user or the tool says then."""
    if api == "responses":
        found = answer["output"]
        calls = [item["call_id"] for item in found if item["type"] == "function_call"]
        then = [{"type": "function_call_output", "call_id": c, "output": words} for c in calls]
        return [*items, *found, *(then or [{"role": "user", "content": words}])]
    if api == "messages":
        found = answer["content"]
        calls = [block["id"] for block in found if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c, "content": words} for c in calls]
        then = [{"role": "user", "content": results or words}]
        return [*items, {"role": "assistant", "content": found}, *then]
    message = answer["choices"][0]["message"]
    calls = [call["id"] for call in message.get("tool_calls", ())]
    results = [{"role": "tool", "tool_call_id": c, "content": words} for c in calls]
    return [*items, message, *(results or [{"role": "user", "content": words}])]


CASES: dict[str, tuple[TokenizerFiles, list[Delta], bool]] = {
    "reasoning left out": (files_of(FORGETS), THINKS, True),
    "calls in another form": (files_of(None), [*SAYS, CALL], True),
    "calls by their ids": (files_of(FORGETS), [*THINKS, CALL], True),
    "two calls": (files_of(FORGETS), [CALL, TWICE], True),
    "a result behind each call": (files_of(FORGETS, tool_format=ONE_EACH), [CALL, TWICE], True),
    "ids of nine letters": (
        files_of(FORGETS, tool_format=replace(ONE_EACH, between="", id_length=9)),
        [CALL, TWICE],
        True,
    ),
    "as it was": (files_of(None), SAYS, False),
    "almost as it was": (files_of(FORGETS), [{"raw": SAID + "\n", "text": SAID}], False),
    "refused": (files_of(REFUSES), THINKS, False),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("case", CASES)
async def test_what_is_left_begins_the_next_prompt(
    talk: Conversation, gateways: Gateways, api: str, case: str, stream: bool
) -> None:
    """All of it up to the words of the user or the tool, whatever these are; nothing where the
    cache has as much already."""
    files, deltas, is_left = CASES[case]
    finish = FinishReason.TOOL_CALLS if "tool_calls" in deltas[-1] else FinishReason.STOP
    await talk.publish(files)
    items = [{"role": "user", "content": HISTORY * 2}]
    async with gateways(warms_next_turn=True, drain_s=20.0) as http:
        await until_listed(http, {MODEL})
        events = script(deltas, finish)
        job, answer = await talk.call(http, api, body_of(api, items, stream=stream), events)
        if stream and is_left:
            whole, answer = await talk.call(http, api, body_of(api, items), events)
            assert whole.prompt_ids == job.prompt_ids
    left = await talk.left()
    assert (left is not None) == is_left
    if left is None:
        return
    # Those of both calls, in any order, are the same but for the functions' calls' ids.
    both = {left, (await talk.left() if stream else None) or left}
    assert {len(each) for each in both} == {len(left)}
    assert len(left) - MIN_TOKENS >= len(job.prompt_ids) - len("<assistant>")
    async with gateways() as http:
        await until_listed(http, {MODEL})
        for words in ("And then?", "\n\n x"):
            more = next_items(api, items, answer.json(), words)
            following, _ = await talk.call(http, api, body_of(api, more), script(SAYS, finish))
            assert following.prompt_ids[: len(left)] in both
            rest = output_text(following.prompt_ids[len(left) :])
            assert words.strip() in rest[:20], "up to these words"


ITEMS = [{"role": "user", "content": HISTORY * 2}]
CHAT = "chat/completions"


@pytest.mark.parametrize(
    ("settings", "fields", "finish"),
    [
        ({}, {}, FinishReason.STOP),
        ({"warms_next_turn": True}, {}, FinishReason.LENGTH),
        ({"warms_next_turn": True}, {"n": 2}, FinishReason.STOP),
    ],
)
async def test_nothing_is_left_otherwise(
    talk: Conversation, gateways: Gateways, settings: Any, fields: Any, finish: FinishReason
) -> None:
    """Without the setting, after an answer that was cut, or one of several."""
    await talk.publish(files_of(FORGETS))
    async with gateways(drain_s=20.0, **settings) as http:
        await until_listed(http, {MODEL})
        events = script(THINKS, finish)
        if fields.get("n"):
            both = [replace(event.deltas[0], choice=1) for event in events]
            events = [Tokens((*e.deltas, d)) for e, d in zip(events, both, strict=True)]
        await talk.call(http, CHAT, body_of(CHAT, ITEMS, **fields), events)
    assert await talk.left() is None


@pytest.mark.parametrize("is_valid", [True, False])
async def test_a_revoked_key_leaves_nothing(is_valid: bool) -> None:
    """Nor is its conversation rendered."""
    asked = []

    class Known:
        key_ring = property(lambda self: self)
        known = property(lambda self: self)
        unwarmed: tuple[str, ...] = ()

        async def terms_of(self, key: str) -> object:
            return key if is_valid else None

        async def models(self) -> dict[str, object]:
            asked.append("models")
            return {}  # which fails, and costs the caller nothing

    call: Any = SimpleNamespace(
        deltas=[delta for event in script(THINKS, FinishReason.STOP) for delta in event.deltas],
        job=job_of_one(),
        gateway=SimpleNamespace(broker=Known()),
        request=SimpleNamespace(scope={"state": {KEY: "a key"}}),
        submitted_s=0.0,
    )
    response = then_warmed(Response(), call, ChatBody)  # type: ignore[arg-type]
    assert response.background is not None
    await response.background()
    assert bool(asked) is is_valid


async def test_a_call_without_an_answer_is_not_warmed(
    talk: Conversation, gateways: Gateways, caplog: pytest.LogCaptureFixture
) -> None:
    """One that becomes a job at once, and one whose answer an earlier call has had."""
    await talk.publish(files_of(FORGETS))
    async with gateways(warms_next_turn=True, drain_s=20.0) as http:
        await until_listed(http, {MODEL})
        path, body = f"/v1/{CHAT}", body_of(CHAT, ITEMS)
        later = await http.post(path, json=body, headers={"prefer": "respond-async"})
        assert later.status_code == 202
        await talk.worker.claim()
        http.headers["idempotency-key"] = "a"
        await talk.call(http, CHAT, body, script(THINKS, FinishReason.STOP))
        assert (await http.post(path, json=body)).status_code == 200
    assert await talk.left() is not None
    assert await talk.left() is None
    assert "unexpected" not in caplog.text


async def test_what_is_of_no_use_is_left_out(talk: Conversation, gateways: Gateways) -> None:
    """The call that is told so is the last for a while, of this tenant and model."""
    await talk.publish(files_of(FORGETS))
    await talk.worker.functions.warm_take("other", MODEL, ["default", 9_000, 10])
    async with gateways(warms_next_turn=True, drain_s=20.0) as http:
        await until_listed(http, {MODEL})
        for _ in range(4):
            await talk.call(http, CHAT, body_of(CHAT, ITEMS), script(THINKS, FinishReason.STOP))
            await until(talk.has_left)
    assert await talk.left() is not None
    assert await talk.left() is None


@pytest.mark.parametrize("returns", [False, True])
async def test_reasoning_is_where_the_caller_returns_it(
    talk: Conversation, gateways: Gateways, returns: bool
) -> None:
    """Many clients drop it. A tool's result follows reasoning, where templates show it."""
    await talk.publish(files_of(FORGETS))
    said: dict[str, Any] = {"role": "assistant", "content": SAID}
    said |= {"reasoning_content": THOUGHT} if returns else {}
    items = [*ITEMS, said, {"role": "user", "content": "Look!"}]
    async with gateways(warms_next_turn=True, drain_s=20.0) as http:
        await until_listed(http, {MODEL})
        events = script([*THINKS, CALL], FinishReason.TOOL_CALLS)
        await talk.call(http, CHAT, body_of(CHAT, items), events)
    left = await talk.left()
    assert left is not None
    assert (THOUGHT.strip() in output_text(left)) is returns


async def test_degrees_of_thinking_that_a_template_does_not_know_change_nothing(
    talk: Conversation, gateways: Gateways
) -> None:
    """Messages ask for them in vain."""
    await talk.publish(files_of(FORGETS))
    async with gateways(warms_next_turn=True, drain_s=20.0) as http:
        await until_listed(http, {MODEL})
        body = body_of("messages", ITEMS, thinking={"type": "adaptive"})
        await talk.call(http, "messages", body, script(THINKS, FinishReason.STOP))
    assert await talk.left() is not None
