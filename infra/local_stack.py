"""Runs `batchway up`: Redis, workers and a gateway as children of a process, in the right order."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contract.connection import broker_errors, connect, without_password
from contract.errors import BatchwayError, BrokerUnavailable
from contract.keys import Keys
from contract.library import check_fitness, ensure_library
from contract.partitions import made_number
from contract.starts import Starts
from infra.callbacks_command import ALLOW_VARIABLE, KEY_VARIABLE, SECRETS_VARIABLE
from infra.child import (
    LIFELINE_VARIABLE,
    Child,
    Console,
    PartEnded,
    Restarts,
    keep_running,
    kill_all,
    lifeline,
    parts,
)
from infra.embedded_redis import EmbeddedRedis, Fsync, NoRedisServer
from infra.gateways import Gateways
from infra.options import OBJECT_STORE_VARIABLE
from infra.preconditions import RunningUp, write_note
from infra.readiness import card_of, in_url, reachable_host, until_ready, welcome

_GRACE_S = 10.0  # beyond a child's own drain budget, before it is killed
_POLL_S = 0.1
_ANNOUNCE_TIMEOUT_S = 1.0
_ROOT = Path(__file__).resolve().parent.parent
_API_KEY_VARIABLE = "BATCHWAY_API_KEY"
_SECRET_VARIABLES = (  # not passed to workers
    *(_API_KEY_VARIABLE, "BATCHWAY_KEY_PEPPER"),
    *(KEY_VARIABLE, SECRETS_VARIABLE),
)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: its name in the output, and the arguments of `batchway worker` but for its
    partition."""

    name: str
    served_model_name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What to run; the arguments are passed to `batchway callbacks`."""

    redis_url: str | None  # None: a private Redis
    namespace: str
    num_partitions: int | None  # None: as many as the namespace has, and one in a new one
    data_dir: Path | None
    object_store: str  # '': a private directory beside the private Redis
    fsync: Fsync  # of a private Redis
    redis_memory_bytes: int | None  # of a private Redis; None: its default
    gateways: Gateways
    allowed_hosts: tuple[str, ...]  # host names that the gateway accepts; (): its default
    workers: tuple[WorkerPlan, ...]
    drain_s: float
    callbacks_arguments: tuple[str, ...]


def placed(plans: Sequence[WorkerPlan], num_partitions: int) -> list[int]:
    """The partition of each worker: those of a model in turn. Raises PartLost if a partition would
    have none of a model."""
    found, counts = list[int](), Counter[str]()
    for plan in plans:
        found.append(counts[plan.served_model_name] % num_partitions)
        counts[plan.served_model_name] += 1
    for model, num in counts.items():
        if num < num_partitions:
            raise PartEnded(
                f"{num_partitions} partitions need as many workers of each model, but "
                f"{model!r} has {num}: give it more workers, or start with fewer partitions"
            )
    return found


class LocalStack:
    """One Redis, some workers and gateways. Children end when `lifeline_fd` closes."""

    def __init__(self, options: StackOptions, console: Console, lifeline_fd: int) -> None:
        self._options = options
        self._console = console
        self._lifeline_fd = lifeline_fd
        self._redis = (
            EmbeddedRedis(
                options.data_dir, fsync=options.fsync, max_memory_bytes=options.redis_memory_bytes
            )
            if options.redis_url is None
            else None
        )
        self._workers: list[Child] = []
        self._places: list[int] = []  # the partition of each
        self._gateways = options.gateways
        self._callbacks: Child | None = None
        self._models = tuple(dict.fromkeys(plan.served_model_name for plan in options.workers))
        self._failed: dict[str, str] = {}  # models whose workers did not stay up, and why

    async def serve(self) -> None:
        """Starts all parts and keeps them running until cancelled. Raises PartLost."""
        url = await self._find_redis()
        store = self._find_store()
        self._say_where(url, store)
        self._make_children(url, store, await self._find_places(url))
        for number in sorted(set(self._places)):
            await self._report(url, number, partial(Starts.forget_failures, models=self._models))
        async with parts() as group:
            if self._redis is not None:
                group.create_task(self._keep_redis(self._redis))
            group.create_task(self._gateways.serve())
            if self._callbacks is not None:
                group.create_task(keep_running(self._callbacks, self._console))
            plans = zip(self._options.workers, self._places, self._workers, strict=True)
            for plan, number, worker in plans:
                announce = partial(self._announce, url, number, plan.served_model_name)
                give_up = partial(self._give_up, url, number, plan.served_model_name)
                others = give_up if len(self._models) > 1 else None
                group.create_task(keep_running(worker, self._console, announce, others))
            group.create_task(self._say_when_ready(url))

    async def end(self) -> None:
        """Ends the parts in order: gateways, workers, Redis."""
        budget_s = self._options.drain_s + _GRACE_S
        await self._gateways.end()
        await asyncio.gather(*(worker.stop(budget_s) for worker in self._workers))
        if self._callbacks is not None:  # last, as it reports the other jobs' ends
            await self._callbacks.stop(budget_s)
        if self._redis is not None:
            await _in_thread(self._redis.stop)

    async def kill(self) -> None:
        """Ends the parts at once."""
        await self._gateways.kill()
        await kill_all([*self._workers, *filter(None, [self._callbacks])])
        if self._redis is not None:
            await _in_thread(self._redis.stop)

    # --- Redis --------------------------------------------------------------------------------

    async def _find_redis(self) -> str:
        """The URL of a reachable Redis with the function library. Raises PartLost."""
        if self._redis is not None:
            try:
                await _in_thread(self._redis.start)
            except NoRedisServer as exc:
                raise PartEnded(str(exc)) from exc
        url = self._redis.url if self._redis is not None else self._options.redis_url
        assert url is not None
        await _load_library(url, Keys(self._options.namespace))
        return url

    async def _find_places(self, url: str) -> list[int]:
        """The partition of each worker. Raises PartLost."""
        keys = Keys(self._options.namespace)
        try:
            async with connect(url, keys) as client:
                number = await made_number(client, keys, self._options.num_partitions)
        except BatchwayError as exc:
            raise PartEnded(str(exc)) from exc
        return placed(self._options.workers, number)

    def _find_store(self) -> str:
        """The object store's location; by default beside a private Redis's data."""
        if self._options.object_store or self._redis is None:
            return self._options.object_store
        return str(self._redis.files / "objects")

    def _say_where(self, redis_url: str, store: str) -> None:
        """Prints the addresses, and leaves a note for the operator's commands."""
        kept = f", kept in {self._options.data_dir}" if self._options.data_dir else ""
        whose = "of our own" if self._redis else "yours"
        self._console.line("batchway", f"redis ({whose}{kept}): {without_password(redis_url)}")
        self._console.line("batchway", f"long prompts and results: {store or 'in redis'}")
        if self._redis is not None:
            up = RunningUp(os.getpid(), redis_url, self._options.namespace, self._gateway_url)
            write_note(self._redis.directory, up)

    @property
    def _gateway_url(self) -> str:
        host, port = self._gateways.listeners[0].getsockname()[:2]
        return f"http://{in_url(reachable_host(host))}:{port}"

    async def _keep_redis(self, server: EmbeddedRedis) -> None:
        """Restarts the server with its file whenever it ends. Raises PartLost."""
        restarts = Restarts()
        while True:
            started_s = time.monotonic()
            while server.is_running:  # noqa: ASYNC110 - see Child.wait
                await asyncio.sleep(_POLL_S)
            pause_s = restarts.next_pause_s(time.monotonic() - started_s)
            if pause_s is None:
                raise PartEnded("redis ended again and again: giving up")
            self._console.line("batchway", f"redis ended; starts again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            try:
                await _in_thread(server.start)
                # A kill may lose the last second, and with it the library.
                await _load_library(server.url, Keys(self._options.namespace))
            except NoRedisServer as exc:
                raise PartEnded(str(exc)) from exc

    # --- children -----------------------------------------------------------------------------

    def _make_children(self, redis_url: str, object_store: str, places: list[int]) -> None:
        environ = _child_environ(os.environ, redis_url, self._lifeline_fd) | {
            OBJECT_STORE_VARIABLE: object_store
        }
        keyless = {n: value for n, value in environ.items() if n not in _SECRET_VARIABLES}
        self._places = places
        self._workers = [
            self._child(plan.name, "worker", (*plan.arguments, f"--partition={number}"), keyless)
            for plan, number in zip(self._options.workers, places, strict=True)
        ]
        self._gateways.made(environ, self._console, self._lifeline_fd)
        key = os.environ.get(KEY_VARIABLE) or secrets.token_hex()  # for this run only
        self._callbacks = self._child(
            "callbacks",
            "callbacks",
            self._options.callbacks_arguments,
            environ | {KEY_VARIABLE: key},
        )
        if allowed := os.environ.get(ALLOW_VARIABLE):
            self._console.line(
                "batchway", f"WARNING: callbacks may reach private addresses: {allowed}"
            )

    async def _announce(self, redis_url: str, number: int, model: str, starts_in_s: float) -> None:
        """Tells callers of a model without workers when one will be ready."""
        await self._report(
            redis_url, number, lambda starts: starts.announce_another(model, starts_in_s)
        )

    async def _give_up(
        self, redis_url: str, number: int, model: str, reason: str, retry_in_s: float
    ) -> None:
        """Reports that a worker of one of several models does not stay up: the others serve on."""
        await self._report(
            redis_url,
            number,
            lambda starts: starts.report_failure(model, reason, retry_in_s=retry_in_s),
        )
        self._failed[model] = reason
        self._console.line("batchway", f"model {model!r} has failed: {reason}")

    async def _report(
        self, redis_url: str, number: int, tell: Callable[[Starts], Awaitable[None]]
    ) -> None:
        keys = Keys(self._options.namespace, number)
        with contextlib.suppress(BatchwayError):
            async with connect(redis_url, keys, command_timeout_s=_ANNOUNCE_TIMEOUT_S) as client:
                await tell(Starts(client, keys))

    def _child(
        self,
        name: str,
        command: str,
        arguments: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> Child:
        line = [sys.executable, "-m", "infra", command, *arguments]
        return Child(name, line, environ, self._console, pass_fds=(self._lifeline_fd,))

    async def _say_when_ready(self, redis_url: str) -> None:
        host, port = self._gateways.listeners[0].getsockname()[:2]
        has_key = bool(os.environ.get(_API_KEY_VARIABLE))
        tell, allowed = partial(self._console.line, "batchway"), self._options.allowed_hosts
        ready = await until_ready(host, port, allowed, self._models, self._failed, tell)
        card = await card_of(redis_url, self._options.namespace, ready[0])
        with contextlib.suppress(OSError):  # a closed output
            print(welcome(self._gateway_url, ready, card, has_key=has_key), flush=True)


def _child_environ(environ: Mapping[str, str], redis_url: str, lifeline_fd: int) -> dict[str, str]:
    """The environment of a child. It contains the URL, which `ps` would show on a command line."""
    path = [str(_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return dict(environ) | {
        "REDIS_URL": redis_url,
        LIFELINE_VARIABLE: str(lifeline_fd),
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # whatever the locale
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",  # do not import from the working directory
    }


async def _load_library(url: str, keys: Keys) -> None:
    """Checks that Redis responds, and loads the Functions. Raises PartLost."""
    try:
        async with connect(url, keys, command_timeout_s=5.0) as client:
            with broker_errors(client, "PING"):
                await client.ping()
            await check_fitness(client)
            await ensure_library(client)
    except (BrokerUnavailable, ValueError) as exc:
        raise PartEnded(f"no Redis to work with: {exc}") from exc


async def _in_thread(call: Callable[[], None]) -> None:
    """Runs a blocking call in a thread; waits for it even if cancelled."""
    task = asyncio.create_task(asyncio.to_thread(call))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


EXIT_FAILED = 1
EXIT_KILLED = 130  # the shell's status of a process ended by Ctrl-C
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signals:
    """Records signals: the first requests a drain, the second an immediate end."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.kill = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # Keep SIGHUP ignored under nohup. Handle SIGINT always: a shell ignores it for any
            # process that it starts in the background.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.kill if self.drain.is_set() else self.drain).set()


async def run_up(options: StackOptions) -> int:
    """Runs the stack until a signal or the loss of a part. Returns the exit status."""
    return await _run(partial(LocalStack, options))


async def run_gateways(gateways: Gateways, redis_url: str) -> int:
    """The same for gateways alone."""
    environ = partial(_child_environ, os.environ, redis_url)
    return await _run(lambda console, fd: gateways.made(environ(fd), console, fd))


async def _run(make: Callable[[Console, int], LocalStack | Gateways]) -> int:
    console = Console(sys.stderr)
    signals = _Signals()
    signals.listen()
    with lifeline() as fd:
        stack = make(console, fd)
        try:
            status = await _serve(stack, signals, console)
        except BaseException:
            await stack.kill()
            raise
        ending = asyncio.create_task(stack.end())
        if await _first(ending, signals.kill):
            console.line("batchway", "everything has ended")
            return status
        console.line("batchway", "second signal: killing the remaining processes")
        await stack.kill()
        return EXIT_KILLED


async def _serve(stack: LocalStack | Gateways, signals: _Signals, console: Console) -> int:
    serving = asyncio.create_task(stack.serve())
    try:
        await _first(serving, signals.drain)
    except PartEnded as lost:
        console.line("batchway", str(lost))
        return EXIT_FAILED
    console.line("batchway", "ending: running requests finish first; Ctrl-C again kills")
    return 0


async def _first(task: asyncio.Task[None], event: asyncio.Event) -> bool:
    """Whether the task ended before the event was set; otherwise cancels the task."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False
