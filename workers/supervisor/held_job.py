"""A job that this worker holds: turns the engine's tokens into text and log events.

The text released after k tokens depends only on those tokens, not on step boundaries, so a resumed
job rebuilds the same state by replaying its log.

Uses neither Redis nor the engine.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from contract.events import ChoiceDelta, LogEntry, Prompt, TokenLogprob, Tokens
from contract.function_types import Claimed, JobMark
from contract.jobs import Endpoint, FinishReason, Job, MarkKind, ObjectRef, SamplingParams
from contract.model_cards import TokenizerFiles
from contract.output_formats import GEMMA_QUOTE, ReasoningFormat, ToolFormat
from contract.residence import prefix_marks
from contract.token_texts import NUM_CONTEXT_IDS, TextStream
from workers.ipc.messages import ChoiceEnded, PromptLogprobsOut, Request, TokenOut, VectorOut
from workers.output.message import ResponseDelta
from workers.output.parser import MARKS, OutputParser
from workers.output.stop_strings import StopStrings

_END_TOKENS = 64  # of a prompt, which may begin the reasoning
_PYTHON_TAG = "<|python_tag|>"


class OutputFormats:
    """A model's formats, with its tokenizer."""

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reasoning, self._tool_format = files.reasoning, files.tool_format
        added = tokenizer.get_added_tokens_decoder().items()
        special = {token_id: token.content for token_id, token in added if token.special}
        self._hidden = {
            calls: frozenset(set(special) - _marks(special, files, calls))
            for calls in (False, True)
        }

    def reads(self, job: Job) -> bool:
        """Whether the output is read; otherwise it is plain text."""
        has_calls = bool(job.tools) and self._tool_format is not None
        return job.endpoint is not Endpoint.COMPLETIONS and (
            has_calls or self._reasoning is not None
        )

    def parser(self, job: Job, prompt_ids: Sequence[int], stops: StopStrings) -> OutputParser:
        """Returns a parser for one choice of a job."""
        tool_format = self._tool_format if job.tools else None
        prompt_end = self._tokenizer.decode(prompt_ids[-_END_TOKENS:], skip_special_tokens=False)
        return OutputParser(
            tool_format, self._reasoning, prompt_end, job.tools, job.tool_alternatives, stops
        )

    def hidden_ids(self, job: Job) -> frozenset[int]:
        """The special tokens that are not marks of the formats: they have no text."""
        return self._hidden[bool(job.tools)]


def _marks(special: dict[int, str], files: TokenizerFiles, calls: bool) -> set[int]:
    formats: list[ReasoningFormat | ToolFormat | None] = [files.reasoning]
    if calls:
        formats.append(files.tool_format)
    known = [each for each in formats if each is not None]
    literals = [
        value for each in known for value in msgspec.structs.astuple(each) if isinstance(value, str)
    ]
    if files.reasoning is not None and files.reasoning.is_harmony:
        literals += MARKS
    if calls and files.tool_format is not None:
        literals += [_PYTHON_TAG] if files.tool_format.is_bare else []
        literals += [GEMMA_QUOTE] if files.tool_format.syntax == "gemma" else []
    return {i for i, content in special.items() if any(content in each for each in literals)}


