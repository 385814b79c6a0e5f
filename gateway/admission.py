"""A checked body to a job: tokenised, measured against the model, with its cost.

What can never run is refused here, with 400 and the parameter named.
"""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from contract.callbacks import Callback
from contract.calls import Submission
from contract.jobs import Endpoint, Job, ModelCard, SamplingParams, default_seed, new_job_id
from gateway.auth import Caller
from gateway.broker import Broker
from gateway.errors import ApiError, TemplateRefused, bad_request, invalid_value, no_such_model
from gateway.schemas import CallBody, ChatBody, CompletionBody
from gateway.settings import GatewaySettings
from gateway.tokens import ModelTokenizer

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_LANE_OF_TIER = {"priority": "interactive", "flex": "batch"}
_DEFAULT_LANE = "standard"
_SMALL_CHARS = 4_096  # a text up to here is tokenised faster than a thread takes over


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is accepted under, beside its body."""

    caller: Caller
    deadline_s: float
    retention_s: float
    attendance_s: float = 0.0  # without a caller for so long it is cancelled; 0: never
    needs_worker: bool = False  # refused where none lives
    lane: str | None = None  # None: by the body's service tier
    idempotency_key: str = ""
    body_hash: str = ""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    callback: Callback | None = None


async def prepare(
    broker: Broker, settings: GatewaySettings, endpoint: Endpoint, body: CallBody, terms: Terms
) -> tuple[Job, Submission]:
    """The job and what to submit it with. Raises ApiError."""
    lane = terms.lane or _LANE_OF_TIER.get(body.service_tier or "", _DEFAULT_LANE)
    terms.caller.check_lane(lane)
    card = (await broker.known.models()).get(body.model)
    if card is None:
        raise no_such_model(body.model, await broker.known.models())
    check_lane(card, lane)
    prompt_ids = await _prompt_ids(await broker.known.tokenizer(card), card, body)
    max_tokens = _max_tokens(settings, card, body, len(prompt_ids))
    job_id = new_job_id()
    params = _sampling(card, body, max_tokens, job_id)
    job = Job(
        id=job_id,
        tenant=terms.caller.tenant,
        model=card.name,
        lane=lane,
        endpoint=endpoint,
        prompt_ids=prompt_ids,
        params=params,
        created_s=int(time.time()),
        return_token_ids=bool(body.return_token_ids),
        echo=_echoes(body),
        shows_output=body.max_tokens != 0,
        prompt_logprobs=body.prompt_logprobs,
    )
    bound_tokens, bound_s = settings.bound_of(lane, await broker.known.max_memory_bytes())
    num_output = params.n * params.max_tokens
    return job, Submission(
        max_output_tokens=num_output,
        deadline_s=terms.deadline_s,
        retention_s=terms.retention_s,
        lane_bound_tokens=bound_tokens,
        lane_bound_s=bound_s,
        limits=terms.caller.limits,
        needs_worker=terms.needs_worker,
        cold_start_s=settings.cold_start_s,
        idempotency_key=terms.idempotency_key,
        body_hash=terms.body_hash,
        attendance_s=terms.attendance_s,
        metadata=terms.metadata,
        callback=terms.callback,
    )


def check_lane(card: ModelCard, lane: str) -> None:
    """Raises ApiError where the model's workers serve no such lane."""
    if lane not in card.lanes:
        message = f"lane {lane!r} is none of {', '.join(card.lanes)}"
        raise bad_request("unknown_lane", message, "lane")


async def _prompt_ids(
    tokenizer: ModelTokenizer, card: ModelCard, body: CallBody
) -> tuple[int, ...]:
    if isinstance(body, CompletionBody) and isinstance(body.prompt, tuple):
        _check_ids("prompt", body.prompt, card)
        return body.prompt
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if isinstance(body, ChatBody) and not tokenizer.has_chat_template:
        message = f"the model {card.name!r} has no chat template: use /v1/completions"
        raise invalid_value(param, message)
    try:
        if _num_chars(body) <= _SMALL_CHARS:
            prompt_ids = _encode(tokenizer, body)
        else:
            prompt_ids = await asyncio.to_thread(_encode, tokenizer, body)
    except TemplateRefused as exc:
        raise invalid_value(param, str(exc)) from None
    if not prompt_ids:
        raise invalid_value(param, f"{param} has no tokens")
    _check_ids(param, prompt_ids, card)
    return tuple(prompt_ids)


