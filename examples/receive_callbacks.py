"""Receives callbacks: verifies each, answers 204, and handles each event once.

    CALLBACK_SECRET=whsec_… python -m examples.receive_callbacks 9000

A callback may be delivered more than once, with the same `webhook-id`. A receiver should answer
before it does slow work; this one only prints a line. It needs a proxy that terminates TLS.
"""

import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from batchway_client import BadSignature, verify_webhook

MAX_BYTES = 1_000_000


class Receiver(BaseHTTPRequestHandler):
    """Handles one delivery. The server has `secret` and `seen`."""

    server: "CallbackServer"

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if length > MAX_BYTES:
            self.send_error(413)
            return
        body = self.rfile.read(length)
        try:
            event = verify_webhook(self.server.secret, dict(self.headers), body)
        except BadSignature:
            self.send_error(400)
            return
        webhook_id = self.headers["webhook-id"]
        if webhook_id not in self.server.seen:  # a real receiver uses a database
            self.server.seen.add(webhook_id)
            print(f"{webhook_id} {event['type']} {event['data']['id']}", flush=True)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests; do_POST prints each delivery."""


class CallbackServer(ThreadingHTTPServer):
    """Listens on loopback; port 0 chooses a free port."""

    def __init__(self, port: int, secret: str) -> None:
        super().__init__(("127.0.0.1", port), Receiver)
        self.secret = secret
        self.seen: set[str] = set()


def main(port: int, secret: str) -> None:
    with CallbackServer(port, secret) as server:
        print(f"listening on port {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), os.environ["CALLBACK_SECRET"])
