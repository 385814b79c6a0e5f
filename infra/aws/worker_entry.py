"""Entry point of a worker's container: fetches the weights and runs `batchway worker`.

BATCHWAY_MODEL names the model: `demo`, a folder, or s3://BUCKET/PREFIX. Passes signals on and
protects the ECS task while the worker holds jobs.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract.connection import connect, end_tasks, redis_url_of
from contract.errors import BrokerUnavailable, WireError
from contract.keys import Keys
from infra.aws.task_protection import TaskProtection
from infra.aws.worker_health import num_jobs_here

log = logging.getLogger("batchway.weights")


class WeightsMissing(Exception):
    """There are no files at the URL, or one has a path outside the folder."""


def fetch(client: Any, url: str, folder: Path) -> Path:
    """Downloads all of s3://BUCKET/PREFIX and returns the folder. Keeps files of the right size; a
    file gets its name when it is complete. Raises WeightsMissing, and what boto3 raises."""
    bucket, prefix = urlsplit(url).netloc, urlsplit(url).path.strip("/")
    prefix = f"{prefix}/" if prefix else ""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    found = [item for page in pages for item in page.get("Contents", [])]
    files = {item["Key"].removeprefix(prefix): item["Size"] for item in found}
    files = {name: size for name, size in files.items() if name and not name.endswith("/")}
    if not files:
        raise WeightsMissing(f"no files at {url}")
    for name, num_bytes in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise WeightsMissing(f"{url}: {name!r} is a path outside the folder")
        if path.exists() and path.stat().st_size == num_bytes:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        client.download_file(bucket, prefix + name, str(part))
        part.rename(path)
        log.info("fetched %s num_bytes=%d", name, num_bytes)
    return folder


FOLDER = Path("/var/lib/batchway/model")
EXIT_NO_WEIGHTS = 3
_POLL_S = 1.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def model_arguments(environ: Any, folder: Path = FOLDER) -> list[str]:
    """Options of `batchway worker` for the model, after fetching it. Raises WeightsMissing."""
    model, name = environ.get("BATCHWAY_MODEL", "demo"), environ.get("BATCHWAY_SERVED_MODEL_NAME")
    arguments = [f"--served-model-name={name}"] if name else []
    if model.startswith("s3://"):
        import boto3

        model = str(fetch(boto3.client("s3"), model, folder))
    return arguments if model == "demo" else [f"--model={model}", *arguments]


async def run(command: Sequence[str], redis_url: str, agent_url: str | None) -> int:
    """Runs the worker until it ends; returns its exit status."""
    process = await asyncio.create_subprocess_exec(*command)
    loop = asyncio.get_running_loop()
    for number in _PASSED_ON:
        loop.add_signal_handler(number, _pass_on, process, number)
    watching = asyncio.create_task(_protect(redis_url, agent_url)) if agent_url else None
    try:
        return await process.wait()
    finally:
        if watching is not None:
            await end_tasks(watching)
        for number in _PASSED_ON:
            loop.remove_signal_handler(number)


def _pass_on(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _protect(redis_url: str, agent_url: str) -> None:
    protection = TaskProtection(agent_url)
    keys = Keys(os.environ.get("BATCHWAY_NAMESPACE") or "default")
    async with connect(redis_url) as client:
        while True:
            with contextlib.suppress(BrokerUnavailable, WireError):
                num_jobs = await num_jobs_here(client, keys) or 0
                await asyncio.to_thread(protection.note, num_jobs, time.monotonic())
            await asyncio.sleep(_POLL_S)


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    url = redis_url_of(os.environ)
    if url is None:
        print("no Redis given: set the variable REDIS_URL", file=sys.stderr)
        return 2
    try:
        model = model_arguments(os.environ)
    except WeightsMissing as exc:
        print(exc, file=sys.stderr)
        return EXIT_NO_WEIGHTS
    command = [sys.executable, "-m", "infra", "worker", *model, *arguments]
    return asyncio.run(run(command, url, os.environ.get("ECS_AGENT_URI")))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