def _encode(tokenizer: ModelTokenizer, body: CallBody) -> list[int]:
    if isinstance(body, ChatBody):
        return tokenizer.encode_chat([m.model_dump(exclude_none=True) for m in body.messages])
    assert isinstance(body.prompt, str)
    return tokenizer.encode_text(body.prompt)


def _num_chars(body: CallBody) -> int:
    if isinstance(body, ChatBody):
        return sum(len(message.content) for message in body.messages)
    return len(body.prompt)


def _check_ids(param: str, token_ids: "tuple[int, ...] | list[int]", card: ModelCard) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        message = f"{param}: token ids must be from 0 to {card.vocab_size - 1}"
        raise invalid_value(param, message)


def _max_tokens(settings: GatewaySettings, card: ModelCard, body: CallBody, num_prompt: int) -> int:
    """The output cap of each choice, clipped to what the context has room for. Raises ApiError
    where there is no room, and where the caller asks for more than is allowed here.
    """
    room = card.context_length - num_prompt
    name, given = _given_max_tokens(body)
    if room < 1:
        raise _over_context(card, body, num_prompt, given or 0)
    if given == 0:
        return 1  # the least that an engine computes; it is not shown
    if given is None:
        default = settings.default_output_tokens
        return min(room, default if isinstance(body, ChatBody) else COMPLETION_TOKENS)
    if given > room:
        if not settings.clip_max_tokens:
            raise _over_context(card, body, num_prompt, given)
        given = room
    if given > settings.max_output_tokens:
        raise invalid_value(name, f"{name} may be at most {settings.max_output_tokens} here")
    return given


def _over_context(card: ModelCard, body: CallBody, num_prompt: int, num_output: int) -> ApiError:
    """In OpenAI's words: clients know the error by them."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    message = (
        f"This model's maximum context length is {card.context_length} tokens. However, you "
        f"requested {num_prompt + num_output} tokens ({num_prompt} in the {param}, {num_output} in "
        f"the completion). Please reduce the length of the {param} or completion."
    )
    return bad_request("context_length_exceeded", message, param)


def _given_max_tokens(body: CallBody) -> tuple[str, int | None]:
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _sampling(card: ModelCard, body: CallBody, max_tokens: int, job_id: str) -> SamplingParams:
    min_tokens = body.min_tokens or 0
    most = 0 if body.max_tokens == 0 else max_tokens
    if min_tokens > most:
        raise invalid_value("min_tokens", f"min_tokens is over max_tokens, {most}")
    stop_token_ids = tuple(body.stop_token_ids or ())
    _check_ids("stop_token_ids", stop_token_ids, card)
    return SamplingParams(
        max_tokens=max_tokens,
        # The engine's seeds have 63 bits.
        seed=default_seed(job_id) if body.seed is None else body.seed % 2**63,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(card, body),
        n=body.n or 1,
        stop=body.stop or (),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )


def _echoes(body: CallBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def _prompt_logprobs(body: CallBody) -> int | None:
    """The most that any part of the answer says: their own list, or the logprobs of an echo."""
    echoed = body.num_logprobs if _echoes(body) else None
    return max((n for n in (body.prompt_logprobs, echoed) if n is not None), default=None)


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(card: ModelCard, body: CallBody) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise _bad_bias("keys of logit_bias must be token ids")
        if int(name) >= card.vocab_size:
            raise _bad_bias(f"token ids of logit_bias must be below {card.vocab_size}")
        biases[int(name)] = float(bias)
    return biases


def _bad_bias(message: str) -> ApiError:
    return invalid_value("logit_bias", message)
