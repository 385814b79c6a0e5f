"""An engine over several machines: node 0 and each other node hold a connection.

vLLM's processes on one machine learn that another machine has gone only when they next wait for it,
or never. So the loss of the connection ends both sides, and their supervisors start them again.
The nodes must be on a private network: neither this connection nor vLLM's own are authenticated.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from workers.ipc.messages import EngineOptions

log = logging.getLogger("batchway.engine")

_RETRY_S = 0.5
_HELLO_S = 5.0  # in which whoever connects must say its rank
_MAX_LINE = 64 * 1024


def address_of(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    return host.strip("[]"), int(port)


def meet(
    options: EngineOptions, progress: Callable[[str], None], on_lost: Callable[[], None]
) -> EngineOptions:
    """Waits until all nodes are there. Returns the options to start vLLM with: those of node 0,
    with this node's model path and rank, and a port on node 0 that is free for torch. Calls
    `on_lost` in a thread when a node has gone. Raises OSError if node 0 cannot listen."""
    if options.node_rank > 0:
        link, options = _join(options, progress)
        links = [link]
    else:
        links, options = _gather(options, progress)
    for link in links:
        threading.Thread(target=_watch, args=[link, on_lost], name="node-link", daemon=True).start()
    return options


def _gather(
    options: EngineOptions, progress: Callable[[str], None]
) -> tuple[list[socket.socket], EngineOptions]:
    host, port = address_of(options.master)
    links: dict[int, socket.socket] = {}
    with socket.create_server((host, port)) as server:
        while len(links) < options.nodes - 1:
            progress(f"{1 + len(links)} of {options.nodes} nodes are at {options.master}")
            link, _ = server.accept()
            link.settimeout(_HELLO_S)
            try:
                rank = int(_line(link))
            except (OSError, ValueError):
                rank = 0
            if 0 < rank < options.nodes:
                links[rank] = _kept(link)  # of a node that comes again, the new one
            else:
                link.close()
    with socket.create_server((host, 0)) as free:
        master = f"{host}:{free.getsockname()[1]}"
    options = msgspec.structs.replace(options, master=master)
    for link in links.values():
        with contextlib.suppress(OSError):  # it has gone again, as will be seen
            link.sendall(msgspec.json.encode(options) + b"\n")
    return list(links.values()), options


def _join(
    options: EngineOptions, progress: Callable[[str], None]
) -> tuple[socket.socket, EngineOptions]:
    progress(f"node {options.node_rank} waits for node 0 at {options.master}")
    while True:
        with contextlib.suppress(OSError), contextlib.ExitStack() as on_failure:
            link = socket.create_connection(address_of(options.master), _HELLO_S)
            on_failure.enter_context(link)
            _kept(link).sendall(b"%d\n" % options.node_rank)
            leader = msgspec.json.decode(_line(link), type=EngineOptions)
            on_failure.pop_all()
            own = {"model_path": options.model_path, "node_rank": options.node_rank}
            return link, msgspec.structs.replace(leader, **own)
        time.sleep(_RETRY_S)  # it is not there yet, or has ended


def _kept(link: socket.socket) -> socket.socket:
    """The socket without a timeout; a machine that is silent for half a minute counts as gone."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 4)):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
    return link


def _line(link: socket.socket) -> bytes:
    """Reads a line. Raises OSError, also if the connection ends before the line does."""
    line = b""
    while not line.endswith(b"\n"):
        part = link.recv(_MAX_LINE)
        if not part or len(line) > _MAX_LINE:
            raise ConnectionError("no line")
        line += part
    return line


def _watch(link: socket.socket, on_lost: Callable[[], None]) -> None:
    with link, contextlib.suppress(OSError):
        while link.recv(_MAX_LINE):
            pass
    log.error("another node has gone")
    on_lost()
