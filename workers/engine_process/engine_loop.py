"""The engine process: loads a model and runs the engine's loop for one supervisor.

Run as `python -m workers.engine_process.engine_loop --fd N --options JSON`: N is one end of a
socket pair, JSON an EngineOptions. Redis, leases and text belong to the supervisor. The process
ends with the socket, so a killed supervisor leaves no engine behind.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum

import msgspec
from msgspec.structs import replace

from contract.jobs import FinishReason
from contract.model_cards import Capabilities
from workers import logs
from workers.engine.interface import DEFAULT_STEP_TOKENS, Chunk, LoadedModel, ModelRefused
from workers.engine.jobs import JobEngine
from workers.engine.sequence import RequestRefused
from workers.engine.step_plan import StepReport
from workers.engine_process.engine_setup import (
    build_engine,
    limits_of,
    load_grammars,
    ready_message,
    strategies_of,
)
from workers.ipc.channel import Channel, PeerGone
from workers.ipc.messages import (
    EngineOptions,
    EngineReady,
    FromEngine,
    JobFailed,
    LoadFailed,
    Loading,
    Reconfigure,
    Reprioritise,
    Request,
    RunningJobs,
    Shutdown,
    StopChoice,
    StopJob,
)
from workers.lanes import lanes_of

log = logging.getLogger("batchway.engine")


class ExitCode(IntEnum):
    """Exit status of an engine process."""

    OK = 0  # after Shutdown, or because the supervisor has ended
    CRASHED = 1
    MODEL_REFUSED = 3


Load = Callable[[EngineOptions, Callable[[str], None]], LoadedModel]


# Loads a model and builds its engine. `Ready` says what it can; the number is the token budget of a
# step where the options name none. Raises ModelRefused.
Start = Callable[[EngineOptions, Callable[[str], None]], tuple[JobEngine, EngineReady, int]]


@dataclass(eq=False)
class EngineLoop:
    """Receives commands, runs a step, sends one frame; waits on the socket when idle."""

    _channel: Channel
    _engine: JobEngine
    _num_step_tokens: int = DEFAULT_STEP_TOKENS
    _max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        self._computed: frozenset[str] = frozenset()  # jobs of the last step

    def run(self) -> None:
        """Returns on Shutdown. Raises PeerGone, and what a step raises."""
        while True:
            messages: list[FromEngine] = []
            for message in self._channel.receive(self._rest_s()):
                if isinstance(message, Shutdown):
                    return
                messages += self._obey(message)
            start_s = time.monotonic()
            report = self._step()
            messages += report.messages(start_s, time.monotonic())
            self._channel.send(messages)

    def _step(self) -> StepReport:
        """Runs one engine step; if it fails, reports exactly the jobs it was computing."""
        computing: list[str] = []

        def announce(chunks: Seq[Chunk]) -> None:
            computing.extend(dict.fromkeys(chunk.sequence.job_id for chunk in chunks))
            if self._computed != set(computing):
                self._channel.send([RunningJobs(tuple(computing))])
            self._computed = frozenset(computing)

        try:
            return self._engine.step(announce)
        except Exception:
            self._channel.send([RunningJobs(tuple(computing))])
            raise

    def _rest_s(self) -> float | None:
        """Seconds until there is work without a message; None: never."""
        wake_s = self._engine.next_wake_s()
        return None if wake_s is None else max(0.0, wake_s - time.monotonic())

    def _obey(
        self, message: Request | StopJob | StopChoice | Reprioritise | Reconfigure
    ) -> list[FromEngine]:
        match message:
            case Request():
                return self._start(message)
            case StopJob(job_id, epoch):
                self._engine.stop_job(job_id, epoch)
            case StopChoice(job_id, epoch, choice, reason):
                pauses = reason is FinishReason.TOOL_CALLS
                self._engine.stop_choice(job_id, epoch, choice, pauses=pauses)
            case Reprioritise(job_id, epoch, lane, deadline_s):
                self._engine.reprioritise(job_id, epoch, lane, _on_our_clock(deadline_s))
            case Reconfigure(options):
                self._reconfigure(options)
        return []

    def _reconfigure(self, options: EngineOptions) -> None:
        limits = self._engine.limits
        limits = limits_of(
            options,
            limits.vocab_size,
            self._num_step_tokens,
            prefill_only=limits.prefill_only,
        )
        self._engine.reconfigure(limits, strategies_of(options), lanes_of(options.lanes))
        self._max_output_tokens = options.max_output_tokens
        logs.stamp(options.batching_version)
        log.info("reconfigured")

    def _start(self, message: Request) -> list[FromEngine]:
        request = replace(message, deadline_s=_on_our_clock(message.deadline_s))
        if self._max_output_tokens is not None:
            max_tokens = min(request.params.max_tokens, self._max_output_tokens)
            request = replace(request, params=replace(request.params, max_tokens=max_tokens))
        try:
            self._engine.add(request)
        except RequestRefused as refusal:
            return [JobFailed(message.job_id, message.epoch, refusal.code, refusal.message)]
        return []


def _on_our_clock(remaining_s: float | None) -> float | None:
    """Converts a remaining time, in which deadlines are sent because processes share no clock."""
    return None if remaining_s is None else time.monotonic() + remaining_s


def serve(channel: Channel, options: EngineOptions, start: Start) -> ExitCode:
    """Loads the model, then runs steps until Shutdown. Raises PeerGone, or a step's error."""
    try:
        engine, ready, num_step_tokens = start(options, lambda text: channel.send([Loading(text)]))
    except ModelRefused as refusal:
        log.error("model refused: %s", refusal)
        channel.send([LoadFailed(str(refusal))])
        return ExitCode.MODEL_REFUSED
    except PeerGone:
        raise
    except Exception:
        # No prompt has arrived yet, so the traceback is safe to log.
        log.exception("loading the model failed")
        return ExitCode.CRASHED
    channel.send([ready])
    log.info("ready: num_blocks=%d block_size=%d", ready.num_blocks, ready.block_size)
    EngineLoop(channel, engine, num_step_tokens, options.max_output_tokens).run()
    return ExitCode.OK


