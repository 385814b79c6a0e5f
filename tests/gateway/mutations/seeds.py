"""Accepted requests of every route with a body.

Each text that callers choose contains CANARY, so that a log that repeats one is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.vector_worker import CLASSIFIER, EMBEDDER, RERANKER

CANARY = "canary-"
MODEL = "m"
SECRET = "whsec_" + "Y2FuYXJ5" * 4  # base64 of `canary`, four times

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
SCORE, CLASSIFY = "/v1/score", "/v1/classify"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
JOBS = "/v1/jobs"
QUOTE = "/v1/quote"
CHANGE = "/v1/jobs/{job_id}"

_SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"97": 5, "98": -100, "99": 0.5},
    "seed": 7,
}
_LABELS: dict[str, Any] = {
    "user": "canary-user",
    "safety_identifier": "canary-safety",
    "prompt_cache_key": "canary-cache",
    "metadata": {"canary-name": "canary-value", "zwei": "größer 🌍"},
}
_NOTHING: dict[str, Any] = {  # values that ask for nothing
    "response_format": {"type": "text"},
    "store": False,
    "length_penalty": 1,
    "skip_special_tokens": True,
    "use_beam_search": False,
}
_UNICODE = "canary-ü e\u0301 \u202eabc\u202c 👩\u200d👩\u200d👧 \u0000\u0007\ufeff 漢字 𝒳"


@dataclass(frozen=True, slots=True)
class Seed:
    """One accepted request; CHANGE stands for a job that waits."""

    name: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "PATCH" if self.path == CHANGE else "POST"


_PARTS = [{"type": "text", "text": text} for text in ("canary-one", "two\nlines")]


def _says(text: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def _call(path: str, name: str, headers: Mapping[str, str] | None = None, /, **fields: Any) -> Seed:
    return Seed(
        f"{path.removeprefix('/v1/')}, {name}", path, {"model": MODEL, **fields}, headers or {}
    )


def _chat(name: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Seed:
    least = {"messages": [_says("canary-hello")], "max_tokens": 4}
    return _call(CHAT, name, headers, **least | fields)


def _completion(name: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Seed:
    least = {"prompt": "canary-once", "max_tokens": 4}
    return _call(COMPLETIONS, name, headers, **least | fields)


_CALLS: tuple[Seed, ...] = (
    _chat("plain"),
    _chat(
        "parts and roles",
        messages=[
            _says("canary-rules", "system"),
            _says("canary-more", "developer"),
            _says(_PARTS, name="canary-ann"),
            _says("canary-well", "assistant"),
            _says("and?"),
        ],
    ),
    _chat("unicode", messages=[_says(_UNICODE)]),
    _chat("log probabilities", logprobs=True, top_logprobs=3, n=2, temperature=0.0),
    _chat("stream", stream=True, stream_options={"include_usage": True}),
    _chat("stream of choices", stream=True, n=3, logprobs=True, seed=-1),
    _chat("stops", stop=["canary-stop", "\n\n", "Ω"], stop_token_ids=[65, 66], min_tokens=1),
    _chat("sampling", **_SAMPLING),
    _chat("labels", service_tier="flex", **_LABELS),
    _chat("lengths", max_tokens=5, max_completion_tokens=5, min_tokens=2, ignore_eos=True),
    _chat("nothing more", parallel_tool_calls=None, modalities=["text"], **_NOTHING),
    _chat("prompt shown", prompt_logprobs=2, return_token_ids=True, stop="canary-end"),
    _chat("as a job", {"prefer": "respond-async"}, service_tier="auto"),
    _chat("key", {"idempotency-key": "canary-key"}, stream=True, on_disconnect="continue"),
    _completion("plain"),
    _completion("token ids", prompt=[99, 97, 110, 97, 114, 121, 45, 258, 0]),
    _completion("list of one", prompt=["canary-listed"], service_tier="priority"),
    _completion("ids in a list", prompt=[[99, 97, 110]], return_token_ids=True),
    _completion("several prompts", prompt=["canary-a", "canary-b", _UNICODE], n=2, logprobs=1),
    _completion("several lists of ids", prompt=[[99, 97], [110, 97, 114]], stream=True, echo=True),
    _completion("scored", echo=True, max_tokens=0, logprobs=2),
    _completion("echo", echo=True, logprobs=0, prompt_logprobs=1, n=2, best_of=2),
    _completion("choices", n=4, best_of=4, seed=2**63 - 1, temperature=2.0),
    _completion("stream", stream=True, n=2, logprobs=3, stream_options={"include_usage": False}),
    _completion("stream of an echo", stream=True, echo=True, logprobs=1, return_token_ids=True),
    _completion("sampling", **_SAMPLING, stop="canary-stop"),
    _completion("unicode", prompt=_UNICODE, stop=["é", "👩"], seed=-(2**63)),
    _completion("waits", {"prefer": "wait=20"}, on_disconnect="cancel", **_LABELS),
    _completion("as a job", {"prefer": "respond-async, wait=0"}, service_tier="default"),
    _completion("key", {"idempotency-key": "canary-key"}, max_tokens=6, ignore_eos=True),
    _completion("nulls", stop=None, n=None, seed=None, logit_bias=None, stream=None, top_p=None),
    _completion("nothing more", suffix="", **_NOTHING),
)


_VECTORS: tuple[Seed, ...] = (
    _call(EMBEDDINGS, "plain", model=EMBEDDER, input=["canary-a", "b"], **_LABELS),
    _call(
        EMBEDDINGS,
        "all fields",
        {"idempotency-key": "canary-key"},
        model=EMBEDDER,
        input="canary-text",
        dimensions=4,
        input_type="query",
        encoding_format="base64",
    ),
    _call(EMBEDDINGS, "ids", model=EMBEDDER, input=[[99, 97], [110]]),
    _call(
        RERANK,
        "all fields",
        {"prefer": "wait=20"},
        model=RERANKER,
        query="canary-query",
        documents=["canary-one", {"text": "canary-two"}],
        top_n=1,
        return_documents=True,
    ),
    _call(SCORE, "plain", model=EMBEDDER, text_1="canary-one", text_2=["canary-two"]),
    _call(CLASSIFY, "plain", model=CLASSIFIER, input=["canary-text"]),
)


_RESPONSES: tuple[Seed, ...] = (
    _call(RESPONSES, "plain", input="canary-hello", max_output_tokens=16),
    _call(
        RESPONSES,
        "items",
        instructions="canary-rules",
        input=[
            _says([{"type": "input_text", "text": "canary-one"}]),
            _says("canary-two", "assistant"),
            _says("canary-three", type="message"),
        ],
        max_output_tokens=16,
        temperature=0.5,
        metadata=_LABELS["metadata"],
    ),
)


_USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"canary-a": [1]}}
_MESSAGES: tuple[Seed, ...] = (
    _call(MESSAGES, "plain", messages=[_says("canary-hello")], max_tokens=4),
    _call(
        MESSAGES,
        "blocks",
        {"anthropic-version": "2023-06-01"},
        system=_PARTS,
        messages=[
            _says([{"type": "text", "text": "canary-one", "cache_control": {"type": "ephemeral"}}]),
            _says(
                [{"type": "thinking", "thinking": "canary-two", "signature": "x"}, _USE],
                "assistant",
            ),
            _says([{"type": "tool_result", "tool_use_id": "toolu_1", "content": _PARTS}]),
        ],
        max_tokens=4,
        stop_sequences=["canary-end"],
        temperature=0.5,
        top_k=40,
        stream=True,
        thinking={"type": "adaptive"},
        metadata={"user_id": "canary-user"},
    ),
)


def _job(
    name: str, call: str, headers: Mapping[str, str] | None = None, path: str = JOBS, **fields: Any
) -> Seed:
    """A job of one of the calls, by its name."""
    [seed] = [seed for seed in (*_CALLS, *_VECTORS) if seed.name == call]
    body = {"endpoint": seed.path, "body": seed.body, **fields}
    return Seed(f"{path.rpartition('/')[2]}, {name}", path, body, headers or {})


_CALLBACK = {
    "url": "https://receiver.invalid/canary-path?token=canary-token",
    "secret": SECRET,
    "payload": "full",
    "events": ["job.started", "job.progress"],
    "progress_tokens": 2,
}
_JOBS: tuple[Seed, ...] = (
    _job("plain", "completions, plain"),
    _job("callback", "chat/completions, log probabilities", callback=_CALLBACK),
    _job(
        "all fields",
        "completions, sampling",
        {"idempotency-key": "canary-key"},
        lane="batch",
        deadline_s=3_600,
        retention_s=7_200.5,
        metadata={"canary-name": "canary-value", "größe": "🌍"},
        callback={"url": "https://receiver.invalid:8443/", "secret": SECRET},
    ),
    _job("nulls", "chat/completions, parts and roles", lane=None, callback=None),
    _job("stream", "chat/completions, stream", lane="scoring"),
    _job("several prompts", "completions, several prompts"),
    _job("embeddings", "embeddings, plain"),
    _job("plain", "completions, plain", path=QUOTE, lane="interactive", deadline_s=60.5),
    _job("chat", "chat/completions, log probabilities", path=QUOTE, callback=_CALLBACK),
    Seed("change, lane", CHANGE, {"lane": "batch"}),
    Seed("change, deadline", CHANGE, {"deadline_s": 600}),
    Seed("change, both", CHANGE, {"lane": "standard", "deadline_s": 604_800}),
)

SEEDS: tuple[Seed, ...] = _CALLS + _VECTORS + _RESPONSES + _MESSAGES + _JOBS
