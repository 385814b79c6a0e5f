"""Jobs, their sampling parameters and states, independent of HTTP, Redis and tensors.

All types are frozen, because they are sent between processes.
"""

import hashlib
import secrets
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # of a tenant
DEFAULT_LANES = ("interactive", "standard", "batch", "scoring")

# The same where a grammar is checked and where it is applied: arguments of llguidance's
# LLParserLimits. One grammar takes at most about 40 MB, and about 15 ms of a step. Errors must not
# quote the output.
GRAMMAR_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,
    "step_max_items": 30_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MAX_GRAMMAR_BYTES = 128 * 1024  # serialised, in a job


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

# The states in the API.
PUBLIC_STATUSES = {
    "queued": frozenset({JobStatus.QUEUED}),
    "running": frozenset({JobStatus.CLAIMED, JobStatus.STREAMING}),
    **{status.value: frozenset({status}) for status in sorted(TERMINAL_STATUSES)},
}


def public_status(status: JobStatus) -> str:
    """The state in the API: `claimed` and `streaming` are both `running`."""
    return next(name for name, statuses in PUBLIC_STATUSES.items() if status in statuses)


class Endpoint(StrEnum):
    """The HTTP endpoint that defines the format of the job's response."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


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
    expected_tokens: int = 0  # the caller's guess of a choice's length; 0: none
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
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens after the first
    grammar: str = ""  # llguidance's serialised form, of every choice; "": unconstrained
    varies_seed: bool = False  # the caller gave no seed: each of several prompts has its own

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


# How a job goes on after its worker has died: with the tokens that it would have had, or with
# others of the same distribution. Greedy jobs without penalties have the same tokens either way.
ResumeKind = Literal["exact", "distribution"]


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
    echo: bool = False  # the response's text begins with the prompt
    shows_output: bool = (
        True  # False: the caller's `max_tokens` was 0; the engine computes one token
    )
    prompt_logprobs: int | None = (
        None  # as requested; `params.prompt_logprobs` may also serve an echo
    )
    trace: TraceContext | None = None
    stored_prompt: StoredPrompt | None = None  # then the token ids are empty until fetched
    prompt_list: tuple[tuple[int, ...], ...] = ()  # several prompts; then `prompt_ids` is empty
    # The tenant's weight: tenants share a lane in proportion to their weights.
    weight: Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    resume: ResumeKind = "exact"  # of the model's engine when the job came
    parses_tools: bool = False  # the log has the output's tool calls apart from its text

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each prompt; empty where they must be fetched first."""
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
    """What a gateway needs to validate, render and tokenise requests for a model. Decoding checks
    the bounds, because gateways do not trust workers.
    """

    name: _Name
    context_length: _Count  # prompt + output, in tokens
    vocab_size: _Count
    eos_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_EOS_TOKENS)]
    tokenizer_sha256: Annotated[
        str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")
    ]  # see encode_tokenizer
    created_s: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    # The lanes that its workers serve, most urgent first.
    lanes: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=64)] = DEFAULT_LANES
    capabilities: Capabilities = Capabilities()


MAX_LITERAL_CHARS = 256
_Literal = Annotated[str, msgspec.Meta(max_length=MAX_LITERAL_CHARS)]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The literal text around the names and arguments (JSON objects) of tool calls:
    `begin name middle arguments (between name middle arguments)* end`."""

    begin: _Literal
    middle: _Literal
    between: _Literal | None  # None: the model writes one call only
    end: _Literal


MAX_TOKENIZER_BYTES = 32 * 2**20  # of TokenizerFiles in msgpack, plain and compressed


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tokenizer in the format of `tokenizers`, and its chat template."""

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str] = {}  # bos_token, eos_token …: variables of the template
    # How tool calls and reasoning are found in an output: transformers' format, as JSON.
    response_template: str | None = None
    tool_format: ToolFormat | None = None  # None: no grammar can force a call


def new_job_id(partition: int = 0) -> str:
    """A job id: the number of the job's partition and 128 random bits."""
    return f"job-{partition}-{secrets.token_hex(16)}"


def default_seed(job_id: str) -> int:
    """The seed of a job without one of its caller: the same on every attempt (63 bits)."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) >> 1
