"""Stores objects in a bucket of S3 or a compatible server.

Credentials and region come from boto3's chain (environment, profile, role). boto3 is imported at
the first call, so that gateways on Lambda without large payloads start faster. The bucket's
lifecycle, which the operator sets, expires old objects.
"""

import importlib
from functools import cached_property
from typing import Any, BinaryIO
from urllib.parse import quote

from contract.jobs import ObjectRef
from contract.payloads.store import ObjectStore, PayloadLost, PayloadUnavailable, is_key

_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 10.0
_ATTEMPTS = 3
_MISSING = ("NoSuchKey", "404")
_PAST_THE_END = ("InvalidRange", "416")
_PAGE = 1000  # keys of one deletion


class _OutOfRange(Exception):
    """An object ends before the range."""


class S3Store(ObjectStore):
    """Objects below `prefix` ('' or ending in a slash) of a bucket. `endpoint`: None for AWS."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None = None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"

    def write(self, key: str, content: BinaryIO) -> None:
        """Writes in parts of 8 MB, one at a time."""
        assert is_key(key), key
        transfer = importlib.import_module("boto3.s3.transfer")
        config = transfer.TransferConfig(use_threads=False)
        self._call("upload_fileobj", Fileobj=content, Key=self._prefix + key, Config=config)

    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        assert is_key(key), key
        if not num_bytes:
            return b""
        part = f"bytes={start}-{start + num_bytes - 1}"
        try:
            found = self._call("get_object", Key=self._prefix + key, Range=part)
        except _OutOfRange:
            return b""
        try:
            data: bytes = found["Body"].read()
        except Exception as exc:  # botocore's stream raises errors of several libraries
            raise PayloadUnavailable(f"S3 broke off an object ({type(exc).__name__})") from exc
        return data

    def sizes(self, job_id: str) -> dict[str, int]:
        prefix = f"{self._prefix}{job_id}/"
        listed = self._call("list_objects_v2", Prefix=prefix, MaxKeys=_PAGE)
        found = listed.get("Contents", ())
        return {item["Key"].removeprefix(prefix): item["Size"] for item in found}

    def delete_job(self, job_id: str) -> None:
        while True:
            listed = self._call("list_objects_v2", Prefix=f"{self._prefix}{job_id}/", MaxKeys=_PAGE)
            names = [{"Key": item["Key"]} for item in listed.get("Contents", ())]
            if not names:
                return
            answer = self._call("delete_objects", Delete={"Objects": names, "Quiet": True})
            if errors := answer.get("Errors"):  # of single objects; the call itself succeeds
                raise PayloadUnavailable(f"S3 refused a deletion ({errors[0].get('Code')})")

    def delete_older(self, age_s: float) -> int:
        return 0  # the bucket's lifecycle deletes them

    def url(self, ref: ObjectRef, ttl_s: float) -> str:
        return self._signed(ref.key, ttl_s)

    def download_url(self, key: str, filename: str, ttl_s: float) -> str | None:
        name = f"attachment; filename*=UTF-8''{quote(filename, safe='')}"
        return self._signed(key, ttl_s, ResponseContentDisposition=name)

    def _signed(self, key: str, ttl_s: float, **arguments: str) -> str:
        url: str = self._signer.generate_presigned_url(
            "get_object",
            Params={"Bucket": self._bucket, "Key": self._prefix + key, **arguments},
            ExpiresIn=int(ttl_s),
        )
        return url

    def _call(self, operation: str, **arguments: object) -> Any:
        client = self._client
        errors = importlib.import_module("botocore.exceptions")
        exceptions = importlib.import_module("boto3.exceptions")
        try:
            return getattr(client, operation)(Bucket=self._bucket, **arguments)
        except errors.ClientError as exc:
            code = exc.response.get("Error", {}).get("Code", "")
            if code in _PAST_THE_END:
                raise _OutOfRange from exc
            if code in _MISSING:
                raise PayloadLost("the object is not there") from exc
            raise PayloadUnavailable(f"S3 refused {operation} ({code})") from exc
        except (errors.BotoCoreError, exceptions.Boto3Error) as exc:
            raise PayloadUnavailable(f"S3 does not answer ({type(exc).__name__})") from exc

    @cached_property
    def _client(self) -> Any:
        return self._opened()

    @cached_property
    def _signer(self) -> Any:
        """Signs URLs with the regional name of a bucket on AWS. Its global name leads elsewhere
        while the bucket is young, which a signature does not survive."""
        is_aws = ".amazonaws." in self._client.meta.endpoint_url
        return self._opened(s3={"addressing_style": "virtual"}) if is_aws else self._client

    def _opened(self, **options: Any) -> Any:
        try:
            boto3 = importlib.import_module("boto3")
            config = importlib.import_module("botocore.config").Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
                signature_version="s3v4",
                **options,
            )
        except ImportError as exc:
            raise PayloadUnavailable(
                "boto3 is not installed: run `pip install 'batchway[aws]'`"
            ) from exc
        # Not boto3's default session, whose creation is not thread-safe.
        session = boto3.session.Session()
        return session.client("s3", endpoint_url=self._endpoint, config=config)
