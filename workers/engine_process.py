"""Owns the device: loads a model and runs the engine's loop for one supervisor.

`python -m workers.engine_process --fd N --options JSON`: N is one end of a socket pair, JSON an
EngineOptions. Knows frames and messages; leaves Redis, leases and text to the supervisor, order
to the engine, tensors to the model. Ends with the socket, so a supervisor that is killed never
leaves an engine behind.
"""

import argparse
import dataclasses
import logging
import math
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import IntEnum

import msgspec

from contract.events import TokenLogprob
from workers.engine.engine import Engine, Output, StepReport
from workers.engine.model import LoadedModel, ModelRefused
from workers.engine.request import Request, RequestRefused
from workers.engine_setup import build_engine, limits_of, strategies_of
from workers.messages import (
    ChoiceEnded,
    EngineLoad,
    EngineOptions,
    FromEngine,
    JobFailed,
    LoadFailed,
    Loading,
    Ready,
    Reconfigure,
    Shutdown,
    StartJob,
    StopChoice,
    StopJob,
    ToEngine,
    TokenOut,
    decoder_to_engine,
    encode_frame,
)

log = logging.getLogger("batchway.engine")

_RECEIVE_BYTES = 2**20


class ExitCode(IntEnum):
    """How an engine process ends."""

    OK = 0  # told to, or the supervisor is gone
    CRASHED = 1
    MODEL_REFUSED = 3


Load = Callable[[EngineOptions, Callable[[str], None]], LoadedModel]


class PeerGone(Exception):
    """The supervisor's end of the socket is closed."""


class Channel:
    """The engine's end of the socket: frames out, messages in.

    Never waits to write without reading: two ends that both write more than the socket holds
    would otherwise wait for each other for ever.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLOUT)
        self._poll_in = select.poll()
        self._poll_in.register(sock, select.POLLIN)
        self._decoder = decoder_to_engine()
        self._received: list[ToEngine] = []

    def send(self, messages: list[FromEngine]) -> None:
        """Writes one frame. Raises PeerGone."""
        unsent = memoryview(encode_frame(messages))
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._poll.poll()
                self._drain()
            except ConnectionError as exc:
                raise PeerGone from exc

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """What has come since the last call. Waits so long for a message, None for ever.

        Raises PeerGone.
        """
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        while not self._received and self._poll_in.poll(timeout_ms):
            self._read(flags=0)
        self._drain()
        messages, self._received = self._received, []
        return messages

    def _drain(self) -> None:
        """Reads all that is there, without waiting."""
        while True:
            try:
                self._read(flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return

    def _read(self, flags: int) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except ConnectionError as exc:
            raise PeerGone from exc
        if not data:
            raise PeerGone
        self._received += self._decoder.feed(data)


class EngineLoop:
    """Commands in, a step, one frame out; idle, it waits on the socket."""

    def __init__(
        self, channel: Channel, engine: Engine, max_output_tokens: int | None = None
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._max_output_tokens = max_output_tokens

    def run(self) -> None:
        """Returns on Shutdown. Raises PeerGone, or what a step raised."""
        while True:
            said: list[FromEngine] = []
            for message in self._channel.receive(self._rest_s()):
                if isinstance(message, Shutdown):
                    return
                said += self._obey(message)
            start_s = time.monotonic()
            report = self._engine.step()
            said += _report_messages(report, time.monotonic() - start_s)
            self._channel.send(said)

    def _rest_s(self) -> float | None:
        """How long there is nothing to do, unless a message comes; None: until one comes."""
        wake_s = self._engine.next_wake_s()
        return None if wake_s is None else max(0.0, wake_s - time.monotonic())

    def _obey(self, message: StartJob | StopJob | StopChoice | Reconfigure) -> list[FromEngine]:
        match message:
            case StartJob():
                return self._start(message)
            case StopJob(job_id, epoch):
                self._engine.stop_job(job_id, epoch)
            case StopChoice(job_id, epoch, choice):
                self._engine.stop_choice(job_id, epoch, choice)
            case Reconfigure(options):
                self._reconfigure(options)
        return []

    def _reconfigure(self, options: EngineOptions) -> None:
        limits = limits_of(options, self._engine.limits.vocab_size)
        self._engine.reconfigure(limits, strategies_of(options))
        self._max_output_tokens = options.max_output_tokens
        log.info("reconfigured batching=%s", options.batching_version)

    def _start(self, message: StartJob) -> list[FromEngine]:
        request = Request(**msgspec.structs.asdict(message))
        if self._max_output_tokens is not None:
            max_tokens = min(request.params.max_tokens, self._max_output_tokens)
            params = msgspec.structs.replace(request.params, max_tokens=max_tokens)
            request = dataclasses.replace(request, params=params)
        try:
            self._engine.add(request)
        except RequestRefused as refusal:
            return [JobFailed(message.job_id, message.epoch, refusal.code, refusal.message)]
        return []


def _report_messages(report: StepReport, step_s: float) -> list[FromEngine]:
    """A step's report on the wire: tokens, endings, failures, and the load last."""
    return [
        *map(_token_out, report.outputs),
        *(
            ChoiceEnded(ended.job_id, ended.epoch, ended.choice, ended.finish_reason)
            for ended in report.ended
            if ended.finish_reason is not None
        ),
        *(JobFailed(e.job_id, e.epoch, e.code, e.message) for e in report.failed),
        EngineLoad(
            report.num_running,
            report.num_waiting,
            report.num_free_blocks,
            report.num_step_tokens,
            step_s,
            report.num_padding_tokens,
        ),
    ]


