"""What a caller asks for: a job, its sampling parameters, its states.

Knows nothing of HTTP, of Redis or of tensors. Everything here travels, so it is frozen.
"""

import hashlib
import secrets
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # of a tenant
DEFAULT_LANES = ("interactive", "standard", "batch", "scoring")


class JobStatus(StrEnum):
    """The states of a job; docs/protocol.md holds the table of transitions."""

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

# The states as callers name them.
PUBLIC_STATUSES = {
    "queued": frozenset({JobStatus.QUEUED}),
    "running": frozenset({JobStatus.CLAIMED, JobStatus.STREAMING}),
    **{status.value: frozenset({status}) for status in sorted(TERMINAL_STATUSES)},
}


def public_status(status: JobStatus) -> str:
    """The state as callers name it: `claimed` and `streaming` are both `running`."""
    return next(name for name, statuses in PUBLIC_STATUSES.items() if status in statuses)


class Endpoint(StrEnum):
    """The HTTP endpoint whose shapes the job's answer takes."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a choice ends.

    `max_tokens` and `min_tokens` count output tokens. `seed` is always set: the caller's, or
    `default_seed(job_id)`. `logprobs` is None (none), 0 (of the chosen token) or the number of
    most likely tokens reported beside it. Of a job with several prompts they hold for each prompt.
    Bounds are checked where a record is read: those of what a worker makes memory for before its
    engine checks the rest.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    seed: int
    min_tokens: int = 0
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
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens but the first
    varies_seed: bool = False  # the caller gave no seed: each of several prompts has its own

    def of_prompt(self, number: int) -> "SamplingParams":
        """Those of one prompt of several. With the caller's seed they are what the prompt has
        alone; without one, equal prompts must not all get the same answer.
        """
        if number == 0 or not self.varies_seed:
            return self
        return msgspec.structs.replace(self, seed=default_seed(f"{self.seed}/{number}"))


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """Where something too large for Redis lies: a key of an object store, and what it must hold.

    `store` names the store, so that a reader of another one says so instead of missing the object.
    """

    store: str
    key: str
    sha256: str  # hex
    num_bytes: int


class StoredPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt, or all prompts of a job, in the object store."""

    ref: ObjectRef
    num_tokens: int
    num_prompts: int = 1


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """Where a job stands in a trace: W3C `traceparent` of its request, and when it was submitted
    (Unix time, ns, of the gateway: for the picture of a trace alone)."""

    traceparent: str
    submitted_ns: int


# How a job goes on after its worker has died: with the tokens that it would have had, or with
# others of the same distribution. Greedy jobs without penalties have the same tokens either way.
ResumeKind = Literal["exact", "distribution"]


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is immutable of a job; what changes lies beside it in the job's record.

    Choice j of prompt i has the index i * n + j among all choices of the job.
    """

    id: str
    tenant: str
    model: str
    lane: str
    endpoint: Endpoint
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    created_s: int  # Unix time at the gateway, for the `created` field of answers only
    return_token_ids: bool = False
    echo: bool = False  # the answer's text begins with the prompt's
    shows_output: bool = True  # False: `max_tokens` was 0, for which the engine computes one token
    prompt_logprobs: int | None = None  # as asked for; that of `params` also serves an echo
    trace: TraceContext | None = None
    stored_prompt: StoredPrompt | None = None  # then there are no token ids until it is fetched
    prompt_list: tuple[tuple[int, ...], ...] = ()  # several prompts; then `prompt_ids` is empty
    # Of its tenant: what that gets of a lane is to what others get as their weights are.
    weight: Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    resume: ResumeKind = "exact"  # of the model's engine when the job came

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each; they are empty where they must be fetched first."""
        return self.prompt_list or (self.prompt_ids,) * self.num_prompts

    @property
    def num_prompts(self) -> int:
        stored = self.stored_prompt
        return len(self.prompt_list) or (stored.num_prompts if stored else 1)

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return self.params.n * self.num_prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts)) or (
            self.stored_prompt.num_tokens if self.stored_prompt else 0
        )


MAX_EOS_TOKENS = 1024

_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^\S+\Z")]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine of a model's workers can do. Gateways refuse the rest by name."""

    prompt_logprobs: bool = True
    structured_output: bool = False
    tools: bool = False
    lora: bool = False
    embeddings: bool = False
    resume: ResumeKind = "exact"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know of a model to validate, render and tokenise for it. The bounds are
    checked where a card is read: a worker may have written anything.
    """

    name: _Name
    context_length: _Count  # prompt + output, in tokens
    vocab_size: _Count
    eos_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_EOS_TOKENS)]
    tokenizer_sha256: Annotated[
        str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")
    ]  # see encode_tokenizer
    created_s: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    # That its workers serve, most urgent first.
    lanes: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=64)] = DEFAULT_LANES
    capabilities: Capabilities = Capabilities()


MAX_TOKENIZER_BYTES = 32 * 2**20  # of TokenizerFiles as msgpack, and of that compressed


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tokenizer as `tokenizers` reads it, and its chat template where it has one."""

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str] = {}  # bos_token, eos_token …: what the template may name


def new_job_id(partition: int = 0) -> str:
    """A job id: 128 random bits behind the number of the partition that holds the job."""
    return f"job-{partition}-{secrets.token_hex(16)}"


def default_seed(job_id: str) -> int:
    """The seed of a job whose caller gave none: the same on every attempt (63 bits)."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) >> 1
