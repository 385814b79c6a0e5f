"""What a result's object holds: the answer's texts for whoever has its URL, and the log, from which
a gateway serves results and streams as if it had stayed in Redis. JSON.
"""

from collections.abc import Iterable, Sequence

import msgspec

from contract.events import End, LogEntry, Tokens
from contract.jobs import Job
from contract.payloads.store import PayloadLost


class ResultChoice(msgspec.Struct, kw_only=True):
    """One choice's whole output."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A job's output, and its log up to the end, which stays in Redis."""

    id: str
    object: str = "job.result"
    endpoint: str
    model: str
    choices: list[ResultChoice]
    log: list[LogEntry]


_decoder = msgspec.json.Decoder(Result)


def encode_result(job: Job, entries: Sequence[LogEntry]) -> bytes:
    """The object of a job whose log holds these entries, which do not include its end."""
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
    """The log of a result. Raises PayloadLost where another version wrote it."""
    try:
        return _decoder.decode(data).log
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
    return choices
