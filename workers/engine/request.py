"""Whether a job can run on this engine, and its sequences. A refusal affects that job only."""

import math

from contract.errors import ErrorCode
from contract.jobs import Pooling, SamplingParams
from workers.engine.sequence import Sequence
from workers.ipc.messages import Request


class RequestRefused(Exception):
    """This job can never run on this engine. The message is one sentence without its content."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def sequences_of(
    request: Request, eos_token_ids: frozenset[int], first_arrival: int
) -> list[Sequence]:
    """One sequence per choice that has not ended, in order of the choices."""
    ending_ids = ending_token_ids(request.params, eos_token_ids)
    params = [request.params.of_prompt(number) for number in range(len(request.prompts))]
    pooling = request.pooling or Pooling()
    first_parts = pooling.first_parts or (0,) * len(request.prompts)
    return [
        Sequence(
            job_id=request.job_id,
            epoch=request.epoch,
            choice=choice,
            tenant=request.tenant,
            lane=request.lane,
            token_ids=[*request.prompts[choice // request.params.n], *output_ids],
            num_prompt=len(request.prompts[choice // request.params.n]),
            params=params[choice // request.params.n],
            ending_ids=ending_ids,
            arrival=first_arrival + choice,
            deadline_s=request.deadline_s,
            weight=request.weight,
            num_first_part=first_parts[choice // request.params.n],
            num_dimensions=pooling.dimensions,
        )
        for choice, output_ids in enumerate(request.outputs)
        if not request.finished[choice]
    ]


def ending_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end a choice after `min_tokens`; `ignore_eos` does not affect stop tokens."""
    stop_ids = frozenset(params.stop_token_ids)
    return stop_ids if params.ignore_eos else stop_ids | eos_token_ids


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_model_len: int,
    num_kv_tokens: int,
    prefill_only: bool = False,
) -> None:
    """Raises RequestRefused for a job that can never run, or would harm others by running.

    `num_kv_tokens` is what all KV blocks hold: each sequence must fit alone, however far it
    goes, or it could be preempted for ever.
    """
    if request.pooling is None and prefill_only:
        raise _bad("this model computes vectors and generates no text")
    if request.pooling is not None and not prefill_only:
        raise _bad("this model generates text and computes no vectors")
    if request.pooling is not None:
        _check_prompts(request, request.pooling, max_model_len)
    else:
        _check_lengths(request, max_model_len, num_kv_tokens)
    _check_params(request.params, vocab_size)
    params = request.params
    num_choices = params.n * len(request.prompts)
    if not len(request.outputs) == len(request.finished) == num_choices:
        raise _bad("the job must bring one output and one end mark per choice")
    # An id outside the vocabulary reads out of bounds on the device and affects all jobs.
    for token_ids in (*request.prompts, *request.outputs, tuple(params.logit_bias)):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise _bad(f"token ids must lie below the vocabulary size, {vocab_size}")


def _max_num_known(request: Request, max_model_len: int) -> int:
    """The most tokens, prompt and output, that one of its sequences can reach."""
    num_output = max(map(len, request.outputs), default=0)
    num_prompt = max(map(len, request.prompts))
    return min(num_prompt + max(request.params.max_tokens, num_output), max_model_len)


def _check_prompts(request: Request, pooling: Pooling, max_model_len: int) -> None:
    """Checks the prompts of a prefill-only job; an error names the prompt's index."""
    if not request.prompts:
        raise _bad("the job has no prompt")
    for index, prompt_ids in enumerate(request.prompts):
        if not prompt_ids:
            raise _bad(f"prompt {index} has no tokens")
        if len(prompt_ids) > max_model_len:
            raise RequestRefused(
                ErrorCode.PROMPT_TOO_LONG,
                f"prompt {index} has {len(prompt_ids)} tokens; the model takes {max_model_len}",
            )
    if not pooling.first_parts:
        return
    if len(pooling.first_parts) != len(request.prompts):
        raise _bad("first_parts must have one number for each prompt")
    for index, num_first in enumerate(pooling.first_parts):
        if not 0 <= num_first <= len(request.prompts[index]):
            raise _bad(f"first_parts {index} is not within its prompt")


def _check_lengths(request: Request, max_model_len: int, num_kv_tokens: int) -> None:
    if not all(request.prompts):
        raise _bad("the prompt has no tokens")
    num_prompt = max(map(len, request.prompts), default=0)
    if num_prompt == 0:
        raise _bad("the job has no prompt")
    if num_prompt >= max_model_len:
        raise RequestRefused(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {num_prompt} tokens; the context of {max_model_len} leaves no output",
        )
    num_known = _max_num_known(request, max_model_len)
    # The last token ends the sequence, so its KV is never computed.
    if num_known - 1 > num_kv_tokens:
        raise RequestRefused(
            ErrorCode.PROMPT_TOO_LONG,
            f"prompt and max_tokens reach {num_known} tokens; the KV cache holds {num_kv_tokens}",
        )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    """Checks what the sampler relies on; the gateway's schemas are stricter."""
    numbers = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        *params.logit_bias.values(),
    )
    rules = {
        "sampling parameters must be finite": all(map(math.isfinite, numbers)),
        "n must be positive": params.n >= 1,
        "max_tokens must not be negative": params.max_tokens >= 0,
        "min_tokens must not be negative": params.min_tokens >= 0,
        "seed must have at most 63 bits": 0 <= params.seed < 2**63,
        "temperature must not be negative": params.temperature >= 0,
        "top_k must not be negative": params.top_k >= 0,
        "top_p must be over 0, at most 1": 0 < params.top_p <= 1,
        "min_p must be from 0 to 1": 0 <= params.min_p <= 1,
        "min_tokens and ignore_eos cannot be combined with a grammar": not (
            params.grammar and (params.min_tokens or params.ignore_eos)
        ),
        "repetition_penalty must be positive": params.repetition_penalty > 0,
        f"logprobs must be from 0 to {vocab_size}": 0 <= (params.logprobs or 0) <= vocab_size,
        f"prompt_logprobs must be from 0 to {vocab_size}": (
            0 <= (params.prompt_logprobs or 0) <= vocab_size
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise _bad(rule)


def _bad(message: str) -> RequestRefused:
    return RequestRefused(ErrorCode.BAD_PARAMETER, message)