def start_own(load: Load) -> Start:
    """Starts batchway's own engine around the model that `load` yields."""

    def start(
        options: EngineOptions, progress: Callable[[str], None]
    ) -> tuple[JobEngine, EngineReady, int]:
        loaded = load(options, progress)
        grammars = load_grammars(loaded) if loaded.pooling is None else None
        engine = build_engine(
            loaded.model,
            loaded.vocab_size,
            options,
            loaded.num_step_tokens,
            grammars,
            prefill_only=loaded.pooling is not None,
        )
        can = Capabilities(
            prompt_logprobs=loaded.pooling is None,
            structured_output=grammars is not None,
            resume=loaded.resume,
        )
        return engine, ready_message(loaded, options, can), loaded.num_step_tokens

    return start


def load_torch_model(options: EngineOptions, progress: Callable[[str], None]) -> LoadedModel:
    """Loads a real model; imports torch only here, and only for files that are in order. Raises
    ModelRefused."""
    progress(f"checking the files of {options.model_path}")
    from workers.model.folder_check import check_folder
    from workers.model.pooling.folder import read_folder

    check_folder(options.model_path, options.revision)
    read_folder(options.model_path, options.revision)
    progress("importing torch and transformers")
    from workers.model.loader import load_model

    loaded = load_model(options, progress)
    # The libraries' 400,000 permanent objects would make each collection longer than a step.
    gc.collect()
    gc.freeze()
    return loaded


def main(
    load: Load = load_torch_model, argv: Seq[str] | None = None, start: Start | None = None
) -> int:
    parser = argparse.ArgumentParser(prog="engine_process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--options", required=True, help="EngineOptions as JSON")
    arguments = parser.parse_args(argv)
    options = msgspec.json.decode(arguments.options, type=EngineOptions)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logs.stamp(options.batching_version)
    # Ctrl-C reaches the whole process group, and some service managers send SIGTERM to it; the
    # supervisor decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=arguments.fd) as sock:
        # A child process (say, a compiler) that inherited the socket would keep it open.
        sock.set_inheritable(False)
        sock.setblocking(True)
        try:
            return serve(Channel(sock), options, start or start_own(load))
        except PeerGone:
            log.info("the supervisor is gone")
            return ExitCode.OK
        except Exception as exc:
            log.error("engine lost: %s", describe_exception(exc))
            return ExitCode.CRASHED


def describe_exception(exc: BaseException) -> str:
    """Type and code locations of an exception, innermost last; its message may quote a prompt."""
    frames = traceback.extract_tb(exc.__traceback__)[-5:]
    places = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(exc).__name__} at {places}"


if __name__ == "__main__":
    os._exit(main())  # at the interpreter's own end, libraries of torch list all that they keep
