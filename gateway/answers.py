"""Log events to OpenAI's answers: whole ones, and chunks of streams. One code for both endpoints.

A chunk is a function of its event (text offsets of completions' logprobs apart), so that a
stream resumed at any event goes on with the same bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.events import ChoiceDelta, LogEntry, TokenLogprob, Tokens
from contract.jobs import Endpoint, Job
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.tokens import ModelTokenizer


def usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def _head(job: Job, *, is_chunk: bool) -> dict[str, Any]:
    if job.endpoint is Endpoint.CHAT:
        prefix, kind = "chatcmpl-", "chat.completion.chunk" if is_chunk else "chat.completion"
    else:
        prefix, kind = "cmpl-", "text_completion"
    return {
        "id": prefix + job.id.removeprefix("job-"),
        "object": kind,
        "created": job.created_s,
        "model": job.model,
        "system_fingerprint": None,
    }


class Chunks:
    """The chunks of one stream. `tokenizer` is needed where the job asks for logprobs."""

    def __init__(
        self, job: Job, tokenizer: ModelTokenizer | None, *, includes_usage: bool = False
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._includes_usage = includes_usage
        self._offsets: dict[int, int] = {}

    def reset(self) -> None:
        self._offsets.clear()

    def of(self, entry: LogEntry) -> list[dict[str, Any]]:
        """The chunks of one event: one, after the roles where choices begin in it."""
        assert isinstance(entry.event, Tokens)
        deltas = entry.event.deltas
        begun = [delta.choice for delta in deltas if delta.start == 0]
        chunks = []
        if begun and self._job.endpoint is Endpoint.CHAT:
            chunks.append(self._chunk([_role(choice) for choice in begun]))
        chunks.append(self._chunk([self._choice(delta) for delta in deltas]))
        if 0 in begun and self._job.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._job.prompt_ids)
        return chunks

    def usage(self, num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
        """The last chunk where the caller asked for usage."""
        return self._chunk([]) | {"usage": usage(num_prompt_tokens, num_output_tokens)}

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        chunk = _head(self._job, is_chunk=True) | {"choices": list(choices)}
        return chunk | {"usage": None} if self._includes_usage else chunk

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.choice}
        if self._job.endpoint is Endpoint.CHAT:
            choice["delta"] = {"content": delta.text}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta)
        choice["finish_reason"] = delta.finish_reason
        if self._job.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if delta.logprobs is None or self._tokenizer is None:
            return None
        if self._job.endpoint is Endpoint.CHAT:
            return chat_logprobs(self._tokenizer, delta.logprobs)
        offset = self._offsets.get(delta.choice, 0)
        shape, self._offsets[delta.choice] = completion_logprobs(
            self._tokenizer, delta.logprobs, offset
        )
        return shape


def _role(choice: int) -> dict[str, Any]:
    return {
        "index": choice,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


@dataclass(slots=True)
class _Choice:
    """What came of one choice so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """A whole answer, put together from a job's events."""

    def __init__(self, job: Job, tokenizer: ModelTokenizer | None) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(job.params.n)]

    def reset(self) -> None:
        self._choices = [_Choice() for _ in range(self._job.params.n)]

    def add_all(self, entries: Iterable[LogEntry]) -> None:
        for entry in entries:
            self.add(entry)

    def add(self, entry: LogEntry) -> None:
        if not isinstance(entry.event, Tokens):
            return
        for delta in entry.event.deltas:
            choice = self._choices[delta.choice]
            choice.texts.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            choice.finish_reason = delta.finish_reason or choice.finish_reason

    def build(self, num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
        """The answer; choices that were cut off have no finish_reason."""
        answer = _head(self._job, is_chunk=False)
        answer["choices"] = [self._built(i, choice) for i, choice in enumerate(self._choices)]
        answer["usage"] = usage(num_prompt_tokens, num_output_tokens)
        if self._job.return_token_ids:
            answer["prompt_token_ids"] = list(self._job.prompt_ids)
        return answer

    def _built(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        built: dict[str, Any] = {"index": index}
        if self._job.endpoint is Endpoint.CHAT:
            built["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            built["text"] = text
        built["logprobs"] = self._logprobs(choice)
        built["finish_reason"] = choice.finish_reason
        if self._job.return_token_ids:
            built["token_ids"] = choice.token_ids
        return built

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._job.params.logprobs is None or self._tokenizer is None:
            return None
        if self._job.endpoint is Endpoint.CHAT:
            return chat_logprobs(self._tokenizer, choice.logprobs)
        return completion_logprobs(self._tokenizer, choice.logprobs, 0)[0]
