"""The engine process as its supervisor sees it: a socket, frames, and an exit code."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.jobs import FinishReason, SamplingParams
from contract.model_cards import Capabilities
from tests.fakes import VOCAB_SIZE, HashModelOptions, encode_text, expected_output, hash_tokenizer
from tests.hash_engine import HASH_MODEL_VARIABLE
from workers.engine_process.engine_loop import ExitCode
from workers.ipc.channel import (
    Channel,
    FrameError,
    PeerGone,
    decoder_from_engine,
    decoder_to_engine,
    encode_frame,
)
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    EngineOptions,
    EngineReady,
    FromEngine,
    JobFailed,
    LoadFailed,
    Loading,
    Reprioritise,
    Request,
    RunningJobs,
    Shutdown,
    StopChoice,
    StrategyOptions,
    ToEngine,
    TokenOut,
)

TIMEOUT_S = 30.0
OPTIONS = EngineOptions(model_path="hash", max_num_seqs=8)


class EngineUnderTest:
    """A supervisor's view of one engine process."""

    def __init__(self, model: HashModelOptions, options: EngineOptions) -> None:
        self._socket, engine_socket = socket.socketpair()
        self._socket.settimeout(TIMEOUT_S)
        self._decoder = decoder_from_engine()
        self._received: list[FromEngine] = []
        with engine_socket:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.hash_engine"),
                    *("--fd", str(engine_socket.fileno())),
                    *("--options", msgspec.json.encode(options).decode()),
                ],
                pass_fds=[engine_socket.fileno()],
                env={HASH_MODEL_VARIABLE: msgspec.json.encode(model).decode()},
                stderr=subprocess.PIPE,
            )

    def send(self, *messages: ToEngine) -> None:
        self._socket.sendall(encode_frame(messages))

    def receive_until(self, is_last: Callable[[FromEngine], bool]) -> list[FromEngine]:
        """All messages up to the first for which `is_last` is true."""
        received: list[FromEngine] = []
        while True:
            while self._received:
                received.append(self._received.pop(0))
                if is_last(received[-1]):
                    return received
            data = self._socket.recv(2**20)
            assert data, "the engine process has closed its end"
            self._received += self._decoder.feed(data)

    def hang_up(self) -> None:
        self._socket.close()

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def end(self) -> str:
        """Ends the process in any state, and returns its log."""
        self.hang_up()
        self.process.kill()
        _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return stderr.decode()


