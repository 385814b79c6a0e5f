"""What is known of a Hub model's files, with a Hub that answers, refuses or fails."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "a" * 40
MODULES = b"[]"
_FIND = """
import json, sys, time
time.sleep = lambda seconds: None  # between huggingface_hub's tries
from workers.engine.interface import ModelRefused
from workers.model.files import ModelFiles
files = ModelFiles(sys.argv[1], "main")
found = []
for name in sys.argv[2:]:
    try:
        found.append(None if files.find(name) is None else "found")
    except ModelRefused as exc:
        found.append(str(exc))
print(json.dumps(found))
"""


class Hub:
    """A Hub with one model. It fails while `is_broken`."""

    def __init__(self, cache: Path) -> None:
        self.is_broken = False
        self.url = ""
        self._cache = cache

    def find(self, *names: str, model: str = "org/model") -> list[str | None]:
        """What a new process finds: "found", None, or a refusal."""
        environment = os.environ | {"HF_ENDPOINT": self.url, "HF_HOME": str(self._cache)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        command = [sys.executable, "-c", _FIND, model, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: list[str | None] = json.loads(done.stdout)
        return found


@contextmanager
def _serving(hub: Hub) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            status, headers = 200, {"ETag": '"1"', "X-Repo-Commit": COMMIT}
            if hub.is_broken:
                status, headers = 503, {}
            elif self.path.startswith("/org/gated/"):
                status, headers = 403, {"X-Error-Code": "GatedRepo"}
            elif not self.path.endswith(("modules.json", ".gitattributes")):
                status, headers = 404, headers | {"X-Error-Code": "EntryNotFound"}
            body = MODULES if status == 200 else b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    found = Hub(tmp_path)
    with _serving(found):
        yield found


def test_a_failing_hub_does_not_make_a_file_absent(hub: Hub) -> None:
    """A model without its prompts or its modules would be another one. What the Hub has told
    before is known without it."""
    assert hub.find("modules.json", "absent.json") == ["found", None]
    hub.is_broken = True

    found, absent, unknown = hub.find("modules.json", "absent.json", "other.json")

    assert (found, absent) == ("found", None)
    assert unknown is not None
    assert "whether such a model has other.json" in unknown


def test_a_download_of_all_files_tells_which_are_absent(hub: Hub) -> None:
    """Machines without a network have such downloads."""
    assert hub.find("modules.json", ".gitattributes") == ["found", "found"]
    hub.is_broken = True

    assert hub.find("modules.json", "absent.json") == ["found", None]


def test_a_model_that_the_hub_refuses_is_refused(hub: Hub) -> None:
    """It is not taken for one without files."""
    [refused] = hub.find("modules.json", model="org/gated")

    assert refused is not None
    assert "out of reach" in refused
