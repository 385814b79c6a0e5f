"""Which modules a chat passes: from the route to the queue, from a claim to the sampler, from the
sampler to the socket.

    python -m bench.path_of_a_call [--show]

Starts `batchway up` with the demo model, where each Python process notes the calls of the project's
functions (`sys.setprofile`), and sends three chats, whole and as streams; the third is counted. A
coroutine that goes on is no call, and neither is a comprehension. A return is a step back into a
module that was left before. ASGI layers, which each request passes, are named and not counted.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import ROOT, UP_IS_READY, Server, running_server

# Loaded by each process of `batchway up` at its start, as `sitecustomize`.
_HOOK = """
import os, sys, threading, time

_NAMES, _files = {{}}, {{}}

def _name(code):
    path = code.co_filename
    if path.startswith({root!r}) and path[{length}:].split("/")[0] in {packages!r}:
        if "<" in code.co_name:
            return ""
        return path[{length}:-3].replace("/", ".") + " " + code.co_qualname
    if path.endswith("redis/asyncio/connection.py") and code.co_name == "send_packed_command":
        return "- to_redis"
    if "/uvicorn/protocols/http/" in path and code.co_name == "send":
        return "- to_socket"
    return ""

def _note(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    name = _NAMES.get(code)
    if name is None:
        name = _NAMES[code] = _name(code)
    if not name or code.co_code[frame.f_lasti + 1] & 3:  # RESUME: after a yield or await
        return
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = open(os.path.join({folder!r}, str(pid)), "a", buffering=1)
    _files[pid].write(f"{{time.monotonic_ns()}} {{name}}\\n")

threading.setprofile(_note)
sys.setprofile(_note)
"""
_PACKAGES = ("contract", "gateway", "infra", "workers")
_ASGI = (
    "gateway.http.arrivals",
    "gateway.http.connections",
    "gateway.http.middleware",
    "gateway.http.uvicorn_compat",
    "gateway.prepare.revocation",
)
_CHATS = (False, False, False, True, True, True)  # whether it is a stream


@dataclass(frozen=True)
class Call:
    """A call of a function, at a time (ns) of the machine's clock, in a process."""

    at_ns: int
    module: str
    function: str
    pid: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="list the modules in their order")
    options = parser.parse_args()
    calls = _traced()
    routes = [call for call in calls if call.function == "GuardedRoute.handle"]
    begun = [call for call in calls if call.function == "create_chat_completion"]
    for kind, chat in (("whole", begun[2]), ("stream", begun[5])):
        route = max(r.at_ns for r in routes if r.pid == chat.pid and r.at_ns < chat.at_ns)
        for name, path in _paths(calls, route, chat.pid).items():
            counted = [call for call in path if call.module not in _ASGI]
            layers = sorted({call.module for call in path} - {call.module for call in counted})
            modules, returns = _steps(counted)
            named = f"; ASGI: {', '.join(layers)}" if layers else ""
            print(f"{kind}, {name}: {len(set(modules))} modules, {returns} returns{named}")
            if options.show:
                print("    " + " ".join(modules))


def _traced() -> list[Call]:
    """The calls of all processes, in their order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "calls").mkdir()
        hook = _HOOK.format(
            root=f"{ROOT}/", length=len(f"{ROOT}/"), packages=_PACKAGES, folder=f"{folder}/calls"
        )
        (folder / "sitecustomize.py").write_text(hook, "utf-8")
        command = [sys.executable, "-m", "infra", "up", "--port=0", "--engine=own"]
        environment = {"PYTHONPATH": f"{folder}:{ROOT}"}
        with running_server(command, folder / "log", UP_IS_READY, 300.0, environment) as server:
            asyncio.run(_chat(server))
        found = [
            Call(int(words[0]), words[1], words[2], int(path.name))
            for path in (folder / "calls").iterdir()
            for words in map(str.split, path.read_text("utf-8").splitlines())
            if len(words) == 3  # the last line of a process may be cut off
        ]
    return sorted(found, key=lambda call: call.at_ns)


async def _chat(server: Server) -> None:
    async with server.client() as client:
        models = (await client.get("/models")).json()["data"]
        body = {
            "model": models[0]["id"],
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        for streams in _CHATS:
            await asyncio.sleep(1.0)  # nothing of the one before goes on
            answer = await client.post("/chat/completions", json=body | {"stream": streams})
            answer.raise_for_status()


def _paths(calls: Sequence[Call], route_ns: int, gateway: int) -> dict[str, list[Call]]:
    """The three paths of a chat whose route began then."""
    after = [call for call in calls if call.at_ns >= route_ns]
    submit = _first(after, "Functions.submit", gateway)
    queued = _first(after, "to_redis", gateway, submit.at_ns)
    started = _first(after, "Supervisor._start_all", 0, queued.at_ns)
    worker = started.pid
    sample = _first(after, "sample", 0, started.at_ns)
    engine = sample.pid
    claim = max(
        c.at_ns for c in after if c.function == "Functions.claim" and c.at_ns < started.at_ns
    )
    handed = _first(after, "EngineClient.send", worker, started.at_ns)
    output = _first(after, "Channel.send", engine, sample.at_ns)
    taken = _first(after, "EngineClient.data_received", worker, output.at_ns)
    append = _first(after, "Functions.append", worker, taken.at_ns)
    logged = _first(after, "to_redis", worker, append.at_ns)
    hint = _first(after, "Hints._on_message", gateway, logged.at_ns)
    socket = _first(after, "to_socket", gateway, hint.at_ns)
    return {
        "route to queue": list(_between(after, gateway, route_ns, queued.at_ns)),
        "claim to sampler": [
            *_between(after, worker, claim, handed.at_ns),
            *_between(after, engine, handed.at_ns, sample.at_ns),
        ],
        "sampler to socket": [
            *_between(after, engine, sample.at_ns, output.at_ns),
            *_between(after, worker, taken.at_ns, logged.at_ns),
            *_between(after, gateway, hint.at_ns, socket.at_ns),
        ],
    }


def _first(calls: Sequence[Call], function: str, pid: int = 0, after_ns: int = 0) -> Call:
    return next(
        call
        for call in calls
        if call.function == function and pid in (0, call.pid) and call.at_ns >= after_ns
    )


def _between(calls: Sequence[Call], pid: int, first_ns: int, last_ns: int) -> Iterator[Call]:
    for call in calls:
        if call.pid == pid and first_ns <= call.at_ns <= last_ns and call.module != "-":
            yield call


def _steps(path: Sequence[Call]) -> tuple[list[str], int]:
    """The modules in their order, and how many steps lead back into one."""
    modules = list[str]()
    for call in path:
        if not modules or modules[-1] != call.module:
            modules.append(call.module)
    return modules, len(modules) - len(set(modules))


if __name__ == "__main__":
    main()
