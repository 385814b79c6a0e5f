"""One job that this worker holds: its choices' text, and what of it is not yet in the log.

Knows nothing of Redis or of the engine: tokens go in, log events come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from contract.calls import Claimed
from contract.events import ChoiceDelta, LogEntry, Prompt, TokenLogprob, Tokens
from contract.jobs import FinishReason, ObjectRef
from workers.messages import ChoiceEnded, PromptLogprobs, StartJob, TokenOut
from workers.text import ChoiceText


@dataclass(slots=True)
class _Choice:
    """Output of one choice since the last event, behind what is already logged."""

    text: ChoiceText
    token_ids: list[int]  # all output
    finish_reason: FinishReason | None = None
    num_logged: int = 0
    new_text: str = ""
    new_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_news: bool = False

    def push(self, token_id: int, finish_reason: FinishReason | None) -> str:
        """Adds a token; returns the text it releases. A token that ends a choice is not shown."""
        self.token_ids.append(token_id)
        if finish_reason is FinishReason.STOP:
            return self.end(finish_reason)
        text = self.text.push(token_id)
        if self.text.is_stopped:
            self.finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self.end(finish_reason)
        return text

    def end(self, finish_reason: FinishReason) -> str:
        self.finish_reason = finish_reason
        return self.text.flush()


@dataclass(slots=True)
class _Scores:
    """Log probabilities of one prompt: how far they are logged, and those behind that."""

    num_missing: int  # of those that were asked for
    num_logged: int = 0
    new: list[TokenLogprob] = field(default_factory=list)

    def take(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """What an engine says again, after a preemption or a resume, is known already."""
        next_position = 1 + self.num_logged + len(self.new)
        assert start <= next_position, "the engine skipped a position"
        unknown = logprobs[next_position - start :]
        self.new += unknown
        self.num_missing -= len(unknown)

    def replay(self, event: Prompt) -> None:
        assert event.start == 1 + self.num_logged, "the log has no gaps"
        self.num_logged += len(event.logprobs)
        self.num_missing -= len(event.logprobs)

    def take_event(self, prompt: int) -> Prompt:
        event = Prompt(1 + self.num_logged, tuple(self.new), prompt)
        self.num_logged += len(self.new)
        self.new.clear()
        return event


class HeldJob:
    """A claimed job, from its claim to its end or its loss."""

    def __init__(self, claimed: Claimed, tokenizer: Tokenizer) -> None:
        params = claimed.job.params
        self.job = claimed.job
        self.lane = claimed.job.lane  # until its caller moves it
        self.epoch = claimed.epoch
        self.next_number = claimed.next_number
        self.is_alone = claimed.is_alone
        self.was_kept = False  # its log was offered to the object store
        self.is_being_kept = False  # and the store has not answered yet
        self.result: ObjectRef | None = None  # where it lies there
        self.token_times_s: dict[int, float] = {}  # by choice: its last token, engine's clock
        self._deadline_s = claimed.deadline_s
        self._cost_tokens = claimed.cost_tokens
        prompts, asks = self.job.prompts, params.prompt_logprobs is not None
        self._scores = [_Scores(len(prompt_ids) - 1) for prompt_ids in prompts] if asks else []
        self._choices = [
            _Choice(ChoiceText(tokenizer, prompt_ids, params.stop, params.min_tokens), [])
            for prompt_ids in prompts
            for _ in range(params.n)
        ]

    @property
    def cost_tokens(self) -> int:
        """Prompt and the output to expect; more, once there is more."""
        return max(self._cost_tokens, self.job.num_prompt_tokens + self.num_output_tokens)

    @property
    def held_tokens(self) -> int:
        """Of its cost, what the choices that have not ended account for: each for as much."""
        return self.cost_tokens * self.num_open // len(self._choices)

    @property
    def num_drained(self) -> int:
        """Of its cost: all at its end; before, the prompt with the first output."""
        if self.is_complete:
            return self.cost_tokens
        num_output = self.num_output_tokens
        return self.job.num_prompt_tokens + num_output if num_output else 0

    @property
    def num_output_tokens(self) -> int:
        return sum([len(choice.token_ids) for choice in self._choices])

    @property
    def num_unlogged_tokens(self) -> int:
        """Output that no event was made of yet."""
        return sum([len(choice.token_ids) - choice.num_logged for choice in self._choices])

    @property
    def is_complete(self) -> bool:
        """Every choice has ended; what is left is to log it."""
        # Asked for every job of every step: a generator would take longer than all else here, and
        # so would those of the sums here, which are lists therefore.
        for choice in self._choices:  # noqa: SIM110
            if choice.finish_reason is None:
                return False
        return True

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended."""
        return [str(c.finish_reason) for c in self._choices if c.finish_reason is not None]

    @property
    def num_open(self) -> int:
        """Choices that have not ended: each has a place in the step that is under way."""
        return sum([choice.finish_reason is None for choice in self._choices])

    @property
    def num_going_on(self) -> int:
        """Choices that need a place in the next step too. The step that is under way is the last
        of one that lacks a single token; where it has none yet, it may still compute its prompt.
        """
        most, num = self.job.params.max_tokens, 0
        for choice in self._choices:  # as in is_complete
            if choice.finish_reason is None and not 0 < len(choice.token_ids) == most - 1:
                num += 1
        return num

    @property
    def has_news(self) -> bool:
        """Whether there is an event to take."""
        for scores in self._scores:
            if scores.new:
                return True
        for choice in self._choices:
            if choice.has_news:
                return not self._scores or bool(self._speaking())
        return False

    def _speaking(self) -> list[int]:
        """The choices with output to log. It waits until all of their prompt is said, so that no
        log has a choice that was faster than the one that says the prompt.
        """
        with_news = [index for index, choice in enumerate(self._choices) if choice.has_news]
        if not self._scores or self.is_complete:
            return with_news
        num_each = self.job.params.n
        return [i for i in with_news if self._scores[i // num_each].num_missing <= 0]

    def replay(self, entries: list[LogEntry]) -> None:
        """Rebuilds the state that the log holds, so that the next token goes on from there."""
        for entry in entries:
            if isinstance(entry.event, Prompt):
                self._scores[entry.event.prompt].replay(entry.event)
                continue
            assert isinstance(entry.event, Tokens), "a job with an end is not claimed"
            for delta in entry.event.deltas:
                choice = self._choices[delta.choice]
                assert delta.start == len(choice.token_ids), "the log has no gaps"
                for token_id in delta.token_ids[:-1]:
                    choice.push(token_id, None)
                if delta.token_ids:
                    choice.push(delta.token_ids[-1], delta.finish_reason)
                choice.finish_reason = delta.finish_reason
                choice.num_logged = len(choice.token_ids)

    def start_message(self) -> StartJob:
        """What tells the engine to run this job from where its log ends."""
        return StartJob(
            self.job.id,
            self.epoch,
            self.job.tenant,
            self.job.lane,
            self.job.prompts,
            self.job.params,
            tuple([tuple(choice.token_ids) for choice in self._choices]),
            tuple([choice.finish_reason is not None for choice in self._choices]),
            self._deadline_s,
            self.job.weight,
        )

    def take(self, out: TokenOut | ChoiceEnded) -> bool:
        """Takes output of the engine; True where it completes a stop string, so that the engine,
        which knows no text, must be told."""
        choice = self._choices[out.choice]
        if choice.finish_reason is not None:
            return False  # computed before the engine heard of the stop
        choice.has_news = True
        if isinstance(out, ChoiceEnded):
            choice.new_text += choice.end(out.finish_reason)
            return False
        assert out.position == len(choice.token_ids), "the engine skipped a token"
        choice.new_text += choice.push(out.token_id, out.finish_reason)
        if out.logprob is not None:
            choice.new_logprobs.append(out.logprob)
        return choice.text.is_stopped

    def take_prompt(self, said: PromptLogprobs) -> None:
        """Takes log probabilities of a prompt."""
        self._scores[said.prompt].take(said.start, said.logprobs)

    def take_event(self) -> tuple[Prompt | Tokens | None, int]:
        """The news since the last event as one event, and how many output tokens it holds. News of
        a prompt come first and alone; then `has_news` says whether another event follows.
        """
        for prompt, scores in enumerate(self._scores):
            if scores.new:
                return scores.take_event(prompt), 0
        deltas, num_tokens = [], 0
        for index in self._speaking():
            choice = self._choices[index]
            num_tokens += len(choice.token_ids) - choice.num_logged
            deltas.append(self._take_delta(index, choice))
        return (Tokens(tuple(deltas)), num_tokens) if deltas else (None, 0)

    def _take_delta(self, index: int, choice: _Choice) -> ChoiceDelta:
        start = choice.num_logged
        delta = ChoiceDelta(
            choice=index,
            start=start,
            token_ids=tuple(choice.token_ids[start:]),
            text=choice.new_text,
            finish_reason=choice.finish_reason,
            logprobs=None if self.job.params.logprobs is None else tuple(choice.new_logprobs),
        )
        choice.num_logged = len(choice.token_ids)
        choice.new_text = ""
        choice.new_logprobs.clear()
        choice.has_news = False
        return delta
