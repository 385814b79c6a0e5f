"""Log probabilities in the formats of OpenAI's two endpoints, and in vLLM's for prompts."""

import math
from collections.abc import Sequence
from typing import Any

from contract.events import TokenLogprob
from contract.response_events import ShowLogprobs
from gateway.models.text_stream import TextStream
from gateway.models.tokens import ModelTokenizer

_LEAST = -9999.0  # OpenAI's value for an impossible token; JSON has no -inf


def chat_logprobs(tokenizer: ModelTokenizer, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **_chat_token(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [_chat_token(tokenizer, *pair) for pair in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def response_logprobs(tokenizer: ModelTokenizer | None) -> ShowLogprobs | None:
    """Returns what shows log probabilities of a response's text; None without a tokenizer."""
    return None if tokenizer is None else lambda items: chat_logprobs(tokenizer, items)["content"]


def _chat_token(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "bytes": list(raw),
        "logprob": _finite(logprob),
    }


def completion_logprobs(
    tokenizer: ModelTokenizer, items: Sequence[TokenLogprob], stream: TextStream
) -> dict[str, list[Any]]:
    """The format of /v1/completions. `stream` is the text before these tokens."""
    texts = [_text(tokenizer, item.token_id) for item in items]
    tops: list[dict[str, float]] = []
    for text, item in zip(texts, items, strict=True):
        top = {_text(tokenizer, token_id): _finite(logprob) for token_id, logprob in item.top}
        tops.append({text: _finite(item.logprob)} | top)
    return {
        "text_offset": [stream.push(item.token_id)[0] for item in items],
        "token_logprobs": [_finite(item.logprob) for item in items],
        "tokens": texts,
        "top_logprobs": tops,
    }


def listed_logprob(
    tokenizer: ModelTokenizer, item: TokenLogprob, num_top: int
) -> dict[str, dict[str, Any]]:
    """vLLM's entry for a prompt token: the token itself first, then the most likely ones, by token
    id."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(item.top, 1)}
    logprobs = {item.token_id: item.logprob} | dict(item.top[:num_top])
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _text(tokenizer, token_id),
        }
        for token_id, logprob in logprobs.items()
    }


def _text(tokenizer: ModelTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
