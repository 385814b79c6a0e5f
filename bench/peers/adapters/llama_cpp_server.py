"""llama.cpp's server, `llama-server` beside this Python, with one slot per running sequence.

The model is converted once, beside its checkpoint; KV has the type of the weights.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from bench.peers.adapters.record import Record, Request, arguments, read_requests

_KV_TYPES = {"float32": "f32", "bfloat16": "bf16"}
_START_S = 120.0
_POLL_S = 0.1


def main() -> None:
    options = arguments()
    requests = read_requests(options.workload)
    longest = max(len(r["prompt_token_ids"]) + r["max_tokens"] for r in requests)
    kind = _KV_TYPES[options.dtype]
    command = [
        *(str(Path(sys.executable).with_name("llama-server")), "--offline", "--no-ui"),
        *("--model", converted(options.model, options.dtype)),
        *("--parallel", str(options.max_running), "--cont-batching"),
        *("--ctx-size", str(options.max_running * (longest + 1))),
        *("--cache-type-k", kind, "--cache-type-v", kind, "--cache-ram", "0"),
        *("--threads", os.environ["OMP_NUM_THREADS"]),
    ]
    with tempfile.TemporaryDirectory() as folder, _server(command, f"{folder}/server.sock") as path:
        run(path, [request | {"max_tokens": 4} for request in requests[:4]])
        run(path, requests).write(options.json)


def converted(model: str, dtype: str) -> str:
    folder = Path(model).resolve()
    target = folder.with_name(f"{folder.name}-{dtype}.gguf")
    if not target.exists():
        program = [sys.executable, "-m", "bench.peers.adapters.gguf_file"]
        subprocess.run([*program, str(folder), dtype, str(target)], check=True)  # noqa: S603
    return str(target)


@contextmanager
def _server(command: list[str], path: str) -> Iterator[str]:
    """The socket of a running server; stops it at the end."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, "--host", path], stdout=quiet, stderr=quiet)  # noqa: S603
    try:
        give_up_s = time.monotonic() + _START_S
        while not _is_ready(path):
            assert process.poll() is None, "llama-server has stopped"
            assert time.monotonic() < give_up_s, "llama-server does not answer"
            time.sleep(_POLL_S)
        yield path
    finally:
        process.terminate()
        process.wait()


def _is_ready(path: str) -> bool:
    connection = _Connection(path)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def run(path: str, requests: list[Request]) -> Record:
    """Sends each request over its own connection."""
    record = Record(len(requests))
    callers = [Thread(target=_call, args=(path, record, *each)) for each in enumerate(requests)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for number, request in enumerate(requests):
        assert record.num_tokens(number) == request["max_tokens"], "a request has failed"
    return record


def _call(path: str, record: Record, number: int, request: Request) -> None:
    connection = _Connection(path)
    body = {
        "prompt": request["prompt_token_ids"],
        "n_predict": request["max_tokens"],
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    connection.request(
        "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
    )
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if not event["stop"]:
                record.add(number, event["tokens"])
    connection.close()


if __name__ == "__main__":
    main()