class ChoiceText:
    """The text of one choice. Holds back incomplete characters and possible starts of stop
    strings. Tokens of `hidden_ids` have no text, by default all special ones, unless `params` show
    them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        hidden_ids: Collection[int] | None = None,
    ) -> None:
        hides = params.skip_special_tokens
        self._hidden_ids = hidden_ids if hides and hidden_ids else ()
        context = [i for i in prompt_ids[-NUM_CONTEXT_IDS:] if i not in self._hidden_ids]
        skips = hides and hidden_ids is None
        self._stream = TextStream(tokenizer, DecodeStream, context, skips_special=skips)
        self.shows_stop = params.include_stop_str_in_output
        self.stops = StopStrings(params.stop, params.min_tokens, shows_stop=self.shows_stop)
        # As in vLLM an added token after another has no space before it, where none is wanted.
        joins = not (hides or params.spaces_between_special_tokens)
        added = tokenizer.get_added_tokens_decoder() if joins else {}
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._was_added = False

    def push(self, token_id: int) -> str:
        """Returns the text that this token releases."""
        assert not self.stops.found
        self.stops.count()
        if token_id in self._hidden_ids:
            return ""
        _, piece = self._stream.push(token_id)
        if piece and self._added:
            content = self._added.get(token_id)
            piece = content if content is not None and self._was_added else piece
            self._was_added = content is not None
        return self.stops.push(piece)

    def flush(self) -> str:
        """Returns the text held back, when a choice ends without a stop string."""
        return self.stops.flush() + self._stream.end()


MAX_VECTOR_BYTES = 2**20  # of one event: Redis runs one append at a time
_MAX_SCORES = 1024  # of a prompt in one event: half a megabyte with twenty likeliest each


@dataclass(slots=True)
class Choice:
    """One choice: all its tokens, and the output that is not logged yet."""

    text: ChoiceText
    parser: OutputParser | None  # None: the output is plain text
    stop_token_ids: Collection[int] = ()  # that the engine, which knows no reasoning, does not have
    min_tokens: int = 0
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
        """Adds a token and the text it releases. A stop token has no text, unless it is shown."""
        self.token_ids.append(token_id)
        is_due = token_id in self.stop_token_ids and len(self.token_ids) > self.min_tokens
        if is_due and self.parser is not None and self.parser.in_answer:
            finish_reason = FinishReason.STOP
        if finish_reason is FinishReason.TOOL_CALLS:
            finish_reason = FinishReason.STOP
        if finish_reason is FinishReason.STOP and not self.text.shows_stop:
            self.end(finish_reason)
            return
        self._add_token(self.text.push(token_id))
        if self.text.stops.found:
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
            if self.text.stops.found:  # in what only the end has shown to be the answer
                self.finish_reason = finish_reason = FinishReason.STOP
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
        event = Prompt(1 + self.num_logged, tuple(self.new[:_MAX_SCORES]), prompt)
        self.num_logged += len(event.logprobs)
        del self.new[:_MAX_SCORES]
        return event


_MAX_MARKS = 8  # of one append


@dataclass(slots=True)
class _Mark:
    """What the engine did with the job, from the first to the last of `num` times."""

    kind: MarkKind
    begun_s: float
    ended_s: float
    num: int
    num_tokens: int


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
        self.num_returns = claimed.epoch - claimed.attempt  # without a failure
        self.num_looks = 0  # one after another, that found nothing of it running
        self.next_number = claimed.next_number
        self.is_alone = claimed.is_alone
        self.was_stored = False  # storing its result was begun
        self.is_storing = False  # the object store has not answered yet
        self.result: ObjectRef | None = None  # the stored result
        self.num_vector_bytes = 0  # of a prefill-only job's output so far
        self.token_times_s: dict[int, float] = {}  # of each choice's last token (engine clock)
        self._marks: list[_Mark] = []  # that are not logged yet
        self._num_cached: dict[int, int] = {}  # by prompt, told with its first output
        self._deadline_s = claimed.deadline_s
        # Read for every held job at every claim.
        self._num_prompt_tokens = claimed.job.num_prompt_tokens
        self._num_places = claimed.job.num_places
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
    ) -> Choice:
        if formats is not None and not formats.reads(self.job):
            formats = None
        hidden_ids = None if formats is None else formats.hidden_ids(self.job)
        params = self.job.params
        text = ChoiceText(tokenizer, prompt_ids, params, hidden_ids)
        if formats is None:
            return Choice(text, None)
        parser = formats.parser(self.job, prompt_ids, text.stops)
        stop_token_ids = params.stop_token_ids if parser.may_reason else ()
        return Choice(text, parser, stop_token_ids, params.min_tokens)

    @property
    def cost_tokens(self) -> int:
        """Prompt plus expected output, or plus the actual output if that is more."""
        return max(self._cost_tokens, self._num_prompt_tokens + self.num_output_tokens)

    @property
    def held_tokens(self) -> int:
        """The share of the cost that belongs to choices that have not ended."""
        return self.cost_tokens * self._num_unfinished // len(self._choices)

    @property
    def num_drained(self) -> int:
        """The part of the cost already served: all at the end; prompt and output once there is
        output."""
        if self.is_complete:
            return self.cost_tokens
        num_output = self.num_output_tokens
        return self._num_prompt_tokens + num_output if num_output else 0

    def held_marks(self) -> bytes:
        """The marks of what the engine has computed for its first choice."""
        job = self.job
        if job.prompt_list or job.pooling:
            return b""
        return prefix_marks(job.tenant, (*job.prompt_ids, *self._choices[0].token_ids[:-1]))

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
        return [str(c.finish_reason) for c in self._choices if c.finish_reason is not None]

    @property
    def _num_unfinished(self) -> int:
        return [choice.finish_reason for choice in self._choices].count(None)

    @property
    def num_open(self) -> int:
        """The places that it takes in the current step: one for each choice that has not ended; one
        for the whole of a prefill-only job."""
        return min(self._num_places, self._num_unfinished)

    @property
    def num_continuing(self) -> int:
        """The number of choices that need a place in the next step, including those without output,
        whose prompt may take several steps; without those whose final token is computed in this
        step. 0 for a prefill-only job."""
        if self.job.pooling is not None:
            return 0
        most = self.job.params.max_tokens
        return sum(
            [
                choice.finish_reason is None and not 0 < len(choice.token_ids) == most - 1
                for choice in self._choices
            ]
        )

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
        params = self.job.params
        if any(choice.stop_token_ids for choice in self._choices):
            params = replace(params, stop_token_ids=())
        return Request(
            self.job.id,
            self.epoch,
            self.job.tenant,
            self.job.lane,
            self.job.prompts,
            params,
            tuple([tuple(choice.token_ids) for choice in self._choices]),
            tuple([choice.finish_reason is not None for choice in self._choices]),
            self._deadline_s,
            self.job.weight,
            None if self.job.pooling is None else replace(self.job.pooling, documents=()),
            self.job.image_data,
            self.job.num_image_tokens,
        )

    def take(self, out: TokenOut | VectorOut | ChoiceEnded) -> FinishReason | None:
        """Takes engine output. Returns why the choice ends here, if the engine has not said it: the
        caller must tell the engine, which knows no text, no reasoning and no tool calls."""
        choice = self._choices[out.choice]
        if choice.finish_reason is not None:
            return None  # computed before the engine received the stop
        choice.has_news = True
        if isinstance(out, VectorOut):
            choice.new_vector, choice.finish_reason = out.vector, FinishReason.STOP
            self.num_vector_bytes += len(out.vector)
            return None
        if isinstance(out, ChoiceEnded):
            choice.end(out.finish_reason)
            return None
        assert out.position == len(choice.token_ids), "the engine skipped a token"
        choice.push(out.token_id, out.finish_reason)
        if out.logprob is not None:
            choice.new_logprobs.append(out.logprob)
        return None if choice.finish_reason is out.finish_reason else choice.finish_reason

    def take_prompt(self, message: PromptLogprobsOut) -> None:
        self._scores[message.prompt].take(message.start, message.logprobs)

    def mark(self, kind: MarkKind, num_tokens: int, now_s: float) -> None:
        """Notes what the engine did with the job; of equal ones that follow each other, the first
        and the last time, and the sums."""
        last = self._marks[-1] if self._marks else None
        if last is not None and last.kind == kind:
            last.ended_s = now_s
            last.num += 1
            last.num_tokens += num_tokens
        else:
            self._marks.append(_Mark(kind, now_s, now_s, 1, num_tokens))
            del self._marks[:-_MAX_MARKS]

    def note_prefix(self, choice: int, num_tokens: int) -> None:
        """Notes what was cached of a choice's prompt, unless output of the prompt is logged: then
        an earlier run has told it."""
        n = self.job.params.n
        prompt = choice // n
        if not any(c.num_logged for c in self._choices[prompt * n : prompt * n + n]):
            num_prompt = len(self.job.prompts[prompt]) + self.job.num_image_tokens
            self._num_cached[prompt] = min(num_tokens, num_prompt - 1)

    def _take_cached(self, deltas: Sequence[ChoiceDelta]) -> int:
        prompts = {delta.choice // self.job.params.n for delta in deltas}
        return sum(self._num_cached.pop(prompt, 0) for prompt in prompts)

    def take_marks(self, now_s: float) -> tuple[JobMark, ...]:
        """What is not logged yet."""
        if not self._marks:
            return ()

        def age_ms(at_s: float) -> int:
            return round(1000 * (now_s - at_s))

        taken, self._marks = self._marks, []
        return tuple(
            JobMark(m.kind, age_ms(m.begun_s), age_ms(m.ended_s), m.num, m.num_tokens)
            for m in taken
        )

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
        if not deltas:
            return None, 0
        num_cached = self._take_cached(deltas) if self._num_cached else 0
        return Tokens(tuple(deltas), num_cached), num_tokens

    def _take_delta(self, index: int, choice: Choice) -> ChoiceDelta:
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
            stop=choice.text.stops.found,
        )
        choice.num_reasoning_logged = choice.num_reasoning
        choice.num_logged = len(choice.token_ids)
        choice.new = ResponseDelta()
        choice.new_logprobs.clear()
        choice.new_vector = b""
        choice.has_news = False
        return delta
