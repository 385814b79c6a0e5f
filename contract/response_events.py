"""The requests of responses as their jobs keep them, and their logs as OpenAI's events.

The events and their sequence numbers depend only on the job and its log, so every gateway gives
the same bytes, however often, and a callback the same response.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from contract.codec import wire_errors
from contract.events import ChoiceDelta, End, LogEntry, TokenLogprob, Tokens, ToolCallDelta
from contract.function_types import JobView
from contract.jobs import FinishReason, Job, JobStatus, cut_tokens

Item = dict[str, Any]
Event = dict[str, Any]
# Shows log probabilities as a message's part does, with the texts of tokens.
ShowLogprobs = Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]
STATUSES = {
    JobStatus.QUEUED: "queued",
    JobStatus.CLAIMED: "in_progress",
    JobStatus.STREAMING: "in_progress",
    JobStatus.SUCCEEDED: "completed",
    JobStatus.FAILED: "failed",
    JobStatus.EXPIRED: "failed",
    JobStatus.CANCELLED: "cancelled",
}
# Kind of an item with text -> the name of its part and of its events.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job's request. `shown` are the fields that responses show. `items` are all that the model
    received, including those of earlier responses, each with the id that it had there."""

    shown: dict[str, Any]
    items: list[Item]
    is_background: bool = False
    is_stored: bool = True


encode_record = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ResponseRecord)


def decode_record(raw: bytes) -> ResponseRecord:
    """Decodes a record. Raises WireError."""
    with wire_errors("request of a response"):
        return _decoder.decode(raw)


def response_id(job: Job) -> str:
    return "resp_" + job.id.removeprefix("job-")


def item_id(job: Job, kind: str, number: int) -> str:
    """The id of an item by its number among the response's items, input before output."""
    return f"{_PREFIXES[kind]}_{job.id.removeprefix('job-')}-{number}"


def call_id(job: Job, choice: int, index: int) -> str:
    """The id of a function's call; the same in every response of the job."""
    digest = hashlib.sha256(f"{job.id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


class _OpenItem(msgspec.Struct):
    """The item that the log is writing. `call` is its number among the calls."""

    item: Item
    index: int
    call: int | None = None
    texts: list[str] = msgspec.field(default_factory=list)
    logprobs: list[dict[str, Any]] = msgspec.field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.item["type"])

    @property
    def place(self) -> dict[str, Any]:
        """The fields of its events that locate it."""
        return {"item_id": self.item["id"], "output_index": self.index}

    def part(self) -> dict[str, Any]:
        """Its text so far, as a part of its content."""
        part = {"type": _PARTS[self.kind], "text": "".join(self.texts)}
        is_message = self.kind == "message"
        return part | ({"annotations": [], "logprobs": [*self.logprobs]} if is_message else {})


