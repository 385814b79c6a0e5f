"""The events of a job's log, which a worker appends.

Event k of a job is the entry `k-0` of its log. Only the last event is an `End`.
"""

import msgspec

from contract.errors import ErrorCode
from contract.jobs import FinishReason, JobStatus


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one token, and those of the most likely tokens where requested."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """More of one tool call: its name in the first delta, then parts of its arguments (JSON)."""

    index: int  # among the choice's calls
    name: str
    arguments: str


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one choice: the tokens from position `start` on, and new text.

    Text lags behind tokens while a character or a possible stop string is incomplete. In chats,
    `text` excludes reasoning and tool calls.
    """

    choice: int
    start: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    vector: bytes = b""  # of a prefill-only job's prompt: float32, little-endian
    num_reasoning: int = 0  # of the tokens, those of the reasoning with its marks
    stop: str = ""  # the stop string that ended the choice


class Prompt(msgspec.Struct, frozen=True, array_like=True, tag="prompt", gc=False):
    """Log probabilities of a prompt's tokens from position `start` on, where requested.

    The first event starts at 1, each later one where the previous ended. All precede the output of
    the prompt's choices.
    """

    start: int
    logprobs: tuple[TokenLogprob, ...]
    prompt: int = 0  # which of the job's prompts


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens", gc=False):
    """New output of one or more choices."""

    deltas: tuple[ChoiceDelta, ...]
    num_cached: int = 0  # tokens found in the cache, of the prompts whose first output this is


class MemberRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call of a model by a flow, logged when it begins and when it has ended."""

    model: str
    job_id: str
    status: JobStatus | None = None  # None: it has begun
    prompt_tokens: int = 0
    output_tokens: int = 0
    code: str = ""  # of an ErrorCode, where it failed
    name: str = ""  # of a pipeline's step
    cached_tokens: int = 0  # of the prompt, found in the cache


class Members(msgspec.Struct, frozen=True, array_like=True, tag="members", gc=False):
    """The calls of a flow that have begun or ended since the last such event."""

    runs: tuple[MemberRun, ...]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end", gc=False):
    """The one terminal event. `code` and `message` are empty unless the job failed."""

    status: JobStatus
    code: str
    message: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the cache

    @property
    def error(self) -> tuple[str, str] | None:
        """The code and the message that callers get; None if the job succeeded."""
        match self.status:
            case JobStatus.SUCCEEDED:
                return None
            case JobStatus.EXPIRED:
                return "deadline_exceeded", "the job did not end before its deadline"
            case JobStatus.CANCELLED:
                return "cancelled", "the job was cancelled"
        code = self.code if self.code in set(ErrorCode) else ErrorCode.ENGINE_ERROR
        return code, self.message or "the job failed"


LogEvent = Prompt | Tokens | Members | End


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    """An event with its number in the log and the rolling hash of the log up to it."""

    number: int
    hash: str
    event: LogEvent

    @property
    def sse_id(self) -> str:
        """The event's id for clients, which they return in `Last-Event-ID`."""
        return f"{self.number}.{self.hash}"
