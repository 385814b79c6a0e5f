"""Turns log events into OpenAI's responses: whole ones, and chunks of streams.

A chunk depends only on its event, except for text offsets and data of the prompt, so a stream
resumed at any event continues with the same bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from contract.events import (
    ChoiceDelta,
    LogEntry,
    Members,
    Prompt,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
)
from contract.jobs import Endpoint, FinishReason, Job, cut_tokens
from contract.response_events import ShowLogprobs, call_id
from contract.token_texts import TextStream, TokenTexts

_LEAST = -9999.0  # OpenAI's value for an impossible token; JSON has no -inf
_Names = Callable[[int], bytes]  # of tokens, by their ids


def chat_logprobs(names: _Names, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **_chat_token(names, item.token_id, item.logprob),
            "top_logprobs": [_chat_token(names, *pair) for pair in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def response_logprobs(tokenizer: TokenTexts | None) -> ShowLogprobs | None:
    """Returns what shows log probabilities of a response's text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda items: chat_logprobs(tokenizer.token_bytes, items)["content"]


def _chat_token(names: _Names, token_id: int, logprob: float) -> dict[str, Any]:
    raw = names(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "bytes": list(raw),
        "logprob": _finite(logprob),
    }


def completion_logprobs(
    names: _Names, items: Sequence[TokenLogprob], stream: TextStream
) -> dict[str, list[Any]]:
    """The format of /v1/completions. `stream` is the text before these tokens."""
    texts = [_text(names, item.token_id) for item in items]
    tops: list[dict[str, float]] = []
    for text, item in zip(texts, items, strict=True):
        top = {_text(names, token_id): _finite(logprob) for token_id, logprob in item.top}
        tops.append({text: _finite(item.logprob)} | top)
    return {
        "text_offset": [stream.push(item.token_id)[0] for item in items],
        "token_logprobs": [_finite(item.logprob) for item in items],
        "tokens": texts,
        "top_logprobs": tops,
    }


def listed_logprob(names: _Names, item: TokenLogprob, num_top: int) -> dict[str, dict[str, Any]]:
    """vLLM's entry for a prompt token: the token itself first, then the most likely ones, by token
    id."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(item.top, 1)}
    logprobs = {item.token_id: item.logprob} | dict(item.top[:num_top])
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _text(names, token_id),
        }
        for token_id, logprob in logprobs.items()
    }


def _text(names: _Names, token_id: int) -> str:
    return names(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def _names(job: Job, tokenizer: TokenTexts) -> _Names:
    """How log probabilities name tokens."""
    if job.return_tokens_as_token_ids:  # as in vLLM
        return lambda token_id: f"token_id:{token_id}".encode()
    return tokenizer.token_bytes


class PromptPart:
    """One prompt of a job, as responses show it. Without a tokenizer it shows nothing."""

    def __init__(self, job: Job, prompt_ids: tuple[int, ...], tokenizer: TokenTexts | None) -> None:
        self._job = job
        self.prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._items: list[TokenLogprob] = []  # from the second token on; the first has none

    def clear(self) -> None:
        self._items.clear()

    def add(self, event: Prompt) -> None:
        self._items += event.logprobs

    @cached_property
    def text(self) -> str:
        """The prompt's text, decoded from its ids; '' without echo."""
        if not self._job.echo or self._tokenizer is None:
            return ""
        stream = self._tokenizer.text_stream()
        pieces = [stream.push(token_id)[1] for token_id in self.prompt_ids]
        return "".join(pieces) + stream.end()

    def output_stream(self) -> TextStream:
        """The text of a choice, which follows the echo."""
        assert self._tokenizer is not None
        return self._tokenizer.text_stream(self.prompt_ids, len(self.text))

    def echoed_logprobs(self) -> dict[str, list[Any]] | None:
        """Log probabilities of an echo, in the format of completions; null for the first token."""
        num_top = self._job.params.logprobs
        if not self._job.echo or num_top is None or self._tokenizer is None:
            return None
        items = [
            TokenLogprob(item.token_id, item.logprob, item.top[:num_top]) for item in self._items
        ]
        first = TokenLogprob(self.prompt_ids[0], 0.0)
        names = _names(self._job, self._tokenizer)
        shape = completion_logprobs(names, [first, *items], self._tokenizer.text_stream())
        shape["token_logprobs"][0] = shape["top_logprobs"][0] = None
        return shape

    def listed_logprobs(self) -> dict[str, Any]:
        """`prompt_logprobs`, if requested: null, then vLLM's entries by token id."""
        num_top = self._job.prompt_logprobs
        if num_top is None:
            return {}
        if self._tokenizer is None:
            return {"prompt_logprobs": None}
        listed = [
            listed_logprob(self._tokenizer.token_bytes, item, num_top) for item in self._items
        ]
        return {"prompt_logprobs": [None, *listed]}