StartEngine = Callable[..., EngineUnderTest]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Starts engine processes with hash models and ends them after the test."""
    started: list[EngineUnderTest] = []

    def start(options: EngineOptions = OPTIONS, **model_options: object) -> EngineUnderTest:
        model = msgspec.convert(model_options, HashModelOptions)
        started.append(EngineUnderTest(model, options))
        return started[-1]

    yield start
    for engine in started:
        engine.end()


def start_message(job_id: str, prompt: str = "hello", **changes: object) -> Request:
    """A new job; `changes` are sampling parameters."""
    params = msgspec.convert({"max_tokens": 40, "seed": 7, **changes}, SamplingParams)
    return Request(
        job_id,
        1,
        "t",
        "default",
        (encode_text(prompt),),
        params,
        ((),) * params.n,
        (False,) * params.n,
    )


def is_ready(message: FromEngine) -> bool:
    return isinstance(message, EngineReady)


def is_idle(message: FromEngine) -> bool:
    return isinstance(message, EngineLoad) and message.num_running + message.num_waiting == 0


def tokens_of(messages: list[FromEngine], job_id: str, choice: int = 0) -> list[int]:
    """The token ids of one choice. Asserts that positions have neither gap nor repeat."""
    outs = [
        m for m in messages if isinstance(m, TokenOut) and (m.job_id, m.choice) == (job_id, choice)
    ]
    assert [out.position for out in outs] == list(range(len(outs)))
    return [out.token_id for out in outs]


def test_a_worker_reports_its_model_and_completes_jobs(start_engine: StartEngine) -> None:
    """Two jobs, three choices: each yields the oracle's tokens, and each step ends with a load
    message."""
    engine = start_engine()
    greeting = engine.receive_until(is_ready)
    one, two = start_message("one", n=2), start_message("two", prompt="other", seed=9)

    engine.send(one, two)
    received = engine.receive_until(is_idle)

    assert isinstance(greeting[0], Loading)
    can = Capabilities(structured_output=True)
    assert greeting[-1] == EngineReady(
        512, VOCAB_SIZE, (257,), hash_tokenizer(), 64, 16, None, can, num_step_tokens=2048
    )
    for job, choice in ((one, 0), (one, 1), (two, 0)):
        token_ids, reason = expected_output(job.prompts[0], job.params, choice=choice)
        assert tokens_of(received, job.job_id, choice) == token_ids
        reasons = [
            m.finish_reason
            for m in received
            if isinstance(m, TokenOut) and (m.job_id, m.choice) == (job.job_id, choice)
        ]
        assert reasons == [None] * (len(token_ids) - 1) + [reason]


def test_a_choice_that_has_called_a_tool_is_retained(start_engine: StartEngine) -> None:
    """The engine hears of it after the choice has ended; another reason retains nothing."""
    engine = start_engine()
    engine.send(start_message("plain", "a" * 40), start_message("calls", "b" * 40))
    engine.receive_until(is_idle)

    engine.send(StopChoice("plain", 1, 0), StopChoice("calls", 1, 0, FinishReason.TOOL_CALLS))

    [load] = [m for m in engine.receive_until(is_idle) if isinstance(m, EngineLoad)]
    assert 2 <= load.num_retained_blocks < (load.num_cached_blocks or 0)


def test_a_complete_choice_ends_without_a_token(start_engine: StartEngine) -> None:
    """All of its tokens were in the log already: it ends with their reason."""
    engine = start_engine()
    fresh = start_message("job")
    token_ids, reason = expected_output(fresh.prompts[0], fresh.params)

    engine.send(msgspec.structs.replace(fresh, outputs=(tuple(token_ids),)))
    received = engine.receive_until(is_idle)

    assert received[:-1][-1] == ChoiceEnded("job", 1, 0, reason)
    assert not [m for m in received if isinstance(m, TokenOut)]


def test_a_frame_larger_than_the_socket_buffer_arrives_whole(start_engine: StartEngine) -> None:
    """Hundreds of jobs in one frame of over a megabyte; each gets a reply."""
    engine = start_engine()
    jobs = [start_message(f"job-{i}", prompt="x" * 4000) for i in range(300)]
    assert len(encode_frame(jobs)) > 2**20

    engine.send(*jobs)
    received = engine.receive_until(is_idle)

    assert {m.job_id for m in received if isinstance(m, JobFailed)} == {job.job_id for job in jobs}


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_end_of_the_socket_ends_the_process(start_engine: StartEngine, is_busy: bool) -> None:
    """A dead supervisor leaves no engine behind, idle or in the middle of a job."""
    engine = start_engine(eos_rate=0.0, step_s=0.001)
    engine.receive_until(is_ready)
    if is_busy:
        engine.send(start_message("endless", max_tokens=500))
        engine.receive_until(lambda m: isinstance(m, TokenOut))

    engine.hang_up()

    assert engine.wait() == ExitCode.OK


def test_the_engine_ignores_sigint(start_engine: StartEngine) -> None:
    """A Ctrl-C reaches the whole process group; only the supervisor handles it."""
    engine = start_engine()
    engine.receive_until(is_ready)

    engine.process.send_signal(2)
    engine.send(start_message("job"))

    assert tokens_of(engine.receive_until(is_idle), "job")


def test_a_refused_model_gives_one_sentence(start_engine: StartEngine) -> None:
    """LoadFailed with the loader's sentence, then exit code 3."""
    engine = start_engine(refuses="encoder-decoder models are not served")

    received = engine.receive_until(lambda m: isinstance(m, LoadFailed))

    assert received[-1] == LoadFailed("encoder-decoder models are not served")
    assert engine.wait() == ExitCode.MODEL_REFUSED


def test_a_lost_device_ends_the_process_without_quoting_a_prompt(start_engine: StartEngine) -> None:
    """An exception in a step is fatal; the log names its type and no content of the job."""
    engine = start_engine(crash_id=ord("!"))
    engine.receive_until(is_ready)

    engine.send(start_message("poison", prompt="a secret!"))

    assert engine.wait() == ExitCode.CRASHED
    logged = engine.end()
    assert "RuntimeError at " in logged
    assert "secret" not in logged
    assert str(encode_text("secret"))[1:-1] not in logged


def test_a_crash_is_blamed_on_the_jobs_of_its_step_alone(start_engine: StartEngine) -> None:
    """The engine names the jobs before each step, without waiting and ended ones."""
    engine = start_engine(crash_id=ord("!"), num_blocks=32, eos_rate=0.0)
    engine.send(start_message("ended", max_tokens=1))
    engine.receive_until(is_idle)
    engine.send(start_message("beside", max_tokens=300))
    engine.receive_until(lambda m: isinstance(m, TokenOut))

    engine.send(start_message("poison", prompt="a secret!"), start_message("large", "x" * 400))
    received = engine.receive_until(lambda m: isinstance(m, RunningJobs))

    assert engine.wait() == ExitCode.CRASHED
    assert received[-1] == RunningJobs(("beside", "poison"))


def test_changes_of_the_running_jobs_are_reported(start_engine: StartEngine) -> None:
    """Once for each job, however many steps it takes."""
    engine = start_engine(eos_rate=0.0)
    engine.send(start_message("one", max_tokens=5))
    received = engine.receive_until(is_idle)

    engine.send(start_message("two", max_tokens=1))
    received += engine.receive_until(is_idle)

    running = [m for m in received if isinstance(m, RunningJobs)]
    assert running == [RunningJobs(("one",)), RunningJobs(("two",))]