class ResponseEvents:
    """The events of one response, in the order of its job's log: `begin`, `of` each entry, `end`.

    `logprobs` is required for log probabilities.
    """

    def __init__(
        self, job: Job, record: ResponseRecord, logprobs: ShowLogprobs | None = None
    ) -> None:
        self._job = job
        self._record = record
        self._show_logprobs = logprobs
        self.reset()

    def reset(self) -> None:
        """Forgets all events, before the log is read again."""
        self.num_events = 0
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not out yet
        self._num_reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._has_output = False

    def begin(self) -> list[Event]:
        if not self._record.is_background:
            return [self._about("created", "in_progress"), self._about("in_progress")]
        return [self._about("created", "queued"), self._about("queued")]

    def of(self, entry: LogEntry) -> list[Event]:
        """The events of one entry before the end of the log."""
        if not isinstance(entry.event, Tokens):
            return []
        events = []
        if not self._has_output and self._record.is_background:
            events.append(self._about("in_progress"))
        self._has_output = True
        for delta in entry.event.deltas:
            events += self._of_delta(delta)
        return events

    add = of

    def end(self, view: JobView) -> list[Event]:
        """The last events, of a job that has ended."""
        status = STATUSES[view.status]
        if status == "completed" and self._finish_reason is FinishReason.LENGTH:
            status = "incomplete"
        events = []
        if status == "completed" and not self._output:
            events += self._opened("message")
        events += self._closed("completed" if status == "completed" else "incomplete")
        final = self.response(status, view)
        return [*events, self._event(f"response.{status}", response=final)]

    def response(self, status: str, ended: JobView | None = None) -> dict[str, Any]:
        """The response object. `ended`: the job, once it has ended."""
        error = incomplete = completed_at = None
        if ended is not None:
            told = End(ended.status, ended.code, ended.message, 0, 0).error
            if told is not None and status == "failed":
                error = {"code": told[0], "message": told[1]}
            if status == "completed" and ended.finished_ms is not None:
                completed_at = ended.finished_ms // 1000
        if status == "incomplete":
            incomplete = {"reason": "max_output_tokens"}
        return {
            "id": response_id(self._job),
            "object": "response",
            "created_at": self._job.created_s,
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": incomplete,
            "model": self._job.named_model,
            "output": self._output if ended is not None else [],
            "usage": None if ended is None else self._usage(ended),
            **self._record.shown,
        }

    def error(self, body: Mapping[str, Any]) -> Event:
        """An event of the stream's own failure, after which the stream ends. Some clients read
        `error`, as in the body of a refusal, others its members beside the event's type."""
        members = {name: body["error"][name] for name in ("code", "message", "param")}
        return self._event("error", **members, error=body["error"])

    def _usage(self, view: JobView) -> dict[str, Any]:
        num_input, num_output = view.num_prompt_tokens, view.num_output_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": view.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": num_input + num_output,
            **cut_tokens(self._job),
        }

    def _of_delta(self, delta: ChoiceDelta) -> list[Event]:
        events, calls = [], delta.tool_calls
        if calls and self._open and self._open.call == calls[0].index:
            events += self._more_of_call(calls[0])  # the call ends before what else there is
            calls = calls[1:]
        if delta.reasoning:
            events += self._more("reasoning", delta.reasoning)
        self._num_reasoning_tokens += delta.num_reasoning
        self._logprobs += (delta.logprobs or ())[delta.num_reasoning :]
        if delta.text:
            events += self._more("message", delta.text)
        for call in calls:
            events += self._more_of_call(call)
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def _more(self, kind: str, text: str) -> list[Event]:
        """Adds text to a message or to reasoning."""
        events = [] if self._open and self._open.kind == kind else self._opened(kind)
        opened = self._open
        assert opened is not None
        opened.texts.append(text)
        fields = {**opened.place, "content_index": 0, "delta": text}
        if kind == "message":
            logprobs = self._taken_logprobs()
            opened.logprobs += logprobs
            fields["logprobs"] = logprobs
        return [*events, self._event(f"response.{_PARTS[kind]}.delta", **fields)]

    def _more_of_call(self, call: ToolCallDelta) -> list[Event]:
        events = []
        if self._open is None or self._open.call != call.index:
            called = {"call_id": call_id(self._job, 0, call.index), "name": call.name}
            events += self._opened("function_call", call.index, **called, arguments="")
        opened = self._open
        assert opened is not None
        if call.arguments:
            opened.texts.append(call.arguments)
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, **opened.place, delta=call.arguments))
        return events

    def _opened(self, kind: str, call: int | None = None, **fields: Any) -> list[Event]:
        """Begins an item; the one before it is complete."""
        events = self._closed("completed")
        number = len(self._record.items) + len(self._output)
        item = {"id": item_id(self._job, kind, number), "type": kind, "status": "in_progress"}
        if kind == "message":
            fields = {"role": "assistant", "content": []}
        elif kind == "reasoning":
            fields = {"summary": [], "content": []}
        opened = self._open = _OpenItem(item | fields, len(self._output), call)
        self._output.append(opened.item)
        added = {"output_index": opened.index, "item": dict(opened.item)}
        events.append(self._event("response.output_item.added", **added))
        if call is None:
            part = {**opened.place, "content_index": 0, "part": opened.part() | {"text": ""}}
            events.append(self._event("response.content_part.added", **part))
        return events

    def _closed(self, status: str) -> list[Event]:
        """Ends the open item, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        text, item = "".join(opened.texts), opened.item
        item["status"] = status
        events = []
        if opened.call is not None:
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            done = {"name": item["name"], "arguments": text}
            events.append(self._event(kind, **opened.place, **done))
        else:
            part = opened.part()
            item["content"] = [part]
            done = {**opened.place, "content_index": 0, "text": text}
            if opened.kind == "message":
                done["logprobs"] = opened.logprobs
            events.append(self._event(f"response.{part['type']}.done", **done))
            place = {**opened.place, "content_index": 0}
            events.append(self._event("response.content_part.done", **place, part=part))
        done = {"output_index": opened.index, "item": item}
        events.append(self._event("response.output_item.done", **done))
        return events

    def _taken_logprobs(self) -> Sequence[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        return self._show_logprobs(taken) if self._show_logprobs and taken else []

    def _about(self, kind: str, status: str | None = None) -> Event:
        return self._event(f"response.{kind}", response=self.response(status or kind))

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return event
