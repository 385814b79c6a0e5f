"""A model's chat template, which renders messages as the model's prompt.

The template comes from the model. It runs in jinja2's sandbox, in a process of its own: `python -m
gateway.models.chat_template`, which imports nothing else of the gateway.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.child import Refused, serve

MAX_RENDERED_CHARS = 4 * 1024 * 1024
_REFUSAL_CHARS = 200
MAX_POWER = 1_000


class ChatTemplate:
    """A compiled template. Raises jinja2's errors if it cannot be compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        # Older templates know the role `developer` as `system`.
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        is_answered: bool = True,
        continues: bool = False,
    ) -> str:
        """Returns the prompt; with `is_answered`, it ends where the assistant's message starts,
        with `continues` where the last message ends, as in transformers. `variables`: others that
        the template reads. Raises Refused, MemoryError."""
        if continues:
            messages = [*messages[:-1], _marked(messages[-1])]
        if not self._knows_developer:
            messages = [_as_system(message) for message in messages]
        messages = [_with_reasoning(message) for message in messages]
        context = {"documents": None, **self._special_tokens, **(variables or {}), "tools": tools}
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=messages, add_generation_prompt=is_answered, **context
            ):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise Refused("the chat template's output is too long")
                parts.append(part)
        except (Refused, MemoryError):
            raise
        except jinja2.TemplateError as exc:
            reason = (exc.message or "it failed")[:_REFUSAL_CHARS]
            raise Refused(f"the model's chat template refused: {reason}") from exc
        except Exception as exc:  # for example TypeError of a filter with a wrong argument
            reason = f"{type(exc).__name__}: {exc}"[:_REFUSAL_CHARS]
            raise Refused(f"the model's chat template failed on these messages: {reason}") from exc
        rendered = "".join(parts)
        return _before_mark(rendered) if continues else rendered

    def render_pairs(self, instruction: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Returns the prompt of each query and document, in the roles that rerankers give them,
        after the instruction if there is one. Raises Refused, MemoryError."""
        head = [{"role": "system", "content": instruction}] if instruction else []
        prompts: list[str] = []
        num_chars = 0
        for query, document in pairs:
            pair = [
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ]
            prompts.append(self.render([*head, *pair], is_answered=False))
            num_chars += len(prompts[-1])
            if num_chars > MAX_RENDERED_CHARS:
                raise Refused("the chat template's output is too long")
        return prompts


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # of transformers


def _marked(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with a mark at the end of its text. Raises Refused."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    parts = [*(content or ())]
    for place in reversed(range(len(parts))):
        if "text" in parts[place]:
            parts[place] = {**parts[place], "text": parts[place]["text"] + _MARK}
            return {**message, "content": parts}
    raise Refused("continue_final_message: the last message has no text")


def _before_mark(rendered: str) -> str:
    before, mark, after = rendered.rpartition(_MARK.strip())
    if not mark:
        raise Refused("continue_final_message: the chat template does not show the last message")
    return before if after.startswith(" ") else before.rstrip()


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds a message's reasoning by all names that templates read, as transformers does."""
    given = (message[name] for name in _REASONING_NAMES if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training. It renders as it is."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Macro) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which limits ranges, with limits on the two operators that can fill the
    memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > MAX_POWER:
            raise SecurityError(f"powers are of numbers up to {MAX_POWER}")
        if (
            operator == "*"
            and max(_repeated(left, right), _repeated(right, left)) > MAX_RENDERED_CHARS
        ):
            raise SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _repeated(items: Any, times: Any) -> int:
    """The length of a repeated text or list; 0 if `items * times` is no repetition."""
    is_repetition = isinstance(items, str | bytes | list | tuple) and isinstance(times, int)
    return len(items) * times if is_repetition else 0


def _environment() -> jinja2.Environment:
    """The environment that chat templates expect (transformers' conventions)."""
    extensions = [_Generation, loopcontrols]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # jinja2's filter would escape HTML characters.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def prepare(start: Any) -> Callable[[Any], str]:
    plain = ChatTemplate(start["source"], start["special_tokens"])
    with_tools = plain
    if start["tool_source"] is not None:
        with_tools = ChatTemplate(start["tool_source"], start["special_tokens"])

    def answer(request: Any) -> str:
        """Returns one prompt, or a JSON list of them for pairs."""
        if "pairs" in request:
            return json.dumps(plain.render_pairs(**request), ensure_ascii=False)
        source, template = request.pop("source"), with_tools if request["tools"] else plain
        if source is not None:
            template = _of_caller(source, start["special_tokens"])
        if not request["tools"]:
            return template.render(**request)
        try:
            return template.render(**request)
        except Refused:
            described = [_described(tool) for tool in request["tools"]]
            if described == request["tools"]:
                raise
        return template.render(**{**request, "tools": described})

    return answer


def _of_caller(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(source, special_tokens)
    except MemoryError:
        raise
    except Exception as exc:  # jinja2 raises many kinds
        reason = f"{type(exc).__name__}: {exc}"[:_REFUSAL_CHARS]
        raise Refused(f"chat_template cannot be read: {reason}") from exc


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tool with fields that callers may omit and some templates need."""
    left_out = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**left_out, **tool["function"]}}


if __name__ == "__main__":
    serve(prepare)