def test_a_deadline_fails_its_job_unless_it_is_lifted(start_engine: StartEngine) -> None:
    """With a code of its own; the job whose deadline was lifted completes."""
    engine = start_engine(eos_rate=0.0, step_s=0.005)
    late, lifted = start_message("late", max_tokens=400), start_message("lifted", max_tokens=40)

    engine.send(
        msgspec.structs.replace(late, deadline_s=0.05),
        msgspec.structs.replace(lifted, deadline_s=0.05),
        Reprioritise("lifted", 1, "batch"),
    )
    received = engine.receive_until(is_idle)

    assert [(m.job_id, m.code) for m in received if isinstance(m, JobFailed)] == [
        ("late", "deadline")
    ]
    assert len(tokens_of(received, "lifted")) == 40


def test_a_static_engine_runs_full_batches_and_sleeps_between_them(
    start_engine: StartEngine,
) -> None:
    """Three jobs in batches of two, the last alone after its wait, in which the engine does not
    spin. Padding is counted and does not change tokens."""
    strategy = StrategyOptions(name="static", batch_size=2, window_s=0.2, padded=True)
    engine = start_engine(msgspec.structs.replace(OPTIONS, strategy=strategy), eos_rate=0.0)
    jobs = [start_message(f"job-{n}", prompt="x" * n, max_tokens=5 * n) for n in (1, 2, 3)]

    engine.receive_until(is_ready)
    engine.send(*jobs)
    received = engine.receive_until(is_idle)

    order = [m.job_id for m in received if isinstance(m, TokenOut)]
    assert order.index("job-3") == len(order) - 15
    loads = [m for m in received if isinstance(m, EngineLoad)]
    assert sum(load.num_padding_tokens for load in loads) == 1 + 5
    assert sum(load.num_step_tokens == 0 for load in loads) <= 3
    for job in jobs:
        token_ids, _ = expected_output(job.prompts[0], job.params, eos_rate=0.0)
        assert tokens_of(received, job.job_id) == token_ids


def test_an_output_cap_applies_to_later_jobs(start_engine: StartEngine) -> None:
    """The job requests 40 tokens; this engine yields at most seven."""
    engine = start_engine(msgspec.structs.replace(OPTIONS, max_output_tokens=7), eos_rate=0.0)
    engine.send(start_message("long"))

    assert len(tokens_of(engine.receive_until(is_idle), "long")) == 7


def test_both_ends_may_write_more_than_the_socket_holds() -> None:
    """The engine reads while it cannot write, so a supervisor that only writes is not blocked."""
    supervisor, engine = socket.socketpair()
    with supervisor, engine:
        channel = Channel(engine)
        big = [start_message(f"job-{i}", prompt="x" * 1000) for i in range(2000)]
        # The supervisor as its own process: it writes all before it reads anything.
        script = (
            "import socket, sys\n"
            "sock = socket.socket(fileno=int(sys.argv[1]))\n"
            "sock.sendall(sys.stdin.buffer.read())\n"
            "while sock.recv(2**20): pass\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(supervisor.fileno())],
            pass_fds=[supervisor.fileno()],
            stdin=subprocess.PIPE,
        ) as process:
            supervisor.close()
            assert process.stdin is not None
            process.stdin.write(encode_frame(big))
            process.stdin.close()

            channel.send([Loading("x" * 2**22)])
            received = channel.receive(timeout_s=None)
            while len(received) < len(big):
                received += channel.receive(timeout_s=None)
            engine.close()

        assert received == big


def test_a_peer_that_goes_away_during_a_large_frame_is_noticed() -> None:
    """A broken socket raises PeerGone, not an OSError."""
    supervisor, engine = socket.socketpair()
    with supervisor, engine:
        channel = Channel(engine)
        supervisor.close()

        with pytest.raises(PeerGone):
            channel.send([Loading("x" * 2**22)])
        with pytest.raises(PeerGone):
            channel.receive(timeout_s=None)


@given(sizes=st.lists(st.integers(1, 50), max_size=40), num_messages=st.integers(0, 5))
def test_frames_survive_any_cut(sizes: list[int], num_messages: int) -> None:
    """However the bytes are split, the messages are the same, and none arrives before its frame is
    complete."""
    messages = [start_message(f"job-{i}") for i in range(num_messages)]
    frames = encode_frame(messages) + encode_frame([Shutdown()])
    decoder = decoder_to_engine()

    received: list[ToEngine] = []
    start = 0
    for size in sizes:
        received += decoder.feed(frames[start : start + size])
        start += size
        assert len(received) <= num_messages or start >= len(frames)
    received += decoder.feed(frames[start:])

    assert received == [*messages, Shutdown()]


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", encode_frame([Loading("wrong way")])]
)
def test_malformed_frames_are_an_error(data: bytes) -> None:
    """A length above the limit, bytes that are not msgpack, and messages of the other direction."""
    with pytest.raises(FrameError):
        decoder_to_engine().feed(data)


def test_an_unknown_option_is_an_error() -> None:
    """And no silent default."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({"model_path": "m", "threads": 2}), type=EngineOptions)
