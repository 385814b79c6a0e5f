"""Stores objects as files in a directory of one machine or a shared file system.

The file `.store` holds an id, which distinguishes directories with the same path on different
machines, and the secret that signs URLs.
"""

import hashlib
import hmac
import io
import os
import secrets
import shutil
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

from contract.jobs import ObjectRef
from contract.payloads.store import ObjectStore, PayloadLost, PayloadUnavailable, is_key

_IDENTITY = ".store"
_ID_CHARS = 16
URL_PATH = "/v1/objects/"


class DirectoryStore(ObjectStore):
    """A directory with objects. Opens nothing before its first call. Creates a missing `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The name of the store. Raises PayloadUnavailable."""
        return f"dir:{self._identity[:_ID_CHARS]}"

    def write(self, key: str, content: BinaryIO) -> None:
        assert is_key(key), key
        path = self._path / key
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(partial, content)
            partial.replace(path)
            _sync(path.parent)
        except OSError as exc:
            raise PayloadUnavailable(f"cannot write an object: {exc.strerror}") from exc
        finally:  # the content's own errors, too, leave nothing behind
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        assert is_key(key), key
        try:
            with (self._path / key).open("rb") as file:
                file.seek(start)
                return file.read(num_bytes)
        except FileNotFoundError as exc:
            raise PayloadLost(f"object {key} is not there") from exc
        except OSError as exc:
            raise PayloadUnavailable(f"cannot read an object: {exc.strerror}") from exc

    def sizes(self, job_id: str) -> dict[str, int]:
        try:
            found = list(os.scandir(self._path / Path(job_id).name))
            return {each.name: each.stat().st_size for each in found if "." not in each.name}
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise PayloadUnavailable(f"cannot list objects: {exc.strerror}") from exc

    def delete_job(self, job_id: str) -> None:
        try:
            shutil.rmtree(self._path / Path(job_id).name)
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise PayloadUnavailable(f"cannot delete objects: {exc.strerror}") from exc

    def delete_older(self, age_s: float) -> int:
        before_s, num_jobs = time.time() - age_s, 0
        try:
            for entry in os.scandir(self._path):
                if entry.is_dir(follow_symlinks=False) and entry.stat().st_mtime < before_s:
                    self.delete_job(entry.name)
                    num_jobs += 1
        except FileNotFoundError:
            return num_jobs  # another process deletes too
        except OSError as exc:
            raise PayloadUnavailable(f"cannot list objects: {exc.strerror}") from exc
        return num_jobs

    def url(self, ref: ObjectRef, ttl_s: float) -> str:
        fields = {
            "sha256": ref.sha256,
            "num_bytes": str(ref.num_bytes),
            "expires": str(int(time.time() + ttl_s)),
        }
        fields["signature"] = self._signature(ref.key, fields)
        return f"{URL_PATH}{ref.key}?{urlencode(fields)}"

    def opened(self, key: str, query: dict[str, str]) -> ObjectRef | None:
        """Returns the object of a URL; None if the signature is wrong or the URL has expired."""
        names = ("sha256", "num_bytes", "expires")
        fields = {name: query.get(name, "") for name in names}
        signature = self._signature(key, fields)
        if not hmac.compare_digest(signature.encode(), query.get("signature", "").encode()):
            return None
        if int(fields["expires"]) < time.time():
            return None
        return ObjectRef(self.name, key, fields["sha256"], int(fields["num_bytes"]))

    def _signature(self, key: str, fields: dict[str, str]) -> str:
        text = "\n".join([key, *(fields[name] for name in sorted(fields))])
        return hmac.new(self._identity.encode(), text.encode(), hashlib.sha256).hexdigest()

    @cached_property
    def _identity(self) -> str:
        """The directory's id followed by its secret; the first process creates them."""
        path = self._path / _IDENTITY
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                partial = path.with_name(f"{_IDENTITY}.{secrets.token_hex(8)}.part")
                _write(partial, io.BytesIO(secrets.token_hex(_ID_CHARS // 2 + 32).encode()))
                with suppress(FileExistsError):
                    os.link(partial, path)  # atomic; fails where another process was faster
                partial.unlink()
            return path.read_text("utf-8")
        except OSError as exc:
            raise PayloadUnavailable(
                f"cannot use the object store's directory: {exc.strerror}"
            ) from exc


def _write(path: Path, content: BinaryIO) -> None:
    """Writes and syncs a file: objects must be as durable as the jobs that refer to them."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
