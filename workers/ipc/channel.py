"""Both ends of the socket between a supervisor, which starts the engine process, and the engine.

One frame each way per step: a 4-byte little-endian length, then a msgpack list of messages.
"""

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Self, TypeVar

import msgspec

from workers.ipc.messages import EngineOptions, FromEngine, ToEngine

MAX_FRAME_BYTES = 256 * 2**20
NUM_HEADER_BYTES = 4

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """The bytes are not a frame of this protocol; the connection cannot be used further."""


def encode_frame(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    """One frame of the messages, header included."""
    body = _encoder.encode(messages)
    assert len(body) <= MAX_FRAME_BYTES, "a step's messages are never this large"
    return len(body).to_bytes(NUM_HEADER_BYTES, "little") + body


class FrameDecoder(Generic[M]):
    """Decodes messages from bytes that may be split anywhere."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[M]]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[M]:
        """The messages of all frames that `data` completes, in order.

        Raises FrameError for a length or a message that is not of this protocol.
        """
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        while (body := start + NUM_HEADER_BYTES) <= len(buffer):
            num_bytes = int.from_bytes(buffer[start:body], "little")
            if num_bytes > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {num_bytes} bytes")
            if body + num_bytes > len(buffer):
                break
            start = body + num_bytes
            try:
                messages += self._decoder.decode(bytes(buffer[body:start]))
            except msgspec.MsgspecError as exc:
                raise FrameError("a frame without messages of this protocol") from exc
        del buffer[:start]
        return messages


def decoder_to_engine() -> FrameDecoder[ToEngine]:
    """Decodes what an engine process receives."""
    return FrameDecoder(msgspec.msgpack.Decoder(list[ToEngine]))


def decoder_from_engine() -> FrameDecoder[FromEngine]:
    """Decodes what a supervisor receives."""
    return FrameDecoder(msgspec.msgpack.Decoder(list[FromEngine]))


_RECEIVE_BYTES = 2**20


class PeerGone(Exception):
    """The supervisor's end of the socket is closed."""


class Channel:
    """Frames over a socket pair.

    Reads while it waits to write; otherwise two ends that both write more than the socket buffers
    hold would block each other for ever.
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
        """The messages since the last call. Waits up to `timeout_s` for one; None: for ever. Raises
        PeerGone."""
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        while self._poll_in.poll(0 if self._received else timeout_ms):
            self._read(flags=0)
        messages, self._received = self._received, []
        return messages

    def _drain(self) -> None:
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


log = logging.getLogger(__name__)

GRACE_S = 5.0


class EngineClient(asyncio.Protocol):
    """One engine process. It ends by itself when this process dies."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_messages: Callable[[list[FromEngine]], None],
        packages: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._process = process
        self._packages = packages
        self._on_messages = on_messages
        self._decoder = decoder_from_engine()
        self._transport: asyncio.WriteTransport | None = None  # None when the engine has closed
        self._has_ended = asyncio.Event()
        self._failure: Exception | None = None

    @classmethod
    async def start(
        cls,
        module: str,
        options: EngineOptions,
        on_messages: Callable[[list[FromEngine]], None],
        python: str = "",
    ) -> Self:
        """Spawns `python -m module` with one end of a socket pair; `on_messages` is called with
        the engine's messages as they arrive. `python` names the interpreter of another environment,
        which finds batchway's packages by PYTHONPATH; '': this one."""
        packages = _packages() if python else None
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                python or sys.executable,
                "-m",
                module,
                "--fd",
                str(theirs.fileno()),
                "--options",
                msgspec.json.encode(options).decode(),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,  # its children are in the same group
                env=os.environ | {"PYTHONPATH": packages.name} if packages else None,
            )
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(
            lambda: cls(process, on_messages, packages), sock=ours
        )
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, messages: Sequence[ToEngine]) -> None:
        """Sends one frame. Does not raise if the engine has ended: `end` returns then."""
        if messages and self._transport is not None:
            self._transport.write(encode_frame(messages))

    async def end(self) -> None:
        """Waits for the engine to end. Raises what `on_messages` raised; that also ends the
        engine.
        """
        await self._has_ended.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self, grace_s: float = GRACE_S) -> int:
        """Ends the process if it still runs; returns its exit status."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            log.warning("the engine process did not end in %.1f s: killed", grace_s)
        self.kill()
        if self._packages is not None:
            self._packages.cleanup()
        return await self._process.wait()

    def kill(self) -> None:
        """Kills the process and its children; then `end` returns."""
        with contextlib.suppress(ProcessLookupError):  # they have all ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            if messages := self._decoder.feed(data):
                self._on_messages(messages)
        except Exception as exc:
            self._failure = exc
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._has_ended.set()


def _packages() -> tempfile.TemporaryDirectory[str]:
    """A folder with links to the packages that an engine imports, and to nothing else: this
    environment may have another version of torch."""
    folder = tempfile.TemporaryDirectory(prefix="batchway-engine-")
    root = Path(__file__).resolve().parents[2]
    for name in ("contract", "workers"):
        Path(folder.name, name).symlink_to(root / name, target_is_directory=True)
    return folder
