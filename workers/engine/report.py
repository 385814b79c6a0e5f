"""The results and costs of one step, and the engine's state after it."""

from dataclasses import dataclass, field

from contract.errors import ErrorCode
from contract.events import TokenLogprob
from contract.jobs import FinishReason
from workers.engine.interface import PromptLogprobs
from workers.engine.sequence import Sequence
from workers.ipc.messages import TokenOut


def token_out(
    sequence: Sequence,
    position: int,
    token_id: int,
    finish_reason: FinishReason | None,
    logprob: float = 0.0,
    top_logprobs: tuple[tuple[int, float], ...] = (),
) -> TokenOut:
    """A new token of a sequence, with its log probabilities if its parameters ask for them."""
    scored = sequence.params.logprobs is not None
    return TokenOut(
        sequence.job_id,
        sequence.epoch,
        sequence.choice,
        position,
        token_id,
        finish_reason,
        TokenLogprob(token_id, logprob, top_logprobs) if scored else None,
    )


@dataclass(frozen=True, slots=True)
class JobError:
    """A job that failed; all its choices are dropped."""

    job_id: str
    epoch: int
    code: ErrorCode
    message: str


@dataclass(slots=True)
class StepReport:
    """Counts of sequences, blocks and tokens; seconds of the engine's clock."""

    outputs: list[TokenOut] = field(default_factory=list)
    # Complete without an ending token: on arrival, or because a grammar allows no more.
    ended: list[Sequence] = field(default_factory=list)
    failed: list[JobError] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] = field(default_factory=list)
    vectors: list[tuple[Sequence, bytes]] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    waiting_lanes: tuple[str, ...] = ()  # by name
    num_free_blocks: int = 0
    num_step_tokens: int = 0  # without padding
    num_preemptions: int = 0
    num_step_seqs: int = 0  # batch size
    num_decode_tokens: int = 0  # one per stream, and drafted ones; the others are prefill
    num_padding_tokens: int = 0  # pad tokens beside the step's
    num_recomputed_tokens: int = 0  # part of the step's, lost by an earlier preemption
    num_prefix_queries: int = 0  # tokens of admitted sequences
    num_prefix_hits: int = 0  # part of them found in the cache
    num_forced_tokens: int = 0  # output that grammars forced, without a sample
    num_drafted_tokens: int = 0  # part of the step's, computed before they were known
    num_accepted_tokens: int = 0  # part of them that were right
    step_s: float = 0.0  # of the model alone
    num_finished: int = 0  # sequences that ended in this step …
    queue_s: float = 0.0  # … their total wait for admission …
    run_s: float = 0.0  # … and total time from admission to end
