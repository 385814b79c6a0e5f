"""Turns a response's call into a job."""

import msgspec

from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from contract.response_records import encode_record
from gateway.flows.entry import prepare_any
from gateway.http.errors import ApiError, invalid_value
from gateway.jobs.streams import Gateway
from gateway.openai.admission import Terms
from gateway.openai.responses.bodies import ResponseBody, renamed
from gateway.openai.responses.conversations import conversation, to_messages
from gateway.openai.responses.records import record_of


async def prepare_response(
    gateway: Gateway, body: ResponseBody, terms: Terms
) -> tuple[Job, Submission]:
    """The job, which holds the request, and its submission. The response's metadata is also the
    job's, unless `terms` have other values. Raises ApiError."""
    metadata = {**(body.metadata or {}), **terms.metadata}
    terms = msgspec.structs.replace(terms, metadata=metadata)
    items = await conversation(gateway, terms.caller.tenant, body)
    chat = body.chat(to_messages(items))
    broker, grammars, settings = gateway.broker, gateway.grammars, gateway.settings
    try:
        job, submission = await prepare_any(
            broker, grammars, settings, Endpoint.RESPONSES, chat, terms
        )
    except ApiError as exc:
        raise renamed(exc) from None
    try:
        record = encode_record(record_of(job, body, items))
    except OverflowError:  # of an integer over 64 bits, which only schemas may have
        raise invalid_value("tools", "tools: a number is out of range") from None
    return msgspec.structs.replace(job, response=record), submission
