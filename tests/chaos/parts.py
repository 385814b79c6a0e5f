"""The parts of a fleet: each is a process, which may be killed and is started again."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infra.child import LIFELINE_VARIABLE
from tests.chaos import mistakes
from tests.chaos.mistakes import Mistake
from tests.chaos.proxy import Link
from tests.fakes import HashModelOptions
from tests.fleet import Program
from tests.hash_engine import HASH_MODEL_VARIABLE
from tests.infra.processes import command_of, descendants

NAMESPACE = "test"  # of which the functions see the test clock in a cluster too
LEASE_S = 2.0
_READY_TIMEOUT_S = 240.0  # three vLLMs that start at once on two busy cores
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PartOptions:
    """Of one part. Its process exits when the other end of its lifeline closes."""

    name: str
    link: Link
    log_path: Path
    lifeline_fd: int
    mistake: Mistake = Mistake.NONE


class Part:
    """One part. `is_busy` is set during a fault; `link` is its own link to Redis."""

    sign_of_readiness = ""  # in its log

    def __init__(self, options: PartOptions) -> None:
        self.name = options.name
        self.link = options.link
        self.is_busy = False
        self._options = options
        self._log_path = options.log_path
        self._log_start = 0
        self._program: Program | None = None

    @property
    def pid(self) -> int:
        assert self._program is not None, "not started"
        return self._program.pid

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keeps other faults away during one fault."""
        assert not self.is_busy
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def start(self) -> None:
        """Spawns the process; `until_ready` waits until it serves."""
        with self._log_path.open("ab") as output:
            self._log_start = output.tell()
            fd = self._options.lifeline_fd
            own = {LIFELINE_VARIABLE: f"{fd}", mistakes.VARIABLE: self._options.mistake}
            self._program = Program(
                *self._words(), environ={**own, **self._environ()}, output=output, pass_fds=[fd]
            )

    async def until_ready(self, times: int = 1) -> None:
        """Returns once the process has reported this many times that it is ready. Raises
        TimeoutError, and AssertionError with the end of the log if the process has exited."""
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while self.times_ready() < times:
                if self._program is None or not self._program.is_alive:
                    raise AssertionError(f"{self.name} has ended:\n{self.log()[-2000:]}")
                await asyncio.sleep(_POLL_S)

    def times_ready(self) -> int:
        return self.log().count(self.sign_of_readiness)

    def log(self) -> str:
        """The log of the current process."""
        with self._log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.send_to(self.pid, number)

    def send_to(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to one of the processes here, or nothing if it has exited."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    async def wait(self, timeout_s: float) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        assert self._program is not None
        return await asyncio.to_thread(self._program.wait, timeout_s)

    def end(self) -> None:
        """Kills the process and its children, also stopped ones."""
        if self._program is not None:
            self._program.kill_group()

    def _words(self) -> Sequence[str]:
        raise NotImplementedError

    def _environ(self) -> Mapping[str, str]:
        return {}


class GatewayPart(Part):
    """`batchway gateway`, on another free port after each start."""

    sign_of_readiness = "listening on"

    def __init__(self, options: PartOptions, models: str = "") -> None:
        super().__init__(options)
        self._models = models

    @property
    def url(self) -> str:
        """The URL of the gateway, or the last one if no process runs."""
        found = re.search(r"listening on (\S+) port (\d+)", self.log())
        if found:
            self._last_url = f"http://{found[1]}:{found[2]}"
        return self._last_url

    _last_url = "http://127.0.0.1:9"  # discard: refuses

    def _words(self) -> Sequence[str]:
        return [
            *("tests.chaos.gateway", "--port=0", "--drain-s=0.5"),
            *(f"--redis-url={self.link.url}", f"--namespace={NAMESPACE}"),
            f"--models={self._models}",
        ]

    def _environ(self) -> Mapping[str, str]:
        return {
            "BATCHWAY_OBJECT_STORE": str(self._log_path.with_name("objects")),
            "BATCHWAY_HEARTBEAT_S": "1",  # so that a client notices silence soon
            "BATCHWAY_POLL_S": "0.5",
            "BATCHWAY_ATTENDANCE_S": "4",
            "BATCHWAY_OUTAGE_GRACE_S": "5",
            "BATCHWAY_SYNC_DEADLINE_S": "900",  # nothing shall expire here,
            "BATCHWAY_SYNC_RETENTION_S": "86400",  # and all be there to be checked
            "BATCHWAY_CALLBACK_ALLOW": "127.0.0.1",  # where the campaign's receiver listens
        }


class WorkerPart(Part):
    """A supervisor with its engine process, on the hash model or on a real model."""

    sign_of_readiness = "ready model="

    def __init__(
        self,
        options: PartOptions,
        *,
        settings: Mapping[str, Any],
        hash_model: HashModelOptions,
    ) -> None:
        super().__init__(options)
        self._settings = settings
        self._hash_model = hash_model

    async def engine_pid(self) -> int | None:
        """None if there is no engine process."""
        children = await asyncio.to_thread(descendants, self.pid)
        return children[0] if children else None

    async def engine_core_pid(self) -> int | None:
        """The process in which vLLM computes; None if there is none."""
        children = await asyncio.to_thread(descendants, self.pid)
        return next((pid for pid in children if "EngineCore" in command_of(pid)), None)

    def _words(self) -> Sequence[str]:
        settings = {
            "redis_url": self.link.url,
            "namespace": NAMESPACE,
            "lease_s": LEASE_S,
            "drain_s": 1.0,
            # Engines are killed here a thousand times as often as anywhere else, and not by the
            # jobs: three deaths during one job do not make it poison.
            "max_crashes": 1000,
            **self._settings,
        }
        return ["tests.hash_worker", msgspec.json.encode(settings).decode()]

    def _environ(self) -> Mapping[str, str]:
        return {
            HASH_MODEL_VARIABLE: msgspec.json.encode(self._hash_model).decode(),
            # vLLM binds a thread to each core, several workers to the same ones.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }


class CallbacksPart(Part):
    """`batchway callbacks`: relay and RQ worker, with shorter retry delays and leases."""

    sign_of_readiness = "callbacks are delivered"

    def _words(self) -> Sequence[str]:
        settings = {"redis_url": self.link.url, "namespace": NAMESPACE, "drain_s": 1.0}
        fields = msgspec.json.encode(settings).decode()
        return ["tests.callbacks.callbacks_process", fields]
