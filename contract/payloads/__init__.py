"""Object stores for prompts and results that are too large for Redis."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from contract.payloads.directory import DirectoryStore
from contract.payloads.s3 import S3Store


def open_store(setting: str) -> DirectoryStore | S3Store | None:
    """Opens the store that a setting names: `s3://bucket/prefix?endpoint=URL` or a directory.

    Does not connect to it. None for an empty setting. Raises ValueError.
    """
    if not setting:
        return None
    parts = urlsplit(setting)
    if parts.scheme == "s3":
        query = parse_qs(parts.query, keep_blank_values=True)
        endpoints = query.pop("endpoint", [""])
        if not parts.netloc or query or len(endpoints) > 1:
            raise ValueError("an S3 store is `s3://bucket/prefix`, with `?endpoint=URL` at most")
        prefix = parts.path.strip("/")
        return S3Store(parts.netloc, f"{prefix}/" if prefix else "", endpoints[0] or None)
    if parts.scheme == "file" and not parts.netloc:
        setting = parts.path
    if "://" in setting or not Path(setting).is_absolute():
        raise ValueError("an object store is an absolute path, or s3://bucket/prefix")
    return DirectoryStore(Path(setting))
