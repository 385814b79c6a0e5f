"""What a call asks of the chat template: where the prompt ends, documents, another template."""

import json
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.api_keys import Scope
from contract.keys import Keys
from gateway.child import Refused
from gateway.models.chat_template import ChatTemplate
from tests.fakes import BOS_ID, hash_tokenizer, output_text
from tests.gateway.conftest import Bearer, Gateways, error_of
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model
from tests.gateway.test_templates import GREEDY, HOSTILE, UNREADABLE

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
_MESSAGE = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}</>\n{% endfor %}"
_START = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "plain": _MESSAGE.replace("CONTENT", "m.content") + _START,
    "stripped": _MESSAGE.replace("CONTENT", "m.content | trim") + _START,
    "parts": _MESSAGE.replace("CONTENT", "m.content if m.content is string else m.content[-1].text")
    + _START,
    "documents": "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
    + _MESSAGE.replace("CONTENT", "m.content")
    + _START,
}
LAST = ["Once upon", "Once upon ", " \nOnce\n\n", "x</>\n", [{"type": "text", "text": "a "}]]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("last", LAST, ids=map(repr, LAST))
def test_prompts_end_as_in_transformers(name: str, last: Any) -> None:
    """Behind the last message, at its end, or where an answer begins."""
    from workers.model.transformers_compat import render_jinja_template  # loads torch

    if name == "stripped" and not isinstance(last, str):
        pytest.skip("a template that takes no parts")
    messages = [{"role": "user", "content": "x</>"}, {"role": "assistant", "content": last}]
    documents = [{"title": "t", "text": "x"}]
    for is_answered, continues in ((True, False), (False, False), (False, True)):
        shown: Any = render_jinja_template(
            conversations=[messages],
            chat_template=TEMPLATES[name],
            documents=documents,
            add_generation_prompt=is_answered,
            continue_final_message=continues,
        )
        found = ChatTemplate(TEMPLATES[name], {}).render(
            messages,
            variables={"documents": documents},
            is_answered=is_answered,
            continues=continues,
        )
        assert found == shown[0][0]


@pytest.mark.parametrize("content", ["Hi", None, []])
def test_a_last_message_that_is_not_shown_cannot_be_continued(content: Any) -> None:
    """Nor one without text."""
    with pytest.raises(Refused, match="continue_final_message"):
        ChatTemplate("{{ messages[0].role }}", {}).render(
            [{"role": "user", "content": content}], is_answered=False, continues=True
        )


async def prompt_of(http: httpx.AsyncClient, worker: FakeWorker, **fields: Any) -> str:
    answer = await http.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    return output_text(worker.seen[-1].prompt_ids)


async def test_a_call_says_where_its_prompt_ends(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """As in vLLM, whose defaults are taken."""
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
    assert await prompt_of(http, worker) == "user: Hi\nassistant: "
    assert await prompt_of(http, worker, add_generation_prompt=False) == "user: Hi\n"
    for asked in ({}, {"add_generation_prompt": False}):
        fields = {"messages": begun, "continue_final_message": True, **asked}
        assert await prompt_of(http, worker, **fields) == "user: Hi\nassistant: Once"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    answer = await http.post("/v1/chat/completions", json=CHAT | both)
    assert error_of(answer) == (400, "continue_final_message", "invalid_value")


async def test_special_tokens_are_added_as_a_call_asks(
    worker: FakeWorker, gateways: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """To a completion by default, to a chat only if it asks for it."""
    files = hash_tokenizer()
    tokenizer = json.loads(files.tokenizer_json)
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            bos,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS_ID], "tokens": ["<bos>"]}},
    }
    await publish_model(
        redis_client, keys, files=replace(files, tokenizer_json=json.dumps(tokenizer))
    )

    async with gateways() as http:
        for path, body, default in (
            ("/v1/chat/completions", CHAT, False),
            ("/v1/completions", {"model": MODEL, "prompt": "Hi"}, True),
        ):
            for value in (None, True, False):
                fields = body | {"add_special_tokens": value}
                assert (await http.post(path, json=fields)).status_code == 200
                begins = worker.seen[-1].prompt_ids[0] == BOS_ID
                assert begins == (default if value is None else value)


async def test_documents_reach_a_template_that_reads_them(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Texts as their `text`; they are refused where the template would drop them."""
    refused = await http.post("/v1/chat/completions", json=CHAT | {"documents": ["a"]})
    assert error_of(refused) == (400, "documents", "unsupported_parameter")
    source = TEMPLATES["documents"]
    documents = [{"title": "t", "text": "x"}, "y"]
    found = await prompt_of(http, worker, documents=documents, chat_template=source)
    assert found == "[t: x][: y]<user>Hi</>\n<assistant>"


async def test_a_template_of_a_call_needs_its_scope(
    worker: FakeWorker, gateways: Gateways, bearer: Bearer
) -> None:
    """In each way to send a call; it takes the place of the model's for this call alone."""
    lacking = await bearer(scopes=tuple({*Scope} - {Scope.TEMPLATES, Scope.ADMIN}))
    having = await bearer(scopes=(Scope.INFERENCE, Scope.TEMPLATES, Scope.JOBS_WRITE))
    body = CHAT | {"chat_template": "<{{ messages[0].content }}>"}
    job = {"endpoint": "/v1/chat/completions", "body": body}
    async with gateways() as http:
        for path, sent, status in (("/v1/chat/completions", body, 200), ("/v1/jobs", job, 202)):
            answer = await http.post(path, json=sent, headers=lacking)
            assert error_of(answer) == (403, None, "missing_scope")
            answer = await http.post(path, json=sent, headers=having)
            assert answer.status_code == status
        assert output_text(worker.seen[0].prompt_ids) == "<Hi>"
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=having)
        assert answer.status_code == 200
    assert output_text(worker.seen[-1].prompt_ids) == "user: Hi\nassistant: "


@pytest.mark.parametrize("source", {**HOSTILE, **GREEDY, **UNREADABLE}.values())
async def test_a_hostile_template_of_a_call_costs_only_this_call(
    worker: FakeWorker, http: httpx.AsyncClient, source: str
) -> None:
    """It runs in the process of the model's template, which has its limits; on busy cores the time
    may end before its share of the processor."""
    answer = await http.post("/v1/chat/completions", json=CHAT | {"chat_template": source})
    code = answer.json()["error"]["code"]
    assert (answer.status_code, code) in {
        (400, "invalid_value"),
        (500, "template_failed"),
        (503, "preparing"),
    }
    assert await prompt_of(http, worker) == "user: Hi\nassistant: "
