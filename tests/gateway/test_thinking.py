"""Chats of a model that reasons: constraints bind the answer, and a budget bounds the reasoning."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.functions import Functions
from contract.keys import Keys
from contract.model_cards import Capabilities, TokenizerFiles
from contract.output_formats import ReasoningFormat, ToolFormat
from tests.gateway.conftest import error_of, until_listed
from tests.gateway.fake_worker import FakeWorker, publish_model
from tests.gateway.test_structured import CONSTRAINTS, SCHEMA, Case
from tests.grammars.walks import judge
from tests.marked_tokenizer import MarkedModel

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: {% if thinks == true %}<think>\n{% elif thinks == false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
THINK = ReasoningFormat(name="qwen3", open="<think>\n", close="\n</think>\n\n")
SPELLED = ReasoningFormat(name="granite", open="My thoughts:", close="My answer:")
CALLS = ToolFormat(name="hermes", open="<tool_call>\n", close="\n</tool_call>", between="\n")
THINKER = MarkedModel(reasoning=THINK, tool_format=CALLS)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
WITH_TOOLS: list[Case] = [
    ({"guided_choice": ["<think>yes", "no"]}, "no", "maybe"),
    ({"tools": TOOLS, "tool_choice": "required"}, CALL, "no"),
    ({"tools": TOOLS}, "Hi. " + CALL, CALL.replace("1", '"1"')),
    ({"tools": TOOLS, "guided_json": SCHEMA}, CALL, "Hi. " + CALL),
    ({"tools": TOOLS, "guided_json": SCHEMA}, '{"a": 1}', "no"),
]


Published = Callable[..., Awaitable[FakeWorker]]


@pytest.fixture
def published(
    redis_client: redis.asyncio.Redis, keys: Keys, functions: Functions, http: httpx.AsyncClient
) -> Published:
    """Publishes a model with this format of its reasoning; returns its worker."""

    async def publish(
        name: str, reasoning: ReasoningFormat | None, **capabilities: bool
    ) -> FakeWorker:
        files: TokenizerFiles = replace(
            THINKER.files,
            chat_template=TEMPLATE,
            template_variables=("thinks",),
            reasoning=reasoning,
        )
        can: dict[str, Any] = {"structured_output": True, "tools": True, **capabilities}
        size = THINKER.vocab_size
        card: dict[str, Any] = {"vocab_size": size, "capabilities": Capabilities(**can)}
        await publish_model(redis_client, keys)
        await publish_model(redis_client, keys, name, files=files, **card)
        worker = FakeWorker(functions, name, f"w-{name}")
        await worker.beat()
        await until_listed(http, {name})
        return worker

    return publish


@pytest.fixture
async def thinker(published: Published) -> FakeWorker:
    """The worker of a model that reasons."""
    return await published("thinker", THINK)


async def grammar_of(http: httpx.AsyncClient, worker: FakeWorker, **fields: Any) -> str:
    """The grammar of a chat's job."""
    body = {"model": worker.model, "messages": [{"role": "user", "content": "Hi"}], **fields}
    answer = await http.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
    assert answer.status_code == 202, answer.text
    return (await worker.claim()).job.params.grammar


def judged(grammar: str, text: str) -> str:
    return judge(THINKER.grammars, grammar, THINKER.ids(text)).partition(" ")[0]


@pytest.mark.parametrize("case", CONSTRAINTS + WITH_TOOLS)
async def test_a_constraint_binds_the_answer_behind_the_reasoning(
    http: httpx.AsyncClient, thinker: FakeWorker, case: Case
) -> None:
    """As the prompt leaves it: begun, ended, or up to the model."""
    fields, right, wrong = case
    for thinks, outputs in {
        None: {right: "whole", f"<think>\nhm\n</think>\n\n{right}": "whole"},
        True: {f"hm\n</think>\n\n{right}": "whole", f"</think>{right}": "whole", "hm": "begun"},
        False: {right: "whole", f"<think>hm</think>{right}": "refused"},
    }.items():
        kwargs = {} if thinks is None else {"chat_template_kwargs": {"thinks": thinks}}
        grammar = await grammar_of(http, thinker, **fields, **kwargs)
        for output, expected in outputs.items():
            assert judged(grammar, output) == expected, (thinks, output)
            if expected == "whole":
                assert judged(grammar, output.removesuffix(right) + wrong) == "refused"


