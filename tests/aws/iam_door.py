"""A function URL with AuthType AWS_IAM in front of StreamFunction's program: calls without a valid
signature get Lambda's 403, others go on with all headers."""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

REGION = "eu-central-1"
CALLER = Credentials("testing", "testing-secret")
_NOT_PASSED_ON = {"connection", "content-length", "transfer-encoding", "date", "server"}


@contextmanager
def function_url(stream_url: str) -> Iterator[str]:
    """Yields its address."""

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not _is_signed(self, body):
                headers = httpx.Headers({"content-type": "application/json"})
                self._answer(403, headers, [b'{"Message": "Forbidden"}'])
                return
            with httpx.stream(
                self.command,
                stream_url + self.path,
                content=body,
                headers=self.headers.items(),
                timeout=60,
            ) as found:
                self._answer(found.status_code, found.headers, found.iter_raw())

        do_GET = do_POST

        def _answer(self, status: int, headers: httpx.Headers, parts: Iterable[bytes]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name not in _NOT_PASSED_ON:
                    self.send_header(name, value)
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def _is_signed(call: BaseHTTPRequestHandler, body: bytes) -> bool:
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
