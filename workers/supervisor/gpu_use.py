"""How busy the engine's GPUs are, as nvidia-smi measures it. Not measured where it does not say."""

import asyncio
import contextlib
import shutil
from collections.abc import Sequence

from workers.supervisor.holding import EngineLink

_EVERY_S = 5.0
_TIMEOUT_S = 30.0  # without nvidia-persistenced the driver starts anew for each query


class GpuUse:
    """`share`: of the last seconds in which kernels ran, the mean of the GPUs; None: unknown."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self.share: float | None = None

    async def watch(self) -> None:
        """Measures until cancelled."""
        while True:
            await self.measure()
            await asyncio.sleep(_EVERY_S)

    async def measure(self) -> None:
        ready, program = self._engine.ready, shutil.which("nvidia-smi")
        uuids = ready.gpu_uuids if ready is not None else ()
        self.share = await _measured(program, uuids) if program and uuids else None


async def _measured(program: str, uuids: Sequence[str]) -> float | None:
    query = "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            program, *query, f"--id={','.join(uuids)}", stdin=nothing, stdout=pipe, stderr=nothing
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    # A part of a GPU (MIG) has no figure: [N/A].
    found = [int(line) for line in output.decode().splitlines() if line.strip().isdigit()]
    return sum(found) / len(found) / 100 if found else None
