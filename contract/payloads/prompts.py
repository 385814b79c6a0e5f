"""A job's prompts as the bytes of an object: msgpack, as in the job's record."""

import msgspec

from contract.jobs import Job
from contract.payloads.store import PayloadLost

_of_one = msgspec.msgpack.Decoder(tuple[int, ...])
_of_several = msgspec.msgpack.Decoder(tuple[tuple[int, ...], ...])


def encode_prompts(job: Job) -> bytes:
    return msgspec.msgpack.encode(job.prompt_list or job.prompt_ids)


def with_prompts(job: Job, data: bytes) -> Job:
    """The job with the prompts that its object holds. Raises PayloadLost where these are not the
    job's."""
    stored = job.stored_prompt
    assert stored is not None
    try:
        if stored.num_prompts == 1:
            whole = msgspec.structs.replace(job, prompt_ids=_of_one.decode(data))
        else:
            whole = msgspec.structs.replace(job, prompt_list=_of_several.decode(data))
    except msgspec.MsgspecError as exc:
        raise PayloadLost(f"an unreadable prompt ({type(exc).__name__})") from exc
    if (whole.num_prompts, whole.num_prompt_tokens) != (stored.num_prompts, stored.num_tokens):
        raise PayloadLost("the object holds another prompt")
    return whole
