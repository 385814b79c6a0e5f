"""Checks a job for this engine, and makes a sequence of each of its choices: token ids and counts.

A sequence predicts its next tokens from its own: those that followed when its last three tokens
occurred before (Saxena, "Prompt Lookup Decoding", 2023).
"""

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from contract.errors import ErrorCode
from contract.jobs import FinishReason, Pooling, SamplingParams
from workers.ipc.messages import Request

if TYPE_CHECKING:  # who only counts sequences loads no numpy
    from workers.engine.grammar import Matcher

_NUM_MATCHED = 3
_REMEMBERED = 0.9  # of an earlier answer's weight: it is the last ten that count


class PromptLookup:
    """One sequence's tokens by the three before them, and how often these predicted the next."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # by hash: a collision costs a wrong draft
        self._num_read = _NUM_MATCHED
        self._num_right = 0.0
        self._num_tried = 1.0  # so that the first draft waits for an answer

    @property
    def chance(self) -> float:
        """The share of its last output tokens that drafts predicted, or would have predicted."""
        return self._num_right / self._num_tried

    def read(self, token_ids: Seq[int], num_prompt: int) -> None:
        """Reads the tokens since the last call, of which the first `num_prompt` are the prompt."""
        for position in range(self._num_read, len(token_ids)):
            key = hash(tuple(token_ids[position - _NUM_MATCHED : position]))
            found = self._next.get(key)
            if found is not None and position >= num_prompt:
                is_right = token_ids[found] == token_ids[position]
                self._num_right = _REMEMBERED * self._num_right + is_right
                self._num_tried = _REMEMBERED * self._num_tried + 1.0
            self._next[key] = position
        self._num_read = max(self._num_read, len(token_ids))

    def draft(self, token_ids: Seq[int], most: int, ending_ids: Collection[int]) -> list[int]:
        """Up to `most` tokens that may come next, none of which is in `ending_ids`."""
        found = self._next.get(hash(tuple(token_ids[-_NUM_MATCHED:])))
        drafted: list[int] = []
        if found is None:
            return drafted
        for position in range(found, found + most):
            # Behind the known tokens the draft repeats itself.
            behind = position - len(token_ids)
            token_id = token_ids[position] if behind < 0 else drafted[behind]
            if token_id in ending_ids:
                break
            drafted.append(token_id)
        return drafted


Account = tuple[str, str]  # lane and tenant


@dataclass(slots=True)
class SequenceState:
    """The slot of a running sequence. A chunk that starts behind `source_end` tokens starts from
    the state in slot `source`; `saves`: at which ends of its next chunk's parts, in tokens, the
    state is copied to which slot."""

    slot: int
    source: int | None = None
    source_end: int = 0
    saves: tuple[tuple[int, int], ...] = ()
    branch_end: int = 0  # where KV of its prefix was cached without the state
    answer_key: bytes = b""  # of the state kept last while it generates


# Weakly referable, so that a model can keep state for a sequence without a leak.
@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Prompt, output, and how much of both is in the KV cache.

    `token_ids` is authoritative; KV is valid below `num_computed` only, so every rollback
    (preemption, resume) just changes that counter.
    """

    job_id: str
    epoch: int
    choice: int  # its index among the choices of all prompts of the job
    tenant: str
    lane: str
    token_ids: list[int]  # prompt, then output
    num_prompt: int
    params: SamplingParams
    ending_ids: frozenset[int] = frozenset()  # eos (unless ignored) and stop tokens
    arrival: int = 0  # order of arrival in this engine; kept across preemptions
    deadline_s: float | None = None  # on the engine's clock
    weight: float = 1.0  # of its tenant
    num_first_part: int = 0  # tokens of the first text of a pair; 0: one text
    num_dimensions: int = 0  # of its vector; 0: all
    images: tuple[bytes, ...] = ()
    num_image_tokens: int = 0  # that they add to the prompt, at most, and exactly once it has begun
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # chain hashes of its full blocks
    num_keyed: int = 0  # leading blocks known to the prefix cache
    state: SequenceState | None = None  # while it runs on a model with states beside blocks
    num_once_computed: int = 0  # most tokens ever computed; below it, work is recomputation
    num_preemptions: int = 0
    max_output: int = 0  # output tokens that parameters and context allow
    num_foreseen: int = 0  # predicted total tokens; renewed when reached
    finish_reason: FinishReason | None = None
    matcher: "Matcher | None" = None  # of a constrained choice; has consumed its output
    lookup: PromptLookup | None = None  # from its first look at a draft on

    def __post_init__(self) -> None:
        self.max_output = self.max_output or self.params.max_tokens

    @property
    def account(self) -> Account:
        return self.lane, self.tenant

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not yet computed: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def prompt_number(self) -> int:
        """The number of the prompt that it continues, among its job's."""
        return self.choice // self.params.n

    @property
    def choice_of_prompt(self) -> int:
        """Its index among its prompt's choices; seeds its noise."""
        return self.choice % self.params.n

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt must be computed for log probabilities, not taken from the cache. Only
        a prompt's first choice reports them, before its first output."""
        asks = self.params.prompt_logprobs is not None
        return asks and self.num_output == 0 and self.choice_of_prompt == 0

    @property
    def is_held(self) -> bool:
        """Whether it lacks the mask that a step was too early for."""
        return self.matcher is not None and self.matcher.is_masking

    def with_draft(self, token_ids: Seq[int]) -> "Sequence":
        """Returns a copy with these tokens added, in the same blocks."""
        return replace(self, token_ids=[*self.token_ids, *token_ids])

    def end_reason(self, max_model_len: int) -> FinishReason | None:
        """Why nothing follows the last known token, or None."""
        token_ids, params = self.token_ids, self.params
        num_output = len(token_ids) - self.num_prompt
        if num_output > params.min_tokens and token_ids[-1] in self.ending_ids:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.is_complete:
            return FinishReason.STOP
        if num_output >= params.max_tokens or len(token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None


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
            images=request.images,
            num_image_tokens=request.num_image_tokens,
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
    listed = tuple(params.logit_bias), params.allowed_token_ids, *params.bad_words
    for token_ids in (*request.prompts, *request.outputs, *listed):
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
        "a bad word must have tokens": all(params.bad_words),
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
