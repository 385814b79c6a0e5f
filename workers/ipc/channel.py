"""The engine's end of the socket: sends frames, receives messages."""

import math
import select
import socket

from workers.ipc.messages import FromEngine, ToEngine, decoder_to_engine, encode_frame

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
