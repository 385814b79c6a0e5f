"""What the next turn of a conversation will begin with: its messages with the answer, as the chat
template renders them before what the user or a tool says next. Where that differs from prompt and
output, as templates leave reasoning out and write calls in another form, it is left to a worker."""

import logging
from collections.abc import Callable, Sequence

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import Response

from contract.answers import whole_calls
from contract.events import ChoiceDelta
from contract.jobs import FinishReason, Job
from contract.model_cards import TokenizerFiles
from gateway.follow.sync_call import SyncCall
from gateway.prepare.generation import OF_EFFORT, prompts_of
from gateway.prepare.revocation import KEY
from gateway.prepare.schemas import ChatBody, Message

log = logging.getLogger("batchway.gateway")

MIN_TOKENS = 64  # that are worth a call of Redis
_ENDS = ([FinishReason.STOP], [FinishReason.TOOL_CALLS])


def then_warmed(
    response: Response, call: SyncCall, chat: Callable[[], ChatBody], ids: str = "call"
) -> Response:
    """The response, after whose last byte the next turn of the call is warmed. `chat`: of the call;
    `ids`: what the ids of its functions' calls begin with."""
    if call.deltas is not None and call.submitted_s is not None:
        response.background = BackgroundTask(_warm, call, chat, ids)
    return response


async def _warm(call: SyncCall, chat: Callable[[], ChatBody], ids: str) -> None:
    deltas, job, broker = call.deltas or [], call.job, call.gateway.broker
    is_whole = [delta.finish_reason for delta in deltas if delta.finish_reason] in _ENDS
    is_text = job.prompt_ids and job.num_choices == 1 and not job.num_image_tokens
    if not (is_whole and is_text) or (job.tenant, job.model) in broker.unwarmed:
        return
    try:
        key = call.request.scope["state"].get(KEY)
        if key is not None and await broker.key_ring.terms_of(key) is None:
            return
        card = (await broker.known.models())[job.model]
        tokenizer = await broker.known.tokenizer(card)
        body = next_turn(chat(), job, deltas, ids, tokenizer.files)
        [token_ids], num_cut = await prompts_of(tokenizer, card, body)
        token_ids = token_ids[:-1]  # which may become another with what follows
        known_ids = (*job.prompt_ids, *(i for delta in deltas for i in delta.token_ids))
        pairs = enumerate(zip(token_ids, known_ids, strict=False))
        num_known = next((n for n, (a, b) in pairs if a != b), min(len(token_ids), len(known_ids)))
        if len(token_ids) - num_known >= MIN_TOKENS and not num_cut:
            await broker.warm(msgspec.structs.replace(job, prompt_ids=token_ids), num_known)
    except Exception as exc:  # the caller has its answer
        log.info("next turn not warmed (%s) job_id=%s", type(exc).__name__, job.id)


def next_turn(
    body: ChatBody, job: Job, deltas: Sequence[ChoiceDelta], ids: str, files: TokenizerFiles
) -> ChatBody:
    """The chat with its answer, as its caller will return it, up to the beginning of the next
    message's text: a result of the first call, or the user's."""
    given = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
    earlier = [each for each in body.messages if each.role == "assistant"]
    if not earlier or any(each.reasoning_content or each.reasoning for each in earlier):
        given["reasoning_content"] = "".join(delta.reasoning for delta in deltas)
    calls = whole_calls(job, 0, [part for delta in deltas for part in delta.tool_calls])
    calls = [{**each, "id": each["id"].replace("call", ids, 1)} for each in calls]
    then = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
    format_ = files.tool_format
    if format_ is not None and format_.between is None:  # each call is followed by its result
        calls = calls[:1]
    answer = given | {"tool_calls": calls}
    new = [Message.model_validate(each) for each in (answer, then | {"content": ""})]
    update = {"messages": [*body.messages, *new], "continue_final_message": True}
    if not OF_EFFORT.keys() & {*files.template_variables}:
        update["reasoning_effort"] = None  # messages may ask for it in vain
    return body.model_copy(update=update)
