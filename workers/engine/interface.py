"""The engine's interface to a model, and its limits. Uses no tensors, so a mock model fits too."""

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from contract.jobs import ResumeKind
from contract.model_cards import GenerationDefaults, PoolingCard, TokenizerFiles
from workers.engine.sequence import Sequence

# The default if neither the operator nor the loader sets a token budget.
DEFAULT_STEP_TOKENS = 2048
_FEW = 1024  # deadlines that are kept in any case


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine. Raises ValueError if no sequence could ever run."""

    max_num_batched_tokens: int  # token budget of a step
    max_num_seqs: int  # sequences that hold blocks at the same time
    vocab_size: int  # token ids at or above it are refused
    kv_high_water: float = 0.8  # share of the blocks up to which new sequences are admitted
    prefill_share: float | None = None  # share of the budget for prompts while there are streams
    max_preemptions: int = 3  # of one sequence; then it yields only to older ones of its kind
    prefix_caching: bool = True  # reuse blocks by content
    speculates: bool = False  # compute drafted tokens where that is expected to pay
    # A prompt yields a vector and no tokens, and is computed in one step.
    prefill_only: bool = False

    def __post_init__(self) -> None:
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.vocab_size) < 1:
            raise ValueError("budget, number of sequences and vocabulary must be positive")
        if not 0.0 < self.kv_high_water <= 1.0:
            raise ValueError("kv_high_water is a share of the KV blocks: over 0, at most 1")
        if self.prefill_share is not None and not 0.0 < self.prefill_share <= 1.0:
            raise ValueError("prefill_share is a share of the budget: over 0, at most 1")
        if self.max_preemptions < 0:
            raise ValueError("max_preemptions must not be negative")


class Deadlines:
    """A queue of job deadlines: times on the engine's clock. A job may have several; the engine
    knows the valid one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int]] = []
        self._most = _FEW

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, even if it is out of date."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_s: float, job_id: str, epoch: int, held: Container[str]) -> None:
        """Adds a deadline. `held`: the jobs that have not ended. Deadlines of others are forgotten
        when they may be half of all; otherwise a day's would be kept."""
        if len(self._heap) >= self._most:
            self._heap = [each for each in self._heap if each[1] in held]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + _FEW
        heappush(self._heap, (deadline_s, job_id, epoch))

    def take_passed(self, now_s: float) -> list[tuple[float, str, int]]:
        """Returns the deadlines up to now, in order, with job and epoch."""
        passed = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heappop(self._heap))
        return passed


if TYPE_CHECKING:  # who only names an error of this module loads no numpy
    from workers.engine.masks import StepMasks


class ModelRefused(Exception):
    """A loader cannot serve this model; the message is one sentence for the operator."""


# Created for each token: a frozen dataclass takes seven times as long. Never part of a cycle, so
# the garbage collector can skip it.
class Chunk(Struct, frozen=True, gc=False):
    """The part of a sequence that one step computes.

    It covers positions `start .. start + num_tokens - 1` of `sequence.token_ids`; their KV is in
    `sequence.block_ids`. `samples`: the chunk reaches the last known token, so the step yields the
    next one. `copy_from`: a block whose KV must first be copied to the block of position `start`
    (copy on write). `drafts`: for a stream whose last `len(drafts)` tokens are drafted, copies of
    it with one, two, … of these; the step draws a token after each.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    copy_from: int | None = None
    drafts: tuple[Sequence, ...] = ()

    @property
    def num_known(self) -> int:
        """The number of its tokens without drafts."""
        return self.num_tokens - len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """All its tokens, shape (num_tokens,)."""
        whole = self.drafts[-1] if self.drafts else self.sequence
        return whole.token_ids[self.start : self.start + self.num_tokens]

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences whose next token the step draws, one for each of its last positions."""
        return (self.sequence, *self.drafts) if self.samples else ()


@dataclass(frozen=True, slots=True)
class Padding:
    """Pad tokens of a padded batch: computed like a chunk, with unused results.

    They are at positions `start .. start + num_tokens - 1`, each attending to all up to itself.
    Their KV goes where no sequence reads.
    """

    start: int
    num_tokens: int


class Sample(Struct, frozen=True, gc=False):
    """The next token of a sequence; log probabilities if its parameters ask for them."""

    token_id: int
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: "PromptLogprobs | None" = None  # of the prompt's part in this chunk


class Drawn(Struct, frozen=True, gc=False):
    """The tokens drawn for a chunk with drafts, one for each of its `sampled`. Each is right if the
    drafted tokens before it are."""

    rows: "tuple[Sample | RowFailed, ...]"


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt's tokens from position `start`, given the tokens before.
    Repeated after a preemption."""

    start: int
    tokens: tuple[Sample, ...]


class Vector(Struct, frozen=True, gc=False):
    """What a prefill-only model computes from a prompt: float32, little-endian."""

    data: bytes


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row that failed, for example with NaN in its logits; its job fails."""

    message: str  # one sentence; never a prompt or an output


Row = Sample | Drawn | PromptLogprobs | Vector | RowFailed | None


class Model(Protocol):
    """A decoder with a paged KV cache of `num_blocks` blocks of `block_size` tokens, or a
    prefill-only model, whose blocks are only counted."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def shares_blocks(self) -> bool:
        """Whether blocks hold KV that any sequence can use, so that prefixes can be shared and
        blocks copied. False for models with a state per sequence, whose blocks are only counted."""

    @property
    def num_state_slots(self) -> int:
        """Slots for states that belong to a sequence beside its blocks (see `SequenceState`), of
        running sequences and of prefixes. 0: the KV in the blocks is all that a sequence has."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: "StepMasks | None" = None
    ) -> Seq[Row]:
        """Writes the chunks' KV and samples where asked; one entry per chunk, in order.

        A chunk that samples yields a Sample, or a Drawn if it has drafts. Any other yields nothing,
        or the PromptLogprobs that its prompt's parameters ask for; a model may postpone those to a
        later chunk. Each chunk of a prefill-only model is a whole prompt and yields a Vector.

        First it copies block `copy_from` of each chunk that names one into that chunk's own block,
        `block_ids[start // block_size]`, in all layers. All copies read before anything is written,
        because a copied block may be written to in the same step.

        Before that it copies the state `source` of each sequence that starts from one to its own
        slot. A chunk from position 0 starts without a state.

        Drafted tokens are computed like others. Only engines whose limits say `speculates` draft,
        and only for models that share blocks and keep no states beside them.

        Padding is computed in the same pass and changes nothing that a sequence reads.

        Each sequence has at most one chunk. The sample of a chunk depends on its own sequence alone
        (up to rounding), and its noise on (seed, choice, number of output tokens so far, token id)
        alone. While `sequence.num_output < params.min_tokens` the sampler bans
        `sequence.ending_ids`.

        `masks` tells which tokens a constrained row may not take, before bias, temperature and
        noise; it is ready after the forward.

        A RowFailed in a row's place costs that row's job; an exception means that the device or the
        KV can no longer be trusted, and ends the process.
        """


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a loader returns: the model, and what gateways need to know about it."""

    model: Any  # a Model
    context_length: int  # prompt + output, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    num_step_tokens: int = DEFAULT_STEP_TOKENS  # token budget of a step for this device
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    pooling: PoolingCard | None = None  # of a prefill-only model
    tokens_per_s: float = 0.0  # of a full step of a prefill-only model; 0: not measured
    resume: ResumeKind = "same-noise"  # how its jobs go on after their worker's death
    device: str = ""  # its name
    gpu_uuids: tuple[str, ...] = ()  # of the GPUs that compute, as nvidia-smi names them
