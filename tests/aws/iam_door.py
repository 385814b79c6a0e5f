"""A function URL with AuthType AWS_IAM in front of StreamFunction's program: calls without a valid
signature get Lambda's 403, others go on with all headers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.loopback import Handler, running_server

REGION = "eu-central-1"
CALLER = Credentials("testing", "testing-secret")
_NOT_PASSED_ON = {"connection", "content-length", "transfer-encoding", "date", "server"}


@contextmanager
def function_url(stream_url: str) -> Iterator[str]:
    """Yields its address."""

    class Door(Handler):
        def do_POST(self) -> None:
            body = self.body()
            if not _is_signed(self, body):
                self.answer(403, b'{"Message": "Forbidden"}')
                return
            with httpx.stream(
                self.command,
                stream_url + self.path,
                content=body,
                headers=self.headers.items(),
                timeout=60,
            ) as found:
                self.send_response(found.status_code)
                for name, value in found.headers.items():
                    if name not in _NOT_PASSED_ON:
                        self.send_header(name, value)
                self.end_headers()
                for part in found.iter_raw():
                    self.wfile.write(part)

        do_GET = do_POST

    with running_server(Door) as url:
        yield url


def _is_signed(call: Handler, body: bytes) -> bool:
    """Whether CALLER signed it for Lambda in this region, by AWS' own computation."""
    given = call.headers.get("authorization", "")
    parts = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=(.+?), ?SignedHeaders=(.+?), ?Signature=(\w+)", given
    )
    if parts is None:
        return False
    auth = SigV4Auth(CALLER, "lambda", REGION)
    request = AWSRequest(call.command, f"http://{call.headers['host']}{call.path}", data=body)
    for name in parts[2].split(";"):
        request.headers[name] = call.headers.get(name, "")
    request.context["timestamp"] = call.headers.get("x-amz-date", "")
    expected = auth.signature(
        auth.string_to_sign(request, auth.canonical_request(request)), request
    )
    return (parts[1], parts[3]) == (auth.scope(request), expected)
