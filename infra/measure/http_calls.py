"""One streamed HTTP call to any server with OpenAI's completions API, and its outcome."""

import enum
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from infra.measure.workloads import WorkloadRequest

PromptKind = Literal["ids", "text", "chat"]

_SHED_STATUSES = (429, 503)
_WORDS = ("one", "day", "the", "sea", "was", "low", "and", "old", "men", "sat", "by", "a", "red")


class Outcome(enum.StrEnum):
    """How a call ended. Shed: refused with 429 or 503 before its first token."""

    SUCCEEDED = "succeeded"
    SHED = "shed"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class Call:
    """A call. Times are seconds from the start of the run; `arrival_s` is when it was due.
    `chunk_times_s` has one entry per piece of output; `token_ids` may be missing in answers."""

    number: int
    num_prompt_tokens: int
    arrival_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    outcome: Outcome = Outcome.FAILED
    reason: str = ""
    status: int = 0
    num_output_tokens: int = 0
    chunk_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return self.chunk_times_s[0] - self.arrival_s if self.chunk_times_s else None

    @property
    def ttft_from_sending_s(self) -> float | None:
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def itls_s(self) -> list[float]:
        """From each piece of output to the next."""
        return [b - a for a, b in itertools.pairwise(self.chunk_times_s)]

    @property
    def mean_itl_s(self) -> float | None:
        """Time per token after the first, independent of chunking."""
        if self.num_output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From arrival to the end of the answer."""
        return self.end_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls one server. `is_plain` sends only OpenAI's own fields."""

    client: httpx.AsyncClient
    model: str
    prompt_kind: PromptKind = "ids"
    is_plain: bool = False

    async def call(
        self,
        call: Call,
        request: WorkloadRequest,
        now_s: Callable[[], float],
        hang_up_after: int | None = None,
    ) -> None:
        """Records the call to its end; hangs up after `hang_up_after` pieces of output."""
        path, body = self.request_of(request)
        call.sent_s = now_s()
        try:
            async with self.client.stream("POST", path, json=body) as response:
                call.status = response.status_code
                if response.status_code == 200:
                    await _Stream(call, now_s, hang_up_after).read(response)
                else:
                    await _refused(call, response)
        except httpx.HTTPError as exc:
            call.outcome, call.reason = Outcome.FAILED, type(exc).__name__
        call.end_s = now_s()

    def request_of(self, request: WorkloadRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.is_plain:
            body |= {"ignore_eos": True, "return_token_ids": True}
        if self.prompt_kind == "ids":
            return "completions", body | {"prompt": list(request.prompt_token_ids)}
        text = " ".join(_WORDS[i % len(_WORDS)] for i in request.prompt_token_ids)
        if self.prompt_kind == "text":
            return "completions", body | {"prompt": text}
        return "chat/completions", body | {"messages": [{"role": "user", "content": text}]}


@dataclass(slots=True)
class _Stream:
    """Reads one stream and records it in its call."""

    call: Call
    now_s: Callable[[], float]
    hang_up_after: int | None
    is_finished: bool = False

    async def read(self, response: httpx.Response) -> None:
        call, num_reported = self.call, None
        async for data in _events(response):
            if "error" in data:
                call.reason = _reason(data["error"])
                is_cancelled = call.reason == "cancelled"
                call.outcome = Outcome.CANCELLED if is_cancelled else Outcome.FAILED
                return
            if usage := data.get("usage"):
                num_reported = usage["completion_tokens"]
                call.num_prompt_tokens = usage["prompt_tokens"]
            self._note(data.get("choices") or ())
            if self.hang_up_after is not None and len(call.chunk_times_s) >= self.hang_up_after:
                call.outcome, call.reason = Outcome.CANCELLED, "hung up"
                return
        if num_reported is not None:
            call.num_output_tokens = num_reported
        if self.is_finished:
            call.outcome = Outcome.SUCCEEDED
        else:
            call.outcome, call.reason = Outcome.FAILED, "ended early"

    def _note(self, choices: Sequence[Mapping[str, Any]]) -> None:
        for choice in choices:
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            token_ids = choice.get("token_ids")
            if text or token_ids:
                self.call.chunk_times_s.append(self.now_s())
                self.call.num_output_tokens += len(token_ids) if token_ids else 1
                self.call.token_ids += token_ids or ()
            self.is_finished |= choice.get("finish_reason") is not None


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The data of each event up to [DONE]. Splits lines only at \\n: text may hold other line
    ends.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                yield json.loads(data)
            except ValueError as exc:
                raise httpx.DecodingError("an event that is no JSON") from exc


async def _refused(call: Call, response: httpx.Response) -> None:
    is_shed = response.status_code in _SHED_STATUSES
    call.outcome = Outcome.SHED if is_shed else Outcome.FAILED
    await response.aread()
    try:
        code = _reason(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        code = "no reason given"
    call.reason = response.headers.get("x-dropped-reason") or f"{response.status_code} {code}"


def _reason(error: Any) -> str:
    """The code of an error object. Never its message: that may quote the prompt."""
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return str(code or "error")
