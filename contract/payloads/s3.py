"""Stores objects in a bucket of S3 or a compatible server.

Credentials and region come from boto3's chain (environment, profile, role). boto3 is imported at
the first call, so that gateways on Lambda without large payloads start faster. The bucket's
lifecycle, which the operator sets, expires old objects.
"""

import importlib
from functools import cached_property
from typing import Any

from contract.jobs import ObjectRef
from contract.payloads.store import PayloadLost, PayloadUnavailable, check_place, checked, reference

_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 10.0
_ATTEMPTS = 3
_MISSING = ("NoSuchKey", "404")
_PAGE = 1000  # keys of one deletion


class S3Store:
    """Objects below `prefix` ('' or ending in a slash) of a bucket. `endpoint`: None for AWS."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None = None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._endpoint = endpoint
        self.name = f"s3://{bucket}/{prefix}"

    def put(self, key: str, data: bytes) -> ObjectRef:
        ref = reference(self.name, key, data)
        self._call("put_object", Key=self._prefix + key, Body=data)
        return ref

    def get(self, ref: ObjectRef) -> bytes:
        check_place(self.name, ref)
        found = self._call("get_object", Key=self._prefix + ref.key)
        try:
            data: bytes = found["Body"].read()
        except Exception as exc:  # botocore's stream raises errors of several libraries
            raise PayloadUnavailable(f"S3 broke off an object ({type(exc).__name__})") from exc
        return checked(ref, data)

    def delete_job(self, job_id: str) -> None:
        while True:
            listed = self._call("list_objects_v2", Prefix=f"{self._prefix}{job_id}/", MaxKeys=_PAGE)
            names = [{"Key": item["Key"]} for item in listed.get("Contents", ())]
            if not names:
                return
            self._call("delete_objects", Delete={"Objects": names, "Quiet": True})

    def delete_older(self, age_s: float) -> int:
        return 0  # the bucket's lifecycle deletes them

    def url(self, ref: ObjectRef, ttl_s: float) -> str:
        url: str = self._client.generate_presigned_url(
            "get_object",
            Params={"Bucket": self._bucket, "Key": self._prefix + ref.key},
            ExpiresIn=int(ttl_s),
        )
        return url

    def _call(self, operation: str, **arguments: object) -> Any:
        errors = importlib.import_module("botocore.exceptions")
        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except errors.ClientError as exc:
            code = exc.response.get("Error", {}).get("Code", "")
            if code in _MISSING:
                raise PayloadLost("the object is not there") from exc
            raise PayloadUnavailable(f"S3 refused {operation} ({code})") from exc
        except errors.BotoCoreError as exc:
            raise PayloadUnavailable(f"S3 does not answer ({type(exc).__name__})") from exc

    @cached_property
    def _client(self) -> Any:
        try:
            boto3 = importlib.import_module("boto3")
            config = importlib.import_module("botocore.config").Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
                signature_version="s3v4",
            )
        except ImportError as exc:
            raise PayloadUnavailable(
                "boto3 is not installed: run `pip install 'batchway[aws]'`"
            ) from exc
        # Not boto3's default session, whose creation is not thread-safe.
        session = boto3.session.Session()
        return session.client("s3", endpoint_url=self._endpoint, config=config)
