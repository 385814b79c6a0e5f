"""Encodes the objects of jobs.

A prompt's object contains the token ids in msgpack, like a job's record. A result's object contains
in JSON the answer's texts or vectors, for readers of its URL, and the log, from which a gateway
serves results and streams.
"""

from collections.abc import Iterable, Sequence

import msgspec

from contract.events import End, LogEntry, Tokens
from contract.jobs import Job
from contract.payloads.store import PayloadLost


class ResultChoice(msgspec.Struct, kw_only=True):
    """A choice's complete output; of a prefill-only job a prompt's vector, in base64."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    vector: bytes = b""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A job's output, and its log without the terminal event, which stays in Redis."""

    id: str
    object: str = "job.result"
    endpoint: str
    model: str
    choices: list[ResultChoice]
    log: list[LogEntry]


_result_decoder = msgspec.json.Decoder(Result)
_of_one = msgspec.msgpack.Decoder(tuple[int, ...])
_of_several = msgspec.msgpack.Decoder(tuple[tuple[int, ...], ...])


def encode_result(job: Job, entries: Sequence[LogEntry]) -> bytes:
    """Encodes a job's result from its log without the terminal event."""
    assert not any(isinstance(entry.event, End) for entry in entries)
    return msgspec.json.encode(
        Result(
            id=job.id,
            endpoint=job.endpoint,
            model=job.model,
            choices=_choices(job.num_choices, entries),
            log=list(entries),
        )
    )


def decode_log(data: bytes) -> list[LogEntry]:
    """The log of a result. Raises PayloadLost where it cannot be decoded."""
    try:
        return _result_decoder.decode(data).log
    except msgspec.MsgspecError as exc:
        raise PayloadLost(f"a result that this version cannot read ({type(exc).__name__})") from exc


def _choices(number: int, entries: Iterable[LogEntry]) -> list[ResultChoice]:
    choices = [ResultChoice(index=index) for index in range(number)]
    for entry in entries:
        if not isinstance(entry.event, Tokens):
            continue
        for delta in entry.event.deltas:
            choice = choices[delta.choice]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.vector = delta.vector
    return choices


def encode_prompts(job: Job) -> bytes:
    return msgspec.msgpack.encode(job.prompt_list or job.prompt_ids)


def with_prompts(job: Job, data: bytes) -> Job:
    """The job with the prompts of its object. Raises PayloadLost if they do not match the job."""
    stored = job.stored_prompt
    assert stored is not None
    try:
        if stored.num_prompts == 1:
            whole = msgspec.structs.replace(job, prompt_ids=_of_one.decode(data))
        else:
            whole = msgspec.structs.replace(job, prompt_list=_of_several.decode(data))
    except msgspec.MsgspecError as exc:
        raise PayloadLost(f"an unreadable prompt ({type(exc).__name__})") from exc
    num_tokens = sum(map(len, whole.prompts))
    if (whole.num_prompts, num_tokens) != (stored.num_prompts, stored.num_tokens):
        raise PayloadLost("the object holds another prompt")
    return whole
