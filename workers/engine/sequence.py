"""One choice of a job while the engine runs it, as token ids and counts.

Predicts its next tokens from its own: those that followed when its last three tokens occurred
before (Saxena, "Prompt Lookup Decoding", 2023).
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from contract.jobs import FinishReason, SamplingParams

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
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # chain hashes of its full blocks
    num_keyed: int = 0  # leading blocks known to the prefix cache
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
