"""The JSON body of a message: a job's event, with or without its output."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from contract.callbacks import MessageKind
from contract.events import LogEntry, Tokens
from contract.function_types import JobView
from contract.jobs import Endpoint, Job
from contract.outbox import OutboxRecord
from contract.response_events import ResponseEvents, decode_record
from contract.vector_answers import VectorAnswer

Output = dict[str, Any]  # fields of the message, beside the job's state


def encode(record: OutboxRecord, *, public_url: str, output: Output | None = None) -> bytes:
    """Encodes the message; every attempt gives the same bytes. Without `output` the receiver must
    fetch it."""
    if record.job_id.startswith("batch_"):
        return _of_batch(record)
    path = f"/v1/jobs/{record.job_id}"
    data: dict[str, Any] = {
        "id": record.job_id,
        "object": "job",
        "status": record.kind.value if record.kind.is_end else "running",
        "model": record.model,
        "lane": record.lane,
        "usage": {
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_output_tokens,
            "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
        },
        "created_at": record.created_ms / 1000,
        "error": {"code": record.code, "message": record.message} if record.code else None,
        "result_url": f"{public_url}{path}",
    }
    if record.kind.is_end:
        data["finished_at"] = record.at_ms / 1000
    data |= output or {}
    body = {
        "type": record.kind.event_type,
        "timestamp": datetime.fromtimestamp(record.at_ms / 1000, UTC).isoformat(),
        "data": data,
    }
    return _json(body)


def _of_batch(record: OutboxRecord) -> bytes:
    """OpenAI's event of a batch's end."""
    status = "completed" if record.kind is MessageKind.SUCCEEDED else record.kind.value
    body = {
        "id": f"evt_{record.message_id}",
        "object": "event",
        "type": f"batch.{status}",
        "created_at": record.at_ms // 1000,
        "data": {"id": record.job_id},
    }
    return _json(body)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def response_of(view: JobView, request: bytes, entries: Iterable[LogEntry]) -> Output:
    """The whole response of a job of /v1/responses, without log probabilities. Raises
    WireError."""
    events = ResponseEvents(view.job, decode_record(request))
    for entry in entries:
        events.of(entry)
    return {"response": events.end(view)[-1]["response"]}


def choices_of(job: Job, entries: Iterable[LogEntry]) -> Output:
    """Text and finish reason of each choice in a log."""
    texts: dict[int, list[str]] = {index: [] for index in range(job.num_choices)}
    reasons: dict[int, str | None] = dict.fromkeys(texts)
    for entry in entries:
        for delta in entry.event.deltas if isinstance(entry.event, Tokens) else ():
            texts[delta.choice].append(delta.text if job.shows_output else "")
            reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
    return {"choices": [_choice(job, i, "".join(parts), reasons[i]) for i, parts in texts.items()]}


def answer_of(view: JobView, entries: Iterable[LogEntry], labels: Sequence[str]) -> Output:
    """The whole answer of a call for vectors that has succeeded."""
    answer = VectorAnswer(view.job, labels)
    for entry in entries:
        answer.add(entry)
    built = answer.build(view.num_prompt_tokens)
    # Parts of it are encoded already.
    return {"result": msgspec.json.decode(msgspec.json.encode(built))}


def _choice(job: Job, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    output: dict[str, Any] = {"text": text}
    if job.endpoint is Endpoint.CHAT:
        output = {"message": {"role": "assistant", "content": text}}
    return {"index": index, **output, "finish_reason": finish_reason}
