"""Brings a model's folder from S3 to this machine, where it is not here already."""

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("batchway.weights")


class WeightsMissing(Exception):
    """There is nothing at that place."""


def fetch(client: Any, url: str, folder: Path) -> Path:
    """Downloads all of s3://BUCKET/PREFIX; a file of the right size is kept. Returns the folder.

    A file appears under its name once it is whole. Raises WeightsMissing, and what boto3 raises.
    """
    bucket, prefix = urlsplit(url).netloc, urlsplit(url).path.strip("/")
    prefix = f"{prefix}/" if prefix else ""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    found = [item for page in pages for item in page.get("Contents", [])]
    files = {item["Key"].removeprefix(prefix): item["Size"] for item in found}
    files = {name: size for name, size in files.items() if name and not name.endswith("/")}
    if not files:
        raise WeightsMissing(f"nothing at {url}")
    for name, num_bytes in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise WeightsMissing(f"{url}: {name!r} leads out of the folder")
        if path.exists() and path.stat().st_size == num_bytes:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        client.download_file(bucket, prefix + name, str(part))
        part.rename(path)
        log.info("fetched %s num_bytes=%d", name, num_bytes)
    return folder
