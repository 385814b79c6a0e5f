"""Whole responses, built from a job's log: of a synchronous call, or of a job that has ended."""

import asyncio
from typing import Any

from contract.errors import BrokerUnavailable
from contract.events import LogEntry
from contract.function_types import JobView
from contract.jobs import Job
from contract.vector_answers import VectorAnswer
from gateway.follow.answers import Answer
from gateway.follow.follow import Ended, follow
from gateway.follow.stored_responses import ended_response, record_of_job
from gateway.follow.sync_call import SyncCall
from gateway.http.errors import failure_of
from gateway.redis.cursor import Reset
from gateway.state import Gateway


async def whole_answer(gateway: Gateway, call: SyncCall) -> dict[str, Any]:
    """The response of a call, once its job has ended. Raises ApiError if the job failed, and
    AnsweredOtherwise if the call became a job."""
    job = call.job
    answer = await answer_to(gateway, job)
    async for item in follow(gateway, job, call=call):
        match item:
            case Ended(end):
                if (failure := failure_of(end)) is not None:
                    raise failure
                return await built(answer, end.prompt_tokens, end.output_tokens)
            case LogEntry():
                answer.add(item)
            case Reset():
                answer.reset()
        if call.patience.is_over(has_sent=False):
            raise await call.hand_over()
    raise AssertionError("unreachable")


async def ended_answer(gateway: Gateway, view: JobView) -> dict[str, Any]:
    """The response of a job that has ended, from its log. Raises BatchwayError."""
    if record := await record_of_job(gateway, view.job):
        return await ended_response(gateway, view, record)
    answer = await answer_to(gateway, await gateway.whole(view.job))
    up_to, number = view.next_number - 1, 0
    async for entry in gateway.broker.log(view.job.id, view.job.tenant, up_to=up_to):
        answer.add(entry)
        number = entry.number
    if number < up_to:
        raise BrokerUnavailable("Redis lost a part of the log between two reads")
    return await built(answer, view.num_prompt_tokens, view.num_output_tokens)


async def answer_to(gateway: Gateway, job: Job) -> Answer | VectorAnswer:
    """The response to a job, to which its events must be added."""
    if job.pooling is None:
        return Answer(job, await gateway.tokenizer_for(job))
    card = (await gateway.broker.known.models()).get(job.model)
    labels = () if card is None or card.pooling is None else card.pooling.labels
    return VectorAnswer(job, labels)


async def built(
    answer: Answer | VectorAnswer, num_prompt_tokens: int, num_output_tokens: int
) -> dict[str, Any]:
    """The whole response; with vectors in a thread, because there may be millions of numbers."""
    if isinstance(answer, VectorAnswer):
        return await asyncio.to_thread(answer.build, num_prompt_tokens, num_output_tokens)
    return answer.build(num_prompt_tokens, num_output_tokens)
