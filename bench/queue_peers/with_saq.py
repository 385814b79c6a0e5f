"""One action on a SAQ queue: python with_saq.py SOCKET ACTION CLIENTS JOBS; prints the seconds."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
from saq import Status
from saq.queue.redis import RedisQueue

DATA = "x" * 600


class Actions:
    def __init__(self, queue: Any, num_clients: int, num_jobs: int) -> None:
        self.queue = queue
        self.num_clients = num_clients
        self.num_jobs = num_jobs

    async def shared(self, call: Callable[[], Awaitable[object]]) -> None:
        left = iter(range(self.num_jobs))

        async def one() -> None:
            for _ in left:
                await call()

        await asyncio.gather(*(one() for _ in range(self.num_clients)))

    async def enqueue(self) -> None:
        await self.shared(lambda: self.queue.enqueue("job", text=DATA))

    async def finish(self) -> None:
        async def call() -> None:
            job = await self.queue.dequeue(timeout=5)
            job.status = Status.ACTIVE
            await job.update()
            await job.finish(Status.COMPLETE, result="done")

        await self.shared(call)

    async def append(self) -> None:
        """A listener hears of updates, of which it may miss some."""
        job = await self.queue.enqueue("job", text=DATA)
        heard = asyncio.create_task(self.queue.listen([job.id], lambda *_: False, timeout=None))
        await asyncio.sleep(0.2)
        await self.shared(lambda: job.update(meta={"text": "token "}))
        heard.cancel()


async def main(path: str, action: str, num_clients: str, num_jobs: str) -> None:
    client = redis.asyncio.Redis(unix_socket_path=path)
    queue = RedisQueue(client, name="bench")
    await queue.connect()
    actions = Actions(queue, int(num_clients), int(num_jobs))
    start_s = time.perf_counter()
    await getattr(actions, action)()
    print(time.perf_counter() - start_s)
    await queue.disconnect()


asyncio.run(main(*sys.argv[1:]))
