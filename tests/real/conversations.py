"""Conversations that chat templates render, as the gateway hands them over."""

from dataclasses import dataclass, field
from typing import Any

SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    is_answered: bool = True


def _tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


WEATHER = _tool(
    "get_weather",
    description="The weather of a city.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": 'Its name, for example "São Paulo".'},
            "days": {"type": "integer", "description": "How many.", "minimum": 1},
            "units": {"type": "string", "enum": ["metric", ""], "description": "Of what."},
            "hours": {
                "type": "array",
                "items": {"type": "number"},
                "description": "Of the day <24.",
            },
            "options": {
                "type": "object",
                "description": "Others.",
                "properties": {"wind": {"type": "boolean", "description": "Also the wind."}},
                "additionalProperties": {"type": "string"},
            },
        },
        "required": ["city"],
    },
)
TIME = _tool("now", description="The time.", parameters={"type": "object", "properties": {}})
BARE = _tool("now")
HARD = {
    "city": "São Paulo\n\"quoted\" \\ <b>&amp;</b> 'x' 日本 😀",
    "days": 2,
    "hours": [1, 2.5, None],
    "options": {"wind": True, "others": {"a": [{}]}},
    "units": "",
}


def call(name: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"callnum{number:02}", "type": "function", "function": function}


def user(text: str = "What is the weather in São Paulo? <think>") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(content: str | None = "It is 20 °C there.", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def result(
    text: str = '{"degrees": 20}', number: int = 1, name: str | None = None
) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"role": "tool", "tool_call_id": f"callnum{number:02}", "content": text, **named}


SYSTEM = {"role": "system", "content": "Answer briefly.\n\nBe friendly."}
_WEATHER = call("get_weather", {"city": "Paris", "days": 2})
_SECOND = call("get_weather", {"city": "Oslo"}, 2)
_THOUGHT = "The user asks for the weather.\n\nI shall call a function."
_PLAIN = [SYSTEM, user()]
_CALLED = [SYSTEM, user(), answer("", tool_calls=[_WEATHER]), result()]
_THOUGHT_AND_CALLED = [
    user(),
    answer("", reasoning_content=_THOUGHT, tool_calls=[_WEATHER]),
    result(),
]

CONVERSATIONS = {
    "plain": Conversation([user()]),
    "system": Conversation(_PLAIN),
    "not answered": Conversation([user(), answer()], is_answered=False),
    "white space": Conversation([SYSTEM, user("  \n x \n "), answer("\n a \n"), user(" ")]),
    "turns": Conversation([SYSTEM, user(), answer(), user("And tomorrow?"), answer("21."), user()]),
    "two of the user": Conversation([user(), user("Well?")]),
    "tools": Conversation(_PLAIN, [WEATHER, TIME]),
    "tools without system": Conversation([user()], [WEATHER]),
    "a tool without parameters": Conversation(_PLAIN, [BARE]),
    "call": Conversation(_CALLED, [WEATHER, TIME]),
    "call without the tools": Conversation(_CALLED),
    "named result": Conversation([*_CALLED[:3], result(name="get_weather")], [WEATHER]),
    "call without content": Conversation(
        [user(), answer(None, tool_calls=[_WEATHER]), result()], [WEATHER]
    ),
    "call with content": Conversation(
        [user(), answer("I ask.", tool_calls=[_WEATHER]), result()], [WEATHER]
    ),
    "two calls": Conversation(
        [user(), answer("", tool_calls=[_WEATHER, _SECOND]), result(), result("x", 2)], [WEATHER]
    ),
    "call without arguments": Conversation(
        [user(), answer("", tool_calls=[call("now", {})]), result()], [TIME]
    ),
    "hard arguments": Conversation(
        [user(), answer("", tool_calls=[call("get_weather", HARD)]), result()], [WEATHER]
    ),
    "answer after a call": Conversation([*_CALLED, answer(), user("Thanks.")], [WEATHER]),
    "second call": Conversation(
        [*_CALLED, answer("", tool_calls=[_SECOND]), result("x", 2)], [WEATHER]
    ),
    "reasoning": Conversation([user(), answer(reasoning_content=_THOUGHT), user("And then?")]),
    "reasoning, not answered": Conversation(
        [user(), answer(reasoning_content=_THOUGHT)], is_answered=False
    ),
    "reasoning and a call": Conversation(_THOUGHT_AND_CALLED, [WEATHER]),
    "reasoning in the text": Conversation(
        [user(), answer(f"<think>\n{_THOUGHT}\n</think>\n\nHello."), user()]
    ),
    "no thinking": Conversation(_PLAIN, variables={"enable_thinking": False, "thinking": False}),
    "thinking": Conversation(_PLAIN, variables={"enable_thinking": True, "thinking": True}),
    "thinking with tools": Conversation(
        _THOUGHT_AND_CALLED, [WEATHER], {"enable_thinking": True, "thinking": True}
    ),
    "little effort": Conversation(_PLAIN, variables={"reasoning_effort": "low"}),
    "much effort": Conversation(_PLAIN, [WEATHER], {"reasoning_effort": "high"}),
    "documents": Conversation(_PLAIN, variables={"documents": [{"title": "a", "text": "b"}]}),
}
