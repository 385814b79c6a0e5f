"""Whether the calls with which a flow begins would be accepted."""

from msgspec.structs import replace

from contract.errors import BatchwayError
from contract.flows import Cascade, Route
from contract.function_types import Quote, Submission, TenantLimits
from contract.jobs import Job
from gateway.http.errors import CONTEXT_EXCEEDED, ApiError, bad_request, to_api_error
from gateway.runners.flows.calls import MemberFailed, ModelCall, ModelCalls
from gateway.runners.flows.kinds import chosen_call, first_calls
from gateway.state import Gateway


async def check_first_calls(gateway: Gateway, job: Job, submission: Submission) -> None:
    """Raises JobRefused if no member with which a flow begins accepts the call at present, and
    ApiError if none can answer it. A job that exists is not refused."""
    try:
        refused = (await quote_first_calls(gateway, job, submission)).refusal
        key = submission.idempotency_key
        if refused is not None and not (key and await gateway.broker.knows_key(job.tenant, key)):
            raise refused
    except BatchwayError as exc:
        gateway.metrics.note_refusal(job, to_api_error(exc).code)
        raise


async def quote_first_calls(gateway: Gateway, job: Job, submission: Submission) -> Quote:
    """The quote of the first call that could begin; of several, the latest. Raises ApiError."""
    calls = ModelCalls(
        gateway,
        job,
        lane=job.lane,
        deadline_s=gateway.broker.clock() + submission.deadline_s,
    )
    try:
        first = await first_calls(job, gateway.step_templates)
    except MemberFailed as exc:
        raise bad_request("invalid_value", exc.message) from None
    assert job.flow is not None
    definition = job.flow.flow.definition
    quotes, errors = list[Quote](), list[ApiError]()
    for call in first:
        try:
            quotes.append(await _quote(calls, call, submission))
        except ApiError as exc:
            errors.append(exc)
        else:
            if isinstance(definition, Cascade):
                break
    if not quotes and isinstance(definition, Route) and errors[0].code == CONTEXT_EXCEEDED:
        call = chosen_call(job, definition, None)
        quotes.append(await _quote(calls, call, submission))
    if not quotes:
        raise errors[0]
    admitted = [quote for quote in quotes if quote.refusal is None]
    return max(admitted or quotes, key=lambda quote: quote.position.eta_s or 0.0)


async def _quote(calls: ModelCalls, call: ModelCall, submission: Submission) -> Quote:
    job, own = await calls.prepare(call)
    own = replace(own, limits=TenantLimits(), needs_worker=submission.needs_worker)
    if job.flow is not None:
        return await quote_first_calls(calls.gateway, job, own)
    return await calls.gateway.broker.quote(job, own)
