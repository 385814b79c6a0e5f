"""The JSON body of a message: a job's event, with or without its output."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from contract.events import LogEntry, Tokens
from contract.jobs import Endpoint, Job
from contract.outbox import OutboxRecord

Choices = list[dict[str, Any]]


def encode(record: OutboxRecord, *, public_url: str, choices: Choices | None = None) -> bytes:
    """Encodes the message; every attempt gives the same bytes. Without `choices` the receiver must
    fetch the output."""
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
    if choices is not None:
        data["choices"] = choices
    body = {
        "type": record.kind.event_type,
        "timestamp": datetime.fromtimestamp(record.at_ms / 1000, UTC).isoformat(),
        "data": data,
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def choices_of(job: Job, entries: Iterable[LogEntry]) -> Choices:
    """Text and finish reason of each choice in a log."""
    texts: dict[int, list[str]] = {index: [] for index in range(job.num_choices)}
    reasons: dict[int, str | None] = dict.fromkeys(texts)
    for entry in entries:
        for delta in entry.event.deltas if isinstance(entry.event, Tokens) else ():
            texts[delta.choice].append(delta.text if job.shows_output else "")
            reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
    return [_choice(job, i, "".join(parts), reasons[i]) for i, parts in texts.items()]


def _choice(job: Job, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    output: dict[str, Any] = {"text": text}
    if job.endpoint is Endpoint.CHAT:
        output = {"message": {"role": "assistant", "content": text}}
    return {"index": index, **output, "finish_reason": finish_reason}
