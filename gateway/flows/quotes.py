"""What a flow's first calls would meet now: with them a flow is admitted, and quoted."""

from msgspec.structs import replace

from contract.flows import Cascade, Route
from contract.function_types import Quote, Submission, TenantLimits
from contract.jobs import Job
from gateway.flows.calls import Call, Calls, MemberFailed
from gateway.flows.kinds import chosen_call, first_calls
from gateway.http.errors import CONTEXT_EXCEEDED, ApiError, bad_request
from gateway.openai.structured import GrammarCompiler
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings


class FirstCalls:
    """Of a gateway."""

    def __init__(
        self, broker: Broker, grammars: GrammarCompiler, settings: GatewaySettings
    ) -> None:
        self._broker = broker
        self._grammars = grammars
        self._settings = settings

    async def check(self, job: Job, submission: Submission) -> None:
        """Raises JobRefused where none of the members with which a flow begins takes the call now;
        ApiError where none can answer it. A flow's job that exists is not refused."""
        if job.flow is None:
            return
        refused = (await self.quote(job, submission)).refusal
        if refused is not None and not await self._is_known(job, submission):
            raise refused

    async def _is_known(self, job: Job, submission: Submission) -> bool:
        key = submission.idempotency_key
        return bool(key) and await self._broker.knows_key(job.tenant, key)

    async def quote(self, job: Job, submission: Submission) -> Quote:
        """Of the first call that could begin; the latest of several. Raises ApiError."""
        calls = Calls(
            self._broker,
            self._grammars,
            self._settings,
            job,
            lane=job.lane,
            deadline_s=self._broker.clock() + submission.deadline_s,
        )
        try:
            first = await first_calls(job, self._broker.known.step_templates)
        except MemberFailed as exc:
            raise bad_request("invalid_value", exc.message) from None
        assert job.flow is not None
        definition = job.flow.flow.definition
        quotes, errors = list[Quote](), list[ApiError]()
        for call in first:
            try:
                quotes.append(await self._quote(calls, call, submission))
            except ApiError as exc:
                errors.append(exc)
            else:
                if isinstance(definition, Cascade):
                    break
        if not quotes and isinstance(definition, Route) and errors[0].code == CONTEXT_EXCEEDED:
            call = chosen_call(job, definition, None)
            quotes.append(await self._quote(calls, call, submission))
        if not quotes:
            raise errors[0]
        admitted = [quote for quote in quotes if quote.refusal is None]
        return max(admitted or quotes, key=lambda quote: quote.position.eta_s or 0.0)

    async def _quote(self, calls: Calls, call: Call, submission: Submission) -> Quote:
        job, own = await calls.prepare(call)
        own = replace(own, limits=TenantLimits(), needs_worker=submission.needs_worker)
        if job.flow is not None:
            return await self.quote(job, own)
        return await self._broker.quote(job, own)