async def test_a_budget_bounds_the_reasoning(http: httpx.AsyncClient, thinker: FakeWorker) -> None:
    """With a constraint and without one; then the answer is free, and tools may be called."""
    kwargs = {"chat_template_kwargs": {"thinks": True}, "thinking_token_budget": 2}
    for fields in ({}, {"tools": TOOLS[:0]}, {"response_format": {"type": "json_object"}}):
        grammar = await grammar_of(http, thinker, **fields, **kwargs)
        assert judged(grammar, "ab</think>{}") == "whole"
        assert judged(grammar, "abc") == "refused"
    loose = [{"type": "function", "function": {"name": "add"}}]
    grammar = await grammar_of(http, thinker, tools=loose, **kwargs)
    assert judged(grammar, "ab</think>So <h1>\n" + CALL) == "whole"
    assert judged(grammar, "</think><think>") == "refused"
    grammar = await grammar_of(http, thinker, **{**kwargs, "thinking_token_budget": 0})
    assert judged(grammar, "</think>Hi") == "whole"
    assert judged(grammar, "a") == "refused"


async def test_a_budget_that_bounds_nothing_is_no_constraint(
    http: httpx.AsyncClient, thinker: FakeWorker
) -> None:
    """The output is shorter, or the prompt has ended the reasoning."""
    fields: dict[str, Any] = {"thinking_token_budget": 64, "max_tokens": 64}
    assert await grammar_of(http, thinker, **fields) == ""
    assert await grammar_of(http, thinker, **{**fields, "thinking_token_budget": 63}) != ""
    closed = {"chat_template_kwargs": {"thinks": False}, "thinking_token_budget": 2}
    assert await grammar_of(http, thinker, **closed) == ""


async def test_completions_know_no_reasoning(http: httpx.AsyncClient, thinker: FakeWorker) -> None:
    """A constraint binds their whole output."""
    body = {"model": "thinker", "prompt": "Hi", "guided_regex": "[0-9]{3}"}
    await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    grammar = (await thinker.claim()).job.params.grammar
    assert judged(grammar, "123") == "whole"
    assert judged(grammar, "<think>hm</think>123") == "refused"


@pytest.mark.parametrize(
    ("name", "reasoning", "capabilities", "message"),
    [
        ("plain", None, {}, "does not reason"),
        ("spelled", SPELLED, {}, "ends its reasoning with text"),
        ("unbound", THINK, {"structured_output": False}, "cannot constrain"),
    ],
)
async def test_a_budget_that_cannot_be_enforced_is_refused_by_name(
    published: Published,
    http: httpx.AsyncClient,
    name: str,
    reasoning: ReasoningFormat | None,
    capabilities: dict[str, bool],
    message: str,
) -> None:
    """With the reason."""
    await published(name, reasoning, **capabilities)
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
    answer = await http.post("/v1/chat/completions", json=body | {"thinking_token_budget": 8})
    assert error_of(answer) == (400, "thinking_token_budget", "unsupported_parameter")
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"thinking_token_budget": n}, "thinking_token_budget") for n in (-1, 1.5, "8", True)),
        # Its grammar alone decides where an output may end.
        ({"thinking_token_budget": 2, "min_tokens": 3}, "min_tokens"),
    ],
)
async def test_a_budget_is_a_number_of_tokens_and_excludes_a_minimum(
    http: httpx.AsyncClient, thinker: FakeWorker, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "thinker", "messages": [{"role": "user", "content": "Hi"}]}
    answer = await http.post("/v1/chat/completions", json=body | fields)
    assert answer.json()["error"]["param"] == param
