"""What one step yielded, what it cost, and the engine's state after it."""

from dataclasses import dataclass, field

from msgspec import Struct

from contract.jobs import FinishReason
from workers.engine.model import PromptLogprobs
from workers.engine.request import ErrorCode
from workers.engine.sequence import Sequence


class Output(Struct, frozen=True, gc=False):
    """A new token of a sequence, at `position` among its output tokens.

    The token that ends a sequence is reported too; `finish_reason` says that it does.
    """

    sequence: Sequence
    position: int
    token_id: int
    finish_reason: FinishReason | None
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class JobError:
    """A job that failed while it ran or waited; all its choices are dropped."""

    job_id: str
    epoch: int
    code: ErrorCode
    message: str


@dataclass(slots=True)
class StepReport:
    """Counts of sequences, blocks and tokens; seconds of the engine's clock."""

    outputs: list[Output] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)  # complete when they came: no new token
    failed: list[JobError] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    waiting_lanes: tuple[str, ...] = ()  # by name
    num_free_blocks: int = 0
    num_step_tokens: int = 0  # of sequences
    num_preemptions: int = 0
    num_step_seqs: int = 0  # the batch size
    num_decode_tokens: int = 0  # of the step's: one for each stream; the others are prefill
    num_padding_tokens: int = 0  # computed beside them, for no one
    num_recomputed_tokens: int = 0  # of the step's: lost by a preemption before
    num_prefix_queries: int = 0  # tokens of the sequences that were let in
    num_prefix_hits: int = 0  # of them, found computed
    step_s: float = 0.0  # of the model alone
    num_finished: int = 0  # sequences that ended by a token of this step …
    queue_s: float = 0.0  # … how long they waited to be let in first, all together
    run_s: float = 0.0  # … and from then to their end
