"""A job that this worker holds: turns the engine's tokens into text and log events.

Uses neither Redis nor the engine. Over 300 lines: one state, from a token to what is logged of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from tokenizers import Tokenizer

from contract.events import ChoiceDelta, LogEntry, Prompt, TokenLogprob, Tokens
from contract.function_types import Claimed
from contract.jobs import FinishReason, ObjectRef
from workers.ipc.messages import ChoiceEnded, PromptLogprobs, Request, TokenOut, VectorOut
from workers.output.message import ResponseDelta
from workers.output.parser import OutputParser
from workers.supervisor.text import ChoiceText, OutputFormats

MAX_VECTOR_BYTES = 2**20  # of one event: Redis runs one append at a time


@dataclass(slots=True)
class _Choice:
    """One choice: all its tokens, and the output that is not logged yet."""

    text: ChoiceText
    parser: OutputParser | None  # None: the output is plain text
    token_ids: list[int] = field(default_factory=list)  # logged or not
    finish_reason: FinishReason | None = None
    num_logged: int = 0
    num_reasoning: int = 0  # tokens of the reasoning with its marks, logged or not
    num_reasoning_logged: int = 0
    num_undecided: int = 0  # tokens that may yet be of the reasoning's opening mark
    new: ResponseDelta = field(default_factory=ResponseDelta)
    new_logprobs: list[TokenLogprob] = field(default_factory=list)
    new_vector: bytes = b""  # of a prefill-only job's prompt
    has_news: bool = False

    def push(self, token_id: int, finish_reason: FinishReason | None) -> None:
        """Adds a token and the text it releases. A stop token has no text."""
        self.token_ids.append(token_id)
        if finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
            self.end(FinishReason.STOP)
            return
        self._add_token(self.text.push(token_id))
        if self.text.is_stopped:
            self._finish(FinishReason.STOP)
        elif finish_reason is not None:
            self.end(finish_reason)

    def end(self, finish_reason: FinishReason) -> None:
        self._add(self.text.flush())
        self._finish(finish_reason)

    def _add_token(self, text: str) -> None:
        """Returns the text that a token releases; counts the token if it is of the reasoning."""
        was_reasoning = self.parser is not None and self.parser.in_reasoning
        delta = self._add(text)
        if self.parser is None:
            return
        self.num_undecided += 1
        if was_reasoning or self.parser.in_reasoning:
            self.num_reasoning += self.num_undecided
            self.num_undecided = 0
        elif delta.content or delta.tool_calls:
            self.num_undecided = 0

    def _add(self, text: str) -> ResponseDelta:
        if self.parser is None:
            delta = ResponseDelta(text)
        else:
            delta = self.parser.push(text) if text else ResponseDelta()
        self.new.extend(delta)
        return delta

    def _finish(self, finish_reason: FinishReason) -> None:
        self.finish_reason = finish_reason
        if self.parser is not None:
            self.new.extend(self.parser.finish())
            if finish_reason is FinishReason.STOP and self.parser.num_calls:
                self.finish_reason = FinishReason.TOOL_CALLS


@dataclass(slots=True)
class _Scores:
    """Log probabilities of one prompt: how many are logged, and those that are not."""

    num_missing: int  # requested and not yet computed
    num_logged: int = 0
    new: list[TokenLogprob] = field(default_factory=list)

    def take(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds scores; ignores known ones, which an engine repeats after a preemption or resume."""
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
    """A claimed job, until it ends or is lost."""

    def __init__(
        self,
        claimed: Claimed,
        tokenizer: Tokenizer,
        formats: OutputFormats | None = None,
    ) -> None:
        params = claimed.job.params
        self.job = claimed.job
        self.lane = claimed.job.lane  # its caller may change it
        self.epoch = claimed.epoch
        self.next_number = claimed.next_number
        self.is_alone = claimed.is_alone
        self.was_stored = False  # storing its result was begun
        self.is_storing = False  # the object store has not answered yet
        self.result: ObjectRef | None = None  # the stored result
        self.num_vector_bytes = 0  # of a prefill-only job's output so far
        self.token_times_s: dict[int, float] = {}  # of each choice's last token (engine clock)
        self._deadline_s = claimed.deadline_s
        self._cost_tokens = claimed.cost_tokens
        prompts, asks = self.job.prompts, params.prompt_logprobs is not None
        self._scores = [_Scores(len(prompt_ids) - 1) for prompt_ids in prompts] if asks else []
        self._choices = [
            self._new_choice(tokenizer, prompt_ids, formats)
            for prompt_ids in prompts
            for _ in range(params.n)
        ]

    def _new_choice(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], formats: OutputFormats | None
    ) -> _Choice:
        params, hidden_ids = self.job.params, None
        parser = None if formats is None else formats.parser(self.job, prompt_ids)
        if formats is not None and parser is not None:
            hidden_ids = formats.hidden_ids(self.job)
        text = ChoiceText(tokenizer, prompt_ids, params.stop, params.min_tokens, hidden_ids)
        return _Choice(text, parser)

    @property
    def cost_tokens(self) -> int:
        """Prompt plus expected output, or plus the actual output if that is more."""
        return max(self._cost_tokens, self.job.num_prompt_tokens + self.num_output_tokens)

    @property
    def held_tokens(self) -> int:
        """The share of the cost that belongs to choices that have not ended."""
        return self.cost_tokens * len(self._unfinished) // len(self._choices)

    @property
    def num_drained(self) -> int:
        """The part of the cost already served: all at the end; prompt and output once there is
        output."""
        if self.is_complete:
            return self.cost_tokens
        num_output = self.num_output_tokens
        return self.job.num_prompt_tokens + num_output if num_output else 0

    @property
    def num_output_tokens(self) -> int:
        return sum([len(choice.token_ids) for choice in self._choices])

    @property
    def num_unlogged_tokens(self) -> int:
        """Output tokens that are in no event yet."""
        return sum([len(choice.token_ids) - choice.num_logged for choice in self._choices])

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended; only logging remains."""
        # These run for every job in every step: loops and lists are faster than generators here.
        for choice in self._choices:  # noqa: SIM110
            if choice.finish_reason is None:
                return False
        return True

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the choices that have ended."""
        return [str(c.finish_reason) for c in self._choices if c.finish_reason is not None]

    @property
    def _unfinished(self) -> list[_Choice]:
        return [choice for choice in self._choices if choice.finish_reason is None]

    @property
    def num_open(self) -> int:
        """The places that it takes in the current step: one for each choice that has not ended; one
        for the whole of a prefill-only job."""
        return min(self.job.num_places, len(self._unfinished))

    @property
    def num_continuing(self) -> int:
        """The number of choices that need a place in the next step, including those without output,
        whose prompt may take several steps; without those whose final token is computed in this
        step. 0 for a prefill-only job."""
        if self.job.pooling is not None:
            return 0
        most = self.job.params.max_tokens
        return sum([not 0 < len(choice.token_ids) == most - 1 for choice in self._unfinished])

    @property
    def has_news(self) -> bool:
        """Whether take_event would return an event."""
        if self._scores and any(scores.new for scores in self._scores):
            return True
        for choice in self._choices:
            if choice.has_news:
                return not self._scores or bool(self._loggable_choices())
        return False

    def _loggable_choices(self) -> list[int]:
        """The choices with output to log. Output waits until its whole prompt is scored, so that
        the prompt's events precede it in the log."""
        with_news = [index for index, choice in enumerate(self._choices) if choice.has_news]
        if not self._scores or self.is_complete:
            return with_news
        return [i for i in with_news if self._scores[i // self.job.params.n].num_missing <= 0]

    def replay(self, entries: list[LogEntry]) -> None:
        """Rebuilds the state from the log, so that the next token continues from there."""
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
                choice.new = ResponseDelta()
                self.num_vector_bytes += len(delta.vector)
                choice.num_logged = len(choice.token_ids)
                choice.num_reasoning_logged = choice.num_reasoning

    def start_message(self) -> Request:
        """The message that makes the engine continue this job where its log ends."""
        return Request(
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
            None if self.job.pooling is None else replace(self.job.pooling, documents=()),
        )

    def take(self, out: TokenOut | VectorOut | ChoiceEnded) -> bool:
        """Takes engine output. Returns whether it completes a stop string: the caller must stop the
        choice in the engine, which has no text."""
        choice = self._choices[out.choice]
        if choice.finish_reason is not None:
            return False  # computed before the engine received the stop
        choice.has_news = True
        if isinstance(out, VectorOut):
            choice.new_vector, choice.finish_reason = out.vector, FinishReason.STOP
            self.num_vector_bytes += len(out.vector)
            return False
        if isinstance(out, ChoiceEnded):
            choice.end(out.finish_reason)
            return False
        assert out.position == len(choice.token_ids), "the engine skipped a token"
        choice.push(out.token_id, out.finish_reason)
        if out.logprob is not None:
            choice.new_logprobs.append(out.logprob)
        return choice.text.is_stopped

    def take_prompt(self, message: PromptLogprobs) -> None:
        self._scores[message.prompt].take(message.start, message.logprobs)

    def take_event(self) -> tuple[Prompt | Tokens | None, int]:
        """The unlogged output as one event, and its number of output tokens. Prompt scores come
        first, in an event of their own; `has_news` tells whether another event follows."""
        for prompt, scores in enumerate(self._scores):
            if scores.new:
                return scores.take_event(prompt), 0
        deltas, num_tokens, num_vector_bytes = list[ChoiceDelta](), 0, 0
        for index in self._loggable_choices():
            choice = self._choices[index]
            num_tokens += len(choice.token_ids) - choice.num_logged
            num_vector_bytes += len(choice.new_vector)
            if deltas and num_vector_bytes > MAX_VECTOR_BYTES:
                break
            deltas.append(self._take_delta(index, choice))
        return (Tokens(tuple(deltas)), num_tokens) if deltas else (None, 0)

    def _take_delta(self, index: int, choice: _Choice) -> ChoiceDelta:
        start = choice.num_logged
        delta = ChoiceDelta(
            choice=index,
            start=start,
            token_ids=tuple(choice.token_ids[start:]),
            text=choice.new.content,
            finish_reason=choice.finish_reason,
            logprobs=None if self.job.params.logprobs is None else tuple(choice.new_logprobs),
            reasoning=choice.new.reasoning,
            tool_calls=tuple(choice.new.tool_calls),
            vector=choice.new_vector,
            num_reasoning=choice.num_reasoning - choice.num_reasoning_logged,
        )
        choice.num_reasoning_logged = choice.num_reasoning
        choice.num_logged = len(choice.token_ids)
        choice.new = ResponseDelta()
        choice.new_logprobs.clear()
        choice.new_vector = b""
        choice.has_news = False
        return delta
