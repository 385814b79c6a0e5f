"""What a response's job keeps of its request, and the ids of responses and their items, which are
derived from the job's id."""

from typing import Any

import msgspec

from contract.errors import wire_errors
from contract.jobs import Job

Item = dict[str, Any]

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
