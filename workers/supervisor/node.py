"""A node that only computes: its ranks belong to the engine of node 0. It needs no Redis.

Starts the process of the ranks again whenever it ends: with node 0's engine, or by itself.
"""

import asyncio
import logging
import signal

from contract.connection import end_tasks
from workers.ipc.channel import EngineClient
from workers.ipc.messages import FromEngine, LoadFailed, Loading
from workers.settings import WorkerSettings
from workers.supervisor.engine_keeper import RESTART_S, EngineRefused
from workers.supervisor.supervisor import EXIT_LOAD_FAILED, EXIT_OK

log = logging.getLogger(__name__)


async def run_node(settings: WorkerSettings) -> int:
    """Runs until SIGTERM or SIGINT, which end the ranks at once; returns the exit status."""
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    keeping = asyncio.create_task(_keep(settings))
    ending = asyncio.create_task(asked_to_end.wait())
    try:
        await asyncio.wait({keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
    except EngineRefused as refusal:
        log.error("%s", refusal)
        return EXIT_LOAD_FAILED
    finally:
        await end_tasks(ending)
        await end_tasks(keeping)
    return EXIT_OK


async def _keep(settings: WorkerSettings) -> None:
    """Keeps the ranks running. Raises EngineRefused."""
    while True:
        client = await EngineClient.start(
            settings.engine_module, settings.engine, _take_in, settings.engine_python
        )
        try:
            await client.end()
        finally:
            client.kill()  # nothing of a rank is worth waiting for
            status = await client.stop()
        log.error("the ranks of this node have ended status=%d", status)
        await asyncio.sleep(RESTART_S)


def _take_in(messages: list[FromEngine]) -> None:
    for message in messages:
        match message:
            case Loading(text):
                log.info("%s", text)
            case LoadFailed(text):
                raise EngineRefused(text)
