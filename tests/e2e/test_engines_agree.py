"""The same calls over HTTP get the same answers from vLLM and from batchway's own engine."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.infra.stack import running_demo_stack
from tests.streams import whole_stream
from tests.vllm_environment import vllm_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.campaign, pytest.mark.timeout(600)]

MODEL = "m"
PROMPT = list(range(40, 90))
_OF_A_RUN = ("id", "created", "rank", "prompt_tokens_details")
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "sampled, three choices": {"temperature": 1, "n": 3, "seed": 5},
    "limits": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "penalties": {
        "temperature": 1, "seed": 7, "presence_penalty": 1.5, "frequency_penalty": 1.0,
        "repetition_penalty": 1.3,
    },
    "bias": {"temperature": 0, "logit_bias": {"70": 30.0, "71": -100.0}},
    "stop token": {"temperature": 0, "logit_bias": {"70": 30.0}, "stop_token_ids": [70]},
    "stop string": {"temperature": 1, "seed": 8, "stop": ["e", "a"], "max_tokens": 200},
    "several prompts": {"temperature": 0, "prompt": [PROMPT, PROMPT[:9], PROMPT[5:30]]},
    "echo": {"max_tokens": 0, "echo": True, "logprobs": 0},
    "prompt scores": {"temperature": 0, "prompt_logprobs": 1},
    "regular expression": {"temperature": 1, "seed": 9, "guided_regex": "[a-f]{5,9}"},
    "too long": {"prompt": PROMPT * 200},
    "unknown token": {"prompt": [10**6]},
    "unknown parameter": {"temprature": 0},
}  # fmt: skip


def ask(url: str, change: dict[str, Any]) -> Any:
    """The status, and the body without what differs between two runs."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "return_token_ids": True, **change}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    return answer.status_code, _lasting(answer.json())


def _lasting(value: Any) -> Any:
    """Rounds log probabilities, in which float32 arithmetic differs."""
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in _OF_A_RUN}
    if isinstance(value, list):
        return [_lasting(one) for one in value]
    return round(value, 2) if isinstance(value, float) else value


def streamed_ids(url: str) -> list[int]:
    """The tokens of a sampled stream, chunk by chunk."""
    body = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 1, "seed": 5,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    chunks = (event.data["choices"][0] for event in whole_stream(answer.content))
    return [token_id for chunk in chunks for token_id in chunk["token_ids"]]


def cancelled(url: str) -> tuple[str, str]:
    """A long job's status before and after its end by its caller."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    asked = {"endpoint": "/v1/completions", "body": body}
    job = httpx.post(f"{url}/v1/jobs", json=asked, timeout=60).json()
    ended = httpx.post(f"{url}/v1/jobs/{job['id']}/cancel", timeout=60).json()
    return job["status"], ended["status"]


def answers(*arguments: str) -> dict[str, Any]:
    with running_demo_stack(f"--served-model-name={MODEL}", *arguments) as stack:
        found = {name: ask(stack.url, change) for name, change in CALLS.items()}
        return found | {"stream": streamed_ids(stack.url), "cancel": cancelled(stack.url)}


@pytest.mark.parametrize("size", ["S", "M"], ids=["S on vllm", "M"])
def test_both_engines_answer_alike(size: str, tmp_path: Path) -> None:
    vllm = vllm_arguments()  # skips where vLLM is not installed
    from bench.models import make_model

    model = f"--model={make_model(size, tmp_path)}"
    ours = answers(model, "--dtype=float32")
    theirs = answers(model, *vllm)
    for name, answer in ours.items():
        assert theirs[name] == answer, name
    assert ours["stream"] == ours["sampled, three choices"][1]["choices"][0]["token_ids"]
    assert [ours[name][0] for name in ("too long", "unknown token")] == [400, 400]
