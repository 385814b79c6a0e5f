"""All processes of a campaign, each with its own link to one Redis. All of them end with the
campaign."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.child import lifeline
from infra.embedded_redis import Fsync
from tests.chaos.mistakes import Mistake
from tests.chaos.proxy import Link
from tests.chaos.seats import CallbacksSeat, GatewaySeat, Place, Seat, WorkerSeat
from tests.chaos.server import ChaosRedis
from tests.fakes import HashModelOptions

HASH_MODEL = HashModelOptions(num_blocks=256, step_s=0.02)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """`worker` holds fields of WorkerSettings that differ from those of a hash worker."""

    num_workers: int = 3
    num_gateways: int = 2
    num_callbacks: int = 2  # processes that deliver them
    fsync: Fsync = "always"
    worker: Mapping[str, Any] = field(default_factory=dict)
    hash_model: HashModelOptions = HASH_MODEL
    mistake: Mistake = Mistake.NONE  # planted in every process
    models: str = ""  # the text of models.yaml; "": none


class Fleet:
    """All processes and their links. `failed` receives errors of faults that could not be
    inflicted."""

    def __init__(self, options: FleetOptions, rng: random.Random) -> None:
        self._options = options
        self._rng = rng
        self.directory = Path(tempfile.mkdtemp(prefix="bw-chaos-"))
        self.redis = ChaosRedis(self.directory / "redis", options.fsync, rng)
        self.gateways: list[GatewaySeat] = []
        self.workers: list[WorkerSeat] = []
        self.callbacks: list[CallbacksSeat] = []
        self.keeps_logs = False
        self._lifeline = lifeline()

    @property
    def seats(self) -> list[Seat]:
        return [*self.gateways, *self.workers, *self.callbacks]

    async def __aenter__(self) -> Self:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lifeline_fd = self._lifeline.__enter__()
        try:
            await self._start(lifeline_fd)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for seat in self.seats:
            seat.end()
        self.redis.stop()
        self._lifeline.__exit__(None, None, None)
        for seat in self.seats:
            await seat.link.close()
        if not self.keeps_logs:
            shutil.rmtree(self.directory, ignore_errors=True)

    async def _start(self, lifeline_fd: int) -> None:
        await self.redis.start()
        for number in range(self._options.num_workers):
            place = await self._place(f"worker-{number}", lifeline_fd)
            self.workers.append(
                WorkerSeat(
                    place, settings=self._options.worker, hash_model=self._options.hash_model
                )
            )
        for number in range(self._options.num_gateways):
            place = await self._place(f"gateway-{number}", lifeline_fd)
            self.gateways.append(GatewaySeat(place, self._models_yaml()))
        for number in range(self._options.num_callbacks):
            place = await self._place(f"callbacks-{number}", lifeline_fd)
            self.callbacks.append(CallbacksSeat(place))
        for seat in self.seats:
            seat.start()
        await asyncio.gather(*(seat.until_ready() for seat in self.seats))

    def _models_yaml(self) -> str:
        """Its path; '' for none."""
        if not self._options.models:
            return ""
        path = self.directory / "models.yaml"
        path.write_text(self._options.models)
        return str(path)

    async def _place(self, name: str, lifeline_fd: int) -> Place:
        link = Link(lambda: self.redis.socket_path)
        await link.start()
        log_path = self.directory / f"{name}.log"
        return Place(name, link, log_path, lifeline_fd, self._options.mistake)

    def gateway_urls(self) -> list[str]:
        return [seat.url for seat in self.gateways]
