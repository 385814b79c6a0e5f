"""Jobs, their sampling parameters and states, independent of HTTP, Redis and tensors.

All types are frozen, because they are sent between processes.
"""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

import msgspec

from contract.endpoints import Endpoint as Endpoint
from contract.flows import FlowCall

_LOGPROB_BYTES = 18  # in msgpack: head, id below 2^32 and float64
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # of a tenant
MAX_PRIORITY = 2**19 - 1  # above it, with a time it is no score that Redis holds exactly
DEFAULT_LANES = ("interactive", "standard", "batch", "scoring")

# Where a grammar is applied: arguments of llguidance's LLParserLimits. One grammar takes at most
# about 190 MB, and about 40 ms of a step; gateways check grammars with less. Errors must not quote
# the output.
GRAMMAR_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 600_000,
    "step_max_items": 60_000,
    "max_lexer_states": 150_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MAX_GRAMMAR_BYTES = 128 * 1024  # serialised, in a job


class JobStatus(StrEnum):
    """The states of a job; docs/protocol.md contains the table of transitions."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    STREAMING = "streaming"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


TERMINAL_STATUSES = frozenset(
    {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED}
)

# The states in the API.
PUBLIC_STATUSES = {
    "queued": frozenset({JobStatus.QUEUED}),
    "running": frozenset({JobStatus.CLAIMED, JobStatus.STREAMING}),
    **{status.value: frozenset({status}) for status in sorted(TERMINAL_STATUSES)},
}


def public_status(status: JobStatus) -> str:
    """The state in the API: `claimed` and `streaming` are both `running`."""
    return next(name for name, statuses in PUBLIC_STATUSES.items() if status in statuses)


class FinishReason(StrEnum):
    """Why a choice ended, as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # stopped after tool calls; by supervisors, never by engines


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are sampled and when a choice ends, for each prompt of a job.

    `max_tokens`, `min_tokens` and `expected_tokens` count output tokens. `seed` is always set: the
    caller's, or `default_seed(job_id)`. `logprobs` is None (none), 0 (of the sampled token) or the
    number of most likely tokens to report in addition. Decoding checks the bounds of values for
    which a worker allocates memory before its engine checks the others.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    seed: int
    min_tokens: int = 0
    expected_tokens: int = 0  # of a choice, as far as its call tells; 0: it does not
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    allowed_token_ids: tuple[int, ...] = ()  # (): all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that never follow each other in outputs
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens after the first
    grammar: str = ""  # llguidance's serialised form, of every choice; "": unconstrained
    varies_seed: bool = False  # the caller gave no seed: each of several prompts has its own

    @property
    def is_steered(self) -> bool:
        """Whether its caller named what may end a choice, beside the cap."""
        steers = self.stop or self.stop_token_ids or self.grammar or self.allowed_token_ids
        return bool(steers) or any(bias > 0 for bias in self.logit_bias.values())

    def of_prompt(self, number: int) -> "SamplingParams":
        """The parameters of one of several prompts. The caller's seed applies to each prompt;
        without it, each prompt gets another seed, so that equal prompts get different output.
        """
        if number == 0 or not self.varies_seed:
            return self
        return msgspec.structs.replace(self, seed=default_seed(f"{self.seed}/{number}"))


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """A reference to an object in an object store: key, hash and size.

    `store` names the store, so that a reader with another store can report the difference.
    """

    store: str
    key: str
    sha256: str  # hex
    num_bytes: int


class StoredPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A job's prompts in the object store."""

    ref: ObjectRef
    num_tokens: int
    num_prompts: int = 1


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """A job's trace: W3C `traceparent` of its request, and its submission in Unix ns by the
    gateway's clock, for display only."""

    traceparent: str
    submitted_ns: int


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a prefill-only job computes: one vector for each of its prompts, and no tokens.

    The worker applies `dimensions` and `first_parts`; the rest is for the answer.
    """

    dimensions: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0  # of embeddings; 0: all
    # For each prompt, the number of its tokens that belong to the first text of a pair.
    first_parts: tuple[int, ...] = ()
    num_queries: int = 0  # the first prompts are queries, the others documents; 0: pairs, or texts
    is_base64: bool = False  # embeddings are shown in base64
    documents: tuple[str, ...] = ()  # of a rerank that returns them
    top_n: int | None = None


# What an engine did with a job beside its output. prefill: computed a part of its prompt, or again
# what it had lost. The others: gave its place in the memory to running jobs, or to newly admitted.
MarkKind = Literal["prefill", "preempted", "displaced"]

# How a job goes on after its worker has died; it loses and repeats no token. exact: with the tokens
# that it would have had. same-noise: each draw has the same noise, but two scores that differ by
# less than rounding may change places, because a resume recomputes the output by other kernels than
# those that decoded it. distribution: with new noise. From the strongest to the weakest.
ResumeKind = Literal["exact", "same-noise", "distribution"]


def resume_kind(device: str, dtype: str, *, is_batch_invariant: bool = False) -> ResumeKind:
    """What holds for an engine whose noise depends on seed and position alone. `device`: the kind
    of device, cpu or cuda; `dtype`: what it computes in, int8 where weights are quantised;
    `is_batch_invariant`: a row's result does not depend on the rows beside it."""
    is_exact = dtype == "float32" if device == "cpu" else is_batch_invariant
    return "exact" if is_exact else "same-noise"


