"""A worker in one thread: the engine's loop and the held jobs of a supervisor, connected by frames.

Everything between a job's log and the model is production code: replayed logs, `start` messages,
frames, the loop, the engine, text and stop strings. Redis, processes and time are left out, so that
a job can be cut at every token.
"""

from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

from contract.model_cards import TokenizerFiles
from tests.resume.logged_job import LoggedJob
from workers.engine.grammar import Grammars
from workers.engine.interface import LoadedModel
from workers.engine_process.engine_loop import EngineLoop
from workers.engine_process.engine_setup import build_engine
from workers.ipc.channel import Channel, decoder_from_engine, decoder_to_engine, encode_frame
from workers.ipc.messages import (
    ChoiceEnded,
    EngineOptions,
    FromEngine,
    JobFailed,
    PromptLogprobsOut,
    Shutdown,
    StopChoice,
    ToEngine,
    TokenOut,
)
from workers.supervisor.held_job import HeldJob, OutputFormats


class LocalWorker(Channel):
    """Runs jobs from where their logs end, without a socket.

    `max_events`: it dies once it has logged this many events; what it has not logged is lost.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        held_type: type[HeldJob] = HeldJob,
        max_events: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._held_type = held_type
        self._max_events = max_events
        self._grammars = grammars
        self._num_events = 0
        self._held: dict[str, tuple[HeldJob, LoggedJob]] = {}
        self._to_engine: list[ToEngine] = []
        self._decode_to_engine = decoder_to_engine()
        self._decode_from_engine = decoder_from_engine()

    def run(self, jobs: Seq[LoggedJob]) -> None:
        """Claims all jobs at once and runs until each has ended or the worker is dead."""
        tokenizer = tokenizer_of(self._loaded.tokenizer)
        for logged in jobs:
            held = self._held_type(logged.claim(), tokenizer, formats_of(self._loaded.tokenizer))
            held.replay(logged.log)
            self._held[logged.job.id] = held, logged
            if held.is_complete:
                logged.has_ended = True
            else:
                self._to_engine.append(held.start_message())
        engine = build_engine(
            self._loaded.model, self._loaded.vocab_size, self._options, grammars=self._grammars
        )
        EngineLoop(self, engine).run()

    # --- what the engine's loop calls ---------------------------------------------------------

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        is_dead = self._max_events is not None and self._num_events >= self._max_events
        if is_dead or all(logged.has_ended for _, logged in self._held.values()):
            return [Shutdown()]
        assert self._to_engine or timeout_s is not None, "the engine waits for a job that waits"
        messages, self._to_engine = self._to_engine, []
        return self._decode_to_engine.feed(encode_frame(messages))

    def send(self, messages: list[FromEngine]) -> None:
        for message in self._decode_from_engine.feed(encode_frame(messages)):
            assert not isinstance(message, JobFailed), message
            if isinstance(message, PromptLogprobsOut):
                self._held[message.job_id][0].take_prompt(message)
            elif isinstance(message, TokenOut | ChoiceEnded):
                self._take_output(message)
        self._publish()

    # --- the supervisor's part ----------------------------------------------------------------

    def _take_output(self, out: TokenOut | ChoiceEnded) -> None:
        if (reason := self._held[out.job_id][0].take(out)) is not None:
            self._to_engine.append(StopChoice(out.job_id, out.epoch, out.choice, reason))

    def _publish(self) -> None:
        """One event per job and step, so that a log can be cut at each of its tokens."""
        for held, logged in self._held.values():
            while held.has_news and self._num_events != self._max_events:
                event, num_tokens = held.take_event()
                assert event is not None
                logged.append(event, num_tokens)
                self._num_events += 1
            logged.has_ended = held.is_complete and not held.has_news


_tokenizers: dict[str, Tokenizer] = {}


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    """Parsed once, because a worker of these tests lives for milliseconds."""
    raw = files.tokenizer_json
    if raw not in _tokenizers:
        _tokenizers[raw] = Tokenizer.from_str(raw)
    return _tokenizers[raw]


def formats_of(files: TokenizerFiles) -> OutputFormats:
    return OutputFormats(files, tokenizer_of(files))
