"""Sampling parameters of a validated body: the caller's, else the model's, else OpenAI's."""

from contract.jobs import SamplingParams, default_seed
from contract.model_cards import ModelCard
from gateway.http.errors import ApiError, invalid_value
from gateway.prepare.admission import check_ids
from gateway.prepare.schemas import CompletionBody, GenerationBody


def sampling_params(
    card: ModelCard, body: GenerationBody, caps: list[int], job_id: str
) -> SamplingParams:
    """Returns the parameters for all prompts. Their maxima differ because the engine also ends each
    choice at the end of the context."""
    min_tokens = body.min_tokens or 0
    most = 0 if body.max_tokens == 0 else min(caps)
    if min_tokens > most:
        raise invalid_value("min_tokens", f"min_tokens is over max_tokens, {most}")
    own = card.generation
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_ids("stop_token_ids", stop_token_ids, card)
    return SamplingParams(
        max_tokens=max(caps),
        # The engine's seeds have 63 bits.
        seed=default_seed(job_id) if body.seed is None else body.seed % 2**63,
        varies_seed=body.seed is None and len(caps) > 1,
        min_tokens=min_tokens,
        expected_tokens=_expected_tokens(body, max(caps)),
        temperature=_first(body.temperature, own.temperature, 1.0),
        top_k=max(0, int(_first(body.top_k, own.top_k, 0))),
        top_p=_first(body.top_p, own.top_p, 1.0),
        min_p=_first(body.min_p, own.min_p, 0.0),
        presence_penalty=_first(body.presence_penalty, own.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, own.frequency_penalty, 0.0),
        repetition_penalty=_first(body.repetition_penalty, own.repetition_penalty, 1.0),
        logit_bias=_logit_bias(card, body),
        n=body.n or 1,
        stop=body.stop or (),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=num_prompt_logprobs(body),
    )


def echoes(body: GenerationBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def num_prompt_logprobs(body: GenerationBody) -> int | None:
    """The larger of two numbers: for `prompt_logprobs`, and for the log probabilities of
    an echo."""
    echoed = body.num_logprobs if echoes(body) else None
    return max((n for n in (body.prompt_logprobs, echoed) if n is not None), default=None)


def _expected_tokens(body: GenerationBody, most: int) -> int:
    """The length of a choice as stated by its body; 0 if it is not stated."""
    if body.ignore_eos and not body.stop and not body.stop_token_ids:
        return most  # nothing ends it before
    expected = body.expected_output_tokens
    return min(max(expected, body.min_tokens or 0), most) if expected else 0


def _first(*values: float | None) -> float:
    return next(float(value) for value in values if value is not None)


def _logit_bias(card: ModelCard, body: GenerationBody) -> dict[int, float]:
    """Returns the model's suppressed tokens and the caller's biases, which take precedence."""
    biases = dict.fromkeys(card.generation.suppress_tokens, -100.0)
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise _bad_bias("keys of logit_bias must be token ids")
        if int(name) >= card.vocab_size:
            raise _bad_bias(f"token ids of logit_bias must be below {card.vocab_size}")
        biases[int(name)] = float(bias)
    return biases


def _bad_bias(message: str) -> ApiError:
    return invalid_value("logit_bias", message)
