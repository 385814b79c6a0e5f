"""A proxy on loopback that breaks connections in the middle of answers."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class BreakingProxy:
    """Forwards bytes both ways; breaks the first `num_breaks` responses after `max_bytes` each."""

    def __init__(self, target_url: str, max_bytes: int, num_breaks: int) -> None:
        parts = urlsplit(target_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._max_bytes = max_bytes
        self._num_left = num_breaks
        self.num_broken = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        """Accepts connections until `close`."""
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(self._target)
            for work, ends in ((self._answer, (there, caller)), (_pump, (caller, there))):
                thread = threading.Thread(target=work, args=ends)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Stops listening, and waits until all callers have closed their connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _answer(self, there: socket.socket, caller: socket.socket) -> None:
        num_bytes = 0
        with there, caller:
            with contextlib.suppress(OSError):
                while data := there.recv(256):
                    caller.sendall(data)
                    num_bytes += len(data)
                    if num_bytes > self._max_bytes and self._num_left:
                        self._num_left -= 1
                        self.num_broken += 1
                        break
            for end in (there, caller):
                with contextlib.suppress(OSError):  # one end may be closed already
                    end.shutdown(socket.SHUT_RDWR)  # wakes the other direction too


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
    with contextlib.suppress(OSError):  # the caller may have disconnected
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def breaking_proxy(target_url: str, max_bytes: int, num_breaks: int) -> Iterator[BreakingProxy]:
    """Runs a proxy in its own threads."""
    proxy = BreakingProxy(target_url, max_bytes, num_breaks)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(10)
