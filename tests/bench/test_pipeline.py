"""`bench.pipeline`: the same calls in three ways, counted."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.pipeline import Run, Server, measure, questions, report, write_models
from contract.flows import Pipeline
from gateway.runners.flows.definitions import load_flows

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_models(path)
    return path


def test_models_and_flows_are_written(folder: Path) -> None:
    """A folder for each model of the flows."""
    flows = load_flows(folder / "models.yaml")
    assert list(flows) == ["staged", "flat"]
    for flow in flows.values():
        assert isinstance(flow, Pipeline)
        assert [step.model for step in flow.steps] == ["embed", "rank", "generate"]
        assert all((folder / step.model / "model.safetensors").exists() for step in flow.steps)


def test_questions_are_the_same_each_time() -> None:
    """By their seed, with lengths within the bounds."""
    assert questions(5, 32, seed=1) == questions(5, 32, seed=1) != questions(5, 32, seed=2)
    assert all(8 <= body["max_tokens"] <= 32 for body in questions(50, 32, seed=1))


class Models(ThreadingHTTPServer):
    """Rerankers that keep the order, and a generator; remembers its calls."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.calls: list[tuple[str, Any]] = []
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()


class Answers(BaseHTTPRequestHandler):
    server: Models

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.calls.append((self.path, body))
            self.server.num_running += 1
            self.server.most_running = max(self.server.most_running, self.server.num_running)
        if self.path == "/v1/rerank":
            texts = body["documents"][: body["top_n"]]
            answer: Any = {"results": [{"document": {"text": text}} for text in texts]}
        else:
            answer = {"usage": {"completion_tokens": body["max_tokens"]}}
        content = json.dumps(answer).encode()
        with self.server.lock:
            self.server.num_running -= 1
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def models() -> Iterator[Models]:
    with Models() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_unbatched_makes_the_steps_calls_one_at_a_time(folder: Path, models: Models) -> None:
    """Each with the answers before it, for any number of callers; a flow's call is one."""
    flow = load_flows(folder / "models.yaml")["flat"]
    assert isinstance(flow, Pipeline)
    bodies = questions(6, 32, seed=0)
    url = f"http://127.0.0.1:{models.server_port}"
    async with httpx.AsyncClient(base_url=url) as client:
        ways = Server(client, flow).ways()
        run = await measure(ways["unbatched"], bodies, num_callers=4)
        (_, embed), (_, rank), (_, generate) = models.calls[:3]
        assert models.most_running == 1
        assert len(models.calls) == 18
        assert embed["model"] == "embed"
        assert rank["documents"] == embed["documents"][:4]
        assert generate["prompt"] == f"{rank['documents'][0]} {rank['query']}"
        assert run.num_output_tokens == sum(body["max_tokens"] for body in bodies)
        assert len(run.latencies_s) == 6

        models.calls.clear()
        await measure(ways["staged"], bodies[:1], num_callers=1)
    assert models.calls == [("/v1/completions", bodies[0] | {"model": "staged"})]


def test_the_table_has_medians_over_rounds() -> None:
    """And the spread of throughput."""
    runs = [Run([0.1, 0.2], tokens, 2.0) for tokens in (100, 400, 200)]
    assert report({"flat": runs}).splitlines()[-1] == "| flat | 100 | 50 to 200 | 100 | 200 |"