def weakest_resume(kinds: Iterable[ResumeKind]) -> ResumeKind:
    """What holds for a job that depends on jobs of all these kinds; there is one at least."""
    return max(kinds, key=get_args(ResumeKind).index)


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The immutable part of a job; the job's record in Redis holds the rest.

    Choice j of prompt i has the index i * n + j among all choices of the job.
    """

    id: str
    tenant: str
    model: str
    lane: str
    endpoint: Endpoint
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    created_s: int  # Unix time at the gateway, for the `created` field of responses
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in log probabilities
    echo: bool = False  # the response's text begins with the prompt
    # False: the caller's `max_tokens` was 0; the engine computes one token.
    shows_output: bool = True
    # As requested; `params.prompt_logprobs` may also serve an echo.
    prompt_logprobs: int | None = None
    trace: TraceContext | None = None
    stored_prompt: StoredPrompt | None = None  # then the token ids are empty until fetched
    prompt_list: tuple[tuple[int, ...], ...] = ()  # several prompts; then `prompt_ids` is empty
    # The tenant's weight: tenants share a lane in proportion to their weights.
    weight: Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    resume: ResumeKind = "exact"  # of the model's engine when the job came
    # The functions that a chat may call, each with the names of its parameters that may be strings:
    # the log has the calls apart from the text.
    tools: dict[str, tuple[str, ...]] = {}
    # What else some of these parameters may be, by function and name: types, or values as JSON.
    tool_alternatives: dict[str, dict[str, tuple[str, ...]]] = {}
    num_cut_tokens: int | None = None  # of its prompts; None: nothing was to be cut
    pooling: Pooling | None = None  # of a prefill-only job; then `params` has only defaults
    flow: FlowCall | None = None  # of a flow's job, which calls other models
    parent: str = ""  # the id of the flow's job that called the model
    channel: str = ""  # of its events, with those of other jobs; "": its own
    session: str = ""  # its jobs prefer one worker; "": only its prompt says where
    asked_model: str = ""  # the route that chose `model`; "": the caller chose it
    # Of a chat: files as callers gave them, and the same as objects; a job has one of both.
    image_data: tuple[bytes, ...] = ()
    images: tuple[ObjectRef, ...] = ()
    num_image_tokens: int = 0  # that the engine adds to the prompt, which has a mark for each image
    # Of /v1/responses: the request and its items, for the gateways, which alone decode it; of a
    # chat that its caller stores: what they show of its request, as JSON.
    response: bytes = b""
    stored_response: ObjectRef | None = None  # then `response` is empty until fetched

    @property
    def is_stored_chat(self) -> bool:
        return self.endpoint is Endpoint.CHAT and bool(self.response or self.stored_response)

    @property
    def named_model(self) -> str:
        """The model's name in answers: the one that the caller gave."""
        return self.asked_model or self.model

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each prompt; empty where they must be fetched first."""
        return self.prompt_list or (self.prompt_ids,) * self.num_prompts

    @property
    def needs_tokenizer(self) -> bool:
        """Whether its answers contain texts of tokens, which the log has as ids only."""
        return self.echo or self.params.logprobs is not None or self.prompt_logprobs is not None

    @property
    def has_objects(self) -> bool:
        """Whether parts of it are in the object store."""
        return bool(self.stored_prompt or self.stored_response or self.images)

    @property
    def num_prompts(self) -> int:
        stored = self.stored_prompt
        return len(self.prompt_list) or (stored.num_prompts if stored else 1)

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts."""
        return self.params.n * self.num_prompts

    @property
    def num_places(self) -> int:
        """The slots of a worker that the job fills: one for each choice; one if it is
        prefill-only."""
        return 1 if self.pooling is not None else self.num_choices

    def queue_terms(self) -> dict[str, str | int | float]:
        """What the queue needs to know of it, by the names of submit.lua."""
        num_prompt_tokens, params = self.num_prompt_tokens, self.params
        part = "child" if self.parent else ""
        if self.flow is not None:
            part = "nested" if self.parent else "parent"
        return {
            "prompt_tokens": num_prompt_tokens,
            "choices": self.num_places,
            "expected_tokens": params.expected_tokens * self.num_choices,
            "is_steered": params.is_steered,
            "weight": self.weight,
            "logprob_bytes": logprob_bytes(params.logprobs),
            "prompt_logprob_bytes": num_prompt_tokens * logprob_bytes(params.prompt_logprobs),
            "is_stored": self.has_objects,
            "is_chat": self.is_stored_chat,
            "asked_model": self.asked_model,
            "part": part,
            "channel": self.channel,
        }

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all prompts, with those of images."""
        stored = self.stored_prompt.num_tokens if self.stored_prompt else 0
        return (sum(map(len, self.prompts)) or stored) + self.num_image_tokens


def logprob_bytes(num_top: int | None) -> int:
    """The most that one TokenLogprob takes in a log, with so many of the most likely tokens."""
    return 0 if num_top is None else _LOGPROB_BYTES * (1 + num_top)


def cut_tokens(job: Job) -> dict[str, int]:
    """What `usage` shows of tokens that were cut off its prompts; {} if nothing was to be cut."""
    return {} if job.num_cut_tokens is None else {"truncated_tokens": job.num_cut_tokens}


def default_seed(job_id: str) -> int:
    """Returns the seed of a job whose caller gave none: the same on every attempt (63 bits)."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) >> 1
