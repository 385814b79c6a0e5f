"""Entry point of a container: fetches from S3 what a gateway or a worker needs, and becomes it.

    python -m infra.aws.container_entry gateway|worker [options of the command]

BATCHWAY_MODELS names a gateway's flows (docs/flows.md): a path, s3://BUCKET/KEY, or nothing.
BATCHWAY_MODEL names a worker's model: `demo`, a folder, or s3://BUCKET/PREFIX. On ECS the worker's
incarnation begins with the task's id, by which the pool knows its task.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract.connection import redis_url_of
from infra.aws.worker_health import PROGRESS_PATH, host_name
from infra.options import MODELS_VARIABLE
from workers.supervisor.load_progress import LoadProgress

log = logging.getLogger("batchway.weights")

FOLDER = Path("/var/lib/batchway/model")
EXIT_NO_WEIGHTS = 3
EXIT_NEVER_READY = 128 + signal.SIGTERM  # as the worker's


class WeightsMissing(Exception):
    """There are no files at the URL, or one has a path outside the folder."""


def fetch_flows(environ: MutableMapping[str, str]) -> None:
    """Sets the variable to a downloaded file. Raises what boto3 raises."""
    url = urlsplit(environ.get(MODELS_VARIABLE, ""))
    if url.scheme == "s3":
        import boto3

        path = str(Path(tempfile.mkdtemp(prefix="batchway-")) / "models.yaml")
        boto3.client("s3").download_file(url.netloc, url.path.strip("/"), path)
        environ[MODELS_VARIABLE] = path


def fetch_weights(
    client: Any, url: str, folder: Path, on_bytes: Callable[[int], object] = lambda _: None
) -> Path:
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
        client.download_file(bucket, prefix + name, str(part), Callback=on_bytes)
        part.rename(path)
        log.info("fetched %s num_bytes=%d", name, num_bytes)
    return folder


def model_arguments(
    environ: Mapping[str, str], folder: Path = FOLDER, progress: Path = PROGRESS_PATH
) -> list[str]:
    """Options of `batchway worker` for the model, after fetching it. Notes in `progress` that it
    gets on. Raises WeightsMissing."""
    loading = LoadProgress(str(progress))
    loading.begin()
    model, name = environ.get("BATCHWAY_MODEL", "demo"), environ.get("BATCHWAY_SERVED_MODEL_NAME")
    arguments = [f"--served-model-name={name}"] if name else []
    if model.startswith("s3://"):
        import boto3

        note = lambda _: loading.note()  # noqa: E731
        model = str(fetch_weights(boto3.client("s3"), model, folder, note))
    return arguments if model == "demo" else [f"--model={model}", *arguments]


def main(arguments: Sequence[str]) -> None:
    """Does not return: this process becomes the command, or ends."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    command, *options = arguments
    if command == "gateway":
        from gateway.aws.environment import operators_settings  # not in a worker's image

        os.environ.update(operators_settings(os.environ))
        fetch_flows(os.environ)
    else:
        if redis_url_of(os.environ) is None:
            print("no Redis given: set the variable REDIS_URL", file=sys.stderr)
            sys.exit(2)
        # The first process of a container ignores a signal that it does not handle.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_NEVER_READY))
        try:
            options = [*model_arguments(os.environ), *options]
        except WeightsMissing as exc:
            print(exc, file=sys.stderr)
            sys.exit(EXIT_NO_WEIGHTS)
        os.environ["BATCHWAY_HOST"] = host_name(os.environ)
        os.environ["BATCHWAY_PROGRESS"] = str(PROGRESS_PATH)
    os.execv(sys.executable, [sys.executable, "-m", "infra", command, *options])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
