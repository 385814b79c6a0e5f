"""What the supervisor and the engine process say to each other.

One frame each way per step: a 4-byte little-endian length, then a msgpack list of messages.
"""

import msgspec

from contract.events import TokenLogprob
from contract.jobs import FinishReason, SamplingParams, TokenizerFiles

# --- supervisor to engine process -------------------------------------------------------------


class StartJob(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Run a job's choices, each going on after the output that is already in its log."""

    job_id: str
    epoch: int
    tenant: str
    lane: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    outputs: tuple[tuple[int, ...], ...]  # logged output ids of each choice
    finished: tuple[bool, ...]  # choices that have already ended


class StopJob(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Drop a job: cancelled, fenced or released. No message comes back."""

    job_id: str
    epoch: int


class StopChoice(msgspec.Struct, frozen=True, array_like=True, tag="stop_choice"):
    """End one choice: its text has met a stop string."""

    job_id: str
    epoch: int
    choice: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine process. So does the end of the stream."""


ToEngine = StartJob | StopJob | StopChoice | Shutdown

# --- engine process to supervisor -------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of loading, one line for the operator."""

    text: str


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served; the process ends after this. `message` is one sentence."""

    message: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine can take work."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    num_blocks: int
    block_size: int
    max_num_seqs: int


class TokenOut(msgspec.Struct, frozen=True, array_like=True, tag="token"):
    """One new output token of one choice, at `position` among its output tokens."""

    job_id: str
    epoch: int
    choice: int
    position: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


class JobFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A job that this engine cannot run; an error of that job alone."""

    job_id: str
    epoch: int
    code: str
    message: str


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The engine's state after a step: what the supervisor decides its next claim by."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_step_tokens: int
    step_s: float


FromEngine = Loading | LoadFailed | Ready | TokenOut | JobFailed | EngineLoad
