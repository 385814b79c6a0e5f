"""Entry point of a worker's container: fetches the weights and runs `batchway worker`.

BATCHWAY_MODEL names the model: `demo`, a folder, or s3://BUCKET/PREFIX. Passes signals on. On ECS
the worker's incarnation begins with the task's id, by which the pool knows its task.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract.connection import redis_url_of
from infra.aws.worker_health import host_name

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
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def model_arguments(environ: Any, folder: Path = FOLDER) -> list[str]:
    """Options of `batchway worker` for the model, after fetching it. Raises WeightsMissing."""
    model, name = environ.get("BATCHWAY_MODEL", "demo"), environ.get("BATCHWAY_SERVED_MODEL_NAME")
    arguments = [f"--served-model-name={name}"] if name else []
    if model.startswith("s3://"):
        import boto3

        model = str(fetch(boto3.client("s3"), model, folder))
    return arguments if model == "demo" else [f"--model={model}", *arguments]


async def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the worker until it ends; returns its exit status."""
    process = await asyncio.create_subprocess_exec(*command, env=environ)
    loop = asyncio.get_running_loop()
    for number in _PASSED_ON:
        loop.add_signal_handler(number, _pass_on, process, number)
    try:
        return await process.wait()
    finally:
        for number in _PASSED_ON:
            loop.remove_signal_handler(number)


def _pass_on(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    if redis_url_of(os.environ) is None:
        print("no Redis given: set the variable REDIS_URL", file=sys.stderr)
        return 2
    try:
        model = model_arguments(os.environ)
    except WeightsMissing as exc:
        print(exc, file=sys.stderr)
        return EXIT_NO_WEIGHTS
    command = [sys.executable, "-m", "infra", "worker", *model, *arguments]
    environ = {**os.environ, "BATCHWAY_HOST": host_name(os.environ)}
    return asyncio.run(run(command, environ))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
