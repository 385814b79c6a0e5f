"""A job as the engine gets it, and the tokens that it gives back."""

import msgspec

from contract.events import TokenLogprob
from contract.jobs import FinishReason, Pooling, SamplingParams


class Request(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """A job's choices, each continuing after its logged output. The supervisor sends it."""

    job_id: str
    epoch: int
    tenant: str
    lane: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    outputs: tuple[tuple[int, ...], ...]  # logged output ids of each choice, `n` for each prompt
    finished: tuple[bool, ...]  # choices that have already ended
    # The job ends then, wherever it is: seconds from now in a message, because processes share no
    # clock, and on the engine's clock in the engine.
    deadline_s: float | None = None
    weight: float = 1.0  # of its tenant: the share of places and tokens in its lane
    pooling: Pooling | None = None  # of a prefill-only job


class TokenOut(msgspec.Struct, frozen=True, array_like=True, tag="token", gc=False):
    """One new output token of one choice, at `position` among its output tokens. The final token is
    included; it has a `finish_reason`."""

    job_id: str
    epoch: int
    choice: int
    position: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