def delta_of(job: Job, choice: int, call: ToolCallDelta) -> dict[str, Any]:
    """A part of a call in a chunk. The first part has id, type and name."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call_id(job, choice, call.index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def whole_calls(job: Job, choice: int, deltas: Sequence[ToolCallDelta]) -> list[Mapping[str, Any]]:
    """The calls of a whole response."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names.setdefault(delta.index, delta.name)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        {
            "id": call_id(job, choice, index),
            "type": "function",
            "function": {"name": name, "arguments": "".join(arguments[index])},
        }
        for index, name in names.items()
    ]


def usage(
    job: Job,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached: int,
    num_reasoning: int | None = None,
) -> dict[str, Any]:
    """Returns the counts of tokens. `num_cached`: those of the prompt that were in the cache,
    `num_reasoning`: those of a chat's reasoning, in the output."""
    if not job.shows_output:
        num_output_tokens = 0
    shown: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        **cut_tokens(job),
    }
    if num_reasoning is not None and job.endpoint is Endpoint.CHAT:
        shown["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return shown


def _head(job: Job, *, is_chunk: bool) -> dict[str, Any]:
    if job.endpoint is Endpoint.CHAT:
        prefix, kind = "chatcmpl-", "chat.completion.chunk" if is_chunk else "chat.completion"
    else:
        prefix, kind = "cmpl-", "text_completion"
    return {
        "id": prefix + job.id.removeprefix("job-"),
        "object": kind,
        "created": job.created_s,
        "model": job.named_model,
        "system_fingerprint": None,
    }


def _shown(job: Job, delta: ChoiceDelta) -> ChoiceDelta:
    """The delta; without its output if the caller asked for the echo alone."""
    if job.shows_output:
        return delta
    finish_reason = FinishReason.LENGTH if delta.finish_reason else None
    logprobs = None if delta.logprobs is None else ()
    return ChoiceDelta(delta.choice, delta.start, (), "", finish_reason, logprobs)


class Chunks:
    """The chunks of one stream. `tokenizer` is required if the job needs one.

    `includes_usage` adds `usage` to each chunk: null, or the usage so far with `repeats_usage`.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: TokenTexts | None,
        *,
        includes_usage: bool = False,
        repeats_usage: bool = False,
    ) -> None:
        self._job = job
        self._names = None if tokenizer is None else _names(job, tokenizer)
        self._head = _head(job, is_chunk=True)
        self._includes_usage = includes_usage
        self._repeats_usage = repeats_usage
        self._num_tokens: dict[int, int] = {}  # by choice
        self._num_reasoning = 0  # of them
        self._num_cached = 0  # of the prompts
        self._prompts = [PromptPart(job, ids, tokenizer) for ids in job.prompts]
        self._streams: dict[int, TextStream] = {}
        self.needs_history = includes_usage or job.needs_tokenizer

    def reset(self) -> None:
        for prompt in self._prompts:
            prompt.clear()
        self._streams.clear()
        self._num_tokens.clear()
        self._num_reasoning = self._num_cached = 0

    def of(self, entry: LogEntry) -> list[dict[str, Any]]:
        """Returns the chunks of one event; vectors have none. If choices begin in it, a chunk that
        introduces them comes first; data of the prompt is kept until then."""
        if self._job.pooling is not None or isinstance(entry.event, Members):
            return []
        if isinstance(entry.event, Prompt):
            self._prompts[entry.event.prompt].add(entry.event)
            return []
        assert isinstance(entry.event, Tokens)
        deltas = [_shown(self._job, delta) for delta in entry.event.deltas]
        begun = [delta.choice for delta in deltas if delta.start == 0]
        for delta in entry.event.deltas:
            self._num_tokens[delta.choice] = delta.start + len(delta.token_ids)
            self._num_reasoning += delta.num_reasoning
        self._num_cached += entry.event.num_cached
        chunks = []
        if begun and (heads := self._heads(begun)):
            chunks.append(self._chunk(heads))
        choices = [self._choice(delta) for delta in deltas]
        chunks.append(self._chunk(choices))
        for choice in chunks[0]["choices"]:
            if choice["index"] in begun:
                choice |= _of_listed_prompt(self._job, choice["index"])
        if 0 in begun:
            chunks[0] |= _of_prompt(self._job, self._prompts)
        return chunks

    def end(
        self, num_prompt_tokens: int, num_output_tokens: int, num_cached: int
    ) -> list[dict[str, Any]]:
        """The last chunk, if the caller asked for usage."""
        if not self._includes_usage:
            return []
        used = self._used(num_prompt_tokens, num_output_tokens, num_cached)
        return [self._chunk([]) | {"usage": used}]

    def _used(self, num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
        return usage(self._job, num_prompt, num_output, num_cached, self._num_reasoning)

    def _heads(self, begun: Sequence[int]) -> list[dict[str, Any]]:
        """What precedes a choice's output: the role in chats, the prompt in completions
        with echo."""
        if self._job.endpoint is Endpoint.CHAT:
            role = {"role": "assistant", "content": ""}
            head = {"delta": role, "logprobs": None, "finish_reason": None}
            return [{"index": choice, **head} for choice in begun]
        if not self._job.echo and self._job.prompt_logprobs is None:
            return []
        return [self._echo(choice) for choice in begun]

    def _echo(self, choice: int) -> dict[str, Any]:
        prompt = self._prompts[choice // self._job.params.n]
        head = {
            "index": choice,
            "text": prompt.text,
            "logprobs": prompt.echoed_logprobs(),
            "finish_reason": None,
            **prompt.listed_logprobs(),
        }
        return head | ({"token_ids": []} if self._job.return_token_ids else {})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._includes_usage:
            num_tokens = sum(self._num_tokens.values())
            so_far = self._used(self._job.num_prompt_tokens, num_tokens, self._num_cached)
            chunk["usage"] = so_far if self._repeats_usage else None
        return chunk

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.choice}
        if self._job.endpoint is Endpoint.CHAT:
            choice["delta"] = self._message_delta(delta)
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta)
        choice["finish_reason"] = delta.finish_reason
        if self._job.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _message_delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if delta.text or not (delta.reasoning or delta.tool_calls):
            message["content"] = delta.text
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            calls = [delta_of(self._job, delta.choice, call) for call in delta.tool_calls]
            message["tool_calls"] = calls
        return message

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if delta.logprobs is None or self._names is None:
            return None
        if self._job.endpoint is Endpoint.CHAT:
            return chat_logprobs(self._names, delta.logprobs)
        if delta.choice not in self._streams:
            prompt = self._prompts[delta.choice // self._job.params.n]
            self._streams[delta.choice] = prompt.output_stream()
        stream = self._streams[delta.choice]
        return completion_logprobs(self._names, delta.logprobs, stream)


def _of_prompt(job: Job, prompts: Sequence[PromptPart]) -> dict[str, Any]:
    """Fields beside `choices`, in the response or its first chunk."""
    fields = prompts[0].listed_logprobs() if job.endpoint is Endpoint.CHAT else {}
    if job.return_token_ids and len(prompts) == 1:
        fields["prompt_token_ids"] = list(job.prompt_ids)
    return fields


def _of_listed_prompt(job: Job, choice: int) -> dict[str, Any]:
    """Fields of a choice or its first chunk, if the call has several prompts."""
    if not job.return_token_ids or job.num_prompts == 1:
        return {}
    return {"prompt_token_ids": list(job.prompts[choice // job.params.n])}


class Answer:
    """A whole response, built from a job's events."""

    def __init__(self, job: Job, tokenizer: TokenTexts | None) -> None:
        self._job = job
        self._names = None if tokenizer is None else _names(job, tokenizer)
        self._prompts = [PromptPart(job, ids, tokenizer) for ids in job.prompts]
        self._deltas: list[list[ChoiceDelta]] = [[] for _ in range(job.num_choices)]  # by choice

    def reset(self) -> None:
        for prompt in self._prompts:
            prompt.clear()
        self._deltas = [[] for _ in self._deltas]

    def add(self, entry: LogEntry) -> None:
        if isinstance(entry.event, Prompt):
            self._prompts[entry.event.prompt].add(entry.event)
        elif isinstance(entry.event, Tokens):
            for delta in entry.event.deltas:
                self._deltas[delta.choice].append(_shown(self._job, delta))

    def build(
        self, num_prompt_tokens: int, num_output_tokens: int, num_cached: int
    ) -> dict[str, Any]:
        """The response. Choices that were cut off have no finish_reason."""
        answer = _head(self._job, is_chunk=False)
        answer["choices"] = [self._built(i, deltas) for i, deltas in enumerate(self._deltas)]
        num_reasoning = sum(delta.num_reasoning for each in self._deltas for delta in each)
        num_tokens = num_prompt_tokens, num_output_tokens, num_cached
        answer["usage"] = usage(self._job, *num_tokens, num_reasoning)
        return answer | _of_prompt(self._job, self._prompts)

    def _built(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        prompt = self._prompts[index // self._job.params.n]
        built: dict[str, Any] = {"index": index}
        if self._job.endpoint is Endpoint.CHAT:
            built["message"] = self._message(index, deltas, text)
        else:
            built["text"] = prompt.text + text
            built |= prompt.listed_logprobs()
        built["logprobs"] = self._logprobs(deltas, prompt)
        reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
        built["finish_reason"] = reasons[-1] if reasons else None
        if self._job.return_token_ids:
            built["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return built | _of_listed_prompt(self._job, index)

    def _message(self, index: int, deltas: Sequence[ChoiceDelta], text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if tool_calls := [call for delta in deltas for call in delta.tool_calls]:
            message["content"] = text or None
            message["tool_calls"] = whole_calls(self._job, index, tool_calls)
        return message

    def _logprobs(self, deltas: Sequence[ChoiceDelta], prompt: PromptPart) -> dict[str, Any] | None:
        if self._job.params.logprobs is None or self._names is None:
            return None
        items = [item for delta in deltas for item in delta.logprobs or ()]
        if self._job.endpoint is Endpoint.CHAT:
            return chat_logprobs(self._names, items)
        own = completion_logprobs(self._names, items, prompt.output_stream())
        echoed = prompt.echoed_logprobs() or {}
        return {name: echoed.get(name, []) + values for name, values in own.items()}
