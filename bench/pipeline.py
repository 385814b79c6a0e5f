"""A pipeline of three models, embed → rank → generate, batched in three ways.

    python -m bench.pipeline models DIR      writes small random models and DIR/models.yaml
    python -m bench.pipeline measure DIR     asks a running server, in turns

The server has a worker of each model, DIR/embed, DIR/rank and DIR/generate, served by these names,
and a gateway with `--models DIR/models.yaml`. `staged` and `flat` are its flows; `unbatched` makes
the same calls from here, one after another, so that no model has two at a time.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from bench.models import make_model, save_tokenizer
from contract.flows import Pipeline
from gateway.models.step_bodies import render
from gateway.runners.flows.definitions import load_flows
from infra.tables import markdown_table, percentile

_VOCAB_SIZE = 320
_BERT = BertConfig(
    vocab_size=_VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
# A gateway gives a flow the prompts of a call as a list.
_PROMPT = "(input.prompt if input.prompt is string else input.prompt[0])"
_FOUND = {"query": f"{{{{ {_PROMPT} }}}}", "return_documents": True}
_STEPS: list[dict[str, Any]] = [
    {
        "name": "embed",
        "model": "embed",
        "endpoint": "/v1/rerank",
        "body": {**_FOUND, "documents": "{{ input.documents }}", "top_n": 4},
    },
    {
        "name": "rank",
        "model": "rank",
        "endpoint": "/v1/rerank",
        "body": {
            **_FOUND,
            "documents": "{{ embed.results | map(attribute='document.text') }}",
            "top_n": 1,
        },
    },
    {
        "name": "generate",
        "model": "generate",
        "endpoint": "/v1/completions",
        "body": {
            "prompt": f"{{{{ rank.results[0].document.text }}}} {{{{ {_PROMPT} }}}}",
            "max_tokens": "{{ input.max_tokens }}",
            "temperature": 0,
            "ignore_eos": True,
        },
    },
]


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one way: seconds of each question from its start to its answer, and of all."""

    latencies_s: Sequence[float]
    num_output_tokens: int
    seconds: float


Ask = Callable[[dict[str, Any]], Awaitable[int]]
"""Answers a body; returns the answer's tokens."""


def write_models(folder: Path) -> None:
    """Writes the three models with random weights, and the flows."""
    torch.manual_seed(0)
    rank = BertConfig.from_dict(_BERT.to_dict() | {"num_labels": 1})
    _save_bert(BertModel(_BERT), folder / "embed")
    _save_bert(BertForSequenceClassification(rank), folder / "rank")
    kind = "sentence_transformers.models"
    parts = [("", f"{kind}.Transformer"), ("1_Pooling", f"{kind}.Pooling")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": name}
        for index, (path, name) in enumerate(parts)
    ]
    pooling = {"word_embedding_dimension": _BERT.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "embed" / "1_Pooling").mkdir(exist_ok=True)
    (folder / "embed" / "modules.json").write_text(json.dumps(modules))
    (folder / "embed" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    make_model("S", folder / "generate")
    flows = [
        {"name": batching, "pipeline": {"batching": batching, "steps": _STEPS}}
        for batching in ("staged", "flat")
    ]
    (folder / "models.yaml").write_text(json.dumps({"models": flows}, indent=2))  # YAML too


def _save_bert(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    save_tokenizer(folder, _VOCAB_SIZE, has_pairs=True)


def questions(number: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Returns bodies with a prompt and 16 documents, of 40 to 160 bytes."""
    rng = Random(seed)

    def text() -> str:
        return "".join(rng.choices("abcdefghij ", k=rng.randint(40, 160)))

    return [
        {
            "prompt": text(),
            "documents": [text() for _ in range(16)],
            "max_tokens": rng.randint(max_tokens // 4, max_tokens),
        }
        for _ in range(number)
    ]


async def measure(ask: Ask, bodies: Sequence[dict[str, Any]], num_callers: int) -> Run:
    """Runs a closed loop of callers: each asks its next question when it has an answer."""
    waiting, latencies_s, num_tokens = iter(bodies), list[float](), 0

    async def caller() -> None:
        nonlocal num_tokens
        for body in waiting:
            started_s = time.perf_counter()
            num_of_answer = await ask(body)
            num_tokens += num_of_answer
            latencies_s.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_callers):
            group.create_task(caller())
    return Run(latencies_s, num_tokens, time.perf_counter() - started_s)


class Server:
    """The server, with three ways to ask it. Each raises httpx's errors."""

    def __init__(self, client: httpx.AsyncClient, steps: Pipeline) -> None:
        self._client = client
        self._steps = steps.steps
        self._turn = asyncio.Lock()

    def ways(self) -> dict[str, Ask]:
        return {
            "staged": lambda body: self._flow("staged", body),
            "flat": lambda body: self._flow("flat", body),
            "unbatched": self._one_by_one,
        }

    async def _flow(self, name: str, body: dict[str, Any]) -> int:
        return _num_tokens(await self._post("/v1/completions", {**body, "model": name}))

    async def _one_by_one(self, body: dict[str, Any]) -> int:
        values: dict[str, Any] = {"input": body}
        async with self._turn:
            for step in self._steps:
                call = {**render(step, values), "model": step.model}
                values[step.name] = await self._post(step.endpoint, call)
        return _num_tokens(values[self._steps[-1].name])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post(path, json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def _num_tokens(answer: dict[str, Any]) -> int:
    """The tokens that the caller reads; a flow's usage counts the other steps too."""
    return int(answer["usage"]["completion_tokens"])


def report(runs: dict[str, list[Run]]) -> str:
    """Returns medians over the rounds, and the spread of throughput."""
    rows = [["batching", "output tokens/s", "lowest to highest", "latency p50, ms", "p99, ms"]]
    for way, of_way in runs.items():
        rates = [run.num_output_tokens / run.seconds for run in of_way]
        p50, p99 = (
            1000 * median(percentile(run.latencies_s, share) or 0.0 for run in of_way)
            for share in (0.5, 0.99)
        )
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        rows.append([way, f"{median(rates):,.0f}", spread, f"{p50:,.0f}", f"{p99:,.0f}"])
    return markdown_table(rows)


async def _measure_all(options: argparse.Namespace) -> dict[str, list[Run]]:
    steps = load_flows(options.folder / "models.yaml")["flat"]
    assert isinstance(steps, Pipeline)
    bodies = questions(options.requests, options.max_tokens, options.seed)
    runs: dict[str, list[Run]] = {}
    async with httpx.AsyncClient(base_url=options.base_url, timeout=300) as client:
        ways = list(Server(client, steps).ways().items())
        for _, ask in ways:
            await measure(ask, bodies[: options.callers], options.callers)  # warms up
        for number in range(options.rounds):
            first = number % len(ways)
            for way, ask in [*ways[first:], *ways[:first]]:
                run = await measure(ask, bodies, options.callers)
                runs.setdefault(way, []).append(run)
                print(f"round {number + 1} {way}: {run.seconds:.1f} s", file=sys.stderr)
    return {way: runs[way] for way, _ in ways}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.pipeline", description=__doc__)
    parser.add_argument("what", choices=("models", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=96, help="in each run (default: 96)")
    parser.add_argument("--callers", type=int, default=16, help="at once (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=32, help="(default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options = parser.parse_args()
    if options.what == "models":
        write_models(options.folder)
        return
    print(report(asyncio.run(_measure_all(options))))


if __name__ == "__main__":
    main()
