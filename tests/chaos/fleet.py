"""All processes of a campaign, each with its own link to one Redis or to a cluster. All of them end
with the campaign."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import connect
from contract.keys import Keys
from infra.child import lifeline
from infra.embedded_redis import Fsync
from tests.chaos.cluster import ChaosCluster
from tests.chaos.mistakes import Mistake
from tests.chaos.parts import NAMESPACE, CallbacksPart, GatewayPart, Part, PartOptions, WorkerPart
from tests.chaos.proxy import Link
from tests.chaos.server import ChaosRedis
from tests.fakes import HashModelOptions

_NUM_TENANTS = 8
_ANSWER_TIMEOUT_S = 30.0
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
    num_partitions: int = (
        0  # on a cluster of three shards, at most as many as workers; 0: one server
    )
    awaits: bool = False  # whether the cluster answers once a replica has a write


class Fleet:
    """All processes and their links. `failed` receives errors of faults that could not be
    inflicted."""

    def __init__(self, options: FleetOptions, rng: random.Random) -> None:
        self._options = options
        self._rng = rng
        self.directory = Path(tempfile.mkdtemp(prefix="bw-chaos-"))
        self.redis = ChaosRedis(self.directory / "redis", options.fsync, rng)
        self.cluster: ChaosCluster | None = None
        if num := options.num_partitions:
            self.cluster = ChaosCluster(NAMESPACE, num, rng, awaits=options.awaits)
        self.gateways: list[GatewayPart] = []
        self.workers: list[WorkerPart] = []
        self.callbacks: list[CallbacksPart] = []
        self.keeps_logs = False
        self.api_keys: list[str] = []
        self._lifeline = lifeline()

    @property
    def parts(self) -> list[Part]:
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
        for part in self.parts:
            part.end()
        for part in self.parts:  # before Redis: a late connection would look for its socket
            await part.link.close()
        self.redis.stop()
        if self.cluster is not None:
            self.cluster.stop()
        self._lifeline.__exit__(None, None, None)
        if self.cluster is not None:
            await self.cluster.close()
        if not self.keeps_logs:
            shutil.rmtree(self.directory, ignore_errors=True)

    async def _start(self, lifeline_fd: int) -> None:
        await (self.redis if self.cluster is None else self.cluster).start()
        await self._make_api_keys()
        for number in range(self._options.num_workers):
            options = await self._part_options(f"worker-{number}", lifeline_fd)
            partition = number % (self._options.num_partitions or 1)
            settings = {**self._options.worker, "partition": partition}
            self.workers.append(
                WorkerPart(options, settings=settings, hash_model=self._options.hash_model)
            )
        for number in range(self._options.num_gateways):
            options = await self._part_options(f"gateway-{number}", lifeline_fd)
            self.gateways.append(GatewayPart(options, self._models_yaml()))
        for number in range(self._options.num_callbacks):
            options = await self._part_options(f"callbacks-{number}", lifeline_fd)
            self.callbacks.append(CallbacksPart(options))
        for part in self.parts:
            part.start()
        await asyncio.gather(*(part.until_ready() for part in self.parts))

    @property
    def redis_url(self) -> str:
        """For observers."""
        return self.redis.url if self.cluster is None else self.cluster.entry.url

    def observe(self, keys: Keys) -> redis.asyncio.Redis:
        """An observer's client of a partition, which waits longer than any part."""
        return connect(self.redis_url, keys, command_timeout_s=_ANSWER_TIMEOUT_S)

    def all_keys(self) -> list[Keys]:
        """Of all partitions."""
        if self.cluster is None:
            return [Keys(NAMESPACE)]
        return [Keys(NAMESPACE, number) for number in range(self._options.num_partitions)]

    async def _make_api_keys(self) -> None:
        """In a cluster callers are of several tenants."""
        if self.cluster is not None:
            async with self.observe(Keys(NAMESPACE)) as client:
                made = ApiKeys(client, Keys(NAMESPACE))
                for number in range(_NUM_TENANTS):
                    key, _ = await made.create(KeyTerms(tenant=f"tenant-{number}"))
                    self.api_keys.append(key)

    def _models_yaml(self) -> str:
        """Its path; '' for none."""
        if not self._options.models:
            return ""
        path = self.directory / "models.yaml"
        path.write_text(self._options.models)
        return str(path)

    async def _part_options(self, name: str, lifeline_fd: int) -> PartOptions:
        one = self.cluster
        link = Link(lambda: self.redis.socket_path) if one is None else one.new_entry()
        await link.start()
        log_path = self.directory / f"{name}.log"
        return PartOptions(name, link, log_path, lifeline_fd, self._options.mistake)

    def gateway_urls(self) -> list[str]:
        return [part.url for part in self.gateways]
