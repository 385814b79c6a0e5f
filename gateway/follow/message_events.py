"""A chat's log as Anthropic's message: whole, or as the events of a stream.

The events depend only on the job, its log and the call, so every gateway gives the same ones.
"""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from contract.events import ChoiceDelta, LogEntry, Tokens, ToolCallDelta
from contract.jobs import FinishReason, Job
from contract.response_events import Event, call_id
from gateway.models.past_calls import arguments_object

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
# Kind of a block -> what it begins as, the kind of its deltas, and the field of their text.
_KINDS: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "text": ({"text": ""}, "text_delta", "text"),
    "thinking": ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"input": {}}, "input_json_delta", "partial_json"),
}


class MessageEvents:
    """The events of one message, in the order of its job's log: `of` each entry, then `end`; or the
    message from `build`. `max_tokens`: what the call asked for, `shows_thinking`: or its signature
    alone."""

    needs_history = True

    def __init__(self, job: Job, max_tokens: int, shows_thinking: bool) -> None:
        self._job = job
        self._is_clipped = job.params.max_tokens < max_tokens
        self._shows_thinking = shows_thinking
        self.reset()

    def reset(self) -> None:
        """Forgets all events, before the log is read again."""
        self._has_begun = False
        self._content: list[dict[str, Any]] = []
        self._open: tuple[str, int | None] | None = None  # kind of the last block, and its call
        self._texts: list[str] = []  # of it
        self._num_thinking_tokens = self._num_cached = 0
        self._stop: dict[str, str | None] = {"stop_reason": "end_turn", "stop_sequence": None}

    def of(self, entry: LogEntry) -> list[Event]:
        """The events of one entry before the end of the log."""
        if not isinstance(entry.event, Tokens):
            return []
        self._num_cached += entry.event.num_cached
        return [*self._begun(), *(e for delta in entry.event.deltas for e in self._of_delta(delta))]

    add = of

    def idle(self) -> list[Event]:
        """What is sent while nothing comes."""
        return [*self._begun(), {"type": "ping"}]

    def end(self, num_prompt_tokens: int, num_output_tokens: int, num_cached: int) -> list[Event]:
        """The last events, of a job that has succeeded."""
        usage = self._usage(num_prompt_tokens, num_output_tokens, num_cached)
        return [
            *self._begun(),
            *self._closed(),
            {"type": "message_delta", "delta": self._stop, "usage": usage},
            {"type": "message_stop"},
        ]

    def build(
        self, num_prompt_tokens: int, num_output_tokens: int, num_cached: int
    ) -> dict[str, Any]:
        """The whole message."""
        self._closed()
        usage = self._usage(num_prompt_tokens, num_output_tokens, num_cached)
        return self._message(usage) | {"content": self._content} | self._stop

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + self._job.id.removeprefix("job-"),
            "type": "message",
            "role": "assistant",
            "model": self._job.named_model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(
        self, num_prompt_tokens: int, num_output_tokens: int, num_cached: int
    ) -> dict[str, Any]:
        """As Anthropic counts: the input is what was not read from the cache."""
        return {
            "input_tokens": num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._num_thinking_tokens},
        }

    def _begun(self) -> list[Event]:
        """The first event, once."""
        if self._has_begun:
            return []
        self._has_begun = True
        message = self._message(self._usage(self._job.num_prompt_tokens, 0, self._num_cached))
        return [{"type": "message_start", "message": message}]

    def _of_delta(self, delta: ChoiceDelta) -> list[Event]:
        events, calls = list[Event](), delta.tool_calls
        if calls and self._open == ("tool_use", calls[0].index):
            events += self._more_of_call(calls[0])  # the call ends before what else there is
            calls = calls[1:]
        if delta.reasoning:
            events += self._more("thinking", delta.reasoning)
        if delta.text:
            events += self._more("text", delta.text)
        for call in calls:
            events += self._more_of_call(call)
        self._num_thinking_tokens += delta.num_reasoning
        if delta.finish_reason is not None:
            reason = _STOP_REASONS[delta.finish_reason]
            if delta.finish_reason is FinishReason.STOP and delta.stop:
                reason, self._stop["stop_sequence"] = "stop_sequence", delta.stop
            elif delta.finish_reason is FinishReason.LENGTH and self._is_clipped:
                reason = "model_context_window_exceeded"
            self._stop["stop_reason"] = reason
        return events

    def _more_of_call(self, call: ToolCallDelta) -> list[Event]:
        id_ = "toolu_" + call_id(self._job, 0, call.index).removeprefix("call_")
        return self._more("tool_use", call.arguments, call.index, id=id_, name=call.name)

    def _more(self, kind: str, text: str, call: int | None = None, **fields: str) -> list[Event]:
        """Adds text to the open block, or to a new one."""
        begins, delta, field = _KINDS[kind]
        events = list[Event]()
        if self._open != (kind, call):
            events += self._closed()
            self._open, self._texts = (kind, call), []
            self._content.append({"type": kind, **fields, **begins})
            events.append(self._event("start", content_block=dict(self._content[-1])))
        if text and (kind != "thinking" or self._shows_thinking):
            self._texts.append(text)
            events.append(self._event("delta", delta={"type": delta, field: text}))
        return events

    def _closed(self) -> list[Event]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        (kind, _), self._open = self._open, None
        block, text, events = self._content[-1], "".join(self._texts), list[Event]()
        if kind == "tool_use":
            block["input"] = arguments_object(text)
        else:
            block[kind] = text
        if kind == "thinking":  # callers must return it; nobody checks it
            digest = hashlib.sha256(f"{self._job.id}/{len(self._content)}".encode()).digest()
            signature = block["signature"] = base64.b64encode(digest).decode()
            delta = {"type": "signature_delta", "signature": signature}
            events.append(self._event("delta", delta=delta))
        return [*events, self._event("stop")]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **fields}