def _token_out(output: Output) -> TokenOut:
    sequence = output.sequence
    logprob = None
    if sequence.params.logprobs is not None:
        logprob = TokenLogprob(output.token_id, output.logprob, output.top_logprobs)
    return TokenOut(
        sequence.job_id,
        sequence.epoch,
        sequence.choice,
        output.position,
        output.token_id,
        output.finish_reason,
        logprob,
    )


def _ready(loaded: LoadedModel, options: EngineOptions) -> Ready:
    """Promises no more context than one sequence can have here, alone in the KV cache."""
    model = loaded.model
    num_kv_tokens = model.num_blocks * model.block_size
    return Ready(
        context_length=min(loaded.context_length, model.max_model_len, num_kv_tokens),
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        tokenizer=loaded.tokenizer,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        max_num_seqs=options.max_num_seqs,
    )


def serve(channel: Channel, options: EngineOptions, load: Load) -> ExitCode:
    """Loads the model, then runs steps until told to end. Raises PeerGone, or a step's error."""
    try:
        loaded = load(options, lambda text: channel.send([Loading(text)]))
    except ModelRefused as refusal:
        log.error("model refused: %s", refusal)
        channel.send([LoadFailed(str(refusal))])
        return ExitCode.MODEL_REFUSED
    except PeerGone:
        raise
    except Exception:
        # No prompt has come yet, so the whole traceback may be shown.
        log.exception("loading the model failed")
        return ExitCode.CRASHED
    engine = build_engine(loaded.model, loaded.vocab_size, options)
    channel.send([_ready(loaded, options)])
    log.info("ready: num_blocks=%d block_size=%d", loaded.model.num_blocks, loaded.model.block_size)
    EngineLoop(channel, engine, options.max_output_tokens).run()
    return ExitCode.OK


def load_torch_model(options: EngineOptions, progress: Callable[[str], None]) -> LoadedModel:
    """The loader of real models; torch is imported here and not before. Raises ModelRefused."""
    from workers.model.loader import load_model

    return load_model(options, progress)


def main(load: Load = load_torch_model, argv: Seq[str] | None = None) -> int:
    """Runs the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="engine_process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--options", required=True, help="EngineOptions as JSON")
    arguments = parser.parse_args(argv)
    options = msgspec.json.decode(arguments.options, type=EngineOptions)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # A Ctrl-C in a terminal reaches the whole group; the supervisor decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=arguments.fd) as sock:
        # A child of ours (a compiler, say) that held the socket would hide our end from the peer.
        sock.set_inheritable(False)
        sock.setblocking(True)
        try:
            return serve(Channel(sock), options, load)
        except PeerGone:
            log.info("the supervisor is gone")
            return ExitCode.OK
        except Exception as exc:
            log.error("engine lost: %s", describe_exception(exc))
            return ExitCode.CRASHED


def describe_exception(exc: BaseException) -> str:
    """Type and places of an exception, innermost last; its message may quote a prompt."""
    frames = traceback.extract_tb(exc.__traceback__)[-5:]
    places = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(exc).__name__} at {places}"


if __name__ == "__main__":
    sys.exit(main())
